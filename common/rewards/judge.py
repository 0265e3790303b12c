"""A language model as judge, behind any server that speaks OpenAI's protocol: it decides what rules cannot.

    JUDGE_URLS=http://node7:18901/v1,http://node8:18901/v1 torchrun ... grpo.py ...

JUDGE_MODEL is what each server calls it (default: what it serves), JUDGE_API_KEY its key. Proxies are ignored: a judge
stands in the cluster. A case that the judge does not answer has no verdict: none is ever taken for wrong. Neither the
key nor what stands before the @ of an address is ever shown, whatever a server says.
"""

import asyncio
import copy
import threading
import time
import zlib
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import count
from urllib.parse import unquote, urlsplit

from common.files import shorten
from common.processes import sign_of_life
from common.progress import Progress
from common.rewards.judge_prompt import PROBES, Case, messages, verdict_of

IN_FLIGHT = 64  # requests of a rank
TRIES = 5  # replies that say neither, or failures while others are answered, until a case stays without a verdict
MAX_TOKENS = 1024  # of a reply: some models think before they answer
MAX_BODY = 2**20  # bytes of a reply, unpacked
MAX_NAME = 200  # characters of a model's name
CACHED = 200_000  # verdicts


class JudgeUnavailable(ConnectionError):
    """No judge has answered for as long as JUDGE_PATIENCE."""


@dataclass
class Server:
    url: str  # as it is shown
    client: object  # openai.AsyncOpenAI
    model: str = ""  # what it serves; "" until it is asked
    used: int = 0  # requests
    rests_until: float = 0.0  # after a failure the others are asked first
    limits: bool = False  # whether it has said last that it gets too many requests


class Judge:
    """Verdicts of one or several servers, which are taken in turn.

    agree: the largest of each number over all ranks, which call it together; stopping: whether the run is to end;
    at_outage: what saves the beginning of a step, if the run ends in it.
    """

    DEADLINE_S = 60.0  # of one request, from its first byte to its last
    BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
    REST_S = 30.0
    TICK_S, MINUTE_S = 1.0, 60.0  # between two looks at what has come, and between two lines about silence

    def __init__(
        self,
        urls: Iterable[str],
        model: str = "",
        api_key: str = "EMPTY",
        *,
        patience_s: float,
        agree: Callable[[list[float]], list[float]] = list,
        stopping: Callable[[], bool] = bool,
        notice: Callable[[str], None] = print,
        at_outage: Iterable[Callable[[int], object]] = (),
    ):
        urls = list(urls)
        self.servers = [Server(without_user(url), connect(url, api_key)) for url in urls]
        self.secrets = secrets_of(urls, api_key)
        self.model, self.patience_s = model, patience_s
        self.agree, self.stopping, self.notice, self.at_outage = agree, stopping, notice, at_outage
        self.verdicts: dict[Case, float] = {}
        self.heard, self.trouble = 0.0, ""  # when any server answered last; why one did not
        self.evaluates, self.lost_s = False, 0.0
        self.slots = asyncio.Semaphore(IN_FLIGHT)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="judge", daemon=True).start()

    def for_evaluation(self) -> "Judge":
        """The same for one evaluation: it is asked again for JUDGE_PATIENCE in all, and its silence ends no run."""
        judge = copy.copy(self)
        judge.evaluates = True
        return judge

    @property
    def name(self) -> str:
        return ", ".join(server.url for server in self.servers)

    def hide(self, text: str) -> str:
        """What a server, or what sends to it, has said, without `secrets`."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text

    # --- what the trainer calls -----------------------------------------------------------------------------------

    def settle(self, cases: list[Case]) -> list[float | None]:
        """The verdict of each case, None where there is none. All ranks call it, and leave it, together.

        JudgeUnavailable, on all ranks alike, if on one of them no server has answered for JUDGE_PATIENCE.
        """
        for case in list(self.verdicts)[: max(0, len(self.verdicts) - CACHED)]:
            del self.verdicts[case]
        known = {case: self.verdicts[case] for case in cases if case in self.verdicts}
        asked = {case: self._start(self._judge(case)) for case in dict.fromkeys(cases) if case not in known}
        try:
            self._wait(list(asked.values()))
        finally:
            for future in asked.values():
                future.cancel()
        known |= {case: future.result() for case, future in asked.items() if not future.cancelled()}
        return [known.get(case) for case in cases]

    def probe(self) -> None:
        """Ask each server for a right and a wrong pair. ValueError for one that judges badly; JudgeUnavailable if
        none answers, a warning if only some do."""
        silent = []
        for future in [self._start(self._probe(server)) for server in self.servers]:
            problem = future.result()
            silent += [problem] if problem else []
        if len(silent) == len(self.servers):
            raise JudgeUnavailable("; ".join(silent))
        for problem in silent:
            self.notice(f"warning: a judge does not answer: {problem}")

    # --- waiting --------------------------------------------------------------------------------------------------

    def _start(self, coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def _wait(self, futures: list[Future]) -> None:
        """Until all ranks have what they asked for, or have given up."""
        began = told = time.monotonic()
        progress, done = Progress("judgements", max(len(futures), 1)), 0
        while True:
            pending = wait(futures, timeout=self.TICK_S).not_done
            sign_of_life()
            now = time.monotonic()
            silence = now - max(began, self.heard) if pending else 0.0
            if self.evaluates and self.lost_s + now - began > self.patience_s:
                pending = pending if silence < min(self.DEADLINE_S, self.patience_s) else ()
            waiting, silence = self.agree([float(len(pending)), silence])
            if waiting and silence > self.patience_s and not self.evaluates:
                raise JudgeUnavailable(self._told(silence))
            if waiting and silence > 10 * self.TICK_S and self.stopping():  # the step before can be saved
                if not self.evaluates:
                    raise JudgeUnavailable(f"the run is to end, and {self._told(silence)}")
                waiting = 0.0
            if not waiting:
                break
            if silence < self.MINUTE_S:
                progress.add(len(futures) - len(pending) - done)
                done = len(futures) - len(pending)
            elif now - told >= self.MINUTE_S:
                told = now
                patience = f"JUDGE_PATIENCE is {self.patience_s / 60:g}"
                self.notice(f"judge: {self._told(silence)}; {len(pending)} answers wait here, {patience}")
        if not all(future.done() for future in futures):
            self.lost_s += time.monotonic() - began

    def _told(self, silence: float) -> str:
        """The silence may be another rank's."""
        why = self.trouble or "nothing has failed on this rank"
        return f"no answer from {self.name} for {silence / 60:.3g} minutes ({why})"

    # --- asking, in the thread of the loop --------------------------------------------------------------------------

    async def _judge(self, case: Case) -> float | None:
        """Ask until there is a verdict; None when it was asked often enough by what `TRIES` says.

        A failure is the case's own only if a server answers other things meanwhile; else it is an outage, which
        `_wait` watches.
        """
        unclear, own_failures = 0, 0
        tried: Counter[str] = Counter()  # by server
        for attempt in count():
            asked_at = time.monotonic()
            reply = await self._ask(case, attempt, tried)
            if reply is not None:
                verdict = verdict_of(reply)
                if verdict is not None:
                    self.verdicts[case] = verdict
                    return verdict
                unclear += 1
                if unclear == TRIES:
                    return None
                continue
            fewest = min(tried[server.url] for server in self.servers)
            counts = 0.1 if any(server.limits for server in self.servers) else 1  # that is not the case's fault
            if not self.evaluates:  # which goes on asking until `_wait` has heard nothing for too long
                own_failures += counts * (self.heard > asked_at or (fewest >= TRIES and await self._is_alive()))
            if own_failures >= TRIES:
                return None
            if fewest:  # else there is a server that may work
                await asyncio.sleep(min(self.BACKOFF_S * 2 ** min(fewest - 1, 9), self.LONGEST_BACKOFF_S))

    async def _is_alive(self) -> bool:
        """Whether a server answers another case."""
        return await self._ask(next(iter(PROBES)), 0, Counter()) is not None

    async def _ask(self, case: Case, attempt: int, tried: Counter[str]) -> str | None:
        """The reply of the server that was tried least with this case, does not rest, and was used least."""
        async with self.slots:
            now = time.monotonic()
            order = [(tried[s.url], max(0.0, s.rests_until - now), s.used) for s in self.servers]
            server = self.servers[order.index(min(order))]
            tried[server.url] += 1
            return await self._reply(server, case, attempt)

    async def _reply(self, server: Server, case: Case, attempt: int) -> str | None:
        """A reply, "" if the server refuses the case itself; None, and `trouble`, if there was no answer."""
        import openai

        server.used += 1
        try:
            reply = await asyncio.wait_for(self._complete(server, case, attempt), self.DEADLINE_S)
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:  # too long for its context, ...
            reply, self.trouble = "", f"{server.url}: {shorten(self.hide(str(error)), 200)}"
        except Exception as error:  # whatever a server sends, or does not
            why = f"no reply in {self.DEADLINE_S:g} s" if isinstance(error, TimeoutError) else str(error)
            cause = f" ({error.__cause__})" if error.__cause__ else ""
            self.trouble = f"{server.url}: {type(error).__name__}: {shorten(self.hide(why + cause), 200)}"
            server.rests_until, server.model = time.monotonic() + self.REST_S, ""
            server.limits = isinstance(error, openai.RateLimitError)
            return None
        server.rests_until, server.limits, self.heard = 0.0, False, time.monotonic()
        return reply

    async def _complete(self, server: Server, case: Case, attempt: int) -> str:
        """Greedy at first; a reply that says neither would come again, so that later ones are sampled. "" is one that
        was cut: it may quote our question."""
        if not self.model and not server.model:
            listed = await server.client.models.with_raw_response.list()
            server.model = first_model(listed.http_response.json())
        completion = await server.client.chat.completions.with_raw_response.create(
            model=self.model or server.model,
            messages=messages(case),
            temperature=0.5 if attempt else 0.0,
            seed=attempt,
            max_tokens=MAX_TOKENS,
        )
        # as plain JSON: the client would make objects of a million entries, for seconds
        choice = completion.http_response.json()["choices"][0]
        content = choice["message"].get("content") if choice.get("finish_reason") != "length" else ""
        if isinstance(content, list):  # of parts, as servers of models that reason may send it
            content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
        return content if isinstance(content, str) else ""

    async def _probe(self, server: Server) -> str:
        """Why it does not answer, or "". ValueError if it judges a pair wrongly, or not at all."""
        for case, right in PROBES.items():
            for attempt in range(TRIES):
                reply = await self._reply(server, case, attempt)
                if reply is None:
                    return self.trouble
                if verdict_of(reply) is not None:
                    break
            if verdict_of(reply) != right:
                said = shorten(self.hide(reply), 100) or self.trouble or "nothing"
                model = self.hide(self.model or server.model)
                raise ValueError(
                    f"the judge {model} at {server.url} cannot judge: that {case.truth!r} and "
                    f"{case.answer!r} are {'the same' if right else 'different'} it should say by "
                    f'"Judgement: {right:.0f}", and says {said!r}. Serve a better model, or take it as it is with '
                    "JUDGE_PROBE=0"
                )
        return ""


def without_user(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def secrets_of(urls: Iterable[str], api_key: str) -> list[str]:
    """Key and passwords in the forms in which an error may repeat them, the longest first; what is shorter than four
    characters is none, nor is the key of servers that want none."""
    secrets = {api_key} - {"EMPTY"}
    for url in urls:
        user, _, password = urlsplit(url).netloc.rpartition("@")[0].partition(":")
        pair = f"{unquote(user)}:{unquote(password)}"
        alone = password or user
        secrets |= {f"{user}:{password}", alone, pair, unquote(alone), b64encode(pair.encode()).decode()}
    secrets |= {repr(secret)[1:-1] for secret in secrets}
    return sorted((secret for secret in secrets if len(secret) > 3), key=len, reverse=True)


def first_model(listed: object) -> str:
    """The name of the first model of what /models replies. ValueError if it has none that can be asked for."""
    try:
        name = listed["data"][0]["id"]
    except (LookupError, TypeError):
        name = None
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"/models names no model but {name!r:.40}: set JUDGE_MODEL")
    return name


async def read_body(response) -> None:
    """Take the body in place of the client, which would keep whatever comes: ValueError above `MAX_BODY`."""
    import httpx2

    body = bytearray()
    async for piece in response.stream:
        body += piece
        if len(body) > MAX_BODY:
            raise ValueError(f"a reply of more than {MAX_BODY} bytes")
    packing = response.headers.pop("Content-Encoding", "identity").lower()
    if packing == "gzip":
        body = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(body, MAX_BODY + 1)
        if len(body) > MAX_BODY:
            raise ValueError(f"a reply of more than {MAX_BODY} bytes, unpacked")
    elif packing != "identity":
        raise ValueError(f"a reply in the encoding {packing:.40}, which was not asked for")
    await response.stream.aclose()
    response.stream = httpx2.ByteStream(bytes(body))


def connect(url: str, api_key: str):
    """A client that takes neither proxies nor anything else from the environment, goes nowhere else, and leaves
    retries to the judge."""
    import openai

    http = openai.DefaultAsyncHttpxClient(
        trust_env=False,
        follow_redirects=False,
        headers={"Accept-Encoding": "identity"},
        event_hooks={"response": [read_body]},
    )
    return openai.AsyncOpenAI(base_url=url, api_key=api_key, http_client=http, max_retries=0)

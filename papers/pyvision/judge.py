"""A language model as judge, behind any server that speaks OpenAI's protocol: it decides what rules
cannot.

    JUDGE_URLS=http://node7:18901/v1,http://node8:18901/v1 torchrun ... grpo.py ...

JUDGE_MODEL is what each server calls it (default: what it serves), JUDGE_API_KEY its key. Proxies
are ignored: a judge stands in the cluster. A case that the judge does not answer has no verdict:
none is ever taken for wrong. No message repeats what a server says, which may hold the key.
"""

import asyncio
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import count
from math import inf
from urllib.parse import urlsplit

import httpx2
import openai

from papers.pyvision.judge_prompt import PROBES, Case, messages, verdict_of

REQUEST_S = 60.0  # without a byte of the reply
RETRIES = 4  # by the client, which waits longer each time
PAUSE_S = 1.0  # then, before another server is asked
# unclear replies, or failures while other cases are answered, until a case has no verdict
TRIES = 5
MAX_TOKENS = 1024  # of a reply: some models think before they answer
MAX_BODY = 2**20  # bytes of a reply
CACHED = 200_000  # verdicts
# between two lines about servers that do not answer; a failure that old is tried anew
MINUTE_S = 60.0
PATIENCE_S = 540.0  # after so long without any answer nothing waits any more


@dataclass
class Server:
    host: str  # as it is shown
    client: openai.AsyncOpenAI
    model: str  # that is asked for; "": the first one that it lists
    listed: str = ""

    async def judge(self, case: Case, attempt: int) -> float | None:
        """1.0 or 0.0; None if the reply says neither, or the case is refused. ConnectionError
        without a reply.

        The first reply is greedy; since it would come again, later ones are sampled.
        """
        try:
            if not self.model and not self.listed:
                models = await self.client.models.list()
                self.listed = models.data[0].id
            completion = await self.client.chat.completions.create(
                model=self.model or self.listed,
                messages=messages(case),
                temperature=0.5 if attempt else 0.0,
                seed=attempt,
                max_tokens=MAX_TOKENS,
            )
            (choice,) = completion.choices
            text = choice.message.content
            is_cut = choice.finish_reason == "length"  # then it may quote the question
        except (openai.BadRequestError, openai.UnprocessableEntityError):
            # too long for its context, ...
            return None
        except Exception as error:  # whatever a server sends, or does not
            self.listed = ""
            status = getattr(error, "status_code", "")
            raise ConnectionError(
                f"{self.host}: {type(error).__name__} {status}".rstrip()
            ) from None
        if is_cut or not isinstance(text, str):
            return None
        return verdict_of(text)


class Judge:
    """Verdicts of one or several servers, which are taken in turn."""

    def __init__(
        self, urls: Iterable[str], model: str = "", api_key: str = "EMPTY", probes: bool = True
    ):
        self.servers = [connect(url, model, api_key) for url in urls]
        self.numbers = count()  # of cases: the first server of each
        self.verdicts: dict[Case, float] = {}
        self.answered_at = self.told_at = 0.0
        self.silent_since = inf  # when the first request was made after which none was answered
        self.ended_at = 0.0  # when the last request ended
        self.lock = asyncio.Lock()
        self.trusted = not probes

    async def probe(self) -> None:
        """Ask each server for a right and a wrong pair, once. ValueError for one that judges badly,
        or if all are silent."""
        async with self.lock:
            if self.trusted:
                return
            silent = []
            for server in self.servers:
                try:
                    await probe(server)
                except ConnectionError as failure:
                    silent.append(str(failure))
            if len(silent) == len(self.servers):
                raise ValueError(
                    f"no judge answers ({'; '.join(silent)}): start it, or set JUDGE_URLS"
                )
            for failure in silent:
                print(f"warning: a judge does not answer: {failure}", flush=True)
            self.trusted = True

    async def verdict(self, case: Case) -> float:
        """1.0 or 0.0. Servers that do not answer are waited for.

        ConnectionError if none has answered for PATIENCE_S, which is at once for all cases that
        come within a minute of the last failure; later ones, as those of the next step, ask again.
        ValueError if the replies say neither, or if the case fails again and again while others are
        answered.
        """
        if case in self.verdicts:
            return self.verdicts[case]
        if len(self.verdicts) >= CACHED:
            self.verdicts.clear()
        number = next(self.numbers)
        unclear = 0
        failures = 0
        while unclear < TRIES and failures < TRIES * len(self.servers):
            server = self.servers[number % len(self.servers)]
            number += 1
            asked_at = time.monotonic()
            if asked_at - self.silent_since > PATIENCE_S and asked_at - self.ended_at < MINUTE_S:
                raise ConnectionError(f"no judge has answered for {PATIENCE_S:g} s")
            self.silent_since = min(self.silent_since, asked_at)
            try:
                verdict = await server.judge(case, attempt=unclear)
            except ConnectionError as failure:
                self.tell(failure)
                if self.answered_at > asked_at:
                    failures += 1
                await asyncio.sleep(PAUSE_S)
                continue
            finally:  # the deadline of the reward function may have ended it, too
                self.ended_at = time.monotonic()
            self.answered_at = self.ended_at
            self.silent_since = inf
            if verdict is not None:
                self.verdicts[case] = verdict
                return verdict
            unclear += 1
        raise ValueError(
            "no verdict by the judge: its replies say neither 1 nor 0, or fail for this case alone"
        )

    def tell(self, failure: ConnectionError) -> None:
        """Once a minute."""
        now = time.monotonic()
        if now - self.told_at >= MINUTE_S:
            self.told_at = now
            print(f"warning: a judge does not answer: {failure}", flush=True)


async def probe(server: Server) -> None:
    """ValueError if it judges a pair wrongly, or not at all."""
    for case, right in PROBES.items():
        verdict = None
        for attempt in range(TRIES):
            if verdict is None:
                verdict = await server.judge(case, attempt)
        if verdict != right:
            relation = "the same" if right else "different"
            raise ValueError(
                f"the judge at {server.host} cannot judge: {case.truth!r} and {case.answer!r} "
                f"are {relation}, which "
                "it does not say. Serve a better model, or take it as it is with JUDGE_PROBE=0"
            )


def connect(url: str, model: str, api_key: str) -> Server:
    """A client that takes no proxy from the environment and goes nowhere else. ValueError for what
    is no address."""
    try:
        parts = urlsplit(url)
        host = f"{parts.hostname}:{parts.port}" if parts.port else f"{parts.hostname}"
    except ValueError:
        parts = None
    if (
        parts is None
        or parts.scheme not in ("http", "https")
        or not parts.hostname
        or "@" in parts.path
    ):
        # it may hold a password
        raise ValueError("JUDGE_URLS: one of them is no http://HOST:PORT/v1")
    http = openai.DefaultAsyncHttpxClient(
        trust_env=False,
        follow_redirects=False,
        headers={"Accept-Encoding": "identity"},
        event_hooks={"response": [take_body]},
    )
    options = {"http_client": http, "timeout": REQUEST_S, "max_retries": RETRIES}
    return Server(host, openai.AsyncOpenAI(base_url=url, api_key=api_key, **options), model)


async def take_body(response: httpx2.Response) -> None:
    """Read the body in place of the client, which would keep whatever comes. One that is larger
    than MAX_BODY, or packed, which was not asked for, becomes a refusal: no verdict."""
    body = b""
    is_refused = response.headers.pop("Content-Encoding", "identity").lower() != "identity"
    if not is_refused:
        async for piece in response.stream:
            body += piece
            is_refused = len(body) > MAX_BODY
            if is_refused:
                break
    await response.stream.aclose()
    if is_refused:
        response.status_code = 422
        body = b""
    response.stream = httpx2.ByteStream(body)


@cache
def open_judge() -> Judge:
    """The one that the environment names. ValueError if it names none."""
    urls = [url.strip() for url in os.environ.get("JUDGE_URLS", "").split(",") if url.strip()]
    if not urls:
        raise ValueError(
            "a judge decides rows of this data: set JUDGE_URLS (papers/pyvision/README.md)"
        )
    return Judge(
        urls,
        model=os.environ.get("JUDGE_MODEL", ""),
        api_key=os.environ.get("JUDGE_API_KEY", "").strip() or "EMPTY",
        probes=os.environ.get("JUDGE_PROBE") != "0",
    )

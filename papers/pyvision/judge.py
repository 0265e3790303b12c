"""A language model as judge, behind any server with OpenAI's protocol: it decides what rules
cannot.

    JUDGE_URLS=http://node7:18901/v1,http://node8:18901/v1 torchrun ... grpo.py ...

JUDGE_MODEL is its name on each server (default: the first that a server lists), JUDGE_API_KEY its
key. Proxies are ignored: a judge stands in the cluster. A case without an answer has no verdict: it
never counts as wrong. No message repeats a server's text, which may contain the key.
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
PAUSE_S = 1.0  # after a failure, before the next server
# unclear replies, or failures while other cases are answered, after which a case has no verdict
TRIES = 5
MAX_TOKENS = 1024  # of a reply: some models think before they answer
MAX_BODY = 2**20  # bytes of a reply
CACHED = 200_000  # verdicts
# between two lines about servers that do not answer; a failure this old is retried
MINUTE_S = 60.0
PATIENCE_S = 540.0  # after this long without any answer all cases stop waiting


@dataclass
class Server:
    host: str  # as messages show it
    client: openai.AsyncOpenAI
    model: str  # "": the first one that the server lists
    listed: str = ""
    refusal: str = ""  # the status with which it has refused a request

    async def judge(self, case: Case, attempt: int) -> float | None:
        """1.0 or 0.0; None if the reply is neither, or the server refuses the case. ConnectionError
        without a reply.

        The first attempt is greedy; since its reply would come again, later ones are sampled.
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
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            # too long for its context, ...
            self.refusal = f"HTTP {error.status_code}"
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
    """Verdicts of one or several servers, which take turns."""

    def __init__(
        self, urls: Iterable[str], model: str = "", api_key: str = "EMPTY", probes: bool = True
    ):
        self.servers = [connect(url, model, api_key) for url in urls]
        self.numbers = count()  # of cases: the first server of each
        self.verdicts: dict[Case, float] = {}
        self.answered_at = 0.0  # when the last reply came
        self.warned_at = 0.0  # when the last warning was printed
        self.silent_since = inf  # start of the first request since the last reply
        self.ended_at = 0.0  # when the last request ended
        self.lock = asyncio.Lock()
        self.trusted = not probes

    async def probe(self) -> None:
        """Test each server with a right and a wrong pair, once. ValueError if one judges them
        wrongly, or if none answers."""
        async with self.lock:
            if self.trusted:
                return
            # at once: two that hang, one after the other, would take longer than a reward may
            results = await asyncio.gather(*map(probe, self.servers), return_exceptions=True)
            silent = []
            for result in results:
                if isinstance(result, ConnectionError):
                    silent.append(str(result))
                elif result is not None:
                    raise result
            if len(silent) == len(self.servers):
                raise ValueError(
                    f"no judge answers ({'; '.join(silent)}): start it, or set JUDGE_URLS"
                )
            for failure in silent:
                print(f"warning: a judge does not answer: {failure}", flush=True)
            self.trusted = True

    async def verdict(self, case: Case) -> float:
        """1.0 or 0.0. It waits for servers that do not answer.

        ConnectionError if none has answered for PATIENCE_S. Then all cases that come within a
        minute of the last failure get it at once; later ones, as those of the next step, try again.
        ValueError if the replies are neither, or if the case fails repeatedly while others are
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
            has_waited_long = asked_at - self.silent_since > PATIENCE_S
            has_just_failed = asked_at - self.ended_at < MINUTE_S
            if has_waited_long and has_just_failed:
                raise ConnectionError(f"no judge has answered for {PATIENCE_S:g} s")
            self.silent_since = min(self.silent_since, asked_at)
            try:
                verdict = await server.judge(case, attempt=unclear)
            except ConnectionError as failure:
                self.warn(failure)
                if self.answered_at > asked_at:  # another case was answered meanwhile
                    failures += 1
                await asyncio.sleep(PAUSE_S)
                continue
            finally:  # also if the deadline of the reward function has cancelled the request
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

    def warn(self, failure: ConnectionError) -> None:
        """At most once a minute."""
        now = time.monotonic()
        if now - self.warned_at >= MINUTE_S:
            self.warned_at = now
            print(f"warning: a judge does not answer: {failure}", flush=True)


async def probe(server: Server) -> None:
    """ValueError if a server judges one of the PROBES wrongly, or not at all."""
    for case, right in PROBES.items():
        verdict = None
        for attempt in range(TRIES):
            if verdict is None:
                verdict = await server.judge(case, attempt)
        if verdict != right:
            relation = "the same" if right else "different"
            problem = "which it does not say. Serve a better model"
            if verdict is None and server.refusal:
                problem = f"and it refuses the request ({server.refusal}). Serve a larger context"
            raise ValueError(
                f"the judge at {server.host} cannot judge: {case.truth!r} and {case.answer!r} "
                f"are {relation}, {problem}, or take it as it is with JUDGE_PROBE=0"
            )


def connect(url: str, model: str, api_key: str) -> Server:
    """A client without proxies and redirects. ValueError unless the url is an address."""
    host = host_of(url)
    if not host:
        # without the url, which may contain a password
        raise ValueError("JUDGE_URLS: one of them is no http://HOST:PORT/v1")
    http = openai.DefaultAsyncHttpxClient(
        trust_env=False,
        follow_redirects=False,
        headers={"Accept-Encoding": "identity"},
        event_hooks={"response": [take_body]},
    )
    client = openai.AsyncOpenAI(
        base_url=url,
        api_key=api_key,
        http_client=http,
        timeout=REQUEST_S,
        max_retries=RETRIES,
    )
    return Server(host, client, model)


def host_of(url: str) -> str:
    """HOST:PORT, or HOST; "" unless the url is http://HOST:PORT/..."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return ""
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.path:
        return ""
    return f"{parts.hostname}:{port}" if port else parts.hostname


async def take_body(response: httpx2.Response) -> None:
    """Read the body before the client, which would accept any size. A body that is larger than
    MAX_BODY, or compressed although that was not requested, becomes a refusal: no verdict."""
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
    """The judge that the environment names. ValueError if it names none."""
    urls = [url.strip() for url in os.environ.get("JUDGE_URLS", "").split(",")]
    urls = [url for url in urls if url]
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

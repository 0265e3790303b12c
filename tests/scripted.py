"""Policies that say what a test has written down: an engine for the loop of turns, and programs for
the tool `python` without a loop."""

import time

from common.data.protocols import Call
from common.data.render import apply_template, to_messages
from common.pictures import PixelLimits
from common.rollout.sampling import sample_episodes
from common.sandbox.python import PythonWorkers
from common.types import Completion, Row, Sampling

LIMITS = PixelLimits(784, 64 * 784, 16 * 784)


class ScriptedEngine:
    """Answers the n-th turn of sample j with the n-th text of `scripts[j]`; one request a step, the
    latest first."""

    def __init__(self, tokenizer, scripts, end: bool = True):
        self.tokenizer, self.scripts, self.end = tokenizer, scripts, end
        self.requests, self.asked = [], []

    def submit(self, request):
        self.requests.append((request.key, request.sampling.max_tokens))
        asked = (
            request.key,
            list(request.prompt_ids),
            request.sampling,
            request.seed,
            list(request.media),
        )
        self.asked.append(asked)

    @property
    def busy(self):
        return bool(self.requests)

    def step(self):
        key, limit = self.requests.pop()
        turn = sum(asked[0] == key for asked in self.asked) - 1
        ids = self.tokenizer.encode(self.scripts[key][turn], add_special_tokens=False)
        ids = ids + [self.tokenizer.eos_token_id] * self.end
        reason = "length" if len(ids) > limit else "stop"
        ids = ids[:limit]
        return [(key, [Completion(ids, [-0.5 - i for i in range(len(ids))], reason)])]


def render(prompt, tokenizer, pictures=False):
    return apply_template([to_messages(prompt, tokenizer, None, pictures)], tokenizer)[0]


def row(tokenizer, vision=None, media=(), tools=("crop_image_normalized",), text="look"):
    prompt = [
        {"role": "system", "content": "<tools>"},
        {"role": "user", "content": "<image>" * len(media) + text},
    ]
    ids = tokenizer.encode(render(prompt, tokenizer, bool(media)), add_special_tokens=False)
    ids = vision.expand(ids, media) if vision else ids
    return Row(0, "x", prompt, "1", {}, ids, list(media), {name: {} for name in tools})


def run(scripts, turns, the_row, max_tokens=4000, n=None, engine=None):
    engine = engine or ScriptedEngine(turns.tokenizer, scripts)
    sampling = Sampling(n or len(scripts), max_tokens)
    options = {"seed": 1, "step": 2, "weights_step": 2, "turns": turns}
    return sample_episodes(engine, {0: the_row}, sampling, **options), engine


class Trajectory:
    """Blocks one after the other, as `Turns` hands them over; what was replied so far."""

    number = 0

    def __init__(self, pool: PythonWorkers, media=(), seeded_by: str = "", **hints):
        Trajectory.number += 1
        self.pool, self.key, self.seed, self.hints, self.calls = (
            pool,
            Trajectory.number,
            seeded_by,
            hints,
            [],
        )
        self.media = [{"kind": "image", "frames": [encoded]} for encoded in media]

    def ask(self, code: str) -> None:
        context = {
            "media": self.media,
            "num_prompt_media": len(self.media),
            "calls": self.calls,
            "seed": self.seed,
        }
        self.code = code
        self.pool.submit(self.key, Call("python", {"code": code}), context, self.hints)

    def got(self, reply):
        self.calls.append(
            {"arguments": {"code": self.code}, "media": len(reply.images), "info": reply.info}
        )
        return reply

    def __call__(self, code: str):
        self.ask(code)
        end = time.monotonic() + 120
        while not (done := self.pool.poll(10.0)):
            assert time.monotonic() < end, "no reply"
        ((key, reply),) = done
        assert key == self.key
        return self.got(reply)

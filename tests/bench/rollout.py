"""The engine by itself: how far a batch is from the machine's limit, how long a rollout's tail is,
what a sync takes.

    python tests/bench/rollout.py --what batches --model smollm2
    python tests/bench/rollout.py --what tail --model tiny
    torchrun --nproc_per_node 2 tests/bench/rollout.py --what sync --model smollm2 --threads 1
    python tests/bench/rollout.py --what python --model tiny

batches: so many sequences of 64 tokens at once, none of which ends before; the limit is the time of
their matrix products alone at the rate of a large square one. tail: Countdown's prompts, 8 samples
each, which end where the model ends them; how long the last tenth of them keeps the engine, with so
many at once, prompts in the order of the file or the longest first. sync: the weights from the
trainer's float32 shards into the engine, one rank or several. python: what vLLM and we compute in
Python, in microseconds of a CPU for each token of each sample, by part; on a GPU as many tokens a
second can be sampled as that leaves. The last line is JSON.
"""

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Literal

import torch
import tyro
from limits import Shapes, square_rate
from report import header, table

from common.assets.build.embedded import embedded_data
from common.data.prompts import PromptData
from common.data.render import end_token_ids
from common.distributed import World, init_world, make_mesh, wrap_model
from common.engine.protocol import EngineConfig
from common.engine.vllm import VllmEngine
from common.flags import Data, Rollout
from common.hub import load_tokenizer, resolve_model
from common.models import load_model, sync_engine
from common.processes import keep_freed_memory
from common.progress import say
from common.rollout.sampling import request_seed, sample_episodes
from common.types import Request, Row, Sampling

SIZES = (4, 16, 64, 256)


@dataclass
class Args:
    what: Literal["batches", "tail", "sync", "python"] = "batches"
    model: str = "smollm2"
    trajectories: int = 512  # of the tail, and of python
    response_tokens: int = 256  # of the tail: longest response; of python: all of them
    threads: int = 2  # of a CPU


def start(world: World, model: str, max_model_len: int, ends: bool) -> VllmEngine:
    """An engine that holds no weights; without `ends` no token ends a response."""
    path = resolve_model(model)
    ids = end_token_ids(path, load_tokenizer(path)) if ends else []
    return VllmEngine(EngineConfig(path, torch.bfloat16, world, ids, max_model_len, memory_gib=2.0))


def trainer(world: World, model: str) -> torch.nn.Module:
    wrap = partial(wrap_model, mesh=make_mesh(world, "fsdp"), compute_dtype=torch.bfloat16)
    return load_model(resolve_model(model), "sdpa", wrap=wrap).to(world.device)


def sample(
    engine: VllmEngine, prompts: list[list[int]], sampling: Sampling, step: int
) -> list[tuple[float, int]]:
    """(seconds until it was done, its tokens) of each trajectory, in the order of their ends, group
    by group."""
    start, ends = time.perf_counter(), []
    for key, ids in enumerate(prompts):
        # one by one, since an answer comes when all samples of a request are done
        for j in range(sampling.n):
            seed = request_seed(0, step, key) + j
            one = Sampling(1, sampling.max_tokens, sampling.temperature)
            engine.submit(Request(key * sampling.n + j, ids, one, seed, weights_step=step))
    while engine.busy:
        for _, (completion,) in engine.step():
            ends.append((time.perf_counter() - start, len(completion.token_ids)))
    return ends


def batches(args: Args, world: World) -> None:
    limit, shapes = square_rate(torch.bfloat16, world.device), Shapes.of(resolve_model(args.model))
    engine, policy = start(world, args.model, 128, ends=False), trainer(world, args.model)
    sync_engine(engine, policy, 0)
    rows = [["sequences at once", "seconds", "tokens/s", f"share of {limit / 1e9:.0f} GFLOP/s"]]
    for size in SIZES:
        prompts = torch.randint(1000, 40_000, (size, 8)).tolist()
        sample(engine, prompts[:4], Sampling(1, 8), 0)
        seconds = median(sample(engine, prompts, Sampling(1, 64), 0)[-1][0] for _ in range(3))
        needed = size * (72 * shapes.per_token + 64 * shapes.per_logits) / limit
        rows.append(
            [
                str(size),
                f"{seconds:.2f}",
                f"{64 * size / seconds:.0f}",
                f"{100 * needed / seconds:.0f} %",
            ]
        )
    table(*rows)


def tail(args: Args, world: World) -> None:
    path = resolve_model(args.model)
    with TemporaryDirectory() as folder:
        file, _ = embedded_data("tiny", Path(folder), world)
        data = PromptData(
            file, Data(), Rollout(), tokenizer=load_tokenizer(path), max_rows=args.trajectories // 8
        )
        prompts = [data[i].prompt_ids for i in range(len(data))]
    engine, policy = start(world, args.model, 1024, ends=True), trainer(world, args.model)
    sync_engine(engine, policy, 0)
    sampling = Sampling(8, args.response_tokens)
    rows = [
        [
            "at once, order",
            "seconds",
            "half are done",
            "nine tenths",
            "last tenth takes",
            "tokens: mean, longest",
        ]
    ]
    orders = {"as drawn": prompts, "longest first": sorted(prompts, key=len, reverse=True)}
    # 256: most that our engine takes on a CPU
    cases = [(at_once, order) for at_once in (64, 256) for order in orders]
    for at_once, order in cases * 2:
        engine.llm.llm_engine.engine_core.engine_core.scheduler.max_num_active_reqs = at_once
        ends = sample(engine, orders[order], sampling, 0)
        total, tokens = ends[-1][0], [n for _, n in ends]
        half, most = (ends[int(len(ends) * part) - 1][0] for part in (0.5, 0.9))
        cells = [f"{total:.1f}", f"{half:.1f}", f"{most:.1f}", f"{100 * (1 - most / total):.0f} %"]
        rows.append(
            [f"{at_once}, {order}", *cells, f"{sum(tokens) / len(tokens):.0f}, {max(tokens)}"]
        )
    table(*rows)


def sync(args: Args, world: World) -> None:
    engine, policy = start(world, args.model, 128, ends=False), trainer(world, args.model)
    seconds = []
    for step in range(7):
        begin = time.perf_counter()
        sync_engine(engine, policy, step)
        seconds.append(time.perf_counter() - begin)
    n = sum(engine.books.expected.values()) / 1e9
    took = f"{median(seconds[2:]):.2f} s (first {seconds[0]:.2f})"
    say(f"sync of {n:.3f}e9 weights, {world.size} rank(s): {took}")
    say(f"needed: {2 * n:.2f} GB into each engine; a rank reads {4 * n / world.size:.2f} GB\n")


class Stopwatch:
    """CPU seconds of this thread by part; a part that another one calls is not counted twice."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.parts: list[str] = []  # under way, the innermost last
        self.last = time.thread_time()

    def switch(self) -> None:
        """Count the time since the last switch."""
        now = time.thread_time()
        if self.parts:
            self.seconds[self.parts[-1]] += now - self.last
        self.last = now

    def time(self, part: str, owner: object, name: str) -> None:
        """From now on count what the method `owner.name` takes."""
        method = getattr(owner, name)
        setattr(owner, name, self.timed(part, method))

    def timed(self, part: str, function: Callable) -> Callable:
        def wrapper(*args, **kwargs):
            self.switch()
            self.parts.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.switch()
                self.parts.pop()

        return wrapper


def python(args: Args, world: World) -> None:
    engine = start(world, args.model, 32 + args.response_tokens, ends=False)
    sync_engine(engine, trainer(world, args.model), 0)
    llm = engine.llm.llm_engine
    core = llm.engine_core.engine_core
    watch = Stopwatch()
    watch.time("vLLM: schedule", core.scheduler, "schedule")
    watch.time("vLLM: update_from_output", core.scheduler, "update_from_output")
    watch.time("vLLM: process_outputs", llm.output_processor, "process_outputs")
    watch.time("vLLM: the model and its inputs", core.model_executor, "execute_model")
    watch.time("vLLM: the model and its inputs", core.model_executor, "sample_tokens")
    watch.time("vLLM: the rest", llm, "step")
    watch.time("vLLM: add_request", llm, "add_request")
    watch.time("ours: step", engine, "step")
    watch.time("ours: submit", engine, "submit")
    sampling = Sampling(8, args.response_tokens)
    prompts = {}
    for key in range(args.trajectories // sampling.n):
        ids = torch.randint(10, 200, (32,)).tolist()
        prompts[key] = Row(key, "none", "", "", {}, ids)
    sample = watch.timed("ours: the rollout", sample_episodes)
    start_s = time.perf_counter()
    episodes = sample(engine, prompts, sampling, seed=0, step=0, weights_step=0)
    elapsed_s = time.perf_counter() - start_s
    tokens = sum(len(episode.response_ids) for episode in episodes)
    rows = [["part", "us of a CPU a token"]]
    model = "vLLM: the model and its inputs"
    of_python = {part: s for part, s in watch.seconds.items() if part != model}
    for part, part_s in sorted(of_python.items(), key=lambda item: -item[1]):
        rows.append([part, f"{1e6 * part_s / tokens:.2f}"])
    figures = {
        "us a token": 1e6 * sum(of_python.values()) / tokens,
        "of it ours": 1e6 * sum(s for p, s in of_python.items() if p.startswith("ours")) / tokens,
    }
    table(*rows)
    say(f"{len(episodes)} samples of {args.response_tokens} tokens in {elapsed_s:.1f} s")
    say(json.dumps(figures))


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    world = init_world()
    keep_freed_memory()
    if world.is_main:
        header("The engine by itself", args.threads)
    globals()[args.what](args, world)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

"""The engine by itself: how far a batch is from the machine's limit, how long a rollout's tail is,
what a sync takes.

    python tests/bench/rollout.py --what batches --model smollm2
    python tests/bench/rollout.py --what tail --model tiny
    torchrun --nproc_per_node 2 tests/bench/rollout.py --what sync --model smollm2 --threads 1

batches: so many sequences of 64 tokens at once, none of which ends before; the limit is the time of
their matrix products alone at the rate of a large square one. tail: Countdown's prompts, 8 samples
each, which end where the model ends them; how long the last tenth of them keeps the engine, with so
many at once, prompts in the order of the file or the longest first. sync: the weights from the
trainer's float32 shards into the engine, one rank or several.
"""

import time
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
from common.rollout.sampling import request_seed
from common.types import Request, Sampling

SIZES = (4, 16, 64, 256)


@dataclass
class Args:
    what: Literal["batches", "tail", "sync"] = "batches"
    model: str = "smollm2"
    trajectories: int = 512  # of the tail
    response_tokens: int = 256  # of the tail: longest response
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


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    world = init_world()
    keep_freed_memory()
    if world.is_main:
        header("The engine by itself", args.threads)
    globals()[args.what](args, world)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

"""What a cost grows with: each at three sizes, with the exponent by which it grows between the two
largest.

    # ten minutes on two cores; all but --only ranks steps
    python tests/bench/growth.py
    python tests/bench/growth.py --only sequence vocabulary

1 is in proportion to the size, 2 with its square, 0 not at all. Each size is measured in a process
of its own, whose peak memory counts from before the work; seconds are the faster of two (of files,
runs: of one).

rows: of a .jsonl of chats, until they are prompts. pictured rows: the same of a parquet file with
pictures of 0.36 MB. pictures: of 4 megapixels, decoded and resized as for one step. trajectories:
of a rank; scored, counted, packed and dumped, which is what Python does with them beside the
engine. sequence: tokens of one, forward and backward of `tiny`. vocabulary: log-probs of 512
tokens, forward and backward. calls: of a tool, in flight at once. ranks: of the demo's training on
this machine. steps: of the demo, at a learning rate of 0, with a checkpoint every 50: the last
ones, the tokens of their responses, the last checkpoint's seconds, and what the rank holds then.
"""

import io
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal, get_args

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import tyro
from PIL import Image
from report import ROOT, header, table

Kind = Literal[
    "rows",
    "pictured rows",
    "pictures",
    "trajectories",
    "sequence",
    "vocabulary",
    "calls",
    "ranks",
    "steps",
]
SIZES = {
    "rows": (10_000, 100_000, 1_000_000),
    "pictured rows": (250, 500, 1000),
    "pictures": (4, 16, 64),
}
SIZES |= {
    "trajectories": (128, 512, 2048),
    "sequence": (2048, 8192, 32_768),
    "vocabulary": (16_384, 65_536, 262_144),
}
SIZES |= {"calls": (64, 256, 1024), "ranks": (1, 2, 4), "steps": (50, 150, 450)}


@dataclass
class Args:
    only: tuple[Kind, ...] = get_args(Kind)[:-2]
    one: str | None = None  # KIND:SIZE, what the benchmark itself calls: one measurement, as JSON
    threads: int = 2  # of a CPU


Work = Callable[[], object]


def rows(size: int, folder: Path) -> Work:
    from data import write_files

    _, chats = write_files(folder, size)
    return partial(read_rows, chats)


def read_rows(path: Path, model: str = "smollm2") -> object:
    from common.data.prompts import PromptData
    from common.flags import Data, Rollout
    from common.hub import load_tokenizer, resolve_model
    from common.pictures import PixelLimits
    from common.vision import load_vision

    folder = resolve_model(model)
    vision = load_vision(folder, PixelLimits(784, 200_000, 200_000))
    return PromptData(
        str(path),
        Data(),
        Rollout(max_prompt_tokens=4096),
        tokenizer=load_tokenizer(folder),
        vision=vision,
    )


def noise(width: int, height: int, seed: int) -> bytes:
    """A PNG that cannot be compressed."""
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def pictured_rows(size: int, folder: Path) -> Work:
    row = {
        "data_source": "geo3k",
        "prompt": [{"role": "user", "content": "<image>What?"}],
        "extra_info": {"index": 0},
    }
    row |= {"reward_model": {"style": "rule", "ground_truth": "1"}}
    rows = [row | {"images": [{"bytes": noise(400, 300, i), "path": None}]} for i in range(size)]
    path = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100)
    return partial(read_rows, path, "tiny-vl")


def pictures(size: int, folder: Path) -> Work:
    from common.pictures import Media, PixelLimits
    from common.processes import in_threads

    data, limits = [noise(2048, 2048, i) for i in range(4)], PixelLimits(3136, 1_003_520, 401_408)
    return lambda: in_threads(lambda i: Media.open("image", [data[i % 4]], limits), range(size))


def trajectories(size: int, folder: Path) -> Work:
    from common.distributed import init_world
    from common.hub import load_tokenizer, resolve_model
    from common.metrics import rollout_means
    from common.packing import Packer, TokenIndex, prompts_of_all_ranks
    from common.rewards import RewardWorkers, score_episodes
    from common.rollout.dumps import dump_rollouts
    from common.types import Episode, Row
    from grpo import split_minibatches

    rng, world = random.Random(0), init_world()
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    truth = {"numbers": [1, 2, 3], "target": 6}
    prompts = {
        p: Row(p, "countdown", "-", truth, {}, rng.choices(range(1000), k=150))
        for p in range(size // 8)
    }
    episodes = []
    for p, s in ((p, s) for p in prompts for s in range(8)):
        ids = rng.choices(range(1000), k=rng.randint(100, 300))
        episodes.append(
            Episode(p, s, prompts[p].prompt_ids, ids, [1] * len(ids), [-1.0] * len(ids), "stop")
        )
    workers, packer = RewardWorkers(None, 1, 10.0), Packer("sdpa", 16_384, folder, world)

    def work() -> None:
        score_episodes(episodes, prompts, workers, tokenizer)
        rollout_means(episodes, {"rollout": 1.0}).reduce()
        numbers = prompts_of_all_ranks(episodes)
        split = split_minibatches(episodes, numbers, 4, seed=0, step=1)
        packer.minibatches(episodes, TokenIndex(episodes), split)
        dump_rollouts(folder, 1, episodes, episodes, [0.0] * size, tokenizer, world)

    return work


def sequence(size: int, folder: Path) -> Work:
    from common.hub import resolve_model
    from common.models import load_model
    from common.packing import TokenIndex, pack
    from common.types import Episode

    policy = load_model(resolve_model("tiny"), "sdpa")
    ids = random.Random(0).choices(range(32, 127), k=size)
    episodes = [Episode(0, 0, ids[:64], ids[64:], [1] * (size - 64), [0.0] * (size - 64), "stop")]
    (batch,) = pack(
        episodes,
        [0],
        TokenIndex(episodes),
        budget=2 * size,
    )
    return lambda: policy(batch)[0].sum().backward()


def vocabulary(size: int, folder: Path) -> Work:
    from common.logprobs import token_logprobs

    hidden, weight = (torch.randn(n, 256, requires_grad=True) for n in (512, size))
    targets = torch.arange(512)
    return lambda: sum(part.sum() for part in token_logprobs(hidden, weight, targets)).backward()


def calls(size: int, folder: Path) -> Work:
    from common.data.protocols import Call
    from common.tools.pools import ToolWorkers

    (folder / "tool.py").write_text(
        "import time\ndef wait(x: int):\n    '''x: any'''\n    time.sleep(0.05)\n    return 1\n"
    )
    pool = ToolWorkers(f"{folder}/tool.py:wait", 64, 30.0)

    def work() -> None:
        for i in range(size):
            pool.submit(i, Call("wait", {"x": i}), {}, {})
        while pool.pending:
            assert not any(reply.error for _, reply in pool.poll(1.0))

    work()  # starts the workers
    return work


def run_demo(
    ranks: int, steps: int, *flags: object, folder: Path
) -> tuple[list[dict], list[tuple[float, int]]]:
    """(metrics of a run, (GB resident, open descriptors) of one of its ranks every second)."""
    from common.look.curves import read_metrics

    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command = [
        sys.executable,
        *launcher,
        "grpo.py",
        "--total-steps",
        str(steps),
        "--output-dir",
        str(folder / "run"),
    ]
    process = subprocess.Popen([*command, *map(str, flags)], cwd=ROOT, stdout=subprocess.DEVNULL)
    seen = []
    while process.poll() is None:
        time.sleep(1)
        for child in psutil.Process(process.pid).children()[:1] if process.poll() is None else ():
            seen.append((child.memory_info().rss / 1e9, child.num_fds()))
    return read_metrics(folder / "run" / "metrics.jsonl"), seen


SMALL = (
    "--prompts-per-step",
    16,
    "--samples-per-prompt",
    8,
    "--eval-every",
    0,
    "--no-eval-before",
    "--engine-memory",
    0.25,
)


def ranks(size: int, folder: Path) -> dict[str, float]:
    metrics, _ = run_demo(size, 6, *SMALL, "--prompts-per-step", 64, folder=folder)
    steps = [record for record in metrics if record.get("step", 0) > 2]
    return {"seconds": median(record["time/step_s"] for record in steps)}


def steps(size: int, folder: Path) -> dict[str, float]:
    # the same policy: the same work in every step
    still = ("--prompts-per-step", 4, "--learning-rate", 1e-12)
    metrics, seen = run_demo(1, size, *SMALL, *still, "--save-every", 50, folder=folder)
    last = [record for record in metrics if record.get("step", 0) > size - 40]
    tokens, seconds = (
        median(record[name] for record in last)
        for name in ("rollout/response_length", "time/step_s")
    )
    checkpoints = folder / "run" / "checkpoints"
    # its birth
    begun = subprocess.check_output(
        ["stat", "-c", "%.W", checkpoints / f"step_{size:06d}"], text=True
    )
    saving = (checkpoints / "latest").stat().st_mtime - float(begun)
    return {
        "seconds": seconds,
        "tokens": tokens,
        "saving": saving,
        "GB": seen[-2][0],
        "descriptors": seen[-2][1],
    }


def measure(kind: str, size: int, threads: int) -> dict[str, float]:
    torch.set_num_threads(threads)
    function = globals()[kind.replace(" ", "_")]
    with tempfile.TemporaryDirectory() as folder:
        work = function(size, Path(folder))
        if isinstance(work, dict):
            return work
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before, seconds = psutil.Process().memory_info().rss / 1e9, []
        for _ in range(1 if "rows" in kind else 2):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        status = Path("/proc/self/status").read_text()
        return {
            "seconds": min(seconds),
            "GB": int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024 / 1e9 - before,
        }


def exponent(sizes: tuple[int, ...], values: list[float]) -> str:
    return (
        f"{math.log(values[-1] / values[-2]) / math.log(sizes[-1] / sizes[-2]):.2f}"
        if min(values) > 0
        else "-"
    )


def main(args: Args) -> None:
    if args.one:
        kind, _, size = args.one.rpartition(":")
        print(json.dumps(measure(kind, int(size), args.threads)), flush=True)
        return
    header("What a cost grows with, and by which exponent", args.threads)
    for kind in args.only:
        found = []
        for size in SIZES[kind]:
            command = [
                sys.executable,
                __file__,
                "--one",
                f"{kind}:{size}",
                "--threads",
                str(args.threads),
            ]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            found.append(json.loads(done.stdout.splitlines()[-1]))
        lines = [[kind, *(f"{size:,}" for size in SIZES[kind]), "exponent"]]
        for what in found[0]:
            values = [one[what] for one in found]
            lines.append(
                [what, *(f"{value:.3g}" for value in values), exponent(SIZES[kind], values)]
            )
        table(*lines)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

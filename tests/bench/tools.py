"""Seconds of a step with tools, and with the same tools delayed; and what the tool python takes.

    # 2 minutes; a tiny Qwen2.5-VL that has been taught to crop
    python tests/bench/tools.py
    # 2 minutes; sandboxes alone, without a model
    python tests/bench/tools.py --python

The two runs of the first take the same steps with the same seeds: a trajectory with n calls must
wait n delays, the others must not. The second starts sandboxes and calls them, and then lets many
trajectories draw figure after figure.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import count
from math import ceil
from multiprocessing.connection import wait
from pathlib import Path
from statistics import median

import pyarrow.parquet as pq
import tyro
from report import ROOT, header, table

from common.data.protocols import Call
from common.limits import usable_cpus
from common.sandbox.python import PythonWorkers
from common.sandbox.sandbox import Sandbox, State

TOOL = """
import os, time
from common.tools import visual

def crop_image_normalized(bbox_2d: list, target_image: float, context):
    time.sleep(float(os.environ["DELAY"]))
    return visual.crop_image_normalized(bbox_2d, target_image, context)

crop_image_normalized.schema = visual.CROP_SCHEMA
"""


@dataclass
class Args:
    delay: float = 0.5  # seconds of each call
    steps: int = 9  # of each run; the first, in which workers start, is left out
    prompts: int = 12  # per step
    samples: int = 8  # of each prompt
    tool_workers: int = 64  # at most
    python: bool = False  # measure the tool python instead
    starts: int = 20  # of a sandbox
    calls: int = 300  # of one trajectory, without and with a figure
    trajectories: int = 64  # at once, each with `turns` calls that draw a figure
    turns: int = 4


PRINT = "x = np.arange(1000).sum()\nprint(x)"
DRAW = "plt.plot(np.arange(100) ** 2)\nplt.show()\nprint('drawn')"


class Trajectories:
    """Calls one after the other of each of some trajectories, as `Turns` makes them."""

    keys = count()

    def __init__(self, pool: PythonWorkers, size: int):
        self.pool = pool
        self.calls: dict[int, list] = {next(self.keys): [] for _ in range(size)}

    def run(self, code: str, turns: int) -> list[float]:
        """Seconds of each call, from when it is handed over."""
        started, seconds = {}, []
        context = {"media": [], "num_prompt_media": 0}

        def ask(key: int) -> None:
            started[key] = time.perf_counter()
            self.pool.submit(
                key, Call("python", {"code": code}), {**context, "calls": self.calls[key]}, {}
            )

        for key in self.calls:
            ask(key)
        while self.pool.pending:
            for key, reply in self.pool.poll(60.0):
                seconds.append(time.perf_counter() - started[key])
                assert reply.info.get("acted"), reply.text
                record = {
                    "arguments": {"code": code},
                    "media": len(reply.images),
                    "info": reply.info,
                }
                self.calls[key].append(record)
                if len(self.calls[key]) < turns:
                    ask(key)
        return seconds


def start_seconds() -> float:
    """Of one sandbox, until it takes a program."""
    start = time.perf_counter()
    box = Sandbox(30.0, 4.0, confined=True)
    while box.state != State.IDLE:
        wait(box.sources)
        box.poll()
    seconds = time.perf_counter() - start
    box.stop()
    return seconds


def measure_python(args: Args) -> None:
    header("The tool python: sandboxes and calls", threads=2)
    pool = PythonWorkers(args.tool_workers, 30.0)
    measured = {"start of a sandbox": [start_seconds() for _ in range(args.starts)]}
    firsts = [Trajectories(pool, 1).run(PRINT, 1)[0] for _ in range(args.calls)]
    measured["first call of a trajectory"] = firsts
    measured["call"] = Trajectories(pool, 1).run(PRINT, args.calls)
    measured["call with a figure"] = Trajectories(pool, 1).run(DRAW, args.calls)
    Trajectories(pool, args.trajectories).run(PRINT, 1)  # all sandboxes start
    start = time.perf_counter()
    many = Trajectories(pool, args.trajectories).run(DRAW, args.turns)
    rate = len(many) / (time.perf_counter() - start)
    measured[f"call with a figure, {args.trajectories} trajectories at once"] = many
    pool.close()
    rows = [["", "n", "p50 (ms)", "p99 (ms)"]]
    for name, seconds in measured.items():
        ranked = sorted(seconds)
        middle, last = (ranked[ceil(share * len(ranked)) - 1] for share in (0.5, 0.99))
        rows.append([name, str(len(ranked)), f"{1000 * middle:.0f}", f"{1000 * last:.0f}"])
    table(*rows)
    per_core = rate / usable_cpus()
    print(
        f"{args.trajectories} trajectories: {rate:.1f} calls a second, {per_core:.1f} a "
        "second and core"
    )


def main(args: Args) -> None:
    if args.python:
        measure_python(args)
        return
    header("A step with tools that take no time, and with slow ones", threads=2)
    sys.path.insert(0, str(ROOT / "tests"))
    from vl import write_rows, write_tiny_vl

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_vl(folder / "model", taught=True)
        data = write_rows(folder / "rows.parquet")
        (folder / "tool.py").write_text(TOOL)
        steps, chains, calls = {}, {}, {}
        for delay in (0.0, args.delay):
            run_dir = folder / f"run-{delay}"
            command = f"""grpo.py --model {folder / "model"} --train-data {data}
                --media-root {folder} --min-pixels 784 --max-pixels 12544 --max-prompt-tokens 400
                --max-response-tokens 600 --max-turn-tokens 80 --dtype fp32
                --prompts-per-step {args.prompts} --samples-per-prompt {args.samples}
                --total-steps {args.steps}
                --learning-rate 1e-9 --tools {folder / "tool.py"}:crop_image_normalized
                --tool-workers {args.tool_workers} --dump-rollouts-every 1 --output-dir {run_dir}"""
            environment = {**os.environ, "DELAY": str(delay), "PYTHONPATH": str(ROOT)}
            subprocess.run(
                [sys.executable, *command.split()], cwd=ROOT, env=environment, check=True, stdout=2
            )
            records = [
                json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()
            ]
            steps[delay] = [r["time/step_s"] for r in records if "time/step_s" in r][1:]
            dumps = sorted((run_dir / "rollouts").glob("step_??????.parquet"))[1:]
            texts = [pq.read_table(dump)["calls"].to_pylist() for dump in dumps]
            by_step = [
                [sum(bool(call["name"]) for call in json.loads(t)) for t in column]
                for column in texts
            ]
            chains[delay], calls[delay] = (
                [max(counts) for counts in by_step],
                [sum(counts) for counts in by_step],
            )
    plain = median(steps[0.0])
    rows = [
        [
            "delay of a call (s)",
            "step (s), median",
            "calls in a step",
            "longest chain of calls",
            "bound (s)",
        ]
    ]
    for delay in steps:
        chain = median(chains[delay])
        bound = f"{1.3 * plain + chain * delay:.2f}" if delay else ""
        rows.append(
            [
                f"{delay:g}",
                f"{median(steps[delay]):.2f}",
                f"{median(calls[delay]):g}",
                f"{chain:g}",
                bound,
            ]
        )
    table(*rows)
    print(
        "bound: 1.3 times the step without delay, and one delay for each call of the longest chain"
    )


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

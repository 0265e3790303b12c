"""What to run on a GPU that is at hand for a quarter of an hour: in order, each with a time limit,
what it is expected to show, and a verdict.

    python tests/gpu/quarter_hour.py                        # without vLLM: speed of the update
    python tests/gpu/quarter_hour.py --call 2               # with vLLM: sync, sleep, rollout
    python tests/gpu/quarter_hour.py --call 3               # tests that have not run on a card
    python tests/gpu/quarter_hour.py --list                 # the commands
    python tests/gpu/quarter_hour.py --toy                  # all of it at toy size, on a CPU, too

Expectations are for one H100 SXM with nothing else on it (tests/bench/roofline.py). A prediction
that fails is worth as much as one that holds: note each number with its hardware and commit. With
--before FOLDER, a checkout of commit 2201a38, item 3 is the update as it was when it was measured.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/bench"))

from report import gpu_bytes  # noqa: E402
from roofline import GOALS, UPDATES, peak_flops  # noqa: E402

BENCH = "python tests/bench/gpu.py --prompts 8 --repeats 3"
TOY_BENCH = (
    "python tests/bench/gpu.py --models smoke --prompts 1 --repeats 1 --threads 2 "
    "--micro-batch-tokens 512 --prompt-tokens 16 --response-tokens 24"
)
TOY_UPDATE = f"{TOY_BENCH} --only update:smoke"
TOY_STEP = (
    f"{TOY_BENCH} --prompt-tokens 256 --flags='--max-response-tokens 16 {{}}' --only step:smoke"
)
TOY_RUN = (
    "--total-steps 1 --prompts-per-step 2 --samples-per-prompt 2 --no-eval-before --eval-rows 2 "
    "--max-response-tokens 8"
)
PYTEST = "python -m pytest -q -s -p no:cacheprovider"


@dataclass(frozen=True)
class Expected:
    """The bounds of a figure; with `relative_to`, in units of the same figure of another item."""

    figure: str
    least: float | None = None
    most: float | None = None
    relative_to: str = ""

    def verdict(self, figures: dict[str, dict[str, float]], item: str) -> str:
        """figures: of all items so far."""
        seen = figures[item].get(self.figure)
        if seen is None:
            return f"{self.figure}: expected {self.bounds}, not seen"
        unit = 1.0
        if self.relative_to:
            other = figures.get(self.relative_to, {}).get(self.figure)
            if other is None:
                return f"{self.figure}: seen {seen:.4g}, nothing to compare with"
            unit = other
        is_low = self.least is not None and seen < self.least * unit
        is_high = self.most is not None and seen > self.most * unit
        outcome = "MISSED" if is_low or is_high else "ok"
        return f"{self.figure}: expected {self.bounds}, seen {seen:.4g}: {outcome}"

    @property
    def bounds(self) -> str:
        if self.least is None:
            text = f"<= {self.most:g}"
        elif self.most is None:
            text = f">= {self.least:g}"
        else:
            text = f"{self.least:g} to {self.most:g}"
        return f"{text} times that of {self.relative_to}" if self.relative_to else text


@dataclass(frozen=True)
class Item:
    """A command whose last line is JSON with its figures, or a test, and what it should show."""

    name: str
    command: str
    toy: str  # the same at toy size
    seconds: int  # after which it is ended
    expected: Sequence[Expected] = field(default_factory=tuple)


def update_item(name: str, label: str, options: str, seconds: int, *expected: Expected) -> Item:
    command = f"{BENCH} {options} --only {shlex.quote(f'update:{label}')}"
    return Item(name, command, TOY_UPDATE, seconds, expected)


def goal(label: str) -> Expected:
    return Expected("MFU %", least=GOALS[label])


FIRST_CALL = [
    Item("board", "nvidia-smi -q -d CLOCK,POWER", "uname -a", 20),
    Item(
        "kernels",
        "python tests/bench/kernels.py --parts copy products head host",
        "python tests/bench/kernels.py --toy --parts copy products head host",
        110,
        (
            Expected("cast GB/s", least=2500),
            Expected("products 1.5B TFLOP/s", 480, 540),
            Expected("products 3B TFLOP/s", 540, 600),
            Expected("products 7B TFLOP/s", 600, 680),  # below 580 50 % MFU is out of reach
            Expected("head 7B eager ms", 220, 240),
            Expected("head 7B ms", 110, 135),
            Expected("block mask ms", 2, 4),
        ),
    ),
    Item(
        "1.5B as it was",
        f"{BENCH} --models 1.5B --profile --only 'update:1.5B, compiled'",
        TOY_UPDATE,
        90,
        (Expected("s", 1.55, 1.63), Expected("MFU %", 30, 32)),
    ),
    update_item(
        "1.5B",
        "1.5B, compiled",
        "--models 1.5B --profile",
        90,
        Expected("s", most=1.33),
        goal("1.5B, compiled"),
    ),
    update_item("7Bx8", "7Bx8, compiled", "--models 7Bx8", 80, goal("7Bx8, compiled")),
    update_item(
        "7Bx8, activation memory",
        "7Bx8, compiled",
        "--models 7Bx8 --activation-memory 0.7",
        80,
        Expected("s", 0.98, 1.02, relative_to="7Bx8"),
        Expected("peak GB", most=0.9, relative_to="7Bx8"),  # about 9 GB less
    ),
    update_item(
        "7Bx8, checkpointing",
        "7Bx8, compiled, checkpointing",
        "--models 7Bx8",
        80,
        Expected("MFU %", 36, 38),
    ),
    update_item("1.5B, eager", "1.5B", "--models 1.5B", 60, Expected("s", 1.8, 1.95)),
    Item(
        "lengths",
        f"{BENCH} --models 0.1B --only 'lengths:0.1B, compiled'",
        f"{TOY_BENCH} --only lengths:smoke",
        90,
        # once for a static and once for a dynamic length; never again
        (Expected("graphs", 1, 2), Expected("graph breaks", most=0)),
    ),
    Item(
        "flex",
        "python tests/bench/kernels.py --parts flex",
        "python tests/bench/kernels.py --toy --parts flex",
        110,
    ),
]
SECOND_CALL = [
    Item(
        "sync of 7B",
        f"{BENCH} --models 7B --only sync:7B",
        f"{TOY_BENCH} --only sync:smoke",
        110,
        (
            Expected("sync s", most=0.25),
            Expected("sync GB/s", least=60),
            Expected("sleep 1 s", 0.4, 0.5),
            Expected("wake 1 s", 0.4, 0.5),
            Expected("sleep 2 s", most=0.05),
            Expected("wake 2 s", most=0.05),
        ),
    ),
    Item(
        "level 2",  # when it passes, SLEEP_LEVEL of common/flags.py becomes 2
        f"{PYTEST} tests/gpu/test_engine.py -k 2-smollm2",
        f"{PYTEST} tests/gpu/test_engine.py -k 2-smollm2 --collect-only",
        90,
    ),
    *(
        Item(
            f"step with a cache of {gib} GiB",
            f"{BENCH} --models 1.5B --prompts 64 --flags='--engine-memory {gib}' "
            "--only 'step:1.5B, compiled'",
            TOY_STEP.format("--engine-memory 0.25"),
            150,
            (Expected("rollout tokens/s", 25_000, 40_000),),
        )
        for gib in (8, 32)
    ),
    Item(
        "Python of a rollout",
        "python tests/bench/rollout.py --what python --model smollm2",
        "python tests/bench/rollout.py --what python --model tiny --trajectories 32 "
        "--response-tokens 16",
        90,
        (Expected("us a token", 25, 40),),
    ),
    Item(
        "beside TRL",
        "python tests/bench/step.py --trl-vllm --prompts 32 --response-tokens 512 "
        "--micro-batch-tokens 32768 --trl-batch 32 --steps 6 --repeats 1 --trl {trl} "
        "'--flags=--sleep-level 2'",
        "python tests/bench/step.py --help",
        200,
        (Expected("TRL / grpo.py", least=2),),
    ),
]
LORA = "python grpo.py --lora-rank 16 --eval-every 0 --output-dir {out}/lora"
ENGINE_OF_TWO = (
    "torchrun --standalone --nproc_per_node 2 grpo.py --engine-parallel 2 --eval-every 0 "
    "--output-dir {out}/engine-of-two"
)
# each alone: vLLM reads the memory of the whole card
THIRD_CALL = [
    Item("LoRA", f"{LORA} --total-steps 3 --eval-rows 64", f"{LORA} {TOY_RUN}", 90),
    Item(
        "engine of two",
        f"{ENGINE_OF_TWO} --total-steps 3 --eval-rows 64",
        f"{ENGINE_OF_TWO} {TOY_RUN}",
        120,
    ),
    *(
        Item(
            file, f"{PYTEST} tests/gpu/{file}", f"{PYTEST} tests/gpu/{file} --collect-only", seconds
        )
        for file, seconds in (
            ("test_update.py", 150),
            ("test_model_families.py", 240),
            ("test_pictures.py", 150),
            ("test_steps.py", 300),
            ("test_ppo.py", 120),
            ("test_engine.py", 240),
        )
    ),
]
CALLS = (FIRST_CALL, SECOND_CALL, THIRD_CALL)


@dataclass
class Args:
    call: Literal[1, 2, 3] = 1
    seconds: int = 570  # of the whole call: what does not fit any more is left out
    only: tuple[str, ...] = ()  # names of items
    out: Path = Path(os.environ.get("OUT", "runs/quarter_hour"))  # for outputs and figures
    before: Path | None = None  # a checkout of 2201a38; without it that item is left out
    trl: Path | None = None  # an environment with TRL and vLLM; without it that item is left out
    toy: bool = False  # at toy size: no number means anything
    list: bool = False  # print the commands, and run nothing


def missing(item: Item, args: Args) -> str:
    """Why an item cannot run; "" if it can."""
    if args.toy:
        return ""
    if item.name == "1.5B as it was" and args.before is None:
        return "needs --before"
    if item.name == "beside TRL" and args.trl is None:
        return "needs --trl"
    if item.name == "engine of two" and num_gpus() < 2:
        return "needs two GPUs"
    return ""


def run_item(item: Item, args: Args, limit_s: float) -> tuple[str, dict[str, float]]:
    """(how it ended, its figures)"""
    command = item.toy if args.toy else item.command
    command = command.replace("{trl}", str(args.trl)).replace("{out}", str(args.out))
    folder = ROOT
    if item.name == "1.5B as it was" and not args.toy:
        folder = args.before
    path = args.out / f"{item.name}.txt".replace("/", "-")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    start = time.monotonic()
    ended = "done"
    with path.open("w") as file:
        try:
            done = subprocess.run(
                ["timeout", "--kill-after=5", str(int(limit_s)), *shlex.split(command)],
                cwd=folder,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        except FileNotFoundError as error:
            return f"failed: {error}", {}
    if done.returncode == 124:
        ended = "ended by its time limit"
    elif done.returncode:
        ended = f"FAILED with {done.returncode}: {path}"
    return f"{ended}, {time.monotonic() - start:.0f} s", last_figures(path.read_text())


def last_figures(output: str) -> dict[str, float]:
    """Those of the last line that is a JSON object."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    return {}


def print_on_eight(figures: dict[str, dict[str, float]], peak: float | None) -> None:
    """MFU of 7B on eight cards, from 7Bx8 and the head."""
    from gpu import mfu_on_eight

    update = figures.get("7Bx8", {})
    head_ms = figures.get("kernels", {}).get("head 7B ms")
    if not update or not head_ms or not peak:
        return
    label = "7B, compiled, 8 GPUs"
    percent = mfu_on_eight(update, head_ms / 1e3 / 16_384, peak)
    outcome = "ok" if percent >= GOALS[label] else "MISSED"
    paper = 100 * UPDATES[label].mfu(peak_flops("H100"))
    print(
        f"{label}, computed: MFU expected >= {GOALS[label]:g} % (on paper {paper:.1f}), seen "
        f"{percent:.1f}: {outcome}"
    )


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def card_peak() -> float | None:
    import torch

    return peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def main(args: Args) -> None:
    items = [item for item in CALLS[args.call - 1] if not args.only or item.name in args.only]
    if args.list:
        for item in items:
            print(f"# {item.name}, at most {item.seconds} s\n{item.command}")
        return
    args.out = args.out.absolute()  # an item may run in another folder
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.seconds
    figures: dict[str, dict[str, float]] = {}
    if gpu_bytes() > 2e9:
        print("warning: something else is on this GPU: numbers mean less")
    for item in items:
        left_s = end - time.monotonic()
        limit_s = 10 * item.seconds if args.toy else item.seconds  # CPUs are slow
        reason = missing(item, args)
        if not reason and left_s < limit_s / 2 and not args.toy:
            reason = f"{left_s:.0f} s are left of --seconds"
        if reason:
            print(f"--- {item.name}: left out, {reason}", flush=True)
            continue
        ended, figures[item.name] = run_item(
            item, args, limit_s if args.toy else min(limit_s, left_s)
        )
        print(f"--- {item.name}: {ended}", flush=True)
        for expected in item.expected:
            print(expected.verdict(figures, item.name), flush=True)
        (args.out / "figures.json").write_text(json.dumps(figures, indent=1))
    print_on_eight(figures, card_peak())


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

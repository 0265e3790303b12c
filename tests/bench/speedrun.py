"""Check an entry of docs/speedrun.md: five seeds, their accuracy, seconds and work.

    python tests/bench/speedrun.py --list                    # the entries
    python tests/bench/speedrun.py demo                      # one of them
    python tests/bench/speedrun.py mine "--flags=--advantage group-mean --total-steps 12"
    python tests/bench/speedrun.py mine --patch mine.patch "--flags=--total-steps 12"

A run is `torchrun --nproc_per_node 2` of a script's demo on two cores. Its seconds are those of the
steps, without start-up and evaluation. Work is seconds times the rate at which this machine
multiplies matrices, measured before and after each run, so that machines can be compared.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, median, stdev
from typing import Annotated

import torch
import tyro
from report import ROOT, header, table

from common.limits import usable_cpus
from common.look.curves import read_metrics

GOAL = 0.85  # mean greedy accuracy of the seeds on the held-out rows
NUM_ROWS = 512
SEEDS = (1, 2, 3, 4, 5)
CORES = 2
STUDENTS_T = 2.78  # of a 95 % interval of five values
# What an entry may not set: its first weights, rows, rewards, engine and evaluation, and what this
# program sets itself. An evaluation has the responses' limit of the training.
FIXED_FLAGS = {
    *("--model", "--teacher", "--replay", "--resume"),
    *("--train-data", "--eval-data", "--max-rows", "--reward-function", "--tools", "--environment"),
    *("--engine", "--engine-args", "--max-response-tokens"),
    *("--eval-every", "--eval-rows", "--eval-samples", "--eval-temperature", "--eval-top-p"),
    *("--eval-only", "--seed", "--save-every", "--output-dir"),
}


@dataclass(frozen=True)
class Entry:
    flags: str = ""
    script: str = "grpo.py"
    patch: Path | None = None  # of the script, as those of docs/forks


ENTRIES = {
    "demo": Entry("--total-steps 15"),  # of the demo, whose rate then falls within 15 steps
    "four-minibatches": Entry("--minibatches 4 --warmup-steps 4 --total-steps 6"),
    "five-rollouts": Entry("--minibatches 4 --warmup-steps 3 --total-steps 5"),
    "sixteen-steps": Entry(
        "--prompts-per-step 8 --warmup-steps 4 --learning-rate 1.2e-4 --total-steps 16"
    ),
}


@dataclass
class Args:
    name: Annotated[str, tyro.conf.Positional] = ""  # an entry, or the name of a new one
    list: bool = False  # show the entries, and stop
    flags: str = ""  # of a new entry: "--flags=--total-steps 12"
    script: str = "grpo.py"  # that a new entry runs
    patch: Path | None = None  # of that script
    seeds: tuple[int, ...] = SEEDS  # fewer are a trial, not an entry
    output_dir: Path = Path("runs/speedrun")  # folder of the runs
    results: Path | None = None  # folder that keeps NAME.json


@dataclass
class Outcome:
    """Of one seed."""

    seed: int
    accuracy: float  # greedy, after the last step
    seconds: float  # of the steps, without evaluations
    teraflops: float  # fp32, median of those before and after the run

    @property
    def work(self) -> float:
        """In units of 1e12 floating-point operations."""
        return self.seconds * self.teraflops


def check_flags(flags: list[str]) -> None:
    for word in flags:
        name = word.partition("=")[0].replace("_", "-")
        if name.replace("--no-", "--") in FIXED_FLAGS:
            raise SystemExit(
                f"{name}: model, rows, reward, engine and evaluation are the same for all entries "
                "(docs/speedrun.md)"
            )


def prepare_script(entry: Entry, folder: Path) -> Path:
    """The script, or a copy in `folder` with the entry's patch."""
    if entry.patch is None:
        return ROOT / entry.script
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / entry.script
    script.write_text((ROOT / entry.script).read_text())
    command = ["git", "apply", entry.patch.absolute()]
    # the folder may be in a repository, whose paths would then be meant
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent.absolute())}
    if subprocess.run(command, cwd=folder, env=environment).returncode:
        raise SystemExit(f"--patch {entry.patch}: does not apply to {entry.script} as it is")
    return script


def matrix_teraflops(seconds: float = 2.0) -> float:
    """The rate of fp32 products on all cores together: the median over so many seconds."""
    size = 1024
    matrix = torch.randn(size, size)
    rates = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        matrix @ matrix
        rates.append(2 * size**3 / (time.perf_counter() - start) / 1e12)
    return median(rates)


def run_seed(script: Path, flags: list[str], seed: int, folder: Path) -> Outcome:
    before = matrix_teraflops()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(CORES), str(script), *flags]
    command += ["--seed", str(seed), "--eval-every", "0", "--eval-rows", str(NUM_ROWS)]
    command += ["--save-every", "0", "--resume", "never", "--output-dir", str(folder)]
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    log = folder.with_suffix(".log")
    with log.open("w") as output:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}: {' '.join(command)}\nits output: {log}")
    seconds = 0.0
    metrics = read_metrics(folder / "metrics.jsonl")
    for record in metrics:
        if "time/step_s" in record:
            seconds += record["time/step_s"] - record.get("time/eval_s", 0.0)
    last = metrics[-1]
    if last["eval/rows"] != NUM_ROWS:
        raise SystemExit(f"{folder}: {last['eval/rows']} held-out rows, not {NUM_ROWS}")
    rate = (before + matrix_teraflops()) / 2
    return Outcome(seed, last["eval/accuracy"], seconds, rate)


def interval(values: list[float], digits: int) -> str:
    """Mean and 95 % interval (Student's t), where there are as many values as seeds."""
    text = f"{mean(values):.{digits}f}"
    if len(values) == len(SEEDS):
        text += f" ± {STUDENTS_T * stdev(values) / sqrt(len(values)):.{digits}f}"
    return text


def row_of(name: str, entry: Entry, outcomes: list[Outcome]) -> list[str]:
    """Of the table in docs/speedrun.md."""
    command = f"{entry.script} {entry.flags}".strip()
    if entry.patch is not None:
        command += f" with {entry.patch}"
    percent = [100 * outcome.accuracy for outcome in outcomes]
    return [
        name,
        f"`{command}`",
        f"{interval(percent, 1)} %",
        interval([outcome.seconds for outcome in outcomes], 1),
        interval([outcome.work for outcome in outcomes], 1),
    ]


def main(args: Args) -> None:
    if args.list or not args.name:
        for name, entry in ENTRIES.items():
            print(f"{name}: {entry.script} {entry.flags}")
        return
    entry = Entry(args.flags, args.script, args.patch)
    if args.name in ENTRIES:
        if entry != Entry():
            raise SystemExit(f"{args.name} is an entry already: give yours another name")
        entry = ENTRIES[args.name]
    flags = entry.flags.split()
    check_flags(flags)
    if usable_cpus() < CORES:
        raise SystemExit(f"{CORES} cores are needed")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    torch.set_num_threads(CORES)
    folder = args.output_dir / args.name
    script = prepare_script(entry, folder)
    outcomes = []
    header(f"speedrun: {args.name}", CORES)
    for seed in args.seeds:
        outcome = run_seed(script, flags, seed, folder / f"seed{seed}")
        outcomes.append(outcome)
        print(
            f"seed {seed}: {outcome.accuracy:.1%}, {outcome.seconds:.1f} s, "
            f"{outcome.teraflops:.3f} TFLOP/s",
            flush=True,
        )
    head = ["entry", "command", "accuracy", "seconds", "10^12 operations"]
    table(head, row_of(args.name, entry, outcomes))
    accuracy = mean(outcome.accuracy for outcome in outcomes)
    if args.seeds != SEEDS:
        print(f"a trial: an entry has the seeds {', '.join(map(str, SEEDS))}")
    elif accuracy < GOAL:
        print(f"no entry: the mean accuracy {accuracy:.1%} is below {GOAL:.0%}")
    if args.results is not None:
        args.results.mkdir(parents=True, exist_ok=True)
        record = {"entry": asdict(entry), "outcomes": [asdict(outcome) for outcome in outcomes]}
        text = json.dumps(record, indent=1, default=str) + "\n"
        (args.results / f"{args.name}.json").write_text(text)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

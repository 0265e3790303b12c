"""Learning curves of SmolLM2-135M on GSM8K and Countdown: run by run, to be interrupted and gone on with.

    python tests/bench/learning_curves.py --gsm8k ../shared/data/gsm8k                    # all, on one GPU
    python tests/bench/learning_curves.py --gsm8k FOLDER --only sft-gsm8k grpo-gsm8k-seed1
    python tests/bench/learning_curves.py --gsm8k FOLDER --minutes 9                      # then the same command again

A run that is done stays done, one that was stopped goes on from its checkpoint. What is worth keeping of each (curves,
metrics, flags, versions, hardware) goes to results/NAME at once, finished or not. Its hours, printed at the end, are
the sum of time/step_s.
"""

import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from report import ROOT, header, table

from common.logger import plot_curves, read_metrics
from common.models import resolve_model

SFT = "--total-steps 234 --batch-size 64 --learning-rate 1e-4 --lr-schedule cosine --warmup-steps 0.03 --eval-rows 512"
RL = "--prompts-per-step 128 --max-prompt-tokens 320 --micro-batch-tokens 32768 --learning-rate 5e-6 --warmup-steps 5"
GRPO = f"{RL} --samples-per-prompt 8 --minibatches 2"
PPO = f"{RL} --samples-per-prompt 4 --minibatches 2 --critic-learning-rate 2e-5 --critic-warmup-steps 10"
ON_GSM8K = "--total-steps 200 --eval-every 20 --eval-rows 1319 --max-response-tokens 320"
ON_COUNTDOWN = "--total-steps 200 --eval-every 20 --eval-rows 512 --max-response-tokens 512"

RUNS = {  # name: (script, flags, data, the run whose model it starts from)
    "sft-gsm8k": ("sft.py", SFT, "gsm8k", None),
    "grpo-gsm8k-seed1": ("grpo.py", f"{GRPO} {ON_GSM8K} --seed 1", "gsm8k", "sft-gsm8k"),
    "grpo-gsm8k-seed2": ("grpo.py", f"{GRPO} {ON_GSM8K} --seed 2", "gsm8k", "sft-gsm8k"),
    "grpo-gsm8k-fp16-seed1": ("grpo.py", f"{GRPO} {ON_GSM8K} --seed 1 --dtype fp16", "gsm8k", "sft-gsm8k"),
    "ppo-gsm8k-seed1": ("ppo.py", f"{PPO} {ON_GSM8K} --seed 1", "gsm8k", "sft-gsm8k"),
    "grpo-countdown-seed1": ("grpo.py", f"{GRPO} {ON_COUNTDOWN} --seed 1", "countdown", None),
    "grpo-countdown-seed2": ("grpo.py", f"{GRPO} {ON_COUNTDOWN} --seed 2", "countdown", None),
}
KEPT = ("config.json", "metrics.jsonl", "curves.png")


@dataclass
class Args:
    gsm8k: str  # folder with train.jsonl and test.jsonl of GSM8K, or "hub"
    only: tuple[str, ...] = tuple(RUNS)  # runs, in this order; one that starts from another needs it done
    model: str = "smollm2"  # folder or name of the model that everything starts from
    runs: Path = Path("runs/curves")  # folder of data, checkpoints and models
    results: Path = Path("results")  # folder of what is kept
    minutes: float = 1e5  # after which the run under way is told to save and stop
    save_every: int = 20  # steps between checkpoints
    flags: str = ""  # further flags for every run: "--flags=--total-steps 2"


def prepare(args: Args, data: str) -> Path:
    """Folder with train.parquet and test.parquet."""
    folder = args.runs / "data" / data
    if not (folder / "test.parquet").is_file():
        source = ["--source", args.gsm8k] if data == "gsm8k" else ["--template", "qwen-instruct", "--operands", "3"]
        sizes = [] if data == "gsm8k" else ["--train-size", "32768", "--test-size", "512"]
        module = [sys.executable, "-m", f"common.prepare.{data}", "--out", str(folder.absolute())]
        subprocess.run([*module, *source, *sizes], cwd=ROOT, check=True)
    return folder


def command_of(args: Args, name: str) -> list[str]:
    script, flags, data, parent = RUNS[name]
    folder = prepare(args, data).absolute()
    model = (args.runs / parent / "model").absolute() if parent else resolve_model(args.model)
    if parent and not Path(model).is_dir():
        raise SystemExit(f"{name} starts from {parent}, which is not done: add it to --only, before {name}")
    command = [sys.executable, script, "--model", str(model), *flags.split(), "--save-every", str(args.save_every)]
    command += ["--train-data", str(folder / "train.parquet"), "--eval-data", str(folder / "test.parquet")]
    return [*command, "--output-dir", str((args.runs / name).absolute()), *args.flags.split()]


def keep(run: Path, results: Path) -> None:
    if (run / "metrics.jsonl").is_file():
        plot_curves(run)
        results.mkdir(parents=True, exist_ok=True)
        for file in KEPT:
            shutil.copy(run / file, results)


def main(args: Args) -> None:
    if unknown := [name for name in args.only if name not in RUNS]:
        raise SystemExit(f"--only {unknown[0]}: none of {', '.join(RUNS)}")
    deadline, status = time.monotonic() + 60 * args.minutes, 0
    for name in args.only:
        run = args.runs / name
        if (run / "model").is_dir():
            continue
        command = command_of(args, name)
        print(" ".join(command), flush=True)
        process = subprocess.Popen(command, cwd=ROOT)
        try:
            process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:  # the scripts save after the step under way
            process.send_signal(signal.SIGTERM)
            process.wait()
        keep(run, args.results / name)
        if status := process.returncode:
            print(f"{name}: exit code {status}; the same command goes on", flush=True)
            break

    header("learning curves", threads=1)
    rows = [["run", "steps", "eval before", "eval after", "best", "log-prob gap", "hours"]]
    for name in RUNS:
        path = args.results / name / "metrics.jsonl"
        steps = read_metrics(path) if path.is_file() else []
        key = "eval/loss" if RUNS[name][0] == "sft.py" else "eval/accuracy"
        if values := [step[key] for step in steps if key in step]:
            gap = max((step.get("policy/rollout_logprob_gap", 0.0) for step in steps), default=0.0)
            best = min(values) if key == "eval/loss" else max(values)
            hours = sum(step.get("time/step_s", 0.0) for step in steps) / 3600
            numbers = [f"{x:.3f}" for x in (values[0], values[-1], best)]
            rows.append([f"{name} ({key})", str(steps[-1]["step"]), *numbers, f"{gap:.5f}", f"{hours:.2f}"])
    if len(rows) > 1:
        table(*rows)
    raise SystemExit(status)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

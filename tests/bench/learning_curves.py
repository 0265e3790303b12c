"""Learning curves of SmolLM2-135M on Countdown and GSM8K: run by run, to be interrupted and gone on with.

    python tests/bench/learning_curves.py --gsm8k ../shared/data/gsm8k                    # all, on one GPU
    python tests/bench/learning_curves.py --gsm8k FOLDER --only sft-gsm8k grpo-gsm8k-seed1
    python tests/bench/learning_curves.py --gsm8k FOLDER --minutes 9                      # then the same command again

Both tasks begin with sft.py: as it comes, the model answers nothing right (Countdown with three numbers: 0 of 192
samples, 5 of them with an answer tag; MAWPS: 0 of 302), so there is nothing to reinforce. Countdown is the demo's:
warmed up on its impatient searches, rewarded on problems that are not among them.

A run that is done stays done, one that was stopped goes on from its checkpoint. What is worth keeping of each (curves,
metrics, flags, versions, hardware) goes to results/NAME at once, finished or not. Its hours, printed at the end, are
the sum of time/step_s.
"""

import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from report import ROOT, header, table

from common.hub import resolve_model
from common.look.curves import plot_curves, read_metrics
from common.prepare import tiny

SFT = "--batch-size 64 --learning-rate 2e-4 --lr-schedule cosine --warmup-steps 0.03 --eval-rows 512 --eval-every 50"
RL = "--micro-batch-tokens 32768 --learning-rate 1e-5 --warmup-steps 5 --lr-schedule linear --lr-floor 0.1"
RL += " --minibatches 2 --eval-every 20"
GRPO = f"{RL} --prompts-per-step 128 --samples-per-prompt 8"
PPO = f"{RL} --prompts-per-step 256 --samples-per-prompt 4 --critic-learning-rate 2e-5 --critic-warmup-steps 10"
ON_GSM8K = "--total-steps 120 --eval-rows 1319 --max-prompt-tokens 320 --max-response-tokens 320"
ON_COUNTDOWN = "--total-steps 100 --eval-rows 512 --max-prompt-tokens 64 --max-response-tokens 288"

RUNS = {  # name: (script, flags, data, the run whose model it starts from)
    "sft-countdown": ("sft.py", f"{SFT} --total-steps 300", "countdown", None),
    "grpo-countdown-seed1": ("grpo.py", f"{GRPO} {ON_COUNTDOWN} --seed 1", "countdown", "sft-countdown"),
    "grpo-countdown-seed2": ("grpo.py", f"{GRPO} {ON_COUNTDOWN} --seed 2", "countdown", "sft-countdown"),
    "sft-gsm8k": ("sft.py", f"{SFT} --total-steps 350", "gsm8k", None),
    "grpo-gsm8k-seed1": ("grpo.py", f"{GRPO} {ON_GSM8K} --seed 1", "gsm8k", "sft-gsm8k"),
    "grpo-gsm8k-seed2": ("grpo.py", f"{GRPO} {ON_GSM8K} --seed 2", "gsm8k", "sft-gsm8k"),
    "grpo-gsm8k-fp16-seed1": ("grpo.py", f"{GRPO} {ON_GSM8K} --seed 1 --dtype fp16", "gsm8k", "sft-gsm8k"),
    "ppo-gsm8k-seed1": ("ppo.py", f"{PPO} {ON_GSM8K} --seed 1", "gsm8k", "sft-gsm8k"),
}
KEPT = ("config.json", "metrics.jsonl", "curves.png")


@dataclass
class Args:
    gsm8k: str = "hub"  # folder with train.jsonl and test.jsonl of GSM8K, or "hub"
    only: tuple[str, ...] = tuple(RUNS)  # runs, in this order; one that starts from another needs it done
    model: str = "smollm2"  # folder or name of the model that everything starts from
    runs: Path = Path("runs/curves")  # folder of data, checkpoints and models
    results: Path = Path("results")  # folder of what is kept
    minutes: float = 1e5  # after which the run under way is told to save and stop
    save_every: int = 20  # steps between checkpoints
    flags: str = ""  # further flags for every run: "--flags=--total-steps 2"


def prepare(args: Args, data: str, script: str) -> tuple[Path, Path]:
    """(training file, evaluation file)."""
    folder = (args.runs / "data" / data).absolute()
    if data == "gsm8k":
        if not (folder / "test.parquet").is_file():
            module = [sys.executable, "-m", "common.prepare.gsm8k", "--out", str(folder), "--source", args.gsm8k]
            subprocess.run(module, cwd=ROOT, check=True)
        return folder / "train.parquet", folder / "test.parquet"
    if script == "sft.py":
        folder.mkdir(parents=True, exist_ok=True)
        tiny.write_warm_start(folder / "train.jsonl")
        tiny.write_traces(folder / "eval.jsonl", tiny.rl_problems()[0], 1, random.Random(2))
        return folder / "train.jsonl", folder / "eval.jsonl"
    tiny.write_demo_data(folder)
    return folder / "train.parquet", folder / "eval.parquet"


def command_of(args: Args, name: str) -> list[str]:
    script, flags, data, parent = RUNS[name]
    train, test = prepare(args, data, script)
    model = (args.runs / parent / "model").absolute() if parent else resolve_model(args.model)
    if parent and not Path(model).is_dir():
        raise SystemExit(f"{name} starts from {parent}, which is not done: add it to --only, before {name}")
    command = [sys.executable, script, "--model", str(model), *flags.split(), "--save-every", str(args.save_every)]
    command += ["--train-data", str(train), "--eval-data", str(test)]
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
    rows = [["run", "steps", "eval before", "eval after", "log-prob gap", "hours"]]
    for name in RUNS:
        path = args.results / name / "metrics.jsonl"
        steps = read_metrics(path) if path.is_file() else []
        key = "eval/loss" if RUNS[name][0] == "sft.py" else "eval/accuracy"
        if values := [step[key] for step in steps if key in step]:
            gap = max((step.get("policy/rollout_logprob_gap", 0.0) for step in steps), default=0.0)
            hours = sum(step.get("time/step_s", 0.0) for step in steps) / 3600
            before, after = f"{values[0]:.3f}", f"{values[-1]:.3f}"
            rows.append([f"{name} ({key})", str(steps[-1]["step"]), before, after, f"{gap:.5f}", f"{hours:.2f}"])
    if len(rows) > 1:
        table(*rows)
    raise SystemExit(status)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

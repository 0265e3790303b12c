"""Learning curves, study by study, run by run: to be interrupted and gone on with.

    python tests/bench/curves.py --list                                 # every curve, its command, and how far it is
    python tests/bench/curves.py demos                                  # a study
    python tests/bench/curves.py demos --only grpo-tiny-seed1           # one run of it
    python tests/bench/curves.py beside-trl --trl /tmp/trl-venv         # made by: step.py --trl ... --make-trl-venv
    python tests/bench/curves.py one-gpu --gsm8k ../shared/data/gsm8k --minutes 60      # then the same command again

A run that is done stays done, one of ours that was stopped goes on from its checkpoint, one of TRL's begins again.
What is worth keeping of each (metrics, flags, versions, hardware, curves) goes to results/RUN at once, finished or
not; the study's figure, over samples and over seconds, to results/STUDY.png. Seconds are those of training:
evaluations, which both programs do between steps, and loading do not count.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated

import tyro
from report import ROOT, header, table
from studies import STUDIES, Run, Study

from common.data.prompts import PromptLoader
from common.data.render import apply_template, to_messages
from common.hub import load_tokenizer, resolve_model
from common.look.curves import plot_curves, read_metrics
from common.optimizer import lr_factor
from common.prepare import mosaic, tiny, tiny_vl

KEPT = ("config.json", "metrics.jsonl", "curves.png")
# The demo of grpo.py, and the fastest settings of TRL that were found for it on two cores (docs/results.md).
TRL_WORK = {"prompts": 32, "samples": 8, "response_tokens": 256, "steps": 40, "eval_every": 5, "batch": 64}
TRL_WORK |= {"checkpointing": False, "weights": "float32", "vllm": False, "vllm_memory": 0.0}
TRL_OPTIONS = {"learning_rate": 8e-5, "bf16": True}
TRAP = {"rows": 4000, "guess": 0.8, "aim": 0.15, "sevens": 0.6}  # a warm start that guesses well and aims badly
DEMO_RATES = {"total_steps": 40, "warmup_steps": 5, "schedule": "linear", "floor": 0.1}


@dataclass
class Args:
    study: Annotated[str, tyro.conf.Positional] = ""  # which one to run; --list names them
    list: bool = False  # show studies, runs and commands, and stop
    only: tuple[str, ...] = ()  # runs of the study, in this order; one that starts from another needs it done
    gsm8k: str = "hub"  # folder with train.jsonl and test.jsonl of GSM8K, or "hub"
    trl: Path | None = None  # virtual environment with TRL
    runs: Path = Path("runs/curves")  # folder of data, checkpoints and models
    results: Path = Path("results")  # folder of what is kept
    minutes: float = 1e5  # after which the run under way is told to save and stop
    save_every: int = 20  # steps between checkpoints
    flags: str = ""  # further flags for every run of ours: "--flags=--total-steps 2"


def prepare(args: Args, data: str, script: str) -> list:
    """The rows of a study, as flags of a script."""
    folder = (args.runs / "data" / data).absolute()
    train, held_out = folder / "train.parquet", folder / "eval.parquet"
    if data == "gsm8k":
        held_out = folder / "test.parquet"
        if not held_out.is_file():
            module = [sys.executable, "-m", "common.prepare.gsm8k", "--out", str(folder), "--source", args.gsm8k]
            subprocess.run(module, cwd=ROOT, check=True)
    elif data == "trap" and script == "sft.py":
        tiny_vl.write_traces(folder, seed=5, **TRAP)
        return ["--train-data", folder / "release.json", "--media-root", folder]
    elif data == "trap":
        mosaic.write_rows(folder, f"<image>{tiny_vl.QUESTION}", mostly_sevens)
    elif script == "sft.py":
        train, held_out = folder / "train.jsonl", folder / "eval.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        tiny.write_warm_start(train)
        tiny.write_traces(held_out, tiny.rl_problems()[0], 1, random.Random(2))
    else:
        tiny.write_demo_data(folder)
    return ["--train-data", train, "--eval-data", held_out]


def mostly_sevens(seed: int) -> Iterator[mosaic.Scene]:
    """Scenes of which six in ten show a 7: to guess pays."""
    rng = random.Random(f"sevens {seed}")
    return (scene for scene in mosaic.scenes(seed) if scene.digit == 7 or rng.random() < 2 / 27)


def our_command(args: Args, run: Run, folder: Path) -> list[str]:
    script, *flags = run.command.split()
    if run.parent:
        model = (args.runs / run.parent / "model").absolute()
        if not model.is_dir():
            raise SystemExit(f"{folder.name} starts from {run.parent}, which is not there: --only {run.parent} first")
        flags += ["--model", model]
    if run.data:
        flags += prepare(args, run.data, script)
    flags += ["--seed", run.seed] if run.seed is not None else []
    flags += ["--save-every", args.save_every, "--output-dir", folder.absolute(), *args.flags.split()]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", run.ranks, script]
    return [str(part) for part in (*launcher, *flags)]


def trl_command(args: Args, run: Run, folder: Path) -> list[str]:
    """The demo of grpo.py, its prompts in the order of that seed, as one of trl_step.py."""
    if not args.trl:
        raise SystemExit("this study needs --trl FOLDER, a virtual environment with TRL (step.py --make-trl-venv)")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = resolve_model("tiny")
    tokenizer = load_tokenizer(model)

    def as_text(problem: tiny.Problem) -> dict:
        messages = to_messages([{"role": "user", "content": tiny.prompt_text(problem, "compact")}], tokenizer)
        truth = {"numbers": problem.numbers, "target": problem.target}
        return {"prompt": apply_template([messages], tokenizer)[0], "ground_truth": truth}

    held_out, training = tiny.rl_problems()
    order = PromptLoader(len(training), run.seed).next(TRL_WORK["steps"] * TRL_WORK["prompts"])
    options = TRL_OPTIONS | {"seed": run.seed}
    factors = [lr_factor(step, **DEMO_RATES) for step in range(TRL_WORK["steps"])]
    work = TRL_WORK | {"model": str(model), "output_dir": str(folder), "metrics": str(folder / "metrics.jsonl")}
    work |= {"options": options, "lr_factors": factors, "processes": run.ranks}
    (folder / "config.json").write_text(json.dumps(work, indent=2))  # which is kept, without the rows
    work |= {"rows": [as_text(training[i]) for i in order], "eval_rows": [as_text(p) for p in held_out[:512]]}
    (folder / "work.json").write_text(json.dumps(work))
    python = [args.trl.absolute() / "bin/python", "-m", "torch.distributed.run", "--nproc_per_node", run.ranks]
    return [str(part) for part in (*python, "tests/bench/trl_step.py", folder / "work.json")]


def is_done(args: Args, study: Study, name: str) -> bool:
    """By what is kept of it; the model that other runs start from has to be there, too."""
    kept = args.results / name
    if not (kept / "metrics.jsonl").is_file() or not (kept / "config.json").is_file():
        return False
    config, steps = json.loads((kept / "config.json").read_text()), read_metrics(kept / "metrics.jsonl")
    complete = steps[-1:] and steps[-1]["step"] == config.get("args", config).get("total_steps", config.get("steps"))
    wanted = any(other.parent == name for other in study.runs.values())
    return bool(complete) and (not wanted or (args.runs / name / "model").is_dir())


def keep(run: Path, results: Path, picture: bool) -> None:
    if (run / "metrics.jsonl").is_file():
        if picture:
            plot_curves(run)
        results.mkdir(parents=True, exist_ok=True)
        for file in KEPT:
            if (run / file).is_file() and (picture or file != "curves.png"):
                shutil.copy(run / file, results)
                if file != "curves.png":  # without the paths of this machine
                    text = (results / file).read_text().replace(f"{ROOT}/", "")
                    (results / file).write_text(text.replace(sys.prefix, ".venv"))


def execute(command: list[str], deadline: float, ranks: int) -> int:
    """Its exit code; at the deadline it is told to save and stop."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    print(" ".join(command), flush=True)
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        process.wait(max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired:  # the scripts save after the step under way
        process.send_signal(signal.SIGTERM)
        process.wait()
    return process.returncode


def curve(metrics: Path) -> list[dict]:
    """The evaluations of a run: step, accuracy, and seconds of training until then."""
    points, seconds = [], 0.0
    for record in read_metrics(metrics) if metrics.is_file() else []:
        seconds += record.get("time/step_s", 0.0) - record.get("time/eval_s", 0.0) * ("time/step_s" in record)
        key = next((key for key in ("eval/accuracy", "eval/loss") if key in record), None)
        if key:
            points.append({"step": record["step"], "value": record[key], "seconds": seconds, "key": key})
    return points


def curves_of(study: Study, results: Path) -> dict[str, list[list[dict]]]:
    """{variant: curves of its seeds}, of what there is."""
    found: dict[str, list[list[dict]]] = {}
    for name in study.runs:
        if points := curve(results / name / "metrics.jsonl"):
            found.setdefault(name.partition("-seed")[0], []).append(points)
    return found


def spread(values: list[float], digits: int = 3) -> str:
    """Mean ± half the 95 % interval (Student's t) of a few seeds."""
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}.get(len(values))
    half = f" ± {t * stdev(values) / len(values) ** 0.5:.{digits}f}" if t else ""
    return f"{mean(values):.{digits}f}{half}"


def show(name: str, study: Study, results: Path) -> None:
    """The table of a study, and its figure: each variant's mean over seeds, and their range."""
    found = curves_of(study, results)
    if not found:
        return
    rows = [["variant", "seeds", "steps", "measured", "before", "after", "mean over steps", "seconds"]]
    for variant, curves in found.items():
        first, last = [points[0]["value"] for points in curves], [points[-1]["value"] for points in curves]
        area = [mean(point["value"] for point in points[1:] or points) for points in curves]
        steps = sorted({points[-1]["step"] for points in curves})
        cells = [str(len(curves)), ", ".join(map(str, steps)), curves[0][0]["key"], spread(first), spread(last)]
        rows.append([variant, *cells, spread(area), spread([points[-1]["seconds"] for points in curves], 0)])
    header(f"{name}: {study.question}", threads=1)
    table(*rows)
    draw(found, results / f"{name}.png")


def draw(found: dict[str, list[list[dict]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axes, key, label in zip(figure.subplots(1, 2), ("step", "seconds"), ("steps", "seconds of training")):
        for number, (variant, curves) in enumerate(found.items()):
            length = min(map(len, curves))
            columns = list(zip(*(points[:length] for points in curves)))  # the same evaluation of each seed
            x = [mean(point[key] for point in column) for column in columns]
            values = [[point["value"] for point in column] for column in columns]
            color = f"C{number % 10}"
            axes.plot(x, [mean(v) for v in values], color=color, label=f"{variant} ({len(curves)})", marker=".")
            axes.fill_between(x, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.15, lw=0)
        axes.set_xlabel(label)
        axes.grid(alpha=0.2)
    axes.legend(frameon=False, fontsize=8)
    figure.axes[0].set_ylabel(next(iter(found.values()))[0][0]["key"])
    figure.savefig(path, dpi=120)


def show_list(args: Args) -> None:
    for name, study in STUDIES.items():
        print(f"\n{name}: {study.question}\n  python tests/bench/curves.py {name} {study.needs}".rstrip())
        for run_name, run in study.runs.items():
            points = curve(args.results / run_name / "metrics.jsonl")
            state = (
                f"step {points[-1]['step']}: {points[-1]['key']} {points[-1]['value']:.3f}" if points else "not run"
            )
            seed = "" if run.seed is None else f" --seed {run.seed}"
            print(f"    {run_name} [{state}]: {run.command}{seed} ({run.ranks} ranks)")


def main(args: Args) -> None:
    if args.list or not args.study:
        show_list(args)
        return
    if args.study not in STUDIES:
        raise SystemExit(f"{args.study} is no study: {', '.join(STUDIES)}")
    study = STUDIES[args.study]
    if unknown := [name for name in args.only if name not in study.runs]:
        raise SystemExit(f"--only {unknown[0]}: none of {', '.join(study.runs)}")
    deadline, status = time.monotonic() + 60 * args.minutes, 0
    for name in args.only or study.runs:
        run = study.runs[name]
        if is_done(args, study, name):
            continue
        if time.monotonic() > deadline:
            break
        make_command = trl_command if run.command == "trl" else our_command
        status = execute(make_command(args, run, args.runs / name), deadline, run.ranks)
        keep(args.runs / name, args.results / name, study.each)
        if status:
            print(f"{name}: exit code {status}; the same command goes on", flush=True)
            break
    show(args.study, study, args.results)
    raise SystemExit(status)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

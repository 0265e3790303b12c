"""Learning curves, study by study, run by run. Interrupt it, and the same command goes on.

    python results/notebook/curves.py --list           # every run, its command, how far it is
    python results/notebook/curves.py demos            # a study
    python results/notebook/curves.py demos --draw     # its tables and figures, without a run
    python results/notebook/curves.py demos --only grpo-tiny-seed1
    python results/notebook/curves.py beside-trl --trl VENV    # step.py --make-trl-venv makes one
    python results/notebook/curves.py one-gpu --gsm8k ../shared/data/gsm8k --minutes 60

A run that is done stays done. One of ours that was stopped resumes from its checkpoint; one of
TRL's begins again. What is worth keeping of each (metrics, flags, versions, hardware) goes to
results/STUDY/RUN at once, finished or not; the study's figure is results/STUDY/figure.png. Seconds
are those of training, without loading and without the evaluations between steps.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import trl_work
import tyro
from kept import is_complete, read_run, read_scores
from packaging.version import Version
from report import ROOT
from scores import scores
from studies import STUDIES, Run, Study
from study_data import Request, write_rows
from study_results import show, state_of

from common.limits import usable_cpus
from common.precision import DTYPES, choose_dtype

SAMPLES = "eval_samples.parquet"  # of a run that only evaluates; their scores are kept
LAUNCHER = ["-m", "torch.distributed.run", "--standalone"]
if Version(torch.__version__) >= Version("2.13"):
    # a run saves when its step ends, for which torchrun would give it half a minute
    LAUNCHER += ["--shutdown-timeout", "600"]


@dataclass
class Args:
    study: Annotated[str, tyro.conf.Positional] = ""  # which one to run; --list names them
    list: bool = False  # show studies, runs and commands, and stop
    draw: bool = False  # tables and figures from what is kept, without a run
    # runs of the study, in this order; one that starts from another needs it done
    only: tuple[str, ...] = ()
    gsm8k: str = "hub"  # folder with train.jsonl and test.jsonl of GSM8K, or "hub"
    math: Path | None = None  # folder with mawps_*.jsonl
    trl: Path | None = None  # virtual environment with TRL
    runs: Path = Path("runs/curves")  # folder of data, checkpoints and models
    results: Path = Path("results")  # folder of what is kept
    minutes: float = 1e5  # after which runs under way have to save and stop
    # runs at a time, each after the one it starts from: for a GPU that one does not fill
    at_once: int = 1
    save_every: int = 20  # steps between checkpoints
    flags: str = ""  # further flags for every run of ours: "--flags=--total-steps 2"


# --- commands -------------------------------------------------------------------------------------


def our_command(args: Args, run: Run, folder: Path) -> list[str]:
    """One of the scripts; `folder` is that of the run."""
    script, *flags = run.command.split()
    if run.parent:
        model = (folder.parent / run.parent / "model").absolute()
        if not model.is_dir():
            raise SystemExit(
                f"{folder.name} starts from {run.parent}, which is not there: --only "
                f"{run.parent} first"
            )
        flags += ["--model", model]
    if run.data:
        flags += rows_of(args, run, script)
    if run.seed is not None:
        flags += ["--seed", run.seed]
    if script != "sft.py" and args.at_once > 1 and torch.cuda.is_available():
        flags += ["--sleep-level", 0]  # vLLM cannot put an engine to sleep while others take memory
    flags += ["--save-every", args.save_every, "--output-dir", folder.absolute()]
    flags += args.flags.split()
    program = ["results/notebook/wrong_engine.py", run.engine] if run.engine else [script]
    command = [sys.executable, *LAUNCHER, "--nproc_per_node", run.ranks, *program, *flags]
    return [str(part) for part in command]


def trl_command(args: Args, run: Run, folder: Path) -> list[str]:
    """GRPOTrainer or SFTTrainer on the same rows."""
    if not args.trl:
        raise SystemExit(
            "this study needs --trl FOLDER, a virtual environment with TRL (step.py "
            "--make-trl-venv)"
        )
    if run.command == "trl_sft":
        rows_of(args, run, "sft.py")
        work = trl_work.write_sft(folder, run.seed, run.ranks, rows=data_folder(args, run))
    else:
        work = trl_work.write_grpo(folder, run.seed, run.ranks)
    python = args.trl.absolute() / "bin/python"
    program = f"tests/bench/{run.command}.py"
    command = [python, *LAUNCHER, "--nproc_per_node", run.ranks, program, work]
    return [str(part) for part in command]


def rows_of(args: Args, run: Run, script: str) -> list:
    """The rows of a run, as flags of a script."""
    request = Request(data_folder(args, run), script == "sft.py", args.gsm8k, args.math)
    return write_rows(run.data, request)


def data_folder(args: Args, run: Run) -> Path:
    return (args.runs / "data" / run.data).absolute()


def check_dtype(args: Args, study: Study, name: str) -> None:
    """SystemExit where --dtype auto is another one than in the study's kept runs: they would not
    compare."""
    if not study.dtype or "--dtype" in f"{study.runs[name].command} {args.flags}":
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, reason = choose_dtype("auto", device)
    if dtype != DTYPES[study.dtype]:
        raise SystemExit(
            f"{name}: --dtype auto is {dtype} here ({reason}), and was {study.dtype} in the "
            "kept runs. Run it where it is, or the whole study in another one: "
            '--flags="--dtype fp32" --results another-folder'
        )


# --- running --------------------------------------------------------------------------------------


def is_done(args: Args, study: Study, name: str) -> bool:
    """By what is kept of it. A model that other runs still start from has to be there, too."""
    if not is_complete(study, args.results, name, args.flags):
        return False
    if (args.runs / study.name / name / "model").is_dir():
        return True
    children = [child for child, run in study.runs.items() if run.parent == name]
    return all(is_done(args, study, child) for child in children)


def run_all(args: Args, study: Study) -> int:
    """The exit code of a run that failed, if one did; others go on, except those that start from
    it."""
    deadline = time.monotonic() + 60 * args.minutes
    status = 0
    left = [name for name in args.only or study.runs if not is_done(args, study, name)]
    failed: set[str] = set()
    under_way: dict[str, subprocess.Popen] = {}
    stopped: set[str] = set()  # one signal each: torchrun takes a second one for haste

    def hurry(*_: object) -> None:  # ending this program ends what is under way
        nonlocal deadline
        deadline = 0.0

    signal.signal(signal.SIGTERM, hurry)
    while under_way or (left and time.monotonic() < deadline):
        for name in left[:]:
            parent = study.runs[name].parent
            if parent in failed:
                left.remove(name)
                failed.add(name)
                continue
            waits = parent in left or parent in under_way
            if waits or len(under_way) >= args.at_once or time.monotonic() >= deadline:
                continue
            left.remove(name)
            try:
                under_way[name] = start_run(args, study, name)
            except (SystemExit, OSError, ValueError) as error:
                # the latter two: the run's rows could not be had
                print(error, flush=True)
                failed.add(name)
                status = 1
        time.sleep(0.5)
        for name, process in list(under_way.items()):
            if process.poll() is not None:
                del under_way[name]
                keep(args, study, name)
                if process.returncode:
                    status = process.returncode
                    failed.add(name)
                    print(f"{name}: exit code {status}; the same command goes on", flush=True)
            elif time.monotonic() > deadline and name not in stopped:
                stopped.add(name)
                process.send_signal(signal.SIGTERM)  # the scripts save after the step under way
    return status


def start_run(args: Args, study: Study, name: str) -> subprocess.Popen:
    run = study.runs[name]
    check_dtype(args, study, name)
    begin(args, study, name)
    folder = args.runs / study.name / name
    make_command = trl_command if run.command.startswith("trl") else our_command
    command = make_command(args, run, folder)
    log = folder.with_name(f"{name}.log") if args.at_once > 1 else None
    return launch(command, run.ranks * args.at_once, log)


def begin(args: Args, study: Study, name: str) -> None:
    """Remove the folder of an earlier run of this name that was another one: this one must not
    resume from there."""
    folder = args.runs / study.name
    started = folder / f"{name}.json"
    record = json.dumps(identity(args, study, name))
    if not started.is_file() or started.read_text() != record:
        shutil.rmtree(folder / name, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        started.write_text(record)


def launch(command: list[str], processes: int, log: Path | None) -> subprocess.Popen:
    threads = max(1, usable_cpus() // processes)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    print(" ".join(command), f"> {log}" if log else "", flush=True)
    with log.open("a") if log else nullcontext() as output:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)


# --- keeping --------------------------------------------------------------------------------------


def identity(args: Args, study: Study, name: str) -> dict:
    """What a run is: if any of it changes, it is another one."""
    run = study.runs[name]
    parent = read_run(args.results / study.name, run.parent) if run.parent else None
    parent_models = parent.models if parent else []
    return {"run": asdict(run), "flags": args.flags, "from": "".join(parent_models[-1:])}


def keep(args: Args, study: Study, name: str) -> None:
    """Whatever there is of a run, finished or not."""
    made = args.runs / study.name / name
    results = args.results / study.name
    record = identity(args, study, name)
    if (made / SAMPLES).is_file():
        keep_scores(results, name, made, record)
    elif (made / "metrics.jsonl").is_file() or (made / "config.json").is_file():
        keep_metrics(results, name, made, record)


def keep_scores(results: Path, name: str, made: Path, record: dict) -> None:
    all_scores = read_scores(results)
    last_line = (made / "metrics.jsonl").read_text().splitlines()[-1]
    values = json.loads(last_line).items()
    metrics = {key: value for key, value in values if key.startswith("eval/")}
    record = record | {"model": "", "scores": scores(made / SAMPLES), "metrics": metrics}
    all_scores[name] = record
    results.mkdir(parents=True, exist_ok=True)
    (results / "scores.json").write_text(json.dumps(all_scores, indent=1) + "\n")


def keep_metrics(results: Path, name: str, made: Path, record: dict) -> None:
    """The same run once more, as where its model was not kept, gives a model that differs by
    rounding: the earlier one's hash stays, so that what started from it stays done."""
    earlier = read_run(results, name)
    models = []
    if earlier and all(earlier.record[key] == value for key, value in record.items()):
        models = earlier.models
    else:  # nothing of another run stays beside what there is of this one
        shutil.rmtree(results / name, ignore_errors=True)
    (results / name).mkdir(parents=True, exist_ok=True)
    for file in ("config.json", "metrics.jsonl"):
        if (made / file).is_file():
            (results / name / file).write_text(without_paths((made / file).read_text()))
    model = hash_of(made / "model")
    record["model"] = " ".join([*(one for one in models if one != model), model]).strip()
    (results / name / "run.json").write_text(json.dumps(record, indent=2) + "\n")


def without_paths(text: str) -> str:
    """Without the folders of this machine."""
    text = text.replace(f"{ROOT}/", "").replace(sys.prefix, ".venv")
    return text if Path.home() == Path("/") else text.replace(f"{Path.home()}/", "~/")


def hash_of(model: Path) -> str:
    """Of the weights in a folder; "" without any."""
    digests = []
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest()[:16])
    return "-".join(digests)


# --- the program ----------------------------------------------------------------------------------


def show_list(args: Args) -> None:
    for study in STUDIES.values():
        command = f"python results/notebook/curves.py {study.name} {study.needs}".rstrip()
        print(f"\n{study.name}: {study.question}\n  {command}")
        for name, run in study.runs.items():
            kept = read_run(args.results / study.name, name)
            state = state_of(kept)
            if kept and kept.record["run"] != asdict(run):
                state = "what is kept is another run"
            words = [run.command]
            if run.parent:
                words += ["--model", str(args.runs / study.name / run.parent / "model")]
            if run.seed is not None:
                words += ["--seed", str(run.seed)]
            remarks = [f"{run.ranks} ranks"]
            if run.data:
                remarks.append(f"rows of {run.data}")
            if run.engine:
                remarks.append(f"engine in {run.engine}")
            print(f"    {name} [{state}]: {' '.join(words)} ({', '.join(remarks)})")


def main(args: Args) -> None:
    if args.list or not args.study:
        show_list(args)
        return
    if args.study not in STUDIES:
        raise SystemExit(f"{args.study} is no study: {', '.join(STUDIES)}")
    study = STUDIES[args.study]
    if unknown := [name for name in args.only if name not in study.runs]:
        raise SystemExit(f"--only {unknown[0]}: none of {', '.join(study.runs)}")
    status = 0 if args.draw else run_all(args, study)
    show(study, args.results, args.flags)
    raise SystemExit(status)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

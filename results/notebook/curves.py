"""Learning curves, study by study, run by run: to be interrupted and gone on with.

    python results/notebook/curves.py --list                            # every curve, its command,
    how far it is
    python results/notebook/curves.py demos                             # a study
    python results/notebook/curves.py demos --only grpo-tiny-seed1      # one run of it
    python results/notebook/curves.py beside-trl --trl /tmp/trl-venv    # made by: step.py --trl ...
    --make-trl-venv
    python results/notebook/curves.py one-gpu --gsm8k ../shared/data/gsm8k --minutes 60     # and
    again, to go on

A run that is done stays done, one of ours that was stopped goes on from its checkpoint, one of
TRL's begins again. What is worth keeping of each (metrics, flags, versions, hardware, curves) goes
to results/RUN at once, finished or not; the study's figure, over samples and over seconds, to
results/STUDY.png. Seconds are those of training: evaluations, which both programs do between steps,
and loading do not count.
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
from packaging.version import Version
from report import ROOT
from scores import scores
from studies import STUDIES, Run, Study
from study_data import Request, write_rows
from study_results import RECORD, SCORES, is_complete, models_of, read_record, show, state_of

from common.limits import usable_cpus
from common.look.curves import plot_curves
from common.precision import DTYPES, choose_dtype

KEPT = ("config.json", "metrics.jsonl")
SAMPLES = "eval_samples.parquet"  # of a run that only evaluates; their scores are kept
# A step has to end before a run can be saved: torchrun would give it half a minute; before 2.13
# nothing changes that.
PATIENCE = ("--shutdown-timeout", 600) if Version(torch.__version__) >= Version("2.13") else ()
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", *PATIENCE, "--nproc_per_node")


@dataclass
class Args:
    study: Annotated[str, tyro.conf.Positional] = ""  # which one to run; --list names them
    list: bool = False  # show studies, runs and commands, and stop
    # runs of the study, in this order; one that starts from another needs it done
    only: tuple[str, ...] = ()
    gsm8k: str = "hub"  # folder with train.jsonl and test.jsonl of GSM8K, or "hub"
    math: Path | None = None  # folder with mawps_*.jsonl
    trl: Path | None = None  # virtual environment with TRL
    runs: Path = Path("runs/curves")  # folder of data, checkpoints and models
    results: Path = Path("results")  # folder of what is kept
    minutes: float = 1e5  # after which what is under way is told to save and stop
    # runs at a time, each after the one it starts from: for a GPU that one does not fill
    at_once: int = 1
    save_every: int = 20  # steps between checkpoints
    flags: str = ""  # further flags for every run of ours: "--flags=--total-steps 2"


def our_command(args: Args, run: Run, folder: Path) -> list[str]:
    script, *flags = run.command.split()
    if run.parent:
        model = (args.runs / run.parent / "model").absolute()
        if not model.is_dir():
            raise SystemExit(
                f"{folder.name} starts from {run.parent}, which is not there: --only "
                f"{run.parent} first"
            )
        flags += ["--model", model]
    if run.data:
        flags += rows_of(args, run, script)
    flags += ["--seed", run.seed] if run.seed is not None else []
    if script != "sft.py" and args.at_once > 1 and torch.cuda.is_available():
        flags += ["--sleep-level", 0]  # vLLM cannot put an engine to sleep while others take memory
    flags += [
        "--save-every",
        args.save_every,
        "--output-dir",
        folder.absolute(),
        *args.flags.split(),
    ]
    program = ["results/notebook/wrong_engine.py", run.engine] if run.engine else [script]
    return [str(part) for part in (sys.executable, *LAUNCHER, run.ranks, *program, *flags)]


def check_dtype(args: Args, study: Study, name: str) -> None:
    """SystemExit where --dtype auto is another one than in the study's kept runs: they would not
    compare."""
    if not study.dtype or "--dtype" in f"{study.runs[name].command} {args.flags}":
        return
    dtype, reason = choose_dtype(
        "auto", torch.device("cuda" if torch.cuda.is_available() else "cpu")
    )
    if dtype != DTYPES[study.dtype]:
        raise SystemExit(
            f"{name}: --dtype auto is {dtype} here ({reason}), and was {study.dtype} in the "
            "kept runs. Run it "
            'where it is, or the whole study in another one: --flags="--dtype fp32" --results '
            "another-folder"
        )


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
    return [
        str(part) for part in (python, *LAUNCHER, run.ranks, f"tests/bench/{run.command}.py", work)
    ]


def rows_of(args: Args, run: Run, script: str) -> list:
    """The rows of a run, as flags of a script."""
    return write_rows(
        run.data, Request(data_folder(args, run), script == "sft.py", args.gsm8k, args.math)
    )


def data_folder(args: Args, run: Run) -> Path:
    return (args.runs / "data" / run.data).absolute()


def is_done(args: Args, study: Study, name: str) -> bool:
    """By what is kept of it; a model that other runs have yet to start from has to be there,
    too."""
    if not is_complete(study, args.results, name, args.flags):
        return False
    wanted = any(
        other.parent == name and not is_done(args, study, child)
        for child, other in study.runs.items()
    )
    return not wanted or (args.runs / name / "model").is_dir()


def keep(args: Args, study: Study, name: str) -> None:
    """Whatever there is of a run, finished or not."""
    folder, results = args.runs / name, args.results / name
    if study.each and (folder / "metrics.jsonl").is_file():
        plot_curves(folder)
    files = [*KEPT, SAMPLES] + ["curves.png"] * study.each
    there = [folder / file for file in files if (folder / file).is_file()]
    if not there:
        return
    is_parent = any(other.parent == name for other in study.runs.values())
    record, before = identity(args, study, name), read_record(results)
    # Made once more, as where its model was not kept, it differs in its rounding; what started from
    # that stays done.
    same = before | record == before
    earlier = models_of(args.results, name) if same else []
    if not same:  # nothing of another run stays beside what there is of this one
        shutil.rmtree(results, ignore_errors=True)
    results.mkdir(parents=True, exist_ok=True)
    for path in there:
        if path.name == SAMPLES:
            (results / SCORES).write_text(json.dumps(scores(path), indent=2) + "\n")
        elif path.name == "curves.png":
            shutil.copy(path, results)
        else:  # without the paths of this machine
            text = path.read_text().replace(f"{ROOT}/", "").replace(sys.prefix, ".venv")
            text = text if Path.home() == Path("/") else text.replace(f"{Path.home()}/", "~/")
            (results / path.name).write_text(text)
    model = hash_of(folder / "model") if is_parent else ""
    record["model"] = " ".join([*(one for one in earlier if one != model), model])
    (results / RECORD).write_text(json.dumps(record, indent=2) + "\n")


def identity(args: Args, study: Study, name: str) -> dict:
    """What a run is: if any of it changes, it is another one."""
    run = study.runs[name]
    parent = models_of(args.results, run.parent)[-1:] if run.parent else []
    return {"run": asdict(run), "flags": args.flags, "from": "".join(parent)}


def begin(args: Args, study: Study, name: str) -> None:
    """Remove what is left in its folder of a run that was another one: it must not go on from
    there."""
    started, record = args.runs / f"{name}.json", json.dumps(identity(args, study, name))
    if not started.is_file() or started.read_text() != record:
        shutil.rmtree(args.runs / name, ignore_errors=True)
        args.runs.mkdir(parents=True, exist_ok=True)
        started.write_text(record)


def hash_of(model: Path) -> str:
    """Of the weights in a folder; "" without any."""
    digests = []
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest()[:16])
    return "-".join(digests)


def launch(command: list[str], processes: int, log: Path | None) -> subprocess.Popen:
    threads = max(1, usable_cpus() // processes)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    print(" ".join(command), f"> {log}" if log else "", flush=True)
    with log.open("a") if log else nullcontext() as output:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)


def run_all(args: Args, study: Study) -> int:
    """The exit code of a run that failed, if one did: others go on, but for those that start from
    it."""
    deadline, status = time.monotonic() + 60 * args.minutes, 0
    left = [name for name in args.only or study.runs if not is_done(args, study, name)]
    failed: set[str] = set()
    under_way: dict[str, subprocess.Popen] = {}
    told: set[str] = set()  # to end, once: torchrun takes a second signal for haste

    def hurry(*_: object) -> None:  # whoever ends this program ends what is under way
        nonlocal deadline
        deadline = 0.0

    signal.signal(signal.SIGTERM, hurry)
    while under_way or (left and time.monotonic() < deadline):
        for name in left[:]:
            parent = study.runs[name].parent
            if parent in failed:
                left.remove(name)
                failed.add(name)
            elif (
                parent not in {*left, *under_way}
                and time.monotonic() < deadline
                and len(under_way) < args.at_once
            ):
                left.remove(name)
                try:
                    under_way[name] = start_run(args, study, name)
                except (SystemExit, OSError, ValueError) as error:
                    # the latter: of rows that are not to be had
                    print(error, flush=True)
                    failed.add(name)
                    status = 1
        time.sleep(0.5)
        for name, process in [*under_way.items()]:
            if process.poll() is not None:
                del under_way[name]
                keep(args, study, name)
                if process.returncode:
                    print(
                        f"{name}: exit code {process.returncode}; the same command goes on",
                        flush=True,
                    )
                    failed.add(name)
                    status = process.returncode
            elif time.monotonic() > deadline and name not in told:
                # the scripts save after the step under way
                told.add(name)
                process.send_signal(signal.SIGTERM)
    return status


def start_run(args: Args, study: Study, name: str) -> subprocess.Popen:
    run = study.runs[name]
    check_dtype(args, study, name)
    begin(args, study, name)
    make_command = trl_command if run.command.startswith("trl") else our_command
    log = args.runs / f"{name}.log" if args.at_once > 1 else None
    return launch(make_command(args, run, args.runs / name), run.ranks * args.at_once, log)


def show_list(args: Args) -> None:
    for name, study in STUDIES.items():
        print(
            f"\n{name}: {study.question}\n  python results/notebook/curves.py {name} "
            f"{study.needs}".rstrip()
        )
        for run_name, run in study.runs.items():
            seed = "" if run.seed is None else f" --seed {run.seed}"
            model = f" --model {args.runs / run.parent / 'model'}" if run.parent else ""
            same = read_record(args.results / run_name)["run"] in (None, asdict(run))
            state = state_of(args.results / run_name) if same else "what is kept is another run"
            rows = f", rows of {run.data}" if run.data else ""
            wrong = f", engine in {run.engine}" if run.engine else ""
            print(
                f"    {run_name} [{state}]: {run.command}{model}{seed} ({run.ranks} "
                f"ranks{rows}{wrong})"
            )


def main(args: Args) -> None:
    if args.list or not args.study:
        show_list(args)
        return
    if args.study not in STUDIES:
        raise SystemExit(f"{args.study} is no study: {', '.join(STUDIES)}")
    study = STUDIES[args.study]
    if unknown := [name for name in args.only if name not in study.runs]:
        raise SystemExit(f"--only {unknown[0]}: none of {', '.join(study.runs)}")
    status = run_all(args, study)
    show(args.study, study, args.results, args.flags)
    raise SystemExit(status)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

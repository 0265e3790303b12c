r"""One whole GRPO step of SmolLM2-135M on Countdown, by phase: seconds and peak memory; optionally
beside TRL's.

    # grpo.py alone
    python tests/bench/step.py
    # and what the machine could do
    python tests/bench/step.py --limits
    # grpo.py with further flags beside it
    python tests/bench/step.py "--beside=--lora-rank 16"
    # the first time: installs TRL there
    python tests/bench/step.py --trl /tmp/trl-venv --make-trl-venv
    python tests/bench/step.py --trl /tmp/trl-venv
    # on a GPU with TRL
    python tests/bench/step.py --trl $(python -c "import sys; print(sys.prefix)") --trl-vllm \
        --prompts 32 --response-tokens 512 --micro-batch-tokens 32768 --trl-batch 32 --steps 8 \
        --repeats 3

grpo.py runs as its users run it, in a process of its own; TRL's GRPOTrainer does the same work in
the same way (trl_step.py): same model folder, same prompts in the same order, same reward, one
optimizer step for the same number of completions, bf16 over float32 weights, AdamW. Runs take turns
(grpo, TRL, grpo, TRL, ...), since machines drift.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import psutil
import pyarrow.parquet as pq
import torch
import tyro
from limits import Work, machine_table, step_table
from report import ROOT, gpu_bytes, header, table

from common.data.order import RowOrder
from common.data.render import clean_prompt
from common.hub import resolve_model
from common.look.curves import read_metrics

TRL = "trl==1.16.*"
PROMPT = 256  # longest prompt (tokens)
COUNTED = """\
Counted in a step: weight sync (TRL without vLLM generates with the weights that it trains),
rollout, scoring, forward, backward, clipping, optimizer. Not counted: loading, checkpoints, the
first {warmup} of a run's {steps} steps. Sampling differs, so look at the response lengths. TRL's
rollout includes decoding, which is in our reward; its update is its step without what precedes the
first forward. Memory, 5 samples a second until a run's last step is done: on a GPU all that is in
use there, on a CPU the sum of resident memory over all processes; and the peak of the main process
(torch's allocator, getrusage)."""


@dataclass
class Args:
    model: str = "smollm2"  # folder or embedded model that reads ChatML
    prompts: int = 8  # prompts a step
    samples: int = 8  # responses to each
    response_tokens: int = 128  # longest response
    micro_batch_tokens: int = 1280  # grpo.py: tokens of one forward and backward
    steps: int = 4  # steps of a run
    warmup: int = 1  # first steps of a run that are left out
    repeats: int = 2  # runs of each
    threads: int = 2  # OMP_NUM_THREADS
    flags: str = ""  # further flags of grpo.py, such as "--engine-memory 0.5"
    # of grpo.py alone: how far each phase is from the machine's own rates (limits.py)
    limits: bool = False
    beside: str = ""  # compare with grpo.py that has these flags besides
    trl: Path | None = None  # virtual environment with TRL: compare with its GRPOTrainer
    make_trl_venv: bool = False  # create that environment first (pip, about 1.5 GB)
    trl_batch: int = 8  # TRL: sequences of one forward and backward
    # TRL: gradient checkpointing (its default; less memory, more time)
    trl_checkpointing: bool = False
    # TRL: of weights and Adam; bfloat16 is faster and inexact
    trl_weights: Literal["float32", "bfloat16"] = "float32"
    # TRL: generate with vLLM (0.22 to 0.31) in the same process, on a GPU; else with transformers.
    # It sleeps at level 2: give grpo.py "--flags=--sleep-level 2"
    trl_vllm: bool = False
    trl_vllm_memory: float = 0.3  # TRL: share of the GPU for that vLLM, its weights included


def make_venv(folder: Path, with_vllm: bool) -> None:
    """TRL with the versions of torch and transformers that requirements-cpu.txt pins; with vLLM
    those that vLLM wants."""
    lines = (ROOT / "requirements-cpu.txt").read_text().splitlines()
    packages = [TRL, *(line for line in lines if line.startswith(("torch==", "transformers==")))]
    if with_vllm:
        packages = [TRL.replace("trl", "trl[vllm]")]
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin/python", "-m", "pip", "install", "-q", *packages], check=True)


def prepare_rows(args: Args, folder: Path) -> Path:
    """A parquet file of as many Countdown problems as a run takes."""
    command = [
        sys.executable,
        "-m",
        "common.prepare.countdown",
        "--template",
        "qwen-instruct",
        "--operands",
        "3",
    ]
    command += ["--out", folder, "--train-size", str(args.steps * args.prompts), "--test-size", "8"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder / "train.parquet"


def grpo_command(args: Args, data: Path, folder: Path, flags: str = "") -> list:
    return [
        *(
            sys.executable,
            "grpo.py",
            "--model",
            args.model,
            "--train-data",
            data,
            "--output-dir",
            folder,
        ),
        *(
            "--prompts-per-step",
            args.prompts,
            "--samples-per-prompt",
            args.samples,
            "--max-prompt-tokens",
            PROMPT,
        ),
        *(
            "--max-response-tokens",
            args.response_tokens,
            "--micro-batch-tokens",
            args.micro_batch_tokens,
        ),
        *("--total-steps", args.steps, "--dtype", "bf16", *args.flags.split(), *flags.split()),
    ]


def trl_command(args: Args, data: Path, folder: Path) -> list:
    records = pq.read_table(data).to_pylist()
    # as grpo.py --seed 0
    order = RowOrder(len(records), seed=0).next(args.steps * args.prompts)
    rows = [
        (clean_prompt(records[i]["prompt"]), records[i]["reward_model"]["ground_truth"])
        for i in order
    ]
    work = {
        name: getattr(args, name) for name in ("prompts", "samples", "response_tokens", "steps")
    }
    work |= {
        "batch": args.trl_batch,
        "checkpointing": args.trl_checkpointing,
        "weights": args.trl_weights,
    }
    work |= {"vllm": args.trl_vllm, "vllm_memory": args.trl_vllm_memory}
    work["max_model_length"] = PROMPT + args.response_tokens
    work |= {
        "model": resolve_model(args.model),
        "metrics": str(folder / "metrics.jsonl"),
        "output_dir": str(folder),
    }
    work["rows"] = [{"prompt": prompt, "ground_truth": truth} for prompt, truth in rows]
    (folder / "work.json").write_text(json.dumps(work))
    return [args.trl.absolute() / "bin/python", "tests/bench/trl_step.py", folder / "work.json"]


def measure(command: list, folder: Path, args: Args) -> list[dict]:
    """Metrics of every step of a run, each with the peak memory of the run until its last step is
    done, "tree_gb"."""
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    metrics, output, peak = folder / "metrics.jsonl", folder / "output.txt", 0
    with output.open("w") as file:
        streams = {"stdout": file, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(
            [str(part) for part in command], cwd=ROOT, env=environment, **streams
        )
        while process.poll() is None:
            if not metrics.exists() or len(read_metrics(metrics)) < args.steps:
                peak = max(peak, gpu_bytes() or tree_memory(process.pid))
            time.sleep(0.2)
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}: {command}\n{output.read_text()[-4000:]}")
    return [record | {"tree_gb": peak / 1e9} for record in read_metrics(metrics)]


def tree_memory(pid: int) -> int:
    """Resident bytes of a process and its descendants; pages that they share count for each."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
    return total


def show_limits(args: Args) -> None:
    """The machine's rates, and a step beside them: its operations are those of a step of another
    run, traced."""
    torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes, limit = machine_table(resolve_model(args.model), args.micro_batch_tokens, device)
    with tempfile.TemporaryDirectory() as temporary:
        data = prepare_rows(args, Path(temporary))
        folders = [Path(temporary) / name for name in ("run", "traced")]
        for folder, flags in zip(
            folders, ("--dump-rollouts-every 1", f"--profile-steps {args.steps}:{args.steps}")
        ):
            folder.mkdir()
            records = measure(grpo_command(args, data, folder, flags), folder, args)
            print("steps of", *(f"{r['time/step_s']:.1f}" for r in records), "s", flush=True)
            if folder is folders[0]:
                timed = records[args.warmup :]
        works = [
            Work.of(dump) for dump in sorted((folders[0] / "rollouts").glob("step_*[0-9].parquet"))
        ]
        trace = folders[1] / "profile" / "rank_0.json.gz"
        print()
        step_table(timed, works[args.warmup :], shapes, limit, trace, args.micro_batch_tokens)


def main(args: Args) -> None:
    if args.make_trl_venv and not args.trl:
        raise SystemExit("--make-trl-venv needs --trl FOLDER")
    if args.make_trl_venv:
        make_venv(args.trl, args.trl_vllm)
    commands = {"grpo.py": grpo_command} | ({"TRL": trl_command} if args.trl else {})
    if args.beside:
        commands |= {f"grpo.py {args.beside}": partial(grpo_command, flags=args.beside)}
    title = f"one step of {args.model}: {args.prompts} prompts x {args.samples} samples, at most"
    title += (
        f" {args.response_tokens} new tokens, bf16, one rank; medians (extremes) of "
        f"{args.repeats} runs of each"
    )
    header(title, args.threads)
    if args.limits:
        show_limits(args)
        return
    records: dict[str, list[dict]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as temporary:
        data = prepare_rows(args, Path(temporary))
        for _ in range(args.repeats):
            for name, make_command in commands.items():
                folder = Path(temporary) / "run"
                folder.mkdir()
                run = measure(make_command(args, data, folder), folder, args)
                records[name] += run[args.warmup :]
                shutil.rmtree(folder)  # our checkpoint takes 1.6 GB
                print(
                    f"{name}: steps of", *(f"{r['time/step_s']:.1f}" for r in run), "s", flush=True
                )

    phases = ("sync", "rollout", "reward", "logprob", "update", "step")
    lines = {f"{phase} (s)": f"time/{phase}_s" for phase in phases}
    lines |= {"response length (tokens)": "rollout/response_length"}
    lines |= {
        "peak memory, all processes (GB)": "tree_gb",
        "peak memory, main process (GB)": "memory/peak_gb",
    }
    rows = [["", *commands, *(["TRL / grpo.py"] if args.trl else [])]]
    for label, key in lines.items():
        values = {name: [r[key] for r in records[name] if key in r] for name in commands}
        cells = [
            f"{median(v):.2f} ({min(v):.2f}-{max(v):.2f})" if v else "-" for v in values.values()
        ]
        if args.trl:
            cells.append(
                f"{median(values['TRL']) / median(values['grpo.py']):.2f}"
                if all(values.values())
                else ""
            )
        rows.append([label, *cells])
    print()
    table(*rows)
    print(COUNTED.format(warmup=args.warmup, steps=args.steps))
    if args.trl:
        medians = {name: median(r["time/step_s"] for r in records[name]) for name in records}
        print(json.dumps({"TRL / grpo.py": medians["TRL"] / medians["grpo.py"]}))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

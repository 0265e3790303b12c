"""Seconds and memory from a file of rows to a data set that is ready to train on: what each start
of a run pays.

    # 327,680 Countdown rows and a .jsonl of as many chat rows
    python tests/bench/data.py
    python tests/bench/data.py --rows 1000000

Each in a process of its own. The tokenizer is SmolLM2's, if that is prepared (`python -m
common.assets.build.smollm2`), else the embedded policy's, whose tokens are single bytes.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import tyro
from report import ROOT, header, table

from common.hub import load_tokenizer, resolve_model
from common.limits import usable_cpus


@dataclass
class Args:
    rows: int = 327_680  # of each file
    max_prompt_tokens: int = 512  # the flag of the scripts
    file: Path | None = None  # measure this one instead, here


def main(args: Args) -> None:
    if args.file:
        print(json.dumps(measure(args)))
        return
    header("From a file of rows to a data set", threads=usable_cpus())
    rows = [["file", "rows", "wall (s)", "CPU (s)", "peak memory (GB)"]]
    with tempfile.TemporaryDirectory() as folder:
        for path in write_files(Path(folder), args.rows):
            options = ["--file", path, "--max-prompt-tokens", args.max_prompt_tokens]
            command = [sys.executable, __file__, *map(str, options)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            found = json.loads(done.stdout.splitlines()[-1])
            rows.append(
                [
                    path.name,
                    f"{found['rows']}",
                    *(f"{found[key]:.1f}" for key in ("wall", "cpu", "memory")),
                ]
            )
    table(*rows)


def write_files(folder: Path, count: int) -> list[Path]:
    """TinyZero's rows, each a rendered template, and the same questions as chats."""
    from common.prepare.countdown import iter_problems, to_table

    problems = list(islice(iter_problems(seed=0), min(count, 327_680)))
    problems = (problems * -(-count // len(problems)))[:count]
    rendered, chats = folder / "countdown.parquet", folder / "chats.jsonl"
    rows = to_table(problems, "base", "train")
    pq.write_table(rows, rendered)
    with chats.open("w") as file:
        for row in rows.to_pylist():
            question = (
                row["prompt"][0]["content"].partition("User: ")[2].partition("\nAssistant")[0]
            )
            file.write(json.dumps(row | {"prompt": [{"role": "user", "content": question}]}) + "\n")
    return [rendered, chats]


def measure(args: Args) -> dict[str, float]:
    from common.data.prompts import PromptData
    from common.flags import Data, Rollout

    tokenizer = load_tokenizer(resolve_model("smollm2"))
    begin, before = time.perf_counter(), cpu_seconds()
    rollout = Rollout(max_prompt_tokens=args.max_prompt_tokens)
    data = PromptData(str(args.file), Data(bad_rows="drop"), rollout, tokenizer=tokenizer)
    used = {"wall": time.perf_counter() - begin, "cpu": cpu_seconds() - before}
    return used | {
        "rows": len(data),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

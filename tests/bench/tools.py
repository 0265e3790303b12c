"""Seconds of a step with tools, and with the same tools delayed: who waits for whom.

    python tests/bench/tools.py            # 2 minutes; a tiny Qwen2.5-VL that has been taught to crop

Both runs take the same steps with the same seeds. A trajectory with n calls must wait n delays; the others must not.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pyarrow.parquet as pq
import tyro
from report import ROOT, header, table

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


def main(args: Args) -> None:
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
            command = f"""grpo.py --model {folder / "model"} --train-data {data} --media-root {folder} --min-pixels 784
                --max-pixels 12544 --max-prompt-tokens 400 --max-response-tokens 600 --max-turn-tokens 80 --dtype fp32
                --prompts-per-step {args.prompts} --samples-per-prompt {args.samples} --total-steps {args.steps}
                --learning-rate 1e-9 --tools {folder / "tool.py"}:crop_image_normalized
                --tool-workers {args.tool_workers} --dump-rollouts-every 1 --output-dir {run_dir}"""
            environment = {**os.environ, "DELAY": str(delay), "PYTHONPATH": str(ROOT)}
            subprocess.run([sys.executable, *command.split()], cwd=ROOT, env=environment, check=True, stdout=2)
            records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
            steps[delay] = [r["time/step_s"] for r in records if "time/step_s" in r][1:]
            dumps = sorted((run_dir / "rollouts").glob("step_??????.parquet"))[1:]
            texts = [pq.read_table(dump)["calls"].to_pylist() for dump in dumps]
            by_step = [[sum(bool(call["name"]) for call in json.loads(t)) for t in column] for column in texts]
            chains[delay], calls[delay] = [max(counts) for counts in by_step], [sum(counts) for counts in by_step]
    plain = median(steps[0.0])
    rows = [["delay of a call (s)", "step (s), median", "calls in a step", "longest chain of calls", "bound (s)"]]
    for delay in steps:
        chain = median(chains[delay])
        bound = f"{1.3 * plain + chain * delay:.2f}" if delay else ""
        rows.append([f"{delay:g}", f"{median(steps[delay]):.2f}", f"{median(calls[delay]):g}", f"{chain:g}", bound])
    table(*rows)
    print("bound: 1.3 times the step without delay, and one delay for each call of the longest chain")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

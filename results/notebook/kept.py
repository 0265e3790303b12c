"""What stays of each run, in results/STUDY:

RUN/metrics.jsonl, config.json, run.json   a run that trained
scores.json                                all runs of the study that only evaluate
runs.csv, curves.csv.gz                    runs that pack.py has put into two files
"""

import csv
import gzip
import json
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import report  # noqa: F401  (puts the repository on the import path)
from studies import Run, Study

from common.look.curves import read_metrics

# Which run it was: "run" as in studies.py and further "flags"; "from" is the hash of the weights
# that it started from, "model" those of the weights that it gave, one for each time it was made.
RECORD = ("run", "flags", "from", "model")


@dataclass
class Kept:
    record: dict
    metrics: list[dict] = field(default_factory=list)  # of each step
    scores: dict = field(default_factory=dict)  # of a run that only evaluates
    total_steps: int | None = None

    @property
    def models(self) -> list[str]:
        """Hashes of the weights that the run gave, the latest last."""
        return self.record["model"].split()


def read_run(folder: Path, name: str) -> Kept | None:
    """What results/STUDY has of a run."""
    scored = read_scores(folder)
    if name in scored:
        record = {key: scored[name][key] for key in RECORD}
        return Kept(record, scores=scored[name]["scores"])
    return read_folder(folder / name) or read_packed(folder).get(name)


def read_folder(path: Path) -> Kept | None:
    """A run that has a folder of its own."""
    if not (path / "run.json").is_file():
        return None
    kept = Kept(json.loads((path / "run.json").read_text()))
    kept.metrics = read_metrics(path / "metrics.jsonl")
    if (path / "config.json").is_file():
        config = json.loads((path / "config.json").read_text())
        kept.total_steps = config["args"]["total_steps"] if "args" in config else config["steps"]
        add_samples(kept.metrics, config.get("args", {}))
    return kept


def add_samples(metrics: list[dict], args: dict) -> None:
    """Give each step its "samples": how many have been trained on until then. sft.py has none."""
    if "samples_per_prompt" in args:
        for record in metrics:
            per_step = args["prompts_per_step"] * args["samples_per_prompt"]
            record["samples"] = record["step"] * per_step


def read_scores(folder: Path) -> dict[str, dict]:
    """{run: its record, "scores" as of scores.py, "metrics" of its evaluation}."""
    path = folder / "scores.json"
    return json.loads(path.read_text()) if path.is_file() else {}


@cache
def read_packed(folder: Path) -> dict[str, Kept]:
    """The runs of runs.csv, with the metrics of curves.csv.gz."""
    if not (folder / "runs.csv").is_file():
        return {}
    metrics: dict[str, list[dict]] = defaultdict(list)
    with gzip.open(folder / "curves.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            name = row.pop("run")
            values = {key: float(value) for key, value in row.items() if value}
            metrics[name].append(values | {"step": int(row["step"])})
    packed = {}
    with (folder / "runs.csv").open() as file:
        for row in csv.DictReader(file):
            run = Run(
                row["command"], int(row["seed"]), ranks=int(row["ranks"]), engine=row["engine"]
            )
            record = {"run": asdict(run), "flags": "", "from": "", "model": ""}
            name = row["run"]
            packed[name] = Kept(record, metrics[name], total_steps=int(row["steps"]))
    return packed


def is_complete(study: Study, results: Path, name: str, flags: str = "") -> bool:
    """Whether what is kept is this very run, with these further flags, from a model that its parent
    gave, and up to its end."""
    run = study.all_runs[name]
    kept = read_run(results / study.name, name)
    if kept is None or kept.record["run"] != asdict(run) or kept.record["flags"] != flags:
        return False
    if run.parent:
        parent = read_run(results / study.name, run.parent)
        if parent is None or kept.record["from"] not in parent.models:
            return False
    if kept.scores:
        return True
    return bool(kept.metrics) and kept.metrics[-1]["step"] == kept.total_steps

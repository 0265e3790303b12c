"""Runs on one HTML page: their curves over each other, final numbers, what differs, samples of their evaluations."""

import json
import os
import re
from pathlib import Path
from urllib.parse import quote

import numpy as np

from common.data.rows import RowFiles
from common.look.curves import finite, panels_of, read_run
from common.look.html import render, save_page, shown

POINTS = 300  # of a curve; one that has more is drawn by the mean, the lowest and the highest of so many parts
EVENTS = 50  # of a run, the last ones
SAMPLES = 1000  # of an evaluation, on its page
LOWER_IS_BETTER = re.compile(
    r"loss | error | skipped | zero_variance | /kl | ^(time|memory)/ | (truncated|failed|unjudged|gap)$", re.VERBOSE
)


def write_runs(folders: list[Path], output: Path | None = None) -> Path:
    """The page of some runs: `output`, or else look.html in the folder that they share (if that is /, here)."""
    folders = list(dict.fromkeys(folder.resolve() for folder in folders))
    shared = Path(os.path.commonpath(folders))
    place = output or (shared if shared.name else Path.cwd())
    page = (place / "look.html" if place.is_dir() else place).resolve()
    runs = []
    for folder in folders:
        steps, events = read_run(folder / "metrics.jsonl", warn=True)
        measured = {key: finite(steps, key) for key in sorted(set().union(*steps) - {"step"})}
        curves = {key: curve(key, *numbers) for key, numbers in measured.items() if len(numbers[0])}
        told = [{"step": e["step"], "name": shown(e["event"], 40), "told": shown(e, 300)} for e in events[-EVENTS:]]
        name = shown(os.path.relpath(folder, shared) if folder != shared else folder.name, 200)
        run = {"drawn": {"name": name, "curves": curves, "events": told}, "config": config_of(folder)}
        runs.append(run | {"links": links_of(folder, page.parent)})
    found = {key for run in runs for key in run["drawn"]["curves"]}
    names = dict.fromkeys(name for run in runs for name in run["config"])
    rows = {name: [shown(run["config"].get(name, ""), 500) for run in runs if run["config"]] for name in names}
    try:
        save_page(page, render("runs.html", title=shared.name, runs=runs, panels=panels_of(found), rows=rows))
    except OSError as error:
        raise SystemExit(f"{page}: not written ({error}); give --output FILE.html") from error
    return page


def curve(key: str, steps: np.ndarray, values: np.ndarray) -> dict:
    """What is drawn of a metric, in POINTS parts at most, and its final numbers."""
    count = len(values)
    edges = np.linspace(0, count, min(count, POINTS) + 1).astype(int)
    starts, ends = edges[:-1], edges[1:]
    lists = {"steps": steps[ends - 1], "values": np.add.reduceat(values, starts) / (ends - starts)}
    if count > POINTS:
        lists |= {"low": np.minimum.reduceat(values, starts), "high": np.maximum.reduceat(values, starts)}
    lower = bool(LOWER_IS_BETTER.search(key))
    best = values.argmin() if lower else values.argmax()
    final = {"last": values[-1], "best": values[best], "tail": values[-max(1, count // 10) :].mean()}
    drawn = {name: [float(f"{x:.7g}") for x in numbers] for name, numbers in lists.items()}
    return drawn | final | {"best_step": int(steps[best]), "lower": lower, "count": count}


def config_of(run: Path) -> dict[str, object]:
    """Flags, versions, commit and hardware of its config.json; nothing if that cannot be read."""
    try:
        path = run / "config.json"
        config = json.loads(path.read_text()) if path.is_file() else {}  # a pipe would be waited for
        parts = {name: part if isinstance(part, dict) else {"": part} for name, part in config.items()}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    flags = {"--" + name.replace("_", "-"): value for name, value in parts.pop("args", {}).items()}
    return flags | {f"{name} {key}".strip(): value for name, part in parts.items() for key, value in part.items()}


def links_of(run: Path, start: Path) -> dict[str, str]:
    """{what it is: its address from `start`} of what a run has to look at; a page for each file of samples."""
    found = (*run.glob("eval_samples*.parquet"), *run.glob("eval_samples*.jsonl"), *run.glob("eval/*.parquet"))
    samples = [file for file in found if file.is_file()]
    pages = [run / "curves.png", *map(samples_page, sorted(samples)), *sorted(run.glob("rollouts/step_*.html"))]
    return {str(p.relative_to(run)): quote(os.fsencode(os.path.relpath(p, start))) for p in pages if p.is_file()}


def samples_page(file: Path) -> Path:
    """The .html beside a file of samples, wrong ones first; written if there is none as new."""
    page = file.with_suffix(".html" if file.suffix == ".parquet" else f"{file.suffix}.html")
    try:
        if not page.exists() or page.stat().st_mtime < file.stat().st_mtime:
            records = (record for record in RowFiles([file], "samples").records() if isinstance(record, dict))
            samples = sorted(records, key=lambda sample: sample.get("correct") is not False)
            save_page(page, render("samples.html", file=file, samples=samples, most=SAMPLES))
    except (OSError, ValueError) as error:  # half a file, or a full disk
        print(f"warning: {page} not written ({error})", flush=True)
    return page

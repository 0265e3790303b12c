"""metrics.jsonl read back, and drawn as curves.png."""

import json
import math
import tomllib
from pathlib import Path

import numpy as np

from common.files import full_disk_is_a_warning, replace_file

# title -> {metric: label}
PANELS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def read_metrics(path: Path, warn: bool = False) -> list[dict]:
    """Steps in order, without torn lines, and without what came after a step that was repeated."""
    steps: dict[int, dict] = {}
    torn = []
    if not Path(path).is_file():  # a device or a pipe never ends
        return []
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                step = min(int(record["step"]), 2**53)
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                # blank, or half written
                torn += [str(number)] if line.strip() else []
                continue
            if "event" in record:
                continue
            # it went back here: what came after is void
            if steps.get(step, {}).keys() & record.keys() - {"step"}:
                steps = {earlier: values for earlier, values in steps.items() if earlier < step}
            steps.setdefault(step, {}).update(record, step=step)
    if torn and warn:
        print(
            f"warning: {path}: {len(torn)} unreadable lines left out, the first: "
            f"{', '.join(torn[:5])}",
            flush=True,
        )
    return [steps[step] for step in sorted(steps)]


def finite(records: list[dict], key: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of a metric where it is a number."""
    found = [
        (r["step"], r[key])
        for r in records
        if isinstance(r.get(key), int | float) and abs(r[key]) < 1e100
    ]
    return tuple(np.array(found, dtype=float).reshape(-1, 2).T)


def panels_of(measured: set[str]) -> dict[str, dict[str, str]]:
    """PANELS, only of what was measured."""
    found = {
        title: {key: label for key, label in keys.items() if key in measured}
        for title, keys in PANELS.items()
    }
    if "reward/mean" in measured:
        # a policy-gradient loss says nothing about progress; the one of sft.py does
        del found["loss"]
    return {title: keys for title, keys in found.items() if keys}


def plot_curves(run_dir: Path, warn: bool = False) -> None:
    """Draw run_dir/curves.png from metrics.jsonl: small multiples, only of what was measured. warn:
    of torn lines."""
    try:
        # takes a second; without pyplot it draws by Agg, not to a screen
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        print(f"warning: curves.png not drawn ({error})", flush=True)
        return
    records = read_metrics(Path(run_dir) / "metrics.jsonl", warn)
    numbers = {key: finite(records, key) for keys in PANELS.values() for key in keys}
    panels = panels_of({key for key, (steps, _) in numbers.items() if len(steps)})
    if not panels:
        return
    columns, rows = min(3, len(panels)), math.ceil(len(panels) / 3)
    width, height = 4.2 * columns, 2.8 * rows
    figure = Figure(figsize=(width, height))
    # room in inches for titles, ticks and labels; matplotlib's own layouts draw everything twice to
    # find it out
    figure.subplots_adjust(
        left=0.6 / width, right=1 - 0.15 / width, bottom=0.5 / height, top=1 - 0.35 / height
    )
    figure.subplots_adjust(wspace=0.7 / 3.4, hspace=0.85 / 2.0)
    for place, (title, keys) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, columns, place)
        for key, color in zip(keys, ("#2b6cb0", "#dd6b20")):
            x, y = numbers[key]
            window = max(1, len(y) // 15)  # raw values faint, their running mean strong
            sums = np.insert(np.cumsum(y), 0, 0)
            mean = (sums[window:] - sums[:-window]) / window
            axes.plot(
                x, y, color=color, alpha=0.25, marker="o" if len(y) < 30 else None, markersize=3
            )
            axes.plot(x[window // 2 :][: len(mean)], mean, color=color, label=PANELS[title][key])
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        if title.startswith("share"):
            axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.2)
        if len(PANELS[title]) > 1:
            axes.legend(frameon=False, fontsize=8)
    with full_disk_is_a_warning(Path(run_dir) / "curves.png"):
        replace_file(
            Path(run_dir) / "curves.png", lambda path: figure.savefig(path, format="png", dpi=120)
        )

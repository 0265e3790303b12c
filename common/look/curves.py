"""metrics.jsonl read back, and drawn as curves.png."""

import json
import math
from pathlib import Path

import numpy as np

from common.files import full_disk_is_a_warning, replace_file

# title of a panel -> {metric: label}; for {decoding} see `decoding_of`. RaPR (docs/curiosity.md):
# the share of samples that call a tool to look at a picture again
PANELS = {
    "reward": {"reward/mean": "mean"},
    "accuracy": {"reward/accuracy": "train, sampled", "eval/accuracy": "eval{decoding}"},
    "share that looks (RaPR)": {"tool/rapr": "train, sampled", "eval/rapr": "eval{decoding}"},
    "response length (tokens)": {"rollout/response_length": "mean"},
    "share that is cut off": {
        "rollout/truncated": "train, sampled",
        "eval/truncated": "eval{decoding}",
    },
    "KL to the reference (nats)": {"policy/kl_to_ref": "mean"},
    "log-prob gap, engine to trainer": {"policy/rollout_logprob_gap": "mean"},
    "entropy (nats)": {"policy/entropy": "mean"},
    "loss": {"policy/loss": "train", "eval/loss": "eval"},
    "step time (s)": {"time/step_s": "step"},
    "value": {"value/mean": "critic", "value/return_mean": "return"},
    "explained variance of the return": {"value/explained_variance": "critic"},
}
COLORS = ("#2b6cb0", "#dd6b20")  # of a panel's metrics, in order


def read_metrics(path: Path, warn: bool = False) -> list[dict]:
    """The records of steps, in order. Torn lines are left out; with `warn` it prints how many.
    Where a run went back to an earlier step, what it had written from there on is left out."""
    if not Path(path).is_file():  # a device or a pipe never ends
        return []
    steps: dict[int, dict] = {}
    torn_lines = []
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                step = min(int(record["step"]), 2**53)  # `points_of` makes floats of them
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                if line.strip():  # not blank: half written
                    torn_lines.append(str(number))
                continue
            if "event" in record:
                continue
            repeated = steps.get(step, {}).keys() & (record.keys() - {"step"})
            if repeated:
                # the run went back here: what it had written from this step on is void
                steps = {earlier: values for earlier, values in steps.items() if earlier < step}
            steps.setdefault(step, {}).update(record, step=step)
    if torn_lines and warn:
        print(
            f"warning: {path}: {len(torn_lines)} unreadable lines left out, the first: "
            f"{', '.join(torn_lines[:5])}",
            flush=True,
        )
    return [steps[step] for step in sorted(steps)]


def points_of(records: list[dict], key: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of a metric where it is a number that can be drawn; float64."""
    points = []
    for record in records:
        value = record.get(key)
        if isinstance(value, int | float) and abs(value) < 1e100:
            points.append((record["step"], value))
    steps, values = np.array(points, dtype=float).reshape(-1, 2).T
    return steps, values


def argument_of(run: Path, name: str) -> object:
    """An argument in a run's config.json; None if that cannot be read."""
    path = run / "config.json"
    if not path.is_file():  # reading a pipe would never end
        return None
    try:
        return json.loads(path.read_text())["args"][name]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def decoding_of(run: Path) -> str:
    """How a run's evaluations decode, as the end of a label; empty if that is not known."""
    temperature = argument_of(run, "eval_temperature")
    if not isinstance(temperature, int | float):
        return ""
    return ", sampled" if temperature > 0 else ", greedy"


def panels_of(measured: set[str]) -> dict[str, dict[str, str]]:
    """PANELS with those metrics that were measured."""
    panels = {}
    for title, labels in PANELS.items():
        measured_labels = {key: label for key, label in labels.items() if key in measured}
        if measured_labels:
            panels[title] = measured_labels
    if "reward/mean" in measured:
        # a policy-gradient loss says nothing about progress; the loss of sft.py does
        panels.pop("loss", None)
    return panels


def plot_curves(run_dir: Path, folder: Path | None = None, warn: bool = False) -> None:
    """Draw curves.png from run_dir/metrics.jsonl, a panel for each quantity that was measured, into
    a folder, by default into run_dir; with `warn` it prints how many lines were torn."""
    try:
        # takes a second; without pyplot it draws by Agg, not to a screen
        from matplotlib.figure import Figure
    except ImportError as error:
        print(f"warning: curves.png not drawn ({error})", flush=True)
        return
    records = read_metrics(Path(run_dir) / "metrics.jsonl", warn)
    curves = {}
    for labels in PANELS.values():
        for key in labels:
            steps, values = points_of(records, key)
            if len(steps):
                curves[key] = (steps, values)
    panels = panels_of(set(curves))
    decoding = decoding_of(Path(run_dir))
    if not panels:
        return
    num_columns = min(3, len(panels))
    num_rows = math.ceil(len(panels) / 3)
    width = 4.2 * num_columns
    height = 2.8 * num_rows
    figure = Figure(figsize=(width, height))
    # room in inches for titles, ticks and labels: matplotlib's own layouts draw everything twice
    # to find it
    figure.subplots_adjust(
        left=0.8 / width,
        right=1 - 0.15 / width,
        bottom=0.5 / height,
        top=1 - 0.35 / height,
        wspace=0.95 / 3.25,
        hspace=0.85 / 2.0,
    )
    for place, (title, labels) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(num_rows, num_columns, place)
        texts = {key: label.format(decoding=decoding) for key, label in labels.items()}
        draw_panel(axes, title, texts, curves)
    path = (folder or Path(run_dir)) / "curves.png"
    with full_disk_is_a_warning(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120))


def draw_panel(
    axes, title: str, labels: dict[str, str], curves: dict[str, tuple[np.ndarray, np.ndarray]]
) -> None:
    """Each metric's values faint, and their running mean strong."""
    from matplotlib.ticker import MaxNLocator

    for key, color in zip(labels, COLORS):
        steps, values = curves[key]
        marker = "o" if len(values) < 30 else None
        axes.plot(steps, values, color=color, alpha=0.25, marker=marker, markersize=3)
        window = max(1, len(values) // 15)
        sums = np.insert(np.cumsum(values), 0, 0)
        means = (sums[window:] - sums[:-window]) / window
        centers = steps[window // 2 :][: len(means)]
        axes.plot(centers, means, color=color, label=labels[key])
    # with a place of its own: else matplotlib measures all ticks to find one, a fifth of the time
    axes.set_title(title, loc="left", fontsize=10, y=1.0)
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylim(value_range(np.concatenate([curves[key][1] for key in labels])))
    if title.startswith("share"):
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(
        MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
    )
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    # each tick whole: matplotlib would write what they have in common on the title
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_major_formatter("{x:g}")  # those of `value_range` differ within six digits
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.2)
    if len(PANELS[title]) > 1:
        axes.legend(frameon=False, fontsize=8)


def value_range(values: np.ndarray) -> tuple[float, float]:
    """Limits of an axis with room for the values. Those within a thousandth of each other are a
    constant, which stands in the middle."""
    low = values.min()
    high = values.max()
    magnitude = max(abs(low), abs(high))
    if high - low > 1e-3 * magnitude:
        room = 0.05 * (high - low)
    elif magnitude > 0:
        room = 0.1 * magnitude
    else:
        room = 1.0
    return low - room, high + room

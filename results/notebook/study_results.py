"""What the kept runs of a study show: tables, and a figure over steps, seconds and tokens."""

import json
from collections.abc import Callable
from dataclasses import asdict
from math import inf, isfinite, sqrt
from pathlib import Path
from statistics import mean, median, stdev, variance

from report import table
from studies import Study

from common.look.curves import read_metrics

SCORES = "scores.json"  # of a run that only evaluates
RECORD = "run.json"  # which run it was, by which weights
# The median of a deviation that is taken from so many values, in true ones: from chi-squared's.
MEDIAN_DEVIATION = {2: 0.674, 3: 0.833}
Runs = dict[str, dict[int, list[dict]]]  # {variant: {seed: records of metrics.jsonl}}
# of a run, where the question is how much, not when
MEASURES: dict[str, Callable[[list[dict]], float]] = {
    "greedy, after": lambda records: curve(records)[-1]["value"],
    "greedy, mean of the evaluations": lambda records: mean(
        point["value"] for point in curve(records)[1:]
    ),
    "sampled, last 5 steps": lambda records: mean(
        p["value"] for p in values_of(records, "reward/accuracy")[-5:]
    ),
}


def read_record(kept: Path) -> dict:
    """{"run": as in studies.py, "flags": further ones, "from", "model": hashes of weights}; None
    each without one.

    A run that was made more than once gave more than one model: their hashes, the last one's last.
    """
    path = kept / RECORD
    return (
        json.loads(path.read_text())
        if path.is_file()
        else dict.fromkeys(("run", "flags", "from", "model"))
    )


def models_of(results: Path, name: str) -> list[str]:
    """Hashes of the weights that a run gave, each time that it was made."""
    return (read_record(results / name)["model"] or "").split()


def is_complete(study: Study, results: Path, name: str, flags: str = "") -> bool:
    """Is what is kept of this very run, with these further flags, from a model of its parent, and
    up to its end?"""
    run, kept, record = study.runs[name], results / name, read_record(results / name)
    if record["run"] != asdict(run) or record["flags"] != flags:
        return False
    if run.parent and record["from"] not in models_of(results, run.parent):
        return False
    if (kept / SCORES).is_file():
        return True
    if not (kept / "metrics.jsonl").is_file() or not (kept / "config.json").is_file():
        return False
    config, steps = (
        json.loads((kept / "config.json").read_text()),
        read_metrics(kept / "metrics.jsonl"),
    )
    return bool(steps) and steps[-1]["step"] == config.get("args", config).get(
        "total_steps", config.get("steps")
    )


def curve(records: list[dict]) -> list[dict]:
    """The evaluations of a run: step, value, and until then seconds of training and tokens of a
    response, summed."""
    points, seconds, tokens = [], 0.0, 0.0
    for record in records:
        seconds += record.get("time/step_s", 0.0) - record.get("time/eval_s", 0.0) * (
            "time/step_s" in record
        )
        tokens += record.get("rollout/response_length", 0.0)
        key = next((key for key in ("eval/accuracy", "eval/loss") if key in record), None)
        if key:
            point = {"step": record["step"], "value": record[key], "key": key}
            points.append(point | {"seconds": seconds, "tokens": tokens})
    return points


def state_of(results: Path) -> str:
    """In a few words: how far a run is, and how good."""
    if (results / SCORES).is_file():
        return (
            f"strict, pass@1: {json.loads((results / SCORES).read_text())['strict, pass@1'][0]:.3f}"
        )
    path = results / "metrics.jsonl"
    records = read_metrics(path) if path.is_file() else []
    if points := curve(records):
        return f"step {points[-1]['step']}: {points[-1]['key']} {points[-1]['value']:.3f}"
    return f"step {records[-1]['step']}" if records else "not run"


def values_of(records: list[dict], metric: str) -> list[dict]:
    """A metric of each step that has it."""
    return [{"step": r["step"], "value": r[metric]} for r in records if metric in r]


def smoothed(points: list[dict]) -> list[dict]:
    """Means over a twentieth of a run's steps."""
    width = max(1, len(points) // 20)
    groups = [points[i : i + width] for i in range(0, len(points), width)]
    return [
        {"step": mean(p["step"] for p in group), "value": mean(p["value"] for p in group)}
        for group in groups
    ]


def read_study(study: Study, results: Path, flags: str = "") -> Runs:
    """The runs that are complete, without those that have no seeds, as a warm start."""
    found: Runs = {}
    for name, run in study.runs.items():
        kept = results / name
        if run.seed is None or (kept / SCORES).is_file():
            continue
        if is_complete(study, results, name, flags):
            found.setdefault(name.partition("-seed")[0], {})[run.seed] = read_metrics(
                kept / "metrics.jsonl"
            )
    return found


def read_scores(study: Study, results: Path, flags: str = "") -> list[list[str]]:
    """A head, and a row for each run that only evaluated; nothing without one."""
    paths = {
        name: results / name / SCORES
        for name in study.runs
        if is_complete(study, results, name, flags)
    }
    found = {name: json.loads(path.read_text()) for name, path in paths.items() if path.is_file()}
    shares = ["strict, pass@1", "lenient, pass@1", "strict, pass@8", "lenient, pass@8"]
    rows = [["model", "rows", "samples", *shares]]
    for name, one in found.items():
        cells = [
            f"{one[share][0]:.3f} ± {one[share][1]:.3f}" if share in one else "" for share in shares
        ]
        rows.append([name, str(one["rows"]), str(one["samples"]), *cells])
    return rows if found else []


def spread(values: list[float], digits: int = 3) -> str:
    """Mean ± half the 95 % interval (Student's t) of a few seeds."""
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}.get(len(values))
    half = f" ± {t * stdev(values) / len(values) ** 0.5:.{digits}f}" if t else ""
    return f"{mean(values):.{digits}f}{half}" if values else ""


def show(name: str, study: Study, results: Path, flags: str = "") -> None:
    """The tables of a study, and its figure: each variant's mean over seeds, and their range."""
    found, scored = read_study(study, results, flags), read_scores(study, results, flags)
    if not found and not scored:
        return
    print(f"{name}: {study.question}\nhardware and commit of each run: {results}/RUN/config.json\n")
    if scored:
        table(*scored)
    if study.dots and found:
        table(*effects(study, found))
        draw_dots(study, found, results / f"{name}.png")
        return
    if not found:
        return
    rows = [
        ["variant", "seeds", "steps", "measured", "before", "after", "mean over steps", "seconds"]
    ]
    rows[0] += [f"{metric}, last 5 steps" for metric in study.also]
    for variant, seeds in found.items():
        curves = [curve(records) for records in seeds.values()]
        steps = sorted({points[-1]["step"] for points in curves})
        cells = [variant, str(len(curves)), ", ".join(map(str, steps)), curves[0][0]["key"]]
        cells += [spread([points[end]["value"] for points in curves]) for end in (0, -1)]
        cells += [
            spread([mean(point["value"] for point in points[1:] or points) for points in curves])
        ]
        cells += [spread([points[-1]["seconds"] for points in curves], 0)]
        for metric in study.also:
            tails = [values_of(records, metric)[-5:] for records in seeds.values()]
            cells.append(spread([mean(point["value"] for point in tail) for tail in tails if tail]))
        rows.append(cells)
    table(*rows)
    if study.beside:
        table(*compared(study, found))
    draw(study, found, results / f"{name}.png")


def base_of(study: Study, found: Runs, variant: str) -> str:
    """What a variant is measured against; itself, as long as there is nothing."""
    base = study.beside.get(variant, variant)
    return base if base in found else variant


def noise(study: Study, found: Runs, measure: Callable[[list[dict]], float], variant: str) -> float:
    """By how much this variant and its base would differ in one of twenty cases if they were the
    same.

    From the scatter of seeds: the median of deviations over all variants of a script, or that of
    these two if it is larger, as where one breaks.
    """
    pair = [
        [*map(measure, found[name].values())] for name in {variant, base_of(study, found, variant)}
    ]
    script = study.script(variant)
    family = [
        [*map(measure, seeds.values())]
        for other, seeds in found.items()
        if study.script(other) == script
    ]
    scatters = [
        stdev(values) / MEDIAN_DEVIATION[len(values)]
        for values in family
        if len(values) in MEDIAN_DEVIATION
    ]
    if not scatters:
        return inf
    own = sqrt(mean([variance(values) for values in pair if len(values) > 1] or [0.0]))
    return (
        1.96
        * max(median(scatters), own)
        * sqrt(sum(2 / len(pair) / len(values) for values in pair))
    )


def effects(study: Study, found: Runs) -> list[list[str]]:
    """A row a variant: means over seeds, in brackets how far from its base, with a star if that is
    beyond noise."""
    rows = [["variant", "beside", "seeds", *MEASURES]]
    for variant, seeds in found.items():
        base = base_of(study, found, variant)
        cells = [variant, base if base != variant else "", str(len(seeds))]
        for measure in MEASURES.values():
            value = mean(map(measure, seeds.values()))
            difference = value - mean(map(measure, found[base].values()))
            star = "*" * (abs(difference) > noise(study, found, measure, variant))
            cells.append(f"{value:.3f}" + f" ({difference:+.3f}{star})" * (base != variant))
        rows.append(cells)
    return rows


def draw_dots(study: Study, found: Runs, path: Path) -> None:
    """A dot for each seed, a line for their mean, and behind them what cannot be told from the
    base."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1 + 0.24 * len(found)), layout="constrained")
    all_axes = figure.subplots(1, len(MEASURES), sharey=True)
    for axes, (title, measure) in zip(all_axes, MEASURES.items()):
        for row, (variant, seeds) in enumerate(found.items()):
            values = [measure(records) for records in seeds.values()]
            axes.plot(values, [row] * len(values), "o", color="C0", alpha=0.5, markersize=4)
            axes.plot([mean(values)], [row], "|", color="black", markersize=9)
            base = mean(map(measure, found[base_of(study, found, variant)].values()))
            if isfinite(limit := noise(study, found, measure, variant)):
                axes.fill_betweenx(
                    [row - 0.5, row + 0.5], base - limit, base + limit, color="C7", alpha=0.2, lw=0
                )
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.2)
    all_axes[0].set_yticks(
        range(len(found)), [name.removeprefix("knob-") for name in found], fontsize=8
    )
    all_axes[0].invert_yaxis()
    figure.savefig(path, dpi=120)


def compared(study: Study, found: Runs) -> list[list[str]]:
    """A row for each variant that is measured against another, seed by seed."""
    head = ["variant", "beside", "seeds", "x seconds", "after: difference"]
    head += [f"x seconds to {study.goal}, seeds"] if study.goal else []
    rows = [[*head, *(f"{metric}: largest difference of a step" for metric in study.also)]]
    for variant, other in study.beside.items():
        both = sorted(found.get(variant, {}).keys() & found.get(other, {}).keys())
        runs = [(found[variant][seed], found[other][seed]) for seed in both]
        curves = [(curve(ours), curve(theirs)) for ours, theirs in runs]
        cells = [variant, other, str(len(both))]
        cells += [spread([a[-1]["seconds"] / b[-1]["seconds"] for a, b in curves], 2)]
        cells += [spread([a[-1]["value"] - b[-1]["value"] for a, b in curves], 4)]
        if study.goal:
            reached = [[reach(points, study.goal) for points in pair] for pair in curves]
            ratios = [a / b for a, b in reached if a and b]
            cells += [f"{spread(ratios, 2)}, {len(ratios)}"]
        for metric in study.also:
            steps = [zip(values_of(a, metric), values_of(b, metric)) for a, b in runs]
            gaps = [abs(x["value"] - y["value"]) for pairs in steps for x, y in pairs]
            cells += [f"{max(gaps):.4g}" if gaps else ""]
        rows.append(cells)
    return rows


def reach(points: list[dict], goal: float) -> float | None:
    """Seconds of training at the first evaluation that is as good as that."""
    return next((point["seconds"] for point in points if point["value"] >= goal), None)


def draw(study: Study, found: Runs, path: Path) -> None:
    """Evaluations over steps, seconds and tokens; the other metrics over steps, smoothed. Losses
    and accuracies do not go together: the variants that are measured as the first one is."""
    from matplotlib.figure import Figure

    curves = {variant: curve(next(iter(seeds.values()))) for variant, seeds in found.items()}
    first = next(iter(curves.values()))
    found = {
        variant: found[variant]
        for variant, points in curves.items()
        if points[0]["key"] == first[0]["key"]
    }
    panels = [
        (curve, "step", "steps", first[0]["key"]),
        (curve, "seconds", "seconds of training", first[0]["key"]),
    ]
    if first[-1]["tokens"]:
        panels.append((curve, "tokens", "tokens of a response, summed over steps", first[0]["key"]))
    for metric in study.also:
        panels.append(
            (
                lambda records, metric=metric: smoothed(values_of(records, metric)),
                "step",
                "steps",
                metric,
            )
        )
    lines = -(-len(panels) // 3)
    figure = Figure(figsize=(12, 3.4 * lines), layout="constrained")
    grid = figure.subplots(lines, 3, squeeze=False).flat
    for axes, (points_of, x, label, title) in zip(grid, panels):
        draw_panel(axes, found, points_of, x)
        axes.set_xlabel(label)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.2)
    figure.axes[0].legend(frameon=False, fontsize=8)
    for axes in figure.axes[len(panels) :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=120)


def draw_panel(axes, found: Runs, points_of: Callable[[list[dict]], list[dict]], x: str) -> None:
    for number, (variant, seeds) in enumerate(found.items()):
        columns = list(zip(*map(points_of, seeds.values())))  # the same step of each seed
        values = [[point["value"] for point in column] for column in columns]
        positions, color = (
            [mean(point[x] for point in column) for column in columns],
            f"C{number % 10}",
        )
        axes.plot(
            positions,
            [mean(v) for v in values],
            color=color,
            marker=".",
            label=f"{variant} ({len(seeds)})",
        )
        axes.fill_between(
            positions, list(map(min, values)), list(map(max, values)), color=color, alpha=0.15, lw=0
        )

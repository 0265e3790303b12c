"""What the kept runs of a study show: tables, and a figure."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf, isfinite, sqrt
from pathlib import Path
from statistics import mean, median, stdev, variance

from kept import Kept, is_complete, read_run
from report import table
from studies import Study

from common.look.curves import plot_curves

# The median of a deviation taken from so many values, where the true one is 1: from chi-squared's.
MEDIAN_DEVIATION = {2: 0.674, 3: 0.833}
# Student's t of a 95 % interval, by the number of values
STUDENTS_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
SHARES = ("strict, pass@1", "lenient, pass@1", "strict, pass@8", "lenient, pass@8", "format")

Metrics = list[dict]  # of a run, a record for each step
Runs = dict[str, dict[int, Metrics]]  # {variant: {seed: metrics}}


# --- one run --------------------------------------------------------------------------------------


def curve(metrics: Metrics) -> list[dict]:
    """The evaluations of a run: step, value, and until then the samples, the seconds of training
    and the tokens of a response, summed."""
    points = []
    seconds = tokens = 0.0
    for record in metrics:
        if "time/step_s" in record:
            seconds += record["time/step_s"] - record.get("time/eval_s", 0.0)
        tokens += record.get("rollout/response_length", 0.0)
        for key in ("eval/accuracy", "eval/loss"):
            if key in record:
                point = {"step": record["step"], "value": record[key], "key": key}
                point |= {"seconds": seconds, "tokens": tokens}
                points.append(point | {"samples": record.get("samples", 0)})
                break
    return points


def values_of(metrics: Metrics, name: str) -> list[dict]:
    """A metric of each step that has it."""
    return [{"step": r["step"], "value": r[name]} for r in metrics if name in r]


def mean_value(points: list[dict]) -> float:
    return mean(point["value"] for point in points)


def smoothed(points: list[dict]) -> list[dict]:
    """Means over a twentieth of a run's steps."""
    width = max(1, len(points) // 20)
    means = []
    for start in range(0, len(points), width):
        group = points[start : start + width]
        step = mean(point["step"] for point in group)
        means.append({"step": step, "value": mean_value(group)})
    return means


# a run in one number, where the question is how much and not when
MEASURES: dict[str, Callable[[Metrics], float]] = {
    "greedy, after": lambda metrics: curve(metrics)[-1]["value"],
    "greedy, mean of the evaluations": lambda metrics: mean_value(curve(metrics)[1:]),
    "sampled, last 5 steps": lambda metrics: mean_value(values_of(metrics, "reward/accuracy")[-5:]),
}


def state_of(kept: Kept | None) -> str:
    """In a few words: how far a run is, and how good."""
    if kept is None:
        return "not run"
    if kept.scores:
        return f"strict, pass@1: {kept.scores['strict, pass@1'][0]:.3f}"
    points = curve(kept.metrics)
    if points:
        return f"step {points[-1]['step']}: {points[-1]['key']} {points[-1]['value']:.3f}"
    return f"step {kept.metrics[-1]['step']}" if kept.metrics else "not run"


# --- tables ---------------------------------------------------------------------------------------


def show(study: Study, results: Path, flags: str = "") -> None:
    """Print the tables of a study, and draw results/STUDY/figure.png and the curves of the runs
    that it shows."""
    found = read_study(study, results, flags)
    scores = table_of_scores(study, results, flags)
    folder = results / study.name
    if found or scores:
        print(f"{study.name}: {study.question}\nhardware and commit of each run: {folder}\n")
    if scores:
        table(*scores)
    if found and study.dots:
        table(*effects(study, found))
        draw_dots(study, found, folder / "figure.png")
    elif found:
        table(*table_of_runs(study, found))
        if study.beside:
            table(*compared(study, found))
        draw(study, found, folder / "figure.png")
    for name in study.shown:
        plot_curves(folder / name)


def read_study(study: Study, results: Path, flags: str = "") -> Runs:
    """The complete runs that have seeds, which warm starts and evaluations have not."""
    found: Runs = {}
    for name, run in study.all_runs.items():
        if run.seed is not None and is_complete(study, results, name, flags):
            variant = name.partition("-seed")[0]
            metrics = read_run(results / study.name, name).metrics
            found.setdefault(variant, {})[run.seed] = metrics
    return found


def table_of_scores(study: Study, results: Path, flags: str = "") -> list[list[str]]:
    """A head, and a row for each source of each run that only evaluated; nothing without one."""
    rows = [["model", "rows", "samples", *SHARES]]
    for name in study.runs:
        if not is_complete(study, results, name, flags):
            continue
        scores = read_run(results / study.name, name).scores
        if not scores:
            continue
        for source, own in scores.get("sources", {"": scores}).items():
            cells = [f"{name} {source}".rstrip(), str(own["rows"]), str(own["samples"])]
            for share in SHARES:
                center, half = own.get(share, (None, None))
                cells.append("" if center is None else f"{center:.3f} ± {half:.3f}")
            rows.append(cells)
    return rows if len(rows) > 1 else []


def table_of_runs(study: Study, found: Runs) -> list[list[str]]:
    """A row for each variant: means over its seeds."""
    head = ["variant", "seeds", "steps", "measured", "before", "after", "mean over steps"]
    rows = [[*head, "seconds", *(f"{metric}, last 5 steps" for metric in study.also)]]
    for variant, seeds in found.items():
        curves = [curve(metrics) for metrics in seeds.values()]
        steps = sorted({points[-1]["step"] for points in curves})
        cells = [variant, str(len(curves)), ", ".join(map(str, steps)), curves[0][0]["key"]]
        cells.append(spread([points[0]["value"] for points in curves]))
        cells.append(spread([points[-1]["value"] for points in curves]))
        cells.append(spread([mean_value(points[1:] or points) for points in curves]))
        cells.append(spread([points[-1]["seconds"] for points in curves], digits=0))
        for metric in study.also:
            tails = [values_of(metrics, metric)[-5:] for metrics in seeds.values()]
            cells.append(spread([mean_value(tail) for tail in tails if tail]))
        rows.append(cells)
    return rows


def spread(values: list[float], digits: int = 3) -> str:
    """The mean of a few seeds ± half its 95 % interval (Student's t)."""
    if not values:
        return ""
    text = f"{mean(values):.{digits}f}"
    if len(values) in STUDENTS_T:
        half = STUDENTS_T[len(values)] * stdev(values) / sqrt(len(values))
        text += f" ± {half:.{digits}f}"
    return text


def compared(study: Study, found: Runs) -> list[list[str]]:
    """A row for each variant that is measured against another, seed by seed."""
    head = ["variant", "beside", "seeds", "x seconds", "after: difference"]
    if study.goal:
        head.append(f"x seconds to {study.goal}, seeds")
    rows = [[*head, *(f"{metric}: largest difference of a step" for metric in study.also)]]
    for variant, other in study.beside.items():
        seeds = sorted(found.get(variant, {}).keys() & found.get(other, {}).keys())
        pairs = [(found[variant][seed], found[other][seed]) for seed in seeds]
        curves = [(curve(a), curve(b)) for a, b in pairs]
        cells = [variant, other, str(len(seeds))]
        cells.append(spread([a[-1]["seconds"] / b[-1]["seconds"] for a, b in curves], digits=2))
        cells.append(spread([a[-1]["value"] - b[-1]["value"] for a, b in curves], digits=4))
        if study.goal:
            times = [(seconds_to(a, study.goal), seconds_to(b, study.goal)) for a, b in curves]
            ratios = [a / b for a, b in times if a and b]
            cells.append(f"{spread(ratios, digits=2)}, {len(ratios)}")
        for metric in study.also:
            gaps = []
            for a, b in pairs:
                for x, y in zip(values_of(a, metric), values_of(b, metric)):
                    gaps.append(abs(x["value"] - y["value"]))
            cells.append(f"{max(gaps):.4g}" if gaps else "")
        rows.append(cells)
    return rows


def seconds_to(points: list[dict], goal: float) -> float | None:
    """Seconds of training until the first evaluation that is as good as that."""
    for point in points:
        if point["value"] >= goal:
            return point["seconds"]
    return None


def effects(study: Study, found: Runs) -> list[list[str]]:
    """A row for each variant: means over seeds, in brackets the difference to its base, with a star
    where that is beyond noise."""
    rows = [["variant", "beside", "seeds", *MEASURES]]
    for variant, seeds in found.items():
        base = base_of(study, found, variant)
        cells = [variant, base if base != variant else "", str(len(seeds))]
        for measure in MEASURES.values():
            value = mean(map(measure, seeds.values()))
            cell = f"{value:.3f}"
            if base != variant:
                difference = value - mean(map(measure, found[base].values()))
                star = "*" if abs(difference) > noise(study, found, measure, variant) else ""
                cell += f" ({difference:+.3f}{star})"
            cells.append(cell)
        rows.append(cells)
    return rows


def base_of(study: Study, found: Runs, variant: str) -> str:
    """What a variant is measured against; itself as long as there is nothing."""
    base = study.beside.get(variant, variant)
    return base if base in found else variant


def noise(study: Study, found: Runs, measure: Callable[[Metrics], float], variant: str) -> float:
    """The difference that this variant and its base would have in one of twenty cases if they were
    the same.

    The deviation between seeds is the median over all variants of the script, or that of these two
    if it is larger, as where one of them breaks.
    """
    values = {}
    for name, seeds in found.items():
        values[name] = [measure(metrics) for metrics in seeds.values()]
    deviations = []
    for name in found:
        count = len(values[name])
        if study.script(name) == study.script(variant) and count in MEDIAN_DEVIATION:
            deviations.append(stdev(values[name]) / MEDIAN_DEVIATION[count])
    if not deviations:
        return inf
    pair = [values[name] for name in {variant, base_of(study, found, variant)}]
    variances = [variance(own) for own in pair if len(own) > 1]
    own_deviation = sqrt(mean(variances)) if variances else 0.0
    deviation = max(median(deviations), own_deviation)
    return 1.96 * deviation * sqrt(sum(2 / len(pair) / len(own) for own in pair))


# --- figures --------------------------------------------------------------------------------------


@dataclass
class Panel:
    title: str
    label: str  # of its x axis
    x: str  # that axis, as a key of the points
    metric: str = ""  # of each step; without one the evaluations

    def points(self, metrics: Metrics) -> list[dict]:
        if self.metric:
            return smoothed(values_of(metrics, self.metric))
        return curve(metrics)


def draw(study: Study, found: Runs, path: Path) -> None:
    """Evaluations over steps (samples, where a step's number of them differs), seconds and tokens;
    the study's other metrics over steps, smoothed. Losses and accuracies do not go together: only
    variants measured as the first one is."""
    from matplotlib.figure import Figure

    curves = {variant: curve(next(iter(seeds.values()))) for variant, seeds in found.items()}
    first = next(iter(curves.values()))
    title = first[0]["key"]
    drawn = {name: found[name] for name in found if curves[name][0]["key"] == title}
    samples_per_step = {points[-1]["samples"] / points[-1]["step"] for points in curves.values()}
    panels = [
        Panel(title, "steps", "step"),
        Panel(title, "seconds of training", "seconds"),
    ]
    if len(samples_per_step) > 1:
        panels[0] = Panel(title, "samples", "samples")
    if first[-1]["tokens"]:
        panels.append(Panel(title, "tokens of a response, summed over steps", "tokens"))
    for metric in study.also:
        panels.append(Panel(metric, "steps", "step", metric))
    num_rows = ceil(len(panels) / 3)
    figure = Figure(figsize=(12, 3.4 * num_rows), layout="constrained")
    grid = figure.subplots(num_rows, 3, squeeze=False).flat
    for axes, panel in zip(grid, panels):
        draw_panel(axes, drawn, panel)
    figure.axes[0].legend(frameon=False, fontsize=8)
    for axes in figure.axes[len(panels) :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=120)


def draw_panel(axes, drawn: Runs, panel: Panel) -> None:
    """Each variant's mean over seeds as a line, their range as a band."""
    for number, (variant, seeds) in enumerate(drawn.items()):
        xs, means, lows, highs = [], [], [], []
        for points in zip(*map(panel.points, seeds.values())):  # the same step of each seed
            values = [point["value"] for point in points]
            xs.append(mean(point[panel.x] for point in points))
            means.append(mean(values))
            lows.append(min(values))
            highs.append(max(values))
        color = f"C{number % 10}"
        axes.plot(xs, means, color=color, marker=".", label=f"{variant} ({len(seeds)})")
        axes.fill_between(xs, lows, highs, color=color, alpha=0.15, lw=0)
    axes.set_xlabel(panel.label)
    axes.set_title(panel.title, fontsize=10)
    axes.grid(alpha=0.2)


def draw_dots(study: Study, found: Runs, path: Path) -> None:
    """A dot for each seed, a line for their mean, and behind them what cannot be told from the
    base."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1 + 0.24 * len(found)), layout="constrained")
    all_axes = figure.subplots(1, len(MEASURES), sharey=True)
    for axes, (title, measure) in zip(all_axes, MEASURES.items()):
        for row, (variant, seeds) in enumerate(found.items()):
            values = [measure(metrics) for metrics in seeds.values()]
            axes.plot(values, [row] * len(values), "o", color="C0", alpha=0.5, markersize=4)
            axes.plot([mean(values)], [row], "|", color="black", markersize=9)
            base = mean(map(measure, found[base_of(study, found, variant)].values()))
            limit = noise(study, found, measure, variant)
            if isfinite(limit):
                height = [row - 0.5, row + 0.5]
                axes.fill_betweenx(height, base - limit, base + limit, color="C7", alpha=0.2, lw=0)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.2)
    all_axes[0].set_yticks(range(len(found)), list(found), fontsize=8)
    all_axes[0].invert_yaxis()
    figure.savefig(path, dpi=120)

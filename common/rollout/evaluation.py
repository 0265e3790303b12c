"""Samples of an evaluation: accuracy, unbiased pass@k, majority vote, and tables with confidence
intervals."""

import json
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pyarrow as pa
import pyarrow.parquet as pq

from common.files import full_disk_is_a_warning, jsonable, replace_file, shorten
from common.progress import say
from common.rewards import is_correct, sampled_turns
from common.types import Episode, Row

# `score_episodes` adds these where a function given as --environment has rewarded single turns
TURN_ACCURACIES = ("first_turn_accuracy", "last_turn_accuracy")
PICTURE_COLUMNS = {"image", "images", "videos"}
# the columns of `verdict` for a row without a truth
NO_VERDICT = {
    "score": None,
    "correct": None,
    "pred": "",
    "failed": False,
    "anls": None,
    "rewards": None,
}


def as_sample(episode: Episode, row: Row, tokenizer, with_tools: bool) -> dict:
    """The columns of a report for an episode and its row. Without a ground truth in the row, the
    truth is None, and the verdict is `NO_VERDICT`."""
    truth = None
    verdict_columns = NO_VERDICT
    if row.ground_truth is not None:
        truth = episode.truth
        verdict_columns = verdict(episode.rewards)
    sample = {
        "group": episode.prompt_index,
        "row": row.index,
        "data_source": row.data_source,
        "prompt": tokenizer.decode(episode.prompt_ids),
        "completion": "\n".join(sampled_turns(episode, tokenizer)),  # what is scored
        "truth": truth,
        **verdict_columns,
        "length": len(episode.response_ids),
        "truncated": episode.truncated,
    }
    if with_tools:
        sample["calls"] = len(episode.calls)
        sample["call_errors"] = sum(call["error"] for call in episode.calls)
        sample["trajectory"] = tokenizer.decode(episode.response_ids)
    return sample


def verdict(rewards: dict) -> dict:
    """The columns of a scored response. If scoring failed, the score is 0 and `failed` is True."""
    failed = not math.isfinite(rewards["score"])
    anls = rewards.get("anls")
    if not isinstance(anls, float):
        anls = None  # a user's function may mean something else by it
    columns = {
        "score": 0.0 if failed else rewards["score"],
        "correct": is_correct(rewards),
        "pred": str(rewards.get("pred", "")),
        "failed": failed,
        "anls": anls,
        "rewards": json.dumps(jsonable(rewards)),  # all that was returned
    }
    for name in TURN_ACCURACIES:
        if name in rewards:
            columns[name] = rewards[name]
    return columns


def summarize_with_bounds(samples: list[dict]) -> dict[str, float]:
    """`summarize`, in which samples that could not be scored count as wrong.

    If there are any, a line is printed, eval/failed is their number, and eval/accuracy_high the
    accuracy if all of them were right.
    """
    metrics = summarize(samples)
    num_failed = sum(sample["failed"] for sample in samples)
    if num_failed == 0:
        return metrics
    best_case = []
    for sample in samples:
        if sample["failed"]:
            sample = sample | {"correct": True}
        best_case.append(sample)
    high = summarize(best_case)["eval/accuracy"]
    low = metrics["eval/accuracy"]
    say(
        f"evaluation INCOMPLETE: {num_failed} of {len(samples)} samples could not be scored, and "
        f"count as wrong; the accuracy is between {low:.4f} and {high:.4f}"
    )
    metrics["eval/failed"] = num_failed
    metrics["eval/accuracy_high"] = high
    return metrics


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): the chance that k of n samples, c of them correct, include a correct
    one.

    Chen et al. 2021 (arXiv 2107.03374), equation 1, as a product that cannot overflow. ValueError
    unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got n {n}, c {c}, k {k}")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def maj_at_k(preds: list[str], scores: list[float]) -> float:
    """The score of the majority answer among all k samples, in expectation over ties.

    "" is no answer: it wins only if all are empty.
    """
    scores_of_answer = defaultdict(list)
    for pred, score in zip(preds, scores, strict=True):
        scores_of_answer[pred or ""].append(score)
    if len(scores_of_answer) > 1:
        scores_of_answer.pop("", None)
    groups = scores_of_answer.values()
    num_votes = max(len(group) for group in groups)
    winners = [fmean(group) for group in groups if len(group) == num_votes]
    return fmean(winners)


def wilson_interval(p: float, n: int) -> tuple[float, float]:
    """95 % confidence interval (Wilson 1927) of a proportion p over n independent rows; unlike
    p ± 1.96 standard errors it stays within [0, 1]."""
    if n == 0:
        return 0.0, 1.0
    z = 1.959964  # the 97.5 % quantile of the normal distribution
    scale = 1 + z * z / n
    center = (p + z * z / (2 * n)) / scale
    variance = p * (1 - p) / n + z * z / (4 * n * n)
    half = z / scale * math.sqrt(variance)
    return max(0.0, center - half), min(1.0, center + half)


def summarize(samples: list[dict]) -> dict[str, float]:
    """eval/* metrics of samples {data_source, group, score, correct, pred, length, truncated}; a
    group is a prompt.

    Accuracy, reward, anls, pass@k and maj@n are means over prompts of means over samples: a prompt
    that lost a sample weighs as much as the others. n is the smallest number of samples that a
    prompt has, though all that a prompt has vote in maj@n; k goes over the powers of two up to n,
    and n. If all samples have calls and call_errors, eval/rapr is the share of samples with a call
    (rate of pixel-space reasoning, arXiv 2505.15966), and eval/tool_error_rate the share of calls
    that failed. eval/unscored is the number of prompts without a truth, if there are any: they
    count only in lengths and calls. ValueError without samples.
    """
    if not samples:
        raise ValueError("nothing to summarize: the evaluation has no samples")
    scored = [sample for sample in samples if sample["correct"] is not None]
    metrics = summarize_scored(scored) if scored else {}
    # samples from elsewhere may lack these columns, or have something else in them
    add_mean(metrics, "eval/response_length", samples, "length", int)
    add_mean(metrics, "eval/truncated", samples, "truncated", int)
    for name in TURN_ACCURACIES:
        add_mean(metrics, f"eval/{name}", samples, name, float)
    num_scored = len({sample["group"] for sample in scored})
    metrics["eval/rows"] = num_scored
    counts = [sample.get(name) for sample in samples for name in ("calls", "call_errors")]
    if all(isinstance(count, int) for count in counts):
        num_calls = sum(sample["calls"] for sample in samples)
        num_errors = sum(sample["call_errors"] for sample in samples)
        metrics["eval/rapr"] = fmean(sample["calls"] > 0 for sample in samples)
        metrics["eval/tool_error_rate"] = num_errors / max(num_calls, 1)
    num_unscored = len({sample["group"] for sample in samples}) - num_scored
    if num_unscored:
        metrics["eval/unscored"] = num_unscored
    return metrics


def add_mean(metrics: dict, name: str, samples: list[dict], column: str, kind: type) -> None:
    """Add the mean of a column over the samples in which it has a value of this kind, if there are
    any."""
    values = [sample[column] for sample in samples if isinstance(sample.get(column), kind)]
    if values:
        metrics[name] = fmean(values)


def summarize_scored(samples: list[dict]) -> dict[str, float]:
    """The metrics of `summarize` that need truths."""
    groups = list(group_by(samples, "group").values())
    accuracies = [column_mean(group, "correct") for group in groups]
    metrics = {
        "eval/accuracy": fmean(accuracies),
        "eval/reward": fmean(column_mean(group, "score") for group in groups),
    }
    anls_sources = {s["data_source"] for s in samples if s.get("anls") is not None}
    if anls_sources:
        with_anls = [group for group in groups if group[0]["data_source"] in anls_sources]
        metrics["eval/anls"] = fmean(mean_anls(group) for group in with_anls)
    accuracies_of_source = defaultdict(list)
    for group, accuracy in zip(groups, accuracies):
        accuracies_of_source[group[0]["data_source"]].append(accuracy)
    if len(accuracies_of_source) > 1:
        for source, values in accuracies_of_source.items():
            metrics[f"eval/{source}/accuracy"] = fmean(values)
    n = min(len(group) for group in groups)
    powers_of_two = {2**i for i in range(n.bit_length())}
    for k in sorted(powers_of_two | {n}):
        metrics[f"eval/pass@{k}"] = fmean(group_pass_at_k(group, k) for group in groups)
    if n > 1:
        metrics[f"eval/maj@{n}"] = fmean(group_majority(group) for group in groups)
    return metrics


def group_by(samples: list[dict], column: str) -> dict[object, list[dict]]:
    groups = defaultdict(list)
    for sample in samples:
        groups[sample[column]].append(sample)
    return groups


def column_mean(samples: list[dict], column: str) -> float:
    return fmean(sample[column] for sample in samples)


def mean_anls(group: list[dict]) -> float:
    """A sample without an anls, for example one that could not be scored, counts as 0."""
    return fmean(sample["anls"] or 0.0 for sample in group)


def group_pass_at_k(group: list[dict], k: int) -> float:
    num_correct = sum(sample["correct"] for sample in group)
    return pass_at_k(len(group), num_correct, k)


def group_majority(group: list[dict]) -> float:
    preds = [sample["pred"] for sample in group]
    correct = [sample["correct"] for sample in group]
    return maj_at_k(preds, correct)


def format_table(metrics_by_source: dict[str, dict[str, float]]) -> str:
    """An aligned table with one line per source, from what `summarize` returned for each."""
    import pandas as pd  # takes half a second

    table = []
    for source, metrics in metrics_by_source.items():
        accuracy = metrics["eval/accuracy"]
        num_rows = int(metrics["eval/rows"])
        low, high = wilson_interval(accuracy, num_rows)
        line = {
            "source": shorten(source, 100),
            "rows": str(num_rows),
            "accuracy": f"{accuracy:.3f}",
            "95 % interval": f"{low:.3f} - {high:.3f}",
        }
        for name, value in metrics.items():
            column = name.removeprefix("eval/")
            if "/" not in column and column not in line:
                line[column] = f"{value:.3f}"
        table.append(line)
    return pd.DataFrame(table).fillna("").to_string(index=False)


def report(
    samples: list[dict], path: Path, read_record: Callable[[int], dict] | None = None
) -> str:
    """Write all samples; returns the table by data source. read_record: takes a `Row.index` and
    returns what the data file has in that row, to be written with the samples."""
    rows = samples
    if read_record:
        rows = [columns_of_record(read_record(sample["row"])) | sample for sample in samples]
    with full_disk_is_a_warning(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda temporary: write_samples(rows, temporary, path.suffix))
    num_unscored = 0
    metrics_by_source = {}
    for source, samples_of_source in sorted(group_by(samples, "data_source").items()):
        metrics = summarize(samples_of_source)
        num_unscored += metrics.pop("eval/unscored", 0)
        if "eval/accuracy" in metrics:
            metrics_by_source[source] = metrics
    lines = []
    if metrics_by_source:
        lines.append(format_table(metrics_by_source))
    if num_unscored:
        num_rows = len({sample["group"] for sample in samples})
        lines.append(f"{num_unscored} of {num_rows} rows have no truth: not scored")
    return "\n".join(lines)


def columns_of_record(record: dict) -> dict:
    """The columns of a row, without its pictures, and without its `tools_kwargs`, which may hold
    some."""
    columns = {name: value for name, value in record.items() if name not in PICTURE_COLUMNS}
    extra_info = columns.get("extra_info")
    if extra_info:
        extra_info.pop("tools_kwargs", None)
    return columns


def write_samples(samples: list[dict], path: Path, suffix: str) -> None:
    """Write lines of JSON if `suffix` is .jsonl, else a parquet file.

    In parquet a column becomes JSON if its values have no common type, or one that parquet lacks.
    """
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(sample, default=str) + "\n" for sample in samples))
        return
    names = dict.fromkeys(name for sample in samples for name in sample)  # in order, each once
    columns = {name: to_arrow([sample.get(name) for sample in samples]) for name in names}
    pq.write_table(pa.table(columns), path)


def to_arrow(values: list) -> pa.Array:
    """An array that parquet can hold: of the values, or of their JSON."""
    try:
        array = pa.array(values)
        # Arrow has types that parquet lacks: opening a writer for one raises
        schema = pa.schema([("column", array.type)])
        pq.ParquetWriter(pa.BufferOutputStream(), schema).close()
        return array
    except (NotImplementedError, OverflowError, TypeError, ValueError):
        # NotImplementedError: {} in all rows
        texts = [None if value is None else json.dumps(value, default=str) for value in values]
        return pa.array(texts)


def print_samples(step: int, samples: list[dict]) -> None:
    """Print the first two samples {prompt, completion, score, truth, truncated}, shortened in the
    middle. A score of None means that there is no truth to score by."""
    for sample in samples[:2]:
        prompt = shorten(sample["prompt"], 300)
        truth = shorten(str(sample["truth"]), 100)
        text = shorten(sample.get("trajectory", sample["completion"]), 600)
        if sample["truncated"]:
            text += " [cut off]"
        score = "none" if sample["score"] is None else f"{sample['score']:g}"
        head = f"--- step {step}, score {score}, truth {truth}"
        print(f"{head}\n{prompt}\n>>> {text}", flush=True)

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

OF_TURNS = ("first_turn_accuracy", "last_turn_accuracy")  # by an environment that answers
PICTURES = {"image", "images", "videos"}


def as_sample(episode, row, tokenizer, with_tools: bool) -> dict:
    """What a report wants to know of an Episode and its Row; score, correct and truth are None
    without a truth."""
    scored = row.ground_truth is not None
    sample = {
        "group": episode.prompt_index,
        "row": row.index,
        "data_source": row.data_source,
        "prompt": tokenizer.decode(episode.prompt_ids),
        "completion": "\n".join(sampled_turns(episode, tokenizer)),  # what is scored
        "truth": episode.truth,
        **verdict(episode.rewards if scored else {"score": 0.0}),
        "length": len(episode.response_ids),
        "truncated": episode.truncated,
    }
    if not scored:
        sample |= dict.fromkeys(["truth", "score", "correct", "rewards"])
    if with_tools:
        sample |= {
            "calls": len(episode.calls),
            "call_errors": sum(call["error"] for call in episode.calls),
        }
        sample["trajectory"] = tokenizer.decode(episode.response_ids)
    return sample


def verdict(rewards: dict) -> dict:
    """Columns of a response that was scored. One that could not be scores 0."""
    anls = rewards.get("anls")
    return {
        "score": rewards["score"] if math.isfinite(rewards["score"]) else 0.0,
        "correct": is_correct(rewards),
        "pred": str(rewards.get("pred", "")),
        "failed": not math.isfinite(rewards["score"]),  # counts as wrong
        # a user's function may mean something else by it
        "anls": anls if isinstance(anls, float) else None,
        "rewards": json.dumps(jsonable(rewards)),  # all that was returned
        **{name: rewards[name] for name in OF_TURNS if name in rewards},
    }


def bounded(samples: list[dict]) -> dict[str, float]:
    """The summary of an evaluation. Samples that could not be scored count as wrong; how many they
    are stands beside, and the accuracy if they were right."""
    metrics = summarize(samples)
    failed = sum(sample["failed"] for sample in samples)
    if not failed:
        return metrics
    best = summarize(
        [sample | {"correct": True} if sample["failed"] else sample for sample in samples]
    )
    low = metrics["eval/accuracy"]
    high = best["eval/accuracy"]
    missing = f"{failed} of {len(samples)} samples could not be scored, and count as wrong"
    say(f"evaluation INCOMPLETE: {missing}; the accuracy is between {low:.4f} and {high:.4f}")
    return metrics | {"eval/failed": failed, "eval/accuracy_high": high}


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k), the chance that k of n samples, c of them correct, hold a correct
    one.

    Chen et al. 2021 (arXiv 2107.03374), equation 1, as a product that cannot overflow. ValueError
    unless k, c fit n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got n {n}, c {c}, k {k}")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def maj_at_k(preds: list[str], scores: list[float]) -> float:
    """Score of the majority answer among all k samples, in expectation over ties; "" wins only if
    all are empty."""
    votes = defaultdict(list)
    for pred, score in zip(preds, scores, strict=True):
        votes[pred or ""].append(score)
    if len(votes) > 1:
        votes.pop("", None)
    most = max(len(group) for group in votes.values())
    return fmean(fmean(group) for group in votes.values() if len(group) == most)


def wilson_interval(p: float, n: int) -> tuple[float, float]:
    """95 % confidence interval of a proportion p over n independent rows; unlike p ± 1.96 s it
    stays within [0, 1]."""
    if n == 0:
        return 0.0, 1.0
    z = 1.959964
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, center - half), min(1.0, center + half)


def summarize(samples: list[dict]) -> dict[str, float]:
    """eval/* metrics of samples {data_source, group, score, correct, pred, length, truncated}; a
    group is a prompt.

    With tools they have calls and call_errors, too: eval/rapr is the share of samples with a call
    (rate of pixel-space reasoning, arXiv 2505.15966), eval/tool_error_rate that of calls that
    failed. With anls: its mean over prompts. Means are over prompts first, so that a prompt that
    lost a sample weighs as much as the others. k goes over the powers of two up to n, and n, the
    smallest number of samples that a prompt has. ValueError without samples. eval/unscored is the
    number of prompts without a truth, if there are any: only lengths and calls count these.
    """
    if not samples:
        raise ValueError("nothing to summarize: the evaluation has no samples")
    scored = [sample for sample in samples if sample["correct"] is not None]
    metrics = summarize_scored(scored) if scored else {}
    for name, column in {"eval/response_length": "length", "eval/truncated": "truncated"}.items():
        # else from elsewhere
        if values := [s[column] for s in samples if isinstance(s.get(column), int)]:
            metrics[name] = fmean(values)
    for name in OF_TURNS:
        if values := [s[name] for s in samples if isinstance(s.get(name), float)]:
            metrics[f"eval/{name}"] = fmean(values)
    metrics["eval/rows"] = len({s["group"] for s in scored})
    if all(isinstance(s.get("calls"), int) and "call_errors" in s for s in samples):
        metrics["eval/rapr"] = fmean(s["calls"] > 0 for s in samples)
        made = sum(s["calls"] for s in samples)
        metrics["eval/tool_error_rate"] = sum(s["call_errors"] for s in samples) / max(made, 1)
    if unscored := len({s["group"] for s in samples}) - metrics["eval/rows"]:
        metrics["eval/unscored"] = unscored
    return metrics


def summarize_scored(samples: list[dict]) -> dict[str, float]:
    """What of `summarize` needs truths."""
    groups = defaultdict(list)
    for sample in samples:
        groups[sample["group"]].append(sample)
    rows = list(groups.values())
    accuracy = [fmean(s["correct"] for s in row) for row in rows]
    metrics = {
        "eval/accuracy": fmean(accuracy),
        "eval/reward": fmean(fmean(s["score"] for s in row) for row in rows),
    }
    if spelled := {s["data_source"] for s in samples if s.get("anls") is not None}:
        of_these = [row for row in rows if row[0]["data_source"] in spelled]
        metrics["eval/anls"] = fmean(fmean(s["anls"] or 0.0 for s in row) for row in of_these)
    by_source = defaultdict(list)
    for row, value in zip(rows, accuracy):
        by_source[row[0]["data_source"]].append(value)
    if len(by_source) > 1:
        metrics |= {
            f"eval/{source}/accuracy": fmean(values) for source, values in by_source.items()
        }
    n = min(len(row) for row in rows)
    for k in sorted({2**i for i in range(n.bit_length())} | {n}):
        metrics[f"eval/pass@{k}"] = fmean(
            pass_at_k(len(row), sum(s["correct"] for s in row), k) for row in rows
        )
    if n > 1:
        votes = (maj_at_k([s["pred"] for s in row], [s["correct"] for s in row]) for row in rows)
        metrics[f"eval/maj@{n}"] = fmean(votes)
    return metrics


def format_table(metrics_by_source: dict[str, dict[str, float]]) -> str:
    """An aligned table with one line per source, from what `summarize` returned for each."""
    import pandas as pd  # takes half a second

    table = []
    for source, metrics in metrics_by_source.items():
        low, high = wilson_interval(metrics["eval/accuracy"], int(metrics["eval/rows"]))
        others = {name: f"{value:.3f}" for name, value in metrics.items() if name.count("/") == 1}
        line = {"source": shorten(source, 100), "rows": str(int(metrics["eval/rows"]))}
        line |= {
            "accuracy": others.pop("eval/accuracy"),
            "95 % interval": f"{low:.3f} - {high:.3f}",
        }
        del others["eval/rows"]
        table.append(line | {name.removeprefix("eval/"): value for name, value in others.items()})
    return pd.DataFrame(table).fillna("").to_string(index=False)


def report(samples: list[dict], path: Path, record: Callable[[int], dict] | None = None) -> str:
    """Write all samples, with the columns of the `record` of a row; returns the table by data
    source."""
    rows = samples
    if record:
        own = [
            {k: v for k, v in record(sample["row"]).items() if k not in PICTURES}
            for sample in samples
        ]
        for columns in own:
            (columns.get("extra_info") or {}).pop("tools_kwargs", None)  # a program's pictures
        rows = [columns | sample for columns, sample in zip(own, samples)]
    with full_disk_is_a_warning(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda temporary: write_samples(rows, temporary, path.suffix))
    by_source = defaultdict(list)
    for sample in samples:
        by_source[sample["data_source"]].append(sample)
    tables = {source: summarize(part) for source, part in sorted(by_source.items())}
    unscored = sum(metrics.pop("eval/unscored", 0) for metrics in tables.values())
    scored = {source: metrics for source, metrics in tables.items() if "eval/accuracy" in metrics}
    lines = [format_table(scored)] if scored else []
    lines += (
        [f"{unscored} of {len({s['group'] for s in samples})} rows have no truth: not scored"]
        if unscored
        else []
    )
    return "\n".join(lines)


def write_samples(samples: list[dict], path: Path, suffix: str) -> None:
    """Lines of JSON, or a parquet file, where columns without a common type, or one that parquet
    has, are JSON."""
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(sample, default=str) + "\n" for sample in samples))
        return
    names = dict.fromkeys(name for sample in samples for name in sample)
    pq.write_table(
        pa.table({name: column([sample.get(name) for sample in samples]) for name in names}), path
    )


def column(values: list) -> pa.Array:
    try:
        array = pa.array(values)
        pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([("column", array.type)])).close()
        return array
    except (NotImplementedError, OverflowError, TypeError, ValueError):
        # the first: of {} in all rows
        return pa.array(
            [None if value is None else json.dumps(value, default=str) for value in values]
        )


def print_samples(step: int, samples: list[dict]) -> None:
    """The first two of {prompt, completion, score, truth, truncated}, shortened in the middle;
    None: not scored."""
    for sample in samples[:2]:
        said = sample.get("trajectory", sample["completion"])
        prompt, completion = shorten(sample["prompt"], 300), shorten(said, 600)
        score = "none" if sample["score"] is None else f"{sample['score']:g}"
        head = f"--- step {step}, score {score}, truth {shorten(str(sample['truth']), 100)}"
        cut = " [cut off]" * sample["truncated"]
        print(f"{head}\n{prompt}\n>>> {completion}{cut}", flush=True)

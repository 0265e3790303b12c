"""Accuracy and pass@k of the samples of an --eval-only run, strict and lenient, with 95 % intervals
over rows.

    python results/notebook/scores.py runs/NAME/eval_samples.parquet

Strict is the reward's own rule. Lenient takes the right answer in any format: for GSM8K's rows the
last number of the response, for Countdown's any expression in it that makes the target of the
numbers, for reasoning-gym's the answer at its end, with a tag or without. Format is the share of
samples with an answer tag, where the reward says so. Where some samples call a tool: how many, how
often, and how they do beside the others. Of several sources each has a table of its own.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated

import pyarrow.parquet as pq
import tyro
from report import table

from common.rewards.countdown import MAX_CHARACTERS, evaluate
from common.rewards.math import NUMBER, canonical_number
from common.rollout.evaluation import pass_at_k, wilson_interval

EXPRESSION = re.compile(r"[0-9+\-*/() ]+")
ANY_NUMBER = re.compile(NUMBER)
TAG = re.compile("</?answer>")


@dataclass
class Args:
    samples: Annotated[Path, tyro.conf.Positional]  # parquet file


def lenient(sample: dict) -> bool:
    """Whether the right answer is there, in whatever form."""
    if sample["correct"]:
        return True
    text = sample["completion"]
    truth = sample["truth"]
    if isinstance(truth, str) and truth.startswith("{"):
        truth = json.loads(truth)
    if not isinstance(truth, dict):
        found = ANY_NUMBER.findall(text)
        return bool(found) and canonical_number(found[-1]) == canonical_number(str(truth))
    if "entry" in truth:
        answer = re.escape(str(truth["entry"]["answer"]))
        return bool(re.search(rf"(?<![\w.-]){answer}[\s.]*$", TAG.sub("", text)))
    numbers = [int(number) for number in truth["numbers"]]
    target = int(truth["target"])
    found = [match.strip() for match in EXPRESSION.findall(text) if len(match) <= MAX_CHARACTERS]
    return any(evaluate(text, numbers, "strict") == target for text in found if text)


def scores(path: Path) -> dict:
    """`scores_of` all samples of a file, and if they have several sources, "sources": {source:
    `scores_of` its samples}."""
    by_source: dict[str, list[dict]] = defaultdict(list)
    samples = pq.read_table(path).to_pylist()
    for sample in samples:
        by_source[sample.get("data_source", "")].append(sample)
    found = scores_of(samples)
    if len(by_source) > 1:
        found["sources"] = {source: scores_of(own) for source, own in by_source.items()}
    return found


def scores_of(samples: list[dict]) -> dict[str, int | list[float]]:
    """{rows, samples of a row, "strict, pass@1": [mean, half the interval], ...}."""
    by_row: dict[int, list[dict]] = defaultdict(list)
    for sample in samples:
        verdict = {"strict": sample["correct"], "lenient": lenient(sample)}
        by_row[sample["row"]].append(verdict)
    n = max(map(len, by_row.values()))
    found: dict[str, int | list[float]] = {"rows": len(by_row), "samples": n}
    for rule in ("strict", "lenient"):
        for k in sorted({1, n}):
            values = []
            for verdicts in by_row.values():
                num_correct = sum(verdict[rule] for verdict in verdicts)
                values.append(pass_at_k(len(verdicts), num_correct, k))
            found[f"{rule}, pass@{k}"] = [mean(values), half_interval(values, n)]
    return found | by_format(samples, n) | by_calls(samples)


def half_interval(values: list[float], n: int) -> float:
    """Half the 95 % interval of the mean of rows with `n` samples each."""
    if n == 1 or len(set(values)) == 1:
        # rows that are all alike do not deviate, which is no sign of certainty
        low, high = wilson_interval(mean(values), len(values))
        return (high - low) / 2
    return 1.96 * stdev(values) / len(values) ** 0.5


def by_format(samples: list[dict], n: int) -> dict[str, list[float]]:
    """The share of samples with an answer tag, and how those do; nothing if the reward has no
    "format"."""
    formats: dict[int, list[float]] = defaultdict(list)
    with_tag = []
    for sample in samples:
        rewards = json.loads(sample.get("rewards") or "{}")
        if "format" not in rewards:
            return {}
        formats[sample["row"]].append(rewards["format"])
        if rewards["format"]:
            with_tag.append(sample)
    shares = [mean(own) for own in formats.values()]
    found = {"format": [mean(shares), half_interval(shares, n)]}
    if with_tag:
        found["strict, with format"] = mean_over_rows(with_tag, lambda sample: sample["correct"])
    return found


def by_calls(samples: list[dict]) -> dict[str, list[float]]:
    """Samples that call a tool beside those that do not; nothing if all are alike."""
    callers = [sample for sample in samples if sample.get("calls")]
    others = [sample for sample in samples if not sample.get("calls")]
    if not callers or not others:
        return {}
    return {
        "samples with calls": mean_over_rows(samples, lambda sample: bool(sample.get("calls"))),
        "calls of those": mean_over_rows(callers, lambda sample: sample["calls"]),
        "strict, with calls": mean_over_rows(callers, lambda sample: sample["correct"]),
        "strict, without": mean_over_rows(others, lambda sample: sample["correct"]),
    }


def mean_over_rows(samples: list[dict], value: Callable[[dict], float]) -> list[float]:
    """[mean, half the interval]. Samples of a row are alike, so deviations are summed over a row
    before they are squared."""
    center = mean(value(sample) for sample in samples)
    deviations: dict[int, float] = defaultdict(float)
    for sample in samples:
        deviations[sample["row"]] += value(sample) - center
    return [center, 1.96 * sum(d * d for d in deviations.values()) ** 0.5 / len(samples)]


def main(args: Args) -> None:
    found = scores(args.samples)
    for source, own in {"": found, **found.pop("sources", {})}.items():
        print(f"{source} {own.pop('rows')} rows, {own.pop('samples')} samples each".lstrip())
        rows = [[name, f"{center:.3f}", f"{half:.3f}"] for name, (center, half) in own.items()]
        table(["", "share", "±"], *rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

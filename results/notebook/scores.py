"""Accuracy and pass@k of the samples of an --eval-only run, strict and lenient, with 95 % intervals
over rows.

    python results/notebook/scores.py runs/NAME/eval_samples.parquet

Strict is the reward's own rule. Lenient takes the right answer in any format: for GSM8K's rows the
last number of the response, for Countdown's any expression in it that makes the target of the
numbers. Where some samples call a tool: how many, how often, and how they do beside the others.
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
    numbers = [int(number) for number in truth["numbers"]]
    target = int(truth["target"])
    found = [match.strip() for match in EXPRESSION.findall(text) if len(match) <= MAX_CHARACTERS]
    return any(evaluate(text, numbers, "strict") == target for text in found if text)


def scores(path: Path) -> dict[str, float | int | list[float]]:
    """{rows, samples of a row, "strict, pass@1": [mean, half the interval], ...}."""
    samples = pq.read_table(path).to_pylist()
    by_row: dict[int, list[dict]] = defaultdict(list)
    for sample in samples:
        verdict = {"strict": sample["correct"], "lenient": lenient(sample)}
        by_row[sample["row"]].append(verdict)
    n = max(map(len, by_row.values()))
    found: dict[str, float | int | list[float]] = {"rows": len(by_row), "samples": n}
    for rule in ("strict", "lenient"):
        for k in sorted({1, n}):
            values = []
            for verdicts in by_row.values():
                num_correct = sum(verdict[rule] for verdict in verdicts)
                values.append(pass_at_k(len(verdicts), num_correct, k))
            found[f"{rule}, pass@{k}"] = [mean(values), half_interval(values, n)]
    return found | by_calls(samples)


def half_interval(values: list[float], n: int) -> float:
    """Half the 95 % interval of the mean of rows with `n` samples each."""
    if n == 1 or len(set(values)) == 1:
        # rows that are all alike do not deviate, which is no sign of certainty
        low, high = wilson_interval(mean(values), len(values))
        return (high - low) / 2
    return 1.96 * stdev(values) / len(values) ** 0.5


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
    print(f"{found.pop('rows')} rows, {found.pop('samples')} samples each")
    rows = [[name, f"{center:.3f}", f"{half:.3f}"] for name, (center, half) in found.items()]
    table(["", "share", "±"], *rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

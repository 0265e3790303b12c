"""Accuracy and pass@k of the samples of an --eval-only run, with 95 % intervals over rows: strict,
and lenient.

    python results/notebook/scores.py runs/NAME/eval_samples.parquet

Strict is the reward's own rule. Lenient asks for the answer alone, whatever its format: the last
number of a response to GSM8K's rows; to Countdown's, any expression in it that makes the target of
the numbers. Where some samples call a tool: how many, how often, and how they do beside the others.
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
    """Is the right answer there, in whatever form? What is strictly right is, too."""
    if sample["correct"]:
        return True
    text, truth = sample["completion"], sample["truth"]
    truth = json.loads(truth) if isinstance(truth, str) and truth.startswith("{") else truth
    if not isinstance(truth, dict):
        found = ANY_NUMBER.findall(text)
        return bool(found) and canonical_number(found[-1]) == canonical_number(str(truth))
    numbers, target = [int(number) for number in truth["numbers"]], int(truth["target"])
    found = (match.strip() for match in EXPRESSION.findall(text) if len(match) <= MAX_CHARACTERS)
    return any(
        evaluate(expression, numbers, "strict") == target for expression in found if expression
    )


def scores(path: Path) -> dict[str, float | int | list[float]]:
    """{rows, samples of a row, "strict, pass@1": [mean, half the interval], ...}."""
    by_row, samples = defaultdict(list), pq.read_table(path).to_pylist()
    for sample in samples:
        by_row[sample["row"]].append((sample["correct"], lenient(sample)))
    n = max(map(len, by_row.values()))
    found: dict[str, float | int | list[float]] = {"rows": len(by_row), "samples": n}
    for rule, name in enumerate(("strict", "lenient")):
        for k in sorted({1, n}):
            values = [
                pass_at_k(len(own), sum(one[rule] for one in own), k) for own in by_row.values()
            ]
            # of single samples, which may all be alike
            low, high = wilson_interval(mean(values), len(values))
            alike = n == 1 or len(set(values)) == 1  # what does not deviate is no sign of certainty
            half = (high - low) / 2 if alike else 1.96 * stdev(values) / len(values) ** 0.5
            found[f"{name}, pass@{k}"] = [mean(values), half]
    return found | by_calls(samples)


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
    """[mean, half the interval]; samples of a row are alike: what they deviate by is summed, then
    squared."""
    center, deviations = mean(value(sample) for sample in samples), defaultdict(float)
    for sample in samples:
        deviations[sample["row"]] += value(sample) - center
    return [center, 1.96 * sum(d * d for d in deviations.values()) ** 0.5 / len(samples)]


def main(args: Args) -> None:
    found = scores(args.samples)
    print(f"{found.pop('rows')} rows, {found.pop('samples')} samples each")
    table(
        ["", "share", "±"],
        *([name, f"{x:.3f}", f"{half:.3f}"] for name, (x, half) in found.items()),
    )


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

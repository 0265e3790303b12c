"""Metrics of a step: each rank adds sums and counts, which are reduced over all ranks once, to means."""

import math
from collections import Counter
from collections.abc import Mapping

from torch import Tensor

from common.distributed import all_reduce, gather_objects, world_size
from common.episodes import FINISH_REASONS, Episode, by_prompt, unequal_groups

RARE_REASONS = sorted(FINISH_REASONS.keys() - {"stop", "length"})  # to finish an episode


class Means:
    """Sums with their counts, by the name of their metric. Tensors stay on their device until `reduce`."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor | float] = {}
        self.counts: dict[str, float] = {}
        self.totals: dict[str, float] = {}

    def add(self, name: str, total: Tensor | float, count: float = 1.0) -> None:
        """`total` is the sum of `count` values."""
        total = total.detach().double() if isinstance(total, Tensor) else total
        self.sums[name] = self.sums.get(name, 0.0) + total
        self.counts[name] = self.counts.get(name, 0.0) + count

    def add_total(self, name: str, value: float, on_every_rank: bool = False) -> None:
        """A metric that is a sum and no mean; a value that all ranks know counts once."""
        self.totals[name] = self.totals.get(name, 0.0) + value / (world_size() if on_every_rank else 1)

    def merge(self, other: "Means") -> None:
        for name, total in other.sums.items():
            self.add(name, total, other.counts[name])
        for name, value in other.totals.items():
            self.add_total(name, value)

    def reduce(self) -> dict[str, float]:
        """{name: mean or total over all ranks}; a mean of nothing is left out. All ranks call it together."""
        sums: Counter = Counter()  # ranks may hold different names: one without episodes has none
        counts: Counter = Counter()
        totals: Counter = Counter()
        own = ({name: float(total) for name, total in self.sums.items()}, self.counts, self.totals)
        for part_sums, part_counts, part_totals in gather_objects(own):
            sums.update(part_sums)
            counts.update(part_counts)
            totals.update(part_totals)
        return {name: sums[name] / counts[name] for name in sums if counts[name]} | totals


def is_correct(rewards: Mapping[str, float | str]) -> bool:
    """Full marks, partial credit being none; or what the reward function says itself by "acc", as in verl."""
    said = rewards.get("acc")
    return (said if isinstance(said, float) else rewards["score"]) >= 1.0 - 1e-6


def rollout_means(episodes: list[Episode], seconds: dict[str, float], with_tools: bool = False) -> Means:
    """reward/* and rollout/* of a step, with `seconds` by phase; all episodes count, rewards of the scored ones."""
    means, scored = Means(), [e for e in episodes if math.isfinite(e.rewards["score"])]
    comparable = [group for group in by_prompt(scored).values() if len(group) > 1]
    means.add("reward/mean", math.fsum(e.rewards["score"] for e in scored), count=len(scored))
    means.add("reward/mean_square", math.fsum(e.rewards["score"] ** 2 for e in scored), count=len(scored))
    means.add("reward/accuracy", sum(is_correct(e.rewards) for e in scored), count=len(scored))
    means.add_total("reward/failed", len(episodes) - len(scored))
    equal = len(comparable) - len(by_prompt(unequal_groups(scored)))
    means.add("reward/zero_variance_groups", equal, count=len(comparable))
    judged = [e.model_reward for e in scored if e.model_reward is not None]
    means.add("reward/model_mean", math.fsum(judged), count=len(judged))
    response_tokens = sum(len(e.response_ids) for e in episodes)
    means.add("rollout/response_length", response_tokens, count=len(episodes))
    means.add("rollout/truncated", sum(e.truncated for e in episodes), count=len(episodes))
    for reason in RARE_REASONS:
        means.add(f"rollout/{reason}", sum(e.finish_reason == reason for e in episodes), count=len(episodes))
    if with_tools:
        calls = sum(len(e.calls) for e in episodes)
        means.add("rollout/turns", sum(e.turns for e in episodes), count=len(episodes))
        means.add("tool/calls", calls, count=len(episodes))
        means.add("tool/callers", sum(bool(e.calls) for e in episodes), count=len(episodes))
        means.add("tool/error_rate", sum(call["error"] for e in episodes for call in e.calls), count=calls)
    if "rollout" in seconds:  # tokens of all ranks over the seconds of one
        means.add("rollout/tokens_per_s", response_tokens, count=seconds["rollout"] / world_size())
    return means


def rollout_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """The reduced means of a step with the spread of its rewards, and without reasons to finish that did not occur."""
    if "reward/mean" not in metrics:
        raise RuntimeError("not one response of this step could be scored: see the errors above")
    mean_square = metrics.pop("reward/mean_square")
    metrics["reward/std"] = math.sqrt(max(0.0, mean_square - metrics["reward/mean"] ** 2))
    return {name: x for name, x in metrics.items() if x or name.removeprefix("rollout/") not in RARE_REASONS}


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - var(returns - values) / var(returns) over the tokens of all ranks, [T] each here; all ranks call it.

    NaN if the returns do not vary: there is nothing to explain.
    """
    error, returns = (returns - values).double(), returns.double()
    moments = [len(returns), error.sum(), error.square().sum(), returns.sum(), returns.square().sum()]
    count, error_sum, error_square, return_sum, return_square = all_reduce([float(x) for x in moments])
    count = max(count, 1.0)
    variance = return_square / count - (return_sum / count) ** 2
    return 1 - (error_square / count - (error_sum / count) ** 2) / variance if variance > 1e-9 else math.nan

"""Metrics of a step's episodes and of its critic."""

import math

from torch import Tensor

from common.distributed import all_reduce, gather_objects, world_size
from common.progress import say
from common.rewards import is_correct
from common.types import FINISH_REASONS, Episode, by_prompt

RARE_REASONS = sorted(FINISH_REASONS.keys() - {"stop", "length"})
MAX_COMPONENTS = 32  # names of numbers beside the score
# numbers of a reward function that are not logged as reward/NAME: score and acc are reward/mean and
# reward/accuracy; the others would be taken for metrics of ours
RESERVED = {"score", "acc", "mean", "std", "mean_square", "accuracy", "failed"}
RESERVED |= {"zero_variance_groups", "model_mean", "unscored_steps"}

_printed_topics: set[str] = set()  # by `say_once`


def say_once(topic: str, text: str) -> None:
    """Print a text, but no further one of its topic, which may have other numbers in it."""
    if topic not in _printed_topics:
        _printed_topics.add(topic)
        say(text)


class Means:
    """Sums with their counts, by the name of their metric. Tensors stay on their device until
    `reduce`."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor | float] = {}
        self.counts: dict[str, float] = {}
        self.totals: dict[str, float] = {}

    def add(self, name: str, value: Tensor | float, count: float = 1.0) -> None:
        """`value` is the sum of `count` values."""
        if isinstance(value, Tensor):
            value = value.detach().double()
        self.sums[name] = self.sums.get(name, 0.0) + value
        self.counts[name] = self.counts.get(name, 0.0) + count

    def add_total(self, name: str, value: float, on_every_rank: bool = False) -> None:
        """Add to a metric that is a sum and not a mean. on_every_rank: all ranks add the same
        value, and it counts once."""
        share = value / world_size() if on_every_rank else value
        self.totals[name] = self.totals.get(name, 0.0) + share

    def merge(self, other: "Means") -> None:
        for name, value in other.sums.items():
            self.add(name, value, other.counts[name])
        for name, value in other.totals.items():
            self.add_total(name, value)

    def reduce(self) -> dict[str, float]:
        """{name: mean or total over all ranks}; a mean of nothing is left out. All ranks call it
        together."""
        self.sums = {name: float(value) for name, value in self.sums.items()}  # off the device
        whole = Means()
        # ranks may hold different names: one without episodes has no means of them
        for part in gather_objects(self):
            whole.merge(part)
        means = {}
        for name, value in whole.sums.items():
            if whole.counts[name]:
                means[name] = value / whole.counts[name]
        return means | whole.totals


def rollout_means(
    episodes: list[Episode], seconds: dict[str, float], with_tools: bool = False
) -> Means:
    """reward/*, rollout/* and tool/* of a step's episodes on this rank. All ranks call it together.

    Lengths are of all episodes, rewards of those that could be scored. seconds: of the step, by
    phase.
    """
    means = Means()
    scored = [episode for episode in episodes if math.isfinite(episode.score)]
    # rewards are filled even where scoring failed; not where a row has no truth to score with
    num_to_score = sum(len(episode.rewards) > 0 for episode in episodes)
    means.add_total("reward/failed", num_to_score - len(scored))
    add_reward_means(means, scored)
    add_reward_components(means, scored)
    add_response_means(means, episodes, seconds)
    if with_tools:
        add_tool_means(means, episodes)
    return means


def add_reward_means(means: Means, scored: list[Episode]) -> None:
    scores = [episode.score for episode in scored]
    means.add("reward/mean", math.fsum(scores), count=len(scored))
    # for reward/std
    means.add("reward/mean_square", math.fsum(x**2 for x in scores), count=len(scored))
    num_correct = sum(is_correct(episode.rewards) for episode in scored)
    means.add("reward/accuracy", num_correct, count=len(scored))
    num_groups = 0
    num_equal = 0
    for group in by_prompt(scored).values():
        if len(group) > 1:
            num_groups += 1
            num_equal += len({episode.score for episode in group}) == 1
    means.add("reward/zero_variance_groups", num_equal, count=num_groups)
    model_rewards = [e.model_reward for e in scored if e.model_reward is not None]
    means.add("reward/model_mean", math.fsum(model_rewards), count=len(model_rewards))


def add_reward_components(means: Means, scored: list[Episode]) -> None:
    """reward/NAME of what scripts have added to the score, and of the numbers beside it
    (`reward_components`). If those have more than MAX_COMPONENTS names, as when each response has
    names of its own, they are left out."""
    components = [reward_components(episode) for episode in scored]
    names = set().union(*components)
    (num_names,) = all_reduce([len(names)], "max")
    if num_names > MAX_COMPONENTS:
        say_once(
            "components",
            f"warning: rewards have {num_names:g} numbers beside the score: none of them is logged",
        )
        components = []
    terms = [episode.terms for episode in scored]
    for numbers in components + terms:
        for name, number in numbers.items():
            means.add(f"reward/{name}", number)


def reward_components(episode: Episode) -> dict[str, float]:
    """The numbers beside the score: those that a reward function has returned, and those that
    `score_episodes` makes of an environment's rewards of turns."""
    components = {}
    for name, value in episode.rewards.items():
        if name in RESERVED or name in episode.terms:
            continue
        if isinstance(value, float) and math.isfinite(value):
            components[name] = value
    return components


def add_response_means(means: Means, episodes: list[Episode], seconds: dict[str, float]) -> None:
    num_tokens = sum(len(episode.response_ids) for episode in episodes)
    num_truncated = sum(episode.truncated for episode in episodes)
    means.add("rollout/response_length", num_tokens, count=len(episodes))
    means.add("rollout/truncated", num_truncated, count=len(episodes))
    for reason in RARE_REASONS:
        num_finished = sum(episode.finish_reason == reason for episode in episodes)
        means.add(f"rollout/{reason}", num_finished, count=len(episodes))
    if "rollout" in seconds:
        # summed over ranks, these counts are the mean seconds of a rank
        means.add("rollout/tokens_per_s", num_tokens, count=seconds["rollout"] / world_size())


def add_tool_means(means: Means, episodes: list[Episode]) -> None:
    num_turns = sum(episode.turns for episode in episodes)
    num_callers = sum(len(episode.calls) > 0 for episode in episodes)
    calls = [call for episode in episodes for call in episode.calls]
    num_errors = sum(call["error"] for call in calls)
    means.add("rollout/turns", num_turns, count=len(episodes))
    means.add("tool/calls", len(calls), count=len(episodes))
    means.add("tool/callers", num_callers, count=len(episodes))
    means.add("tool/error_rate", num_errors, count=len(calls))
    for call in calls:
        if "acted" in call["info"]:
            means.add("tool/acted", float(bool(call["info"]["acted"])))


def rollout_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """The reduced means, with reward/std, and without finish reasons that did not occur.

    If no response of a step could be scored, reward/unscored_steps takes the place of rewards.
    """
    if "reward/mean" in metrics:
        mean_square = metrics.pop("reward/mean_square")
        metrics["reward/std"] = math.sqrt(max(0.0, mean_square - metrics["reward/mean"] ** 2))
    else:
        metrics["reward/unscored_steps"] = 1.0
    for reason in RARE_REASONS:
        if metrics.get(f"rollout/{reason}") == 0.0:
            del metrics[f"rollout/{reason}"]
    return metrics


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - var(returns - values) / var(returns) over the tokens of all ranks; NaN if the returns do
    not vary. values, returns: [T], of this rank. All ranks call it together."""
    error = (returns - values).double()
    returns = returns.double()
    moments = [
        float(len(returns)),
        float(error.sum()),
        float(error.square().sum()),
        float(returns.sum()),
        float(returns.square().sum()),
    ]
    count, error_sum, error_square, return_sum, return_square = all_reduce(moments)
    count = max(count, 1.0)
    error_variance = error_square / count - (error_sum / count) ** 2
    return_variance = return_square / count - (return_sum / count) ** 2
    if return_variance <= 1e-9:
        return math.nan
    return 1.0 - error_variance / return_variance

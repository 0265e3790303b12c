"""Metrics of a step's episodes and of its critic."""

import math
from functools import cache

from torch import Tensor

from common.distributed import all_reduce, world_size
from common.means import Means
from common.progress import say
from common.rewards import is_correct
from common.rollout.sampling import FINISH_REASONS, Episode, by_prompt, unequal_groups

RARE_REASONS = sorted(FINISH_REASONS.keys() - {"stop", "length"})  # to finish an episode
MOST_NUMBERS = 32  # of a reward function, beside the score
OURS = {"tool_bonus", "curiosity", "call_cost"}  # numbers that scripts add
TAKEN = {"score", "acc", "looks"}  # names that `rewards` has for our own
# other metrics'
TAKEN |= {"mean", "std", "mean_square", "accuracy", "failed", "zero_variance_groups", "model_mean"}
TAKEN |= {"unscored_steps"}

say_once = cache(say)


def rollout_means(
    episodes: list[Episode], seconds: dict[str, float], with_tools: bool = False
) -> Means:
    """reward/* and rollout/* of a step, with `seconds` by phase; all episodes count, rewards of the
    scored ones."""
    means, scored = Means(), [e for e in episodes if math.isfinite(e.rewards["score"])]
    comparable = [group for group in by_prompt(scored).values() if len(group) > 1]
    means.add("reward/mean", math.fsum(e.rewards["score"] for e in scored), count=len(scored))
    means.add(
        "reward/mean_square", math.fsum(e.rewards["score"] ** 2 for e in scored), count=len(scored)
    )
    means.add("reward/accuracy", sum(is_correct(e.rewards) for e in scored), count=len(scored))
    means.add_total("reward/failed", len(episodes) - len(scored))
    equal = len(comparable) - len(by_prompt(unequal_groups(scored)))
    means.add("reward/zero_variance_groups", equal, count=len(comparable))
    judged = [e.model_reward for e in scored if e.model_reward is not None]
    means.add("reward/model_mean", math.fsum(judged), count=len(judged))
    numbers = [(name, x) for e in scored for name, x in e.rewards.items() if name not in TAKEN]
    numbers = [(name, x) for name, x in numbers if isinstance(x, float) and math.isfinite(x)]
    own = {name for name, _ in numbers} - OURS
    (most,) = all_reduce([len(own)], "max")
    if most > MOST_NUMBERS:  # made up, one for each response?
        say_once(f"warning: rewards have {most:g} numbers beside the score: none of them is logged")
    for name, number in numbers:
        if name in OURS or most <= MOST_NUMBERS:
            means.add(f"reward/{name}", number)
    response_tokens = sum(len(e.response_ids) for e in episodes)
    means.add("rollout/response_length", response_tokens, count=len(episodes))
    means.add("rollout/truncated", sum(e.truncated for e in episodes), count=len(episodes))
    for reason in RARE_REASONS:
        means.add(
            f"rollout/{reason}",
            sum(e.finish_reason == reason for e in episodes),
            count=len(episodes),
        )
    if with_tools:
        calls = sum(len(e.calls) for e in episodes)
        means.add("rollout/turns", sum(e.turns for e in episodes), count=len(episodes))
        means.add("tool/calls", calls, count=len(episodes))
        means.add("tool/callers", sum(bool(e.calls) for e in episodes), count=len(episodes))
        means.add(
            "tool/error_rate", sum(call["error"] for e in episodes for call in e.calls), count=calls
        )
        programs = [
            bool(call["info"]["acted"])
            for e in episodes
            for call in e.calls
            if "acted" in call["info"]
        ]
        means.add("tool/acted", sum(programs), count=len(programs))
    if "rollout" in seconds:  # tokens of all ranks over the seconds of one
        means.add("rollout/tokens_per_s", response_tokens, count=seconds["rollout"] / world_size())
    return means


def rollout_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """The reduced means of a step with the spread of its rewards, and without reasons to finish
    that did not occur.

    A step of which no response could be scored has no rewards, but reward/unscored_steps.
    """
    if "reward/mean" in metrics:
        mean_square = metrics.pop("reward/mean_square")
        metrics["reward/std"] = math.sqrt(max(0.0, mean_square - metrics["reward/mean"] ** 2))
    else:
        metrics["reward/unscored_steps"] = 1.0
    return {
        name: x
        for name, x in metrics.items()
        if x or name.removeprefix("rollout/") not in RARE_REASONS
    }


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - var(returns - values) / var(returns) over the tokens of all ranks, [T] each here; all
    ranks call it.

    NaN if the returns do not vary: there is nothing to explain.
    """
    error, returns = (returns - values).double(), returns.double()
    moments = [
        len(returns),
        error.sum(),
        error.square().sum(),
        returns.sum(),
        returns.square().sum(),
    ]
    count, error_sum, error_square, return_sum, return_square = all_reduce(
        [float(x) for x in moments]
    )
    count = max(count, 1.0)
    variance = return_square / count - (return_sum / count) ** 2
    return (
        1 - (error_square / count - (error_sum / count) ** 2) / variance
        if variance > 1e-9
        else math.nan
    )

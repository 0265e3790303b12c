"""Metrics of a step: sums and counts of each rank, reduced once, then means."""

import math
from collections import Counter

from torch import Tensor

from common.episodes import FINISH_REASONS, Episode, by_prompt, unequal_groups


def is_correct(rewards: dict[str, float | str]) -> bool:
    """Full marks, partial credit being none; or what the reward function says itself by "acc", as in verl."""
    said = rewards.get("acc")
    return (said if isinstance(said, float) else rewards["score"]) >= 1.0 - 1e-6


def rollout_sums(episodes: list[Episode]) -> dict[str, float]:
    """What this rank adds to the metrics of a step: sums and counts, to be reduced once."""
    scored = [e for e in episodes if math.isfinite(e.rewards["score"])]
    scores = [e.rewards["score"] for e in scored]
    comparable = [group for group in by_prompt(scored).values() if len(group) > 1]
    return Counter(e.finish_reason for e in episodes) | {
        "episodes": len(episodes),
        "scored": len(scored),
        "score": math.fsum(scores),
        "score_squared": math.fsum(score**2 for score in scores),
        "correct": sum(is_correct(e.rewards) for e in scored),
        "reward_model": math.fsum(e.model_reward or 0.0 for e in scored),
        "groups": len(comparable),
        "unequal_groups": len(by_prompt(unequal_groups(scored))),
        "response_tokens": sum(len(e.response_ids) for e in episodes),
        "truncated": sum(e.truncated for e in episodes),
        "turns": sum(e.turns for e in episodes),
        "calls": sum(len(e.calls) for e in episodes),
        "callers": sum(bool(e.calls) for e in episodes),
        "call_errors": sum(call["error"] for e in episodes for call in e.calls),
    }


def rollout_metrics(sums: dict[str, float], seconds: dict[str, float], with_tools: bool = False) -> dict[str, float]:
    """reward/* and rollout/* of a step from the reduced `rollout_sums` and its seconds by phase."""
    if not sums["scored"]:
        raise RuntimeError("not one response of this step could be scored: see the errors above")
    scored, episodes = sums["scored"], sums["episodes"]
    mean = sums["score"] / scored
    metrics = {
        "reward/mean": mean,
        "reward/std": math.sqrt(max(0.0, sums["score_squared"] / scored - mean**2)),
        "reward/accuracy": sums["correct"] / scored,
        "reward/failed": sums["episodes"] - sums["scored"],
        "rollout/response_length": sums["response_tokens"] / episodes,
        "rollout/truncated": sums["truncated"] / episodes,
    }
    if sums["groups"]:
        metrics["reward/zero_variance_groups"] = 1 - sums["unequal_groups"] / sums["groups"]
    if sums["reward_model"]:  # exactly 0 without one
        metrics["reward/model_mean"] = sums["reward_model"] / scored
    others = FINISH_REASONS.keys() - {"stop", "length"}
    metrics |= {f"rollout/{reason}": sums[reason] / episodes for reason in sorted(others) if sums.get(reason)}
    if with_tools:
        metrics["rollout/turns"] = sums["turns"] / episodes
        metrics |= {"tool/calls": sums["calls"] / episodes, "tool/callers": sums["callers"] / episodes}
        metrics["tool/error_rate"] = sums["call_errors"] / max(sums["calls"], 1)
    if "rollout" in seconds:
        metrics["rollout/tokens_per_s"] = sums["response_tokens"] / seconds["rollout"]
    return metrics


def policy_metrics(
    sums: dict[str, float], num_tokens: float, epochs: int, grad_norms: list[float]
) -> dict[str, float]:
    """policy/* and optim/grad_norm of a step from the reduced sums over its `epochs` passes through `num_tokens`.

    grad_norms: of each update; minibatches that train nothing have none.
    """
    passed, updates = num_tokens * epochs, max(len(grad_norms), 1)
    return {
        "policy/loss": sums["loss"] / updates,
        "policy/entropy": sums["entropy"] / passed,
        "policy/clip_fraction": sums["clipped"] / passed,
        "policy/approx_kl": sums["kl"] / passed,
        "optim/grad_norm": sum(grad_norms) / updates,
    }


def value_sums(values: Tensor, returns: Tensor) -> dict[str, float]:
    """What this rank adds to the metrics of a critic: values before the update, their targets, both [T]."""
    sums = {}
    for name, x in (("value", values), ("return", returns), ("error", returns - values)):
        sums |= {name: x.double().sum().item(), f"{name}_squared": x.double().square().sum().item()}
    return sums


def value_metrics(sums: dict[str, float], num_tokens: float) -> dict[str, float]:
    """value/* of a step from the reduced `value_sums`. Returns that are all equal have no variance to explain: NaN."""
    variance = {x: sums[f"{x}_squared"] / num_tokens - (sums[x] / num_tokens) ** 2 for x in ("error", "return")}
    explicable = variance["return"] > 1e-9
    return {
        "value/mean": sums["value"] / num_tokens,
        "value/return_mean": sums["return"] / num_tokens,
        "value/explained_variance": 1 - variance["error"] / variance["return"] if explicable else math.nan,
    }

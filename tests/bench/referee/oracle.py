"""Losses and gradients of the frozen batch by the papers' definitions, for reading.

A token costs what its objective says; the slope by its log-prob is written down by hand, case by
case. No autograd, but for the divergences.
"""

import math
import statistics

import torch
from batch import LONGEST, OBJECTIVES, SEQUENCES, Batch, Objective
from torch import Tensor


def group_advantages(batch: Batch, scaled: bool = True) -> list[float]:
    """(r - mean) / std of the group, unbiased (DeepSeekMath, arXiv 2402.03300 sec. 4.1.2); without
    `scaled` r - mean (Dr. GRPO, 2503.20783). 0 where all scores of a group are equal."""
    advantages = []
    for score, group in zip(batch.scores, batch.groups):
        members = [r for r, g in zip(batch.scores, batch.groups) if g == group]
        advantage = 0.0
        if len(set(members)) > 1:
            advantage = score - statistics.fmean(members)
            if scaled:
                advantage /= statistics.stdev(members)
        advantages.append(advantage)
    return advantages


def token_loss(objective: Objective, ratio: float, a: float, logprob: float) -> tuple[float, float]:
    """(loss of a token, its slope by log p) at advantage `a`.

    ppo: max(-A r, -A clip(r, 1 - low, 1 + high)) (arXiv 1707.06347 eq. 7, 2402.03300 eq. 3,
    2503.14476 eq. 8); where A < 0 at most -A dual_clip, if there is one (1912.09729 eq. 5). cispo:
    -A clip(r) log p, the clipped ratio a constant (2506.13585 eq. 4). gspo: as ppo, with the ratio
    of the sequence (2507.18071 eq. 5).
    """
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    if objective.loss == "cispo":
        weight = min(max(ratio, low), high)
        return -a * weight * logprob, -a * weight
    if a > 0 and ratio > high:
        return -a * high, 0.0
    if a < 0 and ratio < low:
        return -a * low, 0.0
    if a < 0 and ratio > objective.dual_clip > 0:
        return -a * objective.dual_clip, 0.0
    return -a * ratio, -a * ratio


def token_weight(objective: Objective, length: int, num_tokens: int) -> float:
    """Of a token of a sequence with `length` trained tokens, in the loss of the whole batch.

    tokens: 1 / all trained tokens (DAPO as verl's authors released it; eq. 8 has the tokens of one
    prompt's group). sequences: mean over sequences of their means (2402.03300 eq. 3). constant: sum
    over a constant length, mean over sequences (2503.20783).
    """
    return {
        "tokens": 1 / num_tokens,
        "sequences": 1 / (length * SEQUENCES),
        "constant": 1 / (LONGEST * SEQUENCES),
    }[objective.mean]


def definition(batch: Batch, name: str) -> tuple[float, Tensor]:
    """(loss, gradient by the table [S, 1 + L, H]) of one of OBJECTIVES."""
    objective = OBJECTIVES[name]
    advantages = group_advantages(batch, scaled=name != "Dr. GRPO")
    num_tokens = sum(map(sum, batch.masks))
    everything = list(range(SEQUENCES))
    logprobs = batch.logprobs(batch.table, everything).tolist()
    old_logprobs = batch.old_logprobs.tolist()
    total = 0.0
    slopes = torch.zeros_like(batch.old_logprobs)  # of the loss, by log p
    for s, mask in enumerate(batch.masks):
        places = [t for t, is_trained in enumerate(mask) if is_trained]
        logratios = {t: logprobs[s][t] - old_logprobs[s][t] for t in places}
        if objective.loss == "gspo":  # the geometric mean, whose slope by each log p is s / length
            logratios = dict.fromkeys(places, statistics.fmean(logratios.values()))
        weight = token_weight(objective, len(places), num_tokens)
        for t in places:
            ratio = math.exp(logratios[t])
            loss, slope = token_loss(objective, ratio, advantages[s], logprobs[s][t])
            total += weight * loss
            slopes[s, t] = weight * slope
    # d log p(y) / d hidden = head[y] - sum over words of p(word) head[word]
    ids, _, _ = batch.padded(everything)
    p = (batch.table @ batch.head.T).softmax(-1)
    gradient = torch.zeros_like(batch.table)
    gradient[:, :-1] = slopes[..., None] * (batch.head[ids] - (p @ batch.head)[:, :-1])
    return total, gradient


def divergence(batch: Batch, kind: str, beta: float) -> tuple[float, Tensor]:
    """(mean over trained tokens of the divergence of student and teacher, its gradient by the
    student's table): KL(p | q), KL(q | p) or GKD's JSD (arXiv 2306.13649 eq. 1) of student p and
    teacher q."""
    table = batch.table.clone().requires_grad_()
    p = (table @ batch.head.T).softmax(-1)
    q = (batch.teacher_table @ batch.head.T).softmax(-1)
    _, masks, _ = batch.padded(list(range(SEQUENCES)))

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum(-1)

    if kind == "reverse-kl":
        values = kl(p, q)
    elif kind == "forward-kl":
        values = kl(q, p)
    else:
        m = beta * q + (1 - beta) * p
        values = beta * kl(q, m) + (1 - beta) * kl(p, m)
    loss = (values[:, :-1] * masks).sum() / masks.sum()
    loss.backward()
    return loss.item(), table.grad


def compare(loss: float, gradient: Tensor, reference: tuple[float, Tensor]) -> dict[str, float]:
    """`difference`: |g - g*| / |g*|; `factor`: of g* in g; `angle` between both, in radians;
    `loss`: relative difference of the loss."""
    expected_loss, expected = reference
    factor = ((gradient * expected).sum() / expected.square().sum()).item()
    rest = (gradient - factor * expected).norm() / gradient.norm()
    return {
        "difference": ((gradient - expected).norm() / expected.norm()).item(),
        "factor": factor,
        "angle": math.asin(min(1.0, rest.item())),
        "loss": abs(loss / expected_loss - 1),
    }

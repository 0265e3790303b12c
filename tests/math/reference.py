"""The objectives by their definitions: case by case, in plain Python and float64, without autograd.

Slopes are written down by hand. Every term of the loss depends on the policy through a token's
log-prob and entropy alone, so its derivative by these two is all that a gradient needs. A changed
`policy_loss` is tested by what one token should cost; here a weight that is bounded above only:

    import grpo  # in a fork: import my_grpo as grpo
    from helpers import make_args
    from reference import check_policy_loss

    def truncated(ratio, advantage, logprob, args):
        weight = min(ratio, 1 + args.clip_high)  # a constant: it has no slope
        return -advantage * weight * logprob, -advantage * weight, weight != ratio

    def test_truncated_weights():
        args = make_args(grpo, objective="cispo", clip_low=1.0, clip_high=0.28)
        check_policy_loss(grpo, args, truncated)

Names: E episodes, N trained tokens; a ratio is the token's probability now, divided by that at the
time of the rollout. Equations: docs/grpo.md.
"""

import itertools
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import fields
from types import ModuleType

import pytest
import torch
from helpers import make_args
from torch.nn.utils.rnn import pad_sequence

import grpo
from common.types import Episode

# loss of a token, its derivative by the log-prob, is a clip active
Term = tuple[float, float, bool]


# --- of one token ---------------------------------------------------------------------------------


def policy_term(ratio: float, advantage: float, logprob: float | None, args) -> Term:
    """What --objective makes of a token; the others than cispo do not look at `logprob`.

    ppo: max(-A r, -A clip(r, 1 - low, 1 + high)) (arXiv 1707.06347 eq. 7), with a dual clip above 0
    at most -A dual_clip where A < 0 (1912.09729 eq. 5). gspo: the same without a dual clip, r being
    the ratio of the sequence (2507.18071 eq. 14). cispo: -A clip(r) log p, the clipped ratio a
    constant (2506.13585 eq. 4).
    """
    objective, dual_clip = getattr(args, "objective", "ppo"), getattr(args, "dual_clip", 0.0)
    low, high = 1 - args.clip_low, 1 + args.clip_high
    if objective == "cispo":
        weight = low if ratio < low else high if ratio > high else ratio
        return -advantage * weight * logprob, -advantage * weight, not low <= ratio <= high
    for bound, is_active in (
        (high, advantage > 0 and ratio > high),
        (low, advantage < 0 and ratio < low),
        (dual_clip, objective == "ppo" and advantage < 0 and ratio > dual_clip > 0),
    ):
        if is_active:
            return -advantage * bound, 0.0, True
    return -advantage * ratio, -advantage * ratio, False


def correction_term(
    correction: str, w: float, w_of_sequence: float, low: float, high: float
) -> float:
    """Constant weight for having been sampled by the engine; w: trainer's / engine's probability of
    the token, and its geometric mean over the sequence.

    truncate: min(w, high) (TIS). mask: w if low <= w <= high, else 0 (IcePop, arXiv 2510.18855).
    sequence: 1 if low <= the mean <= high, else 0.
    """
    if correction == "none":
        return 1.0
    if correction == "truncate":
        return min(w, high)
    if correction == "mask":
        return w if low <= w <= high else 0.0
    return 1.0 if low <= w_of_sequence <= high else 0.0


def kl_term(estimator: str, d: float, ratio: float) -> tuple[float, float]:
    """(estimate of the KL to the reference, its derivative by the log-prob); d = log policy - log
    reference.

    k1, k2, k3: joschu.net/blog/kl-approx. k3-is: arXiv 2512.02556 sec. 3.1.
    """
    k3, slope = math.exp(-d) - 1 + d, 1 - math.exp(-d)
    return {
        "none": (0.0, 0.0),
        "k1": (d, 1.0),
        "k2": (d**2 / 2, d),
        "k3": (k3, slope),
        "k3-is": (ratio * k3, ratio * k3 + ratio * slope),
    }[estimator]


def token_terms(
    columns: dict[str, list], args, term: Callable = policy_term, of_sequence: bool | None = None
) -> list[Term]:
    """Each token's loss with correction, KL and entropy bonus; its slope by the log-prob; is a clip
    active. The slope by the entropy is -entropy_coef.

    columns: lists of N: logprobs, entropy, episode_of_token, advantages, and old_, rollout_,
    ref_logprobs. term: what stands for `policy_term`. of_sequence: it gets the sequence's ratio; by
    default as args.objective is gspo.
    """
    if of_sequence is None:
        of_sequence = getattr(args, "objective", "ppo") == "gspo"
    tokens = [dict(zip(columns, values)) for values in zip(*columns.values(), strict=True)]
    sequences: dict[int, list[dict]] = {}
    for token in tokens:
        sequences.setdefault(token["episode_of_token"], []).append(token)

    terms = []
    for token in tokens:
        sequence = sequences[token["episode_of_token"]]
        ratio = math.exp(token["logprobs"] - token["old_logprobs"])
        s = math.exp(statistics.fmean(t["logprobs"] - t["old_logprobs"] for t in sequence))
        w = math.exp(token["old_logprobs"] - token["rollout_logprobs"])
        w_of_sequence = math.exp(
            statistics.fmean(t["old_logprobs"] - t["rollout_logprobs"] for t in sequence)
        )
        value, slope, is_clipped = term(
            s if of_sequence else ratio, token["advantages"], token["logprobs"], args
        )
        c = correction_term(args.correction, w, w_of_sequence, *args.correction_range)
        estimator = args.kl_estimator if args.kl_loss_coef else "none"
        kl, kl_slope = kl_term(estimator, token["logprobs"] - token["ref_logprobs"], ratio)
        value = c * value + args.kl_loss_coef * kl - args.entropy_coef * token["entropy"]
        terms.append((value, c * slope + args.kl_loss_coef * kl_slope, is_clipped))
    return terms


# --- of a batch -----------------------------------------------------------------------------------


def group_advantages(scores: list[float], groups: list[int], advantage: str) -> list[float]:
    """What --advantage makes of scores [E] of all ranks, whose groups are numbered [E].

    group-mean: r - mean (Dr. GRPO, arXiv 2503.20783). group-std: that by the group's deviation
    (DeepSeekMath, 2402.03300 §4.1.2). rloo: r - mean of the others (2402.14740). batch-std: r -
    mean by the deviation over all episodes (REINFORCE++, 2501.03262).
    """
    advantages = []
    for i, (score, group) in enumerate(zip(scores, groups, strict=True)):
        members = [s for s, g in zip(scores, groups) if g == group]
        others = [s for j, s in enumerate(scores) if groups[j] == group and j != i]
        if advantage == "rloo":
            value = score - statistics.fmean(others) if others else 0.0
        else:
            value = score - statistics.fmean(members)
        if advantage == "group-std":
            value /= (statistics.stdev(members) if others else 0.0) + 1e-6
        advantages.append(value)
    if advantage == "batch-std":
        deviation = statistics.stdev(advantages) + 1e-6
        advantages = [value / deviation for value in advantages]
    return advantages


def punishment(length: int, max_response_tokens: int, overlong_buffer: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476 eq. 13) of a response of this length."""
    free = max_response_tokens - overlong_buffer
    if length <= free:
        return 0.0
    return (free - length) / overlong_buffer if length <= max_response_tokens else -1.0


def token_weight(
    reduction: str, length: int, num_tokens: float, num_sequences: float, max_response_tokens: int
) -> float:
    """Weight of a token of a sequence with `length` trained tokens in the loss; the counts are of
    the whole step.

    dapo: mean over tokens (arXiv 2503.14476 eq. 8). grpo: mean over sequences of their means
    (2402.03300 eq. 3). dr_grpo: sum by a constant length (2503.20783).
    """
    return {
        "dapo": 1 / num_tokens,
        "grpo": 1 / (length * num_sequences),
        "dr_grpo": 1 / (max_response_tokens * num_sequences),
    }[reduction]


def dense_pass(
    policy, episodes: list[Episode], temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log p, entropy) [N] of the trained tokens, differentiable: transformers' own forward of
    whole texts, padded on the right."""
    ids = pad_sequence(
        [torch.tensor(e.prompt_ids + e.response_ids) for e in episodes], batch_first=True
    )
    policy.model.set_attn_implementation("sdpa")
    logp = torch.log_softmax(policy.model(ids).logits / temperature, -1)
    policy.model.set_attn_implementation("shared_prompts")
    entropy = -(logp.exp() * logp).sum(-1)
    found = []
    for i, episode in enumerate(episodes):
        for t, is_trained in enumerate(episode.loss_mask, start=len(episode.prompt_ids)):
            if is_trained:
                found.append((logp[i, t - 1, ids[i, t]], entropy[i, t - 1]))
    logprobs, entropies = zip(*found)
    return torch.stack(logprobs), torch.stack(entropies)


# --- a script beside it ---------------------------------------------------------------------------

LOGRATIOS = [-3.0, -0.5, -0.23, -0.21, -0.1, 0.0, 0.1, 0.24, 0.26, 0.5, 1.05, 1.15, 3.0]
ADVANTAGES = [-2.5, -0.3, 0.0, 1.0]
GRID = list(itertools.product(LOGRATIOS, ADVANTAGES))


def surrogate(
    objective: str,
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    episodes: torch.Tensor | None,
    clips: tuple[float, float, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss [N], is a clip active [N]) of grpo.py's `policy_loss`: the objective and nothing
    besides. clips: low, high, dual."""
    nothing = torch.full_like(advantages, math.nan)
    tokens = grpo.Tokens(episodes, nothing, nothing, old_logprobs, nothing, advantages)
    args = objective_args(objective, *clips)
    return grpo.policy_loss(logprobs, torch.zeros_like(logprobs), tokens, args)


def objective_args(objective: str, clip_low: float, clip_high: float, dual_clip: float):
    """Args of grpo.py, for `policy_term`."""
    clips = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    return make_args(grpo, objective=objective, **clips)


def made_up_columns(seed: int = 0) -> dict[str, list]:
    """Sequences of one to three tokens for each point of GRID, which has the mean of their
    log-ratios; tokens in any order. See `token_terms`."""
    rng = random.Random(seed)
    tokens = []
    for number, (logratio, advantage) in enumerate(GRID):
        noise = [rng.gauss(0, 0.1) for _ in range(1 + number % 3)]
        for deviation in noise:
            logprob = -5 - rng.random()
            old = logprob - logratio - (deviation - statistics.fmean(noise))
            others = [old + 0.5 * rng.gauss(0, 1), logprob + 0.5 * rng.gauss(0, 1)]
            tokens.append((logprob, rng.random(), number, advantage, old, *others))
    rng.shuffle(tokens)
    names = ["logprobs", "entropy", "episode_of_token", "advantages"]
    names += ["old_logprobs", "rollout_logprobs", "ref_logprobs"]
    return dict(zip(names, map(list, zip(*tokens))))


def check_policy_loss(
    script: ModuleType, args, term: Callable = policy_term, of_sequence: bool | None = None
) -> None:
    """`policy_loss` of a script is what the cases say at every token of `made_up_columns`: the
    loss, its slopes by log-prob and entropy, and which clips are active. The arguments are those of
    `token_terms`."""
    columns = made_up_columns()
    values, slopes, clips = zip(*token_terms(columns, args, term, of_sequence))
    dtypes = {"episode_of_token": torch.int64}
    tensors = {
        name: torch.tensor(column, dtype=dtypes.get(name, torch.float64))
        for name, column in columns.items()
    }
    logprobs, entropy = tensors["logprobs"].requires_grad_(), tensors["entropy"].requires_grad_()
    nothing = torch.full_like(tensors["advantages"], math.nan)
    known = {field.name: tensors.get(field.name, nothing) for field in fields(script.Tokens)}
    loss, clipped = script.policy_loss(logprobs, entropy, script.Tokens(**known), args)
    by_logprob, by_entropy = torch.autograd.grad(
        loss.sum(), [logprobs, entropy], materialize_grads=True
    )
    for i, number in enumerate(columns["episode_of_token"]):
        logratio, advantage = GRID[number]
        point = f"a sequence of log-ratio {logratio}, advantage {advantage}"
        assert loss[i].item() == pytest.approx(values[i], rel=1e-10, abs=1e-12), point
        assert by_logprob[i].item() == pytest.approx(slopes[i], rel=1e-10, abs=1e-12), point
        assert by_entropy[i].item() == -args.entropy_coef, point
        assert bool(clipped[i]) == clips[i], point

"""Objectives, corrections, KL estimates and `backward`, in float64 against definitions by cases and
a dense reference.

The definitions are in reference.py. Its slopes by log p and entropy are written down by hand; only
log p and entropy themselves are differentiated.
"""

import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch
from episodes import random_episodes
from helpers import make_args, random_policy, relative_l2
from reference import (
    GRID,
    correction_term,
    dense_pass,
    group_advantages,
    kl_term,
    objective_args,
    policy_term,
    punishment,
    surrogate,
    token_terms,
    token_weight,
)

import curiosity_rl
import grpo
import ppo
from common.distributed import World
from common.metrics import Means
from common.packing import Layout, Minibatch, TokenIndex, build_micro_batch, pack
from common.types import Episode

OBJECTIVES = ["ppo", "gspo", "cispo"]
REDUCTIONS = ["dapo", "grpo", "dr_grpo"]
CORRECTIONS = ["none", "truncate", "mask", "sequence"]
CLIP_LOW, CLIP_HIGH, DUAL_CLIP = 0.2, 0.28, 3.0
CLIP = (CLIP_LOW, CLIP_HIGH, DUAL_CLIP)


def double(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gradient(loss, *inputs) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss.sum(), inputs, retain_graph=True))


# --- group_advantages -----------------------------------------------------------------------------


def ragged_scores(seed):
    """Groups of 2 to 6 and a group of one, members apart from each other."""
    rng = random.Random(seed)
    episodes = [(rng.gauss(0, 1), 3 * g) for g in range(6) for _ in range(g + 1)]
    rng.shuffle(episodes)
    return tuple(map(list, zip(*episodes)))


def advantages_of(scores, groups, advantage, dtype=torch.float64):
    return grpo.group_advantages(
        torch.tensor(scores, dtype=dtype), torch.tensor(groups, dtype=torch.int64), advantage
    )


@pytest.mark.parametrize("advantage", ["rloo", "batch-std"])
def test_other_baselines_by_their_definitions(advantage):
    scores, groups = ragged_scores(0)
    expected = double(group_advantages(scores, groups, advantage))
    assert torch.allclose(
        advantages_of(scores, groups, advantage), expected, rtol=1e-12, atol=1e-14
    )


def test_batch_std_counts_the_episodes_of_all_ranks(monkeypatch):
    """Two ranks, one prompt in two each; `all_reduce` is played: asked once for its share, then
    given the sum."""
    scores, groups = ragged_scores(2)
    expected = group_advantages(scores, groups, "batch-std")
    episodes, shares = list(zip(scores, groups, expected)), []
    ranks = [[episode for episode in episodes if episode[1] % 2 == parity] for parity in (0, 1)]
    monkeypatch.setattr(grpo, "all_reduce", lambda values: shares.append(values) or values)
    for rank in ranks:
        scores, groups, _ = zip(*rank)
        advantages_of(scores, groups, "batch-std")
    total = [sum(column) for column in zip(*shares)]
    monkeypatch.setattr(grpo, "all_reduce", lambda values: total)
    for rank in ranks:
        scores, groups, expected = zip(*rank)
        assert torch.allclose(
            advantages_of(scores, groups, "batch-std"), double(expected), rtol=1e-12, atol=1e-14
        )


@pytest.mark.parametrize("advantage", ["rloo", "batch-std"])
def test_nothing_to_compare_is_exactly_zero(advantage):
    for score in (0.1, 1 / 3, -0.7):
        assert not advantages_of([score] * 7 + [0.3], [0] * 7 + [4], advantage, torch.float32).any()
    assert advantages_of([5.0], [0], advantage).tolist() == [0.0]
    assert advantages_of([], [], advantage).shape == (0,)


# --- sequence_mean --------------------------------------------------------------------------------


def test_sequence_mean_of_interleaved_tokens():
    """And its gradient: each token hands out 1 / length to all tokens of its own sequence."""
    episodes = [7, 2, 7, 7, 0, 2]
    values = double([1.0, 10, 2, 6, -4, 30]).requires_grad_()
    means = grpo.sequence_mean(values, torch.tensor(episodes))
    assert means.tolist() == [3.0, 20.0, 3.0, 3.0, -4.0, 20.0]
    (slope,) = gradient(means[2:], values)  # of the means of 7, 7, 0, 2
    assert torch.allclose(slope, double([2 / 3, 1 / 2, 2 / 3, 2 / 3, 1.0, 1 / 2]), rtol=1e-15)
    assert grpo.sequence_mean(values[:0], torch.tensor([], dtype=torch.int64)).shape == (0,)


# --- surrogate ------------------------------------------------------------------------------------


def test_gspo_is_the_objective_of_whole_sequences():
    """mean over sequences of max(-A s, -A clip(s)), s the geometric mean of the ratios,
    differentiated by autograd."""
    generator = torch.Generator().manual_seed(0)
    episodes = torch.tensor([i for i in range(len(GRID)) for _ in range(1 + i % 5)])
    episodes = episodes[torch.randperm(len(episodes), generator=generator)]
    sequences = [episodes == i for i in range(len(GRID))]
    noise = torch.randn(len(episodes), generator=generator, dtype=torch.float64)
    logratios, advantages, lengths = (torch.zeros_like(noise) for _ in range(3))
    for members, (logratio, advantage) in zip(sequences, GRID):
        logratios[members] = logratio + noise[members] - noise[members].mean()
        advantages[members], lengths[members] = advantage, float(members.sum())
    old = -torch.rand(len(episodes), generator=generator, dtype=torch.float64) - 5
    logprobs = (old + logratios).requires_grad_()

    loss, clipped = surrogate("gspo", logprobs, old, advantages, episodes, CLIP)
    weighted = (loss * grpo.token_weights("grpo", lengths, 0.0, float(len(GRID)), 0)).sum()
    definition = 0.0
    for members, (_, advantage) in zip(sequences, GRID):
        s = (logprobs[members].sum() - old[members].sum()).div(members.sum()).exp()
        definition = definition + torch.maximum(
            -advantage * s, -advantage * s.clamp(0.8, 1.28)
        ) / len(GRID)
    assert torch.allclose(weighted, definition, rtol=1e-12)
    assert relative_l2(gradient(weighted, logprobs), gradient(definition, logprobs)) < 1e-12
    for members, (logratio, advantage) in zip(sequences, GRID):
        value, _, active = policy_term(
            math.exp(logratio), advantage, None, objective_args("gspo", *CLIP)
        )
        assert torch.allclose(loss[members], double(value), rtol=1e-12), (logratio, advantage)
        assert (clipped[members] == active).all(), (logratio, advantage)


def test_cispo_is_a_constant_weight_on_the_log_prob():
    logratios, advantages = map(double, zip(*GRID))
    old = -torch.arange(len(GRID), dtype=torch.float64) / 16 - 4
    logprobs = (old + logratios).requires_grad_()
    loss, clipped = surrogate("cispo", logprobs, old, advantages, None, CLIP)
    (slope,) = gradient(loss, logprobs)
    for i, (logratio, advantage) in enumerate(GRID):
        expected = policy_term(
            math.exp(logratio), advantage, logprobs[i].item(), objective_args("cispo", *CLIP)
        )
        assert (loss[i].item(), slope[i].item()) == pytest.approx(expected[:2], rel=1e-12), (
            logratio,
            advantage,
        )
        assert bool(clipped[i]) == expected[2], (logratio, advantage)
    assert slope[advantages != 0].all(), "no token loses its gradient"
    # moving the old log-probs along holds the ratio, and with it the weight
    with torch.no_grad():
        ahead, behind = (
            surrogate("cispo", logprobs + h, old + h, advantages, None, CLIP)[0]
            for h in (1e-4, -1e-4)
        )
    assert torch.allclose((ahead - behind) / 2e-4, slope, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_ratio_of_one_gives_the_plain_policy_gradient(objective):
    logprobs = (-torch.rand(50, dtype=torch.float64)).requires_grad_()
    advantages, episodes = torch.randn(50, dtype=torch.float64), torch.arange(50) // 7
    loss, clipped = surrogate(objective, logprobs, logprobs.detach(), advantages, episodes, CLIP)
    (slope,) = gradient(loss, logprobs)
    assert torch.equal(slope, -advantages) and not clipped.any()


# --- engine_correction ----------------------------------------------------------------------------

# Log-ratios of three sequences: tokens outside the bounds that cancel; one token that takes its
# sequence along; small.
SEQUENCES = [[1.5, -1.5, 0.1, -0.1], [0.1, 0.0, 4.0], [-0.3, 0.3]]


@pytest.mark.parametrize("correction", CORRECTIONS[1:])
@pytest.mark.parametrize("low, high", [(0.5, 2.0), (0.0, 2.0), (0.9, 5.0), (0.5, 1.05), (0.0, 1e3)])
def test_engine_correction_equals_the_definition(correction, low, high):
    weights = []
    for logratios in SEQUENCES:
        w_of_sequence = math.prod(math.exp(x) for x in logratios) ** (1 / len(logratios))
        # the product above is not exactly 1 where it should be; no bound is within 1e-3 of it
        weights += [
            correction_term(correction, math.exp(x), w_of_sequence, low, high) for x in logratios
        ]
    episodes = torch.tensor([i for i, logratios in enumerate(SEQUENCES) for _ in logratios])
    logratios = double(list(itertools.chain(*SEQUENCES)))
    rollout = -torch.arange(len(logratios), dtype=torch.float64)
    for order in (torch.arange(len(logratios)), torch.arange(len(logratios)).flip(0)):
        inputs = [(rollout + logratios)[order], rollout[order], episodes[order]]
        inputs[0].requires_grad_()
        ours = grpo.engine_correction(correction, *inputs, low, high)
        assert torch.allclose(ours, double(weights)[order], rtol=1e-12, atol=0)
        assert not ours.requires_grad, "a weight, not a part of what is differentiated"


def test_correction_bounds_are_inclusive():
    old, rollout, episodes = (
        double([-1.0, -1.001, -0.999]),
        double([-1.0] * 3),
        torch.tensor([0, 1, 2]),
    )
    for correction, low, high, expected in (
        ("mask", 1.0, 1.0, [1, 0, 0]),
        ("sequence", 1.0, 1.0, [1, 0, 0]),
        ("sequence", 1.0, 2.0, [1, 0, 1]),
        ("sequence", 0.5, 1.0, [1, 1, 0]),
    ):
        assert (
            grpo.engine_correction(correction, old, rollout, episodes, low, high).tolist()
            == expected
        )
    # its low bound has no meaning
    truncated = grpo.engine_correction("truncate", old, rollout, episodes, 9.0, 1.0)
    assert truncated.tolist() == pytest.approx([1, math.exp(-0.001), 1], rel=1e-12)


def test_far_log_ratios_are_finite():
    """The engine says log p = -inf where it rounded p to 0."""
    old, rollout, episodes = double([-1.0, -90.0]), double([-math.inf, -1.0]), torch.tensor([0, 1])
    for correction in ("truncate", "mask"):
        ours = grpo.engine_correction(correction, old, rollout, episodes, 0.0, 1e12)
        assert ours.tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-12)


# --- kl_estimate ----------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3-is"])
def test_kl_estimates_by_definition(estimator):
    points = list(itertools.product([-5.0, -3.0, -0.2, 0.0, 1e-3, 0.7, 9.0], [-2.0, 0.0, 0.4]))
    d, logratio = map(double, zip(*points))
    logprobs = (-torch.arange(len(points), dtype=torch.float64) - 20).requires_grad_()
    ours = grpo.kl_estimate(
        logprobs, logprobs.detach() - d, logprobs.detach() - logratio, estimator
    )
    expected = [kl_term(estimator, d, math.exp(logratio)) for d, logratio in points]
    assert torch.allclose(ours, double(expected)[:, 0], rtol=1e-10, atol=1e-12)
    assert torch.allclose(*gradient(ours, logprobs), double(expected)[:, 1], rtol=1e-10, atol=1e-12)


def test_far_kl_estimates_are_clamped():
    """d and the log-ratio count as 20 at most: no estimate overflows float32, and what is clamped
    has no gradient."""
    logprobs = double([-40.0, -80.0]).requires_grad_()
    ref, old = double([-70.0, -50.0]), double([-70.0, -80.0])
    k3 = [math.exp(-20) + 19, math.exp(20) - 21]
    expected = {"k1": [20, -20], "k2": [200, 200], "k3": k3, "k3-is": [k3[0] * math.exp(20), k3[1]]}
    for estimator, values in expected.items():
        ours = grpo.kl_estimate(logprobs, ref, old, estimator)
        assert ours.tolist() == pytest.approx(values, rel=1e-12), estimator
        # the ratio of the second is 1, and is differentiated
        slope = [0.0, k3[1] if estimator == "k3-is" else 0.0]
        assert gradient(ours, logprobs)[0].tolist() == pytest.approx(slope, rel=1e-12), estimator


class Categorical:
    """One state of six actions: expectations are sums over the actions. Samples come from `old`."""

    def __init__(self, on_policy: bool):
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(3, 6, generator=generator, dtype=torch.float64)
        self.logits = logits[0].requires_grad_()
        self.logp, self.ref, old = torch.log_softmax(
            torch.stack([self.logits, logits[1], logits[2]]), -1
        )
        self.old = self.logp.detach() if on_policy else old.detach()
        self.ref = self.ref.detach()
        self.kl = (self.logp.exp() * (self.logp - self.ref)).sum()

    def estimate(self, estimator: str) -> torch.Tensor:
        """Its expectation; differentiated, that of its gradient."""
        return (self.old.exp() * grpo.kl_estimate(self.logp, self.ref, self.old, estimator)).sum()

    def gradient_error(self, loss: torch.Tensor) -> float:
        return relative_l2(gradient(loss, self.logits), gradient(self.kl, self.logits))


@pytest.mark.parametrize("on_policy, unbiased", [(True, {"k1", "k3", "k3-is"}), (False, {"k3-is"})])
def test_expectation_of_the_kl_estimates(on_policy, unbiased):
    state = Categorical(on_policy)
    for estimator in ("k1", "k2", "k3", "k3-is"):
        error = abs(state.estimate(estimator) / state.kl - 1).item()
        assert error < 1e-12 if estimator in unbiased else error > 0.01, estimator


@pytest.mark.parametrize("on_policy, unbiased", [(True, {"k2", "k3-is"}), (False, {"k3-is"})])
def test_expectation_of_the_gradients_of_the_kl_estimates(on_policy, unbiased):
    """Why --kl-estimator has k3-is: a right value does not make a right gradient."""
    state = Categorical(on_policy)
    for estimator in ("k1", "k2", "k3", "k3-is"):
        error = state.gradient_error(state.estimate(estimator))
        assert error < 1e-12 if estimator in unbiased else error > 0.05, estimator


def test_k1_has_no_gradient_as_a_loss_and_the_right_one_as_a_reward():
    state = Categorical(on_policy=True)
    assert gradient(state.estimate("k1"), state.logits)[0].abs().max() < 1e-15
    charge = grpo.kl_estimate(state.logp, state.ref, state.old, "k1").detach()
    assert state.gradient_error(state.old.exp() * charge * state.logp) < 1e-12


def test_kl_to_itself_is_exactly_zero():
    logprobs = (-torch.rand(20, dtype=torch.float64)).requires_grad_()
    for estimator in ("k1", "k2", "k3", "k3-is"):
        ours = grpo.kl_estimate(logprobs, logprobs.detach(), logprobs.detach() - 0.5, estimator)
        assert not ours.any(), estimator
        assert estimator == "k1" or not gradient(ours, logprobs)[0].any(), estimator


# --- shaped_scores --------------------------------------------------------------------------------


@pytest.mark.parametrize("limit, buffer", [(20, 8), (20, 1), (20, 19), (20, 7)])
def test_soft_overlong_punishment(limit, buffer):
    """At every length, one above the limit included; observations count as the response does."""
    lengths = range(limit + 2)
    episodes = [
        Episode(0, n, [1], [2] * n, [n % 2] * n, [0.0] * n, "stop", {"score": n / 4})
        for n in lengths
    ]
    expected = [n / 4 + punishment(n, limit, buffer) for n in lengths]
    assert grpo.shaped_scores(episodes, limit, buffer).tolist() == pytest.approx(
        expected, rel=1e-6, abs=1e-6
    )
    assert grpo.shaped_scores(episodes, limit, 0).tolist() == [n / 4 for n in lengths]


# --- what is known of each token ------------------------------------------------------------------


@pytest.mark.parametrize("script", [grpo, ppo, curiosity_rl], ids=lambda script: script.__name__)
def test_a_token_knows_its_episode_and_the_engine_before_the_update(script):
    """Observations have no place, and no part in the length; what is not computed yet is no
    number."""
    episodes = random_episodes(8)
    tokens_of = [[lp for lp, m in zip(e.logprobs, e.loss_mask) if m] for e in episodes]
    trained = [(i, len(mine), lp) for i, mine in enumerate(tokens_of) for lp in mine]
    tokens = vars(script.Tokens.of(episodes, TokenIndex(episodes), torch.device("cpu")))
    columns = [tokens.pop(name) for name in ("episode_of_token", "lengths", "rollout_logprobs")]
    assert [x.tolist() for x in columns] == [
        pytest.approx(column) for column in zip(*trained, strict=True)
    ]
    assert all(len(x) == len(trained) and x.isnan().all() for x in tokens.values())


# --- backward -------------------------------------------------------------------------------------

COMMON = {
    "temperature": 0.8,
    "clip_low": CLIP_LOW,
    "clip_high": CLIP_HIGH,
    "dual_clip": DUAL_CLIP,
    "correction_range": (0.8, 1.3),
    "max_response_tokens": 20,
}
KL_COEF = 0.3
COUNTS = [150.0, 17.0]  # tokens and sequences of all ranks: more than this one has
ALONE = World(0, 1, 0, torch.device("cpu"))


def arguments(estimator="none", **options) -> grpo.Args:
    kl = {} if estimator == "none" else {"kl_loss_coef": KL_COEF, "kl_estimator": estimator}
    return make_args(grpo, **COMMON, **kl, **options)


@pytest.fixture(scope="module")
def case(tiny_config):
    """A policy, ragged episodes with observations, and log-probs of old, reference and engine
    around its own."""
    policy, episodes = random_policy(tiny_config), random_episodes(8)
    logprobs, entropy = dense_pass(policy, episodes, COMMON["temperature"])
    noise = torch.randn(
        3, len(logprobs), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    old = logprobs.detach() + 0.8 * noise[0]
    rollout, ref = old + 0.5 * noise[1], logprobs.detach() + 0.5 * noise[2]
    advantages = torch.randn(
        len(episodes), generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    return SimpleNamespace(
        policy=policy,
        episodes=episodes,
        advantages=advantages,  # [E]; all others [T]
        logprobs=logprobs,
        entropy=entropy,
        old=old,
        ref=ref,
        rollout=rollout,
    )


def dense_reference(case, args, old):
    """(gradient, [loss, entropy, clipped, KL]) of all tokens by their definitions."""
    index = TokenIndex(case.episodes)
    owner = index.episode_of_token
    columns = {"logprobs": case.logprobs, "entropy": case.entropy, "episode_of_token": owner}
    columns |= {"advantages": case.advantages[owner], "old_logprobs": old}
    columns |= {"rollout_logprobs": case.rollout, "ref_logprobs": case.ref}
    columns = {name: column.tolist() for name, column in columns.items()}
    values, slopes, clips = zip(*token_terms(columns, args))
    weights = [
        token_weight(args.reduction, length, *COUNTS, COMMON["max_response_tokens"])
        for length in index.lengths[owner].tolist()
    ]
    loss = sum(weight * value for weight, value in zip(weights, values))
    logratios = [now - then for now, then in zip(columns["logprobs"], columns["old_logprobs"])]
    kl = sum(math.exp(logratio) - 1 - logratio for logratio in logratios)
    slopes = [weight * slope for weight, slope in zip(weights, slopes)]
    scalar = double(slopes) @ case.logprobs - args.entropy_coef * (double(weights) @ case.entropy)
    sums = [loss, sum(columns["entropy"]), sum(clips), kl]
    return gradient(scalar, *case.policy.parameters()), sums


def sums_of(means: Means, world: World = ALONE) -> list[float]:
    """[loss, entropy, clipped, KL] of this rank, summed over its tokens. The loss is one value per
    rank, their mean that of all: hence its factor."""
    sums = [
        float(means.sums[f"policy/{name}"])
        for name in ("loss", "entropy", "clip_fraction", "approx_kl")
    ]
    return [sums[0] / world.size, *sums[1:]]


def ours(case, args, world=ALONE, on_policy=False, budget=90, **options):
    """(gradient, sums, old log-probs afterwards) of `backward`; on-policy it is to fill in the old
    log-probs."""
    index = TokenIndex(case.episodes)
    owner = index.episode_of_token
    old = torch.full_like(case.old, math.nan) if on_policy else case.old.clone()
    tokens = grpo.Tokens(
        owner, index.lengths[owner].double(), case.rollout, old, case.ref, case.advantages[owner]
    )
    batches = pack(case.episodes, range(len(case.episodes)), index, budget=budget)
    assert len(batches) > 1
    minibatch = Minibatch([], *COUNTS, batches)
    case.policy.zero_grad()
    means = grpo.backward(
        case.policy, minibatch, tokens, args, world, store_old_logprobs=on_policy, **options
    )
    counts = dict.fromkeys(
        ("policy/entropy", "policy/clip_fraction", "policy/approx_kl"), float(len(index))
    )
    assert means.counts == counts | {"policy/loss": 1} and means.totals == {}
    return (
        [p.grad.clone() for p in case.policy.parameters()],
        sums_of(means, world),
        tokens.old_logprobs,
    )


def assert_equal(got, expected, name):
    """Gradients to 1e-10; the sums, for the log, are kept in float32."""
    assert relative_l2(got[0], expected[0]) < 1e-10, name
    assert got[1] == pytest.approx(expected[1], rel=1e-5, abs=1e-5), name


def test_the_case_reaches_every_branch(case):
    """Otherwise the comparison below would not see a branch that is missing."""
    for objective in OBJECTIVES:
        assert (
            5
            < dense_reference(case, arguments(objective=objective), case.old)[1][2]
            < len(case.old) - 5
        ), objective
    ratio = (case.logprobs - case.old).detach().exp()
    token_advantages = case.advantages[TokenIndex(case.episodes).episode_of_token]
    assert ((ratio > DUAL_CLIP) & (token_advantages < 0)).any(), "dual clip"
    episodes = TokenIndex(case.episodes).episode_of_token
    for correction in CORRECTIONS[1:]:
        weights = grpo.engine_correction(correction, case.old, case.rollout, episodes, 0.8, 1.3)
        assert weights.unique().numel() > 1, correction
        assert (correction == "truncate") or 5 < (weights == 0).sum() < len(weights) - 5, correction
    masks = ["".join(map(str, e.loss_mask)) for e in case.episodes]
    assert any("101" in mask or "1001" in mask for mask in masks), "observations in the middle"
    assert any("1" not in mask for mask in masks), "an episode that trains nothing"


def combinations() -> list:
    """Of objective, reduction and correction: by default a third of all, in which any two settings
    meet."""
    cases = []
    for i, objective in enumerate(OBJECTIVES):
        for j, reduction in enumerate(REDUCTIONS):
            for k, correction in enumerate(CORRECTIONS):
                marks = () if (i + j + k) % 3 == 0 else pytest.mark.slow
                cases.append(pytest.param(objective, reduction, correction, marks=marks))
    return cases


@pytest.mark.parametrize("objective, reduction, correction", combinations())
def test_backward_equals_the_dense_reference(case, objective, reduction, correction):
    for estimator, entropy_coef in (
        ("none", 0.0),
        ("none", 0.1),
        ("k2", 0.1),
        ("k3", 0.0),
        ("k3-is", 0.1),
    ):
        options = {"objective": objective, "reduction": reduction, "correction": correction}
        args = arguments(estimator, entropy_coef=entropy_coef, **options)
        assert_equal(
            ours(case, args), dense_reference(case, args, case.old), (estimator, entropy_coef)
        )


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_ppos_loss_is_the_ppo_objectives(case, correction):
    """Its `policy_loss` is written without the other objectives."""
    index = TokenIndex(case.episodes)
    owner = index.episode_of_token
    known = (
        owner,
        index.lengths[owner].double(),
        case.rollout,
        case.old,
        case.ref,
        case.advantages[owner],
    )
    logprobs, entropy = (x.detach().clone().requires_grad_() for x in (case.logprobs, case.entropy))
    for estimator, entropy_coef in (("none", 0.0), ("k2", 0.1), ("k3", 0.0), ("k3-is", 0.1)):
        results = []
        for script, tokens in (
            (grpo, grpo.Tokens(*known)),
            (ppo, ppo.Tokens(*known, case.old, case.old)),
        ):
            kl = {} if estimator == "none" else {"kl_loss_coef": KL_COEF, "kl_estimator": estimator}
            args = make_args(
                script, **COMMON, **kl, entropy_coef=entropy_coef, correction=correction
            )
            loss, clipped = script.policy_loss(logprobs, entropy, tokens, args)
            slopes = torch.autograd.grad(loss.sum(), [logprobs, entropy], materialize_grads=True)
            results.append([loss, clipped, *slopes])
        assert all(map(torch.equal, *results)), (estimator, entropy_coef)
        assert results[0][1].any() and not results[0][1].all()


def test_a_policy_that_has_moved_far_has_finite_metrics(case):
    """e^1000 is above all floats; a NaN or an infinity in a log says nothing."""
    far = SimpleNamespace(**vars(case) | {"old": case.old - 1000})
    assert all(map(math.isfinite, ours(far, arguments())[1]))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_curiositys_gradient_is_the_ppo_objectives_without_dual_clip(case, reduction):
    """Its `backward` is written without corrections, entropy and KL."""
    index = TokenIndex(case.episodes)
    owner = index.episode_of_token
    common = {
        name: COMMON[name]
        for name in ("temperature", "clip_low", "clip_high", "max_response_tokens")
    }
    args = make_args(curiosity_rl, **common, reduction=reduction)
    world = World(0, 3, 0, torch.device("cpu"))
    for on_policy in (False, True):
        plain = arguments(reduction=reduction)
        plain.dual_clip = 0.0
        expected, sums, old_logprobs = ours(case, plain, world, on_policy, scale=8.0)
        old = torch.full_like(case.old, math.nan) if on_policy else case.old.clone()
        lengths = index.lengths[owner].double()
        tokens = curiosity_rl.Tokens(owner, lengths, case.rollout, old, case.advantages[owner])
        minibatch = Minibatch(
            [], *COUNTS, pack(case.episodes, range(len(case.episodes)), index, budget=90)
        )
        case.policy.zero_grad()
        options = {"store_old_logprobs": on_policy, "scale": 8.0}
        means = curiosity_rl.backward(case.policy, minibatch, tokens, args, world, **options)
        assert relative_l2([p.grad for p in case.policy.parameters()], expected) < 1e-12
        assert sums_of(means, world) == pytest.approx(sums, rel=1e-6) and torch.equal(
            tokens.old_logprobs, old_logprobs
        )


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_on_policy_the_old_log_probs_are_the_new_ones(case, objective):
    """The ratio is exactly 1: no KL between old and new, nothing clipped; the correction is by the
    new log-probs."""
    for correction, estimator in zip(CORRECTIONS, ["none", "k2", "k3", "k3-is"]):
        args = arguments(estimator, objective=objective, correction=correction)
        got = ours(case, args, on_policy=True)
        assert_equal(got, dense_reference(case, args, case.logprobs.detach()), correction)
        assert got[1][2:] == [0.0, 0.0]
        assert relative_l2([got[2]], [case.logprobs.detach()]) < 1e-12


def test_on_policy_all_objectives_are_the_same(case):
    gradients = [
        ours(case, arguments(objective=objective), on_policy=True)[0] for objective in OBJECTIVES
    ]
    assert all(relative_l2(other, gradients[0]) < 1e-12 for other in gradients[1:])


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3-is"])
def test_kl_to_an_equal_reference_adds_nothing(case, estimator):
    at_start = SimpleNamespace(**vars(case) | {"ref": case.logprobs.detach()})
    assert_equal(ours(at_start, arguments(estimator)), ours(case, arguments())[:2], estimator)


def test_kl_charged_in_the_reward_is_not_in_the_loss(case):
    assert_equal(
        ours(case, arguments(kl_reward_coef=KL_COEF)), ours(case, arguments())[:2], "reward alone"
    )
    both = ours(case, arguments("k3", kl_reward_coef=2.0))
    assert_equal(both, ours(case, arguments("k3"))[:2], "both: the loss has its own, and no more")


def test_ranks_and_loss_scale_multiply_the_gradient_alone(case):
    """Gradients are averaged over ranks and unscaled afterwards; the sums that are logged are
    neither."""
    plain, sums, _ = ours(case, arguments())
    multiplied, same_sums, _ = ours(
        case, arguments(), World(0, 3, 0, torch.device("cpu")), scale=1024.0
    )
    assert relative_l2([g / 3072 for g in multiplied], plain) < 1e-12
    assert same_sums[1:] == sums[1:] and same_sums[0] == pytest.approx(sums[0], rel=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_rank_without_tokens_adds_nothing(case, reduction):
    """The denominators are those of the others; if no rank has any, there is no minibatch."""
    index = TokenIndex(case.episodes)
    nothing = grpo.Tokens(index.episode_of_token[:0], *[case.old[:0].clone() for _ in range(5)])
    for objective, correction in itertools.product(OBJECTIVES, ["truncate", "sequence"]):
        case.policy.zero_grad()
        args = arguments(
            "k3-is",
            objective=objective,
            correction=correction,
            reduction=reduction,
            entropy_coef=0.1,
        )
        empty, options = (
            Minibatch([], 7.0, 3.0, [build_micro_batch([], [], index, Layout())]),
            {"store_old_logprobs": True},
        )
        means = grpo.backward(case.policy, empty, nothing, args, ALONE, **options)
        assert sums_of(means) == [0.0] * 4
        assert all(p.grad is not None and not p.grad.any() for p in case.policy.parameters())


class LogitTable(torch.nn.Module):
    """A policy whose logits at each place of a single row are free parameters: none depends on
    another's input."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, batch, temperature):
        logp = torch.log_softmax(self.logits[batch.hidden_index] / temperature, -1)
        return logp.gather(-1, batch.targets[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_observations_have_no_influence(objective, reduction):
    """Between and after trained tokens, whatever they are; the loss is that of the response without
    them."""
    logits = torch.randn(8, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    old, rollout, ref, advantages = double(
        [[-2.0, -3, -2.5], [-2, -2.2, -2.6], [-1, -2, -3], [0.7] * 3]
    )
    options = {
        "objective": objective,
        "reduction": reduction,
        "correction": "mask",
        "entropy_coef": 0.1,
    }
    results = []
    for ids, mask, places in (  # the prompt, then the response; each place predicts the next
        ([3, 4, 5, 6, 7, 8], [1, 0, 0, 1, 1, 0], [0, 1, 2, 3, 4, 5, 6, 7]),
        ([3, 9, 9, 6, 7, 1], [1, 0, 0, 1, 1, 0], [0, 1, 2, 3, 4, 5, 6, 7]),
        ([3, 6, 7], [1, 1, 1], [0, 1, 4, 5, 6]),
    ):
        episode = Episode(0, 0, [1, 2], ids, mask, [0.0] * len(ids), "stop")
        index, policy = TokenIndex([episode]), LogitTable(logits[places])
        owner = index.episode_of_token
        tokens = grpo.Tokens(
            owner, index.lengths[owner].double(), rollout, old.clone(), ref, advantages
        )
        minibatch = Minibatch([0], 3.0, 1.0, pack([episode], [0], index, budget=8))
        args = arguments("k3-is", **options)
        means = grpo.backward(policy, minibatch, tokens, args, ALONE, store_old_logprobs=False)
        slopes = torch.zeros_like(logits).index_add(0, torch.tensor(places), policy.logits.grad)
        assert slopes.any(-1).nonzero().flatten().tolist() == [1, 4, 5]
        results.append((sums_of(means), slopes))
    for other_sums, other_slopes in results[1:]:
        assert other_sums == results[0][0] and torch.equal(other_slopes, results[0][1])

"""The mathematics in the scripts against independent derivations: advantages, surrogate, weights,
schedules, masks."""

import copy
import itertools
import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import checked_args
from reference import group_advantages, objective_args, policy_term, surrogate

import grpo
import ppo
import sft
from common.job import Job
from common.optimizer import GuardedAdamW, lr_factor
from common.precision import LossScale, checked_gap
from common.rollout.opening import check_rollout
from common.types import Episode
from grpo import split_minibatches

# --- group_advantages -----------------------------------------------------------------------------


def advantages_of(scores, groups, advantage, dtype=torch.float64):
    return grpo.group_advantages(torch.tensor(scores, dtype=dtype), torch.tensor(groups), advantage)


def test_group_advantages_by_hand():
    """(0, 0, 0, 1): mean 1/4, unbiased variance (3/16 + 9/16) / 3 = 1/4, standard deviation 1/2."""
    centered = torch.tensor([-0.25, -0.25, -0.25, 0.75], dtype=torch.float64)
    scores = [0.0, 0, 0, 1]
    assert torch.equal(advantages_of(scores, [0] * 4, "group-mean"), centered)
    normalised = centered / (0.5 + 1e-6)
    assert torch.allclose(advantages_of(scores, [0] * 4, "group-std"), normalised, rtol=1e-14)


@pytest.mark.parametrize("advantage", ["group-std", "group-mean"])
def test_ragged_interleaved_groups_in_any_order(advantage):
    """Sizes 1 to 6, numbers with gaps (a rank holds every other prompt), members apart from each
    other."""
    rng = random.Random(0)
    episodes = [(rng.gauss(0, 1), 2 * g + 1) for g in range(6) for _ in range(g + 1)]
    for _ in range(5):
        rng.shuffle(episodes)
        scores, groups = map(list, zip(*episodes))
        advantages = advantages_of(scores, groups, advantage)
        expected = group_advantages(scores, groups, advantage)
        expected = torch.tensor(expected, dtype=torch.float64)
        assert torch.allclose(advantages, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("advantage", ["group-std", "group-mean"])
def test_singletons_and_empty_batches(advantage):
    assert advantages_of([3.7, -1.1], [0, 4], advantage, torch.float32).tolist() == [0.0, 0.0]
    empty = grpo.group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64), advantage)
    assert empty.shape == (0,)


@pytest.mark.parametrize("advantage", ["group-std", "group-mean"])
@pytest.mark.parametrize("score", [0.0, 1.0, 0.1, 0.7, -0.9, 1 / 3])
def test_equal_scores_have_advantage_exactly_zero(advantage, score):
    """In float32, as in the script: a rounded mean would become a push of all samples in the same
    direction."""
    for size in (2, 3, 5, 7, 8, 16, 64):
        scores = [score] * size + [0.0, 1.0]
        groups = [0] * size + [1, 1]
        advantages = advantages_of(scores, groups, advantage, torch.float32)
        assert not advantages[:size].any(), f"{size} scores of {score}: {advantages[0].item()}"
        assert advantages[size:].all()


# --- surrogate ------------------------------------------------------------------------------------

LOW = 0.2
HIGH = 0.28
LOGRATIOS = [-30.0, -20.5, -19.0, -3.0, -0.5, -0.23, -0.21, -0.1, 0.0]
LOGRATIOS += [0.1, 0.24, 0.26, 0.5, 1.05, 1.15, 3.0, 19.0, 25.0]
ADVANTAGES = [-2.5, -1.0, -0.01, 0.0, 0.01, 1.0, 2.5]
GRID = list(itertools.product(LOGRATIOS, ADVANTAGES))


def surrogate_by_cases(logratio, advantage, dual_clip):
    """As `policy_term`, for log-ratios that are clamped to [-20, 20]: beyond there is no slope."""
    clamped = min(max(logratio, -20.0), 20.0)
    args = objective_args("ppo", LOW, HIGH, dual_clip)
    value, slope, active = policy_term(math.exp(clamped), advantage, None, args)
    return value, slope * (clamped == logratio), active


def grid_tensors():
    logratios, advantages = torch.tensor(GRID, dtype=torch.float64).T
    old_logprobs = -torch.arange(len(GRID), dtype=torch.float64) / 16 - 31
    return old_logprobs + logratios, old_logprobs, advantages


@pytest.mark.parametrize("dual_clip", [0.0, 3.0])
def test_surrogate_equals_the_derivation_by_cases(dual_clip):
    logprobs, old_logprobs, advantages = grid_tensors()
    clips = (LOW, HIGH, dual_clip)
    logprobs.requires_grad_()
    loss, clipped = surrogate("ppo", logprobs, old_logprobs, advantages, None, clips)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    for i, (logratio, advantage) in enumerate(GRID):
        point = (logratio, advantage)
        value, slope, active = surrogate_by_cases(logratio, advantage, dual_clip)
        assert loss[i].item() == pytest.approx(value, rel=1e-10, abs=1e-300), point
        assert gradient[i].item() == pytest.approx(slope, rel=1e-10, abs=1e-300), point
        assert bool(clipped[i]) == active, point
    assert not gradient[clipped].any(), "clipped tokens have no gradient"


@pytest.mark.parametrize("dual_clip", [0.0, 3.0])
def test_surrogate_gradient_by_finite_differences(dual_clip):
    """No point of the grid is within 1e-3 of a kink. Relative to the larger of the loss and its
    slope."""
    logprobs, old_logprobs, advantages = grid_tensors()
    clips = (LOW, HIGH, dual_clip)
    logprobs.requires_grad_()
    loss, _ = surrogate("ppo", logprobs, old_logprobs, advantages, None, clips)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    with torch.no_grad():
        h = 1e-5
        ahead = surrogate("ppo", logprobs + h, old_logprobs, advantages, None, clips)[0]
        behind = surrogate("ppo", logprobs - h, old_logprobs, advantages, None, clips)[0]
    difference = ((ahead - behind) / (2 * h) - gradient).abs()
    scale = torch.maximum(loss.detach().abs(), gradient.abs()) + 1e-300
    assert (difference / scale).max() < 1e-8


def test_ratio_of_exactly_one_gives_minus_the_advantage():
    logprobs = torch.log_softmax(torch.randn(64), 0).requires_grad_()
    advantages = torch.randn(64)
    clips = (LOW, HIGH, 3.0)
    loss, clipped = surrogate("ppo", logprobs, logprobs.detach(), advantages, None, clips)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert torch.equal(loss.detach(), -advantages)
    assert torch.equal(gradient, -advantages)
    assert not clipped.any()


# --- token_weights --------------------------------------------------------------------------------

LENGTHS = [5, 1, 0, 12, 3, 7, 2]  # trained tokens of each episode; one has none
L_MAX = 16


def losses_of_episodes():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, dtype=torch.float64, generator=generator) for length in LENGTHS]


def definition(reduction, losses):
    losses = [loss for loss in losses if len(loss)]
    if reduction == "dapo":
        return torch.cat(losses).mean()
    if reduction == "grpo":
        return torch.stack([loss.mean() for loss in losses]).mean()
    return sum(loss.sum() for loss in losses) / (L_MAX * len(losses))


def weighted(reduction, losses, selected):
    """The script's sum over the episodes `selected`, with the counts of all episodes."""
    per_token = torch.cat([losses[i] for i in selected])
    length_of_episode = torch.tensor([LENGTHS[i] for i in selected])
    lengths = length_of_episode.double().repeat_interleave(length_of_episode)
    num_tokens = float(sum(LENGTHS))
    num_sequences = float(sum(length > 0 for length in LENGTHS))
    weights = grpo.token_weights(reduction, lengths, num_tokens, num_sequences, L_MAX)
    assert weights.shape == per_token.shape
    return (per_token * weights).sum()


@pytest.mark.parametrize("reduction", ["dapo", "grpo", "dr_grpo"])
def test_token_weights_equal_the_definitions_for_any_split(reduction):
    """Ranks of several micro-batches: the mean over ranks of (sum over micro-batches) * world
    size."""
    losses = losses_of_episodes()
    expected = definition(reduction, losses)
    for ranks in (
        [[[0, 1, 2, 3, 4, 5, 6]]],
        [[[0], [3, 1]], [[6, 5, 4, 2]]],
        [[[6], [5], [4]], [[3]], [[0, 1], [2]]],
    ):
        losses_of_ranks = []
        for batches in ranks:
            total = sum(weighted(reduction, losses, selected) for selected in batches)
            losses_of_ranks.append(total * len(ranks))
        assert torch.allclose(torch.stack(losses_of_ranks).mean(), expected, rtol=1e-12), ranks


def test_reductions_differ():
    losses = losses_of_episodes()
    assert len({round(definition(r, losses).item(), 6) for r in ("dapo", "grpo", "dr_grpo")}) == 3


def test_weights_are_constants_in_the_dtype_of_the_script():
    lengths = torch.tensor([4.0, 4.0, 2.0])
    assert grpo.token_weights("dapo", lengths, 8.0, 3.0, L_MAX).tolist() == [0.125] * 3
    assert grpo.token_weights("grpo", lengths, 8.0, 2.0, L_MAX).tolist() == [0.125, 0.125, 0.25]
    assert grpo.token_weights("dr_grpo", lengths, 8.0, 2.0, L_MAX).tolist() == [1 / 32] * 3


# --- lr_factor ------------------------------------------------------------------------------------

SCHEDULES = ["constant", "linear", "cosine"]


def test_first_step_trains_and_no_factor_exceeds_one():
    for schedule, warmup, total, floor in itertools.product(
        SCHEDULES, [0, 0.0, 0.1, 0.5, 1.0, 3, 10], [1, 2, 10, 40], [0.0, 0.1]
    ):
        factors = [lr_factor(step, total, warmup, schedule, floor) for step in range(total)]
        assert all(0 < factor <= 1 for factor in factors), (schedule, warmup, total, floor, factors)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_in_steps_and_as_a_share(schedule):
    ramp = [0.25, 0.5, 0.75, 1.0]
    for warmup, total in ((4, 40), (4.0, 400), (0.1, 40), (0.2, 20), (0.1, 42)):
        factors = [lr_factor(step, total, warmup, schedule, 0.0) for step in range(4)]
        assert factors == ramp, (warmup, total)
    assert lr_factor(0, 40, 1.0, schedule, 0.0) == 1.0, "1 is one step, not all steps"


def test_closed_forms_after_the_warmup():
    """10 steps of warm-up, 40 of decay to a floor of 0.1; a quarter, a half and all of the way."""
    closed_forms = {  # schedule: {step: factor}
        "constant": {10: 1.0, 20: 1.0, 30: 1.0, 50: 1.0},
        "linear": {10: 1.0, 20: 0.775, 30: 0.55, 50: 0.1},
        "cosine": {10: 1.0, 20: 0.1 + 0.9 * (2 + math.sqrt(2)) / 4, 30: 0.55, 50: 0.1},
    }
    for schedule, points in closed_forms.items():
        for step, expected in points.items():
            factor = lr_factor(step, 50, 10, schedule, 0.1)
            assert factor == pytest.approx(expected, rel=1e-12), (schedule, step)
    falling = [lr_factor(step, 50, 10, "cosine", 0.0) for step in range(10, 50)]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] > 0


# --- split_minibatches ----------------------------------------------------------------------------


def episodes_of_rank(num_prompts, samples, rank, size):
    """As the script deals them: prompt p goes to rank p % size. Sample counts are ragged: one
    prompt lost a sample."""
    episodes = []
    for prompt in range(rank, num_prompts, size):
        num_samples = samples - 1 if prompt == 3 else samples
        for sample in range(num_samples):
            episodes.append(Episode(prompt, sample, [1], [2], [1], [0.0], "stop"))
    return episodes


@pytest.mark.parametrize("minibatches", [1, 2, 3, 11])
def test_minibatches_are_a_partition_by_prompts_whatever_the_ranks(minibatches):
    splits = []
    for size in (1, 2, 3):
        prompts_of = [[] for _ in range(minibatches)]
        for rank in range(size):
            episodes = episodes_of_rank(11, 4, rank, size)
            split = split_minibatches(episodes, list(range(11)), minibatches, seed=5, step=7)
            assert len(split) == minibatches
            assert sorted(i for selected in split for i in selected) == list(range(len(episodes)))
            for prompts, selected in zip(prompts_of, split):
                prompts += sorted({episodes[i].prompt_index for i in selected})
        flat = sorted(p for prompts in prompts_of for p in prompts)
        assert flat == list(range(11)), "no group is split, over minibatches or ranks"
        counts = [len(prompts) for prompts in prompts_of]
        assert max(counts) - min(counts) <= 1
        splits.append([sorted(prompts) for prompts in prompts_of])
    assert splits[0] == splits[1] == splits[2]


@pytest.mark.parametrize("ranks, minibatches", [(1, 4), (2, 4), (4, 8), (8, 4), (3, 5)])
def test_ranks_have_as_many_prompts_of_a_minibatch(ranks, minibatches):
    """They wait for each other in every micro-batch."""
    episodes_of = [episodes_of_rank(32, 2, rank, ranks) for rank in range(ranks)]
    prompts = sorted({e.prompt_index for episodes in episodes_of for e in episodes})
    for step in range(4):
        counts = []  # [ranks][minibatches] numbers of prompts
        for episodes in episodes_of:
            counts_of_rank = []
            for selected in split_minibatches(episodes, prompts, minibatches, 3, step):
                counts_of_rank.append(len({episodes[i].prompt_index for i in selected}))
            counts.append(counts_of_rank)
        for counts_of_minibatch in zip(*counts, strict=True):
            assert max(counts_of_minibatch) - min(counts_of_minibatch) <= 2
        sizes = [sum(counts_of_minibatch) for counts_of_minibatch in zip(*counts, strict=True)]
        assert max(sizes) - min(sizes) <= 1


def test_minibatches_change_with_step_and_seed():
    episodes = episodes_of_rank(32, 2, 0, 1)

    def split(seed: int, step: int) -> list[list[int]]:
        return split_minibatches(episodes, list(range(32)), 2, seed, step)

    assert split(seed=0, step=0) == split(seed=0, step=0)
    assert split(seed=0, step=0) != split(seed=0, step=1)
    assert split(seed=0, step=0) != split(seed=1, step=0)


# --- sft ------------------------------------------------------------------------------------------


def test_cross_entropy_is_the_mean_over_the_global_batch():
    logprobs = torch.log_softmax(torch.randn(12, dtype=torch.float64), 0)
    whole = logprobs.clone().requires_grad_()
    loss = sft.cross_entropy(whole, 12, 1)
    loss.backward()
    assert torch.allclose(loss, -logprobs.mean())
    assert torch.allclose(whole.grad, torch.full_like(logprobs, -1 / 12))
    # micro-batches, one without tokens
    first_rank = sft.cross_entropy(logprobs[:1], 12, 2) + sft.cross_entropy(logprobs[1:7], 12, 2)
    second_rank = sft.cross_entropy(logprobs[7:7], 12, 2) + sft.cross_entropy(logprobs[7:], 12, 2)
    assert torch.allclose((first_rank + second_rank) / 2, loss)


# --- LossScale and GuardedAdamW's step ------------------------------------------------------------


def test_loss_scale_halves_on_overflow_and_doubles_after_the_interval():
    scale = LossScale.for_dtype(torch.float16)
    scale.growth_interval = 3
    assert scale.scale == 2.0**14
    history = []
    for finite in (True, True, False, True, True, True, True):
        scale.update(finite)
        history.append(scale.scale)
    # the overflow also starts the count of good steps again
    assert history == [2.0**14, 2.0**14, 2.0**13, 2.0**13, 2.0**13, 2.0**14, 2.0**14]
    for _ in range(40):
        scale.update(False)
    assert scale.scale == 1.0, "never below 1"
    for _ in range(3 * 40):
        scale.update(True)
    assert scale.scale == 2.0**24, "and never above the integers that float32 has"


def test_loss_scale_state_round_trip():
    scale = LossScale(scale=8.0, dynamic=True, growth_interval=3)
    scale.update(True)
    scale.update(True)
    restored = LossScale(scale=2.0, dynamic=True, growth_interval=3)
    restored.load_state_dict(scale.state_dict())
    assert restored == scale
    restored.update(True)
    assert restored.scale == 16.0, "two good steps before the checkpoint, one after it"


@pytest.mark.parametrize("before, now", itertools.permutations([torch.float16, torch.bfloat16], 2))
def test_a_run_that_goes_on_in_another_dtype_has_the_loss_scale_of_that_dtype(before, now):
    """2^14 doubled from 1 takes thousands of steps, in which most gradients of fp16 are 0."""
    scale = LossScale.for_dtype(now)
    scale.load_state_dict(LossScale.for_dtype(before).state_dict())
    assert scale == LossScale.for_dtype(now)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_scale_is_one_without_fp16(dtype):
    scale = LossScale.for_dtype(dtype)
    for finite in [True] * 1000 + [False]:
        scale.update(finite)
    assert scale.scale == 1.0


def test_the_gap_is_a_mean_over_the_tokens_of_all_ranks(monkeypatch):
    """Three tokens here, with gaps of 0.1, 0.2 and 0; one on another rank, with 0.5."""

    def add_other_rank(values):
        gaps, count = values
        return [gaps + 0.5, count + 1]

    monkeypatch.setattr("common.precision.all_reduce", add_other_rank)
    engine = torch.tensor([-1.0, -2.0, -3.0])
    trainer = torch.tensor([-1.1, -1.8, -3.0])
    assert checked_gap(engine, trainer, 0.21, step=3) == pytest.approx(0.2)
    message = r"^step 3: .* by 0.2 on average, more than --max-logprob-gap 0.19"
    with pytest.raises(RuntimeError, match=message):
        checked_gap(engine, trainer, 0.19, step=3)
    with pytest.raises(RuntimeError, match="by nan on average"):
        checked_gap(engine, trainer * math.nan, 1e9, step=3)


def linear_with_gradient(scale=1.0):
    """A layer with an AdamW that has already made one step, and gradients (times `scale`) for the
    next."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    gradients = [torch.randn_like(parameter) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), gradients):
        parameter.grad = gradient * scale
    return model, optimizer, gradients


def guarded_step(model, optimizer, max_grad_norm, loss_scale, offload=False) -> tuple[float, bool]:
    """(norm of the gradients, stepped) of a GuardedAdamW that has this optimizer and scale."""
    (group,) = optimizer.param_groups
    options = {
        "weight_decay": group["weight_decay"],
        "max_grad_norm": max_grad_norm,
        "offload": offload,
    }
    adamw = GuardedAdamW(model, torch.float32, **options)
    adamw.optimizer = optimizer
    adamw.loss_scale = loss_scale
    metrics = adamw.step(group["lr"]).reduce()
    return metrics["optim/grad_norm"], not metrics["optim/skipped_steps"]


def snapshot(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5, 1e6])
def test_guarded_step_unscales_and_clips(scale, max_grad_norm):
    model, _, gradients = linear_with_gradient(scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    norm = math.sqrt(sum((gradient**2).sum().item() for gradient in gradients))
    assert norm > 0.5
    loss_scale = LossScale(scale, dynamic=scale > 1)
    grad_norm, stepped = guarded_step(model, optimizer, max_grad_norm, loss_scale)
    assert stepped
    assert grad_norm == pytest.approx(norm, rel=1e-12), "the norm before clipping, unscaled"
    assert all(parameter.grad is None for parameter in model.parameters())
    applied = [(old - new) / 0.25 for old, new in zip(before, model.parameters())]
    clip = 0.5 / norm if max_grad_norm == 0.5 else 1.0
    for applied_gradient, gradient in zip(applied, gradients):
        assert torch.allclose(applied_gradient, gradient * clip, rtol=1e-5, atol=0)
    if max_grad_norm == 0.5:
        assert math.sqrt(sum((g**2).sum().item() for g in applied)) <= 0.5


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_guarded_step_skips_gradients_that_are_not_finite(poison, max_grad_norm):
    model, optimizer, _ = linear_with_gradient()
    before = snapshot(model, optimizer)
    next(model.parameters()).grad[1, 2] = poison
    loss_scale = LossScale(1024.0, dynamic=True, good_steps=5)
    grad_norm, stepped = guarded_step(model, optimizer, max_grad_norm, loss_scale)
    assert not stepped
    assert not math.isfinite(grad_norm)
    assert loss_scale.scale == 512.0
    assert loss_scale.good_steps == 0
    torch.testing.assert_close(snapshot(model, optimizer), before, rtol=0, atol=0)
    # the next backward starts from nothing
    assert all(parameter.grad is None for parameter in model.parameters())


def test_guarded_step_without_clipping_is_the_optimizers_own_step():
    model, optimizer, _ = linear_with_gradient()
    twin, twin_optimizer, _ = linear_with_gradient()
    guarded_step(model, optimizer, 0.0, LossScale())
    twin_optimizer.step()
    expected = snapshot(twin, twin_optimizer)
    torch.testing.assert_close(snapshot(model, optimizer), expected, rtol=0, atol=0)


def test_guarded_step_without_any_gradient_changes_nothing():
    """A step whose groups were all left out; with offload, too."""
    model, optimizer, _ = linear_with_gradient()
    optimizer.step()
    optimizer.zero_grad()
    before = snapshot(model, optimizer)
    assert guarded_step(model, optimizer, 1.0, LossScale(), offload=True) == (0.0, True)
    torch.testing.assert_close(snapshot(model, optimizer), before, rtol=0, atol=0)


# --- check_args -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--kl-estimator k2", "--kl-estimator k2 has no effect: needs a --kl-loss-coef"),
        (
            "--kl-reward-coef 0.01",
            "--kl-reward-coef with --advantage group-std or --mask-truncated",
        ),
        (
            "--kl-reward-coef 0.01 --advantage rloo --mask-truncated",
            "--kl-reward-coef with --advantage group-std or",
        ),
        ("--kl-loss-coef nan", "--kl-loss-coef nan: must be a number"),
        ("--kl-reward-coef -1", "--kl-reward-coef -1.0: must not be below 0"),
        (
            "--tool-bonus 0.1",
            "--tool-bonus 0.1 has no effect: needs --tools, or a class as --environment",
        ),
        ("--clip-high 0.28", "--clip-high 0.28 has no effect: needs several --minibatches"),
        ("--objective=gspo", "--objective gspo has no effect: needs several --minibatches"),
        (
            "--minibatches 2 --objective cispo --dual-clip 4",
            "--dual-clip 4.0 has no effect: needs --objective ppo",
        ),
        (
            "--correction-range 0.1 2",
            "--correction-range (0.1, 2.0) has no effect: needs a --correction",
        ),
        ("--minibatches 64", "--minibatches 64 of --prompts-per-step 32"),
        ("--samples-per-prompt 1", "--samples-per-prompt 1: no group"),
        ("--dynamic-sampling 1", "--dynamic-sampling 1 never refills"),
        ("--overlong-buffer 256", "--overlong-buffer must be below --max-response-tokens"),
        ("--prompts-per-step 0", "--prompts-per-step 0: must be above 0"),
        ("--reward-timeout 0", "--reward-timeout 0.0: must be above 0"),
        ("--learning-rate nan", "--learning-rate nan: must be a number"),
        ("--seed -1", "--seed -1: must not be below 0"),
        ("--lr-floor 1.5", "--lr-floor 1.5: must not be above 1"),
        ("--min-pixels 2000000", "--min-pixels 2000000: above --max-pixels 1003520"),
    ],
)
def test_what_cannot_work_or_has_no_effect_is_refused(flags, message, monkeypatch):
    with pytest.raises(SystemExit) as refusal:
        checked_args(grpo, monkeypatch, *flags.split())
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--lr-schedule constant",
        "--minibatches 2 --clip-high 0.28 --objective gspo",
        "--entropy-coef -0.01",
    ],
)
def test_what_works_is_not_refused(flags, monkeypatch):
    """The demo sets flags of its own: only flags that the user gives can be idle."""
    assert checked_args(grpo, monkeypatch, *flags.split()).run.model == "tiny"


IDLE = ["--lr-floor 0.2 --lr-schedule constant", "--total-epochs 2", "--eval-samples 4"]


@pytest.mark.parametrize("flags", IDLE)
def test_idle_flags_that_all_scripts_share(flags, monkeypatch):
    with pytest.raises(SystemExit, match=f"{flags.split()[0]} .* has no effect"):
        checked_args(grpo, monkeypatch, *flags.split())


def test_an_embedded_model_with_other_data_has_nothing_to_be_evaluated_on(monkeypatch):
    with pytest.raises(SystemExit, match="--eval-every 5 has no effect: needs --eval-data"):
        checked_args(grpo, monkeypatch, "--train-data", "x.jsonl", "--eval-every", "5")


@pytest.mark.parametrize(
    "flags", ["--sleep-level 2", "--offload optimizer", "--offload optimizer,reference"]
)
def test_what_takes_a_gpu_is_refused_without_one(flags, world, monkeypatch, tmp_path):
    """The device is known once the run has joined its process group."""
    monkeypatch.setattr("common.job.init_world", lambda *_: world)
    more = ["--kl-loss-coef", "0.01", "--output-dir", str(tmp_path)]
    args = checked_args(grpo, monkeypatch, *flags.split(), *more)
    with pytest.raises(SystemExit, match=f"{flags.split()[0]} .* has no effect: needs a GPU"):
        job = Job("grpo", args.data, args.machine, args.run, demo=True)
        check_rollout(job, args.rollout)


@pytest.mark.parametrize("script", [grpo, ppo])
def test_an_evaluation_makes_no_reference(script, world, monkeypatch):
    class Planned(Exception):
        """Ends the run at this point."""

    def plan(*_, frozen: list, **__):
        raise Planned(frozen)

    for name in vars(script):
        if name.startswith("open_") or name in ("check_rollout", "num_steps", "with_embedded_data"):
            monkeypatch.setattr(script, name, lambda *_, **__: None)
    monkeypatch.setattr(script, "open_prompts", lambda *_: (None, None))
    job = SimpleNamespace(
        world=world,
        model_folder="folder",
        output_dir=Path("run"),
        plan_memory=plan,
        check_weights=print,
        leave_if_finished=print,
    )
    monkeypatch.setattr(script, "Job", lambda *_, **__: job)
    kl_in_reward = "--kl-reward-coef 0.01"
    if script is grpo:
        kl_in_reward += " --advantage rloo"
    for flags, frozen in (
        ("--kl-loss-coef 0.01", ["folder"]),
        (kl_in_reward, ["folder"]),
        ("--kl-loss-coef 0.01 --eval-only", []),
        ("", []),
    ):
        args = checked_args(script, monkeypatch, *flags.split())
        with pytest.raises(Planned) as planned:
            script.main(args)
        assert planned.value.args == (frozen,)


def test_with_lora_a_reference_on_the_host_is_refused_as_a_forks_default_too(
    world, monkeypatch, tmp_path
):
    """The policy would be moved there."""
    monkeypatch.setattr("common.job.init_world", lambda *_: world)
    args = checked_args(grpo, monkeypatch, "--lora-rank", "4", "--output-dir", str(tmp_path))
    args.machine.offload = "reference"
    with pytest.raises(SystemExit, match="--offload reference has no effect: with LoRA"):
        Job("grpo", args.data, args.machine, args.run, demo=True)


def test_a_base_on_the_host_needs_lora_and_an_engine(world, monkeypatch, tmp_path):
    monkeypatch.setattr("common.job.init_world", lambda *_: world)
    monkeypatch.setattr("common.job.refuse_idle", lambda *_: None)  # without a GPU
    flags = ["--offload", "base", "--output-dir", str(tmp_path)]
    args = checked_args(grpo, monkeypatch, *flags)
    with pytest.raises(SystemExit, match="--offload base has no effect: needs --lora-rank"):
        Job("grpo", args.data, args.machine, args.run, demo=True)
    args = checked_args(grpo, monkeypatch, *flags, "--lora-rank", "4", "--replay", "dump")
    job = Job("grpo", args.data, args.machine, args.run, demo=True, training=False)
    with pytest.raises(SystemExit, match="--offload base has no effect: with --replay"):
        check_rollout(job, args.rollout)

"""Packer: minibatches as micro-batches that fit, smaller ones when memory runs out, and passes that
fill in a column."""

import math
import mmap
import random
import resource
from collections import Counter
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from episodes import random_episodes
from helpers import make_args, random_policy, relative_l2, skip_where_no_step_is_repeated, split_of
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.utils._python_dispatch import TorchDispatchMode
from vl import write_tied_llama

import grpo
from common.distributed import abandon_backward, forward_context, make_mesh, wrap_model
from common.limits import status_bytes
from common.memory.halving import RESERVE, halve_budget, limited_memory
from common.models import load_model
from common.optimizer import GuardedAdamW
from common.packing import Packer, TokenIndex
from common.types import Episode
from grpo import split_minibatches

BUDGET = 512


@pytest.fixture
def case(tiny_config, tmp_path, world):
    """Two minibatches of a step, each of several micro-batches of at most 512 tokens, with the
    columns of their tokens."""
    episodes = random_episodes(7, prompts=60, samples=6)
    index = TokenIndex(episodes)
    packer = Packer("sdpa", BUDGET, tmp_path / "run", world)
    minibatches = packer.minibatches(episodes, index, split_of(episodes, 2, seed=3, step=4))
    tokens = grpo.Tokens.of(episodes, index, world.device)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(3, len(index), generator=generator, dtype=torch.float64)
    tokens.old_logprobs = -3 + 0.1 * noise[0]
    tokens.advantages = noise[1]
    tokens.lengths = tokens.lengths.double()
    return SimpleNamespace(
        policy=random_policy(tiny_config),
        episodes=episodes,
        index=index,
        packer=packer,
        minibatches=minibatches,
        tokens=tokens,
        args=make_args(grpo, reduction="grpo"),
        world=world,
    )


def sizes(minibatch) -> list[int]:
    return [batch.input_ids.numel() for batch in minibatch.micro_batches]


# --- minibatches ----------------------------------------------------------------------------------


def test_minibatches_hold_every_trained_token_once_and_their_counts(case):
    split = split_minibatches(case.episodes, list(range(60)), 2, seed=3, step=4)
    assert [m.episode_indices for m in case.minibatches] == split
    all_tokens = []
    for minibatch, selected in zip(case.minibatches, split, strict=True):
        lengths = case.index.lengths[selected]
        assert minibatch.num_tokens == lengths.sum()
        assert minibatch.num_sequences == (lengths > 0).sum()
        tokens = torch.cat([batch.token_index for batch in minibatch.micro_batches])
        assert set(case.index.episode_of_token[tokens].tolist()) <= set(selected)
        assert len(sizes(minibatch)) > 1
        assert max(sizes(minibatch)) <= BUDGET
        all_tokens.extend(tokens.tolist())
    assert sorted(all_tokens) == list(range(len(case.index)))


@pytest.mark.parametrize(
    "attention, repeats, multiple", [("sdpa", False, 1), ("flex", False, 128), ("flash", True, 1)]
)
def test_each_attention_gets_the_packs_that_it_reads(attention, repeats, multiple, world):
    """With flash attention responses cannot share a prompt; flex attention compiles for each
    length."""
    episodes = [e for e in random_episodes(7, prompts=6, samples=6) if any(e.loss_mask)]
    packer = Packer(attention, BUDGET, Path("nowhere"), world)
    (minibatch,) = packer.minibatches(
        episodes, TokenIndex(episodes), split_of(episodes, 1, seed=0, step=0)
    )
    assert all(size % multiple == 0 for size in sizes(minibatch))
    units = [unit for batch in minibatch.micro_batches for unit in batch.units if len(unit) > 1]
    assert len(units) == (len(episodes) if repeats else 6)


def test_a_group_beyond_the_budget_is_split_and_repeats_its_prompt(world):
    episodes = [e for e in random_episodes(7, prompts=6, samples=6) if any(e.loss_mask)]
    budget = max(len(e.prompt_ids) + len(e.response_ids) for e in episodes)
    packer = Packer("sdpa", budget, Path("nowhere"), world)
    (minibatch,) = packer.minibatches(
        episodes, TokenIndex(episodes), split_of(episodes, 1, seed=0, step=0)
    )
    units = [unit for batch in minibatch.micro_batches for unit in batch.units]
    assert max(sizes(minibatch)) <= budget
    assert 6 < len(units) < len(episodes)


def groups_of(prompts: int, samples: int, prompt_tokens: int, response_tokens) -> list[Episode]:
    """Groups whose responses have a length of `response_tokens`, a range."""
    rng = random.Random(0)
    episodes = []
    for prompt in range(prompts):
        for sample in range(samples):
            length = rng.choice(response_tokens)
            mask = [1] * length
            ids = [prompt] * length
            logprobs = [0.0] * length
            prompt_ids = [prompt] * prompt_tokens
            episodes.append(Episode(prompt, sample, prompt_ids, ids, mask, logprobs, "stop"))
    return episodes


@pytest.mark.parametrize(
    "shape, budget",
    [
        ((16, 8, 256, [1024]), 16_384),
        ((16, 8, 256, [768]), 8_192),  # of tests/bench/gpu.py
        ((16, 8, 256, [768]), 16_384),
        ((16, 8, 200, range(100, 1500)), 8_192),
        ((8, 16, 300, range(400, 3000)), 8_192),
    ],
)
def test_micro_batches_are_nine_tenths_full(shape, budget, world):
    """Groups of half a budget and more are cut, and their prompts repeated; no response is."""
    episodes = groups_of(*shape)
    packer = Packer("sdpa", budget, Path("nowhere"), world)
    index = TokenIndex(episodes)
    (minibatch,) = packer.minibatches(episodes, index, [list(range(len(episodes)))])
    filled = sizes(minibatch)
    assert max(filled) <= budget
    assert len(filled) <= ceil(sum(filled) / (0.9 * budget)), "the last one has what is left"
    responses = Counter()
    tokens = []
    for batch in minibatch.micro_batches:
        for unit in batch.units:
            assert unit[0] == shape[2]
            responses.update(unit[1:])
        tokens += batch.token_index.tolist()
    assert responses == Counter(len(episode.response_ids) for episode in episodes)
    assert sorted(tokens) == list(range(len(index)))
    num_prompts, _, prompt_tokens, _ = shape
    assert sum(filled) <= 1.04 * (num_prompts * prompt_tokens + len(index))


def test_a_bin_holds_the_prompts_that_the_teacher_reads(world, tmp_path):
    episodes = [Episode(i, 0, [1, 2], [3, 4], [1, 1], [0.0] * 2) for i in range(8)]
    longer = [replace(episode, prompt_ids=[1] * 30) for episode in episodes]
    packer = Packer("sdpa", 64, tmp_path, world)
    (minibatch,) = packer.minibatches(episodes, TokenIndex(episodes), [list(range(8))], longer)
    assert max(batch.input_ids.numel() for batch in minibatch.teacher_batches) == 64
    assert len(minibatch.micro_batches) == len(minibatch.teacher_batches) == 4


def test_a_group_stays_whole_where_its_prompt_is_dear(world):
    """To cut groups would save a fifth of the micro-batches, and compute every prompt twice."""
    episodes = groups_of(20, 8, 8000, [100])
    packer = Packer("sdpa", 17_200, Path("nowhere"), world)
    (minibatch,) = packer.minibatches(episodes, TokenIndex(episodes), [list(range(160))])
    assert [len(batch.units) for batch in minibatch.micro_batches] == [1] * 20


# --- attempt --------------------------------------------------------------------------------------


def failing_backward(case, minibatch, failures: list[int]):
    """(sizes of the micro-batches of each attempt, `grpo.backward` of the minibatch). Memory runs
    out before micro-batch number `failures[0]`, at the next attempt `failures[1]`, ..."""
    attempts = []
    plain_forward = case.policy.forward

    def run(policy, **options):
        num_failed = len(attempts)
        attempts.append(sizes(minibatch))
        num_done = 0

        def forward(batch, *rest):
            nonlocal num_done
            if num_failed < len(failures) and num_done == failures[num_failed]:
                raise torch.OutOfMemoryError("injected")
            num_done += 1
            return plain_forward(batch, *rest)

        policy.forward = forward
        return grpo.backward(policy, minibatch, case.tokens, case.args, case.world, **options)

    return attempts, run


def gradients(case, minibatch, failures):
    """(sizes of each attempt, metrics, gradients) of an attempt with these failures."""
    case.policy.zero_grad()
    attempts, run = failing_backward(case, minibatch, failures)
    means = case.packer.attempt(run, case.policy, store_old_logprobs=False, scale=4.0)
    return attempts, means.reduce(), [p.grad.clone() for p in case.policy.parameters()]


def test_an_attempt_is_repeated_with_half_the_tokens_and_the_same_gradient(case, capsys):
    """Twice; the first failure leaves the gradients of two micro-batches, which must be dropped."""
    first, second = case.minibatches
    attempts, means, plain = gradients(case, first, [])
    assert len(attempts) == 1
    assert case.packer.budget == BUDGET
    attempts, same_means, same = gradients(case, first, [2, 0])
    assert len(attempts) == 3
    assert len(attempts[0]) < len(attempts[1]) < len(attempts[2])
    for number, attempt in enumerate(attempts):
        assert max(attempt) <= BUDGET // 2**number
    assert relative_l2(same, plain) < 1e-12
    assert same_means == pytest.approx(means, rel=1e-6)
    assert case.packer.budget == BUDGET // 4
    assert max(sizes(second)) <= BUDGET // 4, "the other minibatch, too"
    output = capsys.readouterr().out
    assert "--micro-batch-tokens is now 256, the step is repeated" in output
    assert "is now 128" in output


def test_the_run_folder_remembers_the_budget_that_fits(case, world):
    gradients(case, case.minibatches[0], [0])
    folder = case.packer.run_dir
    assert (folder / "micro_batch_tokens").read_text() == "256"
    assert Packer("sdpa", BUDGET, folder, world).budget == 256
    assert Packer("sdpa", 64, folder, world).budget == 64
    assert Packer("sdpa", BUDGET, folder.parent, world).budget == BUDGET, "of this run alone"


def test_an_attempt_ends_below_128_tokens_and_at_other_errors(case):
    message = "out of GPU memory in the trainer with 128 tokens: add --gradient-check"
    with pytest.raises(SystemExit, match=message):
        gradients(case, case.minibatches[0], [0] * 9)

    def broken(policy):
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        case.packer.attempt(broken, case.policy)


def test_an_attempt_passes_on_its_arguments(case):
    def update(*arguments, **options):
        return arguments, options

    result = case.packer.attempt(update, case.policy, 1, a=2)
    assert result == ((case.policy, 1), {"a": 2})


@pytest.mark.parametrize(
    "error, message",
    [
        (RuntimeError("CUDA error: out of memory"), "out of GPU memory: "),
        (
            RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
            "out of GPU memory: ",
        ),
        (RuntimeError("std::bad_alloc"), "out of memory: "),
        (RuntimeError("could not create a memory object"), "out of memory: "),
        (MemoryError(), "out of memory: "),
    ],
)
def test_memory_may_run_out_outside_torchs_allocator(case, error, message, capsys):
    errors = [error]

    def update(policy):
        if errors:
            raise errors.pop()
        return "done"

    assert case.packer.attempt(update, case.policy) == "done"
    assert case.packer.budget == BUDGET // 2
    assert capsys.readouterr().out.startswith(message)


def test_on_a_cpu_a_rank_has_its_share_of_the_free_memory(case, monkeypatch, capsys):
    """Two GiB for two ranks, less the reserve; the limit ends with the update."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("common.memory.halving.free_memory", lambda: 2**31)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    monkeypatch.setattr("common.memory.halving._untouched", [2**63])
    num_bytes = [2**32, 2**28]  # of the first attempt, of the second
    limits = []

    def update(policy):
        limits.append(resource.getrlimit(resource.RLIMIT_DATA)[0] - status_bytes("VmData"))
        return torch.empty(num_bytes.pop(0), dtype=torch.uint8).numel()

    assert case.packer.attempt(update, case.policy) == 2**28
    assert not num_bytes
    assert limits[0] == pytest.approx(2**30 - RESERVE, abs=2**26)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    message = "out of memory: --micro-batch-tokens is now 256, the step is repeated"
    assert message in capsys.readouterr().out
    result = torch.zeros(len(case.index), dtype=torch.float64)
    case.packer.fill(result, case.policy, case.minibatches, 0.8)
    with limited_memory(torch.device("cuda")):
        assert resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.mark.parametrize("free", [2**40, 2**29])
def test_a_limit_of_the_user_stays(monkeypatch, free):
    """It may be lower than the free memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData") + 2**30, hard))
    lowered = resource.getrlimit(resource.RLIMIT_DATA)
    monkeypatch.setattr("common.memory.halving.free_memory", lambda: free)
    try:
        with pytest.raises(KeyError), limited_memory(torch.device("cpu")):
            limit, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
            assert hard_limit == hard
            assert limit <= lowered[0]
            assert (limit == lowered[0]) == (free == 2**40)
            raise KeyError
        assert resource.getrlimit(resource.RLIMIT_DATA) == lowered
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def test_released_memory_is_not_counted_twice(monkeypatch):
    """It still counts as data of the process, and as free memory."""
    monkeypatch.setattr("common.memory.halving.free_memory", lambda: 2**33)
    monkeypatch.setattr("common.memory.halving._untouched", [2**63])
    limits = []
    for _ in range(2):
        with limited_memory(torch.device("cpu")):
            limits.append(resource.getrlimit(resource.RLIMIT_DATA)[0])
        mapped = mmap.mmap(-1, 2**30, flags=mmap.MAP_PRIVATE)  # as after malloc_trim: not in memory
    mapped.close()
    assert limits[1] - limits[0] < 2**26


def test_the_run_ends_if_onednn_cannot_create_a_kernel(case):
    """It would fail at the next one, too, however much memory there is by then."""

    def update(policy):
        raise RuntimeError("could not create a primitive")

    message = "out of memory in the trainer: --micro-batch-tokens is now 256; the same"
    with pytest.raises(SystemExit, match=message):
        case.packer.attempt(update, case.policy)
    assert (case.packer.run_dir / "micro_batch_tokens").read_text() == "256"


def test_several_ranks_halve_and_exit(case, tmp_path):
    """The others wait in a collective: a restart goes on."""
    two_ranks = SimpleNamespace(size=2, rank=1)
    message = f"--micro-batch-tokens is now 256; the same command with .*{tmp_path}"
    with pytest.raises(SystemExit, match=message):
        halve_budget(BUDGET, case.policy, two_ranks, tmp_path, torch.OutOfMemoryError())
    assert (tmp_path / "micro_batch_tokens").read_text() == "256"
    with pytest.raises(SystemExit, match=r"out of .* in the trainer with 255 tokens: add"):
        halve_budget(255, case.policy, two_ranks, tmp_path, torch.OutOfMemoryError())


class Casts(TorchDispatchMode):
    """How often a tensor of so many numbers is cast to bfloat16."""

    def __init__(self, numel: int):
        super().__init__()
        self.numel = numel
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        is_cast = function is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16
        if is_cast and result.numel() == self.numel:
            self.count += 1
        return result


# slow: test_gradients_reduced_once_a_step_are_those_of_each_micro_batch gathers them each time
@pytest.mark.parametrize("stays_gathered", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_on_one_rank_weights_are_cast_once_a_step(case, tiny_config, stays_gathered):
    """Each step anew, since they have changed; once a micro-batch if memory is short. Gradients add
    up, without those of an abandoned attempt."""
    torch.manual_seed(0)
    policy = wrap_model(
        random_policy(tiny_config, torch.float32),
        make_mesh(case.world, "fsdp"),
        torch.bfloat16,
        stays_gathered=stays_gathered,
    )
    weights = policy.model.get_input_embeddings().weight
    batches = case.minibatches[0].micro_batches[:3]
    for _ in range(2):
        gradient_of_each = []
        for batch in batches:
            with forward_context(policy):
                policy(batch)[0].sum().backward()
            gradient_of_each.append(weights.grad.full_tensor().clone())
            policy.zero_grad()
        # of torch 2.13: a first attempt has ended after one of them
        if hasattr(policy, "reset_iter_state"):
            with forward_context(policy, last=False):
                policy(batches[1])[0].sum().backward()
            abandon_backward(policy)
        with Casts(weights.numel()) as casts:
            for i, batch in enumerate(batches):
                with forward_context(policy, last=i == len(batches) - 1):
                    policy(batch)[0].sum().backward()
        assert len(batches) > 1
        assert casts.count == (1 if stays_gathered else len(batches))
        gradient = weights.grad.full_tensor()
        torch.testing.assert_close(gradient, sum(gradient_of_each), rtol=1e-5, atol=1e-6)
        policy.zero_grad()


class Layer(nn.Linear):
    pass


class TwoLayers(nn.Module):
    """The second one sees some inputs only, as a vision tower those with pictures."""

    _no_split_modules = ("Layer",)

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.first = Layer(8, 8, dtype=dtype)
        self.second = Layer(8, 8, dtype=dtype)
        self.head = nn.Linear(8, 1, dtype=dtype)

    def forward(self, inputs: torch.Tensor, has_second: bool) -> torch.Tensor:
        hidden = self.first(inputs)
        if has_second:
            hidden = hidden + self.second(inputs)
        return self.head(hidden.tanh())


def weights_after_steps(
    world, dtype: torch.dtype, compute_dtype: torch.dtype, stays_gathered: bool
) -> tuple[list[torch.Tensor], list[float]]:
    """Weights after four steps of three micro-batches, and the norms of their gradients. All are
    clipped, the second is skipped, the third is begun anew after one and two micro-batches."""
    torch.manual_seed(0)
    model = wrap_model(
        TwoLayers(dtype), make_mesh(world, "fsdp"), compute_dtype, stays_gathered=stays_gathered
    )
    optimizer = GuardedAdamW(model, compute_dtype, weight_decay=0.01, max_grad_norm=0.1)

    def backward(inputs: torch.Tensor, step: int, num: int = 3) -> None:
        for i in range(num):
            with forward_context(model, last=i == 2):
                loss = model(inputs[i], has_second=(step + i) % 2 == 1).square().sum()
                (loss * (torch.inf if (step, i) == (1, 1) else 1.0)).backward()

    norms = []
    for step in range(4):
        inputs = torch.randn(3, 5, 8, dtype=dtype)
        if step == 2 and hasattr(model, "reset_iter_state"):  # of torch 2.13
            for num in (1, 2):
                backward(inputs, step, num)
                abandon_backward(model)
        backward(inputs, step)
        norms.append(optimizer.step(1e-2).reduce()["optim/grad_norm"])
    return [parameter.full_tensor() for parameter in model.parameters()], norms


@pytest.mark.parametrize(
    "dtype, compute_dtype",
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_gradients_reduced_once_a_step_are_those_of_each_micro_batch(
    case, dtype, compute_dtype, monkeypatch
):
    """To the last bit; also where one micro-batch leaves a layer out, first or last."""
    num_reductions = []
    reduce = _fsdp_param_group.foreach_reduce

    def counted(*arguments):
        num_reductions[-1] += 1
        return reduce(*arguments)

    monkeypatch.setattr(_fsdp_param_group, "foreach_reduce", counted)
    runs = []
    for stays_gathered in (True, False):
        num_reductions.append(0)
        runs.append(weights_after_steps(case.world, dtype, compute_dtype, stays_gathered))
    (weights, norms), (expected, expected_norms) = runs
    assert [math.isfinite(norm) for norm in norms] == [True, False, True, True]
    assert min(norm for norm in norms if math.isfinite(norm)) > 0.1, "the clip is active"
    assert norms[:1] + norms[2:] == expected_norms[:1] + expected_norms[2:]
    assert all(map(torch.equal, weights, expected))
    assert num_reductions[0] == 4 * 3  # units, of which the root is one
    assert num_reductions[1] > 2 * num_reductions[0]


def test_a_head_tied_to_the_embeddings_is_gathered_with_them_once(case, tmp_path):
    """Read in shards, too: transformers ties them after FSDP2 has counted the parameters."""
    wrap = partial(wrap_model, mesh=make_mesh(case.world, "fsdp"), compute_dtype=torch.bfloat16)
    policy = load_model(write_tied_llama(tmp_path / "model"), "sdpa", wrap=wrap)
    embeddings = policy.model.get_input_embeddings()
    with Casts(embeddings.weight.numel()) as casts, forward_context(policy):
        policy(case.minibatches[0].micro_batches[0])[0].sum().backward()
    assert casts.count == 1
    assert embeddings.weight is policy.model.get_output_embeddings().weight


# --- fill -----------------------------------------------------------------------------------------


def test_fill_writes_the_first_output_for_each_token_and_nothing_else(case):
    """Inputs are passed on, and the places of the other minibatch stay as they are."""
    result = torch.full((len(case.index),), torch.nan, dtype=torch.float64)
    first, second = case.minibatches
    case.packer.fill(result, case.policy, [first], 0.8)
    tokens_of_first = torch.cat([batch.token_index for batch in first.micro_batches])
    assert not result[tokens_of_first].isnan().any()
    assert result.isnan().sum() == second.num_tokens
    for batch in first.micro_batches:
        logprobs, _ = case.policy(batch, 0.8)
        assert torch.equal(result[batch.token_index], logprobs.detach())
    assert not result.requires_grad
    assert all(p.grad is None for p in case.policy.parameters())


def test_fill_takes_a_model_of_one_output(case):
    class Places(torch.nn.Module):
        def forward(self, batch):
            assert not torch.is_grad_enabled()
            return 2.0 * batch.token_index

    result = torch.zeros(len(case.index))
    case.packer.fill(result, Places(), case.minibatches)
    assert result.tolist() == [2.0 * i for i in range(len(case.index))]
    case.packer.fill(result, Places(), [])
    assert result.tolist() == [2.0 * i for i in range(len(case.index))]


@pytest.mark.parametrize("strategy", ["plain", "fsdp"])
def test_fill_continues_in_smaller_pieces_when_memory_runs_out(case, world, strategy, capsys):
    """In the middle of a forward, after the first micro-batch of the first minibatch."""
    skip_where_no_step_is_repeated(strategy)
    expected = torch.zeros(len(case.index), dtype=torch.float64)
    case.packer.fill(expected, case.policy, case.minibatches, 0.8)
    calls = []

    def fail_once(*_) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("injected")

    case.policy.model.model.layers[1].register_forward_pre_hook(fail_once)
    policy = case.policy
    if strategy == "fsdp":
        policy = wrap_model(policy, make_mesh(world, strategy), torch.float64)
    result = torch.full_like(expected, torch.nan)
    case.packer.fill(result, policy, case.minibatches, 0.8)
    assert (result - expected).abs().max() < 1e-12
    assert case.packer.budget == BUDGET // 2
    assert max(max(sizes(minibatch)) for minibatch in case.minibatches) <= BUDGET // 2
    message = "out of GPU memory: --micro-batch-tokens is now 256, the step is repeated"
    assert message in capsys.readouterr().out
    _, run = failing_backward(case, case.minibatches[0], [])
    run(case.policy, store_old_logprobs=False, scale=1.0)
    assert all(p.grad is not None for p in policy.parameters()), "and an update can follow"

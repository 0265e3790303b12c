"""GuardedAdamW: a run's own learning rate and decay, the count of skipped steps, frozen parameters.
The step itself is tested in test_grpo_math.py, its overflow on several ranks in
test_grpo_runs.py."""

import copy
import math

import pytest
import torch
from torch import nn

from common.checkpoint import Checkpoints
from common.metrics import Means
from common.optimizer import GuardedAdamW, lr_factor, make_moments, move_states
from common.shards import find_checkpoint


def make(dtype=torch.float32, **options) -> GuardedAdamW:
    torch.manual_seed(0)
    options = {"weight_decay": 0.0, "max_grad_norm": 0.0} | options
    return GuardedAdamW(nn.Linear(4, 3), dtype, **options)


def checkpoints(folder, world, adamw: GuardedAdamW) -> Checkpoints:
    options = {"save_every": 20, "keep": 2, "identity": {}, "micro_batch_tokens": 1024}
    return Checkpoints(folder, world, {"policy": adamw}, None, **options)


def give_gradient(model: nn.Module, seed: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = factor * torch.randn(parameter.shape, generator=generator)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("offload", [False, True])
def test_learning_rate_and_weight_decay_are_of_this_run_after_a_resume(tmp_path, world, offload):
    """The checkpoint's own would come with Adam's moments."""
    before = make(weight_decay=0.5)
    give_gradient(before.model, 1)
    before.step(0.1)
    checkpoints(tmp_path, world, before).save(1, None)

    now = make(weight_decay=0.02, offload=offload)
    found = find_checkpoint(tmp_path, "auto", world)
    assert checkpoints(tmp_path, world, now).resume(found) == 1
    assert torch.equal(weights(now.model), weights(before.model))
    plain = copy.deepcopy(before.model)
    twin = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.02)
    twin.load_state_dict({
        "state": before.optimizer.state_dict()["state"],
        "param_groups": twin.state_dict()["param_groups"],
    })  # fmt: skip
    for model in (plain, now.model):
        give_gradient(model, 2)
    twin.step()
    now.step(0.01)
    torch.testing.assert_close(weights(now.model), weights(plain), rtol=1e-6, atol=1e-7)
    assert not torch.equal(weights(now.model), weights(before.model))


def test_each_step_has_the_learning_rate_that_it_is_given():
    """AdamW's first step moves every weight by its rate, whatever the gradient."""
    for lr in (0.1, 0.003, 0.0):
        adamw = make()
        start = weights(adamw.model)
        give_gradient(adamw.model, 3)
        adamw.step(lr)
        moves = (weights(adamw.model) - start).abs().tolist()
        assert moves == pytest.approx([lr] * len(start), rel=1e-3)


def test_skipped_steps_are_counted_and_their_scale_halved():
    adamw = make(torch.float16)
    means = Means()
    assert adamw.scale == 2.0**14
    start = weights(adamw.model)
    for step, poison in enumerate([math.inf, math.nan, 0.0]):
        give_gradient(adamw.model, step, factor=adamw.scale)
        adamw.model.weight.grad[0, 0] += poison
        step_means = adamw.step(0.1)
        num_skipped = step_means.reduce()["optim/skipped_steps"]
        is_unmoved = torch.equal(weights(adamw.model), start)
        if poison:
            assert num_skipped == 1.0
            assert is_unmoved
        else:
            assert num_skipped == 0.0
            assert not is_unmoved
        means.merge(step_means)
    assert adamw.scale == 2.0**12
    assert means.reduce()["optim/skipped_steps"] == 2.0
    assert not math.isfinite(means.reduce()["optim/grad_norm"]), "it is reported, too"


def test_the_norm_is_unscaled_and_has_the_name_of_its_model():
    adamw = make(torch.float16, prefix="value", max_grad_norm=1e-3)
    give_gradient(adamw.model, 4)
    norm = math.sqrt(sum((p.grad**2).sum().item() for p in adamw.model.parameters()))
    give_gradient(adamw.model, 4, factor=adamw.scale)
    metrics = adamw.step(0.1).reduce()
    assert metrics == {"value/grad_norm": pytest.approx(norm, rel=1e-5), "optim/skipped_steps": 0.0}


def test_frozen_parameters_have_no_moments_and_the_betas_are_those_of_the_caller():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    adamw = GuardedAdamW(
        model, torch.float32, weight_decay=0.1, max_grad_norm=1.0, betas=(0.9, 0.95)
    )
    start = weights(model[0])
    model(torch.ones(2, 4)).sum().backward()
    adamw.step(0.1)
    (group,) = adamw.optimizer.param_groups
    assert group["params"] == list(model[1].parameters())
    assert group["betas"] == (0.9, 0.95)
    assert set(adamw.optimizer.state) == set(model[1].parameters())
    assert torch.equal(weights(model[0]), start)
    assert all(p.grad is None for p in model.parameters())
    assert adamw.scale == 1.0


@pytest.mark.parametrize("dtype, first", [(torch.float32, 0), (torch.float16, 14)])
def test_gradients_that_stay_infinite_end_the_run(dtype, first):
    """In half precision after the loss scale has come down to 1."""
    adamw = make(dtype)
    for step in range(first + 4):
        give_gradient(adamw.model, step, factor=math.inf)
        adamw.step(0.1)
    assert adamw.scale == 1.0
    give_gradient(adamw.model, 0)
    adamw.step(0.1)
    for _ in range(4):
        give_gradient(adamw.model, 0, factor=math.nan)
        adamw.step(0.1)
    give_gradient(adamw.model, 0, factor=math.nan)
    message = r"5 optimizer steps in a row had gradients that are not finite.*--learning-rate"
    with pytest.raises(SystemExit, match=message) as stop:
        adamw.step(0.1)
    assert "--dump-rollouts-every" not in str(stop.value), "which sft.py does not have"


@pytest.mark.parametrize("offload", [False, True])
def test_moments_that_a_resume_has_left_on_the_host_come_for_the_step(offload):
    """To the device before it, back to the host after it only with --offload optimizer."""
    adamw = make(offload=offload)
    give_gradient(adamw.model, 1)
    make_moments(adamw.optimizer)
    events = []
    adam_step = adamw.optimizer.step

    def record_move(optimizer, device, host_moments):
        events.append(device.type)
        move_states(optimizer, device, host_moments)

    def record_step():
        events.append("step")
        adam_step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.optimizer.move_states", record_move)
        patch.setattr(adamw.optimizer, "step", record_step)
        adamw.step(0.1)
    assert events == (["cpu", "step", "cpu"] if offload else ["cpu", "step"])


def test_out_of_memory_in_the_step_names_the_flags(monkeypatch):
    """The first one makes the moments. On a CPU more than is free is not taken."""

    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory.")

    adamw = make()
    give_gradient(adamw.model, 1)
    monkeypatch.setattr(adamw.optimizer, "step", fail)
    message = r"out of GPU memory in the optimizer's step: .*--offload optimizer"
    with pytest.raises(SystemExit, match=message):
        adamw.step(0.1)
    monkeypatch.setattr("common.memory.halving.free_memory", lambda: 2**20)
    monkeypatch.setattr(adamw.optimizer, "step", lambda: torch.empty(2**32, dtype=torch.uint8))
    give_gradient(adamw.model, 1)
    message = "out of memory in the optimizer's step: lower --engine-memory, or give the machine m"
    with pytest.raises(SystemExit, match=message):
        adamw.step(0.1)


@pytest.mark.parametrize("warmup_steps", [0.0, 0.1, 5])
def test_before_its_schedule_begins_the_rate_is_zero(warmup_steps):
    """As the policy's is while ppo.py trains the critic alone; with no warm-up this was a division
    by zero."""
    assert [lr_factor(step, 3, warmup_steps, "linear", 0.1) for step in (-2, -1)] == [0.0, 0.0]
    assert lr_factor(0, 3, warmup_steps, "linear", 0.1) > 0

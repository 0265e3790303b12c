"""The largest micro-batches of a run, rehearsed before anything is sampled."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, random_policy, run_script, steps_of
from vl import write_tiny_vl

import sft
from common import rehearsal
from common.distributed import World, make_mesh
from common.flags import Rollout
from common.models import load_model
from common.optimizer import GuardedAdamW
from common.packing import Packer
from common.pictures import PixelLimits
from common.rehearsal import Rehearsal, outcomes_of_ranks
from common.vision import load_vision

WORKER = ROOT / "tests" / "workers" / "rehearsed.py"
GROUPS = Rollout(
    prompts_per_step=99, samples_per_prompt=4, max_prompt_tokens=64, max_response_tokens=48
)


@pytest.fixture(autouse=True)
def on_a_cpu_too(monkeypatch):
    monkeypatch.setattr(rehearsal, "is_worthwhile", lambda device: True)


@pytest.fixture
def case(tiny_config, world, tmp_path):
    """Makes a rehearsal of a random policy, with its packer and AdamW."""

    def make(rollout=GROUPS, budget=600, attention="sdpa", policy=None, vision=None, offload=False):
        policy = policy or random_policy(tiny_config, torch.float32)
        adamw = GuardedAdamW(
            policy, torch.float32, weight_decay=0.0, max_grad_norm=1.0, offload=offload
        )
        packer = Packer(attention, budget, tmp_path / "run", world, vision)
        plan = SimpleNamespace(free_gb=8.0, update_gb=5.0)
        job = SimpleNamespace(world=world, mesh=make_mesh(world, "fsdp"), memory_plan=plan)
        rehearsed = Rehearsal(job, packer, rollout, [adamw])
        return SimpleNamespace(policy=policy, adamw=adamw, packer=packer, rehearsal=rehearsed)

    return make


def rehearse(case, world, max_tokens: int = 10**9) -> list[list]:
    """The units of the largest micro-batch of each attempt; memory runs out with more tokens."""
    attempts = []
    while case.rehearsal.is_due:
        with case.rehearsal.attempt() as minibatch:
            attempts.append(minibatch.micro_batches[0].units)
            sft.backward(case.policy, minibatch, world)
            if minibatch.micro_batches[0].input_ids.numel() > max_tokens:
                raise torch.OutOfMemoryError("injected")
    return attempts


@pytest.mark.parametrize(
    "budget, attention, expected",
    [
        # whole groups, and a prompt with one response in what is left
        (600, "sdpa", [[64, 48, 48, 48, 48], [64, 48, 48, 48, 48], [64, 24]]),
        # a shorter prompt where nothing else fits
        (300, "sdpa", [[64, 48, 48, 48, 48], [43, 1]]),
        (200, "sdpa", [[64, 48, 48, 40]]),
        # flash attention repeats the prompt
        (300, "flash", [[64, 48], [64, 48], [64, 12]]),
        # rows of flex attention are padded
        (300, "flex", [[64, 48, 48, 48, 48], [43, 1], [84]]),
        # a trajectory that exceeds the budget is alone
        (50, "sdpa", [[64, 48]]),
    ],
)
def test_the_longest_trajectories_fill_two_micro_batches(case, budget, attention, expected):
    with case(GROUPS, budget, attention).rehearsal.attempt() as minibatch:
        assert [batch.units for batch in minibatch.micro_batches] == [expected] * 2
        num_trained = sum(length for unit in expected for length in unit[1:])
        assert [len(batch.targets) for batch in minibatch.micro_batches] == [num_trained] * 2


def test_no_more_trajectories_than_a_step_has(case):
    few = Rollout(
        prompts_per_step=2, samples_per_prompt=3, max_prompt_tokens=64, max_response_tokens=48
    )
    for budget, expected in ((10_000, [2]), (208, [1, 1])):  # groups of each micro-batch
        with case(few, budget).rehearsal.attempt() as minibatch:
            assert [len(batch.units) for batch in minibatch.micro_batches] == expected


def test_a_group_that_is_cut_goes_on_in_the_second_micro_batch(case):
    """Four answers of a single prompt, of which a micro-batch takes one and a part."""
    single = replace(GROUPS, prompts_per_step=1)
    assert (single.samples_per_prompt, single.max_response_tokens) == (4, 48)
    with case(single, 128).rehearsal.attempt() as minibatch:
        assert [batch.units for batch in minibatch.micro_batches] == [[[64, 48, 16]]] * 2
    with case(replace(single, samples_per_prompt=3), 128).rehearsal.attempt() as minibatch:
        units = [batch.units for batch in minibatch.micro_batches]
        assert units == [[[64, 48, 16]], [[64, 48]]]


def test_a_rehearsal_learns_nothing(case, world, capsys):
    made = case()
    before = [p.detach().clone() for p in made.policy.parameters()]
    state = torch.get_rng_state()
    assert len(rehearse(made, world)) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, made.policy.parameters()))
    assert all(p.grad is None for p in made.policy.parameters())
    assert not made.adamw.optimizer.state
    assert torch.equal(torch.get_rng_state(), state)
    output = capsys.readouterr().out
    assert "rehearsal: micro-batches of 600 tokens, the largest of this run, fit (" in output
    assert "GB, planned 5.0; " in output
    assert "GB are left, planned 3.0\n" in output


@pytest.mark.parametrize("offload", [False, True])
def test_the_moments_have_their_place_when_an_update_needs_them(case, world, offload, monkeypatch):
    """During the backward; with --offload optimizer only after it, beside the gradients."""
    made = case(offload=offload)
    num_parameters = sum(p.numel() for p in made.policy.parameters())
    allocated = []  # (numbers, whether there are gradients)
    plain = GuardedAdamW.reserve_moments

    def reserve_moments(self):
        tensors = plain(self)
        has_gradients = any(p.grad is not None for p in self.model.parameters())
        allocated.append((sum(t.numel() for t in tensors), has_gradients))
        return tensors

    monkeypatch.setattr(GuardedAdamW, "reserve_moments", reserve_moments)
    rehearse(made, world)
    assert allocated == [(2 * num_parameters, offload)]


def test_moments_on_the_device_are_not_reserved_again(case):
    made = case()
    for parameter in made.policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    made.adamw.step(0.0)
    assert made.adamw.reserve_moments() == []


def test_micro_batches_are_halved_until_they_fit(case, world, tmp_path, capsys):
    made = case()
    attempts = rehearse(made, world, max_tokens=150)
    assert [sum(map(sum, units)) for units in attempts] == [600, 300, 150]
    assert made.packer.budget == 150
    assert (tmp_path / "run" / "micro_batch_tokens").read_text() == "150"
    assert all(p.grad is None for p in made.policy.parameters())
    output = capsys.readouterr().out
    assert output.startswith("rehearsal: micro-batches of 150 tokens")
    assert "; more did not fit: --micro-batch-tokens is now 150\n" in output
    assert output.count("\n") == 1


def test_a_budget_beyond_the_step_is_halved_from_what_the_step_has(case, world):
    few = Rollout(
        prompts_per_step=1, samples_per_prompt=4, max_prompt_tokens=64, max_response_tokens=48
    )
    made = case(few, budget=10_000)
    rehearse(made, world, max_tokens=200)
    assert made.packer.budget == 128


def test_a_trajectory_that_does_not_fit_ends_the_run_with_flags(case, world):
    made = case()
    message = (
        r"^out of memory before the first step: one trajectory of 112 tokens does not fit "
        r"\(--micro-batch-tokens 112\); add --gradient-checkpointing .* --max-response-tokens "
    )
    with pytest.raises(SystemExit, match=message):
        rehearse(made, world, max_tokens=50)


def test_another_error_is_no_lack_of_memory(case):
    with pytest.raises(RuntimeError, match="something else"), case().rehearsal.attempt():
        raise RuntimeError("something else")


def test_only_on_gpus_and_not_of_a_replay(case, monkeypatch, tmp_path):
    assert case().rehearsal.is_due
    assert not case(Rollout(replay=tmp_path)).rehearsal.is_due
    monkeypatch.undo()
    assert not case().rehearsal.is_due
    assert rehearsal.is_worthwhile(torch.device("cuda"))


def test_a_rank_that_fits_waits_and_one_that_ran_out_does_not_for_long(monkeypatch):
    store = torch.distributed.HashStore()
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(rehearsal, "PATIENCE_S", 0.0)
    two_ranks = World(0, 2, 0, torch.device("cpu"))
    assert outcomes_of_ranks("out of memory", two_ranks) == {"out of memory", "no answer"}

    answers = iter([False, False, True])

    def check(keys):
        if keys[0].endswith("/1") and next(answers, False):
            store.set(keys[0], "late")
        return plain_check(keys)

    plain_check = store.check
    slow_store = SimpleNamespace(set=store.set, get=store.get, check=check)
    monkeypatch.setattr(
        torch.distributed.distributed_c10d, "_get_default_store", lambda: slow_store
    )
    assert outcomes_of_ranks("fits", two_ranks) == {"fits", "late"}


def test_the_place_where_memory_runs_out_is_counted_in_collectives(case):
    made = case()
    before = made.rehearsal._num_collectives()
    for group in made.rehearsal.mesh.get_all_groups():
        torch.distributed.all_reduce(torch.ones(1), group=group)
    assert made.rehearsal._num_collectives() == before + 1


@pytest.mark.parametrize("other", ["fits", "out of GPU memory after 9999 collectives"])
def test_ranks_that_run_out_at_different_places_end_the_run(
    case, world, tmp_path, other, monkeypatch
):
    monkeypatch.setattr(rehearsal, "outcomes_of_ranks", lambda outcome, world: {outcome, other})
    message = (
        r"^the largest micro-batch does not fit on every rank \(.*out of GPU memory after \d+ coll"
        rf".*\): --micro-batch-tokens is now 300; the same command with --output-dir {tmp_path}/run"
    )
    with pytest.raises(SystemExit, match=message) as stop:
        rehearse(case(), world, max_tokens=1)
    assert other in str(stop.value)
    assert (tmp_path / "run" / "micro_batch_tokens").read_text() == "300"


@pytest.fixture(scope="module")
def sees(tmp_path_factory):
    """(policy, vision) of a tiny Qwen2.5-VL, whose pictures have at most 16 tokens."""
    folder = str(write_tiny_vl(tmp_path_factory.mktemp("tiny-vl")))
    vision = load_vision(folder, PixelLimits(784, 16 * 784, 16 * 784))
    return load_model(folder, "sdpa", vision=vision), vision


@pytest.mark.parametrize(
    "rollout, num_tokens, num_pictures",
    [
        # 16 and 9 of 25 tokens of a prompt, none in responses
        (Rollout(2, 2, max_prompt_tokens=25, max_response_tokens=20, max_images=16), 25, 2),
        (Rollout(2, 2, max_prompt_tokens=25, max_response_tokens=20, max_images=1), 16, 1),
        # 16 and 3 more in each of the two responses, whose last token is sampled
        (Rollout(2, 2, 25, 20, max_images=16, tools="visual"), 25 + 2 * 19, 6),
        (Rollout(2, 2, 25, 20, max_images=3, tools="visual"), 25 + 2 * 16, 4),
        # a conversation, as sft.py has it
        (Rollout(2, 1, 19, 1, max_images=20), 19, 2),
    ],
)
def test_pictures_of_the_largest_size_stand_where_pictures_may(
    case, world, sees, rollout, num_tokens, num_pictures
):
    policy, vision = sees
    made = case(rollout, budget=1, policy=policy, vision=vision)
    made.packer.budget = 65 if rollout.samples_per_prompt > 1 else 20  # a group, or a conversation
    with made.rehearsal.attempt() as minibatch:
        first, second = minibatch.micro_batches
        assert len(first.slots) == len(second.slots) == num_tokens
        assert len(first.media) == num_pictures
        assert not set(first.media) & set(second.media), "each prompt has pictures of its own"
        placeholder = vision.placeholders["image"]
        assert (first.input_ids[0, first.slots] == placeholder).all()
        sft.backward(policy, minibatch, world)
        assert policy.model.base_model.visual.blocks[0].attn.qkv.weight.grad is not None


# --- on ranks -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_halve_together_and_end_where_one_alone_runs_out(tmp_path):
    worker = ROOT / "tests" / "workers" / "two_rehearsals.py"
    done = run_script(worker, tmp_path, ranks=2, check=False)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    result = json.loads(line)
    assert result.pop("distance") < 1e-6, "of the gradients, from those before"
    assert result == {"attempts": [[256, 128, 64]] * 2, "moments": 0, "gradients": []}
    assert done.returncode != 0
    reason = (
        "the largest micro-batch does not fit on every rank (no answer, out of GPU memory after"
    )
    remedy = f"--micro-batch-tokens is now 128; the same command with --output-dir {tmp_path} goes"
    assert reason in done.stderr
    assert remedy in done.stderr
    assert (tmp_path / "micro_batch_tokens").read_text() == "128"


RL = ["--prompts-per-step", 8, "--samples-per-prompt", 4, "--max-response-tokens", 24]
RL += ["--max-rows", 64, "--engine", "hf", "--eval-rows", 2, "--temperature", 2]
RL += ["--learning-rate", 1e-4]
REWARD = """
def fn(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 7
"""
COMMANDS = {
    "grpo.py": ["--max-prompt-tokens", 64, *RL],
    "ppo.py": ["--max-prompt-tokens", 64, *RL, "--critic-warmup-steps", 1],
    "curiosity_rl.py": ["--model", "tiny-vl", *RL],
    "distill.py": ["--max-prompt-tokens", 64, *RL],
    "sft.py": ["--max-tokens", 88, "--batch-size", 24, "--eval-rows", 8],
}


@pytest.mark.slow
@pytest.mark.parametrize("script", COMMANDS)
def test_runs_are_what_they_would_be_with_smaller_micro_batches_from_the_start(tmp_path, script):
    """On two ranks, with no evaluation before the first step."""
    options = [*COMMANDS[script], "--dtype", "fp32", "--eval-every", 0, "--no-eval-before"]
    if script != "sft.py":
        (tmp_path / "reward.py").write_text(REWARD)
        options += ["--reward-function", f"{tmp_path}/reward.py:fn"]
    options += ["--total-steps", 2, "--output-dir"]
    tokens = 2048 if script == "curiosity_rl.py" else 256
    env = {"OUT_OF_MEMORY": f"{tokens // 2} 2"}
    rehearsed = tmp_path / "rehearsed"
    done = run_script(
        WORKER, script, *options, rehearsed, "--micro-batch-tokens", tokens, ranks=2, env=env
    )
    assert f"; more did not fit: --micro-batch-tokens is now {tokens // 2}\n" in done.stdout
    plain = tmp_path / "plain"
    run_script(script, *options, plain, "--micro-batch-tokens", tokens // 2, ranks=2)
    assert steps_of(rehearsed) == steps_of(plain)
    assert steps_of(plain)[2]["optim/grad_norm"] > 0
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (rehearsed, plain)]
    assert weights[0] == weights[1]

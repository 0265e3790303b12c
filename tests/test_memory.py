"""The memory plan, which stands before weights are loaded, against arithmetic by hand."""

import re
from types import SimpleNamespace

import psutil
import pytest
import torch
from helpers import ROOT, run_script
from safetensors.torch import load_file
from transformers import Qwen2Config

from common.distributed import World
from common.engine.hf import HuggingFaceEngine
from common.engine.vllm import VllmEngine
from common.flags import Machine, Rollout
from common.hub import FOLDERS
from common.memory import remembered_budget
from common.optimizer import move_states
from common.prepare.memory_plan import GIB, memory_phases, memory_plan, model_shape

HIDDEN, LAYERS, VOCAB, MLP = 512, 3, 100_000, 1024
# tied embeddings; per layer q, k, v with biases, o, three MLP matrices, two norms; the last norm
PARAMETERS = VOCAB * HIDDEN + LAYERS * (2 * HIDDEN**2 + 2 * (HIDDEN * 128) + 512 + 256 + 3 * HIDDEN * MLP + 2 * HIDDEN)
PARAMETERS += HIDDEN


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """What else runs on this one plays no part."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=16e9))


@pytest.fixture
def folder(tmp_path) -> str:
    """A config.json and nothing else."""
    Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(tmp_path)
    return str(tmp_path)


def plan(folder, ranks=1, trained=1, frozen=0, **changes) -> tuple[dict[str, float], str]:
    """({item: GB}, the text)"""
    rollout = Rollout(engine_memory=changes.pop("engine_memory", 2.0), engine_parallel=changes.pop("share", 1))
    machine = Machine(**{"micro_batch_tokens": 10_000} | changes)
    world = World(0, ranks, 0, torch.device("cpu"))
    text = memory_plan(rollout, machine, world, torch.bfloat16, [folder] * trained, [folder] * frozen)
    items = ("weights", "reference", "Adam", "rollout", "engine", "KV cache", "update", "gradients", "activations")
    return {item: float(re.search(rf"{item} ([\d.]+)", text)[1]) for item in items}, text


def assert_gigabytes(found: dict[str, float], **expected: float) -> None:
    for item, number in expected.items():
        assert found[item.replace("_", " ")] == pytest.approx(number / 1e9, abs=0.051), item


def test_one_rank(folder):
    found, text = plan(folder)
    weights, engine, cache, activations = 12 * PARAMETERS, 2 * PARAMETERS, 2 * 2**30, 10_000 * LAYERS * HIDDEN * 60
    assert_gigabytes(found, engine=engine, gradients=4 * PARAMETERS, activations=activations)
    assert found["KV cache"] == pytest.approx(2.1) and "warning" not in text
    assert_gigabytes(found, rollout=weights + engine + cache)
    # on a CPU the engine does not sleep, and one rank keeps the weights' casts for all micro-batches
    casts = 2 * PARAMETERS
    assert_gigabytes(found, update=weights + casts + 4 * PARAMETERS + activations + engine + cache)


def test_on_a_gpu_an_engine_that_sleeps_is_not_beside_the_update(folder):
    asleep, awake = (
        memory_phases(Rollout(sleep_level=level), Machine(), 1, torch.bfloat16, [folder], [], on_gpu=True)
        for level in (1, 0)
    )
    assert awake["update"] - asleep["update"] == pytest.approx((2 * PARAMETERS + 8 * 2**30) / 1e9, rel=1e-3)
    assert awake["rollout"] == asleep["rollout"]


def test_a_frozen_tower_is_not_trained():
    path = FOLDERS["tiny-vl"]
    whole, frozen = (model_shape(str(path), Machine(freeze_vision=flag)) for flag in (False, True))
    tower = sum(t.numel() for name, t in load_file(path / "model.safetensors").items() if "visual." in name)
    assert frozen == (whole[0], whole[1] - tower, whole[2]) and 0 < tower < whole[1] == whole[0]


def test_shards_and_replicas(folder):
    found, _ = plan(folder, ranks=4, trained=2, frozen=1)
    assert_gigabytes(found, weights=(2 * 4 + 2) * PARAMETERS / 4, Adam=2 * 8 * PARAMETERS / 4)
    assert_gigabytes(found, reference=2 * PARAMETERS / 4)
    found, _ = plan(folder, ranks=4, trained=2, frozen=1, shard_size=2)
    assert_gigabytes(found, weights=(2 * 4 + 2) * PARAMETERS / 2, Adam=2 * 8 * PARAMETERS / 2)
    found, _ = plan(folder, ranks=4, trained=2, frozen=1, strategy="ddp")
    assert_gigabytes(found, weights=(2 * 4 + 2) * PARAMETERS, Adam=2 * 8 * PARAMETERS)
    assert_gigabytes(found, gradients=4 * PARAMETERS)  # of one model at a time


def test_ranks_that_share_an_engine_divide_its_weights_and_have_caches_of_their_own(folder):
    apart, shared = (plan(folder, ranks=4, share=share)[0] for share in (1, 4))
    assert_gigabytes(shared, engine=2 * PARAMETERS / 4)
    assert shared["KV cache"] == apart["KV cache"] and shared["weights"] == apart["weights"]
    for phase in ("rollout", "update"):
        assert apart[phase] - shared[phase] == pytest.approx(1.5 * PARAMETERS / 1e9, abs=0.101)


def test_a_reference_on_the_host_takes_no_room(folder):
    """It visits the device while it computes log-probs, where there are no gradients and activations."""
    found, _ = plan(folder, frozen=1)
    assert_gigabytes(found, weights=(4 + 2) * PARAMETERS)
    found, _ = plan(folder, frozen=1, reference_offload=True)
    assert_gigabytes(found, weights=4 * PARAMETERS)


@pytest.mark.parametrize("tokens", [10, 100_000])
def test_moments_on_the_host_come_when_the_activations_are_gone(folder, tokens):
    here, _ = plan(folder, micro_batch_tokens=tokens)
    away, _ = plan(folder, micro_batch_tokens=tokens, optimizer_offload=True)
    assert here["rollout"] - away["rollout"] == pytest.approx(here["Adam"], abs=0.11)
    assert here["update"] - away["update"] == pytest.approx(min(here["Adam"], here["activations"]), abs=0.16)


def test_moving_the_moments_changes_nothing_but_their_place():
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = {name: value.clone() for name, value in optimizer.state[model.weight].items()}
    move_states(optimizer, torch.device("meta"))
    state = optimizer.state[model.weight]
    assert state["exp_avg"].is_meta and state["exp_avg_sq"].is_meta and torch.equal(state["step"], before["step"])
    optimizer.state[model.weight] = before
    move_states(optimizer, torch.device("cpu"))
    assert optimizer.state[model.weight].keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in optimizer.state[model.weight].items())


def test_what_may_not_fit_is_named(folder):
    assert "--micro-batch-tokens" in plan(folder, micro_batch_tokens=10**9)[1]
    assert plan(folder, micro_batch_tokens=10**7, gradient_checkpointing=True)[0]["activations"] == pytest.approx(
        10**7 * LAYERS * HIDDEN * 8 / 1e9, abs=0.051
    )
    _, text = plan(folder, engine_memory=0.9 * 16 / GIB, trained=1 + int(16 / (4 * PARAMETERS / 1e9)))
    assert "rollout may not fit: lower --engine-memory" in text


def test_a_cache_that_cannot_fit_is_refused_before_the_engine_starts(folder, tmp_path):
    """On two ranks each has half of the machine. A replay has no engine."""
    with pytest.raises(SystemExit, match=r"^--engine-memory 10000: of [\d.]+ GiB that are free .* leave [\d.]+$"):
        plan(folder, engine_memory=10_000.0)
    world, folders = World(0, 1, 0, torch.device("cpu")), [[folder], []]
    told = memory_plan(Rollout(engine_memory=1e4, replay=tmp_path), Machine(), world, torch.bfloat16, *folders)
    assert "warning: the rollout may not fit" in told


@pytest.mark.parametrize("phase", ["sync_weights", "wake", "step"])
@pytest.mark.parametrize("engine", [HuggingFaceEngine, VllmEngine])
def test_out_of_memory_in_an_engine_names_its_phase(engine, phase, monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    broken = SimpleNamespace(to=fail, record=fail, wake_up=fail, llm_engine=SimpleNamespace(step=fail))
    own = engine.__new__(engine)
    own.sleep_level, own.model, own.llm, own.books, own.dtype, own.device = 1, broken, broken, broken, None, None
    own.requests, own.max_sequences, own._generate_batch = [1], 1, fail

    arguments = {"sync_weights": ((), 1), "wake": ("weights",), "step": ()}[phase]
    expected = "the rollout" if phase == "step" else "the weight sync"
    with pytest.raises(
        SystemExit, match=f"out of GPU memory in {expected}: lower --engine-memory, add --optimizer-off"
    ):
        getattr(own, phase)(*arguments)


def test_an_engine_that_cannot_sleep_beside_others_names_the_flag():
    """vLLM compares the memory in use on the whole GPU, before and after."""

    def fail(**_):
        raise AssertionError("Memory usage increased after sleeping.")

    own = VllmEngine.__new__(VllmEngine)
    own.sleep_level, own.asleep, own.llm = 1, False, SimpleNamespace(sleep=fail)
    with pytest.raises(SystemExit, match=r"Memory usage increased .*: --sleep-level 0$"):
        own.sleep()
    assert not own.asleep


@pytest.mark.slow
def test_loading_takes_a_shard_and_a_layer():
    """Of each kind of model, on 2 and on 4 ranks: the benchmark fails above the bound."""
    table = run_script(ROOT / "tests" / "bench" / "loading.py", fresh=True, timeout=1800).stdout
    shares = [int(share) for share in re.findall(r"(\d+)% \|$", table, re.MULTILINE)]
    assert len(shares) == 14 and max(shares) <= 100 and min(shares) > 20


@pytest.mark.slow
def test_the_table_on_paper_is_what_its_benchmark_prints():
    printed = run_script(ROOT / "tests" / "bench" / "paper.py").stdout.strip()
    assert printed.count("\n") == 19 and printed in (ROOT / "docs" / "scaling.md").read_text()


@pytest.mark.parametrize("text, budget", [("512", 512), ("99999", 1024), ("", 1024), ("\udcff1k", 1024), (None, 1024)])
def test_what_is_no_budget_is_not_remembered(tmp_path, text, budget):
    if text is not None:
        (tmp_path / "micro_batch_tokens").write_text(text, errors="surrogateescape")
    assert remembered_budget(tmp_path, 1024) == budget

"""The memory plan, which is made before weights are loaded, against counts, measured peaks, and
arithmetic by hand."""

import json
import random
import re
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, memory_phases, run_script
from model_configs import published_config
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

import common.attention
from common.distributed import World
from common.engine.hf import HuggingFaceEngine
from common.engine.protocol import EngineConfig
from common.engine.vllm import VllmEngine, largest_graph
from common.flags import MAX_MICRO_BATCH_TOKENS, Machine, Rollout
from common.hub import FOLDERS
from common.job import Job, read_activation_memory
from common.manifest import MANIFEST
from common.memory.estimate import CUDA_CONTEXT, activation_bytes, keeps_gathered, phases_of
from common.memory.halving import remembered_budget
from common.memory.plan import GB_PER_GIB, MemoryPlan, memory_plan, no_rollout
from common.memory.remedies import largest_micro_batch
from common.memory.remedies import remedies as remedies_of
from common.memory.shape import ModelShape, TowerShape, model_shape
from common.optimizer import move_states
from common.rollout.opening import samples_of_engine

HIDDEN = 512
LAYERS = 3
VOCAB = 100_000
MLP = 1024
# q and o, k and v, their biases, three MLP matrices, two norms
LAYER = 2 * HIDDEN**2 + 2 * HIDDEN * 128 + 512 + 256 + 3 * HIDDEN * MLP + 2 * HIDDEN
# tied embeddings, layers, the last norm
PARAMETERS = VOCAB * HIDDEN + LAYERS * LAYER + HIDDEN
# runs of torch's tracker
TRACKED = [(1, 4096, False, False), (8, 2048, False, True), (4, 128, True, False)]


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Its memory does not depend on what else runs on it."""
    monkeypatch.setattr("common.memory.plan.free_memory", lambda: 16e9)


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


def qwen(
    hidden: int, mlp: int, layers: int, heads: int, key_heads: int, vocabulary: int, tied: bool
) -> ModelShape:
    """A Qwen2.5 by hand."""
    keys = hidden // heads * key_heads
    block = 2 * hidden * (hidden + keys) + hidden + 2 * keys + 3 * hidden * mlp + 2 * hidden
    head = 0 if tied else vocabulary * hidden
    root = vocabulary * hidden + head + hidden
    size = layers * block + root
    return ModelShape(
        parameters=size,
        frozen=0,
        adapters=0,
        root=root,
        head=head,
        block=block,
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        heads=heads,
        queries=hidden,
        keys=keys,
        norms=2 * hidden,
        head_norms=0,
        mlp=mlp,
        experts=0,
    )


SHAPES = {
    "0.5B": qwen(896, 4864, 24, 14, 2, 151_936, True),
    "1.5B": qwen(1536, 8960, 28, 12, 2, 151_936, True),
    "3B": qwen(2048, 11_008, 36, 16, 2, 151_936, True),
    "7B": qwen(3584, 18_944, 28, 28, 4, 152_064, False),
}
WITHOUT_ENGINE = Rollout(replay=Path("dump"))
ON_A_CARD = {"dtype": torch.bfloat16, "on_gpu": True}


def gigabytes(
    name: str, ranks: int = 1, rollout: Rollout = WITHOUT_ENGINE, critic=False, frozen=(), **flags
):
    """The phases of a Qwen2.5 on GPUs."""
    trained = [SHAPES[name]]
    if critic:
        trained.append(SHAPES[name])
    frozen_models = [SHAPES[name] for _ in frozen]
    machine = Machine(**flags)
    return phases_of(rollout, machine, ranks, trained=trained, frozen=frozen_models, **ON_A_CARD)


# --- what was measured, and what can be counted ---------------------------------------------------


@pytest.mark.parametrize(
    "name, flags, measured", [("1.5B", {}, 54.6), ("3B", {"gradient_checkpointing": True}, 54.5)]
)
def test_peaks_that_were_measured_on_an_h100(name, flags, measured):
    """Of an update by tests/bench/gpu.py, docs/results.md: compiled, micro-batches of 12,800
    tokens, no engine. Keys were repeated for each of 12 heads then, and layers gathered one at a
    time; now a rank alone keeps them."""
    estimate = gigabytes(name, micro_batch_tokens=12_800, compile=True, **flags)
    shape = SHAPES[name]
    repeated_keys = 0.0
    if name == "1.5B":
        repeated_keys = 12_800 * shape.layers * 4 * (shape.queries - shape.keys) / 1e9
    kept = 0 if flags else 2 * (shape.parameters - shape.root) / 1e9
    assert estimate["update"] + repeated_keys - kept == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("name", SHAPES)
def test_the_shape_of_a_folder_is_that_by_hand(name, tmp_path):
    shape = SHAPES[name]
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads * shape.keys // shape.queries,
        tie_word_embeddings=not shape.head,
    )
    config.save_pretrained(tmp_path)
    assert model_shape(str(tmp_path), Machine()) == shape


@pytest.mark.parametrize("name", SHAPES)
def test_activations_by_formula(name):
    """24 hidden + 8 mlp a layer, compiled 16 + 6, with as many heads of keys as of queries; these
    have fewer."""
    shape = SHAPES[name]
    missing_keys = 4 * (shape.queries - shape.keys)
    eager = 24.3 * shape.hidden + 8 * shape.mlp - missing_keys
    compiled = 16.4 * shape.hidden + 6 * shape.mlp - missing_keys
    for flag, layer in ((False, eager), (True, compiled)):
        machine = Machine(compile=flag, attention="flex")
        estimate = activation_bytes(shape, Rollout(), machine, torch.bfloat16)
        assert estimate == pytest.approx(shape.layers * layer, rel=0.015)
    machine = Machine(gradient_checkpointing=True, attention="flex")
    kept = 2 * shape.layers * shape.hidden + 6 * shape.hidden
    assert activation_bytes(shape, Rollout(), machine, torch.bfloat16) == kept


class Opaque(torch.autograd.Function):
    """An attention that keeps what flex attention and SDPA's kernels keep."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        return output


def flex_like(
    _, query: Tensor, key: Tensor, value: Tensor, mask: None, **options
) -> tuple[Tensor, None]:
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    return Opaque.apply(query, key, value).transpose(1, 2).contiguous(), None


def kept_bytes(
    config, attention: str, dtype: torch.dtype, checkpointing: bool, units: list[list[int]], device
) -> float:
    """Bytes of a token that autograd keeps of a model's forward, without its parameters."""
    AttentionInterface.register("flex_like", flex_like)
    kind = {"flex": "flex_like", "sdpa": "shared_prompts"}[attention]
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=kind)
        model.train()
        num_tokens = sum(map(sum, units))
        ids = torch.zeros(1, num_tokens, dtype=torch.int64)
        positions = torch.arange(num_tokens)[None]
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tensors = (*model.parameters(), *model.buffers())
    storages_of_model = {tensor.untyped_storage()._cdata for tensor in tensors}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in storages_of_model:
            kept[storage._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        options = {"units": units} if attention == "sdpa" else {}
        model.base_model(
            input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False, **options
        )
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / num_tokens


SMALL = {"hidden_size": 512, "num_hidden_layers": 4, "vocab_size": 512}
GROUPED = SMALL | {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1536}
ODD = SMALL | {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_size": 768,
    "intermediate_size": 2048,
}
SPARSE = GROUPED | {
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
}


KEPT = [
    ("qwen2", Qwen2Config(**GROUPED), "meta"),
    ("qwen2_odd", Qwen2Config(**ODD), "meta"),
    ("llama", LlamaConfig(**GROUPED), "meta"),
    ("qwen3", Qwen3Config(**GROUPED, head_dim=128), "meta"),
    ("qwen3_moe", Qwen3MoeConfig(**SPARSE), "cpu"),
]
CASES = [
    pytest.param(
        config,
        device,
        dtype,
        id=f"{name}-{dtype}",
        # experts compute on a CPU, which takes long
        marks=pytest.mark.slow if (device, dtype) == ("cpu", torch.float32) else [],
    )
    for name, config, device in KEPT
    for dtype in (torch.bfloat16, torch.float32)
]


@pytest.mark.parametrize("config, device, dtype", CASES)
def test_activations_are_those_that_autograd_keeps(config, device, dtype, tmp_path, monkeypatch):
    """Eager; with flex attention and SDPA, whose kernels keep their inputs, their outputs and a sum
    for each head."""
    config.save_pretrained(tmp_path)
    shape = model_shape(str(tmp_path), Machine())
    rollout = Rollout(max_prompt_tokens=64, max_response_tokens=96)
    units = [[64, 96]]

    def opaque_attention(query, key, value, **_):
        return Opaque.apply(query, key, value)

    monkeypatch.setattr(common.attention, "scaled_dot_product_attention", opaque_attention)
    ways = [("flex", False), ("flex", True)]
    if device == "meta":  # on a CPU short segments do not reach SDPA
        ways.append(("sdpa", False))
    for attention, checkpointing in ways:
        machine = Machine(attention=attention, gradient_checkpointing=checkpointing)
        planned = rollout
        if attention == "sdpa":
            # the plan counts keys of a prompt for each response; here there is one response
            planned = replace(rollout, max_response_tokens=120)
        expected = activation_bytes(shape, planned, machine, dtype)
        kept = kept_bytes(config, attention, dtype, checkpointing, units, device)
        assert kept == pytest.approx(expected, rel=0.05), (attention, checkpointing)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, tokens, tied, checkpointing", TRACKED)
def test_what_fsdp2_gathers_is_what_torchs_tracker_counts(
    ranks, tokens, tied, checkpointing, tmp_path
):
    """It counts neither moments nor the head's chunk. The plan may be somewhat more, and never
    less."""
    Qwen2Config(
        hidden_size=2048,
        intermediate_size=11_008,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=2,
        vocab_size=151_936,
        tie_word_embeddings=tied,
    ).save_pretrained(tmp_path)
    arguments = [ranks, tokens, tmp_path]
    if checkpointing:
        arguments.append("checkpointing")
    output = run_script("tests/workers/tracked_memory.py", *arguments, fresh=True).stdout
    tracked = float(output.split()[-1])
    rollout = replace(WITHOUT_ENGINE, max_prompt_tokens=1, max_response_tokens=1)
    machine = Machine(micro_batch_tokens=tokens, gradient_checkpointing=checkpointing)
    gb = memory_phases(rollout, machine, ranks, trained=[str(tmp_path)], frozen=[], **ON_A_CARD)
    planned = max(gb["backward"], gb["reduction"]) - gb["Adam"] - gb["NCCL"]
    assert 0.999 * tracked <= planned <= 1.35 * tracked


# --- what fits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gpus, card, flags", [(2, 80, {}), (1, 141, {}), (4, 40, {"offload": "optimizer"})]
)
def test_7b_does_not_fit(gpus, card, flags):
    """At 92 % of the card, with the defaults of an engine beside it."""
    flags |= {"gradient_checkpointing": True, "micro_batch_tokens": 4096}
    gb = gigabytes("7B", gpus, Rollout(), **flags)
    assert max(gb["rollout"], gb["update"]) > 0.92 * card


@pytest.mark.parametrize(
    "options", [[], ["--lora-rank", "16", "--engine-memory", "4", "--tokens", "4096"]]
)
def test_the_tables_of_what_fits_are_what_their_commands_print(options, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "bench"))
    import memory
    import tyro

    memory.main(tyro.cli(memory.Args, args=options))
    printed = capsys.readouterr().out.partition("\n\n")[0]
    page = (ROOT / "docs" / "scaling.md").read_text()
    command = " ".join(["python tests/bench/memory.py", *options])
    assert printed.count("\n") > 5
    assert printed in page
    assert command in " ".join(page.split())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name, ranks", [("0.5B", 1), ("1.5B", 1), ("7B", 8)])
def test_the_largest_micro_batch_fits_and_a_larger_one_does_not(name, ranks, checkpointing):
    def phases(rollout: Rollout, machine: Machine, ranks: int) -> dict[str, float]:
        return phases_of(rollout, machine, ranks, trained=[SHAPES[name]], frozen=[], **ON_A_CARD)

    machine = Machine(gradient_checkpointing=checkpointing)
    tokens = largest_micro_batch(phases, Rollout(), machine, ranks, room_gb=72.0)
    assert tokens >= 1024
    assert tokens % 128 == 0
    fitting = replace(machine, micro_batch_tokens=tokens)
    assert phases(Rollout(), fitting, ranks)["update"] <= 72.0
    larger = replace(machine, micro_batch_tokens=tokens + 128)
    assert phases(Rollout(), larger, ranks)["update"] > 72.0
    assert largest_micro_batch(phases, Rollout(), machine, ranks, room_gb=2.0) == 0


def planned_on_gpus(
    monkeypatch,
    name: str,
    free: float,
    ranks: int,
    rollout: Rollout,
    most_tokens: int = MAX_MICRO_BATCH_TOKENS,
    **flags,
) -> MemoryPlan:
    """The plan of a run on GPUs; `free`: gigabytes."""
    shape = SHAPES[name]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free * 1e9), int(80e9)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr("common.memory.plan.model_shape", lambda *_: shape)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    world = World(0, ranks, 0, torch.device("cuda"))
    return memory_plan(
        rollout,
        Machine(**flags),
        world,
        torch.bfloat16,
        ["folder"],
        [],
        most_tokens=most_tokens,
    )


def changed(advice: str, ranks: int, rollout: Rollout, flags: dict) -> tuple[int, Rollout, dict]:
    """(ranks, rollout, flags) of a run that follows the plan's advice."""
    gpus = re.search(r"(\d+) GPUs", advice)
    if gpus:
        ranks = int(gpus[1])
    for name, value in re.findall(r"--([\w-]+)(?: ([\d.]+|[a-z,]+))?", advice.partition(" on ")[0]):
        name = name.replace("-", "_")
        if name == "offload":
            flags = flags | {name: value}
        elif name == "engine_memory":
            rollout = replace(rollout, engine_memory=float(value))
        elif name in vars(rollout):
            rollout = replace(rollout, **{name: int(value)})
        else:
            number = float(value) if "." in value else int(value or 1)
            flags = flags | {name: number if value else True}
    return ranks, rollout, flags


CARDS = [(22, 1), (22, 8), (38, 4), (78, 1), (78, 2)]  # GB, ranks
TYPED = [({}, None), ({}, 8), ({"micro_batch_tokens": 16_384}, 8)]  # flags, cache
ADVISED = random.Random(0).sample(list(product(SHAPES, CARDS, [0, 1], TYPED)), 30)


@pytest.mark.parametrize(
    "name, card, sleep_level, typed",
    [
        pytest.param(*case, marks=[] if place < 5 else pytest.mark.slow)
        for place, case in enumerate(ADVISED)
    ],
)
def test_what_is_advised_fits(name, card, sleep_level, typed, monkeypatch):
    free, ranks = card
    flags, cache = typed
    rollout = Rollout(sleep_level=sleep_level, engine_memory=cache)
    try:
        text = planned_on_gpus(monkeypatch, name, free, ranks, rollout, **flags).text
    except SystemExit as refusal:
        assert "--engine-memory" in str(refusal)
        return
    assert ("warning" in text) == (" may not fit; " in text)
    if "it would " in text:
        advice = text.partition("may not fit; it would ")[2]
        ranks, rollout, changed_flags = changed(advice, ranks, rollout, flags)
        # no advice about what a run chooses by itself
        if not flags:
            assert "--micro-batch-tokens" not in advice
        if cache is None and sleep_level:
            assert "--engine-memory" not in advice
        changed_plan = planned_on_gpus(monkeypatch, name, free, ranks, rollout, **changed_flags)
        assert "warning" not in changed_plan.text, advice


@pytest.mark.parametrize(
    "name, free, ranks, flags, advice",
    [
        ("1.5B", 70, 1, {"micro_batch_tokens": 16_384}, "with --compile"),
        (
            "1.5B",
            73,
            1,
            {"compile": True, "micro_batch_tokens": 24_576},
            r"with --micro-batch-tokens 2[01]\d{3}",
        ),
        (
            "7B",
            72,
            2,
            {"compile": True, "micro_batch_tokens": 16_384},
            r"with --gradient-checkpointing --engine-memory 5 .*",
        ),
        (
            "7B",
            64,
            2,
            {"gradient_checkpointing": True, "micro_batch_tokens": 4096},
            "with --offload optimizer",
        ),
        (
            "7B",
            40,
            1,
            {"micro_batch_tokens": 16_384},
            r"with --compile --activation-memory 0.5 --offload optimizer "
            r"--micro-batch-tokens 6\d{3} on 4 GPUs",
        ),
        (
            "0.5B",
            12,
            8,
            {"compile": True, "strategy": "ddp", "micro_batch_tokens": 16_384},
            r"with --activation-memory 0.5 --strategy fsdp .*",
        ),
    ],
)
def test_the_cheapest_change_is_named(name, free, ranks, flags, advice, monkeypatch):
    text = planned_on_gpus(monkeypatch, name, free, ranks, Rollout(engine_memory=8), **flags).text
    words = text.partition("may not fit; it would ")[2]
    assert re.fullmatch(advice, words), words


def test_what_is_on_the_host_already_does_not_hide_what_could_follow_it():
    """The plan counts no reference then."""
    machine = Machine(offload="reference", strategy="ddp")
    (offloads,) = [
        remedies
        for remedies in map(list, remedies_of(Rollout(), machine, 1, True, False, []))
        if any("--offload" in remedy.words for remedy in remedies)
    ]
    assert [remedy.words for remedy in offloads] == ["", "--offload optimizer,reference"]


# --- the micro-batch that a run chooses -----------------------------------------------------------


def update_of(name: str, ranks: int, rollout: Rollout, tokens: int, flags: dict) -> float:
    return gigabytes(name, ranks, rollout, micro_batch_tokens=tokens, **flags)["update"]


@pytest.mark.parametrize("free", [38, 50, 78])
@pytest.mark.parametrize("name, ranks", [("0.5B", 1), ("1.5B", 1), ("3B", 4), ("7B", 8)])
@pytest.mark.parametrize("flags", [{}, {"gradient_checkpointing": True}])
def test_a_micro_batch_is_what_fits_into_nine_tenths(name, ranks, free, flags, monkeypatch):
    """A power of two: the next one would not fit, or be more than 16,384. The longest episode fits
    into any."""
    rollout = Rollout()
    plan = planned_on_gpus(monkeypatch, name, free, ranks, rollout, **flags)
    tokens = plan.micro_batch_tokens
    room = 0.9 * free
    assert 1024 <= tokens <= 16_384
    assert tokens.bit_count() == 1
    assert f"--micro-batch-tokens {tokens} chosen to fit into 90% of what is free" in plan.text
    assert not plan.refusal
    fits = update_of(name, ranks, rollout, tokens, flags) <= room
    assert fits or tokens == 1024
    assert tokens == 16_384 or update_of(name, ranks, rollout, 2 * tokens, flags) > room
    assert ("the update may not fit" in plan.text) == (not fits)


def test_a_micro_batch_holds_the_longest_episode(monkeypatch):
    """An episode is never divided, and its length need not be a power of two. A script may choose
    at most 8,192 tokens."""
    flags = {"name": "0.5B", "ranks": 1, "attention": "flex"}
    for longest, free, expected in (
        (20_000, 78, 20_000),
        (3000, 19, 4096),
        (3000, 16.8, 3000),
        (1500, 14, 1500),
    ):
        rollout = Rollout(
            max_prompt_tokens=500, max_response_tokens=longest - 500, engine_memory=0.5
        )
        plan = planned_on_gpus(monkeypatch, free=free, rollout=rollout, **flags)
        assert plan.micro_batch_tokens == expected
        assert "warning" not in plan.text, (longest, plan)
    for longest, expected in ((1024, 8192), (10_000, 10_000)):
        plan = planned_on_gpus(
            monkeypatch, free=78, rollout=no_rollout(longest), most_tokens=8192, **flags
        )
        assert plan.micro_batch_tokens == expected
        assert "rollout" not in plan.text


def test_an_engine_that_stays_awake_is_taken_off_first(monkeypatch):
    asleep = planned_on_gpus(monkeypatch, "1.5B", 50, 1, Rollout(sleep_level=1))
    awake = planned_on_gpus(monkeypatch, "1.5B", 50, 1, Rollout(sleep_level=0))
    assert awake.micro_batch_tokens < asleep.micro_batch_tokens


def planned_on_a_cpu(monkeypatch, folder, free: float, trained: int = 1, **flags) -> MemoryPlan:
    """`free`: gigabytes; flags of both groups."""
    monkeypatch.setattr("common.memory.plan.free_memory", lambda: 1e9 * free)
    rollout = Rollout()
    for name in ("engine_memory", "eval_only"):
        if name in flags:
            setattr(rollout, name, flags.pop(name))
    world = World(0, 1, 0, torch.device("cpu"))
    return memory_plan(rollout, Machine(**flags), world, torch.bfloat16, [folder] * trained, [])


def test_a_critic_is_taken_off_first(folder, monkeypatch):
    alone = planned_on_a_cpu(monkeypatch, folder, 4, trained=1).micro_batch_tokens
    with_critic = planned_on_a_cpu(monkeypatch, folder, 4, trained=2).micro_batch_tokens
    assert 1024 < with_critic < alone


def test_what_a_cpu_has_no_memory_for_is_refused_with_the_cheapest_change(folder, monkeypatch):
    """The kernel would kill it. A number that the user gives is tried, and an evaluation has no
    update."""
    machine = Machine(micro_batch_tokens=1024, attention="sdpa")  # the longest episode, alone
    phases = memory_phases(Rollout(), machine, 1, torch.bfloat16, [folder], [], on_gpu=False)
    needed = phases["update"]
    plan = planned_on_a_cpu(monkeypatch, folder, 1.001 * needed / 0.9)
    assert plan.micro_batch_tokens >= 1024
    assert plan.refusal == ""
    assert "warning" not in plan.text

    free = 0.999 * needed / 0.9
    refusal = planned_on_a_cpu(monkeypatch, folder, free).refusal
    assert refusal.startswith(
        "the update would not fit into 90% of what is free, even with one episode of 1024 tokens"
    )
    assert "; it would with --engine-memory 0.25;" in refusal
    assert refusal.endswith("; --micro-batch-tokens 1024 tries it all the same")
    assert planned_on_a_cpu(monkeypatch, folder, free, engine_memory=0.25).refusal == ""

    typed = planned_on_a_cpu(monkeypatch, folder, free, micro_batch_tokens=10_000)
    assert typed.micro_batch_tokens == 10_000
    assert typed.refusal == ""
    assert "the update may not fit" in typed.text
    evaluation = planned_on_a_cpu(monkeypatch, folder, free, eval_only=True)
    assert evaluation.refusal == ""
    assert "warning" not in evaluation.text


# --- the share of the activations that a run chooses ----------------------------------------------

SHARES = (1.0, 0.7, 0.5, 0.3)
AUTO = {"compile": True, "activation_memory": "auto"}


def planned_8b(monkeypatch, folder, longest: int, ranks: int, **flags) -> MemoryPlan:
    """Of a Qwen3-8B on cards of 80 GB; prompts have at most 1,024 tokens."""
    published_config("Qwen3-8B").save_pretrained(folder)
    monkeypatch.setitem(SHAPES, "8B", model_shape(str(folder), Machine()))
    rollout = Rollout(max_prompt_tokens=1024, max_response_tokens=longest - 1024)
    return planned_on_gpus(monkeypatch, "8B", 80 - CUDA_CONTEXT, ranks, rollout, **flags)


@pytest.mark.parametrize("longest, share", [(17_408, 0.3), (2048, 1.0)])
def test_auto_keeps_as_many_activations_as_fit(longest, share, monkeypatch, tmp_path):
    """A trajectory of 17,408 tokens, as of the table of tasks in docs/scaling.md; and a short
    one, in micro-batches of as many tokens."""
    flags = {"micro_batch_tokens": longest}
    plan = planned_8b(monkeypatch, tmp_path, longest, ranks=8, **AUTO, **flags)
    assert plan.activation_memory == share
    assert plan.micro_batch_tokens == longest
    assert plan.update_gb <= 0.9 * plan.free_gb
    left_gb = plan.free_gb - plan.update_gb
    line = f"--activation-memory auto: {share:g}, with which the update leaves {left_gb:.1f} GB"
    assert plan.text.splitlines()[1:] == [line]
    for larger in SHARES[: SHARES.index(share)]:
        flags = {"compile": True, "activation_memory": larger, "micro_batch_tokens": longest}
        typed = planned_8b(monkeypatch, tmp_path, longest, ranks=8, **flags)
        assert typed.update_gb > 0.9 * plan.free_gb
        assert "auto" not in typed.text


@pytest.mark.parametrize("flags", [{}, {"micro_batch_tokens": 27_648}])
def test_auto_that_fits_with_no_share_names_what_does(flags, monkeypatch, tmp_path):
    """Into nine tenths, which is what a plan fills by itself."""
    plan = planned_8b(monkeypatch, tmp_path, longest=27_648, ranks=8, **AUTO, **flags)
    assert plan.activation_memory == 0.3
    assert 0.9 * plan.free_gb < plan.update_gb < plan.free_gb
    line, warning = plan.text.splitlines()[1:]
    assert line == "--activation-memory auto: 0.3, the least; the update does not fit with it"
    assert warning == (
        "warning: the update may not fit; it would with "
        "--gradient-checkpointing (in place of --activation-memory)"
    )
    advised = flags | {"compile": True, "gradient_checkpointing": True}
    assert "warning" not in planned_8b(monkeypatch, tmp_path, 27_648, ranks=8, **advised).text


@pytest.mark.parametrize("free", [40, 60, 78])
@pytest.mark.parametrize("name, ranks", [("1.5B", 1), ("7B", 8)])
def test_auto_weighs_the_share_against_micro_batches(name, ranks, free, monkeypatch):
    """It costs no more than any share that is typed, with the micro-batch chosen for that."""
    cost = {1.0: 0.0, 0.7: 0.02, 0.5: 0.05, 0.3: 0.15}

    def cost_of(plan: MemoryPlan) -> float:
        return cost[plan.activation_memory] + 1500 / plan.micro_batch_tokens

    chosen = planned_on_gpus(monkeypatch, name, free, ranks, Rollout(), **AUTO)
    costs = []
    for share in SHARES:
        flags = AUTO | {"activation_memory": share}
        typed = planned_on_gpus(monkeypatch, name, free, ranks, Rollout(), **flags)
        if "the update may not fit" not in typed.text:
            costs.append(cost_of(typed))
    assert cost_of(chosen) == min(costs)


@pytest.mark.parametrize(
    "rollout, flags",
    [
        (Rollout(), {"compile": False}),
        (Rollout(), {"gradient_checkpointing": True}),
        (Rollout(eval_only=True), {}),
    ],
)
def test_auto_is_all_where_a_share_has_no_effect(rollout, flags, monkeypatch):
    """As a fork's default; on the command line the first two are refused."""
    plan = planned_on_gpus(monkeypatch, "7B", 78, 8, rollout, **AUTO | flags)
    assert plan.activation_memory == 1.0
    assert "auto" not in plan.text


def auto_job(world: World) -> SimpleNamespace:
    """What a job with --activation-memory auto has when its memory is planned."""
    return SimpleNamespace(
        machine=Machine(**AUTO, dtype="bf16"),
        world=world,
        mesh=None,
        compute_dtype=torch.bfloat16,
        attention="flex",
        compile=True,
        model_folder="folder",
        vision=None,
        max_model_len=None,
        micro_batch_tokens=None,
        activation_memory="auto",
        identity={},
    )


def test_a_chosen_share_goes_to_the_layers_and_into_checkpoints(world, tmp_path, monkeypatch):
    """A resume takes it again, since other shares round differently. A replay has no checkpoint,
    or one that says it."""
    plan = MemoryPlan("", 4096, 0.3, engine_memory=8.0, free_gb=78.0, update_gb=60.0)
    seen = []

    def planned(rollout: Rollout, machine: Machine, *_, **__) -> MemoryPlan:
        seen.append(machine.activation_memory)
        return replace(plan, activation_memory=0.3)

    monkeypatch.setattr("common.job.memory_plan", planned)
    job = auto_job(world)
    options = {"trained": ["folder"], "frozen": []}
    with pytest.raises(SystemExit, match=r"^--replay repeats every bit: .* give the number "):
        Job.plan_memory(job, Rollout(), **options, replayed_tokens=4096)
    Job.plan_memory(job, Rollout(), **options)
    assert seen == ["auto"]
    assert Job._model_options(job, trained=True)["activation_memory"] == 0.3
    assert "activation_memory" not in Job._model_options(job, trained=False)

    (tmp_path / MANIFEST).write_text(json.dumps({"files": {}, **job.identity}))
    resumed = auto_job(world)
    resumed.activation_memory = read_activation_memory(tmp_path)
    Job.plan_memory(resumed, Rollout(), **options, replayed_tokens=4096)
    assert seen[1:] == [0.3]
    assert resumed.identity == job.identity


@pytest.mark.parametrize("saved, share", [({}, "auto"), ({"activation_memory": [1]}, None)])
def test_a_checkpoint_without_a_share_leaves_it_to_the_plan(saved, share, tmp_path):
    (tmp_path / MANIFEST).write_text(json.dumps({"files": {}, **saved}))
    if share:
        assert read_activation_memory(tmp_path) == share
        return
    with pytest.raises(SystemExit, match=r"its activation_memory is \[1\]\): --resume never"):
        read_activation_memory(tmp_path)


# --- the KV cache that a run chooses --------------------------------------------------------------


@pytest.mark.parametrize(
    "name, ranks, free, share", [("0.5B", 1, 78, 1), ("1.5B", 1, 38, 1), ("7B", 8, 78, 4)]
)
@pytest.mark.parametrize("engine", ["vllm", "hf"])
def test_a_cache_is_what_sampling_leaves_of_nine_tenths(
    name, ranks, free, share, engine, monkeypatch
):
    """Beside weights, moments and the engine's work space; a quarter of a GiB more would not
    fit."""
    rollout = Rollout(engine=engine, engine_parallel=share if engine == "vllm" else 1)
    plan = planned_on_gpus(monkeypatch, name, free, ranks, rollout)
    cache = plan.engine_memory
    assert cache > 4
    assert cache * 4 % 1 == 0
    assert f"; --engine-memory {cache:g} and --micro" in plan.text
    fitting = gigabytes(name, ranks, replace(rollout, engine_memory=cache))
    assert fitting["rollout"] <= 0.9 * free
    larger = gigabytes(name, ranks, replace(rollout, engine_memory=cache + 0.25))
    assert larger["rollout"] > 0.9 * free
    small_cache = replace(rollout, engine_memory=1)
    other_plan = planned_on_gpus(monkeypatch, name, free, ranks, small_cache)
    assert plan.micro_batch_tokens == other_plan.micro_batch_tokens, "the engine sleeps by then"


def test_other_caches_are_as_they_are_typed_or_have_a_default(folder, monkeypatch):
    """An engine that stays awake would leave nothing to the update."""
    for rollout, expected in (
        (Rollout(engine_memory=3), 3),
        (Rollout(sleep_level=0), 8),
        (WITHOUT_ENGINE, 8),
    ):
        plan = planned_on_gpus(monkeypatch, "1.5B", 78, 1, rollout)
        assert plan.engine_memory == expected
        assert "; --engine-memory" not in plan.text
    monkeypatch.undo()
    assert planned_on_a_cpu(monkeypatch, folder, 16).engine_memory == 0.5


def test_a_cache_of_a_full_card_still_holds_an_episode(monkeypatch):
    plan = planned_on_gpus(monkeypatch, "7B", 40, 1, Rollout(max_response_tokens=16_000))
    assert plan.engine_memory == 1
    assert "warning: the rollout and the update may not fit" in plan.text


@pytest.mark.parametrize(
    "num_samples, card, gib, args, size",
    [
        (512, "NVIDIA H100 80GB HBM3", 79, {}, None),  # as many as vLLM's own graphs
        (513, "NVIDIA H100 80GB HBM3", 79, {}, 528),
        (4096, "NVIDIA H200", 140, {}, 1024),
        (4096, "NVIDIA H200", 140, {"max_num_seqs": 600}, 608),
        (4096, "NVIDIA A100-SXM4-80GB", 79, {}, None),  # 256 at once
        (4096, "NVIDIA GeForce RTX 4090", 24, {}, None),
        (4096, "NVIDIA H200", 140, {"compilation_config": {"mode": 0}}, None),
    ],
)
def test_cuda_graphs_hold_the_samples_under_way(num_samples, card, gib, args, size, monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (gib * 2**30, gib * 2**30))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: card)
    config = EngineConfig(
        "model",
        torch.bfloat16,
        World(0, 1, 0, torch.device("cuda")),
        [],
        1024,
        num_samples=num_samples,
        args=args,
    )
    assert largest_graph(config) == size


def test_samples_of_an_engine_are_those_of_its_ranks():
    rollout = Rollout(prompts_per_step=129, samples_per_prompt=8)
    assert samples_of_engine(rollout, World(0, 8, 0, torch.device("cuda"))) == 17 * 8
    rollout.engine_parallel = 4
    assert samples_of_engine(rollout, World(0, 8, 0, torch.device("cuda"))) == 4 * 17 * 8


# --- terms ----------------------------------------------------------------------------------------


ITEMS = ["weights", "reference", "Adam", "rollout", "engine", "KV cache"]
ITEMS += ["update", "gradients", "activations"]


def plan(folder, ranks=1, trained=1, frozen=0, **changes) -> tuple[dict[str, float], str]:
    """({item: GB}, the text) on a CPU."""
    rollout = Rollout(
        engine_memory=changes.pop("engine_memory", 2.0), engine_parallel=changes.pop("share", 1)
    )
    machine = Machine(**{"micro_batch_tokens": 10_000} | changes)
    world = World(0, ranks, 0, torch.device("cpu"))
    folders = [[folder] * trained, [folder] * frozen]
    text = memory_plan(rollout, machine, world, torch.bfloat16, *folders).text
    gb = {}
    for item in ITEMS:
        if item == "reference" and item not in text:
            gb[item] = 0.0  # a plan without one, or with one on the host, does not name it
            continue
        gb[item] = float(re.search(rf"{item} ([\d.]+)", text)[1])
    return gb, text


def assert_gigabytes(gb: dict[str, float], **expected: float) -> None:
    for item, number in expected.items():
        assert gb[item.replace("_", " ")] == pytest.approx(number / 1e9, abs=0.051), item


def test_one_rank(folder):
    gb, text = plan(folder)
    weights = 12 * PARAMETERS
    engine = 2 * PARAMETERS
    cache = 2 * 2**30
    # norms in float32, queries, keys of prompt and response for each head, outputs twice, MLP; the
    # last norm
    layer = 16 * HIDDEN + 2 * HIDDEN + 4 * 2 * HIDDEN + 4 * HIDDEN + 4 * 8 + 8 * MLP
    activations = 10_000 * (LAYERS * layer + 6 * HIDDEN)
    assert_gigabytes(gb, engine=engine, gradients=4 * PARAMETERS, activations=activations)
    assert gb["KV cache"] == pytest.approx(2.1)
    assert "warning" not in text
    logits = 3 * 4 * 256 * VOCAB
    assert_gigabytes(gb, rollout=weights + engine + cache + logits)
    # on a CPU the engine does not sleep, and one rank keeps the weights' casts for all
    # micro-batches
    casts = 2 * PARAMETERS
    root_gradients = 2 * VOCAB * HIDDEN
    head = 12 * 2**23 + 10 * 10_000 * HIDDEN
    update = weights + casts + root_gradients + head + 4 * PARAMETERS + activations
    assert_gigabytes(gb, update=1.2 * update + engine + cache)  # a fifth is malloc's


def test_on_a_gpu_an_engine_that_sleeps_is_not_beside_the_update():
    asleep = gigabytes("1.5B", rollout=Rollout(sleep_level=1))
    awake = gigabytes("1.5B", rollout=Rollout(sleep_level=0))
    weights = 2 * SHAPES["1.5B"].parameters / 1e9
    assert awake["update"] - asleep["update"] == pytest.approx(weights + 8 * GB_PER_GIB + 2.5 - 0.7)
    assert awake["rollout"] == asleep["rollout"]
    hf = gigabytes("1.5B", rollout=Rollout(engine="hf"))
    assert hf["update"] == gigabytes("1.5B")["update"], "on the host"


def test_the_plan_is_of_the_engine_that_auto_means(monkeypatch):
    of_vllm = gigabytes("1.5B", rollout=Rollout(engine="vllm"))
    of_hf = gigabytes("1.5B", rollout=Rollout(engine="hf"))
    assert of_vllm != of_hf
    assert gigabytes("1.5B", rollout=Rollout()) == of_vllm
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    assert gigabytes("1.5B", rollout=Rollout()) == of_hf


@pytest.mark.parametrize("name, low, high", [("0.5B", 4, 5), ("1.5B", 4, 5), ("7B", 5, 6)])
def test_vllm_takes_some_gigabytes_beside_weights_and_cache(name, low, high):
    assert low < gigabytes(name, rollout=Rollout())["workspace"] < high


def test_what_the_root_has_gathered():
    """4 bytes a parameter of embeddings and head beside the activations, 8 at the end, and 10
    without other ranks, where layers stay gathered unless a flag says that memory is short."""
    root = SHAPES["7B"].root / 1e9
    apart = gigabytes("7B", 8, gradient_checkpointing=True)
    assert apart["gathered"] == pytest.approx(4 * root)
    at_rest = (16 * SHAPES["7B"].parameters / 8) / 1e9 + apart["NCCL"]
    assert apart["reduction"] - at_rest == pytest.approx(8 * root + 4 * SHAPES["7B"].block / 1e9)
    states = 16 * SHAPES["7B"].parameters / 1e9
    alone = gigabytes("7B", gradient_checkpointing=True)
    assert alone["reduction"] - states == pytest.approx(10 * root)
    layers = SHAPES["7B"].parameters / 1e9 - root
    assert gigabytes("7B")["reduction"] - states == pytest.approx(10 * root + 2 * layers)
    assert gigabytes("7B")["gathered"] - alone["gathered"] == pytest.approx(2 * layers)
    for flags in ({"offload": "optimizer"}, {"lora_rank": 16}):
        assert not keeps_gathered(Machine(**flags), ranks=1, on_gpu=True)
        assert keeps_gathered(Machine(**flags), ranks=1, on_gpu=False), "casts are slow"
    assert not keeps_gathered(Machine(), ranks=2, on_gpu=False)
    copies = gigabytes("7B", 8, strategy="ddp")
    assert copies["reduction"] - states - copies["NCCL"] == pytest.approx(10 * root), (
        "a shard of one rank is a copy"
    )


def test_with_lora_the_base_has_no_gradients():
    shape = replace(SHAPES["7B"], adapters=40_000_000)
    machine = Machine(lora_rank=16, micro_batch_tokens=4096)
    gb = phases_of(WITHOUT_ENGINE, machine, 2, trained=[shape], frozen=[shape], **ON_A_CARD)
    assert gb["weights"] == pytest.approx((2 * shape.parameters / 2 + 4 * 40e6) / 1e9)
    assert gb["gathered"] == pytest.approx(2 * shape.root / 1e9)
    assert (gb["gradients"], gb["Adam"], gb["reference"]) == (0.16, 0.32, 0)
    whole = gigabytes("7B", 2, micro_batch_tokens=4096)
    assert gb["activations"] == whole["activations"], "those of frozen layers are kept, too"


@pytest.mark.parametrize("offload", ["", "reference"])
def test_a_teacher_counts_with_its_head_and_hidden_states(offload):
    """Of another size than the student; on the host while the engine samples, if asked for."""
    student, teacher = SHAPES["0.5B"], SHAPES["7B"]
    machine = Machine(micro_batch_tokens=4096, offload=offload)
    options = {"trained": [student], "frozen": [], **ON_A_CARD}
    alone = phases_of(Rollout(), machine, 4, **options)
    taught = phases_of(Rollout(), machine, 4, teacher=teacher, **options)
    weights = 2 * teacher.parameters / 4 / 1e9
    kept = 2 * (teacher.vocabulary + 4096) * teacher.hidden / 1e9
    at_rest = 0 if offload else weights
    assert taught["rollout"] - alone["rollout"] == pytest.approx(at_rest)
    assert taught["reference"] == pytest.approx(at_rest)
    assert taught["update"] - alone["update"] == pytest.approx(weights + kept)


def test_a_critic_has_no_head():
    """Its weights, gradients and moments; the activations are of one model at a time."""
    backbone = SHAPES["7B"].parameters - SHAPES["7B"].head
    alone = gigabytes("7B", 4)
    both = gigabytes("7B", 4, critic=True)
    assert both["weights"] - alone["weights"] == pytest.approx(4 * backbone / 4 / 1e9)
    assert both["update"] - alone["update"] == pytest.approx(12 * backbone / 4 / 1e9)
    evaluated = gigabytes("7B", 4, Rollout(eval_only=True), critic=True)
    assert evaluated["weights"] == alone["weights"]
    assert evaluated["Adam"] == 0
    assert evaluated["update"] == 0


def test_a_reward_model_takes_the_engines_place():
    arguments = (Machine(), 1, torch.bfloat16, [SHAPES["0.5B"]], [], True)
    gb = phases_of(Rollout(), *arguments, reward_parameters=7_000_000_000)
    assert gb["scoring"] == pytest.approx(gb["weights"] + gb["Adam"] + 14 + 0.7)
    assert phases_of(Rollout(), *arguments)["scoring"] == 0


def test_the_reward_models_folder_is_counted(folder, tmp_path):
    (tmp_path / "reward").mkdir()
    LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_labels=1
    ).save_pretrained(tmp_path / "reward")
    world = World(0, 1, 0, torch.device("cpu"))
    arguments = (Rollout(), Machine(), world, torch.bfloat16, [folder], [])
    # awake beside it on a CPU: weights, moments, engine and cache
    resident = (14 * PARAMETERS + 2**29) / 1e9
    size = 32_000 * 1024 + 8 * (4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024) + 2 * 1024
    text = memory_plan(*arguments, reward_model=str(tmp_path / "reward")).text
    scoring = float(re.search(r", reward model ([\d.]+) GB, update", text)[1])
    assert scoring == pytest.approx(resident + 2 * size / 1e9, abs=0.051)
    assert "reward model" not in memory_plan(*arguments, reward_model=str(tmp_path / "none")).text


def test_an_episode_that_is_longer_than_a_micro_batch_has_one_of_its_own():
    long = replace(WITHOUT_ENGINE, max_prompt_tokens=9000, max_response_tokens=10_000)
    assert gigabytes("7B", 8, long) == gigabytes("7B", 8, long, micro_batch_tokens=19_000)
    assert gigabytes("7B", 8, long)["activations"] > gigabytes("7B", 8)["activations"]


def test_a_frozen_tower_is_not_trained():
    path = str(FOLDERS["tiny-vl"])
    whole = model_shape(path, Machine(freeze_vision=False))
    frozen = model_shape(path, Machine(freeze_vision=True))
    files = load_file(Path(path) / "model.safetensors")
    tower = sum(t.numel() for name, t in files.items() if "visual." in name)
    assert frozen == replace(whole, frozen=tower, tower=None)
    assert whole.frozen == 0
    assert 0 < tower < whole.parameters
    assert whole.tower.hidden > 0
    assert model_shape(path, Machine(lora_rank=4)).tower is None


def test_a_trained_tower_keeps_activations_of_its_own():
    blind = SHAPES["7B"]
    seeing = replace(blind, tower=TowerShape(layers=32, hidden=1280, mlp=3420))
    for checkpointing, patch in ((False, 31 * 1280 + 8 * 3420), (True, 2 * 1280)):
        machine = Machine(attention="flex", gradient_checkpointing=checkpointing)
        text = activation_bytes(blind, Rollout(), machine, torch.bfloat16)
        pictures = activation_bytes(seeing, Rollout(), machine, torch.bfloat16)
        assert pictures - text == pytest.approx(4 * 32 * patch)


def test_shards_and_replicas(folder):
    gb, _ = plan(folder, ranks=4, trained=2, frozen=1)
    assert_gigabytes(gb, weights=(2 * 4 + 2) * PARAMETERS / 4, Adam=2 * 8 * PARAMETERS / 4)
    assert_gigabytes(gb, reference=2 * PARAMETERS / 4)
    gb, _ = plan(folder, ranks=4, trained=2, frozen=1, shard_size=2)
    assert_gigabytes(gb, weights=(2 * 4 + 2) * PARAMETERS / 2, Adam=2 * 8 * PARAMETERS / 2)
    gb, _ = plan(folder, ranks=4, trained=2, frozen=1, strategy="ddp")
    assert_gigabytes(gb, weights=(2 * 4 + 2) * PARAMETERS, Adam=2 * 8 * PARAMETERS)
    assert_gigabytes(gb, gradients=4 * PARAMETERS)  # of one model at a time


def test_ranks_that_share_an_engine_divide_its_weights_and_have_caches_of_their_own(folder):
    apart, _ = plan(folder, ranks=4, share=1)
    shared, _ = plan(folder, ranks=4, share=4)
    assert_gigabytes(shared, engine=2 * PARAMETERS / 4)
    assert shared["KV cache"] == apart["KV cache"]
    assert shared["weights"] == apart["weights"]
    for phase in ("rollout", "update"):
        assert apart[phase] - shared[phase] == pytest.approx(1.5 * PARAMETERS / 1e9, abs=0.101)


def test_a_reference_on_the_host_takes_no_room(folder):
    """It is on the device while it computes log-probs, when there are no gradients and
    activations."""
    gb, _ = plan(folder, frozen=1)
    assert_gigabytes(gb, weights=(4 + 2) * PARAMETERS)
    gb, _ = plan(folder, frozen=1, offload="reference")
    assert_gigabytes(gb, weights=4 * PARAMETERS)


def test_a_base_on_the_host_takes_no_room_beside_the_engine(folder):
    """In the update it has its place. A critic has another one; each rank has its shard."""
    options = {"ranks": 2, "trained": [folder] * 2, "frozen": [], "reward_parameters": 100}
    machine = Machine(lora_rank=4)
    rollout = Rollout(engine_memory=1.0)
    here = memory_phases(rollout, machine, **options, **ON_A_CARD)
    away = memory_phases(rollout, replace(machine, offload="base"), **options, **ON_A_CARD)
    base_gb = pytest.approx(2 * 2 * PARAMETERS / 2 / 1e9)
    assert here["rollout"] - away["rollout"] == base_gb
    assert here["scoring"] - away["scoring"] == base_gb
    assert away["update"] == here["update"]
    assert away["weights"] == here["weights"]


def test_lora_of_7b_fits_on_a_card_of_24_gb(monkeypatch):
    """With the base on the host while sampling, which the plan advises."""
    shape = replace(SHAPES["7B"], adapters=40_370_176)  # of rank 16
    monkeypatch.setitem(SHAPES, "7B", shape)
    free_gb = 24 * GB_PER_GIB - CUDA_CONTEXT
    rollout = Rollout(max_prompt_tokens=512, max_response_tokens=1024)
    flags = {"lora_rank": 16, "gradient_checkpointing": True}
    text = planned_on_gpus(monkeypatch, "7B", free_gb, 1, rollout, **flags).text
    assert text.endswith("warning: the rollout may not fit; it would with --offload base")
    plan = planned_on_gpus(monkeypatch, "7B", free_gb, 1, rollout, offload="base", **flags)
    assert "warning" not in plan.text
    assert plan.micro_batch_tokens >= 2048, "a prompt and a response, and more"
    assert plan.engine_memory >= 1, "the cache of more than ten of them, by 57 kB a token"


@pytest.mark.parametrize("tokens", [10, 200_000])
def test_moments_on_the_host_come_when_the_activations_are_gone(tokens):
    rollout = replace(WITHOUT_ENGINE, max_prompt_tokens=1, max_response_tokens=1)
    options = {"rollout": rollout, "micro_batch_tokens": tokens, "gradient_checkpointing": True}
    here = gigabytes("3B", **options)
    away = gigabytes("3B", offload="optimizer", **options)
    assert away["step"] == here["step"] == pytest.approx(16 * SHAPES["3B"].parameters / 1e9)
    assert here["backward"] - away["backward"] == pytest.approx(here["Adam"])
    assert away["update"] == max(away["step"], here["backward"] - here["Adam"])


def test_moving_the_moments_changes_nothing_but_their_place():
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = {name: value.clone() for name, value in optimizer.state[model.weight].items()}
    move_states(optimizer, torch.device("meta"), {})
    state = optimizer.state[model.weight]
    assert state["exp_avg"].is_meta
    assert state["exp_avg_sq"].is_meta
    assert torch.equal(state["step"], before["step"])
    optimizer.state[model.weight] = before
    move_states(optimizer, torch.device("cpu"), {})
    state = optimizer.state[model.weight]
    assert state.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in state.items())


def test_what_may_not_fit_on_a_cpu_is_named(folder):
    _, text = plan(folder, micro_batch_tokens=10**6)
    assert re.search(
        r"\nwarning: the update may not fit; it would with --micro-batch-tokens \d+$", text
    )
    _, text = plan(folder, engine_memory=0.95 * 16 / GB_PER_GIB)
    assert re.search(
        r"\nwarning: the rollout and the update may not fit; it would with --engine-memory [\d.]+$",
        text,
    )
    _, text = plan(folder, trained=1 + int(16 / (4 * PARAMETERS / 1e9)))
    assert text.endswith(
        "may not fit; no change of flags is enough: take a smaller model, or add --lora-rank"
    )


def test_a_cache_that_cannot_fit_is_refused_before_the_engine_starts(folder, tmp_path):
    """A replay has no engine, and no rollout that could not fit."""
    message = r"^--engine-memory 10000: of [\d.]+ GiB that are free .* leave [\d.]+$"
    with pytest.raises(SystemExit, match=message):
        plan(folder, engine_memory=10_000.0)
    rollout = Rollout(engine_memory=1e4, replay=tmp_path)
    world = World(0, 1, 0, torch.device("cpu"))
    text = memory_plan(rollout, Machine(), world, torch.bfloat16, [folder], []).text
    assert "rollout" not in text
    assert "warning" not in text


@pytest.mark.parametrize("phase", ["sync_weights", "wake", "step"])
@pytest.mark.parametrize("engine", [HuggingFaceEngine, VllmEngine])
def test_out_of_memory_in_an_engine_names_its_phase(engine, phase, monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    broken = SimpleNamespace(
        to=fail, record=fail, wake_up=fail, llm_engine=SimpleNamespace(step=fail)
    )
    instance = engine.__new__(engine)
    instance.sleep_level = 1
    instance.model = broken
    instance.llm = broken
    instance.books = broken
    instance.dtype = None
    instance.device = None
    instance.requests = [1]
    instance.max_sequences = 1
    instance._generate_batch = fail

    arguments = {"sync_weights": ((), 1), "wake": ("weights",), "step": ()}[phase]
    expected = "the rollout" if phase == "step" else "the weight sync"
    message = f"out of GPU memory in {expected}: lower --engine-memory, add --offload optimizer "
    with pytest.raises(SystemExit, match=message):
        getattr(instance, phase)(*arguments)


def test_an_engine_that_cannot_sleep_beside_others_names_the_flag():
    """vLLM compares the memory in use on the whole GPU, before and after."""

    def fail(**_):
        raise AssertionError("Memory usage increased after sleeping.")

    engine = VllmEngine.__new__(VllmEngine)
    engine.sleep_level = 1
    engine.asleep = False
    engine.llm = SimpleNamespace(sleep=fail)
    with pytest.raises(SystemExit, match=r"Memory usage increased .*: --sleep-level 0$"):
        engine.sleep()
    assert not engine.asleep


@pytest.mark.slow
def test_loading_takes_a_shard_and_a_layer():
    """Of each kind of model, on 2 and on 4 ranks: the benchmark fails above the bound."""
    table = run_script(ROOT / "tests" / "bench" / "loading.py", fresh=True, timeout=1800).stdout
    shares = [int(share) for share in re.findall(r"(\d+)% \|$", table, re.MULTILINE)]
    assert len(shares) == 14
    assert max(shares) <= 100
    assert min(shares) > 20


@pytest.mark.slow
@pytest.mark.parametrize("options, lines", [([], 20), (["--tasks"], 6)])
def test_the_tables_on_paper_are_what_their_benchmark_prints(options, lines):
    printed = run_script(ROOT / "tests" / "bench" / "paper.py", *options).stdout.strip()
    assert len(printed.splitlines()) == lines
    assert printed in (ROOT / "docs" / "scaling.md").read_text()


@pytest.mark.parametrize(
    "text, budget", [("512", 512), ("99999", 1024), ("", 1024), ("\udcff1k", 1024), (None, 1024)]
)
def test_what_is_no_budget_is_not_remembered(tmp_path, text, budget):
    if text is not None:
        (tmp_path / "micro_batch_tokens").write_text(text, errors="surrogateescape")
    assert remembered_budget(tmp_path, 1024) == budget

"""What torch.compile makes has the values of the code as it stands, and is made once for packs of
all lengths. On a CPU graphs run as they were traced; -m slow has inductor's own kernels."""

from collections import Counter
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from family_models import FAMILIES, SIZES
from helpers import relative_l2
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager, get_nop_func
from torch._functorch import config as functorch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.async_compile import get_compile_threads
from torch._inductor.compile_fx import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention
from transformers import CONFIG_MAPPING, FalconH1Config, Qwen2Config
from vl import trajectories, write_tiny_vl

import common.logprobs
from common.distributed import forward_context, gathered, make_mesh, wrap_model
from common.engine.vllm import give_back_compiler_threads
from common.exactness import COMPILED, check_policy, choose_compile
from common.flags import Machine, Rollout
from common.job import check_activation_memory
from common.logprobs import LogitTransform, token_logprobs
from common.lora import WithoutAdapters, adapted_layers, merged
from common.memory.estimate import activation_bytes
from common.memory.shape import model_shape
from common.models import hidden_states, load_model
from common.packing import Layout, MicroBatch, TokenIndex, pack
from common.pictures import PixelLimits
from common.types import Episode
from common.vision import load_vision

# relative distances: of log-probs and entropies in float32, and of gradients in the dtype of the
# inputs
BOUNDS = {torch.float32: (1e-6, 1e-5), torch.bfloat16: (1e-6, 1e-2)}


@pytest.fixture
def compiler():
    """Of this process: an engine may have switched it off."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(disable=False):
        yield torch._dynamo.utils.counters


# --- the head ------------------------------------------------------------------------------------


def head_values(hidden, weight, targets, transform, entropy_coef) -> list[torch.Tensor]:
    """Log-probs, entropies, and the gradients of hidden states and head."""
    inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    logprobs, entropy = token_logprobs(*inputs, targets, 0.7, transform)
    upstream = torch.linspace(-1, 1, len(targets))
    (logprobs * upstream + entropy_coef * entropy * upstream.flip(0)).sum().backward()
    return [logprobs.detach(), entropy.detach(), *[tensor.grad for tensor in inputs]]


HEADS = [  # (dtype, what the model makes of its logits, factor of the entropy in the loss)
    (torch.bfloat16, LogitTransform(), 0.3),
    (torch.float32, LogitTransform(0.5, softcap=2.0), 0.3),
]
MORE_HEADS = [
    (torch.bfloat16, LogitTransform(), 0.0),
    (torch.float32, LogitTransform(), 0.0),
    (torch.float32, LogitTransform(), 0.3),
    (torch.bfloat16, LogitTransform(scale=0.25), 0.3),
    (torch.bfloat16, LogitTransform(0.5, softcap=2.0), 0.3),
]
HEAD_CASES = [("aot_eager", *head) for head in HEADS]
for head in HEADS + MORE_HEADS:
    HEAD_CASES.append(pytest.param("inductor", *head, marks=pytest.mark.slow))


@pytest.mark.parametrize("backend, dtype, transform, entropy_coef", HEAD_CASES)
def test_the_compiled_head_is_the_eager_one(
    backend, dtype, transform, entropy_coef, compiler, monkeypatch
):
    torch.manual_seed(0)
    hidden = torch.randn(31, 16, dtype=dtype)
    weight = torch.randn(53, 16, dtype=dtype)
    targets = torch.randint(53, (31,))
    # several slices, of which the last is smaller
    monkeypatch.setitem(common.logprobs.CHUNK_ELEMENTS, "cpu", 7 * 53)
    eager = head_values(hidden, weight, targets, transform, entropy_coef)
    monkeypatch.setattr(common.logprobs, "has_compiler", lambda device: True)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    common.logprobs._compiled.cache_clear()
    compiled = head_values(hidden, weight, targets, transform, entropy_coef)
    common.logprobs._compiled.cache_clear()
    value_bound, gradient_bound = BOUNDS[dtype]
    for ours, expected in zip(compiled[:2], eager[:2]):
        assert relative_l2([ours], [expected]) < value_bound
    for ours, expected in zip(compiled[2:], eager[2:]):
        assert relative_l2([ours], [expected]) < gradient_bound
    # forward and backward, whatever the size of a slice
    assert compiler["stats"]["unique_graphs"] == 2
    assert not compiler["graph_break"]


# --- layers ---------------------------------------------------------------------------------------

CHOICES = [  # (config, attention, capability, --compile, is it compiled, why not)
    (Qwen2Config(), "flex", 9, None, True, ""),
    (Qwen2Config(), "flex", 9, False, False, ""),
    (Qwen2Config(), "flash", 9, None, False, "--attention flash"),
    (Qwen2Config(), "flash", 9, True, True, ""),
    (Qwen2Config(), "sdpa", 7, None, False, "no GPU of capability 8.0"),
    (FalconH1Config(), "flex", 9, None, False, "falcon_h1 were not tried; --compile tries them"),
    (FalconH1Config(), "flex", 9, True, True, ""),  # refused later, by name
]


@pytest.mark.parametrize("config, attention, capability, flag, is_compiled, reason", CHOICES)
def test_layers_of_families_that_were_tried_are_compiled_on_gpus(
    config, attention, capability, flag, is_compiled, reason, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    model = SimpleNamespace(config=config)
    machine = Machine(compile=flag)
    chosen, why_not = choose_compile(model, attention, machine, torch.device("cuda"))
    assert chosen is is_compiled
    assert why_not.endswith(reason)
    assert bool(why_not) == bool(reason)
    assert not choose_compile(model, "sdpa", Machine(), torch.device("cpu"))[0]


def test_an_engine_leaves_the_compiler_its_threads(monkeypatch):
    """vLLM's import sets one thread for the whole process."""
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)
    monkeypatch.setattr("common.engine.vllm.cpus_of_rank", lambda: 12)
    give_back_compiler_threads()
    assert get_compile_threads() == 12


FORWARDS = 2  # of a kind of layer: without gradients, and with them


@pytest.fixture
def graphs(compiler, monkeypatch) -> list[torch.fx.GraphModule]:
    """Those that layers are compiled to; they run as they were traced."""
    compiled: list[torch.fx.GraphModule] = []

    def backend(graph, inputs):
        compiled.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    # flex attention refuses a backward on CPUs, where no kernel has one; a traced graph has it
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    return compiled


def little_family(folder: Path, family: str, layers: int) -> int:
    """Write the config.json of a family with so many layers, of which some have windows if those of
    the family do. Returns the number of kinds of layers."""
    options = SIZES | {"hidden_size": 64, "vocab_size": 128} | FAMILIES.get(family, {})
    options |= {"num_hidden_layers": layers, "pad_token_id": 0, "bos_token_id": 0}
    for name in ("layer_types", "no_rope_layers"):
        if name in options:
            options[name] = (options[name] * layers)[:layers]
    config = CONFIG_MAPPING[family](**options)
    config.save_pretrained(folder)
    windows = getattr(config, "layer_types", None) or [""] * layers
    positions = getattr(config, "no_rope_layers", None) or [1] * layers
    return len(set(zip(windows, positions, strict=True)))


def packed(lengths: list[int]) -> MicroBatch:
    """A prompt with responses, padded to whole blocks of flex attention."""
    episodes = []
    for sample, length in enumerate(lengths):
        ids = [(7 * i + sample) % 120 + 1 for i in range(length)]
        episodes.append(Episode(0, sample, [*range(1, 31)], ids, [1] * length, [0.0] * length))
    index = TokenIndex(episodes)
    layout = Layout(multiple=128)
    (batch,) = pack(episodes, range(len(episodes)), index, budget=4096, layout=layout)
    return batch


def backward(policy: nn.Module, batch: MicroBatch) -> list[torch.Tensor]:
    """Log-probs, and the gradients of trained parameters."""
    policy.zero_grad()
    with forward_context(policy):
        logprobs, entropy = policy(batch, 0.9)
        (logprobs * torch.linspace(-1, 1, len(logprobs)) + 0.1 * entropy).sum().backward()
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    return [logprobs.detach()] + [gathered(parameter.grad) for parameter in trained]


SEEING = {"qwen2_5_vl_text": "qwen2_5_vl", "qwen3_vl_text": "qwen3_vl"}
OTHER_FAMILIES = [(family, 3) for family in sorted(COMPILED - {"qwen2"} - set(SEEING))]


# by default test_numerics.py compiles layers, without gradients
@pytest.mark.slow
@pytest.mark.parametrize("family, layers", [("qwen2", 2), *OTHER_FAMILIES])
def test_layers_are_compiled_once_for_packs_of_all_lengths(
    family, layers, tmp_path, world, graphs, compiler
):
    """In the order of a run: the guard, the largest micro-batch of the rehearsal, steps, and an
    evaluation."""
    kinds = little_family(tmp_path, family, layers)
    plain = load_model(str(tmp_path), "sdpa", from_scratch=True)
    plain.model.save_pretrained(tmp_path)
    wrap = partial(wrap_model, mesh=make_mesh(world, "fsdp"), compute_dtype=torch.float32)
    policy = load_model(str(tmp_path), "flex", compile_layers=True, wrap=wrap)
    check_policy(policy, torch.float32, family)
    assert len(graphs) == kinds
    largest = packed([450, 200, 100])
    ours = backward(policy, largest)
    assert relative_l2(ours, backward(plain, largest)) < 1e-5
    assert len(graphs) == FORWARDS * kinds
    for length in range(10, 410, 40):
        batch = packed([length, 100, 150])
        logprobs, *gradients = backward(policy, batch)
        with torch.no_grad():
            expected, _ = plain(batch, 0.9)
        torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-5)
    assert relative_l2([logprobs, *gradients], backward(plain, batch)) < 1e-5
    assert len(graphs) == FORWARDS * kinds, "a graph for each length"
    with torch.no_grad():
        for length in (300, 500):
            with forward_context(policy):
                policy(packed([length]))
    assert len(graphs) == (FORWARDS + 1) * kinds  # the guard's has a single block
    assert not compiler["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("family", SEEING)
def test_layers_behind_a_tower_are_compiled_once(family, tmp_path, world, graphs, compiler):
    folder = str(write_tiny_vl(tmp_path, kind=SEEING[family]))
    vision = load_vision(folder, PixelLimits(784, 24 * 1024, 8 * 1024))
    wrap = partial(wrap_model, mesh=make_mesh(world, "fsdp"), compute_dtype=torch.float32)
    plain = load_model(folder, "sdpa", vision=vision)
    policy = load_model(folder, "flex", vision=vision, compile_layers=True, wrap=wrap)
    assert policy.model.config.get_text_config().model_type == family
    num_graphs = []
    for seed in range(6):
        episodes = trajectories(vision, seed=seed, prompts=2 + seed % 3)
        index = TokenIndex(episodes)
        (batch,) = pack(
            episodes,
            range(len(episodes)),
            index,
            budget=10_000,
            layout=Layout(multiple=128),
            vision=vision,
        )
        ours = backward(policy, batch)
        num_graphs.append(len(graphs))
    assert relative_l2(ours, backward(plain, batch)) < 1e-4
    # for the first length; for all others, of the first layer, whose input is a view, and the rest
    assert num_graphs[1:] == 5 * [3]
    assert not compiler["graph_break"]


def test_merging_adapters_is_one_product_and_one_kernel():
    """Inductor fuses what follows a product, and would cast the base to float32 for an addmm."""
    base = torch.randn(24, 16).bfloat16()
    inputs = (base, torch.randn(3, 16), torch.randn(24, 3))
    graph = make_fx(partial(merged, scale=0.3))(*inputs).graph
    calls = [node.target.name() for node in graph.nodes if node.op == "call_function"]
    assert calls == ["aten::mul.Tensor", "aten::mm", "aten::add.Tensor", "aten::_to_copy"]


@pytest.mark.slow
def test_adapted_layers_are_compiled_once(tmp_path, world, graphs, compiler):
    little_family(tmp_path, "qwen2", layers=2)
    load_model(str(tmp_path), "sdpa", from_scratch=True).model.save_pretrained(tmp_path)
    options = {"lora_flags": Machine(lora_rank=16), "seed": 1}
    mesh = make_mesh(world, "fsdp")
    wrap = partial(wrap_model, mesh=mesh, compute_dtype=torch.float32, shards_own_parameters=False)
    plain = load_model(str(tmp_path), "sdpa", **options)
    policy = load_model(str(tmp_path), "flex", compile_layers=True, wrap=wrap, **options)
    for model in (plain, policy):
        for _, layer in adapted_layers(model):
            layer.lora_B.data.fill_(0.01)
    check_policy(policy, torch.float32, "qwen2")
    for length in (400, 10, 200, 90):
        batch = packed([length, 100, 150])
        ours = backward(policy, batch)
        assert relative_l2(ours, backward(plain, batch)) < 1e-5
    assert len(graphs) == FORWARDS + 1  # the input of the first layer needs no gradient
    with torch.no_grad():
        expected = WithoutAdapters(plain)(batch)
        for _ in range(2):
            with forward_context(policy):
                output = WithoutAdapters(policy)(batch)
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    assert len(graphs) == FORWARDS + 2  # without adapters
    assert not compiler["graph_break"]


# --- activations that are recomputed --------------------------------------------------------------


@pytest.mark.parametrize(
    "share, compiles, checkpointing, reason",
    [
        (0.5, False, False, "--compile"),
        ("auto", False, False, "--compile"),
        (0.5, True, True, "no --gradient-checkpointing, which keeps less"),
    ],
)
def test_a_share_of_activations_needs_compiled_layers(
    share, compiles, checkpointing, reason, monkeypatch
):
    monkeypatch.setattr("sys.argv", ["grpo.py", "--activation-memory", str(share)])
    machine = Machine(activation_memory=share, gradient_checkpointing=checkpointing)
    with pytest.raises(SystemExit) as refusal:
        check_activation_memory(machine, compiles)
    assert str(refusal.value) == f"--activation-memory {share} has no effect: needs {reason}"
    check_activation_memory(replace(machine, gradient_checkpointing=False), compiles=True)


@pytest.fixture
def backward_calls(compiler, monkeypatch) -> list[Counter]:
    """What the backward of each graph calls, if inductor's partitioner cuts it off the forward."""
    calls: list[Counter] = []

    def count_calls(graph, inputs):
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        calls.append(Counter(node.target._name for node in nodes if hasattr(node.target, "_name")))
        return get_nop_func()(graph, inputs)

    cut = partial(min_cut_rematerialization_partition, compiler="inductor")
    backend = aot_autograd(
        fw_compiler=get_nop_func(),
        bw_compiler=count_calls,
        decompositions=select_decomp_table,
        partition_fn=cut,
    )
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    with functorch.patch(activation_memory_budget=1.0, unlift_effect_tokens=True):
        yield calls


SHARES = [
    (0.7, 6),
    *[pytest.param(s, h, marks=pytest.mark.slow) for s in (1, 0.5, 0.3) for h in (4, 6)],
]


@pytest.mark.parametrize("share, heads", SHARES)
def test_a_share_of_the_activations_is_kept(share, heads, tmp_path, backward_calls):
    """As much as the memory plan says. Down to 0.7 neither matrix products nor attention are
    computed again."""
    layers = 3
    config = Qwen2Config(
        hidden_size=64 * heads,
        intermediate_size=192 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        vocab_size=128,
    )
    config.save_pretrained(tmp_path)
    policy = load_model(
        str(tmp_path),
        "flex",
        dtype=torch.bfloat16,
        from_scratch=True,
        compile_layers=True,
        activation_memory=share,
    )
    batch = packed([482])
    of_model = {tensor.untyped_storage()._cdata for tensor in policy.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in of_model:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = hidden_states(policy.model.base_model, batch, "flex", None)
    hidden.sum().backward()
    machine = Machine(compile=True, activation_memory=share, attention="flex")
    shape = model_shape(str(tmp_path), machine)
    planned = activation_bytes(shape, Rollout(), machine, torch.bfloat16)
    assert sum(kept.values()) / batch.input_ids.numel() == pytest.approx(planned, rel=0.15)
    (calls,) = backward_calls
    again = calls["aten::mm"] + calls["aten::addmm"] - 2 * 7  # two products for each matrix
    assert (again > 0) == (share < 0.7)
    assert calls["flex_attention"] == (1 if share < 0.7 else 0)
    assert calls["flex_attention_backward"] == 1

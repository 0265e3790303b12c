"""Recurrent layers in packs with shared prompts compute what they compute on single sequences."""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers import ROOT
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import common.recurrent
from common.exactness import check_policy, check_recurrent_kernels
from common.flags import Machine
from common.models import Policy, load_model
from common.packing import Layout, TokenIndex, pack
from common.recurrent import (
    RECURRENT_MODELS,
    convolution_in_one_call,
    convolution_over_pack,
    delta_rule_by_fla,
    delta_rule_over_pack,
    fused_over_pack,
    over_segments,
    share_prompts,
    taking_units,
)
from common.types import Episode

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN3_5 = DELTA | {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"]}
KINDS = {
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128},
    "granitemoehybrid": MAMBA
    | {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 0},
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": CONVOLUTIONS | EXPERTS | {"num_dense_layers": 1},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "olmo_hybrid": DELTA | {"linear_num_value_heads": 2},
    "qwen3_5_moe_text": QWEN3_5 | EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": QWEN3_5,
    "qwen3_next": DELTA | EXPERTS | {"shared_expert_intermediate_size": 32},
}
EVERY_TIME = ["falcon_h1", "qwen3_5_text"]
TEMPERATURE = 0.8


def random_model(kind: str, folder, attention: str = "sdpa", **options) -> Policy:
    sizes = dict(SIZES)
    if kind == "nemotron_h":
        del sizes["num_hidden_layers"]  # it counts its blocks
    CONFIG_MAPPING[kind](**(sizes | KINDS[kind])).save_pretrained(folder)
    torch.manual_seed(0)
    policy = load_model(str(folder), attention, from_scratch=True, **options)
    if policy.model._can_set_experts_implementation():
        policy.model.set_experts_implementation("eager")  # the other kernel has no float64
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)  # spread the logits: near-uniform ones would hide mistakes
    return policy


def ragged_episodes() -> list[Episode]:
    """Groups with prompts and responses of fewer tokens than a convolution is wide (3 or 4), and of
    more than a chunk has."""
    generator = torch.Generator().manual_seed(3)
    episodes = []
    for i, (prompt_length, lengths) in enumerate([(70, (40, 1, 6)), (2, (30, 2)), (1, (2, 9))]):
        prompt = torch.randint(1, 128, (prompt_length,), generator=generator).tolist()
        for j, length in enumerate(lengths):
            ids = torch.randint(1, 128, (length,), generator=generator).tolist()
            mask = [int(k % 5 != 4) for k in range(length)]
            episodes.append(Episode(i, j, prompt, ids, mask, [0.0] * length))
    return episodes


def packed(policy: Policy, episodes: list[Episode], multiple: int = 16):
    """Log-probs and entropies [T] from two packs, the second of several units and padding."""
    index = TokenIndex(episodes)
    layout = Layout(multiple=multiple)
    batches = pack(episodes, range(len(episodes)), index, budget=128, layout=layout)
    assert [len(batch.units) for batch in batches] == [2, 3]
    logprobs, entropies = torch.zeros(2, len(index), dtype=policy.model.dtype)
    for batch in batches:
        batch_logprobs, batch_entropies = policy(batch, TEMPERATURE)
        logprobs = logprobs.index_copy(0, batch.token_index, batch_logprobs)
        entropies = entropies.index_copy(0, batch.token_index, batch_entropies)
    return logprobs, entropies


def one_by_one(policy: Policy, episodes: list[Episode]):
    """The same from the model's own forward on each sequence; its attention is eager from now on,
    so that a checkpointed backward finds it as it was."""
    model = policy.model
    model.set_attn_implementation("eager")
    logprobs = []
    entropies = []
    for episode in episodes:
        ids = torch.tensor([episode.prompt_ids + episode.response_ids])
        logits = model(ids, use_cache=False).logits[0] / TEMPERATURE
        predictions = logits.log_softmax(-1)[len(episode.prompt_ids) - 1 : -1]
        trained = torch.tensor(episode.loss_mask).nonzero().flatten()
        targets = torch.tensor(episode.response_ids)[trained]
        logprobs.append(predictions[trained].gather(-1, targets[:, None])[:, 0])
        entropies.append(-(predictions.exp() * predictions).sum(-1)[trained])
    return torch.cat(logprobs), torch.cat(entropies)


def gradients(policy: Policy, logprobs, entropies) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(len(logprobs), generator=generator, dtype=logprobs.dtype)
    policy.zero_grad()
    (weights @ logprobs + 0.1 * entropies.sum()).backward()
    return [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]


def check_exact(kind: str, folder, **options) -> None:
    policy = random_model(kind, folder, dtype=torch.float64, **options)
    episodes = ragged_episodes()
    logprobs, entropies = packed(policy, episodes)
    ours = gradients(policy, logprobs, entropies)
    expected_logprobs, expected_entropies = one_by_one(policy, episodes)
    expected = gradients(policy, expected_logprobs, expected_entropies)
    assert (logprobs - expected_logprobs).abs().max() < 1e-12
    assert (entropies - expected_entropies).abs().max() < 1e-12
    largest = max(gradient.abs().max() for gradient in expected)
    for gradient, expected_gradient in zip(ours, expected, strict=True):
        assert (gradient - expected_gradient).abs().max() < 1e-12 * largest


@pytest.mark.parametrize("kind", EVERY_TIME)
def test_packs_are_exact_with_gradient_checkpointing(kind, tmp_path, float64):
    check_exact(kind, tmp_path, gradient_checkpointing=True)


@pytest.mark.slow
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_packs_of_all_recurrent_models_are_exact(kind, gradient_checkpointing, tmp_path, float64):
    check_exact(kind, tmp_path, gradient_checkpointing=gradient_checkpointing)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_packs_of_a_model_with_a_vision_tower_are_exact_on_text(kind, tmp_path, float64):
    text = SIZES | KINDS[f"{kind}_text"]
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}
    KINDS[kind] = {"text_config": text, "vision_config": vision}
    try:
        check_exact(kind, tmp_path)
    finally:
        del KINDS[kind]


def test_the_table_of_kinds_is_whole():
    assert set(KINDS) == RECURRENT_MODELS


@pytest.mark.parametrize("kind", [*EVERY_TIME, "lfm2"])
def test_the_state_of_its_prompt_matters_to_a_response(kind, tmp_path, monkeypatch):
    """The tests above would see a response that starts from nothing."""
    policy = random_model(kind, tmp_path)
    episodes = ragged_episodes()

    def forget(function, *arguments, **options):
        def without_state(*segments_and_state):
            return function(*segments_and_state[:-1], None)

        return over_segments(without_state, *arguments, **options)

    with torch.no_grad():
        logprobs = packed(policy, episodes)[0]
        monkeypatch.setattr(common.recurrent, "over_segments", forget)
        forgetful = packed(policy, episodes)[0]
        expected = one_by_one(policy, episodes)[0]
    assert (logprobs - expected).abs().max() < 1e-5
    assert (forgetful - expected).abs().max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_flex_masks_reach_attention_alone(kind, tmp_path):
    episodes = ragged_episodes()
    logprobs = []
    with torch.no_grad():
        for attention in ("sdpa", "flex"):
            policy = random_model(kind, tmp_path, attention)
            logprobs.append(packed(policy, episodes, multiple=128)[0])
    assert (logprobs[0] - logprobs[1]).abs().max() < 1e-5


def conv1d(inputs, weight, bias=None):
    padding = weight.shape[1] - 1
    outputs = nn.functional.conv1d(
        inputs, weight[:, None], bias, padding=padding, groups=len(weight)
    )
    return outputs[:, :, : inputs.shape[2]]


UNITS = [[70, 40, 1, 6], [2, 30, 2], [1, 2, 9], [7]]


def test_convolutions_in_one_call_are_those_segment_by_segment():
    options = {"dtype": torch.float64, "requires_grad": True}
    inputs = torch.randn(1, 3, sum(map(sum, UNITS)), **options)
    weight = torch.randn(3, 4, **options)
    bias = torch.randn(3, **options)
    found = []
    for over_pack in (convolution_over_pack, convolution_in_one_call):
        outputs = over_pack(conv1d, UNITS, inputs, weight, bias)
        found.append([outputs, *torch.autograd.grad(outputs.square().sum(), (inputs, weight))])
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() < 1e-12 * one.abs().max()


def delta_rule_in_torch() -> Callable:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    function = getattr(torch_chunk_gated_delta_rule, "replaced", torch_chunk_gated_delta_rule)
    return inspect.unwrap(function)


def sequence_by_sequence(q, k, v, *, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu, **options):
    """In place of the kernel of flash-linear-attention transformers' function, which is called for
    one sequence after another as that kernel is documented."""
    assert cu_seqlens.tolist() == cu_seqlens_cpu.tolist()
    bounds = list(pairwise(cu_seqlens.tolist()))
    states = [None] * len(bounds) if initial_state is None else initial_state.split(1)
    results = []
    for (start, end), state in zip(bounds, states, strict=True):
        tensors = (tensor[:, start:end] for tensor in (q, k, v))
        gates = {"g": g[:, start:end], "beta": beta[:, start:end]}
        results.append(delta_rule_in_torch()(*tensors, **gates, initial_state=state, **options))
    outputs, final_states = zip(*results)
    return torch.cat(outputs, dim=1), torch.cat(final_states)


def install_kernel(monkeypatch, kernel: Callable) -> None:
    package = ModuleType("fla.ops.gated_delta_rule")
    package.chunk_gated_delta_rule = kernel
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", package)


def test_delta_rules_in_two_calls_are_those_segment_by_segment(monkeypatch):
    num_sequences = []

    def kernel(*arguments, **options):
        num_sequences.append(len(options["cu_seqlens"]) - 1)
        return sequence_by_sequence(*arguments, **options)

    install_kernel(monkeypatch, kernel)
    rule = delta_rule_in_torch()
    length = sum(map(sum, UNITS))
    query, key, value = (torch.randn(1, length, 2, 4, requires_grad=True) for _ in range(3))
    g = torch.rand(1, length, 2).neg().requires_grad_()
    beta = torch.rand(1, length, 2, requires_grad=True)
    inputs = (query, key, value, g, beta)
    for units, calls in ((UNITS, [4, 7]), ([[length]], [1])):
        num_sequences.clear()
        found = []
        for over_pack in (delta_rule_over_pack, delta_rule_by_fla):
            outputs, _ = over_pack(
                rule, units, query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True
            )
            found.append([outputs, *torch.autograd.grad(outputs.square().sum(), inputs)])
        assert num_sequences == calls
        for one, other in zip(*found, strict=True):
            # the function computes in float32 in any case
            assert (one - other).abs().max() < 1e-5 * one.abs().max()


@pytest.mark.slow
def test_the_kernel_of_flash_linear_attention_is_exact_in_packs():
    """The real one, run by Triton's interpreter."""
    pytest.importorskip("fla", reason="pip install fla-core==0.6.0")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests" / "workers" / "recurrent_kernels.py")]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    differences = json.loads(process.stdout.splitlines()[-1])
    assert len(differences) == 6 and max(differences.values()) < 1e-4


def test_kernels_that_are_of_no_use_are_refused(tmp_path):
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    fla = Machine(recurrent_kernels="fla")
    delta = random_model("qwen3_5_text", tmp_path / "delta").model
    check_recurrent_kernels(delta, "flex", Machine(), gpu)
    for model, attention, device, message in (
        (
            random_model("lfm2", tmp_path / "conv").model,
            "flex",
            gpu,
            "layers of lfm2 have no gated",
        ),
        (delta, "rows", gpu, "no effect with --attention rows"),
        (delta, "flex", cpu, "--recurrent-kernels fla needs a GPU"),
    ):
        with pytest.raises(SystemExit, match=message):
            check_recurrent_kernels(model, attention, fla, device)
    if find_spec("fla") is None:
        with pytest.raises(SystemExit, match="pip install fla-core"):
            check_recurrent_kernels(delta, "flex", fla, gpu)


def test_the_kernels_of_the_last_model_count(tmp_path):
    """Functions are replaced for all models of a kind: with each load anew."""
    modeling = sys.modules["transformers.models.qwen3_5.modeling_qwen3_5"]
    rules = []
    for kernels in ("torch", "fla", "torch"):
        random_model("qwen3_5_text", tmp_path, recurrent_kernels=kernels)
        rule = inspect.getclosurevars(modeling.torch_chunk_gated_delta_rule).nonlocals["over_pack"]
        rules.append(rule)
        # always the one of transformers, with its kernels
        assert hasattr(modeling.causal_conv1d_fn.replaced, "__wrapped__")
    assert rules == [delta_rule_over_pack, delta_rule_by_fla, delta_rule_over_pack]


def test_the_check_at_the_start_refuses_a_kernel_that_is_wrong(tmp_path, monkeypatch, world):
    policy = random_model("qwen3_5_text", tmp_path, recurrent_kernels="fla")
    name = "--model x --recurrent-kernels fla"
    install_kernel(monkeypatch, sequence_by_sequence)
    check_policy(policy, torch.float32, name)

    def forgetful(*arguments, **options):
        return sequence_by_sequence(*arguments, **(options | {"initial_state": None}))

    install_kernel(monkeypatch, forgetful)
    with pytest.raises(SystemExit, match=r"--recurrent-kernels fla: .* away from the model's own"):
        check_policy(policy, torch.float32, name)


def test_with_kernels_packs_take_them_and_all_else_the_function_in_torch():
    @wraps(conv1d)
    def kernel(*arguments, **options):
        raise NotImplementedError

    convolution = taking_units(kernel, convolution_in_one_call, is_kernel=True)
    inputs = torch.randn(1, 3, 11)
    weight = torch.randn(3, 4)
    assert torch.equal(convolution(inputs, weight), conv1d(inputs, weight))
    with pytest.raises(NotImplementedError):
        convolution(inputs, weight, units=[[5, 2, 1], [3]])


def test_packs_take_the_function_in_torch_and_all_else_the_kernel():
    @wraps(conv1d)
    def kernel(*arguments, **options):
        raise NotImplementedError

    convolution = taking_units(kernel, convolution_over_pack)
    inputs = torch.randn(1, 3, 11)
    weight = torch.randn(3, 4)
    outputs = convolution(inputs, weight, units=[[5, 2, 1], [3]])
    alone = [inputs[:, :, :7], inputs[:, :, [0, 1, 2, 3, 4, 7]], inputs[:, :, 8:]]
    expected = [conv1d(sequence, weight) for sequence in alone]
    expected[1] = expected[1][:, :, -1:]
    assert torch.allclose(outputs, torch.cat(expected, dim=2), atol=1e-6)
    assert torch.equal(convolution(inputs, weight, seq_idx=[[5, 2, 1], [3]]), outputs)
    with pytest.raises(NotImplementedError):
        convolution(inputs, weight)
    fused = taking_units(kernel, fused_over_pack)
    assert fused(inputs, units=[[11]]) is None
    with pytest.raises(NotImplementedError):
        fused(inputs)


def test_without_units_a_model_computes_what_it_did_before(tmp_path):
    """The engine `hf` has its models in the trainer's process."""
    model = random_model("qwen3_5_text", tmp_path).model
    model.set_attn_implementation("eager")
    modeling = sys.modules[type(model).__module__]
    ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        share_prompts(model)  # a second time
        with pytest.MonkeyPatch.context() as undo:
            for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"):
                original = getattr(modeling, name).__wrapped__
                assert not hasattr(original, "takes_units")
                undo.setattr(modeling, name, original)
            assert torch.equal(model(ids, use_cache=False).logits, logits)


def test_layers_whose_functions_are_out_of_reach_are_refused(monkeypatch):
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(model_type="lfm2")
    with pytest.raises(SystemExit, match="lfm2: its recurrent layers are not those of transf"):
        share_prompts(model)
    # as the package kernels wraps it
    monkeypatch.setattr(nn.modules.linear, "causal_conv1d_fn", nn.Identity(), raising=False)
    with pytest.raises(SystemExit, match=r"lfm2: the package kernels .* USE_HUB_KERNELS=0"):
        share_prompts(model)


def test_layers_that_every_pack_would_compile_anew_are_refused(tmp_path):
    load = partial(random_model, "lfm2", tmp_path, "flex")
    load()
    with pytest.raises(SystemExit, match="--compile: the recurrent layers of --model"):
        load(compile_layers=True)

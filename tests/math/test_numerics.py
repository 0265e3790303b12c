"""Chunked log-probs and entropies equal the dense computation; shared prompts equal unshared
ones."""

import random
import sys
from copy import deepcopy
from itertools import pairwise
from math import ceil
from types import SimpleNamespace

import pytest
import sympy
import torch
from episodes import random_episodes
from helpers import random_policy, relative_l2
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._sympy.functions import Mod
from transformers.integrations import flex_attention as transformers_flex

import common.logprobs
from common.attention import (
    block_mask,
    block_masks,
    choose_attention,
    flash_inputs,
    packed_flash_attention,
    shared_prompt_attention,
    shared_prompt_flex_attention,
)
from common.limits import usable_cpus
from common.logprobs import LogitTransform, token_logprobs
from common.models import take
from common.packing import Layout, TokenIndex, build_micro_batch, pack
from common.types import Episode

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}


# as in Llama, in Granite, in Gemma 2, in both
TRANSFORMS = [
    LogitTransform(),
    LogitTransform(scale=0.25),
    LogitTransform(softcap=2.0),
    LogitTransform(scale=0.5, softcap=2.0),
]


def dense(hidden, weight, targets, temperature, transform=TRANSFORMS[0]):
    logits = transform.scale * (hidden @ weight.T)
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    logp = torch.log_softmax(logits / temperature, -1)
    return logp.gather(-1, targets[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("chunk_elements", [1, 7 * 53, 10**9])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_chunked_logprobs_equal_dense(dtype, chunk_elements, entropy_coef, transform, monkeypatch):
    monkeypatch.setitem(common.logprobs.CHUNK_ELEMENTS, "cpu", chunk_elements)
    torch.manual_seed(0)
    hidden = torch.randn(31, 16, dtype=dtype)
    weight = torch.randn(53, 16, dtype=dtype)
    targets = torch.randint(53, (31,))
    weights = torch.randn(2, 31, dtype=dtype)
    results = []
    for function in (token_logprobs, dense):
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        logprobs, entropy = function(*inputs, targets, 0.7, transform)
        (logprobs * weights[0] + entropy_coef * entropy * weights[1]).sum().backward()
        results.append([logprobs.detach(), entropy.detach(), *[x.grad for x in inputs]])
    for ours, reference in zip(*results):
        assert relative_l2([ours], [reference]) < BOUNDS[dtype]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_chunked_logprobs_gradient_by_finite_differences(transform):
    torch.manual_seed(1)
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (5,))
    torch.autograd.gradcheck(token_logprobs, (hidden, weight, targets, 1.3, transform))


def test_low_precision_inputs_accumulate_in_float32():
    torch.manual_seed(2)
    hidden = torch.randn(8, 32)
    weight = torch.randn(300, 32)
    targets = torch.randint(300, (8,))
    logprobs, entropy = token_logprobs(hidden.bfloat16(), weight.bfloat16(), targets)
    expected, _ = dense(hidden.bfloat16().float(), weight.bfloat16().float(), targets, 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert (logprobs - expected).abs().max() < 0.1  # only the matrix product rounds to bf16


def test_no_tensor_of_tokens_times_vocabulary_is_saved(monkeypatch):
    monkeypatch.setitem(common.logprobs.CHUNK_ELEMENTS, "cpu", 8 * 1000)
    hidden = torch.randn(512, 4, requires_grad=True)
    weight = torch.randn(1000, 4, requires_grad=True)
    saved_sizes = []

    def save(tensor):
        saved_sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        token_logprobs(hidden, weight, torch.zeros(512, dtype=torch.int64))
    assert max(saved_sizes) <= weight.numel()


def losses_and_gradients(policy, episodes, order=None, **options):
    """Log-probs in flat order, and the gradient of a fixed random combination of log-probs and
    entropies."""
    index = TokenIndex(episodes)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2, len(index), generator=generator, dtype=torch.float64)
    policy.zero_grad()
    logprobs = torch.full((len(index),), float("nan"), dtype=torch.float64)
    for batch in pack(episodes, order or range(len(episodes)), index, **options):
        mb_logprobs, mb_entropy = policy(batch, 0.8)
        w = weights[:, batch.token_index].to(mb_logprobs.dtype)
        (mb_logprobs * w[0] + mb_entropy * w[1]).sum().backward()
        logprobs[batch.token_index] = mb_logprobs.detach().double()
    assert not logprobs.isnan().any(), "a trained token has no place in the packs"
    return logprobs, [p.grad.clone() for p in policy.parameters()]


@pytest.mark.parametrize("dtype", BOUNDS)
def test_packing_variants_give_the_same_logprobs_and_gradients(tiny_config, dtype):
    policy = random_policy(tiny_config, dtype)
    episodes = random_episodes(3)
    # one episode, no padding
    unshared = Layout(share_prompts=False)
    reference = losses_and_gradients(policy, episodes, budget=1, layout=unshared)
    variants = {
        "shared, one micro-batch": {"budget": 10_000},
        "shared, small budget": {"budget": 40},
        "padded": {"budget": 60, "layout": Layout(share_prompts=False, multiple=32)},
        "packed unshared": {"budget": 200, "layout": unshared},
        "another order": {"budget": 60, "order": [7, 2, 11, 0, 4, 9, 1, 3, 10, 5, 8, 6]},
        "rows": {"budget": 60, "layout": Layout(rows=True)},
    }
    in_rows = random_policy(deepcopy(tiny_config), dtype)
    in_rows.attention = "rows"
    in_rows.model.set_attn_implementation("sdpa")
    for name, options in variants.items():
        reader = in_rows if name == "rows" else policy
        logprobs, gradients = losses_and_gradients(reader, episodes, **options)
        assert relative_l2([logprobs], [reference[0]]) < BOUNDS[dtype], name
        assert relative_l2(gradients, reference[1]) < BOUNDS[dtype], name


def test_packed_logprobs_equal_the_plain_model(tiny_config):
    """The reference is transformers' own forward on prompt + response, one by one, without any mask
    of ours. Environments begin two episodes of a group differently."""
    policy = random_policy(tiny_config)
    episodes = random_episodes(4)
    for episode in episodes[2:4]:
        episode.prompt_ids = [*episode.prompt_ids, 3 + episode.sample_index]
    packed, _ = losses_and_gradients(policy, episodes, budget=100)
    policy.model.set_attn_implementation("sdpa")
    plain = []
    for episode in episodes:
        ids = torch.tensor([episode.prompt_ids + episode.response_ids])
        logp = torch.log_softmax(policy.model(ids).logits[0] / 0.8, -1)
        for t, trained in enumerate(episode.loss_mask, start=len(episode.prompt_ids)):
            if trained:
                plain.append(logp[t - 1, ids[0, t]])
    assert relative_l2([packed], [torch.stack(plain).detach()]) < 1e-10


def test_shared_prompts_save_tokens():
    episodes = random_episodes(5, prompts=4, samples=8)
    index = TokenIndex(episodes)
    shared = pack(episodes, range(32), index, budget=500)
    unshared = pack(episodes, range(32), index, budget=500, layout=Layout(share_prompts=False))
    num_shared = sum(batch.input_ids.numel() for batch in shared)
    num_unshared = sum(batch.input_ids.numel() for batch in unshared)
    # an episode that trains nothing is in no pack
    repeated = sum(len(e.prompt_ids) for e in episodes if any(e.loss_mask))
    once = sum({e.prompt_index: len(e.prompt_ids) for e in episodes}.values())
    assert num_unshared - num_shared == repeated - once


def test_budget_holds_and_an_empty_selection_is_one_padding_token(tiny_config):
    episodes = random_episodes(6, prompts=6)
    index = TokenIndex(episodes)
    # a prompt and its longest response fit, the whole group does not, or does
    for budget in (30, 90):
        for batch in pack(episodes, range(len(episodes)), index, budget=budget):
            assert batch.input_ids.numel() <= budget
    policy = random_policy(tiny_config)
    empty = build_micro_batch(episodes, [], index, Layout())
    logprobs, entropy = policy(empty)
    (logprobs.sum() + entropy.sum()).backward()
    assert empty.input_ids.shape == (1, 1)
    assert len(logprobs) == 0
    padded = build_micro_batch(episodes, [], index, Layout(multiple=128))
    assert padded.input_ids.shape == (1, 128)
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


@pytest.mark.parametrize(
    "seed",
    # by default four draws of units for each window
    [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 8))],
)
@pytest.mark.parametrize("window", [None, 1, 130, 300])
def test_the_block_mask_is_that_of_the_dense_mask(seed, window):
    """With a window some blocks are visited in which nothing is seen, or asked for each pair though
    all is."""
    rng = random.Random(seed)
    units = []
    while sum(map(sum, units)) < 900:
        longest = rng.choice([5, 150, 400])
        units.append([rng.randint(1, longest) for _ in range(rng.randint(1, 5))])
    num_tokens = sum(map(sum, units))
    length = ceil(num_tokens / 128) * 128
    if length > num_tokens:
        units.append([length - num_tokens])  # padding
    mask = block_mask(units, torch.device("cpu"), window)
    assert_both_sides_are_torchs(mask)
    dense = create_block_mask(mask.mask_mod, None, None, length, length, device="cpu")
    partial = visible_blocks(mask.kv_num_blocks, mask.kv_indices)
    full = visible_blocks(mask.full_kv_num_blocks, mask.full_kv_indices)
    dense_partial = visible_blocks(dense.kv_num_blocks, dense.kv_indices)
    dense_full = visible_blocks(dense.full_kv_num_blocks, dense.full_kv_indices)
    if window is None:
        assert partial == dense_partial
        assert full == dense_full
    for row in range(length // 128):
        assert set(full[row]) <= set(dense_full[row])
        assert set(partial[row]) | set(full[row]) >= set(dense_partial[row]) | set(dense_full[row])
    seen = mask.mask_mod(None, None, torch.arange(length)[:, None], torch.arange(length))
    assert torch.equal(seen, dense_mask(units, window))


def assert_both_sides_are_torchs(mask) -> None:
    """torch makes the queries of each key from the keys of each query, on the mask's device."""
    torchs = BlockMask.from_kv_blocks(
        mask.kv_num_blocks,
        mask.kv_indices,
        mask.full_kv_num_blocks,
        mask.full_kv_indices,
        BLOCK_SIZE=128,
        mask_mod=mask.mask_mod,
        seq_lengths=mask.seq_lengths,
    )
    ours = mask.as_tuple(flatten=True)
    assert len(ours) == len(torchs.as_tuple(flatten=True))
    for part, torchs_part in zip(ours, torchs.as_tuple(flatten=True)):
        if isinstance(part, torch.Tensor):
            assert torch.equal(part, torchs_part)
            assert (part.dtype, part.stride()) == (torchs_part.dtype, torchs_part.stride())
        else:
            assert part is torchs_part or part == torchs_part


def visible_blocks(num_blocks, indices) -> list[list[int]]:
    """The blocks of keys that each block of queries sees, of tensors [1, 1, B] and [1, 1, B, B]."""
    return [row[:n] for row, n in zip(indices[0, 0].tolist(), num_blocks[0, 0].tolist())]


def dense_mask(units: list[list[int]], window: int | None) -> torch.Tensor:
    """Which token sees which, [L, L] bool, from the bounds of segments."""
    length = sum(map(sum, units))
    mask = torch.zeros(length, length, dtype=torch.bool)
    end = 0
    for prompt, *responses in units:
        prompt_tokens = torch.arange(end, end + prompt)
        end += prompt
        for size in (0, *responses):
            text = torch.cat([prompt_tokens, torch.arange(end, end + size)])
            end += size
            visible = torch.ones(len(text), len(text), dtype=torch.bool).tril()
            if window is not None:
                visible = visible.triu(1 - window)
            mask[text[:, None], text] = visible
    return mask


@pytest.mark.parametrize("option", [{"position_bias": torch.ones(1)}, {"dropout": 0.1}])
def test_an_option_that_packs_do_not_express_is_refused(option):
    query, key, value = (torch.randn(1, 2, 5, 4) for _ in range(3))
    inputs = (torch.nn.Identity(), query, key, value, None)
    harmless = {"dropout": 0.0, "softcap": None, "is_causal": True}
    shared_prompt_attention(*inputs, units=[[3, 2]], **harmless)
    (name,) = option
    for attention, packs in (
        (shared_prompt_attention, {"units": [[3, 2]]}),
        (shared_prompt_flex_attention, {"masks": {None: None}}),
        (packed_flash_attention, {"text_bounds": None, "longest_text": 5}),
    ):
        with pytest.raises(TypeError, match=f"Identity needs {name}, not supported"):
            attention(*inputs, **packs, **option)


def test_layout_by_hand():
    """Prompt of 2, responses of 2 and 1: the second response sees the prompt and itself only."""
    episodes = [
        Episode(0, 0, [5, 6], [7, 8], [1, 1], [0.0, 0.0], "stop"),
        Episode(0, 1, [5, 6], [9], [1], [0.0], "stop"),
    ]
    layout = Layout(multiple=4)
    (batch,) = pack(episodes, [0, 1], TokenIndex(episodes), budget=100, layout=layout)
    assert batch.units == [[2, 2, 1], [3]]
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 1, 2]]
    assert batch.hidden_index.tolist() == [1, 2, 1]
    assert batch.targets.tolist() == [7, 8, 9]
    mask = block_mask(batch.units, batch.input_ids.device)
    visible = mask.mask_mod(None, None, torch.arange(8)[:, None], torch.arange(8)).int()
    assert visible.tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1, 1, 1],
    ]


SHORT = [[3, 4, 1], [2, 5], [6]]
LONG = [[520, 520, 7], [650, 300]]
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "units, variant",
    [
        (SHORT, {}),
        (LONG, {}),
        (SHORT, {"sliding_window": 3}),
        (LONG, {"sliding_window": 400}),
        (SHORT, {"s_aux": SINKS}),
        (SHORT, {"softcap": 1.5}),
        (SHORT, {"sliding_window": 5, "softcap": 1.5, "s_aux": SINKS}),
    ],
)
def test_attention_by_segments_is_attention_under_the_dense_mask(units, variant):
    """Values and gradients. Short segments use plain matrix products, long ones torch's kernel,
    which needs no mask if the response is as long as its prompt."""
    length = sum(map(sum, units))
    generator = torch.Generator().manual_seed(0)
    options = {"dtype": torch.float64, "generator": generator, "requires_grad": True}
    query = torch.randn(1, 4, length, 8, **options)
    key = torch.randn(1, 2, length, 8, **options)
    value = torch.randn(1, 2, length, 8, **options)
    inputs = [query, key, value]
    variant = dict(variant)
    if "s_aux" in variant:
        variant["s_aux"] = variant["s_aux"].clone().requires_grad_()
        inputs.append(variant["s_aux"])
    upstream = torch.randn(1, length, 4, 8, dtype=torch.float64, generator=generator)
    output, _ = shared_prompt_attention(
        None, query, key, value, None, units=units, scaling=0.3, **variant
    )
    gradients = torch.autograd.grad((output * upstream).sum(), inputs)

    scores = query @ key.repeat_interleave(2, 1).mT * 0.3
    if "softcap" in variant:
        scores = variant["softcap"] * torch.tanh(scores / variant["softcap"])
    mask = dense_mask(units, variant.get("sliding_window"))
    exponentials = scores.masked_fill(~mask, float("-inf")).exp()
    total = exponentials.sum(-1, keepdim=True)
    if "s_aux" in variant:
        total = total + variant["s_aux"].exp()[None, :, None, None]
    expected = (exponentials / total @ value.repeat_interleave(2, 1)).transpose(1, 2)
    expected_gradients = torch.autograd.grad((expected * upstream).sum(), inputs)
    assert (output - expected).abs().max() < 1e-12
    for gradient, expected_gradient in zip(gradients, expected_gradients):
        assert (gradient - expected_gradient).abs().max() < 1e-11


@pytest.mark.parametrize(
    "heads, kv_heads, variant",
    [(12, 2, {}), (4, 2, {"sliding_window": 100}), (3, 3, {"softcap": 1.5})],
)
def test_flex_attention_is_transformers_without_repeated_keys(
    heads, kv_heads, variant, uncompiled_flex, monkeypatch
):
    """transformers repeats keys where the number of heads is no power of two, as 12."""
    monkeypatch.setattr(transformers_flex, "compile_friendly_flex_attention", uncompiled)
    units = [[130, 200, 90], [60, 20], [12]]
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, heads, 512, 16, generator=generator)
    key = torch.randn(1, kv_heads, 512, 16, generator=generator)
    value = torch.randn(1, kv_heads, 512, 16, generator=generator)
    module = torch.nn.Identity()
    masks = block_masks(units, (None, 100), torch.device("cpu"))
    output, _ = shared_prompt_flex_attention(
        module, query, key, value, None, masks=masks, scaling=0.3, **variant
    )
    mask = masks[variant.get("sliding_window")]
    expected, _ = transformers_flex.flex_attention_forward(
        module, query, key, value, mask, scaling=0.3, softcap=variant.get("softcap")
    )
    assert torch.equal(output, expected)


@pytest.mark.parametrize(
    "value_size, variant", [(16, {}), (8, {"sliding_window": 30}), (16, {"softcap": 1.5})]
)
def test_flash_attention_gets_the_bounds_of_texts(value_size, variant, monkeypatch):
    """Its kernel stands in the test as its documentation has it: GPUs alone have it. Values may
    have smaller heads than queries, as in DeepSeek-V3."""
    calls = []

    def kernel(q, k, v, **options):
        calls.append(options)
        return varlen_attention(q, k, v, **options)

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=kernel))
    units = [[40, 60], [20], [12]]
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 132, 16, generator=generator)
    key = torch.randn(1, 2, 132, 16, generator=generator)
    value = torch.randn(1, 2, 132, value_size, generator=generator)
    inputs = flash_inputs(units, torch.device("cpu"))
    output, _ = packed_flash_attention(
        None, query, key, value, None, scaling=0.3, **inputs, **variant
    )
    expected, _ = shared_prompt_attention(
        None, query, key, value, None, units=units, scaling=0.3, **variant
    )
    assert output.shape == (1, 132, 4, value_size)
    assert torch.allclose(output, expected, atol=1e-6)
    assert calls[0]["cu_seqlens_q"].tolist() == [0, 100, 120, 132]
    assert calls[0]["cu_seqlens_q"].dtype == torch.int32
    assert calls[0]["max_seqlen_q"] == 100


def varlen_attention(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    window_size,
    softcap,
):
    """flash_attn.flash_attn_varlen_func of [L, heads, D], text by text."""
    assert causal and q.shape[2] == v.shape[2]
    assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k
    window = None if window_size == (-1, -1) else window_size[0] + 1
    options = {"units": None, "scaling": softmax_scale, "sliding_window": window}
    outputs = []
    for start, end in pairwise(cu_seqlens_q.tolist()):
        text = [x[start:end].transpose(0, 1)[None] for x in (q, k, v)]
        options["units"] = [[end - start]]
        output, _ = shared_prompt_attention(None, *text, None, **options, softcap=softcap or None)
        outputs.append(output[0])
    return torch.cat(outputs)


def uncompiled(query, key, value, training=False, **options):
    return transformers_flex.flex_attention(query, key, value, **options)


@pytest.mark.parametrize("units", [[[3, 4, 1]], [[530, 530, 7]]], ids=["short", "long"])
def test_attention_takes_queries_in_another_dtype_than_values(units):
    """Rotary embeddings may return query and key in float32; torch's kernel refuses to mix."""
    length = sum(units[0])
    query = torch.randn(1, 2, length, 8)
    key = torch.randn(1, 2, length, 8)
    value = torch.randn(1, 2, length, 8, dtype=torch.bfloat16)
    output, _ = shared_prompt_attention(None, query, key, value, None, units=units)
    expected, _ = shared_prompt_attention(
        None, query.bfloat16(), key.bfloat16(), value, None, units=units
    )
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, expected)


def test_attention_and_compilation_that_cannot_work_are_refused(monkeypatch):
    cpu = torch.device("cpu")
    gpu = torch.device("cuda")
    for attention in ("auto", "sdpa", "flex"):
        with pytest.raises(SystemExit, match="--compile needs a GPU"):
            choose_attention(attention, cpu, compile_layers=True)
    with pytest.raises(SystemExit, match="--attention flex needs a GPU"):
        choose_attention("flex", cpu)
    with pytest.raises(SystemExit, match="--compile needs --attention flex or flash"):
        choose_attention("sdpa", gpu, compile_layers=True)
    with pytest.raises(SystemExit, match="--attention flash needs --dtype bf16 or fp16"):
        choose_attention("flash", gpu, dtype=torch.float32)

    def find_spec(name):
        return None if name == "flash_attn" else name

    # transformers would use the package `kernels`, which fetches code from the hub
    monkeypatch.setattr("common.attention.find_spec", find_spec)
    with pytest.raises(SystemExit, match="pip install flash-attn"):
        choose_attention("flash", gpu, dtype=torch.bfloat16)


def test_compiled_layers_serve_packs_of_every_length_under_fsdp(
    tiny_config, tmp_path, world, eager_compiler
):
    from common.distributed import forward_context, make_mesh, wrap_model
    from common.models import load_model

    random_policy(tiny_config, torch.float32).model.save_pretrained(tmp_path)
    plain = load_model(tmp_path, "sdpa")
    compiled = load_model(tmp_path, "flex", compile_layers=True)
    compiled = wrap_model(compiled, make_mesh(world, "fsdp"), torch.float32)
    episodes = random_episodes(5, prompts=12, samples=5)
    index = TokenIndex(episodes)
    lengths = set()
    counters = torch._dynamo.utils.counters
    graphs_before = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        for budget in (128, 256, 384, 512, 640):
            for batch in pack(
                episodes, range(len(episodes)), index, budget=budget, layout=Layout(multiple=128)
            ):
                lengths.add(batch.input_ids.shape[1])
                with forward_context(compiled):
                    logprobs, _ = compiled(batch)
                expected, _ = plain(batch)
                torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-5)
    assert len(lengths) >= 4
    assert counters["stats"]["unique_graphs"] - graphs_before <= 3, "a graph for each length"
    assert not counters["graph_break"]
    flex_nodes = []
    for graph in eager_compiler:
        flex_nodes += [node for node in graph.graph.nodes if node.name.startswith("flex_attention")]
    assert len(flex_nodes) >= 2, "of one length, of any"
    for node in flex_nodes:
        for tensor in node.args[:2]:
            length = tensor.meta["example_value"].shape[2]
            assert is_known_to_be_whole_blocks(length), "kernels would check bounds"


def is_known_to_be_whole_blocks(length: int | torch.SymInt) -> bool:
    """As the compiler's template for flex attention asks."""
    if isinstance(length, int):
        return length % 128 == 0
    shapes = length.node.shape_env
    return bool(shapes._maybe_evaluate_static(sympy.Eq(Mod(length.node.expr, 128), 0)))


@pytest.mark.skipif(usable_cpus() < 2, reason="needs two CPUs")
def test_gradients_of_repeated_indices_are_added_in_one_order():
    """Those of `hidden[index]` are not, with several threads: the hidden state at a prompt's end
    predicts the first token of all of its responses."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    hidden = torch.randn(512, 128, requires_grad=True)
    index = torch.cat([torch.arange(448), torch.full((64,), 7)])[torch.randperm(512)]
    weights = torch.randn(512, 128)
    gradients = []
    for _ in range(20):
        loss = (take(hidden, index) * weights).sum()
        gradients += torch.autograd.grad(loss, hidden)
    torch.set_num_threads(before)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    assert "IndexSelect" in take(hidden, index).grad_fn.name()

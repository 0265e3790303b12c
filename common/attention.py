"""Attention over packs with shared prompts: SDPA segment by segment on any device, flex attention
on GPUs."""

from importlib.util import find_spec
from math import ceil

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from common.torch_repair import Later, transformers

bias = Later("torch.nn.attention.bias")
flex = Later("torch.nn.attention.flex_attention")
BLOCK = 128  # tokens of a block of flex attention
# options of transformers that change nothing in `shared_prompt_attention`
WITHOUT_EFFECT = {
    "is_causal",
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "seq_idx",
}


def choose_attention(
    flag: str, device: torch.device, compile_layers: bool = False, dtype=torch.bfloat16
) -> str:
    """`--attention auto`: flex on GPUs of capability 8.0 or more, whatever the dtype, else SDPA
    (flex has no backward on CPU, no kernels on Volta). SystemExit for a choice that this device or
    dtype does not allow."""
    if flag == "auto":
        flag = "sdpa"
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8:
            flag = "flex"
    if device.type == "cpu" and (compile_layers or flag != "sdpa"):
        gpu_flag = "--compile" if compile_layers else f"--attention {flag}"
        raise SystemExit(f"{gpu_flag} needs a GPU; on a CPU leave it out")
    if compile_layers and flag == "sdpa":
        raise SystemExit("--compile needs --attention flex or flash: sdpa compiles every pack anew")
    if flag == "flash":
        if dtype == torch.float32:
            raise SystemExit("--attention flash needs --dtype bf16 or fp16")
        # transformers would use the package `kernels` instead, which fetches code from the hub
        if find_spec("flash_attn") is None:
            raise SystemExit("--attention flash: pip install flash-attn (kernels is no substitute)")
    return flag


def shared_prompt_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    units: list[list[int]],
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Segment by segment: a response sees its prompt and itself. There is no [L, L] mask, and
    nothing is quadratic in L.

    units: for each prompt of the pack, its length and those of its responses (`MicroBatch.units`).
    The signature is that of transformers' AttentionInterface: query [1, H, L, D], key and value
    [1, K, L, D] -> ([1, L, H, D], None), with H a multiple of K (grouped queries). TypeError for an
    option that would change the result (`softcap`, `s_aux`, a sliding window, dropout).
    """
    unsupported = []
    for name, setting in options.items():
        is_dropout_off = name == "dropout" and setting == 0.0
        if setting is not None and name not in WITHOUT_EFFECT and not is_dropout_off:
            unsupported.append(name)
    if unsupported:
        raise TypeError(
            f"{type(module).__name__} needs {', '.join(unsupported)}, not supported here: use "
            "--attention flash"
        )
    # rotary embeddings may return float32
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    lengths = [length for unit in units for length in unit]
    segments = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)))
    outputs = []
    for unit in units:
        q, prompt_k, prompt_v = next(segments)
        outputs.append(_causal_attention(q, prompt_k, prompt_v, scaling))
        for _ in unit[1:]:
            q, k, v = next(segments)
            k = torch.cat([prompt_k, k], dim=2)
            v = torch.cat([prompt_v, v], dim=2)
            outputs.append(_causal_attention(q, k, v, scaling))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """The queries [1, H, R, D] are the last R of S tokens; key and value [1, K, S, D] ->
    [1, H, R, D]."""
    num_queries = query.shape[2]
    num_keys = key.shape[2]
    on_cpu = query.device.type == "cpu"
    if on_cpu and num_queries * num_keys <= 2**18:
        # SDPA's CPU kernel takes 2 to 3 times as long
        return _explicit_attention(query, key, value, scaling)
    group_size = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(group_size, dim=1)
    value = value.repeat_interleave(group_size, dim=1)
    if on_cpu and 2 * num_queries >= num_keys:
        # with a mask as below, a CPU would keep a tensor [R, S] for the backward
        return _padded_attention(query, key, value, scaling)
    mask = bias.causal_lower_right(num_queries, num_keys)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


def _explicit_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """All scores at once; the queries of a group are multiplied with their keys together."""
    _, heads, num_queries, head_size = query.shape
    _, kv_heads, num_keys, _ = key.shape
    if scaling is None:
        scaling = head_size**-0.5
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    # G = H / K query heads for each key head
    grouped_query = query.reshape(1, kv_heads, -1, head_size)  # [1, K, G * R, D]
    scores = grouped_query @ key.mT * scaling  # [1, K, G * R, S]
    scores = scores.unflatten(2, (-1, num_queries)).masked_fill(~mask, float("-inf"))
    output = scores.flatten(2, 3).softmax(-1) @ value
    return output.reshape(1, heads, num_queries, -1)


def _padded_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Queries are padded in front to as many as there are keys: square attention needs no mask."""
    num_queries = query.shape[2]
    query = pad(query, (0, 0, key.shape[2] - num_queries, 0))
    output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return output[:, :, -num_queries:]


def block_mask(units: list[list[int]], device: torch.device) -> "flex.BlockMask":
    """For flex attention: which query sees which key, from the bounds of segments.

    torch's `create_block_mask` would make it from a dense [L, L] mask: 2.6 GB for 16,384 tokens.
    """
    unit_of_token: list[int] = []
    segment_of_token: list[int] = []  # within its unit; 0: the prompt
    for i, unit in enumerate(units):
        for j, length in enumerate(unit):
            unit_of_token.extend([i] * length)
            segment_of_token.extend([j] * length)
    length = len(unit_of_token)
    unit_ids = torch.tensor(unit_of_token, device=device)
    segment_ids = torch.tensor(segment_of_token, device=device)

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_unit = unit_ids[query] == unit_ids[key]
        same_segment = segment_ids[query] == segment_ids[key]
        in_prompt = segment_ids[key] == 0
        return (key <= query) & same_unit & (in_prompt | same_segment)

    some, full = block_tables(units, ceil(length / BLOCK))
    num_partial, partial_blocks = _block_lists(some & ~full, device)
    num_full, full_blocks = _block_lists(full, device)
    return flex.BlockMask.from_kv_blocks(
        kv_num_blocks=num_partial,
        kv_indices=partial_blocks,
        full_kv_num_blocks=num_full,
        full_kv_indices=full_blocks,
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(length, length),
    )


def block_tables(units: list[list[int]], num_blocks: int) -> tuple[Tensor, Tensor]:
    """Two tables [query blocks, key blocks] bool: is some of a block seen, and is all of it."""
    some = torch.zeros(num_blocks, num_blocks, dtype=torch.bool)
    full = torch.zeros(num_blocks, num_blocks, dtype=torch.bool)
    unit_start = 0
    for unit in units:
        prompt_end = unit_start + unit[0]
        unit_end = unit_start + sum(unit)
        # what follows a block of the prompt within its unit sees all of that block
        _set_below(
            full, _blocks_inside(unit_start, unit_end), _blocks_inside(unit_start, prompt_end)
        )
        start = unit_start
        # the first response continues its prompt as any text does
        for length in [sum(unit[:2]), *unit[2:]]:
            end = start + length
            touched = _blocks_touched(start, end)
            inside = _blocks_inside(start, end)
            _set_below(some, touched, touched, with_diagonal=True)
            _set_below(full, inside, inside)
            if start > unit_start:
                some[touched, _blocks_touched(unit_start, prompt_end)] = True
            start = end
        unit_start = unit_end
    return some, full


def _blocks_touched(start: int, end: int) -> slice:
    """The blocks that hold a token from `start` to `end`."""
    return slice(start // BLOCK, ceil(end / BLOCK))


def _blocks_inside(start: int, end: int) -> slice:
    """The blocks that hold no other token."""
    return slice(ceil(start / BLOCK), end // BLOCK)


def _set_below(table: Tensor, rows: slice, columns: slice, with_diagonal: bool = False) -> None:
    """Set what lies below the diagonal of a part of a table, in place."""
    part = table[rows, columns]
    part |= torch.ones_like(part).tril(0 if with_diagonal else -1)


def _block_lists(table: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each row of a table [B, B] the number of blocks that are set, [1, 1, B] int32, and the
    blocks, those that are set first, [1, 1, B, B] int32."""
    counts = table.sum(-1).to(torch.int32)
    order = table.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[None, None].to(device), order[None, None].to(device)


def register_attention() -> None:
    """Register both with transformers under names of our own: Qwen2.5-VL refuses flex attention
    under its usual name."""
    register = transformers.AttentionInterface.register
    register("shared_prompts", shared_prompt_attention)
    register("shared_prompts_flex", transformers.integrations.flex_attention.flex_attention_forward)

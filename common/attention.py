"""Attention over packs with shared prompts: SDPA segment by segment on any device, flex attention
on GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import ceil

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from common.torch_repair import Later, transformers

bias = Later("torch.nn.attention.bias")
flex = Later("torch.nn.attention.flex_attention")
BLOCK = 128  # tokens of a block of flex attention
WINDOW_QUERIES = 512  # of one call where a window is shorter than the text
# options of transformers that change nothing here
WITHOUT_EFFECT = {
    "is_causal",
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "seq_idx",
}


@dataclass(frozen=True)
class Variant:
    """What an attention has beside the causal mask, in transformers' terms."""

    scaling: float | None = None  # of the scores; None: 1 / sqrt(head size)
    window: int | None = None  # a token sees so many tokens, itself included
    sinks: Tensor | None = None  # [H]: scores of a key without a value, one for each head
    softcap: float | None = None  # scores x become softcap * tanh(x / softcap)


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
    if device.type == "cpu" and (compile_layers or flag not in ("sdpa", "rows")):
        gpu_flag = "--compile" if compile_layers else f"--attention {flag}"
        raise SystemExit(f"{gpu_flag} needs a GPU; on a CPU leave it out")
    if compile_layers and flag in ("sdpa", "rows"):
        raise SystemExit(
            f"--compile needs --attention flex or flash: {flag} compiles every pack anew"
        )
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
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Segment by segment: a response sees its prompt and itself. There is no [L, L] mask, and
    nothing is quadratic in L.

    units: for each prompt of the pack, its length and those of its responses (`MicroBatch.units`).
    The signature is that of transformers' AttentionInterface: query [1, H, L, D], key and value
    [1, K, L, D] -> ([1, L, H, D], None), with H a multiple of K (grouped queries); for the other
    options see `Variant`. TypeError for an option that would change the result.
    """
    check_options(module, options)
    variant = Variant(scaling, sliding_window, s_aux, softcap)
    # rotary embeddings may return float32
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    lengths = [length for unit in units for length in unit]
    segments = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)))
    outputs = []
    for unit in units:
        q, prompt_k, prompt_v = next(segments)
        outputs.append(_causal_attention(q, prompt_k, prompt_v, variant))
        for _ in unit[1:]:
            q, k, v = next(segments)
            k = torch.cat([prompt_k, k], dim=2)
            v = torch.cat([prompt_v, v], dim=2)
            outputs.append(_causal_attention(q, k, v, variant))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def check_options(module: nn.Module, options: dict[str, object]) -> None:
    """TypeError for an option of an attention module that would change the result."""
    unsupported = []
    for name, setting in options.items():
        is_dropout_off = name == "dropout" and setting == 0.0
        if setting is not None and name not in WITHOUT_EFFECT and not is_dropout_off:
            unsupported.append(name)
    if unsupported:
        raise TypeError(
            f"{type(module).__name__} needs {', '.join(unsupported)}, not supported here: use "
            "--attention rows"
        )


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
    """The queries [1, H, R, D] are the last R of S tokens; key and value [1, K, S, D] ->
    [1, H, R, D]."""
    num_queries = query.shape[2]
    num_keys = key.shape[2]
    if variant.window is None or variant.window >= num_keys:
        return _attention(query, key, value, replace(variant, window=None))
    # a few queries at a time, with the keys that one of them sees: nothing is quadratic in S
    outputs = []
    for start in range(0, num_queries, WINDOW_QUERIES):
        end = min(start + WINDOW_QUERIES, num_queries)
        first = num_keys - num_queries + start  # the first query's place among the keys
        keys = slice(max(0, first - variant.window + 1), first + end - start)
        outputs.append(
            _attention(query[:, :, start:end], key[:, :, keys], value[:, :, keys], variant)
        )
    return torch.cat(outputs, dim=2)


def _attention(query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
    """As `_causal_attention`, by the kernel that is fastest."""
    num_queries = query.shape[2]
    num_keys = key.shape[2]
    on_cpu = query.device.type == "cpu"
    if variant.sinks is not None or variant.softcap is not None:  # SDPA has neither
        return _explicit_attention(query, key, value, variant)
    if on_cpu and num_queries * num_keys <= 2**18:
        # SDPA's CPU kernel takes 2 to 3 times as long
        return _explicit_attention(query, key, value, variant)
    group_size = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(group_size, dim=1)
    value = value.repeat_interleave(group_size, dim=1)
    if variant.window is not None:
        mask = _visible(num_queries, num_keys, variant.window, query.device)
    elif on_cpu and 2 * num_queries >= num_keys:
        # with a mask as below, a CPU would keep a tensor [R, S] for the backward
        return _padded_attention(query, key, value, variant.scaling)
    else:
        mask = bias.causal_lower_right(num_queries, num_keys)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=variant.scaling)


def _visible(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys each of the last queries sees, [R, S] bool."""
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    mask = mask.tril(num_keys - num_queries)
    if window is not None:
        mask = mask.triu(num_keys - num_queries - window + 1)
    return mask


def _explicit_attention(query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
    """All scores at once; the queries of a group are multiplied with their keys together."""
    _, heads, num_queries, head_size = query.shape
    _, kv_heads, num_keys, _ = key.shape
    scaling = head_size**-0.5 if variant.scaling is None else variant.scaling
    mask = _visible(num_queries, num_keys, variant.window, query.device)
    # G = H / K query heads for each key head
    grouped_query = query.reshape(1, kv_heads, -1, head_size)  # [1, K, G * R, D]
    scores = grouped_query @ key.mT * scaling  # [1, K, G * R, S]
    if variant.softcap is not None:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    scores = scores.unflatten(2, (-1, num_queries)).masked_fill(~mask, float("-inf"))
    if variant.sinks is None:
        weights = scores.flatten(2, 3).softmax(-1)
    else:
        sinks = variant.sinks.to(scores.dtype).view(1, kv_heads, -1, 1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
        weights = scores.softmax(-1)[..., :-1].flatten(2, 3)
    return (weights @ value).reshape(1, heads, num_queries, -1)


def _padded_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Queries are padded in front to as many as there are keys: square attention needs no mask."""
    num_queries = query.shape[2]
    query = pad(query, (0, 0, key.shape[2] - num_queries, 0))
    output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return output[:, :, -num_queries:]


def shared_prompt_flex_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    masks: "dict[int | None, flex.BlockMask]",
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    units: list[list[int]] | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """`shared_prompt_attention` in flex attention's kernels; `masks` has one for each window of the
    model (`block_masks`). units: for recurrent layers, if the model has some."""
    from transformers.integrations.flex_attention import flex_attention_forward

    check_options(module, options)
    mask = masks[sliding_window]
    return flex_attention_forward(
        module, query, key, value, mask, scaling, softcap=softcap, s_aux=s_aux
    )


def block_masks(
    units: list[list[int]], windows: Sequence[int | None], device: torch.device
) -> "dict[int | None, flex.BlockMask]":
    """A block mask for each window; those that are longer than all texts share one."""
    longest = max(unit[0] + max(unit[1:], default=0) for unit in units)
    masks: dict[int | None, flex.BlockMask] = {}
    for window in windows:
        shown = window if window is not None and window < longest else None
        if shown not in masks:
            masks[shown] = block_mask(units, device, shown)
        masks[window] = masks[shown]
    return masks


def block_mask(
    units: list[list[int]], device: torch.device, window: int | None = None
) -> "flex.BlockMask":
    """For flex attention: which query sees which key, from the bounds of segments.

    torch's `create_block_mask` would make it from a dense [L, L] mask: 2.6 GB for 16,384 tokens.
    """
    unit_of_token: list[int] = []
    segment_of_token: list[int] = []  # within its unit; 0: the prompt
    place_of_token: list[int] = []  # within its text, a prompt with one of its responses
    for i, unit in enumerate(units):
        for j, length in enumerate(unit):
            start = unit[0] if j > 0 else 0
            unit_of_token.extend([i] * length)
            segment_of_token.extend([j] * length)
            place_of_token.extend(range(start, start + length))
    length = len(unit_of_token)
    unit_ids = torch.tensor(unit_of_token, device=device)
    segment_ids = torch.tensor(segment_of_token, device=device)
    places = torch.tensor(place_of_token, device=device)

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_unit = unit_ids[query] == unit_ids[key]
        same_segment = segment_ids[query] == segment_ids[key]
        in_prompt = segment_ids[key] == 0
        return (key <= query) & same_unit & (in_prompt | same_segment)

    def visible_in_window(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = places[query] - places[key] < window
        return visible(row, head, query, key) & near

    some, full = block_tables(units, ceil(length / BLOCK))
    if window is not None:
        nearest, farthest = _block_distances(place_of_token)
        some &= nearest < window
        full &= farthest < window
    num_partial, partial_blocks = _block_lists(some & ~full, device)
    num_full, full_blocks = _block_lists(full, device)
    return flex.BlockMask.from_kv_blocks(
        kv_num_blocks=num_partial,
        kv_indices=partial_blocks,
        full_kv_num_blocks=num_full,
        full_kv_indices=full_blocks,
        BLOCK_SIZE=BLOCK,
        mask_mod=visible if window is None else visible_in_window,
        seq_lengths=(length, length),
    )


def _block_distances(places: list[int]) -> tuple[Tensor, Tensor]:
    """Bounds of how far, within its text, a query of a block may stand behind a key of another:
    the least and the greatest, [query blocks, key blocks] int64 each."""
    padding = -len(places) % BLOCK
    padded = torch.tensor(places + [places[-1]] * padding).view(-1, BLOCK)
    lowest, highest = padded.aminmax(dim=-1)
    return lowest[:, None] - highest, highest[:, None] - lowest


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
    register("shared_prompts_flex", shared_prompt_flex_attention)

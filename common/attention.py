"""Attention over packs with shared prompts: SDPA segment by segment on any device, flex attention
on GPUs. FlashAttention reads packs without shared prompts. --attention rows has no packs: there
transformers' own attention is used."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from math import ceil

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from common.distributed import to_device
from common.torch_repair import Later, transformers

attention_bias = Later("torch.nn.attention.bias")
flex = Later("torch.nn.attention.flex_attention")
BLOCK = 128  # tokens of a block of flex attention
WINDOW_QUERIES = 512  # queries of one SDPA call, where a window is shorter than the text
# up to so many scores of a head, SDPA's CPU kernel takes 2 to 3 times as long as plain products
FEW_SCORES = 2**18
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
    attention: str,
    device: torch.device,
    compile_layers: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> str:
    """--attention, with a choice in place of auto: flex on GPUs of capability 8.0 or more, whatever
    the dtype, else SDPA (flex has no backward on CPU, no kernels on Volta). SystemExit for what a
    CPU, --compile or flash attention rules out; the capability of a GPU is looked up for auto
    alone."""
    if attention == "auto":
        attention = "sdpa"
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8:
            attention = "flex"
    if device.type == "cpu" and (compile_layers or attention not in ("sdpa", "rows")):
        gpu_flag = "--compile" if compile_layers else f"--attention {attention}"
        raise SystemExit(f"{gpu_flag} needs a GPU; on a CPU leave it out")
    if compile_layers and attention in ("sdpa", "rows"):
        raise SystemExit(
            f"--compile needs --attention flex or flash: {attention} compiles every pack anew"
        )
    if attention == "flash":
        if dtype == torch.float32:
            raise SystemExit("--attention flash needs --dtype bf16 or fp16")
        # for a vision tower transformers would use the package `kernels` instead, which fetches
        # code from the hub
        if find_spec("flash_attn") is None:
            raise SystemExit("--attention flash: pip install flash-attn (kernels is no substitute)")
    return attention


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
    """Segment by segment: a response sees its prompt and itself. No mask or score is of a whole
    pack: what is quadratic is so in the length of a prompt with one of its responses.

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
    segments = zip(
        query.split(lengths, dim=2), key.split(lengths, dim=2), value.split(lengths, dim=2)
    )
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
    if on_cpu and num_queries * num_keys <= FEW_SCORES:
        return _explicit_attention(query, key, value, variant)
    group_size = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(group_size, dim=1)
    value = value.repeat_interleave(group_size, dim=1)
    if variant.window is not None:
        mask = _visible(num_queries, num_keys, variant.window, query.device)
    elif on_cpu and 2 * num_queries >= num_keys:
        # at most twice the work; with a mask as below, a CPU would keep a tensor [R, S] for the
        # backward
        return _padded_attention(query, key, value, variant.scaling)
    else:
        mask = attention_bias.causal_lower_right(num_queries, num_keys)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=variant.scaling)


def _visible(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Which of the S keys each of the last R tokens sees, [R, S] bool."""
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
    model (`block_masks`). units: not used; a model hands all its layers the same keywords, and
    recurrent ones read it.

    transformers' function of this kind repeats keys and values for each query head if the number of
    heads is no power of two (12, 28, 40). Sinks need a GPU.
    """
    check_options(module, options)
    # rotary embeddings may return float32
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    # layers that are compiled have flex attention compiled in them
    attend = _attend_in_blocks if torch.compiler.is_compiling() else compiled_flex_attention()
    output = attend(query, key, value, masks[sliding_window], scaling, s_aux, softcap)
    return output.transpose(1, 2).contiguous(), None


def _attend_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: "flex.BlockMask",
    scaling: float | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """query [1, H, L, D], key and value [1, K, L, D] -> [1, H, L, D]; L is a multiple of BLOCK, to
    which packs for flex attention are padded (`layout_of`)."""
    # here, since the compiler breaks its graph at a module that is imported later
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    # Kernels that are compiled for any length leave out their checks of bounds if they know that
    # all blocks are whole. For that they must know first that the lengths are equal.
    length = query.shape[2]
    for other_length in (key.shape[2], *mask.seq_lengths):
        torch._check(length == other_length)
    torch._check(length % BLOCK == 0)

    def capped(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    options = {
        "block_mask": mask,
        "scale": scaling,
        "score_mod": None if softcap is None else capped,
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    if sinks is None:
        return flex_attention(query, key, value, **options)
    with_sums = AuxRequest(lse=True)
    output, sums = flex_attention(query, key, value, **options, return_aux=with_sums)
    # the share of the softmax that the sink does not take, [1, H, L]
    share = torch.sigmoid(sums.lse - sinks.float()[:, None])
    return (output * share[..., None]).to(query.dtype)


@cache
def compiled_flex_attention() -> Callable[..., Tensor]:
    """`_attend_in_blocks` for layers that are not compiled: once for all of them."""
    return torch.compile(_attend_in_blocks)


def packed_flash_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    text_bounds: Tensor,
    longest_text: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    units: list[list[int]] | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Each text of a pack by itself, in FlashAttention's kernels: `text_bounds` and `longest_text`
    are those of `flash_inputs`, all else is as in `shared_prompt_flex_attention`, without sinks.

    transformers' function of this kind finds the texts by their positions, for which every layer
    waits for the GPU.
    """
    check_options(module, options)
    from flash_attn import flash_attn_varlen_func

    head_size = value.shape[3]
    if query.shape[3] > head_size:  # the kernels take one size
        value = pad(value, (0, query.shape[3] - head_size))
    # rotary embeddings may return float32
    query = query.to(value.dtype)[0].transpose(0, 1)  # [L, H, D]
    key = key.to(value.dtype)[0].transpose(0, 1)
    value = value[0].transpose(0, 1)
    output = flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=text_bounds,
        cu_seqlens_k=text_bounds,
        max_seqlen_q=longest_text,
        max_seqlen_k=longest_text,
        softmax_scale=scaling,
        causal=True,
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        softcap=softcap or 0.0,
    )  # [L, H, D]
    return output[None, ..., :head_size], None


def flash_inputs(units: list[list[int]], device: torch.device) -> dict[str, object]:
    """Keywords of `packed_flash_attention`: where the texts of a pack begin and end, [T + 1] int32,
    and the length of the longest."""
    lengths = [sum(unit) for unit in units]
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return {"text_bounds": to_device(bounds, device), "longest_text": max(lengths)}


def block_masks(
    units: list[list[int]], windows: Sequence[int | None], device: torch.device
) -> "dict[int | None, flex.BlockMask]":
    """A block mask for each window; those that hide nothing of any text share one."""
    # a text is a prompt with one of its responses
    longest_text = max(unit[0] + max(unit[1:], default=0) for unit in units)
    masks: dict[int | None, flex.BlockMask] = {}
    for window in windows:
        hides_something = window is not None and window < longest_text
        effective_window = window if hides_something else None
        if effective_window not in masks:
            masks[effective_window] = block_mask(units, device, effective_window)
        masks[window] = masks[effective_window]
    return masks


def block_mask(
    units: list[list[int]], device: torch.device, window: int | None = None
) -> "flex.BlockMask":
    """For flex attention: which query sees which key, from the bounds of segments.

    All is made on the host, which is ahead of a GPU and does not wait for it. torch's
    `create_block_mask` would go through dense [L, L] masks: 2.6 GB at its peak for 16,384 tokens.
    """
    lengths: list[int] = []  # of segments in tokens
    unit_of_segment: list[int] = []
    segment_in_unit: list[int] = []  # 0: the prompt
    # where the text of a segment would begin if the prompt stood right before the segment
    text_start: list[int] = []
    start = 0
    for i, unit in enumerate(units):
        for j, length in enumerate(unit):
            lengths.append(length)
            unit_of_segment.append(i)
            segment_in_unit.append(j)
            text_start.append(start - unit[0] if j > 0 else start)
            start += length

    def of_tokens(values: list[int]) -> Tensor:
        """[L] int32, from a value for each segment."""
        repeats = torch.tensor(lengths)
        return torch.tensor(values, dtype=torch.int32).repeat_interleave(repeats)

    unit_ids = to_device(of_tokens(unit_of_segment), device)
    segment_ids = to_device(of_tokens(segment_in_unit), device)

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_unit = unit_ids[query] == unit_ids[key]
        same_segment = segment_ids[query] == segment_ids[key]
        in_prompt = segment_ids[key] == 0
        return (key <= query) & same_unit & (in_prompt | same_segment)

    length = sum(lengths)
    some, full = block_tables(units, ceil(length / BLOCK))
    if window is None:
        return _mask_of_tables(some & ~full, full, length, visible, device)

    # where a token stands in its text, a prompt with one of its responses
    place_in_text = torch.arange(length, dtype=torch.int32) - of_tokens(text_start)
    nearest, farthest = _block_distances(place_in_text)
    some &= nearest < window
    full &= farthest < window
    places = to_device(place_in_text, device)

    def visible_in_window(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = places[query] - places[key] < window
        return visible(row, head, query, key) & near

    return _mask_of_tables(some & ~full, full, length, visible_in_window, device)


def _mask_of_tables(
    partial: Tensor,
    full: Tensor,
    length: int,
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    device: torch.device,
) -> "flex.BlockMask":
    """A mask of blocks that are seen in part, and of others that are seen whole; both tables
    [query blocks, key blocks] bool, on the host."""
    tables: dict[str, Tensor] = {}
    for prefix, table in (("", partial), ("full_", full)):
        # for the forward the keys of each query; for the backward also the queries of each key
        for side, oriented in (("kv", table), ("q", table.T)):
            counts, order = _block_lists(oriented)
            tables[f"{prefix}{side}_num_blocks"] = to_device(counts, device)
            tables[f"{prefix}{side}_indices"] = to_device(order, device)
    return flex.BlockMask(
        seq_lengths=(length, length),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=mask_mod,
        **tables,
    )


def _block_distances(places: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of the distance, in tokens of a text, from a key of one block to a query of another:
    the least and the greatest, [query blocks, key blocks] int32 each; places [L]."""
    padding = -len(places) % BLOCK
    padded = torch.cat([places, places[-1:].expand(padding)]).view(-1, BLOCK)
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
    """The blocks that hold no token outside of `start` to `end`."""
    return slice(ceil(start / BLOCK), end // BLOCK)


def _set_below(table: Tensor, rows: slice, columns: slice, with_diagonal: bool = False) -> None:
    """Set a part of a table below the diagonal, in place. The part begins on the diagonal."""
    part = table[rows, columns]
    part |= torch.ones_like(part).tril(0 if with_diagonal else -1)


def _block_lists(table: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of a table [B, B] the number of blocks that are set, [1, 1, B] int32, and the
    numbers of all blocks, those that are set first, [1, 1, B, B] int32."""
    counts = table.sum(-1).to(torch.int32)
    order = table.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    # the order of a transposed table is not contiguous
    return counts[None, None], order[None, None].contiguous()


def register_attention() -> None:
    """Register these functions with transformers under names of our own: Qwen2.5-VL refuses flex
    attention under its usual name."""
    register = transformers.AttentionInterface.register
    register("shared_prompts", shared_prompt_attention)
    register("shared_prompts_flex", shared_prompt_flex_attention)
    register("packed_flash", packed_flash_attention)

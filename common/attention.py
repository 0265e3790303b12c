"""Attention over packs with shared prompts: SDPA segment by segment on any device, flex attention
on GPUs."""

from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from common.files import refuse
from common.torch_repair import Later, transformers

bias, flex = Later("torch.nn.attention.bias"), Later("torch.nn.attention.flex_attention")
BLOCK = 128  # tokens: flex attention's
# options here
WITHOUT_EFFECT = {"is_causal", "position_ids", "cache_position", "use_cache", "output_attentions"}


def choose_attention(
    flag: str, device: torch.device, compile_layers: bool = False, dtype=torch.bfloat16
) -> str:
    """`--attention auto`: flex on GPUs with bf16, else SDPA (flex has no backward on CPU, no
    kernels on Volta)."""
    if flag == "auto":
        flag = (
            "flex"
            if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8
            else "sdpa"
        )
    if device.type == "cpu" and (compile_layers or flag != "sdpa"):
        wanted = "--compile" if compile_layers else f"--attention {flag}"
        raise SystemExit(f"{wanted} needs a GPU; on a CPU leave it out")
    refuse(
        compile_layers and flag == "sdpa",
        "--compile needs --attention flex or flash: sdpa compiles each pack",
    )
    if flag == "flash":
        refuse(dtype == torch.float32, "--attention flash needs --dtype bf16 or fp16")
        # transformers would take the package `kernels` in its place, which fetches code from the
        # hub
        refuse(
            find_spec("flash_attn") is None,
            "--attention flash: pip install flash-attn (kernels does not do)",
        )
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
    """Segment by segment: a response sees its prompt and itself. There is no [L, L] mask, nothing
    is quadratic in L.

    In the form that transformers' AttentionInterface asks for: query [1, H, L, D], key and value
    [1, K, L, D] -> ([1, L, H, D], None), with H a multiple of K (grouped queries). TypeError for an
    option that would change the result (`softcap`, `s_aux`, a sliding window, dropout).
    """
    given = [
        (name, value)
        for name, value in options.items()
        if value is not None and name not in WITHOUT_EFFECT
    ]
    if wanted := [name for name, value in given if (name, value) != ("dropout", 0.0)]:
        raise TypeError(
            f"{type(module).__name__} wants {', '.join(wanted)}, not supported here: "
            "--attention flash"
        )
    # rotary embeddings may leave float32 behind
    query, key = query.to(value.dtype), key.to(value.dtype)
    lengths = [length for unit in units for length in unit]
    segments = zip(*(x.split(lengths, dim=2) for x in (query, key, value)))
    outputs = []
    for unit in units:
        q, prompt_k, prompt_v = next(segments)
        outputs.append(_causal_attention(q, prompt_k, prompt_v, scaling))
        for _ in unit[1:]:
            q, k, v = next(segments)
            k, v = torch.cat([prompt_k, k], dim=2), torch.cat([prompt_v, v], dim=2)
            outputs.append(_causal_attention(q, k, v, scaling))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """query [1, H, R, D], the last R of the S tokens of key and value [1, K, S, D] -> [1, H, R,
    D]."""
    (_, heads, length, size), (kv_heads, total) = query.shape, key.shape[1:3]
    # SDPA's CPU kernel takes 2 to 3 times as long
    if query.device.type == "cpu" and length * total <= 2**18:
        mask = torch.ones(length, total, dtype=torch.bool).tril(total - length)
        scores = (
            query.reshape(1, kv_heads, -1, size)
            @ key.mT
            * (size**-0.5 if scaling is None else scaling)
        )
        scores = scores.unflatten(2, (-1, length)).masked_fill(~mask, float("-inf")).flatten(2, 3)
        return (scores.softmax(-1) @ value).reshape(1, heads, length, -1)
    key, value = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (key, value))
    # there a mask is [R, S], and is kept for the backward
    if query.device.type == "cpu" and 2 * length >= total:
        query, options = pad(query, (0, 0, total - length, 0)), {"is_causal": True}
    else:
        options = {"attn_mask": bias.causal_lower_right(length, total)}
    return scaled_dot_product_attention(query, key, value, scale=scaling, **options)[:, :, -length:]


def block_mask(units: list[list[int]], device: torch.device) -> "flex.BlockMask":
    """The same for flex attention: which query sees which key, from the bounds of segments.

    torch's `create_block_mask` would make it from a dense [L, L] mask: 2.6 GB for 16,384 tokens.
    """
    lengths = torch.tensor([length for unit in units for length in unit])
    labels = [(u, s) for u, unit in enumerate(units) for s in range(len(unit))]
    groups, samples = (
        torch.tensor(labels).repeat_interleave(lengths, dim=0).T.contiguous().to(device)
    )

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_group = groups[query] == groups[key]
        return (
            (key <= query) & same_group & ((samples[key] == 0) | (samples[key] == samples[query]))
        )

    length = len(groups)
    some, full = block_tables(units, -(-length // BLOCK))
    # number and order of the blocks that each row of blocks sees in part, and of those that it sees
    # whole
    tables = []
    for table in (some & ~full, full):
        order = table.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        tables += [part.to(torch.int32)[None, None].to(device) for part in (table.sum(-1), order)]
    return flex.BlockMask.from_kv_blocks(
        *tables, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(length, length)
    )


def block_tables(units: list[list[int]], blocks: int) -> tuple[Tensor, Tensor]:
    """Two tables [blocks, blocks] bool: whether a block of queries sees something, and whether all,
    of one of keys."""
    some, full = torch.zeros(2, blocks, blocks, dtype=torch.bool)
    start = 0
    for unit in units:
        first, end_of_prompt, end_of_unit = start, start + unit[0], start + sum(unit)
        # all that follows a block of the prompt, in its unit, sees it
        within = full[
            -(-first // BLOCK) : end_of_unit // BLOCK, -(-first // BLOCK) : end_of_prompt // BLOCK
        ]
        within |= torch.ones_like(within).tril(-1)
        # the first response continues its prompt as any text does
        for length in [sum(unit[:2]), *unit[2:]]:
            end = start + length
            touched, inside = (
                slice(start // BLOCK, -(-end // BLOCK)),
                slice(-(-start // BLOCK), end // BLOCK),
            )
            some[touched, touched] |= torch.ones_like(some[touched, touched]).tril()
            some[touched, first // BLOCK : -(-end_of_prompt // BLOCK)] |= start > first
            full[inside, inside] |= torch.ones_like(full[inside, inside]).tril(-1)
            start = end
    return some, full


def register_attention() -> None:
    """Make both known to transformers, by names of our own: by its own Qwen2.5-VL refuses flex
    attention."""
    register = transformers.AttentionInterface.register
    register("shared_prompts", shared_prompt_attention)
    register("shared_prompts_flex", transformers.integrations.flex_attention.flex_attention_forward)

"""Episodes -> micro-batches under a token budget; a group's prompt stands once, followed by its G responses.

    prompt A | response A1 | response A2 | prompt B | response B1 | ... | padding

A response token sees its prompt and itself, never a sibling; its positions continue from the prompt's end. Only the
tokens that are trained on have a target: they are addressed by flat indices, so no padded mask is ever multiplied.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common.distributed import World, abandon_backward, all_reduce
from common.episodes import Episode


@dataclass(slots=True)
class MicroBatch:
    """One forward and backward. R rows of L tokens, N trained tokens."""

    input_ids: Tensor  # [R, L] int64
    position_ids: Tensor  # [R, L] int64, from 0 at the start of each prompt
    groups: Tensor  # [R, L] int64: which prompt; 0 = padding
    samples: Tensor  # [R, L] int64: which response of the prompt; 0 = the prompt itself
    hidden_index: Tensor  # [N] int64: where in the flattened [R*L] hidden states a trained token is predicted
    targets: Tensor  # [N] int64: the token's id
    tokens: Tensor  # [N] int64: the token's place in the flat per-token arrays of `TokenIndex`

    def to(self, device: torch.device) -> "MicroBatch":
        return MicroBatch(*(getattr(self, name).to(device, non_blocking=True) for name in self.__slots__))


class TokenIndex:
    """Flat coordinates of all trained tokens of a list of episodes, in episode order: T tokens in all.

    `offsets[i]:offsets[i+1]` are the tokens of episode i; `lengths[i]` their number; `episode_of_token` [T].
    """

    def __init__(self, episodes: Sequence[Episode]):
        self.lengths = torch.tensor([sum(e.loss_mask) for e in episodes], dtype=torch.int64)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])
        self.episode_of_token = torch.repeat_interleave(torch.arange(len(episodes)), self.lengths)

    def __len__(self) -> int:
        return int(self.offsets[-1])


def layout(attention: str, budget: int, hidden_size: int) -> dict:
    """Options of `pack` that suit an attention implementation.

    Dense attention (sdpa) costs L per token, at L = 5 x hidden size about as much as all else (measured on a CPU):
    large groups are split and repeat their prompt. Flex attention skips foreign blocks: one row of the whole budget,
    in multiples of 128, so that few shapes have to be compiled. Flash attention reads sequence boundaries off the
    position ids: one row too, and each response repeats its prompt.
    """
    if attention == "sdpa":
        return {"budget": budget, "dense_width": 5 * hidden_size}
    return {
        "budget": budget,
        "row_tokens": budget,
        "share_prompts": attention == "flex",
        "multiple": 128 if attention == "flex" else 1,
    }


def halve_budget(options: dict, policy: nn.Module, world: World, error: BaseException) -> dict:
    """Options of `pack` for half the tokens. SystemExit on several ranks: the others are in a collective by now."""
    budget = options["budget"] // 2
    if world.size > 1 or budget < 128:
        remedy = f"lower --micro-batch-tokens {2 * budget}, add --gradient-checkpointing or use more GPUs"
        raise SystemExit(f"out of GPU memory in the update: {remedy}; then the same command goes on") from error
    world.print(f"out of GPU memory: --micro-batch-tokens is now {budget}, the step is repeated")
    abandon_backward(policy)
    torch.cuda.empty_cache()
    return {name: budget if name in ("budget", "row_tokens") else value for name, value in options.items()}


def pack(
    episodes: Sequence[Episode],
    selected: Sequence[int],
    index: TokenIndex,
    *,
    budget: int,
    row_tokens: int | None = None,
    share_prompts: bool = True,
    multiple: int = 1,
    dense_width: float = math.inf,
) -> list[MicroBatch]:
    """Micro-batches of at most `budget` tokens (R * L) that hold the episodes `selected`.

    `row_tokens` is the row width L, by default that of the longest group; L is padded to a `multiple`. An episode
    longer than the budget gets a micro-batch of its own. All ranks must call this together: ranks that have fewer
    micro-batches get empty ones, so that every rank runs the same collectives.
    """
    units = _units(episodes, selected, budget, share_prompts, dense_width)
    width = max([_unit_tokens(episodes, unit) for unit in units], default=1)
    width = max(width, min(row_tokens or 0, budget))
    rows = _first_fit_decreasing(episodes, units, width)
    per_batch = max(1, budget // width)
    batches = [_build(episodes, rows[i : i + per_batch], index, multiple) for i in range(0, len(rows), per_batch)]
    count = int(all_reduce([len(batches)], "max")[0])
    return batches + [_build(episodes, [], index, multiple) for _ in range(count - len(batches))]


def _units(
    episodes: Sequence[Episode], selected: Sequence[int], budget: int, share_prompts: bool, dense_width: float
) -> list[list[int]]:
    """Lists of episodes that share a prompt; a group that exceeds a limit is split and repeats its prompt.

    k responses of R tokens cost (P / k + R) (1 + (P + k R) / dense_width) each: least at k R = sqrt(P (width + P)).
    """
    by_prompt: dict[object, list[int]] = {}
    for i in selected:
        by_prompt.setdefault(episodes[i].prompt_index if share_prompts else ("single", i), []).append(i)
    units = []
    for group in by_prompt.values():
        prompt_tokens = len(episodes[group[0]].prompt_ids)
        limit = min(budget, prompt_tokens + math.sqrt(prompt_tokens * (dense_width + prompt_tokens)))
        unit, used = [], prompt_tokens
        for i in group:
            tokens = len(episodes[i].response_ids)
            if unit and used + tokens > limit:
                units.append(unit)
                unit, used = [], prompt_tokens
            unit.append(i)
            used += tokens
        units.append(unit)
    return units


def _unit_tokens(episodes: Sequence[Episode], unit: list[int]) -> int:
    return len(episodes[unit[0]].prompt_ids) + sum(len(episodes[i].response_ids) for i in unit)


def _first_fit_decreasing(episodes: Sequence[Episode], units: list[list[int]], width: int) -> list[list[list[int]]]:
    """Rows of at most `width` tokens: each unit, longest first, goes into the first row with room for it."""
    sizes = [_unit_tokens(episodes, unit) for unit in units]
    rows: list[list[list[int]]] = []
    room: list[int] = []
    for u in sorted(range(len(units)), key=lambda u: -sizes[u]):
        r = next((r for r in range(len(rows)) if room[r] >= sizes[u]), None)
        if r is None:
            rows.append([])
            room.append(width)
            r = len(rows) - 1
        rows[r].append(units[u])
        room[r] -= sizes[u]
    return rows


def _build(
    episodes: Sequence[Episode], rows: list[list[list[int]]], index: TokenIndex, multiple: int = 1
) -> MicroBatch:
    """Tensors of one micro-batch; without rows, padding that trains nothing."""
    length = max([sum(_unit_tokens(episodes, unit) for unit in row) for row in rows], default=1)
    length = -(-length // multiple) * multiple
    shape = (max(len(rows), 1), length)
    input_ids, position_ids, groups, samples = (torch.zeros(shape, dtype=torch.int64) for _ in range(4))
    hidden_index, targets, tokens = [], [], []
    group = 0
    for r, row in enumerate(rows):
        end = 0
        for unit in row:
            group += 1
            prompt = episodes[unit[0]].prompt_ids
            prompt_end = end + len(prompt)
            input_ids[r, end:prompt_end] = torch.tensor(prompt)
            position_ids[r, end:prompt_end] = torch.arange(len(prompt))
            groups[r, end:prompt_end] = group
            end = prompt_end
            for sample, i in enumerate(unit, start=1):
                response = episodes[i].response_ids
                start, end = end, end + len(response)
                input_ids[r, start:end] = torch.tensor(response, dtype=torch.int64)
                position_ids[r, start:end] = len(prompt) + torch.arange(len(response))
                groups[r, start:end] = group
                samples[r, start:end] = sample
                trained = torch.tensor(episodes[i].loss_mask).nonzero().flatten()
                before = start + trained - 1  # the hidden state before a token predicts it
                before[trained == 0] = prompt_end - 1  # the first response token is predicted by the prompt's last
                hidden_index.append(r * length + before)
                targets.append(input_ids[r, start + trained])
                tokens.append(index.offsets[i] + torch.arange(len(trained)))
    none = torch.zeros(0, dtype=torch.int64)
    flat = [torch.cat([none, *parts]) for parts in (hidden_index, targets, tokens)]
    return MicroBatch(input_ids, position_ids, groups, samples, *flat)


def attention_mask(batch: MicroBatch, attention: str):
    """What a layer of the model needs to keep groups and samples apart: a [R, 1, L, L] boolean mask for SDPA, a block
    mask for flex attention, None for flash attention (it reads sequence boundaries off the position ids)."""
    if attention == "flash":
        return None
    groups, samples = batch.groups, batch.samples

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_group = groups[row, query] == groups[row, key]
        return (key <= query) & same_group & ((samples[row, key] == 0) | (samples[row, key] == samples[row, query]))

    if attention == "flex":
        from torch.nn.attention.flex_attention import create_block_mask

        rows, length = groups.shape
        return create_block_mask(visible, rows, None, length, length, device=groups.device)
    rows, length = groups.shape
    row = torch.arange(rows, device=groups.device).view(-1, 1, 1)
    query = torch.arange(length, device=groups.device).view(1, -1, 1)
    key = torch.arange(length, device=groups.device).view(1, 1, -1)
    return visible(row, row, query, key)[:, None]

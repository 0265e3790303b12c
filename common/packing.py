"""Episodes -> micro-batches under a token budget; a group's prompt stands once, followed by its G
responses.

    prompt A | response A1 | response A2 | prompt B | response B1 | ... | padding

A response token sees its prompt and itself, never a sibling; its positions continue from the
prompt's end. Only the tokens that are trained on have a target: they are addressed by flat indices,
so no padded mask is ever multiplied.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from common.distributed import World, all_reduce, forward_context, gather_objects
from common.limits import exhausted_memory
from common.memory.halving import halve_budget, limited_memory, release_memory, remembered_budget
from common.pictures import Media
from common.progress import Progress
from common.types import Episode
from common.vision import Vision

T = TypeVar("T")


@dataclass(slots=True)
class MicroBatch:
    """One forward and backward: a row of L tokens, N of them trained."""

    input_ids: Tensor  # [1, L] int64
    # [1, L] int64, from 0 at the start of each prompt; with vision [4, 1, L]: these, M-RoPE's
    position_ids: Tensor
    hidden_index: Tensor  # [N] int64: where in the row a trained token is predicted
    targets: Tensor  # [N] int64: the token's id
    tokens: Tensor  # [N] int64: the token's place in the flat per-token arrays of `TokenIndex`
    slots: Tensor  # [S] int64: where in the row the placeholders of pictures stand
    # [S] int64: which of the features of `media`, one after the other, belongs there
    features: Tensor
    media: list[Media]  # distinct pictures: each is encoded once, however many episodes show it
    # what the row is made of, lengths in tokens: [prompt, response, response, ...], ...
    units: list[list[int]]

    def to(self, device: torch.device) -> "MicroBatch":
        parts = (getattr(self, name) for name in self.__slots__)
        return MicroBatch(
            *(p.to(device, non_blocking=True) if isinstance(p, Tensor) else p for p in parts)
        )


class TokenIndex:
    """Flat coordinates of all trained tokens of a list of episodes, in episode order: T tokens in
    all.

    `offsets[i]:offsets[i+1]` are the tokens of episode i; `lengths[i]` their number;
    `episode_of_token` [T].
    """

    def __init__(self, episodes: Sequence[Episode]):
        self.lengths = torch.tensor([sum(e.loss_mask) for e in episodes], dtype=torch.int64)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])
        self.episode_of_token = torch.repeat_interleave(torch.arange(len(episodes)), self.lengths)

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def sums(self, values: Tensor) -> Tensor:
        """Sum of values [T] over the tokens of each episode, [E]; on the CPU."""
        return torch.zeros(len(self.lengths), dtype=values.dtype).index_add(
            0, self.episode_of_token, values
        )


def split_minibatches(
    episodes: Sequence[Episode], prompts: list, count: int, seed: int, step: int
) -> list[list[int]]:
    """Episode numbers of each minibatch: runs of all ranks' `prompts`, drawn at random and dealt to
    ranks in turn."""
    first = np.random.Generator(np.random.PCG64([seed, step])).integers(max(1, len(prompts)))
    minibatch_of: dict[int, int] = {}
    for place, prompt in enumerate(np.roll(sorted(prompts), first)):
        minibatch_of[int(prompt)] = place * count // len(prompts)
    numbers = [minibatch_of[episode.prompt_index] for episode in episodes]
    return [[i for i, own in enumerate(numbers) if own == number] for number in range(count)]


@dataclass(eq=False)
class Minibatch:
    """The episodes of one optimizer step, as this rank computes them."""

    episodes: list[int]  # their numbers
    num_tokens: float  # trained ones, over all ranks: with the next, the denominators of losses
    num_sequences: float  # episodes with a trained token, over all ranks
    micro_batches: list[MicroBatch]


class Packer:
    """Minibatches as micro-batches that fit into memory: where one does not, all get smaller, with
    the same gradient.

    Flash attention reads sequence boundaries off the position ids, so each response repeats its
    prompt. For flex attention the length is a multiple of 128: few shapes have to be compiled.
    """

    def __init__(
        self, attention: str, budget: int, run_dir: Path, world: World, vision: Vision | None = None
    ):
        self.budget, self.run_dir, self.world = remembered_budget(run_dir, budget), run_dir, world
        multiple = 128 if attention == "flex" else 1
        self.pack = partial(
            pack, share_prompts=attention != "flash", multiple=multiple, vision=vision
        )
        # what is being trained on
        self.step: tuple[Sequence[Episode], TokenIndex, list[Minibatch]] | None = None

    def minibatches(
        self, episodes: Sequence[Episode], index: TokenIndex, count: int, *, seed: int, step: int
    ) -> list[Minibatch]:
        """A step's episodes in `count` minibatches, the same on any number of ranks. All ranks call
        it together.

        Those without a trained token are left out: Adam would move the weights by its momentum
        alone.
        """
        split = split_minibatches(episodes, prompts_of_all_ranks(episodes), count, seed, step)
        lengths = [index.lengths[numbers] for numbers in split]
        num_tokens = all_reduce([float(x.sum()) for x in lengths])
        num_sequences = all_reduce([float((x > 0).sum()) for x in lengths])
        counted = zip(split, num_tokens, num_sequences)
        minibatches = [
            Minibatch(numbers, tokens, sequences, [])
            for numbers, tokens, sequences in counted
            if tokens
        ]
        self.step = episodes, index, minibatches
        self._pack()
        return minibatches

    def _pack(self) -> None:
        episodes, index, minibatches = self.step
        for minibatch in minibatches:
            minibatch.micro_batches = self.pack(
                episodes, minibatch.episodes, index, budget=self.budget
            )

    def attempt(self, model: nn.Module, update: Callable[..., T], **options) -> T:
        """update(...), again from its beginning with half the tokens a micro-batch while memory is
        too small."""
        while True:
            try:
                with limited_memory(self.world.device):
                    return update(**options)
            except (RuntimeError, MemoryError) as error:
                if not exhausted_memory(error):
                    raise
                self.budget = halve_budget(self.budget, model, self.world, self.run_dir, error)
                self._pack()
            release_memory()

    @torch.no_grad()
    def fill(
        self, result: Tensor, model: nn.Module, minibatches: Sequence[Minibatch], *inputs: object
    ) -> None:
        """Write into `result` [T] what `model(micro_batch, *inputs)` gives first for each of the
        trained tokens."""

        def forward() -> None:
            batches = (batch for minibatch in minibatches for batch in minibatch.micro_batches)
            for batch in Progress("log-probs", batches):
                with forward_context(model):
                    output = model(batch.to(self.world.device), *inputs)
                result[batch.tokens.to(result.device)] = (
                    output[0] if isinstance(output, tuple) else output
                )

        self.attempt(model, forward)


def pack(
    episodes: Sequence[Episode],
    selected: Sequence[int],
    index: TokenIndex,
    *,
    budget: int,
    share_prompts: bool = True,
    multiple: int = 1,
    vision: Vision | None = None,
) -> list[MicroBatch]:
    """Micro-batches of at most `budget` tokens that hold the episodes `selected`, padded to a
    `multiple` of tokens.

    An episode longer than the budget gets a micro-batch of its own; one that trains nothing is left
    out. All ranks must call this together: those with fewer micro-batches get empty ones, so that
    all run the same collectives.
    """
    selected = [i for i in selected if index.lengths[i]]
    bins = _first_fit_decreasing(
        episodes, _units(episodes, selected, budget, share_prompts), budget
    )
    count = int(all_reduce([len(bins)], "max")[0])
    bins += [[] for _ in range(count - len(bins))]
    return [_build(episodes, units, index, multiple, vision) for units in bins]


def _units(
    episodes: Sequence[Episode], selected: Sequence[int], budget: int, share_prompts: bool
) -> list[list[int]]:
    """Lists of episodes that share a prompt; a group that exceeds the budget is split and repeats
    its prompt."""
    by_prompt: dict[object, list[int]] = {}
    for i in selected:
        # what an environment says at its beginning stands in the prompt, and may differ
        episode = episodes[i]
        key = (episode.prompt_index, *episode.prompt_ids) if share_prompts else ("single", i)
        by_prompt.setdefault(key, []).append(i)
    units = []
    for group in by_prompt.values():
        prompt_tokens = len(episodes[group[0]].prompt_ids)
        unit, used = [], prompt_tokens
        for i in group:
            tokens = len(episodes[i].response_ids)
            if unit and used + tokens > budget:
                units.append(unit)
                unit, used = [], prompt_tokens
            unit.append(i)
            used += tokens
        units.append(unit)
    return units


def _first_fit_decreasing(
    episodes: Sequence[Episode], units: list[list[int]], budget: int
) -> list[list[list[int]]]:
    """Bins of at most `budget` tokens: each unit, longest first, goes into the first bin with room
    for it."""
    sizes = [
        len(episodes[unit[0]].prompt_ids) + sum(len(episodes[i].response_ids) for i in unit)
        for unit in units
    ]
    bins: list[list[list[int]]] = [[] for _ in units]
    room = [budget] * len(units)
    for size, unit in sorted(zip(sizes, units), key=lambda pair: -pair[0]):
        # too long: one of its own
        place = next(b for b, free in enumerate(room) if free >= min(size, budget))
        bins[place].append(unit)
        room[place] -= size
    return [units for units in bins if units]


def _build(
    episodes: Sequence[Episode],
    bin_: list,
    index: TokenIndex,
    multiple: int = 1,
    vision: Vision | None = None,
) -> MicroBatch:
    """Tensors of one micro-batch; without units, a padding token that trains nothing."""
    none = torch.zeros(0, dtype=torch.int64)
    input_ids, positions, rope, hidden_index, targets, tokens, units = (
        [none],
        [none],
        [],
        [none],
        [none],
        [none],
        [],
    )
    pictures: dict[Media, list[int]] = {}  # distinct ones -> where they begin in the row
    end = 0
    for unit in bin_:
        prompt = torch.tensor(episodes[unit[0]].prompt_ids)
        input_ids.append(prompt)
        positions.append(torch.arange(len(prompt)))
        units.append([len(prompt)])
        start, end = end, end + len(prompt)
        prompt_end = end
        for i in unit:
            episode = episodes[i]
            response = torch.tensor(episode.response_ids, dtype=torch.int64)
            input_ids.append(response)
            positions.append(len(prompt) + torch.arange(len(response)))
            units[-1].append(len(response))
            trained = torch.tensor(episode.loss_mask).nonzero().flatten()
            before = end + trained - 1  # the hidden state before a token predicts it
            # the first response token is predicted by the prompt's last
            before[trained == 0] = prompt_end - 1
            hidden_index.append(before)
            targets.append(response[trained])
            tokens.append(index.offsets[i] + torch.arange(len(trained)))
            if vision:
                ids = episode.prompt_ids + episode.response_ids
                trajectory = torch.from_numpy(vision.positions(ids, episode.media))
                # a prompt stands once
                rope.append(trajectory if i == unit[0] else trajectory[:, len(prompt) :])
                for media, place in zip(episode.media, vision.places(ids, episode.media)):
                    in_prompt = place < len(prompt)
                    if not in_prompt or i == unit[0]:
                        pictures.setdefault(media, []).append(
                            place + (start if in_prompt else end - len(prompt))
                        )
            end += len(response)
    if padding := max(-(-end // multiple), 1) * multiple - end:
        input_ids.append(none.new_zeros(padding))
        positions.append(torch.arange(padding))
        rope.append(torch.arange(padding).expand(3, -1))
        units.append([padding])
    ids, position_ids = torch.cat(input_ids)[None], torch.cat(positions)[None]
    if vision:
        position_ids = torch.stack([position_ids, *torch.cat(rope, dim=1)[:, None]])
    slots, features, offset = [none], [none], 0
    for media, places in pictures.items():
        tokens_of_one = torch.arange(media.num_tokens)
        slots += [place + tokens_of_one for place in places]
        features += [offset + tokens_of_one] * len(places)
        offset += media.num_tokens
    flat = (torch.cat(parts) for parts in (hidden_index, targets, tokens, slots, features))
    return MicroBatch(ids, position_ids, *flat, list(pictures), units)


def prompts_of_all_ranks(episodes: list[Episode]) -> list[int]:
    return sorted(
        {prompt for part in gather_objects([e.prompt_index for e in episodes]) for prompt in part}
    )

"""Episodes -> micro-batches under a token budget. The prompt of a group is stored once, followed by
its G responses.

    prompt A | response A1 | response A2 | prompt B | response B1 | ... | padding

A response token sees its prompt and itself, never a sibling; its positions continue from the
prompt's end. Only trained tokens have a target. They are addressed by flat indices, so nothing is
multiplied by a padded mask.

With --attention rows each episode has a row of its own, padded on the right, which any causal model
can read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from common.distributed import World, all_reduce, forward_context, gather_objects, to_device
from common.limits import exhausted_memory
from common.memory.halving import halve_budget, limited_memory, release_memory, remembered_budget
from common.pictures import Media
from common.progress import Progress
from common.types import Episode
from common.vision import Vision

Result = TypeVar("Result")
# the units of a micro-batch: lists of episodes that share a prompt
Bin = list[list[int]]
# What a micro-batch costs beside its tokens, in tokens: to cast and copy weights and to add up
# gradients takes one H100 as long as 1,450 to 1,800 tokens, whatever the model's size (on paper).
MICRO_BATCH_COST = 1500
NUM_CANDIDATES = 8  # groups that are tried for the rest of a micro-batch


@dataclass(slots=True)
class MicroBatch:
    """One forward and backward: B rows of L tokens, N of all trained; a pack is one row."""

    input_ids: Tensor  # [B, L] int64
    # [B, L] int64: counted from the start of the prompt; with vision [4, B, L]: these positions,
    # then the three of M-RoPE
    position_ids: Tensor
    hidden_index: Tensor  # [N] int64: where in the B * L tokens a trained one is predicted
    targets: Tensor  # [N] int64: the token's id
    token_index: Tensor  # [N] int64: of the trained tokens, in the order of `TokenIndex`
    # [S] int64, ascending: where in the B * L tokens the placeholders of pictures are
    slots: Tensor
    features: Tensor  # [S] int64: which feature belongs there, of those of `media` in order
    media: list[Media]  # distinct pictures: each is encoded once, however many episodes show it
    # of a pack: lengths of its segments in tokens, a list for each prompt: [prompt, response, ...];
    # the padding has a list of its own
    units: list[list[int]]

    def to(self, device: torch.device) -> "MicroBatch":
        values = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                value = to_device(value, device)
            values[name] = value
        return MicroBatch(**values)


class TokenIndex:
    """Flat indices of the T trained tokens of a list of E episodes, in the order of the episodes.

    The tokens of episode i are `offsets[i]:offsets[i+1]`, `lengths[i]` in number; `offsets` [E+1],
    `lengths` [E] and `episode_of_token` [T] are int64 on the CPU.
    """

    def __init__(self, episodes: Sequence[Episode]):
        lengths = [sum(episode.loss_mask) for episode in episodes]
        self.lengths = torch.tensor(lengths, dtype=torch.int64)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])
        self.episode_of_token = torch.repeat_interleave(torch.arange(len(episodes)), self.lengths)

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def tokens_of(self, episode: int) -> range:
        """The flat indices of an episode's trained tokens."""
        return range(int(self.offsets[episode]), int(self.offsets[episode + 1]))

    def sums(self, values: Tensor) -> Tensor:
        """Sum of values [T] over the tokens of each episode, [E]; on the CPU."""
        zeros = torch.zeros(len(self.lengths), dtype=values.dtype)
        return zeros.index_add(0, self.episode_of_token, values)


@dataclass(eq=False)
class Minibatch:
    """The episodes of one optimizer step, as this rank computes them."""

    episodes: list[int]  # their places in the step's list of episodes
    num_tokens: float  # trained tokens on all ranks: a denominator of losses
    num_sequences: float  # episodes with a trained token, on all ranks: the other denominator
    micro_batches: list[MicroBatch]
    # the same responses behind a teacher's prompts; the same objects if it has none of its own
    teacher_batches: list[MicroBatch] = field(default_factory=list)


class Packer:
    """Minibatches as micro-batches that fit into memory. If one does not fit, all become smaller;
    the gradient stays the same."""

    def __init__(
        self, attention: str, budget: int, run_dir: Path, world: World, vision: Vision | None = None
    ):
        self.budget = remembered_budget(run_dir, budget)  # tokens of a micro-batch
        self.run_dir = run_dir
        self.world = world
        self.vision = vision
        self.layout = layout_of(attention)
        # the step that is being trained on
        self.episodes: Sequence[Episode] = []
        self.teacher_episodes: Sequence[Episode] | None = None
        self.index = TokenIndex([])
        self.packed: list[Minibatch] = []

    def minibatches(
        self,
        episodes: Sequence[Episode],
        index: TokenIndex,
        split: list[list[int]],
        teacher_episodes: Sequence[Episode] | None = None,
    ) -> list[Minibatch]:
        """The minibatches of a step, packed; `split` has the numbers of the episodes of each. All
        ranks call it together.

        A minibatch without a trained token on any rank is left out: Adam would move the weights by
        its momentum alone. teacher_episodes: the same ones, with the prompts that a teacher reads.
        """
        lengths = [index.lengths[numbers] for numbers in split]
        num_tokens = all_reduce([float(x.sum()) for x in lengths])
        num_sequences = all_reduce([float((x > 0).sum()) for x in lengths])
        self.episodes = episodes
        self.teacher_episodes = teacher_episodes
        self.index = index
        self.packed = []
        for numbers, tokens, sequences in zip(split, num_tokens, num_sequences):
            if tokens > 0:
                self.packed.append(Minibatch(numbers, tokens, sequences, micro_batches=[]))
        self._pack()
        return self.packed

    def _pack(self) -> None:
        for minibatch in self.packed:
            bins = make_bins(
                self.episodes, minibatch.episodes, self.index, budget=self.budget, **self.layout
            )
            minibatch.micro_batches = self._build(self.episodes, bins)
            minibatch.teacher_batches = minibatch.micro_batches
            if self.teacher_episodes is not None:
                minibatch.teacher_batches = self._build(self.teacher_episodes, bins)

    def _build(self, episodes: Sequence[Episode], bins: list[Bin]) -> list[MicroBatch]:
        return [build(episodes, units, self.index, self.vision, **self.layout) for units in bins]

    def attempt(
        self, update: Callable[..., Result], model: nn.Module, *arguments, **options
    ) -> Result:
        """Return update(model, *arguments, **options). If memory runs out, drop the gradients and
        repeat it with half the tokens in a micro-batch: the minibatches that `minibatches` has
        returned are packed again in place. On several ranks the run ends instead (`halve_budget`).
        """
        while True:
            try:
                with limited_memory(self.world.device):
                    return update(model, *arguments, **options)
            except (RuntimeError, MemoryError) as error:
                if not exhausted_memory(error):
                    raise
                self.budget = halve_budget(self.budget, model, self.world, self.run_dir, error)
                self._pack()
            # outside of `except`: the exception holds the tensors of the attempt
            release_memory()

    @torch.no_grad()
    def fill(
        self,
        result: Tensor,
        model: nn.Module,
        minibatches: Sequence[Minibatch],
        *inputs: object,
        of_teacher: bool = False,
    ) -> None:
        """Write the first output of `model(micro_batch, *inputs)` into `result` [T]. of_teacher:
        the model reads a teacher's prompts."""

        def write(model: nn.Module) -> None:
            micro_batches: list[MicroBatch] = []
            for part in minibatches:
                micro_batches += part.teacher_batches if of_teacher else part.micro_batches
            for batch in Progress("forward pass", micro_batches):
                batch = batch.to(self.world.device)
                with forward_context(model):
                    output = model(batch, *inputs)
                values = output[0] if isinstance(output, tuple) else output
                result[batch.token_index] = values

        self.attempt(write, model)


def layout_of(attention: str) -> dict[str, Any]:
    """Options of `pack`: the layout that an attention reads."""
    return {
        # flash attention has no mask for a shared prompt, so each response repeats it
        "share_prompts": attention not in ("flash", "rows"),
        "rows": attention == "rows",
        # flex attention is compiled anew for each length: there are few multiples of 128
        "multiple": 128 if attention == "flex" else 1,
    }


def pack(
    episodes: Sequence[Episode],
    selected: Sequence[int],
    index: TokenIndex,
    *,
    budget: int,
    vision: Vision | None = None,
    **layout: Any,
) -> list[MicroBatch]:
    """Micro-batches of at most `budget` tokens that hold the episodes `selected`, in a layout of
    `layout_of`. All ranks call it together."""
    bins = make_bins(episodes, selected, index, budget=budget, **layout)
    return [build(episodes, units, index, vision, **layout) for units in bins]


def make_bins(
    episodes: Sequence[Episode],
    selected: Sequence[int],
    index: TokenIndex,
    *,
    budget: int,
    share_prompts: bool = True,
    rows: bool = False,
    multiple: int = 1,
) -> list[Bin]:
    """The units of micro-batches of at most `budget` tokens that hold the episodes `selected`.

    An episode longer than the budget gets a micro-batch of its own; one without trained tokens is
    left out. All ranks must call this together: those with fewer micro-batches get empty ones, so
    that all run the same collectives.
    """
    selected = [i for i in selected if index.lengths[i] > 0]
    if rows:
        bins = _bins_of_rows(episodes, selected, budget)
    else:
        groups = _groups(episodes, selected, share_prompts)
        filled = _bins_of_groups(episodes, groups, budget)
        bins = [[unit.episodes for unit in units] for units in filled]
    (num_bins,) = all_reduce([len(bins)], "max")
    while len(bins) < num_bins:
        bins.append([])
    return bins


def build(
    episodes: Sequence[Episode],
    units: Bin,
    index: TokenIndex,
    vision: Vision | None = None,
    *,
    share_prompts: bool = True,
    rows: bool = False,
    multiple: int = 1,
) -> MicroBatch:
    """The micro-batch of these units, a pack padded to a `multiple` of tokens, or with `rows` the
    units one below the other, each padded to the longest."""
    if rows:
        return _build_rows(episodes, [number for (number,) in units], index, vision)
    return _build(episodes, units, index, multiple, vision)


@dataclass(eq=False)
class _Unit:
    """Episodes that share a prompt: a group, or a part of one."""

    episodes: list[int]
    num_tokens: int  # of the prompt and the responses


def _unit(episodes: Sequence[Episode], numbers: list[int]) -> _Unit:
    num_tokens = len(episodes[numbers[0]].prompt_ids)
    num_tokens += sum(len(episodes[i].response_ids) for i in numbers)
    return _Unit(numbers, num_tokens)


def _groups(
    episodes: Sequence[Episode], selected: Sequence[int], share_prompts: bool
) -> list[_Unit]:
    """All episodes that share a prompt; each apart if none are to share it."""
    groups: dict[tuple, list[int]] = {}
    for i in selected:
        episode = episodes[i]
        # an environment's first observation is part of the prompt, and may differ within a group
        key = (episode.prompt_index, *episode.prompt_ids) if share_prompts else (i,)
        groups.setdefault(key, []).append(i)
    return [_unit(episodes, group) for group in groups.values()]


def _bins_of_groups(
    episodes: Sequence[Episode], groups: list[_Unit], budget: int
) -> list[list[_Unit]]:
    """Groups in bins of at most `budget` tokens. One that fits stays whole, unless it costs less to
    cut some of them and to repeat their prompts."""
    whole = _filled(episodes, groups, budget, may_cut=False)
    cut = _filled(episodes, groups, budget, may_cut=True)
    return min(whole, cut, key=_cost)


def _cost(bins: list[list[_Unit]]) -> int:
    """What micro-batches cost, in tokens."""
    return sum(MICRO_BATCH_COST + sum(unit.num_tokens for unit in bin_) for bin_ in bins)


def _filled(
    episodes: Sequence[Episode], groups: list[_Unit], budget: int, may_cut: bool
) -> list[list[_Unit]]:
    """Bins filled one after the other: with the longest groups that fit, then with a part of
    another one. An episode longer than the budget gets a bin of its own.

    Without `may_cut` only groups longer than the budget are cut.
    """
    waiting = list(groups)
    bins: list[list[_Unit]] = []
    while waiting:
        waiting.sort(key=lambda unit: unit.num_tokens, reverse=True)
        bin_: list[_Unit] = []
        room = budget
        left: list[_Unit] = []
        for unit in waiting:
            if unit.num_tokens <= room:
                bin_.append(unit)
                room -= unit.num_tokens
            else:
                left.append(unit)
        parts: list[tuple[_Unit, _Unit]] = []  # with what they are a part of
        for unit in left[:NUM_CANDIDATES]:
            if may_cut or unit.num_tokens > budget:
                numbers = _fitting(episodes, unit, room)
                if numbers:
                    parts.append((_unit(episodes, numbers), unit))
        if not bin_ and not parts:  # an episode longer than the budget
            parts.append((_unit(episodes, left[0].episodes[:1]), left[0]))
        if parts:
            part, unit = max(parts, key=lambda pair: pair[0].num_tokens)
            bin_.append(part)
            left.remove(unit)
            rest = [i for i in unit.episodes if i not in part.episodes]
            if rest:
                left.append(_unit(episodes, rest))
        bins.append(bin_)
        waiting = left
    return bins


def _fitting(episodes: Sequence[Episode], unit: _Unit, room: int) -> list[int]:
    """Which episodes of a unit fit with their prompt into `room` tokens, the longest first; in
    their order."""
    room -= len(episodes[unit.episodes[0]].prompt_ids)
    fitting: list[int] = []
    for i in sorted(unit.episodes, key=lambda i: len(episodes[i].response_ids), reverse=True):
        length = len(episodes[i].response_ids)
        if length <= room:
            fitting.append(i)
            room -= length
    return [i for i in unit.episodes if i in fitting]


def _bins_of_rows(episodes: Sequence[Episode], selected: Sequence[int], budget: int) -> list[Bin]:
    """Units of one episode, longest first, in bins whose number of rows times their longest is at
    most `budget`; an episode longer than that gets one of its own."""
    lengths = {i: len(episodes[i].prompt_ids) + len(episodes[i].response_ids) for i in selected}
    bins: list[Bin] = []
    longest = 0  # of the last bin
    for i in sorted(selected, key=lambda i: lengths[i], reverse=True):
        if not bins or (len(bins[-1]) + 1) * longest > budget:
            bins.append([])
            longest = lengths[i]
        bins[-1].append([i])
    return bins


def _build(
    episodes: Sequence[Episode],
    units: list[list[int]],
    index: TokenIndex,
    multiple: int = 1,
    vision: Vision | None = None,
) -> MicroBatch:
    """One micro-batch that is a pack; without units, padding that trains nothing."""
    row = _Row(vision)
    for unit in units:
        row.add_prompt(episodes[unit[0]])
        for i in unit:
            row.add_response(episodes[i], index.tokens_of(i))
    num_blocks = max(ceil(len(row.input_ids) / multiple), 1)
    row.pad(num_blocks * multiple, first_position=0)
    return _micro_batch([row])


def _build_rows(
    episodes: Sequence[Episode], numbers: list[int], index: TokenIndex, vision: Vision | None
) -> MicroBatch:
    """One micro-batch of a row for each episode; without any, a row that trains nothing."""
    rows: list[_Row] = []
    for i in numbers:
        row = _Row(vision)
        row.add_prompt(episodes[i])
        row.add_response(episodes[i], index.tokens_of(i))
        rows.append(row)
    rows = rows or [_Row(vision)]
    longest = max(len(row.input_ids) for row in rows)
    for row in rows:
        # positions go on through the padding: a new beginning would look like another text
        row.pad(max(longest, 1), first_position=len(row.input_ids))
    return _micro_batch(rows)


class _Row:
    """A row while it is filled: the prompt of each unit once, then its responses."""

    def __init__(self, vision: Vision | None):
        self.vision = vision
        self.input_ids: list[int] = []
        self.positions: list[int] = []
        self.rope: list[np.ndarray] = []  # M-RoPE positions of each segment, [3, length]
        self.hidden_index: list[int] = []
        self.targets: list[int] = []
        self.token_index: list[int] = []
        self.segments: list[list[int]] = []  # lengths in tokens, a list for each unit
        # distinct ones, and where in the row the visual tokens of each occurrence stand
        self.pictures: dict[Media, list[np.ndarray]] = {}
        self.prompt_end = 0  # of the last unit

    def add_prompt(self, episode: Episode) -> None:
        """Begin a unit with the prompt of its first episode."""
        length = len(episode.prompt_ids)
        self._add_segment(episode, start=0, end=length)
        self.segments.append([length])
        self.prompt_end = len(self.input_ids)

    def add_response(self, episode: Episode, tokens: range) -> None:
        """`tokens` are the flat indices of its trained tokens."""
        response_start = len(self.input_ids)
        prompt_length = len(episode.prompt_ids)
        response_length = len(episode.response_ids)
        self._add_segment(episode, start=prompt_length, end=prompt_length + response_length)
        self.segments[-1].append(response_length)
        for i, trained in enumerate(episode.loss_mask):
            if trained:
                # a token is predicted at the one before it, the first one at the prompt's last
                before = response_start + i - 1 if i > 0 else self.prompt_end - 1
                self.hidden_index.append(before)
                self.targets.append(episode.response_ids[i])
        self.token_index.extend(tokens)

    def _add_segment(self, episode: Episode, start: int, end: int) -> None:
        """Append the tokens from `start` to `end` of an episode, and the pictures among them."""
        ids = episode.prompt_ids + episode.response_ids
        row_start = len(self.input_ids)
        self.input_ids.extend(ids[start:end])
        self.positions.extend(range(start, end))
        if not self.vision:
            return
        self.rope.append(self.vision.positions(ids, episode.media)[:, start:end])
        for media, places in zip(episode.media, self.vision.places(ids, episode.media)):
            if start <= places[0] < end:
                self.pictures.setdefault(media, []).append(row_start + places - start)

    def pad(self, length: int, first_position: int) -> None:
        """Pad the row to `length` tokens."""
        padding = length - len(self.input_ids)
        if padding > 0:
            positions = range(first_position, first_position + padding)
            self.input_ids.extend([0] * padding)
            self.positions.extend(positions)
            self.rope.append(np.tile(np.array(positions), (3, 1)))  # unused without vision
            self.segments.append([padding])


def _micro_batch(rows: list[_Row]) -> MicroBatch:
    """Rows of one length, one below the other."""
    length = len(rows[0].input_ids)
    hidden_index: list[int] = []
    pictures: dict[Media, list[np.ndarray]] = {}  # distinct ones, and the slots of each occurrence
    for i, row in enumerate(rows):
        start = i * length
        hidden_index.extend(start + place for place in row.hidden_index)
        for media, occurrences in row.pictures.items():
            pictures.setdefault(media, []).extend(start + places for places in occurrences)
    feature_of_slot: dict[int, int] = {}
    first_feature = 0
    for media, occurrences in pictures.items():
        for places in occurrences:
            features = range(first_feature, first_feature + media.num_tokens)
            feature_of_slot.update(zip(places.tolist(), features))
        first_feature += media.num_tokens
    slots = sorted(feature_of_slot)
    position_ids = torch.tensor([row.positions for row in rows])
    if rows[0].vision:
        rope = np.stack([np.concatenate(row.rope, axis=1) for row in rows], axis=1)  # [3, B, L]
        position_ids = torch.cat([position_ids[None], torch.from_numpy(rope)])
    return MicroBatch(
        input_ids=torch.tensor([row.input_ids for row in rows]),
        position_ids=position_ids,
        hidden_index=_int64(hidden_index),
        targets=_int64([token for row in rows for token in row.targets]),
        token_index=_int64([i for row in rows for i in row.token_index]),
        slots=_int64(slots),
        features=_int64([feature_of_slot[slot] for slot in slots]),
        media=list(pictures),
        units=[unit for row in rows for unit in row.segments],
    )


def _int64(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def prompts_of_all_ranks(episodes: list[Episode]) -> list[int]:
    """The sorted prompt indices of the episodes of all ranks, each once."""
    prompts: set[int] = set()
    for prompts_of_rank in gather_objects([episode.prompt_index for episode in episodes]):
        prompts.update(prompts_of_rank)
    return sorted(prompts)

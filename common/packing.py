"""Episodes -> micro-batches under a token budget. The prompt of a group is stored once, followed by
its G responses.

    prompt A | response A1 | response A2 | prompt B | response B1 | ... | padding

A response sees its prompt and itself, never a sibling; its positions continue from the prompt's
end. Only trained tokens have a target. They are addressed by flat indices, so nothing is
multiplied by a padded mask.

With --attention rows each episode has a row of its own, padded on the right, which any causal model
can read. With --attention flash a pack has no shared prompts: each response follows its own copy
of the prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from common.attention import BLOCK
from common.distributed import World, all_reduce, forward_context, gather_objects, to_device
from common.limits import exhausted_memory
from common.memory.halving import halve_budget, limited_memory, release_memory, remembered_budget
from common.pictures import Media
from common.progress import Progress
from common.types import Episode
from common.vision import Vision

Result = TypeVar("Result")
# a micro-batch's episodes, by index: one list for each stored copy of a prompt. In rows, and where
# prompts are not shared, each list has one episode.
Bin = list[list[int]]
# What a micro-batch costs beside its tokens, in tokens: casting and copying weights and adding up
# gradients takes an H100 as long as 1,450 to 1,800 tokens do, for models of any size (calculated,
# not measured).
MICRO_BATCH_COST = 1500
NUM_CANDIDATES = 8  # the longest groups left, of which one may be cut to fill a micro-batch


@dataclass(slots=True)
class MicroBatch:
    """One forward and backward: B rows of L tokens, N of them trained; a pack is one row."""

    input_ids: Tensor  # [B, L] int64
    # [B, L] int64: counted from the start of the prompt; with vision [4, B, L]: these positions,
    # then the three of M-RoPE
    position_ids: Tensor
    # [N] int64: of the B * L tokens, the one whose hidden state predicts the trained token
    hidden_index: Tensor
    targets: Tensor  # [N] int64: ids of the trained tokens
    token_index: Tensor  # [N] int64: flat indices of the trained tokens (`TokenIndex`)
    slots: Tensor  # [S] int64, ascending: of the B * L tokens, the placeholders of pictures
    feature_index: Tensor  # [S] int64: of each slot, the feature among those of all `media`
    media: list[Media]  # distinct pictures: each is encoded once, however many episodes show it
    # of a pack, for each prompt: its length, and those of its responses; padding is a unit, too
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


def prompts_of_all_ranks(episodes: list[Episode]) -> list[int]:
    """The sorted prompt indices of the episodes of all ranks, each once."""
    prompts: set[int] = set()
    for prompts_of_rank in gather_objects([episode.prompt_index for episode in episodes]):
        prompts.update(prompts_of_rank)
    return sorted(prompts)


@dataclass(eq=False)
class Minibatch:
    """The episodes of one optimizer step, as this rank computes them."""

    episode_indices: list[int]  # in the step's list of episodes
    num_tokens: float  # trained tokens on all ranks: a denominator of losses
    num_sequences: float  # episodes with a trained token, on all ranks: the other denominator
    micro_batches: list[MicroBatch]
    # the same responses behind the teacher's prompts; `micro_batches` itself if these are the same
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
        # the step that is being trained on; `attempt` may pack it again
        self.episodes: Sequence[Episode] = []
        self.teacher_episodes: Sequence[Episode] | None = None
        self.index = TokenIndex([])
        self.current_minibatches: list[Minibatch] = []

    def minibatches(
        self,
        episodes: Sequence[Episode],
        index: TokenIndex,
        split: list[list[int]],
        teacher_episodes: Sequence[Episode] | None = None,
    ) -> list[Minibatch]:
        """The minibatches of a step, packed. split: the indices of each one's episodes. All ranks
        call it together.

        A minibatch without a trained token on any rank is left out: Adam would move the weights by
        its momentum alone. teacher_episodes: the same ones, with the prompts that a teacher reads.
        """
        lengths = [index.lengths[indices] for indices in split]
        num_tokens = all_reduce([float(x.sum()) for x in lengths])
        num_sequences = all_reduce([float((x > 0).sum()) for x in lengths])
        self.episodes = episodes
        self.teacher_episodes = teacher_episodes
        self.index = index
        self.current_minibatches = []
        for indices, tokens, sequences in zip(split, num_tokens, num_sequences):
            if tokens > 0:
                minibatch = Minibatch(indices, tokens, sequences, micro_batches=[])
                self.current_minibatches.append(minibatch)
        self._pack_minibatches()
        return self.current_minibatches

    def _pack_minibatches(self) -> None:
        to_measure = self.episodes
        if self.teacher_episodes is not None:  # bins have room for the longer of both prompts
            pairs = zip(self.episodes, self.teacher_episodes, strict=True)
            to_measure = [max(pair, key=lambda episode: len(episode.prompt_ids)) for pair in pairs]
        for minibatch in self.current_minibatches:
            bins = make_bins(
                to_measure, minibatch.episode_indices, self.index, self.budget, self.layout
            )
            minibatch.micro_batches = self._micro_batches_of(bins, self.episodes)
            minibatch.teacher_batches = minibatch.micro_batches
            if self.teacher_episodes is not None:
                minibatch.teacher_batches = self._micro_batches_of(bins, self.teacher_episodes)

    def _micro_batches_of(self, bins: list[Bin], episodes: Sequence[Episode]) -> list[MicroBatch]:
        return [
            build_micro_batch(episodes, bin_, self.index, self.layout, self.vision) for bin_ in bins
        ]

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
                self._pack_minibatches()
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
            # inside `write`: when it is repeated, the micro-batches are smaller
            micro_batches: list[MicroBatch] = []
            for minibatch in minibatches:
                if of_teacher:
                    micro_batches += minibatch.teacher_batches
                else:
                    micro_batches += minibatch.micro_batches
            for batch in Progress("forward pass", micro_batches):
                batch = batch.to(self.world.device)
                with forward_context(model):
                    output = model(batch, *inputs)
                values = output[0] if isinstance(output, tuple) else output
                result[batch.token_index] = values

        self.attempt(write, model)


@dataclass(frozen=True)
class Layout:
    """How micro-batches hold their episodes."""

    share_prompts: bool = True  # a prompt is stored once for its responses
    rows: bool = False  # a row for each episode, in place of a pack
    multiple: int = 1  # packs are padded to a multiple of so many tokens


def layout_of(attention: str) -> Layout:
    """The layout that an attention reads."""
    return Layout(
        # flash attention has no mask for a shared prompt, so each response repeats it
        share_prompts=attention not in ("flash", "rows"),
        rows=attention == "rows",
        # flex attention's kernels are compiled for any number of whole blocks
        multiple=BLOCK if attention == "flex" else 1,
    )


def pack(
    episodes: Sequence[Episode],
    selected: Sequence[int],
    index: TokenIndex,
    *,
    budget: int,
    layout: Layout = Layout(),
    vision: Vision | None = None,
) -> list[MicroBatch]:
    """Micro-batches that hold the episodes `selected`, for callers without a `Packer`. See
    `make_bins`. All ranks call it together."""
    bins = make_bins(episodes, selected, index, budget, layout)
    return [build_micro_batch(episodes, bin_, index, layout, vision) for bin_ in bins]


def make_bins(
    episodes: Sequence[Episode],
    selected: Sequence[int],
    index: TokenIndex,
    budget: int,
    layout: Layout,
) -> list[Bin]:
    """Which of the episodes `selected` go into a micro-batch together: at most `budget` tokens
    before padding, or a single episode that is longer. Those without trained tokens are left out.

    All ranks call it together: those with fewer micro-batches get empty ones, so that all run the
    same collectives.
    """
    selected = [i for i in selected if index.lengths[i] > 0]
    if layout.rows:
        bins = _bins_of_rows(episodes, selected, budget)
    else:
        groups = _groups(episodes, selected, layout.share_prompts)
        bins = []
        for groups_of_bin in _bins_of_groups(episodes, groups, budget):
            bins.append([group.episode_indices for group in groups_of_bin])
    (num_bins,) = all_reduce([len(bins)], "max")
    while len(bins) < num_bins:
        bins.append([])
    return bins


def build_micro_batch(
    episodes: Sequence[Episode],
    bin_: Bin,
    index: TokenIndex,
    layout: Layout,
    vision: Vision | None = None,
) -> MicroBatch:
    """The micro-batch of a bin: a pack, or rows of one length."""
    if layout.rows:
        return _build_rows(episodes, [i for (i,) in bin_], index, vision)
    return _build_pack(episodes, bin_, index, layout.multiple, vision)


class _Group:
    """Episodes that share a prompt: all of them, or a part."""

    def __init__(self, episodes: Sequence[Episode], indices: list[int]):
        self.episode_indices = indices
        # of the prompt and the responses
        self.num_tokens = len(episodes[indices[0]].prompt_ids)
        self.num_tokens += sum(len(episodes[i].response_ids) for i in indices)


def _groups(
    episodes: Sequence[Episode], selected: Sequence[int], share_prompts: bool
) -> list[_Group]:
    """The episodes `selected` by their prompt; each for itself without `share_prompts`."""
    groups: dict[tuple, list[int]] = {}
    for i in selected:
        episode = episodes[i]
        # an environment's first observation is part of the prompt, and may differ within a group
        key = (episode.prompt_index, *episode.prompt_ids) if share_prompts else (i,)
        groups.setdefault(key, []).append(i)
    return [_Group(episodes, indices) for indices in groups.values()]


def _bins_of_groups(
    episodes: Sequence[Episode], groups: list[_Group], budget: int
) -> list[list[_Group]]:
    """Groups in bins of at most `budget` tokens. Of two packings the cheaper one: groups that fit
    stay whole, or some are cut to fill bins, and repeat their prompts."""
    whole = _fill_bins(episodes, groups, budget, may_cut=False)
    cut = _fill_bins(episodes, groups, budget, may_cut=True)
    return min(whole, cut, key=_cost)


def _cost(bins: list[list[_Group]]) -> int:
    """What micro-batches cost, in tokens."""
    cost = 0
    for bin_ in bins:
        cost += MICRO_BATCH_COST + sum(group.num_tokens for group in bin_)
    return cost


def _fill_bins(
    episodes: Sequence[Episode], groups: list[_Group], budget: int, may_cut: bool
) -> list[list[_Group]]:
    """Fill one bin after the other. Groups larger than a bin are cut; with `may_cut` others are,
    too."""
    bins: list[list[_Group]] = []
    while groups:
        bin_, groups = _next_bin(episodes, groups, budget, may_cut)
        bins.append(bin_)
    return bins


def _next_bin(
    episodes: Sequence[Episode], groups: list[_Group], budget: int, may_cut: bool
) -> tuple[list[_Group], list[_Group]]:
    """A bin of the longest groups that fit whole and a part of another one, and the groups left.
    An episode longer than the budget gets a bin of its own."""
    bin_: list[_Group] = []
    left: list[_Group] = []
    room = budget
    for group in sorted(groups, key=lambda group: group.num_tokens, reverse=True):
        if group.num_tokens <= room:
            bin_.append(group)
            room -= group.num_tokens
        else:
            left.append(group)
    candidates = [g for g in left[:NUM_CANDIDATES] if may_cut or g.num_tokens > budget]
    cut = _largest_cut(episodes, candidates, room)
    if cut is None and not bin_:
        # each episode of the largest group is longer than the budget
        cut = left[0], _Group(episodes, left[0].episode_indices[:1])
    if cut is not None:
        group, part = cut
        bin_.append(part)
        left.remove(group)
        rest = [i for i in group.episode_indices if i not in part.episode_indices]
        if rest:
            left.append(_Group(episodes, rest))
    return bin_, left


def _largest_cut(
    episodes: Sequence[Episode], groups: list[_Group], room: int
) -> tuple[_Group, _Group] | None:
    """The group with the largest part that fits into `room` tokens, and that part; None if no
    episode fits."""
    largest: tuple[_Group, _Group] | None = None
    for group in groups:
        indices = _episodes_that_fit(episodes, group, room)
        if not indices:
            continue
        part = _Group(episodes, indices)
        if largest is None or part.num_tokens > largest[1].num_tokens:
            largest = group, part
    return largest


def _episodes_that_fit(episodes: Sequence[Episode], group: _Group, room: int) -> list[int]:
    """The episodes of a group, in their order, that fit with their prompt into `room` tokens; the
    longest are taken first."""
    room -= len(episodes[group.episode_indices[0]].prompt_ids)
    longest_first = sorted(
        group.episode_indices, key=lambda i: len(episodes[i].response_ids), reverse=True
    )
    chosen: set[int] = set()
    for i in longest_first:
        length = len(episodes[i].response_ids)
        if length <= room:
            chosen.add(i)
            room -= length
    return [i for i in group.episode_indices if i in chosen]


def _bins_of_rows(episodes: Sequence[Episode], selected: Sequence[int], budget: int) -> list[Bin]:
    """Episodes, longest first, in bins whose number of rows times their longest is at most
    `budget`; an episode longer than that gets a bin of its own."""
    lengths = {i: len(episodes[i].prompt_ids) + len(episodes[i].response_ids) for i in selected}
    bins: list[Bin] = []
    longest = 0  # of the last bin
    for i in sorted(selected, key=lambda i: lengths[i], reverse=True):
        if not bins or (len(bins[-1]) + 1) * longest > budget:
            bins.append([])
            longest = lengths[i]
        bins[-1].append([i])
    return bins


def _build_pack(
    episodes: Sequence[Episode],
    bin_: Bin,
    index: TokenIndex,
    multiple: int,
    vision: Vision | None,
) -> MicroBatch:
    """A pack, padded to a `multiple` of tokens; of an empty bin, padding that trains nothing."""
    row = _Row(vision)
    for indices in bin_:
        row.add_prompt(episodes[indices[0]])
        for i in indices:
            row.add_response(episodes[i], index.tokens_of(i))
    num_blocks = max(ceil(len(row.input_ids) / multiple), 1)
    # padding is a text of its own: its positions begin at 0
    row.pad(num_blocks * multiple, first_position=0)
    return _join_rows([row])


def _build_rows(
    episodes: Sequence[Episode], indices: list[int], index: TokenIndex, vision: Vision | None
) -> MicroBatch:
    """A row for each episode, padded to the longest; without any, a row that trains nothing."""
    rows: list[_Row] = []
    for i in indices:
        row = _Row(vision)
        row.add_prompt(episodes[i])
        row.add_response(episodes[i], index.tokens_of(i))
        rows.append(row)
    rows = rows or [_Row(vision)]
    longest = max(len(row.input_ids) for row in rows)
    for row in rows:
        # positions go on through the padding: a new beginning would look like another text
        row.pad(max(longest, 1), first_position=len(row.input_ids))
    return _join_rows(rows)


class _Row:
    """A row while it is filled: prompts, each followed by its responses."""

    def __init__(self, vision: Vision | None):
        self.vision = vision
        self.input_ids: list[int] = []
        self.positions: list[int] = []
        self.rope: list[np.ndarray] = []  # M-RoPE positions of each segment, [3, length]
        self.hidden_index: list[int] = []
        self.targets: list[int] = []
        self.token_index: list[int] = []
        self.units: list[list[int]] = []
        # distinct ones, and the slots in this row of each occurrence
        self.pictures: dict[Media, list[np.ndarray]] = {}
        self.prompt_end = 0  # of the last prompt

    def add_prompt(self, episode: Episode) -> None:
        """Append an episode's prompt, as that of the responses that follow."""
        length = len(episode.prompt_ids)
        self._add_segment(episode, start=0, end=length)
        self.units.append([length])
        self.prompt_end = len(self.input_ids)

    def add_response(self, episode: Episode, token_indices: range) -> None:
        """Append an episode's response; `token_indices` are those of its trained tokens."""
        response_start = len(self.input_ids)
        prompt_length = len(episode.prompt_ids)
        response_length = len(episode.response_ids)
        self._add_segment(episode, start=prompt_length, end=prompt_length + response_length)
        self.units[-1].append(response_length)
        for i, is_trained in enumerate(episode.loss_mask):
            if is_trained:
                # a token is predicted at the one before it, the first one at the prompt's last
                before = response_start + i - 1 if i > 0 else self.prompt_end - 1
                self.hidden_index.append(before)
                self.targets.append(episode.response_ids[i])
        self.token_index.extend(token_indices)

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
                slots = row_start + places - start
                self.pictures.setdefault(media, []).append(slots)

    def pad(self, length: int, first_position: int) -> None:
        """Pad the row to `length` tokens."""
        padding = length - len(self.input_ids)
        if padding > 0:
            positions = range(first_position, first_position + padding)
            self.input_ids.extend([0] * padding)
            self.positions.extend(positions)
            self.units.append([padding])
            if self.vision:
                self.rope.append(np.tile(np.array(positions), (3, 1)))


def _join_rows(rows: list[_Row]) -> MicroBatch:
    """Rows of one length, one below the other."""
    length = len(rows[0].input_ids)
    hidden_index: list[int] = []
    pictures: dict[Media, list[np.ndarray]] = {}  # distinct ones, and the slots of each occurrence
    for i, row in enumerate(rows):
        start = i * length
        hidden_index.extend(start + position for position in row.hidden_index)
        for media, occurrences in row.pictures.items():
            pictures.setdefault(media, []).extend(start + slots for slots in occurrences)
    slots, feature_index = _slots_and_features(pictures)
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
        feature_index=_int64(feature_index),
        media=list(pictures),
        units=[unit for row in rows for unit in row.units],
    )


def _slots_and_features(pictures: dict[Media, list[np.ndarray]]) -> tuple[list[int], list[int]]:
    """All slots, ascending, and the feature of each. Every occurrence of a picture has the same
    features."""
    feature_of_slot: dict[int, int] = {}
    first_feature = 0
    for media, occurrences in pictures.items():
        features = range(first_feature, first_feature + media.num_tokens)
        for slots in occurrences:
            feature_of_slot.update(zip(slots.tolist(), features))
        first_feature += media.num_tokens
    all_slots = sorted(feature_of_slot)
    return all_slots, [feature_of_slot[slot] for slot in all_slots]


def _int64(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)

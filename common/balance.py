"""Groups move between ranks before an update, so that no rank waits for the one with the longest
answers."""

from dataclasses import dataclass

from common.distributed import World, gather_objects
from common.types import Episode, by_prompt


@dataclass(frozen=True)
class Group:
    """What all ranks know of the trained episodes of a prompt."""

    prompt: int
    minibatch: int
    tokens: int  # that an update computes


def balance_ranks(
    sampled: list[Episode],
    trained: list[Episode],
    split: list[list[int]],
    world: World,
    share_prompts: bool = True,
) -> tuple[list[Episode], list[Episode], list[list[int]]]:
    """`sampled`, `trained` and `split` after whole groups have moved, so that in each minibatch all
    ranks have about as many tokens to compute. All ranks call it together.

    sampled: this rank's episodes. trained: those of them to train on, or copies. split: for each
    minibatch the indices of its episodes in `trained`. share_prompts: whether the prompt of a group
    is computed once, or before each of its responses. Which rank trains on a group depends on the
    groups alone, not on the ranks that have sampled them: a replay of a dump has the same result.
    """
    if world.size == 1:
        return sampled, trained, split
    groups: list[Group] = []
    for groups_of_rank in gather_objects(groups_of(trained, split, share_prompts)):
        groups.extend(groups_of_rank)
    rank_of = rank_of_prompts(groups, world.size)
    sampled, trained = exchange(sampled, trained, rank_of, world)

    minibatch_of = {group.prompt: group.minibatch for group in groups}
    new_split: list[list[int]] = [[] for _ in split]
    for number, episode in enumerate(trained):
        new_split[minibatch_of[episode.prompt_index]].append(number)
    return sampled, trained, new_split


def groups_of(
    trained: list[Episode], split: list[list[int]], share_prompts: bool = True
) -> list[Group]:
    groups: list[Group] = []
    for minibatch, numbers in enumerate(split):
        episodes = [trained[number] for number in numbers]
        for prompt, group in by_prompt(episodes).items():
            groups.append(Group(prompt, minibatch, num_tokens(group, share_prompts)))
    return groups


def num_tokens(group: list[Episode], share_prompts: bool = True) -> int:
    """Tokens that an update computes for a group: the trained responses, and the prompt once or
    before each of them."""
    lengths = [len(episode.response_ids) for episode in group if any(episode.loss_mask)]
    if not lengths:
        return 0
    num_prompts = 1 if share_prompts else len(lengths)
    return num_prompts * len(group[0].prompt_ids) + sum(lengths)


def rank_of_prompts(groups: list[Group], num_ranks: int) -> dict[int, int]:
    """{prompt: rank}: the groups of a minibatch, longest first, each to the rank that has the
    fewest tokens of that minibatch so far."""
    rank_of: dict[int, int] = {}
    loads_of: dict[int, list[int]] = {}  # minibatch: tokens of each rank
    for group in sorted(groups, key=lambda group: (-group.tokens, group.prompt)):
        loads = loads_of.setdefault(group.minibatch, [0] * num_ranks)
        rank = loads.index(min(loads))
        loads[rank] += group.tokens
        rank_of[group.prompt] = rank
    return rank_of


def exchange(
    sampled: list[Episode], trained: list[Episode], rank_of: dict[int, int], world: World
) -> tuple[list[Episode], list[Episode]]:
    """`sampled` and `trained` of this rank once each prompt is on its rank, sorted. A prompt that
    has no rank stays."""
    # by sample: with --mask-truncated an episode to train on may be a copy of the sampled one
    trained_of = {episode.sample: episode for episode in trained}
    # (sampled episode, the one to train on, if there is one)
    pairs_here: list[tuple[Episode, Episode | None]] = []
    departures: list[tuple[Episode, Episode | None]] = []
    for episode in sampled:
        pair = (episode, trained_of.get(episode.sample))
        if rank_of.get(episode.prompt_index, world.rank) == world.rank:
            pairs_here.append(pair)
        else:
            departures.append(pair)
    for departures_of_rank in gather_objects(departures):
        for pair in departures_of_rank:
            if rank_of[pair[0].prompt_index] == world.rank:
                pairs_here.append(pair)
    pairs_here.sort(key=lambda pair: pair[0].sample)
    return [e for e, _ in pairs_here], [e for _, e in pairs_here if e is not None]

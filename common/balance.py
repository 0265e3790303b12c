"""Groups move between ranks before an update, so that no rank waits for the one with the longest
answers."""

from collections.abc import Mapping

from common.distributed import World, gather_objects
from common.types import Episode, by_prompt


def balance_ranks(
    sampled: list[Episode], trained: list[Episode], split: list[list[int]], world: World
) -> tuple[list[Episode], list[Episode], list[list[int]]]:
    """All arguments but `world` after whole groups have moved, so that in each minibatch all ranks
    have about as many tokens to compute. All ranks call it together.

    sampled: this rank's episodes, those of `trained` among them. split: for each minibatch the
    indices of its episodes in `trained`. The result depends on the groups alone, not on the ranks
    that have sampled them, and so is the same for a dump that is replayed.
    """
    if world.size == 1:
        return sampled, trained, split
    groups: list[tuple[int, int, int]] = []  # (minibatch, tokens, prompt)
    for minibatch, numbers in enumerate(split):
        for prompt, group in by_prompt([trained[i] for i in numbers]).items():
            groups.append((minibatch, num_tokens(group), prompt))
    all_groups = [group for groups_of_rank in gather_objects(groups) for group in groups_of_rank]
    ranks = rank_of_prompts(all_groups, world.size)

    trained_of = {episode.sample: episode for episode in trained}  # a copy, if it is masked
    own: list[tuple[Episode, Episode | None]] = []
    leaving: list[tuple[Episode, Episode | None]] = []
    for episode in sampled:
        stays = ranks.get(episode.prompt_index, world.rank) == world.rank
        (own if stays else leaving).append((episode, trained_of.get(episode.sample)))
    for leaving_rank in gather_objects(leaving):
        own += [pair for pair in leaving_rank if ranks[pair[0].prompt_index] == world.rank]
    own.sort(key=lambda pair: pair[0].sample)

    sampled = [episode for episode, _ in own]
    trained = [episode for _, episode in own if episode is not None]
    minibatch_of = {prompt: minibatch for minibatch, _, prompt in all_groups}
    split = [[] for _ in split]
    for number, episode in enumerate(trained):
        split[minibatch_of[episode.prompt_index]].append(number)
    return sampled, trained, split


def num_tokens(group: list[Episode]) -> int:
    """Tokens that an update computes for a group: its prompt once, and the trained responses."""
    lengths = [len(episode.response_ids) for episode in group if any(episode.loss_mask)]
    return len(group[0].prompt_ids) + sum(lengths) if lengths else 0


def rank_of_prompts(groups: list[tuple[int, int, int]], num_ranks: int) -> Mapping[int, int]:
    """{prompt: rank} of groups (minibatch, tokens, prompt): those of a minibatch, longest first,
    each to the rank that has the fewest tokens of it so far."""
    ranks: dict[int, int] = {}
    for minibatch in sorted({minibatch for minibatch, _, _ in groups}):
        sizes = [(-tokens, prompt) for part, tokens, prompt in groups if part == minibatch]
        loads = [0] * num_ranks
        for negative_tokens, prompt in sorted(sizes):
            rank = loads.index(min(loads))
            ranks[prompt] = rank
            loads[rank] -= negative_tokens
    return ranks

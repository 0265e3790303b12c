"""Prompts of a rollout that wait, and the episodes of those that are being sampled."""

from collections.abc import Iterable

from common.types import Episode, Row


class PromptQueue:
    """Prompts that wait to be sampled, and the episodes of those that are under way, at most
    `at_once` prompts together.

    prompts: pairs of (prompt index, row), opened when they are taken; count: how many there are;
    num_samples: episodes of each. A prompt's place is its number in this order, from 0; the key of
    an episode is place * num_samples + sample index.
    """

    def __init__(
        self, prompts: Iterable[tuple[int, Row]], count: int, num_samples: int, at_once: float
    ):
        self.prompts = iter(prompts)
        self.num_waiting = count
        self.num_samples = num_samples
        self.at_once = at_once
        self.num_taken = 0
        self.episodes: dict[int, Episode] = {}  # by key
        self.rows: dict[int, Row] = {}  # by the place of the prompt
        self.num_unended: dict[int, int] = {}  # episodes of a prompt, by its place

    @property
    def can_take(self) -> bool:
        return self.num_waiting > 0 and len(self.rows) < self.at_once

    def take(self) -> list[int]:
        """Open prompts until `at_once` are under way, or none waits. Returns the keys of their
        episodes, each of which the caller has to `end`; nothing is to be sampled for those that
        have a `finish_reason`, since their row has a problem."""
        keys = []
        while self.can_take:
            index, row = next(self.prompts)
            place = self.num_taken
            self.num_taken += 1
            self.num_waiting -= 1
            self.rows[place] = row
            self.num_unended[place] = self.num_samples
            for sample_index in range(self.num_samples):
                key = place * self.num_samples + sample_index
                self.episodes[key] = new_episode(index, sample_index, row)
                keys.append(key)
        return keys

    def row_of(self, key: int) -> Row:
        return self.rows[key // self.num_samples]

    def end(self, key: int) -> tuple[Row, list[Episode]] | None:
        """Note that an episode has ended. When it is the last one of a prompt, another prompt may
        be taken, and the row is returned with its episodes."""
        place = key // self.num_samples
        self.num_unended[place] -= 1
        if self.num_unended[place]:
            return None
        del self.num_unended[place]
        first = place * self.num_samples
        episodes = [self.episodes.pop(first + i) for i in range(self.num_samples)]
        return self.rows.pop(place), episodes


def new_episode(index: int, sample_index: int, row: Row) -> Episode:
    """An episode of which nothing was sampled so far, and nothing will be if the row has a
    problem."""
    episode = Episode(
        prompt_index=index,
        sample_index=sample_index,
        prompt_ids=row.prompt_ids,
        response_ids=[],
        loss_mask=[],
        logprobs=[],
        media=list(row.media),
        row=row.index,
        truth=row.truth,
    )
    if row.problem:
        episode.finish_reason = "unreadable"
    return episode

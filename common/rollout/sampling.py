"""Sampling episodes of one or several turns with an engine: token ids in, token ids out."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from common.engine.protocol import Engine
from common.progress import Progress
from common.rollout.queue import PromptQueue
from common.types import Episode, Request, Row, Sampling, Watch

if TYPE_CHECKING:
    from common.rollout.trajectories import Turns


def request_seed(seed: int, step: int, prompt_index: int, turn: int = 0) -> int:
    """31 bits from (run seed, step, prompt, turn), the same on any number of ranks. The seed of a
    sample is this plus its index."""
    text = f"{seed}/{step}/{prompt_index}"
    if turn:
        text += f"/{turn}"
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def sample_episodes(
    engine: Engine,
    prompts: Mapping[int, Row],
    sampling: Sampling,
    *,
    seed: int,
    step: int,
    weights_step: int,
    turns: "Turns | None" = None,
    watch: Watch = nullcontext,
) -> list[Episode]:
    """All episodes of `sample_prompts`, in the order of `prompts` (prompt index -> row)."""
    groups: dict[int, list[Episode]] = {}
    for _, episodes in sample_prompts(
        engine,
        prompts.items(),
        len(prompts),
        sampling,
        seed=seed,
        step=step,
        weights_step=weights_step,
        turns=turns,
        watch=watch,
    ):
        groups[episodes[0].prompt_index] = episodes
    return [episode for index in prompts for episode in groups[index]]


def sample_prompts(
    engine: Engine,
    prompts: Iterable[tuple[int, Row]],
    count: int,
    sampling: Sampling,
    *,
    seed: int,
    step: int,
    weights_step: int,
    turns: "Turns | None" = None,
    watch: Watch = nullcontext,
    at_once: float = inf,
    label: str = "sampled responses",
) -> Iterator[tuple[Row, list[Episode]]]:
    """Each row with its `sampling.n` episodes, as soon as all of them have ended.
    `sampling.max_tokens` bounds all that follows a prompt.

    At most `at_once` of the `count` prompts are under way; when one has ended, the next is opened.
    Without `turns` an episode is one answer. With them each trajectory goes on by itself, unless in
    lock-step: while tools run for some, the engine samples for the others. `watch` times the engine
    and the waits for tools.
    """
    queue = PromptQueue(prompts, count, sampling.n, at_once)
    progress = Progress(label, count * sampling.n)
    max_turn_tokens = sampling.max_tokens
    if turns and turns.flags.max_turn_tokens:
        max_turn_tokens = turns.flags.max_turn_tokens

    def submit(key: int, n: int = 1) -> None:
        episode = queue.episodes[key]
        tokens_left = sampling.max_tokens - len(episode.response_ids)
        turn_seed = request_seed(seed, step, episode.prompt_index, episode.turns)
        request = Request(
            key=key,
            prompt_ids=episode.prompt_ids + episode.response_ids,
            sampling=replace(sampling, n=n, max_tokens=min(tokens_left, max_turn_tokens)),
            seed=turn_seed + episode.sample_index,
            weights_step=weights_step,
            media=episode.media,
        )
        engine.submit(request)

    def sample_answers() -> Iterator[int]:
        """Without `turns`: yield the key of each episode, once it has its answer or can have
        none."""
        while engine.busy or queue.can_take:
            for key in queue.take():
                if queue.episodes[key].finish_reason:  # its row has a problem: nothing to sample
                    yield key
                elif key % sampling.n == 0:  # one request for a group
                    submit(key, sampling.n)
            if not engine.busy:
                continue
            with watch("engine"):
                answered = engine.step()
            for first_key, completions in answered:
                for key, completion in enumerate(completions, start=first_key):
                    queue.episodes[key].add_turn(completion, sampling.max_tokens)
                    yield key
            progress.add(0)  # prints a line if one is due

    if turns:
        ended_keys = turns.sample(
            engine, queue, sampling.max_tokens, submit, watch, seed=f"{seed}/{step}"
        )
    else:
        ended_keys = sample_answers()
    for key in ended_keys:
        progress.add()
        ended_prompt = queue.end(key)
        if ended_prompt:
            yield ended_prompt

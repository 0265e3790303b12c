"""Sampling episodes of one or several turns with an engine: token ids in, token ids out."""

import hashlib
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from common.engine.protocol import Engine
from common.progress import Progress
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
    """`sampling.n` episodes of each prompt index, prompt by prompt. `sampling.max_tokens` bounds
    all that follows a prompt.

    Without `turns` an episode is one answer. With them requests proceed on their own: while tools
    run in their workers, the engine samples for the others. `watch` times the engine and, when it
    has nothing to do, the tools.
    """
    episodes = []
    for index, row in prompts.items():
        for sample_index in range(sampling.n):
            episodes.append(new_episode(index, sample_index, row))
    readable = [key for key, episode in enumerate(episodes) if not episode.finish_reason]
    progress = Progress("sampled responses", len(readable))
    max_turn_tokens = sampling.max_tokens
    if turns and turns.flags.max_turn_tokens:
        max_turn_tokens = turns.flags.max_turn_tokens

    def submit(key: int, n: int = 1) -> None:
        episode = episodes[key]
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

    if turns:
        turns.sample(
            engine,
            episodes,
            prompts,
            sampling.max_tokens,
            submit,
            progress,
            watch,
            seed=f"{seed}/{step}",
        )
        return episodes
    for key in readable[:: sampling.n]:  # one request for a group
        submit(key, sampling.n)
    while engine.busy:
        with watch("engine"):
            answered = engine.step()
        for key, completions in answered:
            for episode, completion in zip(episodes[key:], completions):
                episode.add_turn(completion, sampling.max_tokens)
                progress.add()
        progress.add(0)
    return episodes


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

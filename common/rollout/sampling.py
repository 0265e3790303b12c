"""Sampling trajectories of one or several turns with an engine: token ids in, token ids out. Their
statistics."""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from common.engine.protocol import Engine
from common.progress import Progress
from common.types import Completion, Episode, Request, Row, Sampling

Watch = Callable[[str], AbstractContextManager]  # what happens in `with watch(NAME)` is timed


def request_seed(seed: int, step: int, prompt_index: int, turn: int = 0) -> int:
    """31 bits from (run seed, step, prompt, turn), the same on any number of ranks; plus the sample
    index."""
    text = f"{seed}/{step}/{prompt_index}" + (f"/{turn}" if turn else "")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


def sample_episodes(
    engine: Engine,
    prompts: Mapping[int, Row],
    sampling: Sampling,
    *,
    seed: int,
    step: int,
    weights_step: int,
    turns=None,
    watch: Watch = nullcontext,
) -> list[Episode]:
    """`sampling.n` episodes of each prompt index, prompt by prompt; `sampling.max_tokens` is for
    all after a prompt.

    Without `turns` an episode is one answer. With it requests proceed on their own: while tools run
    in their workers, the engine samples for the others; `watch` counts what it and, when it has
    nothing to do, the tools take.
    """
    episodes = [
        Episode(
            index,
            j,
            row.prompt_ids,
            [],
            [],
            [],
            media=list(row.media),
            row=row.index,
            truth=row.truth,
        )
        for index, row in prompts.items()
        for j in range(sampling.n)
    ]
    for episode in episodes:
        episode.finish_reason = "unreadable" if prompts[episode.prompt_index].problem else ""
    readable = [key for key, episode in enumerate(episodes) if not episode.finish_reason]
    progress = Progress("sampled responses", len(readable))
    turn_tokens = turns and turns.flags.max_turn_tokens

    def submit(key: int, n: int = 1) -> None:
        e = episodes[key]
        room = min(sampling.max_tokens - len(e.response_ids), turn_tokens or sampling.max_tokens)
        turn_seed = request_seed(seed, step, e.prompt_index, e.turns) + e.sample_index
        limited = replace(sampling, n=n, max_tokens=room)
        engine.submit(
            Request(key, e.prompt_ids + e.response_ids, limited, turn_seed, weights_step, e.media)
        )

    if turns is not None:
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
                add_turn(episode, completion, sampling.max_tokens)
                progress.add()
        progress.add(0)
    return episodes


def add_turn(episode: Episode, completion: Completion, max_tokens: int) -> None:
    """Append what the policy sampled."""
    episode.turns += 1
    episode.response_ids += completion.token_ids
    episode.loss_mask += [1] * len(completion.token_ids)
    episode.logprobs += completion.logprobs
    cut = completion.finish_reason == "length" and len(episode.response_ids) < max_tokens
    episode.finish_reason = "turn_length" if cut else completion.finish_reason

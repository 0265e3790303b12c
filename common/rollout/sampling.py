"""Sampling trajectories of one or several turns with an engine: token ids in, token ids out. Their
statistics."""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from common.distributed import gather_objects
from common.engine.books import Completion, Request, Sampling
from common.pictures import Media
from common.progress import Progress

Prompt = list[dict] | str
Watch = Callable[[str], AbstractContextManager]  # what happens in `with watch(NAME)` is timed


def is_continued(prompt: Prompt) -> bool:
    """Does it end in words of the assistant, which the model goes on with? Behind a call it begins
    a new turn."""
    if isinstance(prompt, str):
        return False
    last = prompt[-1]
    return last["role"] == "assistant" and not last.get("tool_calls")


def with_replies(prompt: list[dict], replies: list[dict]) -> list[dict]:
    """The messages of a conversation, from the assistant's first reply on, which may go on with the
    prompt's last."""
    if not is_continued(prompt) or not replies:
        return [*prompt, *replies]
    begun, first = prompt[-1], replies[0]
    return [*prompt[:-1], begun | {"content": begun["content"] + first["content"]}, *replies[1:]]


@dataclass(slots=True)
class Row:
    """A prompt of a data set, as the engine is given it, and what its reward function is given."""

    # position in the concatenated files, whatever was dropped: the prompt's identity for seeds
    index: int
    data_source: str
    prompt: Prompt
    ground_truth: Any
    extra_info: dict
    prompt_ids: list[int]
    # in the order of their placeholders in prompt_ids
    media: list[Media] = field(default_factory=list)
    # on offer: name -> keyword arguments of the row's own
    tools: dict[str, dict] = field(default_factory=dict)
    # what it gives to a function that answers; None: that has nothing to say to it
    answer_kwargs: dict | None = None
    # columns, for `reset` of an environment; None: this row has none
    environment: dict | None = None
    messages: Prompt = ""  # what prompt_ids were made of, by the chat template
    problem: str = ""  # why a picture could not be read; prompt_ids are empty then

    @property
    def truth(self) -> str:
        """The ground truth as a text."""
        known = self.ground_truth
        text = (
            known if isinstance(known, str) else json.dumps(known, ensure_ascii=False, default=str)
        )
        return text.encode(errors="replace").decode()


@dataclass(slots=True)
class Episode:
    """One trajectory. Trained on is exactly `response_ids` where `loss_mask` is 1; text is never
    re-encoded."""

    # place in the step's global batch, or Row.index: episodes that share it share `prompt_ids`
    prompt_index: int
    sample_index: int  # which of the prompt's samples
    prompt_ids: list[int]
    # all that follows the prompt: sampled tokens and, with tools, observations
    response_ids: list[int]
    # 1 = sampled by the policy (the end-of-turn token too), 0 = observation or template
    loss_mask: list[int]
    logprobs: list[float]  # the engine's, at the sampling temperature; 0.0 where loss_mask is 0
    finish_reason: str = ""  # one of FINISH_REASONS
    # components; "score" is what is trained on
    rewards: dict[str, float | str] = field(default_factory=dict)
    # in the order of their placeholders: the prompt's, then others
    media: list[Media] = field(default_factory=list)
    turns: int = 0  # sampled so far
    # of tools: turn, name, arguments, text, error, info; media added
    calls: list[dict] = field(default_factory=list)
    # with tools: the turns and what answered them, as a chat
    messages: list[dict] = field(default_factory=list)
    opening: str = ""  # what an environment's `reset` has said, at the end of the prompt
    environment_reward: float | None = None
    # an environment's: tokens sampled by then, it
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    model_reward: float | None = None  # of --reward-model
    row: int | None = None  # `Row.index` of its prompt
    truth: str = ""  # its ground truth: a text, or JSON

    @property
    def truncated(self) -> bool:
        return self.finish_reason in ("length", "turn_length")


FINISH_REASONS = {
    "stop": "an end token, and no tool was called",
    "length": "--max-response-tokens, or an observation that would exceed it",
    "turn_length": "--max-turn-tokens",
    "max_turns": "--max-turns: a tool was called in the last one",
    "unanswered": "--max-turns: the function of --environment had more to say",
    "done": "the environment's `done`",
    "max_images": "--max-images: a tool returned more",
    "max_tool_errors": "--max-tool-errors",
    "vision_token": "the policy sampled a vision placeholder: the trajectory ends before it",
    "tool_failed": "through our fault: a tool's `ours`, an environment, no worker; not trained on",
    "unreadable": "a picture of the prompt could not be read: nothing was sampled, not trained on",
}


def request_seed(seed: int, step: int, prompt_index: int, turn: int = 0) -> int:
    """31 bits from (run seed, step, prompt, turn), the same on any number of ranks; plus the sample
    index."""
    text = f"{seed}/{step}/{prompt_index}" + (f"/{turn}" if turn else "")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


def sample_episodes(
    engine,
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


def by_prompt(episodes: list[Episode]) -> dict[int, list[Episode]]:
    groups: dict[int, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.prompt_index, []).append(episode)
    return groups


def prompts_of_all_ranks(episodes: list[Episode]) -> list[int]:
    return sorted(
        {prompt for part in gather_objects([e.prompt_index for e in episodes]) for prompt in part}
    )


def unequal_groups(episodes: list[Episode]) -> list[Episode]:
    """Those whose group has more than one score: the others would get advantage 0."""
    groups = by_prompt(episodes).values()
    return [e for group in groups if len({e.rewards["score"] for e in group}) > 1 for e in group]

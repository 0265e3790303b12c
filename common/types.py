"""Types that the parts of a run exchange: rows, requests, completions, episodes, tools. Without
torch."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from math import isnan, nan
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # workers read no pictures
    from concurrent.futures import Future

    from common.pictures import Media

Prompt = list[dict] | str
Watch = Callable[[str], AbstractContextManager]  # what happens in `with watch(NAME)` is timed
MAX_TEXT = 4096  # characters of an observation


def is_continued(prompt: Prompt) -> bool:
    """Whether it ends in words of the assistant, which the model continues. After a call of a tool
    the model begins a new turn."""
    if isinstance(prompt, str):
        return False
    last = prompt[-1]
    return last["role"] == "assistant" and not last.get("tool_calls")


def with_replies(prompt: list[dict], replies: list[dict]) -> list[dict]:
    """The messages of a prompt and of what follows it. The first reply may continue the prompt's
    last message: the two are one."""
    if not is_continued(prompt) or not replies:
        return [*prompt, *replies]
    content = prompt[-1]["content"] + replies[0]["content"]
    joined = prompt[-1] | {"content": content}
    return [*prompt[:-1], joined, *replies[1:]]


@dataclass(slots=True)
class Row:
    """A prompt of a data set, as the engine gets it, with the arguments of its reward function."""

    # position in the concatenated files, dropped rows counted: the prompt's identity for seeds
    index: int
    data_source: str
    prompt: Prompt
    ground_truth: Any
    extra_info: dict
    prompt_ids: list[int]
    # in the order of their placeholders in prompt_ids
    media: "list[Media]" = field(default_factory=list)
    # {tool that the policy may call: its keyword arguments from this row}
    tools: dict[str, dict] = field(default_factory=dict)
    # keyword arguments of the function that answers the policy; None: it does not answer this row
    answer_kwargs: dict | None = None
    # the row's columns, for `reset` of its environment; None: it has none
    environment: dict | None = None
    messages: Prompt = ""  # from which the chat template made prompt_ids
    problem: str = ""  # why it cannot be used now, as when a picture is gone; no prompt_ids then

    @property
    def truth(self) -> str:
        """The ground truth as a text."""
        text = self.ground_truth
        if not isinstance(text, str):
            text = json.dumps(text, ensure_ascii=False, default=str)
        return text.encode(errors="replace").decode()


@dataclass(slots=True)
class Episode:
    """One trajectory. Training uses exactly the `response_ids` whose `loss_mask` is 1, and no text
    is encoded again."""

    # place in the step's global batch, or Row.index: episodes that share it have the same prompt,
    # up to what an environment's `reset` adds
    prompt_index: int
    sample_index: int  # which of the prompt's samples
    prompt_ids: list[int]
    # all that follows the prompt: sampled tokens and, between turns, observations
    response_ids: list[int]
    # 1 = sampled by the policy (the end-of-turn token too), 0 = observation or template
    loss_mask: list[int]
    logprobs: list[float]  # the engine's, at the sampling temperature; 0.0 if it sampled no token
    finish_reason: str = ""  # one of FINISH_REASONS
    # of the reward function: "score", and what else it returns
    rewards: dict[str, float | str] = field(default_factory=dict)
    # the reward to train on: the reward function's score and what a script adds to it
    score: float = nan
    # {name: what a script has added to the score}
    terms: dict[str, float] = field(default_factory=dict)
    # in the order of their placeholders: the prompt's, then others
    media: "list[Media]" = field(default_factory=list)
    turns: int = 0  # sampled so far
    # of tools: {turn, name, arguments, text, error, info, media: how many of the reply's pictures
    # are in the response}
    calls: list[dict] = field(default_factory=list)
    # if something may answer the policy, as a chat: the turns that the policy has ended (not one
    # that was cut off), and the answers to them
    messages: list[dict] = field(default_factory=list)
    opening: str = ""  # text of an environment's `reset`, at the end of the prompt
    # of an environment that is a class, for the whole trajectory
    environment_reward: float | None = None
    # of one that is a function: (number of tokens sampled by then, reward)
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    model_reward: float | None = None  # of --reward-model
    # what a teacher reads in place of the prompt; [] without --teacher-prompt-column
    teacher_prompt_ids: list[int] = field(default_factory=list)
    # from the teacher (nats), for each of response_ids, 0.0 where loss_mask is 0; [] without one
    divergences: list[float] = field(default_factory=list)
    row: int | None = None  # `Row.index` of its prompt
    truth: str = ""  # its ground truth: a text, or JSON

    def __post_init__(self) -> None:
        if self.rewards and isnan(self.score):
            self.score = self.rewards["score"]

    def set_rewards(self, rewards: dict[str, float | str]) -> None:
        self.rewards = rewards
        self.score = rewards["score"]

    def add_turn(self, completion: "Completion", max_tokens: int) -> None:
        """Append what the policy has sampled; max_tokens: of the whole response."""
        self.turns += 1
        self.response_ids += completion.token_ids
        self.loss_mask += [1] * len(completion.token_ids)
        self.logprobs += completion.logprobs
        self.finish_reason = completion.finish_reason
        if completion.finish_reason == "length" and len(self.response_ids) < max_tokens:
            self.finish_reason = "turn_length"

    def untrained(self) -> "Episode":
        """A copy without a token to train on."""
        return replace(self, loss_mask=[0] * len(self.loss_mask))

    @property
    def sample(self) -> tuple[int, int]:
        """Which sample of which prompt it is."""
        return self.prompt_index, self.sample_index

    @property
    def truncated(self) -> bool:
        return self.finish_reason in ("length", "turn_length")


FINISH_REASONS = {
    "stop": "an end token, and no tool was called",
    "length": "--max-response-tokens, or an observation that would exceed it",
    "turn_length": "--max-turn-tokens",
    "max_turns": "--max-turns: a tool was called in the last one",
    "unanswered": "--max-turns: the function of --environment replied to the last turn as well",
    "done": "the environment's `done`",
    "max_images": "--max-images: a tool returned more",
    "max_tool_errors": "--max-tool-errors",
    "vision_token": "the policy sampled a vision placeholder: the trajectory ends before it",
    "tool_failed": "no fault of the policy (trusted tool, environment, no worker): not trained on",
    "data": "the data set's response, of --response-column: nothing was sampled",
    "unreadable": "a picture of the prompt, or of the teacher's, could not be read: not trained on",
}


def by_prompt(episodes: list[Episode]) -> dict[int, list[Episode]]:
    groups: dict[int, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.prompt_index, []).append(episode)
    return groups


@dataclass(frozen=True)
class Sampling:
    """How to sample. Training needs the plain distribution, softmax(logits / temperature): no flag
    gives it another."""

    n: int = 1  # completions per prompt
    max_tokens: int = 256
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # below 1 in evaluation only


@dataclass(slots=True)
class Request:
    """A request to an engine: `sampling.n` completions; sample j is drawn with seed + j."""

    key: int  # comes back with the completions
    prompt_ids: list[int]  # with one placeholder for each token of each of `media`
    sampling: Sampling
    seed: int
    # the step whose weights the engine must have: RuntimeError otherwise
    weights_step: int
    media: "Sequence[Media]" = ()


@dataclass(slots=True)
class Completion:
    token_ids: list[int]  # as sampled, the end token included
    logprobs: list[float]  # log-prob of each sampled token, after temperature
    # "stop" (an end token), "length", or "vision_token": a placeholder came next, and is left out
    finish_reason: str


@dataclass(slots=True)
class Tool:
    name: str
    function: Callable
    # {"type": "function", "function": {name, description, parameters}}; {}: none is offered
    schema: dict
    aliases: tuple[str, ...] = ()
    role: str = "tool"  # of the message that holds the observation: "tool" or "user"
    # whether a hang or a crash is our fault, whatever the policy has asked for
    trusted: bool = False
    stateful: bool = False  # a method of an environment
    taught_by: tuple[str, ...] = ()  # texts of prompts that explain by themselves how to call it

    def is_taught(self, prompt: str) -> bool:
        return any(mark in prompt for mark in self.taught_by)


@dataclass(slots=True)
class ToolReply:
    text: str
    images: list[bytes] = field(default_factory=list)  # encoded, at their own resolution
    # the tool refused, raised, hung or crashed: the text is what the policy reads
    error: bool = False
    # by our fault, not the policy's: the sample is lost, the text has the reason
    failed: bool = False
    info: dict = field(default_factory=dict)
    role: str = "tool"  # of the message that holds text and images
    decoding: "Future[list[Media]] | None" = None  # of its images


def error_text(reason: str, role: str) -> str:
    """The text of a reply that is an error. The visual tools, whose replies are user messages, have
    a wording of their own."""
    if role == "user":
        return trim(f"\nExecution error:\n{reason}\n")
    return trim(f"Error: {reason}")


def trim(text: str) -> str:
    """A text without lone surrogates, which no tokenizer takes, cut to MAX_TEXT characters."""
    text = text.encode(errors="replace").decode()
    if len(text) <= MAX_TEXT:
        return text
    mark = f"\n[... cut: the whole has {len(text)} characters ...]\n"
    num_kept = MAX_TEXT - len(mark)
    head = num_kept // 2
    tail = num_kept - head
    return text[:head] + mark + text[-tail:]

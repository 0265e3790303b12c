"""The assistant's turns in the text of a conversation, as the chat template shows them.

Most templates only append to a chat: all its turns stand in one text. Those of thinking models show
a turn differently once another follows (Qwen3's leaves out its thoughts). Then each turn has a text
of its own, which ends with it: what an engine reads when it comes to this turn, and the turn.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from common.data.formats import num_pictures, text_of
from common.data.render import PROBE, after_last_turn, breakdowns_as_bad_rows, encode
from common.data.scan import num_shared
from common.pictures import BadRow

# turns of the assistant: the template renders all messages before each, in quadratic time
MAX_TURNS = 500
THOUGHTS_OPEN = "<think>"
THOUGHTS_CLOSE = "</think>"
SHOWN_ELSEWHERE = "the chat template shows a turn behind another prompt than the one it gives"


@dataclass(slots=True)
class Sample:
    """A text to train on, up to the end of its last turn.

    turns: {index of the message: (start, end)}, the characters that the assistant writes, its end
    token included.
    """

    text: str
    turns: dict[int, tuple[int, int]]

    def num_pictures(self, messages: list[dict]) -> int:
        """How many of a conversation's pictures stand in the text."""
        num_messages = max(self.turns) + 1 if self.turns else 0
        return sum(num_pictures(message) for message in messages[:num_messages])


class RewrittenTurns(Exception):
    """The template shows an earlier turn differently once another follows."""


def read_samples(
    messages: list[dict], train: list[bool], tokenizer, max_tokens: int
) -> tuple[list[Sample], bool]:
    """The texts of a conversation to train on, and whether it is split: whether each turn that
    `train` marks has a text of its own. BadRow if a turn does not follow its prompt, and for too
    many turns."""
    try:
        return [read_turns(messages, tokenizer, max_tokens)], False
    except RewrittenTurns:
        indices = [i for i in turn_indices(messages) if train[i]]
        if len(indices) > MAX_TURNS:
            raise BadRow(f"more than {MAX_TURNS} turns of the assistant: split it") from None
        return [read_last_turn(messages[: i + 1], tokenizer) for i in indices], True


def turn_indices(messages: list[dict]) -> list[int]:
    """The indices of the assistant's messages that have a prompt."""
    return [i for i, message in enumerate(messages) if i > 0 and message["role"] == "assistant"]


def template_of(messages: list[dict], tokenizer) -> partial:
    """The chat template with the tools that the messages offer, as a function that gives a text."""
    return partial(tokenizer.apply_chat_template, tools=messages[0].get("tools"), tokenize=False)


def read_turns(messages: list[dict], tokenizer, max_tokens: int) -> Sample:
    """The text of a conversation up to the end of the assistant's last turn, with all its turns.

    If there are more than MAX_TURNS, those after the cut at `max_tokens` are left out; BadRow if
    that leaves too many. RewrittenTurns if the template changes earlier turns.
    """
    indices = turn_indices(messages)
    template = template_of(messages, tokenizer)
    text = template(messages[: indices[-1] + 1])
    cut = len(text)
    if len(indices) > MAX_TURNS and tokenizer.is_fast:
        _, offsets = offsets_of(text, tokenizer)
        cut = offsets[:max_tokens, 1].max()
    turns: dict[int, tuple[int, int]] = {}
    end = 0
    for i in indices:
        header = template(messages[:i], add_generation_prompt=True)
        start = len(header)
        if start >= cut:
            break
        if len(turns) == MAX_TURNS:
            raise BadRow(
                f"more than {MAX_TURNS} turns of the assistant: split it, or lower --max-tokens"
            )
        full = text if i == indices[-1] else template(messages[: i + 1])
        # a template that leaves out earlier thoughts may end a header before the last turn did
        is_appended = full.startswith(header) and start >= end
        end = end_of_last_turn(start, full, tokenizer)
        if not is_appended or not text.startswith(full[:end]):
            raise RewrittenTurns
        turns[i] = (start, end)
    return Sample(text[:end], turns)


def read_last_turn(messages: list[dict], tokenizer) -> Sample:
    """Messages that end with a turn, as a sample of this turn alone. Its text is the prompt as an
    engine reads it, followed by what the template shows of the turn. BadRow if the two do not fit
    together."""
    template = template_of(messages, tokenizer)
    prompt = template(messages[:-1], add_generation_prompt=True)
    text = template(messages)
    is_appended = text.startswith(prompt)
    if is_appended:
        start = len(prompt)
    else:
        start = start_of_last_turn(messages, prompt, text, tokenizer)
    turn = text[start : end_of_last_turn(start, text, tokenizer)]
    opens_thoughts = prompt.rstrip().endswith(THOUGHTS_OPEN)
    if opens_thoughts and is_appended and turn.startswith(THOUGHTS_OPEN):
        raise BadRow(
            f"the chat template begins a turn with {THOUGHTS_OPEN} itself: leave it out of the "
            f"content, up to {THOUGHTS_CLOSE}"
        )
    if opens_thoughts and not is_appended:
        if turn.startswith(THOUGHTS_OPEN):
            # the prompt has a line break behind <think>, and a turn without thoughts has none:
            # <think></think>
            prompt = prompt.rstrip()
            turn = turn.removeprefix(THOUGHTS_OPEN)
        else:
            # the template leaves out the thoughts of every turn, as DeepSeek-R1's does
            turn = thoughts_of(messages[-1]) + turn
    span = (len(prompt), len(prompt) + len(turn))
    return Sample(prompt + turn, {len(messages) - 1: span})


def start_of_last_turn(messages: list[dict], prompt: str, text: str, tokenizer) -> int:
    """Where the last turn begins in a text that does not begin with the turn's prompt.

    The turn begins behind its header: the generation prompt, up to <think>. The text may have the
    beginning of the header alone; then the turn begins where the text first differs from that of
    the same messages with another last turn.
    """
    template = template_of(messages, tokenizer)
    history = template(messages[:-1])
    if not prompt.startswith(history):
        raise BadRow(SHOWN_ELSEWHERE)
    header, _, _ = prompt[len(history) :].partition(THOUGHTS_OPEN)
    other_text = template([*messages[:-1], {"role": "assistant", "content": PROBE}])
    shared = text[: num_shared(text, other_text)]  # up to the turn's own words
    if not header:  # the generation prompt is empty, or begins with <think>
        return len(shared)
    place = shared.rfind(header)
    if place >= 0:
        return place + len(header)
    if shared.endswith(beginnings(header)):  # the text has a beginning of the header alone
        return len(shared)
    raise BadRow(SHOWN_ELSEWHERE)


def beginnings(text: str) -> tuple[str, ...]:
    return tuple(text[:length] for length in range(1, len(text) + 1))


def thoughts_of(message: dict) -> str:
    """The thoughts of a turn, from behind <think> to the </think> that ends them. BadRow if it has
    none."""
    if message.get("reasoning_content"):
        thoughts = str(message["reasoning_content"]).strip()
        # with the blank line before the answer, which a content that holds its thoughts has itself
        return f"{thoughts}\n{THOUGHTS_CLOSE}\n\n"
    thoughts, close, _ = text_of(message).rpartition(THOUGHTS_CLOSE)
    if not close:
        raise BadRow(
            f"a turn has no thoughts, and the chat template begins each with {THOUGHTS_OPEN}: "
            "write them as reasoning_content, or leave the turn out (`train`: false)"
        )
    return thoughts.lstrip().removeprefix(THOUGHTS_OPEN).lstrip() + close


def end_of_last_turn(start: int, text: str, tokenizer) -> int:
    """Where a text's last turn, which begins at `start`, ends: after its end token.

    Without an end token the turn ends with the text.
    """
    end_token = tokenizer.eos_token
    tail = after_last_turn(tokenizer)
    if text.endswith(tail):
        place = text.find(end_token, len(text) - len(tail))
    else:
        place = text.rfind(end_token)
    return place + len(end_token) if place >= start else len(text)


def ids_and_mask(text: str, spans: list[tuple[int, int]], tokenizer) -> tuple[list[int], list[int]]:
    """The ids of a text, and its mask: 1 for a token with a character in one of the spans.

    spans: (start, end) in characters. The text is tokenised whole: parts would have other ids
    where the tokenizer puts a space in front.
    """
    if not tokenizer.is_fast:
        return ids_and_mask_without_offsets(text, spans, tokenizer)
    ids, offsets = offsets_of(text, tokenizer)
    starts, ends = offsets.T
    mask = np.zeros(len(ids), dtype=np.int64)
    for start, end in spans:
        first = np.searchsorted(ends, start, side="right")
        stop = np.searchsorted(starts, end, side="left")
        mask[first:stop] = 1
    return ids, mask.tolist()


def ids_and_mask_without_offsets(
    text: str, spans: list[tuple[int, int]], tokenizer
) -> tuple[list[int], list[int]]:
    """`ids_and_mask` for a tokenizer that gives no offsets.

    A span begins at the first token that differs between the whole text and the text before the
    span; it ends at the first that differs from the text up to its end.
    """
    ids = encode(tokenizer, text)
    mask = [0] * len(ids)
    for start, end in spans:
        first = num_shared(ids, encode(tokenizer, text[:start]))
        stop = num_shared(ids, encode(tokenizer, text[:end]))
        mask[first:stop] = [1] * (stop - first)
    return ids, mask


def offsets_of(text: str, tokenizer) -> tuple[list[int], np.ndarray]:
    """The ids of a text, and the characters where each token starts and ends [L, 2] int64."""
    with breakdowns_as_bad_rows():
        tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = np.array(tokens["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    return tokens["input_ids"], offsets

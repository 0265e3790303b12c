"""Supervised data as token ids, masks and pictures; the formats of rows are in
common/data/formats.py.

Trained on is what the assistant says and the token that ends its turn; never headers, other roles,
pictures, padding.
"""

import gc
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from jinja2 import TemplateError

from common.data.formats import Conversation, pictured, read_conversation, text_of, unread_keys
from common.data.media import count_tokens, open_media
from common.data.protocols import native_calls, spacing
from common.data.render import (
    after_last_turn,
    as_text,
    breakdowns_as_bad_rows,
    default_system,
    encode,
    end_of_text,
    without_spaces,
)
from common.data.rows import RowFiles
from common.data.scan import Fingerprint, Found, KnownTokens, once_per_machine
from common.distributed import World
from common.files import shorten
from common.pictures import BadRow, Media
from common.progress import say
from common.torch_repair import transformers
from common.types import Episode
from common.vision import Vision

# of the assistant: the template renders a conversation up to each of them, which takes their square
MAX_TURNS = 500
NAMED_KEYS = 10  # of messages, that are not read
LONG = 2**20  # characters of a conversation of which the tokenizer is tried out at the start


def read_turns(
    messages: list[dict], tokenizer, max_tokens: int
) -> tuple[str, dict[int, tuple[int, int]]]:
    """The text of a conversation up to the end of the assistant's last turn, and its turns: number
    -> (start, end).

    Between start and end stand the characters that it says, its end token included. Of very many
    turns those are left out that begin behind the cut at `max_tokens`. BadRow if the template
    changes earlier turns.
    """
    numbers = [
        turn for turn, message in enumerate(messages) if turn and message["role"] == "assistant"
    ]
    template = partial(
        tokenizer.apply_chat_template, tools=messages[0].get("tools"), tokenize=False
    )
    end_token, tail = tokenizer.eos_token, after_last_turn(tokenizer)
    text = template(messages[: numbers[-1] + 1])
    cut = len(text)
    if len(numbers) > MAX_TURNS and tokenizer.is_fast:
        cut = offsets_of(text, tokenizer)[1][:max_tokens, 1].max()
    turns, end = {}, 0
    for turn in numbers:
        header = template(messages[:turn], add_generation_prompt=True)
        if len(header) >= cut:
            break
        if len(turns) == MAX_TURNS:
            raise BadRow(
                f"more than {MAX_TURNS} turns of the assistant: split it, or lower --max-tokens"
            )
        full = text if turn == numbers[-1] else template(messages[: turn + 1])
        rewritten = not full.startswith(header) or len(header) < end
        end = (
            full.find(end_token, len(full) - len(tail))
            if full.endswith(tail)
            else full.rfind(end_token)
        )
        end = end + len(end_token) if end >= len(header) else len(full)
        if rewritten or not text.startswith(full[:end]):
            raise BadRow(
                "the chat template rewrites earlier turns: masks cannot be derived turn by turn"
            )
        turns[turn] = len(header), end
    return text[:end], turns


def tokens_of(
    text: str, stretches: list[tuple[int, int]], tokenizer
) -> tuple[list[int], list[int]]:
    """The ids of a text, and which of them hold a character of one of the stretches (start, end):
    1, else 0.

    The text is tokenised whole: a piece by itself would have other ids where the tokenizer puts a
    space before it.
    """
    # knows no offsets: the tokens before a character are those of the text before it
    if not tokenizer.is_fast:
        ids = encode(tokenizer, text)
        mask = [0] * len(ids)
        for start, end in stretches:
            first = num_shared(ids, encode(tokenizer, text[:start]))
            last = num_shared(ids, encode(tokenizer, text[:end]))
            mask[first:last] = [1] * (last - first)
        return ids, mask
    ids, offsets = offsets_of(text, tokenizer)
    starts, ends = offsets.T
    mask = np.zeros(len(ids), dtype=np.int64)
    for start, end in stretches:
        first = np.searchsorted(ends, start, side="right")
        last = np.searchsorted(starts, end, side="left")
        mask[first:last] = 1
    return ids, mask.tolist()


def num_shared(ids: list[int], others: list[int]) -> int:
    """How many tokens both begin with."""
    return next(
        (i for i, (a, b) in enumerate(zip(ids, others)) if a != b), min(len(ids), len(others))
    )


def offsets_of(text: str, tokenizer) -> tuple[list[int], np.ndarray]:
    """The ids of a text, and where in it each token starts and ends [L, 2]."""
    with breakdowns_as_bad_rows():
        tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return tokens["input_ids"], np.array(tokens["offset_mapping"], dtype=np.int64).reshape(-1, 2)


def conversation_episode(
    conversation: Conversation,
    media: list[Media],
    tokenizer,
    vision: Vision | None,
    index: int,
    max_tokens: int,
) -> Episode:
    """Token ids and loss mask, cut at `max_tokens` (before a picture that does not fit). BadRow:
    nothing to learn.

    What stands before the first trained token is the prompt.
    """
    text, turns = read_turns(conversation.messages, tokenizer, max_tokens)
    stretches = [stretch for turn, stretch in turns.items() if conversation.train[turn]]
    ids, mask = tokens_of(text, stretches, tokenizer)
    end = max_tokens
    if vision:
        placeholders = vision.placeholders.values()
        # the others are of later turns
        media = media[: sum(token in placeholders for token in ids)]
        shown, expanded_mask = iter(media), []
        expanded_ids = vision.expand(ids, media)
        for token, trained in zip(ids, mask):
            repeats = next(shown).num_tokens if token in placeholders else 1
            expanded_mask += [int(trained and token not in vision.forbidden_ids)] * repeats
        ids, mask = expanded_ids, expanded_mask
        spans = [
            (place, place + m.num_tokens) for place, m in zip(vision.places(ids, media), media)
        ]
        end = min([end, *(start for start, stop in spans if stop > max_tokens)])
        media = [m for m, (_, stop) in zip(media, spans) if stop <= end]
    ids, mask = ids[:end], mask[:end]
    if 1 not in mask:
        raise BadRow(f"nothing to learn in its first {max_tokens} tokens")
    first = mask.index(1)
    return Episode(
        index,
        0,
        ids[:first],
        ids[first:],
        mask[first:],
        [0.0] * (len(ids) - first),
        "stop",
        media=media,
    )


class Conversations:
    """Rows of .parquet, .jsonl and .json files (a list of rows); they stay packed until they are
    asked for.

    ValueError at start-up for files, rows and pictures that cannot be used, with file, row and
    reason. With a `world`, in which all ranks come here, the first rank of each machine looks at
    the rows for the others.
    """

    def __init__(
        self,
        paths: str,
        flag: str,
        tokenizer: "transformers.PreTrainedTokenizerBase",
        *,
        max_tokens: int,
        vision: Vision | None = None,
        media_root: Path | None = None,
        bad_rows: Literal["error", "drop"] = "error",
        max_rows: int | None = None,
        world: World | None = None,
        num_embeddings: int | None = None,
    ):
        self.known = KnownTokens(tokenizer, num_embeddings)
        self.tokenizer, self.max_tokens, self.vision, self.media_root = (
            tokenizer,
            max_tokens,
            vision,
            media_root,
        )
        self.native = partial(native_calls, tokenizer, str(tokenizer.chat_template))
        self.system = partial(default_system, tokenizer)
        self.files = RowFiles(
            paths, flag, max_rows, once=partial(once_per_machine, world, alike=False)
        )
        self.placeholders = (
            tokenizer.convert_ids_to_tokens([*vision.placeholders.values()]) if vision else []
        )
        self.spaced = spacing(tokenizer, self.placeholders)
        found = once_per_machine(world, self._scan)
        self.files.refuse(found.bad, "unusable rows", bad_rows == "drop")
        if not found.costs:
            raise ValueError(f"{flag}: no usable row in {paths}")
        for what, count in found.told.items():
            say(f"{flag}: {count} rows {what}")
        self.fingerprint = found.fingerprint
        self.positions = np.array(list(found.costs), dtype=np.int64)
        self.costs = np.array(list(found.costs.values()))

    def _scan(self) -> Found:
        # millions of rows that come and go would make the collector visit all of torch, over and
        # over
        gc.freeze()
        found, progress, fingerprint = Found(), self.files.progress(), Fingerprint()
        unread: Counter[str] = Counter()
        for i, record in enumerate(self.files.records()):
            progress.add()
            fingerprint.add(record)
            try:
                conversation, spelled = self._read(record)
                pictures = self._each_picture(count_tokens, i, conversation)
                self._check(conversation, pictures)
            except BadRow as error:
                found.bad[i] = str(error)
                continue
            unread.update(unread_keys(record))
            found.costs[i] = (
                sum(pictures) + sum(len(text_of(message)) for message in conversation.messages) / 4
            )
            if conversation.last_two_turns:
                found.told[
                    "are Pixel Reasoner's: trained on are their last two turns, unless "
                    "`train` is true"
                ] += 1
            found.look_at(
                "".join(map(text_of, conversation.messages)), pictures, spelled, self.tokenizer
            )
        for key, count in unread.most_common(NAMED_KEYS):
            found.told[
                f"have messages with the key {shorten(repr(key), 80)}, which is not read"
            ] = count
        if len(unread) > NAMED_KEYS:
            found.told["have messages with further keys that are not read"] = sum(unread.values())
        found.fingerprint = str(fingerprint)
        return found

    def _read(self, record: dict | str) -> tuple[Conversation, bool]:
        """A row, and whether it spells a control token."""
        if isinstance(record, str):
            raise BadRow(record)
        try:
            conversation = read_conversation(record, self.native, self.system)
        except (AttributeError, LookupError, RecursionError, TypeError) as error:
            raise BadRow(f"not a conversation: {type(error).__name__}: {error}") from error
        if conversation.pictures and not self.vision:
            raise BadRow("has pictures, and the model reads text alone")
        spelled = [
            mark
            for mark in self.placeholders
            if any(mark in text_of(m) for m in conversation.messages)
        ]
        if spelled:
            raise BadRow(
                f"spells {spelled[0]}, which stands for a picture: <image> and <video> are "
                "its marks"
            )
        messages = as_text(conversation.messages, self.spaced)
        return replace(conversation, messages=messages), messages != conversation.messages

    def _each_picture(self, function: Callable, index: int, conversation: Conversation) -> list:
        """`open_media` or `count_tokens` of the pictures of row `index`."""
        beside = self.files.folder(index)
        return [
            function(p, self.media_root, self.vision.limits, beside=beside)
            for p in conversation.pictures
        ]

    def _check(self, conversation: Conversation, picture_tokens: list[int]) -> None:
        """BadRow if the template loses a message, or if the cut at `max_tokens` leaves nothing to
        learn."""
        messages, first = conversation.messages, conversation.train.index(True)
        render = partial(
            self.tokenizer.apply_chat_template, tools=messages[0].get("tools"), tokenize=False
        )
        try:
            whole = render(messages)
            text, turns = read_turns(messages, self.tokenizer, self.max_tokens)
            whole.encode()
        except BadRow:
            raise
        except (TemplateError, TypeError, ValueError) as error:
            # half a surrogate pair, a tool call without a name
            raise BadRow(f"cannot be rendered: {error}") from error
        bare = [{key: value for key, value in m.items() if key != "tool_calls"} for m in messages]
        # one that refuses replies without calls does look at them
        with suppress(TemplateError, TypeError):
            if any(m.get("tool_calls") for m in messages) and render(bare) == whole:
                raise BadRow(
                    "the chat template leaves out tool_calls: write them as <tool_call> into "
                    "the contents"
                )
        flat = without_spaces(whole)  # a template may set a turn's thoughts apart
        thoughts = [
            without_spaces(str(m["reasoning_content"]))
            for m in messages
            if m.get("reasoning_content")
        ]
        if thoughts and not any(thought in flat for thought in thoughts):
            raise BadRow(
                "the chat template leaves out reasoning_content: write it as <think> into the "
                "contents"
            )
        place = 0  # one behind the other: the text of a message may stand in another one, too
        for message in messages:
            if pictured(message):
                continue
            place = end_of_text(text_of(message), flat, place)
            if place < 0:
                raise BadRow(
                    f"the chat template leaves out a message of role {message['role']!r}, or "
                    "one before it"
                )
        self.known.check(text)
        if len(whole) > LONG:
            encode(self.tokenizer, text)
        if first not in turns:
            raise BadRow(f"nothing to learn in its first {self.max_tokens} tokens")
        header = text[: turns[first][0]]
        # a token has at least a byte
        if len(header.encode()) + sum(picture_tokens) >= self.max_tokens:
            before = picture_tokens[: sum(map(pictured, messages[:first]))]
            tokens = len(encode(self.tokenizer, header)) + sum(before) - len(before)
            if tokens >= self.max_tokens:
                raise BadRow(
                    f"nothing to learn in its first {self.max_tokens} tokens: {tokens} come before"
                )

    def __len__(self) -> int:
        return len(self.positions)

    def episode(self, n: int) -> Episode | None:
        """Row n as an episode; None, after a warning, for one whose pictures turn out to be
        unreadable."""
        i = int(self.positions[n])
        try:
            conversation, _ = self._read(self.files.row(i))
            media = self._each_picture(open_media, i, conversation)
            return conversation_episode(
                conversation, media, self.tokenizer, self.vision, i, self.max_tokens
            )
        except (BadRow, TemplateError) as error:
            print(
                f"warning: {self.files.flag}: {self.files.place(i)}: {error}; left out", flush=True
            )
            return None

"""Supervised data as token ids, masks and pictures; common/data/formats.py reads the rows,
common/data/turns.py finds the assistant's turns in their text.

Only the assistant's words and the token that ends its turn are trained on: never headers, other
roles, pictures or padding.
"""

import gc
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from jinja2 import TemplateError

from common.data.formats import (
    Conversation,
    is_silent,
    num_pictures,
    read_conversation,
    text_of,
    unread_keys,
)
from common.data.media import count_tokens, open_media
from common.data.protocols import native_calls, spacing
from common.data.render import (
    default_system,
    encode,
    end_of_text,
    with_control_tokens_spaced,
    without_spaces,
)
from common.data.rows import RowFiles
from common.data.scan import (
    Fingerprint,
    KnownTokens,
    ScanReport,
    SplitRows,
    max_num_tokens,
    once_per_machine,
)
from common.data.turns import THOUGHTS_OPEN, Sample, ids_and_mask, read_samples
from common.distributed import World
from common.files import shorten
from common.pictures import BadRow, Media
from common.progress import say
from common.torch_repair import transformers
from common.types import Episode
from common.vision import UNREAD_PICTURES, Vision

MAX_NOTED_KEYS = 10  # keys of messages that are not read
LONG = 2**20  # characters: the scan tokenizes longer texts, in case the tokenizer breaks down


def conversation_episodes(
    conversation: Conversation,
    media: list[Media],
    tokenizer,
    vision: Vision | None,
    index: int,
    max_tokens: int,
) -> list[Episode]:
    """The samples of a conversation: one, or, if the chat template rewrites earlier turns, one for
    each turn that is trained on. Those with nothing to learn within `max_tokens` are left out;
    BadRow if none remains."""
    messages = conversation.messages
    samples, _ = read_samples(messages, conversation.train, tokenizer, max_tokens)
    episodes: list[Episode] = []
    for sample in samples:
        spans = [span for i, span in sample.turns.items() if conversation.train[i]]
        ids, mask = ids_and_mask(sample.text, spans, tokenizer)
        media_of_sample = media[: sample.num_pictures(messages)]  # the others are of later turns
        episode = cut_episode(ids, mask, media_of_sample, vision, max_tokens)
        if episode is not None:
            episodes.append(replace(episode, prompt_index=index, sample_index=len(episodes)))
    if not episodes:
        raise BadRow(f"nothing to learn in its first {max_tokens} tokens")
    return episodes


def cut_episode(
    ids: list[int], mask: list[int], media: list[Media], vision: Vision | None, max_tokens: int
) -> Episode | None:
    """An episode that is cut at `max_tokens`, or before a picture that does not fit; None if
    nothing of it is trained on.

    The tokens before the first trained one are its prompt. ids: with one placeholder for each of
    `media`.
    """
    cut = max_tokens
    if vision:
        ids, mask = expand_pictures(ids, mask, media, vision)
        spans = vision.spans(ids, media)
        cut = cut_place(spans, max_tokens)
        media = [m for span, m in zip(spans, media) if span.start < cut]
    ids = ids[:cut]
    mask = mask[:cut]
    if 1 not in mask:
        return None
    prompt_length = mask.index(1)
    return Episode(
        prompt_index=0,
        sample_index=0,
        prompt_ids=ids[:prompt_length],
        response_ids=ids[prompt_length:],
        loss_mask=mask[prompt_length:],
        logprobs=[0.0] * (len(ids) - prompt_length),
        finish_reason="stop",
        media=media,
    )


def cut_place(spans: list[range], max_tokens: int) -> int:
    """Where to cut: at `max_tokens`, or before the first picture that goes beyond it."""
    for span in spans:
        if span.stop > max_tokens:
            return min(span.start, max_tokens)
    return max_tokens


def expand_pictures(
    ids: list[int], mask: list[int], media: list[Media], vision: Vision
) -> tuple[list[int], list[int]]:
    """Ids and mask in which each picture has all of its tokens, which are never trained on."""
    expanded_ids = vision.expand(ids, media)  # BadRow if the placeholders are not those of `media`
    placeholders = vision.placeholders.values()
    expanded_mask: list[int] = []
    remaining = iter(media)
    for token, trained in zip(ids, mask):
        if token in placeholders:
            expanded_mask += [0] * len(vision.expansion(next(remaining)))
        else:
            expanded_mask.append(int(trained and token not in vision.forbidden_ids))
    return expanded_ids, expanded_mask


def note_unread_keys(unread: Counter[tuple[str, ...]], notes: Counter[str]) -> None:
    """Add to `notes` how many rows have messages with keys that are not read.

    unread: such keys of a row -> number of rows.
    """
    num_rows: Counter[str] = Counter()
    for keys, count in unread.items():
        for key in keys:
            num_rows[key] += count
    noted_keys = [key for key, _ in num_rows.most_common(MAX_NOTED_KEYS)]
    for key in noted_keys:
        shown_key = shorten(repr(key), 80)
        notes[f"have messages with the key {shown_key}, which is not read"] = num_rows[key]
    for keys, count in unread.items():
        if not set(keys) <= set(noted_keys):
            notes["have messages with further keys that are not read"] += count


class Conversations:
    """Rows of .parquet, .jsonl and .json files (a list of rows), kept in Arrow until they are used.

    Files, rows and pictures that cannot be used raise a ValueError here, at start-up, with file,
    row and reason (FileNotFoundError for a missing file); with bad_rows="drop" such rows are left
    out. With a `world` all ranks call this, and the first rank of each machine scans the rows for
    the others.
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
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.vision = vision
        self.media_root = media_root
        self.known_tokens = KnownTokens(tokenizer, num_embeddings)
        self.placeholders: list[str] = []
        if vision:
            self.placeholders = tokenizer.convert_ids_to_tokens([*vision.placeholders.values()])
        self.space_control_tokens = spacing(tokenizer, self.placeholders)
        # alike=False: the paths of the hub's files differ from machine to machine
        self.files = RowFiles(
            paths, flag, max_rows, once=partial(once_per_machine, world, alike=False)
        )
        report = once_per_machine(world, self._scan)
        self.files.refuse(report.bad_rows, "unusable rows", drop=bad_rows == "drop")
        usable = list(report.costs)  # every row that is not bad has a cost
        if not usable:
            raise ValueError(f"{flag}: no usable row in {paths}")
        for note, count in report.notes.items():
            say(f"{flag}: {count} rows {note}")
        self.fingerprint = report.fingerprint
        self.usable = np.array(usable, dtype=np.int64)  # the index of each usable row in the files
        self.costs = np.array(list(report.costs.values()))

    def _scan(self) -> ScanReport:
        # millions of short-lived rows would make the collector visit all of torch, over and over
        gc.freeze()
        report = ScanReport()
        progress = self.files.progress()
        fingerprint = Fingerprint()
        unread: Counter[tuple[str, ...]] = Counter()  # keys that are not read -> number of rows
        split_rows = SplitRows()
        for i, record in enumerate(self.files.records()):
            progress.add()
            fingerprint.add(record)
            try:
                conversation, has_control_tokens = self._read(record)
                picture_tokens = self._picture_tokens(i, conversation)
                split_lengths = self._check_rendering(conversation, picture_tokens)
            except BadRow as error:
                report.bad_rows[i] = str(error)
                continue
            unread[tuple(unread_keys(record))] += 1
            texts = [text_of(message) for message in conversation.messages]
            num_characters = sum(len(text) for text in texts)
            # a token has about four characters
            report.costs[i] = sum(picture_tokens) + num_characters / 4
            if len(split_lengths) > 1:
                split_rows.add(split_lengths)
                # each sample repeats the turns before it
                report.costs[i] *= sum(split_lengths) / split_lengths[-1]
            if conversation.last_two_turns:
                note = (
                    "are Pixel Reasoner's: only their last two turns are trained on, unless "
                    "`train` is true"
                )
                report.notes[note] += 1
            turns = zip(conversation.messages, conversation.train)
            if any(is_trained and is_silent(message) for message, is_trained in turns):
                report.notes["teach to say nothing: a turn that is trained on has no text"] += 1
            report.note_misreadings(
                "".join(texts), picture_tokens, has_control_tokens, self.tokenizer
            )
        if split_rows.num_rows > 0:
            report.notes[str(split_rows)] = split_rows.num_rows
        note_unread_keys(unread, report.notes)
        report.fingerprint = str(fingerprint)
        return report

    def _read(self, record: dict | str) -> tuple[Conversation, bool]:
        """A row as a conversation, and whether it spells a control token. BadRow if unusable.

        record: a text says why the row cannot be read.
        """
        if isinstance(record, str):
            raise BadRow(record)
        try:
            # both render the template: they are called only for rows with tools or calls
            conversation = read_conversation(
                record,
                is_native=lambda: has_own_calls(self.tokenizer),
                system_text=lambda: default_system(self.tokenizer),
            )
        except (AttributeError, LookupError, RecursionError, TypeError) as error:
            raise BadRow(f"not a conversation: {type(error).__name__}: {error}") from error
        if conversation.pictures and not self.vision:
            raise BadRow(UNREAD_PICTURES)
        for placeholder in self.placeholders:
            if any(placeholder in text_of(message) for message in conversation.messages):
                raise BadRow(
                    f"spells {placeholder}, which stands for a picture: write <image> or <video>"
                )
        messages = with_control_tokens_spaced(conversation.messages, self.space_control_tokens)
        return replace(conversation, messages=messages), messages != conversation.messages

    def _picture_tokens(self, index: int, conversation: Conversation) -> list[int]:
        beside = self.files.folder(index)
        return [
            count_tokens(picture, self.media_root, self.vision, beside=beside)
            for picture in conversation.pictures
        ]

    def _media(self, index: int, conversation: Conversation) -> list[Media]:
        beside = self.files.folder(index)
        return [
            open_media(picture, self.media_root, self.vision.limits, beside=beside)
            for picture in conversation.pictures
        ]

    def _check_rendering(self, conversation: Conversation, picture_tokens: list[int]) -> list[int]:
        """BadRow if the template loses a message, or the cut leaves nothing to learn.

        Returns the lengths of the samples of a row that is trained turn by turn, in tokens, after
        the cut; [] for other rows.
        """
        messages = up_to_last_turn(conversation.messages)
        try:
            rendered = self._render(messages)
            samples, is_split = read_samples(
                messages, conversation.train, self.tokenizer, self.max_tokens
            )
            texts = [sample.text for sample in samples] if is_split else [rendered]
            for text in texts:
                text.encode()  # a ValueError for half a surrogate pair
        except BadRow:  # a ValueError, too
            raise
        except (RecursionError, TemplateError, TypeError, ValueError) as error:
            # for example, a tool call without a name
            raise BadRow(f"cannot be rendered: {error}") from error
        self._check_tool_calls(messages, rendered)
        if is_split:
            return self._check_split(messages, samples, picture_tokens)
        flat = without_spaces(rendered)
        check_thoughts(messages, flat)
        check_texts(messages, flat)
        (sample,) = samples
        self.known_tokens.check(sample.text)
        if len(rendered) > LONG:
            encode(self.tokenizer, sample.text)  # BadRow if the tokenizer breaks down
        first_trained = conversation.train.index(True)
        if first_trained not in sample.turns:
            raise BadRow(f"nothing to learn in its first {self.max_tokens} tokens")
        start, _ = sample.turns[first_trained]
        num_before = sum(num_pictures(message) for message in messages[:first_trained])
        self._check_header(sample.text[:start], picture_tokens[:num_before])
        return []

    def _check_split(
        self, messages: list[dict], samples: list[Sample], picture_tokens: list[int]
    ) -> list[int]:
        """As `_check_rendering`, for the samples of a row that is trained turn by turn."""
        lengths: list[int] = []
        too_long: BadRow | None = None
        for sample in samples:
            (last,) = sample.turns
            start, end = sample.turns[last]
            prompt = sample.text[:start]
            check_prompt(messages[:last], without_spaces(prompt))
            # a prompt may open the thoughts that the message's text begins with
            turn_start = len(prompt.rstrip().removesuffix(THOUGHTS_OPEN))
            turn = without_spaces(sample.text[turn_start:end])
            check_thoughts([messages[last]], turn)
            check_texts([messages[last]], turn)
            self.known_tokens.check(sample.text)
            num_before = sum(num_pictures(message) for message in messages[:last])
            tokens_before = picture_tokens[:num_before]
            try:
                self._check_header(prompt, tokens_before)
            except BadRow as error:
                too_long = error
                continue
            length = self._num_tokens(sample.text, tokens_before)
            lengths.append(min(length, self.max_tokens))
        if too_long and not lengths:
            raise too_long
        return lengths

    def _render(self, messages: list[dict]) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=messages[0].get("tools"), tokenize=False
        )

    def _check_tool_calls(self, messages: list[dict], rendered: str) -> None:
        """BadRow if the template leaves out all tool_calls."""
        if not any(message.get("tool_calls") for message in messages):
            return
        without_calls = []
        for message in messages:
            message = dict(message)
            message.pop("tool_calls", None)
            without_calls.append(message)
        try:
            is_same = self._render(without_calls) == rendered
        except (TemplateError, TypeError):
            return  # the template refuses the messages without their calls, so it reads calls
        if is_same:
            raise BadRow(
                "the chat template leaves out tool_calls: write them as <tool_call> into the "
                "contents"
            )

    def _check_header(self, header: str, picture_tokens: list[int]) -> None:
        """BadRow if the text before the first trained turn takes all of `max_tokens`.

        picture_tokens: of the pictures in the header.
        """
        space = 1  # that a tokenizer may put in front
        if space + max_num_tokens(header) + sum(picture_tokens) < self.max_tokens:
            return  # without tokenizing it
        num_tokens = self._num_tokens(header, picture_tokens)
        if num_tokens >= self.max_tokens:
            raise BadRow(
                f"nothing to learn in its first {self.max_tokens} tokens: {num_tokens} come before"
            )

    def _num_tokens(self, text: str, picture_tokens: list[int]) -> int:
        """Tokens of a text with its pictures, each of which has one placeholder in it."""
        num_placeholders = len(picture_tokens)
        return len(encode(self.tokenizer, text)) + sum(picture_tokens) - num_placeholders

    def __len__(self) -> int:
        return len(self.usable)

    def episodes(self, n: int) -> list[Episode]:
        """The samples of usable row n, see `conversation_episodes`; [] after a warning if it cannot
        be used now, as when a picture is gone."""
        i = int(self.usable[n])
        try:
            conversation, _ = self._read(self.files.row(i))
            media = self._media(i, conversation)
            return conversation_episodes(
                conversation, media, self.tokenizer, self.vision, i, self.max_tokens
            )
        except (BadRow, TemplateError) as error:
            place = self.files.place(i)
            print(f"warning: {self.files.flag}: {place}: {error}; left out", flush=True)
            return []


def has_own_calls(tokenizer) -> bool:
    """Whether the chat template offers and calls tools in a way of its own, even if in one that
    nothing here reads."""
    chat_template = str(tokenizer.chat_template)
    try:
        return native_calls(tokenizer, chat_template) is not None
    except ValueError:
        return re.search(r"\btools\b", chat_template) is not None


def up_to_last_turn(messages: list[dict]) -> list[dict]:
    """The messages up to the assistant's last turn. What follows is not trained on, and may make a
    template drop the thoughts of that turn."""
    end = len(messages)
    while messages[end - 1]["role"] != "assistant":
        end -= 1
    return messages[:end]


def check_thoughts(messages: list[dict], flat: str) -> None:
    """BadRow if the template leaves out all thoughts that have a key of their own. flat: the text
    without white space."""
    for key, other_key in (("reasoning_content", "thinking"), ("thinking", "reasoning_content")):
        thoughts = []
        for message in messages:
            if message.get(key):
                thoughts.append(without_spaces(str(message[key])))
        if thoughts and not any(thought in flat for thought in thoughts):
            raise BadRow(
                f"the chat template leaves out {key}: write it as <think> into the contents, or "
                f"call it {other_key} if the template reads that"
            )


def check_prompt(messages: list[dict], flat: str) -> None:
    """BadRow if the template leaves out a text that a turn answers to. What the assistant has said
    before may be left out, and a system message may stand anywhere."""
    systems = [message for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] not in ("system", "assistant")]
    for system in systems:
        check_texts([system], flat)
    check_texts(others, flat)


def check_texts(messages: list[dict], flat: str) -> None:
    """BadRow if the template leaves out the text of a message without pictures. flat: the rendering
    without white space."""
    place = 0  # searched in order: a message's text may also be part of an earlier one
    for message in messages:
        if num_pictures(message):
            continue
        place = end_of_text(text_of(message), flat, place)
        if place < 0:
            raise BadRow(
                f"the chat template leaves out a message of role {message['role']!r}, or "
                "one before it"
            )

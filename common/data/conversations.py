"""Supervised data as token ids, masks and pictures; the formats of rows are in common/data/formats.py.

Trained on is what the assistant says and the token that ends its turn; never headers, other roles, pictures, padding.
"""

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from jinja2 import TemplateError

from common.data.formats import Conversation, Rule, pictured, read_conversation, text_of
from common.data.media import count_tokens, open_media
from common.data.render import after_last_turn, as_text
from common.data.rows import RowFiles
from common.data.scan import Found, once_per_machine
from common.data.templates import native_calls
from common.distributed import World
from common.episodes import Episode
from common.pictures import BadRow, Media
from common.tools.turns import spacing
from common.torch_repair import transformers
from common.vision import Vision


def turn_texts(messages: list[dict], tokenizer) -> Iterator[tuple[int, str, str]]:
    """(its number, what comes before it, what it says) of each turn of the assistant. BadRow if it changes others."""
    rendered, end_token, tail = "", tokenizer.eos_token, after_last_turn(tokenizer)
    template = partial(tokenizer.apply_chat_template, tools=messages[0].get("tools"), tokenize=False)
    for turn in (turn for turn, message in enumerate(messages) if turn and message["role"] == "assistant"):
        header, full = template(messages[:turn], add_generation_prompt=True), template(messages[: turn + 1])
        if not header.startswith(rendered) or not full.startswith(header):
            raise BadRow("the chat template rewrites earlier turns: masks cannot be derived turn by turn")
        end = full.find(end_token, len(full) - len(tail)) if full.endswith(tail) else full.rfind(end_token)
        end = end + len(end_token) if end >= len(header) else len(full)
        yield turn, header[len(rendered) :], full[len(header) : end]
        rendered = full[:end]


def conversation_episode(
    conversation: Conversation, media: list[Media], tokenizer, vision: Vision | None, index: int, max_tokens: int
) -> Episode:
    """Token ids and loss mask, cut at `max_tokens` (before a picture that does not fit). BadRow: nothing to learn.

    What stands before the first trained token is the prompt. Each piece is tokenised by itself, as at inference, where
    a prompt is complete before the first token is sampled.
    """
    ids, mask, rest = [], [], iter(media)
    forbidden = vision.forbidden_ids if vision else ()
    for turn, before, said in turn_texts(conversation.messages, tokenizer):
        for text, trained in ((before, False), (said, conversation.train[turn])):
            piece = tokenizer.encode(text, add_special_tokens=False)
            if vision:
                here = sum(token in vision.placeholders.values() for token in piece)
                piece = vision.expand(piece, list(islice(rest, here)))
            ids += piece
            mask += [int(trained and token not in forbidden) for token in piece]
    end = max_tokens
    if vision:
        media = media[: len(media) - len(list(rest))]  # those of later turns
        spans = [(place, place + m.num_tokens) for place, m in zip(vision.places(ids, media), media)]
        end = min([end, *(start for start, stop in spans if stop > max_tokens)])
        media = [m for m, (_, stop) in zip(media, spans) if stop <= end]
    ids, mask = ids[:end], mask[:end]
    if 1 not in mask:
        raise BadRow(f"nothing to learn in its first {max_tokens} tokens")
    first = mask.index(1)
    return Episode(index, 0, ids[:first], ids[first:], mask[first:], [0.0] * (len(ids) - first), "stop", media=media)


class Conversations:
    """Rows of .parquet, .jsonl and .json files (a list of rows); they stay packed until they are asked for.

    ValueError at start-up for files, rows and pictures that cannot be used, with file, row and reason.
    With a `world`, in which all ranks come here, the first rank of each machine looks at the rows for the others.
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
        rule: Rule = "auto",
        mask_failed_calls: bool = False,
        bad_rows: Literal["error", "drop"] = "error",
        max_rows: int | None = None,
        notice: Callable[[str], None] = print,
        world: World | None = None,
    ):
        self.tokenizer, self.max_tokens, self.vision, self.media_root = tokenizer, max_tokens, vision, media_root
        self.rule, self.mask_failed_calls = rule, mask_failed_calls
        self.native = partial(native_calls, tokenizer, str(tokenizer.chat_template))
        self.files = RowFiles(paths, flag, max_rows, once=partial(once_per_machine, world, alike=False))
        self.placeholders = tokenizer.convert_ids_to_tokens([*vision.placeholders.values()]) if vision else []
        self.spaced = spacing(tokenizer, self.placeholders)
        found = once_per_machine(world, self._scan)
        self.files.refuse(found.bad, "unusable rows", bad_rows == "drop", notice)
        if not found.costs:
            raise ValueError(f"{flag}: no usable row in {paths}")
        for what, count in found.told.items():
            notice(f"{flag}: {count} rows {what}")
        self.positions = np.array(list(found.costs), dtype=np.int64)
        self.costs = np.array(list(found.costs.values()))

    def _scan(self) -> Found:
        gc.freeze()  # millions of rows that come and go would make the collector visit all of torch, over and over
        found, progress = Found(), self.files.progress()
        for i, record in enumerate(self.files.records()):
            progress.add()
            try:
                conversation, spelled = self._read(record)
                pictures = [count_tokens(p, self.media_root, self.vision.limits) for p in conversation.pictures]
                self._check(conversation, pictures)
            except BadRow as error:
                found.bad[i] = str(error)
                continue
            found.costs[i] = sum(pictures) + sum(len(text_of(message)) for message in conversation.messages) / 4
            if self.rule == "auto" and conversation.rule == "last-two-turns":
                found.told["are Pixel Reasoner's: trained on are their last two turns (--mask)"] += 1
            found.look_at("".join(map(text_of, conversation.messages)), pictures, spelled, self.tokenizer)
        return found

    def _read(self, record: dict | str) -> tuple[Conversation, bool]:
        """A row, and whether it spells a control token."""
        if isinstance(record, str):
            raise BadRow(record)
        try:
            conversation = read_conversation(record, self.rule, self.mask_failed_calls, self.native)
        except (AttributeError, LookupError, RecursionError, TypeError) as error:
            raise BadRow(f"not a conversation: {type(error).__name__}: {error}") from error
        if conversation.pictures and not self.vision:
            raise BadRow("has pictures, and the model reads text alone")
        spelled = [mark for mark in self.placeholders if any(mark in text_of(m) for m in conversation.messages)]
        if spelled:
            raise BadRow(f"spells {spelled[0]}, which stands for a picture: <image> and <video> are its marks")
        messages = as_text(conversation.messages, self.spaced)
        return replace(conversation, messages=messages), messages != conversation.messages

    def _check(self, conversation: Conversation, picture_tokens: list[int]) -> None:
        """BadRow if the template loses a message, or if the cut at `max_tokens` leaves nothing to learn."""
        messages, first = conversation.messages, conversation.train.index(True)
        render = partial(self.tokenizer.apply_chat_template, tools=messages[0].get("tools"), tokenize=False)
        try:
            whole, turns = render(messages), [*turn_texts(messages, self.tokenizer)]
            whole.encode()
        except (TemplateError, TypeError, ValueError) as error:  # half a surrogate pair, a tool call without a name
            raise BadRow(f"cannot be rendered: {error}") from error
        bare = [{key: value for key, value in m.items() if key != "tool_calls"} for m in messages]
        with suppress(TemplateError, TypeError):  # one that refuses replies without calls does look at them
            if any(m.get("tool_calls") for m in messages) and render(bare) == whole:
                raise BadRow("the chat template leaves out tool_calls: write them as <tool_call> into the contents")
        flat = "".join(whole.split())  # a template may set a turn's thoughts apart
        thoughts = ["".join(str(m["reasoning_content"]).split()) for m in messages if m.get("reasoning_content")]
        if thoughts and not any(thought in flat for thought in thoughts):
            raise BadRow("the chat template leaves out reasoning_content: write it as <think> into the contents")
        place = 0  # one behind the other: the text of a message may stand in another one, too
        for message in (message for message in messages if not pictured(message)):
            quoted = json.dumps(text_of(message), ensure_ascii=False)  # as Llama-3's template has what tools return
            forms = ("".join(form.split()) for form in (text_of(message), quoted))
            ends = [start + len(form) for form in forms if (start := flat.find(form, place)) >= 0]
            if not ends:
                raise BadRow(f"the chat template leaves out a message of role {message['role']!r}, or one before it")
            place = min(ends)
        header = "".join(before + said * (turn < first) for turn, before, said in turns if turn <= first)
        if len(header.encode()) + sum(picture_tokens) >= self.max_tokens:  # a token has at least a byte
            before = picture_tokens[: sum(map(pictured, messages[:first]))]
            tokens = len(self.tokenizer.encode(header, add_special_tokens=False)) + sum(before) - len(before)
            if tokens >= self.max_tokens:
                raise BadRow(f"nothing to learn in its first {self.max_tokens} tokens: {tokens} come before")

    def __len__(self) -> int:
        return len(self.positions)

    def episode(self, n: int) -> Episode | None:
        """Row n as an episode; None, after a warning, for one whose pictures turn out to be unreadable."""
        i = int(self.positions[n])
        try:
            conversation, _ = self._read(self.files.row(i))
            media = [open_media(picture, self.media_root, self.vision.limits) for picture in conversation.pictures]
            return conversation_episode(conversation, media, self.tokenizer, self.vision, i, self.max_tokens)
        except (BadRow, TemplateError) as error:
            print(f"warning: {self.files.flag}: {self.files.place(i)}: {error}; left out", flush=True)
            return None

"""Supervised data: conversations in several formats, recognised by their columns, as token ids, masks and pictures.

    messages (+ images, videos, tools)     chat rows, verl's multi-turn parquet: <image> and <video> stand for pictures
    question, answer                       verl's single-turn rows
    message_list                           Pixel Reasoner's release.json: items with one of the keys text, image, video
    conversations (+ images)               PyVision's and LLaMA-Factory's rows; {role, content} or {from, value}

Trained on is what the assistant says and the token that ends its turn; never headers, other roles, pictures, padding.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from common.data import JSON_LINE, records
from common.episodes import Episode
from common.prompts import split_marks, with_system
from common.tools import Tool, tool_block
from common.vision import BadRow, Media, Picture, Vision, picture_sources

ROLES = ("system", "user", "assistant", "tool", "observation")
SHAREGPT = {"human": "user", "gpt": "assistant", "function_call": "assistant"}
FORMATS = "messages, question and answer, message_list, or conversations"
Rule = Literal["auto", "all", "last-two-turns"]


@dataclass(slots=True)
class Conversation:
    messages: list[dict]  # {role, content: text or typed parts, ...}, as a chat template takes them
    pictures: list[Picture]  # in the order of their parts
    train: list[bool]  # by message: is it trained on?
    rule: str  # which decided that: all, last-two-turns


def read_conversation(record: Mapping, rule: Rule = "auto", mask_failed_calls: bool = False) -> Conversation:
    """A row of any known format. BadRow with the reason if it cannot be used.

    rule "last-two-turns" (Pixel Reasoner's, the default for its files): of the messages only the last and the one two
    before it, if the assistant's: earlier calls were wrong on purpose, and carry no flag. A message's own `train`:
    false always holds. `mask_failed_calls` leaves out turns whose call returned an error.
    """
    if record.get("message_list") is not None:
        messages, pictures = from_items(record["message_list"])
        rule = "last-two-turns" if rule == "auto" else rule
    else:
        messages, pictures = from_marks(record)
    if not messages:
        raise BadRow("no messages")
    train = []
    for i, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise BadRow(f"unknown role {message['role']!r}, expected one of {', '.join(ROLES)}")
        wanted = message["role"] == "assistant" and message.pop("train", None) is not False
        if rule == "last-two-turns":
            wanted &= i in (len(messages) - 1, len(messages) - 3)
        if mask_failed_calls and i + 1 < len(messages):
            wanted &= not is_error(text_of(messages[i + 1]))
        train.append(wanted)
    if not any(train):
        raise BadRow("nothing to learn: no message of the assistant is trained on")
    return Conversation(messages, pictures, train, "all" if rule == "auto" else rule)


def from_items(message_list: list) -> tuple[list[dict], list[Picture]]:
    """Pixel Reasoner's messages: a list of items, each with one of text, image, video; a null is an absent key."""
    messages, pictures = [], []
    for message in message_list:
        parts = []
        for item in message.get("content") or []:
            present = [(key, item[key]) for key in ("text", "image", "video") if item.get(key) is not None]
            if len(present) != 1:
                raise BadRow(f"item {item!r:.80} has {len(present)} of the keys text, image, video")
            kind, value = present[0]
            parts.append({"type": kind} | ({"text": value} if kind == "text" else {}))
            if kind != "text":
                pictures.append((kind, value if kind == "video" else [value]))
        texts_alone = all(part["type"] == "text" for part in parts)
        content = "".join(part["text"] for part in parts) if texts_alone else parts
        messages.append(kept(message) | {"role": message.get("role"), "content": content})
    return messages, pictures


def from_marks(record: Mapping) -> tuple[list[dict], list[Picture]]:
    """The other formats: contents are texts, in which <image> and <video> stand for the row's pictures."""
    if record.get("messages") is not None:
        rows = record["messages"]
    elif record.get("conversations") is not None:
        rows = record["conversations"]
    elif record.get("question") is not None and record.get("answer") is not None:
        rows = [{"role": "user", "content": record["question"]}, {"role": "assistant", "content": record["answer"]}]
    else:
        raise BadRow(f"has the columns {', '.join(record)}; expected {FORMATS}")
    messages = []
    for row in rows:
        role = row.get("role") or SHAREGPT.get(row.get("from"), row.get("from"))
        content = row.get("content") if row.get("content") is not None else row.get("value")
        if not isinstance(content, str) and not row.get("tool_calls"):
            raise BadRow(f"message {row!r:.80} has no text as its content")
        messages.append(kept(row) | {"role": role, "content": content or ""})
    if tools := record.get("tools"):
        tools = json.loads(tools) if isinstance(tools, str) else tools
        offered = {str(i): Tool("", print, schema) for i, schema in enumerate(tools)}
        messages = with_system(messages, tool_block(offered))
    pictures = picture_sources(record, "\n".join(message["content"] for message in messages))
    if pictures:
        messages = [message | {"content": split_marks(message["content"])} for message in messages]
    return messages, pictures


def kept(message: Mapping) -> dict:
    """What else a template may ask for, without the nulls that Arrow fills in."""
    return {
        key: value for key, value in message.items() if value is not None and key in ("train", "tool_calls", "name")
    }


def text_of(message: dict) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def is_error(observation: str) -> bool:
    """Does a tool's reply tell of an error, in the words of Pixel Reasoner's tools or of ours?"""
    return observation.strip().startswith(("Execution error", "Error:", "<tool_response>\nError"))


def conversation_episode(
    conversation: Conversation,
    media: list[Media],
    tokenizer: PreTrainedTokenizerBase,
    vision: Vision | None,
    index: int,
    max_tokens: int,
) -> Episode:
    """Token ids and loss mask, cut at `max_tokens` (before a picture that does not fit). BadRow: nothing to learn.

    What stands before the first trained token is the prompt. Each piece is tokenised by itself, as at inference, where
    a prompt is complete before the first token is sampled.
    """
    messages, rest = conversation.messages, iter(media)
    forbidden = vision.forbidden_ids if vision else ()
    ids: list[int] = []
    mask: list[int] = []
    rendered, end_token = "", tokenizer.eos_token
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        header = tokenizer.apply_chat_template(messages[:turn], tokenize=False, add_generation_prompt=True)
        full = tokenizer.apply_chat_template(messages[: turn + 1], tokenize=False)
        if not header.startswith(rendered) or not full.startswith(header):
            raise ValueError("the chat template rewrites earlier turns: its masks cannot be derived turn by turn")
        end = full.rfind(end_token)
        end = end + len(end_token) if end >= len(header) else len(full)
        for text, trained in ((header[len(rendered) :], False), (full[len(header) : end], conversation.train[turn])):
            piece = tokenizer.encode(text, add_special_tokens=False)
            if vision:
                here = sum(token in vision.placeholders.values() for token in piece)
                piece = vision.expand(piece, list(islice(rest, here)))
            ids += piece
            mask += [int(trained and token not in forbidden) for token in piece]
        rendered = full[:end]
    end = max_tokens
    if vision:
        media = media[: sum(token in vision.placeholders.values() for token in vision.collapse(ids, media))]
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
    """

    def __init__(
        self,
        paths: str,
        flag: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_tokens: int,
        vision: Vision | None = None,
        media_root: Path | None = None,
        rule: Rule = "auto",
        mask_failed_calls: bool = False,
        skip_bad_rows: bool = False,
        notice: Callable[[str], None] = print,
    ):
        self.tokenizer, self.max_tokens, self.vision, self.media_root = tokenizer, max_tokens, vision, media_root
        self.flag, self.rule, self.mask_failed_calls = flag, rule, mask_failed_calls
        self.paths = [Path(name.strip()).expanduser() for name in paths.split(",")]
        self.tables, self.starts, end = [], [], 0
        for path in self.paths:
            self.tables.append(read_rows(path, flag))
            self.starts.append(end)
            end += len(self.tables[-1])
        bad, costs, by_position = {}, {}, 0
        for i, record in enumerate(chain.from_iterable(map(records, self.tables))):
            try:
                conversation = self._read(record)
                pictures = sum(vision.count_tokens(*picture, media_root) for picture in conversation.pictures)
                costs[i] = pictures + sum(len(text_of(message)) for message in conversation.messages) / 4
                by_position += conversation.rule == "last-two-turns"
            except BadRow as error:
                bad[i] = str(error)
        if bad:
            listed = "".join(f"\n  {self.place(i)}: {reason}" for i, reason in list(bad.items())[:5])
            state = "dropped" if skip_bad_rows else "--skip-bad-rows drops them"
            message = f"{flag}: {len(bad)} unusable rows ({state}); the first:{listed}"
            if not skip_bad_rows:
                raise ValueError(message)
            notice(f"warning: {message}")
        if not costs:
            raise ValueError(f"{flag}: no usable row in {paths}")
        if by_position and rule == "auto":
            notice(f"{flag}: {by_position} rows are Pixel Reasoner's: trained on are their last two turns (--mask)")
        self.positions = np.array(list(costs), dtype=np.int64)
        self.costs = np.array(list(costs.values()))  # about the tokens of each row, to balance ranks by

    def _read(self, record: dict | str) -> Conversation:
        if isinstance(record, str):
            raise BadRow(record)
        conversation = read_conversation(record, self.rule, self.mask_failed_calls)
        if conversation.pictures and not self.vision:
            raise BadRow("has pictures, and the model reads text alone")
        return conversation

    def place(self, i: int) -> str:
        """File and row of a position in all files."""
        file = bisect_right(self.starts, i) - 1
        return f"{self.paths[file]} row {i - self.starts[file]}"

    def __len__(self) -> int:
        return len(self.positions)

    def episode(self, n: int) -> Episode | None:
        """Row n as an episode; None, after a warning, for one whose pictures turn out to be unreadable."""
        i = int(self.positions[n])
        file = bisect_right(self.starts, i) - 1
        record = next(records(self.tables[file].slice(i - self.starts[file], 1)))
        try:
            conversation = self._read(record)
            media = [self.vision.open(*picture, self.media_root) for picture in conversation.pictures]
            return conversation_episode(conversation, media, self.tokenizer, self.vision, i, self.max_tokens)
        except (BadRow, TemplateError) as error:
            print(f"warning: {self.flag}: {self.place(i)}: {error}; left out", flush=True)
            return None


def balanced(rows: list[int], costs: np.ndarray, parts: int) -> list[list[int]]:
    """The rows in `parts` lists of about the same sum of costs, the same on every rank: costly ones go first."""
    lists, loads = [[] for _ in range(parts)], [0.0] * parts
    for row in sorted(rows, key=lambda row: (-costs[row], row)):
        lightest = loads.index(min(loads))
        lists[lightest].append(row)
        loads[lightest] += costs[row]
    return lists


def read_rows(path: Path, flag: str) -> pa.Table:
    """A file as an Arrow table; rows of JSON stay text: they differ in shape."""
    if not path.is_file():
        raise FileNotFoundError(f"{flag}: no such file: {path}")
    try:
        if path.suffix == ".parquet":
            return pq.read_table(path)
        lines = path.read_bytes().splitlines()
        if path.suffix == ".json":
            lines = [json.dumps(row).encode() for row in json.loads(path.read_bytes())]
        return pa.table({JSON_LINE: pa.array(lines, pa.large_binary())})
    except (pa.ArrowInvalid, OSError, ValueError) as error:
        raise ValueError(f"{flag}: {path} cannot be read: {error}") from error

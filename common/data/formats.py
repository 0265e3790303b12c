"""Rows of supervised data in several formats as messages, pictures, and which messages are trained
on.

messages (+ images, videos, tools)     chat rows, verl's multi-turn parquet: <image> and <video>
stand for pictures question, answer                       verl's single-turn rows prompt, extra_info
with an answer      rows of reinforcement learning, where a solution came with the question
message_list                           Pixel Reasoner's release.json: items with one of the keys
text, image, video conversations (+ images, system)       PyVision's and LLaMA-Factory's rows;
{role, content} or {from, value}
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.data.media import Picture, picture_sources
from common.data.protocols import CALL_ID, CLOSE, OPEN
from common.data.render import (
    DEFAULT_SYSTEM,
    parsed,
    split_marks,
    with_arguments,
    with_tools,
    without_nulls,
)
from common.pictures import BadRow
from common.types import with_replies

ROLES = ("system", "user", "assistant", "tool", "observation")
SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
FORMATS = (
    "messages, question and answer, prompt and extra_info.answer, message_list, or conversations"
)
# of a message
KEPT = ("train", "loss", "weight", "tool_calls", "tool_call_id", "name", "reasoning_content")
READ = {"role", "content", "from", "value", *KEPT}
LEFT_OUT = (False, "false", "False")
TRAINED = (True, "true", "True")


@dataclass(slots=True)
class Conversation:
    messages: list[dict]  # {role, content: text or typed parts, ...}, as a chat template takes them
    pictures: list[Picture]  # in the order of their parts
    train: list[bool]  # by message: is it trained on?
    last_two_turns: bool = False  # do only these count, unless a message says otherwise?


def read_conversation(
    record: Mapping,
    native: Callable[[], object] = bool,
    system: Callable[[], str] = lambda: DEFAULT_SYSTEM,
) -> Conversation:
    """A row of any known format. BadRow with the reason if it cannot be used.

    Of Pixel Reasoner's messages only the last and the one two before it are trained on, if the
    assistant's: earlier calls were wrong on purpose, and carry no flag. native: does the chat
    template offer and call tools in another way than Hermes'? system: what does it say where a row
    has no system message? Both are asked of rows with tools alone.
    """
    last_two_turns = record.get("message_list") is not None
    if last_two_turns:
        messages, pictures = from_items(record["message_list"])
    else:
        messages, pictures = from_marks(record, native, system)
    if not messages:
        raise BadRow("no messages")
    train = []
    for i, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise BadRow(f"unknown role {message['role']!r}, expected one of {', '.join(ROLES)}")
        by_default = not last_two_turns or i in (len(messages) - 1, len(messages) - 3)
        wanted = is_wanted(message, by_default)
        # what nobody has asked for has no prompt
        train.append(wanted and message["role"] == "assistant" and i > 0)
    if not any(train):
        raise BadRow("nothing to learn: no message of the assistant is trained on")
    return Conversation(messages, pictures, train, last_two_turns)


def is_wanted(message: dict, by_default: bool) -> bool:
    """What a message says of itself, taken out of it: `train`, `loss` (AgentInstruct, xtuner),
    `weight` (OpenAI)."""
    train = message.pop("train", None)
    loss = message.pop("loss", None)
    weight = message.pop("weight", None)
    if train in LEFT_OUT or loss in LEFT_OUT or (weight is not None and weight == 0):
        return False
    return by_default or train in TRAINED or loss in TRAINED


def unread_keys(record: Mapping) -> set[str]:
    """Keys of a row's messages that are not read; those that hold nothing do not count: Arrow fills
    them in."""
    messages: list = []
    for name in (
        "message_list",
        "messages",
        "conversations",
        "question",
        "prompt",
    ):  # as `read_conversation` looks for them
        if record.get(name) is not None:
            messages = record[name]
            break
    keys = set()
    for message in messages if isinstance(messages, list) else ():
        for key, value in message.items():
            if key not in READ and value not in (None, "", [], {}):
                keys.add(key)
    return keys


def from_items(message_list: list) -> tuple[list[dict], list[Picture]]:
    """Pixel Reasoner's messages: a list of items, each with one of text, image, video; a null is an
    absent key."""
    messages, pictures = [], []
    for message in message_list:
        parts = []
        for item in message.get("content") or []:
            present = [
                (key, item[key])
                for key in ("text", "image", "video")
                if item.get(key) not in (None, [])
            ]
            if len(present) != 1:
                raise BadRow(f"item {item!r:.80} has {len(present)} of the keys text, image, video")
            kind, value = present[0]
            if not isinstance(value, {"text": str, "video": list}.get(kind, object)):
                raise BadRow(
                    f"item {item!r:.80}: a text is a string, and a video the list of its frames"
                )
            parts.append({"type": kind} | ({"text": value} if kind == "text" else {}))
            if kind != "text":
                pictures.append((kind, value if kind == "video" else [value]))
        texts_alone = all(part["type"] == "text" for part in parts)
        content = "".join(part["text"] for part in parts) if texts_alone else parts
        messages.append(kept(message) | {"role": message.get("role"), "content": content})
    return messages, pictures


def from_marks(
    record: Mapping, native: Callable[[], object], system: Callable[[], str]
) -> tuple[list[dict], list[Picture]]:
    """The other formats: contents are texts, in which <image> and <video> stand for the row's
    pictures."""
    if record.get("messages") is not None:
        rows = record["messages"]
    elif record.get("conversations") is not None:
        rows = record["conversations"]
    elif record.get("question") is not None and record.get("answer") is not None:
        rows = [
            {"role": "user", "content": record["question"]},
            {"role": "assistant", "content": record["answer"]},
        ]
    elif isinstance(record.get("prompt"), list) and (record.get("extra_info") or {}).get("answer"):
        rows = with_replies(
            record["prompt"], [{"role": "assistant", "content": record["extra_info"]["answer"]}]
        )
    else:
        raise BadRow(f"has the columns {', '.join(record)}; expected {FORMATS}")
    if isinstance(rows, str):
        raise BadRow(
            "not a conversation: its messages are a text; write the list itself, "
            "json.loads(messages)"
        )
    messages = []
    for row in rows:
        role = row.get("role") or SHAREGPT.get(row.get("from"), row.get("from"))
        content = row.get("content") if row.get("content") is not None else row.get("value")
        if not isinstance(content, str) and not row.get("tool_calls"):
            raise BadRow(f"message {row!r:.80} has no text as its content")
        said = (
            called(content, native())
            if row.get("from") == "function_call"
            else {"content": content or ""}
        )
        answers = {"tool_call_id": CALL_ID} if row.get("from") == "observation" else {}
        messages.append(answers | kept(row) | {"role": role} | said)
    if record.get("system") and [m["role"] for m in messages[:1]] != ["system"]:
        messages = [{"role": "system", "content": record["system"]}, *messages]
    tools = record.get("tools") or []
    tools = parsed(tools.strip() or "[]", "tools") if isinstance(tools, str) else tools
    if tools and messages:
        schemas = [
            t if t.get("type") == "function" else {"type": "function", "function": t} for t in tools
        ]
        messages = with_tools(messages, without_nulls(schemas), native(), system())
    pictures = picture_sources(record, "\n".join(message["content"] for message in messages))
    if pictures:
        messages = [message | {"content": split_marks(message["content"])} for message in messages]
    return messages, pictures


def kept(message: Mapping) -> dict:
    """What else a template may ask for, without the nulls that Arrow fills in."""
    return with_arguments(without_nulls({key: message.get(key) for key in KEPT}))


def called(value: str, native: object) -> dict:
    """Parts of a message: LLaMA-Factory's {name, arguments}, or a list of them, as the policy has
    to say it."""
    if value.strip().startswith(OPEN):
        return {"content": value}
    calls = parsed(value, "function_call")
    calls = calls if isinstance(calls, list) else [calls]
    made = [{"type": "function", "id": CALL_ID, "function": call} for call in calls]
    # and with it arguments of `calls` are objects
    said = with_arguments({"content": "", "tool_calls": made})
    if native:
        return said
    return {
        "content": "\n".join(
            f"{OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSE}" for call in calls
        )
    }


def text_of(message: dict) -> str:
    content = message["content"]
    return (
        content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    )


def pictured(message: dict) -> int:
    """How many pictures it shows."""
    content = message["content"]
    return 0 if isinstance(content, str) else sum(part["type"] != "text" for part in content)

"""Supervised data in several formats: reads a row as messages, pictures, and what to train on.

messages (+ images, videos, tools)      chat rows, verl's multi-turn parquet: <image> and <video>
                                        stand for pictures
question, answer                        verl's single-turn rows
prompt, extra_info with an answer       rows of reinforcement learning that come with a solution
message_list                            Pixel Reasoner's release.json: items with one of the keys
                                        text, image, video
conversations (+ images, system)        PyVision's and LLaMA-Factory's rows: {role, content} or
                                        {from, value}
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.data.media import Picture, picture_sources
from common.data.protocols import CALL_CLOSE, CALL_ID, CALL_OPEN
from common.data.render import (
    DEFAULT_SYSTEM,
    parse_call_arguments,
    parsed,
    split_marks,
    with_tools,
    without_nulls,
)
from common.pictures import BadRow
from common.types import with_replies

ROLES = ("system", "user", "assistant", "tool", "observation")
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
FORMATS = (
    "messages, question and answer, prompt and extra_info.answer, message_list, or conversations"
)
# keys of a message that are kept: flags of training, and what a template may read
KEPT_KEYS = ("train", "loss", "weight", "tool_calls", "tool_call_id", "name")
KEPT_KEYS += ("reasoning_content", "thinking")
KNOWN_KEYS = {"role", "content", "from", "value", *KEPT_KEYS}
# values of `train` and `loss`
NO = (False, "false", "False")
YES = (True, "true", "True")


@dataclass(slots=True)
class Conversation:
    messages: list[dict]  # {role, content: text or typed parts, ...}, as a chat template takes them
    pictures: list[Picture]  # in the order of their parts
    train: list[bool]  # for each message, whether it is trained on
    # whether only the last two turns are trained on, unless a message says otherwise
    last_two_turns: bool = False


def read_conversation(
    record: Mapping,
    is_native: Callable[[], bool] = lambda: False,
    system_text: Callable[[], str] = lambda: DEFAULT_SYSTEM,
) -> Conversation:
    """A row of any known format. BadRow with the reason if it cannot be used.

    Of Pixel Reasoner's messages only the last and the one two before it are trained on by default,
    if they are the assistant's: earlier calls were wrong on purpose, and carry no flag.

    is_native: whether the chat template offers and calls tools in a way of its own, not as Hermes.
    system_text: the template's, for a row that has none. Both are called only for rows with tools
    or calls.
    """
    last_two_turns = record.get("message_list") is not None
    if last_two_turns:
        messages, pictures = from_items(record["message_list"])
    else:
        messages, pictures = from_marks(record, is_native, system_text)
    if not messages:
        raise BadRow("no messages")
    train = []
    for i, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise BadRow(f"unknown role {message['role']!r}, expected one of {', '.join(ROLES)}")
        default = not last_two_turns or i in (len(messages) - 1, len(messages) - 3)
        is_trained = take_train_flag(message, default)
        # a first message has no prompt
        train.append(is_trained and message["role"] == "assistant" and i > 0)
    if not any(train):
        raise BadRow("nothing to learn: no message of the assistant is trained on")
    return Conversation(messages, pictures, train, last_two_turns)


def take_train_flag(message: dict, default: bool) -> bool:
    """Whether a message is trained on: by its own flag, which is removed, or else the default.

    The flag is `train`, `loss` (AgentInstruct, xtuner) or `weight` (OpenAI; only 0 has an effect).
    """
    train = message.pop("train", None)
    loss = message.pop("loss", None)
    weight = message.pop("weight", None)
    if train in NO or loss in NO or weight == 0:
        return False
    return default or train in YES or loss in YES


def unread_keys(record: Mapping) -> list[str]:
    """Keys of a row's messages that are not read, in the order of the row. Empty ones do not
    count: Arrow adds them."""
    messages = record.get("message_list")
    if messages is None:
        messages = raw_messages(record)
    keys: list[str] = []
    for message in messages:
        for key, value in message.items():
            if key not in KNOWN_KEYS and key not in keys and value not in (None, "", [], {}):
                keys.append(key)
    return keys


def from_items(message_list: list) -> tuple[list[dict], list[Picture]]:
    """Messages and pictures of Pixel Reasoner: a message is a list of items."""
    messages: list[dict] = []
    pictures: list[Picture] = []
    for raw in message_list:
        parts = []
        for item in raw.get("content") or []:
            kind, value = read_item(item)
            if kind == "text":
                parts.append({"type": "text", "text": value})
            else:
                parts.append({"type": kind})
                pictures.append((kind, value if kind == "video" else [value]))
        content: str | list[dict] = parts
        if all(part["type"] == "text" for part in parts):
            content = "".join(part["text"] for part in parts)
        message = kept_fields(raw)
        message["role"] = raw.get("role")
        message["content"] = content
        messages.append(message)
    return messages, pictures


def read_item(item: Mapping) -> tuple[str, object]:
    """The kind of an item (text, image or video) and its value. BadRow unless it has just one."""
    present = []
    for kind in ("text", "image", "video"):
        if item.get(kind) not in (None, []):
            present.append((kind, item[kind]))
    if len(present) != 1:
        raise BadRow(f"item {item!r:.80} has {len(present)} of the keys text, image, video")
    kind, value = present[0]
    is_bad_text = kind == "text" and not isinstance(value, str)
    is_bad_video = kind == "video" and not isinstance(value, list)
    if is_bad_text or is_bad_video:
        raise BadRow(f"item {item!r:.80}: a text is a string, and a video the list of its frames")
    return kind, value


def from_marks(
    record: Mapping, is_native: Callable[[], bool], system_text: Callable[[], str]
) -> tuple[list[dict], list[Picture]]:
    """Messages and pictures of the other formats: <image> and <video> in texts are pictures."""
    messages = [read_message(raw, is_native) for raw in raw_messages(record)]
    if record.get("system") and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": record["system"]})
    tools = tools_of(record)
    if tools and messages:
        schemas = [function_schema(tool) for tool in tools]
        messages = with_tools(messages, schemas, is_native(), system_text())
    pictures = picture_sources(record, "\n".join(message["content"] for message in messages))
    if pictures:
        messages = [message | {"content": split_marks(message["content"])} for message in messages]
    return messages, pictures


def raw_messages(record: Mapping) -> list[dict]:
    """The messages as the row has them, in any format but message_list. BadRow if it has none."""
    question = record.get("question")
    answer = record.get("answer")
    prompt = record.get("prompt")
    if record.get("messages") is not None:
        messages = record["messages"]
    elif record.get("conversations") is not None:
        messages = record["conversations"]
    elif question is not None and answer is not None:
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    elif isinstance(prompt, list) and (record.get("extra_info") or {}).get("answer"):
        reply = {"role": "assistant", "content": record["extra_info"]["answer"]}
        messages = with_replies(prompt, [reply])
    else:
        raise BadRow(f"has the columns {', '.join(record)}; expected {FORMATS}")
    if isinstance(messages, str):
        raise BadRow(
            "not a conversation: its messages are a text; write the list itself, "
            "json.loads(messages)"
        )
    return messages


def read_message(raw: Mapping, is_native: Callable[[], bool]) -> dict:
    """A message of {role, content}, or of ShareGPT's {from, value}. BadRow if it has neither a text
    nor tool calls."""
    sender = raw.get("from")
    role = raw.get("role") or SHAREGPT_ROLES.get(sender, sender)
    content = raw.get("content")
    if content is None:
        content = raw.get("value")
    if not isinstance(content, str) and not raw.get("tool_calls"):
        raise BadRow(f"message {raw!r:.80} has no text as its content")
    message = {}
    if sender == "observation":
        message["tool_call_id"] = CALL_ID
    message |= kept_fields(raw)
    message["role"] = role
    if sender == "function_call":
        message |= tool_call_message(content, is_native())
    else:
        message["content"] = content or ""
    return message


def tools_of(record: Mapping) -> list:
    """The column `tools`, which may be JSON text."""
    tools = record.get("tools") or []
    if isinstance(tools, str):
        tools = parsed(tools.strip() or "[]", "tools")
    return tools


def function_schema(tool: Mapping) -> dict:
    """A tool as OpenAI writes it; the row may have the function alone."""
    if tool.get("type") != "function":
        tool = {"type": "function", "function": tool}
    return without_nulls(tool)


def kept_fields(message: Mapping) -> dict:
    """The keys of a message, beside role and content, that are kept, without nulls."""
    return parse_call_arguments(without_nulls({key: message.get(key) for key in KEPT_KEYS}))


def tool_call_message(value: str, is_native: bool) -> dict:
    """A message's content and calls, from LLaMA-Factory's JSON: {name, arguments}, or a list.

    They are what the policy has to write: tool_calls if the template is native, else a text with
    the tags of Hermes. A text that has them already stays as it is.
    """
    if value.strip().startswith(CALL_OPEN):
        return {"content": value}
    calls = parsed(value, "function_call")
    if not isinstance(calls, list):
        calls = [calls]
    tool_calls = [{"type": "function", "id": CALL_ID, "function": call} for call in calls]
    # this also makes objects of the arguments in `calls`
    message = parse_call_arguments({"content": "", "tool_calls": tool_calls})
    if is_native:
        return message
    texts = [f"{CALL_OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CALL_CLOSE}" for call in calls]
    return {"content": "\n".join(texts)}


def text_of(message: dict) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def is_silent(message: dict) -> bool:
    """Whether a message says nothing: no text, no calls, no thoughts with a key of their own."""
    others = ("tool_calls", "reasoning_content", "thinking")
    return not text_of(message).strip() and not any(message.get(key) for key in others)


def num_pictures(message: dict) -> int:
    content = message["content"]
    if isinstance(content, str):
        return 0
    return sum(part["type"] != "text" for part in content)

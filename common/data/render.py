"""From a row's `prompt` to the text that a model reads: chat template, tools, placeholders.

Also: the tokens that end a turn and a response.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from common.data.media import MARKS
from common.data.protocols import Hermes, native_calls
from common.pictures import BadRow
from common.progress import say
from common.torch_repair import transformers
from common.types import Prompt, Tool, is_continued

# A single user message with one of these is a whole prompt, rendered already, as TinyZero's are.
RENDERED_MARKS = ("\nAssistant:", "<|im_start|>assistant")
# roles in whose messages a control token is only text
UNTRUSTED_ROLES = ("user", "tool", "observation")
# in front of the tools, if neither the row nor the template has a system message
DEFAULT_SYSTEM = "You are a helpful assistant."
PROBE = "\u2603"  # a text that no chat template has: it shows where a message's content goes


def bare_text(prompt: Prompt) -> str:
    """The contents of a prompt, without any template."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(message["content"] for message in prompt)


def clean_prompt(prompt: Prompt) -> Prompt:
    """Messages as a chat template wants them; or the text of a single message, if that is a prompt
    which was rendered already (RENDERED_MARKS)."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and prompt[0]["role"] == "user":
        content = prompt[0]["content"]
        if any(mark in content for mark in RENDERED_MARKS):
            return content
    # Arrow fills the keys that only other rows have with nulls, and templates ask `is defined`.
    return [parse_call_arguments(message) for message in without_nulls(prompt)]


def parse_call_arguments(message: dict) -> dict:
    """Make objects of the arguments of tool_calls, in place; OpenAI writes them as JSON text. Empty
    calls and thoughts are removed. Returns the message."""
    # templates ask whether these are defined: an empty one would have a place in the text
    for key in ("tool_calls", "reasoning_content", "thinking"):
        if key in message and not message[key]:
            del message[key]
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = parsed(function["arguments"], "arguments of tool_calls")
    return message


def parsed(text: str, column: str) -> Any:
    """The value of a column's JSON text. BadRow if the text is no JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadRow(f"{column}: {text!r:.80} is no JSON ({error})") from error


def without_nulls(value):
    """A JSON value without the keys whose value is None, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def with_control_tokens_spaced(messages: list[dict], spaced: Callable[[str], str]) -> list[dict]:
    """Messages in which a control token that a user or a tool spells is text: "<|end|>" becomes
    "< |end|>". `spaced`: the function that `spacing` of common/data/protocols.py returns."""
    cleaned = []
    for message in messages:
        if message["role"] in UNTRUSTED_ROLES:
            message = message | {"content": spaced_content(message["content"], spaced)}
        cleaned.append(message)
    return cleaned


def spaced_content(content: str | list[dict], spaced: Callable[[str], str]) -> str | list[dict]:
    if isinstance(content, str):
        return spaced(content)
    parts = []
    for part in content:
        if "text" in part:
            part = part | {"text": spaced(part["text"])}
        parts.append(part)
    return parts


def to_messages(
    prompt: Prompt, tokenizer, tools: Mapping[str, Tool] | None = None, pictures: bool = False
) -> Prompt:
    """A cleaned prompt as the chat template takes it; a text stays one.

    tools: those on offer. pictures: whether <image> and <video> each stand for a picture.
    ValueError if the tokenizer has no chat template.
    """
    if isinstance(prompt, str):
        return prompt
    if not tokenizer.chat_template:
        raise ValueError(
            f"prompts are lists of messages, but the tokenizer of {tokenizer.name_or_path!r} has "
            "no chat template: take an instruct model, or data whose `prompt` is an already "
            "rendered string"
        )
    schemas = []
    for tool in (tools or {}).values():
        if tool.schema and not tool.is_taught(bare_text(prompt)):
            schemas.append(tool.schema)
    messages = prompt
    if schemas:
        native = native_calls(tokenizer, str(tokenizer.chat_template))
        messages = with_tools(prompt, schemas, native, default_system(tokenizer))
    if pictures:
        messages = [message | {"content": split_marks(message["content"])} for message in messages]
    return messages


def apply_template(prompts: list[Prompt], tokenizer) -> list[str]:
    """The text of each prompt. They are rendered together, in half the time, if no chat needs
    options of its own.

    Tools that the template itself offers are in a chat's first message, as "tools".
    """
    chats = [prompt for prompt in prompts if not isinstance(prompt, str)]
    rendered: list[str] = []
    if any("tools" in chat[0] or is_continued(chat) for chat in chats):
        for chat in chats:
            text = tokenizer.apply_chat_template(
                chat,
                tools=chat[0].get("tools"),
                add_generation_prompt=not is_continued(chat),
                continue_final_message=is_continued(chat),
                tokenize=False,
            )
            rendered.append(text)
    elif chats:
        rendered = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    texts = iter(rendered)
    return [prompt if isinstance(prompt, str) else next(texts) for prompt in prompts]


def end_of_text(text: str, flat: str, start: int = 0) -> int:
    """Where a message's text ends in `flat`; -1 if the template has left it out.

    flat: a rendering without white space, which templates trim. start: where to begin in it.
    The text may be quoted, as Llama-3's template quotes the replies of tools.
    """
    ends = []
    for form in (text, json.dumps(text, ensure_ascii=False)):
        form = without_spaces(form)
        place = flat.find(form, start)
        if place >= 0:
            ends.append(place + len(form))
    return min(ends, default=-1)


def without_spaces(text: str) -> str:
    return "".join(text.split())


def encode(tokenizer, text: str) -> list[int]:
    """The ids of a text: special tokens that it spells count as such, and none is added. BadRow if
    the tokenizer fails at it."""
    with breakdowns_as_bad_rows():
        return tokenizer.encode(text, add_special_tokens=False)


def beginning_ids(tokenizer, prompt: Prompt) -> list[int]:
    """Ids to put in front of a prompt that is a text, as the tokenizer itself does.

    The tokenizers of Llama-3, Gemma and Mistral put one token there. None are needed if the text
    begins with them, nor for messages, whose chat template puts them there.
    """
    if not isinstance(prompt, str):
        return []
    beginning = _beginning_ids(tokenizer)
    start = encode(tokenizer, prompt[:100])[: len(beginning)]
    return [] if start == beginning else beginning


@cache
def _beginning_ids(tokenizer) -> list[int]:
    text_ids = encode(tokenizer, "a")
    ids = tokenizer.encode("a")
    for start in range(len(ids)):
        if ids[start : start + len(text_ids)] == text_ids:
            return ids[:start]
    return []


@contextmanager
def breakdowns_as_bad_rows() -> Iterator[None]:
    """Raise BadRow for a panic of the package tokenizers, which is no `Exception`: millions of
    consecutive blanks cause one."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise BadRow(f"the tokenizer breaks down at its text: {error}") from error


def default_system(tokenizer) -> str:
    """The system text that the chat template adds to a chat without one; else DEFAULT_SYSTEM.

    Qwen2.5's template has such a text.
    """
    # the cache has the template in its key: `end_turns_properly` may replace it
    return _default_system(tokenizer, str(tokenizer.chat_template))


@cache
def _default_system(tokenizer, chat_template: str) -> str:
    question = {"role": "user", "content": "-"}
    system = {"role": "system", "content": PROBE}
    try:
        without_system = tokenizer.apply_chat_template([question], tokenize=False)
        with_system = tokenizer.apply_chat_template([system, question], tokenize=False)
    except (TemplateError, TypeError, ValueError):  # a template without such a role
        return DEFAULT_SYSTEM
    before, _, after = with_system.partition(PROBE)
    default = ""
    if without_system.startswith(before) and without_system.endswith(after):
        default = without_system[len(before) : len(without_system) - len(after)]
    return default or DEFAULT_SYSTEM


def with_tools(
    messages: list[dict], schemas: list[dict], native: object, default: str = DEFAULT_SYSTEM
) -> list[dict]:
    """Messages that offer tools.

    If the template offers them itself (`native`), their schemas go into the first message. Else
    Hermes' block is added to the system message, unless that has one. default: the text of a system
    message if there is none.
    """
    if native:
        return [messages[0] | {"tools": schemas}, *messages[1:]]
    if messages[0]["role"] == "system":
        system = messages[0]
        others = messages[1:]
    else:
        system = {"role": "system", "content": default}
        others = messages
    content = system["content"]
    if "<tools>" not in content:
        content += Hermes.system_block(schemas)
    return [system | {"content": content}, *others]


def split_marks(content: str) -> list[dict]:
    """Typed parts of a text with <image> and <video>."""
    parts = []
    for part in re.split("(<image>|<video>)", content):
        if part in MARKS:
            parts.append({"type": MARKS[part]})
        elif part:
            parts.append({"type": "text", "text": part})
    return parts


def end_token_ids(path: str, tokenizer: "transformers.PreTrainedTokenizerBase") -> list[int]:
    """Ids that end a response: the tokenizer's end token, and those of the model's folder.

    The folder's are in generation_config.json; without that file in config.json.
    """
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        if file.is_file():
            listed = json.loads(file.read_text("utf-8")).get("eos_token_id")
            if isinstance(listed, list):
                ids += listed
            elif listed is not None:
                ids.append(listed)
            break
    return sorted(set(ids))


def after_last_turn(tokenizer) -> str:
    """The text that the chat template puts after the assistant's last turn.

    Phi's template ends a whole chat with a second token.
    """
    # the cache has in its key what `end_turns_properly` may replace
    return _after_last_turn(tokenizer, str(tokenizer.chat_template), tokenizer.eos_token)


@cache
def _after_last_turn(tokenizer, chat_template: str, eos_token: str | None) -> str:
    messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": PROBE}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, TypeError, ValueError):
        return ""  # it wants other messages: the rows will show what is wrong
    before, _, after = text.rpartition(PROBE)
    return after if before else ""


def end_of_turn(tokenizer) -> str:
    """The added token that the chat template puts after an assistant turn; without one the end
    token.

    They differ in base models: Qwen2.5's end token is <|endoftext|>, its template ends turns with
    <|im_end|>. A policy trained to end its turns with one token and stopped at the other never
    stops.
    """
    tail = after_last_turn(tokenizer).lstrip()
    for token in sorted(tokenizer.get_added_vocab(), key=len, reverse=True):
        if tail.startswith(token):
            return token
    return tokenizer.eos_token


def end_turns_properly(tokenizer, processor) -> None:
    """Make the token that ends the template's turns the end token.

    processor: of a vision-language model, or None; its template is used, and it gets the tokenizer.
    ValueError without a chat template.
    """
    if processor:
        tokenizer.chat_template = processor.chat_template or tokenizer.chat_template
        processor.tokenizer = tokenizer  # the export saves the processor
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template: take an "
            "instruct model"
        )
    end_token = end_of_turn(tokenizer)
    if end_token != tokenizer.eos_token:
        say(f"turns end with {end_token}, not {tokenizer.eos_token}: it becomes the end token")
        tokenizer.eos_token = end_token
    if (tokenizer.eos_token or "") not in after_last_turn(tokenizer):
        say(
            f"warning: the chat template puts no {tokenizer.eos_token} after a turn: none is "
            "trained by sft.py"
        )

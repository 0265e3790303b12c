"""From a row's `prompt` to the text that a model reads: chat template, ends of turns, placeholders,
the tools."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from common.data.media import MARKS, for_interpreter
from common.data.protocols import Hermes, native_calls
from common.pictures import BadRow
from common.progress import say
from common.torch_repair import transformers
from common.types import Prompt, Tool, is_continued

# TinyZero's templates, stored inside one user message
RENDERED_MARKS = ("\nAssistant:", "<|im_start|>assistant")
# roles whose words are not those of the data set's author
NOT_OURS = ("user", "tool", "observation")
# in front of the tools, where neither row nor template has one
DEFAULT_SYSTEM = "You are a helpful assistant."


def bare_text(prompt: Prompt) -> str:
    """What the prompt says, without any template."""
    return (
        prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    )


def clean_prompt(prompt: Prompt) -> Prompt:
    """Messages as a chat template wants them; the text itself where a single message holds a
    rendered template."""
    if isinstance(prompt, str):
        return prompt
    if (
        len(prompt) == 1
        and prompt[0]["role"] == "user"
        and any(m in prompt[0]["content"] for m in RENDERED_MARKS)
    ):
        return prompt[0]["content"]
    # Arrow fills the keys that only other rows have with nulls, and templates ask `is defined`.
    return [with_arguments(message) for message in without_nulls(prompt)]


def with_arguments(message: dict) -> dict:
    """The message, in whose tool_calls arguments that are a JSON text, OpenAI's way, have become
    objects."""
    for function in (
        call.get("function") for call in message.get("tool_calls") or () if isinstance(call, dict)
    ):
        if isinstance(function, dict) and isinstance(given := function.get("arguments"), str):
            function["arguments"] = parsed(given, "arguments of tool_calls")
    return message


def parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadRow(f"{what}: {text!r:.80} is no JSON ({error})") from error


def without_nulls(value):
    """Dicts, however deep, without the keys whose value is None."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def as_text(messages: list[dict], spaced: Callable[[str], str]) -> list[dict]:
    """Messages in which a control token that a user or a tool spells is text, as `spacing` makes
    it."""

    def clean(content: str | list[dict]) -> str | list[dict]:
        if isinstance(content, str):
            return spaced(content)
        return [
            part | {"text": spaced(part["text"])} if "text" in part else part for part in content
        ]

    return [m | {"content": clean(m["content"])} if m["role"] in NOT_OURS else m for m in messages]


def to_messages(
    prompt: Prompt, tokenizer, tools: Mapping[str, Tool] | None = None, pictures: bool = False
) -> Prompt:
    """What the chat template is given for a cleaned prompt; a text stays one. ValueError if there
    is no template. tools: those on offer. pictures: <image> and <video> stand for one each."""
    if isinstance(prompt, str):
        return prompt
    if not tokenizer.chat_template:
        told = (
            "prompts are lists of messages, but the tokenizer of "
            f"{tokenizer.name_or_path!r} has no chat template"
        )
        raise ValueError(
            f"{told}: take an instruct model, or data whose `prompt` is an already rendered string"
        )
    schemas = []
    for tool in (tools or {}).values():
        if tool.schema and not tool.is_taught(bare_text(prompt)):
            schemas.append(tool.schema)
    native = native_calls(tokenizer, str(tokenizer.chat_template)) if schemas else None
    messages = with_tools(prompt, schemas, native, default_system(tokenizer)) if schemas else prompt
    if pictures:
        messages = [message | {"content": split_marks(message["content"])} for message in messages]
    return messages


def apply_template(prompts: list[Prompt], tokenizer) -> list[str]:
    """The text of each; together they take half the time that they would take one by one. What the
    template itself is to offer stands in a chat's first message, as "tools"."""
    chats = [prompt for prompt in prompts if not isinstance(prompt, str)]
    template = partial(tokenizer.apply_chat_template, tokenize=False)
    if any("tools" in chat[0] or is_continued(chat) for chat in chats):
        rendered = []
        for chat in chats:
            continued = is_continued(chat)
            options = {"add_generation_prompt": not continued, "continue_final_message": continued}
            rendered.append(template(chat, tools=chat[0].get("tools"), **options))
    else:
        rendered = template(chats, add_generation_prompt=True) if chats else []
    texts = iter(rendered)
    return [prompt if isinstance(prompt, str) else next(texts) for prompt in prompts]


def end_of_text(text: str, flat: str, start: int = 0) -> int:
    """Where a message's text ends in a rendering, from `start` on, both without white space, which
    templates trim;
    -1 if the template has left it out. It may be quoted, as Llama-3's template has what tools
    return."""
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
    """The ids of a text that has its special tokens in it. BadRow if the tokenizer breaks down at
    it."""
    with breakdowns_as_bad_rows():
        return tokenizer.encode(text, add_special_tokens=False)


def beginning_ids(tokenizer, prompt: Prompt) -> list[int]:
    """What the tokenizer itself would put in front of a prompt that is a text, as those of Llama-3,
    Gemma and Mistral a token; nothing if the text begins with it. In front of messages it is the
    chat template's to put."""
    if not isinstance(prompt, str):
        return []
    beginning = _beginning_ids(tokenizer)
    start = encode(tokenizer, prompt[:100])[: len(beginning)]
    return [] if start == beginning else beginning


@cache
def _beginning_ids(tokenizer) -> list[int]:
    text = encode(tokenizer, "a")
    whole = tokenizer.encode("a")
    for start in range(len(whole)):
        if whole[start : start + len(text)] == text:
            return whole[:start]
    return []


@contextmanager
def breakdowns_as_bad_rows() -> Iterator[None]:
    """The package tokenizers panics at millions of blanks in a row, with what is no `Exception`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise BadRow(f"the tokenizer breaks down at its text: {error}") from error


def default_system(tokenizer) -> str:
    """What the chat template itself says where a chat has no system message, as Qwen2.5's; else
    DEFAULT_SYSTEM."""
    return _default_system(tokenizer, str(tokenizer.chat_template))


@cache
def _default_system(tokenizer, chat_template: str) -> str:
    mark, asked = "\u2603", {"role": "user", "content": "-"}
    try:
        alone = tokenizer.apply_chat_template([asked], tokenize=False)
        whole = tokenizer.apply_chat_template(
            [{"role": "system", "content": mark}, asked], tokenize=False
        )
    except (TemplateError, TypeError, ValueError):  # a template without such a role
        return DEFAULT_SYSTEM
    before, _, after = whole.partition(mark)
    has_one = (
        alone.startswith(before) and alone.endswith(after) and len(alone) > len(before) + len(after)
    )
    return alone[len(before) : len(alone) - len(after)] if has_one else DEFAULT_SYSTEM


def with_tools(
    messages: list[dict], schemas: list[dict], native: object, default: str = DEFAULT_SYSTEM
) -> list[dict]:
    """Messages that offer tools: what is native to the template in the first, Hermes' block in the
    system message, unless that has one. default: the text of a system message where there is
    none."""
    if native:
        return [messages[0] | {"tools": schemas}, *messages[1:]]
    system, rest = {"role": "system", "content": default}, messages
    if messages[0]["role"] == "system":
        system, rest = messages[0], messages[1:]
    block = "" if "<tools>" in system["content"] else Hermes.system_block(schemas)
    return [system | {"content": system["content"] + block}, *rest]


def split_marks(content: str) -> list[dict]:
    """Typed parts of a text with <image> and <video>."""
    parts = [part for part in re.split("(<image>|<video>)", content) if part]
    return [
        {"type": MARKS[part]} if part in MARKS else {"type": "text", "text": part} for part in parts
    ]


def unheeded(record: Mapping, tools: Mapping[str, Tool], answered: str) -> str:
    """What verl's columns ask for in a row and does not happen with these flags; "" if there is
    nothing."""
    agent = record.get("agent_name") or ""
    if interaction_kwargs(record) and answered == "none":
        return "extra_info.interaction_kwargs: no function is given as --environment"
    unanswered = agent == "tool_agent" and answer_kwargs(record, answered) is None
    if (
        agent in ("", "tool_agent")
        and (unanswered or without_nulls(tools_kwargs(record)))
        and not tools
    ):
        return "agent_name tool_agent, or extra_info.tools_kwargs: no --tools are given"
    return ""


def tools_kwargs(record: Mapping) -> dict:
    """What a row gives to tools, by their names: `extra_info.tools_kwargs`, or PyVision's picture
    or video."""
    given, hint = (record.get("extra_info") or {}).get("tools_kwargs"), record.get("mm_hint")
    if not given and isinstance(hint, Mapping) and hint.get("hint_path"):
        return for_interpreter(hint, bare_text(record["prompt"]))
    return given or {}


def row_tools(record: Mapping, tools: Mapping[str, Tool]) -> dict[str, dict]:
    """{name: keyword arguments of the row's own} of the tools that a row offers, as verl's columns
    say: none with the `agent_name` "single_turn_agent", those named in `extra_info.tools_kwargs`,
    or else all."""
    if record.get("agent_name") == "single_turn_agent":
        return {}
    # Arrow's nulls
    named = {name: options for name, options in tools_kwargs(record).items() if options is not None}
    if unknown := sorted(named.keys() - tools.keys()):
        raise BadRow(
            f"extra_info.tools_kwargs names {', '.join(unknown)}, which --tools does not offer"
        )
    kinds = ("create_kwargs", "execute_kwargs")
    given = {
        name: [named[name].get(kind) or {} for kind in kinds] if name in named else []
        for name in named or tools
    }
    return {
        name: {k: v for part in parts for k, v in part.items() if v is not None}
        for name, parts in given.items()
    }


def interaction_kwargs(record: Mapping) -> dict:
    """What a row gives to a function that answers."""
    info = record.get("extra_info")
    if not isinstance(info, Mapping):
        return {}
    return without_nulls(info.get("interaction_kwargs")) or {}


def answer_kwargs(record: Mapping, answered: str) -> dict | None:
    """What a row gives to the function that answers it, if one does; answered: which rows are,
    "own" (that give any), "all" or "none"."""
    given = interaction_kwargs(record)
    wanted = answered == "all" or (answered == "own" and bool(given))
    return given if wanted and record.get("agent_name") != "single_turn_agent" else None


def end_token_ids(path: str, tokenizer: "transformers.PreTrainedTokenizerBase") -> list[int]:
    """Ids that end a response: the tokenizer's end token, those of generation_config.json, else of
    config.json."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    files = [Path(path) / "generation_config.json", Path(path) / "config.json"]
    if file := next((file for file in files if file.is_file()), None):
        listed = json.loads(file.read_text()).get("eos_token_id") or []
        ids += listed if isinstance(listed, list) else [listed]
    return sorted(set(ids))


def after_last_turn(tokenizer) -> str:
    """What the chat template puts behind the assistant's last turn: Phi's ends a whole chat with a
    second token."""
    return _after_last_turn(tokenizer, str(tokenizer.chat_template), tokenizer.eos_token)


@cache
def _after_last_turn(tokenizer, chat_template: str, eos_token: str | None) -> str:
    messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": "\u2603"}]
    try:
        _, said, tail = tokenizer.apply_chat_template(messages, tokenize=False).rpartition("\u2603")
    except (TemplateError, TypeError, ValueError):
        # it wants other messages: what it is given will be told of
        return ""
    return tail if said else ""


def end_of_turn(tokenizer) -> str:
    """The token that the chat template puts after an assistant turn, if it is a special one; else
    the end token.

    They differ in base models: Qwen2.5's end token is <|endoftext|>, its template ends turns with
    <|im_end|>. A policy that was trained to say one and is stopped at the other never stops.
    """
    tail = after_last_turn(tokenizer).lstrip()
    tokens = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    return next((token for token in tokens if tail.startswith(token)), tokenizer.eos_token)


def end_turns_properly(tokenizer, processor) -> None:
    """Make the token that ends the template's turns the end token. ValueError without a chat
    template. processor: of a vision-language model, or None; its template holds, and it gets the
    tokenizer."""
    if processor:
        tokenizer.chat_template = processor.chat_template or tokenizer.chat_template
        processor.tokenizer = tokenizer  # which the export saves
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template: take an "
            "instruct model"
        )
    if end_of_turn(tokenizer) != tokenizer.eos_token:
        say(
            f"turns end with {end_of_turn(tokenizer)}, not {tokenizer.eos_token}: it becomes "
            "the end token"
        )
        tokenizer.eos_token = end_of_turn(tokenizer)
    if (tokenizer.eos_token or "") not in after_last_turn(tokenizer):
        say(
            f"warning: the chat template puts no {tokenizer.eos_token} behind a turn: none is "
            "trained by sft.py"
        )

"""From a row's `prompt` to the text that a model reads: tokenizer, chat template, placeholders, the tools on offer."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from common.distributed import World
from common.tools import Tool, tool_block
from common.vision import MARKS, BadRow, Vision

RENDERED_MARKS = ("\nAssistant:", "<|im_start|>assistant")  # TinyZero's templates, stored inside one user message
DEFAULT_SYSTEM = "You are a helpful assistant."  # in front of the tools, where a row has no system message

Prompt = list[dict] | str


def bare_text(prompt: Prompt) -> str:
    """What the prompt says, without any template."""
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


def clean_prompt(prompt: Prompt) -> Prompt:
    """Messages as a chat template wants them; the text itself where a single message holds a rendered template."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and prompt[0]["role"] == "user" and any(m in prompt[0]["content"] for m in RENDERED_MARKS):
        return prompt[0]["content"]
    # Arrow fills the keys that only other rows have with nulls, and templates ask `is defined`.
    return without_nulls(prompt)


def without_nulls(value):
    """Dicts, however deep, without the keys whose value is None."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def render(prompt: Prompt, tokenizer, tools: Mapping[str, Tool] | None = None, pictures: bool = False) -> str:
    """The text to tokenise for a cleaned prompt. ValueError if it needs a chat template and there is none.

    tools: those on offer. pictures: <image> and <video> stand for one each.
    """
    if isinstance(prompt, str):
        return prompt
    if not tokenizer.chat_template:
        raise ValueError(
            f"prompts are lists of messages, but the tokenizer of {tokenizer.name_or_path!r} has no chat template: "
            "take an instruct model, or data whose `prompt` is an already rendered string"
        )
    messages = with_system(prompt, tool_block(tool.schema for tool in tools.values())) if tools else prompt
    if pictures:
        messages = [message | {"content": split_marks(message["content"])} for message in messages]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def with_system(messages: list[dict], block: str) -> list[dict]:
    """Messages with a block of tools at the end of the system message, unless it has one."""
    system, rest = {"role": "system", "content": DEFAULT_SYSTEM}, messages
    if messages[0]["role"] == "system":
        system, rest = messages[0], messages[1:]
    block = "" if "<tools>" in system["content"] else block
    return [system | {"content": system["content"] + block}, *rest]


def split_marks(content: str) -> list[dict]:
    """Typed parts of a text with <image> and <video>."""
    parts = [part for part in re.split("(<image>|<video>)", content) if part]
    return [{"type": MARKS[part]} if part in MARKS else {"type": "text", "text": part} for part in parts]


def row_tools(record: Mapping, tools: Mapping[str, Tool]) -> dict[str, dict]:
    """{name: keyword arguments of the row's own} of the tools that a row offers, as verl's columns say.

    `agent_name` "single_turn_agent": none. `extra_info.tools_kwargs`: those named there; otherwise all.
    """
    if record.get("agent_name") == "single_turn_agent":
        return {}
    named = (record.get("extra_info") or {}).get("tools_kwargs") or {}
    named = {name: options for name, options in named.items() if options is not None}  # Arrow fills in nulls
    if unknown := sorted(named.keys() - tools.keys()):
        raise BadRow(f"extra_info.tools_kwargs names {', '.join(unknown)}, which --tools does not offer")
    kinds = ("create_kwargs", "execute_kwargs")
    given = {name: [named[name].get(kind) or {} for kind in kinds] if name in named else [] for name in named or tools}
    return {name: {k: v for part in parts for k, v in part.items() if v is not None} for name, parts in given.items()}


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def end_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end a response: the tokenizer's end token and those of generation_config.json."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    generation_config = Path(path) / "generation_config.json"
    if generation_config.is_file():
        listed = json.loads(generation_config.read_text()).get("eos_token_id") or []
        ids += listed if isinstance(listed, list) else [listed]
    return sorted(set(ids))


def end_of_turn(tokenizer) -> str:
    """The token that the chat template puts after an assistant turn, if it is a special one; else the end token.

    They differ in base models: Qwen2.5's end token is <|endoftext|>, its template ends turns with <|im_end|>. A policy
    that was trained to say one and is stopped at the other never stops.
    """
    mark = "\u2603"
    messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": mark}]
    tail = tokenizer.apply_chat_template(messages, tokenize=False).rpartition(mark)[2]
    ids = tokenizer.encode(tail, add_special_tokens=False)
    first = tokenizer.convert_ids_to_tokens(ids[0]) if ids else tokenizer.eos_token
    return first if first in tokenizer.get_added_vocab() else tokenizer.eos_token


def end_turns_properly(tokenizer: PreTrainedTokenizerBase, vision: Vision | None, world: World) -> None:
    """Make the token that ends the template's turns the end token. ValueError without a chat template."""
    if vision:
        tokenizer.chat_template = vision.processor.chat_template or tokenizer.chat_template
        vision.processor.tokenizer = tokenizer  # which the export saves
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of {tokenizer.name_or_path!r} has no chat template: take an instruct model")
    if end_of_turn(tokenizer) != tokenizer.eos_token:
        world.print(f"turns end with {end_of_turn(tokenizer)}, not {tokenizer.eos_token}: it becomes the end token")
        tokenizer.eos_token = end_of_turn(tokenizer)

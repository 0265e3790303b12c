"""Protocols: how the policy is taught its tools, how it calls one, and how it sees the reply."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from jinja2 import TemplateError
from pydantic_core import from_json

from common.pictures import Media

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
CODE_OPEN, CODE_CLOSE = "<code>", "</code>"
FENCE, FENCE_END = "```python", "```"
REPLY_OPEN, REPLY_CLOSE = "<tool_response>\n<interpreter>", "</interpreter>\n\n</tool_response>"
# one of these is in a prompt that explains by itself how to write programs between tags
CODE_TAUGHT = (CODE_OPEN, "<image_clue_0>")
CALL_ID = "tool_call"  # Mistral's templates want nine characters
UNSEEN = "the policy would not see what it is told; take a model whose template shows such messages"
AFTER_CALL = r"\s*+(<\|\w+\|>|</s>)?\s*\Z"  # what may follow a native call at the end of a turn
# name -> `tool_calls` of a response template, by which transformers' `parse_response` finds calls
CALL_FORMATS: dict[str, dict] = {
    "Qwen3-Coder": {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?"
            r"(?P<value>(?:(?!<parameter=).)*?)\n?</parameter>"
        },
        "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
    },
    "Llama-3": {
        "open_pattern": r'\A\s*(?:<\|python_tag\|>\s*(?=\{)|(?=\{\s*"name"\s*:))',
        "close_pattern": r"\s*(?:<\|eot_id\|>|<\|eom_id\|>|\Z)",
        "repeats": True,
        "content": "json",
        "transform": {"function": {"name": "{content.name}", "arguments": "{content.parameters}"}},
    },
    "Mistral with [ARGS]": {
        "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[\s]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\]",
        "close_pattern": r"(?=\[TOOL_CALLS\])|</s>|\Z",
        "repeats": True,
        "content": "json",
        "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
    },
    "Mistral": {
        "open": "[TOOL_CALLS]",
        "close_pattern": r"\s*(?:</s>|\Z)",
        "content": "json",
        "transform_each": True,
        "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}},
    },
}


@dataclass(slots=True)
class Call:
    name: str = ""
    arguments: dict = field(default_factory=dict)
    error: str = ""  # why it is malformed


def spacing(tokenizer, spared: Iterable[str] = ()) -> Callable[[str], str]:
    """A function that turns special tokens in a text into text: "<|end|>" into "< |end|>".

    spared: special tokens that stay.
    """
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    patterns = [re.escape(token) for token in sorted(special - set(spared))]
    # without any token the pattern matches nothing
    any_token = re.compile("|".join(patterns) or "(?!)")

    def spaced(text: str) -> str:
        return any_token.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)

    return spaced


class ToolProtocol:
    """What protocols share: a tool's reply is a message in the chat template."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.skipped_ids: set[int] = set()  # tokens that `read` leaves out
        tags = (CALL_OPEN, CALL_CLOSE, CODE_OPEN, CODE_CLOSE)
        for i, token in tokenizer.added_tokens_decoder.items():
            if token.special and token.content not in tags:
                self.skipped_ids.add(i)
        # in a reply: a tool may write them, or quote the policy's call
        self.space_control_tokens = spacing(tokenizer)

    def prompt(self, messages: list[dict]) -> str:
        """The text of messages. The first message holds the tools that the template offers."""
        return self.tokenizer.apply_chat_template(
            messages, tools=messages[0].get("tools"), add_generation_prompt=True, tokenize=False
        )

    def read(self, turn: Sequence[int]) -> str:
        """A turn as text for `find_call`: with the tags of calls, which may be special tokens."""
        return self.tokenizer.decode([token for token in turn if token not in self.skipped_ids])

    def observation(self, parts: Sequence[str | Media], role: str, num_pictures: int = 0) -> str:
        """The text between an end-of-turn token and the next turn: a message of `role`.

        parts: texts and pictures; a picture becomes one placeholder. num_pictures: how many stand
        before these, for a protocol that numbers them. ValueError if the chat template refuses the
        role, or does not end the assistant's turns with the end token.
        """
        content = []
        for part in parts:
            if isinstance(part, str):
                content.append({"type": "text", "text": self.space_control_tokens(part)})
            else:
                content.append({"type": part.kind})
        # templates of models that read text alone want a string
        if all(part["type"] == "text" for part in content):
            content = "".join(part["text"] for part in content)
        mark = "\u2603\u2603"  # a text that no chat template has
        messages = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": mark},
            {"role": role, "content": content, "tool_call_id": CALL_ID},
        ]
        try:
            text = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, TypeError) as error:
            reason = f"{type(error).__name__}: {error!s:.200}"
            raise ValueError(
                f"tools: the chat template refuses messages of role {role!r} ({reason}): {UNSEEN}"
            ) from error
        after_mark = text.partition(mark)[2]  # the first: a text of the tool may hold the mark too
        end = self.tokenizer.eos_token
        if not end or not after_mark.startswith(end):
            raise ValueError(
                f"the chat template does not end the assistant's turns with {end!r}: tools do not "
                "work with it"
            )
        return after_mark.removeprefix(end)


class Hermes(ToolProtocol):
    """Qwen2.5's protocol: calls as JSON between the tags <tool_call>."""

    @staticmethod
    def system_block(schemas: Iterable[dict]) -> str:
        """The end of the system message, word for word that of Qwen2.5's chat template."""
        lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
        return (
            "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>\n{lines}\n</tools>\n\n"
            "For each function call, return a json object with function name and arguments within "
            f"{CALL_OPEN}{CALL_CLOSE} XML tags:\n{CALL_OPEN}\n"
            f'{{"name": <function-name>, "arguments": <args-json-object>}}\n{CALL_CLOSE}'
        )

    @staticmethod
    def find_call(text: str) -> Call | None:
        """The last call of a turn that ends with one, else None. A malformed one has an `error`."""
        text = text.rstrip()
        if not text.endswith(CALL_CLOSE):
            return None
        start = text.rfind(CALL_OPEN)
        if start < 0:
            return Call(error=f"{CALL_CLOSE} without {CALL_OPEN}")
        body = text[start + len(CALL_OPEN) : text.index(CALL_CLOSE, start)]
        try:
            call = from_json(body, allow_inf_nan=False)
            arguments = call.get("arguments") if isinstance(call, dict) else None
            if isinstance(arguments, str):
                arguments = from_json(arguments, allow_inf_nan=False)
            if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
                raise ValueError(
                    'expected {"name": <function-name>, "arguments": <args-json-object>}'
                )
            json.dumps(arguments, allow_nan=False)  # 1e999 is infinite
        except (TypeError, ValueError) as error:  # a TypeError for lone surrogates
            return Call(error=f"Not a valid tool call: {error}")
        return Call(call["name"], arguments)


class Code(ToolProtocol):
    """PyVision-RL's protocol (arXiv 2602.20739): programs between the tags <code>, or without them.

    Replies are messages of the user.
    """

    @staticmethod
    def find_call(text: str) -> Call | None:
        """A call with the program that a turn ends with, in a fence for Python; None without one.

        An <answer> that is closed and not empty ends the trajectory: then there is no call.
        """
        text = text.rstrip()
        # between the first <answer> and the last </answer>; "" if one of them is missing
        before_close, _, _ = text.rpartition("</answer>")
        _, _, answer = before_close.partition("<answer>")
        if answer.strip():
            return None
        if text.endswith(CODE_CLOSE):
            block = text.removesuffix(CODE_CLOSE).rpartition(CODE_OPEN)[2].strip()
            if not block.startswith(FENCE):
                return None
        else:
            start = text.rfind(FENCE)
            if start < 0:
                return None
            block = text[start:]
            # a turn may also end with a fence of another kind
            if f"\n{FENCE_END}" in block.removesuffix(FENCE_END):
                return None
        program = block.removeprefix(FENCE)
        if not program.endswith(FENCE_END):
            return None
        return Call("python", {"code": program.removesuffix(FENCE_END).strip("\n")})

    def observation(self, parts: Sequence[str | Media], role: str, num_pictures: int = 0) -> str:
        text, *pictures = parts
        return super().observation(self.content(text, pictures, num_pictures), role)

    @staticmethod
    def content(text: str, pictures: Sequence, num_pictures: int) -> list:
        """The parts of a reply: the printed text, and the figures, numbered from `num_pictures`."""
        if not pictures:
            return [f"{REPLY_OPEN}\nText Result:\n{text}{REPLY_CLOSE}"]
        parts = [f"{REPLY_OPEN}Text Result:\n{text}\nImage Result:\n"]
        for number, picture in enumerate(pictures, start=num_pictures):
            parts += [f"<image_clue_{number}>", picture, f"</image_clue_{number}>"]
        return [*parts, REPLY_CLOSE]


class Native(ToolProtocol):
    """Tools, calls and replies in the chat template's own way.

    calls: one of `CALL_FORMATS`, or the tokenizer's own.
    """

    def __init__(self, tokenizer, schemas: Iterable[dict], calls: dict):
        super().__init__(tokenizer)
        self.skipped_ids = set()  # a format may need any special token, such as <|eom_id|>
        self.schemas = list(schemas)
        # a template must have an anchor, which is sought only in the prefix: that is empty here
        self.template = {"start_anchor": "\0", "fields": {"tool_calls": calls, "content": {}}}

    def find_call(self, text: str) -> Call | None:
        """The last call of a turn that ends with one, else None. A malformed one has an `error`."""
        try:
            message = self.tokenizer.parse_response(
                text, self.template, prefix="", tools=self.schemas
            )
            tool_calls = message.get("tool_calls")
            # a call without tags is JSON: an object, or a list
            end_of_call = CALL_CLOSE if CALL_CLOSE in text else r"[\]}]"
            if not tool_calls or not re.search(end_of_call + AFTER_CALL, text):
                return None
            call = from_json(json.dumps(tool_calls[-1]["function"]), allow_inf_nan=False)
            if not isinstance(call["arguments"], dict) or not isinstance(call["name"], str):
                raise ValueError("expected the name of a function, and its arguments")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            first_line = str(error).partition("\n")[0]
            return Call(error=f"Not a valid tool call: {first_line}")
        return Call(call["name"], call["arguments"])


def protocol_of(tokenizer, schemas: Iterable[dict] = ()) -> ToolProtocol:
    """The protocol of a model with this chat template. ValueError if its calls are not known."""
    calls = native_calls(tokenizer, str(tokenizer.chat_template))
    return Native(tokenizer, schemas, calls) if calls else Hermes(tokenizer)


@cache
def native_calls(tokenizer, chat_template: str) -> dict | None:
    """The format in which the chat template writes calls, of `CALL_FORMATS` or the tokenizer's.

    chat_template: the tokenizer's own, an argument so that the cache notices when it is replaced.
    None if the template writes them as Hermes, or writes none. ValueError for an unknown format.
    """
    if "tool_calls" not in chat_template:
        return None
    call = Call("f", {"x": "y"})
    schema = {
        "type": "function",
        "function": {
            "name": call.name,
            "description": "-",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "string", "description": "-"}},
            },
        },
    }
    question = [{"role": "user", "content": "-"}]
    function = {"name": call.name, "arguments": call.arguments}
    reply = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": CALL_ID, "function": function}],
    }
    render = partial(tokenizer.apply_chat_template, tools=[schema], tokenize=False)
    try:
        # A template that fails without `tools` counts as of no known format: prompts that offer no
        # tools, and replies, are rendered without them, and with Hermes every prompt is.
        render(question, tools=None)
        before = render(question, add_generation_prompt=True)
        rendered = render([*question, reply]).removeprefix(before)
    except (TemplateError, TypeError):
        rendered = ""
    turn = rendered.rpartition(tokenizer.eos_token)[0]
    if Hermes.find_call(turn) == call:
        return None
    call_formats = list(CALL_FORMATS.values())
    response_template = getattr(tokenizer, "response_template", None) or {}
    tokenizer_format = response_template.get("fields", {}).get("tool_calls")
    if tokenizer_format:
        call_formats.insert(0, tokenizer_format)
    for call_format in call_formats:
        if Native(tokenizer, [], call_format).find_call(rendered) == call:
            return call_format
    known_formats = ", ".join(CALL_FORMATS)
    raise ValueError(
        f"tools: the chat template writes calls in another format than Hermes, {known_formats}"
    )

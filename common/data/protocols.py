"""Protocols: how the policy is told of the tools, how it calls one in its turn, and how it gets to
see the reply."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

from jinja2 import TemplateError
from pydantic_core import from_json

from common.pictures import Media
from common.types import trim

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CODE_OPEN, CODE_CLOSE, FENCE = "<code>", "</code>", "```python"
BEGIN, END = "<tool_response>\n<interpreter>", "</interpreter>\n\n</tool_response>"
CODE_TAUGHT = (CODE_OPEN, "<image_clue_0>")  # in prompts that teach programs between tags
CALL_ID = "tool_call"  # Mistral's templates want nine characters
UNSEEN = "the policy would not see what it is told; take a model whose template shows such messages"


@dataclass(slots=True)
class Call:
    name: str = ""
    arguments: dict = field(default_factory=dict)
    error: str = ""  # why it is none


def spacing(tokenizer, spared: Iterable[str] = ()) -> Callable[[str], str]:
    """What turns special tokens, spelled in a text, into text: "<|end|>" into "< |end|>"; the
    spared ones stay."""
    special = {
        token.content for token in tokenizer.added_tokens_decoder.values() if token.special
    } - {*spared}
    spelled = re.compile("|".join(map(re.escape, sorted(special))) or "(?!)")
    return partial(spelled.sub, lambda found: f"{found[0][0]} {found[0][1:]}")


class Protocol:
    """What protocols share: a message of the chat template that holds what a tool has replied."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        tokens, tags = tokenizer.added_tokens_decoder, (OPEN, CLOSE, CODE_OPEN, CODE_CLOSE)
        self.skipped = {
            i for i, token in tokens.items() if token.special and token.content not in tags
        }
        # a text of a tool, or of the policy in a call: its special tokens are text
        self.spaced = spacing(tokenizer)

    def prompt(self, messages: list[dict]) -> str:
        """Messages by the chat template; the tools that it is to offer stand in the first one."""
        options = {"add_generation_prompt": True, "tokenize": False}
        return self.tokenizer.apply_chat_template(
            messages, tools=messages[0].get("tools"), **options
        )

    def read(self, turn: Sequence[int]) -> str:
        """A turn as `find_call` wants it: with the tags of calls, which some models have as special
        tokens."""
        return self.tokenizer.decode([token for token in turn if token not in self.skipped])

    def observation(self, parts: Sequence[str | Media], role: str, shown: int = 0) -> str:
        """What stands between an end-of-turn token and the next turn: texts and pictures in a
        message of `role`.

        A picture is one placeholder; `shown` were seen before. ValueError if the chat template
        refuses the role, or ends the assistant's turns in another way.
        """
        content = [
            {"type": "text", "text": self.spaced(x)} if isinstance(x, str) else {"type": x.kind}
            for x in parts
        ]
        # templates of models that read text alone want a string
        if all(part["type"] == "text" for part in content):
            content = "".join(part["text"] for part in content)
        mark, end = "\u2603\u2603", self.tokenizer.eos_token
        before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": mark}]
        messages = [*before, {"role": role, "content": content, "tool_call_id": CALL_ID}]
        try:
            whole = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, TypeError) as error:
            why = f"{type(error).__name__}: {error!s:.200}"
            raise ValueError(
                f"tools: the chat template refuses messages of role {role!r} ({why}): {UNSEEN}"
            ) from error
        between = whole.partition(mark)[2]  # a text of the tool may hold the mark too
        if not end or not between.startswith(end):
            raise ValueError(
                f"the chat template does not end the assistant's turns with {end!r}: no tools "
                "with it"
            )
        return between.removeprefix(end)


class Hermes(Protocol):
    """Calls as JSON between the tags <tool_call>, replies in the chat template's own way: Qwen2.5's
    protocol."""

    @staticmethod
    def system_block(schemas: Iterable[dict]) -> str:
        """What follows the system text: the block of Hermes, to the letter that of Qwen2.5's chat
        template."""
        lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
        return (
            "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>\n{lines}\n</tools>\n\n"
            "For each function call, return a json object with function name and arguments within "
            f"{OPEN}{CLOSE} XML tags:\n{OPEN}\n"
            f'{{"name": <function-name>, "arguments": <args-json-object>}}\n{CLOSE}'
        )

    @staticmethod
    def find_call(text: str) -> Call | None:
        """The last call in a turn that ends with one; None if it does not. A malformed one has an
        `error`."""
        text = text.rstrip()
        if not text.endswith(CLOSE):
            return None
        start = text.rfind(OPEN)
        if start < 0:
            return Call(error=f"{CLOSE} without {OPEN}")
        try:
            call = from_json(
                text[start + len(OPEN) : text.index(CLOSE, start)], allow_inf_nan=False
            )
            arguments = (
                call["arguments"] if isinstance(call, dict) and "arguments" in call else None
            )
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


class Code(Protocol):
    """Programs between the tags <code>, replies in a user's message: PyVision-RL's protocol (arXiv
    2602.20739)."""

    @staticmethod
    def find_call(text: str) -> Call | None:
        """The program that a turn ends in, in a fence for Python; a closed <answer> in it ends the
        trajectory."""
        text = text.rstrip()
        answer = text[: max(0, text.rfind("</answer>"))].partition("<answer>")[2]
        if answer.strip():
            return None
        if text.endswith(CODE_CLOSE):
            text = text[: -len(CODE_CLOSE)].rpartition(CODE_OPEN)[2].strip()
            start = 0 if text.startswith(FENCE) else -1
        else:
            start = text.rfind(FENCE, 0, -3)
            # another fence ends the turn
            start = -1 if "\n```" in text[start + len(FENCE) : -3] else start
        if start < 0 or not text.endswith("```") or len(text) < start + len(FENCE) + 3:
            return None
        return Call("python", {"code": text[start + len(FENCE) : -3].strip("\n")})

    def observation(self, parts: Sequence[str | Media], role: str, shown: int = 0) -> str:
        text, *pictures = parts
        return super().observation(self.content(text, pictures, shown), role)

    @staticmethod
    def content(text: str, pictures: Sequence, shown: int) -> list:
        """The parts of the message: what was printed, and the figures, numbered on from those that
        were shown."""
        if not pictures:
            return [f"{BEGIN}\nText Result:\n{text}{END}"]
        parts = [f"{BEGIN}Text Result:\n{text}\nImage Result:\n"]
        for number, picture in enumerate(pictures, start=shown):
            parts += [f"<image_clue_{number}>", picture, f"</image_clue_{number}>"]
        return [*parts, END]


def error_text(why: str, role: str) -> str:
    return trim(f"\nExecution error:\n{why}\n" if role == "user" else f"Error: {why}")


# name -> what `parse_response` takes as the field tool_calls
FORMATS: dict[str, dict] = json.loads(Path(__file__).with_name("call_formats.json").read_text())


LAST = r"\s*+(<\|\w+\|>|</s>)?\s*\Z"  # what may follow a call at the end of a turn


class Native(Protocol):
    """Tools, calls and replies in the chat template's own way, which is one of `FORMATS`."""

    def __init__(self, tokenizer, schemas: Iterable[dict], calls: dict):
        super().__init__(tokenizer)
        self.skipped = set()
        self.schemas = list(schemas)
        self.template = {"start_anchor": "\0", "fields": {"tool_calls": calls, "content": {}}}

    def find_call(self, text: str) -> Call | None:
        """The last call in a turn; None if there is none. A malformed one has an `error`."""
        try:
            said = self.tokenizer.parse_response(text, self.template, prefix="", tools=self.schemas)
            if not said.get("tool_calls") or not re.search(
                (CLOSE if CLOSE in text else r"[\]}]") + LAST, text
            ):
                return None
            call = from_json(json.dumps(said["tool_calls"][-1]["function"]), allow_inf_nan=False)
            if not isinstance(call["arguments"], dict) or not isinstance(call["name"], str):
                raise ValueError("expected the name of a function, and its arguments")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            return Call(error=f"Not a valid tool call: {str(error).partition(chr(10))[0]}")
        return Call(call["name"], call["arguments"])


def protocol_of(tokenizer, schemas: Iterable[dict] = ()) -> Protocol:
    """How a model with this chat template calls tools. ValueError if that is not known."""
    calls = native_calls(tokenizer, str(tokenizer.chat_template))
    return Native(tokenizer, schemas, calls) if calls else Hermes(tokenizer)


@cache
def native_calls(tokenizer, chat_template: str) -> dict | None:
    """Of `FORMATS` the one in which the template writes a call; None for Hermes' or none.
    ValueError for others."""
    call = Call("f", {"x": "y"})
    function = {"name": call.name, "arguments": call.arguments}
    parameters = {"type": "object", "properties": {"x": {"type": "string", "description": "-"}}}
    schema = {
        "type": "function",
        "function": {"name": call.name, "description": "-", "parameters": parameters},
    }
    template = partial(tokenizer.apply_chat_template, tools=[schema], tokenize=False)
    asked = [{"role": "user", "content": "-"}]
    calls = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": CALL_ID, "function": function}],
    }
    try:
        template(asked, tools=None)  # as with Hermes, whose tools stand in the system message
        before = template(asked, add_generation_prompt=True)
        said = template([*asked, calls]).removeprefix(before)
    except (TemplateError, TypeError):
        said = ""
    if (
        "tool_calls" not in chat_template
        or Hermes.find_call(said.rpartition(tokenizer.eos_token)[0]) == call
    ):
        return None
    own = (getattr(tokenizer, "response_template", None) or {}).get("fields", {}).get("tool_calls")
    for known in filter(None, [own, *FORMATS.values()]):
        if Native(tokenizer, [], known).find_call(said) == call:
            return known
    raise ValueError(
        f"tools: the chat template calls them in another way than Hermes, {', '.join(FORMATS)}"
    )

"""Protocols: how the policy is told of the tools, how it calls one in its turn, and how it gets to
see the reply."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from jinja2 import TemplateError
from pydantic_core import from_json

from common.pictures import Media

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CODE_OPEN, CODE_CLOSE, FENCE = "<code>", "</code>", "```python"
BEGIN, END = "<tool_response>\n<interpreter>", "</interpreter>\n\n</tool_response>"
CODE_TAUGHT = (CODE_OPEN, "<image_clue_0>")  # in prompts that teach programs between tags
MAX_TEXT = 4096  # characters of an observation
CALL_ID = "tool_call"  # Mistral's templates want nine characters
UNSEEN = "the policy would not see what it is told; take a model whose template shows such messages"


@dataclass(slots=True)
class Call:
    name: str = ""
    arguments: dict = field(default_factory=dict)
    error: str = ""  # why it is none


@dataclass(slots=True)
class ToolReply:
    text: str
    images: list[bytes] = field(default_factory=list)  # encoded, at their own resolution
    # the tool refused, raised, hung or crashed: the text is what the policy reads
    error: bool = False
    # through our fault, not the policy's: the sample is lost, the text says why
    failed: bool = False
    info: dict = field(default_factory=dict)
    role: str = "tool"  # of the message that holds text and images
    opened: Future[list[Media]] | None = None  # the images, once they are decoded


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


def trim(text: str) -> str:
    """Without lone surrogates, which no tokenizer takes, and at most MAX_TEXT long."""
    text = text.encode(errors="replace").decode()
    if len(text) <= MAX_TEXT:
        return text
    mark = f"\n[... cut: the whole has {len(text)} characters ...]\n"
    head = (MAX_TEXT - len(mark)) // 2
    return text[:head] + mark + text[len(text) - (MAX_TEXT - len(mark) - head) :]

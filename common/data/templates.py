"""How a chat template has tools called: like Hermes, or in another way that transformers'
`parse_response` reads."""

import json
import re
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path

from jinja2 import TemplateError
from pydantic_core import from_json

from common.data.protocols import CALL_ID, CLOSE, Call, Hermes, Protocol

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

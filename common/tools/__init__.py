"""Tools that the policy calls between its turns: which there are, and how they are called in a
worker.

A tool is a plain function. It returns text (numbers, booleans, dicts and lists become JSON), or
(text, images), or (text, images, info): images as PIL or encoded, info a dict for pictures of what
happened, in which "frames" says that the images are frames of a video, and "acted", if false, that
the call earns no --tool-bonus. An exception is what the policy reads, and so is a timeout, a crash
or a lack of memory: it wrote the call. A function (or `Tool`) with the attribute `ours` says that
these are not the policy's fault: they cost the sample. A parameter named `context` gets the
pictures seen so far; keyword-only ones are for the row.
"""

import inspect
import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import get_type_hints

from pydantic import PydanticUserError, TypeAdapter

from common.data.protocols import error_text
from common.pictures import encode
from common.tools import visual
from common.tools.environments import (
    Live,
    State,
    ask_function,
    docstring,
    fitting,
    is_class,
    load_environment,
    method_schemas,
)
from common.types import Tool, ToolReply, trim
from common.workers.pool import load_function
from common.workers.process import describe

# how common.workers.pool begins what it says of a job that no process could take
NO_WORKER = "no worker starts"


CROP_NAMES = ("crop_image", "zoom_in")
CROP = Tool(
    "crop_image_normalized",
    visual.crop_image_normalized,
    visual.SCHEMAS["crop"],
    CROP_NAMES,
    role="user",
    ours=True,
)
SELECT = Tool(
    "select_frames", visual.select_frames, visual.SCHEMAS["select"], role="user", ours=True
)
BUILT_IN = {CROP.name: [CROP], SELECT.name: [SELECT], "visual": [CROP, SELECT]}


def load_tools(spec: str, environment: str | None = None) -> dict[str, Tool]:
    """The tools of --tools, names of BUILT_IN and FILE.py:NAME, separated by commas, and the
    methods of --environment if that is a class. ValueErrors name the flag."""
    tools = {}
    for part in filter(None, map(str.strip, spec.split(","))):
        if part not in BUILT_IN and ":" not in part:
            raise ValueError(
                f"--tools {part}: expected FILE.py:NAME or one of {', '.join(BUILT_IN)}, python"
            )
        for tool in BUILT_IN.get(part) or [user_tool(part)]:
            if tool.name in tools:
                raise ValueError(f"--tools {spec}: {tool.name} is named twice")
            tools[tool.name] = tool
    if environment and is_class(environment):
        methods, ours = (
            method_schemas(environment),
            not getattr(load_environment(environment), "replayable", True),
        )
        if twice := sorted(tools.keys() & methods.keys()):
            raise ValueError(
                f"--environment {environment}: {', '.join(twice)} is one of --tools, too"
            )
        tools |= {
            name: Tool(name, print, methods[name], ours=ours, stateful=True) for name in methods
        }
    return tools


def find_tool(tools: Mapping[str, Tool], name: str) -> Tool | None:
    return tools.get(name) or next((tool for tool in tools.values() if name in tool.aliases), None)


def user_tool(spec: str) -> Tool:
    """FILE.py:NAME, with the function's attributes `schema`, or one made from its signature, and
    `ours`."""
    function = load_function(spec, "--tools")
    try:
        if any(
            kind(function)
            for kind in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isclass)
        ):
            raise ValueError("is called as it stands, and must be a plain function")
        schema = getattr(function, "schema", None) or make_schema(function, spec.rpartition(":")[2])
        json.dumps(schema)
        parameters = schema["function"].get("parameters", {})
        known = isinstance(parameters.get("properties", {}), dict) and isinstance(
            schema["function"]["name"], str
        )
        if schema["type"] != "function" or not known:
            raise ValueError(
                'its schema is not {"type": "function", "function": {name, description, '
                "parameters}}"
            )
    except (AttributeError, KeyError, NameError, TypeError, ValueError) as error:
        raise ValueError(f"--tools {spec}: {type(error).__name__}: {error}") from error
    return Tool(
        schema["function"]["name"], function, schema, ours=bool(getattr(function, "ours", False))
    )


def make_schema(function: Callable, name: str) -> dict:
    """From type hints and docstring: its first paragraph, and the lines "name: text" for
    parameters."""
    hints, parameters = get_type_hints(function), inspect.signature(function).parameters
    lines = [line.strip() for line in docstring(function).splitlines()]
    about = {
        key: text.strip()
        for key, colon, text in (line.partition(":") for line in lines)
        if key in parameters
    }
    description = [line for line in takewhile(bool, lines) if line.partition(":")[0] not in about]
    properties: dict[str, dict] = {}
    for parameter in parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise ValueError(
                f"parameter {parameter.name} is positional-only, but arguments are named"
            )
        if parameter.kind != parameter.POSITIONAL_OR_KEYWORD or parameter.name == "context":
            continue
        if parameter.name not in hints:
            raise ValueError(f"parameter {parameter.name} has no type hint")
        try:
            properties[parameter.name] = TypeAdapter(hints[parameter.name]).json_schema()
        except PydanticUserError as error:
            raise ValueError(f"no JSON type for the type hint {hints[parameter.name]}") from error
        if parameter.name in about:
            properties[parameter.name]["description"] = about[parameter.name]
    required = [name for name in properties if parameters[name].default is inspect.Parameter.empty]
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": " ".join(description), "parameters": parameters}
    return {"type": "function", "function": function}


def call_tool(tool: Tool, arguments: Mapping, context: Mapping, kwargs: Mapping) -> dict:
    """Fields of the reply, as JSON. What the row must give, and does not, is no error of the
    policy: `failed`."""
    parameters = inspect.signature(tool.function).parameters
    given = {
        name: value for name, value in fitting(tool.function, kwargs).items() if value is not None
    }
    offered = tool.schema["function"].get("parameters", {})
    if "context" in parameters and "context" not in offered.get("properties", {}):
        given["context"] = context
    for name, parameter in parameters.items():
        needed = parameter.kind == parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        if needed and name not in given and name not in offered.get("properties", {}):
            return {
                "text": f"the row gives {tool.name} no {name} in extra_info.tools_kwargs",
                "failed": True,
            }
    try:
        missing = [
            name
            for name in offered.get("required", ())
            if name not in arguments and name not in given
        ]
        unexpected = [name for name in arguments if name not in offered.get("properties", {})]
        for problem, names in (("missing", missing), ("unexpected", unexpected)):
            if names:
                raise ValueError(f"{tool.name}: {problem} arguments: {', '.join(names)}")
        result = tool.function(**{**given, **arguments})
        seen = isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[0], str)
        text, images, info = (*result, {})[:3] if seen else (result, [], {})
        if not isinstance(info or {}, dict):
            raise ValueError(f"{tool.name} returned {info!r:.40} where a dict is expected")
        text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        images = [b64encode(encode(image)).decode() for image in images or ()]
        return {"text": trim(text), "images": images, "info": info or {}}
    except MemoryError:
        raise
    except Exception as error:  # whatever it is, the policy reads it and may do better
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        return {"text": error_text(text, tool.role), "error": True}


def as_reply(sent: dict, tool: Tool) -> ToolReply:
    """From the fields that `Caller` gives, or {"error": why} of a worker that failed."""
    if "text" in sent:
        images = [b64decode(image) for image in sent.get("images", [])]
        return ToolReply(
            sent["text"],
            images,
            error=sent.get("error", False),
            failed=sent.get("failed", False),
            info=sent.get("info", {}),
            role=tool.role,
        )
    why = sent["error"]
    if tool.ours or why.startswith(NO_WORKER):
        return ToolReply(why, failed=True, role=tool.role)
    return ToolReply(error_text(why, tool.role), error=True, role=tool.role)


class Caller:
    """What a worker does: the fields of a reply to each job."""

    def __init__(self, spec: str):
        given = json.loads(spec)
        self.tools, self.methods = load_tools(given["tools"]), given["methods"]
        self.live, self.function = None, None
        environment = given["environment"]
        if environment and is_class(environment):
            self.live = Live(environment, self.call_method)
        elif environment:
            self.function = load_function(environment, "--environment")

    def __call__(self, job: tuple) -> dict:
        name, arguments, context, kwargs = job
        if isinstance(context, State):
            try:
                return self.live.answer(name, arguments, context)
            except MemoryError:
                raise
            except Exception as error:
                # not of the method that the policy has called: `call_tool` tells of that
                self.live.end(context.trajectory)  # the sample is lost
                return {"text": describe(error), "failed": True}
        if isinstance(context, list):
            return ask_function(self.function, context, arguments["ground_truth"], kwargs)
        return call_tool(self.tools[name], arguments, context, kwargs)

    def call_method(self, name: str, method: Callable, arguments: Mapping) -> dict:
        return call_tool(Tool(name, method, self.methods[name]), arguments, {}, {})

    def close(self) -> None:
        if self.live:
            self.live.close()

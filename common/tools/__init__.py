"""Tools that the policy calls between its turns: which exist, and how a worker calls them.

A tool is a plain function. It returns text (numbers, booleans, dicts and lists become JSON), or
(text, images), or (text, images, info): images as PIL or encoded, info a dict that describes what
happened. In info "frames" says that the images are frames of a video, and a false "acted" that the
call earns no --tool-bonus. The policy reads an exception, a timeout, a crash or a lack of memory as
an error, since it wrote the call. If the function (or `Tool`) has a true attribute `trusted`, a
timeout, a crash or a lack of memory is not the policy's fault, and the sample is lost. A parameter
named `context` receives the pictures and calls so far (`ToolWorkers.submit` in pools.py);
keyword-only parameters receive values of the row.
"""

import inspect
import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import get_type_hints

from common.pictures import encode
from common.tools import visual
from common.tools.environments import (
    EnvironmentJob,
    FunctionJob,
    LiveEnvironments,
    accepted_kwargs,
    answer_of,
    docstring,
    is_class,
    load_environment,
    method_schemas,
)
from common.types import Tool, ToolReply, error_text, trim
from common.workers.pool import NO_WORKER, load_function
from common.workers.process import describe

CROP = Tool(
    "crop_image_normalized",
    visual.crop_image_normalized,
    visual.CROP_SCHEMA,
    aliases=("crop_image", "zoom_in"),
    role="user",
    trusted=True,
)
SELECT = Tool(
    "select_frames", visual.select_frames, visual.SELECT_SCHEMA, role="user", trusted=True
)
BUILT_IN = {CROP.name: [CROP], SELECT.name: [SELECT], "visual": [CROP, SELECT]}


# --- which tools exist ---


def load_tools(spec: str, environment: str | None = None) -> dict[str, Tool]:
    """{name: tool} of --tools (spec: names of BUILT_IN or FILE.py:NAME, separated by commas), and
    of the methods of --environment if that is a class. ValueErrors name the flag."""
    tools: dict[str, Tool] = {}
    for name in spec.split(","):
        name = name.strip()
        if not name:
            continue
        if name in BUILT_IN:
            loaded = BUILT_IN[name]
        elif ":" in name:
            loaded = [user_tool(name)]
        else:
            # python runs in common/sandbox/: it is never loaded here
            raise ValueError(
                f"--tools {name}: expected FILE.py:NAME or one of {', '.join(BUILT_IN)}, python"
            )
        for tool in loaded:
            if tool.name in tools:
                raise ValueError(f"--tools {spec}: {tool.name} is named twice")
            tools[tool.name] = tool
    if environment and is_class(environment):
        schemas = method_schemas(environment)
        is_replayable = getattr(load_environment(environment), "replayable", True)
        duplicates = sorted(tools.keys() & schemas.keys())
        if duplicates:
            raise ValueError(
                f"--environment {environment}: {', '.join(duplicates)} is one of --tools, too"
            )
        for name, schema in schemas.items():
            tools[name] = Tool(
                name,
                print,  # never called: a worker finds the method in a live environment
                schema,
                # one whose calls cannot be repeated costs the sample when it dies
                trusted=not is_replayable,
                stateful=True,
            )
    return tools


def find_tool(tools: Mapping[str, Tool], name: str) -> Tool | None:
    """The tool with this name or alias."""
    if name in tools:
        return tools[name]
    for tool in tools.values():
        if name in tool.aliases:
            return tool
    return None


def user_tool(spec: str) -> Tool:
    """The function FILE.py:NAME as a tool. Its attributes `trusted` and `schema` are optional:
    without the latter a schema is made from its signature."""
    function = load_function(spec, "--tools")
    try:
        is_special = inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function)
        if is_special or inspect.isclass(function):
            raise ValueError("must be a plain function, not a class, generator or coroutine")
        schema = getattr(function, "schema", None)
        if not schema:
            schema = make_schema(function, spec.rpartition(":")[2])
        check_schema(schema)
    except (AttributeError, KeyError, NameError, TypeError, ValueError) as error:
        raise ValueError(f"--tools {spec}: {type(error).__name__}: {error}") from error
    trusted = bool(getattr(function, "trusted", False))
    return Tool(schema["function"]["name"], function, schema, trusted=trusted)


def check_schema(schema: dict) -> None:
    """ValueError for a schema that no chat template could show, or the AttributeError, KeyError or
    TypeError of reading it."""
    json.dumps(schema)
    function = schema["function"]
    properties = function.get("parameters", {}).get("properties", {})
    is_complete = isinstance(properties, dict) and isinstance(function["name"], str)
    if schema["type"] != "function" or not is_complete:
        raise ValueError(
            'its schema is not {"type": "function", "function": {name, description, parameters}}'
        )


def make_schema(function: Callable, name: str) -> dict:
    """The schema of a function from its type hints and its docstring: the first paragraph, and the
    lines "parameter: text"."""
    from pydantic import PydanticUserError, TypeAdapter  # here: tools with a schema do without

    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters
    lines = [line.strip() for line in docstring(function).splitlines()]
    descriptions: dict[str, str] = {}
    for line in lines:
        parameter_name, _, text = line.partition(":")
        if parameter_name in parameters:
            descriptions[parameter_name] = text.strip()
    summary = []
    for line in takewhile(bool, lines):
        if line.partition(":")[0] not in descriptions:
            summary.append(line)
    properties: dict[str, dict] = {}
    required: list[str] = []
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
            schema = TypeAdapter(hints[parameter.name]).json_schema()
        except PydanticUserError as error:
            raise ValueError(f"no JSON type for the type hint {hints[parameter.name]}") from error
        if parameter.name in descriptions:
            schema["description"] = descriptions[parameter.name]
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": " ".join(summary),
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


# --- how a worker calls tools ---


@dataclass
class ToolJob:
    """Call a tool of --tools."""

    name: str
    arguments: Mapping  # from the policy
    context: Mapping
    kwargs: Mapping  # from the row


def call_tool(tool: Tool, arguments: Mapping, context: Mapping, kwargs: Mapping) -> dict:
    """Call a tool. Returns the fields of a reply, all JSON values; `failed` if the row lacks an
    argument, for which the policy is not to blame."""
    parameters = inspect.signature(tool.function).parameters
    schema = tool.schema["function"].get("parameters", {})
    properties = schema.get("properties", {})
    row_kwargs = {}
    for name, value in accepted_kwargs(tool.function, kwargs).items():
        if value is not None:  # a null of the data is no value
            row_kwargs[name] = value
    if "context" in parameters and "context" not in properties:
        row_kwargs["context"] = context
    for name, parameter in parameters.items():
        is_required = (
            parameter.kind == parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        )
        if is_required and name not in row_kwargs and name not in properties:
            return {
                "text": f"the row gives {tool.name} no {name} in extra_info.tools_kwargs",
                "failed": True,
            }
    try:
        required = [name for name in schema.get("required", ()) if name not in row_kwargs]
        missing = [name for name in required if name not in arguments]
        if missing:
            raise ValueError(f"{tool.name}: missing arguments: {', '.join(missing)}")
        unexpected = [name for name in arguments if name not in properties]
        if unexpected:
            raise ValueError(f"{tool.name}: unexpected arguments: {', '.join(unexpected)}")
        return reply_fields(tool, tool.function(**{**row_kwargs, **arguments}))
    except MemoryError:
        raise
    except ValueError as error:  # the call is refused: no sign that the tool itself is wrong
        return {"text": error_text(str(error), tool.role), "error": True}
    except Exception as error:  # whatever it is, the policy reads it and may do better
        text = error_text(f"{type(error).__name__}: {error}", tool.role)
        return {"text": text, "error": True, "info": {"failure": describe(error)}}


def reply_fields(tool: Tool, result: object) -> dict:
    """The fields of a reply, from what a tool returned."""
    text = result
    images = None
    info = None
    if isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[0], str):
        text, images = result[:2]
        info = result[2] if len(result) == 3 else None
    info = info or {}
    if not isinstance(info, dict):
        raise TypeError(f"{tool.name} returned {info!r:.40} where a dict is expected")
    if not isinstance(text, str):
        text = json.dumps(text, ensure_ascii=False)
    encoded = [b64encode(encode(image)).decode() for image in images or ()]
    return {"text": trim(text), "images": encoded, "info": info}


def as_reply(fields: dict, tool: Tool) -> ToolReply:
    """A reply from the fields that `Caller` returns, or from {"error": reason} of a worker that
    failed."""
    if "text" in fields:
        return ToolReply(
            fields["text"],
            images=[b64decode(image) for image in fields.get("images", [])],
            error=fields.get("error", False),
            failed=fields.get("failed", False),
            info=fields.get("info", {}),
            role=tool.role,
        )
    error = fields["error"]  # here the reason, a text
    if tool.trusted or error.startswith(NO_WORKER):
        return ToolReply(error, failed=True, role=tool.role)
    text = error_text(error, tool.role)
    return ToolReply(text, error=True, info={"failure": error}, role=tool.role)


class Caller:
    """A worker's handler: turns a job into the fields of a reply.

    config: JSON of {"tools": --tools, "environment": --environment, "methods": see below}.
    """

    def __init__(self, config: str):
        flags = json.loads(config)
        self.tools = load_tools(flags["tools"])
        self.methods = flags["methods"]  # {name: schema} of the environment's tools
        self.live: LiveEnvironments | None = None
        self.function: Callable | None = None
        environment = flags["environment"]
        if environment and is_class(environment):
            self.live = LiveEnvironments(environment, self.call_method)
        elif environment:
            self.function = load_function(environment, "--environment")

    def __call__(self, job: ToolJob | EnvironmentJob | FunctionJob) -> dict:
        match job:
            case ToolJob():
                return call_tool(self.tools[job.name], job.arguments, job.context, job.kwargs)
            case EnvironmentJob():
                return self.call_environment(job)
            case FunctionJob():
                return answer_of(self.function, job)

    def call_environment(self, job: EnvironmentJob) -> dict:
        try:
            return self.live.answer(job)
        except MemoryError:
            raise
        except Exception as error:
            # not an exception of the method that the policy has called: `call_tool` reports such
            self.live.end(job.transcript.trajectory)  # the sample is lost
            return {"text": describe(error), "failed": True}

    def call_method(self, name: str, method: Callable, arguments: Mapping) -> dict:
        return call_tool(Tool(name, method, self.methods[name]), arguments, {}, {})

    def close(self) -> None:
        if self.live:
            self.live.close()

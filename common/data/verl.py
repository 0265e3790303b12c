"""Rows in verl's columns: which they must have, what is wrong with a row, and which tools and
answers it asks for."""

import ast
import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from common.data import visual_qa
from common.data.media import for_interpreter
from common.data.render import bare_text, without_nulls
from common.data.rows import JSON_LINE, records_of_table
from common.pictures import BadRow
from common.types import Tool

REQUIRED = ("data_source", "prompt", "reward_model")
OPTIONAL = ("extra_info", "images", "videos", "image", "mm_hint", "agent_name")
FORMAT = (
    "data_source (string), prompt (list of {role, content}, or an already rendered string), "
    "reward_model ({style, ground_truth}), optionally extra_info, images, videos, agent_name; as "
    "common.prepare.gsm8k writes it"
)
# columns of problems with an answer, which common.prepare.math reads
QUESTIONS = {"problem", "question", "input"}
ANSWERS = {"answer", "target", "solution"}
AGENTS = ("single_turn_agent", "tool_agent")  # of the column agent_name; the last is the default
ROLES = ("system", "user", "assistant", "tool")


def to_verl(
    table: pa.Table,
    path: Path,
    flag: str,
    media_root: Path | None,
    with_tools: bool,
    needs_truth: bool = True,
) -> pa.Table:
    """The table of a file in verl's columns; one in Pixel Reasoner's is converted.

    needs_truth: whether a ground truth is required. ValueError for a file in neither's columns.
    """
    columns = table.column_names
    if columns == [JSON_LINE]:
        first_row = next(records_of_table(table), None)
        if not isinstance(first_row, dict):
            return table  # empty, or a first line that is no object, which is reported as a bad row
        columns = list(first_row)
    has_required = set(columns) >= set(REQUIRED)
    if not has_required and set(columns) >= visual_qa.COLUMNS:
        return visual_qa.to_verl(table, path, media_root, with_tools)
    missing = []
    for name in REQUIRED:
        if name not in columns and (needs_truth or name != "reward_model"):
            missing.append(name)
    if missing:
        message = (
            f"{flag}: {path} lacks {', '.join(missing)}; it has the columns {', '.join(columns)}. "
            f"Expected: {FORMAT}."
        )
        names = {name.lower() for name in columns}
        if names & QUESTIONS and names & ANSWERS:
            message += (
                f" python -m common.prepare.math --source {path} --out FOLDER makes such rows of "
                "problems and their answers."
            )
        raise ValueError(message)
    return table


def truth_of(record: dict) -> object:
    """The ground truth of a row; None if it has none, or NaN."""
    ground_truth = (record.get("reward_model") or {}).get("ground_truth")
    return ground_truth if ground_truth == ground_truth else None


def is_messages(text: str) -> bool:
    """Whether a text is a message, a list of messages, or {"messages": [...]}, as JSON or as Python
    prints it."""
    if not text.lstrip().startswith(("[", "{")) or "role" not in text:
        return False
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
        except (MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
            continue
        if isinstance(value, dict):
            value = value.get("messages", [value])
        return is_list_of_messages(value)
    return False


def is_list_of_messages(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, dict) and {"role", "content"} <= item.keys() for item in value)


def row_problem(record: dict | str, needs_truth: bool = True) -> str | None:
    """Why this record cannot be used, in a few words; None if it can."""
    if isinstance(record, str):
        return record  # why the row cannot be read
    prompt = record.get("prompt")
    reward_model = record.get("reward_model")
    if not isinstance(record.get("data_source"), str):
        return f"data_source is {record.get('data_source')!r}, expected a string"
    if needs_truth and (not isinstance(reward_model, dict) or truth_of(record) is None):
        return "reward_model.ground_truth is missing"
    if not isinstance(reward_model, dict | None):
        return f"reward_model is {reward_model!r:.80}, expected an object"
    if not isinstance(record.get("extra_info"), dict | None):
        return f"extra_info is {record['extra_info']!r:.80}, expected an object"
    agent = record.get("agent_name") or AGENTS[-1]
    if agent not in AGENTS:
        hint = "a loop of your own becomes an --environment (docs/environments.md)"
        return f"agent_name {agent!r:.40}: known are {', '.join(AGENTS)}; {hint}"
    if not isinstance(prompt, list | str):
        return f"prompt is {prompt!r:.80}, expected a list of messages or a string"
    if isinstance(prompt, str):
        if is_messages(prompt):
            return (
                "prompt is the text of a list of messages: write the list itself, "
                "json.loads(prompt)"
            )
    else:
        for message in prompt:
            if not isinstance(message, dict) or not isinstance(message.get("content"), str):
                return f"message {message!r:.80} is not {{role, content}} with a string as content"
            if message.get("role") not in ROLES:
                return f"unknown role {message.get('role')!r}, expected one of {', '.join(ROLES)}"
    return None if bare_text(prompt).strip() else "prompt is empty"


def tools_kwargs(record: Mapping) -> dict:
    """A row's keyword arguments for tools as verl writes them: {name: {"create_kwargs": {...}}}.

    They are `extra_info.tools_kwargs`, or else PyVision's picture or video.
    """
    kwargs = (record.get("extra_info") or {}).get("tools_kwargs")
    if kwargs:
        return kwargs
    hint = record.get("mm_hint")
    if isinstance(hint, Mapping) and hint.get("hint_path"):
        return for_interpreter(hint, bare_text(record["prompt"]))
    return {}


def row_tools(record: Mapping, tools: Mapping[str, Tool]) -> dict[str, dict]:
    """The tools that a row offers, with the row's own keyword arguments: {name: kwargs}.

    With the `agent_name` "single_turn_agent" it offers none; else those that its `tools_kwargs`
    name, or all if they name none. BadRow for a name that is not in `tools`.
    """
    if record.get("agent_name") == "single_turn_agent":
        return {}
    options_of_tool = {}
    for name, options in tools_kwargs(record).items():
        if options is not None:  # Arrow fills in nulls
            options_of_tool[name] = options
    unknown = sorted(options_of_tool.keys() - tools.keys())
    if unknown:
        raise BadRow(
            f"extra_info.tools_kwargs names {', '.join(unknown)}, which --tools does not offer"
        )
    if not options_of_tool:
        return {name: {} for name in tools}
    kwargs_of_tool: dict[str, dict] = {}
    for name, options in options_of_tool.items():
        kwargs_of_tool[name] = {}
        for kind in ("create_kwargs", "execute_kwargs"):
            for key, value in (options.get(kind) or {}).items():
                if value is not None:
                    kwargs_of_tool[name][key] = value
    return kwargs_of_tool


def interaction_kwargs(record: Mapping) -> dict:
    """A row's keyword arguments for a function as --environment, which answers the policy."""
    info = record.get("extra_info")
    if not isinstance(info, Mapping):
        return {}
    return without_nulls(info.get("interaction_kwargs")) or {}


def answer_kwargs(record: Mapping, answered_rows: str) -> dict | None:
    """A row's keyword arguments for the function that answers the policy; None if none does.

    answered_rows: "all", "own" (those with arguments for the function) or "none".
    """
    if record.get("agent_name") == "single_turn_agent":
        return None
    kwargs = interaction_kwargs(record)
    if answered_rows == "all" or (answered_rows == "own" and kwargs):
        return kwargs
    return None


def ignored_request(record: Mapping, tools: Mapping[str, Tool], answered_rows: str) -> str:
    """What verl's columns ask for in a row and the flags do not provide; "" if nothing.

    answered_rows: as in `answer_kwargs`.
    """
    if interaction_kwargs(record) and answered_rows == "none":
        return "extra_info.interaction_kwargs: no function is given as --environment"
    agent = record.get("agent_name") or ""
    if tools or agent not in ("", "tool_agent"):
        return ""
    is_unanswered = agent == "tool_agent" and answer_kwargs(record, answered_rows) is None
    if is_unanswered or without_nulls(tools_kwargs(record)):
        return "agent_name tool_agent, or extra_info.tools_kwargs: no --tools are given"
    return ""

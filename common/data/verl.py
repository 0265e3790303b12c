"""Rows in verl's columns: what they must have, and what is wrong with one."""

import ast
import json
from pathlib import Path

import pyarrow as pa

from common.data import visual_qa
from common.data.render import bare_text
from common.data.rows import JSON_LINE, records

REQUIRED = ("data_source", "prompt", "reward_model")
OPTIONAL = ("extra_info", "images", "videos", "image", "mm_hint", "agent_name")
FORMAT = (
    "data_source (string), prompt (list of {role, content}, or an already rendered string), "
    "reward_model "
    "({style, ground_truth}), optionally extra_info, images, videos, agent_name; as "
    "common.prepare.gsm8k writes it"
)
AGENTS = ("single_turn_agent", "tool_agent")  # of the column agent_name
ROLES = ("system", "user", "assistant", "tool")


def to_verl(
    table: pa.Table,
    path: Path,
    flag: str,
    media_root: Path | None,
    with_tools: bool,
    needs_truth: bool = True,
) -> pa.Table:
    """The table of a file, in verl's columns or Pixel Reasoner's, in verl's. ValueError if it has
    neither."""
    columns = table.column_names
    if columns == [JSON_LINE]:
        columns = next(records(table), REQUIRED)
    if set(columns) >= visual_qa.COLUMNS and not set(REQUIRED) <= set(columns):
        return visual_qa.to_verl(table, path, media_root, with_tools)
    missing = [
        name for name in REQUIRED if name not in columns and (needs_truth or name != "reward_model")
    ]
    # a first line that is no JSON object is reported as a bad row
    if missing and not isinstance(columns, str):
        has = ", ".join(columns)
        raise ValueError(
            f"{flag}: {path} lacks {', '.join(missing)}; it has the columns {has}. Expected: "
            f"{FORMAT}."
        )
    return table


def truth_of(record: dict) -> object:
    """The ground truth of a row; None if it has none, or NaN."""
    return (
        truth
        if (truth := (record.get("reward_model") or {}).get("ground_truth")) == truth
        else None
    )


def is_messages(text: str) -> bool:
    """Is it a list of messages, or one, that has become a text: as JSON, or as Python prints it?"""
    if not text.lstrip().startswith(("[", "{")) or "role" not in text:
        return False
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
        except (MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
            continue
        if isinstance(value, dict):
            value = value.get("messages", [value])
        are_messages = isinstance(value, list) and bool(value)
        return are_messages and all(
            isinstance(item, dict) and {"role", "content"} <= item.keys() for item in value
        )
    return False


def row_problem(record: dict | str, needs_truth: bool = True) -> str | None:
    """Why this record cannot be used, in a few words; None if it can."""
    if isinstance(record, str):
        return record
    prompt, reward_model = record.get("prompt"), record.get("reward_model")
    if not isinstance(record.get("data_source"), str):
        return f"data_source is {record.get('data_source')!r}, expected a string"
    if needs_truth and (not isinstance(reward_model, dict) or truth_of(record) is None):
        return "reward_model.ground_truth is missing"
    if not isinstance(reward_model, dict | None):
        return f"reward_model is {reward_model!r:.80}, expected an object"
    if not isinstance(record.get("extra_info"), dict | None):
        return f"extra_info is {record['extra_info']!r:.80}, expected an object"
    if (agent := record.get("agent_name") or AGENTS[1]) not in AGENTS:
        own = "a loop of your own becomes an --environment (docs/environments.md)"
        return f"agent_name {agent!r:.40}: known are {', '.join(AGENTS)}; {own}"
    if not isinstance(prompt, list | str):
        return f"prompt is {prompt!r:.80}, expected a list of messages or a string"
    if isinstance(prompt, str) and is_messages(prompt):
        return "prompt is the text of a list of messages: write the list itself, json.loads(prompt)"
    for message in prompt if isinstance(prompt, list) else ():
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            return f"message {message!r:.80} is not {{role, content}} with a string as content"
        if message.get("role") not in ROLES:
            return f"unknown role {message.get('role')!r}, expected one of {', '.join(ROLES)}"
    return None if bare_text(prompt).strip() else "prompt is empty"

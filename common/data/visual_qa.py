r"""Rows as Pixel Reasoner publishes them for reinforcement learning and evaluation, in verl's
format.

    question, answer (list of acceptable ones, \boxed{} or not), qid, image (list of paths),
    is_video (or null)

A row's data_source is visual_qa/BENCHMARK, the benchmark being what stands before the first "-" of
its qid, else the file's name. The paths of a video are its frames. The question is followed by the
guideline that the policy was trained with.
"""

import filecmp
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from common.data.rows import JSON_LINE, records
from common.data.table_files import stem_of

COLUMNS = {"question", "answer", "qid", "image"}
# Appended to a question, as in the paper's appendix E.1 (arXiv 2505.15966); that the tool's name is
# longer is theirs.
WITH_TOOLS = (
    "\n\n\n\nGuidelines: Understand the given visual information and the user query. "
    "Determine if it is beneficial to "
    "employ the given visual operations (tools). For a video, we can look closer by "
    "`select_frames`. For an image, we "
    "can look closer by `crop_image`. Reason with the visual information step by step, and "
    "put your final answer "
    "within \\boxed{}."
)
WITHOUT_TOOLS = "\n\nPlease think step by step, and put your final answer within \\boxed{}."


def to_verl(table: pa.Table, path: Path, media_root: Path | None, with_tools: bool) -> pa.Table:
    """The table of a file in verl's columns, row by row; a row without a question or an answer is
    found to be bad."""
    if table.column_names == [JSON_LINE]:
        return lines_to_verl(table, path, media_root, with_tools)
    rows = table.select(sorted(COLUMNS | {"is_video"} & set(table.column_names))).to_pylist()
    prefix = path_prefix(rows, path, media_root)
    rows = [convert(row, stem_of(path), prefix, with_tools) for row in rows]
    return pa.Table.from_pylist(rows, pa.schema(FIELDS))


def lines_to_verl(
    table: pa.Table, path: Path, media_root: Path | None, with_tools: bool
) -> pa.Table:
    """The same of rows of JSON. What lacks a column stays as it is, and so do the blank lines
    before a row."""
    rows = [
        row if isinstance(row, dict) and row.keys() >= COLUMNS else None for row in records(table)
    ]
    prefix = path_prefix([row for row in rows if row], path, media_root)
    lines = table.column(0).to_pylist()
    for i, row in enumerate(rows):
        if row:
            blank = b"\n" * lines[i].count(b"\n")
            lines[i] = blank + json.dumps(convert(row, stem_of(path), prefix, with_tools)).encode()
    return pa.table({JSON_LINE: pa.array(lines, pa.large_binary())}, metadata=table.schema.metadata)


TEXT, TEXTS = pa.string(), pa.list_(pa.string())
FIELDS = {"data_source": TEXT, "prompt": pa.list_(pa.struct({"role": TEXT, "content": TEXT}))}
FIELDS |= {"images": TEXTS, "videos": pa.list_(TEXTS)}
FIELDS |= {
    "reward_model": pa.struct({"style": TEXT, "ground_truth": TEXTS}),
    "extra_info": pa.struct({"qid": TEXT}),
}


def convert(record: Mapping, file: str, prefix: str, with_tools: bool) -> dict:
    answers, question, qid = (
        record["answer"],
        str(record["question"] or ""),
        str(record["qid"] or ""),
    )
    listed = answers if isinstance(answers, list) else [answers]
    answers = [str(x) for x in listed if x is not None and x == x and str(x).strip()]
    paths = paths_of(record)
    readable = all(isinstance(name, str | None) for name in paths)
    pictures = [prefix + name for name in paths if name] if readable else []
    is_video = bool(record.get("is_video")) and bool(pictures)
    marks = "<video>" if is_video else "<image>" * len(pictures)
    for mark in ("<image>", "<video>"):  # all pictures come first
        question = question.replace(mark, "") if readable else ""
    content = question.strip() and marks + question + (WITH_TOOLS if with_tools else WITHOUT_TOOLS)
    return {
        "data_source": f"visual_qa/{qid.partition('-')[0] if '-' in qid else file}",
        "prompt": [{"role": "user", "content": content}] if content else None,
        "images": [] if is_video else pictures,
        "videos": [pictures] if is_video else [],
        "reward_model": {"style": "rule", "ground_truth": answers or None},
        "extra_info": {"qid": qid},
    }


def paths_of(record: Mapping) -> list:
    return record["image"] if isinstance(record["image"], list) else [record["image"]]


def path_prefix(records: list[dict], path: Path, media_root: Path | None) -> str:
    """ "" where the first picture's path resolves as it stands; else what Pixel Reasoner's script
    makes of it: that moves images/ to FILE_images/, videos/ to FILE_videos/. ValueError if both are
    there and differ."""
    first = next(
        (name for r in records for name in paths_of(r) if name and isinstance(name, str)), ""
    )
    prefix = f"{stem_of(path)}_"
    for folder in (path.parent, media_root or Path()):
        plain = os.path.join(folder, first)
        moved = os.path.join(folder, prefix + first)
        # False for what is no path
        plain_exists, moved_exists = os.path.isfile(plain), os.path.isfile(moved)
        if plain_exists and moved_exists and not filecmp.cmp(plain, moved, shallow=False):
            raise ValueError(
                f"{path}: {plain} and {moved} differ, and either may be meant: move one of "
                "them away"
            )
        if plain_exists or moved_exists:
            return "" if plain_exists else prefix
    return ""

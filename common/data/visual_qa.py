r"""Rows of Pixel Reasoner's data for reinforcement learning and evaluation, in verl's format.

    question, answer (list of acceptable ones, \boxed{} or not), qid, image (list of paths),
    is_video (or null)

A row's data_source is visual_qa/BENCHMARK: the part of its qid before the first "-", or the name of
the file if there is no "-". The paths of a video are its frames. A guideline is appended to the
question: WITH_TOOLS or WITHOUT_TOOLS.
"""

import filecmp
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from common.data.rows import JSON_LINE, records_of_table
from common.data.table_files import stem_of

COLUMNS = {"question", "answer", "qid", "image"}
# Appended to a question, as in the paper's appendix E.1 (arXiv 2505.15966). The paper's name for
# the image tool is longer.
WITH_TOOLS = (
    "\n\n\n\nGuidelines: Understand the given visual information and the user query. Determine if "
    "it is beneficial to employ the given visual operations (tools). For a video, we can look "
    "closer by `select_frames`. For an image, we can look closer by `crop_image`. Reason with the "
    "visual information step by step, and put your final answer within \\boxed{}."
)
WITHOUT_TOOLS = "\n\nPlease think step by step, and put your final answer within \\boxed{}."

TEXT = pa.string()
TEXTS = pa.list_(TEXT)
SCHEMA = pa.schema(
    {
        "data_source": TEXT,
        "prompt": pa.list_(pa.struct({"role": TEXT, "content": TEXT})),
        "images": TEXTS,
        "videos": pa.list_(TEXTS),
        "reward_model": pa.struct({"style": TEXT, "ground_truth": TEXTS}),
        "extra_info": pa.struct({"qid": TEXT}),
    }
)


def to_verl(table: pa.Table, path: Path, media_root: Path | None, with_tools: bool) -> pa.Table:
    """The table of a file in verl's columns, row by row.

    A row without a question, or whose pictures are no paths, has no prompt then, and is a bad row
    later. One without an answer has no ground truth.
    """
    if table.column_names == [JSON_LINE]:
        return lines_to_verl(table, path, media_root, with_tools)
    columns = COLUMNS | ({"is_video"} & set(table.column_names))
    rows = table.select(sorted(columns)).to_pylist()
    prefix = path_prefix(rows, path, media_root)
    converted = [convert(row, stem_of(path), prefix, with_tools) for row in rows]
    return pa.Table.from_pylist(converted, SCHEMA)


def lines_to_verl(
    table: pa.Table, path: Path, media_root: Path | None, with_tools: bool
) -> pa.Table:
    """`to_verl` for lines of JSON. A line that lacks a column, or is no object, stays as it is."""
    rows_by_line: dict[int, dict] = {}
    for i, row in enumerate(records_of_table(table)):
        if isinstance(row, dict) and row.keys() >= COLUMNS:
            rows_by_line[i] = row
    prefix = path_prefix(list(rows_by_line.values()), path, media_root)
    lines = table.column(0).to_pylist()
    for i, row in rows_by_line.items():
        converted = convert(row, stem_of(path), prefix, with_tools)
        # a line begins with a newline for each blank line before it (`lines_of` in rows.py), so
        # that messages can tell its place
        num_blank = lines[i].count(b"\n")
        lines[i] = b"\n" * num_blank + json.dumps(converted).encode()
    return pa.table({JSON_LINE: pa.array(lines, pa.large_binary())}, metadata=table.schema.metadata)


def convert(record: Mapping, stem: str, prefix: str, with_tools: bool) -> dict:
    """A row in verl's columns. stem: of its file's name. prefix: what `path_prefix` returns."""
    question = cell_text(record["question"])
    qid = cell_text(record["qid"])
    benchmark = qid.partition("-")[0] if "-" in qid else stem
    paths = paths_of(record)
    pictures: list[str] = []
    if all(isinstance(path, str | None) for path in paths):
        pictures = [prefix + path for path in paths if path]
        # all pictures go in front of the question, whatever marks it has
        question = question.replace("<image>", "").replace("<video>", "")
    else:
        question = ""  # a question without its pictures: a bad row
    is_video = record.get("is_video") in (True, "true", "True") and bool(pictures)
    marks = "<video>" if is_video else "<image>" * len(pictures)
    prompt = None
    if question.strip():
        guideline = WITH_TOOLS if with_tools else WITHOUT_TOOLS
        prompt = [{"role": "user", "content": marks + question + guideline}]
    return {
        "data_source": f"visual_qa/{benchmark}",
        "prompt": prompt,
        "images": [] if is_video else pictures,
        "videos": [pictures] if is_video else [],
        "reward_model": {"style": "rule", "ground_truth": answers_of(record) or None},
        "extra_info": {"qid": qid},
    }


def cell_text(cell: object) -> str:
    """A text or a number as a text; "" of null, NaN and anything else."""
    is_given = isinstance(cell, str | int | float) and cell == cell
    return str(cell) if is_given else ""


def answers_of(record: Mapping) -> list[str]:
    """The acceptable answers of a row, without nulls, NaN and blank ones."""
    answers = record["answer"]
    if not isinstance(answers, list):
        answers = [answers]
    return [str(x) for x in answers if x is not None and x == x and str(x).strip()]


def paths_of(record: Mapping) -> list:
    return record["image"] if isinstance(record["image"], list) else [record["image"]]


def path_prefix(rows: list[dict], path: Path, media_root: Path | None) -> str:
    """What to put in front of the paths of a file's pictures: "", or "FILE_".

    Pixel Reasoner's script moves images/ to FILE_images/ and videos/ to FILE_videos/, FILE being
    the name of the file of rows. The first picture decides. ValueError if it exists at both places
    and they differ.
    """
    plain_path = first_path(rows)
    prefix = f"{stem_of(path)}_"
    for folder in (path.parent, media_root or Path()):
        plain = os.path.join(folder, plain_path)
        moved = os.path.join(folder, prefix + plain_path)
        plain_exists = os.path.isfile(plain)  # False for a text that cannot be a path
        moved_exists = os.path.isfile(moved)
        if plain_exists and moved_exists and not filecmp.cmp(plain, moved, shallow=False):
            raise ValueError(
                f"{path}: {plain} and {moved} differ, and either may be meant: move one of "
                "them away"
            )
        if plain_exists:
            return ""
        if moved_exists:
            return prefix
    return ""


def first_path(rows: list[dict]) -> str:
    """The path of the first picture of all rows; "" if there is none."""
    for row in rows:
        for path in paths_of(row):
            if path and isinstance(path, str):
                return path
    return ""

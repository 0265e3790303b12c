"""What is in a data file: `python -m common.look FILE`."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jinja2 import TemplateError

from common.data.protocols import spacing
from common.data.render import (
    apply_template,
    bare_text,
    beginning_ids,
    clean_prompt,
    to_messages,
    with_control_tokens_spaced,
)
from common.data.rows import RowFiles, records_of_table
from common.data.verl import row_problem, to_verl, truth_of
from common.files import shorten
from common.hub import EMBEDDED, HUB_FILES, download, load_tokenizer, resolve_model
from common.pictures import BadRow
from common.printing import printable
from common.types import Prompt

# column -> the program that reads rows with it
PROGRAMS = {
    "messages": "sft.py",
    "conversations": "sft.py",
    "message_list": "sft.py",
    "question": "sft.py",
    "responses": "python -m common.score",
}


def show(
    file: Path,
    tokenizer: str | None = None,
    rows: int = 2,
    template_args: dict[str, Any] | None = None,
) -> None:
    """Print what is in a data file: columns, rows per data_source, prompt lengths (in tokens with
    --tokenizer), and some rows."""
    files = RowFiles([file], "FILE", convert=in_verl_columns)
    records = list(files.records())
    problems = [problem_of(record) for record in records]
    usable = [record for record, problem in zip(records, problems) if problem is None]
    print(f"{file}: {len(records)} rows, {len(records) - len(usable)} of them unusable")
    if usable:
        show_columns(files.tables[0], usable[0])
        show_sources(usable)
        loaded_tokenizer = tokenizer_of(tokenizer, template_args) if tokenizer else None
        show_prompts(usable, loaded_tokenizer, row_0_is_usable=problems[0] is None)
    for i, (record, problem) in enumerate(zip(records[:rows], problems)):
        text = f"--- row {i}"
        if problem:
            text += f", unusable: {problem}"
        if isinstance(record, dict):  # else it is the reason why the line is no row, shown above
            text += "\n"
            text += json.dumps(record, indent=2, ensure_ascii=False, default=type_in_brackets)
        print(shorten(text, 10**9))  # whole, but without what a terminal cannot print


def problem_of(record: dict | str) -> str | None:
    """Why the scripts cannot use this record as a prompt; None if they can. A text in place of a
    record says why the line is no row."""
    problem = row_problem(record, needs_truth=False)
    if problem:
        return problem
    try:
        clean_prompt(record["prompt"])
    except BadRow as error:
        return str(error)
    except (AttributeError, TypeError) as error:  # tool_calls that are no list
        return f"malformed: {type(error).__name__}: {error}"
    return None


def show_columns(table: pa.Table, record: dict) -> None:
    for name, value in record.items():
        kind = type(value).__name__  # rows of JSON are one column of text in Arrow
        if name in table.column_names:
            kind = table.schema.field(name).type
        print(f"  {shorten(name, 200):<16} {kind}")


def show_sources(usable: list[dict]) -> None:
    sources = Counter(record["data_source"] for record in usable)
    for source, count in sources.most_common():
        print(f"data_source {shorten(source, 200)}: {count} rows")
    num_without_truth = sum(truth_of(record) is None for record in usable)
    if num_without_truth:
        print(
            f"{num_without_truth} rows have no reward_model.ground_truth: for --eval-only or an "
            "--environment alone"
        )


def show_prompts(usable: list[dict], tokenizer, row_0_is_usable: bool) -> None:
    """Lengths, and with a tokenizer row 0 as the model sees it."""
    if not tokenizer:
        show_lengths([len(bare_text(record["prompt"])) for record in usable], "characters")
        return
    prompts = [as_given(record, tokenizer) for record in usable]
    try:
        texts = apply_template(prompts, tokenizer)
    except (TemplateError, TypeError) as error:
        problem = printable(f"the chat template refuses a prompt: {error}")
        raise ValueError(problem) from error
    ids_of_texts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    prompt_ids = [beginning_ids(tokenizer, p) + ids for p, ids in zip(prompts, ids_of_texts)]
    show_lengths([len(ids) for ids in prompt_ids], "tokens")
    if not row_0_is_usable:
        return
    template = "by its chat template"
    if isinstance(prompts[0], str):
        template = "as it stands"
        beginning = tokenizer.decode(beginning_ids(tokenizer, prompts[0]))
        if beginning:
            template += f" behind {beginning}"
    text = tokenizer.decode(prompt_ids[0])
    print(f"--- row 0 as the model sees it, {template}\n{printable(text)}")


def show_lengths(lengths: list[int], unit: str) -> None:
    smallest, median, p95, largest = np.percentile(lengths, [0, 50, 95, 100]).astype(int)
    print(f"prompt {unit}: min {smallest}, median {median}, p95 {p95}, max {largest}")


def type_in_brackets(value: object) -> str:
    """What stands for a value that JSON lacks, such as the bytes of a picture."""
    return f"<{type(value).__name__}>"


def as_given(record: dict, tokenizer) -> Prompt:
    """A row's prompt as the chat template gets it, without --tools; marks stand for pictures."""
    prompt = clean_prompt(record["prompt"])
    if not isinstance(prompt, str):
        prompt = with_control_tokens_spaced(prompt, spacing(tokenizer))
    return to_messages(prompt, tokenizer)


def in_verl_columns(table: pa.Table, path: Path) -> pa.Table:
    """As `to_verl`; SystemExit for rows that another program reads."""
    try:
        return to_verl(table, path, "FILE", media_root=None, with_tools=False, needs_truth=False)
    except ValueError as error:
        first_record = next(records_of_table(table), {})
        readers = [PROGRAMS[name] for name in first_record if name in PROGRAMS]
        if readers:
            raise SystemExit(
                f"{path} is for {readers[0]}; shown here are rows with data_source and prompt"
            ) from error
        raise


def tokenizer_of(model: str, template_args: dict[str, Any] | None = None):
    """The tokenizer of a model by name or folder. Weights are not downloaded, except those of
    smollm2, which are in one file with its tokenizer."""
    if model in EMBEDDED or model == "smollm2":
        model = resolve_model(model)
    elif not Path(model).is_dir():
        kinds = [kind for kind in HUB_FILES if kind != "*.safetensors"]
        model = str(download(model, "--tokenizer", kinds))
    return load_tokenizer(model, template_args=template_args)

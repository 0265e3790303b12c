"""What is in a data file: `python -m common.look FILE`."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa

from common.data.prompts import row_problem, to_verl, truth_of
from common.data.protocols import spacing
from common.data.render import (
    apply_template,
    as_text,
    bare_text,
    beginning_ids,
    clean_prompt,
    to_messages,
)
from common.data.rows import RowFiles, records
from common.files import refuse, shorten
from common.hub import EMBEDDED, load_tokenizer, resolve_model
from common.types import Prompt

CONVERSATIONS = ("messages", "conversations", "message_list", "question")
PROGRAMS = dict.fromkeys(CONVERSATIONS, "sft.py") | {"responses": "python -m common.score"}


def show(file: Path, tokenizer: str | None = None, rows: int = 2) -> None:
    """Show a data file: columns, rows per data_source, prompt lengths (in tokens with --tokenizer),
    and some rows."""
    files = RowFiles([file], "FILE", convert=in_verl_columns)
    problems = [(record, row_problem(record, needs_truth=False)) for record in files.records()]
    usable = [record for record, problem in problems if problem is None]
    print(f"{file}: {len(problems)} rows, {len(problems) - len(usable)} of them unusable")
    for name in usable[0] if usable else ():
        table = files.tables[0]
        kind = (
            table.schema.field(name).type
            if name in table.column_names
            else type(usable[0][name]).__name__
        )
        print(f"  {shorten(name, 200):<16} {kind}")
    for source, count in Counter(record["data_source"] for record in usable).most_common():
        print(f"data_source {shorten(source, 200)}: {count} rows")
    if unscored := sum(truth_of(record) is None for record in usable):
        print(
            f"{unscored} rows have no reward_model.ground_truth: for --eval-only or an "
            "--environment alone"
        )
    texts = [bare_text(record["prompt"]) for record in usable]
    if tokenizer and usable:
        encode = tokenizer_of(tokenizer)
        given = [as_given(record, encode) for record in usable]
        texts = encode(apply_template(given, encode), add_special_tokens=False)["input_ids"]
        texts = [beginning_ids(encode, prompt) + ids for prompt, ids in zip(given, texts)]
    if usable:
        low, mid, high, top = np.percentile([len(x) for x in texts], [0, 50, 95, 100]).astype(int)
        print(
            f"prompt {'tokens' if tokenizer else 'characters'}: min {low}, median {mid}, p95 "
            f"{high}, max {top}"
        )
    if tokenizer and usable and problems[0][1] is None:
        with_template = "by its chat template"
        if isinstance(given[0], str):
            with_template = "as it stands"
            if beginning := encode.decode(beginning_ids(encode, given[0])):
                with_template += f" behind {beginning}"
        print(f"--- row 0 as the model sees it, {with_template}\n{encode.decode(texts[0])}")
    for i, (record, problem) in enumerate(problems[:rows]):
        text = json.dumps(
            record, indent=2, ensure_ascii=False, default=lambda x: f"<{type(x).__name__}>"
        )
        print(f"--- row {i}{f', unusable: {problem}' if problem else ''}\n{shorten(text, 10**9)}")


def as_given(record: dict, tokenizer) -> Prompt:
    """A row's prompt as the chat template gets it, without --tools: pictures, if there are any, as
    their marks."""
    prompt = clean_prompt(record["prompt"])
    messages = prompt if isinstance(prompt, str) else as_text(prompt, spacing(tokenizer))
    return to_messages(messages, tokenizer)


def in_verl_columns(table: pa.Table, path: Path) -> pa.Table:
    """As `to_verl`; SystemExit for rows that another program reads."""
    try:
        return to_verl(table, path, "FILE", None, False, needs_truth=False)
    except ValueError:
        reader = next(
            (PROGRAMS[name] for name in next(records(table), ()) if name in PROGRAMS), None
        )
        refuse(
            reader is not None,
            f"{path} is for {reader}; shown here are rows with data_source and prompt",
        )
        raise


def tokenizer_of(model: str):
    """The tokenizer of a model by name or folder; of a hub id no weights are fetched."""
    return load_tokenizer(resolve_model(model) if model in (*EMBEDDED, "smollm2") else model)

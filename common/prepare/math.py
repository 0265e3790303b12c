r"""MATH-style problems as verl's parquet: train.parquet and test.parquet, answers in \boxed{}.

    python -m common.prepare.math --out data/math
    python -m common.prepare.math --out data/math --source FOLDER           # its snapshot;
    train.jsonl and test.jsonl
    python -m common.prepare.math --out data/benchmarks --source FOLDER     # aime24_test.jsonl,
    amc23_test.jsonl, …
    python -m common.prepare.math --out data/aime24 --source aime24_test.jsonl

Files are .jsonl, .json or .parquet, their columns problem, question or input (SVAMP: Body and
Question); answer or target, or else a solution with a \boxed{}. Options or choices (sat_math,
mmlu_stem, AGIEval) go into the prompt, and the truth is their letter. Files whose name ends in
"train" make train.parquet, all others test.parquet; "aime24_test.jsonl" becomes the data_source
"math/aime24", so that an evaluation of a whole folder lists its files.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from huggingface_hub import hf_hub_download

from common.data.rows import RowFiles
from common.data.table_files import FETCH, find_files, is_hub_id, sources_in, stem_of
from common.files import user_errors
from common.flags import Files, call_program
from common.prepare.gsm8k import SCHEMA
from common.prepare.writing import downloading, write_splits
from common.rewards import boxed_reward, reward_function
from common.rewards.math import last_boxed, normalized_truth

REPOSITORY = "DigitalLearningGmbH/MATH-lighteval"
PUBLISHED = {"problem", "level", "type", "solution"}  # columns of its parquet files
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
SPLITS = ("train", "test")
CHOICE = "Answer with the letter of the right option."
LETTERS = "ABCDEFGHIJK"
SHARD = re.compile(r"-\d{5}-of-\d{5}(-[0-9a-f]{16})?$")
OPTION_MARK = re.compile(r"(?:^|\s)\(?([A-K])[).:]\s*")


@dataclass
class Args:
    out: Path  # folder for train.parquet and test.parquet
    # "hub" (DigitalLearningGmbH/MATH-lighteval, from HF_ENDPOINT), or files or folders of them
    source: Files = "hub"
    # rows that are unusable: stop, or count and drop them
    bad_rows: Literal["error", "drop"] = "error"


def main(args: Args) -> None:
    # read everything first: a bad line leaves no half data set behind
    rows, unusable = {split: [] for split in SPLITS}, []
    is_hub = args.source in ("hub", REPOSITORY)
    for split, row in read_hub() if is_hub else read_files(args.source):
        if isinstance(row, str):
            unusable.append(row)
            continue
        row["extra_info"] |= {"split": split, "index": len(rows[split])}
        rows[split].append(row)
    if unusable:
        drop = args.bad_rows == "drop"
        listed = "".join(f"\n  {why}" for why in unusable[:5])
        state = "dropped" if drop else "--bad-rows drop drops them"
        message = f"{len(unusable)} unusable rows ({state}); the first:{listed}"
        if not drop or not any(rows.values()):
            raise ValueError(message)
        print(f"warning: {message}")
    write_splits(
        args.out, {split: pa.Table.from_pylist(rows[split], schema=SCHEMA) for split in SPLITS}
    )


def read_hub() -> Iterator[tuple[str, dict | str]]:
    """(split, verl's row or why it is none) of MATH's 7,500 training and 5,000 test problems, from
    hub or cache."""
    for split in SPLITS:
        name = f"data/{split}-00000-of-00001.parquet"
        with downloading(REPOSITORY, "give --source with a file of rows or a folder of them"):
            path = hf_hub_download(REPOSITORY, name, repo_type="dataset")
        for row in to_rows(RowFiles([path], "--source"), REPOSITORY):
            yield split, row


def read_files(source: str) -> Iterator[tuple[str, dict | str]]:
    """(split, verl's row or why it is none) of the rows of the files that --source names."""
    for path in source_files(source):
        files = RowFiles([path], "--source")
        stem = SHARD.sub("", stem_of(path))
        name, ending = re.fullmatch(r"(.*?)(?:(?:^|[-_])(train|test))?", stem).groups()
        folder = path.resolve().parent
        if folder.name == "data":  # of a snapshot
            folder = folder.parent
        data_source = f"math/{name or folder.name}"
        if stem != stem_of(path) and set(files.tables[0].column_names) == PUBLISHED:
            data_source = REPOSITORY
        if reward_function(data_source) is not boxed_reward:
            raise ValueError(
                f"{path}: the data_source {data_source} is not scored by its box; rename file "
                "or folder"
            )
        count = 0
        for row in to_rows(files, data_source):
            yield ending or "test", row
            count += 1
        if not count:
            raise ValueError(f"{path}: no rows")


def source_files(source: str) -> list[Path]:
    """The files that --source names; of a folder those in it, else in its data/. FileNotFoundError
    without any."""
    paths = []
    for name in source.split(","):
        for path in find_files(name.strip(), "--source"):
            inside = [path] if path.is_file() else sources_in(path) or sources_in(path / "data")
            if not inside:
                remedy = f"; {FETCH.format(path)}" if is_hub_id(path) else ""
                raise FileNotFoundError(
                    f'--source {path}: expected "hub", or files of rows or a folder of them{remedy}'
                )
            paths += inside
    return paths


def to_rows(files: RowFiles, data_source: str) -> Iterator[dict | str]:
    """verl's rows without split and index; the place and the reason of those that are unusable."""
    for index, record in enumerate(files.records()):
        try:
            if isinstance(record, str):
                raise ValueError(record)
            row = to_row(record, data_source)
        except ValueError as error:
            row = f"{files.place(index)}: {error}"
        yield row


def to_row(record: dict, data_source: str) -> dict:
    """verl's row without split and index. ValueError with the reason if it is unusable."""
    question, ground_truth, answer = read_record(record)
    normalized_truth(ground_truth)
    f"{question}{answer}".encode()  # half a surrogate pair cannot be written
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"question": question, "answer": answer},
    }


def read_record(record: dict) -> tuple[str, str, str]:
    """(question, ground truth, answer as published: the solution, where there is one). ValueError
    with the reason."""
    record = {key.lower(): value for key, value in record.items() if value is not None}
    question = next(
        (record[key] for key in ("problem", "question", "input") if key in record), None
    )
    if not isinstance(question, str) or not question.strip():
        raise ValueError(
            f"no question: expected text as problem, question or input, found {question!r:.80}"
        )
    if "body" in record:  # SVAMP's story, often without its full stop
        body = str(record["body"]).strip()
        question = f"{body} {question}" if body.endswith((".", "?", "!")) else f"{body}. {question}"
    options = read_options(record)
    if options:
        letter = right_option(record, options)
        lines = "".join(f"\n({name}) {text}" for name, text in zip(LETTERS, options))
        return f"{question.strip()}{lines}\n{CHOICE}", letter, str(record.get("solution", letter))
    answer = next((record[key] for key in ("answer", "target", "solution") if key in record), None)
    if type(answer) is int or (type(answer) is float and isfinite(answer)):
        # 27.0 is 27
        text = str(answer) if type(answer) is int else np.format_float_positional(answer, trim="-")
    elif isinstance(answer, str):
        text = answer
    else:
        raise ValueError(
            "no answer: expected text or a number as answer, target or solution, found "
            f"{answer!r:.80}"
        )
    ground_truth = last_boxed(text)
    if ground_truth is None and not {"answer", "target"} & set(record):
        raise ValueError("the solution has no complete \\boxed{…}")
    if "####" in text:
        raise ValueError("an answer after #### is GSM8K's format: python -m common.prepare.gsm8k")
    truth = text if ground_truth is None else ground_truth
    return question.strip(), truth.strip(), str(record.get("solution", text))


# --- multiple choice ---


def read_options(record: dict) -> list[str]:
    """The texts of the options without their letters; [] of a question that has none. ValueError
    for other shapes."""
    found = record.get("options", record.get("choices"))
    if found is None and {"a", "b"} <= record.keys():  # a column for each
        found = [record[letter.lower()] for letter in LETTERS if letter.lower() in record]
    if found is None:
        return []
    # ARC: {"text": [...], "label": [...]}
    if isinstance(found, dict) and isinstance(found.get("text"), list):
        found = found["text"]
    elif isinstance(found, dict) and list(found) == list(LETTERS[: len(found)]):
        found = list(found.values())
    elif isinstance(found, str):  # sat_math: A) 10 B) 12 C) 14 D) 16
        parts = OPTION_MARK.split(found)
        marks = [match[1] for match in OPTION_MARK.finditer(found)]
        found = (
            parts[2::2] if marks == list(LETTERS[: len(marks)]) and not parts[0].strip() else None
        )
    is_list = isinstance(found, list) and 2 <= len(found) <= len(LETTERS)
    if not is_list or not all(type(text) in (str, int, float) for text in found):
        raise ValueError(f"options that are no list of 2 to {len(LETTERS)} texts: {found!r:.80}")
    texts = [str(text).strip() for text in found]
    marks = [OPTION_MARK.match(text) for text in texts]
    if all(marks) and [mark[1] for mark in marks] == list(LETTERS[: len(texts)]):
        texts = [text[mark.end() :].strip() for text, mark in zip(texts, marks)]
    return texts


def right_option(record: dict, options: list[str]) -> str:
    """Its letter: given as such, as an index from 0 (MMLU), or as the option's text."""
    found = next(
        (
            record[key]
            for key in ("answer", "target", "label", "correct", "solution")
            if key in record
        ),
        None,
    )
    letters = LETTERS[: len(options)]
    if type(found) is int and 0 <= found < len(options):
        return letters[found]
    if isinstance(found, str):
        boxed = last_boxed(found)
        text = (found if boxed is None else boxed).strip()
        if options.count(text) == 1:
            return letters[options.index(text)]
        letter = text.strip("().: ").upper()
        if len(letter) == 1 and letter in letters:
            return letter
    raise ValueError(
        f"no right option: expected a letter, an index or the text of one, found {found!r:.80}"
    )


if __name__ == "__main__":
    with user_errors():
        main(call_program(Args, "common.prepare.math", __doc__))

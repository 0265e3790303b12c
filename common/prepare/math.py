r"""MATH-style problems as verl's parquet: train.parquet and test.parquet, answers in \boxed{}.

    python -m common.prepare.math --out data/math
    python -m common.prepare.math --out data/math --source FOLDER
    python -m common.prepare.math --out data/aime24 --source aime24_test.jsonl

FOLDER is a snapshot of the hub, or has train.jsonl and test.jsonl, or files of several benchmarks:
aime24_test.jsonl, amc23_test.jsonl, …

Files are .jsonl, .json or .parquet. Their columns are problem, question or input (SVAMP: Body and
Question), and answer or target, or else a solution with a \boxed{}. Options or choices (sat_math,
mmlu_stem, AGIEval) go into the prompt, and the truth is their letter. Files named "train",
"..._train" or "...-train" make train.parquet, all others test.parquet; "aime24_test.jsonl" becomes
the data_source "math/aime24", so that an evaluation of a whole folder lists its files.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Literal

import common.packages  # noqa: F401, one line if a package is missing

import numpy as np
import pyarrow as pa
from huggingface_hub import hf_hub_download

from common.data.rows import RowFiles, split_paths
from common.data.table_files import FETCH, find_files, is_hub_id, sources_in, stem_of
from common.files import user_errors
from common.flags import Files, call_program
from common.prepare import is_hub
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
# ends the stem of a part of a split: -00000-of-00002
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
    rows: dict[str, list[dict]] = {split: [] for split in SPLITS}
    problems = []
    split_rows = read_hub() if is_hub(args.source, REPOSITORY) else read_files(args.source)
    for split, row in split_rows:
        if isinstance(row, str):
            problems.append(row)
            continue
        row["extra_info"] |= {"split": split, "index": len(rows[split])}
        rows[split].append(row)
    if problems:
        drop = args.bad_rows == "drop"
        state = "dropped" if drop else "--bad-rows drop drops them"
        message = f"{len(problems)} unusable rows ({state}); the first:"
        for problem in problems[:5]:
            message += f"\n  {problem}"
        if not drop or not any(rows.values()):
            raise ValueError(message)
        print(f"warning: {message}")
    tables = {}
    for split in SPLITS:
        tables[split] = pa.Table.from_pylist(rows[split], schema=SCHEMA)
    write_splits(args.out, tables)


def read_hub() -> Iterator[tuple[str, dict | str]]:
    """(split, verl's row or why it is unusable) of MATH's 7,500 training and 5,000 test problems,
    from hub or cache."""
    for split in SPLITS:
        name = f"data/{split}-00000-of-00001.parquet"
        with downloading(REPOSITORY, "give --source with a file of rows or a folder of them"):
            path = hf_hub_download(REPOSITORY, name, repo_type="dataset")
        for row in to_rows(RowFiles([path], "--source"), REPOSITORY):
            yield split, row


def read_files(source: str) -> Iterator[tuple[str, dict | str]]:
    """(split, verl's row or why it is unusable) of the files that --source names."""
    for path in source_files(source):
        files = RowFiles([path], "--source")
        stem = SHARD.sub("", stem_of(path))
        is_shard = stem != stem_of(path)
        name, split = re.fullmatch(r"(.*?)(?:(?:^|[-_])(train|test))?", stem).groups()
        folder = path.parent.resolve()  # the hub's cache has links to files of other folders
        if folder.name == "data":  # of a snapshot
            folder = folder.parent
        data_source = f"math/{name or folder.name}"
        if is_shard and set(files.tables[0].column_names) == PUBLISHED:
            data_source = REPOSITORY
        if reward_function(data_source) is not boxed_reward:
            raise ValueError(
                f"{path}: the data_source {data_source} is not scored by its box; rename file "
                "or folder"
            )
        is_empty = True
        for row in to_rows(files, data_source):
            yield split or "test", row
            is_empty = False
        if is_empty:
            raise ValueError(f"{path}: no rows")


def source_files(source: str) -> list[Path]:
    """The files that --source names; for a folder those in it, or if it has none those in its
    data/. FileNotFoundError if there are none."""
    paths = []
    for name in split_paths(source):
        for path in find_files(name, "--source"):
            if path.is_file():
                paths.append(path)
                continue
            inside = sources_in(path) or sources_in(path / "data")
            if not inside:
                remedy = f"; {FETCH.format(path)}" if is_hub_id(path) else ""
                raise FileNotFoundError(
                    f'--source {path}: expected "hub", or files of rows or a folder of them{remedy}'
                )
            paths += inside
    return paths


def to_rows(files: RowFiles, data_source: str) -> Iterator[dict | str]:
    """verl's rows without split and index; for unusable ones their place and the reason."""
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
    normalized_truth(ground_truth)  # raises for one that cannot be scored
    f"{question}{answer}".encode()  # half a surrogate pair cannot be written
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"question": question, "answer": answer},
    }


def read_record(record: dict) -> tuple[str, str, str]:
    """(question, ground truth, text of `read_solution`). ValueError with the reason if one of them
    is missing or unusable."""
    # NaN is what pandas writes for an empty cell; that of an answer stays, and is refused below
    record = {
        key.lower(): value
        for key, value in record.items()
        if value is not None and (value == value or key.lower() in ("answer", "target"))
    }
    question = first_of(record, "problem", "question", "input")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(
            f"no question: expected text as problem, question or input, found {question!r:.80}"
        )
    if "body" in record:  # SVAMP's story, often without its full stop
        body = str(record["body"]).strip()
        if not body.endswith((".", "?", "!")):
            body += "."
        question = f"{body} {question}"
    passage = record.get("passage")  # AGIEval's: the text that the question is about
    if isinstance(passage, str) and passage.strip():
        question = f"{passage.strip()}\n\n{question}"
    question = question.strip()
    options = read_options(record)
    if options:
        letter = right_option(record, options)
        for name, text in zip(LETTERS, options):
            question += f"\n({name}) {text}"
        return f"{question}\n{CHOICE}", letter, read_solution(record, letter)
    answer = read_answer(record)
    ground_truth = last_boxed(answer)
    if ground_truth is None:
        if "answer" not in record and "target" not in record:
            raise ValueError("the solution has no complete \\boxed{…}")
        ground_truth = answer
    if "####" in ground_truth:
        raise ValueError("an answer after #### is GSM8K's format: python -m common.prepare.gsm8k")
    return question, ground_truth.strip(), read_solution(record, answer)


def read_solution(record: dict, answer: str) -> str:
    """The published solution; the answer where there is none."""
    solution = record.get("solution")
    return solution if isinstance(solution, str) and solution.strip() else answer


def read_answer(record: dict) -> str:
    """The answer, the target or the solution as a text; 27.0 is 27. ValueError without one."""
    answer = first_of(record, "answer", "target", "solution")
    if isinstance(answer, str):
        return answer
    if type(answer) is int:
        return str(answer)
    if type(answer) is float and isfinite(answer):
        return np.format_float_positional(answer, trim="-")
    raise ValueError(
        f"no answer: expected text or a number as answer, target or solution, found {answer!r:.80}"
    )


def first_of(record: dict, *columns: str) -> object:
    """The value of the first of these columns that a record has; None if it has none."""
    for column in columns:
        if column in record:
            return record[column]
    return None


# --- multiple choice ---


def given_options(record: dict) -> object:
    """The column of options, or None: an empty one is none."""
    for name in ("options", "choices"):
        options = record.get(name)
        if options not in (None, [], ""):
            return options
    return None


def read_options(record: dict) -> list[str]:
    """The texts of the options without their letters; [] for a question without options. ValueError
    for other shapes."""
    options = given_options(record)
    if options is None and {"a", "b"} <= record.keys():  # a column for each
        letters = [letter for letter in LETTERS if letter.lower() in record]
        if not are_first_letters(letters):
            raise ValueError(f"options {', '.join(letters)}: one between them is missing")
        options = [record[letter.lower()] for letter in letters]
    if options is None:
        return []
    # ARC: {"text": [...], "label": [...]}
    if isinstance(options, dict) and isinstance(options.get("text"), list):
        labels = options.get("label")
        if labels is not None and labels != list(LETTERS[: len(options["text"])]):
            raise ValueError(f"options with the labels {labels!r:.80}, expected A, B, ...")
        options = options["text"]
    elif isinstance(options, dict) and are_first_letters(list(options)):
        options = list(options.values())
    elif isinstance(options, str):
        options = split_options(options)
    is_list = isinstance(options, list) and 2 <= len(options) <= len(LETTERS)
    if not is_list or not all(type(x) in (str, int, float) and x == x for x in options):
        raise ValueError(f"options that are no list of 2 to {len(LETTERS)} texts: {options!r:.80}")
    texts = [str(text).strip() for text in options]
    marks = [OPTION_MARK.match(text) for text in texts]
    if all(marks) and are_first_letters([mark[1] for mark in marks]):
        texts = [text[mark.end() :].strip() for text, mark in zip(texts, marks)]
    return texts


def split_options(text: str) -> list[str] | None:
    """The options in a text such as sat_math's "A) 10 B) 12 C) 14 D) 16"; None if it is not of this
    form."""
    parts = OPTION_MARK.split(text)  # before the first mark, letter, option, letter, option, ...
    if parts[0].strip() or not are_first_letters(parts[1::2]):
        return None
    return parts[2::2]


def are_first_letters(names: list) -> bool:
    return names == list(LETTERS[: len(names)])


def right_option(record: dict, options: list[str]) -> str:
    """The letter of the right option, which may be given as a letter, as an index from 0 (MMLU), or
    as the option's text."""
    answer = first_of(record, "answer", "answerkey", "target", "label", "correct", "solution")
    letters = LETTERS[: len(options)]
    if type(answer) is int and 0 <= answer < len(options):
        # MMLU's options are texts; one that is a number may be what the answer means
        values = given_options(record)
        if values is None:
            values = [record[letter.lower()] for letter in letters]
        if isinstance(values, list) and answer in values and values[answer] != answer:
            raise ValueError(
                f"the answer {answer} may be the option {letters[answer]}, by its index, or the "
                f"value of {letters[values.index(answer)]}"
            )
        return letters[answer]
    if isinstance(answer, str):
        text = last_boxed(answer)
        if text is None:
            text = answer
        text = text.strip()
        letter = text.strip("().: ").upper()
        is_letter = len(letter) == 1 and letter in letters
        if options.count(text) == 1:
            letter_of_text = letters[options.index(text)]
            if is_letter and letter_of_text != letter:
                raise ValueError(
                    f"the answer {text} may be the option {letter}, or the text of {letter_of_text}"
                )
            return letter_of_text
        if is_letter:
            return letter
    raise ValueError(
        f"no right option: expected a letter, an index or the text of one, found {answer!r:.80}"
    )


if __name__ == "__main__":
    with user_errors():
        main(call_program(Args, "common.prepare.math", __doc__))

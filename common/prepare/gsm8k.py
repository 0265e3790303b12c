"""GSM8K as verl's parquet: train.parquet and test.parquet.

    python -m common.prepare.gsm8k --out data/gsm8k
    python -m common.prepare.gsm8k --out data/gsm8k --source FOLDER

FOLDER has train.jsonl and test.jsonl, or is a snapshot of the hub.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import common.packages  # noqa: F401, one line if a package is missing

import pyarrow as pa
from huggingface_hub import hf_hub_download

from common.data.rows import RowFiles
from common.data.table_files import split_files
from common.files import user_errors
from common.flags import call_program
from common.prepare import is_hub
from common.prepare.writing import downloading, write_splits

REPOSITORY = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
FINAL_ANSWER = re.compile(r"#### (-?[0-9.]+|-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?)[.,]?\s*$")

SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"content": pa.string(), "role": pa.string()})),
        "ability": pa.string(),
        "reward_model": pa.struct({"ground_truth": pa.string(), "style": pa.string()}),
        "extra_info": pa.struct(
            {
                "answer": pa.string(),
                "index": pa.int64(),
                "question": pa.string(),
                "split": pa.string(),
            }
        ),
    }
)


@dataclass
class Args:
    out: Path  # folder for train.parquet and test.parquet
    # "hub" (openai/gsm8k, from HF_ENDPOINT) or a folder with the files of both splits
    source: str = "hub"


def main(args: Args) -> None:
    # read both splits first: a missing one leaves no half data set behind
    tables = {split: to_table(read_split(args.source, split), split) for split in ("train", "test")}
    write_splits(args.out, tables)


def read_split(source: str, split: str) -> list[dict[str, str]]:
    """Rows with the keys question and answer, as published. At least one."""
    if is_hub(source, REPOSITORY):
        paths = [download_split(split)]
    else:
        paths = split_files(source, split, "--source")
    if not paths:
        raise FileNotFoundError(
            f'--source {source}: no {split}.jsonl, .json or .parquet in it (expected one, or "hub")'
        )
    files = RowFiles(paths, "--source")
    rows = []
    for index, record in enumerate(files.records()):
        try:
            if isinstance(record, str):
                raise ValueError(record)  # why the row cannot be read
            # raises unless both are texts in Unicode
            "".join([record["question"], record["answer"]]).encode()
            final_answer(record["answer"])
            rows.append({"question": record["question"], "answer": record["answer"]})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{files.place(index)}: expected question, and answer with #### NUMBER: {error!r}"
            ) from error
    if not rows:
        raise ValueError(f"--source {source}: the split {split} has no rows")
    return rows


def download_split(split: str) -> Path:
    """The split's parquet file on the hub, in its local cache."""
    with downloading(
        REPOSITORY, "give --source FOLDER with train.jsonl and test.jsonl, or with a snapshot of it"
    ):
        name = f"main/{split}-00000-of-00001.parquet"
        return Path(hf_hub_download(REPOSITORY, name, repo_type="dataset"))


def to_table(rows: list[dict[str, str]], split: str) -> pa.Table:
    """verl's columns; the ground truth is the number after `#### `, without commas."""
    records = []
    for index, row in enumerate(rows):
        ground_truth = final_answer(row["answer"])
        record = {
            "data_source": REPOSITORY,
            "prompt": [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": ground_truth},
            "extra_info": {"split": split, "index": index, **row},
        }
        records.append(record)
    return pa.Table.from_pylist(records, schema=SCHEMA)


def final_answer(answer: str) -> str:
    """ "… #### 1,234" -> "1234". ValueError unless the text ends with #### and one number."""
    match = FINAL_ANSWER.search(answer)
    if match is None:
        raise ValueError(f"no final answer after #### in {answer!r}")
    number = match[1].replace(",", "").removesuffix(".")
    float(number)  # raises for "1.2.3"
    return number


if __name__ == "__main__":
    with user_errors():
        main(call_program(Args, "common.prepare.gsm8k", __doc__))

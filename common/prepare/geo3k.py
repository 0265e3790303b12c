"""Geometry3K as verl's parquet: train.parquet, test.parquet and, if it is published,
validation.parquet.

    python -m common.prepare.geo3k --out data/geo3k
    python -m common.prepare.geo3k --out data/geo3k --source FOLDER

FOLDER is a snapshot of the hub: train*.parquet, …

Rows as published: problem, with one <image> for each of its images; answer; images, a list of
{bytes, path}. The diagrams are embedded as bytes, so that the files need no --media-root.
"""

from dataclasses import dataclass
from pathlib import Path

import common.packages  # noqa: F401, one line if a package is missing

import pyarrow as pa
from huggingface_hub import snapshot_download

from common.data.rows import RowFiles
from common.data.table_files import split_files
from common.files import user_errors
from common.flags import call_program
from common.prepare import is_hub
from common.prepare.gsm8k import SCHEMA as TEXT_SCHEMA
from common.prepare.writing import downloading, write_splits
from common.rewards.math import normalized_truth

REPOSITORY = "hiyouga/geometry3k"
INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the "
    "final answer. The reasoning process MUST BE enclosed within <think> </think> tags. The final "
    "answer MUST BE put in \\boxed{}."
)
COLUMNS = ("problem", "answer", "images")
SPLITS = {"train": True, "validation": False, "test": True}  # split -> whether it is required

IMAGES = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
SCHEMA = TEXT_SCHEMA.insert(2, pa.field("images", IMAGES))


@dataclass
class Args:
    out: Path  # folder for train.parquet, test.parquet and, if it is published, validation.parquet
    # "hub" (hiyouga/geometry3k, from HF_ENDPOINT) or a folder with the published files
    source: str = "hub"


def main(args: Args) -> None:
    # read everything first: a bad row leaves no half data set behind
    source = str(download()) if is_hub(args.source, REPOSITORY) else args.source
    tables = {}
    for split in SPLITS:
        tables[split] = pa.Table.from_pylist(read_split(source, split), schema=SCHEMA)
    write_splits(args.out, tables)


def download() -> Path:
    """The folder of the hub's parquet files, in its local cache."""
    with downloading(REPOSITORY, "give --source FOLDER with its parquet files"):
        return Path(snapshot_download(REPOSITORY, repo_type="dataset", allow_patterns="*.parquet"))


def read_split(source: str, split: str) -> list[dict]:
    """verl's rows of a split, in order; none if it is optional and missing or empty."""
    paths = split_files(source, split, "--source")
    if SPLITS[split] and not paths:
        raise FileNotFoundError(
            f'--source {source}: expected "hub", or a folder with {split}*.parquet'
        )
    files = RowFiles(paths, "--source")
    rows = []
    for index, record in enumerate(files.records()):
        try:
            if isinstance(record, str):
                raise ValueError(record)
            missing = set(COLUMNS) - set(record)
            if missing:
                raise ValueError(
                    f"lacks {', '.join(sorted(missing))}; it has the columns {', '.join(record)}"
                )
            rows.append(to_row(record, split, len(rows)))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{files.place(index)}: {error}") from error
    if SPLITS[split] and not rows:
        raise ValueError(f"--source {source}: the split {split} has no rows")
    return rows


def to_row(record: dict, split: str, index: int) -> dict:
    """verl's row. Raises with the reason if the problem, its answer or its images are unusable."""
    problem = record["problem"] or ""
    answer = record["answer"]
    images = record["images"] or []
    num_marks = problem.count("<image>")
    if num_marks != len(images):
        raise ValueError(f"{num_marks} times <image> in the problem, but {len(images)} images")
    if not problem.replace("<image>", "").strip():
        raise ValueError("no text in the problem")
    for image in images:
        if not image or not image.get("bytes") or not isinstance(image["bytes"], bytes):
            raise ValueError("an image without its bytes")
    # raises for an answer that cannot be scored
    normalized_truth("" if answer is None else answer)
    return {
        "data_source": REPOSITORY,
        "prompt": [{"role": "user", "content": f"{problem} {INSTRUCTION}"}],
        "images": images,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(answer)},
        "extra_info": {"split": split, "index": index, "answer": str(answer), "question": problem},
    }


if __name__ == "__main__":
    with user_errors():
        main(call_program(Args, "common.prepare.geo3k", __doc__))

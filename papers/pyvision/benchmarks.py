r"""V*, HR-Bench and TIR-Bench in verl's columns, from local copies, with the prompts of
papers.pyvision.rows.

    python -m papers.pyvision.benchmarks --out data/benchmarks \
        --vstar FOLDER --hrbench FOLDER --tir FOLDER

    --vstar    craigwu/vstar_bench: direct_attributes/ and relative_position/, with a .json beside
               each picture
    --hrbench  DreamMr/HR-Bench: hr_bench_4k.tsv and hr_bench_8k.tsv, or one of them
    --tir      Agents-X/TIR-Bench: TIR-Bench.json, and data.zip unpacked

(names on the hub: `hf download NAME --repo-type dataset --local-dir FOLDER`). Each gives a file
with a data_source for each of its parts (vstar/direct_attributes, hrbench-4k/single,
tir_bench/maze, …), which an evaluation lists separately:

    python grpo.py --eval-only --model MODEL \
        --eval-data data/benchmarks/vstar.parquet --eval-rows 2000 \
        --reward-function papers/pyvision/rewards.py:score --tools python --eval-samples 32 \
        --eval-temperature 0.01 --max-turns 30 --max-images 32

In V* as published the first option is always the right one: here options are shuffled, unless
--keep-order is given.
"""

import base64
import csv
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import common.packages  # noqa: F401, one line if a package is missing

import pyarrow as pa

from common.data.rows import RowFiles
from common.files import user_errors
from common.flags import call_program
from common.pictures import BadRow
from common.prepare.writing import stream_rows
from papers.pyvision.prompts import OWN, Wording, picture_facts, wordings_like
from papers.pyvision.rows import answer_of, make_row, read_picture, schema, text_of

VSTAR_PARTS = ("direct_attributes", "relative_position")
HRBENCH_FILES = {"hrbench-4k": "hr_bench_4k.tsv", "hrbench-8k": "hr_bench_8k.tsv"}
LETTERS = "ABCDEFGHIJ"
PICTURE_ENDINGS = (".jpg", ".jpeg", ".png")
TIR_TASKS = (
    "maze",
    "color",
    "word_search",
    "jigsaw",
    "rotation_game",
    "ocr",
    "refcoco",
    "spot_difference",
    "visual_search",
    "symbolic",
    "math",
    "contrast",
    "instrument",
)
# two OCR truths that the benchmark's own evaluation corrects, by the end of the picture's name
OCR_TRUTHS = {"60.jpg": "mobi", "62.jpg": "aires"}
# of items that are not as published
MALFORMED = (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError)
CHOOSE = "Answer with the letter of the right option."


@dataclass
class Args:
    out: Path  # folder for vstar.parquet, hrbench.parquet, tir_bench.parquet
    vstar: Path | None = None  # folder of V*
    hrbench: Path | None = None  # folder of HR-Bench
    tir: Path | None = None  # folder of TIR-Bench
    seed: int = 0  # of the order of V*'s options
    keep_order: bool = False  # V*'s options as published: the right one is A
    like: str | None = None  # file of PyVision-RL's release: its wording, instead of ours
    # rows that are unusable: stop, or count and drop them
    bad_rows: Literal["error", "drop"] = "error"


def main(args: Args) -> None:
    if not (args.vstar or args.hrbench or args.tir):
        raise ValueError("give at least one of --vstar, --hrbench, --tir")
    wordings = wordings_like(args.like) if args.like else OWN
    if "shown" not in wordings:
        raise ValueError(f"--like {args.like}: no row with the env_name pyvision_gym_w_image_hint")
    wording = wordings["shown"]
    choice = pa.struct({"answer": pa.string(), "options": pa.list_(pa.string())})
    drop = args.bad_rows == "drop"
    if args.vstar:
        seed = None if args.keep_order else args.seed
        convert = partial(vstar_row, wording=wording, seed=seed)
        rows = usable(vstar_items(args.vstar), convert, drop)
        stream_rows(args.out / "vstar.parquet", rows, schema(choice))
    if args.hrbench:
        convert = partial(hrbench_row, wording=wording)
        rows = usable(hrbench_items(args.hrbench), convert, drop)
        stream_rows(args.out / "hrbench.parquet", rows, schema(choice))
    if args.tir:
        convert = partial(tir_row, folder=args.tir, wording=wording)
        rows = usable(tir_items(args.tir), convert, drop)
        stream_rows(args.out / "tir_bench.parquet", rows, schema(pa.string()))


def usable(
    items: Iterator[tuple[str, Any]], convert: Callable[[Any], dict], drop: bool
) -> Iterator[dict]:
    """The rows of (place, item); at the end a ValueError with the first unusable ones, unless they
    are dropped."""
    problems = []
    for index, (place, item) in enumerate(items):
        try:
            row = convert(item)
        except BadRow as error:
            problems.append(f"{place}: {error!s:.200}")
        except MALFORMED as error:
            problems.append(f"{place}: malformed: {type(error).__name__}: {error!s:.200}")
        else:
            row["extra_info"]["index"] = index
            yield row
    if not problems:
        return
    state = "dropped" if drop else "--bad-rows drop drops them"
    message = f"{len(problems)} unusable rows ({state}); the first:"
    for problem in problems[:5]:
        message += f"\n  {problem}"
    if not drop:
        raise ValueError(message)
    print(f"warning: {message}")


def choice_row(
    data_source: str,
    picture: object,
    question: object,
    options: list,
    right: int,
    wording: Wording,
    name: str,
) -> dict:
    """The row of a multiple-choice question, whose answer is options[right]."""
    data, size = read_picture(picture, None)
    options = [text_of(option, "an option").strip() for option in options]
    if not 2 <= len(options) <= len(LETTERS):
        raise BadRow(f"{len(options)} options, expected 2 to {len(LETTERS)}")
    lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, options)]
    question_text = "\n".join([text_of(question, "question").strip(), *lines])
    return make_row(
        data_source=data_source,
        messages=wording.messages(f"{question_text}\n{CHOOSE}", picture_facts([size]), pictures=1),
        truth={"answer": LETTERS[right], "options": options},
        question=question_text,
        images=[data],
        info={"id": name, "split": "test"},
    )


# --- V* -------------------------------------------------------------------------------------------


def vstar_items(folder: Path) -> Iterator[tuple[str, Path]]:
    """Each item's path, without the ending of its .json and its picture. An item may lack one of
    them."""
    for part in VSTAR_PARTS:
        files = [file for file in (folder / part).glob("*.*") if not file.name.startswith(".")]
        if not files:
            raise FileNotFoundError(f"--vstar {folder}: there is no {part}/ with files in it")
        for stem in sorted({file.with_suffix("") for file in files}):
            yield str(stem), stem


def vstar_row(stem: Path, wording: Wording, seed: int | None) -> dict:
    """seed: of the order of the options, which does not depend on other items; None: as
    published."""
    record = json.loads(stem.with_name(f"{stem.name}.json").read_bytes())
    pictures = [stem.with_name(stem.name + ending) for ending in PICTURE_ENDINGS]
    picture = next((path for path in pictures if path.is_file()), pictures[0])
    name = f"{stem.parent.name}/{stem.name}"
    order = list(range(len(record["options"])))
    if seed is not None:
        random.Random(f"{seed} {name}").shuffle(order)
    options = [record["options"][i] for i in order]
    return choice_row(
        data_source=f"vstar/{stem.parent.name}",
        picture=str(picture),
        question=record["question"],
        options=options,
        right=order.index(0),
        wording=wording,
        name=name,
    )


# --- HR-Bench -------------------------------------------------------------------------------------


def hrbench_items(folder: Path) -> Iterator[tuple[str, dict]]:
    """The lines of its files. csv leaves texts as they are; pandas would read the option "None" as
    a missing one."""
    csv.field_size_limit(2**31 - 1)  # pictures
    paths = {}
    for benchmark, name in HRBENCH_FILES.items():
        if (folder / name).is_file():
            paths[benchmark] = folder / name
    if not paths:
        raise FileNotFoundError(
            f"--hrbench {folder}: expected {' or '.join(HRBENCH_FILES.values())} there"
        )
    for benchmark, path in paths.items():
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                for number, line in enumerate(csv.DictReader(file, delimiter="\t")):
                    yield f"{path} row {number}", {"benchmark": benchmark} | line
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"--hrbench: {path} is no table with tabs ({error})") from error


def hrbench_row(line: dict, wording: Wording) -> dict:
    category = line["category"]
    letter = line["answer"]
    if category not in ("single", "cross") or letter not in ("A", "B", "C", "D"):
        raise BadRow(
            f"category {category!r:.40}, answer {letter!r:.40}: expected single or cross, A to D"
        )
    options = [line[name] for name in "ABCD"]
    return choice_row(
        data_source=f"{line['benchmark']}/{category}",
        picture=base64.b64decode(text_of(line["image"], "image"), validate=True),
        question=line["question"],
        options=options,
        right="ABCD".index(letter),
        wording=wording,
        name=str(line["index"]),
    )


# --- TIR-Bench ------------------------------------------------------------------------------------


def tir_items(folder: Path) -> Iterator[tuple[str, dict | str]]:
    files = RowFiles([str(folder / "TIR-Bench.json")], "--tir")
    for index, record in enumerate(files.records()):
        yield files.place(index), record


def tir_row(record: dict | str, folder: Path, wording: Wording) -> dict:
    """The row of a record of the published file (image_1, image_2, prompt, answer), or of
    PyVision-RL's copy (images, problem, solution).

    Two pictures stay two; PyVision-RL pastes them side by side.
    """
    if isinstance(record, str):
        raise BadRow(record)
    task = record.get("task") or record.get("category")
    if task not in TIR_TASKS:
        raise BadRow(f"task {task!r:.40}, expected one of {', '.join(TIR_TASKS)}")
    names = record.get("images") or [record.get("image_1"), record.get("image_2")]
    names = [name for name in names if name]
    pictures = [read_picture(name, folder) for name in names]
    if not pictures:
        raise BadRow("no picture: expected image_1, or images")
    question = text_of(record.get("prompt") or record.get("problem"), "prompt")
    question = question.replace("<image>", "").strip()
    sizes = [size for _, size in pictures]
    return make_row(
        data_source=f"tir_bench/{task}",
        messages=wording.messages(question, picture_facts(sizes), len(pictures)),
        truth=tir_truth(record, task, names[0]),
        question=question,
        images=[data for data, _ in pictures],
        info={"id": str(record.get("id", record.get("doc_id", ""))), "split": "test"},
    )


def tir_truth(record: dict, task: str, picture: str) -> str:
    answer = record.get("answer", record.get("solution"))
    truth = json.dumps(answer) if isinstance(answer, list) else answer_of(answer)
    if task == "ocr":
        for ending, corrected in OCR_TRUTHS.items():
            if re.search(rf"(?<!\d){re.escape(ending)}$", picture):
                return corrected
    return truth


if __name__ == "__main__":
    with user_errors():
        main(call_program(Args, "papers.pyvision.benchmarks", __doc__))

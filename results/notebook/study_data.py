"""The rows that studies train on: files in a folder, and the flags that name them to a script."""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import report  # noqa: F401  (puts the repository on the import path)

from common.assets.build import mosaic, tiny, tiny_vl
from common.prepare import gsm8k, reasoning_gym
from common.prepare.math import read_record
from common.prepare.writing import write_splits

# a warm start that guesses well and aims badly
TRAP = {"rows": 4000, "guess": 0.8, "aim": 0.15, "sevens": 1.0}
# reasoning-gym's tasks: settings of the generator for a level, and for a harder one
GYM = {
    "gcd": ({"max_value": 40}, {"max_value": 200}),
    "letter_counting": ({"min_words": 3, "max_words": 6}, {"min_words": 7, "max_words": 10}),
    "family_relationships": (
        {"min_family_size": 3, "max_family_size": 3},
        {"min_family_size": 4, "max_family_size": 4},
    ),
}
GYM_LEVEL_ROWS = {"train_size": 2048, "test_size": 512}
GYM_HARDER_ROWS = {"train_size": 1, "test_size": 64}
TAG = re.compile("</?answer>")
GSM8K_SPLITS = {"train": "train", "eval": "test"}


@dataclass
class Request:
    folder: Path  # where to write
    supervised: bool  # for sft.py?
    gsm8k: str  # a folder or "hub"
    math: Path | None  # a folder with mawps_*.jsonl

    def flags(self, ending: str) -> list:
        train = self.folder / f"train.{ending}"
        evaluation = self.folder / f"eval.{ending}"
        return ["--train-data", train, "--eval-data", evaluation]


def countdown(request: Request) -> list:
    """The demo's problems; to warm up with, searches on others."""
    if not request.supervised:
        tiny.write_demo_data(request.folder)
        return request.flags("parquet")
    tiny.write_warm_start(request.folder / "train.jsonl")
    tiny.write_traces(request.folder / "eval.jsonl", tiny.rl_problems()[0], 1, random.Random(2))
    return request.flags("jsonl")


def trap(request: Request) -> list:
    """Mosaics in which to guess pays."""
    if not request.supervised:
        mosaic.write_rows(request.folder, f"<image>{tiny_vl.QUESTION}", mostly_sevens)
        return request.flags("parquet")
    tiny_vl.write_traces(request.folder, seed=5, **TRAP)
    return ["--train-data", request.folder / "release.json", "--media-root", request.folder]


def mostly_sevens(seed: int) -> Iterator[mosaic.Scene]:
    """Scenes of which six in ten show a 7."""
    rng = random.Random(f"sevens {seed}")
    return (scene for scene in mosaic.scenes(seed) if scene.digit == 7 or rng.random() < 2 / 27)


def gym(task: str, request: Request) -> list:
    """Rows with two examples each. Held out are 512 of the level that is trained on, and behind
    them 64 of a harder one. To supervise, the answers of the same rows, without the examples'.
    The column "hint" has the prompt with the answer in its question, for a teacher."""
    level, harder = GYM[task]
    write_gym(request.folder / "level", task, level, GYM_LEVEL_ROWS)
    write_gym(request.folder / "harder", task, harder, GYM_HARDER_ROWS)
    train = pq.read_table(request.folder / "level" / "train.parquet")
    harder_rows = pq.read_table(request.folder / "harder" / "test.parquet")
    sources = pa.array([f"reasoning_gym/{task}/harder"] * len(harder_rows))
    harder_rows = harder_rows.set_column(0, "data_source", sources)
    level_rows = pq.read_table(request.folder / "level" / "test.parquet")
    evaluation = pa.concat_tables([level_rows, harder_rows])
    if not request.supervised:
        hints = pa.array([hint(row) for row in train.to_pylist()])
        train = train.append_column("hint", hints)
        write_splits(request.folder, {"train": train, "eval": evaluation})
        return request.flags("parquet")
    for name, table in (("train", train), ("eval", level_rows)):
        lines = [json.dumps(solution(row)) + "\n" for row in table.to_pylist()]
        (request.folder / f"{name}.jsonl").write_text("".join(lines))
    return request.flags("jsonl")


def write_gym(folder: Path, task: str, settings: dict, sizes: dict) -> None:
    config = json.dumps(settings)
    args = reasoning_gym.Args(out=folder, task=task, config=config, examples=2, **sizes)
    reasoning_gym.main(args)


def hint(row: dict) -> list[dict]:
    """The prompt of a row, with the answer behind each question, those of the examples included."""
    answers = [message["content"] for message in row["prompt"][1::2]]
    answers.append(row["extra_info"]["answer"])
    prompt = [dict(message) for message in row["prompt"]]
    for question, answer in zip(prompt[::2], answers, strict=True):
        question["content"] += f"\n\nHint: the answer is {TAG.sub('', answer)}."
    return prompt


def solution(row: dict) -> dict:
    """A conversation of which the last message is trained on."""
    messages = [message | {"train": False} for message in row["prompt"]]
    messages.append({"role": "assistant", "content": row["extra_info"]["answer"]})
    return {"messages": messages}


def gsm8k_rows(request: Request) -> list:
    """verl's rows: prompts with their solutions, for any script."""
    tables = {}
    for name, split in GSM8K_SPLITS.items():
        tables[name] = gsm8k.to_table(gsm8k.read_split(request.gsm8k, split), split)
    write_splits(request.folder, tables)
    return request.flags("parquet")


def gsm8k_as(form: Callable[[list[dict]], dict], problems: int, request: Request) -> list:
    """Supervised rows in a format that TRL reads, too (trl_work.py), each with so many problems."""
    for name, split in GSM8K_SPLITS.items():
        solved = gsm8k.read_split(request.gsm8k, split)
        lines = []
        for start in range(0, len(solved) - problems + 1, problems):
            row = form(solved[start : start + problems])
            lines.append(json.dumps(row) + "\n")
        (request.folder / f"{name}.jsonl").write_text("".join(lines))
    return request.flags("jsonl")


def mawps(request: Request) -> list:
    """Its problems as GSM8K's rows, without solutions; 400 of them held out. Many differ in their
    numbers alone, or in nothing: the first of each stays, so that no held-out problem is trained on
    with other numbers."""
    lines = []
    for path in sorted(request.math.glob("mawps_*.jsonl")) if request.math else []:
        lines += path.read_text().splitlines()
    if not lines:
        raise SystemExit(f"--math {request.math}: expected a folder with mawps_*.jsonl")
    distinct: dict[str, dict] = {}
    for line in lines:
        question, truth, _ = read_record(json.loads(line))
        words = " ".join(re.findall("[a-z]+", question.lower()))
        distinct.setdefault(words, {"question": question, "answer": f"#### {truth}"})
    rows = list(distinct.values())
    random.Random("mawps").shuffle(rows)
    train = gsm8k.to_table(rows[400:], "train")
    evaluation = gsm8k.to_table(rows[:400], "test")
    write_splits(request.folder, {"train": train, "eval": evaluation})
    return request.flags("parquet")


def pair(solved: list[dict]) -> dict:
    """A row of reinforcement learning with its solution; for TRL: prompt and completion."""
    (problem,) = solved
    prompt = [{"role": "user", "content": f"{problem['question']} {gsm8k.INSTRUCTION}"}]
    return {"prompt": prompt, "extra_info": {"answer": problem["answer"]}}


def chat(solved: list[dict]) -> dict:
    """One conversation, {role, content}."""
    messages = []
    for problem in solved:
        messages.append({"role": "user", "content": problem["question"]})
        messages.append({"role": "assistant", "content": problem["answer"]})
    return {"messages": messages}


def from_value(solved: list[dict]) -> dict:
    """One conversation, {from, value}, from user and assistant: TRL does not take LLaMA-Factory's
    human and gpt for these."""
    turns = []
    for message in chat(solved)["messages"]:
        turns.append({"from": message["role"], "value": message["content"]})
    return {"conversations": turns}


DATA: dict[str, Callable[[Request], list]] = {
    "countdown": countdown,
    "trap": trap,
    **{f"gym-{task.replace('_', '-')}": partial(gym, task) for task in GYM},
    "gsm8k": gsm8k_rows,
    "mawps": mawps,
    "gsm8k-pairs": partial(gsm8k_as, pair, 1),
    "gsm8k-chats": partial(gsm8k_as, chat, 2),
    "gsm8k-from-value": partial(gsm8k_as, from_value, 1),
}


def write_rows(data: str, request: Request) -> list:
    """The rows called `data`, as flags of a script."""
    request.folder.mkdir(parents=True, exist_ok=True)
    return DATA[data](request)

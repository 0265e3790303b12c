"""Countdown problems as TinyZero's parquet: train.parquet and test.parquet.

    python -m common.prepare.countdown --out data/countdown
    python -m common.prepare.countdown --out data/countdown --source countdown_tasks_3to4.parquet

Generated rows are solvable by construction: the target is the value of a random expression over the
numbers. Test problems never occur in train, whatever the order of their numbers. The same flags
give the same files.
"""

import random
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, NamedTuple

import common.packages  # noqa: F401, one line if a package is missing

import pyarrow as pa

from common.data.rows import RowFiles
from common.data.table_files import split_files
from common.files import user_errors
from common.flags import Files, call_program
from common.prepare.writing import write_splits
from common.progress import Progress

TEMPLATES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
TRUTH = pa.struct({"numbers": pa.list_(pa.int64()), "target": pa.int64()})
SCHEMA = pa.schema(
    {
        "nums": pa.list_(pa.int64()),
        "target": pa.int64(),
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"content": pa.string(), "role": pa.string()})),
        "ability": pa.string(),
        "reward_model": pa.struct({"ground_truth": TRUTH, "style": pa.string()}),
        "extra_info": pa.struct({"index": pa.int64(), "split": pa.string()}),
    }
)

# they have no effect with --source
GENERATOR_FLAGS = ("seed", "min_number", "max_number", "min_target", "max_target", "operands")
MAX_TRIES = 200_000  # random expressions for one more problem before giving up (about a second)


class Problem(NamedTuple):
    numbers: tuple[int, ...]
    target: int
    expression: str  # a solution; "" if none is known

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """Problems with the same key have the same solutions."""
        return tuple(sorted(self.numbers)), self.target


@dataclass
class Args:
    out: Path  # folder for train.parquet and test.parquet
    train_size: int = 327_680  # rows in train
    test_size: int = 1_024  # rows in test
    template: Literal["base", "qwen-instruct", "compact"] = "base"  # prompt text
    # published files (target, nums): take their rows in order instead of generating
    source: Files | None = None
    seed: int = 42  # of the generator
    min_number: int = 1  # smallest given number
    max_number: int = 99  # largest given number
    min_target: int = 10  # smallest target
    max_target: int = 100  # largest target
    operands: tuple[int, ...] = (3, 4)  # how many numbers a problem gives; each equally often

    def __post_init__(self):
        if self.train_size < 1 or self.test_size < 1:
            raise ValueError(
                f"--train-size {self.train_size} and --test-size {self.test_size} must be at "
                "least 1"
            )
        # the scorer reads at most six digits
        if not 1 <= self.min_number <= self.max_number <= 999_999:
            raise ValueError(
                f"--min-number {self.min_number} --max-number {self.max_number}: expected 1 … "
                "999999"
            )
        if self.min_target > self.max_target:
            raise ValueError(
                f"--min-target {self.min_target} is above --max-target {self.max_target}"
            )
        if not self.operands or min(self.operands) < 2:
            raise ValueError(f"--operands {self.operands}: expected counts of at least 2")
        changed = []
        for field in fields(self):
            if field.name in GENERATOR_FLAGS and getattr(self, field.name) != field.default:
                changed.append("--" + field.name.replace("_", "-"))
        if self.source and changed:
            raise ValueError(
                f"{' '.join(changed)} steer the generator and have no effect with --source"
            )


def main(args: Args) -> None:
    if args.source:
        train, test = split_published(read_published(args.source), args.train_size, args.test_size)
        print(
            f"{args.source}: dropped {args.train_size - len(train)} train rows that occur in test"
        )
    else:
        test = generate(args, "test", args.test_size, exclude=set())
        test_keys = {problem.key for problem in test}
        train = generate(args, "train", args.train_size, exclude=test_keys)
    tables = {
        "train": to_table(train, args.template, "train"),
        "test": to_table(test, args.template, "test"),
    }
    write_splits(args.out, tables)


def generate(args: Args, split: str, size: int, exclude: set[tuple]) -> list[Problem]:
    problems = iter_problems(
        seed=f"{args.seed}/{split}",
        operands=args.operands,
        numbers=(args.min_number, args.max_number),
        targets=(args.min_target, args.max_target),
        exclude=exclude,
    )
    return [next(problems) for _ in Progress(f"{split} rows", size)]


def iter_problems(
    *,
    seed: int | str,
    operands: tuple[int, ...] = (3, 4),
    numbers: tuple[int, int] = (1, 99),
    targets: tuple[int, int] = (10, 100),
    exclude: Collection[tuple] = frozenset(),
) -> Iterator[Problem]:
    """Endless solvable problems, no two with the same key, none with a key in `exclude`. Ranges are
    inclusive. The counts in `operands` alternate.
    """
    rng = random.Random(seed)
    existing = set(exclude)
    num_problems = 0
    while True:
        count = operands[num_problems % len(operands)]
        for _ in range(MAX_TRIES):
            problem = try_problem(rng, count, numbers, targets)
            if problem and problem.key not in existing:
                break
        else:
            raise ValueError(
                f"no new problem in {MAX_TRIES} tries after the first {num_problems}: {count} "
                f"numbers in {numbers} and a target in {targets} allow too few "
                f"({len(exclude)} excluded). Ask for fewer rows or widen the ranges"
            )
        existing.add(problem.key)
        num_problems += 1
        yield problem


def try_problem(
    rng: random.Random, count: int, numbers: tuple[int, int], targets: tuple[int, int]
) -> Problem | None:
    """Join random numbers by random operations; None unless the value is an integer within
    `targets`.

    Values are exact: (numerator, denominator) pairs, several times faster than Fraction.
    """
    low, high = numbers
    span = high - low + 1
    chosen = [low + int(rng.random() * span) for _ in range(count)]
    parts = [(number, 1, number) for number in chosen]  # (numerator, denominator, expression tree)
    while len(parts) > 1:
        n, d, left = parts.pop(int(rng.random() * len(parts)))
        m, e, right = parts.pop(int(rng.random() * len(parts)))
        symbol = "+-*/"[int(rng.random() * 4)]
        if symbol == "/" and m == 0:
            return None
        tree = (left, symbol, right)
        if symbol == "+":
            parts.append((n * e + m * d, d * e, tree))
        elif symbol == "-":
            parts.append((n * e - m * d, d * e, tree))
        elif symbol == "*":
            parts.append((n * m, d * e, tree))
        else:
            parts.append((n * e, d * m, tree))
    n, d, tree = parts[0]
    if n % d or not targets[0] <= n // d <= targets[1]:
        return None
    expression = render(tree).removeprefix("(").removesuffix(")")
    return Problem(tuple(chosen), n // d, expression)


def render(tree) -> str:
    """Fully parenthesised: ((44 - 19) * 35)."""
    if isinstance(tree, int):
        return str(tree)
    left, symbol, right = tree
    return f"({render(left)} {symbol} {render(right)})"


def read_published(source: str) -> list[Problem]:
    """The rows, in order, of files like Jiayi-Pan/Countdown-Tasks-3to4 (target: int64, nums:
    list<int64>), or of a folder that holds its snapshot."""
    paths = source
    if Path(source).is_dir():
        paths = split_files(source, "train", "--source")
        if not paths:
            raise FileNotFoundError(
                f"--source {source}: no train.parquet in it, nor data/train-*.parquet"
            )
    files = RowFiles(paths, "--source")
    problems = []
    for index, record in enumerate(files.records()):
        place = f"--source {files.place(index)}"
        if isinstance(record, str):
            raise ValueError(f"{place}: {record}")
        if not {"target", "nums"} <= record.keys():
            columns = ", ".join(record)
            raise ValueError(f"{place}: expected the columns target and nums, found {columns}")
        nums = record["nums"]
        target = record["target"]
        has_nums = isinstance(nums, list) and len(nums) > 0
        if not has_nums or not all(is_int64(number) for number in (*nums, target)):
            raise ValueError(
                f"{place}: nums {nums!r:.80} and target {target!r:.80}, expected integers of 64 "
                "bits"
            )
        problems.append(Problem(tuple(nums), target, ""))
    return problems


def is_int64(number: object) -> bool:
    return type(number) is int and abs(number) < 2**63


def split_published(
    rows: list[Problem], train_size: int, test_size: int
) -> tuple[list[Problem], list[Problem]]:
    """(train, test) as in TinyZero: the first train_size rows without those that occur in test, and
    the next test_size rows."""
    if len(rows) < train_size + test_size:
        raise ValueError(
            f"--source has {len(rows)} rows, fewer than {train_size} train + {test_size} test"
        )
    test = rows[train_size : train_size + test_size]
    test_keys = {problem.key for problem in test}
    train = [problem for problem in rows[:train_size] if problem.key not in test_keys]
    return train, test


def to_table(problems: list[Problem], template: str, split: str) -> pa.Table:
    """TinyZero's columns; `index` counts from 0 in each split."""
    rows = []
    for index, problem in enumerate(problems):
        ground_truth = {"numbers": problem.numbers, "target": problem.target}
        row = {
            "nums": problem.numbers,
            "target": problem.target,
            "data_source": "countdown",
            "prompt": [{"role": "user", "content": prompt_text(problem, template)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": ground_truth},
            "extra_info": {"split": split, "index": index},
        }
        rows.append(row)
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def prompt_text(problem: Problem, template: str) -> str:
    return TEMPLATES[template].format(
        numbers=list(problem.numbers),
        spaced_numbers=" ".join(map(str, problem.numbers)),
        target=problem.target,
    )


if __name__ == "__main__":
    with user_errors():
        main(call_program(Args, "common.prepare.countdown", __doc__))

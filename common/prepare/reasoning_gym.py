"""A task of reasoning-gym in verl's columns: train.parquet and test.parquet.

    python -m common.prepare.reasoning_gym --list
    python -m common.prepare.reasoning_gym --task chain_sum --out data/chain_sum
    python -m common.prepare.reasoning_gym --task chain_sum --levels 1 2 --out data/chain_sum
    python -m common.prepare.reasoning_gym --task chain_sum --config '{"max_terms": 3}' \\
        --out data/chain_sum
    python -m common.prepare.reasoning_gym --task chain_sum --examples 2 --out data/chain_sum

The package is optional: pip install reasoning-gym==0.1.25. It has about a hundred tasks, each with
a generator and a scorer of its own, and levels of difficulty. A question of test is not in train.
An answer that is a text stands in extra_info, too, so that sft.py takes its row.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import common.packages  # noqa: F401, one line if a package is missing

import pyarrow as pa

from common.files import user_errors
from common.flags import call_program
from common.prepare.writing import write_splits
from common.progress import Progress
from common.rewards.reasoning_gym import PACKAGE, find_scorer

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

NUM_CHECKED = 20  # problems of each level whose answers are scored
# problems of each level from which --examples are chosen; they are no rows
NUM_EXAMPLES = 32
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
                "level": pa.int64(),
                "split": pa.string(),
            }
        ),
    }
)


@dataclass
class Args:
    out: Path | None = None  # folder for train.parquet and test.parquet
    task: str = ""  # one of --list
    list: bool = False  # print the tasks and how many levels they have, and stop
    # each with an equal share of the rows, and listed by itself in an evaluation; none: the task's
    # own defaults
    levels: tuple[int, ...] = ()
    config: str = "{}"  # settings of the generator as JSON, in place of --levels
    # the package's system prompt of that name: chain_of_draft, default, direct, simple …; or none.
    # Without this flag it is the one named default, or none if there are --examples
    prompt: str | None = None
    # solved problems in front of each question, as turns that a small model imitates: their answers
    # are <answer>…</answer> and nothing else
    examples: int = 0
    train_size: int = 10_000  # rows in train
    test_size: int = 512  # rows in test
    seed: int = 42  # of the generator

    def __post_init__(self):
        if not self.list and (self.out is None or not self.task):
            raise ValueError("--task NAME and --out FOLDER are needed; --list names the tasks")
        if self.levels and self.config != "{}":
            raise ValueError("--levels and --config both say how hard the task is: give one")
        if self.train_size < 1 or self.test_size < 1:
            raise ValueError("--train-size and --test-size must be at least 1")
        if not 0 <= self.examples <= NUM_EXAMPLES:
            raise ValueError(f"--examples {self.examples}: expected 0 to {NUM_EXAMPLES}")
        if self.prompt is None:
            self.prompt = "none" if self.examples else "default"


def main(args: Args) -> None:
    package = import_package()
    if args.list:
        print_tasks(package)
        return
    check_task(package, args)
    sources = [Source.open(package, args, level) for level in args.levels or (None,)]
    # questions of examples, whatever their level, are in no row; those of test are not in train
    questions = {example["question"] for source in sources for example in source.examples}
    test: list[dict] = []
    train: list[dict] = []
    for place, source in enumerate(sources):
        test += source.rows(share(args.test_size, place, len(sources)), questions, is_test=True)
    for place, source in enumerate(sources):
        train += source.rows(share(args.train_size, place, len(sources)), questions, is_test=False)
    random.Random(args.seed).shuffle(train)  # so that the levels are mixed
    tables = {}
    for split, rows in (("train", train), ("test", test)):
        for index, row in enumerate(rows):
            row["extra_info"] |= {"index": index, "split": split}
        tables[split] = pa.Table.from_pylist(rows, schema=SCHEMA)
    write_splits(args.out, tables)


def import_package() -> ModuleType:
    try:
        import reasoning_gym.coaching.base_curriculum
        import reasoning_gym.factory
        import reasoning_gym.utils
    except ImportError as error:
        raise ValueError(f"the package is missing: pip install {PACKAGE} ({error})") from error
    return reasoning_gym


def print_tasks(package: ModuleType) -> None:
    for task in sorted(package.factory.DATASETS):
        levels = "no levels"
        if package.factory.has_curriculum(task):
            levels = f"levels 0 to {num_levels(package, task) - 1}"
        print(f"{task}: {levels}")


def num_levels(package: ModuleType, task: str) -> int:
    attributes = package.factory.create_curriculum(task).attributes.values()
    return max((len(attribute.levels) for attribute in attributes), default=1)


def check_task(package: ModuleType, args: Args) -> None:
    """ValueError for a task, level or prompt that the package does not have, and for a level named
    twice."""
    if args.task not in package.factory.DATASETS:
        raise ValueError(f"--task {args.task}: no such task; --list names them")
    if args.levels and not package.factory.has_curriculum(args.task):
        raise ValueError(f"--levels: {args.task} has none; --config sets it")
    if len(set(args.levels)) < len(args.levels):
        raise ValueError(f"--levels {' '.join(map(str, args.levels))}: one is named twice")
    for level in args.levels:
        highest = num_levels(package, args.task) - 1
        if not 0 <= level <= highest:
            raise ValueError(f"--levels {level}: {args.task} has 0 to {highest}")
    prompts = package.utils.SYSTEM_PROMPTS
    if args.prompt != "none" and args.prompt not in prompts:
        raise ValueError(f"--prompt {args.prompt}: expected none, {', '.join(prompts)}")


def share(size: int, place: int, count: int) -> int:
    """The size of part `place` of `count` equal ones."""
    return size * (place + 1) // count - size * place // count


def level_config(package: ModuleType, args: Args, level: int | None) -> dict:
    """Settings of the generator. ValueError if it refuses them."""
    # twice as many as are needed: some repeat the question of another
    num_entries = 2 * (NUM_EXAMPLES + args.train_size + args.test_size)
    common_settings = {"size": num_entries, "seed": args.seed}
    if level is not None:
        curriculum = package.factory.create_curriculum(args.task)
        curriculum.set_global_level(level)
        # this level alone, without those below
        context = package.coaching.base_curriculum.DefaultCurriculumContext("upper_bound")
        return vars(curriculum.generate_configuration(common_settings, context))
    try:
        settings = json.loads(args.config)
        _, config_class = package.factory.DATASETS[args.task]
        config = config_class(**settings, **common_settings)
        if hasattr(config, "validate"):
            config.validate()
        return vars(config)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"--config {args.config}: {error}") from error


def check_scorer(task: str, dataset: "ProceduralDataset", config: dict) -> None:
    """ValueError if the scorer gives a right answer another score once its entry went through a
    file."""
    for index in Progress("problems checked", min(NUM_CHECKED, config["size"])):
        entry = dataset[index]
        if entry["answer"] is None:  # the scorer knows a right one when it sees it
            continue
        truth = json.loads(make_truth(task, config, entry))
        scorer = find_scorer(task, json.dumps(truth["config"], sort_keys=True))
        expected = dataset.score_answer(entry["answer"], entry)
        score = scorer(entry["answer"], truth["entry"])
        if score != expected:
            raise ValueError(
                f"--task {task}: its scorer gives the right answer {score}, not {expected}, once "
                "the row has been in a file"
            )


def make_truth(task: str, config: dict, entry: dict) -> str:
    """What the scorer needs, as JSON; a value that JSON does not have, such as a time, as text."""
    settings = {"size": 1}
    for name, value in config.items():
        # others, such as an enumeration's, keep their default
        if name != "size" and type(value) in (bool, int, float, str, list, tuple, dict):
            settings[name] = value
    return json.dumps({"task": task, "config": settings, "entry": entry}, default=str)


def choose_examples(args: Args, entries: Iterator[dict]) -> list[dict]:
    """The first NUM_EXAMPLES entries whose questions differ and whose answers are texts. ValueError
    if there are fewer than a row shows."""
    examples: dict[str, dict] = {}
    for entry in entries:
        if tagged_answer(entry):
            examples.setdefault(entry["question"], entry)
        if len(examples) == NUM_EXAMPLES:
            break
    if len(examples) < args.examples:
        raise ValueError(
            f"--examples {args.examples}: --task {args.task} has {len(examples)} problems whose "
            "answers are texts"
        )
    return list(examples.values())


def tagged_answer(entry: dict) -> str | None:
    """What a response with the answer and nothing else is; None for an answer that is no text."""
    answer = entry["answer"]
    return f"<answer>{answer}</answer>" if isinstance(answer, str) else None


@dataclass
class Source:
    """The generator of a level, whose problems go to test first and then to train."""

    task: str
    level: int | None
    data_source: str
    system: str  # the system prompt; "" for none
    config: dict  # of the generator
    entries: Iterator[dict]  # {question, answer, metadata}
    examples: list[dict]  # entries that the rows show with their answers
    num_examples: int  # in a row
    rng: random.Random  # chooses the examples of a row

    @classmethod
    def open(cls, package: ModuleType, args: Args, level: int | None) -> "Source":
        """ValueError as in `level_config`, `check_scorer` and `choose_examples`."""
        config = level_config(package, args, level)
        dataset = package.factory.create_dataset(args.task, **config)
        check_scorer(args.task, dataset, config)
        data_source = f"reasoning_gym/{args.task}"
        if len(args.levels) > 1:
            data_source += f"/{level}"
        system = ""
        if args.prompt != "none":
            system = package.utils.SYSTEM_PROMPTS[args.prompt]
        entries = (dataset[index] for index in range(config["size"]))
        return cls(
            task=args.task,
            level=level,
            data_source=data_source,
            system=system,
            config=config,
            entries=entries,
            examples=choose_examples(args, entries) if args.examples else [],
            num_examples=args.examples,
            rng=random.Random(f"{args.seed} {level}"),
        )

    def rows(self, count: int, questions: set[str], is_test: bool) -> list[dict]:
        """`count` rows whose question is not in `questions`; those of test are added to it.
        ValueError if there are too few."""
        rows = []
        progress = Progress("rows", count)
        while len(rows) < count:
            entry = next(self.entries, None)
            if entry is None:
                level = "" if self.level is None else f" at level {self.level}"
                raise ValueError(
                    f"--task {self.task}{level}: {len(rows)} rows, not {count}: it has too few "
                    "questions beside those of test. Lower --train-size or --test-size, or take a "
                    "higher level"
                )
            if entry["question"] in questions:
                continue
            if is_test:
                questions.add(entry["question"])
            rows.append(self.row(entry))
            progress.add()
        return rows

    def row(self, entry: dict) -> dict:
        """verl's row of an entry, without its split and index."""
        prompt = []
        if self.system:
            prompt.append({"role": "system", "content": self.system})
        for example in self.rng.sample(self.examples, self.num_examples):
            prompt.append({"role": "user", "content": example["question"]})
            prompt.append({"role": "assistant", "content": tagged_answer(example)})
        prompt.append({"role": "user", "content": entry["question"]})
        truth = make_truth(self.task, self.config, entry)
        return {
            "data_source": self.data_source,
            "prompt": prompt,
            "ability": "reasoning",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"answer": tagged_answer(entry), "level": self.level},
        }


if __name__ == "__main__":
    with user_errors():
        main(call_program(Args, "common.prepare.reasoning_gym", __doc__))

"""Ways to find enough groups of unequal scores, on paper: task (a) of paper.py, whose groups are
flat by chance.

    python tests/bench/dynamic.py                       # 45 % of groups are flat
    python tests/bench/dynamic.py --flat 0.75 --places 256

rounds: as many prompts as groups are missing, round by round. one pass: 1.8 times the prompts, and
no more. measured: rounds sized by grpo.py's `GroupYield`, as --dynamic-sampling does. streamed: as
many prompts as the true share of flat groups asks for, and while they are sampled, further ones as
soon as those that are left no longer promise enough: every 256 tokens all engines are asked, and
the emptiest gets the next. known: as many prompts as will turn out to be needed, in one pass.

Scoring takes no time here, nor does asking the engines.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from random import Random
from statistics import mean

import tyro
from paper import TASKS, Args, TaskEngine, task_layout, task_phases, task_shape
from report import table

from grpo import GroupYield

TASK = TASKS[0]
WINDOW = 256  # tokens
MAX_ROUNDS = 10


@dataclass
class Options:
    flat: float = 0.45  # share of groups
    steps: int = 20
    places: int = 0  # answers that an engine writes at once; 0: as many as fit
    paper: Args = field(default_factory=Args)


class Step:
    """The groups of a step, the same for each way, and engines to sample them."""

    def __init__(self, number: int, options: Options, new_engine):
        self.random = Random(number)
        self.options = options
        self.groups: list[tuple[list[int], bool]] = []  # (lengths, whether scores are unequal)
        self.engines = [new_engine() for _ in range(TASK.gpus)]
        for engine in self.engines:
            engine.places = options.places or engine.places
        self.num_drawn = 0
        self.seconds = 0.0

    def group(self, number: int) -> tuple[list[int], bool]:
        while number >= len(self.groups):
            lengths = []
            for _ in range(TASK.samples):
                length = self.random.lognormvariate(math.log(TASK.median), TASK.spread)
                lengths.append(min(TASK.longest, round(length)))
            self.groups.append((lengths, self.random.random() >= self.options.flat))
        return self.groups[number]

    def num_unequal(self, groups) -> int:
        return sum(self.group(number)[1] for number in groups)

    def draw(self, count: int) -> None:
        """Deal the next prompts to the engines, the emptiest first."""
        order = sorted(self.engines, key=lambda engine: len(engine.unfinished))
        for place in range(count):
            lengths, _ = self.group(self.num_drawn)
            order[place % len(order)].add(self.num_drawn, lengths)
            self.num_drawn += 1

    def advance(self, until: float = math.inf) -> list[int]:
        """All engines write until this token, and wait for the slowest. Returns what they have
        finished."""
        finished = []
        slowest = 0.0
        for engine in self.engines:
            before = engine.seconds
            finished += engine.advance(until)
            slowest = max(slowest, engine.seconds - before)
        self.seconds += slowest
        return finished

    def sample(self, count: int) -> int:
        """One pass over the next prompts; returns how many of them are unequal."""
        self.draw(count)
        return self.num_unequal(self.advance())


def rounds(step: Step, num_prompts, add=None) -> None:
    """num_prompts: of a round, from the number of missing groups. add: is told what was found."""
    missing = TASK.prompts
    for _ in range(MAX_ROUNDS):
        count = num_prompts(missing)
        found = step.sample(count)
        if add:
            add(count, found)
        missing -= found
        if missing <= 0:
            break


def one_pass(step: Step) -> None:
    step.sample(math.ceil(1.8 * TASK.prompts))


def known(step: Step) -> None:
    count = TASK.prompts
    while step.num_unequal(range(count)) < TASK.prompts:
        count += 1
    step.sample(count)


def streamed(step: Step) -> None:
    share = 1 - step.options.flat
    missing = TASK.prompts
    undecided = 0
    now = 0
    while True:
        short_of = max(0, math.ceil(missing / share - undecided))
        if missing > 0 and short_of:
            step.draw(short_of)
            undecided += short_of
        if not undecided:
            break
        now += WINDOW
        finished = step.advance(now)
        for engine in step.engines:
            engine.now = now  # that of one which had nothing to do, too
        missing -= step.num_unequal(finished)
        undecided -= len(finished)


def main(options: Options) -> None:
    shape, tensors = task_shape(TASK)
    gb = task_phases(TASK, shape, TASK.machine)
    model, lay = task_layout(TASK, shape, tensors, gb)
    new_engine = partial(TaskEngine, TASK, model, lay, options.paper)
    group_yield = GroupYield()
    ways = {
        "rounds": partial(rounds, num_prompts=lambda missing: missing),
        "one pass": one_pass,
        "measured": partial(rounds, num_prompts=group_yield.num_prompts, add=group_yield.add),
        "streamed": streamed,
        "known": known,
    }
    rows = []
    for name, sample_groups in ways.items():
        steps = [Step(number, options, new_engine) for number in range(options.steps)]
        trained = []
        for step in steps:
            sample_groups(step)
            trained.append(min(TASK.prompts, step.num_unequal(range(step.num_drawn))))
        seconds = [step.seconds for step in steps]
        numbers = [mean(seconds), max(seconds), mean(step.num_drawn for step in steps)]
        rows.append([name, *(f"{number:,.0f}" for number in numbers), f"{mean(trained):.1f}"])
    table(["", "mean s", "longest s", "prompts", "trained groups"], *rows)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

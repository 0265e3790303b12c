"""How far a long phase is: lines at most every 20 seconds, of rank 0; counted is what each phase
does."""

import sys
from threading import Thread

import pytest
import torch
from episodes import random_episodes
from helpers import split_of
from scripted import ScriptedEngine, row, run
from vl import CROP, build_tokenizer

from common.flags import Rollout
from common.packing import Packer, TokenIndex
from common.progress import ROOT, SILENCE, Progress, break_silence, duration, say
from common.rewards import RewardWorkers
from common.rollout.sampling import sample_episodes
from common.rollout.trajectories import Turns
from common.tools.pools import ToolWorkers
from common.types import Sampling


@pytest.fixture
def clock(monkeypatch):
    """A clock to be set: clock[0] is the time."""
    now = [1000.0]
    monkeypatch.setattr("common.progress.time.monotonic", lambda: now[0])
    monkeypatch.setattr(Progress, "last_print", 0.0)
    monkeypatch.setenv("RANK", "0")
    return now


def lines(capsys) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_a_line_every_so_often_with_what_is_left(clock, capsys):
    for _ in Progress("log-probs", iter(range(20))):
        clock[0] += 7.0  # after 21, 42, 63 ... seconds
    assert lines(capsys) == [
        "... log-probs 3/20, 1m left",
        f"... log-probs 6/20, {duration(14 * 7)} left",
        f"... log-probs 9/20, {duration(11 * 7)} left",
        f"... log-probs 12/20, {duration(8 * 7)} left",
        f"... log-probs 15/20, {duration(5 * 7)} left",
        f"... log-probs 18/20, {duration(2 * 7)} left",
    ]
    assert Progress.loops == {}


def test_short_phases_other_ranks_and_what_is_done_say_nothing(clock, capsys, monkeypatch):
    for _ in range(9):
        for _ in Progress("update", range(4)):
            clock[0] += 4.9
    for _ in Progress("update", range(1)):
        clock[0] += 99.0
    monkeypatch.setenv("RANK", "1")
    for _ in Progress("update", range(4)):
        clock[0] += 99.0
    assert lines(capsys) == []


def test_loops_within_loops_share_a_line(clock, capsys):
    for _ in Progress("update", range(4)):
        for _ in Progress("micro-batch", range(2)):
            clock[0] += 25.0
    assert lines(capsys) == [
        f"... update 0/4, micro-batch 1/2, {duration(7 * 25)} left",
        f"... update 0/4, micro-batch 2/2, {duration(6 * 25)} left",
        f"... update 1/4, micro-batch 1/2, {duration(5 * 25)} left",
        f"... update 1/4, micro-batch 2/2, {duration(4 * 25)} left",
        f"... update 2/4, micro-batch 1/2, {duration(3 * 25)} left",
        f"... update 2/4, micro-batch 2/2, {duration(2 * 25)} left",
        f"... update 3/4, micro-batch 1/2, {duration(25)} left",
    ]


def test_a_loop_that_was_left_by_an_exception_is_forgotten(clock, capsys):
    def backward():
        for _ in Progress("micro-batch", range(2)):
            raise torch.OutOfMemoryError

    for _ in Progress("update", range(1)):
        with pytest.raises(torch.OutOfMemoryError):
            backward()
        for _ in Progress("micro-batch", range(4)):
            clock[0] += 25.0
    assert lines(capsys)[0] == f"... update, micro-batch 1/4, {duration(75)} left"


def test_counting_without_a_loop(clock, capsys):
    progress = Progress("sampled responses", 64)
    for count in (0, 0, 16, 0, 48):
        clock[0] += 10.0
        progress.add(count)
    assert lines(capsys) == [
        "... sampled responses 0/64, nothing is done yet",
        f"... sampled responses 16/64, {duration(2 * 60)} left",
    ]


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0s"),
        (99.4, "99s"),
        (100, "1m"),
        (5999, "99m"),
        (6000, "1h40"),
        (359_999, "99h59"),
        (360_000, "4d04h"),
    ],
)
def test_durations_have_five_columns(seconds, text):
    assert duration(seconds) == text and len(text) <= 5


def test_silence_is_broken_by_what_is_waited_for_or_by_where_the_run_is(clock, capsys):
    def said(*missing) -> list[str]:
        thread = Thread(target=break_silence, args=missing)
        thread.start()
        thread.join()
        return lines(capsys)

    here = "... still running: said (tests/runs/test_progress.py)"  # where this thread waits
    assert said() == [here]
    clock[0] += SILENCE
    assert said() == []
    clock[0] += 0.5
    assert said("no sign of rank 1") == ["... no sign of rank 1"]
    clock[0] += SILENCE + 0.5
    assert said() == [here]


def test_no_other_thread_can_print_within_a_line(clock, monkeypatch):
    """On a slow machine an error was told in "...GATHER_SECONDS: expected a number"."""
    writes = []
    monkeypatch.setattr(sys.stdout, "write", writes.append)
    break_silence("no sign of rank 1")
    say("a line")
    rewards = Progress("rewards", 256)
    clock[0] += 64.0
    rewards.add(128)
    assert [text for text in writes if text] == [
        "... no sign of rank 1\n",
        "a line\n",
        "... rewards 128/256, 64s left\n",
    ]


def test_a_function_of_a_library_is_none_of_ours(clock, capsys):
    """Though ./with puts the libraries below our folder."""
    path = f"{ROOT}.venv/lib/python3.11/site-packages/torch/_ops.py"
    names: dict = {}
    code = "def wait(thread): thread.start(); thread.join()"
    exec(compile(code, path, "exec"), names)
    clock[0] += SILENCE + 0.5
    names["wait"](Thread(target=break_silence))
    here = "test_a_function_of_a_library_is_none_of_ours (tests/runs/test_progress.py)"
    assert lines(capsys) == [f"... still running: {here}"]


# --- what is counted ------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch):
    """Every Progress that the sampling loop, the packer or the workers made."""
    all_of_them: list[Progress] = []

    class Recorded(Progress):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            all_of_them.append(self)

    for module in ("rollout.sampling", "packing", "workers.pool"):
        monkeypatch.setattr(f"common.{module}.Progress", Recorded)
    return all_of_them


def test_every_trajectory_is_counted_once_however_it_ends(made):
    tokenizer, workers = build_tokenizer(), ToolWorkers("visual", 2, 20.0)
    try:
        bad = CROP.format([0.1], 1)
        scripts = [["done"], [bad, "done"], [bad] * 9, [bad, bad, "done"]]
        run(scripts, Turns(tokenizer, workers, flags=Rollout(max_turns=3)), row(tokenizer))
        run(
            [[bad], ["b"]],
            Turns(tokenizer, workers, flags=Rollout(max_tool_errors=0)),
            row(tokenizer),
        )
    finally:
        workers.close()
    assert [(p.label, p.done, len(p.items)) for p in made] == [
        ("sampled responses", 4, 4),
        ("sampled responses", 2, 2),
    ]


def test_answers_of_one_turn_are_counted_by_sample(made):
    class Groups(ScriptedEngine):
        def step(self):
            ((key, completions),) = super().step()
            return [(key, completions * 3)]

    tokenizer = build_tokenizer()
    the_row, engine = row(tokenizer), Groups(tokenizer, [["a"]])
    sample_episodes(engine, {0: the_row}, Sampling(3, 100), seed=1, step=2, weights_step=2)
    assert [(p.done, len(p.items)) for p in made] == [(3, 3)]


def test_micro_batches_of_all_minibatches_are_counted(made, world, tmp_path):
    episodes = random_episodes(seed=1, prompts=6, samples=4)
    packer, index = Packer("sdpa", 40, tmp_path, world), TokenIndex(episodes)
    minibatches = packer.minibatches(episodes, index, split_of(episodes, 3, seed=1, step=0))
    result = torch.zeros(len(index))
    model = torch.nn.Module()
    model.forward = lambda batch: torch.ones(len(batch.targets))
    packer.fill(result, model, minibatches)
    (progress,) = made
    assert (result == 1).all() and progress.done == len(progress.items) == sum(
        len(m.micro_batches) for m in minibatches
    )


def test_rewards_are_counted(made):
    workers = RewardWorkers(None, 1, 20.0)
    try:
        workers.score([("openai/gsm8k", "#### 1", "1", {})] * 5)
    finally:
        workers.close()
    assert [(p.label, p.done, len(p.items)) for p in made] == [("rewards", 5, 5)]

"""docs/examples/verifiers_tasks.py: tasks of verifiers as rows and reward.

pytest tests/rewards/test_verifiers_tasks.py -m slow
TEST_VENVS=FOLDER keeps the package, which takes a minute to install, for the next time.
"""

import json
import subprocess

import pytest
from helpers import ROOT
from venvs import python_with

from common.rewards import RewardWorkers
from common.workers.pool import load_function

EXAMPLE = ROOT / "docs" / "examples" / "verifiers_tasks.py"
TASKS = """
import verifiers.v1 as vf


class WordData(vf.TaskData):
    answer: str


class WordTask(vf.Task[WordData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        print("a task that prints")
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, task, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) <= len(task.answer))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        if trace.last_reply == "fail":
            raise ValueError("no such word")
        return trace.num_turns


class WordTaskset(vf.Taskset[WordTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        index = 0
        while True:
            word = f"w{index}x"
            data = WordData(prompt=f"Reverse {word}.", system_prompt="One word.", answer=word[::-1])
            yield WordTask(data, self.config.task)
            index += 1


__all__ = ["WordTaskset"]
"""


def test_without_an_environment_it_says_what_it_needs(monkeypatch):
    monkeypatch.delenv("VERIFIERS_PYTHON", raising=False)
    score = load_function(f"{EXAMPLE}:score", "--reward-function")
    with pytest.raises(RuntimeError, match="VERIFIERS_PYTHON must name the Python"):
        score("verifiers/words", "x0w", "{}")


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return python_with("verifiers==0.4.0", tmp_path_factory.mktemp("venvs"))


@pytest.fixture
def write_rows(python, tmp_path, monkeypatch):
    """The rows of a taskset that a file has; what is printed if they are refused."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the processes that score, too
    monkeypatch.setenv("VERIFIERS_PYTHON", str(python))

    def write_rows(text: str) -> list[dict] | str:
        (tmp_path / "words.py").write_text(text)
        command = [python, EXAMPLE, "words", tmp_path / "rows", "--rows", "3", "--test-rows", "2"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return done.stderr
        lines = []
        for name in ("test", "train"):
            lines += (tmp_path / "rows" / f"{name}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return write_rows


@pytest.mark.slow
def test_tasks_are_rows_and_their_rewards_score(write_rows):
    rows = write_rows(TASKS)
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[1]["prompt"] == [
        {"role": "system", "content": "One word."},
        {"role": "user", "content": "Reverse w1x."},
    ]
    truth = rows[1]["reward_model"]["ground_truth"]
    assert json.loads(truth)["answer"] == "x1w"
    workers = RewardWorkers(f"{EXAMPLE}:score", 2, timeout_s=10.0)
    try:
        jobs = []
        for answer in ("x1w", "w", "longer than that", "fail"):
            jobs.append((rows[1]["data_source"], answer, truth, {}))
        right, short, wrong, failed = workers.score(jobs)
    finally:
        workers.close()
    assert right == {"right": 1.0, "short": 1.0, "turns": 1.0, "score": 2.5}
    assert short == {"right": 0.0, "short": 1.0, "turns": 1.0, "score": 0.5}
    assert wrong["score"] == 0.0
    assert failed.keys() == {"error"} and "no such word" in failed["error"]


OWN_ENVIRONMENT = """
class WordEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "old, new, needs",
    [
        ("trace: vf.Trace) -> float:\n        print", "trace, runtime):\n        print", "runtime"),
        ("[WordData]):", "[WordData]):\n    NEEDS_CONTAINER = True\n", "a container"),
        ('prompt=f"Reverse {word}.", ', "", "no prompt"),
        ("__all__ = [", f'{OWN_ENVIRONMENT}\n__all__ = ["WordEnv", ', "of their own, WordEnv"),
    ],
)
def test_tasks_that_need_a_rollout_of_verifiers_are_refused(write_rows, old, new, needs):
    assert TASKS.count(old) == 1
    said = write_rows(TASKS.replace(old, new))
    assert "words: its tasks have" in said and needs in said

"""A reward with TRL's signature, as it is: which arguments it gets, what its scores become, and the
examples of docs/from_verl_trl.md.

pytest tests/rewards/test_trl_rewards.py
"""

import asyncio
import inspect
import sys
from types import ModuleType, SimpleNamespace

import pyarrow.parquet as pq
import pytest
import yaml
from pages import blocks

from common.rewards import RewardWorkers, score_episodes
from common.rewards.trl import has_trl_signature, with_verl_signature
from common.tools import load_tools
from common.types import Episode, Row
from common.workers.pool import load_function

PAGE = "docs/from_verl_trl.md"
MESSAGES = [{"role": "user", "content": "1+1?"}]
ROW = {"prompt": MESSAGES, "solution": "2", "completion_ids": [5, 6, 7]}


def block(first_line: str) -> str:
    (found,) = [content for _, content in blocks(PAGE) if content.startswith(f"# {first_line}")]
    return found


def result(function, text="2", **extra_info):
    """What the function says of one response to the row."""
    reward = with_verl_signature(function)
    return reward("mine", text, "truth", ROW | extra_info)


# --- which functions, which arguments -------------------------------------------------------------


def test_which_functions_are_trls():
    assert has_trl_signature(lambda completions, **kwargs: [])
    assert has_trl_signature(lambda prompts, completions, solution: [])
    assert has_trl_signature(lambda completion_ids, **kwargs: [])
    assert not has_trl_signature(lambda data_source, solution_str, ground_truth, **kwargs: 0)
    assert not has_trl_signature(lambda solution_str, completions=None, **kwargs: 0)
    assert not has_trl_signature(lambda **kwargs: 0)


def test_each_argument_is_a_list_of_one():
    seen = {}

    def reward(**kwargs):
        seen.update(kwargs)
        return [1.0]

    assert result(reward, trajectory="2 tool") == {"score": 1.0}
    assert callable(seen.pop("log_metric")) and callable(seen.pop("log_extra"))
    assert seen == {
        "prompts": [MESSAGES],
        "completions": [[{"role": "assistant", "content": "2"}]],
        "completion_ids": [[5, 6, 7]],
        "solution": ["2"],
        "ground_truth": ["truth"],
        "data_source": ["mine"],
        "trajectory": ["2 tool"],
    }
    assert result(reward, prompt="1+1=")["score"] == 1.0
    assert (seen["prompts"], seen["completions"]) == (["1+1="], ["2"])
    assert result(reward, ground_truth="its own")["score"] == 1.0
    assert seen["ground_truth"] == ["its own"]


def test_a_function_gets_what_it_names():
    assert result(lambda completions, solution, trainer_state=None: [len(solution)])["score"] == 1
    assert result(lambda completion_ids, log_extra: [len(completion_ids[0])])["score"] == 3


def test_a_function_may_take_any_arguments_by_place():
    def reward(completions, *args, solution):
        return [len(args) + len(solution)]

    assert result(reward)["score"] == 1


def test_what_it_logs_stands_beside_the_score():
    def reward(completions, log_metric, log_extra, **kwargs):
        log_metric("length", 4.0)
        log_extra("answer", ["two"])
        return [0.5]

    assert result(reward) == {"length": 4.0, "answer": "two", "score": 0.5}


def test_a_coroutine_stays_one():
    async def reward(completions, **kwargs):
        await asyncio.sleep(0)
        return [float(completions[0][0]["content"])]

    reward.timeout_s = 7
    wrapped = with_verl_signature(reward)
    assert inspect.iscoroutinefunction(wrapped) and wrapped.timeout_s == 7
    assert wrapped.__name__ == "reward"
    assert asyncio.run(wrapped("mine", "3", "", ROW)) == {"score": 3.0}


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda completions, trainer_state, **kwargs: [1], "wants trainer_state, which only TRL's"),
        (lambda completions, environments: [1], "wants environments, which only TRL's trainer has"),
        (lambda completions, answer: [1], "wants the column answer; extra_info of the row has"),
        (lambda completions, **kwargs: 1.0, "returned 1.0, expected a list with one score"),
        (lambda completions, **kwargs: [1, 2], "one completion at a time"),
        (lambda completions, **kwargs: [], "expected a list with one score"),
        (lambda completions, **kwargs: [None], "returned None: not applicable"),
    ],
)
def test_what_cannot_be_is_said_by_name(function, reason):
    with pytest.raises(ValueError, match=reason):
        result(function)


# --- in the workers -------------------------------------------------------------------------------

FUNCTION = """
def reward(prompts, completions, completion_ids, solution, **kwargs):
    (completion,), (truth,) = completions, solution
    if truth == "none":
        return [None]
    kwargs["log_metric"]("ids", len(completion_ids[0]))
    return [float(completion[0]["content"] == truth and prompts[0][0]["content"] == "1+1?")]


def state(completions, trainer_state, **kwargs):
    return [1.0]
"""


@pytest.fixture
def start(tmp_path):
    """RewardWorkers for a function of FUNCTION, closed after the test."""
    (tmp_path / "function.py").write_text(FUNCTION)
    started = []

    def start(name: str) -> RewardWorkers:
        started.append(RewardWorkers(f"{tmp_path}/function.py:{name}", 1, 10.0))
        return started[-1]

    yield start
    for pool in started:
        pool.close()


def test_a_run_says_so_and_scores_with_it(start, capsys):
    workers = start("reward")
    said = "reward reward: TRL's signature, called with one completion at a time\n"
    assert capsys.readouterr().out == said
    texts = ["2", "3", "2"]
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: texts[ids[0]])
    episodes = [Episode(i, 0, [1], [i, 9], [1, 1], [0.0] * 2, "stop") for i in range(3)]
    solutions = ["2", "2", "none"]
    rows = {
        i: Row(i, "mine", MESSAGES, "", {"solution": solution}, [1])
        for i, solution in enumerate(solutions)
    }
    score_episodes(episodes, rows, workers, tokenizer)
    assert [episode.rewards for episode in episodes[:2]] == [
        {"score": 1.0, "ids": 2.0},
        {"score": 0.0, "ids": 2.0},
    ]
    assert episodes[2].rewards["error"] == "ValueError: it returned None: not applicable"
    assert rows[0].extra_info == {"solution": "2"}, "a row stays as it is"
    for solution in solutions:
        workers.try_out("spec", Row(0, "mine", MESSAGES, "", {"solution": solution}, [1]))


def test_a_function_that_wants_the_trainer_is_refused_at_the_start(start):
    row = Row(0, "mine", MESSAGES, "2", {"solution": "2"}, [1])
    with pytest.raises(ValueError) as error:
        start("state").try_out("function.py:state", row)
    for words in ("--reward-function function.py:state", "it wants trainer_state", "completions=["):
        assert words in str(error.value)


# --- the page's examples --------------------------------------------------------------------------


def test_a_data_set_becomes_rows_and_its_reward_scores_them(tmp_path, monkeypatch):
    data = [
        {"prompt": MESSAGES, "solution": "2", "level": 1},
        {"prompt": MESSAGES, "solution": "x + 1", "level": 5},
    ]
    datasets = ModuleType("datasets")
    datasets.load_dataset = lambda name, split: data
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    monkeypatch.chdir(tmp_path)
    exec(block("to_rows.py"), {})
    rows = pq.read_table("train.parquet").to_pylist()
    assert [row["reward_model"] for row in rows] == [
        {"ground_truth": "2"},
        {"ground_truth": "x + 1"},
    ]
    assert rows[0]["extra_info"] == {"solution": "2", "level": 1}

    (tmp_path / "trl_rewards.py").write_text(block("trl_rewards.py"))
    function = load_function("trl_rewards.py:number", "--reward-function")
    assert has_trl_signature(function)
    reward = with_verl_signature(function)
    extra_info = rows[0]["extra_info"] | {"prompt": rows[0]["prompt"]}
    assert reward("deepmath", "1 and 1 make 2", "2", extra_info) == {"numbers": 3, "score": 1.0}
    assert reward("deepmath", "2 or 3", "2", extra_info)["score"] == 0.0
    with pytest.raises(ValueError, match="not applicable"):
        reward("deepmath", "2", "x + 1", rows[1]["extra_info"] | {"prompt": rows[1]["prompt"]})


def test_a_tool_of_verl_before_and_after(tmp_path, monkeypatch):
    """The class answers what the function answers, and the YAML says what its hints say."""

    class BaseTool:
        def __init__(self, config, tool_schema):
            self.tool_schema = tool_schema

    base_tool = ModuleType("verl.tools.base_tool")
    base_tool.BaseTool = BaseTool
    schemas = ModuleType("verl.tools.schemas")
    schemas.ToolResponse = SimpleNamespace
    for module in (base_tool, schemas):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    before: dict = {}
    exec(block("before: tools/prices.py"), before)
    (entry,) = yaml.safe_load(block("before: tools.yaml"))["tools"]
    assert entry["class_name"] == "tools.prices.Price"
    tool = before["Price"](entry["config"], entry["tool_schema"])

    (tmp_path / "prices.py").write_text(block("prices.py"))
    loaded = load_tools(f"{tmp_path}/prices.py:price")["price"]
    assert loaded.schema == entry["tool_schema"]

    async def answers(table: dict, *things: str) -> list[str]:
        await tool.create("1", create_kwargs={"table": table})
        responses = [await tool.execute("1", {"thing": thing}) for thing in things]
        await tool.release("1")
        return [response.text for response, _, _ in responses]

    table = {"pear": 3}
    expected = asyncio.run(answers(table, "pear", "plum"))
    assert [loaded.function(thing, table=table) for thing in ("pear", "plum")] == expected
    assert expected == ["3", "unknown"]

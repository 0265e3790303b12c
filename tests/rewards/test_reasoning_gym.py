"""reasoning-gym's tasks as rows and reward: without the package what needs none of it, with it
(pip install reasoning-gym==0.1.25) all tasks."""

import importlib.util
import json
import random
import re
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
import tyro
from helpers import ROOT

from common.prepare import reasoning_gym as prepare
from common.rewards import reasoning_gym as rewards
from common.rewards import reward_function

HAS_PACKAGE = importlib.util.find_spec("reasoning_gym") is not None
needs_package = pytest.mark.skipif(not HAS_PACKAGE, reason="needs reasoning-gym")


def truth_of(task: str, answer: str = "1") -> str:
    entry = {"question": "?", "answer": answer, "metadata": {}}
    return json.dumps({"task": task, "config": {"size": 1}, "entry": entry})


@pytest.fixture
def scorer(monkeypatch):
    """Stands for the package's: it evaluates the answer as nine of its scorers do."""
    seen = []

    def evaluate(answer: str, entry: dict) -> float:
        seen.append(answer)
        return float(eval(answer) == eval(entry["answer"]))

    monkeypatch.setattr(rewards, "find_scorer", lambda task, config: evaluate)
    return seen


@pytest.mark.parametrize("task", ["puzzle24", "n_queens"])
@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os').system('true')",
        "open('/tmp/file', 'w')",
        "exec('x = 1')",
        "(lambda: 1)()",
        "[x for x in (1,)]",
        "(1).__class__",
        "[1][0]",
        "max(1, key=print)",
        "sqrt(*[4])",
        "f'{1}'",
        "(x := 1)",
        "ord('a')",
        "(oracle_answer := 1)",
    ],
)
def test_a_policy_runs_no_code(scorer, task, answer):
    result = rewards.score(f"<answer>{answer}</answer>", truth_of(task))
    assert result["score"] == 0 and result["pred"] == answer
    assert scorer == []


@pytest.mark.parametrize(
    "task, answer",
    [
        # sympy evaluates the text of a string
        ("puzzle24", 'sin("print(1)")'),
        ("simple_integration", '"print(1)"'),
        # variables of the scorers
        ("n_queens", "[valid_solutions]"),
        ("string_insertion", "oracle_answer"),
    ],
)
def test_a_policy_reads_neither_code_out_of_texts_nor_the_scorers_variables(scorer, task, answer):
    result = rewards.score(f"<answer>{answer}</answer>", truth_of(task))
    assert result["score"] == 0 and scorer == []


def test_the_truth_of_an_evaluation_may_have_been_read(scorer):
    """common.score makes an object of a `truth` that is the text of one."""
    truth = json.loads(truth_of("chain_sum", "2"))
    assert rewards.score("<answer>2</answer>", truth)["score"] == 1


@pytest.mark.parametrize(
    "task, answer, truth",
    [
        ("puzzle24", "(1 + 2) * 3 - -4", "13"),
        ("n_queens", "[['_', 'Q'], ['Q', '_']]", "[['_', 'Q'], ['Q', '_']]"),
        ("chain_sum", "open('no/such/file')", "0"),  # not evaluated by that one
    ],
)
def test_literals_and_arithmetic_reach_the_scorer(scorer, task, answer, truth):
    result = rewards.score(f"so <answer> {answer} </answer>.", truth_of(task, truth))
    assert scorer == [answer]
    assert result["format"] == 1 and result["score"] == (task != "chain_sum")


def test_a_response_without_an_answer_gets_nothing(scorer):
    expected = {"score": 0.0, "pred": "", "format": 0.0}
    assert rewards.score("1", truth_of("chain_sum")) == expected
    assert rewards.score("<answer>1", truth_of("chain_sum")) == expected
    assert scorer == []


@pytest.mark.skipif(HAS_PACKAGE, reason="the package is there")
def test_a_missing_package_is_named():
    command = [sys.executable, "-m", "common.prepare.reasoning_gym", "--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "pip install reasoning-gym==0.1.25" in done.stderr
    assert "Traceback" not in done.stderr
    with pytest.raises(ImportError, match="reasoning_gym/x needs `pip install reasoning-gym"):
        rewards.find_scorer("x", "{}")
    assert reward_function("reasoning_gym/chain_sum/2").modules[1] == "reasoning_gym"


@pytest.mark.parametrize(
    "flags, problem",
    [
        ({}, "--task NAME and --out FOLDER are needed"),
        ({"task": "x", "out": "o", "levels": (1,), "config": "{1}"}, "give one"),
        ({"task": "x", "out": "o", "test_size": 0}, "must be at least 1"),
        ({"task": "x", "out": "o", "examples": -1}, "--examples -1: expected 0 to 32"),
        ({"task": "x", "out": "o", "examples": 33}, "--examples 33: expected 0 to 32"),
    ],
)
def test_flags_that_cannot_work(flags, problem):
    with pytest.raises(ValueError, match=problem):
        prepare.Args(**flags)


def entries(count: int) -> list[dict]:
    """Problems of a task; every third has the question of the one before it."""
    return [
        {"question": f"{i - (i % 3 == 2)}?", "answer": str(i), "metadata": {}} for i in range(count)
    ]


def source_of(args, problems: list[dict]):
    """A Source without the package."""
    remaining = iter(problems)
    return prepare.Source(
        task="count",
        level=None,
        data_source="reasoning_gym/count",
        system="" if args.prompt == "none" else args.prompt,
        config={},
        entries=remaining,
        examples=prepare.choose_examples(args, remaining),
        num_examples=args.examples,
        rng=random.Random(0),
    )


def test_examples_are_turns_of_other_problems_in_the_format_that_is_scored():
    args = prepare.Args(out="o", task="count", examples=2)
    source = source_of(args, entries(90))
    shown = {example["question"] for example in source.examples}
    assert len(shown) == len(source.examples) == 32
    rows = source.rows(20, questions=set(shown), is_test=True)
    pairs = set()
    for row in rows:
        roles = [message["role"] for message in row["prompt"]]
        assert roles == ["user", "assistant", "user", "assistant", "user"]
        asked, reply, asked_too, reply_too, question = [m["content"] for m in row["prompt"]]
        assert {asked, asked_too} <= shown and asked != asked_too and question not in shown
        for example in source.examples:
            if example["question"] in (asked, asked_too):
                assert f"<answer>{example['answer']}</answer>" in (reply, reply_too)
        pairs.add((asked, asked_too))
        answer = json.loads(row["reward_model"]["ground_truth"])["entry"]["answer"]
        assert row["extra_info"]["answer"] == f"<answer>{answer}</answer>"
    assert len(pairs) > 10  # not the same ones everywhere
    again = source_of(args, entries(90)).rows(20, questions=set(shown), is_test=True)
    assert again == rows


def test_the_system_prompt_is_the_packages_unless_examples_show_the_format():
    assert prepare.Args(out="o", task="count").prompt == "default"
    assert prepare.Args(out="o", task="count", examples=1).prompt == "none"
    args = prepare.Args(out="o", task="count", examples=1, prompt="direct")
    (row,) = source_of(args, entries(90)).rows(1, questions=set(), is_test=True)
    assert row["prompt"][0] == {"role": "system", "content": "direct"}
    assert [message["role"] for message in row["prompt"]][1:] == ["user", "assistant", "user"]


def test_answers_that_are_no_texts_are_no_examples():
    args = prepare.Args(out="o", task="count", examples=2)
    problems = [{"question": f"{i}?", "answer": None, "metadata": {}} for i in range(50)]
    problems[7]["answer"] = "7"
    with pytest.raises(ValueError, match="--examples 2: --task count has 1 problems whose answers"):
        source_of(args, problems)
    problems[20]["answer"] = "20"
    source = source_of(args, problems)
    assert [example["answer"] for example in source.examples] == ["7", "20"]
    assert source.row(problems[0])["extra_info"]["answer"] is None


# --- with the package -----------------------------------------------------------------------------

# Tasks whose rows a file cannot hold, and one that is made of others.
UNUSABLE = {"arc_agi", "composite", "rearc"}


@needs_package
@pytest.mark.slow
def test_right_answers_of_all_tasks_are_right(tmp_path):
    package = prepare.import_package()
    for task in sorted(set(package.factory.DATASETS) - UNUSABLE):
        args = prepare.Args(out=tmp_path / task, task=task, train_size=4, test_size=2)
        prepare.main(args)
        for row in pq.read_table(tmp_path / task / "test.parquet").to_pylist():
            truth = row["reward_model"]["ground_truth"]
            answer = json.loads(truth)["entry"]["answer"]
            function = reward_function(row["data_source"])
            if isinstance(answer, str):
                response = f"<answer>{answer}</answer>"
                score = function(row["data_source"], response, truth)["score"]
                assert score == pytest.approx(1), task


@needs_package
@pytest.mark.slow
def test_no_scorer_runs_the_code_of_an_answer(tmp_path):
    """All tasks, not only those that are known to evaluate: a new version may add one."""
    package = prepare.import_package()
    file = tmp_path / "written"
    codes = [
        f"open({str(file)!r}, 'w')",
        f"[open({str(file)!r}, 'w')]",
        f"__import__('os').system('touch {file}')",
    ]
    codes += [f"sin({code!r})" for code in codes] + [repr(code) for code in codes]
    for task in sorted(set(package.factory.DATASETS) - UNUSABLE):
        dataset = package.factory.create_dataset(task, size=4, seed=1)
        truth = prepare.make_truth(task, vars(dataset.config), dataset[0])
        for code in codes:
            rewards.score(f"<answer>{code}</answer>", truth)
            assert not file.exists(), task


@needs_package
def test_the_documented_command_makes_its_rows(tmp_path, monkeypatch):
    """docs/recipes.md, as pasted."""
    page = (ROOT / "docs/recipes.md").read_text()
    line = re.search(r"^python -m common.prepare.reasoning_gym (--task .*)$", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    args = tyro.cli(prepare.Args, args=line[1].split())
    prepare.main(args)
    assert pq.read_metadata(args.out / "train.parquet").num_rows == args.train_size
    assert pq.read_metadata(args.out / "test.parquet").num_rows == args.test_size


@needs_package
def test_levels_have_equal_shares_and_no_question_twice(tmp_path):
    args = prepare.Args(
        out=tmp_path, task="chain_sum", levels=(1, 2), train_size=51, test_size=20, prompt="simple"
    )
    prepare.main(args)
    train = pq.read_table(tmp_path / "train.parquet").to_pylist()
    test = pq.read_table(tmp_path / "test.parquet").to_pylist()
    assert [len(train), len(test)] == [51, 20]
    levels = [row["extra_info"]["level"] for row in test]
    assert levels == [1] * 10 + [2] * 10
    assert {row["data_source"] for row in train} == {
        "reasoning_gym/chain_sum/1",
        "reasoning_gym/chain_sum/2",
    }
    questions = [row["prompt"][1]["content"] for row in test]
    assert len(set(questions)) == 20
    assert not set(questions) & {row["prompt"][1]["content"] for row in train}


@needs_package
def test_rows_with_examples_train_and_are_solved(tmp_path):
    """No example is asked, and sft.py gets the answer that the scorer wants."""
    args = prepare.Args(
        out=tmp_path, task="chain_sum", levels=(0, 1), train_size=40, test_size=20, examples=3
    )
    prepare.main(args)
    test = pq.read_table(tmp_path / "test.parquet").to_pylist()
    train = pq.read_table(tmp_path / "train.parquet").to_pylist()
    shown = {message["content"] for row in test + train for message in row["prompt"][:-1]}
    asked = [row["prompt"][-1]["content"] for row in test + train]
    assert not shown & set(asked)
    for row in test:
        solution = row["extra_info"]["answer"]
        truth = row["reward_model"]["ground_truth"]
        assert rewards.score(solution, truth) == {
            "score": 1,
            "pred": json.loads(truth)["entry"]["answer"],
            "format": 1,
        }


@needs_package
@pytest.mark.parametrize(
    "flags, problem",
    [
        ({"task": "chain_sums"}, "no such task"),
        ({"task": "chain_sum", "levels": (99,)}, "chain_sum has 0 to"),
        ({"task": "chain_sum", "prompt": "polite"}, "expected none, "),
        ({"task": "chain_sum", "config": '{"terms": 3}'}, "unexpected keyword argument 'terms'"),
        ({"task": "chain_sum", "config": '{"max_terms": 1}'}, "max_terms must be >= min_terms"),
        (
            {"task": "chain_sum", "levels": (0,), "test_size": 999},
            "chain_sum at level 0: .* too few questions",
        ),
        ({"task": "arc_agi"}, "arc_agi: "),
    ],
)
def test_requests_that_cannot_be_served(tmp_path, flags, problem):
    args = prepare.Args(**{"out": tmp_path, "train_size": 20, "test_size": 5} | flags)
    with pytest.raises(ValueError, match=problem):
        prepare.main(args)
    assert not list(tmp_path.iterdir())

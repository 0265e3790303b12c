"""Rewards of PyVision-RL: which answer counts, what rules decide, what a judge is asked; the
release's defects.

pytest tests/papers/test_pyvision_rewards.py
"""

import asyncio
import time
from fractions import Fraction

import pytest
from episodes import call, group

import grpo
from common.data.protocols import Code
from common.rewards import is_correct
from papers.pyvision import rewards as pyvision
from papers.pyvision.judge import open_judge
from papers.pyvision.judge_prompt import EXAMPLES, Case
from papers.pyvision.rewards import (
    FAMILIES,
    LONGEST_ANSWER,
    final_answer,
    number,
    relative_accuracy,
)

QUESTION = {"question": "Which one? (A) red (B) blue", "index": 3}


def boxed(answer: str) -> str:
    return f"I see it.\n<answer>\n\\boxed{{{answer}}}\n</answer>"


class Agreeable:
    """A judge that notes what it is asked, and finds everything right."""

    def __init__(self):
        self.asked = []
        self.probes = 0

    async def probe(self) -> None:
        self.probes += 1

    async def verdict(self, case: Case) -> float:
        self.asked.append(case)
        return 1.0


@pytest.fixture(autouse=True)
def judge(monkeypatch) -> Agreeable:
    judge = Agreeable()
    monkeypatch.setattr(pyvision, "open_judge", lambda: judge)
    return judge


def score(text: str, truth, source: str = "vstar", **extra) -> dict:
    return asyncio.run(pyvision.score(source, text, truth, QUESTION | extra))


# --- the answer -----------------------------------------------------------------------------------

ANSWERS = {
    boxed("A"): "A",
    r"<answer>\boxed{A}</answer>": "A",  # on one line, which the release scores 0
    "<answer>\n\n It is \\boxed{ \\frac{1}{2} }, I think. </answer> done": r"\frac{1}{2}",
    boxed("A") + "\nNo: " + boxed("B"): "B",  # the last one; the release takes the first
    "<answer>\\boxed{A\nB}</answer>": "A\nB",
    r"\boxed{A}": "",
    "<answer>A</answer>": "",
    r"<answer>\boxed{A}": "",
    r"<answer><answer>\boxed{A}</answer>": "",
    r"<answer>\boxed{A}</answer></answer>": "",
    r"<answer>a <answer>\boxed{A}</answer> b</answer>": "",
    r"</answer>\boxed{A}<answer>": "",
    r"<answer>\boxed{A} or \boxed{B}</answer>": "",
    r"<answer>\boxed{\boxed{A}}</answer>": "",
    r"<answer>\boxed{A</answer>": "",
    r"<answer>\boxed{}</answer>": "",
    r"<answer>\boxed{<interpreter>A}</answer>": "",
    boxed("x" * (LONGEST_ANSWER - 1)): "x" * (LONGEST_ANSWER - 1),
    boxed("x" * LONGEST_ANSWER): "",
    "": "",
}


@pytest.mark.parametrize("text", ANSWERS)
def test_which_answer_counts(text):
    assert final_answer(text) == ANSWERS[text]
    rewards = score(text, "no such thing")
    assert rewards["judged"] == bool(ANSWERS[text])
    program = "\n<code>\n```python\nprint(1)\n```\n</code>"
    if ANSWERS[text]:
        assert Code.find_call(text + program) is None, (
            "what is scored as an answer ends the trajectory"
        )
    if not ANSWERS[text]:
        assert rewards == {"score": 0.0, "acc": 0.0, "pred": "", "judged": 0.0}


@pytest.mark.parametrize("text", [boxed("red " * 400), boxed("red") + "<answer>"])
def test_what_is_too_long_or_broken_earns_no_bonus(text):
    """The release keeps `is_answer_right` there, by which it pays for tool calls."""
    assert not is_correct(score(text, "red")) and is_correct(score(boxed("red"), "red"))
    assert score(text, "red")["score"] == 0.0


def test_the_answer_is_that_of_the_last_turn():
    """A tag in the code of an earlier turn is no answer, and breaks none; nor is one that a tool
    printed."""
    turns = ["<code>print('<answer>')</code>", boxed("red")]
    assert score("\n".join(turns), "red", last_turn=turns[-1])["score"] == 1.0
    given_up = "I do not know"
    trajectory = f"<code>...</code><interpreter>{boxed('red')}</interpreter>{given_up}"
    rewards = score(
        f"<code>...</code>\n{given_up}", "red", last_turn=given_up, trajectory=trajectory
    )
    assert rewards["score"] == 0.0


@pytest.mark.parametrize(
    "answer, earned", [("red", 1.1), ("red " * 400, 0.0), ("red}</answer><answer>{", 0.0)]
)
def test_an_answer_that_is_too_long_or_broken_earns_nothing_for_its_calls(answer, earned):
    """The release pays the bonus, for it takes such an answer for right."""
    (episode,) = group(0, [0.0], [call(acted=True)])
    episode.set_rewards(score(boxed(answer), "red"))
    grpo.add_tool_bonus([episode], 0.1)
    assert episode.score == earned


# --- rules, and what they leave to a judge --------------------------------------------------------

OPTIONS = {"answer": "B", "options": ["a cat", "a dog", "2 dogs"]}
CASES = [  # answer, truth, verdict (None: the judge's)
    # the text of another option, by which rules are lenient
    ("rug, tv, bin", {"answer": "A", "options": ["tv, rug, bin", "rug, tv, bin"]}, 0.0),
    ("50%", {"answer": "A", "options": ["50", "50%"]}, 0.0),
    (r"\omega", {"answer": "A", "options": [r"\Omega", r"\omega"]}, 0.0),
    ("A", "A", 1.0),
    ("(A)", "A", 1.0),
    ("'A'", "A", 1.0),
    ("A. red", "A", 1.0),
    ("option a", "A", 1.0),
    ("B", "A", 0.0),
    ("B. red", "A. red", 0.0),
    ("red", "A. red", 1.0),
    ("red", "A", None),
    ("A dog", "A", None),  # HRBench's judge looks for the letter anywhere in it
    ("B", OPTIONS, 1.0),
    ("a dog", OPTIONS, 1.0),
    ("dog", OPTIONS, 1.0),
    ("C", OPTIONS, 0.0),
    ("2 dogs", OPTIONS, 0.0),
    ("a puppy", OPTIONS, None),
    ("a dog", {"answer": "a dog", "options": ["a cat", "a dog"]}, 1.0),
    # by its letter: the text of option A is "B"
    ("B", {"answer": "B", "options": ["B", "A", "C"]}, 1.0),
    ("A", {"answer": "B", "options": ["B", "A", "C"]}, 0.0),
    ("a dog", {"answer": "a dog", "options": None}, 1.0),
    ("Red.", "red", 1.0),
    ("the red one", "red", None),
    ("red or blue", "red", None),
    ("3", "3", 1.0),
    ("three", "3", 1.0),
    ("3.0", 3, 1.0),
    ("1,000", "1000", 1.0),
    ("4", "3", 0.0),
    ("3.14", "3", None),
    ("500 cm", "5 m", None),
    (r"\frac{1}{2}", "0.5", 1.0),
    (r"\sqrt{8}", r"2\sqrt{2}", 1.0),
    (r"x+1", r"1+x", 1.0),
    (r"7\sqrt{2}", r"2\sqrt{2}", None),
    ("red", r"\boxed{red}", 1.0),
    ("x" * 900, "y" * 5000, None),
]


@pytest.mark.parametrize("answer, truth, verdict", CASES)
def test_rules_come_first(answer, truth, verdict):
    rewards = score(boxed(answer), truth, source="wemath-pro")
    assert rewards["judged"] == (verdict is None)
    if verdict is not None:
        assert (rewards["score"], rewards["acc"]) == (verdict, verdict)
        assert is_correct(rewards) == bool(verdict)


def test_what_a_judge_is_asked(judge):
    """Its verdict is the score; a right answer votes as the truth."""
    rewards = score(boxed("a puppy"), OPTIONS)
    assert judge.asked == [Case("visual_search", QUESTION["question"], "B. a dog", "a puppy")]
    assert rewards == {"score": 1.0, "acc": 1.0, "pred": "B. a dog", "judged": 1.0}
    assert score(boxed("B"), OPTIONS)["judged"] == 0 and len(judge.asked) == 1
    assert judge.probes == 2, "also where rules decide"


def test_without_a_judge_the_first_row_is_refused(monkeypatch):
    """Also if rules decide it; rows that none can come to need none."""
    monkeypatch.setattr(pyvision, "open_judge", open_judge)
    monkeypatch.delenv("JUDGE_URLS", raising=False)
    with pytest.raises(ValueError, match="set JUDGE_URLS"):
        score(boxed("red"), "red")
    assert score(boxed("2"), "2", source="vsi_numerical")["score"] == 1.0
    assert score(boxed("2"), "2", source="tir_bench/math")["score"] == 1.0


@pytest.mark.parametrize("question", [None, "", 7])
def test_without_a_question_no_judge_is_asked_and_the_sample_fails(question):
    with pytest.raises(ValueError, match=r"extra_info\['question'\]"):
        score(boxed("a puppy"), "a dog", question=question)
    assert score(boxed("a dog"), "a dog", question=question)["score"] == 1.0, "rules need none"


@pytest.mark.parametrize("truth", ["", "  ", None, {"answer": None}, {}])
def test_an_empty_truth_is_an_error(truth):
    for source in ("vstar", "vsi_numerical"):
        with pytest.raises(ValueError, match="is empty"):
            score(boxed("a"), truth, source=source)


# --- mean relative accuracy -----------------------------------------------------------------------

MEASURED = [  # answer, truth, score
    ("10", "10", 1.0),
    ("9", "10", 0.8),
    ("5", "10", 0.0),
    ("-10", "10", 0.0),
    ("0", "0", 1.0),
    ("0.001", "0", 0.0),
    ("14.9", "10", 0.1),
    ("9.5", "10", 0.9),
    ("1.5 metres", "1.5", 1.0),
    ("about 25 m^2", "24", 1.0),
    ("1e3", 1000, 1.0),
    ("2 or 3", "2", 0.0),
    ("many", "2", 0.0),
    ("1/0", "2", 0.0),
    (r"\frac{0}{0}", "2", 0.0),
    (".5 m", "0.5", 1.0),
    (r"about 1{,}000 m", "1000", 1.0),
    ("about −5", "5", 0.0),
    ("B", "B", 1.0),
    ("C", "B", 0.0),
]


@pytest.mark.parametrize("answer, truth, expected", MEASURED)
@pytest.mark.parametrize("source", ["vsi_numerical", "gsm8k_rule_verifiable"])
def test_mean_relative_accuracy(answer, truth, expected, source):
    rewards = score(f"frame 3 of 7\n{boxed(answer)}", truth, source=source)
    assert rewards["score"] == expected, (
        "of the boxed answer; the release takes the first number of the response"
    )
    assert is_correct(rewards) == (expected >= 0.5)


def test_relative_accuracy_is_that_of_its_formula():
    """At the thresholds themselves floats would decide by their rounding."""
    for percent in range(0, 61):
        error = Fraction(percent, 100)
        truth = Fraction(7, 3)
        expected = sum(error < 1 - Fraction(theta, 100) for theta in range(50, 100, 5)) / 10
        assert (
            relative_accuracy(truth * (1 + error), truth)
            == expected
            == relative_accuracy(-truth * (1 - error), -truth)
        )


def test_numbers():
    found = [
        number(text)
        for text in ("3/2", r"\frac{3}{2}", "1.5", "$1,500", "-2", "nan", "inf", "", "1, 2", "²")
    ]
    assert found == [Fraction(3, 2)] * 3 + [1500, -2] + [None] * 5
    assert number("about 1e3") == number("about 1,000 people") == 1000
    assert number("2,3 or so") is None and number("1.5e2 m away") == 150


# --- routes ---------------------------------------------------------------------------------------


def test_every_source_of_the_release_has_a_scorer():
    """Also those for which it has no examples and raises, and those whose scores it cannot
    index."""
    judged = (
        "vstar vstar/direct deepeyes minio3 hrbench-4k hrbench-4k/single "
        "hrbench-8k/cross ecd wemath-standard"
    )
    judged += (
        " wemath-pro v-interaction mathvision vsi longvila vl_agent chart zebra_cot "
        "vigorl math_8k_verified barc"
    )
    judged += " geoguessr thinklite_eureka xince"
    for source in judged.split():
        assert score(boxed("x y"), "a b c", source=source)["judged"], source
    for source in ("vsi_numerical", "vsi_rule_verifiable", "aime_rule_verifiable"):
        assert score(boxed("2"), "2", source=source) == {"score": 1.0, "acc": 1.0, "pred": "2"}
    assert set(FAMILIES) == set(EXAMPLES)
    with pytest.raises(ValueError, match="no reward of PyVision-RL for data_source 'frozenlake'"):
        score(boxed("x"), "x", source="frozenlake")


# --- hostile text ---------------------------------------------------------------------------------

HOSTILE = [
    "<answer>" * 200_000,
    "</answer>" * 100_000 + "<answer>" * 100_000,
    "<answer>" + r"\boxed{" * 200_000 + "</answer>",
    boxed("{" * 400_000),
    boxed("9" * 998),
    boxed("(" * 998),
    boxed("^".join("9" * 400)),
    boxed("\ud800" * 900),
    boxed("1,2;" * 240),
    boxed(" and " * 190),
    "\x00" * 10**6,
]


@pytest.mark.parametrize("i", range(len(HOSTILE)))
def test_hostile_text_takes_linear_time(i):
    began = time.monotonic()
    for source in ("vstar", "vsi_numerical"):
        score(HOSTILE[i], "12", source=source)
    assert time.monotonic() - began < 5

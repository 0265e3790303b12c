r"""Geometry3K: its reward in cases worked by hand, and hostile text.

pytest tests/rewards/test_geometry.py
"""

import random
import time

import pytest

from common.rewards import geo3k_reward, reward_function, score_response
from common.rewards.geometry import in_format, score_geo3k

MEGA = 100_000


def is_right(answer: str, truth: str) -> bool:
    return score_geo3k(rf"so it is $\boxed{{{answer}}}$.", truth)["acc"]


# --- right and wrong answers ---

RIGHT = [  # answer, ground truth
    ("65", "65"),
    (" 65. ", "65"),
    ("65.0", "65"),
    ("1,000", "1000"),
    ("-5", "-5"),
    ("x = 7", "7"),
    (r"65^\circ", "65"),
    (r"65^{\circ}", "65"),
    ("65°", "65"),
    ("65 degrees", "65"),
    ("65", r"65 ^ { \circ }"),
    (r"5\text{ cm}", "5"),
    (r"5 \text{ cm}^2", "5"),
    ("5 cm", "5"),
    ("12 units", "12"),
    (r"50\%", "50"),
    ("(5)", "5"),
    ("5.60", "5.6"),
    ("28/5", "5.6"),
    ("5.6", r"\frac{28}{5}"),
    ("1/2", r"\frac { 1 } { 2 }"),
    (r"\dfrac12", "1/2"),
    (".5", "1/2"),
    (r"\frac{-1}{2}", r"-\frac{1}{2}"),
    (r"2.85\times10^{1}", "28.5"),
    (r"5 \cdot 10^{-1}", r"\frac{1}{2}"),
    (r"\frac{14}{2}", r"\frac{14}{2}"),
    ("7", r"\frac{14}{2}"),
    ("1 1/2", r"\frac{3}{2}"),
    ("1 1/2", "1.5"),
    ("-1 1/2", "-3/2"),
    (r"5\frac{1}{3}", "16/3"),
    (r"\frac{16}{3}", r"5 \frac { 1 } { 3 }"),
    (r"2\sqrt{221}", r"2 \sqrt { 221 }"),
    ("2√221", r"2 \sqrt { 221 }"),
    (r"\sqrt{884}", r"2 \sqrt { 221 }"),
    (r"\frac{3}{\sqrt{2}}", r"\frac { 3 \sqrt { 2 } } { 2 }"),
    (r"7 \pi", r"7\pi"),
    (r"r^2\pi", r"\pi r^2"),
    ("4", r"\sqrt{16}"),
    ("x+5", "5 + x"),
    ("(1, 2)", "(1,2)"),
    (r"\left( 0.5, \sqrt{8} \right)", r"(\frac{1}{2}, 2\sqrt{2})"),
    ("(5 cm, 6 cm)", "(5, 6)"),
    ("[0, 1)", "[0,1)"),
    ("((1,2),3)", "((1, 2), 3)"),
    ("((0.5, 2), 3)", "((1/2, 2), 3)"),
    ("(1+2)(3+4)", "(1+2)(3+4)"),
]
WRONG = [
    ("66", "65"),
    ("-65", "65"),
    ("", "65"),
    ("None", "65"),
    ("65 or 66", "65"),
    ("10/2", "5"),  # an integer has to be written as one
    ("5/1", "5"),
    (r"\sqrt{25}", "5"),
    ("2^3", "8"),
    (r"5\times10^{1}", "50"),
    (r"2.85\times10^{2}", "28.5"),
    ("2+3", "5"),
    ("2/4", "1/2"),  # fractions in lowest terms
    (r"\frac{28}{4}", r"\frac{14}{2}"),
    ("1/0", "5"),
    ("1 1/2", "11/2"),
    ("0.33", "1/3"),
    ("5.6", "5.64"),
    ("6", "5.6"),
    ("29.73", r"2\sqrt{221}"),
    ("21.99", r"7\pi"),
    (r"\sqrt{221}", r"2\sqrt{221}"),
    ("(2, 1)", "(1, 2)"),
    ("(1, 2, 3)", "(1, 2)"),
    ("(1, 3)", "(1, 2)"),
    ("1, 2", "(1, 2)"),
    ("[0, 1]", "[0, 1)"),
    (r"(1, \sqrt{4})", "(1, 2)"),  # element by element
    ("(2/4, 1)", "(1/2, 1)"),
    ("(,)", "(1, 2)"),
    ("(1+2)(3+4)", "21"),
    ("y", "x"),
]


@pytest.mark.parametrize("answer, truth", RIGHT)
def test_right(answer, truth):
    assert is_right(answer, truth)


@pytest.mark.parametrize("answer, truth", WRONG)
def test_wrong(answer, truth):
    assert not is_right(answer, truth)


@pytest.mark.parametrize(
    "text, pred",
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{4} no, \boxed{5}", "5"),
        (r"\boxed{5} and, cut off, \boxed{6", "5"),
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("5", ""),
        (r"\boxed 5", ""),
        (r"\boxed{5", ""),
        (r"\boxed{" + "5" * 513 + "}", ""),
    ],
)
def test_last_box_counts(text, pred):
    result = score_geo3k(text, "5")
    assert (result["acc"], result["pred"]) == (pred == "5", pred)


def test_votes_agree_on_what_is_right_only():
    assert [score_geo3k(rf"\boxed{{{a}}}", "1/2")["pred"] for a in ("0.5", r"\frac12", "1/2")] == [
        r"\frac{1}{2}"
    ] * 3
    assert score_geo3k(r"\boxed{2/4}", "1/2")["pred"] == r"\frac{2}{4}"


def test_sympy_is_asked_only_where_it_is_needed_and_bounded(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "common.rewards.answers.formulas.same_value", lambda *texts: asked.append(texts) or False
    )
    for answer, truth in WRONG[:13]:
        assert not is_right(answer, truth)
    assert asked == []
    assert not is_right("r\\pi", "\\pi r")
    assert asked == [("r\\pi", "\\pi r")]


@pytest.mark.parametrize("truth", ["", " ", "$$", "1" * 513])
def test_ground_truth_that_nothing_matches_is_an_error(truth):
    with pytest.raises(ValueError, match="no answer of 1 to 512 characters"):
        score_geo3k(r"\boxed{5}", truth)


# --- format ---


@pytest.mark.parametrize(
    "text, expected",
    [
        (r"<think>a</think>\boxed{5}", 1),
        ("<think>\nlong\n\nthought</think>\n\nso $\\boxed{5}$.\n", 1),
        (r"<think></think>\boxed{}", 1),
        (r"<think>\boxed{4}</think>\boxed{5}", 1),
        (r"<think>a</think><think>b</think>\boxed{5}", 1),
        (r"<think>a</think>\boxed{5", 0),
        (r"<think>\boxed{5}</think>", 0),
        (r"<think>\boxed{5}</think>}", 0),
        (r"<think>\boxed{5}", 0),
        (r"</think><think>\boxed{5}", 0),
        (r"<think</think>\boxed{5}", 0),
        (r"a</think>\boxed{5}", 0),
        (r" <think>a</think>\boxed{5}", 0),
        (r"so <think>a</think>\boxed{5}", 0),
        (r"<think>a</think>boxed{5}", 0),
        (r"<think>a</think>\boxed {5}", 0),
        ("", 0),
    ],
)
def test_format(text, expected):
    assert in_format(text) == expected
    assert score_geo3k(text, "71")["format"] == float(expected)


@pytest.mark.parametrize(
    "text, expected",
    [
        (r"<think>a</think>\boxed{5}", {"score": 1.0, "acc": True, "format": 1.0, "pred": "5"}),
        (r"\boxed{5}", {"score": 0.9, "acc": True, "format": 0.0, "pred": "5"}),
        (r"<think>a</think>\boxed{6}", {"score": 0.1, "acc": False, "format": 1.0, "pred": "6"}),
        (r"<think>a</think> 5", {"score": 0.0, "acc": False, "format": 0.0, "pred": ""}),
    ],
)
def test_score(text, expected):
    assert score_geo3k(text, "5") == expected


@pytest.mark.parametrize("data_source", ["hiyouga/geometry3k", "geo3k", "my/geo3k_multiturn"])
def test_chosen_by_data_source(data_source):
    assert reward_function(data_source) is geo3k_reward
    scored = score_response(geo3k_reward, data_source, r"<think></think>\boxed{5}", "5")
    assert scored == {"score": 1.0, "acc": 1.0, "format": 1.0, "pred": "5"}


HOSTILE = {
    "open": "<think>" * (MEGA // 7),
    "close": "<think>" + "</think>" * (MEGA // 8),
    "open and close": "<think></think>" * (MEGA // 15),
    "boxes that stay open": "<think></think>" + r"\boxed{" * (MEGA // 7),
    "boxes": r"<think></think>" + r"\boxed{5}" * (MEGA // 9),
    "nested boxes": r"\boxed{" * (MEGA // 8) + "}" * (MEGA // 8),
    "braces": r"\boxed" + "{" * MEGA,
    "closing braces": r"<think></think>\boxed{" + "}" * MEGA,
    "backslashes": "<think></think>" + "\\" * MEGA,
    "spaces": r"\boxed" + " " * MEGA + "{5}",
    "long answer": r"\boxed{" + "5" * MEGA + "}",
    "mixed number": r"\boxed{1" + " " * 500 + "1/2}",
    "tuple": r"\boxed{(" + "1," * 250 + "1)}",
    "brackets": r"\boxed{" + "([" * 250 + "}",
    "NULs": "\0" * MEGA,
    "surrogates": "<think>\ud800</think>\\boxed{\udfff" + "\ud800" * MEGA + "}",
    "short surrogates": "\\boxed{(\ud800, 5)}",
    "powers": r"\boxed{" + "9^" * 200 + "9}",
    "radicals": r"\boxed{" + r"\sqrt{" * 70 + "2" + "}" * 70 + "}",
    "factorials": r"\boxed{((9!)!)!}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_takes_linear_time(name):
    score_geo3k(r"\boxed{x+1}", "1+x")  # imports sympy
    start = time.process_time()
    for truth in ("5", r"2\sqrt{221}", "(1, 2)", "(" + "1," * 200 + "1)"):
        assert score_geo3k(HOSTILE[name], truth)["acc"] == (
            name in ("boxes", "spaces") and truth == "5"
        )
    assert time.process_time() - start < 2.0


def test_no_response_raises():
    rng = random.Random(0)
    pieces = [*"{}()[],^_1./-√x°\\$%= \n\0\ud800", "25", "5 1/2", "<think>", "</think>"]
    pieces += [r"\boxed{", r"\frac", r"\sqrt", r"\pi", r"\text{"]
    for truth in ("5", r"\frac{\sqrt{3}}{2}", "(1, 2)") * 200:
        text = (
            "\\boxed{"
            + "".join(rng.choices(pieces, k=rng.randint(0, 12)))
            + "}" * rng.randint(0, 3)
        )
        assert set(score_geo3k(text, truth)) == {"score", "acc", "format", "pred"}

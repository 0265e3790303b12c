"""Scorers: TinyZero's edge table, loopholes, hostile text in bounded time, GSM8K, and the choice by
data_source.

pytest tests/rewards/test_rewards.py
"""

import json
import math
import random
import re
import time
import warnings
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT
from hostile import HOSTILE

from common.rewards import countdown, reward_function, score_response
from common.rewards.math import canonical_number, score_gsm8k
from common.workers.pool import load_function

GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"


def countdown_score(answer: str, numbers: list[int], target: int, mode: str = "strict") -> float:
    return countdown.score(
        f"<answer>{answer}</answer>", {"numbers": numbers, "target": target}, mode
    )["score"]


# --- Countdown, compat: the edge table of TinyZero's reward ---

EDGES = [  # response, numbers, target, score
    ("so it is 3. </think> <answer>1+2</answer><|im_end|>", [1, 2], 3, 1.0),
    ("<answer>1+2</answer>\n", [1, 2], 3, 0.0),
    ("<answer>1+2</answer>\nDone.", [1, 2], 3, 0.0),
    ("<answer>1+2\n</answer>", [1, 2], 3, 0.0),
    ("thinking\n<answer>1-2</answer> or <answer>1+2</answer>", [1, 2], 3, 1.0),
    ("<answer>1+2</answer> or <answer>1-2</answer>", [1, 2], 3, 0.1),
    # pairwise from the left: the content holds a tag
    ("<answer>oops <answer>1+2</answer>", [1, 2], 3, 0.1),
    ("<answer></answer>", [1, 2], 3, 0.1),
    ("<answer>1+2=3</answer>", [1, 2], 3, 0.1),
    ("<answer>1+2</answer>", [1, 2, 5], 3, 0.1),
    ("<answer>1+2+2</answer>", [1, 2], 5, 0.1),
    ("<answer>5/(2-2)</answer>", [5, 2, 2], 5, 0.1),
    ("<answer>2**3</answer>", [2, 3], 8, 1.0),
    ("<answer>2**3**2</answer>", [2, 2, 3], 512, 1.0),  # right-associative
    ("<answer>-2**2+20</answer>", [2, 2, 20], 16, 1.0),  # the sign binds weaker than the power
    ("<answer>7//2</answer>", [7, 2], 3, 1.0),
    ("<answer>1.5*4</answer>", [1, 5, 4], 6, 1.0),
    ("<answer>07+3</answer>", [7, 3], 10, 0.1),
    ("<answer>-3+5</answer>", [3, 5], 2, 1.0),
    ("<answer>+3+5</answer>", [3, 5], 8, 1.0),
    ("<answer>2(3)</answer>", [2, 3], 6, 0.1),
    ("<answer>2×3</answer>", [2, 3], 6, 0.1),
    ("<answer>2x3</answer>", [2, 3], 6, 0.1),
    (r"<answer>\frac{6}{3}</answer>", [6, 3], 2, 0.1),
    ("<answer>12</answer>", [1, 2], 12, 0.1),
    ("<answer>1/3*3</answer>", [1, 3, 3], 1, 1.0),
    ("the answer is 1+2", [1, 2], 3, 0.0),
    ("<answer>99**98**97</answer>", [97, 98, 99], 10, 0.1),
    ("<answer>42*1**98**99</answer>", [1, 42, 98, 99], 42, 1.0),  # which Python finds at once
    ("<answer>42*(-1)**99+0**98</answer>", [0, 1, 42, 98, 99], -42, 1.0),
    ("User: <answer> (1 + 2) / 3 </answer>\nAssistant: ok\n<answer>1+2</answer>", [1, 2], 3, 1.0),
    ("<answer>1+2</answer> Assistant: no tag of its own", [1, 2], 3, 0.0),
    ("<answer>1+2</answer><|im_start|>assistant no tag of its own", [1, 2], 3, 0.0),
]


@pytest.mark.parametrize("text, numbers, target, expected", EDGES)
def test_compat_edge_table(text, numbers, target, expected):
    result = countdown.score(text, {"numbers": numbers, "target": target}, mode="compat")
    assert result["score"] == expected
    assert result["format"] == float(expected > 0)
    assert countdown.tinyzero("countdown", text, {"numbers": numbers, "target": target}) == result


def tinyzero_oracle(answer: str, numbers: list[int], target: int) -> float:
    """TinyZero's rule with eval; only for tests, on numbers too small to hang it."""
    if sorted(int(n) for n in re.findall(r"\d+", answer)) != sorted(numbers):
        return 0.1
    if not re.match(r"^[\d+\-*/().\s]+$", answer):
        return 0.1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return 1.0 if abs(eval(answer, {"__builtins__": None}, {}) - target) < 1e-5 else 0.1
    except (SyntaxError, TypeError, ArithmeticError, ValueError):
        return 0.1


def random_expression(rng: random.Random, numbers: list[int], symbols: list[str]) -> str:
    """The numbers in random order with random symbols around: a good part is well formed, the rest
    is not."""
    pieces = []
    is_open = 0
    for number in rng.sample(numbers, len(numbers)):
        if rng.random() < 0.3:
            pieces.append("(")
            is_open += 1
        pieces.append(rng.choice(("", "", "", "", "-", "+")) + str(number))
        if is_open and rng.random() < 0.4:
            pieces.append(")")
            is_open -= 1
        pieces.append(rng.choice(symbols))
    pieces[-1] = ")" * is_open if rng.random() < 0.9 else pieces[-1]
    return "".join(pieces)


def test_compat_equals_tinyzero_on_random_expressions():
    rng = random.Random(0)
    right = 0
    for _ in range(1000):
        numbers = [rng.randint(0, 4) for _ in range(3)]
        answer = random_expression(
            rng, numbers, ["+", "-", "*", "/", "//", "**", ".", " ", " * ", "", "+-", "e"]
        )
        numbers[0] += rng.random() < 0.1  # the answer then uses a wrong number
        for target in range(-4, 17):
            expected = tinyzero_oracle(answer.strip(), numbers, target)
            assert countdown_score(answer, numbers, target, "compat") == expected, (
                answer,
                numbers,
                target,
            )
            right += expected == 1.0
    assert right > 100  # the comparison saw both outcomes


# --- Countdown, strict ---


@pytest.mark.parametrize(
    "answer, numbers, target, expected",
    [
        ("(44 + 19) + 35", [44, 19, 35], 98, 1.0),
        (" 44 +\n19 + 35 ", [44, 19, 35], 98, 1.0),
        ("1 / 3 * 3", [1, 3, 3], 1, 1.0),  # exact where floats may not be
        ("8 / (3 - 8 / 3)", [8, 3, 8, 3], 24, 1.0),
        ("+3 + 5", [3, 5], 8, 0.1),
        ("2**3", [2, 3], 8, 0.1),
        ("7//2", [7, 2], 3, 0.1),
        ("1.5*4", [1, 5, 4], 6, 0.1),
        ("07 + 3", [7, 3], 10, 0.1),
        ("1 + 2 = 3", [1, 2], 3, 0.1),
        ("1 + 2", [1, 2, 2], 3, 0.1),
        ("", [1, 2], 3, 0.1),
        ("٣ + 5", [3, 5], 8, 0.1),  # Arabic-Indic digit: str.isdigit and int() take it
        ("３ + 5", [3, 5], 8, 0.1),
        ("3 − 5", [3, 5], -2, 0.1),  # U+2212
        ("3_0 + 5", [3, 0, 5], 35, 0.1),
        ("1000000 - 1", [1000000, 1], 999999, 0.1),  # seven digits
        ("(" * 45 + "1 + 2" + ")" * 45, [1, 2], 3, 1.0),
        ("(" * 60 + "1 + 2" + ")" * 60, [1, 2], 3, 0.1),
        ("-" * 40 + "3", [3], 3, 1.0),
        ("-" * 60 + "3", [3], 3, 0.1),
    ],
)
def test_strict_expressions(answer, numbers, target, expected):
    assert countdown_score(answer, numbers, target) == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ("<answer>1+2</answer>", 1.0),
        ("<answer>1+2</answer>\nDone.\n", 1.0),
        ("<answer>\n1+2\n</answer><|im_end|>", 1.0),
        ("<answer>1-2</answer> no: <answer>1+2</answer>", 1.0),
        ("<answer>1+2</answer> no: <answer>1-2</answer>", 0.1),
        ("<answer>1+2</answer> cut off: <answer>1-", 1.0),  # the last complete one
        ("<answer>1+2</answer> stray </answer>", 1.0),
        ("<answer> <answer>1+2</answer>", 1.0),
        ("</answer>1+2<answer>", 0.0),
        ("<answer>1+2", 0.0),
        ("<ANSWER>1+2</ANSWER>", 0.0),
        ("1+2", 0.0),
        ("", 0.0),
    ],
)
def test_strict_extraction(text, expected):
    assert countdown.score(text, {"numbers": [1, 2], "target": 3})["score"] == expected


def strict_oracle(answer: str, numbers: list[int], target: int) -> float:
    """Python evaluates it in exact fractions, unless there is an operator besides + - * / or a
    unary plus."""
    if re.search(r"\*\*|//|(?:^|[-+*/(])\+", answer.replace(" ", "")):
        return 0.1
    if sorted(int(n) for n in re.findall(r"[0-9]+", answer)) != sorted(numbers):
        return 0.1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = eval(re.sub(r"[0-9]+", r"Fraction(\g<0>)", answer), {"Fraction": Fraction})
    except (SyntaxError, TypeError, ZeroDivisionError):
        return 0.1
    return 1.0 if value == target else 0.1


@pytest.mark.parametrize("count", [1000, pytest.param(3000, marks=pytest.mark.slow)])
def test_strict_equals_oracle_on_random_expressions(count):
    rng = random.Random(1)
    right = 0
    for _ in range(count):
        numbers = [rng.randint(0, 12) for _ in range(rng.choice((3, 4)))]
        answer = random_expression(
            rng, numbers, ["+", "-", "*", "/", " / ", "//", "**", " ", "", "--", ")*("]
        )
        numbers[0] += rng.random() < 0.1
        for target in range(-4, 17):
            expected = strict_oracle(answer, numbers, target)
            assert countdown_score(answer, numbers, target) == expected, (answer, numbers, target)
            right += expected == 1.0
    assert right > count / 30


def test_pred_decides_the_score():
    """For a majority vote: equal values agree, an answer that breaks the rules never votes with a
    right one."""
    truth = {"numbers": [1, 2, 3], "target": 6}

    def pred(answer):
        return countdown.score(f"<answer>{answer}</answer>", truth)["pred"]

    assert pred("1 + 2 + 3") == pred("(3 * 2) * 1") == "6"
    assert pred("1 / 2 + 3") == "7/2"
    assert pred("6") == pred("2 * 3") == pred("1 + 2 +") == ""
    assert countdown.score("no tag", truth)["pred"] == ""
    assert countdown.score("<answer>1.2*3</answer>", truth, "compat")["pred"] == str(1.2 * 3)


@pytest.mark.parametrize("mode", ["strict", "compat"])
def test_a_target_is_not_rounded(mode):
    def points(text: str, target: object) -> float:
        truth = {"numbers": [5, 2], "target": target}
        return countdown.score(f"Assistant: <answer>{text}</answer>", truth, mode)["score"]

    assert [
        points("5 / 2", 2.5),
        points("5 - 2", 2.5),
        points("5 - 2", 3),
        points("5 - 2", "3"),
    ] == [1, 0.1, 1, 1]
    for target in (float("nan"), "x", None):
        # also without an answer: a row that cannot be scored
        with pytest.raises((TypeError, ValueError)):
            countdown.score("nothing", {"numbers": [5, 2], "target": target}, mode)


def test_countdown_takes_numpy_ground_truth():
    """What pandas reads from parquet."""
    truth = {"numbers": np.array([44, 19, 35]), "target": np.int64(98)}
    result = countdown.score("<answer>44 + 19 + 35</answer>", truth)
    assert result == {"score": 1.0, "pred": "98", "format": 1.0}


# --- hostile text ---


@pytest.mark.parametrize("name", HOSTILE)
def test_megabyte_text_takes_linear_time(name):
    start = time.process_time()
    for mode in ("strict", "compat"):
        countdown.score(HOSTILE[name], {"numbers": [1, 2], "target": 3}, mode)
    score_gsm8k(HOSTILE[name], "72")
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize(
    "opening, closing, levels", [("(", ")", 1), ("-", "", 1), ("-(", ")", 2), ("1**", "", 1)]
)
def test_nesting_deeper_than_50_is_wrong(opening, closing, levels):
    """The number is a level itself. Where Python's parser gives up is far beyond."""
    for times in (24, 25, 49, 50, 100, 170):
        answer = opening * times + "1" + closing * times
        value = countdown.evaluate(answer, [1] * answer.count("1"), "compat")
        assert (value is not None) == (times * levels < 50), times


@pytest.mark.parametrize("mode", ["strict", "compat"])
@pytest.mark.parametrize(
    "answer",
    [
        "1_2",
        "0x12",
        "1e2",
        "1j+2",
        "1+...+2",
        "()+1+2",
        "1,2",
        "(x:=1)+2",
        "1+2 # 3",
        "1+2\0",
        "lambda: 1+2",
    ]
    + ["1+\\\n2", "1\x1c+2", "1\u3000+2", "'1'+'2'", "1 .real+2", "~1+2", "1%2", "[1+2][0]"]
    + ["(" * 100 + "1 2", "(" * 250 + "1+2", "1+2)+(" * 40, "(1)(2)", "1+2" + "()" * 200],
)
def test_what_else_python_can_read_is_wrong(answer, mode):
    """Expressions of Python's, texts that its parser refuses, and some that it gives up on."""
    assert (
        countdown.score(f"<answer>{answer}</answer>", {"numbers": [1, 2], "target": 3}, mode)[
            "score"
        ]
        <= 0.1
    )
    assert countdown.evaluate(answer, [int(n) for n in re.findall(r"[0-9]+", answer)], mode) is None


@pytest.mark.parametrize(
    "answer, numbers",
    [
        ("99**98**97", [99, 98, 97]),
        ("(99**98)**(97**96)", [99, 98, 97, 96]),
        ("2**-(9**99)", [2, 9, 99]),
        ("(9**999)/7", [9, 999, 7]),
        ("9.5**999999", [9, 5, 999999]),
        ("0**-1", [0, 1]),
        ("(-9.9)**150.5//1", [9, 9, 150, 5, 1]),
        ("((-9.9)**305.5)*((-9.9)**2.5)", [9, 9, 305, 5, 9, 9, 2, 5]),
        ("*".join(["9**1000"] * 8), [9, 1000] * 8),  # below the limit each, far above it together
    ],
)
def test_compat_powers_are_bounded(answer, numbers):
    start = time.process_time()
    assert countdown_score(answer, numbers, 50, "compat") == 0.1
    assert time.process_time() - start < 1.0


def test_unknown_mode_is_an_error():
    with pytest.raises(ValueError, match="lenient"):
        countdown.score("text", {"numbers": [1], "target": 1}, mode="lenient")


# --- GSM8K ---


@pytest.mark.parametrize(
    "text, truth, expected",
    [
        ("so\n#### 72", "72", 1),
        ("#### 72.", "72", 1),
        ("#### 72.50", "72.5", 1),
        ("#### $72", "72", 1),
        ("#### $-72", "-72", 1),
        ("#### 1,234", "1234", 1),
        ("#### 1234", "1,234", 1),
        ("#### 072", "72", 1),
        ("#### .5", "0.5", 1),
        ("#### -0", "0", 1),
        ("####72", "72", 1),
        ("#### 72 dollars<|im_end|>", "72", 1),
        ("#### 71\n#### 72", "72", 1),
        ("#### 72\n#### 71", "72", 0),
        ("#### 72, because 8 * 9", "72", 1),
        ("#### 7.2", "72", 0),
        ("#### -72", "72", 0),
        ("the answer is 72", "72", 0),
        ("#### ٧٢", "72", 0),
        ("####\n72", "72", 0),
        ("#### ,", "72", 0),
        ("", "72", 0),
        ("#### 72" + " " * 293, "72", 1),
        ("#### 72" + " " * 294, "72", 0),  # the last 300 characters
    ],
)
def test_gsm8k(text, truth, expected):
    assert score_gsm8k(text, truth)["score"] == expected


def test_gsm8k_pred_is_canonical():
    assert {
        score_gsm8k(f"#### {x}", "72")["pred"] for x in ("72", "72.", "72.00", "$72", "+72 #### 72")
    } == {"72"}
    assert score_gsm8k("no number", "72")["pred"] == ""
    long = "1" * 100
    assert canonical_number(f"{long}.10") == f"{long}.1"  # no rounding
    assert [canonical_number(x) for x in ("", "-", ".", "$", "--1", "1.2.3", "x")] == [""] * 7


def test_gsm8k_bad_ground_truth_is_an_error():
    with pytest.raises(ValueError, match="seventy-two"):
        score_gsm8k("#### 72", "seventy-two")


@pytest.mark.skipif(not GSM8K.is_dir(), reason="no GSM8K beside the repository")
@pytest.mark.parametrize("split, rows", [("train", 7473), ("test", 1319)])
def test_gsm8k_every_published_answer_is_right(split, rows):
    lines = (GSM8K / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == rows
    for line in lines:
        answer = json.loads(line)["answer"]
        truth = answer.split("#### ")[1].replace(",", "")
        assert score_gsm8k(answer, truth) == {"score": 1.0, "pred": canonical_number(truth)}
        assert score_gsm8k(answer, truth + "1")["score"] == 0.0


# --- choice by data_source, own functions, normalisation ---


def test_dispatch():
    truth = {"numbers": [1, 2], "target": 3}
    for source in ("countdown", "my/countdown-3to4"):
        assert (
            score_response(reward_function(source), source, "<answer>1+2</answer>", truth)["score"]
            == 1.0
        )
    for source in ("openai/gsm8k", "local/gsm8k"):
        assert score_response(reward_function(source), source, "#### 72", "72") == {
            "score": 1.0,
            "pred": "72",
        }


def test_unknown_data_source_is_explained():
    with pytest.raises(ValueError) as error:
        reward_function("my/chess")
    for words in ("my/chess", "countdown", "gsm8k", "--reward-function FILE.py:NAME"):
        assert words in str(error.value)


def test_a_reward_function_is_loaded(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "LIMIT = 3\n"
        "def length(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return min(len(solution_str), LIMIT)\n"
    )
    function = load_function(f"{file}:length", "--reward-function")
    assert score_response(function, "any", "abcdef", None) == {"score": 3.0}
    for spec, words in [
        (f"{tmp_path}/other.py:length", "there is no file"),
        (f"{file}:width", "defines no width"),
        (f"{file}:LIMIT", "not a function"),
        (f"{file}", "expected FILE.py:NAME"),
        (f"{file}:", "expected FILE.py:NAME"),
        ("length", "expected FILE.py:NAME"),
    ]:
        with pytest.raises(ValueError, match=words) as error:
            load_function(spec, "--reward-function")
        assert "--reward-function" in str(error.value)


def test_shipped_scorer_loads_by_path():
    path = Path(countdown.__file__)
    function = load_function(f"{path}:tinyzero", "--reward-function")
    assert (
        score_response(function, "x", "<answer>2**3</answer>", {"numbers": [2, 3], "target": 8})[
            "score"
        ]
        == 1.0
    )


def test_score_response_normalises():
    def returning(value):
        return score_response(
            lambda data_source, solution_str, ground_truth, extra_info: value, "x", "", ""
        )

    assert returning(1) == returning(True) == returning(np.float32(1)) == {"score": 1.0}
    assert returning(
        {"score": np.int64(1), "acc": True, "pred": "7", "note": None, "all": [1, 2]}
    ) == {
        "score": 1.0,
        "acc": 1.0,
        "pred": "7",
        "note": "",
        "all": "[1, 2]",
    }
    assert returning(-1e6) == {"score": -1e6}
    for bad in (
        math.nan,
        math.inf,
        None,
        "1",
        [1],
        {"score": None},
        {"score": 10**400},
        1.1e6,
        -1e39,
        1e300,
    ):
        with pytest.raises(ValueError, match="finite number"):
            returning(bad)
    with pytest.raises(ValueError, match='without the key "score"'):
        returning({"reward": 1})

r"""Boxed answers and DAPO: tables of equal and unequal answers, hostile text, a fuzz of all scorers; prepare.math.

pytest tests/test_math_rewards.py            # with 20,000 random strings
pytest tests/test_math_rewards.py -m slow    # with 100,000, and math-verify behind the workers' deadline
"""

import json
import random
import time
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import run_script
from test_rewards import HOSTILE, MEGA

from common.prepare import math as prepare
from common.rewards import (
    RewardWorkers,
    boxed_reward,
    countdown,
    dapo_reward,
    geometry,
    math,
    reward_function,
    score_response,
    tir_bench,
    visual_qa,
)
from common.rewards.math import equivalent, is_harmless, last_boxed, normalize, score_boxed, score_dapo, score_gsm8k

DATA = Path(__file__).parents[2] / "shared" / "data" / "math"
REPOSITORY = Path(__file__).parents[1]


def boxed_score(answer: str, truth: str) -> float:
    return score_boxed(rf"so it is $\boxed{{{answer}}}$.", truth)["score"]


# --- extraction ---


@pytest.mark.parametrize(
    "text, expected",
    [
        (r"\boxed{5}", "5"),
        (r"\fbox{5} and \framebox{6}", "6"),
        (r"\boxed{5} or \boxed{6}", "6"),
        (r"\boxed{5} cut off: \boxed{6", "5"),
        (r"\boxed{5} cut off: \boxed{\frac{1}{2}", "5"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{[0, 1\}}", r"[0, 1\}"),
        (r"\boxed{\begin{pmatrix} 1 \\{2} \end{pmatrix}}", r"\begin{pmatrix} 1 \\{2} \end{pmatrix}"),
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"\boxed {5}", "5"),
        ("\\boxed\n{5}", "5"),
        (r"$\boxed 5$", "5"),
        (r"$\boxed{5}$, in a \boxed notation", "5"),
        (r"\\boxed{5}", "5"),
        (r"\\\boxed{5}", "5"),
        (r"{ \boxed{5} } }", "5"),
        (r"{{ \boxed{5}", "5"),
        (r"} \boxed{5}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{5", None),
        (r"boxed{5}", None),
        (r"\boxed 5", None),
        ("5", None),
        ("", None),
    ],
)
def test_last_boxed(text, expected):
    assert last_boxed(text) == expected


# --- equal and unequal answers ---

SAME_SPELLING = [  # answer, ground truth: equal after normalisation, without math-verify
    ("5", "5"),
    (" 5. ", "5"),
    ("5.0", "5"),
    ("+5", "5"),
    ("-0", "0"),
    ("033", "33"),
    ("$5$", "5"),
    (r"\(5\)", "5"),
    (r"\$1,234.50", "1234.5"),
    ("1{,}000", "1000"),
    (r"1,\!000", "1000"),
    (r"11,\! 111,\! 111,\! 100", "11111111100"),
    (r"11,\! 111,\! 111,\! 100", "11,111,111,100"),
    (r"1{,}000\pi", r"1000\pi"),
    (r"\frac{20{,}000}{\pi}", r"\frac{20000}{\pi}"),
    ("−5", "-5"),
    ("0.5", r"\frac{1}{2}"),
    (".5", "1/2"),
    ("1/2", r"\frac12"),
    ("2/4", r"\dfrac{1}{2}"),
    (r"\tfrac{1}{2} + \frac1{72}", r"\dfrac{1}{2} +\! \frac{1}{72}"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"\frac{6}{2}", "3"),
    (r"\frac34i", r"\frac{3}{4}i"),
    (r"\sqrt3", r"\sqrt{3}"),
    (r"\sqrt 3", r"\sqrt{3}"),
    ("√3", r"\sqrt{3}"),
    ("sqrt(3)", r"\sqrt{3}"),
    ("2π", r"2\pi"),
    ("2 pi", r"2\pi"),
    (r"\left(x-2\right)\left(x+2\right)", "(x-2)(x+2)"),
    (r"10\%", "10"),
    (r"90^\circ", "90"),
    (r"90^{\circ}", "90"),
    ("90°", "90"),
    ("90 degrees", "90"),
    ("90 square kilometers", "90"),
    ("90 sq. ft", "90"),
    ("90percent.", "90"),
    (r"10\text{ units}", "10"),
    (r"5\text{cm}^2", "5"),
    ("5 cm^2", "5"),
    ("12 inches", "12"),
    (r"36\pi \text{ square units}", r"36\pi"),
    ("x = 5", "5"),
    (r"x \in [0,1]", "[0,1]"),
    ("f(x) = x^2", "x^2"),
    ("y = 2x+3", "2x + 3"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\textbf{Even}", "even"),
    (r"\mathrm{A}", "A"),
    ("52_{8}", "52_8"),
    ("x^{2}", "x^2"),
    (r"1,\ 2\text{ and }3", "1,2,3"),
    (r"3 \text{ or } 4", "3, 4"),
    ("0.6666666667", "0.6666666667"),
    ("9", "9 (apples)"),  # as ASDiv writes
    ("9.", "9 (years old)"),
    (r"9 \text{ (apples)}", "9"),
    ("1/2 (mile)", r"\frac{1}{2}"),
    ("12", "12 (miles/hour)"),
    ("5", "5 (m)"),
    (r"4.5 \times 10^{33}", "4.5e33"),  # as Minerva
    (r"4.5 \cdot 10^{33}", "4.5 × 10^33"),
    ("3000000", "3e6"),
    ("1E-3", "0.001"),
    (r"-1.6 \times 10^{-19}", "-1.6e-19"),
    ("10^{6}", "1e6"),
    ("Option B", "B"),
    (r"\textbf{Option B}", "B"),
    ("choice C.", "C"),
]
SAME_VALUE = [  # answer, ground truth: spelled differently
    ("1 1/2", "3/2"),
    ("-1 1/2", r"-\frac{3}{2}"),
    ("3/2", r"1\frac{1}{2}"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    ("1 + 2i", "2i + 1"),
    ("x^2 - 1", "(x-1)(x+1)"),
    (r"x/2", r"\frac{x}{2}"),
    (r"\frac{25}{13}", r"1\frac{12}{13}"),
    ("4, 10, -2", "10, 4, -2"),
    (r"\{2, 1\}", "1, 2"),
    (r"\text{(C)}", "C"),
    ("Option (C)", "C"),
    ("33, 18", "33 (pennies); 18 (nickels)"),
    ("2^{10}", "1024"),
    ("10!", "3628800"),
    (r"\binom{10}{3}", "120"),
    (r"\sqrt{25}", "5"),
    (r"\begin{pmatrix} 1/2 \\ 3 \end{pmatrix}", r"\begin{pmatrix} \frac{1}{2} \\ 3 \end{pmatrix}"),
    ("2/3", "0.6666666667"),  # as MAWPS rounds
    ("10/3", "3.33333"),
]
UNEQUAL = [  # answer, ground truth
    ("11_3", "11_2"),  # numbers in other bases
    ("2516_9", "2516_8"),
    ("24_{10}", "24_5"),
    (r"52_\text{seven}", r"52_\text{eight}"),
    (r"52_{\text{seven}}", r"52_{\text{eight}}"),
    ("2516", "2516_8"),
    ("1 1/2", "11/2"),
    ("6", "5"),
    ("5", "-5"),
    ("", "5"),
    ("1,2,3", "123"),
    ("4, 12, 2", "10, 4, 2"),
    ("(2,1)", "(1,2)"),
    ("[0,1)", "(0,1)"),
    ("4, 5", "5"),
    (r"5 \text{ or } 6", "5"),
    ("0.3333", r"\frac{1}{3}"),
    ("0.333333", r"\frac{1}{3}"),
    ("0.67", "0.6666666667"),
    ("9.434", "9.43"),
    ("0.0000001", "0"),
    ("10^{-7}", "0"),
    ("10 units", "100"),
    (r"\frac{1}{0}", "5"),
    ("seat", "east"),  # math-verify reads letters as factors
    ("no", "on a"),
    ("A", "b"),
    ("٥", "5"),  # unicode digits, which \d and int() take
    ("５", "5"),
    ("x²", "x^2"),
    ("2x", "x^2"),
    (r"\infty", r"-\infty"),
    ("7", r"\text{7 million}"),
    ("8", "9 (apples)"),
    ("5 (or 6)", "5"),
    ("5 (not 6)", "5"),
    ("12 (or 24 if counted twice)", "12"),
    ("12 (instead of 24)", "12"),
    ("3 (mod 5)", "3"),
    ("2", "2 (x)"),
    ("2", "2 (a + b)"),
    ("4.5e32", "4.5e33"),
    ("3e6", "3e-6"),
    ("2e", "2"),
    ("52", "5e2"),
    ("1.000001e3", "1e3"),
    ("Option A", "B"),
    ("Options", "B"),
    ("2100", "2, 100"),
    ("3, 100, 200", "3100200"),
]


@pytest.mark.parametrize("answer, truth", SAME_SPELLING)
def test_same_spelling(answer, truth, monkeypatch):
    monkeypatch.setattr(math, "math_verify_equal", lambda answer, truth: False)
    assert boxed_score(answer, truth) == boxed_score(truth, answer) == 1.0
    assert normalize(answer) == normalize(truth) == normalize(normalize(answer))


@pytest.mark.parametrize("answer, truth", SAME_VALUE)
def test_same_value(answer, truth):
    assert normalize(answer) != normalize(truth)
    result = score_boxed(rf"\boxed{{{answer}}}", truth)
    assert result == {"score": 1.0, "pred": normalize(truth)}  # all right answers vote for the same


@pytest.mark.parametrize("answer, truth", UNEQUAL)
def test_unequal(answer, truth):
    assert score_boxed(rf"\boxed{{{answer}}}", truth) == {"score": 0.0, "pred": normalize(answer)}


def test_no_box_no_point():
    assert score_boxed("The answer is 5", "5") == {"score": 0.0, "pred": ""}
    assert score_boxed(r"\boxed{5", "5") == {"score": 0.0, "pred": ""}


def test_numbers_as_ground_truth():
    assert score_boxed(r"\boxed{27}", 27.0)["score"] == score_dapo("Answer: 27", 27.0)["score"] == 1.0


def test_a_list_is_no_number():
    """Thousands are separated by a comma alone."""
    assert score_dapo("Answer: 2, 100", "2,  100")["acc"] and not score_dapo("Answer: 2100", "2, 100")["acc"]
    assert geometry.score_geo3k(r"\boxed{2, 100}", "2, 100")["acc"]
    assert not geometry.score_geo3k(r"\boxed{2100}", "2, 100")["acc"]
    assert score_dapo("Answer: (1,234)", "(1, 234)")["acc"]


@pytest.mark.parametrize("truth", [["5"], {"answer": "5"}, None, float("nan"), float("inf")], ids=repr)
def test_what_no_answer_can_be_is_no_truth(truth):
    for scorer in (score_boxed, score_dapo, geometry.score_geo3k, partial(tir_bench.score_tir_bench, "math")):
        with pytest.raises(ValueError, match="is neither a text nor a finite number"):
            scorer(r"\boxed{5} Answer: 5", truth)
    several = [truth] if truth == ["5"] else truth if isinstance(truth, dict) else ["4", truth]
    with pytest.raises(ValueError, match="is neither a text nor a finite number"):
        visual_qa.score_visual_qa(r"\boxed{5}", several)


def test_only_short_answers():
    assert boxed_score("1" * 512, "1" * 512) == 1.0
    assert score_boxed(rf"\boxed{{{'1' * 513}}}", "1") == {"score": 0.0, "pred": ""}
    assert boxed_score("x+" * 150 + "1", "x+1") == 0.0


@pytest.mark.parametrize("scorer", [score_boxed, score_dapo])
@pytest.mark.parametrize("truth", ["", " ", "$$", "1" * 513])
def test_ground_truth_that_nothing_matches_is_an_error(scorer, truth):
    with pytest.raises(ValueError, match="no answer of 1 to 512 characters"):
        scorer(r"\boxed{5} Answer: 5", truth)


# --- what math-verify is not asked ---


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^9}",
        "9^9^9",
        "2^{99999999}",
        "2^{1 000 000}",
        r"2^{99 \cdot 99}",
        "2^(999)",
        "2^-9",
        "((9^{99})^{99})^{99}",
        "(x+y+z)^{50}",
        "9!!",
        "(9!)!",
        "9^{9!}",
        "99999!",
        r"2^{\binom{50}{25}}",
        r"\binom{99999}{50000}",
        r"\sum_{k=1}^{9} k",
        r"\int_0^1 x dx",
        "(" * 9 + "5" + ")" * 9,
        "x+" * 100 + "x",
        "Evelyn",
        r"\text{all of } x",
        "٣x",
        "x^",
        "",
    ],
)
def test_harmful_answers_are_compared_as_strings(answer, monkeypatch):
    monkeypatch.setattr(math, "math_verify_equal", lambda answer, truth: pytest.fail(f"asked about {answer!r}"))
    assert not is_harmless(math.clean(answer))
    assert not equivalent(answer, "x+1") and not equivalent("x+1", answer)


def test_harmless_answers():
    nested = "(" * 8 + "5" + ")" * 8
    for answer in ("2^{2023}", "x^{10}+x^9+x^8", r"2^{\frac{1}{3}}", "99!", "(x+1)^{20}", "f^{-1}", nested):
        assert is_harmless(math.clean(answer)), answer


def test_math_verify_only_where_needed(monkeypatch):
    asked = []
    monkeypatch.setattr(math, "math_verify_equal", lambda *answers: asked.append(answers) or False)
    pairs = [("5", "5"), ("6", "5"), ("0.25", r"\frac{1}{3}"), ("Adam", "Eve"), ("", "5"), ("1" * 600, "5")]
    assert [boxed_score(*pair) for pair in pairs] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert asked == []
    boxed_score(r"1 + x\text{ cm}", "$x + 1$")
    assert asked == [("1 + x", "x + 1")]


def test_math_verify_is_imported_late_and_silent(tmp_path):
    """By the first answer that needs it; its warning that nothing bounds its time goes nowhere."""
    (tmp_path / "script.py").write_text("""
import sys
from common.rewards import math
print({"latex2sympy2_extended", "math_verify"} & set(sys.modules))
print(math.score_boxed("\\\\boxed{1 + x}", "x + 1")["score"])
""")
    result = run_script(tmp_path / "script.py")
    assert (result.stdout, result.stderr) == ("set()\n1.0\n", "")


# --- DAPO ---


@pytest.mark.parametrize(
    "text, truth, expected",
    [
        ("Answer: 204", "204", 1),
        ("so\n\nAnswer: $204$", "204", 1),
        ("ANSWER : 204.", "204", 1),
        ("Answer:\n204", "204", 1),
        ("**Answer: 204**", "204", 1),
        ("**Answer:** 204", "204", 1),
        (r"Answer: \boxed{204}", "204", 1),
        (r"Answer: $\boxed{204}$, which we had to find.", "204", 1),
        (r"Answer: \frac{1}{2}", "0.5", 1),
        ("Answer: m + n = 204", "204", 1),
        ("Answer: 025", "25", 1),
        ("Answer: 1,000", "1000", 1),
        ("Answer: 12 degrees", "12", 1),
        ("Answer: 71\nAnswer: 204", "204", 1),
        ("Answer: The sum is $204$.", "204", 1),  # the first $...$, as in verl
        ("Answer: $m + n = 204$ is the sum", "204", 1),
        ("Answer: $71$ or $204$", "204", -1),
        ("Answer: $x$ = 204", "204", 1),
        ("Answer: $m+n$ = $204$", "204", 1),
        ("Answer: 71 Answer: 204", "204", 1),
        ("Answer: 204\nAnswer: ", "204", 1),
        ("Answer: 204\nAnswer: 71", "204", -1),
        ("Answer: 205", "204", -1),
        ("Answer: -204", "204", -1),
        ("Answer: 204 or 205", "204", -1),
        ("Answer: ٢٠٤", "204", -1),
        ("Anſwer: 204", "204", -1),
        ("The answer is 204", "204", -1),
        (r"\boxed{204}", "204", -1),
        ("204", "204", -1),
        ("", "204", -1),
        ("Answer: 204" + " " * 289, "204", 1),
        ("Answer: 204" + " " * 290, "204", -1),  # the last 300 characters
    ],
)
def test_dapo(text, truth, expected):
    result = score_dapo(text, truth)
    assert list(result) == ["score", "acc", "pred"]
    assert (result["score"], result["acc"]) == (float(expected), expected == 1)
    if result["acc"]:
        assert result["pred"] == normalize(truth)


def test_dapo_pred():
    assert score_dapo("Answer: 0071.0", "204")["pred"] == "71"
    assert score_dapo("nothing", "204")["pred"] == ""


@pytest.mark.parametrize(
    "text, expected",
    [
        (r"\boxed{204}", 1),
        (r"\boxed{204}" + " " * 89, 1),
        (r"\boxed{204}" + " " * 90, -1),  # the last 100 characters
        (r"\boxed{ 204}", -1),
        ("Answer: 204", -1),
        (r"\boxed{204} \boxed{205}", -1),
    ],
)
def test_dapo_strict_box(text, expected):
    assert score_dapo(text, "204", mode="boxed")["score"] == expected
    assert math.dapo_strict_box("aime", text, "204") == score_dapo(text, "204", mode="boxed")


def test_dapo_unknown_mode_is_an_error():
    with pytest.raises(ValueError, match="lenient"):
        score_dapo("Answer: 1", "1", mode="lenient")


# --- choice by data_source ---


@pytest.mark.parametrize(
    "function, sources",
    [
        (
            boxed_reward,
            "lighteval/MATH DigitalLearningGmbH/MATH-lighteval HuggingFaceH4/MATH-500 math/aime24 math/amc23 "
            "math/svamp amc23 svamp mawps_addsub numina_olympiads",
        ),
        (dapo_reward, "math_dapo math_dapo_reasoning math aime aime2024 aime_2025"),
        (reward_function("openai/gsm8k"), "gsm8k local/gsm8k math/gsm8k"),
        (reward_function("countdown"), "countdown math/countdown MATH-countdown"),
    ],
)
def test_dispatch(function, sources):
    for source in sources.split():
        assert reward_function(source) is function, source


def test_scores_through_the_dispatcher():
    score = score_response(reward_function("lighteval/MATH"), "lighteval/MATH", r"\boxed{5}", "5")
    assert score == {"score": 1.0, "pred": "5"}
    score = score_response(reward_function("aime2024"), "aime2024", "Answer: 6", "5")
    assert score == {"score": -1.0, "acc": 0.0, "pred": "6"}


# --- hostile text, for all scorers ---

SCORERS = {
    "countdown strict": lambda text: countdown.score(text, {"numbers": [1, 2, 3], "target": 6}),
    "countdown compat": lambda text: countdown.score(text, {"numbers": [1, 2, 3], "target": 6}, "compat"),
    "gsm8k strict": lambda text: score_gsm8k(text, "72"),
    "gsm8k flexible": lambda text: score_gsm8k(text, "72", "flexible"),
    "boxed": lambda text: score_boxed(text, r"\frac{\sqrt{3}}{2}"),
    "dapo": lambda text: score_dapo(text, "204"),
    "dapo boxed": lambda text: score_dapo(text, "204", "boxed"),
}
MEGABYTES = HOSTILE | {
    "boxes": r"\boxed{" * (MEGA // 7),
    "boxes, then closed": r"\boxed{" * (MEGA // 14) + "}" * (MEGA // 14),
    "whole boxes": r"\boxed{5}" * (MEGA // 9),
    "box of braces": r"\boxed{" + "{" * (MEGA // 2) + "}" * (MEGA // 2) + "}",
    "open braces": r"\boxed{5}" + "{" * MEGA,
    "closed braces": r"\boxed{5}" + "}" * MEGA,
    "box of digits": r"\boxed{" + "9" * MEGA + "}",
    "box of powers": r"\boxed{" + "9^" * (MEGA // 2) + "9}",
    "box of spaces": r"\boxed{5" + " " * MEGA + "}",
    "space after the box": r"\boxed" + " " * MEGA + "{5}",
    "boxes without braces": r"\boxed 5" * (MEGA // 8),
    "word boxes": r"\boxed x$" * (MEGA // 9),
    "one long word": r"\boxed " + "x" * MEGA,
    "backslashes": "\\" * MEGA,
    "backslashes in a box": r"\boxed{" + "\\" * MEGA + "}",
    "escaped braces": r"\boxed{" + r"\{" * (MEGA // 2) + "}",
    "answers": "Answer: " * (MEGA // 8),
    "long answer": "Answer: " + "5" * MEGA,
    "fractions": r"\boxed{" + r"\frac{1}{" * (MEGA // 9) + "}" * (MEGA // 9) + "}",
    "unicode": r"\boxed{" + "٣²½−√∞" * (MEGA // 6) + "}",
}


@pytest.mark.parametrize("name", MEGABYTES)
def test_megabyte_text_takes_linear_time(name):
    """The slowest takes 0.4 s of CPU time for all the scorers together; what is quadratic takes minutes."""
    start = time.process_time()
    for scorer in SCORERS.values():
        scorer(MEGABYTES[name])
    assert time.process_time() - start < 2.0


def test_longest_answers_take_linear_time():
    """At the limit of 512 characters, where no regex may go astray; each takes a millisecond."""
    patterns = ("1", "1,", "5 ", " ", ".", "a", "x=", ", and ", "((", "{", "^{", r"\\", r"\frac", r"\text{", r"\sqrt(")
    for pattern in patterns:
        answer = (pattern * 512)[:512]
        start = time.process_time()
        for text in (answer, answer + "x", "x" + answer, "1" + answer[:-1]):
            normalize(text[:512])
            is_harmless(text[:200])
        assert time.process_time() - start < 0.25, pattern


PIECES = [
    *"0123456789+-*/(){}[]<>^_=|!,.;:$%&~#' \n\t\r\0\\xyzie",
    *("٣", "５", "²", "½", "−", "×", "π", "√", "∞", "°", "é", "好", "\u202e", "\ud800", "\U0001d7d9"),
    *("<answer>", "</answer>", "####", "Answer:", "answer :", "Assistant:", "**", "//", " and ", " cm", "inf", "NaN"),
    *(r"\boxed{", r"\fbox{", r"\boxed ", r"\frac", r"\frac{1}{2}", r"\sqrt", r"\sqrt{2}", r"\text{", r"\text{ cm}"),
    *(r"\left(", r"\right)", r"\{", r"\}", r"\\", r"\pi", r"\infty", r"\cup", r"\log", r"\sin", r"\circ", r"\%"),
    *(r"\begin{pmatrix}", r"\end{pmatrix}", r"\binom{9}{4}", r"\sum_{k=1}^{99}", "^{9^{9^9}}", "^{99999999}", "9!"),
]


def fuzzed(rng: random.Random) -> str:
    """Random pieces, at times repeated, nested or cut; half of them where the scorers look for an answer."""
    text = "".join(rng.choices(PIECES, k=rng.choice((1, 3, 8, 20, 60))))
    if rng.random() < 0.2:
        piece, bracket = rng.choice(PIECES), rng.choice("})]")
        text = rng.choice((piece * rng.choice((10, 100, 700)) + text, f"{piece * 30}{text}{bracket * 30}"))
    if rng.random() < 0.5:
        text = f"<answer>{text}</answer>\n#### {text}\n\\boxed{{{text}}} Answer: {text}"
    return text[: rng.randrange(len(text))] if rng.random() < 0.1 else text


POSSIBLE = {"countdown": (0.0, 0.1, 1.0), "gsm8k": (0.0, 1.0), "boxed": (0.0, 1.0), "dapo": (-1.0, 1.0)}


def fuzz(seed: int, count: int) -> None:
    rng, slowest = random.Random(seed), 0.0
    for _ in range(count):
        text = fuzzed(rng)
        for name, scorer in SCORERS.items():
            start = time.process_time()
            try:
                result = scorer(text)
            except Exception as error:
                raise AssertionError(f"{name} raised on {text!r}") from error
            slowest = max(slowest, time.process_time() - start)
            assert result["score"] in POSSIBLE[name.split()[0]], (name, text)
            assert isinstance(result["pred"], str), (name, text)
    assert slowest < 0.5


def test_fuzz_all_scorers(monkeypatch):
    """math-verify takes too long for 3,000 strings; the next tests have it."""
    monkeypatch.setattr(math, "math_verify_equal", lambda answer, truth: False)
    fuzz(seed=0, count=3000)


@pytest.mark.slow
def test_fuzz_all_scorers_for_long(monkeypatch):
    monkeypatch.setattr(math, "math_verify_equal", lambda answer, truth: False)
    fuzz(seed=1, count=100_000)


def harmless_answers(seed: int, count: int) -> list[str]:
    """Random answers that math-verify is asked about."""
    rng, answers = random.Random(seed), []
    while len(answers) < count:
        text = "".join(rng.choices(PIECES, k=rng.choice((2, 4, 8))))
        if is_harmless(math.clean(text)) and math.rational(normalize(text)) is None:
            answers.append(text)
    return answers


def test_fuzz_math_verify(capfd):
    for answer in harmless_answers(seed=0, count=150):
        assert equivalent(answer, r"\frac{\sqrt{3}}{2}") in (True, False), answer
    assert capfd.readouterr() == ("", "")  # neither warnings nor a parser's complaints


@pytest.mark.slow
def test_fuzz_math_verify_behind_the_deadline():
    """What takes too long although it looks harmless costs its sample, and nothing else."""
    truth = r"\frac{\sqrt{3}}{2}"
    pairs = [("x^{99}+3=x^2", "x^7+x=1"), *((answer, truth) for answer in harmless_answers(seed=1, count=3000))]
    jobs = [("math/fuzz", rf"\boxed{{{answer}}}", truth, None) for answer, truth in [*pairs, ("3/\\sqrt{12}", truth)]]
    workers = RewardWorkers(None, workers=1, timeout_s=5)
    try:
        results = workers.score(jobs)
    finally:
        workers.close()
    assert "timeout" in results[0]["error"] and results[-1]["score"] == 1.0
    errors = [result["error"] for result in results if "score" not in result]
    assert len(errors) < 10 and all("timeout" in error or "MemoryError" in error for error in errors), errors


# --- real problems ---


@pytest.mark.skipif(not DATA.is_dir(), reason="no benchmarks beside the repository")
def test_benchmarks_from_file_to_score(tmp_path):
    prepare.main(prepare.Args(out=tmp_path, source=str(DATA)))
    rows = pq.read_table(tmp_path / "test.parquet").to_pylist()
    counts = {}
    for row in rows:
        source, truth = row["data_source"], row["reward_model"]["ground_truth"]
        counts[source] = counts.get(source, 0) + 1
        function = reward_function(source)
        assert function is boxed_reward
        assert score_response(function, source, rf"so $\boxed{{{truth}}}$", truth)["score"] == 1.0, row
        assert score_response(function, source, rf"so $\boxed{{1{truth}}}$", truth)["score"] == 0.0, row
        assert score_dapo(f"Answer: {truth}", truth)["score"] == 1.0, row
        assert row["prompt"][0]["content"] == f"{row['extra_info']['question']} {prepare.INSTRUCTION}"
    mawps = {"math/mawps_addsub": 395, "math/mawps_multiarith": 600, "math/mawps_singleop": 562}
    assert counts == {"math/aime24": 30, "math/amc23": 40, "math/svamp": 1000, **mawps}
    assert [row["extra_info"]["index"] for row in rows] == list(range(len(rows)))
    solved = [
        score_boxed(row["extra_info"]["answer"], row["reward_model"]["ground_truth"])["score"]
        for row in rows
        if row["data_source"] == "math/aime24"
    ]
    assert sum(solved) >= 25  # the published solutions; some end without a box


# --- prepare.math ---

PROBLEM, SOLUTION = "What is $1/2$ of $1$?", r"It is $\frac{1}{3} < \boxed{\frac{1}{2}}$."


def write_jsonl(path: Path, *records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def prepared(tmp_path: Path, source: Path) -> dict[str, list[dict]]:
    prepare.main(prepare.Args(out=tmp_path / "out", source=str(source)))
    return {path.stem: pq.read_table(path).to_pylist() for path in sorted((tmp_path / "out").iterdir())}


def test_prepare_row_content(tmp_path, capsys):
    record = {"problem": PROBLEM, "level": "Level 1", "type": "Algebra", "solution": SOLUTION}
    rows = prepared(tmp_path, write_jsonl(tmp_path / "algebra_test.jsonl", record, record))
    assert rows["test"][1] == {
        "data_source": "math/algebra",
        "prompt": [
            {
                "role": "user",
                "content": f"{PROBLEM} Let's think step by step and output the final answer within \\boxed{{}}.",
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": r"\frac{1}{2}"},
        "extra_info": {"split": "test", "index": 1, "question": PROBLEM, "answer": SOLUTION},
    }
    assert list(rows) == ["test"] and "2 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    "record, question, truth, answer",
    [
        ({"problem": "p", "solution": SOLUTION, "answer": "0.5"}, "p", "0.5", SOLUTION),
        ({"question": "q", "answer": SOLUTION}, "q", r"\frac{1}{2}", SOLUTION),
        ({"problem": "p", "question": "q", "answer": "204"}, "p", "204", "204"),
        ({"Problem": "p", "Solution": r"\fbox{7}", "Answer": 7}, "p", "7", r"\fbox{7}"),
        ({"problem": "p", "answer": 27.0}, "p", "27", "27"),
        ({"input": "i", "target": 43.0}, "i", "43", "43"),
        ({"input": "i", "target": 0.6666666667}, "i", "0.6666666667", "0.6666666667"),
        ({"input": "i", "target": -1e20}, "i", "-100000000000000000000", "-100000000000000000000"),
        ({"Body": "Two apples", "Question": "How many?", "Answer": 2.0}, "Two apples. How many?", "2", "2"),
        ({"Body": "Two apples. ", "Question": "How many?", "Answer": 2}, "Two apples. How many?", "2", "2"),
        ({"problem": "p", "answer": None, "solution": SOLUTION}, "p", r"\frac{1}{2}", SOLUTION),
    ],
)
def test_prepare_reads_the_usual_keys(record, question, truth, answer):
    assert prepare.read_record(record) == (question, truth, answer)


def test_prepare_folder_by_split_and_source(tmp_path):
    folder = tmp_path / "MATH"
    folder.mkdir()
    for name in ("train", "test", "amc23_test", "extra-train", "aime", "contest"):
        write_jsonl(folder / f"{name}.jsonl", {"problem": name, "answer": "5"})
    rows = prepared(tmp_path, folder)
    found = {
        split: [(row["data_source"], row["prompt"][0]["content"].split()[0]) for row in split_rows]
        for split, split_rows in rows.items()
    }
    assert found == {
        "test": [
            ("math/aime", "aime"),
            ("math/amc23", "amc23_test"),
            ("math/contest", "contest"),
            ("math/MATH", "test"),
        ],
        "train": [("math/extra", "extra-train"), ("math/MATH", "train")],
    }


@pytest.mark.parametrize(
    "line, reason",
    [
        ('{"problem": "p"', "invalid JSON"),
        ("\udcff", "invalid JSON"),
        ('["p", "5"]', "a JSON list, expected an object"),
        ('{"answer": "5"}', "no question: expected text as problem, question or input, found None"),
        ('{"problem": 5, "answer": "5"}', "no question: .* found 5"),
        ('{"problem": " ", "answer": "5"}', "no question"),
        ('{"problem": "p"}', "no answer: expected text or a number as answer, target or solution, found None"),
        ('{"problem": "p", "answer": ["5"]}', r"no answer: .* found \['5'\]"),
        ('{"problem": "p", "answer": true}', "no answer: .* found True"),
        ('{"problem": "p", "answer": NaN}', "no answer: .* found nan"),
        ('{"problem": "p", "answer": ""}', "the ground truth '' is no answer"),
        ('{"problem": "p", "answer": 1' + "0" * 600 + "}", "is no answer of 1 to 512 characters"),
        (r'{"problem": "p", "answer": "\\boxed{}"}', "the ground truth '' is no answer"),
        (r'{"problem": "p", "solution": "It is \\boxed{}."}', "the ground truth '' is no answer"),
        (r'{"problem": "p\ud800", "answer": 1}', "surrogates not allowed"),
        ('{"problem": "p", "answer": "' + "x" * 600 + '"}', "is no answer of 1 to 512 characters"),
        ('{"problem": "p", "solution": "It is 5."}', "the solution has no complete"),
        (r'{"problem": "p", "solution": "It is \\boxed{5"}', "the solution has no complete"),
        ('{"question": "q", "answer": "So 8 * 9 = 72.\\n#### 72"}', "GSM8K's format: python -m common.prepare.gsm8k"),
    ],
)
def test_prepare_bad_line_is_named(tmp_path, line, reason):
    path = tmp_path / "mine.jsonl"
    good = json.dumps({"problem": "p", "answer": "5"})
    path.write_bytes(f"{good}\n\n{line}\n".encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=rf"mine\.jsonl:3: .*{reason}"):
        prepare.main(prepare.Args(out=tmp_path / "out", source=str(path)))
    assert not (tmp_path / "out").exists()


def test_prepare_drops_bad_rows_if_asked_to(tmp_path, capsys):
    """All of them are counted, and the first five named."""
    good, bad = {"problem": "p", "answer": "5"}, {"problem": "p", "answer": ""}
    path = write_jsonl(tmp_path / "mine.jsonl", good, *[bad] * 7, good)
    with pytest.raises(ValueError, match=r"^7 unusable rows \(--bad-rows drop drops them\)") as error:
        prepare.main(prepare.Args(out=tmp_path / "out", source=str(path)))
    assert str(error.value).count("mine.jsonl:") == 5 and not (tmp_path / "out").exists()
    prepare.main(prepare.Args(out=tmp_path / "out", source=str(path), bad_rows="drop"))
    rows = pq.read_table(tmp_path / "out" / "test.parquet").to_pylist()
    assert [row["extra_info"]["index"] for row in rows] == [0, 1]
    assert "warning: 7 unusable rows (dropped); the first:\n" in capsys.readouterr().out
    with pytest.raises(ValueError, match="2 unusable rows"):  # and no other
        prepare.main(prepare.Args(tmp_path / "none", str(write_jsonl(path, bad, bad)), "drop"))


def test_prepare_bad_source(tmp_path):
    for source in (tmp_path, tmp_path / "none.jsonl"):
        with pytest.raises(FileNotFoundError, match=f"--source {source}"):
            prepare.main(prepare.Args(out=tmp_path / "out", source=str(source)))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl: no rows"):
        prepare.main(prepare.Args(out=tmp_path / "out", source=str(tmp_path)))
    path = write_jsonl(tmp_path / "my-gsm8k.jsonl", {"problem": "p", "answer": "5"})
    with pytest.raises(ValueError, match="math/my-gsm8k is not scored by its box"):
        prepare.main(prepare.Args(out=tmp_path / "out", source=str(path)))


def test_prepare_from_hub(tmp_path, monkeypatch):
    published = tmp_path / "published.parquet"
    pq.write_table(pa.table({"problem": [PROBLEM], "level": ["1"], "solution": [SOLUTION], "type": ["x"]}), published)
    asked = []
    monkeypatch.setattr(prepare, "hf_hub_download", lambda *args, **kwargs: asked.append((args, kwargs)) or published)
    prepare.main(prepare.Args(out=tmp_path / "out"))
    name = "DigitalLearningGmbH/MATH-lighteval"
    assert asked == [
        ((name, f"data/{split}-00000-of-00001.parquet"), {"repo_type": "dataset"}) for split in ("train", "test")
    ]
    for split in ("train", "test"):
        (row,) = pq.read_table(tmp_path / "out" / f"{split}.parquet").to_pylist()
        assert (row["data_source"], row["extra_info"]["split"]) == (name, split)
        assert reward_function(name)(name, SOLUTION, row["reward_model"]["ground_truth"])["score"] == 1.0


def test_prepare_hub_offline_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConnectionError, match=r"HF_ENDPOINT(.|\n)*--source"):
        prepare.main(prepare.Args(out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_prepare_command_line(tmp_path):
    source = write_jsonl(tmp_path / "train.jsonl", {"problem": "p", "answer": "5"})
    run_script("-m", "common.prepare.math", "--source", source, "--out", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train.parquet"]

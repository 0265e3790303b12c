r"""Pixel Reasoner's answers: tables of right and wrong ones, the released scorer's defects, ANLS, a
fuzz.

pytest tests/rewards/test_visual_qa.py            # with 20,000 random strings
pytest tests/rewards/test_visual_qa.py -m slow    # with 100,000
"""

import random
import time

import pytest

from common.rewards.answers import formulas
from common.rewards.visual_qa import edit_distance, same_formula, score_visual_qa


def is_right(answer: str, truth: str | list[str]) -> bool:
    return score_visual_qa(rf"so it is $\boxed{{{answer}}}$.", truth)["score"] == 1.0


# --- right and wrong answers ---

RIGHT = [  # answer, ground truth
    # options
    ("B", "B"),
    ("b", "B"),
    ("B", "b"),
    ("(B)", "B"),
    ("B.", "(B)"),
    ("[B]", "B"),
    ("B. blue", "B"),
    ("B: blue", "B"),
    ("B) blue", "B."),
    ("B. vitamin (C)", "B"),
    ("(B) blue", "B"),
    ("(B). Blue.", "B"),
    ("B.blue", "B"),
    ("K", "K"),
    (r"\text{B}", "B"),
    (r"\textbf{\text{(B) blue}}", "B"),
    (r"\text{B. } \text{blue}", "B"),
    ("**B**", "B"),
    ("B", r"\boxed{B}"),
    ("B", r"$\boxed{\text{B}}$"),
    ("B", "B. blue"),
    ("B. blue", "B. blue"),
    ("(b) The blue", "B. Blue"),
    ("blue", "B. blue"),
    ("5", "B. five"),
    ("B: 5 cm", "B. 5"),
    ("D. Both A and B", "D"),
    ("D. both (A) and (B)", "D"),
    ("A, B", "B, A"),
    ("A. cat, B. dog", "A, B"),
    ("(B) and (A)", "(A), (B)"),
    ('B. "blue"', "B. blue"),
    ("Option B", "B"),
    ("**Option (B)**", "B. blue"),
    ("choice B: blue", "B"),
    # numbers
    ("25 degrees Celsius", "25°C"),
    (r"25^\circ \text{C}", "25"),
    ("1 1/2", "1.5"),
    ("1 1/2 inches", "1.5 in"),
    ("5", "5"),
    ("1,234", "1234"),
    ("1234", "1,234"),
    (r"1{,}234", "1234"),
    (r"1\,234", "1234"),
    ("1,234,567.50", "1234567.5"),
    ("3.0", "3"),
    ("3", "3."),
    (".5", "0.5"),
    ("+5", "5"),
    ("-5", "−5"),
    ("-$5", "-5"),
    ("12%", "12"),
    ("12", "12%"),
    (r"12\%", "12 percent"),
    ("$5", "5"),
    (r"\$1,234", "$1234.00"),
    ("5 dollars", "$5"),
    ("$5$", "5"),
    (r"\(5\)", "5"),
    ("5 cm", "5"),
    ("5 kilometres", "5km"),
    ("5", "5 cm"),
    ("5cm", "5 centimeters"),
    (r"5 \text{ minutes}", "5 minute"),
    ("5 minutes", "5"),
    (r"65^\circ", "65"),
    (r"65^{\circ}", "65 degrees"),
    (r"25^\circ\text{C}", "25 celsius"),
    ("three", "3"),
    ("3", "Three"),
    ("zero", "0"),
    ("twelve", "12"),
    ("five minutes", "5"),
    ("two dogs", "2 dogs"),
    ("1/2", "0.5"),
    (r"\frac{1}{2}", "0.5"),
    (r"\dfrac{1}{2}", "2/4"),
    (r"\frac12", "0.5"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    ("10^2", "100"),
    ("1 + x", "x+1"),
    (r"\frac{3}{\sqrt{2}}", r"\frac{3\sqrt{2}}{2}"),
    (r"x^2\pi", r"\pi x^2"),
    # lists
    ("a, b, c", "a, b, c"),
    ("c,b , A", "a, b, c"),
    ("a, b, and c", "a, b, c"),
    ("a and b and c", "a, b, c"),
    ("a & b", "a, b"),
    ("the red one, blue", "blue, red one"),
    ('"red", "blue"', "blue, red"),
    ("3, 2, one", "1, 2, 3"),
    ("5,678 and 1234", "1,234, 5,678"),
    ("5 cm, 6 cm", "6, 5"),
    ("July 4 2020", "July 4, 2020"),
    ("July 4,2020", "July 4 2020"),
    ("(3,4)", "(3, 4)"),
    ("(3 , 4)", "(3, 4)"),
    ("( 3, 4 )", "(3,4)"),
    ("[red , blue ]", "[red, blue]"),
    # words
    ("Blue.", "blue"),
    ("  dark \n blue ", "Dark  Blue"),
    ("'blue'", "blue"),
    ("$blue$", "blue"),
    ("“Blue”!", "blue"),
    ("(blue)", "blue"),
    ('("blue".)', "blue"),
    ("the cat", "a cat"),
    ("cat on the mat", "The cat on a mat"),
    (r"\text{Yes}", "yes"),
    (r"\mathrm{dark}\ blue", "dark blue"),
    (r"R\&D", "r&d"),
    ("2010–2015", "2010-2015"),
    ("50-60", "50 - 60"),
    ("50 – 60", "50-60"),
    ("A.M.", "a.m"),
    ("?", "?"),
    ("the", "the"),
    ("Straße", "straße"),
    ("猫", "猫"),
]
WRONG = [
    (r"\omega", r"A. \Omega"),
    ("25 degrees Celsius", "25 degrees Fahrenheit"),
    ("1 1/2", "11/2"),
    # options
    ("A", "B"),
    ("", "B"),
    ("L", "B"),
    ("blue", "B"),
    ("Blue", "B"),
    ("B blue", "B"),
    ("A cat", "A"),
    ("I think so", "I"),
    ("B, C", "B"),
    ("B or C", "B"),
    ("B/C", "B"),
    ("(B) or (C)", "B"),
    ("(B), (C)", "B"),
    ("(B) and C", "B"),
    ("B. cat, C. dog", "B"),
    ("B. cat C. dog", "B"),
    ("(B) cat (C) dog", "B"),
    ("A. cat B. dog", "B"),
    ("(A) (B)", "A"),
    ("(A)(B)", "A"),
    ("A) B)", "A"),
    ("(A) (B) (C) (D)", "A"),
    ("B. red", "B. blue"),
    ("C. blue", "B. blue"),
    ("red", "B. blue"),
    ("A.M.", "A"),
    ("M", "A.M."),
    ("A-frame", "A"),
    ("L. blue", "L"),
    ("B^1", "B"),
    ("Option A", "B"),
    ("Options", "B"),
    ("option B or C", "B"),
    ("option blue", "blue"),
    ("B. blue", "blue"),
    # numbers
    ("6", "5"),
    ("-5", "5"),
    ("5 or 6", "5"),
    ("12%", "0.12"),
    ("0.12", "12%"),
    ("12%", "$12"),
    ("$5%", "5"),
    ("5 kg", "5 cm"),
    ("5 million", "5"),
    ("5m", "5"),
    ("5th", "5"),
    ("1980", "1980s"),
    ("1,23", "123"),
    ("1 2", "12"),
    ("1.234", "1,234"),
    ("0.33", "1/3"),
    ("1/0", "0"),
    ("thirteen", "12"),
    ("tent", "10t"),
    (r"\frac{1}{2} cm", "0.5 kg"),
    (r"\dfrac{1}{2} cm", "0.5 kg"),
    ("٣", "3"),
    (r"\frac{1}{2}", "1, 2"),
    (r"\sqrt{2}", "1.4142"),
    # lists
    ("a, b", "a, b, c"),
    ("a, b, c, d", "a, b, c"),
    ("a, b, d", "a, b, c"),
    ("a, a, b", "a, b, c"),
    ("a", "a, b"),
    ("abc", "a, b, c"),
    ("3", "3, 3"),
    ("3, 4", "3, 3"),
    ("1,234", "1, 234"),
    ("1, 234", "1,234"),
    ("(4, 3)", "(3, 4)"),
    ("(1, 234)", "(1,234)"),
    ("4, 3", "(3, 4)"),
    ("(1, 3, 2, 4)", "(1, 2, 3, 4)"),
    ("[1, 3, 2, 4]", "[1, 2, 3, 4]"),
    ("red and blue", "blue and red"),  # no commas, no list
    # words
    ("blues", "blue"),
    ("not blue", "blue"),
    ("Group", "Group A"),
    ("no", "yes"),
    ("on", "no"),  # the same letters
    ("19-25", "18-24"),
    (r"19-25^\circ", r"18-24^{\circ}"),
    ("20:60", "10:30"),
    ("50-61", "50 - 60"),
    ("5x4", "4x5"),
    ("mp 5", "5 pm"),
    (r"X^2\pi", r"\pi x^2"),
    (r"\Omega^2", r"\omega^2"),
]


def test_right():
    for answer, truth in RIGHT:
        assert is_right(answer, truth), (answer, truth)


def test_wrong():
    for answer, truth in WRONG:
        assert not is_right(answer, truth), (answer, truth)


def test_the_truth_is_right_boxed_or_not():
    expected = {"score": 1.0, "acc": 1.0, "anls": 1.0}
    for truth in {truth for _, truth in RIGHT + WRONG if "boxed" not in truth}:
        for answers in (truth, [truth], [rf"\boxed{{{truth}}}"]):
            result = score_visual_qa(rf"\boxed{{{truth}}}", answers)
            assert result.items() >= expected.items(), truth


# --- what the released scorer does wrong ---


@pytest.mark.parametrize(
    "solution", ["", "B", "The answer is B.", "Answer: B", r"\boxed{B", r"boxed{B}", r"\boxed B"]
)
def test_no_boxed_does_not_raise(solution):
    assert score_visual_qa(solution, ["B"]) == {"score": 0.0, "acc": 0.0, "pred": "", "anls": 0.0}


@pytest.mark.parametrize("answer", ["B. blue", "B: blue", "(B) blue", "B) blue", "b. blue"])
def test_letter_with_text_matches(answer):
    assert is_right(answer, r"\boxed{B}") and not is_right(answer, r"\boxed{A}")


def test_multi_span_is_not_substring():
    assert not is_right("red, blue", "re, b")
    assert not is_right("a list of all the words with red and blue and green in it", "red, blue")
    assert not is_right("red, blue, green, black, white", "red, blue")
    assert not score_visual_qa(r"\boxed{green}, not red and not blue", "red, blue")["acc"]


@pytest.mark.parametrize(
    "answer", ["", " ", "{", r"\frac{1}{", r"\frac", "}{", "^^^", r"\sqrt{", "1/0", r"\text{}"]
)
def test_unparsable_is_zero_not_minus_one(answer):
    for truth in ("B", r"\frac{1}{2}", "1, 2", r"\frac{1}{", "^_^", "blue"):
        assert score_visual_qa(rf"\boxed{{{answer}}}", truth)["score"] == 0.0


# --- which text counts, and several answers ---


@pytest.mark.parametrize(
    "solution, pred",
    [
        (r"\boxed{A} no, \boxed{B}", "b"),
        (r"\boxed{B} no, \boxed{A}", "a"),
        (r"\boxed{B} and, cut off, \boxed{A", "b"),
        (r"\boxed{\text{it is \boxed{B}}}", "b"),
        (r"\boxed{B}" + "\n<|im_end|>\nAnswer: A", "b"),
        (r"\boxed{" + "B" * 513 + "}", ""),
        (r"\boxed{}", ""),
        (r"\boxed{\text{The}  Red, Car.}", "the red, car"),
    ],
)
def test_last_box_counts(solution, pred):
    result = score_visual_qa(solution, "B")
    assert (result["acc"], result["pred"]) == (pred == "b", pred)


def test_text_around_the_box_does_not_count():
    for answer, truth in RIGHT[::5] + WRONG[::5]:
        box = rf"\boxed{{{answer}}}"
        around = [
            f"{box}",
            f"B, 5, blue: {box}",
            f"{box} or B",
            rf"\boxed{{red}} { {1: 2} } {box} \boxed{{",
            f"{truth} {box}\ud800",
        ]
        assert len({str(score_visual_qa(text, truth)) for text in around}) == 1, (answer, truth)


def test_best_of_several_answers():
    assert is_right("blue", ["red", "blue", "green"]) and is_right("blue", ["blue", "red"])
    assert is_right("5", ["7", r"\boxed{5}"]) and not is_right("6", ["7", r"\boxed{5}"])
    assert is_right("blue", [r"\boxed{B}", "blue"]) and is_right("B. blue", ["blue", r"\boxed{B}"])
    assert score_visual_qa(r"\boxed{colour}", ["xyz", "colors", "color", "abc"])["anls"] == 5 / 6


def test_votes_agree_on_what_is_right_only():
    preds = [
        score_visual_qa(rf"\boxed{{{a}}}", ["B. blue", "Navy"])["pred"]
        for a in ("B", "(B) Blue", "navy")
    ]
    assert preds == ["b. blue"] * 3
    assert score_visual_qa(r"\boxed{(C) Red}", "B. blue")["pred"] == "(c) red"


def test_answers_that_are_no_strings():
    assert is_right("five", 5)
    assert is_right("5.0", [7, 5])
    assert is_right("2.50", 2.5)
    assert is_right("True", [True])
    assert is_right("b", ("a", "b"))


@pytest.mark.parametrize("answers", ["", " ", [], [""], ["", r"\boxed{}", r"\text{}"], "1" * 513])
def test_answers_that_nothing_matches_are_an_error(answers):
    with pytest.raises(ValueError, match="has 1 to 512 characters"):
        score_visual_qa(r"\boxed{B}", answers)


def test_some_answers_that_nothing_matches():
    assert is_right("B", ["", "1" * 513, "B"]) and not is_right("", ["", "B"])


def test_sympy_is_asked_only_where_it_is_needed(monkeypatch):
    asked = []
    monkeypatch.setattr(formulas, "same_value", lambda *texts: asked.append(texts) or False)
    for answer, truth in WRONG:
        is_right(answer, truth)
    assert asked == [(r"\sqrt{2}", "1.4142"), (r"X^2\pi", r"\pi x^2"), (r"\Omega^2", r"\omega^2")]
    assert not is_right("1 + x", "x + 1")
    assert asked[3:] == [("1 + x", "x + 1")]


# --- ANLS ---


@pytest.mark.parametrize(
    "a, b, distance",
    [
        ("", "", 0),
        ("abc", "", 3),
        ("", "abc", 3),
        ("abc", "abc", 0),
        ("kitten", "sitting", 3),
        ("flaw", "lawn", 2),
        ("abcdef", "azced", 3),
        ("intention", "execution", 5),
        ("ab", "ba", 2),
    ],
)
def test_edit_distance(a, b, distance):
    assert edit_distance(a, b) == edit_distance(b, a) == distance


def test_edit_distance_is_its_definition():
    def defined(a: str, b: str) -> int:
        if not a or not b:
            return len(a) + len(b)
        return min(
            defined(a[1:], b) + 1, defined(a, b[1:]) + 1, defined(a[1:], b[1:]) + (a[0] != b[0])
        )

    rng = random.Random(0)
    for _ in range(300):
        a, b = ("".join(rng.choices("abc", k=rng.randint(0, 6))) for _ in range(2))
        assert edit_distance(a, b) == defined(a, b), (a, b)


@pytest.mark.parametrize(
    "answer, truth, expected",
    [
        ("blue", "blue", 1.0),
        ("BLUE", r"\boxed{blue}", 1.0),
        (" dark \n blue ", "dark blue", 1.0),
        (r"\text{blue}", "blue", 1.0),
        (r"12\%", "12%", 1.0),
        ("12", "12%", 2 / 3),
        ("blues", "blue", 4 / 5),
        ("blue.", "blue", 4 / 5),  # punctuation counts
        ("the blue", "blue", 1 / 2),  # and articles do
        ("ab", "ac", 1 / 2),  # a half is enough
        ("abc", "adef", 0.0),
        ("xab", "yaz", 0.0),
        ("abcde", "ab", 0.0),
        ("abcd", "ab", 1 / 2),
        ("red", "blue", 0.0),
        ("", "blue", 0.0),
    ],
)
def test_anls(answer, truth, expected):
    assert score_visual_qa(rf"\boxed{{{answer}}}", truth)["anls"] == pytest.approx(expected)


def test_similarity_is_no_score():
    close = (r"\boxed{the year 1980}", "the year 1981")
    far = (r"\boxed{B}", "B. dark blue")
    assert score_visual_qa(*close) == {
        "score": 0.0,
        "acc": 0.0,
        "pred": "the year 1980",
        "anls": 12 / 13,
    }
    assert score_visual_qa(*far) == {"score": 1.0, "acc": 1.0, "pred": "b. dark blue", "anls": 0.0}


# --- hostile text ---

TRUTHS = [
    "B",
    "B. blue",
    "1,234",
    "12%",
    "a, b, c",
    r"\frac{\sqrt{3}}{2}",
    "dark blue",
    "5 cm",
    "(1, 2)",
    "0",
]


def hostile(n: int) -> dict[str, str]:
    return {
        "boxes that stay open": r"\boxed{" * (n // 7),
        "boxes": r"\boxed{B}" * (n // 9),
        "nested boxes": r"\boxed{" * (n // 8) + "}" * (n // 8),
        "braces": r"\boxed" + "{" * n,
        "closing braces": r"\boxed{B" + "}" * n,
        "backslashes": r"\boxed{B}" + "\\" * n,
        "spaces": r"\boxed" + " " * n + "{B}",
        "long answer": r"\boxed{" + "B" * n + "}",
        "commas": r"\boxed{" + "a," * (n // 2) + "}",
        "surrogates": "\\boxed{\ud800}" + "\udfff" * n,
        "NULs": "\0" * n,
    }


@pytest.mark.parametrize("name", hostile(100))
def test_megabyte_takes_linear_time(name):
    for n in (125_000, 1_000_000):
        text = hostile(n)[name]
        start = time.process_time()
        result = score_visual_qa(text, TRUTHS)
        assert time.process_time() - start < 5.0
        assert result["acc"] == (name in ("boxes", "closing braces", "backslashes", "spaces"))


@pytest.mark.parametrize(
    "piece",
    [
        "a,",
        "a and ",
        "1,",
        "b) ",
        "b)",
        "(b) ",
        "b. ",
        "((",
        "$",
        r"\text{",
        "{}",
        r"\,",
        " ",
        "*",
        "1 + ",
        '"',
        "é",
        "9^",
    ],
)
def test_longest_answers_take_bounded_time(piece):
    text = (piece * 512)[:512]
    start = time.process_time()
    score_visual_qa(rf"\boxed{{{text}}}", TRUTHS)
    score_visual_qa(rf"\boxed{{{text}}}", [f"x{text}"[:512], "0"])
    assert time.process_time() - start < 2.0


PIECES = [
    *'}{,()[].:%$°-+/^_&*"\\\n\0\ud800é猫٣İ\u202e😀 ',
    ", ",
    " and ",
    "the ",
    "A",
    "B",
    "(B)",
    "b. blue",
]
PIECES += [
    r"\boxed{",
    r"\boxed{",
    r"\frac{",
    r"\sqrt{",
    r"\text{",
    r"\\",
    r"\{",
    r"\}",
    r"\,",
    r"\%",
]
PIECES += ["12", "1,234", "0.5", "five", "5 cm"]


def fuzz(seed: int, count: int) -> None:
    """Random pieces, most of them in a box, against a fixed answer and one that is made in the same
    way."""
    rng = random.Random(seed)
    for _ in range(count):
        text, other = (
            "".join(rng.choices(PIECES, k=rng.choice((1, 2, 4, 8, 30)))) for _ in range(2)
        )
        solution = rng.choice(
            (text, rf"\boxed{{{text}}}", rf"\boxed{{{text}}}", r"\boxed{" * 20 + text + "}" * 20)
        )
        try:
            result = score_visual_qa(solution, [rng.choice(TRUTHS), rng.choice((text, other))])
        except Exception as error:
            raise AssertionError(f"raised on {solution!r}") from error
        assert list(result) == ["score", "acc", "pred", "anls"], solution
        assert result["acc"] in (0.0, 1.0) and isinstance(result["pred"], str), solution
        assert result["anls"] == 0.0 or 0.5 <= result["anls"] <= 1.0, solution
        assert result["score"] == result["acc"], solution
        assert all(type(result[key]) is float for key in ("score", "acc", "anls")), solution


def test_fuzz(capfd):
    fuzz(seed=0, count=300)
    assert same_formula("x+1", "1+x")
    assert capfd.readouterr() == ("", "")  # neither warnings nor a parser's complaints


@pytest.mark.slow
def test_fuzz_for_long():
    fuzz(seed=2, count=100_000)

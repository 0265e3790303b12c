r"""Equations, inequalities and labels: x = 5 is 5 with the label x, 2 < x \le 5 is (2, 5]."""

import re
from itertools import pairwise
from typing import NamedTuple

from common.rewards.answers.brackets import outside, split_brackets, split_outside
from common.rewards.answers.formulas import GREEK
from common.rewards.answers.typesetting import RELATION_SIGN, TEXT_COMMAND

FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "=": "=", "\\ne": "\\ne"}
EQUALITY = {"=", "\\in", "\\approx"}
LESS = {"<", "\\le"}
GREATER = {">", "\\ge"}
TUPLE_NAME = re.compile(r"\(\s*[a-z](?:\s*,\s*[a-z])+\s*\)")  # (x, y)
VARIABLE = re.compile(r"\{?[A-Za-z]\}?|\\(?!(?:pi|infty|emptyset)(?![a-z]))[a-z]+")
GREEK_LETTER = rf"\\(?:{'|'.join(GREEK.split())})(?![A-Za-z])"
# the left side of an equation that is to be solved for an angle: 2\theta, \theta - 20, 3\alpha + 20
UNSOLVED_ANGLE = re.compile(
    rf"(?=.*[0-9])(?:[0-9.]+\s*)?{GREEK_LETTER}\s*(?:[-+/]\s*[0-9.]+\s*°?)?"
)
LETTERS = (  # x, x_1, AB, \vec{a}, \angle A
    r"(?:\\(?:overline|vec|hat|angle|triangle)(?![a-z])\s*)?(?:\{?[A-Z]{1,3}\}?|\{?[a-z]\}?|\\[a-z]+)'*"
    r"(?:_\s*(?:\{[^{}]*\}|[0-9a-zA-Z]))?"
)
NAMES = [
    rf"{LETTERS}(?:\^\s*\{{?\s*-1\s*\}}?)?(?:\s*\(\s*[A-Za-z0-9]\s*\))?",  # x, f^{-1}(x)
    r"[fghA-Z]'*\s*\([^()]*\)",  # P(X = 2)
    # m\angle A, \sin A
    r"m\s*\\angle\s*[A-Z]+|\\(?:sin|cos|tan)\s*(?:\\angle\s*)?(?:[A-Z]+|\\[a-z]+)",
    # A \cup B
    rf"(?:\\complement\s*(?:_\s*\{{?[A-Z]\}}?)?\s*)?{LETTERS}(?:\s*\\c[au]p\s*{LETTERS})?",
    r"\|\s*(?:[A-Z]{2}|\\vec\s*\{?[a-zA-Z]+\}?)\s*\|",  # |AB|
    r"\(\s*[a-z](?:\s*,\s*[a-z])+\s*\)",  # (x, y)
    r"\\frac\s*\{\s*[A-Z]{2}\s*\}\s*\{\s*[A-Z]{2}\s*\}|[A-Z]{2}\s*[:/]\s*[A-Z]{2}",  # AB : CD
]
# what stands on the left of x = 5
NAME = re.compile("|".join(NAMES))
WORDS = re.compile(r"(?:\s|\\text\{[^{}0-9]*\}|[A-Za-z]{3,}+)+")
# "5 when y", "5 at t"; but the letters of lwh, at and u + at are factors
PROSE = re.compile(
    r"\\text|(?<![\\A-Za-z])[A-Za-z]{3,}(?=\s)|(?<=\s)[A-Za-z]{3}"
    r"|(?<=[0-9A-Za-z)}\]]\s)(?:at|if)(?=\s+[A-Za-z\\])"
)
SEPARATOR = re.compile(r"[,;]")
UNION = re.compile(r"\\cup(?![a-zA-Z])")
INTERSECTION = re.compile(r"\\cap(?![a-zA-Z])")


class Relation(NamedTuple):
    r"""2 < x \le 5 has the sides 2, x and 5, and the signs < and \le."""

    sides: list[str]
    signs: list[str]


def read_relation(text: str) -> Relation | None:
    """The sides and signs of a text; None if no sign stands outside of all brackets. None, too, of
    a list, such as x = 5, 6, and of a union or an intersection of several relations."""
    signs = outside(text, RELATION_SIGN)
    if not signs or outside(text, SEPARATOR):
        return None
    for pattern in (UNION, INTERSECTION):
        parts = split_outside(text, pattern)
        if len(parts) > 1 and all(outside(part, RELATION_SIGN) for part in parts):
            return None
    sides: list[str] = []
    start = 0
    for sign in signs:
        sides.append(text[start : sign.start()].strip())
        start = sign.end()
    sides.append(text[start:].strip())
    return Relation(sides, [sign[0] for sign in signs])


def without_label(text: str) -> str:
    """5 of x = 5, of 5 = x, of Area = 5 and of x = 2 + 3 = 5; [0,1] of x in [0,1]; other texts as
    they are."""
    relation = read_relation(text)
    if not relation or not set(relation.signs) <= EQUALITY:
        return text
    sides, signs = relation
    if signs[-1] == "\\in" and VARIABLE.fullmatch(sides[-1]):  # a \in A
        return text
    if has_prose(sides):
        return text
    if sides[-1] and (NAME.fullmatch(sides[0]) or WORDS.fullmatch(sides[0])):
        return sides[-1]
    if len(sides) == 2 and sides[0] and NAME.fullmatch(sides[1]):
        return sides[0]
    return text


def equations(text: str) -> list[str]:
    """["x = 5", "y = 6"] of (x, y) = (5, 6), and of x = 5, y = 6; [] of all else."""
    relation = read_relation(text)
    if relation is None:
        items = split_outside(text, SEPARATOR)
        relations = [read_relation(item) for item in items]
        are_equations = all(found and found.signs == ["="] for found in relations)
        return items if len(items) > 1 and are_equations else []
    if relation.signs != ["="] or not TUPLE_NAME.fullmatch(relation.sides[0]):
        return []
    opening, inner, closing = split_brackets(relation.sides[1])
    names = split_outside(relation.sides[0].strip("()"), SEPARATOR)
    values = split_outside(inner, SEPARATOR)
    if opening + closing != "()" or len(names) != len(values):
        return []
    return [f"{name} = {value}" for name, value in zip(names, values)]


def has_prose(sides: list[str]) -> bool:
    """Whether words stand between two signs, as in x = 5 when y = 3."""
    return any(PROSE.search(side) for side in sides[1:-1])


def unlabelled(answer: str, truth: str) -> tuple[str, str]:
    """Both texts without their labels, or as they are if these differ: x = 5 is no y = 5."""
    if labels_differ(answer, truth):
        return answer, truth
    return without_label(answer), without_label(truth)


def label(text: str) -> str:
    """The x of x = 5, of 5 = x and of x = 5, 6, the Area of Area = 5; "" if there is none."""
    items = split_outside(text, SEPARATOR)
    relation = read_relation(items[0])
    if not relation or not set(relation.signs) <= EQUALITY:
        return ""
    if any(read_relation(item) for item in items[1:]):
        return ""
    sides = relation.sides
    if len(sides) > 2:
        sides = sides[:1]
    for side in sides:
        if NAME.fullmatch(side) or WORDS.fullmatch(side):
            return TEXT_COMMAND.sub(r" \1 ", side).strip()
    return ""


def labels_differ(answer: str, truth: str) -> bool:
    """Whether the labels of two texts are of one kind and differ, as x and y, f(1) and f(2), Area
    and Perimeter; y is f(x), AB is BA."""
    name = label(answer)
    true_name = label(truth)
    if not name or not true_name:
        return False
    is_symbol = NAME.fullmatch(name) is not None
    true_is_symbol = NAME.fullmatch(true_name) is not None
    if is_symbol != true_is_symbol or ("(" in name) != ("(" in true_name):
        return False
    if not is_symbol:  # one may tell more: Area and The area
        words = set(name.lower().split())
        true_words = set(true_name.lower().split())
        return not (words <= true_words or true_words <= words)
    letters, *index = bare_name(name).split("_")
    true_letters, *true_index = bare_name(true_name).split("_")
    if index and true_index and index != true_index:
        return True
    if letters == true_letters:
        return False
    if "\\angle" in name + true_name:  # ABC is CBA, and not BAC
        return letters != true_letters[::-1]
    # AB is BA; but AB:CD is not CD:AB
    are_points = letters.isupper() and letters.isalpha()
    return not are_points or sorted(letters) != sorted(true_letters)


def bare_name(name: str) -> str:
    """AB of |AB|, \\overline{AB} and m\\angle AB."""
    marks = r"[\s{}]|^\||\|$|^m\s*(?=\\angle)|\\(?:overline|angle|triangle)(?![a-z])"
    return re.sub(marks, "", name)


def symbols_in(text: str) -> set[str]:
    r"""{"x", "A"} of x + 2AB + \theta: no Greek letters, and of letters side by side, which may be
    one thing, the first."""
    return set(re.findall(r"(?<![\\A-Za-z])[A-Za-z](?:_\{?[A-Za-z0-9]+)?", text))


def interval_of(relation: Relation) -> tuple[str, str] | None:
    r"""("x", "(2, \infty)") of x > 2 and of 2 < x; of x \ne 2 a union; None of what is no interval
    of a letter."""
    sides, signs = relation
    if signs == ["\\ne"] and VARIABLE.fullmatch(sides[0]):
        return sides[0], reals_without(sides[1])
    if signs == ["\\in"] and VARIABLE.fullmatch(sides[0]) and not VARIABLE.fullmatch(sides[1]):
        return sides[0], sides[1]
    if len(sides) == 2 and signs[0] in GREATER and VARIABLE.fullmatch(sides[0]):
        start = "[" if signs[0] == "\\ge" else "("
        return sides[0], f"{start}{sides[1]}, \\infty)"  # x > a: about x, not a
    if set(signs) <= GREATER:
        sides, signs = reverse(relation)
    if not set(signs) <= LESS:
        return None
    if len(sides) == 2 and VARIABLE.fullmatch(sides[0]):
        sides = ["-\\infty", *sides]
        signs = ["<", *signs]
    elif len(sides) == 2:
        sides = [*sides, "\\infty"]
        signs = [*signs, "<"]
    if len(sides) != 3 or not VARIABLE.fullmatch(sides[1]):
        return None
    start = "[" if signs[0] == "\\le" else "("
    end = "]" if signs[1] == "\\le" else ")"
    return sides[1], f"{start}{sides[0]}, {sides[2]}{end}"


def reverse(relation: Relation) -> Relation:
    """5 > x > 2 of 2 < x < 5."""
    signs = [FLIPPED[sign] for sign in reversed(relation.signs)]
    return Relation(relation.sides[::-1], signs)


def reals_without(*numbers: str) -> str:
    r"""(-\infty, 1) \cup (1, \infty) of 1. Numbers in ascending order."""
    ends = ["-\\infty", *numbers, "\\infty"]
    return " \\cup ".join(f"({start}, {end})" for start, end in pairwise(ends))

r"""Lists, sets, tuples, intervals, unions and matrices: \{1, 2\} is a set of 1 and 2."""

import re
from fractions import Fraction

from common.rewards.answers.brackets import outside, split_brackets, split_outside
from common.rewards.answers.formulas import real_value
from common.rewards.answers.relations import (
    INTERSECTION,
    SEPARATOR,
    UNION,
    interval_of,
    read_relation,
    reals_without,
    without_label,
)
from common.rewards.answers.spelling import DECIMAL, rational, short_form
from common.rewards.answers.units import measures, split_unit

REALS = re.compile(r"\\mathbb\s*\{?\s*R\s*\}?|\\R|\{R\}")
REALS_WITHOUT = re.compile(
    rf"(?:{REALS.pattern})\s*(?:\\setminus|\\backslash|-)\s*\\\{{((?:(?!\\[{{}}]).)*)\\\}}"
)
SUCH_THAT = re.compile(r"[|:]")
PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])")
UNORDERED = {"list", "set", "union", "intersection"}
MATRIX = re.compile(r"\\begin\{([a-zA-Z]*)matrix\}(.*)\\end\{\1matrix\}", re.DOTALL)


def collection(text: str) -> tuple[str, list[str]]:
    r"""(kind, items); ("", [text]) of what is no collection.

    kind: "list", "set", "union" or "intersection" of what has no order, brackets such as "(]" of
    what has one, "matrix 2,2" (the lengths of its rows; "vmatrix 2,2" with bars), "reals without"
    numbers in no known order, "set-builder", "set of a set". What has \pm is a list of two.
    """
    match = MATRIX.fullmatch(text)
    if match and not outside(text, SEPARATOR):  # else several matrices, in a list
        lines = match[2].strip().removesuffix("\\\\").split("\\\\")
        rows = [line.split("&") for line in lines]
        bars = match[1] if match[1] in ("v", "V") else ""  # a determinant, or a norm
        shape = ",".join(str(len(row)) for row in rows)
        return f"{bars}matrix {shape}", [cell.strip() for row in rows for cell in row]
    if REALS.fullmatch(text):
        return "()", ["-\\infty", "\\infty"]
    match = REALS_WITHOUT.fullmatch(text)
    if match:
        numbers = items_of(match[1])
        values = [exact_value(number) for number in numbers]
        if len(numbers) > 1 and None in values:  # in no known order
            return "reals without", numbers
        if len(numbers) > 1:
            numbers = [number for _, number in sorted(zip(values, numbers))]
        text = reals_without(*numbers)
    for kind, pattern in (("union", UNION), ("intersection", INTERSECTION)):
        parts = split_outside(text, pattern)
        if len(parts) > 1:
            return kind, parts
    opening, inner, closing = split_brackets(text)
    if opening == "\\{":
        return set_of(inner)
    # 1,234 cans is one number; in brackets, 1,234 are two
    if not DECIMAL.fullmatch(split_unit(text)[0]):
        items = items_of(text)
        if len(items) > 1:
            return "list", items
    if not opening:
        return "", [text]
    items = items_of(inner)
    if len(items) == 1 and opening not in ("(", "{"):  # [x] may be a rounded x
        return "", [text]
    if opening == "{" or len(items) == 1 or not outside(inner, SEPARATOR):  # (1 \pm \sqrt{2})
        return "list", items
    if opening == "\\langle":
        return "()", items
    return opening + closing, items


def exact_value(number: str) -> Fraction | None:
    r"""The number that a text such as 3 or \sqrt{2} is, a root to 600 digits; None for any other
    text."""
    value = rational(short_form(number))
    return real_value(number) if value is None else value


def set_of(inner: str) -> tuple[str, list[str]]:
    r"""The collection that \{…\} is: \{x | x > 2\} is (2, \infty), and \{\emptyset\} is no
    \emptyset."""
    parts = split_outside(inner, SUCH_THAT, at_most=1)
    if len(parts) == 2 and re.search("[A-Za-z]", parts[0]):  # \{|a|, |b|\} is a set of two
        head, condition = parts
        variable = re.sub(rf"\\in\s*(?:{REALS.pattern})$", "", head).strip()
        solution = solution_set(variable, condition)
        if solution:
            return collection(solution)
        return "set-builder", [head, condition]
    items = items_of(inner)
    if len(items) == 1:
        (item,) = items
        if item == "\\emptyset" or split_brackets(item)[0] == "\\{":
            return "set of a set", items
    return "set", items


def solution_set(variable: str, condition: str) -> str:
    r"""(-\infty, 1) \cup (2, \infty) of the variable x and the condition x < 1 \cup x > 2; "" of a
    condition that is not made of inequalities of the variable."""
    intervals = []
    for part in split_outside(condition, UNION):
        relation = read_relation(part)
        if not relation:
            return ""
        interval = interval_of(relation)
        if not interval or interval[0] != variable:
            return ""
        intervals.append(interval[1])
    return " \\cup ".join(intervals)


def items_of(text: str) -> list[str]:
    r"""The items of a list; of x = 1, 2 without the label, of \pm 3 both, and of 3 hours 20 minutes
    the two quantities; [text] of what is no list."""
    items = measures(text) or split_outside(text, SEPARATOR)
    others_are_relations = any(read_relation(item) for item in items[1:])
    if len(items) > 1 and read_relation(items[0]) and not others_are_relations:
        items[0] = without_label(items[0])
    signed_items: list[str] = []
    for item in items:
        signed_items += both_signs(item)
    return signed_items


def both_signs(text: str) -> list[str]:
    r"""["1 + x", "1 - x"] of 1 \pm x; [text] of what has no \pm."""
    if not PLUS_MINUS.search(text):
        return [text]
    upper_signs = {"\\pm": "+", "\\mp": "-"}
    lower_signs = {"\\pm": "-", "\\mp": "+"}
    upper = PLUS_MINUS.sub(lambda match: upper_signs[match[0]], text)
    lower = PLUS_MINUS.sub(lambda match: lower_signs[match[0]], text)
    return [upper, lower]

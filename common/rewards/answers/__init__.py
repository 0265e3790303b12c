r"""Equality of mathematical answers: 0.5 is \frac{1}{2}, 5 cm is 5, \{1, 2\} is 2, 1 and y = 2x is
2x - y = 0.

`is_equal` looks at an answer from the outside in: its typesetting, options, lists, intervals and
matrices, equations, units. What is left are numbers, words, and formulas (formulas.py).

This file compares; how a text is read is in the files beside it. No function here raises. Each
takes time linear in the answer, but for the pairs of items of short lists.
"""

import re
from string import ascii_lowercase

from common.rewards.answers import formulas
from common.rewards.answers.lists import PLUS_MINUS, UNORDERED, both_signs, collection
from common.rewards.answers.options import LETTER, is_option, option, same_options, without_braces
from common.rewards.answers.relations import (
    FLIPPED,
    GREATER,
    LESS,
    UNSOLVED_ANGLE,
    Relation,
    equations,
    has_prose,
    interval_of,
    label,
    labels_differ,
    read_relation,
    reverse,
    symbols_in,
    unlabelled,
    without_label,
)
from common.rewards.answers.spelling import DECIMAL, rational, rounds_to, short_form, spelling
from common.rewards.answers.typesetting import TEXT_COMMAND, TRIGONOMETRIC, typeset
from common.rewards.answers.units import split_unit, split_units, units_agree

MAX_CHARACTERS = 512  # of an answer; longer ones are wrong
MAX_UNMATCHED = 8  # items of two lists that are spelled differently; all pairs are compared
MAX_DEPTH = 8  # of lists in lists


def normalize(answer: str) -> str:
    r"""The one spelling of an answer: without spaces, units and `x =`; "0.5" and "2/4" are
    \frac{1}{2}, 4.5e3 is 4500.

    After Hendrycks et al. 2021 (arXiv 2103.03874). "" for more than 512 characters. Equal spellings
    may have different units: `is_equal` compares them, too.
    """
    if len(answer) > MAX_CHARACTERS:
        return ""
    return spelling(plain_value(typeset(answer)))


def plain_value(text: str) -> str:
    """A typeset answer without the word "option", `x =`, and its unit."""
    letter, content = option(text)
    if letter and not content:
        return letter
    return split_unit(without_label(text))[0]


def is_equal(answer: str, truth: str, with_formulas: bool = True) -> bool:
    """Whether two answers are equal, however they are spelled; without formulas by spelling and
    numbers alone."""
    if max(len(answer), len(truth)) > MAX_CHARACTERS:
        return False
    depth = MAX_DEPTH if with_formulas else 0
    return same(typeset(answer), typeset(truth), depth)


def same(answer: str, truth: str, depth: int) -> bool:
    """Whether two typeset texts are equal. depth: how many collections may still be opened; at 0
    only spellings and numbers are compared."""
    if not answer or not truth:
        return False
    if is_option(answer) or is_option(truth):
        return same_option(answer, truth, depth)
    if same_options(answer, truth):
        return True
    if same_leaf(answer, truth):
        return True
    if depth <= 0:
        return False
    answers = equations(answer)
    truths = equations(truth)
    if answers and truths:
        return same_items(answers, truths, depth)
    answer_relation = read_relation(answer)
    true_relation = read_relation(truth)
    if answer_relation and true_relation:
        if PLUS_MINUS.search(answer + truth):
            return same_items(both_signs(answer), both_signs(truth), depth)
        return same_relation(answer_relation, true_relation, depth)
    if answer_relation:
        if same_as_relation(answer, answer_relation, truth, depth):
            return True
        return is_result(answer_relation, truth, depth)
    if true_relation:
        return same_as_relation(truth, true_relation, answer, depth)
    return same_parts(answer, truth, depth)


def same_parts(answer: str, truth: str, depth: int) -> bool:
    """Whether two texts that are no relations are equal: part by part if they have parts, else by
    value."""
    if labels_differ(answer, truth):  # x = 1, 2 is no y = 1, 2
        return False
    kind, items = collection(answer)
    true_kind, true_items = collection(truth)
    if kind in ("list", "set") and len(items) == 1:  # \{5\} is 5
        return same(items[0], truth, depth - 1)
    if true_kind in ("list", "set") and len(true_items) == 1:
        return same(answer, true_items[0], depth - 1)
    if kind or true_kind:
        return same_collection(kind, items, true_kind, true_items, depth)
    return same_formula(answer, truth)


def same_option(answer: str, truth: str, depth: int) -> bool:
    """Whether two texts, of which one is an option, are the same one: by the letter, and by the
    text behind it if both have one. C alone is the option C."""
    letter, content = option(answer)
    true_letter, true_content = option(truth)
    letter = letter or without_braces(answer)
    true_letter = true_letter or without_braces(truth)
    if letter != true_letter or not LETTER.fullmatch(letter):
        return False
    if not content or not true_content:
        return True
    return same(content, true_content, depth)


# --- numbers, words, clock times ---

CLOCK = re.compile(r"(.*?[0-9])\s*([apAP])\.?\s*[mM]\.?(.*)")


def same_leaf(answer: str, truth: str) -> bool:
    """Whether two texts are spelled alike, as equal numbers are, or the truth is the answer's
    number, rounded; and in the same unit, if both have one."""
    answer, truth = unlabelled(answer, truth)
    answer_time = CLOCK.fullmatch(TEXT_COMMAND.sub(r"\1", answer))
    true_time = CLOCK.fullmatch(TEXT_COMMAND.sub(r"\1", truth))
    if answer_time and true_time:
        return clock_parts(answer_time) == clock_parts(true_time)
    answer_core, unit, true_core, true_unit = split_units(answer, truth)
    if not units_agree(unit, true_unit):
        return False
    answer_spelling = spelling(answer_core)
    true_spelling = spelling(true_core)
    if answer_spelling == true_spelling:
        return answer_spelling != ""
    value = rational(answer_spelling)
    if value is None or rational(true_spelling) is None:
        return False
    return rounds_to(value, short_form(true_core), min_digits=5)


def clock_parts(time: re.Match) -> tuple[str, str, str]:
    """("8:30", "a", "") of 8:30 a.m."""
    return short_form(time[1]), time[2].lower(), short_form(time[3])


# --- formulas ---

RATIO = re.compile(r"[0-9a-zA-Z}]\s*:\s*[0-9a-zA-Z\\]")
OTHER_BASE = re.compile(r"[0-9)]\s*_")
DERIVATIVE = re.compile(r"\\frac\{\s*d(?![a-zA-Z]{2})[^{}]*\}\s*\{\s*d\s*[a-zA-Z]")
NTH_DERIVATIVE = re.compile(r"\^\s*\{\s*\(\s*[0-9a-z]\s*\)\s*\}")
# A^{-1}B, B A^T: products of matrices do not commute
INVERSE = r"[A-Z]\}?\s*\^\s*(?:T|\\top|\{\s*(?:-\s*1|T|\\top)\s*\})"
MATRIX_PRODUCT = re.compile(rf"{INVERSE}\s*\{{?[A-Z]|[A-Z]\}}?\s*\{{?{INVERSE}")
# 2 \times 3
MATRIX_SIZE = re.compile(r"\s*(?:[0-9]+|[a-z])\s*\\times\s*(?:[0-9]+|[a-z])\s*")
# the matrices in their order; a command such as \Gamma is none
CAPITALS = re.compile(r"(?<![\\a-zA-Z])[A-Z]|(?<=[A-Z])[A-Z]")
# (AB)^{-1}
INVERSE_OF_PRODUCT = re.compile(r"\)\s*\^\s*(?:T|\\top|\{\s*(?:-\s*1|T|\\top)\s*\})")
SPELLED_ONLY = (RATIO, OTHER_BASE, DERIVATIVE, NTH_DERIVATIVE)
MORE_THAN_LETTERS = re.compile(r"[0-9+\-*/^!|()\[\]\\']")
# a word beside another one, a letter or a number
WORD = re.compile(
    r"(?<![\\a-zA-Z])(?:[a-zA-Z]{3,}(?=\s+[a-zA-Z0-9])|(?<=[a-zA-Z0-9]\s)[a-zA-Z]{3,})"
)


def same_formula(answer: str, truth: str) -> bool:
    """Whether two formulas have the same value. Words, ratios, times, derivatives and numbers in
    other bases are not computed: `same_leaf` has compared their spelling."""
    answer_core, unit, true_core, true_unit = split_units(answer, truth)
    if not units_agree(unit, true_unit):
        return False
    text = formula(answer_core)
    true_text = formula(true_core)
    if is_spelled_only(text) or is_spelled_only(true_text):
        return False
    if MATRIX_SIZE.fullmatch(text) and MATRIX_SIZE.fullmatch(true_text):
        return False  # 2 \times 3 is no 3 \times 2
    if MATRIX_PRODUCT.search(text) or MATRIX_PRODUCT.search(true_text):
        # matrices in the same order are compared as numbers are; (AB)^{-1} turns the order around
        if CAPITALS.findall(text) != CAPITALS.findall(true_text):
            return False
        if INVERSE_OF_PRODUCT.search(text + true_text):
            return False
    if not MORE_THAN_LETTERS.search(text) and not MORE_THAN_LETTERS.search(true_text):
        return False  # "no" is not "on"
    value = rational(short_form(answer_core))
    true_value = rational(short_form(true_core))
    if value is not None and true_value is not None:
        return False  # two numbers that `same_leaf` has found to differ
    if formulas.same_value(text, true_text):
        return True
    if true_value is not None:
        return is_rounded(text, short_form(true_core))
    return value is not None and is_rounded(true_text, short_form(answer_core))


def is_spelled_only(text: str) -> bool:
    return bool(WORD.search(text)) or any(pattern.search(text) for pattern in SPELLED_ONLY)


def is_rounded(text: str, decimal: str, min_digits: int = 6) -> bool:
    """Whether 1.414214 is the value of \\sqrt{2}, by the rule of `rounds_to`."""
    value = formulas.real_value(text)
    return value is not None and rounds_to(value, decimal, min_digits)


def formula(text: str) -> str:
    """A text as formulas.py reads it: without \\text around a letter, the commas of a large number,
    the degrees of a text without \\sin or the like, and braces around a letter before _ or '."""
    text = re.sub(r"\\text\{\s*([A-Za-z])\s*\}", r"{\1}", text)
    if not TRIGONOMETRIC.search(text):
        text = text.replace("°", " ")
    if DECIMAL.fullmatch(text):
        return text.replace(",", "")
    return re.sub(r"\{([A-Za-z])\}(?=['_])", r"\1", text)


# --- equations and inequalities ---


def same_relation(answer: Relation, truth: Relation, depth: int) -> bool:
    """Whether two relations are equal as intervals, or side by side, also when one is turned
    around; or, if each has one sign, up to a constant factor."""
    sides, signs = answer
    true_sides, true_signs = truth
    interval = interval_of(answer)
    true_interval = interval_of(truth)
    if interval and true_interval and interval[0] == true_interval[0]:
        return same(interval[1], true_interval[1], depth - 1)  # x \in [0, 1] is 0 \le x \le 1
    if len(signs) != len(true_signs) or not {*signs, *true_signs} <= FLIPPED.keys():
        return False
    for form in (answer, reverse(answer)):
        if form.signs == true_signs and same_in_order(form.sides, true_sides, depth):
            return True
    if len(signs) > 1:
        return False
    if any(RATIO.search(side) or WORD.search(side) for side in (*sides, *true_sides)):
        return False
    sign = signs[0]
    true_sign = true_signs[0]
    if true_sign not in (sign, FLIPPED[sign]):
        return False
    direction = 0
    if sign in LESS | GREATER:
        direction = 1 if sign == true_sign else -1
    left, right = map(formula, sides)
    true_left, true_right = map(formula, true_sides)
    return formulas.same_relation((left, right), (true_left, true_right), direction)


def same_as_relation(text: str, relation: Relation, other: str, depth: int) -> bool:
    """Whether the relation of a text says what another text does: x = 5 is 5, 2 + 3 = 5 is 5, 2 < x
    < 5 is (2, 5), x in [0, 1] is [0, 1]; \\sqrt{2} \\approx 1.41 is either side."""
    sides, signs = relation
    if signs[-1] == "\\approx" and is_rounded(sides[-2], short_form(sides[-1]), min_digits=1):
        return any(same(side, other, depth - 1) for side in sides[-2:])
    value = without_label(text)
    if value != text:
        return same(value, other, depth - 1)
    if set(signs) == {"="} and not symbols_in(text):
        return same(sides[0], other, depth - 1) and same(sides[-1], other, depth - 1)
    forms = [relation]
    if len(signs) == 1 and signs[0] in LESS | GREATER:
        forms.append(reverse(relation))  # a < x is about x, or about a
    for form in forms:
        interval = interval_of(form)
        if interval and same(interval[1], other, depth - 1):
            return True
    return False


def is_result(result: Relation, truth: str, depth: int) -> bool:
    r"""Whether a + b = 7, 3 + 4 = 7 or \tan 2\alpha = 7 tells the number that is asked for; 2x = 6
    and 2\theta = 6 do not."""
    sides, signs = result
    is_number = re.search("[0-9]", sides[-1]) and not symbols_in(sides[-1])
    if set(signs) != {"="} or not is_number or has_prose(sides):
        return False
    if len(symbols_in(sides[0])) == 1 or UNSOLVED_ANGLE.fullmatch(sides[0]):
        return False
    return same(sides[-1], truth, depth - 1)


# --- lists, sets, tuples, intervals, unions, matrices ---


def same_collection(
    kind: str, items: list[str], true_kind: str, true_items: list[str], depth: int
) -> bool:
    """Whether two collections have the same items, for lists, sets, unions and intersections in any
    order; (1, 2) is 1, 2 in this order, and no \\{1, 2\\}."""
    kinds = {kind or "list", true_kind or "list"}
    labelled = by_letter(items)
    true_labelled = by_letter(true_items)
    # y = 5, x = 6 is no (5, 6), and no 5, 6
    if kinds <= {"list", "()"} and bool(labelled) != bool(true_labelled):
        items = labelled or items
        true_items = true_labelled or true_items
        return len(items) == len(true_items) and same_in_order(items, true_items, depth)
    # a list may stand for a set or a union, but for no intersection
    are_compatible = len(kinds) == 1 or ("list" in kinds and "intersection" not in kinds)
    if kinds <= UNORDERED and are_compatible:
        return same_items(items, true_items, depth)
    if kinds == {"reals without"}:
        return same_items(items, true_items, depth)
    if len(items) != len(true_items):
        return False
    if kinds == {"set-builder"}:
        head, condition = items
        true_head, true_condition = true_items
        if short_form(head) != short_form(true_head):
            return False
        return same(condition, true_condition, depth - 1)
    if len(kinds) == 1 or kinds == {"list", "()"}:
        return same_in_order(items, true_items, depth)
    return False


def by_letter(items: list[str]) -> list[str]:
    """The items x = 5, y = 6 of y = 6, x = 5; [] unless the labels are neighbours in the
    alphabet."""
    names = [label(item) for item in items]
    letters = "".join(sorted(names))
    if any(len(name) != 1 for name in names) or letters not in ascii_lowercase:
        return []
    return [item for _, item in sorted(zip(names, items))]


def same_in_order(items: list[str], true_items: list[str], depth: int) -> bool:
    """Whether two lists of one length are equal, item by item."""
    return all(same(item, true_item, depth - 1) for item, true_item in zip(items, true_items))


def same_items(items: list[str], true_items: list[str], depth: int) -> bool:
    """Whether two lists have equal items in any order. Of items that are spelled differently all
    pairs are compared; if there are more than MAX_UNMATCHED, the lists count as different."""
    if len(items) != len(true_items):
        return False
    rest = list(items)
    spellings = [spelling(item) for item in items]
    unmatched = []
    for true_item in true_items:
        true_spelling = spelling(true_item)
        if true_spelling in spellings:
            place = spellings.index(true_spelling)
            del spellings[place]
            del rest[place]
        else:
            unmatched.append(true_item)
    if len(unmatched) > MAX_UNMATCHED:
        return False
    for true_item in unmatched:
        for item in rest:
            if same(item, true_item, depth - 1):
                rest.remove(item)
                break
        else:
            return False
    return True

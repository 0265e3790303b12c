r"""Reward of Geometry3K in verl's form: 0.9 for the right \boxed{…}, and 0.1 for <think> … </think>
before it.

Linear time and no exception, whatever the response; a ground truth that no response could match is
an error.
"""

from common.rewards.answers import (
    FRACTION,
    MAX_CHARACTERS,
    is_equal,
    plain_value,
    rational,
    short_form,
    split_units,
    typeset,
    units_agree,
    unlabelled,
)
from common.rewards.math import last_boxed, normalized_truth

FORMAT = ("<think>", "</think>", "\\boxed{", "}")


def score_geo3k(solution_str: str, ground_truth: str) -> dict:
    r"""{"score": 0.9 acc + 0.1 format, "acc": whether it is right, "format": 0 | 1, "pred": answer
    or ""}.

    The answer is the content of the last complete \boxed{…}. "pred" is its short form, and of a
    right one the ground truth, so that votes agree.
    """
    truth = normalized_truth(ground_truth)
    answer = last_boxed(solution_str) or ""
    if len(answer) > MAX_CHARACTERS:
        answer = ""
    is_right = is_same(typeset(answer), typeset(str(ground_truth)))
    has_format = float(in_format(solution_str))
    pred = truth if is_right else short_form(plain_value(typeset(answer)))
    return {
        "score": 0.9 * is_right + 0.1 * has_format,
        "acc": is_right,
        "format": has_format,
        "pred": pred,
    }


def in_format(text: str) -> bool:
    r"""Whether all of the text matches <think>.*</think>.*\boxed{.*}.*, where a dot is any
    character."""
    end = 0
    # the first one after the mark before it: if any match exists, this one does
    for mark in FORMAT:
        start = text.find(mark, end)
        if start < 0 or (start and not end):
            return False
        end = start + len(mark)
    return True


def is_same(answer: str, truth: str) -> bool:
    """Equality by mathruler's rules; tuples and intervals by their brackets and, in order, their
    elements."""
    answer, truth = unlabelled(answer, truth)
    brackets, items = elements(answer)
    true_brackets, true_items = elements(truth)
    if (brackets, len(items)) != (true_brackets, len(true_items)):
        return False
    return all(is_same_element(*pair) for pair in zip(items, true_items))


def elements(text: str) -> tuple[str, list[str]]:
    """("(]", ["1", "2"]) of "(1,2]"; ("", [text]) of what is no tuple, without its brackets if it
    has a pair."""
    if text[:1] not in ("(", "[") or text[-1:] not in (")", "]"):
        return "", [text]
    items, depth = [""], 0
    for char in text[1:-1]:
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:  # (1 + 2)(3 + 4)
            return "", [text]
        if char == "," and not depth:
            items.append("")
        else:
            items[-1] += char
    return text[0] + text[-1] if len(items) > 1 else "", items


def is_same_element(answer: str, truth: str) -> bool:
    r"""Numbers by value, all else as `is_equal` has it; but an integer is a number without \sqrt,
    \frac or powers.

    Fractions only in lowest terms, unless they are spelled like the truth.
    """
    answer, unit, truth, true_unit = split_units(*unlabelled(answer, truth))
    if not units_agree(unit, true_unit):
        return False
    short = short_form(answer)
    true_short = short_form(truth)
    if short == true_short:
        return short != ""
    value = rational(short)
    true_value = rational(true_short)
    if true_value is None or (value is None and true_value.denominator > 1):
        return is_equal(answer, truth)
    if value != true_value or "^" in short:
        return False
    fraction = FRACTION.fullmatch(short)
    return fraction is None or int(fraction[3]) == value.denominator > 1

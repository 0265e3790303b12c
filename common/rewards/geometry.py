r"""Reward of Geometry3K in verl's form: 0.9 for the right \boxed{…}, and 0.1 for <think> … </think>
before it.

Linear time and no exception, whatever the response; a ground truth that no response could match is
an error.
"""

from common.rewards.answers import MAX_CHARACTERS, is_equal, plain_value
from common.rewards.answers.relations import unlabelled
from common.rewards.answers.spelling import FRACTION, rational, short_form
from common.rewards.answers.typesetting import typeset
from common.rewards.answers.units import split_units, units_agree
from common.rewards.math import last_boxed, normalized_truth

FORMAT = ("<think>", "</think>", "\\boxed{", "}")


def score_geo3k(solution_str: str, ground_truth: str) -> dict:
    r"""{"score": 0.9 acc + 0.1 format, "acc": whether it is right, "format": 0 | 1, "pred": answer
    or ""}.

    The answer is the content of the last complete \boxed{…}. "pred" is its short form, or if the
    answer is right, the ground truth's spelling by `normalize`, so that votes agree.
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
    if not text.startswith(FORMAT[0]):
        return False
    end = 0
    # each mark at its first place behind the mark before it: if the text matches at all, it does so
    for mark in FORMAT:
        start = text.find(mark, end)
        if start < 0:
            return False
        end = start + len(mark)
    return True


def is_same(answer: str, truth: str) -> bool:
    """Equality by mathruler's rules; tuples and intervals are equal if their brackets are, and
    their elements in order."""
    answer, truth = unlabelled(answer, truth)
    brackets, items = elements(answer)
    true_brackets, true_items = elements(truth)
    if brackets != true_brackets or len(items) != len(true_items):
        return False
    return all(is_same_element(item, true_item) for item, true_item in zip(items, true_items))


def elements(text: str) -> tuple[str, list[str]]:
    """("(]", ["1", "2"]) of "(1,2]". A text that is no tuple is its only element, without brackets:
    ("", ["1"]) of "(1)" and of "1"."""
    if text[:1] not in ("(", "[") or text[-1:] not in (")", "]"):
        return "", [text]
    items = [""]
    depth = 0
    for char in text[1:-1]:
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        if depth < 0:  # (1 + 2)(3 + 4)
            return "", [text]
        if char == "," and not depth:
            items.append("")
        else:
            items[-1] += char
    brackets = text[0] + text[-1] if len(items) > 1 else ""
    return brackets, items


def is_same_element(answer: str, truth: str) -> bool:
    r"""Numbers by value, anything else by `is_equal`.

    If the truth is an integer, only a plain number can be right, or an answer that is spelled like
    the truth: no \sqrt, \frac, power or sum. Fractions, but not mixed numbers, count in lowest
    terms only, unless they are spelled like the truth.
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
    if value != true_value or (true_value.denominator == 1 and "^" in short):
        return False
    fraction = FRACTION.fullmatch(short)
    if fraction is None:
        return True
    denominator = int(fraction[3])
    return denominator == value.denominator and denominator > 1

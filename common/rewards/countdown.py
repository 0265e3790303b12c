"""Countdown: reach the target with + - * / and parentheses, every given number used exactly once.

Reward as in TinyZero: 1.0 for a right answer, 0.1 for a complete <answer> tag with anything else in
it, 0 without one. Python's own parser reads the model's text, and never evaluates it: a walk over
the tree computes a few operators.
"""

import ast
import operator
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Literal

RIGHT, WRONG, NO_TAG = 1.0, 0.1, 0.0
MAX_CHARACTERS = 512  # of an expression; longer ones are wrong
MAX_DIGITS = 6  # of a number
MAX_DEPTH = 50  # levels: nested parentheses, signs and powers, and the number inside of them
MAX_BITS = 4096  # of a value; in compat also of an integer power

CHARACTERS = re.compile(r"[-+*/(). \t\r\n\f0-9]*")  # of expressions
# of Python's parser, also for texts that are too deep for it; and of arithmetic
ERRORS = (
    SyntaxError,
    MemoryError,
    RecursionError,
    ZeroDivisionError,
    OverflowError,
    TypeError,
    ValueError,
)


def score(
    solution_str: str, ground_truth: Mapping, mode: Literal["strict", "compat"] = "strict"
) -> dict:
    """{"score": 0 | 0.1 | 1, "pred": value, "format": 1 if there is an answer tag} of one response.

    ground_truth: {"numbers": [int, …], "target": int}. "pred" is for majority votes: the value of a
    valid answer, "" if it does not parse or does not use every number exactly once.

    strict: last complete <answer>…</answer> anywhere in the response; exact fractions.

    compat: TinyZero's rule, to compare curves with it. The tag must stand on the last line; `**`,
    `//`, decimals (1.5 made of 1 and 5) and a unary plus count; Python's floats, within 1e-5. Where
    TinyZero may evaluate for ever, this does not: a power that may have more than 4096 bits,
    50 or more nested parentheses, signs and powers, or more than 512 characters are wrong.
    """
    if mode not in ("strict", "compat"):
        raise ValueError(f"mode is {mode!r}, expected 'strict' or 'compat'")
    numbers = [int(number) for number in ground_truth["numbers"]]
    target = ground_truth["target"]
    if isinstance(target, str):
        target = int(target)  # Fraction("1e999999999") would never end
    target = Fraction(target)
    answer = last_answer(solution_str) if mode == "strict" else last_line_answer(solution_str)
    if answer is None:
        return {"score": NO_TAG, "pred": "", "format": 0.0}
    value = evaluate(answer, numbers, mode)
    if value is None:
        return {"score": WRONG, "pred": "", "format": 1.0}
    if mode == "strict":
        is_right = value == target
    else:
        is_right = abs(value - target) < 1e-5
    if is_right:
        return {"score": RIGHT, "pred": str(target), "format": 1.0}
    return {"score": WRONG, "pred": str(value), "format": 1.0}


def tinyzero(
    data_source: str, solution_str: str, ground_truth: Mapping, extra_info: Mapping | None = None
) -> dict:
    """The compat mode for `--reward-function common/rewards/countdown.py:tinyzero`."""
    return score(solution_str, ground_truth, mode="compat")


def last_answer(text: str) -> str | None:
    """Content of the last complete <answer>…</answer>; None if there is none.

    Linear: a lazy regex is quadratic over unclosed tags.
    """
    last_end = max(text.rfind("</answer>"), 0)
    start = text.rfind("<answer>", 0, last_end)
    if start < 0:
        return None
    end = text.find("</answer>", start)
    return text[start + len("<answer>") : end].strip()


def last_line_answer(text: str) -> str | None:
    """TinyZero's extraction: drop the prompt if it is there, keep the last line, take tags pairwise
    from the left."""
    marker = "Assistant:" if "Assistant:" in text else "<|im_start|>assistant"
    if marker in text:
        text = text.partition(marker)[2]
    line = text[text.rfind("\n") + 1 :]
    answer = None
    position = 0
    while True:
        start = line.find("<answer>", position)
        if start < 0:
            return answer
        end = line.find("</answer>", start)
        if end < 0:
            return answer
        answer = line[start + len("<answer>") : end].strip()
        position = end + len("</answer>")


def evaluate(text: str, numbers: list[int], mode: str) -> Fraction | complex | None:
    """Value of the expression; None if it is malformed, has no value or exceeds a bound, or does
    not use `numbers` exactly once each."""
    if len(text) > MAX_CHARACTERS or not CHARACTERS.fullmatch(text):
        return None
    # 1.5 uses 1 and 5, as in TinyZero
    used = [int(digits) for digits in re.findall(r"[0-9]+", text)]
    if sorted(used) != sorted(numbers) or max(used, default=0) >= 10**MAX_DIGITS:
        return None
    line = " ".join(text.split())
    try:
        value = compute(ast.parse(line, mode="eval").body, line, mode)
        # Python prints integers of at most 4300 digits
        return value if abs(value) < 2**MAX_BITS else None
    except ERRORS:
        return None


def compute(node: ast.expr, line: str, mode: str, depth: int = 1) -> Fraction | complex:
    """Value of a node of the tree of `line`. ValueError unless it is a number or an operation of
    the mode, and not nested too deeply.

    depth: 1, plus one for each sign around the node, and for each power in whose exponent it is.
    """
    operation = OPERATIONS[mode].get(type(getattr(node, "op", None)))
    if isinstance(node, ast.BinOp) and operation:
        left = compute(node.left, line, mode, depth)
        right = compute(node.right, line, mode, depth + isinstance(node.op, ast.Pow))
        return operation(left, right)
    if isinstance(node, ast.UnaryOp) and operation:
        return operation(compute(node.operand, line, mode, depth + 1))
    if not isinstance(node, ast.Constant) or type(node.value) not in NUMBERS[mode]:
        raise ValueError(f"no number and no operation of {mode}")
    before = line[: node.col_offset]
    if depth + before.count("(") - before.count(")") > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    return Fraction(node.value) if mode == "strict" else node.value


def bounded_power(base, exponent):
    """base ** exponent; ValueError if an integer power may exceed MAX_BITS bits: the bits of the
    base times the exponent (99**98**97 never ends)."""
    are_integers = type(base) is int and type(exponent) is int
    if are_integers and abs(base) > 1 and base.bit_length() * exponent > MAX_BITS:
        raise ValueError(f"{base} ** {exponent} is too large")
    return base**exponent


STRICT_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
COMPAT_OPERATIONS = STRICT_OPERATIONS | {
    ast.FloorDiv: operator.floordiv,
    ast.Pow: bounded_power,
    ast.UAdd: operator.pos,
}
OPERATIONS = {"strict": STRICT_OPERATIONS, "compat": COMPAT_OPERATIONS}
NUMBERS = {"strict": (int,), "compat": (int, float)}

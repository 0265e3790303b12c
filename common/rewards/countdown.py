"""Countdown: reach the target with + - * / and parentheses, every given number used exactly once.

Reward as in TinyZero: 1.0 for a right answer, 0.1 for a complete <answer> tag with anything else in it, 0 without one.
Model text is parsed here by recursive descent, in bounded time and memory, and is never given to `eval`.
"""

import operator
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Literal

RIGHT, WRONG, NO_TAG = 1.0, 0.1, 0.0
MAX_CHARACTERS = 512  # of an expression; longer ones are wrong
MAX_DIGITS = 6  # of a number
MAX_DEPTH = 50  # nested parentheses and signs; about four Python frames each
MAX_POWER_BITS = 4096  # compat only: of the value of an integer power

STRICT_TOKEN = re.compile(r"[0-9]+|[-+*/()]")
COMPAT_TOKEN = re.compile(r"[0-9]+\.?[0-9]*|\.[0-9]+|\*\*|//|[-+*/()]")
PRODUCTS = {"*": operator.mul, "/": operator.truediv, "//": operator.floordiv}
EVALUATION_ERRORS = (ZeroDivisionError, OverflowError, TypeError, ValueError)


def score(solution_str: str, ground_truth: Mapping, mode: Literal["strict", "compat"] = "strict") -> dict:
    """{"score": 0 | 0.1 | 1, "pred": value, "format": 1 if there is an answer tag} of one response.

    ground_truth: {"numbers": [int, …], "target": int}. "pred" is for majority votes: the value of a valid answer, ""
    for one that does not parse or does not use every number exactly once.
    strict: last complete <answer>…</answer> anywhere in the response; exact fractions.
    compat: TinyZero's rule, to compare curves with it. The tag must stand on the last line; `**`, `//`, decimals (1.5
    made of 1 and 5) and a unary plus count; Python's floats, within 1e-5. Where TinyZero may evaluate for ever, this
    does not: a power of more than 4096 bits, nesting deeper than 50 or more than 512 characters are wrong.
    """
    if mode not in ("strict", "compat"):
        raise ValueError(f"mode is {mode!r}, expected 'strict' or 'compat'")
    numbers, target = [int(number) for number in ground_truth["numbers"]], ground_truth["target"]
    target = Fraction(int(target) if isinstance(target, str) else target)  # 1e999999999 as a text would never end
    answer = last_answer(solution_str) if mode == "strict" else last_line_answer(solution_str)
    if answer is None:
        return {"score": NO_TAG, "pred": "", "format": 0.0}
    value = evaluate(answer, numbers, mode)
    if value is None:
        return {"score": WRONG, "pred": "", "format": 1.0}
    is_right = value == target if mode == "strict" else abs(value - target) < 1e-5
    return {"score": RIGHT if is_right else WRONG, "pred": str(target if is_right else value), "format": 1.0}


def tinyzero(data_source: str, solution_str: str, ground_truth: Mapping, extra_info: Mapping | None = None) -> dict:
    """The compat mode for `--reward-function common/rewards/countdown.py:tinyzero`."""
    return score(solution_str, ground_truth, mode="compat")


def last_answer(text: str) -> str | None:
    """Content of the last complete <answer>…</answer>. Linear: a lazy regex is quadratic over unclosed tags."""
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    return None if start < 0 else text[start + len("<answer>") : text.find("</answer>", start)].strip()


def last_line_answer(text: str) -> str | None:
    """TinyZero's extraction: drop the prompt if it is there, keep the last line, take tags pairwise from the left."""
    marker = "Assistant:" if "Assistant:" in text else "<|im_start|>assistant"
    text = text.partition(marker)[2] if marker in text else text
    line = text[text.rfind("\n") + 1 :]
    answer, position = None, 0
    while (start := line.find("<answer>", position)) >= 0 and (end := line.find("</answer>", start)) >= 0:
        answer, position = line[start + len("<answer>") : end].strip(), end + len("</answer>")
    return answer


def evaluate(text: str, numbers: list[int], mode: str) -> Fraction | float | None:
    """Value of the expression; None if it is malformed, too long, or does not use `numbers` exactly once each."""
    if len(text) > MAX_CHARACTERS:
        return None
    pattern = STRICT_TOKEN if mode == "strict" else COMPAT_TOKEN
    if pattern.sub("", text).strip(" \t\r\n\f"):  # a character that belongs to no token
        return None
    tokens = pattern.findall(text)
    used = [int(digits) for digits in re.findall(r"[0-9]+", text)]  # 1.5 uses 1 and 5, as in TinyZero
    if sorted(used) != sorted(numbers) or max(used, default=0) >= 10**MAX_DIGITS:
        return None
    try:
        value = Parser(tokens, mode).parse()
        return value if abs(value) < 2**MAX_POWER_BITS else None  # a longer one could not even be printed
    except EVALUATION_ERRORS:
        return None


class Parser:
    """Evaluates while it parses. Grammar (Python's precedence; `//`, `**` and unary plus in compat mode only):

    sum: product (("+" | "-") product)*      product: signed (("*" | "/" | "//") signed)*
    signed: ("-" | "+") signed | power       power: atom ["**" signed]       atom: NUMBER | "(" sum ")"
    """

    def __init__(self, tokens: list[str], mode: str):
        self.tokens = [*tokens, "end"]
        self.position = 0
        self.depth = 0
        self.compat = mode == "compat"

    def parse(self):
        value = self.sum()
        self.expect("end")
        return value

    def take(self, *wanted: str) -> str | None:
        """The next token if it is one of `wanted`, else None."""
        token = self.tokens[self.position]
        if token not in wanted:
            return None
        self.position += 1
        return token

    def expect(self, wanted: str) -> None:
        if self.take(wanted) is None:
            raise ValueError(f"expected {wanted!r}, found {self.tokens[self.position]!r}")

    def sum(self):
        value = self.product()
        while sign := self.take("+", "-"):
            term = self.product()
            value = value + term if sign == "+" else value - term
        return value

    def product(self):
        value = self.signed()
        while symbol := self.take(*PRODUCTS):
            value = PRODUCTS[symbol](value, self.signed())
        return value

    def signed(self):
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        if self.take("-"):
            value = -self.signed()
        elif self.compat and self.take("+"):
            value = +self.signed()
        else:
            value = self.atom()
            if self.take("**"):
                value = bounded_power(value, self.signed())
        self.depth -= 1
        return value

    def atom(self):
        if self.take("("):
            value = self.sum()
            self.expect(")")
            return value
        token = self.tokens[self.position]
        if not token[0].isdigit() and token[0] != ".":
            raise ValueError(f"expected a number, found {token!r}")
        self.position += 1
        if "." in token:
            return float(token)
        if token[0] == "0" and token.strip("0"):
            raise ValueError(f"leading zero in {token!r}")  # as in Python: 07 is an error, 0 and 00 are not
        return int(token) if self.compat else Fraction(token)


def bounded_power(base, exponent):
    """base ** exponent; ValueError where an integer power would exceed MAX_POWER_BITS bits (99**98**97 never ends)."""
    if {type(base), type(exponent)} == {int} and abs(base) > 1 and base.bit_length() * exponent > MAX_POWER_BITS:
        raise ValueError(f"{base} ** {exponent} is too large")
    return base**exponent

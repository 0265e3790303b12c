"""Rewards for answers that are numbers written out in a text. GSM8K for now."""

import re
from typing import Literal

TAIL = 300  # characters of the response in which the strict mode looks for its answer, as in verl

# -72, $72, -$1,234.50, 72. (a full stop), .5; the minus of "10-4" is no sign
NUMBER = r"(?:(?<![0-9])-)?(?:\$-?)?(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)"
STRICT_ANSWER = re.compile(rf"####[ \t]*({NUMBER})")
ANY_NUMBER = re.compile(NUMBER)


def score_gsm8k(solution_str: str, ground_truth: str, mode: Literal["strict", "flexible"] = "strict") -> dict:
    """{"score": 0 | 1, "pred": canonical number or ""} of one response.

    strict: the last `#### x` in the last 300 characters. flexible: the last number in the whole text.
    Numbers are compared as decimals, where verl compares strings: `72.`, `72.0`, `$72` are 72 and `1,234` is 1234.
    """
    if mode not in ("strict", "flexible"):
        raise ValueError(f"mode is {mode!r}, expected 'strict' or 'flexible'")
    truth = canonical_number(str(ground_truth))
    if not truth:
        raise ValueError(f"the GSM8K ground truth {ground_truth!r} is not a number")
    pattern, text = (STRICT_ANSWER, solution_str[-TAIL:]) if mode == "strict" else (ANY_NUMBER, solution_str)
    found = ""
    for match in pattern.finditer(text):
        found = match[match.lastindex or 0]
    pred = canonical_number(found)
    return {"score": float(pred == truth), "pred": pred}


def canonical_number(text: str) -> str:
    """The one spelling of a decimal number: "-$1,234.50" -> "-1234.5", "-0." -> "0"; "" if it is not a number.

    Works on the digits, so that no precision is lost however long the number is.
    """
    match = re.fullmatch(r"(-?)\$?(-?)([0-9,]*)(?:\.([0-9]*))?", text.strip())
    if match is None or not (match[3] or match[4]) or (match[1] and match[2]):
        return ""
    whole = match[3].replace(",", "").lstrip("0") or "0"
    fraction = (match[4] or "").rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return value if value == "0" else match[1] + match[2] + value

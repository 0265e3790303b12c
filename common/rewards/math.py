r"""Rewards for mathematical answers: `#### 72` (GSM8K), \boxed{\frac{1}{2}} (MATH) and `Answer: 204` (DAPO).

All take linear time and none raises, whatever the response; a ground truth that no response could match is an error.
What math-verify is asked is bounded, but not its time: the workers' deadline is for that.
"""

import logging
import re
import tomllib
from fractions import Fraction
from itertools import accumulate
from math import inf, prod
from numbers import Real
from pathlib import Path
from typing import Literal

TAIL = 300  # characters of the response in which GSM8K's strict mode and DAPO look for the answer, as in verl
STRICT_BOX_TAIL = 100  # the same of DAPO's boxed mode
MAX_CHARACTERS = 512  # of an answer; longer ones are wrong

# --- numbers ---

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


# --- \boxed{…} and `Answer: …` ---

BOX = r"(?:boxed|fbox|framebox)"
# a box that opens; a box around one word, as in $\boxed 5$; \{ \} and line breaks, to step over them; a brace
BOX_OR_BRACE = re.compile(rf"\\{BOX}(?:\s*+(?P<open>\{{)|\s(?P<word>[^\s$]{{1,40}}+)\$)|\\[{{}}]|\\\\(?!{BOX})|[{{}}]")
ANSWER_LINE = re.compile(r"answer\s*:\s*(?=\S)", re.IGNORECASE | re.ASCII)
INLINE_MATH = re.compile(r"\$+([^$]+)\$")


def score_boxed(solution_str: str, ground_truth: str) -> dict:
    r"""{"score": 0 | 1, "pred": normalised answer or ""} of one response to a MATH-style problem.

    The answer is the content of the last complete \boxed{…} anywhere in the response. It is right if it equals the
    ground truth after `normalize`, or else is `equivalent`: "pred" is then the ground truth, so that votes agree.
    """
    truth = normalized_truth(ground_truth)
    answer = last_boxed(solution_str) or ""
    pred = normalize(answer)
    is_right = pred == truth or equivalent(answer, str(ground_truth))
    return {"score": float(is_right), "pred": truth if is_right else pred}


def score_dapo(solution_str: str, ground_truth: str, mode: Literal["answer", "boxed"] = "answer") -> dict:
    r"""{"score": -1 | 1, "acc": whether it is right, "pred": answer or ""} of one response, as DAPO trains on AIME.

    answer: what follows the last `Answer:` on its line, in the last 300 characters; of that what follows the last `=`,
    and its first $...$, if there is one. Right if equal after `normalize`.
    boxed: the last \boxed{…} in the last 100 characters, to the letter.
    """
    if mode not in ("answer", "boxed"):
        raise ValueError(f"mode is {mode!r}, expected 'answer' or 'boxed'")
    truth = normalized_truth(ground_truth)
    if mode == "boxed":
        pred = last_boxed(solution_str[-STRICT_BOX_TAIL:]) or ""
        is_right = pred == str(ground_truth)
    else:
        tail, answer = solution_str[-TAIL:], ""
        for match in ANSWER_LINE.finditer(tail):
            answer = tail[match.end() :].partition("\n")[0]
        left, _, right = answer.rpartition("=")
        inline = INLINE_MATH.search(answer if left.count("$") % 2 else right)  # is the last "=" in math, or before it?
        answer = last_boxed(answer) or (inline[1] if inline else right)
        pred = normalize(answer.rpartition("=")[2].strip("* "))
        is_right = pred == truth
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": pred}


def dapo_strict_box(data_source: str, solution_str: str, ground_truth: str, extra_info=None) -> dict:
    """DAPO's boxed mode for `--reward-function common/rewards/math.py:dapo_strict_box`."""
    return score_dapo(solution_str, ground_truth, mode="boxed")


def last_boxed(text: str) -> str | None:
    r"""Content of the complete \boxed{…}, \fbox{…} or \framebox{…} that begins last; None if there is none."""
    answer, answer_start = None, -1
    open_braces = []  # of each: where the content begins if it belongs to a box, else -1
    for match in BOX_OR_BRACE.finditer(text):
        if match["open"]:
            open_braces.append(match.end())
        elif match["word"]:
            answer, answer_start = match["word"], match.end()
        elif match[0] == "{":
            open_braces.append(-1)
        elif match[0] == "}" and open_braces:
            start = open_braces.pop()
            if start > answer_start:
                answer, answer_start = text[start : match.start()], start
    return answer


def truth_text(ground_truth: object) -> str:
    """As a text. ValueError for what is neither a text nor a finite number: no answer is a list, or NaN."""
    if not isinstance(ground_truth, str | Real) or ground_truth != ground_truth or ground_truth in (inf, -inf):
        raise ValueError(f"the ground truth {ground_truth!r:.80} is neither a text nor a finite number")
    return str(ground_truth)


def normalized_truth(ground_truth: object) -> str:
    truth = normalize(truth_text(ground_truth))
    if not truth:
        raise ValueError(f"the ground truth {ground_truth!r:.80} is no answer of 1 to {MAX_CHARACTERS} characters")
    return truth


# --- one spelling for equal answers ---

SPELLINGS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
CLEAN, SHORT_FORMS, SYMBOLS = SPELLINGS["clean"], SPELLINGS["short_forms"], str.maketrans(SPELLINGS["symbols"])
DECIMAL = re.compile(r"[-+]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.[0-9]*)?")
SPACED_LIST = re.compile(r"[0-9],\s+[0-9]")
SCIENTIFIC = re.compile(  # without spaces: 4.5e-3, 4.5\times10^{-3}, 10^{33}
    rf"(?:({DECIMAL.pattern})[eE]|(?:({DECIMAL.pattern})(?:\\times|\\cdot|\*))?10\^)\{{?([-+]?[0-9]{{1,2}})\}}?"
)
FRACTION = re.compile(r"(-?)\\frac\{(-?[0-9]+)\}\{([0-9]+)\}")


def normalize(answer: str) -> str:
    r"""The one spelling of an answer: spaces, delimiters, units and `x =` dropped, "0.5" and "2/4" as \frac{1}{2}.

    The rules of Hendrycks et al. 2021 (arXiv 2103.03874), and every rational number in lowest terms, "4.5e3" and
    "4.5 \times 10^3" as 4500. "" for more than 512 characters.
    """
    if len(answer) > MAX_CHARACTERS:
        return ""
    text = short_form(clean(answer))
    value = rational(text)
    if match := SCIENTIFIC.fullmatch(text):
        value = rational(match[1] or match[2] or "1") * Fraction(10) ** int(match[3])
    if value is None:
        return text.lower() if text.isalpha() and len(text) > 2 else text  # a word, no symbols
    sign, value = "-" if value < 0 else "", abs(value)
    return f"{sign}{value}" if value.denominator == 1 else rf"{sign}\frac{{{value.numerator}}}{{{value.denominator}}}"


def clean(answer: str) -> str:
    """The answer without what does not change its value; still LaTeX that math-verify reads."""
    return substitute(CLEAN, answer.translate(SYMBOLS)).strip()


def short_form(text: str) -> str:
    """Of a cleaned answer: without spaces, but that "2, 100" does not become 2100."""
    short = substitute(SHORT_FORMS, text)
    return short.replace(",", ", ") if SPACED_LIST.search(text) and DECIMAL.fullmatch(short) else short


def substitute(rules: list[list[str]], text: str) -> str:
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text


def rational(text: str) -> Fraction | None:
    r"""Value of "-1,234.5" or "-\frac{1}{2}", None of anything else."""
    if DECIMAL.fullmatch(text):
        return Fraction(text.replace(",", ""))
    match = FRACTION.fullmatch(text)
    if match is None or not int(match[3]):
        return None
    return Fraction(int(match[2]), int(match[3])) * (-1 if match[1] else 1)


# --- a second opinion ---

MAX_SYMBOLIC_CHARACTERS = 200
MAX_DEPTH = 8  # of nested brackets; math-verify's parser takes a tenth of a second for each level
MAX_POWER = 2500  # of a number or a symbol
MAX_GROUP_POWER = 20  # product of all exponents, if a bracket is raised to a power

COMMAND = re.compile(r"\\(?:begin|end)\{[a-z]*\}|\\[a-zA-Z]+")
FINITE = re.compile(r"(?<![0-9])[0-9]{1,3}!|\\[dt]?binom\{[0-9]{1,4}\}\{[0-9]{1,4}\}")
BASE = re.compile(r"[0-9)]\s*_")  # 2516_8: math-verify takes it for 2516
UNBOUNDED = re.compile(r"!|\\(?:[dt]?binom|sum|prod|i*int|oint|lim)")  # what stays of them without the finite ones
# braces without a power in them, digits, a letter; an empty match for anything else, such as a tower of powers
EXPONENT = re.compile(r"\^(\{(?:[^{}^]|\{[^{}^]*\})*+\}|[0-9]++|[a-zA-Z])?(?!\^)")


def equivalent(answer: str, truth: str) -> bool:
    r"""Whether two answers are equal although spelled differently, as \frac{\sqrt{2}}{2} and \frac{1}{\sqrt{2}}.

    Two rational numbers are not, unless the truth has five decimals or more and the answer rounds to it: MAWPS has
    0.6666666667. All else is for math-verify, except where it might take long, or misjudge: it reads seat as east.
    """
    if len(answer) > MAX_CHARACTERS:
        return False
    value, true_value = rational(normalize(answer)), rational(normalize(truth))
    answer, truth = clean(answer), clean(truth)
    if value is not None and true_value is not None:
        decimals = truth.partition(".")[2]  # those of 4.5e33 are not for rounding
        digits = len(decimals) if decimals.isdecimal() else 0
        return value == true_value or (digits >= 5 and round(value, digits) == true_value)
    return is_harmless(answer) and is_harmless(truth) and math_verify_equal(answer, truth)


def math_verify_equal(answer: str, truth: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify  # here, because sympy takes seconds

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off
    gold, target = (
        parse(rf"\boxed{{{text}}}", [LatexExtractionConfig()], "no_fallback", parsing_timeout=None)
        for text in (truth, answer)
    )
    return verify(gold, target, timeout_seconds=None)


def is_harmless(text: str) -> bool:
    """Whether a cleaned answer is small in its length, nesting and powers, no word, and no number in another base."""
    if not text or len(text) > MAX_SYMBOLIC_CHARACTERS or not text.isascii() or BASE.search(text):
        return False
    depths = list(accumulate((char in "([{") - (char in ")]}") for char in text))
    if max(depths) > MAX_DEPTH or re.search(r"[a-zA-Z]{3}", COMMAND.sub(" ", text)):
        return False
    text = FINITE.sub("9999999", re.sub(r"[\s,]", "", text))
    if UNBOUNDED.search(text):
        return False
    exponents = EXPONENT.findall(text)
    sizes = [prod(max(1, int(number)) for number in re.findall(r"[0-9]+", exponent)) for exponent in exponents]
    if re.search(r"[)}\]|]\^", text):
        return all(exponents) and prod(sizes) <= MAX_GROUP_POWER
    return all(exponents) and max(sizes, default=1) <= MAX_POWER

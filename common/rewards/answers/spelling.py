r"""One spelling of an answer: 0.5, 1/2 and \frac{2}{4} are \frac{1}{2}, and "Even" is "even"."""

import re
from fractions import Fraction

from common.rewards.answers.typesetting import TEXT_COMMAND

DECIMAL = re.compile(r"[-+]?(?:[0-9]+|[1-9][0-9]{0,2}(?:,[0-9]{3})+)?(?:\.[0-9]*)?")
MANTISSA = r"[-+]?(?:[0-9]+|[1-9][0-9]{0,2}(?:,[0-9]{3})+)(?:\.[0-9]*)?"
SCIENTIFIC = re.compile(  # without spaces: 4.5e-3, 4.5\times10^{-3}, 10^{33}
    rf"({MANTISSA})[eE]([-+]?[0-9]{{1,2}})"
    rf"|(?:({MANTISSA})(?:\\times|\\cdot|\*))?10\^\{{?([-+]?[0-9]{{1,2}})\}}?"
)
FRACTION = re.compile(r"(-?)\\frac\{(-?[0-9]+)\}\{([0-9]+)\}")
MIXED = re.compile(r"(-?)([0-9]+)\\frac\{([0-9]+)\}\{([0-9]+)\}")

# (pattern, replacement), applied in this order to a typeset text without spaces
SHORT_FORMS = [
    (TEXT_COMMAND.pattern, r"\1"),
    (r"([_^])\{([0-9a-zA-Z+*-])\}", r"\1\2"),
    (r"(?<![\\a-zA-Z}\]_^])\{([^{}]*)\}", r"\1"),  # braces that only group
    (r"^([-+]?)([0-9]+)/([0-9]+)$", r"\1\\frac{\2}{\3}"),
    (r"(?<![0-9])\.(?=[0-9])", "0."),
    (r"\\times|\*", r"\\cdot"),
    (r"^\+(?=[0-9.\\])", ""),
]


def short_form(text: str) -> str:
    """A typeset text without spaces, except where two digits would meet, or where a list such as
    1, 234 would become one number."""
    text = re.sub(r"\s+", " ", TEXT_COMMAND.sub(r"\1", text))
    short = re.sub("(?<![0-9]) | (?![0-9])", "", text)
    for pattern, replacement in SHORT_FORMS:
        short = re.sub(pattern, replacement, short)
    is_number = DECIMAL.fullmatch(short) or SCIENTIFIC.fullmatch(short)
    is_list = is_number and re.search(r"[0-9],\s+[0-9]", text)
    return short.replace(",", ", ") if is_list else short


def rational(text: str) -> Fraction | None:
    r"""Value of "-1,234.5", "4.5e3", "-\frac{1}{2}" or "1\frac{1}{2}", None of anything else."""
    if DECIMAL.fullmatch(text) and re.search("[0-9]", text):
        return Fraction(text.replace(",", ""))
    match = SCIENTIFIC.fullmatch(text)
    if match:
        digits = match[1] or match[3] or "1"
        exponent = int(match[2] or match[4])
        return Fraction(digits.replace(",", "")) * Fraction(10) ** exponent
    match = FRACTION.fullmatch(text)
    if match:
        numerator = int(match[2])
        denominator = int(match[3])
        if denominator:
            value = Fraction(numerator, denominator)
            return -value if match[1] else value
    match = MIXED.fullmatch(text)
    if match:
        whole = int(match[2])
        numerator = int(match[3])
        denominator = int(match[4])
        if 0 < numerator < denominator:
            value = whole + Fraction(numerator, denominator)
            return -value if match[1] else value
    return None


def spelling(text: str) -> str:
    """The one spelling of a typeset text without unit and label: a number in lowest terms, a word
    in lower case."""
    short = short_form(text)
    value = rational(short)
    if value is None:
        if short.isalpha():  # word by word: in `short` they are joined
            return short_form(re.sub("[A-Za-z]+", lower_case, text))
        return short
    if value.denominator == 1:
        return str(value)
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def lower_case(match: re.Match) -> str:
    """A word in lower case; but one or two letters, and three capitals, are symbols, as A, Ab and
    ABC, unless they spell no, yes or odd."""
    word = match[0]
    lower = word.lower()
    if lower in ("no", "yes", "odd"):
        return lower
    is_symbol = len(lower) < 3 or (len(lower) == 3 and word.isupper())
    return word if is_symbol else lower


def rounds_to(value: Fraction, decimal: str, min_digits: int) -> bool:
    """Whether a decimal is the value rounded: MAWPS has 0.6666666667 for 2/3.

    It needs `min_digits` digits behind the point, and as many in all but for zeros at its ends.
    """
    digits = decimal.partition(".")[2]
    significant = re.sub("[.,]", "", decimal).strip("-+0")
    true_value = rational(decimal)
    if true_value is None or not digits.isdecimal():
        return False
    if min(len(digits), len(significant)) < min_digits:
        return False
    return round(value, len(digits)) == true_value

r"""Reward of Pixel Reasoner (arXiv 2505.15966): the last \boxed{…} against one or more short
answers.

The released scorer raises if there is no box, which ends the run; gives -1 for what it cannot
parse, which shifts the advantages; looks for upper-case options in lower-cased text, so that `B.
blue` is never B; and accepts as the list "a, b" any text in which both a and b occur. Here the
right answer is 1, anything else 0; `says_same` and `same_formula` define what is right.

Linear time and no exception, whatever the response; answers that no response could match are an
error.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from numbers import Real

from common.rewards.answers import MAX_CHARACTERS, is_equal, normalize
from common.rewards.answers.spelling import rational
from common.rewards.answers.typesetting import typeset
from common.rewards.math import last_boxed, truth_text


def score_visual_qa(solution: str, answers: list[str] | str) -> dict:
    r"""{"score": 0 | 1, "acc": the same, "pred": short form or "", "anls": 0 or 0.5 to 1} of one
    response.

    score: whether the last complete \boxed{…} says the same as any of the answers, or is
    mathematically equal to it; answers may be boxed too. "pred" of a right one is the first answer,
    so that votes agree. anls: how close the spelling is.
    """
    # truth_text refuses a mapping, whose keys are no answers
    is_single = isinstance(answers, str | Real | Mapping)
    accepted = [answers] if is_single else answers
    truths = [unboxed(truth_text(answer)) for answer in accepted]
    truths = [truth for truth in truths if len(truth) <= MAX_CHARACTERS and plain(truth)]
    if not truths:
        raise ValueError(
            f"none of the answers {answers!r:.80} has 1 to {MAX_CHARACTERS} characters"
        )
    answer = (last_boxed(solution) or "").strip()
    if len(answer) > MAX_CHARACTERS:
        answer = ""
    is_right = any(says_same(answer, truth) or same_formula(answer, truth) for truth in truths)
    acc = float(is_right)
    anls = max(similarity(readable(answer), readable(truth)) for truth in truths)
    pred = plain(truths[0] if is_right else answer)
    return {"score": acc, "acc": acc, "pred": pred, "anls": anls}


def unboxed(answer: str) -> str:
    content = last_boxed(answer)
    if content is None:
        content = answer
    return content.strip()


# --- one spelling ---

# (pattern, replacement), applied in this order to a text in lower case: its LaTeX becomes what a
# reader sees, but formulas such as \frac{1}{2} stay LaTeX
READABLE = [
    (r"\s*\^\s*(?:\\circ(?![a-z])|\{\s*\\circ\s*\})", "°"),
    (r"\\(?:text|math|mbox)[a-z]*\s*\{([^{}]*)\}", r"\1"),
    (r"\\(?:text|math|mbox)[a-z]*\s*\{([^{}]*)\}", r"\1"),  # again, for \text{\textbf{B}}
    (r"\\[dtc]frac(?![a-z])", r"\\frac"),
    (r"\\(?:left|right|displaystyle)(?![a-z])|\\[!()\[\]]", ""),
    (r"(?<=[0-9])(?:\{,\}|\\,)(?=[0-9]{3})", ","),  # 1{,}234
    (r"\\[,;: ]|\\q?quad(?![a-z])|~", " "),
    (r"^\s*\$(.*[^\\])\$\s*$", r"\1"),
    (r"\\([$%#&_{}])", r"\1"),
    (r"[−–—]", "-"),
    (r"(?<=[0-9])\s*-\s*(?=[0-9])", "-"),  # 50 - 60
    (r"\s+", " "),
]
EDGES = " \"'`*“”‘’,;:!?…"
NUMBER_NAMES = "zero one two three four five six seven eight nine ten eleven twelve"
NUMBER_WORDS = NUMBER_NAMES.split()
NUMBER_WORD = re.compile(rf"\b(?:{'|'.join(NUMBER_WORDS)})\b")
# option b, choice (b): blue
OPTION_WORD = re.compile(r"^(?:option|choice) (?=[(\[]?[a-k](?:[)\].:]|$))")
IN_BRACKETS = re.compile(r"[(\[]([^()\[\],]*)[)\]]")


def readable(answer: str) -> str:
    text = answer.lower()
    for pattern, replacement in READABLE:
        text = re.sub(pattern, replacement, text)
    return text.strip()


def plain(answer: str) -> str:
    """The readable answer without the word "option", without quotes, punctuation or brackets around
    it, and with digits for zero to twelve."""
    text = readable(answer)
    core = OPTION_WORD.sub("", trimmed(text))
    in_brackets = IN_BRACKETS.fullmatch(core)
    if in_brackets:
        core = trimmed(in_brackets[1])
    # an answer of punctuation alone, such as "?", stays as it is
    return NUMBER_WORD.sub(digits_of, core or text)


def digits_of(number_word: re.Match) -> str:
    return str(NUMBER_WORDS.index(number_word[0]))


def trimmed(text: str) -> str:
    return text.lstrip(EDGES).rstrip(EDGES + ".")  # .5 keeps its point


# --- equality ---

# "b", "(b)", "b. blue", "(b) blue", "b:blue"; but not "b blue", "a.m", nor the beginning of "(a)
# and (b)"
OPTION = re.compile(r"[(\[]?([a-k])(?:[)\]][.:]?|[.:](?=\s|\w\w)|$)\s*+(?!(?:and|or)\b|[,;/&])(.*)")
# not "d. both (a) and (b)"
ANOTHER_OPTION = re.compile(r"[\s,;](?:[a-k][.:)]|\([a-k]\)(?!\s(?:and|or)\b))\s")
LETTERS = re.compile(r"(?:[(\[]?[a-k][)\]][\s,;.]*)+")  # what follows "(a)" in "(a) (b)"
COMMA = r"(?:(?<![0-9]),|,(?![0-9]{3}(?![0-9])))"  # but not that of 1,234
SEPARATOR = re.compile(rf"{COMMA}|&|\band\b")
TUPLE = re.compile(r"[(\[][^()\[\]]*[)\]]")  # not "(a), (b)"
LABEL = re.compile(r"^\s*[(\[]?[A-Ka-k](?:[)\]][.:]?|[.:])\s+")  # of an option
# a letter that stands alone, or a command
SYMBOL = re.compile(r"\\[A-Za-z]+|(?<![A-Za-z])[A-Za-z](?![A-Za-z])")
# x' and 5!, but not a letter in quotes
MARKED = re.compile(r"(?<![A-Za-z'\"“‘`])[A-Za-z]'+(?![A-Za-z])|[0-9]!+")
# in a text with one of these, letters are symbols
SIGN_OF_SYMBOLS = re.compile(
    r"\\(?:gamma|delta|theta|lambda|xi|pi|sigma|phi|psi|omega)|[a-z0-9})]\s*[\^_=]", re.IGNORECASE
)


def says_same(answer: str, truth: str) -> bool:
    """`same_plain` of two texts as they are written; where letters are symbols, case counts."""
    return same_plain(plain(answer), plain(truth)) and not symbols_differ(answer, truth)


def symbols_differ(answer: str, truth: str) -> bool:
    r"""Whether two texts differ in a prime or a factorial (x' is not x, 5! not 5) or, if letters of
    one are symbols, only in the case of letters: \Omega is not \omega."""
    answer = typeset(LABEL.sub("", answer))
    truth = typeset(LABEL.sub("", truth))
    if MARKED.findall(answer) != MARKED.findall(truth):
        return True
    if not SIGN_OF_SYMBOLS.search(answer) and not SIGN_OF_SYMBOLS.search(truth):
        return False
    symbols = SYMBOL.findall(answer)
    true_symbols = SYMBOL.findall(truth)
    lower = [symbol.lower() for symbol in symbols]
    true_lower = [symbol.lower() for symbol in true_symbols]
    return lower == true_lower and symbols != true_symbols


def same_plain(answer: str, truth: str) -> bool:
    """Whether two `plain` answers say the same, by the kind of the truth.

    An option, A to K: by its letter, and by its text if both have one; an answer without a letter
    by the text alone. A list, with commas: the same items in any order, no other ones; (3, 4) is no
    list. A number: by value, and by unit if both have one: 12% is 12 and not 0.12, 5 cm is 5 and
    not 5 kg. Else the same words, but for a, an and the.
    """
    letter, text = option(answer)
    true_letter, true_text = option(truth)
    if letter and true_letter:
        if letter != true_letter:
            return False
        return not text or not true_text or same_plain(text, true_text)
    if true_letter:
        return same_plain(answer, true_text)
    may_be_list = "," in truth and not TUPLE.fullmatch(truth)
    if may_be_list and same_items(items(answer), items(truth)):
        return True
    number = quantity(answer)
    true_number = quantity(truth)
    if number and true_number:
        value, unit = number
        true_value, true_unit = true_number
        return value == true_value and (unit == true_unit or not unit or not true_unit)
    true_wording = wording(truth)
    return true_wording != "" and wording(answer) == true_wording


def option(text: str) -> tuple[str, str]:
    """("b", "blue") of "(b) blue", ("b", "") of "b"; ("", "") if the text is no option, or names
    several."""
    match = OPTION.fullmatch(text)
    if match is None:
        return "", ""
    letter, option_text = match.groups()
    if ANOTHER_OPTION.search(text) or LETTERS.fullmatch(option_text):
        return "", ""
    return letter, trimmed(option_text)


def items(text: str) -> list[str]:
    parts = [trimmed(part) for part in SEPARATOR.split(text)]
    return [part for part in parts if part]


def same_items(answers: list[str], truths: list[str]) -> bool:
    """Whether two lists of plain answers are the same in any order; False below two."""
    if len(answers) != len(truths) or len(truths) < 2:
        return False
    unmatched = list(answers)
    for truth in truths:
        for i, answer in enumerate(unmatched):
            if same_plain(answer, truth):
                del unmatched[i]
                break
        else:
            return False
    return True


QUANTITY = re.compile(
    r"(?P<sign>[-+]?)\s*(?P<currency>[$€£]?)\s*"
    r"(?P<number>[0-9]+ +[0-9]+/[0-9]+|[0-9][0-9,]*(?:\.[0-9]*|/[0-9]+)?|\.[0-9]+"
    r"|\\frac\{[0-9]+\}\{[0-9]+\})\s*(?P<unit>[^0-9\s].*)?"
)
# unit -> its other spellings; an s may follow each. No single letters: 5m may be millions, 1980s a
# decade.
UNITS = {
    "%": "percent",
    "$": "dollar usd",
    "€": "euro",
    "£": "gbp",
    "°": "degree",
    "°c": "celsius °celsius",
    "°f": "fahrenheit °fahrenheit",
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "meter": "metre",
    "km": "kilometer kilometre",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "gram": "",
    "kg": "kilogram",
    "lb": "pound",
    "oz": "ounce",
    "liter": "litre",
    "ml": "milliliter millilitre",
    "sec": "second",
    "min": "minute",
    "hr": "hour",
    "day": "",
    "week": "",
    "month": "",
    "yr": "year",
    "mph": "",
    "km/h": "",
    "people": "person",
    "time": "",
    "point": "",
    "unit": "",
}


def units_by_spelling() -> dict[str, str]:
    units = {}
    for unit, other_spellings in UNITS.items():
        for spelling in [unit, *other_spellings.split()]:
            units[spelling] = unit
            units[spelling + "s"] = unit
    return units


UNIT_OF = units_by_spelling()
DEGREES = re.compile(r"(?:°|degrees?)\s*(?=(?:c|f|celsius|fahrenheit)$)")  # 25 degrees Celsius


def quantity(text: str) -> tuple[Fraction, str] | None:
    """(1234, "%") of "1,234.0 percent", (5, "$") of "$5", (5, "") of "5"; None if that is not all
    of the text."""
    match = QUANTITY.fullmatch(text)
    if match is None:
        return None
    value = rational(normalize(match["number"]))
    if value is None:
        return None
    if match["sign"] == "-":
        value = -value
    spellings = [spelling for spelling in (match["currency"], match["unit"]) if spelling]
    units = {UNIT_OF.get(DEGREES.sub("°", spelling)) for spelling in spellings}
    if None in units or len(units) > 1:
        return None
    return value, units.pop() if units else ""


SPACE_IN_BRACKETS = re.compile(r"(?<=[(\[]) | (?=[)\]])")  # ( 3, 4 )


def wording(text: str) -> str:
    without_articles = re.sub(r"\b(?:an?|the)\s+(?=\S)", "", text)
    text = re.sub(rf"\s*{COMMA}\s*|\s+", " ", without_articles)
    return SPACE_IN_BRACKETS.sub("", text)


# a text with one of these is a formula; 18-24 is none: it would equal 19-25
FORMULA = re.compile(r"\\frac|\\sqrt|\\pi|[√π^]|[\w)}]\s*[+*]\s*[\w({\\]")


def same_formula(answer: str, truth: str) -> bool:
    """Whether two texts as they are written are equal formulas."""
    true_letter, _ = option(plain(truth))
    if true_letter or (quantity(plain(answer)) and quantity(plain(truth))):
        return False  # `same_plain` has decided
    # 5^\circ is no formula
    is_formula = FORMULA.search(readable(answer)) or FORMULA.search(readable(truth))
    return bool(is_formula) and is_equal(answer, truth)


# --- similarity ---


def similarity(answer: str, truth: str) -> float:
    """ANLS (ST-VQA, arXiv 1905.13648) of one answer: 1 - edit distance / length of the longer text;
    0 below a half.

    A half itself counts, as in the evaluation scripts in use; the paper has 0 there.
    """
    value = 1 - edit_distance(answer, truth) / max(len(answer), len(truth))
    return value if value >= 0.5 else 0.0


def edit_distance(a: str, b: str) -> int:
    """Levenshtein's: insertions, deletions and substitutions from a to b."""
    previous = list(range(len(b) + 1))  # [j]: distance to b[:j] from the characters of a so far
    for i, char in enumerate(a, start=1):
        current = [i]
        for j, other in enumerate(b, start=1):
            substitution = previous[j - 1] + (char != other)
            current.append(min(previous[j] + 1, current[j - 1] + 1, substitution))
        previous = current
    return previous[-1]

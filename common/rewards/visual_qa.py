r"""Reward of Pixel Reasoner (arXiv 2505.15966): the last \boxed{…} against one or more short
answers.

The released scorer raises if there is no box, which ends the run; gives -1 for what it cannot
parse, which shifts the advantages; looks for upper-case options in lower-cased text, so that `B.
blue` is never B; and takes any text in which the parts of "a, b" occur for that list. Here the
right answer is 1, all else is 0, and `same` says what is right.

Linear time and no exception, whatever the response; answers that no response could match are an
error.
"""

import re
import tomllib
from collections.abc import Mapping
from fractions import Fraction
from numbers import Real
from pathlib import Path

from common.rewards.answers import MAX_CHARACTERS, is_equal, normalize, rational, typeset
from common.rewards.math import last_boxed, truth_text


def score_visual_qa(solution: str, answers: list[str] | str) -> dict:
    r"""{"score": 0 | 1, "acc": the same, "pred": short form or "", "anls": 0 or 0.5 to 1} of one
    response.

    score: whether the last complete \boxed{…} is `same` as, or mathematically equal to, any of the
    answers, which may be boxed too. "pred" of a right one is the first answer, so that votes agree.
    anls: how close the spelling is.
    """
    several = [answers] if isinstance(answers, str | Real | Mapping) else answers
    truths = [unboxed(truth_text(answer)) for answer in several]
    truths = [truth for truth in truths if len(truth) <= MAX_CHARACTERS and plain(truth)]
    if not truths:
        raise ValueError(
            f"none of the answers {answers!r:.80} has 1 to {MAX_CHARACTERS} characters"
        )
    answer = (last_boxed(solution) or "").strip()
    if len(answer) > MAX_CHARACTERS:
        answer = ""
    acc = float(any(says_same(answer, truth) or same_formula(answer, truth) for truth in truths))
    anls = max(similarity(readable(answer), readable(truth)) for truth in truths)
    pred = plain(truths[0] if acc else answer)
    return {"score": acc, "acc": acc, "pred": pred, "anls": anls}


def unboxed(answer: str) -> str:
    content = last_boxed(answer)
    return (answer if content is None else content).strip()


# --- one spelling ---

SPELLINGS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
EDGES = " \"'`*“”‘’,;:!?…"
NUMBER_WORD = re.compile(  # the number of the group is its value and 1
    r"\b(?:(zero)|(one)|(two)|(three)|(four)|(five)|(six)|(seven)|(eight)|(nine)|(ten)|(eleven)|(twelve))\b"
)
# option b, choice (b): blue
OPTION_WORD = re.compile(r"^(?:option|choice) (?=[(\[]?[a-k](?:[)\].:]|$))")
IN_BRACKETS = re.compile(r"[(\[]([^()\[\],]*)[)\]]")


def substitute(rules: list[list[str]], text: str) -> str:
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text


def readable(answer: str) -> str:
    return substitute(SPELLINGS["readable"], answer.lower()).strip()


def plain(answer: str) -> str:
    """The readable answer without quotes, punctuation or brackets around it, and with digits for
    zero to twelve."""
    text = readable(answer)
    core = OPTION_WORD.sub("", trimmed(text))
    if match := IN_BRACKETS.fullmatch(core):
        core = trimmed(match[1])
    # "?" stays what it is
    return NUMBER_WORD.sub(lambda word: str(word.lastindex - 1), core or text)


def trimmed(text: str) -> str:
    return text.lstrip(EDGES).rstrip(EDGES + ".")  # .5 keeps its point


# --- equality ---

# "b", "(b)", "b. blue", "(b) blue", "b:blue"; but not "b blue", "a.m", nor the beginning of "(a)
# and (b)"
OPTION = re.compile(r"[(\[]?([a-k])(?:[)\]][.:]?|[.:](?=\s|\w\w)|$)\s*+(?!(?:and|or)\b|[,;/&])(.*)")
# not "d. both (a) and (b)"
ANOTHER_OPTION = re.compile(r"[\s,;](?:[a-k][.:)]|\([a-k]\)(?!\s(?:and|or)\b))\s")
LETTERS = re.compile(r"(?:[(\[]?[a-k][)\]][\s,;.]*)+")  # what stands behind "(a)" in "(a) (b)"
COMMA = r"(?:(?<![0-9]),|,(?![0-9]{3}(?![0-9])))"  # but not that of 1,234
SEPARATOR = re.compile(rf"{COMMA}|&|\band\b")
TUPLE = re.compile(r"[(\[][^()\[\]]*[)\]]")  # not "(a), (b)"


def says_same(answer: str, truth: str) -> bool:
    """`same`, of texts as they are written: their case counts where letters are symbols."""
    return same(plain(answer), plain(truth)) and not symbols_differ(answer, truth)


def symbols_differ(answer: str, truth: str) -> bool:
    r"""Whether one of two texts is a formula, and letters of them differ: \Omega is not \omega, x'
    not x, 5! not 5."""
    texts = [typeset(answer), typeset(truth)]
    if MARKED.findall(texts[0]) != MARKED.findall(texts[1]):
        return True
    if not any(SYMBOLS.search(text) for text in texts):
        return False
    symbols = [SYMBOL.findall(text) for text in texts]
    lower = [[symbol.lower() for symbol in found] for found in symbols]
    return lower[0] == lower[1] and symbols[0] != symbols[1]


def same(answer: str, truth: str) -> bool:
    """Whether two plain answers say the same, by the kind of the truth.

    An option, A to K: by its letter; if both have the option's text, that too; by the text alone if
    the truth has one. A list, with commas: the same items in any order, no other ones; (3, 4) is no
    list. A number: by value, and by unit if both have one: 12% is 12 and not 0.12, 5 cm is 5 and
    not 5 kg. Else the same words, but for a, an and the.
    """
    (letter, text), (true_letter, true_text) = option(answer), option(truth)
    if letter and true_letter:
        return letter == true_letter and (not text or not true_text or same(text, true_text))
    if true_letter:
        return same(answer, true_text)
    if "," in truth and not TUPLE.fullmatch(truth) and same_items(items(answer), items(truth)):
        return True
    number, true_number = quantity(answer), quantity(truth)
    if number and true_number:
        (value, unit), (true_value, true_unit) = number, true_number
        return value == true_value and (unit == true_unit or not unit or not true_unit)
    return words(answer) == words(truth) != ""


def option(text: str) -> tuple[str, str]:
    """("b", "blue") of "(b) blue", ("b", "") of "b"; ("", "") if the text is no option, or names
    several."""
    match = OPTION.fullmatch(text)
    several = match is None or ANOTHER_OPTION.search(text) or LETTERS.fullmatch(match[2])
    return ("", "") if several else (match[1], trimmed(match[2]))


def items(text: str) -> list[str]:
    return [item for part in SEPARATOR.split(text) if (item := trimmed(part))]


def same_items(answers: list[str], truths: list[str]) -> bool:
    if len(answers) != len(truths) or len(truths) < 2:
        return False
    rest = list(answers)
    for truth in truths:
        found = next((i for i, answer in enumerate(rest) if same(answer, truth)), None)
        if found is None:
            return False
        del rest[found]
    return True


QUANTITY = re.compile(
    r"(?P<sign>[-+]?)\s*(?P<currency>[$€£]?)\s*"
    r"(?P<number>[0-9][0-9,]*(?:\.[0-9]*|/[0-9]+)?|\.[0-9]+|\\frac\{[0-9]+\}\{[0-9]+\})\s*(?P<unit>[^0-9\s].*)?"
)
UNIT = {
    spelling + s: unit.split()[0]
    for unit in SPELLINGS["units"]
    for spelling in unit.split()
    for s in ("", "s")
}


def quantity(text: str) -> tuple[Fraction, str] | None:
    """(1234, "%") of "1,234.0 percent", (5, "$") of "$5", (5, "") of "5"; None if that is not all
    of the text."""
    match = QUANTITY.fullmatch(text)
    value = match and rational(normalize(match["number"]))
    if value is None:
        return None
    units = {UNIT.get(spelling) for spelling in (match["currency"], match["unit"]) if spelling}
    if None in units or len(units) > 1:
        return None
    return (-value if match["sign"] == "-" else value), next(iter(units), "")


def words(text: str) -> str:
    return re.sub(rf"{COMMA}\s*|\s+", " ", re.sub(r"\b(?:an?|the)\s+(?=\S)", "", text))


# 18-24 and 19-25 are both -6 as formulas. Only these are taken for some:
SYMBOL = re.compile(r"\\[A-Za-z]+|(?<![A-Za-z])[A-Za-z](?![A-Za-z])")
MARKED = re.compile(r"(?<![A-Za-z'\"“‘`])[A-Za-z]'+(?![A-Za-z])|[0-9]!+")  # not a letter in quotes
SYMBOLS = re.compile(
    r"\\(?:gamma|delta|theta|lambda|xi|pi|sigma|phi|psi|omega)|[a-z0-9})]\s*[\^_=]", re.IGNORECASE
)
FORMULA = re.compile(r"\\frac|\\sqrt|\\pi|[√π^]|[\w)}]\s*[+*]\s*[\w({\\]")


def same_formula(answer: str, truth: str) -> bool:
    if option(plain(truth))[0] or (quantity(plain(answer)) and quantity(plain(truth))):
        return False  # `same` has decided
    # 5^\circ is none
    is_formula = FORMULA.search(readable(answer)) or FORMULA.search(readable(truth))
    return bool(is_formula) and is_equal(answer, truth)


# --- similarity ---


def similarity(answer: str, truth: str) -> float:
    """Of ANLS (ST-VQA, arXiv 1905.13648): 1 - edit distance / length of the longer one; 0 if below
    a half.

    A half itself counts, as in the evaluation scripts in use; the paper has 0 there.
    """
    value = 1 - edit_distance(answer, truth) / max(len(answer), len(truth))
    return value if value >= 0.5 else 0.0


def edit_distance(a: str, b: str) -> int:
    """Levenshtein's: insertions, deletions and substitutions from a to b."""
    row = list(range(len(b) + 1))  # row[j]: from the part of a so far to b[:j]
    for i, char in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(b, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (char != other))
    return row[-1]

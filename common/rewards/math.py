r"""Rewards for mathematical answers: `#### 72` (GSM8K), \boxed{\frac{1}{2}} (MATH) and `Answer:
204` (DAPO).

All take linear time and none raises, whatever the response; a ground truth that no response could
match is an error, but not to `verl_gsm8k`. common/rewards/answers/ decides when two answers are
equal.
"""

import re
from math import inf
from numbers import Real

from common.rewards.answers import MAX_CHARACTERS, is_equal, normalize
from common.rewards.answers.units import FRACTIONS, unit_name

TAIL = 300  # characters of the response in which GSM8K and DAPO look for the answer, as in verl

# --- numbers ---

# -72, $72, -$1,234.50, 72. (a full stop), .5; but the comma of "3,5" is not part of a number
INTEGER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
NUMBER = rf"-?(?:\$-?)?(?:{INTEGER}(?:\.[0-9]*)?|\.[0-9]+)"
ANSWER = re.compile(rf"####[ \t]*\**({NUMBER})([^\n]*)")
# words that make another number of the one before them
CONTINUATION_WORDS = """
or and to through plus minus times x over out of point half halves third thirds quarter
quarters tenth tenths hundredth hundredths mod hundred thousand million billion trillion
hundreds thousands millions billions trillions dozen dozens lakh lakhs crore crores mil bn squared
cubed not factorial divided multiplied pi below negative
"""
CONTINUATIONS = set(CONTINUATION_WORDS.split())
VERL_ANSWER = re.compile(r"#### (-?[0-9.,]+)")


def score_gsm8k(solution_str: str, ground_truth: str) -> dict:
    """{"score": 0 | 1, "pred": canonical number or ""} of one response.

    The answer is that of the last line with `#### x` in the last 300 characters, x being a number
    that ends there: `5 or 6`, `1/2`, `3,5` are none, and no earlier line counts then. Numbers are
    compared as decimals: `72.`, `72.0`, `$72` are 72, and `1,234` is 1234.
    """
    truth = canonical_number(str(ground_truth))
    if not truth:
        raise ValueError(f"the GSM8K ground truth {ground_truth!r} is not a number")
    answer = ""
    for match in ANSWER.finditer(solution_str[-TAIL:]):
        number, rest = match.groups()
        answer = number if is_end(rest) else ""
    pred = canonical_number(answer)
    return {"score": float(pred == truth), "pred": pred}


def is_end(rest: str) -> bool:
    """Whether a number ends before the rest of its line: before nothing, a sentence, a unit, or
    other words."""
    # nothing more than signs: 72., 72%, 72), 72 <end>
    if re.match(r"\s*(?:\\?%)?[.,;:?)\]*$]*\s*(?:<|$)", rest):
        return True
    # a new sentence or clause: "72. So", "72, which is"; but not "72, 80" and "5; or 6"
    if re.match(r"[.?]\s|[;:,]\s++(?![0-9]|(?:or|and|but)\b)", rest):
        return True
    # up to the next clause there is more to it: 72 + 1, 1/2, 3,5, "5 not 6"
    words = re.split(r"<|[.,;:?](?=\s|$)", rest)[0].strip(" \t*$%()")
    if re.search(r"[0-9+*/=^!]|\bnot\b", words):
        return False
    if not rest[0].isspace():  # right behind the number only a unit: 72kg, but not 5k and 5th
        return unit_name(words) != ""
    match = re.match("[A-Za-z]+", words)
    if match is None:
        return False
    word = match[0]
    # a word that changes it: 5 million, 5 or 6
    if word.lower() in CONTINUATIONS or FRACTIONS.fullmatch(word.lower()):
        return False
    # 5 m, but not 5 K
    return len(word) > 1 or (word.islower() and unit_name(word) != "")


def verl_gsm8k(data_source: str, solution_str: str, ground_truth: str, extra_info=None) -> float:
    """verl's own rule, for `--reward-function common/rewards/math.py:verl_gsm8k`: the last `#### x`
    in the last 300 characters, without commas, is the truth to the letter. `#### 3,5` is 35 for it,
    `#### 1/2` is 1, `#### $5` is no answer.
    """
    answers = VERL_ANSWER.findall(solution_str[-TAIL:])
    if not answers:
        return 0.0
    answer = answers[-1].replace(",", "")
    return float(answer == str(ground_truth))


def canonical_number(text: str) -> str:
    """The one spelling of a decimal number: "-$1,234.50" -> "-1234.5", "-0." -> "0"; "" if it is
    not a number.

    Works on the digits, so that no precision is lost however long the number is.
    """
    whole_number = r"[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]*"
    number = rf"(-?)\$?(-?)({whole_number})(?:\.([0-9]*))?"
    match = re.fullmatch(number, text.strip())
    if match is None:
        return ""
    sign, sign_behind_dollar, whole, fraction = match.groups(default="")
    if not (whole or fraction) or (sign and sign_behind_dollar):
        return ""
    whole = whole.replace(",", "").lstrip("0") or "0"
    fraction = fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    if value == "0":
        return "0"
    return sign + sign_behind_dollar + value


# --- \boxed{…} and `Answer: …` ---

BOX = r"(?:boxed|fbox|framebox)"
# a box that opens; a box around one word, as in $\boxed 5$; \{ \} and line breaks, to step over
# them; a brace
BOX_OR_BRACE = re.compile(
    rf"\\{BOX}(?:\s*+(?P<open>\{{)|\s(?P<word>[^\s$]{{1,40}}+)\$)|\\[{{}}]|\\\\(?!{BOX})|[{{}}]"
)
ANSWER_LINE = re.compile(r"answer\s*:\s*(?=\S)", re.IGNORECASE | re.ASCII)
INLINE_MATH = re.compile(r"\$+([^$]+)\$")


def score_boxed(solution_str: str, ground_truth: str) -> dict:
    r"""{"score": 0 | 1, "pred": normalised answer or ""} of one response to a MATH-style problem.

    The answer is the content of the last complete \boxed{…} anywhere in the response. "pred" of a
    right one is the normalised ground truth, so that votes agree.
    """
    truth = normalized_truth(ground_truth)
    answer = last_boxed(solution_str) or ""
    is_right = is_equal(answer, str(ground_truth))
    return {"score": float(is_right), "pred": truth if is_right else normalize(answer)}


def score_dapo(solution_str: str, ground_truth: str) -> dict:
    r"""{"score": -1 | 1, "acc": whether it is right, "pred": answer or ""} of one response, as DAPO
    trains on AIME.

    What is read is the text behind the last `Answer:` in the last 300 characters, to the end of its
    line; the next line if nothing is left on that one. The answer is the last box in it; without a
    box, the $...$ around its last `=`, or the first one behind that; without either, all that is
    behind it. If there is no `=`, the whole text counts as behind it. Of an answer that has a `=`
    itself, only what follows its last one counts. It is right by its spelling or as a number;
    formulas are not computed.
    """
    truth = normalized_truth(ground_truth)
    tail = solution_str[-TAIL:]
    line = ""
    for match in ANSWER_LINE.finditer(tail):
        line = tail[match.end() :].partition("\n")[0]
    left, _, right = line.rpartition("=")
    inline = INLINE_MATH.search(right)
    if left.count("$") % 2:  # the last "=" is inside of $...$
        inline = INLINE_MATH.search(line, left.rfind("$"))
    answer = last_boxed(line)
    if not answer:
        answer = inline[1] if inline else right
    answer = answer.rpartition("=")[2].strip("* ")
    is_right = is_equal(answer, str(ground_truth), with_formulas=False)
    pred = truth if is_right else normalize(answer)
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": pred}


def last_boxed(text: str) -> str | None:
    r"""Content of the complete \boxed{…}, \fbox{…} or \framebox{…} that begins last; None if there
    is none."""
    answer = None
    answer_start = -1
    open_braces = []  # where the content of each begins if it belongs to a box, else -1
    for match in BOX_OR_BRACE.finditer(text):
        if match["open"]:
            open_braces.append(match.end())
        elif match["word"]:
            answer = match["word"]
            answer_start = match.end()
        elif match[0] == "{":
            open_braces.append(-1)
        elif match[0] == "}" and open_braces:
            start = open_braces.pop()
            if start > answer_start:
                answer = text[start : match.start()]
                answer_start = start
    return answer


def truth_text(ground_truth: object) -> str:
    """A truth as a text. ValueError unless it is a text or a finite number: no answer is a list, or
    NaN."""
    is_answer = isinstance(ground_truth, str | Real)
    if not is_answer or ground_truth != ground_truth or ground_truth in (inf, -inf):
        raise ValueError(
            f"the ground truth {ground_truth!r:.80} is neither a text nor a finite number"
        )
    return str(ground_truth)


def normalized_truth(ground_truth: object) -> str:
    truth = normalize(truth_text(ground_truth))
    if not truth:
        raise ValueError(
            f"the ground truth {ground_truth!r:.80} is no answer of 1 to {MAX_CHARACTERS} "
            "characters"
        )
    return truth

r"""Options of multiple choice: \textbf{(C)} 12, Option C and C. 12 are option C; (A)(C) are two."""

import re

from common.rewards.answers.typesetting import TEXT_COMMAND

NAMED_OPTION = re.compile(r"(?:[Oo]ption|[Cc]hoice)\s+\(?([A-Ka-k])\)?")  # Option B, choice (b)
OPTION = re.compile(
    r"\(([A-Ka-k])\)[.:]?|(?:\(([A-K])\)[.:]?|([A-K])(?:\)|[.:](?=\s)))(.+)", re.DOTALL
)
# (C)12, (C) x; but not (C)x, (C)'
OPTION_TEXT = re.compile(r"\s*(?:[0-9$(\[{.\\]|-[0-9.\\])|\s+[A-Za-z|]")
OPERATOR = re.compile(
    r"\s*\\(?:cup|cap|cdot|times|div|le|ge|ne|in|to|approx|subset|subseteq|setminus)(?![a-zA-Z])"
)
OPTION_MARK = re.compile(r"\(([A-K])\)|(?<![A-Za-z])([A-K])[.:)](?=\s)")
SEVERAL = re.compile(r"(?:(?:[A-K]|\([A-K]\))[\s,;.&]*){2,}")  # (A)(C); but not (A, C)
LETTER = re.compile("[A-K]")


def option(text: str) -> tuple[str, str]:
    """("C", "12") of (C) 12 or C. 12, ("C", "") of (C), (c) or Option c; ("", "") of what is no
    option."""
    plain = without_braces(text)
    match = NAMED_OPTION.fullmatch(plain)
    if match:
        return match[1].upper(), ""
    match = OPTION.fullmatch(plain)
    if not match:
        return "", ""
    if match[1]:
        return match[1].upper(), ""
    letter = match[2] or match[3]
    content = match[4]
    letters_in_content = [mark[1] or mark[2] for mark in OPTION_MARK.finditer(content)]
    has_later_options = any(other > letter for other in letters_in_content)
    if has_later_options or not OPTION_TEXT.match(content) or OPERATOR.match(content):
        return "", ""
    return letter, content.strip()


def is_option(text: str) -> bool:
    return option(text) != ("", "")


def without_braces(text: str) -> str:
    return re.sub(r"[{}]", "", TEXT_COMMAND.sub(r"\1", text)).strip()


def same_options(answer: str, truth: str) -> bool:
    """Whether both name the same several options: A, C is AC and (A)(C)."""
    plain = without_braces(answer)
    true_plain = without_braces(truth)
    if not SEVERAL.fullmatch(plain) or not SEVERAL.fullmatch(true_plain):
        return False
    if plain.isalpha() and true_plain.isalpha():  # AC may be a vector, which is not CA
        return plain == true_plain
    return sorted(LETTER.findall(plain)) == sorted(LETTER.findall(true_plain))

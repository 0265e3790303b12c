r"""Brackets of LaTeX: what they enclose, and what stands outside of all of them."""

import re

OPENING = {"\\{", "\\langle", "(", "[", "{", "\\begin"}
BRACKET = re.compile(r"\\[{}]|\\[lr]angle(?![a-zA-Z])|[()\[\]{}]|\\(?:begin|end)(?![a-zA-Z])")


def split_brackets(text: str) -> tuple[str, str, str]:
    """("(", "1, 2", "]") of (1, 2]; ("", "", "") of a text that is not in one pair of brackets."""
    brackets = list(BRACKET.finditer(text))
    if len(brackets) < 2 or brackets[0].start() != 0 or brackets[-1].end() != len(text):
        return "", "", ""
    first = brackets[0]
    last = brackets[-1]
    if first[0] not in OPENING or first[0] == "\\begin" or last[0] in OPENING:
        return "", "", ""
    depth = 0
    for bracket in brackets[:-1]:
        depth += 1 if bracket[0] in OPENING else -1
        if depth == 0:  # (1 + 2)(3 + 4)
            return "", "", ""
    return first[0], text[first.end() : last.start()].strip(), last[0]


def split_outside(text: str, pattern: re.Pattern, at_most: int | None = None) -> list[str]:
    """The parts between the matches outside of all brackets, or between the first `at_most`."""
    parts: list[str] = []
    start = 0
    for match in outside(text, pattern)[:at_most]:
        parts.append(text[start : match.start()].strip())
        start = match.end()
    return [*parts, text[start:].strip()]


def outside(text: str, pattern: re.Pattern) -> list[re.Match]:
    """Matches of a pattern that stand outside of all brackets."""
    brackets = list(BRACKET.finditer(text))
    matches = []
    depth = 0
    next_bracket = 0
    for match in pattern.finditer(text):
        while next_bracket < len(brackets):
            bracket = brackets[next_bracket]
            if bracket.start() >= match.start():
                break
            depth += 1 if bracket[0] in OPENING else -1
            next_bracket += 1
        if depth == 0:
            matches.append(match)
    return matches

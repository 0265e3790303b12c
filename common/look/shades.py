"""The tokens of a turn in shades of their divergence from the teacher, without a cut inside of a
character."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import groupby

SHADES = (0.03, 0.1, 0.3, 1.0, 3.0)  # nats: where each of them begins
# a character has at most four tokens; twice as many that are still broken are no text
MAX_CHARACTER_TOKENS = 8
BROKEN = "\N{REPLACEMENT CHARACTER}"  # what decoding makes of a part of a character


@dataclass
class Span:
    """Successive tokens of one shade."""

    text: str
    shade: int = 0  # number of SHADES that are reached, negative if the divergences are
    title: str = ""  # the divergences in words

    @property
    def is_newline(self) -> bool:
        """Whether there is nothing to see of it but the end of a line."""
        return self.text.isspace() and "\n" in self.text


def shaded_spans(ids: list[int], divergences: list[float], tokenizer, max_text: int) -> list[Span]:
    """The text of `ids` in spans of about equal divergence, at most `max_text` characters of it.

    divergences: one for each of `ids`, in nats. Tokens that share a character take the largest in
    magnitude. A text that does not come out whole is one span without a shade.
    """
    parts = []
    for start, end in whole_characters(ids, tokenizer):
        divergence = max(divergences[start:end], key=abs)
        parts.append((end, divergence))
    spans = []
    start = 0
    context: list[int] = []  # the first of the tokens to decode may lose its space
    for shade, group in groupby(parts, key=lambda part: shade_of(part[1])):
        ends, values = zip(*group)
        tokens = ids[start : ends[-1]]
        text = tokenizer.decode(context + tokens)[len(tokenizer.decode(context)) :]
        spans.append(Span(text, shade, range_in_words(values)))
        start = ends[-1]
        context = tokens
    text = tokenizer.decode(ids)
    if "".join(span.text for span in spans) != text:
        spans = [Span(text)]
    return shorten_spans(spans, max_text)


def whole_characters(ids: list[int], tokenizer) -> list[tuple[int, int]]:
    """(start, end) of each token, or of several that share a character, as tokens of single bytes
    do."""
    is_part: dict[int, bool] = {}
    for token in set(ids):
        is_part[token] = BROKEN in tokenizer.decode([token])
    ranges = []
    start = 0
    for i, token in enumerate(ids):
        end = i + 1
        goes_on = is_part[token] and end < len(ids) and is_part[ids[end]]
        if goes_on and not is_whole(ids[start:end], tokenizer):
            continue
        ranges.append((start, end))
        start = end
    return ranges


def is_whole(ids: list[int], tokenizer) -> bool:
    """Whether tokens make whole characters. A long run is no text: False, without decoding it."""
    return len(ids) <= MAX_CHARACTER_TOKENS and BROKEN not in tokenizer.decode(ids)


def shade_of(divergence: float) -> int:
    shade = bisect_right(SHADES, abs(divergence))
    return shade if divergence > 0 else -shade


def range_in_words(values: tuple[float, ...]) -> str:
    lowest = f"{min(values):.2g}"
    highest = f"{max(values):.2g}"
    return f"{lowest} nats" if lowest == highest else f"{lowest} to {highest} nats"


def shorten_spans(spans: list[Span], max_text: int) -> list[Span]:
    """The spans with the middle of their text cut out, as `shorten` does it."""
    half = max_text // 2
    num_cut = sum(len(span.text) for span in spans) - 2 * half
    if num_cut <= 0:
        return spans
    shown = []
    start = 0
    for span in spans:
        end = start + len(span.text)
        if start < half:
            shown.append(replace(span, text=span.text[: half - start]))
        if start <= half < end:
            shown.append(Span(f" …[{num_cut} characters]… "))
        if end > half + num_cut:
            shown.append(replace(span, text=span.text[max(0, half + num_cut - start) :]))
        start = end
    return shown


def mean_divergence(divergences: list[float] | None, loss_mask: list[int]) -> float | None:
    """Over the sampled tokens; other tokens have 0. None without divergences or sampled tokens."""
    num_sampled = sum(loss_mask)
    if not divergences or num_sampled == 0:
        return None
    return sum(divergences) / num_sampled

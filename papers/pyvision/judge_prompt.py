"""What a judge is asked, and what its reply says: is an answer the same as the reference, or
another one?

As in PyVision-RL a judge sees examples of the row's family. Instruction and examples are our own.
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """What a judge is to decide."""

    family: str  # of EXAMPLES
    question: str
    truth: str
    answer: str


TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
INSTRUCTION: str = TEXTS["instruction"]
# family -> [question, reference, model's answer, judgement]
EXAMPLES: dict[str, list[list]] = TEXTS["examples"]

# what any judge must get right
PROBES = {
    Case("visual_search", "What colour is the car?", "The car is red.", "red"): 1.0,
    Case("visual_search", "What colour is the car?", "The car is red.", "blue"): 0.0,
}


def messages(case: Case) -> list[dict[str, str]]:
    """A chat that ends in the case."""
    shown = [described(*texts) + f" {judgement}" for *texts, judgement in EXAMPLES[case.family]]
    asked = described(plain(case.question), one_line(case.truth), one_line(case.answer))
    content = "\n\n".join([INSTRUCTION, "Examples:", *shown, "Now the case that you judge:", asked])
    return [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": content},
    ]


def described(question: str, truth: str, answer: str) -> str:
    return (
        f"[Question] {question}\n[Reference answer] {truth}\n[Model's answer] {answer}\nJudgement:"
    )


def plain(text: str) -> str:
    """Without control tokens and headings as ours, in any letter case, and without what UTF-8
    cannot say."""
    return (
        re.sub(r"<(?=[|\uff5c/\w])|\[(?=/?[^\W\d_])", r"\g<0> ", text)
        .encode(errors="replace")
        .decode()
    )


def one_line(text: str) -> str:
    """So that an answer cannot pass for the rest of the chat, nor a judge that quotes it for one
    that judges so."""
    return re.sub(r"(?i)(judge?)(ment)", r"\1-\2", plain(" ".join(text.split())))


VALUE = r"[\s*_\"'`(\[{$]*(?:\\boxed\{)?([01])(?:\.0+)?[*_\"'`)\]}$]*"
JUDGEMENT = re.compile(
    rf"[\s*_#]*judge?ment[\s*_]*[:=]{VALUE}(?:\s*|\.[*_]*(?:\s.*)?)", re.IGNORECASE
)
ALONE = re.compile(rf"{VALUE}\.?[*_]*\s*")


def verdict_of(reply: str) -> float | None:
    """1.0 or 0.0 by the line "Judgement: x", or x alone in the first line; None without one, or if
    two disagree.

    Text before it on its line makes it a quotation or a thought; what follows a full stop is a
    reason.
    """
    text = reply.rpartition("</think>")[2]
    if "<think>" in text:  # it was cut off
        return None
    lines = text.strip().split("\n")
    # the first line may go on with what the judge was asked, which ends in "Judgement:"
    found = [ALONE.fullmatch(lines[0]), *map(JUDGEMENT.fullmatch, lines)]
    verdicts = {float(match[1]) for match in found if match}
    return verdicts.pop() if len(verdicts) == 1 else None

"""What a judge is asked, and what its reply says: is an answer the same as the reference, or another one?

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
EXAMPLES: dict[str, list[list]] = TEXTS["examples"]  # family -> [question, reference, model's answer, judgement]

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
    return [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": content}]


def described(question: str, truth: str, answer: str) -> str:
    return f"[Question] {question}\n[Reference answer] {truth}\n[Model's answer] {answer}\nJudgement:"


def plain(text: str) -> str:
    """Without control tokens, which a server would read as such, and without what UTF-8 cannot say."""
    return re.sub(r"<(?=[|\uff5c/\w])|\[(?=/?[A-Z])", r"\g<0> ", text).encode(errors="replace").decode()


def one_line(text: str) -> str:
    """So that an answer cannot pass for the rest of the chat, nor a judge that quotes it for one that judges so."""
    return re.sub(r"(?i)(judge?)(ment)", r"\1-\2", plain(" ".join(text.split())))


MARKS = r"[\s*_\"'`(\[{$]*(?:\\boxed\{)?([01])(?:\.0+(?![0-9]))?"
JUDGEMENT = re.compile(rf"judge?ment[\s*_]*(?:[:=]{MARKS}|([01]))(?![0-9/%]|[.,][0-9]|\s*or\b)", re.IGNORECASE)
ALONE = re.compile(rf"{MARKS}[*_\"'`)\]}}$.]*(?:\s*\n(?s:.*)|\s*)")  # a reason may follow


def verdict_of(reply: str) -> float | None:
    """1.0 or 0.0 by a reply that begins with x alone, or the last "Judgement: x"; None if it says neither."""
    text = reply.rpartition("</think>")[2]
    if "<think>" in text:  # it was cut off
        return None
    if alone := ALONE.fullmatch(text):  # it goes on with what it was asked, which ends in "Judgement:"
        return float(alone[1])
    found = JUDGEMENT.findall(text)
    return float("".join(found[-1])) if found else None

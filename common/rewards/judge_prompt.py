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
    return text.replace("<|", "< |").encode(errors="replace").decode()


def one_line(text: str) -> str:
    """So that an answer cannot pass for the rest of the chat."""
    return plain(" ".join(text.split()))


MARKS = r"[\s*_\"'`(\[{$]*(?:\\boxed\{)?([01])(?:\.0+(?![0-9]))?"
JUDGEMENT = re.compile(rf"judge?ment[\s*_]*(?:[:=]{MARKS}|([01]))(?![0-9/%]|[.,][0-9]|\s*or\b)", re.IGNORECASE)
ALONE = re.compile(rf"{MARKS}[*_\"'`)\]}}$.]*(?:\s*\n(?s:.*)|\s*)")  # a reason may follow


def verdict_of(reply: str) -> float | None:
    """1.0 or 0.0 by the last "Judgement: x", or by a reply that is only x; None if it says neither."""
    text = reply.rpartition("</think>")[2]
    if "<think>" in text:  # it was cut off
        return None
    found = JUDGEMENT.findall(text)
    if found:
        return float("".join(found[-1]))
    alone = ALONE.fullmatch(text)
    return float(alone[1]) if alone else None

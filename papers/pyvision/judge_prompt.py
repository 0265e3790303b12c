"""The question to a judge, and the verdict in its reply: is an answer the same as the reference?

As in PyVision-RL the judge sees examples of the row's family. Instruction and examples are our own.
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """What a judge decides."""

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
    examples = []
    for question, truth, answer, judgement in EXAMPLES[case.family]:
        examples.append(f"{described(question, truth, answer)} {judgement}")
    case_text = described(plain(case.question), one_line(case.truth), one_line(case.answer))
    parts = [INSTRUCTION, "Examples:", *examples, "Now the case that you judge:", case_text]
    return [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "\n\n".join(parts)},
    ]


def described(question: str, truth: str, answer: str) -> str:
    return (
        f"[Question] {question}\n[Reference answer] {truth}\n[Model's answer] {answer}\nJudgement:"
    )


def plain(text: str) -> str:
    """Without control tokens, headings like ours in any letter case, and characters that UTF-8
    lacks."""
    text = re.sub(r"<(?=[|\uff5c/\w])|\[(?=/?[^\W\d_])", r"\g<0> ", text)
    return text.encode(errors="replace").decode()


def one_line(text: str) -> str:
    """In one line, and without the word "judgement": so an answer cannot pass for the rest of the
    chat, nor a quotation of it for a verdict."""
    text = plain(" ".join(text.split()))
    return re.sub(r"(?i)(judge?)(ment)", r"\1-\2", text)


VALUE = r"[\s*_\"'`(\[{$]*(?:\\boxed\{)?([01])(?:\.0+)?[*_\"'`)\]}$]*"
JUDGEMENT = re.compile(
    rf"[\s*_#]*judge?ment[\s*_]*[:=]{VALUE}(?:\s*|\.[*_]*(?:\s.*)?)", re.IGNORECASE
)
ALONE = re.compile(rf"{VALUE}\.?[*_]*\s*")


def verdict_of(reply: str) -> float | None:
    """1.0 or 0.0 by the line "Judgement: x", or x alone in the first line; None without one, or if
    two disagree.

    With text before it on its line it is a quotation or a thought; text behind a full stop is a
    reason.
    """
    text = reply.rpartition("</think>")[2]
    if "<think>" in text:  # it was cut off
        return None
    lines = text.strip().split("\n")
    # the first line may continue the question, which ends in "Judgement:"
    matches = [ALONE.fullmatch(lines[0])]
    matches += [JUDGEMENT.fullmatch(line) for line in lines]
    verdicts = {float(match[1]) for match in matches if match}
    return verdicts.pop() if len(verdicts) == 1 else None

r"""Scores of TIR-Bench (arXiv 2511.01833): 13 tasks, each answer against its truth by the rule of
its task.

The answer is the last \boxed{} in the last <answer> … </answer>, or all text there if it has no
box; the released scripts have a language model find it in the response. They also give the option A
to an answer that resembles none, read "12 of 15" as 1215, and find an OCR text anywhere in the
response, reasoning included; this file does none of these.
"""

import re
from collections.abc import Mapping

from common.rewards.answers import is_equal
from common.rewards.answers.spelling import rational
from common.rewards.math import last_boxed, truth_text
from common.rewards.visual_qa import (
    edit_distance,
    option,
    plain,
    readable,
    symbols_differ,
    trimmed,
)

MAX_CHARACTERS = 1000  # of an answer; longer ones are wrong
# options of a question, one a line
LINES = re.compile(r"^[^\S\n]*\(?([A-K])(?:[.:)]\s*|\s+)(.*\S)", re.MULTILINE)
INLINE = re.compile(r"\(([A-K])\)\s*((?:(?!\([A-K]\)).)*\S)\s*(?=\([A-K]\)|$)")
# asterisks of emphasis, not the sign of 3*4 and 3 * 4
BOLD = re.compile(r"(?<![0-9A-Za-z)\]}])(?<![0-9)\]}] )\*+|\*+(?![0-9A-Za-z(\\{])(?! [0-9(\\{])")
INTEGER = re.compile(r"[0-9]+")
NUMBER = re.compile(r"[-+]?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
MATHEMATICS = re.compile(r"[\\/^*:=+!<>]|[ap]\.?m\b")
OTHER_NUMBER = re.compile(  # of "not 3" and "3 million"
    r"\b(?:not|minus|negative|hundred|thousand|million|billion|trillion|dozen|half|squared|cubed|mod)\b"
)
AROUND_LETTERS = re.compile(r"\b(?:and|options?)\b|[\s,;.&()\[\]{}]", re.IGNORECASE)
TEXT = re.compile(r"\\(?:text|math|mbox)[a-z]*\s*\{([^{}]*)\}")
NEAR = 0.5  # similarity from which on an answer means the option that it resembles most


def tir_bench_reward(
    data_source: str, solution_str: str, ground_truth, extra_info: Mapping | None = None
) -> dict:
    """`score_tir_bench` with verl's signature, for the data_source tir_bench/TASK."""
    question = str((extra_info or {}).get("question") or "")
    return score_tir_bench(data_source.rpartition("/")[2], solution_str, ground_truth, question)


def score_tir_bench(task: str, solution: str, ground_truth: object, question: str = "") -> dict:
    """{"score": 0 to 1, "acc": the same, "pred": answer or ""} of one response; the options stand
    in the question.

    Partial scores are those of jigsaw, pieces in their places, and spot_difference, intersection
    over union.
    """
    truth = truth_text(ground_truth).strip()
    if not truth:
        raise ValueError("the truth of a TIR-Bench row is empty")
    answer = answer_in(solution)
    score = score_answer(task, answer, truth, question) if answer else 0.0
    return {"score": score, "acc": score, "pred": answer}


def answer_in(solution: str) -> str:
    before, closed, _ = solution.rpartition("</answer>")
    _, opened, inside = before.rpartition("<answer>")
    text = inside if closed and opened else solution
    answer = last_boxed(text)
    if answer is None:
        answer = text if opened else ""
    answer = BOLD.sub("", answer).strip()
    if len(answer) > MAX_CHARACTERS:
        return ""
    return answer


def score_answer(task: str, answer: str, truth: str, question: str) -> float:
    is_list = rational(truth) is None and bool(INTEGER.search(truth))
    if task == "ocr":
        while TEXT.search(answer):
            answer = TEXT.sub(r"\1", answer)
        return float(trimmed(answer).split() == trimmed(truth).split())
    if is_list and task in ("jigsaw", "spot_difference", "word_search"):
        numbers = [int(digits) for digits in INTEGER.findall(answer)]
        true_numbers = [int(digits) for digits in INTEGER.findall(truth)]
        return score_numbers(task, numbers, true_numbers)
    if re.fullmatch("[A-K]", truth):
        return float(letter_of(answer, question) == truth)
    if re.fullmatch("[A-K]+", truth):  # several options
        letters = AROUND_LETTERS.sub("", readable(answer)).upper()
        return float(sorted(letters) == sorted(truth))
    if NUMBER.fullmatch(truth):
        return float(is_number(answer, truth))
    return float(plain(answer) == plain(truth) and not symbols_differ(answer, truth))


def score_numbers(task: str, numbers: list[int], true_numbers: list[int]) -> float:
    if task == "spot_difference":
        both = set(numbers) & set(true_numbers)
        either = set(numbers) | set(true_numbers)
        return len(both) / len(either)
    if task == "word_search":  # row and column
        return float(numbers == true_numbers)
    if len(numbers) != len(true_numbers):
        return 0.0
    num_in_place = sum(a == b for a, b in zip(numbers, true_numbers))
    return num_in_place / len(true_numbers)


def letter_of(answer: str, question: str) -> str:
    """The option that an answer names, or that it resembles most; "" if that is none, or
    several."""
    letter, _ = option(plain(answer))
    if letter:
        return letter.upper()
    similarities = {}
    for letter, text in options_of(question).items():
        similarities[letter] = max(
            similarity(plain(answer), plain(text)),
            similarity(plain(answer), plain(f"{letter} {text}")),
        )
    highest = max(similarities.values(), default=0.0)
    if highest < NEAR:
        return ""
    best = [letter for letter, value in similarities.items() if value == highest]
    return best[0] if len(best) == 1 else ""


def options_of(question: str) -> dict[str, str]:
    """{letter: text}; {} of a question without options."""
    for pattern in (LINES, INLINE):
        options = dict(pattern.findall(question))
        if len(options) > 1:
            return options
    return {}


def similarity(a: str, b: str) -> float:
    return 1 - edit_distance(a, b) / max(len(a), len(b), 1)


def is_number(answer: str, truth: str) -> bool:
    """Whether the one number in an answer has the value of the truth. An answer with several
    numbers, or with signs or words of mathematics around it, has to be equal as a whole."""
    text = plain(answer)  # four is 4
    numbers = list(NUMBER.finditer(text))
    if len(numbers) == 1:
        (number,) = numbers
        before = text[: number.start()]
        after = text[number.end() :]
        around = f"{before} {after}"
        is_formula = (
            MATHEMATICS.search(around) or re.match("[a-z]", after) or re.search("[0-9]!", answer)
        )
        is_lone = not is_formula and not OTHER_NUMBER.search(around)
        value = rational(number[0])
        if is_lone and value is not None and value == rational(truth):
            return True
    return is_equal(answer, truth)

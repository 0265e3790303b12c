r"""Rewards of PyVision-RL (arXiv 2602.20739): the boxed answer by rules, and what no rule decides
by a judge.

The answer is the \boxed{…} in the last `<answer>…</answer>` of the last turn, on one line or
several. Tags that do not pair up, no box or several, and 1,000 characters and more are wrong, and
"acc" says so, too: they earn no bonus. Rules come first, in the order same option or same words,
equal formulas, two different whole numbers, and for numbers of VSI-Bench the mean relative
accuracy; so a judge is asked for few rows:

    JUDGE_URLS=http://HOST:18901/v1 python grpo.py --reward-function
    papers/pyvision/rewards.py:score ...
"""

import re
import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from fractions import Fraction
from pathlib import Path

from common.rewards.answers import MAX_CHARACTERS, normalize
from common.rewards.math import last_boxed, truth_text
from common.rewards.visual_qa import option, plain, quantity, same, same_formula, says_same, unboxed
from papers.pyvision.judge import Judge, open_judge
from papers.pyvision.judge_prompt import Case
from papers.pyvision.tir_bench import tir_bench_reward

LONGEST_ANSWER = 1000  # characters; this many are too many

FAMILIES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
FAMILY = {pattern: family for family, patterns in FAMILIES.items() for pattern in patterns}
MEASURED = ("vsi_numerical", "*_rule_verifiable")


async def score(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Mapping | None = None
) -> dict:
    """The reward of a row of PyVision-RL's data or benchmarks. ValueError for another row."""
    if data_source.startswith("tir_bench/"):
        return tir_bench_reward(data_source, solution_str, ground_truth, extra_info)
    if any(fnmatchcase(data_source, pattern) for pattern in MEASURED):
        return score_measured(solution_str, ground_truth, extra_info)
    family = family_of(data_source)
    judge = open_judge()
    await judge.probe()  # also if rules decide: a run without a judge is to end at its first row
    return await score_judged(family, judge, solution_str, ground_truth, extra_info)


score.timeout_s = 600  # a little more than the PATIENCE_S of a judge that is away


def family_of(data_source: str) -> str:
    """Whose examples a judge is shown."""
    for pattern, family in FAMILY.items():
        if fnmatchcase(data_source, pattern):
            return family
    raise ValueError(
        f"no reward of PyVision-RL for data_source {data_source!r}; known are {', '.join(FAMILY)}"
    )


async def score_judged(
    family: str,
    judge: Judge,
    solution_str: str,
    ground_truth: object,
    extra_info: Mapping | None = None,
) -> dict:
    """{"score": 0 | 1, "acc": the same, "pred": answer or truth, "judged": whether the judge was
    asked}.

    ground_truth: a text, or {"answer": "B", "options": [texts]}. The question is
    extra_info["question"].
    """
    extra = extra_info or {}
    truth, options = reference(ground_truth)
    answer = final_answer(extra.get("last_turn", solution_str))
    verdict = by_rules(answer, truth, options) if answer else 0.0
    is_open = verdict is None
    if is_open:
        question = extra.get("question")
        if not isinstance(question, str) or not question.strip():
            raise ValueError(
                f"the judge needs a text in extra_info['question'], which is {question!r:.80}"
            )
        verdict = await judge.verdict(Case(family, question, truth, answer))
    pred = truth if verdict else answer  # so that votes agree
    return {"score": verdict, "acc": verdict, "pred": pred, "judged": float(is_open)}


def score_measured(
    solution_str: str, ground_truth: object, extra_info: Mapping | None = None
) -> dict:
    """{"score": mean relative accuracy, "acc": whether it is at least a half, "pred"}. No judge is
    asked."""
    truth, options = reference(ground_truth)
    answer = final_answer((extra_info or {}).get("last_turn", solution_str))
    value, true_value = number(answer), number(truth)
    if answer and by_rules(answer, truth, options) == 1.0:
        score = 1.0
    elif value is None or true_value is None:
        score = 0.0
    else:
        score = relative_accuracy(value, true_value)
    return {"score": score, "acc": float(score >= 0.5), "pred": truth if score == 1.0 else answer}


def final_answer(text: str) -> str:
    """The content of the box; "" if there is none that counts."""
    if text.count("<answer>") != text.count("</answer>"):
        return ""
    content = text.rpartition("</answer>")[0].rpartition("<answer>")[2]
    if "</answer>" in content or "<interpreter>" in content or content.count(r"\boxed") != 1:
        return ""
    answer = (last_boxed(content) or "").strip()
    return answer if len(answer) < LONGEST_ANSWER else ""


def reference(ground_truth: object) -> tuple[str, list[str]]:
    """(truth, options): "B. a red door" and all of such texts if the row has options. ValueError if
    it is empty."""
    answer, texts = ground_truth, ()
    if isinstance(ground_truth, Mapping):
        answer, texts = ground_truth.get("answer"), ground_truth.get("options")
    options = [
        f"{chr(ord('A') + i)}. {text}" for i, text in enumerate(texts if texts is not None else ())
    ]
    by_letter, by_text = {text[0]: text for text in options}, {text[3:]: text for text in options}
    truth = "" if answer is None else truth_text(answer).strip()
    truth = unboxed(by_letter.get(truth.upper()) or by_text.get(truth) or truth)
    if not truth or truth == "None":
        raise ValueError(f"the ground truth {ground_truth!r:.80} is empty")
    return truth, options


def by_rules(answer: str, truth: str, options: list[str]) -> float | None:
    """1.0 or 0.0 where rules can tell; None where a judge should."""
    if max(len(answer), len(truth)) > MAX_CHARACTERS:
        return None
    said, true = plain(answer), plain(truth)
    if says_same(answer, truth) or same_formula(answer, truth):
        return 1.0
    if any(same(said, plain(other)) for other in options):
        return 0.0
    letter, true_letter = option(said)[0], option(true)[0]
    if letter and true_letter and letter != true_letter:
        return 0.0
    return 0.0 if different_integers(said, true) else None


def different_integers(said: str, true: str) -> bool:
    """Whether both are whole numbers without a unit. Rounding, and 5 m and 500 cm, are for the
    judge."""
    numbers = [quantity(said), quantity(true)]
    return (
        all(number and not number[1] and number[0].denominator == 1 for number in numbers)
        and len({*numbers}) == 2
    )


LONE_NUMBER = re.compile(r"(?<![\w^{.])-?[0-9][0-9,]*(?:\.[0-9]+)?")  # not the 2 of m2, m^2, m^{2}
RATIONAL = re.compile(r"(-?)(?:\\frac\{([0-9]+)\}\{([0-9]+)\}|([0-9]+))")


def number(text: str) -> Fraction | None:
    """3/2 of "1.5 metres", of "\\frac{3}{2}" and of "about 1.5 m", 1000 of "1e3"; None of "2 or
    3"."""
    if found := quantity(plain(text)):
        return found[0]
    if (match := RATIONAL.fullmatch(normalize(text))) and int(match[3] or 1):
        return Fraction(f"{match[1]}{match[2] or match[4]}/{match[3] or 1}")
    numbers = LONE_NUMBER.findall(text)
    return Fraction(numbers[0].replace(",", "")) if len(numbers) == 1 else None


def relative_accuracy(value: Fraction, truth: Fraction) -> float:
    """Share of the thresholds 0.5, 0.55, … 0.95 with |value - truth| / |truth| < 1 - threshold;
    exact."""
    if truth == 0:
        return float(value == 0)
    error = abs(value - truth) / abs(truth)
    return sum(error < Fraction(20 - threshold, 20) for threshold in range(10, 20)) / 10

r"""Rewards of PyVision-RL (arXiv 2602.20739): the boxed answer by rules, and by a judge where no
rule decides.

The answer is the \boxed{…} in the last `<answer>…</answer>` of the last turn, on one line or
several. Wrong are tags that do not pair up, no box or several, and 1,000 characters or more; "acc"
says so, too: they earn no bonus. The rules, in order: the same option or the same words; equal
formulas; two different whole numbers; for numbers of VSI-Bench the mean relative accuracy. So the
judge decides few rows:

    JUDGE_URLS=http://HOST:18901/v1 python grpo.py \
        --reward-function papers/pyvision/rewards.py:score ...
"""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from fractions import Fraction

from common.rewards.answers import MAX_CHARACTERS, normalize
from common.rewards.math import last_boxed, truth_text
from common.rewards.visual_qa import (
    option,
    plain,
    quantity,
    readable,
    same_formula,
    same_plain,
    says_same,
    unboxed,
)
from papers.pyvision.judge import Judge, open_judge
from papers.pyvision.judge_prompt import Case
from papers.pyvision.tir_bench import tir_bench_reward

LONGEST_ANSWER = 1000  # characters; this many are too many

# family, of whose examples a judge sees some (judge_prompt.toml) -> patterns of data_source
FAMILIES = {
    "visual_search": [
        "deepeyes",
        "minio3",
        "vstar*",
        "hrbench-*",
        "vl_agent",
        "zebra_cot",
        "vigorl",
        "barc",
        "geoguessr",
    ],
    "chart": ["ecd", "chart"],
    "math": [
        "wemath",
        "wemath-*",
        "v-interaction",
        "mathvision",
        "mathvista",
        "mathverse",
        "logicvista",
        "dynamath",
        "math_8k_verified",
        "thinklite_eureka",
        "xince",
    ],
    "vsi": ["vsi"],
    "longvila": ["longvila"],
}
# scored by relative accuracy
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
    """The family of a row. ValueError if its data_source is in none."""
    all_patterns = []
    for family, patterns in FAMILIES.items():
        if any(fnmatchcase(data_source, pattern) for pattern in patterns):
            return family
        all_patterns += patterns
    raise ValueError(
        f"no reward of PyVision-RL for data_source {data_source!r}; known are "
        f"{', '.join(all_patterns)}"
    )


async def score_judged(
    family: str,
    judge: Judge,
    solution_str: str,
    ground_truth: object,
    extra_info: Mapping | None = None,
) -> dict:
    """{"score": 0 | 1, "acc": the same, "pred": answer or truth, "judged": whether the judge
    decided}.

    ground_truth: a text, or {"answer": "B", "options": [texts]}. The question is
    extra_info["question"].
    """
    extra = extra_info or {}
    truth, options = reference(ground_truth)
    answer = final_answer(extra.get("last_turn", solution_str))
    verdict = by_rules(answer, truth, options) if answer else 0.0
    asks_judge = verdict is None
    if asks_judge:
        question = extra.get("question")
        if not isinstance(question, str) or not question.strip():
            raise ValueError(
                f"the judge needs a text in extra_info['question'], which is {question!r:.80}"
            )
        verdict = await judge.verdict(Case(family, question, truth, answer))
    pred = truth if verdict else answer  # so that votes agree
    return {"score": verdict, "acc": verdict, "pred": pred, "judged": float(asks_judge)}


def score_measured(
    solution_str: str, ground_truth: object, extra_info: Mapping | None = None
) -> dict:
    """{"score": mean relative accuracy, "acc": whether it is at least a half, "pred"}, without a
    judge."""
    truth, options = reference(ground_truth)
    answer = final_answer((extra_info or {}).get("last_turn", solution_str))
    value = number(answer)
    true_value = number(truth)
    if answer and by_rules(answer, truth, options) == 1.0:
        score = 1.0
    elif value is None or true_value is None:
        score = 0.0
    else:
        score = relative_accuracy(value, true_value)
    pred = truth if score == 1.0 else answer
    return {"score": score, "acc": float(score >= 0.5), "pred": pred}


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
    """(truth, options): "B. a red door", and all options in that form if the row has some.

    ground_truth: a text, or {"answer": a letter or an option's text, "options": [texts]}.
    ValueError if it is empty.
    """
    answer = ground_truth
    texts = None
    if isinstance(ground_truth, Mapping):
        answer = ground_truth.get("answer")
        texts = ground_truth.get("options")
    if texts is None:
        texts = []
    options = []
    option_of = {}  # by letter
    option_with = {}  # by text
    for i, text in enumerate(texts):
        letter = chr(ord("A") + i)
        labelled = f"{letter}. {text}"
        options.append(labelled)
        option_of[letter] = labelled
        option_with[str(text)] = labelled
    truth = "" if answer is None else truth_text(answer).strip()
    truth = unboxed(option_of.get(truth.upper()) or option_with.get(truth) or truth)
    if not truth or truth == "None":
        raise ValueError(f"the ground truth {ground_truth!r:.80} is empty")
    return truth, options


def by_rules(answer: str, truth: str, options: list[str]) -> float | None:
    """1.0 or 0.0 where rules can tell; None where a judge should."""
    if max(len(answer), len(truth)) > MAX_CHARACTERS:
        return None
    named = option_named(answer, options)
    if named:
        return float(unboxed(named) == truth)
    plain_answer = plain(answer)
    plain_truth = plain(truth)
    if says_same(answer, truth) or same_formula(answer, truth):
        return 1.0
    # another option, or one that differs in a symbol alone: the right one has been handled
    if any(same_plain(plain_answer, plain(other)) for other in options):
        return 0.0
    letter, _ = option(plain_answer)
    true_letter, _ = option(plain_truth)
    if letter and true_letter and letter != true_letter:
        return 0.0
    if different_integers(plain_answer, plain_truth):
        return 0.0
    return None


def option_named(answer: str, options: list[str]) -> str:
    """The one option whose text this is, letter by letter; "" if none or several, or if it is a
    letter. `says_same` is lenient about order, units and case, by which options may differ."""
    if option(plain(answer))[0]:
        return ""
    named = [text for text in options if text.partition(". ")[2].strip() == answer.strip()]
    if not named:
        named = [text for text in options if option(plain(text))[1] == plain(answer)]
    return named[0] if len(named) == 1 else ""


def different_integers(answer: str, truth: str) -> bool:
    """Whether both are whole numbers without a unit, and differ. Rounding, and 5 m and 500 cm, are
    for the judge."""
    value = whole_number(answer)
    true_value = whole_number(truth)
    return value is not None and true_value is not None and value != true_value


def whole_number(text: str) -> Fraction | None:
    number_and_unit = quantity(text)
    if number_and_unit is None:
        return None
    value, unit = number_and_unit
    if unit or value.denominator != 1:
        return None
    return value


LONE_NUMBER = re.compile(  # not the 2 of m2, m^2, m^{2}; 3,4 is two numbers
    r"(?<![\w^{.])-?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,2})?"
)
RATIONAL = re.compile(r"(-?)(?:\\frac\{([0-9]+)\}\{([0-9]+)\}|([0-9]+))")


def number(text: str) -> Fraction | None:
    """3/2 of "1.5 metres", of "\\frac{3}{2}" and of "about 1.5 m", 1000 of "1e3"; None of "2 or
    3"."""
    number_and_unit = quantity(plain(text))
    if number_and_unit:
        return number_and_unit[0]
    match = RATIONAL.fullmatch(normalize(text))
    if match:
        sign, numerator, denominator, whole = match.groups()
        if denominator is None:
            return Fraction(f"{sign}{whole}")
        if int(denominator):
            return Fraction(f"{sign}{numerator}/{denominator}")
    numbers = LONE_NUMBER.findall(readable(text))
    if len(numbers) != 1:
        return None
    return Fraction(numbers[0].replace(",", ""))


def relative_accuracy(value: Fraction, truth: Fraction) -> float:
    """Mean relative accuracy, exact: the share of the thresholds 0.5, 0.55, … 0.95 for which
    |value - truth| / |truth| < 1 - threshold."""
    if truth == 0:
        return float(value == 0)
    error = abs(value - truth) / abs(truth)
    num_passed = 0
    for twentieths in range(10, 20):
        if error < 1 - Fraction(twentieths, 20):
            num_passed += 1
    return num_passed / 10

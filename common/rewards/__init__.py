"""Reward functions, chosen by a row's `data_source`. All have verl's signature:

fn(data_source, solution_str, ground_truth, extra_info=None) -> number, or a mapping with the key "score"
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from math import isfinite, isnan, nan
from typing import TYPE_CHECKING

from common.rewards import countdown, geometry, math, visual_qa
from common.workers import load_function

if TYPE_CHECKING:
    from common.rewards.workers import RewardWorkers

RewardFunction = Callable[..., float | Mapping]


def countdown_reward(data_source: str, solution_str: str, ground_truth: Mapping, extra_info=None) -> dict:
    return countdown.score(solution_str, ground_truth)


def gsm8k_reward(data_source: str, solution_str: str, ground_truth: str, extra_info=None) -> dict:
    return math.score_gsm8k(solution_str, ground_truth)


def boxed_reward(data_source: str, solution_str: str, ground_truth: str, extra_info=None) -> dict:
    return math.score_boxed(solution_str, ground_truth)


def dapo_reward(data_source: str, solution_str: str, ground_truth: str, extra_info=None) -> dict:
    return math.score_dapo(solution_str, ground_truth)


def geo3k_reward(data_source: str, solution_str: str, ground_truth: str, extra_info=None) -> dict:
    return geometry.score_geo3k(solution_str, ground_truth)


def visual_qa_reward(data_source: str, solution_str: str, ground_truth: list[str], extra_info=None) -> dict:
    return visual_qa.score_visual_qa(solution_str, ground_truth)


# data_source pattern -> function; the first that matches is taken
REWARD_FUNCTIONS: dict[str, RewardFunction] = {
    "visual_qa/*": visual_qa_reward,  # Pixel Reasoner's rows: common.prepare.visual_qa
    "tiny-vl": visual_qa_reward,
    "*countdown*": countdown_reward,
    "*gsm8k": gsm8k_reward,
    "math/*": boxed_reward,  # what common.prepare.math writes
    "*MATH*": boxed_reward,  # lighteval/MATH, DigitalLearningGmbH/MATH-lighteval, HuggingFaceH4/MATH-500
    "numina*": boxed_reward,
    "amc*": boxed_reward,
    "*svamp*": boxed_reward,
    "*mawps*": boxed_reward,
    "math_dapo*": dapo_reward,  # as in verl, like the next two
    "math": dapo_reward,
    "aime*": dapo_reward,
    "hiyouga/geometry3k": geo3k_reward,
    "*geo3k*": geo3k_reward,
}


def reward_function(data_source: str) -> RewardFunction:
    """The built-in function for a data_source; ValueError if there is none."""
    for pattern, function in REWARD_FUNCTIONS.items():
        if fnmatchcase(data_source, pattern):
            return function
    raise ValueError(
        f"no built-in reward function for data_source {data_source!r}; known are {', '.join(REWARD_FUNCTIONS)}. "
        "Give your own with --reward-function FILE.py:NAME"
    )


def load_reward_function(spec: str) -> RewardFunction:
    """The function NAME of the file FILE.py, from "FILE.py:NAME". Errors name the flag --reward-function."""
    return load_function(spec, "--reward-function")


def score_response(
    fn: RewardFunction, data_source: str, solution_str: str, ground_truth, extra_info: Mapping | None = None
) -> dict[str, float | str]:
    """What fn returns, as a dict with a finite float "score"; its other values become floats or strings."""
    result = fn(data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info)
    label = f"reward function {getattr(fn, '__name__', fn)} on data_source {data_source!r}"
    if not isinstance(result, Mapping):
        result = {"score": result}
    if "score" not in result:
        raise ValueError(f'{label} returned a mapping without the key "score": {sorted(map(str, result))}')
    values = {str(key): float_or_str(value) for key, value in result.items()}
    if not isinstance(values["score"], float) or not isfinite(values["score"]):
        raise ValueError(f"{label} returned the score {result['score']!r}, expected a finite number")
    return values


def score_episodes(episodes: list, rows: Mapping, workers: "RewardWorkers", tokenizer) -> None:
    """Fill `rewards` of each episode from its response text; rows: prompt index -> Row.

    If that fails (an exception, a timeout, a dead worker), they are {"score": nan, "error": why}.
    """
    answered, jobs = [], []
    for episode in episodes:
        if episode.finish_reason in ("tool_failed", "unreadable"):
            episode.rewards = {"score": nan, "error": episode.finish_reason}
            continue
        row, text = rows[episode.prompt_index], tokenizer.decode(episode.response_ids, skip_special_tokens=True)
        answered.append(episode)
        jobs.append((row.data_source, text, row.ground_truth, row.extra_info))
    for episode, result in zip(answered, workers.score(jobs), strict=True):
        episode.rewards = {"score": nan} | result
    errors = [str(e.rewards["error"]) for e in episodes if isnan(e.rewards["score"])]
    if errors:
        print(f"rewards: {len(errors)} of {len(episodes)} responses not scored, the first: {errors[0]}", flush=True)


def float_or_str(value) -> float | str:
    """Numbers, booleans and one-element arrays as float; None as ""; everything else as str."""
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return str(value)

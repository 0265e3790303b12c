"""Reward functions, chosen by a row's `data_source`. All have verl's signature:

fn(data_source, solution_str, ground_truth, extra_info=None) -> number, or a mapping with the key "score"
"""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from math import isfinite, isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING

from common.rewards import countdown, math

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


# data_source pattern -> function; the first that matches is taken
REWARD_FUNCTIONS: dict[str, RewardFunction] = {
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
    file, _, name = spec.rpartition(":")
    if not file or not name.isidentifier():
        raise ValueError(f"--reward-function {spec}: expected FILE.py:NAME")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"--reward-function {spec}: there is no file {path}")
    module_name = f"user_rewards_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None:
        raise ValueError(f"--reward-function {spec}: {path.name} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a class's module up by name
    module_spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if function is None:
        raise ValueError(f"--reward-function {spec}: {path} defines no {name}")
    if not callable(function):
        raise ValueError(f"--reward-function {spec}: {name} is a {type(function).__name__}, not a function")
    return function


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
    texts = [tokenizer.decode(episode.response_ids, skip_special_tokens=True) for episode in episodes]
    answered = [(rows[episode.prompt_index], text) for episode, text in zip(episodes, texts, strict=True)]
    jobs = [(row.data_source, text, row.ground_truth, row.extra_info) for row, text in answered]
    for episode, result in zip(episodes, workers.score(jobs), strict=True):
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

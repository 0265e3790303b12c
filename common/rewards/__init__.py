"""Reward functions, chosen by a row's `data_source`. All have verl's signature:

fn(data_source, solution_str, ground_truth, extra_info=None) -> number, or a mapping with the key "score"
"""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from math import isfinite
from pathlib import Path

from common.rewards import countdown, math

RewardFunction = Callable[..., float | Mapping]


def countdown_reward(data_source: str, solution_str: str, ground_truth: Mapping, extra_info=None) -> dict:
    return countdown.score(solution_str, ground_truth)


def gsm8k_reward(data_source: str, solution_str: str, ground_truth: str, extra_info=None) -> dict:
    return math.score_gsm8k(solution_str, ground_truth)


# data_source pattern -> function; the first that matches is taken
REWARD_FUNCTIONS: dict[str, RewardFunction] = {
    "*countdown*": countdown_reward,
    "*gsm8k": gsm8k_reward,
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


def score_episodes(episodes: list, rows: Mapping, function: RewardFunction | None, tokenizer) -> None:
    """Fill `rewards` of each episode from its response text; rows: prompt index -> Row. `function` None: by source."""
    texts = tokenizer.batch_decode([e.response_ids for e in episodes], skip_special_tokens=True)
    for episode, text in zip(episodes, texts):
        row = rows[episode.prompt_index]
        fn = function or reward_function(row.data_source)
        episode.rewards = score_response(fn, row.data_source, text, row.ground_truth, row.extra_info)


def float_or_str(value) -> float | str:
    """Numbers, booleans and one-element arrays as float; None as ""; everything else as str."""
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return str(value)

"""A reward function with TRL's signature, f(completions, **columns) -> list of scores, behind
verl's: it is called with one completion at a time, in the same killable workers."""

import functools
import inspect
from collections.abc import Callable, Mapping

COMPLETIONS = {"completions", "completion_ids"}  # a function with TRL's signature names one of them
TRAINER_ARGUMENTS = {"trainer_state", "environments"}  # only TRL's trainer has them
NOT_APPLICABLE = "not applicable"  # in the error of a response whose score is None


def has_trl_signature(function: Callable) -> bool:
    names = inspect.signature(function).parameters.keys()
    return bool(names & COMPLETIONS) and "solution_str" not in names


def with_verl_signature(function: Callable) -> Callable:
    """The function as one of verl's, for one response; an `async def` stays one.

    The columns that it gets are data_source, ground_truth and the fields of the row's extra_info,
    to which `prompt` and, in training, `completion_ids` are added. Returns a dict of the "score"
    and what the function logs by log_metric and log_extra. ValueError if the function wants an
    argument that is not there, or does not return one score; if that score is None, the error
    contains NOT_APPLICABLE.
    """

    def call(data_source, text, ground_truth, extra_info, logged: dict) -> object:
        columns = {"data_source": data_source, "ground_truth": ground_truth} | (extra_info or {})
        return function(**arguments_of(function, text, columns, logged))

    if inspect.iscoroutinefunction(function):

        async def reward(data_source, solution_str, ground_truth, extra_info=None) -> dict:
            logged: dict[str, object] = {}
            scores = await call(data_source, solution_str, ground_truth, extra_info, logged)
            return logged | {"score": single_score(scores)}
    else:

        def reward(data_source, solution_str, ground_truth, extra_info=None) -> dict:
            logged: dict[str, object] = {}
            scores = call(data_source, solution_str, ground_truth, extra_info, logged)
            return logged | {"score": single_score(scores)}

    return functools.wraps(function)(reward)


def arguments_of(function: Callable, text: str, columns: Mapping, logged: dict) -> dict:
    """The keyword arguments of a call: the columns and the completion, each in a list of one, and
    log_metric and log_extra, which write to `logged`. The completion is a list of messages if the
    prompt is one, else a text. ValueError if the function wants more than that."""

    def log_metric(name: str, value: float) -> None:
        logged[name] = value

    def log_extra(column: str, values: list) -> None:
        (logged[column],) = values

    prompt = columns.get("prompt", "")
    completion = text
    if isinstance(prompt, list):
        completion = [{"role": "assistant", "content": text}]
    arguments = {name: [value] for name, value in columns.items() if name != "prompt"}
    arguments["prompts"] = [prompt]
    arguments["completions"] = [completion]
    arguments["log_metric"] = log_metric
    arguments["log_extra"] = log_extra
    accepted = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind == parameter.VAR_KEYWORD:
            return arguments
        if parameter.kind == parameter.VAR_POSITIONAL:
            continue
        if name in arguments:
            accepted[name] = arguments[name]
        elif name in TRAINER_ARGUMENTS and parameter.default is parameter.empty:
            raise ValueError(f"it wants {name}, which only TRL's trainer has")
        elif parameter.default is parameter.empty:
            raise ValueError(
                f"it wants the column {name}; extra_info of the row has {', '.join(columns)}"
            )
    return accepted


def single_score(scores: object) -> object:
    """The score in a list of one. ValueError for anything else."""
    try:
        (score,) = scores
    except (TypeError, ValueError):
        raise ValueError(
            f"it returned {scores!r:.80}, expected a list with one score: it is called with one "
            "completion at a time"
        ) from None
    if score is None:
        raise ValueError(f"it returned None: {NOT_APPLICABLE}")
    return score

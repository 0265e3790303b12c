"""What --environment FILE.py:NAME names: a class that plays, or a function that answers
(docs/environments.md).

The transcript is the state, and a live object its cache: each job carries the earlier calls and
what they returned. If the object has died with its process, a new one repeats these calls with the
same seeds. If it returns something else, or has `replayable = False`, the sample is lost.
"""

import inspect
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NamedTuple

from common.types import trim
from common.workers.pool import load_function
from common.workers.process import describe

RESET, CLOSE = "reset()", "close()"  # no tool has such a name
MAX_REWARD = 1e6  # of a turn, in magnitude
# parts of an environment that the policy cannot call
RESERVED_NAMES = {"reset", "close", "reward", "get_reward", "done"}
MISSING = object()


class PastCall(NamedTuple):
    method: str
    arguments: dict
    text: str  # what it returned


@dataclass
class Transcript:
    """What an environment has gone through in a trajectory."""

    trajectory: int  # its key
    seed: str  # of the step and the prompt: all samples of a group have it
    columns: dict[str, Any]  # of its row
    opening: str = ""  # what `reset` returned
    calls: list[PastCall] = field(default_factory=list)


@dataclass
class EnvironmentJob:
    """Call a method of an environment, or RESET, or CLOSE."""

    method: str
    arguments: dict
    transcript: Transcript


@dataclass
class FunctionJob:
    """Let the function answer the last of the messages."""

    messages: list[dict]
    ground_truth: Any
    kwargs: dict  # the row's extra_info.interaction_kwargs


def is_class(spec: str) -> bool:
    """Whether NAME of --environment FILE.py:NAME is a class, which plays; else a function."""
    return inspect.isclass(load_function(spec, "--environment"))


def load_environment(spec: str) -> type:
    """The class of --environment FILE.py:NAME. ValueError for one without a method reset."""
    environment = load_function(spec, "--environment")
    if not callable(getattr(environment, "reset", None)):
        raise ValueError(f"--environment {spec}: expected a class with a method reset")
    return environment


def method_schemas(spec: str) -> dict[str, dict]:
    """{method: schema} of the tools of an environment: its public methods with a docstring.
    ValueError if there are none, or if one is no plain method, or has an argument without a type or
    a description."""
    from common.torch_repair import transformers  # not in workers: it takes seconds

    schemas: dict[str, dict] = {}
    for name, method in inspect.getmembers(load_environment(spec), inspect.isfunction):
        if name.startswith("_") or name in RESERVED_NAMES or not method.__doc__:
            continue
        method.__doc__ = docstring(method)  # from which transformers makes the schema
        try:
            if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
                raise ValueError("must be a plain method, not a generator or coroutine")
            schema = transformers.utils.get_json_schema(method)
        except Exception as error:  # transformers has exceptions of its own
            raise ValueError(f"--environment {spec}: {name}: {error}") from error
        schema["function"].pop("return", None)
        schemas[name] = schema
    if not schemas:
        raise ValueError(
            f"--environment {spec}: no public method with a docstring that the policy could call"
        )
    return schemas


def docstring(function: Callable) -> str:
    """The docstring without types: "n: how far" for "n (int): how far". Hints give the types."""
    return re.sub(r"(?m)^(\s*\w+) \([^)\n]*\):", r"\1:", inspect.getdoc(function) or "")


def accepted_kwargs(function: Callable, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the keyword arguments that the function accepts."""
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        if parameter.kind == parameter.VAR_KEYWORD:
            return dict(kwargs)
    return {name: value for name, value in kwargs.items() if name in parameters}


def first_attribute(thing: object, *names: str, default: Any = None) -> Any:
    """The first of these attributes that exists, called if it is a method; else `default`."""
    for name in names:
        # hasattr alone would overlook a property that raises an AttributeError
        is_defined = inspect.getattr_static(thing, name, MISSING) is not MISSING
        if is_defined or hasattr(thing, name):
            value = getattr(thing, name)
            return value() if callable(value) else value
    return default


class LiveEnvironments:
    """The environments of a worker, by the key of their trajectory.

    call_method(name, method, arguments) returns the fields of a reply.
    """

    def __init__(self, spec: str, call_method: Callable[[str, Callable, Mapping], dict]):
        self.environment_class = load_environment(spec)
        self.call_method = call_method
        self.environments: dict[int, Any] = {}
        self.num_calls: dict[int, int] = {}

    def answer(self, job: EnvironmentJob) -> dict:
        """The fields of a reply; `failed` if the sample is lost."""
        transcript = job.transcript
        key = transcript.trajectory
        if job.method == RESET:
            return {"text": self.reset(transcript), "images": [], "info": {}}
        # None if the object has died with its process; another number if it has missed a call
        if self.num_calls.get(key) != len(transcript.calls):
            problem = self.rebuild(transcript)
            if problem:
                self.end(key)
                return {"text": problem, "failed": True}
        if job.method == CLOSE:
            return self.close_with_reward(key)
        return self.step(job.method, job.arguments, transcript)

    def reset(self, transcript: Transcript) -> str:
        """A new environment; returns its opening."""
        key = transcript.trajectory
        self.end(key)
        seed(transcript, 0)
        environment = self.environment_class()
        self.environments[key] = environment
        opening = environment.reset(**accepted_kwargs(environment.reset, transcript.columns))
        if not isinstance(opening, str | None):
            raise TypeError(f"reset returned {opening!r:.80}, expected a text or None")
        self.num_calls[key] = 0
        return trim(opening or "")

    def step(self, name: str, arguments: Mapping, transcript: Transcript) -> dict:
        key = transcript.trajectory
        environment = self.environments[key]
        self.num_calls[key] += 1
        seed(transcript, self.num_calls[key])
        reply = self.call_method(name, getattr(environment, name), arguments)
        done = bool(first_attribute(environment, "done"))
        info = reply.get("info", {}) | {"step": self.num_calls[key], "done": done}
        return reply | {"info": info}

    def rebuild(self, transcript: Transcript) -> str:
        """Repeat the transcript with a new environment. Returns what is wrong, or ""."""
        if not getattr(self.environment_class, "replayable", True):
            return "the environment has died, and is not replayable"
        different = "the environment has died, and a new one answers the same calls differently"
        if self.reset(transcript) != transcript.opening:
            return different
        for call in transcript.calls:
            reply = self.step(call.method, call.arguments, transcript)
            if reply["text"] != call.text:
                return different
        return ""

    def close_with_reward(self, key: int) -> dict:
        """Close an environment. Returns the fields of a reply. Its info has a "reward" only if the
        class has one; the value is None if there is none yet, as before the first turn."""
        environment = self.environments[key]
        try:
            reward = first_attribute(environment, "reward", "get_reward", default=MISSING)
        finally:
            self.end(key)
        if reward is MISSING:
            return {"text": "", "images": [], "info": {}}
        if reward is not None:
            reward = float(reward)
            if not isfinite(reward):
                return {"text": f"the environment's reward is {reward}", "failed": True}
        return {"text": "", "images": [], "info": {"reward": reward}}

    def end(self, key: int) -> None:
        self.num_calls.pop(key, None)
        environment = self.environments.pop(key, None)
        try:
            if hasattr(environment, "close"):
                environment.close()
        except Exception as error:  # the trajectory is over, and its result known
            print(f"warning: close of the environment: {describe(error)}")

    def close(self) -> None:
        for key in list(self.environments):
            self.end(key)


def seed(transcript: Transcript, call_number: int) -> None:
    """Seed random numbers by the transcript's seed and the number of the call alone: all samples of
    a group, and a repetition, draw the same."""
    import numpy as np  # not at the top: tools need no numpy

    random.seed(f"{transcript.seed}/{call_number}")
    np.random.seed(random.getrandbits(32))


def answer_of(function: Callable, job: FunctionJob) -> dict:
    """The function's answer as fields of a reply; info: {"ends": whether it has nothing to say,
    "reward": that of the turn, or None}."""
    kwargs = accepted_kwargs(function, job.kwargs)
    result = function(job.messages, job.ground_truth, **kwargs)
    text = result
    reward = None
    if isinstance(result, tuple) and len(result) == 2:
        text, reward = result
    is_valid = isinstance(text, str | None)
    if is_valid and reward is not None:
        reward = float(reward)
        is_valid = abs(reward) <= MAX_REWARD
    if not is_valid:
        raise TypeError(
            f"it returned {result!r:.80}, expected a text or None, or (that, a number up to "
            f"{MAX_REWARD:g})"
        )
    return {
        "text": trim(text or ""),
        "images": [],
        "info": {"ends": text is None, "reward": reward},
    }

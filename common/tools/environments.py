"""What --environment FILE.py:NAME names: a class that plays, or a function that answers
(docs/environments.md).

The transcript is the state, a live object its cache: each job carries what was called before and
what came of it. If the object has died with its process, another one is led through the same calls,
with the same seeds; if it says something else, or has `replayable = False`, the sample is lost.
"""

import inspect
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from common.types import trim
from common.workers.pool import load_function
from common.workers.process import describe

RESET, CLOSE = "reset()", "close()"  # no tool has such a name
LARGEST = 1e6  # reward of a turn
NO_TOOLS = {"reset", "close", "reward", "get_reward", "done"}


@dataclass
class State:
    """What an object of an environment has gone through."""

    trajectory: int
    seed: str
    columns: dict[str, Any]  # of its row
    opening: str = ""  # what `reset` has said
    # method, arguments, what came of it
    calls: list[tuple[str, dict, str]] = field(default_factory=list)


def is_class(spec: str) -> bool:
    """Is NAME of --environment FILE.py:NAME a class, which plays, or a function, which answers?"""
    return inspect.isclass(load_function(spec, "--environment"))


def load_environment(spec: str) -> type:
    """The class of --environment FILE.py:NAME. ValueError for one without a method reset."""
    kind = load_function(spec, "--environment")
    if not callable(getattr(kind, "reset", None)):
        raise ValueError(f"--environment {spec}: expected a class with a method reset")
    return kind


def method_schemas(spec: str) -> dict[str, dict]:
    """{method: schema} of the tools of an environment. ValueError for one that lacks a type or a
    description."""
    from common.torch_repair import transformers  # not in workers: it takes seconds

    kind = load_environment(spec)
    schemas = {}
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if name.startswith("_") or name in NO_TOOLS or not method.__doc__:
            continue
        method.__doc__ = docstring(method)
        try:
            if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
                raise ValueError("is called as it stands, and must be a plain method")
            schemas[name] = transformers.utils.get_json_schema(method)
        except Exception as error:  # of its own kinds
            raise ValueError(f"--environment {spec}: {name}: {error}") from error
        schemas[name]["function"].pop("return", None)
    if not schemas:
        raise ValueError(
            f"--environment {spec}: no public method with a docstring, which the policy could call"
        )
    return schemas


def docstring(function: Callable) -> str:
    """With "n: how far" for "n (int): how far", since hints tell the types."""
    return re.sub(r"(?m)^(\s*\w+) \([^)\n]*\):", r"\1:", inspect.getdoc(function) or "")


def fitting(function: Callable, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the keyword arguments that it takes."""
    named = inspect.signature(function).parameters
    takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in named.values())
    return {name: value for name, value in given.items() if takes_all or name in named}


def read(thing: object, *names: str) -> Any:
    """The first of these attributes that there is, called if it is a method; None if there is
    none."""
    # a property that raises an AttributeError is there, whatever hasattr says
    there = (
        name
        for name in names
        if inspect.getattr_static(thing, name, read) is not read or hasattr(thing, name)
    )
    value = next((getattr(thing, name) for name in there), None)
    return value() if callable(value) else value


class Live:
    """The objects of a worker, by their trajectories. `call(name, method, arguments)` gives the
    fields of a reply."""

    def __init__(self, spec: str, call: Callable[[str, Callable, dict], dict]):
        self.kind, self.call = load_environment(spec), call
        self.objects: dict[int, Any] = {}
        self.steps: dict[int, int] = {}  # calls of each so far

    def answer(self, name: str, arguments: Mapping, state: State) -> dict:
        """Fields of a reply; `failed` if the sample is lost."""
        if name == RESET:
            return {"text": self.reset(state), "images": [], "info": {}}
        number = state.trajectory
        if self.steps.get(number) != len(state.calls) and (problem := self.rebuild(state)):
            self.end(number)
            return {"text": problem, "failed": True}
        if name == CLOSE:
            try:
                reward = read(self.objects[number], "reward", "get_reward")
            finally:
                self.end(number)
            if reward is not None and not isfinite(reward := float(reward)):
                return {"text": f"the environment's reward is {reward}", "failed": True}
            return {"text": "", "images": [], "info": {"reward": reward}}
        return self.step(name, arguments, state)

    def reset(self, state: State) -> str:
        """A new object; what its `reset` says."""
        self.end(state.trajectory)
        seed(state, 0)
        thing = self.objects[state.trajectory] = self.kind()
        said = thing.reset(**fitting(thing.reset, state.columns))
        if not isinstance(said, str | None):
            raise TypeError(f"reset returned {said!r:.80}, expected a text or None")
        self.steps[state.trajectory] = 0
        return trim(said or "")

    def step(self, name: str, arguments: Mapping, state: State) -> dict:
        number = state.trajectory
        self.steps[number] += 1
        seed(state, self.steps[number])
        reply = self.call(name, getattr(self.objects[number], name), arguments)
        done = bool(read(self.objects[number], "done"))
        return reply | {"info": reply.get("info", {}) | {"step": self.steps[number], "done": done}}

    def rebuild(self, state: State) -> str:
        """Lead a new object through the transcript. Returns why that cannot be done, if so."""
        if not getattr(self.kind, "replayable", True):
            return "the environment has died, and is not replayable"
        same = self.reset(state) == state.opening
        same = same and all(
            self.step(name, given, state)["text"] == text for name, given, text in state.calls
        )
        return "" if same else "the environment has died, and repeats itself differently"

    def end(self, number: int) -> None:
        self.steps.pop(number, None)
        try:
            getattr(self.objects.pop(number, None), "close", lambda: None)()
        except Exception as error:  # the trajectory is over, and its result known
            print(f"warning: close of the environment: {describe(error)}")

    def close(self) -> None:
        for number in list(self.objects):
            self.end(number)


def seed(state: State, step: int) -> None:
    """Random numbers depend on the row and the call alone: the same in all samples of a group, and
    in a repetition."""
    import numpy as np  # tools need none

    random.seed(f"{state.seed}/{step}")
    np.random.seed(random.getrandbits(32))


def ask_function(
    function: Callable, messages: list[dict], ground_truth: object, kwargs: Mapping
) -> dict:
    """Fields of what a function answers; info: {"ends": has it nothing to say, "reward": of the
    turn or None}."""
    result = function(messages, ground_truth, **fitting(function, kwargs))
    text, reward = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(text, str | None) or not (
        reward is None or abs(reward := float(reward)) <= LARGEST
    ):
        raise TypeError(
            f"it returned {result!r:.80}, expected a text or None, or (that, a number up to "
            f"{LARGEST:g})"
        )
    return {
        "text": trim(text or ""),
        "images": [],
        "info": {"ends": text is None, "reward": reward},
    }

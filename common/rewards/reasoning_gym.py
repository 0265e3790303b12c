"""Scores of reasoning-gym's tasks, by the package's own scorers."""

import ast
import json
import re
from collections.abc import Callable
from functools import cache

from common.rewards.countdown import last_answer

PACKAGE = "reasoning-gym==0.1.25"
# Tasks whose scorers hand the answer to Python's `eval`, and those that hand it to sympy's
# `parse_expr`, which evaluates it after some changes. A policy must not run code that way.
EVAL_TASKS = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
SYMPY_TASKS = {
    "countdown",
    "intermediate_integration",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
}
LITERALS = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.UnaryOp, ast.unaryop, ast.Load)
ARITHMETIC = (*LITERALS, ast.Name, ast.BinOp, ast.operator, ast.Call)
# an answer of string_insertion; other names could be those of a scorer's variables: oracle_answer
WORD = re.compile("[A-Z]+")
FUNCTION_NAMES = "Abs exp ln log sqrt sin cos tan cot sec csc asin acos atan sinh cosh tanh"
FUNCTIONS = set(FUNCTION_NAMES.split())


def score(solution_str: str, ground_truth: str | dict) -> dict:
    """{"score": the scorer's, "pred": the answer or "", "format": 1 if there is an answer tag} of
    one response.

    ground_truth: JSON as common.prepare.reasoning_gym writes it. The answer is what stands in the
    last complete <answer>…</answer>. Many scorers give part of 1 for an answer that is nearly
    right, and some a little for one that is wrong. An answer at which a scorer fails gets 0.
    """
    truth = ground_truth
    if isinstance(truth, str):  # common.score has parsed an evaluation's sample already
        truth = json.loads(truth)
    answer = last_answer(solution_str)
    value = 0.0
    if answer is not None and is_harmless(answer, truth["task"]):
        scorer = find_scorer(truth["task"], json.dumps(truth["config"], sort_keys=True))
        try:
            value = float(scorer(answer, truth["entry"]))
        except Exception:  # a scorer may raise anything at a text that it does not expect
            value = 0.0
    return {"score": value, "pred": answer or "", "format": float(answer is not None)}


@cache
def find_scorer(task: str, config: str) -> Callable[[str, dict], float]:
    """The `score_answer` of the task with a config, as JSON. ImportError without the package."""
    try:
        from reasoning_gym.factory import create_dataset
    except ImportError as error:
        raise ImportError(f"reasoning_gym/{task} needs `pip install {PACKAGE}`") from error
    return create_dataset(task, **json.loads(config)).score_answer


def is_harmless(answer: str, task: str) -> bool:
    """Whether the task's scorer evaluates nothing of the answer but literals and arithmetic."""
    if task not in EVAL_TASKS | SYMPY_TASKS:
        return True
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # `eval` cannot read it, either; sympy may, after its changes
        return task in EVAL_TASKS
    if task in EVAL_TASKS and WORD.fullmatch(answer.strip()):
        return True
    allowed = LITERALS if task in EVAL_TASKS else ARITHMETIC
    for node in ast.walk(tree):
        if not isinstance(node, allowed):
            return False
        if isinstance(node, ast.Call) and not is_function(node):
            return False
        # sympy evaluates the text of a string
        is_text = isinstance(node, ast.Constant) and not isinstance(node.value, int | float)
        if is_text and task in SYMPY_TASKS:
            return False
    return True


def is_function(call: ast.Call) -> bool:
    """Whether it is one of FUNCTIONS, with plain arguments."""
    return isinstance(call.func, ast.Name) and call.func.id in FUNCTIONS and not call.keywords

"""The mathematics that scripts share is the same text in each of them: a script can be read by
itself."""

import ast
from functools import cache

import pytest
from helpers import ROOT, parsed

SCRIPTS = ["curiosity_rl.py", "distill.py", "grpo.py", "ppo.py", "sft.py"]
RL = ["curiosity_rl.py", "grpo.py", "ppo.py"]
# Definitions of which each script has its own, and those that only some have for themselves.
OWN = {"Args", "Tokens", "check_args", "main"}
OWN_OF = {
    "policy_loss": {"grpo.py", "ppo.py"},  # ppo.py's has one objective
    # without and with the loss written out; grpo.py's is ppo.py's
    "backward": {"curiosity_rl.py", "distill.py", "sft.py"},
    "evaluate": {"sft.py"},
    "collect": {"distill.py"},
    "Tokens.of": {"distill.py"},  # its tokens have no advantages
}
SHARED = {
    "group_advantages": ["curiosity_rl.py", "grpo.py"],
    "shaped_scores": ["grpo.py", "ppo.py"],
    "sequence_mean": ["grpo.py", "ppo.py"],
    "clipped_loss": SCRIPTS[:4],
    "engine_correction": ["grpo.py", "ppo.py"],
    "kl_estimate": ["grpo.py", "ppo.py"],
    "has_kl": ["grpo.py", "ppo.py"],
    "token_weights": RL,
    "split_minibatches": SCRIPTS[:4],
    "backward": ["grpo.py", "ppo.py"],
    "Tokens.of": RL,
    "Tokens.__getitem__": SCRIPTS[:4],
}


def source(script: str) -> str:
    return (ROOT / script).read_text()


def text_of(node: ast.AST, lines: list[str]) -> str:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "\n".join(lines[first - 1 : node.end_lineno])


@cache
def definitions(text: str) -> dict[str, str]:
    """{name: its text} of functions and classes, those of Tokens besides as Tokens.NAME."""
    found, lines = {}, text.splitlines()
    for node in parsed(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = text_of(node, lines)
        if isinstance(node, ast.ClassDef) and node.name == "Tokens":
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            found |= {f"Tokens.{part.name}": text_of(part, lines) for part in methods}
    return found


def copies(sources: dict[str, str]) -> dict[str, dict[str, str]]:
    """{name: {script: text}} of what should be the same in each of them."""
    found: dict[str, dict[str, str]] = {}
    for script, text in sources.items():
        for name, definition in definitions(text).items():
            if name not in OWN and script not in OWN_OF.get(name, ()):
                found.setdefault(name, {})[script] = definition
    return found


def different(sources: dict[str, str]) -> list[str]:
    return [name for name, texts in copies(sources).items() if len(set(texts.values())) > 1]


def test_definitions_of_the_same_name_are_copies():
    sources = {script: source(script) for script in SCRIPTS}
    found = {name: sorted(texts) for name, texts in copies(sources).items() if len(texts) > 1}
    assert different(sources) == [] and found == SHARED


@pytest.mark.parametrize("name", SHARED)
def test_a_copy_that_is_changed_is_found(name):
    sources = {script: source(script) for script in SCRIPTS}
    script = SHARED[name][-1]
    last = "\n".join(definitions(sources[script])[name].splitlines()[-2:])
    assert sources[script].count(last) == 1
    assert different({**sources, script: sources[script].replace(last, f"{last} + 0")}) == [name]

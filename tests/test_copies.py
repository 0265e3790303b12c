"""What the scripts share word for word: functions, and the lines of the mains. Each script can be read by itself."""

import ast
import difflib
import itertools
import re
from functools import cache

import pytest
from helpers import ROOT, parsed

SCRIPTS = ["curiosity_rl.py", "grpo.py", "ppo.py", "sft.py"]
RL = SCRIPTS[:3]
# Definitions of which each script has its own, and those that only some have for themselves.
OWN = {"Args", "Tokens", "check_args", "main"}
OWN_OF = {
    "policy_loss": {"grpo.py", "ppo.py"},  # ppo.py's has one objective
    "backward": {"curiosity_rl.py", "sft.py"},  # without and with the loss written out; grpo.py's is ppo.py's
    "evaluate": {"sft.py"},
}
SHARED = {
    "group_advantages": ["curiosity_rl.py", "grpo.py"],
    "shaped_scores": ["grpo.py", "ppo.py"],
    "sequence_mean": ["grpo.py", "ppo.py"],
    "clipped_loss": RL,
    "engine_correction": ["grpo.py", "ppo.py"],
    "kl_estimate": ["grpo.py", "ppo.py"],
    "KLController": ["grpo.py", "ppo.py"],
    "token_weights": RL,
    "backward": ["grpo.py", "ppo.py"],
    "collect": RL,
    "Tokens.of": RL,
    "Tokens.__getitem__": RL,
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


def test_what_has_its_own_list_differs():
    """Otherwise it belongs to the copies."""
    found = {script: definitions(source(script)) for script in SCRIPTS}
    for name in OWN:
        texts = [parts[name] for parts in found.values() if name in parts]
        assert len(texts) > 1 and len(set(texts)) == len(texts), name
    for name, scripts in OWN_OF.items():
        texts = [parts[name] for parts in found.values() if name in parts]
        assert len(set(texts)) >= len(scripts), name


@pytest.mark.parametrize("name", SHARED)
def test_a_copy_that_is_changed_is_found(name):
    sources = {script: source(script) for script in SCRIPTS}
    script = SHARED[name][-1]
    last = "\n".join(definitions(sources[script])[name].splitlines()[-2:])
    assert sources[script].count(last) == 1
    assert different({**sources, script: sources[script].replace(last, f"{last} + 0")}) == [name]


# --- the same under another name ----------------------------------------------------------------------------------


def shape(function: ast.FunctionDef) -> list[str]:
    """The syntax of a function without its docstring and without any name in it."""
    body = function.body[1 if ast.get_docstring(function) else 0 :]
    text = " ".join(ast.dump(statement) for statement in body)
    return re.findall(r"\w+", re.sub(r"(id|arg|attr|name)='\w+'", r"\1", text))


def alike(shape_a: list[str], shape_b: list[str]) -> bool:
    matcher = difflib.SequenceMatcher(None, shape_a, shape_b, autojunk=False)
    return matcher.real_quick_ratio() > 0.75 and matcher.quick_ratio() > 0.75 and matcher.ratio() > 0.75


def twins(sources: dict[str, str]) -> list[tuple[str, str]]:
    """Functions of different names in different scripts that are alike when all names are left out.

    The update of a critic looks like that of a policy, in its own script too.
    """
    functions = [
        (script, node.name, shape(node))
        for script, text in sources.items()
        for node in parsed(text).body
        if isinstance(node, ast.FunctionDef) and node.name not in OWN
    ]
    return [
        (f"{script_a}: {a}", f"{script_b}: {b}")
        for (script_a, a, shape_a), (script_b, b, shape_b) in itertools.combinations(functions, 2)
        if script_a != script_b and a != b and {a, b} != {"backward", "critic_backward"} and alike(shape_a, shape_b)
    ]


def test_renaming_a_copy_does_not_hide_it():
    sources = {script: source(script) for script in SCRIPTS}
    assert twins(sources) == []
    renamed = re.sub(r"\b(kl_estimate|d|k3|estimator)\b", r"other_\1", sources["ppo.py"])
    renamed = renamed.replace("(-other_d).exp() - 1", "(-other_d).exp() - 2")
    assert twins({**sources, "ppo.py": renamed}) == [("grpo.py: kl_estimate", "ppo.py: other_kl_estimate")]


# --- the mains ----------------------------------------------------------------------------------------------------

# (first line, last line) of passages that the RL mains share
PASSAGES = [
    ("def main(", "    world, device = job.world, job.world.device"),
    ("    policy = job.load_policy()", "    policy = job.load_policy()"),
    ("    optimizer = job.adamw(", "    optimizer = job.adamw("),
    ("    packer = Packer(", "    packer = Packer("),
    ("    start = checkpoints.resume(", "    start = checkpoints.resume("),
    ("    logger = open_logger(", "    if args.rollout.eval_only:"),
    ("        return", "        if args.rollout.replay:"),
    ("            with watch(", "                sync_engine("),
    ("        index = TokenIndex(", "        minibatches = packer.minibatches("),
    ("        means = Means()", '        with watch("update"):'),
    ("            for epoch, minibatch in", "                on_policy ="),
    ("        means.merge(rollout_means(", "        means.merge(rollout_means("),
    ("        metrics = rollout_metrics(", "        metrics = rollout_metrics("),
    ("        # 6. eval, checkpoint", "    finish(job, policy, logger)"),
]
# What stands in a passage of one script, and in no other.
LINES_OF_ITS_OWN = {"curiosity_rl.py": ["            memory.save(step + 1, job.tokenizer, checkpoints.folder)"]}
LOOPS = {"ppo.py": ("range(epochs)", "range(args.epochs_per_step)")}  # it may wait


def main_of(script: str, text: str) -> list[str]:
    """Lines of main, without the script's name and what is its own."""
    body = definitions(text)["main"].replace(f'"{script.removesuffix(".py")}"', '"SCRIPT"')
    body = body.replace(*LOOPS.get(script, ("", "")))
    return [line for line in body.splitlines() if line not in LINES_OF_ITS_OWN.get(script, ())]


def passage(lines: list[str], first: str, last: str) -> list[str]:
    start = next(i for i, line in enumerate(lines) if line.startswith(first))
    end = next(i for i, line in enumerate(lines) if i >= start and line.startswith(last))
    return lines[start : end + 1]


@pytest.mark.parametrize("first, last", PASSAGES)
def test_the_rl_mains_share_passages_word_for_word(first, last):
    mains = {script: main_of(script, source(script)) for script in RL}
    texts = {script: passage(lines, first, last) for script, lines in mains.items()}
    assert texts["grpo.py"] == texts["ppo.py"] == texts["curiosity_rl.py"]


def test_the_last_passage_is_the_end_of_main():
    for script in RL:
        lines = main_of(script, source(script))
        assert passage(lines, *PASSAGES[-1])[-1] is lines[-1] and len(passage(lines, *PASSAGES[-1])) > 12, script


def test_a_line_that_is_a_scripts_own_is_there_once():
    for script, lines in LINES_OF_ITS_OWN.items():
        for line in lines:
            assert [source(other).splitlines().count(line) for other in RL] == [other == script for other in RL]
    for script, (written, _) in LOOPS.items():
        assert source(script).count(written) == 1

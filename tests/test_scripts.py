"""Rules of the code base as tests: sizes, copies held together, flags that are used and explained, banners."""

import ast
import difflib
import inspect
import itertools
import re
import runpy
import sys

import pytest
from conftest import ROOT, run_script

import common.distributed
from common.arguments import ANY_SIGN, POSITIVE, SHARES

SCRIPTS = sorted(path.name for path in ROOT.glob("*.py"))
MODULES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("common/**/*.py"))
TOP_MODULES = [name for name in MODULES if name.count("/") == 1]
CAPS = {"sft.py": 400, "grpo.py": 600, "ppo.py": 700, "curiosity_rl.py": 750}
BANNERS = ["1. data", "2. rollout", "3. rewards", "4. update", "5. log", "6. eval, checkpoint"]
OWN = {"main", "check_args"}  # functions that each script has its own of; all others that share a name are copies
REQUIRED = {"sft.py": ["--model", "nowhere", "--train-data", "nothing.jsonl"]}  # what a script cannot do without

every_script = pytest.mark.parametrize("script", SCRIPTS)


def source(name: str) -> str:
    return (ROOT / name).read_text()


def lines(name: str) -> list[str]:
    return source(name).splitlines()


def args_fields(script: str) -> dict[str, ast.AnnAssign]:
    (args,) = (n for n in ast.parse(source(script)).body if isinstance(n, ast.ClassDef) and n.name == "Args")
    return {node.target.id: node for node in args.body if isinstance(node, ast.AnnAssign)}


def help_of(script: str, field: ast.AnnAssign) -> str:
    """The comment behind a field. Fields are one line each, and no default has a # in it."""
    return lines(script)[field.end_lineno - 1].partition("#")[2].strip()


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def test_the_scripts_are_found():
    assert {"sft.py", "grpo.py"} <= set(SCRIPTS) <= set(CAPS), "another file in the root needs a cap"


# --- size and style -----------------------------------------------------------------------------------------------


@every_script
def test_scripts_stay_within_their_caps(script):
    assert len(lines(script)) <= CAPS[script]


def test_common_stays_small():
    counts = {name: len(lines(name)) for name in MODULES}
    assert {name: count for name, count in counts.items() if count > 300} == {}
    assert sum(counts[name] for name in TOP_MODULES) <= 4450


@pytest.mark.parametrize("name", SCRIPTS + MODULES)
def test_no_long_lines_no_noqa_no_bare_except(name):
    assert [i for i, line in enumerate(lines(name), 1) if len(line) > 119] == [], "lines of more than 119 columns"
    assert [i for i, line in enumerate(lines(name), 1) if re.search(r"#\s*noqa", line, re.IGNORECASE)] == []
    handlers = [n for n in ast.walk(ast.parse(source(name))) if isinstance(n, ast.ExceptHandler)]
    assert [n.lineno for n in handlers if n.type is None] == [], "bare except"


@pytest.mark.parametrize("name", [n for n in SCRIPTS + MODULES if n != "common/engine.py"])
def test_vllm_stays_in_the_engine(name):
    imported = []
    for node in ast.walk(ast.parse(source(name))):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported.append(node.module or "")
    assert [module for module in imported if module.partition(".")[0] == "vllm"] == []


@every_script
def test_the_banners_of_a_step_stand_in_order(script):
    found = re.findall(r"^ +# (\d\. .+)$", source(script), re.MULTILINE)
    expected = [b for b in BANNERS if script != "sft.py" or b[0] in "1456"]
    assert len(found) == len(expected), found
    for banner, start in zip(found, expected):
        assert banner.startswith(start)


def test_functions_of_the_same_name_are_copies():
    definitions: dict[str, dict[str, str]] = {}
    for script in SCRIPTS:
        for node in ast.parse(source(script)).body:
            if isinstance(node, ast.FunctionDef) and node.name not in OWN:
                text = ast.get_source_segment(source(script), node)
                decorators = [ast.unparse(d) for d in node.decorator_list]
                definitions.setdefault(node.name, {})[script] = "\n".join([*decorators, text])
    assert len(definitions["lr_factor"]) == len(SCRIPTS)
    assert [name for name, copies in definitions.items() if len(set(copies.values())) > 1] == []


def shape(function: ast.FunctionDef) -> list[str]:
    """The syntax of a function without its docstring and without any name in it."""
    body = function.body[1 if ast.get_docstring(function) else 0 :]
    text = " ".join(ast.dump(statement) for statement in body)
    return re.findall(r"\w+", re.sub(r"(id|arg|attr|name)='\w+'", r"\1", text))


def twins(sources: dict[str, str]) -> list[tuple[str, str]]:
    """Functions of different names in different scripts that are alike when all names are left out."""
    functions = [
        (script, node.name, shape(node))
        for script, text in sources.items()
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name not in OWN
    ]
    return [
        (f"{script_a}: {a}", f"{script_b}: {b}")
        for (script_a, a, shape_a), (script_b, b, shape_b) in itertools.combinations(functions, 2)
        if script_a != script_b and a != b
        if difflib.SequenceMatcher(None, shape_a, shape_b, autojunk=False).ratio() > 0.75
    ]


def test_renaming_a_copy_does_not_hide_it():
    sources = {script: source(script) for script in SCRIPTS}
    assert twins(sources) == []
    renamed = re.sub(r"\b(kl_estimate|d|k3|estimator)\b", r"other_\1", sources["ppo.py"])
    renamed = renamed.replace("(-other_d).exp() - 1", "(-other_d).exp() - 2")
    found = [(f"{script}: kl_estimate", "ppo.py: other_kl_estimate") for script in ("curiosity_rl.py", "grpo.py")]
    assert twins({**sources, "ppo.py": renamed}) == found


# --- flags --------------------------------------------------------------------------------------------------------


@every_script
def test_every_flag_is_used(script):
    """`args.NAME` is read there, or where the scripts hand their args to; being set by the demo does not count."""
    shared = [ast.parse(source(f"common/{name}.py")) for name in ("arguments", "setup", "memory", "evaluate")]
    if script == "sft.py":
        shared = [node for node in ast.walk(shared[1]) if getattr(node, "name", None) == "open_run"]
    used = {
        node.attr
        for tree in (ast.parse(source(script)), *shared)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and isinstance(node.value, ast.Name)
        and node.value.id == "args"
    }
    assert [name for name in args_fields(script) if name not in used] == []


@every_script
def test_every_flag_is_one_line_with_its_help_behind_it(script):
    for name, field in args_fields(script).items():
        assert field.lineno == field.end_lineno, name
        assert len(help_of(script, field)) > 3, f"{name} has no help"


def test_ranges_are_of_flags_that_exist():
    known = {name for script in SCRIPTS for name in args_fields(script)}
    assert {*POSITIVE, *SHARES, *ANY_SIGN} <= known


def test_flags_of_the_same_name_have_the_same_type():
    types: dict[str, dict[str, str]] = {}
    for script in SCRIPTS:
        for name, field in args_fields(script).items():
            types.setdefault(name, {})[script] = ast.unparse(field.annotation).removesuffix(" | None")
    assert {name: t for name, t in types.items() if len(set(t.values())) > 1} == {}


@every_script
def test_help_shows_every_flag_and_its_text(script):
    output = run_script(script, "--help", env={"COLUMNS": "120"}).stdout
    entries = re.split(r"^│ (?=-)", output, flags=re.MULTILINE)[1:]  # what a flag says may be wrapped over rows
    entries = [" ".join(entry.replace("│", " ").split()) for entry in entries]
    for name, field in args_fields(script).items():
        shown = [entry for entry in entries if re.match(rf"{flag(name)}[ ,]", entry)]
        assert len(shown) == 1, f"{flag(name)} stands {len(shown)} times in the help"
        assert help_of(script, field) in shown[0]
    assert ast.get_docstring(ast.parse(source(script))).partition("\n")[0] in output


def start(script: str, arguments: list[str], monkeypatch) -> list:
    """What the script hands to `run` when it is called with `arguments`; nothing of it is run."""
    handed = []
    monkeypatch.setattr(common.distributed, "run", lambda *a, **k: handed.append((a, k)))
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(str(ROOT / script), run_name="__main__")
    return handed


@every_script
def test_unknown_flag_is_an_error_that_names_the_nearest(script, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        start(script, [*REQUIRED.get(script, []), "--learning-rte", "1e-5"], monkeypatch)
    assert stop.value.code not in (0, None)
    captured = capsys.readouterr()
    assert "--learning-rate" in captured.out + captured.err


@every_script
@pytest.mark.parametrize("arguments", [[], ["--model", "nowhere", "--train-data", "nothing.jsonl"]])
def test_the_script_starts_its_main_as_run_expects(script, arguments, monkeypatch):
    """`run` is called as it is declared, and calls `main` as that is declared: caught without a run."""
    real = inspect.signature(common.distributed.run)
    arguments = arguments or REQUIRED.get(script, [])
    ((positional, keywords),) = start(script, arguments, monkeypatch)
    bound = real.bind(*positional, **keywords)
    main, rest = bound.args[0], bound.args[1:]
    inspect.signature(main).bind(*rest)
    assert main.__name__ == "main"


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s not in REQUIRED])
def test_without_a_model_the_script_runs_its_demo(script, monkeypatch):
    ((positional, _),) = start(script, ["--seed", "3"], monkeypatch)
    args, demo = positional[1:3]
    assert args.model.startswith("tiny") and args.seed == 3 and demo is True
    ((positional, _),) = start(script, ["--model=nowhere"], monkeypatch)
    args, demo = positional[1:3]
    assert args.model == "nowhere" and demo is False and args.total_steps is None, "nothing of the demo is left"

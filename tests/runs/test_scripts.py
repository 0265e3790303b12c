"""The scripts at their command lines: each flag is used and explained, and `main` is started as
declared."""

import ast
import inspect
import os
import re
import runpy
import subprocess
import sys

import pytest
from helpers import ROOT, SCRIPTS, checked_args, parsed, run_script

import common.script
import grpo

MODULES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("common/**/*.py"))
# what a script cannot do without
REQUIRED = {"sft.py": ["--model", "nowhere", "--train-data", "nothing.jsonl"]}

every_script = pytest.mark.parametrize("script", SCRIPTS)


def source(name: str) -> str:
    return (ROOT / name).read_text()


def lines(name: str) -> list[str]:
    return source(name).splitlines()


def class_fields(path: str, name: str) -> dict[str, ast.AnnAssign]:
    (found,) = (
        n for n in parsed(source(path)).body if isinstance(n, ast.ClassDef) and n.name == name
    )
    return {node.target.id: node for node in found.body if isinstance(node, ast.AnnAssign)}


def groups(script: str) -> dict[str, str]:
    """{field: its class} of the groups of flags that a script has."""
    fields = {
        name: ast.unparse(field.annotation) for name, field in class_fields(script, "Args").items()
    }
    return {
        name: kind for name, kind in fields.items() if kind in ("Data", "Rollout", "Machine", "Run")
    }


def own_flags(script: str) -> dict[str, ast.AnnAssign]:
    return {
        name: field
        for name, field in class_fields(script, "Args").items()
        if name not in groups(script)
    }


def flags_with_help(script: str) -> dict[str, str]:
    """{field: the comment behind it} of all flags of a script. Fields are one line each; no default
    has a # in it."""
    places = [(script, own_flags(script))]
    places += [
        ("common/flags.py", class_fields("common/flags.py", kind))
        for kind in groups(script).values()
    ]
    return {
        name: lines(path)[field.end_lineno - 1].partition("#")[2].strip()
        for path, fields in places
        for name, field in fields.items()
    }


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def attributes(paths: list[str]) -> set[str]:
    """Every NAME in `something.NAME` that is read."""
    return {
        node.attr
        for path in paths
        for node in ast.walk(parsed(source(path)))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


@every_script
def test_every_flag_is_used(script):
    """A script's own are read as `args.NAME` in it; being set by the demo does not count."""
    used = {
        node.attr
        for node in ast.walk(parsed(source(script)))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "args"
    }
    assert [name for name in own_flags(script) if name not in used] == []
    assert set(groups(script)) <= used


def test_every_flag_of_a_group_is_used():
    used = attributes([*SCRIPTS, *(name for name in MODULES if name != "common/flags.py")])
    shared = {
        name
        for kind in ("Data", "Rollout", "Machine", "Run")
        for name in class_fields("common/flags.py", kind)
    }
    assert sorted(shared - used) == []


def test_flags_of_the_same_name_have_the_same_type():
    types: dict[str, dict[str, str]] = {}
    for script in SCRIPTS:
        for name, field in own_flags(script).items():
            types.setdefault(name, {})[script] = ast.unparse(field.annotation).removesuffix(
                " | None"
            )
    assert {name: t for name, t in types.items() if len(set(t.values())) > 1} == {}


def test_a_flag_stands_once():
    shared = [
        name
        for kind in ("Data", "Rollout", "Machine", "Run")
        for name in class_fields("common/flags.py", kind)
    ]
    assert len(shared) == len(set(shared))
    assert [name for script in SCRIPTS for name in own_flags(script) if name in shared] == []


@every_script
def test_help_shows_every_flag_and_its_text(script):
    output = run_script(script, "--help-all", env={"COLUMNS": "120"}).stdout
    # what a flag says may be wrapped over rows
    entries = re.split(r"^│ (?=-)", output, flags=re.MULTILINE)[1:]
    entries = [" ".join(entry.replace("│", " ").split()) for entry in entries]
    for name, text in flags_with_help(script).items():
        shown = [entry for entry in entries if re.match(rf"{flag(name)}[ ,]", entry)]
        assert len(shown) == 1, f"{flag(name)} stands {len(shown)} times in the help"
        assert text in shown[0]
    assert ast.get_docstring(parsed(source(script))).partition("\n")[0] in output


@pytest.mark.parametrize(
    "command",
    [pytest.param("grpo.py --help-all", marks=pytest.mark.slow), "-m common.look --help"],
)
def test_help_may_be_read_in_part(command):
    """`| head` closes the pipe before the end."""
    command = ["bash", "-c", f"{sys.executable} {command} | head -1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert len(done.stdout.splitlines()) == 1 and done.stderr == ""


def test_help_of_a_script_may_lose_its_reader(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    stdout = open(writer, "w", buffering=1)  # noqa: SIM115 (its close would raise)
    monkeypatch.setattr(sys, "stdout", stdout)
    with pytest.raises(SystemExit) as stop:
        checked_args(grpo, monkeypatch, "--help-all")
    sys.stdout.flush()
    assert stop.value.code == 0
    with pytest.raises(BrokenPipeError):
        sys.stdout.close()


def start(script: str, arguments: list[str], monkeypatch) -> list:
    """What the script hands to `run` when it is called with `arguments`; nothing of it is run."""
    handed = []
    monkeypatch.setattr(common.script, "run", lambda *a, **k: handed.append((a, k)))
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
    """`run` is called as it is declared, and calls `main` as that is declared: caught without a
    run."""
    real = inspect.signature(common.script.run)
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
    assert args.run.model.startswith("tiny") and args.run.seed == 3 and demo is True
    ((positional, _),) = start(script, ["--model=nowhere"], monkeypatch)
    args, demo = positional[1:3]
    assert args.run.model == "nowhere" and demo is False and args.run.total_steps is None, (
        "nothing of the demo is left"
    )

"""What imports what, and what stays light (design, section 1)."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from helpers import ROOT, SCRIPTS, parsed, run_script, script_environment

Graph = dict[str, set[str]]  # module -> modules that it imports

HEAVY = {"torch", "transformers", "vllm"}
LIGHT = [
    "common.files",
    "common.limits",
    "common.flags",
    "common.pictures",
    "common.types",
    "common.workers.pool",
    "common.look.page",
    "common.look.curves",
]
LIGHT += ["common.tools", "common.data.rows", "common.data.visual_qa", "common.rewards"]
# what these import of others, once for all: nothing heavy, or each would be seen to have it
GROUND = ["huggingface_hub.hf_api", "jinja2", "numpy", "openai.types", "PIL.Image"]
GROUND += ["psutil", "pyarrow.compute", "pyarrow.parquet", "tyro._backends._tyro_backend"]
# no programs; wants TRL, which has flags of its own
WITHOUT_HELP = ["limits", "report", "trl_sft", "trl_step", "trl_work"]
WITHOUT_HELP = {f"tests/bench/{name}.py" for name in WITHOUT_HELP}


# --- who imports whom -----------------------------------------------------------------------------


def module_name(path: Path) -> str:
    """The dotted name of a file of the repository."""
    return (
        str(path.relative_to(ROOT)).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    )


def house() -> dict[str, Path]:
    """{module: file} of scripts, common/ and papers/."""
    files = [ROOT / script for script in SCRIPTS]
    files += [*ROOT.glob("common/**/*.py"), *ROOT.glob("papers/**/*.py")]
    return {module_name(path): path for path in files}


def imported(text: str) -> Iterator[str]:
    """What a text imports anywhere, in functions and for type checking too: of `from a import b` it
    is a.b."""
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def import_graph() -> Graph:
    modules = house()
    graph: Graph = {}
    for module, path in modules.items():
        graph[module] = set()
        for name in imported(path.read_text()):
            owner = name if name in modules else name.rpartition(".")[0]
            if owner in modules and owner != module:
                graph[module].add(owner)
    return graph


def reading_order(page: str) -> list[str]:
    """The files and folders of common/ in the order in which the page's tree has them."""
    tree = page.partition("\ncommon/ ")[2].partition("\npapers/")[0]
    order = []
    for line in tree.splitlines()[1:]:
        if not line.startswith("  # "):
            names = re.split(" {3,}", line.strip())[0]
            order += [name.rstrip("/") for name in names.split()]
    return order


def backwards(graph: Graph, order: list[str]) -> list[str]:
    """Imports from what stands later."""
    found = []
    for module, imports in graph.items():
        for imported_module in imports:
            if module.startswith("common.") and imported_module.startswith("common."):
                place = order.index(module.split(".")[1])
                if order.index(imported_module.split(".")[1]) > place:
                    found.append(f"{module} imports {imported_module}")
    return found


def circle(graph: Graph) -> list[str]:
    """Modules that import each other in turn, if there are any."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return []


def test_imports_have_no_circles():
    assert circle(import_graph()) == []


@pytest.mark.parametrize("page", ["README.md", "README_zh.md"])
def test_a_file_imports_from_earlier_ones_of_the_readmes_tree(page):
    order = reading_order((ROOT / page).read_text())
    names = {path.stem for path in (ROOT / "common").iterdir() if path.suffix in ("", ".py")}
    assert sorted(order) == sorted(names - {"__init__", "__pycache__"})
    assert backwards(import_graph(), order) == []


def test_an_import_from_a_later_file_is_found():
    order = ["files", "data", "checkpoint"]
    graph = {"common.data.rows": {"common.files", "common.checkpoint"}}
    assert backwards(graph, order) == ["common.data.rows imports common.checkpoint"]
    assert backwards({"common.data.rows": {"common.files", "common.data.scan"}}, order) == []


def test_papers_are_users():
    """Of common/ alone, which does not know them; nor do the scripts."""
    for module, imports in import_graph().items():
        if module.startswith("papers."):
            assert {name.partition(".")[0] for name in imports} <= {"common", "papers"}, module
        else:
            assert not any(name.startswith("papers") for name in imports), module


def test_circles_are_found():
    graph = import_graph() | {"common.files": {"common.checkpoint"}}
    assert {"common.files", "common.checkpoint"} <= set(circle(graph))


def test_tests_import_what_they_share_from_helpers():
    """Not from each other: a test file can be moved, and its names are its own."""
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text()
        if not re.search(r"\b(from|import)\b.*\btest_", text):  # which is sooner said than parsed
            continue
        modules = {name.partition(".")[0] for name in imported(text)}
        assert not any(module.startswith("test_") for module in modules), path


def test_vllm_stays_in_the_engine():
    found = set()
    for module, path in house().items():
        if any(name.partition(".")[0] == "vllm" for name in imported(path.read_text())):
            found.add(module)
    assert found == {"common.engine.vllm", "common.engine.vllm_repairs"}


# --- the light ground -----------------------------------------------------------------------------

# Each program in a child of its own: [what went wrong, which of some packages it has imported].
PROBE = """
import json, os, runpy, sys

programs, packages, preload = map(json.loads, sys.argv[1:])
for module in preload:
    __import__(module)
for program, *arguments in programs:
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        problem, sys.argv = "", [program, *arguments]
        try:
            if program.endswith(".py"):
                sys.path.insert(0, os.path.dirname(program))
                runpy.run_path(program, run_name="__main__")
            elif arguments:
                runpy.run_module(program, run_name="__main__")
            else:
                __import__(program)
        except SystemExit as stop:
            problem = f"exit code {stop.code}" if stop.code else ""
        except BaseException as error:
            problem = repr(error)[:1000]
        found = [name for name in packages if name in sys.modules]
        os.write(writer, json.dumps([problem, found]).encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    print(json.dumps([program, *json.loads(os.read(reader, 10_000) or '["died", []]')]), flush=True)
"""


def probe(
    programs: list[list[str]], packages: Iterable[str] = (), preload: Iterable[str] = ()
) -> dict[str, list]:
    """{program: [what went wrong, those of `packages` that it has imported]}; nothing is imported
    but `preload`.

    programs: a module to import, or a module or file to run with arguments.
    """
    asked = [json.dumps(list(x)) for x in (programs, packages, preload)]
    command = [sys.executable, "-c", PROBE, *asked]
    done = subprocess.run(
        command, cwd=ROOT, env=script_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {program: said for program, *said in map(json.loads, done.stdout.splitlines())}


def stems(folder: str) -> set[str]:
    return {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__"}


def test_a_probe_tells_what_a_program_imports_and_how_it_fails(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import sys, wave\nsys.exit(3 if sys.argv[1:] else 0)\n")
    found = probe(
        [[str(program), "x"], ["common.nothing"], ["decimal"]], ["wave", "colorsys"], ["colorsys"]
    )
    assert found.pop("common.nothing")[0].startswith("ModuleNotFoundError")
    assert found == {
        str(program): ["exit code 3", ["wave", "colorsys"]],
        "decimal": ["", ["colorsys"]],
    }


def test_the_ground_is_light():
    """Files at the bottom, scorers, viewers, and the programs that prepare data (as --help) load no
    torch."""
    modules = [*LIGHT, *(f"common.rewards.{name}" for name in stems("common/rewards") - {"model"})]
    modules += [f"common.rewards.answers.{name}" for name in stems("common/rewards/answers")]
    programs = [[name] for name in modules]
    programs += [[f"common.prepare.{name}", "--help"] for name in stems("common/prepare")]
    programs += [["papers.pyvision.rewards"], ["papers.pyvision.rows", "--help"]]
    programs += [["papers.pyvision.benchmarks", "--help"]]
    found = probe(programs, HEAVY, preload=GROUND)
    assert {name: said for name, said in found.items() if said != ["", []]} == {}


def test_a_worker_imports_little():
    """There are dozens, and each failure of a user's function starts another."""
    later = ["asyncio", "concurrent.futures", "jinja2", "multiprocessing", "numpy", "psutil"]
    later += ["pydantic", "tempfile"]
    found = probe([["common.rewards"], ["common.tools"]], ["PIL", *later])
    assert found == {"common.rewards": ["", []], "common.tools": ["", ["PIL"]]}


@pytest.mark.parametrize(
    "some_scripts",
    [["grpo.py", "sft.py"], pytest.param(SCRIPTS, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_what_waits_for_torch_waits_for_it_alone(some_scripts):
    """A script's --help, and a process group, which opens without pictures."""
    later = ["transformers", "vllm", "sympy", "pandas", "PIL"]
    later += ["torch.distributed.fsdp", "torch.distributed.checkpoint"]
    scripts = [[str(ROOT / script), "--help"] for script in some_scripts]
    groups = [["common.distributed"], ["common.precision"]]
    found = probe(scripts + groups, later, preload=["torch", "tyro._backends._tyro_backend"])
    for (name, *_), allowed in [(script, {"PIL"}) for script in scripts] + [
        (group, {"torch.distributed.fsdp", "torch.distributed.checkpoint"}) for group in groups
    ]:
        problem, packages = found[name]
        assert problem == "" and set(packages) <= allowed, name


@pytest.mark.slow
def test_every_module_can_be_the_first_to_be_imported():
    """In an interpreter that knows torch alone: transformers is repaired by whoever needs that."""
    modules = [name for name in house() if name.startswith(("common.", "papers."))]
    programs = [[name] for name in modules if not name.endswith("__main__")]
    assert {
        name: said for name, said in probe(programs, preload=["torch"]).items() if said != ["", []]
    } == {}


@pytest.mark.slow  # by default test_docs.py reads their flags
def test_every_benchmark_answers_help():
    files = [f"tests/bench/{name}.py" for name in sorted(stems("tests/bench"))]
    for name in files:
        if name not in WITHOUT_HELP:
            assert "usage" in run_script(name, "--help").stdout, name

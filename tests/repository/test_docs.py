"""The docs as tests: what they name exists, their links lead somewhere, and the README's own
example runs."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from helpers import ROOT, SCRIPTS, metrics_of, run_script
from pages import PAGES, blocks, split_commands, text

from common.rewards import reward_function
from common.workers.pool import load_function

EXAMPLE = "## Your data and your reward"  # the section of README.md whose code blocks are run

# Flags of other programs, by the program; and running text that speaks of flags without naming one.
THEIRS = {
    "torchrun": {
        "nproc_per_node",
        "nnodes",
        "rdzv-backend",
        "rdzv-endpoint",
        "rdzv-id",
        "standalone",
        "max-restarts",
    }
    | {
        "master-addr",
        "master-port",
        "node-rank",
        "rdzv-conf",
        "shutdown-timeout",
        "local-addr",
        "signals-to-handle",
    },
    "pip": {"index-url"},
    "docker": {"shm-size", "network", "ipc", "security-opt"},
    "sbatch": {"signal", "requeue"},
}
# whose first column holds flags that are not ours
TABLES_OF_OTHERS = ("theirs", "original flag", "gone")
OUTSIDE = {"pytest", "torch", "vllm"}  # modules of `python -m` that are not ours

every_page = pytest.mark.parametrize("page", PAGES)


def prose(page: str) -> str:
    """A page without its fenced blocks, and without what its tables say of other systems."""
    lines, exempt = [], False
    for line in re.sub(
        r"^ *```\w*\n.*?^ *```$", "", text(page), flags=re.MULTILINE | re.DOTALL
    ).splitlines():
        if not line.lstrip().startswith("|"):
            exempt = False
        elif line.removeprefix("| ").startswith(TABLES_OF_OTHERS):
            exempt = True
        lines.append(line.partition("|")[2].partition("|")[2] if exempt else line)
    return "\n".join(lines)


def inline_code(page: str) -> list[str]:
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(page))]


# --- the flags of a program, from its source ------------------------------------------------------


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def classes_of_common() -> dict[str, ast.ClassDef]:
    paths = sorted((ROOT / "common").rglob("*.py"))
    return {
        node.name: node
        for path in paths
        for node in tree(path).body
        if isinstance(node, ast.ClassDef)
    }


def fields(node: ast.ClassDef) -> set[str]:
    """Names of the fields of a dataclass; those of a field whose type is a class of common/ too,
    and of its bases."""
    found, classes = set(), classes_of_common()
    for base in node.bases:
        found |= (
            fields(classes[base.id]) if isinstance(base, ast.Name) and base.id in classes else set()
        )
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        kind = item.annotation
        if isinstance(kind, ast.Subscript) and ast.unparse(kind.value).endswith("OmitArgPrefixes"):
            kind = kind.slice
        name = kind.attr if isinstance(kind, ast.Attribute) else getattr(kind, "id", None)
        group = classes.get(name)
        found |= fields(group) if group and group.decorator_list else {item.target.id}
    return found


def source_of(program: str) -> Path:
    """The file of a script (`grpo.py`) or a module (`common.look`)."""
    path = ROOT / (program if program.endswith(".py") else program.replace(".", "/") + ".py")
    return path if path.is_file() else path.with_suffix("") / "__main__.py"


CALLS = ("call_program", "tyro.cli")  # their first argument has the flags


@cache
def flags_of(program: str) -> set[str]:
    """Flags of a script or module: the fields of its Args, groups included, the parameters of what
    it hands to one of CALLS, its add_argument calls. Nothing is imported."""
    path = source_of(program)
    names = {"help", "help-all"}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            names |= fields(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument"):
            names |= {a.value.lstrip("-") for a in node.args if isinstance(a, ast.Constant)}
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in CALLS
            and isinstance(node.args[0], ast.Name)
        ):
            names |= parameters(path, node.args[0].id)
    return {name.replace("_", "-") for name in names}


def parameters(path: Path, name: str) -> set[str]:
    """Parameters of a function that a file defines or imports from common/, or fields of such a
    class."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return fields(node)
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            module = ROOT / node.module.replace(".", "/")
            candidates = [module.with_suffix(".py"), module / "__init__.py", module / "__main__.py"]
            found = [parameters(candidate, name) for candidate in candidates if candidate.is_file()]
            return set().union(*found)
    return set()


@cache
def all_flags() -> set[str]:
    """Of all scripts, of what `python -m` offers, and of the benchmarks."""
    programs = [*SCRIPTS, *(str(p.relative_to(ROOT)) for p in ROOT.glob("tests/bench/*.py"))]
    programs += [str(p.relative_to(ROOT)) for p in ROOT.glob("results/notebook/*.py")]
    programs += [f"common.prepare.{p.stem}" for p in ROOT.glob("common/prepare/*.py")]
    programs += [f"common.assets.build.{p.stem}" for p in ROOT.glob("common/assets/build/*.py")]
    programs += ["common.export"]
    programs += [str(p.relative_to(ROOT)) for p in ROOT.glob("papers/*/*.py")]
    programs += [
        "common.score",
        *(f"common.{p.parent.name}" for p in ROOT.glob("common/*/__main__.py")),
    ]
    return set().union(*(flags_of(program) for program in programs), *THEIRS.values())


# --- commands -------------------------------------------------------------------------------------


def parse_command(words: list[str]) -> tuple[str, str, list[str]] | None:
    """(launcher, script or module, its arguments) of a python, torchrun or pip command; None for
    others."""
    launcher, *rest = words[1:] if words[0] == "./with" else words
    if launcher == "pip":
        return launcher, "", rest
    if launcher == "torchrun":
        for place, word in enumerate(rest):
            if word.endswith(".py"):
                check_flags(rest[:place], THEIRS["torchrun"], "torchrun")
                return launcher, word, rest[place + 1 :]
        check_flags(rest, THEIRS["torchrun"], "torchrun")
    if launcher == "python" and rest[:1] == ["-m"]:
        return launcher, rest[1], rest[2:]
    if launcher == "python" and rest and rest[0].endswith(".py"):
        return launcher, rest[0], rest[1:]
    return None


def check_flags(words: list[str], known: set[str], program: str) -> None:
    for word in words:
        if re.match(r"--\w", word):
            flag = word[2:].partition("=")[0]
            assert flag in known or flag.removeprefix("no-") in known, (
                f"--{flag} is no flag of {program}"
            )


def check_command(words: list[str]) -> None:
    """A command of ours exists, and so do its flags."""
    parsed = parse_command(words)
    if parsed is None:
        return
    launcher, program, arguments = parsed
    if launcher == "pip":
        check_flags(arguments, THEIRS["pip"], "pip")
        for place, word in enumerate(arguments):
            assert word != "-r" or (ROOT / arguments[place + 1]).is_file(), arguments
    elif program.partition(".")[0] in OUTSIDE:
        paths = [word for word in arguments if word.startswith("tests/")]
        assert [path for path in paths if not (ROOT / path).exists()] == []
    elif program == "NAME" or program.endswith(".NAME"):
        assert (ROOT / program.rpartition(".")[0].replace(".", "/")).is_dir()
    else:
        assert source_of(program).is_file(), f"there is no {program}"
        check_flags(arguments, flags_of(program), program)


@pytest.mark.parametrize(
    "command",
    [
        "python grpo.py \\\n    --modell tiny",
        "for x in a b; do\n    python grpo.py --critic-model $x\ndone",
        "OMP_NUM_THREADS=4 torchrun --nproc-per-nodes 2 grpo.py",
        "./with python grpo.py --modell tiny",
        "python -m common.prepare.nothing --out x",
        "cd x && python -m common.prepare.gsm8k --outt x  # a remark",
    ],
)
def test_a_wrong_command_is_found(command):
    with pytest.raises(AssertionError):
        for words in split_commands(command):
            check_command(words)


@every_page
def test_commands_exist_and_so_do_their_flags(page):
    for language, content in blocks(page):
        for words in split_commands(content) if language == "bash" else []:
            check_command(words)
    programs = ("./with ", "python ", "torchrun ", "pip ", "OMP_NUM_THREADS")
    for code in inline_code(page):
        if code.startswith(programs) and not code.endswith("..."):
            for words in split_commands(code):
                check_command(words)


@every_page
def test_flags_in_running_text_exist(page):
    """Of some script; in a code span that starts with a script's name, of that one."""
    problems = []
    for code in inline_code(page):
        script = code.partition(" ")[0]
        known = flags_of(script) if script in SCRIPTS else all_flags()
        for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", code):
            if flag not in known and flag.removeprefix("no-") not in known:
                problems.append(f"`{code}`: --{flag}")
    assert problems == []


# --- files and links ------------------------------------------------------------------------------


def paths_in(code: str) -> list[str]:
    """What looks like a file or folder of the repository in a code span or a line of a shell
    block."""
    folders = "common|papers|tests|docs|results"
    inside = rf"(?<![\w/.-])((?:{folders})/[\w./*-]*|requirements[\w*-]*\.txt|\.ci/run)"
    return re.findall(inside, code) + [
        name for name in re.findall(r"(?<![\w/.-])(\w+\.py)\b", code) if name in SCRIPTS
    ]


def missing(names: list[str]) -> list[str]:
    return [name for name in names if not list(ROOT.glob(name.rstrip("/.")))]


@every_page
def test_files_that_are_named_exist(page):
    spans = inline_code(page) + [
        line for language, content in blocks(page) for line in content.splitlines()
    ]
    assert missing([path for span in spans for path in paths_in(span)]) == []


@every_page
def test_functions_that_are_named_as_rewards_or_tools_exist(page):
    """FILE.py:NAME, in the repository; or in a block of the page, under the name of the file."""
    content = text(page)
    for file, name in set(re.findall(r"([\w/]+\.py):([a-z]\w*)", content)):
        if (ROOT / file).is_file():
            assert callable(load_function(f"{ROOT / file}:{name}", "")), f"{file}:{name}"
        else:
            written = [b for _, b in blocks(page) if re.match(rf"(# {file}|cat > {file})\b", b)]
            assert any(f"def {name}(" in b for b in written), (
                f"no block of {page} is {file} with {name}"
            )


def slug(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    heading = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")


def anchors(path: Path) -> list[str]:
    content = re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [slug(heading) for heading in re.findall(r"^#+ (.+)$", content, flags=re.MULTILINE)]


@every_page
def test_tests_that_are_named_exist(page):
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)\(", sources, flags=re.MULTILINE))
    named = {
        name for code in inline_code(page) for name in re.findall(r"\btest_\w+\b(?!\.py|/)", code)
    }
    assert named <= defined, sorted(named - defined)


@every_page
def test_links_resolve(page):
    folder, broken = (ROOT / page).parent, []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page))):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = (folder / name).resolve() if name else ROOT / page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


# --- the table of other systems' keys -------------------------------------------------------------


def tables_of_keys() -> dict[str, dict[str, list[str]]]:
    """{heading: {key: [ours, note]}} of the tables of docs/from_verl_trl.md with three columns."""
    tables: dict[str, dict[str, list[str]]] = {}
    page = text("docs/from_verl_trl.md")
    for section in re.split(r"^## ", page, flags=re.M)[1:]:
        heading = section.partition("\n")[0]
        for line in section.splitlines():
            if row := re.fullmatch(r"\| `([\w.-]+)` \| (.*?) \| (.*?) ?\|", line):
                key, ours, note = row.groups()
                assert key not in tables.setdefault(heading, {}), f"{key} stands twice"
                tables[heading][key] = [ours, note.strip()]
    return tables


def foreign_tables() -> dict[str, dict]:
    return tomllib.loads((ROOT / "common" / "foreign_flags.toml").read_text())


def test_the_page_of_other_systems_keys_is_what_a_command_line_answers():
    assert tables_of_keys() == foreign_tables()


def test_keys_of_others_have_one_row_each_and_an_answer():
    rows = [(key, *row) for table in foreign_tables().values() for key, row in table.items()]
    keys = [key for key, *_ in rows]
    assert len(keys) == len(set(keys))
    for key, ours, note in rows:
        assert key.startswith("--") or "." in key, f"{key}: TRL's with dashes, verl's in full"
        assert ours == "none" or re.fullmatch(r"`[^`]+`(, `[^`]+`)*", ours), f"{key}: {ours}"
        assert ours != "none" or note, f"{key}: no answer and no reason"
    ours_too = set().union(*(flags_of(script) for script in SCRIPTS))
    assert [key for key in keys if key.removeprefix("--") in ours_too] == [], "needs no translation"
    named = [
        flag
        for _, ours, note in rows
        for flag in re.findall(r"(?<![\w-])--(?:no-)?([\w-]+)", ours + note)
    ]
    assert set(named) <= ours_too | THEIRS["torchrun"], "answers with flags that there are"


# --- README's blocks run --------------------------------------------------------------------------


def test_the_chinese_readme_has_the_same_code():
    assert blocks("README_zh.md") == blocks("README.md")


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> tuple[Path, list[str]]:
    """The folder in which the README's snippets have been pasted, and the command that follows
    them."""
    folder = tmp_path_factory.mktemp("mine")
    section = text("README.md").partition(EXAMPLE)[2].partition("\n## ")[0]
    commands = re.findall(r"^```bash\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    for command in commands:
        if "<<'EOF'" in command:
            environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
            subprocess.run(
                ["bash", "-euc", command], cwd=folder, env=environment, check=True, timeout=60
            )
    (words,) = [
        words for command in commands for words in split_commands(command) if "grpo.py" in words
    ]
    return folder, words


def test_the_example_of_the_readme_runs(example):
    """As pasted, but for the number of steps, and an engine that every machine has."""
    folder, words = example
    assert words[:2] == ["python", "grpo.py"]
    arguments = [
        re.sub(r"^(rows\.jsonl|rewards\.py:.*|runs/mine)$", rf"{folder}/\1", word)
        for word in words[1:]
    ]
    arguments[arguments.index("--total-steps") + 1] = "1"
    run_script(*arguments, "--engine", "hf")
    records = [record for record in metrics_of(folder / "runs/mine") if record.get("step")]
    assert [record["step"] for record in records] == [1]
    assert all(
        record["reward/failed"] == 0 and 0.1 < record["reward/mean"] < 1 for record in records
    )
    assert (folder / "runs/mine/model/model.safetensors").is_file()


def test_the_reward_of_the_readme_cannot_be_cheated(example):
    reward = load_function(f"{example[0]}/rewards.py:exact", "--reward-function")
    truth = {"numbers": [19, 7, 5], "target": 31}
    for right in ("19+7+5", "(5 + 19) + 7", "19+(7+5)"):
        assert reward("mine", f"<think>19+7=26</think><answer>{right}</answer>", truth) == 1
    wrong = [
        "31",
        "19+7",
        "19+7+5+0",
        "19+7+5-5+5",
        "19-7-5",
        "19+7+5.0",
        "9+10+7+5",
        "19**1+7+5",
        "+19+7+5",
        "",
    ]
    wrong += [
        "__import__('os')",
        "19+7+5 if 1 else 2",
        "(" * 60,
        "\0",
        "1e9+7+5",
        "19+7+int('5')",
        "19+7+5\n31",
    ]
    for answer in wrong:
        assert reward("mine", f"<answer>{answer}</answer>", truth) == 0, answer
    assert reward("mine", "19+7+5", truth) == 0
    assert reward("mine", "<answer>19+7+5</answer> or <answer>19+7-5</answer>", truth) == 0


def test_the_other_examples_load(tmp_path):
    """The reward and the tool of docs/recipes.md, and what they say of their own data_source."""
    for file in ("number.py", "tools.py"):
        (block,) = [
            content for _, content in blocks("docs/recipes.md") if content.startswith(f"# {file}")
        ]
        (tmp_path / file).write_text(block)
    number = load_function(f"{tmp_path}/number.py:number", "--reward-function")
    assert number("sums", "<answer>7</answer> no, <answer> 42 </answer>", 42) == {
        "score": 1.0,
        "pred": "42",
    }
    for wrong in (
        "42",
        "<answer>41 or 42</answer>",
        "<answer>42</answer><answer>43</answer>",
        "<answer></answer>",
    ):
        assert number("sums", wrong, 42)["score"] == 0
    assert load_function(f"{tmp_path}/tools.py:add", "--tools")(2.0, 5.0) == "7"
    with pytest.raises(ValueError, match="--reward-function"):
        reward_function("mine")

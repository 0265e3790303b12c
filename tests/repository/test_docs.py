"""The docs as tests: what they name exists, their links lead somewhere, and the README's own
example runs."""

import ast
import doctest
import re
import subprocess
import sys
import tomllib
from fractions import Fraction
from functools import cache
from pathlib import Path
from textwrap import indent
from types import ModuleType

import pytest
import torch
from helpers import ROOT, SCRIPTS, make_args, metrics_of, run_script
from pages import PAGES, TWINS, blocks, split_commands, text
from torch import Tensor

import grpo
from common.attention import block_mask
from common.packing import TokenIndex, pack
from common.rewards import reward_function
from common.tools import load_tools
from common.types import Episode
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
    "hf": {"repo-type", "local-dir"},
    "docker": {"gpus", "shm-size", "network", "ipc", "security-opt", "cap-drop", "privileged"},
    "sbatch": {"signal", "requeue"},
}
# whose first column holds flags that are not ours
TABLES_OF_OTHERS = ("theirs", "original flag", "gone")
OUTSIDE = {"pytest", "torch", "vllm"}  # modules of `python -m` that are not ours

every_page = pytest.mark.parametrize("page", sorted({*PAGES, *TWINS}))


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


@cache
def flags_of_forks(page: str) -> set[str]:
    """Flags that the patches of docs/forks add to scripts; on their own page they exist."""
    if page != "docs/forks.md":
        return set()
    patches = "".join(path.read_text() for path in sorted(ROOT.glob("docs/forks/*.patch")))
    names = re.findall(r"^\+    (\w+): \w.* = ", patches, flags=re.MULTILINE)
    return {name.replace("_", "-") for name in names}


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
        known = flags_of(script) if script in SCRIPTS else all_flags() | flags_of_forks(page)
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


# --- the numbers, pictures and examples of docs/grpo.md -------------------------------------------

GRPO_PAGE = "docs/grpo.md"
GROUP = torch.zeros(4, dtype=torch.int64)  # all answers of the example are one group


def table(first_column: str) -> list[list[str]]:
    """The rows of the table of docs/grpo.md whose head begins so."""
    _, _, rest = text(GRPO_PAGE).partition(f"| {first_column} |")
    rows = []
    for line in rest.splitlines()[2:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def numbers(cells: list[str]) -> list[float]:
    return [float(Fraction(cell)) for cell in cells]


def worked_example() -> tuple[Tensor, Tensor]:
    """Scores and lengths of its answers."""
    rows = table("answer")
    assert [len(answer.split("·")) for answer, *_ in rows] == [int(row[1]) for row in rows]
    scores, lengths = torch.tensor([numbers(row[1:3]) for row in rows]).T.flip(0)
    return scores, lengths


def test_the_advantages_of_the_worked_example():
    scores, _ = worked_example()
    assert (scores.mean().item(), scores.std().item()) == (0.25, 0.5)
    for column, name in enumerate(("group-std", "group-mean", "rloo"), start=3):
        shown = numbers([row[column] for row in table("answer")])
        assert grpo.group_advantages(scores, GROUP, name).tolist() == pytest.approx(shown, abs=1e-4)


def test_the_weights_and_losses_of_the_worked_example():
    scores, lengths = worked_example()
    advantages = grpo.group_advantages(scores, GROUP, "group-std")
    loss, _ = grpo.clipped_loss(torch.ones(4), advantages, 0.2, 0.2, 3.0)  # of a token of each
    names = []
    for name, *cells in table("reduction"):
        names.append(name)
        weights = grpo.token_weights(name, lengths, lengths.sum().item(), 4, 8)
        two, six = weights[:2].tolist()
        expected = [two, six, 2 * two, 6 * six, (weights * lengths * loss).sum().item()]
        assert numbers(cells) == pytest.approx(expected, abs=1e-5), name
    assert names == ["dapo", "grpo", "dr_grpo"]


def test_the_clip_as_a_table():
    args = make_args(grpo)
    for ratio, *cells in table("ratio"):
        expected = []
        for advantage in (1.0, -1.0):
            logprob = torch.tensor(float(ratio)).log().requires_grad_()
            loss, _ = grpo.clipped_loss(
                logprob.exp(),
                torch.tensor(advantage),
                args.clip_low,
                args.clip_high,
                args.dual_clip,
            )
            loss.backward()
            expected += [loss.item(), logprob.grad.item()]
        assert numbers(cells) == pytest.approx(expected), ratio


def test_what_a_python_prompt_answers():
    examples = "\n".join(block for language, block in blocks(GRPO_PAGE) if ">>>" in block)
    test = doctest.DocTestParser().get_doctest(examples, {}, GRPO_PAGE, None, 0)
    assert doctest.DocTestRunner().run(test) == doctest.TestResults(failed=0, attempted=10)


def test_the_packed_row_is_what_packing_and_attention_make():
    (picture,) = [block for _, block in blocks(GRPO_PAGE) if "predicts" in block]
    lines = [line.split() for line in picture.splitlines() if line]
    tokens = lines[0][1:]
    assert tokens == ["p1", "p2", "p3", "a1", "a2", "b1", "b2", "b3"]
    prompt, first, second = [1, 2, 3], [11, 12], [21, 22, 23]
    episodes = []
    for i, response in enumerate((first, second)):
        ones = [1] * len(response)
        episodes.append(Episode(0, i, prompt, response, ones, [0.0] * len(response)))
    (batch,) = pack(episodes, [0, 1], TokenIndex(episodes), budget=64)
    assert batch.position_ids[0].tolist() == [int(x) for x in lines[1][1:9]]
    name_of_id = dict(zip([*prompt, *first, *second], tokens))
    predicted: dict[int, list[str]] = {}
    for place, target in zip(batch.hidden_index.tolist(), batch.targets.tolist()):
        predicted.setdefault(place, []).append(name_of_id[target])
    for place, shown in enumerate(lines[2][1:9]):
        expected = {".": [], "a,b": ["a1", "b1"]}.get(shown, [shown])
        assert predicted.get(place, []) == expected
    visible = block_mask(batch.units, torch.device("cpu")).mask_mod
    places = torch.arange(len(tokens))
    for query, (name, *cells) in enumerate(lines[-len(tokens) :]):
        shown = [cell == "x" for cell in cells[: len(tokens)] if cell in ("x", ".")]
        shown += [False] * (len(tokens) - len(shown))
        assert name == tokens[query]
        assert visible(0, 0, torch.tensor(query), places).tolist() == shown, name


def example_of(first_word: str) -> str:
    """The block of docs/grpo.md whose comment begins so, without the comment."""
    (block,) = [b for _, b in blocks(GRPO_PAGE) if b.startswith(f"# {first_word}")]
    return block.partition("\n")[2]


def changed_grpo(monkeypatch) -> ModuleType:
    """grpo.py with the objective and the advantage that docs/grpo.md adds."""
    source = (ROOT / "grpo.py").read_text()
    branch = '    elif args.objective == "cispo":'
    rest = "        advantages[members] = centered\n"
    assert source.count(branch) == source.count(rest) == 1
    objective = indent(example_of("objective"), " " * 4)
    source = source.replace(branch, objective + branch)
    source = source.replace(rest, indent(example_of("advantage"), " " * 8) + rest)
    module = ModuleType("changed_grpo")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, "changed_grpo.py", "exec"), vars(module))
    return module


def test_the_changes_that_it_shows_work(monkeypatch, tmp_path):
    changed = changed_grpo(monkeypatch)
    scores = torch.tensor([1.0, 0, 0, 0])
    assert changed.group_advantages(scores, GROUP, "group-sign").tolist() == [1, -1, -1, -1]
    namespace: dict = {}
    exec(example_of("test"), namespace)
    namespace["advantages_of"] = lambda scores, groups, advantage: changed.group_advantages(
        torch.tensor(scores), torch.tensor(groups), advantage
    )
    namespace["test_group_sign_has_no_size"]()
    logprobs, zeros = torch.tensor([0.5, -3.0]), torch.zeros(2)
    tokens = changed.Tokens(GROUP[:2], zeros, zeros, zeros, zeros, torch.tensor([1.0, -2.0]))
    args = make_args(grpo, objective="unclipped")
    loss, clipped = changed.policy_loss(logprobs, zeros, tokens, args)
    assert torch.allclose(loss, torch.tensor([-1.0, 2.0]) * logprobs.exp()) and not clipped.any()
    mine = tmp_path / "mine.py"
    mine.write_text(example_of("mine.py"))
    assert load_function(f"{mine}:reward", "--reward-function")("", " 42\n", 42) == 1
    assert load_tools(f"{mine}:double")["double"].function(2.5) == "5"
    reply = load_function(f"{mine}:reply", "--environment")
    assert reply([{"role": "assistant", "content": "It is 42."}], 42) is None
    assert reply([{"role": "assistant", "content": "It is 41."}], 42) == "No. Try again."
    ast.parse(example_of("tracker"))


def test_the_lines_that_it_quotes_are_in_the_script():
    script = (ROOT / "grpo.py").read_text()
    quoted = [row[2].partition("`")[2].partition("`")[0] for row in table("what")[:3]]
    assert [line for line in quoted if line.removesuffix("...)") not in script] == []
    assert all(line.startswith("means.") for line in quoted) and len(quoted) == 3


# --- README's blocks run --------------------------------------------------------------------------


def code_of(page: str) -> list[tuple[str, list[str]]]:
    """(language, lines without their comments) of every fenced block."""
    found = []
    for language, content in blocks(page):
        lines = [re.sub(r"(^|\s+)# .*$", "", line) for line in content.splitlines()]
        found.append((language, [line for line in lines if line]))
    return found


@pytest.mark.parametrize("page", TWINS)
def test_a_chinese_page_has_the_same_code(page):
    """To the byte, but for comments."""
    assert code_of(page) == code_of(TWINS[page])


def test_chinese_pages_are_found_and_their_comments_are_chinese():
    assert {"docs/zh/curiosity.md", "docs/zh/recipes.md", "docs/zh/trouble.md"} <= TWINS.keys()
    comments = []
    for page in TWINS:
        for _, content in blocks(page):
            if "<<" not in content:  # what makes a file is quoted as it is
                comments += re.findall(r"(?:^|\s)# (.*)$", content, flags=re.MULTILINE)
    assert len(comments) >= 3
    assert [x for x in comments if not re.search(r"[\u4e00-\u9fff]", x) and " " in x] == []


@pytest.mark.parametrize("page", ["README.md", "README_zh.md"])
def test_the_readme_says_how_large_the_project_is(page):
    """Lines of the scripts and of common/, within 10 %."""
    for name in (*SCRIPTS, "common/"):
        files = [ROOT / name] if name in SCRIPTS else [*(ROOT / name).rglob("*.py")]
        lines = sum(len(file.read_text().splitlines()) for file in files)
        (stated,) = re.findall(rf"`{re.escape(name)}`\s+([\d,]+)", text(page))
        stated = int(stated.replace(",", ""))
        assert abs(stated - lines) < 0.1 * lines, f"{page}: {name} has {lines} lines"


def calls(node: ast.AST) -> list[ast.Call]:
    """In the order of the text."""
    found = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    return sorted(found, key=lambda call: (call.lineno, call.col_offset))


def is_shortened(short: ast.Call, call: ast.Call) -> bool:
    """The same function, with some of the arguments in their order; what is left out may be `...`.
    Arguments that are calls themselves are compared on their own."""
    if ast.unparse(short.func) != ast.unparse(call.func):
        return False
    arguments = iter([ast.unparse(argument) for argument in call.args])
    kept = [
        ast.unparse(argument)
        for argument in short.args
        if not isinstance(argument, ast.Call) and ast.unparse(argument) != "..."
    ]
    return all(argument in arguments for argument in kept)


def not_in_loop(excerpt: str, script: str) -> list[str]:
    """Calls and targets of an excerpt that the main of a script does not have in this order."""
    (main,) = [node for node in tree(ROOT / script).body if getattr(node, "name", "") == "main"]
    remaining = iter(calls(main))
    targets = [
        ast.unparse(target)
        for node in ast.walk(main)
        for target in (node.targets if isinstance(node, ast.Assign) else [])
    ]
    parsed = ast.parse(excerpt)
    wrong = [
        ast.unparse(short)
        for short in calls(parsed)
        if not any(is_shortened(short, call) for call in remaining)
    ]
    for node in ast.walk(parsed):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) not in targets:
            wrong.append(ast.unparse(node.targets[0]))
    return wrong


def test_the_loop_of_the_readme_is_that_of_the_script():
    (excerpt,) = [content for language, content in blocks("README.md") if language == "python"]
    assert len(calls(ast.parse(excerpt))) >= 8
    assert not_in_loop(excerpt, "grpo.py") == []
    renamed = excerpt.replace("packer.attempt(backward", "packer.attempt(forward")
    assert not_in_loop(renamed, "grpo.py")
    reordered = excerpt.replace("sync_engine(engine, policy, step)", "optimizer.step(lr)")
    assert not_in_loop(reordered, "grpo.py")


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
    """As pasted, but for the number of steps and samples, and an engine that every machine has."""
    folder, words = example
    assert words[:2] == ["python", "grpo.py"]
    arguments = [
        re.sub(r"^(rows\.jsonl|rewards\.py:.*|runs/mine)$", rf"{folder}/\1", word)
        for word in words[1:]
    ]
    smaller = {"--total-steps": "1", "--prompts-per-step": "8", "--max-response-tokens": "64"}
    for flag, value in smaller.items():
        arguments[arguments.index(flag) + 1] = value
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

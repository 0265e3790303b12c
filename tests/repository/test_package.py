"""pyproject.toml names all that `pip install` has to take along; what is said without packages; the
image of the Dockerfile."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers import ROOT, SCRIPTS
from pages import blocks, split_commands

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]


def test_all_scripts_are_modules_of_the_package():
    assert sorted(SETUPTOOLS["py-modules"]) == [Path(script).stem for script in SCRIPTS]


def test_all_data_files_are_in_the_package():
    """Tables, pages and policies that the code reads; papers/ has its page besides."""
    data = SETUPTOOLS["package-data"]
    missing = []
    for folder in ("common", "papers"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_dir() or path.suffix in (".py", ".pyc", ".md"):
                continue
            in_assets = path.parent.parent == ROOT / "common/assets" and data["common.assets"]
            if not in_assets and f"*{path.suffix}" not in data["*"]:
                missing.append(str(path.relative_to(ROOT)))
    assert missing == []


def test_the_package_brings_no_packages_of_its_own():
    """They depend on the machine: requirements*.txt."""
    assert PYPROJECT["project"]["dependencies"] == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_torch_a_script_says_in_a_line_what_to_install(script):
    """-S: an interpreter without its packages."""
    done = subprocess.run([sys.executable, "-S", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{sys.executable} has no torch: ./with python {script} ")
    assert [*re.findall(r"requirements\S*\.txt", line)] == [
        "requirements.txt",
        "requirements-cpu.txt",
        "requirements-v100.txt",
    ]


def programs() -> list[str]:
    """What is called by python -m, and needs packages."""
    modules = []
    for folder in ("common", "papers"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "call_program(" in path.read_text() and path.stem != "flags":
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                modules.append(module.removesuffix(".__main__"))
    return modules


@pytest.mark.parametrize("module", programs())
def test_without_its_packages_a_program_says_in_a_line_what_to_install(module):
    prepares_data = module.startswith(("common.prepare.", "papers."))
    package = "pyarrow" if prepares_data else "torch"
    command = [sys.executable, "-S", "-m", module]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"{sys.executable} has no {package}: ./with python -m {module} runs in an environment"
    )


def test_the_docs_run_the_image_of_the_dockerfile():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    (folder,) = [line.split()[1] for line in lines if line.startswith("WORKDIR")]
    (source,) = [line.split()[1] for line in lines if line.startswith("COPY")]
    assert (ROOT / source).is_file() and f"/tmp/{source}" in "".join(lines)
    (block,) = [block for _, block in blocks("docs/scaling.md") if "docker build" in block]
    build, run = split_commands(block)
    image = build[build.index("--tag") + 1]
    assert build[-1] == "." and f"$PWD:{folder}" in run
    inside = run[run.index(image) + 1 :]
    assert inside[0] == "torchrun" and (ROOT / inside[-1]).is_file()

"""pyproject.toml names all that `pip install` has to take along."""

import tomllib
from pathlib import Path

from helpers import ROOT, SCRIPTS

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

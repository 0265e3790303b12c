"""Virtual environments for packages that do not stand beside ours, made by slow tests."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest


def python_with(requirement: str, folder: Path, beside_ours: bool = False) -> Path:
    """The Python of a virtual environment that has this package. It is made in `folder`, or in that
    of TEST_VENVS, where later sessions find it. The test is skipped if no index has the package.

    requirement: such as "verifiers==0.4.0". beside_ours: our packages are there, too.
    """
    root = Path(os.environ.get("TEST_VENVS", folder)).absolute()
    venv = root / requirement
    python = venv / "bin" / "python"
    if (venv / "complete").exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
    if beside_ours:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        ours = sysconfig.get_path("purelib")
        (venv / "lib" / version / "site-packages" / "ours.pth").write_text(f"{ours}\n")
    install = [python, "-m", "pip", "install", "--quiet", requirement]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        pytest.skip(f"pip install {requirement}: {reason}")
    (venv / "complete").touch()
    return python

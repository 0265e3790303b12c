"""Ends a program with one line if the packages it needs are not installed: one of them is looked
for. Programs import this before any package."""

import sys
from importlib.util import find_spec

spec = getattr(sys.modules["__main__"], "__spec__", None)  # of python -m; None for a script
program = f"-m {spec.name.removesuffix('.__main__')}" if spec else sys.argv[0]
# what prepares data needs no torch
package = "pyarrow" if program.startswith(("-m common.prepare", "-m papers.")) else "torch"
if find_spec(package) is None:
    sys.exit(
        f"{sys.executable} has no {package}: ./with python {program} runs in an environment that "
        "has it; in one of your own: pip install -r requirements.txt (without a GPU "
        "requirements-cpu.txt, for Volta requirements-v100.txt)"
    )

"""Ends a script with one line if torch is missing. Scripts import it before torch."""

import sys
from importlib.util import find_spec

if find_spec("torch") is None:
    sys.exit(
        f"{sys.executable} has no torch: ./with python {sys.argv[0]} runs in an environment that "
        "has it; in one of your own: pip install -r requirements.txt (without a GPU "
        "requirements-cpu.txt, for Volta requirements-v100.txt)"
    )

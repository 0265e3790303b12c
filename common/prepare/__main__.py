"""python -m common.prepare: the programs of this folder, each with its first command."""

import ast
import sys
from pathlib import Path


def main() -> None:
    for file in sorted(Path(__file__).parent.glob("[!_]*.py")):
        doc = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
        title, _, commands = doc.partition("\n\n")
        if commands.startswith("    python -m "):
            print(" ".join(title.split()))
            print(commands.partition("\n")[0])
    if set(sys.argv[1:]) - {"-h", "--help"}:  # common.prepare gsm8k, for common.prepare.gsm8k
        raise SystemExit("python -m common.prepare takes no arguments; its programs are above")


if __name__ == "__main__":
    main()

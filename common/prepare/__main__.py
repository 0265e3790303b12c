"""python -m common.prepare: the programs of this folder, each with its first command."""

import ast
import sys
from pathlib import Path


def main() -> None:
    for file in sorted(Path(__file__).parent.glob("[!_]*.py")):
        doc = ast.get_docstring(ast.parse(file.read_text())) or ""
        title, _, commands = doc.partition("\n\n")
        if commands.startswith("    python -m "):
            print(" ".join(title.split()))
            print(commands.partition("\n")[0])
    # common.prepare gsm8k, for common.prepare.gsm8k; --help is the list
    if len(sys.argv) > 1 and sys.argv[1] != "--help":
        raise SystemExit("python -m common.prepare takes no arguments; its programs are above")


if __name__ == "__main__":
    main()

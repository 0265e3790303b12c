"""The pages of the repository, and what stands in them: code blocks, and the commands of these."""

import re
import shlex
from functools import cache

from helpers import ROOT

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("papers/*/README.md")]
PAGES += [ROOT / "tests" / "README.md", *ROOT.glob("results/**/README.md")]
PAGES = sorted(str(path.relative_to(ROOT)) for path in PAGES)
# {Chinese page: the English one whose commands it has}
TWINS = {"README_zh.md": "README.md"}
TWINS |= {f"docs/zh/{path.name}": f"docs/{path.name}" for path in ROOT.glob("docs/zh/*.md")}


@cache
def text(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, content) of every fenced block."""
    return re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text(page), flags=re.MULTILINE | re.DOTALL)


def without_heredocs(script: str) -> str:
    return re.sub(r"<<'?(\w+)'?([^\n]*)\n.*?\n\1$", r"\2", script, flags=re.DOTALL | re.MULTILINE)


def split_commands(script: str) -> list[list[str]]:
    """The simple commands of a shell text as lists of words; loops and assignments are looked
    through."""
    script = re.sub(r"\$\([^()]*\)", "SUBSTITUTED", without_heredocs(script).replace("\\\n", " "))
    commands: list[list[str]] = []
    for line in script.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|"):
                commands += [words] if words else []
                words = []
            elif words or (word not in ("do", "done") and not re.match(r"\w+=", word)):
                words.append(word)
    return commands

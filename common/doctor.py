"""python -m common.doctor: what is installed and what runs here, to paste into an issue.

Without this host's and user's names, and without values of the environment.
"""

import argparse
import getpass
import os
import platform
import re
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

# nothing of ours is imported: it may be what does not work
ROOT = Path(__file__).resolve().parents[1]
SECONDS = 50  # for an answer
ASKED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def main() -> None:
    """The command, which takes no argument; what it prints is of a form to paste into an issue."""
    title = __doc__.partition("\n")[0]
    argparse.ArgumentParser(prog="python -m common.doctor", description=title).parse_args()
    with ThreadPoolExecutor(len(ASKED)) as threads:
        for what, answer in zip(ASKED, threads.map(lambda item: asked(**item), ASKED.values())):
            print(f"{what}: {answer}", flush=True)


def asked(program: str, remedy: str = "") -> str:
    """The last line that the program says, or why it fails with the remedy."""
    command = [sys.executable, "-c", program]
    failed = ""
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=SECONDS
        )
        *_, last = [
            "no word",
            *filter(str.strip, (done.stderr if done.returncode else done.stdout).splitlines()),
        ]
        failed = f" (exit code {done.returncode}) {remedy}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        last = f"no answer within {SECONDS} s (is the machine busy?) {remedy}"
    return anonymous(last) + failed


def anonymous(text: str) -> str:
    """Of addresses nothing, of paths the last part; no name of this host or user."""
    home, user = os.path.expanduser("~"), ""
    with suppress(KeyError, OSError):  # a container may not know its user
        user = getpass.getuser()
    if home != "/":
        text = text.replace(home, "~")
    text = re.sub(r"(/[^/\s'\":]+)+/", ".../", re.sub(r"\w+://\S+", "URL", text))
    for name, word in {platform.node(): "HOST", user: "USER"}.items():
        text = re.sub(rf"(?<!\w){re.escape(name or chr(0))}(?!\w)", word, text)
    return text


if __name__ == "__main__":
    main()

"""Rows for the example games, and conversations in which they are played at random, for sft.py to learn their form.

python docs/examples/play.py guess data/guess        # or: grid data/grid
"""

import json
import random
from pathlib import Path
from typing import Literal

import tyro
from grid import SIDE, Grid
from guess import LAST, Guess
from tyro.conf import Positional

CELLS = [[x, y] for x in range(SIDE) for y in range(SIDE)]
# Of each game: its class, the tools in few words (a small model reads them anew in every game), the task.
GAMES = {
    "guess": (Guess, "guess(number)", "Guess my number."),
    "grid": (Grid, "up, down, left, right", "Walk to the goal."),
}


def new_row(name: str) -> dict:
    _, tools, task = GAMES[name]
    extra = {"secret": random.randint(1, LAST)}
    if name == "grid":
        extra = dict(zip(["start", "goal"], random.sample(CELLS, 2)))
    system = {"role": "system", "content": f"<tools>{tools}</tools>"}
    return {"data_source": name, "prompt": [system, {"role": "user", "content": task}], "extra_info": extra}


def random_call(name: str) -> tuple[str, dict]:
    """A method and its arguments."""
    if name == "guess":
        return "guess", {"number": random.randint(1, LAST)}
    return random.choice(["up", "down", "left", "right"]), {}


def played(name: str, row: dict) -> dict:
    """A conversation in which the calls are right in form, and no more."""
    game, (system, user) = GAMES[name][0](), row["prompt"]
    messages = [system, user | {"content": user["content"] + game.reset(**row)}]
    while not game.done:
        method, arguments = random_call(name)
        call = json.dumps({"name": method, "arguments": arguments}, separators=(",", ":"))
        messages.append({"role": "assistant", "content": f"<tool_call>{call}</tool_call>"})
        messages.append({"role": "tool", "content": getattr(game, method)(**arguments)})
    return {"messages": messages[:-1]}  # the last reply is not answered


def main(game: Positional[Literal["guess", "grid"]], folder: Positional[Path], rows: int = 2000) -> None:
    """Write them. rows: of training."""
    random.seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    files = {"train": [new_row(game) for _ in range(rows)], "test": [new_row(game) for _ in range(rows // 8)]}
    files["demonstrations"] = [played(game, row) for row in files["train"]]
    for name, records in files.items():
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(text)
        print(folder / f"{name}.jsonl")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)

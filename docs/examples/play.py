"""Rows for the example games, and conversations in which they are played at random, for sft.py to learn their form.

python docs/examples/play.py guess data/guess        # or: grid data/grid
"""

import json
import random
from pathlib import Path
from typing import Literal

import tyro
from grid import SIDE, STEPS, Grid
from guess import ABOVE, Guess
from tyro.conf import Positional

# The tools stand in the rows' own system message, in few words: a small model reads them again with every turn.
GAMES = {
    "guess": (Guess, "Guess my number.", "guess", "number", lambda: random.randint(0, ABOVE)),
    "grid": (Grid, "Walk to the goal.", "move", "direction", lambda: random.choice(list(STEPS))),
}


def new_row(name: str) -> dict:
    _, task, tool, argument, _ = GAMES[name]
    system = f'<tools>{{"name": "{tool}", "parameters": ["{argument}"]}}</tools>'
    extra = {"secret": random.randint(0, ABOVE)}
    if name == "grid":
        extra = dict(zip(["start", "goal"], random.sample([[x, y] for x in range(SIDE) for y in range(SIDE)], 2)))
    prompt = [{"role": "system", "content": system}, {"role": "user", "content": task}]
    return {"data_source": name, "prompt": prompt, "extra_info": extra}


def played(name: str, row: dict, turns: int) -> dict:
    """A conversation in which the calls are right in form, and no more."""
    kind, _, tool, argument, choose = GAMES[name]
    game, (system, user) = kind(), row["prompt"]
    messages = [system, user | {"content": user["content"] + game.reset(**row)}]
    for _ in range(turns):
        value = choose()
        call = {"name": tool, "arguments": {argument: value}}
        messages.append({"role": "assistant", "content": f"<tool_call>{json.dumps(call)}</tool_call>"})
        answer = getattr(game, tool)(value)
        if game.done:
            break
        messages.append({"role": "tool", "content": answer})
    return {"messages": messages[: -1 if messages[-1]["role"] == "tool" else None]}


def main(
    game: Positional[Literal["guess", "grid"]], folder: Positional[Path], rows: int = 2000, turns: int = 5
) -> None:
    """Write them. rows: of training; turns: of the longest game."""
    random.seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    files = {"train": [new_row(game) for _ in range(rows)], "test": [new_row(game) for _ in range(rows // 8)]}
    files["demonstrations"] = [played(game, row, turns) for row in files["train"]]
    for name, records in files.items():
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(text)
        print(folder / f"{name}.jsonl")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)

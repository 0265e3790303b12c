"""Rows for the example games, and conversations in which a mediocre player plays them, for sft.py
to learn from.

python docs/examples/play.py guess data/guess        # or: grid data/grid
"""

import json
import random
from itertools import permutations, product
from pathlib import Path
from typing import Literal

import tyro
from grid import SIDE, Grid
from guess import LAST, Guess
from tyro.conf import Positional

CELLS = [list(cell) for cell in product(range(SIDE), repeat=2)]
# Of each game: its class, the tools in few words (a small model reads them anew in every game), the
# task, and all that there is to play.
GAMES = {
    "guess": (Guess, "guess(n)", "Guess my number.", [{"secret": n} for n in range(1, LAST + 1)]),
    "grid": (
        Grid,
        "up, down, left, right",
        "Walk to the goal.",
        [{"start": start, "goal": goal} for start, goal in permutations(CELLS, 2)],
    ),
}


def to_row(name: str, extra: dict) -> dict:
    _, tools, task, _ = GAMES[name]
    prompt = [
        {"role": "system", "content": f"<tools>{tools}</tools>"},
        {"role": "user", "content": task},
    ]
    return {"data_source": name, "prompt": prompt, "extra_info": extra}


def legal(game: Guess | Grid) -> list[tuple[str, dict]]:
    """All moves: methods and their arguments."""
    if isinstance(game, Guess):
        return [("guess", {"n": n}) for n in range(1, LAST + 1)]
    return [(way, {}) for way in ("up", "down", "left", "right")]


def sensible(game: Guess | Grid) -> list[tuple[str, dict]]:
    """Those that may be right, or that come nearer to the goal."""
    if isinstance(game, Guess):
        return [("guess", {"n": n}) for n in range(game.low, game.high + 1)]
    right, up = (goal - at for goal, at in zip(game.goal, game.at))
    ways = {"right": right, "left": -right, "up": up, "down": -up}
    return [(way, {}) for way, cells in ways.items() if cells > 0]


def played(name: str, row: dict, skill: float) -> dict:
    """A conversation in which the calls are right in form, and sensible as often as `skill`
    says."""
    game, (system, user) = GAMES[name][0](), row["prompt"]
    messages = [system, user | {"content": user["content"] + game.reset(**row)}]
    while not game.done:
        method, arguments = random.choice(
            sensible(game) if random.random() < skill else legal(game)
        )
        call = json.dumps({"name": method, "arguments": arguments}, separators=(",", ":"))
        messages.append({"role": "assistant", "content": f"<tool_call>{call}</tool_call>"})
        messages.append({"role": "tool", "content": getattr(game, method)(**arguments)})
    return {"messages": messages[:-1]}  # the last reply is not answered


def main(
    game: Positional[Literal["guess", "grid"]],
    folder: Positional[Path],
    rows: int = 6000,
    skill: float = 0.9,
) -> None:
    """Write them. rows: of training; skill: the probability that the player thinks before a
    move."""
    random.seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    games = GAMES[game][-1]
    files = {"train": [to_row(game, random.choice(games)) for _ in range(rows)]}
    files["test"] = [to_row(game, extra) for extra in games]  # all there are
    files["demonstrations"] = [played(game, row, skill) for row in files["train"]]
    for name, records in files.items():
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(text)
        print(folder / f"{name}.jsonl")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)

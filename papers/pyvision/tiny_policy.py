r"""Rebuild the embedded `tiny-vl-python` policy from nothing: the tiny-vl that looks by programs.

    python -m papers.pyvision.tiny_policy --out common/assets/tiny-vl-python

    user:      <image_clue_0><image></image_clue_0>Which digit is on the white tile?
               Answer in \boxed{}.
    assistant: I look at the tile.
               <code>
               ```python
               tile = image_clue_0.crop((116, 60, 164, 108))
               plt.figure(figsize=(2, 2))
               plt.imshow(tile)
               plt.show()
               ```
               </code>
    user:      <tool_response>
               <interpreter>Text Result:

               Image Result:
               <image_clue_1><image></image_clue_1></interpreter>

               </tool_response>
    assistant: I can read it.
               <answer>
               \boxed{7}
               </answer>

Most traces guess at once; of the programs some aim badly, some do not run, some show nothing. What
pays is left for reinforcement learning to find out. Rows, tags and observations are PyVision-RL's
(arXiv 2602.20739).
"""

import base64
import json
import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import common.packages  # noqa: F401, one line if a package is missing

from common.assets.build.mosaic import CELLS, SIDE, Scene, center, other_cell, scenes
from common.assets.build.tiny_vl import Args, build
from common.assets.build.tiny_vl_python import QUESTION
from common.data.protocols import Code
from common.flags import call_program
from common.sandbox.interpreter import Session

LOOK = "I look at the tile."
AGAIN = "The tile is not here, I look elsewhere."
REPAIR = "I write it again."
READ = "I can read it.\n<answer>\n\\boxed{%d}\n</answer>"
GUESS = "I can only guess.\n<answer>\n\\boxed{%d}\n</answer>"
PROGRAM = (
    "tile = image_clue_0.crop((%d, %d, %d, %d))\nplt.figure(figsize=(2, 2))\n"
    "plt.imshow(tile)\nplt.show()"
)
# no name, no syntax, no figure
BUGS = (("image_clue_0", "image_clue"), ("))", ")"), ("plt.show()", "plt.close()"))
HALF = 24  # pixels: half the side of what is cut out
GUESS_AT_ONCE = 0.5  # probability to guess without looking
GUESS_LATER = 0.3  # probability to guess after a program that did not help
AIM = 0.85  # probability that a program looks at the tile
BUG = 0.4  # probability that it has a mistake
EXPERT = {"guess": 0.0, "aim": 1.0, "bug": 0.0}
MAX_LOOKS = 3
TRACES = 4000


def program(cell: tuple[int, int]) -> str:
    x, y = (int(SIDE * center(index)) for index in cell)
    return PROGRAM % (x - HALF, y - HALF, x + HALF, y + HALF)


def trace(
    scene: Scene, rng: random.Random, guess: float, aim: float, bug: float
) -> tuple[list[dict], list[bytes]]:
    """(messages, encoded pictures). guess: probability to guess without looking; aim: to look at
    the tile; bug: that a program has a mistake."""
    messages = [{"role": "user", "content": QUESTION}]
    pictures = [scene.png]
    session = Session(None)
    frames = [base64.b64encode(scene.png)]
    session.bind({"name": "image_clue_0", "kind": "image", "frames": frames, "seen": 1})
    cell = None  # the cell that was looked at last
    sentence = LOOK
    for num_looks in range(MAX_LOOKS + 1):
        patience = rng.random()
        luck = rng.random()
        mistake = rng.random()
        gives_up = num_looks == MAX_LOOKS or patience < (GUESS_LATER if num_looks else guess)
        if cell == scene.cell or gives_up:
            break
        target = scene.cell if luck < aim else other_cell(scene.cell, rng)
        code = program(target)
        if mistake < bug:
            correct, wrong = rng.choice(BUGS)
            code = code.replace(correct, wrong, 1)
        printed, error = session.block(code)
        text = f"Execution error: {error}" if error else printed
        observation = Code.content(
            text, ["<image>"] * len(session.drawn), num_pictures=len(pictures)
        )
        turn = f"{sentence}\n<code>\n```python\n{code}\n```\n</code>"
        messages.append({"role": "assistant", "content": turn})
        messages.append({"role": "user", "content": "".join(observation)})
        pictures += session.drawn
        if session.drawn:
            cell = target
            sentence = AGAIN
        else:
            cell = None
            sentence = REPAIR
    if cell == scene.cell:
        answer = READ % scene.digit
    else:
        answer = GUESS % rng.randrange(10)
    return [*messages, {"role": "assistant", "content": answer}], pictures


def traces(
    seed: int, guess: float = GUESS_AT_ONCE, aim: float = AIM, bug: float = BUG
) -> Iterator[tuple[list[dict], list[bytes]]]:
    rng = random.Random(f"traces {seed}")
    for scene in scenes(seed):
        yield trace(scene, rng, guess, aim, bug)


def corpus() -> Iterator[str]:
    """The texts between special tokens of some traces, and all numbers of pixels."""
    numbers = [int(SIDE * center(index)) + side for index in range(CELLS) for side in (-HALF, HALF)]
    yield from [f"{number}" for number in numbers] * 60
    for messages, _ in islice(traces(0), 60):
        for message in messages:
            yield f"{message['role']}\n"
            for text in message["content"].split("<image>"):
                if text:
                    yield text


def write_traces(folder: Path, rows: int, seed: int, **chances: float) -> None:
    """release.json and images/, as PyVision's cold start data are published."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    records = []
    for i, (messages, pictures) in enumerate(islice(traces(seed, **chances), rows)):
        paths = [f"images/{i}-{k}.png" for k in range(len(pictures))]
        for path, picture in zip(paths, pictures):
            (folder / path).write_bytes(picture)
        records.append({"conversations": messages, "images": paths})
    (folder / "release.json").write_text(json.dumps(records))


if __name__ == "__main__":
    flags = call_program(Args, "papers.pyvision.tiny_policy", __doc__)
    build(flags, sys.modules[__name__], "tiny-vl-python")

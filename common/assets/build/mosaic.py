"""Mosaics of coloured cells. One cell holds a white tile with a digit that is too small to be
read unless it is enlarged.

Red grows to the right and green downwards, so that a vision tower as small as tiny-vl's learns in
minutes where a cell is.
"""

import io
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

import pyarrow as pa
from PIL import Image

from common.prepare.writing import write_splits

CELLS = 8  # in a row and in a column of a mosaic
SIDE = 448  # pixels of a mosaic
INNER = range(1, CELLS - 1)  # rows and columns for the tile: the edge cuts no crop around it
TILE = 44  # pixels: side of the tile
DOT = 3  # pixels: side of one of the 5 x 7 dots of its digit
EVAL_ROWS = 512
RL_ROWS = 2048
# of PixelLimits; tiny_vl.py passes two of them to sft.py as flags
LIMITS = {"min_pixels": 3136, "max_pixels": 12_544, "max_frame_pixels": 12_544, "cell": 28}
FONT = """
.###. ..#.. .###. .###. ...#. ##### ..##. ##### .###. .###.
#...# .##.. #...# #...# ..##. #.... .#... ....# #...# #...#
#..## ..#.. ....# ....# .#.#. ####. #.... ...#. #...# #...#
#.#.# ..#.. ..##. ..##. #..#. ....# ####. ..#.. .###. .####
##..# ..#.. .#... ....# ##### ....# #...# .#... #...# ....#
#...# ..#.. #.... #...# ...#. #...# #...# .#... #...# ...#.
.###. .###. ##### .###. ...#. .###. .###. .#... .###. .##..
"""


@dataclass
class Scene:
    png: bytes
    cell: tuple[int, int]  # column, row of the tile
    digit: int


@cache
def glyph(digit: int) -> Image.Image:
    dots = bytearray()
    for line in FONT.strip().split("\n"):
        for dot in line.split()[digit]:
            dots.append(255 if dot == "#" else 0)
    return Image.frombytes("L", (5, 7), bytes(dots)).resize(
        (5 * DOT, 7 * DOT), Image.Resampling.NEAREST
    )


def scenes(seed: int) -> Iterator[Scene]:
    """Endless, and the same for the same seed."""
    rng = random.Random(f"scenes {seed}")
    slope = [40 + 20 * i for i in range(CELLS)]
    # black and white stand in the palette behind the cells' colors: such a PNG is written fast
    white = CELLS**2
    black = CELLS**2 + 1
    while True:
        cell = (rng.choice(INNER), rng.choice(INNER))
        digit = rng.randrange(10)
        palette = []
        for green in slope:
            for red in slope:
                palette += [red, green, rng.randrange(60, 120)]
        palette += [255, 255, 255, 0, 0, 0]
        picture = Image.frombytes("P", (CELLS, CELLS), bytes(range(CELLS**2))).resize((SIDE, SIDE))
        picture.putpalette(bytes(palette))
        x, y = (int(SIDE * center(i)) for i in cell)
        picture.paste(white, (x - TILE // 2, y - TILE // 2, x + TILE // 2, y + TILE // 2))
        picture.paste(black, (x - 5 * DOT // 2, y - 7 * DOT // 2), glyph(digit))
        file = io.BytesIO()
        picture.save(file, "PNG")
        yield Scene(file.getvalue(), cell, digit)


def write_rows(folder: Path, prompt: str, draw: Callable[[int], Iterator[Scene]] = scenes) -> None:
    """train.parquet and eval.parquet in verl's format: the same prompt for each scene of
    `draw(seed)`."""
    tables = {}
    for split, seed, num_rows in (("train", 1, RL_ROWS), ("eval", 2, EVAL_ROWS)):
        rows = []
        for i, scene in enumerate(islice(draw(seed), num_rows)):
            row = {
                "data_source": "tiny-vl",
                "prompt": [{"role": "user", "content": prompt}],
                "images": [{"bytes": scene.png, "path": None}],
                "ability": "vision",
                "reward_model": {"style": "rule", "ground_truth": str(scene.digit)},
                "extra_info": {"index": i, "split": split, "cell": list(scene.cell)},
            }
            rows.append(row)
        tables[split] = pa.Table.from_pylist(rows)
    write_splits(folder, tables)


def center(index: int) -> float:
    return (index + 0.5) / CELLS


def other_cell(cell: tuple[int, int], rng: random.Random) -> tuple[int, int]:
    return rng.choice([(x, y) for x in INNER for y in INNER if (x, y) != cell])

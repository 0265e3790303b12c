"""Mosaics of coloured cells, one of them a white tile with a digit that is too small to be read
where it is shown.

Red says how far right a place is, green how far down: so a tower as small as tiny-vl's learns in
minutes to tell places.
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

CELLS, SIDE = 8, 448  # a mosaic of 8 x 8 cells on 448 x 448 pixels
INNER = range(1, CELLS - 1)  # rows and columns for the tile: no crop around it is cut by the edge
TILE, DOT = 44, 3  # pixels: side of the tile, and of one of the 5 x 7 dots of its digit
EVAL_ROWS, RL_ROWS = 512, 2048
# flags of the scripts
LIMITS = {"min_pixels": 3136, "max_pixels": 12_544, "max_frame_pixels": 12_544}
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
    dots = bytes(
        255 * (dot == "#") for line in FONT.strip().split("\n") for dot in line.split()[digit]
    )
    return Image.frombytes("L", (5, 7), dots).resize((5 * DOT, 7 * DOT), Image.Resampling.NEAREST)


def scenes(seed: int) -> Iterator[Scene]:
    """Without end, the same for a seed."""
    rng = random.Random(f"scenes {seed}")
    slope = [40 + 20 * i for i in range(CELLS)]
    while True:
        cell, digit = (rng.choice(INNER), rng.choice(INNER)), rng.randrange(10)
        colors = bytes(v for y in slope for x in slope for v in (x, y, rng.randrange(60, 120)))
        # in the palette behind the cells' colors: such a PNG is soon written
        white, black = CELLS**2, CELLS**2 + 1
        picture = Image.frombytes("P", (CELLS, CELLS), bytes(range(CELLS**2))).resize((SIDE, SIDE))
        picture.putpalette(colors + bytes([255] * 3 + [0] * 3))
        x, y = (int(SIDE * center(i)) for i in cell)
        picture.paste(white, (x - TILE // 2, y - TILE // 2, x + TILE // 2, y + TILE // 2))
        picture.paste(black, (x - 5 * DOT // 2, y - 7 * DOT // 2), glyph(digit))
        file = io.BytesIO()
        picture.save(file, "PNG")
        yield Scene(file.getvalue(), cell, digit)


def write_rows(folder: Path, prompt: str, draw: Callable[[int], Iterator[Scene]] = scenes) -> None:
    """train.parquet and eval.parquet in verl's format, the same prompt for each scene that `draw`
    has of a seed."""
    tables = {}
    for split, seed, rows in (("train", 1, RL_ROWS), ("eval", 2, EVAL_ROWS)):
        records = [
            {
                "data_source": "tiny-vl",
                "prompt": [{"role": "user", "content": prompt}],
                "images": [{"bytes": scene.png, "path": None}],
                "ability": "vision",
                "reward_model": {"style": "rule", "ground_truth": str(scene.digit)},
                "extra_info": {"index": i, "split": split, "cell": list(scene.cell)},
            }
            for i, scene in enumerate(islice(draw(seed), rows))
        ]
        tables[split] = pa.Table.from_pylist(records)
    write_splits(folder, tables)


def center(index: int) -> float:
    return (index + 0.5) / CELLS


def other_cell(cell: tuple[int, int], rng: random.Random) -> tuple[int, int]:
    return rng.choice([(x, y) for x in INNER for y in INNER if (x, y) != cell])

"""python -m common.look FILE|RUN: a data file in words, a dump as a page, a run folder as curves and pages.

python -m common.look data.parquet [--tokenizer NAME] [--rows 2]    columns, sources, prompt lengths, some rows
python -m common.look runs/NAME                                     curves.png, a page for each dump without one
python -m common.look runs/NAME/rollouts/step_000012.parquet        its page anew
"""

import json
from pathlib import Path

import pyarrow.parquet as pq
import tyro

from common.files import refuse
from common.look.curves import plot_curves
from common.look.page import write_page
from common.look.show import show, tokenizer_of


def look(path: tyro.conf.Positional[Path], tokenizer: str | None = None, rows: int = 2) -> None:
    """Show what a run has left, or what is in a data file.

    Args:
        path: a data file, the folder of a run, or a dump in its rollouts/
        tokenizer: name or folder; of a data file, to count tokens; of a dump, if its run's model is gone
        rows: of a data file, how many are printed
    """
    if path.is_dir():
        look_at_run(path, tokenizer)
    elif is_dump(path):
        draw_pages([path], path.parent.parent, tokenizer)
    else:
        show(path, tokenizer, rows)


def look_at_run(run: Path, tokenizer: str | None) -> None:
    metrics, dumps = run / "metrics.jsonl", sorted((run / "rollouts").glob("step_??????.parquet"))
    refuse(not metrics.is_file() and not dumps, f"{run}: no metrics.jsonl and no rollouts/ in it, so no run")
    if metrics.is_file():
        plot_curves(run)
        print(run / "curves.png" if (run / "curves.png").is_file() else f"{metrics}: nothing to draw so far")
    draw_pages([dump for dump in dumps if not dump.with_suffix(".html").exists()], run, tokenizer)


def is_dump(path: Path) -> bool:
    """Does a file have the columns of common/data/dumps.py?"""
    try:
        return path.suffix == ".parquet" and {"response_ids", "loss_mask"} <= set(pq.read_schema(path).names)
    except (OSError, ValueError):  # `show` says what is wrong with it
        return False


def draw_pages(dumps: list[Path], run: Path, tokenizer: str | None) -> None:
    """Their pages beside them, decoded with the tokenizer of the run's model."""
    if not dumps:
        return
    name, config = tokenizer, run / "config.json"
    if name is None:
        refuse(not config.is_file(), f"{run}: no config.json that names the model; give --tokenizer")
        name = json.loads(config.read_text())["args"]["model"]
    decoder = tokenizer_of(name)
    for dump in dumps:
        write_page(dump, decoder)
        print(dump.with_suffix(".html"))


if __name__ == "__main__":
    tyro.cli(look, description=__doc__)

"""python -m common.look FILE|RUN: a data file in words, a dump as a page, run folders as curves and pages.

- data.parquet [--tokenizer NAME] [--rows 2]: columns, sources, prompt lengths, some rows
- runs/NAME [runs/OTHER ...]: look.html of all; each one's curves.png and pages
- runs/NAME/rollouts/step_000012.parquet: its page anew
"""

from pathlib import Path

import pyarrow.parquet as pq
import tyro

from common.files import command_line, refuse
from common.look.curves import plot_curves
from common.look.page import write_page
from common.look.runs import config_of, write_runs


def look(
    *paths: tyro.conf.Positional[Path], output: Path | None = None, tokenizer: str | None = None, rows: int = 2
) -> None:
    """Show what runs have left, or what is in data files.

    Args:
        paths: folders of runs, data files, dumps in the rollouts/ of a run
        output: the page of runs (.html), or a folder for it; look.html in the folder that they share, if not given
        tokenizer: name or folder; of a data file, to count tokens; of a dump, if its run's model is gone
        rows: of a data file, how many are printed
    """
    wanted = list(dict.fromkeys(path for path in paths if path.name != "look.html"))  # which runs/* names, too
    refuse(not wanted, "give the folder of a run, or a data file; look.html is what is made of them")
    refuse(rows < 0, f"--rows {rows}: 0 or more")
    is_idle = output is not None and not any(path.is_dir() for path in wanted)
    is_page = output is None or output.is_dir() or (output.suffix == ".html" and output.parent.is_dir())
    refuse(is_idle or not is_page, f"--output {output}: is for the page of runs, FILE.html in a folder that exists")
    runs, failed = [], []
    for path in wanted:
        try:
            if path.is_dir():
                dumps = draw_curves(path)
                runs.append(path)
                draw_pages(dumps, path, tokenizer)
            elif is_dump(path):
                draw_pages([path], path.parent.parent, tokenizer)
            else:
                from common.look.show import show  # torch takes seconds

                show(path, tokenizer, rows)
        except (OSError, SystemExit, ValueError) as error:  # costs itself, not the others
            refuse(len(wanted) == 1, str(error))
            print(f"warning: {error}", flush=True)
            failed.append(path)
    refuse(not runs and failed == wanted, "nothing to show")
    if runs:
        print(write_runs(runs, output))


def draw_curves(run: Path) -> list[Path]:
    """Its curves.png; returns the dumps that have no page."""
    metrics, dumps = run / "metrics.jsonl", sorted(run.glob("rollouts/step_??????.parquet"))
    is_bare = not metrics.is_file() and not dumps
    refuse(is_bare and (run / "config.json").is_file(), f"{run}: the run has ended before its first step, or is in it")
    refuse(is_bare, f"{run}: no metrics.jsonl and no rollouts/ in it; its runs: {run}/* ?")
    if metrics.is_file():
        plot_curves(run)
        print(run / "curves.png" if (run / "curves.png").is_file() else f"{metrics}: no curves.png of it so far")
    return [dump for dump in dumps if dump.is_file() and not dump.with_suffix(".html").exists()]


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
    from common.look.show import tokenizer_of

    name = tokenizer or config_of(run).get("--model")
    refuse(not isinstance(name, str), f"{run}: no config.json that names the model; give --tokenizer")
    try:
        decoder = tokenizer_of(name)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{run}: no tokenizer of {name} ({error}); give --tokenizer") from error
    for dump in dumps:
        write_page(dump, decoder)
        if dump.with_suffix(".html").is_file():
            print(dump.with_suffix(".html"))


if __name__ == "__main__":
    tyro.cli(look, args=command_line(), prog="python -m common.look", description=__doc__)

"""python -m common.look FILE|RUN: a data file in words, a dump as a page, run folders as curves and
pages.

- data.parquet [--tokenizer NAME] [--rows 2]: columns, sources, prompt lengths, some rows
  - runs/NAME [runs/OTHER ...]: each one's curves.png, and pages of its dumps and of its
  evaluations' samples
- runs/NAME/rollouts/step_000012.parquet: its page anew
"""

import json
from pathlib import Path

import pyarrow.parquet as pq
import tyro

from common.files import refuse
from common.flags import call_program
from common.look.curves import plot_curves
from common.look.page import write_page
from common.look.samples import sample_files, samples_page


def look(*paths: tyro.conf.Positional[Path], tokenizer: str | None = None, rows: int = 2) -> None:
    """Show what runs have left, or what is in data files.

    Args:
        paths: folders of runs, data files, dumps in the rollouts/ of a run
        tokenizer: name or folder; of a data file, to count tokens; of a dump, if its run's model is
        gone rows: of a data file, how many are printed
    """
    wanted = list(dict.fromkeys(paths))
    refuse(not wanted, "give the folder of a run, or a data file")
    refuse(rows < 0, f"--rows {rows}: 0 or more")
    failed = []
    for path in wanted:
        try:
            if path.is_dir():
                draw_run(path, tokenizer)
            elif is_dump(path):
                draw_pages([path], path.parent.parent, tokenizer)
            else:
                from common.look.show import show  # torch takes seconds

                show(path, tokenizer, rows)
        except (OSError, SystemExit, ValueError) as error:  # costs itself, not the others
            refuse(len(wanted) == 1, str(error))
            print(f"warning: {error}", flush=True)
            failed.append(path)
    refuse(failed == wanted, "nothing to show")


def draw_run(run: Path, tokenizer: str | None) -> None:
    """Its curves.png, the pages of its samples, and those of the dumps that have none."""
    metrics, dumps = run / "metrics.jsonl", sorted(run.glob("rollouts/step_??????.parquet"))
    is_bare = not metrics.is_file() and not dumps
    refuse(
        is_bare and (run / "config.json").is_file(),
        f"{run}: the run has ended before its first step, or is in it",
    )
    refuse(is_bare, f"{run}: no metrics.jsonl and no rollouts/ in it; its runs: {run}/* ?")
    if metrics.is_file():
        plot_curves(run, warn=True)
        print(
            run / "curves.png"
            if (run / "curves.png").is_file()
            else f"{metrics}: no curves.png of it so far"
        )
    for page in map(samples_page, sample_files(run)):
        if page.is_file():
            print(page)
    without_page = [
        dump for dump in dumps if dump.is_file() and not dump.with_suffix(".html").exists()
    ]
    draw_pages(without_page, run, tokenizer)


def is_dump(path: Path) -> bool:
    """Does a file have the columns of common/rollout/dumps.py?"""
    try:
        return path.suffix == ".parquet" and {"response_ids", "loss_mask"} <= set(
            pq.read_schema(path).names
        )
    except (OSError, ValueError):  # `show` says what is wrong with it
        return False


def draw_pages(dumps: list[Path], run: Path, tokenizer: str | None) -> None:
    """Their pages beside them, decoded with the tokenizer of the run's model."""
    if not dumps:
        return
    from common.look.show import tokenizer_of

    name = tokenizer or model_of(run)
    refuse(
        not isinstance(name, str), f"{run}: no config.json that names the model; give --tokenizer"
    )
    try:
        decoder = tokenizer_of(name)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{run}: no tokenizer of {name} ({error}); give --tokenizer") from error
    for dump in dumps:
        write_page(dump, decoder)
        if dump.with_suffix(".html").is_file():
            print(dump.with_suffix(".html"))


def model_of(run: Path) -> object:
    """--model in its config.json; None if that cannot be read."""
    path = run / "config.json"
    try:
        # a pipe would be waited for
        return json.loads(path.read_text())["args"]["model"] if path.is_file() else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


if __name__ == "__main__":
    call_program(look, "common.look", __doc__)

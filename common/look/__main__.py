"""python -m common.look FILE|RUN: a data file in words, a dump as a page, run folders as curves and
pages.

- data.parquet [--tokenizer NAME] [--rows 2]: columns, sources, prompt lengths, some rows
- runs/NAME [runs/OTHER ...]: each one's curves.png, and pages of its dumps and of its evaluations'
  samples, in look/runs/NAME
- runs/NAME/rollouts/step_000012.parquet: its page anew
"""

from pathlib import Path

import common.packages  # noqa: F401, one line if a package is missing

import pyarrow.parquet as pq
import tyro

from common.flags import JsonObject, call_program
from common.look.curves import argument_of, plot_curves
from common.look.page import write_page
from common.look.samples import sample_files, samples_page


def look(
    *paths: tyro.conf.Positional[Path],
    tokenizer: str | None = None,
    template_args: JsonObject | None = None,
    rows: int = 2,
    out: Path = Path("look"),
) -> None:
    """Show what runs have left, or what is in data files.

    Args:
        paths: folders of runs, data files, dumps in the rollouts/ of a run
        tokenizer: name or folder; for a data file, to count tokens; for a dump, if its run's model
            is gone
        template_args: for a data file, arguments of the chat template, as the scripts take them
        rows: how many rows of a data file are printed
        out: folder for curves and pages; what is looked at stays as it is
    """
    sources = list(dict.fromkeys(paths))  # each once
    if not sources:
        raise SystemExit("give the folder of a run, or a data file")
    if rows < 0:
        raise SystemExit(f"--rows {rows}: 0 or more")
    if template_args and not tokenizer:
        raise SystemExit("--template-args needs --tokenizer")
    failed = []
    for path in sources:
        try:
            if path.is_dir():
                draw_run(path, folder_of_pages(path, out), tokenizer)
            elif is_dump(path):
                run = path.absolute().parents[1]
                draw_pages([path], run, folder_of_pages(run, out), tokenizer)
            else:
                from common.look.show import show  # torch takes seconds

                show(path, tokenizer, rows, template_args)
        except (OSError, SystemExit, ValueError) as error:
            if len(sources) == 1:
                raise SystemExit(str(error)) from error
            print(f"warning: {error}", flush=True)
            failed.append(path)
    if failed == sources:
        raise SystemExit("nothing to show")


def folder_of_pages(run: Path, out: Path) -> Path:
    """The folder in `out` for the pages of a run: its path from here, or else from the root.
    SystemExit if that is in the run itself."""
    path = run.resolve()
    start = Path.cwd() if path.is_relative_to(Path.cwd()) else path.anchor
    folder = out / path.relative_to(start)
    if folder.resolve().is_relative_to(path):
        raise SystemExit(f"{run}: --out {out} is in it, and it stays as it is: give another --out")
    return folder


def draw_run(run: Path, folder: Path, tokenizer: str | None) -> None:
    """A run's curves.png, the pages of its samples, and those of the dumps that have none."""
    metrics = run / "metrics.jsonl"
    dumps = sorted(run.glob("rollouts/step_??????.parquet"))
    if not metrics.is_file() and not dumps:
        if (run / "config.json").is_file():
            raise SystemExit(f"{run}: the run has ended before its first step, or is in it")
        raise SystemExit(f"{run}: no metrics.jsonl and no rollouts/ in it; did you mean {run}/*?")
    if metrics.is_file():
        curves = folder / "curves.png"
        plot_curves(run, folder, warn=True)
        if curves.is_file():
            print(curves)
        else:
            print(f"{metrics}: no curves.png of it so far")
    for file in sample_files(run):
        page = samples_page(file, folder / file.parent.relative_to(run))
        if page.is_file():
            print(page)
    without_page: list[Path] = []
    for dump in dumps:
        if not dump.is_file() or dump.with_suffix(".html").exists():  # the run has written it
            continue
        page = folder / "rollouts" / f"{dump.stem}.html"
        if not page.exists() or page.stat().st_mtime < dump.stat().st_mtime:
            without_page.append(dump)
    draw_pages(without_page, run, folder, tokenizer)


def is_dump(path: Path) -> bool:
    """Whether a file has the columns of common/rollout/dumps.py."""
    if path.suffix != ".parquet" or not path.is_file():  # a pipe would not end
        return False
    try:
        names = pq.read_schema(path).names
    except (OSError, ValueError):  # `show` says what is wrong with it
        return False
    return "response_ids" in names and "loss_mask" in names


def draw_pages(dumps: list[Path], run: Path, folder: Path, tokenizer: str | None) -> None:
    """Write the pages of dumps into FOLDER/rollouts, decoded with the tokenizer of the run's
    model."""
    if not dumps:
        return
    from common.look.show import tokenizer_of

    name = tokenizer or argument_of(run, "model")
    if not isinstance(name, str):
        raise SystemExit(f"{run}: no config.json that names the model; give --tokenizer")
    try:
        decoder = tokenizer_of(name)
    except (OSError, ValueError, SystemExit) as error:
        raise SystemExit(f"{run}: no tokenizer of {name} ({error}); give --tokenizer") from error
    for dump in dumps:
        page = folder / "rollouts" / f"{dump.stem}.html"
        write_page(dump, decoder, page)
        if page.is_file():
            print(page)


if __name__ == "__main__":
    call_program(look, "common.look", __doc__)

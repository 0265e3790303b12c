"""The samples of evaluations, each file of them as one HTML page."""

from pathlib import Path

from common.data.rows import RowFiles
from common.look.html import render, save_page

MAX_SAMPLES = 1000  # on a page


def sample_files(run: Path) -> list[Path]:
    """The samples that a run's evaluations wrote into its folder, those of --eval-only included."""
    paths = [
        *run.glob("eval/*.parquet"),
        *run.glob("eval_samples*.parquet"),
        *run.glob("eval_samples*.jsonl"),
    ]
    return sorted(path for path in paths if path.is_file())


def samples_page(file: Path, folder: Path) -> Path:
    """The page of a file of samples, wrong ones first, in a folder; written unless it is newer than
    the file."""
    suffix = ".html" if file.suffix == ".parquet" else f"{file.suffix}.html"
    page = folder / file.with_suffix(suffix).name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not page.exists() or page.stat().st_mtime < file.stat().st_mtime:
            records = RowFiles([file], "samples").records()
            samples = [record for record in records if isinstance(record, dict)]
            samples.sort(key=lambda sample: sample.get("correct") is not False)
            text = render("samples.html", file=file, samples=samples, max_samples=MAX_SAMPLES)
            save_page(page, text)
    except (OSError, ValueError) as error:  # half a file, or a full disk
        print(f"warning: {page} not written ({error})", flush=True)
    return page

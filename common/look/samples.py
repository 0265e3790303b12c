"""The samples of evaluations, each file of them as one HTML page."""

from pathlib import Path

from common.data.rows import RowFiles
from common.look.html import render, save_page

MAX_SAMPLES = 1000  # on a page


def sample_files(run: Path) -> list[Path]:
    """What the evaluations of a run have left in its folder, those of --eval-only too."""
    found = [
        *run.glob("eval/*.parquet"),
        *run.glob("eval_samples*.parquet"),
        *run.glob("eval_samples*.jsonl"),
    ]
    return sorted(file for file in found if file.is_file())


def samples_page(file: Path) -> Path:
    """The .html beside a file of samples, wrong ones first; written if there is none as new."""
    page = file.with_suffix(".html" if file.suffix == ".parquet" else f"{file.suffix}.html")
    try:
        if not page.exists() or page.stat().st_mtime < file.stat().st_mtime:
            records = (
                record
                for record in RowFiles([file], "samples").records()
                if isinstance(record, dict)
            )
            samples = sorted(records, key=lambda sample: sample.get("correct") is not False)
            save_page(page, render("samples.html", file=file, samples=samples, most=MAX_SAMPLES))
    except (OSError, ValueError) as error:  # half a file, or a full disk
        print(f"warning: {page} not written ({error})", flush=True)
    return page

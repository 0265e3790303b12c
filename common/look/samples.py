"""The samples of evaluations, each file of them as one HTML page."""

from collections import Counter
from pathlib import Path

from common.data.rows import RowFiles
from common.look.html import render, save_among_neighbours

MAX_SAMPLES = 1000  # on a page
VERDICTS = ("wrong", "not scored", "right", "no truth")  # as the column sorts
KINDS = ("right", "wrong", "cut off", "not scored", "no truth")  # as the filter offers them
# key of a sample -> name of its column
COLUMNS = {
    "row": "row",
    "data_source": "source",
    "prompt": "prompt",
    "completion": "completion",
    "truth": "truth",
    "verdict": "verdict",
    "score": "score",
    "length": "length",
}


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
            save_among_neighbours(page, render_samples(file, samples))
    except (OSError, ValueError) as error:  # half a file, or a full disk
        print(f"warning: {page} not written ({error})", flush=True)
    return page


def render_samples(file: Path, samples: list[dict]) -> str:
    """A whole HTML document of the first MAX_SAMPLES, without the columns that none of them has."""
    samples = [sample | {"verdict": verdict_of(sample)} for sample in samples]
    samples.sort(key=lambda sample: sample["verdict"] != "wrong")
    shown = samples[:MAX_SAMPLES]
    counts = Counter(sample["verdict"] for sample in shown)
    counts["cut off"] = sum(bool(sample.get("truncated")) for sample in shown)
    columns = {}
    for key, name in COLUMNS.items():
        if any(sample.get(key) is not None for sample in shown):
            columns[key] = name
    return render(
        "samples.html",
        file=file,
        num_samples=len(samples),
        num_wrong=sum(sample["verdict"] == "wrong" for sample in samples),
        samples=shown,
        columns=columns,
        verdicts=VERDICTS,
        kinds={kind: counts[kind] for kind in KINDS if counts[kind] > 0},
    )


def verdict_of(sample: dict) -> str:
    """One of VERDICTS."""
    correct = sample.get("correct")
    if sample.get("failed"):
        return "not scored"
    if correct is None:
        return "no truth"
    return "right" if correct else "wrong"

"""What the programs of this folder share: downloads, and files of the splits of a data set."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from common.files import replace_file

AT_ONCE = 32  # rows with pictures: those of 8K have 10 MB


def write_splits(out: Path, tables: dict[str, pa.Table]) -> None:
    """Write OUT/SPLIT.parquet of each split that has rows; a reader sees the old file or the whole
    new one."""
    out.mkdir(parents=True, exist_ok=True)
    for split, table in tables.items():
        if len(table):
            path = out / f"{split}.parquet"
            replace_file(path, lambda temporary, table=table: pq.write_table(table, temporary))
            print(f"{path}: {len(table)} rows")


@contextmanager
def downloading(repository: str, otherwise: str) -> Iterator[None]:
    """ConnectionError, with what else to do, if the hub cannot be reached or refuses."""
    try:
        yield
    except OSError as error:
        # huggingface_hub's network, HTTP and offline errors all derive from it
        remedy = f"Set HF_ENDPOINT to a mirror that you can reach, or {otherwise}"
        raise ConnectionError(f"could not download {repository}: {error}\n{remedy}") from error


def stream_rows(path: Path, rows: Iterable[dict], schema: pa.Schema) -> None:
    """Write rows as they come to a parquet file, which appears when all are there: pictures need
    not fit in memory.

    ValueError without any.
    """
    count = 0

    def write(temporary: Path) -> None:
        nonlocal count
        left = iter(rows)
        with pq.ParquetWriter(temporary, schema) as writer:
            while part := list(islice(left, AT_ONCE)):
                writer.write_table(pa.Table.from_pylist(part, schema))
                count += len(part)
        if not count:
            raise ValueError(f"{path}: not one usable row to write")

    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, write)
    print(f"{path}: {count} rows")

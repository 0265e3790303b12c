"""Shared by the programs of this folder: downloads, and files of the splits of a data set."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from common.files import hub_errors, replace_file

ROWS_PER_WRITE = 32  # few, as a picture in 8K resolution takes 10 MB


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
        with hub_errors():
            yield
    except ConnectionError as error:
        remedy = f"set HF_ENDPOINT to a mirror that you can reach, or {otherwise}"
        raise ConnectionError(f"could not download {repository}: {error}; {remedy}") from error


def stream_rows(path: Path, rows: Iterable[dict], schema: pa.Schema) -> None:
    """Write rows to a parquet file a few at a time, so that their pictures need not fit in memory.
    The file appears when it is complete. ValueError without rows.
    """
    num_rows = 0

    def write(temporary: Path) -> None:
        nonlocal num_rows
        remaining = iter(rows)
        with pq.ParquetWriter(temporary, schema) as writer:
            while part := list(islice(remaining, ROWS_PER_WRITE)):
                writer.write_table(pa.Table.from_pylist(part, schema))
                num_rows += len(part)
        if num_rows == 0:
            raise ValueError(f"{path}: not one usable row to write")

    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, write)
    print(f"{path}: {num_rows} rows")

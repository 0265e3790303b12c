"""Files of rows (parquet, JSON), packed in Arrow; whatever is dropped, a row keeps its place.

In training one rank of a machine reads them, and all map what it has written: memory that the
system may take back.
"""

import codecs
import gzip
import json
import os
import tempfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from common.data.table_files import files_in, find_files, is_hub_id, kind_of
from common.files import shorten
from common.progress import Progress, say

JSON_LINE = "json line"  # the only column of a table whose rows are texts
LINES = {b"place": b"line"}  # metadata of a table each of whose rows was a line of its file
LISTS = (
    "data",
    "rows",
    "instances",
    "examples",
    "samples",
    "items",
    "records",
    "train",
    "validation",
    "test",
)
GZIP, PARQUET = b"\x1f\x8b", b"PAR1"  # what such files begin with
NO_ROWS = {  # what a file begins with that was meant to be another one -> what it is
    b"version https://git-lfs": "a pointer of Git LFS, which `git lfs pull` replaces by the file",
    b"<!doctype html": "a web page: download the file that it shows",
    b"<html": "a web page: download the file that it shows",
}
MAX_DEPTH = 32  # of what a row of JSON nests: pickling, printing and rendering it recurse


class RowFiles:
    """The rows of several files, one after the other: an index counts them all.

    Paths may be separated by commas, be patterns, or ids of data sets of the hub (`download`).
    `flag` is where they come from: FileNotFoundError and ValueError name it and the file.
    `max_rows` of them are taken; `convert` may make another table of a file's; by `once` one of
    several ranks reads for all.
    """

    def __init__(
        self,
        paths: str | Path | list[str | Path],
        flag: str,
        max_rows: int | None = None,
        convert: Callable[[pa.Table, Path], pa.Table] = lambda table, path: table,
        once: Callable[[Callable], list[str]] | None = None,
    ):
        if isinstance(paths, list):
            names = [str(path) for path in paths]
        elif os.path.exists(paths):  # commas and all
            names = [str(paths)]
        else:
            names = [name for name in str(paths).split(",") if name.strip()] or [str(paths)]
        self.paths = [path for name in names for path in find_files(name.strip(), flag)]
        self.flag, self.tables, self.starts, end = flag, [], [], 0
        for path in self.paths:
            table = convert(read_file(path, flag, once), path)
            self.starts.append(end)
            self.tables.append(
                table if max_rows is None else table.slice(0, max(0, max_rows - end))
            )
            end += len(table)

    @property
    def suffix(self) -> str:
        """Of a file that has room for such rows."""
        return (
            ".jsonl"
            if any(JSON_LINE in table.column_names for table in self.tables)
            else ".parquet"
        )

    def progress(self) -> Progress:
        """Of a look at all of them."""
        return Progress(f"{self.flag}: rows looked at", sum(map(len, self.tables)), first=3.0)

    def records(
        self, columns: tuple[str, ...] | None = None, tables: Sequence[pa.Table] = ()
    ) -> Iterator[dict | str]:
        """Every row, of some `tables` or of all, with those of the columns that it has."""
        for table in tables or self.tables:
            names = [
                name
                for name in table.column_names
                if columns is None or name in (JSON_LINE, *columns)
            ]
            try:
                yield from records(table.select(names))
            except (LookupError, OverflowError, ValueError) as error:
                # two columns of one name, the year 10000, ...
                raise ValueError(
                    f"{self.flag}: {', '.join(map(str, self.paths))}: bad column: {error}"
                ) from error

    def row(self, index: int, columns: tuple[str, ...] | None = None) -> dict | str:
        file, row = self._locate(index)
        return next(self.records(columns, [self.tables[file].slice(row, 1)]))

    def place(self, index: int) -> str:
        """File and row. Lines of JSON count from 1, blank ones too; rows of a list, or of parquet,
        from 0."""
        file, row = self._locate(index)
        table = self.tables[file]
        if table.schema.metadata != LINES or table.column_names != [JSON_LINE]:
            return f"{self.paths[file]} row {row}"
        lines = table.slice(0, row + 1).column(0)
        num_blank = pc.sum(pc.count_substring(lines, b"\n")).as_py()  # each row has those before it
        return f"{self.paths[file]} line {row + 1 + num_blank}"

    def folder(self, index: int) -> Path:
        """Of the file that has the row of an index."""
        file, _ = self._locate(index)
        return self.paths[file].parent

    def _locate(self, index: int) -> tuple[int, int]:
        file = bisect_right(self.starts, index) - 1
        return file, index - self.starts[file]

    def refuse(self, reasons: dict[int, str], what: str, drop: bool) -> None:
        """Raise a ValueError with the first five of the rows, if there are any; or tell that all
        were dropped."""
        state = "dropped" if drop else "--bad-rows drop drops them"
        listed = "".join(
            f"\n  {self.place(index)}: {shorten(reasons[index], 2000)}"
            for index in list(reasons)[:5]
        )
        message = f"{self.flag}: {len(reasons)} {what} ({state}); the first:{listed}"
        if reasons and not drop:
            raise ValueError(message)
        if reasons:
            say(f"warning: {message}")


def read_file(path: Path, flag: str, once: Callable[[Callable], list[str]] | None) -> pa.Table:
    """A file as a table. FileNotFoundError, ValueError."""
    names = []
    if once:
        names = once(partial(arrow_files, path, flag))
    elif is_hub_id(path):
        names = download(str(path), flag)
    if names:
        return pa.concat_tables(
            pa.ipc.open_stream(pa.memory_map(name)).read_all() for name in names
        )
    with open_rows(path, flag) as rows:
        return rows.read_all()


def arrow_files(path: Path, flag: str) -> list[str]:
    """Arrow files of the rows; none where there is no room for them (TMPDIR), and for what cannot
    be read."""
    if is_hub_id(path):
        return download(str(path), flag)
    try:
        with tempfile.TemporaryFile(prefix="rows-") as file, open_rows(path, flag) as rows:
            with pa.ipc.new_stream(file, rows.schema) as writer:
                for batch in rows:
                    writer.write_batch(batch)
            file.flush()
            descriptor = os.dup(file.fileno())
    except (OSError, ValueError):  # each rank will say what is wrong with the file
        return []
    pa.default_memory_pool().release_unused()
    return [f"/proc/{os.getpid()}/fd/{descriptor}"]  # gone with this process, however that ends


@contextmanager
def open_rows(path: Path, flag: str) -> Iterator[pa.RecordBatchReader]:
    """Rows in batches; those of JSON stay text: Arrow wants one type per key, and makes timestamps
    of dates."""
    if path.is_dir():
        inside = [file for folder in (path, *sorted(path.glob("*/"))) for file in files_in(folder)]
        example = f", such as {inside[0]}" if inside else ""
        raise ValueError(f"{flag}: {path} is a folder: name its files{example}")
    if not path.exists():
        raise FileNotFoundError(f"{flag}: no such file: {path}")
    if not path.is_file():  # opening a pipe would wait for whoever writes to it
        raise ValueError(f"{flag}: {path} is no regular file")
    try:
        with path.open("rb") as file:
            start = file.read(1024)
        if start.startswith(PARQUET):
            file = pq.ParquetFile(path, buffer_size=2**20, pre_buffer=False)
            # batch by batch: Arrow reads no nested column of more than 2 GiB at once
            batches = file.iter_batches(batch_size(file.schema_arrow.names))
            # or texts that are no UTF-8 come later
            whole = (batch.validate(full=True) or batch for batch in batches)
            yield pa.RecordBatchReader.from_batches(file.schema_arrow, whole)
            return
        refuse_other_kinds(path, start)
        lines, metadata = json_rows(
            json_text(path), are_lines=kind_of(path).startswith((".jsonl", ".ndjson"))
        )
        yield pa.table(
            {JSON_LINE: pa.array(lines, pa.large_binary())}, metadata=metadata
        ).to_reader()
    except (pa.ArrowException, EOFError, OSError, RecursionError, ValueError, zlib.error) as error:
        raise ValueError(
            f"{flag}: {path} is neither .jsonl, .json nor a readable parquet file: {error}"
        ) from error


def refuse_other_kinds(path: Path, start: bytes) -> None:
    """ValueError, with what it is, for a file that is no JSON by what it begins with, and by its
    name."""
    text = start.removeprefix(codecs.BOM_UTF8).lstrip()
    for beginning, what in NO_ROWS.items():
        if text.lower().startswith(beginning):
            raise ValueError(f"it is {what}")
    if kind_of(path) in ("", ".parquet") and not text.startswith((b"[", b"{")):
        raise ValueError(f"it begins with {start[:20]!r}")


def json_text(path: Path) -> bytes:
    """What a file holds, unpacked, in UTF-8 without a mark of that."""
    content = path.read_bytes()
    if content.startswith(GZIP):
        content = gzip.decompress(content)
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # what PowerShell writes
        content = content.decode("utf-16").encode()
    return content.removeprefix(codecs.BOM_UTF8)


def json_rows(content: bytes, are_lines: bool) -> tuple[list[bytes], dict[bytes, bytes] | None]:
    """The rows of a text of JSON, and LINES if each is a line of it: else it is a list of them, or
    has one as "data".

    `are_lines` says the name of the file: then an object is a row. ValueError for a list that is
    broken, and for an object that has its rows elsewhere.
    """
    lines = lines_of(content)
    if len(lines) > 1 and is_json(lines[0]):
        return lines, LINES
    try:
        value = json.loads(content)
    except (RecursionError, ValueError):
        is_list = bool(lines) and lines[0].lstrip().startswith(b"[")
        if is_list and not (len(lines) > 1 and is_json(lines[1])):
            raise
        return lines, LINES  # of which each will tell what is wrong with it
    rows = value
    if isinstance(value, dict) and not (are_lines and len(lines) == 1):
        rows = rows_within(value, is_line=len(lines) == 1)
    if not isinstance(rows, list):
        return lines, LINES
    return [json.dumps(row).encode() for row in rows], None


def rows_within(value: dict, is_line: bool) -> list | None:
    """The rows of an object that is a whole file; None if it is in one line, and looks like the
    only row."""
    lists = [name for name in LISTS if is_list_of_objects(value.get(name))]
    if lists == ["data"]:
        return value["data"]
    if is_line and not lists:
        return None
    keys = shorten(", ".join(map(repr, value)), 200)
    raise ValueError(
        f"it is one object with the keys {keys}: write its rows as lines, as a list or as "
        f'{{"data": [...]}}'
    )


def is_list_of_objects(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (RecursionError, ValueError):
        return False
    return True


def lines_of(content: bytes) -> list[bytes]:
    """The lines that are not blank, each behind the blank ones before it as newlines: so a row
    keeps its number."""
    lines, blank = [], b""
    for line in content.splitlines():
        if line.strip():
            lines.append(blank + line)
            blank = b""
        else:
            blank += b"\n"
    return lines


def download(name: str, flag: str) -> list[str]:
    """Arrow files of ORG/NAME[:CONFIG][:SPLIT] in the cache of the package datasets, which fetches
    what it lacks."""
    repository, *config, split = name.split(":") if ":" in name else (name, "train")
    try:
        from datasets import load_dataset

        data = load_dataset(repository, *config, split=split, keep_in_memory=False)
    except Exception as error:
        # not installed, no network, no such id, configuration or split, a broken file, ...
        told = (
            f"{flag}: no such file: {name}; nor is there a data set of the hub "
            "(ORG/NAME:CONFIG:SPLIT, with"
        )
        raise ValueError(f"{told} `pip install datasets`): {error}") from error
    return [file["filename"] for file in data.cache_files]


def batch_size(columns: list[str]) -> int:
    """Rows to hold at a time: few where there are pictures as bytes."""
    return 32 if {"image", "images", "videos"} & set(columns) else 4096


def records(table: pa.Table) -> Iterator[dict | str]:
    """Every row as a dict, or as the reason why it is none; some at a time, never the whole
    table."""
    for batch in table.to_batches(max_chunksize=batch_size(table.column_names)):
        if table.column_names != [JSON_LINE]:
            yield from batch.to_pylist()
            continue
        for line in batch.column(0).to_pylist():
            try:
                record = json.loads(line.lstrip())
                if line.count(b"[") + line.count(b"{") > MAX_DEPTH and too_deep(record):
                    raise RecursionError
                yield (
                    record
                    if isinstance(record, dict)
                    else f"a JSON {type(record).__name__}, expected an object"
                )
            except RecursionError:
                yield f"nested deeper than {MAX_DEPTH}"
            except ValueError as error:  # bad JSON and bad UTF-8 alike
                yield f"invalid JSON: {error}"


def too_deep(value: object) -> bool:
    """Does a value of JSON nest deeper than MAX_DEPTH?"""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [
            x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)
        ]
        level = [child for children in inner for child in children]
    return bool(level)

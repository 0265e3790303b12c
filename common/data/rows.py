"""Files of rows (parquet, JSON), kept in Arrow. Rows keep their indices when others are dropped.

In training one rank of a machine reads them into a temporary file, which all ranks map: that is
memory that the system may take back.
"""

import codecs
import gzip
import json
import os
import tempfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from common.data.table_files import files_in, find_files, is_hub_id, kind_of
from common.files import hub_errors, shorten
from common.progress import Progress, say

JSON_LINE = "json line"  # the only column of a table whose rows are texts
LINES = {b"place": b"line"}  # metadata of a table whose rows were lines of a file
# A file that is one object, with a list of objects under one of these keys, is no row: its rows are
# read if that key is "data", else it is refused. (A single line of .jsonl or .ndjson is a row.)
ROW_LISTS = (
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
# what a packed file and a parquet file begin with
GZIP = b"\x1f\x8b"
PARQUET = b"PAR1"
NO_ROWS = {  # the beginning of a file that was saved instead of rows -> what it is
    b"version https://git-lfs": "a pointer of Git LFS, which `git lfs pull` replaces by the file",
    b"<!doctype html": "a web page: download the file that it shows",
    b"<html": "a web page: download the file that it shows",
}
PREPARED = ("countdown", "geo3k", "gsm8k", "math")  # the docs have these programs write data/NAME
MAX_DEPTH = 32  # of nesting in a row of JSON: pickling, printing and rendering it recurse


class RowFiles:
    """The rows of several files, numbered across the files.

    paths: a list, or separated by commas; files, patterns, or ids of data sets of the hub
    (`hub_arrow_files`). flag: the one that names them, for messages. max_rows: of all files
    together. convert: makes of a file's table the one to use. once: returns, on all ranks of a
    machine, what a function gives on the first of them. FileNotFoundError and ValueError name the
    flag and the file.
    """

    def __init__(
        self,
        paths: str | Path | list[str | Path],
        flag: str,
        max_rows: int | None = None,
        convert: Callable[[pa.Table, Path], pa.Table] | None = None,
        once: Callable[[Callable], list[str]] | None = None,
    ):
        self.flag = flag
        self.paths: list[Path] = []
        for name in split_paths(paths):
            self.paths += find_files(name.strip(), flag)
        self.tables: list[pa.Table] = []
        self.starts: list[int] = []  # index of each table's first row
        num_rows = 0  # of the files so far
        for path in self.paths:
            table = read_file(path, flag, once)
            if convert:
                table = convert(table, path)
            self.starts.append(num_rows)
            if max_rows is None:
                self.tables.append(table)
            else:
                self.tables.append(table.slice(0, max(0, max_rows - num_rows)))
            num_rows += len(table)

    @property
    def suffix(self) -> str:
        """The suffix of a file that can hold these rows."""
        if any(JSON_LINE in table.column_names for table in self.tables):
            return ".jsonl"
        return ".parquet"

    def progress(self) -> Progress:
        """The progress of a scan of all rows."""
        num_rows = sum(len(table) for table in self.tables)
        return Progress(f"{self.flag}: rows looked at", num_rows, first=3.0)

    def records(
        self, columns: tuple[str, ...] | None = None, tables: Sequence[pa.Table] = ()
    ) -> Iterator[dict | str]:
        """Every row as a dict, or as the reason why it is none.

        columns: the only ones to read, if the file has them; rows of JSON have all their keys.
        tables: read these instead of all.
        """
        for table in tables or self.tables:
            names = table.column_names
            if columns is not None:
                names = [name for name in names if name == JSON_LINE or name in columns]
            try:
                yield from records_of_table(table.select(names))
            except (LookupError, OverflowError, ValueError) as error:
                # two columns of one name, the year 10000, ...
                raise ValueError(
                    f"{self.flag}: {', '.join(map(str, self.paths))}: bad column: {error}"
                ) from error

    def row(self, index: int, columns: tuple[str, ...] | None = None) -> dict | str:
        file, row = self._locate(index)
        return next(self.records(columns, [self.tables[file].slice(row, 1)]))

    def place(self, index: int) -> str:
        """File and row, for messages.

        Lines of JSON count from 1, blank ones too; rows of a list, or of parquet, from 0.
        """
        file, row = self._locate(index)
        table = self.tables[file]
        if table.schema.metadata != LINES:
            return f"{self.paths[file]} row {row}"
        lines = table.slice(0, row + 1).column(0)
        # `lines_of` puts a newline in front of a row for each blank line before it
        num_blank = pc.sum(pc.count_substring(lines, b"\n")).as_py()
        return f"{self.paths[file]} line {row + 1 + num_blank}"

    def folder(self, index: int) -> Path:
        """The folder of the file that has the row."""
        file, _ = self._locate(index)
        return self.paths[file].parent

    def _locate(self, index: int) -> tuple[int, int]:
        """The number of the file, and of the row in it."""
        file = bisect_right(self.starts, index) - 1
        return file, index - self.starts[file]

    def refuse(self, reasons: dict[int, str], heading: str, drop: bool) -> None:
        """Raise a ValueError that lists the first five bad rows; with `drop`, print a warning.

        reasons: row index -> what is wrong with it; if empty, nothing happens. heading: what the
        message calls the rows.
        """
        if not reasons:
            return
        state = "dropped" if drop else "--bad-rows drop drops them"
        message = f"{self.flag}: {len(reasons)} {heading} ({state}); the first:"
        for index in list(reasons)[:5]:
            message += f"\n  {self.place(index)}: {shorten(reasons[index], 2000)}"
        if not drop:
            raise ValueError(message)
        say(f"warning: {message}")


def split_paths(paths: str | Path | list[str | Path]) -> list[str]:
    """The paths of a list, or of a text with commas; a file whose name has commas is one path."""
    if isinstance(paths, list):
        return [str(path) for path in paths]
    text = str(paths)
    if os.path.exists(paths):
        return [text]
    return [name for name in text.split(",") if name.strip()] or [text]


def read_file(path: Path, flag: str, once: Callable[[Callable], list[str]] | None) -> pa.Table:
    """A file, or a data set of the hub, as a table.

    Raises FileNotFoundError or ValueError.
    """
    names: list[str] = []
    if once:
        names = once(partial(arrow_files, path, flag))
    elif is_hub_id(path):
        names = hub_arrow_files(str(path), flag)
    if names:
        tables = [pa.ipc.open_stream(pa.memory_map(name)).read_all() for name in names]
        return pa.concat_tables(tables)
    with open_rows(path, flag) as rows:
        return rows.read_all()


def arrow_files(path: Path, flag: str) -> list[str]:
    """Paths of Arrow files with the rows: for a file one in TMPDIR, for an id of the hub those of
    `hub_arrow_files`.

    An empty list if a file cannot be read, or if there is no room for its rows.
    """
    if is_hub_id(path):
        return hub_arrow_files(str(path), flag)
    try:
        with tempfile.TemporaryFile(prefix="rows-") as file, open_rows(path, flag) as rows:
            with pa.ipc.new_stream(file, rows.schema) as writer:
                for batch in rows:
                    writer.write_batch(batch)
            file.flush()
            # keeps the file, which has no name, for the ranks that will map it
            descriptor = os.dup(file.fileno())
    except (OSError, ValueError):
        return []  # each rank reads the file itself, and raises what is wrong with it
    pa.default_memory_pool().release_unused()
    return [f"/proc/{os.getpid()}/fd/{descriptor}"]  # gone with this process, however that ends


def hub_arrow_files(name: str, flag: str) -> list[str]:
    """Paths of Arrow files of ORG/NAME[[:CONFIG]:SPLIT] in the cache of the package datasets.

    It downloads what the cache lacks. ValueError if that fails.
    """
    repository = name
    config: list[str] = []
    split = "train"
    if ":" in name:
        repository, *config, split = name.split(":")
    try:
        from datasets import load_dataset

        with hub_errors():
            data = load_dataset(repository, *config, split=split, keep_in_memory=False)
    except Exception as error:
        # not installed, no network, no such id, configuration or split, a broken file, ...
        raise ValueError(
            f"{flag}: no such file: {name}; nor is there a data set of the hub "
            f"(ORG/NAME:CONFIG:SPLIT, with `pip install datasets`): {error}"
        ) from error
    return [file["filename"] for file in data.cache_files]


@contextmanager
def open_rows(path: Path, flag: str) -> Iterator[pa.RecordBatchReader]:
    """The rows of a file in batches.

    Rows of JSON stay text: Arrow wants one type per key, and makes timestamps of dates.
    """
    if path.is_dir():
        example = ""
        for folder in (path, *sorted(path.glob("*/"))):
            files = files_in(folder)
            if files:
                example = f", such as {files[0]}"
                break
        raise ValueError(f"{flag}: {path} is a folder: name its files{example}")
    if not path.exists():
        message = f"{flag}: no such file: {path}"
        folder = path.parent
        if folder.name in PREPARED and path.name in ("train.parquet", "test.parquet"):
            message += f"; python -m common.prepare.{folder.name} --out {folder} writes it"
        raise FileNotFoundError(message)
    if not path.is_file():  # opening a pipe would wait for a writer
        raise ValueError(f"{flag}: {path} is no regular file")
    try:
        with path.open("rb") as file:
            start = file.read(1024)
        if start.startswith(PARQUET):
            parquet = pq.ParquetFile(path, buffer_size=2**20, pre_buffer=False)
            # batch by batch: Arrow reads no nested column of more than 2 GiB at once
            batches = parquet.iter_batches(batch_size(parquet.schema_arrow.names))
            yield pa.RecordBatchReader.from_batches(parquet.schema_arrow, validated(batches))
            return
        refuse_other_kinds(path, start)
        named_as_lines = kind_of(path).startswith((".jsonl", ".ndjson"))
        lines, metadata = json_rows(json_text(path), named_as_lines)
        column = pa.array(lines, pa.large_binary())
        yield pa.table({JSON_LINE: column}, metadata=metadata).to_reader()
    except (pa.ArrowException, EOFError, OSError, RecursionError, ValueError, zlib.error) as error:
        raise ValueError(
            f"{flag}: {path} is neither .jsonl, .json nor a readable parquet file: {error}"
        ) from error


def validated(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches. Raises ArrowInvalid now, not at a later use, for texts that are no UTF-8."""
    for batch in batches:
        batch.validate(full=True)
        yield batch


def refuse_other_kinds(path: Path, start: bytes) -> None:
    """ValueError if a file is no JSON, judged by its beginning `start` and its name."""
    text = start.removeprefix(codecs.BOM_UTF8).lstrip()
    for beginning, description in NO_ROWS.items():
        if text.lower().startswith(beginning):
            raise ValueError(f"it is {description}")
    if kind_of(path) in ("", ".parquet") and not text.startswith((b"[", b"{")):
        raise ValueError(f"it begins with {start[:20]!r}")


def json_text(path: Path) -> bytes:
    """The content of a file, unpacked, in UTF-8 without a byte order mark."""
    content = path.read_bytes()
    if content.startswith(GZIP):
        content = gzip.decompress(content)
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # PowerShell's
        content = content.decode("utf-16").encode()
    return content.removeprefix(codecs.BOM_UTF8)


def json_rows(
    content: bytes, named_as_lines: bool
) -> tuple[list[bytes], dict[bytes, bytes] | None]:
    """The rows of a text of JSON, and the metadata of their table.

    The metadata are LINES if each row is a line; None if the text is a list of rows, or an object
    with such a list as "data". named_as_lines: whether the name of the file says that rows are
    lines; then an object in one line is a row. ValueError for a list that is broken, and for an
    object that `rows_within` refuses.
    """
    lines = lines_of(content)
    if len(lines) > 1 and is_json(lines[0]):
        return lines, LINES
    try:
        value = json.loads(content)
    except (RecursionError, ValueError):
        first_line = lines[0].strip() if lines else b""
        # the first of several rows is broken; but a line "[" begins a list of rows
        is_broken_row = first_line != b"[" and len(lines) > 1 and is_json(lines[1])
        if first_line.startswith(b"[") and not is_broken_row:
            raise
        return lines, LINES  # `json_record` gives the reason for each that is broken
    rows = None  # unless the whole text is a list, or an object that holds one
    is_one_line = len(lines) == 1
    if isinstance(value, list):
        rows = value
    elif isinstance(value, dict) and not (named_as_lines and is_one_line):
        rows = rows_within(value, is_one_line)
    if rows is None:
        return lines, LINES
    return [json.dumps(row).encode() for row in rows], None


def rows_within(value: dict, is_one_line: bool) -> list | None:
    """The rows of an object that is a whole file; None if it looks like the only row: one line
    without a list of rows. ValueError if it is neither."""
    keys_of_rows = [key for key in ROW_LISTS if is_list_of_objects(value.get(key))]
    if keys_of_rows == ["data"]:
        return value["data"]
    if is_one_line and not keys_of_rows:
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
    """The lines that are not blank.

    Each begins with a newline for every blank line before it, so that a row keeps its number.
    """
    lines = []
    blank = b""
    for line in content.splitlines():
        if line.strip():
            lines.append(blank + line)
            blank = b""
        else:
            blank += b"\n"
    return lines


def batch_size(columns: list[str]) -> int:
    """Rows to hold at a time: few if there are pictures as bytes."""
    return 32 if {"image", "images", "videos"} & set(columns) else 4096


def records_of_table(table: pa.Table) -> Iterator[dict | str]:
    """Every row as a dict, or as the reason why it is none; a batch at a time."""
    for batch in table.to_batches(max_chunksize=batch_size(table.column_names)):
        if table.column_names == [JSON_LINE]:
            for line in batch.column(0).to_pylist():
                yield json_record(line)
        else:
            yield from batch.to_pylist()


def json_record(line: bytes) -> dict | str:
    """The object of a line of JSON, or the reason why it is none."""
    too_deep = f"nested deeper than {MAX_DEPTH}"
    try:
        record = json.loads(line.lstrip())
    except RecursionError:
        return too_deep
    except ValueError as error:  # bad JSON and bad UTF-8 alike
        return f"invalid JSON: {error}"
    # few rows have so many brackets, and only those are searched
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and is_too_deep(record):
        return too_deep
    if not isinstance(record, dict):
        return f"a JSON {type(record).__name__}, expected an object"
    return record


def is_too_deep(value: object) -> bool:
    """Whether a value of JSON nests deeper than MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH):
        children: list = []
        for item in level:
            if isinstance(item, dict):
                children += item.values()
            elif isinstance(item, list):
                children += item
        level = children
    return any(isinstance(item, dict | list) for item in level)

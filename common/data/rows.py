"""Files of rows (.parquet, .jsonl, .json), packed in Arrow; whatever is dropped, a row keeps its place.

In training one rank of a machine reads them, and all map what it has written: memory that the system may take back.
"""

import codecs
import json
import os
import re
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from common.files import shorten
from common.progress import Progress

JSON_LINE = "json line"  # the only column of a table whose rows are texts
HUB_ID = re.compile(r"(?!.*\.(?:parquet|jsonl?)$)[\w-][\w.-]*/[\w.-]+(:[\w.-]+){0,2}")  # of a data set
MAX_DEPTH = 32  # of what a row of JSON nests: pickling, printing and rendering it recurse


class RowFiles:
    """The rows of several files, one after the other: an index counts them all. Paths may be separated by commas.

    `flag` is where the paths come from: FileNotFoundError and ValueError name it and the file. `max_rows` of them are
    taken; `convert` may make another table of a file's. With `once`, by which one of several ranks does something for
    all, what is no file may be a data set of the hub (`download`).
    """

    def __init__(
        self,
        paths: str | list[str],
        flag: str,
        max_rows: int | None = None,
        convert: Callable[[pa.Table, Path], pa.Table] = lambda table, path: table,
        once: Callable[[Callable], list[str]] | None = None,
    ):
        names = paths.split(",") if isinstance(paths, str) else paths
        self.paths = [Path(str(name).strip()).expanduser() for name in names]
        self.flag, self.tables, self.starts, end = flag, [], [], 0
        for path in self.paths:
            table = convert(read_file(path, flag, once), path)
            self.starts.append(end)
            self.tables.append(table if max_rows is None else table.slice(0, max(0, max_rows - end)))
            end += len(table)

    @property
    def suffix(self) -> str:
        """Of a file that has room for such rows."""
        return ".jsonl" if any(JSON_LINE in table.column_names for table in self.tables) else ".parquet"

    def progress(self) -> Progress:
        """Of a look at all of them."""
        return Progress(f"{self.flag}: rows looked at", sum(map(len, self.tables)), first=3.0)

    def records(self, columns: tuple[str, ...] | None = None, tables: Sequence[pa.Table] = ()) -> Iterator[dict | str]:
        """Every row, of some `tables` or of all, with those of the columns that it has."""
        for table in tables or self.tables:
            names = [name for name in table.column_names if columns is None or name in (JSON_LINE, *columns)]
            try:
                yield from records(table.select(names))
            except (LookupError, OverflowError, ValueError) as error:  # two columns of one name, the year 10000, ...
                raise ValueError(f"{self.flag}: {', '.join(map(str, self.paths))}: bad column: {error}") from error

    def row(self, index: int, columns: tuple[str, ...] | None = None) -> dict | str:
        file, row = self._locate(index)
        return next(self.records(columns, [self.tables[file].slice(row, 1)]))

    def place(self, index: int) -> str:
        """File and row of an index. Lines of .jsonl count from 1, blank ones too, rows from 0."""
        file, row = self._locate(index)
        table = self.tables[file]
        if self.paths[file].suffix != ".jsonl" or table.column_names != [JSON_LINE]:
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

    def refuse(self, reasons: dict[int, str], what: str, drop: bool, notice: Callable) -> None:
        """Raise a ValueError with the first five of the rows, if there are any; or tell that all were dropped."""
        state = "dropped" if drop else "--bad-rows drop drops them"
        listed = "".join(f"\n  {self.place(index)}: {shorten(reasons[index], 2000)}" for index in list(reasons)[:5])
        message = f"{self.flag}: {len(reasons)} {what} ({state}); the first:{listed}"
        if reasons and not drop:
            raise ValueError(message)
        if reasons:
            notice(f"warning: {message}")


def read_file(path: Path, flag: str, once: Callable[[Callable], list[str]] | None) -> pa.Table:
    """A file as a table. FileNotFoundError, ValueError."""
    if names := once(partial(arrow_files, path, flag)) if once else []:
        return pa.concat_tables(pa.ipc.open_stream(pa.memory_map(name)).read_all() for name in names)
    with open_rows(path, flag) as rows:
        return rows.read_all()


def arrow_files(path: Path, flag: str) -> list[str]:
    """Arrow files of the rows; none where there is no room for them (TMPDIR), and for what cannot be read."""
    if not path.exists() and not path.parent.exists() and HUB_ID.fullmatch(str(path)):
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
    """Rows in batches; those of JSON stay text: Arrow wants one type per key, and makes timestamps of dates."""
    if path.is_dir():
        inside = next((p for kind in ("parquet", "jsonl", "json") for p in sorted(path.glob(f"*.{kind}"))), None)
        raise ValueError(f"{flag}: {path} is a folder: name its files" + f", such as {inside}" * bool(inside))
    if not path.exists():
        raise FileNotFoundError(f"{flag}: no such file: {path}")
    if not path.is_file():  # opening a pipe would wait for whoever writes to it
        raise ValueError(f"{flag}: {path} is no regular file")
    try:
        if path.suffix not in (".json", ".jsonl"):
            file = pq.ParquetFile(path, buffer_size=2**20, pre_buffer=False)
            # batch by batch: Arrow reads no nested column of more than 2 GiB at once
            batches = file.iter_batches(batch_size(file.schema_arrow.names))
            whole = (batch.validate(full=True) or batch for batch in batches)  # or texts that are no UTF-8 come later
            yield pa.RecordBatchReader.from_batches(file.schema_arrow, whole)
            return
        content = path.read_bytes()
        lines = lines_of(content)
        if path.suffix == ".json" and content.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):  # else lines
            lines = [json.dumps(row).encode() for row in json.loads(content)]
        yield pa.table({JSON_LINE: pa.array(lines, pa.large_binary())}).to_reader()
    except (pa.ArrowException, OSError, RecursionError, ValueError) as error:
        raise ValueError(f"{flag}: {path} is neither .jsonl, .json nor a readable parquet file: {error}") from error


def lines_of(content: bytes) -> list[bytes]:
    """The lines that are not blank, each behind the blank ones before it as newlines: so a row keeps its number."""
    lines, blank = [], b""
    for line in content.splitlines():
        if line.strip():
            lines.append(blank + line)
            blank = b""
        else:
            blank += b"\n"
    return lines


def download(name: str, flag: str) -> list[str]:
    """Arrow files of ORG/NAME[:CONFIG][:SPLIT] in the cache of the package datasets, which fetches what it lacks."""
    repository, *config, split = name.split(":") if ":" in name else (name, "train")
    try:
        from datasets import load_dataset

        data = load_dataset(repository, *config, split=split, keep_in_memory=False)
    except Exception as error:  # not installed, no network, no such id, configuration or split, a broken file, ...
        told = f"{flag}: no such file: {name}; nor is there a data set of the hub (ORG/NAME:CONFIG:SPLIT, with"
        raise ValueError(f"{told} `pip install datasets`): {error}") from error
    return [file["filename"] for file in data.cache_files]


def batch_size(columns: list[str]) -> int:
    """Rows to hold at a time: few where there are pictures as bytes."""
    return 32 if {"image", "images", "videos"} & set(columns) else 4096


def records(table: pa.Table) -> Iterator[dict | str]:
    """Every row as a dict, or as the reason why it is none; some at a time, never the whole table."""
    for batch in table.to_batches(max_chunksize=batch_size(table.column_names)):
        if table.column_names != [JSON_LINE]:
            yield from batch.to_pylist()
            continue
        for line in batch.column(0).to_pylist():
            try:
                record = json.loads(line.lstrip())
                if line.count(b"[") + line.count(b"{") > MAX_DEPTH and too_deep(record):
                    raise RecursionError
                yield record if isinstance(record, dict) else f"a JSON {type(record).__name__}, expected an object"
            except RecursionError:
                yield f"nested deeper than {MAX_DEPTH}"
            except ValueError as error:  # bad JSON and bad UTF-8 alike
                yield f"invalid JSON: {error}"


def too_deep(value: object) -> bool:
    """Does a value of JSON nest deeper than MAX_DEPTH?"""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)]
        level = [child for children in inner for child in children]
    return bool(level)

"""Files and messages, without torch: atomic writes, values as JSON, what a user can put right."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """write(temporary path), then rename it: a reader sees the old file or the new one, and no half one stays."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(temporary)
        with temporary.open() as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def jsonable(value):
    """Plain JSON types only: NaN and infinities become null, numpy and torch scalars numbers, paths strings."""
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Path):
        return str(value)
    return float(value) if math.isfinite(value) else None


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters, cut in the middle; control characters would garble the terminal."""
    text = "".join(c if c.isprintable() or c == "\n" else "�" for c in text)
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]} …[{len(text) - 2 * (limit // 2)} characters]… {text[-(limit // 2) :]}"


@contextmanager
def user_errors() -> Iterator[None]:
    """What the user can put right (a file, a flag) ends the run with its message alone, not with a trace per rank."""
    try:
        yield
    except (ValueError, FileNotFoundError, ConnectionError) as error:
        raise SystemExit(f"error: {error}") from error


def refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise SystemExit(message)

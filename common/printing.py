"""All that a run prints passes through here: texts of others cannot steer the terminal."""

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

BIDIRECTIONAL = {0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
STEERING = ({*range(32), *range(127, 160), 0x2028, 0x2029} | BIDIRECTIONAL) - {ord("\t"), ord("\n")}
REPLACED = dict.fromkeys(STEERING, "\ufffd")


def printable(text: str) -> str:
    """A text without characters that steer a terminal or turn the direction of writing, by which a
    reward function, a tool or a server could hide other lines. Lines and tabs stay."""
    return text.translate(REPLACED)


def guard_output() -> None:
    """From now on this process prints by `write_printable`, and a failure to write is ignored (a
    full disk, a reader that is gone). Streams that a notebook or a harness has put in the place of
    the usual ones are guarded as far as they can be."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
        if stream is not None:
            with suppress(AttributeError):  # a stream with fixed methods stays as it is
                stream.write = partial(write_printable, stream.write)
                stream.flush = partial(flush_if_possible, stream.flush)


def write_printable(write: Callable[[str], object], text: str) -> int:
    """Write a text as `printable` returns it, but keep a carriage return at its start: progress
    bars begin their lines with one."""
    start = "\r" if text.startswith("\r") else ""
    with suppress(OSError, ValueError):  # ValueError: the stream is closed
        write(start + printable(text.removeprefix(start)))
    return len(text)


def flush_if_possible(flush: Callable[[], object]) -> None:
    with suppress(OSError, ValueError):
        flush()

"""The door through which everything goes that a run prints: what others have written steers no
terminal there."""

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

BIDIRECTIONAL = {0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
STEERING = ({*range(32), *range(127, 160), 0x2028, 0x2029} | BIDIRECTIONAL) - {ord("\t"), ord("\n")}
REPLACED = dict.fromkeys(STEERING, "\ufffd")


def printable(text: str) -> str:
    """Without characters that steer a terminal or turn the direction of writing: who has written
    the text, a reward function, a tool or a server, could hide other lines by them. Lines and tabs
    stay."""
    return text.translate(REPLACED)


def guard_output() -> None:
    """From now on what this process prints is `printable`, and costs itself alone where it cannot
    be written: on a full disk, to a reader that is gone. A notebook or a harness may have put
    streams of its own in the place."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
        if stream is not None:
            with suppress(AttributeError):  # one that takes no other methods stays as it is
                stream.write = partial(write_printable, stream.write)
                stream.flush = partial(flush_if_possible, stream.flush)


def write_printable(write: Callable[[str], object], text: str) -> int:
    """A return to the start of the line is a progress bar's where it comes first."""
    start = "\r" if text.startswith("\r") else ""
    with suppress(OSError, ValueError):  # the latter: it is closed
        write(start + printable(text.removeprefix(start)))
    return len(text)


def flush_if_possible(flush: Callable[[], object]) -> None:
    with suppress(OSError, ValueError):
        flush()

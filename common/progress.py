"""Lines that say how far a long phase is, or where a run is that prints nothing. Without torch, so
that every file can print them."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

INTERVAL = 15.0  # seconds from `last_print` to the next line of `Progress`, at least
ROOT = f"{Path(__file__).parents[1]}/"
SILENCE = 20.0  # seconds without a line, at most


class Progress:
    """Lines of rank 0, such as "... update, micro-batch 5/12, 2m left", after `first` seconds of
    the outermost loop; nested loops share them.

    for batch in Progress("micro-batch", batches): ...
    progress = Progress("rewards", 256); progress.add(8)
    """

    loops: ClassVar[dict[str, "Progress"]] = {}  # under way, the outermost first
    last_print: ClassVar[float] = time.monotonic()  # when this file or `Logger` last printed

    def __init__(self, label: str, items: Iterable | int, first: float = INTERVAL):
        self.label = label
        self.items = range(items) if isinstance(items, int) else list(items)
        self.start = time.monotonic()
        self.done = 0
        self.first = first

    def __iter__(self) -> Iterator:
        self.loops[self.label] = self
        try:
            for item in self.items:
                yield item
                self.add()
        finally:
            self.loops.pop(self.label, None)

    def add(self, count: int = 1) -> None:
        """Count items as done, and print a line if one is due. 0 for the line alone."""
        self.done += count
        # one that counts by `add` alone is the innermost
        loops = list((self.loops | {self.label: self}).values())
        now = time.monotonic()
        due = max(loops[0].start + loops[0].first, Progress.last_print + INTERVAL)
        if os.environ.get("RANK", "0") != "0" or now < due:
            return
        share = 0.0  # how much is done, of all loops together
        for loop in reversed(loops):
            share = (loop.done + share) / max(len(loop.items), 1)
        if share >= 1:
            return
        if share > 0:
            left = duration((now - loops[0].start) * (1 - share) / share) + " left"
        else:
            left = "nothing is done yet"
        positions = ", ".join(loop.position() for loop in loops)
        print_line(f"... {positions}, {left}")
        Progress.last_print = now

    def position(self) -> str:
        """The label, and how many of several items are done."""
        if len(self.items) <= 1:
            return self.label
        return f"{self.label} {self.done}/{len(self.items)}"


def say(text: str) -> None:
    """Print a line of the run, on rank 0 alone."""
    if os.environ.get("RANK", "0") == "0":
        print_line(text)
        Progress.last_print = time.monotonic()


def break_silence(missing: str = "") -> None:
    """If rank 0 has printed nothing for SILENCE: print what it waits for, or else in which of our
    functions its main thread is."""
    if os.environ.get("RANK", "0") == "0" and time.monotonic() > Progress.last_print + SILENCE:
        state = missing or f"still running: {current_function()}"
        print_line(f"... {state}")
        Progress.last_print = time.monotonic()


def print_line(text: str) -> None:
    """In one write: `break_silence` is called in a thread, and another thread may print, or end the
    process, between two."""
    print(f"{text}\n", end="", flush=True)


def current_function() -> str:
    """Name and file of the innermost function of ours that the main thread is in."""
    innermost = sys._current_frames()[threading.main_thread().ident]
    for frame, _ in traceback.walk_stack(innermost):
        code = frame.f_code
        path = code.co_filename.removeprefix(ROOT)
        # ./with puts .venv, with the libraries, into our folder
        if path != code.co_filename and "site-packages/" not in path:
            return f"{code.co_name} ({path})"
    return "a library"


def duration(seconds: float) -> str:
    """At most five characters below ten days: 99s, 99m, 3h05, 4d04h."""
    minutes = int(seconds) // 60
    hours = int(seconds) // 3600
    if seconds < 100:
        return f"{seconds:.0f}s"
    if minutes < 100:
        return f"{minutes}m"
    if hours < 100:
        return f"{hours}h{minutes % 60:02}"
    return f"{hours // 24}d{hours % 24:02}h"

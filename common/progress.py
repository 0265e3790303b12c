"""How far a long phase is, told while it lasts. Without torch, so that whatever waits can tell."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

EVERY = 15.0  # seconds: `Progress` says nothing more often
ROOT = f"{Path(__file__).parents[1]}/"
SILENCE = 20.0  # seconds, at most


class Progress:
    """Lines of rank 0, such as "... update, micro-batch 5/12, 2m left", after `first` seconds;
    inner loops share them.

    for batch in Progress("micro-batch", batches): ...    or    progress = Progress("rewards", 256);
    progress.add(8)
    """

    loops: ClassVar[dict[str, "Progress"]] = {}  # under way, the outermost first
    said: ClassVar[float] = time.monotonic()  # when the last line was printed

    def __init__(self, what: str, items: Iterable | int, first: float = EVERY):
        self.what, self.items = what, range(items) if isinstance(items, int) else list(items)
        self.start, self.done, self.first = time.monotonic(), 0, first

    def __iter__(self) -> Iterator:
        self.loops[self.what] = self
        try:
            for item in self.items:
                yield item
                self.add()
        finally:
            self.loops.pop(self.what, None)

    def add(self, count: int = 1) -> None:
        """So many more are done; 0 if it is only time to say something."""
        self.done += count
        loops, now = list((self.loops | {self.what: self}).values()), time.monotonic()
        due = max(loops[0].start + loops[0].first, Progress.said + EVERY)
        if os.environ.get("RANK", "0") != "0" or now < due:
            return
        share = 0.0
        for loop in reversed(loops):
            share = (loop.done + share) / max(len(loop.items), 1)
        if share >= 1:
            return
        counts = [
            f"{p.what} {p.done}/{len(p.items)}" if len(p.items) > 1 else p.what for p in loops
        ]
        left = (
            duration((now - loops[0].start) * (1 - share) / share) + " left"
            if share
            else "nothing is done yet"
        )
        print(f"... {', '.join(counts)}, {left}", flush=True)
        Progress.said = now


def say(text: str) -> None:
    """A line of the run, which rank 0 alone prints."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)
        Progress.said = time.monotonic()


def break_silence(what: str = "") -> None:
    """If rank 0 has said nothing for long: what it waits for, or else in which of our functions its
    main thread is."""
    if os.environ.get("RANK", "0") == "0" and time.monotonic() > Progress.said + SILENCE:
        frames = traceback.walk_stack(sys._current_frames()[threading.main_thread().ident])
        calls = (frame.f_code for frame, _ in frames if frame.f_code.co_filename.startswith(ROOT))
        where = (f"{call.co_name}, {call.co_filename.removeprefix(ROOT)}" for call in calls)
        print("...", what or next(where, "busy"), flush=True)
        Progress.said = time.monotonic()


def duration(seconds: float) -> str:
    """At most five characters, up to 99 days: 99s, 99m, 3h05, 4d03h."""
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if seconds < 100:
        return f"{seconds:.0f}s"
    if minutes < 100:
        return f"{minutes}m"
    return f"{hours}h{minutes % 60:02}" if hours < 100 else f"{hours // 24}d{hours % 24:02}h"

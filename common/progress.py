"""How far a long phase is, told while it lasts. Without torch, so that whatever waits can tell."""

import os
import time
from collections.abc import Iterable, Iterator
from typing import ClassVar

EVERY = 20.0  # seconds: nothing is said more often


class Progress:
    """Lines of rank 0, such as "... update, micro-batch 5/12, 2m left", after `first` seconds; inner loops share them.

    for batch in Progress("micro-batch", batches): ...    or    progress = Progress("rewards", 256); progress.add(8)
    """

    loops: ClassVar[dict[str, "Progress"]] = {}  # under way, the outermost first
    said: ClassVar[float] = 0.0  # when the last line was printed

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
        counts = [f"{p.what} {p.done}/{len(p.items)}" if len(p.items) > 1 else p.what for p in loops]
        left = duration((now - loops[0].start) * (1 - share) / share) + " left" if share else "nothing is done yet"
        print(f"... {', '.join(counts)}, {left}", flush=True)
        Progress.said = now


def duration(seconds: float) -> str:
    """At most five characters, up to 99 days: 99s, 99m, 3h05, 4d03h."""
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if seconds < 100:
        return f"{seconds:.0f}s"
    if minutes < 100:
        return f"{minutes}m"
    return f"{hours}h{minutes % 60:02}" if hours < 100 else f"{hours // 24}d{hours % 24:02}h"

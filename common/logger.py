"""What a run says of each step: on the console, in metrics.jsonl, to trackers."""

import json
import time
from pathlib import Path

from common.ending import reached
from common.files import jsonable
from common.progress import Progress


class Logger:
    """Console line and metrics.jsonl always, trackers if they work: nothing in here may end or
    delay a run.

    `status` makes the line of a step, `trackers` (or None) log it, too: common/look. On ranks other
    than 0 (`is_main=False`) every method does nothing.
    """

    def __init__(self, run_dir: Path, status, trackers=None, is_main: bool = True):
        self.path, self.status, self.trackers, self.is_main = (
            run_dir / "metrics.jsonl",
            status,
            trackers,
            is_main,
        )
        self.write_failed, self.torn = False, None

    def _append(self, record: dict) -> None:
        line = json.dumps(jsonable(record), allow_nan=False) + "\n"
        try:
            if self.path.is_fifo():
                raise OSError("a pipe, which would wait for a reader")
            # a killed run leaves half a line; the next record must not be glued to it
            if self.torn is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.torn = self.path.is_file() and self.path.read_bytes()[-1:] not in (b"", b"\n")
            # opened each time: what could not be flushed is not kept and retried
            with open(self.path, "a") as file:
                file.write("\n" * self.torn + line)
            self.torn = False
        except OSError as error:  # a full disk costs records, not the run
            self.torn = True
            if not self.write_failed:
                print(
                    f"warning: cannot write {self.path} ({error}); records are lost while "
                    "this lasts",
                    flush=True,
                )
            self.write_failed = True

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of one step everywhere and print the status line."""
        if not self.is_main:
            return
        reached["step"] = step
        self._append({"step": step, **metrics})
        print(self.status.line(step, metrics), flush=True)
        Progress.said = time.monotonic()
        self._track(step, metrics)

    def event(self, record: dict) -> None:
        """Append a record that is not a step, such as {"event": "resumed", "step": 12}; trackers
        get its metrics."""
        if self.is_main:
            self._append(record)
            self._track(record["step"], {key: value for key, value in record.items() if "/" in key})

    def _track(self, step: int, metrics: dict) -> None:
        numbers = {
            key: value for key, value in jsonable(metrics).items() if isinstance(value, int | float)
        }
        if self.trackers and numbers:
            self.trackers.log(step, numbers)

    def close(self) -> None:
        """End the trackers, which are told of a run that fails."""
        if self.trackers:
            self.trackers.close(failed=reached.get("status", 0) != 0)

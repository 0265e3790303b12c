"""Files and messages, without torch: atomic writes, values as JSON, the lock of a run folder, user errors."""

import json
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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


HEARTBEAT_S, STALE_S = 10.0, 60.0


class RunLock:
    """FOLDER/lock: who writes into a run folder. flock is not to be trusted on network file systems.

    A thread keeps its modification time fresh. SystemExit if a run that lives has it; one left behind is taken over:
    on this machine when its process is gone, else when it is older than a minute.
    """

    def __init__(self, folder: Path, notice: Callable[[str], None]):
        self.path, self.token = folder / "lock", secrets.token_hex(8)
        self.text = json.dumps({"host": socket.gethostname(), "token": self.token, **process(os.getpid())})
        try:
            folder.mkdir(parents=True, exist_ok=True)
            while not self._take(notice):
                pass
        except OSError as error:
            raise SystemExit(f"--output-dir {folder}: cannot write there ({error})") from error
        threading.Thread(target=self._beat, daemon=True).start()

    def _take(self, notice: Callable[[str], None]) -> bool:
        try:
            with self.path.open("x") as file:
                file.write(self.text)
            return True
        except FileExistsError:
            seen = self._read()
        try:
            holder = json.loads(seen)
            who = f"process {holder['pid']} on {holder['host']}"
        except (ValueError, TypeError, KeyError):
            holder, who = {}, "a run that is starting"
        if self._lives(holder):
            folder = self.path.parent
            raise SystemExit(f"--output-dir {folder}: {who} writes there; end it, or give another --output-dir")
        aside = self.path.with_name(f"lock.{self.token}")
        with suppress(FileNotFoundError):  # another run was faster
            os.rename(self.path, aside)
            if aside.read_text() == seen:
                notice(f"{self.path}: {who} has left it behind, taken over")
            else:
                os.link(aside, self.path)  # it was taken over in between
            aside.unlink()
        return False

    def _read(self) -> str:
        with suppress(OSError):
            return self.path.read_text()
        return ""

    def _lives(self, holder: dict) -> bool:
        own = process(os.getpid())
        if holder.get("machine") == own["machine"]:
            return process(holder["pid"])["started"] == holder["started"]
        clock = self.path.with_name(f"clock.{self.token}")  # that of the file system, by which the lock is dated
        try:
            clock.touch()
            return clock.stat().st_mtime - self.path.stat().st_mtime < STALE_S
        except FileNotFoundError:
            return False
        finally:
            clock.unlink(missing_ok=True)

    def held(self) -> bool:
        return self._read() == self.text

    def _beat(self) -> None:
        while self.held():
            with suppress(OSError):
                os.utime(self.path)
            time.sleep(HEARTBEAT_S)

    def release(self) -> None:
        if self.held():
            self.path.unlink(missing_ok=True)


def process(pid: int) -> dict:
    """What tells a process from any other: its number, when it started, and where that counts."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    started = None
    with suppress(OSError, IndexError):
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return {"pid": pid, "started": started, "machine": machine}

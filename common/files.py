"""Files and messages, without torch: atomic writes, values as JSON, the lock of a run folder, user
errors."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from filelock import LeaseCompromise, SoftFileLease, Timeout
from pydantic_core import to_jsonable_python
from safetensors import SafetensorError

from common.limits import exhausted_memory
from common.printing import printable
from common.progress import say

LEASE_S, HEARTBEAT_S = 60.0, 2.0
# what libraries run into in damaged files
DAMAGE = (
    ValueError,
    OSError,
    SafetensorError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
)
jsonable = partial(to_jsonable_python, inf_nan_mode="null", fallback=float)  # paths become strings


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """write(temporary path), then rename it: a reader sees the old file or the new one, and no half
    one stays."""
    temporary = path.with_name(f".{path.name}.tmp")
    # of a killed process; a link would be written through, a pipe waited for
    temporary.unlink(missing_ok=True)
    try:
        write(temporary)
        with temporary.open() as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters, cut in the middle; control characters would garble the
    terminal."""
    if len(text) > limit:
        left_out = f" …[{len(text) - 2 * (limit // 2)} characters]… "
        text = text[: limit // 2] + left_out + text[-(limit // 2) :]
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)


@contextmanager
def user_errors(
    told: str = "error", kinds=(ValueError, OSError, SafetensorError)
) -> Iterator[None]:
    """What the user can put right (a file, a flag) ends the run with its message alone, not with a
    trace per rank."""
    try:
        yield
    except kinds as error:
        text = str(error)
        if kinds is DAMAGE:  # a library's, in several lines
            text = " ".join(text.split())
        raise SystemExit(printable(f"{told}: {text}")) from error


@contextmanager
def memory_advice(phase: str) -> Iterator[None]:
    """Out of memory in a phase that cannot be repeated ends the run with the flags that help."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        memory = exhausted_memory(error)
        if not memory:
            raise
        remedy = "lower --engine-memory, or give it more memory"
        if memory == "GPU memory":
            remedy = (
                "lower --engine-memory, add --offload optimizer (of a KL the reference, "
                "too), or use more GPUs"
            )
        raise SystemExit(
            f"out of {memory} in {phase}: {remedy}; then the same command goes on"
        ) from error


def refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise SystemExit(message)


def lock_folder(
    folder: Path, lost: Callable[[LeaseCompromise], None] | None = None
) -> SoftFileLease:
    """FOLDER/lock: who writes into a run folder (flock is not to be trusted on network file
    systems).

    SystemExit if the heart of another run beats there. One left behind is taken over: on this
    machine at once when its process is gone, else after a minute without a heartbeat. `lost` is
    called when that happens to this one.
    """
    path = folder / "lock"
    options = {"lease_duration": LEASE_S, "heartbeat_interval": HEARTBEAT_S, "on_compromise": lost}
    lock = SoftFileLease(path, thread_local=False, **options)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        owner, beat = lock.owner, modified(path)
        told = f"another run writes there; {path} has its name"
        if owner:
            told = f"process {owner.pid} on {owner.hostname} writes there; end it"
            say(
                f"{path} is of process {owner.pid} on {owner.hostname}: taken over, unless "
                "its heart beats in a minute"
            )
        elif beat:
            told = (
                f"{path} names no process, as a full disk leaves it; if no run writes "
                "there, delete it"
            )
            say(
                f"{path} names no process: taken over, if it is damaged and no heart beats in "
                "a minute"
            )
        lock.acquire(timeout=LEASE_S + 5, cancel_check=lambda: modified(path) not in (beat, None))
    except Timeout as error:
        raise SystemExit(f"--output-dir {folder}: {told}, or give another --output-dir") from error
    except OSError as error:
        raise SystemExit(f"--output-dir {folder}: cannot write there ({error})") from error
    return lock


def modified(path: Path) -> float | None:
    """When a file was written last; None if there is none."""
    with suppress(FileNotFoundError):
        return path.stat().st_mtime
    return None


@contextmanager
def full_disk_is_a_warning(path: Path) -> Iterator[None]:
    """What cannot be written costs itself, not the run."""
    try:
        yield
    except OSError as error:
        print(f"warning: {path} not written ({error})", flush=True)


def command_line() -> list[str]:
    """The arguments of this process, with `~` as the home folder wherever a path may begin: a shell
    leaves it as it is behind `=`, behind a comma and in quotes. SystemExit where no home folder is
    known."""
    arguments = []
    for argument in sys.argv[1:]:
        name, equals, value = "", "", argument
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
        paths = [os.path.expanduser(path) for path in value.split(",")]
        refuse(
            any(path == "~" or path.startswith("~/") for path in paths),
            f"{argument}: there is no home folder",
        )
        arguments.append(name + equals + ",".join(paths))
    return arguments

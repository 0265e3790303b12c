"""Files and messages, without torch: atomic writes, values as JSON, the lock of a run folder, user
errors, a hub's errors."""

import errno
import logging
import os
import re
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

LEASE_S = 60.0
HEARTBEAT_S = 2.0
# what libraries raise on damaged files
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
    """write(temporary path), then rename it: readers see the old file or the new one, never a part
    of one."""
    temporary = path.with_name(f".{path.name}.tmp")
    # left by a killed process; we would write through a link, and wait for a pipe
    temporary.unlink(missing_ok=True)
    try:
        write(temporary)
        with temporary.open() as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def shorten(text: str, limit: int) -> str:
    """`text` with its middle cut out if it has more than `limit` characters; `printable`, and
    without halves of surrogate pairs."""
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]} …[{len(text) - 2 * half} characters]… {text[-half:]}"
    return re.sub(r"[\ud800-\udfff]", "�", printable(text))


@contextmanager
def user_errors(
    prefix: str = "error", kinds=(ValueError, OSError, SafetensorError)
) -> Iterator[None]:
    """SystemExit with `prefix` and the message of an error that the user can fix (a file, a flag),
    in place of a trace from each rank."""
    try:
        yield
    except kinds as error:
        text = str(error)
        if kinds is DAMAGE:  # a library's message, in several lines
            text = " ".join(text.split())
        raise SystemExit(printable(f"{prefix}: {text}")) from error


class FirstRetry(logging.Filter):
    """One line in place of the two that huggingface_hub logs each time it asks again."""

    def __init__(self):
        super().__init__()
        self.is_first = True

    def filter(self, record: logging.LogRecord) -> bool:
        problem, marker, _ = record.getMessage().partition(" thrown while requesting ")
        if marker and self.is_first:
            self.is_first = False
            problem = problem.strip("'")
            say(f"the hub does not answer ({problem}); trying again for half a minute")
        return not marker and not problem.startswith("Retrying in ")


@contextmanager
def hub_errors() -> Iterator[None]:
    """Around a download from the hub: ConnectionError with one line if it does not answer or
    refuses; SystemExit if the disk is full, or HF_HOME cannot be written."""
    logger = logging.getLogger("huggingface_hub.utils._http")
    first_retry = FirstRetry()
    logger.addFilter(first_retry)
    try:
        yield
    except Exception as error:
        from huggingface_hub import errors

        # network, HTTP, a proxy, offline; a RuntimeError from the hub's Xet
        if not isinstance(error, OSError | RuntimeError | errors.HTTPError):
            raise
        problem = hub_problem(error)
        if getattr(error, "errno", None) in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise SystemExit(
                f"what the hub sends cannot be written: {problem}; set HF_HOME to a folder of yours"
            ) from error
        if "No space left" in problem or "quota exceeded" in problem:
            raise SystemExit(
                f"no room for what the hub has sent: {problem}; free some space, or set HF_HOME to "
                "a folder on another disk"
            ) from error
        raise ConnectionError(problem) from error
    finally:
        logger.removeFilter(first_retry)


def hub_problem(error: Exception) -> str:
    """What huggingface_hub has raised, in one line."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "the hub wants its terms to be accepted, on its page there, and `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has none of this name; one that is private needs `hf auth login`"
    cause = error.__cause__ or error  # the reason behind "check your connection"
    return shorten(" ".join(str(cause).split()), 300)


@contextmanager
def memory_advice(phase: str) -> Iterator[None]:
    """Out of memory in a phase that cannot be repeated is a SystemExit with the flags that help."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        memory = exhausted_memory(error)
        if not memory:
            raise
        if memory == "GPU memory":
            remedy = (
                "lower --engine-memory, add --offload optimizer (with a KL also reference, with "
                "LoRA also base), or use more GPUs"
            )
        else:
            remedy = "lower --engine-memory, or give the machine more memory"
        message = f"out of {memory} in {phase}: {remedy}; then the same command goes on"
        raise SystemExit(message) from error


def lock_folder(
    folder: Path, lost: Callable[[LeaseCompromise], None] | None = None
) -> SoftFileLease:
    """Take FOLDER/lock, so that one run alone writes there (flock fails on some network file
    systems).

    SystemExit if another run holds it. A lock that was left behind is taken over: at once if its
    process ran on this machine and has ended, else after a minute without a heartbeat. A damaged
    one is taken over after seconds; an empty one, as a full disk leaves it, never. `lost` is called
    when another run has taken this lock over, it has vanished, or it cannot be touched.
    """
    path = folder / "lock"
    lock = SoftFileLease(
        path,
        thread_local=False,
        lease_duration=LEASE_S,
        heartbeat_interval=HEARTBEAT_S,
        on_compromise=lost,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        owner = lock.owner
        last_beat = modified_at(path)
        if owner:
            process = f"process {owner.pid} on {owner.hostname}"
            problem = f"{process} writes there; end it"
            say(f"{path} is of {process}: taken over, unless its heart beats in a minute")
        elif last_beat:
            problem = (
                f"{path} names no process, as a full disk leaves it; if no run writes there, "
                "delete it"
            )
            say(f"{path} names no process: taken over if it is damaged, but not if it is empty")
        else:
            problem = f"another run writes there; {path} has its name"

        def has_beaten() -> bool:
            return modified_at(path) not in (last_beat, None)

        # a beat ends the wait, with Timeout: that run lives
        lock.acquire(timeout=LEASE_S + 5, cancel_check=has_beaten)
    except Timeout as error:
        message = f"--output-dir {folder}: {problem}, or give another --output-dir"
        raise SystemExit(message) from error
    except OSError as error:
        raise SystemExit(f"--output-dir {folder}: cannot write there ({error})") from error
    return lock


def modified_at(path: Path) -> float | None:
    """When a file was last written, in seconds since 1970; None if there is none."""
    with suppress(FileNotFoundError):
        return path.stat().st_mtime
    return None


@contextmanager
def full_disk_is_a_warning(path: Path) -> Iterator[None]:
    """An OSError while `path` is written is a warning: the run goes on without it."""
    try:
        yield
    except OSError as error:
        print(f"warning: {path} not written ({error})", flush=True)

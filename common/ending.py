"""How the ranks of a run end together: what the first that fails says is printed at once, and ends
the others.

torchrun ends the ranks of a machine when one of them has ended. On another machine a thread hears
of it: a rank that samples or scores is in no collective that could fail. What moves no more, or
waits for a dead network, is ended by the timer of faulthandler, which needs neither.
"""

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from common.printing import printable
from common.progress import break_silence

if TYPE_CHECKING:
    from torch.distributed import Store

GRACE_S = 3  # in which the first that failed speaks, and torchrun sees which it was
INTERRUPTED = "interrupted"

at_end = ExitStack()  # closed where the run ends, however it does
# {"step": 3, "checkpoint": folder}, for who presses Ctrl-C; at the end the "status"
reached: dict[str, object] = {}
_leaving = threading.Lock()
_store: "Store | None" = None  # of the group, through a connection of its own
_stall_s = 0.0  # 0: nothing is watched


def watch(store: "Store | None", stall_minutes: float) -> None:
    """From now on this rank ends with any other that fails, and when it shows no sign of life for
    so long.

    store: what the ranks share; None for a group of one.
    """
    global _store, _stall_s
    _store, _stall_s = store, stall_minutes * 60
    sign_of_life()
    threading.Thread(target=listen, daemon=True).start()


def sign_of_life() -> None:
    """Wind the timer up again. When it runs out it prints the stacks of all threads, and ends the
    process."""
    if _stall_s:
        # sys.stderr may have been replaced
        faulthandler.dump_traceback_later(_stall_s, file=2, exit=True)


def listen() -> None:
    """A thread: breaks the silence of rank 0, and ends this rank when another one has failed."""
    while not (words := heard()):
        break_silence()
        time.sleep(1.0)
    time.sleep(GRACE_S)  # until the main thread has noticed it, too
    if words == INTERRUPTED:
        leave(130)
    leave(1, f"[rank {os.environ['RANK']}] ends: {words}")


def heard() -> str:
    """What another rank has said at its failure."""
    try:
        return _store.get("failed").decode() if _store and _store.check(["failed"]) else ""
    except RuntimeError:
        return "the store is gone, and with it torchrun, or the rank that kept it"


def fail(line: str, details: str = "") -> None:
    """Tell the other ranks and the user. Who is not the first to fail lets the first speak, and
    adds a line if that differs."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    # the network is dead
    unheard = threading.Timer(5 * GRACE_S, lambda: (last_words(line, details), os._exit(1)))
    unheard.start()
    with suppress(RuntimeError):
        if _store and (first := _store.add("failures", 1) == 1):
            _store.set("failed", line)
    unheard.cancel()
    if not first:
        time.sleep(GRACE_S)
        details = ""
    if line != INTERRUPTED and (first or line != heard()):
        last_words(line, details)


def last_words(line: str, details: str = "") -> None:
    """Print it, and leave the line to torchrun, which shows it at the end of its report."""
    line = printable(line)
    print(printable(details) or line, file=sys.stderr, flush=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))


def leave(status: int, words: str = "") -> NoReturn:
    """The end of this process, by the first thread that comes here; what was opened last is closed
    first."""
    _leaving.acquire()
    if words:
        last_words(words)
    reached["status"] = status
    try:
        with suppress(Exception):
            at_end.close()
    finally:  # a second Ctrl-C
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # it may have been replaced, by one that is closed
                stream.flush()
        os._exit(status)


@contextmanager
def said_once() -> Iterator[None]:
    """Around what prints, and ends, on every rank alike: on a machine the first does, the others
    are quiet."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            yield
        except SystemExit as stop:
            time.sleep(GRACE_S)  # torchrun ends it before that
            raise SystemExit(1 if stop.code else 0) from None

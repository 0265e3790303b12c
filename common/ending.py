"""How the ranks of a run end together: the message of the first one that fails is printed at once,
and ends the others.

torchrun ends the ranks of a machine when one of them has failed. For those of other machines a
thread watches the store of the group: a rank that samples or scores is in no collective that could
fail. A rank that hangs, or waits for a dead network, is ended by the timer of faulthandler, which
needs neither Python's lock nor the network.
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

GRACE_S = 3  # seconds in which the first failure is printed, and torchrun sees which it was
FOREVER_S = 1e8  # three years: faulthandler takes no infinite time
INTERRUPTED = "interrupted"

at_end = ExitStack()  # closed by `leave`
# {"step": 3, "checkpoint": folder}, printed if a signal ends the run; at the end the "status", too
reached: dict[str, object] = {}
_leaving = threading.Lock()
_store: "Store | None" = None  # of the group, through a connection of its own
_stall_s = 0.0  # 0: no stall ends this process


def watch(store: "Store | None", stall_minutes: float) -> None:
    """From now on this rank ends when another one fails, and after `stall_minutes` without a
    `sign_of_life`.

    store: shared by the ranks; None for a group of one.
    """
    global _store, _stall_s
    _store = store
    # the ranks of a machine share its terminal: their stacks come one after the other
    offset_s = 0.5 * int(os.environ.get("LOCAL_RANK", "0"))
    _stall_s = min(stall_minutes * 60, FOREVER_S) + offset_s
    sign_of_life()
    threading.Thread(target=listen, daemon=True).start()


def sign_of_life() -> None:
    """Restart the timer that, when it runs out, prints the stacks of all threads and ends the
    process."""
    if _stall_s:
        # sys.stderr may have been replaced
        faulthandler.dump_traceback_later(_stall_s, file=2, exit=True)


def listen() -> None:
    """In a thread: print where rank 0 is after a long silence, and end this rank when another one
    has failed."""
    failure = first_failure()
    while not failure:
        break_silence()
        time.sleep(1.0)
        failure = first_failure()
    time.sleep(GRACE_S)  # the main thread may notice the failure by itself
    if failure == INTERRUPTED:
        leave(130)
    leave(1, f"[rank {os.environ['RANK']}] ends: {failure}")


def first_failure() -> str:
    """The line of the first rank that has failed; "" while there is none. If the store is gone, a
    line that says so."""
    try:
        if _store and _store.check(["failed"]):
            return _store.get("failed").decode()
    except RuntimeError:
        return "the store is gone, and with it torchrun, or the rank that kept it"
    return ""


def fail(line: str, details: str = "") -> None:
    """Report a failure to the other ranks and to the user. The first rank to fail prints `details`,
    or else its line; another one waits for that, and prints its line if it differs. Nothing is
    printed if the line is INTERRUPTED."""
    # half of a surrogate pair, as in a file name that is not UTF-8, cannot go through the store
    line = line.encode(errors="backslashreplace").decode()
    # without a store that answers, the first rank of each machine counts as the first to fail
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    # a stall's timer, if it ran out now, would cut the report off
    faulthandler.cancel_dump_traceback_later()

    def end_without_network() -> None:
        print_failure(line, details)
        os._exit(1)

    timer = threading.Timer(5 * GRACE_S, end_without_network)
    timer.start()
    with suppress(RuntimeError):
        if _store:
            is_first = _store.add("failures", 1) == 1
            if is_first:
                _store.set("failed", line)
    timer.cancel()
    if not is_first:
        time.sleep(GRACE_S)
        details = ""
    if line != INTERRUPTED and (is_first or line != first_failure()):
        print_failure(line, details)
    sign_of_life()  # what closes now may hang


def print_failure(line: str, details: str = "") -> None:
    """Print the details, or else the line; leave the line to torchrun, which shows it at the end of
    its report."""
    line = printable(line)
    print(printable(details) or line, file=sys.stderr, flush=True)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))


def leave(status: int, message: str = "") -> NoReturn:
    """End this process. The first thread that calls it does so; what was opened last is closed
    first."""
    _leaving.acquire()
    if message:
        print_failure(message)
    reached["status"] = status
    try:
        with suppress(Exception):
            at_end.close()
    finally:  # also at a second Ctrl-C
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the stream may have been replaced by one that is closed
                stream.flush()
        os._exit(status)


@contextmanager
def one_rank_prints() -> Iterator[None]:
    """Around code that prints, and ends, on every rank alike: on each machine only the first rank
    prints."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        yield
        return
    with open(os.devnull, "w") as devnull, redirect_stdout(devnull), redirect_stderr(devnull):
        try:
            yield
        except SystemExit as stop:
            if not stop.code:
                raise SystemExit(0) from None
            time.sleep(GRACE_S)  # by then torchrun has ended this rank
            raise SystemExit(1) from None

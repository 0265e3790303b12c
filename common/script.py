"""How a script's main begins and ends on each rank: signals, errors, exit codes."""

import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

from common import ending
from common.distributed import all_reduce, barrier, world_size
from common.printing import guard_output

# how gloo and NCCL say that another rank is gone
LOST = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
# SIGUSR1 is Slurm's usual one
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)
# signals so far; not an Event: a handler may run where the Event's lock is held
received: list[int] = []
stopping = threading.Event()  # a signal has come to some rank, and all ranks have agreed to end


def handle_signals() -> None:
    """After one of STOP_SIGNALS `requested_exit_code` is not 0: the script ends its step, saves,
    and exits. A second Ctrl-C, which torchrun passes on as a SIGTERM, ends it at once."""
    for number in STOP_SIGNALS:
        # what nohup, or a shell for a command with &, has set to be ignored stays ignored
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _note_signal)


def _note_signal(number: int, _frame: object) -> None:
    if signal.SIGINT in received and number in (signal.SIGINT, signal.SIGTERM):
        raise KeyboardInterrupt
    received.append(number)
    if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
        line = b"Ctrl-C: the run ends with this step, and saves; once more ends it at once"
        if "TORCHELASTIC_RUN_ID" in os.environ:
            line += b". torchrun waits for 30 s, or its --shutdown-timeout"
        os.write(2, line + b"\n")  # no print: the signal may have come inside of one


def requested_exit_code() -> int:
    """The exit code to end with, if a signal has come to any rank; else 0. All ranks call it."""
    status = 0
    if received:
        status = 128 + (signal.SIGINT if signal.SIGINT in received else signal.SIGTERM)
    (status,) = all_reduce([status], "max")
    if status > 0:
        stopping.set()
    return int(status)


def run(main: Callable, *args: object) -> None:
    """Run a script's `main` and leave by `os._exit`: a rank that waits in destructors would keep
    the others waiting."""
    guard_output()
    # with the default of 700 objects a tenth of the start goes into looking through the imports
    gc.set_threshold(50_000)
    try:
        status = _outcome(main, *args)
        if status > 128:  # after a signal the script has ended its step
            _print_end("stopped")
    except KeyboardInterrupt:
        ending.fail(ending.INTERRUPTED)
        _print_end(ending.INTERRUPTED)
        status = 130
    ending.leave(status)


def _print_end(message: str) -> None:
    """Print on rank 0 how the run has ended, at which step, and its last checkpoint."""
    if os.environ.get("RANK", "0") != "0":
        return
    if ending.reached:
        step = ending.reached.get("step")
        checkpoint = ending.reached.get("checkpoint") or "none"
        message += f" at step {step}; last checkpoint: {checkpoint}"
    print(message, file=sys.stderr, flush=True)


def _outcome(main: Callable, *args: object) -> int:
    """Run `main`; returns the exit code. A KeyboardInterrupt may come at any point, also while an
    error is reported, and is passed on."""
    try:
        main(*args)
        barrier()
    except SystemExit as stop:
        if stop.code is None:
            return 0
        if isinstance(stop.code, int):
            return stop.code
        ending.fail(str(stop.code))
        return 1
    except Exception as error:
        rank = f"[rank {os.environ.get('RANK', '0')}]"
        line = f"{rank} {type(error).__name__}: {error}{_advice(error)}"
        ending.fail(line, f"{rank} failed:\n{traceback.format_exc()}{line}")
        if _may_be_collective(error):
            # another rank's death may be the cause, and torchrun should see which was the first
            time.sleep(ending.GRACE_S)
        return 1
    return 0


def _may_be_collective(error: Exception) -> bool:
    """Whether the error may come from a collective, in which other ranks are too."""
    return isinstance(error, RuntimeError) and world_size() > 1


def _advice(error: Exception) -> str:
    """The way out, to be added to an error's line, if its text shows the cause; else ""."""
    text = str(error)
    names_lost_rank = any(words in text for words in LOST)
    if names_lost_rank and _may_be_collective(error) and not ending.first_failure():
        return (
            ". A rank is gone: one that was killed (signal 9) has most often run out of memory: "
            "docs/trouble.md"
        )
    # an import of ours: what users' own files raise becomes a ValueError
    if isinstance(error, ImportError) or "shared object" in text or "torchvision::" in text:
        return (
            ". Install what requirements.txt (-cpu, -v100) pins; python -m common.doctor says "
            "what works"
        )
    return ""

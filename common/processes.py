"""How the ranks of a run end together: one that fails, stands still or loses its torchrun takes the others along.

What the first one says is printed at once, and by torchrun once more as its last words.
"""

import ctypes
import faulthandler
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import NoReturn

from common.limits import usable_cpus
from common.printing import printable

GATHER_S = 60  # until all ranks have come, and are connected; GATHER_SECONDS in the environment
GRACE_S = 3  # in which the first that failed speaks, and torchrun sees which it was
INTERRUPTED = "interrupted"
LAUNCHERS = {  # how many processes srun or mpirun has started: which of them this is
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
}
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

at_end: list[Callable[[], object]] = []  # called where the run ends, however it does
reached: dict[str, object] = {}  # {"step": 3, "checkpoint": folder}, for who presses Ctrl-C; at the end the "status"
awaited: list[str] = []  # what is missing while the group forms
group: list = []  # its store, through a connection of its own: that of the main thread may wait for something
_sign_of_life = [time.monotonic()]
_leaving = threading.Lock()
PARENT = os.getppid()


def sign_of_life() -> None:
    _sign_of_life[0] = time.monotonic()


def ranks_here() -> int:
    """Ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cpus_of_rank() -> int:
    """Processors that this machine, or container, has for each of its ranks, at least one."""
    return max(1, usable_cpus() // ranks_here())


def in_threads(function: Callable, items: Iterable) -> list:
    """function(item) of each, side by side: for what reads pictures, which Pillow decodes without Python's lock."""
    with ThreadPoolExecutor(cpus_of_rank()) as threads:
        return list(threads.map(function, items))


def refuse_lone_ranks() -> None:
    """SystemExit if srun or mpirun has started several processes: each would be a run of its own."""
    for variable, number in LAUNCHERS.items():
        ranks = os.environ.get(variable, "1")
        if "RANK" not in os.environ and ranks.isdecimal() and int(ranks) > 1:
            command = f"start one per machine, with torchrun --nproc_per_node N {' '.join(sys.argv)}"
            first = os.environ.get(number, "0") == "0"
            told = f"{variable}={ranks}, and each process would be a run of its own: {command}"
            raise SystemExit(told if first else 1)


def die_with(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """This process gets the signal when the thread that started it ends; it ends now if that is dead."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """From now on what descends from this process has it as its parent when its own one ends."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def descendants(process: int) -> list[int]:
    """Process numbers of its children, their children and so on."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError):  # it has ended
                # after its name, which may hold anything: its state, and its parent
                fields = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry))
    found = children.get(process, [])
    for one in found:  # grows while it is read
        found += children.get(one, [])
    return found


def end_descendants(of_interest: int) -> int:
    """Kill all that descends from this process, which must have adopted the orphans, until nothing is left of it.

    Returns the wait status of the child `of_interest`, which may have ended before.
    """
    status = 0
    while True:
        for process in descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        try:
            ended = (-1, 0)
            while ended[0]:
                ended = os.waitpid(-1, os.WNOHANG)
                if ended[0] == of_interest:
                    status = ended[1]
        except ChildProcessError:
            return status
        time.sleep(0.005)


def watch(stall_minutes: float, break_silence: Callable[[list[str]], object]) -> None:
    """The watchdog, a thread: ends this rank if the group does not form, or nothing moves; `listen` is another."""
    rank, start = os.environ["RANK"], time.monotonic()
    patience = float(os.environ.get("GATHER_SECONDS", GATHER_S))
    threading.Thread(target=listen, args=(rank,), daemon=True).start()
    while (idle := time.monotonic() - _sign_of_life[0]) < stall_minutes * 60:
        if awaited and time.monotonic() - start > patience + 2 * (rank != "0"):  # rank 0 knows best who is missing
            fail(f"[rank {rank}] {awaited[0]} after {patience:g} s (GATHER_SECONDS=600 waits longer)")
            leave(1)
        if rank == "0":
            break_silence(awaited)
        time.sleep(min(1.0, stall_minutes * 60 - idle))
    line = f"[rank {rank}] no progress for {stall_minutes:g} minutes (--stall-minutes):"
    print(line, file=sys.stderr, flush=True)
    faulthandler.dump_traceback(2)  # not sys.stderr, which may have been replaced
    time.sleep(10)  # until the other ranks have printed theirs: the first to exit ends them all
    fail(f"{line} the stacks are above")
    os._exit(1)


def listen(rank: str) -> None:
    """Ends this rank if another one has failed; waits for the store, which does not answer through a dead network."""
    while not (words := heard()):
        time.sleep(1.0)
    time.sleep(GRACE_S)  # until the main thread has noticed it, too
    if words != INTERRUPTED:
        last_words(f"[rank {rank}] ends: {words}")
    leave(130 if words == INTERRUPTED else 1)


def heard() -> str:
    """What another rank has said at its failure."""
    try:
        return group[0].get("failed").decode() if group and group[0].check(["failed"]) else ""
    except RuntimeError:
        return "the store is gone, and with it torchrun, or the rank that kept it"


def fail(line: str, details: str = "") -> None:
    """Tell the other ranks and the user; who is not the first to fail lets the first speak, and adds what differs."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    unheard = threading.Timer(5 * GRACE_S, lambda: (last_words(line, details), os._exit(1)))  # the network is dead
    unheard.start()
    with suppress(RuntimeError):
        if group and (first := group[0].add("failures", 1) == 1):
            group[0].set("failed", line)
    unheard.cancel()
    if not first:
        time.sleep(GRACE_S if group else GATHER_S)  # torchrun ends it before that, if all ranks fail
    if line != INTERRUPTED and (first or line != heard()):
        last_words(line, details)


@contextmanager
def said_once() -> Iterator[None]:
    """Around what prints and raises SystemExit on every rank alike: the first of a machine says it, and torchrun."""
    if "LOCAL_WORLD_SIZE" not in os.environ:  # no torchrun
        yield
        return
    said = io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said):
            yield
    except SystemExit as stop:
        text = said.getvalue() + (stop.code if isinstance(stop.code, str) else "")
        if stop.code:
            fail(text.rstrip())
            raise SystemExit(1) from None
        if os.environ.get("LOCAL_RANK", "0") == "0":  # --help
            print(text, end="")
        raise


def last_words(line: str, details: str = "") -> None:
    """Print it, and leave the line to torchrun, which shows it at the end of its report."""
    line = printable(line)
    print(printable(details) or line, file=sys.stderr, flush=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))


def leave(status: int) -> NoReturn:
    """The end of this process, by the first thread that comes here; what was opened last is closed first."""
    _leaving.acquire()
    reached["status"] = status
    try:
        for function in reversed(at_end):
            with suppress(Exception):
                function()
    finally:  # a second Ctrl-C
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # it may have been replaced, by one that is closed
                stream.flush()
        os._exit(status)


def keep_freed_memory() -> None:
    """On CPUs with glibc: reuse what tensors free, in place of new pages of the kernel's.

    An update of SmolLM2 takes 0.9 of its time, and a tenth more memory (docs/results.md, "A step beside the machine").
    """
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def trim_heap() -> None:
    """With glibc: give back what tensors have freed, and `keep_freed_memory` has kept."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)

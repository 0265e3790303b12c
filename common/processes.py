"""Processes and processors: what a rank may use of its machine, and how what it has started ends
with it."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from common.limits import usable_cpus

# how many processes srun or mpirun has started
LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PARENT = os.getppid()


def ranks_here() -> int:
    """Ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cpus_of_rank() -> int:
    """Processors that this machine, or container, has for each of its ranks, at least one."""
    return max(1, usable_cpus() // ranks_here())


def in_threads(function: Callable, items: Iterable) -> list:
    """function(item) of each, side by side: for what reads pictures, which Pillow decodes without
    Python's lock."""
    with ThreadPoolExecutor(cpus_of_rank()) as threads:
        return list(threads.map(function, items))


def refuse_lone_ranks() -> None:
    """SystemExit if srun or mpirun has started several processes: each would be a run of its
    own."""
    for variable in LAUNCHERS:
        ranks = os.environ.get(variable, "1")
        if "RANK" not in os.environ and ranks.isdecimal() and int(ranks) > 1:
            command = (
                f"start one per machine, with torchrun --nproc_per_node N {' '.join(sys.argv)}"
            )
            raise SystemExit(
                f"{variable}={ranks}, and each process would be a run of its own: {command}"
            )


def die_with(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """This process gets the signal when the thread that started it ends; it ends now if that is
    dead."""
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
    """Kill all that descends from this process, which must have adopted the orphans, until nothing
    is left of it.

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


def keep_freed_memory() -> None:
    """On CPUs with glibc: reuse what tensors free, in place of new pages of the kernel's.

    An update of SmolLM2 takes 0.9 of its time, and a tenth more memory (docs/results.md, "A step
    beside the machine").
    """
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def trim_heap() -> None:
    """With glibc: give back what tensors have freed, and `keep_freed_memory` has kept."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)

"""Processes and processors: how many CPUs a rank has, how the processes that it has started end
with it, and what it does with freed memory and open files."""

import ctypes
import os
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from common.limits import usable_cpus

# variables in which srun and mpirun leave the number of processes that they have started
LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
M_MMAP_MAX = -4
M_TRIM_THRESHOLD = -1
MAX_OPEN_FILES = 2**16
PARENT = os.getppid()  # at the start: later it may have ended


def ranks_here() -> int:
    """Ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cpus_of_rank() -> int:
    """CPUs that this machine, or container, has for each of its ranks; at least one."""
    return max(1, usable_cpus() // ranks_here())


def in_threads(function: Callable, items: Iterable) -> list:
    """[function(item) of each item], in threads: for functions that decode pictures, which Pillow
    does without Python's lock."""
    from concurrent.futures import ThreadPoolExecutor  # here: workers start no threads

    with ThreadPoolExecutor(cpus_of_rank()) as threads:
        return list(threads.map(function, items))


def ahead_in_threads(function: Callable, items: Iterable, count: int) -> Iterator:
    """Yield function(item) of each item, in order; threads compute up to `count` of them ahead."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(cpus_of_rank()) as threads:
        futures = deque()
        for item in items:
            futures.append(threads.submit(function, item))
            if len(futures) > count:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()


def refuse_lone_ranks() -> None:
    """SystemExit if srun or mpirun has started several processes without torchrun: each would be a
    run of its own."""
    if "RANK" in os.environ:
        return
    for variable in LAUNCHERS:
        ranks = os.environ.get(variable, "1")
        if ranks.isdecimal() and int(ranks) > 1:
            command = f"torchrun --nproc_per_node N {' '.join(sys.argv)}"
            raise SystemExit(
                f"{variable}={ranks}, and each process would be a run of its own: start one per "
                f"machine, with {command}; several machines need the flags of docs/scaling.md"
            )


def die_with(parent: int, death_signal: signal.Signals = signal.SIGKILL) -> None:
    """From now on this process gets `death_signal` when the thread that started it ends. If
    `parent` has ended already, this process ends at once."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """From now on descendants of this process whose parent ends become its children."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def descendants(process: int) -> list[int]:
    """Process numbers of its children, their children and so on."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError):  # it has ended
                stat = Path(f"/proc/{entry}/stat").read_bytes()
                # behind the name in brackets, which may hold anything: its state, its parent
                _, parent, *_ = stat.rpartition(b")")[2].split()
                children.setdefault(int(parent), []).append(int(entry))
    family = children.get(process, [])
    for descendant in family:  # the list grows while it is read
        family += children.get(descendant, [])
    return family


def end_descendants(*, status_of: int) -> int:
    """Kill all descendants of this process, which must have adopted orphans, until none is left.

    Returns the wait status of the child `status_of`, which may have ended already, but must not
    have been reaped.
    """
    child_status = 0
    while True:
        for process in descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        try:
            ended = -1
            while ended != 0:  # 0: there are children, and none of them has ended
                ended, wait_status = os.waitpid(-1, os.WNOHANG)
                if ended == status_of:
                    child_status = wait_status
        except ChildProcessError:  # no children are left
            return child_status
        time.sleep(0.005)


def keep_freed_memory() -> None:
    """On CPUs with glibc: keep memory that tensors have freed, and give it to the next ones, in
    place of new pages from the kernel.

    An update of SmolLM2 takes a tenth less time, and a tenth more memory
    (results/benchmarks/README.md, "The allocator").
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def trim_heap() -> None:
    """With glibc: return to the kernel the memory that `keep_freed_memory` has kept."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def allow_open_files() -> None:
    """Raise this process's limit of open files: a sandbox takes three, a worker one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))

"""Process 1 of a sandbox: forks a child for each trajectory, and cleans up after it.

It holds no program and no result, since a child is its copy: each child has a socket of its own to
the trainer. This file and interpreter.py are all of the project that is in the sandbox.
"""

import contextlib
import ctypes
import gc
import importlib
import io
import os
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

# limits of one trajectory
MAX_FILES = 10_000
MAX_THREADS = 256
CPU_S = 600
FILE_BYTES = 2**28  # of a file
OPEN_FILES = 256

CHECK_S = 0.25  # how often files and threads are counted
STOP_S = 1.0  # until all that a trajectory has started stands still
# of linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
libc = ctypes.CDLL(None, use_errno=True)
BYTES_HEAD = sys.getsizeof(b"")  # of a bytes object, before its content
# how many blocks `fill` allocates of each size, beside the free ones; with 100 the first child of a
# server had other addresses at times
MORE_BLOCKS = 1000
# indices of fields of /proc/PID/stat, counted from the state on
STATE = 0
PARENT = 1
NUM_THREADS = 17
STILL_STATES = {b"T", b"t", b"Z", b"X"}  # of a thread: stopped, traced, or ended


def serve(folder: str, mounts: str, memory_gib: str, program_filter: str) -> None:
    """Take the trainer's orders until it is gone: "new", which comes with the child's socket,
    "kill", "stop" and "go". The server sends "done" when it has started, and after "new" and
    "kill". If it kills a child by itself, it sends the reason.

    Between "stop" and "go" nothing of a trajectory runs: no thread, and no program that has only
    claimed to be done.

    folder: where a program may write; wiped after each trajectory, but for what is mounted there
    (`mounts`, paths with ":" between them). program_filter: hexadecimal; "" without a sandbox.
    """
    control = socket.socket(fileno=0)
    confined = bool(program_filter)
    kept = mounts.split(":") if mounts else []
    guard(confined)
    preload()
    warm_up(folder, kept, confined)
    # A child uses up its own copy of the iterator, which is made here: `fill` allocates nothing of
    # its own. The list keeps what the child has filled.
    fillers = fillers_of(count_free_blocks(folder))
    filler_iterator = iter(fillers)
    limits = limits_of_child(float(memory_gib))
    control.send(b"done")
    child = 0
    is_stopped = False
    while True:
        is_watched = child > 0 and confined and not is_stopped
        readable, _, _ = select.select([control], [], [], CHECK_S if is_watched else None)
        if is_watched:
            excess = excess_of(child, folder)
            if excess:
                control.send(excess.encode())
                end_children(confined)
                child = 0
        if not readable:
            continue
        message, sockets, _, _ = socket.recv_fds(control, 16, 1)
        if not message:  # the trainer is gone
            break
        if message == b"stop":
            is_stopped = True
            stop_children(confined)
            continue
        if message == b"go":
            is_stopped = False
            signal_children(signal.SIGCONT)
            continue
        # "new" or "kill"
        end_children(confined)
        wipe(folder, kept)
        is_stopped = False
        child = 0
        if message == b"new":
            child = os.fork()
            if not child:
                fill(filler_iterator)
                run_child(sockets[0], folder, limits, bytes.fromhex(program_filter))
        for number in sockets:
            os.close(number)
        control.send(b"done")
    end_children(confined)


def guard(confined: bool) -> None:
    """Protect this process from its children if they are confined; else adopt their orphans, so
    that none survives."""
    if confined:  # process 1 ignores signals of its children that have no handler
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        prctl(PR_SET_DUMPABLE, 0)  # no child reads or writes its memory
    else:
        # orphans of a child are adopted here, as process 1 adopts them
        prctl(PR_SET_CHILD_SUBREAPER, 1)


def warm_up(folder: str, kept: list[str], confined: bool) -> None:
    """Call what the loop calls most, with real children. Afterwards Python has allocated whatever
    it allocates in the first calls of a function, and the memory of this process stays the same."""
    for _ in range(10):
        child = os.fork()
        if not child:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.pause()
        excess_of(child, folder)
        stop_children(confined)
        signal_children(signal.SIGCONT)
        end_children(confined)
        wipe(folder, kept)


def preload() -> None:
    """Import what programs use most, so that a child has it at once.

    What is imported must have the same addresses each time (`fill` says why). matplotlib starts a
    second thread while it builds its list of fonts: a child does that, and this process reads the
    list from its file.
    """
    import matplotlib

    matplotlib.use("Agg")
    builder = os.fork()
    if not builder:
        importlib.import_module("matplotlib.font_manager")
        os._exit(0)
    os.waitpid(builder, 0)
    for name in ("interpreter", "PIL.ImageDraw", "matplotlib.pyplot", "tempfile", "uuid"):
        importlib.import_module(name)
    plt = sys.modules["matplotlib.pyplot"]
    plt.figure().savefig(io.BytesIO(), format="png")  # reads fonts
    plt.close("all")


def excess_of(child: int, folder: str) -> str:
    """What a child has too many of; "" if nothing. No limit of the kernel serves: bubblewrap sets
    none for the files of a tmpfs, and RLIMIT_NPROC counts all processes of the user."""
    space = os.statvfs(folder)
    if space.f_files - space.f_ffree > MAX_FILES:
        return f"more than {MAX_FILES} files"
    with contextlib.suppress(OSError):
        if int(fields_of(child)[NUM_THREADS]) > MAX_THREADS:
            return f"more than {MAX_THREADS} threads"
    return ""


def fields_of(process: int | str) -> list[bytes]:
    """The fields of /proc/PROCESS/stat, from the state on: the name before may hold any bytes. A
    text "PROCESS/task/THREAD" gives those of a thread."""
    return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()


def is_running(process: int) -> bool:
    """Whether any thread of a process is. The others may go on when the first one has ended."""
    with contextlib.suppress(OSError):
        states = set()
        for thread in os.listdir(f"/proc/{process}/task"):
            states.add(fields_of(f"{process}/task/{thread}")[STATE])
        return not states <= STILL_STATES
    return False


def signal_children(number: int) -> bool:
    """Send a signal to the child and all its descendants. Returns whether any was running."""
    children: dict[int, list[int]] = {}
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            parent = int(fields_of(process)[PARENT])
            children.setdefault(parent, []).append(int(process))
    family = children.get(os.getpid(), [])
    is_any_running = False
    for process in family:  # grows while it is read
        family += children.get(process, [])
        is_any_running = is_any_running or is_running(process)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)
    return is_any_running


def stop_children(confined: bool) -> None:
    """Stop them, again and again: one of them may have continued itself or another one, or have
    started one. If they do not rest within STOP_S, they are ended.

    Two looks in a row must see nothing run: a single one overlooks a process whose parent ends
    meanwhile, and which is nobody's child then.
    """
    deadline = time.monotonic() + STOP_S
    num_still = 0
    while num_still < 2:
        if signal_children(signal.SIGSTOP):
            num_still = 0
        else:
            num_still += 1
        if time.monotonic() > deadline:
            end_children(confined)
        time.sleep(0.001)


def end_children(confined: bool) -> None:
    """Kill the child and all that it has started, and wait until they are gone."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    processes = [-1]  # all but process 1
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            if not confined:
                processes = [int(process) for process in children.read_text().split()]
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            os.waitpid(-1, 0)


def wipe(folder: str, kept: list[str]) -> None:
    """Remove what a trajectory has left. If that fails, this process ends, and the folder with it.
    A child removes it, so that the memory of this process does not depend on what was there."""
    child = os.fork()
    if not child:
        try:
            remove_entries(folder, kept)
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(child, 0)[1]:
        raise SystemExit(f"{folder} cannot be wiped")


def remove_entries(folder: str, kept: list[str]) -> None:
    os.chmod(folder, 0o700)
    for entry in list(os.scandir(folder)):
        if entry.path in kept:
            continue
        if any(path.startswith(f"{entry.path}/") for path in kept):
            remove_entries(entry.path, kept)
        elif entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def count_free_blocks(folder: str) -> dict[int, int]:
    """{size in bytes: number} of the free blocks of Python's allocator, and some more, which may
    become free."""
    gc.collect()
    gc.freeze()  # so that `fill` takes no time
    path = Path(folder, "blocks")
    with path.open("wb") as file:
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        sys._debugmallocstats()
        os.dup2(stderr, 2)
        os.close(stderr)
    free_blocks = {}
    for line in path.read_text().splitlines():
        row = line.split()  # class, size, pools, blocks in use, free blocks
        if len(row) == 5 and all(map(str.isdecimal, row)):
            free_blocks[int(row[1])] = int(row[4]) + MORE_BLOCKS
    path.unlink()
    return free_blocks


def fillers_of(free_blocks: dict[int, int]) -> list[tuple[list, Iterator]]:
    """(empty list, iterator that allocates blocks of one size) for each size: all that `fill`
    needs, which allocates nothing of its own."""
    fillers = []
    for size, count in free_blocks.items():
        if size == 16:  # a bytes object takes more than 16 or 32 bytes
            blocks = map(object.__new__, repeat(object, count))
        elif size == 32:
            blocks = map(float, repeat("1.5", count))
        else:
            blocks = map(bytes, repeat(size - BYTES_HEAD, count))
        fillers.append(([], blocks))
    return fillers


def fill(fillers: Iterator[tuple[list, Iterator]]) -> None:
    """Take the free blocks of Python's memory, for good: a program that runs again is to have its
    objects at the same addresses, since it may print them, and the order of its sets depends on
    them.

    The free blocks are the same ones at each fork, but the order in which Python would take them
    depends on what the server has done before.
    """
    # the cache of attributes keeps names alive: which ones depends on their addresses
    sys._clear_type_cache()
    gc.collect()  # also empties the free lists of Python's types
    for filler, blocks in fillers:
        filler.extend(blocks)


def limits_of_child(memory_gib: float) -> dict[str, int]:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return {
        "RLIMIT_AS": mapped + int(memory_gib * 2**30),
        "RLIMIT_CPU": CPU_S,
        "RLIMIT_CORE": 0,
        "RLIMIT_FSIZE": FILE_BYTES,
        "RLIMIT_NOFILE": OPEN_FILES,
        # the kernel keeps each pending signal in its memory, as it does open files
        "RLIMIT_SIGPENDING": OPEN_FILES,
    }


def prctl(*arguments) -> None:
    if libc.prctl(*map(ctypes.c_ulong, arguments), 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {arguments[0]}")


def run_child(fd: int, folder: str, limits: dict[str, int], program_filter: bytes) -> None:
    """Give up the terminal, and all descriptors but the socket; set the limits; if confined, set
    the filter of system calls; then run the trajectory's blocks of code. Never returns."""
    try:
        from interpreter import Session

        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        connection = socket.socket(fileno=os.dup2(fd, 3))
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        os.closerange(4, 2**16)
        os.chdir(folder)
        os.nice(5)
        for name, value in limits.items():
            number = getattr(resource, name)
            _, hard = resource.getrlimit(number)
            if hard != resource.RLIM_INFINITY:  # a limit of the machine's may be lower
                value = min(value, hard)
            resource.setrlimit(number, (value, value))
        if program_filter:
            # struct sock_fprog: the number of instructions, and their address
            instructions = ctypes.create_string_buffer(program_filter)
            num_instructions = len(program_filter) // 8
            fields = struct.pack("HxxxxxxP", num_instructions, ctypes.addressof(instructions))
            program = ctypes.create_string_buffer(fields)
            prctl(PR_SET_NO_NEW_PRIVS, 1, 0)
            prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program))
        Session(connection).run()
    finally:
        os._exit(1)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    serve(*sys.argv[1:])

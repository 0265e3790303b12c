"""Process 1 of a sandbox: forks a child for each trajectory, and clears up after it.

It holds no program and no result, since a child is its copy: each gets a socket of its own, to the
trainer. This file and interpreter.py are all of the project that stands there.
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

MAX_FILES, MAX_THREADS = 10_000, 256
CHECK_S = 0.25  # how often files and threads are counted
STOP_S = 1.0  # in which all that a trajectory has started stands still
CPU_S = 600  # of one trajectory
FILE_BYTES, OPEN_FILES = 2**28, 256
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = (
    1,
    4,
    22,
    36,
    38,
)
SECCOMP_MODE_FILTER = 2
libc = ctypes.CDLL(None, use_errno=True)
BYTES_HEAD = sys.getsizeof(b"")


def serve(folder: str, kept: str, memory_gib: str, program_filter: str) -> None:
    """Answers "new", with a socket, and "kill", by "done"; says why it has killed a child by
    itself.

    Between "stop" and "go" nothing of a trajectory moves: no thread, nor what has only claimed that
    it is done.

    folder: where a program may write, wiped after each trajectory but for what is mounted there
    (`kept`). program_filter: hexadecimal; none without a sandbox.
    """
    control, confined = socket.socket(fileno=0), bool(program_filter)
    if confined:  # process 1 ignores what its children send, if it does not ask for it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        prctl(PR_SET_DUMPABLE, 0)  # no child reads or writes its memory
    else:
        # what a child has started is ours when that ends, as it is process 1's
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    kept = kept.split(":") if kept else []
    preload()
    # what Python sets up when functions run for the first times, it has set up then
    for _ in range(20):
        too_much(os.getpid(), folder)
        tell_children(signal.SIGCONT)
        end_children(confined)
        wipe(folder, kept=kept)
    fillers = fillers_of(count_free_blocks(folder))
    filling = iter(fillers)
    limits = limits_of_child(float(memory_gib))
    control.send(b"done")
    child = 0
    stopped = False
    while True:
        watched = child and confined and not stopped
        readable, _, _ = select.select([control], [], [], CHECK_S if watched else None)
        if watched and (excess := too_much(child, folder)):
            control.send(excess.encode())
            end_children(confined)
            child = 0
        if not readable:
            continue
        message, sockets, _, _ = socket.recv_fds(control, 16, 1)
        if not message:  # the trainer is gone
            break
        if message in (b"stop", b"go"):
            stopped = message == b"stop"
            if stopped:
                stop_children(confined)
            else:
                tell_children(signal.SIGCONT)
            continue
        end_children(confined)
        wipe(folder, kept)
        stopped = False
        child = os.fork() if message == b"new" else 0
        if message == b"new" and not child:
            fill(filling)
            be_child(sockets[0], folder, limits, bytes.fromhex(program_filter))
        for number in sockets:
            os.close(number)
        control.send(b"done")
    end_children(confined)


def preload() -> None:
    """What programs use most; a child has it at once. In the same memory each time: the list of
    fonts, which a second thread watches over where it is made, is made by a child."""
    import matplotlib

    matplotlib.use("Agg")
    maker = os.fork()
    if not maker:
        importlib.import_module("matplotlib.font_manager")
        os._exit(0)
    os.waitpid(maker, 0)
    for name in ("interpreter", "PIL.ImageDraw", "matplotlib.pyplot", "tempfile", "uuid"):
        importlib.import_module(name)
    plt = sys.modules["matplotlib.pyplot"]
    plt.figure().savefig(io.BytesIO(), format="png")  # reads fonts
    plt.close("all")


def too_much(child: int, folder: str) -> str:
    """Of what has a child more than it may? No limit of the kernel's counts these."""
    space = os.statvfs(folder)
    if space.f_files - space.f_ffree > MAX_FILES:
        return f"more than {MAX_FILES} files"
    with contextlib.suppress(OSError):
        if int(fields_of(child)[17]) > MAX_THREADS:
            return f"more than {MAX_THREADS} threads"
    return ""


def fields_of(process: int | str) -> list[bytes]:
    """Of its line in /proc, or of that of a thread, from its state on: behind a name, which may be
    any bytes."""
    return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()


def moves(process: int) -> bool:
    """Does a thread of it? Not all have to end with the first one."""
    with contextlib.suppress(OSError):
        states = [
            fields_of(f"{process}/task/{thread}")[0]
            for thread in os.listdir(f"/proc/{process}/task")
        ]
        return not set(states) <= {b"T", b"t", b"Z", b"X"}
    return False


def tell_children(number: int) -> bool:
    """Send a signal to the child and to all that descends from it. Was any of them moving?"""
    children: dict[int, list[int]] = {}
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            children.setdefault(int(fields_of(process)[1]), []).append(int(process))
    family = children.get(os.getpid(), [])
    moving = False
    for process in family:  # grows while it is read
        family += children.get(process, [])
        moving = moving or moves(process)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)
    return moving


def stop_children(confined: bool) -> None:
    """Again, where one of them has let itself or another one go on, or has started one; what never
    rests is ended.

    Nothing may move in two looks in a row: in one, a process whose parent ends meanwhile is
    nobody's child.
    """
    end = time.monotonic() + STOP_S
    num_still = 0
    while num_still < 2:
        num_still += 1
        if tell_children(signal.SIGSTOP):
            num_still = 0
        if time.monotonic() > end:
            end_children(confined)
        time.sleep(0.001)


def end_children(confined: bool) -> None:
    """Kill the child and all that it has started, and wait until they are gone."""
    started = Path(f"/proc/self/task/{os.getpid()}/children")
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            for process in [-1] if confined else map(int, started.read_text().split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)  # -1: all but process 1
            os.waitpid(-1, 0)


def wipe(folder: str, kept: list[str]) -> None:
    """Remove what a trajectory has left; the process ends if that fails, and with it goes the
    folder. A child does it, so that the memory of this process does not depend on what was
    there."""
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
    """{size in bytes: how many} of Python's allocator, and some more, which may become free."""
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
            free_blocks[int(row[1])] = int(row[4]) + 100
    path.unlink()
    return free_blocks


def fillers_of(free_blocks: dict[int, int]) -> list[tuple[list, Iterator]]:
    """For `fill`, all that it needs, so that it has no objects of its own: (empty list, blocks of a
    size to come)."""
    fillers = []
    for size, count in free_blocks.items():
        if size == 16:
            blocks = map(object.__new__, repeat(object, count))
        elif size == 32:
            blocks = map(float, repeat("1.5", count))
        else:
            blocks = map(bytes, repeat(size - BYTES_HEAD, count))
        fillers.append(([], blocks))
    return fillers


def fill(fillers: Iterator[tuple[list, Iterator]]) -> None:
    """Take the free blocks of Python's memory, for good. Which they are is the same at each fork;
    in which order they would be taken hangs on what the server has done before, and with it the
    addresses of a program's objects."""
    gc.collect()  # what Python keeps for its next objects is free as well
    for kept, blocks in fillers:
        kept.extend(blocks)


def limits_of_child(memory_gib: float) -> dict[str, int]:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = {"RLIMIT_AS": mapped + int(memory_gib * 2**30), "RLIMIT_CPU": CPU_S, "RLIMIT_CORE": 0}
    limits |= {
        "RLIMIT_FSIZE": FILE_BYTES,
        "RLIMIT_NOFILE": OPEN_FILES,
        "RLIMIT_SIGPENDING": OPEN_FILES,
    }
    return limits


def prctl(*arguments) -> None:
    if libc.prctl(*map(ctypes.c_ulong, arguments), 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {arguments[0]}")


def be_child(fd: int, folder: str, limits: dict[str, int], program_filter: bytes) -> None:
    """Never returns: no descriptor but the socket, no terminal, limits, no new process, then block
    after block."""
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
            resource.setrlimit(getattr(resource, name), (value, value))
        if program_filter:
            instructions = ctypes.create_string_buffer(program_filter)
            program = struct.pack(
                "HxxxxxxP", len(program_filter) // 8, ctypes.addressof(instructions)
            )
            program = ctypes.create_string_buffer(program)
            prctl(PR_SET_NO_NEW_PRIVS, 1, 0)
            prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program))
        Session(connection).run()
    finally:
        os._exit(1)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    serve(*sys.argv[1:])

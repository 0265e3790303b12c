"""Process 1 of a sandbox: forks a child for each trajectory, and clears up after it.

It holds no program and no result, since a child is its copy: each gets a socket of its own, to the trainer. This file
and interpreter.py are all of the project that stands there.
"""

import contextlib
import ctypes
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
from pathlib import Path

MAX_FILES, MAX_THREADS = 10_000, 256
CHECK_S = 0.25  # how often files and threads are counted
STOP_S = 1.0  # in which all that a trajectory has started stands still
CPU_S = 600  # of one trajectory
FILE_BYTES, OPEN_FILES = 2**28, 256
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
SECCOMP_MODE_FILTER = 2
libc = ctypes.CDLL(None, use_errno=True)


def serve(fd: str, folder: str, kept: str, memory_gib: str, program_filter: str) -> None:
    """Answers "new", with a socket, and "kill", by "done"; says why it has killed a child by itself.

    Between "stop" and "go" nothing of a trajectory moves: no thread, nor what has only claimed that it is done.

    folder: where a program may write, wiped after each trajectory but for what is mounted there (`kept`).
    program_filter: hexadecimal; none without a sandbox.
    """
    control, confined = socket.socket(fileno=int(fd)), bool(program_filter)
    if confined:  # process 1 ignores what its children send, if it does not ask for it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        prctl(PR_SET_DUMPABLE, 0)  # no child reads or writes its memory
    else:
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a child has started is ours when that ends, as it is process 1's
    kept = kept.split(":") if kept else []
    preload()
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
            be_child(sockets[0], folder, float(memory_gib), bytes.fromhex(program_filter))
        for number in sockets:
            os.close(number)
        control.send(b"done")
    end_children(confined)


def preload() -> None:
    """What programs use most; a child has it at once."""
    import matplotlib

    matplotlib.use("Agg")
    for name in ("interpreter", "PIL.ImageDraw", "matplotlib.pyplot"):
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
    """Of its line in /proc, or of that of a thread, from its state on: behind a name, which may be any bytes."""
    return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()


def moves(process: int) -> bool:
    """Does a thread of it? Not all have to end with the first one."""
    with contextlib.suppress(OSError):
        states = [fields_of(f"{process}/task/{thread}")[0] for thread in os.listdir(f"/proc/{process}/task")]
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
    """Again, where one of them has let itself or another one go on, or has started one; what never rests is ended."""
    end = time.monotonic() + STOP_S
    while tell_children(signal.SIGSTOP):
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
    """Remove what a trajectory has left; the process ends if that fails, and with it goes the folder."""
    os.chmod(folder, 0o700)
    for entry in list(os.scandir(folder)):
        if entry.path in kept:
            continue
        if any(path.startswith(f"{entry.path}/") for path in kept):
            wipe(entry.path, kept)
        elif entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def prctl(*arguments) -> None:
    if libc.prctl(*map(ctypes.c_ulong, arguments), 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {arguments[0]}")


def be_child(fd: int, folder: str, memory_gib: float, program_filter: bytes) -> None:
    """Never returns: no descriptor but the socket, no terminal, limits, no new process, then block after block."""
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
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limits = {"RLIMIT_AS": mapped + int(memory_gib * 2**30), "RLIMIT_CPU": CPU_S, "RLIMIT_CORE": 0}
        limits |= {"RLIMIT_FSIZE": FILE_BYTES, "RLIMIT_NOFILE": OPEN_FILES, "RLIMIT_SIGPENDING": OPEN_FILES}
        for name, value in limits.items():
            resource.setrlimit(getattr(resource, name), (value, value))
        if program_filter:
            instructions = ctypes.create_string_buffer(program_filter)
            program = struct.pack("HxxxxxxP", len(program_filter) // 8, ctypes.addressof(instructions))
            program = ctypes.create_string_buffer(program)
            prctl(PR_SET_NO_NEW_PRIVS, 1, 0)
            prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program))
        Session(connection).run()
    finally:
        os._exit(1)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    serve(*sys.argv[1:])

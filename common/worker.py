"""One process in which a user's function runs: a hang, a crash or a memory hog costs its job, and not the step.

A worker is a new Python (the trainer, with CUDA and threads, must not fork) that is told what to import (under
multiprocessing it would import the running script, and torch with it) and that has a socket of its own: nothing is
shared that it could lock or corrupt when it is killed. The function can write to that socket, too: what arrives is a
reply only with the token of the job, which the function is not given.

The process that the trainer starts is a keeper: the worker is its child, and all that a function starts, in whatever
session, descends from the keeper and ends with the worker. Nothing that a worker does, or does not, holds the trainer.
"""

import importlib
import json
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from math import inf
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from common.printing import printable
from common.processes import adopt_orphans, die_with, end_descendants

ROOT = Path(__file__).resolve().parents[1]
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from common.worker import serve; serve(*sys.argv[2:])"
START_S = 120  # for a worker to start: the function's file may import slow libraries from a slow disk
LATE_S = 2  # for the rest of a reply whose deadline has passed while the trainer was away
TRANSFER_S = 10  # in which a keeper has ended all that descends from it
HOLD_S = 1  # the trainer waits no longer for the end of a process that has to be replaced
KILL_ALL = signal.SIGUSR1  # to a keeper: end the worker, and what it has started
ORDERS = {signal.SIGCHLD, signal.SIGTERM, KILL_ALL}
MAX_ERROR = 500  # characters of a message that are kept
MAX_REPLY = 2**28  # bytes
CUT = b"\n... what this worker prints further is not shown\n"
MAX_OUTPUT = 2**14  # bytes that a worker may print in its life, restarts included
USER_MODULE = "user_file_"  # how the names of the modules begin that `load_function` makes

MakeHandler = Callable[[str], Callable[[Any], dict]]  # of an importable module: specification -> (job -> reply)


class Worker:
    """One process: what it is doing, the key of its job, and until when it has time."""

    STARTING, IDLE, BUSY = "starting", "idle", "busy"

    def __init__(
        self, make_handler: MakeHandler, spec: str, timeout_s: float, memory_gib: float, close_s: float = 0.0
    ):
        """timeout_s: of a job. memory_gib: beyond the first mapped; 0: no limit. close_s: of `close()`; 0: none."""
        if timeout_s <= 0 or memory_gib < 0:
            raise ValueError(f"workers: got {timeout_s} s, {memory_gib} GiB")
        self.arguments = [str(memory_gib), make_handler.__module__, make_handler.__name__, spec]
        self.timeout_s, self.close_s, self.printable = timeout_s, close_s, MAX_OUTPUT
        self.queue: deque[tuple[Hashable, Any]] = deque()  # jobs that no other worker may do
        self.endings: list[threading.Thread] = []  # of its earlier processes
        self.held_s = 0.0  # how long the trainer has waited for the reply that has begun to come
        self.facts: dict = {}  # what its handler says of itself, once it has started
        self.start()

    def start(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.inbox = bytearray()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-uPc", BOOT, str(ROOT), str(theirs.fileno()), str(os.getpid()), *self.arguments],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONHASHSEED": "0"},  # sets have the same order in each, and in a resumed run
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for the trainer
            )
        os.set_blocking(self.process.stdout.fileno(), False)
        self.sources = [self.socket, self.process.stdout]
        self.expect(self.STARTING, timeout_s=START_S)
        self.send(None)

    def hang_up(self) -> None:
        """It is to end, and to close first what it holds."""
        if self.running:
            self.deadline = time.monotonic() + self.close_s
            if self.close_s:
                self.process.terminate()  # first: it would meet the end of the socket in its own time
            close_link(self.socket)

    def stop(self, hold_s: float | None = None) -> str:
        """End the process and all that it has started; returns how it ended, which may have been earlier.

        Waits until that is done, or for `hold_s`: the rest is then done in a thread.
        """
        if self.running:
            self.hang_up()
        if not self.process.stdout.closed:
            self.show_output()
            ending = threading.Thread(target=end_keeper, args=[self.process, self.deadline], daemon=True)
            ending.start()
            self.endings = [other for other in self.endings if other.is_alive()] + [ending]
            ending.join(hold_s)
            if not ending.is_alive():
                self.show_output()
            self.process.stdout.close()
        if hold_s is None:
            for ending in self.endings:
                ending.join()
        code = self.process.returncode
        return signal.strsignal(-code) if code and code < 0 else f"exit code {code}"

    def restart(self) -> None:
        self.stop(HOLD_S)
        self.start()

    def expect(self, state: str, key: Hashable = None, timeout_s: float = inf) -> None:
        self.state, self.key = state, key
        self.deadline = time.monotonic() + timeout_s

    @property
    def busy(self) -> bool:
        return self.state == self.BUSY

    def ready(self) -> bool:
        """Can it take a job? A thread or an alarm that an earlier job left behind may have ended it, or written."""
        if self.state == self.IDLE and (self.process.poll() is not None or wait([self.socket], 0)):
            self.restart()
        return self.state == self.IDLE

    def take(self, key: Hashable, job: Any) -> None:
        self.expect(self.BUSY, key, self.timeout_s)
        self.held_s = 0.0
        self.send(job)

    def advance(self, readable: list) -> dict | None:
        """The reply to its job, once it has come, or {"error": why}. ValueError if the process does not start."""
        reply, was = self.reply(self.socket in readable), self.state
        if reply is None:
            return None
        error = reply.get("error", "")
        if was == self.STARTING and error:
            self.stop(HOLD_S)
            raise ValueError(error)
        if was == self.STARTING:
            self.facts = reply["result"]
        self.expect(self.IDLE)
        if not self.running or error.startswith("MemoryError"):  # the latter may still hold its memory
            self.restart()
        return reply.get("result", reply) if was == self.BUSY else None

    @property
    def running(self) -> bool:
        """Has it not been stopped?"""
        return self.socket.fileno() >= 0

    def send(self, job: Any) -> None:
        """A job with its token. If the process died just now, its reply will tell."""
        self.token = os.urandom(16).hex()
        message = pickle.dumps((self.token, job))
        head = struct.pack("!i", len(message)) if len(message) < 2**31 else struct.pack("!iQ", -1, len(message))
        send_all(self.socket, head + message)

    def show_output(self) -> None:
        """Pass on to stderr what it has printed, until it is enough."""
        text = self.process.stdout.read(2**16)  # None: nothing so far
        if text == b"":
            del self.sources[1:]
        if text and self.printable:
            shown, self.printable = text[: self.printable], max(0, self.printable - len(text))
            with suppress(OSError):
                shown = printable(shown.decode(errors="replace")).encode()
                os.write(2, shown if self.printable else shown + CUT)

    def reply(self, readable: bool) -> dict | None:
        """{"result": a dict} or {"error": why}; None while there is time. The process is stopped if it failed."""
        self.show_output()
        why = ""
        try:
            if readable and (message := self.receive()) is not None:
                return message
            if time.monotonic() < self.deadline:
                return None
            if self.process.poll() is None:  # else its death is unnoticed, since a child of it holds the socket
                why = f"timeout after {self.timeout_s:g} s"
                if self.state == self.STARTING:
                    why = f"its import did not end within {START_S:g} s (what stands at the top of a file runs in it)"
        except OSError:  # EOF, too
            pass
        except (ValueError, RecursionError):
            why = "what came from the worker is no reply to its job"
        end = self.stop(0.0 if why else HOLD_S)
        return {"error": why or f"the worker died ({end})"}

    def receive(self) -> dict | None:
        """The message that has arrived, None if there is more to come. ValueError if it is not one by `serve`."""
        if not (piece := self.socket.recv(2**20)):
            raise ConnectionResetError
        if not self.inbox and time.monotonic() > self.deadline:  # the trainer was away: the rest may come, too
            self.deadline = time.monotonic() + LATE_S
        self.inbox += piece
        size = int.from_bytes(self.inbox[:4], "big")
        if size > MAX_REPLY or len(self.inbox) > max(4, 4 + size):
            raise ValueError("too long")
        if len(self.inbox) < 4 + max(1, size):
            return None
        message = json.loads(self.inbox[4:])
        self.inbox.clear()
        match message:
            case {"token": self.token, "result": dict()} | {"token": self.token, "error": str()}:
                del message["token"]
                return message
        raise ValueError("not from serve")


def send_all(link: socket.socket, data: bytes) -> None:
    """To a process that may never read, or that is dead, as its end of the socket will tell: what does not fit into
    the socket now is sent by a thread, until the link is closed by `close_link`."""
    try:
        sent = link.send(data, socket.MSG_DONTWAIT)
    except BlockingIOError:
        sent = 0
    except OSError:
        return
    if sent < len(data):
        threading.Thread(target=send_rest, args=[link.dup(), memoryview(data)[sent:]], daemon=True).start()


def send_rest(link: socket.socket, data: memoryview) -> None:
    with link, suppress(OSError):
        link.sendall(data)


def close_link(link: socket.socket) -> None:
    """Close a socket, also for a thread that sends what `send_all` has left to it."""
    with suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
    link.close()


def end_keeper(process: subprocess.Popen, deadline: float) -> None:
    """Wait until the deadline for a worker to end, then have its keeper kill it."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, deadline - time.monotonic()))
    for number in (KILL_ALL, signal.SIGCONT):  # a function may have stopped it
        process.send_signal(number)
    with suppress(subprocess.TimeoutExpired):
        process.wait(TRANSFER_S)
    process.kill()
    with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel, for example on a dead file system
        process.wait(TRANSFER_S)


class Ended(BaseException):
    """The trainer is done with this worker, whatever that is doing."""


def serve(fd: str, trainer: str, *arguments: str) -> None:
    """What the trainer starts: the keeper, and in a session of its own the worker."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, ORDERS)
    adopt_orphans()
    die_with(int(trainer), KILL_ALL)
    keeper = os.getpid()
    worker = os.fork()
    if worker:
        os.close(int(fd))  # its end is that of the worker's
        keep(worker)
    os.setsid()
    die_with(keeper)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ORDERS)
    work(fd, *arguments)


def keep(worker: int) -> NoReturn:
    """Wait for the end of the worker, or the order to end it; then end all that it has left, and end as it did."""
    ended = False
    while not ended:
        order = signal.sigwait(ORDERS)
        if order == signal.SIGTERM:
            os.kill(worker, signal.SIGTERM)
        elif order == KILL_ALL:
            ended = True
        else:
            ended = has_ended(worker)
    code = os.waitstatus_to_exitcode(end_descendants(worker))
    if code < 0:
        with suppress(OSError):  # of SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)


def has_ended(worker: int) -> bool:
    """Has this child? It is left to be waited for, others that have ended are not: they were adopted."""
    while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if found.si_pid == worker:
            return True
        os.waitpid(found.si_pid, 0)
    return False


def end_by(worker: int) -> Callable:
    """What SIGTERM does in a worker: it ends by an exception. A child that came to be unseen ends as any other."""

    def end(*_) -> NoReturn:
        if os.getpid() != worker:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        raise Ended

    return end


def give_children_default_handlers() -> None:
    """Whatever a function forks, `terminate()` ends. SIGTERM waits while a process forks: the child would forget one
    that comes before its handler is the default one."""
    before = threading.local()

    def hold() -> None:
        before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def go_on() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.mask)

    def reset_and_go_on() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        go_on()

    os.register_at_fork(before=hold, after_in_parent=go_on, after_in_child=reset_and_go_on)


def work(fd: str, memory_gib: str, module: str, make_handler: str, spec: str) -> None:
    """A worker process: make the handler at the first message, then do one job after the other."""
    os.set_inheritable(int(fd), False)  # programs that a function starts do not get the socket
    connection, pid = Connection(int(fd)), os.getpid()

    def first(_: None) -> dict:
        nonlocal handle
        handle = getattr(importlib.import_module(module), make_handler)(spec)
        limit(float(memory_gib))
        return getattr(handle, "facts", {})

    signal.signal(signal.SIGTERM, end_by(pid))
    give_children_default_handlers()
    handle = first
    with suppress(EOFError, OSError, Ended):  # the trainer is gone, or the function has closed the socket
        while True:
            token, job = connection.recv()
            try:
                reply = json.dumps({"token": token, "result": handle(job)}, ensure_ascii=False)
            except Ended:
                break
            except BaseException as error:
                reply = json.dumps({"token": token, "error": describe(error)}, ensure_ascii=False)
            if os.getpid() != pid:  # the function has forked, and its child came back too
                os._exit(0)
            connection.send_bytes(reply.encode(errors="replace"))  # lone surrogates can be neither printed nor saved
    if hasattr(handle, "close"):
        handle.close()


def limit(memory_gib: float) -> None:
    """That much more memory than now (0: no limit)."""
    if memory_gib:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        allowed, hard = mapped + int(memory_gib * 2**30), resource.getrlimit(resource.RLIMIT_AS)[1]
        if hard == resource.RLIM_INFINITY or allowed < hard:
            resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))


def describe(error: BaseException) -> str:
    """The message, and the innermost line in a user's file: "KeyError: 'answer' (line 12 of rewards.py)"."""
    text = "".join(traceback.format_exception_only(error)).strip()[:MAX_ERROR]
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if str(frame.f_globals.get("__name__")).startswith(USER_MODULE):
            return f"{text} (line {line} of {Path(frame.f_code.co_filename).name})"
    return text

"""A process for a user's function: if that hangs, crashes or takes too much memory, its job fails,
and the step goes on.

A worker is a new Python, since the trainer, with CUDA and threads, must not fork. It imports one
module (under multiprocessing it would import the running script, and torch with it), and has a
socket of its own: nothing is shared that it could lock or corrupt when it is killed.

The process that the trainer starts is a keeper: the worker is its child, and all that a function
starts, in whatever session, descends from the keeper and ends with the worker. Nothing that a
worker does, or fails to do, blocks the trainer.
"""

import importlib
import json
import os
import pickle
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from common.printing import guard_output
from common.processes import adopt_orphans, die_with, end_descendants

ROOT = Path(__file__).resolve().parents[2]
BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from common.workers.process import serve; "
    "serve(*sys.argv[2:])"
)
# until a worker has started: the function's file may import slow libraries from a slow disk
START_S = 120
DEATH_S = 1  # until a keeper has exited with the code of its worker
KILL_S = 10  # until a keeper has ended all that descends from it
# seconds to wait for the rest of a message: PATIENCE_S + bytes that have come / BYTES_PER_S
PATIENCE_S = 0.1
BYTES_PER_S = 1e8
# of a job, at most: `Pool` takes a worker with an infinite deadline for one without a job
FOREVER_S = 1e9
MAX_REPLY = 2**28  # bytes
MAX_ERROR = 500  # characters of an exception
SIZE_BYTES = 8  # of the size that precedes a message
KEEPER_SIGNALS = {signal.SIGCHLD, signal.SIGTERM}
USER_MODULE = "user_file_"  # prefix of the names of modules that `load_function` makes

# A function or class of an importable module: specification -> handler (job -> reply). A handler
# may have `facts`, a dict for the trainer, and `close()`.
MakeHandler = Callable[[str], Callable[[Any], dict]]


class Link:
    """The trainer's end of a socket to a process that may hang, die, or send byte by byte. It never
    blocks the trainer for more than a moment.

    A message of the process is its size, in 8 bytes, then that many bytes, at most `limit`.
    """

    def __init__(self, end: socket.socket, limit: int):
        self.socket = end
        self.limit = limit
        self.inbox = bytearray()
        self.waited_s = 0.0  # for the rest of the message in the inbox

    def send(self, data: bytes) -> None:
        """Send data. A thread sends what does not fit into the socket now, until the link is
        closed. If the process is dead, `receive` raises the error."""
        num_sent = 0
        with suppress(OSError):
            num_sent = self.socket.send(data, socket.MSG_DONTWAIT)
        if num_sent < len(data):
            rest = memoryview(data)[num_sent:]
            with suppress(OSError, RuntimeError):  # no room for a file or a thread: it times out
                arguments = [self.socket.dup(), rest]
                threading.Thread(target=send_rest, args=arguments, daemon=True).start()

    def receive(self) -> bytes | None:
        """The next message; None if it is not complete. ConnectionError if the process has closed
        its end, ValueError if the message is too large.

        Waits for the rest of a message that is arriving, however large, since it may be long until
        the trainer asks again; but not for one that comes slower than BYTES_PER_S.
        """
        while True:
            if len(self.inbox) >= SIZE_BYTES:
                size = int.from_bytes(self.inbox[:SIZE_BYTES], "big")
                if size > self.limit:
                    raise ValueError(f"it has {size} bytes, the limit is {self.limit}")
                end = SIZE_BYTES + size
                if len(self.inbox) >= end:
                    message = bytes(self.inbox[SIZE_BYTES:end])
                    del self.inbox[:end]
                    self.waited_s = 0.0
                    return message
            try:
                piece = self.socket.recv(2**18, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if self._rest_arrives():
                    continue
                return None
            if not piece:
                raise ConnectionResetError
            self.inbox += piece

    def _rest_arrives(self) -> bool:
        """Wait for the rest of a message that has begun. Returns whether more came in time."""
        patience_s = PATIENCE_S + len(self.inbox) / BYTES_PER_S - self.waited_s
        if not self.inbox or patience_s <= 0:
            return False
        start = time.monotonic()
        readable = wait([self.socket], patience_s)
        self.waited_s += time.monotonic() - start
        return bool(readable)

    def close(self) -> None:
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # also ends the thread of `send`
        self.socket.close()


def wait(sources: Iterable, timeout_s: float) -> list:
    """Wait until one of the sockets is readable, or closed by its other end, but not longer than
    `timeout_s`. Returns those that are."""
    with selectors.PollSelector() as selector:
        for source in sources:
            selector.register(source, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(timeout_s)]


def send_rest(end: socket.socket, data: memoryview) -> None:
    with end, suppress(OSError):
        end.sendall(data)


def is_reply(message: object) -> bool:
    """Whether a JSON value is what a worker sends: {"result": an object} or {"error": a text}. A
    user's function may itself write to the socket."""
    if not isinstance(message, dict):
        return False
    if "error" in message:
        return isinstance(message["error"], str) and message["error"] != ""
    return isinstance(message.get("result"), dict)


class Worker:
    """One process: its state, its deadline, and the key of its job."""

    STOPPED, STARTING, IDLE, BUSY = "stopped", "starting", "idle", "busy"

    def __init__(
        self,
        make_handler: MakeHandler,
        spec: str,
        timeout_s: float,
        memory_gib: float,
        close_s: float = 0.0,
    ):
        """timeout_s: of a job. memory_gib: beyond what is mapped when the handler has been made; 0:
        no limit. close_s: for the handler's `close()`; 0: it is killed at once."""
        if timeout_s <= 0 or memory_gib < 0:
            raise ValueError(f"workers: got {timeout_s} s, {memory_gib} GiB")
        self.arguments = [str(memory_gib), make_handler.__module__, make_handler.__name__, spec]
        self.timeout_s = timeout_s
        self.close_s = close_s
        self.queue: deque[tuple[Hashable, Any]] = deque()  # jobs that no other worker may do
        self.facts: dict = {}  # the handler's `facts`, once it has started
        self.killed: list[subprocess.Popen] = []  # earlier keepers, which may still be ending
        self.start()

    def start(self) -> None:
        end, child_end = socket.socketpair()
        with child_end:
            fd = child_end.fileno()
            command = [sys.executable, "-uPc", BOOT, str(ROOT), str(fd), str(os.getpid())]
            self.process = subprocess.Popen(
                command + self.arguments,
                pass_fds=[fd],
                # sets have the same order in each worker, and in a resumed run
                env=os.environ | {"PYTHONHASHSEED": "0"},
                stdin=subprocess.DEVNULL,
                stdout=2,  # stderr
                start_new_session=True,  # Ctrl-C is for the trainer
            )
        self.link = Link(end, MAX_REPLY)
        self.enter(self.STARTING, timeout_s=START_S)

    def enter(self, state: str, key: Hashable = None, timeout_s: float = inf) -> None:
        self.state = state
        self.key = key
        self.deadline = time.monotonic() + timeout_s

    @property
    def busy(self) -> bool:
        return self.state == self.BUSY

    @property
    def sources(self) -> list[socket.socket]:
        """They become readable when there is something for `poll`."""
        return [self.link.socket]

    def make_ready(self) -> bool:
        """Start the process if there is none, or if it died or sent something while it was idle (a
        job may have left a thread or an alarm). Returns whether it can take a job now."""
        if self.state == self.IDLE and (self.link.inbox or wait(self.sources, 0)):
            self.kill()
        if self.state == self.STOPPED:
            self.start()
        return self.state == self.IDLE

    def take(self, key: Hashable, job: Any) -> None:
        self.enter(self.BUSY, key, min(self.timeout_s, FOREVER_S))
        self.link.send(pickle.dumps(job))

    def poll(self) -> dict | None:
        """The reply to its job, once it has come, or {"error": reason}. ValueError if the process
        does not start."""
        try:
            message = self.link.receive()
            if message is not None:
                reply = json.loads(message)
                if not is_reply(reply):
                    raise ValueError("it is no reply")
        except ConnectionError:
            return self._fail(f"the worker died ({self._exit_reason()})")
        except (RecursionError, ValueError) as error:
            return self._fail(f"its reply cannot be read: {error}")
        if message is None:
            return self._check_deadline()
        error = reply.get("error", "")
        if self.state == self.STARTING:
            if error:
                return self._fail(error)
            self.facts = reply["result"]
            self.enter(self.IDLE)
            return None
        if error.startswith("MemoryError"):  # the process may still hold that memory
            return self._fail(error)
        self.enter(self.IDLE)
        return {"error": error} if error else reply["result"]

    def _check_deadline(self) -> dict | None:
        """None while there is time; after the deadline as `_fail`."""
        if time.monotonic() < self.deadline:
            return None
        if self.state == self.STARTING:
            return self._fail(
                f"its import did not end within {START_S:g} s (it runs the code at the top of the "
                "file)"
            )
        return self._fail(f"timeout after {self.timeout_s:g} s")

    def _fail(self, error: str) -> dict:
        """Kill the process. Returns the reply to its job; ValueError if it was still starting."""
        was_starting = self.state == self.STARTING
        self.kill()
        if was_starting:
            raise ValueError(error)
        return {"error": error}

    def _exit_reason(self) -> str:
        """How the process has ended, after it has closed its end of the link."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(DEATH_S)
        code = self.process.returncode
        if code is None:
            return "its socket is closed"
        if code - 128 in signal.valid_signals():
            return signal.strsignal(code - 128)
        return f"exit code {code}"

    def kill(self) -> None:
        """Make the keeper end the worker and all that it has started; does not wait."""
        self.enter(self.STOPPED)
        self.link.close()
        self.process.terminate()
        self.process.send_signal(signal.SIGCONT)  # a function may have stopped it
        self.killed = [process for process in self.killed if process.poll() is None]
        self.killed.append(self.process)

    def hang_up(self) -> None:
        """Close the link: an idle worker then closes its handler and exits. It has `close_s` for
        that."""
        self.link.close()
        self.deadline = time.monotonic() + self.close_s

    def stop(self) -> None:
        """Wait for the end after `hang_up`, and kill at the deadline. Returns when this process and
        earlier ones are gone, or after KILL_S for each."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, self.deadline - time.monotonic()))
        self.kill()
        for process in self.killed:
            try:
                process.wait(KILL_S)
            except subprocess.TimeoutExpired:
                # a descendant hangs in the kernel, for example on a dead file system
                process.kill()


# --- in the process that the trainer starts ---


def serve(fd: str, trainer: str, *arguments: str) -> None:
    """Fork: this process becomes the keeper, the child the worker, in a session of its own."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in KEEPER_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, KEEPER_SIGNALS)
    adopt_orphans()
    die_with(int(trainer), signal.SIGTERM)
    keeper = os.getpid()
    worker = os.fork()
    if worker:
        os.close(int(fd))  # or the link would stay open when the worker dies
        keep(worker)
    os.setsid()
    die_with(keeper)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, KEEPER_SIGNALS)
    work(fd, *arguments)


def keep(worker: int) -> NoReturn:
    """Wait for the worker's end, or for SIGTERM. End all that descends from this process, and exit
    with the worker's code, or with 128 + its signal, like a shell."""
    is_terminated = False
    while not is_terminated and not worker_has_ended(worker):
        is_terminated = signal.sigwait(KEEPER_SIGNALS) == signal.SIGTERM
    wait_status = end_descendants(status_of=worker)
    code = os.waitstatus_to_exitcode(wait_status)
    os._exit(code if code >= 0 else 128 - code)


def worker_has_ended(worker: int) -> bool:
    """Whether the worker has ended. Adopted children that have ended are reaped, the worker is
    not."""
    while status := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if status.si_pid == worker:
            return True
        os.waitpid(status.si_pid, 0)
    return False


def work(fd: str, memory_gib: str, module: str, make_handler: str, spec: str) -> None:
    """The worker: make the handler, report that, and do one job after the other until the trainer
    hangs up."""
    handle = None
    pid = os.getpid()
    guard_output()
    end = socket.socket(fileno=int(fd))
    end.set_inheritable(False)  # programs that a function starts do not get it

    def load() -> dict:
        nonlocal handle
        handle = getattr(importlib.import_module(module), make_handler)(spec)
        limit_memory(float(memory_gib))
        return getattr(handle, "facts", {})

    # suppressed: the trainer is gone, or the function has closed the socket
    with suppress(EOFError, OSError, pickle.UnpicklingError):
        with end, end.makefile("rb") as jobs:
            end.sendall(run_to_message(load))
            while True:
                reply = run_to_message(handle, pickle.load(jobs))
                if os.getpid() != pid:  # a child that the function forked has returned from it
                    os._exit(0)
                end.sendall(reply)
    if hasattr(handle, "close"):
        handle.close()


def run_to_message(function: Callable[..., dict], *arguments: Any) -> bytes:
    """Call the function; {"result": what it returns} or {"error": reason}, as a `Link` message."""
    try:
        text = json.dumps({"result": function(*arguments)}, ensure_ascii=False)
    except BaseException as error:
        text = json.dumps({"error": describe(error)}, ensure_ascii=False)
    data = text.encode(errors="replace")  # lone surrogates can be neither printed nor saved
    return len(data).to_bytes(SIZE_BYTES, "big") + data


def limit_memory(memory_gib: float) -> None:
    """Let the address space grow by at most `memory_gib` from now on; 0: no limit."""
    if not memory_gib:
        return
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    allowed = mapped + int(memory_gib * 2**30)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or allowed < hard:
        resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))


def describe(error: BaseException) -> str:
    """The message of an exception, and the innermost line in a user's file: "KeyError: 'answer'
    (line 12 of rewards.py)"."""
    text = "".join(traceback.format_exception_only(error)).strip()[:MAX_ERROR]
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if str(frame.f_globals.get("__name__")).startswith(USER_MODULE):
            return f"{text} (line {line} of {Path(frame.f_code.co_filename).name})"
    return text

"""A user's functions in processes of their own: a hang, a crash or a memory hog costs its job, and not the step.

A worker is a new Python (the trainer, with CUDA and threads, must not fork) that is told what to import (under
multiprocessing it would import the running script, and torch with it) and that has a socket of its own: nothing is
shared that it could lock or corrupt when it is killed.
"""

import ctypes
import importlib.util
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from common.progress import Progress

ROOT = Path(__file__).resolve().parents[1]
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from common.workers import serve; serve(*sys.argv[2:])"
START_S = 120  # for a worker to start: the function's file may import slow libraries from a slow disk
TRANSFER_S = 10  # a message that is under way for longer comes from, or goes to, a process that hangs
MAX_ERROR = 500  # characters of a message that are kept
PR_SET_PDEATHSIG = 1
USER_MODULE = "user_file_"  # how the names of the modules begin that `load_function` makes

MakeHandler = Callable[[str], Callable[[Any], dict]]  # of an importable module: specification -> (job -> reply)


class Worker:
    """One process: what it is doing, the key of its job, and until when it has time."""

    STARTING, IDLE, BUSY = "starting", "idle", "busy"

    def __init__(self, make_handler: MakeHandler, spec: str, memory_gib: float):
        self.arguments = [str(memory_gib), make_handler.__module__, make_handler.__name__, spec]
        self.start()

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", TRANSFER_S, 0))
        with theirs:
            arguments = [str(ROOT), str(theirs.fileno()), str(os.getpid()), *self.arguments]
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-c", BOOT, *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a function prints is no part of the trainer's output
                start_new_session=True,  # Ctrl-C is for the trainer; and a group to kill, with what a function started
            )
        self.connection = Connection(ours.detach())
        self.expect(self.STARTING, timeout_s=START_S)

    def stop(self) -> str:
        """Kill the process and the children it has; returns how it ended, which may have been earlier."""
        if not self.connection.closed:
            self.connection.close()
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel, for example on a dead file system
                self.process.wait(TRANSFER_S)
        code = self.process.returncode
        return signal.strsignal(-code) if code and code < 0 else f"exit code {code}"

    def restart(self) -> None:
        self.stop()
        self.start()

    def expect(self, state: str, key: Hashable = None, timeout_s: float = inf) -> None:
        self.state, self.key = state, key
        self.timeout_s, self.deadline = timeout_s, time.monotonic() + timeout_s

    def reply(self, readable: bool) -> dict | None:
        """{"result": ...} or {"error": why}; None while there is time to wait. The process is stopped if it failed."""
        try:
            if readable:
                return json.loads(self.connection.recv_bytes())
            if time.monotonic() < self.deadline:
                return None
            dead = self.process.poll() is not None  # unnoticed, if a child of it holds the socket
        except (EOFError, OSError, ValueError, RecursionError):
            dead = True
        end = self.stop()
        return {"error": f"the worker died ({end})" if dead else f"timeout after {self.timeout_s:g} s"}


class Pool:
    """At most `workers` processes that turn jobs into replies, with the handler that `make_handler(spec)` makes there.

    One is started at once, to see whether it starts; the others when there is a job for them.

    Each job has `timeout_s` seconds from when a worker gets it, and `memory_gib` beyond what that had mapped at its
    start (0: no limit). One that fails has the reply {"error": why}. ValueError if the workers do not start.
    """

    def __init__(
        self, kind: str, make_handler: MakeHandler, spec: str, workers: int, timeout_s: float, memory_gib: float
    ):
        if workers < 1 or timeout_s <= 0 or memory_gib < 0:
            raise ValueError(f"{kind} workers: got {workers} workers, {timeout_s} s, {memory_gib} GiB")
        self.kind, self.timeout_s = kind, timeout_s
        self.queue: deque[tuple[Hashable, Any]] = deque()
        self.most, self.new_worker = workers, partial(Worker, make_handler, spec, memory_gib)
        self.workers = [self.new_worker()]
        while self.workers[0].state == Worker.STARTING:
            self._collect(inf)

    @property
    def pending(self) -> int:
        """Jobs without a reply so far."""
        return len(self.queue) + sum(worker.state == Worker.BUSY for worker in self.workers)

    def submit(self, key: Hashable, job: Any) -> None:
        self.queue.append((key, job))
        self._hand_out()

    def poll(self, timeout_s: float = 0.0) -> list[tuple[Hashable, dict]]:
        """(key, reply) of what has finished; waits that long for the first, but not if nothing is pending."""
        end = time.monotonic() + timeout_s
        while True:
            done = self._collect(end)
            self._hand_out()
            if done or not self.pending or time.monotonic() >= end:
                return done

    def run(self, jobs: Sequence) -> list[dict]:
        """The replies of all jobs, in their order. Earlier jobs are forgotten."""
        self.cancel()
        for number, job in enumerate(jobs):
            self.submit(number, job)
        replies, progress = {}, Progress(f"{self.kind}s", len(jobs))
        while self.pending:
            replies.update(new := self.poll(inf))
            progress.add(len(new))
        return [replies[number] for number in range(len(jobs))]

    def cancel(self) -> None:
        """Forget all jobs, for example after an exception such as Ctrl-C."""
        self.queue.clear()
        for worker in self.workers:
            if worker.state == Worker.BUSY:
                worker.restart()

    def close(self) -> None:
        """Kill the workers. Without it they die with the trainer."""
        for worker in self.workers:
            worker.stop()

    def _hand_out(self) -> None:
        for worker in self.workers:
            if not self.queue:
                return
            if worker.state != Worker.IDLE:
                continue
            if worker.process.poll() is not None:  # a thread or an alarm that an earlier job left behind
                worker.restart()
                continue
            key, job = self.queue.popleft()
            worker.expect(Worker.BUSY, key, self.timeout_s)
            with suppress(OSError):  # if it died just now, its reply will tell
                worker.connection.send(job)
        starting = sum(worker.state == Worker.STARTING for worker in self.workers)
        for _ in range(min(self.most - len(self.workers), len(self.queue) - starting)):
            self.workers.append(self.new_worker())

    def _collect(self, until: float) -> list[tuple[Hashable, dict]]:
        """Wait for the next reply or deadline, but not longer than `until`, and take what there is."""
        waiting = [worker for worker in self.workers if worker.state != Worker.IDLE]
        patience = min([until, *(worker.deadline for worker in waiting)]) - time.monotonic()
        patience = min(max(0.0, patience), 3600.0)  # what asks, asks again; the system call takes no week
        readable = wait([worker.connection for worker in waiting], patience) if waiting else []
        done = []
        for worker in waiting:
            reply = worker.reply(worker.connection in readable)
            if reply is None:
                continue
            error = "" if "result" in reply else reply["error"]
            if worker.state == Worker.STARTING and error:
                self.close()
                raise ValueError(f"a {self.kind} worker did not start: {error}")
            if worker.state == Worker.BUSY:
                done.append((worker.key, reply.get("result", reply)))
            worker.expect(Worker.IDLE)
            if worker.connection.closed or error.startswith("MemoryError"):  # the latter may still hold its memory
                worker.restart()
        return done


def serve(fd: str, trainer: str, memory_gib: str, module: str, make_handler: str, spec: str) -> None:
    """A worker process: make the handler, say so, then do one job after the other until the trainer is gone."""
    # The kernel kills this process with the thread that started it; and if that is dead by now, it has a new parent.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(trainer):
        return
    os.set_inheritable(int(fd), False)  # programs that a function starts do not get the socket
    connection, pid = Connection(int(fd)), os.getpid()
    try:
        handle = getattr(importlib.import_module(module), make_handler)(spec)
        limit(float(memory_gib))
    except BaseException as error:
        connection.send_bytes(json.dumps({"error": describe(error)}).encode())
        return
    connection.send_bytes(b'{"result": {}}')
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            reply = json.dumps({"result": handle(job)})
        except BaseException as error:
            reply = json.dumps({"error": describe(error)})
        if os.getpid() != pid:  # the function has forked, and its child came back too
            os._exit(0)
        connection.send_bytes(reply.encode())


def limit(memory_gib: float) -> None:
    """No core dumps, and that much more memory (0: no limit)."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_gib:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        allowed, hard = mapped + int(memory_gib * 2**30), resource.getrlimit(resource.RLIMIT_AS)[1]
        if hard == resource.RLIM_INFINITY or allowed < hard:
            resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))


def load_function(spec: str, flag: str) -> Callable:
    """The function NAME of the file FILE.py, from "FILE.py:NAME"; a file is run once. ValueErrors name the flag."""
    file, _, name = spec.rpartition(":")
    if not file or not name.isidentifier():
        raise ValueError(f"{flag} {spec}: expected FILE.py:NAME")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"{flag} {spec}: there is no file {path}")
    module_name = f"{USER_MODULE}{path.stem}_{zlib.crc32(bytes(path)):08x}"
    if module_name not in sys.modules:
        module_spec = importlib.util.spec_from_file_location(module_name, path)
        if module_spec is None:
            raise ValueError(f"{flag} {spec}: {path.name} is not a Python file")
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[module_name] = module  # dataclasses and pickle look a class's module up by name
        sys.path.append(str(path.parent))  # the file may import its neighbours
        try:
            module_spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[module_name]
            raise ValueError(f"{flag} {spec}: {describe(error)}") from error
    function = getattr(sys.modules[module_name], name, None)
    if function is None:
        raise ValueError(f"{flag} {spec}: {path} defines no {name}")
    if not callable(function):
        raise ValueError(f"{flag} {spec}: {name} is a {type(function).__name__}, not a function")
    return function


def describe(error: BaseException) -> str:
    """The message, and the innermost line in a user's file: "KeyError: 'answer' (line 12 of rewards.py)"."""
    text = "".join(traceback.format_exception_only(error)).strip()[:MAX_ERROR]
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if str(frame.f_globals.get("__name__")).startswith(USER_MODULE):
            return f"{text} (line {line} of {Path(frame.f_code.co_filename).name})"
    return text

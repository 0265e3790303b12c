"""Reward functions in processes of their own: a hang, a crash or a memory hog costs its sample, and not the step.

A worker is a new Python (the trainer, with CUDA and threads, must not fork) that is told what to import (under
multiprocessing it would import the running script, and torch with it) and that has a socket of its own: nothing is
shared that it could lock or corrupt when it is killed.
"""

import ctypes
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
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from multiprocessing.connection import Connection, wait
from pathlib import Path

from common.rewards import load_reward_function, reward_function, score_response

Job = tuple[str, str, object, Mapping | None]  # data_source, text, ground_truth, extra_info

ROOT = Path(__file__).resolve().parents[2]
# An empty package in place of `common`, whose own __init__ imports torch: 250 MB and two seconds for each worker.
BOOT = """import sys, types
sys.path.insert(0, sys.argv[1])
sys.modules["common"] = common = types.ModuleType("common")
common.__path__ = [f"{sys.argv[1]}/common"]
from common.rewards.workers import serve
serve(*sys.argv[2:])"""
START_S = 120  # for a worker to start: the function's file may import slow libraries from a slow disk
TRANSFER_S = 10  # a message that is under way for longer comes from, or goes to, a process that hangs
MAX_ERROR = 500  # characters of a message that are kept
PR_SET_PDEATHSIG = 1


class Worker:
    """One process and the job it has: the job's number, or STARTING, or IDLE."""

    STARTING, IDLE = -2, -1

    def __init__(self, function_spec: str | None, memory_gib: float):
        self.arguments = [str(memory_gib), function_spec or ""]
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
        self.expect(self.STARTING, START_S)

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

    def expect(self, job: int, timeout_s: float = inf) -> None:
        self.job, self.timeout_s, self.deadline = job, timeout_s, time.monotonic() + timeout_s

    def reply(self, readable: bool) -> dict | None:
        """The answer, or {"error": ...} and the process is stopped; None while there is time to wait for it."""
        try:
            if readable:
                return json.loads(self.connection.recv_bytes())
            if time.monotonic() < self.deadline:
                return None
            dead = self.process.poll() is not None  # unnoticed, if a child of it holds the socket
        except (EOFError, OSError, ValueError):
            dead = True
        end = self.stop()
        return {"error": f"the worker died ({end})" if dead else f"timeout after {self.timeout_s:g} s"}


class RewardWorkers:
    """`workers` processes that score with the function FILE.py:NAME, or without one with the built-in functions.

    Each job has `timeout_s` seconds and `memory_gib` beyond what its worker had mapped at the start (0: no limit).
    ValueError if the workers do not start, which is how a missing file or an error in it shows.
    """

    def __init__(self, function_spec: str | None, workers: int, timeout_s: float, memory_gib: float = 4.0):
        if workers < 1 or timeout_s <= 0 or memory_gib < 0:
            raise ValueError(f"reward workers: got {workers} workers, {timeout_s} s, {memory_gib} GiB")
        self.timeout_s = timeout_s
        self.workers = [Worker(function_spec, memory_gib) for _ in range(workers)]
        while any(worker.job == Worker.STARTING for worker in self.workers):
            self._collect([])

    def score(self, jobs: Sequence[Job]) -> list[dict[str, float | str]]:
        """What `score_response` makes of each job, in their order; if it failed, {"error": why} without a "score"."""
        results, todo = [{} for _ in jobs], deque(range(len(jobs)))
        for worker in self.workers:
            if worker.job >= 0:  # an exception, such as Ctrl-C, has ended the previous call
                worker.restart()
        while todo or any(worker.job >= 0 for worker in self.workers):
            for worker in self.workers:
                if worker.job == Worker.IDLE and todo:
                    if worker.process.poll() is not None:  # a thread or an alarm that an earlier job left behind
                        worker.restart()
                        continue
                    number = todo.popleft()
                    worker.expect(number, self.timeout_s)
                    with suppress(OSError):  # if it died just now, its reply will tell
                        worker.connection.send(jobs[number])
            self._collect(results)
        return results

    def _collect(self, results: list[dict]) -> None:
        """Wait for the next answer or deadline and take what there is."""
        waiting = [worker for worker in self.workers if worker.job != Worker.IDLE]
        patience = min(worker.deadline for worker in waiting) - time.monotonic()
        readable = wait([worker.connection for worker in waiting], max(0.0, patience))
        for worker in waiting:
            reply = worker.reply(worker.connection in readable)
            if reply is None:
                continue
            error = "" if "score" in reply else reply.get("error", "")
            if worker.job == Worker.STARTING and error:
                self.close()
                raise ValueError(f"a reward worker did not start: {error}")
            if worker.job >= 0:
                results[worker.job] = reply
            worker.expect(Worker.IDLE)
            if worker.connection.closed or error.startswith("MemoryError"):  # the latter may still hold its memory
                worker.restart()

    def close(self) -> None:
        """Kill the workers. Without it they die with the trainer."""
        for worker in self.workers:
            worker.stop()


def serve(fd: str, trainer: str, memory_gib: str, function_spec: str) -> None:
    """A worker process: load the function, say so, then score one job after the other until the trainer is gone."""
    # The kernel kills this process with the thread that started it; and if that is dead by now, it has a new parent.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(trainer):
        return
    os.set_inheritable(int(fd), False)  # programs that a function starts do not get the socket
    connection, pid = Connection(int(fd)), os.getpid()
    function, file = None, Path(function_spec.rpartition(":")[0]).expanduser().resolve()
    try:
        if function_spec:
            sys.path.append(str(file.parent))  # the file may import its neighbours
            function = load_reward_function(function_spec)
        limit(float(memory_gib))
    except BaseException as error:
        connection.send_bytes(json.dumps({"error": describe(error, file)}).encode())
        return
    connection.send_bytes(b"{}")
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            reply = score_response(function or reward_function(job[0]), *job)
        except BaseException as error:
            reply = {"error": describe(error, file)}
        if os.getpid() != pid:  # the function has forked, and its child came back too
            os._exit(0)
        connection.send_bytes(json.dumps(reply).encode())


def limit(memory_gib: float) -> None:
    """No core dumps, and that much more memory (0: no limit)."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_gib:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        allowed, hard = mapped + int(memory_gib * 2**30), resource.getrlimit(resource.RLIMIT_AS)[1]
        if hard == resource.RLIM_INFINITY or allowed < hard:
            resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))


def describe(error: BaseException, file: Path) -> str:
    """The message, and the innermost line in the user's file: "KeyError: 'answer' (line 12 of rewards.py)"."""
    text = "".join(traceback.format_exception_only(error)).strip()[:MAX_ERROR]
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f"{text} (line {lines[-1]} of {file.name})" if lines else text

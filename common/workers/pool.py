"""A user's functions run in processes of their own: a pool of them, and how a function is found."""

import importlib.util
import os
import sys
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from math import inf
from pathlib import Path
from typing import Any

from common.ending import at_end
from common.processes import allow_open_files
from common.progress import Progress
from common.workers.process import USER_MODULE, Worker, describe, wait

SHARE = 4  # homes of a worker before another one is started for the next home
NO_WORKER = "no worker starts"  # start of the error of a job that no process could take


class Pool:
    """At most `max_workers` workers that turn jobs into replies, `at_once` of them at a time.

    The first is started by the constructor, which raises a ValueError if it does not start, or an
    OSError if the system has no room for it; the others when there is a job for them. Jobs with the
    same `home` go to the same worker, which may keep a state for the next one; a worker gets
    `share` homes before another one is started. The reply to a job that fails is {"error": reason}.
    If a later worker does not start, the job that it would have got fails, and the worker is
    started again for the next one; if the system has no room for more, fewer go on.

    A worker is a `Worker`, or has what is used here of one (`kill` only in `run`). Its `deadline`
    is infinite while it has nothing to do.
    """

    def __init__(
        self,
        trouble: str,
        new_worker: Callable[[], Worker],
        max_workers: int,
        share: int = SHARE,
        at_once: float = inf,
    ):
        """trouble: the message about a worker that does not start."""
        if max_workers < 1:
            raise ValueError(f"workers: got {max_workers}")
        allow_open_files()
        self.trouble = trouble
        self.new_worker = new_worker
        self.max_workers = max_workers
        self.share = share
        self.at_once = at_once
        self.queue: deque[tuple[Hashable, Any]] = deque()
        self.homes: dict[Hashable, Worker] = {}
        self.num_homes: Counter[Worker] = Counter()
        self.has_started = False  # whether any worker has
        # replies of jobs for which no process could be started
        self.lost: list[tuple[Hashable, Any]] = []
        self.workers = [self.new_worker()]
        while not self.workers[0].make_ready():
            self._collect(inf)
        self.has_started = True
        at_end.callback(self.close)

    @property
    def pending(self) -> int:
        """The number of jobs whose reply `poll` has not returned so far."""
        num_jobs = len(self.queue) + len(self.lost)
        for worker in self.workers:
            num_jobs += len(worker.queue) + worker.busy
        return num_jobs

    def submit(self, key: Hashable, job: Any, home: Hashable = None) -> None:
        queue = self.queue if home is None else self._worker_of(home).queue
        queue.append((key, job))
        self._hand_out()

    def poll(self, timeout_s: float = 0.0) -> list[tuple[Hashable, Any]]:
        """(key, reply) of what has finished. Waits up to `timeout_s` for the first, but not if
        nothing is pending."""
        end = time.monotonic() + timeout_s
        while True:
            done = self._collect(end)
            self._hand_out()
            if done or not self.pending or time.monotonic() >= end:
                return done

    def run(self, jobs: Sequence, label: str) -> list[dict]:
        """The replies of all jobs, in their order. Jobs that an exception has left behind are
        dropped."""
        self.queue.clear()
        self.lost.clear()
        for worker in self.workers:
            worker.queue.clear()
            if worker.busy:
                worker.kill()
        for number, job in enumerate(jobs):
            self.submit(number, job)
        replies: dict[Hashable, dict] = {}
        progress = Progress(label, len(jobs))
        while self.pending:
            done = self.poll(inf)
            replies.update(done)
            progress.add(len(done))
        return [replies[number] for number in range(len(jobs))]

    def close(self) -> None:
        """End the workers; those that are idle close their handlers first. The end of the run calls
        this. If the trainer is killed, its workers are killed as well."""
        for worker in self.workers:
            worker.hang_up()
        for worker in self.workers:
            worker.stop()

    def _worker_of(self, home: Hashable) -> Worker:
        """The worker of a home. A new home gets the worker with the fewest; if all have their
        share, another worker is started for it, up to `max_workers`."""
        if home not in self.homes:
            has_room = any(self.num_homes[worker] < self.share for worker in self.workers)
            if not has_room and len(self.workers) < self.max_workers:
                self._add_worker()
            worker = min(self.workers, key=lambda worker: self.num_homes[worker])
            self.homes[home] = worker
            self.num_homes[worker] += 1
        return self.homes[home]

    def _hand_out(self) -> None:
        num_free = self.at_once - sum(worker.busy for worker in self.workers)
        failures: list[tuple[Worker, str]] = []
        for worker in self.workers:
            queue = worker.queue or self.queue
            if not queue or num_free <= 0:
                continue
            try:
                is_ready = worker.make_ready()
            except OSError as error:  # the system has no room for its process
                failures.append((worker, str(error)))
                continue
            if is_ready:
                worker.take(*queue.popleft())
                num_free -= 1
        for worker, error in failures:
            # a job that any worker may take fails only if no active worker could take it later
            is_any_active = any(other.deadline < inf for other in self.workers)
            if worker.queue or (self.queue and not is_any_active):
                self.lost += self._on_failed_start(worker, error)
        # workers that are not busy are starting, or wait because `at_once` others are busy: each of
        # them will take a job
        num_waiting = sum(not worker.busy for worker in self.workers)
        num_new = min(self.max_workers - len(self.workers), len(self.queue) - num_waiting)
        for _ in range(num_new):
            if not self._add_worker():
                break

    def _add_worker(self) -> bool:
        """Start another worker. Returns whether the system had room for one; else the run goes on
        with those that it has."""
        try:
            self.workers.append(self.new_worker())
        except OSError as error:
            self.max_workers = len(self.workers)
            print(f"warning: {self.trouble}: {error}; {self.max_workers} go on", flush=True)
            return False
        return True

    def _collect(self, until: float) -> list[tuple[Hashable, Any]]:
        """Wait for the next reply or deadline, but not longer than `until`. Returns (key, reply) of
        what has finished."""
        done = self.lost
        self.lost = []
        if done:
            until = -inf
        active = [worker for worker in self.workers if worker.deadline < inf]
        sources = []
        for worker in active:
            sources += worker.sources
            until = min(until, worker.deadline)
        if sources:
            # not infinite, which the system call refuses: the caller comes again
            patience_s = min(max(0.0, until - time.monotonic()), 3600.0)
            wait(sources, patience_s)
        for worker in active:
            key = worker.key
            try:
                reply = worker.poll()
            except ValueError as error:
                done += self._on_failed_start(worker, str(error))
                continue
            if reply is not None:
                done.append((key, reply))
        return done

    def _on_failed_start(self, worker: Worker, error: str) -> list[tuple[Hashable, Any]]:
        """[(key, reply)] of the job that the worker would have got, if there is one. ValueError if
        no worker has started so far."""
        if not self.has_started:
            message = error.removeprefix("ValueError: ")
            if not message.startswith("--"):  # a message about a flag needs no more words
                message = f"{self.trouble}: {error}"
            raise ValueError(message)
        print(f"warning: {self.trouble}: {error}", flush=True)
        queue = worker.queue or self.queue
        if not queue:
            return []
        key, _ = queue.popleft()
        return [(key, {"error": f"{NO_WORKER}: {error}"})]


def load_function(spec: str, flag: str) -> Callable:
    """The function, or class, NAME of the file FILE.py, from "FILE.py:NAME". A file is executed
    once. ValueErrors name the flag."""
    file, _, name = spec.rpartition(":")
    if not file or not name.isidentifier():
        raise ValueError(f"{flag} {spec}: expected FILE.py:NAME")
    path = Path(os.path.expanduser(file)).resolve()
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
        raise ValueError(
            f"{flag} {spec}: {name} is of type {type(function).__name__}, not a function"
        )
    return function

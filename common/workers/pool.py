"""A user's functions in processes of their own: how they are found, and a pool of workers that run
them."""

import importlib.util
import os
import sys
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from math import inf
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from common.ending import at_end
from common.progress import Progress
from common.workers.process import USER_MODULE, Worker, describe

SHARE = 4  # homes that a worker has before there is another one


class Pool:
    """At most `most` workers that turn jobs into replies, `at_once` of them at the same time.

    One is started at once, to see whether it starts; the others when there is a job for them. Jobs
    with the same `home` go to the same worker, which may keep something for the next; one gets
    `share` homes before there is another. A job that fails has the reply {"error": why}. ValueError
    if the first worker does not start; if a later one does not, that costs the job it would have
    got, and it is tried again with the next.

    A worker is a `Worker`, or has what is used of one here.
    """

    def __init__(
        self,
        trouble: str,
        new_worker: Callable[[], Worker],
        most: int,
        share: int = SHARE,
        at_once: float = inf,
    ):
        """trouble: what is said of a worker that does not start."""
        if most < 1:
            raise ValueError(f"workers: got {most}")
        self.trouble = trouble
        self.new_worker = new_worker
        self.most = most
        self.share = share
        self.at_once = at_once
        self.queue: deque[tuple[Hashable, Any]] = deque()
        self.homes: dict[Hashable, Worker] = {}
        self.works = False
        self.workers = [self.new_worker()]
        while not self.workers[0].ready():
            self._collect(inf)
        self.works = True
        at_end.callback(self.close)  # and with it what is under way, or was started

    @property
    def pending(self) -> int:
        """Jobs without a reply so far."""
        return len(self.queue) + sum(worker.busy + len(worker.queue) for worker in self.workers)

    def submit(self, key: Hashable, job: Any, home: Hashable = None) -> None:
        queue = self.queue if home is None else self._home(home).queue
        queue.append((key, job))
        self._hand_out()

    def poll(self, timeout_s: float = 0.0) -> list[tuple[Hashable, Any]]:
        """(key, reply) of what has finished; waits that long for the first, but not if nothing is
        pending."""
        end = time.monotonic() + timeout_s
        while True:
            done = self._collect(end)
            self._hand_out()
            if done or not self.pending or time.monotonic() >= end:
                return done

    def run(self, jobs: Sequence, label: str) -> list[dict]:
        """The replies of all jobs, in their order. Earlier jobs, of what an exception has ended,
        are forgotten."""
        self.queue.clear()
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
        """End the workers, as the end of the run does. Those of a killed trainer are killed, with
        nothing closed."""
        for worker in self.workers:
            worker.hang_up()
        for worker in self.workers:
            worker.stop()

    def _home(self, home: Hashable) -> Worker:
        """The worker of a home; a new home gets the one that has fewest, or a new one if all have
        enough."""
        if home not in self.homes:
            used = Counter(self.homes.values())
            if len(self.workers) < self.most and all(
                used[worker] >= self.share for worker in self.workers
            ):
                self.workers.append(self.new_worker())
            self.homes[home] = min(self.workers, key=lambda worker: used[worker])
        return self.homes[home]

    def _hand_out(self) -> None:
        free = self.at_once - sum(worker.busy for worker in self.workers)
        for worker in self.workers:
            queue = worker.queue or self.queue
            if queue and free > 0 and worker.ready():
                worker.take(*queue.popleft())
                free -= 1
        # they start, or `at_once` work already
        num_free = sum(not worker.busy for worker in self.workers)
        for _ in range(min(self.most - len(self.workers), len(self.queue) - num_free)):
            self.workers.append(self.new_worker())

    def _collect(self, until: float) -> list[tuple[Hashable, Any]]:
        """Wait for the next reply or deadline, but not longer than `until`, and take what there
        is."""
        waiting = [worker for worker in self.workers if worker.deadline < inf]
        sources = [source for worker in waiting for source in worker.sources]
        patience = min([until, *(worker.deadline for worker in waiting)]) - time.monotonic()
        # what asks, asks again; the system call takes no week
        patience = min(max(0.0, patience), 3600.0)
        if sources:
            wait(sources, patience)
        done = []
        for worker in waiting:
            key = worker.key
            try:
                reply = worker.poll()
            except ValueError as error:
                done += self._failed_start(worker, str(error))
                continue
            if reply is not None:
                done.append((key, reply))
        return done

    def _failed_start(self, worker: Worker, error: str) -> list[tuple[Hashable, Any]]:
        """The reply to the job that the worker would have got. ValueError if none has started so
        far."""
        if not self.works:
            raise ValueError(f"{self.trouble}: {error}")
        print(f"warning: {self.trouble}: {error}", flush=True)
        queue = worker.queue or self.queue
        if not queue:
            return []
        key, _ = queue.popleft()
        return [(key, {"error": f"no worker starts: {error}"})]


def load_function(spec: str, flag: str) -> Callable:
    """The function NAME of the file FILE.py, from "FILE.py:NAME"; a file is run once. ValueErrors
    name the flag."""
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
        raise ValueError(f"{flag} {spec}: {name} is a {type(function).__name__}, not a function")
    return function

"""A pool of workers for ranks that share an engine."""

from collections.abc import Hashable
from typing import Any

from torch.distributed import ProcessGroup

from common.distributed import broadcast_object
from common.workers.pool import Pool


class SharedPool:
    """A `Pool` of this rank; with a `group` one for all its ranks, on the first, which tells the
    others the replies.

    They submit the same jobs and poll equally often: in lock-step, with nothing pending while the
    engine samples.
    """

    def __init__(self, group: ProcessGroup | None, *arguments, **options):
        """Arguments and errors as of `Pool`."""
        self.group = group
        self.pool = Pool(*arguments, **options) if group is None or group.rank() == 0 else None
        self.answered: list[tuple[Hashable, Any]] = []  # without a worker
        self.pending = 0  # jobs whose reply `poll` has not returned so far

    def answer(self, key: Hashable, reply: Any) -> None:
        """Reply to what needs no worker."""
        self.pending += 1
        self.answered.append((key, reply))

    def hand_on(self, key: Hashable, job: Any, home: Hashable = None) -> None:
        """As `Pool.submit`."""
        self.pending += 1
        if self.pool:
            self.pool.submit(key, job, home)

    def poll(self, timeout_s: float = 0.0) -> list[tuple[Hashable, Any]]:
        """As of `Pool`, the same on all ranks."""
        if not self.pending:
            return []
        done, self.answered = self.answered, []
        if self.pool:
            done += self.pool.poll(0.0 if done else timeout_s)
        if self.group:
            done = broadcast_object(done, self.group)
        self.pending -= len(done)
        return done

    def close(self) -> None:
        if self.pool:
            self.pool.close()

"""The tools of ranks that share an engine: one process pool for all of them, one reply to each call."""

from collections.abc import Callable, Hashable, Mapping

from torch.distributed import ProcessGroup

from common.distributed import broadcast_object
from common.tools import Tool, ToolWorkers
from common.tools.python import PythonWorkers
from common.tools.turns import Call, Protocol, ToolReply


class SharedWorkers:
    """Stands for the workers on every rank of a group; `start` makes them on the first, which tells what they reply.

    All ranks submit the same calls and poll equally often, which takes turns in lock-step: while the engine samples
    nothing is pending, and nothing is exchanged.
    """

    def __init__(
        self,
        group: ProcessGroup,
        tools: dict[str, Tool],
        protocol: type[Protocol],
        start: Callable[[], ToolWorkers | PythonWorkers],
    ):
        self.group, self.tools, self.protocol = group, tools, protocol
        self.workers = start() if group.rank() == 0 else None
        self.pending = 0  # calls whose reply `poll` has not returned so far

    def submit(self, key: Hashable, call: Call, context: Mapping, kwargs: Mapping) -> None:
        self.pending += 1
        if self.workers:
            self.workers.submit(key, call, context, kwargs)

    def poll(self, timeout_s: float = 0.0) -> list[tuple[Hashable, ToolReply]]:
        """(key, reply) of what has finished, the same on all ranks."""
        if not self.pending:
            return []
        replies = broadcast_object(self.workers and self.workers.poll(timeout_s), self.group)
        self.pending -= len(replies)
        return replies

    def close(self) -> None:
        if self.workers:
            self.workers.close()

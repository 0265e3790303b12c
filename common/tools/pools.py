"""The processes that answer a policy: one pool of them for each rank, or for all ranks that share
an engine."""

import inspect
import json
from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

from torch.distributed import ProcessGroup

from common.data.protocols import Call, Hermes, Protocol, error_text
from common.distributed import broadcast_object
from common.tools import Caller, as_reply, find_tool, load_tools
from common.types import Tool, ToolReply
from common.workers.pool import Pool
from common.workers.process import Worker

CLOSE_S = 2.0  # for environments to close what they hold
OTHER = Tool("", print, {}, role="user", ours=True)  # what is no tool of the policy's


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


class ToolPool(SharedPool):
    """Workers whose replies are `ToolReply`s. A job has the key (that of its call, the name of the
    tool)."""

    protocol: type[Protocol] = Hermes  # of the policies that call them
    tools: dict[str, Tool]

    def poll(self, timeout_s: float = 0.0) -> list[tuple[Hashable, ToolReply]]:
        """(key, reply) of what has finished; waits that long for the first, but not if nothing is
        pending."""
        return [
            (
                key,
                as_reply(reply, self.tools.get(name, OTHER)) if isinstance(reply, dict) else reply,
            )
            for (key, name), reply in super().poll(timeout_s)
        ]


class ToolWorkers(ToolPool):
    """At most `workers` processes a rank that run the tools of --tools, and an environment.
    ValueError if one of them does not load.

    Each call has `timeout_s` seconds from when a worker gets it, and `memory_gib` (0: no limit).
    Exceeding them, or ending the worker, is an error that the policy reads; a failure if the tool
    is `ours`, or if no worker takes it.
    """

    def __init__(
        self,
        spec: str,
        workers: int,
        timeout_s: float,
        memory_gib: float = 4.0,
        environment: str | None = None,
        group: ProcessGroup | None = None,
    ):
        self.tools = load_tools(spec, environment)
        methods = {name: tool.schema for name, tool in self.tools.items() if tool.stateful}
        given = json.dumps({"tools": spec, "environment": environment, "methods": methods})
        new_worker = partial(
            Worker, Caller, given, timeout_s, memory_gib, CLOSE_S if methods else 0.0
        )
        most = workers * (group.size() if group else 1)
        super().__init__(group, "a tool worker did not start", new_worker, most)

    def submit(self, key: Hashable, call: Call, context: Mapping, kwargs: Mapping) -> None:
        """context: {"media": [{"kind": "image" or "video", "frames": [encoded, ...]}, ...] in the
        order in which they were seen, "num_prompt_media", "min_pixels", "max_pixels",
        "max_frame_pixels"}; kwargs: what the row gives.
        """
        tool = find_tool(self.tools, call.name)
        if call.error or tool is None:
            role = "user" if any(known.role == "user" for known in self.tools.values()) else "tool"
            why = call.error or f"there is no tool {call.name!r:.100}, but {', '.join(self.tools)}"
            self.answer((key, ""), ToolReply(error_text(why, role), error=True, role=role))
            return
        needs = context if "context" in inspect.signature(tool.function).parameters else {}
        self.hand_on((key, tool.name), (tool.name, call.arguments, needs, kwargs))

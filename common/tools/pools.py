"""The processes that run the policy's calls: a pool for each rank, or one for all ranks that share
an engine."""

import inspect
import json
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

from torch.distributed import ProcessGroup

from common.data.protocols import Call, Hermes, ToolProtocol
from common.distributed import broadcast_object
from common.tools import Caller, ToolJob, as_reply, find_tool, load_tools
from common.types import Tool, ToolReply, error_text
from common.workers.pool import Pool
from common.workers.process import Worker

CLOSE_S = 2.0  # for environments to close what they hold
# stands in for a tool in jobs that call none: reset and close of an environment, and the answer of
# one that is a function; `print` is never called
NO_TOOL = Tool(name="", function=print, schema={}, role="user", trusted=True)


class ToolPool:
    """A `Pool` of workers whose replies are `ToolReply`s.

    With a `group` there is one for all its ranks, on the first, which broadcasts the replies. The
    ranks submit the same jobs and poll equally often, as turns in lock-step do.
    """

    protocol: type[ToolProtocol] = Hermes  # unless `Turns` gets another

    def __init__(
        self,
        tools: dict[str, Tool],
        group: ProcessGroup | None,
        trouble: str,
        new_worker: Callable[[], Any],
        max_workers: int,
        **options,
    ):
        """The last arguments, the options and the errors are those of `Pool`."""
        self.tools = tools
        self.group = group
        self.pool: Pool | None = None
        if group is None or group.rank() == 0:
            self.pool = Pool(trouble, new_worker, max_workers, **options)
        self.ready: list[tuple[Hashable, ToolReply]] = []  # replies that need no worker
        self.pending = 0  # jobs whose reply `poll` has not returned so far

    def add_reply(self, key: Hashable, reply: ToolReply) -> None:
        """Have `poll` return a reply that needs no worker."""
        self.pending += 1
        self.ready.append((key, reply))

    def submit_job(self, key: Hashable, name: str, job: Any, home: Hashable = None) -> None:
        """As `Pool.submit`. name: of the tool that the job calls, if it calls one."""
        self.pending += 1
        if self.pool:
            self.pool.submit((key, name), job, home)

    def poll(self, timeout_s: float = 0.0) -> list[tuple[Hashable, ToolReply]]:
        """(key, reply) of what has finished, the same on all ranks of the group. Waits up to
        `timeout_s` for the first, but not if nothing is pending."""
        if not self.pending:
            return []
        replies = self.ready
        self.ready = []
        if self.pool:
            patience_s = 0.0 if replies else timeout_s
            for (key, name), reply in self.pool.poll(patience_s):
                # a `Sandbox` replies with a `ToolReply`; a `Worker`, or a failed start, with a dict
                if isinstance(reply, dict):
                    reply = as_reply(reply, self.tools.get(name, NO_TOOL))
                replies.append((key, reply))
        if self.group:
            replies = broadcast_object(replies, self.group)
        self.pending -= len(replies)
        return replies

    def close(self) -> None:
        if self.pool:
            self.pool.close()


class ToolWorkers(ToolPool):
    """At most `workers` processes a rank that run the tools of --tools, and an environment.
    ValueError if a tool or the environment does not load.

    A call has `timeout_s` seconds, counted from when a worker gets it, and `memory_gib` (0: no
    limit). If it exceeds them, or ends its worker, that is an error that the policy reads; a
    failure if the tool is `trusted`, or if no worker can be started.
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
        tools = load_tools(spec, environment)
        methods = {name: tool.schema for name, tool in tools.items() if tool.stateful}
        config = json.dumps({"tools": spec, "environment": environment, "methods": methods})
        close_s = CLOSE_S if methods else 0.0
        new_worker = partial(Worker, Caller, config, timeout_s, memory_gib, close_s)
        num_ranks = group.size() if group else 1
        super().__init__(
            tools, group, "a tool worker did not start", new_worker, workers * num_ranks
        )

    def submit(self, key: Hashable, call: Call, context: Mapping, kwargs: Mapping) -> None:
        """Queue a call. One that is malformed, or names no tool, is answered with an error.

        context: {"media": [{"kind": "image", "frame" or "video", "frames": [encoded, ...]}, ...]
        in the order in which they were shown, "num_prompt_media", "calls": earlier ones, "seed";
        with vision "min_pixels", "max_pixels", "max_frame_pixels", "cell"}; kwargs: from the row.
        """
        tool = find_tool(self.tools, call.name)
        if call.error or tool is None:
            # a role of some tool: the chat template has been seen to show it
            has_user_role = any(other.role == "user" for other in self.tools.values())
            role = "user" if has_user_role else "tool"
            error = call.error
            if not error:
                error = f"there is no tool {call.name!r:.100}, but {', '.join(self.tools)}"
            self.add_reply(key, ToolReply(error_text(error, role), error=True, role=role))
            return
        if "context" not in inspect.signature(tool.function).parameters:
            context = {}
        job = ToolJob(tool.name, call.arguments, context, kwargs)
        self.submit_job(key, tool.name, job)

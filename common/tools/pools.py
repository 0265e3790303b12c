"""The processes that answer a policy: one pool of them for each rank, or for all ranks that share an engine."""

import inspect
import json
from collections.abc import Callable, Hashable, Mapping
from functools import partial

from torch.distributed import ProcessGroup

from common.distributed import broadcast_object
from common.tools import Caller, Tool, as_reply, find_tool, load_tools
from common.tools.environments import State
from common.tools.turns import Call, Protocol, ToolReply, error_text
from common.worker import Worker
from common.workers import Pool

CLOSE_S = 2.0  # for environments to close what they hold
OTHER = Tool("", print, {}, role="user", ours=True)  # what is no tool of the policy's


class ToolPool:
    """A `Pool` whose replies are `ToolReply`s. ValueError if its workers do not start.

    With a `group`, whose ranks share an engine, all of them submit the same calls and poll equally often, which takes
    turns in lock-step: the processes are those of the first rank, which tells the others what they reply.
    """

    protocol: type[Protocol] | None = None  # None: as the chat template has it

    def __init__(
        self,
        tools: dict[str, Tool],
        trouble: str,
        new_worker: Callable[[], Worker],
        most: int,
        group: ProcessGroup | None,
        **options,
    ):
        self.tools, self.group = tools, group
        self.answered: list[tuple[Hashable, ToolReply]] = []  # without a process
        self.pending = 0  # calls whose reply `poll` has not returned so far
        leads = group is None or group.rank() == 0
        self.pool = Pool(trouble, new_worker, most, **options) if leads else None

    def answer(self, key: Hashable, reply: ToolReply) -> None:
        """The next `poll` returns this reply."""
        self.pending += 1
        self.answered.append((key, reply))

    def hand_on(self, key: Hashable, name: str, job: object, home: Hashable = None) -> None:
        """A process is to do it, for the tool of that name."""
        self.pending += 1
        if self.pool:
            self.pool.submit((key, name), job, home)

    def poll(self, timeout_s: float = 0.0) -> list[tuple[Hashable, ToolReply]]:
        """(key, reply) of what has finished; waits that long for the first, but not if nothing is pending."""
        if not self.pending:
            return []
        done, self.answered = self.answered, []
        for (key, name), reply in self.pool.poll(0.0 if done else timeout_s) if self.pool else []:
            sent = isinstance(reply, dict)
            done.append((key, as_reply(reply, self.tools.get(name, OTHER)) if sent else reply))
        if self.group:
            done = broadcast_object(done, self.group)
        self.pending -= len(done)
        return done

    def close(self) -> None:
        if self.pool:
            self.pool.close()


class ToolWorkers(ToolPool):
    """At most `workers` processes a rank that run the tools of --tools, an interaction, an environment. ValueError if
    one of them does not load.

    Each call has `timeout_s` seconds from when a worker gets it, and `memory_gib` (0: no limit). Exceeding them, or
    ending the worker, is an error that the policy reads; of a tool that is `ours` it is a failure, and so is
    a call that no worker could take.
    """

    def __init__(
        self,
        spec: str,
        workers: int,
        timeout_s: float,
        memory_gib: float = 4.0,
        interaction: str | None = None,
        environment: str | None = None,
        group: ProcessGroup | None = None,
    ):
        tools = load_tools(spec, environment)
        methods = {name: tool.schema for name, tool in tools.items() if tool.stateful}
        given = json.dumps({"tools": spec, "interaction": interaction, "environment": environment, "methods": methods})
        new_worker = partial(Worker, Caller, given, timeout_s, memory_gib, CLOSE_S if environment else 0.0)
        most = workers * (group.size() if group else 1)
        super().__init__(tools, "a tool worker did not start", new_worker, most, group)

    def submit(self, key: Hashable, call: Call, context: Mapping | State | list, kwargs: Mapping) -> None:
        """context: {"media": [{"kind": "image" or "video", "frames": [encoded, ...]}, ...] in the order in which they
        were seen, "num_prompt_media", "min_pixels", "max_pixels", "max_frame_pixels"}; kwargs: what the row gives.
        With a State as context it is the environment that is called, with a list of messages the interaction.
        """
        if isinstance(context, list | State):
            home = context.trajectory if isinstance(context, State) else None
            self.hand_on(key, call.name, (call.name, call.arguments, context, kwargs), home)
            return
        tool = find_tool(self.tools, call.name)
        if call.error or tool is None:
            role = "user" if any(known.role == "user" for known in self.tools.values()) else "tool"
            why = call.error or f"there is no tool {call.name!r:.100}, but {', '.join(self.tools)}"
            self.answer(key, ToolReply(error_text(why, role), error=True, role=role))
            return
        needs = context if "context" in inspect.signature(tool.function).parameters else {}
        self.hand_on(key, tool.name, (tool.name, call.arguments, needs, kwargs))

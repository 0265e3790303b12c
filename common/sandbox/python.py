"""The tool `python`: the policy writes programs, and each trajectory has an interpreter of its own
(sandbox.py).

The transcript is the state, and a live interpreter its cache. A call carries the trajectory's
earlier blocks and pictures: if its sandbox holds another trajectory by now, the blocks run again,
silently. What a program does to its interpreter (a hang, a crash, too much memory) is the policy's
error, and the policy reads it; the state is then that of the last block that ended.
"""

import inspect
from collections.abc import Hashable, Mapping
from functools import partial
from math import inf

from torch.distributed import ProcessGroup

from common.data.protocols import CODE_TAUGHT, Call, Code
from common.limits import total_memory
from common.processes import cpus_of_rank, ranks_here
from common.sandbox import forbidden
from common.sandbox.namespaces import ENVIRONMENT
from common.sandbox.sandbox import START_S, Block, Sandbox, failed_block
from common.tools.pools import ToolPool
from common.types import Tool, ToolReply

SHARE_OF_MEMORY = 1 / 8  # for sandboxes whose trajectories wait for their next block
RESTING_BYTES = 67e6  # of such a sandbox: measured
START_CPU_S = 5.0  # to start one, with slack (2 measured): all may start at once
REMEDY = (
    "In Docker bubblewrap needs --security-opt seccomp=unconfined --security-opt "
    "systempaths=unconfined (others: docs/sandbox.md), on Ubuntu sysctl "
    "kernel.apparmor_restrict_unprivileged_userns=0; --tools python_unconfined runs programs "
    "without a sandbox"
)
SCHEMA = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run a program. What it prints comes back, and the figures that plt.show() "
        "shows. Variables stay for the next program. np, plt and PIL's Image are there; "
        "the pictures so far are image_clue_0, image_clue_1 and so on.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program, in Python."}},
            "required": ["code"],
        },
    },
}
# its function is never called: programs run in sandboxes
TOOL = Tool("python", function=exec, schema=SCHEMA, role="user", taught_by=CODE_TAUGHT)


class PythonWorkers(ToolPool):
    """At most `workers` sandboxes a rank that run the policy's programs.

    anew: each call starts from the transcript, so that a run repeats itself. ValueError if no
    sandbox starts, or if a program can do there what none may do.
    """

    protocol = Code

    def __init__(
        self,
        workers: int,
        timeout_s: float,
        memory_gib: float = 4.0,
        confined: bool = True,
        anew: bool = False,
        group: ProcessGroup | None = None,
    ):
        # of trajectories, by their keys: the next rollout has these keys again, but new numbers
        self.numbers: dict[Hashable, int] = {}
        self.last_number = 0
        num_ranks = group.size() if group else 1
        workers *= num_ranks
        cpus = cpus_of_rank() * num_ranks
        at_once = min(workers, 2 * cpus)  # programs compute: more would wait for each other
        memory = total_memory() * num_ranks / ranks_here()
        num_resting = int(SHARE_OF_MEMORY * memory / RESTING_BYTES)
        max_sandboxes = min(workers, max(at_once, num_resting))
        start_s = START_S + START_CPU_S * max_sandboxes / cpus
        new_sandbox = partial(Sandbox, timeout_s, memory_gib, confined, anew, start_s)
        try:
            super().__init__(
                {TOOL.name: TOOL},
                group,
                "the sandbox does not start",
                new_sandbox,
                max_sandboxes,
                share=1,  # trajectories that a sandbox gets before another one is started
                at_once=at_once,
            )
            if confined:
                probe(self)
        except (OSError, ValueError) as error:
            if not confined:
                raise ValueError(f"--tools python_unconfined: {error}") from error
            raise ValueError(f"--tools python: {error}. {REMEDY}") from error

    def submit(self, key: Hashable, call: Call, context: Mapping, kwargs: Mapping) -> None:
        """context: that of `ToolWorkers.submit`, with the trajectory's earlier "calls" and its
        "seed". kwargs: pictures that the prompt does not show, by their names."""
        # Even a malformed first call makes the trajectory's number: the next call, with that one
        # among its "calls", looks the number up.
        if not context["calls"]:
            self.last_number += 1
            self.numbers[key] = self.last_number
        code = call.arguments.get("code")
        if call.error or not isinstance(code, str):
            self.add_reply(key, failed_block(call.error or "expected a text as the argument code"))
            return
        earlier: list[tuple[str, int]] = []  # code, and how many of its figures were shown
        for record in context["calls"]:
            if record["info"].get("ended"):
                earlier.append((record["arguments"]["code"], record["media"]))
        try:
            pictures = prompt_pictures(context)
            for name, picture in kwargs.items():
                pictures.append(hidden_picture(name, picture))
            for picture in pictures:
                # a TypeError for frames that are no bytes
                picture["frames"] = [memoryview(frame) for frame in picture["frames"]]
        except (KeyError, TypeError, ValueError, OverflowError):
            names = ", ".join(kwargs)
            error = f"the row gives the tool python {names}, which is no {{kind, frames}}"
            self.add_reply(key, ToolReply(error, failed=True, role="user"))
            return
        block = Block(self.numbers[key], code, earlier, pictures, context.get("seed", ""))
        self.submit_job(key, TOOL.name, block, home=key)


def prompt_pictures(context: Mapping) -> list[dict]:
    """The pictures and videos of the prompt, under the names that a program knows them by.

    The number of an image_clue counts the videos before it, too, as those of later figures do; that
    of a video_clue counts videos alone.
    """
    pictures = []
    num_videos = 0
    for index, medium in enumerate(context["media"][: context["num_prompt_media"]]):
        name = f"image_clue_{index}"
        if medium["kind"] == "video":
            name = f"video_clue_{num_videos}"
            num_videos += 1
        picture = {"name": name, "kind": medium["kind"], "frames": medium["frames"], "seen": 1}
        pictures.append(picture)
    return pictures


def hidden_picture(name: str, picture: Mapping) -> dict:
    """A picture or video that the row gives and the prompt does not show. Other keys are
    ignored."""
    return {
        "name": name,
        "kind": str(picture["kind"]),
        "frames": picture["frames"],
        "seen": 0,
        "fps": float(picture.get("fps") or 1.0),
    }


def probe(workers: PythonWorkers) -> None:
    """Try what no program may do. ValueError if any of it can be done, or if no program runs."""
    own_names = {*ENVIRONMENT, "PWD"}  # bubblewrap sets PWD
    code = f"{inspect.getsource(forbidden)}\n\nmain({__file__!r}, {own_names!r})\n"
    context = {"media": [], "num_prompt_media": 0, "calls": []}
    workers.submit("probe", Call(TOOL.name, {"code": code}), context, {})
    ((_, reply),) = workers.poll(inf)
    if reply.text != "nothing":
        workers.close()
        if reply.error or reply.failed:
            raise ValueError(reply.text)
        raise ValueError(f"a program in the sandbox can {reply.text}")

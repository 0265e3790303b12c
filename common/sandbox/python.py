"""The tool `python`: the policy writes programs, each trajectory has an interpreter of its own
(sandbox.py).

The transcript is the state, a live interpreter its cache. A call carries the trajectory's earlier
blocks and pictures: where its sandbox holds another trajectory by now, they are run again,
silently. What a program does to its interpreter (a hang, a crash, too much memory) is the policy's
error, told to it; the state is then that of the last block that ended.
"""

import tomllib
from collections import Counter
from collections.abc import Hashable, Mapping
from functools import partial
from math import inf
from pathlib import Path

from torch.distributed import ProcessGroup

from common.data.protocols import CODE_TAUGHT, Call, Code
from common.limits import total_memory
from common.processes import cpus_of_rank, ranks_here
from common.sandbox.namespaces import ENVIRONMENT
from common.sandbox.sandbox import START_S, Block, Sandbox, failed_block
from common.tools.pools import ToolPool
from common.types import Tool, ToolReply

# of what programs must not do
PROBE = tomllib.loads(Path(__file__).with_name("forbidden.toml").read_text())
SHARE_OF_MEMORY = 1 / 8  # for sandboxes whose trajectories wait for their next block
# of one of them: measured; with slack (2 measured), for all may start at once
RESTING_BYTES, START_CPU_S = 67e6, 5.0
ABOUT = (
    "Run a program. What it prints comes back, and the figures that plt.show() shows. "
    "Variables stay for the next program. np, plt and PIL's Image are there; "
    "the pictures so far are image_clue_0, image_clue_1 and so on."
)
PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "The program, in Python."}},
    "required": ["code"],
}
SCHEMA = {
    "type": "function",
    "function": {"name": "python", "description": ABOUT, "parameters": PARAMETERS},
}
TOOL = Tool("python", function=exec, schema=SCHEMA, role="user", taught_by=CODE_TAUGHT)


class PythonWorkers(ToolPool):
    """At most `workers` sandboxes a rank that run the policy's programs; ValueError also if what a
    program may not do can be done there. `anew`: each call starts from the transcript, so that a
    run repeats itself."""

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
        self.tools = {TOOL.name: TOOL}
        self.numbers: dict[Hashable, int] = {}  # of trajectories, by their keys: never used again
        self.last_number = 0
        ranks = group.size() if group else 1
        workers, cpus = workers * ranks, cpus_of_rank() * ranks
        at_once = min(workers, 2 * cpus)  # programs compute: more would wait for each other
        memory = total_memory() * ranks / ranks_here()
        most = min(workers, max(at_once, int(SHARE_OF_MEMORY * memory / RESTING_BYTES)))
        new = partial(
            Sandbox, timeout_s, memory_gib, confined, anew, START_S + START_CPU_S * most / cpus
        )
        try:
            super().__init__(
                group, "the sandbox does not start", new, most, share=1, at_once=at_once
            )
            if confined:
                probe(self)
        except (OSError, ValueError) as error:
            raise ValueError(f"--tools python: {error}. {PROBE['remedy']}") from error

    def submit(self, key: Hashable, call: Call, context: Mapping, kwargs: Mapping) -> None:
        """context: as of `ToolWorkers.submit`, with the trajectory's earlier "calls" and its
        "seed". kwargs: pictures that the prompt does not show, by their names."""
        code = call.arguments.get("code")
        if call.error or not isinstance(code, str):
            self.answer(
                (key, ""), failed_block(call.error or "expected a text as the argument code")
            )
            return
        if not context["calls"]:
            self.last_number += 1
            self.numbers[key] = self.last_number
        earlier = [
            (c["arguments"]["code"], c["media"]) for c in context["calls"] if c["info"].get("ended")
        ]
        try:
            pictures = [
                *prompt_pictures(context),
                *(hidden_picture(name, kwargs[name]) for name in kwargs),
            ]
            pictures = [p | {"frames": list(map(memoryview, p["frames"]))} for p in pictures]
        except (KeyError, TypeError, ValueError, OverflowError):
            # TypeError also for frames that are no bytes
            told = (
                f"the row gives the tool python {', '.join(kwargs)}, which is no {{kind, frames}}"
            )
            self.answer((key, ""), ToolReply(told, failed=True, role="user"))
            return
        block = Block(self.numbers[key], code, earlier, pictures, context.get("seed", ""))
        self.hand_on((key, TOOL.name), block, home=key)


def prompt_pictures(context: Mapping) -> list[dict]:
    """The pictures and videos of the prompt, under the names that a program knows them by."""
    names, pictures = Counter(), []
    for number, medium in enumerate(context["media"][: context["num_prompt_media"]]):
        kind = medium["kind"]
        name = f"video_clue_{names[kind]}" if kind == "video" else f"image_clue_{number}"
        names[kind] += 1
        pictures.append({"name": name, "kind": kind, "frames": medium["frames"], "seen": 1})
    return pictures


def hidden_picture(name: str, given: Mapping) -> dict:
    """A picture or video that the row gives and the prompt does not show; what else stands in the
    row is no matter."""
    picture = {"name": name, "kind": str(given["kind"]), "frames": given["frames"], "seen": 0}
    return picture | {"fps": float(given.get("fps") or 1.0)}


def probe(workers: PythonWorkers) -> None:
    """Try what no program may do. ValueError if anything of it can be done, or nothing at all."""
    code = PROBE["program"].format(
        file=__file__, environment={*ENVIRONMENT, "PWD"}, forbidden=PROBE["forbidden"]
    )
    workers.submit(
        "probe",
        Call(TOOL.name, {"code": code}),
        {"media": [], "num_prompt_media": 0, "calls": []},
        {},
    )
    ((_, reply),) = workers.poll(inf)
    if reply.text != "nothing":
        workers.close()
        ran = not (reply.error or reply.failed)
        raise ValueError(f"a program in the sandbox can {reply.text}" if ran else reply.text)

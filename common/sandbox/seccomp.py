"""Filters of system calls, as programs of the kernel's classic BPF (seccomp(2)), for x86-64.

The first is for all that runs in a sandbox, the second, which allows no new process, for the
policy's programs.
"""

import struct
import tomllib
from pathlib import Path

EPERM, ENOSYS = 1, 38
LOAD, EQUAL, ABOVE, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of classic BPF
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
# where seccomp's data have a call's number, its machine, its first argument
NUMBER, MACHINE, ARGUMENT = 0, 4, 16
X86_64, X32 = 0xC000003E, 0x40000000

TABLES = tomllib.loads(Path(__file__).with_name("syscalls.toml").read_text())  # name -> number
REFUSED, MISSING, PRETENDED, PROGRAM_REFUSED = map(
    TABLES.get, ("refused", "missing", "pretended", "program_refused")
)
NEWER = 463  # this call and those after it, which no list here judges
CLONE, IOCTL, FCNTL, PRCTL, PRLIMIT = 56, 16, 72, 157, 302
NEW_NAMESPACES = 0x7E020000  # CLONE_NEWCGROUP ... CLONE_NEWNET, CLONE_NEWNS
NEW_THREAD = 0x00010000  # CLONE_THREAD
TERMINAL = {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C}  # they would type for whoever sits there
# Commands of fcntl on files, which others may have open, too.
LOCKS = {
    "F_SETLK": 6,
    "F_SETLKW": 7,
    "F_OFD_SETLK": 37,
    "F_OFD_SETLKW": 38,
    "F_SETLEASE": 1024,
    "F_NOTIFY": 1026,
}
PR_SET_DUMPABLE = 4  # without it no core is dumped, which a program of the machine's might take


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """if_true, if_false: how many instructions to leave out."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def returns(number: int, result: int) -> bytes:
    """A call with this number has this result."""
    return instruction(EQUAL, number, 0, 1) + instruction(RETURN, result)


def returns_if(number: int, argument: int, test: bytes, result: int) -> bytes:
    """The same if the test of an argument does not leave the next instruction out. Only its lower
    half is looked at: the kernel, too, takes these as 32 bits."""
    body = instruction(LOAD, ARGUMENT + 8 * argument) + test + instruction(RETURN, result)
    body += instruction(LOAD, NUMBER)
    return instruction(EQUAL, number, 0, len(body) // 8) + body


def filter_of(rules: list[bytes]) -> bytes:
    """A whole filter: another machine's calls (int 0x80, x32) kill, what no rule names is
    allowed."""
    head = instruction(LOAD, MACHINE) + instruction(EQUAL, X86_64, 1, 0) + instruction(RETURN, KILL)
    head += instruction(LOAD, NUMBER) + instruction(ABOVE, X32, 0, 1) + instruction(RETURN, KILL)
    return head + b"".join(rules) + instruction(RETURN, ALLOW)


def first_filter() -> bytes:
    rules = [returns(number, ERROR | EPERM) for number in REFUSED.values()]
    rules += [returns(number, ERROR | ENOSYS) for number in MISSING.values()]
    rules += [
        returns_if(IOCTL, 1, instruction(EQUAL, request, 0, 1), ERROR | EPERM)
        for request in TERMINAL.values()
    ]
    rules += [returns_if(CLONE, 0, instruction(ANY_BIT, NEW_NAMESPACES, 0, 1), ERROR | EPERM)]
    rules += [instruction(ABOVE, NEWER, 0, 1) + instruction(RETURN, ERROR | ENOSYS)]
    return filter_of(rules)


def program_filter() -> bytes:
    rules = [returns(number, ERROR | EPERM) for number in PROGRAM_REFUSED.values()]
    rules += [returns(number, ERROR) for number in PRETENDED.values()]
    rules += [returns_if(CLONE, 0, instruction(ANY_BIT, NEW_THREAD, 1, 0), ERROR | EPERM)]
    # of another process
    rules += [returns_if(PRLIMIT, 0, instruction(EQUAL, 0, 1, 0), ERROR | EPERM)]
    rules += [returns_if(PRCTL, 0, instruction(EQUAL, PR_SET_DUMPABLE, 0, 1), ERROR | EPERM)]
    rules += [
        returns_if(FCNTL, 1, instruction(EQUAL, command, 0, 1), ERROR | EPERM)
        for command in LOCKS.values()
    ]
    return filter_of(rules)

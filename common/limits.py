"""What a process may use of its machine: memory and CPUs, by the machine itself and by its control
groups (cgroups).

A container, a job of Slurm or a service of systemd is a control group, whose limits hold for all
that runs in it. /proc/meminfo and os.cpu_count() do not know of them. Without torch.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from math import inf
from pathlib import Path

import psutil

ROOT = Path("/")
# how errors say which memory has run out: torch's allocators, the driver's and cuBLAS's, C++'s,
# oneDNN's
GPU_WORDS = ("out of memory", "alloc_failed")
CPU_WORDS = ("defaultcpuallocator", "bad_alloc", "could not create a memory object")
# oneDNN had no memory to compile it in, and will not try again
NO_KERNEL = "could not create a primitive"


def free_memory(root: Path = ROOT) -> int:
    """Bytes that may still be taken: the least of what the machine and its control groups have
    left.

    Pages of files that have not been used lately count as free: the kernel drops them when memory
    is asked for.
    """
    free = psutil.virtual_memory().available
    for folder in control_groups("memory", root):
        limit = memory_limit(folder)
        if limit < inf:
            free = min(free, limit - memory_in_use(folder))
    return int(max(0, free))


def total_memory(root: Path = ROOT) -> int:
    """Bytes of memory of the machine, or of the smallest control group."""
    limits = [memory_limit(folder) for folder in control_groups("memory", root)]
    return int(min([psutil.virtual_memory().total, *limits]))


def usable_cpus(root: Path = ROOT) -> int:
    """CPUs that this process may keep busy: of those that it may run on, the share that its control
    groups grant.

    A share such as 2.5 is 2: threads that wait for each other would all stand still when it is used
    up.
    """
    cpus = len(os.sched_getaffinity(0))
    for folder in control_groups("cpu", root):
        cpus = min(cpus, cpu_quota(folder))
    return max(1, int(cpus))


def killed_processes(root: Path = ROOT) -> int:
    """How many processes of this machine, in any of its groups, the kernel has killed for lack of
    memory."""
    return int(statistic(root / "proc/vmstat", "oom_kill", 0))


def exhausted_memory(error: BaseException) -> str:
    """Which has run out, by what an error says: "GPU memory", "memory" of the machine, or none,
    ""."""
    text = str(error).lower()
    if (
        isinstance(error, MemoryError)
        or text.endswith(NO_KERNEL)
        or any(words in text for words in CPU_WORDS)
    ):
        return "memory"
    # torch's own, which is not imported here
    if type(error).__name__ == "OutOfMemoryError" or any(words in text for words in GPU_WORDS):
        return "GPU memory"
    return ""


def memory_limit(folder: Path) -> float:
    """Bytes, inf without one. Version 1 also knows the least limit of groups that a container does
    not see."""
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    limits = [number(folder / name) for name in names]
    limits.append(statistic(folder / "memory.stat", "hierarchical_memory_limit", inf))
    return min(limits)


def memory_in_use(folder: Path) -> float:
    """Bytes of a control group and those below it, without pages of files that have not been used
    lately."""
    in_use = min(number(folder / name) for name in ("memory.current", "memory.usage_in_bytes"))
    if in_use == inf:
        return 0
    # version 1 has a group's own pages under this name, and under the other those of the groups
    # below it, too
    inactive = statistic(folder / "memory.stat", "inactive_file", 0)
    inactive = statistic(folder / "memory.stat", "total_inactive_file", inactive)
    return max(0, in_use - inactive)


def cpu_quota(folder: Path) -> float:
    """CPUs that a control group may keep busy, inf without a limit."""
    quota, period = number(folder / "cpu.cfs_quota_us"), number(folder / "cpu.cfs_period_us")
    fields = read(folder / "cpu.max").split()
    if len(fields) == 2 and fields[0].isdecimal() and fields[1].isdecimal():
        quota, period = int(fields[0]), int(fields[1])
    if not 0 < quota < inf or not 0 < period < inf:  # version 1 writes -1 for none
        return inf
    return quota / period


def status_bytes(name: str) -> int:
    """A line of this process's /proc/self/status; 0 where there is none."""
    found = re.search(rf"^{name}:\s*(\d+) kB$", read(Path("/proc/self/status")), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def control_groups(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Folders of the control group of this process and of those above it, as far as they are
    mounted here."""
    for kind, group in memberships(controller, root):
        folders = mounted(kind, controller, root)
        inside = [(mount, place) for mount, place in folders if is_below(group, mount)]
        # in a container /proc may name a group by a path that is not seen from there: its own is
        # what is mounted
        for mount, place in inside or folders:
            folder = place
            if is_below(group, mount):
                folder = place / os.path.relpath(group, mount)
            while folder != place:
                yield folder
                folder = folder.parent
            yield place


def memberships(controller: str, root: Path) -> Iterator[tuple[str, str]]:
    """(type of file system, path) of this process's groups, of /proc/self/cgroup:
    ID:CONTROLLERS:PATH.

    Version 2 has one hierarchy without a list of controllers; version 1 one for each list.
    """
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield "cgroup2", group
        elif controller in controllers.split(","):
            yield "cgroup", group


def mounted(kind: str, controller: str, root: Path) -> list[tuple[str, Path]]:
    """(path in its hierarchy, folder) of each mount of control groups, by /proc/self/mountinfo."""
    found = []
    for line in read(root / "proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        file_system, _, options = rest.split(" ", 2)
        if file_system == kind and (kind == "cgroup2" or controller in options.split(",")):
            mount, place = (unescape(field) for field in fields.split(" ")[3:5])
            found.append((mount, root / place.lstrip("/")))
    return found


def unescape(field: str) -> str:
    """A path as mountinfo writes it, with octal numbers for spaces and backslashes."""
    return re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), field)


def is_below(group: str, mount: str) -> bool:
    return ".." not in group.split("/") and os.path.commonpath([group, mount]) == mount


def statistic(path: Path, name: str, default: float) -> float:
    """The number in the line NAME NUMBER of a file."""
    found = re.search(rf"^{name} (\d+)$", read(path), re.MULTILINE)
    return int(found[1]) if found else default


def number(path: Path) -> float:
    """The number in a file; inf for `max`, for less than nothing, and where there is none."""
    text = read(path).strip()
    return int(text) if text.isdecimal() else inf


def read(path: Path) -> str:
    """The text of a file; "" where it cannot be read."""
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""

"""Memory and CPUs that a process may use: those of the machine, within the limits of its control
groups (cgroups, version 1 or 2).

A container, a job of Slurm or a service of systemd is a control group, whose limits hold for all
that runs in it. /proc/meminfo and os.cpu_count() do not show them. Without torch.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from math import inf
from pathlib import Path

ROOT = Path("/")
# how errors say which memory has run out: torch's allocators, the driver's and cuBLAS's, C++'s,
# oneDNN's
GPU_WORDS = ("out of memory", "alloc_failed")
CPU_WORDS = ("defaultcpuallocator", "bad_alloc", "could not create a memory object")
# oneDNN had no memory to compile a kernel in, and does not try again: the end of its message, which
# for other reasons goes on ("... a primitive descriptor for")
NO_KERNEL = "could not create a primitive"


def free_memory(root: Path = ROOT) -> int:
    """Bytes that may still be taken: the least that the machine or a control group has left.

    Pages of files that have not been used lately count as free: the kernel drops them when it needs
    memory.
    """
    import psutil  # here: workers, which call no such function, do not wait for it

    free = psutil.virtual_memory().available
    for folder in control_groups("memory", root):
        limit = memory_limit(folder)
        if limit < inf:
            free = min(free, limit - memory_in_use(folder))
    return int(max(0, free))


def total_memory(root: Path = ROOT) -> int:
    """Bytes of memory of the machine, or of the smallest control group."""
    import psutil  # here: workers, which call no such function, do not wait for it

    limits = [memory_limit(folder) for folder in control_groups("memory", root)]
    return int(min([psutil.virtual_memory().total, *limits]))


def usable_cpus(root: Path = ROOT) -> int:
    """CPUs that this process may keep busy: those that it may run on, at most the quota of its
    control groups.

    A quota such as 2.5 is 2: threads that wait for each other would all stop when it is used up.
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
    """Which memory has run out, by the text of an error: "GPU memory", "memory" (of the machine);
    "" if none has."""
    text = str(error).lower()
    if isinstance(error, MemoryError) or text.endswith(NO_KERNEL):
        return "memory"
    if any(words in text for words in CPU_WORDS):
        return "memory"
    # torch's class, by name: torch is not imported here
    if type(error).__name__ == "OutOfMemoryError" or any(words in text for words in GPU_WORDS):
        return "GPU memory"
    return ""


def memory_limit(folder: Path) -> float:
    """Bytes; without a limit inf, or version 1's 2**63 - 4096. Version 1 also has the least limit
    of the groups above, which a container does not see."""
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    limits = [number(folder / name) for name in names]
    limits.append(statistic(folder / "memory.stat", "hierarchical_memory_limit", inf))
    return min(limits)


def memory_in_use(folder: Path) -> float:
    """Bytes of a control group and those below it, without pages of files that have not been used
    lately."""
    in_use = min(number(folder / "memory.current"), number(folder / "memory.usage_in_bytes"))
    if in_use == inf:
        return 0
    # in version 1 this is the group alone; the total has the groups below it, too
    inactive = statistic(folder / "memory.stat", "inactive_file", 0)
    inactive = statistic(folder / "memory.stat", "total_inactive_file", default=inactive)
    return max(0, in_use - inactive)


def cpu_quota(folder: Path) -> float:
    """CPUs that a control group may keep busy, inf without a limit."""
    quota = number(folder / "cpu.cfs_quota_us")  # version 1's; -1: no limit
    period = number(folder / "cpu.cfs_period_us")
    fields = read(folder / "cpu.max").split()
    if len(fields) == 2 and fields[0].isdecimal() and fields[1].isdecimal():
        quota = int(fields[0])
        period = int(fields[1])
    has_limit = 0 < quota < inf and 0 < period < inf
    return quota / period if has_limit else inf


def status_bytes(name: str) -> int:
    """The number in a line of this process's /proc/self/status, in bytes; 0 if there is none."""
    status = read(Path("/proc/self/status"))
    match = re.search(rf"^{name}:\s*(\d+) kB$", status, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def control_groups(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Folders of the control group of this process and of those above it, as far as they are
    mounted here."""
    for kind, group in memberships(controller, root):
        mounts = mounts_of(kind, controller, root)
        has_mount = False
        for mount_root, mount_point in mounts:
            if is_below(group, mount_root):
                has_mount = True
                folder = mount_point / os.path.relpath(group, mount_root)
                while folder != mount_point:
                    yield folder
                    folder = folder.parent
                yield mount_point
        if not has_mount:
            # in a container /proc may name a group by a path that does not exist there: what is
            # mounted is its own group
            for _, mount_point in mounts:
                yield mount_point


def memberships(controller: str, root: Path) -> Iterator[tuple[str, str]]:
    """(type of file system, path) of this process's groups, from the lines ID:CONTROLLERS:PATH of
    /proc/self/cgroup.

    Version 2 has one hierarchy without a list of controllers; version 1 one for each list.
    """
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield "cgroup2", group
        elif controller in controllers.split(","):
            yield "cgroup", group


def mounts_of(kind: str, controller: str, root: Path) -> list[tuple[str, Path]]:
    """(root of the mount, mount point) of each mount of control groups, from /proc/self/mountinfo:
    the path of a group, and the folder in which that group and those below it are seen."""
    mounts: list[tuple[str, Path]] = []
    for line in read(root / "proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        file_system, _, options = rest.split(" ", 2)
        if file_system == kind and (kind == "cgroup2" or controller in options.split(",")):
            mount_root, mount_point = [unescape(field) for field in fields.split(" ")[3:5]]
            mounts.append((mount_root, root / mount_point.lstrip("/")))
    return mounts


def unescape(field: str) -> str:
    """A path as mountinfo writes it, with octal numbers for spaces and backslashes."""
    return re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), field)


def is_below(group: str, mount_root: str) -> bool:
    """Whether a group is below the root of a mount, or is that root."""
    return ".." not in group.split("/") and os.path.commonpath([group, mount_root]) == mount_root


def statistic(path: Path, name: str, default: float) -> float:
    """The number in the line NAME NUMBER of a file."""
    match = re.search(rf"^{name} (\d+)$", read(path), re.MULTILINE)
    return int(match[1]) if match else default


def number(path: Path) -> float:
    """The number in a file; inf for `max`, for a negative number, and where there is no file."""
    text = read(path).strip()
    return int(text) if text.isdecimal() else inf


def read(path: Path) -> str:
    """The text of a file; "" where it cannot be read."""
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""

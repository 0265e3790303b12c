"""Memory and CPUs that a process may use, read from folders that look like control groups, and what
follows from them."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from common.distributed import limit_threads
from common.limits import free_memory, killed_processes, total_memory, usable_cpus
from common.processes import cpus_of_rank

GB = 10**9
NONE_V1 = 9223372036854771712  # what version 1 writes for no limit
V2 = "31 24 0:27 {mount} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 {mount} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}"


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """16 GB of 64 are free, and 128 CPUs are there."""
    memory = SimpleNamespace(available=16 * GB, total=64 * GB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(128)))


def tree(root: Path, cgroup: str, mounts: str, files: dict[str, object]) -> Path:
    """A root folder with /proc/self/cgroup, /proc/self/mountinfo, and files of /sys/fs/cgroup."""
    texts = {
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": f"22 1 0:21 / / rw - ext4 /dev/vda rw\n{mounts}\n",
    }
    for name, content in files.items():
        texts[f"sys/fs/cgroup/{name}"] = f"{content}\n"
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def version_2(root: Path, group: str, files: dict[str, object], mount: str = "/") -> Path:
    return tree(root, f"0::{group}\n", V2.format(mount=mount), files)


def version_1(root: Path, group: str, files: dict[str, object], mount: str = "/") -> Path:
    mounts = [V1.format(mount=mount, name=name) for name in ("memory", "cpu,cpuacct")]
    return tree(root, f"5:cpu,cpuacct:{group}\n4:memory:{group}\n0::/\n", "\n".join(mounts), files)


def numbers(root: Path) -> tuple[float, float, int]:
    return free_memory(root) / GB, total_memory(root) / GB, usable_cpus(root)


def test_without_limits_the_machine_decides(tmp_path):
    assert numbers(tmp_path / "nothing mounted") == (16, 64, 128)
    files = {"a/memory.max": "max", "a/memory.current": 3 * GB, "a/cpu.max": "max 100000"}
    assert numbers(version_2(tmp_path / "2", "/a", files)) == (16, 64, 128)
    stat = f"cache 1\nhierarchical_memory_limit {NONE_V1}\ntotal_inactive_file 7"
    files = {
        "memory/a/memory.limit_in_bytes": NONE_V1,
        "memory/a/memory.usage_in_bytes": 3 * GB,
        "memory/a/memory.stat": stat,
        "cpu,cpuacct/a/cpu.cfs_quota_us": -1,
        "cpu,cpuacct/a/cpu.cfs_period_us": 100_000,
    }
    assert numbers(version_1(tmp_path / "1", "/a", files)) == (16, 64, 128)


def test_a_container_of_version_2(tmp_path):
    """Its path is `/` in a namespace of its own; a process that joined from outside has a path that
    leads out of it."""
    files = {
        "memory.max": 5 * GB,
        "memory.current": 4 * GB,
        "memory.stat": f"anon 1\ninactive_anon 5\ninactive_file {GB}\nactive_file 5",
        "cpu.max": "800000 100000",
    }
    for number, group in enumerate(["/", "/../..", "/docker/abc"]):
        assert numbers(version_2(tmp_path / f"{number}", group, files)) == (2, 5, 8)
    outside = version_2(tmp_path / "outside", "/", files, mount="/../..")
    assert numbers(outside) == (2, 5, 8)


def test_a_container_of_version_1(tmp_path):
    """Without a namespace it is mounted at its own path, which /proc/self/cgroup names, too."""
    files = {
        "memory/memory.limit_in_bytes": 5 * GB,
        "memory/memory.usage_in_bytes": 4 * GB,
        "memory/memory.stat": f"inactive_file 3\ntotal_inactive_file {GB}",
        "cpu,cpuacct/cpu.cfs_quota_us": 800_000,
        "cpu,cpuacct/cpu.cfs_period_us": 100_000,
    }
    places = [("/docker/a b", r"/docker/a\040b"), ("/", "/"), ("/x/y", "/docker/a")]
    for number, (group, mount) in enumerate(places):
        assert numbers(version_1(tmp_path / f"{number}", group, files, mount)) == (2, 5, 8)


def test_the_least_of_all_groups_above(tmp_path):
    """The innermost group has most memory left, and one above it least: others use it up."""
    files = {
        "memory.max": "max",
        "job/memory.max": 9 * GB,
        "job/memory.current": 8 * GB,
        "job/cpu.max": "650000 100000",
        "job/step/memory.max": 8 * GB,
        "job/step/memory.current": GB,
        "job/step/cpu.max": "max 100000",
    }
    assert numbers(version_2(tmp_path / "2", "/job/step/task", files)) == (1, 8, 6)
    files = {
        "memory/job/memory.limit_in_bytes": 9 * GB,
        "memory/job/memory.usage_in_bytes": 8 * GB,
        "memory/job/step/memory.limit_in_bytes": 8 * GB,
        "memory/job/step/memory.usage_in_bytes": GB,
        "cpu,cpuacct/job/cpu.cfs_quota_us": 650_000,
        "cpu,cpuacct/job/cpu.cfs_period_us": 100_000,
    }
    assert numbers(version_1(tmp_path / "1", "/job/step", files)) == (1, 8, 6)


def test_a_limit_that_slows_down_and_a_limit_of_a_group_out_of_sight(tmp_path):
    files = {"memory.max": 9 * GB, "memory.high": 3 * GB, "memory.current": GB}
    assert numbers(version_2(tmp_path / "2", "/", files)) == (2, 3, 128)
    files = {"memory/memory.limit_in_bytes": NONE_V1, "memory/memory.usage_in_bytes": GB}
    files["memory/memory.stat"] = f"hierarchical_memory_limit {3 * GB}"
    assert numbers(version_1(tmp_path / "1", "/", files)) == (2, 3, 128)


def test_memory_that_is_used_up_and_a_share_of_less_than_one_cpu(tmp_path):
    files = {"memory.max": GB, "memory.current": 2 * GB, "cpu.max": "50000 100000"}
    assert numbers(version_2(tmp_path, "/", files)) == (0, 1, 1)


@pytest.mark.parametrize(
    "files", [{"memory.max": "", "memory.stat": "\xff", "cpu.max": "max"}, {"cpu.max": "5 0"}]
)
def test_files_that_say_nothing_are_no_limits(tmp_path, files):
    assert numbers(version_2(tmp_path, "/", files)) == (16, 64, 128)


# --- what follows from them -----------------------------------------------------------------------


def test_ranks_share_the_cpus_of_the_container(monkeypatch):
    monkeypatch.setattr("common.processes.usable_cpus", lambda: 8)
    assert cpus_of_rank() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert cpus_of_rank() == 2


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("cpus, from_user, threads", [(2, None, 2), (8, None, 3), (2, "5", 3)])
def test_torch_has_no_more_threads_than_cpus(monkeypatch, three_threads, cpus, from_user, threads):
    """Nor have processes that are started later; unless the user has set the number."""
    monkeypatch.setattr("common.processes.usable_cpus", lambda: cpus)
    monkeypatch.setenv("OMP_NUM_THREADS", from_user or "")
    if from_user is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    limit_threads()
    assert torch.get_num_threads() == threads
    expected = from_user
    if from_user is None and cpus == 2:
        expected = "2"
    assert os.environ.get("OMP_NUM_THREADS") == expected


def test_processes_that_the_kernel_has_killed_are_counted(tmp_path):
    assert killed_processes(tmp_path) == 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "vmstat").write_text("nr_free_pages 9\noom_kill 3\noom_kill_x 4\n")
    assert killed_processes(tmp_path) == 3

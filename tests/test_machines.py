"""Several machines: two network namespaces joined by a cable (veth), a real torchrun in each."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from helpers import LITTLE_CACHE, ROOT, metrics_of, run_script, script_environment, steps_of, wait_until

FAULTS = ROOT / "tests" / "workers" / "faults.py"
FEW = ["--prompts-per-step", 4, "--samples-per-prompt", 4, "--max-response-tokens", 32, "--max-rows", 64]
FEW += ["--eval-every", 0, "--no-eval-before", "--eval-rows", 4]
ADDRESS = "10.77.0.{}"


def ip(*words: object) -> None:
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


class Cluster:
    """Two machines, as far as a network can tell: each has a name, a loopback and an eth0 of its own."""

    def __init__(self, folder: Path):
        self.folder, self.running = folder, []
        self.spaces = [f"test{os.getpid()}-{number}" for number in range(2)]

    def build(self) -> None:
        for space in self.spaces:
            ip("netns", "add", space)
        ends = [word for space in self.spaces for word in ("name", "eth0", "netns", space)]
        ip("link", "add", *ends[:4], "type", "veth", "peer", *ends[4:])
        for number, space in enumerate(self.spaces):
            ip("-n", space, "addr", "add", f"{ADDRESS.format(number + 1)}/24", "dev", "eth0")
            ip("-n", space, "addr", "add", f"fd77::{number + 1}/64", "dev", "eth0", "nodad")
            for name in ("lo", "eth0"):
                ip("-n", space, "link", "set", name, "up")

    def start(
        self, number: int, *arguments: object, before: str = "true", launcher=(), **extra: str
    ) -> subprocess.Popen:
        """torchrun with one rank on a machine, after a shell command there; its output goes to a file."""
        options = ["--nnodes", 2, "--nproc_per_node", 1, "--node-rank", number, *launcher]
        if "--master-addr" not in options:
            options += ["--master-addr", ADDRESS.format(1)]
        command = [sys.executable, "-m", "torch.distributed.run", *options, "--master-port", 29500, *arguments]
        shell = f'hostname node{number} && {before} && exec "$@"'
        inside = ["ip", "netns", "exec", self.spaces[number], "unshare", "--uts", "--mount", "sh", "-c", shell, "sh"]
        with self.log(number).open("a") as log:
            environment = script_environment(**extra)
            process = subprocess.Popen(
                [*inside, *map(str, command)],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.running.append(process)
        return process

    def log(self, number: int) -> Path:
        return self.folder / f"node{number}.log"

    def said(self, number: int) -> str:
        return self.log(number).read_text()

    def members(self, number: int) -> list[psutil.Process]:
        """All processes on a machine."""
        done = subprocess.run(["ip", "netns", "pids", self.spaces[number]], capture_output=True, text=True)
        return [psutil.Process(int(pid)) for pid in done.stdout.split() if psutil.pid_exists(int(pid))]

    def kill(self, number: int) -> None:
        """As if the power went, but that its kernel still closes connections."""
        members = self.members(number)
        for member in members:
            member.kill()
        psutil.wait_procs(members, timeout=10)

    def unplug(self) -> None:
        ip("-n", self.spaces[0], "link", "set", "eth0", "down")

    def remove(self) -> None:
        for number, space in enumerate(self.spaces):
            self.kill(number)
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
        for process in self.running:
            process.wait()


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        try:
            made.build()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
        yield made
    finally:
        made.remove()


def both(cluster: Cluster, *arguments: object, **options) -> list[int]:
    """The exit codes of a script that is started on both machines."""
    return ended(*(cluster.start(number, *arguments, **options) for number in range(2)))


def ended(*processes: subprocess.Popen, seconds: float = 400) -> list[int]:
    end = time.monotonic() + seconds
    return [process.wait(timeout=max(0.0, end - time.monotonic())) for process in processes]


def forever(cluster: Cluster, *options: object) -> list[subprocess.Popen]:
    """A run that has many steps before it, on both machines."""
    options = [*FEW, "--engine", "hf", "--total-steps", 10_000, "--output-dir", cluster.folder / "run", *options]
    return [cluster.start(number, "grpo.py", *options) for number in range(2)]


def has_done(run_dir: Path, step: int) -> bool:
    return (run_dir / "metrics.jsonl").is_file() and step in steps_of(run_dir)


# --- equal to two ranks -------------------------------------------------------------------------------------------

REWARD = """
import os, time

def letters(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(float(os.environ.get("SLEEP", 0)))
    return sum(map(ord, solution_str)) % 7
"""
WITH_VLLM = [*FEW, *LITTLE_CACHE, "--total-steps", 4, "--save-every", 1, "--learning-rate", 1e-4]


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> tuple[list, Path]:
    """Options of a run, and what two ranks of one machine make of it."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "reward.py").write_text(REWARD)
    options = [*WITH_VLLM, "--reward-function", f"{folder}/reward.py:letters"]
    run_script("grpo.py", *options, "--output-dir", folder / "run", ranks=2)
    return options, folder / "run"


def assert_same_run(a: Path, b: Path) -> None:
    assert list(steps_of(a)) == [1, 2, 3, 4] and steps_of(a) == steps_of(b)
    assert all(step["optim/grad_norm"] > 0 for step in steps_of(a).values())
    first, second = ((run / "model" / "model.safetensors").read_bytes() for run in (a, b))
    assert first == second


@pytest.mark.slow
def test_two_machines_are_two_ranks(cluster, local, tmp_path):
    options, reference = local
    assert both(cluster, "grpo.py", *options, "--output-dir", tmp_path / "run") == [0, 0], cluster.said(0)
    assert "2 machines: node0 by eth0, node1 by eth0\n" in cluster.said(0)
    assert_same_run(tmp_path / "run", reference)


@pytest.mark.slow
def test_a_slow_machine_changes_nothing_but_time(cluster, local, tmp_path):
    """Three seconds for its 8 responses of a step."""
    options, reference = local
    options = [*options, "--output-dir", tmp_path / "run"]
    processes = [cluster.start(number, "grpo.py", *options, SLEEP=str(number * 3)) for number in range(2)]
    assert ended(*processes) == [0, 0], cluster.said(0) + cluster.said(1)
    assert_same_run(tmp_path / "run", reference)
    seconds = [record["time/step_s"] for record in metrics_of(tmp_path / "run") if "time/step_s" in record]
    assert min(seconds) > 3


@pytest.mark.slow
def test_a_killed_rank_is_started_again_on_all_machines(cluster, local, tmp_path):
    options, reference = local
    options = [*options, "--output-dir", tmp_path / "run"]
    processes = [cluster.start(n, "grpo.py", *options, launcher=["--max-restarts", 1]) for n in range(2)]
    wait_until(lambda: has_done(tmp_path / "run", 2), 300)
    ranks = [member for member in cluster.members(1) if "TORCHELASTIC_RUN_ID" in member.environ()]
    min(ranks, key=lambda member: member.create_time()).kill()  # the others are its children
    assert ended(*processes) == [0, 0], cluster.said(0) + cluster.said(1)
    assert [record["step"] >= 1 for record in metrics_of(tmp_path / "run") if record.get("event") == "resumed"] == [
        True
    ]
    assert_same_run(tmp_path / "run", reference)


# --- refused ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_other_code_flags_and_models_are_refused_by_name(cluster, tmp_path):
    places = {"code": ROOT / "common" / "means.py", "model": ROOT / "common" / "assets" / "tiny" / "model.safetensors"}
    for name, place in places.items():
        (tmp_path / name).write_bytes(place.read_bytes() + b"\n")
    before = " && ".join(f"mount --bind {tmp_path / name} {place}" for name, place in places.items())
    options = [*FEW, "--engine", "hf", "--output-dir", tmp_path / "run"]
    processes = [
        cluster.start(0, "grpo.py", *options, "--seed", 3),
        cluster.start(1, "grpo.py", *options, "--seed", 4, before=before),
    ]
    assert ended(*processes) == [1, 1]
    line = "node0 by eth0 and node1 by eth0 need the same code, flags, files and versions, and differ in "
    # the first machine that ends says it, its torchrun repeats it
    told = {text.partition(line)[2] for text in (cluster.said(0) + cluster.said(1)).splitlines() if line in text}
    (differing,) = told
    named = [item.partition(":")[0] for item in differing.split("; ")]
    assert named == ["seed", "common/means.py", "model model.safetensors"]
    assert differing.startswith("seed: 3, 4; common/means.py: "), differing
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_folder_that_is_not_shared_is_refused(cluster, tmp_path):
    (tmp_path / "runs").mkdir()
    options = [*FEW, "--engine", "hf", "--output-dir", tmp_path / "runs" / "a"]
    befores = ["true", f"mount -t tmpfs none {tmp_path / 'runs'}"]
    processes = [cluster.start(number, "grpo.py", *options, before=before) for number, before in enumerate(befores)]
    assert ended(*processes) == [1, 1]
    told = f"--output-dir {tmp_path}/runs/a: node1 does not see what rank 0 writes there"
    assert told in cluster.said(0) + cluster.said(1)


# --- failing ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_machine_that_dies_in_training_ends_the_other(cluster, tmp_path, number):
    processes = forever(cluster)
    wait_until(lambda: has_done(tmp_path / "run", 2), 300)
    cluster.kill(number)
    assert ended(processes[1 - number], seconds=20) == [1], cluster.said(1 - number)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_machine_that_dies_while_it_loads_ends_the_other(cluster, tmp_path, number):
    processes = forever(cluster)
    wait_until(lambda: "2 machines: " in cluster.said(0), 120)
    cluster.kill(number)
    assert ended(processes[1 - number], seconds=20) == [1], cluster.said(1 - number)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_cable_that_is_pulled_ends_both_at_the_limit_of_a_stall(cluster, tmp_path):
    processes = forever(cluster, "--stall-minutes", 0.5)
    wait_until(lambda: has_done(tmp_path / "run", 2), 300)
    cluster.unplug()
    assert ended(*processes, seconds=5 * (30 + 10)) == [1, 1]
    for number in range(2):
        assert f"[rank {number}] no progress for 0.5 minutes (--stall-minutes)" in cluster.said(number)


@pytest.mark.slow
def test_ranks_of_a_machine_that_do_not_come_are_named(cluster, tmp_path):
    (tmp_path / "busy.py").write_text("import time; time.sleep(600)")
    process = cluster.start(0, FAULTS, "sleep", GATHER_SECONDS="5")
    cluster.start(1, tmp_path / "busy.py")
    assert ended(process, seconds=100) == [1]
    assert "no sign of rank 1 (machine 1) after 5 s" in cluster.said(0)


@pytest.mark.slow
def test_a_machine_that_is_never_started_is_told_by_torchrun(cluster):
    process = cluster.start(0, FAULTS, "sleep", launcher=["--rdzv-conf", "timeout=5"])
    assert ended(process, seconds=100) == [1]
    assert "1/2 clients joined" in cluster.said(0)


# --- interfaces ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("address", ["node0", "fd77::1"])
def test_names_and_addresses_of_the_first_machine(cluster, tmp_path, address):
    """node0 calls itself 127.0.1.1, as Debian has it."""
    (tmp_path / "mark").touch()
    processes = []
    for number, own in enumerate(["127.0.1.1", ADDRESS.format(1)]):
        (tmp_path / f"hosts{number}").write_text(f"127.0.0.1 localhost\n{own} node0\n")
        before = f"mount --bind {tmp_path}/hosts{number} /etc/hosts"
        launcher = ["--master-addr", address]
        options = {"before": before, "launcher": launcher, "MARK": str(tmp_path / "mark")}
        processes.append(cluster.start(number, FAULTS, "once", **options))
    assert ended(*processes, seconds=100) == [0, 0], cluster.said(0) + cluster.said(1)
    assert "sum [2.0]" in cluster.said(0)

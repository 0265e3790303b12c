"""Several machines: two network namespaces joined by a cable (veth), a real torchrun in each."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from helpers import (
    LITTLE_CACHE,
    ROOT,
    metrics_of,
    run_script,
    script_environment,
    steps_of,
    wait_until,
)
from torch.distributed.run import get_args_parser as torchrun_arguments

from common.distributed import World, make_mesh
from common.machines import check_same, facts_of_machine, flags_as_typed, words_of_flags
from common.manifest import fingerprint
from common.rendezvous import find_interface

FAULTS = ROOT / "tests" / "workers" / "faults.py"
FEW = [
    "--prompts-per-step",
    4,
    "--samples-per-prompt",
    4,
    "--max-response-tokens",
    32,
    "--max-rows",
    64,
]
FEW += ["--eval-every", 0, "--no-eval-before", "--eval-rows", 4]
ADDRESS = "10.77.0.{}"


def ip(*words: object) -> None:
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


class Cluster:
    """Two machines, as far as a network can tell: each has a name, a loopback and an eth0 of its
    own."""

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
        """torchrun with one rank on a machine, after a shell command there; its output goes to a
        file."""
        options = ["--nnodes", 2, "--nproc_per_node", 1, "--node-rank", number, *launcher]
        if "--master-addr" not in options:
            options += ["--master-addr", ADDRESS.format(1)]
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *options,
            "--master-port",
            29500,
            *arguments,
        ]
        shell = f'hostname node{number} && {before} && exec "$@"'
        inside = [
            "ip",
            "netns",
            "exec",
            self.spaces[number],
            "unshare",
            "--uts",
            "--mount",
            "sh",
            "-c",
            shell,
            "sh",
        ]
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
        done = subprocess.run(
            ["ip", "netns", "pids", self.spaces[number]], capture_output=True, text=True
        )
        found = []
        for pid in done.stdout.split():
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    def kill(self, number: int) -> None:
        """As if the power went, but that its kernel still closes connections."""
        members = self.members(number)
        for member in members:
            with suppress(psutil.NoSuchProcess):  # the kernel kills ranks with their torchrun
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
    options = [
        *FEW,
        "--engine",
        "hf",
        "--total-steps",
        10_000,
        "--output-dir",
        cluster.folder / "run",
        *options,
    ]
    return [cluster.start(number, "grpo.py", *options) for number in range(2)]


def has_done(run_dir: Path, step: int) -> bool:
    return (run_dir / "metrics.jsonl").is_file() and step in steps_of(run_dir)


# --- equal to two ranks ---------------------------------------------------------------------------

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
    assert max(step["optim/grad_norm"] for step in steps_of(a).values()) > 0.1
    first, second = ((run / "model" / "model.safetensors").read_bytes() for run in (a, b))
    assert first == second


@pytest.mark.slow
def test_two_machines_are_two_ranks(cluster, local, tmp_path):
    options, reference = local
    assert both(cluster, "grpo.py", *options, "--output-dir", tmp_path / "run") == [0, 0], (
        cluster.said(0)
    )
    assert "2 machines: node0 by eth0, node1 by eth0\n" in cluster.said(0)
    assert_same_run(tmp_path / "run", reference)


@pytest.mark.slow
def test_a_slow_machine_changes_nothing_but_time(cluster, local, tmp_path):
    """Three seconds for each of its 8 responses of a step."""
    options, reference = local
    options = [*options, "--output-dir", tmp_path / "run"]
    processes = [
        cluster.start(number, "grpo.py", *options, SLEEP=str(3 * number)) for number in range(2)
    ]
    assert ended(*processes) == [0, 0], cluster.said(0) + cluster.said(1)
    assert_same_run(tmp_path / "run", reference)
    seconds = [
        record["time/step_s"] for record in metrics_of(tmp_path / "run") if "time/step_s" in record
    ]
    assert min(seconds) > 3


@pytest.mark.slow
def test_a_killed_rank_is_started_again_on_all_machines(cluster, local, tmp_path):
    options, reference = local
    options = [*options, "--output-dir", tmp_path / "run"]
    processes = [
        cluster.start(n, "grpo.py", *options, launcher=["--max-restarts", 1]) for n in range(2)
    ]
    wait_until(lambda: has_done(tmp_path / "run", 2), 300)
    ranks = [member for member in cluster.members(1) if "TORCHELASTIC_RUN_ID" in member.environ()]
    min(ranks, key=lambda member: member.create_time()).kill()  # the others are its children
    assert ended(*processes) == [0, 0], cluster.said(0) + cluster.said(1)
    assert [
        record["step"] >= 1
        for record in metrics_of(tmp_path / "run")
        if record.get("event") == "resumed"
    ] == [True]
    assert_same_run(tmp_path / "run", reference)


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_other_code_flags_and_models_are_refused_by_name(cluster, tmp_path):
    places = {
        "code": ROOT / "common" / "metrics.py",
        "model": ROOT / "common" / "assets" / "tiny" / "model.safetensors",
    }
    for name, place in places.items():
        (tmp_path / name).write_bytes(place.read_bytes() + b"\n")
    before = " && ".join(
        f"mount --bind {tmp_path / name} {place}" for name, place in places.items()
    )
    options = [*FEW, "--engine", "hf", "--output-dir", tmp_path / "run"]
    processes = [
        cluster.start(0, "grpo.py", *options, "--seed", 3),
        cluster.start(1, "grpo.py", *options, "--seed", 4, before=before),
    ]
    assert ended(*processes) == [1, 1]
    line = (
        "node0 by eth0 and node1 by eth0 need the same code, flags, files and versions, "
        "and differ in "
    )
    # the first machine that ends says it, its torchrun repeats it
    told = {
        text.partition(line)[2]
        for text in (cluster.said(0) + cluster.said(1)).splitlines()
        if line in text
    }
    (differing,) = told
    named = [item.partition(":")[0] for item in differing.split("; ")]
    assert named == ["seed", "common/metrics.py", "model model.safetensors"]
    assert differing.startswith("seed: 3, 4; common/metrics.py: "), differing
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_folder_that_is_not_shared_is_refused(cluster, tmp_path):
    (tmp_path / "runs").mkdir()
    options = [*FEW, "--engine", "hf", "--output-dir", tmp_path / "runs" / "a"]
    befores = ["true", f"mount -t tmpfs none {tmp_path / 'runs'}"]
    processes = [
        cluster.start(number, "grpo.py", *options, before=before)
        for number, before in enumerate(befores)
    ]
    assert ended(*processes) == [1, 1]
    told = f"--output-dir {tmp_path}/runs/a: node1 does not see what rank 0 writes there"
    assert told in cluster.said(0) + cluster.said(1)


# --- failing --------------------------------------------------------------------------------------


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
        assert "Timeout (0:00:30)!\nThread 0x" in cluster.said(number)


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


# --- interfaces -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("address", ["node0", "fd77::1", "c10d"])
def test_names_and_addresses_of_the_first_machine(cluster, tmp_path, address):
    """node0 calls itself 127.0.1.1, as Debian has it."""
    (tmp_path / "mark").touch()
    launcher = ["--master-addr", address]
    if address == "c10d":
        launcher = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29500", "--rdzv-id", "test"]
    processes = []
    for number, own in enumerate(["127.0.1.1", ADDRESS.format(1)]):
        (tmp_path / f"hosts{number}").write_text(
            f"127.0.0.1 localhost\n{own} node0\n{ADDRESS.format(2)} node1\n"
        )
        before = f"mount --bind {tmp_path}/hosts{number} /etc/hosts"
        options = {"before": before, "launcher": launcher, "MARK": str(tmp_path / "mark")}
        processes.append(cluster.start(number, FAULTS, "once", **options))
    assert ended(*processes, seconds=100) == [0, 0], cluster.said(0) + cluster.said(1)
    assert "sum [2.0] by eth0" in cluster.said(0) + cluster.said(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lo", "eth7"])
def test_an_interface_that_does_not_lead_to_the_others_is_named(cluster, name):
    assert both(cluster, FAULTS, "sleep", GLOO_SOCKET_IFNAME=name, GATHER_SECONDS="5") == [1, 1]
    output = cluster.said(0) + cluster.said(1)
    assert f"the ranks do not connect by {name} (GLOO_SOCKET_IFNAME): " in output


# --- what needs no network ------------------------------------------------------------------------


def told_by(*machines: dict[str, str]):
    """`gather_objects` of one rank on each of these machines."""
    return lambda value: [(f"node{number} by eth0", facts) for number, facts in enumerate(machines)]


def test_what_differs_is_named_with_both_values(monkeypatch, capsys):
    world = World(0, 3, 0, torch.device("cpu"))
    monkeypatch.setattr(
        "common.machines.gather_objects", told_by({"a": "1"}, {"a": "1"}, {"a": "1"})
    )
    check_same(world, {})
    assert capsys.readouterr().out == "3 machines: node0 by eth0, node1 by eth0, node2 by eth0\n"
    here = {"a": "1", "b": ""}
    monkeypatch.setattr("common.machines.gather_objects", told_by(here, here, {"a": "2"}))
    with pytest.raises(
        SystemExit, match=r"^node0 by eth0 and node2 by eth0 .* differ in a: 1, 2; b: , None$"
    ):
        check_same(world, {})
    many = {f"flag-{number}": "x" for number in range(50)}
    monkeypatch.setattr("common.machines.gather_objects", told_by(many, {}))
    with pytest.raises(SystemExit) as stop:
        check_same(world, {})
    assert str(stop.value).count("flag-") == 5


def test_one_machine_has_nobody_to_differ_from(monkeypatch, capsys):
    for rank in (0, 1):
        facts = [("node0 by lo", {"a": "1"}), None]
        monkeypatch.setattr("common.machines.gather_objects", lambda value, facts=facts: facts)
        check_same(World(rank, 2, rank, torch.device("cpu")), {"a": "1"})
    assert capsys.readouterr().out == ""


def test_a_run_is_described_by_all_that_decides_what_it_does(monkeypatch, tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json", "notes.md"):
        (tmp_path / name).write_text(name)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}")
    command = (
        f"grpo.py --seed=3 --no-compile --train-data {rows},gone --reward-function {__file__}:f"
    ).split()
    monkeypatch.setattr(sys, "argv", [*command, "--output-dir", "x y"])
    facts = facts_of_machine(str(tmp_path))
    assert facts["seed"] == "3" and facts["no-compile"] == "" and facts["output-dir"] == "x y"
    assert {
        "grpo.py",
        "common/steps.py",
        "common/engine/vllm.py",
        "torch",
        __file__,
        str(rows),
    } <= set(facts)
    models = {name for name in facts if name.startswith("model ")}
    assert models == {"model config.json", "model model.safetensors", "model tokenizer.json"}
    for path in (tmp_path / "model.safetensors", rows):
        path.write_text(path.read_text() + " ")
    after = facts_of_machine(str(tmp_path))
    changed = {name for name in facts if facts[name] != after[name]}
    assert changed == {"model model.safetensors", str(rows)}


def test_the_last_byte_of_the_code_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["grpo.py"])
    monkeypatch.setattr("common.machines.ROOT", tmp_path)
    no_model = str(tmp_path / "model")
    code = tmp_path / "grpo.py"
    code.write_text("x = 1" + "\n" * 2**21)
    facts = facts_of_machine(no_model)
    code.write_text("x = 1" + "\n" * (2**21 - 1) + "x")
    assert facts_of_machine(no_model) != facts and facts["grpo.py"].startswith("2097157 bytes, ")


@pytest.mark.parametrize("flag", ["--output-dir", "--output_dir"])
@pytest.mark.parametrize("equals", ["=", " "])
def test_the_run_folder_is_not_probed_however_its_flag_is_typed(monkeypatch, flag, equals):
    monkeypatch.setattr(sys, "argv", f"grpo.py {flag}{equals}runs/a --train_data b".split())
    assert words_of_flags(flags_as_typed()) == ["b"]


@pytest.mark.parametrize("place", [0, 2**20 - 1, 2**21, 2**22, 2**22 + 2**20 - 1])
def test_both_ends_of_a_large_file_count(tmp_path, place):
    """Its middle by samples."""
    content = bytearray(2**22 + 2**20)
    (tmp_path / "file").write_bytes(content)
    before = fingerprint(tmp_path / "file")
    content[place] = 1
    (tmp_path / "file").write_bytes(content)
    assert fingerprint(tmp_path / "file") != before and before.startswith("5242880 bytes, ")
    (tmp_path / "file").write_bytes(b"")
    assert fingerprint(tmp_path / "file").startswith("0 bytes, ")


def test_a_collective_that_does_nothing_is_noticed(world, monkeypatch):
    """A group of one says that it has two ranks: what it sums is what it was given."""
    assert make_mesh(world, "fsdp").size() == 1
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda group: [0, 1])
    with pytest.raises(
        SystemExit, match=r"an all-reduce over ranks \[0, 1\] gives \[1.0, 0.0\], not \[2, 1\]"
    ):
        make_mesh(world, "fsdp")


@pytest.fixture
def interfaces(monkeypatch) -> None:
    """eth0 leads to 10.0.0.*, and to where the address of node0 seems to be is lo."""
    for library in ("GLOO", "NCCL"):
        monkeypatch.setenv(f"{library}_SOCKET_IFNAME", "")
        monkeypatch.delenv(f"{library}_SOCKET_IFNAME")
    known = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.1"}
    addresses = {name: [SimpleNamespace(address=address)] for name, address in known.items()}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: addresses)
    towards = {
        "node0": "127.0.0.1",
        "127.0.0.1": "127.0.0.1",
        "node1": "::1",
        "10.0.0.2": "10.0.0.1",
        "10.0.0.1": "10.0.0.1",
    }
    monkeypatch.setattr("common.rendezvous.address_towards", towards.__getitem__)


@pytest.mark.parametrize(
    "master, others, found",
    [
        ("10.0.0.2", ["10.0.0.2"], "eth0"),
        ("node0", ["127.0.0.1"], "lo"),
        ("node0", ["127.0.0.1", "10.0.0.2"], "eth0"),
        ("node1", ["::1", "10.0.0.2"], "eth0"),
    ],
    ids=["by address", "this machine alone", "a name for 127.0.0.1", "a name for ::1"],
)
def test_the_interface_is_the_one_that_leads_to_the_others(
    interfaces, monkeypatch, master, others, found
):
    store = dist.HashStore()
    for number, address in enumerate(others):
        store.set(f"address/{number + 1}", address)
    monkeypatch.setenv("MASTER_ADDR", master)
    find_interface(store, 0, 1 + len(others))
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == (
        found,
        f"={found}",
    )


def test_the_user_knows_the_interface_better(interfaces, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    find_interface(dist.HashStore(), 0, 1)
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("ib0", "=lo")


def no_interfaces() -> dict:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("listed", [dict, no_interfaces, lambda: {"eth0": []}])
def test_where_no_interface_is_listed_gloo_chooses(interfaces, monkeypatch, listed):
    monkeypatch.setattr("psutil.net_if_addrs", listed)
    find_interface(dist.HashStore(), 0, 1)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.2")
    find_interface(dist.HashStore(), 0, 2)
    assert "GLOO_SOCKET_IFNAME" not in os.environ and "NCCL_SOCKET_IFNAME" not in os.environ


# --- Slurm ----------------------------------------------------------------------------------------

SLURM = {
    "scontrol": 'echo "$*" >&2; printf "node0\\nnode1\\n"',
    "srun": 'shift; for id in 0 1; do SLURM_NODEID=$id "$@"; done',
    "torchrun": 'printf "%s\\0" "$@"; printf "%s\\n" "$JUDGE_URLS"',
    "vllm": 'touch "$STARTED"; exec tail -f /dev/null',
    "sleep": "exec /bin/sleep 0.1",
    "curl": 'test -e "$STARTED"',
}


@pytest.fixture
def slurm(tmp_path) -> dict[str, str]:
    """An environment in which programs stand for Slurm's."""
    (tmp_path / "bin").mkdir()
    for name, body in SLURM.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    known = {"NNODES": "2", "GPUS_ON_NODE": "8", "JOB_ID": "123456", "JOB_NODELIST": "node[0-1]"}
    known |= {"CPUS_PER_TASK": "64", "SUBMIT_DIR": str(ROOT)}
    own = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "JUDGE_FILE": f"{tmp_path}/judge.url"}
    return {
        **os.environ,
        **own,
        "STARTED": f"{tmp_path}/started",
        **{f"SLURM_{k}": v for k, v in known.items()},
    }


def test_the_jobs_of_slurm(slurm, tmp_path):
    """The training waits for the judge's address, and starts a torchrun on each machine."""
    script = ["grpo.py", "--model", "/shared/a model", "--output-dir", "/shared/runs/one"]
    pipes = {"env": slurm, "stdout": subprocess.PIPE, "text": True, "cwd": tmp_path}
    training = subprocess.Popen(["bash", ROOT / "docs/slurm/train.sbatch", *script], **pipes)
    judge = subprocess.Popen(["bash", ROOT / "docs/slurm/judge.sbatch", "some/model"], **pipes)
    try:
        said, _ = training.communicate(timeout=60)
        assert training.returncode == 0
        address = (tmp_path / "judge.url").read_text().strip()
        assert re.fullmatch(r"http://[^:]+:23456/v1", address)
        for number, line in enumerate(said.splitlines()):
            *words, urls = line.split("\0")
            known = torchrun_arguments().parse_args(words)
            assert (known.nnodes, known.node_rank, known.nproc_per_node) == ("2", number, "8")
            assert (known.master_addr, known.master_port, known.shutdown_timeout) == (
                "node0",
                23456,
                540,
            )
            assert [
                known.training_script,
                *known.training_script_args,
            ] == script and urls == address
            by_default = torchrun_arguments().get_default("signals_to_handle").split(",")
            assert {*known.signals_to_handle.split(",")} == {*by_default, "SIGUSR1"}
        assert number == 1
        judge.terminate()
        assert judge.wait(timeout=60) == 143 and not (tmp_path / "judge.url").exists()
    finally:
        for process in (training, judge):
            process.kill()
            process.wait()

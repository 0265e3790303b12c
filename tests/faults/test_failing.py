"""Failing well: one rank ends all, torchrun starts them again, its own end is theirs; a stall is
shown, Ctrl-C is one line, a full disk costs a checkpoint and no more. What SIGTERM saves:
test_grpo_faults.py."""

import contextlib
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch
from helpers import (
    ROOT,
    alive,
    checked_args,
    kill_all,
    metrics_of,
    run_script,
    save_checkpoint,
    script_environment,
    torchrun,
    wait_until,
)
from torch.distributed import HashStore
from zygote import RANK_VARIABLES

import grpo
from common import ending, script
from common.distributed import World, init_world
from common.ending import GRACE_S
from common.engine.vllm import VllmEngine

FAULTS = ROOT / "tests" / "workers" / "faults.py"


def run_fault(fault: str) -> tuple[str, float]:
    """(what was printed, seconds from the fault to the end of all processes)."""
    command = torchrun(FAULTS, fault, ranks=2)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=script_environment(), **pipes)
    output, start = "", None
    for line in process.stdout:
        output += line
        if line.strip() == "fault":
            start = time.monotonic()
            family = psutil.Process(process.pid).children(recursive=True)
    assert process.wait(timeout=60) != 0 and start, output
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive, "every rank is gone"
    return output, time.monotonic() - start


def test_a_rank_that_raises_ends_all_and_its_trace_comes_first():
    output, seconds = run_fault("raise")
    assert seconds < 50, "5 x 10 s"
    assert "RuntimeError: the sky has fallen" in output
    first = output.index("] failed:")
    assert output.startswith("[rank 1", first - len("[rank 1")), output
    *_, last, frame = output.splitlines()
    assert last.endswith("[rank 1] RuntimeError: the sky has fallen") and set(frame) == {"="}, (
        output[-3000:]
    )


def test_a_rank_that_is_killed_ends_all():
    done = run_script(FAULTS, "sigkill", ranks=2, check=False, timeout=50)
    assert done.returncode != 0
    assert (
        "[rank 0] RuntimeError: " in done.stderr
        and "killed (signal 9) has most often run out of memory" in done.stderr
    )


def test_a_stall_prints_the_stacks_of_all_ranks_and_ends():
    start = time.monotonic()
    done = run_script(FAULTS, "stall", ranks=2, check=False)
    output, seconds = done.stderr, time.monotonic() - start
    assert done.returncode != 0
    for timer in ("0:00:08", "0:00:08.500000"):  # one rank after the other, so whole
        assert f"Timeout ({timer})!\nThread 0x" in output
    lines = FAULTS.read_text().splitlines()
    asleep = 1 + lines.index("        time.sleep(600)  # nobody calls sign_of_life")
    assert f'faults.py", line {asleep} in main' in output and "all_reduce" in output
    assert seconds < 5 * (8 + 10)


def test_a_stall_does_not_cut_off_what_a_rank_that_fails_has_to_say():
    """It waits for the first one's report, and its timer has nearly run out by then."""
    code = (
        "from common import ending\n"
        "ending._stall_s, ending.GRACE_S = 1.0, 2.0\n"
        "ending.sign_of_life()\n"
        "ending.fail('[rank 1] lost its peer')\n"
        "print('it ends by itself')"
    )
    environment = {**os.environ, "LOCAL_RANK": "1"}  # not the one that speaks first
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout) == (0, "it ends by itself\n"), done.stderr
    assert done.stderr == "[rank 1] lost its peer\n"


def test_of_ranks_that_fail_at_once_the_first_prints_its_trace(monkeypatch, capfd):
    """As by a file that is gone: each other one has its line alone, which names its rank."""

    def main() -> None:
        raise ValueError("a full disk")

    monkeypatch.setattr(ending, "_store", HashStore())
    clock = SimpleNamespace(sleep=lambda seconds: None, time=time.time)
    monkeypatch.setattr("common.ending.time", clock)
    for number in (1, 0, 2):
        monkeypatch.setenv("RANK", str(number))
        assert script._outcome(main) == 1
    said = capfd.readouterr().err
    assert said.startswith("[rank 1] failed:\nTraceback") and said.count("failed:") == 1, said
    line = "] ValueError: a full disk"
    assert said.splitlines()[-3:] == [f"[rank {number}{line}" for number in (1, 0, 2)]
    assert ending.first_failure() == f"[rank 1{line}"


# --- ranks without torchrun, which costs 10 processor seconds -------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_variables(number: int, of: int, port: int) -> dict[str, str]:
    """As if each rank were on a machine of its own."""
    own = {"RANK": number, "WORLD_SIZE": of, "LOCAL_RANK": 0}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in own.items()}


def one_rank(fault: str, number: int = 0, of: int = 1, port: int = 0, **extra: str) -> tuple:
    """(what it has said, its exit code) of a rank of faults.py. Not what breaks a long silence, in
    which the warm process may have begun."""
    own = rank_variables(number, of, port) if of > 1 else {}
    done = run_script(FAULTS, fault, check=False, env=own | extra, timeout=60)
    lines = (done.stdout + done.stderr).splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("... ")), done.returncode


@pytest.fixture
def rank():
    """rank(FAULT): the only rank of faults.py, to which a test sends signals."""
    started = []

    def start(fault: str) -> subprocess.Popen:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [sys.executable, FAULTS, fault]
        started.append(subprocess.Popen(command, cwd=ROOT, env=script_environment(), **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_failure_on_another_machine_ends_a_rank_that_is_in_no_collective():
    port = free_port()
    with ThreadPoolExecutor() as pool:
        ranks = [pool.submit(one_rank, "elsewhere", number, 2, port) for number in range(2)]
        (first, *codes), (second, code) = [rank.result() for rank in ranks]
    assert "[rank 1] failed:\nTraceback" in second and "ValueError: a full disk" in second
    assert first == "[rank 0] ends: [rank 1] ValueError: a full disk\n"
    assert [*codes, code] == [1, 1]


@pytest.mark.parametrize(
    "number, missing",
    [(0, "no sign of rank 1 (machine 1)"), (1, "no answer from 127.0.0.1:{port}")],
    ids=["rank 0", "rank 1"],
)
def test_a_rank_that_does_not_come_is_named(number, missing):
    """The other one was killed while it imported."""
    port = free_port()
    said, code = one_rank("raise", number, of=2, port=port, GATHER_SECONDS="1")
    (line,) = said.splitlines()[-1:]
    assert line.startswith(f"[rank {number}] {missing.format(port=port)} after 1 s"), line
    assert code == 1


def test_a_wait_that_is_no_number_of_seconds_is_refused():
    said, _ = one_rank("raise", GATHER_SECONDS="10m")
    assert said.splitlines()[-1] == "GATHER_SECONDS: expected a number of seconds"


def test_a_rank_dies_with_its_torchrun(tmp_path):
    """By SIGKILL, which leaves torchrun no time to end its ranks; here something else has started
    the rank."""
    code = (
        "import subprocess, sys, time; p = subprocess.Popen(sys.argv[1:]); print(p.pid, "
        "flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, sys.executable, FAULTS, "sleep"]
    environment = script_environment(TORCHELASTIC_RUN_ID="none")
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as launcher:
        orphan = psutil.Process(int(launcher.stdout.readline()))
        assert launcher.stdout.readline() == "fault\n"
        launcher.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            try:
                orphan.wait(timeout=10)
            finally:
                orphan.kill()


def test_a_group_of_one_listens_to_this_machine_alone():
    said, _ = one_rank("sockets")
    assert said.startswith("fault\n") and set(said.split()[1:]) <= {"127.0.0.1", "::1"}, said


INTERRUPTED = "interrupted at step 3; last checkpoint: none\n"


def test_ctrl_c_before_training_is_one_line():
    """The first one ends the run."""
    assert one_rank("ctrl-c") == (f"fault\n{INTERRUPTED}", 130)


def test_the_second_ctrl_c_in_a_step_is_one_line(rank):
    """Or what torchrun makes of it."""
    process = rank("ctrl-c in a step")
    assert process.stdout.readline() == "fault\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert "once more ends it at once" in process.stdout.readline()
    process.send_signal(signal.SIGHUP)  # which is no second one
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == INTERRUPTED
    assert process.returncode == 130


# --- how it is started ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_srun_without_torchrun_is_refused(monkeypatch, count):
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--model", "x"])
    monkeypatch.setenv(count, "4")
    with pytest.raises(
        SystemExit, match=f"{count}=4.* torchrun --nproc_per_node N grpo.py --model x"
    ):
        init_world()


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(
        SystemExit, match="4 ranks, but 2 GPUs on this machine: torchrun --nproc_per_node 2"
    ):
        init_world()


@pytest.mark.parametrize(
    "flag", ["--no-such-flag", "--num-generations", "--help"], ids=["tyro", "ours", "help"]
)
def test_what_the_command_line_is_answered_is_said_once(monkeypatch, capsys, flag):
    """By the first rank of a machine; the others wait until torchrun ends them, if it does."""
    waits = []
    # `time` of that file alone: other threads of this process may sleep, too
    monkeypatch.setattr("common.ending.time", SimpleNamespace(sleep=waits.append))
    for number in (1, 0):
        monkeypatch.setenv("LOCAL_RANK", str(number))
        with pytest.raises(SystemExit) as stop:
            checked_args(grpo, monkeypatch, flag, "3")
        output = "".join(capsys.readouterr()) + str(stop.value.code)
        assert bool(stop.value.code) == (flag != "--help")
        assert (flag in output) == (number == 0)
        assert waits == ([GRACE_S] if flag != "--help" else [])


# --- torchrun's restarts --------------------------------------------------------------------------


def comes_up_again(tmp_path: Path, *launchers: list) -> None:
    """All ranks of one or several torchruns, of which the last rank is killed in the first
    attempt."""
    environment = script_environment(MARK=str(tmp_path / "mark"))
    command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = [
        subprocess.Popen(
            [*command, *map(str, options), FAULTS, "once"], cwd=ROOT, env=environment, **pipes
        )
        for options in launchers
    ]
    try:
        outputs = [process.communicate(timeout=150)[0] for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                kill_all(process)
    assert [process.returncode for process in running] == [0] * len(running), outputs
    assert "".join(outputs).count("fault\n") == 2 and "sum [2.0]" in "".join(outputs), outputs


@pytest.mark.slow
def test_torchrun_starts_all_ranks_again(tmp_path):
    comes_up_again(tmp_path, ["--standalone", "--nproc_per_node", 2])


@pytest.mark.slow
def test_torchrun_starts_all_ranks_again_without_standalone(tmp_path):
    comes_up_again(tmp_path, ["--master-port", free_port(), "--nproc_per_node", 2])


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_two_torchruns_start_all_ranks_again(tmp_path, rendezvous):
    """Each counts the restarts by itself: the one whose rank was killed counts one more than the
    other, or as many."""
    port = free_port()
    options = ["--nnodes", 2, "--nproc_per_node", 1]
    if rendezvous == "c10d":
        options += [
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"localhost:{port}",
            "--rdzv-id",
            "test",
        ]
        comes_up_again(tmp_path, options, options)
    else:
        options += ["--master-addr", "localhost", "--master-port", port, "--node-rank"]
        comes_up_again(tmp_path, [*options, 0], [*options, 1])


@pytest.mark.slow
def test_all_ranks_die_with_a_killed_torchrun():
    command = torchrun(FAULTS, "sleep", ranks=2)
    with subprocess.Popen(
        command, cwd=ROOT, env=script_environment(), stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout.readline() == "fault\n"
        family = psutil.Process(launcher.pid).children(recursive=True)
        launcher.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
        for process in alive:
            process.kill()
        assert len(family) >= 2 and not alive


LONG = [
    "--engine",
    "hf",
    "--prompts-per-step",
    2,
    "--samples-per-prompt",
    2,
    "--max-response-tokens",
    32,
]
LONG += [
    "--max-rows",
    64,
    "--total-steps",
    200,
    "--eval-every",
    0,
    "--no-eval-before",
    "--save-every",
    3,
]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_the_first_ctrl_c_saves_the_step_and_the_same_command_goes_on(ranks, tmp_path):
    """torchrun tells its ranks, whose terminal is another; its own exit code is that of a
    traceback."""
    command = torchrun("grpo.py", *LONG, "--output-dir", tmp_path / "run", ranks=ranks)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=script_environment(), **pipes)
    for line in process.stdout:
        if line.startswith("step   4/200"):
            process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == (1 if ranks else 130)
    printed = process.stderr.read()
    assert printed.count("once more ends it at once") == 1
    (stopped,) = [
        record for record in metrics_of(tmp_path / "run") if record.get("event") == "stopped"
    ]
    assert 4 <= stopped["step"] < 9
    checkpoint = tmp_path / f"run/checkpoints/step_{stopped['step']:06d}"
    line = f"stopped at step {stopped['step']}; last checkpoint: {checkpoint}\n"
    assert printed.count(line) == 1
    assert (tmp_path / "run/checkpoints/latest").read_text() == f"step_{stopped['step']:06d}"
    assert (tmp_path / "run/curves.png").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_the_second_ctrl_c_ends_a_run_at_once_and_tells_step_and_checkpoint(ranks, tmp_path):
    """In a step that would last for minutes: a reward sleeps."""
    (tmp_path / "reward.py").write_text(
        "import pathlib, time\n\n\ndef score(data_source, solution_str, ground_truth, "
        "extra_info):\n"
        f"    if pathlib.Path({str(tmp_path)!r}, 'run/checkpoints/latest').exists():\n"
        f"        pathlib.Path({str(tmp_path)!r}, 'asleep').touch()\n        time.sleep(600)\n"
        "    return 0.5\n"
    )
    options = ["--reward-function", f"{tmp_path}/reward.py:score", "--reward-timeout", 600]
    command = torchrun("grpo.py", *LONG, *options, "--output-dir", tmp_path / "run", ranks=ranks)
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=script_environment(), **pipes)
    wait_until((tmp_path / "asleep").exists, 300)
    process.send_signal(signal.SIGINT)
    time.sleep(3)
    assert process.poll() is None, "the first one waits for the step"
    process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    assert process.wait(timeout=60) == (1 if ranks else 130)
    assert time.monotonic() - begun < 15
    told = [
        line
        for line in process.stderr.read().splitlines()
        if line.startswith("interrupted at step ")
    ]
    assert told == [
        f"interrupted at step 3; last checkpoint: {tmp_path}/run/checkpoints/step_000003"
    ]
    assert (tmp_path / "run/curves.png").is_file()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_console_on_a_full_disk_costs_its_lines(tmp_path):
    """As of `python grpo.py ... > log.txt`."""
    options = [
        "--engine",
        "hf",
        "--prompts-per-step",
        2,
        "--samples-per-prompt",
        2,
        "--max-response-tokens",
        8,
    ]
    options += [
        "--max-rows",
        8,
        "--total-steps",
        2,
        "--eval-every",
        0,
        "--eval-rows",
        2,
        "--output-dir",
        tmp_path,
    ]
    with open("/dev/full", "w") as full:
        pipes = {"stdout": full, "stderr": full, "timeout": 300}
        done = subprocess.run(
            torchrun("grpo.py", *options), cwd=ROOT, env=script_environment(), **pipes
        )
    assert done.returncode == 0 and [r["step"] for r in metrics_of(tmp_path)] == [0, 1, 2]
    assert (tmp_path / "model/model.safetensors").is_file()


@pytest.mark.slow
def test_sigterm_in_an_evaluation_saves_the_step_that_was_evaluated(tmp_path):
    """And does no other first, for which torchrun's patience may be too short. What a reward has
    started ends too."""
    (tmp_path / "reward.py").write_text(
        "import pathlib, subprocess\n\nimport psutil\n\nhelper = subprocess.Popen(['sleep', "
        "'600'])\n"
        f"pathlib.Path({str(tmp_path)!r}, f'helper{{helper.pid}}').touch()\n\n\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if extra_info['split'] == 'test':\n"
        "        ranks = [process for process in psutil.Process().parents() if 'grpo.py' in "
        "process.cmdline()]\n"
        "        ranks[-1].terminate()\n"
        "    return 0.5\n"
    )
    options = [
        "--engine",
        "hf",
        "--prompts-per-step",
        2,
        "--samples-per-prompt",
        2,
        "--max-response-tokens",
        8,
    ]
    options += [
        "--max-rows",
        8,
        "--total-steps",
        6,
        "--eval-every",
        2,
        "--eval-rows",
        2,
        "--no-eval-before",
    ]
    options += [
        "--reward-function",
        f"{tmp_path}/reward.py:score",
        "--output-dir",
        tmp_path / "run",
    ]
    pipes = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(
        torchrun("grpo.py", *options), cwd=ROOT, env=script_environment(), **pipes
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    *_, evaluated, stopped = metrics_of(tmp_path / "run")
    assert evaluated["step"] == 2 and "eval/accuracy" in evaluated
    assert (stopped["event"], stopped["step"]) == ("stopped", 2)
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step_000002"
    helpers = [int(path.name.removeprefix("helper")) for path in tmp_path.glob("helper*")]
    assert helpers and not any(map(alive, helpers))


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
@pytest.mark.parametrize("before, stops", [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_lost_terminal_and_slurms_signal_are_sigterms_unless_ignored(
    number, before, stops, monkeypatch
):
    """As nohup has it."""
    received: list[int] = []
    previous = {handled: signal.getsignal(handled) for handled in script.STOP_SIGNALS}
    monkeypatch.setattr(script, "received", received)
    try:
        signal.signal(number, before)
        script.handle_signals()
        assert signal.getsignal(number) != signal.SIG_DFL, "which ends the process"
        os.kill(os.getpid(), number)
        assert received == [number] * stops
        os.kill(os.getpid(), signal.SIGTERM)
        assert received[-1] == signal.SIGTERM
    finally:
        for handled, handler in previous.items():
            signal.signal(handled, handler)


@pytest.mark.parametrize(
    "received, other, code",
    [([], 0, 0), ([], 143, 143), ([signal.SIGHUP], 0, 143), ([signal.SIGINT], 0, 130)],
)
def test_a_signal_to_one_rank_ends_all(monkeypatch, received, other, code):
    """The ranks agree on the step with which they end, whichever has got the signal."""

    def all_reduce(values: list[float], op: str) -> list[float]:
        return [{"max": max}[op](value, float(other)) for value in values]

    monkeypatch.setattr(script, "received", received)
    monkeypatch.setattr(script, "stopping", threading.Event())
    monkeypatch.setattr(script, "all_reduce", all_reduce)
    assert script.requested_exit_code() == code
    assert script.stopping.is_set() == (code > 0)


@pytest.mark.slow
def test_slurms_signal_to_torchrun_saves_on_all_ranks(tmp_path):
    """With the signals of docs/slurm; torchrun hands on what it gets, and waits for its ranks."""
    sbatch = (ROOT / "docs/slurm/train.sbatch").read_text()
    handled = re.search(r"--signals-to-handle \S+", sbatch)[0].split()
    options = [
        "--engine",
        "hf",
        "--prompts-per-step",
        4,
        "--samples-per-prompt",
        4,
        "--max-response-tokens",
        32,
    ]
    options += [
        "--max-rows",
        64,
        "--total-steps",
        40,
        "--eval-every",
        0,
        "--eval-rows",
        4,
        "--no-eval-before",
    ]
    command = torchrun(*handled, "grpo.py", *options, "--output-dir", tmp_path, ranks=2)
    process = subprocess.Popen(
        command, cwd=ROOT, env=script_environment(), stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if re.match(r"step +2/40", line):
            process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=60) != 0
    (stopped,) = [record for record in metrics_of(tmp_path) if record.get("event") == "stopped"]
    assert 2 <= stopped["step"] < 40
    assert (tmp_path / "checkpoints/latest").read_text() == f"step_{stopped['step']:06d}"


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("Error: out of memory")]
)
def test_out_of_memory_in_the_rollout_names_the_flag(error):
    def fail(**_):
        raise error

    engine = VllmEngine.__new__(VllmEngine)
    engine.sleep_level, engine.llm = 1, SimpleNamespace(wake_up=fail)
    with pytest.raises(SystemExit, match="lower --engine-memory"):
        engine.wake("kv_cache")
    error = RuntimeError("something else")
    with pytest.raises(RuntimeError, match="something else"):
        engine.wake("kv_cache")


# --- disk -----------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB."""
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path]).returncode
    ):
        pytest.skip("mounting a tmpfs needs root")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


def model_of(megabytes: float):
    model = torch.nn.Linear(int(megabytes * 2**20 / 12 / 64), 64, bias=False)  # with its moments
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, model.in_features)).sum().backward()
    optimizer.step()
    return {"policy": (model, optimizer)}


def save(folder: Path, step: int, trained, world: World) -> bool:
    return save_checkpoint(folder, step, trained, world, keep=2)


def test_a_full_disk_costs_the_checkpoint_and_leaves_no_partial_files(small_disk, world, capsys):
    assert save(small_disk, 1, model_of(1), world)
    assert not save(small_disk, 2, model_of(6), world)
    warning = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")
    ]
    assert (
        len(warning) == 1
        and "No space left on device: lower --keep-checkpoints or free some space" in warning[0]
    )
    assert "takes 6" in warning[0], "bytes"
    assert sorted(path.name for path in (small_disk / "checkpoints").iterdir()) == [
        "latest",
        "step_000001",
    ]
    assert (small_disk / "checkpoints" / "latest").read_text() == "step_000001"
    assert save(small_disk, 3, model_of(1), world), "there is room again"


def test_a_read_only_disk_costs_the_checkpoint(small_disk, world, capsys):
    assert save(small_disk, 1, model_of(1), world)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert not save(small_disk, 2, model_of(1), world)
    assert "Read-only file system" in capsys.readouterr().out
    assert (small_disk / "checkpoints" / "latest").read_text() == "step_000001"


def test_training_goes_on_when_the_disk_is_full(small_disk):
    """The run folder on a disk too small for checkpoint and model: warnings, and all steps."""
    options = [
        "--engine",
        "hf",
        "--prompts-per-step",
        2,
        "--samples-per-prompt",
        2,
        "--max-response-tokens",
        8,
    ]
    options += [
        "--max-rows",
        8,
        "--total-steps",
        2,
        "--eval-every",
        0,
        "--eval-rows",
        2,
        "--save-every",
        1,
    ]
    done = run_script("grpo.py", *options, "--output-dir", small_disk / "run", check=False)
    assert "warning: checkpoints will take up to" in done.stdout
    assert done.stdout.count("warning: no checkpoint of step") == 2, done.stdout + done.stderr
    assert [record["step"] for record in metrics_of(small_disk / "run")] == [0, 1, 2]
    assert (
        done.returncode == 1
        and "model not written" in done.stderr
        and "Traceback" not in done.stderr
    )
    assert not list((small_disk / "run").glob("model*"))


@pytest.mark.parametrize(
    "error, advised",
    [
        (ModuleNotFoundError("No module named 'flash_attn'"), True),
        (
            OSError("libcudart.so.13: cannot open shared object file: No such file or directory"),
            True,
        ),
        (
            ValueError("--reward-function mine.py:f: ModuleNotFoundError: No module named 'x'"),
            False,
        ),
        (FileNotFoundError("no such file: a.source"), False),
    ],
)
def test_a_package_that_cannot_be_imported_names_the_requirements_and_the_doctor(
    error, advised, capfd
):
    def main():
        raise error

    assert script._outcome(main) == 1
    said = capfd.readouterr().err
    assert ("requirements.txt" in said and "python -m common.doctor" in said) == advised and str(
        error
    ) in said


def test_a_stall_of_any_length_may_be_asked_for(monkeypatch):
    timers = []
    timer = lambda seconds, **_: timers.append(seconds)  # noqa: E731
    monkeypatch.setattr(ending.faulthandler, "dump_traceback_later", timer)
    monkeypatch.setattr(ending.threading, "Thread", Mock())
    monkeypatch.setattr(ending, "_stall_s", 0.0)
    ending.watch(None, math.inf)
    assert math.isfinite(timers[0])


def test_a_failure_in_any_letters_reaches_the_other_ranks(monkeypatch, capfd):
    """A file name that is not UTF-8 has halves of surrogate pairs, which the store refuses."""
    said = {}
    store = Mock(add=lambda *_: 1, set=lambda key, line: said.update({key: line.encode()}))
    monkeypatch.setattr(ending, "_store", store)
    monkeypatch.setattr(ending, "_stall_s", 0.0)
    ending.fail("--model caf\udce9: no folder")
    assert said == {"failed": rb"--model caf\udce9: no folder"}
    assert r"--model caf\udce9: no folder" in capfd.readouterr().err

"""Failing well: one rank ends all, a stall is shown, SIGTERM saves, a full disk costs a checkpoint and no more."""

import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import ROOT, metrics_of, run_script, script_environment, torchrun

from common.checkpoint import save_checkpoint
from common.distributed import World
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


def test_a_rank_that_is_killed_ends_all():
    assert run_fault("sigkill")[1] < 50


def test_a_stall_prints_the_stacks_of_all_ranks_and_ends():
    start = time.monotonic()
    done = run_script(FAULTS, "stall", ranks=2, check=False)
    output, seconds = done.stderr, time.monotonic() - start
    assert done.returncode != 0
    for rank in (0, 1):
        assert f"[rank {rank}] no progress for 0.05 minutes" in output, output
    assert output.count("faults.py") >= 2 and "time.sleep" not in output.split("no progress")[0]
    assert seconds < 5 * (3 + 10)


def test_sigterm_saves_exits_with_its_own_code_and_resumes_exactly(tmp_path):
    options = ["--engine", "hf", "--prompts-per-step", 4, "--samples-per-prompt", 4, "--max-response-tokens", 32]
    options += ["--max-rows", 64, "--total-steps", 6, "--eval-every", 0, "--eval-rows", 4, "--no-eval-before"]
    run_script("grpo.py", *options, "--output-dir", tmp_path / "whole")
    command = torchrun("grpo.py", *options, "--output-dir", tmp_path / "stopped")
    process = subprocess.Popen(command, cwd=ROOT, env=script_environment(), stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step 2/6"):
            process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert (tmp_path / "stopped/curves.png").is_file()
    (stopped,) = [record for record in metrics_of(tmp_path / "stopped") if record.get("event") == "stopped"]
    assert stopped["step"] < 6
    assert (tmp_path / "stopped/checkpoints/latest").read_text() == f"step_{stopped['step']:06d}"
    run_script("grpo.py", *options, "--output-dir", tmp_path / "stopped")
    whole, resumed = ((tmp_path / name / "model/model.safetensors").read_bytes() for name in ("whole", "stopped"))
    assert whole == resumed


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
    error.args = ("something else",)
    with pytest.raises(type(error), match="something else"):
        engine.wake("kv_cache")


# --- disk ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB."""
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path]).returncode:
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
    return save_checkpoint(folder / "checkpoints", step, trained, {}, world, keep=2)


@pytest.mark.parametrize("notices", [True, False], ids=["seen before", "seen while writing"])
def test_a_full_disk_costs_the_checkpoint_and_leaves_no_partial_files(small_disk, world, notices, monkeypatch, capsys):
    """Without the check beforehand too: other users of the disk may fill it during the save."""
    if not notices:
        monkeypatch.setattr("common.checkpoint.free_bytes", lambda folder: 10**12)
    assert save(small_disk, 1, model_of(1), world)
    assert not save(small_disk, 2, model_of(6), world)
    warning = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(warning) == 1 and "it takes " in warning[0] and ("bytes missing" in warning[0]) == notices
    assert sorted(path.name for path in (small_disk / "checkpoints").iterdir()) == ["latest", "step_000001"]
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
    options = ["--engine", "hf", "--prompts-per-step", 2, "--samples-per-prompt", 2, "--max-response-tokens", 16]
    options += ["--max-rows", 8, "--total-steps", 3, "--eval-every", 0, "--eval-rows", 2, "--save-every", 1]
    done = run_script("grpo.py", *options, "--output-dir", small_disk / "run", check=False)
    assert "warning: checkpoints will take up to" in done.stdout
    assert done.stdout.count("warning: no checkpoint of step") == 3, done.stdout + done.stderr
    assert [record["step"] for record in metrics_of(small_disk / "run")] == [0, 1, 2, 3]
    assert done.returncode == 1 and "model not written" in done.stderr and "Traceback" not in done.stderr
    assert not list((small_disk / "run").glob("model*"))

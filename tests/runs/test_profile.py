"""Where the time goes: --profile-steps, and time/* and memory/* over the ranks."""

import gzip
import json
import os
import re
from pathlib import Path

import pytest
from helpers import LITTLE_CACHE, ROOT, run_script

from common.distributed import World
from common.flags import step_range
from common.steps import Stopwatch, profiled

WORKER = ROOT / "tests" / "workers" / "profiled.py"


def trace(path: Path) -> list[dict]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def calls(events: list[dict], name: str) -> int:
    """How often an operation stands in a trace; for phases on the CPU alone."""
    return sum(event.get("name") == name and event.get("ph") == "X" for event in events)


NO_STEPS = ["3", "0:2", "4:3", "1:2:3", "a:b", "-1:2", "1:", ":2", "", "1.5:2", "1:9" + "9" * 5000]


@pytest.mark.parametrize("text", NO_STEPS)
def test_what_names_no_steps_is_refused(text):
    with pytest.raises(
        SystemExit, match=f"^--profile-steps {re.escape(text)}: give the first and the last step"
    ):
        step_range(text)


def test_steps_are_counted_from_one_and_both_ends_are_in():
    assert (
        list(step_range("3:5")) == [3, 4, 5]
        and list(step_range("1:1")) == [1]
        and not step_range(None)
    )


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """(folder, output, metrics of each step) of a run whose rank 1 is slow; steps 3 and 4 are
    traced."""
    folder = tmp_path_factory.mktemp("profiled")
    done = run_script(WORKER, folder, "3:4", ranks=2)
    return folder, done.stdout, json.loads(done.stdout.splitlines()[-1])


def test_each_rank_leaves_a_trace_of_the_steps_that_were_asked_for(two_ranks):
    folder, output, _ = two_ranks
    assert sorted(path.name for path in (folder / "profile").iterdir()) == [
        "rank_0.json.gz",
        "rank_1.json.gz",
    ]
    for rank in range(2):
        events = trace(folder / "profile" / f"rank_{rank}.json.gz")
        # phases have their names in it
        assert calls(events, "aten::cumsum") == calls(events, "update") == 2
    table = output[output.index("Self CPU %") :]
    rows = re.findall(r"^ +(\S.*?)  +[\d.]+%  ", table, re.MULTILINE)
    assert len(rows) == 10 and "rollout" in rows
    shares = [float(share) for share in re.findall(r"^ +\S.*?  +([\d.]+)%  ", table, re.MULTILINE)]
    assert shares == sorted(shares, reverse=True)


@pytest.mark.slow  # by default the run goes on to its end
def test_a_run_that_is_stopped_in_these_steps_leaves_its_traces(tmp_path):
    """SIGTERM reaches one rank of two."""
    done = run_script(WORKER, tmp_path, "3:4", 2, ranks=2, check=False)
    assert done.returncode and "Self CPU %" in done.stdout, done.stderr[-2000:]
    for rank in range(2):
        assert calls(trace(tmp_path / "profile" / f"rank_{rank}.json.gz"), "update") == 1


def test_a_slow_rank_shows(two_ranks):
    for metrics in two_ranks[2]:
        assert metrics["time/rollout_max_s"] >= 0.4 and metrics["time/rollout_s"] >= 0.2
        # rank 0 may start later
        assert metrics["time/step_max_s"] >= max(metrics["time/step_s"], 0.4)
        only_there = metrics["time/judge_max_s"]  # a phase that rank 0 did not have
        assert only_there > 0 and metrics["time/judge_s"] == pytest.approx(only_there / 2)
        assert metrics["memory/peak_gb"] >= metrics["memory/peak_mean_gb"] > 0


def test_one_rank_is_not_compared(world):
    watch = Stopwatch()
    with watch("update"):
        pass
    assert set(watch.metrics(world.device)) == {"time/update_s", "time/step_s", "memory/peak_gb"}


def walked(folder: Path, asked: str | None, world: World) -> list[int]:
    return list(profiled(range(3, 6), asked, folder, world))


def test_steps_that_the_run_does_not_have_are_said(tmp_path, world, capsys):
    """Those behind its end, and those before the step at which a resume starts."""
    for asked in ("7:9", "1:3"):
        assert walked(tmp_path, asked, world) == [3, 4, 5]
        warning = f"warning: --profile-steps {asked}: the run has steps 4 to 6\n"
        assert capsys.readouterr().out == warning
    assert walked(tmp_path, None, world) == [3, 4, 5]
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_costs_the_traces_alone(tmp_path, world, capsys):
    (tmp_path / "profile").touch()
    assert walked(tmp_path, "2:99", world) == [3, 4, 5]  # what the run has of them
    out = capsys.readouterr().out
    assert f"warning: {tmp_path}/profile/rank_0.json.gz not written" in out


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_disk_costs_the_traces_alone(tmp_path, world, capsys):
    (tmp_path / "profile").mkdir()
    assert os.system(f"mount -t tmpfs -o size=8k tmpfs {tmp_path}/profile") == 0
    try:
        (tmp_path / "profile" / "full").write_bytes(bytes(8192))
        assert walked(tmp_path, "4:5", world) == [3, 4, 5]
        out = capsys.readouterr().out
        assert "rank_0.json.gz not written ([Errno 28] No space left on device)" in out
    finally:
        os.system(f"umount {tmp_path}/profile")


SMALL = [
    "--prompts-per-step",
    8,
    "--samples-per-prompt",
    2,
    "--max-response-tokens",
    24,
    "--max-rows",
    16,
]
SMALL += ["--no-eval-before", "--eval-every", 0, "--eval-rows", 2, *LITTLE_CACHE]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["grpo.py", "ppo.py", "curiosity_rl.py", "distill.py", "sft.py"])
def test_every_script_on_two_ranks_with_vllm(tmp_path, script):
    """Started at its first step, and resumed in the middle of the steps that are asked for."""
    small = ["--batch-size", 4, "--eval-rows", 2] if script == "sft.py" else SMALL
    small = [*SMALL, "--critic-warmup-steps", 0] if script == "ppo.py" else small
    command = [script, *small, "--output-dir", tmp_path, "--profile-steps", "1:3"]
    for steps, traced in ((2, 2), (4, 1)):
        run_script(*command, "--total-steps", steps, ranks=2, fresh=True)
        for rank in range(2):
            events = trace(tmp_path / "profile" / f"rank_{rank}.json.gz")
            assert calls(events, "update") == traced
            # vLLM's own
            sampled = sum("cpu_attention" in event.get("name", "") for event in events)
            assert bool(sampled) == (script != "sft.py")

"""curiosity_rl.py as its users run it, on the embedded vision policy: real torchrun ranks, real vLLM, real crops."""

import json

import pyarrow.parquet as pq
import pytest
from helpers import LITTLE_CACHE, kill_once, metrics_of, run_script, steps_of

SIZES = ["--prompts-per-step", 8, "--samples-per-prompt", 4, "--eval-rows", 8, "--tool-workers", 2]
SIZES += ["--replay-share", 0.5, *LITTLE_CACHE]
STEPS = ["--total-steps", 3, "--deterministic", "--dump-rollouts-every", 1, "--save-every", 1, "--keep-checkpoints", 9]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run_script("curiosity_rl.py", *SIZES, *STEPS, "--output-dir", folder, ranks=2)
    return folder


def data_of(run) -> list:
    """What the demo has written for itself, which takes ten seconds."""
    return [f"--{part}-data={run / 'data' / part}.parquet" for part in ("train", "eval")]


def rows_of(folder, step: int) -> list[dict]:
    return pq.read_table(folder / f"rollouts/step_{step:06d}.parquet").to_pylist()


def test_the_demo_looks_is_rewarded_and_replays(whole):
    steps = steps_of(whole)
    assert sorted(steps) == [0, 1, 2, 3]
    for step in range(1, 4):
        record = steps[step]
        assert 0 < record["policy/rollout_logprob_gap"] < 1e-4, "of new samples alone"
        assert 0 < record["tool/rapr"] < 1 and record["reward/call_cost"] <= 0 <= record["reward/curiosity"]
        shaped = record["reward/accuracy"] + record["reward/curiosity"] + record["reward/call_cost"]
        assert record["reward/mean"] == pytest.approx(shaped)
    assert steps[1]["replay/samples"] == 0 and max(steps[step]["replay/samples"] for step in (2, 3)) > 0
    for step in range(1, 4):
        rows = [row | {"rewards": json.loads(row["rewards"])} for row in rows_of(whole, step)]
        replayed = [row for row in rows if "born" in row["rewards"]]
        assert len(replayed) == steps[step]["replay/samples"]
        assert all(row["advantage"] == pytest.approx(row["rewards"]["advantage"]) for row in replayed)
        groups: dict[int, list] = {}
        for row in rows:
            groups.setdefault(row["prompt_index"], []).append(row)
        for group in groups.values():
            if "born" not in group[0]["rewards"]:
                equal = len({row["rewards"]["score"] for row in group}) == 1
                assert [row["advantage"] is None for row in group] == [equal] * len(group), "the filter"
                mean = sum(row["rewards"]["score"] for row in group) / len(group)
                for row in group if not equal else ():
                    assert row["advantage"] == pytest.approx(row["rewards"]["score"] - mean, abs=1e-6)


def test_kill_and_resume_with_a_replay_memory_equals_an_uninterrupted_run(whole, tmp_path):
    arguments = ["curiosity_rl.py", *SIZES, *STEPS, *data_of(whole), "--output-dir", tmp_path / "killed"]
    kill_once(*arguments, ranks=2, after_step=2)
    run_script(*arguments, ranks=2)
    assert any(record.get("event") == "resumed" for record in metrics_of(tmp_path / "killed"))
    assert steps_of(tmp_path / "killed") == steps_of(whole)
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (whole, tmp_path / "killed")]
    assert weights[0] == weights[1]


@pytest.mark.slow  # by default test_grpo_runs.py and test_ppo_runs.py start by torchrun
def test_by_torchrun(whole, tmp_path):
    """As its users start it; that a forked run is such a run, test_grpo_runs.py compares bit by bit."""
    few = ["--prompts-per-step", 4, "--samples-per-prompt", 4, "--total-steps", 1, "--no-eval-before"]
    few += ["--eval-rows", 2, "--max-response-tokens", 96]
    few += ["--engine", "hf", "--tool-workers", 1, *data_of(whole), "--output-dir", tmp_path]
    run_script("curiosity_rl.py", *few, ranks=1, fresh=True)
    assert 0 <= steps_of(tmp_path)[1]["policy/rollout_logprob_gap"] < 1e-4
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_replay_of_a_dump_with_replayed_samples_repeats_its_update(whole, tmp_path):
    steps = steps_of(whole)
    step = next(step for step in (3, 2) if steps[step]["replay/samples"])
    dump, before = whole / f"rollouts/step_{step:06d}.parquet", whole / f"checkpoints/step_{step - 1:06d}"
    replay = ["--replay", dump, "--resume", before, *data_of(whole), "--output-dir", tmp_path]
    run_script("curiosity_rl.py", *SIZES, *STEPS, *replay, ranks=2)
    names = ("policy/loss", "optim/grad_norm", "policy/rollout_logprob_gap", "reward/mean", "replay/samples")
    assert [steps_of(tmp_path)[step][n] for n in names] == [steps[step][n] for n in names]


@pytest.mark.slow
def test_evaluation_with_and_without_tools_side_by_side(tmp_path):
    """The demo's policy by its name: what it cannot read it guesses, without tools always."""
    options = ["--model", "tiny-vl", "--tools", "crop_image_normalized", "--max-prompt-tokens", 96, "--max-turns", 4]
    options += ["--max-response-tokens", 192, "--max-pixels", 12_544, "--max-frame-pixels", 12_544, "--dtype", "fp32"]
    options += LITTLE_CACHE
    evaluation = ["--eval-only", "--compare-tools", "--eval-rows", 32, "--eval-temperature", 1.0]
    done = run_script("curiosity_rl.py", *options, *evaluation, "--output-dir", tmp_path, ranks=2)
    header, line = done.stdout.strip().splitlines()[-2:]
    assert header.split() == ["source", "rows", "with", "tools", "without"]
    samples, blind = (
        pq.read_table(tmp_path / f"eval_samples{suffix}.parquet").to_pylist() for suffix in ("", "_without_tools")
    )
    assert [s["row"] for s in samples] == [s["row"] for s in blind] == list(range(32))
    assert any(s["calls"] for s in samples) and "<tool_call>" not in "".join(s["prompt"] for s in blind)
    accuracies = [sum(s["correct"] for s in part) / 32 for part in (samples, blind)]
    assert line.split()[:3] == ["tiny-vl", "32", f"{accuracies[0]:.3f}"] and f" {accuracies[1]:.3f} (" in line
    assert accuracies[0] > accuracies[1] + 0.2

"""curiosity_rl.py as its users run it, on the embedded vision policy: ranks, engines, crops."""

import pyarrow.parquet as pq
import pytest
from helpers import LITTLE_CACHE, ROOT, kill_once, metrics_of, run_script, steps_of

FEW_ROWS = [ROOT / "tests" / "workers" / "few_rows.py", "curiosity_rl.py"]
SIZES = ["--prompts-per-step", 8, "--samples-per-prompt", 2, "--eval-rows", 4, "--tool-workers", 2]
SIZES += ["--max-response-tokens", 96, *LITTLE_CACHE]
HF = ["--engine", "hf"]
STEPS = [
    "--total-steps",
    2,
    "--deterministic",
    "--dump-rollouts-every",
    1,
    "--save-every",
    1,
    "--keep-checkpoints",
    9,
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run_script(*FEW_ROWS, *SIZES, *STEPS, *HF, "--output-dir", folder)
    return folder


def data_of(run) -> list:
    """What the demo has written for itself."""
    return [f"--{part}-data={run / 'data' / part}.parquet" for part in ("train", "eval")]


def rows_of(folder, step: int) -> list[dict]:
    return pq.read_table(folder / f"rollouts/step_{step:06d}.parquet").to_pylist()


def check_demo(whole) -> None:
    """It looks, and is rewarded for that."""
    steps = steps_of(whole)
    assert sorted(steps) == [0, 1, 2]
    for step in (1, 2):
        record = steps[step]
        assert 0 < record["policy/rollout_logprob_gap"] < 1e-4
        assert (
            0 < record["tool/rapr"] < 1
            and record["reward/call_cost"] <= 0 <= record["reward/curiosity"]
        )
        shaped = record["reward/accuracy"] + record["reward/curiosity"] + record["reward/call_cost"]
        assert record["reward/mean"] == pytest.approx(shaped)
    kinds = set()
    for step in (1, 2):
        groups: dict[int, list] = {}
        for row in rows_of(whole, step):
            groups.setdefault(row["prompt_index"], []).append(row)
        for group in groups.values():
            scores = [row["score"] for row in group]
            equal = len(set(scores)) == 1
            kinds.add(equal)
            assert [row["advantage"] is None for row in group] == [equal] * len(group), "the filter"
            mean = sum(scores) / len(group)
            for row, score in zip(group, scores):
                assert equal or row["advantage"] == pytest.approx(score - mean, abs=1e-6)
    assert kinds == {True, False}, "groups that the filter drops, and others"


def test_the_demo_looks_and_is_rewarded(whole):
    check_demo(whole)


def test_a_resume_equals_an_uninterrupted_run(whole, tmp_path):
    """The last step, again from the checkpoint before it."""
    before = whole / "checkpoints/step_000001"
    options = [*data_of(whole), "--resume", before, "--output-dir", tmp_path]
    run_script("curiosity_rl.py", *SIZES, *STEPS, *HF, *options)
    assert steps_of(tmp_path) == {2: steps_of(whole)[2]}
    assert steps_of(whole)[2]["optim/grad_norm"] > 0
    weights = [
        (folder / "model" / "model.safetensors").read_bytes() for folder in (whole, tmp_path)
    ]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_kill_and_resume_with_vllm_equals_an_uninterrupted_run(tmp_path):
    """On two ranks."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_script(*FEW_ROWS, *SIZES, *STEPS, "--output-dir", whole, ranks=2)
    check_demo(whole)
    arguments = ["curiosity_rl.py", *SIZES, *STEPS, *data_of(whole), "--output-dir", killed]
    kill_once(*arguments, ranks=2, after_step=1)
    run_script(*arguments, ranks=2)
    assert any(record.get("event") == "resumed" for record in metrics_of(killed))
    assert steps_of(killed) == steps_of(whole)
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (whole, killed)]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_by_torchrun(whole, tmp_path):
    """As its users start it; that a forked run is such a run, test_grpo_runs.py compares bit by
    bit."""
    few = [
        "--prompts-per-step",
        4,
        "--samples-per-prompt",
        4,
        "--total-steps",
        1,
        "--no-eval-before",
    ]
    few += ["--eval-rows", 2, "--max-response-tokens", 96]
    few += ["--engine", "hf", "--tool-workers", 1, *data_of(whole), "--output-dir", tmp_path]
    run_script("curiosity_rl.py", *few, ranks=1, fresh=True)
    assert 0 <= steps_of(tmp_path)[1]["policy/rollout_logprob_gap"] < 1e-4
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_replay_of_a_dump_repeats_its_update(whole, tmp_path):
    dump, before = whole / "rollouts/step_000002.parquet", whole / "checkpoints/step_000001"
    replay = ["--replay", dump, "--resume", before, *data_of(whole), "--output-dir", tmp_path]
    run_script("curiosity_rl.py", *SIZES, *STEPS, *HF, *replay)
    names = ("policy/loss", "optim/grad_norm", "policy/rollout_logprob_gap", "reward/mean")
    assert [steps_of(tmp_path)[2][n] for n in names] == [steps_of(whole)[2][n] for n in names]

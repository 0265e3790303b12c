"""grpo.py with programs of the embedded policy that writes them: real vLLM, real sandboxes."""

import json
import re

import pyarrow.parquet as pq
import pytest
from helpers import LITTLE_CACHE, ROOT, kill_once, metrics_of, run_script, steps_of

FEW_ROWS = [ROOT / "tests" / "workers" / "few_rows.py", "grpo.py"]
POLICY = [
    "--model",
    "tiny-vl-python",
    "--tools",
    "python",
    "--max-turns",
    4,
    "--dtype",
    "fp32",
    "--learning-rate",
    1e-4,
]
SIZES = [
    "--prompts-per-step",
    4,
    "--samples-per-prompt",
    4,
    "--max-prompt-tokens",
    64,
    "--max-response-tokens",
    320,
]
SIZES += [
    "--max-pixels",
    12_544,
    "--max-frame-pixels",
    12_544,
    "--eval-rows",
    4,
    "--tool-workers",
    2,
    *LITTLE_CACHE,
]
GROUPS = [
    "--tool-bonus",
    0.1,
    "--oversample",
    1.5,
    "--dynamic-sampling",
    2,
    "--advantage",
    "group-mean",
]
GROUPS += ["--learning-rate", 1e-4]
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
def printed(tmp_path_factory):
    """What the run of `whole` prints."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, run_script(*FEW_ROWS, *POLICY, *SIZES, *GROUPS, *STEPS, "--output-dir", folder)


@pytest.fixture(scope="module")
def whole(printed):
    return printed[0]


SAMPLE = re.compile(r"^--- step .*?(?=^step )", re.MULTILINE | re.DOTALL)
OURS = ("needs per rank", "grpo.py: ", "64 prompts; ", "step ", "done: ", "... ")


def test_nothing_but_ours_is_printed(printed):
    folder, done = printed
    lines = SAMPLE.sub("", done.stdout).splitlines()
    assert [
        line for line in lines if not line.startswith((*OURS, f"{folder}/data/"))
    ] == [] and done.stderr == ""
    assert len(lines) >= 10 and lines[-1].startswith("done: ")


def test_an_evaluation_runs_programs_and_pays_no_bonus(whole):
    """After two steps the policy looks before it answers."""
    for step in (0, 2):
        record = steps_of(whole)[step]
        assert record["eval/reward"] == record["eval/accuracy"]
        samples = pq.read_table(whole / f"eval/step_{step:06d}.parquet").to_pylist()
        assert len(samples) == 4 and {sample["score"] for sample in samples} <= {0.0, 1.0}
    assert any(sample["calls"] > sample["call_errors"] and sample["correct"] for sample in samples)
    assert "image_clue_1" in " ".join(sample["trajectory"] for sample in samples)


def data_of(run) -> list:
    return [f"--{part}-data={run / 'data' / part}.parquet" for part in ("train", "eval")]


def test_programs_are_run_rewarded_and_trained_on(whole):
    steps = steps_of(whole)
    assert sorted(steps) == [0, 1, 2]
    timed = [record for record in metrics_of(whole) if "time/rollout_s" in record]
    busy = [(record["time/engine_s"], record["time/tools_s"]) for record in timed]
    assert all(
        min(both) > 0 and sum(both) < timed["time/rollout_s"]
        for both, timed in zip(busy, timed, strict=True)
    )
    for step in (1, 2):
        record = steps[step]
        assert 0 < record["policy/rollout_logprob_gap"] < 1e-4 and record["optim/grad_norm"] > 0
        assert 0 < record["tool/acted"] < 1 and 0 < record["tool/error_rate"] < 1
        assert record["reward/mean"] == pytest.approx(
            record["reward/accuracy"] + record["reward/tool_bonus"]
        )
        rows = pq.read_table(whole / f"rollouts/step_{step:06d}.parquet").to_pylist()
        trained = {row["prompt_index"] for row in rows if row["advantage"] is not None}
        assert len(trained) <= 4 < len({row["prompt_index"] for row in rows}) and len(rows) % 4 == 0
        for row in rows:
            calls = json.loads(row["calls"])
            tool_bonus = json.loads(row["terms"])["tool_bonus"]
            useful = sum(call["info"]["acted"] for call in calls)
            is_right = json.loads(row["rewards"])["score"] == 1.0
            assert tool_bonus == pytest.approx(0.1 * useful * is_right)
            assert row["score"] == pytest.approx(is_right + tool_bonus)
            for call in calls:
                assert "code" in call["arguments"] and call["error"] == (
                    "Execution error" in call["text"]
                )


@pytest.mark.slow  # by default test_curiosity_runs.py does, with pictures and tools
def test_kill_and_resume_and_replay(tmp_path):
    """On two ranks. With --deterministic each block starts from the transcript, so that a resume
    repeats a step bit for bit."""
    whole = tmp_path / "whole"
    run_script(*FEW_ROWS, *POLICY, *SIZES, *GROUPS, *STEPS, "--output-dir", whole, ranks=2)
    arguments = ["grpo.py", *POLICY, *SIZES, *GROUPS, *STEPS, *data_of(whole)]
    kill_once(*arguments, "--output-dir", tmp_path / "killed", ranks=2, after_step=1)
    run_script(*arguments, "--output-dir", tmp_path / "killed", ranks=2)
    assert any(record.get("event") == "resumed" for record in metrics_of(tmp_path / "killed"))
    assert steps_of(tmp_path / "killed") == steps_of(whole)
    weights = [
        (folder / "model" / "model.safetensors").read_bytes()
        for folder in (whole, tmp_path / "killed")
    ]
    assert weights[0] == weights[1]
    dump, before = whole / "rollouts/step_000002.parquet", whole / "checkpoints/step_000001"
    run_script(
        *arguments,
        "--replay",
        dump,
        "--resume",
        before,
        "--output-dir",
        tmp_path / "replay",
        ranks=2,
    )
    names = (
        "policy/loss",
        "optim/grad_norm",
        "policy/rollout_logprob_gap",
        "reward/mean",
        "reward/tool_bonus",
    )
    assert [steps_of(tmp_path / "replay")[2][n] for n in names] == [
        steps_of(whole)[2][n] for n in names
    ]

"""Runs in which nothing is trained: no token is left, or nothing but an evaluation was asked
for."""

import pyarrow.parquet as pq
import pytest
from helpers import metrics_of, run_script

STEPS = """
import SCRIPT
import torch
from common import ending, flags, script

real, steps = torch.optim.AdamW.step, []
torch.optim.AdamW.step = lambda *a, **k: (steps.append(1), real(*a, **k))[1]
ending.at_end.callback(lambda: print("optimizer steps:", len(steps)))
script.run(SCRIPT.main, *flags.parse(SCRIPT.Args, SCRIPT.DEMO, SCRIPT.__doc__))
"""
SMALL = ["--engine", "hf", "--dtype", "fp32", "--eval-rows", 4, "--max-response-tokens", 2]


@pytest.mark.parametrize("script", ["grpo.py", pytest.param("ppo.py", marks=pytest.mark.slow)])
def test_a_step_without_a_token_has_no_loss_and_no_kl(script, tmp_path):
    """All responses are truncated, and masked."""
    options = ["--mask-truncated", "--kl-loss-coef", 0.01]
    options += [
        "--total-steps",
        2,
        "--prompts-per-step",
        2,
        "--samples-per-prompt",
        2,
        "--minibatches",
        1,
        "--dump-rollouts-every",
        1,
    ]
    options += ["--critic-warmup-steps", 0] if script == "ppo.py" else []
    run_script(
        script, *SMALL, *options, "--no-eval-before", "--eval-every", 0, "--output-dir", tmp_path
    )
    steps = [record for record in metrics_of(tmp_path) if "reward/mean" in record]
    assert len(steps) == 2
    for step in steps:
        assert step["rollout/truncated"] == 1.0
        assert not {
            "optim/skipped_steps",
            "policy/rollout_logprob_gap",
            "policy/kl_to_ref",
            "policy/loss",
            "policy/entropy",
            "optim/grad_norm",
        } & set(step)
    for row in pq.read_table(tmp_path / "rollouts/step_000001.parquet").to_pylist():
        assert set(row["loss_mask"]) == {1}, "a dump says what was sampled, not what was trained"


@pytest.mark.slow  # by default test_grpo_runs.py evaluates alone
def test_an_evaluation_needs_no_step_left_for_the_policy(tmp_path):
    options = [
        "--model",
        "tiny",
        "--eval-only",
        "--critic-warmup-steps",
        3,
        "--output-dir",
        tmp_path,
    ]
    run_script("ppo.py", *SMALL, *options)
    (record,) = metrics_of(tmp_path)
    assert record["event"] == "eval_only" and record["eval/rows"] == 4


@pytest.mark.parametrize(
    "script, steps", [pytest.param("grpo", 2, marks=pytest.mark.slow), ("ppo", 4)]
)
def test_minibatches_that_train_nothing_take_no_step(script, steps, tmp_path):
    """Two of three prompts cannot be scored: one optimizer step an epoch, of policy and critic
    alike."""
    (tmp_path / "steps.py").write_text(STEPS.replace("SCRIPT", script))
    (tmp_path / "reward.py").write_text(
        "def fn(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert extra_info['index'] % 3 == 0\n    return len(solution_str) % 7\n"
    )
    options = [
        "--reward-function",
        f"{tmp_path}/reward.py:fn",
        "--minibatches",
        3,
        "--epochs-per-step",
        2,
    ]
    options += [
        "--prompts-per-step",
        3,
        "--samples-per-prompt",
        4,
        "--total-steps",
        1,
        "--max-rows",
        3,
    ]
    options += ["--critic-warmup-steps", 0] if script == "ppo" else []
    options += ["--max-response-tokens", 12, "--no-eval-before", "--eval-every", 0]
    done = run_script(tmp_path / "steps.py", *SMALL, *options, "--output-dir", tmp_path / "run")
    assert done.stdout.splitlines()[-1] == f"optimizer steps: {steps}"


REWARD = """
import pathlib

def fn(data_source, solution_str, ground_truth, extra_info=None):
    records = pathlib.Path(RECORDS)
    steps = records.read_text().count('"step":') if records.exists() else 0
    if SCORED[steps] == "n":
        raise OSError("the scorer is away")
    return len(solution_str) % 7
"""


@pytest.mark.parametrize(
    "script, ranks, steps",  # y: a step's responses are scored; n: none of them
    [
        ("grpo.py", 2, "ynnn"),
        pytest.param("grpo.py", 2, "ynynnn", marks=pytest.mark.slow),
        pytest.param("ppo.py", 0, "ynnn", marks=pytest.mark.slow),
        pytest.param("curiosity_rl.py", 0, "ynnn", marks=pytest.mark.slow),
    ],
)
def test_steps_without_a_score_train_nothing_and_three_in_a_row_end_the_run(
    script, ranks, steps, tmp_path
):
    """With a checkpoint, and in words, on all ranks together."""
    run = tmp_path / "run"
    reward = REWARD.replace("RECORDS", repr(str(run / "metrics.jsonl"))).replace(
        "SCORED", repr(steps)
    )
    (tmp_path / "reward.py").write_text(reward)
    options = [
        "--reward-function",
        f"{tmp_path}/reward.py:fn",
        "--prompts-per-step",
        2,
        "--samples-per-prompt",
        4,
    ]
    options += ["--minibatches", 1, "--no-eval-before", "--eval-every", 0, "--save-every", 0]
    options += ["--critic-warmup-steps", 0] if script == "ppo.py" else []
    options += ["--total-steps", len(steps) + 1, "--output-dir", run]
    done = run_script(
        script, *SMALL, *options, "--max-response-tokens", 12, ranks=ranks, check=False
    )
    assert done.returncode == 1, done.stderr[-3000:]
    records = [record for record in metrics_of(run) if "event" not in record]
    assert "".join("n" if "reward/unscored_steps" in record else "y" for record in records) == steps
    trained = [step for step, record in enumerate(records) if "optim/grad_norm" in record]
    assert trained == [step for step, letter in enumerate(steps) if letter == "y"]
    assert (run / "checkpoints" / "latest").read_text() == f"step_{len(steps):06d}"
    warning = "trains nothing: none of its responses could be scored"
    assert done.stdout.count(warning) == steps.count("n")
    told = (
        "no response of 3 steps in a row could be scored, for the reason above: the run ends at "
        f"step {len(steps)};"
    )
    assert told in done.stderr

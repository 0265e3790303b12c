"""Runs in which nothing is trained: no token is left, or nothing but an evaluation was asked for."""

import pytest
from conftest import metrics_of, run_script

SMALL = ["--engine", "hf", "--dtype", "fp32", "--eval-rows", 4, "--max-response-tokens", 2]


@pytest.mark.parametrize("script", ["grpo.py", "ppo.py"])
def test_a_step_without_a_token_leaves_the_kl_coefficient_as_it_is(script, tmp_path):
    """All responses are truncated, and masked; the controller would like to adapt to a KL of nothing."""
    options = ["--mask-truncated", "--kl-in", "loss", "--kl-coef", 0.01, "--kl-estimator", "k2", "--kl-target", 0.1]
    options += ["--total-steps", 2, "--prompts-per-step", 2, "--samples-per-prompt", 2, "--minibatches", 1]
    options += ["--critic-warmup-steps", 0] if script == "ppo.py" else []
    run_script(script, *SMALL, *options, "--no-eval-before", "--eval-every", 0, "--output-dir", tmp_path)
    steps = [record for record in metrics_of(tmp_path) if "reward/mean" in record]
    assert [step["policy/kl_coef"] for step in steps] == [0.01, 0.01]
    for step in steps:
        assert step["rollout/truncated"] == 1.0 and step["optim/skipped_steps"] == 0.0
        assert not {"policy/kl_to_ref", "policy/loss", "policy/entropy", "optim/grad_norm"} & set(step)


def test_an_evaluation_needs_no_step_left_for_the_policy(tmp_path):
    options = ["--model", "tiny", "--eval-only", "--critic-warmup-steps", 3, "--output-dir", tmp_path]
    run_script("ppo.py", *SMALL, *options)
    (record,) = metrics_of(tmp_path)
    assert record["event"] == "eval_only" and record["eval/rows"] == 4

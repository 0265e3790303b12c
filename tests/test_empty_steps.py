"""Runs in which nothing is trained: no token is left, or nothing but an evaluation was asked for."""

import pytest
from helpers import metrics_of, run_script

STEPS = """
import SCRIPT as script
import torch
from common import distributed, flags, processes

real, steps = torch.optim.AdamW.step, []
torch.optim.AdamW.step = lambda *a, **k: (steps.append(1), real(*a, **k))[1]
processes.at_end.append(lambda: print("optimizer steps:", len(steps)))
distributed.run(script.main, *flags.parse(script.Args, script.DEMO, script.__doc__))
"""
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
        assert step["rollout/truncated"] == 1.0
        assert not {
            "optim/skipped_steps",
            "policy/rollout_logprob_gap",
            "policy/kl_to_ref",
            "policy/loss",
            "policy/entropy",
            "optim/grad_norm",
        } & set(step)


def test_an_evaluation_needs_no_step_left_for_the_policy(tmp_path):
    options = ["--model", "tiny", "--eval-only", "--critic-warmup-steps", 3, "--output-dir", tmp_path]
    run_script("ppo.py", *SMALL, *options)
    (record,) = metrics_of(tmp_path)
    assert record["event"] == "eval_only" and record["eval/rows"] == 4


@pytest.mark.parametrize("script, steps", [("grpo", 2), ("ppo", 3)])
def test_minibatches_that_train_nothing_take_no_step(script, steps, tmp_path):
    """Two of three prompts cannot be scored: one optimizer step an epoch, of policy and critic alike."""
    (tmp_path / "steps.py").write_text(STEPS.replace("SCRIPT", script))
    (tmp_path / "reward.py").write_text(
        "def fn(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert extra_info['index'] % 3 == 0\n    return len(solution_str) % 7\n"
    )
    options = ["--reward-function", f"{tmp_path}/reward.py:fn", "--minibatches", 3, "--epochs-per-step", 2]
    options += ["--prompts-per-step", 3, "--samples-per-prompt", 4, "--total-steps", 1, "--max-rows", 3]
    options += ["--critic-warmup-steps", 0, "--critic-epochs", 1] if script == "ppo" else []
    options += ["--max-response-tokens", 12, "--no-eval-before", "--eval-every", 0]
    done = run_script(tmp_path / "steps.py", *SMALL, *options, "--output-dir", tmp_path / "run")
    assert done.stdout.splitlines()[-1] == f"optimizer steps: {steps}"

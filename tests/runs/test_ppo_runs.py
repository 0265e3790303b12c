"""ppo.py as its users run it: real torchrun ranks, real vLLM, the embedded policy."""

import math
import shutil

import pytest
from helpers import LITTLE_CACHE, kill_once, metrics_of, run_script, steps_of
from model_folders import save_reward_model

SMALL = [
    "--prompts-per-step",
    6,
    "--samples-per-prompt",
    2,
    "--max-response-tokens",
    48,
    "--eval-rows",
    16,
]
SMALL += [
    "--max-rows",
    64,
    "--total-steps",
    4,
    "--save-every",
    2,
    "--eval-every",
    2,
    "--critic-warmup-steps",
    1,
]
SMALL += [
    "--minibatches",
    4,
    "--warmup-steps",
    2,
    "--learning-rate",
    1e-4,
    "--critic-learning-rate",
    1e-3,
]


@pytest.mark.slow  # by default test_grpo_runs.py and test_curiosity_runs.py do
@pytest.mark.parametrize(
    "ranks, engine, dtype",
    [
        (1, "hf", "auto"),  # bf16 on processors that multiply it
        (1, "vllm", "bf16"),
        (2, "hf", "fp16"),
    ],
)
def test_kill_and_resume_equals_an_uninterrupted_run(tmp_path, ranks, engine, dtype):
    """Both models, optimizers and loss scales, both KL terms, a reward model."""
    options = [
        *SMALL,
        "--engine",
        engine,
        "--dtype",
        dtype,
        "--kl-reward-coef",
        0.05,
        "--kl-loss-coef",
        0.05,
    ]
    options += LITTLE_CACHE if engine == "vllm" else []
    options += ["--reward-model", save_reward_model(tmp_path / "reward_model")]
    run_script("ppo.py", *options, "--output-dir", tmp_path / "whole", ranks=ranks)
    kill_once("ppo.py", *options, "--output-dir", tmp_path / "killed", ranks=ranks, after_step=3)
    assert (tmp_path / "killed" / "checkpoints" / "latest").read_text() == "step_000002"
    run_script("ppo.py", *options, "--output-dir", tmp_path / "killed", ranks=ranks)

    whole, killed = steps_of(tmp_path / "whole"), steps_of(tmp_path / "killed")
    assert whole == killed
    (resumed,) = [r for r in metrics_of(tmp_path / "killed") if r.get("event") == "resumed"]
    assert resumed["step"] == 2
    weights = [
        (tmp_path / name / "model" / "model.safetensors").read_bytes()
        for name in ("whole", "killed")
    ]
    assert weights[0] == weights[1], "resumed weights differ"

    assert whole[1]["value/mean"] == 0.0 and "policy/loss" not in whole[1], (
        "the critic begins at 0, and alone"
    )
    assert whole[2]["value/mean"] != 0.0 and "policy/loss" in whole[2]
    assert whole[2]["optim/lr"] == whole[1]["value/lr"] / 10, (
        "the policy's schedule begins when its training does"
    )
    assert all(math.isfinite(whole[step]["reward/model_mean"]) for step in whole if step)


def test_a_run_that_never_trains_its_policy_is_refused(tmp_path):
    done = run_script(
        "ppo.py", *SMALL, "--critic-warmup-steps", 4, "--output-dir", tmp_path / "run", check=False
    )
    assert (
        done.returncode != 0
        and "--critic-warmup-steps 4 of 4: none is left for the policy" in done.stdout + done.stderr
    )


@pytest.mark.slow  # by default test_grpo_runs.py and test_curiosity_runs.py do
def test_replay_repeats_an_update_bit_for_bit_and_evaluation_repeats_itself(tmp_path):
    options = [
        *SMALL,
        "--engine",
        "hf",
        "--dump-rollouts-every",
        1,
        "--save-every",
        1,
        "--keep-checkpoints",
        9,
    ]
    options += [
        "--total-steps",
        3,
        "--eval-every",
        0,
        "--max-response-tokens",
        48,
        "--no-eval-before",
    ]
    options += ["--reward-model", save_reward_model(tmp_path / "reward_model")]
    run_script("ppo.py", *options, "--output-dir", tmp_path / "run", ranks=2)
    shutil.rmtree(tmp_path / "reward_model")  # the dump has its scores
    dump = tmp_path / "run" / "rollouts" / "step_000003.parquet"
    again = ["--replay", dump, "--resume", tmp_path / "run" / "checkpoints" / "step_000002"]
    run_script("ppo.py", *options, *again, "--output-dir", tmp_path / "again", ranks=2)
    first, second = steps_of(tmp_path / "run")[3], steps_of(tmp_path / "again")[3]
    same = [key for key in second if key.startswith(("policy/", "value/", "optim/", "reward/"))]
    assert len(same) > 15 and {key: first[key] for key in same} == {
        key: second[key] for key in same
    }

    # evaluation of what was saved needs the policy alone
    evaluation = ["--eval-only", "--engine", "hf", "--eval-rows", 16, "--max-response-tokens", 48]
    run_script(
        "ppo.py",
        *evaluation,
        "--resume",
        tmp_path / "run",
        "--output-dir",
        tmp_path / "eval",
        ranks=2,
    )
    (record,) = [r for r in metrics_of(tmp_path / "eval") if r.get("event") == "eval_only"]
    assert record["eval/accuracy"] == steps_of(tmp_path / "run")[3]["eval/accuracy"]

"""The real trackers, without a network: what is theirs is in their files. They are optional, and so is this test."""

import json
import os
import sqlite3
import sys

import pytest
from helpers import ROOT, metrics_of, run_script

REWARD = """
def shaped(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(len(solution_str) % 2), "format": 0.25, "mean": 9.0}
"""


@pytest.mark.slow
def test_a_run_its_resume_and_an_evaluation_in_every_tracker(tmp_path):
    """As docs/metrics.md has it; wandb and SwanLab without a key, so offline."""
    for name in ("tensorboard", "wandb", "trackio", "swanlab"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install tensorboard wandb trackio swanlab")
    (tmp_path / "reward.py").write_text(REWARD)
    run = tmp_path / "my-run"
    flags = ["--model", "tiny", "--engine", "hf", "--prompts-per-step", 2, "--samples-per-prompt", 2, "--eval-rows", 4]
    flags += ["--max-prompt-tokens", 64, "--max-response-tokens", 16, "--no-eval-before", "--save-every", 1]
    flags += ["--reward-function", f"{tmp_path}/reward.py:shaped", "--output-dir", run]
    flags += ["--log", "tensorboard,wandb,trackio,swanlab"]
    environment = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path), "NETRC": "/nowhere"}
    said = []
    for more in (["--total-steps", 1], ["--total-steps", 2], ["--eval-only"]):
        left_out = ("--save-every", 1, "--no-eval-before") if more == ["--eval-only"] else ()
        said.append(
            run_script(
                "grpo.py", *(x for x in flags if x not in left_out or x == 1), *more, env=environment, fresh=True
            ).stdout
        )

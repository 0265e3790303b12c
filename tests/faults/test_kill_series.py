"""SIGKILL at random moments of a run - sampling, updating, saving - and it ends as if nothing had
happened."""

import random
import subprocess
import time

import pytest
from helpers import ROOT, kill_all, metrics_of, run_script, script_environment, steps_of, torchrun

ROLLOUTS = [
    "--prompts-per-step",
    6,
    "--samples-per-prompt",
    4,
    "--max-rows",
    64,
    "--minibatches",
    2,
]
PICTURES = [
    "--prompts-per-step",
    4,
    "--samples-per-prompt",
    4,
    "--tool-workers",
    2,
    "--deterministic",
]
OPTIONS = {
    "grpo.py": [*ROLLOUTS, "--max-response-tokens", 96],
    "ppo.py": [*ROLLOUTS, "--max-response-tokens", 48, "--critic-warmup-steps", 2],
    "curiosity_rl.py": [*PICTURES, "--max-response-tokens", 128],
    "distill.py": [*ROLLOUTS, "--max-response-tokens", 48],
    "sft.py": ["--batch-size", 32],
}


def step_seconds(run_dir):
    """{step: its seconds}, as far as the run has come."""
    records = metrics_of(run_dir) if (run_dir / "metrics.jsonl").exists() else []
    return {r["step"]: r["time/step_s"] for r in records if "time/step_s" in r}


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, ranks, engine, kills",
    [
        ("grpo.py", 1, "vllm", 30),
        ("grpo.py", 2, "hf", 30),
        ("ppo.py", 1, "vllm", 10),
        ("ppo.py", 2, "hf", 10),
        ("curiosity_rl.py", 2, "hf", 10),
        ("distill.py", 2, "hf", 10),
        ("sft.py", 2, None, 10),
    ],
)
def test_kills(tmp_path, script, ranks, engine, kills):
    options = [
        *OPTIONS[script],
        "--eval-rows",
        8,
        "--eval-every",
        9,
        "--save-every",
        1,
        "--total-steps",
        2 * kills,
    ]
    options += ["--no-eval-before", *(["--engine", engine] if engine else [])]
    run_script(script, *options, "--output-dir", tmp_path / "whole", ranks=ranks, timeout=1800)
    command = torchrun(script, *options, "--output-dir", tmp_path / "killed", ranks=ranks)
    metrics, rng, killed = tmp_path / "killed" / "metrics.jsonl", random.Random(ranks), 0
    begin, end = (
        (tmp_path / "whole" / name).stat().st_mtime for name in ("config.json", "metrics.jsonl")
    )
    a_step = (end - begin) / (2 * kills)  # and its checkpoint
    before = step_seconds(tmp_path / "whole")
    while killed < kills:
        with (tmp_path / "log").open("a") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, env=script_environment()
            )
        size = metrics.stat().st_size if metrics.exists() else 0
        while (
            process.poll() is None and (metrics.stat().st_size if metrics.exists() else 0) <= size
        ):
            time.sleep(0.01)  # loading; then the first new record, of a resume or a step
        now = step_seconds(tmp_path / "killed")
        # than the machine was: others work beside this
        slower = now[max(now)] / before[max(now)] if now else 1.0
        time.sleep(rng.uniform(0, 2.0 * a_step * slower))
        if process.poll() is not None:
            break
        kill_all(process)
        killed += 1
    assert killed >= kills * 5 // 6, (
        f"done after {killed} kills: {(tmp_path / 'log').read_text()[-3000:]}"
    )
    run_script(script, *options, "--output-dir", tmp_path / "killed", ranks=ranks, timeout=1800)
    resumed = [r for r in metrics_of(tmp_path / "killed") if r.get("event") == "resumed"]
    print(f"\n{script}, {ranks} ranks, {engine}: {killed} kills, {len(resumed)} resumes")
    assert len(resumed) > killed // 2, "most are killed after their first checkpoint"
    weights = [
        (tmp_path / name / "model" / "model.safetensors").read_bytes()
        for name in ("whole", "killed")
    ]
    assert weights[0] == weights[1]
    assert steps_of(tmp_path / "whole") == steps_of(tmp_path / "killed")

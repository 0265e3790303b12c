"""SIGKILL at thirty random moments of a run - sampling, updating, saving - and it ends as if nothing had happened."""

import random
import subprocess
import time

import pytest
from conftest import ROOT, kill_all, metrics_of, run_script, script_environment, steps_of, torchrun

KILLS = 30
STEPS = 60
OPTIONS = ["--prompts-per-step", 6, "--samples-per-prompt", 4, "--max-response-tokens", 96, "--max-rows", 64]
OPTIONS += ["--eval-rows", 8, "--eval-every", 9, "--minibatches", 2, "--save-every", 1, "--total-steps", STEPS]


@pytest.mark.slow
@pytest.mark.parametrize("ranks, engine", [(1, "vllm"), (2, "hf")])
def test_thirty_kills(tmp_path, ranks, engine):
    options = [*OPTIONS, "--engine", engine]
    run_script("grpo.py", *options, "--output-dir", tmp_path / "whole", ranks=ranks, timeout=1800)
    command = torchrun("grpo.py", *options, "--output-dir", tmp_path / "killed", ranks=ranks)
    metrics, rng, kills = tmp_path / "killed" / "metrics.jsonl", random.Random(ranks), 0
    while kills < KILLS:
        with (tmp_path / "log").open("a") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=script_environment())
        size = metrics.stat().st_size if metrics.exists() else 0
        while process.poll() is None and (metrics.stat().st_size if metrics.exists() else 0) <= size:
            time.sleep(0.01)  # loading; then the first new record, of a resume or a step
        time.sleep(rng.uniform(0, 2.5))
        if process.poll() is not None:
            break
        kill_all(process)
        kills += 1
    assert kills >= KILLS - 5, f"done after {kills} kills: {(tmp_path / 'log').read_text()[-3000:]}"
    run_script("grpo.py", *options, "--output-dir", tmp_path / "killed", ranks=ranks, timeout=1800)
    resumed = [r for r in metrics_of(tmp_path / "killed") if r.get("event") == "resumed"]
    print(f"\n{ranks} ranks, {engine}: {kills} kills, {len(resumed)} resumes")
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1]
    assert steps_of(tmp_path / "whole") == steps_of(tmp_path / "killed")

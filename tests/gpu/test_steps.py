"""Each script for three steps on a real GPU: vLLM on CUDA, sleep and wake, engine and trainer in
agreement.

python -m pytest tests/gpu/test_steps.py -q -s
"""

import json

import pytest
import torch
from helpers import ROOT, run_script, steps_of

from common.hub import resolve_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GAP = {"bf16": 0.05, "fp16": 0.01}
SIZES = ["--total-steps", 3, "--prompts-per-step", 8, "--samples-per-prompt", 4]
SIZES += ["--engine-memory", 2]
EVAL = ["--eval-rows", 64, "--eval-every", 0]


def check_three_steps(folder, dtype: str) -> dict[int, dict]:
    """Weights move: a sync that did not arrive, or was lost in sleep, would widen the gap."""
    steps = steps_of(folder)
    for step in (1, 2, 3):
        assert steps[step]["policy/rollout_logprob_gap"] < GAP[dtype]
        assert steps[step]["optim/skipped_steps"] == 0
    assert any(steps[step].get("optim/grad_norm", 0.0) > 0 for step in (1, 2, 3))
    assert (folder / "model" / "model.safetensors").is_file()
    return steps


@pytest.mark.parametrize("sleep_level", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_grpo(tmp_path, dtype, sleep_level):
    options = ["--dtype", dtype, "--sleep-level", sleep_level, "--output-dir", tmp_path]
    print(run_script("grpo.py", *SIZES, *EVAL, *options).stdout)
    check_three_steps(tmp_path, dtype)


@pytest.mark.parametrize(
    "dtype, attention, options",
    [
        ("bf16", "flex", []),
        ("bf16", "flex", ["--compile", "--gradient-checkpointing"]),
        ("bf16", "sdpa", ["--offload", "optimizer", "--strategy", "ddp"]),
        ("bf16", "flex", ["--lora-rank", 4, "--offload", "optimizer,base"]),
        ("fp16", "sdpa", []),
    ],
)
def test_grpo_of_smollm2(tmp_path, dtype, attention, options):
    prepare = ["-m", "common.prepare.countdown", "--out", tmp_path, "--template", "qwen-instruct"]
    run_script(*prepare, "--train-size", 64, "--test-size", 64)
    data = ["--model", resolve_model("smollm2"), "--train-data", tmp_path / "train.parquet"]
    lengths = ["--max-prompt-tokens", 300, "--max-response-tokens", 256, "--learning-rate", 1e-5]
    kind = ["--dtype", dtype, "--attention", attention, "--output-dir", tmp_path / "run"]
    print(run_script("grpo.py", *options, *data, *SIZES, *lengths, *kind).stdout)
    check_three_steps(tmp_path / "run", dtype)


@pytest.mark.parametrize(
    "dtype, attention, sleep_level, options",
    [("bf16", "flex", 1, ["--compile"]), ("bf16", "sdpa", 2, []), ("fp16", "sdpa", 1, [])],
)
def test_curiosity_rl_of_tiny_vl(tmp_path, dtype, attention, sleep_level, options):
    kind = ["--dtype", dtype, "--attention", attention, "--sleep-level", sleep_level]
    options = [*SIZES, *EVAL, *options, *kind, "--output-dir", tmp_path]
    print(run_script("curiosity_rl.py", *options).stdout)
    steps = check_three_steps(tmp_path, dtype)
    assert all(steps[step]["tool/calls"] > 0 for step in (1, 2, 3))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sft(tmp_path, dtype):
    """From nothing; and what is exported is the same model in vLLM."""
    options = ["--total-steps", 10, "--warmup-steps", 2, "--eval-rows", 64, "--dtype", dtype]
    print(run_script("sft.py", *options, "--output-dir", tmp_path / "sft").stdout)
    steps = steps_of(tmp_path / "sft")
    assert steps[10]["eval/loss"] < 0.9 * steps[0]["eval/loss"]
    worker = ROOT / "tests" / "workers" / "engine_gap.py"
    done = run_script(worker, "--model", tmp_path / "sft" / "model", "--dtype", dtype)
    assert json.loads(done.stdout.strip().splitlines()[-1])["synced"] < GAP[dtype]

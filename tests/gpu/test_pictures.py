"""grpo.py on a real GPU with pictures and tools: a tiny Qwen2.5-VL. Skipped without CUDA."""

import pytest
import torch
from helpers import run_script, steps_of
from vl import vllm_knows_times, write_rows, write_tiny_vl

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("dtype,attention", [("bf16", "flex"), ("bf16", "sdpa"), ("fp16", "sdpa")])
def test_three_steps_with_pictures_and_tools(tmp_path, dtype, attention):
    write_tiny_vl(tmp_path / "model", taught=True)
    data = write_rows(tmp_path / "rows.parquet", videos=vllm_knows_times())
    options = ["--model", tmp_path / "model", "--train-data", data, "--media-root", tmp_path]
    options += ["--tools", "visual", "--engine-memory", 2]
    options += ["--min-pixels", 784, "--max-pixels", 16 * 784, "--max-frame-pixels", 4 * 784]
    options += ["--max-prompt-tokens", 400, "--max-response-tokens", 400, "--max-turn-tokens", 80]
    options += ["--prompts-per-step", 8, "--samples-per-prompt", 4, "--total-steps", 3]
    options += ["--learning-rate", 1e-4, "--dtype", dtype, "--attention", attention]
    done = run_script("grpo.py", *options, "--output-dir", tmp_path / "run")
    print(done.stdout)
    steps = steps_of(tmp_path / "run")
    for step in (1, 2, 3):
        assert steps[step]["policy/rollout_logprob_gap"] < {"bf16": 0.05, "fp16": 0.01}[dtype]
        assert steps[step]["optim/skipped_steps"] == 0
        assert steps[step]["tool/calls"] > 0

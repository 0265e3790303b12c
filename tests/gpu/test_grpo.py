"""grpo.py on a real GPU: vLLM on CUDA, sleep and wake, engine and trainer in agreement. Skipped without CUDA.

python -m pytest tests/gpu -q -s
"""

import pytest
import torch
from conftest import metrics_of, run_script

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SIZES = ["--total-steps", 3, "--prompts-per-step", 8, "--samples-per-prompt", 4]
SIZES += ["--eval-rows", 64, "--eval-every", 0]


@pytest.mark.parametrize("sleep_level", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_three_steps(tmp_path, dtype, sleep_level):
    """Weights move (lr 2e-4), so a sync that did not arrive, or was lost in sleep, would open the gap."""
    options = ["--dtype", dtype, "--sleep-level", sleep_level, "--engine-memory", 2, "--output-dir", tmp_path]
    done = run_script("grpo.py", *SIZES, *options, ranks=1)
    steps = [record for record in metrics_of(tmp_path) if record.get("step", 0) > 0]
    print(done.stdout)
    assert len(steps) == 3
    for record in steps:
        assert record["policy/rollout_logprob_gap"] < {"bf16": 0.05, "fp16": 0.01}[dtype]
        assert record["optim/skipped_steps"] == 0 and record["optim/grad_norm"] > 0
    assert (tmp_path / "model" / "model.safetensors").is_file()

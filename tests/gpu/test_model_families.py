"""Families of models on a real GPU: two steps of grpo.py each, engine and trainer in agreement.

python -m pytest tests/gpu/test_model_families.py -q -s
"""

import pytest
import torch
from family_models import write_family
from helpers import ROOT, run_script, steps_of

from common.assets.build.tiny import write_demo_data

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

OPTIONS = ["--total-steps", 2, "--prompts-per-step", 4, "--samples-per-prompt", 4]
OPTIONS += ["--max-prompt-tokens", 256, "--max-response-tokens", 64, "--learning-rate", 1e-4]
OPTIONS += ["--reward-function", ROOT / "tests/workers/kinds.py:kinds"]
OPTIONS += ["--engine-memory", 1, "--engine-args", '{"enforce_eager": true}', "--eval-every", 0]


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss", "qwen3_moe", "falcon_h1"])
def test_a_family_is_sampled_and_trained_alike(family, tmp_path):
    """Plain; with windows, with sinks, with experts, and with recurrent layers."""
    model = write_family(tmp_path / "model", family)
    write_demo_data(tmp_path / "data")
    options = ["--model", model, "--train-data", tmp_path / "data/train.parquet", *OPTIONS]
    print(run_script("grpo.py", *options, "--output-dir", tmp_path / "run").stdout)
    steps = steps_of(tmp_path / "run")
    for step in (1, 2):
        assert steps[step]["policy/rollout_logprob_gap"] < 0.1
        assert steps[step]["optim/grad_norm"] > 0

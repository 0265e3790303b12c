"""ppo.py on a real GPU: two models and optimizers beside the engine, and their offload to the host.
Skipped without CUDA.

python -m pytest tests/gpu -q -s
"""

import pytest
import torch
from helpers import metrics_of, run_script, steps_of
from model_folders import save_reward_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SIZES = ["--total-steps", 3, "--prompts-per-step", 32, "--critic-warmup-steps", 1]
SIZES += ["--engine-memory", 2, "--eval-rows", 64, "--eval-every", 0]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_three_steps_with_reference_and_reward_model(tmp_path, dtype):
    reward_model = save_reward_model(tmp_path / "reward_model")
    options = ["--kl-reward-coef", 0.01, "--reward-model", reward_model, "--dtype", dtype]
    done = run_script("ppo.py", *SIZES, *options, "--output-dir", tmp_path / "run", ranks=1)
    print(done.stdout)
    steps = [record for record in metrics_of(tmp_path / "run") if record.get("step", 0) > 0]
    assert len(steps) == 3
    assert steps[0]["value/mean"] == 0.0
    assert steps[2]["value/mean"] != 0.0
    for record in steps:
        assert record["policy/rollout_logprob_gap"] < {"bf16": 0.05, "fp16": 0.01}[dtype]
        assert record["optim/skipped_steps"] == 0
        assert record["value/grad_norm"] > 0


def test_offload_changes_no_number_of_the_update(tmp_path):
    """The same dumped rollout is replayed with everything on the device, and with everything idle
    on the host."""
    common = [*SIZES, "--kl-loss-coef", 0.01, "--critic-warmup-steps", 0]
    saved = ["--dump-rollouts-every", 1, "--save-every", 1, "--keep-checkpoints", 9]
    run_script("ppo.py", *common, *saved, "--output-dir", tmp_path / "run", ranks=1)
    again = ["--replay", tmp_path / "run" / "rollouts" / "step_000003.parquet"]
    again += ["--resume", tmp_path / "run" / "checkpoints" / "step_000002"]
    steps = {}
    peaks = {}
    for name, offload in (("on device", []), ("offloaded", ["--offload", "optimizer,reference"])):
        run_script("ppo.py", *common, *again, *offload, "--output-dir", tmp_path / name, ranks=1)
        steps[name] = {}
        for key, value in steps_of(tmp_path / name)[3].items():
            if key.startswith(("policy/", "value/", "optim/", "reward/")):
                steps[name][key] = value
        peaks[name] = metrics_of(tmp_path / name)[-1].get("memory/peak_gb")
    print(peaks)
    assert len(steps["on device"]) > 15
    # kernels with atomic additions are not deterministic
    for key, value in steps["on device"].items():
        assert steps["offloaded"][key] == pytest.approx(value, rel=1e-3, abs=1e-6), key

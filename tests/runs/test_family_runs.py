"""grpo.py on tiny random models of today's families: three steps, a kill, a resume, an export."""

from pathlib import Path

import pytest
from family_models import write_family
from helpers import LITTLE_CACHE, ROOT, kill_once, metrics_of, run_script, steps_of
from safetensors.torch import load_file
from vl import write_rows, write_tiny_vl

from common.assets.build.tiny import write_demo_data

OPTIONS = ["--prompts-per-step", 4, "--samples-per-prompt", 3, "--max-response-tokens", 24]
OPTIONS += ["--max-prompt-tokens", 256, "--max-rows", 32, "--eval-rows", 4, "--dtype", "fp32"]
OPTIONS += ["--reward-function", ROOT / "tests/workers/kinds.py:kinds", "--temperature", 1.5]
OPTIONS += ["--total-steps", 3, "--save-every", 1, "--eval-every", 0, "--learning-rate", 1e-3]
LORA = ["--lora-rank", 4]
# of pictures and crops; what a taught model calls, sometimes badly
SEES = ["--min-pixels", 784, "--max-pixels", 16 * 1024, "--max-frame-pixels", 4 * 1024]
SEES += ["--tools", "visual", "--tool-workers", 2, "--max-turn-tokens", 80]
SEES += ["--max-prompt-tokens", 400, "--max-response-tokens", 400, "--deterministic"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, engine, ranks, options",
    [
        ("qwen3_5_text", "hf", 2, []),
        ("qwen3_5_text", "hf", 1, LORA),
        ("falcon_h1", "vllm", 1, []),
        ("gemma3", "vllm", 1, []),
        ("qwen3_moe", "vllm", 2, []),
        ("gpt_oss", "vllm", 1, LORA),
        ("olmo3", "vllm", 1, ["--attention", "rows"]),
    ],
)
def test_a_run_is_killed_and_goes_on(family, engine, ranks, options, tmp_path):
    """Samples stay those of the trainer's weights, which move; the resumed run ends as the
    uninterrupted one."""
    model = write_family(tmp_path / "model", family)
    data = tmp_path / "data"
    write_demo_data(data)
    options = ["--model", model, "--train-data", data / "train.parquet", *options]
    options += ["--eval-data", data / "eval.parquet", "--engine", engine]
    steps = check_kill(model, [*OPTIONS, *options], ranks, tmp_path)
    assert steps.keys() == {0, 1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_vl_moe"])
def test_a_run_that_sees_and_calls_tools_is_killed_and_goes_on(kind, tmp_path):
    """With vLLM: prompts with pictures and videos, crops between turns."""
    model = write_tiny_vl(tmp_path / "model", taught=True, kind=kind)
    rows = write_rows(tmp_path / "rows.parquet")
    options = ["--model", model, "--train-data", rows, "--eval-data", rows]
    options += ["--media-root", tmp_path, "--engine", "vllm", *OPTIONS, *SEES]
    steps = check_kill(model, options, 1, tmp_path)
    for step in (1, 2, 3):
        assert steps[step]["tool/calls"] > 0


def check_kill(model: Path, options: list, ranks: int, tmp_path: Path) -> dict[int, dict]:
    """Compare a run of three steps with one that is killed and resumed. Returns its steps."""
    if "vllm" in options:
        options = [*options, *LITTLE_CACHE]
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    run_script("grpo.py", *options, "--output-dir", whole, ranks=ranks)
    kill_once("grpo.py", *options, "--output-dir", killed, ranks=ranks, after_step=2)
    run_script("grpo.py", *options, "--output-dir", killed, ranks=ranks)
    assert any(record.get("event") == "resumed" for record in metrics_of(killed))
    steps = steps_of(whole)
    assert steps_of(killed) == steps
    for step in (1, 2, 3):
        assert steps[step]["optim/grad_norm"] > 0
        assert steps[step]["policy/rollout_logprob_gap"] < 1e-4, step
    weights = load_file(whole / "model" / "model.safetensors")
    before = load_file(model / "model.safetensors")
    assert weights.keys() == before.keys()
    assert any((weights[name] != before[name]).any() for name in weights)
    resumed = load_file(killed / "model" / "model.safetensors")
    assert all((resumed[name] == weights[name]).all() for name in weights)
    return steps

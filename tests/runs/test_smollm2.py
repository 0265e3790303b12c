"""grpo.py and ppo.py on real pre-trained weights, in the combinations that the README promises.
Slow: minutes each."""

import json

import pytest
from helpers import is_emulated, metrics_of, run_script, steps_of
from model_folders import save_reward_model

pytestmark = pytest.mark.slow
SIZES = [
    "--prompts-per-step",
    4,
    "--samples-per-prompt",
    4,
    "--max-prompt-tokens",
    300,
    "--max-response-tokens",
    32,
]
SIZES += ["--total-steps", 3, "--eval-rows", 4, "--eval-every", 0, "--micro-batch-tokens", 2048]
GAP = {"fp32": 1e-4, "bf16": 0.05, "fp16": 0.01}


def skip_where_emulated(dtype: str) -> None:
    if is_emulated(dtype):
        pytest.skip(
            "this CPU has no bf16 instructions: on one such CPU a test had not ended after 10 "
            "minutes"
        )


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("countdown")
    sizes = ["--train-size", 64, "--test-size", 8]
    run_script(
        "-m", "common.prepare.countdown", "--out", folder, "--template", "qwen-instruct", *sizes
    )
    return ["--train-data", folder / "train.parquet", "--eval-data", folder / "test.parquet"]


@pytest.mark.parametrize(
    "ranks, dtype, options",
    [
        (1, "bf16", []),
        (2, "bf16", []),
        (2, "bf16", ["--strategy", "ddp"]),
        (1, "bf16", ["--engine", "hf"]),
        (1, "fp32", []),
        (2, "fp32", ["--minibatches", 2, "--epochs-per-step", 2]),
        (
            1,
            "bf16",
            ["--gradient-checkpointing", "--reduction", "dr_grpo", "--advantage", "group-mean"],
        ),
        (
            1,
            "fp16",
            ["--prompts-per-step", 2, "--samples-per-prompt", 2, "--max-response-tokens", 16],
        ),
    ],
)
def test_three_steps_of_grpo(tmp_path, data, ranks, dtype, options):
    skip_where_emulated(dtype)
    arguments = [
        "--model",
        "smollm2",
        *data,
        *SIZES,
        "--dtype",
        dtype,
        *options,
        "--output-dir",
        tmp_path,
    ]
    done = run_script("grpo.py", *arguments, ranks=ranks, timeout=1500)
    steps = [record for record in metrics_of(tmp_path) if record.get("step", 0) > 0]
    gaps = [record["policy/rollout_logprob_gap"] for record in steps]
    print(
        f"\n{ranks} ranks, {dtype} {options}: gap {gaps}, {steps[-1]['time/step_s']:.1f} s a step"
    )
    assert len(steps) == 3 and max(gaps) < GAP[dtype], done.stdout[-2000:]
    assert all(record["optim/skipped_steps"] == 0 for record in steps)


@pytest.mark.parametrize(
    "ranks, dtype, options",
    [
        (1, "bf16", ["--kl-reward-coef", 0.01]),
        (2, "bf16", ["--kl-loss-coef", 0.01]),
        (1, "fp32", ["--kl-loss-coef", 0.01, "--kl-estimator", "k2", "--gae-lambda", 0.95]),
        (2, "fp32", ["--kl-reward-coef", 0.01, "--kl-loss-coef", 0.01, "--critic-warmup-steps", 1]),
    ],
)
def test_three_steps_of_ppo_with_a_reward_model(tmp_path, data, ranks, dtype, options):
    skip_where_emulated(dtype)
    options = [
        *options,
        "--reward-model",
        save_reward_model(tmp_path / "reward_model"),
        "--minibatches",
        2,
    ]
    arguments = [
        "--model",
        "smollm2",
        *data,
        *SIZES,
        "--dtype",
        dtype,
        *options,
        "--output-dir",
        tmp_path / "run",
    ]
    done = run_script("ppo.py", *arguments, ranks=ranks, timeout=1500)
    steps = [record for record in metrics_of(tmp_path / "run") if record.get("step", 0) > 0]
    gaps = [record["policy/rollout_logprob_gap"] for record in steps]
    print(
        f"\n{ranks} ranks, {dtype} {options}: gap {gaps}, {steps[-1]['time/step_s']:.1f} s a step"
    )
    assert len(steps) == 3 and max(gaps) < GAP[dtype], done.stdout[-2000:]
    assert all(record["optim/skipped_steps"] == 0 for record in steps)
    assert steps[0]["value/mean"] == 0.0 and steps[2]["value/mean"] != 0.0


TOOL = '''
def add(a: float, b: float) -> str:
    """Add two numbers."""
    return f"{a + b:g}"
'''


def test_three_steps_with_a_tool(tmp_path):
    """Shown one call, SmolLM2 makes calls of its own, some malformed: they are executed, or told
    what is wrong."""
    (tmp_path / "tool.py").write_text(TOOL)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 5}}\n</tool_call>'
    shown = [
        ("user", "What is 2 + 5?"),
        ("assistant", call),
        ("tool", "7"),
        ("assistant", "#### 7"),
    ]
    with (tmp_path / "rows.jsonl").open("w") as file:
        for i in range(8):
            messages = [*shown, ("user", f"What is {10 + i} + {3 * i + 1}?")]
            prompt = [{"role": role, "content": content} for role, content in messages]
            truth = {"style": "rule", "ground_truth": str(11 + 4 * i)}
            file.write(
                json.dumps({"data_source": "gsm8k", "prompt": prompt, "reward_model": truth}) + "\n"
            )
    options = [
        "--train-data",
        tmp_path / "rows.jsonl",
        "--tools",
        f"{tmp_path / 'tool.py'}:add",
        "--dtype",
        "fp32",
    ]
    options += [
        "--prompts-per-step",
        4,
        "--samples-per-prompt",
        4,
        "--total-steps",
        3,
        "--micro-batch-tokens",
        2048,
    ]
    options += ["--max-prompt-tokens", 600, "--max-response-tokens", 200, "--max-turn-tokens", 64]
    run_script(
        "grpo.py", "--model", "smollm2", *options, "--output-dir", tmp_path / "run", timeout=1500
    )
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 3 and all(
        step["policy/rollout_logprob_gap"] < 1e-4 for step in steps.values()
    )
    assert all(step["tool/callers"] > 0 and step["tool/error_rate"] < 1 for step in steps.values())

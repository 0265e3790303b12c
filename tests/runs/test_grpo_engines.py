"""grpo.py's engines and ranks against each other: syncs, strategies, half precision."""

import json
import os

import pyarrow.parquet as pq
import pytest
import torch
from family_models import write_family
from helpers import ROOT, metrics_of, relative_l2, run_script, steps_of
from safetensors.torch import load_file
from vl import write_random, write_tied_llama

from common.assets.build.tiny import write_demo_data

SMALL = ["--prompts-per-step", 6, "--samples-per-prompt", 4, "--max-response-tokens", 96]
SMALL += ["--max-rows", 64, "--eval-rows", 16]
KINDS = ROOT / "tests" / "workers" / "kinds.py:kinds"


@pytest.mark.parametrize(
    "model, orders",
    [
        ("tied", ["--orders"]),
        pytest.param("tiny", [], marks=pytest.mark.slow),
        pytest.param("smollm2", [], marks=pytest.mark.slow),
    ],
)
def test_engine_and_trainer_agree_after_each_sync(model, orders, tmp_path):
    """Real vLLM, fp32. SmolLM2 ties its head to the embeddings, which a careless sync leaves
    stale."""
    model = write_tied_llama(tmp_path) if model == "tied" else model
    options = ["--model", model, "--dtype", "fp32", "--tokens", 8, *orders]
    done = run_script(ROOT / "tests" / "workers" / "engine_gap.py", *options)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    gaps = [result["synced"], result["resynced"], result["repeated"], *result["orders"].values()]
    assert len(gaps) == (10 if orders else 3) and max(gaps) < 1e-4, gaps
    assert result["stale"] > 10 * 1e-4, "the policy must move enough for a stale engine to show"
    assert result["preload"] == os.environ.get("LD_PRELOAD"), (
        "processes that we start load libraries of vLLM"
    )
    assert all(result["refused"].values()), result["refused"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, dtype, limit",
    [
        ("tiny", "fp32", 1e-4),
        ("tiny", "bf16", 0.05),
        ("tiny", "fp16", 1e-2),
        ("qwen3_moe", "fp32", 1e-4),
    ],
)
def test_engine_and_adapters_agree_after_each_sync(model, dtype, limit, tmp_path):
    """Adapters that do not reach the engine would show: the policy has moved by more than the gap.
    Those of a mixture are on its attention: experts are no linear layers in transformers."""
    if model != "tiny":
        model = write_family(tmp_path, model)
    options = ["--model", model, "--lora-rank", 4, "--dtype", dtype, "--orders"]
    done = run_script(ROOT / "tests" / "workers" / "engine_gap.py", *options)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    gaps = [result["synced"], result["resynced"], result["repeated"], *result["orders"].values()]
    assert len(gaps) == 10 and max(gaps) < limit and result["stale"] > 10 * limit, (
        gaps,
        result["stale"],
    )
    assert all(result["refused"].values()) and "adapters left out" in result["refused"], result[
        "refused"
    ]


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
KINDS_OF_MODELS = {
    "qwen3_moe": {"num_experts": 4, **EXPERTS},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "smollm3": {},
    "gpt_neox": {},
    "olmo2": {},
    "apertus": {},
}
REFUSED = {  # by vLLM alone
    "gpt_neox": "vLLM has no GPTNeoXForCausalLM of its own",
    "apertus": "apertus: vLLM's log-probs differ from transformers' by 1e-3",
}
SEVERAL = [
    pytest.param(kind, marks=[] if kind == "gpt_neox" else pytest.mark.slow) for kind in REFUSED
]


@pytest.fixture
def command(tmp_path):
    """grpo.py with a model of this kind, and rewards that its random answers differ in."""

    def of(kind: str) -> list:
        model = write_random(tmp_path / "model", kind, **KINDS_OF_MODELS[kind])
        write_demo_data(tmp_path / "data")
        options = ["--model", model, "--train-data", tmp_path / "data" / "train.parquet"]
        options += ["--max-rows", 8, "--dtype", "fp32", "--reward-function", KINDS]
        options += ["--learning-rate", 1e-2, "--total-steps", 2, "--max-prompt-tokens", 512]
        options += ["--prompts-per-step", 2, "--samples-per-prompt", 2]
        options += ["--max-response-tokens", 16, "--output-dir", tmp_path / "run"]
        return ["grpo.py", *options]

    return of


@pytest.mark.parametrize("kind", SEVERAL)
def test_what_vllm_does_not_run_exactly_is_refused_by_name(kind, command, tmp_path):
    """Before anything is loaded."""
    refused = run_script(*command(kind), check=False)
    said = refused.stderr.strip().splitlines()[-1]
    model, reason = tmp_path / "model", REFUSED[kind]
    assert refused.returncode == 1 and said.startswith(f"--model {model}: {reason}"), refused.stderr
    assert said.endswith("; --engine hf runs it") and "Traceback" not in refused.stderr


# of the others test_architectures.py compares log-probs, test_engine_families.py single ranks
RUNS = [
    (kind, engine)
    for kind in KINDS_OF_MODELS
    for engine in ("hf", "vllm")
    if engine == "hf" or kind not in REFUSED
]


@pytest.mark.slow
@pytest.mark.parametrize("kind, engine", RUNS)
def test_engines_are_exact_with_experts_and_without_a_class_of_vllm(
    kind, engine, command, tmp_path
):
    """On two ranks, from a sync after a large step to the export."""
    run_script(*command(kind), "--engine", engine, ranks=2)
    steps = steps_of(tmp_path / "run")
    assert steps[1]["optim/grad_norm"] > 0 and steps[2]["policy/rollout_logprob_gap"] < 1e-4
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "model", tmp_path / "run" / "model")
    )
    assert before.keys() == after.keys(), "the checkpoint's own names"
    assert sum(not torch.equal(before[name], after[name]) for name in before) > len(before) / 2


def first_step(folder, ranks: int, *options) -> dict:
    """The record of a step with two minibatches; the second needs the pass for old log-probs."""
    common = [*SMALL, "--dtype", "fp32", "--engine", "hf", "--total-steps", 1]
    common += ["--minibatches", 2, "--learning-rate", 0]
    common += ["--max-response-tokens", 16, "--eval-every", 0, "--no-eval-before"]
    common += ["--eval-rows", 2, "--reward-function", KINDS, "--temperature", 2.0]
    run_script("grpo.py", *common, *options, "--output-dir", folder, ranks=ranks)
    return steps_of(folder)[1]


def check_first_step(record: dict) -> None:
    assert record["policy/rollout_logprob_gap"] < 1e-4 and record["optim/grad_norm"] > 0
    # the ratio is exactly 1
    assert record["policy/clip_fraction"] == record["policy/approx_kl"] == 0


def test_the_ratio_is_one_while_the_weights_stand_still(tmp_path):
    check_first_step(first_step(tmp_path, 0))


@pytest.mark.slow  # by default test_whole_steps.py recomputes steps of two ranks, by DDP
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_and_strategies_take_the_same_first_step(strategy, tmp_path):
    """fp32, Hugging Face engine: rollouts depend on seeds alone, so loss and gradient norm must
    agree."""
    one = first_step(tmp_path / "one", 0)
    options = ["--strategy", strategy, "--micro-batch-tokens", 100]
    two = first_step(tmp_path / "two", 2, *options)
    for record in (one, two):
        check_first_step(record)
    for metric in (
        "reward/mean",
        "policy/loss",
        "policy/entropy",
        "optim/grad_norm",
        "policy/rollout_logprob_gap",
    ):
        assert two[metric] == pytest.approx(one[metric], rel=1e-4, abs=1e-6), metric


ON_4 = [
    ([], ["--shard-size", 2]),
    (["--shard-size", 2], []),
    (["--shard-size", 2], ["--shard-size", 1]),
]
RANKS = [(2, 0, [], []), (0, 2, [], []), *((4, 4, *shards) for shards in ON_4)]


@pytest.mark.slow
@pytest.mark.parametrize("first, then, sharded, again", RANKS)
def test_a_run_goes_on_on_another_number_of_ranks(first, then, sharded, again, tmp_path):
    """Its last step, again from the checkpoint before it: the same rows, and Adam still has its
    moments.

    On as many ranks, and another mesh, too.
    """
    options = [
        *SMALL,
        "--dtype",
        "fp32",
        "--engine",
        "hf",
        "--total-steps",
        3,
        "--eval-rows",
        2,
        "--eval-every",
        0,
    ]
    options += [
        "--save-every",
        1,
        "--keep-checkpoints",
        3,
        "--dump-rollouts-every",
        1,
        "--no-eval-before",
    ]
    options += ["--learning-rate", 1e-3, "--max-response-tokens", 64]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_script("grpo.py", *options, *sharded, "--output-dir", whole, ranks=first)
    before = whole / "checkpoints" / "step_000002"
    run_script("grpo.py", *options, *again, "--resume", before, "--output-dir", resumed, ranks=then)

    (event,) = [record for record in metrics_of(resumed) if record.get("event") == "resumed"]
    assert event["step"] == 2 and sorted(steps_of(resumed)) == [3]
    expected, record = (steps_of(folder)[3] for folder in (whole, resumed))
    for metric in (
        "data/epoch",
        "reward/mean",
        "policy/loss",
        "policy/entropy",
        "optim/grad_norm",
        "optim/lr",
    ):
        assert record[metric] == pytest.approx(expected[metric], rel=1e-4, abs=1e-6), metric
    assert expected["optim/grad_norm"] > 0
    dumps = [
        pq.read_table(folder / "rollouts" / "step_000003.parquet").to_pylist()
        for folder in (whole, resumed)
    ]
    rows = [{row["prompt_index"]: row["row"] for row in dump} for dump in dumps]
    assert rows[0] == rows[1] and len(rows[0]) == 6
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (resumed, whole)]
    assert relative_l2(*([tensors[name] for name in sorted(tensors)] for tensors in weights)) < 1e-5


@pytest.mark.slow  # by default test_sft_runs.py has the overflow
def test_fp16_with_an_overflow_on_one_rank_skips_the_step_on_both(tmp_path):
    """And a run without one skips none."""
    options = [*SMALL, "--prompts-per-step", 2, "--max-response-tokens", 16, "--dtype", "fp16"]
    options += ["--reward-function", KINDS, "--temperature", 2.0, "--engine", "hf"]
    options += ["--total-steps", 1, "--no-eval-before", "--eval-every", 0, "--eval-rows", 2]
    run_script("grpo.py", *options, "--output-dir", tmp_path / "plain")
    record = steps_of(tmp_path / "plain")[1]
    assert record["optim/skipped_steps"] == 0 and record["optim/loss_scale"] == 2.0**14
    assert record["optim/grad_norm"] > 0

    worker = ROOT / "tests" / "workers" / "overflow.py"
    done = run_script(worker, ranks=2)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result == {
        "stepped": [False, False],
        "unchanged": True,
        "scale": [2.0**13] * 2,
        "then": [True, True],
    }

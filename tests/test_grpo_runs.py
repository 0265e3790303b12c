"""grpo.py as its users run it: real torchrun ranks, real vLLM, the embedded policy and SmolLM2."""

import json

import pytest
from conftest import ROOT, kill_once, metrics_of, run_script, skip_where_no_step_is_repeated, steps_of

SMALL = [
    "--prompts-per-step",
    "6",
    "--samples-per-prompt",
    "4",
    "--max-response-tokens",
    "96",
    "--eval-rows",
    "16",
    "--max-rows",
    "64",
]


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_kill_and_resume_equals_an_uninterrupted_run(tmp_path, ranks):
    options = [*SMALL, "--total-steps", 4, "--save-every", 2, "--eval-every", 2, "--minibatches", 2]
    run_script("grpo.py", *options, "--output-dir", tmp_path / "whole", ranks=ranks)

    kill_once("grpo.py", *options, "--output-dir", tmp_path / "killed", ranks=ranks, after_step=3)
    assert (tmp_path / "killed" / "checkpoints" / "latest").read_text() == "step_000002"
    run_script("grpo.py", *options, "--output-dir", tmp_path / "killed", ranks=ranks)

    assert steps_of(tmp_path / "killed") == steps_of(tmp_path / "whole")
    (resumed,) = [r for r in metrics_of(tmp_path / "killed") if r.get("event") == "resumed"]
    assert resumed["step"] == 2
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1], "resumed weights differ"


def test_export_scores_the_same_in_vllm_and_transformers(tmp_path):
    """Train two visible steps, then evaluate the exported folder by itself in both engines."""
    options = [*SMALL, "--eval-rows", 64, "--dtype", "fp32"]
    train = ["--total-steps", 2, "--learning-rate", 1e-3, "--no-eval-before"]
    run_script("grpo.py", *options, *train, "--output-dir", tmp_path / "run", ranks=2)
    trained = steps_of(tmp_path / "run")[2]["eval/accuracy"]
    data = tmp_path / "run" / "data" / "eval.parquet"
    for engine in ("vllm", "hf"):
        folder = tmp_path / engine
        again = ["--eval-only", "--model", tmp_path / "run" / "model", "--eval-data", data, "--engine", engine]
        run_script("grpo.py", *again, *options, "--output-dir", folder)
        import pyarrow.parquet as pq

        samples = pq.read_table(folder / "eval_samples.parquet").to_pylist()
        assert sum(s["correct"] for s in samples) / len(samples) == trained, engine


@pytest.mark.parametrize("model, orders", [("tiny", ["--orders"]), ("smollm2", [])])
def test_engine_and_trainer_agree_after_each_sync(model, orders):
    """Real vLLM, fp32. SmolLM2 ties its head to the embeddings, which a careless sync leaves stale."""
    done = run_script(ROOT / "tests" / "workers" / "engine_gap.py", "--model", model, "--dtype", "fp32", *orders)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    gaps = [result["synced"], result["resynced"], result["repeated"], *result["orders"].values()]
    assert len(gaps) == (10 if orders else 3) and max(gaps) < 1e-4, gaps
    assert result["stale"] > 10 * 1e-4, "the policy must move enough for a stale engine to show"
    assert all(result["refused"].values()), result["refused"]


def test_ranks_and_strategies_take_the_same_first_step(tmp_path):
    """fp32, Hugging Face engine: rollouts depend on seeds alone, so loss and gradient norm must agree."""
    records = {}
    minibatches = ["--minibatches", 2, "--learning-rate", 0]  # the second one needs the pass for old log-probs
    for name, ranks, options in (
        ("one rank", 0, []),
        ("two ranks", 2, ["--micro-batch-tokens", 700]),
        ("two ranks ddp", 2, ["--strategy", "ddp"]),
    ):
        common = [*SMALL, "--dtype", "fp32", "--engine", "hf", "--total-steps", 1, "--eval-rows", 8, *minibatches]
        run_script("grpo.py", *common, *options, "--output-dir", tmp_path / name, ranks=ranks)
        records[name] = steps_of(tmp_path / name)[1]
    for name, record in records.items():
        for metric in (
            "reward/mean",
            "policy/loss",
            "policy/entropy",
            "optim/grad_norm",
            "policy/rollout_logprob_gap",
        ):
            assert record[metric] == pytest.approx(records["one rank"][metric], rel=1e-4, abs=1e-6), (name, metric)
        assert record["policy/rollout_logprob_gap"] < 1e-4
        assert record["policy/clip_fraction"] == record["policy/approx_kl"] == 0  # the ratio is exactly 1


def test_fp16_with_an_overflow_on_one_rank_skips_the_step_on_both(tmp_path):
    options = [*SMALL, "--dtype", "fp16", "--engine", "hf", "--total-steps", 2, "--max-response-tokens", 24]
    run_script("grpo.py", *options, "--eval-rows", 8, "--output-dir", tmp_path / "plain", ranks=2)
    record = steps_of(tmp_path / "plain")[2]
    assert record["optim/skipped_steps"] == 0 and record["optim/loss_scale"] == 2.0**14

    worker = ROOT / "tests" / "workers" / "overflow.py"
    done = run_script(worker, ranks=2)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result == {"stepped": [False, False], "unchanged": True, "scale": [2.0**13] * 2, "then": [True, True]}


FEW = [*SMALL, "--engine", "hf", "--dtype", "fp32", "--eval-rows", 4, "--eval-every", 0, "--no-eval-before"]


def test_replay_repeats_an_update_bit_for_bit(tmp_path):
    options = [*SMALL, "--total-steps", 2, "--minibatches", 2, "--kl-in", "loss", "--kl-estimator", "k3-is"]
    options += ["--kl-coef", 0.01, "--eval-every", 0, "--no-eval-before", "--engine", "hf"]
    dumps = ["--save-every", 1, "--keep-checkpoints", 3, "--dump-rollouts-every", 1]
    run_script("grpo.py", *options, *dumps, "--output-dir", tmp_path / "run", ranks=2)
    replay = ["--resume", tmp_path / "run/checkpoints/step_000001", "--replay"]
    replay += [tmp_path / "run/rollouts/step_000002.parquet", "--output-dir", tmp_path / "replay"]
    run_script("grpo.py", *options, *replay, ranks=2)
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("run", "replay")]
    assert weights[0] == weights[1]
    ran, replayed = (steps_of(tmp_path / name)[2] for name in ("run", "replay"))
    del replayed["data/epoch"]  # nothing is drawn
    assert replayed.items() <= ran.items(), "eval/* aside"
    replay[-3] = tmp_path / "run/rollouts/step_000001.parquet"
    refused = run_script("grpo.py", *options, *replay, ranks=2, check=False)
    assert "is of step 1 on 2 ranks, this is step 2 on 2" in refused.stderr


@pytest.mark.parametrize(
    "flags",
    [
        "--objective gspo --reduction grpo --advantage rloo --correction sequence --kl-in reward --kl-coef 0.01 "
        "--kl-target 0.1 --minibatches 2 --mask-truncated --overlong-buffer 32",
        pytest.param(
            "--objective cispo --minibatches 2 --advantage batch-std --correction truncate --entropy-coef 0.001 "
            "--dynamic-sampling 6 --kl-in loss --kl-coef 0.01 --kl-estimator k2 --strategy ddp",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_other_objectives_run(tmp_path, flags):
    run_script("grpo.py", *FEW, *flags.split(), "--total-steps", 2, "--output-dir", tmp_path, ranks=2)
    first, second = steps_of(tmp_path)[1], steps_of(tmp_path)[2]
    assert first["policy/kl_to_ref"] == 0 < second["policy/kl_to_ref"] < 1
    assert first["optim/grad_norm"] > 0 and first["policy/rollout_logprob_gap"] < 1e-4
    if "--kl-target" in flags:
        assert second["policy/kl_coef"] < first["policy/kl_coef"] == 0.01


def test_dynamic_sampling_ends_with_a_clear_error_when_nothing_can_be_learnt(tmp_path):
    (tmp_path / "reward.py").write_text("def flat(data_source, solution_str, ground_truth, extra_info=None): return 1")
    options = ["--reward-function", f"{tmp_path}/reward.py:flat", "--dynamic-sampling", 2, "--total-steps", 1]
    done = run_script("grpo.py", *FEW, *options, "--output-dir", tmp_path / "run", check=False)
    assert done.returncode == 1 and "--dynamic-sampling 2: 6 groups of unequal scores are missing" in done.stderr


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_out_of_memory_repeats_the_step_with_the_same_gradient(tmp_path, strategy):
    """Step 2 fails inside a backward; with fewer tokens a micro-batch it is what it would have been, and so is 3."""
    skip_where_no_step_is_repeated(strategy)
    options = [*FEW, "--total-steps", 3, "--micro-batch-tokens", 2048, "--strategy", strategy]
    run_script("grpo.py", *options, "--output-dir", tmp_path / "plain")
    done = run_script(ROOT / "tests/workers/out_of_memory.py", *options, "--output-dir", tmp_path / "short")
    assert "--micro-batch-tokens is now 1024, the step is repeated" in done.stdout
    assert_same_updates(tmp_path / "plain", tmp_path / "short")


def assert_same_updates(*runs) -> None:
    for step in (2, 3):
        plain, short = (steps_of(run)[step] for run in runs)
        for metric in ("policy/loss", "policy/entropy", "optim/grad_norm", "policy/rollout_logprob_gap"):
            assert short[metric] == pytest.approx(plain[metric], rel=1e-4, abs=1e-6), (step, metric)
        assert short["reward/mean"] == plain["reward/mean"]


def test_out_of_memory_on_one_of_two_ranks_is_remembered_by_the_run(tmp_path):
    """The others wait for it in a collective, so the run ends; the same command goes on in smaller pieces."""
    options = [*FEW, "--engine", "hf", "--total-steps", 3, "--save-every", 1, "--micro-batch-tokens", 2048]
    run_script("grpo.py", *options, "--output-dir", tmp_path / "plain", ranks=2)
    command = [ROOT / "tests/workers/out_of_memory.py", *options, "--output-dir", tmp_path / "short"]
    ended = run_script(*command, ranks=2, check=False)
    assert ended.returncode != 0 and "--micro-batch-tokens is now 1024; the same command" in ended.stderr
    done = run_script(*command, ranks=2)
    assert "micro-batches of 1024 tokens" in done.stdout
    assert_same_updates(tmp_path / "plain", tmp_path / "short")


def test_a_failed_reward_costs_its_sample(tmp_path):
    """A third of the texts cannot be scored; their groups go on without them."""
    body = "n = sum(map(ord, solution_str))\n    if n % 3 == 0: raise KeyError('thirds')\n    return n % 7"
    signature = "def fn(data_source, solution_str, ground_truth, extra_info=None):"
    (tmp_path / "reward.py").write_text(f"{signature}\n    {body}\n")
    options = ["--reward-function", f"{tmp_path}/reward.py:fn", "--total-steps", 1]
    done = run_script("grpo.py", *FEW, *options, "--output-dir", tmp_path / "run")
    record = steps_of(tmp_path / "run")[1]
    assert 0 < record["reward/failed"] < 24 and record["optim/grad_norm"] > 0
    assert (
        f"rewards: {record['reward/failed']:.0f} of 24 responses not scored, the first: KeyError: 'thirds'"
        in done.stdout
    )

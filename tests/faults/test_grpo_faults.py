"""grpo.py when memory is full, rewards fail or it is told to end; other objectives than its own."""

import json
import signal

import pytest
from helpers import ROOT, metrics_of, run_script, skip_where_no_step_is_repeated, steps_of
from zygote import CURVES

FEW = ["--prompts-per-step", 6, "--samples-per-prompt", 4, "--max-response-tokens", 24]
FEW += ["--max-rows", 64, "--engine", "hf", "--dtype", "fp32"]
FEW += ["--eval-rows", 2, "--eval-every", 0, "--no-eval-before"]
# A third of the texts cannot be scored.
REWARD = """
def fn(data_source, solution_str, ground_truth, extra_info=None):
    n = sum(map(ord, solution_str))
    if n % 3 == 0: raise KeyError('thirds')
    return n % 7
"""


@pytest.fixture(scope="module")
def thirds(tmp_path_factory) -> list:
    """Flags of runs of three steps."""
    file = tmp_path_factory.mktemp("user") / "reward.py"
    file.write_text(REWARD)
    # warm, or all samples of a prompt would be alike, and there were no gradient
    few = [*FEW, "--temperature", 2, "--total-steps", 3, "--micro-batch-tokens", 1024]
    return [*few, "--reward-function", f"{file}:fn"]


@pytest.fixture(scope="module")
def plain(thirds, tmp_path_factory) -> tuple:
    """(folder, what it has printed) of the run with which others are compared."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    return folder, run_script("grpo.py", *thirds, "--output-dir", folder).stdout


@pytest.mark.parametrize(
    "flags",
    [
        "--objective gspo --advantage rloo --correction sequence --kl-reward-coef 0.01 "
        "--kl-loss-coef 0.01 --minibatches 2 --overlong-buffer 16",
        pytest.param(
            "--objective cispo --minibatches 2 --advantage batch-std --correction truncate "
            "--entropy-coef 0.001 "
            "--dynamic-sampling 6 --mask-truncated --kl-loss-coef 0.01 --kl-estimator k2 "
            "--strategy ddp",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_other_objectives_run(tmp_path, flags):
    options = [*FEW, "--max-response-tokens", 40, *flags.split(), "--total-steps", 2]
    run_script("grpo.py", *options, "--output-dir", tmp_path, ranks=1)
    first, second = steps_of(tmp_path)[1], steps_of(tmp_path)[2]
    assert first["policy/kl_to_ref"] == 0 < second["policy/kl_to_ref"] < 1
    assert first["optim/grad_norm"] > 0 and first["policy/rollout_logprob_gap"] < 1e-4
    if "--objective gspo" in flags:
        config = json.loads((tmp_path / "config.json").read_text())["args"]
        assert (config["clip_low"], config["clip_high"], config["reduction"]) == (
            3e-4,
            4e-4,
            "grpo",
        )
        assert second["policy/clip_fraction"] > 0


def test_a_reward_that_can_score_nothing_is_found_before_the_engine_starts(tmp_path):
    (tmp_path / "reward.py").write_text(
        "def other(answers, **kwargs): return [1.0 for _ in answers]"
    )
    options = [
        "--reward-function",
        f"{tmp_path}/reward.py:other",
        "--total-steps",
        1,
        "--output-dir",
        tmp_path / "run",
    ]
    done = run_script("grpo.py", *FEW, *options, check=False)
    assert (
        done.returncode == 1
        and "Traceback" not in done.stderr
        and "rollouts by hf" not in done.stdout
    )
    assert (
        f"error: --reward-function {tmp_path}/reward.py:other cannot score the first row:"
        in done.stderr
    )
    assert "TypeError: other() missing 1 required positional argument: 'answers'" in done.stderr


def test_dynamic_sampling_of_a_solved_task_ends_as_any_run_does(tmp_path):
    """No group has unequal scores: the step trains nothing, and what was learnt before is kept."""
    (tmp_path / "reward.py").write_text(
        "def flat(data_source, solution_str, ground_truth, extra_info=None): return 1"
    )
    options = [
        "--reward-function",
        f"{tmp_path}/reward.py:flat",
        "--dynamic-sampling",
        2,
        "--total-steps",
        1,
    ]
    options += ["--max-response-tokens", 8]
    done = run_script("grpo.py", *FEW, *options, "--output-dir", tmp_path / "run")
    told = "step 1 trains on 0 groups, not on 6: no more of the 12 drawn have unequal scores"
    assert told in done.stdout
    record = steps_of(tmp_path / "run")[1]
    assert record["reward/mean"] == 1.0 and not {"policy/loss", "optim/grad_norm"} & set(record)
    assert (tmp_path / "run/model/config.json").is_file()
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step_000001"


@pytest.mark.slow
def test_a_rehearsal_changes_no_bit(plain, thirds, tmp_path):
    folder, _ = plain
    worker = ROOT / "tests/workers/rehearsed.py"
    done = run_script(worker, "grpo.py", *thirds, "--output-dir", tmp_path)
    assert "rehearsal: micro-batches of 960 tokens, the largest of this run, fit (" in done.stdout
    assert steps_of(tmp_path) == steps_of(folder)
    weights = [(run / "model/model.safetensors").read_bytes() for run in (tmp_path, folder)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_out_of_memory_repeats_the_step_with_the_same_gradient(plain, thirds, tmp_path, strategy):
    """Step 2 fails inside a backward; with fewer tokens a micro-batch it is what it would have
    been, and so is 3."""
    skip_where_no_step_is_repeated(strategy)
    options = [*thirds, "--strategy", strategy, "--output-dir"]
    if strategy != "fsdp":
        run_script("grpo.py", *options, tmp_path / "plain")
    done = run_script(ROOT / "tests/workers/out_of_memory.py", *options, tmp_path / "short")
    assert "--micro-batch-tokens is now 512, the step is repeated" in done.stdout
    compared = plain[0] if strategy == "fsdp" else tmp_path / "plain"
    assert_same_updates(compared, tmp_path / "short")


def assert_same_updates(*runs) -> None:
    for step in (2, 3):
        plain, short = (steps_of(run)[step] for run in runs)
        for metric in (
            "policy/loss",
            "policy/entropy",
            "optim/grad_norm",
            "policy/rollout_logprob_gap",
        ):
            assert short[metric] == pytest.approx(plain[metric], rel=1e-4, abs=1e-6), (step, metric)
        assert short["reward/mean"] == plain["reward/mean"]


@pytest.mark.slow
def test_out_of_memory_on_one_of_two_ranks_is_remembered_by_the_run(tmp_path, thirds):
    """The others wait for it in a collective, so the run ends; the same command goes on in smaller
    pieces."""
    options = [*thirds, "--save-every", 1]
    run_script("grpo.py", *options, "--output-dir", tmp_path / "plain", ranks=2)
    command = [
        ROOT / "tests/workers/out_of_memory.py",
        *options,
        "--output-dir",
        tmp_path / "short",
    ]
    ended = run_script(*command, ranks=2, check=False)
    assert (
        ended.returncode != 0
        and "--micro-batch-tokens is now 512; the same command" in ended.stderr
    )
    done = run_script(*command, ranks=2)
    assert "micro-batches of 512 tokens" in done.stdout
    assert_same_updates(tmp_path / "plain", tmp_path / "short")


def test_a_failed_reward_costs_its_sample(plain):
    """Their groups go on without them."""
    run, printed = plain
    record = steps_of(run)[1]
    assert 0 < record["reward/failed"] < 24
    assert all(steps_of(run)[step]["optim/grad_norm"] > 0 for step in (1, 2, 3))
    assert (
        f"rewards: {record['reward/failed']:.0f} of 24 responses not scored, the first: "
        "KeyError: 'thirds'" in printed
    )


def test_sigterm_saves_exits_with_its_own_code_and_resumes_exactly(plain, thirds, tmp_path):
    run = tmp_path / "stopped"
    run.mkdir()
    (tmp_path / "disk").mkdir()
    (run / "checkpoints").symlink_to(tmp_path / "disk")
    worker = ROOT / "tests/workers/told_to_end.py"
    done = run_script(worker, *thirds, "--output-dir", run, check=False, env={CURVES: "1"})
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert (run / "curves.png").is_file()
    (stopped,) = [record for record in metrics_of(run) if record.get("event") == "stopped"]
    assert stopped["step"] == 1
    assert (run / "checkpoints/latest").read_text() == "step_000001"
    config = (run / "config.json").read_bytes()
    done = run_script("grpo.py", *thirds, "--output-dir", run, "--keep-checkpoints", 7)
    told = "step 1; 2 of 3 steps left; --keep-checkpoints 7, not 2\n"
    assert told in done.stdout and "Loading weights" not in done.stderr
    chosen = json.loads(config)["chosen"]
    assert f"compute {chosen['dtype']} (" in done.stdout and chosen["attention"] == "sdpa"
    (event,) = [record for record in metrics_of(run) if record.get("event") == "resumed"]
    assert event["step"] == 1 and event["changed"] == {"keep_checkpoints": [2, 7]}
    assert (run / "config.json").read_bytes() == config, "it tells of the first start"
    whole, resumed = (
        (folder / "model/model.safetensors").read_bytes() for folder in (plain[0], run)
    )
    assert whole == resumed


@pytest.mark.slow  # by default test_memory.py refuses a cache that cannot fit
@pytest.mark.parametrize("flags", [["--max-response-tokens", 5000], ["--engine-memory", 0.001]])
def test_what_the_engine_has_no_room_for_is_told_by_its_flags(tmp_path, flags):
    done = run_script(
        "grpo.py", *flags, "--total-steps", 1, "--output-dir", tmp_path, ranks=1, check=False
    )
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert (
        "--max-prompt-tokens, --max-response-tokens, --engine-memory: " in done.stdout + done.stderr
    )

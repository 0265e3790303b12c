"""grpo.py as its users run it: ranks, real vLLM, the embedded policy; kill, resume and replay of
one whole run, which chooses --micro-batch-tokens: one number for all ranks, kept by both."""

import json
import shutil
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
from helpers import (
    LITTLE_CACHE,
    ROOT,
    kill_once,
    memory_phases,
    metrics_of,
    run_script,
    split_of,
    steps_of,
)
from model_folders import other_weights
from safetensors.torch import load_file
from scripted import LIMITS

from common.balance import groups_of, rank_of_prompts
from common.export import Args, main
from common.flags import Data, Machine, Rollout, Run
from common.hub import FOLDERS
from common.job import Job
from common.precision import choose_dtype
from common.rollout.dumps import load_rollouts
from common.types import Episode

OPTIONS = ["--model", "tiny", "--prompts-per-step", 6, "--samples-per-prompt", 4]
OPTIONS += ["--max-prompt-tokens", 64, "--max-response-tokens", 16, "--max-rows", 64]
OPTIONS += ["--reward-function", ROOT / "tests/workers/kinds.py:kinds", "--temperature", 2.0]
OPTIONS += ["--eval-rows", 8, "--eval-every", 0, "--learning-rate", 1e-4]
OPTIONS += ["--total-steps", 3, "--save-every", 1, "--keep-checkpoints", 3]
OPTIONS += ["--minibatches", 2, "--kl-loss-coef", 0.01, "--kl-estimator", "k3-is"]
OPTIONS += ["--dump-rollouts-every", 1, *LITTLE_CACHE]
ROLLOUT = Rollout(max_prompt_tokens=64, max_response_tokens=16, engine_memory=LITTLE_CACHE[1])


def free_for(tokens: int) -> float:
    """Gigabytes of which nine tenths are just enough for a micro-batch."""
    machine = Machine(micro_batch_tokens=tokens, attention="sdpa")
    dtype, tiny = choose_dtype("auto", torch.device("cpu"))[0], [str(FOLDERS["tiny"])]
    gb = memory_phases(ROLLOUT, machine, 2, dtype, tiny, tiny, on_gpu=False)
    assert gb["rollout"] < gb["update"]
    return 1.001 * gb["update"] / 0.9


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An uninterrupted run, on ranks with much and with little memory; beside it `killed`, what a
    kill after step 2 would have left of it. A step is logged before it is saved: the checkpoint is
    that of step 1."""
    runs = tmp_path_factory.mktemp("runs")
    env = {"LOGGED_STEP": "2", "COPY": str(runs / "killed"), "FREE_GB": f"16,{free_for(256)}"}
    worker = ROOT / "tests" / "workers" / "observed.py"
    done = run_script(worker, *OPTIONS, "--output-dir", runs / "whole", ranks=2, env=env)
    return runs / "whole", done.stdout


@pytest.fixture(scope="module")
def whole(run):
    return run[0]


def micro_batch_tokens(folder) -> int:
    return json.loads((folder / "config.json").read_text())["args"]["micro_batch_tokens"]


def test_groups_are_trained_on_the_ranks_that_the_balance_gives_them(whole):
    """Which are not those that have sampled them: prompts are dealt in turn."""
    moved = 0
    for step in (1, 2, 3):
        rows = pq.read_table(whole / f"rollouts/step_{step:06d}.parquet").to_pylist()
        fields = ("prompt_index", "sample_index", "prompt_ids", "response_ids", "loss_mask")
        episodes = [Episode(*(row[name] for name in fields), row["logprobs"]) for row in rows]
        groups = groups_of(episodes, split_of(episodes, 2, seed=0, step=step - 1))
        rank_of = rank_of_prompts(groups, num_ranks=2)
        assert {row["prompt_index"]: row["rank"] for row in rows} == rank_of
        moved += sum(rank != prompt % 2 for prompt, rank in rank_of.items())
    assert moved > 0


def test_the_tightest_rank_decides_before_the_first_update(run):
    folder, output = run
    assert "; --micro-batch-tokens 256 chosen to fit into 90% of what is free" in output
    assert micro_batch_tokens(folder) == 256
    for step in (1, 2, 3):
        record = json.loads((folder / f"checkpoints/step_{step:06d}/trainer.json").read_text())
        dump = pq.read_table(folder / f"rollouts/step_{step:06d}.parquet")
        assert record["micro_batch_tokens"] == 256 and set(
            dump["micro_batch_tokens"].to_pylist()
        ) == {256}


def test_a_resume_takes_them_and_a_typed_number_wins(whole, world, tmp_path, monkeypatch):
    """From another folder, whatever is free there; a run that begins anew chooses anew."""
    monkeypatch.setattr("common.job.init_world", lambda *_: world)
    monkeypatch.setattr("common.memory.plan.free_memory", lambda: 16e9)
    checkpoint = str(whole / "checkpoints/step_000001")
    for resume, typed, expected in (
        (checkpoint, None, 256),
        (checkpoint, 64, 64),
        ("never", None, 16_384),
    ):
        run = Run(model="tiny", output_dir=tmp_path, resume=resume)
        machine = Machine(micro_batch_tokens=typed)
        job = Job("grpo", Data(), machine, run, demo=False, training=False)
        job.plan_memory(ROLLOUT, trained=[job.model_folder], frozen=[])
        assert job.micro_batch_tokens == expected


def data_of(folder) -> list[str]:
    return [f"--{part}-data={folder / 'data' / part}.parquet" for part in ("train", "eval")]


def check_resumed(whole, folder, start: int) -> None:
    """Of a run that goes on from a checkpoint of this step: it ends as the uninterrupted one."""
    assert steps_of(folder) == steps_of(whole) and steps_of(whole).keys() == {0, 1, 2, 3}
    assert all(steps_of(whole)[step]["optim/grad_norm"] > 0 for step in range(1, 4))
    (resumed,) = [r for r in metrics_of(folder) if r.get("event") == "resumed"]
    assert resumed["step"] == start
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (whole, folder)]
    assert weights[0] == weights[1], "resumed weights differ"
    for step in range(1, 4):
        dumps = [
            pq.read_table(run / f"rollouts/step_{step:06d}.parquet") for run in (whole, folder)
        ]
        assert dumps[0].equals(dumps[1]) and len(dumps[0]) == 24
    files = [
        {f.relative_to(run) for f in (run / "checkpoints").rglob("*") if f.is_file()}
        for run in (whole, folder)
    ]
    ranks = json.loads((whole / "checkpoints/step_000003/manifest.json").read_text())["world_size"]
    states = [file for file in files[0] if file.suffix == ".safetensors"]
    assert files[0] == files[1] and len(states) == ranks * 3
    for file in files[0]:
        if file.suffix == ".safetensors":  # whose header has its entries in any order
            tensors, others = (load_file(run / file) for run in (whole, folder))
            assert tensors.keys() == others.keys()
            assert all(torch.equal(tensors[name], others[name]) for name in tensors), file
        elif file.name != "manifest.json":
            assert (whole / file).read_bytes() == (folder / file).read_bytes(), file


def test_a_resume_equals_an_uninterrupted_run(whole, tmp_path):
    """Samples, metrics, checkpoints, bit for bit, after what a kill leaves."""
    folder = shutil.copytree(whole.with_name("killed"), tmp_path / "killed")
    assert (folder / "checkpoints" / "latest").read_text() == "step_000001"
    assert steps_of(folder).keys() == {0, 1, 2} and not (folder / "model").exists()
    run_script("grpo.py", *OPTIONS, "--output-dir", folder, ranks=2)
    check_resumed(whole, folder, start=1)


def test_a_resume_with_another_reference_is_refused(whole, tmp_path):
    """The policy's weights come from the checkpoint, those that KL is charged against from
    --model."""
    options = [
        *OPTIONS,
        "--engine",
        "hf",
        *data_of(whole),
        "--resume",
        whole / "checkpoints" / "step_000002",
    ]
    run = ["--model", other_weights(tmp_path / "model"), "--output-dir", tmp_path / "run"]
    done = run_script("grpo.py", *options, *run, check=False)
    assert done.returncode == 1 and "is of another reference, " in done.stderr, done.stderr


def test_the_export_of_a_checkpoint_of_two_ranks_is_the_runs_model(whole, tmp_path):
    main(Args(whole, "tiny", tmp_path / "out"))
    for file in (whole / "model").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.slow  # by default test_sft_runs.py kills
@pytest.mark.parametrize("ranks, fresh", [(2, False), (2, True), (1, False)])
def test_kill_and_resume_equals_an_uninterrupted_run(whole, tmp_path, ranks, fresh):
    """`fresh`: the second half is started by torchrun, so a forked run equals one by torchrun,
    too."""
    folder, options = tmp_path / "killed", [*OPTIONS, "--micro-batch-tokens", 256]
    if ranks == 1:
        run_script("grpo.py", *options, "--output-dir", tmp_path / "whole", ranks=1)
    kill_once("grpo.py", *options, "--output-dir", folder, ranks=ranks, after_step=2)
    latest = (folder / "checkpoints" / "latest").read_text()  # the kill may come after the save
    run_script("grpo.py", *options, "--output-dir", folder, ranks=ranks, fresh=fresh)
    check_resumed(whole if ranks == 2 else tmp_path / "whole", folder, start=int(latest[-6:]))


@pytest.mark.slow
def test_what_replaces_flat_groups_does_not_depend_on_who_was_faster(tmp_path):
    """Slow answers of one rank, slow rewards, a kill and a resume: the same groups, weights and
    metrics, and the same number of prompts sampled."""
    options = [*OPTIONS, "--samples-per-prompt", 2, "--dynamic-sampling", 20, "--total-steps", 4]
    options += ["--reward-function", ROOT / "tests/workers/kinds.py:even", "--output-dir"]
    whole, slow = tmp_path / "whole", tmp_path / "slow"
    run_script("grpo.py", *options, whole, ranks=2)
    worker = ROOT / "tests/workers/uneven_speed.py"
    kill_once(worker, *options, slow, ranks=2, after_step=2)
    run_script(worker, *options, slow, ranks=2)
    assert steps_of(slow) == steps_of(whole)
    weights = [(run / "model/model.safetensors").read_bytes() for run in (whole, slow)]
    assert weights[0] == weights[1]
    num_prompts = []
    for step in range(1, 5):
        name = f"rollouts/step_{step:06d}.parquet"
        dumps = [pq.read_table(run / name) for run in (whole, slow)]
        assert dumps[0].equals(dumps[1])
        num_prompts.append(len(set(dumps[0]["prompt_index"].to_pylist())))
        record = steps_of(whole)[step]
        assert record["rollout/unused"] == pytest.approx(1 - 6 / num_prompts[-1])
    assert min(num_prompts[1:]) > 6  # the first round of a later step is larger
    saved = [
        json.loads((run / "checkpoints/step_000004/trainer.json").read_text())["counts"]
        for run in (whole, slow)
    ]
    assert saved[0] == saved[1] and saved[0]["unequal"] >= 24


def test_replay_repeats_an_update_bit_for_bit(whole, tmp_path):
    replay = ["--resume", whole / "checkpoints/step_000002", "--output-dir", tmp_path / "replay"]
    replay += ["--replay", whole / "rollouts/step_000003.parquet", *data_of(whole)]
    replay += ["--engine", "hf"]  # which evaluates alone
    run_script("grpo.py", *OPTIONS, *replay, ranks=2)
    assert micro_batch_tokens(tmp_path / "replay") == 256, "another folder takes them, too"
    weights = [
        (run / "model" / "model.safetensors").read_bytes() for run in (whole, tmp_path / "replay")
    ]
    assert weights[0] == weights[1]
    ran, replayed = (steps_of(run)[3] for run in (whole, tmp_path / "replay"))
    del replayed["data/epoch"]  # nothing is drawn
    assert replayed.items() <= ran.items(), "eval/* aside"
    assert replayed["optim/grad_norm"] > 0


def test_a_dump_of_another_step_or_of_other_ranks_is_refused(whole):
    dump = whole / "rollouts/step_000003.parquet"
    for step, ranks in ((2, 2), (3, 1)):
        here = SimpleNamespace(rank=0, size=ranks)
        told = f"is of step 3 on 2 ranks, this is step {step} on {ranks}"
        with pytest.raises(SystemExit, match=told):
            load_rollouts(dump, step, here, LIMITS)


def test_a_fork_is_a_copy(tmp_path):
    """It trains and evaluates by its own default, from a checkpoint under its own name; that one
    goes on, test_sft_runs.py tests."""
    text = (ROOT / "grpo.py").read_text()
    default = "    learning_rate: Amount = 1e-6  # peak of the schedule\n"
    assert text.count(default) == 1
    fork = tmp_path / "my_grpo.py"
    fork.write_text(
        text.replace(default, "    learning_rate: Amount = 3e-6  # peak of the schedule\n")
    )
    rows = [{"data_source": "countdown", "prompt": [{"role": "user", "content": "1 2 = 3"}]}]
    rows[0]["reward_model"] = {"ground_truth": {"numbers": [1, 2], "target": 3}}
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows * 8))
    options = ["--model", "tiny", "--train-data", data, "--eval-data", data, "--engine", "hf"]
    options += ["--eval-rows", 2, "--no-eval-before"]
    options += ["--prompts-per-step", 2, "--samples-per-prompt", 2, "--max-response-tokens", 8]
    options += ["--micro-batch-tokens", 256, "--save-every", 1, "--output-dir", tmp_path / "run"]
    by_itself = {"PYTHONPATH": str(ROOT)}  # in the root it needs none
    run_script(fork, *options, "--total-steps", 1, env=by_itself)
    assert steps_of(tmp_path / "run")[1]["optim/lr"] == 3e-6
    checkpoint = tmp_path / "run/checkpoints/step_000001"
    assert json.loads((checkpoint / "manifest.json").read_text())["script"] == "my_grpo"
    done = run_script(fork, *options, "--eval-only", env=by_itself)
    assert f"evaluating {checkpoint}\n" in done.stdout and "samples:" in done.stdout
    assert "--learning-rate" in run_script(fork, "--help", env=by_itself).stdout

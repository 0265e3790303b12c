"""grpo.py as its users run it: ranks, real vLLM, the embedded policy; kill, resume and replay of
one whole run."""

import json

import pyarrow.parquet as pq
import pytest
import torch
from helpers import LITTLE_CACHE, ROOT, kill_once, metrics_of, run_script, steps_of
from model_folders import other_weights
from safetensors.torch import load_file

from common.export import Args, main

OPTIONS = ["--prompts-per-step", 6, "--samples-per-prompt", 4, "--max-response-tokens", 40]
OPTIONS += ["--max-rows", 64, "--eval-rows", 8, "--eval-every", 2]
OPTIONS += ["--total-steps", 5, "--save-every", 2, "--keep-checkpoints", 3]
OPTIONS += ["--minibatches", 2, "--kl-loss-coef", 0.01, "--kl-estimator", "k3-is"]
OPTIONS += ["--dump-rollouts-every", 1, *LITTLE_CACHE]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run_script("grpo.py", *OPTIONS, "--output-dir", folder, ranks=2)
    return folder


def killed_and_resumed(whole, folder, ranks: int, **resume) -> None:
    kill_once("grpo.py", *OPTIONS, "--output-dir", folder, ranks=ranks, after_step=3)
    assert (folder / "checkpoints" / "latest").read_text() == "step_000002"
    run_script("grpo.py", *OPTIONS, "--output-dir", folder, ranks=ranks, **resume)

    assert steps_of(folder) == steps_of(whole) and len(steps_of(whole)) == 6
    (resumed,) = [r for r in metrics_of(folder) if r.get("event") == "resumed"]
    assert resumed["step"] == 2
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (whole, folder)]
    assert weights[0] == weights[1], "resumed weights differ"


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kill_and_resume_equals_an_uninterrupted_run(whole, tmp_path, fresh):
    """Samples, metrics, checkpoints, bit for bit. `fresh`: the second half is started by torchrun,
    so a forked run equals one by torchrun, too."""
    folder = tmp_path / "killed"
    killed_and_resumed(whole, folder, ranks=2, fresh=fresh)
    for step in range(1, 6):
        dumps = [
            pq.read_table(run / f"rollouts/step_{step:06d}.parquet") for run in (whole, folder)
        ]
        assert dumps[0].equals(dumps[1]) and len(dumps[0]) == 24
    files = [
        {f.relative_to(run) for f in (run / "checkpoints").rglob("*") if f.is_file()}
        for run in (whole, folder)
    ]
    assert (
        files[0] == files[1] and len([f for f in files[0] if f.suffix == ".safetensors"]) == 2 * 3
    )
    for file in files[0]:
        if file.suffix == ".safetensors":  # whose header has its entries in any order
            tensors, others = (load_file(run / file) for run in (whole, folder))
            assert tensors.keys() == others.keys()
            assert all(torch.equal(tensors[name], others[name]) for name in tensors), file
        elif file.name != "manifest.json":
            assert (whole / file).read_bytes() == (folder / file).read_bytes(), file


def test_a_resume_with_another_reference_is_refused(whole, tmp_path):
    """The policy's weights come from the checkpoint, those that KL is charged against from
    --model."""
    data = [f"--{part}-data={whole / 'data' / part}.parquet" for part in ("train", "eval")]
    options = [*OPTIONS, "--engine", "hf", *data, "--resume", whole / "checkpoints" / "step_000004"]
    run = ["--model", other_weights(tmp_path / "model"), "--output-dir", tmp_path / "run"]
    done = run_script("grpo.py", *options, *run, ranks=2, check=False)
    assert done.returncode == 1 and "is of another reference, " in done.stderr, done.stderr


def test_the_export_of_a_checkpoint_of_two_ranks_is_the_runs_model(whole, tmp_path):
    main(Args(whole, "tiny", tmp_path / "out"))
    for file in (whole / "model").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.slow
def test_kill_and_resume_of_one_rank(tmp_path):
    run_script("grpo.py", *OPTIONS, "--output-dir", tmp_path / "whole", ranks=1)
    killed_and_resumed(tmp_path / "whole", tmp_path / "killed", ranks=1)


def test_replay_repeats_an_update_bit_for_bit(whole, tmp_path):
    replay = ["--resume", whole / "checkpoints/step_000004", "--output-dir", tmp_path / "replay"]
    replay += ["--replay", whole / "rollouts/step_000005.parquet"]
    run_script("grpo.py", *OPTIONS, *replay, ranks=2)
    weights = [
        (run / "model" / "model.safetensors").read_bytes() for run in (whole, tmp_path / "replay")
    ]
    assert weights[0] == weights[1]
    ran, replayed = (steps_of(run)[5] for run in (whole, tmp_path / "replay"))
    del replayed["data/epoch"]  # nothing is drawn
    assert replayed.items() <= ran.items(), "eval/* aside"
    replay[-1] = whole / "rollouts/step_000003.parquet"
    refused = run_script("grpo.py", *OPTIONS, *replay, ranks=2, check=False)
    assert (
        refused.returncode == 1 and "is of step 3 on 2 ranks, this is step 5 on 2" in refused.stderr
    )


def test_a_fork_is_a_copy(tmp_path):
    """It trains, goes on and evaluates by its own default, under its own name."""
    text = (ROOT / "grpo.py").read_text()
    default = "    learning_rate: Amount = 1e-6  # peak\n"
    assert text.count(default) == 1
    fork = tmp_path / "my_grpo.py"
    fork.write_text(text.replace(default, "    learning_rate: Amount = 3e-6  # peak\n"))
    rows = [{"data_source": "countdown", "prompt": [{"role": "user", "content": "1 2 = 3"}]}]
    rows[0]["reward_model"] = {"ground_truth": {"numbers": [1, 2], "target": 3}}
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows * 8))
    options = ["--model", "tiny", "--train-data", data, "--eval-data", data, "--engine", "hf"]
    options += ["--prompts-per-step", 2, "--samples-per-prompt", 2, "--max-response-tokens", 8]
    options += ["--micro-batch-tokens", 256, "--save-every", 1, "--output-dir", tmp_path / "run"]
    by_itself = {"PYTHONPATH": str(ROOT)}  # in the root it needs none
    for num_steps in (1, 2):
        run_script(fork, *options, "--total-steps", num_steps, env=by_itself)
    assert [steps_of(tmp_path / "run")[step]["optim/lr"] for step in (1, 2)] == [3e-6, 3e-6]
    manifest = tmp_path / "run/checkpoints/step_000002/manifest.json"
    assert json.loads(manifest.read_text())["script"] == "my_grpo"
    done = run_script(fork, *options, "--eval-only", env=by_itself)
    assert "evaluating " in done.stdout and "samples:" in done.stdout
    assert "--learning-rate" in run_script(fork, "--help", env=by_itself).stdout

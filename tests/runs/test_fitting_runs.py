"""Runs without --micro-batch-tokens: one number for all ranks, kept by a resume and by a replay."""

import json

import pyarrow.parquet as pq
import pytest
import torch
from helpers import ROOT, run_script, steps_of

from common.flags import Data, Machine, Rollout, Run
from common.hub import FOLDERS
from common.job import Job
from common.memory.plan import memory_phases

WORKER = ROOT / "tests" / "workers" / "free_memory.py"
OPTIONS = ["--model", "tiny", "--engine", "hf", "--engine-memory", 0.02, "--dtype", "fp32"]
OPTIONS += ["--eval-every", 0, "--no-eval-before", "--eval-rows", 2]
OPTIONS += ["--prompts-per-step", 4, "--samples-per-prompt", 4, "--learning-rate", 1e-3]
OPTIONS += ["--max-prompt-tokens", 64, "--max-response-tokens", 64, "--total-steps", 2]
OPTIONS += ["--save-every", 1, "--keep-checkpoints", 9, "--dump-rollouts-every", 1]


ROLLOUT = Rollout(max_prompt_tokens=64, max_response_tokens=64, engine="hf", engine_memory=0.02)


def free_for(tokens: int) -> float:
    """Gigabytes of which nine tenths are just enough for a micro-batch."""
    machine = Machine(micro_batch_tokens=tokens, attention="sdpa")
    gb = memory_phases(ROLLOUT, machine, 2, torch.float32, [str(FOLDERS["tiny"])], [], on_gpu=False)
    assert gb["rollout"] < gb["update"]
    return 1.001 * gb["update"] / 0.9


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run on ranks with much and with little memory."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    free = {"FREE_GB": f"16,{free_for(256)}"}
    done = run_script(WORKER, *OPTIONS, "--output-dir", folder, ranks=2, env=free)
    return folder, done.stdout


def test_the_tightest_rank_decides_before_the_first_update(whole):
    folder, output = whole
    assert "; --micro-batch-tokens 256 chosen to fit into 90% of what is free" in output
    assert json.loads((folder / "config.json").read_text())["args"]["micro_batch_tokens"] == 256
    for step in (1, 2):
        record = json.loads((folder / f"checkpoints/step_{step:06d}/trainer.json").read_text())
        dump = pq.read_table(folder / f"rollouts/step_{step:06d}.parquet")
        assert record["micro_batch_tokens"] == 256 and set(
            dump["micro_batch_tokens"].to_pylist()
        ) == {256}


def test_a_replay_from_another_folder_takes_it(whole, tmp_path):
    folder, _ = whole
    replay = [
        "--resume",
        folder / "checkpoints/step_000001",
        "--replay",
        folder / "rollouts/step_000002.parquet",
    ]
    data = [
        f"--train-data={folder / 'data' / 'train.parquet'}",
        f"--eval-data={folder / 'data' / 'eval.parquet'}",
    ]
    run_script(
        WORKER,
        *OPTIONS,
        *data,
        *replay,
        "--output-dir",
        tmp_path,
        ranks=2,
        env={"FREE_GB": "16,16"},
    )
    assert json.loads((tmp_path / "config.json").read_text())["args"]["micro_batch_tokens"] == 256
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (folder, tmp_path)]
    assert weights[0] == weights[1]
    assert steps_of(tmp_path)[2]["policy/loss"] == steps_of(folder)[2]["policy/loss"]


def test_a_resume_takes_it_and_a_typed_number_wins(whole, world, tmp_path, monkeypatch):
    """From another folder, whatever is free there; a run that begins anew chooses anew."""
    monkeypatch.setattr("common.job.init_world", lambda *_: world)
    monkeypatch.setattr("common.memory.plan.free_memory", lambda: 16e9)
    checkpoint = str(whole[0] / "checkpoints/step_000001")
    for resume, typed, expected in (
        (checkpoint, None, 256),
        (checkpoint, 64, 64),
        ("never", None, 16_384),
    ):
        run = Run(model="tiny", output_dir=tmp_path, resume=resume)
        job = Job("grpo", Data(), Machine(micro_batch_tokens=typed), run, demo=False, record=False)
        job.plan_memory(ROLLOUT, trained=[job.path], frozen=[])
        assert job.micro_batch_tokens == expected

"""The real trackers, without a network or a key: what is theirs is in their files."""

import re
import sqlite3

import pytest
from helpers import metrics_of, run_script
from pages import blocks

REWARD = """
def shaped(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(len(solution_str) % 2), "format": 0.25, "mean": 9.0}
"""


@pytest.mark.slow
def test_a_run_its_resume_and_an_evaluation_in_every_tracker(tmp_path):
    for name in ("tensorboard", "wandb", "trackio", "swanlab"):
        pytest.importorskip(
            name, reason=f"{name} is missing: pip install tensorboard wandb trackio swanlab"
        )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "reward.py").write_text(REWARD)
    run = tmp_path / "my-run"
    (pasted,) = [
        block.replace("\\\n", "").split()
        for _, block in blocks("docs/metrics.md")
        if "swanlab" in block and "grpo.py" in block
    ]
    assert pasted[:2] == ["python", "grpo.py"] and pasted[-1].count(",") == 3
    steps = [str(run) if word == "runs/tracked" else word for word in pasted[2:]]
    flags = ["--engine", "hf", "--max-prompt-tokens", 64, "--eval-rows", 4]
    flags += ["--reward-function", f"{tmp_path}/reward.py:shaped"]
    evaluation = [
        word for word in steps if word not in ("--total-steps", "2", "--prompts-per-step", "4")
    ]
    steps += ["--samples-per-prompt", 2, "--no-eval-before", "--save-every", 1]
    first = [1 if word == "2" else word for word in steps]
    environment = {
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HOME": str(tmp_path),
        "WANDB_MODE": "online",
    }
    for own in (first, steps, [*evaluation, "--eval-only"]):
        done = run_script("grpo.py", *own, *flags, env=environment, fresh=True, timeout=900)
        assert "dropped" not in done.stdout, done.stdout
        for command, tracker in (("wandb sync --append", "wandb"), ("swanlab sync", "swanlab")):
            assert f"later: {command} {run}/{tracker}/*run-*" in done.stdout
    logged = metrics_of(run)
    assert [record["step"] for record in logged if "event" not in record] == [1, 2]
    assert all(
        record["reward/format"] == 0.25 and record["reward/mean"] <= 1
        for record in logged
        if "event" not in record
    )

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reward/format")] == [1, 2]
    (base,) = (tmp_path / "trackio").glob("*.db")
    rows = (
        sqlite3.connect(base)
        .execute("select run_id, run_name, step, metrics from metrics order by id")
        .fetchall()
    )
    assert {name for _, name, _, _ in rows} == {"my-run"} and len(
        {ident for ident, *_ in rows}
    ) == 1
    assert [(step, b"eval/accuracy" in bytes(metrics)) for _, _, step, metrics in rows] == [
        (1, True),
        (2, True),
        (2, True),
    ]
    for tracker, kind in (("wandb", "offline-run-*/*.wandb"), ("swanlab", "run-*/*.swanlab")):
        files = sorted((run / tracker).glob(kind))
        assert len(files) == 3 and len({re.split("[-.]", file.name)[1] for file in files}) == 1, (
            "one run in three parts"
        )
        content = [file.read_bytes() for file in files]
        assert ["reward/format" in repr(part) for part in content] == [True, True, False], tracker
        assert all(b"eval/accuracy" in part for part in content), tracker

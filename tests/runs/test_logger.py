"""The run's records survive kills, full disks and broken trackers; the console stays readable."""

import errno
import json
import math
import os
import subprocess
import sys
import threading
import tomllib
import types
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ROOT, deadline, run_script

from common import config as machine
from common import distributed, ending, logger, script, trackers
from common.config import save_config
from common.flags import Run
from common.limits import usable_cpus
from common.logger import COLUMNS, Logger, StatusLine, fitted, open_logger, rows_per_step
from common.look.curves import plot_curves, read_metrics
from common.rollout.evaluation import as_sample, print_samples, summarize
from common.types import Episode, Row


def make(run_dir, total_steps=100, names=""):
    return Logger(run_dir, StatusLine(total_steps), trackers.Trackers(names, run_dir, {"seed": 1}))


def test_records_are_appended_by_a_resumed_run(tmp_path, capsys):
    first = make(tmp_path)
    for step in (1, 2, 3):
        first.log(step, {"reward/mean": step / 10})
    second = make(tmp_path)  # killed after step 3, resumed from a checkpoint of step 1
    second.event({"event": "resumed", "step": 1, "metrics": [1.5]})
    for step in (2, 3, 4):
        second.log(step, {"reward/mean": step * 10.0})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 7, "nothing is truncated"
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert records == [
        {"step": i, "reward/mean": value}
        for i, value in ((1, 0.1), (2, 20.0), (3, 30.0), (4, 40.0))
    ]


def test_evaluation_logged_apart_joins_its_step(tmp_path):
    log = make(tmp_path)
    log.log(1, {"reward/mean": 0.5})
    log.log(1, {"eval/accuracy": 0.25})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "reward/mean": 0.5, "eval/accuracy": 0.25}
    ]


def test_of_a_repeated_step_nothing_stays_of_the_first_time(tmp_path):
    log = make(tmp_path)
    for step, metrics in ((1, {"a": 1}), (2, {"a": 2, "b": 2}), (3, {"a": 3}), (2, {"a": 4})):
        log.log(step, metrics)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 1}, {"step": 2, "a": 4}]


def test_torn_line_costs_one_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a"')
    assert read_metrics(path) == [{"step": 1, "a": 1.0}]
    make(tmp_path).log(2, {"a": 2.0})
    assert read_metrics(path) == [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}]


def test_file_stays_valid_json(tmp_path):
    values = {
        "a": math.nan,
        "b": -math.inf,
        "c": np.float32(0.5),
        "d": torch.tensor(2.0),
        "e": np.int64(3),
        "f": True,
    }
    make(tmp_path).log(1, values)

    def reject(name):
        raise AssertionError(f"{name} is not JSON")

    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=reject)
    assert record == {"step": 1, "a": None, "b": None, "c": 0.5, "d": 2.0, "e": 3, "f": True}


def test_full_disk_costs_one_warning(tmp_path, monkeypatch, capsys):
    log = make(tmp_path)
    log.log(1, {"a": 1.0})

    @contextmanager
    def full(path, mode):
        """Takes half of what is written, then fails, as a disk does that fills up."""

        def write(text):
            file.write(text[: len(text) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

        with open(path, mode) as file:
            yield types.SimpleNamespace(write=write)

    monkeypatch.setattr(logger, "open", full, raising=False)
    log.log(2, {"a": 2.0})
    log.log(3, {"a": 3.0})
    monkeypatch.undo()
    log.log(4, {"a": 4.0})
    output = capsys.readouterr().out
    assert output.count("No space left on device") == 1 and "metrics.jsonl" in output
    assert [f"step {' ' * 2}{step}/100" in output for step in (1, 2, 3, 4)] == [True] * 4, (
        "the console line goes on"
    )
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 4]


@pytest.mark.parametrize("instead", [Path.mkdir, os.mkfifo], ids=["a folder", "a pipe"])
def test_what_stands_in_the_place_of_the_records_costs_them_and_not_the_run(
    tmp_path, capsys, instead
):
    for name in ("metrics.jsonl", "config.json"):
        instead(tmp_path / name)
    with deadline(30):  # nothing waits for a reader
        assert machine.changed_flags(tmp_path, {"seed": 1}) == {}
        make(tmp_path).log(1, {"a": 1.0})
        plot_curves(tmp_path)
        machine.save_config(tmp_path, {"seed": 1})
    said = capsys.readouterr().out
    assert f"warning: cannot write {tmp_path}/metrics.jsonl" in said and "step   1/100" in said
    assert (
        tmp_path / "config.json"
    ).is_file() or f"warning: {tmp_path}/config.json not written" in said


def test_records_that_cannot_be_read_or_made_cost_themselves(tmp_path, monkeypatch, capsys):
    (tmp_path / "metrics.jsonl").write_text("{}")

    def refuse(*_, **__):
        raise PermissionError("another user's")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    make(tmp_path).log(1, {"a": 1.0})
    (tmp_path / "file").write_text("")
    make(tmp_path / "file" / "run").log(2, {"a": 1.0})
    said = capsys.readouterr().out
    assert (
        said.count("warning: cannot write") == 2
        and "another user's" in said
        and "step   2/100" in said
    )


@pytest.mark.parametrize("text", ["null", '{"args": 5}', '{"args": [3]}', "{"])
def test_a_config_that_somebody_has_altered_costs_no_run(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert machine.changed_flags(tmp_path, {"seed": 1}) == {}


def test_other_ranks_do_nothing(tmp_path, capsys):
    log = Logger(tmp_path / "run", StatusLine(100), is_main=False)
    log.log(1, {"reward/mean": 1.0})
    log.event({"event": "x"})
    log.close()
    assert capsys.readouterr().out == "" and not (tmp_path / "run").exists()


def fake_wandb(monkeypatch, init, patience_s=60.0):
    module = types.SimpleNamespace(
        Settings=lambda **settings: settings, init=init, teardown=lambda: None
    )
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(trackers, "TRACKER_SECONDS", patience_s)


class FakeRun:
    url, offline = "https://example.org/run", False

    def __init__(self, fail_at=None):
        self.logged, self.fail_at, self.exit_code = [], fail_at, None

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, metrics):
        if metrics["step"] == self.fail_at:
            raise ConnectionError("network is down")
        self.logged.append(metrics)

    def finish(self, exit_code):
        self.exit_code = exit_code


def test_the_project_of_wandb_is_that_of_the_environment(tmp_path, monkeypatch):
    received = {}
    fake_wandb(monkeypatch, lambda **options: received.update(options) or FakeRun())
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    trackers.Trackers("wandb", tmp_path / "mine", {}).close()
    assert received["project"] == "ours"


def test_tracker_receives_numbers(tmp_path, monkeypatch):
    monkeypatch.delitem(ending.reached, "status", raising=False)
    run, received = FakeRun(), {}
    fake_wandb(monkeypatch, lambda **options: received.update(options) or run)
    started = trackers.Trackers(" wandb, ", tmp_path / "mine", {"lr": 1e-6, "path": Path("/x")})
    log = Logger(tmp_path / "mine", StatusLine(100), started)
    log.log(1, {"reward/mean": 0.5, "policy/loss": math.nan})
    log.event({"event": "resumed", "step": 1, "changed": {"lr": [1, 2]}})
    log.event({"event": "eval_only", "step": 1, "eval/accuracy": 0.25})
    log.close()
    assert run.logged == [{"step": 1, "reward/mean": 0.5}, {"step": 1, "eval/accuracy": 0.25}]
    assert run.exit_code == 0 and received["name"] == "mine", "named after its folder"
    assert received["project"] == "minimal-rl"
    assert (
        received["config"] == {"lr": 1e-6, "path": "/x"}
        and received["settings"]["init_timeout"] == 6
    )


def test_a_resume_has_the_id_of_its_folder_and_a_failure_is_told(tmp_path, monkeypatch):
    ids, runs = [], []

    def init(**options):
        ids.append((options["id"], options["resume"]))
        runs.append(FakeRun())
        return runs[-1]

    fake_wandb(monkeypatch, init)
    monkeypatch.setitem(ending.reached, "status", 130)
    for folder in ("a", "a", "b"):
        make(tmp_path / folder, names="wandb").close()
    assert ids[0] == ids[1] != ids[2] and ids[0][1] == "allow" and len(ids[0][0]) == 20
    assert [run.exit_code for run in runs] == [1, 1, 1]


@pytest.mark.parametrize("online", ["raises", "hangs"])
def test_a_tracker_without_its_server_goes_on_offline(online, tmp_path, monkeypatch, capsys):
    modes, run, released = [], FakeRun(), threading.Event()

    def init(mode, **_):
        modes.append(mode)
        if mode is None:
            if online == "hangs":
                released.wait(60)
            raise ConnectionError("no route to host")
        return run

    fake_wandb(monkeypatch, init, patience_s=3.0)
    log = make(tmp_path, names="wandb")
    log.log(1, {"a": 1.0})
    released.set()
    said = capsys.readouterr().out
    why = "ConnectionError: no route to host" if online == "raises" else "no answer within 2 s"
    assert (
        f"--log wandb stays offline ({why}); later: wandb sync --append {tmp_path}/wandb/*run-*"
        in said
    )
    assert (
        modes == [None, "offline"]
        and run.logged == [{"step": 1, "a": 1.0}]
        and "dropped" not in said
    )


def test_tracker_that_fails_to_start(tmp_path, monkeypatch, capsys):
    def init(**_):
        raise RuntimeError("api_key not configured\nlong trace")

    fake_wandb(monkeypatch, init)
    log = make(tmp_path, names="wandb")
    log.log(1, {"a": 1.0})
    log.close()
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert (
        len(warnings) == 1
        and "--log wandb" in warnings[0]
        and "api_key not configured" in warnings[0]
    )
    assert "pip install" not in warnings[0]


def test_tracker_that_hangs(tmp_path, monkeypatch, capsys):
    released, answered = threading.Event(), []
    fake_wandb(monkeypatch, lambda **_: answered.append(released.wait(60)), patience_s=0.3)
    log = make(tmp_path, names="wandb")
    log.log(1, {"a": 1.0})
    assert not answered, "nobody waits for it"
    released.set()
    assert capsys.readouterr().out.count("dropped (no answer within 0.") == 1


def test_tracker_that_fails_later(tmp_path, monkeypatch, capsys):
    run = FakeRun(fail_at=2)
    fake_wandb(monkeypatch, lambda **_: run)
    log = make(tmp_path, names="wandb")
    for step in (1, 2, 3):
        log.log(step, {"a": 1.0})
    log.close()
    assert (
        run.logged == [{"step": 1, "a": 1.0}]
        and capsys.readouterr().out.count("network is down") == 1
    )
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("name", trackers.START)
def test_tracker_that_is_not_installed(tmp_path, monkeypatch, capsys, name):
    for module in (name, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)  # import raises ImportError
    make(tmp_path, names=name).log(1, {"a": 1.0})
    said = capsys.readouterr().out
    assert said.count(f"warning: --log {name} dropped (ModuleNotFoundError: ") == 1
    assert f": pip install {name});" in said


def test_unknown_tracker(tmp_path):
    with pytest.raises(ValueError, match=r"--log tensorboard,wandbb: unknown tracker 'wandbb'"):
        make(tmp_path, names="tensorboard,wandbb")


def test_console_lines_are_aligned(tmp_path, capsys):
    log = make(tmp_path, total_steps=1000)
    steps = [
        {"reward/mean": 0.5, "policy/entropy": 0.01, "optim/grad_norm": 0.7, "time/step_s": 3.0},
        {
            "reward/mean": -0.25,
            "policy/entropy": math.nan,
            "optim/grad_norm": 1.2e9,
            "time/step_s": 333.0,
        },
        {"reward/mean": 0.5, "optim/grad_norm": 0.7, "time/step_s": 3.0, "eval/accuracy": 0.125},
        {
            "reward/mean": 0.5,
            "policy/entropy": -12345.678,
            "optim/grad_norm": 0.7,
            "time/step_s": 3.0,
        },
        {
            "reward/mean": 0.5,
            "policy/entropy": 1e-9,
            "optim/grad_norm": math.inf,
            "eval/accuracy": 1.0,
        },
    ]
    for step, metrics in zip((1, 22, 333, 999, 1000), steps):
        log.log(step, metrics)
    lines = capsys.readouterr().out.splitlines()
    for label in ("/1000", "reward ", "ent ", "grad ", " s "):
        assert len({line.index(label) for line in lines if label in line}) == 1, label
    assert ["eval" in line for line in lines] == [False, False, True, False, True]
    assert all(line.rindex("eval") > line.rindex("grad") for line in lines if "eval" in line)
    assert "ent " not in lines[2], "an absent metric leaves its place blank"
    assert max(map(len, lines)) < 119


ONE_STEP = {
    "reward/mean": -0.25,
    "reward/accuracy": 0.5,
    "policy/loss": 0.01,
    "policy/entropy": 0.123,
    "policy/kl_to_ref": 0.0123,
    "policy/rollout_logprob_gap": 1.23e-4,
    "rollout/response_length": 12345.6,
    "rollout/truncated": 0.031,
    "reward/zero_variance_groups": 0.25,
    "optim/grad_norm": 0.7,
    "optim/lr": 1e-6,
    "optim/loss_scale": 1.0,
    "time/step_s": 333.3,
}


def test_the_line_of_a_long_run_has_150_columns():
    assert set(COLUMNS) - set(ONE_STEP) == {"eval/accuracy", "eval/loss"}
    status = StatusLine(9999)
    plain = status.line(1000, ONE_STEP)
    assert "cut 0.03  equal 0.25  grad 0.700" in plain and "loss" not in plain and "lr" not in plain
    for value in (1234567.8, math.nan, -math.inf):
        metrics = dict.fromkeys(ONE_STEP, value) | {"eval/accuracy": 0.5, "time/step_s": 100_000.0}
        assert len(status.line(9998, metrics)) <= 150
    assert len(status.line(9998, ONE_STEP | {"eval/accuracy": 0.5})) <= 150
    taught = {name: x for name, x in ONE_STEP.items() if name != "policy/kl_to_ref"}
    taught |= {"distill/divergence": 0.0123, "eval/accuracy": 0.5}
    line = StatusLine(9999).line(9998, taught)
    assert "  div 0.0123" in line and len(line) <= 150


def test_supervised_training_shows_its_loss_and_rate():
    status = StatusLine(100)
    line = status.line(
        1,
        {"policy/loss": 12.3456, "optim/lr": 1e-4, "optim/grad_norm": 0.1, "optim/loss_scale": 1.0},
    )
    assert "loss 12.3456  grad 0.100  lr 1.0e-04" in line
    assert status.line(1, {"eval/loss": 9.99996}).endswith("eval loss 10.000")
    assert status.line(1, {"eval/loss": 123.4567}).endswith("eval loss 123.46")


@pytest.mark.parametrize(
    "value, width, spec, text",
    [
        (0.5, 6, ".4f", "0.5000"),
        (9.99996, 6, ".4f", "10.000"),
        (12345.678, 5, ".3f", "12346"),
        (-12345.678, 5, ".3f", " -12k"),
        (123456.0, 4, ".1f", "123k"),
        (1.2e9, 5, ".3f", "1200M"),
        (1e30, 5, ".3f", "1e+30"),
        (math.nan, 5, ".3f", "  nan"),
        (9.2e-5, 5, ".0e", "9e-05"),
    ],
)
def test_a_large_number_has_fewer_decimals(value, width, spec, text):
    assert fitted(value, width, spec) == text


def test_a_step_that_trained_nothing_says_so():
    status = StatusLine(100)
    no_token = {key: value for key, value in ONE_STEP.items() if key != "optim/grad_norm"}
    lines = [
        status.line(1, metrics)
        for metrics in (no_token, ONE_STEP, ONE_STEP | {"optim/grad_norm": 0.0})
    ]
    assert ["untrained" in line for line in lines] == [True, False, True]
    assert len({line.index(" s ") for line in lines}) == 1, "in the place of the gradient's norm"
    assert "untrained" not in status.line(1, no_token | {"value/grad_norm": 0.5}), (
        "the critic alone is trained"
    )
    assert "untrained" not in status.line(1, ONE_STEP | {"optim/grad_norm": math.nan}), (
        "a skipped step"
    )
    assert "untrained" not in status.line(0, {"eval/accuracy": 0.5})


def test_skipped_optimizer_steps_are_shown():
    status = StatusLine(100)
    lines = [status.line(1, ONE_STEP | {"optim/skipped_steps": skipped}) for skipped in (0.0, 2.0)]
    assert ["skipped 2" in line for line in lines] == [False, True] and "skipped" not in lines[0]
    assert len({line.index(" s ") for line in lines}) == 1, "in the place of the gradient's norm"
    nothing = ONE_STEP | {"optim/grad_norm": math.nan, "optim/skipped_steps": 1.0}
    assert "skipped 1" in status.line(1, nothing), "also if there was no other"


def test_eta_is_the_median_step_times_the_rest(tmp_path, capsys):
    log = make(tmp_path, total_steps=1210)
    for step, seconds in ((8, 500.0), (9, 3.0), (10, 3.0)):  # the first step compiles
        log.log(step, {"time/step_s": seconds})
    assert " eta   60m " in capsys.readouterr().out.splitlines()[-1]
    log.log(1210, {"time/step_s": 3.0})
    assert " eta    0s " in capsys.readouterr().out


def test_two_shortened_samples(tmp_path, capsys):
    texts = [
        ("PROMPT", "start" + "x" * 5000 + "\x1b[2Jend", 1.0),
        ("b", "c", 0.1),
        ("third", "", 0.0),
    ]
    samples = [
        {"prompt": p, "completion": c, "score": s, "truth": "t" * 999, "truncated": not s}
        for p, c, s in texts
    ]
    print_samples(7, samples)
    output = capsys.readouterr().out
    for words in ("step 7, score 1, truth tttt", "start", "end", "score 0.1"):
        assert words in output
    assert (
        "[cut off]" not in output
        and len(output) < 1300
        and "third" not in output
        and "\x1b" not in output
    )


def test_a_sample_tells_the_truth_and_that_it_was_cut_off(tmp_path, capsys):
    sample = {"prompt": "p", "completion": "said", "score": 0.5, "truth": '{"target": 24}'}
    print_samples(7, [sample | {"truncated": True}, sample | {"truncated": False}])
    first, second = capsys.readouterr().out.split("---")[1:]
    assert first == ' step 7, score 0.5, truth {"target": 24}\np\n>>> said [cut off]\n'
    assert second == ' step 7, score 0.5, truth {"target": 24}\np\n>>> said\n'


@pytest.mark.parametrize(
    "ground_truth, text",
    [
        ("42", "42"),
        ({"target": 7, "numbers": [1, 2]}, '{"target": 7, "numbers": [1, 2]}'),
        (["né", Path("/x")], '["né", "/x"]'),
        ("\ud800", "?"),
        (None, "null"),
    ],
)
def test_the_truth_of_a_row_is_a_text(ground_truth, text):
    row = Row(3, "x", "p", ground_truth, {}, [5])
    assert row.truth == text
    episode = Episode(
        0, 0, [5], [6], [1], [-0.5], "length", {"score": math.nan}, row=row.index, truth=row.truth
    )
    tokenizer = types.SimpleNamespace(decode=lambda ids, **_: str(ids))
    sample = as_sample(episode, row, tokenizer, with_tools=False)
    # without one it is not scored
    truth, score = (None, None) if ground_truth is None else (text, 0.0)
    assert (sample["row"], sample["truth"], sample["truncated"], sample["score"]) == (
        3,
        truth,
        True,
        score,
    )


@pytest.mark.parametrize("anls, mean", [("high", None), (0.75, 0.75)])
def test_a_users_anls_may_be_a_text(anls, mean):
    row = Row(3, "x", "p", "a", {}, [5])
    episode = Episode(
        0, 0, [5], [6], [1], [-0.5], "stop", {"score": 1.0, "anls": anls}, row=3, truth="a"
    )
    sample = as_sample(
        episode, row, types.SimpleNamespace(decode=lambda ids, **_: str(ids)), with_tools=False
    )
    assert summarize([sample]).get("eval/anls") == mean


@pytest.mark.slow
def test_nothing_but_ours_is_printed(tmp_path):
    """With real vLLM and pictures: Triton, NUMA, transformers and torch have nothing to say."""
    sizes = [
        "--prompts-per-step",
        4,
        "--samples-per-prompt",
        4,
        "--eval-rows",
        4,
        "--tool-workers",
        1,
    ]
    done = run_script(
        "curiosity_rl.py",
        *sizes,
        "--total-steps",
        1,
        "--output-dir",
        tmp_path / "run",
        ranks=2,
        fresh=True,
    )
    assert (
        done.stdout.startswith("no --model given: running the embedded demo\n")
        and done.stderr == ""
    )


@pytest.mark.parametrize("commit", ["0123456789abcdef0123456789abcdef01234567", ""])
def test_config_has_the_commit_of_a_model_of_the_hub(tmp_path, monkeypatch, world, commit):
    monkeypatch.setattr("common.logger.at_end", ExitStack())
    job = SimpleNamespace(
        world=world,
        output_dir=tmp_path,
        run=SimpleNamespace(log=""),
        training=True,
        model_folder=f"cache/models--org--model/snapshots/{commit}/checkpoint-1",
        checkpoint=None,
        compute_dtype=torch.float32,
        attention="sdpa",
        compile=False,
        micro_batch_tokens=64,
        activation_memory=0.7,
        engine_memory=0.0,
    )
    checkpoints = SimpleNamespace(
        resumes_own=False, warn_if_large=lambda: None, note_if_none_is_due=lambda *steps: None
    )
    open_logger(job, Run(model="org/model@main/checkpoint-1"), 1, checkpoints).close()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["args"]["model"] == "org/model@main/checkpoint-1"
    assert config["chosen"].get("model_commit", "") == commit
    assert config["chosen"]["micro_batch_tokens"] == 64
    assert config["chosen"]["activation_memory"] == 0.7
    assert config["chosen"]["compile"] is False


@pytest.mark.parametrize(
    "flags, rows",
    [
        ({"prompts_per_step": 4, "dynamic_sampling": False, "oversample": 1.0}, 4),
        ({"prompts_per_step": 4, "dynamic_sampling": True, "oversample": 1.0}, None),
        ({"prompts_per_step": 4, "dynamic_sampling": False, "oversample": 1.5}, None),
        ({"batch_size": 8}, 8),
    ],
)
def test_rows_that_a_step_takes(flags, rows):
    assert rows_per_step(flags) == rows


def test_config(tmp_path):
    args = {"learning_rate": 1e-6, "output_dir": Path("runs/x"), "clip": math.inf, "names": ("a",)}
    save_config(tmp_path / "new", args, dtype="torch.float32", attention="sdpa")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["config.json"], (
        "no temporary file stays"
    )
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["args"] == {
        "learning_rate": 1e-6,
        "output_dir": "runs/x",
        "clip": None,
        "names": ["a"],
    }
    assert config["chosen"] == {"dtype": "torch.float32", "attention": "sdpa"}
    assert config["versions"]["torch"] == torch.__version__ and config["versions"]["transformers"]
    assert "git" in config and config["hardware"]["cpus"] == usable_cpus()
    assert config["version"] == machine.project_version()
    assert os.uname().nodename not in (tmp_path / "new" / "config.json").read_text()


def test_the_version_of_a_run_is_that_of_pyproject(tmp_path, monkeypatch):
    """With git or without; where `pip install .` has copied common/, it is the package's."""
    written = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert machine.project_version() == written
    (tmp_path / "common").mkdir()
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "common/config.py"))
    monkeypatch.setattr(machine, "installed_version", {"minimal-rl": "7.1"}.get)
    assert machine.project_version() == "7.1"
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "8.2"\n')
    assert machine.project_version() == "8.2"
    (tmp_path / "pyproject.toml").write_text("")
    assert machine.project_version() is None


def git(folder, *command):
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *command], check=True, capture_output=True, text=True
    )


def test_git_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert machine.git_commit() is None
    git(tmp_path, "init")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-m", "first")
    git(tmp_path, "tag", "-a", "v1", "-m", "a tag must not replace the commit")
    commit = git(tmp_path, "rev-parse", "HEAD").stdout.strip()
    assert machine.git_commit() == commit
    (tmp_path / "a").write_text("2")
    assert machine.git_commit() == f"{commit}-dirty"


def test_curves(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("")
    plot_curves(tmp_path)
    assert not (tmp_path / "curves.png").exists(), "nothing measured, nothing drawn"
    log = make(tmp_path)
    log.log(0, {"eval/accuracy": 0.1})
    for step in range(1, 41):
        log.log(
            step,
            {
                "reward/mean": step / 50,
                "policy/entropy": math.nan if step == 3 else 1.0,
                "time/step_s": 1.0,
            },
        )
    plot_curves(tmp_path)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl"]


@pytest.fixture
def panels(tmp_path, monkeypatch):
    """A function: {title: axes} of the curves of the run in tmp_path, which are not saved."""
    figures = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, path, **_: figures.append(figure)
    )
    monkeypatch.setattr("common.look.curves.replace_file", lambda path, write: write(path))

    def draw(*records: dict):
        lines = [json.dumps({"step": step} | record) for step, record in enumerate(records, 1)]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
        plot_curves(tmp_path)
        return {axes.get_title("left"): axes for axes in figures[-1].axes}

    return draw


def ticks(axis) -> list[str]:
    """What stands at the ticks that are seen."""
    low, high = axis.get_view_interval()
    places = [place for place in axis.get_majorticklocs() if low <= place <= high]
    texts = axis.get_major_formatter().format_ticks(places)
    assert axis.get_major_formatter().get_offset() == "", "which would stand on the title"
    return texts


def test_curves_are_over_whole_steps(panels):
    drawn = panels(*({"reward/mean": 0.5, "rollout/truncated": 0.1 * i} for i in (1, 2, 3)))
    assert list(drawn) == ["reward", "share that is cut off"]
    for axes in drawn.values():
        assert axes.get_xlabel() == "step"
        assert all(tick == round(tick) for tick in axes.get_xticks())
    assert drawn["share that is cut off"].get_ylim()[0] == 0


@pytest.mark.parametrize(
    "steps, expected",
    [
        ([1], ["1"]),
        ([1, 2], ["1", "2"]),
        ([10**6, 3 * 10**6], ["1000000", "1500000", "2000000", "2500000", "3000000"]),
    ],
)
def test_steps_are_written_out(panels, steps, expected):
    drawn = panels(*({"step": step, "reward/mean": 0.1 * step} for step in steps))
    assert ticks(drawn["reward"].xaxis) == expected


@pytest.mark.parametrize("magnitude", [1e-9, 0.03, 1.0, 123.0, 4e7])
@pytest.mark.parametrize("spread", [0.0, 1e-16, 1e-5, 2e-3, 0.3, 2.0])
def test_ticks_that_differ_look_different(panels, magnitude, spread):
    values = [magnitude, magnitude * (1 + spread), magnitude * (1 + 0.3 * spread)]
    axis = panels(*({"reward/mean": value} for value in values))["reward"].yaxis
    low, high = axis.get_view_interval()
    assert low < min(values) and max(values) < high
    texts = ticks(axis)
    assert len(set(texts)) == len(texts) >= 3
    assert max(len(text) for text in texts) <= 10, "there is room for ten"
    if spread < 1e-3:
        assert high - low > 0.1 * magnitude, "a constant, not the noise of its rounding"


def test_a_constant_of_zero_has_an_axis(panels):
    drawn = panels({"reward/mean": 0.0, "rollout/truncated": 0.0}, {"reward/mean": 0.0})
    assert drawn["reward"].get_ylim() == (-1, 1)
    assert drawn["share that is cut off"].get_ylim() == (0, 1)


def test_a_panel_is_named_after_what_was_measured(panels):
    gap = {"policy/rollout_logprob_gap": 1e-3}
    assert list(panels(gap, gap)) == ["log-prob gap, engine to trainer"]
    assert list(panels(gap | {"policy/kl_to_ref": 0.1})) == [
        "KL to the reference (nats)",
        "log-prob gap, engine to trainer",
    ]


@pytest.mark.parametrize(
    "args, label",
    [
        ({"eval_temperature": 0.0}, "eval, greedy"),
        ({"eval_temperature": 0.6}, "eval, sampled"),
        ({"eval_temperature": "?"}, "eval"),
        ({}, "eval"),
    ],
)
def test_the_legend_says_how_evaluations_decode(tmp_path, panels, args, label):
    (tmp_path / "config.json").write_text(json.dumps({"args": args}))
    metrics = ["reward/accuracy", "eval/accuracy", "tool/rapr", "eval/rapr"]
    metrics += ["rollout/truncated", "eval/truncated"]
    for axes in panels(dict.fromkeys(metrics, 0.5)).values():
        labels = [text.get_text() for text in axes.get_legend().get_texts()]
        assert labels == ["train, sampled", label]
    losses = panels({"policy/loss": 1.0, "eval/loss": 1.0})["loss"]
    assert [text.get_text() for text in losses.get_legend().get_texts()] == ["train", "eval"]


class Left(Exception):
    """Instead of os._exit."""


@pytest.mark.parametrize(
    "end, status, line",
    [
        (None, 0, ""),
        (SystemExit(143), 143, "stopped at step 3; last checkpoint: runs/x/step_000002\n"),
        (KeyboardInterrupt(), 130, "interrupted at step 3; last checkpoint: runs/x/step_000002\n"),
        (SystemExit("x"), 1, "x\n"),
        (ValueError("x"), 1, None),  # a trace
    ],
)
def test_what_is_to_be_done_at_the_end_is_done_however_a_run_ends(
    end, status, line, monkeypatch, capsys
):
    def main():
        if end:
            raise end

    def leave(status):
        raise Left(status)

    done, at_end = [], ExitStack()
    at_end.callback(done.append, "curves")
    at_end.callback(lambda: 1 / 0)
    monkeypatch.setattr(ending, "at_end", at_end)
    monkeypatch.setattr(ending, "_leaving", threading.Lock())
    reached = {"step": 3, "checkpoint": "runs/x/step_000002"}
    monkeypatch.setattr(ending, "reached", reached)
    monkeypatch.setattr(ending.os, "_exit", leave)
    monkeypatch.setattr(distributed.dist, "is_initialized", lambda: False)
    with pytest.raises(Left) as left:
        script.run(main)
    assert left.value.args == (status,) and done == ["curves"], (
        "and an error in it changes no exit status"
    )
    printed = capsys.readouterr().err
    assert line is None or printed == line

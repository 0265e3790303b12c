"""tests/bench/curves.py: its runs can be started, and it says what the kept ones show."""

import importlib
import os
import sys

import pytest
from helpers import ROOT

from common.flags import parse


@pytest.fixture(autouse=True)
def bench_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "bench"))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # which benchmarks change


def test_every_run_has_flags_that_its_script_takes(monkeypatch):
    from studies import STUDIES

    for study in STUDIES.values():
        for run in (run for run in study.runs.values() if not run.command.startswith("trl")):
            script, *flags = run.command.split()
            module = importlib.import_module(script.removesuffix(".py"))
            data = ["--train-data", "x", "--eval-data", "x"] if run.data else []
            data += ["--model", "x"] if run.parent else []
            seed = ["--seed", str(run.seed)] if run.seed is not None else []
            monkeypatch.setattr(sys, "argv", [script, *flags, *data, *seed])
            args, _ = parse(module.Args, module.DEMO, module.__doc__)
            module.check_args(args)
            assert run.seed is None or args.run.seed == run.seed


def test_every_kept_result_is_a_run_that_can_be_made_again():
    from studies import STUDIES

    named = [(name, run) for study in STUDIES.values() for name, run in study.runs.items()]
    names = dict(named)
    assert all(names[name] == run for name, run in named)
    assert {path.name for path in (ROOT / "results").iterdir() if path.is_dir()} <= set(names)


def test_seconds_are_those_of_training():
    from study_results import curve, reach

    records = [
        {"step": 0, "eval/accuracy": 0.25, "time/eval_s": 6.0},
        {"step": 1, "time/step_s": 5.0},
        {"step": 2, "time/step_s": 11.0, "time/eval_s": 6.0, "eval/accuracy": 0.5},
    ]
    points = curve(records)
    assert [(p["step"], p["seconds"], p["value"]) for p in points] == [(0, 0.0, 0.25), (2, 10.0, 0.5)]
    assert (reach(points, 0.5), reach(points, 0.6)) == (10.0, None)
    assert curve([]) == []


def test_an_interval_is_that_of_students_t():
    from study_results import spread

    assert spread([0.1, 0.2, 0.3]) == "0.200 ± 0.248"  # 4.30 × 0.1 / sqrt(3)
    assert spread([0.5]) == "0.500"

"""results/notebook/curves.py: the command of each of its runs is one that its script takes."""

import importlib
import os
import sys

import pytest
from helpers import ROOT

from common.flags import parse


@pytest.fixture(autouse=True)
def notebook_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "results" / "notebook"))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # which it changes


def test_the_command_of_every_run_is_one_that_its_script_takes(monkeypatch, tmp_path):
    """With its seed, on its ranks, from its parent's model, and with its engine."""
    import curves
    from studies import STUDIES

    monkeypatch.setattr(
        curves, "write_rows", lambda rows, request: ["--train-data", rows, "--eval-data", rows]
    )
    seen = set()
    for study in STUDIES.values():
        for name, run in (
            (name, run) for name, run in study.runs.items() if not run.command.startswith("trl")
        ):
            if run.parent:
                (tmp_path / run.parent / "model").mkdir(parents=True, exist_ok=True)
            command = curves.our_command(curves.Args(runs=tmp_path), run, tmp_path / name)
            assert command[command.index("--nproc_per_node") + 1] == str(run.ranks)
            script = run.command.split()[0]
            program = command[command.index("--nproc_per_node") + 2 :]
            assert program[:2] == (
                ["results/notebook/wrong_engine.py", run.engine]
                if run.engine
                else [script, program[1]]
            )
            arguments = program[2 if run.engine else 1 :]
            module = importlib.import_module(script.removesuffix(".py"))
            monkeypatch.setattr(sys, "argv", [script, *arguments])
            args, _ = parse(module.Args, module.DEMO, module.__doc__)
            module.check_args(args)
            assert args.run.output_dir == tmp_path / name and args.run.save_every == 20
            assert run.seed is None or args.run.seed == run.seed
            assert not run.parent or args.run.model == str(tmp_path / run.parent / "model")
            assert not run.data or args.data.train_data == args.data.eval_data == run.data
            seen |= {"seed"} if run.seed else set()
            seen |= {key for key in ("parent", "data", "engine") if getattr(run, key)}
    assert seen == {"seed", "parent", "data", "engine"}

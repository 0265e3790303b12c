"""results/notebook: the commands of the studies, and what is kept of their runs."""

import importlib
import json
import os
import re
import sys
from pathlib import Path

import pytest
from helpers import ROOT

from common.flags import parse

NOT_RUN = {
    "two-cores": ["sft-countdown-samples", "grpo-countdown-seed2-samples"],
    "reasoning-gym": [
        "distill-gcd-seed1-samples",
        "gym-letter-counting-samples",
        "distill-letter-counting-seed1",
        "distill-letter-counting-seed1-samples",
        "grpo-letter-counting-seed1-samples",
        "sft-letter-counting-seed1",
        "sft-letter-counting-seed1-samples",
        "lora-letter-counting-seed1",
        "lora-letter-counting-seed1-samples",
        "grpo-letter-counting-seed2",
        "grpo-letter-counting-seed2-samples",
        "gym-family-relationships-samples",
        "distill-family-relationships-seed1",
        "distill-family-relationships-seed1-samples",
        "grpo-family-relationships-seed1",
        "grpo-family-relationships-seed1-samples",
    ],
}


@pytest.fixture(autouse=True)
def notebook_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "results" / "notebook"))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # which it changes


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_command_of_every_run_is_one_that_its_script_takes(monkeypatch, tmp_path, every):
    """With its seed, on its ranks, from its parent's model, and with its engine; of those that are
    made of the same flags and words some."""
    import curves
    from studies import STUDIES

    def write_rows(rows, request):
        return ["--train-data", rows, "--eval-data", rows]

    monkeypatch.setattr(curves, "write_rows", write_rows)
    seen = set()
    parsed = set()
    for study in STUDIES.values():
        folder = tmp_path / study.name
        # the longest first, which have most to say
        for name, run in sorted(study.runs.items(), key=lambda item: -len(item[1].command)):
            if run.command.startswith("trl"):
                continue
            script, *flags = run.command.split()
            # the other seeds of a command are parsed alike
            words = (
                {run.command + run.engine}
                if every
                else {(script, word) for word in flags if re.match("--|[a-z]", word)}
                | {(script, run.engine)}
            )
            if words <= parsed:
                continue
            parsed |= words
            if run.parent:
                (folder / run.parent / "model").mkdir(parents=True, exist_ok=True)
            command = curves.our_command(curves.Args(runs=tmp_path), run, folder / name)
            program = command[command.index("--nproc_per_node") + 1 :]
            assert program[0] == str(run.ranks)
            if run.engine:
                assert program[1:3] == ["results/notebook/wrong_engine.py", run.engine]
            else:
                assert program[1] == script
            arguments = program[3 if run.engine else 2 :]
            module = importlib.import_module(script.removesuffix(".py"))
            monkeypatch.setattr(sys, "argv", [script, *arguments])
            args, _ = parse(module.Args, module.DEMO, module.__doc__)
            module.check_args(args)
            assert args.run.output_dir == folder / name and args.run.save_every == 20
            assert run.seed is None or args.run.seed == run.seed
            assert not run.parent or args.run.model == str(folder / run.parent / "model")
            assert not run.data or args.data.train_data == args.data.eval_data == run.data
            seen |= {key for key in ("seed", "parent", "data", "engine") if getattr(run, key)}
    assert seen == {"seed", "parent", "data", "engine"}


def test_what_is_kept_of_each_study_is_complete():
    from kept import is_complete
    from studies import STUDIES

    results = ROOT / "results"
    for study in STUDIES.values():
        if study.name != "one-gpu":
            missing = [name for name in study.all_runs if not is_complete(study, results, name)]
            assert missing == NOT_RUN.get(study.name, []), study.name


def test_packed_runs_are_the_same_runs(tmp_path):
    from kept import is_complete
    from pack import COLUMNS, pack
    from studies import Run, Study
    from study_results import effects, read_study

    demos = ROOT / "results" / "demos"
    runs = {f"grpo-tiny-seed{seed}": Run("grpo.py", seed) for seed in (1, 2, 3)}
    study = Study("few", "?", runs, dots=True)
    for name in runs:
        copy(demos / name, tmp_path / "few" / name)
    before = read_study(study, tmp_path)
    table = effects(study, before)
    pack(study, tmp_path)
    assert sorted(path.name for path in (tmp_path / "few").iterdir()) == [
        "curves.csv.gz",
        "runs.csv",
    ]
    after = read_study(study, tmp_path)
    assert effects(study, after) == table
    for seed, metrics in before["grpo-tiny"].items():
        for old, new in zip(metrics, after["grpo-tiny"][seed], strict=True):
            wanted = {key: old[key] for key in COLUMNS if key in old}
            assert new == pytest.approx(wanted | {"step": old["step"]}, rel=1e-6)
    changed = Study("few", "?", runs | {"grpo-tiny-seed1": Run("grpo.py --lora-rank 16", 1)})
    assert not is_complete(changed, tmp_path, "grpo-tiny-seed1")
    assert is_complete(changed, tmp_path, "grpo-tiny-seed2")


def copy(folder: Path, to: Path) -> None:
    to.mkdir(parents=True)
    for file in ("metrics.jsonl", "run.json", "config.json"):
        (to / file).write_bytes((folder / file).read_bytes())


def test_what_a_run_leaves_is_kept(tmp_path):
    """A run that trained, and one that evaluates its model."""
    import curves
    from kept import is_complete, read_run
    from studies import Run, Study

    runs = {
        "warm": Run("sft.py"),
        "warm-samples": Run("grpo.py --eval-only", parent="warm"),
    }
    study = Study("few", "?", runs)
    args = curves.Args(runs=tmp_path / "runs", results=tmp_path / "results")
    made = args.runs / "few" / "warm"
    (made / "model").mkdir(parents=True)
    (made / "model" / "model.safetensors").write_bytes(b"weights")
    (made / "config.json").write_text(
        json.dumps({"args": {"total_steps": 2}, "at": str(ROOT / "x")})
    )
    for step in (1, 2):
        with (made / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "eval/loss": 1.0}) + "\n")
        curves.keep(args, study, "warm")
        assert is_complete(study, args.results, "warm") == (step == 2)
    assert json.loads((args.results / "few/warm/config.json").read_text())["at"] == "x"

    import pyarrow as pa
    import pyarrow.parquet as pq

    made = args.runs / "few" / "warm-samples"
    made.mkdir()
    sample = {"row": 0, "correct": True, "completion": "7", "truth": "7"}
    pq.write_table(pa.Table.from_pylist([sample]), made / "eval_samples.parquet")
    event = {"event": "eval_only", "step": 0, "eval/truncated": 0.25}
    (made / "metrics.jsonl").write_text(json.dumps(event) + "\n")
    curves.keep(args, study, "warm-samples")
    assert is_complete(study, args.results, "warm-samples")
    assert read_run(args.results / "few", "warm-samples").scores["strict, pass@1"][0] == 1
    (args.runs / "few/warm/model/model.safetensors").write_bytes(b"other weights")
    curves.keep(args, study, "warm")  # made again: what started from the first model stays done
    assert len(read_run(args.results / "few", "warm").models) == 2
    assert is_complete(study, args.results, "warm-samples")


def test_scores_tell_sources_format_and_content_apart(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq
    from scores import scores

    def sample(row: int, completion: str, source: str) -> dict:
        has_tag = "<answer>" in completion and "</answer>" in completion
        return {
            "row": row,
            "data_source": source,
            "correct": completion == "<answer>-12</answer>",
            "completion": completion,
            "truth": json.dumps({"task": "x", "config": {}, "entry": {"answer": "-12"}}),
            "rewards": json.dumps({"score": 0.0, "format": float(has_tag)}),
        }

    level = ["<answer>-12</answer>", "It is -12.", "<answer>12</answer>", "-123"]
    harder = ["-12</answer>", "<answer>5</answer>", "-12 5", "3-12"]
    samples = [sample(i // 2, text, "easy") for i, text in enumerate(level)]
    samples += [sample(2 + i // 2, text, "harder") for i, text in enumerate(harder)]
    path = tmp_path / "samples.parquet"
    pq.write_table(pa.Table.from_pylist(samples), path)
    found = scores(path)
    assert (found["rows"], found["samples"]) == (4, 2)
    easy_scores = found["sources"]["easy"]
    assert (easy_scores.pop("rows"), easy_scores.pop("samples")) == (2, 2)
    assert {name: share for name, (share, _) in easy_scores.items()} == {
        "strict, pass@1": 0.25,
        "strict, pass@2": 0.5,
        "lenient, pass@1": 0.5,
        "lenient, pass@2": 0.5,
        "format": 0.5,
        "strict, with format": 0.5,
    }
    harder_scores = found["sources"]["harder"]
    assert harder_scores["lenient, pass@1"][0] == 0.25
    assert harder_scores["format"][0] == 0.25 and harder_scores["strict, with format"][0] == 0
    pq.write_table(pa.Table.from_pylist(samples[:4]), path)
    assert "sources" not in scores(path)


def test_rows_of_a_procedural_task_are_held_out_with_a_harder_level(tmp_path):
    pytest.importorskip("reasoning_gym.factory")
    import pyarrow.parquet as pq
    from study_data import GYM_HARDER_ROWS, GYM_LEVEL_ROWS, Request, write_rows

    request = Request(tmp_path / "rl", supervised=False, gsm8k="hub", math=None)
    flags = write_rows("gym-gcd", request)
    train, held_out = (pq.read_table(path).to_pylist() for path in flags[1::2])
    assert len(train) == GYM_LEVEL_ROWS["train_size"]
    sources = ["reasoning_gym/gcd"] * GYM_LEVEL_ROWS["test_size"]
    sources += ["reasoning_gym/gcd/harder"] * GYM_HARDER_ROWS["test_size"]
    assert [row["data_source"] for row in held_out] == sources
    questions = {row["prompt"][-1]["content"] for row in train}
    level = held_out[: GYM_LEVEL_ROWS["test_size"]]
    assert not questions & {row["prompt"][-1]["content"] for row in level}
    supervised = Request(tmp_path / "sft", supervised=True, gsm8k="hub", math=None)
    lines = write_rows("gym-gcd", supervised)[1].read_text().splitlines()
    for line, row in zip(lines, train, strict=True):
        *prompt, reply = json.loads(line)["messages"]
        assert [message["content"] for message in prompt] == [
            message["content"] for message in row["prompt"]
        ]
        assert not any(message["train"] for message in prompt)
        assert reply == {"role": "assistant", "content": row["extra_info"]["answer"]}

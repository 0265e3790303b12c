"""tests/bench/curves.py: its runs can be started, and it says what the kept ones show."""

import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from string import ascii_lowercase

import pytest
from helpers import ROOT

from common.flags import parse


@pytest.fixture(autouse=True)
def bench_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "bench"))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # which benchmarks change


def test_the_command_of_every_run_is_one_that_its_script_takes(monkeypatch, tmp_path):
    """With its seed, on its ranks, from its parent's model, and with its engine."""
    import curves
    from studies import STUDIES

    monkeypatch.setattr(curves, "write_rows", lambda rows, request: ["--train-data", rows, "--eval-data", rows])
    seen = set()
    for study in STUDIES.values():
        for name, run in ((name, run) for name, run in study.runs.items() if not run.command.startswith("trl")):
            if run.parent:
                (tmp_path / run.parent / "model").mkdir(parents=True, exist_ok=True)
            command = curves.our_command(curves.Args(runs=tmp_path), run, tmp_path / name)
            assert command[command.index("--nproc_per_node") + 1] == str(run.ranks)
            script = run.command.split()[0]
            program = command[command.index("--nproc_per_node") + 2 :]
            assert program[:2] == (["tests/bench/wrong_engine.py", run.engine] if run.engine else [script, program[1]])
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


def test_every_kept_result_is_a_run_that_can_be_made_again():
    from studies import STUDIES
    from study_results import read_record

    named = [(name, run) for study in STUDIES.values() for name, run in study.runs.items()]
    runs = dict(named)
    assert all(runs[name] == run for name, run in named)
    for path in (path for path in (ROOT / "results").iterdir() if path.is_dir()):
        record = read_record(path)
        assert record["run"] == vars(runs[path.name]), f"{path.name}: studies.py has changed since"
        assert record["flags"] == "", path.name
        if parent := runs[path.name].parent:
            made = read_record(ROOT / "results" / parent)["model"].split()
            assert record["from"] in made, f"{path.name}: of another {parent}"


def test_a_run_is_done_if_it_is_that_run_and_came_to_its_end(tmp_path):
    from curves import Args, begin, is_done, keep
    from studies import Run, Study
    from study_results import read_study, state_of

    study = Study("", {"warm": Run("sft.py"), "learnt-seed1": Run("grpo.py", 1, parent="warm")}, each=False)
    args = Args(runs=tmp_path / "runs", results=tmp_path / "results")

    def made(name: str, steps: int, weights: bytes = b"") -> None:
        folder = args.runs / name
        begin(args, study, name)
        (folder / "model").mkdir(parents=True, exist_ok=True)
        (folder / "model" / "model.safetensors").write_bytes(weights)
        (folder / "config.json").write_text(json.dumps({"args": {"total_steps": 2, "model": f"{Path.home()}/model"}}))
        scores = {"eval/accuracy": 0.5} if name != "warm" else {}
        steps = [{"step": step} | scores for step in range(steps + 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        keep(args, study, name)

    def done() -> list[bool]:
        return [is_done(args, study, name) for name in study.runs]

    keep(args, study, "warm")  # of a run that did not even start, nothing
    assert done() == [False, False] and not args.results.exists()
    assert state_of(args.results / "warm") == "not run"
    made("warm", 2, b"first")
    made("learnt-seed1", 1)
    begin(args, study, "learnt-seed1")
    assert (args.runs / "learnt-seed1").is_dir()  # it goes on from there
    assert done() == [True, False] and read_study(study, args.results) == {}
    made("learnt-seed1", 2)
    assert done() == [True, True] and list(read_study(study, args.results)) == ["learnt"]
    assert state_of(args.results / "warm") == "step 2"
    assert state_of(args.results / "learnt-seed1") == "step 2: eval/accuracy 0.500"
    kept = json.loads((args.results / "warm" / "config.json").read_text())
    assert kept["args"]["model"] == "~/model", "nothing of this machine"
    (args.runs / "warm" / "model" / "model.safetensors").unlink()
    (args.runs / "warm" / "model").rmdir()
    assert done() == [True, True]  # nobody needs it any more
    made("warm", 2, b"second")
    assert done() == [True, True]  # the same warm start made again, with other rounding
    begin(args, study, "learnt-seed1")
    assert not (args.runs / "learnt-seed1").exists()  # but no run goes on from what is left of the first
    made("learnt-seed1", 2)
    made("warm", 2, b"first")
    assert done() == [True, True]
    study.runs["warm"] = Run("sft.py --seed 1")
    made("warm", 2, b"third")
    assert done() == [True, False]  # another warm start
    made("learnt-seed1", 2)
    args.flags = "--learning-rate 1"
    assert done() == [False, False]
    args.flags = ""
    study.runs["learnt-seed1"] = Run("grpo.py --minibatches 2", 1, parent="warm")
    assert done() == [True, False] and read_study(study, args.results) == {}


def test_a_run_that_died_at_its_start_is_not_the_one_that_was_kept(tmp_path):
    """Its first file is config.json: beside the metrics of another run it would pass for a whole one."""
    from curves import Args, is_done, keep
    from studies import Run, Study
    from study_results import read_study

    study, args = Study("", {"a-seed1": Run("grpo.py", 1)}), Args(runs=tmp_path / "runs", results=tmp_path / "results")
    folder = args.runs / "a-seed1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"args": {"total_steps": 1}, "url": "https://a/b"}')
    (folder / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.5}\n{"step": 1, "eval/accuracy": 0.5}\n')
    keep(args, study, "a-seed1")
    assert is_done(args, study, "a-seed1") and read_study(study, args.results)
    assert not read_study(study, args.results, "--total-steps 2"), "other flags make other runs"
    study.runs["a-seed1"] = Run("grpo.py --minibatches 2", 1)
    (folder / "metrics.jsonl").unlink()
    keep(args, study, "a-seed1")
    assert not is_done(args, study, "a-seed1") and not read_study(study, args.results)
    assert not (args.results / "a-seed1" / "metrics.jsonl").exists()


def test_variants_are_compared_seed_by_seed():
    from studies import Run, Study
    from study_results import compared

    def run(seconds: float, *values: float) -> list[dict]:
        records = [{"step": 0, "eval/accuracy": 0.1, "data/tokens": 5.0}]
        return records + [
            {"step": i, "eval/accuracy": x, "time/step_s": seconds, "data/tokens": 5.0 + x}
            for i, x in enumerate(values, start=1)
        ]

    theirs = {1: run(30.0, 0.3, 0.5), 2: run(20.0, 0.5, 0.7), 3: run(1.0, 0.0)}
    ours = {1: run(10.0, 0.5, 0.6), 2: run(10.0, 0.6, 0.9)}
    study = Study("", {"theirs-seed1": Run("a", 1)}, beside={"theirs": "ours"}, goal=0.5, also=("data/tokens",))
    head, row = compared(study, {"theirs": theirs, "ours": ours})
    assert head[3:6] == ["x seconds", "after: difference", "x seconds to 0.5, seeds"]
    assert row[:3] == ["theirs", "ours", "2"]
    # 60 / 20 and 40 / 20 seconds; 0.5 - 0.6 and 0.7 - 0.9; 60 / 10 and 20 / 10 seconds to 0.5; 0.7 - 0.9 of a step
    assert [cell.split(" ")[0] for cell in row[3:]] == ["2.50", "-0.1500", "4.00", "0.2"] and row[5].endswith(", 2")


def test_runs_side_by_side_wait_for_what_they_start_from(tmp_path, monkeypatch):
    """At most so many at once; nothing starts from one that failed; whoever ends the program ends all, once."""
    import curves
    from studies import Run, Study

    runs = {"child": Run("a", parent="warm"), "warm": Run("a"), "other": Run("a"), "third": Run("a")}
    study, events = Study("", runs), tmp_path / "events"
    program = """
import signal, sys, time
name, code, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
def note(what):
    with open(sys.argv[4], "a") as file:
        file.write(f"{what} {name}\\n")
signal.signal(signal.SIGTERM, lambda *_: note("told"))
note("begun")
time.sleep(0 if code else seconds)
note("ended")
sys.exit(code)
"""

    def run_all(at_once: int, seconds: float, fails: str = "", refused: str = "", stop_at: str = "") -> list:
        """The status, and what happened to which run."""
        events.write_text("")

        def start(args, study, name):
            if name == refused:
                raise SystemExit("refused")
            command = [sys.executable, "-c", program, name, str(7 * (name == fails)), str(seconds), events]
            process = subprocess.Popen(command)
            while f"begun {name}" not in events.read_text():
                time.sleep(0.01)
            if name == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return process

        monkeypatch.setattr(curves, "start_run", start)
        args = curves.Args(at_once=at_once, runs=tmp_path / "runs", results=tmp_path / "results")
        return [curves.run_all(args, study), *events.read_text().splitlines()]

    before = signal.getsignal(signal.SIGTERM)
    try:
        in_turn = [f"{what} {name}" for name in ("warm", "child", "other", "third") for what in ("begun", "ended")]
        assert run_all(1, 0) == [0, *in_turn]
        status, *pairs = run_all(2, 2)
        assert status == 0 and sorted(pairs) == sorted(in_turn) and pairs[:2] == ["begun warm", "begun other"]
        assert pairs.index("begun child") > pairs.index("ended warm")
        under_way = itertools.accumulate(1 if event.startswith("begun") else -1 for event in pairs)
        assert max(under_way) == 2
        alone = sorted(pair for pair in in_turn if "child" not in pair and "warm" not in pair)
        status, *others = run_all(2, 0, fails="warm")
        assert status == 7 and sorted(others) == sorted([*alone, "begun warm", "ended warm"])  # and no child
        status, *others = run_all(2, 0, refused="warm")
        assert status == 1 and sorted(others) == alone
        status, *others = run_all(1, 0, fails="other")
        assert status == 7 and others == in_turn
        status, *told = run_all(2, 3, stop_at="other")
        both = ("warm", "other")
        assert status == 0 and sorted(told) == sorted(f"{w} {n}" for n in both for w in ("begun", "told", "ended"))
    finally:
        signal.signal(signal.SIGTERM, before)


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


def records_of(*accuracies: float) -> list[dict]:
    """Of a run that was evaluated after 0, 10, 20 ... steps, and sampled as well as that."""
    return [{"step": 10 * i, "eval/accuracy": x, "reward/accuracy": x} for i, x in enumerate(accuracies)]


def test_what_a_knob_does_is_said_beyond_noise(tmp_path):
    from studies import Run, Study
    from study_results import MEASURES, draw_dots, effects, noise

    found = {
        "base": {seed: records_of(0.2, 0.5 + 0.01 * seed) for seed in (1, 2, 3)},
        "same": {seed: records_of(0.2, 0.51 + 0.01 * seed) for seed in (1, 2, 3)},
        "better": {seed: records_of(0.2, 0.6 + 0.01 * seed) for seed in (1, 2, 3)},
        "broken": {seed: records_of(0.2, 0.3 * seed) for seed in (1, 2, 3)},  # scatters: its own affair
        "once": {1: records_of(0.2, 0.54)},
        "critic": {seed: records_of(0.2, 0.3 * seed) for seed in (1, 2, 3)},  # another script's scatter
    }
    runs = {f"{name}-seed{seed}": Run("grpo.py", seed) for name in found for seed in found[name]}
    runs |= {f"critic-seed{seed}": Run("ppo.py", seed) for seed in (1, 2, 3)}
    beside = dict.fromkeys(("same", "better", "once", "critic"), "base")
    study, measure = Study("", runs, beside=beside, dots=True), MEASURES["greedy, after"]
    assert noise(study, found, measure, "same") == pytest.approx(1.96 * (2 / 3) ** 0.5 * 0.01 / 0.833)
    assert noise(study, found, measure, "once") == pytest.approx(1.96 * (4 / 3) ** 0.5 * 0.01 / 0.833)
    assert noise(study, found, measure, "broken") == pytest.approx(1.96 * (2 / 3) ** 0.5 * 0.3)
    assert noise(study, found, measure, "critic") > 10 * noise(study, found, measure, "same")
    rows = {row[0]: row[3] for row in effects(study, found)[1:]}
    told = {"base": "0.520", "same": "0.530 (+0.010)", "better": "0.620 (+0.100*)", "broken": "0.600"}
    assert rows == told | {"once": "0.540 (+0.020)", "critic": "0.600 (+0.080)"}
    one = {"same": {1: records_of(0.2, 0.5)}}
    assert effects(study, one)[1][3] == "0.500"
    for some in (found, one):
        draw_dots(study, some, tmp_path / "figure.png")
        (tmp_path / "figure.png").unlink()


def test_a_figure_has_no_losses_among_accuracies(tmp_path, monkeypatch):
    import study_results
    from studies import Run, Study

    drawn, draw_panel = [], study_results.draw_panel

    def note(axes, found, *rest):
        drawn.append([*found])
        draw_panel(axes, found, *rest)

    monkeypatch.setattr(study_results, "draw_panel", note)
    found = {name: {1: records_of(0.2, 0.5)} for name in ("learnt", "other")}
    found["control"] = {1: [{"step": 0, "eval/loss": 2.0}, {"step": 10, "eval/loss": 1.0}]}
    study = Study("", {f"{name}-seed1": Run("grpo.py", 1) for name in found})
    study_results.draw(study, found, tmp_path / "figure.png")
    assert drawn == [["learnt", "other"]] * 2 and (tmp_path / "figure.png").is_file()


def test_a_wrong_engine_has_few_bits():
    import torch
    from wrong_engine import in_three_bits

    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 0.02
    rounded = in_three_bits(weight)
    assert all(len(row.unique()) <= 7 for row in rounded)
    largest = weight.abs().amax(dim=1, keepdim=True)
    assert ((rounded - weight).abs() <= largest / 6 * 1.0001).all() and not torch.equal(rounded, weight)
    assert torch.equal(in_three_bits(weight[0]), weight[0])
    assert torch.equal(in_three_bits(torch.zeros(2, 2)), torch.zeros(2, 2))


def test_trl_is_given_the_work_of_our_flags(monkeypatch):
    import trl_work
    from studies import BESIDE_SFT

    import grpo
    import sft

    args, work = grpo.DEMO, trl_work.GRPO | trl_work.GRPO_OPTIONS
    ours = [args.rollout.prompts_per_step, args.rollout.samples_per_prompt, args.rollout.max_response_tokens]
    assert [*ours, args.learning_rate] == [
        work[key] for key in ("prompts", "samples", "response_tokens", "learning_rate")
    ]
    rates = [args.run.total_steps, args.warmup_steps, args.lr_schedule, args.lr_floor]
    assert rates == [trl_work.GRPO_RATES[key] for key in ("total_steps", "warmup_steps", "schedule", "floor")]

    monkeypatch.setattr(sys, "argv", [*BESIDE_SFT.split(), "--train-data", "x", "--eval-data", "x"])
    args, _ = parse(sft.Args, sft.DEMO, sft.__doc__)
    work = trl_work.SFT | trl_work.SFT_OPTIONS
    ours = [args.run.model, args.batch_size, args.run.eval_every, args.run.eval_rows, args.learning_rate]
    keys = ("model", "rows_of_a_step", "eval_every", "held_out", "learning_rate")
    assert [*ours, args.max_grad_norm] == [work[key] for key in (*keys, "max_grad_norm")]
    rates = [args.run.total_steps, args.warmup_steps, args.lr_schedule, args.lr_floor]
    assert rates == [trl_work.SFT_RATES[key] for key in ("total_steps", "warmup_steps", "schedule", "floor")]
    assert (args.machine.dtype, work["bf16"]) == ("fp32", False)


def test_a_run_is_refused_where_auto_is_another_dtype(monkeypatch):
    import curves
    import torch
    from studies import Run, Study

    study = Study("", {"auto": Run("grpo.py"), "fp32": Run("grpo.py --dtype fp32")}, dtype="bf16")
    monkeypatch.setattr(curves, "choose_dtype", lambda flag, device: (torch.bfloat16, "has it"))
    curves.check_dtype(curves.Args(), study, "auto")
    monkeypatch.setattr(curves, "choose_dtype", lambda flag, device: (torch.float32, "has no bf16"))
    with pytest.raises(SystemExit, match=r"auto is torch.float32 here \(has no bf16\), and was bf16 in the kept"):
        curves.check_dtype(curves.Args(), study, "auto")
    curves.check_dtype(curves.Args(), study, "fp32")
    curves.check_dtype(curves.Args(flags="--dtype fp32"), study, "auto")
    curves.check_dtype(curves.Args(), Study("", study.runs), "auto")


def test_rows_of_each_supervised_format_are_the_same_conversation_to_trl(tmp_path):
    from study_data import Request, write_rows
    from trl_work import as_trl

    from common.data.formats import read_conversation

    problems = [{"question": f"{n}+1?", "answer": f"#### {n + 1}"} for n in range(6)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    for form, rows in {"pairs": 6, "chats": 3, "from-value": 6}.items():
        folder = tmp_path / form
        flags = write_rows(f"gsm8k-{form}", Request(folder, True, str(tmp_path), None))
        assert flags == ["--train-data", folder / "train.jsonl", "--eval-data", folder / "eval.jsonl"]
        records = [json.loads(line) for line in flags[1].read_text().splitlines()]
        assert len(records) == rows
        for record in records:
            ours, theirs = read_conversation(record).messages, as_trl(record)
            theirs = theirs.get("messages") or theirs.get("conversations") or theirs["prompt"] + theirs["completion"]
            assert [[m["role"], m["content"]] for m in ours] == [list(m.values())[-2:] for m in theirs]


def test_mawps_is_scored_as_gsm8k_is(tmp_path):
    import pyarrow.parquet as pq
    from study_data import Request, write_rows

    numbers = range(1_000_000, 1_000_402)
    names = map("".join, itertools.product(ascii_lowercase, repeat=2))
    lines = [json.dumps({"input": f"{name} has {n} and 0.5 ?", "target": n + 0.5}) for name, n in zip(names, numbers)]
    lines += [json.dumps({"input": "Ab has 7 and 0.5?", "target": 7.5})]  # as one above, but for its numbers
    (tmp_path / "mawps_addsub.jsonl").write_text("\n".join(lines))
    flags = write_rows("mawps", Request(tmp_path / "rows", False, "hub", tmp_path))
    train, held_out = (pq.read_table(path).to_pylist() for path in (flags[1], flags[3]))
    assert (len(train), len(held_out)) == (2, 400)
    truths = {float(row["reward_model"]["ground_truth"]) for row in train + held_out}
    assert truths == {n + 0.5 for n in numbers}
    with pytest.raises(SystemExit, match="--math None"):
        write_rows("mawps", Request(tmp_path / "rows", False, "hub", None))


def test_scores_are_strict_and_lenient(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq
    from scores import scores

    truth = {"numbers": [2, 3], "target": 5}
    said = [(0, "#### 7 of 9", "7", True), (0, "it is 7", "7", False), (1, "8", "7", False), (1, "9", "7", False)]
    said += [(2, "2 + 3 = 5", json.dumps(truth), False), (2, "3-2", json.dumps(truth), False)]
    keys = ("row", "completion", "truth", "correct")
    pq.write_table(pa.Table.from_pylist([dict(zip(keys, one)) for one in said]), tmp_path / "samples.parquet")
    found = scores(tmp_path / "samples.parquet")
    assert (found["rows"], found["samples"]) == (3, 2)
    shares = {name: round(share[0], 4) for name, share in found.items() if "pass" in name}
    assert shares == {
        "strict, pass@1": 0.1667,
        "strict, pass@2": 0.3333,
        "lenient, pass@1": 0.5,
        "lenient, pass@2": 0.6667,
    }
    # of 0.5, 0 and 0: 1.96 * 0.2887 / 3 ** 0.5
    assert found["strict, pass@1"][1] == pytest.approx(1.96 * (0.25 / 3) ** 0.5 / 3**0.5)
    once = [dict(zip(keys, one)) for one in said[::2]]  # one sample each: Wilson's, of 1 of 3
    pq.write_table(pa.Table.from_pylist(once), tmp_path / "samples.parquet")
    assert scores(tmp_path / "samples.parquet")["strict, pass@1"] == pytest.approx([1 / 3, 0.3654], abs=1e-4)
    pq.write_table(pa.Table.from_pylist([row | {"correct": True} for row in once * 2]), tmp_path / "samples.parquet")
    assert scores(tmp_path / "samples.parquet")["strict, pass@1"] == pytest.approx([1.0, 0.2808], abs=1e-4)


def test_scores_tell_samples_that_call_a_tool_from_others(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq
    from scores import scores

    said = [(0, True), (2, True), (0, False), (1, True), (3, False), (0, True), (0, True), (3, False)]
    row = {"completion": "", "truth": "7"}
    samples = [row | {"row": i % 2, "correct": right, "calls": calls} for i, (calls, right) in enumerate(said)]
    pq.write_table(pa.Table.from_pylist(samples), tmp_path / "samples.parquet")
    found = scores(tmp_path / "samples.parquet")
    assert found["samples with calls"][0] == 0.5 and found["calls of those"][0] == 2.25
    assert found["strict, with calls"][0] == 0.5 and found["strict, without"][0] == 0.75
    # of row 0: 1, 0, 1; of row 1: 1. They deviate by 0.25 - 0.75 + 0.25 and by 0.25.
    assert found["strict, without"][1] == pytest.approx(1.96 * (0.25**2 + 0.25**2) ** 0.5 / 4)
    pq.write_table(pa.Table.from_pylist([sample | {"calls": 0} for sample in samples]), tmp_path / "samples.parquet")
    assert not [name for name in scores(tmp_path / "samples.parquet") if "calls" in name]

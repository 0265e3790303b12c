"""`python -m common.score`: a file of responses in, a table and verdicts out; what was there stays
until then."""

import json
import math
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tyro
from helpers import ROOT, run_script, torchrun, wait_until

from common.data.rows import RowFiles
from common.rollout.evaluation import summarize
from common.score import Scoring, score_file

SAID = [["#### 1", "#### 2"], ["#### 1"], ["", "#### 3", "three"]]


def row(i: int, **changes) -> dict:
    """A row as verl's generation leaves it."""
    truth = {"style": "rule", "ground_truth": str(i + 1)}
    prompt = [{"role": "user", "content": f"{i} + 1?"}]
    base = {
        "data_source": "openai/gsm8k",
        "prompt": prompt,
        "reward_model": truth,
        "extra_info": {"index": i},
    }
    return (
        base
        | {"responses": SAID[i % 3], "images": [{"bytes": b"\xff" * 5, "path": None}]}
        | changes
    )


def write(path: Path, rows: list) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict]:
    return list(RowFiles([path], "FILE").records())


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_each_response_gets_its_verdict_and_keeps_its_row(tmp_path, capsys, suffix):
    rows = [row(i) for i in range(3)]
    file = write(tmp_path / f"verl{suffix}", rows)
    score_file(Scoring(file))
    samples = read(tmp_path / f"verl_scored{suffix}")
    assert [(s["group"], s["responses"], s["correct"]) for s in samples] == [
        (i, text, text == f"#### {i + 1}") for i in range(3) for text in SAID[i]
    ]
    kept = set(rows[0]) - {"responses"}
    for sample in samples:
        whole = json.loads(json.dumps(rows[sample["group"]], default=str))
        here = json.loads(json.dumps(sample, default=str))
        assert {name: here[name] for name in kept} == {name: whole[name] for name in kept}
        assert json.loads(sample["rewards"])["score"] == sample["score"] == float(sample["correct"])
    output = capsys.readouterr().out
    # (1/2 + 0 + 1/3) / 3
    assert "openai/gsm8k" in output and "0.278" in output and "6 responses to 3 prompts" in output
    assert summarize(samples)["eval/accuracy"] == pytest.approx((1 / 2 + 0 + 1 / 3) / 3)
    score_file(Scoring(tmp_path / f"verl_scored{suffix}", output=tmp_path / f"again{suffix}"))
    assert read(tmp_path / f"again{suffix}") == samples, "scored again it is the same"
    assert capsys.readouterr().out.replace("again", "verl_scored") == output


BAD = [
    (row(1, responses=[]), "responses is [], expected"),
    (
        row(1, responses=None),
        "responses is None, expected a text or a list of texts; --response-column names one of",
    ),
    (row(1, responses=["a", 5]), "responses is ['a', 5], expected"),
    ({"said": "x"}, "--response-column names one of said"),
    (row(1, reward_model={"style": "rule"}), "neither reward_model.ground_truth nor truth"),
    (row(1, reward_model=None, truth=math.nan), "neither reward_model.ground_truth nor truth"),
    (row(1, reward_model=None, truth="five"), "the GSM8K ground truth 'five' is not a number"),
    (
        row(1, data_source="countdown", reward_model=None, truth='{"target": 5}'),
        "its truth cannot be read: KeyError",
    ),
    (
        row(
            1,
            data_source="countdown",
            reward_model=None,
            truth='{"numbers": [1, 1e400], "target": 1}',
        ),
        "OverflowError",
    ),
    (row(1, data_source=None), "data_source is None"),
    (row(1, data_source="unheard"), "no built-in reward function for data_source 'unheard'"),
    (row(1, extra_info="text"), "extra_info 'text'"),
    ([1], "a JSON list, expected an object"),
]


@pytest.mark.parametrize("bad, reason", BAD)
def test_a_bad_row_is_told_or_dropped(tmp_path, capsys, bad, reason):
    file = write(tmp_path / "a.jsonl", [row(0), bad])
    with pytest.raises(ValueError) as told:
        score_file(Scoring(file))
    assert f"{file} line 2: " in str(told.value)
    assert reason in str(told.value)
    assert "--bad-rows drop" in str(told.value)
    assert not (tmp_path / "a_scored.jsonl").exists()
    if reason.startswith("data_source is"):
        return
    score_file(Scoring(file, bad_rows="drop"))
    assert {s["group"] for s in read(tmp_path / "a_scored.jsonl")} == {0}
    assert reason in capsys.readouterr().out


def test_a_truth_that_stands_alone_counts_where_reward_model_has_none(tmp_path):
    one = {"data_source": "openai/gsm8k", "truth": "5", "responses": "#### 5"}
    rows = [
        one | {"reward_model": {"style": "rule"}},
        one | {"reward_model": {"ground_truth": "6"}},
    ]
    score_file(Scoring(write(tmp_path / "a.jsonl", rows)))
    assert [sample["score"] for sample in read(tmp_path / "a_scored.jsonl")] == [1.0, 0.0]


def test_odd_columns_are_kept(tmp_path, capsys):
    """Of rows that differ, of types that Arrow does not find by itself, of names that are taken."""
    one = {
        "data_source": "openai/gsm8k",
        "truth": "5",
        "responses": ["#### 5", "6"],
        "score": "mine",
    }
    rows = [one | {"more": 1, "text": "\ud800"}, one | {"more": ["x"], "late": 2**70}]
    score_file(Scoring(write(tmp_path / "a.jsonl", rows), output=tmp_path / "a.parquet"))
    samples = read(tmp_path / "a.parquet")
    assert [s["more"] for s in samples] == ["1", "1", '["x"]', '["x"]']
    assert samples[0]["text"] == '"\\ud800"'
    assert [s["score"] for s in samples] == [1, 0, 1, 0]
    assert samples[2]["late"] == str(2**70)
    table = pa.Table.from_pylist([one] * 2).append_column(
        "m", pa.array([[("k", 1)]] * 2, pa.map_("string", "int8"))
    )
    pq.write_table(table, tmp_path / "map.parquet")
    score_file(Scoring(tmp_path / "map.parquet"))
    assert [s["m"] for s in read(tmp_path / "map_scored.parquet")] == ['[["k", 1]]'] * 4


def test_a_truth_that_an_evaluation_has_written_as_json_is_read(tmp_path):
    """Of rows whose truth is an object or a list of texts; what only looks like JSON is a text."""
    countdown = {"numbers": [5, 2], "target": 3}
    answer = "<answer>5 - 2</answer>"
    told = [("countdown", json.dumps(countdown), answer), ("tiny-vl", '["4", "5"]', r"\boxed{5}")]
    told += [("math/x", "[1,2]", r"\boxed{[1,2]}"), ("openai/gsm8k", "5", "#### 5")]
    rows = [
        {"data_source": source, "truth": truth, "responses": said} for source, truth, said in told
    ]
    score_file(Scoring(write(tmp_path / "a.parquet", rows)))
    assert [sample["score"] for sample in read(tmp_path / "a_scored.parquet")] == [1.0] * 4


@pytest.mark.parametrize("empty", [{}, [{"a": [{}]}]])
def test_what_parquet_cannot_hold_is_kept_as_json(tmp_path, empty):
    rows = [
        row(0, extra_info={}, odd=empty),
        row(1, extra_info={}, odd=empty),
        row(2, extra_info={}, odd=None),
    ]
    score_file(Scoring(write(tmp_path / "a.jsonl", rows), output=tmp_path / "a.parquet"))
    samples = read(tmp_path / "a.parquet")
    assert {s["extra_info"] for s in samples} == {"{}"}
    assert [s["odd"] for s in samples] == [json.dumps(empty)] * 3 + [None] * 3
    assert [s["reward_model"]["ground_truth"] for s in samples] == ["1", "1", "2", "3", "3", "3"], (
        "as it was"
    )
    score_file(Scoring(tmp_path / "a.parquet"))
    assert [s["score"] for s in read(tmp_path / "a_scored.parquet")] == [
        s["score"] for s in samples
    ], "once more"


def test_single_responses_are_grouped_by_their_group_alone(tmp_path, capsys):
    """As --eval-only writes them, with a truth that stands alone; lengths are told where they are
    numbers."""
    one = {"data_source": "openai/gsm8k", "truth": "5", "length": 7, "truncated": False}
    rows = [
        one | {"completion": f"#### {n}", "group": group}
        for n, group in [(5, 0), (4, 0), (5, 1), (5, 1)]
    ]
    file = write(tmp_path / "samples.parquet", rows)
    score_file(Scoring(file, response_column="completion"))
    header, line, last = capsys.readouterr().out.splitlines()
    shown = dict(zip(header.replace("95 % interval", "").split(), line.replace(" - ", "").split()))
    assert "4 responses to 2 prompts" in last and "pass@2" in shown and "7.000" in line
    write(file, [*rows[:2], {name: x for name, x in rows[2].items() if name != "group"}])
    score_file(Scoring(file, response_column="completion"))
    assert "3 responses to 3 prompts" in capsys.readouterr().out, (
        "a group of some rows is no number of others"
    )
    write(file, [row | {"group": float(row["group"])} for row in rows])  # as pandas has it
    score_file(Scoring(file, response_column="completion"))
    output = capsys.readouterr().out
    assert "4 responses to 2 prompts" in output
    assert "pass@2" in output
    write(
        file,
        [*rows, *({**row, "data_source": "math/x", "completion": r"\boxed{5}"} for row in rows)],
    )
    score_file(Scoring(file, response_column="completion"))
    assert "8 responses to 4 prompts" in capsys.readouterr().out, "two evaluations in a file"
    for odd in (None, "long", [1]):
        write(file, [row | {"length": odd, "calls": odd, "group": None} for row in rows])
        score_file(Scoring(file, response_column="completion"))
        output = capsys.readouterr().out
        assert "response_length" not in output
        assert "4 responses to 4 prompts" in output


def test_what_a_function_of_ones_own_does_costs_its_response(tmp_path, capsys):
    function = tmp_path / "mine.py"
    function.write_text(
        "import os, time\n"
        "def mine(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if solution_str == 'die': os._exit(1)\n"
        "    if solution_str == 'hang': time.sleep(60)\n"
        "    if solution_str == 'raise': raise KeyError('x')\n"
        "    return {'score': 2.5, 'acc': 1, 'pred': None, 'odd': float('inf'), 'at': "
        "extra_info['index']}\n"
    )
    texts = ["die", "hang", "raise", "fine \ud800", "x" * 100_000]
    file = write(tmp_path / "a.jsonl", [row(0, data_source="mine", responses=texts)])
    score_file(Scoring(file, reward_function=f"{function}:mine", reward_timeout=1.0))
    samples = read(tmp_path / "a_scored.jsonl")
    assert [s["responses"] for s in samples] == texts
    assert [(s["score"], s["correct"]) for s in samples] == [(0.0, False)] * 3 + [(2.5, True)] * 2
    assert "KeyError" in samples[2]["rewards"]
    assert json.loads(samples[4]["rewards"])["odd"] is None
    output = capsys.readouterr().out
    assert "3 of 5 responses not scored" in output
    assert (
        "5 responses to 1 prompts, 3 of them not scored, which count as wrong: "
        in output.splitlines()[-1]
    )


@pytest.mark.parametrize(
    "body, reason",
    [
        ("raise KeyError('x')", "cannot score the first row"),
        (
            "return 1 / (solution_str in ('', '1'))",
            "none of the 2 responses could be scored; .* is not written",
        ),
    ],
)
def test_a_function_that_fails_on_every_response_is_no_accuracy_of_0(
    tmp_path, capsys, body, reason
):
    function = tmp_path / "mine.py"
    function.write_text(
        f"def mine(data_source, solution_str, ground_truth, extra_info=None):\n    {body}\n"
    )
    file = write(tmp_path / "a.jsonl", [row(0, data_source="mine")])
    with pytest.raises((ValueError, SystemExit), match=reason):
        score_file(Scoring(file, reward_function=f"{function}:mine"))
    assert "accuracy" not in capsys.readouterr().out and not (tmp_path / "a_scored.jsonl").exists()


def test_what_would_be_lost_is_refused(tmp_path, monkeypatch):
    file = write(tmp_path / "a.parquet", [row(0)])
    (tmp_path / "link.parquet").symlink_to(file)
    os.link(file, tmp_path / "hard.parquet")
    for name in ("a.parquet", "link.parquet", "hard.parquet", "x/../a.parquet"):
        with pytest.raises(SystemExit, match="is FILE itself"):
            (tmp_path / "x").mkdir(exist_ok=True)
            score_file(Scoring(file, output=tmp_path / name))
    with pytest.raises(SystemExit, match="neither "):
        score_file(Scoring(file, output=tmp_path / "a.csv"))
    for name, content in {
        "empty.parquet": b"",
        "half.parquet": file.read_bytes()[:-9],
        "empty.jsonl": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises((ValueError, SystemExit), match=name):
            score_file(Scoring(tmp_path / name))
    output = tmp_path / "a_scored.parquet"
    output.write_text("old")
    monkeypatch.setattr(
        "common.rollout.evaluation.write_samples",
        lambda *_: (_ for _ in ()).throw(OSError(28, "full")),
    )
    with pytest.raises(SystemExit, match="is not written"):
        score_file(Scoring(file))
    assert output.read_text() == "old"


@pytest.mark.parametrize(
    "end", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_one_that_is_ended_leaves_what_was_there(tmp_path, end):
    function = tmp_path / "slow.py"
    function.write_text(
        f"import time\ndef slow(**_):\n    open({str(tmp_path / 'on')!r}, 'w')\n    "
        "time.sleep(60)\n"
    )
    file = write(tmp_path / "a.jsonl", [row(0)])
    output = tmp_path / "a_scored.jsonl"
    output.write_text("old")
    command = torchrun(
        "-m", "common.score", file, "--reward-function", f"{function}:slow", "--reward-timeout", 60
    )
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: (tmp_path / "on").exists())
    process.send_signal(end)
    _, told = process.communicate(timeout=30)
    assert output.read_text() == "old" and "Traceback" not in told
    assert process.returncode == (130 if end == signal.SIGINT else -signal.SIGKILL)
    assert ("interrupted: no verdict is written" in told) == (end == signal.SIGINT)
    assert {path.name for path in tmp_path.iterdir()} <= {
        "slow.py",
        "on",
        "a.jsonl",
        "a_scored.jsonl",
        "__pycache__",
    }


def test_neither_torch_nor_vllm_is_loaded(tmp_path):
    file = write(tmp_path / "a.parquet", [row(0)])
    program = f"import runpy, sys; sys.argv = ['score', {str(file)!r}]; "
    program += "runpy.run_module('common.score', run_name='__main__'); "
    program += "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "2 responses to 1 prompts: " in done.stdout, done.stderr


def test_its_help_names_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/anywhere/common/score.py", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_module("common.score", run_name="__main__")
    assert "\nusage: python -m common.score " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, ranks, suffix", [("grpo.py", 2, ".jsonl"), ("ppo.py", 0, ".parquet")]
)
def test_the_table_of_an_evaluation_is_that_of_its_samples(tmp_path, script, ranks, suffix):
    """And rows without truths are sampled: their file is scored when they have some."""
    truth = {"numbers": [17, 8, 1], "target": 24}
    prompt = [{"role": "user", "content": "17 8 1 = 24"}]
    rows = [{"id": f"x{i}", "data_source": "countdown", "prompt": prompt} for i in range(3)]
    options = [
        "--eval-only",
        "--model",
        "tiny",
        "--engine",
        "hf",
        "--max-prompt-tokens",
        64,
        "--eval-samples",
        3,
    ]
    options += ["--eval-temperature", 1.0, "--max-response-tokens", 100]
    bare = write(tmp_path / f"bare{suffix}", rows)
    (tmp_path / "own.py").write_text(
        "def fn(ground_truth, **_):\n    return float(ground_truth['target'])\n"
    )
    own = ["--reward-function", f"{tmp_path}/own.py:fn"]  # there is no truth to try it out with
    run_script(
        script, *options, *own, "--eval-data", bare, "--output-dir", tmp_path / "bare", ranks=ranks
    )
    samples = read(tmp_path / f"bare/eval_samples{suffix}")
    assert [s["id"] for s in samples] == [f"x{i}" for i in range(3) for _ in range(3)]
    known = [row | {"reward_model": {"ground_truth": truth}} for row in rows]
    full = write(tmp_path / f"full{suffix}", known)
    output = run_script(
        script, *options, "--eval-data", full, "--output-dir", tmp_path / "full", ranks=ranks
    ).stdout
    for folder in ("full", "bare"):
        file = tmp_path / folder / f"eval_samples{suffix}"
        if folder == "bare":  # with truths that come later
            write(file, [s | {"reward_model": {"ground_truth": truth}} for s in samples])
        table = run_script(
            "-m", "common.score", file, "--response-column", "completion", fresh=True
        ).stdout
        assert all(line in output for line in table.splitlines()[:2]), (
            "the same responses: the same table"
        )
    assert not math.isnan(read(file)[0]["length"])


def test_the_documented_command_runs(tmp_path, capsys, monkeypatch):
    """docs/recipes.md, as pasted, but for the file, which is made here."""
    page = (ROOT / "docs/recipes.md").read_text()
    commands = []
    for block in re.findall(r"^```bash\n(.*?)^```$", page, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("python -m common.score"):
                commands.append(shlex.split(line, comments=True))
    assert len(commands) == 4
    numbers = re.search(r"```python\n(# number\.py.*?)```", page, re.S)[1]
    (tmp_path / "number.py").write_text(numbers)
    said = ["<answer>1</answer>", "#### 1"]
    write(
        tmp_path / "responses.parquet",
        [row(0, responses=said), row(1, data_source="sums", responses=said)],
    )
    monkeypatch.chdir(tmp_path)
    for words in commands:
        flags = tyro.cli(Scoring, args=words[3:])
        if flags.response_column == "completion":
            Path(flags.file).parent.mkdir(parents=True)
            samples = [row(0, completion=text, responses=None, row=0) for text in ("#### 1", "2")]
            write(Path(flags.file), samples)
        if flags.rows:
            Path(flags.rows).parent.mkdir(parents=True)
            write(Path(flags.rows), [row(0)])
        score_file(flags)
        assert "rows accuracy 95 % interval" in capsys.readouterr().out


def test_a_deadline_that_the_function_has_itself_is_not_given_in_vain(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("def score(**_):\n    return 1.0\n\n\nscore.timeout_s = 60\n")
    flags = Scoring(
        write(tmp_path / "a.jsonl", [row(0)]), reward_function=f"{tmp_path}/own.py:score"
    )
    monkeypatch.setattr(sys, "argv", ["score", "--reward-timeout", "10"])
    with pytest.raises(
        SystemExit, match=r"--reward-timeout 10\.0 has no effect: .* a timeout_s of its own"
    ):
        score_file(flags)
    monkeypatch.setattr(sys, "argv", ["score"])
    score_file(flags)
    assert [sample["score"] for sample in read(tmp_path / "a_scored.jsonl")] == [1.0, 1.0]


# --- a pass-rate filter ---------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_rows_of_a_pass_rate_are_kept_as_they_are(tmp_path, capsys, suffix):
    """An evaluation of `rows` has their numbers; some have no sample."""
    rows = [row(i) for i in range(6)]
    data = write(tmp_path / f"train{suffix}", rows)
    right = {0: 0, 1: 1, 3: 2, 4: 4}  # row -> right samples of 4
    samples = []
    for group, (number, num_right) in enumerate(right.items()):
        for i in range(4):
            text = f"#### {number + 1}" if i < num_right else "#### 9"
            truth = rows[number]["reward_model"]
            sample = {"data_source": "openai/gsm8k", "completion": text, "reward_model": truth}
            samples.append(sample | {"group": group, "row": number})
    file = write(tmp_path / "samples.parquet", samples)
    flags = Scoring(file, response_column="completion", keep=(0.25, 0.5), rows=data)
    score_file(flags)
    kept = tmp_path / f"train_kept{suffix}"
    all_rows = read(data)
    assert read(kept) == [all_rows[1], all_rows[3]]
    line = "2 of 6 rows are right in 25% to 50% of their responses; 1 in fewer, 1 in more, 2 have"
    assert f"{line} none: {kept}" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"0 of 6 rows .*; nothing is kept"):
        score_file(Scoring(file, response_column="completion", keep=(0.6, 0.9), rows=data))
    assert read(kept) == [all_rows[1], all_rows[3]], "an old file stays"


def test_rows_with_their_responses_are_kept(tmp_path):
    file = write(tmp_path / "verl.parquet", [row(i) for i in range(3)])
    score_file(Scoring(file, keep=(0.3, 1.0)))
    assert [r["extra_info"]["index"] for r in read(tmp_path / "verl_kept.parquet")] == [0, 2]


@pytest.mark.parametrize(
    "flags, problem",
    [
        ({"rows": "a.parquet"}, "--rows is for --keep"),
        ({"keep": (0.8, 0.2)}, "--keep 0.8 0.2: expected two shares"),
        ({"keep": (20, 80)}, "--keep 20 80: expected two shares"),
        ({"keep": (0.2, 0.8), "rows": "a.parquet"}, "FILE has the row None, expected a number"),
    ],
)
def test_filters_that_cannot_work(tmp_path, monkeypatch, flags, problem):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.parquet", [row(i) for i in range(3)])
    with pytest.raises(SystemExit, match=problem):
        score_file(Scoring("a.parquet", **flags))
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


@pytest.mark.parametrize(
    "names, problem",
    [
        (("a.jsonl", "b.parquet"), "FILE has lines of JSON and parquet: give one kind"),
        (("a.parquet", "odd.parquet"), "the files of FILE do not fit together"),
        (("a.parquet", "a_kept.parquet"), "--keep writes .*a_kept.parquet, which is FILE itself"),
    ],
)
def test_rows_that_cannot_be_kept_are_refused_before_anything_is_scored(tmp_path, names, problem):
    for name in names:
        changes = {"images": "none"} if name.startswith("odd") else {}
        write(tmp_path / name, [row(i, **changes) for i in range(3)])
    files = ",".join(str(tmp_path / name) for name in names)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(SystemExit, match=problem):
        score_file(Scoring(files, keep=(0.3, 1.0)))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_verdicts_replace_no_file_of_rows(tmp_path):
    file = write(tmp_path / "a.parquet", [row(i) | {"row": i} for i in range(3)])
    rows = write(tmp_path / "rows.parquet", [row(i) for i in range(3)])
    with pytest.raises(SystemExit, match=r"rows\.parquet is FILE itself, or a file of --rows"):
        score_file(Scoring(file, rows=rows, keep=(0.0, 1.0), output=rows))


def test_kept_rows_replace_no_verdicts_of_the_same_command(tmp_path):
    file = write(tmp_path / "a.parquet", [row(i) for i in range(3)])
    kept = tmp_path / "a_kept.parquet"
    with pytest.raises(SystemExit, match=r"a_kept\.parquet, which is FILE itself, .* or --output"):
        score_file(Scoring(file, keep=(0.0, 1.0), output=kept))
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


def test_a_truth_that_nests_too_deep_costs_its_row(tmp_path):
    deep = {"truth": "[" * 3000, "reward_model": None}
    file = write(tmp_path / "a.jsonl", [row(0, **deep), row(1, prompt="[" * 3000)])
    score_file(Scoring(file, bad_rows="drop"))
    assert [s["correct"] for s in read(tmp_path / "a_scored.jsonl")] == [False]


def test_a_prompt_that_looks_like_json_is_a_text(tmp_path):
    function = tmp_path / "mine.py"
    function.write_text(
        "def mine(prompts, completions, **columns):\n    return [float(prompts[0] == '12')]\n"
    )
    file = write(tmp_path / "a.jsonl", [row(0, data_source="mine", prompt="12")])
    score_file(Scoring(file, reward_function=f"{function}:mine"))
    assert [s["score"] for s in read(tmp_path / "a_scored.jsonl")] == [1.0, 1.0]

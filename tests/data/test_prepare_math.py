"""prepare.math: files of problems and solutions become rows; bad rows and other formats are
named."""

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import run_script

from common.prepare import math as prepare
from common.rewards import reward_function
from common.rewards.math import score_boxed

PROBLEM = "What is $1/2$ of $1$?"
SOLUTION = r"It is $\frac{1}{3} < \boxed{\frac{1}{2}}$."


def boxed_score(answer: str, truth: str) -> float:
    return score_boxed(rf"so it is $\boxed{{{answer}}}$.", truth)["score"]


def write_jsonl(path: Path, *records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def prepared(tmp_path: Path, source: Path) -> dict[str, list[dict]]:
    prepare.main(prepare.Args(out=tmp_path / "out", source=str(source)))
    return {
        path.stem: pq.read_table(path).to_pylist() for path in sorted((tmp_path / "out").iterdir())
    }


def test_prepare_row_content(tmp_path, capsys):
    record = {"problem": PROBLEM, "level": "Level 1", "type": "Algebra", "solution": SOLUTION}
    rows = prepared(tmp_path, write_jsonl(tmp_path / "algebra_test.jsonl", record, record))
    assert rows["test"][1] == {
        "data_source": "math/algebra",
        "prompt": [
            {
                "role": "user",
                "content": f"{PROBLEM} Let's think step by step and output the final answer "
                f"within \\boxed{{}}.",
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": r"\frac{1}{2}"},
        "extra_info": {"split": "test", "index": 1, "question": PROBLEM, "answer": SOLUTION},
    }
    assert list(rows) == ["test"] and "2 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    "record, question, truth, answer",
    [
        ({"problem": "p", "solution": SOLUTION, "answer": "0.5"}, "p", "0.5", SOLUTION),
        ({"question": "q", "answer": SOLUTION}, "q", r"\frac{1}{2}", SOLUTION),
        ({"problem": "p", "question": "q", "answer": "204"}, "p", "204", "204"),
        ({"Problem": "p", "Solution": r"\fbox{7}", "Answer": 7}, "p", "7", r"\fbox{7}"),
        ({"problem": "p", "answer": 27.0}, "p", "27", "27"),
        ({"input": "i", "target": 43.0}, "i", "43", "43"),
        ({"input": "i", "target": 0.6666666667}, "i", "0.6666666667", "0.6666666667"),
        ({"input": "i", "target": -1e20}, "i", "-100000000000000000000", "-100000000000000000000"),
        (
            {"Body": "Two apples", "Question": "How many?", "Answer": 2.0},
            "Two apples. How many?",
            "2",
            "2",
        ),
        (
            {"Body": "Two apples. ", "Question": "How many?", "Answer": 2},
            "Two apples. How many?",
            "2",
            "2",
        ),
        ({"problem": "p", "answer": None, "solution": SOLUTION}, "p", r"\frac{1}{2}", SOLUTION),
        (
            {"problem": "p", "solution": "#### 1\n" + SOLUTION},
            "p",
            r"\frac{1}{2}",
            "#### 1\n" + SOLUTION,
        ),
    ],
)
def test_prepare_reads_the_usual_keys(record, question, truth, answer):
    assert prepare.read_record(record) == (question, truth, answer)


@pytest.mark.parametrize(
    "record",
    [
        {"question": "q", "options": "A) 10 B) 12 C) 14 D) 16", "Answer": "B"},  # sat_math
        {"question": "q", "choices": ["10", "12", "14", "16"], "answer": 1},  # mmlu_stem
        # AGIEval
        {
            "passage": None,
            "question": "q",
            "options": ["(A)10", "(B)12", "(C)14", "(D)16"],
            "label": "B",
        },
        # AQuA
        {
            "question": "q",
            "options": ["A)10", "B)12", "C)14", "D)16"],
            "rationale": "r",
            "correct": "B",
        },
        {"question": "q", "A": 10, "B": 12, "C": 14, "D": 16, "answer": "B"},
        {
            "question": "q",
            "choices": {"text": ["10", "12", "14", "16"], "label": ["A", "B", "C", "D"]},
            "answer": "B",
        },
        # ARC
        {
            "question": "q",
            "choices": {"text": ["10", "12", "14", "16"], "label": ["A", "B", "C", "D"]},
            "answerKey": "B",
        },
        {"question": "q", "options": {"A": "10", "B": "12", "C": "14", "D": "16"}, "answer": "(b)"},
        {"question": "q", "options": ["10", "12", "14", "16"], "answer": "12"},
        {"question": "q", "options": ["10", "12", "14", "16"], "solution": r"\boxed{B}"},
    ],
)
def test_options_stand_in_the_prompt_and_their_letter_is_the_truth(record):
    question, truth, _ = prepare.read_record(record)
    assert (question, truth) == (f"q\n(A) 10\n(B) 12\n(C) 14\n(D) 16\n{prepare.CHOICE}", "B")
    assert boxed_score("B", truth) == boxed_score(r"\text{(B) } 12", truth) == 1.0
    assert boxed_score("12", truth) == boxed_score("1", truth) == 0.0


@pytest.mark.parametrize(
    "record, reason",
    [
        ({"question": "q", "options": "10, 12", "answer": "B"}, "options that are no list"),
        ({"question": "q", "options": ["10"], "answer": "A"}, "options that are no list"),
        ({"question": "q", "options": [["10"], ["12"]], "answer": "A"}, "options that are no list"),
        ({"question": "q", "options": ["10", "12"], "answer": 2}, "no right option: .* found 2"),
        (
            {"question": "q", "options": ["10", "12"], "answer": "C"},
            "no right option: .* found 'C'",
        ),
        ({"question": "q", "options": ["10", "12"]}, "no right option: .* found None"),
        (
            {"question": "q", "options": ["B", "A", "D", "C"], "answer": "C"},
            "the answer C may be the option C, or the text of D",
        ),
        (
            {"question": "q", "choices": [1, 2, 3, 4], "answer": 2},
            "the answer 2 may be the option C, by its index, or the value of B",
        ),
        (
            {"question": "q", "A": 1, "B": 2, "C": None, "D": 3, "E": 4, "answer": "D"},
            "options A, B, D, E: one between them is missing",
        ),
        (
            {"question": "q", "choices": {"text": ["2", "1"], "label": ["1", "2"]}, "answer": "1"},
            "options with the labels ",
        ),
    ],
)
def test_options_of_another_shape_are_refused(record, reason):
    with pytest.raises(ValueError, match=reason):
        prepare.read_record(record)


@pytest.mark.parametrize(
    "record, question, answer",
    [
        ({"problem": "p", "answer": "2", "solution": math.nan}, "p", "2"),
        ({"problem": "p", "answer": "2", "solution": ["s"]}, "p", "2"),
        ({"Body": math.nan, "Question": "q", "Answer": 2}, "q", "2"),
        ({"question": "q", "options": math.nan, "answer": "2"}, "q", "2"),
        (
            {"problem": "p", "options": [], "choices": ["x", "y"], "answer": "A"},
            f"p\n(A) x\n(B) y\n{prepare.CHOICE}",
            "A",
        ),
        (
            {"passage": "Seven sit.", "question": "q", "options": ["x", "y"], "label": "B"},
            f"Seven sit.\n\nq\n(A) x\n(B) y\n{prepare.CHOICE}",
            "B",
        ),
        (
            {"question": "q", "A": 1, "B": 2, "C": math.nan, "answer": "B"},
            f"q\n(A) 1\n(B) 2\n{prepare.CHOICE}",
            "B",
        ),
    ],
)
def test_cells_without_a_text(record, question, answer):
    found, _, solution = prepare.read_record(record)
    assert (found, solution) == (question, answer)


def test_a_comma_too_many_names_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "other.jsonl", "x,y.jsonl"):
        write_jsonl(tmp_path / name, {"problem": "p", "answer": "5"})
    assert prepare.source_files("a.jsonl,") == [Path("a.jsonl")]
    assert prepare.source_files("x,y.jsonl") == [Path("x,y.jsonl")]


@pytest.mark.parametrize("empty", [[], "", None])
def test_a_question_without_options_is_open(empty):
    record = {"question": "q", "options": empty, "answer": "12"}
    assert prepare.read_record(record)[1] == "12"
    named = {"question": "q", "options": ["A", "B"], "answer": "B"}
    assert prepare.read_record(named)[1] == "B", "both readings agree"


def test_prepare_folder_by_split_and_source(tmp_path):
    folder = tmp_path / "MATH"
    folder.mkdir()
    for name in ("train", "test", "amc23_test", "extra-train", "aime", "contest"):
        write_jsonl(folder / f"{name}.jsonl", {"problem": name, "answer": "5"})
    rows = prepared(tmp_path, folder)
    found = {
        split: [(row["data_source"], row["prompt"][0]["content"].split()[0]) for row in split_rows]
        for split, split_rows in rows.items()
    }
    assert found == {
        "test": [
            ("math/aime", "aime"),
            ("math/amc23", "amc23_test"),
            ("math/contest", "contest"),
            ("math/MATH", "test"),
        ],
        "train": [("math/extra", "extra-train"), ("math/MATH", "train")],
    }


def test_prepare_a_snapshot_in_the_hubs_cache(tmp_path):
    """There files are links into the folder blobs."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "aime").mkdir()
    write_jsonl(tmp_path / "blobs/0a1b", {"problem": "p", "answer": "5"})
    (tmp_path / "aime/test.jsonl").symlink_to("../blobs/0a1b")
    (row,) = prepared(tmp_path, tmp_path / "aime")["test"]
    assert row["data_source"] == "math/aime"


@pytest.mark.parametrize(
    "line, reason",
    [
        ('{"problem": "p"', "invalid JSON"),
        ("\udcff", "invalid JSON"),
        ('["p", "5"]', "a JSON list, expected an object"),
        ('{"answer": "5"}', "no question: expected text as problem, question or input, found None"),
        ('{"problem": 5, "answer": "5"}', "no question: .* found 5"),
        ('{"problem": " ", "answer": "5"}', "no question"),
        (
            '{"problem": "p"}',
            "no answer: expected text or a number as answer, target or solution, found None",
        ),
        ('{"problem": "p", "answer": ["5"]}', r"no answer: .* found \['5'\]"),
        ('{"problem": "p", "answer": true}', "no answer: .* found True"),
        ('{"problem": "p", "answer": NaN}', "no answer: .* found nan"),
        ('{"problem": "p", "answer": ""}', "the ground truth '' is no answer"),
        ('{"problem": "p", "answer": 1' + "0" * 600 + "}", "is no answer of 1 to 512 characters"),
        (r'{"problem": "p", "answer": "\\boxed{}"}', "the ground truth '' is no answer"),
        (r'{"problem": "p", "solution": "It is \\boxed{}."}', "the ground truth '' is no answer"),
        (r'{"problem": "p\ud800", "answer": 1}', "surrogates not allowed"),
        ('{"problem": "p", "answer": "' + "x" * 600 + '"}', "is no answer of 1 to 512 characters"),
        ('{"problem": "p", "solution": "It is 5."}', "the solution has no complete"),
        (r'{"problem": "p", "solution": "It is \\boxed{5"}', "the solution has no complete"),
        (
            '{"question": "q", "answer": "So 8 * 9 = 72.\\n#### 72"}',
            "GSM8K's format: python -m common.prepare.gsm8k",
        ),
    ],
)
def test_prepare_bad_line_is_named(tmp_path, line, reason):
    path = tmp_path / "mine.jsonl"
    good = json.dumps({"problem": "p", "answer": "5"})
    path.write_bytes(f"{good}\n\n{line}\n".encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=rf"mine\.jsonl line 3: .*{reason}"):
        prepare.main(prepare.Args(out=tmp_path / "out", source=str(path)))
    assert not (tmp_path / "out").exists()


def test_prepare_drops_bad_rows_if_asked_to(tmp_path, capsys):
    """All of them are counted, and the first five named."""
    good = {"problem": "p", "answer": "5"}
    bad = {"problem": "p", "answer": ""}
    path = write_jsonl(tmp_path / "mine.jsonl", good, *[bad] * 7, good)
    with pytest.raises(
        ValueError, match=r"^7 unusable rows \(--bad-rows drop drops them\)"
    ) as error:
        prepare.main(prepare.Args(out=tmp_path / "out", source=str(path)))
    assert str(error.value).count("mine.jsonl line ") == 5 and not (tmp_path / "out").exists()
    prepare.main(prepare.Args(out=tmp_path / "out", source=str(path), bad_rows="drop"))
    rows = pq.read_table(tmp_path / "out" / "test.parquet").to_pylist()
    assert [row["extra_info"]["index"] for row in rows] == [0, 1]
    assert "warning: 7 unusable rows (dropped); the first:\n" in capsys.readouterr().out
    with pytest.raises(ValueError, match="2 unusable rows"):  # and no other
        prepare.main(prepare.Args(tmp_path / "none", str(write_jsonl(path, bad, bad)), "drop"))


def test_prepare_bad_source(tmp_path):
    for source in (tmp_path, tmp_path / "none.jsonl"):
        with pytest.raises(FileNotFoundError, match=f"--source {source}"):
            prepare.main(prepare.Args(out=tmp_path / "out", source=str(source)))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl: no rows"):
        prepare.main(prepare.Args(out=tmp_path / "out", source=str(tmp_path)))
    path = write_jsonl(tmp_path / "my-gsm8k.jsonl", {"problem": "p", "answer": "5"})
    with pytest.raises(ValueError, match="math/my-gsm8k is not scored by its box"):
        prepare.main(prepare.Args(out=tmp_path / "out", source=str(path)))


def test_prepare_from_hub(tmp_path, monkeypatch):
    published = tmp_path / "published.parquet"
    pq.write_table(
        pa.table({"problem": [PROBLEM], "level": ["1"], "solution": [SOLUTION], "type": ["x"]}),
        published,
    )
    asked = []
    monkeypatch.setattr(
        prepare,
        "hf_hub_download",
        lambda *args, **kwargs: asked.append((args, kwargs)) or published,
    )
    prepare.main(prepare.Args(out=tmp_path / "out"))
    name = "DigitalLearningGmbH/MATH-lighteval"
    assert asked == [
        ((name, f"data/{split}-00000-of-00001.parquet"), {"repo_type": "dataset"})
        for split in ("train", "test")
    ]
    for split in ("train", "test"):
        (row,) = pq.read_table(tmp_path / "out" / f"{split}.parquet").to_pylist()
        assert (row["data_source"], row["extra_info"]["split"]) == (name, split)
        assert (
            reward_function(name)(name, SOLUTION, row["reward_model"]["ground_truth"])["score"]
            == 1.0
        )


def test_prepare_hub_offline_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConnectionError, match=r"HF_ENDPOINT(.|\n)*--source"):
        prepare.main(prepare.Args(out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_prepare_command_line(tmp_path):
    source = write_jsonl(tmp_path / "train.jsonl", {"problem": "p", "answer": "5"})
    run_script("-m", "common.prepare.math", "--source", source, "--out", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train.parquet"]

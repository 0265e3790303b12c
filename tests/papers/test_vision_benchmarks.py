"""papers.pyvision.benchmarks on small copies of the published layouts, and the scores of
TIR-Bench."""

import base64
import csv
import json
import time
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from helpers import run_script
from vl import picture

from common.data.verl import row_problem
from common.rewards import is_correct, score_episodes, score_response
from common.rollout.evaluation import as_sample, report, summarize
from common.types import Episode
from papers.pyvision.benchmarks import TIR_TASKS, Args, main
from papers.pyvision.tir_bench import letter_of, options_of, score_tir_bench, tir_bench_reward

OPTIONS = ["The cup is red.", "The cup is blue.", "The cup is green.", "The cup is white."]
COLUMNS = ["index", "image", "question", "answer", "category", "A", "B", "C", "D", "cycle_category"]


@pytest.fixture
def vstar(tmp_path):
    for part, count in {"direct_attributes": 6, "relative_position": 1}.items():
        (tmp_path / "vstar" / part).mkdir(parents=True)
        for i in range(count):
            stem = tmp_path / "vstar" / part / f"sa_{i}"
            stem.with_suffix(".jpg").write_bytes(picture(100, 60 + i, i, format_="JPEG"))
            known = {
                "question": "What color is the cup?",
                "options": OPTIONS[: 4 if count > 1 else 2],
                "bbox": [],
            }
            stem.with_suffix(".json").write_text(json.dumps(known))
        (tmp_path / "vstar" / part / "._sa_0.json").write_text("of a Mac")
    return tmp_path / "vstar"


@pytest.fixture
def hrbench(tmp_path):
    (tmp_path / "hr").mkdir()
    return tmp_path / "hr"


def write_tsv(folder, rows: list[dict], name: str = "hr_bench_4k.tsv") -> None:
    line = dict.fromkeys(COLUMNS, "") | {
        "question": "How many?",
        "answer": "C",
        "category": "single",
    }
    line |= {
        "image": base64.b64encode(picture(80, 60)).decode(),
        "A": "None",
        "B": "N/A",
        "C": "A",
        "D": "3\t4",
    }
    with (folder / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, delimiter="\t")
        writer.writeheader()
        writer.writerows(line | {"index": i} | row for i, row in enumerate(rows))


def write_tir(tmp_path, rows: list):
    folder = tmp_path / "tir"
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for name in ("1.png", "160.jpg", "60.jpg"):
        (folder / "data" / name).write_bytes(
            picture(60, 40, format_="PNG" if name == "1.png" else "JPEG")
        )
    known = {
        "image_1": "data/1.png",
        "image_2": None,
        "prompt": "How many?",
        "answer": "3",
        "task": "math",
    }
    rows = [known | {"id": i} | row if isinstance(row, dict) else row for i, row in enumerate(rows)]
    (folder / "TIR-Bench.json").write_text(json.dumps(rows))
    return folder


def written(tmp_path, name: str) -> list[dict]:
    rows = pq.read_table(tmp_path / f"out/{name}.parquet").to_pylist()
    assert [row_problem(row) for row in rows] == [None] * len(rows)
    return rows


def test_an_item_that_nests_too_deep_is_one_unusable_row(tmp_path, vstar):
    (vstar / "direct_attributes/sa_0.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="1 unusable rows"):
        main(Args(tmp_path / "out", vstar=vstar))


def test_blank_lines_of_a_question_take_linear_time():
    start = time.process_time()
    assert options_of("Which?" + "\n" * 50_000 + "A. red\n \n(B) blue") == {"A": "red", "B": "blue"}
    for question in ("A. x" + " " * 50_000 + "y\nB. z", "(A) x" + " " * 50_000 + "y (B) z"):
        assert options_of(question) == {"A": "x" + " " * 50_000 + "y", "B": "z"}
    assert time.process_time() - start < 2.0


# --- rows -----------------------------------------------------------------------------------------


def test_vstars_options_are_shuffled_and_the_truth_moves_along(tmp_path, vstar):
    """The right one is the first as published: a policy that says A would be right every time."""
    main(Args(tmp_path / "out", vstar=vstar))
    rows = written(tmp_path, "vstar")
    sources = [row["data_source"] for row in rows]
    assert sources == ["vstar/direct_attributes"] * 6 + ["vstar/relative_position"]
    letters = []
    for row in rows:
        truth = row["reward_model"]["ground_truth"]
        text = row["prompt"][0]["content"]
        letters.append(truth["answer"])
        assert truth["options"]["ABCD".index(truth["answer"])] == OPTIONS[0]
        listed = "\n".join(
            f"{letter}. {option}" for letter, option in zip("ABCD", truth["options"])
        )
        assert row["extra_info"]["question"] == f"What color is the cup?\n{listed}"
        assert f"{listed}\nAnswer with the letter" in text
        assert "Image Width: 100; Image Height: 6" in text
    assert len(set(letters)) > 1
    main(Args(tmp_path / "out", vstar=vstar))
    assert written(tmp_path, "vstar") == rows, "the same seed"
    (vstar / "direct_attributes/sa_0.json").unlink()
    (vstar / "direct_attributes/sa_0.jpg").unlink()
    main(Args(tmp_path / "out", vstar=vstar))
    assert [row["prompt"] for row in written(tmp_path, "vstar")] == [
        row["prompt"] for row in rows[1:]
    ]
    main(Args(tmp_path / "out", vstar=vstar, seed=1))
    assert [row["prompt"] for row in written(tmp_path, "vstar")] != [
        row["prompt"] for row in rows[1:]
    ]
    main(Args(tmp_path / "out", vstar=vstar, keep_order=True))
    assert {
        row["reward_model"]["ground_truth"]["answer"] for row in written(tmp_path, "vstar")
    } == {"A"}


def test_hrbenchs_texts_stay_what_they_are(tmp_path, hrbench):
    """pandas reads None and N/A as missing values; the pictures are larger than the csv module's
    usual limit."""
    large = base64.b64encode(picture(400, 300)).decode()
    assert len(large) > 131_072
    write_tsv(hrbench, [{}, {"category": "cross", "image": large}])
    write_tsv(hrbench, [{}], "hr_bench_8k.tsv")
    main(Args(tmp_path / "out", hrbench=hrbench))
    rows = written(tmp_path, "hrbench")
    assert [row["data_source"] for row in rows] == [
        "hrbench-4k/single",
        "hrbench-4k/cross",
        "hrbench-8k/single",
    ]
    assert rows[0]["reward_model"]["ground_truth"] == {
        "answer": "C",
        "options": ["None", "N/A", "A", "3\t4"],
    }
    assert "Image Width: 400; Image Height: 300" in rows[1]["prompt"][0]["content"]


def test_tir_bench_as_published_and_as_pyvision_has_it(tmp_path):
    """Two pictures stay two; two OCR truths are put right, as the benchmark's own evaluation
    does."""
    copy = {
        "image_1": None,
        "images": ["data/1.png", "data/60.jpg"],
        "prompt": None,
        "answer": None,
        "task": None,
    }
    copy |= {
        "problem": "<image>\n<image>\nWhich patches?",
        "solution": [2, 3],
        "category": "spot_difference",
    }
    del copy["answer"]
    rows = [{"task": task} for task in TIR_TASKS] + [copy]
    rows += [
        {"task": "ocr", "image_1": f"data/{name}", "answer": "x"} for name in ("60.jpg", "160.jpg")
    ]
    folder = write_tir(tmp_path, rows)
    table = json.loads((folder / "TIR-Bench.json").read_text())
    del table[13]["answer"]
    (folder / "TIR-Bench.json").write_text(json.dumps(table))
    main(Args(tmp_path / "out", tir=folder))
    rows = written(tmp_path, "tir_bench")
    assert len(TIR_TASKS) == 13
    assert [row["data_source"] for row in rows[:13]] == [f"tir_bench/{t}" for t in TIR_TASKS]
    two = rows[13]["prompt"][0]["content"]
    assert two.startswith(
        "<image_clue_0><image></image_clue_0><image_clue_1><image></image_clue_1>\n"
    )
    assert "image_clue_0: Image Width: 60; Image Height: 40\nimage_clue_1: Image Width" in two
    truths = [row["reward_model"]["ground_truth"] for row in rows[13:]]
    assert truths == ["[2, 3]", "mobi", "x"]


BAD = {
    "no picture": ("tir", {"image_1": None}, "no picture"),
    "outside": ("tir", {"image_1": "../x.png"}, "leads out of"),
    "another task": ("tir", {"task": "chess"}, "task 'chess', expected one of maze"),
    "no truth": ("tir", {"answer": None}, "the answer is None"),
    "no object": ("tir", [1], "a JSON list"),
    "no letter": ("hrbench", {"answer": "E"}, "answer 'E': expected single or cross, A to D"),
    "category": ("hrbench", {"category": "both"}, "category 'both'"),
    "an option is missing": ("hrbench", {"D": ""}, "an option is '', expected text"),
    "broken picture": ("hrbench", {"image": "AAAA"}, "unreadable image"),
    "no base64": ("hrbench", {"image": "@"}, "malformed: Error"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_told_by_file_row_and_reason(tmp_path, hrbench, name, capsys):
    """Left out of the mean without a word it would raise it, or lower it."""
    kind, row, why = BAD[name]
    if kind == "tir":
        options = {"tir": write_tir(tmp_path, [{}, row])}
    else:
        write_tsv(hrbench, [{}, row])
        options = {"hrbench": hrbench}
    with pytest.raises(ValueError, match="1 unusable rows") as raised:
        main(Args(tmp_path / "out", **options))
    assert why in str(raised.value)
    assert " row 1: " in str(raised.value)
    assert not list((tmp_path / "out").glob("*"))
    main(Args(tmp_path / "out", **options, bad_rows="drop"))
    assert "warning: 1 unusable rows (dropped)" in capsys.readouterr().out


def test_what_is_not_there_is_named(tmp_path, vstar, hrbench):
    (vstar / "direct_attributes/sa_1.json").unlink()
    (vstar / "direct_attributes/sa_2.jpg").unlink()
    (vstar / "direct_attributes/sa_3.json").write_text('{"question": "?", "options": ["one"]}')
    with pytest.raises(
        ValueError,
        match=r"(?s)3 unusable rows.*sa_1: .*No such file.*sa_2: cannot open.*sa_3: 1 options",
    ):
        main(Args(tmp_path / "out", vstar=vstar))
    with pytest.raises(
        FileNotFoundError, match=r"--hrbench .*: expected hr_bench_4k\.tsv or hr_bench_8k\.tsv"
    ):
        main(Args(tmp_path / "out", hrbench=hrbench))
    with pytest.raises(FileNotFoundError, match=r"--vstar .*there is no direct_attributes/"):
        main(Args(tmp_path / "out", vstar=hrbench))
    with pytest.raises(FileNotFoundError, match="--tir: no such file"):
        main(Args(tmp_path / "out", tir=hrbench))
    (hrbench / "hr_bench_4k.tsv").write_bytes(b"\xff\xfe\0")
    with pytest.raises(ValueError, match="is no table with tabs"):
        main(Args(tmp_path / "out", hrbench=hrbench))
    with pytest.raises(ValueError, match="give at least one of"):
        main(Args(tmp_path / "out"))


# --- scores of TIR-Bench --------------------------------------------------------------------------

MAZE = "Which way?\nA. DLDRDD\nB. ULUUDD\nC. RRRRRR\nF. No answer"
COLOR = "Which proportion is closest? (A) 9% (B) 13% (C) 17% (D) 21%"
READING = "The reading is:\nA 4.6\nB 4.8\nC 5\nD 5.2"
SCORES = [  # task, question, truth, answers and their scores
    (
        "maze",
        MAZE,
        "B",
        {"B": 1, "(B)": 1, "B. ULUUDD": 1, "ULUUDD": 1, "\\text{B}": 1, "Option B": 1, "A": 0},
    ),
    ("maze", MAZE, "F", {"No answer": 1, "F": 1, "none": 0, "A, B": 0}),
    ("color", COLOR, "B", {"13%": 1, "(B) 13%": 1, "B": 1, "9%": 0}),
    ("instrument", READING, "D", {"5.2": 1, "D 5.2": 1, "5": 0}),
    ("instrument", "", "2.39", {"2.39 cm": 1, "2.390": 1, "23.9": 0, "2.39 or 23.9": 0}),
    ("symbolic", "", "CD", {"CD": 1, "D, C": 1, "C and D": 1, "C": 0, "CDE": 0, "CCD": 0}),
    (
        "math",
        "",
        "12",
        {
            "12": 1,
            "12.0": 1,
            "\\frac{24}{2}": 1,
            "twelve": 1,
            "12 minutes": 1,
            "-12": 0,
            "12 of 15": 0,
        },
    ),
    ("visual_search", "", "970", {"970 yen": 1, "970円": 1, "**970**": 1, "9700": 0}),
    ("contrast", "", "4", {"four": 1, "4 vehicles": 1, "14": 0}),
    (
        "word_search",
        "",
        "[17, 1]",
        {"[17, 1]": 1, "row 17, column 1": 1, "第 17 行，第 1 列": 1, "[1, 17]": 0, "17": 0},
    ),
    ("word_search", "", "4", {"4": 1, "5": 0}),
    (
        "spot_difference",
        "",
        "[2, 6, 7, 11]",
        {'{"different_patches": [11, 7, 2, 6]}': 1, "2, 3": 0.2, "none": 0},
    ),
    ("spot_difference", "", "6", {"6": 1, "6 places": 1, "5": 0}),
    (
        "jigsaw",
        "",
        "1, 2, 3, 4",
        {"1, 2, 3, 4": 1, "1,2,4,3": 0.5, "1 2 3": 0, "1, 2, 3, 4, 5": 0, "none": 0},
    ),
    ("jigsaw", "", "1,2,3,4", {"1,2,3,4": 1, "1, 2, 4, 3": 0.5, "4,3,2,1": 0}),
    ("word_search", "", "17,1", {"17,1": 1, "row 17, column 1": 1, "9,9": 0}),
    ("spot_difference", "", "1,2", {"2,1": 1, "1,3": 1 / 3, "9,9": 0}),
    ("math", "", ".5", {".5": 1, "0.5": 1, ".7": 0, "1,2": 0}),
    ("ocr", "", "mobi", {"mobi": 1, "'mobi'.": 1, "mobile": 0, "the mobi shop": 0, "nobi": 0}),
]


@pytest.mark.parametrize("task, question, truth, answers", SCORES)
def test_the_rules_of_the_tasks(task, question, truth, answers):
    source = f"tir_bench/{task}"
    fn = tir_bench_reward
    for answer, score in answers.items():
        said = f"<answer>\n\\boxed{{1}}\n</answer> no: <answer>\n\\boxed{{{answer}}}\n</answer>"
        rewards = score_response(fn, source, said, truth, {"question": question})
        assert rewards["score"] == score, answer
        assert is_correct(rewards) is (score == 1)
        assert (
            score_response(
                fn, source, f"it is <answer>{answer}</answer>", truth, {"question": question}
            )
            == rewards
        )
        assert (
            score_response(fn, source, f"it is {answer}", truth, {"question": question})["score"]
            == 0
        ), "no answer"


def test_an_answer_that_resembles_no_option_is_not_a():
    """The released scorer takes the letter that is nearest to a text by edit distance: A, of all
    that are far."""
    assert letter_of("it cannot be seen", MAZE) == "" and letter_of("", MAZE) == ""
    assert letter_of("13 or 17 percent", COLOR) == "", "two are as near"
    assert options_of("How many A and B are there?") == {}
    assert letter_of("A and B", "How many?") == ""


def test_numbers_in_an_answer_are_not_run_together():
    """Without its letters "12 of 15" is 1215 for the released scorer."""
    fn = tir_bench_reward
    assert score_response(fn, "tir_bench/math", "<answer>12 of 15</answer>", "1215")["score"] == 0


@pytest.mark.parametrize(
    "answer",
    [r"3\mathrm{i}", "3x", "3!", "3 million", "not 3", "3/2", "3:30", "3^2", "3 a.m.", "x > 3"],
)
def test_what_makes_another_number(answer):
    assert score_tir_bench("math", rf"\boxed{{{answer}}}", "3")["score"] == 0.0
    assert score_tir_bench("math", r"\boxed{about 3 cups}", "3")["score"] == 1.0
    assert score_tir_bench("math", r"\boxed{There are 3 cups.}", "3")["score"] == 1.0


def test_lists_are_no_number_and_a_sign_is_no_emphasis():
    assert score_tir_bench("math", r"\boxed{3,4}", "1,2")["score"] == 0.0
    assert score_tir_bench("math", r"\boxed{1,2}", "1,2")["score"] == 1.0
    assert score_tir_bench("math", r"\boxed{1234}", "1,234")["score"] == 1.0
    assert score_tir_bench("math", r"\boxed{3*4}", "34")["score"] == 0.0
    assert score_tir_bench("math", r"\boxed{3*4}", "12")["score"] == 1.0
    assert score_tir_bench("math", r"\boxed{3 * 4}", "12")["score"] == 1.0
    assert score_tir_bench("math", r"\boxed{**12**}", "12")["score"] == 1.0


def test_text_around_an_answer_is_none_of_it():
    assert score_tir_bench("ocr", r"<answer>\boxed{\text{mobi}}</answer>", "mobi")["score"] == 1.0
    for answer in (r"\text{A, B}", r"A \text{ and } B", "$A, B$"):
        assert score_tir_bench("color", rf"\boxed{{{answer}}}", "AB")["score"] == 1.0


@pytest.mark.parametrize(
    "truth", [["5"], {"answer": "5"}, None, float("nan"), float("inf")], ids=repr
)
def test_what_no_answer_can_be_is_no_truth(truth):
    with pytest.raises(ValueError, match="is neither a text nor a finite number"):
        score_tir_bench("math", r"\boxed{5}", truth)


def test_an_ocr_text_counts_in_the_answer_alone():
    """The released scorer looks for it in all that was said."""
    fn = tir_bench_reward
    said = "Is it mobi? <answer>\\boxed{nothing}</answer>"
    assert score_response(fn, "tir_bench/ocr", said, "mobi")["score"] == 0


@pytest.mark.parametrize("task", TIR_TASKS)
def test_no_response_is_an_exception(task):
    fn = tir_bench_reward
    hostile = [
        "",
        "</answer><answer>",
        "<answer>" * 5000,
        "\\boxed{" * 5000,
        "<answer>\ud800</answer>",
        "\0",
        "9" * 9000,
    ]
    hostile += [
        f"<answer>{text}</answer>"
        for text in ("9" * 999, "9" * 5000, "²", "१२", "1e999", "nan", "(" * 900, "9^" * 400)
    ]
    for truth in ("B", "CD", "3", "[1, 2]", "-0.5", "mobi"):
        for said in hostile:
            assert (
                0
                <= score_response(fn, f"tir_bench/{task}", said, truth, {"question": COLOR})[
                    "score"
                ]
                < 1
            )
    with pytest.raises(ValueError, match="is empty"):
        score_response(fn, f"tir_bench/{task}", "x", " ")


def test_an_evaluation_tells_the_parts_apart_and_counts_what_could_not_be_scored(tmp_path):
    """The release leaves rows that failed out of the mean."""
    results = [{"score": 0.5}, {"error": "it took longer than 10 s"}, {"score": 1.0}]
    endings = ["stop", "stop", "tool_failed", "unreadable", "stop"]
    parts = ["tir_bench/jigsaw"] * 4 + ["vstar/direct_attributes"]
    rows = {
        i: SimpleNamespace(data_source=part, ground_truth="1", extra_info={}, index=i)
        for i, part in enumerate(parts)
    }
    episodes = [Episode(i, 0, [1], [2], [1], [0.0], ending) for i, ending in enumerate(endings)]
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens=False: "text")
    workers = SimpleNamespace(is_trl=False, score=lambda jobs: results)
    score_episodes(episodes, rows, workers, tokenizer)
    samples = [as_sample(episode, rows[i], tokenizer, True) for i, episode in enumerate(episodes)]
    assert [sample["score"] for sample in samples] == [0.5, 0.0, 0.0, 0.0, 1.0]
    assert [sample["correct"] for sample in samples] == [False] * 4 + [True]
    metrics = summarize(samples)
    assert (metrics["eval/rows"], metrics["eval/accuracy"], metrics["eval/reward"]) == (5, 0.2, 0.3)
    table = report(samples, tmp_path / "samples.parquet").splitlines()
    assert "reward" in table[0] and "tir_bench/jigsaw" in table[1] and "0.125" in table[1]
    assert "vstar/direct_attributes" in table[2] and "1.000" in table[2]


@pytest.mark.slow
def test_the_documented_evaluation_reports_each_part(tmp_path, hrbench):
    """Without the interpreter; a response that no rule can read scores 0, and stays in the mean."""
    folder = write_tir(tmp_path, [{"task": task} for task in ("math", "ocr")])
    command = ["-m", "papers.pyvision.benchmarks", "--tir", folder, "--out", tmp_path / "out"]
    assert "tir_bench.parquet: 2 rows" in run_script(*command, fresh=True).stdout
    options = [
        "--model",
        "tiny-vl",
        "--engine",
        "hf",
        "--eval-data",
        tmp_path / "out/tir_bench.parquet",
    ]
    options += ["--eval-samples", 2, "--eval-temperature", 0.01, "--max-response-tokens", 4]
    options += ["--max-prompt-tokens", 2000, "--output-dir", tmp_path / "run"]
    options += ["--reward-function", "papers/pyvision/rewards.py:score"]
    output = run_script("grpo.py", "--eval-only", *options).stdout
    assert "tir_bench/math" in output and "tir_bench/ocr" in output
    assert len(pq.read_table(tmp_path / "run/eval_samples.parquet")) == 4

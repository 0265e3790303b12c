r"""Geometry3K: its reward in cases worked by hand, hostile text, and the preparation of its data.

pytest tests/rewards/test_geometry.py
"""

import io
import random
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from common.prepare import geo3k
from common.rewards import geo3k_reward, geometry, reward_function, score_response
from common.rewards.geometry import in_format, score_geo3k

MEGA = 100_000


def is_right(answer: str, truth: str) -> bool:
    return score_geo3k(rf"so it is $\boxed{{{answer}}}$.", truth)["acc"]


# --- right and wrong answers ---

RIGHT = [  # answer, ground truth
    ("65", "65"),
    (" 65. ", "65"),
    ("65.0", "65"),
    ("1,000", "1000"),
    ("-5", "-5"),
    ("x = 7", "7"),
    (r"65^\circ", "65"),
    (r"65^{\circ}", "65"),
    ("65°", "65"),
    ("65 degrees", "65"),
    ("65", r"65 ^ { \circ }"),
    (r"5\text{ cm}", "5"),
    (r"5 \text{ cm}^2", "5"),
    ("5 cm", "5"),
    ("12 units", "12"),
    (r"50\%", "50"),
    ("(5)", "5"),
    ("5.60", "5.6"),
    ("28/5", "5.6"),
    ("5.6", r"\frac{28}{5}"),
    ("1/2", r"\frac { 1 } { 2 }"),
    (r"\dfrac12", "1/2"),
    (".5", "1/2"),
    (r"\frac{-1}{2}", r"-\frac{1}{2}"),
    (r"\frac{14}{2}", r"\frac{14}{2}"),
    ("7", r"\frac{14}{2}"),
    ("1 1/2", r"\frac{3}{2}"),
    ("1 1/2", "1.5"),
    ("-1 1/2", "-3/2"),
    (r"5\frac{1}{3}", "16/3"),
    (r"\frac{16}{3}", r"5 \frac { 1 } { 3 }"),
    (r"2\sqrt{221}", r"2 \sqrt { 221 }"),
    ("2√221", r"2 \sqrt { 221 }"),
    (r"\sqrt{884}", r"2 \sqrt { 221 }"),
    (r"\frac{3}{\sqrt{2}}", r"\frac { 3 \sqrt { 2 } } { 2 }"),
    (r"7 \pi", r"7\pi"),
    (r"r^2\pi", r"\pi r^2"),
    ("4", r"\sqrt{16}"),
    ("x+5", "5 + x"),
    ("(1, 2)", "(1,2)"),
    (r"\left( 0.5, \sqrt{8} \right)", r"(\frac{1}{2}, 2\sqrt{2})"),
    ("(5 cm, 6 cm)", "(5, 6)"),
    ("[0, 1)", "[0,1)"),
    ("((1,2),3)", "((1, 2), 3)"),
    ("((0.5, 2), 3)", "((1/2, 2), 3)"),
    ("(1+2)(3+4)", "(1+2)(3+4)"),
]
WRONG = [
    ("66", "65"),
    ("-65", "65"),
    ("", "65"),
    ("None", "65"),
    ("65 or 66", "65"),
    ("10/2", "5"),  # an integer has to be written as one
    ("5/1", "5"),
    (r"\sqrt{25}", "5"),
    ("2^3", "8"),
    ("2+3", "5"),
    ("2/4", "1/2"),  # fractions in lowest terms
    (r"\frac{28}{4}", r"\frac{14}{2}"),
    ("1/0", "5"),
    ("1 1/2", "11/2"),
    ("0.33", "1/3"),
    ("5.6", "5.64"),
    ("6", "5.6"),
    ("29.73", r"2\sqrt{221}"),
    ("21.99", r"7\pi"),
    (r"\sqrt{221}", r"2\sqrt{221}"),
    ("(2, 1)", "(1, 2)"),
    ("(1, 2, 3)", "(1, 2)"),
    ("(1, 3)", "(1, 2)"),
    ("1, 2", "(1, 2)"),
    ("[0, 1]", "[0, 1)"),
    (r"(1, \sqrt{4})", "(1, 2)"),  # element by element
    ("(2/4, 1)", "(1/2, 1)"),
    ("(,)", "(1, 2)"),
    ("(1+2)(3+4)", "21"),
    ("y", "x"),
]


@pytest.mark.parametrize("answer, truth", RIGHT)
def test_right(answer, truth):
    assert is_right(answer, truth)


@pytest.mark.parametrize("answer, truth", WRONG)
def test_wrong(answer, truth):
    assert not is_right(answer, truth)


@pytest.mark.parametrize(
    "text, pred",
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{4} no, \boxed{5}", "5"),
        (r"\boxed{5} and, cut off, \boxed{6", "5"),
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("5", ""),
        (r"\boxed 5", ""),
        (r"\boxed{5", ""),
        (r"\boxed{" + "5" * 513 + "}", ""),
    ],
)
def test_last_box_counts(text, pred):
    result = score_geo3k(text, "5")
    assert (result["acc"], result["pred"]) == (pred == "5", pred)


def test_votes_agree_on_what_is_right_only():
    assert [score_geo3k(rf"\boxed{{{a}}}", "1/2")["pred"] for a in ("0.5", r"\frac12", "1/2")] == [
        r"\frac{1}{2}"
    ] * 3
    assert score_geo3k(r"\boxed{2/4}", "1/2")["pred"] == r"\frac{2}{4}"


def test_sympy_is_asked_only_where_it_is_needed_and_bounded(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "common.rewards.formulas.same_value", lambda *texts: asked.append(texts) or False
    )
    for answer, truth in WRONG[:13]:
        assert not is_right(answer, truth)
    assert asked == []
    assert not is_right("r\\pi", "\\pi r")
    assert asked == [("r\\pi", "\\pi r")]


@pytest.mark.parametrize("truth", ["", " ", "$$", "1" * 513])
def test_ground_truth_that_nothing_matches_is_an_error(truth):
    with pytest.raises(ValueError, match="no answer of 1 to 512 characters"):
        score_geo3k(r"\boxed{5}", truth)


# --- format ---


@pytest.mark.parametrize(
    "text, expected",
    [
        (r"<think>a</think>\boxed{5}", 1),
        ("<think>\nlong\n\nthought</think>\n\nso $\\boxed{5}$.\n", 1),
        (r"<think></think>\boxed{}", 1),
        (r"<think>\boxed{4}</think>\boxed{5}", 1),
        (r"<think>a</think><think>b</think>\boxed{5}", 1),
        (r"<think>a</think>\boxed{5", 0),
        (r"<think>\boxed{5}</think>", 0),
        (r"<think>\boxed{5}</think>}", 0),
        (r"<think>\boxed{5}", 0),
        (r"</think><think>\boxed{5}", 0),
        (r"<think</think>\boxed{5}", 0),
        (r"a</think>\boxed{5}", 0),
        (r" <think>a</think>\boxed{5}", 0),
        (r"so <think>a</think>\boxed{5}", 0),
        (r"<think>a</think>boxed{5}", 0),
        (r"<think>a</think>\boxed {5}", 0),
        ("", 0),
    ],
)
def test_format(text, expected):
    assert in_format(text) == expected
    assert score_geo3k(text, "71")["format"] == float(expected)


@pytest.mark.parametrize(
    "text, expected",
    [
        (r"<think>a</think>\boxed{5}", {"score": 1.0, "acc": True, "format": 1.0, "pred": "5"}),
        (r"\boxed{5}", {"score": 0.9, "acc": True, "format": 0.0, "pred": "5"}),
        (r"<think>a</think>\boxed{6}", {"score": 0.1, "acc": False, "format": 1.0, "pred": "6"}),
        (r"<think>a</think> 5", {"score": 0.0, "acc": False, "format": 0.0, "pred": ""}),
    ],
)
def test_score(text, expected):
    assert score_geo3k(text, "5") == expected


@pytest.mark.parametrize("data_source", ["hiyouga/geometry3k", "geo3k", "my/geo3k_multiturn"])
def test_chosen_by_data_source(data_source):
    assert reward_function(data_source) is geo3k_reward
    scored = score_response(geo3k_reward, data_source, r"<think></think>\boxed{5}", "5")
    assert scored == {"score": 1.0, "acc": 1.0, "format": 1.0, "pred": "5"}


HOSTILE = {
    "open": "<think>" * (MEGA // 7),
    "close": "<think>" + "</think>" * (MEGA // 8),
    "open and close": "<think></think>" * (MEGA // 15),
    "boxes that stay open": "<think></think>" + r"\boxed{" * (MEGA // 7),
    "boxes": r"<think></think>" + r"\boxed{5}" * (MEGA // 9),
    "nested boxes": r"\boxed{" * (MEGA // 8) + "}" * (MEGA // 8),
    "braces": r"\boxed" + "{" * MEGA,
    "closing braces": r"<think></think>\boxed{" + "}" * MEGA,
    "backslashes": "<think></think>" + "\\" * MEGA,
    "spaces": r"\boxed" + " " * MEGA + "{5}",
    "long answer": r"\boxed{" + "5" * MEGA + "}",
    "mixed number": r"\boxed{1" + " " * 500 + "1/2}",
    "tuple": r"\boxed{(" + "1," * 250 + "1)}",
    "brackets": r"\boxed{" + "([" * 250 + "}",
    "NULs": "\0" * MEGA,
    "surrogates": "<think>\ud800</think>\\boxed{\udfff" + "\ud800" * MEGA + "}",
    "short surrogates": "\\boxed{(\ud800, 5)}",
    "powers": r"\boxed{" + "9^" * 200 + "9}",
    "radicals": r"\boxed{" + r"\sqrt{" * 70 + "2" + "}" * 70 + "}",
    "factorials": r"\boxed{((9!)!)!}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_takes_linear_time(name):
    score_geo3k(r"\boxed{x+1}", "1+x")  # imports sympy
    start = time.process_time()
    for truth in ("5", r"2\sqrt{221}", "(1, 2)", "(" + "1," * 200 + "1)"):
        assert score_geo3k(HOSTILE[name], truth)["acc"] == (
            name in ("boxes", "spaces") and truth == "5"
        )
    assert time.process_time() - start < 2.0


def test_no_response_raises():
    rng = random.Random(0)
    pieces = [*"{}()[],^_1./-√x°\\$%= \n\0\ud800", "25", "5 1/2", "<think>", "</think>"]
    pieces += [r"\boxed{", r"\frac", r"\sqrt", r"\pi", r"\text{"]
    for truth in ("5", r"\frac{\sqrt{3}}{2}", "(1, 2)") * 200:
        text = (
            "\\boxed{"
            + "".join(rng.choices(pieces, k=rng.randint(0, 12)))
            + "}" * rng.randint(0, 3)
        )
        assert set(score_geo3k(text, truth)) == {"score", "acc", "format", "pred"}


# --- preparation ---


def png(color: str, size: tuple[int, int] = (40, 30)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


def published(problem="<image>Find x.", answer="65", images=None) -> dict:
    return {"images": [{"bytes": png("red"), "path": None}] if images is None else images} | {
        "problem": problem,
        "answer": answer,
    }


def write(path: Path, *rows: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.Table.from_pylist(
            list(rows),
            schema=pa.schema(
                {"images": geo3k.IMAGES, "problem": pa.string(), "answer": pa.string()}
            ),
        ),
        path,
    )


def prepare(source: Path, out: Path) -> dict[str, list[dict]]:
    geo3k.main(geo3k.Args(out=out, source=str(source)))
    return {path.stem: pq.read_table(path).to_pylist() for path in out.iterdir()}


def test_prepare_row(tmp_path):
    images = [{"bytes": png("red"), "path": "a.png"}, {"bytes": png("blue"), "path": None}]
    row = published("<image>Find x <image> there.", r"2 \sqrt { 221 }", images)
    write(tmp_path / "data" / "train-00000-of-00001.parquet", published())
    write(tmp_path / "data" / "test-00000-of-00001.parquet", published(), row)
    rows = prepare(tmp_path, tmp_path / "out")
    assert set(rows) == {"train", "test"}  # validation.parquet is optional
    assert rows["test"][1] == {
        "data_source": "hiyouga/geometry3k",
        "prompt": [
            {
                "role": "user",
                "content": "<image>Find x <image> there. You FIRST think about the reasoning "
                "process as an internal "
                "monologue and then provide the final answer. The reasoning process MUST BE "
                "enclosed within <think> "
                "</think> tags. The final answer MUST BE put in \\boxed{}.",
            }
        ],
        "images": images,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": r"2 \sqrt { 221 }"},
        "extra_info": {
            "split": "test",
            "index": 1,
            "answer": r"2 \sqrt { 221 }",
            "question": "<image>Find x <image> there.",
        },
    }
    with Image.open(io.BytesIO(rows["test"][1]["images"][1]["bytes"])) as image:
        assert (image.size, image.getpixel((0, 0))) == ((40, 30), (0, 0, 255))


@pytest.mark.parametrize(
    "images, why",
    [
        (["a.png"], "'str' object"),
        ([{"path": "a.png"}], "without its bytes"),
        ([b"P"], "'bytes' object"),
    ],
)
def test_prepare_names_a_row_of_another_layout(tmp_path, images, why):
    row = {"images": images, "problem": "<image>Find x.", "answer": "65"}
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / f"{split}.parquet")
    with pytest.raises(ValueError, match=rf"train.parquet row 0: .*{why}"):
        prepare(tmp_path, tmp_path / "out")


def test_prepare_reads_numbers_as_answers(tmp_path):
    rows = pa.Table.from_pylist([published(answer=65)])
    for split in ("train", "test"):
        pq.write_table(rows, tmp_path / f"{split}.parquet")
    (row,) = prepare(tmp_path, tmp_path / "out")["train"]
    assert row["reward_model"]["ground_truth"] == row["extra_info"]["answer"] == "65"


def test_prepare_schema_is_verls(tmp_path):
    for split in ("train", "test"):
        write(tmp_path / f"{split}.parquet", published())
    prepare(tmp_path, tmp_path / "out")
    schema = pq.read_schema(tmp_path / "out" / "train.parquet")
    assert schema.names == [
        "data_source",
        "prompt",
        "images",
        "ability",
        "reward_model",
        "extra_info",
    ]
    assert schema.field("images").type == pa.list_(
        pa.struct({"bytes": pa.binary(), "path": pa.string()})
    )


def test_prepare_several_files_and_validation(tmp_path):
    for i in range(2):
        write(tmp_path / f"train-0000{i}-of-00002.parquet", published(answer=str(10 + i)))
    for split in ("validation", "test"):
        write(tmp_path / f"{split}.parquet", published())
    rows = prepare(tmp_path, tmp_path / "out")
    assert [(row["extra_info"]["index"], row["extra_info"]["answer"]) for row in rows["train"]] == [
        (0, "10"),
        (1, "11"),
    ]
    assert rows["validation"][0]["extra_info"]["split"] == "validation" and len(rows) == 3


@pytest.mark.parametrize(
    "row, words",
    [
        (published("Find x."), "0 times <image> in the problem, but 1 images"),
        (published("<image><image>Find x."), "2 times <image> in the problem, but 1 images"),
        (published(images=[]), "1 times <image> in the problem, but 0 images"),
        (published(images=[{"bytes": None, "path": "a.png"}]), "an image without its bytes"),
        (published(images=[None]), "an image without its bytes"),
        (published(answer=""), "no answer of 1 to 512 characters"),
        (published(answer=None), "no answer of 1 to 512 characters"),
        (published(problem=None), "0 times <image>"),
    ],
)
def test_prepare_names_the_bad_row(tmp_path, row, words):
    write(tmp_path / "train.parquet", published(), published())
    write(tmp_path / "test.parquet", published(), row)
    with pytest.raises(ValueError, match=rf"test\.parquet row 1: .*{words}"):
        prepare(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_prepare_bad_files(tmp_path):
    write(tmp_path / "train.parquet", published())
    with pytest.raises(FileNotFoundError, match=r"--source .*test\*\.parquet"):
        prepare(tmp_path, tmp_path / "out")
    pq.write_table(pa.table({"problem": ["p"], "choices": ["c"]}), tmp_path / "test.parquet")
    with pytest.raises(
        ValueError,
        match=r"test\.parquet row 0: lacks answer, images; it has the columns problem, choices",
    ):
        prepare(tmp_path, tmp_path / "out")


def test_prepare_from_hub(tmp_path, monkeypatch):
    for split in ("train", "test"):
        write(tmp_path / "hub" / "data" / f"{split}-00000-of-00001.parquet", published())
    asked = []
    monkeypatch.setattr(
        geo3k, "snapshot_download", lambda *a, **k: asked.append((a, k)) or tmp_path / "hub"
    )
    geo3k.main(geo3k.Args(out=tmp_path / "out"))
    assert asked == [
        (("hiyouga/geometry3k",), {"repo_type": "dataset", "allow_patterns": "*.parquet"})
    ]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "test.parquet",
        "train.parquet",
    ]


def test_prepare_offline_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConnectionError, match=r"HF_ENDPOINT(.|\n)*--source FOLDER"):
        geo3k.main(geo3k.Args(out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_prompts_ask_for_the_format_that_is_rewarded():
    assert all(mark in geo3k.INSTRUCTION for mark in geometry.FORMAT)

"""prepare.geo3k: Geometry3K as it is published becomes rows; bad rows and files are named."""

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from common.prepare import geo3k
from common.rewards import geometry


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


@pytest.mark.parametrize("answer", [65, 0])
def test_prepare_reads_numbers_as_answers(tmp_path, answer):
    rows = pa.Table.from_pylist([published(answer=answer)])
    for split in ("train", "test"):
        pq.write_table(rows, tmp_path / f"{split}.parquet")
    (row,) = prepare(tmp_path, tmp_path / "out")["train"]
    assert row["reward_model"]["ground_truth"] == row["extra_info"]["answer"] == str(answer)


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
        (published("<image>"), "no text in the problem"),
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
    write(tmp_path / "test.parquet")
    with pytest.raises(ValueError, match=r"--source .*: the split test has no rows"):
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

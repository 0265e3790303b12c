"""Pixel Reasoner's published rows as prompts: images, videos, several answers, moved folders, bad
rows."""

import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import prompts_of
from vl import SMALL, build_tokenizer, picture, write_tiny_vl

from common.data.prompts import PromptData
from common.data.visual_qa import WITH_TOOLS, WITHOUT_TOOLS
from common.rewards import reward_function, score_response
from common.tools import load_tools
from common.vision import load_vision

QUESTION = "What is shown?\nA. <image> cat\nB. dog"


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    return load_vision(str(write_tiny_vl(tmp_path_factory.mktemp("model"))), SMALL)


@pytest.fixture
def folder(tmp_path):
    for name in (
        "images/q1-0.jpg",
        "images/q1-1.jpg",
        "videos/a/0.jpg",
        "videos/a/1.jpg",
        "videos/a/2.jpg",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(picture(90, 60, hash(name) % 100, format_="JPEG"))
    return tmp_path


def write(folder, name: str = "release.parquet", **changes):
    images = [
        ["images/q1-0.jpg", "", "images/q1-1.jpg"],
        ["videos/a/0.jpg", "videos/a/1.jpg", "videos/a/2.jpg"],
        [],
    ]
    columns = {
        "question": [QUESTION, "Which comes first?", "1 + 1?"],
        "answer": [["\\boxed{B}"], ["left", "the left one"], ["2"]],
        "qid": ["vstar-17", "mvbench-order-3", "text"],
        "image": images,
        "is_video": [None, True, False],
    }
    pq.write_table(pa.table(columns | changes), folder / name)
    return str(folder / name)


def load(path, vision, folder, tools: str = "visual", **options) -> PromptData:
    shared = {"max_prompt_tokens": 10_000, "vision": vision, "media_root": folder}
    return prompts_of(
        path, tokenizer=build_tokenizer(), tools=load_tools(tools), **shared, **options
    )


def test_published_rows(vision, folder):
    data = load(write(folder), vision, folder)
    assert data.sources == {"visual_qa/mvbench", "visual_qa/release", "visual_qa/vstar"}
    images, video, text = (data[i] for i in range(3))
    assert images.prompt == [
        {"role": "user", "content": "<image><image>" + QUESTION.replace("<image>", "") + WITH_TOOLS}
    ]
    assert [m.kind for m in images.media] == ["image", "image"] and images.ground_truth == [
        "\\boxed{B}"
    ]
    assert [(m.kind, len(m.frames)) for m in video.media] == [("video", 3)]
    assert (
        video.ground_truth == ["left", "the left one"]
        and video.extra_info["qid"] == "mvbench-order-3"
    )
    assert text.media == [] and list(text.tools) == ["crop_image_normalized", "select_frames"]


@pytest.mark.parametrize("suffix, place", [("jsonl", "line 4"), ("json", "row 2")])
def test_published_rows_as_json(vision, folder, suffix, place):
    """Named as those of parquet are; a row that is none keeps its number."""
    records = pq.read_table(path := write(folder)).to_pylist()
    as_parquet = load(path, vision, folder)
    lines = [*map(json.dumps, records[:2]), '{"question": 5}', json.dumps(records[2])]
    text = "\n" + "\n".join(lines) if suffix == "jsonl" else f"[{','.join(lines)}]"
    (folder / f"release.{suffix}").write_text(text)
    with pytest.raises(
        ValueError, match=f"1 unusable rows(.|\n)*{suffix} {place}: data_source is None"
    ):
        load(str(folder / f"release.{suffix}"), vision, folder)
    rows = load(str(folder / f"release.{suffix}"), vision, folder, bad_rows="drop")
    for i in range(3):
        ours, theirs = rows[i], as_parquet[i]
        assert (ours.prompt, ours.ground_truth, ours.data_source) == (
            theirs.prompt,
            theirs.ground_truth,
            theirs.data_source,
        )
        assert len(ours.media) == len(theirs.media)


def test_the_guideline_speaks_of_tools_only_where_there_are_some(vision, folder):
    row = load(write(folder), vision, folder, tools="")[1]
    assert row.prompt[0]["content"] == "<video>Which comes first?" + WITHOUT_TOOLS and not row.tools


def test_an_answer_may_be_a_string_and_is_video_may_be_missing(vision, folder):
    path = write(folder, answer=["B", "left", "2"])
    table = pq.read_table(path).drop_columns(["is_video"])
    pq.write_table(table, path)
    rows = load(path, vision, folder)
    assert rows[0].ground_truth == ["B"] and [m.kind for m in rows[1].media] == ["image"] * 3


def test_cells_that_are_no_texts(vision, folder):
    """As pandas and CSV leave them: NaN is no question and no video, "False" no video, either."""
    records = pq.read_table(write(folder)).to_pylist()
    records[0]["is_video"] = math.nan
    records[1] |= {"is_video": "False", "qid": 17}
    records[2]["question"] = math.nan
    (folder / "release.jsonl").write_text("\n".join(map(json.dumps, records)))
    rows = load(str(folder / "release.jsonl"), vision, folder, bad_rows="drop")
    assert [[m.kind for m in row.media] for row in (rows[0], rows[1])] == [
        ["image"] * 2,
        ["image"] * 3,
    ]
    assert len(rows) == 2 and rows[1].extra_info["qid"] == "17"


def test_folders_that_pixel_reasoners_script_has_moved(vision, folder):
    (folder / "images").rename(folder / "release_images")
    (folder / "videos").rename(folder / "release_videos")
    assert [
        len(row.media) for row in map(load(write(folder), vision, folder).__getitem__, range(3))
    ] == [2, 1, 0]
    alone = {
        "image": ["images/q1-0.jpg", "images/q1-1.jpg", ""],
        "is_video": [False] * 3,
    }  # no lists
    rows = map(load(write(folder, **alone), vision, folder).__getitem__, range(3))
    assert [len(row.media) for row in rows] == [1, 1, 0]


def test_moved_folders_of_one_file_beside_the_pictures_of_another(vision, folder, tmp_path):
    """bench/vstar_images/ is vstar's, whatever --media-root holds; two candidates in one folder are
    refused."""
    bench = folder / "bench"
    (bench / "vstar_images").mkdir(parents=True)
    (bench / "vstar_images/q1-0.jpg").write_bytes(picture(120, 60))
    one = {name: [values[0]] for name, values in pq.read_table(write(folder)).to_pydict().items()}
    one["image"] = [["images/q1-0.jpg"]]
    pq.write_table(pa.table(one), bench / "vstar.parquet")
    row = load(str(bench / "vstar.parquet"), vision, folder)[0]
    assert row.media[0].pixels.shape[2:0:-1] == (112, 56)
    (bench / "images").symlink_to(folder / "images")
    with pytest.raises(ValueError, match=r"bench/images/\S+ and \S+/bench/vstar_images/\S+ differ"):
        load(str(bench / "vstar.parquet"), vision, folder)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"question": [QUESTION, None, "?"]}, "row 1: prompt is None"),
        ({"answer": [["B"], [], ["2"]]}, "row 1: reward_model.ground_truth is missing"),
        ({"image": [["images/none.jpg"], [], []]}, "row 0: cannot open .*none.jpg"),
        ({"image": [{"bytes": b"x", "path": "x.jpg"}, None, None]}, "row 0: prompt is None"),
    ],
)
def test_bad_rows_are_named(vision, folder, changes, reason):
    with pytest.raises(ValueError, match=reason):
        load(write(folder, **changes), vision, folder)
    assert len(load(write(folder, **changes), vision, folder, bad_rows="drop")) == 2


def test_rows_are_scored_by_the_rule(vision, folder):
    row = load(write(folder), vision, folder)[0]
    for said, score in (("\\boxed{B. dog}", 1.0), ("\\boxed{A}", 0.0), ("no box", 0.0)):
        result = score_response(
            reward_function(row.data_source), row.data_source, said, row.ground_truth
        )
        assert result["score"] == result["acc"] == score

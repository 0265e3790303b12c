"""PyVision-RL's rows: papers.pyvision.rows, and what the policy and its interpreter get of them."""

import json
import re
import sys
import weakref
from copy import deepcopy

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import prompts_of, run_script
from PIL import Image
from vl import QWEN_VL, picture, write_tiny_vl

from common.data.prompts import PromptData
from common.data.verl import ignored_request, row_tools
from common.pictures import PixelLimits
from common.types import Tool
from common.vision import load_vision
from papers.pyvision.prompts import OWN
from papers.pyvision.rows import Args, main

PYTHON = {
    "python": Tool(
        "python", exec, {"type": "function", "function": {"name": "python", "parameters": {}}}
    )
}
ASKED = "What is it?"


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    return load_vision(
        str(write_tiny_vl(tmp_path_factory.mktemp("tiny-vl"))), PixelLimits(784, 48 * 784, 784)
    )


@pytest.fixture
def media(tmp_path):
    """a.png and the frames of a video, beside a file that is no picture."""
    for name, size in {"a.png": (100, 60), "0.png": (50, 40), "1.png": (50, 40)}.items():
        (tmp_path / name).write_bytes(picture(*size))
    (tmp_path / "bad.png").write_bytes(picture(100, 60)[:500])
    return tmp_path


def published(env_name: str = "pyvision_gym_w_image_hint", **changes) -> dict:
    """A row of the release, as its loader wants it; the wording is shortened."""
    name = "image_hint_0" if "wo" in env_name else "image_clue_0"
    mark = "<image>\n" * (name == "image_clue_0")
    content = (
        f"{mark}Use {name}.\n*image resolution:*\nImage Width: 100; Image Height: 60\n"
        f"*user question:*\n{ASKED}\nGo."
    )
    return {
        "prompt": [{"role": "user", "content": content}],
        "data_source": "deepeyes",
        "ability": "visual_search",
        "env_name": env_name,
        "reward_model": {"ground_truth": "a dog", "style": "model"},
        "extra_info": {"answer": "a dog", "index": 7, "question": ASKED, "split": "train"},
        "mm_hint": {"hint_path": "a.png", "hint_type": "image"},
    } | changes


def short(**changes) -> dict:
    known = {
        "id": "a12",
        "question": ASKED,
        "answer": "a dog",
        "ability": "vqa",
        "data_source": "vstar",
    }
    return known | {"image_path": "a.png"} | changes


def prepare(folder, rows, **options) -> list[dict]:
    """What is written of rows of JSON."""
    source = folder / "rows.json"
    out = folder / "out.parquet"
    source.write_text(json.dumps(rows))
    main(Args(str(source), out, **({"media_root": folder} | options)))
    return pq.read_table(out).to_pylist()


def load(folder, vision, **options) -> PromptData:
    tokenizer = vision.processor.tokenizer
    tokenizer.chat_template = QWEN_VL
    options = {"tools": PYTHON, "max_prompt_tokens": 4000, "media_root": folder} | options
    return prompts_of(
        str(folder / options.pop("file", "out.parquet")),
        tokenizer=tokenizer,
        vision=vision,
        **options,
    )


# --- where pictures go ----------------------------------------------------------------------------


def test_the_first_version_and_the_release_become_the_same_row(media, vision):
    """One with the picture's bytes in a parquet, one with its path in JSON; policy and interpreter
    get the file's."""
    (released,) = prepare(media, [published()])
    data = (media / "a.png").read_bytes()
    old = {k: v for k, v in published("pyvision_gym").items() if k != "mm_hint"} | {
        "image": {"bytes": data, "path": None}
    }
    pq.write_table(pa.Table.from_pylist([old]), media / "old.parquet")
    main(Args(str(media / "old.parquet"), media / "out.parquet"))
    (first,) = pq.read_table(media / "out.parquet").to_pylist()
    assert first == released
    assert first["images"] == [{"bytes": data, "path": None}]
    assert first["agent_name"] == "tool_agent"
    assert first["prompt"][0]["content"].startswith(
        "<image_clue_0><image></image_clue_0>\nUse image_clue_0.\n"
    )
    row = load(media, vision, media_root=None)[0]
    assert not row.problem
    assert row.tools == {"python": {}}
    assert [m.frames for m in row.media] == [[data]]
    assert row.extra_info["question"] == ASKED and row.ground_truth == "a dog"


def test_tags_count_the_pictures_whatever_the_row_says(media):
    """The release puts number 0 around every picture."""
    content = "<image_clue_0><image></image_clue_0> and <image>, " + ASKED
    row = published(
        "pyvision_gym", prompt=[{"role": "user", "content": content}], images=["a.png", "0.png"]
    )
    (row,) = prepare(media, [row])
    tags = "<image_clue_0><image></image_clue_0> and <image_clue_1><image></image_clue_1>, "
    assert row["prompt"][0]["content"] == tags + ASKED
    assert len(row["images"]) == 2


def test_a_row_without_an_environment_has_one_turn(media, vision):
    for env in ("", None):
        prepare(media, [published("pyvision_gym") | {"env_name": env}])
        assert load(media, vision)[0].tools == {}


def test_pictures_that_the_prompt_does_not_show_go_to_the_interpreter(media, vision):
    """Also beside rows of other kinds, whose columns Arrow fills with nulls."""
    video = {"video_path": ["0.png", "1.png"], "image_path": None, "fps": 2}
    rows = [published(), published("pyvision_gym_wo_image_hint"), short(**video)]
    prepare(media, rows)
    read = {name: (media / name).read_bytes() for name in ("a.png", "0.png", "1.png")}
    data = load(media, vision)
    assert [len(data[i].media) for i in range(3)] == [1, 0, 0]
    assert data[0].tools == {"python": {}}
    assert data[1].tools == {
        "python": {"image_hint_0": {"kind": "image", "frames": [read["a.png"]]}}
    }
    frames = [read["0.png"], read["1.png"]]
    assert data[2].tools == {
        "python": {"video_clue_0": {"kind": "video", "frames": frames, "fps": 2.0}}
    }
    assert row_tools(data.file_row(0), PYTHON) == {"python": {}}
    text = vision.processor.tokenizer.decode(data[2].prompt_ids)
    assert "Frame Width: 50; Frame Height: 40;\nVideo Length: 2; Sample FPS: 2.00" in text
    assert "<|video_pad|>" not in text
    with pytest.raises(ValueError, match="tools_kwargs names python, which --tools does not offer"):
        load(media, vision, tools={"other": PYTHON["python"]})
    assert "no --tools are given" in ignored_request(data.file_row(1), {}, "none")


@pytest.mark.parametrize("file", ["out.parquet", "rows.json"])
def test_a_row_can_be_read_again(media, vision, file):
    """Unchanged, whatever was done to what was read before; nothing of that is kept."""
    prepare(media, [published(), published("pyvision_gym_wo_image_hint")])
    data = load(media, vision, file=file)

    def contents(row) -> list:
        return [
            row.prompt,
            row.prompt_ids,
            row.tools,
            row.extra_info,
            [m.pixels.tolist() for m in row.media],
        ]

    for i in range(2):
        record = deepcopy(data.file_row(i))
        row = data[i]
        expected = deepcopy(contents(row))
        for part in (row.prompt, row.prompt_ids, row.tools["python"], row.extra_info, row.media):
            part.clear()
        data.file_row(i)["extra_info"].clear()
        assert contents(data[i]) == expected != contents(row)
        assert data.file_row(i) == record
    (shown,) = data[0].media
    (again,) = data[0].media
    assert shown is not again
    held = weakref.ref(shown)
    del shown
    assert held() is None


def test_the_same_rows_are_read_directly(media, vision):
    """As published, without being prepared: the file in mm_hint goes where the prompt does not show
    it."""
    rows = [published(), published("pyvision_gym_wo_image_hint")]
    hints = [
        {"hint_path": "clip.mp4", "hint_type": "video"},
        {"hint_path": ["0.png"], "hint_type": "video"},
    ]
    rows += [published("pyvision_gym_wo_video_hint", mm_hint=hint) for hint in hints]
    (media / "clip.mp4").write_bytes(b"any")
    (media / "rows.json").write_text(json.dumps(rows))
    data = load(media, vision, file="rows.json")
    given = [data[i].tools["python"] for i in range(4)]
    frame = (media / "0.png").read_bytes()
    png = (media / "a.png").read_bytes()
    assert given[:2] == [{}, {"image_hint_0": {"kind": "image", "frames": [png]}}]
    assert len(data[0].media) == 1
    assert given[2] == {"video_clue_0": {"kind": "file", "frames": [b"any"]}}
    assert given[3] == {"video_clue_0": {"kind": "video", "frames": [frame]}}
    assert "no --tools are given" in ignored_request(rows[1], {}, "none")
    assert not ignored_request(rows[0], {}, "none")
    rows[1]["mm_hint"]["hint_path"] = "gone.png"
    (media / "rows.json").write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=r"(?s)1 unusable rows.*row 1: cannot open .*gone\.png"):
        load(media, vision, file="rows.json")
    rows[1]["mm_hint"]["hint_path"] = "../x.png"
    (media / "rows.json").write_text(json.dumps(rows))
    with pytest.raises(ValueError, match="leads out of --media-root"):
        load(media, vision, file="rows.json")


def test_a_file_that_goes_away_during_a_run_costs_its_rows_alone(media, vision, capsys):
    prepare(media, [published(), short(video_path=["0.png"], image_path=None)])
    data = load(media, vision)
    (media / "0.png").unlink()
    assert data[1].problem and not data[1].prompt_ids and "left out" in capsys.readouterr().out
    assert not data[0].problem


# --- prompts --------------------------------------------------------------------------------------


def test_our_prompt_teaches_the_protocol_and_tells_the_size_of_the_file(media):
    """The native one, upright; the question may have braces and control words of its own."""
    turned = Image.open(media / "a.png").convert("RGB")
    turned.save(
        media / "turned.jpg",
        exif=b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x01\x01\x12\x00\x03\x00\x00\x00\x01\x00\x06\x00\x00\x00\x00\x00\x00",
    )
    asked = r"Which of {facts}, \1, {0} or Image Width: 1; Image Height: 1?"
    shown, sideways = prepare(
        media, [short(question=f"<image>\n{asked}"), short(image_path="turned.jpg")]
    )
    text = shown["prompt"][0]["content"]
    assert text.startswith("<image_clue_0><image></image_clue_0>\n") and text.count(asked) == 1
    assert "\nImage Width: 100; Image Height: 60\n" in text
    assert "\nImage Width: 60; Image Height: 100\n" in sideways["prompt"][0]["content"]
    for mode, wording in OWN.items():
        text = wording.before + wording.after
        assert re.search(r"<code>\n```python\n.*plt\.show\(\)\n```\n</code>", text, re.DOTALL)
        assert "<answer>\n\\boxed{the answer}\n</answer>" in text
        assert "{" not in text.replace("\\boxed{", "")
        names = {"shown": "image_clue_0", "hidden": "image_hint_0", "video": "video_clue_0"}
        assert names[mode] in text
    assert shown["extra_info"]["question"] == asked and shown["extra_info"]["id"] == "a12"
    hidden = prepare(media, [short()], show_images=False)[0]
    assert "image_hint_0" in hidden["prompt"][0]["content"] and not hidden["images"]


def test_the_wording_of_a_published_row(media):
    like = media / "train.json"
    unclear = published(
        prompt=[{"role": "user", "content": f"Image Width: 1; Image Height: 2 {ASKED} {ASKED}"}]
    )
    like.write_text(json.dumps([unclear, published(), published("pyvision_gym_wo_image_hint")]))
    (row,) = prepare(media, [short(image_path="0.png", question="Where?")], like=str(like))
    wanted = published()["prompt"][0]["content"].replace(
        "100; Image Height: 60", "50; Image Height: 40"
    )
    wanted = wanted.replace(ASKED, "Where?").replace(
        "<image>", "<image_clue_0><image></image_clue_0>"
    )
    assert row["prompt"] == [{"role": "user", "content": wanted}]
    (row,) = prepare(media, [short()], like=str(like), show_images=False)
    assert row["prompt"] == published("pyvision_gym_wo_image_hint")["prompt"]
    with pytest.raises(
        ValueError, match="--like has no row with the env_name pyvision_gym_wo_video_hint"
    ):
        prepare(media, [short(video_path=["0.png"], image_path=None)], like=str(like))
    strange = [
        published() | change
        for change in ({"prompt": ["x"]}, {"env_name": ["x"]}, {"extra_info": [1]})
    ]
    like.write_text(json.dumps([unclear, "no row", *strange]))
    with pytest.raises(ValueError, match=r"--like .*train\.json: no row"):
        prepare(media, [short()], like=str(like))


# --- bad rows -------------------------------------------------------------------------------------


BAD = {
    "no picture": (
        published(mm_hint={"hint_path": "gone.png", "hint_type": "image"}),
        "cannot open",
    ),
    "half a picture": (short(image_path="bad.png"), "unreadable image"),
    "outside": (short(image_path="../a.png"), "leads out of --media-root"),
    "no file": (short(image_path="."), "is no regular file"),
    "a number for a path": (short(image_path=7), "neither bytes, nor a path"),
    "NUL in a path": (short(image_path="a\0.png"), "cannot open"),
    "another environment": (
        published("visual_toolbox_v2"),
        "env_name 'visual_toolbox_v2': known are",
    ),
    "two marks": (
        published(prompt=[{"role": "user", "content": "<image><image>?"}]),
        "stands 2 times",
    ),
    "no mark": (
        published(prompt=[{"role": "user", "content": "?"}]),
        "its image is not in the prompt",
    ),
    "no truth": (published(reward_model={"style": "model"}), "the answer is None"),
    "NaN": (short(answer=float("nan")), "the answer is nan"),
    "a list for an answer": (short(answer=["a"]), "the answer is ['a']"),
    "no question": (
        published(extra_info={"index": 1}),
        "extra_info.question, which a judge reads, is None",
    ),
    "prompt is a text": (published(prompt="rendered"), "malformed: TypeError"),
    "no role": (published(prompt=[{"content": "<image>?"}]), "malformed: KeyError: 'role'"),
    "no columns": ({"text": "?"}, "has the columns text; expected prompt, or question"),
    "image and video": (
        short(video_path="0.mp4"),
        "expected prompt, or question and image_path or video_path",
    ),
    "half a surrogate pair": (short(question="\ud800"), "a text that is no Unicode"),
    "too many frames a second": (
        short(video_path=["0.png"], image_path=None, fps=10**400),
        "OverflowError",
    ),
    "frames a second": (short(video_path=["0.png"], image_path=None, fps=-1), "fps is -1"),
    "no frames": (short(video_path=[{}], image_path=None), "neither bytes, nor a path"),
    "a list": ([1], "a JSON list, expected an object"),
    "data_source": (short(data_source=None), "data_source is None, expected text"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_told_by_file_row_and_reason(media, name, capsys):
    row, why = BAD[name]
    with pytest.raises(
        ValueError, match=r"(?s)1 unusable rows.*rows\.json row 1: .*" + re.escape(why)
    ):
        prepare(media, [short(), row, short()])
    assert not (media / "out.parquet").exists() and not list(media.glob(".*tmp"))
    rows = prepare(media, [short(), row, short()], bad_rows="drop")
    assert [row["extra_info"]["index"] for row in rows] == [0, 2], "the others keep their places"
    assert "warning: --source: 1 unusable rows (dropped)" in capsys.readouterr().out
    with pytest.raises(ValueError, match="not one usable row"):
        prepare(media, [row], bad_rows="drop")


def test_what_was_written_is_no_cache(media):
    """The release takes rows that it converted once for those of a file that has changed since, and
    by their name."""
    first = prepare(media, [short(answer="a dog")])
    second = prepare(media, [short(answer="a cat"), short(id=3)])
    assert first[0]["reward_model"]["ground_truth"] == "a dog" and len(second) == 2
    assert second[0]["reward_model"]["ground_truth"] == "a cat"


def test_numbers_are_answers(media):
    rows = prepare(media, [short(answer=answer) for answer in (3, 2.5, "-4")])
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["3", "2.5", "-4"]


# --- videos ---------------------------------------------------------------------------------------


def write_video(path, frames: int = 10) -> None:
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width = 64
        stream.height = 48
        stream.pix_fmt = "yuv420p"
        for i in range(frames):
            frame = av.VideoFrame.from_ndarray(
                np.full((48, 64, 3), i * 20, np.uint8), format="rgb24"
            )
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def test_the_facts_of_a_video_file(media, vision):
    pytest.importorskip("av")
    write_video(media / "clip.mp4")
    prepare(media, [short(video_path="clip.mp4", image_path=None)])
    data = load(media, vision)
    assert (
        "Frame Width: 64; Frame Height: 48;\nVideo Length: 10; Sample FPS: 25.00"
        in data.file_row(0)["prompt"][0]["content"]
    )
    video = {"kind": "file", "frames": [(media / "clip.mp4").read_bytes()], "fps": 25.0}
    assert data[0].tools == {"python": {"video_clue_0": video}}


def test_a_playlist_is_no_video(media):
    """ffmpeg would open the files and hosts that it names."""
    pytest.importorskip("av")
    write_video(media / "clip.mp4")
    (media / "list.mp4").write_text(f"#EXTM3U\n#EXTINF:1,\n{media}/clip.mp4\n#EXT-X-ENDLIST\n")
    (media / "cat.mp4").write_text(f"ffconcat version 1.0\nfile {media}/clip.mp4\n")
    (media / "empty.mp4").touch()
    for name in ("list.mp4", "cat.mp4", "a.png", "empty.mp4"):
        with pytest.raises(ValueError, match=f"{name} is no video that can be read"):
            prepare(media, [short(video_path=name, image_path=None)])


def test_a_video_file_without_a_decoder_names_the_package(media, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    (media / "clip.mp4").touch()
    with pytest.raises(
        SystemExit,
        match=r"clip\.mp4: a video file needs PyAV: pip install av \(see requirements\.txt\)",
    ):
        prepare(media, [short(video_path="clip.mp4", image_path=None)])


@pytest.mark.slow
def test_from_the_command_line(media):
    (media / "rows.json").write_text(json.dumps([published(), {}]))
    command = ["-m", "papers.pyvision.rows", "--source", media / "rows.json", "--media-root", media]
    command += ["--out", media / "out/train.parquet"]
    failed = run_script(*command, check=False, fresh=True)
    assert failed.returncode == 1
    assert "--bad-rows drop drops them" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert "1 rows" in run_script(*command, "--bad-rows", "drop", fresh=True).stdout

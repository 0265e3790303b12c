"""Rows with pictures: what their tokens are, which of them are refused at start-up, which are left
out later."""

import io
import itertools
import json
import os
import random
import struct
import threading
import zlib
from contextlib import nullcontext

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import deadline, gathering, prompts_of
from PIL import Image
from vl import QWEN_VL, picture, write_tiny_vl

from common.data import render
from common.data.media import count_tokens, open_media
from common.data.verl import ignored_request
from common.distributed import World
from common.pictures import BadRow, Media, PixelLimits
from common.processes import in_threads
from common.tools import call_tool, load_tools
from common.types import Tool
from common.vision import load_vision

LIMITS = PixelLimits(784, 48 * 784, 8 * 784)


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    return load_vision(str(write_tiny_vl(tmp_path_factory.mktemp("tiny-vl"))), LIMITS)


def load(tmp_path, vision, rows, **options):
    records = [
        {
            "data_source": "hiyouga/geometry3k",
            "reward_model": {"style": "rule", "ground_truth": "1"},
            "images": [],
        }
        | row
        for row in rows
    ]
    path = tmp_path / "rows.jsonl"
    encode = {"default": lambda data: {"bytes": None} if data is None else data.hex()}
    path.write_text("".join(json.dumps(record, **encode) + "\n" for record in records))
    tokenizer = vision.processor.tokenizer
    tokenizer.chat_template = QWEN_VL
    options = {"max_prompt_tokens": 400, "media_root": tmp_path} | options
    return prompts_of(str(path), tokenizer=tokenizer, vision=vision, **options)


def ask(text: str) -> dict:
    return {"prompt": [{"role": "user", "content": text}]}


def saved(tmp_path, name: str, data: bytes) -> str:
    (tmp_path / name).write_bytes(data)
    return name


def count(ids: list[int], token: int) -> int:
    return sum(i == token for i in ids)


ADDRESSES = itertools.count(2**20)


@pytest.mark.parametrize("reason", ["as it is", "with an address"])
def test_machines_agree_on_a_picture_that_none_can_read(
    tmp_path, vision, monkeypatch, capsys, reason
):
    """Held as bytes: what a library says of it may name a place in memory, and does not decide what
    is usable."""
    rows = [
        ask("<image>") | {"images": [{"bytes": data}]}
        for data in (picture(56, 56), b"no picture", b"")
    ]
    common = {
        "data_source": "hiyouga/geometry3k",
        "reward_model": {"style": "rule", "ground_truth": "1"},
    }
    pq.write_table(pa.Table.from_pylist([row | common for row in rows]), tmp_path / "rows.parquet")
    if reason == "with an address":
        monkeypatch.setattr(render, "clean_prompt", lambda prompt: refuse_by_address())
    monkeypatch.setattr("common.data.scan.gather_objects", gathering(lambda: rank, 2))
    found = {}
    for rank in range(2):
        options = {"world": World(rank, 2, 0, torch.device("cpu")), "bad_rows": "drop"}
        with (
            pytest.raises(ValueError, match="no usable row")
            if reason != "as it is"
            else nullcontext()
        ):
            found[rank] = prompts_of(
                str(tmp_path / "rows.parquet"),
                tokenizer=vision.processor.tokenizer,
                vision=vision,
                max_prompt_tokens=400,
                **options,
            ).usable.tolist()
    assert found == ({0: [0], 1: [0]} if reason == "as it is" else {})
    assert ("0x" in capsys.readouterr().out) == (reason != "as it is")


def refuse_by_address():
    raise BadRow(f"cannot read <object at {next(ADDRESSES):#x}>")


def test_tokens_in_the_ids_equal_features_for_any_size(vision):
    """200 random sizes and shapes and the extremes, through the model's own vision tower for
    some."""
    from common.models import load_model

    rng = random.Random(0)
    sizes = [(1, 1), (5000, 20), (20, 5000), (1, 3000), (27, 29), (28, 28), (4000, 3000)]
    sizes += [(int(10 ** rng.uniform(0, 3.3)), int(10 ** rng.uniform(0, 3.3))) for _ in range(200)]
    text = vision.processor.tokenizer.encode("<|vision_start|><|image_pad|><|vision_end|>")
    tower = load_model(
        vision.processor.tokenizer.name_or_path, "sdpa", vision=vision
    ).model.base_model.visual
    for i, (width, height) in enumerate(sizes):
        file = io.BytesIO()
        Image.new("L", (width, height), i % 256).save(file, "PNG")
        media = Media.open("image", [file.getvalue()], LIMITS)
        ids = vision.expand(text, [media])
        patches, grids = vision.patches([media], torch.device("cpu"))
        tokens = count(ids, vision.placeholders["image"])
        assert tokens == media.num_tokens == int(grids.prod()) // 4 == len(patches) // 4
        assert tokens == count_tokens(("image", [file.getvalue()]), None, vision), (
            "the header tells as much"
        )
        assert 1 <= tokens <= 48 or max(width, height) > 48 * min(width, height)
        assert vision.collapse(ids, [media]) == text
        if i < 20:
            assert len(tower(patches, grid_thw=grids).pooler_output) == tokens


@pytest.mark.parametrize(
    "mode,format_", [("RGBA", "PNG"), ("P", "PNG"), ("CMYK", "JPEG"), ("I;16", "PNG"), ("1", "PNG")]
)
def test_modes(vision, mode, format_):
    file = io.BytesIO()
    if mode == "I;16":
        Image.fromarray(np.arange(3000, dtype=np.uint16).reshape(50, 60) * 20).save(file, format_)
    else:
        Image.open(io.BytesIO(picture(60, 50))).convert(mode).save(file, format_)
    media = Media.open("image", [file.getvalue()], LIMITS)
    assert (
        media.pixels.shape == (1, 56, 56, 3)
        and media.pixels.dtype == np.uint8
        and media.pixels.std() > 0
    )


@pytest.mark.parametrize(
    "mode, format_, most",
    [
        ("I", "TIFF", 6e4),
        ("F", "TIFF", 6e4),
        ("I", "PPM", 6e4),
        ("F", "TIFF", 1),
        ("I", "TIFF", -200),
        ("F", "TIFF", np.nan),
    ],
)
def test_pictures_of_numbers_without_a_white_are_refused(mode, format_, most):
    """They would be cut at 255, a depth map would be white; or all of 0 to 1 would be black."""
    file = io.BytesIO()
    numbers = np.linspace(0, most, 3000, dtype=np.float32).reshape(50, 60)
    Image.fromarray(numbers).convert(mode).save(file, format_)
    with pytest.raises(
        ValueError, match="unreadable image: a picture of 32-bit numbers, not of 0 to 255"
    ):
        Media.open("image", [file.getvalue()], LIMITS)


def test_a_row_is_its_template_with_pictures_in_place(tmp_path, vision):
    one, two = (
        saved(tmp_path, "1.png", picture(100, 60, 1)),
        saved(tmp_path, "2.png", picture(60, 200, 2)),
    )
    data = load(
        tmp_path,
        vision,
        [
            ask("<image>which of <video> and<image>?")
            | {"images": [one, {"path": two}], "videos": [[one, two, one]]}
        ],
    )
    row = data[0]
    assert [m.kind for m in row.media] == ["image", "video", "image"]
    assert row.media[1].pixels.shape[0] == 3 and row.media[1].pixels.shape[1:] == (56, 112, 3)
    tokenizer = vision.processor.tokenizer
    short = tokenizer.decode(vision.collapse(row.prompt_ids, row.media))
    mark = "<|vision_start|><|{}_pad|><|vision_end|>".format
    said = f"{mark('image')}which of {mark('video')} and{mark('image')}?"
    assert short == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        f"{said}<|im_end|>\n<|im_start|>assistant\n"
    )
    for kind, token in vision.placeholders.items():
        assert count(row.prompt_ids, token) == sum(
            m.num_tokens for m in row.media if m.kind == kind
        )


def test_pictures_of_several_rows_are_opened_side_by_side(tmp_path, vision, monkeypatch):
    """Two at once, on two processors; what comes is what comes one by one, in the same order."""
    names = [saved(tmp_path, f"{i}.png", picture(100 + 10 * i, 60, i)) for i in range(6)]
    data = load(tmp_path, vision, [ask("<image>what?") | {"images": [name]} for name in names])
    alone, opened, both = [data[i] for i in range(6)], Media.open, threading.Barrier(2)

    def together(*arguments):
        both.wait(20)
        return opened(*arguments)

    monkeypatch.setattr(Media, "open", together)
    monkeypatch.setattr("common.processes.cpus_of_rank", lambda: 2)
    rows = in_threads(data.__getitem__, range(6))
    assert [row.prompt_ids for row in rows] == [row.prompt_ids for row in alone]
    for row, other in zip(rows, alone):
        assert np.array_equal(row.media[0].pixels, other.media[0].pixels)


def test_parquet_with_bytes_and_rows_without_pictures(tmp_path, vision, capsys):
    rows = [
        ask("<image>?") | {"images": [{"bytes": picture(90, 90), "path": None}]},
        ask("no picture, but the word <image>") | {"images": None},
    ]
    rows = [
        row | {"data_source": "a", "reward_model": {"style": "rule", "ground_truth": "1"}}
        for row in rows
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    options = {"tokenizer": vision.processor.tokenizer, "vision": vision}
    data = prompts_of(str(tmp_path / "rows.parquet"), **options)
    assert [len(data[i].media) for i in (0, 1)] == [1, 0]
    expected = "have <image> or <video>, and no column images, image or videos: read as text"
    assert capsys.readouterr().out == f"--train-data: 1 prompts {expected}\n"
    assert "<image>" in vision.processor.tokenizer.decode(data[1].prompt_ids)


@pytest.mark.parametrize(
    "row,reason",
    [
        (ask("<image>") | {"images": ["missing.png"]}, "cannot open .*missing.png .*--media-root"),
        (ask("<image><image>") | {"images": ["good.png"]}, "1 images, and <image> stands 2 times"),
        (ask("look") | {"images": ["good.png"]}, "1 images, and <image> stands 0 times"),
        (ask("<image>") | {"images": [7]}, "7 is neither bytes, nor a path"),
        (
            ask("<image>") | {"images": [{"image": "good.png"}]},
            "{'image': 'good.png'} is neither bytes, nor a path",
        ),
        (
            ask("<image>" * 17) | {"images": ["good.png"] * 17},
            "17 pictures are more than --max-images 16",
        ),
        (ask("<image>") | {"images": ["rows.jsonl"]}, "no readable picture"),
        (ask("<video>") | {"videos": ["clip.mp4"]}, "a video is given as the list of its frames"),
        (ask("<video>") | {"videos": "clip.mp4"}, "a video is given as the list of its frames"),
        (ask("<video>") | {"videos": 5}, "a video is given as the list of its frames"),
        (ask("<video>") | {"videos": [["good.png", "missing.png"]]}, "cannot open"),
    ],
)
def test_bad_rows_are_told_at_start_up(tmp_path, vision, row, reason):
    saved(tmp_path, "good.png", picture(60, 60))
    assert len(load(tmp_path, vision, [ask("<image>") | {"images": "good.png"}])) == 1, (
        "one may stand without a list"
    )
    with pytest.raises(ValueError, match=rf"(?s)1 unusable rows.*rows.jsonl line 2: .*{reason}"):
        load(tmp_path, vision, [ask("fine"), row])
    assert len(load(tmp_path, vision, [ask("fine"), row], bad_rows="drop")) == 1


def long_picture(width: int) -> bytes:
    """A PNG of width x 1 pixels, RGBA; cut off after the first million."""
    lines = zlib.compress(bytes(1 + 4 * min(width, 10**6)))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, 8, 6, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", lines) + chunk(b"IEND", b"")


def test_a_picture_too_long_for_pillow_costs_its_row(tmp_path, vision):
    saved(tmp_path, "long.png", long_picture(80_000_000))
    for row in (
        ask("<image>") | {"images": ["long.png"]},
        ask("<video>") | {"videos": [["good.png", "long.png"]]},
    ):
        saved(tmp_path, "good.png", picture(60, 60))
        data = load(tmp_path, vision, [ask("fine"), row], bad_rows="drop")
        problem = data[1].problem if len(data) == 2 else "80000000x1 pixels: no side may exceed"
        assert (
            len(data) == 1 + ("videos" in row)
            and "80000000x1 pixels: no side may exceed" in problem
        )


def test_what_ends_in_no_memory_costs_its_row(tmp_path, vision, monkeypatch):
    data = load(
        tmp_path, vision, [ask("<image>") | {"images": [saved(tmp_path, "a.png", picture(60, 60))]}]
    )

    def no_memory(*_):
        raise MemoryError

    monkeypatch.setattr("common.pictures.to_rgb", no_memory)
    assert "not enough memory" in data[0].problem


def test_a_long_picture_of_a_tool_is_an_error_of_the_tool():
    """Found where the tool runs; its worker would count as out of memory, the trainer would end."""
    for image in (Image.new("L", (200_000, 1)), long_picture(200_000)):
        tool = Tool("t", lambda image=image: ("seen", [image]), {"function": {}})
        reply = call_tool(tool, {}, {}, {})
        assert reply["error"] and "200000x1 pixels: no side may exceed" in reply["text"]


def test_paths_that_are_no_files(tmp_path, vision):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    saved(tmp_path, "good.png", picture(60, 60))
    reasons = {
        "nul\0.png": "cannot open .*embedded null byte",
        "x" * 5000: "cannot open .*File name too long",
        "pipe.png": "pipe.png is no regular file",
        "folder.png": "folder.png is no regular file",
    }
    for name, reason in reasons.items():
        for row in (
            ask("<image>") | {"images": [name]},
            ask("<video>") | {"videos": [["good.png", name]]},
        ):
            with (
                deadline(5),
                pytest.raises(ValueError, match=rf"(?s)1 unusable rows.*line 2: .*{reason}"),
            ):
                load(tmp_path, vision, [ask("fine"), row])


def test_pixel_reasoners_rows_with_paths_that_are_no_files(tmp_path, vision):
    for name in ("nul\0.png", "x" * 5000):
        row = {"question": "?", "answer": "a", "qid": "1", "image": [name]}
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist([row]), path)
        with pytest.raises(ValueError, match=r"(?s)1 unusable rows.*cannot open"):
            tokenizer = vision.processor.tokenizer
            prompts_of(str(path), tokenizer=tokenizer, vision=vision, media_root=tmp_path)


def test_no_path_leaves_the_media_root(tmp_path, vision):
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    whole = picture(60, 60)
    saved(outside, "a.png", whole)
    saved(root, "b.png", whole)
    (root / "link.png").symlink_to(outside / "a.png")
    (root / "folder").symlink_to(outside)
    (root / "inside.png").symlink_to("b.png")
    (tmp_path / "alias").symlink_to(root)
    for name in ("../outside/a.png", "link.png", "folder/a.png", str(outside / "a.png")):
        row = ask("<image>") | {"images": [name]}
        with pytest.raises(
            ValueError, match=r"(?s)line 2: .*a.png leads out of --media-root|link.png leads out of"
        ):
            load(tmp_path, vision, [ask("fine"), row], media_root=root)
    allowed = ["b.png", "inside.png", "../root/b.png", str(root / "b.png")]
    rows = [ask("<image>") | {"images": [name]} for name in allowed]
    for media_root in (root, tmp_path / "alias"):
        assert len(load(tmp_path, vision, rows, media_root=media_root)) == len(rows)
    anywhere = [ask("<image>") | {"images": [str(outside / "a.png")]}]
    assert len(load(tmp_path, vision, anywhere, media_root=None)) == 1, (
        "without it paths are taken as they stand"
    )


def asks_of(folder, vision, media_root, *names: str, **options):
    """Rows of `folder`, each with the picture of a name."""
    rows = [ask("<image>") | {"images": [name]} for name in names]
    return load(folder, vision, rows, media_root=media_root, **options)


def test_pictures_are_looked_for_beside_their_data_file_then_under_the_media_root(
    tmp_path, vision, monkeypatch
):
    """What the questions of a benchmark show must not be a picture of the training data that has
    the same name."""
    bench, root = tmp_path / "bench", tmp_path / "train"
    for folder in (bench, root):
        folder.mkdir()
    saved(bench, "own.png", picture(60, 60))
    saved(root, "there.png", picture(90, 60))
    for folder in (bench, root):
        saved(folder, "same.png", picture(120, 60))
    monkeypatch.chdir(tmp_path)
    for media_root in (root, "train"):
        data = asks_of(bench, vision, media_root, "own.png", "there.png", "same.png")
        assert [data[i].media[0].pixels.shape[2] for i in range(3)] == [56, 84, 112]
    assert len(asks_of(bench, vision, None, "own.png")) == 1

    saved(root, "own.png", picture(60, 60, 7))
    reason = "(?s)line 1: .*bench/own.png and .*train/own.png differ.* --media-root"
    with pytest.raises(ValueError, match=reason):
        asks_of(bench, vision, root, "own.png")
    monkeypatch.chdir(root)
    with pytest.raises(ValueError, match=r"bench/own\.png and own\.png differ"):
        asks_of(bench, vision, None, "own.png")
    clip = ask("<video>") | {"videos": [["same.png", "own.png"]]}
    with pytest.raises(ValueError, match=reason):
        load(bench, vision, [clip], media_root=root)
    assert len(asks_of(root, vision, root, "own.png", "there.png")) == 2, "one folder is one place"
    (tmp_path / "alias").symlink_to(root)
    assert len(asks_of(root, vision, tmp_path / "alias", "own.png")) == 1
    saved(bench, "own.png", picture(60, 60, 7))
    data = asks_of(bench, vision, root, "own.png")
    saved(bench, "own.png", picture(60, 60))
    assert "differ, and either may be meant" in data[0].problem, "changed since the start"


def test_with_a_media_root_no_path_leaves_the_folder_of_its_data_file(tmp_path, vision):
    bench, root, outside = tmp_path / "bench", tmp_path / "root", tmp_path / "outside"
    for folder in (bench, root, outside):
        folder.mkdir()
    saved(outside, "a.png", picture(60, 60))
    (bench / "link.png").symlink_to(outside / "a.png")
    for name in ("link.png", "../outside/a.png", str(outside / "a.png")):
        with pytest.raises(ValueError, match=r"line 1: .* leads out of"):
            asks_of(bench, vision, root, name)
        assert len(asks_of(bench, vision, None, name)) == 1
    saved(root, "link.png", picture(60, 60, 7))
    with pytest.raises(ValueError, match="differ, and either may be meant"):
        asks_of(bench, vision, root, "link.png")
    saved(root, "link.png", picture(60, 60))
    assert len(asks_of(bench, vision, root, "link.png")) == 1, "the copy under the root is inside"


def test_pictures_count_in_the_length_of_a_prompt(tmp_path, vision):
    big = saved(tmp_path, "big.png", picture(400, 400))
    row = ask("<image>") | {"images": [big]}
    length = len(load(tmp_path, vision, [row])[0].prompt_ids)
    assert length > 48
    assert len(load(tmp_path, vision, [row], max_prompt_tokens=length)) == 1
    with pytest.raises(
        ValueError, match=f"(?s)longer than --max-prompt-tokens {length - 1}.*{length} tokens"
    ):
        load(tmp_path, vision, [row], max_prompt_tokens=length - 1)


def test_a_file_that_is_truncated_or_gone_later_costs_its_row(tmp_path, vision, capsys):
    whole = picture(300, 300)
    names = [
        saved(tmp_path, "cut.png", whole[: len(whole) // 2]),
        saved(tmp_path, "gone.png", whole),
    ]
    data = load(tmp_path, vision, [ask("<image>") | {"images": [name]} for name in names])
    (tmp_path / "gone.png").unlink()
    for i, reason in enumerate(("unreadable image", "cannot open")):
        row = data[i]
        assert reason in row.problem and row.media == [] and row.prompt_ids == []
        assert reason in capsys.readouterr().out


def test_a_placeholder_written_into_a_prompt_is_a_bad_row(tmp_path, vision):
    """Whoever wrote it, and where: no picture belongs to it, and the row would be lost at every
    use."""
    one = {"images": [saved(tmp_path, "a.png", picture(60, 60))]}
    system = [
        {"role": "system", "content": "<|video_pad|>"},
        {"role": "user", "content": "<image>"},
    ]
    rows = [ask("say <|image_pad|>"), ask("<image> <|image_pad|>") | one, {"prompt": system} | one]
    rows += [
        {"prompt": "<|vision_start|><|image_pad|><|vision_end|>"},
        {"prompt": "rendered, with an <image>"} | one,
    ]
    for row in rows:
        with pytest.raises(
            ValueError, match=r"(?s)1 unusable rows.*line 2: [012] placeholders of pictures"
        ):
            load(tmp_path, vision, [ask("fine"), row])
        assert len(load(tmp_path, vision, [ask("fine"), row], bad_rows="drop")) == 1
    rendered = {"prompt": "<|vision_start|><|image_pad|><|vision_end|> of <image>?"} | one
    (row,) = [load(tmp_path, vision, [rendered])[0]]
    assert not row.problem and len(row.media) == 1, "a rendered prompt brings its own"


def test_the_single_picture_of_pyvisions_rows(tmp_path, vision):
    path = saved(tmp_path, "a.png", picture(60, 60))
    for columns in (
        {"image": path},
        {"image": [path]},
        {"mm_hint": {"hint_path": path, "hint_type": "image"}},
    ):
        assert len(load(tmp_path, vision, [ask("<image>?") | columns])[0].media) == 1, columns
    # for its tools alone
    no_mark = ask("?") | {"mm_hint": {"hint_path": path, "hint_type": "image"}}
    assert load(tmp_path, vision, [no_mark])[0].media == []
    both = ask("<image>?") | {"images": [path], "mm_hint": "a text of somebody's own"}
    assert len(load(tmp_path, vision, [both])[0].media) == 1
    with pytest.raises(ValueError, match="1 images, and <image> stands 0 times in the prompt"):
        load(tmp_path, vision, [ask("?") | {"image": path}])


def test_a_model_without_eyes_refuses_pictures(tmp_path, vision):
    with pytest.raises(
        ValueError, match=r"the model reads text alone \(those that see are .*qwen3_vl"
    ):
        row = ask("<image>") | {"images": [saved(tmp_path, "a.png", picture(60, 60))]}
        load(tmp_path, vision, [row])
        prompts_of(str(tmp_path / "rows.jsonl"), tokenizer=vision.processor.tokenizer)


@pytest.mark.parametrize(
    "asks, without, with_tools",
    [
        ({}, "", ""),
        (
            {
                "agent_name": None,
                "extra_info": {
                    "tools_kwargs": {"crop": None},
                    "interaction_kwargs": {"name": None},
                },
            },
            "",
            "",
        ),
        ({"agent_name": "single_turn_agent"}, "", ""),
        (
            {
                "agent_name": "single_turn_agent",
                "extra_info": {"tools_kwargs": {"select_frames": {}}},
            },
            "",
            "",
        ),
        ({"agent_name": "tool_agent"}, "no --tools are given", ""),
        ({"extra_info": {"tools_kwargs": {"select_frames": {"a": 1}}}}, "no --tools are given", ""),
        (
            {"extra_info": {"interaction_kwargs": {"name": "teacher"}}},
            "no function is",
            "no function is",
        ),
    ],
)
def test_what_a_row_asks_for_and_does_not_get(asks, without, with_tools):
    for said, tools in ((without, {}), (with_tools, load_tools("visual"))):
        told = ignored_request(ask("x") | asks, tools, "none")
        assert said in told and bool(said) == bool(told), told


def test_rows_that_ask_in_vain_are_told_at_the_start(tmp_path, vision, capsys):
    teacher = {"extra_info": {"interaction_kwargs": {"name": "teacher"}}}
    rows = [
        ask("x"),
        ask("y") | {"agent_name": "tool_agent"},
        ask("z") | teacher,
        ask("w") | {"agent_name": "tool_agent"},
    ]
    load(tmp_path, vision, rows)
    assert not ignored_request(rows[1], {}, "all"), "a function answers it"
    assert capsys.readouterr().out.splitlines() == [
        "warning: --train-data: 2 rows ask for what is not there: "
        "agent_name tool_agent, or extra_info.tools_kwargs: no --tools are given",
        "warning: --train-data: 1 rows ask for what is not there: "
        "extra_info.interaction_kwargs: no function is given as --environment",
    ]


def test_rows_choose_tools_as_in_verl(tmp_path, vision):
    tools = load_tools("visual")
    named = {
        "tools_kwargs": {
            "select_frames": {"create_kwargs": {"a": 1, "b": None}, "execute_kwargs": {"c": 2}}
        }
    }
    rows = [
        ask("all"),
        ask("none") | {"agent_name": "single_turn_agent"},
        ask("named") | {"agent_name": "tool_agent", "extra_info": named},
        {
            "prompt": [
                {"role": "system", "content": "Own <tools>"},
                {"role": "user", "content": "x"},
            ]
        },
    ]
    data = load(tmp_path, vision, rows, tools=tools, max_prompt_tokens=4000)
    assert [list(data[i].tools) for i in range(4)] == [
        list(tools),
        [],
        ["select_frames"],
        list(tools),
    ]
    assert data[2].tools == {"select_frames": {"a": 1, "c": 2}}
    texts = [vision.processor.tokenizer.decode(data[i].prompt_ids) for i in range(4)]
    assert ["# Tools" in text for text in texts] == [True, False, True, False]
    assert "crop_image_normalized" in texts[0] and "crop_image_normalized" not in texts[2]
    names = ", ".join(tools)
    told = f"longer than --max-prompt-tokens 100, with the descriptions of {names} in them"
    with pytest.raises(ValueError, match=told):
        load(tmp_path, vision, rows, tools=tools, max_prompt_tokens=100)
    unknown = ask("x") | {"extra_info": {"tools_kwargs": {"fly": {}}}}
    with pytest.raises(ValueError, match="tools_kwargs names fly, which --tools does not offer"):
        load(tmp_path, vision, [unknown], tools=tools)
    with pytest.raises(ValueError, match="line 1: malformed: AttributeError"):
        load(tmp_path, vision, [ask("x") | {"extra_info": {"tools_kwargs": "fly"}}], tools=tools)


def test_a_picture_that_cannot_be_read_to_its_end_costs_its_row():
    """The file opens, and its disk fails: a stale handle, a bad block."""
    with pytest.raises(BadRow, match=r"cannot read /proc/self/mem \("):
        open_media(("image", ["/proc/self/mem"]), None, LIMITS)

"""The embedded vision policy: honest traces and crops, rows that load, and what the policy can do.

Its numbers in results/demos/README.md:

    python -m pytest tests/data/test_tiny_vl.py -m "slow or not slow" -k knows -s
"""

import json
from base64 import b64decode
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import LITTLE_CACHE, prompts_of, run_script

from common.assets.build import mosaic, tiny_vl
from common.data.conversations import Conversations
from common.data.protocols import CALL_OPEN, Hermes
from common.data.render import DEFAULT_SYSTEM
from common.hub import FOLDERS, load_tokenizer
from common.pictures import PixelLimits, decode
from common.rewards import reward_function, score_response
from common.tools import CROP, call_tool, load_tools
from common.vision import load_vision

ASSET = str(FOLDERS["tiny-vl"])
LIMITS = PixelLimits(**tiny_vl.LIMITS)
TOOLS = load_tools(CROP.name)
FLAGS = [
    "--model",
    "tiny-vl",
    "--max-pixels",
    LIMITS.max_pixels,
    "--max-frame-pixels",
    LIMITS.max_frame_pixels,
]


@pytest.fixture(scope="module")
def vision():
    return load_vision(ASSET, LIMITS)


@pytest.fixture(scope="module")
def traces():
    return list(islice(tiny_vl.traces(3), 450))


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    tiny_vl.write_demo_data(folder)
    return folder


def text_of(message: dict) -> str:
    return "".join(part.get("text", "") for part in message["content"])


def images_of(messages: list[dict]) -> list[bytes]:
    return [part["image"] for message in messages for part in message["content"] if "image" in part]


def reply_to(turn: str, scene: mosaic.Scene) -> dict:
    """What the tool returns for the call at the end of a turn; its images decoded from base64."""
    context = {
        "media": [{"kind": "image", "frames": [scene.png]}],
        "num_prompt_media": 1,
        **vars(LIMITS),
    }
    reply = call_tool(CROP, Hermes.find_call(turn).arguments, context, {})
    return reply | {"images": [b64decode(image) for image in reply.get("images", [])]}


def look_at(cell: tuple[int, int]) -> str:
    return tiny_vl.ZOOM + tiny_vl.call_text(tiny_vl.box_around(cell))


def holds(crop: list[float], cell: tuple[int, int]) -> bool:
    """Whether a crop, as the tool cuts it, shows the digit on the tile of a cell."""
    half = [dots * mosaic.DOT / 2 / mosaic.SIDE for dots in (5, 7)]
    ends = [
        mosaic.center(index) + sign * size for sign in (-1, 1) for index, size in zip(cell, half)
    ]
    return all(crop[i] <= ends[i] and ends[i + 2] <= crop[i + 2] for i in range(2))


def test_everything_follows_from_the_seed(traces):
    assert list(islice(tiny_vl.traces(3), 20)) == traces[:20]
    assert next(tiny_vl.scenes(3)).png != next(tiny_vl.scenes(4)).png
    assert (
        load_tokenizer(ASSET).backend_tokenizer.to_str()
        == tiny_vl.build_tokenizer(tiny_vl.corpus()).backend_tokenizer.to_str()
    )


def test_habits_are_as_asked():
    """An expert looks once, unless it sees already, and reads; who always guesses never looks."""
    for messages, scene in zip(
        islice(tiny_vl.traces(3, guess=0.0, aim=1.0), 60), tiny_vl.scenes(3)
    ):
        assert len(messages) in (3, 5)
        assert text_of(messages[-1]) == tiny_vl.READ % scene.digit
    assert {len(messages) for messages in islice(tiny_vl.traces(3, guess=1.0), 60)} == {3}
    blind = [m for m in islice(tiny_vl.traces(3, guess=0.0, aim=0.0), 60) if len(m) > 3]
    assert blind
    assert all(text_of(m[-1]).startswith(tiny_vl.GUESS[:20]) for m in blind)


def test_a_crop_shows_the_digit_of_its_own_cell_alone():
    for scene in islice(tiny_vl.scenes(5), 20):
        ink = decode(scene.png).convert("L").point(lambda value: 255 * (value == 0))
        shown = {}
        for cell in ((x, y) for x in mosaic.INNER for y in mosaic.INNER):
            box = reply_to(look_at(cell), scene)["info"]["box"]
            left, top, right, bottom = (value * mosaic.SIDE for value in box)
            x1, y1, x2, y2 = ink.getbbox()
            shown[cell] = left <= x1 and top <= y1 and x2 <= right and y2 <= bottom
            assert shown[cell] == holds(box, scene.cell)
        assert [cell for cell, holds in shown.items() if holds] == [scene.cell]


def test_traces_are_honest(traces):
    """Calls parse, observations are what the tool returns, and what is read was seen."""
    kinds = []
    for scene, messages in zip(tiny_vl.scenes(3), traces):
        assert text_of(messages[0]) == DEFAULT_SYSTEM + Hermes.system_block([CROP.schema])
        close_up = reply_to(look_at(scene.cell), scene)["images"]
        assert images_of(messages[1:2]) in ([scene.png], close_up)
        seen = images_of(messages[1:2]) == close_up
        for turn, observation in zip(messages[2:-1:2], messages[3::2]):
            assert (turn["role"], observation["role"]) == ("assistant", "user") and not seen
            reply = reply_to(text_of(turn), scene)
            assert (text_of(observation), images_of([observation])) == (
                reply["text"],
                reply["images"],
            )
            seen = holds(reply["info"]["box"], scene.cell)
        answer = text_of(messages[-1])
        assert Hermes.find_call(answer) is None
        assert (answer == tiny_vl.READ % scene.digit) == seen
        kinds.append(((len(messages) - 3) // 2, seen))
    for calls, seen in ((0, True), (0, False), (1, True), (1, False), (2, True)):
        assert kinds.count((calls, seen)) > 1


def test_traces_load_as_supervised_rows_of_pixel_reasoner(vision, tmp_path):
    tiny_vl.write_traces(tmp_path, 40, seed=6)
    options = {"max_tokens": 512, "vision": vision, "media_root": tmp_path}
    data = Conversations(
        str(tmp_path / "release.json"), "--train-data", load_tokenizer(ASSET), **options
    )
    for row, messages in zip(range(len(data)), tiny_vl.traces(6)):
        episode = data.episodes(row)[0]
        assert len(episode.media) == len(images_of(messages)) and len(episode.prompt_ids) < 100
        trained = [token for token, mask in zip(episode.response_ids, episode.loss_mask) if mask]
        said = [text_of(m) + "<|im_end|>" for m in messages if m["role"] == "assistant"]
        assert data.tokenizer.decode(trained) == "".join(said)


@pytest.mark.parametrize(
    "num_rows",
    [
        {"train": 256, "eval": 64},
        pytest.param({"train": mosaic.RL_ROWS, "eval": mosaic.EVAL_ROWS}, marks=pytest.mark.slow),
    ],
)
def test_rows_of_training_and_evaluation_load_and_share_no_scene(
    vision, num_rows, tmp_path, monkeypatch
):
    monkeypatch.setattr(mosaic, "RL_ROWS", num_rows["train"])
    monkeypatch.setattr(mosaic, "EVAL_ROWS", num_rows["eval"])
    tiny_vl.write_demo_data(tmp_path)
    pictures = {}
    for split, rows in num_rows.items():
        options = {
            "max_prompt_tokens": 128,
            "vision": vision,
            "tools": TOOLS,
            "tokenizer": load_tokenizer(ASSET),
        }
        data = prompts_of(str(tmp_path / f"{split}.parquet"), **options)
        assert len(data) == rows and data.sources == {"tiny-vl"}
        records = pq.read_table(tmp_path / f"{split}.parquet").to_pylist()
        pictures[split] = {record["images"][0]["bytes"] for record in records}
        for record, scene in zip(records[:20], tiny_vl.scenes(1 if split == "train" else 2)):
            truth = record["reward_model"]["ground_truth"]
            for digit in range(10):
                said = score_response(
                    reward_function("tiny-vl"), "tiny-vl", tiny_vl.READ % digit, truth
                )
                assert said["score"] == float(digit == scene.digit)
    assert not pictures["train"] & pictures["eval"]


def test_asset_is_small_and_complete(vision):
    assert sum(file.stat().st_size for file in FOLDERS["tiny-vl"].iterdir()) < 10e6
    config = json.loads((FOLDERS["tiny-vl"] / "config.json").read_text())
    assert config["architectures"] == ["Qwen2_5_VLForConditionalGeneration"]
    assert (
        load_tokenizer(ASSET).chat_template
        == tiny_vl.CHAT_TEMPLATE
        == vision.processor.chat_template
    )


def given_crops(path, rows: int) -> None:
    """Evaluation rows in which the policy has already looked at the right place."""
    records = []
    for i, scene in enumerate(islice(tiny_vl.scenes(11), rows)):
        reply = reply_to(look_at(scene.cell), scene)
        prompt = [
            {"role": "system", "content": DEFAULT_SYSTEM + Hermes.system_block([CROP.schema])},
            {"role": "user", "content": f"<image>{tiny_vl.QUESTION}"},
            {"role": "assistant", "content": look_at(scene.cell)},
            {"role": "user", "content": f"{reply['text']}<image>"},
        ]
        images = [{"bytes": image, "path": None} for image in (scene.png, *reply["images"])]
        truth = {"style": "rule", "ground_truth": str(scene.digit)}
        record = {
            "data_source": "tiny-vl",
            "prompt": prompt,
            "images": images,
            "reward_model": truth,
        }
        records.append(record | {"extra_info": {"index": i}})
    pq.write_table(pa.Table.from_pylist(records), path)


def evaluated(folder, *options) -> list[dict]:
    """Samples of grpo.py --eval-only at temperature 1."""
    shared = [
        "--eval-only",
        "--eval-temperature",
        1.0,
        "--max-prompt-tokens",
        256,
        "--max-response-tokens",
        256,
    ]
    run_script("grpo.py", *FLAGS, *LITTLE_CACHE, *shared, *options, "--output-dir", folder)
    return pq.read_table(folder / "eval_samples.parquet").to_pylist()


@pytest.mark.slow
def test_what_the_policy_knows(demo, tmp_path):
    """It reads what is legible, guesses what is not, and mostly looks at the right place."""
    rows = 512
    given_crops(tmp_path / "given.parquet", rows)
    data = f"{tmp_path / 'given.parquet'},{demo / 'eval.parquet'}"
    samples = evaluated(tmp_path / "blind", "--eval-data", data, "--eval-rows", 2 * rows)
    given, blind = (
        sum(sample["correct"] for sample in part) / rows
        for part in (samples[:rows], samples[rows:])
    )
    options = ["--eval-data", demo / "eval.parquet", "--eval-rows", rows, "--tools", CROP.name]
    samples = evaluated(tmp_path / "tools", *options)
    scenes = list(islice(tiny_vl.scenes(2), rows))
    looking = sum(sample["correct"] for sample in samples) / rows
    attempts = parsed = right = 0
    for sample in samples:
        scene = scenes[sample["row"]]
        for turn in sample["trajectory"].split("<|im_end|>"):
            attempts += CALL_OPEN in turn
            if (call := Hermes.find_call(turn)) and not call.error:
                parsed += 1
                reply = reply_to(turn, scene)
                right += "info" in reply and holds(reply["info"]["box"], scene.cell)
    print(
        f"\n{rows} rows: accuracy {given:.1%} with the right crop given, {blind:.1%} without "
        f"tools, {looking:.1%} "
        f"with them; {attempts} calls, {parsed / attempts:.1%} parse, {right / parsed:.1%} of "
        "these hold the digit"
    )
    assert given >= 0.9 and blind <= 0.3
    assert parsed >= 0.9 * attempts > 0.2 * rows
    assert right > 0.5 * parsed

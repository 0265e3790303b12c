"""The multi-turn loop with a scripted engine: what is appended, in which order, and how
trajectories end."""

import threading
import time
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scripted import LIMITS, ScriptedEngine, render, row, run
from vl import BOXES, CROP, QWEN, QWEN_VL, SMOLLM, build_tokenizer, picture, write_tiny_vl

from common.data.protocols import Call, Hermes, spacing
from common.distributed import World
from common.engine.hf import HuggingFaceEngine
from common.engine.protocol import EngineConfig
from common.engine.vllm import VllmEngine
from common.flags import Rollout
from common.metrics import rollout_means
from common.packing import TokenIndex, pack
from common.pictures import Media
from common.rollout.sampling import request_seed, sample_prompts
from common.rollout.trajectories import Trajectory, Turns
from common.tools.pools import ToolWorkers
from common.types import FINISH_REASONS, Completion, Episode, Row, Sampling, ToolReply
from common.vision import load_vision


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_vl(tmp_path_factory.mktemp("tiny-vl")))


@pytest.fixture(scope="module")
def vision(folder):
    return load_vision(folder, LIMITS)


@pytest.fixture(scope="module")
def workers():
    pool = ToolWorkers("visual", 2, 20.0)
    yield pool
    pool.close()


def test_a_picture_that_cannot_be_read_is_told_to_the_policy(vision, workers):
    """`call_tool` sends none; a tool that writes its reply itself may."""
    tokenizer = build_tokenizer()
    turns, the_row = Turns(tokenizer, workers, vision), row(tokenizer, vision)
    episode = Episode(
        0, 0, the_row.prompt_ids, [5, tokenizer.eos_token_id], [1, 1], [-0.5, -0.5], "stop", turns=1
    )
    trajectory = Trajectory(0, episode, the_row, turns.protocol, max_tokens=4000, seed="")
    assert turns.append_reply(trajectory, Call("forged", {}), ToolReply("see", [b"no picture"]))
    assert "unreadable image" in tokenizer.decode(episode.response_ids) and not episode.media
    assert episode.calls[0]["error"] and "see" not in tokenizer.decode(episode.response_ids)


def test_three_turns_with_two_crops_and_an_error(vision, workers):
    """Ids, mask, log-probs, positions and features of one trajectory, element by element."""
    tokenizer = build_tokenizer()
    original = Media.open("image", [picture(400, 300)], LIMITS)
    script = [
        "first " + CROP.format([0.1, 0.1, 0.4, 0.5], 1),
        CROP.format([0.5, 0.1, 0.4, 0.5], 1),  # x1 > x2
        CROP.format([0.2, 0.2, 0.9, 1.0], 2),  # of the first crop
        "\\boxed{3}",
    ]
    (episode,), engine = run(
        [script], Turns(tokenizer, workers, vision), row(tokenizer, vision, [original])
    )
    assert (episode.finish_reason, episode.turns, len(episode.media)) == ("stop", 4, 3)
    assert [call["error"] for call in episode.calls] == [False, True, False]
    assert [call["media"] for call in episode.calls] == [1, 0, 1]

    # The crops: 0.1 of padding, cut from the original, shown at their own size.
    from common.pictures import decode

    first = decode(original.frames[0]).crop((0, 0, 200, 180))
    assert np.array_equal(np.asarray(decode(episode.media[1].frames[0])), np.asarray(first))
    second = first.crop((20, 18, 200, 180))
    assert np.array_equal(np.asarray(decode(episode.media[2].frames[0])), np.asarray(second))
    sizes = [m.pixels.shape[2:0:-1] for m in episode.media]
    assert sizes == [
        LIMITS.shown_size("image", *size) for size in ((400, 300), (200, 180), (180, 162))
    ]

    def between(text: str, media: tuple = ()) -> list[int]:
        rendered = (
            f"\n<|im_start|>user\n{text}"
            + "<|vision_start|><|image_pad|><|vision_end|>" * len(media)
        )
        rendered += "<|im_end|>\n<|im_start|>assistant\n"
        return vision.expand(tokenizer.encode(rendered, add_special_tokens=False), media)

    texts = [call["text"] for call in episode.calls]
    assert texts[0] == "\nHere is the cropped image (Image Size: {}x{}):".format(*sizes[1])
    assert texts[1].startswith("\nExecution error:\n")
    expected, mask, logprobs = [], [], []
    observations = [
        between(texts[0], episode.media[1:2]),
        between(texts[1]),
        between(texts[2], episode.media[2:]),
        [],
    ]
    for said, observation in zip(script, observations):
        ids = [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]
        expected += ids + observation
        mask += [1] * len(ids) + [0] * len(observation)
        logprobs += [-0.5 - i for i in range(len(ids))] + [0.0] * len(observation)
    assert episode.response_ids == expected
    assert episode.loss_mask == mask and episode.logprobs == logprobs
    whole = [*episode.prompt_ids, *expected]
    assert [asked[1] for asked in engine.asked] == [
        whole[: len(whole) - n] for n in remaining(mask)
    ]
    assert len({asked[3] for asked in engine.asked}) == 4, "each turn has a seed of its own"

    # Positions: text counts on; a picture's rows and columns begin where the text ended, all at one
    # time.
    positions, start, places = vision.positions(whole, episode.media), 0, iter(episode.media)
    i = 0
    while i < len(whole):
        if whole[i] == vision.placeholders["image"]:
            _, rows, columns = next(places).grid
            for r in range(rows // 2):
                for c in range(columns // 2):
                    assert positions[:, i].tolist() == [start, start + r, start + c]
                    i += 1
            start += max(rows, columns) // 2
        else:
            assert positions[:, i].tolist() == [start] * 3
            start, i = start + 1, i + 1

    # Features: the placeholders of each picture get its own, in order.
    (batch,) = pack([episode], [0], TokenIndex([episode]), budget=10_000, vision=vision)
    assert batch.media == episode.media
    assert (batch.input_ids[0, batch.slots] == vision.placeholders["image"]).all()
    assert batch.feature_index.tolist() == list(range(sum(m.num_tokens for m in episode.media)))
    assert batch.position_ids[1:, 0].equal(torch.from_numpy(positions))
    assert batch.targets.tolist() == [token for token, m in zip(expected, mask) if m]


def remaining(mask: list[int]) -> list[int]:
    """How many tokens follow the beginning of each sampled turn."""
    return [len(mask) - i for i, m in enumerate(mask) if m and (i == 0 or not mask[i - 1])]


def test_every_turn_of_every_sample_has_random_numbers_of_its_own(workers):
    """Samples of a prompt with one seed would be one answer, G times; a step with another's, its
    rollouts again."""
    tokenizer = build_tokenizer()
    bad = CROP.format([0.1], 1)
    _, engine = run([[bad, "a"], [bad, bad, "b"]], Turns(tokenizer, workers), row(tokenizer))
    seeds = [[asked[3] for asked in engine.asked if asked[0] == j] for j in (0, 1)]
    assert seeds == [
        [request_seed(1, 2, 0, turn) + j for turn in range(turns)] for j, turns in ((0, 2), (1, 3))
    ]
    places = list(product((0, 1), (2, 3), (0, 1), (0, 1)))  # run, step, prompt, turn
    assert len({request_seed(*place) for place in places}) == len(places)


@pytest.mark.parametrize("special", [False, True])
def test_the_tags_of_a_call_may_be_special_tokens(workers, special):
    """As in some models, and where a user's own training has added them."""
    tokenizer = build_tokenizer()
    tokens = ["<tool_call>", "</tool_call>"]
    tokenizer.add_tokens(tokens, special_tokens=special)
    call = '<tool_call>{"name": "zoom", "arguments": {}}</tool_call>'
    (episode,), _ = run([[call, "done"]], Turns(tokenizer, workers), row(tokenizer))
    assert [call["name"] for call in episode.calls] == ["zoom"] and episode.turns == 2


@pytest.mark.parametrize(
    "template", [QWEN, QWEN_VL, SMOLLM], ids=["Qwen2.5", "Qwen2.5-VL", "SmolLM2"]
)
@pytest.mark.parametrize("role", ["user", "tool"])
def test_ids_are_those_of_the_whole_conversation(template, role, workers):
    """Prompt, sampled turns and observations together are the template's rendering of all
    messages."""
    tokenizer = build_tokenizer(template)
    turns = Turns(tokenizer, workers)
    messages = [{"role": "user", "content": "how many?"}]
    ids = tokenizer.encode(render(messages, tokenizer), add_special_tokens=False)
    for said, seen in (("let me look\n", "\nseven\n"), ("again", "Error: no"), ("  ", "")):
        ids += [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]
        ids += turns.observations.ids([seen], role)
        messages += [{"role": "assistant", "content": said}, {"role": role, "content": seen}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids) == whole and ids == tokenizer.encode(
        whole, add_special_tokens=False
    )


class OtherEnd(ScriptedEngine):
    """Its first turn ends in the other end token of generation_config.json."""

    def step(self):
        ((key, (completion,)),) = super().step()
        if sum(asked[0] == key for asked in self.asked) == 1:
            completion.token_ids[-1] = self.tokenizer.pad_token_id
        return [(key, [completion])]


@pytest.mark.parametrize(
    "template", [QWEN, QWEN_VL, SMOLLM], ids=["Qwen2.5", "Qwen2.5-VL", "SmolLM2"]
)
def test_a_turn_that_ends_in_another_end_token_is_closed_as_the_template_closes_turns(
    template, workers
):
    """What was sampled stays; the template's token follows it, not trained on."""
    tokenizer = build_tokenizer(template)
    turns, the_row, call = Turns(tokenizer, workers), row(tokenizer), CROP.format([0, 0, 1, 1], 1)
    ((episode,), _) = run([], turns, the_row, n=1, engine=OtherEnd(tokenizer, [[call, "two"]]))
    assert episode.turns == 2 and len(episode.calls) == 1
    said, last = (tokenizer.encode(text, add_special_tokens=False) for text in (call, "two"))
    seen = turns.observations.ids([episode.calls[0]["text"]], "user")
    assert tokenizer.convert_ids_to_tokens(episode.response_ids[len(said) :][:2]) == [
        "<|endoftext|>",
        "<|im_end|>",
    ]
    assert episode.loss_mask == [1] * (len(said) + 1) + [0] * (1 + len(seen)) + [1] * (
        len(last) + 1
    )
    sampled = [-0.5 - i for i in range(len(said) + 1)], [-0.5 - i for i in range(len(last) + 1)]
    assert episode.logprobs == [*sampled[0], *[0.0] * (1 + len(seen)), *sampled[1]]
    messages = [*the_row.prompt, {"role": "assistant", "content": call}]
    messages.append({"role": "user", "content": episode.calls[0]["text"]})
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    context = the_row.prompt_ids + episode.response_ids[: -len(last) - 1]
    assert tokenizer.decode(context).replace("<|endoftext|>", "") == whole


def test_texts_and_pictures_of_an_observation_keep_their_order(vision):
    hermes = Hermes(build_tokenizer())
    image = Media.open("image", [picture(56, 56)], LIMITS)
    video = Media.open("video", [picture(56, 56), picture(56, 56, seed=1)], LIMITS)
    mark = "<|vision_start|><|{}_pad|><|vision_end|>".format
    expected = "a" + mark("image") + "b <|c" + mark("video") + "d"
    assert expected in hermes.observation(["a", image, "b <|c", video, "d"], "user")
    hostile = hermes.observation(["<|im_end|>", image, "<|image_pad|>"], "user")
    assert hostile.count("<|im_end|>") == 1 and hostile.count("<|image_pad|>") == 1, (
        "the template's own"
    )


class Tags:
    """Another protocol: a row index between tags; the reply follows at once, in no message."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def read(self, turn):
        return self.tokenizer.decode(turn, skip_special_tokens=True)

    def find_call(self, text):
        found = text.rstrip().removesuffix("</look>").rpartition("<look>")
        return Call("select_frames", {"target_frames": [int(found[2])]}) if found[1] else None

    def observation(self, parts, role, num_pictures=0):
        return "".join(part if isinstance(part, str) else "<|image_pad|>" for part in parts)


def test_another_protocol_needs_nothing_of_the_loop(vision, workers):
    tokenizer = build_tokenizer()
    film = Media.open("video", [picture(56, 56), picture(56, 56, seed=1)], LIMITS)
    turns = Turns(tokenizer, workers, vision, protocol=Tags(tokenizer))
    the_row = row(tokenizer, tools=("select_frames",))
    the_row.prompt_ids, the_row.media = (
        vision.expand([vision.placeholders["video"]], [film]),
        [film],
    )
    ((episode,), _) = run([["<look>2</look>", "two"]], turns, the_row)
    assert episode.finish_reason == "stop" and episode.turns == 2
    (call,) = episode.calls
    assert call["info"]["frames"] == [2] and not call["error"]
    first = [*tokenizer.encode("<look>2</look>", add_special_tokens=False), tokenizer.eos_token_id]
    seen = tokenizer.encode(call["text"] + "<|image_pad|>", add_special_tokens=False)
    last = [*tokenizer.encode("two", add_special_tokens=False), tokenizer.eos_token_id]
    assert episode.response_ids == first + vision.expand(seen, episode.media[1:]) + last


def test_every_ending_has_its_reason(vision, workers):
    tokenizer = build_tokenizer()
    media = [Media.open("image", [picture(400, 300)], LIMITS)]
    call, bad = CROP.format([0.1, 0.1, 0.4, 0.5], 1), CROP.format([0.1], 1)
    the_row = row(tokenizer, vision, media)

    def end(script, max_tokens=4000, **limits):
        (episode,), _ = run(
            [script], Turns(tokenizer, workers, vision, Rollout(**limits)), the_row, max_tokens
        )
        assert episode.finish_reason in FINISH_REASONS
        assert (
            len(episode.response_ids)
            == len(episode.loss_mask)
            == len(episode.logprobs)
            <= max_tokens
        )
        assert episode.loss_mask[-1] == 1, "a trajectory ends with what the policy said"
        placeholders = episode.prompt_ids + episode.response_ids
        assert vision.collapse(placeholders, episode.media).count(
            vision.placeholders["image"]
        ) == len(episode.media)
        return episode.finish_reason, episode.turns

    assert end(["done"]) == ("stop", 1)
    assert end([call] * 9, max_turns=5) == ("max_turns", 5)
    assert end([call] * 9, max_turns=9, max_images=3) == ("max_images", 3)
    assert end([bad] * 9, max_turns=9, max_tool_errors=2) == ("max_tool_errors", 3)
    assert end(["long" * 100], max_turn_tokens=20) == ("turn_length", 1)
    assert end(["long" * 100], 30, max_turn_tokens=40) == ("length", 1)
    (whole,), _ = run([[call, "x"]], Turns(tokenizer, workers, vision), the_row)
    before_the_answer = len(whole.response_ids) - 2  # x and its end token
    assert end([call, "x"], before_the_answer) == ("length", 1), (
        "no room for an answer: the observation is left out"
    )
    assert end([call, "x"], before_the_answer + 1) == ("length", 2), "room for one token"


@pytest.mark.parametrize(
    "forbidden", ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
)
def test_a_sampled_placeholder_ends_the_trajectory_before_it(
    forbidden, folder, vision, workers, monkeypatch
):
    """A real engine, whose tokens are dictated. The call that stands before the placeholder is not
    made."""
    tokenizer, world = build_tokenizer(), World(0, 1, 0, torch.device("cpu"))
    end, forbidden = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(forbidden)
    engine = HuggingFaceEngine(
        EngineConfig(folder, torch.float32, world, [end], max_model_len=4000, vision=vision)
    )
    engine.books.step = 2  # of the weights, as `run` asks for
    call = tokenizer.encode(CROP.format(BOXES[0], 1), add_special_tokens=False)
    dictated = enumerate([*call, end, *call, forbidden, end])

    def sample(*_):
        place, token = next(dictated)
        return torch.tensor([token]), torch.tensor([-1.0 - place])

    monkeypatch.setattr("common.engine.hf.sample", sample)
    the_row = row(tokenizer, vision, [Media.open("image", [picture(400, 300)], LIMITS)])
    (episode,), _ = run(None, Turns(tokenizer, workers, vision), the_row, n=1, engine=engine)
    assert next(dictated)[1] == end, "nothing is sampled after it"
    assert (episode.finish_reason, episode.turns) == ("vision_token", 2)
    assert len(episode.calls) == 1 and len(episode.media) == 2
    assert episode.response_ids[-len(call) :] == call
    assert episode.loss_mask[-len(call) - 1 :] == [0] + [1] * len(call)
    assert episode.logprobs[-len(call) :] == [
        -1.0 - place for place in range(len(call) + 1, 2 * len(call) + 1)
    ]
    assert len(episode.response_ids) == len(episode.loss_mask) == len(episode.logprobs)
    ids = episode.prompt_ids + episode.response_ids
    assert vision.collapse(ids, episode.media).count(vision.placeholders["image"]) == 2
    episode.rewards = {"score": 0.0}
    assert rollout_means([episode], {}).reduce()["rollout/vision_token"] == 1.0


@pytest.mark.parametrize("seen", [[1, 2], [1, 2, 2]])
def test_what_vllm_has_sampled(vision, seen):
    """It ends before a placeholder, too; and what vLLM made of the prompt must be what the trainer
    has."""
    ids, logprobs = [5, 6, min(vision.forbidden_ids)], SimpleNamespace(logprobs=[-1.0, -2.0, -3.0])
    output = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason="stop")
    done = SimpleNamespace(request_id="3", finished=True, prompt_token_ids=seen, outputs=[output])
    engine = VllmEngine.__new__(VllmEngine)
    engine.llm = SimpleNamespace(llm_engine=SimpleNamespace(step=lambda: [done]))
    engine.placeholders, engine.open_prompts = vision.forbidden_ids, {3: [1, 2]}
    if seen == [1, 2]:
        assert engine.step() == [(3, [Completion([5, 6], [-1.0, -2.0], "vision_token")])]
    else:
        with pytest.raises(RuntimeError, match="the engine has seen a different prompt"):
            engine.step()


def test_special_tokens_that_a_text_spells_are_spaced():
    """Also those that hold others; regular expressions mean nothing, and what is no special token
    stays."""
    names = {"<|a|><|a|>": True, "<|a|>": True, "<|a|>b": True, "[a-z]": True, "<plain>": False}
    added = {
        i: SimpleNamespace(content=name, special=special)
        for i, (name, special) in enumerate(names.items())
    }
    tokenizer = SimpleNamespace(added_tokens_decoder=added)
    text = "<|a|>b<|a|><|a|>\n[a-z] x <plain> < |a|>"
    assert spacing(tokenizer)(text) == "< |a|>b< |a|>< |a|>\n[ a-z] x <plain> < |a|>"
    spared = ["<|a|>", "<|a|><|a|>", "[a-z]"]
    assert spacing(tokenizer, spared)(text) == "< |a|>b<|a|><|a|>\n[a-z] x <plain> < |a|>"
    assert spacing(SimpleNamespace(added_tokens_decoder={}))(text) == text


def test_special_tokens_that_a_call_spells_mean_nothing_in_its_error(vision, workers):
    """From ordinary tokens a policy can spell a placeholder, and the error repeats it."""
    tokenizer = build_tokenizer()
    spelled = (
        '<tool_call>{"name": "crop_image_normalized", "arguments": {"bbox_2d": '
        '["<|image_pad|><|im_end|>"], '
    )
    spelled += '"target_image": 1}}</tool_call>'
    media = [Media.open("image", [picture(400, 300)], LIMITS)]
    engine = ScriptedEngine(tokenizer, [[spelled, "x"]])
    plain = tokenizer.encode
    engine.tokenizer = SimpleNamespace(
        encode=lambda text, **_: plain(text, split_special_tokens=True, add_special_tokens=False),
        eos_token_id=tokenizer.eos_token_id,
    )
    (episode,), _ = run(
        None, Turns(tokenizer, workers, vision), row(tokenizer, vision, media), n=1, engine=engine
    )
    assert "< |image_pad|>< |im_end|>" in tokenizer.decode(episode.response_ids)
    assert (episode.finish_reason, episode.turns, len(episode.media)) == ("stop", 2, 1)
    ids = episode.prompt_ids + episode.response_ids
    assert vision.collapse(ids, episode.media).count(vision.placeholders["image"]) == 1


def test_selected_frames_are_shown_as_large_as_the_text_says(vision, workers):
    tokenizer = build_tokenizer()
    clip = Media.open("video", [picture(300, 200, i) for i in range(4)], LIMITS)
    prompt = (
        "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = vision.expand(tokenizer.encode(prompt, add_special_tokens=False), [clip])
    names = ("select_frames", "crop_image_normalized")
    the_row = Row(0, "x", "", "1", {}, ids, [clip], {name: {} for name in names})
    select = (
        '<tool_call>{"name": "select_frames", "arguments": {"target_frames": [3, 1]}}</tool_call>'
    )
    # of the first selected frame, in pixels of what is shown
    crop_pixels = CROP.format([0, 0, 56, 56], 5)
    (episode,), _ = run([[select, crop_pixels, "x"]], Turns(tokenizer, workers, vision), the_row)
    width, height = LIMITS.shown_size("video", 300, 200)
    assert f"(Frame Size: {width}x{height}, Numbered 5 to 6)" in episode.calls[0]["text"]
    assert [m.pixels.shape[1:3] for m in episode.media[1:3]] == [(height, width)] * 2
    box = episode.calls[1]["info"]["box"]
    assert box == pytest.approx([0, 0, 56 / width + 0.1, 56 / height + 0.1])


def test_a_row_offers_no_other_tools_and_aliases_get_its_arguments(own_tools):
    tokenizer = build_tokenizer()
    script = [own_call("crash"), own_call("wait", seconds=0), "x"]
    (episode,), _ = run([script], Turns(tokenizer, own_tools), row(tokenizer, tools=("wait",)))
    assert episode.finish_reason == "stop" and [call["error"] for call in episode.calls] == [
        True,
        False,
    ]
    assert "there is no tool 'crash', but wait" in episode.calls[0]["text"]


def test_a_template_that_ends_no_turns_is_refused(workers):
    endless = build_tokenizer("{% for message in messages %}{{ message['content'] }}\n{% endfor %}")
    with pytest.raises(ValueError, match="does not end the assistant's turns"):
        Turns(endless, workers).observations.ids(["x"], "user")


def test_a_template_that_renders_the_last_turn_differently(workers):
    """As Qwen3's, which shows the thoughts of the last turn alone."""
    thinking = QWEN.replace(
        "{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}",
        "{% if loop.last %}<think>{% endif %}{{ message['content'] }}<|im_end|>\n{% endif "
        "%}{% endfor %}",
    )
    assert thinking != QWEN
    turns = Turns(build_tokenizer(thinking), workers)
    expected = (
        "\n<|im_start|>user\n<tool_response>\nhi\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert turns.tokenizer.decode(turns.observations.ids(["hi"], "tool")) == expected


def test_rows_choose_their_tools(workers):
    tokenizer = build_tokenizer()
    call = '<tool_call>{"name": "select_frames", "arguments": {"target_frames": [1]}}</tool_call>'
    (episode,), _ = run([[call]], Turns(tokenizer, workers), row(tokenizer, tools=()))
    assert (episode.finish_reason, episode.turns, episode.calls) == ("stop", 1, [])


def test_a_row_without_its_picture_is_counted_and_never_sampled():
    the_row = Row(0, "x", "", "1", {}, [], problem="truncated")
    episodes, engine = run([["x"]] * 2, None, the_row, engine=ScriptedEngine(build_tokenizer(), []))
    assert [e.finish_reason for e in episodes] == ["unreadable"] * 2 and not engine.asked


TOOLS = """
import os, time

def wait(seconds: float) -> str:
    \"\"\"Wait.\"\"\"
    time.sleep(seconds)
    return "waited"

def touch(path: str) -> str:
    \"\"\"Make a file.\"\"\"
    open(path, "w").close()
    return "made"

def wait_for(path: str, then: float) -> str:
    \"\"\"Wait until somebody has made a file.\"\"\"
    while not os.path.exists(path):
        time.sleep(0.01)
    time.sleep(then)
    return "seen"

def crash() -> str:
    \"\"\"Crash.\"\"\"
    os._exit(3)

def hog() -> str:
    \"\"\"Take all memory.\"\"\"
    return "x" * (1 << 40)
"""


@pytest.fixture(scope="module")
def tool_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("tools") / "own.py"
    file.write_text(TOOLS)
    return file


@pytest.fixture(scope="module")
def own_tools(tool_file):
    pool = ToolWorkers(",".join(f"{tool_file}:{name}" for name in ("wait", "crash", "hog")), 4, 3.0)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def patient_tools(tool_file):
    """Two of them, with a deadline that plays no part."""
    pool = ToolWorkers(f"{tool_file}:touch,{tool_file}:wait_for", 2, 60.0)
    yield pool
    pool.close()


def own_call(name: str, **arguments) -> str:
    import json

    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_the_first_failure_of_a_tool_is_printed(tool_file, tmp_path, capsys):
    """A mistake in it would show in tool/error_rate alone; what a policy does wrong does not."""
    file = tmp_path / "wrong.py"
    file.write_text(
        "def divide(a: int) -> str:\n    if a < 0:\n        raise ValueError('a is negative')\n"
        "    return str(1 / a)\n"
    )
    pool = ToolWorkers(f"{file}:divide,{tool_file}:crash", 2, 20.0)
    tokenizer = build_tokenizer()
    script = [own_call("divide", a=-1), own_call("divide"), own_call("divide", a=0)]
    script += [own_call("divide", a=0), own_call("crash"), "no"]
    try:
        turns = Turns(tokenizer, pool, flags=Rollout(max_turns=6, max_tool_errors=6))
        run([script], turns, row(tokenizer, tools=("divide", "crash")))
    finally:
        pool.close()
    of_divide, of_crash = capsys.readouterr().out.splitlines()
    assert of_divide == (
        "the tool divide fails, the first time with ZeroDivisionError: division by zero (line 4 of "
        "wrong.py): the policy reads that, and tool/error_rate counts it"
    )
    assert of_crash.startswith("the tool crash fails, the first time with ")


def test_a_call_that_hangs_crashes_or_eats_memory_is_told_to_the_policy(own_tools):
    """And scored: who writes endless loops would escape its zero otherwise."""
    tokenizer = build_tokenizer()
    names = ("wait", "crash", "hog")
    scripts = [
        [own_call("wait", seconds=60), "x"],
        [own_call("crash"), "x"],
        [own_call("hog")] * 2,
        [own_call("wait", seconds=0), "x"],
    ]
    episodes, _ = run(
        scripts,
        Turns(tokenizer, own_tools, flags=Rollout(max_tool_errors=1)),
        row(tokenizer, tools=names),
    )
    assert [e.finish_reason for e in episodes] == ["stop", "stop", "max_tool_errors", "stop"]
    assert [[call["error"] for call in e.calls] for e in episodes] == [
        [True],
        [True],
        [True, True],
        [False],
    ]
    assert "Error: timeout after 3 s" in tokenizer.decode(episodes[0].response_ids)
    assert "Error: the worker died (exit code 3)" in tokenizer.decode(episodes[1].response_ids)


def test_a_trusted_tool_costs_its_sample_when_it_crashes(own_tools, monkeypatch):
    tokenizer = build_tokenizer()
    monkeypatch.setattr(own_tools.tools["crash"], "trusted", True)
    (episode,), _ = run(
        [[own_call("crash")]], Turns(tokenizer, own_tools), row(tokenizer, tools=("crash",))
    )
    assert (
        episode.finish_reason == "tool_failed"
        and episode.calls[0]["text"] == "the worker died (exit code 3)"
    )


class Announcing(ScriptedEngine):
    """Makes a file when sample 1 has said its last."""

    def step(self):
        ((key, completions),) = super().step()
        if key == 1 and sum(asked[0] == 1 for asked in self.asked) == len(self.scripts[1]):
            self.file.touch()
        return [(key, completions)]


def test_a_slow_tool_holds_nobody_up(patient_tools, tmp_path):
    """The tool of sample 0 is done when sample 1 has taken all its turns: who waits for it waits
    for ever."""
    tokenizer, file = build_tokenizer(), tmp_path / "last"
    scripts = [[own_call("wait_for", path=str(file), then=0), "slow"]]
    scripts += [[own_call("touch", path=str(tmp_path / "any"))] * 3 + ["quick"]]
    engine = Announcing(tokenizer, scripts)
    engine.file = file
    the_row = row(tokenizer, tools=("touch", "wait_for"))
    episodes, _ = run(scripts, Turns(tokenizer, patient_tools), the_row, engine=engine)
    assert [asked[0] for asked in engine.asked] == [0, 1, 1, 1, 1, 0]
    assert [e.turns for e in episodes] == [2, 4] and episodes[0].calls[0]["text"] == "seen"


def test_the_engine_samples_while_pictures_are_decoded(vision, workers, monkeypatch):
    """Those of one trajectory are opened only once the other one has ended."""
    tokenizer, opened, ended = build_tokenizer(), Media.open, threading.Event()
    original = opened("image", [picture(400, 300)], LIMITS)

    def slowly(*arguments):
        assert ended.wait(20), "the engine waits for a picture"
        return opened(*arguments)

    def step(engine):
        ((key, _),) = answers = ScriptedEngine.step(engine)
        if key == 1 and len([asked for asked in engine.asked if asked[0] == 1]) == 4:
            ended.set()
        return answers

    monkeypatch.setattr(Media, "open", slowly)
    crop, refused = CROP.format([0.1, 0.1, 0.4, 0.5], 1), CROP.format([0.5, 0.1, 0.4, 0.5], 1)
    turns = Turns(tokenizer, workers, vision, Rollout(max_tool_errors=9))
    engine = type("Engine", (ScriptedEngine,), {"step": step})(
        tokenizer, [[crop, "3"], [refused] * 3 + ["4"]]
    )
    episodes, _ = run(engine.scripts, turns, row(tokenizer, vision, [original]), engine=engine)
    assert [(e.finish_reason, e.turns, len(e.media)) for e in episodes] == [
        ("stop", 2, 2),
        ("stop", 4, 1),
    ]


def test_in_lockstep_turns_go_together(patient_tools, tmp_path, monkeypatch):
    """The tool of sample 0 is done long after that of sample 1, which waits for it, and does not
    look for it all the time."""
    poll = patient_tools.poll
    polls = []
    monkeypatch.setattr(patient_tools, "poll", lambda *args: (polls.append(1), poll(*args))[1])
    tokenizer, file = build_tokenizer(), str(tmp_path / "first")
    scripts = [
        [own_call("wait_for", path=file, then=0.3), "slow"],
        [own_call("touch", path=file)] * 3 + ["quick"],
    ]
    turns = Turns(tokenizer, patient_tools, flags=Rollout(deterministic=True))
    episodes, engine = run(scripts, turns, row(tokenizer, tools=("touch", "wait_for")))
    assert [asked[0] for asked in engine.asked] == [0, 1, 0, 1, 1, 1]
    assert [e.turns for e in episodes] == [2, 4]
    assert len(polls) < 50


def test_in_lockstep_a_reply_does_not_overtake_the_next_prompt(
    patient_tools, tmp_path, monkeypatch
):
    """Two prompts at a time: when the second has ended, the third starts, whether the tool of the
    first has replied by then or not."""
    poll = patient_tools.poll
    monkeypatch.setattr(patient_tools, "poll", lambda timeout_s: poll(20.0))  # it has
    tokenizer = build_tokenizer()
    engine = ScriptedEngine(
        tokenizer, [[own_call("touch", path=str(tmp_path / "file")), "a"], ["b"], ["c"]]
    )
    sampled = sample_prompts(
        engine,
        ((index, row(tokenizer, tools=("touch",))) for index in range(3)),
        3,
        Sampling(1, 4000),
        seed=1,
        step=2,
        weights_step=2,
        turns=Turns(tokenizer, patient_tools, flags=Rollout(deterministic=True)),
        at_once=2,
    )
    assert [episodes[0].prompt_index for _, episodes in sampled] == [1, 2, 0]
    assert [asked[0] for asked in engine.asked] == [0, 1, 2, 0]


class SlowForOne(ScriptedEngine):
    """Its answer to sample 0 takes as many steps as that needs to be the last."""

    def step(self):
        if (
            len(self.requests) == 1
            and self.requests[0][0] == 0
            and len(self.asked) < 5
            and time.monotonic() < self.end_by
        ):
            time.sleep(0.005)
            return []
        return super().step()


def test_a_long_answer_holds_nobody_up(own_tools):
    """While the engine is still at sample 0, the tools of sample 1 run and its next turns are
    sampled."""
    tokenizer = build_tokenizer()
    engine = SlowForOne(tokenizer, [["long"], [own_call("wait", seconds=0)] * 3 + ["quick"]])
    engine.end_by = time.monotonic() + 60
    episodes, _ = run(
        engine.scripts, Turns(tokenizer, own_tools), row(tokenizer, tools=("wait",)), engine=engine
    )
    assert time.monotonic() < engine.end_by, "sample 1 was not heard before sample 0 had ended"
    assert [asked[0] for asked in engine.asked] == [0, 1, 1, 1, 1]
    assert [e.turns for e in episodes] == [1, 4]

"""One test for each defect of the released Pixel Reasoner that concerns a trainer like this one,
named after it.

The reward's (bonus, -1, veto, memory, divisor) are in test_curiosity.py, the scorer's in
test_visual_qa.py.
"""

import numpy as np
import pytest
from scripted import LIMITS, ScriptedEngine, row, run
from vl import CROP, build_tokenizer, picture, write_tiny_vl

from common.flags import Rollout
from common.pictures import Media, decode
from common.rollout.trajectories import Turns
from common.tools.pools import ToolWorkers
from common.tools.visual import crop_image_normalized, select_frames
from common.types import Completion
from common.vision import load_vision
from curiosity_rl import of_unequal_groups


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    return load_vision(str(write_tiny_vl(tmp_path_factory.mktemp("model"))), LIMITS)


@pytest.fixture(scope="module")
def turns(vision):
    workers = ToolWorkers("visual", 2, 20.0)
    yield Turns(build_tokenizer(), workers, vision)
    workers.close()


def image_row(turns, width: int = 400, height: int = 300):
    media = [Media.open("image", [picture(width, height)], LIMITS)]
    return row(turns.tokenizer, turns.vision, media)


def context(*media: tuple[str, list[bytes]]) -> dict:
    shown = [{"kind": kind, "frames": frames} for kind, frames in media]
    return {"media": shown, "num_prompt_media": len(shown), **vars(LIMITS)}


def test_the_mask_is_not_off_by_one(turns):
    """The first token of each turn was not trained on; newlines and headers of the template
    were."""
    said = [CROP.format([0.1, 0.1, 0.5, 0.5], 1), "\\boxed{1}"]
    ((episode,), _) = run([said], turns, image_row(turns))
    trained = [token for token, mask in zip(episode.response_ids, episode.loss_mask) if mask]
    assert turns.tokenizer.decode(trained) == "".join(text + "<|im_end|>" for text in said)


class OddTokens(ScriptedEngine):
    """Samples a word letter by letter, as no tokenizer would write it."""

    def step(self):
        key, _ = self.requests.pop()
        ids = [self.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in WHOLE]
        return [(key, [Completion(ids, [-1.0] * len(ids), "length")])]


WHOLE = "You are a helpful assistant."  # one token of the test's tokenizer


def test_sampled_ids_are_not_text_that_is_tokenised_again(turns):
    engine = OddTokens(turns.tokenizer, [])
    ((episode,), _) = run([[""]], turns, image_row(turns), engine=engine)
    again = turns.tokenizer.encode(
        turns.tokenizer.decode(episode.response_ids), add_special_tokens=False
    )
    assert len(again) == 1 and len(episode.response_ids) == len(WHOLE)


def test_no_end_token_is_made_up_for_a_truncated_turn(turns):
    ((episode,), _) = run([["a long answer"]], turns, image_row(turns), max_tokens=5)
    assert episode.finish_reason == "length" and len(episode.response_ids) == 5
    assert turns.tokenizer.eos_token_id not in episode.response_ids


def test_positions_are_those_of_the_engine_in_three_rows(turns, vision):
    """M-RoPE was left out in training: three equal rows."""
    the_row = image_row(turns)
    positions = vision.positions(the_row.prompt_ids, the_row.media)
    assert positions.shape == (3, len(the_row.prompt_ids)) and not np.array_equal(
        positions[1], positions[2]
    )


@pytest.mark.parametrize("size", [(30, 30), (40, 200), (60, 35), (900, 31)])
def test_small_crops_have_one_size_for_all(turns, vision, size):
    """Engine and trainer had other smallest sizes, hence other numbers of tokens."""
    text, (crop,), _ = crop_image_normalized(
        [0.0, 0.0, 1.0, 1.0], 1, context(("image", [picture(*size)]))
    )
    medium = Media.open("image", [picture(*size)], LIMITS)
    assert "{}x{}".format(*medium.pixels.shape[2:0:-1]) in text and crop.size == size
    assert len(vision.expand([vision.placeholders["image"]], [medium])) == medium.num_tokens


def test_crops_are_cut_from_the_original_and_not_from_what_was_shown(turns):
    ((episode,), _) = run(
        [[CROP.format([0.4, 0.4, 0.6, 0.6], 1), "done"]], turns, image_row(turns, 1600, 1200)
    )
    shown, crop = episode.media
    assert shown.pixels.shape[2] < 1600 and decode(crop.frames[0]).size == (640, 480)


@pytest.mark.parametrize("box", [[0.5, 0.5, 1, 1], [0, 0, 1, 1], [0.5, 0.5, 1.0, 1.0]])
def test_a_box_that_touches_the_edge_is_not_in_pixels(box):
    _, (crop,), _ = crop_image_normalized(box, 1, context(("image", [picture(1000, 800)])))
    assert crop.size == ((1000, 800) if box[0] == 0 else (600, 480))


@pytest.mark.parametrize("number", [0, -1, 3, 1.5, True, "1"])
def test_numbers_of_pictures_do_not_wrap(number):
    with pytest.raises(ValueError, match="target_image"):
        crop_image_normalized(
            [0.1, 0.1, 0.5, 0.5], number, context(("image", [picture(100, 90)] * 2))
        )


@pytest.mark.parametrize("frames", [[0], [-1], [4], []])
def test_numbers_of_frames_do_not_wrap(frames):
    with pytest.raises(ValueError, match="frame ind"):
        select_frames(frames, context(("video", [picture(60, 50, i) for i in range(3)])))


def test_the_numbers_that_are_announced_are_those_that_crops_take():
    """Selected frames were numbered from another start than the crop tool counts from."""
    video = [picture(200, 150, i) for i in range(4)]
    text, selected, _ = select_frames([3, 1], context(("video", video)))
    assert "Numbered 5 to 6" in text
    seen = context(("video", video), *(("frame", [data]) for data in selected))
    for number, original in ((3, 2), (5, 2), (6, 0)):
        _, (crop,), _ = crop_image_normalized([0.1, 0.1, 0.9, 0.9], number, seen)
        assert np.array_equal(np.asarray(crop), np.asarray(decode(video[original])))


def test_too_many_pictures_end_a_trajectory_without_losing_its_turn(vision, turns):
    few = Turns(turns.tokenizer, turns.tool_pool, vision, flags=Rollout(max_images=1))
    said = CROP.format([0.1, 0.1, 0.5, 0.5], 1)
    ((episode,), _) = run([[said, "never"]], few, image_row(turns))
    assert episode.finish_reason == "max_images" and set(episode.loss_mask) == {1}
    assert turns.tokenizer.decode(episode.response_ids) == said + "<|im_end|>"


def test_all_turns_have_the_temperature_of_the_first(turns):
    """Later turns were sampled at 0.9, whatever was asked for."""
    _, engine = run([[CROP.format([0.1, 0.1, 0.5, 0.5], 1), "done"]], turns, image_row(turns))
    assert (
        len(engine.asked) == 2
        and len({sampling.temperature for _, _, sampling, _, _ in engine.asked}) == 1
    )


def test_the_filter_leaves_groups_out_and_repeats_none(turns):
    """One unequal group filled the whole batch with its copies."""
    groups = [run([["a"], ["b"]], turns, image_row(turns))[0] for _ in range(3)]
    for place, group in enumerate(groups):
        for i, e in enumerate(group):
            e.prompt_index = place
            e.set_rewards({"score": float(i * (place == 1))})
    assert of_unequal_groups([e for group in groups for e in group]) == groups[1]

"""Qwen3-VL's and Qwen3.5's pictures: timestamps between the frames of videos, positions, DeepStack
in packs and in rows, against transformers' own processor and forward."""

import random
from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
import torch
from helpers import relative_l2, rms_norm
from transformers import AutoModelForImageTextToText
from vl import image, reference_positions, trajectories, video, write_tiny_vl

from common.data.media import count_tokens
from common.job import check_cell
from common.models import load_model
from common.packing import TokenIndex, layout_of, pack
from common.pictures import PixelLimits
from common.types import Episode
from common.vision import Vision, load_vision

LIMITS = PixelLimits(784, 24 * 1024, 8 * 1024)
KINDS = ["qwen3_vl", "qwen3_5"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    return {kind: str(write_tiny_vl(tmp_path_factory.mktemp(kind), kind=kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def visions(folders) -> dict[str, Vision]:
    return {kind: load_vision(folders[kind], LIMITS) for kind in KINDS}


@pytest.mark.parametrize("num_frames", [1, 2, 5, 44])
def test_ids_and_patches_are_those_of_transformers_processor(visions, num_frames):
    """Given pictures in the sizes at which they are shown, and the times of frames."""
    vision = visions["qwen3_vl"]
    media = [image(0, vision.limits), video(1, num_frames, vision.limits), image(3, vision.limits)]
    processor = vision.processor
    text = "a<|vision_start|><|image_pad|><|vision_end|>b <|vision_start|><|video_pad|>"
    text += "<|vision_end|>c\n<|vision_start|><|image_pad|><|vision_end|>"
    frames = torch.from_numpy(media[1].pixels).permute(0, 3, 1, 2)
    times = {"fps": 2.0, "total_num_frames": num_frames, "frames_indices": [*range(num_frames)]}
    inputs = processor(
        text=[text],
        images=[media[0].pixels[0], media[2].pixels[0]],
        videos=[frames],
        video_metadata=[times],
        do_resize=False,
        do_sample_frames=False,
        return_tensors="pt",
    )
    short = processor.tokenizer.encode(text)
    ids = vision.expand(short, media)
    assert ids == inputs["input_ids"][0].tolist()
    assert vision.collapse(ids, media) == short
    assert [ids[span.start : span.stop] for span in vision.spans(ids, media)] == [
        vision.expansion(m) for m in media
    ]
    for m in media:
        length = count_tokens((m.kind, m.frames), None, vision)
        assert length == len(vision.expansion(m)), "a row's header tells as much"
    patches, grids = vision.patches([media[0], media[2]], torch.device("cpu"))
    assert torch.equal(patches, inputs["pixel_values"])
    assert torch.equal(grids, inputs["image_grid_thw"])
    patches, grids = vision.patches(media[1:2], torch.device("cpu"))
    assert torch.equal(patches, inputs["pixel_values_videos"])
    assert torch.equal(grids, inputs["video_grid_thw"])


def random_layout(vision: Vision, seed: int) -> tuple[list[int], list]:
    """Ids and media of text, pictures and videos in any order, next to each other or apart."""
    rng = random.Random(seed)
    ids = []
    media = []
    for _ in range(rng.randint(0, 7)):
        kind = rng.choice(["text", "image", "video"])
        if kind == "text":
            ids += [rng.randrange(200) for _ in range(rng.randint(1, 9))]
            continue
        if kind == "image":
            media.append(image(rng.randrange(99), vision.limits))
        else:
            media.append(video(rng.randrange(99), rng.randint(1, 6), vision.limits))
        ids += [vision.start_id, *vision.expansion(media[-1]), vision.end_id]
    return ids + [5], media


@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_those_of_transformers(visions, kind):
    """Of random layouts, and of trajectories of several turns that share their prompts."""
    vision = visions[kind]
    layouts = [random_layout(vision, seed) for seed in range(20)]
    layouts += [(e.prompt_ids + e.response_ids, e.media) for e in trajectories(vision)]
    kinds = [{m.kind for m in media} for _, media in layouts]
    assert {"image", "video"} in kinds and set() in kinds
    for ids, media in layouts:
        expected = reference_positions(ids, media, kind)
        assert vision.positions(ids, media).tolist() == expected.tolist()


@pytest.fixture
def without_float32(monkeypatch):
    """transformers' rotary embedding of towers computes in float32 whatever it is given."""
    for kind in ("qwen2_5_vl", *KINDS):
        modeling = import_module(f"transformers.models.{kind}.modeling_{kind}")
        monkeypatch.setattr(modeling, "apply_rotary_pos_emb_vision", rotate)


def rotate(q, k, cos, sin):
    rotated = []
    for x in (q, k):
        first, second = x.chunk(2, dim=-1)
        halves = torch.cat([-second, first], dim=-1)
        rotated.append(x * cos.unsqueeze(-2).to(x.dtype) + halves * sin.unsqueeze(-2).to(x.dtype))
    return tuple(rotated)


def with_exact_norms(model):
    """The same of RMSNorm."""
    for module in model.modules():
        if type(module).__name__ == "Qwen3VLTextRMSNorm":
            module.forward = partial(rms_norm, module)
    return model


def own_logprobs(model, episode: Episode, vision: Vision) -> torch.Tensor:
    """transformers' own forward: it counts positions and places features by itself."""
    ids = torch.tensor([episode.prompt_ids + episode.response_ids])
    is_image = ids == vision.placeholders["image"]
    is_video = ids == vision.placeholders["video"]
    inputs = {"input_ids": ids, "mm_token_type_ids": is_image.int() + 2 * is_video.int()}
    for kind, suffix in (("image", ""), ("video", "_videos")):
        media = [m for m in episode.media if m.kind == kind]
        if media:
            patches, grids = vision.patches(media, torch.device("cpu"))
            inputs[f"pixel_values{suffix}"] = patches.double()
            inputs[f"{kind}_grid_thw"] = grids
    logits = model(**inputs, use_cache=False).logits[0] / 0.9
    trained = [len(episode.prompt_ids) + i for i, m in enumerate(episode.loss_mask) if m]
    places = torch.tensor(trained)
    targets = ids[0, places]
    return logits.log_softmax(-1)[places - 1].gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize(
    "kind, bound",
    [
        ("qwen3_vl", 1e-10),
        # its recurrent layers and norms compute in float32
        pytest.param("qwen3_5", 1e-5, marks=pytest.mark.slow),
    ],
)
def test_log_probs_and_gradients_are_those_of_single_trajectories(
    folders, visions, without_float32, kind, bound
):
    """Of a policy with gradient checkpointing, in float64."""
    vision = visions[kind]
    episodes = trajectories(vision, seed=1, samples=2)
    assert {len(e.media) for e in episodes} >= {0, 1, 2, 3}
    index = TokenIndex(episodes)
    weights = torch.linspace(-1, 1, len(index), dtype=torch.float64)

    model = AutoModelForImageTextToText.from_pretrained(
        folders[kind], dtype=torch.float64, attn_implementation="sdpa"
    )
    model = with_exact_norms(model)
    own = [own_logprobs(model, episode, vision) for episode in episodes]
    expected = torch.cat(own)
    (expected @ weights).backward()
    expected_gradients = [p.grad for p in model.parameters()]
    assert all(gradient.any() for gradient in expected_gradients), "DeepStack's mergers, too"

    for attention in ("sdpa", "rows"):
        policy = load_model(
            folders[kind],
            attention,
            dtype=torch.float64,
            vision=vision,
            gradient_checkpointing=True,
        )
        policy = with_exact_norms(policy)
        logprobs = torch.full((len(index),), torch.nan, dtype=torch.float64)
        options = {"budget": 600, "layout": layout_of(attention), "vision": vision}
        for batch in pack(episodes, range(len(episodes)), index, **options):
            batch_logprobs, _ = policy(batch, 0.9)
            logprobs[batch.token_index] = batch_logprobs.detach()
            (batch_logprobs @ weights[batch.token_index]).backward()
        assert relative_l2([logprobs], [expected.detach()]) < bound
        gradients = [p.grad for p in policy.model.parameters()]
        assert relative_l2(gradients, expected_gradients) < bound


def test_a_rank_without_pictures_takes_part_in_deepstack(folders, visions):
    """Its gradients are zeros, not absent: the others wait for them in a collective."""
    vision = visions["qwen3_vl"]
    policy = load_model(folders["qwen3_vl"], "sdpa", vision=vision)
    episodes = [e for e in trajectories(vision) if not e.media]
    (batch,) = pack(
        episodes, range(len(episodes)), TokenIndex(episodes), budget=4096, vision=vision
    )
    policy(batch)[0].sum().backward()
    for parameter in policy.model.base_model.visual.parameters():
        assert parameter.grad is not None and not parameter.grad.any()


def test_a_picture_may_be_as_large_as_a_visual_token(visions):
    check_cell(visions["qwen3_vl"].limits, "--model M")
    small = replace(visions["qwen3_vl"].limits, max_frame_pixels=1023)
    message = "--max-frame-pixels 1023: a visual token of --model M is 32 x 32 pixels, so at least"
    with pytest.raises(SystemExit, match=f"{message} 1024"):
        check_cell(small, "--model M")

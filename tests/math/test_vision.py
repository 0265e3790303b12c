"""Pictures: tokens, positions and log-probs of packed trajectories against transformers' own
forward, one by one."""

import io
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import relative_l2
from PIL import Image
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from vl import image, picture, reference_positions, trajectories, video, write_tiny_vl

from common.engine.hf import HuggingFaceEngine
from common.engine.protocol import EngineConfig
from common.models import load_model
from common.packing import Layout, TokenIndex, pack
from common.pictures import Media, PixelLimits
from common.vision import attend_in_windows, load_vision

LIMITS = PixelLimits(784, 64 * 784, 16 * 784)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_vl(tmp_path_factory.mktemp("tiny-vl")))


@pytest.fixture(scope="module")
def vision(folder):
    return load_vision(folder, LIMITS)


@pytest.fixture(scope="module")
def policy(folder, vision):
    return load_model(folder, "sdpa", dtype=torch.float32, vision=vision)


def packed_logprobs(policy, episodes, vision, **options) -> torch.Tensor:
    index = TokenIndex(episodes)
    result = torch.full((len(index),), torch.nan)
    for batch in pack(episodes, range(len(episodes)), index, vision=vision, **options):
        result[batch.token_index] = policy(batch, 0.9)[0]
    return result


def reference_logprobs(policy, episodes, vision) -> torch.Tensor:
    """transformers' own forward of each trajectory alone: it places the features by itself."""
    results = []
    for e in episodes:
        ids = e.prompt_ids + e.response_ids
        arguments = {"position_ids": torch.from_numpy(vision.positions(ids, e.media))[:, None]}
        for kind, suffix in (("image", ""), ("video", "_videos")):
            if media := [m for m in e.media if m.kind == kind]:
                patches, grids = vision.patches(media, torch.device("cpu"))
                arguments |= {f"pixel_values{suffix}": patches, f"{kind}_grid_thw": grids}
        logits = (
            policy.model(input_ids=torch.tensor([ids]), units=[[len(ids)]], **arguments).logits[0]
            / 0.9
        )
        places = torch.tensor([len(e.prompt_ids) + i for i, m in enumerate(e.loss_mask) if m])
        results.append(
            logits.log_softmax(-1)[places - 1].gather(1, torch.tensor(ids)[places, None])[:, 0]
        )
    return torch.cat(results)


@pytest.mark.parametrize(
    "budget,share,multiple", [(4096, True, 1), (300, True, 128), (1, True, 1), (900, False, 64)]
)
def test_packed_trajectories_have_the_logprobs_of_single_ones(
    policy, vision, budget, share, multiple
):
    episodes = trajectories(vision)
    assert {len(e.media) for e in episodes} >= {0, 1, 2, 3, 4}
    with torch.no_grad():
        layout = Layout(share_prompts=share, multiple=multiple)
        packed = packed_logprobs(policy, episodes, vision, budget=budget, layout=layout)
        single = reference_logprobs(policy, episodes, vision)
    assert relative_l2([packed], [single]) < 1e-5


@pytest.mark.slow  # by default test_numerics.py has flex attention in packs of text
@torch.no_grad()
def test_flex_attention_reads_pictures_too(policy, folder, vision, eager_compiler):
    """Under its own name transformers would refuse it to Qwen2.5-VL."""
    options = {"dtype": torch.float32, "vision": vision, "compile_layers": True}
    flex, episodes = load_model(folder, "flex", **options), trajectories(vision)
    options = {"budget": 300, "layout": Layout(multiple=128)}
    logprobs = [packed_logprobs(p, episodes, vision, **options) for p in (flex, policy)]
    assert relative_l2(*([x] for x in logprobs)) < 1e-5


def test_gradients_of_packed_trajectories_are_those_of_single_ones(policy, vision):
    episodes = trajectories(vision, seed=3)
    weights = torch.linspace(-1, 1, len(TokenIndex(episodes)))

    def gradient(logprobs: torch.Tensor) -> list[torch.Tensor]:
        policy.zero_grad()
        (logprobs * weights).sum().backward()
        return [p.grad.clone() for p in policy.parameters()]

    packed = gradient(packed_logprobs(policy, episodes, vision, budget=600))
    assert relative_l2(packed, gradient(reference_logprobs(policy, episodes, vision))) < 1e-5


def test_a_picture_of_a_group_is_encoded_once(policy, vision, monkeypatch):
    episodes = [e for e in trajectories(vision) if e.prompt_index == 1]
    (batch,) = pack(
        episodes, range(len(episodes)), TokenIndex(episodes), budget=10_000, vision=vision
    )
    assert (
        len(batch.media)
        == len({m for e in episodes for m in e.media})
        == sum(len(e.media) - 1 for e in episodes) + 1
    )
    (apart,) = pack(
        episodes,
        range(len(episodes)),
        TokenIndex(episodes),
        budget=10_000,
        layout=Layout(share_prompts=False),
        vision=vision,
    )
    assert len(apart.media) == len(batch.media) and len(apart.slots) > len(batch.slots)


@pytest.mark.parametrize("model", ["policy", "engine"])
def test_a_tower_that_overflows_in_fp16_is_cut_as_vllm_cuts_it(model, folder, vision, world):
    """That of Qwen2.5-VL-3B does, in its last block; what is not too large is left alone."""
    if model == "policy":
        loaded = load_model(folder, "sdpa", dtype=torch.float16, vision=vision).model
    else:
        loaded = HuggingFaceEngine(
            EngineConfig(folder, torch.float16, world, [], 64, vision=vision)
        ).model
    tower, seen = loaded.base_model.visual, []
    tower.merger.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    patches, grids = vision.patches([image(1, LIMITS)], torch.device("cpu"))
    with torch.no_grad():
        plain = tower(patches.half(), grid_thw=grids).pooler_output
        tower.blocks[-1].register_forward_hook(lambda *given: given[2] * 1e30)
        tower(patches.half(), grid_thw=grids)
    assert plain.isfinite().all() and seen[0].abs().max() < 100
    assert seen[1].isfinite().all() and seen[1].abs().max() == torch.tensor(65504 - 1000).half()


def test_positions_of_images_are_those_of_transformers(vision):
    """Whose videos have others: it leaves out their time where it counts on behind them."""
    episodes = [e for e in trajectories(vision) if all(m.kind == "image" for m in e.media)]
    assert {len(e.media) for e in episodes} >= {0, 1, 2, 3}
    for e in episodes:
        ids = e.prompt_ids + e.response_ids
        assert vision.positions(ids, e.media).tolist() == reference_positions(ids, e.media).tolist()


def test_positions_of_a_video_are_those_of_its_paper(vision):
    """Two pairs of frames of 2 x 2 cells: 4 positions a second, a pair lasts one; what follows
    begins behind all."""
    clip = Media("video", [], np.zeros((3, 56, 56, 3), np.uint8))
    token = vision.placeholders["video"]
    ids = vision.expand([5, token, 6, 7], [clip])
    assert ids == [5, *[token] * 8, 6, 7]
    assert vision.positions(ids, [clip]).T.tolist() == [
        [0, 0, 0],
        *([1, 1 + r, 1 + c] for r in range(2) for c in range(2)),
        *([5, 1 + r, 1 + c] for r in range(2) for c in range(2)),
        [6, 6, 6],
        [7, 7, 7],
    ]


def test_pictures_are_resized_once_by_the_cubic_filter():
    data = picture(100, 70)
    expected = (
        Image.open(io.BytesIO(data)).convert("RGB").resize((112, 56), Image.Resampling.BICUBIC)
    )
    assert np.array_equal(Media.open("image", [data], LIMITS).pixels[0], np.asarray(expected))


def test_a_rank_without_pictures_takes_part_in_the_vision_tower(policy, vision):
    """Its gradients are zeros, not absent: the others wait for them in a collective."""
    episodes = [e for e in trajectories(vision) if not e.media]
    policy.zero_grad()
    packed_logprobs(policy, episodes, vision, budget=4096).sum().backward()
    grads = [p.grad for p in policy.model.base_model.visual.parameters()]
    assert all(g is not None and not g.any() for g in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_windows_of_the_tower_go_in_one_call(folder, vision, monkeypatch, dtype):
    """Values and gradients of transformers' loop over windows, with one call a layer for each
    length of a window."""
    media = [image(seed, LIMITS) for seed in range(6)]
    media += [video(3, 5, LIMITS), video(4, 4, LIMITS)]
    results, calls = [], []
    for is_ours in (True, False):
        model = load_model(folder, "sdpa", dtype=torch.float32, vision=vision).model.to(dtype)
        tower = model.base_model.visual
        if not is_ours:
            for block in tower.blocks:
                del block.attn.forward
        patches, grids = vision.patches(media, torch.device("cpu"))
        counted = Mock(wraps=torch.nn.functional.scaled_dot_product_attention)
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
        features = tower(patches.to(dtype), grid_thw=grids).pooler_output
        monkeypatch.undo()
        features.square().sum().backward()
        results.append([features.detach(), *(p.grad for p in tower.parameters())])
        calls.append(counted.call_count)
    ours, theirs = results
    limit = 1e-5 if dtype == torch.float32 else 1e-7  # the patches' positions are float32
    assert len(ours) == len(theirs) and relative_l2(ours, theirs) < limit
    assert calls[0] < calls[1] / 4, calls


def test_frames_of_qwen2_vls_tower_go_in_one_call():
    """Its windows are whole frames."""
    config = Qwen2VLVisionConfig(depth=2, embed_dim=64, hidden_size=96, num_heads=4, mlp_ratio=2)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    tower = Qwen2VisionTransformerPretrainedModel(config)
    grids = torch.tensor([[1, 8, 8], [3, 4, 6], [1, 8, 8], [1, 2, 10]])
    patches = torch.randn(int(grids.prod(dim=1).sum()), 1176)
    theirs = tower(patches, grid_thw=grids).pooler_output
    for block in tower.blocks:
        attend_in_windows(block.attn)
    assert torch.equal(tower(patches, grid_thw=grids).pooler_output, theirs)

"""Tiny vision-language models in engines, and what their policies say of the samples.

    python tests/workers/vision_gap.py ENGINE:FOLDER...

Prints a JSON object for each: the largest |log-prob gap| (fp32) between the policy's packs
and two turns that the engine has sampled, with a crop between them: of the weights on disk (fresh),
after the policy has moved without a sync (stale), and after the sync (synced).
"""

import argparse
import json

import torch
from vl import image, video

from common.distributed import World, init_world
from common.engine.hf import HuggingFaceEngine
from common.engine.protocol import Engine, EngineConfig
from common.engine.vllm import VllmEngine
from common.models import Policy, load_model, sync_engine
from common.packing import TokenIndex, pack
from common.pictures import Media, PixelLimits
from common.progress import say
from common.rollout.sampling import sample_episodes
from common.script import run
from common.types import Episode, Row, Sampling
from common.vision import Vision, load_vision

ENGINES = {"hf": HuggingFaceEngine, "vllm": VllmEngine}
TEMPERATURE = 0.9


def shown(media: list[Media], vision: Vision) -> list[int]:
    """The ids of pictures with text between them."""
    ids: list[int] = []
    for m in media:
        ids += [7, vision.start_id, *vision.expansion(m), vision.end_id, 10 + len(ids) % 9]
    return ids


def two_turns(engine: Engine, vision: Vision, step: int) -> list[Episode]:
    limits = vision.limits
    prompts = [
        [],
        [image(0, limits)],
        [image(1, limits), image(2, limits)],
        [video(3, 5, limits), image(3, limits), video(4, 2, limits)],
    ]
    options = {"seed": 0, "step": step, "weights_step": step}
    rows = {}
    for i, media in enumerate(prompts):
        ids = [*range(30 + i), *shown(media, vision), 5]
        rows[i] = Row(i, "", "", None, {}, ids, media)
    sampling = Sampling(n=2, max_tokens=12, temperature=TEMPERATURE)
    episodes = sample_episodes(engine, rows, sampling, **options)

    rows = {}
    for i, episode in enumerate(episodes):
        crop = image(4 + i, limits)
        observation = shown([crop], vision)
        episode.response_ids += observation
        episode.loss_mask += [0] * len(observation)
        episode.logprobs += [0.0] * len(observation)
        episode.media = [*episode.media, crop]
        ids = episode.prompt_ids + episode.response_ids
        rows[i] = Row(i, "", "", None, {}, ids, episode.media)
    sampling = Sampling(n=1, max_tokens=12, temperature=TEMPERATURE)
    for episode, second in zip(episodes, sample_episodes(engine, rows, sampling, **options)):
        episode.response_ids += second.response_ids
        episode.loss_mask += second.loss_mask
        episode.logprobs += second.logprobs
    return episodes


@torch.no_grad()
def largest_gap(engine: Engine, policy: Policy, step: int) -> float:
    episodes = two_turns(engine, policy.vision, step)
    index = TokenIndex(episodes)
    sampled = []
    for episode in episodes:
        sampled += [x for x, m in zip(episode.logprobs, episode.loss_mask) if m]
    sampled = torch.tensor(sampled)
    largest = 0.0
    for batch in pack(episodes, range(len(episodes)), index, budget=700, vision=policy.vision):
        logprobs, _ = policy(batch, TEMPERATURE)
        largest = max(largest, (logprobs - sampled[batch.token_index]).abs().max().item())
    return largest


@torch.no_grad()
def move(policy: Policy) -> None:
    """Stands for optimizer steps: each weight changes by a tenth."""
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.parameters():
        spread = parameter.std(correction=0) or 0.5
        parameter.add_(0.1 * spread * torch.randn(parameter.shape, generator=generator))


def gaps(folder: str, engine_name: str, world: World) -> dict[str, float]:
    vision = load_vision(folder, PixelLimits(1024, 16 * 1024, 4 * 1024))
    policy = load_model(folder, "sdpa", vision=vision)
    config = EngineConfig(
        folder,
        torch.float32,
        world,
        end_ids=[],
        max_model_len=512,
        sleep_level=0,
        memory_gib=0.25,
        vision=vision,
        max_images=4,
    )
    engine = ENGINES[engine_name](config)
    engine.books.step = 0
    result = {"fresh": largest_gap(engine, policy, 0)}
    move(policy)
    result["stale"] = largest_gap(engine, policy, 0)
    sync_engine(engine, policy, 1)
    result["synced"] = largest_gap(engine, policy, 1)
    return result


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = init_world()
    for pair in args.pairs:
        engine_name, _, folder = pair.partition(":")
        say(json.dumps(gaps(folder, engine_name, world)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("pairs", nargs="+")
    run(main, parser.parse_args())

"""Run by torchrun: the gradient of mixed supervised rows (text, images, a video), split over ranks
and micro-batches.

Prints one JSON object on rank 0: {variant: relative L2 distance from the gradients of single rows,
summed}.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import torch
from helpers import relative_l2, rms_norm
from torch.distributed.tensor import DTensor
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

from common.data.conversations import Conversations
from common.distributed import World, all_reduce, init_world, make_mesh, wrap_model
from common.hub import load_tokenizer
from common.models import load_model
from common.packing import Minibatch, TokenIndex, pack
from common.pictures import PixelLimits
from common.script import run
from common.vision import load_vision
from sft import backward, balanced


def rotate(q, k, cos, sin):
    """transformers' own computes in float32 whatever it is given."""
    cos, sin = (x.unsqueeze(-2).to(q.dtype) for x in (cos, sin))
    return tuple(x * cos + qwen.rotate_half(x) * sin for x in (q, k))


def make_policy(path: str, vision, dtype: torch.dtype) -> torch.nn.Module:
    policy = load_model(path, "sdpa", dtype=dtype, vision=vision)
    if dtype == torch.float64:  # the same of RMSNorm
        for module in policy.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(rms_norm, module)
    return policy


def main(args: argparse.Namespace) -> None:
    world, dtype = init_world(), getattr(torch, args.dtype)
    if dtype == torch.float64:
        qwen.apply_rotary_pos_emb_vision = rotate
    distances = {}
    for path in args.model:
        for setting, distance in distances_of(path, args, world, dtype).items():
            distances[f"{Path(path).name}, {setting}"] = distance
    if world.is_main:
        print(json.dumps(distances))


def distances_of(
    path: str, args: argparse.Namespace, world: World, dtype: torch.dtype
) -> dict[str, float]:
    vision, tokenizer = (
        load_vision(path, PixelLimits(784, 16 * 784, 4 * 784)),
        load_tokenizer(path),
    )
    data = Conversations(
        args.data, "--data", tokenizer, max_tokens=4096, vision=vision, media_root=args.media_root
    )
    episodes = [data.episodes(row)[0] for row in range(len(data))]
    kinds = {medium.kind for episode in episodes for medium in episode.media}
    assert kinds == {"image", "video"} and not all(episode.media for episode in episodes)
    count = len(TokenIndex(episodes))

    policy = make_policy(path, vision, dtype)
    for episode in episodes:
        (batch,) = pack([episode], [0], TokenIndex([episode]), budget=1, vision=vision)
        (-policy(batch)[0].sum() / count).backward()
    reference = [parameter.grad.clone() for parameter in policy.parameters()]

    distances = {}
    for strategy in ("fsdp", "ddp"):
        model = wrap_model(make_policy(path, vision, dtype), make_mesh(world, strategy), dtype)
        for split in ("balanced", "rank 0 has all pictures"):
            rows = list(range(len(data)))
            parts = balanced(rows, data.costs, world.size)
            if split != "balanced":
                parts = [
                    [r for r in rows if bool(episodes[r].media) == (rank == 0)]
                    for rank in range(world.size)
                ]
            mine = [episodes[row] for row in parts[world.rank]]
            index = TokenIndex(mine)
            assert all_reduce([len(index)])[0] == count
            for budget in (200, 100_000):
                # half of all combinations, in which any two settings still meet
                if args.pairs and (strategy == "ddp") ^ (split == "balanced") ^ (budget == 200):
                    continue
                model.zero_grad()
                batches = pack(mine, range(len(mine)), index, budget=budget, vision=vision)
                means = backward(model, Minibatch([], count, len(data), batches), world)
                assert means.counts["policy/loss"] == len(index)
                got = [
                    p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                    for p in model.parameters()
                ]
                distances[f"{strategy}, {split}, budget {budget}, {len(batches)} batches"] = (
                    relative_l2(got, reference)
                )
        assert len(got) == len(list(model.parameters()))
    return distances


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", nargs="+")
    parser.add_argument("--data")
    parser.add_argument("--media-root", type=Path)
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--pairs", action="store_true")
    run(main, parser.parse_args())

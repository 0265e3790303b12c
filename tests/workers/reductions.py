"""Run by torchrun: what ranks with different episodes and metrics make of them together. Prints
JSON on rank 0."""

import json
from pathlib import Path

import torch
from episodes import random_episodes
from helpers import split_of

from common.distributed import gather_objects, init_world
from common.metrics import Means, explained_variance, rollout_means, rollout_metrics
from common.packing import Packer, TokenIndex
from common.script import run


def main(_: None) -> None:
    world = init_world()
    means = Means()
    # 6 of 3, 12 of 3
    means.add("both", torch.tensor([1.0, 2.0, 3.0]).sum() * (world.rank + 1), count=3)
    means.add("weighted", [10.0, 2.0][world.rank], count=[1, 3][world.rank])
    means.add(["only rank 0", "only rank 1"][world.rank], 5.0, count=2)
    means.add("of nothing here", 0.0, count=world.rank)
    means.add("of nothing at all", 0.0, count=0)
    means.add_total("summed", world.rank + 1)
    means.add_total("on every rank", 7, on_every_rank=True)
    means.add_total(["total of rank 0", "total of rank 1"][world.rank], 3)

    episodes = random_episodes(5, prompts=7)
    mine = [e for e in episodes if e.prompt_index % 3 == 0] if world.rank == 0 else []
    if world.rank == 1:
        mine = [e for e in episodes if e.prompt_index % 3]
    packer = Packer("sdpa", 60, Path("nowhere"), world)
    minibatches = packer.minibatches(mine, TokenIndex(mine), split_of(mine, 3, seed=1, step=2))
    counts = [[m.num_tokens, m.num_sequences, len(m.micro_batches)] for m in minibatches]
    prompts = [sorted({mine[i].prompt_index for i in m.episode_indices}) for m in minibatches]
    nothing = packer.minibatches([], TokenIndex([]), split_of([], 2, seed=1, step=2))

    values, returns = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    share = slice(0, 13) if world.rank == 0 else slice(13, 50)
    sampled = rollout_means(mine if world.rank else [], {"rollout": [1.0, 3.0][world.rank]})
    result = {
        "means": means.reduce(),
        "counts": counts,
        "prompts": prompts,
        "nothing": [[m.num_tokens, m.num_sequences, len(m.micro_batches)] for m in nothing],
        "explained": explained_variance(values[share], returns[share]),
        "rollout": rollout_metrics(sampled.reduce()),
    }
    results = gather_objects(result)
    if world.is_main:
        print(json.dumps(results))


if __name__ == "__main__":
    run(main, None)

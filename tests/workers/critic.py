"""Run by torchrun: ppo.py's critic on an environment whose values are known in closed form.

Two prompts, responses of three fair coins with an observation token between them, every response
once a step, so the value of a state is the mean score of the responses that begin like it. Prints
the largest error over all states.
"""

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path

import torch
from helpers import make_args, random_policy, split_of
from transformers import Qwen2Config

import ppo
from common.distributed import all_reduce, init_world, make_mesh, wrap_model
from common.optimizer import GuardedAdamW
from common.packing import Packer, TokenIndex
from common.script import run
from common.types import Episode
from ppo import Critic

COINS = (5, 6)
OBSERVATION = 7


def score(prompt: int, coins: tuple[int, ...]) -> float:
    """Any function will do; this one is not linear in the coins."""
    heads = [coin == COINS[1] for coin in coins]
    return (
        float(heads[0] and not heads[2])
        + 0.5 * float(sum(heads) == 2)
        - 0.25 * prompt * float(heads[1])
    )


def main(args: argparse.Namespace) -> None:
    world = init_world()
    config = Qwen2Config(
        vocab_size=16, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    episodes, truth = [], []
    for place, (prompt, coins) in enumerate(product((0, 1), product(COINS, repeat=3))):
        if prompt % world.size != world.rank:
            continue
        response = [coins[0], OBSERVATION, coins[1], coins[2]]
        mask = [1, 0, 1, 1]
        rewards = {"score": score(prompt, coins)}
        episodes.append(
            Episode(prompt, place, [1, 2 + prompt], response, mask, [0.0] * 4, "stop", rewards)
        )
        for known in range(3):
            rest = product(COINS, repeat=3 - known)
            completions = [score(prompt, coins[:known] + tail) for tail in rest]
            truth.append(sum(completions) / len(completions))
    index = TokenIndex(episodes)
    scores = torch.tensor([e.score for e in episodes])
    rewards = ppo.token_rewards(scores, index, episodes)
    critic = Critic(random_policy(config, torch.float32).model.base_model, "sdpa")
    critic = wrap_model(critic, make_mesh(world, args.strategy), torch.float32)
    optimizer = GuardedAdamW(critic, torch.float32, weight_decay=0.01, max_grad_norm=1.0)
    options = make_args(ppo, value_clip=0.5)
    with tempfile.TemporaryDirectory() as folder:
        packer = Packer("sdpa", 70, Path(folder), world)
        (minibatch,) = packer.minibatches(episodes, index, split_of(episodes, 1, seed=0, step=0))

    def values() -> torch.Tensor:
        result = torch.full((len(index),), torch.nan)
        packer.fill(result, critic, [minibatch])
        return result

    errors = {"at the start": max(map(abs, values().tolist()))}
    for step in range(args.steps):
        old = values()
        tokens = ppo.Tokens.of(episodes, index, world.device)
        tokens.values, (tokens.returns, _) = (
            old,
            ppo.returns_and_advantages(rewards, old, index, options),
        )
        ppo.critic_backward(critic, minibatch, tokens, options, world)
        optimizer.step(4e-3 * (1 - step / args.steps))
    errors["at the end"] = max(
        all_reduce([(values() - torch.tensor(truth)).abs().max().item()], "max")
    )
    if world.is_main:
        print(json.dumps(errors))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="fsdp")
    parser.add_argument("--steps", type=int, default=75)
    run(main, parser.parse_args())

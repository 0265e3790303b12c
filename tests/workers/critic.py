"""Run by torchrun: ppo.py's critic on an environment whose values are known in closed form.

Two prompts, responses of three fair coins with an observation token between them, every response once a step, so the
value of a state is the mean score of the responses that begin like it. Prints the largest error over all states.
"""

import argparse
import json
from itertools import product

import torch
from conftest import random_policy
from transformers import Qwen2Config

import ppo
from common.distributed import all_reduce, forward_context, init_world, run, wrap_model
from common.episodes import Episode
from common.models import Critic
from common.packing import TokenIndex, pack
from common.precision import LossScale, guarded_step

COINS = (5, 6)
OBSERVATION = 7


def score(prompt: int, coins: tuple[int, ...]) -> float:
    """Any function will do; this one is not linear in the coins."""
    heads = [coin == COINS[1] for coin in coins]
    return float(heads[0] and not heads[2]) + 0.5 * float(sum(heads) == 2) - 0.25 * prompt * float(heads[1])


def main(args: argparse.Namespace) -> None:
    world = init_world()
    config = Qwen2Config(
        vocab_size=16, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    episodes, truth = [], []
    for place, (prompt, coins) in enumerate(product((0, 1), product(COINS, repeat=3))):
        if prompt % world.size != world.rank:
            continue
        response = [coins[0], OBSERVATION, coins[1], coins[2]]
        mask = [1, 0, 1, 1]
        rewards = {"score": score(prompt, coins)}
        episodes.append(Episode(prompt, place, [1, 2 + prompt], response, mask, [0.0] * 4, "stop", rewards))
        for known in range(3):
            rest = product(COINS, repeat=3 - known)
            completions = [score(prompt, coins[:known] + tail) for tail in rest]
            truth.append(sum(completions) / len(completions))
    index = TokenIndex(episodes)
    scores = torch.tensor([e.rewards["score"] for e in episodes])
    rewards = ppo.token_rewards(episodes, scores, index)
    critic = Critic(random_policy(config, torch.float32).model.base_model, "sdpa")
    critic = wrap_model(critic, world, args.strategy, torch.float32)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=0.0)
    options = ppo.Args(model="", value_clip=0.5)
    batches = pack(episodes, range(len(episodes)), index, budget=40)
    counts = all_reduce([len(index), len(episodes)])

    def values() -> torch.Tensor:
        result = torch.full((len(index),), torch.nan)
        with torch.no_grad():
            for batch in batches:
                with forward_context(critic):
                    result[batch.tokens] = critic(batch)
        return result

    errors = {"at the start": max(map(abs, values().tolist()))}
    for step in range(args.steps):
        old = values()
        unknown = torch.zeros(len(index))
        returns = old + ppo.gae(rewards, old, index, 1.0, args.critic_lambda)
        lengths = index.lengths[index.episode_of_token].float()
        tokens = ppo.Tokens(index.episode_of_token, lengths, unknown, unknown, unknown, unknown, old, returns)
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - step / args.steps)
        ppo.critic_backward(critic, batches, tokens, options, world, counts)
        guarded_step(critic, optimizer, 1.0, LossScale.for_dtype(torch.float32))
    errors["at the end"] = max(all_reduce([(values() - torch.tensor(truth)).abs().max().item()], "max"))
    if world.is_main:
        print(json.dumps(errors))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="fsdp")
    parser.add_argument("--critic-lambda", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=150)
    run(main, parser.parse_args())

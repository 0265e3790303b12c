"""Run by torchrun: the GRPO gradient of fixed episodes, split over ranks and micro-batches in many ways.

Prints one JSON object on rank 0: {variant: relative L2 distance from the one-process, one-episode-at-a-time gradient}.
"""

import argparse
import json

import torch
from conftest import random_episodes, random_policy, relative_l2
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config

import grpo
from common.distributed import all_reduce, forward_context, init_world, run, unwrap, wrap_model
from common.packing import TokenIndex, pack

COMMON = {"model": "", "temperature": 0.9, "clip_high": 0.3, "entropy_coef": 0.1, "max_response_tokens": 20}
VARIANTS = {
    "dapo": grpo.Args(**COMMON),
    "grpo": grpo.Args(**COMMON, reduction="grpo", kl_in="loss", kl_estimator="k3-is"),
    "dr_grpo": grpo.Args(**COMMON, reduction="dr_grpo", advantage="batch-std", correction="sequence"),
    "gspo": grpo.Args(**COMMON, reduction="grpo", objective="gspo", advantage="rloo", correction="mask"),
    "cispo": grpo.Args(**COMMON, objective="cispo", correction="truncate", kl_in="loss", kl_estimator="k2"),
}

LAYOUTS = {
    "shared": {},
    "unshared": {"share_prompts": False},
    "padded": {"share_prompts": False, "multiple": 40},
    "backwards": {"backwards": True},
    "checkpointing": {},
}


def gradient(policy, world, episodes, args: grpo.Args, backwards: bool = False, **pack_options) -> list[torch.Tensor]:
    """By grpo.py's own `backward`: local episodes, global counts, factor world.size."""
    dtype = next(policy.parameters()).dtype
    index = TokenIndex(episodes)
    scores = torch.tensor([e.rewards["score"] for e in episodes], dtype=torch.float64)
    groups = torch.tensor([e.prompt_index for e in episodes], dtype=torch.int64)
    advantages = grpo.group_advantages(scores, groups, args.advantage)[index.episode_of_token]
    rollout = torch.tensor([lp for e in episodes for lp, m in zip(e.logprobs, e.loss_mask) if m], dtype=dtype)
    lengths = index.lengths[index.episode_of_token].to(dtype)
    old, ref = rollout.clone(), rollout + 0.2 * torch.cos(7 * rollout)
    tokens = grpo.Tokens(index.episode_of_token, lengths, rollout, old, ref, advantages.to(dtype))
    batches = pack(episodes, range(len(episodes))[:: -1 if backwards else 1], index, **pack_options)
    with torch.no_grad():  # old log-probs near the current ones, so that some ratios are clipped and most are not
        for batch in batches:
            with forward_context(policy):
                near = policy(batch, args.temperature)[0]
            tokens.old_logprobs[batch.tokens] = near + 0.3 * torch.sin(10 * rollout[batch.tokens])
            tokens.ref_logprobs[batch.tokens] = near + 0.2 * torch.cos(7 * rollout[batch.tokens])
    counts = all_reduce([len(index), (index.lengths > 0).sum()])
    grpo.backward(policy, batches, tokens, args, world, counts, on_policy=False, kl_coef=0.05)
    return [full(p.grad) for p in unwrap(policy).parameters()]


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main(args: argparse.Namespace) -> None:
    world = init_world()
    dtype = getattr(torch, args.dtype)
    config = Qwen2Config(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    episodes = random_episodes(11, prompts=5)
    for episode in episodes:
        if episode.prompt_index == 2:
            episode.rewards["score"] = 1.0  # a zero-variance group: no gradient, but its tokens count
    owners = {
        "even": lambda e: e.prompt_index % world.size,
        "rank 0 has all": lambda e: 0,
    }
    if args.single:
        local = random_policy(config, dtype)
        for name, options in VARIANTS.items():
            local.zero_grad()
            reference = gradient(local, world, episodes, options, budget=1, share_prompts=False)
            torch.save(reference, f"{args.folder}/{name}.pt")
        return
    distances = {}
    for strategy in ("fsdp", "ddp"):
        policy = random_policy(config, dtype)
        policy = wrap_model(policy, world, strategy, dtype)
        for name, owner in owners.items():
            mine = [e for e in episodes if owner(e) == world.rank]
            for budget in args.budgets:
                for layout, pack_options in LAYOUTS.items():
                    checkpointing = layout == "checkpointing"
                    model = unwrap(policy).model
                    getattr(model, f"gradient_checkpointing_{'enable' if checkpointing else 'disable'}")()
                    for variant, options in VARIANTS.items():
                        policy.zero_grad()
                        got = gradient(policy, world, mine, options, budget=budget, **pack_options)
                        reference = torch.load(f"{args.folder}/{variant}.pt")
                        key = f"{strategy}, {name}, budget {budget}, {layout}, {variant}"
                        distances[key] = relative_l2(got, reference)
    if world.is_main:
        print(json.dumps(distances))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder")
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--budgets", type=int, nargs="+", default=[45, 10_000])
    parser.add_argument("--single", action="store_true")
    run(main, parser.parse_args())

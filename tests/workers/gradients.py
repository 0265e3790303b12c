"""Run by torchrun: gradients of fixed episodes, of policy and critic, split over ranks and
micro-batches in many ways.

Prints one JSON object on rank 0: {variant: relative L2 distance from the one-process,
one-episode-at-a-time gradient}.
"""

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path

import torch
from episodes import random_episodes
from forks import FLAGS, fork_advantages, fork_args, load_fork
from helpers import make_args, random_policy, relative_l2
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config

import distill
import grpo
import ppo
from common.distributed import (
    all_reduce,
    average_whole_gradients,
    forward_context,
    init_world,
    make_mesh,
    repeated_blocks,
    wrap_model,
)
from common.flags import Machine
from common.lora import adapted_layers, add_adapters
from common.packing import Layout, Minibatch, TokenIndex, pack
from common.script import run
from common.teacher import Predictor
from ppo import Critic

COMMON = {"temperature": 0.9, "clip_high": 0.3, "entropy_coef": 0.1, "max_response_tokens": 20}
VARIANTS = {
    "dapo": make_args(grpo, **COMMON),
    "grpo": make_args(grpo, **COMMON, reduction="grpo", kl_loss_coef=0.05, kl_estimator="k3-is"),
    "dr_grpo": make_args(
        grpo, **COMMON, reduction="dr_grpo", advantage="batch-std", correction="sequence"
    ),
    "gspo": make_args(
        grpo, **COMMON, reduction="grpo", objective="gspo", advantage="rloo", correction="mask"
    ),
    "cispo": make_args(grpo, **COMMON, objective="cispo", correction="truncate", kl_loss_coef=0.05),
    "ppo": make_args(ppo, **COMMON, gae_lambda=0.9),
    "critic": make_args(ppo, **COMMON, reduction="grpo"),
    "jsd": make_args(distill, temperature=0.9, divergence="jsd", jsd_beta=0.3),
    "sampled": make_args(distill, temperature=0.9, estimator="sampled", clip_high=0.3),
}

LAYOUTS = {
    "shared": {},
    "unshared": {"layout": Layout(share_prompts=False)},
    "padded": {"layout": Layout(share_prompts=False, multiple=40)},
    "backwards": {"backwards": True},
    "checkpointing": {},
}


def gradient(
    models, world, episodes, variant: str, backwards: bool = False, **pack_options
) -> list[torch.Tensor]:
    """By the scripts' own `backward` and `critic_backward`, or those of a fork: local episodes,
    global counts, factor world.size."""
    args, model = VARIANTS[variant], models["critic" if variant == "critic" else "policy"]
    script = sys.modules[type(args).__module__]
    kind = Path(script.__file__).stem  # the script that it is, or is a fork of
    dtype = next(model.parameters()).dtype
    index = TokenIndex(episodes)
    scores = torch.tensor([e.score for e in episodes], dtype=torch.float64)
    rollout = torch.tensor(
        [lp for e in episodes for lp, m in zip(e.logprobs, e.loss_mask) if m], dtype=dtype
    )
    lengths = index.lengths[index.episode_of_token].to(dtype)
    common = (index.episode_of_token, lengths, rollout, rollout.clone(), rollout.clone())
    if kind == "distill":
        is_sampled = torch.ones(len(index), dtype=torch.bool)
        num_columns = len(fields(script.Tokens)) - 1
        tokens = script.Tokens(is_sampled, *(rollout.clone() for _ in range(num_columns)))
        if hasattr(tokens, "advantages"):  # of a fork
            advantages = script.score_advantages(episodes)
            tokens.advantages = advantages[index.episode_of_token].to(dtype)
    elif kind == "ppo":
        rewards, values = script.token_rewards(scores, index, episodes), rollout.double().sin()
        returns, advantages = script.returns_and_advantages(rewards, values, index, args)
        tokens = script.Tokens(*common, *(x.to(dtype) for x in (advantages, values, returns)))
    else:
        advantages = fork_advantages(script, args, episodes, index)
        num_columns = len(fields(script.Tokens)) - 1  # curiosity_rl.py has no reference
        tokens = script.Tokens(*common[:num_columns], advantages.to(dtype))
    batches = pack(episodes, range(len(episodes))[:: -1 if backwards else 1], index, **pack_options)
    counts = all_reduce([len(index), (index.lengths > 0).sum()])
    minibatch = Minibatch([], *counts, batches, teacher_batches=batches)
    if variant == "critic":
        script.critic_backward(model, minibatch, tokens, args, world)
        return gradients_of(model)
    # old log-probs near the current ones, so that some ratios are clipped and most are not
    with torch.no_grad():
        for batch in batches:
            with forward_context(model):
                near = model(batch, args.rollout.temperature)[0]
            of_rollout = rollout[batch.token_index]
            tokens.old_logprobs[batch.token_index] = near + 0.3 * torch.sin(10 * of_rollout)
            far = near + 0.2 * torch.cos(7 * of_rollout)
            if kind == "distill":
                tokens.teacher_logprobs[batch.token_index] = far
            elif kind != "curiosity_rl":
                tokens.ref_logprobs[batch.token_index] = far
    if kind == "distill":
        pair = torch.nn.ModuleList([model, models["teacher"]])
        script.backward(
            pair, minibatch, tokens, args, world, first_epoch=True, store_old_logprobs=False
        )
        return gradients_of(model)
    script.backward(model, minibatch, tokens, args, world, store_old_logprobs=False)
    return gradients_of(model)


def gradients_of(model) -> list[torch.Tensor]:
    average_whole_gradients(model)  # of adapters; all others have been
    return [full(p.grad) for p in model.parameters() if p.requires_grad]


def make_models(
    config, dtype: torch.dtype, lora: bool, mesh: DeviceMesh | None = None
) -> dict[str, torch.nn.Module]:
    """Models, sharded over a mesh. As in `load_model` the adapters come after that, and are whole,
    as is then a critic's head."""
    policies = [Predictor(random_policy(config, dtype, i).model, "sdpa") for i in (0, 1, 2)]
    critic = Critic(policies[1].model.base_model, "sdpa")
    torch.nn.init.normal_(critic.head, generator=torch.Generator().manual_seed(1))
    teacher = policies[2].requires_grad_(False)
    if mesh:
        wrap_model(teacher, mesh, dtype)
    models = {"policy": policies[0], "critic": critic}
    for model in models.values():
        layers = repeated_blocks(model)
        if mesh:
            wrap_model(model, mesh, dtype, shards_own_parameters=not lora)
        if lora:
            add_adapters(model.model, layers, Machine(lora_rank=4, lora_alpha=8.0))
        for _, layer in adapted_layers(model):
            layer.lora_B.data.normal_(std=0.1, generator=torch.Generator().manual_seed(2))
    return models | {"teacher": teacher}


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def in_pairs(strategy: str | int, owner: str, cut: bool, layout: str, variant: str) -> bool:
    """An eighth of all combinations, in which any two settings of two things still meet."""
    i, j = list(LAYOUTS).index(layout), list(VARIANTS).index(variant)
    settings = (strategy == "ddp", owner == "even", cut)
    return settings == ((i + j) % 2, (i // 2 + j) % 2, (i + j // 2) % 2)


def main(args: argparse.Namespace) -> None:
    world = init_world()
    if args.forks:
        VARIANTS.clear()
        for name in FLAGS:
            VARIANTS[name] = fork_args(name, load_fork(name, Path(args.forks)))
        args.variants = [*VARIANTS]
    dtype = getattr(torch, args.dtype)
    config = Qwen2Config(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    episodes = random_episodes(11, prompts=5)
    for episode in episodes:
        if episode.prompt_index == 2:
            # a zero-variance group: no gradient, but its tokens count
            episode.score = 1.0
    owners = {
        "even": lambda e: e.prompt_index % world.size,
        "rank 0 has all": lambda e: 0,
    }
    if args.single:
        for variant in args.variants:
            reference = gradient(
                make_models(config, dtype, args.lora),
                world,
                episodes,
                variant,
                budget=1,
                layout=Layout(share_prompts=False),
            )
            torch.save(reference, f"{args.folder}/{variant}.pt")
        return
    distances = {}
    for strategy in ("ddp", *args.shard_sizes):
        mesh = make_mesh(world, "ddp") if strategy == "ddp" else make_mesh(world, "fsdp", strategy)
        models = make_models(config, dtype, args.lora, mesh)
        for name, owner in owners.items():
            mine = [e for e in episodes if owner(e) == world.rank]
            for budget in args.budgets:
                for layout, pack_options in LAYOUTS.items():
                    checkpointing = layout == "checkpointing"
                    for model in models.values():
                        backbone = model.model
                        getattr(
                            backbone,
                            f"gradient_checkpointing_{'enable' if checkpointing else 'disable'}",
                        )()
                    for variant in args.variants:
                        first = ("ddp", "even", args.budgets[0], "shared")
                        if args.one and (strategy, name, budget, layout) != first:
                            continue
                        if args.pairs and not in_pairs(
                            strategy, name, budget == args.budgets[0], layout, variant
                        ):
                            continue
                        for model in models.values():
                            model.zero_grad()
                        got = gradient(models, world, mine, variant, budget=budget, **pack_options)
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
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--variants", nargs="+", default=[*VARIANTS])
    parser.add_argument("--forks")  # folder of patched scripts: their variants, and no others
    parser.add_argument("--one", action="store_true")  # of all combinations only the first
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--shard-sizes", type=int, nargs="+", default=[0])  # of FSDP2; 0: all ranks
    run(main, parser.parse_args())

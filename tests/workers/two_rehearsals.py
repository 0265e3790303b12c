"""Run by torchrun: memory runs out in a rehearsal, on all ranks, then on the last one alone.

Rank 0 prints one JSON object: the tokens of the micro-batches of each attempt on all ranks, and how
far the gradients of fixed episodes are afterwards from those before. The second rehearsal ends the
run.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from episodes import random_episodes
from helpers import random_policy, relative_l2
from transformers import Qwen2Config

import sft
from common import rehearsal
from common.distributed import gather_objects, init_world, make_mesh, wrap_model
from common.flags import Rollout
from common.optimizer import GuardedAdamW
from common.packing import Packer
from common.script import run

ROLLOUT = Rollout(
    prompts_per_step=99, samples_per_prompt=2, max_prompt_tokens=16, max_response_tokens=24
)


def gradients(policy, packer, world) -> list[torch.Tensor]:
    minibatch = sft.one_minibatch(packer, random_episodes(world.rank))
    sft.backward(policy, minibatch, world)
    shards = [p.grad.to_local().clone() for p in policy.parameters()]
    policy.zero_grad()
    return shards


def main(folder: Path) -> None:
    world = init_world()
    mesh = make_mesh(world, "fsdp")
    config = Qwen2Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    policy = wrap_model(random_policy(config, torch.float32), mesh, torch.float32)
    adamw = GuardedAdamW(policy, torch.float32, weight_decay=0.0, max_grad_norm=1.0)
    job = SimpleNamespace(
        world=world, mesh=mesh, memory_plan=SimpleNamespace(free_gb=9.0, update_gb=1.0)
    )
    packer = Packer("sdpa", 256, folder, world)
    before = gradients(policy, packer, world)

    out_of_memory = range(world.size)
    attempts: list[int] = []

    def check(_module, grads) -> None:
        if grads[0].shape[1] > 64 and world.rank in out_of_memory:
            raise torch.OutOfMemoryError("injected")

    hook = policy.model.model.layers[1].register_full_backward_pre_hook(check)
    for _ in range(2):
        rehearsed = rehearsal.Rehearsal(job, packer, ROLLOUT, [adamw])
        while rehearsed.is_due:
            with rehearsed.attempt() as minibatch:
                attempts.append(minibatch.micro_batches[0].input_ids.numel())
                sft.backward(policy, minibatch, world)
        hook.remove()
        result = {
            "attempts": gather_objects(attempts),
            "moments": len(adamw.optimizer.state),
            "gradients": [p.grad for p in policy.parameters() if p.grad is not None],
            "distance": max(gather_objects(relative_l2(gradients(policy, packer, world), before))),
        }
        if world.is_main:
            print(json.dumps(result), flush=True)
        hook = policy.model.model.layers[1].register_full_backward_pre_hook(check)
        packer.budget = 256
        out_of_memory = [world.size - 1]


if __name__ == "__main__":
    rehearsal.is_worthwhile = lambda device: True
    rehearsal.PATIENCE_S = 1.0
    run(main, Path(sys.argv[1]))

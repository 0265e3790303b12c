"""OpenRLHF's PolicyLoss with the normalizers of its actor's `ppo_train`, under python or
`torchrun --nproc_per_node 2`.

What is ours: log-probs, and what DeepSpeed does: it divides each loss by the number of
micro-batches of a step, adds up gradients and averages them over ranks.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
from answers import answer, compare_advantages, print_answers
from batch import OBJECTIVES, SAMPLES, SEQUENCES, Batch, Split, frozen_batch
from oracle import group_advantages
from torch import Tensor

RANK = int(os.environ.get("RANK", "0"))
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
(OPENRLHF,) = find_spec("openrlhf").submodule_search_locations
sys.modules["deepspeed"] = ModuleType("deepspeed")  # models/utils.py imports it for other functions


def load(name: str) -> ModuleType:
    """A module of OpenRLHF without the packages above it, which import DeepSpeed and flash-attn."""
    parts = name.split(".")[:-1]
    for depth in range(1, len(parts) + 1):
        package = ModuleType(".".join(parts[:depth]))
        package.__path__ = [str(Path(OPENRLHF, *parts[1:depth]))]
        sys.modules[package.__name__] = package
    return importlib.import_module(name)


PolicyLoss = load("openrlhf.models.loss").PolicyLoss
loss_utils = load("openrlhf.utils.loss_utils")


def ask(batch: Batch, name: str, split: Split) -> tuple[float, Tensor] | str:
    objective = OBJECTIVES[name]
    if len(split) != RANKS:
        return "asked with another number of processes"
    if objective.mean == "constant":
        return "no constant length in its aggregate_loss"
    if objective.loss == "cispo":
        return "--actor.policy_loss_type is ppo or gspo"
    policy_loss = PolicyLoss(
        clip_eps_low=objective.clip_low,
        clip_eps_high=objective.clip_high,
        dual_clip=objective.dual_clip or None,
        policy_loss_type=objective.loss,
        # --actor.loss_agg_mode
        token_level_loss=objective.mean == "tokens",
    )
    micro_batches = split[RANK]
    scaled = name != "Dr. GRPO"
    advantages = torch.tensor(group_advantages(batch, scaled), dtype=torch.float64)
    table = batch.table.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for sequences, loss_batch_info, accumulation in with_normalizers(batch, micro_batches):
        ids, masks, _ = batch.padded(sequences)
        width = ids.shape[1]
        loss, *_ = policy_loss(
            batch.logprobs(table, sequences),
            batch.old_logprobs[sequences, :width],
            advantages[sequences, None].expand(-1, width),
            action_mask=masks,
            **loss_batch_info,
        )
        loss = loss / accumulation  # DeepSpeed
        loss.backward()
        total += loss.detach()
    if RANKS > 1:  # DeepSpeed's average
        dist.all_reduce(table.grad)
        dist.all_reduce(total)
    return total.item() / RANKS, table.grad / RANKS


def with_normalizers(
    batch: Batch, micro_batches: list[list[int]]
) -> Iterator[tuple[list[int], dict, int]]:
    """(sequences, normalizers, DeepSpeed's gradient_accumulation_steps) of each micro-batch.

    As `ppo_train` pairs them; those of unequal sizes as `setup_dynamic_batch` and `training_step`
    do with --train.dynamic_batch_enable, where DeepSpeed does not accumulate.
    """
    strategy = SimpleNamespace(ds_device_mesh=None)
    count = len(micro_batches)
    if len({len(sequences) for sequences in micro_batches}) == 1:
        normalized = loss_utils.iter_grad_accum_global_norm(
            micro_batches, strategy, count, mask_fn=lambda sequences: batch.padded(sequences)[1]
        )
        for sequences, loss_batch_info in normalized:
            yield sequences, loss_batch_info, count
        return
    buffer = SimpleNamespace(
        dynamic_batch_num_tokens=[float(sum(map(sum, batch.masks)))] * count,
        dynamic_global_batch_size=[float(SEQUENCES)] * count,
    )
    for step, sequences in enumerate(micro_batches):
        _, masks, _ = batch.padded(sequences)
        loss_batch_info = loss_utils.get_loss_batch_info(
            strategy, masks, replay_buffer=buffer, step=step, dynamic_batch=True
        )
        yield sequences, loss_batch_info, 1


def advantages(batch: Batch) -> dict[str, float]:
    """The line of `group_norm` in openrlhf/trainer/ppo_utils/experience_maker.py."""
    rewards = torch.tensor(batch.scores).reshape(-1, SAMPLES)
    rewards = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-9)
    return compare_advantages(batch, rewards.flatten().double())


if __name__ == "__main__":
    if RANKS > 1:
        dist.init_process_group("gloo")
    results = {"objectives": answer(ask)}
    if RANKS == 1:
        results["advantages"] = advantages(frozen_batch())
    print_answers("OpenRLHF", ["openrlhf", "torch"], **results)
    if RANKS > 1:
        dist.destroy_process_group()

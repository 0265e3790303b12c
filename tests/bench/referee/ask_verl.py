"""verl's policy losses with its aggregation, and its distillation losses, as its FSDP engine and
`ppo_loss` call them.

What is ours: log-probs, and the loop over micro-batches of `forward_backward_batch`
(verl/workers/engine/fsdp/transformer_impl.py), which sums tokens over all ranks, adds up the
gradients of micro-batches and leaves the average over ranks to FSDP.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from answers import (
    answer,
    answer_divergences,
    averaged_over_ranks,
    compare_advantages,
    print_answers,
)
from batch import LONGEST, OBJECTIVES, SEQUENCES, WORDS, Batch, Split, frozen_batch
from oracle import group_advantages
from torch import Tensor
from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk
from verl.trainer.ppo.core_algos import agg_loss, compute_grpo_outcome_advantage, get_policy_loss_fn
from verl.workers.config import DistillationLossConfig, FSDPActorConfig

AGGREGATIONS = {
    "tokens": "token-mean",
    "sequences": "seq-mean-token-mean",
    "constant": "seq-mean-token-sum-norm",
}
NO_DUAL_CLIP = 1e9  # it has no switch


def global_batch_info(batch: Batch, split: Split, loss_scale_factor: int | None) -> dict:
    """Of the whole mini-batch, as `ppo_loss` fills it in (verl/workers/utils/losses.py)."""
    return {
        "dp_size": len(split),
        "batch_num_tokens": sum(map(sum, batch.masks)),
        "global_batch_size": SEQUENCES,
        "loss_scale_factor": loss_scale_factor,
    }


def ask(batch: Batch, name: str, split: Split, by_default: bool = False) -> tuple[float, Tensor]:
    """by_default: without a `loss_scale_factor`, and GSPO with the aggregation of all losses."""
    objective = OBJECTIVES[name]
    loss_fn = get_policy_loss_fn({"ppo": "vanilla"}.get(objective.loss, objective.loss))
    loss_scale_factor = None if by_default else LONGEST
    loss_agg_mode = AGGREGATIONS[objective.mean]
    if by_default and objective.loss == "gspo":
        loss_agg_mode = "token-mean"
    config = FSDPActorConfig(
        ppo_micro_batch_size_per_gpu=1,
        rollout_n=8,
        clip_ratio_low=objective.clip_low,
        clip_ratio_high=objective.clip_high,
        clip_ratio_c=objective.dual_clip or NO_DUAL_CLIP,
        loss_agg_mode=loss_agg_mode,
        loss_scale_factor=loss_scale_factor,
    )
    config.global_batch_info.update(global_batch_info(batch, split, loss_scale_factor))
    scaled = name != "Dr. GRPO"
    advantages = torch.tensor(group_advantages(batch, scaled), dtype=torch.float64)

    def loss_of(table: Tensor, sequences: list[int], split: Split, rank: int) -> Tensor:
        ids, masks, _ = batch.padded(sequences)
        width = ids.shape[1]
        loss, _ = loss_fn(
            old_log_prob=batch.old_logprobs[sequences, :width],
            log_prob=batch.logprobs(table, sequences),
            advantages=advantages[sequences, None].expand(-1, width),
            response_mask=masks.bool(),
            loss_agg_mode=config.loss_agg_mode,
            config=config,
        )
        return loss

    return averaged_over_ranks(batch, split, loss_of)


def ask_divergence(
    batch: Batch, kind: str, beta: float, split: Split, clamps: bool = False
) -> tuple[float, Tensor] | str:
    """`forward_kl_topk`, of all words, as a supervised loss. clamps: with the two of
    DistillationLossConfig, of log-probs from below and of a token's loss from above."""
    if kind != "forward-kl":
        return "forward_kl_topk is its only divergence of distributions"
    without = {} if clamps else {"log_prob_min_clamp": None, "loss_max_clamp": None}
    loss_config = DistillationLossConfig(
        loss_mode="forward_kl_topk", topk=WORDS, use_policy_gradient=False, **without
    )
    config = SimpleNamespace(distillation_loss=loss_config)

    def loss_of(table: Tensor, sequences: list[int], split: Split, rank: int) -> Tensor:
        ids, masks, present = batch.padded(sequences)
        width = ids.shape[1]
        teacher_logits = batch.teacher_table[sequences, :width] @ batch.head.T
        top = teacher_logits.log_softmax(-1).topk(WORDS)
        flat = present.bool()
        outputs = compute_forward_kl_topk(
            student_logits=(table[sequences, :width] @ batch.head.T)[flat][None],
            teacher_topk_log_probs=nested(top.values, present),
            teacher_topk_ids=nested(top.indices, present),
            config=config,
            data_format="thd",
        )
        losses = torch.zeros(masks.shape, dtype=torch.float64)
        losses = losses.masked_scatter(flat, outputs["distillation_losses"].double())
        # verl/trainer/distillation/losses.py: `compute_forward_kl_topk`, `distillation_loss`
        losses = losses.clamp_min(0.0)
        if loss_config.loss_max_clamp is not None:
            losses = losses.clamp(-loss_config.loss_max_clamp, loss_config.loss_max_clamp)
        return agg_loss(
            loss_mat=losses,
            loss_mask=masks.bool(),
            loss_agg_mode="token-mean",
            **global_batch_info(batch, split, None),
        )

    return averaged_over_ranks(batch, split, loss_of)


def nested(values: Tensor, present: Tensor) -> Tensor:
    rows = [row[: int(n)] for row, n in zip(values, present.sum(1))]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def advantages(batch: Batch) -> dict[str, float]:
    """The reward stands at the last token."""
    _, masks, _ = batch.padded(list(range(SEQUENCES)))
    rewards = torch.zeros(masks.shape)
    rewards[:, -1] = torch.tensor(batch.scores)
    values, _ = compute_grpo_outcome_advantage(
        token_level_rewards=rewards,
        response_mask=torch.ones_like(masks),
        index=np.array(batch.groups),
    )
    return compare_advantages(batch, values[:, 0].double())


if __name__ == "__main__":
    print_answers(
        "verl",
        ["verl", "torch"],
        objectives=answer(ask),
        variants={
            "verl, default scale": answer(partial(ask, by_default=True), ["Dr. GRPO"]),
            "verl, default aggregation": answer(partial(ask, by_default=True), ["GSPO"]),
        },
        divergences={
            "verl": answer_divergences(ask_divergence),
            "verl, default clamps": answer_divergences(partial(ask_divergence, clamps=True)),
        },
        advantages=advantages(frozen_batch()),
    )

"""Liger's LigerFusedLinearGRPOLoss on a CPU, uncompiled.

Liger has no trainer. The loop is TRL's: what is a mean over a micro-batch is divided by their
number (lines 3153 to 3167 of TRL 1.16's grpo_trainer.py), and losses that take one get the number
of items of all ranks' micro-batches.
"""

from functools import partial

import torch
from answers import answer, answer_divergences, averaged_over_ranks, print_answers
from batch import LONGEST, OBJECTIVES, Batch, Split
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss, LigerFusedLinearJSDLoss
from oracle import group_advantages
from torch import Tensor

UNEQUAL_SIZES = "its mean is that of a micro-batch, and in TRL's loop all have one size"
LOSS_TYPES = {"tokens": "dapo", "sequences": "grpo", "constant": "dr_grpo"}


def has_unequal_sizes(split: Split) -> bool:
    return len({len(sequences) for micro_batches in split for sequences in micro_batches}) > 1


def ask(
    batch: Batch, name: str, split: Split, by_default: bool = False
) -> tuple[float, Tensor] | str:
    """by_default: without `num_items_in_batch`."""
    objective = OBJECTIVES[name]
    cispo = objective.loss == "cispo"
    criterion = LigerFusedLinearGRPOLoss(
        beta=0.0,
        compiled=False,
        use_ref_model=False,
        chunk_size=1,
        epsilon_low=objective.clip_low,
        # of cispo the bound itself, as in TRL
        epsilon_high=objective.clip_high + cispo,
        loss_type="cispo" if cispo else LOSS_TYPES[objective.mean],
        max_completion_length=LONGEST,
        importance_sampling_level="sequence" if objective.loss == "gspo" else "token",
        delta=objective.dual_clip or None,
    )
    scaled = name != "Dr. GRPO"
    advantages = torch.tensor(group_advantages(batch, scaled), dtype=torch.float64)
    num_items = torch.tensor(sum(map(sum, batch.masks)))

    def loss_of(table: Tensor, sequences: list[int], split: Split, rank: int) -> Tensor:
        ids, masks, _ = batch.padded(sequences)
        width = ids.shape[1]
        loss, _ = criterion(
            table[sequences, :width],
            batch.head,
            ids,
            masks,
            advantages[sequences],
            old_per_token_logps=batch.old_logprobs[sequences, :width],
            # it divides by the ranks of the process group, and there is none here
            num_items_in_batch=None if by_default else num_items / len(split),
        )
        has_global_count = objective.mean == "tokens" and not by_default
        return loss if has_global_count else loss / len(split[rank])

    if (objective.mean != "tokens" or by_default) and has_unequal_sizes(split):
        return UNEQUAL_SIZES
    return averaged_over_ranks(batch, split, loss_of)


def ask_divergence(
    batch: Batch, kind: str, beta: float, split: Split
) -> tuple[float, Tensor] | str:
    """It has no number of items: a loss is the mean over a micro-batch."""
    if has_unequal_sizes(split):
        return UNEQUAL_SIZES
    beta = {"reverse-kl": 1.0, "forward-kl": 0.0}.get(kind, beta)
    criterion = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, compiled=False
    )

    def loss_of(table: Tensor, sequences: list[int], split: Split, rank: int) -> Tensor:
        ids, masks, _ = batch.padded(sequences)
        places = sequences, slice(ids.shape[1])
        labels = ids.masked_fill(masks == 0, -100)
        loss = criterion(
            table[places].flatten(0, 1),
            batch.head,
            batch.teacher_table[places].flatten(0, 1),
            batch.head,
            labels.flatten(),
        )
        return loss / len(split[rank])

    return averaged_over_ranks(batch, split, loss_of)


if __name__ == "__main__":
    tokens = [name for name, objective in OBJECTIVES.items() if objective.mean == "tokens"]
    print_answers(
        "Liger",
        ["liger-kernel", "torch"],
        objectives=answer(ask),
        variants={"Liger, no num_items": answer(partial(ask, by_default=True), tokens)},
        divergences={"Liger": answer_divergences(ask_divergence)},
    )

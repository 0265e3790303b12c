"""grpo.py's `backward` and distill.py's, on real packs of `common.packing`."""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from answers import answer, answer_divergences, compare_advantages, print_answers  # noqa: E402
from batch import LONGEST, OBJECTIVES, SEQUENCES, Batch, Split, frozen_batch  # noqa: E402
from helpers import make_args  # noqa: E402
from oracle import group_advantages  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import distill  # noqa: E402
import grpo  # noqa: E402
from common.distributed import World  # noqa: E402
from common.divergence import Prediction, compare  # noqa: E402
from common.logprobs import LogitTransform, token_logprobs  # noqa: E402
from common.packing import MicroBatch, Minibatch, TokenIndex, pack  # noqa: E402
from common.types import Episode  # noqa: E402

REDUCTIONS = {"tokens": "dapo", "sequences": "grpo", "constant": "dr_grpo"}


class TablePolicy(nn.Module):
    """A policy whose hidden states are a table. It reads packs: a prompt is a sequence's number,
    and positions count from it."""

    def __init__(self, table: Tensor, head: Tensor):
        super().__init__()
        self.table = nn.Parameter(table.clone())
        self.register_buffer("head", head)

    def forward(
        self, batch: MicroBatch, temperature: float, teacher=None, terms=None, as_teacher=False
    ):
        ids, positions = batch.input_ids[0], batch.position_ids[0]
        starts = positions == 0
        sequences = ids[starts][starts.cumsum(0) - 1]
        hidden = self.table[sequences, positions][batch.hidden_index]
        if as_teacher or teacher:
            own = Prediction(hidden, self.head, LogitTransform(), temperature)
            return own if as_teacher else compare(own, teacher, batch.targets, terms)
        return token_logprobs(hidden, self.head, batch.targets, temperature)


def episodes_of(batch: Batch) -> list[Episode]:
    episodes = []
    for s, (ids, mask) in enumerate(zip(batch.ids, batch.masks)):
        logprobs = batch.old_logprobs[s, : len(ids)].tolist()
        episodes.append(Episode(batch.groups[s], s, [s], ids, mask, logprobs, "stop"))
        episodes[-1].score = batch.scores[s]
    return episodes


def minibatch_of(episodes: list[Episode], index: TokenIndex, micro_batches) -> Minibatch:
    batches = []
    for sequences in micro_batches:
        batches += pack(episodes, sequences, index, budget=10**6)
    counts = float(len(index)), float(SEQUENCES)
    return Minibatch([], *counts, micro_batches=batches, teacher_batches=batches)


def ask(batch: Batch, name: str, split: Split) -> tuple[float, Tensor]:
    objective = OBJECTIVES[name]
    args = make_args(
        grpo,
        objective=objective.loss,
        reduction=REDUCTIONS[objective.mean],
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        dual_clip=objective.dual_clip,
        max_response_tokens=LONGEST,
    )
    episodes = episodes_of(batch)
    index = TokenIndex(episodes)
    owner = index.episode_of_token
    masks = [torch.tensor(mask, dtype=torch.bool) for mask in batch.masks]
    old = torch.cat([row[: len(mask)][mask] for row, mask in zip(batch.old_logprobs, masks)])
    scaled = name != "Dr. GRPO"
    advantages = torch.tensor(group_advantages(batch, scaled), dtype=torch.float64)
    lengths = index.lengths[owner].double()
    tokens = grpo.Tokens(owner, lengths, old, old.clone(), old, advantages[owner])
    policy = TablePolicy(batch.table, batch.head)
    loss = 0.0
    for rank, micro_batches in enumerate(split):
        world = World(rank, len(split), rank, torch.device("cpu"))
        minibatch = minibatch_of(episodes, index, micro_batches)
        means = grpo.backward(policy, minibatch, tokens, args, world, store_old_logprobs=False)
        loss += float(means.sums["policy/loss"]) / len(split)
    return loss, policy.table.grad / len(split)


def ask_divergence(batch: Batch, kind: str, beta: float, split: Split) -> tuple[float, Tensor]:
    args = make_args(distill, divergence=kind, jsd_beta=beta if kind == "jsd" else 0.5)
    episodes = episodes_of(batch)
    index = TokenIndex(episodes)
    columns = (torch.zeros(len(index), dtype=torch.float64) for _ in range(4))
    tokens = distill.Tokens(torch.ones(len(index), dtype=torch.bool), *columns)
    teacher = TablePolicy(batch.teacher_table, batch.head).requires_grad_(False)
    models = nn.ModuleList([TablePolicy(batch.table, batch.head), teacher])
    loss = 0.0
    for rank, micro_batches in enumerate(split):
        world = World(rank, len(split), rank, torch.device("cpu"))
        minibatch = minibatch_of(episodes, index, micro_batches)
        means = distill.backward(
            models, minibatch, tokens, args, world, first_epoch=False, store_old_logprobs=False
        )
        loss += float(means.sums["policy/loss"]) / len(split)
    return loss, models[0].table.grad / len(split)


def advantages() -> dict[str, float]:
    batch = frozen_batch()
    scores = torch.tensor(batch.scores)
    ours = grpo.group_advantages(scores, torch.tensor(batch.groups), "group-std")
    return compare_advantages(batch, ours)


if __name__ == "__main__":
    print_answers(
        "this repository",
        ["torch"],
        objectives=answer(ask),
        divergences={"this repository": answer_divergences(ask_divergence)},
        advantages=advantages(),
    )

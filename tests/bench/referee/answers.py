"""What the programs that ask a library share: they print one JSON object, the answers of a library
to all objectives and splits."""

import json
import os
from collections.abc import Callable, Iterable
from importlib.metadata import version

import torch
from batch import DIVERGENCES, EQUAL_SCORES, OBJECTIVES, Batch, Split, frozen_batch, splits
from oracle import compare, definition, divergence, group_advantages
from torch import Tensor

# (table as a parameter, sequences of the micro-batch, split, rank) -> loss to be back-propagated
MicroBatchLoss = Callable[[Tensor, list[int], Split, int], Tensor]


def averaged_over_ranks(
    batch: Batch, split: Split, loss_of: MicroBatchLoss
) -> tuple[float, Tensor]:
    """(loss, gradient) of a split: sums over micro-batches, averaged over ranks as FSDP, DDP and
    DeepSpeed do. The ranks are played one after the other."""
    table = batch.table.clone().requires_grad_()
    total = 0.0
    for rank, micro_batches in enumerate(split):
        for sequences in micro_batches:
            loss = loss_of(table, sequences, split, rank)
            loss.backward()
            total += loss.item() / len(split)
    return total, table.grad / len(split)


def answer(
    ask: Callable[[Batch, str, Split], tuple[float, Tensor] | str],
    names: Iterable[str] = OBJECTIVES,
) -> dict[str, dict]:
    """{objective: {split: comparison, or why there is none}}."""
    batch = frozen_batch()
    results: dict[str, dict] = {}
    for name in names:
        reference = definition(batch, name)
        results[name] = {}
        for split_name, split in splits(batch).items():
            got = ask(batch, name, split)
            results[name][split_name] = got if isinstance(got, str) else compare(*got, reference)
    return results


def answer_divergences(
    ask: Callable[[Batch, str, float, Split], tuple[float, Tensor] | str],
) -> dict[str, dict]:
    """{divergence: {split: comparison, or why there is none}}."""
    batch = frozen_batch()
    results: dict[str, dict] = {}
    for name, (kind, beta) in DIVERGENCES.items():
        reference = divergence(batch, kind, beta)
        results[name] = {}
        for split_name, split in splits(batch).items():
            got = ask(batch, kind, beta, split)
            results[name][split_name] = got if isinstance(got, str) else compare(*got, reference)
    return results


def compare_advantages(batch: Batch, advantages: Tensor) -> dict[str, float]:
    """Of a library's advantages [S] from the scores: their relative difference, as a vector, in
    groups of unequal scores; their largest magnitude in those of equal ones."""
    expected = torch.tensor(group_advantages(batch), dtype=torch.float64)
    is_equal = torch.tensor([group in EQUAL_SCORES for group in batch.groups])
    error = (advantages - expected)[~is_equal].norm() / expected.norm()
    return {"difference": error.item(), "equal": advantages[is_equal].abs().max().item()}


def print_answers(library: str, packages: list[str], **results) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        versions = {package: version(package) for package in packages}
        print(json.dumps({"library": library, "versions": versions, **results}))

"""The frozen batch of tests/bench/referee: the scripts' losses and gradients are those of its
definitions, however it is split."""

import hashlib
import struct
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT

REFEREE = ROOT / "tests/bench/referee"
# sums of counts that are kept in float32
LOSS_BOUND = 1e-6


@pytest.fixture(scope="module")
def referee():
    """Its modules, the batch and the splits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(REFEREE)
        import answers
        import ask_ours
        import batch
        import oracle
    frozen = batch.frozen_batch()
    return SimpleNamespace(
        answers=answers,
        ours=ask_ours,
        batch_module=batch,
        oracle=oracle,
        batch=frozen,
        splits=batch.splits(frozen),
    )


def test_the_batch_is_frozen(referee):
    batch = referee.batch
    digest = hashlib.sha256()
    for ids, mask in zip(batch.ids, batch.masks):
        digest.update(bytes(ids) + bytes(mask))
    for values in (batch.scores, *(x.flatten().tolist() for x in (batch.table, batch.head))):
        digest.update(struct.pack(f"<{len(values)}d", *values))
    assert digest.hexdigest()[:16] == "7a72d633d2caa908"


def test_the_batch_reaches_every_branch(referee):
    """Lengths from 1 to 300, masks of several turns, equal scores, every clip on both sides."""
    batch = referee.batch
    lengths = [len(ids) for ids in batch.ids]
    assert min(lengths) == 1 and max(lengths) == 300
    assert sum(0 in mask for mask in batch.masks) > 20
    assert all(mask[0] == mask[-1] == 1 for mask in batch.masks)
    advantages = referee.oracle.group_advantages(batch)
    equal = [sum(a == 0 for a in advantages[i : i + 8]) for i in range(0, 64, 8)]
    assert equal.count(8) == 2
    for name in ("DAPO", "CISPO", "GSPO"):
        objective = referee.batch_module.OBJECTIVES[name]
        _, gradient = referee.oracle.definition(batch, name)
        moved = gradient.abs().sum(-1) > 0
        unclipped = objective._replace(clip_low=9.0, clip_high=9.0, dual_clip=0.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(referee.batch_module.OBJECTIVES, name, unclipped)
            _, without = referee.oracle.definition(batch, name)
        changed = (gradient != without).any(-1).sum()
        assert 100 < changed < moved.sum(), name
    _, single = referee.oracle.definition(batch, "DAPO")
    _, dual = referee.oracle.definition(batch, "DAPO, dual clip")
    assert (single != dual).any(-1).sum() > 10


def test_each_split_has_every_sequence_once(referee):
    for name, split in referee.splits.items():
        sequences = [s for rank in split for micro_batch in rank for s in micro_batch]
        assert sorted(sequences) == list(range(64)), name


def test_objectives_are_those_of_the_definitions(referee):
    for name in referee.batch_module.OBJECTIVES:
        reference = referee.oracle.definition(referee.batch, name)
        for split_name, split in referee.splits.items():
            answer = referee.oracle.compare(
                *referee.ours.ask(referee.batch, name, split), reference
            )
            assert answer["difference"] < 1e-12, (name, split_name)
            assert answer["loss"] < LOSS_BOUND, (name, split_name)


def test_divergences_are_those_of_the_definitions(referee):
    for name, (kind, beta) in referee.batch_module.DIVERGENCES.items():
        reference = referee.oracle.divergence(referee.batch, kind, beta)
        got = referee.ours.ask_divergence(
            referee.batch, kind, beta, referee.splits["2 ranks, sorted"]
        )
        answer = referee.oracle.compare(*got, reference)
        assert answer["difference"] < 1e-12, name
        assert answer["loss"] < LOSS_BOUND, name


def test_a_micro_batchs_own_count_would_be_seen(referee):
    """A mean of micro-batches' means: right for one, wrong for all others."""
    batch = referee.batch
    reference = referee.oracle.definition(batch, "DAPO")
    advantages = torch.tensor(referee.oracle.group_advantages(batch), dtype=torch.float64)

    def loss_of(table, sequences, split, rank):
        ids, masks, _ = batch.padded(sequences)
        old_logprobs = batch.old_logprobs[sequences, : ids.shape[1]]
        ratio = (batch.logprobs(table, sequences) - old_logprobs).exp()
        a = advantages[sequences, None]
        loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
        return (loss * masks).sum() / masks.sum() / len(split[rank])

    for split_name, split in referee.splits.items():
        got = referee.answers.averaged_over_ranks(batch, split, loss_of)
        difference = referee.oracle.compare(*got, reference)["difference"]
        if split_name == "1 × 64":
            assert difference < 1e-12
        else:
            assert difference > 0.01, split_name

"""One frozen batch, the objectives and the splits that every library is asked for.

Needs torch alone: the programs beside it run in environments without this repository's.

Names: S sequences, L tokens of the longest response, H numbers of a hidden state, V words.
"""

import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

GROUPS, SAMPLES, LONGEST = 8, 8, 300
HIDDEN, WORDS = 8, 64
SEQUENCES = GROUPS * SAMPLES
# groups of equal scores; neither number is one that float32 has
EQUAL_SCORES = {2: 0.1, 5: 0.7}


class Objective(NamedTuple):
    """What is clipped and what the sum is divided by; `dual_clip` 0: none."""

    loss: str  # ppo: the token's ratio; gspo: its sequence's; cispo: its weight
    mean: str  # tokens; sequences; constant: sequences times LONGEST
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0


OBJECTIVES = {
    "GRPO": Objective("ppo", "sequences", clip_high=0.2),
    "DAPO": Objective("ppo", "tokens"),
    "DAPO, dual clip": Objective("ppo", "tokens", dual_clip=3.0),
    "Dr. GRPO": Objective("ppo", "constant", clip_high=0.2),
    "CISPO": Objective("cispo", "tokens", clip_low=1.0),  # the paper has no lower bound
    "GSPO": Objective("gspo", "sequences", clip_low=0.03, clip_high=0.04),
}
DIVERGENCES = {  # (divergence, weight of the teacher in the mixture)
    "reverse KL": ("reverse-kl", 1.0),
    "forward KL": ("forward-kl", 0.0),
    "JSD 0.5": ("jsd", 0.5),
    "JSD 0.1": ("jsd", 0.1),
    "JSD 0.9": ("jsd", 0.9),
}


@dataclass
class Batch:
    """64 responses, each behind a prompt of one token, its number. Everything is float64.

    The parameter is `table` [S, 1 + L, H]: the hidden states of the prompt and of each token.
    Logits are table @ head.T; the state before a token predicts it.
    """

    ids: list[list[int]]  # [S] lists of 1 to L tokens
    masks: list[list[int]]  # 1: sampled, 0: an observation between two turns
    groups: list[int]  # [S]
    scores: list[float]  # [S]
    table: Tensor  # [S, 1 + L, H]
    teacher_table: Tensor  # [S, 1 + L, H]: of a teacher with the same head
    head: Tensor  # [V, H]
    old_logprobs: Tensor  # [S, L], 0 in the padding

    def padded(self, sequences: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """ids, loss mask and mask of all tokens, each [n, L'] int64, of some sequences, padded on
        the right."""
        longest = max(len(self.ids[s]) for s in sequences)
        ids, masks, present = (torch.zeros(len(sequences), longest).long() for _ in range(3))
        for row, s in enumerate(sequences):
            length = len(self.ids[s])
            ids[row, :length] = torch.tensor(self.ids[s])
            masks[row, :length] = torch.tensor(self.masks[s])
            present[row, :length] = 1
        return ids, masks, present

    def logprobs(self, table: Tensor, sequences: list[int]) -> Tensor:
        """log p [n, L'] of the tokens of some sequences, differentiable."""
        ids, _, _ = self.padded(sequences)
        logits = table[sequences, : ids.shape[1]] @ self.head.T
        return logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)


def frozen_batch() -> Batch:
    """The same numbers on every machine: Python's generator alone is asked."""
    rng = random.Random(20251128)

    def normal(*shape: int) -> Tensor:
        numbers = [rng.gauss(0, 1) for _ in range(torch.Size(shape).numel())]
        return torch.tensor(numbers, dtype=torch.float64).view(shape)

    lengths = [1, LONGEST, *(rng.randint(1, LONGEST) for _ in range(SEQUENCES - 2))]
    rng.shuffle(lengths)
    groups = [s // SAMPLES for s in range(SEQUENCES)]
    batch = Batch(
        ids=[[rng.randrange(WORDS) for _ in range(length)] for length in lengths],
        masks=[turns(length, rng) for length in lengths],
        groups=groups,
        scores=[EQUAL_SCORES.get(group, rng.randrange(11) / 10) for group in groups],
        table=normal(SEQUENCES, 1 + LONGEST, HIDDEN),
        teacher_table=normal(SEQUENCES, 1 + LONGEST, HIDDEN),
        head=normal(WORDS, HIDDEN),
        old_logprobs=torch.zeros(SEQUENCES, LONGEST, dtype=torch.float64),
    )
    _, _, present = batch.padded(list(range(SEQUENCES)))
    drift = 0.05 * normal(SEQUENCES, 1) + 0.3 * normal(SEQUENCES, LONGEST)
    drift[normal(SEQUENCES, LONGEST) > 2] += 1.5  # some ratios are above the dual clip's 3
    now = batch.logprobs(batch.table, list(range(SEQUENCES)))
    batch.old_logprobs = (now - drift) * present
    return batch


def turns(length: int, rng: random.Random) -> list[int]:
    """A mask of a response of up to three turns of the policy, with observations in between."""
    if length < 20 or rng.random() < 0.3:
        return [1] * length
    mask = [1] * length
    for _ in range(rng.randint(1, 2)):
        start = rng.randint(1, length - 10)
        end = min(start + rng.randint(3, 60), length - 1)
        mask[start:end] = [0] * (end - start)
    return mask


# micro-batches of the sequences of each rank
Split = list[list[list[int]]]


def splits(batch: Batch) -> dict[str, Split]:
    """`mixed`: sequences in any order. `sorted`: by length, so micro-batches and ranks have unequal
    numbers of tokens. `by tokens`: micro-batches of unequal numbers of sequences."""
    mixed = list(range(SEQUENCES))
    random.Random(1).shuffle(mixed)
    by_length = sorted(mixed, key=lambda s: len(batch.ids[s]))

    def cut(sequences: list[int], size: int) -> list[list[int]]:
        return [sequences[i : i + size] for i in range(0, len(sequences), size)]

    return {
        "1 × 64": [[mixed]],
        "2 × 32": [cut(mixed, 32)],
        "8 × 8": [cut(mixed, 8)],
        "8 × 8, sorted": [cut(by_length, 8)],
        "by tokens": [by_tokens(batch, by_length, budget=2000)],
        "2 ranks, 4 × 8": [cut(mixed[:32], 8), cut(mixed[32:], 8)],
        "2 ranks, sorted": [cut(by_length[:32], 8), cut(by_length[32:], 8)],
    }


def by_tokens(batch: Batch, sequences: list[int], budget: int) -> list[list[int]]:
    """Micro-batches of at most `budget` tokens."""
    micro_batches: list[list[int]] = [[]]
    room = budget
    for s in sequences:
        length = len(batch.ids[s])
        if length > room:
            micro_batches.append([])
            room = budget
        micro_batches[-1].append(s)
        room -= length
    return micro_batches

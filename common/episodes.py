"""The Episode record, token ids in and token ids out, and sampling episodes from the engine."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.data import Row
from common.engine import Sampling


@dataclass(slots=True)
class Episode:
    """One trajectory. Trained on is exactly `response_ids` where `loss_mask` is 1; text is never re-encoded."""

    prompt_index: int  # the prompt's place in the step's global batch: episodes that share it share `prompt_ids`
    sample_index: int  # which of the prompt's samples
    prompt_ids: list[int]
    response_ids: list[int]  # all that follows the prompt: sampled tokens and, with tools, observations
    loss_mask: list[int]  # 1 = sampled by the policy (the end-of-turn token too), 0 = observation or template
    logprobs: list[float]  # the engine's, at the sampling temperature; 0.0 where loss_mask is 0
    finish_reason: str  # "stop" or "length"
    rewards: dict[str, float | str] = field(default_factory=dict)  # components; "score" is what is trained on

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


def request_seed(seed: int, step: int, prompt_index: int) -> int:
    """31 bits from (run seed, step, prompt), the same on any number of ranks; the engine adds the sample index."""
    digest = hashlib.blake2b(f"{seed}/{step}/{prompt_index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def sample_episodes(
    engine, prompts: Sequence[tuple[int, Row]], sampling: Sampling, *, seed: int, step: int, weights_step: int
) -> list[Episode]:
    """`sampling.n` episodes of each (prompt index, row), prompt by prompt. A single turn is an episode of one turn."""
    completions = engine.generate(
        [row.prompt_ids for _, row in prompts],
        sampling,
        [request_seed(seed, step, index) for index, _ in prompts],
        weights_step,
    )
    return [
        Episode(index, j, row.prompt_ids, c.token_ids, [1] * len(c.token_ids), c.logprobs, c.finish_reason)
        for (index, row), samples in zip(prompts, completions)
        for j, c in enumerate(samples)
    ]

"""Families of models in float64: packs with shared prompts and rows give the log-probs, entropies
and gradients of transformers' own forward of each text."""

import pytest
import torch
from family_models import COMPOSITES, FAMILIES, write_family
from helpers import largest_difference

from common.exactness import why_unsupported
from common.models import Policy, attention_implementation, load_model
from common.packing import TokenIndex, layout_of, pack
from common.types import Episode
from common.vision import skeleton

# windows and caps; sinks and experts; a scale of logits; recurrences are in test_recurrent.py
EVERY_TIME = ["gemma2", "gpt_oss", "granite"]
TEMPERATURE = 0.8


def ragged_episodes() -> list[Episode]:
    """Groups whose texts are shorter and longer than the windows, of 16 tokens, and a prompt of one
    token."""
    generator = torch.Generator().manual_seed(3)
    episodes = []
    for i, (prompt_length, lengths) in enumerate([(40, (30, 1)), (9, (12, 40)), (1, (20, 2))]):
        prompt = torch.randint(3, 250, (prompt_length,), generator=generator).tolist()
        for j, length in enumerate(lengths):
            ids = torch.randint(3, 250, (length,), generator=generator).tolist()
            mask = [int(k % 5 != 4) for k in range(length)]
            episodes.append(Episode(i, j, prompt, ids, mask, [0.0] * length))
    return episodes


def our_values(policy: Policy, episodes: list[Episode]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies [T]."""
    index = TokenIndex(episodes)
    layout = layout_of(policy.attention)
    logprobs, entropies = torch.zeros(2, len(index), dtype=policy.model.dtype)
    for batch in pack(episodes, range(len(episodes)), index, budget=128, layout=layout):
        batch_logprobs, batch_entropies = policy(batch, TEMPERATURE)
        logprobs = logprobs.index_copy(0, batch.token_index, batch_logprobs)
        entropies = entropies.index_copy(0, batch.token_index, batch_entropies)
    return logprobs, entropies


def own_values(policy: Policy, episodes: list[Episode]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by the model's own forward."""
    logprobs = []
    entropies = []
    for episode in episodes:
        ids = torch.tensor([episode.prompt_ids + episode.response_ids])
        logits = policy.own_logits(ids)[0] / TEMPERATURE
        predictions = logits.log_softmax(-1)[len(episode.prompt_ids) - 1 : -1]
        trained = torch.tensor(episode.loss_mask).nonzero().flatten()
        targets = torch.tensor(episode.response_ids)[trained]
        logprobs.append(predictions[trained].gather(-1, targets[:, None])[:, 0])
        entropies.append(-(predictions.exp() * predictions).sum(-1)[trained])
    return torch.cat(logprobs), torch.cat(entropies)


def set_attention(policy: Policy, attention: str, implementation: str) -> None:
    policy.attention = attention
    policy.model.config.get_text_config()._attn_implementation = implementation


def gradients(policy: Policy, logprobs, entropies) -> list[torch.Tensor]:
    """Of a fixed random combination; zeros for a parameter that has no part in it."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(len(logprobs), generator=generator, dtype=logprobs.dtype)
    policy.zero_grad()
    (weights @ logprobs + 0.1 * entropies.sum()).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.parameters()]


def check_family(family: str, folder, gradient_checkpointing: bool) -> None:
    write_family(folder, family)
    assert why_unsupported(skeleton(str(folder)), "sdpa") is None
    policy = load_model(
        str(folder), "sdpa", dtype=torch.float64, gradient_checkpointing=gradient_checkpointing
    )
    if policy.model._can_set_experts_implementation():
        policy.model.set_experts_implementation("eager")  # the other kernel has no float64
    episodes = ragged_episodes()
    set_attention(policy, "rows", "eager")
    expected = own_values(policy, episodes)
    expected_gradients = gradients(policy, *expected)
    scale = max(gradient.abs().max() for gradient in expected_gradients)
    for attention in ("sdpa", "rows"):
        name = attention_implementation(policy.model.config, attention, None)
        set_attention(policy, attention, name or "eager")
        found = our_values(policy, episodes)
        found_gradients = gradients(policy, *found)
        assert largest_difference(found, expected) < 1e-12, attention
        assert largest_difference(found_gradients, expected_gradients) < 1e-12 * scale, attention


@pytest.mark.parametrize("family", EVERY_TIME)
def test_packs_and_rows_are_the_models_own_forwards(family, tmp_path, float64):
    check_family(family, tmp_path, gradient_checkpointing=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *COMPOSITES])
def test_packs_and_rows_of_every_family(family, tmp_path, float64):
    check_family(family, tmp_path, gradient_checkpointing=False)

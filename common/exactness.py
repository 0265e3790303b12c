"""Which models can be trained exactly, in packs or in rows; the others are refused by name."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from common.distributed import forward_context
from common.flags import Machine
from common.packing import TokenIndex, layout_of, pack
from common.progress import say
from common.rotary import length_limits
from common.types import Episode
from common.vision import FAMILY, skeleton

# mean difference of log-probs between a pack and rows; in 16 bits, that of engine and trainer
BOUNDS = {torch.float32: 1e-3, torch.float64: 1e-6}
BOUND_16_BITS = 0.1


def why_unsupported(model: nn.Module, attention: str) -> str | None:
    """Why a model cannot be trained here with an attention (its log-probs would silently be wrong);
    None if it can."""
    config = model.config.get_text_config()
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        return "has a head with a bias"
    if getattr(config, "router_jitter_noise", 0):
        return "draws its experts at random in training (router_jitter_noise)"
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return "reads texts in both directions (use_bidirectional_attention)"
    if model.config.model_type in FAMILY and length_limits(config):
        return "reads pictures, and has rotary frequencies that depend on a text's length"
    if attention == "rows":
        if length_limits(config):
            return "has rotary frequencies that depend on a text's length, which rows do not have"
        return None
    if attention == "flash" and any(name.endswith("sinks") for name, _ in model.named_parameters()):
        return "has attention sinks, which --attention flash does not have"
    return why_not_packed(model)


def why_not_packed(model: nn.Module) -> str | None:
    """Why the texts of a pack would see each other in a model; None if they do not."""
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or [])
    other_types = sorted(layer_types - {"full_attention", "sliding_attention"})
    leak = "in which packed conversations would see each other"
    if other_types:
        return f"has {', '.join(other_types)} layers, {leak}"
    if config.model_type == "nemotron":  # its attention does not get `units`
        return f"passes its attention no options, {leak}"
    if model._is_stateful:
        return f"has recurrent layers, {leak}"
    if not model._supports_attention_backend:
        return f"has an attention of its own, {leak}"
    return None


def exact_attention(model: nn.Module, attention: str, machine: Machine) -> str:
    """`attention`; with `--attention auto` rows, for a model that only rows can hold. SystemExit
    if that excludes --compile."""
    if machine.attention != "auto":
        return attention
    reason = why_unsupported(model, attention)
    if reason is None or why_unsupported(model, "rows") is not None:
        return attention
    line = f"--attention rows: {model.config.model_type} {reason}"
    if machine.compile:
        raise SystemExit(f"{line}; leave out --compile, which would compile every length anew")
    say(f"{line}. Each response repeats its prompt, padded to the longest of its micro-batch")
    return "rows"


def refuse_inexact(model: nn.Module, attention: str, name: str) -> None:
    """SystemExit for a model for which trainer and engine would compute different things.

    name: the model's flag and folder.
    """
    problem = why_unsupported(model, attention)
    if problem is None:
        return
    message = f"{name}: {model.config.model_type} {problem}, not supported here"
    if attention != "rows" and why_unsupported(model, "rows") is None:
        message += "; --attention rows reads it"
    raise SystemExit(message)


def checked_skeleton(path: str, attention: str, trust_remote_code: bool, flag: str) -> nn.Module:
    """The model of a folder, without weights. SystemExit if its config.json describes one for which
    trainer and engine would compute different things.

    flag: the one that names the folder, for messages.
    """
    model = skeleton(path, trust_remote_code, flag)
    refuse_inexact(model, attention, f"{flag} {path}")
    return model


@torch.no_grad()
def check_packs(policy: nn.Module, name: str) -> None:
    """SystemExit if a small pack does not give the log-probs of single texts: then texts see each
    other, or a kernel ignores an option. All ranks call it together, before the first step.

    policy: wrapped, on its device. name: its flag and folder.
    """
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]
    ids = [(11 + i) % vocabulary for i in range(11)]
    episodes = []
    for sample, response in enumerate((ids[3:7], ids[7:])):
        episodes.append(Episode(0, sample, ids[:3], response, [1] * 4, [0.0] * 4))
    packed = _logprobs(policy, episodes)
    with _read_in_rows(policy):
        single = _logprobs(policy, episodes)
    difference = (packed - single).abs().mean().item()
    dtype = policy.model.get_input_embeddings().weight.dtype
    if difference <= BOUNDS.get(dtype, BOUND_16_BITS):
        return
    raise SystemExit(
        f"{name}: log-probs of a small pack are {difference:.2g} away from those of single texts, "
        f"with --attention {policy.attention}; --attention rows reads this model"
    )


def _logprobs(policy: nn.Module, episodes: list[Episode]) -> Tensor:
    """Log-probs [T] of all tokens."""
    index = TokenIndex(episodes)
    numbers = range(len(episodes))
    layout = layout_of(policy.attention)
    logprobs = torch.zeros(len(index))
    for batch in pack(episodes, numbers, index, budget=128, vision=policy.vision, **layout):
        with forward_context(policy):
            output, _ = policy(batch.to(policy.model.device))
        logprobs[batch.tokens] = output.float().cpu()
    return logprobs


@contextmanager
def _read_in_rows(policy: nn.Module) -> Iterator[None]:
    """Read single texts, by plain matrix products."""
    attention = policy.attention
    text_config = policy.model.config.get_text_config()
    implementation = text_config._attn_implementation
    policy.attention = "rows"
    text_config._attn_implementation = "eager"
    with torch.compiler.set_stance("force_eager"):
        yield
    policy.attention = attention
    text_config._attn_implementation = implementation

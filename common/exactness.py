"""Which models can be trained exactly, in packs or in rows; the others are refused by name."""

from importlib.util import find_spec

import torch
from torch import Tensor, nn

from common.distributed import forward_context
from common.flags import Machine
from common.logprobs import has_compiler
from common.packing import TokenIndex, layout_of, pack
from common.progress import say
from common.recurrent import has_delta_rule, is_recurrent
from common.rotary import length_limits
from common.torch_repair import Later
from common.types import Episode
from common.vision import FAMILIES, skeleton

fsdp = Later("torch.distributed.fsdp")
# how far, in the mean, log-probs of a micro-batch may be from those of single texts; in 16 bits
# what `GAP_LIMITS` allows between engine and trainer in bf16
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
# model types that are read neither in packs nor in rows
REFUSALS = {
    "cpmant": "puts a prompt of its own before each text",
    "inkling_text": "makes its logits in a way of its own",
    "llama4_text": "attends in chunks, and has no backbone apart from its head",
}
# model types whose attention does not get the options that packs need
WITHOUT_OPTIONS = ("nemotron", "moshi")
# model types whose layers are compiled once for packs of all lengths (tests/math/test_compiled.py)
COMPILED = {
    "cohere2",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt_neox",
    "granite",
    "llama",
    "ministral",
    "ministral3",
    "mistral",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen2_5_vl_text",
    "qwen3",
    "qwen3_vl_text",
    "seed_oss",
    "smollm3",
    "starcoder2",
}


def why_unsupported(model: nn.Module, attention: str) -> str | None:
    """Why a model cannot be trained here with an attention (its log-probs would silently be wrong);
    None if it can."""
    config = model.config.get_text_config()
    if config.model_type in REFUSALS:
        return REFUSALS[config.model_type]
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        return "has a head with a bias"
    if getattr(config, "router_jitter_noise", 0):
        return "draws its experts at random in training (router_jitter_noise)"
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return "reads texts in both directions (use_bidirectional_attention)"
    if model.config.model_type in FAMILIES and length_limits(config):
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
    if is_recurrent(config):
        return None
    if other_types:
        return f"has {', '.join(other_types)} layers, {leak}"
    has_window = getattr(config, "sliding_window", None) is not None
    if config.model_type in WITHOUT_OPTIONS or (config.model_type == "doge" and has_window):
        return f"passes its attention no options, {leak}"
    if model._is_stateful:
        return f"has recurrent layers, {leak}"
    if not model._supports_attention_backend:
        return f"has an attention of its own, {leak}"
    return None


def exact_attention(model: nn.Module, attention: str, machine: Machine) -> str:
    """`attention`; or with `--attention auto` "rows", if the model can only be trained in rows.
    SystemExit if --compile excludes them."""
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


def choose_compile(
    model: nn.Module, attention: str, machine: Machine, device: torch.device
) -> tuple[bool, str]:
    """Whether the layers of a model are compiled, and why not ("" if they are, or if a flag
    decides). Without --compile and --no-compile they are for the model types in COMPILED, on a GPU
    with flex attention."""
    model_type = model.config.get_text_config().model_type
    if machine.compile is not None:
        return machine.compile, ""
    if not has_compiler(device):
        return False, "no GPU of capability 8.0"
    if attention != "flex":
        return False, f"--attention {attention}"
    if model_type not in COMPILED:
        return False, f"the layers of {model_type} were not tried; --compile tries them"
    return True, ""


def check_recurrent_kernels(
    model: nn.Module, attention: str, machine: Machine, device: torch.device
) -> None:
    """SystemExit if --recurrent-kernels cannot be had, or has no effect."""
    if machine.recurrent_kernels == "torch":
        return
    flag = f"--recurrent-kernels {machine.recurrent_kernels}"
    if not has_delta_rule(model):
        raise SystemExit(
            f"{flag} has no effect: the layers of {model.config.model_type} have no gated delta "
            "rule, as those of Qwen3.5, Qwen3-Next and OLMo-Hybrid do"
        )
    if attention == "rows":
        raise SystemExit(f"{flag} has no effect with --attention rows")
    if device.type != "cuda":
        raise SystemExit(f"{flag} needs a GPU")
    if find_spec("fla") is None:
        raise SystemExit(f"{flag}: pip install fla-core==0.6.0")


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
def check_policy(policy: nn.Module, dtype: torch.dtype, name: str) -> None:
    """SystemExit if a small micro-batch does not give the log-probs that transformers' model gives
    for each of its texts alone: then texts see each other, or something that the model does is left
    out. All ranks call it together, before the first step.

    policy: wrapped, on its device. dtype: in which it computes. name: its flag and folder.
    """
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]
    # a prompt of 3 tokens with two responses of 4
    ids = [(11 + i) % vocabulary for i in range(11)]
    episodes = []
    for sample_index, response_ids in enumerate((ids[3:7], ids[7:])):
        episode = Episode(
            prompt_index=0,
            sample_index=sample_index,
            prompt_ids=ids[:3],
            response_ids=response_ids,
            loss_mask=[1] * len(response_ids),
            logprobs=[0.0] * len(response_ids),
        )
        episodes.append(episode)
    expected = torch.cat([_own_logprobs(policy, episode) for episode in episodes])
    difference = (_logprobs(policy, episodes) - expected).abs().mean().item()
    if difference <= BOUNDS[dtype]:
        return
    message = (
        f"{name}: with --attention {policy.attention} log-probs of a small micro-batch are "
        f"{difference:.2g} away from the model's own"
    )
    if policy.attention != "rows":
        message += "; try --attention rows"
    raise SystemExit(message)


def _logprobs(policy: nn.Module, episodes: list[Episode]) -> Tensor:
    """Log-probs [T] of all response tokens, as a step computes them."""
    index = TokenIndex(episodes)
    indices = range(len(episodes))
    layout = layout_of(policy.attention)
    logprobs = torch.zeros(len(index))
    for batch in pack(episodes, indices, index, budget=128, layout=layout, vision=policy.vision):
        with forward_context(policy):
            output, _ = policy(batch.to(policy.model.device))
        logprobs[batch.token_index] = output.float().cpu()
    return logprobs


def _own_logprobs(policy: nn.Module, episode: Episode) -> Tensor:
    """Log-probs of a response [R], by transformers' own forward of the text alone."""
    if isinstance(policy, fsdp.FSDPModule):
        fsdp.register_fsdp_forward_method(policy, "own_logits")
    ids = torch.tensor([episode.prompt_ids + episode.response_ids], device=policy.model.device)
    text_config = policy.model.config.get_text_config()
    attention = text_config._attn_implementation
    text_config._attn_implementation = "eager"
    with torch.compiler.set_stance("force_eager"), forward_context(policy):
        logits = policy.own_logits(ids)[0].float().cpu()
    text_config._attn_implementation = attention
    response = ids[0, len(episode.prompt_ids) :].cpu()
    predictions = logits.log_softmax(-1)[len(episode.prompt_ids) - 1 : -1]
    return predictions.gather(-1, response[:, None])[:, 0]

"""Models that vLLM and transformers compute differently, or that vLLM cannot be synced with.

Seen with vLLM 0.32.0 and transformers 5.19.0. Each is refused by name before anything is loaded:
the trainer would learn from the samples of another model.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

OTHER_ENGINE = "--engine hf runs it"
# families without a class of their own in vLLM that its transformers backend runs exactly; it runs
# some others wrongly, and without a word (GPT-NeoX, Persimmon, JetMoe, Doge)
ON_TRANSFORMERS_BACKEND = {
    "arcee",
    "bitnet",
    "cwm",
    "dots1",
    "flex_olmo",
    "glm",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "jais2",
    "mellum",
    "ministral",
    "nanochat",
    "olmo",
    "olmo2",
    "olmo3",
    "seed_oss",
    "smollm3",
    "solar_open",
    "starcoder2",
}


@dataclass(frozen=True)
class Setting:
    """How a model is to be run."""

    config: object  # of the model, transformers' PreTrainedConfig
    text: object  # of its language model
    dtype: torch.dtype
    on_gpu: bool
    max_model_len: int


@dataclass(frozen=True)
class Refusal:
    """A case in which vLLM does not run a model exactly."""

    model_types: tuple[str, ...]  # of the language model; () for any
    reason: str
    remedy: str = OTHER_ENGINE
    applies: Callable[[Setting], bool] = lambda setting: True


def has_experts(setting: Setting) -> bool:
    num_dense = getattr(setting.text, "first_k_dense_replace", None) or 0
    return num_dense < setting.text.num_hidden_layers


def ignores_its_head(setting: Setting) -> bool:
    return not (setting.text.tie_word_embeddings or setting.config.tie_word_embeddings)


def has_other_delta_net(setting: Setting) -> bool:
    """Whether vLLM's kernel on CPUs does not take a gated delta net."""
    if setting.on_gpu:
        return False
    sizes = {setting.text.linear_key_head_dim, setting.text.linear_value_head_dim}
    return setting.dtype != torch.bfloat16 or sizes != {128}


REFUSALS = [
    Refusal(
        (),
        "its weights are quantized (quantization_config), and vLLM would keep them so",
        "take a copy in bf16: transformers writes one (from_pretrained with dequantize=True in the "
        "quantization config, then save_pretrained with save_original_format=False, without which "
        "the experts are left out)",
        lambda setting: getattr(setting.config, "quantization_config", None) is not None,
    ),
    Refusal(
        ("cohere2", "cohere2_moe"),
        "vLLM's sliding window is one token longer than transformers'",
        "keep --max-prompt-tokens and --max-response-tokens together within its sliding_window, or "
        f"{OTHER_ENGINE}",
        lambda setting: setting.max_model_len > (setting.text.sliding_window or torch.inf),
    ),
    Refusal(
        ("nemotron_h",),
        "transformers bounds its time steps from below, and vLLM does not",
        applies=lambda setting: setting.text.time_step_min > 0,
    ),
    Refusal(("apertus",), "vLLM's log-probs differ from transformers' by 1e-3"),
    Refusal(
        ("deepseek_v2", "deepseek_v3"),
        "with experts vLLM's log-probs differ from transformers' by 0.2",
        applies=has_experts,
    ),
    Refusal(
        ("ernie4_5_moe",),
        "on CPUs vLLM leaves out the bias of its router",
        applies=lambda setting: not setting.on_gpu,
    ),
    Refusal(
        ("gemma2", "cohere", "cohere2", "lfm2", "lfm2_moe"),
        "vLLM ties its head to the embeddings, and config.json does not",
        applies=ignores_its_head,
    ),
    Refusal(
        ("olmo_hybrid",),
        "vLLM runs its recurrent layers on GPUs alone",
        applies=lambda setting: not setting.on_gpu,
    ),
    Refusal(
        ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
        "on CPUs vLLM runs gated delta nets in bf16 alone, with heads of 128",
        f"--dtype bf16, or {OTHER_ENGINE}",
        has_other_delta_net,
    ),
    Refusal(
        ("qwen3_vl_moe_text",),
        "its experts' scores add up to 1 in transformers, and in vLLM if config.json says so",
        f"set norm_topk_prob to true in its text_config, or {OTHER_ENGINE}",
        lambda setting: getattr(setting.text, "norm_topk_prob", None) is not True,
    ),
]


def why_refused(setting: Setting) -> str | None:
    """Why vLLM does not run a model exactly, and what to do; None if it does."""
    for refusal in REFUSALS:
        if refusal.model_types and setting.text.model_type not in refusal.model_types:
            continue
        if refusal.applies(setting):
            return f"{refusal.reason}; {refusal.remedy}"
    return None

"""Tiny random models of families, for engines: two to six layers, heads of 32 numbers."""

from pathlib import Path

import torch
from vl import SMOLLM, build_tokenizer

from common.torch_repair import transformers
from common.vision import PLACEHOLDERS, auto_class
from common.weights import saved_buffers, transpose_back

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
HEADS = {"head_dim": 32}
WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
DELTA_NET = {  # one layer of two
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
WIDE_DELTA_NET = DELTA_NET | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
PARTIAL_ROTARY = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
}
MAMBA = {"mamba_d_head": 32, "mamba_d_state": 16}
TIED = {"tie_word_embeddings": True}
GEMMA4 = TIED | HEADS | {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0}
FAMILIES: dict[
    str, dict[str, object]
] = {  # {family: options beside SIZES}; a name may end in -CASE
    "apertus": {},
    "arcee": HEADS,
    "bitnet": {},
    "cohere2": TIED | HEADS | WINDOWS,
    "cwm": HEADS | WINDOWS,
    "deepseek_v3": ROUTED
    | {
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "dots1": HEADS | ROUTED,
    "ernie4_5": HEADS,
    "ernie4_5_moe": HEADS | {"num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "exaone4": HEADS | WINDOWS,
    "exaone_moe": HEADS | WINDOWS | EXPERTS,
    "falcon_h1": HEADS | MAMBA | {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_n_groups": 1},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma": TIED | HEADS,
    "gemma2": TIED | HEADS | {"sliding_window": 16, "query_pre_attn_scalar": 32},
    "gemma2-untied": HEADS | {"sliding_window": 16, "query_pre_attn_scalar": 32},
    "gemma3_text": TIED | HEADS | WINDOWS | {"query_pre_attn_scalar": 32},
    "gemma4_text": GEMMA4 | WINDOWS | {"global_head_dim": 32},
    "glm": HEADS,
    "glm4": HEADS,
    "glm4_moe": HEADS | ROUTED,
    "gpt2": TIED | {"n_embd": 128, "n_layer": 2, "n_head": 4},
    "gpt_neox": {},
    "gpt_oss": HEADS
    | WINDOWS
    | {"intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": MAMBA
    | {
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "position_embedding_type": "rope",
    },
    "helium": HEADS,
    "hunyuan_v1_dense": HEADS,
    "hunyuan_v1_moe": HEADS | {"num_experts": 4, "moe_topk": 2},
    "jais2": HEADS,
    "lfm2": TIED
    | {
        "layer_types": ["conv", "full_attention"],
        "conv_dim": 128,
        "conv_dim_out": 128,
        "block_dim": 128,
        "block_ff_dim": 96,
        "block_auto_adjust_ff_dim": False,
    },
    "llama": HEADS,
    "llama-tied": HEADS | TIED,
    "mellum": HEADS | EXPERTS,
    "ministral": HEADS | WINDOWS,
    "ministral3": HEADS,
    "mistral": HEADS | {"sliding_window": 16},
    "mixtral": HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "nanochat": {},
    "nemotron_h": HEADS
    | {
        "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 1,
    },
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOWS,
    "olmo_hybrid": DELTA_NET | {"linear_num_value_heads": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {},
    "phi3": {"sliding_window": None},
    "qwen2": {},
    "qwen2_moe": EXPERTS,
    "qwen3": HEADS,
    "qwen3_5_moe_text": HEADS
    | DELTA_NET
    | PARTIAL_ROTARY
    | EXPERTS
    | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": HEADS | DELTA_NET | PARTIAL_ROTARY,
    "qwen3_moe": HEADS | EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3_next": HEADS | DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 32},
    "seed_oss": HEADS,
    "smollm3": {"sliding_window": None, "use_sliding_window": False, "no_rope_layers": [1, 0]},
    "solar_open": HEADS | ROUTED,
    "starcoder2": {},
}


# with the heads that vLLM's own kernel of gated delta nets on CPUs wants, which computes in bf16
DELTA_NETS = {
    "qwen3_5_text-wide": FAMILIES["qwen3_5_text"] | WIDE_DELTA_NET,
    "qwen3_5_moe_text-wide": FAMILIES["qwen3_5_moe_text"] | WIDE_DELTA_NET,
    "qwen3_next-wide": FAMILIES["qwen3_next"] | WIDE_DELTA_NET,
}


TOWER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
}
QWEN3_VL_TOWER = {"depth": 1, "hidden_size": 64, "num_heads": 2, "deepstack_visual_indexes": [0]}
# {text family: options beside SIZES} of those that are a part of composites alone
TEXT_PARTS = {
    "qwen3_vl_moe_text": HEADS
    | EXPERTS
    | {
        "norm_topk_prob": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }
}
COMPOSITES = {  # {family: (text family, options of the vision tower)}
    "gemma3": ("gemma3_text", TOWER | {"image_size": 56}),
    "gemma4": (
        "gemma4_text",
        TOWER | HEADS | {"num_key_value_heads": 2, "global_head_dim": 32, "patch_size": 4},
    ),
    "mistral3": ("ministral3", TOWER | HEADS | {"image_size": 56, "model_type": "pixtral"}),
    "qwen3_5": ("qwen3_5_text", {"depth": 1, "hidden_size": 64, "num_heads": 2}),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", QWEN3_VL_TOWER),
}


def composite_config(family: str, tokenizer) -> "transformers.PreTrainedConfig":
    """Its placeholders are the last tokens, which a random model samples as often as others."""
    text_family, tower = COMPOSITES[family]
    last = len(tokenizer) - 1
    text_config = family_config(text_family, tokenizer)
    config = transformers.CONFIG_MAPPING[family](
        text_config=text_config.to_dict(),
        vision_config=tower,
        tie_word_embeddings=text_config.tie_word_embeddings,
    )
    names = [name for name in PLACEHOLDERS if isinstance(getattr(config, name, None), int)]
    for i, name in enumerate(names):
        setattr(config, name, last - i)
    return config


def family_config(family: str, tokenizer) -> "transformers.PreTrainedConfig":
    if family in COMPOSITES:
        return composite_config(family, tokenizer)
    kind = family.partition("-")[0]
    options = SIZES | (FAMILIES | DELTA_NETS | TEXT_PARTS).get(family, {})
    options = {"tie_word_embeddings": False} | options
    options |= {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": 0,
    }
    if kind == "gemma4_text":
        options["vocab_size_per_layer_input"] = len(tokenizer)
    return transformers.CONFIG_MAPPING[kind](**options)


@torch.no_grad()
def write_family(folder: Path, family: str) -> Path:
    """A folder with a random model of the family, its logits spread: near-uniform ones would hide
    mistakes. Norms, biases and a router's bias are not at their first values either."""
    tokenizer = build_tokenizer(SMOLLM)
    config = family_config(family, tokenizer)
    torch.manual_seed(0)
    model = auto_class(config).from_config(config, dtype=torch.float32)
    for name, tensor in (*model.named_parameters(), *saved_buffers(model)):
        if "e_score_correction_bias" in name:
            tensor.copy_(0.1 * torch.randn(tensor.shape))
        elif tensor.dim() > 1:
            tensor.mul_(3)
        elif "A_log" not in name and "dt_bias" not in name:
            tensor.add_(0.1 * torch.randn(tensor.shape))
    transpose_back()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

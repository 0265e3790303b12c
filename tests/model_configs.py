"""Configurations of published models, as far as memory and time depend on them.

Numbers of families younger than Qwen2.5 were read in these files of github.com:

- Qwen3, Qwen3.5, Llama: scripts/models of THUDM/slime at 624b824
- the recurrent layers of Qwen3.5: of 0.8B models/Qwen3_5/config/config.json of sophgo/LLM-TPU at
  d581e7b; of the others the defaults of transformers 5.19, which are those of 9B
- Qwen3-VL-4B: models/Qwen3_VL/config/config.json of the same; 2B and Gemma 3:
  src/maxtext/configs/models of AI-Hypercomputer/maxtext at e591f30
- gpt-oss-20b: config.json of EchoCog/gpt-oss-20b at 5dfb765
"""

from transformers import CONFIG_MAPPING, PreTrainedConfig

QWEN2 = {  # Qwen2.5: hidden, MLP, layers, heads, key-value heads, vocabulary, tied
    "0.5B": (896, 4864, 24, 14, 2, 151_936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "3B": (2048, 11_008, 36, 16, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
    "14B": (5120, 13_824, 48, 40, 8, 152_064, False),
    "32B": (5120, 27_648, 64, 40, 8, 152_064, False),
    "72B": (8192, 29_568, 80, 64, 8, 152_064, False),
}
YOUNGER = {  # the same, and the size of a head
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8, 151_936, True, 128),
    "Qwen3-1.7B": (2048, 6144, 28, 16, 8, 151_936, True, 128),
    "Qwen3-4B": (2560, 9728, 36, 32, 8, 151_936, True, 128),
    "Qwen3-8B": (4096, 12_288, 36, 32, 8, 151_936, False, 128),
    "Qwen3-14B": (5120, 17_408, 40, 40, 8, 151_936, False, 128),
    "Qwen3-32B": (5120, 25_600, 64, 64, 8, 151_936, False, 128),
    "Qwen3-30B-A3B": (2048, 6144, 48, 32, 4, 151_936, False, 128),
    "Qwen3.5-0.8B": (1024, 3584, 24, 8, 2, 248_320, True, 256),
    "Qwen3.5-4B": (2560, 9216, 32, 16, 4, 248_320, True, 256),
    "Qwen3.5-9B": (4096, 12_288, 32, 16, 4, 248_320, False, 256),
    "Qwen3.5-35B-A3B": (2048, 512, 40, 16, 2, 248_320, False, 256),
    "gpt-oss-20b": (2880, 2880, 24, 64, 8, 201_088, False, 64),
    "Llama-3.2-3B": (3072, 8192, 28, 24, 8, 128_256, True, 128),
    "Llama-3.1-8B": (4096, 14_336, 32, 32, 8, 128_256, False, 128),
    "gemma-3-4B": (2560, 10_240, 34, 8, 4, 262_144, True, 256),
    "gemma-3-12B": (3840, 15_360, 48, 16, 8, 262_144, True, 256),
    "gemma-3-27B": (5376, 21_504, 62, 32, 16, 262_144, True, 128),
}
KINDS = {  # of a name that begins so: the model_type. Qwen3.5 and Gemma 3 are language models alone
    "Qwen3-": "qwen3",
    "Qwen3.5-": "qwen3_5_text",
    "gpt-oss-": "gpt_oss",
    "Llama-": "llama",
    "gemma-3-": "gemma3_text",
}
OPTIONS: dict[str, dict[str, object]] = {
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "Qwen3.5-0.8B": {"linear_num_value_heads": 16},
    "Qwen3.5-35B-A3B": {
        "model_type": "qwen3_5_moe_text",
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "gpt-oss-20b": {"num_local_experts": 32, "num_experts_per_tok": 4},
}
VISION = {  # the language model, and its tower: layers, hidden, MLP
    "VL-3B": ("3B", 32, 1280, 3420),
    "VL-7B": ("7B", 32, 1280, 3420),
    "VL-32B": ("32B", 32, 1280, 3420),
    "Qwen3-VL-2B": ("Qwen3-1.7B", 24, 1024, 4096),
    "Qwen3-VL-4B": ("Qwen3-4B", 24, 1024, 4096),
}


def published_config(name: str) -> PreTrainedConfig:
    """name: a size of Qwen2.5 ("7B"), of Qwen2.5-VL ("VL-7B"), or one of YOUNGER or VISION."""
    if name in VISION:
        return vision_config(name)
    if name in QWEN2:
        kind = "qwen2"
        hidden, mlp, layers, heads, kv_heads, vocabulary, tied = QWEN2[name]
        options: dict[str, object] = {}
    else:
        (kind,) = [kind for start, kind in KINDS.items() if name.startswith(start)]
        hidden, mlp, layers, heads, kv_heads, vocabulary, tied, head_size = YOUNGER[name]
        options = {"head_dim": head_size} | OPTIONS.get(name, {})
    kind = options.pop("model_type", kind)
    return CONFIG_MAPPING[kind](
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        **options,
    )


def vision_config(name: str) -> PreTrainedConfig:
    language_model, depth, hidden, mlp = VISION[name]
    text = published_config(language_model)
    tower = {
        "depth": depth,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "out_hidden_size": text.hidden_size,
    }
    kind = "qwen2_5_vl"
    if name.startswith("Qwen3-"):
        kind = "qwen3_vl"
        tower["deepstack_visual_indexes"] = [5, 11, 17]
    text_config = text.to_dict()
    text_config.pop("model_type")
    return CONFIG_MAPPING[kind](
        text_config=text_config,
        vision_config=tower,
        tie_word_embeddings=text.tie_word_embeddings,
    )

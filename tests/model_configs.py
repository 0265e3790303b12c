"""Configurations of published models, as far as memory and time depend on them."""

from transformers import PreTrainedConfig, Qwen2_5_VLConfig, Qwen2Config, Qwen3Config

QWEN2 = {  # Qwen2.5: hidden, MLP, layers, heads, key-value heads, vocabulary, tied
    "0.5B": (896, 4864, 24, 14, 2, 151_936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "3B": (2048, 11_008, 36, 16, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
    "14B": (5120, 13_824, 48, 40, 8, 152_064, False),
    "32B": (5120, 27_648, 64, 40, 8, 152_064, False),
    "72B": (8192, 29_568, 80, 64, 8, 152_064, False),
}
QWEN3 = {  # hidden, MLP, tied
    "Qwen3-4B": (2560, 9728, True),
    "Qwen3-8B": (4096, 12_288, False),
}


def published_config(name: str) -> PreTrainedConfig:
    """name: a size of Qwen2.5 ("7B"), of Qwen2.5-VL ("VL-7B"), or one of QWEN3."""
    if name in QWEN3:
        hidden, mlp, tied = QWEN3[name]
        return Qwen3Config(
            hidden_size=hidden,
            intermediate_size=mlp,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151_936,
            tie_word_embeddings=tied,
        )
    if name.startswith("VL-"):
        text = published_config(name.removeprefix("VL-"))
        tower = {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "out_hidden_size": text.hidden_size,
        }
        return Qwen2_5_VLConfig(
            text_config=text.to_dict(),
            vision_config=tower,
            tie_word_embeddings=text.tie_word_embeddings,
        )
    hidden, mlp, layers, heads, kv_heads, vocabulary, tied = QWEN2[name]
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )

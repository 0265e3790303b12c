"""Folders of small models that several tests write or compare; those with pictures are vl.py's."""

import shutil
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

from common.hub import FOLDERS


def save_reward_model(folder, num_labels: int = 1) -> str:
    """Random, with the tokenizer of the embedded policy."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDERS["tiny"])
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer) + 8,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_labels=num_labels,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def other_weights(folder: Path) -> Path:
    """A copy of tiny, but for one bit of its weights."""
    shutil.copytree(FOLDERS["tiny"], folder)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def same_files(a: Path, b: Path) -> None:
    names = sorted(file.name for file in a.iterdir())
    assert names == sorted(file.name for file in b.iterdir()) and "model.safetensors" in names
    assert [name for name in names if (a / name).read_bytes() != (b / name).read_bytes()] == []

"""How many GPUs of 80 GB published models take, by the estimate that a run prints first: the
columns of docs/models.md.

    python tests/bench/models.py

Prompts of 1,024 tokens and responses of 8,192, micro-batches of one episode, AdamW, bf16, FSDP,
--gradient-checkpointing; a KV cache of 8 GiB, which holds at least one episode; 92 % of a card.
Not counted: a reference, a critic, what allocators keep. Of GPUs as few as will do, and of flags on
as many the first that fits: none, --offload optimizer, --engine-parallel 2, both ...
"""

import tempfile
from dataclasses import replace
from itertools import product

import torch
import tyro
from report import table  # puts tests/ on the import path

# isort: split
from model_configs import QWEN2, VISION, YOUNGER, published_config

from common.flags import Machine, Rollout
from common.memory.estimate import phases_of
from common.memory.shape import ModelShape, model_shape

CARD = 80  # GB
ROOM = 0.92  # share of a card that may be planned with
GPUS = (1, 2, 4, 8)
ROLLOUT = Rollout(max_prompt_tokens=1024, max_response_tokens=8192, engine_memory=8.0)
MACHINE = Machine(micro_batch_tokens=1024 + 8192, gradient_checkpointing=True)
RANK = 16  # of LoRA


def gigabytes(shape: ModelShape, gpus: int, rollout: Rollout, machine: Machine) -> float:
    """Of a rank in the phase that takes most."""
    gb = phases_of(rollout, machine, gpus, torch.bfloat16, [shape], [], on_gpu=True)
    return gb["context"] + max(gb["rollout"], gb["update"])


def fewest_gpus(name: str, lora_rank: int = 0) -> str:
    """A number of GPUs, with "*" for --offload optimizer and "/N" for --engine-parallel N; ">8"
    if eight are too few."""
    machine = replace(MACHINE, lora_rank=lora_rank)
    with tempfile.TemporaryDirectory() as folder:
        published_config(name).save_pretrained(folder)
        shape = model_shape(folder, machine)
    for gpus, engine, offload in product(GPUS, GPUS, ("", "optimizer")):
        if engine > gpus or shape.heads % engine or shape.mlp % engine:
            continue
        rollout = replace(ROLLOUT, engine_parallel=engine)
        planned = gigabytes(shape, gpus, rollout, replace(machine, offload=offload))
        if planned <= ROOM * CARD:
            return f"{gpus}{'*' if offload else ''}{f'/{engine}' if engine > 1 else ''}"
    return ">8"


def main() -> None:
    rows = [["model", "all weights", f"LoRA, rank {RANK}"]]
    for name in (*QWEN2, *YOUNGER, *VISION):
        rows.append([name, fewest_gpus(name), fewest_gpus(name, RANK)])
    table(*rows)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)

"""Which model fits on which GPUs: the estimate that the scripts print before they load anything, as
a table.

    # Qwen2.5, up to 8 GPUs, one process each
    python tests/bench/memory.py
    python tests/bench/memory.py --tokens 4096 16384 --models 7B --no-checkpointing --compile
    python tests/bench/memory.py --lora-rank 16 --tokens 4096 --engine-memory 2

One policy, AdamW, bf16, FSDP, engine asleep during the update; prompts and responses of at most 512
tokens. The largest phase of a step, with CUDA's context. Not counted: what the allocator keeps
beyond what lives, a reference (2 bytes a parameter), a critic (12 bytes a parameter), both shared
by the GPUs.
"""

import tempfile
from dataclasses import dataclass

import torch
import tyro
from gpu import SHAPES, make_config
from report import table

from common.flags import Machine, Rollout
from common.memory.plan import phases_of
from common.memory.shape import ModelShape, model_shape

CARDS = (24, 40, 80, 141)  # GB
ROOM = 0.92  # share of a card that may be planned with


@dataclass
class Args:
    models: tuple[str, ...] = ("0.5B", "1.5B", "3B", "7B", "14B")
    gpus: tuple[int, ...] = (1, 2, 4, 8)
    tokens: tuple[int, ...] = (4096, 16384)  # of a micro-batch
    engine_memory: float = 8.0  # KV cache (GiB)
    engine_parallel: int = 1  # GPUs that share an engine
    checkpointing: bool = True  # --gradient-checkpointing
    compile: bool = False  # --compile
    lora_rank: int = 0  # --lora-rank


def shape_of(name: str, machine: Machine) -> ModelShape:
    if name not in SHAPES:
        raise SystemExit(f"--models {name}: none of {', '.join(SHAPES)}")
    with tempfile.TemporaryDirectory() as folder:
        make_config(name).save_pretrained(folder)
        return model_shape(folder, machine)


def gigabytes(shape: ModelShape, machine: Machine, gpus: int, args: Args) -> float:
    """Of a rank in the phase that takes most."""
    rollout = Rollout(engine_memory=args.engine_memory, engine_parallel=args.engine_parallel)
    gb = phases_of(rollout, machine, gpus, torch.bfloat16, [shape], [], on_gpu=True)
    return gb["context"] + max(gb["rollout"], gb["update"])


def main(args: Args) -> None:
    if any(gpus % args.engine_parallel for gpus in args.gpus):
        raise SystemExit(
            f"--engine-parallel {args.engine_parallel} does not divide --gpus {args.gpus}"
        )
    head = [
        "model",
        "tokens",
        *(f"{n} GPU{'s' * (n > 1)}: GB" for n in args.gpus),
        *(f"{c} GB" for c in CARDS),
    ]
    rows = [head]
    for name in args.models:
        shape = shape_of(name, Machine(lora_rank=args.lora_rank))
        for tokens in args.tokens:
            needs: dict[tuple[int, bool], float] = {}
            for gpus in args.gpus:
                for offload in (False, True):
                    machine = Machine(
                        micro_batch_tokens=tokens,
                        gradient_checkpointing=args.checkpointing,
                        compile=args.compile,
                        offload="optimizer" if offload else "",
                        lora_rank=args.lora_rank,
                    )
                    needs[gpus, offload] = gigabytes(shape, machine, gpus, args)
            cells = [f"{needs[gpus, False]:.0f} ({needs[gpus, True]:.0f})" for gpus in args.gpus]
            for card in CARDS:
                fits = [
                    (gpus, off)
                    for gpus in args.gpus
                    for off in (False, True)
                    if needs[gpus, off] <= ROOM * card
                ]
                cells.append(f"{fits[0][0]}{' offload' * fits[0][1]}" if fits else "-")
            rows.append([name, str(tokens), *cells])
    table(*rows)
    print(
        "In brackets: with --offload optimizer. Last columns: fewest GPUs of a size, "
        f"{ROOM:.0%} of it being used."
    )


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

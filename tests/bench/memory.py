"""Which model fits on which GPUs: the estimate that the scripts print before they load anything, as a table.

    python tests/bench/memory.py                                        # Qwen2.5, up to 8 GPUs, one process each
    python tests/bench/memory.py --tokens 4096 16384 --models 7B --checkpointing
    python tests/bench/memory.py --lora-rank 16 --tokens 4096 --engine-memory 2

A micro-batch has at least the tokens of the longest prompt with one response. One policy, AdamW, bf16, FSDP, engine
asleep during the update. Estimated are weights, gradients, moments and activations; not counted: what allocators keep,
CUDA contexts and graphs (some GB), a reference model (2 bytes a parameter), a critic (12 bytes a parameter, shared by
the GPUs).
"""

import tempfile
from dataclasses import dataclass

import torch
import tyro
from gpu import SHAPES, make_config
from report import table

from common.flags import Machine, Rollout
from common.prepare.memory_plan import memory_phases

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
    lora_rank: int = 0  # --lora-rank


def main(args: Args) -> None:
    rollout = Rollout(engine_memory=args.engine_memory, engine_parallel=args.engine_parallel)
    if any(gpus % args.engine_parallel for gpus in args.gpus):
        raise SystemExit(f"--engine-parallel {args.engine_parallel} does not divide --gpus {args.gpus}")
    head = ["model", "tokens", *(f"{n} GPU{'s' * (n > 1)}: GB" for n in args.gpus), *(f"{c} GB" for c in CARDS)]
    rows = [head]
    for name in args.models:
        if name not in SHAPES:
            raise SystemExit(f"--models {name}: none of {', '.join(SHAPES)}")
        for tokens in args.tokens:
            needs: dict[tuple[int, bool], float] = {}
            for gpus in args.gpus:
                for offload in (False, True):
                    machine = Machine(
                        micro_batch_tokens=tokens,
                        gradient_checkpointing=args.checkpointing,
                        optimizer_offload=offload,
                        lora_rank=args.lora_rank,
                    )
                    with tempfile.TemporaryDirectory() as folder:
                        make_config(name).save_pretrained(folder)
                        gb = memory_phases(rollout, machine, gpus, torch.bfloat16, [folder], [], on_gpu=True)
                    needs[gpus, offload] = max(gb["rollout"], gb["update"])
            cells = [f"{needs[gpus, False]:.0f} ({needs[gpus, True]:.0f})" for gpus in args.gpus]
            for card in CARDS:
                fits = [(gpus, off) for gpus in args.gpus for off in (False, True) if needs[gpus, off] <= ROOM * card]
                cells.append(f"{fits[0][0]}{' offload' * fits[0][1]}" if fits else "-")
            rows.append([name, str(tokens), *cells])
    table(*rows)
    print(f"In brackets: with --optimizer-offload. Last columns: fewest GPUs of a size, {ROOM:.0%} of it being used.")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

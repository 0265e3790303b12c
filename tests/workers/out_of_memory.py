"""grpo.py with its flags, but once in a run the last rank runs out of memory in a backward of step 2.

On a GPU the allocator itself says so, on a CPU an exception stands for it.
"""

import sys

import torch
import tyro

import grpo
from common.distributed import run, unwrap

real, calls = grpo.backward, []


def backward(policy, batches, *rest):
    calls.append(len(batches))
    args, world = rest[1:3]
    again = (args.output_dir / "micro_batch_tokens").exists()
    if len(calls) != 2 or again or world.rank < world.size - 1:
        return real(policy, batches, *rest)
    backwards = []

    def fail(*_) -> None:
        backwards.append(1)
        if len(backwards) == min(2, len(batches)):
            if world.device.type == "cuda":
                torch.empty(2**50, dtype=torch.uint8, device=world.device)
            raise torch.OutOfMemoryError("injected")

    hook = unwrap(policy).model.model.layers[1].register_full_backward_pre_hook(fail)
    try:
        return real(policy, batches, *rest)
    finally:
        hook.remove()


if __name__ == "__main__":
    grpo.backward = backward
    run(grpo.main, tyro.cli(grpo.Args, default=grpo.DEMO, args=sys.argv[1:]))

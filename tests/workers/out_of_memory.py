"""grpo.py with its flags, but once in a run the last rank runs out of memory in a backward of step 2.

On a GPU the allocator itself says so, on a CPU an exception stands for it.
"""

import torch

import grpo
from common.distributed import run
from common.flags import parse

real, calls = grpo.backward, []


def backward(policy, minibatch, tokens, args, world, **options):
    batches = minibatch.micro_batches
    calls.append(len(batches))
    again = (args.run.output_dir / "micro_batch_tokens").exists()
    if len(calls) != 2 or again or world.rank < world.size - 1:
        return real(policy, minibatch, tokens, args, world, **options)
    backwards = []

    def fail(*_) -> None:
        backwards.append(1)
        if len(backwards) == min(2, len(batches)):
            if world.device.type == "cuda":
                torch.empty(2**50, dtype=torch.uint8, device=world.device)
            raise torch.OutOfMemoryError("injected")

    hook = policy.model.model.layers[1].register_full_backward_pre_hook(fail)
    try:
        return real(policy, minibatch, tokens, args, world, **options)
    finally:
        hook.remove()


if __name__ == "__main__":
    grpo.backward = backward
    args, _ = parse(grpo.Args, grpo.DEMO, grpo.__doc__)
    run(grpo.main, args)

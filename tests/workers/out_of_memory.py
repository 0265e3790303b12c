"""grpo.py, or the script that SCRIPT names, with its flags, but once in a run the last rank runs
out of memory in a backward of step 2.

The allocator itself says so: on a CPU since a rank may not take more than is free.
"""

import importlib
import os

import torch

from common import rehearsal
from common.flags import parse
from common.limits import free_memory
from common.script import run

script = importlib.import_module(os.environ.get("SCRIPT", "grpo"))
real, calls = script.backward, []


def backward(model, minibatch, tokens, args, world, **options):
    policy = model[0] if isinstance(model, torch.nn.ModuleList) else model  # with its teacher
    batches = minibatch.micro_batches
    calls.append(len(batches))
    again = (args.run.output_dir / "micro_batch_tokens").exists()
    if len(calls) != 2 or again or world.rank < world.size - 1:
        return real(model, minibatch, tokens, args, world, **options)
    backwards = []

    def fail(*_) -> None:
        backwards.append(1)
        if len(backwards) == min(2, len(batches)):
            too_much = 2**50 if world.device.type == "cuda" else free_memory() + 2**30
            torch.empty(too_much, dtype=torch.uint8, device=world.device)
            raise AssertionError("there is no limit")

    hook = policy.model.model.layers[1].register_full_backward_pre_hook(fail)
    try:
        return real(model, minibatch, tokens, args, world, **options)
    finally:
        hook.remove()


if __name__ == "__main__":
    rehearsal.is_worthwhile = lambda device: False  # on a GPU it would count as step 1
    script.backward = backward
    args, _ = parse(script.Args, script.DEMO, script.__doc__)
    run(script.main, args)

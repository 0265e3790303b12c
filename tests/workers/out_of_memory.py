"""grpo.py with its flags, but the first update of step 2 runs out of memory inside its second backward."""

import sys

import torch
import tyro

import grpo
from common.distributed import run, unwrap

real, calls = grpo.backward, []


def backward(policy, batches, *rest):
    calls.append(len(batches))
    if len(calls) != 2:
        return real(policy, batches, *rest)
    backwards = []

    def fail(*_) -> None:
        backwards.append(1)
        if len(backwards) == min(2, len(batches)):
            raise torch.OutOfMemoryError("injected")

    hook = unwrap(policy).model.model.layers[1].register_full_backward_pre_hook(fail)
    try:
        return real(policy, batches, *rest)
    finally:
        hook.remove()


if __name__ == "__main__":
    grpo.backward = backward
    run(grpo.main, tyro.cli(grpo.Args, default=grpo.DEMO, args=sys.argv[1:]))

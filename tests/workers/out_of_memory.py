"""grpo.py with its flags, but the first update of step 2 runs out of memory after half of its micro-batches."""

import sys

import torch
import tyro

import grpo
from common.distributed import run

real, calls = grpo.backward, []


def backward(policy, batches, *rest):
    calls.append(len(batches))
    if len(calls) == 2:
        real(policy, batches[: (len(batches) + 1) // 2], *rest)
        raise torch.OutOfMemoryError("injected")
    return real(policy, batches, *rest)


if __name__ == "__main__":
    grpo.backward = backward
    run(grpo.main, tyro.cli(grpo.Args, default=grpo.DEMO, args=sys.argv[1:]))

"""grpo.py under an engine that is wrong on purpose, for --correction to make good.

    torchrun --nproc_per_node 2 results/notebook/wrong_engine.py bf16 --dtype fp32 \\
        --correction truncate
    torchrun --nproc_per_node 2 results/notebook/wrong_engine.py int3 --dtype fp32 \\
        --max-logprob-gap 1

bf16: the engine computes in bf16, whatever the trainer does. int3: its matrices have 3 bits, too.
Evaluations are of the policy as it is: its matrices have all their bits.
"""

import sys
from dataclasses import replace

import torch
from report import ROOT  # noqa: F401  (puts the repository on the import path)
from torch import Tensor

import common.engine.vllm
import common.rollout.rollouts
import grpo
from common.engine.vllm import VllmEngine
from common.flags import parse
from common.script import run


def in_three_bits(tensor: Tensor) -> Tensor:
    """A matrix rounded to whole numbers from -3 to 3, times a scale for each row; vectors, as those
    of norms, stay as they are."""
    if tensor.dim() < 2:
        return tensor
    scale = tensor.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / 3
    return (tensor / scale).round() * scale


class WrongEngine(VllmEngine):
    rounding = False
    evaluating = False

    def __init__(self, config):
        super().__init__(replace(config, dtype=torch.bfloat16))

    def sync_weights(self, weights, step):
        if self.rounding and not self.evaluating:
            weights = ((name, in_three_bits(tensor)) for name, tensor in weights)
        super().sync_weights(weights, step)


class Rollouts(common.rollout.rollouts.Rollouts):
    def evaluate(self, *args, **kwargs):  # which syncs the engine, as each step does
        self.engine.evaluating = True
        found = super().evaluate(*args, **kwargs)
        self.engine.evaluating = False
        return found


if __name__ == "__main__":
    if sys.argv[1:2] not in (["bf16"], ["int3"]):
        print(f"usage: wrong_engine.py bf16|int3 [flags of grpo.py]\n\n{__doc__}")
        if "--help" in sys.argv:
            raise SystemExit
        raise SystemExit("how is the engine wrong? bf16 or int3, before all flags")
    WrongEngine.rounding = sys.argv.pop(1) == "int3"
    common.engine.vllm.VllmEngine = WrongEngine
    grpo.Rollouts = Rollouts
    run(grpo.main, *parse(grpo.Args, grpo.DEMO, grpo.__doc__))

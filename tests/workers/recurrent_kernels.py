"""The kernel of flash-linear-attention in a pack, run by Triton's interpreter on a CPU: its largest
difference from transformers' function in torch, segment by segment, for the outputs and the
gradients of each input, relative to the largest value.

    pip install fla-core==0.6.0
    TRITON_INTERPRET=1 PYTHONPATH=. python tests/workers/recurrent_kernels.py
"""

import inspect
import json

import torch

import common.torch_repair  # noqa: F401  (before anything imports torchvision)
from common.recurrent import delta_rule_by_fla, delta_rule_over_pack

UNITS = [[70, 40, 1, 6], [2, 30, 2], [1, 2, 9], [7]]


class Number(int):
    """The variable of a loop, which has a method of tensors in a kernel that is compiled."""

    def to(self, dtype):
        return self


def outputs_and_gradients(over_pack, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    query, key, value, g, beta = inputs
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    rule = inspect.unwrap(torch_chunk_gated_delta_rule)
    outputs, _ = over_pack(
        rule, UNITS, query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True
    )
    return [outputs, *torch.autograd.grad(outputs.square().sum(), inputs)]


def main() -> None:
    import fla.ops.common.chunk_delta_h
    from triton.runtime.autotuner import Autotuner

    # the interpreter has no clock to tune with: the first configuration is taken
    Autotuner._bench = lambda self, *_, **__: [0.0, 0.0, 0.0]
    fla.ops.common.chunk_delta_h.range = lambda *bounds: map(Number, range(*bounds))
    torch.manual_seed(0)
    length = sum(map(sum, UNITS))
    inputs = [torch.randn(1, length, 2, 16) for _ in range(3)]
    inputs += [-torch.rand(1, length, 2), torch.rand(1, length, 2)]
    for tensor in inputs:
        tensor.requires_grad_()
    expected = outputs_and_gradients(delta_rule_over_pack, inputs)
    found = outputs_and_gradients(delta_rule_by_fla, inputs)
    names = ("outputs", "query", "key", "value", "g", "beta")
    differences = {}
    for name, one, other in zip(names, found, expected, strict=True):
        differences[name] = ((one - other).abs().max() / other.abs().max()).item()
    print(json.dumps(differences))


if __name__ == "__main__":
    main()

"""LoRA (arXiv 2106.09685): a frozen model, and beside each adapted linear layer a trained product
of two small matrices.

W = W0 + alpha / rank · B · A is computed in float32 and rounded once, wherever a weight is read: in
the forward, for the engine, in an export. So all of them see the same bits, and W0 is never
changed.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from common.flags import Machine
from common.progress import say


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W0 [out, in] + scale · B [out, r] · A [r, in], in the dtype of W0.

    B is scaled before the product, so that a plain sum is left: compiled it has the same bits, and
    one kernel adds and rounds. addmm would need W0 in float32.
    """
    wide = torch.promote_types(weight.dtype, a.dtype)
    return (weight + (scale * b.to(wide)) @ a.to(wide)).to(weight.dtype)


class MergedLinear(torch.autograd.Function):
    """x · Wᵀ + bias with x [..., in] -> [..., out]. W is as large as W0: the backward computes it
    again, and never its gradient."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return linear(x, merged(weight, a, b, scale), bias)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        dtype = gradient.dtype
        gradient_x = gradient @ merged(weight, a, b, ctx.scale)
        rows = gradient.flatten(0, -2)  # [T, out]
        inputs = x.flatten(0, -2)  # [T, in]
        gradient_a = (rows @ b.to(dtype)).mT @ inputs
        gradient_b = rows.mT @ (inputs @ a.to(dtype).mT)
        gradient_a = ctx.scale * gradient_a.to(a.dtype)
        gradient_b = ctx.scale * gradient_b.to(b.dtype)
        return gradient_x, None, None, gradient_a, gradient_b, None


class LoraLinear(nn.Linear):
    """A linear layer whose `weight`, W0, and bias are frozen; lora_A [r, in] and lora_B [out, r]
    are trained."""

    @classmethod
    def adapt(cls, layer: nn.Linear, machine: Machine, generator: torch.Generator) -> None:
        """Convert a layer in place: FSDP2, if it has sharded its weight, refers to this module."""
        weight = layer.weight
        rank = machine.lora_rank
        options = {
            "dtype": torch.promote_types(weight.dtype, torch.float32),
            "device": weight.device,
        }
        layer.__class__ = cls
        layer.scale = machine.lora_alpha / rank
        layer.uses_adapter = True
        layer.lora_A = nn.Parameter(torch.empty(rank, layer.in_features, **options))
        # zeros: at first W is W0
        layer.lora_B = nn.Parameter(torch.zeros(layer.out_features, rank, **options))
        if not weight.is_meta:  # on meta parameters are only counted (common/memory/shape.py)
            bound = layer.in_features**-0.5
            # drawn on the CPU, in float32
            initial = torch.empty(rank, layer.in_features)
            initial.uniform_(-bound, bound, generator=generator)
            layer.lora_A.data.copy_(initial)

    def forward(self, x: Tensor) -> Tensor:
        if not self.uses_adapter:
            return linear(x, self.weight, self.bias)
        return MergedLinear.apply(x, self.weight, self.bias, self.lora_A, self.lora_B, self.scale)


def add_adapters(
    model: nn.Module, layers: list[nn.Module], machine: Machine, seed: int = 0
) -> None:
    """Freeze a model, and adapt the linear layers in `layers` that --lora-targets names. SystemExit
    if there are none of that name."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)  # the same on all ranks
    targets = machine.lora_targets.split(",")
    linear_names: set[str] = set()
    for layer in layers:
        for path, module in layer.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            name = path.rpartition(".")[2]
            linear_names.add(name)
            if name in targets or "all" in targets:
                LoraLinear.adapt(module, machine, generator)
    names = [name for layer in layers for name, _ in layer.named_parameters()]
    if any(".experts." in name for name in names):
        say("warning: --lora-rank: experts, which are no linear layers here, are not adapted")
    missing = sorted(set(targets) - linear_names - {"all"})
    if missing or not linear_names:
        flag = f"--lora-targets {', '.join(missing) or 'all'}"
        reason = "it has no linear layers"
        if linear_names:
            reason = f"its layers have {', '.join(sorted(linear_names))}"
        raise SystemExit(f"{flag}: {reason}; head and embeddings are not adapted")


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """(name, layer) of the adapted layers of a model."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


class WithoutAdapters(nn.Module):
    """An adapted model as it was before: the same weights, without the adapters."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *inputs: object, **options: object) -> tuple[Tensor, ...]:
        layers = [layer for _, layer in adapted_layers(self.model)]
        try:
            for layer in layers:
                layer.uses_adapter = False
            return self.model(*inputs, **options)
        finally:
            for layer in layers:
                layer.uses_adapter = True

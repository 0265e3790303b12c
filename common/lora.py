"""LoRA (arXiv 2106.09685): a frozen model with a trained product of two small matrices beside each
linear layer.

W = W0 + alpha / rank · B · A is computed in float32, and rounded once, wherever a weight is read:
in the forward, for the engine, in an export. So all of them have the same bits, and W0 is never
written to.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from common.flags import Machine
from common.progress import say


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W0 [out, in] + scale · B [out, r] · A [r, in], in the dtype of W0."""
    wide = torch.promote_types(weight.dtype, a.dtype)
    return torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=scale).to(weight.dtype)


class MergedLinear(torch.autograd.Function):
    """x · Wᵀ + bias; neither W nor its gradient, both as large as W0, is kept between forward and
    backward."""

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
        rows, x = gradient.flatten(0, -2), x.flatten(0, -2)  # [T, out], [T, in]
        gradient_a = (rows @ b.to(dtype)).mT @ x
        gradient_b = rows.mT @ (x @ a.to(dtype).mT)
        return (
            gradient_x,
            None,
            None,
            ctx.scale * gradient_a.to(a.dtype),
            ctx.scale * gradient_b.to(b.dtype),
            None,
        )


class LoraLinear(nn.Linear):
    """A linear layer whose `weight`, W0, and bias are frozen; lora_A [r, in] and lora_B [out, r]
    are trained."""

    @classmethod
    def adapt(cls, layer: nn.Linear, machine: Machine, generator: torch.Generator) -> None:
        """In place: FSDP2 knows the layer, and keeps what it has sharded of it."""
        weight, bound = layer.weight, layer.in_features**-0.5
        options = {
            "dtype": torch.promote_types(weight.dtype, torch.float32),
            "device": weight.device,
        }
        layer.__class__ = cls
        layer.scale, layer.adapted = machine.lora_alpha / machine.lora_rank, True
        layer.lora_A = nn.Parameter(torch.empty(machine.lora_rank, layer.in_features, **options))
        # W is W0 at first
        layer.lora_B = nn.Parameter(torch.zeros(layer.out_features, machine.lora_rank, **options))
        if not weight.is_meta:
            layer.lora_A.data.copy_(
                torch.empty(layer.lora_A.shape).uniform_(-bound, bound, generator=generator)
            )

    def forward(self, x: Tensor) -> Tensor:
        if not self.adapted:
            return linear(x, self.weight, self.bias)
        return MergedLinear.apply(x, self.weight, self.bias, self.lora_A, self.lora_B, self.scale)


def add_adapters(
    model: nn.Module, layers: list[nn.Module], machine: Machine, seed: int = 0
) -> None:
    """Freeze a model, and adapt the linear layers in `layers` that --lora-targets names. SystemExit
    if it has none."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)  # the same on all ranks
    targets, there = machine.lora_targets.split(","), set()
    for name, module in [pair for layer in layers for pair in layer.named_modules()]:
        if isinstance(module, nn.Linear):
            there.add(kind := name.rpartition(".")[2])
            if kind in targets or "all" in targets:
                LoraLinear.adapt(module, machine, generator)
    if any(p.dim() > 2 for layer in layers for p in layer.parameters()):
        say("warning: --lora-rank: experts, which are no linear layers here, are not adapted")
    missing = set(targets) - there - {"all"}
    if missing or not there:
        known = (
            f"its layers have {', '.join(sorted(there))}" if there else "it has no linear layers"
        )
        asked = ", ".join(sorted(missing)) or "all"
        raise SystemExit(f"--lora-targets {asked}: {known}; head and embeddings are not adapted")


def adapters(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """The adapted layers of a model, with their names."""
    return (
        (name, module) for name, module in model.named_modules() if isinstance(module, LoraLinear)
    )


class Base(nn.Module):
    """The model that an adapted one was: the same weights, without the adapters."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *inputs: object) -> tuple[Tensor, ...]:
        layers = [layer for _, layer in adapters(self.model)]
        try:
            for layer in layers:
                layer.adapted = False
            return self.model(*inputs)
        finally:
            for layer in layers:
                layer.adapted = True

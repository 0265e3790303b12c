"""Host memory for what the device does without at times: Adam's moments, and the frozen base of
LoRA."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def host_memory(tensor: Tensor) -> Tensor:
    """Memory on the host for a copy of a tensor, pinned if the tensor is on a GPU: copies between
    pinned memory and the device can run while both sides go on."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")


class HostBase:
    """The frozen weights of an adapted model, which make room while the engine is awake.

    They never change: the host has a copy of them, made once, and the device gets it anew.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        self.model = model
        self.device = device
        self.copies: dict[Tensor, Tensor] = {}  # of each frozen parameter, or of its shard
        for parameter in model.parameters():
            if not parameter.requires_grad:
                self.copies[parameter] = host_memory(parameter).copy_(parameter.detach())
        self.on_device = True

    def to_host(self) -> None:
        """Free the device's memory. Until `to_device` the model computes nothing; `full_parameters`
        brings each weight to the device when it reads it."""
        self._replace(lambda copy: copy)
        self.on_device = False

    def to_device(self) -> None:
        if self.on_device:
            return
        self._replace(lambda copy: copy.to(self.device, non_blocking=True, copy=True))
        self.on_device = True

    def _replace(self, of_copy: Callable[[Tensor], Tensor]) -> None:
        """Replace each frozen weight by what `of_copy` makes of its copy, as Module.to does, which
        FSDP2 supports: the parameters stay the same objects."""
        remaining = dict(self.copies)  # a tied weight has two places, and is replaced once

        def replaced(tensor: Tensor) -> Tensor:
            copy = remaining.pop(tensor, None)
            return tensor if copy is None else of_copy(copy)

        self.model._apply(replaced)

"""AdamW with a loss scale and a clipped global norm; no step if a gradient is not finite."""

import math

import torch
from torch import nn

from common.distributed import average_whole_gradients, gathered
from common.files import memory_advice
from common.memory.halving import limited_memory
from common.metrics import Means
from common.offload import host_memory
from common.precision import LossScale

MAX_SKIPPED = 5  # steps in a row
TOO_MANY_SKIPPED = (
    f"{MAX_SKIPPED} optimizer steps in a row had gradients that are not finite: weights or scores "
    "have exploded. Lower --learning-rate; --dtype fp32 shows whether the number format is to "
    "blame; --resume goes on from a checkpoint"
)


def lr_factor(
    step: int, total_steps: int, warmup_steps: float, schedule: str, floor: float
) -> float:
    """Share of the peak learning rate at step 0, 1, ...; it is positive at step 0, and 0 at
    negative steps.

    Linear warm-up (step + 1) / warmup, then constant, or linear or cosine decay to `floor`. A
    warm-up below 1 is a share of all steps.
    """
    if step < 0:
        return 0.0
    warmup = int(warmup_steps)
    if warmup_steps < 1:
        warmup = round(warmup_steps * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    progress = (step - warmup) / max(1, total_steps - warmup)
    if schedule == "linear":
        decay = 1 - progress
    else:
        decay = 0.5 * (1 + math.cos(math.pi * progress))
    return floor + (1 - floor) * decay


# host memory for Adam's moments, by parameter and name
HostMoments = dict[tuple[torch.Tensor, str], torch.Tensor]


class GuardedAdamW:
    """AdamW over a model that is trained, with its loss scale.

    prefix: of the metric `prefix`/grad_norm.
    """

    def __init__(
        self,
        model: nn.Module,
        compute_dtype: torch.dtype,
        *,
        weight_decay: float,
        max_grad_norm: float,  # 0: no clipping
        betas: tuple[float, float] = (0.9, 0.999),
        offload: bool = False,
        prefix: str = "optim",
    ):
        trained = [p for p in model.parameters() if p.requires_grad]
        self.model = model
        self.optimizer = torch.optim.AdamW(
            trained, lr=0.0, betas=betas, weight_decay=weight_decay, fused=True
        )
        self.loss_scale = LossScale.for_dtype(compute_dtype)
        self.max_grad_norm = max_grad_norm
        self.offload = offload
        self.host_moments: HostMoments = {}  # with `offload`, of each that has been on the host
        self.prefix = prefix
        self.skipped = 0  # steps in a row, with the lowest scale

    @property
    def scale(self) -> float:
        """The factor by which a loss is multiplied before its backward."""
        return self.loss_scale.scale

    def reserve_moments(self) -> list[torch.Tensor]:
        """Allocate stand-ins for those of Adam's moments that the device does not hold: before the
        first step, or while they are on the host."""
        reserved: list[torch.Tensor] = []
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                moment = self.optimizer.state.get(parameter, {}).get("exp_avg")
                if moment is None or moment.device != parameter.device:
                    reserved += [torch.empty_like(parameter), torch.empty_like(parameter)]
        return reserved

    def step(self, lr: float) -> Means:
        """Unscale, clip the global norm, and step; skip the step if a gradient of any rank is not
        finite.

        The norm is that of all shards, so every rank decides alike without a further collective.
        Clears the gradients. With `offload` Adam's moments are moved to the device for the step,
        and to the host after it. SystemExit after MAX_SKIPPED skipped steps in a row; above the
        lowest loss scale they do not count.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # of parameters that are not sharded: FSDP2 averages the sharded ones alone
        average_whole_gradients(self.model)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = gathered(torch.nn.utils.get_total_norm(gradients))
        grad_norm = norm.item() / self.scale
        is_finite = math.isfinite(grad_norm)
        if is_finite:
            self._clip_and_step(gradients, grad_norm)
        self.optimizer.zero_grad(set_to_none=True)
        # asked before the update, which may make the scale the lowest one
        is_lowest_scale = self.scale <= 1.0
        self.loss_scale.update(is_finite)
        if is_finite:
            self.skipped = 0
        elif is_lowest_scale:  # above it fp16 searches its scale by skipping steps
            self.skipped += 1
        if self.skipped >= MAX_SKIPPED:
            raise SystemExit(TOO_MANY_SKIPPED)
        means = Means()
        means.add(f"{self.prefix}/grad_norm", grad_norm)
        means.add_total("optim/skipped_steps", not is_finite, on_every_rank=True)
        return means

    def _clip_and_step(self, gradients: list[torch.Tensor], grad_norm: float) -> None:
        """`gradients` are still scaled; `grad_norm` is their norm without the scale."""
        clip = 1.0
        if self.max_grad_norm > 0:
            clip = min(1.0, self.max_grad_norm / (grad_norm + 1e-6))
        factor = clip / self.scale
        if gradients and factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        device = next(self.model.parameters()).device
        # the first step allocates the moments
        with memory_advice("the optimizer's step"), limited_memory(device):
            move_states(self.optimizer, device, self.host_moments)
            self.optimizer.step()
        if self.offload:
            move_states(self.optimizer, torch.device("cpu"), self.host_moments)


def make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Adam's moments before its first step, for a checkpoint to save or to fill: zeros on the
    host."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter, device="cpu")
                state["exp_avg_sq"] = torch.zeros_like(parameter, device="cpu")


def move_states(
    optimizer: torch.optim.Optimizer, device: torch.device, host_moments: HostMoments
) -> None:
    """Move Adam's moments to a device; its step counts stay where they are. On the host each has
    one place, which `host_moments` keeps.

    Nothing waits for the copies: before the moments are read on the host, `torch.cuda.synchronize`
    is due.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.device == device:
                continue
            if device.type != "cpu":
                state[name] = value.to(device, non_blocking=True)
                continue
            place = host_moments.get((parameter, name))
            if place is None:
                place = host_memory(value)
                host_moments[parameter, name] = place
            state[name] = place.copy_(value, non_blocking=True)

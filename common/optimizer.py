"""AdamW with what protects it: loss scale, clipping to a global norm, no step where a gradient is
not finite."""

import math

import torch
from torch import nn

from common.distributed import average_gradients, whole
from common.files import memory_advice, refuse
from common.memory.halving import limited_memory
from common.metrics import Means
from common.precision import LossScale

MAX_SKIPPED = 5
NOT_FINITE = (
    "had gradients that are not finite: weights or scores have exploded. Lower "
    "--learning-rate; --dump-rollouts-every "
    "1 shows scores and texts, --dtype fp32 whether the number format is to blame; --resume "
    "goes on from a checkpoint"
)


def lr_factor(
    step: int, total_steps: int, warmup_steps: float, schedule: str, floor: float
) -> float:
    """Share of the peak learning rate at step 0, 1, ...; the first step is never 0, what comes
    before it is.

    Linear warm-up (step + 1) / warmup, then constant, or linear or cosine decay to `floor`. A
    warm-up < 1 is a share.
    """
    warmup = round(warmup_steps * total_steps) if warmup_steps < 1 else int(warmup_steps)
    if step < 0:
        return 0.0
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    progress = (step - warmup) / max(1, total_steps - warmup)
    decay = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return floor + (1 - floor) * decay


class GuardedAdamW:
    """AdamW over a model that is trained, with its loss scale. Metrics are named
    `prefix`/grad_norm."""

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
        self.model, self.optimizer = (
            model,
            torch.optim.AdamW(trained, lr=0.0, betas=betas, fused=True),
        )
        self.loss_scale = LossScale.for_dtype(compute_dtype)
        self.weight_decay, self.max_grad_norm = weight_decay, max_grad_norm
        self.offload, self.prefix = offload, prefix
        self.skipped = 0  # steps in a row

    @property
    def scale(self) -> float:
        """What a loss is multiplied with before its backward."""
        return self.loss_scale.scale

    def step(self, lr: float) -> Means:
        """Unscale, clip to the global norm and step, or skip the step if any gradient of any rank
        is not finite.

        The norm is that of all shards: every rank takes the same decision without a further
        collective. Clears the gradients. With `offload` Adam's moments visit the device for the
        step, and are on the host otherwise. SystemExit when too many steps in a row had to be
        skipped.
        """
        for group in self.optimizer.param_groups:  # of this run, not of the checkpoint
            group["lr"], group["weight_decay"] = lr, self.weight_decay
        average_gradients(self.model)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm(gradients))
        grad_norm, finite = norm.item() / self.scale, bool(torch.isfinite(norm))
        if finite:
            clip = (
                min(1.0, self.max_grad_norm / (grad_norm + 1e-6)) if self.max_grad_norm > 0 else 1.0
            )
            if gradients and clip / self.scale != 1.0:
                torch._foreach_mul_(gradients, clip / self.scale)
            device = next(self.model.parameters()).device
            # the first one makes the moments
            with memory_advice("the optimizer's step"), limited_memory(device):
                move_states(self.optimizer, device)
                self.optimizer.step()
            if self.offload:
                move_states(self.optimizer, torch.device("cpu"))
        self.optimizer.zero_grad(set_to_none=True)
        lowest_scale = self.scale <= 1.0  # in fp16 it is found by skipping steps
        self.loss_scale.update(finite)
        self.skipped = 0 if finite else self.skipped + lowest_scale
        refuse(self.skipped >= MAX_SKIPPED, f"{MAX_SKIPPED} optimizer steps in a row {NOT_FINITE}")
        means = Means()
        means.add(f"{self.prefix}/grad_norm", grad_norm)
        means.add_total("optim/skipped_steps", not finite, on_every_rank=True)
        return means


def make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Adam's moments before its first step: zeros, on the host, for a checkpoint to save or to
    fill."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if not (state := optimizer.state[parameter]):
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, device="cpu")
            state["exp_avg_sq"] = torch.zeros_like(parameter, device="cpu")


def move_states(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Adam's moments to a device; its step counts stay where they are."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[name] = value.to(device)

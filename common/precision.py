"""One choice of number format for trainer, engine and weight sync; the gap between the log-probs of
engine and trainer; loss scaling."""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.distributed import all_reduce

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# a larger mean difference of log-probs is a broken sync, not rounding
GAP_LIMITS = {torch.bfloat16: 0.1, torch.float16: 0.03, torch.float32: 1e-3}


def check_device(device: torch.device) -> None:
    """Run a small kernel. ValueError, with the remedy, if torch is built without code for this
    GPU."""
    try:
        torch.ones(8, device=device).square().sum().item()
    except RuntimeError as error:
        if "no kernel image" not in str(error):
            raise
        remedy = "torch for a newer CUDA"
        if torch.cuda.get_device_capability(device)[0] < 8:
            remedy = "requirements-v100.txt (CUDA 12.6 wheels)"
        gpu = torch.cuda.get_device_name(device)
        raise ValueError(
            f"torch {torch.__version__} is built for {torch.cuda.get_arch_list()}, not for {gpu}: "
            f"install {remedy}"
        ) from error


def choose_dtype(flag: str, device: torch.device) -> tuple[torch.dtype, str]:
    """(compute dtype, reason) for `--dtype` (docs/scaling.md). ValueError for bf16 on a GPU below
    sm_80."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if flag == "bf16" and major < 8:
            gpu = f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
            raise ValueError(f"--dtype bf16: {gpu} has no bf16; use --dtype fp16")
        if flag == "auto" and major < 8:
            return torch.float16, f"sm_{major}{minor} has no bf16"
        if flag == "auto":
            return torch.bfloat16, "bf16 GPU"
    elif flag == "auto":
        capabilities = {}
        if hasattr(torch.cpu, "get_capabilities"):
            capabilities = torch.cpu.get_capabilities()
        if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"):
            return torch.bfloat16, "CPU with bf16 instructions"
        return torch.float32, "CPU without bf16 instructions"
    return DTYPES[flag], "as asked"


def checked_gap(rollout_logprobs: Tensor, logprobs: Tensor, limit: float, step: int) -> float:
    """Mean |engine - trainer| of the log-probs (nats) over the tokens of all ranks; this rank's are
    [T]. RuntimeError above the limit, and for NaN."""
    difference = (rollout_logprobs - logprobs).abs().sum().item()
    total, count = all_reduce([difference, len(logprobs)])
    gap = total / max(count, 1.0)
    if not gap <= limit:  # also if it is NaN
        raise RuntimeError(
            f"step {step}: the engine's log-probs differ from the trainer's by {gap:.2g} on "
            f"average, more than --max-logprob-gap {limit:.2g}: stale or damaged weights, or a "
            "cache that outlived the sync"
        )
    return gap


@dataclass
class LossScale:
    """Dynamic loss scale (arXiv 1710.03740, sec. 3.2), for fp16: doubles after 400 good steps in a
    row, up to 2^24, and halves on overflow, down to 1. Other dtypes have a constant scale of 1."""

    scale: float = 1.0
    dynamic: bool = False
    growth_interval: int = 400
    good_steps: int = 0

    @classmethod
    def for_dtype(cls, dtype: torch.dtype) -> "LossScale":
        if dtype == torch.float16:
            return cls(scale=2.0**14, dynamic=True)
        return cls()

    def update(self, is_finite: bool) -> None:
        """Adapt to a step. is_finite: whether its gradients were."""
        if not self.dynamic:
            return
        if not is_finite:
            self.scale = max(self.scale / 2, 1.0)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.scale = min(self.scale * 2, 2.0**24)
            self.good_steps = 0

    def state_dict(self) -> dict:
        return {"scale": self.scale, "good_steps": self.good_steps, "dynamic": self.dynamic}

    def load_state_dict(self, state: dict) -> None:
        if state.get("dynamic", self.dynamic) != self.dynamic:
            return  # the state of a run in another dtype
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])

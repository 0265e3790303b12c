"""A run as one rank sees it, and how its models are made."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.data.prompts import PromptLoader
from common.distributed import World, wrap_model
from common.flags import Machine, Run
from common.lora import Base, Lora
from common.models import load_critic, load_policy
from common.optimizer import GuardedAdamW
from common.pictures import PixelLimits
from common.torch_repair import transformers
from common.vision import Vision


@dataclass
class Job:
    """A run as one rank sees it, and its models."""

    script: str
    world: World
    mesh: DeviceMesh  # which ranks share a copy of a model
    output_dir: Path
    path: str  # folder of the model
    tokenizer: transformers.PreTrainedTokenizerBase
    compute_dtype: torch.dtype
    attention: str
    limits: PixelLimits
    vision: Vision | None  # None for a model that reads text alone
    machine: Machine
    run: Run
    summary: str  # of all that, for the console
    identity: dict[str, str]  # what must be the same in a checkpoint that is resumed
    checkpoint: Path | None  # to go on from; its files are what its manifest says
    at_outage: list[Callable[[int], object]] = field(default_factory=list)  # what saves the beginning of a step

    def open_loader(self, num_rows: int) -> PromptLoader:
        """The order of rows, where the checkpoint has left it. SystemExit if that is of other data."""
        loader = PromptLoader(num_rows, self.run.seed)
        if self.checkpoint:
            loader.load_state_dict(json.loads((self.checkpoint / "trainer.json").read_text())["loader"])
        return loader

    def load_policy(self, from_scratch: bool = False) -> nn.Module:
        """The policy, to be trained: float32 master weights, sharded or replicated."""
        return load_policy(self.path, from_scratch=from_scratch, **self._trained)

    def load_critic(self, path: str) -> nn.Module:
        """A critic, to be trained, on the backbone of the model in a folder."""
        return load_critic(path, **self._trained)

    def load_reference(self, policy: nn.Module) -> nn.Module:
        """The policy as it was, frozen, in the dtype that FSDP2 would cast it to; with LoRA its base."""
        if self.machine.lora_rank:
            return Base(policy)
        reference = load_policy(self.path, dtype=self.compute_dtype, **self._loaded).requires_grad_(False)
        return reference.to(self.reference_device)

    def adamw(self, model: nn.Module, weight_decay: float, max_grad_norm: float, **options) -> GuardedAdamW:
        """Its optimizer, with loss scale and offload as the machine asks for; options as for `GuardedAdamW`."""
        options |= {"weight_decay": weight_decay, "max_grad_norm": max_grad_norm}
        return GuardedAdamW(model, self.compute_dtype, offload=self.machine.optimizer_offload, **options)

    @property
    def reference_device(self) -> torch.device:
        """Where the reference model is when it is not used."""
        return torch.device("cpu") if self.machine.reference_offload else self.world.device

    @property
    def _loaded(self) -> dict[str, Any]:
        wrap = partial(wrap_model, mesh=self.mesh, compute_dtype=self.compute_dtype, whole=self.machine.lora_rank > 0)
        trust = self.machine.trust_remote_code
        return {"attention": self.attention, "vision": self.vision, "trust_remote_code": trust, "wrap": wrap}

    @property
    def _trained(self) -> dict[str, Any]:
        machine, options = self.machine, dict(self._loaded)
        options |= {"gradient_checkpointing": machine.gradient_checkpointing, "compile_layers": machine.compile}
        options |= {"freeze_vision": machine.freeze_vision}
        if machine.lora_rank:
            options["lora"] = Lora(machine.lora_rank, machine.lora_alpha, machine.lora_targets, self.run.seed)
            options["dtype"] = self.compute_dtype
        return options

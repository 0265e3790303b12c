"""A model and its AdamW, trained or out of a checkpoint, into another one: reshard.py full|lora
FROM TO.

FROM is a run folder, or "nothing"; prints what there is after that, as hashes.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from torch import nn

from common import shards
from common.checkpoint import Checkpoints
from common.data.order import RowOrder
from common.distributed import World, gathered, init_world, make_mesh, wrap_model
from common.flags import Machine
from common.hub import FOLDERS
from common.models import load_model
from common.optimizer import GuardedAdamW
from common.script import run
from common.shards import find_checkpoint

shards.FILE_BYTES = 100  # each rank has several files


class Odd(nn.Module):
    """Tied weights, a buffer, and parameters that two ranks cannot halve: of one number the second
    has nothing."""

    def __init__(self):
        super().__init__()
        self._no_split_modules = ["Linear"]  # as of a transformers model
        self.embed = nn.Embedding(7, 3)
        self.layers = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 3)])
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("counts", torch.arange(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden * self.gain)


def make(kind: str, world: World) -> nn.Module:
    if kind == "lora":
        return load_model(FOLDERS["tiny"], "sdpa", lora_flags=Machine(lora_rank=3))
    return wrap_model(Odd(), make_mesh(world, "fsdp"), torch.float32)


def train(model: nn.Module, adamw: GuardedAdamW) -> None:
    for step in range(3):
        for place, parameter in enumerate(model.parameters()):
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, 0.1 * step - 0.01 * place)
        adamw.step(0.1)


def hashes_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Of weights, buffers and moments."""
    tensors = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        for key, tensor in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}.{key}"] = tensor
    hashes = {}
    for name, tensor in tensors.items():
        data = gathered(tensor).detach().contiguous().numpy().tobytes()
        hashes[name] = f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"
    return hashes


def main(_: None) -> None:
    kind, start, end = sys.argv[1:]
    world = init_world()
    torch.manual_seed(0 if start == "nothing" else 1)
    model = make(kind, world)
    adamw = GuardedAdamW(model, torch.float32, weight_decay=0.01, max_grad_norm=1.0)
    loader = RowOrder(20, seed=0)
    found = find_checkpoint(Path(start), "auto", world)
    checkpoints = Checkpoints(
        Path(end),
        world,
        {"policy": adamw},
        loader,
        save_every=20,
        keep=2,
        identity={},
        micro_batch_tokens=1024,
    )
    if found is None:
        train(model, adamw)
        loader.next(13)
    else:
        checkpoints.resume(found)
    result = {"loader": loader.state_dict(), **hashes_of(model, adamw.optimizer)}
    assert checkpoints.save(1, None)
    if world.is_main:
        print(json.dumps(result))


if __name__ == "__main__":
    run(main, None)

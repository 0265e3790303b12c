"""Run by torchrun on two ranks: fp16, a gradient that overflows on rank 1 alone, then a sound one."""

import json

import torch
from torch import nn

from common.distributed import gather_objects, init_world, run, wrap_model
from common.precision import LossScale, guarded_step


def main(_: None) -> None:
    world = init_world()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model.layers = lambda: list(model)
    model = wrap_model(model, world, "fsdp", torch.float16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scale = LossScale.for_dtype(torch.float16)
    before = [p.detach().full_tensor().clone() for p in model.parameters()]
    factor = 1e4 if world.rank == 1 else 1e-4
    (model(torch.ones(4, 8)).sum() * factor * scale.scale).backward()
    _, stepped = guarded_step(model, optimizer, 1.0, scale)
    model[0].reshard(), model[1].reshard(), model.reshard()
    unchanged = all(torch.equal(a, p.detach().full_tensor()) for a, p in zip(before, model.parameters()))
    halved = scale.scale
    (model(torch.ones(4, 8)).sum() * 1e-4 * scale.scale).backward()
    _, then = guarded_step(model, optimizer, 1.0, scale)
    result = {"stepped": gather_objects(stepped), "unchanged": unchanged and not optimizer_moved(optimizer, then)}
    result |= {"scale": gather_objects(halved), "then": gather_objects(then)}
    if world.is_main:
        print(json.dumps(result))


def optimizer_moved(optimizer: torch.optim.Optimizer, then: bool) -> bool:
    """Whether AdamW has counted the skipped step."""
    return any(state["step"].item() != int(then) for state in optimizer.state.values())


if __name__ == "__main__":
    run(main, None)

"""fp16, a gradient that overflows on the last rank alone, then a sound one."""

import json

import torch
from torch import nn

from common.distributed import gather_objects, init_world, run, wrap_model
from common.optimizer import guarded_step
from common.precision import LossScale


def main(_: None) -> None:
    world = init_world()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model.layers = lambda: list(model)
    model, x = wrap_model(model, world, "fsdp", torch.float16), torch.ones(4, 8, device=world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scale = LossScale.for_dtype(torch.float16)
    before = [p.detach().full_tensor().clone() for p in model.parameters()]
    factor = 1e4 if world.rank == world.size - 1 else 1e-4
    (model(x).sum() * factor * scale.scale).backward()
    _, stepped = guarded_step(model, optimizer, 1.0, scale)
    model[0].reshard(), model[1].reshard(), model.reshard()
    unchanged = all(torch.equal(a, p.detach().full_tensor()) for a, p in zip(before, model.parameters()))
    halved = scale.scale
    (model(x).sum() * 1e-4 * scale.scale).backward()
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

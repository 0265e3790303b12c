"""fp16, a gradient that overflows on the last rank alone, then a sound one."""

import json

import torch
from torch import nn

from common.distributed import gather_objects, init_world, make_mesh, wrap_model
from common.optimizer import GuardedAdamW
from common.script import run


def main(_: None) -> None:
    world = init_world()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model._no_split_modules = ["Linear"]  # as of a transformers model
    model, x = (
        wrap_model(model, make_mesh(world, "fsdp"), torch.float16),
        torch.ones(4, 8, device=world.device),
    )
    adamw = GuardedAdamW(model, torch.float16, weight_decay=0.01, max_grad_norm=1.0)
    before = [p.detach().full_tensor().clone() for p in model.parameters()]
    factor = 1e4 if world.rank == world.size - 1 else 1e-4
    (model(x).sum() * factor * adamw.scale).backward()
    stepped = took_a_step(adamw)
    model[0].reshard(), model[1].reshard(), model.reshard()
    unchanged = all(
        torch.equal(a, p.detach().full_tensor()) for a, p in zip(before, model.parameters())
    )
    halved = adamw.scale
    (model(x).sum() * 1e-4 * adamw.scale).backward()
    then = took_a_step(adamw)
    result = {
        "stepped": gather_objects(stepped),
        "unchanged": unchanged and not optimizer_moved(adamw.optimizer, then),
    }
    result |= {"scale": gather_objects(halved), "then": gather_objects(then)}
    if world.is_main:
        print(json.dumps(result))


def took_a_step(adamw: GuardedAdamW) -> bool:
    return not adamw.step(0.1).totals["optim/skipped_steps"]


def optimizer_moved(optimizer: torch.optim.Optimizer, then: bool) -> bool:
    """Whether AdamW has counted the skipped step."""
    return any(state["step"].item() != int(then) for state in optimizer.state.values())


if __name__ == "__main__":
    run(main, None)

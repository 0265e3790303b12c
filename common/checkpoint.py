"""Atomic sharded checkpoints (torch.distributed.checkpoint), exact resume, retention.

    checkpoints/step_000100/state/      model and optimizer shards, any number of ranks can load them
    checkpoints/step_000100/trainer.json  step, data position, loss scale, best metric ...
    checkpoints/step_000100/rng_0.pt    random states of rank 0, 1, ...
    checkpoints/latest, checkpoints/best  names of step folders

A folder is written under a temporary name and renamed when it is complete and on disk: what has its final name is
whole, and a kill at any moment leaves the previous checkpoint in place.
"""

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from common.distributed import World, broadcast_object, reshard

Trained = dict[str, tuple[nn.Module, torch.optim.Optimizer]]  # name -> (wrapped model, its optimizer)


def save_checkpoint(
    folder: Path, step: int, trained: Trained, state: dict, world: World, *, keep: int, best: bool = False
) -> None:
    """Write `folder/step_NNNNNN` and drop all but the newest `keep` and the best one. Called by all ranks together.

    `state` must be JSON-serialisable; rank 0's is written.
    """
    name = f"step_{step:06d}"
    temporary = folder / f"tmp_{name}"
    if world.is_main:
        for leftover in folder.glob("tmp_*"):
            shutil.rmtree(leftover)
        (temporary / "state").mkdir(parents=True)
    dist.barrier()
    shards = {}
    for key, (model, optimizer) in trained.items():
        reshard(model)
        weights, moments = get_state_dict(model, optimizer)
        shards[key] = {"model": weights, "optimizer": moments}
    dcp.save(shards, checkpoint_id=temporary / "state")
    torch.save(_random_states(), temporary / f"rng_{world.rank}.pt")
    dist.barrier()
    if world.is_main:
        _write(temporary / "trainer.json", json.dumps({"step": step, "world_size": world.size, **state}, indent=1))
        if (folder / name).exists():  # the same step again, after a resume from an earlier one
            shutil.rmtree(folder / name)
        os.replace(temporary, folder / name)
        _write(folder / "latest", name)
        if best:
            _write(folder / "best", name)
        _prune(folder, keep)
    dist.barrier()


def load_checkpoint(folder: Path, trained: Trained, world: World) -> dict:
    """Restore models, optimizers and random states in place; returns the `state` that was saved, with its "step".

    Works on another number of ranks too; a rank that has no saved random state then keeps its own.
    """
    shards = {}
    for key, (model, optimizer) in trained.items():
        weights, moments = get_state_dict(model, optimizer)
        shards[key] = {"model": weights, "optimizer": moments}
    dcp.load(shards, checkpoint_id=folder / "state")
    for key, (model, optimizer) in trained.items():
        set_state_dict(
            model, optimizer, model_state_dict=shards[key]["model"], optim_state_dict=shards[key]["optimizer"]
        )
    random_states = folder / f"rng_{world.rank}.pt"
    if random_states.is_file():
        _restore_random_states(torch.load(random_states, weights_only=False))
    return json.loads((folder / "trainer.json").read_text())


def find_checkpoint(run_dir: Path, resume: str, world: World) -> Path | None:
    """Folder to resume from: `--resume auto` takes the run's latest if there is one, `never` none, else a path to a
    step folder or to a run."""
    if resume == "never":
        return None
    found = None
    if world.is_main:
        if resume == "auto":
            found = _latest(run_dir / "checkpoints")
        else:
            path = Path(resume)
            candidates = [path if (path / "trainer.json").is_file() else None]
            candidates += [_latest(path), _latest(path / "checkpoints")]
            found = next((c for c in candidates if c is not None), None)
            if found is None:
                found = f"--resume {resume}: no checkpoint there (a step folder has a trainer.json in it)"
    found = broadcast_object(found)
    if isinstance(found, str):
        raise SystemExit(found)
    return found


def _latest(checkpoints: Path) -> Path | None:
    pointer = checkpoints / "latest"
    if not pointer.is_file():
        return None
    folder = checkpoints / pointer.read_text().strip()
    if not (folder / "trainer.json").is_file():
        raise SystemExit(f"{pointer} names {folder.name}, which is not there; --resume PATH or --resume never")
    return folder


def _prune(folder: Path, keep: int) -> None:
    best = (folder / "best").read_text().strip() if (folder / "best").is_file() else None
    steps = [path for path in folder.glob("step_*") if path.is_dir()]
    steps.sort(key=lambda path: path.stat().st_mtime)  # by age: higher numbers may belong to an abandoned run
    for path in steps[: -max(keep, 1)]:
        if path.name != best:
            shutil.rmtree(path)


def _write(path: Path, text: str) -> None:
    """Replace a small file atomically and durably."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _random_states() -> dict:
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random_states(states: dict) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])

"""Atomic sharded checkpoints (torch.distributed.checkpoint), exact resume, retention.

    checkpoints/step_000100/state/      model and optimizer shards, any number of ranks can load them
    checkpoints/step_000100/trainer.json  step, data position, loss scale, best metric ...
    checkpoints/step_000100/rng_0.pkl   random states of rank 0, 1, ...
    checkpoints/latest, checkpoints/best  names of step folders

A folder is written under a temporary name and renamed when it is complete: a kill at any moment leaves the previous
checkpoint in place. A save that fails (full disk, read-only) is a warning: training goes on.
"""

import json
import math
import operator
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from common.distributed import World, broadcast_object, gather_objects, reshard
from common.files import replace_file
from common.flags import Run
from common.optimizer import GuardedAdamW, move_states

Trained = dict[str, tuple[nn.Module, torch.optim.Optimizer]]  # name -> (wrapped model, its optimizer)


class Checkpoints:
    """The checkpoints of a run: what they hold, where training goes on, which is the best.

    `optimizers` by the name of their models; `state`, in JSON, by its name in trainer.json, None being left out. The
    best is the one with the highest metric, or the lowest.
    """

    def __init__(
        self,
        run_dir: Path,
        flags: Run,
        world: World,
        optimizers: dict[str, GuardedAdamW],
        state: dict[str, Stateful | None],
        lowest_is_best: bool = False,
    ):
        self.run_dir, self.folder, self.flags, self.world = run_dir, run_dir / "checkpoints", flags, world
        self.optimizers = optimizers
        self.state = {name: part for name, part in state.items() if part is not None}
        self.best = math.inf if lowest_is_best else -math.inf
        self.is_better = operator.lt if lowest_is_best else operator.gt
        self.resumed: Path | None = None
        self.start = 0

    @property
    def trained(self) -> Trained:
        return {name: (adamw.model, adamw.optimizer) for name, adamw in self.optimizers.items()}

    def resume(self) -> int:
        """Load what --resume names, if there is anything; the step that training goes on from. All ranks call it."""
        self.resumed = find_checkpoint(self.run_dir, self.flags.resume, self.world)
        if not self.resumed:
            return 0
        offload = any(adamw.offload for adamw in self.optimizers.values())
        saved = load_checkpoint(self.resumed, self.trained, self.world, offload)
        self.best, scales = saved["best"], saved["loss_scale"]
        for name, adamw in self.optimizers.items():
            adamw.loss_scale.load_state_dict(scales.get(name, scales))  # in older checkpoints a single one has no name
        for name, part in self.state.items():
            part.load_state_dict(saved[name])
        self.start = saved["step"]
        return self.start

    def save(self, step: int, metric: float | None) -> None:
        """Write the checkpoint of a step; `metric` is None if it was not evaluated. All ranks call it together."""
        is_best = metric is not None and self.is_better(metric, self.best)
        record = {name: part.state_dict() for name, part in self.state.items()}
        record["best"] = metric if is_best else self.best
        record["loss_scale"] = {name: adamw.loss_scale.state_dict() for name, adamw in self.optimizers.items()}
        keep = self.flags.keep_checkpoints
        if save_checkpoint(self.folder, step, self.trained, record, self.world, keep=keep, best=is_best):
            self.best = record["best"]

    def warn_if_large(self) -> None:
        """Say so if the disk has no room for all that will be kept."""
        kept = self.flags.keep_checkpoints + 2  # the best, and the one being written
        needed, free = kept * checkpoint_bytes(self.trained), free_bytes(self.run_dir)
        if free < needed:
            sizes = f"{needed / 1e9:.2f} GB of the {free / 1e9:.2f} GB that are free in {self.run_dir}"
            self.world.print(f"warning: checkpoints will take up to {sizes}: lower --keep-checkpoints")


def save_checkpoint(
    folder: Path, step: int, trained: Trained, state: dict, world: World, *, keep: int, best: bool = False
) -> bool:
    """Write `folder/step_NNNNNN` and drop all but the newest `keep` and the best one. Called by all ranks together.

    `state` must be JSON-serialisable; rank 0's is written. False, after a warning, if the disk refused.
    """
    name = f"step_{step:06d}"
    temporary = folder / f"tmp_{name}"
    needed = checkpoint_bytes(trained)

    def make_room() -> None:
        for leftover in folder.glob("tmp_*"):
            shutil.rmtree(leftover)
        missing = needed - free_bytes(folder)
        if missing > 0:
            raise OSError(f"{missing} bytes missing: lower --keep-checkpoints or free some")
        (temporary / "state").mkdir(parents=True)

    def write_shards() -> None:
        dcp.save(_shards(trained), checkpoint_id=temporary / "state")
        gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        states = {"cpu": torch.get_rng_state(), "gpu": gpu}  # all else is drawn from generators seeded by the step
        (temporary / f"rng_{world.rank}.pkl").write_bytes(pickle.dumps(states))

    def publish() -> None:
        record = json.dumps({"step": step, "world_size": world.size, **state}, indent=1)
        replace_file(temporary / "trainer.json", lambda path: path.write_text(record))
        if (folder / name).exists():  # the same step again, after a resume from an earlier one
            os.replace(folder / name, folder / f"tmp_old_{name}")  # which the next save removes
        os.replace(temporary, folder / name)
        replace_file(folder / "latest", lambda path: path.write_text(name))
        if best:
            replace_file(folder / "best", lambda path: path.write_text(name))
        _prune(folder, keep)

    for part in (make_room, write_shards, publish):
        if problem := _attempt(part if part is write_shards or world.is_main else None):
            if world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
                room = f"it takes {needed} bytes, {free_bytes(folder)} are free"
                print(f"warning: no checkpoint of step {step} ({problem}; {room}); training goes on", flush=True)
            return False
    return True


def checkpoint_bytes(trained: Trained) -> int:
    """Size of a checkpoint: weights, and two moments of each trained parameter, as they are in memory."""
    parameters = (p for model, _ in trained.values() for p in model.parameters())
    return sum((3 if p.requires_grad else 1) * p.numel() * p.element_size() for p in parameters)


def free_bytes(folder: Path) -> int:
    """Free space where `folder` is, or will be."""
    return shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free


def _attempt(part: Callable[[], None] | None) -> str | None:
    """Run `part`, if this rank has one; what went wrong on the first rank that failed. All ranks call it together."""
    problem = None
    try:
        if part:
            part()
    except (OSError, CheckpointException) as error:
        causes = [e for e, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        problem = str(causes[0]).splitlines()[0]
    return next((p for p in gather_objects(problem) if p), None)


def _shards(trained: Trained) -> dict:
    shards = {}
    for key, (model, optimizer) in trained.items():
        reshard(model)
        fresh = not optimizer.state
        shards[key] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        for moments in optimizer.state.values() if fresh else ():
            moments["step"].zero_()  # to make the moments, torch has taken a step of zero gradients, and counted it
    return shards


def load_checkpoint(folder: Path, trained: Trained, world: World, offload: bool = False) -> dict:
    """Restore models, optimizers and random states in place; returns the `state` that was saved, with its "step".

    Works on another number of ranks too; a rank that has no saved random state then keeps its own. With `offload`
    Adam's moments go to the host.
    """
    shards = _shards(trained)
    dcp.load(shards, checkpoint_id=folder / "state")
    for key, (model, optimizer) in trained.items():
        set_state_dict(
            model, optimizer, model_state_dict=shards[key]["model"], optim_state_dict=shards[key]["optimizer"]
        )
        if offload:
            move_states(optimizer, torch.device("cpu"))
    random_states = folder / f"rng_{world.rank}.pkl"
    if random_states.is_file():
        states = pickle.loads(random_states.read_bytes())
        torch.set_rng_state(states["cpu"])
        if states["gpu"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["gpu"])
    return json.loads((folder / "trainer.json").read_text())


def find_checkpoint(run_dir: Path, resume: str, world: World) -> Path | None:
    """Folder to resume from: `--resume auto` takes the run's latest if there is one, `never` none, else a path to a
    step folder, to a run, or to a file that names a step folder beside it (`latest`, `best`)."""
    if resume == "never":
        return None
    found = None
    if world.is_main:
        if resume == "auto":
            found = _named_by(run_dir / "checkpoints" / "latest")
        else:
            path = Path(resume)
            candidates = [path if (path / "trainer.json").is_file() else None]
            candidates += map(_named_by, (path, path / "latest", path / "checkpoints" / "latest"))
            found = next((c for c in candidates if c is not None), None)
            if found is None:
                found = f"--resume {resume}: no checkpoint there (a step folder has a trainer.json in it)"
    found = broadcast_object(found)
    if isinstance(found, str):
        raise SystemExit(found)
    return found


def _named_by(pointer: Path) -> Path | None:
    if pointer.name not in ("latest", "best") or not pointer.is_file():
        return None
    folder = pointer.parent / pointer.read_text().strip()
    for name in (f"tmp_{folder.name}", f"tmp_old_{folder.name}"):  # killed between the renames of `publish`
        if not folder.exists() and (pointer.parent / name / "trainer.json").is_file():
            os.replace(pointer.parent / name, folder)
    if not (folder / "trainer.json").is_file():
        raise SystemExit(f"{pointer} names {folder.name}, which is not there; --resume PATH or --resume never")
    return folder


def _prune(folder: Path, keep: int) -> None:
    best = (folder / "best").read_text().strip() if (folder / "best").is_file() else None
    steps = [path for path in folder.glob("step_*") if path.is_dir()]
    # By age, since higher numbers may belong to an abandoned run; what could not be removed altogether comes first.
    steps.sort(key=lambda path: ((path / "trainer.json").is_file(), path.stat().st_mtime))
    for path in steps[: -max(keep, 1)]:
        if path.name != best:
            shutil.rmtree(path, ignore_errors=True)  # the next save tries again

"""Atomic sharded checkpoints (torch.distributed.checkpoint), exact resume, retention.

    checkpoints/step_000100/state/             model and optimizer shards, any number of ranks can load them
    checkpoints/step_000100/trainer.json       step, data position, loss scale, best metric ...
    checkpoints/step_000100/rng_0.safetensors  random states of rank 0, 1, ...
    checkpoints/step_000100/manifest.json      size and SHA-256 of each of them, script and model; written last
    checkpoints/latest, checkpoints/best       names of step folders

A folder is written under a temporary name and renamed when it is complete: a kill at any moment leaves the previous
checkpoint in place. A save that fails (full disk, read-only) is a warning: training goes on. What was changed since is
refused, before anything is loaded, and nothing that a checkpoint holds is ever executed.
"""

import json
import math
import operator
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from common.distributed import gather_objects, reshard
from common.files import DAMAGE, refuse, replace_file, shorten, user_errors
from common.integrity import (
    BEGIN_ANEW,
    MANIFEST,
    STEP_NAME,
    UNFINISHED_STEP,
    digest,
    read_record,
    remove_step,
)
from common.job import Job
from common.lora import adapters
from common.optimizer import GuardedAdamW, make_moments
from common.processes import reached
from common.progress import say
from common.shards import dcp, load_shards, saved_weights, state_dict


class Checkpoints:
    """The checkpoints of a run: what they hold, where training goes on, which is the best.

    `job.checkpoint` is what to go on from. `optimizers` by the name of their models; `state`, in JSON, by its name in
    trainer.json, None being left out. The best is the one with the highest metric, or the lowest.
    """

    def __init__(
        self,
        job: Job,
        optimizers: dict[str, GuardedAdamW],
        state: dict[str, "dcp.stateful.Stateful | None"],
        lowest_is_best: bool = False,
    ):
        self.job, self.folder, self.world, self.optimizers = job, job.output_dir / "checkpoints", job.world, optimizers
        self.state = {name: part for name, part in state.items() if part is not None}
        self.best, self.best_step = math.inf if lowest_is_best else -math.inf, ""
        self.is_better = operator.lt if lowest_is_best else operator.gt
        self.start = 0
        self.epochs = 0  # that have ended
        own, begun = self.folder.resolve(), job.checkpoint
        self.own = bool(begun) and begun.resolve().parent == own  # does this run's folder hold what it goes on from?

    def resume(self, weights_only: bool = False) -> int:
        """Load what --resume names, or its weights alone; the step that training goes on from. All ranks call it.

        Works on another number of ranks too; a rank that has no saved random state then keeps its own. It takes less
        memory than training: one model at a time, no gradients, moments on the host.
        """
        if not (folder := self.job.checkpoint):
            return 0
        random_states = folder / f"rng_{self.world.rank}.safetensors"

        def read() -> None:
            for name, adamw in self.optimizers.items():
                shards = _shards(adamw.model, None if weights_only else adamw.optimizer)
                shards.get("optimizer", {}).pop("param_groups", None)  # learning rate, betas ... are those of this run
                load_shards({name: shards}, folder)
            if random_states.is_file():
                restore_random_states(random_states)

        problem = _attempt(read)
        refuse(problem is not None, f"{folder} cannot be loaded ({shorten(str(problem), 100)}): {BEGIN_ANEW}")
        saved = read_record(folder)
        self.start = saved["step"]
        with user_errors(f"{folder} cannot be loaded ({BEGIN_ANEW}): its trainer.json does not fit", DAMAGE):
            if self.own and (self.folder / saved.get("best_step", "")).is_dir():  # another run's may be of other rows
                self.best, self.best_step = float(saved["best"]), saved.get("best_step", "")
            for name, adamw in self.optimizers.items():
                adamw.loss_scale.load_state_dict(saved["loss_scale"][name])
            for name, part in self.state.items():
                part.load_state_dict(saved[name])
            if "loader" in self.state:
                self.epochs = int(self.state["loader"].epoch)
        reached.update({"step": self.start, "checkpoint": folder})
        return self.start

    def due(self, step: int, metric: float | None) -> bool:
        """Every --save-every steps, or at the end of an epoch; and where an evaluation is the best so far."""
        every = self.job.run.save_every
        if every == 0:
            return False
        if every == "epoch":
            epochs = int(self.state["loader"].epoch)
            ended = epochs > self.epochs
            self.epochs = epochs
        else:
            ended = step % every == 0
        return ended or self.improves(metric)

    def improves(self, metric: float | None) -> bool:
        return metric is not None and self.is_better(metric, self.best)

    def save(self, step: int, metric: float | None) -> bool:
        """Write `step_NNNNNN`, and drop all but the newest and the best; `metric` is None if it was not evaluated.

        All ranks call it together. False, after a warning, if the disk refused.
        """
        folder, world, is_best = self.folder, self.world, self.improves(metric)
        name = f"step_{step:06d}"
        temporary, needed, digests = folder / f"tmp_{name}", self.size(), {}
        record = {"step": step, "world_size": world.size, "micro_batch_tokens": self.job.micro_batch_tokens}
        record |= {n: part.state_dict() for n, part in self.state.items()}
        record["best"], record["best_step"] = (metric, name) if is_best else (self.best, self.best_step)
        record["loss_scale"] = {name: adamw.loss_scale.state_dict() for name, adamw in self.optimizers.items()}

        def make_room() -> None:
            for leftover in folder.glob("tmp_*"):
                if UNFINISHED_STEP.fullmatch(leftover.name) and leftover != temporary:
                    with suppress(OSError):
                        remove_step(leftover)
            if os.path.lexists(temporary):
                remove_step(temporary)
            if (missing := needed - free_bytes(folder)) > 0:
                raise OSError(f"{missing} bytes missing: lower --keep-checkpoints or free some")
            (temporary / "state").mkdir(parents=True)

        def write_shards() -> None:
            shards = {name: _shards(adamw.model, adamw.optimizer) for name, adamw in self.optimizers.items()}
            dcp.save(shards, checkpoint_id=temporary / "state", no_dist=world.size == 1)
            states = {"cpu": torch.get_rng_state()}  # all else is drawn from generators that are seeded by the step
            states |= {"gpu": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
            rng = temporary / f"rng_{world.rank}.safetensors"
            replace_file(rng, lambda path: (save_file(states, path), path.chmod(0o644)))  # else its owner's alone
            if world.is_main:
                replace_file(temporary / "trainer.json", lambda path: path.write_text(json.dumps(record, indent=1)))
            own = [*temporary.glob(f"state/__{world.rank}_*"), rng]
            own += [temporary / "state" / ".metadata", temporary / "trainer.json"] if world.is_main else []
            digests.update({str(file.relative_to(temporary)): digest(file) for file in own})

        def publish() -> None:
            manifest = json.dumps({**self.job.identity, "world_size": world.size, "files": digests}, indent=1)
            replace_file(temporary / MANIFEST, lambda path: path.write_text(manifest))
            if (folder / name).exists():  # the same step again, after a resume from an earlier one
                os.replace(folder / name, folder / f"tmp_old_{name}")  # which the next save removes
            os.replace(temporary, folder / name)
            if best := record["best_step"]:  # each time: an abandoned branch may have had another
                replace_file(folder / "best", lambda path: path.write_text(best))
            replace_file(folder / "latest", lambda path: path.write_text(name))
            _prune(folder, self.job.run.keep_checkpoints)

        for part in (make_room, write_shards, publish):
            if part is publish:
                for of_rank in gather_objects(digests):
                    digests.update(of_rank)
            if problem := _attempt(part if part is write_shards or world.is_main else None):
                if world.is_main:
                    with suppress(OSError):
                        remove_step(temporary)
                    print(f"warning: no checkpoint of step {step} ({problem}; it takes {needed} bytes)", flush=True)
                return False
        self.best, self.best_step, reached["checkpoint"] = record["best"], record["best_step"], folder / name
        return True

    def size(self) -> int:
        """Bytes of a checkpoint: weights, and two moments of each trained parameter, as they are in memory."""
        size = 0
        for model in (adamw.model for adamw in self.optimizers.values()):
            frozen = int(not any(adapters(model)))
            size += sum((3 if p.requires_grad else frozen) * p.numel() * p.element_size() for p in model.parameters())
        return size

    def warn_if_large(self) -> None:
        """Say so if the disk has no room for all that will be kept."""
        kept = self.job.run.keep_checkpoints + 2  # the best, and the one being written
        needed, free = kept * self.size(), free_bytes(self.folder)
        if free < needed:
            sizes = f"{needed / 1e9:.2f} GB of the {free / 1e9:.2f} GB that are free in {self.job.output_dir}"
            say(f"warning: checkpoints will take up to {sizes}: lower --keep-checkpoints")


def restore_random_states(file: Path) -> None:
    """torch's, of this rank. OSError for what is none."""
    states = load_file(file)
    try:
        if "cpu" in states:
            torch.set_rng_state(states["cpu"])
        if "gpu" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["gpu"])
    except (RuntimeError, TypeError) as error:
        raise OSError(f"{file.name} holds no random states: {error}") from error


def free_bytes(folder: Path) -> int:
    """Free space where `folder` is, or will be."""
    return shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free


def _attempt(part: Callable[[], None] | None) -> str | None:
    """Run `part`, if this rank has one; what went wrong on the first rank that failed. All ranks call it together."""
    problem = None
    try:
        if part:
            part()
    except (OSError, SafetensorError, dcp.api.CheckpointException) as error:
        causes = [error] if isinstance(error, (OSError, SafetensorError)) else [e for e, _ in error.failures.values()]
        if any(isinstance(cause, KeyboardInterrupt) for cause in causes):  # torch has caught it
            raise KeyboardInterrupt from error
        problem = describe(causes[0])
    return next((p for p in gather_objects(problem) if p), None)


def describe(error: BaseException) -> str:
    """What went wrong, in a line. torch's writer hides the system's word on a full disk behind its own positions."""
    below = error.__cause__ or error.__context__
    if isinstance(below, OSError) and not isinstance(error, OSError):
        error = below
    text = (str(error) or repr(error)).splitlines()[0]
    if "inline_container" in text:  # of another rank, whose error came without what lay below it
        text = "the disk has taken a part only of what was written: is it full, or a quota reached?"
    return text


def _shards(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict:
    """What a checkpoint has of a model: the tensors themselves, which loading fills in place; with LoRA no base."""
    reshard(model)
    shards = {"model": saved_weights(model)}
    if optimizer:
        make_moments(optimizer)  # else torch would take a step of zero gradients, and count it
        options = state_dict.StateDictOptions(ignore_frozen_params=any(adapters(model)))
        shards["optimizer"] = state_dict.get_optimizer_state_dict(model, optimizer, options=options)
    return shards


def _prune(folder: Path, keep: int) -> None:
    named = {p.name: p.read_text("latin-1").strip() for p in (folder / "best", folder / "latest") if p.is_file()}
    steps = [path for path in folder.glob("step_*") if STEP_NAME.fullmatch(path.name) and path.is_dir()]
    # By age, since higher numbers may belong to an abandoned run; what could not be removed altogether comes first.
    steps.sort(key=lambda path: (path.name == named.get("latest"), (path / MANIFEST).is_file(), path.stat().st_mtime))
    for path in steps[: -max(keep, 1)]:
        if path.name != named.get("best"):
            with suppress(OSError):  # the next save tries again; what a user has put there keeps it
                remove_step(path)

"""Atomic sharded checkpoints (torch.distributed.checkpoint), exact resume, retention.

    checkpoints/step_000100/state/          model and optimizer shards, as safetensors
    checkpoints/step_000100/trainer.json    step, data position, loss scale, best metric ...
    checkpoints/step_000100/manifest.json   size and SHA-256 of each file, script, model; the last
    checkpoints/latest, checkpoints/best    names of step folders

Any number of ranks loads the shards.
A folder is written under a temporary name and renamed when it is complete: a kill at any moment
leaves the previous checkpoint in place. A save that fails (full disk, read-only) is a warning:
training goes on. What was changed since is refused, before anything is loaded; in none of the files
is anything that could be executed.
"""

import errno
import json
import math
import operator
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from common.distributed import World, gather_objects
from common.ending import reached
from common.files import DAMAGE, replace_file, shorten, user_errors
from common.lora import adapters
from common.manifest import (
    BEGIN_ANEW,
    MANIFEST,
    STEP_NAME,
    UNFINISHED_STEP,
    digest,
    read_record,
    remove_step,
)
from common.optimizer import GuardedAdamW
from common.progress import say
from common.shards import dcp, load_shards, save_shards, saved_tensors

T = TypeVar("T")


class Checkpoints:
    """The checkpoints of a run: what they hold, where training goes on, which is the best.

    The best is the one with the highest metric, or the lowest.
    """

    def __init__(
        self,
        run_dir: Path,
        world: World,
        optimizers: dict[str, GuardedAdamW],
        state: dict[str, "dcp.stateful.Stateful | None"],
        *,
        save_every: int | str,
        keep: int,
        identity: dict[str, Any],
        micro_batch_tokens: int,
        lowest_is_best: bool = False,
    ):
        """optimizers: by the name of their models. state: parts whose state goes into trainer.json,
        by their name there; None is left out. save_every, keep: --save-every, --keep-checkpoints.
        identity: what the manifest says of script and model.
        """
        self.run_dir = run_dir
        self.folder = run_dir / "checkpoints"
        self.world = world
        self.optimizers = optimizers
        self.state = {name: part for name, part in state.items() if part is not None}
        self.save_every = save_every
        self.keep = keep
        self.identity = identity
        self.micro_batch_tokens = micro_batch_tokens
        self.best = math.inf if lowest_is_best else -math.inf
        self.best_step = ""
        self.is_better = operator.lt if lowest_is_best else operator.gt
        self.start = 0
        self.num_epochs = 0  # that have ended
        self.resumes_own = False  # whether the run goes on from a checkpoint of its own folder

    def resume(self, checkpoint: Path | None, weights_only: bool = False) -> int:
        """Load a checkpoint, or its weights alone; returns the step that training goes on from.

        All ranks call it, as many as there are now. It takes less memory than training: one model
        at a time, no gradients, moments on the host.
        """
        if checkpoint is None:
            return 0
        self.resumes_own = checkpoint.resolve().parent == self.folder.resolve()
        try:
            on_all_ranks(self._load_models, checkpoint, weights_only)
        except CheckpointError as error:
            raise SystemExit(
                f"{checkpoint} cannot be loaded ({shorten(str(error), 100)}): {BEGIN_ANEW}"
            ) from error
        saved = read_record(checkpoint)
        self.start = saved["step"]
        best_step = saved.get("best_step", "")
        with user_errors(
            f"{checkpoint} cannot be loaded ({BEGIN_ANEW}): its trainer.json does not fit", DAMAGE
        ):
            # another run's may be of other rows
            if self.resumes_own and (self.folder / best_step).is_dir():
                self.best = float(saved["best"])
                self.best_step = best_step
            for name, adamw in self.optimizers.items():
                adamw.loss_scale.load_state_dict(saved["loss_scale"][name])
            for name, part in self.state.items():
                part.load_state_dict(saved[name])
            if "loader" in self.state:
                self.num_epochs = int(self.state["loader"].epoch)
        reached.update({"step": self.start, "checkpoint": checkpoint})
        return self.start

    def _load_models(self, folder: Path, weights_only: bool) -> None:
        for name, adamw in self.optimizers.items():
            optimizer = None if weights_only else adamw.optimizer
            load_shards(saved_tensors(name, adamw.model, optimizer), folder)

    def due(self, step: int, metric: float | None) -> bool:
        """Every --save-every steps, or at the end of an epoch; and where an evaluation is the best
        so far."""
        if self.save_every == 0:
            return False
        if self.save_every == "epoch":
            num_epochs = int(self.state["loader"].epoch)
            is_due = num_epochs > self.num_epochs
            self.num_epochs = num_epochs
        else:
            is_due = step % self.save_every == 0
        return is_due or self.improves(metric)

    def improves(self, metric: float | None) -> bool:
        return metric is not None and self.is_better(metric, self.best)

    def save(self, step: int, metric: float | None) -> bool:
        """Write `step_NNNNNN`, and drop all but the newest and the best; `metric` is None if it was
        not evaluated.

        All ranks call it together. False, after a warning, if the disk refused.
        """
        name = f"step_{step:06d}"
        temporary = self.folder / f"tmp_{name}"
        best = self.best
        best_step = self.best_step
        if self.improves(metric):
            best = metric
            best_step = name
        record = {
            "step": step,
            "world_size": self.world.size,
            "micro_batch_tokens": self.micro_batch_tokens,
            "best": best,
            "best_step": best_step,
            "loss_scale": {
                name: adamw.loss_scale.state_dict() for name, adamw in self.optimizers.items()
            },
        }
        for key, part in self.state.items():
            record[key] = part.state_dict()
        try:
            on_all_ranks(self._make_folder, temporary)
            digests = on_all_ranks(self._write_files, temporary, record)
            digests_of_ranks = gather_objects(digests)
            on_all_ranks(self._publish, temporary, name, best_step, digests_of_ranks)
        except CheckpointError as error:
            if self.world.is_main:
                with suppress(OSError):
                    remove_step(temporary)
                reason = f"{error}; it takes {self.size()} bytes"
                print(f"warning: no checkpoint of step {step} ({reason})", flush=True)
            return False
        self.best = best
        self.best_step = best_step
        reached["checkpoint"] = self.folder / name
        return True

    def _make_folder(self, temporary: Path) -> None:
        """Its folder, after what killed saves have left is gone."""
        if not self.world.is_main:
            return
        for leftover in self.folder.glob("tmp_*"):
            if UNFINISHED_STEP.fullmatch(leftover.name) and leftover != temporary:
                with suppress(OSError):
                    remove_step(leftover)
        if os.path.lexists(temporary):
            remove_step(temporary)
        (temporary / "state").mkdir(parents=True)

    def _write_files(self, temporary: Path, record: dict) -> dict[str, list]:
        """This rank's files; {path in the folder: digest}."""
        tensors = {}
        for name, adamw in self.optimizers.items():
            tensors |= saved_tensors(name, adamw.model, adamw.optimizer)
        save_shards(tensors, temporary / "state")
        files = list(temporary.glob(f"state/shard-{self.world.rank + 1:05d}-*"))
        if self.world.is_main:
            trainer = temporary / "trainer.json"
            replace_text(trainer, json.dumps(record, indent=1))
            files.append(trainer)
        return {str(file.relative_to(temporary)): digest(file) for file in files}

    def _publish(
        self, temporary: Path, name: str, best_step: str, digests_of_ranks: list[dict]
    ) -> None:
        """Write the manifest, then give the folder its name, and point to it."""
        if not self.world.is_main:
            return
        files = {}
        for digests in digests_of_ranks:
            files |= digests
        manifest = {**self.identity, "world_size": self.world.size, "files": files}
        replace_text(temporary / MANIFEST, json.dumps(manifest, indent=1))
        if (self.folder / name).exists():  # the same step again, after a resume from an earlier one
            # which the next save removes
            os.replace(self.folder / name, self.folder / f"tmp_old_{name}")
        os.replace(temporary, self.folder / name)
        if best_step:  # each time: an abandoned branch may have had another
            replace_text(self.folder / "best", best_step)
        replace_text(self.folder / "latest", name)
        _prune(self.folder, self.keep)

    def size(self) -> int:
        """Bytes of a checkpoint: weights, and two moments of each trained parameter, as they are in
        memory."""
        size = 0
        for adamw in self.optimizers.values():
            has_lora = any(adapters(adamw.model))  # what is frozen is not saved
            for parameter in adamw.model.parameters():
                num_bytes = parameter.numel() * parameter.element_size()
                if parameter.requires_grad:
                    size += 3 * num_bytes
                elif not has_lora:
                    size += num_bytes
        return size

    def warn_if_large(self) -> None:
        """Print a warning if the disk has no room for all that will be kept."""
        num_kept = self.keep + 2  # the best, and the one being written
        needed = num_kept * self.size()
        free = free_bytes(self.folder)
        if free < needed:
            say(
                f"warning: checkpoints will take up to {needed / 1e9:.2f} GB of the "
                f"{free / 1e9:.2f} GB that are free in {self.run_dir}: lower --keep-checkpoints"
            )


def free_bytes(folder: Path) -> int:
    """Free space where `folder` is, or will be."""
    for path in (folder, *folder.absolute().parents):
        if path.exists():
            return shutil.disk_usage(path).free
    raise FileNotFoundError(folder)


class CheckpointError(Exception):
    """What went wrong on the first rank that failed, in a line."""


def on_all_ranks(function: Callable[..., T], *arguments) -> T:
    """function(...) on this rank; CheckpointError on all of them if it fails on one. All ranks call
    it together."""
    result = None
    problem = ""
    try:
        result = function(*arguments)
    except (OSError, SafetensorError, dcp.api.CheckpointException) as error:
        problem = describe(error)
    for problem_of_rank in gather_objects(problem):
        if problem_of_rank:
            raise CheckpointError(problem_of_rank)
    return result


def describe(error: BaseException) -> str:
    """What went wrong, in a line."""
    causes = [error]
    if isinstance(error, dcp.api.CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
    if any(isinstance(cause, KeyboardInterrupt) for cause in causes):  # torch has caught it
        raise KeyboardInterrupt from error
    text = (str(causes[0]) or repr(causes[0])).splitlines()[0]
    if getattr(causes[0], "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        text += ": lower --keep-checkpoints or free some"
    return text


def replace_text(path: Path, text: str) -> None:
    replace_file(path, lambda temporary: temporary.write_text(text))


def _prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` steps and the best."""
    pointers = {}
    for name in ("best", "latest"):
        pointer = folder / name
        if pointer.is_file():
            pointers[name] = pointer.read_text("latin-1").strip()
    steps = []
    for path in folder.glob("step_*"):
        if STEP_NAME.fullmatch(path.name) and path.is_dir():
            is_latest = path.name == pointers.get("latest")
            # By age, since higher numbers may belong to an abandoned run. A folder without a
            # manifest could not be removed altogether: it goes first.
            age = (is_latest, (path / MANIFEST).is_file(), path.stat().st_mtime)
            steps.append((age, path))
    steps.sort(key=lambda step: step[0])
    for _, path in steps[: -max(keep, 1)]:
        if path.name != pointers.get("best"):
            with suppress(OSError):  # the next save tries again; what a user has put there keeps it
                remove_step(path)

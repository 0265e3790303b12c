"""Atomic sharded checkpoints (torch.distributed.checkpoint), exact resume, retention.

    checkpoints/step_000100/state/          model and optimizer shards, as safetensors
    checkpoints/step_000100/trainer.json    step, data position, loss scale, best metric ...
    checkpoints/step_000100/manifest.json   size and SHA-256 of each file, script, model;
                                            written last
    checkpoints/latest, checkpoints/best    names of step folders

The shards can be loaded by more or fewer ranks than wrote them.
A folder is written under a temporary name and renamed when it is complete: a kill at any moment
leaves the previous checkpoint in place. A save that fails (full disk, read-only) is a warning:
training goes on. A checkpoint whose files have changed is refused before anything is loaded. No
file in it can hold code that loading would execute.
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

from common.data.order import RowOrder
from common.distributed import World, gather_objects
from common.ending import reached
from common.files import DAMAGE, replace_file, shorten, user_errors
from common.lora import adapted_layers
from common.manifest import (
    BEGIN_ANEW,
    MANIFEST,
    STEP_NAME,
    TEMPORARY_STEP,
    digest,
    read_record,
    remove_step,
)
from common.optimizer import GuardedAdamW
from common.progress import say
from common.shards import dcp, load_shards, save_shards, saved_tensors

T = TypeVar("T")


class Checkpoints:
    """The checkpoints of a run: what they hold, where training goes on, which is the best."""

    def __init__(
        self,
        run_dir: Path,
        world: World,
        optimizers: dict[str, GuardedAdamW],
        loader: RowOrder | None,
        *,
        save_every: int | str,
        keep: int,
        identity: dict[str, Any],
        micro_batch_tokens: int,
        counts: dict[str, float] | None = None,
        lowest_is_best: bool = False,
    ):
        """optimizers: by the name of their models. loader: its position is saved; None in an
        evaluation. save_every, keep: --save-every, --keep-checkpoints. identity: what the manifest
        says of script and model. micro_batch_tokens: saved, since a resume is to pack alike.
        counts: numbers that a script carries from step to step; `resume` changes them in place.
        lowest_is_best: the best checkpoint has the lowest metric, else the highest.
        """
        self.run_dir = run_dir
        self.folder = run_dir / "checkpoints"
        self.world = world
        self.optimizers = optimizers
        self.loader = loader
        self.save_every = save_every
        self.keep = keep
        self.identity = identity
        self.micro_batch_tokens = micro_batch_tokens
        self.counts = {} if counts is None else counts
        self.best = math.inf if lowest_is_best else -math.inf
        self.best_step = ""
        self.is_better = operator.lt if lowest_is_best else operator.gt
        self.start = 0
        self.num_epochs = 0  # that had ended when `due` was last asked
        self.resumes_own = False  # whether the run goes on from a checkpoint of its own folder

    def resume(self, checkpoint: Path | None, weights_only: bool = False) -> int:
        """Load a checkpoint; returns the step that training goes on from, 0 without one. SystemExit
        if it cannot be loaded.

        All ranks call it together; there may be more or fewer than at the save. It takes less
        memory than training: one model at a time, no gradients, moments on the host. weights_only:
        leave out the moments.
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
            # Another run may have measured its best on other rows, and the best step's folder may
            # have been removed. With best_step "" the path is self.folder, which is there.
            if self.resumes_own and (self.folder / best_step).is_dir():
                self.best = float(saved["best"])
                self.best_step = best_step
            for name, adamw in self.optimizers.items():
                adamw.loss_scale.load_state_dict(saved["loss_scale"][name])
            if self.loader:
                self.loader.load_state_dict(saved["loader"])
                self.num_epochs = int(self.loader.epoch)
            self.counts.update(saved.get("counts", {}))
        goes_on = self.resumes_own and not weights_only
        if goes_on and not self.best_step and self.world.is_main:
            # the file may name a later step, which this run abandons, or one that was removed
            (self.folder / "best").unlink(missing_ok=True)
        reached.update({"step": self.start, "checkpoint": checkpoint})  # printed at Ctrl-C
        return self.start

    def _load_models(self, folder: Path, weights_only: bool) -> None:
        for name, adamw in self.optimizers.items():
            optimizer = None if weights_only else adamw.optimizer
            load_shards(saved_tensors(name, adamw.model, optimizer), folder)

    def due(self, step: int, metric: float | None) -> bool:
        """Whether to save now: every --save-every steps or at the end of each epoch, and after the
        best evaluation so far; never with --save-every 0. Remembers the epoch."""
        if self.save_every == 0:
            return False
        if self.save_every == "epoch":
            num_epochs = int(self.loader.epoch)
            is_due = num_epochs > self.num_epochs
            self.num_epochs = num_epochs
        else:
            is_due = step % self.save_every == 0
        return is_due or self.improves(metric)

    def improves(self, metric: float | None) -> bool:
        return metric is not None and self.is_better(metric, self.best)

    def save(self, step: int, metric: float | None) -> bool:
        """Write `step_NNNNNN`, and drop all but the newest `keep` steps and the best. metric: None
        without an evaluation.

        All ranks call it together. Returns False, after a warning, if it cannot be written.
        """
        name = f"step_{step:06d}"
        temporary = self.folder / f"tmp_{name}"
        best = self.best
        best_step = self.best_step
        if self.improves(metric):
            best = metric
            best_step = name
        loss_scales = {}
        for model_name, adamw in self.optimizers.items():
            loss_scales[model_name] = adamw.loss_scale.state_dict()
        record = {
            "step": step,
            "world_size": self.world.size,
            "micro_batch_tokens": self.micro_batch_tokens,
            "best": best,
            "best_step": best_step,
            "counts": self.counts,
            "loss_scale": loss_scales,
        }
        if self.loader:
            record["loader"] = self.loader.state_dict()
        try:
            on_all_ranks(self._make_folder, temporary)
            digests = on_all_ranks(self._write_files, temporary, record)
            digests_of_ranks = gather_objects(digests)
            on_all_ranks(self._publish, temporary, name, best_step, digests_of_ranks)
        except CheckpointError as error:
            if self.world.is_main:
                with suppress(OSError):
                    remove_step(temporary)
                reason = f"{error}; a checkpoint takes {self.num_bytes()} bytes"
                print(f"warning: no checkpoint of step {step} ({reason})", flush=True)
            return False
        self.best = best
        self.best_step = best_step
        reached["checkpoint"] = self.folder / name
        return True

    def _make_folder(self, temporary: Path) -> None:
        """Make the temporary folder, after removing those that killed saves have left."""
        if not self.world.is_main:
            return
        for leftover in self.folder.glob("tmp_*"):
            if TEMPORARY_STEP.fullmatch(leftover.name) and leftover != temporary:
                with suppress(OSError):
                    remove_step(leftover)
        if os.path.lexists(temporary):
            remove_step(temporary)
        (temporary / "state").mkdir(parents=True)

    def _write_files(self, temporary: Path, record: dict) -> dict[str, list]:
        """Write this rank's files. Returns {path in the folder: digest}."""
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
        if (self.folder / name).exists():  # saved before, and reached again from an earlier step
            # the next save removes the renamed folder
            os.replace(self.folder / name, self.folder / f"tmp_old_{name}")
        os.replace(temporary, self.folder / name)
        if best_step:  # written even if unchanged: the file may name an abandoned run's best
            replace_text(self.folder / "best", best_step)
        replace_text(self.folder / "latest", name)
        _prune(self.folder, self.keep)

    def num_bytes(self) -> int:
        """Bytes of a checkpoint: weights, and two moments of each trained parameter, as they are in
        memory."""
        size = 0
        for adamw in self.optimizers.values():
            has_lora = any(adapted_layers(adamw.model))  # then what is frozen is not saved
            for parameter in adamw.model.parameters():
                parameter_bytes = parameter.numel() * parameter.element_size()
                if parameter.requires_grad:
                    size += 3 * parameter_bytes
                elif not has_lora:
                    size += parameter_bytes
        return size

    def note_if_none_is_due(self, total_steps: int, rows_per_step: int | None = None) -> None:
        """Print a line if --save-every asks for no checkpoint before the last step. rows_per_step:
        rows of the data that a step takes; None if that varies."""
        next_step = total_steps
        if self.save_every == "epoch":
            if not rows_per_step:
                return
            rows_left = (self.num_epochs + 1) * self.loader.num_rows - self.loader.consumed
            next_step = self.start + math.ceil(rows_left / rows_per_step)
        elif self.save_every > 0:
            next_step = self.start - self.start % self.save_every + self.save_every
        if next_step >= total_steps > self.start:
            say(
                f"--save-every {self.save_every} asks for no checkpoint before the end "
                f"({total_steps} steps); SIGTERM and Ctrl-C save one"
            )

    def warn_if_large(self) -> None:
        """Print a warning if the disk has no room for all that will be kept."""
        num_kept = self.keep + 2  # the best, and the one being written
        needed = num_kept * self.num_bytes()
        free = free_bytes(self.folder)
        if free < needed:
            say(
                f"warning: checkpoints will take up to {needed / 1e9:.2f} GB of the "
                f"{free / 1e9:.2f} GB that are free in {self.run_dir}: lower --keep-checkpoints"
            )


def free_bytes(folder: Path) -> int:
    """Free space where `folder` is, or will be."""
    path = folder.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


class CheckpointError(Exception):
    """A save or load has failed on some rank; the message is that of the first such rank."""


def on_all_ranks(function: Callable[..., T], *arguments) -> T:
    """function(...) on this rank. All ranks call it together; if it fails on one, all raise
    CheckpointError."""
    result = None
    problem = ""
    try:
        result = function(*arguments)
    except (OSError, SafetensorError, dcp.api.CheckpointException) as error:
        causes = causes_of(error)
        if any(isinstance(cause, KeyboardInterrupt) for cause in causes):  # torch caught a Ctrl-C
            raise KeyboardInterrupt from error
        problem = first_line(causes[0])
    for problem_of_rank in gather_objects(problem):
        if problem_of_rank:
            raise CheckpointError(problem_of_rank)
    return result


def causes_of(error: BaseException) -> list[BaseException]:
    """The exceptions of all ranks if torch has collected them in `error`, else `error` itself."""
    if isinstance(error, dcp.api.CheckpointException):
        return [cause for cause, _ in error.failures.values()]
    return [error]


def first_line(error: BaseException) -> str:
    """What went wrong, with the way out if the disk is full."""
    text = (str(error).strip() or repr(error)).splitlines()[0]
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        text += ": lower --keep-checkpoints or free some space"
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
            # The latest is removed last. Of the others, one without a manifest, which a failed
            # removal has left, goes first; then the oldest by time, as a higher number may be of
            # an abandoned run.
            priority = (is_latest, (path / MANIFEST).is_file(), path.stat().st_mtime)
            steps.append((priority, path))
    steps.sort(key=lambda step: step[0])
    for _, path in steps[:-keep]:
        if path.name != pointers.get("best"):
            with suppress(OSError):  # the next save tries again; a file of the user's stays
                remove_step(path)

"""What a run says of each step: on the console, in metrics.jsonl, to trackers."""

import json
import time
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any

from common.checkpoint import Checkpoints
from common.config import changed_flags, save_config
from common.distributed import handle_signals
from common.ending import at_end, reached
from common.files import jsonable
from common.flags import flag, flat
from common.job import Job
from common.look.curves import plot_curves
from common.memory.halving import remembered_budget
from common.progress import Progress, duration, say
from common.trackers import Trackers


class Logger:
    """Console line and metrics.jsonl always, trackers if they work: nothing in here may end or
    delay a run.

    `status` makes the line of a step, `trackers` (or None) log it, too: common/look. On ranks other
    than 0 (`is_main=False`) every method does nothing.
    """

    def __init__(self, run_dir: Path, status, trackers=None, is_main: bool = True):
        self.path, self.status, self.trackers, self.is_main = (
            run_dir / "metrics.jsonl",
            status,
            trackers,
            is_main,
        )
        self.write_failed, self.torn = False, None

    def _append(self, record: dict) -> None:
        line = json.dumps(jsonable(record), allow_nan=False) + "\n"
        try:
            if self.path.is_fifo():
                raise OSError("a pipe, which would wait for a reader")
            # a killed run leaves half a line; the next record must not be glued to it
            if self.torn is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.torn = self.path.is_file() and self.path.read_bytes()[-1:] not in (b"", b"\n")
            # opened each time: what could not be flushed is not kept and retried
            with open(self.path, "a") as file:
                file.write("\n" * self.torn + line)
            self.torn = False
        except OSError as error:  # a full disk costs records, not the run
            self.torn = True
            if not self.write_failed:
                print(
                    f"warning: cannot write {self.path} ({error}); records are lost while "
                    "this lasts",
                    flush=True,
                )
            self.write_failed = True

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of one step everywhere and print the status line."""
        if not self.is_main:
            return
        reached["step"] = step
        self._append({"step": step, **metrics})
        print(self.status.line(step, metrics), flush=True)
        Progress.said = time.monotonic()
        self._track(step, metrics)

    def event(self, record: dict) -> None:
        """Append a record that is not a step, such as {"event": "resumed", "step": 12}; trackers
        get its metrics."""
        if self.is_main:
            self._append(record)
            self._track(record["step"], {key: value for key, value in record.items() if "/" in key})

    def _track(self, step: int, metrics: dict) -> None:
        numbers = {
            key: value for key, value in jsonable(metrics).items() if isinstance(value, int | float)
        }
        if self.trackers and numbers:
            self.trackers.log(step, numbers)

    def close(self) -> None:
        """End the trackers, which are told of a run that fails."""
        if self.trackers:
            self.trackers.close(failed=reached.get("status", 0) != 0)


# {metric: (label, width, format)}: together 150 columns; those of an evaluation, which most steps
# do not have, stand last
COLUMNS = {
    "reward/mean": ("reward", 6, ".3f"),
    "reward/accuracy": ("acc", 5, ".3f"),
    "policy/loss": ("loss", 7, ".4f"),
    "policy/entropy": ("ent", 5, ".3f"),
    "policy/kl_to_ref": ("kl", 6, ".4f"),
    "policy/rollout_logprob_gap": ("gap", 5, ".0e"),
    "rollout/response_length": ("len", 5, ".0f"),
    "rollout/truncated": ("cut", 4, ".2f"),
    "reward/zero_variance_groups": ("equal", 4, ".2f"),
    "optim/grad_norm": ("grad", 5, ".3f"),
    "optim/lr": ("lr", 7, ".1e"),
    "time/step_s": ("s", 4, ".1f"),
    "eval/accuracy": ("eval", 5, ".3f"),
    "eval/loss": ("eval loss", 6, ".4f"),
}


# not on the lines of RL, whose loss says nothing: room for what does
SUPERVISED = {"policy/loss", "optim/lr"}


class StatusLine:
    """Cells of fixed width, blank where a metric is absent; what is left to do by the time of the
    last steps."""

    def __init__(self, total_steps: int):
        self.total_steps = total_steps
        # in order of first appearance, so that a late metric shifts no other
        self.columns: list[str] = []
        self.step_times: deque[float] = deque(maxlen=20)

    def line(self, step: int, metrics: dict[str, float]) -> str:
        if "time/step_s" in metrics:
            self.step_times.append(metrics["time/step_s"])
        left = max(0, self.total_steps - step)
        eta = duration(median(self.step_times) * left) if self.step_times else "?"
        text = f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}  eta {eta:>5}"
        cells = {key: cell(key, metrics[key]) for key in COLUMNS if key in metrics}
        if untrained(metrics):
            cells["optim/grad_norm"] = "untrained"
        if skipped := metrics.get("optim/skipped_steps"):
            cells["optim/grad_norm"] = f"skipped {skipped:.0f}"
        self.columns += [key for key in cells if key not in self.columns]
        shown = [
            key
            for key in self.columns
            if key not in SUPERVISED or "reward/mean" not in self.columns
        ]
        for key in sorted(shown, key=lambda key: key.startswith("eval/")):
            label, width, _ = COLUMNS[key]
            text += f"  {cells.get(key, ''):{len(label) + 1 + width}}"
        return text.rstrip()


def cell(key: str, value: float) -> str:
    label, width, spec = COLUMNS[key]
    return f"{label} {fitted(value, width, spec)}"


def fitted(value: float, width: int, spec: str) -> str:
    """A number in so many columns; one that is too large with fewer decimals than `spec` has, or in
    thousands."""
    texts = [f"{value:{spec}}", *(f"{value:.{decimals}f}" for decimals in (3, 2, 1, 0))]
    texts += [f"{value / 1000**power:.0f}{unit}" for power, unit in enumerate("kMGT", 1)]
    return next((text for text in texts if len(text) <= width), f"{value:.0e}").rjust(width)


def untrained(metrics: dict[str, float]) -> bool:
    """Is it a step of training that had no gradient? All groups were equal, or no token was left to
    train on."""
    norms = [metrics.get(f"{model}/grad_norm") for model in ("optim", "value")]
    return "optim/loss_scale" in metrics and not any(norms)


def open_logger(
    job: Job, args: Any, total_steps: int, checkpoints: Checkpoints, *, record: bool = True
) -> Logger:
    """config.json, unless this is no training, and the logger; tells where the run goes on, and
    what it will write."""
    world, config = job.world, flat(args) | {"micro_batch_tokens": job.micro_batch_tokens}
    if world.is_main and record and not checkpoints.own:  # what a resume changes is an event
        save_config(
            job.output_dir,
            config,
            dtype=str(job.compute_dtype),
            attention=job.attention,
            micro_batch_tokens=job.micro_batch_tokens,
            engine_memory=job.engine_memory,
        )
    trackers = Trackers(job.run.log, job.output_dir, config) if world.is_main else None
    logger = Logger(job.output_dir, StatusLine(total_steps), trackers, world.is_main)
    at_end.callback(logger.close)
    if not record:
        say(f"evaluates {job.checkpoint or job.run.model}")
        return logger
    left = max(0, total_steps - checkpoints.start)
    if job.checkpoint:
        changed = changed_flags(job.output_dir, config) if world.is_main else {}
        resumed = {"event": "resumed", "step": checkpoints.start, "checkpoint": str(job.checkpoint)}
        logger.event(resumed | ({"changed": changed} if changed else {}))
        new = "".join(
            f"; {flag(name)} {value}, not {before}" for name, (before, value) in changed.items()
        )
        say(
            f"resumed: {job.checkpoint}, step {checkpoints.start}; {left} of {total_steps} "
            f"steps left{new}"
        )
    if world.is_main:
        at_end.callback(plot_curves, job.output_dir)
    handle_signals()
    budget = remembered_budget(job.output_dir, job.micro_batch_tokens)
    if budget < job.micro_batch_tokens:
        say(
            f"micro-batches of {budget} tokens, since {job.output_dir}/micro_batch_tokens: "
            "more did not fit"
        )
    checkpoints.warn_if_large()
    return logger

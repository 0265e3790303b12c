"""What a run says of each step: on the console, in metrics.jsonl, to trackers."""

import json
import time
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any

from common.checkpoint import Checkpoints
from common.command_line import flag, flat
from common.config import changed_flags, save_config
from common.ending import at_end, reached
from common.files import jsonable
from common.hub import commit_of
from common.job import Job
from common.memory.halving import remembered_budget
from common.progress import Progress, duration, say
from common.trackers import Trackers


class Logger:
    """Writes a run's steps to the console, to metrics.jsonl, and to trackers if they work. Nothing
    that fails here ends the run. On ranks other than 0 every method does nothing."""

    def __init__(
        self,
        run_dir: Path,
        status: "StatusLine",
        trackers: Trackers | None = None,
        is_main: bool = True,
    ):
        self.path = run_dir / "metrics.jsonl"
        self.status = status
        self.trackers = trackers
        self.is_main = is_main
        self.has_failed = False  # whether a record could not be written
        # whether the file ends in half a line; None: not known yet
        self.has_half_line: bool | None = None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of one step everywhere and print the status line."""
        if not self.is_main:
            return
        reached["step"] = step
        self._append({"step": step, **metrics})
        print(self.status.line(step, metrics), flush=True)
        Progress.last_print = time.monotonic()
        self._track(step, metrics)

    def event(self, record: dict) -> None:
        """Append a record that is not a step, such as {"event": "resumed", "step": 12}; trackers
        get its metrics."""
        if not self.is_main:
            return
        self._append(record)
        metrics = {name: value for name, value in record.items() if "/" in name}
        self._track(record["step"], metrics)

    def close(self) -> None:
        """Close the trackers, which record whether the run has failed."""
        if self.trackers:
            self.trackers.close(failed=reached.get("status", 0) != 0)

    def _append(self, record: dict) -> None:
        line = json.dumps(jsonable(record), allow_nan=False) + "\n"
        try:
            if self.path.is_fifo():
                raise OSError("a pipe, which would wait for a reader")
            if self.has_half_line is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.has_half_line = ends_in_half_a_line(self.path)
            # opened each time: a file kept open would write later what it could not flush
            with open(self.path, "a") as file:
                if self.has_half_line:
                    line = "\n" + line
                file.write(line)
            self.has_half_line = False
        except OSError as error:  # a full disk costs records, not the run
            self.has_half_line = True
            if not self.has_failed:
                print(
                    f"warning: cannot write {self.path} ({error}); records are lost while "
                    "this lasts",
                    flush=True,
                )
            self.has_failed = True

    def _track(self, step: int, metrics: dict) -> None:
        numbers = {}
        for name, value in jsonable(metrics).items():
            if isinstance(value, int | float):
                numbers[name] = value
        if self.trackers and numbers:
            self.trackers.log(step, numbers)


def ends_in_half_a_line(path: Path) -> bool:
    """Whether the last line lacks its newline, as after a kill: the next record would join it."""
    return path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n")


# {metric: (label, width, format)}; a line has at most 150 characters
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
# a column is shown where its metric is there: this one by distill.py alone
DISTILLATION_COLUMNS = {"distill/divergence": ("div", 6, ".4f")}
ALL_COLUMNS = COLUMNS | DISTILLATION_COLUMNS
# columns that RL leaves out, to make room: its loss says nothing about progress
LEFT_OUT_IN_RL = {"policy/loss", "optim/lr"}


class StatusLine:
    """The console line of a step: cells of fixed width, blank where a metric is absent, and the
    time left, from the median time of the last 20 steps."""

    def __init__(self, total_steps: int):
        self.total_steps = total_steps
        # in order of first appearance, so that a late metric shifts no other
        self.columns: list[str] = []
        self.step_times: deque[float] = deque(maxlen=20)

    def line(self, step: int, metrics: dict[str, float]) -> str:
        if "time/step_s" in metrics:
            self.step_times.append(metrics["time/step_s"])
        eta = "?"
        if self.step_times:
            steps_left = max(0, self.total_steps - step)
            eta = duration(median(self.step_times) * steps_left)
        total = str(self.total_steps)
        text = f"step {str(step).rjust(len(total))}/{total}  eta {eta:>5}"
        cells = cells_of(metrics)
        for name in cells:
            if name not in self.columns:
                self.columns.append(name)
        for name in self._order():
            label, width, _ = ALL_COLUMNS[name]
            cell = cells.get(name, "")
            text += "  " + cell.ljust(len(label) + 1 + width)
        return text.rstrip()

    def _order(self) -> list[str]:
        """The columns from left to right: those of evaluations last, since most steps have none."""
        columns = self.columns
        if "reward/mean" in columns:
            columns = [name for name in columns if name not in LEFT_OUT_IN_RL]
        return sorted(columns, key=lambda name: name.startswith("eval/"))


def cells_of(metrics: dict[str, float]) -> dict[str, str]:
    """{metric: its cell}. If updates were skipped, or there was no gradient, that stands in place
    of the gradient norm."""
    cells = {}
    for name, (label, width, spec) in ALL_COLUMNS.items():
        if name in metrics:
            cells[name] = f"{label} {fitted(metrics[name], width, spec)}"
    num_skipped = metrics.get("optim/skipped_steps")
    if num_skipped:
        cells["optim/grad_norm"] = f"skipped {num_skipped:.0f}"
    elif is_untrained(metrics):
        cells["optim/grad_norm"] = "untrained"
    return cells


def fitted(value: float, width: int, spec: str) -> str:
    """A number in `width` characters: by `spec`, or, if that is too long, with fewer decimals, or
    else in thousands, millions, and so on."""
    texts = [f"{value:{spec}}"]
    for decimals in (3, 2, 1, 0):
        texts.append(f"{value:.{decimals}f}")
    for power, unit in enumerate("kMGT", start=1):
        texts.append(f"{value / 1000**power:.0f}{unit}")
    for text in texts:
        if len(text) <= width:
            return text.rjust(width)
    return f"{value:.0e}".rjust(width)


def is_untrained(metrics: dict[str, float]) -> bool:
    """Whether a training step had no gradient: all groups were equal, or no token was trained."""
    is_training_step = "optim/loss_scale" in metrics
    has_gradient = metrics.get("optim/grad_norm") or metrics.get("value/grad_norm")
    return is_training_step and not has_gradient


def open_logger(job: Job, args: Any, total_steps: int, checkpoints: Checkpoints) -> Logger:
    """Open the logger of a run, and record and print what is due when training begins: config.json
    of a new run, the event of a resumed one, micro-batches that were made smaller, a warning if the
    disk is too small, a note if no checkpoint is due. Curves are drawn at the end. args: of the
    script."""
    is_main = job.world.is_main
    config = flat(args)
    config["micro_batch_tokens"] = job.micro_batch_tokens
    if is_main and job.training and not checkpoints.resumes_own:
        settings = {
            "dtype": str(job.compute_dtype),
            "attention": job.attention,
            "compile": job.compile,
            "micro_batch_tokens": job.micro_batch_tokens,
            "activation_memory": job.activation_memory,
            "engine_memory": job.engine_memory,
        }
        commit = commit_of(job.model_folder)
        if commit:
            settings["model_commit"] = commit
        save_config(job.output_dir, config, **settings)
    trackers = None
    if is_main:
        trackers = Trackers(job.run.log, job.output_dir, config)
    logger = Logger(job.output_dir, StatusLine(total_steps), trackers, is_main)
    at_end.callback(logger.close)
    if not job.training:
        say(f"evaluating {job.checkpoint or job.run.model}")
        return logger
    if job.checkpoint:
        changed = changed_flags(job.output_dir, config) if is_main else {}
        record_resume(logger, job.checkpoint, checkpoints.start, total_steps, changed)
    if is_main:
        at_end.callback(draw_curves, job.output_dir)
    budget = remembered_budget(job.output_dir, job.micro_batch_tokens)
    if budget < job.micro_batch_tokens:
        say(
            f"micro-batches of {budget} tokens ({job.output_dir}/micro_batch_tokens): "
            "more did not fit"
        )
    checkpoints.warn_if_large()
    if not config.get("replay"):
        checkpoints.note_if_none_is_due(total_steps, rows_per_step(config))
    return logger


def rows_per_step(config: dict[str, Any]) -> int | None:
    """Rows of the data set that a step takes; None with --dynamic-sampling or --oversample."""
    if config.get("dynamic_sampling") or config.get("oversample", 1) > 1:
        return None
    return config.get("prompts_per_step") or config.get("batch_size")


def draw_curves(run_dir: Path) -> None:
    from common.look.curves import plot_curves  # not before the run has something to draw

    plot_curves(run_dir)


def record_resume(
    logger: Logger, checkpoint: Path, step: int, total_steps: int, changed: dict[str, list]
) -> None:
    """Record a resume, and print it with the flags whose values have changed.

    changed: {name of a flag: [value at the first start, value now]}.
    """
    event = {"event": "resumed", "step": step, "checkpoint": str(checkpoint)}
    if changed:
        event["changed"] = changed
    logger.event(event)
    message = f"resumed: {checkpoint}, step {step}; {max(0, total_steps - step)} of {total_steps} "
    message += "steps left"
    for name, (before, now) in changed.items():
        message += f"; {flag(name)} {now}, not {before}"
    say(message)

"""What a script needs around its loop: the logger, the export at its end, the time that a step
takes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean
from typing import Any

import numpy as np
import torch

from common.checkpoint import Checkpoints
from common.config import changed_flags, save_config
from common.console import StatusLine
from common.distributed import barrier, gather_objects, handle_signals, stopping
from common.ending import at_end, sign_of_life
from common.export import export_hugging_face
from common.files import full_disk_is_a_warning
from common.flags import flag, flat, step_range
from common.job import Job
from common.logger import Logger
from common.look.curves import plot_curves
from common.memory.halving import remembered_budget
from common.memory.plan import peak_memory_gb
from common.progress import say
from common.trackers import Trackers


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


def finish(job: Job, policy: torch.nn.Module) -> None:
    """Export the model; the curves are drawn, and the trackers end, where the process does."""
    folder = job.output_dir / "model"
    export_hugging_face(policy, job.tokenizer, folder, job.world, job.compute_dtype, job.run.model)
    say(f"done: {folder} loads in transformers and vLLM; curves.png is beside it")


def due(step: int, every: int) -> bool:
    """Is it this step's turn? 0: never."""
    return every > 0 and step % every == 0


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch's global generators, by the run's seed: a resume draws what an uninterrupted run
    does.

    Nothing here draws from them in a step; what a fork adds may.
    """
    (number,) = np.random.SeedSequence([seed, step, rank]).generate_state(1)
    torch.manual_seed(int(number))


def profiled(steps: range, job: Job) -> Iterator[int]:
    """`steps`; those of --profile-steps leave a trace of each rank, and a table of rank 0 on the
    console."""
    asked = step_range(job.run.profile_steps)
    traced = range(max(asked.start - 1, steps.start), min(asked.stop - 1, steps.stop))
    if asked and not traced:
        say(
            f"warning: --profile-steps {job.run.profile_steps}: the run has {steps.start + 1} "
            f"to {steps.stop}"
        )
    for step in steps:
        if step in traced[:1]:
            profiler = torch.profiler.profile()
            profiler.start()
        try:
            yield step
        except GeneratorExit:  # the loop is left within these steps
            if step in traced and stopping.is_set():
                write_trace(profiler, job)
            raise
        if step in traced[-1:]:
            write_trace(profiler, job)
            del profiler  # gigabytes
            barrier()  # what rank 0 takes for its table is no part of the next step


def write_trace(profiler: torch.profiler.profile, job: Job) -> None:
    profiler.stop()
    path = job.output_dir / "profile" / f"rank_{job.world.rank}.json.gz"
    with full_disk_is_a_warning(path):
        path.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(path))
    if job.world.is_main:
        table = profiler.key_averages().table(
            f"self_{job.world.device.type}_time_total", row_limit=10
        )
        print(table, flush=True)


class Stopwatch:
    """Seconds of a step by phase: `with watch("rollout"): ...`; a phase entered twice adds up."""

    def __init__(self) -> None:
        self.start, self.seconds = time.perf_counter(), {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        sign_of_life()
        with torch.profiler.record_function(phase):
            yield
        sign_of_life()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin

    def metrics(self, device: torch.device) -> dict[str, float]:
        """Means over the ranks; of several also the slowest of each phase. All call it together."""
        ranks = gather_objects(
            (self.seconds | {"step": time.perf_counter() - self.start}, peak_memory_gb(device))
        )
        phases = {
            phase: [rank.get(phase, 0.0) for rank, _ in ranks] for own, _ in ranks for phase in own
        }
        metrics = {f"time/{phase}_s": mean(seconds) for phase, seconds in phases.items()}
        if len(ranks) > 1:
            metrics |= {f"time/{phase}_max_s": max(seconds) for phase, seconds in phases.items()}
            metrics["memory/peak_mean_gb"] = mean(peak for _, peak in ranks)
        return metrics | {"memory/peak_gb": max(peak for _, peak in ranks)}

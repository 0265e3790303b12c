"""The steps of a run: seeds, timings, traces, and what is due at which step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import NoReturn

import numpy as np
import torch

from common.distributed import World, barrier, gather_objects
from common.ending import sign_of_life
from common.files import full_disk_is_a_warning
from common.flags import step_range
from common.memory.plan import peak_memory_gb
from common.progress import say
from common.script import stopping

MAX_UNSCORED_STEPS = 3  # in a row; then the run ends


def due(step: int, every: int) -> bool:
    """Whether `step` is a multiple of `every`; an `every` of 0 means never."""
    return every > 0 and step % every == 0


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch's global generators from the run's seed, the step and the rank: a resumed run
    draws what an uninterrupted one would.

    Nothing here draws from them in a step; what a fork adds may.
    """
    (number,) = np.random.SeedSequence([seed, step, rank]).generate_state(1)
    torch.manual_seed(int(number))


def profiled(steps: range, profile_steps: str | None, run_dir: Path, world: World) -> Iterator[int]:
    """Yield `steps`, which count from 0. Each rank writes a trace of those in --profile-steps,
    which counts from 1, and rank 0 prints a table of them."""
    requested = step_range(profile_steps)
    traced = range(max(requested.start - 1, steps.start), min(requested.stop - 1, steps.stop))
    if requested and not traced:
        say(
            f"warning: --profile-steps {profile_steps}: the run has steps {steps.start + 1} to "
            f"{steps.stop}"
        )
    for step in steps:
        if traced and step == traced[0]:
            profiler = torch.profiler.profile()
            profiler.start()
        try:
            yield step
        except GeneratorExit:  # the loop has ended early; after a signal the trace is kept
            if step in traced and stopping.is_set():
                write_trace(profiler, run_dir, world)
            raise
        if traced and step == traced[-1]:
            write_trace(profiler, run_dir, world)
            del profiler  # gigabytes
            barrier()  # the seconds that rank 0 takes for its table are no part of the next step


def write_trace(profiler: torch.profiler.profile, run_dir: Path, world: World) -> None:
    profiler.stop()
    path = run_dir / "profile" / f"rank_{world.rank}.json.gz"
    with full_disk_is_a_warning(path):
        path.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(path))
    if world.is_main:
        averages = profiler.key_averages()
        print(averages.table(f"self_{world.device.type}_time_total", row_limit=10), flush=True)


class Stopwatch:
    """Seconds of a step by phase: `with watch("rollout"): ...`; a phase entered twice adds up."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        sign_of_life()
        with torch.profiler.record_function(phase):
            yield
        sign_of_life()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin

    def metrics(self, device: torch.device) -> dict[str, float]:
        """time/* of the step and memory/*, the highest so far; of several ranks their means and
        maxima. All ranks call it together."""
        seconds = dict(self.seconds)
        seconds["step"] = time.perf_counter() - self.start
        measurements = gather_objects((seconds, peak_memory_gb(device)))
        seconds_of_ranks = [seconds_of_rank for seconds_of_rank, _ in measurements]
        peaks = [peak for _, peak in measurements]
        phases: dict[str, None] = {}  # of all ranks, in order
        for seconds_of_rank in seconds_of_ranks:
            phases |= dict.fromkeys(seconds_of_rank)
        metrics = {}
        for phase in phases:
            values = [seconds_of_rank.get(phase, 0.0) for seconds_of_rank in seconds_of_ranks]
            metrics[f"time/{phase}_s"] = mean(values)
            if len(values) > 1:
                metrics[f"time/{phase}_max_s"] = max(values)
        if len(peaks) > 1:
            metrics["memory/peak_mean_gb"] = mean(peaks)
        metrics["memory/peak_gb"] = max(peaks)
        return metrics


class UnscoredSteps:
    """Counts the steps in a row in which no response could be scored: they train nothing."""

    def __init__(self) -> None:
        self.num_steps = 0

    def count(self, step: int, metrics: dict[str, float]) -> None:
        """Count a step; begin anew at 0 if it has a scored response. metrics: of all ranks."""
        if "reward/unscored_steps" not in metrics:
            self.num_steps = 0
            return
        self.num_steps += 1
        say(
            f"warning: step {step} trains nothing: none of its responses could be scored, for the "
            "reason above"
        )

    @property
    def too_many(self) -> bool:
        """Whether to save and to end the run, on all ranks alike."""
        return self.num_steps >= MAX_UNSCORED_STEPS

    def end_run(self, step: int) -> NoReturn:
        raise SystemExit(
            f"no response of {self.num_steps} steps in a row could be scored, for the reason "
            f"above: the run ends at step {step}; the same command goes on from its last checkpoint"
        )

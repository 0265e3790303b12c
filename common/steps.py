"""What a script needs around its loop: the logger, the export at its end, the time that a step
takes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean

import numpy as np
import torch

from common.distributed import barrier, gather_objects, stopping
from common.ending import sign_of_life
from common.export import export_hugging_face
from common.files import full_disk_is_a_warning
from common.flags import step_range
from common.job import Job
from common.memory.plan import peak_memory_gb
from common.progress import say


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

"""What a script needs around its loop: the logger, the export at its end, the time that a step takes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from common.checkpoint import Checkpoints
from common.distributed import handle_sigterm, trim_memory
from common.flags import flat
from common.job import Job
from common.logger import Logger
from common.look.console import StatusLine
from common.look.curves import plot_curves
from common.look.machine import changed_flags, save_config
from common.look.trackers import Trackers
from common.memory import remembered_budget
from common.prepare.export import export_hugging_face
from common.processes import at_end, sign_of_life


def open_logger(job: Job, args: Any, total_steps: int, checkpoints: Checkpoints, *, record: bool = True) -> Logger:
    """config.json, unless this is no training, and the logger; tells where the run goes on, and what it will write."""
    world, config = job.world, flat(args)
    if job.machine.lora_rank:
        rate = config["learning_rate"]
        low = ", which is low: ten times that of full training is usual" if rate < 0.99e-5 else ""
        world.print(f"LoRA of rank {job.machine.lora_rank}, learning rate {rate:g}{low}")
    # what a resume changes is an event
    own = job.checkpoint and job.checkpoint.resolve().is_relative_to(job.output_dir.resolve())
    if world.is_main and record and not own:
        save_config(job.output_dir, config)
    trackers = Trackers(job.run.log, job.output_dir, config, job.script) if world.is_main else None
    logger = Logger(job.output_dir, StatusLine(total_steps), trackers, world.is_main)
    if job.checkpoint:
        changed = changed_flags(job.output_dir, config) if world.is_main else {}
        resumed = {"event": "resumed", "step": checkpoints.start, "checkpoint": str(job.checkpoint)}
        logger.event(resumed | ({"changed": changed} if changed else {}))
        left = f"{max(0, total_steps - checkpoints.start)} of {total_steps} steps left"
        world.print(f"resumed: {job.checkpoint}, step {checkpoints.start}; {left}")
    if not record:
        return logger
    if world.is_main:
        at_end.append(partial(plot_curves, job.output_dir))
    handle_sigterm()
    budget = remembered_budget(job.output_dir, job.machine.micro_batch_tokens)
    if budget < job.machine.micro_batch_tokens:
        world.print(f"micro-batches of {budget} tokens, since {job.output_dir}/micro_batch_tokens: more did not fit")
    checkpoints.warn_if_large()
    return logger


def finish(job: Job, policy: nn.Module, logger: Logger) -> None:
    """Export the model, end the trackers; the curves are drawn where the process ends."""
    folder = job.output_dir / "model"
    export_hugging_face(policy, job.tokenizer, folder, job.world, job.compute_dtype, job.run.model)
    logger.close()
    job.world.print(f"done: {folder} loads in transformers and vLLM; curves.png is beside it")


def due(step: int, every: int) -> bool:
    """Is it this step's turn? 0: never."""
    return every > 0 and step % every == 0


class Stopwatch:
    """Seconds of a step by phase: `with watch("rollout"): ...`; a phase entered twice adds up."""

    def __init__(self) -> None:
        trim_memory()
        self.start, self.seconds = time.perf_counter(), {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        sign_of_life()
        yield
        sign_of_life()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin

    def metrics(self) -> dict[str, float]:
        phases = {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}
        return phases | {"time/step_s": time.perf_counter() - self.start}

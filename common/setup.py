"""What a script needs before and after its loop; what a user can get wrong is refused before weights are loaded."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from filelock import LeaseCompromise

from common.attention import choose_attention
from common.checkpoint import Checkpoints, find_checkpoint
from common.data.dumps import full_disk_is_a_warning
from common.distributed import World, broadcast_object, gather_objects, handle_sigterm, init_world, trim_freed_memory
from common.files import lock_folder, refuse, user_errors
from common.flags import Data, Machine, Run, flat, refuse_idle, step_range
from common.hub import load_tokenizer, resolve_model
from common.integrity import model_identity, weights_identity
from common.job import Job
from common.logger import Logger
from common.look.console import StatusLine
from common.look.curves import plot_curves
from common.look.machine import changed_flags, check_device, save_config
from common.look.trackers import Trackers, tracker_names
from common.lora import save_adapter
from common.memory import peak_memory_gb, remembered_budget
from common.models import check_model, export_hugging_face
from common.pictures import PixelLimits
from common.precision import choose_dtype
from common.processes import at_end, fail, leave, sign_of_life
from common.vision import load_vision


def open_job(script: str, data: Data, machine: Machine, run: Run, demo: bool, record: bool = True) -> Job:
    """Join the process group, lock the run folder (if it is to `record`), find the model and what to go on from."""
    world = init_world(run.stall_minutes)
    if demo:
        world.print("no --model given: running the embedded demo")
    stamp = broadcast_object(time.strftime("%Y%m%d-%H%M%S"))  # the clocks of the ranks may differ
    output_dir = run.output_dir or Path("runs") / f"{script}-{Path(run.model).name}-{stamp}"
    shared = machine.shard_size or 1
    refuse(world.size % shared > 0, f"--shard-size {shared}: {world.size} ranks are no multiple of it")
    refuse_idle(machine, {"shard_size": (machine.strategy == "fsdp", "--strategy fsdp")})
    gpu = (world.device.type == "cuda", "a GPU")
    refuse_idle(machine, {"optimizer_offload": gpu, "reference_offload": gpu})
    with user_errors():
        tracker_names(run.log)
        check_device(world.device)
        compute_dtype, why = choose_dtype(machine.dtype, world.device)
    step_range(run.profile_steps)  # is it one?
    attention = choose_attention(machine.attention, world.device, machine.compile)
    if record:
        lock_everywhere(output_dir, world)
    path = resolve_model(run.model)
    check_model(path, attention, machine.trust_remote_code)
    identity = {"script": script, "model": model_identity(Path(path)), "LoRA": None}
    if machine.lora_rank:
        identity["LoRA"] = [machine.lora_rank, machine.lora_alpha, machine.lora_targets]
        identity["base"] = broadcast_object(weights_identity(Path(path)) if world.is_main else None)
        refuse_idle(machine, {"reference_offload": (False, "a reference of its own: with --lora-rank it is the base")})
    checkpoint = find_checkpoint(output_dir, run.resume, world, identity)
    tokenizer = load_tokenizer(path, machine.trust_remote_code)
    limits = PixelLimits(data.min_pixels, data.max_pixels, data.max_frame_pixels)
    vision = load_vision(path, limits, machine.trust_remote_code)
    sees = (vision is not None, "a vision-language --model")
    refuse_idle(data, dict.fromkeys(["min_pixels", "max_pixels", "max_frame_pixels", "media_root"], sees))
    refuse_idle(machine, {"freeze_vision": sees})
    refuse_idle(machine, dict.fromkeys(["lora_alpha", "lora_targets"], (machine.lora_rank > 0, "--lora-rank")))
    summary = f"{script}.py: {run.model}, {world.size} x {world.device.type}, {machine.strategy}, "
    summary += f"compute {compute_dtype} ({why}) -> {output_dir}"
    return Job(
        script=script,
        world=world,
        output_dir=output_dir,
        path=path,
        tokenizer=tokenizer,
        compute_dtype=compute_dtype,
        attention=attention,
        limits=limits,
        vision=vision,
        machine=machine,
        run=run,
        summary=summary,
        identity=identity,
        checkpoint=checkpoint,
    )


def lock_everywhere(output_dir: Path, world: World) -> None:
    """Rank 0 takes the lock of the run folder; every rank must see it: nodes without shared storage would write
    checkpoints that cannot be loaded."""
    if world.is_main:
        lock = lock_folder(output_dir, world.print, lost=give_way)
        at_end.append(lock.release)
    token = broadcast_object(lock.token if world.is_main else None)
    for _ in range(100):  # a network file system shows a new file within seconds
        with suppress(OSError):
            if token in (output_dir / "lock").read_text():
                break
        time.sleep(0.1)
    else:
        raise SystemExit(f"--output-dir {output_dir}: {socket.gethostname()} does not see what rank 0 writes there")


def give_way(loss: LeaseCompromise) -> None:
    """Another run has taken the folder over: this one stood still for a minute, and must not write there."""
    if loss.reason == "owner-changed":
        fail(f"{loss.lock_file} is another run's now: this one ends")
        leave(1)


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


def finish(job: Job, policy: torch.nn.Module, logger: Logger) -> None:
    """Export the model, end the trackers; the curves are drawn where the process ends."""
    folder = job.output_dir / "model"
    export_hugging_face(policy, job.tokenizer, folder, job.world, job.compute_dtype)
    if job.machine.lora_rank and job.world.is_main:
        save_adapter(policy.model, job.run.model, job.output_dir / "adapter")
    logger.close()
    job.world.print(f"done: {folder} loads in transformers and vLLM; curves.png is beside it")


def due(step: int, every: int) -> bool:
    """Is it this step's turn? 0: never."""
    return every > 0 and step % every == 0


def profiled(steps: range, job: Job) -> Iterator[int]:
    """`steps`; those of --profile-steps leave a trace of each rank, and a table of rank 0 on the console."""
    asked, world = step_range(job.run.profile_steps), job.world
    traced = range(max(asked.start - 1, steps.start), min(asked.stop - 1, steps.stop))
    if asked and not traced:
        world.print(f"warning: --profile-steps {job.run.profile_steps}: the run has {steps.start + 1} to {steps.stop}")
    for step in steps:
        if step in traced[:1]:
            profiler = torch.profiler.profile()
            profiler.start()
        yield step
        if step in traced[-1:]:
            profiler.stop()
            path = job.output_dir / "profile" / f"rank_{world.rank}.json.gz"
            with full_disk_is_a_warning(path):
                path.parent.mkdir(exist_ok=True)
                profiler.export_chrome_trace(str(path))
            if world.is_main:
                print(profiler.key_averages().table(f"self_{world.device.type}_time_total", row_limit=10), flush=True)
            del profiler  # gigabytes
            torch.distributed.barrier()  # what rank 0 takes for its table is no part of the next step


class Stopwatch:
    """Seconds of a step by phase: `with watch("rollout"): ...`; a phase entered twice adds up."""

    def __init__(self) -> None:
        trim_freed_memory()
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
        """Means over the ranks; of several also the slowest of each phase, and who that is. All call it together."""
        ranks = gather_objects((self.seconds | {"step": time.perf_counter() - self.start}, peak_memory_gb(device)))
        peaks = [peak for _, peak in ranks]
        phases = {phase: [rank.get(phase, 0.0) for rank, _ in ranks] for own, _ in ranks for phase in own}
        metrics = {f"time/{phase}_s": mean(seconds) for phase, seconds in phases.items()}
        metrics["memory/peak_gb"] = max(peaks)
        if len(ranks) > 1:
            metrics |= {f"time/{phase}_max_s": max(seconds) for phase, seconds in phases.items()}
            apart = {phase: max(seconds) - mean(seconds) for phase, seconds in phases.items()}
            first = next(phase for phase in apart if apart[phase] >= max(apart.values()) / 2)  # later ones wait for it
            metrics["time/slowest_rank"] = phases[first].index(max(phases[first]))
            metrics["memory/peak_mean_gb"] = mean(peaks)
        return metrics

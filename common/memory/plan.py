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


def memory_phases(
    rollout: Rollout,
    machine: Machine,
    ranks: int,
    dtype: torch.dtype,
    trained: list[str],
    frozen: list[str],
    on_gpu: bool,
    reward_parameters: int = 0,
) -> dict[str, float]:
    """`phases_of` for the models in these folders, the policy first, then critics; no weights are
    read."""
    shapes = {path: model_shape(path, machine) for path in {*trained, *frozen}}
    models = [shapes[path] for path in trained]
    references = [shapes[path] for path in frozen]
    return phases_of(rollout, machine, ranks, dtype, models, references, on_gpu, reward_parameters)


@dataclass(frozen=True)
class MemoryPlan:
    """What a run needs, and its sizes, as given or chosen to fit."""

    text: str  # a line, and a warning if something may not fit
    micro_batch_tokens: int  # as given, or as many as fit
    activation_memory: float  # the share that compiled layers keep, as given or chosen
    engine_memory: float  # GiB of the KV cache
    free_gb: float  # before the run has loaded anything
    update_gb: float  # of which the update takes
    refusal: str = ""  # why the run cannot work


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
    """What each phase needs, in words; sizes that no flag gives; and the cheapest change of flags
    if something may not fit. All ranks call it together.

    The sizes are the largest with which a phase takes at most the share ROOM of the free memory of
    the tightest rank: the KV cache with the rollout (if the engine sleeps on a GPU), a micro-batch
    of at most `most_tokens` with the update. `--activation-memory auto` is the share with which
    the update fits and takes least time. A plan that chooses the micro-batch on CPUs has a
    `refusal` if a phase still does not fit: the kernel would kill the run without a message.
    trained, frozen, reward_model, teacher: folders. SystemExit if the KV cache does not fit beside
    the engine's weights.
    """
    on_gpu = world.device.type == "cuda"
    free_gb = free_memory_gb(world)
    attention = choose_attention(machine.attention, world.device, machine.compile, dtype)
    machine = replace(machine, attention=attention)
    has_shares = machine.compile and not machine.gradient_checkpointing and not rollout.eval_only
    chooses_share = has_shares and machine.activation_memory == "auto"
    if machine.activation_memory == "auto":
        machine = replace(machine, activation_memory=1.0)
    shapes = {path: model_shape(path, machine) for path in {*trained, *frozen}}
    run = _PlannedRun(
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

    room = ROOM * free_gb  # for sizes that the plan chooses
    chosen_flags = []
    cache_size_gib = cache_gib(rollout, on_gpu)
    if run.chooses_cache:
        cache_size_gib = fitting_cache(
            run.phases, rollout, machine, world.size, room, run.least_cache_gib
        )
        chosen_flags.append(f"--engine-memory {cache_size_gib:g}")
    with_cache = replace(rollout, engine_memory=cache_size_gib)
    if chooses_share:
        share = cheapest_share(run.phases, with_cache, machine, world.size, room, most_tokens)
        machine = replace(machine, activation_memory=share)
        run = replace(run, machine=machine)
    tokens = machine.micro_batch_tokens or most_tokens
    if run.chooses_tokens:
        tokens = fitting_micro_batch(run.phases, with_cache, machine, world.size, room, most_tokens)
        chosen_flags.append(f"--micro-batch-tokens {tokens}")

    gb = run.phases(with_cache, replace(machine, micro_batch_tokens=tokens), world.size)
    text = describe(gb, free_gb, rollout)
    if chosen_flags:
        text += f"; {' and '.join(chosen_flags)} chosen to fit into {ROOM:.0%} of what is free"
    if chooses_share:
        text += f"\n{describe_share(machine.activation_memory, gb['update'], room, free_gb)}"
    check_cache(gb, free_gb)
    # a user's own sizes may use all that is free
    limit = room if run.chooses_tokens or chooses_share else free_gb
    plan = MemoryPlan(
        text=text,
        micro_batch_tokens=tokens,
        activation_memory=machine.activation_memory,
        engine_memory=cache_size_gib,
        free_gb=free_gb,
        update_gb=gb["update"],
    )
    too_large = [phase for phase in PHASES if gb[phase] > limit]
    if not too_large:
        return plan

    advice = run.advice(has_reference=gb["reference"] > 0, limit=limit, tokens=tokens)
    phase_names = " and the ".join(too_large)
    if on_gpu or not run.chooses_tokens:
        return replace(plan, text=f"{text}\nwarning: the {phase_names} may not fit; {advice}")
    refusal = f"the {phase_names} would not fit into {ROOM:.0%} of what is free"
    if gb["update"] > limit:
        refusal += f", even with one episode of {longest(rollout)} tokens at a time"
    refusal += f"; {advice}; --micro-batch-tokens {tokens} tries it all the same"
    return replace(plan, refusal=refusal)


@dataclass(frozen=True)
class _PlannedRun:
    """The run that a plan is for, before sizes are chosen."""

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

    @property
    def chooses_cache(self) -> bool:
        """Whether the plan sizes the KV cache: no flag does, and the engine sleeps on a GPU."""
        sleeps = self.on_gpu and self.rollout.sleep_level > 0 and not self.rollout.replay
        return sleeps and self.rollout.engine_memory is None

    @property
    def chooses_tokens(self) -> bool:
        return self.machine.micro_batch_tokens is None and not self.rollout.eval_only

    @property
    def least_cache_gib(self) -> float:
        """The KV cache of a single episode (GiB), rounded up to a quarter."""
        policy = self.models[0]
        values = 2 * policy.layers * policy.keys  # of a token
        token_bytes = values * self.dtype.itemsize / self.rollout.engine_parallel
        return max(0.25, ceil(4 * token_bytes * longest(self.rollout) / 2**30) / 4)

    def advice(self, has_reference: bool, limit: float, tokens: int) -> str:
        """The cheapest change of flags with which each phase fits into `limit` gigabytes.
        tokens: of a micro-batch without the change."""
        rollout = self.rollout
        shares = engine_shares(self.models[0], rollout)
        alternatives = remedies(
            rollout, self.machine, self.ranks, self.on_gpu, has_reference, shares
        )
        most_gib = cache_gib(rollout, self.on_gpu)
        if self.chooses_cache:
            # the default, or the cache of one episode if that is larger
            most_gib = max(most_gib, self.least_cache_gib)
        else:
            # as if a flag gave it: the advice then names --engine-memory if it lowers it
            rollout = replace(rollout, engine_memory=most_gib)
        change = cheapest_change(
            self.phases,
            list(alternatives),
            rollout,
            self.machine,
            self.ranks,
            room_gb=limit,
            most_tokens=tokens,
            most_cache_gib=most_gib,
            least_cache_gib=self.least_cache_gib,
        )
        if change:
            return f"it would {change}"
        if self.machine.lora_rank:
            return "nor would it with other flags: a smaller model"
        return "nor would it with other flags: a smaller model, or --lora-rank"


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


def engine_shares(shape: ModelShape, rollout: Rollout) -> list[int]:
    """Larger values that --engine-parallel may have."""
    if not rollout.uses_vllm or rollout.replay:
        return []
    # keys = heads of keys x head size, queries = heads x head size
    key_heads = shape.heads * shape.keys // shape.queries
    shares = []
    for share in (2, 4, 8):
        divides_all = all(n % share == 0 for n in (ranks_here(), shape.heads, shape.mlp))
        keys_fit = key_heads % share == 0 or share % key_heads == 0  # split, or repeated
        if share > rollout.engine_parallel and divides_all and keys_fit:
            shares.append(share)
    return shares


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

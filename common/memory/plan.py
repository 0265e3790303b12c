"""The memory plan of a run: what each phase of a step will need, before any weights are read, and
the sizes that are chosen by it."""

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
    fitting_cache,
    fitting_micro_batch,
    longest,
    remedies,
)
from common.memory.shape import ModelShape, count_parameters, model_shape
from common.processes import ranks_here
from common.torch_repair import transformers

GIB = 2**30 / 1e9  # in GB


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
    """What a run needs, and the sizes that were chosen by it."""

    text: str  # a line, and a warning if something may not fit
    micro_batch_tokens: int  # as given, or as many as fit
    engine_memory: float  # GiB of the KV cache
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
) -> MemoryPlan:
    """`memory_phases` in words, and the cheapest change that fits if something may not. All ranks
    call it together.

    Sizes that no flag gives are chosen by the free memory of the tightest rank. The KV cache of an
    engine that sleeps on a GPU takes what the rollout leaves of a share of it; a micro-batch, of at
    most `most_tokens`, what the update leaves. If that does not even hold the longest episode, a
    run on a CPU is refused, since the kernel would kill it without a message. trained, frozen,
    reward_model: folders. SystemExit if no engine would fit.
    """
    on_gpu = world.device.type == "cuda"
    free_gb = free_memory_gb(world)
    attention = choose_attention(machine.attention, world.device, machine.compile, dtype)
    machine = replace(machine, attention=attention)
    shapes = {path: model_shape(path, machine) for path in {*trained, *frozen}}
    models = [shapes[path] for path in trained]
    references = [shapes[path] for path in frozen]
    reward_parameters = classifier_parameters(reward_model) if reward_model else 0

    def phases(rollout: Rollout, machine: Machine, ranks: int) -> dict[str, float]:
        return phases_of(
            rollout, machine, ranks, dtype, models, references, on_gpu, reward_parameters
        )

    chosen_flags = []
    least_cache = least_cache_gib(models[0], rollout, dtype)
    cache = cache_gib(rollout, on_gpu)
    most_cache = cache
    sleeps = on_gpu and rollout.sleep_level > 0 and not rollout.replay
    chooses_cache = sleeps and rollout.engine_memory is None
    if chooses_cache:
        most_cache = max(least_cache, cache)
        room = ROOM * free_gb
        cache = fitting_cache(phases, rollout, machine, world.size, room, least_cache)
        chosen_flags.append(f"--engine-memory {cache:g}")
    with_cache = replace(rollout, engine_memory=cache)

    tokens = machine.micro_batch_tokens or most_tokens
    room = free_gb
    chooses_tokens = machine.micro_batch_tokens is None and not rollout.eval_only
    if chooses_tokens:
        room = ROOM * free_gb
        tokens = fitting_micro_batch(phases, with_cache, machine, world.size, room, most_tokens)
        chosen_flags.append(f"--micro-batch-tokens {tokens}")

    gb = phases(with_cache, replace(machine, micro_batch_tokens=tokens), world.size)
    text = describe(gb, free_gb, rollout)
    if chosen_flags:
        text += f"; {' and '.join(chosen_flags)} chosen to fit into {ROOM:.0%} of what is free"
    check_cache(gb, free_gb)
    too_large = [phase for phase in PHASES if gb[phase] > room]
    if not too_large:
        return MemoryPlan(text, tokens, cache)

    shares = engine_shares(models[0], rollout)
    change = cheapest_change(
        phases,
        list(remedies(rollout, machine, world.size, on_gpu, gb["reference"] > 0, shares)),
        rollout if chooses_cache else with_cache,
        machine,
        world.size,
        room=room,
        most_tokens=tokens,
        most_cache_gib=most_cache,
        least_cache_gib=least_cache,
    )
    advice = "nor would it with other flags: a smaller model, or --lora-rank"
    if change:
        advice = f"it would {change}"
    phase_names = " and the ".join(too_large)
    if on_gpu or not chooses_tokens:
        text += f"\nwarning: the {phase_names} may not fit; {advice}"
        return MemoryPlan(text, tokens, cache)
    refusal = f"the {phase_names} would not fit into {ROOM:.0%} of what is free"
    if gb["update"] > room:
        refusal += f", even with one episode of {longest(rollout)} tokens at a time"
    refusal += f"; {advice}; --micro-batch-tokens {tokens} tries it all the same"
    return MemoryPlan(text, tokens, cache, refusal)


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
    left_gb = max(0.0, free_gb - gb["engine"])
    if gb["KV cache"] > left_gb:
        raise SystemExit(
            f"--engine-memory {gb['KV cache'] / GIB:g}: of {free_gb / GIB:.1f} GiB that are free "
            f"the engine's weights leave {left_gb / GIB:.1f}"
        )


def engine_shares(shape: ModelShape, rollout: Rollout) -> list[int]:
    """Larger values that --engine-parallel may have."""
    if not rollout.uses_vllm or rollout.replay:
        return []
    key_heads = shape.heads * shape.keys // shape.queries
    shares = []
    for share in (2, 4, 8):
        divides = ranks_here() % share == shape.heads % share == shape.mlp % share == 0
        divides_keys = key_heads % share == 0 or share % key_heads == 0
        if share > rollout.engine_parallel and divides and divides_keys:
            shares.append(share)
    return shares


def least_cache_gib(shape: ModelShape, rollout: Rollout, dtype: torch.dtype) -> float:
    """The KV cache of a single episode, in quarters of a GiB."""
    token = 2 * shape.layers * shape.keys * dtype.itemsize / rollout.engine_parallel
    return max(0.25, ceil(4 * token * longest(rollout) / 2**30) / 4)


def describe(gb: dict[str, float], free_gb: float, rollout: Rollout) -> str:
    """The plan in a sentence, without the phases and terms that a run does not have."""
    text = f"memory of a rank (GB, estimated; {free_gb:.1f} are free): weights {gb['weights']:.1f}"
    text += f", of them reference {gb['reference']:.1f}, Adam {gb['Adam']:.1f}"
    if not rollout.replay:
        text += f"; rollout {gb['rollout']:.1f}, of it engine {gb['engine']:.1f}"
        text += f", KV cache {gb['KV cache']:.1f} (--engine-memory)"
        text += f", its work space {gb['workspace']:.1f}"
    if gb["scoring"]:
        text += f"; reward model {gb['scoring']:.1f}"
    if not rollout.eval_only:
        text += f"; update {gb['update']:.1f}, of it gradients {gb['gradients']:.1f}"
        text += f", activations {gb['activations']:.1f}, gathered {gb['gathered']:.1f}"
    return text


def no_rollout(longest_episode: int) -> Rollout:
    """The rollout flags of a script that does not sample, for the plan alone; `longest_episode` is
    in tokens."""
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

"""The cheapest change of flags with which a run fits into its memory. Without torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import Any

from common.flags import Machine, Rollout

ROOM = 0.9  # share of the free memory that a run fills with sizes that it chooses
STEP = 128  # tokens: micro-batches are padded to multiples of it
PHASES = ("rollout", "scoring", "update")
# {share of the activations that compiled layers keep: about the share of a step's time that they
# take to compute the others again}
ACTIVATION_SHARES = {1.0: 0.0, 0.7: 0.02, 0.5: 0.05, 0.3: 0.15}

# (rollout, machine, ranks) -> gigabytes of each phase
Phases = Callable[[Rollout, Machine, int], dict[str, float]]


@dataclass(frozen=True)
class Remedy:
    """A change of flags, or of the number of GPUs. Its cost is about the share of a step's time
    that it takes; more GPUs, the last resort, cost more than all other remedies together."""

    words: str = ""  # the flags, as one types them
    cost: float = 0.0
    rollout: dict[str, Any] = field(default_factory=dict)  # changed fields
    machine: dict[str, Any] = field(default_factory=dict)  # changed fields
    gpus: int = 1  # how many times as many GPUs


def longest(rollout: Rollout) -> int:
    """The most tokens that an episode may have. One that is longer than a micro-batch gets a
    micro-batch of its own."""
    return rollout.max_prompt_tokens + rollout.max_response_tokens


def largest_micro_batch(
    phases: Phases, rollout: Rollout, machine: Machine, ranks: int, room_gb: float
) -> int:
    """The most tokens, a multiple of 128, whose update takes at most `room_gb`; 0 if 128 take
    more."""
    low = 0  # in steps
    high = 2**13  # about a million tokens
    while low < high:
        middle = (low + high + 1) // 2
        larger = replace(machine, micro_batch_tokens=STEP * middle)
        if phases(rollout, larger, ranks)["update"] <= room_gb:
            low = middle
        else:
            high = middle - 1
    return STEP * low


def fitting_micro_batch(
    phases: Phases, rollout: Rollout, machine: Machine, ranks: int, room_gb: float, most_tokens: int
) -> int:
    """The largest power of two of tokens, at most `most_tokens`, whose update takes at most
    `room_gb`.

    An episode is never divided, so the result is at least the longest one, whether that fits or
    not.
    """
    fitting = min(most_tokens, largest_micro_batch(phases, rollout, machine, ranks, room_gb))
    tokens = 1
    while 2 * tokens <= fitting:
        tokens *= 2
    return max(tokens, longest(rollout))


def fitting_cache(
    phases: Phases, rollout: Rollout, machine: Machine, ranks: int, room_gb: float, least: float
) -> float:
    """The largest KV cache, in quarters of a GiB, with which a rollout takes at most `room_gb`;
    but at least `least`."""
    low = 0  # in quarters of a GiB
    high = int(4 * room_gb * 1e9 / 2**30)
    while low < high:
        middle = (low + high + 1) // 2
        larger = replace(rollout, engine_memory=middle / 4)
        if phases(larger, machine, ranks)["rollout"] <= room_gb:
            low = middle
        else:
            high = middle - 1
    return max(least, low / 4)


def micro_batch_cost(tokens: int) -> float:
    """About the share of a step's time in which weights are gathered and gradients reduced, with
    micro-batches of so many tokens."""
    return 1500 / tokens


def cheapest_share(
    phases: Phases, rollout: Rollout, machine: Machine, ranks: int, room_gb: float, most_tokens: int
) -> float:
    """The share of the activations to keep: of the shares with which an update fits into `room_gb`
    the one with which it takes least time; the smallest one if it fits with none.

    This is the largest share that fits, unless the run also chooses its micro-batches: then a
    smaller one may leave room for larger micro-batches, of at most `most_tokens`.
    """
    best_cost = inf
    best_share = min(ACTIVATION_SHARES)
    for share, cost in ACTIVATION_SHARES.items():
        changed = replace(machine, activation_memory=share)
        if changed.micro_batch_tokens is None:
            tokens = fitting_micro_batch(phases, rollout, changed, ranks, room_gb, most_tokens)
            changed = replace(changed, micro_batch_tokens=tokens)
        whole_cost = cost + micro_batch_cost(changed.micro_batch_tokens)
        fits = phases(rollout, changed, ranks)["update"] <= room_gb
        if fits and whole_cost < best_cost:
            best_cost = whole_cost
            best_share = share
    return best_share


def remedies(
    rollout: Rollout,
    machine: Machine,
    ranks: int,
    on_gpu: bool,
    has_reference: bool,
    engine_parallel_sizes: Sequence[int],
) -> Iterator[list[Remedy]]:
    """The alternatives for each flag, or number of GPUs, that may help; the first one changes
    nothing.

    engine_parallel_sizes: possible values of --engine-parallel.
    """
    no_change = Remedy()
    compilable = on_gpu and machine.attention in ("flex", "flash")
    if compilable and not machine.compile:
        yield [no_change, Remedy("--compile", cost=0.01, machine={"compile": True})]
    if not machine.gradient_checkpointing:
        recomputations = [no_change]
        for share, cost in ACTIVATION_SHARES.items():
            # never chosen without --compile, since only compiled layers save memory by it
            if compilable and share < machine.activation_memory:
                words = f"--activation-memory {share}"
                recomputations.append(Remedy(words, cost, machine={"activation_memory": share}))
        checkpointing = {"gradient_checkpointing": True, "activation_memory": 1.0}
        words = "--gradient-checkpointing"
        if machine.activation_memory < 1:
            words += " (in place of --activation-memory)"
        recomputations.append(Remedy(words, cost=0.3, machine=checkpointing))
        yield recomputations
    if not on_gpu:
        return
    if rollout.sleep_level == 0:
        yield [no_change, Remedy("--sleep-level 1", cost=0.1, rollout={"sleep_level": 1})]
    parts_on_host = set(machine.offload.split(",")) - {""}
    offloads = [no_change]
    idle_model = "base" if machine.lora_rank else "reference"
    # `has_reference` is false for a reference that is on the host already
    can_move = machine.lora_rank > 0 or has_reference or "reference" in parts_on_host
    for parts, cost in (
        ([idle_model], 0.1),
        (["optimizer"], 0.4),
        (["optimizer", idle_model], 0.5),
    ):
        if idle_model in parts and not can_move:
            continue
        if parts_on_host < set(parts):
            names = ",".join(parts)
            offloads.append(Remedy(f"--offload {names}", cost, machine={"offload": names}))
    yield offloads
    if machine.strategy == "ddp" and ranks > 1:
        yield [no_change, Remedy("--strategy fsdp", cost=0.1, machine={"strategy": "fsdp"})]
    if machine.shard_size and machine.shard_size < ranks:
        words = f"--shard-size {ranks}"
        yield [no_change, Remedy(words, cost=0.1, machine={"shard_size": ranks})]
    if engine_parallel_sizes:
        engines = [no_change]
        for size in engine_parallel_sizes:
            words = f"--engine-parallel {size}"
            engines.append(Remedy(words, cost=0.1 * size, rollout={"engine_parallel": size}))
        yield engines
    if machine.strategy == "fsdp" and not machine.shard_size:  # else shards stay as large
        more_gpus = [no_change]
        for times in (2, 4, 8, 16):
            more_gpus.append(Remedy(cost=2.0 * times, gpus=times))
        yield more_gpus


def total_cost(combination: Sequence[Remedy]) -> float:
    return sum(remedy.cost for remedy in combination)


def apply_remedies(
    combination: Sequence[Remedy], rollout: Rollout, machine: Machine, ranks: int
) -> tuple[Rollout, Machine, int]:
    """(rollout, machine, ranks) with the changes."""
    for remedy in combination:
        rollout = replace(rollout, **remedy.rollout)
        machine = replace(machine, **remedy.machine)
        ranks *= remedy.gpus
    return rollout, machine, ranks


def cheapest_change(
    phases: Phases,
    alternatives: Sequence[list[Remedy]],
    rollout: Rollout,
    machine: Machine,
    ranks: int,
    room_gb: float,
    most_tokens: int,
    most_cache_gib: float,
    least_cache_gib: float,
) -> str:
    """The cheapest remedies with which each phase fits into `room_gb`: "with FLAGS on N GPUs"; ""
    if there are none.

    Besides the alternatives, --micro-batch-tokens may be lowered from `most_tokens`, and
    --engine-memory from `most_cache_gib` to `least_cache_gib`. They are named unless the run
    chooses them by itself, which is when they are None.
    """
    chooses_tokens = machine.micro_batch_tokens is None
    chooses_cache = rollout.engine_memory is None
    machine = replace(machine, micro_batch_tokens=machine.micro_batch_tokens or most_tokens)
    best_cost = inf
    best_words = ""
    for combination in sorted(product(*alternatives), key=total_cost):
        cost = total_cost(combination)
        if cost >= best_cost:
            break
        new_rollout, new_machine, new_ranks = apply_remedies(combination, rollout, machine, ranks)
        for cache in caches(
            phases, new_rollout, new_machine, new_ranks, room_gb, most_cache_gib, least_cache_gib
        ):
            with_cache = replace(new_rollout, engine_memory=cache)
            gb = phases(with_cache, new_machine, new_ranks)
            if gb["rollout"] > room_gb or gb["scoring"] > room_gb:
                continue
            tokens = machine.micro_batch_tokens
            if gb["update"] > room_gb:
                tokens = largest_micro_batch(phases, with_cache, new_machine, new_ranks, room_gb)
            if tokens == 0:
                continue
            cost_of_tokens = micro_batch_cost(tokens) - micro_batch_cost(machine.micro_batch_tokens)
            # a smaller cache holds fewer sequences
            cost_of_cache = 0.1 * (most_cache_gib / cache - 1)
            whole_cost = cost + cost_of_tokens + cost_of_cache
            if whole_cost < best_cost:
                best_cost = whole_cost
                flags = [remedy.words for remedy in combination if remedy.words]
                if cache < most_cache_gib and not chooses_cache:
                    flags.append(f"--engine-memory {cache:g}")
                if tokens < machine.micro_batch_tokens and not chooses_tokens:
                    flags.append(f"--micro-batch-tokens {tokens}")
                best_words = f"with {' '.join(flags)}" if flags else ""
                if new_ranks > ranks:
                    best_words = f"{best_words} on {new_ranks} GPUs".lstrip()
    return best_words


def caches(
    phases: Phases,
    rollout: Rollout,
    machine: Machine,
    ranks: int,
    room_gb: float,
    cache: float,
    least: float,
) -> list[float]:
    """Sizes of the KV cache (GiB) to try: `cache`, and, where smaller, the sizes with which the
    rollout fits and with which all phases fit, and `least`."""
    gb = phases(replace(rollout, engine_memory=cache), machine, ranks)
    smaller_sizes = []
    for needed in (gb["rollout"], max(gb[phase] for phase in PHASES)):
        excess_gib = (needed - room_gb) * 1e9 / 2**30
        smaller_sizes.append((cache - excess_gib) // 0.25 * 0.25)
    smaller_sizes.append(least)
    return [cache] + [size for size in smaller_sizes if least <= size < cache]

"""The cheapest change of flags with which a run fits into its memory. Without torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import Any

from common.flags import Machine, Rollout

ROOM = 0.9  # share of what is free that a run fills by itself
STEP = 128  # tokens: micro-batches are padded to multiples of it
PHASES = ("rollout", "scoring", "update")

# (rollout, machine, ranks) -> gigabytes of each phase
Phases = Callable[[Rollout, Machine, int], dict[str, float]]


@dataclass(frozen=True)
class Remedy:
    """A change: flags in words, or GPUs. Its cost is about the share of a step's time that it
    takes."""

    words: str = ""
    cost: float = 0.0
    rollout: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    gpus: int = 1  # times as many


def longest(rollout: Rollout) -> int:
    """Tokens of an episode; one that is longer than a micro-batch gets a micro-batch of its own."""
    return rollout.max_prompt_tokens + rollout.max_response_tokens


def largest_micro_batch(
    phases: Phases, rollout: Rollout, machine: Machine, ranks: int, room: float
) -> int:
    """The most tokens, a multiple of 128, whose update takes at most `room` gigabytes; 0 if 128 do
    not."""
    low, high = 0, 2**13  # in steps; a larger update has more tokens
    while low < high:
        middle = (low + high + 1) // 2
        larger = replace(machine, micro_batch_tokens=STEP * middle)
        if phases(rollout, larger, ranks)["update"] <= room:
            low = middle
        else:
            high = middle - 1
    return STEP * low


def fitting_micro_batch(
    phases: Phases, rollout: Rollout, machine: Machine, ranks: int, room: float, most: int
) -> int:
    """The largest power of two, at most `most`, of tokens whose update takes at most `room`
    gigabytes.

    An episode is never divided, so it is not less than the longest one, whether that fits or not.
    """
    fitting = min(most, largest_micro_batch(phases, rollout, machine, ranks, room))
    tokens = 1
    while 2 * tokens <= fitting:
        tokens *= 2
    return max(tokens, longest(rollout))


def fitting_cache(
    phases: Phases, rollout: Rollout, machine: Machine, ranks: int, room: float, least: float
) -> float:
    """The largest KV cache, in quarters of a GiB, with which a rollout takes at most `room`
    gigabytes; or `least`."""
    low, high = 0, int(4 * room * 1e9 / 2**30)
    while low < high:
        middle = (low + high + 1) // 2
        larger = replace(rollout, engine_memory=middle / 4)
        if phases(larger, machine, ranks)["rollout"] <= room:
            low = middle
        else:
            high = middle - 1
    return max(least, low / 4)


def remedies(
    rollout: Rollout,
    machine: Machine,
    ranks: int,
    on_gpu: bool,
    has_reference: bool,
    engine_shares: Sequence[int],
) -> Iterator[list[Remedy]]:
    """For each flag that may help the alternatives, the first of which is to leave it as it is.

    engine_shares: what --engine-parallel may be.
    """
    as_it_is = Remedy()
    if not machine.gradient_checkpointing:
        yield [
            as_it_is,
            Remedy("--gradient-checkpointing", 0.3, machine={"gradient_checkpointing": True}),
        ]
    if not on_gpu:
        return
    if machine.attention != "sdpa" and not machine.compile:
        yield [as_it_is, Remedy("--compile", 0.01, machine={"compile": True})]
    if rollout.sleep_level == 0:
        yield [as_it_is, Remedy("--sleep-level 1", 0.1, rollout={"sleep_level": 1})]
    offloads = [as_it_is]
    for names, cost in (("reference", 0.1), ("optimizer", 0.4), ("optimizer,reference", 0.5)):
        helps = has_reference or "reference" not in names
        if helps and set(machine.offload.split(",")) - {""} < set(names.split(",")):
            offloads.append(Remedy(f"--offload {names}", cost, machine={"offload": names}))
    yield offloads
    if machine.strategy == "ddp" and ranks > 1:
        yield [as_it_is, Remedy("--strategy fsdp", 0.1, machine={"strategy": "fsdp"})]
    if machine.shard_size and machine.shard_size < ranks:
        yield [as_it_is, Remedy(f"--shard-size {ranks}", 0.1, machine={"shard_size": ranks})]
    if engine_shares:
        shared = [as_it_is]
        for share in engine_shares:
            shared.append(
                Remedy(
                    f"--engine-parallel {share}", 0.1 * share, rollout={"engine_parallel": share}
                )
            )
        yield shared
    if machine.strategy == "fsdp" and not machine.shard_size:
        more = [as_it_is]
        for times in (2, 4, 8, 16):
            more.append(Remedy(cost=2.0 * times, gpus=times))
        yield more


def cheapest_change(
    phases: Phases,
    alternatives: Sequence[list[Remedy]],
    rollout: Rollout,
    machine: Machine,
    ranks: int,
    room: float,
    most_tokens: int,
    most_cache_gib: float,
    least_cache_gib: float,
) -> str:
    """The cheapest remedies with which each phase fits into `room` gigabytes: "with FLAGS on N
    GPUs"; "" if none does.

    Beside the alternatives --micro-batch-tokens may be lowered from `most_tokens`, and
    --engine-memory from `most_cache_gib` to `least_cache_gib`. What a run chooses by itself, None
    so far, is not named.
    """
    chooses_tokens = machine.micro_batch_tokens is None
    chooses_cache = rollout.engine_memory is None
    machine = replace(machine, micro_batch_tokens=machine.micro_batch_tokens or most_tokens)
    best_cost, best_words = inf, ""
    combinations = list(product(*alternatives))
    combinations.sort(key=lambda chosen: sum(remedy.cost for remedy in chosen))
    for chosen in combinations:
        cost = sum(remedy.cost for remedy in chosen)
        if cost >= best_cost:
            break
        changed_rollout, changed_machine, all_ranks = rollout, machine, ranks
        for remedy in chosen:
            changed_rollout = replace(changed_rollout, **remedy.rollout)
            changed_machine = replace(changed_machine, **remedy.machine)
            all_ranks *= remedy.gpus
        words = [remedy.words for remedy in chosen if remedy.words]
        for cache in caches(
            phases,
            changed_rollout,
            changed_machine,
            all_ranks,
            room,
            most_cache_gib,
            least_cache_gib,
        ):
            with_cache = replace(changed_rollout, engine_memory=cache)
            gb = phases(with_cache, changed_machine, all_ranks)
            if gb["rollout"] > room or gb["scoring"] > room:
                continue
            tokens = machine.micro_batch_tokens
            if gb["update"] > room:
                tokens = largest_micro_batch(phases, with_cache, changed_machine, all_ranks, room)
            if not tokens:
                continue
            # weights are gathered and gradients reduced for each micro-batch; a smaller cache holds
            # fewer sequences
            fewer_tokens = 1500 / tokens - 1500 / machine.micro_batch_tokens
            whole_cost = cost + fewer_tokens + 0.1 * (most_cache_gib / cache - 1)
            if whole_cost < best_cost:
                best_cost = whole_cost
                flags = list(words)
                if cache < most_cache_gib and not chooses_cache:
                    flags.append(f"--engine-memory {cache:g}")
                if tokens < machine.micro_batch_tokens and not chooses_tokens:
                    flags.append(f"--micro-batch-tokens {tokens}")
                best_words = f"with {' '.join(flags)}" if flags else ""
                if all_ranks > ranks:
                    best_words = f"{best_words} on {all_ranks} GPUs".lstrip()
    return best_words


def caches(
    phases: Phases,
    rollout: Rollout,
    machine: Machine,
    ranks: int,
    room: float,
    cache: float,
    least: float,
) -> list[float]:
    """Sizes for the KV cache (GiB) to try: as it is, what the rollout leaves, what all phases
    leave, and the least."""
    gb = phases(replace(rollout, engine_memory=cache), machine, ranks)
    sizes = [cache]
    for needed in (gb["rollout"], max(gb[phase] for phase in PHASES)):
        too_much = (needed - room) * 1e9 / 2**30
        sizes.append((cache - too_much) // 0.25 * 0.25)
    sizes.append(least)
    return [cache, *(size for size in sizes if least <= size < cache)]

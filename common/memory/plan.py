"""Memory of a rank: what each phase of a step will need, before any weights are read; and what was
used.

`memory_phases` is a sum of named terms, in gigabytes: what each counts, and where its constants
come from, stands in docs/scaling.md ("What is counted"). tests/test_memory.py counts activations,
and has the peaks seen on an H100.
"""

import resource
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import torch

from common.attention import choose_attention
from common.distributed import World, all_reduce
from common.files import DAMAGE, refuse
from common.flags import MOST_TOKENS, Machine, Rollout
from common.limits import free_memory
from common.logprobs import CHUNK_ELEMENTS
from common.memory.remedies import (
    PHASES,
    ROOM,
    cheapest_change,
    fitting_cache,
    fitting_micro_batch,
    longest,
    remedies,
)
from common.memory.shape import ModelShape, TowerShape, count_parameters, model_shape
from common.processes import ranks_here
from common.torch_repair import transformers

GIB = 2**30 / 1e9  # in GB

# GB on a GPU beside the tensors (docs/results.md, "On GPUs")
CUDA_CONTEXT = 1.0
NCCL = 0.5  # its buffers, on several ranks
VLLM_GRAPHS = 2.5  # CUDA graphs and work space: what 1.5B took beside its weights and its cache
VLLM_ASLEEP = 0.7  # what of it stays while the engine sleeps

# on a CPU: what malloc keeps in pieces, as a share of what is alive in an update (docs/results.md)
MALLOC_PIECES = 0.2

PATCHES = 4  # of a vision tower, for each token of a picture


def cache_gib(rollout: Rollout, on_gpu: bool) -> float:
    """--engine-memory, or what it is where the plan does not choose; on a CPU it is filled with
    zeros at the start."""
    return rollout.engine_memory or (8.0 if on_gpu else 0.5)


def layer_bytes(shape: ModelShape, rollout: Rollout, machine: Machine, dtype: torch.dtype) -> float:
    """What the backward of one layer needs of its forward, for one token.

    In bf16 and with as many heads of keys as of queries 24 hidden + 8 mlp, compiled 16 hidden + 6
    mlp.
    """
    item = dtype.itemsize
    keys, outputs = shape.keys, shape.queries
    # of each response the prompt's keys, too, repeated for each head; outputs joined
    if machine.attention == "sdpa":
        keys = shape.queries * longest(rollout) / rollout.max_response_tokens
        outputs = 2 * shape.queries
    elif machine.attention == "flex" and shape.heads & (shape.heads - 1):
        keys = shape.queries  # transformers repeats them if heads are no power of two
    attention = item * (shape.queries + 2 * keys + outputs) + 4 * shape.heads
    experts = item * 2 * shape.experts * shape.hidden  # what goes into each of them, and comes out
    if machine.compile:  # norms and silu(gate) x up are computed again
        return attention + experts + item * (2 * shape.norms + shape.head_norms + 3 * shape.mlp)
    norms = (4 + 2 * item) * shape.norms + (4 + item) * shape.head_norms  # float32 inside
    return attention + experts + norms + item * 4 * shape.mlp


def tower_layer_bytes(tower: TowerShape, dtype: torch.dtype) -> float:
    """The same for a token of a picture in one layer of a vision tower, whose rotary embedding is
    float32."""
    item = dtype.itemsize
    return PATCHES * (
        2 * (4 + 2 * item) * tower.hidden + 7.5 * item * tower.hidden + 4 * item * tower.mlp
    )


def activation_bytes(
    shape: ModelShape, rollout: Rollout, machine: Machine, dtype: torch.dtype
) -> float:
    """What is kept of a token until the backward comes. With a vision tower all tokens are taken
    for pictures'."""
    item = dtype.itemsize
    last_norm = (4 + item) * shape.hidden
    tower = shape.tower
    if machine.gradient_checkpointing:
        kept = item * shape.layers * shape.hidden
        if tower:
            kept += PATCHES * item * tower.layers * tower.hidden
    else:
        kept = shape.layers * layer_bytes(shape, rollout, machine, dtype)
        if tower:
            kept += tower.layers * tower_layer_bytes(tower, dtype)
    return last_norm + kept


def recomputed_bytes(
    shape: ModelShape, rollout: Rollout, machine: Machine, dtype: torch.dtype
) -> float:
    """With --gradient-checkpointing one layer at a time has all its activations, too."""
    if not machine.gradient_checkpointing:
        return 0
    layer = layer_bytes(shape, rollout, machine, dtype)
    if shape.tower:
        layer = max(layer, tower_layer_bytes(shape.tower, dtype))
    return layer


def engine_workspace(
    shape: ModelShape, rollout: Rollout, dtype: torch.dtype, on_gpu: bool
) -> float:
    """Bytes of an engine beside weights and cache: the forward of a batch of prompts, or float32
    logits; graphs."""
    sequences, tokens = 256, max(longest(rollout), 8192)  # vLLM's on a CPU
    if not rollout.uses_vllm:
        cached = 2 * shape.layers * shape.keys * dtype.itemsize * longest(rollout)  # of a sequence
        fitting = int(cache_gib(rollout, on_gpu) * 2**30 / cached)
        sequences = max(1, min(256, fitting))
        tokens = sequences * rollout.max_prompt_tokens
    elif on_gpu:  # vLLM's on an H100; smaller cards get less
        sequences, tokens = 1024, 16_384
    forward = dtype.itemsize * tokens * (3 * shape.mlp / rollout.engine_parallel + 6 * shape.hidden)
    logits = 3 * 4 * sequences * shape.vocabulary
    graphs = VLLM_GRAPHS * 1e9 if on_gpu and rollout.uses_vllm else 0
    return max(forward, logits) + graphs


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


def phases_of(
    rollout: Rollout,
    machine: Machine,
    ranks: int,
    dtype: torch.dtype,
    trained: list[ModelShape],
    frozen: list[ModelShape],
    on_gpu: bool,
    reward_parameters: int = 0,
) -> dict[str, float]:
    """Estimated gigabytes of a rank: named terms, and their sums in the phases "rollout", "scoring"
    and "update".

    The largest phase decides. The update is the largest of its moments: "backward" where the
    activations are, "reduction" of what the root has gathered, "step" of the optimizer. On top of
    each phase come the "context" of CUDA and what the allocator keeps.
    """
    lora = machine.lora_rank > 0
    item = dtype.itemsize
    policy = trained[0]
    models = [policy] if rollout.eval_only else [policy, *(shape.backbone for shape in trained[1:])]
    if machine.attention == "auto":
        machine = replace(
            machine, attention="flex" if on_gpu and dtype != torch.float16 else "sdpa"
        )
    shards = 1 if machine.strategy == "ddp" else machine.shard_size or ranks

    # what lives through all phases
    weights = sum((item if lora else 4) * shape.parameters for shape in models) / shards
    learned = [(shape.parameters - shape.frozen) / shards for shape in models]
    if lora:  # adapters are whole on each rank
        learned = [shape.adapters for shape in models]
        weights += sum(4 * count for count in learned)
    reference = 0.0
    # with LoRA the policy's base is the reference
    if frozen and not ("reference" in machine.offload or lora):
        reference = sum(item * shape.parameters for shape in frozen) / shards
    weights += reference
    nccl = 1e9 * NCCL if on_gpu and ranks > 1 else 0.0
    adam = 0.0 if rollout.eval_only else sum(8 * count for count in learned)
    adam_at_rest = 0.0 if "optimizer" in machine.offload else adam

    # the rollout
    engine = cache = workspace = 0.0
    if not rollout.replay:
        engine = item * policy.parameters / rollout.engine_parallel
        cache = cache_gib(rollout, on_gpu) * 2**30
        workspace = engine_workspace(policy, rollout, dtype, on_gpu)
    sampling = weights + nccl + adam_at_rest + engine + cache + workspace
    vllm_on_gpu = on_gpu and rollout.uses_vllm and not rollout.replay
    if on_gpu and rollout.sleep_level > 0:
        beside = 1e9 * VLLM_ASLEEP if vllm_on_gpu else 0.0
    elif rollout.uses_vllm:
        beside = engine + cache + (1e9 * VLLM_GRAPHS if vllm_on_gpu else 0.0)
    else:
        beside = engine  # whose cache ends with the rollout
    scoring = (
        weights + nccl + adam_at_rest + item * reward_parameters + beside
        if reward_parameters
        else 0.0
    )

    # the update, of one model at a time
    terms = dict.fromkeys(
        ["gradients", "activations", "gathered", "backward", "reduction", "step"], 0.0
    )
    if not rollout.eval_only:
        for shape, count in zip(models, learned):
            moments = update_moments(shape, rollout, machine, ranks, shards, dtype, on_gpu)
            at_rest = weights + nccl + adam_at_rest + 4 * count + beside
            moments["gradients"] = 4 * count
            moments["backward"] += at_rest
            moments["reduction"] += at_rest
            moments["step"] = at_rest + (8 * count if "optimizer" in machine.offload else 0)
            if max(moments.values()) > max(terms.values()):
                terms = moments
    terms |= {"weights": weights, "reference": reference, "Adam": adam}
    terms |= {"engine": engine, "KV cache": cache, "workspace": workspace, "NCCL": nccl}
    terms |= {"rollout": 0.0 if rollout.replay else sampling, "scoring": scoring}
    terms["update"] = max(terms["backward"], terms["reduction"], terms["step"])
    if not on_gpu:
        terms["update"] += MALLOC_PIECES * (terms["update"] - beside)
    terms["context"] = 1e9 * CUDA_CONTEXT if on_gpu else 0.0
    return {name: number / 1e9 for name, number in terms.items()}


def update_moments(
    shape: ModelShape,
    rollout: Rollout,
    machine: Machine,
    ranks: int,
    shards: int,
    dtype: torch.dtype,
    on_gpu: bool,
) -> dict[str, float]:
    """Bytes of a model's forward and backward beside its weights, moments and gradients in shards.

    FSDP2 has its root gathered, with gradients, while activations are there. A layer is gathered
    with the one that comes next; its gradients are copied to float32, which is reduced, on a single
    rank into another copy.
    """
    lora = machine.lora_rank > 0
    item = dtype.itemsize
    tokens = max(machine.micro_batch_tokens or MOST_TOKENS, longest(rollout))
    activations = tokens * activation_bytes(shape, rollout, machine, dtype)
    recomputed = tokens * recomputed_bytes(shape, rollout, machine, dtype)
    # one rank on a CPU keeps all weights gathered between micro-batches
    gathered = item * (shape.parameters if ranks == 1 and not on_gpu else shape.root)
    if lora:
        # adapted weights are float32 before they are rounded
        root_gradients, block = 0, (2 * item + 4) * shape.block
        reduction = gathered
    else:
        root_gradients = item * shape.root
        if shards == 1:
            block = (3 * item + 8) * shape.block
            reduction = gathered + 8 * shape.root
        else:  # what the last layer has reduced waits until the root is done
            block = (3 * item + 4) * shape.block
            reduction = gathered + (item + 4) * shape.root + 4 * shape.block
    # float32 logits of a chunk with what becomes of them, and gradients of the last hidden states
    chunk = CHUNK_ELEMENTS["cuda" if on_gpu else "cpu"]
    head = 3 * 4 * chunk + (8 + item) * tokens * shape.hidden
    backward = gathered + root_gradients + activations + max(head, block + recomputed)
    moments = {"activations": activations + recomputed, "gathered": gathered + root_gradients}
    return moments | {"backward": backward, "reduction": reduction}


@dataclass(frozen=True)
class MemoryPlan:
    """What a run needs, and what it has chosen by it."""

    text: str  # a line, and a warning of what may not fit
    micro_batch_tokens: int  # as given, or as many as fit
    engine_memory: float  # GiB of the KV cache
    refusal: str = ""  # why it is no use to begin


def memory_plan(
    rollout: Rollout,
    machine: Machine,
    world: World,
    dtype: torch.dtype,
    trained: list[str],
    frozen: list[str],
    reward_model: str | None = None,
    most_tokens: int = MOST_TOKENS,
) -> MemoryPlan:
    """`memory_phases` in words; for what may not fit, the cheapest change that fits. All ranks call
    it together.

    What no flag says is chosen by what is free on the tightest rank: the KV cache of an engine that
    sleeps on a GPU takes what the rollout leaves of a share of it; a micro-batch, of at most
    `most_tokens`, what the update leaves. Where that does not even hold the longest episode, a run
    on a CPU is refused, since the kernel would end it without a word. reward_model: the folder of
    one. SystemExit if no engine would fit.
    """
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        there = torch.cuda.mem_get_info(world.device)[0] / 1e9  # context and NCCL are there by now
    else:
        there = free_memory() / 1e9 / ranks_here()
    (there,) = all_reduce([there], "min")  # so that all ranks choose alike
    machine = replace(
        machine, attention=choose_attention(machine.attention, world.device, machine.compile, dtype)
    )
    shapes = {path: model_shape(path, machine) for path in {*trained, *frozen}}
    models = [shapes[path] for path in trained]
    references = [shapes[path] for path in frozen]
    reward_parameters = classifier_parameters(reward_model) if reward_model else 0

    def phases(rollout: Rollout, machine: Machine, ranks: int) -> dict[str, float]:
        return phases_of(
            rollout, machine, ranks, dtype, models, references, on_gpu, reward_parameters
        )

    chosen = []
    least_cache = least_cache_gib(models[0], rollout, dtype)
    most_cache = cache = cache_gib(rollout, on_gpu)
    fills_card = (
        on_gpu and rollout.engine_memory is None and rollout.sleep_level > 0 and not rollout.replay
    )
    if fills_card:
        most_cache = max(least_cache, cache)
        cache = fitting_cache(phases, rollout, machine, world.size, ROOM * there, least_cache)
        chosen.append(f"--engine-memory {cache:g}")
    with_cache = replace(rollout, engine_memory=cache)
    tokens, room = machine.micro_batch_tokens or most_tokens, there
    chooses_tokens = machine.micro_batch_tokens is None and not rollout.eval_only
    if chooses_tokens:
        room = ROOM * there
        tokens = fitting_micro_batch(phases, with_cache, machine, world.size, room, most_tokens)
        chosen.append(f"--micro-batch-tokens {tokens}")
    gb = phases(with_cache, replace(machine, micro_batch_tokens=tokens), world.size)
    text = describe(gb, there, rollout)
    if chosen:
        text += f"; {' and '.join(chosen)} chosen to fit into {ROOM:.0%} of what is free"
    left = max(0.0, there - gb["engine"])
    fits = f"of {there / GIB:.1f} GiB that are free the engine's weights leave {left / GIB:.1f}"
    refuse(gb["KV cache"] > left, f"--engine-memory {gb['KV cache'] / GIB:g}: {fits}")
    too_large = " and the ".join(phase for phase in PHASES if gb[phase] > room)
    if not too_large:
        return MemoryPlan(text, tokens, cache)
    shares = engine_shares(models[0], rollout)
    change = cheapest_change(
        phases,
        list(remedies(rollout, machine, world.size, on_gpu, gb["reference"] > 0, shares)),
        rollout if fills_card else with_cache,
        machine,
        world.size,
        room=room,
        most_tokens=tokens,
        most_cache_gib=most_cache,
        least_cache_gib=least_cache,
    )
    advice = (
        f"it would {change}"
        if change
        else "nor would it with other flags: a smaller model, or --lora-rank"
    )
    refusal = ""
    if chooses_tokens and not on_gpu:
        refusal = f"the {too_large} would not fit into {ROOM:.0%} of what is free"
        if gb["update"] > room:
            refusal += f", even with one episode of {longest(rollout)} tokens at a time"
        refusal += f"; {advice}; --micro-batch-tokens {tokens} tries it all the same"
    else:
        text += f"\nwarning: the {too_large} may not fit; {advice}"
    return MemoryPlan(text, tokens, cache, refusal)


def engine_shares(shape: ModelShape, rollout: Rollout) -> list[int]:
    """What --engine-parallel may be beside what it is."""
    if not rollout.uses_vllm or rollout.replay:
        return []
    key_heads = shape.heads * shape.keys // shape.queries
    shares = []
    for share in (2, 4, 8):
        divides = ranks_here() % share == shape.heads % share == shape.mlp % share == 0
        if (
            share > rollout.engine_parallel
            and divides
            and (key_heads % share == 0 or share % key_heads == 0)
        ):
            shares.append(share)
    return shares


def least_cache_gib(shape: ModelShape, rollout: Rollout, dtype: torch.dtype) -> float:
    """What holds a single episode."""
    token = 2 * shape.layers * shape.keys * dtype.itemsize / rollout.engine_parallel
    return max(0.25, ceil(4 * token * longest(rollout) / 2**30) / 4)


def describe(gb: dict[str, float], there: float, rollout: Rollout) -> str:
    """The plan in a sentence; what a run does not have, or hardly, is left out."""
    text = f"memory of a rank (GB, estimated; {there:.1f} are free): weights {gb['weights']:.1f}"
    text += f", of them reference {gb['reference']:.1f}, Adam {gb['Adam']:.1f}"
    if not rollout.replay:
        text += f"; rollout {gb['rollout']:.1f}, of it engine {gb['engine']:.1f}"
        text += (
            f", KV cache {gb['KV cache']:.1f} (--engine-memory), its work space "
            f"{gb['workspace']:.1f}"
        )
    if gb["scoring"]:
        text += f"; reward model {gb['scoring']:.1f}"
    if not rollout.eval_only:
        text += f"; update {gb['update']:.1f}, of it gradients {gb['gradients']:.1f}"
        text += f", activations {gb['activations']:.1f}, gathered {gb['gathered']:.1f}"
    return text


def no_rollout(longest_episode: int) -> Rollout:
    """Of a script that samples nothing: for the plan alone. The longest episode in tokens."""
    return Rollout(replay=Path("none"), max_prompt_tokens=0, max_response_tokens=longest_episode)


def classifier_parameters(path: str) -> int:
    """Of a reward model's folder; 0 for what is none, of which `RewardModel` will tell more."""
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            return count_parameters(
                transformers.AutoModelForSequenceClassification.from_config(config)
            )
    except DAMAGE:
        return 0


def peak_memory_gb(device: torch.device) -> float:
    """Highest memory use of this process so far (GB): on the GPU, or resident on a CPU machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9

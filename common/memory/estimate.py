"""An estimate of the memory of a rank in each phase of a step.

`phases_of` adds up named terms, in gigabytes. docs/scaling.md ("What is counted") says what
each of them counts, and where its constants come from. tests/runs/test_memory.py counts
activations, and has peaks that were measured on an H100.
"""

from dataclasses import dataclass, replace

import torch

from common.flags import MAX_MICRO_BATCH_TOKENS, Machine, Rollout
from common.logprobs import CHUNK_ELEMENTS
from common.memory.remedies import longest
from common.memory.shape import ModelShape, TowerShape

# GB on a GPU beside the tensors (docs/results.md, "On GPUs")
CUDA_CONTEXT = 1.0
NCCL = 0.5  # its buffers, on several ranks
VLLM_GRAPHS = 2.5  # its CUDA graphs and work space, measured with a model of 1.5B
VLLM_ASLEEP = 0.7  # what remains of them while the engine sleeps

# on a CPU: fragments that malloc keeps, as a share of the memory of an update (results/benchmarks)
MALLOC_PIECES = 0.2

PATCHES = 4  # tokens of a vision tower for each token of a picture


def cache_gib(rollout: Rollout, on_gpu: bool) -> float:
    """--engine-memory, or its default where the plan does not choose it."""
    return rollout.engine_memory or (8.0 if on_gpu else 0.5)


def layer_bytes(shape: ModelShape, rollout: Rollout, machine: Machine, dtype: torch.dtype) -> float:
    """Bytes that the forward of one layer keeps for its backward, for one token.

    In bf16, with as many heads of keys as of queries, 24 hidden + 8 mlp; compiled 16 hidden +
    6 mlp.
    """
    item = dtype.itemsize
    keys = shape.keys
    outputs = shape.queries
    if machine.attention == "sdpa":
        # each response has a copy of its prompt's keys, and keys are repeated for each head;
        # concatenating the outputs copies them
        keys = shape.queries * longest(rollout) / rollout.max_response_tokens
        outputs = 2 * shape.queries
    # queries, keys and values, outputs; a float32 log-sum-exp for each head
    attention = item * (shape.queries + 2 * keys + outputs) + 4 * shape.heads
    experts = item * 2 * shape.experts * shape.hidden  # inputs and outputs of each of them
    if machine.compile:  # norms and silu(gate) x up are computed again
        return attention + experts + item * (2 * shape.norms + shape.head_norms + 3 * shape.mlp)
    norms = (4 + 2 * item) * shape.norms + (4 + item) * shape.head_norms  # float32 inside
    return attention + experts + norms + item * 4 * shape.mlp


def tower_layer_bytes(tower: TowerShape, dtype: torch.dtype) -> float:
    """The same for a token of a picture in one layer of a vision tower, whose rotary embedding is
    float32."""
    item = dtype.itemsize
    norms = 2 * (4 + 2 * item) * tower.hidden
    attention = 7.5 * item * tower.hidden
    mlp = 4 * item * tower.mlp
    return PATCHES * (norms + attention + mlp)


def activation_bytes(
    shape: ModelShape, rollout: Rollout, machine: Machine, dtype: torch.dtype
) -> float:
    """Bytes of a token that are kept until the backward. With a vision tower all tokens count as
    those of pictures."""
    item = dtype.itemsize
    last_norm = (4 + item) * shape.hidden
    tower = shape.tower
    layer_input = item * shape.hidden
    if machine.gradient_checkpointing:
        kept = shape.layers * layer_input
        if tower:
            kept += PATCHES * item * tower.layers * tower.hidden
    else:
        layer = layer_bytes(shape, rollout, machine, dtype)
        if machine.compile:
            layer = layer_input + machine.activation_memory * (layer - layer_input)
        kept = shape.layers * layer
        if tower:
            kept += tower.layers * tower_layer_bytes(tower, dtype)
    return last_norm + kept


def recomputed_bytes(
    shape: ModelShape, rollout: Rollout, machine: Machine, dtype: torch.dtype
) -> float:
    """Bytes of a token in the layer whose activations are computed again, with
    --gradient-checkpointing or --activation-memory."""
    if not machine.gradient_checkpointing and machine.activation_memory == 1:
        return 0
    layer = layer_bytes(shape, rollout, machine, dtype)
    if shape.tower:
        layer = max(layer, tower_layer_bytes(shape.tower, dtype))
    return layer


def engine_workspace(
    shape: ModelShape, rollout: Rollout, dtype: torch.dtype, on_gpu: bool
) -> float:
    """Bytes of an engine beside weights and cache: the forward of a batch of prompts or float32
    logits, whichever is larger, and CUDA graphs."""
    if not rollout.uses_vllm:  # a batch of common/engine/hf.py
        cache_of_sequence = 2 * shape.layers * shape.keys * dtype.itemsize * longest(rollout)
        fitting = int(cache_gib(rollout, on_gpu) * 2**30 / cache_of_sequence)
        sequences = max(1, min(256, fitting))
        tokens = sequences * rollout.max_prompt_tokens
    elif on_gpu:  # vLLM's limits of a batch on an H100; on smaller cards they are lower
        sequences = 1024
        tokens = 16_384
    else:  # those that common/engine/vllm.py sets on a CPU
        sequences = 256
        tokens = max(longest(rollout), 8192)
    forward = dtype.itemsize * tokens * (3 * shape.mlp / rollout.engine_parallel + 6 * shape.hidden)
    logits = 3 * 4 * sequences * shape.vocabulary
    graphs = VLLM_GRAPHS * 1e9 if on_gpu and rollout.uses_vllm else 0
    return max(forward, logits) + graphs


@dataclass(frozen=True)
class EngineBytes:
    """Bytes of a rollout engine; all are 0 with --replay."""

    weights: float
    cache: float
    workspace: float
    after_rollout: float  # what stays in memory in the other phases


def engine_bytes(
    policy: ModelShape, rollout: Rollout, dtype: torch.dtype, on_gpu: bool
) -> EngineBytes:
    if rollout.replay:
        return EngineBytes(weights=0.0, cache=0.0, workspace=0.0, after_rollout=0.0)
    weights = dtype.itemsize * policy.parameters / rollout.engine_parallel
    # in full: on a CPU vLLM fills it with zeros at the start
    cache = cache_gib(rollout, on_gpu) * 2**30
    vllm_on_gpu = on_gpu and rollout.uses_vllm
    if on_gpu and rollout.sleep_level > 0:
        after_rollout = 1e9 * VLLM_ASLEEP if vllm_on_gpu else 0.0
    elif rollout.uses_vllm:
        after_rollout = weights + cache + (1e9 * VLLM_GRAPHS if vllm_on_gpu else 0.0)
    else:
        after_rollout = weights  # the cache ends with the rollout
    workspace = engine_workspace(policy, rollout, dtype, on_gpu)
    return EngineBytes(weights, cache, workspace, after_rollout)


@dataclass(frozen=True)
class TrainerBytes:
    """Bytes of a rank's models and optimizers outside of an update."""

    weights: float  # of all models, the reference among them
    reference: float
    base: float  # of the weights, what is on the host while the engine is awake
    adam: float
    learned: list[float]  # number of parameters in this rank's optimizer, for each trained model


def trainer_bytes(
    models: list[ModelShape],
    frozen: list[ModelShape],
    rollout: Rollout,
    machine: Machine,
    shards: int,
    dtype: torch.dtype,
) -> TrainerBytes:
    """models, frozen: the trained models, and the references. shards: ranks that share a copy."""
    item = dtype.itemsize
    lora = machine.lora_rank > 0
    if lora:
        # adapters are float32, and whole on each rank
        learned = [shape.adapters for shape in models]
        weights = sum(item * shape.parameters for shape in models) / shards
        weights += sum(4 * count for count in learned)
    else:
        learned = [(shape.parameters - shape.frozen) / shards for shape in models]
        weights = sum(4 * shape.parameters for shape in models) / shards
    base = 0.0
    if lora and "base" in machine.offload:
        base = sum(item * shape.parameters for shape in models) / shards
    reference = 0.0
    # with LoRA the policy's base is the reference
    if frozen and not lora and "reference" not in machine.offload:
        reference = sum(item * shape.parameters for shape in frozen) / shards
    weights += reference
    adam = 0.0 if rollout.eval_only else sum(8 * count for count in learned)
    return TrainerBytes(weights, reference, base, adam, learned)


def phases_of(
    rollout: Rollout,
    machine: Machine,
    ranks: int,
    dtype: torch.dtype,
    trained: list[ModelShape],
    frozen: list[ModelShape],
    on_gpu: bool,
    reward_parameters: int = 0,
    teacher: ModelShape | None = None,
) -> dict[str, float]:
    """Estimated gigabytes of a rank: named terms, and their sums in the phases "rollout", "scoring"
    and "update".

    The largest phase decides. The update counts as its largest moment: the "backward" while
    activations are in memory, the "reduction" of the root's gradients, or the "step" of the
    optimizer. No phase includes the "context" of CUDA and what the allocator keeps.

    trained: the policy, then critics. frozen: references. teacher: of a distillation, unless it is
    the base of LoRA; it computes within the update, and its head is kept beside the policy's.
    """
    if machine.attention == "auto":
        attention = "flex" if on_gpu and dtype != torch.float16 else "sdpa"
        machine = replace(machine, attention=attention)
    policy = trained[0]
    models = [policy]
    if not rollout.eval_only:
        models.extend(shape.backbone for shape in trained[1:])
    if machine.strategy == "ddp":
        shards = 1
    else:
        shards = machine.shard_size or ranks
    trainer = trainer_bytes(models, frozen, rollout, machine, shards, dtype)
    nccl = 1e9 * NCCL if on_gpu and ranks > 1 else 0.0
    adam_at_rest = 0.0 if "optimizer" in machine.offload else trainer.adam
    teacher_weights = dtype.itemsize * teacher.parameters / shards if teacher else 0.0
    teacher_at_rest = 0.0 if "reference" in machine.offload else teacher_weights
    resident = trainer.weights + teacher_at_rest + nccl + adam_at_rest
    beside_engine = resident - trainer.base  # until the engine sleeps
    engine = engine_bytes(policy, rollout, dtype, on_gpu)
    sampling = 0.0
    if not rollout.replay:
        sampling = beside_engine + engine.weights + engine.cache + engine.workspace
    scoring = 0.0
    if reward_parameters:
        scoring = beside_engine + dtype.itemsize * reward_parameters + engine.after_rollout

    # models are updated one at a time: these are the terms of the one with the largest moment
    update_terms = {
        "gradients": 0.0,
        "activations": 0.0,
        "gathered": 0.0,
        "backward": 0.0,
        "reduction": 0.0,
        "step": 0.0,
    }
    if not rollout.eval_only:
        for shape, count in zip(models, trainer.learned):
            moments = update_moments(shape, rollout, machine, ranks, shards, dtype, on_gpu)
            at_rest = resident + 4 * count + engine.after_rollout
            if teacher:
                rows = teacher.vocabulary + micro_batch_size(rollout, machine)
                at_rest += teacher_weights - teacher_at_rest
                at_rest += dtype.itemsize * rows * teacher.hidden  # its head and hidden states
            moments["gradients"] = 4 * count
            moments["backward"] += at_rest
            moments["reduction"] += at_rest
            moments["step"] = at_rest + (8 * count if "optimizer" in machine.offload else 0)
            if max(moments.values()) > max(update_terms.values()):
                update_terms = moments
    update = max(update_terms["backward"], update_terms["reduction"], update_terms["step"])
    if not on_gpu:
        update += MALLOC_PIECES * (update - engine.after_rollout)
    terms = {
        **update_terms,
        "weights": trainer.weights + teacher_at_rest,
        "reference": trainer.reference + teacher_at_rest,
        "Adam": trainer.adam,
        "engine": engine.weights,
        "KV cache": engine.cache,
        "workspace": engine.workspace,
        "NCCL": nccl,
        "rollout": sampling,
        "scoring": scoring,
        "update": update,
        "context": 1e9 * CUDA_CONTEXT if on_gpu else 0.0,
    }
    return {name: number / 1e9 for name, number in terms.items()}


def keeps_gathered(machine: Machine, ranks: int, on_gpu: bool) -> bool:
    """Whether all weights of a trained model stay gathered between micro-batches: on a rank alone,
    unless flags say that a GPU's memory is short."""
    if on_gpu and (machine.gradient_checkpointing or machine.lora_rank or machine.offload):
        return False
    return ranks == 1


def micro_batch_size(rollout: Rollout, machine: Machine) -> int:
    """Tokens of the largest micro-batch."""
    return max(machine.micro_batch_tokens or MAX_MICRO_BATCH_TOKENS, longest(rollout))


def update_moments(
    shape: ModelShape,
    rollout: Rollout,
    machine: Machine,
    ranks: int,
    shards: int,
    dtype: torch.dtype,
    on_gpu: bool,
) -> dict[str, float]:
    """Bytes of a model at the moments of its update, beside the weights, gradients and Adam's state
    that a rank keeps.

    While activations are in memory, FSDP2 keeps its root gathered, with gradients. Each layer is
    gathered along with the next one. Its gradients are copied to float32 and reduced; where no
    ranks share a copy of the model, that makes another copy.
    """
    lora = machine.lora_rank > 0
    item = dtype.itemsize
    tokens = micro_batch_size(rollout, machine)
    activations = tokens * activation_bytes(shape, rollout, machine, dtype)
    recomputed = tokens * recomputed_bytes(shape, rollout, machine, dtype)
    keeps_all = keeps_gathered(machine, ranks, on_gpu)
    gathered = item * (shape.parameters if keeps_all else shape.root)
    if lora:
        root_gradients = 0
        block = (2 * item + 4) * shape.block  # adapted weights are float32 before they are rounded
        reduction = gathered
    elif shards == 1:
        root_gradients = item * shape.root
        block = (3 * item + 8) * shape.block
        reduction = gathered + 8 * shape.root
    else:
        root_gradients = item * shape.root
        block = (3 * item + 4) * shape.block
        # the reduced gradients of the last layer wait until the root is done
        reduction = gathered + (item + 4) * shape.root + 4 * shape.block
    # float32 logits of a chunk with what is computed from them, and gradients of the last hidden
    # states
    chunk = CHUNK_ELEMENTS["cuda" if on_gpu else "cpu"]
    head = 3 * 4 * chunk + (8 + item) * tokens * shape.hidden
    return {
        "activations": activations + recomputed,
        "gathered": gathered + root_gradients,
        "backward": gathered + root_gradients + activations + max(head, block + recomputed),
        "reduction": reduction,
    }

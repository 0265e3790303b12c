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

    In bf16, without sdpa, with as many heads of keys as of queries, 24 hidden + 8 mlp; compiled
    16 hidden + 6 mlp.
    """
    itemsize = dtype.itemsize
    keys = shape.keys
    outputs = shape.queries
    if machine.attention == "sdpa":
        # each response has a copy of its prompt's keys, and keys are repeated for each head;
        # concatenating the outputs copies them
        keys = shape.queries * longest(rollout) / rollout.max_response_tokens
        outputs = 2 * shape.queries
    # queries, keys and values, outputs; a float32 log-sum-exp for each head
    attention = itemsize * (shape.queries + 2 * keys + outputs) + 4 * shape.heads
    experts = itemsize * 2 * shape.experts * shape.hidden  # inputs and outputs of each of them
    if machine.compile:  # norms and silu(gate) x up are computed again
        return attention + experts + itemsize * (2 * shape.norms + shape.head_norms + 3 * shape.mlp)
    norms = (4 + 2 * itemsize) * shape.norms + (4 + itemsize) * shape.head_norms  # float32 inside
    return attention + experts + norms + itemsize * 4 * shape.mlp


def tower_layer_bytes(tower: TowerShape, dtype: torch.dtype) -> float:
    """The same for a token of a picture in one layer of a vision tower."""
    itemsize = dtype.itemsize
    norms = 2 * (4 + 2 * itemsize) * tower.hidden
    # queries, keys and values before the rotary embedding, queries and keys after it, and outputs
    # twice are 7; the rest is a margin
    attention = 7.5 * itemsize * tower.hidden
    mlp = 4 * itemsize * tower.mlp
    return PATCHES * (norms + attention + mlp)


def activation_bytes(
    shape: ModelShape, rollout: Rollout, machine: Machine, dtype: torch.dtype
) -> float:
    """Bytes of a token that are kept until the backward. With a vision tower all tokens count as
    those of pictures."""
    itemsize = dtype.itemsize
    last_norm = (4 + itemsize) * shape.hidden
    tower = shape.tower
    layer_input = itemsize * shape.hidden
    if machine.gradient_checkpointing:
        kept = shape.layers * layer_input
        if tower:
            kept += PATCHES * itemsize * tower.layers * tower.hidden
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


@dataclass(frozen=True)
class Setup:
    """How a rank runs: what its memory depends on beside the shapes of models."""

    rollout: Rollout
    machine: Machine  # its attention is not "auto"
    ranks: int
    dtype: torch.dtype
    on_gpu: bool

    @property
    def shards(self) -> int:
        """Ranks that share a copy of a model."""
        if self.machine.strategy == "ddp":
            return 1
        return self.machine.shard_size or self.ranks

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of the largest micro-batch."""
        tokens = self.machine.micro_batch_tokens or MAX_MICRO_BATCH_TOKENS
        return max(tokens, longest(self.rollout))


@dataclass(frozen=True)
class EngineBytes:
    """Bytes of a rollout engine; all are 0 with --replay."""

    weights: float = 0.0
    cache: float = 0.0
    workspace: float = 0.0
    after_rollout: float = 0.0  # what stays in memory in the other phases


def engine_bytes(policy: ModelShape, setup: Setup) -> EngineBytes:
    rollout = setup.rollout
    if rollout.replay:
        return EngineBytes()
    weights = setup.dtype.itemsize * policy.parameters / rollout.engine_parallel
    # in full: on a CPU vLLM fills it with zeros at the start
    cache = cache_gib(rollout, setup.on_gpu) * 2**30
    vllm_on_gpu = setup.on_gpu and rollout.uses_vllm
    if setup.on_gpu and rollout.sleep_level > 0:
        after_rollout = 1e9 * VLLM_ASLEEP if vllm_on_gpu else 0.0
    elif rollout.uses_vllm:
        after_rollout = weights + cache + (1e9 * VLLM_GRAPHS if vllm_on_gpu else 0.0)
    else:
        after_rollout = weights  # the cache ends with the rollout
    return EngineBytes(weights, cache, engine_workspace(policy, setup), after_rollout)


def engine_workspace(policy: ModelShape, setup: Setup) -> float:
    """Bytes of an engine beside weights and cache: the forward of a batch of prompts or float32
    logits, whichever is larger, and CUDA graphs."""
    rollout = setup.rollout
    itemsize = setup.dtype.itemsize
    if not rollout.uses_vllm:  # a batch of common/engine/hf.py
        cache_of_sequence = 2 * policy.layers * policy.keys * itemsize * longest(rollout)
        fitting = int(cache_gib(rollout, setup.on_gpu) * 2**30 / cache_of_sequence)
        sequences = max(1, min(256, fitting))
        tokens = sequences * rollout.max_prompt_tokens
    elif setup.on_gpu:  # vLLM's limits of a batch on an H100; on smaller cards they are lower
        sequences = 1024
        tokens = 16_384
    else:  # those that common/engine/vllm.py sets on a CPU
        sequences = 256
        tokens = max(longest(rollout), 8192)
    # The widest moment of a layer: gate, up and their product, which GPUs share; the residual, its
    # norm, queries, keys, values and outputs. Logits in float32, and two copies for sampling.
    forward = itemsize * tokens * (3 * policy.mlp / rollout.engine_parallel + 6 * policy.hidden)
    logits = 3 * 4 * sequences * policy.vocabulary
    graphs = VLLM_GRAPHS * 1e9 if setup.on_gpu and rollout.uses_vllm else 0
    return max(forward, logits) + graphs


@dataclass(frozen=True)
class TrainerBytes:
    """Bytes of a rank's models and optimizers outside of an update."""

    weights: float  # of all models, reference and teacher among them
    reference: float  # of the reference or the teacher
    # of LoRA with --offload base: the part of `weights` on the host until the responses are scored
    base_on_host: float
    nccl: float
    adam: float  # on the host with --offload optimizer
    # of each trained model, the parameters in this rank's optimizer: a number, not bytes
    trainable: list[float]
    total: float  # weights, NCCL's buffers, and Adam's state unless it is on the host


def trainer_bytes(
    models: list[ModelShape], frozen: list[ModelShape], teacher: ModelShape | None, setup: Setup
) -> TrainerBytes:
    """models, frozen: the trained models, and the references."""
    itemsize = setup.dtype.itemsize
    shards = setup.shards
    offload = setup.machine.offload
    has_lora = setup.machine.lora_rank > 0
    if has_lora:
        # adapters are float32, and whole on each rank
        trainable = [shape.adapters for shape in models]
        weights = sum(itemsize * shape.parameters for shape in models) / shards
        weights += sum(4 * number for number in trainable)
    else:
        trainable = [(shape.parameters - shape.frozen) / shards for shape in models]
        weights = sum(4 * shape.parameters for shape in models) / shards
    base_on_host = 0.0
    if has_lora and "base" in offload:
        base_on_host = sum(itemsize * shape.parameters for shape in models) / shards
    reference = 0.0
    # with LoRA the policy's base is the reference
    if frozen and not has_lora and "reference" not in offload:
        reference = sum(itemsize * shape.parameters for shape in frozen) / shards
    weights += reference
    if teacher and "reference" not in offload:
        teacher_weights = itemsize * teacher.parameters / shards
        reference += teacher_weights
        weights += teacher_weights
    nccl = 1e9 * NCCL if setup.on_gpu and setup.ranks > 1 else 0.0
    adam = 0.0 if setup.rollout.eval_only else sum(8 * number for number in trainable)
    adam_on_device = 0.0 if "optimizer" in offload else adam
    return TrainerBytes(
        weights=weights,
        reference=reference,
        base_on_host=base_on_host,
        nccl=nccl,
        adam=adam,
        trainable=trainable,
        total=weights + nccl + adam_on_device,
    )


def keeps_gathered(machine: Machine, ranks: int, on_gpu: bool) -> bool:
    """Whether all weights of a trained model stay gathered between micro-batches: on a rank alone,
    unless flags say that a GPU's memory is short."""
    if on_gpu and (machine.gradient_checkpointing or machine.lora_rank or machine.offload):
        return False
    return ranks == 1


@dataclass(frozen=True)
class UpdateBytes:
    """Bytes of a rank while one of its models is updated."""

    gradients: float = 0.0
    activations: float = 0.0
    gathered: float = 0.0  # weights, and the gradients of the root
    # all that is in memory at three moments
    backward: float = 0.0
    reduction: float = 0.0
    step: float = 0.0

    @property
    def peak(self) -> float:
        return max(self.backward, self.reduction, self.step)


def largest_update(
    models: list[ModelShape],
    trainer: TrainerBytes,
    engine: EngineBytes,
    teacher: ModelShape | None,
    setup: Setup,
) -> UpdateBytes:
    """The update with the highest peak: models are updated one at a time."""
    itemsize = setup.dtype.itemsize
    updates: list[UpdateBytes] = []
    for shape, trainable in zip(models, trainer.trainable):
        at_rest = trainer.total + 4 * trainable + engine.after_rollout
        if teacher:
            if "reference" in setup.machine.offload:  # its weights are there for the update alone
                at_rest += itemsize * teacher.parameters / setup.shards
            rows = teacher.vocabulary + setup.micro_batch_tokens
            at_rest += itemsize * rows * teacher.hidden  # its head and hidden states
        updates.append(update_bytes(shape, trainable, at_rest, setup))
    return max(updates, key=lambda update: update.peak)


def update_bytes(shape: ModelShape, trainable: float, at_rest: float, setup: Setup) -> UpdateBytes:
    """The update of a model. trainable: its parameters in this rank's optimizer. at_rest: bytes of
    all that stays in memory, its gradients included.

    While activations are in memory, FSDP2 keeps its root gathered, with gradients. Each layer is
    gathered along with the next one. Its gradients are copied to float32 and reduced; where no
    ranks share a copy of the model, that makes another copy.
    """
    machine = setup.machine
    itemsize = setup.dtype.itemsize
    tokens = setup.micro_batch_tokens
    kept_activations = tokens * activation_bytes(shape, setup.rollout, machine, setup.dtype)
    recomputed_activations = tokens * recomputed_bytes(shape, setup.rollout, machine, setup.dtype)
    keeps_all = keeps_gathered(machine, setup.ranks, setup.on_gpu)
    gathered_weights = itemsize * (shape.parameters if keeps_all else shape.root)
    if machine.lora_rank > 0:
        root_gradients = 0
        # adapted weights are float32 before they are rounded
        block_bytes = (2 * itemsize + 4) * shape.block
        reduction_extra = gathered_weights
    elif setup.shards == 1:
        root_gradients = itemsize * shape.root
        block_bytes = (3 * itemsize + 8) * shape.block
        # two copies in float32: those in the compute dtype are freed before the second
        reduction_extra = gathered_weights + 8 * shape.root
    else:
        root_gradients = itemsize * shape.root
        block_bytes = (3 * itemsize + 4) * shape.block
        # the float32 copy of the last layer's gradients may wait until the root is done
        reduction_extra = gathered_weights + (itemsize + 4) * shape.root + 4 * shape.block
    # float32 logits of a chunk with what is computed from them, and gradients of the last hidden
    # states
    chunk = CHUNK_ELEMENTS["cuda" if setup.on_gpu else "cpu"]
    head_bytes = 3 * 4 * chunk + (8 + itemsize) * tokens * shape.hidden
    head_or_layer = max(head_bytes, block_bytes + recomputed_activations)
    backward_extra = gathered_weights + root_gradients + kept_activations + head_or_layer
    adam_from_host = 8 * trainable if "optimizer" in machine.offload else 0
    return UpdateBytes(
        gradients=4 * trainable,
        activations=kept_activations + recomputed_activations,
        gathered=gathered_weights + root_gradients,
        backward=backward_extra + at_rest,
        reduction=reduction_extra + at_rest,
        step=at_rest + adam_from_host,
    )


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
    optimizer. No phase includes the "context" of CUDA and what its allocator keeps; on a CPU the
    update includes what malloc keeps.

    trained: the policy, then critics. frozen: references. teacher: of a distillation, unless it is
    the base of LoRA; it computes within the update, and its head is kept beside the policy's.
    """
    # a run has chosen before it comes here (`choose_attention`); a test may pass "auto"
    if machine.attention == "auto":
        # a GPU with fp16 stands for one of capability below 8.0
        attention = "flex" if on_gpu and dtype != torch.float16 else "sdpa"
        machine = replace(machine, attention=attention)
    setup = Setup(rollout, machine, ranks, dtype, on_gpu)
    policy = trained[0]
    models = [policy]
    if not rollout.eval_only:
        models.extend(shape.backbone for shape in trained[1:])
    trainer = trainer_bytes(models, frozen, teacher, setup)
    engine = engine_bytes(policy, setup)

    beside_engine = trainer.total - trainer.base_on_host  # in the rollout, and while scoring
    sampling = 0.0
    if not rollout.replay:
        sampling = beside_engine + engine.weights + engine.cache + engine.workspace
    scoring = 0.0
    if reward_parameters:
        scoring = beside_engine + dtype.itemsize * reward_parameters + engine.after_rollout
    update = UpdateBytes()
    update_peak = 0.0
    if not rollout.eval_only:
        update = largest_update(models, trainer, engine, teacher, setup)
        update_peak = update.peak
        if not on_gpu:
            update_peak += MALLOC_PIECES * (update_peak - engine.after_rollout)
    terms = {
        "gradients": update.gradients,
        "activations": update.activations,
        "gathered": update.gathered,
        "backward": update.backward,
        "reduction": update.reduction,
        "step": update.step,
        "weights": trainer.weights,
        "reference": trainer.reference,
        "Adam": trainer.adam,
        "engine": engine.weights,
        "KV cache": engine.cache,
        "workspace": engine.workspace,
        "NCCL": trainer.nccl,
        "rollout": sampling,
        "scoring": scoring,
        "update": update_peak,
        "context": 1e9 * CUDA_CONTEXT if on_gpu else 0.0,
    }
    return {name: number / 1e9 for name, number in terms.items()}

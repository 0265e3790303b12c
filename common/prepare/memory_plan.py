"""Memory of a rank: what each phase of a step will need, before any weights are read; and what was used."""

import resource

import psutil
import torch

from common.distributed import World, repeated_blocks
from common.files import refuse
from common.flags import Machine, Rollout
from common.lora import add_adapters
from common.processes import ranks_here
from common.vision import skeleton

# Bytes per token, layer and hidden unit, measured with transformers' Llama in bf16 (its norms compute in float32).
ACTIVATION_BYTES = {False: 60, True: 8}  # by --gradient-checkpointing
GIB = 2**30 / 1e9  # in GB


def model_shape(path: str, machine: Machine) -> tuple[int, int, int]:
    """(parameters, those that are trained, layers x hidden size) of the model in a folder; no weights are read."""
    model = skeleton(path, machine.trust_remote_code)
    text = model.config.get_text_config()
    size = sum(p.numel() for p in model.parameters())
    tower = sum(p.numel() for name, p in model.named_parameters() if "visual." in name)
    trained = size - tower * machine.freeze_vision
    if machine.lora_rank:
        add_adapters(model, repeated_blocks(getattr(model.base_model, "language_model", model)), machine)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return size, trained, text.num_hidden_layers * text.hidden_size


def cache_gib(rollout: Rollout, on_gpu: bool) -> float:
    """--engine-memory, or its default; on a CPU all of it is filled with zeros at the start."""
    return rollout.engine_memory or (8.0 if on_gpu else 0.5)


def memory_phases(
    rollout: Rollout, machine: Machine, ranks: int, dtype: torch.dtype, trained: list, frozen: list, on_gpu: bool
) -> dict[str, float]:
    """Estimated gigabytes of a rank: weights, Adam, engine, KV cache, gradients, activations; and in each phase.

    trained, frozen: folders of the models, the policy first; no weights are read. Caches of the allocator come on top.
    """
    lora = machine.lora_rank > 0
    frozen = [] if machine.reference_offload or lora else frozen  # with LoRA the policy's base is the reference
    shapes = {path: model_shape(path, machine) for path in {*trained, *frozen}}
    keeps_casts = ranks == 1 and not on_gpu  # of the weights, in `forward_context`; of frozen ones it is a copy
    ranks = 1 if machine.strategy == "ddp" else machine.shard_size or ranks
    size = {path: shape[0] / 1e9 for path, shape in shapes.items()}
    learned = {path: shape[1] / 1e9 / (1 if lora else ranks) for path, shape in shapes.items()}  # adapters stay whole
    weights = sum((dtype.itemsize if lora else 4) * size[path] for path in trained) / ranks
    reference = sum(dtype.itemsize * size[path] for path in frozen) / ranks
    weights += reference
    weights += sum(4 * learned[path] for path in trained) if lora else 0
    adam = sum(8 * learned[path] for path in trained)
    gradients = max(4 * learned[path] for path in trained)  # of one model at a time
    widest = max(shapes[path][2] for path in trained)
    activations = machine.micro_batch_tokens * widest * ACTIVATION_BYTES[machine.gradient_checkpointing] / 1e9
    engine = dtype.itemsize * size[trained[0]] / rollout.engine_parallel
    cache = cache_gib(rollout, on_gpu) * GIB
    asleep = on_gpu and rollout.sleep_level > 0
    sampling = weights + engine + cache
    updating = weights + gradients + (0 if asleep else engine + cache)
    if keeps_casts:
        updating += dtype.itemsize * max(size[path] for path in trained)
    if machine.optimizer_offload:  # a model's moments come when the activations are gone
        updating += max(activations, 2 * gradients)
    else:
        sampling += adam
        updating += activations + adam
    parts = {"weights": weights, "Adam": adam, "rollout": sampling, "engine": engine, "KV cache": cache}
    return parts | {"update": updating, "gradients": gradients, "activations": activations, "reference": reference}


def memory_plan(
    rollout: Rollout, machine: Machine, world: World, dtype: torch.dtype, trained: list[str], frozen: list[str]
) -> str:
    """`memory_phases` in words, with a warning for what may not fit. SystemExit if the engine alone does not."""
    if on_gpu := world.device.type == "cuda":
        there = torch.cuda.mem_get_info(world.device)[0] / 1e9
    else:
        there = psutil.virtual_memory().available / 1e9 / ranks_here()
    gb = memory_phases(rollout, machine, world.size, dtype, trained, frozen, on_gpu)
    plan = (
        "memory of a rank (GB, estimated; {there:.1f} are free): weights {weights:.1f}, of them reference "
        "{reference:.1f}, Adam {Adam:.1f}; rollout {rollout:.1f}, of it engine {engine:.1f}, KV cache {KV cache:.1f} "
        "(--engine-memory); update {update:.1f}, of it gradients {gradients:.1f}, activations {activations:.1f}"
    ).format(there=there, **gb)
    left = max(0.0, there - gb["engine"])
    fits = f"of {there / GIB:.1f} GiB that are free the engine's weights leave {left / GIB:.1f}"
    refuse(gb["KV cache"] > left and not rollout.replay, f"--engine-memory {gb['KV cache'] / GIB:g}: {fits}")
    if gb["rollout"] > there:
        plan += "\nwarning: the rollout may not fit: lower --engine-memory, or shard over more GPUs"
    if gb["update"] > there:
        plan += "\nwarning: the update may not fit: lower --micro-batch-tokens, add --gradient-checkpointing or GPUs"
    return plan


def peak_memory_gb(device: torch.device) -> float:
    """Highest memory use of this process so far (GB): on the GPU, or resident on a CPU machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9

"""Memory of a rank: what each phase of a step will need, and what was used."""

import ctypes
import os
import resource

import torch
from transformers import AutoConfig

from common.vision import auto_class

# Bytes per token, layer and hidden unit, measured with transformers' Llama in bf16 (its norms compute in float32).
ACTIVATION_BYTES = {False: 60, True: 8}  # by --gradient-checkpointing


def model_shape(path: str, trust_remote_code: bool = False) -> tuple[int, int]:
    """(number of parameters, layers x hidden size) of the model in a folder; no weights are read."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    return sum(p.numel() for p in model.parameters()), text.num_hidden_layers * text.hidden_size


def memory_phases(args, ranks: int, dtype: torch.dtype, trained: list, frozen: list, on_gpu: bool) -> dict[str, float]:
    """Estimated gigabytes of a rank: weights, Adam, engine, KV cache, gradients, activations; and in each phase.

    trained, frozen: folders of the models, the policy first; no weights are read. Caches of the allocator come on top.
    """
    shapes = {path: model_shape(path, args.trust_remote_code) for path in {*trained, *frozen}}
    ranks = ranks if args.strategy == "fsdp" else 1
    size = {path: shape[0] / 1e9 for path, shape in shapes.items()}
    frozen_bytes = dtype.itemsize if args.strategy == "fsdp" else 4
    weights = (sum(4 * size[path] for path in trained) + sum(frozen_bytes * size[path] for path in frozen)) / ranks
    adam = sum(8 * size[path] for path in trained) / ranks
    gradients = max(4 * size[path] for path in trained) / ranks  # of one model at a time
    widest = max(shapes[path][1] for path in trained)
    activations = args.micro_batch_tokens * widest * ACTIVATION_BYTES[args.gradient_checkpointing] / 1e9
    engine = dtype.itemsize * size[trained[0]]
    cache = (args.engine_memory or (8 if on_gpu else 1)) * 2**30 / 1e9
    asleep = on_gpu and args.sleep_level > 0
    rollout = weights + engine + cache
    update = weights + gradients + (0 if asleep else engine + cache)
    if args.optimizer_offload:  # a model's moments come when the activations are gone
        update += max(activations, 2 * gradients)
    else:
        rollout, update = rollout + adam, update + activations + adam
    parts = {"weights": weights, "Adam": adam, "rollout": rollout, "engine": engine, "KV cache": cache}
    return parts | {"update": update, "gradients": gradients, "activations": activations}


def memory_plan(args, world, dtype: torch.dtype, trained: list[str], frozen: list[str]) -> str:
    """`memory_phases` in words, with a warning for what may not fit: before weights are loaded."""
    if on_gpu := world.device.type == "cuda":
        there = torch.cuda.get_device_properties(world.device).total_memory / 1e9
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
        there /= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gb = memory_phases(args, world.size, dtype, trained, frozen, on_gpu)
    plan = (
        "memory of a rank (GB, estimated; {there:.1f} are there): weights {weights:.1f}, Adam {Adam:.1f}; rollout "
        "{rollout:.1f}, of it engine {engine:.1f}, KV cache {KV cache:.1f}; update {update:.1f}, of it gradients "
        "{gradients:.1f}, activations {activations:.1f}"
    ).format(there=there, **gb)
    if gb["rollout"] > there:
        plan += "\nwarning: the rollout may not fit: lower --engine-memory, or shard over more GPUs"
    if gb["update"] > there:
        plan += "\nwarning: the update may not fit: lower --micro-batch-tokens, add --gradient-checkpointing or GPUs"
    return plan


def keep_freed_memory() -> None:
    """On CPUs with glibc: reuse what tensors free. Otherwise every large one begins with new pages of the kernel's,
    which take a tenth of a step."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def release_freed_memory() -> None:
    """Once a step: what has been kept in pieces would add up."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def move_states(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Adam's moments to a device; its step counts stay where they are."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[name] = value.to(device)


def peak_memory_gb(device: torch.device) -> float:
    """Highest memory use of this process so far (GB): on the GPU, or resident on a CPU machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9

"""The process group of torchrun, sharding by FSDP2, reductions."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from common.ending import sign_of_life, watch
from common.processes import PARENT, cpus_of_rank, die_with, keep_freed_memory, refuse_lone_ranks
from common.rendezvous import connect, find_interface, meet
from common.torch_repair import Later

fsdp = Later("torch.distributed.fsdp")


@dataclass(frozen=True)
class World:
    """Who this process is among the ranks that torchrun started."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def init_world(stall_minutes: float = 30.0) -> World:
    """Join torchrun's process group (nccl on GPUs, gloo on CPUs); a plain `python script.py` is a
    group of one.

    From here on a rank ends when another one fails, and when its torchrun ends. A rank without a
    `sign_of_life` for `stall_minutes` prints its stacks and ends the run.
    """
    refuse_lone_ranks()
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("LOCAL_RANK", "0")
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        num_gpus = torch.cuda.device_count()
        num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
        if num_ranks > num_gpus:
            raise SystemExit(
                f"{num_ranks} ranks, but {num_gpus} GPUs on this machine: "
                f"torchrun --nproc_per_node {num_gpus}"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        # gloo: objects and CPU tensors (checkpoints, metrics) do not touch the GPU
        backend = "cpu:gloo,cuda:nccl"
    else:
        device = torch.device("cpu")
        backend = "gloo"
        keep_freed_memory()
    limit_threads()
    # a rank that outlived its torchrun would be in the way of a restarted run
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(PARENT)
    # collectives wait longer than a stall may last; a timedelta cannot be infinite
    timeout = timedelta(minutes=min(stall_minutes, 1e6) + 10)
    if size > 1:
        store = meet(rank, size, timeout)
        watch(store.clone(), stall_minutes)  # a second connection: the first may be in a wait
    else:
        store = dist.HashStore()
        watch(None, stall_minutes)
    find_interface(store, rank, size)
    connect(backend, store, rank, size, timeout)
    return World(rank, size, local_rank, device)


def limit_threads() -> None:
    """Use at most as many threads as this rank has CPUs, unless OMP_NUM_THREADS is set: torch also
    counts CPUs that a container may not use."""
    cpus = cpus_of_rank()
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > cpus:
        torch.set_num_threads(cpus)
        os.environ["OMP_NUM_THREADS"] = str(cpus)  # for the processes that this one starts


def make_mesh(world: World, strategy: str, shard_size: int | None = None) -> DeviceMesh:
    """The mesh of all ranks. SystemExit if a sum over one of its axes is wrong.

    The ranks along "shard" share one copy of a model: `shard_size` consecutive ones (HSDP), or all
    if it is None or 0. With "ddp" each rank has a copy of its own.
    """
    if strategy == "ddp":
        shard_size = 1
    elif not shard_size:
        shard_size = world.size
    axes: dict[str, int] = {}
    if shard_size < world.size:
        axes["replicate"] = world.size // shard_size
    axes["shard"] = shard_size
    mesh = init_device_mesh(world.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    for group in mesh.get_all_groups():
        check_all_reduce(world, group)
    return mesh


def check_all_reduce(world: World, group: dist.ProcessGroup) -> None:
    """SystemExit if a sum over the group is wrong: there are builds of libraries that do nothing,
    without an error."""
    ranks = dist.get_process_group_ranks(group)
    expected = [len(ranks), sum(ranks)]
    sums = torch.tensor([1.0, world.rank], device=world.device)
    dist.all_reduce(sums, group=group)
    if sums.tolist() != expected:
        raise SystemExit(
            f"an all-reduce over ranks {ranks} gives {sums.tolist()}, not {expected}: these "
            "libraries or drivers cannot train"
        )


def wrap_model(
    model: nn.Module,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    shards_own_parameters: bool = True,
    stays_gathered: bool = True,
) -> nn.Module:
    """Shard `model` (FSDP2), whose float32 parameters stay the master weights, over the mesh.

    Each of `repeated_blocks` is a unit; the root holds the embeddings, the last norm and the head.
    FSDP2 computes with parameters cast to `compute_dtype` and reduces gradients in float32. A model
    on the meta device gets its weights later, in shards. shards_own_parameters: False if the
    parameters that the model itself has, outside of its submodules, stay whole (with LoRA, a
    critic's head); `average_whole_gradients` takes care of their gradients. stays_gathered: a rank
    alone casts and copies its weights once a step, not twice a micro-batch, and reduces its
    gradients once.
    """
    precision = fsdp.MixedPrecisionPolicy()
    if compute_dtype != next(model.parameters()).dtype:
        precision = fsdp.MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    whole_parameters = set()
    if not shards_own_parameters:
        whole_parameters = set(model.parameters(recurse=False))
    for parameter in whole_parameters:
        parameter.data = parameter.data.to(mesh.device_type)
    for unit in [*repeated_blocks(model), model]:
        fsdp.fully_shard(unit, mesh=mesh, mp_policy=precision, ignored_params=whole_parameters)
    model.stays_gathered = stays_gathered and world_size() == 1
    return model


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that is not sharded yet: modules of the classes that transformers
    does not split over devices."""
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def average_whole_gradients(model: nn.Module) -> None:
    """Average over ranks what FSDP2 does not: gradients of parameters that are not sharded."""
    gradients: list[torch.Tensor] = []
    for parameter in model.parameters():
        is_sharded = hasattr(parameter, "full_tensor")
        if parameter.grad is not None and not is_sharded:
            gradients.append(parameter.grad)
    if isinstance(model, fsdp.FSDPModule) and gradients:
        flat = parameters_to_vector(gradients)
        dist.all_reduce(flat)
        vector_to_parameters(flat / world_size(), gradients)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor, whose ranks call it together; any other tensor unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on the device. A GPU gets it from pinned memory: any other copy waits
    until the GPU has done all that was started before."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def reshard(model: nn.Module) -> None:
    """Make all parameters shards (DTensors) again: those of FSDP2's root stay gathered after a
    forward."""
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def abandon_backward(model: nn.Module) -> None:
    """After an exception in a forward or backward on this rank: drop gradients and FSDP2's state,
    so that the step can be repeated. SystemExit with torch below 2.13."""
    model.zero_grad()  # of gathered parameters
    # each once: with LoRA a teacher may be the policy without its adapters
    for root in dict.fromkeys(sharded_roots(model)):
        if not hasattr(root, "reset_iter_state"):
            raise SystemExit("torch below 2.13 cannot repeat a step: run the same command again")
        root.reset_iter_state()
        drop_accumulated_gradients(root)
    model.zero_grad()  # of shards


def drop_accumulated_gradients(root: nn.Module) -> None:
    """Drop what FSDP2 has added up of earlier micro-batches, which its `reset_iter_state` keeps."""
    for module in root.modules():
        if isinstance(module, fsdp.FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None


def sharded_roots(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that FSDP2 has wrapped: one, or one of each model in a ModuleList."""
    if isinstance(model, fsdp.FSDPModule):
        return [model]
    return [root for child in model.children() for root in sharded_roots(child)]


@contextmanager
def forward_context(model: nn.Module, last: bool = True) -> Iterator[None]:
    """Around one forward and backward. Copies of a model reduce their gradients at the `last`
    micro-batch only, and so does a rank alone.

    A forward without gradients leaves nothing gathered: the head of a reference model is large.
    """
    sign_of_life()
    if isinstance(model, fsdp.FSDPModule):
        model.set_requires_all_reduce(last)
        if model.stays_gathered:  # until the last micro-batch
            model.set_reshard_after_forward(False)
            model.set_reshard_after_backward(last)
            model.set_requires_gradient_sync(last)
            if not last:
                gather_all(model)
    yield
    if not torch.is_grad_enabled():
        reshard(model)


def gather_all(model: nn.Module) -> None:
    """Gather all units of a model that FSDP2 has wrapped: it cannot add up gradients beside a unit
    that was never gathered, such as a vision tower that has seen no picture yet."""
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.unshard()


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def all_reduce(values: list[float] | torch.Tensor, op: str = "sum") -> list[float]:
    """Reduce a vector of numbers over all ranks in float64; op is "sum", "max" or "min"."""
    tensor = torch.as_tensor(values, dtype=torch.float64).detach().cpu().clone()
    if dist.is_initialized():
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()))
    return tensor.tolist()


def gather_objects(value: object, group: dist.ProcessGroup | None = None) -> list:
    """`value` of every rank (of the group), in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    values: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def broadcast_object(value: object, group: dist.ProcessGroup | None = None) -> object:
    """The first rank's `value` on every rank (of the group)."""
    box = [value]
    if world_size() > 1:
        dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]

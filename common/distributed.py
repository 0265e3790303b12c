"""torchrun process group, sharding by FSDP2, reductions; how a script begins and ends on every
rank."""

import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from common import ending
from common.ending import sign_of_life, watch
from common.files import refuse
from common.printing import guard_output
from common.processes import PARENT, cpus_of_rank, die_with, keep_freed_memory, refuse_lone_ranks
from common.progress import say
from common.rendezvous import connect, find_interface, meet
from common.torch_repair import Later

fsdp = Later("torch.distributed.fsdp")
# gloo's words, and NCCL's
LOST = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
# SIGUSR1 is Slurm's usual one
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)
received: list[int] = []  # those that have come; an Event's lock may be held where a handler runs
stopping = threading.Event()  # one has come to some rank, and all have agreed to end


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

    From its start on a rank ends with any other that fails, and with its torchrun; one that shows
    no `sign_of_life`
    for `stall_minutes` prints its stacks and ends the run.
    """
    refuse_lone_ranks()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(name, value)
    rank, size, local_rank = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    )
    if torch.cuda.is_available():
        gpus, ranks = (
            torch.cuda.device_count(),
            int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1)),
        )
        refuse(
            ranks > gpus,
            f"{ranks} ranks, but {gpus} GPUs on this machine: torchrun --nproc_per_node {gpus}",
        )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        # gloo: objects and CPU tensors (checkpoints, metrics) do not touch the GPU
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
        keep_freed_memory()
    limit_threads()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank must not go on beside a restart
        die_with(PARENT)
    timeout = timedelta(minutes=min(stall_minutes, 1e6) + 10)
    if size > 1:
        store = meet(rank, size, timeout)
        watch(store.clone(), stall_minutes)  # the main thread's connection may be waiting
    else:
        store = dist.HashStore()
        watch(None, stall_minutes)
    find_interface(store, rank, size)
    connect(backend, store, rank, size, timeout)
    return World(rank, size, local_rank, device)


def limit_threads() -> None:
    """As many threads as CPUs, unless the user has said otherwise: torch counts those that a
    container may not use."""
    cpus = cpus_of_rank()
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > cpus:
        torch.set_num_threads(cpus)
        os.environ["OMP_NUM_THREADS"] = str(cpus)  # for what this process starts


def handle_signals() -> None:
    """On one of STOP_SIGNALS `stop_requested` becomes true: the script ends its step, saves, and
    exits. A second Ctrl-C ends it at once, which torchrun passes on as a SIGTERM."""
    for number in STOP_SIGNALS:
        # as nohup has it, and what a shell starts with &
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _ask_to_stop)


def _ask_to_stop(number: int, _frame: object) -> None:
    if signal.SIGINT in received and number in (signal.SIGINT, signal.SIGTERM):
        raise KeyboardInterrupt
    received.append(number)
    if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
        line = b"Ctrl-C: the run ends with this step, and saves; once more ends it at once"
        if "TORCHELASTIC_RUN_ID" in os.environ:
            line += b". torchrun waits for 30 s, or its --shutdown-timeout"
        os.write(2, line + b"\n")  # not by print, in which the signal may have come


def stop_requested() -> int:
    """The exit code to end with, if a signal has asked any rank to end; 0: go on. All ranks must
    ask together."""
    status = 0
    if received:
        status = 128 + (signal.SIGINT if signal.SIGINT in received else signal.SIGTERM)
    (status,) = all_reduce([status], "max")
    if status > 0:
        stopping.set()
    return int(status)


def run(main: Callable, *args: object) -> None:
    """Run a script's `main` and leave by `os._exit`: a rank that waits in destructors keeps the
    others waiting."""
    guard_output()
    # objects: at 700 a tenth of the start is spent on looking through what is imported
    gc.set_threshold(50_000)
    try:
        status = _outcome(main, *args)
    except KeyboardInterrupt:
        ending.fail(ending.INTERRUPTED)
        if os.environ.get("RANK", "0") == "0":
            step, checkpoint = (ending.reached.get(name) for name in ("step", "checkpoint"))
            where = (
                f" at step {step}; last checkpoint: {checkpoint or 'none'}"
                if ending.reached
                else ""
            )
            print(f"{ending.INTERRUPTED}{where}", file=sys.stderr, flush=True)
        status = 130
    ending.leave(status)


def _outcome(main: Callable, *args: object) -> int:
    """The exit code. Ctrl-C may come anywhere in here, also while another rank's end raises an
    exception."""
    try:
        main(*args)
        barrier()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            ending.fail(stop.code)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception as error:
        rank, advice = f"[rank {os.environ.get('RANK', '0')}]", ""
        # of ours: users' own files raise ValueErrors
        if isinstance(error, ImportError) or any(
            word in str(error) for word in ("shared object", "torchvision::")
        ):
            advice = (
                ". Install what requirements.txt (-cpu, -v100) pins; python -m "
                "common.doctor says what works"
            )
        several = isinstance(error, RuntimeError) and world_size() > 1
        if several and any(words in str(error) for words in LOST) and not ending.heard():
            advice = (
                ". A rank is gone: one that was killed (signal 9) has most often run out "
                "of memory: docs/trouble.md"
            )
        line = f"{rank} {type(error).__name__}: {error}{advice}"
        ending.fail(line, f"{rank} failed:\n{traceback.format_exc()}{line}")
        if several:
            # it may come from another's death, and torchrun should see who was first
            time.sleep(ending.GRACE_S)
        return 1
    return 0


def make_mesh(world: World, strategy: str, shard_size: int | None = None) -> DeviceMesh:
    """Which ranks share a copy of a model (axis "shard"): all; `shard_size` consecutive ones
    (HSDP); with "ddp" none.

    SystemExit if sums over an axis are wrong: there are builds of libraries that do nothing, and
    say nothing.
    """
    shard_size = 1 if strategy == "ddp" else shard_size or world.size
    replicas = {"replicate": world.size // shard_size} if shard_size < world.size else {}
    axes = replicas | {"shard": shard_size}
    mesh = init_device_mesh(world.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    for group in mesh.get_all_groups():
        ranks, sums = (
            dist.get_process_group_ranks(group),
            torch.tensor([1.0, world.rank], device=world.device),
        )
        dist.all_reduce(sums, group=group)
        found = (
            f"an all-reduce over ranks {ranks} gives {sums.tolist()}, not "
            f"{[len(ranks), sum(ranks)]}"
        )
        refuse(
            sums.tolist() != [len(ranks), sum(ranks)],
            f"{found}: these libraries or drivers cannot train",
        )
    return mesh


def wrap_model(
    model: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype, whole: bool = False
) -> nn.Module:
    """Shard `model` (FSDP2), whose float32 parameters stay the master weights, as the mesh says.

    Each of `repeated_blocks` is a unit; the root holds the embeddings, the last norm and the head.
    FSDP2 computes with parameters cast to `compute_dtype` and reduces gradients in float32. A model
    on the meta device gets its weights later, in shards. `whole` leaves a critic's head as it is on
    each rank, like adapters: `average_gradients`.
    """
    policy = fsdp.MixedPrecisionPolicy()
    if compute_dtype != next(model.parameters()).dtype:
        policy = fsdp.MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    own = set(model.parameters(recurse=False)) if whole else set()
    for parameter in own:
        parameter.data = parameter.data.to(mesh.device_type)
    options = {"mesh": mesh, "mp_policy": policy, "ignored_params": own}
    for layer in repeated_blocks(model):
        fsdp.fully_shard(layer, **options)
    return fsdp.fully_shard(model, **options)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of what is not sharded yet, by what transformers knows of the models in it."""
    names = {
        name
        for module in model.modules()
        for name in getattr(module, "_no_split_modules", None) or ()
    }
    return [module for module in model.modules() if type(module).__name__ in names]


def average_gradients(model: nn.Module) -> None:
    """Over all ranks, of what FSDP2 was told to leave whole."""
    gradients = [
        p.grad for p in model.parameters() if p.grad is not None and not hasattr(p, "full_tensor")
    ]
    if isinstance(model, fsdp.FSDPModule) and gradients:
        flat = parameters_to_vector(gradients)
        dist.all_reduce(flat)
        vector_to_parameters(flat / world_size(), gradients)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor gathered, by all its ranks together; another one as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def reshard(model: nn.Module) -> None:
    """FSDP2's root stays gathered after a forward; its parameters are DTensors again only after
    this."""
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def abandon_backward(model: nn.Module) -> None:
    """After an exception inside a forward or backward, on one rank: no gradients, as if none had
    been under way."""
    model.zero_grad()  # of gathered parameters
    if root := next(
        (module for module in model.modules() if isinstance(module, fsdp.FSDPModule)), None
    ):
        refuse(
            not hasattr(root, "reset_iter_state"),
            "torch below 2.13 repeats no step: the same command goes on",
        )
        root.reset_iter_state()
    model.zero_grad()  # of shards


@contextmanager
def forward_context(model: nn.Module, last: bool = True) -> Iterator[None]:
    """Around one forward and backward: copies of a model reduce their gradients only at the `last`
    micro-batch.

    Without gradients a forward leaves nothing gathered behind: the head of a reference model is
    large.
    """
    sign_of_life()
    if isinstance(model, fsdp.FSDPModule):
        model.set_requires_all_reduce(last)
        # where casting the weights is dear: once a step
        if world_size() == 1 and not torch.cuda.is_available():
            model.set_reshard_after_forward(False)
            model.set_reshard_after_backward(last)
    yield
    if not torch.is_grad_enabled():
        reshard(model)


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
    # gloo's threads would compute, too, and OpenMP's wait for all: half as fast, from then on
    if world_size() == 1:
        return [value]
    gathered: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group)
    return gathered


def check_same(world: World, facts: dict[str, str]) -> None:
    """SystemExit, on all ranks, with what differs between machines; the first rank of each tells
    its facts."""
    host = f"{socket.gethostname()} by {os.environ.get('GLOO_SOCKET_IFNAME')}"
    (first, expected), *others = filter(
        None, gather_objects((host, facts) if world.local_rank == 0 else None)
    )
    if others:
        say(f"{1 + len(others)} machines: {first}, {', '.join(other for other, _ in others)}")
    for other, theirs in others:
        names = [name for name in expected | theirs if expected.get(name) != theirs.get(name)]
        told = "; ".join(f"{name}: {expected.get(name)}, {theirs.get(name)}" for name in names[:5])
        refuse(
            bool(names),
            f"{first} and {other} need the same code, flags, files and versions, and differ "
            f"in {told}",
        )


def broadcast_object(value: object, group: dist.ProcessGroup | None = None) -> object:
    """The first rank's `value` on every rank (of the group)."""
    box = [value]
    if world_size() > 1:
        dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]

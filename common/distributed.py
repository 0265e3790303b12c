"""torchrun process group, FSDP2 or DDP wrapping, reductions, seeding, and ending together: failure, stall, SIGTERM."""

import ctypes
import datetime
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

_stop = threading.Event()  # SIGTERM has come
_sign_of_life = [time.monotonic()]
_leaving = threading.Lock()
at_end: list[Callable[[], object]] = []  # called where the run ends, however it does


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

    def print(self, *values: object) -> None:
        if self.is_main:
            print(*values, flush=True)


def init_world(stall_minutes: float = 30.0) -> World:
    """Join torchrun's process group (nccl on GPUs, gloo on CPUs); a plain `python script.py` is a group of one.

    From then on a rank that shows no `sign_of_life` for `stall_minutes` prints its stacks and ends the run.
    """
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in defaults.items()})
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        # gloo beside nccl: Python objects and CPU tensors (checkpoints, metrics) travel without touching the GPU
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
        keep_freed_memory()
    dist.init_process_group(backend, timeout=datetime.timedelta(minutes=stall_minutes + 10))
    if dist.get_rank() == 0:
        _store().delete_key("failed")  # of the attempt before a torchrun restart
    sign_of_life()
    threading.Thread(target=_watch, args=(stall_minutes, dist.get_rank()), daemon=True).start()
    return World(dist.get_rank(), dist.get_world_size(), local_rank, device)


def sign_of_life() -> None:
    _sign_of_life[0] = time.monotonic()


def _watch(stall_minutes: float, rank: int) -> None:
    """The watchdog, a thread: stacks of all threads to stderr when nothing moves any more, then the end."""
    while (idle := time.monotonic() - _sign_of_life[0]) < stall_minutes * 60:
        time.sleep(min(5.0, stall_minutes * 60 - idle))
    print(f"[rank {rank}] no progress for {stall_minutes:g} minutes (--stall-minutes):", file=sys.stderr, flush=True)
    faulthandler.dump_traceback()
    time.sleep(10)  # until the other ranks have printed theirs: the first to exit ends them all
    os._exit(1)


def handle_sigterm() -> None:
    """On SIGTERM `stop_requested` becomes true, and the script saves and exits at the end of its step.

    torchrun sends it too when another rank has failed. Then this one may wait in a collective, where no Python handler
    runs: a thread reads the signal off a pipe and looks whether a failure was announced.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno())
    signal.signal(signal.SIGTERM, lambda *_: None)

    def listen() -> None:
        while signal.SIGTERM not in reader.recv(64):
            pass
        _stop.set()
        with suppress(RuntimeError):  # the store is gone with the rank that kept it
            while not _store().check(["failed"]):
                time.sleep(1.0)
        leave(1)

    threading.Thread(target=listen, daemon=True).start()
    handle_sigterm.sockets = reader, writer  # kept open


def stop_requested() -> bool:
    """Has any rank got a SIGTERM? All ranks must ask together."""
    return all_reduce([_stop.is_set()], "max")[0] > 0


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _announce_failure() -> bool:
    """Tell the other ranks; True for the first one that fails."""
    with suppress(RuntimeError):
        if dist.is_initialized():
            return _store().add("failed", 1) == 1
    return os.environ.get("LOCAL_RANK", "0") == "0"


def run(main: Callable, *args: object) -> None:
    """Run a script's `main` and leave by `os._exit`: a rank that waits in destructors keeps the others waiting."""
    try:
        main(*args)
        barrier()
        status = 0
    except SystemExit as stop:
        if isinstance(stop.code, str) and _announce_failure():  # one line, not one per rank
            print(stop.code, file=sys.stderr)
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        print(f"[rank {os.environ.get('RANK', '0')}] failed:\n{traceback.format_exc()}", file=sys.stderr)
        status = 1
        _announce_failure()
    leave(status)


def leave(status: int) -> NoReturn:
    """The end of this process, by the first thread that comes here."""
    _leaving.acquire()
    try:
        for function in at_end:
            function()
    finally:  # whatever that raises, a second Ctrl-C too
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wrap_model(model: nn.Module, world: World, strategy: str, compute_dtype: torch.dtype) -> nn.Module:
    """Shard (FSDP2) or replicate (DDP) `model`, whose float32 parameters stay the master weights.

    Each of `model.layers()` is an FSDP unit; the root holds the embeddings, the last norm and the head. FSDP2 computes
    with parameters cast to `compute_dtype` and reduces gradients in float32; DDP computes under autocast. The model
    may be on the CPU: FSDP2 moves it to the device unit by unit, so that no device ever holds it whole.
    """
    if strategy == "ddp":
        model = model.to(world.device)
        if world.size > 1 and any(p.requires_grad for p in model.parameters()):  # DDP refuses a frozen one
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        model.autocast_dtype = compute_dtype if compute_dtype in (torch.bfloat16, torch.float16) else None
        return model
    mesh = init_device_mesh(world.device.type, (world.size,))
    master = next(model.parameters()).dtype
    policy = MixedPrecisionPolicy()
    if compute_dtype != master:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in model.layers():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def unwrap(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def reshard(model: nn.Module) -> None:
    """FSDP2's root stays gathered after a forward; its parameters are DTensors again only after this."""
    if isinstance(model, FSDPModule):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def abandon_backward(model: nn.Module) -> None:
    """After an exception inside a forward or backward, on one rank: no gradients, as if none had been under way."""
    model.zero_grad()  # of gathered parameters
    if isinstance(model, FSDPModule):
        if not hasattr(model, "reset_iter_state"):
            raise SystemExit("torch before 2.13 cannot repeat the step: the same command goes on, in smaller pieces")
        model.reset_iter_state()
    model.zero_grad()  # of shards


@contextmanager
def forward_context(model: nn.Module, last: bool = True) -> Iterator[None]:
    """Around one forward and backward: DDP computes under autocast and all-reduces only at the `last` micro-batch.

    Without gradients a forward leaves nothing gathered behind: the head of a reference model is large.
    """
    sign_of_life()
    with ExitStack() as stack:
        if dtype := getattr(model, "autocast_dtype", None):
            stack.enter_context(torch.autocast(next(model.parameters()).device.type, dtype))
        if isinstance(model, DistributedDataParallel) and not last:
            stack.enter_context(model.no_sync())
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


def gather_objects(value: object) -> list:
    """`value` of every rank, in rank order, on every rank."""
    if not dist.is_initialized():
        return [value]
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def broadcast_object(value: object) -> object:
    """Rank 0's `value` on every rank."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


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

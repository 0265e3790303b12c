"""How the ranks of a run find each other: a store that all of them reach, and the network interface
between them."""

import os
import socket
import time
import uuid
from contextlib import suppress
from datetime import timedelta

import psutil
import torch.distributed as dist

from common.processes import ranks_here
from common.progress import break_silence

LOOPBACK = ("127.", "::1")


def gather_seconds() -> float:
    """How long to wait for all ranks, and for their connections: GATHER_SECONDS in the environment,
    or a minute."""
    seconds = os.environ.get("GATHER_SECONDS", "60")
    if not seconds.isdecimal():
        raise SystemExit("GATHER_SECONDS: expected a number of seconds")
    return float(seconds)


def meet(rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Wait for all ranks; a store of this attempt alone. SystemExit if some do not come.

    torchrun's store outlives its restarts, and each of its agents counts restarts by itself. So
    every rank but 0 leaves a token there, which rank 0 answers with a name for this attempt, until
    all have confirmed that they know the name: nobody reads the keys of an earlier attempt.

    timeout: of requests to the store from then on.
    """
    if "MASTER_ADDR" not in os.environ:  # some clusters leave WORLD_SIZE in the environment
        raise SystemExit(f"WORLD_SIZE is {size}, and there is no MASTER_ADDR: start with torchrun")
    deadline = time.monotonic() + gather_seconds()
    if rank:
        deadline += 2  # rank 0 knows best who is missing
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    while not (is_host or answers(host, port)):
        pause(deadline, f"no answer from {host}:{port}")
    store = dist.TCPStore(host, port, is_master=is_host, timeout=timeout, wait_for_workers=False)
    if rank == 0:
        name = uuid.uuid4().hex
        answer_ranks(store, name, size, deadline)
    else:
        token = uuid.uuid4().hex
        store.set(f"rank/{rank}", token)
        while not store.check([token]):
            pause(deadline, "no answer from rank 0")
        name = store.get(token).decode()
        store.set(f"{name}/{rank}", "")
    return dist.PrefixStore(name, store)


def answer_ranks(store: dist.Store, name: str, size: int, deadline: float) -> None:
    """On rank 0: answer the token of each rank with the name, until all have confirmed it."""
    missing = list(range(1, size))
    while missing:
        for rank in missing:
            if store.check([f"rank/{rank}"]):
                token = store.get(f"rank/{rank}").decode()
                store.set(token, name)
        places = ", ".join(f"{rank} (machine {rank // ranks_here()})" for rank in missing)
        pause(deadline, f"no sign of rank {places}")
        missing = [rank for rank in missing if not store.check([f"{name}/{rank}"])]


def pause(deadline: float, problem: str) -> None:
    """Wait for 0.1 s. SystemExit with the problem after the deadline."""
    if time.monotonic() > deadline:
        line = f"[rank {os.environ['RANK']}] {problem} after {gather_seconds():g} s"
        raise SystemExit(f"{line} (GATHER_SECONDS=600 waits longer)")
    break_silence(problem)
    time.sleep(0.1)


def answers(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def connect(backend: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
    """Make the process group. SystemExit if the ranks do not reach each other.

    timeout: of a collective.
    """
    # the limit for connections is fixed here; that of collectives is set below
    connect_timeout = timedelta(seconds=gather_seconds())
    try:
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=connect_timeout
        )
    except RuntimeError as error:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "the interface that gloo has chosen")
        reason = str(error).partition("\n")[0]
        raise SystemExit(
            f"[rank {rank}] the ranks do not connect by {interface} (GLOO_SOCKET_IFNAME): {reason}"
        ) from error
    dist.distributed_c10d._set_pg_timeout(timeout)


def find_interface(store: dist.Store, rank: int, size: int) -> None:
    """Let gloo and NCCL use the interface that reaches MASTER_ADDR, unless the environment names
    one, or none is found.

    By itself gloo would resolve the host name, often to 127.0.0.1. On its own machine MASTER_ADDR
    may resolve to that, too: then the interface is the one that reaches another machine.
    """
    address = address_towards(os.environ["MASTER_ADDR"]) if size > 1 else "127.0.0.1"
    store.set(f"address/{rank}", address)
    if address.startswith(LOOPBACK):
        for other in range(size):
            other_address = store.get(f"address/{other}").decode()
            if not other_address.startswith(LOOPBACK):
                address = address_towards(other_address)
                break
    name = interface_of(address)
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # a bare eth1 matches eth10, too


def interface_of(address: str) -> str | None:
    """The network interface with this address; None if there is none, or if the system does not
    list them, as in some sandboxes."""
    try:
        interfaces = psutil.net_if_addrs()
    except OSError:
        return None
    for name, addresses in interfaces.items():
        for item in addresses:
            if item.address.partition("%")[0] == address:
                return name
    return None


def address_towards(host: str) -> str:
    """The address from which this machine sends packets to `host`; none is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]

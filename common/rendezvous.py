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

from common.files import refuse
from common.processes import ranks_here
from common.progress import break_silence

LOOPBACK = ("127.", "::1")


def patience() -> float:
    """Seconds until all ranks have come, or have connected: GATHER_SECONDS in the environment, or a
    minute."""
    seconds = os.environ.get("GATHER_SECONDS", "60")
    refuse(not seconds.isdecimal(), "GATHER_SECONDS: expected a number of seconds")
    return float(seconds)


def too_late(missing: str) -> SystemExit:
    line = f"[rank {os.environ['RANK']}] {missing} after {patience():g} s"
    return SystemExit(f"{line} (GATHER_SECONDS=600 waits longer)")


def meet(rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Wait for all ranks; a store of this attempt alone. SystemExit if some do not come.

    torchrun's outlives its restarts, and each of its agents counts these by itself. So rank 0 makes
    up a name, and tells it to whoever has come, until all have got it: what an earlier attempt has
    left behind, nobody reads.

    timeout: for what the store is asked from then on.
    """
    deadline = time.monotonic() + patience()
    if rank:
        deadline += 2  # rank 0 knows best who is missing

    def wait_for(missing: str) -> None:
        if time.monotonic() > deadline:
            raise too_late(missing)
        break_silence(missing)
        time.sleep(0.1)

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    while not (hosts or answers(host, port)):
        wait_for(f"no answer from {host}:{port}")
    store = dist.TCPStore(host, port, is_master=hosts, timeout=timeout, wait_for_workers=False)
    own = uuid.uuid4().hex
    store.set(f"rank/{rank}", own)
    while rank and not store.check([own]):
        wait_for("no answer from rank 0")
    name = store.get(own).decode() if rank else own
    store.set(f"{name}/{rank}", "")
    missing = list(range(1, size)) if rank == 0 else []
    while missing:
        for other in missing:
            if store.check([f"rank/{other}"]):
                store.set(store.get(f"rank/{other}").decode(), own)
        places = (f"{other} (machine {other // ranks_here()})" for other in missing)
        wait_for(f"no sign of rank {', '.join(places)}")
        missing = [other for other in missing if not store.check([f"{own}/{other}"])]
    return dist.PrefixStore(name, store)


def answers(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def connect(backend: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
    """Make the process group. SystemExit if the ranks do not reach each other.

    timeout: of a collective.
    """
    first = timedelta(seconds=patience())  # that for connections is fixed here
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=first)
    except RuntimeError as error:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "the interface that gloo has chosen")
        reason = str(error).partition("\n")[0]
        line = (
            f"[rank {rank}] the ranks do not connect by {interface} (GLOO_SOCKET_IFNAME): {reason}"
        )
        raise SystemExit(line) from error
    dist.distributed_c10d._set_pg_timeout(timeout)


def find_interface(store: dist.Store, rank: int, size: int) -> None:
    """gloo and NCCL take the one that reaches MASTER_ADDR, unless the user knows better, or none is
    known.

    gloo would resolve the host name, often to 127.0.0.1. So may MASTER_ADDR be, on its own machine.
    """
    own = address_towards(os.environ["MASTER_ADDR"]) if size > 1 else "127.0.0.1"
    store.set(f"address/{rank}", own)
    if own.startswith(LOOPBACK):
        addresses = (store.get(f"address/{other}").decode() for other in range(size))
        own = next(
            (address_towards(other) for other in addresses if not other.startswith(LOOPBACK)), own
        )
    name = interface_of(own)
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # a bare eth1 is eth10, too


def interface_of(address: str) -> str | None:
    """The interface that has this address; None where the system does not list it, as in some
    sandboxes."""
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
    """This machine's address in what it sends to another; nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]

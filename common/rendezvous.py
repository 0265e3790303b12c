"""How ranks find each other: a store that all of them reach, and the network interface between their machines."""

import datetime
import os
import socket
import time
import uuid

import psutil
import torch.distributed as dist

from common import processes

LOOPBACK = ("127.", "::1")


def meet(rank: int, size: int, timeout: datetime.timedelta) -> dist.Store:
    """Wait for all ranks; a store of this attempt alone.

    torchrun's outlives its restarts, and each of its agents counts these by itself. So rank 0 makes up a name, and
    tells it to whoever has come, until all have got it: what an earlier attempt has left behind, nobody reads.
    """
    address, own = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), uuid.uuid4().hex
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    processes.awaited[:] = [f"no answer from {address[0]}:{address[1]}"]
    store = dist.TCPStore(*address, is_master=hosts, timeout=timeout, wait_for_workers=False)
    store.set(f"rank/{rank}", own)
    processes.awaited[:] = ["no answer from rank 0"]
    while rank and not store.check([own]):
        time.sleep(0.1)
    name = store.get(own).decode() if rank else own
    store.set(f"{name}/{rank}", "")
    missing = set(range(1, size)) if rank == 0 else set()
    while missing:
        places = (f"{other} (machine {other // processes.ranks_here()})" for other in sorted(missing))
        processes.awaited[:] = [f"no sign of rank {', '.join(places)}"]
        for other in missing:
            if store.check([f"rank/{other}"]):
                store.set(store.get(f"rank/{other}").decode(), own)
        time.sleep(0.1)
        missing = {other for other in missing if not store.check([f"{own}/{other}"])}
    processes.group.append(dist.PrefixStore(name, store.clone()))
    return dist.PrefixStore(name, store)


def find_interface(store: dist.Store, rank: int, size: int) -> None:
    """gloo and NCCL take the one that reaches MASTER_ADDR, unless the user knows better.

    gloo would resolve the host name, often to 127.0.0.1. So may MASTER_ADDR be, on its own machine.
    """
    own = address_towards(os.environ["MASTER_ADDR"] if size > 1 else "127.0.0.1")
    store.set(f"address/{rank}", own)
    if own.startswith(LOOPBACK):
        addresses = (store.get(f"address/{other}").decode() for other in range(size))
        own = next((address_towards(other) for other in addresses if not other.startswith(LOOPBACK)), own)
    names = {item.address: name for name, known in psutil.net_if_addrs().items() for item in known}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", names[own])
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={names[own]}")  # a bare eth1 is eth10, too
    processes.awaited[:] = [f"the ranks do not connect by {os.environ['GLOO_SOCKET_IFNAME']} (GLOO_SOCKET_IFNAME)"]


def address_towards(host: str) -> str:
    """This machine's address in what it sends to another; nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]

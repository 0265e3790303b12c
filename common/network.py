"""By which network interface the machines of a run reach each other."""

import os
import socket

import psutil
import torch.distributed as dist

LOOPBACK = ("127.", "::1")


def find_interface(store: dist.Store, rank: int, size: int) -> None:
    """gloo and NCCL take the one that reaches MASTER_ADDR, unless the user knows better, or none is known.

    gloo would resolve the host name, often to 127.0.0.1. So may MASTER_ADDR be, on its own machine.
    """
    own = address_towards(os.environ["MASTER_ADDR"]) if size > 1 else "127.0.0.1"
    store.set(f"address/{rank}", own)
    if own.startswith(LOOPBACK):
        addresses = (store.get(f"address/{other}").decode() for other in range(size))
        own = next((address_towards(other) for other in addresses if not other.startswith(LOOPBACK)), own)
    name = interface_of(own)
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # a bare eth1 is eth10, too


def interface_of(address: str) -> str | None:
    """The interface that has this address; None where the system does not list it, as in some sandboxes."""
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

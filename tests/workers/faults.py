"""Run by torchrun: something goes wrong on rank 1 while rank 0 waits for it in a collective.

python tests/workers/faults.py raise | stall | sigkill | once | elsewhere | ctrl-c | sleep
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil

from common.distributed import all_reduce, init_world
from common.ending import reached, sign_of_life
from common.progress import say
from common.script import handle_signals, run


def main(fault: str) -> None:
    world = init_world(stall_minutes=8 / 60 if fault == "stall" else 30)
    all_reduce([1.0])
    sign_of_life()  # the ranks' timers start together, however long their start took
    if fault in ("ctrl-c in a step", "sigkill", "stall"):
        handle_signals()  # as scripts do: torchrun's SIGTERM does not end a rank at once
    if world.rank == world.size - 1:
        print("fault", flush=True)
        if fault == "raise":
            raise RuntimeError("the sky has fallen")
        if fault == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        # in the first attempt
        if fault == "once" and not (mark := Path(os.environ["MARK"])).exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        # what would end other machines' ranks if these were in a collective
        if fault == "elsewhere":
            raise ValueError("a full disk")
        if fault == "sockets":
            print(
                *(c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"),
                flush=True,
            )
            return
    if fault == "once":
        say(f"sum {all_reduce([1.0])} by {os.environ['GLOO_SOCKET_IFNAME']}")
        return
    if fault.startswith("ctrl-c"):
        reached["step"] = 3
    if fault == "ctrl-c":
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    while fault in ("elsewhere", "ctrl-c", "ctrl-c in a step", "sleep") or (
        fault == "stall" and world.rank == 1
    ):
        time.sleep(600)  # nobody calls sign_of_life
    sign_of_life()
    all_reduce([1.0])


if __name__ == "__main__":
    # ignored by what a shell has started with &
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run(main, sys.argv[1])

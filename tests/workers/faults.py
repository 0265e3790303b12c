"""Run by torchrun: something goes wrong on rank 1 while rank 0 waits for it in a collective.

python tests/workers/faults.py raise | stall | sigkill
"""

import os
import signal
import sys
import time

from common.distributed import all_reduce, init_world, run, sign_of_life


def main(fault: str) -> None:
    world = init_world(stall_minutes=3 / 60 if fault == "stall" else 30)
    all_reduce([1.0])
    if world.rank == 1:
        print("fault", flush=True)
        if fault == "raise":
            raise RuntimeError("the sky has fallen")
        if fault == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            time.sleep(1)  # hangs; nobody calls sign_of_life
    sign_of_life()
    all_reduce([1.0])


if __name__ == "__main__":
    run(main, sys.argv[1])

"""Run by torchrun with a folder and --profile-steps: a loop without a model, one rank slower than
the others.

Prints the metrics of its steps, 2 to 4, on rank 0. In the step with the number `stop_at` one rank
gets a SIGTERM.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from common.distributed import all_reduce, init_world
from common.progress import say
from common.script import handle_signals, requested_exit_code, run
from common.steps import Stopwatch, profiled

SLOW_RANK, SLOW_S = 1, 0.4


def main(folder: str, asked: str, stop_at: str = "") -> None:
    world = init_world()
    handle_signals()
    metrics = []
    for step in profiled(range(1, 4), asked or None, Path(folder), world):
        watch = Stopwatch()
        with watch("rollout"):
            torch.full((3,), float(step + 1)).cumsum(0)
            time.sleep(SLOW_S * (world.rank == SLOW_RANK))
        if world.rank:
            with watch("judge"):
                pass
        with watch("update"):  # where the others wait
            all_reduce([1.0])
        if f"{step}" == stop_at and world.rank == SLOW_RANK:
            os.kill(os.getpid(), signal.SIGTERM)
        if status := requested_exit_code():
            raise SystemExit(status)
        metrics.append(watch.metrics(world.device))
    say(json.dumps(metrics))


if __name__ == "__main__":
    run(main, *sys.argv[1:])

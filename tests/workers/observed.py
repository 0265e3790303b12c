"""grpo.py with its flags, on ranks each of which finds another machine's memory free, and with a
copy of its folder when it has logged a step.

FREE_GB=rank 0's,rank 1's: in gigabytes for a rank, as on machines of different sizes, where the
number of tokens of a micro-batch must be one. COPY=folder, LOGGED_STEP=number: the copy is what a
kill at that moment leaves behind, without a run that is killed; it is made by rank 0, which writes
the folder.
"""

import os
import shutil

import common.memory.plan
import grpo
from common.flags import parse
from common.logger import Logger
from common.processes import ranks_here
from common.script import run


def log(self: Logger, step: int, metrics: dict[str, float]) -> None:
    log_step(self, step, metrics)
    if self.is_main and step == int(os.environ["LOGGED_STEP"]):
        shutil.copytree(self.path.parent, os.environ["COPY"])


log_step, Logger.log = Logger.log, log

if __name__ == "__main__":
    rank = int(os.environ.get("RANK", "0"))
    free_gb = float(os.environ["FREE_GB"].split(",")[rank])
    common.memory.plan.free_memory = lambda: free_gb * 1e9 * ranks_here()
    args, demo = parse(grpo.Args, grpo.DEMO, grpo.__doc__)
    run(grpo.main, args, demo)

"""grpo.py with its flags, on ranks each of which finds another machine's memory free: FREE_GB=rank
0's,rank 1's.

In gigabytes for a rank. As on machines of different sizes, where the number of tokens of a
micro-batch must be one.
"""

import os

import common.memory.plan
import grpo
from common.flags import parse
from common.processes import ranks_here
from common.script import run

if __name__ == "__main__":
    rank = int(os.environ.get("RANK", "0"))
    free_gb = float(os.environ["FREE_GB"].split(",")[rank])
    common.memory.plan.free_memory = lambda: free_gb * 1e9 * ranks_here()
    args, demo = parse(grpo.Args, grpo.DEMO, grpo.__doc__)
    run(grpo.main, args, demo)

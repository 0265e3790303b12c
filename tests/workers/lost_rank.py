"""grpo.py with its flags, but the last rank raises, or is killed, in the middle of a rollout.

python tests/workers/lost_rank.py raise | sigkill FLAGS
"""

import os
import signal
import sys

import grpo
from common.distributed import run
from common.engine.vllm import VllmEngine
from common.flags import parse

fault, steps, real = sys.argv.pop(1), [], VllmEngine.step


def step(engine):
    steps.append(1)
    if len(steps) == 10 and os.environ["RANK"] != "0":
        print("fault", flush=True)
        if fault == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the sky has fallen")
    return real(engine)


if __name__ == "__main__":
    VllmEngine.step = step
    args, _ = parse(grpo.Args, grpo.DEMO, grpo.__doc__)
    run(grpo.main, args)

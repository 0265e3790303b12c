"""grpo.py with its flags, but the last rank raises, is killed, or sees another token, in the middle
of a rollout.

python tests/workers/lost_rank.py raise | sigkill | token FLAGS
"""

import os
import signal
import sys

import grpo
from common.engine.vllm import VllmEngine
from common.flags import parse
from common.script import run

fault, steps, real = sys.argv.pop(1), [], VllmEngine.step


def step(engine):
    steps.append(1)
    if len(steps) == 10 and os.environ["RANK"] != "0":
        print("fault", flush=True)
        if fault == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "raise":
            raise ValueError("the sky has fallen")
    finished = real(engine)
    for _, (first, *_) in finished if fault == "token" and os.environ["RANK"] != "0" else ():
        first.token_ids[0] += 1
    return finished


if __name__ == "__main__":
    VllmEngine.step = step
    args, _ = parse(grpo.Args, grpo.DEMO, grpo.__doc__)
    run(grpo.main, args)

"""grpo.py with its flags, on ranks of which the second takes its time to sample, and with a reward
that does (kinds.py)."""

import os
import random
import time

import grpo
from common.flags import parse
from common.rollout.rollouts import Rollouts
from common.script import run


def sample(self: Rollouts, prompts, step: int, watch) -> list:
    if self.world.rank == 1:
        time.sleep(random.random())
    return sample_at_once(self, prompts, step, watch)


sample_at_once, Rollouts.sample = Rollouts.sample, sample

if __name__ == "__main__":
    os.environ["PAUSES"] = ""  # reward workers inherit it
    args, demo = parse(grpo.Args, grpo.DEMO, grpo.__doc__)
    run(grpo.main, args, demo)

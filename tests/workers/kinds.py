"""Rewards in which answers of a few tokens differ, so that short runs have gradients."""

import os
import random
import time


def kinds(solution_str: str, **_) -> int:
    return len(set(solution_str))


def even(solution_str: str, **_) -> float:
    """Half of groups of two are flat. With PAUSES in the environment it takes its time."""
    if "PAUSES" in os.environ:
        time.sleep(0.03 * random.random())
    return float(len(set(solution_str)) % 2 == 0)

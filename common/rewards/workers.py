"""Reward functions in killable processes: a hang, a crash or a memory hog costs its sample, and not the step."""

from collections.abc import Callable, Mapping, Sequence

from common.rewards import load_reward_function, reward_function, score_response
from common.workers import Pool

Job = tuple[str, str, object, Mapping | None]  # data_source, text, ground_truth, extra_info


class RewardWorkers(Pool):
    """`workers` processes that score with the function FILE.py:NAME, or without one with the built-in functions.

    Deadline, memory limit and errors are those of `Pool`; a missing file or an error in it shows as a ValueError.
    """

    def __init__(self, function_spec: str | None, workers: int, timeout_s: float, memory_gib: float = 4.0):
        super().__init__("reward", make_scorer, function_spec or "", workers, timeout_s, memory_gib)

    def score(self, jobs: Sequence[Job]) -> list[dict[str, float | str]]:
        """What `score_response` makes of each job, in their order; if it failed, {"error": why} without a "score"."""
        return self.run(jobs)


def make_scorer(function_spec: str) -> Callable[[Job], dict]:
    function = load_reward_function(function_spec) if function_spec else None
    return lambda job: score_response(function or reward_function(job[0]), *job)

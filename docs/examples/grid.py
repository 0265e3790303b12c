"""A grid world, as an environment: --environment docs/examples/grid.py:Grid"""

from typing import Literal

SIDE = 4
STEPS = {"up": (0, 1), "down": (0, -1), "left": (-1, 0), "right": (1, 0)}


class Grid:
    """Walk to the goal. The row gives where (extra_info: start and goal, as [x, y])."""

    def reset(self, extra_info: dict, **row) -> str:
        self.at, self.goal = list(extra_info["start"]), list(extra_info["goal"])
        return f" You are at {self.at}, the goal is {self.goal}."

    def move(self, direction: Literal["up", "down", "left", "right"]) -> str:
        """Walk one cell.

        Args:
            direction: Where to; up adds 1 to the second number, right to the first.
        """
        if direction not in STEPS:
            raise ValueError(f"direction is one of {', '.join(STEPS)}")
        there = [at + step for at, step in zip(self.at, STEPS[direction])]
        if not all(0 <= place < SIDE for place in there):
            return f"a wall: still at {self.at}"
        self.at = there
        return f"at {self.at}"

    @property
    def done(self) -> bool:
        return self.at == self.goal

    def reward(self) -> float:
        return float(self.done)

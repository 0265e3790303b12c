"""A grid world, as an environment: --environment docs/examples/grid.py:Grid"""

SIDE = 3


class Grid:
    """Walk to the goal on a shortest way: the first move that comes no nearer ends the game.

    The row gives where (extra_info: start and goal, as [x, y]). The reward is the share of the way
    that was walked.
    """

    def reset(self, extra_info: dict, **row) -> str:
        self.at, self.goal = list(extra_info["start"]), list(extra_info["goal"])
        self.way, self.walked, self.lost = self._distance(), 0, False
        return f" It is {self._compass()}."

    def up(self) -> str:
        """Walk one cell up."""
        return self._walk(0, 1)

    def down(self) -> str:
        """Walk one cell down."""
        return self._walk(0, -1)

    def left(self) -> str:
        """Walk one cell to the left."""
        return self._walk(-1, 0)

    def right(self) -> str:
        """Walk one cell to the right."""
        return self._walk(1, 0)

    def _walk(self, x: int, y: int) -> str:
        before = self._distance()
        self.at = [self.at[0] + x, self.at[1] + y]
        self.lost = self._distance() > before
        self.walked += not self.lost
        return self._compass()

    def _distance(self) -> int:
        return sum(abs(goal - at) for goal, at in zip(self.goal, self.at))

    def _compass(self) -> str:
        """Where the goal is, such as "2 right, 1 up"."""
        right, up = (goal - at for goal, at in zip(self.goal, self.at))
        ways = {"right": right, "left": -right, "up": up, "down": -up}
        return ", ".join(f"{cells} {way}" for way, cells in ways.items() if cells > 0) or "here"

    @property
    def done(self) -> bool:
        return self.lost or self.at == self.goal

    def reward(self) -> float:
        return self.walked / self.way

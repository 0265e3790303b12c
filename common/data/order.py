"""Which rows each step takes."""

from math import ceil

import numpy as np


def steps_of(epochs: float, num_rows: int, rows_per_step: int) -> int:
    """Steps for so many passes over the data; the last step may begin another pass."""
    # rounded: 0.07 * 100 is 7.000000000000001, and `ceil` would make 8 of it
    steps = round(epochs * num_rows / rows_per_step, 6)
    return max(1, ceil(steps))


class RowOrder:
    """Which rows each step takes: a new permutation per epoch, drawn from (seed, epoch).

    Its only state is the number of rows taken so far. fingerprint: of the rows.
    """

    def __init__(self, num_rows: int, seed: int, fingerprint: str = ""):
        if num_rows < 1:
            raise ValueError("need at least 1 row")
        self.num_rows = num_rows
        self.seed = seed
        self.fingerprint = fingerprint
        self.consumed = 0  # rows so far, over all epochs
        self._order = np.empty(0, dtype=np.int64)  # the permutation of `_order_epoch`
        self._order_epoch = -1

    @property
    def epoch(self) -> float:
        return self.consumed / self.num_rows

    def next(self, count: int) -> list[int]:
        """The next `count` positions; at the end of an epoch the next permutation follows."""
        positions: list[int] = []
        while len(positions) < count:
            epoch, start = divmod(self.consumed, self.num_rows)
            if epoch != self._order_epoch:
                generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
                self._order = generator.permutation(self.num_rows)
                self._order_epoch = epoch
            taken = self._order[start : start + count - len(positions)]
            positions += taken.tolist()
            self.consumed += len(taken)
        return positions

    def state_dict(self) -> dict[str, int | str]:
        return {
            "consumed": self.consumed,
            "seed": self.seed,
            "num_rows": self.num_rows,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict) -> None:
        """SystemExit if the saved position belongs to another data set or seed."""
        remedy = "or give another --output-dir or --resume never"
        for name in ("num_rows", "seed"):
            saved = state[name]
            now = getattr(self, name)
            if saved != now:
                raise SystemExit(
                    f"--resume: {name} of the training data was {saved}, now it is {now}; go on "
                    f"with the same flags, {remedy}"
                )
        saved = state["fingerprint"]
        if saved != self.fingerprint:
            raise SystemExit(
                "--resume: the training data has other rows than before (fingerprint "
                f"{saved}, now {self.fingerprint}); go on with the same files, {remedy}"
            )
        self.consumed = state["consumed"]

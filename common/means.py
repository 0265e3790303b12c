"""Metrics of a step: each rank adds sums and counts, which are reduced over all ranks once, to
means."""

from torch import Tensor

from common.distributed import gather_objects, world_size


class Means:
    """Sums with their counts, by the name of their metric. Tensors stay on their device until
    `reduce`."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor | float] = {}
        self.counts: dict[str, float] = {}
        self.totals: dict[str, float] = {}

    def add(self, name: str, total: Tensor | float, count: float = 1.0) -> None:
        """`total` is the sum of `count` values."""
        total = total.detach().double() if isinstance(total, Tensor) else total
        self.sums[name] = self.sums.get(name, 0.0) + total
        self.counts[name] = self.counts.get(name, 0.0) + count

    def add_total(self, name: str, value: float, on_every_rank: bool = False) -> None:
        """A metric that is a sum and no mean; a value that all ranks know counts once."""
        self.totals[name] = self.totals.get(name, 0.0) + value / (
            world_size() if on_every_rank else 1
        )

    def merge(self, other: "Means") -> None:
        for name, total in other.sums.items():
            self.add(name, total, other.counts[name])
        for name, value in other.totals.items():
            self.add_total(name, value)

    def reduce(self) -> dict[str, float]:
        """{name: mean or total over all ranks}; a mean of nothing is left out. All ranks call it
        together."""
        self.sums = {name: float(total) for name, total in self.sums.items()}
        whole = Means()
        # ranks may hold different names: one without episodes has none
        for part in gather_objects(self):
            whole.merge(part)
        means = {
            name: total / whole.counts[name]
            for name, total in whole.sums.items()
            if whole.counts[name]
        }
        return means | whole.totals

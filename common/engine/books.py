"""The accounts of a weight sync."""

from common.engine.protocol import Weights


class WeightBooks:
    """Which weights an engine expects, was sent, and holds.

    Log-probs do not reveal a stale weight: at lr 1e-6 they move by less than the rounding of bf16.
    """

    def __init__(self, expected: dict[str, int]):
        # step of the weights that the engine holds; None before the first sync
        self.step: int | None = None
        self.expected = expected  # {name: number of elements} of all weights of the engine
        self.sent: set[str] = set()

    def record(self, weights: Weights) -> Weights:
        """Pass the weights on, and count them. Until `close` the engine holds no usable weights.
        RuntimeError for a weight that is not expected, has another size, or was sent before."""
        self.step = None
        self.sent = set()
        for name, tensor in weights:
            size = tensor.numel()
            problem = ""
            if name in self.sent:
                problem = "sent twice"
            elif size != self.expected.get(name):
                problem = f"expected {self.expected.get(name, 'no such name')}"
            if problem:
                raise RuntimeError(f"weight sync: {name} with {size} elements: {problem}")
            self.sent.add(name)
            yield name, tensor

    def forget(self) -> None:
        """The engine holds no weights until the next sync."""
        self.step = None

    def close(self, step: int) -> None:
        """The engine now holds the weights of step `step`. RuntimeError if some were not sent."""
        missing = sorted(self.expected.keys() - self.sent)
        if missing:
            others = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
            raise RuntimeError(f"weight sync: missing {', '.join(missing[:10])}{others}")
        self.step = step

    def check(self, step: int) -> None:
        """RuntimeError unless the engine holds the weights of step `step`."""
        if self.step != step:
            raise RuntimeError(
                f"the engine holds the weights of optimizer step {self.step}, the trainer is at "
                f"{step}: rollouts would be stale; call sync_weights first"
            )

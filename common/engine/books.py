"""What both engines have: how they are started, how to sample, what was sampled, the books of a
weight sync."""

import torch

from common.engine.protocol import Weights


class WeightBooks:
    """Accounts of a weight sync: at lr 1e-6 log-probs move by less than bf16 rounding, and do not
    show a stale one."""

    def __init__(self, expected: dict[str, int]):
        # of the weights that the engine holds; None before the first sync
        self.step: int | None = None
        self.expected = expected  # {name: number of elements} of all that the engine must get
        self.sent: set[str] = set()

    def record(self, weights: Weights, dtype: torch.dtype) -> Weights:
        """Pass the weights on in the engine's dtype, and count. Until `close`, the engine holds no
        usable weights."""
        self.step, self.sent = None, set()
        for name, tensor in weights:
            if name in self.sent or tensor.numel() != self.expected.get(name):
                expected = (
                    "sent twice"
                    if name in self.sent
                    else f"expected {self.expected.get(name, 'no such name')}"
                )
                raise RuntimeError(
                    f"weight sync: {name} with {tensor.numel()} elements: {expected}"
                )
            self.sent.add(name)
            yield name, tensor.to(dtype)

    def close(self, step: int) -> None:
        """All that was expected must have been sent; the engine then holds the weights of optimizer
        step `step`."""
        if missing := sorted(self.expected.keys() - self.sent):
            raise RuntimeError(f"weight sync: missing {', '.join(missing)}")
        self.step = step

    def check(self, step: int) -> None:
        if self.step != step:
            held = (
                f"the engine holds the weights of optimizer step {self.step}, the trainer "
                f"is at {step}"
            )
            raise RuntimeError(f"{held}: rollouts would be stale; call sync_weights first")

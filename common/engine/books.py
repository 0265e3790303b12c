"""What both engines have: how they are started, how to sample, what was sampled, the books of a
weight sync."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.distributed import World
from common.pictures import Media
from common.vision import Vision

Weights = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is started with."""

    path: str  # folder of the model
    dtype: torch.dtype
    world: World
    end_ids: list[int]  # tokens that end a response
    max_model_len: int  # longest prompt with its response (tokens)
    ranks: int = 1  # consecutive ones that share it
    memory_gib: float = 1.0  # of the KV cache
    sleep_level: int = 1  # see --sleep-level
    trust_remote_code: bool = False
    vision: Vision | None = None
    max_images: int = 16  # of a prompt with its response


@dataclass(slots=True)
class Request:
    """What is asked of an engine: `sampling.n` completions, of which sample j is drawn with seed +
    j."""

    key: int
    prompt_ids: list[int]  # with one placeholder for each token of each of `media`
    sampling: "Sampling"
    seed: int
    # the optimizer step that the caller believes the engine to be at: RuntimeError otherwise
    weights_step: int
    media: Sequence[Media] = ()


@dataclass(slots=True)
class Completion:
    token_ids: list[int]  # as sampled, the end token included
    logprobs: list[float]  # log-prob of each sampled token, after temperature
    # "stop" (an end token), "length", or "vision_token": a placeholder was next, and is left out
    finish_reason: str

    def without_placeholder(self, vision: Vision | None) -> "Completion":
        """A policy may sample the token that stands for a picture; there is none, and this ends
        before it."""
        if vision and self.token_ids and self.token_ids[-1] in vision.forbidden_ids:
            return Completion(self.token_ids[:-1], self.logprobs[:-1], "vision_token")
        return self


@dataclass(frozen=True)
class Sampling:
    """How to sample. Training wants the plain distribution, softmax(logits / temperature): no flag
    offers another."""

    n: int = 1  # completions per prompt
    max_tokens: int = 256
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0


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

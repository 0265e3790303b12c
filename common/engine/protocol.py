"""What an engine is: how it is started, and what it does."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from common.distributed import World
from common.flags import SLEEP_LEVEL
from common.types import Completion, Request
from common.vision import Vision

Weights = Iterable[tuple[str, Tensor]]  # (name, whole tensor)


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is started with."""

    path: str  # folder of the model
    dtype: torch.dtype
    world: World
    end_ids: list[int]  # tokens that end a response
    max_model_len: int  # longest prompt with its response (tokens)
    ranks: int = 1  # number of consecutive ranks that share it
    memory_gib: float = 1.0  # of the KV cache
    num_samples: int = 1  # samples of one training step that it has under way together
    sleep_level: int = SLEEP_LEVEL  # see --sleep-level
    trust_remote_code: bool = False
    vision: Vision | None = None
    max_images: int = 16  # of a prompt with its response
    args: Mapping[str, Any] = field(default_factory=dict)  # --engine-args, checked


class Engine(Protocol):
    """Samples completions with a copy of the policy's weights.

    One step of training: wake("weights"), sync_weights, wake("kv_cache"), then `submit` requests
    and call `step` while the engine is busy, then sleep. Out of memory in wake, sync_weights or
    step is SystemExit with the flags that help.
    """

    dtype: torch.dtype  # of its weights
    # how the weights of a sync are named and divided: as in the checkpoint, or as in transformers'
    # modules, which fuse experts that most checkpoints have one by one
    weight_names: Literal["checkpoint", "modules"]

    def wake(self, part: str) -> None:
        """Get device memory back. part: "weights" before a sync, "kv_cache" before sampling."""

    def sleep(self) -> None:
        """Free device memory, as far as --sleep-level allows, until the next `wake`."""

    def sync_weights(self, weights: Weights, step: int) -> None:
        """Replace all weights by those of step `step`. `weights` is lazy, and is consumed once;
        parameters are in `dtype`, buffers in their own. RuntimeError if a weight is missing,
        unknown, sent twice or of another size."""

    def submit(self, request: Request) -> None:
        """Queue a request for `request.sampling.n` completions. RuntimeError if the engine does not
        hold the weights of step `request.weights_step`."""

    @property
    def busy(self) -> bool:
        """Whether a request is not complete yet."""

    def step(self) -> list[tuple[int, list[Completion]]]:
        """Work on the requests for a while. Returns (key, completions) of the requests that were
        completed; each completion has the log-probs of its tokens after temperature and top-p."""


def without_placeholder(completion: Completion, placeholders: Collection[int]) -> Completion:
    """The completion, without its last token if that is a placeholder of a picture: there is no
    picture for one that was sampled."""
    token_ids = completion.token_ids
    if token_ids and token_ids[-1] in placeholders:
        return Completion(token_ids[:-1], completion.logprobs[:-1], "vision_token")
    return completion

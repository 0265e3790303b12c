"""A script with its flags, on kernels that add in one order: `deterministic.py grpo.py --flags
...`."""

import os
import runpy
import sys

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

import torch

if __name__ == "__main__":
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.enable_mem_efficient_sdp(False)  # warns, and adds in any order all the same
    torch.backends.cuda.enable_cudnn_sdp(False)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")

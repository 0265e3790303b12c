"""A script with its flags, on kernels that add in one order: `deterministic.py grpo.py --flags ...`."""

import os
import runpy
import sys

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

import torch

if __name__ == "__main__":
    torch.use_deterministic_algorithms(True, warn_only=True)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")

"""A script with its flags, and with a rehearsal as on a GPU.

    python tests/workers/rehearsed.py grpo.py FLAGS...

OUT_OF_MEMORY="TOKENS RANKS" in the environment: on the first so many ranks memory runs out in the
backward of a micro-batch of more tokens.
"""

import importlib
import os
import sys
from pathlib import Path

import torch

from common import rehearsal
from common.flags import parse
from common.script import run


def limited(backward, max_tokens: int, num_ranks: int):
    def limited_backward(model, *arguments, **options):
        def check(_module, gradients) -> None:
            if gradients[0].shape[1] > max_tokens and int(os.environ.get("RANK", 0)) < num_ranks:
                raise torch.OutOfMemoryError("injected")

        policy = model[0] if isinstance(model, torch.nn.ModuleList) else model  # with its teacher
        base_model = policy.model.base_model
        layers = getattr(base_model, "language_model", base_model).layers
        hook = layers[0].register_full_backward_pre_hook(check)
        try:
            return backward(model, *arguments, **options)
        finally:
            hook.remove()

    return limited_backward


if __name__ == "__main__":
    script = importlib.import_module(Path(sys.argv.pop(1)).stem)
    rehearsal.is_worthwhile = lambda device: True
    rehearsal.PATIENCE_S = 2.0
    if "OUT_OF_MEMORY" in os.environ:
        max_tokens, num_ranks = map(int, os.environ["OUT_OF_MEMORY"].split())
        script.backward = limited(script.backward, max_tokens, num_ranks)
    args, is_demo = parse(script.Args, script.DEMO, script.__doc__)
    run(script.main, args, is_demo)

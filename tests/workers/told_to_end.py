"""grpo.py with its flags, but in the backward of step 1 it gets the signal that torchrun sends."""

import os
import signal

import grpo
from common import rehearsal
from common.flags import parse
from common.script import run

real = grpo.backward


def backward(*arguments, **options):
    grpo.backward = real
    os.kill(os.getpid(), signal.SIGTERM)
    return real(*arguments, **options)


if __name__ == "__main__":
    rehearsal.is_worthwhile = lambda device: False  # it would be the first backward
    grpo.backward = backward
    args, _ = parse(grpo.Args, grpo.DEMO, grpo.__doc__)
    run(grpo.main, args)

"""Prints what a process has been given, as JSON: a forked rank must not differ from a fresh
interpreter."""

import json
import os
import random
import signal
import sys
import threading

import numpy as np
import torch

if __name__ == "__main__":
    signals = {
        signal.Signals(n).name: str(signal.getsignal(n))
        for n in signal.valid_signals()
        if n < signal.SIGRTMIN
    }
    seen = {
        "argv": sys.argv,
        "command": sys.orig_argv[-len(sys.argv) :],
        "path": sys.path,
        "name": __name__,
        "flags": str(sys.flags),
        "cwd": os.getcwd(),
        "environment": {name: value for name, value in os.environ.items() if name != "LC_CTYPE"},
        "signals": signals,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "umask": os.umask(0),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": [
            len(os.listdir("/proc/self/task")),
            threading.active_count(),
            torch.get_num_threads(),
        ],
        "interop": torch.get_num_interop_threads(),
        "dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "group": torch.distributed.is_initialized(),
    }
    print(json.dumps(seen))
    print(json.dumps([random.random(), np.random.rand(), torch.rand(1).item()]))
    if len(sys.argv) > 1:
        raise {
            "exit": SystemExit(3),
            "text": SystemExit("error: a text"),
            "raise": KeyError("answer"),
        }[sys.argv[1]]

"""grpo.py with its flags, whose run folder is copied when step LOGGED_STEP has been logged, to
COPY: what a kill at that moment leaves behind, without a run that is killed.

Rank 0 copies where it has written the step, so that no other file of the run is half written.
"""

import os
import shutil

import grpo
from common.flags import parse
from common.logger import Logger
from common.script import run


def log(self: Logger, step: int, metrics: dict[str, float]) -> None:
    log_step(self, step, metrics)
    if self.is_main and step == int(os.environ["LOGGED_STEP"]):
        shutil.copytree(self.path.parent, os.environ["COPY"])


log_step, Logger.log = Logger.log, log

if __name__ == "__main__":
    args, demo = parse(grpo.Args, grpo.DEMO, grpo.__doc__)
    run(grpo.main, args, demo)

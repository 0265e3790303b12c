"""Run by torchrun: a script on the demo of an embedded policy that sees, but for the number of
rows: most of a short run of one rank would be pictures that nobody looks at.

few_rows.py SCRIPT ...
"""

import runpy
import sys
from pathlib import Path

from common.assets.build import mosaic

if __name__ == "__main__":
    mosaic.RL_ROWS, mosaic.EVAL_ROWS = 64, 16
    sys.argv = [str(Path(__file__).parents[2] / sys.argv[1]), *sys.argv[2:]]
    runpy.run_path(sys.argv[0], run_name="__main__")

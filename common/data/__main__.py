"""Where `python -m common.data` has gone."""

import sys

print("it is now: python -m common.look FILE [--tokenizer NAME] [--rows 2]", file=sys.stderr)
sys.exit(2)

"""python -m common.score FILE: scores responses that stand in a file; prints a table, writes a verdict on each."""

import tyro

from common.files import command_line, user_errors
from common.printing import guard_output
from common.rewards.offline import Scoring, score_file

if __name__ == "__main__":
    flags = tyro.cli(Scoring, args=command_line(), prog="python -m common.score", description=__doc__)
    guard_output()
    with user_errors():
        score_file(flags)

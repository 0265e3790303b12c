"""python -m common.score FILE: scores responses that stand in a file; prints a table, writes a
verdict on each."""

from common.files import user_errors
from common.flags import call_program
from common.printing import guard_output
from common.rewards.offline import Scoring, score_file

if __name__ == "__main__":
    flags = call_program(Scoring, "common.score", __doc__)
    guard_output()
    with user_errors():
        score_file(flags)

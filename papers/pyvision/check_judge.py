"""Ask each judge of JUDGE_URLS for a right and a wrong pair, as a run does at its first row.

JUDGE_URLS=http://node7:18901/v1 python -m papers.pyvision.check_judge
"""

import asyncio

import common.packages  # noqa: F401, one line if a package is missing

from common.files import user_errors
from common.flags import call_program
from papers.pyvision.judge import open_judge


def main() -> None:
    """SystemExit if one judges wrongly, or none answers."""
    with user_errors("JUDGE_URLS"):
        judge = open_judge()
        judge.trusted = False  # whatever JUDGE_PROBE says
        asyncio.run(judge.probe())
    print("a judge answers, and judges both pairs rightly")


if __name__ == "__main__":
    call_program(main, "papers.pyvision.check_judge", __doc__)

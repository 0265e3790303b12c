"""Helpers shared by the four scripts: everything that is not the mathematics of an algorithm."""

import sys

BROKEN = ("shared object", "torchvision::")  # what is said of libraries that do not fit


def advice(error: BaseException) -> str:
    """What to do about an import that fails; "" for other errors. Of ours: users' own files raise ValueErrors."""
    broken = isinstance(error, ImportError) or any(word in str(error) for word in BROKEN)
    return "Install what requirements.txt (-cpu, -v100) pins; python -m common.doctor says what works" * broken


def last_words(kind: type[BaseException], error: BaseException, trace) -> None:
    sys.__excepthook__(kind, error, trace)
    if advice(error):
        print(advice(error), file=sys.stderr)


sys.excepthook = last_words  # where a script's own imports fail

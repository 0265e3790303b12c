"""`python -m common.prepare.NAME` makes a data set ready for the scripts."""

from pathlib import Path


def is_hub(source: str, repository: str) -> bool:
    """Whether --source means the hub: by that word, or by the id where no folder has its name."""
    return source == "hub" or (source == repository and not Path(source).exists())

"""`python -m common.prepare.NAME` writes a data set in verl's format, or a model."""

from pathlib import Path


def is_hub(source: str, repository: str) -> bool:
    """Whether --source means the hub: by that word, or by the id where no folder has its name."""
    return source == "hub" or (source == repository and not Path(source).exists())

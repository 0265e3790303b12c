"""The data that embedded models bring along, generated into a run's folder."""

import importlib
from pathlib import Path


def embedded_data(
    name: str, folder: Path, write: bool, supervised: bool = False
) -> tuple[str, str]:
    """(training file, evaluation file) of a model's task; one rank is to `write` them, the others
    wait for it."""
    if write:
        generator = importlib.import_module(f"common.assets.build.{name.replace('-', '_')}")
        (generator.write_supervised_data if supervised else generator.write_demo_data)(folder)
    suffix = "jsonl" if supervised else "parquet"
    return str(folder / f"train.{suffix}"), str(folder / f"eval.{suffix}")

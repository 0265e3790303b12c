"""The data of embedded models' tasks, generated into a run's folder."""

import importlib
from pathlib import Path


def embedded_data(
    name: str, folder: Path, write: bool, supervised: bool = False
) -> tuple[str, str]:
    """(training file, evaluation file) of a model's task. Only the rank with `write` writes them;
    the others wait for it elsewhere."""
    if write:
        builder = importlib.import_module(f"common.assets.build.{name.replace('-', '_')}")
        if supervised:
            builder.write_supervised_data(folder)
        else:
            builder.write_demo_data(folder)
    suffix = "jsonl" if supervised else "parquet"
    return str(folder / f"train.{suffix}"), str(folder / f"eval.{suffix}")

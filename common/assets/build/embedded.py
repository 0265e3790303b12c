"""The data that embedded models bring along, generated into a run's folder."""

import importlib
from dataclasses import replace
from pathlib import Path

from common.distributed import World, barrier
from common.flags import EMBEDDED, Data


def with_embedded_data(
    data: Data, model: str, folder: Path, world: World, *, eval_only: bool = False
) -> Data:
    """`data`; with files of the model's own task if the model is embedded and the user gives no
    training files (with `eval_only`, no evaluation files). All ranks call it together.
    """
    files = data.eval_data if eval_only else data.train_data
    if model not in EMBEDDED or files:
        return data
    train_files, held_out = embedded_data(model, folder, world)
    return replace(data, train_data=train_files, eval_data=data.eval_data or held_out)


def embedded_data(
    name: str, folder: Path, world: World, supervised: bool = False
) -> tuple[str, str]:
    """(training file, evaluation file) of a model's task. Rank 0 writes them, the others wait."""
    if world.is_main:
        generator = importlib.import_module(f"common.assets.build.{name.replace('-', '_')}")
        if supervised:
            generator.write_supervised_data(folder)
        else:
            generator.write_demo_data(folder)
    barrier()
    suffix = "jsonl" if supervised else "parquet"
    return str(folder / f"train.{suffix}"), str(folder / f"eval.{suffix}")

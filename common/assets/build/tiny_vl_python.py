"""Rows of the demo with the embedded policy that looks by programs; papers/pyvision/tiny_policy.py
builds it."""

from pathlib import Path

from common.assets.build.mosaic import write_rows

QUESTION = (
    "<image_clue_0><image></image_clue_0>Which digit is on the white tile? Answer in \\boxed{}."
)


def write_demo_data(folder: Path) -> None:
    """train.parquet and eval.parquet in verl's format."""
    write_rows(folder, QUESTION)

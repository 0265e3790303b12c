"""How the shards of a checkpoint are read: tensors alone; what else stands in its files is not executed."""

from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from common.integrity import MetadataUnpickler


class PlainReader(dcp.FileSystemReader):
    """torch's reader, which would unpickle anything that stands in .metadata."""

    def read_metadata(self, *_, **__) -> dcp.Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            return MetadataUnpickler(file).load()


class PlainPlanner(DefaultLoadPlanner):
    """torch's planner, which would unpickle anything for what is no tensor. We ask for tensors alone."""

    def load_bytes(self, read_item, value) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is no tensor")

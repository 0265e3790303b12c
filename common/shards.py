"""Where a run goes on from, which weights are saved, and how they are read: nothing in their files is executed."""

import re
import warnings
from pathlib import Path

from torch import Tensor, nn

from common.distributed import World, broadcast_object, gather_objects, world_size
from common.files import refuse, shorten
from common.integrity import BEGIN_ANEW, MANIFEST, MetadataUnpickler, complete, damage, read_manifest, step_folder
from common.lora import adapters
from common.progress import say
from common.torch_repair import Later

REMEDIES = {  # what to do if a checkpoint is of another one
    "script": "start {}.py, which goes on from it",
    "model": "its architecture is told by config.json; give the --model of its run",
    "LoRA": "give --lora-rank, --lora-alpha, --lora-targets of its run",
    "base": "give the --model of its run, with the same weights",
}
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one rank shares with nobody
dcp, state_dict = Later("torch.distributed.checkpoint"), Later("torch.distributed.checkpoint.state_dict")


def load_shards(shards: dict, folder: Path) -> None:
    """Fill the tensors in place from a step folder. All ranks call it together.

    torch's reader would unpickle anything in .metadata, its planner anything that is no tensor: we ask for tensors.
    """

    class PlainReader(dcp.FileSystemReader):
        def read_metadata(self, *_, **__) -> dcp.Metadata:
            with (Path(self.path) / ".metadata").open("rb") as file:
                metadata = MetadataUnpickler(file).load()
            for stored in metadata.storage_data.values():
                if not re.fullmatch(r"__\d+_\d+\.distcp", stored.relative_path):
                    raise ValueError(f"its tensors are to be in {stored.relative_path!r:.60}, which is no shard of it")
            return metadata

    class PlainPlanner(dcp.DefaultLoadPlanner):
        def load_bytes(self, read_item, value) -> None:
            raise ValueError(f"{read_item.dest_index.fqn} is no tensor")

    dcp.load(shards, storage_reader=PlainReader(folder / "state"), planner=PlainPlanner(), no_dist=world_size() == 1)


def saved_weights(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint has of a model's weights, the tensors themselves: all, or with LoRA those that are trained."""
    state, lora = state_dict.get_model_state_dict(model), any(adapters(model))
    return {name: state[name] for name, p in model.named_parameters() if p.requires_grad} if lora else state


def find_checkpoint(run_dir: Path, resume: str, world: World, identity: dict | None = None) -> Path | None:
    """Folder to resume from, its files verified by all ranks together, each a share. SystemExit with the remedy.

    `--resume auto` takes the run's latest if there is one, `never` none, else a path to a step folder, to a run, or
    to a file that names a step folder beside it (`latest`, `best`). `identity`: what its manifest must say.
    """
    refuse(run_dir.is_file(), f"--output-dir {run_dir} is a file, not a folder")
    if resume == "never":
        return None
    folder = None
    if world.is_main:
        try:
            folder = step_folder(run_dir if resume == "auto" else Path(resume), say)
            if folder is None and resume != "auto":
                raise ValueError(f"no checkpoint there (a step folder has a {MANIFEST} in it)")
        except (ValueError, OSError) as error:
            folder = f"--resume {resume}: {error}"
    folder = broadcast_object(folder)
    refuse(isinstance(folder, str), folder)
    if folder is None:
        return None
    problem = next(filter(None, gather_objects(damage(folder, slice(world.rank, None, world.size)))), None)
    if problem:
        before = [path for path in complete(folder.parent) if path.name < folder.name]
        remedy = f"--resume {before[-1]} goes on from the one before; " if before else ""
        raise SystemExit(f"{folder} {shorten(problem, 200)}: {remedy}{BEGIN_ANEW}".replace("\n", " "))
    manifest = read_manifest(folder)
    for name, value in (identity or {}).items():
        if manifest.get(name) != value:
            told = f"{folder} is of another {name}, {shorten(str(manifest.get(name)), 100)} and not {value}"
            remedy = REMEDIES.get(name, "give the flags of its run").format(manifest.get(name))
            raise SystemExit(f"{told}: {shorten(remedy, 200)}; {BEGIN_ANEW}".replace("\n", " "))
    return folder

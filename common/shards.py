"""Weights and optimizer states in a checkpoint: which are saved, how (as safetensors, in which
nothing can be executed), and where a run goes on from."""

import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from common.distributed import World, broadcast_object, gather_objects, reshard, world_size
from common.files import shorten
from common.lora import adapted_layers
from common.manifest import BEGIN_ANEW, MANIFEST, complete_steps, step_folder, verify_step
from common.optimizer import make_moments
from common.torch_repair import Later

REMEDIES = {  # for a checkpoint of another script, model, ...; {} is the checkpoint's own
    "script": "start {}.py, which goes on from it",
    "model": "its architecture is told by config.json; give the --model of its run",
    "LoRA": "give --lora-rank, --lora-alpha, --lora-targets of its run",
    "base": "give the --model of its run, with the same weights",
}
# about the size of a rank's file: the writer has three copies of it in memory
FILE_BYTES = 2**28
# a single rank needs no process group
warnings.filterwarnings("ignore", message="torch.distributed is disabled")
dcp = Later("torch.distributed.checkpoint")
state_dict = Later("torch.distributed.checkpoint.state_dict")


def save_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write each rank's shards of the tensors into files of its own in `folder`, the state/ of a
    step folder. All ranks call it together."""
    numbers = file_numbers(tensors)
    writer = dcp.HuggingFaceStorageWriter(str(folder), numbers, save_distributed=True)
    dcp.save(tensors, storage_writer=writer, no_dist=world_size() == 1)


def file_numbers(tensors: dict[str, Tensor]) -> dict[str, int]:
    """{name: number, from 1, of the file into which each rank writes its shard}. A file is larger
    than about FILE_BYTES only by its last tensor."""
    numbers: dict[str, int] = {}
    num_bytes = 0  # of all ranks
    for name, tensor in tensors.items():
        numbers[name] = 1 + num_bytes // (FILE_BYTES * world_size())
        num_bytes += tensor.numel() * tensor.element_size()
    return numbers


def load_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fill the tensors in place from a step folder. All ranks call it together."""
    reader = dcp.HuggingFaceStorageReader(str(folder / "state"))
    dcp.load(tensors, storage_reader=reader, no_dist=world_size() == 1)


def saved_tensors(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Tensor]:
    """The tensors of a model that a checkpoint has: no copies, since loading fills them in place.

    Their names are `name`.model.PARAMETER and `name`.optimizer.PARAMETER.exp_avg.
    """
    reshard(model)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # moments may be on their way to the host
    tensors = {f"{name}.model.{path}": tensor for path, tensor in saved_weights(model).items()}
    if optimizer:
        make_moments(optimizer)  # else torch would take a step with zero gradients, and count it
        options = state_dict.StateDictOptions(ignore_frozen_params=any(adapted_layers(model)))
        moments = state_dict.get_optimizer_state_dict(model, optimizer, options=options)
        # without its param_groups: learning rate and betas are those of this run
        for path, state in moments["state"].items():
            for key, tensor in state.items():
                tensors[f"{name}.optimizer.{path}.{key}"] = tensor
    return tensors


def saved_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a model that a checkpoint has, no copies: all of them, tied ones once; with
    LoRA those that are trained."""
    state = state_dict.get_model_state_dict(model)
    if any(adapted_layers(model)):
        return {name: state[name] for name, p in model.named_parameters() if p.requires_grad}
    names = {name for name, _ in model.named_parameters()}
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name not in names:  # tied to one of them
            del state[name]
    return state


def find_checkpoint(
    run_dir: Path, resume: str, world: World, identity: dict | None = None
) -> Path | None:
    """Folder to resume from; None: there is none. All ranks call it together, and each verifies a
    share of the files.

    resume: `auto` takes the run's latest if there is one, `never` none; else a path to a step
    folder, to a run, or to a file that names a step folder beside it (`latest`, `best`).
    identity: what the manifest must have. SystemExit with the remedy for a checkpoint that is
    missing or damaged, or whose manifest has something else.
    """
    if run_dir.is_file():
        raise SystemExit(f"--output-dir {run_dir} is a file, not a folder")
    if resume == "never":
        return None
    folder = None
    problem = ""
    if world.is_main:
        try:
            folder = step_folder(run_dir if resume == "auto" else Path(resume))
            if folder is None and resume != "auto":
                raise ValueError(f"no checkpoint there (a step folder has a {MANIFEST} in it)")
        except (ValueError, OSError) as error:
            problem = f"--resume {resume}: {error}; {BEGIN_ANEW}"
    folder, problem = broadcast_object((folder, problem))
    if problem:
        raise SystemExit(problem)
    if folder is None:
        return None
    manifest = verify_together(folder, world)
    for name, value in (identity or {}).items():
        saved = manifest.get(name)
        if saved != value:
            remedy = REMEDIES.get(name, "give the flags of its run").format(saved)
            message = (
                f"{folder} is of another {name}, {shorten(str(saved), 100)} and not {value}: "
                f"{shorten(remedy, 200)}; {BEGIN_ANEW}"
            )
            raise SystemExit(message.replace("\n", " "))
    return folder


def verify_together(folder: Path, world: World) -> dict:
    """The manifest of a step folder, whose files are verified by all ranks, each a share.
    SystemExit on all of them if the folder is damaged; it names the checkpoint before it."""
    manifest: dict = {}
    problem = ""
    try:
        manifest = verify_step(folder, slice(world.rank, None, world.size))
    except ValueError as error:
        problem = str(error)
    problems = [text for text in gather_objects(problem) if text]
    if problems:
        remedy = ""
        for path in complete_steps(folder.parent):  # in their order: the last one before it stays
            # by number: a longer name is that of a later step
            if (len(path.name), path.name) < (len(folder.name), folder.name):
                remedy = f"--resume {path} goes on from the one before; "
        message = f"{folder} {shorten(problems[0], 200)}: {remedy}{BEGIN_ANEW}"
        raise SystemExit(message.replace("\n", " "))
    return manifest

"""Step folders: which there are, and whether they are what their manifests promise. Without torch."""

import hashlib
import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"  # in the step folder, written last: a folder without it is no checkpoint
BEGIN_ANEW = "--resume never, with another --output-dir, begins anew"
STEP_NAME = re.compile(r"step_\d{6,20}")
METADATA_TYPES = {  # what torch.distributed.checkpoint writes into its .metadata, and no more
    *(f"torch.distributed.checkpoint.metadata.{kind}StorageMetadata" for kind in ("Tensor", "Bytes", "Chunk")),
    *(f"torch.distributed.checkpoint.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "torch.Size",
    *(f"torch.{dtype}" for dtype in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")),
    "collections.OrderedDict",
    "pathlib.PosixPath",
}


class MetadataUnpickler(pickle.Unpickler):
    """Reads what torch writes; UnpicklingError for any other type or function, before it is called."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in METADATA_TYPES:
            raise pickle.UnpicklingError(f"{module}.{name} has no place there")
        return super().find_class(module, name)


def digest(file: Path) -> list:
    """[bytes, SHA-256] of a file."""
    with file.open("rb") as opened:
        return [file.stat().st_size, hashlib.file_digest(opened, "sha256").hexdigest()]


def fingerprint(file: Path) -> str:
    """Size, and short SHA-256 of what is in the first MiB and in the last."""
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        ends = [os.pread(opened.fileno(), 2**20, start) for start in (0, max(0, size - 2**20))]
    return f"{size} bytes, {hashlib.sha256(b''.join(ends)).hexdigest()[:12]}"


def read_manifest(folder: Path) -> dict:
    """ValueError for one that is not there, or that is none."""
    if not (folder / MANIFEST).is_file():
        old = (folder / "trainer.json").is_file()
        raise ValueError("was written by an earlier version, without checksums" if old else "is incomplete")
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if all(isinstance(size, int) and isinstance(sha, str) for size, sha in manifest["files"].values()):
            return manifest
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ValueError(f"has a damaged {MANIFEST}")


def damage(folder: Path, share: slice = slice(None)) -> str | None:
    """What is wrong with the files of a step folder, in words; None if nothing is. share: which of them to hash."""
    try:
        files = read_manifest(folder)["files"]
    except ValueError as error:
        return str(error)
    there = (file for file in folder.rglob("*") if file.is_file())  # pipes and devices never end
    present = {str(file.relative_to(folder)) for file in there} - {MANIFEST}
    if different := sorted(present ^ files.keys()):
        return f"{'has no' if different[0] in files else 'has a foreign'} {different[0]}"
    for name in sorted(files)[share]:
        try:
            found = digest(folder / name)
        except OSError as error:
            return f"has an unreadable {name} ({error.strerror})"
        if found != files[name]:
            return f"has a damaged {name} (another {'SHA-256' if found[0] == files[name][0] else 'size'})"
    return None


def model_identity(folder: Path) -> str:
    """What must be the same of the model of a resumed run: its architecture, as a short hash of config.json."""
    config = json.loads((folder / "config.json").read_text())
    for passing in ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"):
        config.pop(passing, None)
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def weights_identity(folder: Path) -> str:
    """What must be the same of the frozen model of a resumed run: its weights, as a short hash of their files."""
    files = [digest(file) for kind in ("*.safetensors", "*.bin") for file in sorted(folder.glob(kind))]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]


def complete(folder: Path) -> list[Path]:
    """Step folders with a manifest, in their order."""
    steps = [path for path in folder.glob("step_*") if STEP_NAME.fullmatch(path.name)]
    return sorted((path for path in steps if (path / MANIFEST).is_file()), key=lambda path: int(path.name[5:]))


def step_folder(path: Path, notice: Callable[[str], None]) -> Path | None:
    """The step folder that a path means: itself, what a file `latest` or `best` names, or the last one of a run.

    None if there is none. ValueError as `target`.
    """
    if path.is_dir() and (STEP_NAME.fullmatch(path.name) or (path / MANIFEST).is_file()):
        return path
    places = [path, path / "latest", path / "checkpoints" / "latest"]
    if pointer := next((place for place in places if place.is_file()), None):
        return target(pointer)
    steps = complete(path) or complete(path / "checkpoints")
    if steps:
        notice(f"{steps[-1].parent}/latest is missing: going on from {steps[-1].name}")
    return steps[-1] if steps else None


def target(pointer: Path) -> Path:
    """The step folder that a file names. ValueError for a name that is none's, or of one that is not there."""
    name = pointer.read_text(errors="replace").strip()
    if not STEP_NAME.fullmatch(name):
        raise ValueError(f"{pointer} names {name[:60]!r}, which is no step folder")
    folder = pointer.parent / name
    for left in (f"tmp_{name}", f"tmp_old_{name}"):  # killed between the renames of a save
        if not folder.exists() and (pointer.parent / left / MANIFEST).is_file():
            os.replace(pointer.parent / left, folder)
    if not folder.is_dir():
        steps = complete(pointer.parent)
        remedy = f"--resume {steps[-1]} goes on from the last one" if steps else "--resume never begins anew"
        raise ValueError(f"{pointer} names {name}, which is not there; {remedy}")
    return folder

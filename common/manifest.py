"""What a run has written, and whether it is whole: step folders with their manifests, the files of
its model/. Without torch."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from common.files import replace_file
from common.progress import say

MANIFEST = "manifest.json"  # in the step folder, written last: a folder without it is no checkpoint
NUM_SAMPLES = 256  # pieces of a file that are read for its fingerprint
BEGIN_ANEW = "--resume never, with another --output-dir, begins anew"
STEP_NAME = re.compile(r"step_\d{6,20}")
# names under which a save that was killed leaves a step folder
TEMPORARY_STEP = re.compile(r"tmp_(old_)?step_\d{6,20}")
SAVED_FILE = re.compile(  # what a save writes, by its path within the step folder
    r"state(/shard-\d+-model-\d+-of-\d+\.safetensors)?|\.?(trainer|manifest)\.json(\.tmp)?"
)
# a file in an export that is being written: a later run may remove its folder
UNFINISHED = ".unfinished"


def digest(file: Path) -> list:
    """[bytes, SHA-256] of a file."""
    with file.open("rb") as stream:
        return [file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest()]


def fingerprint(file: Path) -> str:
    """Size, and short SHA-256 of the first MiB, of the last, and of 4 KiB at NUM_SAMPLES places
    between them: training changes weights everywhere in a file, but may leave its ends as they are,
    such as a frozen vision tower."""
    with file.open("rb") as stream:
        descriptor = stream.fileno()
        size = os.fstat(descriptor).st_size
        last = max(0, size - 2**20)
        sha = hashlib.sha256()
        for i in range(NUM_SAMPLES):
            sha.update(os.pread(descriptor, 2**12, last * i // NUM_SAMPLES))
        for start in (0, last):
            sha.update(os.pread(descriptor, 2**20, start))
    return f"{size} bytes, {sha.hexdigest()[:12]}"


def read_manifest(folder: Path) -> dict:
    """The manifest of a step folder. ValueError if there is none, or if it is damaged; callers put
    the folder's name before the message."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"is incomplete: it has no {MANIFEST}")
    try:
        manifest = json.loads(path.read_text())
        for size, sha in manifest["files"].values():
            if not isinstance(size, int) or not isinstance(sha, str):
                raise ValueError("no size and hash")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"has a damaged {MANIFEST}") from error
    return manifest


def verify_step(folder: Path, share: slice = slice(None)) -> dict:
    """The manifest of a step folder. ValueError, as in `read_manifest`, if its files are not as the
    manifest says.

    share: which of the files, sorted by name, to hash.
    """
    manifest = read_manifest(folder)
    files = manifest["files"]
    present: set[str] = set()
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            present.add(str(path.relative_to(folder)))
    present.discard(MANIFEST)
    for name in sorted(present | files.keys()):
        if name not in present:
            raise ValueError(f"has no {name}")
        if name not in files or not SAVED_FILE.fullmatch(name):
            raise ValueError(f"has a foreign {name}")
    for name in sorted(files)[share]:
        path = folder / name
        if path.is_symlink() or not path.is_file():  # a pipe or a device would never end
            raise ValueError(f"has a link or a pipe in the place of {name}")
        try:
            actual = digest(path)
        except OSError as error:
            raise ValueError(f"has an unreadable {name} ({error.strerror})") from error
        if actual != files[name]:
            kind = "SHA-256" if actual[0] == files[name][0] else "size"
            raise ValueError(f"has a damaged {name} (another {kind})")
    return manifest


def read_record(folder: Path) -> dict:
    """trainer.json of a step folder. SystemExit if no save has written it, though its checksum may
    be right."""
    try:
        record = json.loads((folder / "trainer.json").read_text())
        has_step = type(record["step"]) is int and record["step"] >= 0
        # best_step is the name of a step folder, "" if none was the best yet
        if has_step and isinstance(record.get("best_step", ""), str):
            return record
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    raise SystemExit(
        f"{folder} cannot be loaded (its trainer.json is not as a save writes it): {BEGIN_ANEW}"
    )


def model_identity(folder: Path) -> str:
    """What a resumed run must share with the model of its checkpoint: the architecture, as a short
    hash of config.json."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    for volatile in ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"):
        config.pop(volatile, None)
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def weights_identity(folder: Path) -> str:
    """What a resumed run must share with the frozen model of its checkpoint: the files of weights,
    as a short hash."""
    fingerprints: list[str] = []
    for kind in ("*.safetensors", "*.bin"):
        for file in sorted(folder.glob(kind)):
            fingerprints.append(fingerprint(file))
    return hashlib.sha256(json.dumps(fingerprints).encode()).hexdigest()[:16]


def complete_steps(folder: Path) -> list[Path]:
    """Step folders with a manifest, in the order of their steps."""
    steps: list[Path] = []
    for path in folder.glob("step_*"):
        if STEP_NAME.fullmatch(path.name) and (path / MANIFEST).is_file():
            steps.append(path)
    return sorted(steps, key=lambda path: int(path.name.removeprefix("step_")))


def step_folder(path: Path) -> Path | None:
    """The step folder that a path means: itself, the one that a file `latest` or `best` names, or
    the last one of a run.

    None if there is none. ValueError as in `step_of_pointer`.
    """
    if path.is_dir() and (STEP_NAME.fullmatch(path.name) or (path / MANIFEST).is_file()):
        return path
    for pointer in (path, path / "latest", path / "checkpoints" / "latest"):
        if pointer.is_file():
            return step_of_pointer(pointer)
    steps = complete_steps(path) or complete_steps(path / "checkpoints")
    if not steps:
        return None
    say(f"{steps[-1].parent}/latest is missing: going on from {steps[-1].name}")
    return steps[-1]


def step_of_pointer(pointer: Path) -> Path:
    """The step folder that a file names; if a killed save has left it under a temporary name, it is
    renamed. ValueError if the name is not that of a step folder, or if the folder is missing."""
    with pointer.open(errors="replace") as file:
        name = file.read(100).strip()  # it may be any file, and a large one
    steps = complete_steps(pointer.parent)
    remedy = f"; give {steps[-1]}, the last one" if steps else ""
    if not STEP_NAME.fullmatch(name):
        raise ValueError(
            f"{pointer} is damaged: it names {name[:60]!r}, which is no step folder{remedy}"
        )
    folder = pointer.parent / name
    # a save that was killed between its renames leaves one of these
    for temporary in (f"tmp_{name}", f"tmp_old_{name}"):
        if not folder.exists() and (pointer.parent / temporary / MANIFEST).is_file():
            os.replace(pointer.parent / temporary, folder)
    if not folder.is_dir():
        raise ValueError(f"{pointer} names {name}, which is not there{remedy}")
    return folder


def remove_step(folder: Path) -> None:
    """Remove a step folder. OSError, and nothing is removed, if it is a link, or if there is
    anything in it that no save has written."""
    for path in sorted(folder.rglob("*")):
        is_saved = SAVED_FILE.fullmatch(str(path.relative_to(folder))) and not path.is_symlink()
        if not is_saved:
            raise OSError(
                f"{path} is no file of a checkpoint: move it away, and its folder can be removed"
            )
    # first: a folder without it is no checkpoint, however far the removal comes
    if not folder.is_symlink():  # rmtree refuses a link
        (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder)


def refuse_links(run_dir: Path) -> None:
    """OSError if a folder of a run is a link: it may lead to another run's files, which would be
    replaced.

    checkpoints/ may be a link to another disk, unless it has checkpoints before the run has begun.
    """
    for name in ("model", "eval", "rollouts", "profile"):
        if (run_dir / name).is_symlink():
            raise OSError(
                f"{run_dir / name} is a link, behind which files would be replaced: remove it"
            )
    folder = run_dir / "checkpoints"
    has_begun = (run_dir / "metrics.jsonl").exists()
    if folder.is_symlink() and not has_begun and complete_steps(folder):
        raise OSError(
            f"{folder} is a link to checkpoints of another run, which would be replaced: --resume "
            "goes on from one of them, with an --output-dir of its own"
        )


class WrittenFiles:
    """The files of a folder that this program has written, by their fingerprints: they alone may be
    replaced.

    The list stands beside the folder, not in it: another folder that is put in its place brings no
    list along, and none of its files is replaced.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.list_file = folder.with_name(f".{folder.name}.files.json")

    def unchanged(self) -> list[str]:
        """Paths, within the folder, of the files that are still as they were written."""
        fingerprints: dict[str, str] = {}
        with suppress(OSError, ValueError, TypeError, RecursionError):
            if self.list_file.is_file():
                fingerprints = dict(json.loads(self.list_file.read_text()))
        names: list[str] = []
        for name, old_fingerprint in fingerprints.items():
            path = self.folder / name
            # behind a link would be a file of another folder
            is_own = path.is_file() and path.resolve() == self.folder.resolve() / name
            if is_own and fingerprint(path) == old_fingerprint:
                names.append(name)
        return names

    def check(self, names: Iterable[str] = ("config.json",)) -> None:
        """FileExistsError if the folder is a link, or if files of these names would replace a link,
        a file that is not ours, or one that was changed since; and for foreign weights, which vLLM
        would load with ours."""
        if self.folder.is_symlink():
            raise FileExistsError(
                f"{self.folder} is a link, behind which files would be replaced: remove it"
            )
        unchanged = self.unchanged()
        weights: list[str] = []
        for kind in ("*.safetensors", "*.bin", "*.pt"):
            weights += [file.name for file in self.folder.glob(kind)]
        for name in [*names, *weights]:
            path = self.folder / name
            is_foreign = os.path.lexists(path) and name not in unchanged
            if is_foreign or path.parent.is_symlink():
                raise FileExistsError(
                    f"{path} is not as this run has written it, and would be lost: move it away"
                )

    def remove(self) -> None:
        """Remove the files that are as they were written, and the folder if nothing else lies in
        it."""
        # config.json, without which it is no model, is the first to go
        for name in reversed(self.unchanged()):
            (self.folder / name).unlink()
            with suppress(OSError):
                (self.folder / name).parent.rmdir()
        with suppress(OSError):
            self.folder.rmdir()
        self.list_file.unlink(missing_ok=True)

    def replace(self, new: Path) -> None:
        """Move the files of a finished folder here, in the place of those that were written
        before. FileExistsError as in `check`."""
        names = [str(file.relative_to(new)) for file in sorted(new.rglob("*")) if file.is_file()]
        names.remove(UNFINISHED)
        # config.json, without which the folder is no model, is the last to come
        names.sort(key=lambda name: name == "config.json")
        self.check(names)
        self.remove()
        fingerprints = {name: fingerprint(new / name) for name in names}
        text = json.dumps(fingerprints, indent=1)
        replace_file(self.list_file, lambda path: path.write_text(text))
        for name in names:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(new / name, self.folder / name)
        shutil.rmtree(new)


def make_unfinished(folder: Path) -> Path:
    """A folder to write into, beside `folder`, with UNFINISHED alone in it; one that a killed
    process has left there is removed."""
    unfinished = folder.with_name(f".{folder.name}.tmp")
    if (unfinished / UNFINISHED).is_file() and not unfinished.is_symlink():
        shutil.rmtree(unfinished)
    with suppress(OSError):  # empty: the process was killed before it could make UNFINISHED
        unfinished.rmdir()
    unfinished.mkdir(parents=True)
    (unfinished / UNFINISHED).touch()
    return unfinished

"""What a run has written: step folders and their manifests, the files of its model/. Without
torch."""

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
PLACES = 256  # of a file that are read for its fingerprint
BEGIN_ANEW = "--resume never, with another --output-dir, begins anew"
STEP_NAME = re.compile(r"step_\d{6,20}")
UNFINISHED_STEP = re.compile(r"tmp_(old_)?step_\d{6,20}")
SAVED_FILE = re.compile(  # in a step folder, by the path in it
    r"state(/shard-\d+-model-\d+-of-\d+\.safetensors)?|\.?(trainer|manifest)\.json(\.tmp)?"
)
# in a folder that is being written: whoever finds it may remove the folder
UNFINISHED = ".unfinished"


def digest(file: Path) -> list:
    """[bytes, SHA-256] of a file."""
    with file.open("rb") as opened:
        return [file.stat().st_size, hashlib.file_digest(opened, "sha256").hexdigest()]


def fingerprint(file: Path) -> str:
    """Size, and short SHA-256 of the first MiB, of the last, and of 4 KiB at PLACES between them:
    training changes weights everywhere in a file, but may leave its ends, such as a vision tower
    that is frozen."""
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        last = max(0, size - 2**20)
        found = hashlib.sha256()
        for place in range(PLACES):
            found.update(os.pread(opened.fileno(), 2**12, last * place // PLACES))
        for end in (0, last):
            found.update(os.pread(opened.fileno(), 2**20, end))
    return f"{size} bytes, {found.hexdigest()[:12]}"


def read_manifest(folder: Path) -> dict:
    """ValueError for one that is not there, or that is none."""
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"is incomplete: it has no {MANIFEST}")
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if all(
            isinstance(size, int) and isinstance(sha, str)
            for size, sha in manifest["files"].values()
        ):
            return manifest
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ValueError(f"has a damaged {MANIFEST}")


def verify(folder: Path, share: slice = slice(None)) -> dict:
    """The manifest of a step folder whose files are as it says; share: which of them to hash.
    ValueError if not."""
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
            found = digest(path)
        except OSError as error:
            raise ValueError(f"has an unreadable {name} ({error.strerror})") from error
        if found != files[name]:
            kind = "SHA-256" if found[0] == files[name][0] else "size"
            raise ValueError(f"has a damaged {name} (another {kind})")
    return manifest


def read_record(folder: Path) -> dict:
    """trainer.json of a step folder, whose checksums may be right. SystemExit for one that no save
    has written."""
    try:
        saved = json.loads((folder / "trainer.json").read_text())
        if (
            type(saved["step"]) is int
            and saved["step"] >= 0
            and isinstance(saved.get("best_step", ""), str)
        ):
            return saved
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    raise SystemExit(
        f"{folder} cannot be loaded (its trainer.json is not as a save writes it): {BEGIN_ANEW}"
    )


def model_identity(folder: Path) -> str:
    """What must be the same of the model of a resumed run: its architecture, as a short hash of
    config.json."""
    config = json.loads((folder / "config.json").read_text())
    for passing in ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"):
        config.pop(passing, None)
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def weights_identity(folder: Path) -> str:
    """What must be the same of the frozen model of a resumed run: its files of weights, as a short
    hash."""
    files = [
        fingerprint(file)
        for kind in ("*.safetensors", "*.bin")
        for file in sorted(folder.glob(kind))
    ]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]


def complete(folder: Path) -> list[Path]:
    """Step folders with a manifest, in their order."""
    steps = [path for path in folder.glob("step_*") if STEP_NAME.fullmatch(path.name)]
    return sorted(
        (path for path in steps if (path / MANIFEST).is_file()), key=lambda path: int(path.name[5:])
    )


def step_folder(path: Path) -> Path | None:
    """The step folder that a path means: itself, what a file `latest` or `best` names, or the last
    one of a run.

    None if there is none. ValueError as `target`.
    """
    if path.is_dir() and (STEP_NAME.fullmatch(path.name) or (path / MANIFEST).is_file()):
        return path
    places = [path, path / "latest", path / "checkpoints" / "latest"]
    if pointer := next((place for place in places if place.is_file()), None):
        return target(pointer)
    steps = complete(path) or complete(path / "checkpoints")
    if steps:
        say(f"{steps[-1].parent}/latest is missing: going on from {steps[-1].name}")
    return steps[-1] if steps else None


def target(pointer: Path) -> Path:
    """The step folder that a file names. ValueError for a name that is none's, or of one that is
    not there."""
    name = pointer.read_text(errors="replace").strip()
    steps = complete(pointer.parent)
    remedy = (
        f"--resume {steps[-1]} goes on from the last one" if steps else "--resume never begins anew"
    )
    if not STEP_NAME.fullmatch(name):
        raise ValueError(
            f"{pointer} is damaged: it names {name[:60]!r}, which is no step folder; {remedy}"
        )
    folder = pointer.parent / name
    for left in (f"tmp_{name}", f"tmp_old_{name}"):  # killed between the renames of a save
        if not folder.exists() and (pointer.parent / left / MANIFEST).is_file():
            os.replace(pointer.parent / left, folder)
    if not folder.is_dir():
        raise ValueError(f"{pointer} names {name}, which is not there; {remedy}")
    return folder


def remove_step(folder: Path) -> None:
    """Remove a step folder. OSError if there is anything in it that no save has written: all of it
    stays."""
    for path in sorted(folder.rglob("*")):
        ours = SAVED_FILE.fullmatch(str(path.relative_to(folder))) and not path.is_symlink()
        if not ours:
            raise OSError(
                f"{path} is no file of a checkpoint: move it away, and its folder can be removed"
            )
    shutil.rmtree(folder)


def refuse_links(run_dir: Path) -> None:
    """OSError if a folder of a run is a link: what lies behind it may be another run's, and would
    be replaced.

    checkpoints/ may be one to another disk, unless there are checkpoints there before the run has
    begun.
    """
    for name in ("model", "eval", "rollouts", "profile"):
        if (run_dir / name).is_symlink():
            raise OSError(
                f"{run_dir / name} is a link, behind which files would be replaced: remove it"
            )
    folder = run_dir / "checkpoints"
    if folder.is_symlink() and not (run_dir / "metrics.jsonl").exists() and complete(folder):
        told = "--resume goes on from one of them, with an --output-dir of its own"
        raise OSError(
            f"{folder} is a link to checkpoints of another run, which would be replaced: {told}"
        )


class WrittenFiles:
    """Which files of a folder this program has written, by size and hash: they alone may be
    replaced.

    The list stands beside the folder, so that a folder from elsewhere, put in its place, is
    nobody's to replace.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.list = folder.with_name(f".{folder.name}.files.json")

    def read(self) -> list[str]:
        """Paths in the folder of what is there as it was written."""
        try:
            listed = dict(json.loads(self.list.read_text())) if self.list.is_file() else {}
        except (OSError, ValueError, TypeError, RecursionError):
            listed = {}
        names = []
        for name, seen in listed.items():
            path = self.folder / name
            # behind no link
            is_plain = path.is_file() and path.resolve() == self.folder.resolve() / name
            if is_plain and fingerprint(path) == seen:
                names.append(name)
        return names

    def check(self, names: Iterable[str] = ("config.json",)) -> None:
        """FileExistsError if files of these names would take the place of a link, of what is not
        ours, or of what was changed since; and for foreign weights, which vLLM would load with
        ours."""
        if self.folder.is_symlink():
            raise FileExistsError(
                f"{self.folder} is a link, behind which files would be replaced: remove it"
            )
        written = self.read()
        weights = [
            file.name
            for kind in ("*.safetensors", "*.bin", "*.pt")
            for file in self.folder.glob(kind)
        ]
        for name in [*names, *weights]:
            path = self.folder / name
            if path.parent.is_symlink() or (os.path.lexists(path) and name not in written):
                raise FileExistsError(
                    f"{path} is not as this run has written it, and would be lost: move it away"
                )

    def remove(self) -> None:
        """Take away what is there as it was written, and the folder, unless something else lies in
        it."""
        # config.json, without which it is no model, is the first to go
        for name in reversed(self.read()):
            (self.folder / name).unlink()
            with suppress(OSError):
                (self.folder / name).parent.rmdir()
        with suppress(OSError):
            self.folder.rmdir()
        self.list.unlink(missing_ok=True)

    def replace(self, new: Path) -> None:
        """Move the files of a finished folder here, in the place of those that were written
        before."""
        names = [str(file.relative_to(new)) for file in sorted(new.rglob("*")) if file.is_file()]
        names.remove(UNFINISHED)
        # without it the folder is no model: the last to come
        names.sort(key=lambda name: name == "config.json")
        self.check(names)
        self.remove()
        written = {name: fingerprint(new / name) for name in names}
        replace_file(self.list, lambda path: path.write_text(json.dumps(written, indent=1)))
        for name in names:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(new / name, self.folder / name)
        shutil.rmtree(new)


def make_unfinished(folder: Path) -> Path:
    """An empty folder to write into, beside `folder`; what a killed process has left there is
    removed."""
    unfinished = folder.with_name(f".{folder.name}.tmp")
    if (unfinished / UNFINISHED).is_file() and not unfinished.is_symlink():
        shutil.rmtree(unfinished)
    with suppress(OSError):  # killed before it could say so
        unfinished.rmdir()
    unfinished.mkdir(parents=True)
    (unfinished / UNFINISHED).touch()
    return unfinished

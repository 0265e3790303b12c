"""Attacks on checkpoints, disks and workers, as one table (attack, n, outcome) at the end of its run.

pytest tests/test_attacks.py -m slow
"""

import io
import json
import os
import pickle
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import deadline, trained

from common.checkpoint import _shards, find_checkpoint, load_checkpoint, save_checkpoint
from common.integrity import digest

pytestmark = pytest.mark.slow
IDENTITY = {"script": "grpo", "model": "0123"}
EXECUTED = Path("executed")  # what a hostile file leaves in the working folder, if it gets that far


@pytest.fixture
def table(record_property):
    """table(attack, outcomes): for the summary, which counts the outcomes; rows of the same attack add up."""

    def add(attack: str, outcomes: list[str]) -> None:
        record_property("attack", (attack, outcomes))

    return add


# --- checkpoints --------------------------------------------------------------------------------------------------

FILES = ["state/.metadata", "state/__0_0.distcp", "rng_0.safetensors", "trainer.json", "manifest.json"]
POINTERS = ["../latest", "../best"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, world):
    """A run folder with checkpoints of steps 1 and 2; the second one is the best."""
    folder = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        state, options = {"loader": {"consumed": step}}, {"keep": 2, "best": step == 2, "identity": IDENTITY}
        torch.manual_seed(step)
        assert save_checkpoint(folder / "checkpoints", step, trained(step), state, world, **options)
    return folder


@pytest.fixture
def resume(saved, world, tmp_path, monkeypatch, capsys):
    """resume(attack): the outcome, in words, of going on from a copy of the run after attack(step folder)."""
    monkeypatch.chdir(tmp_path)

    def resume(attack: Callable[[Path], None], name: str = "") -> str:
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(saved, run)
        folder = run / "checkpoints" / "step_000002"
        attack(folder)
        start = time.monotonic()
        try:
            with deadline(10):
                where = str(run / "checkpoints" / "best") if name == "../best" else "auto"
                found = find_checkpoint(run, where, world, IDENTITY)
                after = trained(3)
                state = load_checkpoint(found, after, world)
        except SystemExit as refusal:
            said = str(refusal)
            assert "\n" not in said and said.isprintable() and len(said) < 1000, said
            assert str(run / "checkpoints") in said and "--resume" in said, said
            assert name.removeprefix("../") in said or name == "manifest.json", said
            return "refused, with the remedy"
        finally:
            assert not EXECUTED.exists() and time.monotonic() - start < 9
        said, step = capsys.readouterr().out, int(found.name.removeprefix("step_"))
        assert state == {"step": step, "world_size": 1, "loader": {"consumed": step}}
        expected, got = (t["policy"][0].state_dict() for t in (trained(step), after))
        assert all(torch.equal(expected[key], got[key]) for key in expected), "other weights in silence"
        return f"goes on from step {step} and says so" if "latest is missing" in said else f"step {step}, unharmed"

    return resume


def flipped(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def scribbled(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    start = rng.randrange(len(data))
    data[start : start + 64] = rng.randbytes(min(64, len(data) - start))
    file.write_bytes(data)


def cut(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size))


def grown(file: Path, rng: random.Random) -> None:
    with file.open("ab") as opened:
        opened.write(rng.randbytes(1 + rng.randrange(100)))


def swapped(file: Path, rng: random.Random) -> None:
    shutil.copy(str(file).replace("step_000002", "step_000001"), file)


def replaced(file: Path, rng: random.Random, by: Callable[[Path], object]) -> None:
    file.unlink()
    by(file)


BYTES = {"a bit flipped": flipped, "64 bytes scribbled": scribbled, "cut off": cut, "grown": grown}
KINDS = {
    "deleted": lambda file: None,
    "emptied": lambda file: file.write_bytes(b""),
    "a folder instead": Path.mkdir,
    "a full folder instead": lambda file: (file / "x" / "y").mkdir(parents=True),
    "a FIFO instead": os.mkfifo,
    "a device instead": lambda file: file.symlink_to("/dev/zero"),
    "a symlink loop instead": lambda file: file.symlink_to(file.name),
    "a dangling symlink instead": lambda file: file.symlink_to("nowhere"),
}
KINDS = {what: partial(replaced, by=by) for what, by in KINDS.items()} | {"that of another step": swapped}


@pytest.mark.parametrize("name", FILES + POINTERS)
@pytest.mark.parametrize("kind", BYTES | KINDS)
def test_a_file_of_a_checkpoint(resume, table, name, kind):
    """Refused in one line, or its weights are those that were saved."""
    if name in POINTERS and kind == "that of another step":
        pytest.skip("there is one for all steps")
    rng, attack = random.Random(f"{name} {kind}"), (BYTES | KINDS)[kind]
    outcomes = [resume(lambda folder: attack(folder / name, rng), name) for _ in range(50 if kind in BYTES else 1)]
    if name in FILES[:-1]:
        assert set(outcomes) == {"refused, with the remedy"}
    table(f"checkpoint: {'a pointer' if name in POINTERS else 'a file'}, {kind}", outcomes)


LEADING_OUT = [
    "../../elsewhere/step_000002",
    "/etc/passwd",
    "step_000002/../../..",
    "\0",
    "step_\0",
    "\ud800",
    "~",
    ".",
]
LEADING_OUT += [
    "step_" + "9" * 300,
    "step_000002 " * 10**6,
    "step_" + "9" * 10**6,
    "step_٣",
    "\x1b[2J",
    "\nstep_000002\nx",
]


def test_latest_leads_out(resume, table):
    outcomes = []
    for text in LEADING_OUT:
        outcomes.append(
            resume(lambda folder, text=text: (folder.parent / "latest").write_text(text, errors="surrogatepass"))
        )
    table("checkpoint: latest names what is no step folder", outcomes)
    assert set(outcomes) == {"refused, with the remedy"}


@pytest.mark.parametrize("what", ["symlink to /etc/passwd", "1 GB"])
def test_latest_is_something_else(resume, table, what):
    def attack(folder: Path) -> None:
        latest = folder.parent / "latest"
        latest.unlink()
        if what == "1 GB":
            latest.touch()
            os.truncate(latest, 10**9)
        else:
            latest.symlink_to("/etc/passwd")

    table(f"checkpoint: latest is {what}", [resume(attack, "../latest")])


FOREIGN = [
    "x",
    "state/__1_0.distcp",
    "state/.metadata.tmp",
    "rng_1.safetensors",
    "a\nb",
    "\x1b[2J",
    "\udcff",
    "a" * 255,
]


def test_a_foreign_file(resume, table):
    outcomes = [resume(lambda folder, name=name: (folder / name).write_bytes(b"x")) for name in FOREIGN]
    outcomes.append(resume(lambda folder: os.mkfifo(folder / "fifo")))
    outcomes.append(resume(lambda folder: (folder / "link").symlink_to("/etc")))
    table("checkpoint: a foreign file, FIFO or link", outcomes)
    assert Counter(outcomes)["refused, with the remedy"] == len(FOREIGN)


def with_files(change: Callable[[dict], object], folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def entry(name: object, value: object = (3, "0" * 64)) -> Callable[[Path], None]:
    return partial(with_files, lambda manifest: manifest["files"].update({name: value}))


MANIFESTS = {
    "of paths that lead out": [entry(f"{up}/etc/passwd") for up in ("../../../../..", "", "state/../../..", "\0")],
    "of what are no sizes": [
        entry("x", value) for value in (None, [], [1], [1, 2], {"a": 1}, "ab", [1e300, "x"], [[], "x"])
    ],
    "that is nested": [
        lambda folder, text=text: (folder / "manifest.json").write_text(text)
        for text in ("[" * 10**6, '{"files":' * 10**5, '{"files": {"a": ' + "[" * 10**5, "9" * 10**5)
    ],
    "that is none": [
        lambda folder, text=text: (folder / "manifest.json").write_bytes(text)
        for text in (b"", b"\0" * 100, b"\xff\xfe", b"null", b"{}", b'{"files": {}}', b'{"files": []}', b'"files"')
    ],
    "of another script, hostile": [
        partial(with_files, lambda manifest, value=value: manifest.update(script=value))
        for value in ("\x1b[2J", "a\nb" * 1000, ["grpo"], {"a": "b" * 10**5}, None, 1e300)
    ],
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest(resume, table, kind):
    outcomes = [resume(attack) for attack in MANIFESTS[kind]]
    table(f"checkpoint: a manifest {kind}", outcomes)
    assert set(outcomes) == {"refused, with the remedy"}


# An attacker writes the manifest, too.


def promised(folder: Path) -> None:
    with_files(
        lambda manifest: manifest.update(files={name: digest(folder / name) for name in manifest["files"]}), folder
    )


class Calls:
    """Unpickled, it calls."""

    def __init__(self, function: Callable, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


COMMAND = f"touch {EXECUTED}"
CODE = f"open({str(EXECUTED)!r}, 'w')"
CALLS = {
    "os.system": lambda: Calls(os.system, COMMAND),
    "eval": lambda: Calls(eval, CODE),
    "exec": lambda: Calls(exec, CODE),
    "open": lambda: Calls(open, str(EXECUTED), "w"),
    "getattr": lambda: Calls(getattr, Path, "touch"),
    "torch.load": lambda: Calls(torch.load, str(EXECUTED)),
    "torch.hub": lambda: Calls(torch.hub.load, "x/y", "z"),
    "a method of a type that torch writes": lambda: Calls(Path.touch, EXECUTED),
    "pickle.loads": lambda: Calls(pickle.loads, pickle.dumps(Calls(os.system, COMMAND))),
}


def hostile_bytes() -> list[bytes]:
    """Pickles of the calls in every protocol, and some that no pickler writes."""
    made = []
    for call in CALLS.values():
        for protocol in range(2, 6):
            made.append(pickle.dumps(call(), protocol))
    system = f"(S'{COMMAND}'\n"
    made += [f"cposix\nsystem\n{system}tR.".encode(), f"ios\nsystem\n(S'{COMMAND}'\no.".encode()]
    made += [f"(cos\nsystem\nS'{COMMAND}'\no.".encode(), f"ctorch\nserialization.os.system\n{system}tR.".encode()]
    made += [f"cpathlib\nPosixPath.__init__.__globals__\n{system}tR.".encode(), b"P1\n.", b"\x82\x01.", b"(" * 10**5]
    return [*made, b"", b"\x80", b"\x80\xff.", b"N.", b"]" + b"]" * 10**5 + b"a" * 10**5 + b"."]


def in_metadata(folder: Path, text: bytes) -> None:
    (folder / "state/.metadata").write_bytes(text)


def in_random_states(folder: Path, text: bytes) -> None:
    (folder / "rng_0.safetensors").write_bytes(text)


def in_shard(folder: Path, text: bytes) -> None:
    """Every tensor and every learning rate is read from these bytes."""
    (folder / "state/__0_0.distcp").write_bytes(text)
    metadata = pickle.loads((folder / "state/.metadata").read_bytes())
    for stored in metadata.storage_data.values():
        stored.offset, stored.length = 0, len(text)
    (folder / "state/.metadata").write_bytes(pickle.dumps(metadata))


def in_learning_rate(folder: Path, call: Calls) -> None:
    attacked = trained(2)
    attacked["policy"][1].param_groups[0]["lr"] = call
    shutil.rmtree(folder / "state")
    dcp.save(_shards(attacked), checkpoint_id=folder / "state")


def saved_by_torch(call: Calls, **options) -> bytes:
    buffer = io.BytesIO()
    torch.save(call, buffer, **options)
    return buffer.getvalue()


def hostile(place: str) -> list[Callable[[Path], object]]:
    if place == "learning rate":
        return [lambda folder, make=make: in_learning_rate(folder, make()) for make in CALLS.values()]
    made = hostile_bytes()
    made += [saved_by_torch(make(), _use_new_zipfile_serialization=new) for make in CALLS.values() for new in (0, 1)]
    write = {"metadata": in_metadata, "shard": in_shard, "random states": in_random_states}[place]
    return [partial(write, text=text) for text in made]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", ["metadata", "shard", "learning rate", "random states"])
def test_hostile_pickles_with_a_manifest_that_promises_them(resume, table, place):
    outcomes = []
    for attack in hostile(place):
        outcomes.append(resume(lambda folder, attack=attack: (attack(folder), promised(folder)), "step_000002"))
    table(f"checkpoint: hostile pickles as {place}, manifest repaired", outcomes)
    assert set(outcomes) == {"refused, with the remedy"}

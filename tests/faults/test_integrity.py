"""Checkpoints that were damaged, exchanged or made by an attacker, and the lock of a run folder."""

import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import LeaseCompromise, Timeout
from helpers import ROOT, deadline, load_checkpoint, save_checkpoint, trained, wait_until
from safetensors.torch import load_file, save_file

from common import files, machines
from common.files import lock_folder, replace_file
from common.job import Job
from common.manifest import digest, model_identity
from common.shards import find_checkpoint

IDENTITY = {"script": "grpo", "model": "0123"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory, world):
    folder = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        state = {"loader": {"consumed": 4}}
        assert save_checkpoint(
            folder, step, trained(), world, state=state, keep=2, identity=IDENTITY
        )
    return folder


@pytest.fixture
def run(tmp_path, saved):
    """A run folder with checkpoints of steps 1 and 2."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGES = {
    "flip": flip,
    "cut": cut,
    "empty": lambda file: file.write_bytes(b""),
    "remove": Path.unlink,
    "pipe": pipe,
}
SHARD = "state/shard-00001-model-00001-of-00001.safetensors"
DAMAGED = [
    *((SHARD, kind) for kind in DAMAGES),
    ("trainer.json", "flip"),
    ("manifest.json", "pipe"),
]


@pytest.mark.parametrize("name, damage", DAMAGED)
def test_a_damaged_file_is_named_with_the_step_before(run, world, name, damage):
    folder = run / "checkpoints" / "step_000002"
    DAMAGES[damage](folder / name)
    with pytest.raises(SystemExit) as refusal:
        with deadline(20):
            find_checkpoint(run, "auto", world, IDENTITY)
    said = str(refusal.value)
    assert said.startswith(str(folder)) and "\n" not in said
    assert name in said or name == "manifest.json"
    assert "unreadable" not in said, "a pipe is not even opened"
    assert f"--resume {run}/checkpoints/step_000001 goes on from the one before" in said
    assert find_checkpoint(run, str(run / "checkpoints" / "step_000001"), world, IDENTITY)


@pytest.mark.parametrize(
    "damaged, step", [("step_1000000", "step_999999"), ("step_999999", "step_000002")]
)
def test_the_step_before_is_that_of_the_next_lower_number(run, world, damaged, step):
    for name in ("step_999999", "step_1000000"):
        shutil.copytree(run / "checkpoints/step_000002", run / "checkpoints" / name)
    folder = run / "checkpoints" / damaged
    (folder / "trainer.json").write_text("{}")
    with pytest.raises(SystemExit, match=rf"--resume \S*/{step} goes on from the one before"):
        find_checkpoint(run, str(folder), world, IDENTITY)


FOREIGN = {
    "shard-00002-model-00001-of-00001.safetensors": lambda file: file.write_bytes(b"x"),
    "a\n\x1b[2J": lambda file: file.write_bytes(b"x"),
    "pipe.safetensors": os.mkfifo,
    "link.safetensors": lambda file: file.symlink_to("/etc"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_file_is_refused(run, world, name):
    FOREIGN[name](run / "checkpoints/step_000002/state" / name)
    said = name.replace("\n", " ").replace("\x1b", "\ufffd")
    with pytest.raises(SystemExit, match=rf"has a foreign state/{re.escape(said)}: --resume"):
        find_checkpoint(run, "auto", world)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"files": 3}', '{"files": {"a": [1, 2]}}', "[" * 100_000]
)
def test_a_manifest_that_is_none(run, world, content):
    (run / "checkpoints/step_000002/manifest.json").write_text(content)
    with pytest.raises(SystemExit, match=r"step_000002 has a damaged manifest\.json"):
        find_checkpoint(run, "auto", world)


def test_without_latest_the_last_complete_step_goes_on(run, world, capsys):
    (run / "checkpoints/latest").unlink()
    (run / "checkpoints/step_000003").mkdir()
    assert find_checkpoint(run, "auto", world).name == "step_000002"
    assert "latest is missing: going on from step_000002" in capsys.readouterr().out


LEADING_OUT = [
    "../../elsewhere/step_000002",
    "",
    "\0",
    "latest",
    "step_" + "9" * 300,
    "step_000002 " * 10**6,
]
LEADING_OUT += ["\x1b[2J", "\nstep_000002\nx"]


@pytest.mark.parametrize("name", LEADING_OUT)
def test_latest_leads_nowhere_else(run, world, name):
    (run / "checkpoints/latest").write_text(name)
    with pytest.raises(
        SystemExit,
        match=r"which is no step folder; give .*/step_000002, the last one; --resume never",
    ):
        find_checkpoint(run, "auto", world)


def test_latest_of_a_step_that_is_gone(run, world):
    (run / "checkpoints/latest").write_text("step_000009")
    with pytest.raises(
        SystemExit, match=r"step_000009, which is not there; give .*/step_000002, the last one"
    ):
        find_checkpoint(run, "auto", world)


@pytest.mark.parametrize("other", [{"script": "ppo"}, {"model": "4567"}])
def test_a_checkpoint_of_another_script_or_model_is_refused(run, world, other):
    ((name, value),) = other.items()
    with pytest.raises(
        SystemExit, match=f"is of another {name}, {IDENTITY[name]} and not {value}"
    ) as refusal:
        find_checkpoint(run, "auto", world, IDENTITY | other)
    said = str(refusal.value)
    assert ("start grpo.py" if name == "script" else "give the --model") in said
    assert "step_000001" not in said, "the one before is of the same run"


def test_a_text_in_a_manifest_does_not_garble_the_terminal(run, world):
    manifest = run / "checkpoints/step_000002/manifest.json"
    manifest.write_text(
        json.dumps(json.loads(manifest.read_text()) | {"script": "a\n\x1b[2J" * 1000})
    )
    with pytest.raises(SystemExit, match="is of another script, a") as refusal:
        find_checkpoint(run, "auto", world, IDENTITY)
    assert str(refusal.value).isprintable() and len(str(refusal.value)) < 1000


def test_a_checkpoint_without_its_manifest_is_refused(run, world):
    (run / "checkpoints/step_000002/manifest.json").unlink()
    with pytest.raises(SystemExit, match=r"is incomplete: it has no manifest\.json"):
        find_checkpoint(run, "auto", world)


class Attack:
    def __reduce__(self):
        return os.system, ("touch attacked",)


def as_promised(folder: Path) -> None:
    """An attacker writes the manifest, too."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {
        name: digest(folder / name) for name in manifest["files"] if (folder / name).exists()
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


def header_of(text: bytes) -> Callable[[Path], object]:
    """A shard that begins with this text as its header, behind its length."""
    return lambda folder: (folder / SHARD).write_bytes(
        len(text).to_bytes(8, "little") + text + bytes(64)
    )


def bias_at(offset: object, size: int = 3) -> Callable[[Path], None]:
    """All tensors are there, and this one is said to begin there in the whole one."""

    def write(folder: Path) -> None:
        tensors = load_file(folder / SHARD)
        tensors["policy.model.bias"] = torch.zeros(size)
        places = {name: {"saved_offsets": [0] * tensor.dim()} for name, tensor in tensors.items()}
        places["policy.model.bias"]["saved_offsets"] = offset
        save_file(tensors, folder / SHARD, {"DCP_SHARDING_INFO": json.dumps(places)})

    return write


def trainer_of(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "trainer.json").write_text(text)


ODD = {
    "no shards": lambda folder: (folder / SHARD).unlink(),
    "an empty shard": lambda folder: (folder / SHARD).write_bytes(b""),
    "a header that is nested": header_of(b"[" * 10**6),
    "tensors of other names": lambda folder: save_file({"other": torch.zeros(3)}, folder / SHARD),
    "a tensor of another shape": bias_at([0], size=2),
    "a tensor that begins nowhere": bias_at("x"),
    "a tensor that begins behind the last": bias_at([3]),
    "an empty trainer.json": trainer_of("{}"),
    "a list as trainer.json": trainer_of("[]"),
    "deep lists as trainer.json": trainer_of("[" * 10**5),
    "a text as step": trainer_of(
        '{"step": "2", "loss_scale": {"policy": {"scale": 1, "good_steps": 0}}}'
    ),
    "a step before the first": trainer_of(
        '{"step": -2, "loss_scale": {"policy": {"scale": 1, "good_steps": 0}}}'
    ),
    "no loss scale": trainer_of('{"step": 2, "best": 1}'),
    "a loss scale of text": trainer_of(
        '{"step": 2, "loss_scale": {"policy": {"scale": "x", "good_steps": 0}}}'
    ),
    "a best that is none": trainer_of(
        '{"step": 2, "best_step": "step_000002", "best": [1], "loss_scale": {}}'
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_no_save_has_written_is_refused_in_a_line(run, world, kind):
    """With a manifest that promises it."""
    folder = run / "checkpoints" / "step_000002"
    ODD[kind](folder)
    as_promised(folder)
    start = time.monotonic()
    with (
        deadline(20),
        pytest.raises(
            SystemExit, match=r"step_000002 cannot be loaded .*--resume never"
        ) as refusal,
    ):
        assert find_checkpoint(run, "auto", world, IDENTITY) == folder
        load_checkpoint(folder, trained(), world)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400
    assert time.monotonic() - start < 15, "nothing is waited for"


POSITIONS = [
    "null",
    "{}",
    '{"consumed": 4.0, "seed": 0, "num_rows": 4}',
    '{"consumed": -4, "seed": 0, "num_rows": 4}',
]


@pytest.mark.parametrize("position", POSITIONS)
def test_a_position_in_the_data_that_is_none_is_refused(run, position):
    folder = run / "checkpoints" / "step_000002"
    trainer_of(f'{{"step": 2, "loader": {position}}}')(folder)
    resumed = SimpleNamespace(checkpoint=folder, run=SimpleNamespace(seed=0))
    with pytest.raises(
        SystemExit,
        match=r"step_000002 cannot be loaded \(trainer.json has no position in the data\)",
    ):
        Job.open_loader(resumed, 4, data_fingerprint="")


@pytest.mark.parametrize("name", [SHARD, "trainer.json"])
def test_a_link_in_the_place_of_a_file_is_refused(run, world, name):
    """What it leads to may change after it was verified."""
    file = run / "checkpoints/step_000002" / name
    file.rename(run / "elsewhere")
    file.symlink_to(run / "elsewhere")
    with pytest.raises(SystemExit, match=f"has a link or a pipe in the place of {name}: --resume"):
        find_checkpoint(run, "auto", world)


def test_no_file_of_a_checkpoint_is_a_pickle(run):
    """Tensors with a header of JSON, and JSON: there is nothing in them that could be executed."""
    files = [path for path in (run / "checkpoints/step_000002").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    for path in files:
        text = path.read_bytes()
        if path.suffix == ".safetensors":
            text = text[8 : 8 + int.from_bytes(text[:8], "little")]
        assert json.loads(text)


@pytest.mark.parametrize("name", [SHARD, "state/.metadata"])
def test_a_pickle_in_a_checkpoint_is_refused(run, world, name, monkeypatch):
    """In the place of a shard, or where torch's own checkpoints have one; with a manifest that
    promises it."""
    folder = run / "checkpoints" / "step_000002"
    (folder / name).write_bytes(pickle.dumps(Attack()))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = digest(folder / name)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.chdir(run)
    with pytest.raises(
        SystemExit, match=r"step_000002 (cannot be loaded|has a foreign) .*--resume"
    ) as refusal:
        find_checkpoint(run, "auto", world, IDENTITY)
        load_checkpoint(folder, trained(), world)
    assert "\n" not in str(refusal.value) and not (run / "attacked").exists()


def test_a_models_identity_is_its_architecture(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"hidden_size": 4, "transformers_version": "5.0", "dtype": "float32"}'
    )
    first = model_identity(tmp_path)
    (tmp_path / "config.json").write_text('{"transformers_version": "5.1", "hidden_size": 4}')
    assert model_identity(tmp_path) == first
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    assert model_identity(tmp_path) != first


@pytest.mark.parametrize("left", [os.mkfifo, lambda path: path.symlink_to("of a user")])
def test_what_stands_in_the_way_of_an_atomic_write_is_removed(tmp_path, left):
    """A link is not written through, a pipe is not waited for."""
    (tmp_path / "of a user").write_text("mine")
    left(tmp_path / ".file.tmp")
    with deadline(10):
        replace_file(tmp_path / "file", lambda path: path.write_text("new"))
    assert (tmp_path / "file").read_text() == "new" and (
        tmp_path / "of a user"
    ).read_text() == "mine"


def test_an_atomic_write_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Else a power cut may leave an empty file under it."""
    done = []
    sync, replace = os.fsync, os.replace

    def recorded_sync(number: int) -> None:
        done.append(("fsync", os.fstat(number).st_ino, os.fstat(number).st_size))
        sync(number)

    def recorded_replace(source: Path, target: Path) -> None:
        done.append(("replace", os.stat(source).st_ino, target))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_sync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    path = tmp_path / "file"
    replace_file(path, lambda temporary: temporary.write_text("new"))
    number = path.stat().st_ino
    assert done == [("fsync", number, len("new")), ("replace", number, path)]


# --- the lock -------------------------------------------------------------------------------------

HOLDER = (
    "import sys, time; from pathlib import Path; from common import files; "
    "files.HEARTBEAT_S = 0.1; "
)
HOLDER += "lock = files.lock_folder(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of tmp_path."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path], cwd=ROOT, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_a_second_run_is_refused_and_a_killed_one_taken_over_at_once(tmp_path, holder, capsys):
    with pytest.raises(
        SystemExit, match=rf"--output-dir .*: process {holder.pid} on .* writes there"
    ):
        lock_folder(tmp_path)
    holder.kill()
    holder.wait()
    start = time.monotonic()
    lock = lock_folder(tmp_path)
    assert time.monotonic() - start < 5 and lock.is_lock_held_by_us
    assert f"is of process {holder.pid} on" in capsys.readouterr().out
    lock.release()
    assert not list(tmp_path.iterdir())


def foreign(tmp_path, old: str, new: str) -> str:
    """The lock of a run that was killed, with a line changed."""
    lock = lock_folder(tmp_path)
    text = (tmp_path / "lock").read_text()
    lock.release()
    assert old in text
    (tmp_path / "lock").write_text(text.replace(old, new))
    return text


def test_a_process_that_has_the_number_of_a_dead_one_holds_nothing(tmp_path):
    foreign(tmp_path, "start=", "start=1")
    start = time.monotonic()
    assert lock_folder(tmp_path).is_lock_held_by_us and time.monotonic() - start < 5


@pytest.mark.parametrize("beats", [True, False])
def test_a_lock_from_elsewhere_lives_while_its_heart_beats(tmp_path, monkeypatch, beats):
    monkeypatch.setattr(files, "LEASE_S", 3.0 if beats else 1.0)
    monkeypatch.setattr(files, "HEARTBEAT_S", 0.1)
    foreign(tmp_path, "host=", "host=another-")
    if beats:
        threading.Timer(0.3, os.utime, [tmp_path / "lock"]).start()
        with pytest.raises(SystemExit, match=r"process \d+ on another-.* writes there"):
            lock_folder(tmp_path)
        return
    start = time.monotonic()
    assert lock_folder(tmp_path).is_lock_held_by_us and time.monotonic() - start >= 1


def test_a_lock_that_its_run_gives_up_meanwhile_is_free(tmp_path, monkeypatch):
    """At the worst moment: between a look at the lock and one at its heart."""
    foreign(tmp_path, "host=", "host=another-")
    looks = iter([1.0])

    def modified(path):
        beat = next(looks, None)
        if beat is None:
            path.unlink(missing_ok=True)
        return beat

    monkeypatch.setattr(files, "modified_at", modified)
    assert lock_folder(tmp_path).is_lock_held_by_us


def test_what_is_no_lock_is_taken_over(tmp_path):
    (tmp_path / "lock").write_text("filelock/2\npid=1\n")
    assert lock_folder(tmp_path).is_lock_held_by_us


def test_an_empty_lock_is_not_said_to_be_a_process(tmp_path, monkeypatch, capsys):
    """A full disk leaves it, and filelock, which may have just made it, takes it over from
    nobody."""

    def acquire(lock, **_):
        raise Timeout(lock.lock_file)

    monkeypatch.setattr(files.SoftFileLease, "acquire", acquire)
    (tmp_path / "lock").touch()
    with pytest.raises(SystemExit) as refusal:
        lock_folder(tmp_path)
    said = str(refusal.value)
    assert (
        f"{tmp_path}/lock names no process" in said
        and "delete it, or give another --output-dir" in said
    )
    assert "end it" not in said and "names no process" in capsys.readouterr().out


def test_a_run_that_another_one_has_taken_over_from_ends(tmp_path, monkeypatch):
    """It stood still for longer than a minute; and it does not release what is the other's."""
    monkeypatch.setattr(files, "HEARTBEAT_S", 0.05)
    ended = []
    monkeypatch.setattr(machines, "fail", ended.append)
    monkeypatch.setattr(machines, "leave", ended.append)
    first = lock_folder(tmp_path, lost=machines.keep_lock)
    theirs = tmp_path / "theirs"
    theirs.write_text((tmp_path / "lock").read_text().replace("token=", "token=1"))
    theirs.replace(tmp_path / "lock")
    wait_until(lambda: len(ended) == 2)
    assert "another run's now" in ended[0] and ended[1] == 1
    first.release()
    assert "token=1" in (tmp_path / "lock").read_text()


def test_a_heart_beats_on_when_the_disk_is_back(tmp_path, monkeypatch):
    """filelock's own stops for good, and after a minute another run would write there, too."""
    monkeypatch.setattr(machines, "HEARTBEAT_S", 0.02)
    ended = []
    monkeypatch.setattr(machines, "fail", ended.append)
    monkeypatch.setattr(machines, "leave", ended.append)
    lock = tmp_path / "lock"
    loss = LeaseCompromise(str(lock), "mine", "refresh-failed", OSError(5, "Input/output error"))
    heart = threading.Thread(target=machines.keep_lock, args=(loss,), daemon=True)
    heart.start()  # the disk is away
    lock.write_text("token=mine")
    os.utime(lock, (0, 0))
    wait_until(lambda: lock.stat().st_mtime > 0)
    assert not ended
    lock.write_text("token=theirs")
    heart.join(10)
    assert "another run's now" in ended[0] and ended[1] == 1


def test_the_heart_of_another_run_is_left_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(machines, "HEARTBEAT_S", 0.02)
    for name in ("fail", "leave"):
        monkeypatch.setattr(machines, name, lambda reason: None)
    lock = tmp_path / "lock"
    lock.write_text("token=theirs")
    os.utime(lock, (0, 0))
    machines.keep_lock(LeaseCompromise(str(lock), "mine", "refresh-failed", OSError(5, "")))
    assert lock.stat().st_mtime == 0


@pytest.mark.parametrize("shared", [True, False])
def test_a_node_that_does_not_see_the_run_folder_is_named(tmp_path, monkeypatch, shared):
    """Rank 0 has its lock, which each rank must find where it writes itself."""
    lock, slept = lock_folder(tmp_path / "of rank 0"), []
    monkeypatch.setattr(machines, "broadcast_object", lambda value: lock.token)
    # not that of the heartbeats
    monkeypatch.setattr(machines, "time", SimpleNamespace(sleep=slept.append))
    rank, own = (
        SimpleNamespace(is_main=False),
        tmp_path / ("of rank 0" if shared else "of this node"),
    )
    with nullcontext() if shared else pytest.raises(SystemExit) as refusal:
        machines.lock_everywhere(own, rank)
    lock.release()
    if shared:
        assert slept == []
    else:
        assert f"{own}: {socket.gethostname()} does not see what rank 0 writes" in str(
            refusal.value
        )
        assert 5 < sum(slept) < 90, "a network file system is given time"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match=r"--output-dir .*/file/run: cannot write there"):
        lock_folder(tmp_path / "file" / "run")

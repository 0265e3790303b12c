"""Attacks on checkpoints, workers and the folder of a run.

pytest tests/faults/test_attacks.py -m slow
"""

import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from helpers import (
    alive,
    deadline,
    load_checkpoint,
    run_script,
    save_checkpoint,
    trained,
    wait_until,
)
from hostile import FUNCTION, job, scored
from zygote import CURVES

from common.rewards import RewardWorkers
from common.shards import find_checkpoint

pytestmark = pytest.mark.slow
IDENTITY = {"script": "grpo", "model": "0123"}


# --- checkpoints ----------------------------------------------------------------------------------

FILES = ["state/shard-00001-model-00001-of-00001.safetensors", "trainer.json", "manifest.json"]
POINTERS = ["../latest", "../best"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, world):
    """A run folder with checkpoints of steps 1 and 2; the second one is the best."""
    folder = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        options = {"state": {"loader": {"consumed": step}}, "keep": 2, "identity": IDENTITY}
        assert save_checkpoint(folder, step, trained(step), world, best=step == 2, **options)
    return folder


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


def swapped(file: Path, _: random.Random) -> None:
    """For that of the other step; there is one pointer for both."""
    shutil.copy(str(file).replace("step_000002", "step_000001"), file)


def replaced(file: Path, _: random.Random, by: Callable[[Path], object]) -> None:
    file.unlink()
    by(file)


INSTEAD = {
    "deleted": lambda file: None,
    "emptied": Path.touch,
    "100 MB": lambda file: file.write_bytes(bytes(10**8)),
    "a folder": Path.mkdir,
    "a full folder": lambda file: (file / "x" / "y").mkdir(parents=True),
    "a FIFO": os.mkfifo,
    "a device": lambda file: file.symlink_to("/dev/zero"),
    "a loop": lambda file: file.symlink_to(file.name),
    "a link to nothing": lambda file: file.symlink_to("nowhere"),
    "a link to a file": lambda file: file.symlink_to("/etc/passwd"),
}
DAMAGES = {
    "flipped": flipped,
    "scribbled": scribbled,
    "cut": cut,
    "grown": grown,
    "swapped": swapped,
}
DAMAGES |= {kind: partial(replaced, by=by) for kind, by in INSTEAD.items()}
PAIRS = [
    (name, kind)
    for name in FILES + POINTERS
    for kind in DAMAGES
    if name in FILES or kind != "swapped"
]


@pytest.mark.parametrize("name, kind", random.Random(1).sample(PAIRS, 40))
def test_a_damage(saved, world, tmp_path, name, kind):
    """Refused in one line with the remedy, or its weights are those that were saved."""
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    DAMAGES[kind](run / "checkpoints/step_000002" / name, random.Random(f"{name} {kind}"))
    after = trained(3)
    try:
        with deadline(10):
            where = str(run / "checkpoints/best") if name == "../best" else "auto"
            found = find_checkpoint(run, where, world, IDENTITY)
            state = load_checkpoint(found, after, world)
    except SystemExit as refusal:
        said = str(refusal)
        assert said.isprintable() and len(said) < 1000, "one line"
        assert str(run / "checkpoints") in said and "--resume" in said
        assert name.removeprefix("../") in said or name == "manifest.json", said
        return
    assert name in POINTERS or name == "manifest.json", "other bytes in silence"
    step = int(found.name.removeprefix("step_"))
    assert state["step"] == step == state["loader"]["consumed"]
    expected, got = (models["policy"][0].state_dict() for models in (trained(step), after))
    assert all(torch.equal(expected[key], got[key]) for key in expected), "other weights in silence"


# --- workers: besides what test_reward_workers has its functions do -------------------------------

MORE = """
import json, resource, socket


class Awkward(BaseException):
    def __str__(self):
        raise SystemExit


def throw(error):
    raise error


def shut():
    for number in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{number}"
        if os.path.exists(path) and "socket:" in os.readlink(path):
            socket.socket(fileno=int(number)).shutdown(socket.SHUT_RDWR)


ACTIONS = {
    "SIGSTOP itself": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "SIGKILL its group": lambda: os.killpg(0, signal.SIGKILL),
    "SIGSTOP its group": lambda: os.killpg(0, signal.SIGSTOP),
    "shut the sockets": shut,
    "KeyboardInterrupt": lambda: throw(KeyboardInterrupt()),
    "an exception that raises": lambda: throw(Awkward()),
    "a giant message": lambda: throw(ValueError("x" * 10**8)),
    "a giant text": lambda: {"score": 1.0, "pred": "x" * 300 * 2**20},
    "a million keys": lambda: {"score": 1.0, **dict.fromkeys(range(10**6), 1)},
    "surrogates as a key": lambda: {"score": 1.0, "\\ud800": "\\ud800"},
    "another folder": lambda: os.chdir("/") or 1.0,
    "its file is deleted": lambda: os.unlink(__file__) or 1.0,
    "no files allowed": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0)) or 1.0,
    "json is replaced": lambda: setattr(json, "dumps", lambda *_, **__: "x") or 1.0,
}
"""
LARGE = {"a giant message", "a giant text", "a million keys"}


@pytest.fixture
def pool(tmp_path):
    """Of one worker, which leaves no process behind."""
    (tmp_path / "function.py").write_text(FUNCTION + MORE)
    (tmp_path / "neighbour.py").write_text("LENGTH = 3\n")
    before = set(psutil.Process().children(recursive=True))
    pool = RewardWorkers(f"{tmp_path / 'function.py'}:act", 1, timeout_s=1.0, memory_gib=1.0)
    yield pool
    pool.close()
    wait_until(
        lambda: (
            not any(alive(p.pid) for p in set(psutil.Process().children(recursive=True)) - before)
        )
    )


@pytest.mark.parametrize("attack", re.findall(r'^    "([^"]+)": ', MORE, re.MULTILINE))
def test_a_reward_function(pool, attack):
    """It costs its sample, and the next job works within seconds."""
    if attack in LARGE:
        pool.timeout_s = 60.0
    with deadline(90):
        (reply,) = pool.score([job(attack)])
    if reply.keys() == {"error"}:
        assert len(reply["error"]) < 1000
    else:
        assert -1e6 <= reply["score"] <= 1e6
    pool.timeout_s = 3.0
    start = time.monotonic()
    while (reply := pool.score([job("5")])) != [scored(5)]:
        assert reply[0].keys() == {"error"} and time.monotonic() - start < 20, reply


# --- disks: what a reward function does to the run folder while the first of three steps is on reco

SABOTEUR = """
import os, shutil, subprocess
from pathlib import Path

run, name = Path(os.environ["RUN"]), os.environ["ATTACK"]
what, _, how = name.partition(": ")
BY = {"a folder": Path.mkdir, "a FIFO": os.mkfifo, "a file": Path.touch}
BY["removed"] = lambda file: None


def attack():
    if what == "full":
        with open(run / "filler", "wb", buffering=0) as file:
            while True:
                file.write(bytes(2**12))
    elif what == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", run.parent], check=True)
    else:
        file = run / what
        shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
        BY[how](file)


def fn(data_source, solution_str, ground_truth, extra_info=None):
    metrics = run / "metrics.jsonl"
    if metrics.is_file() and '"step": 1' in metrics.read_text():
        try:
            os.close(os.open(os.environ["MARK"], os.O_CREAT | os.O_EXCL))
            attack()
        except OSError:
            pass
    return float(len(solution_str) % 3)
"""
DISKS = [
    "full",
    "read-only",
    ".: removed",
    "checkpoints: removed",
    "lock: removed",
    "checkpoints/latest: a folder",
]
DISKS += ["metrics.jsonl: a FIFO", "curves.png: a folder"]
DISKS += [f"{name}: a file" for name in ("checkpoints", "rollouts", "eval", "model")]


@pytest.fixture
def disk(tmp_path):
    """A file system of 256 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", folder]).returncode
    ):
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("attack", DISKS)
def test_a_run_folder(disk, tmp_path, attack):
    """All steps, and no trace; what cannot be written at the end is one line."""
    (tmp_path / "saboteur.py").write_text(SABOTEUR)
    options = [
        "--engine",
        "hf",
        "--prompts-per-step",
        2,
        "--samples-per-prompt",
        2,
        "--max-response-tokens",
        16,
    ]
    options += [
        "--max-rows",
        8,
        "--total-steps",
        3,
        "--eval-every",
        1,
        "--eval-rows",
        2,
        "--save-every",
        1,
    ]
    options += ["--no-eval-before", "--dump-rollouts-every", 1]
    options += ["--reward-function", f"{tmp_path / 'saboteur.py'}:fn", "--output-dir", disk / "run"]
    environment = {"RUN": str(disk / "run"), "ATTACK": attack, "MARK": str(tmp_path / "mark")}
    environment[CURVES] = "1"
    done = run_script("grpo.py", *options, env=environment, check=False, timeout=180)
    assert (tmp_path / "mark").exists(), done.stdout
    said = done.stdout + done.stderr
    assert "Traceback" not in said and "step 3/3" in said, said[-3000:]
    if done.returncode:
        assert done.stderr.count("\n") == 1, done.stderr

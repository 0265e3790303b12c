"""Attacks on checkpoints, disks and workers, as one table (attack, n, outcome) at the end of its run.

pytest tests/test_attacks.py -m slow
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from helpers import ROOT, deadline, load_checkpoint, run_script, save_checkpoint, trained, wait_until
from test_reward_workers import FUNCTION, alive, job, scored

from common.rewards import RewardWorkers
from common.shards import find_checkpoint

pytestmark = pytest.mark.slow
IDENTITY = {"script": "grpo", "model": "0123"}


@pytest.fixture
def table(record_property):
    """table(attack, outcomes): for the summary, which counts the outcomes; rows of the same attack add up."""

    def add(attack: str, outcomes: list[str]) -> None:
        record_property("attack", (attack, outcomes))

    return add


# --- checkpoints --------------------------------------------------------------------------------------------------

FILES = ["state/shard-00001-model-00001-of-00001.safetensors", "trainer.json", "manifest.json"]
POINTERS = ["../latest", "../best"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, world):
    """A run folder with checkpoints of steps 1 and 2; the second one is the best."""
    folder = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        options = {"state": {"loader": {"consumed": step}}, "keep": 2, "identity": IDENTITY}
        torch.manual_seed(step)
        assert save_checkpoint(folder, step, trained(step), world, best=step == 2, **options)
    return folder


@pytest.fixture
def resume(saved, world, tmp_path, capsys):
    """resume(attack): the outcome, in words, of going on from a copy of the run after attack(step folder)."""

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
            assert time.monotonic() - start < 9
        said, step = capsys.readouterr().out, int(found.name.removeprefix("step_"))
        assert state["step"] == step and state["loader"] == {"consumed": step}
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


def test_a_sample_of_damages(resume, table):
    """Refused in one line, or its weights are those that were saved."""
    rng = random.Random(1)
    attacks = BYTES | KINDS
    for _ in range(40):
        name = rng.choice(FILES + POINTERS)
        kind = rng.choice(list(attacks))
        if name in POINTERS and kind == "that of another step":
            continue  # there is one for all steps
        outcome = resume(lambda folder, name=name, kind=kind: attacks[kind](folder / name, rng), name)
        if name in FILES[:-1]:
            assert outcome == "refused, with the remedy", (name, kind)
        table(f"checkpoint: {'a pointer' if name in POINTERS else 'a file'}, {kind}", [outcome])


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


# --- workers ------------------------------------------------------------------------------------------------------

MORE = """
import asyncio, collections, json, resource, shutil, socket
ROOM = 300 * 2**20


class Awkward(BaseException):
    def __str__(self):
        raise SystemExit


class Odd:
    def __float__(self):
        raise KeyboardInterrupt

    def __str__(self):
        os._exit(5)


class Endless(collections.abc.Mapping):
    __len__ = lambda self: 1
    __getitem__ = lambda self, key: 1.0
    __contains__ = lambda self, key: True

    def __iter__(self):
        while True:
            yield "score"


def throw(error):
    raise error


def shut():
    for number in os.listdir("/proc/self/fd"):
        if os.path.exists(f"/proc/self/fd/{number}") and "socket:" in os.readlink(f"/proc/self/fd/{number}"):
            socket.socket(fileno=int(number)).shutdown(socket.SHUT_RDWR)


def daemon():
    if not os.fork():
        os.setsid()
        if pid := os.fork():
            Path(os.environ["CHILD"]).write_text(str(pid))
            os._exit(0)
        time.sleep(600)
    os.wait()
    return 1.0


def forks(count):
    for _ in range(count):
        if not os.fork():
            time.sleep(600)
    return 1.0


def threads(count):
    for _ in range(count):
        threading.Thread(target=spin, daemon=True).start()
    return 1.0


def deep():
    value = []
    for _ in range(10**5):
        value = [value]
    return value


ACTIONS |= {
    "SIGSTOP itself": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "SIGKILL its group": lambda: os.killpg(0, signal.SIGKILL),
    "SIGSTOP its group": lambda: os.killpg(0, signal.SIGSTOP),
    "shut the sockets": shut,
    "close all files": lambda: os.closerange(0, 1000),
    "sleep in C": lambda: ctypes.CDLL(None).sleep(60),
    "a daemon": daemon,
    "20 forks": lambda: forks(20),
    "4 threads that spin": lambda: threads(4),
    "KeyboardInterrupt": lambda: throw(KeyboardInterrupt()),
    "GeneratorExit": lambda: throw(GeneratorExit()),
    "CancelledError": lambda: throw(asyncio.CancelledError()),
    "an exception that raises": lambda: throw(Awkward()),
    "a giant message": lambda: throw(ValueError("x" * 10**8)),
    "a giant text": lambda: {"score": 1.0, "pred": "x" * ROOM},
    "a million keys": lambda: {"score": 1.0, **dict.fromkeys(range(10**6), 1)},
    "a mapping without end": Endless,
    "an odd object": Odd,
    "1e300": lambda: 1e300,
    "10**400": lambda: 10**400,
    "-inf": lambda: -float("inf"),
    "a text": lambda: "1.0",
    "a complex": lambda: 1j,
    "a deep list": lambda: {"score": 1.0, "pred": deep()},
    "surrogates as a key": lambda: {"score": 1.0, "\\ud800": "\\ud800"},
    "another folder": lambda: os.chdir("/") or 1.0,
    "its file is deleted": lambda: os.unlink(__file__) or 1.0,
    "no files allowed": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0)) or 1.0,
    "no CPU time allowed": lambda: resource.setrlimit(resource.RLIMIT_CPU, (0, 0)) or spin(),
    "json is replaced": lambda: setattr(json, "dumps", lambda *_, **__: "x") or 1.0,
}
"""
HARMLESS = {"pid", "torch", "MiB", "nothing", "own error"}
ATTACKS = [name for name in re.findall(r'^    "([^"]+)": ', FUNCTION + MORE, re.MULTILINE) if name not in HARMLESS]


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """A pool of one worker, which dies with the test, and so does all that it has started."""
    (tmp_path / "function.py").write_text(FUNCTION + MORE)
    (tmp_path / "neighbour.py").write_text("LENGTH = 3\n")
    monkeypatch.setenv("CHILD", str(tmp_path / "child"))
    before = set(psutil.Process().children(recursive=True))
    pool = RewardWorkers(f"{tmp_path / 'function.py'}:act", 1, timeout_s=1.0, memory_gib=1.0)
    yield pool
    pool.close()
    if (tmp_path / "child").exists():
        with suppress(ProcessLookupError):
            os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    wait_until(lambda: not any(alive(p.pid) for p in set(psutil.Process().children(recursive=True)) - before))


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_reward_function(pool, table, attack):
    """It costs its sample, and the next job works within seconds."""
    patience = 60.0 if attack in ("a million keys", "a giant text", "a giant message") else 1.0
    outcomes = []
    for _ in range(3):
        pool.timeout_s = patience
        with deadline(90):
            (reply,) = pool.score([job(attack)])
        assert reply.keys() == {"error"} or -1e6 <= reply["score"] <= 1e6, reply
        outcomes.append(in_words(reply))
        pool.timeout_s, start, tries = 3.0, time.monotonic(), 1
        while (reply := pool.score([job("5")])) != [scored(5)]:
            assert reply[0].keys() == {"error"} and time.monotonic() - start < 20, reply
            tries += 1
        outcomes[-1] += f", and {tries - 1} after it" if tries > 1 else ""
        assert time.monotonic() - start < 20
    table(f"worker: {attack}", outcomes)


def in_words(reply: dict) -> str:
    if "error" not in reply:
        return f"the score {reply['score']:g}"
    assert len(reply["error"]) < 1000
    return f"costs its sample: {reply['error'].splitlines()[0][:60]}"


def test_a_reward_function_kills_the_trainer(tmp_path, table):
    killer = (
        "import os, signal, psutil\ndef f(**_):\n    os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL)\n"
    )
    (tmp_path / "f.py").write_text(killer)
    code = "import sys; from common.rewards import RewardWorkers; pool = RewardWorkers(sys.argv[1], 2, 60.0); "
    code += "print(pool.workers[0].process.pid, flush=True); pool.score([('test', '3', 7, {})] * 4)"
    command = [sys.executable, "-c", code, f"{tmp_path / 'f.py'}:f"]
    outcomes = []
    for _ in range(3):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == -signal.SIGKILL
        wait_until(lambda pid=int(done.stdout): not alive(pid), seconds=10)
        outcomes.append("the run ends, no worker is left")
    table("worker: SIGKILL of the trainer", outcomes)


# --- disks: what a reward function does to the run folder while the first of three steps is on record ---------------

SABOTEUR = """
import os, shutil, subprocess
from pathlib import Path

run, name = Path(os.environ["RUN"]), os.environ["ATTACK"]


def instead(file, by):
    shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
    by(file)


def fill():
    with open(run / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(2**12))


what, _, how = name.partition(": ")
BY = {"a folder": Path.mkdir, "a FIFO": os.mkfifo, "a file": Path.touch, "removed": lambda file: None}
BY |= {"a loop": lambda file: file.symlink_to(file.name), "a full device": lambda file: file.symlink_to("/dev/full")}


def attack():
    if what == "full":
        fill()
    elif what == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", run.parent], check=True)
    else:
        instead(run / what, BY[how])


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
DISKS = ["full", "read-only", ".: removed", "checkpoints: removed", "lock: removed"]
DISKS += [
    f"{name}: {kind}"
    for name in ("metrics.jsonl", "config.json", "checkpoints/latest")
    for kind in ("a folder", "a FIFO")
]
DISKS += ["metrics.jsonl: a loop", "metrics.jsonl: a full device"]
DISKS += [f"{name}: a file" for name in ("checkpoints", "rollouts", "eval", "model")] + ["curves.png: a folder"]


@pytest.fixture
def disk(tmp_path):
    """A file system of 256 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", folder]).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("attack", DISKS)
def test_a_run_folder(disk, tmp_path, table, attack):
    """Warnings, and all steps; what cannot be written at the end is one line."""
    (tmp_path / "saboteur.py").write_text(SABOTEUR)
    options = ["--engine", "hf", "--prompts-per-step", 2, "--samples-per-prompt", 2, "--max-response-tokens", 16]
    options += ["--max-rows", 8, "--total-steps", 3, "--eval-every", 1, "--eval-rows", 2, "--save-every", 1]
    options += ["--no-eval-before", "--dump-rollouts-every", 1]
    options += ["--reward-function", f"{tmp_path / 'saboteur.py'}:fn", "--output-dir", disk / "run"]
    environment = {"RUN": str(disk / "run"), "ATTACK": attack, "MARK": str(tmp_path / "mark")}
    done = run_script("grpo.py", *options, env=environment, check=False, timeout=180)
    assert (tmp_path / "mark").exists(), done.stdout
    said = done.stdout + done.stderr
    assert "Traceback" not in said and "step 3/3" in said, said[-3000:]
    warnings = [line for line in done.stdout.splitlines() if line.startswith("warning: ")]
    outcome = f"all steps, {len(warnings)} warnings, exit code {done.returncode}"
    if done.returncode:
        assert done.stderr.count("\n") == 1, done.stderr
        outcome += f": {done.stderr.strip().replace(str(disk), '')[:80]}"
    table(f"disk: {attack}", [outcome])

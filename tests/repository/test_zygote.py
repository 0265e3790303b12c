"""The warm process of the tests: a run that it forks is the run that torchrun starts, and ends as
that does."""

import json
import subprocess
import sys
import threading

import pytest
import zygote
from helpers import ROOT, WARM, alive, run_script, script_environment, wait_until

# slow: whatever differed would show in most tests of runs
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WARM, reason="CUDA does not survive a fork: all runs are fresh"),
]
PROBE = ROOT / "tests" / "workers" / "probe.py"
ALONE = (
    "import json, os, sys, time; open(sys.argv[1] + os.environ.get('RANK', ''), "
    "'w').write(str(os.getpid())); "
)


@pytest.fixture
def script(tmp_path):
    """script(text) is a script whose ranks first write their process ids into the files pid0, pid1
    ..."""

    def write(text: str) -> list:
        (tmp_path / "script.py").write_text(ALONE + text)
        return [tmp_path / "script.py", tmp_path / "pid"]

    return write


def pids(folder) -> list[int]:
    return [int(file.read_text() or 0) for file in sorted(folder.glob("pid*"))]


def probe(*arguments, fresh: bool) -> tuple[subprocess.CompletedProcess, dict, list]:
    done = run_script(PROBE, *arguments, env={"OWN": "1"}, fresh=fresh, check=False)
    seen, numbers = map(json.loads, done.stdout.splitlines())
    return done, seen, numbers


@pytest.mark.parametrize("ending, code", [(None, 0), ("text", 1), ("raise", 1)])
def test_a_forked_process_sees_what_a_fresh_one_sees(ending, code):
    arguments = [ending] if ending else []
    (forked, seen, numbers), (fresh, expected, other) = (
        probe(*arguments, fresh=f) for f in (False, True)
    )
    path = expected["path"]
    assert seen | {"path": seen["path"][: len(path)]} == expected, (
        "imports may have put more behind the path"
    )
    assert seen["environment"]["OWN"] == "1" and seen["argv"] == [str(PROBE), *arguments]
    assert not set(numbers) & {*other, *probe(fresh=False)[2]}, (
        "random numbers that nobody has seeded"
    )
    assert forked.returncode == fresh.returncode == code
    assert forked.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


def test_ranks_are_numbered_as_by_torchrun(script):
    names = [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "OMP_NUM_THREADS",
    ]
    # at one go
    code = f"os.write(1, (json.dumps([os.environ[name] for name in {names}]) + chr(10)).encode())"
    said = [
        sorted(run_script(*script(code), ranks=2, fresh=f).stdout.splitlines())
        for f in (False, True)
    ]
    assert (
        said[0] == [line.replace("localhost", "127.0.0.1") for line in said[1]]
        and len(said[0]) == 2
    )


def test_one_rank_that_fails_ends_the_others(script, tmp_path):
    code = "os.environ['RANK'] == '1' and sys.exit('error: mine'); time.sleep(600)"
    done = run_script(*script(code), ranks=2, check=False)
    assert done.returncode == 1 and done.stderr == "error: mine\n" and len(pids(tmp_path)) == 2
    assert not any(map(alive, pids(tmp_path)))


def test_a_signal_is_seen_in_the_exit_code(script):
    assert run_script(*script("os.kill(os.getpid(), 9)"), check=False).returncode == -9


def test_a_run_that_takes_too_long_is_killed(script, tmp_path):
    """And its children with it; what it has said is told."""
    code = "os.fork(); open(f'{sys.argv[1]}-{os.getpid()}', 'w').write(str(os.getpid())); "
    run_script(*script("pass"), ranks=2)  # the first one imports
    with pytest.raises(TimeoutError, match="so far"):
        run_script(
            *script(code + "print('so far', flush=True); time.sleep(600)"), ranks=2, timeout=10.0
        )
    assert len(set(pids(tmp_path))) == 4
    wait_until(lambda: not any(map(alive, pids(tmp_path))))


def test_what_cannot_change_after_an_import_is_refused(script):
    done = run_script(*script("pass"), env={"OMP_NUM_THREADS": "2"}, check=False)
    assert done.returncode == 1 and "OMP_NUM_THREADS" in done.stderr and "fresh=True" in done.stderr


def test_no_fork_beside_a_thread():
    event = threading.Event()
    thread = threading.Thread(target=event.wait)
    thread.start()
    try:
        with pytest.raises(SystemExit, match="threads before a fork"):
            zygote.refuse_threads()
    finally:
        event.set()
        thread.join()


def test_the_warm_process_dies_with_who_started_it(tmp_path):
    code = (
        "import sys, time, zygote; z = zygote.Zygote({}); print(z.process.pid, "
        "flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, env=script_environment(), stdout=subprocess.PIPE, text=True
    ) as starter:
        pid = int(starter.stdout.readline())
        assert alive(pid)
        starter.kill()
    wait_until(lambda: not alive(pid))

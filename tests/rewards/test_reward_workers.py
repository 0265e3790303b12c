"""Reward workers: whatever a function does costs its own sample, in bounded time, and no process is
left over.

pytest tests/rewards/test_reward_workers.py
"""

import errno
import math
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import wait
from types import SimpleNamespace

import pytest
from helpers import ROOT, alive, deadline, wait_until
from hostile import FUNCTION, job, scored

from common.hub import FOLDERS
from common.rewards import RewardWorkers, score_episodes
from common.torch_repair import transformers
from common.types import Episode, Row
from common.workers.process import SIZE_BYTES, Worker

TIMEOUT = 2.0  # seconds, in all tests that do not say otherwise


FAILING_LINE = FUNCTION[: FUNCTION.index("{}[key]")].count("\n") + 1

FAILURES = {
    "spin": "timeout after 2 s",
    "stubborn": "timeout after 2 s",
    "swallow": "timeout after 2 s",
    "exit": "the worker died (exit code 3)",
    "sys.exit": "SystemExit: 3",
    "segfault": "the worker died (Segmentation fault)",
    "kill": "the worker died (Killed)",
    "close": "the worker died (",
    "10 GB": "MemoryError (line ",
    "raise": f"KeyError: 'answer' (line {FAILING_LINE} of function.py)",
    "recurse": "RecursionError: maximum recursion depth exceeded",
    "none": "ValueError: reward function act on data_source 'test' returned the score None",
    "nan": "ValueError: reward function act on data_source 'test' returned the score nan",
    "no score": "ValueError: reward function act on data_source 'test' returned a mapping "
    'without the key "score"',
    "object": "ValueError: reward function act on data_source 'test' returned the score "
    "Result(score=1.0)",
}


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("user")
    (folder / "function.py").write_text(FUNCTION)
    (folder / "neighbour.py").write_text("LENGTH = 3\n")
    return f"{folder / 'function.py'}:act"


@pytest.fixture
def start(spec):
    """RewardWorkers(...), closed after the test."""
    started = []

    def start(function=spec, count=2, timeout_s=TIMEOUT, memory_gib=1.0):
        started.append(RewardWorkers(function, count, timeout_s, memory_gib))
        return started[-1]

    yield start
    for pool in started:
        pool.close()
        assert not any(alive(worker.process.pid) for worker in pool.workers)


def test_a_deadline_may_be_infinite(start):
    """It is not that of an idle worker, whose replies nobody reads."""
    assert start(timeout_s=math.inf).score([job("1"), job("2")]) == [scored(1.0), scored(2.0)]


def test_a_full_table_of_files_costs_workers_and_not_the_run(start, monkeypatch, capsys):
    pool = start(count=4)
    pool.share = 1

    def full():
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(pool, "new_worker", full)
    for key in range(3):
        pool.submit(key, job(str(key)), home=key)
    done = []
    while pool.pending:
        done += pool.poll(5.0)
    assert sorted(key for key, reply in done if "score" in reply) == [0, 1, 2]
    assert "Too many open files; 1 go on" in capsys.readouterr().out


def no_room(worker: Worker) -> None:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def test_no_room_to_start_a_worker_again_costs_its_job(start, monkeypatch):
    pool = start(count=1)

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "start", no_room)
        _, lost = pool.run([job("exit"), job("1")], "x")
        assert lost["error"].startswith("no worker starts")
    assert pool.score([job("2")]) == [scored(2.0)]


@pytest.mark.parametrize("message", [[], None, {}, {"error": 5}, {"error": ""}, {"result": 1}])
def test_a_message_that_is_no_reply_fails_its_job(start, monkeypatch, message):
    """A function that runs the policy's code may write to the socket."""
    pool = start(count=1)
    with monkeypatch.context() as patch:
        patch.setattr("common.workers.process.json.loads", lambda _: message)
        (reply,) = pool.run([job("1")], "x")
    assert "cannot be read: it is no reply" in reply["error"]


def test_a_message_left_over_from_a_job_answers_no_other(start):
    """It came with that job's reply in one read, so that no poll of the socket sees it."""
    pool = start(count=1)
    assert pool.score([job("1")]) == [scored(1.0)]
    (worker,) = pool.workers
    forged = b'{"result": {"score": 5.0}}'
    worker.link.inbox += len(forged).to_bytes(SIZE_BYTES, "big") + forged
    assert pool.score([job("2")]) == [scored(2.0)]


def test_a_job_goes_to_an_idle_worker_if_another_does_not_start(start, monkeypatch):
    pool = start(count=2)
    assert pool.score([job("1"), job("2")]) == [scored(1.0), scored(2.0)]
    pool.workers[0].kill()

    monkeypatch.setattr(Worker, "start", no_room)
    assert pool.score([job("3")]) == [scored(3.0)]


def test_a_reply_that_nests_too_deep_fails_its_job(start, monkeypatch):
    pool = start(count=1)

    def too_deep(_):
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr("common.workers.process.json.loads", too_deep)
    (reply,) = pool.run([job("1")], "x")
    assert "cannot be read" in reply["error"]


def test_each_failure_costs_its_own_sample(start):
    pool = start(count=4)
    quick = [name for name in FAILURES if not FAILURES[name].startswith("timeout")]
    for names in (FAILURES, quick):
        texts = [
            text for i, name in enumerate(names) for text in (f"{2 * i}", name, f"{2 * i + 1}")
        ]
        results = pool.score([job(text) for text in texts])
        assert len(results) == len(texts)
        for text, result in zip(texts, results):
            if text in FAILURES:
                assert result.keys() == {"error"} and result["error"].startswith(FAILURES[text]), (
                    text,
                    result,
                )
            else:
                assert result == scored(float(text))


def test_half_a_message_does_not_keep_the_others_waiting(start):
    with deadline(60):
        results = start(count=2).score([job("drip"), *[job(str(number)) for number in range(4)]])
    assert results == [{"error": "timeout after 2 s"}, *[scored(number) for number in range(4)]]


def test_bytes_that_trickle_hold_nobody_up(start):
    """A poll takes no longer than it is asked to, and the deadlines are kept, of all workers."""
    pool = start(count=3, timeout_s=1.0)
    pool.score([job("0.5", sleep=0.2)] * 3)
    began = time.monotonic()
    for number in range(3):
        pool.submit(number, job("trickle"))
    replies, longest = {}, 0.0
    while pool.pending and time.monotonic() < began + 20:
        start_of_poll = time.monotonic()
        replies |= pool.poll(0.0)
        longest = max(longest, time.monotonic() - start_of_poll)
        time.sleep(0.02)
    assert replies == {number: {"error": "timeout after 1 s"} for number in range(3)}
    assert longest < 0.8 and time.monotonic() - began < 3


def test_a_reply_that_waited_for_the_trainer_is_read_to_its_end(start):
    """As under --engine hf, whose step takes longer than a tool may: a large reply fits into no
    socket."""
    (worker,) = start(count=1, timeout_s=1.0).workers
    worker.take("job", job("write much"))
    time.sleep(2.0)
    reply = worker.poll()
    assert reply == {"score": 1.0, "pred": "x" * 2**22}


def test_replies_of_several_workers_wait_for_the_trainer(start):
    """It may be away after each look: what has begun to come is read to its end at once."""
    pool = start(count=2, timeout_s=2.0)
    pool.score([job("1"), job("2")])
    for number in range(2):
        pool.submit(number, job("write much"))
    replies: dict = {}
    for _ in range(3):
        time.sleep(2.5)
        replies |= pool.poll(0.0)
    assert replies == {number: {"score": 1.0, "pred": "x" * 2**22} for number in range(2)}


def test_a_reply_that_is_too_large_costs_its_sample(start, monkeypatch):
    monkeypatch.setattr("common.workers.process.MAX_REPLY", 2**20)
    large, after = start(count=1).score([job("write much"), job("2")])
    assert large["error"].startswith("its reply cannot be read: it has 41943") and after == scored(
        2
    )


def test_what_cannot_be_printed_is_replaced(start):
    good, bad = start(count=1).score([job("surrogates"), job("raise surrogates")])
    assert good == {"score": 1.0, "pred": "?"} and bad["error"].startswith("ValueError: ?")


def test_an_import_that_hangs_is_told_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr("common.workers.process.START_S", 1.0)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(
        ValueError, match="a reward worker did not start: its import did not end within 1 s"
    ):
        RewardWorkers(f"{tmp_path / 'slow.py'}:f", 1, timeout_s=9.0)


def test_a_worker_that_does_not_start_later_costs_its_job_and_is_tried_with_the_next(
    start, tmp_path, capfd
):
    file = tmp_path / "flaky.py"
    file.write_text(
        f"import os\nif os.path.exists({str(tmp_path / 'broken')!r}):\n    os._exit(4)\n"
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str) if solution_str.isdigit() else os._exit(0)\n"
    )
    pool = start(f"{file}:f", count=1)
    (tmp_path / "broken").touch()
    with deadline(60):
        died, *lost = pool.score([job("die"), job("3"), job("4")])
        assert died == {"error": "the worker died (exit code 0)"}
        assert lost == [{"error": "no worker starts: the worker died (exit code 4)"}] * 2
        (tmp_path / "broken").unlink()
        assert pool.score([job("3")]) == [{"score": 3.0}]
    assert (
        "warning: a reward worker did not start: the worker died (exit code 4)"
        in capfd.readouterr().out
    )


def test_no_trace_after_the_end(start, capfd):
    """The trainer leaves with a reply unread: the worker's socket is reset."""
    pool = start(count=1)
    pool.submit("unread", job("1"))
    (worker,) = pool.workers
    wait(worker.sources, 60.0)
    worker.link.close()
    assert worker.process.wait(60.0) == 0
    assert capfd.readouterr().err == "loaded\nscored 1\n"


def test_a_deadline_beyond_what_the_system_waits(start):
    assert start(timeout_s=1e9).score([job("5")]) == [scored(5)]


def test_results_are_in_the_order_of_the_jobs(start):
    pool = start(count=4)
    assert pool.score([]) == []
    jobs = [job(str(i), sleep=0.02 * ((7 * i) % 5)) for i in range(40)]
    assert pool.score(jobs) == [scored(i) for i in range(40)]


def test_deadline(start):
    """It is kept, for each job by itself; neither the queue nor a worker's start is part of it."""
    pool = start(count=1, timeout_s=1.0)
    began = time.monotonic()
    with deadline(60):
        assert pool.score([job("stubborn")] * 2) == [{"error": "timeout after 1 s"}] * 2
    assert time.monotonic() - began > 2.0
    assert pool.score([job(str(i), sleep=0.1) for i in range(12)]) == [scored(i) for i in range(12)]


def test_a_slow_import_is_not_part_of_the_deadline(start, tmp_path):
    file = tmp_path / "slow.py"
    file.write_text(
        "import os, time\ntime.sleep(1.2)\ndef f(data_source, solution_str, ground_truth, "
        "extra_info=None):\n"
        "    return float(solution_str) if solution_str.isdigit() else os._exit(0)\n"
    )
    pool = start(f"{file}:f", count=1, timeout_s=1.0)
    assert pool.score([job("die"), job("3")]) == [
        {"error": "the worker died (exit code 0)"},
        {"score": 3.0},
    ]


def test_what_built_in_functions_import_is_no_part_of_the_deadline():
    """sympy takes seconds; data that never compare formulas do not wait for it."""
    given = []
    for sources in ([], ["countdown", "openai/gsm8k"], ["math/x"]):
        pool = RewardWorkers(None, 1, timeout_s=60, sources=sources)
        pool.close()
        given.append(pool.workers[0].arguments[-1])
    program = "import sys; from common.rewards import make_built_in_scorer\n"
    program += f"for given in {given!r}: make_built_in_scorer(given); print('sympy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False", "True"], done.stderr


def test_an_answer_that_a_built_in_function_cannot_compare_in_time_is_wrong(capsys):
    pool = RewardWorkers(None, 1, timeout_s=0.5, sources=["math/x"])
    try:
        jobs = [
            ("math/x", r"\boxed{" * 3_000_000, "5", None),
            ("aime", "Answer: " * 3_000_000, "5", None),
        ]
        slow, slow_dapo, quick = pool.score([*jobs, ("math/x", r"\boxed{5}", "5", None)])
    finally:
        pool.close()
    assert (slow["score"], slow_dapo["score"], quick["score"]) == (0.0, -1.0, 1.0)
    assert "took longer than 0.5 s to compare and count as wrong" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["die later", "alarm"])
def test_a_death_between_jobs_costs_nothing(start, action):
    pool = start(count=1)
    pids = []
    for number in range(2):
        pids.append(pool.workers[0].process.pid)
        # which may be early on a busy machine
        assert "score" in pool.score([job(action)])[0] or action == "alarm"
        wait_until(lambda: not alive(pids[-1]))
        assert pool.score([job(str(number))]) == [scored(number)]
    assert len(set(pids)) == 2


def test_a_worker_that_stops_reading_does_not_block(start):
    """A thread that a function left behind keeps the GIL, and the next text does not fit the
    socket's buffer."""
    pool = start(count=1, timeout_s=0.5)
    assert pool.score([job("hang later")]) == [{"score": 1.0}]
    time.sleep(0.5)
    began = time.monotonic()
    pool.submit("large", job("5" + "." * 8 + " " * 4_000_000))
    assert time.monotonic() - began < 0.4
    assert pool.poll(60.0) == [("large", {"error": "timeout after 0.5 s"})]
    assert pool.score([job("5")]) == [scored(5)]


def test_after_memory_error_the_worker_is_new(start):
    pool = start(count=1)
    before, failed, after = pool.score([job("pid"), job("10 GB"), job("pid")])
    assert failed["error"].startswith("MemoryError") and before != after


def test_a_forked_child_that_comes_back_is_ignored(start):
    pool = start(count=1)
    texts = ["1", "fork", "2", "fork", "3"]
    assert [r["score"] for r in pool.score([job(t) for t in texts])] == [1.0, 1.0, 2.0, 1.0, 3.0]


@pytest.mark.parametrize(
    "action, error",
    [
        ("leave child", "timeout after 1 s"),
        ("fork and die", "the worker died (exit code 3)"),
        ("leave daemon and hang", "timeout after 1 s"),
        ("leave daemon and die", "the worker died (exit code 3)"),
    ],
)
def test_children_die_with_their_worker(start, tmp_path, monkeypatch, action, error):
    monkeypatch.setenv("CHILD", str(tmp_path / "child"))
    assert start(count=1, timeout_s=1.0).score([job(action), job("2")]) == [
        {"error": error},
        scored(2),
    ]
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not alive(child))


WAYS = ["fork", "spawn", "forkserver", "subprocess", "preexec", "os.fork", "fork of C"]


def test_terminate_ends_a_child_however_it_was_started(start):
    """It has no handler of the worker's: what a program does with an exception does not matter."""
    results = start(count=1, timeout_s=20.0).score([job(f"terminate {way}") for way in WAYS])
    signals = {way: result.get("score", result) for way, result in zip(WAYS, results)}
    assert signals == dict.fromkeys(WAYS, float(signal.SIGTERM))


@pytest.mark.slow  # by default children die with their worker
def test_a_pool_of_processes_in_a_function_ends(start):
    """Also where its processes have only just been forked."""
    assert start(count=1, timeout_s=30.0).score([job("pools")] * 2) == [{"score": 1.0}] * 2


def test_a_call_after_an_interrupted_one(start, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    def send() -> None:
        wait_until((tmp_path / "started").exists)
        os.kill(os.getpid(), signal.SIGALRM)

    pool = start(count=3, timeout_s=60.0)
    previous, sender = signal.signal(signal.SIGALRM, interrupt), threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.score([job("1", sleep=60.0), job("hang", file=str(tmp_path / "started"))])
    finally:
        sender.join()
        signal.signal(signal.SIGALRM, previous)
    assert pool.score([job("5", sleep=0.1)]) == [scored(5)]


def test_workers_are_light(start):
    results = start(count=1).score([job("torch"), job("MiB"), job("nothing")])
    assert results[0]["score"] == 0.0
    assert results[1]["score"] < 40
    assert results[2] == {"score": 1.0, "pred": "xxx"}


def test_many_short_jobs(start):
    pool = start(None)
    jobs = [
        ("countdown", f"<answer>{i}+1</answer>", {"numbers": [i, 1], "target": i + 1}, {})
        for i in range(1000)
    ]
    jobs[500] = ("countdown", "no tag", *jobs[500][2:])
    jobs[501] = ("my/chess", *jobs[501][1:])
    with deadline(60):  # 0.2 s on a quiet machine
        results = pool.score(jobs)
    assert "no built-in reward function for data_source 'my/chess'" in results.pop(501)["error"]
    assert [r["score"] for r in results] == [1.0] * 500 + [0.0] + [1.0] * 498


def test_prints_go_to_stderr(start, capfd):
    start(count=1).score([job("5")])
    out, err = capfd.readouterr()
    assert out == "" and "loaded" in err and "scored 5" in err


@pytest.mark.parametrize(
    "text, name, message",
    [
        (None, "f", "^--reward-function .*there is no file"),
        ("g = 1", "f", "^--reward-function .*defines no f"),
        ("x = 1\nf = y", "f", r"^--.* NameError: name 'y' is not defined \(line 2 of bad.py\)"),
        ("f = (", "f", "(?s)^--reward-function .*SyntaxError"),
        (
            "import os; os._exit(4)",
            "f",
            r"^a reward worker did not start: the worker died \(exit code 4\)",
        ),
    ],
)
def test_a_bad_file_is_explained_at_the_start(start, tmp_path, text, name, message):
    file = tmp_path / "bad.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=message):
        start(f"{file}:{name}")


@pytest.mark.parametrize("arguments", [(0, 1.0, 1.0), (1, 0.0, 1.0), (1, 1.0, -1.0)])
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match="workers: got"):
        RewardWorkers(None, *arguments)


def test_sigkill_of_the_trainer_leaves_no_worker(spec, tmp_path):
    """Hung or idle; and the trainer's script is not imported again by its workers."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from common.rewards import RewardWorkers\n"
        "print('main', flush=True)\n"
        "pool = RewardWorkers(sys.argv[1], 3, 600.0)\n"
        "pool.score([('test', '3', 7, {})] * 3)\n"  # more than one job at a time: all are started
        "print(*(worker.process.pid for worker in pool.workers), flush=True)\n"
        "texts = ['leave daemon and hang', 'hang']\n"
        "pool.score([('test', text, 7, {'file': sys.argv[2]}) for text in texts])\n"
    )
    command = [sys.executable, script, spec, tmp_path / "hangs"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CHILD": str(tmp_path / "child")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as trainer:
        assert trainer.stdout.readline() == "main\n"
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        wait_until((tmp_path / "hangs").exists)
        wait_until((tmp_path / "child").exists)
        assert len(pids) == 3 and all(map(alive, pids))
        wait_until(lambda: (tmp_path / "child").read_text())
        pids.append(int((tmp_path / "child").read_text()))
        trainer.send_signal(signal.SIGKILL)
        wait_until(lambda: not any(map(alive, pids)))
        assert trainer.stdout.read() == ""


def test_what_a_tool_says_earns_nothing(start):
    """Sampled, an observation with the answer in it, sampled: the policy does not know."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDERS["tiny"])
    said, seen = ["Let me ask", "I do not know"], "result: \\boxed{7}"
    parts = [tokenizer.encode(text, add_special_tokens=False) for text in (said[0], seen, said[1])]
    ids, mask = (
        [i for part in parts for i in part],
        [m for m, part in zip((1, 0, 1), parts) for _ in part],
    )
    episodes = [Episode(0, 0, [1], ids, mask, [0.0] * len(mask), "stop") for _ in range(2)]
    rows = {0: SimpleNamespace(data_source="math/x", ground_truth="7", extra_info={"index": 3})}
    score_episodes(episodes[:1], rows, start(None), tokenizer)
    assert episodes[0].rewards == {"score": 0.0, "pred": ""}

    score_episodes(episodes[1:], rows, jobs := Recorded(), tokenizer)
    (of_one,) = jobs.seen
    whole = tokenizer.decode(ids)
    assert of_one[1] == "\n".join(said), "turn by turn"
    assert of_one[3] == {"index": 3, "last_turn": said[1], "trajectory": whole}
    assert "boxed" in whole and rows[0].extra_info == {"index": 3}


class Recorded:
    """In a worker's place: what it is asked."""

    is_trl = False

    def __init__(self):
        self.seen = []

    def score(self, jobs):
        self.seen += jobs
        return [{"score": 1.0}] * len(jobs)


VERL = "lambda data_source, solution_str, ground_truth, extra_info=None:"
TRIALS = {  # a function: what is said of it, or nothing if it may go on
    "lambda prediction, **kwargs: [1.0]": "missing 1 required positional argument: 'prediction'",
    f"{VERL} None": "returned the score None",
    f"{VERL} float('nan')": "returned the score nan",
    f"{VERL} {{}}['x']": "KeyError: 'x' (line 1 of trial.py)",
    f"{VERL} 1 / len(solution_str)": "",
    f"{VERL} None if solution_str else 0": "",
    "lambda **given: len(given['extra_info']['last_turn'])": "",
}


@pytest.mark.parametrize("function", TRIALS)
def test_a_function_that_can_score_nothing_is_refused_at_the_start(start, tmp_path, function):
    (tmp_path / "trial.py").write_text(f"f = {function}\n")
    spec = f"{tmp_path / 'trial.py'}:f"
    row = Row(0, "x", "p", {"target": 7}, {"index": 0}, [1])
    workers = start(spec, count=1)
    if not TRIALS[function]:
        workers.try_out(spec, row)
        return
    with pytest.raises(ValueError) as error:
        workers.try_out(spec, row)
    for words in (
        f"--reward-function {spec}",
        TRIALS[function],
        "its truth as",
        "empty",
        "solution_str=...",
    ):
        assert words in str(error.value), words


def test_score_episodes(start):
    texts = ["3", "raise", "4", "own error"]
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: texts[ids[0]])
    episodes = [Episode(p, 0, [1], [i], [1], [0.0], "stop") for i, p in enumerate((8, 8, 9, 9))]
    rows = {
        p: SimpleNamespace(data_source="test", ground_truth=10 * p, extra_info={}) for p in (8, 9)
    }
    score_episodes(episodes, rows, start(), tokenizer)
    rewards = [episode.rewards for episode in episodes]
    assert rewards[0] == {"score": 3.0, "truth": 80.0} and rewards[2] == {
        "score": 4.0,
        "truth": 90.0,
    }
    assert math.isnan(rewards[1]["score"]) and rewards[1]["error"].startswith("KeyError: 'answer'")
    assert rewards[3] == {"score": 0.5, "error": 3.0}  # the function's own key, and no failure

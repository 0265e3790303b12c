"""TensorBoard, wandb, trackio and SwanLab, all optional: none may end a run, or hold it up for
long."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from urllib.error import HTTPError
from urllib.request import urlopen
from uuid import uuid4

from common.files import full_disk_is_a_warning, jsonable, replace_file
from common.flags import tracker_names

PROJECT = "minimal-rl"
TRACKER_SECONDS = 15  # a tracker that takes longer to answer is dropped


class Tracker(Protocol):
    """A run in a tracker. Its constructor opens it: (run_dir, options, online)."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self, failed: bool) -> None: ...


class TensorBoard:
    def __init__(self, run_dir: Path, options: dict, online: bool):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        self.writer.close()


class Wandb:
    def __init__(self, run_dir: Path, options: dict, online: bool):
        # before the import: else it asks for a key at a terminal
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        if not online:
            wandb.teardown()  # the first try has taken the id
        # capturing the console would wait for wandb, too
        settings = wandb.Settings(init_timeout=6, login_timeout=6, console="off")
        mode = None if online else "offline"
        self.run = wandb.init(
            **options,
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=str(run_dir),
            mode=mode,
            settings=settings,
        )
        # wandb's own step has to grow, and a resumed run repeats some
        self.run.define_metric("*", step_metric="step")
        place = self.run.url if online and not self.run.offline else "offline"
        print(f"--log wandb: {place}", flush=True)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log({"step": step, **metrics})

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class Trackio:
    def __init__(self, run_dir: Path, options: dict, online: bool):
        import trackio

        # a resumed run goes on; a new one does not join an older one whose folder had its name
        resume = "allow" if (run_dir / "metrics.jsonl").is_file() else "never"
        self.run = trackio.init(
            PROJECT, options["name"], config=options["config"], resume=resume, embed=False
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics, step=step)

    def close(self, failed: bool) -> None:
        self.run.finish()


class SwanLab:
    def __init__(self, run_dir: Path, options: dict, online: bool):
        import swanlab

        settings = swanlab.Settings(interactive=False)
        if online and settings.mode == "online" and settings.api_key:
            # any answer will do; SwanLab itself waits longer for one than we do
            with suppress(HTTPError):
                urlopen(settings.api_host, timeout=5).close()
        self.run = swanlab.init(
            **options,
            project=settings.project.name or PROJECT,  # SWANLAB_PROJ_NAME, which it has read
            log_dir=str(run_dir / "swanlab"),
            mode=None if online else "offline",
            settings=settings,
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics, step=step)

    def close(self, failed: bool) -> None:
        self.run.finish("crashed" if failed else "success")


START: dict[str, Callable[..., Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "swanlab": SwanLab,
}


class Trackers:
    """The trackers of --log; one that fails or hangs is dropped with a warning. ValueError for an
    unknown name."""

    def __init__(self, names: str, run_dir: Path, config: dict):
        self.run_dir = run_dir
        self.started: dict[str, Tracker] = {}
        with full_disk_is_a_warning(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
        for name in tracker_names(names):
            tracker, problem = start_tracker(name, run_dir, config)
            if tracker is None:
                self._drop(name, problem)
            else:
                self.started[name] = tracker

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, tracker in list(self.started.items()):
            _, problem = within(TRACKER_SECONDS, tracker.log, step, metrics)
            if problem:
                self._drop(name, problem)

    def close(self, failed: bool = False) -> None:
        for name, tracker in list(self.started.items()):
            _, problem = within(TRACKER_SECONDS, tracker.close, failed)
            if problem:
                self._drop(name, problem)

    def _drop(self, name: str, problem: str) -> None:
        if problem.startswith("ModuleNotFoundError"):
            problem += f": pip install {name}"
        metrics = self.run_dir / "metrics.jsonl"
        print(f"warning: --log {name} dropped ({problem}); metrics go on in {metrics}", flush=True)
        self.started.pop(name, None)


def start_tracker(name: str, run_dir: Path, config: dict) -> tuple[Tracker | None, str]:
    """(the tracker, "") or (None, why it does not start). If wandb or SwanLab cannot start
    online, they start offline, with a warning."""
    options = {
        "name": run_dir.resolve().name,
        "id": kept_id(run_dir),
        "resume": "allow",
        "config": jsonable(config),
    }
    start = START[name]
    deadline = time.monotonic() + TRACKER_SECONDS
    online_seconds = TRACKER_SECONDS * 2 / 3  # the rest is for a start offline
    tracker, problem = within(online_seconds, start, run_dir, options, online=True)
    # trackio by itself keeps what it cannot send
    if not problem or name not in ("wandb", "swanlab"):
        return tracker, problem
    seconds_left = deadline - time.monotonic()
    tracker, offline_problem = within(seconds_left, start, run_dir, options, online=False)
    if not offline_problem:
        # --append: the parts of a run that was resumed are one
        sync = "wandb sync --append" if name == "wandb" else "swanlab sync"
        print(
            f"warning: --log {name} stays offline ({problem}); "
            f"later: {sync} {run_dir}/{name}/*run-*",
            flush=True,
        )
    return tracker, offline_problem


def kept_id(run_dir: Path) -> str | None:
    """The id of the run in wandb and SwanLab, which a resumed run finds in its folder; None if it
    cannot be written or read."""
    path = run_dir / "tracker_id"
    with full_disk_is_a_warning(path):
        if not path.is_file():
            replace_file(path, lambda temporary: temporary.write_text(uuid4().hex[:20]))
        return path.read_text(errors="replace")


def within(seconds: float, function: Callable, *arguments, **kwargs) -> tuple[object, str]:
    """function(...) in a daemon thread: (its result, ""), or (None, the problem) if it fails or
    hangs."""
    outcome = [None, f"no answer within {seconds:.2g} s"]

    def call() -> None:
        try:
            outcome[:] = [function(*arguments, **kwargs), ""]
        except BaseException as error:
            # whatever a tracker raises: a run is worth more than its dashboard
            outcome[1] = f"{type(error).__name__}: {error}".splitlines()[0]

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return tuple(outcome)

"""TensorBoard, wandb, trackio and SwanLab, all optional: none may end or delay a run."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen
from uuid import uuid4

from common.files import full_disk_is_a_warning, jsonable, replace_file
from common.flags import tracker_names

TRACKER_SECONDS = 15  # a tracker that has not answered by then is dropped


def start_tensorboard(run_dir: Path, options: dict, online: bool) -> tuple[Callable, Callable]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run_dir / "tensorboard"))
    return lambda step, metrics: [
        writer.add_scalar(k, x, step) for k, x in metrics.items()
    ], lambda _: writer.close()


def start_wandb(run_dir: Path, options: dict, online: bool) -> tuple[Callable, Callable]:
    # before the import: else it asks for a key at a terminal
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    if not online:
        wandb.teardown()  # the first try has the id
    # the console would wait for it, too
    settings = wandb.Settings(init_timeout=6, login_timeout=6, console="off")
    run = wandb.init(
        **options, dir=str(run_dir), mode=None if online else "offline", settings=settings
    )
    run.define_metric("*", step_metric="step")  # its own has to grow, and a resume repeats some
    print(f"--log wandb: {run.url if online and not run.offline else 'offline'}", flush=True)
    return lambda step, metrics: run.log({"step": step, **metrics}), lambda failed: run.finish(
        exit_code=int(failed)
    )


def start_trackio(run_dir: Path, options: dict, online: bool) -> tuple[Callable, Callable]:
    import trackio

    # the folder, and not another of its name
    resume = "allow" if (run_dir / "metrics.jsonl").is_file() else "never"
    run = trackio.init(
        "minimal-rl", options["name"], config=options["config"], resume=resume, embed=False
    )
    return lambda step, metrics: run.log(metrics, step=step), lambda _: run.finish()


def start_swanlab(run_dir: Path, options: dict, online: bool) -> tuple[Callable, Callable]:
    import swanlab

    settings = swanlab.Settings(interactive=False)
    if online and settings.mode == "online" and settings.api_key:
        with suppress(HTTPError):  # an answer; by itself it waits longer than we do
            urlopen(settings.api_host, timeout=5).close()
    where = {"log_dir": str(run_dir / "swanlab"), "mode": None if online else "offline"}
    run = swanlab.init(**options, **where, settings=settings)
    ends = ("success", "crashed")
    return lambda step, metrics: run.log(metrics, step=step), lambda failed: run.finish(
        ends[failed]
    )


START = {
    "tensorboard": start_tensorboard,
    "wandb": start_wandb,
    "trackio": start_trackio,
    "swanlab": start_swanlab,
}


def kept_id(run_dir: Path) -> str | None:
    """By which wandb and SwanLab know the run; a resume finds it in the folder."""
    path = run_dir / "tracker_id"
    with full_disk_is_a_warning(path):
        if not path.is_file():
            replace_file(path, lambda temporary: temporary.write_text(uuid4().hex[:20]))
        return path.read_text(errors="replace")


class Trackers:
    """Those of --log that work; one that fails or hangs is dropped with a warning. ValueError for
    an unknown name."""

    def __init__(self, names: str, run_dir: Path, config: dict):
        self.run_dir, self.started = run_dir, {}
        with full_disk_is_a_warning(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
        for tracker in tracker_names(names):
            options = {"name": run_dir.resolve().name, "id": kept_id(run_dir), "resume": "allow"}
            options["config"] = jsonable(config)
            end = time.monotonic() + TRACKER_SECONDS
            start = partial(START[tracker], run_dir, options)
            self.started[tracker], problem = within(
                TRACKER_SECONDS * 2 / 3, partial(start, online=True)
            )
            # trackio keeps here by itself what it cannot send
            if problem and tracker in ("wandb", "swanlab"):
                self.started[tracker], still = within(
                    end - time.monotonic(), partial(start, online=False)
                )
                if not still:
                    # the parts of a run that was resumed
                    append = "--append " * (tracker == "wandb")
                    later = f"later: {tracker} sync {append}{run_dir}/{tracker}/*run-*"
                    print(
                        f"warning: --log {tracker} stays offline ({problem}); {later}", flush=True
                    )
                problem = still
            self._keep(tracker, problem)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for tracker, (log, _) in list(self.started.items()):
            self._keep(tracker, within(TRACKER_SECONDS, partial(log, step, metrics))[1])

    def close(self, failed: bool = False) -> None:
        for tracker, (_, close) in list(self.started.items()):
            self._keep(tracker, within(TRACKER_SECONDS, partial(close, failed))[1])

    def _keep(self, tracker: str, problem: str) -> None:
        if problem:
            metrics = self.run_dir / "metrics.jsonl"
            problem += (
                f": pip install {tracker}" if problem.startswith("ModuleNotFoundError") else ""
            )
            print(
                f"warning: --log {tracker} dropped ({problem}); metrics go on in {metrics}",
                flush=True,
            )
            del self.started[tracker]


def within(seconds: float, function: Callable) -> tuple[object, str]:
    """function() in a daemon thread: (its result, ""), or (None, what went wrong) if it fails or
    hangs."""
    outcome = [None, f"no answer within {seconds:.2g} s"]

    def target():
        try:
            outcome[:] = function(), ""
        except BaseException as error:
            # whatever a tracker raises: a run is worth more than its dashboard
            outcome[1] = f"{type(error).__name__}: {error}".splitlines()[0]

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(seconds)
    return tuple(outcome)

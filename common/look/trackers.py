"""TensorBoard and wandb, of which none may end or delay a run."""

import threading
from collections.abc import Callable
from pathlib import Path

from common.files import jsonable
from common.flags import tracker_names

TRACKER_SECONDS = 15  # a tracker that has not answered by then is dropped


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


START = {"tensorboard": start_tensorboard, "wandb": start_wandb}


class Trackers:
    """Those of --log that work; one that fails or hangs is dropped with a warning. ValueError for an unknown name."""

    def __init__(self, names: str, run_dir: Path, config: dict, name: str):
        self.run_dir, self.started = run_dir, {}
        run_dir.mkdir(parents=True, exist_ok=True)
        for tracker in tracker_names(names):
            start = START[tracker]
            if started := self._try(tracker, lambda start=start: start(run_dir, config, name)):
                self.started[tracker] = started

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for tracker, (log, _) in list(self.started.items()):
            self._try(tracker, lambda log=log: log(step, metrics))

    def close(self) -> None:
        for tracker, (_, close) in list(self.started.items()):
            self._try(tracker, close)
        self.started.clear()

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
            metrics = self.run_dir / "metrics.jsonl"
            print(f"warning: --log {tracker} dropped ({problem}); metrics go on in {metrics}", flush=True)
            self.started.pop(tracker, None)
        return result

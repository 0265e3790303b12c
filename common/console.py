"""What a run says on the console: the status line of a step, and samples of an evaluation."""

import tomllib
from collections import deque
from pathlib import Path
from statistics import median

from common.files import shorten
from common.progress import duration, say

# metric -> label, width, format
COLUMNS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
# not on the lines of RL, whose loss says nothing: room for what does
SUPERVISED = {"policy/loss", "optim/lr"}


class StatusLine:
    """Cells of fixed width, blank where a metric is absent; what is left to do by the time of the
    last steps."""

    def __init__(self, total_steps: int):
        self.total_steps = total_steps
        # in order of first appearance, so that a late metric shifts no other
        self.columns: list[str] = []
        self.step_times: deque[float] = deque(maxlen=20)

    def line(self, step: int, metrics: dict[str, float]) -> str:
        if "time/step_s" in metrics:
            self.step_times.append(metrics["time/step_s"])
        left = max(0, self.total_steps - step)
        eta = duration(median(self.step_times) * left) if self.step_times else "?"
        text = f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}  eta {eta:>5}"
        cells = {key: cell(key, metrics[key]) for key in COLUMNS if key in metrics}
        if untrained(metrics):
            cells["optim/grad_norm"] = "untrained"
        if skipped := metrics.get("optim/skipped_steps"):
            cells["optim/grad_norm"] = f"skipped {skipped:.0f}"
        self.columns += [key for key in cells if key not in self.columns]
        shown = [
            key
            for key in self.columns
            if key not in SUPERVISED or "reward/mean" not in self.columns
        ]
        for key in sorted(shown, key=lambda key: key.startswith("eval/")):
            label, width, _ = COLUMNS[key]
            text += f"  {cells.get(key, ''):{len(label) + 1 + width}}"
        return text.rstrip()


def cell(key: str, value: float) -> str:
    label, width, spec = COLUMNS[key]
    return f"{label} {fitted(value, width, spec)}"


def fitted(value: float, width: int, spec: str) -> str:
    """A number in so many columns; one that is too large with fewer decimals than `spec` has, or in
    thousands."""
    texts = [f"{value:{spec}}", *(f"{value:.{decimals}f}" for decimals in (3, 2, 1, 0))]
    texts += [f"{value / 1000**power:.0f}{unit}" for power, unit in enumerate("kMGT", 1)]
    return next((text for text in texts if len(text) <= width), f"{value:.0e}").rjust(width)


def untrained(metrics: dict[str, float]) -> bool:
    """Is it a step of training that had no gradient? All groups were equal, or no token was left to
    train on."""
    norms = [metrics.get(f"{model}/grad_norm") for model in ("optim", "value")]
    return "optim/loss_scale" in metrics and not any(norms)


def print_samples(step: int, samples: list[dict]) -> None:
    """The first two of {prompt, completion, score, truth, truncated}, shortened in the middle;
    None: not scored."""
    for sample in samples[:2]:
        said = sample.get("trajectory", sample["completion"])
        prompt, completion = shorten(sample["prompt"], 300), shorten(said, 600)
        score = "none" if sample["score"] is None else f"{sample['score']:g}"
        head = f"--- step {step}, score {score}, truth {shorten(str(sample['truth']), 100)}"
        cut = " [cut off]" * sample["truncated"]
        print(f"{head}\n{prompt}\n>>> {completion}{cut}", flush=True)


def announce(rollouts, updates: int) -> None:
    """What is going to happen: `rollouts`, and so many optimizer steps after each."""
    num_prompts, flags = len(rollouts.train_data), rollouts.flags
    passes = rollouts.total_steps * rollouts.draws / num_prompts
    say(
        f"{num_prompts} prompts; a step: {rollouts.draws} x {flags.samples_per_prompt} "
        f"samples, {updates} "
        f"updates; {rollouts.total_steps} steps pass over the data {passes:.2f} times"
    )
    if rollouts.draws > num_prompts:
        told = f"a step draws {rollouts.draws} prompts of {num_prompts} rows"
        say(f"warning: {told}: lower --prompts-per-step, it repeats them")

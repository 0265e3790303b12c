"""The judge in a run: how it is opened, and what is done without its verdicts."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn
from urllib.parse import urlsplit

from common.flags import Rollout
from common.processes import fail
from common.rewards.judge import Judge, JudgeUnavailable


def open_judge(rollout: Rollout, needed: bool, **options) -> Judge | None:
    """The judge that the environment names, probed, if the data need one or a reward function may ask one.

    ValueError if the environment names none, or one that judges badly; exit code 75 if none answers. Options as for
    `Judge`.
    """
    urls = [url.strip() for url in os.environ.get("JUDGE_URLS", "").split(",") if url.strip()]
    asked = bool(urls) if rollout.reward_function else needed
    if rollout.replay or not asked:
        return None
    if not urls:
        raise ValueError("rows of this data are decided by a judge: set JUDGE_URLS (docs/pyvision.md)")
    for number, url in enumerate(urls, start=1):
        if not is_address(url):  # it may hold a password, so that it is not shown
            raise ValueError(f"JUDGE_URLS: number {number} of {len(urls)} is no http://HOST:PORT/v1")
    model, key = os.environ.get("JUDGE_MODEL", ""), os.environ.get("JUDGE_API_KEY", "").strip() or "EMPTY"
    patience_s, probes = 60 * patience_minutes(), wants_probe()
    try:
        judge = Judge(urls, model, key, patience_s=patience_s, **options)
    except ImportError as error:
        raise ValueError("a judge needs the package openai: pip install -r requirements.txt") from error
    if probes:
        try:
            judge.probe()
        except JudgeUnavailable as outage:
            end_run(f"no judge answers ({outage}): start it, or set JUDGE_URLS")
    return judge


def patience_minutes() -> float:
    """How long the judge may give no answer, by JUDGE_PATIENCE. ValueError for what is no such time."""
    text = os.environ.get("JUDGE_PATIENCE", "30")
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not minutes > 0:
        raise ValueError(f"JUDGE_PATIENCE={text!r:.40}: expected a number of minutes above 0")
    return minutes


def wants_probe() -> bool:
    """Is the judge asked for a right and a wrong pair at the start? JUDGE_PROBE=0 takes any. ValueError for others."""
    text = os.environ.get("JUDGE_PROBE", "1")
    if text not in ("0", "1"):
        raise ValueError(f"JUDGE_PROBE={text!r:.40}: expected 0 (take any judge) or 1 (ask it for two pairs first)")
    return text == "1"


def is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        cut = "@" in parts._replace(netloc="").geturl()  # by a slash in a password
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not cut
    except ValueError:  # of the host or the port
        return False


@contextmanager
def saved_at_outage(judge: Judge | None, step: int) -> Iterator[None]:
    """Around what asks the judge in a step: its outage ends the run where the step began, on all ranks alike."""
    try:
        yield
    except JudgeUnavailable as outage:
        failed = False in [save(step) for save in judge.at_outage]
        saved = "could not be saved as it was" if failed else "is saved as it was"
        end_run(f"judge: {outage}. The run {saved} before step {step + 1}, which a resume repeats")


def end_run(why: str) -> NoReturn:
    """With the exit code of what may work later."""
    fail(why)
    raise SystemExit(os.EX_TEMPFAIL)


def bounded(summarize: Callable[[list[dict]], dict], samples: list[dict], notice: Callable[[str], None]) -> dict:
    """The summary of an evaluation. A lower and an upper bound take the place of the accuracy, after a notice, if the
    judge has left samples without a verdict."""
    metrics, unjudged = summarize(samples), sum(sample["unjudged"] for sample in samples)
    if not unjudged:
        return metrics
    best = summarize([sample | {"correct": True} if sample["unjudged"] else sample for sample in samples])
    low, high = metrics.pop("eval/accuracy"), best["eval/accuracy"]
    missing = f"no verdict by the judge on {unjudged} of {len(samples)} samples, which count as wrong"
    notice(f"evaluation INCOMPLETE: {missing}; the accuracy is between {low:.4f} and {high:.4f}")
    return metrics | {"eval/unjudged": unjudged, "eval/accuracy_low": low, "eval/accuracy_high": high}

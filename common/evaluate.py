"""Evaluation of a policy during a run: sample, score, summarize."""

import math
from dataclasses import replace
from pathlib import Path

from torch import nn

from common.distributed import gather_objects
from common.engine.books import Sampling
from common.episodes import Episode, Row, sample_episodes
from common.flags import Data
from common.job import Job
from common.logger import Logger
from common.look.samples import report, side_by_side, summarize
from common.metrics import is_correct
from common.models import sync_engine
from common.rewards import score_episodes
from common.rollouts import Rollouts, prompt_data


def evaluate(
    rollouts: Rollouts, policy: nn.Module, step: int, logger: Logger, report_to: Path | None = None
) -> dict[str, float]:
    """eval/* of the policy, whose weights are those of `step`; the same on every rank. Leaves the engine asleep.

    Each rank samples its share of the first --eval-rows rows. The seeds depend on the row alone, so two evaluations
    differ by the weights and nothing else. A response that could not be scored scores 0. Writes all to `report_to`.
    """
    world, data, flags = rollouts.world, rollouts.eval_data, rollouts.flags
    sync_engine(rollouts.engine, policy, step)
    sampling = Sampling(
        flags.eval_samples, flags.max_response_tokens, flags.eval_temperature, flags.eval_top_p, flags.eval_top_k
    )
    rows = {i: data[i] for i in range(world.rank, min(rollouts.run.eval_rows, len(data)), world.size)}
    episodes = sample_episodes(
        rollouts.engine, rows, sampling, seed=rollouts.run.seed, step=-1, weights_step=step, turns=rollouts.turns
    )
    rollouts.engine.sleep()
    score_episodes(episodes, rows, rollouts.workers, rollouts.tokenizer)
    own = [as_sample(e, rows[e.prompt_index], rollouts) for e in episodes]
    samples = [sample for part in gather_objects(own) for sample in part]
    samples.sort(key=lambda sample: sample["group"])
    if report_to and world.is_main:
        world.print(f"{report(samples, report_to)}\nsamples: {report_to}")
    logger.samples(step, samples)
    return summarize(samples)


def as_sample(episode: Episode, row: Row, rollouts: Rollouts) -> dict:
    """What a report wants to know of an episode."""
    sample = {
        "group": episode.prompt_index,
        "row": row.index,
        "data_source": row.data_source,
        "prompt": rollouts.tokenizer.decode(episode.prompt_ids),
        "completion": rollouts.tokenizer.decode(episode.response_ids),
        "truth": episode.truth,
        "score": episode.rewards["score"] if math.isfinite(episode.rewards["score"]) else 0.0,
        "correct": is_correct(episode.rewards),
        "pred": str(episode.rewards.get("pred", "")),
        "length": len(episode.response_ids),
        "truncated": episode.truncated,
        "anls": episode.rewards.get("anls"),
    }
    if rollouts.turns:
        sample |= {"calls": len(episode.calls), "call_errors": sum(call["error"] for call in episode.calls)}
    return sample


def evaluate_only(job: Job, rollouts: Rollouts, policy: nn.Module, step: int, logger: Logger) -> Path:
    """--eval-only: the table on the console, all samples in the run folder; returns their file."""
    report_to = job.output_dir / "eval_samples.parquet"
    metrics = evaluate(rollouts, policy, step, logger, report_to)
    logger.event({"event": "eval_only", "step": step, **metrics})
    return report_to


def compare_without_tools(
    job: Job, rollouts: Rollouts, data: Data, policy: nn.Module, step: int, logger: Logger, with_tools: Path
) -> None:
    """Evaluate the same rows without tools, and print both side by side."""
    rows = prompt_data(job, data, rollouts.flags, None, data.eval_data, flag="--eval-data")
    blind = with_tools.with_stem("eval_samples_without_tools")
    evaluate(replace(rollouts, eval_data=rows, turns=None), policy, step, logger, blind)
    if job.world.is_main:
        job.world.print(side_by_side({"with tools": with_tools, "without": blind}))

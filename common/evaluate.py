"""Evaluation of a policy during a run: sample, score, summarize."""

from pathlib import Path

from torch import nn

from common.distributed import gather_objects
from common.engine.books import Sampling
from common.job import Job
from common.logger import Logger
from common.look.console import print_samples
from common.look.samples import as_sample, report, summarize
from common.models import sync_engine
from common.processes import sign_of_life
from common.progress import Progress
from common.rewards import score_episodes
from common.rewards.judging import bounded
from common.rollouts import Rollouts

AT_ONCE = 256  # samples of a rank under way
PICTURED = 64  # rows, of a model that sees: a megapixel is 8 MB


def evaluate(rollouts: Rollouts, policy: nn.Module, step: int, report_to: Path | None = None) -> dict[str, float]:
    """eval/* of the policy, whose weights are those of `step`; the same on every rank. Leaves the engine asleep.

    Each rank samples its share of the first --eval-rows rows, some at a time. The seeds depend on the row alone, so
    two evaluations differ by the weights and nothing else. A response that could not be scored scores 0, one without a
    truth not at all. Writes all to eval/step_NNNNNN.parquet, or to `report_to`, with a table on the console.
    """
    world, data, flags = rollouts.world, rollouts.eval_data, rollouts.flags
    sync_engine(rollouts.engine, policy, step)
    sampling = Sampling(
        flags.eval_samples, flags.max_response_tokens, flags.eval_temperature, flags.eval_top_p, flags.eval_top_k
    )
    at_once = min(PICTURED if data.vision else AT_ONCE, AT_ONCE // flags.eval_samples)
    at_once = max(at_once, 1) * world.size  # rows of all ranks
    judge = rollouts.judge and rollouts.judge.for_evaluation()
    count, samples = min(rollouts.run.eval_rows, len(data)), []
    for start in Progress("evaluation", range(0, count, at_once)):
        rows = {i: data[i] for i in range(start + world.rank, min(start + at_once, count), world.size)}
        episodes = rollouts.sample_with(sampling, rows, step=-1, weights_step=step)
        scored = [e for e in episodes if rows[e.prompt_index].ground_truth is not None]
        score_episodes(scored, rows, rollouts.workers, rollouts.tokenizer, judge)
        own = [as_sample(e, rows[e.prompt_index], rollouts.tokenizer, bool(rollouts.turns)) for e in episodes]
        samples += [sample for part in gather_objects(own) for sample in part]
        sign_of_life()
    rollouts.engine.sleep()
    samples.sort(key=lambda sample: sample["group"])
    if world.is_main:
        path = report_to or rollouts.output_dir / "eval" / f"step_{step:06d}.parquet"
        table = report(samples, path)
        if report_to:
            world.print(f"{table}\nsamples: {path}")
        print_samples(step, samples)
    return bounded(summarize, samples, world.print)


def evaluate_only(job: Job, rollouts: Rollouts, policy: nn.Module, step: int, logger: Logger) -> Path:
    """--eval-only: the table on the console, all samples in the run folder; returns their file."""
    report_to = job.output_dir / "eval_samples.parquet"
    metrics = evaluate(rollouts, policy, step, report_to)
    logger.event({"event": "eval_only", "step": step, **metrics})
    return report_to

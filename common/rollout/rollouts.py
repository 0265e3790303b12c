"""Sampling, scoring and evaluation, as one rank of an RL script does them."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed import ProcessGroup

from common.data.order import RowOrder
from common.data.prompts import PromptData
from common.distributed import World, gather_objects
from common.ending import sign_of_life
from common.engine.protocol import Engine
from common.flags import Rollout
from common.logger import Logger
from common.models import sleep_engine, sync_engine
from common.processes import in_threads
from common.progress import Progress, say
from common.rewards import RewardWorkers, score_episodes
from common.rollout.dumps import dump_rollouts
from common.rollout.evaluation import as_sample, print_samples, report, summarize_with_bounds
from common.rollout.sampling import sample_episodes
from common.torch_repair import transformers
from common.types import Episode, Row, Sampling, Watch

if TYPE_CHECKING:
    from common.rewards.model import RewardModel
    from common.rollout.trajectories import Turns

MAX_SAMPLES = 256  # samples of an evaluation that a rank has under way
MAX_ROWS_WITH_PICTURES = 64  # rows, if they have pictures: a megapixel takes 8 MB


@dataclass
class Rollouts:
    """Draws prompts, samples, scores and evaluates, with the parts that this rank has opened."""

    world: World
    tokenizer: "transformers.PreTrainedTokenizerBase"
    flags: Rollout
    seed: int
    output_dir: Path
    train_data: PromptData | None  # None with --eval-only, as is the loader
    loader: RowOrder | None
    eval_data: PromptData | None
    eval_rows: int  # how many rows of eval_data are used, at most
    engine: Engine | None  # None with --replay
    turns: "Turns | None"  # None if nothing answers the policy
    reward_workers: RewardWorkers
    reward_model: "RewardModel | None" = None
    engine_group: ProcessGroup | None = None  # the ranks that share the engine

    @property
    def can_evaluate(self) -> bool:
        return self.engine is not None and self.eval_data is not None

    def draw(self, count: int, first: int = 0) -> dict[int, Row]:
        """This rank's share of the next `count` prompts: {place in the step: row}, where the places
        of all ranks begin at `first`."""
        drawn = list(enumerate(self.loader.next(count), start=first))
        share = drawn[self.world.rank :: self.world.size]
        rows = in_threads(self.train_data.__getitem__, [position for _, position in share])
        return dict(zip([place for place, _ in share], rows))

    def sample(
        self, prompts: Mapping[int, Row], step: int, watch: Watch = nullcontext
    ) -> list[Episode]:
        """--samples-per-prompt episodes of each prompt, by the weights of step `step`."""
        sampling = Sampling(
            n=self.flags.samples_per_prompt,
            max_tokens=self.flags.max_response_tokens,
            temperature=self.flags.temperature,
        )
        return self._sample(sampling, prompts, seed_step=step, weights_step=step, watch=watch)

    def _sample(
        self,
        sampling: Sampling,
        prompts: Mapping[int, Row],
        *,
        seed_step: int,
        weights_step: int,
        watch: Watch = nullcontext,
    ) -> list[Episode]:
        """Episodes of this rank's prompts. Ranks that share an engine all sample for the prompts of
        all of them."""
        prompts_of_ranks = (
            gather_objects(prompts, self.engine_group) if self.engine_group else [prompts]
        )
        all_prompts: dict[int, Row] = {}
        for prompts_of_rank in prompts_of_ranks:
            all_prompts |= prompts_of_rank
        episodes = sample_episodes(
            self.engine,
            dict(sorted(all_prompts.items())),
            sampling,
            seed=self.seed,
            step=seed_step,
            weights_step=weights_step,
            turns=self.turns,
            watch=watch,
        )
        if self.engine_group:
            token_ids = tuple(token for episode in episodes for token in episode.response_ids)
            if len(set(gather_objects(hash(token_ids), self.engine_group))) > 1:
                raise RuntimeError("the ranks that share an engine have sampled different tokens")
        return [episode for episode in episodes if episode.prompt_index in prompts]

    def score(self, episodes: list[Episode], prompts: Mapping[int, Row]) -> None:
        """Fill the rewards of episodes. A reward model takes the engine's place in memory."""
        score_episodes(episodes, prompts, self.reward_workers, self.tokenizer)
        if self.reward_model:
            self.engine.sleep()
            self.reward_model.score_episodes(episodes, prompts, self.tokenizer)

    def evaluate(
        self, policy: nn.Module, step: int, samples_file: Path | None = None
    ) -> dict[str, float]:
        """Sample and score the first --eval-rows rows with the policy's weights, those of `step`.
        Returns eval/*, the same on every rank; the engine is asleep afterwards.

        A seed depends on the row alone, so two evaluations differ only by the weights. A response
        that could not be scored counts as 0; a row without a truth does not count. All samples are
        written to eval/step_NNNNNN.parquet. With `samples_file` they are written there instead, and
        a table to the console.
        """
        sync_engine(self.engine, policy, step)
        samples: list[dict] = []
        num_rows = min(self.eval_rows, len(self.eval_data))
        rows_at_once = self._rows_at_once()
        for start in Progress("evaluation", range(0, num_rows, rows_at_once)):
            end = min(start + rows_at_once, num_rows)
            new_samples = self._evaluate_rows(
                range(start + self.world.rank, end, self.world.size), step
            )
            for samples_of_rank in gather_objects(new_samples):
                samples += samples_of_rank
            sign_of_life()
        sleep_engine(self.engine, policy)
        samples.sort(key=lambda sample: sample["group"])
        if self.world.is_main:
            self._write_samples(samples, step, samples_file, num_rows)
            print_samples(step, samples)
        return summarize_with_bounds(samples)

    def _write_samples(
        self, samples: list[dict], step: int, samples_file: Path | None, num_rows: int
    ) -> None:
        if samples_file is None:
            report(samples, self.output_dir / "eval" / f"step_{step:06d}.parquet")
            return
        table = report(samples, samples_file, self.eval_data.record)
        say(
            f"{table}\nsamples: {samples_file}, of the first {num_rows} of "
            f"{len(self.eval_data)} rows (--eval-rows)"
        )

    def _rows_at_once(self) -> int:
        """Rows of an evaluation that are under way together, over all ranks."""
        rows = MAX_SAMPLES // self.flags.eval_samples
        if self.eval_data.vision:
            rows = min(rows, MAX_ROWS_WITH_PICTURES)
        return max(1, rows) * self.world.size

    def _evaluate_rows(self, numbers: range, step: int) -> list[dict]:
        """Samples of these rows, scored where the row has a truth."""
        rows = {row.index: row for row in in_threads(self.eval_data.__getitem__, numbers)}
        sampling = Sampling(
            n=self.flags.eval_samples,
            max_tokens=self.flags.max_response_tokens,
            temperature=self.flags.eval_temperature,
            top_p=self.flags.eval_top_p,
        )
        # no training step: the seeds of an evaluation do not depend on when it happens
        episodes = self._sample(sampling, rows, seed_step=-1, weights_step=step)
        with_truth = [e for e in episodes if rows[e.prompt_index].ground_truth is not None]
        score_episodes(with_truth, rows, self.reward_workers, self.tokenizer)
        has_tools = self.turns is not None
        return [as_sample(e, rows[e.prompt_index], self.tokenizer, has_tools) for e in episodes]

    def evaluate_only(self, policy: nn.Module, step: int, logger: Logger) -> None:
        """--eval-only: the table on the console, all samples in the run folder."""
        samples_file = self.output_dir / f"eval_samples{self.eval_data.files.suffix}"
        metrics = self.evaluate(policy, step, samples_file)
        logger.event({"event": "eval_only", "step": step, **metrics})

    def dump(
        self,
        step: int,
        sampled: list[Episode],
        trained: list[Episode],
        advantages: list[float],
        micro_batch_tokens: int,
    ) -> None:
        """Write the episodes of a step, and a page to look at them, into the run folder.
        advantages: of `trained`. All ranks call it together."""
        path = dump_rollouts(
            self.output_dir / "rollouts",
            step,
            sampled,
            trained,
            advantages,
            self.tokenizer,
            self.world,
            micro_batch_tokens=micro_batch_tokens,
        )
        if self.world.is_main:
            from common.look.page import write_page

            write_page(path, self.tokenizer)

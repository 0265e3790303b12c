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
from common.processes import ahead_in_threads, in_threads
from common.progress import say
from common.rewards import RewardWorkers, score_episodes
from common.rollout.dumps import dump_rollouts
from common.rollout.evaluation import as_sample, print_samples, report, summarize_with_bounds
from common.rollout.sampling import sample_episodes, sample_prompts
from common.torch_repair import transformers
from common.types import Episode, Row, Sampling, Watch

if TYPE_CHECKING:
    from common.rewards.model import RewardModel
    from common.rollout.trajectories import Turns

# samples of an evaluation that a rank has under way: as many as vLLM samples together
MAX_SAMPLES = 256
MAX_SAMPLES_ON_GPU = 1024  # the same on a GPU; not with tools, whose processes are on the CPU
# rows with pictures in memory, those ahead included, for each rank that shares an engine: a
# megapixel takes 3 MB beside its encoded original
MAX_ROWS_WITH_PICTURES = 64
ROWS_AHEAD = 8  # rows that are opened while earlier ones are sampled


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
        share = slice(self.world.rank, None, self.world.size)
        places = range(first, first + count)[share]
        row_numbers = self.loader.next(count)[share]
        rows = in_threads(self.train_data.__getitem__, row_numbers)
        return dict(zip(places, rows, strict=True))

    def sample(
        self, prompts: Mapping[int, Row], step: int, watch: Watch = nullcontext
    ) -> list[Episode]:
        """--samples-per-prompt episodes of each prompt, by the weights of step `step`. Ranks that
        share an engine all sample the prompts of all of them, and each returns its own."""
        sampling = Sampling(
            n=self.flags.samples_per_prompt,
            max_tokens=self.flags.max_response_tokens,
            temperature=self.flags.temperature,
        )
        prompts_of_ranks = [prompts]
        if self.engine_group:
            prompts_of_ranks = gather_objects(prompts, self.engine_group)
        all_prompts: dict[int, Row] = {}
        for prompts_of_rank in prompts_of_ranks:
            all_prompts |= prompts_of_rank
        episodes = sample_episodes(
            self.engine,
            dict(sorted(all_prompts.items())),
            sampling,
            seed=self.seed,
            step=step,
            weights_step=step,
            turns=self.turns,
            watch=watch,
        )
        self._check_same_tokens(episodes)
        return [episode for episode in episodes if episode.prompt_index in prompts]

    def _check_same_tokens(self, episodes: list[Episode]) -> None:
        """RuntimeError if the ranks that share the engine have sampled different tokens."""
        if self.engine_group is None:
            return
        token_ids = tuple(token for episode in episodes for token in episode.response_ids)
        if len(set(gather_objects(hash(token_ids), self.engine_group))) > 1:
            raise RuntimeError("the ranks that share an engine have sampled different tokens")

    def score(self, episodes: list[Episode], prompts: Mapping[int, Row]) -> None:
        """Fill the rewards of episodes. A reward model takes the engine's place in memory."""
        score_episodes(episodes, prompts, self.reward_workers, self.tokenizer)
        if self.reward_model:
            self.engine.sleep()
            self.reward_model.score_episodes(episodes, prompts, self.tokenizer)

    def evaluate(
        self, policy: nn.Module, step: int, samples_file: Path | None = None
    ) -> dict[str, float]:
        """Sample and score the first --eval-rows rows with the policy's weights, those of step
        `step`. Returns eval/*, the same on every rank; the engine is asleep afterwards.

        Seeds do not depend on the step, so two evaluations differ only by the weights. A response
        that could not be scored counts as 0; a row without a truth does not count. All samples are
        written to eval/step_NNNNNN.parquet. With `samples_file` they are written there instead, and
        a table to the console.
        """
        sync_engine(self.engine, policy, step)
        num_rows = min(self.eval_rows, len(self.eval_data))
        own_samples = self._evaluate_rows(num_rows, step)
        sleep_engine(self.engine, policy)
        samples: list[dict] = []
        for samples_of_rank in gather_objects(own_samples):
            samples += samples_of_rank
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
        table = report(samples, samples_file, self.eval_data.file_row)
        say(
            f"{table}\nsamples: {samples_file}, of the first {num_rows} of "
            f"{len(self.eval_data)} rows (--eval-rows)"
        )

    @property
    def _rows_at_once(self) -> int:
        """Rows of an evaluation that a rank has under way."""
        num_samples = MAX_SAMPLES
        if self.world.device.type == "cuda" and self.turns is None:
            num_samples = MAX_SAMPLES_ON_GPU
        num_rows = max(1, num_samples // self.flags.eval_samples)
        if self.eval_data.vision:
            num_rows = min(num_rows, MAX_ROWS_WITH_PICTURES - ROWS_AHEAD)
        return num_rows

    def _evaluate_rows(self, num_rows: int, step: int) -> list[dict]:
        """Samples of this rank's share of the first `num_rows` rows, scored where a row has a
        truth.

        A row is opened when another one has all its samples, so none waits for the longest of the
        others. When as many rows have ended as are under way together, they are scored and dropped.
        Ranks that share an engine sample the rows of all of them.
        """
        sampling = Sampling(
            n=self.flags.eval_samples,
            max_tokens=self.flags.max_response_tokens,
            temperature=self.flags.eval_temperature,
            top_p=self.flags.eval_top_p,
        )
        num_ranks = self.flags.engine_parallel
        first_rank = self.world.rank // num_ranks * num_ranks
        ranks_of_engine = range(first_rank, first_rank + num_ranks)
        # row n is of rank n % world.size
        numbers = [n for n in range(num_rows) if n % self.world.size in ranks_of_engine]
        share = slice(self.world.rank, num_rows, self.world.size)
        own_indices = set(self.eval_data.usable[share].tolist())  # `Row.index` of each
        rows_in_order = ahead_in_threads(self.eval_data.__getitem__, numbers, ROWS_AHEAD)
        rows_at_once = num_ranks * self._rows_at_once
        samples: list[dict] = []
        rows: dict[int, Row] = {}  # those that have ended and wait to be scored
        episodes: list[Episode] = []  # of these rows
        ended_rows = sample_prompts(
            self.engine,
            ((row.index, row) for row in rows_in_order),
            len(numbers),
            sampling,
            seed=self.seed,
            step=-1,  # the seeds of an evaluation do not depend on when it happens
            weights_step=step,
            turns=self.turns,
            at_once=rows_at_once,
            label="evaluation, responses",
        )
        for num_ended, (row, episodes_of_row) in enumerate(ended_rows, start=1):
            rows[row.index] = row
            row.media = []  # the engine alone needs pictures
            for episode in episodes_of_row:
                episode.media = []
                episodes.append(episode)
            if len(rows) == rows_at_once or num_ended == len(numbers):
                self._check_same_tokens(episodes)
                own_episodes = [e for e in episodes if e.prompt_index in own_indices]
                samples += self._score_samples(own_episodes, rows)
                rows = {}
                episodes = []
                sign_of_life()
        return samples

    def _score_samples(self, episodes: list[Episode], rows: Mapping[int, Row]) -> list[dict]:
        """Samples of an evaluation, scored where the row has a truth."""
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

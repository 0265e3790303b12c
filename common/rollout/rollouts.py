"""What the RL scripts sample from, score with and evaluate by: prompts, engine, tools, rewards."""

from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from math import ceil
from pathlib import Path
from typing import NoReturn

from torch import nn
from torch.distributed import ProcessGroup, new_subgroups

from common.assets.build.embedded import embedded_data
from common.data.prompts import PromptData, steps_of
from common.data.protocols import Code, Protocol, protocol_of
from common.data.render import end_token_ids, end_turns_properly
from common.distributed import barrier, gather_objects
from common.ending import sign_of_life
from common.engine.hf import HuggingFaceEngine
from common.engine.protocol import EngineConfig
from common.engine.vllm import VllmEngine
from common.files import refuse, user_errors
from common.flags import Data, Rollout, Run, check_reward_timeout, refuse_idle
from common.hub import EMBEDDED, resolve_model
from common.job import Job
from common.logger import Logger
from common.look.page import write_page
from common.memory.halving import remembered_budget
from common.models import sync_engine
from common.precision import GAP_LIMITS
from common.processes import cpus_of_rank, in_threads
from common.progress import Progress, say
from common.rewards import RewardWorkers, score_episodes
from common.rewards.model import RewardModel, check_reward_model
from common.rollout.dumps import dump_rollouts, replayed_micro_batch_tokens
from common.rollout.evaluation import as_sample, bounded, print_samples, report
from common.rollout.sampling import Watch, sample_episodes
from common.rollout.trajectories import Turns
from common.sandbox.python import PythonWorkers
from common.tools.environments import is_class
from common.tools.pools import ToolPool, ToolWorkers
from common.types import Episode, Row, Sampling

AT_ONCE = 256  # samples of an evaluation, on a rank, under way
PICTURED = 64  # rows of it, of a model that sees: a megapixel is 8 MB
MAX_UNSCORED_STEPS = 3  # in a row: the run ends


class Rollouts:
    """What the RL scripts sample from, score with and evaluate by.

    None may be the engine (--replay), `turns` (no tools), `train_data`, `loader` (--eval-only).
    """

    def __init__(
        self,
        job: Job,
        data: Data,
        rollout: Rollout,
        run: Run,
        *,
        trained: list[str],
        frozen: list[str],
        reward_model: str | None = None,
        oversample: float = 1.0,
    ):
        """Read the data, start workers and engine. trained, frozen: folders of the models that
        share the memory; oversample: how many times --prompts-per-step a step draws."""
        self.world, self.tokenizer, self.output_dir = job.world, job.tokenizer, job.output_dir
        self.job, self.flags, self.run = job, rollout, run
        self.unscored_steps = 0  # the last ones in a row of which no response could be scored
        job.max_model_len = rollout.max_prompt_tokens + rollout.max_response_tokens
        again = bool(rollout.replay) and (job.output_dir / "checkpoints").exists()
        refuse(
            again,
            f"--replay: {job.output_dir} has checkpoints of its own; give another --output-dir",
        )
        refuse_idle(rollout, {"max_images": (job.vision is not None, "a vision-language --model")})
        refuse_idle(rollout, {"sleep_level": (job.world.device.type == "cuda", "a GPU")})
        reward_folder = (
            resolve_model(reward_model, "--reward-model")
            if reward_model and not rollout.replay
            else None
        )
        # the engine, and what reckons with memory, would be the first to miss any
        job.check_weights(job.path)
        for folder in set(trained) - {job.path}:
            job.check_weights(folder, "--critic-model", headless=True)
        if reward_folder:
            check_reward_model(reward_folder)
        shared = rollout.engine_parallel  # ranks that share an engine
        # one may wait for another's rewards
        timeout = timedelta(minutes=min(run.stall_minutes, 1e6) + 10)
        self.group = (
            new_subgroups(shared, timeout=timeout, backend="gloo")[0] if shared > 1 else None
        )
        with user_errors():
            if job.vision or rollout.multi_turn:
                end_turns_properly(job.tokenizer, job.vision and job.vision.processor)
            tools = open_tools(rollout, self.group) if rollout.multi_turn else None
            self.train_data, self.eval_data = read_prompts(job, data, rollout, tools)
            self.turns = None
            if tools:
                self.turns = Turns(
                    job.tokenizer, tools, job.vision, rollout, open_protocol(job.tokenizer, tools)
                )
            rewarded = self.turns and self.turns.try_out(self.train_data or self.eval_data)
            scored = (
                [] if rollout.reward_function or rewarded else [self.train_data, self.eval_data]
            )
            sources = {name for prompts in scored if prompts for name in prompts.sources}
            count = max(1, cpus_of_rank() - 1)
            self.workers = RewardWorkers(
                rollout.reward_function, count, rollout.reward_timeout, sources=sources
            )
            check_reward_timeout(rollout, self.workers.timeout_s)
            rows = self.train_data or self.eval_data
            known = (
                row
                for row in map(rows.__getitem__, range(len(rows)))
                if row.ground_truth is not None
            )
            if rollout.reward_function and not rollout.replay and (row := next(known, None)):
                # now, not after the first rollout
                self.workers.try_out(rollout.reward_function, row)
        # prompts of a step, without refills
        self.draws = ceil(round(rollout.prompts_per_step * oversample, 6))
        self.total_steps, self.loader = run.total_steps or 0, None
        if self.train_data:
            num_rows = len(self.train_data)
            self.total_steps = run.total_steps or steps_of(run.total_epochs, num_rows, self.draws)
            self.loader = job.open_loader(num_rows, self.train_data.fingerprint)
        # mean |engine - trainer| of log-probs
        self.max_gap = rollout.max_logprob_gap or GAP_LIMITS[job.compute_dtype]
        if rollout.replay and job.machine.micro_batch_tokens is None:
            job.micro_batch_tokens = (
                replayed_micro_batch_tokens(rollout.replay) or job.micro_batch_tokens
            )
        job.plan_memory(rollout, trained, frozen, reward_model=reward_folder)
        # before the trainer: it loads by itself, and is asleep when the trainer takes its memory
        self.engine = None if rollout.replay else start_engine(job, rollout)
        self.reward_model = (
            RewardModel(reward_folder, job.compute_dtype, job.world.device)
            if reward_folder
            else None
        )
        engine = "vllm" if rollout.uses_vllm else "hf"
        if rollout.engine == "auto" and engine == "hf":
            engine = "hf, as vLLM is not installed"
        say(f"{job.summary}, rollouts by {engine}")

    @property
    def can_evaluate(self) -> bool:
        return self.engine is not None and self.eval_data is not None

    def draw(self, count: int, first: int = 0) -> dict[int, Row]:
        """This rank's share of the next `count` prompts, by their place in the step; the first of
        all has `first`."""
        places = list(enumerate(self.loader.next(count), start=first))[
            self.world.rank :: self.world.size
        ]
        return dict(in_threads(lambda drawn: (drawn[0], self.train_data[drawn[1]]), places))

    def sample(
        self, prompts: Mapping[int, Row], step: int, watch: Watch = nullcontext
    ) -> list[Episode]:
        """--samples-per-prompt episodes of each prompt, by the weights of optimizer step `step`."""
        sampling = Sampling(
            self.flags.samples_per_prompt, self.flags.max_response_tokens, self.flags.temperature
        )
        return self.sample_with(sampling, prompts, step=step, weights_step=step, watch=watch)

    def sample_with(
        self, sampling: Sampling, prompts: Mapping[int, Row], **options
    ) -> list[Episode]:
        """Episodes of this rank's prompts. Ranks that share an engine all sample for the prompts of
        all of them."""
        parts = gather_objects(prompts, self.group) if self.group else [prompts]
        rows = dict(sorted((index, part[index]) for part in parts for index in part))
        episodes = sample_episodes(
            self.engine, rows, sampling, seed=self.run.seed, turns=self.turns, **options
        )
        if self.group:
            tokens = hash(tuple(token for e in episodes for token in e.response_ids))
            if len({*gather_objects(tokens, self.group)}) > 1:
                raise RuntimeError("the ranks that share an engine have sampled different tokens")
        return [e for e in episodes if e.prompt_index in prompts]

    def score(self, episodes: list[Episode], rows: Mapping[int, Row]) -> None:
        """Fill their rewards. A reward model takes the engine's place."""
        score_episodes(episodes, rows, self.workers, self.tokenizer)
        if self.reward_model:
            self.engine.sleep()
            self.reward_model.score_episodes(episodes, rows, self.tokenizer)

    def count_unscored(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note, from the metrics of all ranks, a step of which no response could be scored: it
        trains nothing."""
        if "reward/unscored_steps" not in metrics:
            self.unscored_steps = 0
            return
        self.unscored_steps += 1
        say(
            f"warning: step {step} trains nothing: no response of it could be scored, see above why"
        )

    @property
    def scores_nothing(self) -> bool:
        """Is it time to save and to end the run, on all ranks alike?"""
        return self.unscored_steps >= MAX_UNSCORED_STEPS

    def end_unscored(self, step: int) -> NoReturn:
        told = f"no response of {self.unscored_steps} steps in a row could be scored, see above why"
        raise SystemExit(
            f"{told}: the run ends at step {step}; the same command goes on from its last "
            "checkpoint"
        )

    def evaluate(
        self, policy: nn.Module, step: int, report_to: Path | None = None
    ) -> dict[str, float]:
        """eval/* of the policy, whose weights are those of `step`; the same on every rank. Leaves
        the engine asleep.

        Each rank samples its share of the first --eval-rows rows. Seeds depend on the row alone, so
        two evaluations differ by the weights alone. A response that could not be scored scores 0,
        one without a truth not at all. Writes all to eval/step_NNNNNN.parquet, or to `report_to`,
        with a table on the console.
        """
        world, data, flags = self.world, self.eval_data, self.flags
        sync_engine(self.engine, policy, step)
        sampling = Sampling(
            n=flags.eval_samples,
            max_tokens=flags.max_response_tokens,
            temperature=flags.eval_temperature,
            top_p=flags.eval_top_p,
        )
        at_once = (
            max(1, min(PICTURED if data.vision else AT_ONCE, AT_ONCE // flags.eval_samples))
            * world.size
        )
        count, samples = min(self.run.eval_rows, len(data)), []
        for start in Progress("evaluation", range(0, count, at_once)):
            own = range(start + world.rank, min(start + at_once, count), world.size)
            rows = {row.index: row for row in in_threads(data.__getitem__, own)}
            episodes = self.sample_with(sampling, rows, step=-1, weights_step=step)
            scored = [e for e in episodes if rows[e.prompt_index].ground_truth is not None]
            score_episodes(scored, rows, self.workers, self.tokenizer)
            new = [
                as_sample(e, rows[e.prompt_index], self.tokenizer, bool(self.turns))
                for e in episodes
            ]
            samples += [sample for part in gather_objects(new) for sample in part]
            sign_of_life()
        self.engine.sleep()
        samples.sort(key=lambda sample: sample["group"])
        if world.is_main:
            path = report_to or self.output_dir / "eval" / f"step_{step:06d}.parquet"
            table = report(samples, path, data.record if report_to else None)
            if report_to:
                say(
                    f"{table}\nsamples: {path}, of the first {count} of {len(data)} rows "
                    "(--eval-rows)"
                )
            print_samples(step, samples)
        return bounded(samples)

    def evaluate_only(self, policy: nn.Module, step: int, logger: Logger) -> Path:
        """--eval-only: the table on the console, all samples in the run folder; returns their
        file."""
        report_to = self.output_dir / f"eval_samples{self.eval_data.files.suffix}"
        logger.event({"event": "eval_only", "step": step, **self.evaluate(policy, step, report_to)})
        return report_to

    def dump(
        self, step: int, sampled: list[Episode], trained: list[Episode], advantages: list[float]
    ) -> None:
        """Write the episodes of a step into the run folder, and a page to look at. All ranks call
        it together."""
        folder = self.output_dir / "rollouts"
        tokens = remembered_budget(self.output_dir, self.job.micro_batch_tokens)
        path = dump_rollouts(
            folder,
            step,
            sampled,
            trained,
            advantages,
            self.tokenizer,
            self.world,
            micro_batch_tokens=tokens,
        )
        if self.world.is_main:
            write_page(path, self.tokenizer)


def has_tools(flags: Rollout) -> bool:
    """May the policy call something? A function as --environment only answers. SystemExit if it
    cannot be loaded."""
    if flags.tools or not flags.environment:
        return bool(flags.tools)
    with user_errors():
        return is_class(flags.environment)


def open_tools(flags: Rollout, group: ProcessGroup | None = None) -> ToolPool:
    """What answers the policy, in processes. ValueError if they do not start."""
    names = [part.strip() for part in (flags.tools or "").split(",")]
    workers, timeout_s = flags.tool_workers, flags.tool_timeout
    if not {"python", "python_unconfined"} & {*names}:
        return ToolWorkers(
            flags.tools or "", workers, timeout_s, environment=flags.environment, group=group
        )
    if len(names) > 1 or flags.environment:
        raise ValueError(
            f"--tools {flags.tools}: python has sandboxes of its own, and stands alone"
        )
    confined = names == ["python"]
    if not confined:
        say(
            "warning: --tools python_unconfined: the policy's programs run as you, with your "
            "files and network"
        )
    return PythonWorkers(
        workers, timeout_s, confined=confined, anew=flags.deterministic, group=group
    )


def open_protocol(tokenizer, tools: ToolPool) -> Protocol | None:
    """How the policy calls tools by its chat template; None if it has none, or only prompts can
    teach it. ValueError
    for a template that calls them in a way that is not known."""
    schemas = [tool.schema for tool in tools.tools.values()]
    try:
        return protocol_of(tokenizer, schemas) if schemas else None
    except ValueError:
        if tools.protocol is Code:
            return None
        raise


def read_prompts(
    job: Job, data: Data, rollout: Rollout, tools: ToolPool | None
) -> tuple[PromptData | None, PromptData | None]:
    """Prompts to train on (None with --eval-only) and to evaluate on; an embedded model brings its
    own. If the chat template renders any of them, responses end where it ends a turn."""
    train_files, eval_files = data.train_data, data.eval_data
    if job.run.model in EMBEDDED and not (eval_files if rollout.eval_only else train_files):
        train_files, held_out = embedded_data(
            job.run.model, job.output_dir / "data", write=job.world.is_main
        )
        barrier()
        eval_files = eval_files or held_out
    options = {
        "data": data,
        "rollout": rollout,
        "tokenizer": job.tokenizer,
        "vision": job.vision,
        "world": job.world,
    }
    options |= {"tools": tools and tools.tools, "num_embeddings": job.num_embeddings}
    options["plays"] = bool(rollout.environment) and is_class(rollout.environment)
    train_data = (
        None if rollout.eval_only else PromptData(train_files, max_rows=data.max_rows, **options)
    )
    eval_data = PromptData(eval_files, flag="--eval-data", **options) if eval_files else None
    templated = any(prompts and prompts.uses_template for prompts in (train_data, eval_data))
    if templated and not (job.vision or rollout.multi_turn):  # with those it was done before
        end_turns_properly(job.tokenizer, None)
    # which an export of a checkpoint cannot know
    job.identity["end_token"] = job.tokenizer.eos_token
    return train_data, eval_data


def start_engine(job: Job, rollout: Rollout) -> VllmEngine | HuggingFaceEngine:
    """The engine of --engine, asleep."""
    make_engine = VllmEngine if rollout.uses_vllm else HuggingFaceEngine
    config = EngineConfig(
        job.path,
        job.compute_dtype,
        job.world,
        end_ids=end_token_ids(job.path, job.tokenizer),
        max_model_len=job.max_model_len,
        memory_gib=job.engine_memory,
        sleep_level=rollout.sleep_level,
        ranks=rollout.engine_parallel,
        trust_remote_code=job.machine.trust_remote_code,
        vision=job.vision,
        max_images=rollout.max_images,
    )
    engine = make_engine(config)
    engine.sleep()
    return engine


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

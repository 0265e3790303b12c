"""Open the parts that sample and score: tools, prompts, turns, reward workers, the engine."""

import json
from collections.abc import Iterable
from datetime import timedelta
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import ProcessGroup, new_subgroups

from common.command_line import refuse_idle
from common.data.order import steps_of
from common.data.prompts import PromptData
from common.data.render import end_token_ids, end_turns_properly
from common.distributed import World
from common.engine.protocol import Engine, EngineConfig
from common.files import user_errors
from common.flags import Data, Rollout, Run, check_reward_timeout
from common.job import Job
from common.processes import cpus_of_rank
from common.progress import say
from common.rewards import RewardWorkers
from common.types import Tool

if TYPE_CHECKING:
    from common.data.protocols import ToolProtocol
    from common.rollout.trajectories import Turns
    from common.tools.pools import ToolPool

MAX_TRIED_ROWS = 100  # rows searched for one with a truth, to try out a user's function on


def check_rollout(job: Job, rollout: Rollout) -> None:
    """SystemExit for rollout flags that cannot work with this model, machine or run folder."""
    if rollout.replay and (job.output_dir / "checkpoints").exists():
        raise SystemExit(
            f"--replay: {job.output_dir} has checkpoints of its own; give another --output-dir"
        )
    if rollout.replay and "base" in job.machine.offload:
        raise SystemExit("--offload base has no effect: with --replay there is no engine")
    uses = {
        "max_images": (job.vision is not None, "a vision-language --model"),
        "sleep_level": (job.world.device.type == "cuda", "a GPU"),
        "engine_args": (rollout.uses_vllm, "--engine vllm"),
    }
    refuse_idle(rollout, uses)
    if rollout.engine_args:
        from common.engine.arguments import check_engine_args

        check_engine_args(rollout.engine_args, on_gpu=job.world.device.type == "cuda")


def print_eval_advice(folder: Path) -> None:
    """Print the flags that evaluate as generation_config.json advises, if it advises to sample:
    decoded greedily, a thinking model may repeat itself to the length limit."""
    file = folder / "generation_config.json"
    config = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    if config.get("do_sample"):
        temperature = config.get("temperature") or 1.0
        top_p = config.get("top_p") or 1.0
        say(
            "greedy by default: an evaluation as generation_config.json asks for it takes "
            f"--eval-temperature {temperature:g} --eval-top-p {top_p:g}"
        )


def open_engine_group(rollout: Rollout, run: Run) -> ProcessGroup | None:
    """The ranks that share this rank's engine; None if it has one of its own."""
    if rollout.engine_parallel == 1:
        return None
    # a rank may wait for another one's rewards, as long as a stall may last: see `init_world`
    timeout = timedelta(minutes=min(run.stall_minutes, 1e6) + 10)
    return new_subgroups(rollout.engine_parallel, timeout=timeout, backend="gloo")[0]


def open_tools(rollout: Rollout, group: ProcessGroup | None = None) -> "ToolPool | None":
    """The processes that answer the policy; None if nothing does. SystemExit if they do not
    start."""
    if not rollout.multi_turn:
        return None
    with user_errors():
        names = [name.strip() for name in (rollout.tools or "").split(",")]
        if "python" in names or "python_unconfined" in names:
            return open_python(rollout, names, group)
        from common.tools.pools import ToolWorkers

        return ToolWorkers(
            rollout.tools or "",
            rollout.tool_workers,
            rollout.tool_timeout,
            environment=rollout.environment,
            group=group,
        )


def open_python(rollout: Rollout, names: list[str], group: ProcessGroup | None) -> "ToolPool":
    from common.sandbox.python import PythonWorkers

    if len(names) > 1 or rollout.environment:
        raise ValueError(
            f"--tools {rollout.tools}: python takes no other tools and no --environment beside it"
        )
    confined = names == ["python"]
    if not confined:
        say(
            "warning: --tools python_unconfined: the policy's programs run as you, with your "
            "files and network"
        )
    return PythonWorkers(
        rollout.tool_workers,
        rollout.tool_timeout,
        confined=confined,
        anew=rollout.deterministic,
        group=group,
    )


def has_tools(rollout: Rollout) -> bool:
    """Whether the policy may call something. A function as --environment gives it nothing to call.
    SystemExit if the environment cannot be loaded."""
    return bool(rollout.tools) or has_environment_class(rollout)


def has_environment_class(rollout: Rollout) -> bool:
    if rollout.environment is None:
        return False
    from common.tools.environments import is_class

    with user_errors():
        return is_class(rollout.environment)


def open_prompts(
    job: Job,
    data: Data,
    rollout: Rollout,
    tool_pool: "ToolPool | None",
    needs_truth: bool = True,
) -> tuple[PromptData | None, PromptData | None]:
    """(prompts to train on, None with --eval-only; prompts to evaluate on, None without any).

    needs_truth: whether a row without a ground truth is unusable. If the chat template renders any
    of them, responses end where it ends a turn.
    """
    tools: dict[str, Tool] | None = tool_pool.tools if tool_pool else None
    train_data = None
    eval_data = None
    # If any row uses the template, the end token is repaired. Pictures and tools always need the
    # template: then it is repaired before the rows are read.
    needs_template = job.vision is not None or tool_pool is not None
    with user_errors():
        if needs_template:
            processor = job.vision.processor if job.vision else None
            end_turns_properly(job.tokenizer, processor)
        options = {
            "data": data,
            "rollout": rollout,
            "tokenizer": job.tokenizer,
            "vision": job.vision,
            "world": job.world,
            "tools": tools,
            "num_embeddings": job.num_embeddings,
            "has_environment_class": has_environment_class(rollout),
            "needs_truth": needs_truth,
        }
        if not rollout.eval_only:
            train_data = PromptData(data.train_data, max_rows=data.max_rows, **options)
        if data.eval_data:
            eval_data = PromptData(data.eval_data, flag="--eval-data", **options)
    # without pictures and tools it is known only now whether a row needs the template
    datasets = [prompts for prompts in (train_data, eval_data) if prompts]
    if not needs_template and any(prompts.uses_template for prompts in datasets):
        end_turns_properly(job.tokenizer, None)
    return train_data, eval_data


def open_turns(job: Job, rollout: Rollout, tool_pool: "ToolPool | None") -> "Turns | None":
    """The sampler of trajectories of several turns; None if nothing answers the policy."""
    if tool_pool is None:
        return None
    from common.rollout.trajectories import Turns

    with user_errors():
        protocol = open_protocol(job.tokenizer, tool_pool)
        return Turns(job.tokenizer, tool_pool, job.vision, rollout, protocol)


def open_protocol(tokenizer, tool_pool: "ToolPool") -> "ToolProtocol | None":
    """How the policy writes calls, by its chat template; Hermes if that writes none. None if there
    is nothing to call. If the template's format is unknown: None for the python tool, which has a
    protocol of its own, else ValueError."""
    from common.data.protocols import Code, protocol_of

    schemas = [tool.schema for tool in tool_pool.tools.values()]
    if not schemas:
        return None
    try:
        return protocol_of(tokenizer, schemas)
    except ValueError:
        if tool_pool.protocol is Code:
            return None
        raise


def open_reward_workers(
    rollout: Rollout, datasets: Iterable[PromptData | None], turns: "Turns | None"
) -> RewardWorkers:
    """The processes that score. A user's function, and an environment, are tried out on the first
    rows now, not after the first rollout. SystemExit if they fail."""
    loaded = [data for data in datasets if data]
    first_data = loaded[0]
    with user_errors():
        # a reward of the environment takes the place of the built-in functions
        has_reward = turns is not None and turns.try_out(first_data)
        sources: set[str] = set()  # of rows that the built-in functions score
        if not rollout.reward_function and not has_reward:
            for data in loaded:
                sources |= data.sources
        workers = RewardWorkers(
            rollout.reward_function,
            max(1, cpus_of_rank() - 1),
            rollout.reward_timeout,
            sources=sources,
        )
        check_reward_timeout(rollout, workers.timeout_s)
        if rollout.reward_function and not rollout.replay:
            for i in range(min(len(first_data), MAX_TRIED_ROWS)):
                row = first_data[i]
                if row.ground_truth is None:
                    continue
                rewards = {}  # what the function finds in extra_info
                if has_reward:
                    rewards["environment_reward"] = 0.0
                if row.answer_kwargs is not None:
                    rewards["turn_rewards"] = [0.0]
                workers.try_out(rollout.reward_function, row, rewards)
                break
    return workers


def num_steps(run: Run, train_data: PromptData | None, prompts_per_step: int) -> int:
    """--total-steps, or the steps of --total-epochs; 0 for an evaluation."""
    if run.total_steps:
        return run.total_steps
    if train_data is None:
        return 0
    return steps_of(run.total_epochs, len(train_data), prompts_per_step)


def open_engine(job: Job, rollout: Rollout) -> Engine | None:
    """The engine of --engine, asleep; None with --replay.

    It is opened before the trainer: it needs the memory while it loads.
    """
    if rollout.replay:
        say(f"{job.summary}, replays {rollout.replay}")
        return None
    config = EngineConfig(
        job.model_folder,
        job.compute_dtype,
        job.world,
        end_ids=end_token_ids(job.model_folder, job.tokenizer),
        max_model_len=job.max_model_len,
        memory_gib=job.engine_memory,
        num_samples=samples_of_engine(rollout, job.world),
        sleep_level=rollout.sleep_level,
        ranks=rollout.engine_parallel,
        trust_remote_code=job.machine.trust_remote_code,
        vision=job.vision,
        max_images=rollout.max_images,
        args=rollout.engine_args or {},
    )
    engine = start_engine(config, rollout.uses_vllm)
    engine.sleep()
    name = "vllm" if rollout.uses_vllm else "hf"
    if rollout.engine == "auto" and name == "hf":
        name = "hf, as vLLM is not installed"
    say(f"{job.summary}, rollouts by {name}")
    if rollout.eval_temperature == 0:
        print_eval_advice(Path(job.model_folder))
    return engine


def samples_of_engine(rollout: Rollout, world: World) -> int:
    """The samples of a step that an engine has under way."""
    num_prompts = ceil(rollout.prompts_per_step / world.size) * rollout.engine_parallel
    return num_prompts * rollout.samples_per_prompt


def start_engine(config: EngineConfig, uses_vllm: bool) -> Engine:
    if uses_vllm:
        from common.engine.vllm import VllmEngine

        return VllmEngine(config)
    from common.engine.hf import HuggingFaceEngine

    return HuggingFaceEngine(config)


def print_plan(
    rollout: Rollout, num_rows: int, prompts_per_step: int, total_steps: int, updates: int
) -> None:
    """Print how many prompts, samples and updates the run will have. prompts_per_step: with those
    that --oversample adds. updates: optimizer steps after each rollout."""
    epochs = total_steps * prompts_per_step / num_rows
    say(
        f"{num_rows} prompts; {prompts_per_step} x {rollout.samples_per_prompt} samples and "
        f"{updates} {'update' if updates == 1 else 'updates'} a step; "
        f"{total_steps} steps = {epochs:.2f} epochs"
    )
    if prompts_per_step > num_rows:
        say(
            f"warning: a step draws {prompts_per_step} prompts of {num_rows} rows: lower "
            "--prompts-per-step, it repeats them"
        )

"""What a script needs before and after its loop; what a user can get wrong is refused before weights are loaded."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from common.arguments import PICTURE_FLAGS, check_shared_args, refuse_idle
from common.attention import choose_attention
from common.checkpoint import Trained, checkpoint_bytes, free_bytes
from common.data.prompts import PromptData
from common.distributed import (
    World,
    barrier,
    broadcast_object,
    handle_sigterm,
    init_world,
    release_freed_memory,
    sign_of_life,
)
from common.dumps import dump_rollouts
from common.engine.hf import HuggingFaceEngine
from common.engine.vllm import VllmEngine
from common.episodes import Episode, Turns
from common.files import refuse, user_errors
from common.hub import EMBEDDED, end_token_ids, end_turns_properly, load_tokenizer, resolve_model
from common.logger import Logger, save_config, tracker_names
from common.look.curves import plot_curves
from common.look.page import write_page
from common.memory import memory_plan, remembered_budget
from common.pictures import PixelLimits
from common.precision import choose_dtype
from common.rewards import RewardWorkers, reward_function
from common.tools import ToolWorkers
from common.torch_repair import transformers
from common.vision import Vision, load_vision


@dataclass
class Run:
    """A run as one rank sees it, before it has any data."""

    world: World
    output_dir: Path
    path: str  # folder of the model
    tokenizer: transformers.PreTrainedTokenizerBase
    compute_dtype: torch.dtype
    attention: str
    limits: PixelLimits
    vision: Vision | None  # None for a model that reads text alone
    summary: str  # of all that, for the console


@dataclass
class Job(Run):
    """What the RL scripts have besides."""

    train_data: PromptData | None  # None with --eval-only
    eval_data: PromptData | None
    total_steps: int
    workers: RewardWorkers
    turns: Turns | None  # None without --tools
    engine: VllmEngine | HuggingFaceEngine | None  # asleep; None with --replay


def open_run(args, script: str, demo: bool) -> Run:
    """Join the process group, choose device and dtype, find the model; `args` is the script's Args."""
    world = init_world(args.stall_minutes)
    if demo:
        world.print("no --model given: running the embedded demo")
    stamp = broadcast_object(time.strftime("%Y%m%d-%H%M%S"))  # the clocks of the ranks may differ
    output_dir = args.output_dir or Path("runs") / f"{script}-{Path(args.model).name}-{stamp}"
    with user_errors():
        tracker_names(args.log)
        check_device(world.device)
        compute_dtype, why = choose_dtype(args.dtype, world.device)
    attention = choose_attention(args.attention, world.device, args.compile)
    path = resolve_model(args.model)
    tokenizer = load_tokenizer(path, args.trust_remote_code)
    limits = PixelLimits(args.min_pixels, args.max_pixels, args.max_frame_pixels)
    vision = load_vision(path, limits, args.trust_remote_code)
    refuse_idle(args, dict.fromkeys(PICTURE_FLAGS, (vision is not None, "a vision-language --model")))
    summary = f"{script}.py: {args.model}, {world.size} x {world.device.type}, {args.strategy}, "
    summary += f"compute {compute_dtype} ({why}) -> {output_dir}"
    return Run(world, output_dir, path, tokenizer, compute_dtype, attention, limits, vision, summary)


def set_up(args, script: str, demo: bool) -> Job:
    """Open a run, given the flags that all RL scripts share."""
    check_shared_args(args)
    run = open_run(args, script, demo)
    world, output_dir, path, tokenizer, vision = run.world, run.output_dir, run.path, run.tokenizer, run.vision
    again = bool(args.replay) and (output_dir / "checkpoints").exists()
    refuse(again, f"--replay: {output_dir} has checkpoints of its own; give another --output-dir")
    refuse_idle(args, {"max_images": (vision is not None, "a vision-language --model")})
    if vision or args.tools:
        with user_errors():
            end_turns_properly(tokenizer, vision and vision.processor, world.print)
    if getattr(args, "critic_model", None):
        critic_path = resolve_model(args.critic_model, "--critic-model")
        critic_vocabulary = load_tokenizer(critic_path, args.trust_remote_code).get_vocab()
        refuse(critic_vocabulary != tokenizer.get_vocab(), f"--critic-model {args.critic_model}: another tokenizer")
        blind = load_vision(critic_path, run.limits, args.trust_remote_code) is None
        refuse(blind != (vision is None), f"--critic-model {args.critic_model}: of policy and critic one cannot see")
    if getattr(args, "reward_model", None):
        resolve_model(args.reward_model, "--reward-model")  # that there is none should be known before all is loaded
    if args.model in EMBEDDED and not args.train_data:
        args.train_data, held_out = embedded_data(args.model, output_dir / "data", world)
        args.eval_data = args.eval_data or held_out
    options = {"max_prompt_tokens": args.max_prompt_tokens, "overlong": args.overlong_prompts}
    options |= {"skip_bad_rows": args.skip_bad_rows, "notice": world.print, "max_images": args.max_images}
    train_data = eval_data = None
    with user_errors():
        tools = ToolWorkers(args.tools, args.tool_workers, args.tool_timeout) if args.tools else None
        options |= {"vision": vision, "tools": tools and tools.tools, "media_root": args.media_root}
        if not args.eval_only:
            train_data = PromptData(args.train_data, tokenizer, max_rows=args.max_rows, **options)
        if args.eval_data:
            eval_data = PromptData(args.eval_data, tokenizer, flag="--eval-data", **options)
        for data in (train_data, eval_data):
            for source in sorted(data.sources) if data and not args.reward_function else ():
                reward_function(source)  # an unknown data_source is an error now, not after the first rollout
        workers = RewardWorkers(args.reward_function, args.reward_workers, args.reward_timeout)
    total_steps = args.total_steps
    if total_steps is None and train_data:
        total_steps = max(1, round(args.total_epochs * len(train_data) / args.prompts_per_step))
    alone = getattr(args, "critic_warmup_steps", 0)
    refuse(alone >= (total_steps or math.inf), f"--critic-warmup-steps {alone} of {total_steps}: none for the policy")

    critic = [resolve_model(args.critic_model or path)] if hasattr(args, "critic_model") else []
    reference = [path] if args.kl_in != "none" and not getattr(args, "reference_offload", False) else []
    world.print(memory_plan(args, world, run.compute_dtype, [path, *critic], reference))
    engine = None
    if not args.replay:  # before the trainer: it loads by itself, and is asleep when the trainer takes its memory
        make_engine = VllmEngine if args.engine == "vllm" else HuggingFaceEngine
        engine = make_engine(
            path,
            run.compute_dtype,
            world,
            end_ids=end_token_ids(path, tokenizer),
            max_model_len=args.max_prompt_tokens + args.max_response_tokens,
            memory_gib=args.engine_memory,
            sleep_level=args.sleep_level,
            trust_remote_code=args.trust_remote_code,
            vision=vision,
            max_images=args.max_images,
        )
        engine.sleep()
    turns = None
    if tools:
        bounds = (args.max_turns, args.max_turn_tokens, args.max_images, args.max_tool_errors)
        turns = Turns(tokenizer, tools, vision, *bounds, args.deterministic)
        with user_errors():
            for tool in tools.tools.values():
                turns.observation_ids([""], tool.role)  # a template that cannot is refused now
    torch.manual_seed(args.seed + world.rank)  # after vLLM, which seeds every rank alike
    world.print(f"{run.summary}, rollouts by {args.engine}")
    return Job(
        **vars(run),
        train_data=train_data,
        eval_data=eval_data,
        total_steps=total_steps or 0,
        workers=workers,
        turns=turns,
        engine=engine,
    )


def embedded_data(name: str, folder: Path, world: World, supervised: bool = False) -> tuple[str, str]:
    """(training file, evaluation file) of an embedded model's task, generated into `folder` by rank 0."""
    if world.is_main:
        if name == "tiny":
            from common.prepare import tiny as generator
        else:
            from common.prepare import tiny_vl as generator
        (generator.write_supervised_data if supervised else generator.write_demo_data)(folder)
    barrier()
    suffix = "jsonl" if supervised else "parquet"
    return str(folder / f"train.{suffix}"), str(folder / f"eval.{suffix}")


def open_logger(args, job: Job, script: str, trained: Trained, start: int, resumed: Path | None) -> Logger:
    """config.json, the logger, and what a run says before its first step."""
    world, data = job.world, job.train_data
    if world.is_main and not args.eval_only:
        save_config(job.output_dir, vars(args))
    logger = Logger(
        job.output_dir,
        total_steps=job.total_steps,
        trackers=args.log,
        config=vars(args),
        name=script,
        is_main=world.is_main,
    )
    if resumed:
        logger.event({"event": "resumed", "step": start, "checkpoint": str(resumed)})
        world.print(f"resumed: {resumed}, step {start}")
    if args.eval_only:
        return logger
    handle_sigterm()
    passes = job.total_steps * args.prompts_per_step / len(data)
    world.print(
        f"{len(data)} prompts; a step: {args.prompts_per_step} x {args.samples_per_prompt} samples, {args.minibatches}"
        f" minibatches x {args.epochs_per_step} epochs; {job.total_steps} steps pass over the data {passes:.2f} times"
    )
    if args.prompts_per_step > len(data):
        world.print(f"warning: --prompts-per-step {args.prompts_per_step} of {len(data)} rows: a step repeats prompts")
    budget = remembered_budget(job.output_dir, args.micro_batch_tokens)
    if budget < args.micro_batch_tokens:
        world.print(f"micro-batches of {budget} tokens, since {job.output_dir}/micro_batch_tokens: more did not fit")
    needed = checkpoint_bytes(trained) * (args.keep_checkpoints + 2)  # besides, the best, and the one being written
    if (free := free_bytes(job.output_dir)) < needed:
        sizes = f"{needed / 1e9:.2f} GB of the {free / 1e9:.2f} GB that are free"
        world.print(f"warning: checkpoints will take up to {sizes} in {job.output_dir}: lower --keep-checkpoints")
    return logger


def dump_step(job: Job, step: int, sampled: list[Episode], trained: list[Episode], advantages: list[float]) -> None:
    """`dump_rollouts` into the run folder, with a page beside it. All ranks call it together."""
    folder = job.output_dir / "rollouts"
    path = dump_rollouts(folder, step, sampled, trained, advantages, job.tokenizer, job.world)
    if job.world.is_main:
        write_page(path, job.tokenizer)


def finish(run: Run, logger: Logger) -> None:
    """Draw the curves, end the trackers."""
    if run.world.is_main:
        plot_curves(run.output_dir)
    logger.close()


class Stopwatch:
    """Seconds of a step by phase: `with watch("rollout"): ...`; a phase entered twice adds up."""

    def __init__(self) -> None:
        release_freed_memory()
        self.start, self.seconds = time.perf_counter(), {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        sign_of_life()
        yield
        sign_of_life()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin

    def metrics(self) -> dict[str, float]:
        phases = {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}
        return phases | {"time/step_s": time.perf_counter() - self.start}


def check_device(device: torch.device) -> None:
    """Run a small kernel: ValueError, with the remedy, if torch is built without code for this GPU."""
    try:
        torch.ones(8, device=device).square().sum().item()
    except RuntimeError as error:
        if "no kernel image" not in str(error):
            raise
        old = torch.cuda.get_device_capability(device)[0] < 8
        remedy = "requirements-v100.txt (CUDA 12.6 wheels)" if old else "torch for a newer CUDA"
        gap = f"is built for {torch.cuda.get_arch_list()}, not for {torch.cuda.get_device_name(device)}"
        raise ValueError(f"torch {torch.__version__} {gap}: install {remedy}") from error

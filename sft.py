"""Supervised fine-tuning on the assistant's tokens of conversations, packed.

What this does that others do not:

1. One denominator: the loss is the mean over all trained tokens of the global batch, whatever
   the number of ranks, the micro-batches and the packing (a test compares gradients).
2. Only what the assistant says and its end-of-turn token are trained on: never headers, other
   roles, pictures.
3. A [tokens, vocabulary] tensor never exists: log-probs come from hidden states in chunks, of
   trained tokens only.
4. Conversations with and without pictures share micro-batches, and are balanced over the ranks
   by cost.

    torchrun --nproc_per_node 2 sft.py    # embedded demo: tiny, from nothing
    torchrun --nproc_per_node 4 sft.py --model Qwen/Qwen2.5-0.5B \\
        --train-data train.parquet --eval-data test.parquet

What rows may look like: common/data/formats.py. Where a chat template shows a turn differently once
another follows, each turn is a sample of its own: common/data/turns.py.

Its loss is tested in tests/math/test_grpo_math.py, its gradients in tests/runs/test_sft_runs.py.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

import common.packages  # noqa: F401, one line if torch is missing

import numpy as np
import torch
from torch import Tensor

from common.assets.build.embedded import embedded_data
from common.checkpoint import Checkpoints
from common.command_line import refuse_idle, typed_flags
from common.data.conversations import Conversations
from common.data.order import steps_of
from common.data.render import end_turns_properly
from common.distributed import World, all_reduce, forward_context
from common.export import export_hugging_face
from common.files import user_errors
from common.flags import Amount, Count, Data, Machine, Rollout, Run, Share, check_pixels, parse
from common.job import Job
from common.logger import open_logger
from common.manifest import WrittenFiles
from common.memory.plan import no_rollout
from common.metrics import Means
from common.optimizer import lr_factor
from common.packing import Minibatch, Packer, TokenIndex
from common.processes import in_threads
from common.progress import Progress, say
from common.rehearsal import Rehearsal
from common.script import handle_signals, requested_exit_code, run
from common.steps import Stopwatch, due, profiled, seed_step
from common.types import Episode


@dataclass
class Args:
    """The size of a batch, and the optimizer. Flags that scripts share are in common/flags.py."""

    # longest conversation (tokens, pictures included); longer ones are cut at the end
    max_tokens: Count = 1024
    batch_size: Count = 64  # conversations per optimizer step, over all ranks
    learning_rate: Amount = 1e-5  # peak of the schedule
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"  # learning rate after warm-up
    warmup_steps: Amount = 0.0  # optimizer steps of linear warm-up; below 1: share of all steps
    # learning rate that the decay reaches after the last step, as a share of the peak
    lr_floor: Share = 0.0
    weight_decay: Amount = 0.0  # AdamW, decoupled
    max_grad_norm: Amount = 1.0  # global L2 norm; 0 = no clipping
    # instead of checkpoints, Hugging Face folders model-step_NNNNNN: no resume
    save_weights_only: bool = False

    data: Data = field(default_factory=Data)
    machine: Machine = field(default_factory=Machine)
    run: Run = field(default_factory=partial(Run, eval_every=0))


# What --help shows; --help-all shows all flags.
FIRST_SCREEN = """
model train-data eval-data media-root output-dir bad-rows
max-tokens batch-size max-pixels freeze-vision
learning-rate lr-schedule warmup-steps
total-steps total-epochs eval-every eval-rows save-every save-weights-only resume log seed
dtype micro-batch-tokens gradient-checkpointing offload lora-rank
"""

# What runs without --model: the embedded model learns its task from nothing, on generated
# solutions.
DEMO = Args(
    learning_rate=1e-3,
    warmup_steps=10,
    machine=Machine(micro_batch_tokens=8192),
    run=Run(model="tiny", total_steps=100, eval_every=25),
)


def cross_entropy(logprobs: Tensor, num_loss_tokens: float, world_size: int) -> Tensor:
    """This micro-batch's part of the mean of -log p over the trained tokens of the global batch.

    logprobs: [N]. FSDP2 and DDP average gradients over ranks: hence the factor `world_size`.
    """
    return -logprobs.sum() * world_size / num_loss_tokens


def backward(
    policy: torch.nn.Module, minibatch: Minibatch, world: World, *, scale: float = 1.0
) -> Means:
    """Accumulate the gradient of one optimizer step, times `scale`. Returns the step's policy/*
    metrics."""
    means = Means()
    for i, batch in enumerate(Progress("micro-batch", minibatch.micro_batches)):
        with forward_context(policy, last=i == len(minibatch.micro_batches) - 1):
            logprobs, entropy = policy(batch.to(world.device))  # [N], [N]
            loss = cross_entropy(logprobs, minibatch.num_tokens, world.size)
            (loss * scale).backward()
        means.add("policy/loss", -logprobs.sum(), count=len(logprobs))
        means.add("policy/entropy", entropy.sum(), count=len(entropy))
    return means


def one_minibatch(packer: Packer, episodes: list[Episode]) -> Minibatch | None:
    """All episodes as one minibatch; None if no token is trained on, on any rank."""
    all_indices = list(range(len(episodes)))
    minibatches = packer.minibatches(episodes, TokenIndex(episodes), [all_indices])
    return minibatches[0] if minibatches else None


@torch.no_grad()
def evaluate(
    policy: torch.nn.Module, data: Conversations, rows: list[int], args: Args, packer: Packer
) -> dict:
    """eval/loss (nats a token) and eval/token_accuracy: how often the right token is the most
    likely one."""
    means = Means()
    # in parts, so that the pictures of only one batch are in memory
    for start in Progress("evaluation", range(0, len(rows), args.batch_size)):
        episodes = episodes_of(data, rows[start : start + args.batch_size], packer.world)
        minibatch = one_minibatch(packer, episodes)
        if minibatch is None:
            continue
        for batch in minibatch.micro_batches:
            with forward_context(policy):
                logprobs, _, greedy = policy(batch.to(packer.world.device), with_greedy=True)
            means.add("eval/loss", -logprobs.sum(), count=len(logprobs))
            means.add("eval/token_accuracy", greedy.sum(), count=len(greedy))
    metrics = means.reduce()
    if not metrics:
        raise SystemExit("--eval-data: not one row has a token to learn")
    return metrics


def episodes_of(data: Conversations, rows: list[int], world: World) -> list[Episode]:
    """The samples of this rank's share of `rows`, balanced by cost, without unreadable ones."""
    rank_rows = balanced(rows, data.costs, world.size)[world.rank]
    return list(chain.from_iterable(in_threads(data.episodes, rank_rows)))


def balanced(rows: list[int], costs: np.ndarray, parts: int) -> list[list[int]]:
    """Split rows into `parts` lists of about equal cost: costliest first, each into the cheapest
    list so far. The result is the same on every rank."""
    lists: list[list[int]] = [[] for _ in range(parts)]
    loads = [0.0] * parts
    for row in sorted(rows, key=lambda row: (-costs[row], row)):
        lightest = loads.index(min(loads))
        lists[lightest].append(row)
        loads[lightest] += costs[row]
    return lists


def read_data(args: Args, job: Job, max_tokens: int) -> tuple[Conversations, Conversations | None]:
    """Conversations to train on and to evaluate on; the embedded model's own without
    --train-data."""
    train_files = args.data.train_data
    eval_files = args.data.eval_data
    if not train_files:
        data_folder = job.output_dir / "data"
        train_files, held_out = embedded_data("tiny", data_folder, job.world, supervised=True)
        eval_files = eval_files or held_out
    options = {
        "tokenizer": job.tokenizer,
        "max_tokens": max_tokens,
        "vision": job.vision,
        "media_root": args.data.media_root,
        "bad_rows": args.data.bad_rows,
        "world": job.world,
        "num_embeddings": job.num_embeddings,
    }
    eval_data = None
    processor = job.vision.processor if job.vision else None
    with user_errors():
        # the tokenizer's end token becomes the one that ends the chat template's turns
        end_turns_properly(job.tokenizer, processor)
        train_data = Conversations(
            train_files, "--train-data", max_rows=args.data.max_rows, **options
        )
        if eval_files:
            eval_data = Conversations(eval_files, "--eval-data", **options)
    return train_data, eval_data


def usable_max_tokens(args: Args, job: Job) -> int:
    """--max-tokens, at most the model's positions. SystemExit if a larger number is typed."""
    if args.max_tokens <= job.num_positions:
        return args.max_tokens
    message = (
        f"--max-tokens {args.max_tokens}: the model has {job.num_positions:.0f} positions "
        "(config.json)"
    )
    if "--max-tokens" in typed_flags():
        raise SystemExit(message)
    say(f"{message}; longer conversations are cut there")
    return int(job.num_positions)


def save_weights(policy: torch.nn.Module, job: Job, step: int, folders: list[Path]) -> None:
    """Write a Hugging Face folder and append it to `folders`; remove the oldest of them if there
    are more than --keep-checkpoints. All ranks call it."""
    folder = job.output_dir / f"model-step_{step:06d}"
    try:
        export_hugging_face(
            policy, job.tokenizer, folder, job.world, job.compute_dtype, job.run.model
        )
    except SystemExit as error:  # on rank 0 alone, and after the collectives: no rank waits
        print(f"warning: {error}; training goes on", flush=True)
        return
    folders.append(folder)
    if job.world.is_main and len(folders) > job.run.keep_checkpoints:
        with suppress(OSError):  # no reason to end a run
            WrittenFiles(folders.pop(0)).remove()


def check_args(args: Args) -> None:
    """Refuse what cannot work, or has no effect, before anything is loaded."""
    if args.run.model != "tiny" and not args.data.train_data:
        raise SystemExit(f"--model {args.run.model} needs --train-data")
    check_pixels(args.data)
    # without --train-data it is the embedded demo, which has rows for evaluation
    has_eval_data = bool(args.data.eval_data) or not args.data.train_data
    uses = {  # flag: (whether it has an effect, what it needs for one)
        "eval_every": (has_eval_data, "--eval-data"),
        "eval_before": (has_eval_data, "--eval-data"),
        "eval_rows": (has_eval_data, "--eval-data"),
        "total_epochs": (args.run.total_steps is None, "--total-steps None"),
    }
    refuse_idle(args.run, uses)
    needs_decay = (args.lr_schedule != "constant", "--lr-schedule linear or cosine")
    refuse_idle(args, {"lr_floor": needs_decay})
    if "reference" in args.machine.offload:
        raise SystemExit("--offload reference: sft.py has no reference model")
    if "base" in args.machine.offload:
        raise SystemExit("--offload base: sft.py has no engine to make room for")


def main(args: Args, demo: bool = False) -> None:
    check_args(args)
    job = Job(
        script=Path(__file__).stem,
        data=args.data,
        machine=args.machine,
        run=args.run,
        demo=demo,
    )
    world, output_dir = job.world, job.output_dir
    from_scratch = demo and args.machine.lora_rank == 0  # LoRA adapts trained weights
    if not from_scratch:
        job.check_weights(job.model_folder)  # now: reading the data may take long
    max_tokens = usable_max_tokens(args, job)
    train_data, eval_data = read_data(args, job, max_tokens)
    loader = job.open_loader(len(train_data), train_data.fingerprint)
    total_steps = args.run.total_steps
    if total_steps is None:
        total_steps = steps_of(args.run.total_epochs, len(train_data), args.batch_size)
    job.leave_if_finished(total_steps)
    eval_rows = list(range(min(args.run.eval_rows, len(eval_data)))) if eval_data else []
    job.plan_memory(
        no_rollout(max_tokens),
        trained=[job.model_folder],
        frozen=[],
        most_tokens=8192,  # the largest --micro-batch-tokens that the plan may choose
    )

    torch.manual_seed(args.run.seed)  # the same random initialisation everywhere
    policy = job.load_policy(from_scratch=from_scratch)
    optimizer = job.adamw(policy, args.weight_decay, args.max_grad_norm, betas=(0.9, 0.95))
    packer = Packer(job.attention, job.micro_batch_tokens, output_dir, world, job.vision)
    checkpoints = Checkpoints(
        output_dir,
        world,
        optimizers={"policy": optimizer},
        loader=loader,
        save_every=args.run.save_every,
        keep=args.run.keep_checkpoints,
        identity=job.identity,
        micro_batch_tokens=job.micro_batch_tokens,
        lowest_is_best=True,
    )
    start = checkpoints.resume(job.checkpoint)
    logger = open_logger(job, args, total_steps, checkpoints)
    # Do the largest micro-batches fit? To the rehearsal a conversation is a prompt, which is not
    # trained on, and a response. Text takes the most memory if all tokens but the first are trained
    # on. Pictures are part of prompts, so with them all tokens but the last are the prompt.
    max_prompt_tokens = max_tokens - 1 if job.vision else 1
    largest_batch = Rollout(
        prompts_per_step=args.batch_size,
        samples_per_prompt=1,
        max_prompt_tokens=max_prompt_tokens,
        max_response_tokens=max_tokens - max_prompt_tokens,
        max_images=max_tokens,  # no limit: a picture has at least one token
    )
    rehearsal = Rehearsal(job, packer, largest_batch, [optimizer])
    while rehearsal.is_due:
        with rehearsal.attempt() as minibatch:
            backward(policy, minibatch, world)
    handle_signals()  # from here on a signal, or Ctrl-C, ends the run after its step, and saves
    say(job.summary)
    millions = sum(p.numel() for p in policy.parameters()) / 1e6
    say(
        f"{millions:.1f} M parameters; {len(train_data)} rows, {args.batch_size} a step, "
        f"{total_steps} steps"
    )

    if start == 0 and args.run.eval_before and eval_data:
        logger.log(0, evaluate(policy, eval_data, eval_rows, args, packer))
    weight_folders: list[Path] = []  # with --save-weights-only
    weights_step = start  # the step of the newest of them
    for step in profiled(range(start, total_steps), args.run.profile_steps, output_dir, world):
        watch = Stopwatch()
        seed_step(args.run.seed, step, world.rank)

        # 1. data (2. rollout and 3. rewards are for the scripts that sample)
        position = loader.state_dict()
        with watch("data"):
            episodes = episodes_of(train_data, loader.next(args.batch_size), world)
            minibatch = one_minibatch(packer, episodes)
            # a row may have several samples: only its first one is counted
            num_rank_rows = sum(episode.sample_index == 0 for episode in episodes)
            (num_rows,) = all_reduce([num_rank_rows])
        if minibatch is None:
            if args.save_weights_only:
                if step > weights_step:
                    save_weights(policy, job, step, weight_folders)
            elif step > start:
                loader.load_state_dict(position)  # a resume tries these rows again
                checkpoints.save(step, None)
            raise SystemExit(
                "--train-data: not one row of this step has a token to learn, see the warnings"
            )

        # 4. update
        lr = args.learning_rate * lr_factor(
            step, total_steps, args.warmup_steps, args.lr_schedule, args.lr_floor
        )
        with watch("update"):
            means = packer.attempt(backward, policy, minibatch, world, scale=optimizer.scale)
            means.merge(optimizer.step(lr))

        # 5. log
        metrics = means.reduce() | {
            "optim/lr": lr,
            "optim/loss_scale": optimizer.scale,
            "data/epoch": loader.epoch,
            "data/tokens": minibatch.num_tokens,
            "data/samples": minibatch.num_sequences,
            "data/unreadable": args.batch_size - num_rows,
        }

        # 6. eval, checkpoint
        is_last = step + 1 == total_steps
        if eval_data and (is_last or due(step + 1, args.run.eval_every)):
            with watch("eval"):
                metrics |= evaluate(policy, eval_data, eval_rows, args, packer)
        metrics |= watch.metrics(world.device)
        # read after the evaluation: a signal may have come during it
        exit_code = requested_exit_code()
        # The log is written before the checkpoint, so no checkpoint is ahead of the log.
        logger.log(step + 1, metrics)
        if args.save_weights_only:
            # no best is kept, and the last weights go to model/
            must_save = exit_code > 0 or checkpoints.due(step + 1, None)
            if must_save and not is_last:
                save_weights(policy, job, step + 1, weight_folders)
                weights_step = step + 1
        else:
            loss = metrics.get("eval/loss")
            if is_last or exit_code > 0 or checkpoints.due(step + 1, loss):
                checkpoints.save(step + 1, loss)
        if exit_code and not is_last:
            logger.event({"event": "stopped", "step": step + 1})
            raise SystemExit(exit_code)  # 130 after Ctrl-C, 143 after any other signal

    folder = output_dir / "model"
    export_hugging_face(policy, job.tokenizer, folder, world, job.compute_dtype, job.run.model)
    say(f"done: {folder} loads in transformers and vLLM; curves.png is beside it")


if __name__ == "__main__":
    run(main, *parse(Args, DEMO, __doc__, FIRST_SCREEN))

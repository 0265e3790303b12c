"""Supervised fine-tuning: cross-entropy on the assistant's tokens of conversations, packed, exact over any split.

What this does that others do not:
1. One denominator: the loss is the mean over all trained tokens of the global batch, whatever the number of ranks,
   micro-batches, or the padding (invariant 2 of the design; tested).
2. Masks follow the rule "said by the assistant", the end-of-turn token included: never headers, other roles, pictures.
3. A [tokens, vocabulary] tensor never exists: log-probs come from hidden states in chunks, of trained tokens only.
4. Conversations with and without pictures share micro-batches, and go to the ranks by their cost.

    torchrun --nproc_per_node 2 sft.py                               # embedded demo: a tiny model, from nothing
    torchrun --nproc_per_node 4 sft.py --model Qwen/Qwen2.5-0.5B --train-data train.parquet --eval-data test.parquet
    torchrun --nproc_per_node 8 sft.py --model Qwen/Qwen2.5-VL-7B-Instruct --train-data release.json --media-root .

What rows may look like: common/data/formats.py.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor

from common.arguments import check_ranges, refuse_idle
from common.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from common.data.conversations import Conversations, balanced
from common.data.prompts import PromptLoader
from common.distributed import World, all_reduce, forward_context, handle_sigterm, run, stop_requested, wrap_model
from common.files import refuse, user_errors
from common.hub import end_turns_properly
from common.logger import Logger, save_config
from common.memory import halve_budget, peak_memory_gb
from common.models import export_hugging_face, load_policy
from common.packing import MicroBatch, TokenIndex, layout, pack
from common.precision import LossScale, guarded_step
from common.setup import Stopwatch, embedded_data, finish, open_run


@dataclass
class Args:
    # model and data
    model: str  # folder, hub id, or an embedded model: tiny, tiny-vl, smollm2
    train_data: str | None = None  # conversations, comma-separated .parquet, .jsonl, .json; tiny brings its own
    eval_data: str | None = None  # the same formats; gives eval/*
    output_dir: Path | None = None  # run folder; default runs/sft-MODEL-TIME
    from_scratch: bool = False  # random weights of the model's architecture instead of its own
    max_tokens: int = 1024  # longest conversation (tokens, pictures included); longer ones are cut at the end
    skip_bad_rows: bool = False  # count and drop unusable rows instead of stopping
    mask: Literal["auto", "all", "last-two-turns"] = "auto"  # assistant turns trained on; auto: by the row's format
    mask_failed_calls: bool = False  # nor on turns whose tool call returned an error
    media_root: Path | None = None  # folder of the relative paths of pictures
    min_pixels: int = 3136  # smaller pictures are enlarged to this area; 28 x 28 pixels are one token
    max_pixels: int = 1_003_520  # larger ones are reduced to it
    max_frame_pixels: int = 401_408  # the same for a frame of a video
    seed: int = 0  # data order and initialisation
    # optimization
    batch_size: int = 64  # conversations per optimizer step, over all ranks
    micro_batch_tokens: int = 8192  # tokens of one forward and backward, per rank
    learning_rate: float = 1e-5  # peak
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"  # after the warm-up
    warmup_steps: float = 0.0  # optimizer steps of linear warm-up; below 1: share of all steps
    lr_floor: float = 0.0  # last learning rate as a share of the peak
    weight_decay: float = 0.0  # AdamW, decoupled
    max_grad_norm: float = 1.0  # global L2 norm; 0 = no clipping
    total_steps: int | None = None  # optimizer steps; default: from --total-epochs
    total_epochs: float = 1.0  # passes over the data, if --total-steps is not given
    # parallelism and precision
    strategy: Literal["fsdp", "ddp"] = "fsdp"  # shard the model (FSDP2) or replicate it
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # compute; master weights and optimizer are float32
    attention: Literal["auto", "flash", "flex", "sdpa"] = "auto"  # auto: flex on GPUs with bf16, else sdpa
    freeze_vision: bool = False  # train the language model alone
    optimizer_offload: bool = False  # Adam's moments on the host, but for the optimizer's step
    gradient_checkpointing: bool = False  # recompute activations in backward: less memory, a third more compute
    compile: bool = False  # torch.compile the layers, on GPUs: a slow first step, then faster ones
    trust_remote_code: bool = False  # run code that comes with the model
    # evaluation, checkpoints, logging
    eval_every: int = 0  # steps between evaluations; 0: only before and after
    eval_before: bool = True  # evaluate before the first step
    eval_rows: int = 512  # rows of --eval-data used
    save_every: int = 0  # steps between checkpoints; 0: only at the end
    save_every_epoch: bool = False  # a checkpoint after each pass over the data, too
    save_weights_only: bool = False  # instead of checkpoints, Hugging Face folders model-step_NNNNNN: no resume
    keep_checkpoints: int = 1  # newest ones kept; the best by eval/loss is kept besides
    resume: str = "auto"  # auto: continue the run in --output-dir if there is one; never; or a path
    stall_minutes: float = 60.0  # longest a phase may take; then stacks, and the end
    log: str = ""  # further trackers, comma-separated: tensorboard, wandb


# What `sft.py` without --model runs: the embedded model learns its task from nothing, on generated solutions.
DEMO = Args(
    model="tiny",
    from_scratch=True,
    batch_size=64,
    learning_rate=1e-3,
    warmup_steps=10,
    total_steps=100,
    eval_every=25,
)


def lr_factor(step: int, total_steps: int, warmup_steps: float, schedule: str, floor: float) -> float:
    """Share of the peak learning rate at step 0, 1, ...; the first step is never 0.

    Linear warm-up (step + 1) / warmup, then constant, or linear or cosine decay towards `floor`. `warmup_steps` below
    1 is a share of all steps.
    """
    warmup = round(warmup_steps * total_steps) if warmup_steps < 1 else int(warmup_steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    progress = (step - warmup) / max(1, total_steps - warmup)
    decay = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return floor + (1 - floor) * decay


def cross_entropy(logprobs: Tensor, num_loss_tokens: float, world_size: int) -> Tensor:
    """Mean of -log p over all trained tokens of the global batch, of which [N] are here.

    FSDP2 and DDP average gradients over ranks: hence the factor `world_size`.
    """
    return -logprobs.sum() * world_size / num_loss_tokens


def accumulate_gradient(
    policy: torch.nn.Module, batches: list[MicroBatch], num_loss_tokens: float, world: World, scale: float
) -> list[float]:
    """Accumulate the gradient of one optimizer step. Returns sums over its tokens here: -log p, entropy."""
    loss_sum = entropy_sum = 0.0
    for i, batch in enumerate(batches):
        with forward_context(policy, last=i == len(batches) - 1):
            logprobs, entropy = policy(batch.to(world.device))
            loss = cross_entropy(logprobs, num_loss_tokens, world.size)
            (loss * scale).backward()
        loss_sum -= logprobs.detach().sum().item()
        entropy_sum += entropy.detach().sum().item()
    return [loss_sum, entropy_sum]


def check_args(args: Args) -> None:
    """Refuse what cannot work, or has no effect, before anything is loaded."""
    check_ranges(args)
    evaluated = (bool(args.eval_data) or not args.train_data, "--eval-data")
    refuse_idle(
        args,
        {
            "optimizer_offload": (torch.cuda.is_available(), "a GPU"),
            "lr_floor": (args.lr_schedule != "constant", "--lr-schedule linear or cosine"),
            "total_epochs": (args.total_steps is None, "no --total-steps"),
            "keep_checkpoints": (not args.save_weights_only, "checkpoints: all weights are kept"),
            **dict.fromkeys(["eval_every", "eval_before", "eval_rows"], evaluated),
        },
    )
    refuse(args.model != "tiny" and not args.train_data, f"--model {args.model} needs --train-data")


def main(args: Args, demo: bool = False) -> None:
    check_args(args)
    job = open_run(args, "sft", demo)
    world, output_dir, tokenizer, vision = job.world, job.output_dir, job.tokenizer, job.vision
    with user_errors():
        end_turns_properly(tokenizer, vision and vision.processor, world.print)
    if not args.train_data:
        args.train_data, held_out = embedded_data("tiny", output_dir / "data", world, supervised=True)
        args.eval_data = args.eval_data or held_out
    options = {"max_tokens": args.max_tokens, "vision": vision, "media_root": args.media_root, "rule": args.mask}
    options |= {"mask_failed_calls": args.mask_failed_calls, "skip_bad_rows": args.skip_bad_rows}
    with user_errors():
        train_data = Conversations(args.train_data, "--train-data", tokenizer, notice=world.print, **options)
        eval_data = None
        if args.eval_data:
            eval_data = Conversations(args.eval_data, "--eval-data", tokenizer, notice=world.print, **options)
    steps_per_epoch = len(train_data) / args.batch_size
    total_steps = args.total_steps or max(1, round(args.total_epochs * steps_per_epoch))

    torch.manual_seed(args.seed)  # the same random initialisation everywhere
    policy = load_policy(
        job.path,
        job.attention,
        gradient_checkpointing=args.gradient_checkpointing,
        compile_layers=args.compile,
        trust_remote_code=args.trust_remote_code,
        from_scratch=args.from_scratch,
        vision=vision,
        freeze_vision=args.freeze_vision,
    )
    pack_options = layout(job.attention, args.micro_batch_tokens, output_dir, vision)
    num_parameters = sum(p.numel() for p in policy.parameters())
    policy = wrap_model(policy, world, args.strategy, job.compute_dtype)
    parameters = [p for p in policy.parameters() if p.requires_grad]
    decay = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), fused=True, **decay)
    loss_scale = LossScale.for_dtype(job.compute_dtype)
    loader = PromptLoader(len(train_data), args.seed)
    trained = {"policy": (policy, optimizer)}
    start, best = 0, math.inf
    if resumed := find_checkpoint(output_dir, args.resume, world):
        state = load_checkpoint(resumed, trained, world, args.optimizer_offload)
        world.print(f"resumed: {resumed}, step {state['step']}")
        loader.load_state_dict(state["loader"])
        loss_scale.load_state_dict(state["loss_scale"])
        start, best = state["step"], state["best"]
    else:
        torch.manual_seed(args.seed + world.rank)
    if world.is_main:
        save_config(output_dir, vars(args))
    logger = Logger(
        output_dir, total_steps=total_steps, trackers=args.log, config=vars(args), name="sft", is_main=world.is_main
    )
    if resumed:
        logger.event({"event": "resumed", "step": start, "checkpoint": str(resumed)})
    handle_sigterm()
    world.print(job.summary)
    millions = num_parameters / 1e6
    world.print(f"{millions:.1f} M parameters; {len(train_data)} rows, {args.batch_size} a step, {total_steps} steps")

    def episodes_of(data: Conversations, rows: list[int]) -> tuple[list, TokenIndex]:
        mine = balanced(rows, data.costs, world.size)[world.rank]
        episodes = [episode for episode in map(data.episode, mine) if episode]
        return episodes, TokenIndex(episodes)

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        """eval/loss (nats a token) and eval/token_accuracy: how often the right token is the most likely one."""
        rows = list(range(min(args.eval_rows, len(eval_data))))
        loss = right = tokens = 0.0
        for start in range(0, len(rows), args.batch_size):  # pictures of so many rows are in memory at a time
            episodes, index = episodes_of(eval_data, rows[start : start + args.batch_size])
            tokens += len(index)
            for batch in pack(episodes, range(len(episodes)), index, **pack_options):
                with forward_context(policy):
                    logprobs, _, greedy = policy(batch.to(world.device), with_greedy=True)
                loss -= logprobs.sum().item()
                right += greedy.sum().item()
        loss, right, tokens = all_reduce([loss, right, tokens])
        refuse(not tokens, "--eval-data: not one row has a token to learn")
        return {"eval/loss": loss / tokens, "eval/token_accuracy": right / tokens}

    if start == 0 and args.eval_before and eval_data:
        logger.log(0, evaluate())
    for step in range(start, total_steps):
        watch = Stopwatch()

        # 1. data
        with watch("data"):
            before = int(loader.epoch)
            episodes, index = episodes_of(train_data, loader.next(args.batch_size))
        num_loss_tokens, num_episodes = all_reduce([len(index), len(episodes)])
        refuse(not num_loss_tokens, "--train-data: not one row of this step has a token to learn, see the warnings")

        # 4. update
        lr = args.learning_rate * lr_factor(step, total_steps, args.warmup_steps, args.lr_schedule, args.lr_floor)
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = lr, args.weight_decay  # of this run, not of the checkpoint
        with watch("update"):
            while True:
                batches = pack(episodes, range(len(episodes)), index, **pack_options)
                try:
                    sums = accumulate_gradient(policy, batches, num_loss_tokens, world, loss_scale.scale)
                    break
                except torch.OutOfMemoryError as error:  # the same gradient, in smaller pieces
                    pack_options = halve_budget(pack_options, policy, world, error, output_dir)
            norm, stepped = guarded_step(policy, optimizer, args.max_grad_norm, loss_scale, args.optimizer_offload)

        # 5. log
        loss, entropy = all_reduce(sums)
        metrics = {
            "policy/loss": loss / num_loss_tokens,
            "policy/entropy": entropy / num_loss_tokens,
            "optim/grad_norm": norm,
            "optim/lr": lr,
            "optim/skipped_steps": float(not stepped),
            "optim/loss_scale": loss_scale.scale,
            "data/epoch": loader.epoch,
            "data/tokens": num_loss_tokens,
            "data/unreadable": args.batch_size - num_episodes,
        }

        # 6. eval, checkpoint
        last, stop = step + 1 == total_steps, stop_requested()
        if eval_data and (last or (args.eval_every and (step + 1) % args.eval_every == 0)):
            with watch("eval"):
                metrics |= evaluate()
        metrics |= watch.metrics() | {"memory/peak_gb": peak_memory_gb(world.device)}
        logger.log(step + 1, metrics)
        due = args.save_every and (step + 1) % args.save_every == 0
        due = due or (args.save_every_epoch and int(loader.epoch) > before)
        if args.save_weights_only and (due or stop) and not last:
            folder = output_dir / f"model-step_{step + 1:06d}"
            export_hugging_face(policy, tokenizer, folder, world, job.compute_dtype)
        elif not args.save_weights_only and (last or stop or due):
            loss = metrics.get("eval/loss", math.inf)
            state = {"best": min(best, loss), "loader": loader.state_dict(), "loss_scale": loss_scale.state_dict()}
            keep = {"keep": args.keep_checkpoints, "best": loss < best}
            if save_checkpoint(output_dir / "checkpoints", step + 1, trained, state, world, **keep):
                best = state["best"]
        if stop and not last:
            logger.event({"event": "stopped", "step": step + 1})
            raise SystemExit(143)  # as a process ended by SIGTERM

    export_hugging_face(policy, tokenizer, output_dir / "model", world, job.compute_dtype)
    finish(job, logger)
    world.print(f"done: {output_dir / 'model'} loads in transformers and vLLM; curves.png is beside it")


if __name__ == "__main__":
    demo = not any(argument.partition("=")[0] in ("--model", "--help", "-h") for argument in sys.argv[1:])
    run(main, tyro.cli(Args, default=DEMO if demo else None, description=__doc__), demo)

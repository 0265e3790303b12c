"""Group relative policy optimization (GRPO) for language models, end to end in one file.

G answers are sampled to each prompt, scored by a rule, and compared with each other: what is better than the mean of
its group becomes more likely. No critic. Papers: DeepSeekMath (arXiv 2402.03300), DAPO (2503.14476), Dr. GRPO
(2503.20783), dual clip (1912.09729).

Where this differs from the papers and from most implementations:
1. One denominator: the loss is divided by a count over the whole optimizer step, all ranks and micro-batches, so the
   gradient does not depend on how a batch is split (DAPO's token mean is the default; GRPO's and Dr. GRPO's by flag).
2. Strictly on-policy steps (one minibatch, one epoch) spend no pass on old log-probs: they are the new ones, detached,
   and the ratio is exactly 1. With several minibatches only those after the first need the pass.
3. Rollouts come from a vLLM engine inside each rank; the weight sync keeps books, and the gap between the engine's
   and the trainer's log-probs is measured on every step and stops the run when it is too large.
4. The prompt of a group is computed once, followed by its G responses (common/packing.py).
5. No KL term and no reference model by default: with verifiable rewards it is not needed.

    torchrun --nproc_per_node 2 grpo.py                              # embedded demo, minutes on a CPU
    torchrun --nproc_per_node 4 grpo.py --model Qwen/Qwen2.5-1.5B-Instruct --train-data gsm8k/train.parquet \\
        --eval-data gsm8k/test.parquet --prompts-per-step 128 --samples-per-prompt 8
    python grpo.py --eval-only --model smollm2 --eval-data test.parquet --eval-samples 8 --eval-temperature 1

Names: P prompts a step, G samples of a prompt, E episodes on this rank, T their sampled tokens, N those of a
micro-batch. Everything per token is flat ([T] or [N]): there is no padding to mask.
"""

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from torch import Tensor

from common.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from common.data import PromptData, PromptLoader
from common.distributed import (
    all_reduce,
    all_reduce_sums,
    broadcast_object,
    forward_context,
    init_world,
    run,
    seed_everything,
    user_errors,
    wrap_model,
)
from common.engine import Sampling, VllmEngine
from common.episodes import Episode, sample_episodes
from common.evaluate import evaluate, report
from common.hf_engine import HuggingFaceEngine
from common.logger import Logger, Stopwatch, peak_memory_gb, plot_curves, save_config
from common.models import (
    choose_attention,
    embedded_data,
    end_token_ids,
    export_hugging_face,
    full_parameters,
    load_policy,
    load_tokenizer,
    parameter_sizes,
    resolve_model,
)
from common.packing import TokenIndex, layout, pack
from common.precision import LossScale, choose_dtype, gap_limit, guarded_step
from common.rewards import RewardFunction, load_reward_function, reward_function, score_episodes


@dataclass
class Args:
    # model and data
    model: str  # folder, hub id, or an embedded model: tiny, smollm2
    train_data: str | None = None  # verl-format .parquet or .jsonl, comma-separated; tiny brings its own
    eval_data: str | None = None  # the same format; gives eval/*
    output_dir: Path | None = None  # run folder; default runs/grpo-MODEL-TIME
    max_prompt_tokens: int = 512  # longest prompt (tokens)
    max_response_tokens: int = 512  # longest response (tokens)
    overlong_prompts: Literal["error", "drop"] = "error"  # what to do with longer prompts
    max_rows: int | None = None  # use only the first rows of the training data
    skip_bad_rows: bool = False  # count and drop unusable rows instead of stopping
    reward_function: str | None = None  # FILE.py:NAME, verl's signature; default: by the row's data_source
    seed: int = 0  # data order, sampling, initialisation
    # rollout
    prompts_per_step: int = 128  # P: prompts per step, over all ranks
    samples_per_prompt: int = 8  # G: responses to each prompt
    temperature: float = 1.0  # of sampling; the trainer's log-probs use it too
    engine: Literal["vllm", "hf"] = "vllm"  # rollout engine; hf: transformers, slow, needs no vLLM
    engine_memory: float | None = None  # KV cache of the engine (GiB per rank); default 8 on GPU, 1 on CPU
    sleep_level: Literal[0, 1, 2] = 1  # engine while updating: 0 stays, 1 weights to host, 2 weights dropped
    max_logprob_gap: float | None = None  # stop if |engine - trainer| log-probs exceed this mean; default by dtype
    # algorithm
    advantage: Literal["group-std", "group-mean"] = "group-std"  # (r - mean) / std of the group, or r - mean
    reduction: Literal["dapo", "grpo", "dr_grpo"] = "dapo"  # mean over tokens; over sequences; constant length
    clip_low: float = 0.2  # ratio is clipped below 1 - this
    clip_high: float = 0.2  # ratio is clipped above 1 + this (DAPO's clip-higher: 0.28)
    dual_clip: float = 3.0  # loss bound for negative advantages, as a ratio; 0 = off
    minibatches: int = 1  # optimizer steps per rollout and epoch
    epochs_per_step: int = 1  # passes over a rollout
    # optimization
    micro_batch_tokens: int = 16384  # tokens of one forward and backward, per rank
    learning_rate: float = 1e-6  # peak
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up
    warmup_steps: float = 0.0  # steps of linear warm-up; below 1: share of all steps
    lr_floor: float = 0.0  # last learning rate as a share of the peak
    weight_decay: float = 0.0  # AdamW, decoupled
    max_grad_norm: float = 1.0  # global L2 norm; 0 = no clipping
    total_steps: int | None = None  # steps (rollouts); default: from --total-epochs
    total_epochs: float = 1.0  # passes over the prompts, if --total-steps is not given
    # parallelism and precision
    strategy: Literal["fsdp", "ddp"] = "fsdp"  # shard the model (FSDP2) or replicate it
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # trainer and engine; master weights are float32
    attention: Literal["auto", "flash", "flex", "sdpa"] = "auto"  # auto: flex on GPUs with bf16, else sdpa
    gradient_checkpointing: bool = False  # recompute activations in backward: less memory, a third more compute
    trust_remote_code: bool = False  # run code that comes with the model
    # evaluation, checkpoints, logging
    eval_every: int = 20  # steps between evaluations; 0: only before and after
    eval_before: bool = True  # evaluate before the first step
    eval_only: bool = False  # evaluate --eval-data, print the table, write the samples, and stop
    eval_rows: int = 512  # rows of --eval-data used
    eval_samples: int = 1  # samples per row; above 1: pass@k and maj@k
    eval_temperature: float = 0.0  # 0 = greedy
    eval_top_p: float = 1.0  # nucleus, in evaluation only
    eval_top_k: int = -1  # in evaluation only
    save_every: int = 0  # steps between checkpoints; 0: only at the end
    keep_checkpoints: int = 1  # newest ones kept; the best by eval/accuracy is kept besides
    resume: str = "auto"  # auto: continue the run in --output-dir if there is one; never; or a path
    log: str = ""  # further trackers, comma-separated: tensorboard, wandb


# What `grpo.py` without --model runs: a policy of 3 million parameters learns to search (README, "The demo").
DEMO = Args(
    model="tiny",
    max_prompt_tokens=64,
    max_response_tokens=256,
    prompts_per_step=32,
    samples_per_prompt=8,
    micro_batch_tokens=4096,
    learning_rate=8e-5,
    lr_schedule="linear",
    lr_floor=0.1,
    warmup_steps=10,
    total_steps=60,
)


def group_advantages(scores: Tensor, groups: Tensor, advantage: str) -> Tensor:
    """Score minus the mean of its group, divided by the group's unbiased standard deviation if so asked.

    scores [E] float, groups [E] int64 -> [E]. DeepSeekMath eq. 3 ("group-std"), Dr. GRPO ("group-mean").
    A group of one, or one whose scores are all equal, has advantage 0: there is nothing to compare.
    """
    exact = scores.double()  # in float32 the mean of eight times 0.1 is not 0.1, and the division blows up the rest
    advantages = torch.zeros_like(exact)
    for group in groups.unique():
        members = groups == group
        centered = exact[members] - exact[members].mean()
        if advantage == "group-std":
            std = (centered.square().sum() / max(len(centered) - 1, 1)).sqrt()
            centered = centered / (std + 1e-6)
        advantages[members] = centered
    return advantages.to(scores.dtype)


def clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float
) -> tuple[Tensor, Tensor]:
    """Loss per token [N] and whether its clip is active [N]: PPO (arXiv 1707.06347, eq. 7) with separate bounds.

    max(-A r, -A clip(r, 1 - low, 1 + high)) with r = exp(logprobs - old_logprobs); for A < 0 at most -A * dual_clip.
    """
    logratio = (logprobs - old_logprobs).clamp(-20, 20)
    ratio = logratio.exp()
    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    pg_loss = torch.maximum(pg_loss1, pg_loss2)
    clipped = pg_loss2 > pg_loss1
    if dual_clip > 0:
        bound = -advantages * dual_clip
        clipped = clipped | ((advantages < 0) & (pg_loss > bound))
        pg_loss = torch.where(advantages < 0, torch.minimum(pg_loss, bound), pg_loss)
    return pg_loss, clipped


def token_weights(
    reduction: str, lengths: Tensor, num_loss_tokens: float, num_sequences: float, max_response_tokens: int
) -> Tensor:
    """Weight of each token in the loss [N], from the number of trained tokens of its episode, `lengths` [N].

    dapo: 1 / all tokens. grpo: 1 / (tokens of its sequence * sequences). dr_grpo: 1 / (a constant * sequences).
    The counts are those of the whole optimizer step on all ranks: the one denominator.
    """
    if reduction == "dapo":
        return torch.full_like(lengths, 1.0 / num_loss_tokens)
    if reduction == "grpo":
        return 1.0 / (lengths * num_sequences)
    return torch.full_like(lengths, 1.0 / (max_response_tokens * num_sequences))


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


def split_minibatches(episodes: list[Episode], num_prompts: int, minibatches: int, seed: int, step: int) -> list[list]:
    """Episode numbers of each minibatch: a random split of the step's prompts that does not depend on the ranks."""
    order = np.random.Generator(np.random.PCG64([seed, step])).permutation(num_prompts)
    minibatch_of = {int(prompt): place * minibatches // num_prompts for place, prompt in enumerate(order)}
    split: list[list[int]] = [[] for _ in range(minibatches)]
    for i, episode in enumerate(episodes):
        split[minibatch_of[episode.prompt_index]].append(i)
    return split


def check_args(args: Args) -> None:
    """Refuse what cannot work before anything is loaded."""
    if args.prompts_per_step < args.minibatches:
        raise SystemExit(
            f"--minibatches {args.minibatches} of --prompts-per-step {args.prompts_per_step}: a minibatch needs at "
            "least one prompt (a group stays together)"
        )
    if args.samples_per_prompt < 2 and not args.eval_only:
        raise SystemExit("--samples-per-prompt 1: a group of one has no advantage; GRPO needs at least 2")
    if args.eval_samples > 1 and args.eval_temperature == 0:
        raise SystemExit(
            f"--eval-samples {args.eval_samples} at --eval-temperature 0: greedy samples are all the same; give a "
            "temperature, such as --eval-temperature 1"
        )
    Sampling(temperature=args.temperature).check_exact()
    if args.dual_clip and args.dual_clip <= 1:
        raise SystemExit(f"--dual-clip {args.dual_clip}: a bound on the ratio must be above 1 (0 = off)")
    if args.eval_rows < 1:
        raise SystemExit(f"--eval-rows {args.eval_rows}: needs at least 1")
    if not (args.eval_data if args.eval_only else args.train_data) and (args.model != "tiny" or args.train_data):
        raise SystemExit(f"--model {args.model} needs {'--eval-data' if args.eval_only else '--train-data'}")


def main(args: Args, demo: bool = False) -> None:
    world = init_world()
    if demo:
        world.print("no --model given: running the embedded demo")
    check_args(args)
    stamp = broadcast_object(time.strftime("%Y%m%d-%H%M%S"))  # the clocks of the ranks may differ
    output_dir = args.output_dir or Path("runs") / f"grpo-{Path(args.model).name}-{stamp}"
    with user_errors():
        compute_dtype, why = choose_dtype(args.dtype, world.device)
    path = resolve_model(args.model, world)
    tokenizer = load_tokenizer(path, args.trust_remote_code)
    end_ids = end_token_ids(path, tokenizer)
    if args.model == "tiny" and not args.train_data:
        args.train_data, held_out = embedded_data("tiny", output_dir / "data", world)
        args.eval_data = args.eval_data or held_out
    data_options = {"max_prompt_tokens": args.max_prompt_tokens, "overlong": args.overlong_prompts}
    data_options |= {"skip_bad_rows": args.skip_bad_rows, "notice": world.print}
    train_data = eval_data = None
    with user_errors():
        if not args.eval_only:
            train_data = PromptData(args.train_data, tokenizer, max_rows=args.max_rows, **data_options)
        if args.eval_data:
            eval_data = PromptData(args.eval_data, tokenizer, flag="--eval-data", **data_options)
        reward: RewardFunction | None = load_reward_function(args.reward_function) if args.reward_function else None
        for data in (train_data, eval_data):
            for source in data.sources() if data and not reward else ():
                reward_function(source)  # an unknown data_source is an error now, not after the first rollout
    total_steps = args.total_steps
    if total_steps is None and train_data:
        total_steps = max(1, round(args.total_epochs * len(train_data) / args.prompts_per_step))

    # The engine first: it loads the weights by itself and is asleep when the trainer takes its memory.
    make_engine = VllmEngine if args.engine == "vllm" else HuggingFaceEngine
    engine = make_engine(
        path,
        compute_dtype,
        world,
        end_ids=end_ids,
        max_model_len=args.max_prompt_tokens + args.max_response_tokens,
        memory_gib=args.engine_memory,
        sleep_level=args.sleep_level,
        trust_remote_code=args.trust_remote_code,
    )
    engine.sleep()
    seed_everything(args.seed, world.rank)  # after vLLM, which seeds every rank alike
    attention = choose_attention(args.attention, world.device)
    policy = load_policy(
        path,
        attention,
        gradient_checkpointing=args.gradient_checkpointing,
        trust_remote_code=args.trust_remote_code,
    )
    sizes = parameter_sizes(policy)
    num_parameters = sum(p.numel() for p in policy.parameters())
    policy = wrap_model(policy, world, args.strategy, compute_dtype, policy.layers())
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=args.learning_rate, betas=(0.9, 0.999), weight_decay=args.weight_decay, fused=True
    )
    loss_scale = LossScale.for_dtype(compute_dtype)
    max_gap = gap_limit(compute_dtype) if args.max_logprob_gap is None else args.max_logprob_gap
    pack_options = layout(attention, args.micro_batch_tokens)
    sampling = Sampling(args.samples_per_prompt, args.max_response_tokens, args.temperature)
    eval_sampling = Sampling(
        args.eval_samples, args.max_response_tokens, args.eval_temperature, args.eval_top_p, args.eval_top_k
    )

    def sync_engine(step: int) -> None:
        engine.wake("weights")
        engine.sync_weights(full_parameters(policy), sizes, step)
        engine.wake("kv_cache")

    def run_evaluation(step: int) -> dict[str, float]:
        """eval/* of the weights of `step`, which the engine, awake, must hold."""
        metrics, samples = evaluate(
            engine,
            eval_data,
            args.eval_rows,
            eval_sampling,
            reward,
            tokenizer,
            seed=args.seed,
            weights_step=step,
            world=world,
        )
        if args.eval_only and world.is_main:
            world.print(report(samples, output_dir / "eval_samples.parquet"))
            world.print(f"samples: {output_dir / 'eval_samples.parquet'}")
        logger.samples(step, [(s["prompt"], s["completion"], s["score"]) for s in samples[:2]])
        return metrics

    trained = {"policy": (policy, optimizer)}
    loader = None if args.eval_only else PromptLoader(len(train_data), args.prompts_per_step, args.seed)
    start, best = 0, -math.inf
    if resumed := find_checkpoint(output_dir, args.resume, world):
        state = load_checkpoint(resumed, trained, world)
        start, best = state["step"], -math.inf if state["best"] is None else state["best"]
        if loader:
            loader.load_state_dict(state["loader"])
        loss_scale.load_state_dict(state["loss_scale"])
    if world.is_main and not args.eval_only:
        save_config(output_dir, vars(args))
    logger = Logger(
        output_dir,
        total_steps=total_steps or 0,
        trackers=args.log,
        config=vars(args),
        name="grpo",
        is_main=world.is_main,
    )
    if resumed:
        logger.event({"event": "resumed", "step": start, "checkpoint": str(resumed)})
        world.print(f"resumed: {resumed}, step {start}")
    world.print(
        f"grpo.py: {args.model}, {num_parameters / 1e6:.1f} M parameters, {world.size} x {world.device.type}, "
        f"{args.strategy}, {args.engine}, compute {compute_dtype} ({why}) -> {output_dir}"
    )
    if args.save_every and args.eval_every and args.save_every % args.eval_every:
        world.print("note: the best checkpoint is chosen among steps that are both saved and evaluated")
    if args.eval_only:
        sync_engine(start)
        logger.event({"event": "eval_only", "step": start, **run_evaluation(start)})
        return
    world.print(
        f"{len(train_data)} prompts; a step: {args.prompts_per_step} prompts x {args.samples_per_prompt} samples = "
        f"{args.prompts_per_step * args.samples_per_prompt} episodes, {args.minibatches} minibatches x "
        f"{args.epochs_per_step} epochs; {total_steps} steps pass over the data "
        f"{total_steps * args.prompts_per_step / len(train_data):.2f} times"
    )

    for step in range(start, total_steps):
        watch = Stopwatch()

        # 1. data
        positions = loader.next()
        prompts = [(p, train_data[position]) for p, position in enumerate(positions)][world.rank :: world.size]

        # 2. rollout
        with watch("sync"):
            sync_engine(step)
        if step == start and args.eval_before and eval_data and not resumed:
            with watch("eval"):
                logger.log(0, run_evaluation(step))
        with watch("rollout"):
            episodes = sample_episodes(engine, prompts, sampling, seed=args.seed, step=step, weights_step=step)
        engine.sleep()

        # 3. rewards and advantages
        with watch("reward"):
            score_episodes(episodes, dict(prompts), reward, tokenizer)
        scores = torch.tensor([e.rewards["score"] for e in episodes], dtype=torch.float32)  # [E]
        groups = torch.tensor([e.prompt_index for e in episodes], dtype=torch.int64)  # [E]
        advantages = group_advantages(scores, groups, args.advantage)  # [E]

        # 4. update
        index = TokenIndex(episodes)
        sampled = [lp for e in episodes for lp, trained in zip(e.logprobs, e.loss_mask) if trained]
        rollout_logprobs = torch.tensor(sampled, device=world.device)  # [T], the engine's
        old_logprobs = torch.full_like(rollout_logprobs, math.nan)  # [T], each filled before it is used
        token_advantages = advantages[index.episode_of_token].to(world.device)  # [T]
        token_lengths = index.lengths[index.episode_of_token].float().to(world.device)  # [T]
        split = split_minibatches(episodes, args.prompts_per_step, args.minibatches, args.seed, step)
        packs = [pack(episodes, selected, index, **pack_options) for selected in split]
        counts = [float(n) for s in split for n in (index.lengths[s].sum(), (index.lengths[s] > 0).sum())]
        counts = all_reduce(counts)  # per minibatch, over all ranks: trained tokens, episodes that have any

        with watch("logprob"), torch.no_grad():
            for batches in packs[1:]:  # the first minibatch gets them for free in its own forward
                for batch in batches:
                    with forward_context(policy, world, compute_dtype):
                        batch = batch.to(world.device)
                        old_logprobs[batch.tokens] = policy(batch, args.temperature)[0]

        lr = args.learning_rate * lr_factor(step, total_steps, args.warmup_steps, args.lr_schedule, args.lr_floor)
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = lr, args.weight_decay  # of this run, not of the checkpoint
        totals = torch.zeros(4, device=world.device)  # loss, entropy, clipped tokens, KL: summed over tokens
        grad_norms, skipped = [], 0
        clip = (args.clip_low, args.clip_high, args.dual_clip)
        with watch("update"):
            for epoch in range(args.epochs_per_step):
                for m, batches in enumerate(packs):
                    on_policy = epoch == m == 0
                    num_loss_tokens, num_sequences = max(counts[2 * m], 1.0), max(counts[2 * m + 1], 1.0)
                    for i, batch in enumerate(batches):
                        batch = batch.to(world.device)
                        with forward_context(policy, world, compute_dtype, last=i == len(batches) - 1):
                            mb_logprobs, mb_entropy = policy(batch, args.temperature)  # [N], [N]
                            if on_policy:
                                old_logprobs[batch.tokens] = mb_logprobs.detach()
                            mb_old_logprobs, mb_advantages = old_logprobs[batch.tokens], token_advantages[batch.tokens]
                            pg_loss, clipped = clipped_surrogate(mb_logprobs, mb_old_logprobs, mb_advantages, *clip)
                            mb_lengths = token_lengths[batch.tokens]
                            weights = token_weights(
                                args.reduction, mb_lengths, num_loss_tokens, num_sequences, args.max_response_tokens
                            )
                            # FSDP2 and DDP average gradients over ranks, the denominator is global: hence world.size
                            loss = (pg_loss * weights).sum() * world.size
                            (loss * loss_scale.scale).backward()
                        logratio = mb_logprobs.detach() - mb_old_logprobs
                        kl = logratio.exp() - 1 - logratio  # k3 of the old against the new policy
                        sums = (loss.detach() / world.size, mb_entropy.detach().sum(), clipped.sum(), kl.sum())
                        totals += torch.stack([value.float() for value in sums])
                    if on_policy:  # all old log-probs are in, and the weights are still the engine's
                        gap_sum = all_reduce([(rollout_logprobs - old_logprobs).abs().sum().item()])[0]
                        gap = gap_sum / max(sum(counts[::2]), 1.0)
                        if not gap <= max_gap:
                            raise RuntimeError(
                                f"step {step}: the engine's log-probs differ from the trainer's by {gap:.2g} on "
                                f"average, more than --max-logprob-gap {max_gap:.2g}: stale or damaged weights, or a "
                                "cache that outlived the sync"
                            )
                    grad_norm, stepped = guarded_step(policy, optimizer, args.max_grad_norm, loss_scale)
                    grad_norms.append(grad_norm)
                    skipped += not stepped

        # 5. log
        sums = dict(zip(("loss", "entropy", "clipped", "kl"), totals.tolist()))
        sums = all_reduce_sums(sums | rollout_sums(episodes, scores, groups))
        trained_tokens = max(sum(counts[::2]) * args.epochs_per_step, 1.0)
        optimizer_steps = args.minibatches * args.epochs_per_step
        mean = sums["score"] / sums["episodes"]
        metrics = {
            "reward/mean": mean,
            "reward/std": math.sqrt(max(0.0, sums["score_squared"] / sums["episodes"] - mean**2)),
            "reward/accuracy": sums["correct"] / sums["episodes"],
            "reward/zero_variance_groups": sums["flat_groups"] / sums["groups"],
            "rollout/response_length": sums["response_tokens"] / sums["episodes"],
            "rollout/truncated": sums["truncated"] / sums["episodes"],
            "rollout/tokens_per_s": sums["response_tokens"] / watch.seconds["rollout"],
            "policy/loss": sums["loss"] / optimizer_steps,
            "policy/entropy": sums["entropy"] / trained_tokens,
            "policy/clip_fraction": sums["clipped"] / trained_tokens,
            "policy/approx_kl": sums["kl"] / trained_tokens,
            "policy/rollout_logprob_gap": gap,
            "optim/grad_norm": sum(grad_norms) / len(grad_norms),
            "optim/lr": lr,
            "optim/skipped_steps": float(skipped),
            "optim/loss_scale": loss_scale.scale,
            "data/epoch": loader.epoch,
        }

        # 6. eval, checkpoint
        last = step + 1 == total_steps
        if eval_data and (last or (args.eval_every and (step + 1) % args.eval_every == 0)):
            with watch("eval"):
                sync_engine(step + 1)
                metrics |= run_evaluation(step + 1)
                engine.sleep()
        metrics |= watch.metrics() | {"memory/peak_gb": peak_memory_gb(world.device)}
        logger.log(step + 1, metrics)  # before the checkpoint: a step that a resume skips is a step on record
        if last or (args.save_every and (step + 1) % args.save_every == 0):
            improved = metrics.get("eval/accuracy", -math.inf) > best
            best = max(best, metrics.get("eval/accuracy", -math.inf))
            state = {"loader": loader.state_dict(), "loss_scale": loss_scale.state_dict()}
            state["best"] = best if math.isfinite(best) else None
            folder = output_dir / "checkpoints"
            save_checkpoint(folder, step + 1, trained, state, world, keep=args.keep_checkpoints, best=improved)

    export_hugging_face(policy, tokenizer, output_dir / "model", world, compute_dtype)
    if world.is_main:
        plot_curves(output_dir)
    logger.close()
    world.print(f"done: {output_dir / 'model'} loads in transformers and vLLM; curves in {output_dir / 'curves.png'}")


def rollout_sums(episodes: list[Episode], scores: Tensor, groups: Tensor) -> dict[str, float]:
    """What this rank adds to the metrics of a step: sums and counts, to be reduced once."""
    by_group = [scores[groups == g] for g in groups.unique()]
    return {
        "episodes": len(episodes),
        "score": scores.sum().item(),
        "score_squared": (scores**2).sum().item(),
        "correct": (scores >= 1.0 - 1e-6).sum().item(),
        "groups": len(by_group),
        "flat_groups": sum(1 for s in by_group if s.min() == s.max()),
        "response_tokens": sum(len(e.response_ids) for e in episodes),
        "truncated": sum(e.truncated for e in episodes),
    }


if __name__ == "__main__":
    demo = not any(argument.partition("=")[0] == "--model" for argument in sys.argv[1:])
    run(main, tyro.cli(Args, default=DEMO if demo else None, description=__doc__), demo)

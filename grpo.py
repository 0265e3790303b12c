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

    torchrun --nproc_per_node 2 grpo.py                              # embedded demo, minutes on a CPU
    torchrun --nproc_per_node 4 grpo.py --model Qwen/Qwen2.5-1.5B-Instruct --train-data gsm8k/train.parquet \\
        --eval-data gsm8k/test.parquet --prompts-per-step 128 --samples-per-prompt 8
    python grpo.py --eval-only --model smollm2 --eval-data test.parquet --eval-samples 8 --eval-temperature 1

Names: P prompts a step, G samples of a prompt, E episodes on this rank, T their sampled tokens, N those of a
micro-batch. Everything per token is flat ([T] or [N]): there is no padding to mask.
"""

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from torch import Tensor

from common.arguments import check_objective_args
from common.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from common.data.prompts import PromptLoader
from common.distributed import World, all_reduce, all_reduce_sums, forward_context, run, stop_requested, wrap_model
from common.dumps import load_rollouts
from common.engine.books import Sampling
from common.episodes import Episode, prompts_of_all_ranks, sample_episodes, unequal_groups
from common.evaluate import evaluate
from common.files import refuse
from common.memory import halve_budget, peak_memory_gb
from common.metrics import policy_metrics, rollout_metrics, rollout_sums
from common.models import export_hugging_face, full_parameters, load_policy, parameter_sizes
from common.packing import MicroBatch, TokenIndex, layout, pack
from common.precision import LossScale, check_gap, gap_limit, guarded_step
from common.rewards import score_episodes
from common.setup import Stopwatch, dump_step, finish, open_logger, set_up


@dataclass
class Args:
    # model and data
    model: str  # folder, hub id, or an embedded model: tiny, tiny-vl, smollm2
    train_data: str | None = None  # verl-format .parquet or .jsonl, comma-separated; tiny brings its own
    eval_data: str | None = None  # the same format; gives eval/*
    output_dir: Path | None = None  # run folder; default runs/SCRIPT-MODEL-TIME
    max_prompt_tokens: int = 512  # longest prompt (tokens)
    max_response_tokens: int = 512  # longest response (tokens)
    overlong_prompts: Literal["error", "drop"] = "error"  # what to do with longer prompts
    media_root: Path | None = None  # folder of the relative paths in the columns images and videos
    min_pixels: int = 3136  # smaller pictures are enlarged to this area; 28 x 28 pixels are one token
    max_pixels: int = 1_003_520  # larger ones are reduced to it; crops are cut from the original
    max_frame_pixels: int = 401_408  # the same for a frame of a video
    max_rows: int | None = None  # use only the first rows of the training data
    skip_bad_rows: bool = False  # count and drop unusable rows instead of stopping
    reward_function: str | None = None  # FILE.py:NAME, verl's signature; default: by the row's data_source
    reward_workers: int = 2  # processes per rank that score responses
    reward_timeout: float = 10.0  # seconds for one response; one that takes longer, or crashes, is left out
    seed: int = 0  # data order, sampling, initialisation
    # rollout
    prompts_per_step: int = 128  # P: prompts per step, over all ranks
    samples_per_prompt: int = 8  # G: responses to each prompt
    temperature: float = 1.0  # of sampling; the trainer's log-probs use it too
    tools: str | None = None  # what the policy may call: visual, built-in names, FILE.py:NAME, comma-separated
    tool_workers: int = 64  # processes per rank, at most, that run tools
    tool_timeout: float = 30.0  # seconds for one call; an episode whose tool hangs or crashes is left out
    max_turns: int = 5  # answers in a trajectory, each but the last followed by what its tool returns
    max_turn_tokens: int | None = None  # longest single answer (tokens); default: --max-response-tokens
    max_tool_errors: int = 3  # errors that are told to the policy; one more ends the trajectory
    max_images: int = 16  # pictures in a trajectory, the prompt's included
    deterministic: bool = False  # with tools: turns in lock-step, so that a resume repeats them bit for bit
    engine: Literal["vllm", "hf"] = "vllm"  # rollout engine; hf: transformers, slow, needs no vLLM
    engine_memory: float | None = None  # KV cache of the engine (GiB per rank); default 8 on GPU, 1 on CPU
    sleep_level: Literal[0, 1, 2] = 1  # engine while updating: 0 stays, 1 weights to host, 2 weights dropped
    max_logprob_gap: float | None = None  # stop if |engine - trainer| log-probs exceed this mean; default by dtype
    # algorithm
    objective: Literal["ppo", "gspo", "cispo"] = "ppo"  # what is clipped: a token's ratio, its sequence's, its weight
    advantage: Literal["group-std", "group-mean", "rloo", "batch-std"] = "group-std"  # baseline and scale of scores
    reduction: Literal["dapo", "grpo", "dr_grpo"] = "dapo"  # mean over tokens; over sequences; constant length
    loss_length: int | None = None  # constant length of dr_grpo; default: --max-response-tokens
    clip_low: float = 0.2  # ratio is clipped below 1 - this
    clip_high: float = 0.2  # ratio is clipped above 1 + this (DAPO's clip-higher: 0.28)
    dual_clip: float = 3.0  # loss bound for negative advantages, as a ratio; 0 = off
    minibatches: int = 1  # optimizer steps per rollout and epoch
    epochs_per_step: int = 1  # passes over a rollout
    entropy_coef: float = 0.0  # bonus for entropy
    correction: Literal["none", "truncate", "mask", "sequence"] = "none"  # TIS; IcePop, MIS; whole
    correction_low: float = 0.5  # mask, sequence: below this the weight is 0
    correction_high: float = 2.0  # truncate: largest weight; mask, sequence: above this the weight is 0
    kl_in: Literal["none", "reward", "loss"] = "none"  # where the KL to the initial policy is charged
    kl_coef: float = 0.0  # its coefficient
    kl_estimator: Literal["k1", "k2", "k3", "k3-is"] = "k1"  # reward: k1; loss: k2, k3, or k3-is (importance-weighted)
    kl_target: float = 0.0  # adapt the coefficient towards this KL per token; 0: fixed
    kl_horizon: float = 10_000.0  # sequences over which it adapts
    overlong_buffer: int = 0  # last tokens of --max-response-tokens in which the score falls, by up to 1 (DAPO)
    mask_truncated: bool = False  # train on no truncated response; it still counts in its group's baseline
    dynamic_sampling: int = 0  # replace groups of equal scores, in at most so many rounds of sampling; 0: keep them
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
    freeze_vision: bool = False  # train the language model alone
    optimizer_offload: bool = False  # Adam's moments on the host, but for the optimizer's step
    gradient_checkpointing: bool = False  # recompute activations in backward: less memory, a third more compute
    compile: bool = False  # torch.compile the layers, on GPUs: a slow first step, then faster ones
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
    dump_rollouts_every: int = 0  # steps between dumps of all episodes to OUTPUT_DIR/rollouts; 0: none
    replay: Path | None = None  # a dump: repeat the update of its step bit for bit, without an engine, and stop
    stall_minutes: float = 60.0  # longest a phase (rollout, rewards, evaluation) may take; then stacks, and the end
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
    warmup_steps=5,
    total_steps=40,
    eval_every=10,
)


def shaped_scores(episodes: list[Episode], max_response_tokens: int, overlong_buffer: int) -> Tensor:
    """Scores [E], with DAPO's soft overlong punishment (eq. 13): up to -1 over the last `overlong_buffer` tokens."""
    scores = torch.tensor([e.rewards["score"] for e in episodes], dtype=torch.float32)
    if not overlong_buffer:
        return scores
    lengths = torch.tensor([len(e.response_ids) for e in episodes])
    return scores + ((max_response_tokens - overlong_buffer - lengths) / overlong_buffer).clamp(-1, 0)


def group_advantages(scores: Tensor, groups: Tensor, advantage: str) -> Tensor:
    """Score minus a baseline from its group, scaled. scores [E] float, groups [E] int64 -> [E]. All ranks call it.

    group-std: (r - mean) / std, unbiased (DeepSeekMath eq. 3). group-mean: r - mean (Dr. GRPO). rloo: r - mean of the
    others (arXiv 2402.14740). batch-std: (r - mean) / std over all episodes of the step (REINFORCE++-baseline,
    2501.03262). A group of one, or one whose scores are all equal, has advantage 0: there is nothing to compare.
    """
    exact = scores.double()  # in float32 the mean of eight times 0.1 is not 0.1, and the division blows up the rest
    advantages = torch.zeros_like(exact)
    for group in groups.unique():
        members = groups == group
        size = int(members.sum())
        centered = exact[members] - exact[members].mean()
        if advantage == "group-std":
            centered = centered / ((centered.square().sum() / max(size - 1, 1)).sqrt() + 1e-6)
        elif advantage == "rloo":
            centered = centered * size / max(size - 1, 1)
        advantages[members] = centered
    if advantage == "batch-std":
        squares, count = all_reduce([advantages.square().sum().item(), len(advantages)])
        advantages /= math.sqrt(squares / max(count - 1, 1)) + 1e-6
    return advantages.to(scores.dtype)


def sequence_mean(values: Tensor, episodes: Tensor) -> Tensor:
    """Mean of values [N] over the tokens of the same episode, at each of them. episodes [N] int64 -> [N]."""
    _, place, count = episodes.unique(return_inverse=True, return_counts=True)
    return (values.new_zeros(len(count)).index_add(0, place, values) / count)[place]


def surrogate(
    objective: str,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    episodes: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> tuple[Tensor, Tensor]:
    """Loss per token [N] and whether its clip is active [N], with r = exp(logprobs - old_logprobs).

    ppo: max(-A r, -A clip(r, 1 - low, 1 + high)), for A < 0 at most -A * dual_clip (arXiv 1707.06347 eq. 7,
    1912.09729). gspo: the same with the geometric mean of r over the sequence, no dual clip (2507.18071 eq. 5, 14).
    cispo: -A clip(r) log p, the clipped ratio being a constant weight: no token loses its gradient (2506.13585 eq. 4).
    """
    logratio = (logprobs - old_logprobs).clamp(-20, 20)
    if objective == "gspo":  # the value of the sequence's ratio, the gradient of the token's
        logratio = logprobs - logprobs.detach() + sequence_mean(logratio, episodes).detach()
    ratio = logratio.exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    if objective == "cispo":
        return -advantages * clipped_ratio.detach() * logprobs, clipped_ratio != ratio
    pg_loss = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)
    clipped = -advantages * clipped_ratio > -advantages * ratio
    if dual_clip > 0 and objective == "ppo":
        bound = -advantages * dual_clip
        clipped = clipped | ((advantages < 0) & (pg_loss > bound))
        pg_loss = torch.where(advantages < 0, torch.minimum(pg_loss, bound), pg_loss)
    return pg_loss, clipped


def engine_correction(
    correction: str, old_logprobs: Tensor, rollout_logprobs: Tensor, episodes: Tensor, low: float, high: float
) -> Tensor:
    """Constant weight of each token [N] for having been sampled by the engine, w = trainer's / engine's probability.

    truncate: min(w, high) (TIS, fengyao.notion.site/off-policy-rl). mask: w if low <= w <= high, else 0 (IcePop,
    arXiv 2510.18855; MIS: low 0). sequence: 1 if low <= geometric mean of w over the sequence <= high, else 0. What is
    masked stays in the denominator.
    """
    logratio = (old_logprobs - rollout_logprobs).detach().clamp(-20, 20)
    if correction == "truncate":
        return logratio.exp().clamp(max=high)
    weight = sequence_mean(logratio, episodes).exp() if correction == "sequence" else logratio.exp()
    inside = (weight >= low) & (weight <= high)
    return inside.to(weight.dtype) * (1.0 if correction == "sequence" else weight)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate [N] of KL(policy || reference), d = log policy - log reference (joschu.net/blog/kl-approx).

    k1: d. k2: d^2 / 2. k3: exp(-d) - 1 + d. k3-is: k3 times the ratio policy / old, gradient through both: the one
    that is right off-policy as well (DeepSeek-V3.2, arXiv 2512.02556 sec. 3.1).
    """
    d = (logprobs - ref_logprobs).clamp(-20, 20)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d.square()
    k3 = (-d).exp() - 1 + d
    return k3 * (logprobs - old_logprobs).clamp(-20, 20).exp() if estimator == "k3-is" else k3


def adapted_kl_coef(kl_coef: float, kl: float, target: float, horizon: float, num_sequences: float) -> float:
    """Next coefficient of the adaptive controller (arXiv 1909.08593 sec. 2.2); target 0: fixed."""
    error = min(max(kl / target - 1, -0.2), 0.2) if target else 0.0
    return kl_coef * (1 + error * min(num_sequences / horizon, 1.0))


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


def split_minibatches(episodes: list[Episode], prompts: list, minibatches: int, seed: int, step: int) -> list[list]:
    """Episode numbers of each minibatch: a random split of all ranks' `prompts`, so that the ranks play no part."""
    order = np.random.Generator(np.random.PCG64([seed, step])).permutation(prompts)
    minibatch_of = {int(prompt): place * minibatches // len(prompts) for place, prompt in enumerate(order)}
    split: list[list[int]] = [[] for _ in range(minibatches)]
    for i, episode in enumerate(episodes):
        split[minibatch_of[episode.prompt_index]].append(i)
    return split


@dataclass
class Tokens:
    """What is known of each trained token: T of them on this rank in a step, N in a micro-batch."""

    episodes: Tensor  # [T] int64: whose token
    lengths: Tensor  # [T] float: trained tokens of its episode
    rollout_logprobs: Tensor  # [T] float32: the engine's
    old_logprobs: Tensor  # [T] float32: the trainer's, with the weights of the rollout; NaN until computed
    ref_logprobs: Tensor  # [T] float32: the initial policy's; NaN without --kl-in
    advantages: Tensor  # [T] float32

    def __getitem__(self, index: Tensor) -> "Tokens":
        return Tokens(*(getattr(self, field.name)[index] for field in fields(self)))


def backward(
    policy: torch.nn.Module,
    batches: list[MicroBatch],
    tokens: Tokens,
    args: Args,
    world: World,
    denominators: list[float],
    on_policy: bool,
    kl_coef: float = 0.0,
    scale: float = 1.0,
) -> Tensor:
    """Accumulate the gradient of one optimizer step. Returns sums over its tokens: loss, entropy, clipped, old-new KL.

    denominators: trained tokens, and episodes that have any, over all ranks. If `on_policy`, the weights are those of
    the rollout: the log-probs are the old ones too, and are kept as such.
    """
    num_loss_tokens, num_sequences = (max(count, 1.0) for count in denominators)
    sums = torch.zeros(4, device=world.device)
    for i, batch in enumerate(batches):
        batch = batch.to(world.device)
        with forward_context(policy, last=i == len(batches) - 1):
            logprobs, entropy = policy(batch, args.temperature)  # [N], [N]
            if on_policy:
                tokens.old_logprobs[batch.tokens] = logprobs.detach()
            t = tokens[batch.tokens]
            clip = (args.clip_low, args.clip_high, args.dual_clip)
            loss, clipped = surrogate(args.objective, logprobs, t.old_logprobs, t.advantages, t.episodes, *clip)
            if args.correction != "none":
                bounds = (args.correction_low, args.correction_high)
                probabilities = (t.old_logprobs, t.rollout_logprobs)
                loss = loss * engine_correction(args.correction, *probabilities, t.episodes, *bounds)
            loss = loss - args.entropy_coef * entropy
            if args.kl_in == "loss":
                loss = loss + kl_coef * kl_estimate(logprobs, t.ref_logprobs, t.old_logprobs, args.kl_estimator)
            limit = args.loss_length or args.max_response_tokens
            loss = (loss * token_weights(args.reduction, t.lengths, num_loss_tokens, num_sequences, limit)).sum()
            # FSDP2 and DDP average gradients over ranks, the denominator is global: hence world.size
            (loss * world.size * scale).backward()
        logratio = logprobs.detach() - t.old_logprobs
        kl = logratio.exp() - 1 - logratio  # k3
        sums += torch.stack([x.detach().float() for x in (loss, entropy.sum(), clipped.sum(), kl.sum())])
    return sums


def check_args(args: Args) -> None:
    """Refuse what cannot work, or has no effect, before anything is loaded."""
    check_objective_args(args)
    refuse(args.samples_per_prompt < 2 and not args.eval_only, "--samples-per-prompt 1: nothing to compare with")
    refuse(args.dynamic_sampling == 1, "--dynamic-sampling 1 never refills: give a number of rounds, such as 10")
    noisy = args.kl_in == "reward" and args.advantage == "group-std"
    refuse(noisy, "--kl-in reward with --advantage group-std: KL noise would decide groups of equal scores, take rloo")


def main(args: Args, demo: bool = False) -> None:
    check_args(args)
    job = set_up(args, "grpo", demo)
    world, engine, device = job.world, job.engine, job.world.device

    options = {"trust_remote_code": args.trust_remote_code, "vision": job.vision}
    load = partial(load_policy, job.path, job.attention, **options)
    ways = {"gradient_checkpointing": args.gradient_checkpointing, "compile_layers": args.compile}
    policy = load(freeze_vision=args.freeze_vision, **ways)
    sizes = parameter_sizes(policy)
    pack_options = layout(job.attention, args.micro_batch_tokens, job.output_dir, job.vision)
    policy = wrap_model(policy, world, args.strategy, job.compute_dtype)
    reference = None
    if args.kl_in != "none":
        dtype = job.compute_dtype if args.strategy == "fsdp" else torch.float32  # FSDP2 computes with casts anyway
        reference = wrap_model(load(dtype=dtype).requires_grad_(False), world, args.strategy, job.compute_dtype)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=args.learning_rate, betas=(0.9, 0.999), weight_decay=args.weight_decay, fused=True
    )
    loss_scale = LossScale.for_dtype(job.compute_dtype)
    offload = args.optimizer_offload
    max_gap = gap_limit(job.compute_dtype) if args.max_logprob_gap is None else args.max_logprob_gap
    sampling = Sampling(args.samples_per_prompt, args.max_response_tokens, args.temperature)

    trained = {"policy": (policy, optimizer)}
    loader = None if args.eval_only else PromptLoader(len(job.train_data), args.seed)
    start, best, kl_coef = 0, -math.inf, args.kl_coef
    if resumed := find_checkpoint(job.output_dir, args.resume, world):
        state = load_checkpoint(resumed, trained, world, args.optimizer_offload)
        start, best = state["step"], state["best"]
        kl_coef = state["kl_coef"] if args.kl_target and state["kl_coef"] else args.kl_coef
        loss_scale.load_state_dict(state["loss_scale"])
        if loader:
            loader.load_state_dict(state["loader"])
    logger = open_logger(args, job, "grpo", trained, start, resumed)

    def sync_engine(step: int) -> None:
        engine.wake("weights")
        engine.sync_weights(full_parameters(policy, job.compute_dtype), sizes, step)
        engine.wake("kv_cache")

    @torch.no_grad()
    def logprob_pass(model: torch.nn.Module, batches: Iterable[MicroBatch], result: Tensor) -> None:
        for batch in batches:
            with forward_context(model):
                result[batch.tokens.to(device)] = model(batch.to(device), args.temperature)[0]

    if args.eval_only:
        sync_engine(start)
        metrics = evaluate(job, args, start, logger, job.output_dir / "eval_samples.parquet")
        logger.event({"event": "eval_only", "step": start, **metrics})
        return

    end = start + 1 if args.replay else job.total_steps
    for step in range(start, end):
        watch = Stopwatch()
        sampled, episodes, drawn = [], [], 0  # episodes of this rank: all, those to train on; prompts of all ranks
        if args.replay:
            sampled, episodes = load_rollouts(args.replay, step + 1, world, job.limits)
        else:
            with watch("sync"):
                sync_engine(step)
            if step == 0 and args.eval_before and job.eval_data:
                with watch("eval"):
                    logger.log(0, evaluate(job, args, 0, logger))

        missing = 0 if args.replay else args.prompts_per_step
        for _ in range(max(args.dynamic_sampling, 1)):
            if not missing:
                break
            # 1. data
            places = list(enumerate(loader.next(missing), start=drawn))[world.rank :: world.size]
            prompts = {place: job.train_data[position] for place, position in places}
            drawn += missing

            # 2. rollout
            with watch("rollout"):
                asked = {"seed": args.seed, "step": step, "weights_step": step, "turns": job.turns}
                new = sample_episodes(engine, prompts, sampling, **asked)

            # 3. rewards
            with watch("reward"):
                score_episodes(new, prompts, job.workers, job.tokenizer)
            sampled += new
            new = [e for e in new if math.isfinite(e.rewards["score"])]  # scoring the others has failed
            episodes += unequal_groups(new) if args.dynamic_sampling else new
            missing = args.prompts_per_step - int(all_reduce([len({e.prompt_index for e in episodes})])[0])
        if args.dynamic_sampling and missing:
            raise SystemExit(
                f"--dynamic-sampling {args.dynamic_sampling}: {missing} groups of unequal scores are missing "
                "after so many rounds; raise it, or --samples-per-prompt, or take prompts of another difficulty"
            )
        if engine:
            engine.sleep()

        # 4. update
        for episode in episodes if args.mask_truncated else []:
            episode.loss_mask = [mask * (not episode.truncated) for mask in episode.loss_mask]
        groups = torch.tensor([e.prompt_index for e in episodes], dtype=torch.int64)  # [E]
        scores = shaped_scores(episodes, args.max_response_tokens, args.overlong_buffer)  # [E]
        index = TokenIndex(episodes)
        episode_of_token = index.episode_of_token  # [T]
        rollout_logprobs = torch.tensor([lp for e in episodes for lp, m in zip(e.logprobs, e.loss_mask) if m])
        unknown = torch.full((len(index),), math.nan)
        flat = [episode_of_token, index.lengths[episode_of_token].float(), rollout_logprobs]
        tokens = Tokens(*(x.to(device) for x in (*flat, unknown, unknown.clone(), unknown.clone())))
        split = split_minibatches(episodes, prompts_of_all_ranks(episodes), args.minibatches, args.seed, step)
        packs = [pack(episodes, selected, index, **pack_options) for selected in split]
        counts = [float(n) for s in split for n in (index.lengths[s].sum(), (index.lengths[s] > 0).sum())]
        counts = all_reduce(counts)  # per minibatch, over all ranks: trained tokens, episodes that have any

        with watch("logprob"):
            # the first minibatch gets its old log-probs for free in its own forward, if no reward depends on them
            logprob_pass(policy, chain(*(packs if args.kl_in == "reward" else packs[1:])), tokens.old_logprobs)
            if reference:
                logprob_pass(reference, chain(*packs), tokens.ref_logprobs)
        if args.kl_in == "reward":
            kl = kl_estimate(tokens.old_logprobs, tokens.ref_logprobs, tokens.old_logprobs, "k1").cpu()
            scores = scores - kl_coef * torch.zeros(len(scores)).index_add(0, episode_of_token, kl)
        advantages = group_advantages(scores, groups, args.advantage)  # [E]
        tokens.advantages = advantages[episode_of_token].to(device)
        if args.dump_rollouts_every and (step + 1) % args.dump_rollouts_every == 0:
            dump_step(job, step + 1, sampled, episodes, advantages.tolist())

        lr = args.learning_rate * lr_factor(step, job.total_steps, args.warmup_steps, args.lr_schedule, args.lr_floor)
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = lr, args.weight_decay  # of this run, not of the checkpoint
        totals = torch.zeros(4, device=device)
        grad_norms, skipped = [], 0
        with watch("update"):
            for epoch in range(args.epochs_per_step):
                for m in range(args.minibatches):
                    on_policy = epoch == m == 0
                    constants = (counts[2 * m : 2 * m + 2], on_policy, kl_coef, loss_scale.scale)
                    while True:
                        try:
                            totals += backward(policy, packs[m], tokens, args, world, *constants)
                            break
                        except torch.OutOfMemoryError as error:  # the same gradient, in smaller pieces
                            pack_options = halve_budget(pack_options, policy, world, error, job.output_dir)
                            packs = [pack(episodes, selected, index, **pack_options) for selected in split]
                    if on_policy:  # all old log-probs are in, and the weights are still the engine's
                        gap = (tokens.rollout_logprobs - tokens.old_logprobs).abs().sum().item()
                        gap = all_reduce([gap])[0] / max(sum(counts[::2]), 1.0)
                        check_gap(gap, max_gap, step)
                    grad_norm, stepped = guarded_step(policy, optimizer, args.max_grad_norm, loss_scale, offload)
                    grad_norms += [grad_norm] * (counts[2 * m] > 0)  # some of many minibatches may be empty
                    skipped += not stepped

        # 5. log
        sums = dict(zip(("loss", "entropy", "clipped", "kl"), totals.tolist())) | rollout_sums(sampled)
        if reference:
            old = tokens.old_logprobs
            sums["kl_to_ref"] = kl_estimate(old, tokens.ref_logprobs, old, "k3").sum().item()
        sums = all_reduce_sums(sums)
        num_tokens = max(sum(counts[::2]), 1.0)
        metrics = rollout_metrics(sums, watch.seconds, job.turns is not None)
        metrics |= policy_metrics(sums, num_tokens, args.epochs_per_step, grad_norms)
        metrics |= {
            "policy/rollout_logprob_gap": gap,
            "optim/lr": lr,
            "optim/skipped_steps": float(skipped),
            "optim/loss_scale": loss_scale.scale,
            "data/epoch": loader.epoch,
        }
        if reference:
            metrics |= {"policy/kl_to_ref": sums["kl_to_ref"] / num_tokens, "policy/kl_coef": kl_coef}
            kl = metrics["policy/kl_to_ref"]
            kl_coef = adapted_kl_coef(kl_coef, kl, args.kl_target, args.kl_horizon, sum(counts[1::2]))

        # 6. eval, checkpoint
        last, stop = step + 1 == end, stop_requested()
        if engine and job.eval_data and (last or (args.eval_every and (step + 1) % args.eval_every == 0)):
            with watch("eval"):
                sync_engine(step + 1)
                metrics |= evaluate(job, args, step + 1, logger)
                engine.sleep()
        metrics |= watch.metrics() | {"memory/peak_gb": peak_memory_gb(device)}
        logger.log(step + 1, metrics)  # before the checkpoint: a step that a resume skips is a step on record
        if not args.replay and (last or stop or (args.save_every and (step + 1) % args.save_every == 0)):
            accuracy = metrics.get("eval/accuracy", -math.inf)
            state = {"best": max(accuracy, best), "kl_coef": kl_coef}
            state |= {"loader": loader.state_dict(), "loss_scale": loss_scale.state_dict()}
            folder = job.output_dir / "checkpoints"
            keep = {"keep": args.keep_checkpoints, "best": accuracy > best}
            if save_checkpoint(folder, step + 1, trained, state, world, **keep):
                best = state["best"]
        if stop and not last:
            logger.event({"event": "stopped", "step": step + 1})
            raise SystemExit(143)  # as a process ended by SIGTERM

    export_hugging_face(policy, job.tokenizer, job.output_dir / "model", world, job.compute_dtype)
    finish(job, logger)
    world.print(f"done: {job.output_dir / 'model'} loads in transformers and vLLM; curves.png is beside it")


if __name__ == "__main__":
    demo = not any(argument.partition("=")[0] in ("--model", "--help", "-h") for argument in sys.argv[1:])
    run(main, tyro.cli(Args, default=DEMO if demo else None, description=__doc__), demo)

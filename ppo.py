"""Proximal policy optimization (PPO) with a critic, for language models.

Answers to each prompt are sampled and scored. A second model, the critic, predicts the score at
every token; a token becomes more likely if the outcome is better than predicted there. Papers: PPO
(arXiv 1707.06347), GAE (1506.02438), VC-PPO (2503.01491), dual clip (1912.09729).

Where this differs from the papers and from most implementations:

1. The critic's head starts at zero: V = 0 everywhere at first, so the first advantages come from
   the rewards alone, not from the noise of a random head. --critic-warmup-steps first trains the
   critic alone, on the initial policy's returns.
2. One denominator for both losses, of the whole optimizer step: gradients do not depend on how a
   batch is split.
3. Advantages are whitened over all trained tokens of the step on all ranks. The critic's targets
   are not: they are the plain returns, whatever --gae-lambda.
4. Only sampled tokens have values and rewards; GAE runs over them as if observations between them
   were not there.

Functions that grpo.py also has are the same there, word for word, except for policy_loss,
check_args and main.

    torchrun --nproc_per_node 2 ppo.py    # embedded demo, minutes on a CPU
    torchrun --nproc_per_node 2 ppo.py --model Qwen/Qwen2.5-3B \\
        --train-data data/countdown/train.parquet --max-response-tokens 1024

Names: E episodes on this rank, T their trained tokens, N those of a micro-batch. Everything per
token is flat ([T] or [N]): there is no padding to mask.

Its mathematics is tested in tests/math/test_ppo_math.py.
"""

import math
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

import common.packages  # noqa: F401, one line if torch is missing

import numpy as np
import torch
from torch import Tensor

from common.assets.build.embedded import with_embedded_data
from common.balance import balance_ranks
from common.checkpoint import Checkpoints
from common.command_line import refuse_idle, typed_flags
from common.distributed import World, all_reduce, forward_context
from common.export import export_hugging_face
from common.files import DAMAGE, user_errors
from common.flags import (
    Amount,
    Count,
    Data,
    Machine,
    Natural,
    Rollout,
    Run,
    Share,
    check_shared,
    parse,
)
from common.hub import UNREADABLE, load_tokenizer, resolve_model
from common.job import Job
from common.logger import open_logger
from common.metrics import Means, explained_variance, rollout_means, rollout_metrics
from common.models import hidden_states, sleep_engine, sync_engine
from common.optimizer import lr_factor
from common.packing import MicroBatch, Minibatch, Packer, TokenIndex, prompts_of_all_ranks
from common.precision import GAP_LIMITS, checked_gap
from common.progress import Progress, say
from common.rehearsal import Rehearsal
from common.rewards.model import RewardModel, check_reward_model
from common.rollout.dumps import load_rollouts, replayed_micro_batch_tokens
from common.rollout.opening import (
    check_rollout,
    num_steps,
    open_engine,
    open_engine_group,
    open_prompts,
    open_reward_workers,
    open_tools,
    open_turns,
    print_plan,
)
from common.rollout.rollouts import Rollouts
from common.script import handle_signals, requested_exit_code, run
from common.steps import Stopwatch, UnscoredSteps, due, profiled, seed_step
from common.types import Episode
from common.vision import Vision, load_vision


@dataclass
class Args:
    """PPO's objective, its critic and their optimizers. Flags that scripts share are in
    common/flags.py."""

    gamma: Share = 1.0  # discount per token
    # GAE's lambda for the advantages; the critic's targets are the plain returns
    gae_lambda: Share = 1.0
    # mean of the loss: over tokens (dapo), over sequences (grpo), by a constant length (dr_grpo)
    reduction: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    clip_low: Amount = 0.2  # ratio is clipped below 1 - this
    clip_high: Amount = 0.2  # ratio is clipped above 1 + this (DAPO's clip-higher: 0.28)
    dual_clip: Amount = 3.0  # loss bound for negative advantages, as a ratio; 0 = off
    value_clip: Amount = 0.5  # values are clipped this far from the old ones; 0 = off
    minibatches: Count = 4  # optimizer steps per rollout and epoch
    epochs_per_step: Count = 1  # passes over a rollout
    entropy_coef: float = 0.0  # weight of an entropy bonus
    # for sampling with the engine's probabilities: weigh a token by trainer / engine, at most HIGH
    # (truncate: TIS), or 0 outside LOW HIGH (mask: IcePop, MIS); or drop responses (sequence)
    correction: Literal["none", "truncate", "mask", "sequence"] = "none"
    # LOW HIGH of --correction; truncate has no LOW: give 0
    correction_range: tuple[Amount, Amount] = (0.5, 2.0)
    # coefficient of the KL to the initial policy, in the reward (k1); 0 = off
    kl_reward_coef: Amount = 0.0
    kl_loss_coef: Amount = 0.0  # coefficient of the KL to the initial policy, in the loss; 0 = off
    kl_estimator: Literal["k2", "k3", "k3-is"] = "k3"  # of --kl-loss-coef; k3-is: times the ratio
    # last tokens of --max-response-tokens in which the score falls, by up to 1 (DAPO)
    overlong_buffer: Natural = 0
    mask_truncated: bool = False  # do not train on truncated responses
    # backbone of the critic, with the same tokenizer; default: --model
    critic_model: str | None = None
    reward_model: str | None = None  # transformers sequence classifier; adds to the rule's score
    reward_model_weight: float = 1.0  # reward: the rule's score + this * the model's
    learning_rate: Amount = 1e-6  # peak of the schedule
    critic_learning_rate: Amount = 1e-5  # peak of the critic's schedule
    critic_warmup_steps: Natural = 0  # first steps, in which the critic is trained alone
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # learning rate after warm-up
    # steps of linear warm-up; below 1: share of all steps (the policy's: after critic warm-up)
    warmup_steps: Amount = 0.0
    # learning rate that the decay reaches after the last step, as a share of the peak
    lr_floor: Share = 0.0
    weight_decay: Amount = 0.0  # AdamW, decoupled
    max_grad_norm: Amount = 1.0  # global L2 norm; 0 = no clipping

    data: Data = field(default_factory=Data)
    rollout: Rollout = field(default_factory=partial(Rollout, samples_per_prompt=1))
    machine: Machine = field(default_factory=Machine)
    run: Run = field(default_factory=Run)


# What --help shows; --help-all shows all flags.
FIRST_SCREEN = """
model train-data eval-data output-dir reward-function bad-rows
prompts-per-step max-prompt-tokens max-response-tokens temperature minibatches
learning-rate critic-learning-rate gae-lambda kl-reward-coef reward-model
total-steps total-epochs eval-every eval-rows eval-only save-every resume log
dtype micro-batch-tokens gradient-checkpointing engine-memory engine-parallel lora-rank
"""

# What runs without --model: a policy of 3.5 million parameters learns to search
# (README, "The demo").
DEMO = Args(
    minibatches=8,
    learning_rate=3e-5,
    critic_learning_rate=6e-4,
    critic_warmup_steps=16,
    gae_lambda=0.99,
    lr_schedule="linear",
    warmup_steps=5,
    rollout=Rollout(
        prompts_per_step=192, samples_per_prompt=1, max_prompt_tokens=64, max_response_tokens=256
    ),
    run=Run(model="tiny", total_steps=56),
)

# bound on log-ratios before `exp`: e^20 is far beyond every clip, and finite
MAX_LOGRATIO = 20.0


class Critic(torch.nn.Module):
    """A backbone of its own with a scalar head. The head is zero at first, and so are all
    values."""

    def __init__(self, model: torch.nn.Module, attention: str, vision: Vision | None = None):
        super().__init__()
        self.model = model.base_model
        self.attention = attention
        self.vision = vision
        # for their shape and dtype: they have no data if the model is on the meta device
        embeddings = self.model.get_input_embeddings().weight
        dtype = torch.promote_types(embeddings.dtype, torch.float32)
        self.head = torch.nn.Parameter(torch.zeros(embeddings.shape[1], dtype=dtype))

    def forward(self, batch: MicroBatch) -> Tensor:
        """Value [N], float32 (float64 for float64), of the state in which each trained token was
        chosen, from the hidden state at the token before it."""
        # a smaller backbone may lack the padding at the end of the policy's vocabulary
        num_embeddings = self.model.get_input_embeddings().weight.shape[0]
        batch = replace(batch, input_ids=batch.input_ids.clamp(max=num_embeddings - 1))
        hidden = hidden_states(self.model, batch, self.attention, self.vision)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return (hidden.to(dtype) * self.head.to(dtype)).sum(-1)


def shaped_scores(
    episodes: list[Episode], max_response_tokens: int, overlong_buffer: int
) -> Tensor:
    """Scores [E], with DAPO's soft overlong punishment (eq. 13): up to -1 over the last
    `overlong_buffer` tokens."""
    scores = torch.tensor([episode.score for episode in episodes], dtype=torch.float32)
    if not overlong_buffer:
        return scores
    lengths = torch.tensor([len(episode.response_ids) for episode in episodes])
    max_free_length = max_response_tokens - overlong_buffer
    return scores + ((max_free_length - lengths) / overlong_buffer).clamp(-1, 0)


def token_rewards(scores: Tensor, index: TokenIndex, episodes: list[Episode]) -> Tensor:
    """Rewards [T]: the score [E] at the last trained token of an episode; what an environment gave
    for a turn, at the turn's last token; 0 elsewhere."""
    rewards = torch.zeros(len(index))
    has_tokens = index.lengths > 0
    last_tokens = index.offsets[1:][has_tokens] - 1
    rewards[last_tokens] = scores[has_tokens].float()
    for i, episode in enumerate(episodes):
        if has_tokens[i]:
            for num_sampled, reward in episode.turn_rewards:
                rewards[index.offsets[i] + num_sampled - 1] += reward
    return rewards


def gae(rewards: Tensor, values: Tensor, index: TokenIndex, gamma: float, lam: float) -> Tensor:
    """Generalized advantage estimates (arXiv 1506.02438 eq. 16): rewards, values [T] -> [T].

    A_t = delta_t + gamma lam A_t+1, delta_t = r_t + gamma V_t+1 - V_t, over an episode's trained
    tokens; after them V = 0.
    """
    places = torch.arange(len(index)) - index.offsets[index.episode_of_token]
    longest = int(index.lengths.max()) if len(index) else 0
    # [E, L], zeros after the end of an episode
    reward_table = torch.zeros((len(index.lengths), longest), dtype=torch.float64)
    reward_table[index.episode_of_token, places] = rewards.double()
    value_table = torch.zeros_like(reward_table)
    value_table[index.episode_of_token, places] = values.double()
    advantages = torch.zeros_like(reward_table)
    next_advantage = next_value = torch.zeros(len(index.lengths), dtype=torch.float64)  # [E]
    for t in reversed(range(longest)):
        value = value_table[:, t]
        delta = reward_table[:, t] + gamma * next_value - value
        next_advantage = delta + gamma * lam * next_advantage
        next_value = value
        advantages[:, t] = next_advantage
    return advantages[index.episode_of_token, places].to(values.dtype)


def whitened(values: Tensor) -> Tensor:
    """values [T], shifted and scaled to mean 0 and unbiased variance 1 over the tokens of all ranks
    (all call it)."""
    exact = values.double()
    total, count = all_reduce([exact.sum().item(), len(exact)])
    centered = exact - total / max(count, 1)
    (squares,) = all_reduce([centered.square().sum().item()])
    deviation = math.sqrt(squares / max(count - 1, 1) + 1e-8)
    return (centered / deviation).to(values.dtype)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Loss of each value [N], and whether its clip is active [N].

    (V - R)^2 / 2; if clip > 0, the larger of that and (clip(V) - R)^2 / 2, where clip(V) is V
    limited to `clip` around its old value (from the code of arXiv 1707.06347).
    """
    error = (values - returns).square()
    if not clip:
        return 0.5 * error, torch.zeros_like(error, dtype=torch.bool)
    # V itself is clamped: old + (V - old).clamp(...) would round, and a clip that does nothing
    # would count as active
    clipped_values = values.clamp(old_values - clip, old_values + clip)
    clipped_error = (clipped_values - returns).square()
    return 0.5 * torch.maximum(error, clipped_error), clipped_error > error


def sequence_mean(values: Tensor, episode_of_token: Tensor) -> Tensor:
    """At each token, the mean of `values` [N] over the tokens of its episode. episode_of_token [N]
    int64 -> [N]."""
    # An episode's number is the index of its first token in sorted order: below N, with gaps.
    # `unique` would leave no gaps, but make the host wait for the GPU.
    number = torch.searchsorted(episode_of_token.sort().values, episode_of_token)
    sums = torch.zeros_like(values).index_add(0, number, values)
    counts = torch.zeros_like(values).index_add(0, number, torch.ones_like(values))
    return sums[number] / counts[number]


def clipped_loss(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> tuple[Tensor, Tensor]:
    """PPO's loss of each token [N], and whether a clip is active [N]. `ratio` [N]: the token's
    probability now, divided by that at the time of the rollout.

    max(-A r, -A clip(r, 1 - low, 1 + high)) (arXiv 1707.06347 eq. 7); if dual_clip > 0, at most
    -A * dual_clip where A < 0 (1912.09729 eq. 5).
    """
    loss = -advantages * ratio
    loss_if_clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped = loss_if_clipped > loss
    loss = torch.maximum(loss, loss_if_clipped)
    if dual_clip > 0:
        bound = -advantages * dual_clip
        clipped = clipped | ((advantages < 0) & (loss > bound))
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return loss, clipped


def engine_correction(
    correction: str,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    episode_of_token: Tensor,
    low: float,
    high: float,
) -> Tensor:
    """Weight of each token [N], without a gradient, that corrects for sampling with the engine's
    probabilities. w = trainer's / engine's probability.

    truncate: min(w, high) (TIS, fengyao.notion.site/off-policy-rl). mask: w if low <= w <= high,
    else 0 (IcePop, arXiv 2510.18855; MIS: low 0). sequence: 1 if low <= geometric mean of w over
    the sequence <= high, else 0. What is masked stays in the denominator.
    """
    logratio = (old_logprobs - rollout_logprobs).detach().clamp(-MAX_LOGRATIO, MAX_LOGRATIO)
    if correction == "truncate":
        return logratio.exp().clamp(max=high)
    if correction == "mask":
        weight = logratio.exp()
        return torch.where((weight >= low) & (weight <= high), weight, 0.0)
    weight = sequence_mean(logratio, episode_of_token).exp()
    return ((weight >= low) & (weight <= high)).to(weight.dtype)


def kl_estimate(
    logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, estimator: str
) -> Tensor:
    """Per-token estimate [N] of KL(policy || reference), d = log policy - log reference
    (joschu.net/blog/kl-approx).

    k1: d. k2: d^2 / 2. k3: exp(-d) - 1 + d. k3-is: k3 times the ratio policy / old, with
    gradients through both factors; also right off-policy (DeepSeek-V3.2, arXiv 2512.02556 sec.
    3.1).
    """
    d = (logprobs - ref_logprobs).clamp(-MAX_LOGRATIO, MAX_LOGRATIO)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d.square()
    k3 = (-d).exp() - 1 + d
    if estimator == "k3":
        return k3
    return k3 * (logprobs - old_logprobs).clamp(-MAX_LOGRATIO, MAX_LOGRATIO).exp()


def token_weights(
    reduction: str,
    lengths: Tensor,
    num_loss_tokens: float,
    num_sequences: float,
    max_response_tokens: int,
) -> Tensor:
    """Weight of each token in the loss [N], from the number of trained tokens of its episode,
    `lengths` [N].

    dapo: 1 / all tokens. grpo: 1 / (tokens of its sequence * sequences). dr_grpo: 1 / (a constant *
    sequences). The counts are those of the whole optimizer step on all ranks: the one denominator.
    """
    if reduction == "dapo":
        return torch.full_like(lengths, 1.0 / num_loss_tokens)
    if reduction == "grpo":
        return 1.0 / (lengths * num_sequences)
    return torch.full_like(lengths, 1.0 / (max_response_tokens * num_sequences))


@dataclass
class Tokens:
    """What is known of each trained token: T of them on this rank in a step, N in a micro-batch."""

    episode_of_token: Tensor  # [T] int64: index of its episode
    lengths: Tensor  # [T] float: trained tokens of its episode
    rollout_logprobs: Tensor  # [T] float32: the engine's
    # [T] float32: the trainer's, with the weights of the rollout; NaN until computed
    old_logprobs: Tensor
    ref_logprobs: Tensor  # [T] float32: the initial policy's; NaN without a KL
    advantages: Tensor  # [T] float32; NaN until computed
    values: Tensor  # [T] float32: the critic's, before the update; NaN until computed
    returns: Tensor  # [T] float32: its targets; NaN until computed

    @classmethod
    def of(cls, episodes: list[Episode], index: TokenIndex, device: torch.device) -> "Tokens":
        """The columns that the episodes have; the others are NaN until they are computed."""
        rollout_logprobs = []
        for episode in episodes:
            for logprob, is_trained in zip(episode.logprobs, episode.loss_mask):
                if is_trained:
                    rollout_logprobs.append(logprob)
        columns = {
            "episode_of_token": index.episode_of_token,
            "lengths": index.lengths[index.episode_of_token].float(),
            "rollout_logprobs": torch.tensor(rollout_logprobs),
        }
        for column in fields(cls):  # all other columns
            if column.name not in columns:
                columns[column.name] = torch.full((len(index),), math.nan)
        return cls(**{name: values.to(device) for name, values in columns.items()})

    def __getitem__(self, index: Tensor) -> "Tokens":
        return Tokens(**{name: values[index] for name, values in vars(self).items()})


def policy_loss(
    logprobs: Tensor, entropy: Tensor, tokens: Tokens, args: Args
) -> tuple[Tensor, Tensor]:
    """Loss of each token [N], to be averaged, and whether a clip is active [N]."""
    logratio = (logprobs - tokens.old_logprobs).clamp(-MAX_LOGRATIO, MAX_LOGRATIO)
    ratio = logratio.exp()
    loss, clipped = clipped_loss(
        ratio, tokens.advantages, args.clip_low, args.clip_high, args.dual_clip
    )
    if args.correction != "none":
        loss = loss * engine_correction(
            args.correction,
            tokens.old_logprobs,
            tokens.rollout_logprobs,
            tokens.episode_of_token,
            low=args.correction_range[0],
            high=args.correction_range[1],
        )
    if args.entropy_coef:
        loss = loss - args.entropy_coef * entropy
    if args.kl_loss_coef:
        kl = kl_estimate(logprobs, tokens.ref_logprobs, tokens.old_logprobs, args.kl_estimator)
        loss = loss + args.kl_loss_coef * kl
    return loss, clipped


def split_minibatches(
    episodes: list[Episode], prompts: list[int], count: int, seed: int, step: int
) -> list[list[int]]:
    """For each minibatch, the indices of its episodes.

    The sorted `prompts` of all ranks are rotated by a seeded offset and cut into `count` parts.
    So all ranks agree on the split, and which prompts come first changes from step to step.
    """
    generator = np.random.Generator(np.random.PCG64([seed, step]))
    offset = generator.integers(max(1, len(prompts)))
    minibatch_of: dict[int, int] = {}
    for position, prompt in enumerate(np.roll(sorted(prompts), offset).tolist()):
        minibatch_of[prompt] = position * count // len(prompts)
    minibatches: list[list[int]] = [[] for _ in range(count)]
    for i, episode in enumerate(episodes):
        minibatches[minibatch_of[episode.prompt_index]].append(i)
    return minibatches


def backward(
    policy: torch.nn.Module,
    minibatch: Minibatch,
    tokens: Tokens,
    args: Args,
    world: World,
    *,
    store_old_logprobs: bool,
    scale: float = 1.0,
) -> Means:
    """Accumulate the gradient of one optimizer step, times `scale`. Returns the step's policy/*
    metrics.

    store_old_logprobs: the weights are still those of the rollout, so the log-probs of this forward
    are the old ones: they are written to `tokens.old_logprobs`, and the ratio is exactly 1.
    """
    means = Means()
    total_loss = torch.zeros((), device=world.device)
    for i, batch in enumerate(Progress("micro-batch", minibatch.micro_batches)):
        batch = batch.to(world.device)
        with forward_context(policy, last=i == len(minibatch.micro_batches) - 1):
            logprobs, entropy = policy(batch, args.rollout.temperature)  # [N], [N]
            if store_old_logprobs:
                tokens.old_logprobs[batch.token_index] = logprobs.detach()
            mb_tokens = tokens[batch.token_index]
            loss, clipped = policy_loss(logprobs, entropy, mb_tokens, args)  # [N], [N]
            weights = token_weights(
                args.reduction,
                mb_tokens.lengths,
                minibatch.num_tokens,
                minibatch.num_sequences,
                args.rollout.max_response_tokens,
            )
            # FSDP2 and DDP average gradients over ranks, but the denominator is global: hence
            # world.size. Means average "policy/loss" over ranks in the same way.
            batch_loss = (loss * weights).sum() * world.size
            (batch_loss * scale).backward()
        total_loss += batch_loss.detach()
        logratio = (logprobs.detach() - mb_tokens.old_logprobs).clamp(-MAX_LOGRATIO, MAX_LOGRATIO)
        means.add("policy/entropy", entropy.sum(), count=len(entropy))
        means.add("policy/clip_fraction", clipped.sum(), count=len(clipped))
        # k3 estimate of KL(rollout's policy || this policy)
        k3 = logratio.exp() - 1 - logratio
        means.add("policy/approx_kl", k3.sum(), count=len(logratio))
    means.add("policy/loss", total_loss)
    return means


def critic_backward(
    critic: torch.nn.Module,
    minibatch: Minibatch,
    tokens: Tokens,
    args: Args,
    world: World,
    *,
    scale: float = 1.0,
) -> Means:
    """Accumulate the critic's gradient of one optimizer step, times `scale`. Returns the step's
    value/* metrics."""
    means = Means()
    total_loss = torch.zeros((), device=world.device)
    for i, batch in enumerate(Progress("micro-batch", minibatch.micro_batches)):
        batch = batch.to(world.device)
        with forward_context(critic, last=i == len(minibatch.micro_batches) - 1):
            mb_tokens = tokens[batch.token_index]
            values = critic(batch)  # [N]
            # loss [N], clipped [N]
            loss, clipped = value_loss(values, mb_tokens.values, mb_tokens.returns, args.value_clip)
            weights = token_weights(
                args.reduction,
                mb_tokens.lengths,
                minibatch.num_tokens,
                minibatch.num_sequences,
                args.rollout.max_response_tokens,
            )
            batch_loss = (loss * weights).sum() * world.size
            (batch_loss * scale).backward()
        total_loss += batch_loss.detach()
        means.add("value/clip_fraction", clipped.sum(), count=len(clipped))
    means.add("value/loss", total_loss)
    return means


def returns_and_advantages(
    rewards: Tensor, values: Tensor, index: TokenIndex, args: Args
) -> tuple[Tensor, Tensor]:
    """The critic's targets [T] and the policy's whitened advantages [T]. All ranks call it.

    With lambda 1 the values cancel out of values + advantages, and discounted returns are left.
    """
    returns = values + gae(rewards, values, index, args.gamma, 1.0)
    advantages = gae(rewards, values, index, args.gamma, args.gae_lambda)
    return returns, whitened(advantages)


def has_kl(args: Args) -> bool:
    return args.kl_reward_coef > 0 or args.kl_loss_coef > 0


def check_args(args: Args) -> None:
    """Refuse what cannot work, or has no effect, before anything is loaded."""
    check_shared(args.data, args.run, args.rollout)
    if args.minibatches > args.rollout.prompts_per_step:
        raise SystemExit(
            f"--minibatches {args.minibatches} of --prompts-per-step "
            f"{args.rollout.prompts_per_step}: a minibatch needs a prompt (groups stay together)"
        )
    if 0 < args.dual_clip <= 1:
        raise SystemExit(
            f"--dual-clip {args.dual_clip}: a bound on the ratio must be above 1 (0 = off)"
        )
    low, high = args.correction_range
    if high <= low:
        raise SystemExit(
            f"--correction-range {low:g} {high:g}: the second number must be above the first"
        )
    if args.correction == "truncate" and low > 0 and "--correction-range" in typed_flags():
        raise SystemExit(
            f"--correction-range {low:g} {high:g}: truncate has no lower bound, give 0 {high:g}"
        )
    if args.overlong_buffer >= args.rollout.max_response_tokens:
        raise SystemExit("--overlong-buffer must be below --max-response-tokens")
    check_critic_warmup(args, args.run.total_steps)
    off_policy = args.minibatches * args.epochs_per_step > 1
    more_steps = "several --minibatches or --epochs-per-step: on-policy the ratio is 1"
    training = not args.rollout.eval_only
    uses = {  # flag: (whether it has an effect, what it needs for one)
        "clip_low": (off_policy, more_steps),
        "clip_high": (off_policy, more_steps),
        "dual_clip": (off_policy, more_steps),
        "value_clip": (off_policy, "several --minibatches or --epochs-per-step"),
        "correction_range": (args.correction != "none", "a --correction"),
        "kl_estimator": (args.kl_loss_coef > 0, "a --kl-loss-coef"),
        "reward_model": (training, "training: evaluation takes the rule's score"),
        "reward_model_weight": (bool(args.reward_model), "--reward-model"),
        "critic_model": (training, "training"),
        "lr_floor": (args.lr_schedule != "constant", "--lr-schedule linear or cosine"),
    }
    refuse_idle(args, uses)
    if "reference" in args.machine.offload and not has_kl(args):
        raise SystemExit(
            "--offload reference has no effect: needs a --kl-reward-coef or --kl-loss-coef"
        )


def check_critic_warmup(args: Args, total_steps: int | None) -> None:
    """SystemExit if the critic's warm-up takes all steps. total_steps: None if not known yet."""
    if total_steps is None or args.rollout.eval_only:
        return
    if args.critic_warmup_steps >= total_steps:
        raise SystemExit(
            f"--critic-warmup-steps {args.critic_warmup_steps} of {total_steps}: none is left for "
            "the policy"
        )


def resolve_critic(job: Job, name: str | None) -> str:
    """Folder of the critic's backbone, the policy's if no other is named. SystemExit if it does
    not read what the policy reads."""
    if name is None:
        return job.model_folder
    folder = resolve_model(name, "--critic-model")
    trust_remote_code = job.machine.trust_remote_code
    with user_errors(f"--critic-model {name}: {UNREADABLE}", DAMAGE):
        tokenizer = load_tokenizer(folder, trust_remote_code)
        vision = load_vision(folder, job.limits, trust_remote_code)
    if tokenizer.get_vocab() != job.tokenizer.get_vocab():
        raise SystemExit(f"--critic-model {name}: its tokenizer is not the policy's")
    if (vision is None) != (job.vision is None):
        raise SystemExit(f"--critic-model {name}: only one of policy and critic reads pictures")
    if vision and vision.model_type != job.vision.model_type:
        raise SystemExit(
            f"--critic-model {name}: {vision.model_type} reads pictures in another way than the "
            f"policy, {job.vision.model_type}"
        )
    if folder != job.model_folder:
        job.check_weights(folder, "--critic-model", headless=True)
    return folder


def resolve_reward_model(args: Args) -> str | None:
    """Folder of the reward model; None without one, or if its scores are replayed."""
    if args.reward_model is None or args.rollout.replay:
        return None
    folder = resolve_model(args.reward_model, "--reward-model")
    check_reward_model(folder)
    return folder


def main(args: Args, demo: bool = False) -> None:
    check_args(args)
    training = not args.rollout.eval_only
    # a user's mistakes end the run before weights are read
    job = Job(
        script=Path(__file__).stem,
        data=args.data,
        machine=args.machine,
        run=args.run,
        demo=demo,
        training=training,
        max_model_len=args.rollout.max_model_len,
    )
    world, device = job.world, job.world.device
    needs_reference = has_kl(args) and training
    check_rollout(job, args.rollout)
    job.check_weights(job.model_folder)  # before the engine fails on missing ones
    critic_folder = resolve_critic(job, args.critic_model)
    reward_folder = resolve_reward_model(args)

    # What samples and scores. The engine comes before the trainer: while it loads, it needs the
    # memory that the trainer would hold.
    data_folder = job.output_dir / "data"
    data = with_embedded_data(
        args.data, args.run.model, data_folder, world, eval_only=args.rollout.eval_only
    )
    engine_group = open_engine_group(args.rollout, args.run)
    tool_pool = open_tools(args.rollout, engine_group)
    train_data, eval_data = open_prompts(job, data, args.rollout, tool_pool)
    turns = open_turns(job, args.rollout, tool_pool)
    reward_workers = open_reward_workers(args.rollout, [train_data, eval_data], turns)
    num_prompts = args.rollout.prompts_per_step
    total_steps = num_steps(args.run, train_data, num_prompts)
    job.leave_if_finished(total_steps)
    check_critic_warmup(args, total_steps)  # again: the steps of --total-epochs are known now
    loader = job.open_loader(len(train_data), train_data.fingerprint) if train_data else None
    job.plan_memory(
        args.rollout,
        trained=[job.model_folder, critic_folder],
        frozen=[job.model_folder] if needs_reference else [],
        reward_model=reward_folder,
        replayed_tokens=replayed_micro_batch_tokens(args.rollout.replay),
    )
    engine = open_engine(job, args.rollout)
    reward_model = None
    if reward_folder:
        reward_model = RewardModel(reward_folder, job.compute_dtype, device)
    rollouts = Rollouts(
        world=world,
        tokenizer=job.tokenizer,
        flags=args.rollout,
        seed=args.run.seed,
        output_dir=job.output_dir,
        train_data=train_data,
        loader=loader,
        eval_data=eval_data,
        eval_rows=args.run.eval_rows,
        engine=engine,
        turns=turns,
        reward_workers=reward_workers,
        reward_model=reward_model,
        engine_group=engine_group,
    )

    # what is trained
    policy = job.load_policy()
    reference = job.load_reference(policy) if needs_reference else None
    optimizer = job.adamw(policy, args.weight_decay, args.max_grad_norm)
    optimizers = {"policy": optimizer}
    if training:
        critic = job.load_critic(critic_folder, Critic)
        critic_optimizer = job.adamw(critic, args.weight_decay, args.max_grad_norm, prefix="value")
        optimizers["critic"] = critic_optimizer
    packer = Packer(job.attention, job.micro_batch_tokens, job.output_dir, world, job.vision)
    checkpoints = Checkpoints(
        job.output_dir,
        world,
        optimizers=optimizers,
        loader=loader,
        save_every=args.run.save_every,
        keep=args.run.keep_checkpoints,
        identity=job.identity | {"end_token": job.tokenizer.eos_token},
        micro_batch_tokens=job.micro_batch_tokens,
    )
    start = checkpoints.resume(job.checkpoint, weights_only=args.rollout.eval_only)
    logger = open_logger(job, args, total_steps, checkpoints)

    if args.rollout.eval_only:
        rollouts.evaluate_only(policy, start, logger)
        return
    # do the largest micro-batches fit?
    rehearsal = Rehearsal(job, packer, args.rollout, [optimizer, critic_optimizer])
    while rehearsal.is_due:
        with rehearsal.attempt() as minibatch:
            # the rehearsal has packed episodes of the greatest length
            tokens = Tokens.of(packer.episodes, packer.index, device)
            critic_backward(critic, minibatch, tokens, args, world)
            # as in a step, its gradients are gone before the policy's backward
            critic_optimizer.optimizer.zero_grad()
            backward(policy, minibatch, tokens, args, world, store_old_logprobs=True)
    handle_signals()  # from here on a signal, or Ctrl-C, ends the run after its step, and saves
    updates = args.minibatches * args.epochs_per_step
    print_plan(args.rollout, len(train_data), num_prompts, total_steps, updates)
    if start == 0 and args.run.eval_before and rollouts.can_evaluate:
        logger.log(0, rollouts.evaluate(policy, 0))
    max_gap = args.rollout.max_logprob_gap or GAP_LIMITS[job.compute_dtype]
    unscored = UnscoredSteps()
    end = start + 1 if args.rollout.replay else total_steps
    # `step` counts from 0 and names the weights that sample; logs and checkpoints count from 1
    for step in profiled(range(start, end), args.run.profile_steps, job.output_dir, world):
        watch = Stopwatch()
        seed_step(args.run.seed, step, world.rank)
        # sampled: all episodes of this step; episodes: those of them to train on
        if args.rollout.replay:
            sampled, episodes = load_rollouts(
                args.rollout.replay, step + 1, world, job.limits, args.reward_model
            )
        else:
            # 1. data
            prompts = rollouts.draw(num_prompts)

            # 2. rollout
            with watch("sync"):
                sync_engine(engine, policy, step)
            with watch("rollout"):
                sampled = rollouts.sample(prompts, step, watch)

            # 3. rewards
            with watch("reward"):
                rollouts.score(sampled, prompts)
            sleep_engine(engine, policy)
            # those whose scoring has not failed
            episodes = [episode for episode in sampled if math.isfinite(episode.score)]
        if args.mask_truncated:
            episodes = [e.untrained() if e.truncated else e for e in episodes]

        # 4. update
        with watch("wait"):  # for ranks that still sample or score
            trained_prompts = prompts_of_all_ranks(episodes)
        split = split_minibatches(episodes, trained_prompts, args.minibatches, args.run.seed, step)
        sampled, episodes, split = balance_ranks(
            sampled, episodes, split, world, packer.layout.share_prompts
        )
        index = TokenIndex(episodes)
        tokens = Tokens.of(episodes, index, device)
        minibatches = packer.minibatches(episodes, index, split)
        is_critic_warmup = step < args.critic_warmup_steps  # the critic alone is trained
        with watch("logprob"):
            # The forward of the first update gives the old log-probs of its own minibatch: too
            # late for a KL in the reward, and a warm-up has no update of the policy.
            minibatches_to_fill = minibatches[1:]
            if args.kl_reward_coef or is_critic_warmup:
                minibatches_to_fill = minibatches
            packer.fill(tokens.old_logprobs, policy, minibatches_to_fill, args.rollout.temperature)
            if reference:
                reference.to(device)
                packer.fill(tokens.ref_logprobs, reference, minibatches, args.rollout.temperature)
                if "reference" in args.machine.offload:
                    reference.to("cpu")
            packer.fill(tokens.values, critic, minibatches)

        # what each token is worth: its reward, return and advantage
        max_response_tokens = args.rollout.max_response_tokens
        scores = shaped_scores(episodes, max_response_tokens, args.overlong_buffer)  # [E]
        scores += args.reward_model_weight * torch.tensor([e.model_reward or 0.0 for e in episodes])
        rewards = token_rewards(scores, index, episodes)  # [T]
        if args.kl_reward_coef:
            kl = kl_estimate(
                tokens.old_logprobs, tokens.ref_logprobs, tokens.old_logprobs, estimator="k1"
            ).cpu()
            rewards = rewards - args.kl_reward_coef * kl  # [T]
        values = tokens.values.cpu()
        returns, advantages = returns_and_advantages(rewards, values, index, args)  # [T], [T]
        tokens.returns = returns.to(device)
        tokens.advantages = advantages.to(device)
        if due(step + 1, args.rollout.dump_rollouts_every):
            mean_advantages = index.sums(advantages) / index.lengths.clamp(min=1)  # [E]
            rollouts.dump(step + 1, sampled, episodes, mean_advantages.tolist(), packer.budget)

        lr_factor_at = partial(
            lr_factor,
            warmup_steps=args.warmup_steps,
            schedule=args.lr_schedule,
            floor=args.lr_floor,
        )
        critic_lr = args.critic_learning_rate * lr_factor_at(step, total_steps)
        # the policy's schedule begins after the critic's warm-up; at negative steps its factor is 0
        policy_step = step - args.critic_warmup_steps
        num_policy_steps = total_steps - args.critic_warmup_steps
        lr = args.learning_rate * lr_factor_at(policy_step, num_policy_steps)
        means = Means()
        with watch("update"):
            epochs = range(args.epochs_per_step)
            for _, minibatch in Progress("critic update", product(epochs, minibatches)):
                update_means = packer.attempt(
                    critic_backward,
                    critic,
                    minibatch,
                    tokens,
                    args,
                    world,
                    scale=critic_optimizer.scale,
                )
                means.merge(update_means)
                means.merge(critic_optimizer.step(critic_lr))
            if is_critic_warmup and minibatches:
                gap = checked_gap(tokens.rollout_logprobs, tokens.old_logprobs, max_gap, step + 1)
                means.add("policy/rollout_logprob_gap", gap)
            policy_epochs = [] if is_critic_warmup else epochs
            for epoch, minibatch in Progress("update", product(policy_epochs, minibatches)):
                # the weights are still the engine's
                on_policy = epoch == 0 and minibatch is minibatches[0]
                update_means = packer.attempt(
                    backward,
                    policy,
                    minibatch,
                    tokens,
                    args,
                    world,
                    store_old_logprobs=on_policy,
                    scale=optimizer.scale,
                )
                means.merge(update_means)
                if on_policy:  # now all old log-probs are in
                    gap = checked_gap(
                        tokens.rollout_logprobs, tokens.old_logprobs, max_gap, step + 1
                    )
                    means.add("policy/rollout_logprob_gap", gap)
                means.merge(optimizer.step(lr))

        # 5. log
        means.merge(rollout_means(sampled, watch.seconds, with_tools=turns is not None))
        if reference:
            kl = kl_estimate(
                tokens.old_logprobs, tokens.ref_logprobs, tokens.old_logprobs, estimator="k3"
            )
            means.add("policy/kl_to_ref", kl.sum(), count=len(kl))
        means.add("value/mean", tokens.values.double().sum(), count=len(tokens.values))
        means.add("value/return_mean", returns.double().sum(), count=len(returns))
        metrics = rollout_metrics(means.reduce()) | {
            "optim/lr": lr,
            "optim/loss_scale": optimizer.scale,
            "value/lr": critic_lr,
            "value/loss_scale": critic_optimizer.scale,
            "value/explained_variance": explained_variance(tokens.values, tokens.returns),
            "data/epoch": loader.epoch,
        }
        unscored.count(step + 1, metrics)

        # 6. eval, checkpoint
        is_last = step + 1 == end
        if rollouts.can_evaluate and (is_last or due(step + 1, args.run.eval_every)):
            with watch("eval"):
                metrics |= rollouts.evaluate(policy, step + 1)
        metrics |= watch.metrics(device)
        # read after the evaluation: a signal may have come during it
        exit_code = requested_exit_code()
        # The log is written before the checkpoint, so no checkpoint is ahead of the log.
        logger.log(step + 1, metrics)
        accuracy = metrics.get("eval/accuracy")
        run_ends = is_last or exit_code > 0 or unscored.too_many
        must_save = run_ends or checkpoints.due(step + 1, accuracy)
        if must_save and not args.rollout.replay:
            checkpoints.save(step + 1, accuracy)
        if unscored.too_many:
            unscored.end_run(step + 1)
        if exit_code and not is_last:
            logger.event({"event": "stopped", "step": step + 1})
            raise SystemExit(exit_code)  # 130 after Ctrl-C, 143 after any other signal

    folder = job.output_dir / "model"
    export_hugging_face(policy, job.tokenizer, folder, world, job.compute_dtype, job.run.model)
    say(f"done: {folder} loads in transformers and vLLM; curves.png is beside it")


if __name__ == "__main__":
    run(main, *parse(Args, DEMO, __doc__, FIRST_SCREEN))

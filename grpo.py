"""Group relative policy optimization (GRPO) for language models.

G answers to each prompt are sampled and scored, and compared with each other: an answer that is
better than the mean of its group becomes more likely. No critic. Papers: DeepSeekMath (arXiv
2402.03300), DAPO (2503.14476), Dr. GRPO (2503.20783), dual clip (1912.09729).

Where this differs from the papers and from most implementations:

1. One denominator: the loss is divided by a count over the whole optimizer step, all ranks and
   micro-batches, so the gradient does not depend on how a batch is split (DAPO's token mean is the
   default; GRPO's and Dr. GRPO's by flag).
2. Strictly on-policy steps (one minibatch, one epoch) spend no pass on old log-probs: they are the
   new ones, detached, and the ratio is exactly 1. With several minibatches only those after the
   first need the pass. With a KL in the reward (--kl-reward-coef) all do.
3. Rollouts come from a vLLM engine inside the ranks. A sync fails if a weight is missing, unknown
   or sent twice. The gap between the engine's and the trainer's log-probs is measured on every
   step, and stops the run when it is too large.
4. In a micro-batch the prompt of a group is computed once, followed by its responses, unless
   --attention is flash or rows (common/packing.py).

    torchrun --nproc_per_node 2 grpo.py    # embedded demo, minutes on a CPU
    torchrun --nproc_per_node 4 grpo.py --model Qwen/Qwen2.5-1.5B-Instruct \\
        --train-data data/gsm8k/train.parquet --samples-per-prompt 8

Names: G samples of a prompt, E episodes on this rank, T their trained tokens, N those of a
micro-batch. Everything per token is flat ([T] or [N]): there is no padding to mask.

Its mathematics is tested in tests/math/test_grpo_math.py and tests/math/test_objectives.py.
"""

import math
from dataclasses import dataclass, field, fields, replace
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
from common.command_line import flag, refuse_idle, typed_flags
from common.distributed import World, all_reduce, forward_context, gather_objects
from common.export import export_hugging_face
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
from common.job import Job
from common.logger import open_logger
from common.metrics import Means, rollout_means, rollout_metrics
from common.models import sleep_engine, sync_engine
from common.optimizer import lr_factor
from common.packing import Minibatch, Packer, TokenIndex, prompts_of_all_ranks
from common.precision import GAP_LIMITS, checked_gap
from common.progress import Progress, say
from common.rehearsal import Rehearsal
from common.rewards import is_correct
from common.rollout.dumps import load_rollouts, replayed_micro_batch_tokens
from common.rollout.opening import (
    check_rollout,
    has_tools,
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
from common.types import Episode, by_prompt


@dataclass
class Args:
    """GRPO's objective and its optimizer. Flags that scripts share are in common/flags.py."""

    # what is clipped: a token's ratio, its sequence's, its weight
    objective: Literal["ppo", "gspo", "cispo"] = "ppo"
    # baseline and scale of scores
    advantage: Literal["group-std", "group-mean", "rloo", "batch-std"] = "group-std"
    # mean of the loss: tokens (dapo), sequences (grpo, default of gspo), constant length (dr_grpo)
    reduction: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    clip_low: Amount = 0.2  # ratio is clipped below 1 - this; default of gspo: 3e-4
    # ratio is clipped above 1 + this (DAPO's clip-higher: 0.28); default of gspo: 4e-4
    clip_high: Amount = 0.2
    dual_clip: Amount = 3.0  # loss bound for negative advantages, as a ratio; 0 = off
    minibatches: Count = 1  # optimizer steps per rollout and epoch
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
    # replace groups of equal scores: sample up to this many times the prompts; 0: keep them
    dynamic_sampling: Natural = 0
    # draw this many times the prompts, train on the groups whose scores deviate most
    oversample: Amount = 1.0
    # added to the score of a right answer, for each tool call that did something
    tool_bonus: Amount = 0.0
    learning_rate: Amount = 1e-6  # peak of the schedule
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # learning rate after warm-up
    warmup_steps: Amount = 0.0  # steps of linear warm-up; below 1: share of all steps
    # learning rate that the decay reaches after the last step, as a share of the peak
    lr_floor: Share = 0.0
    weight_decay: Amount = 0.0  # AdamW, decoupled
    max_grad_norm: Amount = 1.0  # global L2 norm; 0 = no clipping

    data: Data = field(default_factory=Data)
    rollout: Rollout = field(default_factory=Rollout)
    machine: Machine = field(default_factory=Machine)
    run: Run = field(default_factory=Run)


# What --help shows; --help-all shows all flags.
FIRST_SCREEN = """
model train-data eval-data output-dir reward-function tools bad-rows
prompts-per-step samples-per-prompt max-prompt-tokens max-response-tokens temperature minibatches
learning-rate advantage kl-loss-coef
total-steps total-epochs eval-every eval-rows eval-only save-every resume log
dtype micro-batch-tokens gradient-checkpointing engine-memory engine-parallel lora-rank
"""

# What runs without --model: a policy of 3.5 million parameters learns to search
# (README, "The demo").
DEMO = Args(
    learning_rate=8e-5,
    lr_schedule="linear",
    lr_floor=0.1,
    warmup_steps=5,
    rollout=Rollout(
        prompts_per_step=32, samples_per_prompt=8, max_prompt_tokens=64, max_response_tokens=256
    ),
    machine=Machine(micro_batch_tokens=4096),
    run=Run(model="tiny", total_steps=40, eval_every=10),
)

# bound on log-ratios before `exp`: e^20 is far beyond every clip, and finite
MAX_LOGRATIO = 20.0

# GSPO's ratio is a mean over the sequence: it stays so near to 1 that PPO's bounds would never clip
# it (arXiv 2507.18071 sec. 5.1). Its loss is a mean over sequences.
GSPO_DEFAULTS = {"clip_low": 3e-4, "clip_high": 4e-4, "reduction": "grpo"}


def with_gspo_defaults(args: Args) -> Args:
    """Put GSPO's bounds and reduction in place of those that the command line does not set."""
    if args.objective != "gspo":
        return args
    defaults = {}
    for name, value in GSPO_DEFAULTS.items():
        if flag(name) not in typed_flags():
            defaults[name] = value
    return replace(args, **defaults)


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


def group_advantages(scores: Tensor, groups: Tensor, advantage: str) -> Tensor:
    """Score minus a baseline from its group, scaled. scores [E] float, groups [E] int64 -> [E]. All
    ranks call it.

    group-std: (r - mean) / std, unbiased (DeepSeekMath §4.1.2). group-mean: r - mean (Dr. GRPO).
    rloo: r - mean of the others (arXiv 2402.14740). batch-std: r - mean, divided by its std over
    the groups given on all ranks (REINFORCE++-baseline, 2501.03262). A group of one, or one whose
    scores are all equal, has advantage 0: there is nothing to compare.
    """
    # float64: in float32 the mean of eight 0.1 is not 0.1, and a division magnifies the difference
    exact = scores.double()
    advantages = torch.zeros_like(exact)
    for group in groups.unique():
        members = groups == group
        size = int(members.sum())
        centered = exact[members] - exact[members].mean()
        if advantage == "group-std":
            variance = centered.square().sum() / max(size - 1, 1)
            centered = centered / (variance.sqrt() + 1e-6)
        elif advantage == "rloo":
            centered = centered * size / max(size - 1, 1)
        advantages[members] = centered
    if advantage == "batch-std":
        squares, count = all_reduce([advantages.square().sum().item(), len(advantages)])
        advantages /= math.sqrt(squares / max(count - 1, 1)) + 1e-6
    return advantages.to(scores.dtype)


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


def sequence_ratio(logprobs: Tensor, logratio: Tensor, episode_of_token: Tensor) -> Tensor:
    """GSPO's ratio of each token [N]: the geometric mean of the ratios in its sequence, with the
    gradient of this token alone (arXiv 2507.18071 eq. 14)."""
    mean_logratio = sequence_mean(logratio, episode_of_token).detach()
    return (logprobs - logprobs.detach() + mean_logratio).exp()


def cispo_loss(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """CISPO's loss of each token [N], -A clip(r) log p, and whether the clip is active [N]. The
    clipped ratio is a constant weight: no token loses its gradient (arXiv 2506.13585 eq. 4)."""
    weight = ratio.clamp(1 - clip_low, 1 + clip_high).detach()
    return -advantages * weight * logprobs, weight != ratio


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
    if args.objective == "gspo":
        ratio = sequence_ratio(logprobs, logratio, tokens.episode_of_token)
        loss, clipped = clipped_loss(ratio, tokens.advantages, args.clip_low, args.clip_high)
    elif args.objective == "cispo":
        loss, clipped = cispo_loss(
            logprobs, ratio, tokens.advantages, args.clip_low, args.clip_high
        )
    else:
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


def collect(
    rollouts: Rollouts, args: Args, num_prompts: int, step: int, watch: Stopwatch, first: int = 0
) -> list[Episode]:
    """This rank's episodes of the next prompts, sampled and scored. first: place of the first of
    these prompts in the step."""
    # 1. data
    prompts = rollouts.draw(num_prompts, first)

    # 2. rollout
    with watch("rollout"):
        episodes = rollouts.sample(prompts, step, watch)

    # 3. rewards
    with watch("reward"):
        rollouts.score(episodes, prompts)
    for episode in episodes:  # an environment's rewards for single turns
        episode.score += math.fsum(reward for _, reward in episode.turn_rewards)
    if args.tool_bonus:
        add_tool_bonus(episodes, args.tool_bonus)
    return episodes


def add_tool_bonus(episodes: list[Episode], bonus: float) -> None:
    """A right answer earns `bonus` for each call before it that ended without an error (arXiv
    2602.20739), unless the tool's info has a false "acted": the call did nothing."""
    for episode in episodes:
        answer_turn = episode.turns - 1
        num_useful = 0
        for call in episode.calls:
            acted = call["info"].get("acted", True)
            if call["turn"] < answer_turn and not call["error"] and acted:
                num_useful += 1
        tool_bonus = bonus * num_useful if is_correct(episode.rewards) else 0.0
        episode.terms["tool_bonus"] = tool_bonus
        episode.score += tool_bonus


def score_deviations(episodes: list[Episode]) -> dict[int, float]:
    """{prompt: standard deviation of its group's scores, 0 for equal ones}, over the episodes of
    all ranks. A group of which no sample could be scored is left out. All ranks call it."""
    deviations: dict[int, float] = {}
    for prompt, group in by_prompt(episodes).items():
        # the score is NaN where scoring has failed
        scores = torch.tensor([e.score for e in group if math.isfinite(e.score)])
        if len(scores) > 1:
            # unbiased; rounded, so that errors in the last digits do not rank groups
            deviations[prompt] = round(scores.double().std().item(), 9)
        elif len(scores) == 1:
            deviations[prompt] = 0.0
    deviations_of_all: dict[int, float] = {}
    for deviations_of_rank in gather_objects(deviations):
        deviations_of_all |= deviations_of_rank
    return deviations_of_all


def unequal_prompts(deviations: dict[int, float], count: int, widest_first: bool) -> set[int]:
    """The first `count` prompts whose scores are unequal; with `widest_first` those whose scores
    deviate most, and of equal deviations the first."""
    unequal = sorted(prompt for prompt, deviation in deviations.items() if deviation > 0)
    if widest_first:
        unequal.sort(key=lambda prompt: -deviations[prompt])
    return set(unequal[:count])


class GroupYield:
    """The share of prompts whose groups have unequal scores, over about the last `window` prompts
    that were sampled."""

    def __init__(self, window: int = 256):
        self.window = window
        # numbers of prompts, the older ones decayed; saved in checkpoints
        self.counts = {"sampled": 0.0, "unequal": 0.0}

    @property
    def share(self) -> float:
        """With one unequal group added: 1 at the start, and never 0."""
        return (self.counts["unequal"] + 1) / (self.counts["sampled"] + 1)

    def add(self, sampled: int, unequal: int) -> None:
        decay = max(0.0, 1 - sampled / self.window)
        self.counts["sampled"] = decay * self.counts["sampled"] + sampled
        self.counts["unequal"] = decay * self.counts["unequal"] + unequal

    def num_prompts(self, num_groups: int) -> int:
        """Prompts to sample for `num_groups` groups of unequal scores, a standard deviation more
        than on average: another round takes as long as its longest answer."""
        margin = math.sqrt(num_groups * (1 - self.share))
        return math.ceil((num_groups + margin) / self.share)


def collect_groups(
    rollouts: Rollouts, args: Args, group_yield: GroupYield, step: int, watch: Stopwatch
) -> tuple[list[Episode], list[Episode]]:
    """The episodes of a step: all that were sampled, and those to train on.

    With --dynamic-sampling, groups of equal scores are replaced by groups of further prompts. Each
    round samples as many prompts as `group_yield` expects to suffice; if they do not, another round
    follows. The step trains on the first prompts with unequal scores; with --oversample, on those
    whose scores deviate most. If groups are still missing after the last round, it trains on those
    it has, or on none: the policy may have solved the task.
    """
    num_groups = args.rollout.prompts_per_step  # to train on, over all ranks
    if not is_selective(args):
        sampled = collect(rollouts, args, num_groups, step, watch)
        return sampled, [episode for episode in sampled if math.isfinite(episode.score)]
    max_rounds = max(args.dynamic_sampling, 1)
    max_prompts = max_rounds * num_oversampled(num_groups, args.oversample)  # over all rounds
    num_missing = num_groups
    num_drawn = 0
    sampled: list[Episode] = []
    deviations: dict[int, float] = {}
    chosen_prompts: set[int] = set()  # to train on
    for _ in range(max_rounds):
        num_prompts = num_oversampled(num_missing, args.oversample)
        if args.dynamic_sampling:
            num_prompts = max(num_prompts, group_yield.num_prompts(num_missing))
        num_prompts = min(num_prompts, max_prompts - num_drawn)
        new_episodes = collect(rollouts, args, num_prompts, step, watch, first=num_drawn)
        sampled += new_episodes
        num_drawn += num_prompts
        with watch("wait"):
            new_deviations = score_deviations(new_episodes)
        num_unequal = sum(deviation > 0 for deviation in new_deviations.values())
        group_yield.add(len(new_deviations), num_unequal)
        deviations |= new_deviations
        chosen_prompts = unequal_prompts(deviations, num_groups, widest_first=args.oversample > 1)
        num_missing = num_groups - len(chosen_prompts)
        if num_missing == 0 or num_drawn == max_prompts:
            break
    if num_missing:
        say(
            f"step {step + 1} trains on {num_groups - num_missing} groups, not on {num_groups}: "
            f"no more of the {num_drawn} drawn have unequal scores"
        )
    trained = []
    for episode in sampled:
        if episode.prompt_index in chosen_prompts and math.isfinite(episode.score):
            trained.append(episode)
    return sampled, trained


def num_oversampled(num_prompts: int, factor: float) -> int:
    """Prompts to draw for `num_prompts`; rounded first, as 25 * 1.12 is above 28 in floats."""
    return math.ceil(round(num_prompts * factor, 6))


def is_selective(args: Args) -> bool:
    """Whether a step samples more groups than it trains on, and chooses among them."""
    return args.dynamic_sampling > 0 or args.oversample > 1


def has_kl(args: Args) -> bool:
    return args.kl_reward_coef > 0 or args.kl_loss_coef > 0


def check_args(args: Args) -> None:
    """Refuse what cannot work, or has no effect, before anything is loaded."""
    check_shared(args.data, args.run, args.rollout)
    if args.rollout.samples_per_prompt < 2 and not args.rollout.eval_only:
        raise SystemExit("--samples-per-prompt 1: no group")
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
    if not 1 <= args.oversample <= 100:
        raise SystemExit(f"--oversample {args.oversample}: must be from 1 to 100")
    if args.dynamic_sampling == 1:
        raise SystemExit("--dynamic-sampling 1 never refills: give a number of rounds, such as 10")
    # group-std divides by the spread, so in a group of equal scores a small KL becomes a whole
    # advantage. A masked response has no trained token, so it pays no KL, but counts in the
    # baseline of its group: the others would be pushed down for their KL alone.
    kl_decides = args.advantage == "group-std" or args.mask_truncated
    if args.kl_reward_coef and kl_decides:
        raise SystemExit(
            "--kl-reward-coef with --advantage group-std or --mask-truncated: the KL would decide "
            "in groups of equal scores; take --advantage group-mean or rloo without "
            "--mask-truncated, or --kl-loss-coef"
        )
    off_policy = args.minibatches * args.epochs_per_step > 1
    more_steps = "several --minibatches or --epochs-per-step: on-policy the ratio is 1"
    uses = {  # flag: (whether it has an effect, what it needs for one)
        "objective": (off_policy, more_steps),
        "clip_low": (off_policy, more_steps),
        "clip_high": (off_policy, more_steps),
        "dual_clip": (off_policy and args.objective == "ppo", f"--objective ppo, and {more_steps}"),
        "correction_range": (args.correction != "none", "a --correction"),
        "kl_estimator": (args.kl_loss_coef > 0, "a --kl-loss-coef"),
        "tool_bonus": (has_tools(args.rollout), "--tools, or a class as --environment"),
        "lr_floor": (args.lr_schedule != "constant", "--lr-schedule linear or cosine"),
    }
    refuse_idle(args, uses)
    if "reference" in args.machine.offload and not has_kl(args):
        raise SystemExit(
            "--offload reference has no effect: needs a --kl-reward-coef or --kl-loss-coef"
        )


def main(args: Args, demo: bool = False) -> None:
    check_args(args)
    args = with_gspo_defaults(args)
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
    num_prompts = num_oversampled(args.rollout.prompts_per_step, args.oversample)
    total_steps = num_steps(args.run, train_data, num_prompts)
    job.leave_if_finished(total_steps)
    loader = job.open_loader(len(train_data), train_data.fingerprint) if train_data else None
    job.plan_memory(
        args.rollout,
        trained=[job.model_folder],
        frozen=[job.model_folder] if needs_reference else [],
        replayed_tokens=replayed_micro_batch_tokens(args.rollout.replay),
    )
    engine = open_engine(job, args.rollout)
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
        engine_group=engine_group,
    )

    # what is trained
    policy = job.load_policy()
    reference = job.load_reference(policy) if needs_reference else None
    optimizer = job.adamw(policy, args.weight_decay, args.max_grad_norm)
    packer = Packer(job.attention, job.micro_batch_tokens, job.output_dir, world, job.vision)
    group_yield = GroupYield()
    checkpoints = Checkpoints(
        job.output_dir,
        world,
        optimizers={"policy": optimizer},
        loader=loader,
        save_every=args.run.save_every,
        keep=args.run.keep_checkpoints,
        identity=job.identity | {"end_token": job.tokenizer.eos_token},
        micro_batch_tokens=job.micro_batch_tokens,
        counts=group_yield.counts,
    )
    start = checkpoints.resume(job.checkpoint, weights_only=args.rollout.eval_only)
    logger = open_logger(job, args, total_steps, checkpoints)

    if args.rollout.eval_only:
        rollouts.evaluate_only(policy, start, logger)
        return
    # do the largest micro-batches fit?
    rehearsal = Rehearsal(job, packer, args.rollout, [optimizer])
    while rehearsal.is_due:
        with rehearsal.attempt() as minibatch:
            # the rehearsal has packed episodes of the greatest length
            tokens = Tokens.of(packer.episodes, packer.index, device)
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
            sampled, episodes = load_rollouts(args.rollout.replay, step + 1, world, job.limits)
        else:
            # parts 1 to 3 are in `collect`: data, rollout, rewards
            with watch("sync"):
                sync_engine(engine, policy, step)
            sampled, episodes = collect_groups(rollouts, args, group_yield, step, watch)
            sleep_engine(engine, policy)
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
        with watch("logprob"):
            # The forward of the first update gives the old log-probs of its own minibatch: too
            # late for a KL in the reward.
            minibatches_to_fill = minibatches if args.kl_reward_coef else minibatches[1:]
            packer.fill(tokens.old_logprobs, policy, minibatches_to_fill, args.rollout.temperature)
            if reference:
                reference.to(device)
                packer.fill(tokens.ref_logprobs, reference, minibatches, args.rollout.temperature)
                if "reference" in args.machine.offload:
                    reference.to("cpu")
        max_response_tokens = args.rollout.max_response_tokens
        scores = shaped_scores(episodes, max_response_tokens, args.overlong_buffer)  # [E]
        if args.kl_reward_coef:
            kl = kl_estimate(
                tokens.old_logprobs, tokens.ref_logprobs, tokens.old_logprobs, estimator="k1"
            ).cpu()
            scores = scores - args.kl_reward_coef * index.sums(kl)
        groups = torch.tensor([e.prompt_index for e in episodes], dtype=torch.int64)  # [E]
        advantages = group_advantages(scores, groups, args.advantage)  # [E]
        tokens.advantages = advantages[index.episode_of_token].to(device)
        if due(step + 1, args.rollout.dump_rollouts_every):
            rollouts.dump(step + 1, sampled, episodes, advantages.tolist(), packer.budget)

        lr = args.learning_rate * lr_factor(
            step,
            total_steps,
            warmup_steps=args.warmup_steps,
            schedule=args.lr_schedule,
            floor=args.lr_floor,
        )
        means = Means()
        with watch("update"):
            for epoch, minibatch in Progress(
                "update", product(range(args.epochs_per_step), minibatches)
            ):
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
        if is_selective(args):
            means.add("rollout/unused", len(sampled) - len(episodes), count=len(sampled))
        if reference:
            kl = kl_estimate(
                tokens.old_logprobs, tokens.ref_logprobs, tokens.old_logprobs, estimator="k3"
            )
            means.add("policy/kl_to_ref", kl.sum(), count=len(kl))
        metrics = rollout_metrics(means.reduce()) | {
            "optim/lr": lr,
            "optim/loss_scale": optimizer.scale,
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

"""Curiosity-driven RL of visual tool use (Pixel Reasoner, arXiv 2505.15966).

A vision-language policy may look closer (crop an image, pick frames of a video) before it answers
in \\boxed{}. At first looking may pay less than guessing, and plain GRPO unlearns it. A bonus for
trajectories that look, while few of their group do, keeps it alive until it pays. The reward is
headed "new to curiosity"; of grpo.py's objectives there is the clipped loss, without KL,
corrections, dual clip and entropy.

Where this differs from the released code:
   1. The paper's bonus by default; the code's variant by name. Correctness is 0 or 1 and what is
   unparsable scores 0.
   2. What was sampled is trained on: token ids from the engine, M-RoPE positions, crops from the
   original picture.
   3. One denominator, as in grpo.py; the constant divisor by flag. No clamp hides a loss that
   explodes.
   4. Groups of equal rewards are left out of the update: their advantages are 0, and they only
   dilute the mean. The replay of earlier samples, which the release switches off, is left out.

    torchrun --nproc_per_node 2 curiosity_rl.py    # demo, minutes on a CPU
    torchrun --nproc_per_node 8 curiosity_rl.py --model runs/warm-start/model \\
        --train-data pixel_rl/release.parquet --max-response-tokens 8192
    python curiosity_rl.py --eval-only --model runs/curiosity/model \\
        --eval-data vstar.parquet --max-response-tokens 8192

Names: P prompts a step, G samples of a prompt, E episodes on this rank, T their sampled tokens, N
those of a micro-batch. Everything per token is flat ([T] or [N]): there is no padding to mask.
"""

import math
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from common.checkpoint import Checkpoints
from common.distributed import World, all_reduce, forward_context, run, stop_requested
from common.files import refuse
from common.flags import (
    Amount,
    Count,
    Data,
    Limit,
    Machine,
    Rollout,
    Run,
    Share,
    check_shared,
    parse,
    refuse_idle,
)
from common.job import Job
from common.logger import open_logger
from common.metrics import Means, rollout_means, rollout_metrics
from common.models import sync_engine
from common.optimizer import lr_factor
from common.packing import Minibatch, Packer, TokenIndex
from common.precision import checked_gap
from common.progress import Progress
from common.rollout.dumps import load_rollouts
from common.rollout.rollouts import Rollouts, announce, has_tools
from common.steps import Stopwatch, due, finish, profiled, seed_step
from common.types import Episode, by_prompt


@dataclass
class Args:
    """Pixel Reasoner's reward, objective and optimizer. What scripts share comes in groups:
    common/flags.py."""

    # bonus and cost: the paper's, its code's, neither
    curiosity: Literal["paper", "repo", "none"] = "paper"
    curiosity_alpha: Amount = 0.5  # weight of the bonus
    curiosity_target: Amount = 0.3  # H: no bonus where this share of a group looks; or more
    call_penalty: Amount = 0.05  # beta: what a call above --free-calls costs
    free_calls: Limit = 1  # N: calls of a trajectory that cost nothing
    # baseline and scale of scores
    advantage: Literal["group-std", "group-mean", "rloo", "batch-std"] = "group-mean"
    # mean over tokens; over sequences; constant length
    reduction: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    clip_low: Amount = 0.2  # ratio is clipped below 1 - this
    clip_high: Amount = 0.35  # ratio is clipped above 1 + this
    minibatches: Count = 1  # optimizer steps per rollout and epoch
    epochs_per_step: Count = 1  # passes over a rollout
    learning_rate: Amount = 1e-6  # peak
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up
    warmup_steps: Amount = 0.0  # steps of linear warm-up; below 1: share of all steps
    # learning rate that the decay ends at, behind the last step, as a share of the peak
    lr_floor: Share = 0.0
    weight_decay: Amount = 0.0  # AdamW, decoupled
    max_grad_norm: Amount = 1.0  # global L2 norm; 0 = no clipping

    data: Data = field(default_factory=Data)
    rollout: Rollout = field(default_factory=partial(Rollout, tools="visual"))
    machine: Machine = field(default_factory=Machine)
    run: Run = field(default_factory=partial(Run, model="tiny-vl"))


# What --help shows; --help-all shows all flags.
FIRST_SCREEN = """
model train-data eval-data media-root output-dir bad-rows
prompts-per-step samples-per-prompt max-prompt-tokens max-response-tokens max-turn-tokens max-turns
minibatches max-pixels
curiosity-alpha curiosity-target call-penalty free-calls learning-rate
total-epochs eval-every eval-rows eval-only save-every resume log
micro-batch-tokens gradient-checkpointing offload engine-memory
"""

# What runs without --model: a policy of 3 million parameters learns to look (docs/results.md,
# "curiosity_rl.py").
DEMO = Args(
    learning_rate=8e-5,
    lr_schedule="linear",
    lr_floor=0.1,
    warmup_steps=5,
    data=Data(max_pixels=12_544, max_frame_pixels=12_544),
    rollout=Rollout(
        prompts_per_step=16,
        samples_per_prompt=8,
        max_prompt_tokens=96,
        max_response_tokens=192,
        tools="crop_image_normalized",
        max_turns=4,
    ),
    machine=Machine(dtype="fp32", micro_batch_tokens=4096),
    run=Run(model="tiny-vl", total_steps=30, eval_every=5, eval_rows=256),
)


# new to curiosity: the reward
def curiosity_terms(
    variant: str,
    calls: int,
    rapr: float,
    is_video: bool,
    alpha: float,
    target: float,
    penalty: float,
    free: int,
) -> tuple[float, float]:
    """(bonus, cost) of a trajectory with so many calls; rapr is the share of its group that looks,
    H the target.

    paper (arXiv 2505.15966 eq. 3): alpha * max(H - rapr, 0) if it looks; penalty * min(free -
    calls, 0). repo: the bonus divided by 4 rapr for images, 3 rapr for videos. Both hold whether
    the answer is right or not.
    """
    if variant == "none" or not calls:
        return 0.0, 0.0
    bonus = alpha * max(target - rapr, 0.0)
    if variant == "repo":
        bonus /= (3 if is_video else 4) * rapr
    return bonus, penalty * min(free - calls, 0)


def num_calls(episode: Episode) -> int:
    """Attempted calls of a trajectory: failed ones count, and so does the one that --max-turns
    refused."""
    return len(episode.calls) + (episode.finish_reason == "max_turns")


def shape_rewards(episodes: list[Episode], args: Args) -> None:
    """Add bonus, cost and the rewards of turns to the scores of whole groups, in place.

    A score counts as the paper's correctness, cut to [0, 1].
    """
    for group in by_prompt(episodes).values():
        num_looking = sum(num_calls(episode) > 0 for episode in group)
        for episode in group:
            bonus, cost = curiosity_terms(
                args.curiosity,
                calls=num_calls(episode),
                rapr=num_looking / len(group),
                is_video=any(media.kind == "video" for media in episode.media),
                alpha=args.curiosity_alpha,
                target=args.curiosity_target,
                penalty=args.call_penalty,
                free=args.free_calls,
            )
            episode.terms = {"curiosity": bonus, "call_cost": cost}
            correctness = min(max(episode.score, 0.0), 1.0)
            turn_rewards = math.fsum(reward for _, reward in episode.turn_rewards)
            episode.score = correctness + bonus + cost + turn_rewards


def unequal_groups(episodes: list[Episode]) -> list[Episode]:
    """Those whose group has more than one score: the others would get advantage 0."""
    kept = []
    for group in by_prompt(episodes).values():
        if len({episode.score for episode in group}) > 1:
            kept += group
    return kept


def select(sampled: list[Episode], args: Args) -> list[Episode]:
    """The episodes of a step to train on: scored, with bonus and cost, of groups whose scores
    differ."""
    # scoring the others has failed
    scored = [episode for episode in sampled if math.isfinite(episode.score)]
    shape_rewards(scored, args)
    return unequal_groups(scored)


def curiosity_means(sampled: list[Episode]) -> Means:
    """The share of the scored episodes that look."""
    means = Means()
    for episode in sampled:
        if math.isfinite(episode.score):
            means.add("tool/rapr", float(num_calls(episode) > 0))
    return means


def group_advantages(scores: Tensor, groups: Tensor, advantage: str) -> Tensor:
    """Score minus a baseline from its group, scaled. scores [E] float, groups [E] int64 -> [E]. All
    ranks call it.

    group-std: (r - mean) / std, unbiased (DeepSeekMath eq. 3). group-mean: r - mean (Dr. GRPO).
    rloo: r - mean of the others (arXiv 2402.14740). batch-std: (r - mean) / std over all episodes
    of the step (REINFORCE++-baseline, 2501.03262). A group of one, or one whose scores are all
    equal, has advantage 0: there is nothing to compare.
    """
    # in float32 the mean of eight times 0.1 is not 0.1, and the division blows up the rest
    exact = scores.double()
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


def clipped_loss(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> tuple[Tensor, Tensor]:
    """PPO's loss of each token [N], and whether a clip is active [N]; `ratio` [N] is p / p at the
    time of the rollout.

    max(-A r, -A clip(r, 1 - low, 1 + high)) (arXiv 1707.06347 eq. 7); with a dual clip above 0 at
    most -A * dual_clip where A < 0 (1912.09729 eq. 5).
    """
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)
    clipped = -advantages * clipped_ratio > -advantages * ratio
    if dual_clip > 0:
        bound = -advantages * dual_clip
        clipped = clipped | ((advantages < 0) & (loss > bound))
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return loss, clipped


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

    episodes: Tensor  # [T] int64: whose token
    lengths: Tensor  # [T] float: trained tokens of its episode
    rollout_logprobs: Tensor  # [T] float32: the engine's
    # [T] float32: the trainer's, with the weights of the rollout; NaN until computed
    old_logprobs: Tensor
    advantages: Tensor  # [T] float32; NaN until computed

    @classmethod
    def of(cls, episodes: list[Episode], index: TokenIndex, device: torch.device) -> "Tokens":
        """What the episodes tell; the rest is NaN until it is computed."""
        known = {
            "episodes": index.episode_of_token,
            "lengths": index.lengths[index.episode_of_token].float(),
            "rollout_logprobs": torch.tensor(
                [lp for e in episodes for lp, m in zip(e.logprobs, e.loss_mask) if m]
            ),
        }
        unknown = {
            item.name: torch.full((len(index),), math.nan)
            for item in fields(cls)
            if item.name not in known
        }
        return cls(**{name: values.to(device) for name, values in (known | unknown).items()})

    def __getitem__(self, index: Tensor) -> "Tokens":
        return Tokens(**{name: values[index] for name, values in vars(self).items()})


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
    num_tokens, num_sequences = minibatch.num_tokens, minibatch.num_sequences
    constant_length = args.rollout.max_response_tokens
    total_loss, means = torch.zeros((), device=world.device), Means()
    for i, batch in enumerate(Progress("micro-batch", minibatch.micro_batches)):
        batch = batch.to(world.device)
        with forward_context(policy, last=i == len(minibatch.micro_batches) - 1):
            logprobs, entropy = policy(batch, args.rollout.temperature)  # [N], [N]
            if store_old_logprobs:
                tokens.old_logprobs[batch.tokens] = logprobs.detach()
            here = tokens[batch.tokens]
            ratio = (logprobs - here.old_logprobs).clamp(-20, 20).exp()
            # [N], [N]
            loss, clipped = clipped_loss(ratio, here.advantages, args.clip_low, args.clip_high)
            weights = token_weights(
                args.reduction, here.lengths, num_tokens, num_sequences, constant_length
            )
            # FSDP2 and DDP average gradients over ranks, the denominator is global: hence
            # world.size
            loss = (loss * weights).sum() * world.size
            (loss * scale).backward()
        total_loss += loss.detach()
        logratio = logprobs.detach() - here.old_logprobs
        means.add("policy/entropy", entropy.sum(), count=len(entropy))
        means.add("policy/clip_fraction", clipped.sum(), count=len(clipped))
        # k3
        means.add("policy/approx_kl", (logratio.exp() - 1 - logratio).sum(), count=len(logratio))
    means.add("policy/loss", total_loss)
    return means


def collect(
    rollouts: Rollouts, num_prompts: int, step: int, watch: Stopwatch, first: int = 0
) -> list[Episode]:
    """This rank's episodes of the next prompts, sampled and scored; `first` is the place of the
    first in the step."""
    # 1. data
    prompts = rollouts.draw(num_prompts, first)

    # 2. rollout
    with watch("rollout"):
        episodes = rollouts.sample(prompts, step, watch)

    # 3. rewards
    with watch("reward"):
        rollouts.score(episodes, prompts)
    return episodes


def check_args(args: Args) -> None:
    """Refuse what cannot work, or has no effect, before anything is loaded."""
    check_shared(args.data, args.run, args.rollout)
    P, M = args.rollout.prompts_per_step, args.minibatches
    single = args.rollout.samples_per_prompt < 2 and not args.rollout.eval_only
    refuse(single, "--samples-per-prompt 1: nothing to compare with")
    refuse(
        P < M,
        f"--minibatches {M} of --prompts-per-step {P}: a minibatch needs a prompt (groups "
        "stay together)",
    )
    off_policy = M * args.epochs_per_step > 1
    several = "several --minibatches or --epochs-per-step: on-policy the ratio is 1"
    looks = args.curiosity != "none" and has_tools(args.rollout)
    looking = "--tools or a class as --environment, and --curiosity paper or repo"
    uses = {  # flag: (whether it has an effect, what it needs for one)
        "curiosity_alpha": (looks, looking),
        "curiosity_target": (looks, looking),
        "call_penalty": (looks, looking),
        "free_calls": (looks, looking),
        "clip_low": (off_policy, several),
        "clip_high": (off_policy, several),
        "lr_floor": (args.lr_schedule != "constant", "--lr-schedule linear or cosine"),
    }
    refuse_idle(args, uses)
    refuse(
        "reference" in args.machine.offload,
        "--offload reference: curiosity_rl.py has no reference model",
    )


def main(args: Args, demo: bool = False) -> None:
    check_args(args)
    job = Job(
        "curiosity_rl", args.data, args.machine, args.run, demo, record=not args.rollout.eval_only
    )
    world, device = job.world, job.world.device
    rollouts = Rollouts(job, args.data, args.rollout, args.run, trained=[job.path], frozen=[])

    policy = job.load_policy()
    optimizer = job.adamw(policy, args.weight_decay, args.max_grad_norm)
    packer = Packer(job.attention, job.micro_batch_tokens, job.output_dir, world, job.vision)
    state = {"loader": rollouts.loader}
    checkpoints = Checkpoints(job, optimizers={"policy": optimizer}, state=state)
    start = checkpoints.resume(weights_only=args.rollout.eval_only)
    logger = open_logger(
        job, args, rollouts.total_steps, checkpoints, record=not args.rollout.eval_only
    )

    if args.rollout.eval_only:
        rollouts.evaluate_only(policy, start, logger)
        return
    announce(rollouts, updates=args.minibatches * args.epochs_per_step)
    if start == 0 and args.run.eval_before and rollouts.can_evaluate:
        logger.log(0, rollouts.evaluate(policy, 0))
    end = start + 1 if args.rollout.replay else rollouts.total_steps
    for step in profiled(range(start, end), job):
        watch = Stopwatch()
        seed_step(args.run.seed, step, world.rank)
        if args.rollout.replay:
            sampled, episodes = load_rollouts(args.rollout.replay, step + 1, world, job.limits)
        else:
            with watch("sync"):
                sync_engine(rollouts.engine, policy, step)
            sampled = collect(rollouts, args.rollout.prompts_per_step, step, watch)
            rollouts.engine.sleep()
            episodes = select(sampled, args)

        # 4. update
        index = TokenIndex(episodes)
        tokens = Tokens.of(episodes, index, device)
        minibatches = packer.minibatches(
            episodes, index, args.minibatches, seed=args.run.seed, step=step
        )
        with watch("logprob"):
            # the first minibatch gets its old log-probs for free in its own forward
            packer.fill(tokens.old_logprobs, policy, minibatches[1:], args.rollout.temperature)
        scores = torch.tensor([episode.score for episode in episodes], dtype=torch.float32)  # [E]
        groups = torch.tensor([e.prompt_index for e in episodes], dtype=torch.int64)  # [E]
        advantages = group_advantages(scores, groups, args.advantage)  # [E]
        tokens.advantages = advantages[index.episode_of_token].to(device)
        if due(step + 1, args.rollout.dump_rollouts_every):
            rollouts.dump(step + 1, sampled, episodes, advantages.tolist())

        decay = lr_factor(
            step, rollouts.total_steps, args.warmup_steps, args.lr_schedule, args.lr_floor
        )
        lr = args.learning_rate * decay
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
                if on_policy:  # and all old log-probs are in
                    gap = checked_gap(
                        tokens.rollout_logprobs, tokens.old_logprobs, rollouts.max_gap, step
                    )
                    means.add("policy/rollout_logprob_gap", gap)
                means.merge(optimizer.step(lr))

        # 5. log
        means.merge(rollout_means(sampled, watch.seconds, with_tools=rollouts.turns is not None))
        means.merge(curiosity_means(sampled))
        metrics = rollout_metrics(means.reduce()) | {
            "optim/lr": lr,
            "optim/loss_scale": optimizer.scale,
            "data/epoch": rollouts.loader.epoch,
        }

        rollouts.count_unscored(step + 1, metrics)

        # 6. eval, checkpoint
        last = step + 1 == end
        if rollouts.can_evaluate and (last or due(step + 1, args.run.eval_every)):
            with watch("eval"):
                metrics |= rollouts.evaluate(policy, step + 1)
        metrics |= watch.metrics(device)
        stop = stop_requested() or rollouts.scores_nothing  # during the evaluation, too
        # before the checkpoint: a step that a resume skips is a step on record
        logger.log(step + 1, metrics)
        if not args.rollout.replay and (
            last or stop or checkpoints.due(step + 1, metrics.get("eval/accuracy"))
        ):
            checkpoints.save(step + 1, metrics.get("eval/accuracy"))
        if rollouts.scores_nothing:
            rollouts.end_unscored(step + 1)
        if stop and not last:
            logger.event({"event": "stopped", "step": step + 1})
            raise SystemExit(stop)  # as a process ended by that signal

    finish(job, policy)


if __name__ == "__main__":
    run(main, *parse(Args, DEMO, __doc__, FIRST_SCREEN))

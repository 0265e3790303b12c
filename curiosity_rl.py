"""Curiosity-driven RL of visual tool use (Pixel Reasoner, arXiv 2505.15966).

A vision-language policy may look closer (crop an image, pick frames of a video) before it answers
in \\boxed{}. Looking may pay less than guessing at first, and plain GRPO unlearns it. A bonus for
trajectories that look, while few of their group do, keeps it alive until it pays. The reward is
what is new here (below "new to curiosity"). Of grpo.py's objective only the clipped loss is left, a
word-for-word copy whose dual clip is not used: no KL, corrections or entropy bonus.

Where this differs from the released code:

1. The bonus is the paper's by default, and its code's with --curiosity repo. The built-in rule for
   visual questions gives 0 or 1, and 0 to an answer that cannot be parsed.
2. Training uses what was sampled: token ids from the engine, M-RoPE positions, crops of the
   original picture.
3. One denominator, as in grpo.py; --reduction dr_grpo divides by a constant. The loss is not
   clamped, only the log of the ratio, to [-20, 20].
4. Groups of equal rewards are left out of the update: their advantages are 0, and they only
   dilute the mean, and the deviation of --advantage batch-std. The release's buffer of earlier
   samples to train on again, which it switches off, is left out; --replay is something else.

    torchrun --nproc_per_node 2 curiosity_rl.py    # demo, minutes on a CPU
    torchrun --nproc_per_node 8 curiosity_rl.py --model runs/warm-start/model \\
        --train-data pixel_rl/release.parquet --max-response-tokens 8192
    python curiosity_rl.py --eval-only --model runs/curiosity/model \\
        --eval-data vstar.parquet --max-response-tokens 8192

Names: E episodes on this rank, T their trained tokens, N those of a micro-batch. Everything per
token is flat ([T] or [N]): there is no padding to mask.

Its mathematics is tested in tests/math/test_curiosity.py.
"""

import math
from dataclasses import dataclass, field, fields
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
from common.command_line import refuse_idle
from common.distributed import World, all_reduce, forward_context
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
    """Pixel Reasoner's reward, objective and optimizer. Flags that scripts share are in
    common/flags.py."""

    # bonus for looking, and its cost: the paper's, its code's, neither
    curiosity: Literal["paper", "repo", "none"] = "paper"
    curiosity_alpha: Amount = 0.5  # weight of the bonus
    curiosity_target: Amount = 0.3  # H: no bonus where this share of a group looks
    call_penalty: Amount = 0.05  # beta: cost of each call beyond --free-calls
    free_calls: Natural = 1  # N, in the paper: calls that cost nothing
    # baseline and scale of scores
    advantage: Literal["group-std", "group-mean", "rloo", "batch-std"] = "group-mean"
    # mean of the loss: over tokens (dapo), over sequences (grpo), by a constant length (dr_grpo)
    reduction: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    clip_low: Amount = 0.2  # ratio is clipped below 1 - this
    clip_high: Amount = 0.35  # ratio is clipped above 1 + this
    minibatches: Count = 1  # optimizer steps per rollout and epoch
    epochs_per_step: Count = 1  # passes over a rollout
    learning_rate: Amount = 1e-6  # peak of the schedule
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # learning rate after warm-up
    warmup_steps: Amount = 0.0  # steps of linear warm-up; below 1: share of all steps
    # learning rate that the decay reaches after the last step, as a share of the peak
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

# What runs without --model: a policy of 3 million parameters learns to look
# (results/demos/README.md).
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

# bound on log-ratios before `exp`: e^20 is far beyond every clip, and finite
MAX_LOGRATIO = 20.0


# new to curiosity: the reward
def curiosity_terms(
    variant: str,
    calls: int,
    share_looking: float,
    is_video: bool,
    alpha: float,
    target: float,
    penalty: float,
    free_calls: int,
) -> tuple[float, float]:
    """(bonus, cost) to add to the score of a trajectory, right or wrong; the cost is <= 0. Both are
    0 without calls, and for the variant "none".

    paper (arXiv 2505.15966 eq. 3): bonus alpha * max(target - share_looking, 0), cost penalty *
    min(free_calls - calls, 0). repo: that bonus divided by 4 share_looking (images) or 3
    share_looking (videos). share_looking: share of its group that looks (RaPR).
    """
    if variant == "none" or not calls:
        return 0.0, 0.0
    bonus = alpha * max(target - share_looking, 0.0)
    if variant == "repo":
        bonus /= (3 if is_video else 4) * share_looking
    return bonus, penalty * min(free_calls - calls, 0)


def num_calls(episode: Episode) -> int:
    """Calls that a trajectory attempted, including failed ones and one that --max-turns cut off."""
    return len(episode.calls) + (episode.finish_reason == "max_turns")


def add_curiosity(episodes: list[Episode], args: Args) -> None:
    """Set the score of each episode to correctness + bonus + cost + rewards of its turns.

    The correctness is the score so far, cut to [0, 1]: to some rules an error is -1. Groups must be
    complete, except for episodes that could not be scored.
    """
    for group in by_prompt(episodes).values():
        num_looking = sum(num_calls(episode) > 0 for episode in group)
        for episode in group:
            bonus, cost = curiosity_terms(
                args.curiosity,
                calls=num_calls(episode),
                share_looking=num_looking / len(group),
                is_video=any(media.kind == "video" for media in episode.media),
                alpha=args.curiosity_alpha,
                target=args.curiosity_target,
                penalty=args.call_penalty,
                free_calls=args.free_calls,
            )
            episode.terms = {"curiosity": bonus, "call_cost": cost}
            correctness = min(max(episode.score, 0.0), 1.0)
            turn_rewards = math.fsum(reward for _, reward in episode.turn_rewards)
            episode.score = correctness + bonus + cost + turn_rewards


def of_unequal_groups(episodes: list[Episode]) -> list[Episode]:
    """The episodes of groups whose scores differ: those of the others would get advantage 0."""
    kept = []
    for group in by_prompt(episodes).values():
        if len({episode.score for episode in group}) > 1:
            kept += group
    return kept


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

    # [T] int64: index of its episode; no loss here needs it, as GSPO's in grpo.py does
    episode_of_token: Tensor
    lengths: Tensor  # [T] float: trained tokens of its episode
    rollout_logprobs: Tensor  # [T] float32: the engine's
    # [T] float32: the trainer's, with the weights of the rollout; NaN until computed
    old_logprobs: Tensor
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
            ratio = (logprobs - mb_tokens.old_logprobs).clamp(-MAX_LOGRATIO, MAX_LOGRATIO).exp()
            # loss [N], clipped [N]
            loss, clipped = clipped_loss(ratio, mb_tokens.advantages, args.clip_low, args.clip_high)
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


def check_args(args: Args) -> None:
    """Refuse what cannot work, or has no effect, before anything is loaded."""
    check_shared(args.data, args.run, args.rollout)
    if args.rollout.samples_per_prompt < 2 and not args.rollout.eval_only:
        raise SystemExit("--samples-per-prompt 1: nothing to compare with")
    if args.minibatches > args.rollout.prompts_per_step:
        raise SystemExit(
            f"--minibatches {args.minibatches} of --prompts-per-step "
            f"{args.rollout.prompts_per_step}: a minibatch needs a prompt (groups stay together)"
        )
    off_policy = args.minibatches * args.epochs_per_step > 1
    more_steps = "several --minibatches or --epochs-per-step: on-policy the ratio is 1"
    has_bonus = args.curiosity != "none" and has_tools(args.rollout)
    needs_of_bonus = "--tools or a class as --environment, and --curiosity paper or repo"
    uses = {  # flag: (whether it has an effect, what it needs for one)
        "curiosity_alpha": (has_bonus, needs_of_bonus),
        "curiosity_target": (has_bonus, needs_of_bonus),
        "call_penalty": (has_bonus, needs_of_bonus),
        "free_calls": (has_bonus, needs_of_bonus),
        "clip_low": (off_policy, more_steps),
        "clip_high": (off_policy, more_steps),
        "lr_floor": (args.lr_schedule != "constant", "--lr-schedule linear or cosine"),
    }
    refuse_idle(args, uses)
    if "reference" in args.machine.offload:
        raise SystemExit("--offload reference: curiosity_rl.py has no reference model")


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
    num_prompts = args.rollout.prompts_per_step
    total_steps = num_steps(args.run, train_data, num_prompts)
    job.leave_if_finished(total_steps)
    loader = job.open_loader(len(train_data), train_data.fingerprint) if train_data else None
    job.plan_memory(
        args.rollout,
        trained=[job.model_folder],
        frozen=[],
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
    optimizer = job.adamw(policy, args.weight_decay, args.max_grad_norm)
    packer = Packer(job.attention, job.micro_batch_tokens, job.output_dir, world, job.vision)
    checkpoints = Checkpoints(
        job.output_dir,
        world,
        optimizers={"policy": optimizer},
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
            scored = [episode for episode in sampled if math.isfinite(episode.score)]
            add_curiosity(scored, args)
            episodes = of_unequal_groups(scored)

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
            # the first update computes the old log-probs of its own minibatch
            packer.fill(tokens.old_logprobs, policy, minibatches[1:], args.rollout.temperature)
        scores = torch.tensor([episode.score for episode in episodes], dtype=torch.float32)  # [E]
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
        means.merge(curiosity_means(sampled))
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

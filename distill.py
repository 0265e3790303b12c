"""On-policy distillation for language models.

The student samples responses. At each token of a response a teacher makes its own prediction, and
the gradient lowers a divergence between the two distributions. With --teacher-prompt-column the
teacher reads more than the student, for example the solution. Papers: GKD (arXiv 2306.13649),
MiniLLM (2306.08543), "On-Policy Distillation" (thinkingmachines.ai, October 2025).

The loss is the mean of D(p, q) over all trained tokens, where p is the student's distribution at a
token and q the teacher's (temperatures included). As in GKD no gradient flows through the sampling:
the loss ignores that another policy would sample other tokens.

- reverse-kl: KL(p | q) = sum p (log p - log q); p avoids tokens that are unlikely under q
- forward-kl: KL(q | p) = sum q (log q - log p); p covers all tokens that are likely under q
- jsd (GKD eq. 1): beta KL(q | m) + (1 - beta) KL(p | m) with m = beta q + (1 - beta) p; divided by
  beta (1 - beta) it tends to the forward KL for beta -> 0, and to the reverse KL for beta -> 1

With p = softmax(z) and s = p dD/dp, the gradient is dD/dz = s - p sum(s):

- reverse-kl: p (log p - log q - D)
- forward-kl: p - q
- jsd: (1 - beta) p (log p - log m - KL(p | m))

--estimator sampled needs one number per token from the teacher, log q(y) of the sampled token y:
log q(y) - log p(y) is the advantage in the policy gradient. The expectation over y ~ p of
-(log q(y) - log p(y)) d log p(y) is sum (log p - log q) dp = d KL(p | q), since sum dp = 0.

What this does that others do not:

1. A [tokens, vocabulary] tensor of either model never exists: heads are applied chunk by chunk; for
   --estimator full both inside the student's forward, and again in the backward
   (common/divergence.py).
2. One denominator: the gradient does not depend on how a batch is split over ranks, micro-batches
   and packs. In a micro-batch each model computes the prompt of a group once, unless --attention
   is flash or rows.
3. Rollouts come from a vLLM engine inside the ranks, whose log-probs are compared with the
   trainer's on every step.

    torchrun --nproc_per_node 2 distill.py    # embedded demo, minutes on a CPU
    torchrun --nproc_per_node 4 distill.py --model Qwen/Qwen3-0.6B \\
        --teacher Qwen/Qwen3-4B --train-data data/gsm8k/train.parquet

Names: T trained tokens on this rank, N those of a micro-batch, V entries of the vocabulary.
Everything per token is flat ([T] or [N]): there is no padding to mask.

Its mathematics is tested in tests/math/test_distill_math.py.
"""

import math
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import common.packages  # noqa: F401, one line if torch is missing

import numpy as np
import torch
from annotated_types import Gt, Lt
from torch import Tensor, nn

from common.assets.build.embedded import with_embedded_data
from common.balance import balance_ranks
from common.checkpoint import Checkpoints
from common.command_line import refuse_idle
from common.data.prompts import PromptData
from common.distributed import World, forward_context
from common.export import export_hugging_face
from common.flags import (
    Amount,
    Count,
    Data,
    Machine,
    Positive,
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
from common.processes import in_threads
from common.progress import Progress, say
from common.rehearsal import Rehearsal
from common.rollout.dumps import load_rollouts, replayed_micro_batch_tokens
from common.rollout.opening import (
    check_rollout,
    has_environment_class,
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
from common.steps import Stopwatch, due, profiled, seed_step
from common.teacher import (
    Predictor,
    Responses,
    check_replayed_prompts,
    check_same_shapes,
    evaluate_teacher,
    find_teacher,
    is_usable,
    open_teacher_prompts,
    store_divergences,
    with_teacher_prompts,
)
from common.types import Episode


@dataclass
class Args:
    """The divergence and its optimizer. Flags that scripts share are in common/flags.py."""

    # frozen model: folder, hub id or tiny-teacher; default with --teacher-prompt-column: --model
    teacher: str | None = None
    # between student and teacher, at each trained token
    divergence: Literal["reverse-kl", "forward-kl", "jsd"] = "reverse-kl"
    # weight of the teacher in the jsd's m: near 0 like the forward KL, near 1 like the reverse KL
    jsd_beta: Annotated[float, Gt(0), Lt(1)] = 0.5
    # full: over the vocabulary; sampled: log-ratio of the sampled token as its advantage
    estimator: Literal["full", "sampled"] = "full"
    teacher_temperature: Positive | None = None  # default: --temperature, that of the student
    # column with the prompt that the teacher reads in place of the student's
    teacher_prompt_column: str | None = None
    # share of prompts whose response comes from the data set, not from the student
    data_share: Share = 0.0
    # column of the responses of --data-share; EXTRA.NAME: field NAME of the object in column EXTRA
    response_column: str = "response"
    eval_teacher: bool = False  # evaluate the teacher before the first step
    minibatches: Count = 1  # optimizer steps per rollout and epoch
    epochs_per_step: Count = 1  # passes over a rollout
    clip_low: Amount = 0.2  # sampled: ratio is clipped below 1 - this
    clip_high: Amount = 0.2  # sampled: ratio is clipped above 1 + this
    dual_clip: Amount = 3.0  # sampled: loss bound for negative advantages, as a ratio; 0 = off
    learning_rate: Amount = 1e-6  # peak of the schedule
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # learning rate after warm-up
    warmup_steps: Amount = 0.0  # steps of linear warm-up; below 1: share of all steps
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
model teacher train-data eval-data output-dir bad-rows
divergence jsd-beta estimator teacher-prompt-column data-share response-column eval-teacher
prompts-per-step samples-per-prompt max-prompt-tokens max-response-tokens temperature
learning-rate total-steps total-epochs eval-every save-every resume log
dtype micro-batch-tokens engine-memory lora-rank
"""

# What runs without --model: the embedded student learns from the same model after RL
# (docs/distill.md).
DEMO = Args(
    teacher="tiny-teacher",
    learning_rate=3e-4,
    lr_schedule="linear",
    lr_floor=0.1,
    warmup_steps=5,
    rollout=Rollout(
        prompts_per_step=64, samples_per_prompt=1, max_prompt_tokens=64, max_response_tokens=256
    ),
    machine=Machine(micro_batch_tokens=4096),
    run=Run(model="tiny", total_steps=40, eval_every=10),
)

# bound on log-ratios before `exp`: e^20 is far beyond every clip, and finite
MAX_LOGRATIO = 20.0


def divergence_terms(
    logp: Tensor, logq: Tensor, divergence: str, beta: float
) -> tuple[Tensor, Tensor]:
    """The summands of a divergence D of p and q, and s = p dD/dp, for each entry of the vocabulary.

    logp, logq: log-probs of student and teacher, [N, V] -> [N, V], [N, V].
    """
    if divergence == "reverse-kl":
        summands = logp.exp() * (logp - logq)
        # dD/dp is log p - log q + 1, but a constant cancels in s - p sum(s)
        return summands, summands
    if divergence == "forward-kl":
        q = logq.exp()
        return q * (logq - logp), -q
    # jsd
    logm = torch.logaddexp(logp + math.log(1 - beta), logq + math.log(beta))
    student_part = (1 - beta) * logp.exp() * (logp - logm)
    teacher_part = beta * logq.exp() * (logq - logm)
    # dD/dp is (1 - beta) (log p - log m): the derivatives of log p and log m cancel
    return student_part + teacher_part, student_part


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


@dataclass
class Tokens:
    """What is known of each trained token: T of them on this rank in a step, N in a micro-batch."""

    is_sampled: Tensor  # [T] bool: False for tokens of the data set's responses
    rollout_logprobs: Tensor  # [T] float32: the engine's; 0 for the data set's responses
    # [T] float32: the trainer's, with the weights of the rollout; NaN until computed, which
    # --estimator full does for the first minibatch alone
    old_logprobs: Tensor
    teacher_logprobs: Tensor  # [T] float32: the teacher's; NaN until computed
    # [T] float32: D, or log p - log q with --estimator sampled; NaN until computed
    divergences: Tensor

    @classmethod
    def of(cls, episodes: list[Episode], index: TokenIndex, device: torch.device) -> "Tokens":
        """The columns that the episodes have; the others are NaN until they are computed."""
        rollout_logprobs = []
        for episode in episodes:
            for logprob, is_trained in zip(episode.logprobs, episode.loss_mask):
                if is_trained:
                    rollout_logprobs.append(logprob)
        is_sampled = [episode.finish_reason != "data" for episode in episodes]
        columns = {
            "is_sampled": torch.tensor(is_sampled, dtype=torch.bool)[index.episode_of_token],
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
    models: nn.ModuleList,
    minibatch: Minibatch,
    tokens: Tokens,
    args: Args,
    world: World,
    *,
    first_epoch: bool,
    store_old_logprobs: bool,
    scale: float = 1.0,
) -> Means:
    """Accumulate the gradient of one optimizer step, times `scale`. Returns the step's policy/* and
    distill/* metrics.

    models: student and teacher. first_epoch: the divergences are written to `tokens.divergences`.
    store_old_logprobs: the weights are still those of the rollout, so the log-probs of this forward
    are the old ones: they are written to `tokens.old_logprobs`, and the ratio is exactly 1.
    """
    policy, teacher = models
    temperature = args.rollout.temperature
    teacher_temperature = args.teacher_temperature or temperature
    terms = partial(divergence_terms, divergence=args.divergence, beta=args.jsd_beta)
    means = Means()
    total_loss = torch.zeros((), device=world.device)
    batches = list(zip(minibatch.micro_batches, minibatch.teacher_batches))
    is_full = args.estimator == "full"
    for i, (batch, teacher_batch) in enumerate(Progress("micro-batch", batches)):
        batch = batch.to(world.device)
        if is_full:
            teacher_batch = teacher_batch.to(world.device)
            with torch.no_grad(), forward_context(teacher):
                prediction = teacher(teacher_batch, teacher_temperature, as_teacher=True)
        with forward_context(policy, last=i == len(batches) - 1):
            if is_full:
                comparison = policy(batch, temperature, teacher=prediction, terms=terms)
                logprobs = comparison.logprobs  # [N]
                entropy = comparison.entropy  # [N]
                tokens.teacher_logprobs[batch.token_index] = comparison.teacher_logprobs
            else:
                logprobs, entropy = policy(batch, temperature)  # [N], [N]
            if store_old_logprobs:
                tokens.old_logprobs[batch.token_index] = logprobs.detach()
            mb_tokens = tokens[batch.token_index]  # a copy, so it comes after the writes
            if is_full:
                divergences = comparison.divergence  # [N]
                loss = divergences
            else:
                logratio = logprobs - mb_tokens.old_logprobs
                logratio = logratio.clamp(-MAX_LOGRATIO, MAX_LOGRATIO)
                ratio = logratio.exp()
                divergences = mb_tokens.old_logprobs - mb_tokens.teacher_logprobs  # [N]
                advantages = -divergences
                loss, clipped = clipped_loss(
                    ratio, advantages, args.clip_low, args.clip_high, args.dual_clip
                )
            # FSDP2 and DDP average gradients over ranks, but the denominator is global: hence
            # world.size. Means average "policy/loss" over ranks in the same way.
            batch_loss = loss.sum() * world.size / minibatch.num_tokens
            (batch_loss * scale).backward()
        total_loss += batch_loss.detach()
        if first_epoch:
            tokens.divergences[batch.token_index] = divergences.detach()
        count = len(logprobs)
        means.add("distill/divergence", divergences.sum(), count=count)
        means.add("distill/teacher_logprob", mb_tokens.teacher_logprobs.sum(), count=count)
        means.add("policy/entropy", entropy.sum(), count=count)
        if is_full:
            means.add("distill/teacher_entropy", comparison.teacher_entropy.sum(), count=count)
            means.add("distill/agreement", comparison.agreement.sum(), count=count)
        else:
            means.add("policy/clip_fraction", clipped.sum(), count=count)
            # k3 estimate of KL(rollout's policy | this policy)
            k3 = ratio - 1 - logratio
            means.add("policy/approx_kl", k3.sum(), count=count)
    means.add("policy/loss", total_loss)
    return means


def data_places(count: int, share: float, seed: int, step: int) -> set[int]:
    """Which of the `count` prompts of a step get their response from the data set."""
    # a stream of its own: `split_minibatches` draws from [seed, step]
    generator = np.random.Generator(np.random.PCG64([seed, step, 1]))
    places = generator.permutation(count).tolist()
    return set(places[: round(share * count)])


def collect(
    rollouts: Rollouts,
    args: Args,
    responses: Responses | None,
    teacher_prompts: PromptData | None,
    step: int,
    watch: Stopwatch,
) -> list[Episode]:
    """This rank's episodes of a step: sampled ones, scored where their row has a truth, and
    responses of the data set."""
    # 1. data
    num_prompts = args.rollout.prompts_per_step
    prompts = rollouts.draw(num_prompts)
    from_data = data_places(num_prompts, args.data_share, args.run.seed, step)

    # 2. rollout
    with watch("rollout"):
        to_sample = {place: row for place, row in prompts.items() if place not in from_data}
        episodes = rollouts.sample(to_sample, step, watch)

    # 3. rewards
    with watch("reward"):
        with_truth = [e for e in episodes if prompts[e.prompt_index].ground_truth is not None]
        rollouts.score(with_truth, prompts)
    for place, row in prompts.items():
        if place in from_data and not row.problem:
            episodes.append(responses.episode(place, row, args.rollout.max_response_tokens))
    if teacher_prompts is not None:
        indices = [row.index for row in prompts.values()]
        teacher_rows = in_threads(teacher_prompts.usable_row, indices)
        teacher_row_of = dict(zip(prompts, teacher_rows, strict=True))
        kept = []
        for episode in episodes:
            row = teacher_row_of[episode.prompt_index]
            if row.problem and episode.finish_reason == "data":
                continue  # as above, where the student's row has a problem
            episode.teacher_prompt_ids = row.prompt_ids
            if row.problem:
                episode.finish_reason = "unreadable"  # not trained on
            kept.append(episode)
        episodes = kept
    return episodes


def check_args(args: Args) -> None:
    """Refuse what cannot work, or has no effect, before anything is loaded."""
    check_shared(args.data, args.run, args.rollout)
    training = not args.rollout.eval_only
    if training and args.teacher is None and args.teacher_prompt_column is None:
        raise SystemExit(
            "no --teacher: give a model to learn from, or --teacher-prompt-column for the "
            "student's own initial weights with another prompt"
        )
    if args.teacher and not training:
        say(f"--eval-only evaluates the student alone: --teacher {args.teacher} is not read")
    same_temperature = args.teacher_temperature in (None, args.rollout.temperature)
    if args.teacher == args.run.model and not args.teacher_prompt_column and same_temperature:
        say(
            f"warning: --teacher {args.teacher} is --model itself, which has nothing to learn from "
            "it without a --teacher-prompt-column or another --teacher-temperature"
        )
    if args.minibatches > args.rollout.prompts_per_step:
        raise SystemExit(
            f"--minibatches {args.minibatches} of --prompts-per-step "
            f"{args.rollout.prompts_per_step}: a minibatch needs a prompt (groups stay together)"
        )
    if 0 < args.dual_clip <= 1:
        raise SystemExit(
            f"--dual-clip {args.dual_clip}: a bound on the ratio must be above 1 (0 = off)"
        )
    if args.estimator == "sampled" and args.divergence != "reverse-kl":
        raise SystemExit(
            f"--estimator sampled --divergence {args.divergence}: the log-ratio of the sampled "
            "token estimates the reverse KL alone; leave out --estimator sampled"
        )
    if args.estimator == "sampled" and args.data_share:
        raise SystemExit(
            "--estimator sampled --data-share: it takes tokens that the student has sampled; leave "
            "out --estimator sampled"
        )
    if args.data_share and not round(args.data_share * args.rollout.prompts_per_step):
        raise SystemExit(
            f"--data-share {args.data_share:g} of --prompts-per-step "
            f"{args.rollout.prompts_per_step}: less than half a prompt, so none"
        )
    if args.data_share and has_environment_class(args.rollout):
        raise SystemExit(
            "--data-share with a class as --environment: its `reset` makes the prompts"
        )
    if args.teacher_prompt_column and has_environment_class(args.rollout):
        raise SystemExit(
            "--teacher-prompt-column with a class as --environment: its `reset` makes the prompts"
        )
    off_policy = args.minibatches * args.epochs_per_step > 1
    has_clips = args.estimator == "sampled" and off_policy
    needs_of_clips = "--estimator sampled, and several --minibatches or --epochs-per-step"
    # without --train-data it is the embedded demo, which has rows for evaluation
    has_eval_data = bool(args.data.eval_data) or not args.data.train_data
    uses = {  # flag: (whether it has an effect, what it needs for one)
        "jsd_beta": (args.divergence == "jsd", "--divergence jsd"),
        "clip_low": (has_clips, needs_of_clips),
        "clip_high": (has_clips, needs_of_clips),
        "dual_clip": (has_clips, needs_of_clips),
        "response_column": (args.data_share > 0, "a --data-share"),
        "eval_teacher": (
            training and args.teacher is not None and has_eval_data,
            "a --teacher and --eval-data, and no --eval-only",
        ),
        "lr_floor": (args.lr_schedule != "constant", "--lr-schedule linear or cosine"),
    }
    refuse_idle(args, uses)


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
        # for the check of --offload reference with LoRA: there a teacher that is --model itself is
        # the policy's base, not a further model
        has_teacher=args.teacher not in (None, args.run.model),
    )
    world, device = job.world, job.world.device
    check_rollout(job, args.rollout)
    job.check_weights(job.model_folder)  # before the engine fails on missing ones
    teacher_len = args.rollout.max_model_len  # tokens of the longest text that the teacher reads
    if args.teacher_prompt_column:
        # its prompt may hold a solution, as long as a response
        teacher_len += args.rollout.max_response_tokens
    teacher_path = None
    if training:
        teacher_path = find_teacher(job, args.teacher, teacher_len)
    if args.eval_teacher:
        check_same_shapes(job, teacher_path)

    # What samples and scores. The engine comes before the trainer: while it loads, it needs the
    # memory that the trainer would hold.
    data_folder = job.output_dir / "data"
    data = with_embedded_data(
        args.data, args.run.model, data_folder, world, eval_only=args.rollout.eval_only
    )
    engine_group = open_engine_group(args.rollout, args.run)
    tool_pool = open_tools(args.rollout, engine_group)
    train_data, eval_data = open_prompts(job, data, args.rollout, tool_pool, needs_truth=False)
    teacher_prompts = None
    if args.teacher_prompt_column and training:
        teacher_prompts = open_teacher_prompts(
            job, data, args.rollout, tool_pool, args.teacher_prompt_column, train_data
        )
    responses = None
    if args.data_share and training:
        responses = Responses(job, data, train_data, args.response_column)
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
        teacher=teacher_path,
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

    # what is trained, and its teacher
    policy = job.load_policy(model_class=Predictor)
    teacher = None
    if training:
        teacher = job.load_teacher(teacher_path, policy, teacher_len, Predictor)
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
    # one module: if memory runs out, the state of both is reset
    models = nn.ModuleList([policy, teacher])
    # do the largest micro-batches fit?
    rehearsal = Rehearsal(job, packer, args.rollout, [optimizer], teacher=teacher)
    while rehearsal.is_due:
        teacher.to(device)  # as in each update
        with rehearsal.attempt() as minibatch:
            # the rehearsal has packed episodes of the greatest length
            tokens = Tokens.of(packer.episodes, packer.index, device)
            backward(
                models, minibatch, tokens, args, world, first_epoch=True, store_old_logprobs=True
            )
    teacher.to(job.idle_device)
    handle_signals()  # from here on a signal, or Ctrl-C, ends the run after its step, and saves
    updates = args.minibatches * args.epochs_per_step
    print_plan(args.rollout, len(train_data), num_prompts, total_steps, updates)
    accuracy = None
    if start == 0 and args.run.eval_before and rollouts.can_evaluate:
        metrics = rollouts.evaluate(policy, 0)
        accuracy = metrics.get("eval/accuracy")
        logger.log(0, metrics)
    if start == 0 and args.eval_teacher and rollouts.can_evaluate:
        metrics = evaluate_teacher(teacher, rollouts, accuracy)
        logger.event({"event": "teacher", "step": 0, **metrics})
        teacher.to(job.idle_device)
    max_gap = args.rollout.max_logprob_gap or GAP_LIMITS[job.compute_dtype]
    end = start + 1 if args.rollout.replay else total_steps
    # `step` counts from 0 and names the weights that sample; logs and checkpoints count from 1
    for step in profiled(range(start, end), args.run.profile_steps, job.output_dir, world):
        watch = Stopwatch()
        seed_step(args.run.seed, step, world.rank)
        # collected: all episodes of this step; episodes: those of them to train on
        if args.rollout.replay:
            collected, episodes = load_rollouts(args.rollout.replay, step + 1, world, job.limits)
            check_replayed_prompts(episodes, args.rollout.replay, args.teacher_prompt_column)
        else:
            with watch("sync"):
                sync_engine(engine, policy, step)
            # parts 1 to 3 are in `collect`: data, rollout, rewards
            collected = collect(rollouts, args, responses, teacher_prompts, step, watch)
            episodes = [episode for episode in collected if is_usable(episode)]
            sleep_engine(engine, policy)

        # 4. update
        with watch("wait"):  # for ranks that still sample or score
            trained_prompts = prompts_of_all_ranks(episodes)
        split = split_minibatches(episodes, trained_prompts, args.minibatches, args.run.seed, step)
        collected, episodes, split = balance_ranks(
            collected, episodes, split, world, packer.layout.share_prompts
        )
        index = TokenIndex(episodes)
        tokens = Tokens.of(episodes, index, device)
        teacher_episodes = None
        if args.teacher_prompt_column:
            teacher_episodes = with_teacher_prompts(episodes)
        minibatches = packer.minibatches(episodes, index, split, teacher_episodes)
        teacher.to(device)
        if args.estimator == "sampled":
            with watch("logprob"):
                packer.fill(tokens.old_logprobs, policy, minibatches[1:], args.rollout.temperature)
                packer.fill(
                    tokens.teacher_logprobs,
                    teacher,
                    minibatches,
                    args.teacher_temperature or args.rollout.temperature,
                    of_teacher=True,
                )

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
                    models,
                    minibatch,
                    tokens,
                    args,
                    world,
                    first_epoch=epoch == 0,
                    store_old_logprobs=on_policy,
                    scale=optimizer.scale,
                )
                means.merge(update_means)
                if on_policy:
                    # of this minibatch: with --estimator full no other one has old log-probs
                    indices = [batch.token_index for batch in minibatch.micro_batches]
                    minibatch_tokens = tokens[torch.cat(indices).to(device)]
                    sampled_tokens = minibatch_tokens[minibatch_tokens.is_sampled]
                    gap = checked_gap(
                        sampled_tokens.rollout_logprobs,
                        sampled_tokens.old_logprobs,
                        max_gap,
                        step + 1,
                    )
                    means.add("policy/rollout_logprob_gap", gap)
                means.merge(optimizer.step(lr))
        teacher.to(job.idle_device)
        if due(step + 1, args.rollout.dump_rollouts_every):
            store_divergences(episodes, tokens.divergences)
            # numbers, not None: they tell a replay which episodes were trained on
            no_advantages = [0.0] * len(episodes)
            rollouts.dump(step + 1, collected, episodes, no_advantages, packer.budget)

        # 5. log
        sampled = [episode for episode in collected if episode.finish_reason != "data"]
        means.merge(rollout_means(sampled, watch.seconds, with_tools=turns is not None))
        metrics = rollout_metrics(means.reduce()) | {
            "optim/lr": lr,
            "optim/loss_scale": optimizer.scale,
            "data/epoch": loader.epoch,
        }
        # it counts steps without a score, but rows need no truth here
        metrics.pop("reward/unscored_steps", None)

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
        run_ends = is_last or exit_code > 0
        must_save = run_ends or checkpoints.due(step + 1, accuracy)
        if must_save and not args.rollout.replay:
            checkpoints.save(step + 1, accuracy)
        if exit_code and not is_last:
            logger.event({"event": "stopped", "step": step + 1})
            raise SystemExit(exit_code)  # 130 after Ctrl-C, 143 after any other signal

    folder = job.output_dir / "model"
    export_hugging_face(policy, job.tokenizer, folder, world, job.compute_dtype, job.run.model)
    say(f"done: {folder} loads in transformers and vLLM; curves.png is beside it")


if __name__ == "__main__":
    run(main, *parse(Args, DEMO, __doc__, FIRST_SCREEN))

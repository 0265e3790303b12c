"""The largest micro-batches of a run go forward and backward before anything is sampled: the memory
plan is an estimate, this is its proof.

A step that runs out of memory ends a run of several ranks, since the others wait in a collective.
Here all ranks compute the same shapes: they run out at the same place, and can all halve their
micro-batches.
"""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from common.distributed import World, abandon_backward, all_reduce
from common.flags import Rollout
from common.job import Job
from common.limits import exhausted_memory, free_memory
from common.memory.halving import release_memory, remember_budget, same_command
from common.memory.remedies import longest
from common.optimizer import GuardedAdamW
from common.packing import Minibatch, Packer, TokenIndex
from common.pictures import Media, blank
from common.processes import ranks_here
from common.progress import say
from common.types import Episode
from common.vision import Vision

FITS = "fits"
PATIENCE_S = 60.0  # how long a rank that has run out of memory waits for the others' outcomes

_exchanges = itertools.count()  # numbers for the keys of the store


def is_worthwhile(device: torch.device) -> bool:
    """On a CPU a rehearsal would take as long as a step."""
    return device.type == "cuda"


class Rehearsal:
    """The backward of the largest micro-batches, repeated with smaller ones until they fit.

    rehearsal = Rehearsal(job, packer, args.rollout, [optimizer])
    while rehearsal.is_due:
        with rehearsal.attempt() as minibatch:
            ...  # backward of `minibatch`; its episodes are `packer.episodes`, by `packer.index`
    """

    def __init__(
        self,
        job: Job,
        packer: Packer,
        rollout: Rollout,
        optimizers: Sequence[GuardedAdamW],
        teacher: nn.Module | None = None,
    ):
        """rollout: how many prompts and responses a step has, and how long they may be. optimizers:
        of all models that are trained. teacher: a frozen model that takes part.
        """
        self.world = job.world
        self.mesh = job.mesh
        self.plan = job.memory_plan
        self.packer = packer
        self.rollout = rollout
        self.optimizers = optimizers
        self.models = [adamw.model for adamw in optimizers]
        if teacher is not None:
            self.models.append(teacher)
        # the micro-batches of a replayed step are known to fit
        self.is_due = is_worthwhile(job.world.device) and rollout.replay is None
        self.num_attempts = 0
        self.start = time.perf_counter()

    @contextmanager
    def attempt(self) -> Iterator[Minibatch]:
        """Around the backward of a minibatch, whose gradients are dropped. All ranks call it
        together.

        If memory runs out on all ranks, the next attempt has half the tokens in a micro-batch.
        SystemExit if it runs out on some ranks alone, and if one trajectory is too much.
        """
        release_memory()  # now: during the last attempt an exception held its tensors
        minibatch = self._minibatch()
        num_tokens = max(batch.input_ids.numel() for batch in minibatch.micro_batches)
        left_gb = 0.0
        outcome = FITS
        reset_peak(self.world.device)
        try:
            # memory for Adam's moments, which are there at each update but the first
            reserved = [adamw.reserve_moments() for adamw in self.optimizers if not adamw.offload]
            yield minibatch
            for adamw in self.optimizers:
                if adamw.offload:  # its moments are there for the optimizer's step alone
                    adamw.reserve_moments()
            left_gb = left_at_peak_gb(self.world.device)
            del reserved
        except (RuntimeError, MemoryError) as error:
            memory = exhausted_memory(error)
            if not memory:
                raise
            # equal on all ranks only if they have run out at the same place
            outcome = f"out of {memory} after {self._num_collectives()} collectives"
        self._conclude(outcome, num_tokens, left_gb)

    def _minibatch(self) -> Minibatch:
        """Two micro-batches, if a step has enough trajectories: the second finds the gradients of
        the first in memory."""
        share_prompts = self.packer.layout.share_prompts
        # without shared prompts each response has one of its own
        group_size = self.rollout.samples_per_prompt if share_prompts else 1
        num_prompts = math.ceil(self.rollout.prompts_per_step / self.world.size)
        num_left = num_prompts * self.rollout.samples_per_prompt  # this rank's episodes of a step
        episodes: list[Episode] = []
        for _ in range(2):
            # The second micro-batch begins with a new prompt: if the first has only a part of a
            # group, the rest needs its prompt again, as in a pack.
            first_prompt = episodes[-1].prompt_index + 1 if episodes else 0
            batch_episodes = longest_episodes(
                self.rollout,
                range(first_prompt, first_prompt + math.ceil(num_left / group_size)),
                budget=self.packer.budget,
                share_prompts=share_prompts,
                vision=self.packer.vision,
            )[:num_left]
            episodes += batch_episodes
            num_left -= len(batch_episodes)
        index = TokenIndex(episodes)
        (minibatch,) = self.packer.minibatches(episodes, index, [list(range(len(episodes)))])
        return minibatch

    def _conclude(self, outcome: str, num_tokens: int, left_gb: float) -> None:
        """Drop the gradients. If the micro-batches did not fit, halve them. num_tokens: of the
        largest."""
        self.num_attempts += 1
        outcomes = outcomes_of_ranks(outcome, self.world)
        if outcomes == {FITS}:
            for adamw in self.optimizers:
                adamw.optimizer.zero_grad()
            release_memory()
            reset_peak(self.world.device)  # memory/peak_gb is that of the steps
            self.is_due = False
            self._report(num_tokens, left_gb)
            return
        self._halve(num_tokens)
        if len(outcomes) > 1:
            # some ranks may wait in a collective for the others
            differing = ", ".join(sorted(outcomes))
            remedy = same_command(self.packer.budget, self.packer.run_dir)
            raise SystemExit(
                f"the largest micro-batch does not fit on every rank ({differing}): {remedy}"
            )
        for model in self.models:
            abandon_backward(model)

    def _num_collectives(self) -> int:
        """How many collectives this rank has begun on the mesh since its start."""
        count = 0
        for group in self.mesh.get_all_groups():
            backend = group._get_backend(self.world.device)
            count += backend._get_sequence_number_for_group()
        return count

    def _halve(self, num_tokens: int) -> None:
        """Halve the tokens of a micro-batch. SystemExit if it was a single trajectory."""
        one_trajectory = longest(self.rollout)
        budget = min(self.packer.budget, num_tokens)
        if budget <= one_trajectory:
            raise SystemExit(
                f"out of memory before the first step: one trajectory of {one_trajectory} tokens "
                f"does not fit (--micro-batch-tokens {self.packer.budget}); add "
                "--gradient-checkpointing (or, to compiled layers, --activation-memory 0.5) or "
                "--offload optimizer, lower --max-response-tokens (sft.py: --max-tokens) or use "
                "more GPUs"
            )
        self.packer.budget = max(budget // 2, one_trajectory)
        remember_budget(self.packer.budget, self.packer.run_dir)

    def _report(self, num_tokens: int, left_gb: float) -> None:
        (left_gb,) = all_reduce([left_gb], "min")
        free_gb = self.plan.free_gb
        planned_gb = self.plan.update_gb
        text = (
            f"rehearsal: micro-batches of {num_tokens} tokens, the largest of this run, fit "
            f"({time.perf_counter() - self.start:.1f} s); peak {free_gb - left_gb:.1f} GB, planned "
            f"{planned_gb:.1f}; {left_gb:.1f} GB are left, planned {free_gb - planned_gb:.1f}"
        )
        if self.num_attempts > 1:
            text += f"; more did not fit: --micro-batch-tokens is now {self.packer.budget}"
        say(text)


def outcomes_of_ranks(outcome: str, world: World) -> set[str]:
    """The outcomes of all ranks, each once.

    They come through the store: a rank may hang in a collective that another one, out of memory,
    does not enter. The one that is out of memory waits PATIENCE_S for the outcomes of the others;
    one that is missing then is "no answer". A rank that fits has completed its collectives, so no
    other hangs in one: it waits for all outcomes.
    """
    if world.size == 1:
        return {outcome}
    store = dist.distributed_c10d._get_default_store()
    name = f"rehearsal/{next(_exchanges)}"
    store.set(f"{name}/{world.rank}", outcome)
    deadline = math.inf if outcome == FITS else time.monotonic() + PATIENCE_S
    outcomes: set[str] = set()
    for rank in range(world.size):
        key = f"{name}/{rank}"
        while not store.check([key]) and time.monotonic() < deadline:
            time.sleep(0.02)
        outcomes.add(store.get(key).decode() if store.check([key]) else "no answer")
    return outcomes


def left_at_peak_gb(device: torch.device) -> float:
    """Gigabytes that were free when this process had the most memory since `reset_peak`; on a CPU
    this rank's share of those that are free now."""
    if device.type != "cuda":
        return free_memory() / ranks_here() / 1e9
    torch.cuda.synchronize(device)
    free, _ = torch.cuda.mem_get_info(device)
    given_back = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
    return (free - given_back) / 1e9


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def longest_episodes(
    rollout: Rollout,
    prompts: range,
    *,
    budget: int,
    share_prompts: bool,
    vision: Vision | None,
) -> list[Episode]:
    """Episodes of these `prompts` that fill a micro-batch of `budget` tokens, as `pack` would fill
    it: groups of the longest episodes, and a shorter one in what is left. One episode if that is
    longer than the budget.
    """
    room = max(budget, longest(rollout))
    samples_per_prompt = rollout.samples_per_prompt if share_prompts else 1
    episodes: list[Episode] = []
    for prompt_index in prompts:
        if room < 2:  # a prompt and a response have a token each
            break
        prompt_length = min(rollout.max_prompt_tokens, room - 1)
        prompt_ids, prompt_media = with_pictures(prompt_length, rollout.max_images, vision)
        room -= prompt_length
        for sample_index in range(samples_per_prompt):
            length = min(rollout.max_response_tokens, room)
            if length == 0:
                break
            max_images = rollout.max_images - len(prompt_media)
            if not rollout.multi_turn:  # only tools return pictures
                max_images = 0
            # at least the last token is sampled
            response_ids, media = with_pictures(length - 1, max_images, vision)
            num_untrained = sum(m.num_tokens for m in media)
            episodes.append(
                Episode(
                    prompt_index=prompt_index,
                    sample_index=sample_index,
                    prompt_ids=prompt_ids,
                    response_ids=[*response_ids, 0],
                    loss_mask=[0] * num_untrained + [1] * (length - num_untrained),
                    logprobs=[0.0] * length,
                    media=[*prompt_media, *media],
                )
            )
            room -= length
    return episodes


def with_pictures(
    length: int, max_images: int, vision: Vision | None
) -> tuple[list[int], list[Media]]:
    """`length` token ids that begin with pictures, and these pictures: at most `max_images`, each
    as large as --max-pixels and the length allow."""
    media: list[Media] = []
    room = length
    while vision and room > 0 and len(media) < max_images:
        cell = vision.limits.cell
        num_tokens = min(room, vision.limits.max_pixels // cell**2)
        rows = math.isqrt(num_tokens)
        media.append(blank(cell, rows, columns=num_tokens // rows))
        room -= media[-1].num_tokens
    ids = [0] * length
    if vision:
        ids[: length - room] = [vision.placeholders["image"]] * (length - room)
    return ids, media

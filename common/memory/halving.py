"""Smaller micro-batches, after an update has run out of memory."""

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

from common.distributed import World, abandon_backward
from common.files import replace_file
from common.limits import NO_KERNEL, exhausted_memory, free_memory, status_bytes
from common.memory.remedies import STEP
from common.processes import ranks_here, trim_heap
from common.progress import say

# bytes of a rank that an update leaves free: for what follows it, page tables, other programs
RESERVE = 2**28
# the fewest bytes so far of this process's data that were not in memory: about its threads' stacks
_untouched = [2**63]


@contextmanager
def limited_memory(device: torch.device) -> Iterator[None]:
    """On a CPU: whoever takes more than this rank's share of the free memory gets an exception, as
    on a GPU. Otherwise the kernel kills a process that takes the last of it.

    The limit holds for all private data of the process, present data included, as Linux counts it
    since 4.7. The phases of the engine have no limit: it takes what --engine-memory says.
    """
    data = status_bytes("VmData")
    resident = status_bytes("RssAnon")
    if device.type != "cpu" or not resident:  # 0 without Linux's /proc
        yield
        return
    # Data that are not in memory are of two kinds. What malloc has given back is free memory, so
    # the share has it already. The stacks of threads, hardly touched, are not in the share, and
    # are added. At times malloc has given back nearly nothing: the minimum is the stacks alone.
    _untouched[0] = min(_untouched[0], data - resident)
    share = free_memory() // ranks_here() - RESERVE
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [resident + _untouched[0] + share]
    for limit in (soft, hard):
        if limit != resource.RLIM_INFINITY:
            limits.append(limit)
    resource.setrlimit(resource.RLIMIT_DATA, (max(0, min(limits)), hard))
    try:
        yield
    finally:
        # processes that are started later must not inherit it
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def remembered_budget(run_dir: Path, budget: int) -> int:
    """`budget`, or less if an earlier process of this run has halved it."""
    with suppress(OSError, ValueError):  # there is no such file, or it holds no number
        return min(budget, int((run_dir / "micro_batch_tokens").read_text()))
    return budget


def remember_budget(budget: int, run_dir: Path) -> None:
    """Write into the run folder how many tokens a micro-batch now has."""
    with suppress(OSError):  # on a full disk it is forgotten; several ranks may write the same
        run_dir.mkdir(parents=True, exist_ok=True)
        replace_file(run_dir / "micro_batch_tokens", lambda path: path.write_text(str(budget)))


def same_command(budget: int, run_dir: Path) -> str:
    """How to go on with a run that ends because its micro-batches have become smaller."""
    return (
        f"--micro-batch-tokens is now {budget}; the same command with --output-dir {run_dir} goes "
        "on (torchrun --max-restarts 9 repeats it)"
    )


def halve_budget(
    budget: int, model: nn.Module, world: World, run_dir: Path, error: Exception
) -> int:
    """Halve the tokens of a micro-batch, write that into the run folder, and drop the gradients of
    `model`. Returns the new number; SystemExit if it would be less than 128.

    On several ranks SystemExit, since the others are in a collective by now: a restart goes on from
    the last checkpoint in smaller pieces, with the same gradients. The same if `error` says that no
    kernels can be made.
    """
    memory = exhausted_memory(error)
    if budget < 2 * STEP:
        remedy = "or give the machine more memory"
        if memory == "GPU memory":
            remedy = "(or, to compiled layers, --activation-memory 0.5) or use more GPUs"
        raise SystemExit(
            f"out of {memory} in the trainer with {budget} tokens: add "
            f"--gradient-checkpointing {remedy}; then the same command goes on"
        )
    budget //= 2
    remember_budget(budget, run_dir)
    can_repeat = world.size == 1 and not str(error).endswith(NO_KERNEL)
    if not can_repeat:
        raise SystemExit(f"out of {memory} in the trainer: {same_command(budget, run_dir)}")
    say(f"out of {memory}: --micro-batch-tokens is now {budget}, the step is repeated")
    abandon_backward(model)
    return budget


def release_memory() -> None:
    """Free what an attempt has left in the caches of torch and malloc. Call it when the exception
    is gone, and with it the tensors that its frames held."""
    gc.collect()
    torch.cuda.empty_cache()
    trim_heap()

"""When the memory of a rank has not sufficed for an update: smaller pieces."""

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

from common.distributed import World, abandon_backward
from common.files import refuse, replace_file
from common.limits import NO_KERNEL, exhausted_memory, free_memory, status_bytes
from common.processes import ranks_here, trim_heap
from common.progress import say

# bytes for each rank that an update leaves: what follows it, page tables, other programs
RESERVE = 2**28
_untouched = [2**63]  # the fewest bytes that were data, and not in memory


@contextmanager
def limited_memory(device: torch.device) -> Iterator[None]:
    """On a CPU, where the kernel kills who takes the last memory: what does not fit into this
    rank's share of what is free is an exception, as on a GPU.

    The limit is on all private data of the process, what it has now included, as Linux counts it
    since 4.7. The engine's phases have none: it takes what --engine-memory says.
    """
    data = status_bytes("VmData")
    resident = status_bytes("RssAnon")
    if device.type != "cpu" or not resident:
        yield
        return
    # stacks of threads are data that are hardly touched; what malloc has given back are data as
    # well, but free again
    _untouched[0] = min(_untouched[0], data - resident)
    share = free_memory() // ranks_here() - RESERVE
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [resident + _untouched[0] + share]
    for given in (soft, hard):
        if given != resource.RLIM_INFINITY:
            limits.append(given)
    resource.setrlimit(resource.RLIMIT_DATA, (max(0, min(limits)), hard))
    try:
        yield
    finally:
        # what is started later is not to inherit it
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def remembered_budget(run_dir: Path, budget: int) -> int:
    """`budget`, or what `halve_budget` has left of it in an earlier process of this run."""
    with suppress(OSError, ValueError):  # there is no such file, or it is not ours
        return min(budget, int((run_dir / "micro_batch_tokens").read_text()))
    return budget


def halve_budget(
    budget: int, model: nn.Module, world: World, run_dir: Path, error: Exception
) -> int:
    """Half the tokens of a micro-batch, which the run folder remembers; `model` forgets its
    gradients.

    SystemExit on several ranks, since the others are in a collective by now: a restart goes on from
    the last checkpoint in smaller pieces, with the same gradients. So it does where `error` says
    that no kernels can be made.
    """
    budget //= 2
    memory = exhausted_memory(error)
    more = "use more GPUs" if memory == "GPU memory" else "give it more memory"
    remedy = f"add --gradient-checkpointing or {more}; then the same command goes on"
    refuse(budget < 128, f"out of {memory} in the update with {2 * budget} tokens: {remedy}")
    with suppress(OSError):  # on a full disk it is forgotten; several ranks may write the same
        run_dir.mkdir(parents=True, exist_ok=True)
        replace_file(run_dir / "micro_batch_tokens", lambda path: path.write_text(str(budget)))
    remedy = (
        f"the same command with --output-dir {run_dir} goes on (torchrun --max-restarts "
        "9 repeats it)"
    )
    alone = world.size == 1 and not str(error).endswith(NO_KERNEL)
    refuse(
        not alone, f"out of {memory} in the update: --micro-batch-tokens is now {budget}; {remedy}"
    )
    say(f"out of {memory}: --micro-batch-tokens is now {budget}, the step is repeated")
    abandon_backward(model)
    return budget


def release_memory() -> None:
    """Give back what an attempt has left in the caches of torch and malloc, once its exception is
    gone, and with it what that held."""
    gc.collect()
    torch.cuda.empty_cache()
    trim_heap()

"""When the memory of a rank has not sufficed for an update: smaller pieces."""

from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from common.distributed import World, abandon_backward
from common.files import refuse, replace_file


def remembered_budget(run_dir: Path, budget: int) -> int:
    """`budget`, or what `halve_budget` has left of it in an earlier process of this run."""
    with suppress(OSError, ValueError):  # there is no such file, or it is not ours
        return min(budget, int((run_dir / "micro_batch_tokens").read_text()))
    return budget


def halve_budget(budget: int, model: nn.Module, world: World, run_dir: Path) -> int:
    """Half the tokens of a micro-batch, which the run folder remembers; `model` forgets its gradients.

    SystemExit on several ranks, since the others are in a collective by now: a restart goes on from the last
    checkpoint in smaller pieces, with the same gradients.
    """
    budget //= 2
    remedy = "add --gradient-checkpointing or use more GPUs; then the same command goes on"
    refuse(budget < 128, f"out of GPU memory in the update with {2 * budget} tokens: {remedy}")
    with suppress(OSError):  # on a full disk it is forgotten; several ranks may write the same
        run_dir.mkdir(parents=True, exist_ok=True)
        replace_file(run_dir / "micro_batch_tokens", lambda path: path.write_text(str(budget)))
    remedy = f"the same command with --output-dir {run_dir} goes on (torchrun --max-restarts 9 repeats it)"
    refuse(world.size > 1, f"out of GPU memory in the update: --micro-batch-tokens is now {budget}; {remedy}")
    world.print(f"out of GPU memory: --micro-batch-tokens is now {budget}, the step is repeated")
    abandon_backward(model)
    torch.cuda.empty_cache()
    return budget

"""Memory and time of common.logprobs.token_logprobs against log-probs and entropies from all logits
at once.

    # the size of Qwen2.5-0.5B's head, bf16 and fp32
    python tests/bench/logprobs.py
    python tests/bench/logprobs.py --tokens 64 --vocab 5000 --repeats 1

Every measurement is a process of its own, since memory once resident often stays so. Memory is the
peak minus what was resident before the forward (inputs, code), and again minus the gradients, which
somebody has to hold. Each round measures all variants; time ratios are taken within a round, per
token, against the largest dense computation that fits.
"""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import tyro
from report import header, table
from torch import Tensor

from common.limits import free_memory
from common.logprobs import token_logprobs
from common.precision import DTYPES

DENSE_BYTES = 22  # peak of the dense computation per token and vocabulary entry, in float32


@dataclass
class Args:
    tokens: tuple[int, ...] = (2048, 8192)  # trained tokens of a micro-batch
    dtypes: tuple[Literal["bf16", "fp32"], ...] = ("bf16", "fp32")  # of hidden states and head
    vocab: int = 151_936  # rows of the head
    hidden: int = 896  # its columns
    repeats: int = 3  # rounds over all variants
    threads: int = 2  # of a CPU
    # measure one variant in this process, print JSON
    only: Literal["chunked", "dense"] | None = None


def dense(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = (hidden @ weight.T).float().log_softmax(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), -(logprobs.exp() * logprobs).sum(-1)


VARIANTS = {"chunked": token_logprobs, "dense": dense}


class Peak:
    """Bytes by which memory exceeded its present level, from here to `exceeded`."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            # ru_maxrss alone would remember the imports, and the parent
            Path("/proc/self/clear_refs").write_text("5")
        self.before = torch.cuda.memory_allocated() if self.cuda else self._resident("VmRSS")

    def exceeded(self) -> int:
        return (
            torch.cuda.max_memory_allocated() if self.cuda else self._resident("VmHWM")
        ) - self.before

    @staticmethod
    def _resident(key: str) -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition(f"{key}:")[2].split()[0]) * 1024


def measure(args: Args) -> dict[str, float]:
    """Forward alone, then forward and backward: seconds, and MB beyond inputs and gradients."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = {"dtype": DTYPES[args.dtypes[0]], "device": device}
    hidden = torch.empty(args.tokens[0], args.hidden, **options).normal_().requires_grad_()
    weight = torch.empty(args.vocab, args.hidden, **options).normal_(std=0.05).requires_grad_()
    targets = torch.randint(args.vocab, (len(hidden),), device=device)
    upstream = torch.randn(2, len(hidden), device=device)

    def forward(rows: int) -> Tensor:
        return (
            torch.stack(VARIANTS[args.only](hidden[:rows], weight, targets[:rows]))
            * upstream[:, :rows]
        ).sum()

    def timed(what: str, function) -> dict[str, float]:
        peak, start = Peak(device), time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        return {f"{what} s": seconds, f"{what} MB": peak.exceeded() / 1e6}

    forward(8).backward()  # kernels and their scratch memory
    hidden.grad = weight.grad = None
    with torch.no_grad():
        result = timed("forward", lambda: forward(len(hidden)))
    result |= timed("both", lambda: forward(len(hidden)).backward())
    return result | {"gradients MB": (hidden.grad.nbytes + weight.grad.nbytes) / 1e6}


def fits(args: Args, tokens: int) -> bool:
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else free_memory()
    needed = tokens * args.vocab * DENSE_BYTES
    if needed > free:
        print(
            f"dense, {tokens} tokens: left out, needs {needed / 1e9:.0f} GB of "
            f"{free / 1e9:.0f} GB free\n"
        )
    return needed <= free


def in_new_process(args: Args, dtype: str, tokens: int, variant: str) -> dict[str, float]:
    flags = {"only": variant, "tokens": tokens, "dtypes": dtype}
    flags |= {name: getattr(args, name) for name in ("vocab", "hidden", "threads")}
    command = [sys.executable, __file__, *(f"--{name}={value}" for name, value in flags.items())]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main(args: Args) -> None:
    if args.only:
        print(json.dumps(measure(args)))
        return
    header(f"log-probs and entropies, vocabulary {args.vocab}, hidden {args.hidden}", args.threads)
    sizes = {
        "chunked": args.tokens,
        "dense": [tokens for tokens in args.tokens if fits(args, tokens)],
    }
    cases = [
        (d, n, variant)
        for d in args.dtypes
        for n in args.tokens
        for variant in sizes
        if n in sizes[variant]
    ]
    rounds = [{case: in_new_process(args, *case) for case in cases} for _ in range(args.repeats)]

    largest = max(sizes["dense"], default=None)
    rows = [
        ["", "forward: MB", "s", "x dense", "and backward: MB", "without gradients", "s", "x dense"]
    ]
    for dtype, tokens, variant in cases:
        runs = [r[dtype, tokens, variant] for r in rounds]
        cells = [f"{dtype}, {tokens} tokens, {variant}"]
        for what in ("forward", "both"):
            cells.append(f"{median(run[f'{what} MB'] for run in runs):.0f}")
            if what == "both":
                cells.append(f"{median(run['both MB'] - run['gradients MB'] for run in runs):.0f}")
            cells.append(f"{median(run[f'{what} s'] for run in runs):.2f}")
            dense_runs = [r[dtype, largest, "dense"] for r in rounds] if largest else []
            ratios = [
                a[f"{what} s"] / tokens / (b[f"{what} s"] / largest)
                for a, b in zip(runs, dense_runs)
            ]
            cells.append(f"{median(ratios):.2f}" if ratios else "")
        rows.append(cells)
    table(*rows)
    print(
        "Medians. MB: peak beyond the inputs; without gradients: beyond both. x dense: time.\n"
        "Targets for chunked at 8192 tokens: less than 300 MB without gradients, at most 1.3 "
        "x dense."
    )


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

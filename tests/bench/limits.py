"""What the machine can do at a model's shapes, and how much of that one step of grpo.py takes:
step.py --limits.

The limit of a phase is the time of its matrix products alone, at the best rate of a large square
product. Shapes that the machine multiplies at a lower rate (forward, gradient of the input,
gradient of the weights apart) show what of the distance is the library's. Bytes are those that
cannot be avoided: each weight, gradient and moment once.
"""

import gzip
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pyarrow.parquet as pq
import torch
from report import table
from torch import Tensor, nn
from torch.nn.functional import linear

from common.vision import skeleton

LARGE = 4096  # rows and columns of the product that gives the limit
PHASES = ("sync", "rollout", "update")
VERBOSE = "import torch; x = torch.ones(512, 512, dtype=torch.{dtype}); print((x @ x).sum())"


@dataclass
class Shapes:
    """The matrices of a model: how often each [out, in] is multiplied with a token, and the
    head's."""

    layers: Counter
    head: tuple[int, int]
    parameters: int

    @classmethod
    def of(cls, path: str) -> "Shapes":
        model = skeleton(path)
        head = model.get_output_embeddings()
        linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
        parameters = sum(p.numel() for p in model.parameters())
        return cls(
            Counter(tuple(m.weight.shape) for m in linears), tuple(head.weight.shape), parameters
        )

    @property
    def per_token(self) -> int:
        """Multiplications and additions of a token in the layers."""
        return sum(2 * rows * columns * count for (rows, columns), count in self.layers.items())

    @property
    def per_logits(self) -> int:
        return 2 * self.head[0] * self.head[1]


def best(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Seconds of the fastest of some runs, after one that warms up."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def square_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a large square product."""
    a, b = (torch.randn(LARGE, LARGE, device=device).to(dtype) for _ in range(2))
    return 2 * LARGE**3 / best(lambda: a @ b, device)


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy of half a gigabyte."""
    source = torch.zeros(2**27, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best(lambda: target.copy_(source), device)


def shape_rates(
    shape: tuple[int, int], tokens: int, dtype: torch.dtype, device: torch.device
) -> list[float]:
    """FLOP/s of a layer [out, in] at so many tokens: forward, gradient of its input, gradient of
    its weights."""
    weight = torch.randn(shape, device=device).to(dtype)
    inputs, gradient = (
        torch.randn(tokens, size, device=device).to(dtype) for size in reversed(shape)
    )

    def rate(product: Callable[[], Tensor]) -> float:
        return 2 * tokens * shape[0] * shape[1] / best(product, device)

    products = (
        lambda: linear(inputs, weight),
        lambda: gradient @ weight,
        lambda: gradient.T @ inputs,
    )
    return [rate(product) for product in products]


def instructions(dtype: str) -> str:
    """What oneDNN says that it multiplies with."""
    environment = os.environ | {"ONEDNN_VERBOSE": "1"}
    command = [sys.executable, "-c", VERBOSE.format(dtype=dtype)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True).stdout
    found = re.search(r"exec,cpu,matmul,([^,]+),", said)
    return found[1] if found else "not by oneDNN"


def machine_table(path: str, tokens: int, device: torch.device) -> tuple[Shapes, float]:
    """Prints the rates of the machine; returns the model's shapes, and the FLOP/s that count as its
    limit."""
    shapes, limit = Shapes.of(path), square_rate(torch.bfloat16, device)
    print(f"{LARGE} x {LARGE} squared, best of five: bf16 {limit / 1e9:.0f} GFLOP/s,", end=" ")
    print(
        f"fp32 {square_rate(torch.float32, device) / 1e9:.0f}; copy "
        f"{copy_rate(device) / 1e9:.1f} GB/s"
    )
    if device.type == "cpu":
        print(f"oneDNN: bf16 by {instructions('bfloat16')}, fp32 by {instructions('float32')}")
    rows = [
        ["GFLOP/s, bf16", "tokens", "in a model", "forward", "input gradient", "weight gradient"]
    ]
    for shape, count in [*sorted(shapes.layers.items()), (shapes.head, 1)]:
        for batch in (64, tokens):  # of the engine, of the trainer
            rates = shape_rates(shape, batch, torch.bfloat16, device)
            rows.append(
                [
                    f"{shape[0]} x {shape[1]}",
                    str(batch),
                    str(count),
                    *(f"{rate / 1e9:.0f}" for rate in rates),
                ]
            )
    table(*rows)
    return shapes, limit


@dataclass
class Work:
    """What a step has to compute at least: tokens in the layers, and those whose logits are
    wanted."""

    prompts: int  # tokens of distinct prompts
    sampled: int  # and trained on
    longest: int  # response: the engine's steps

    @classmethod
    def of(cls, dump: Path) -> "Work":
        """From a dump of its rollouts."""
        rows = pq.read_table(dump, columns=["prompt_index", "prompt_ids", "loss_mask"]).to_pylist()
        prompts = {row["prompt_index"]: len(row["prompt_ids"]) for row in rows}
        lengths = [sum(row["loss_mask"]) for row in rows]
        return cls(sum(prompts.values()), sum(lengths), max(lengths))

    def flop(self, shapes: Shapes) -> dict[str, float]:
        """By phase. A backward takes twice its forward; to compute something again is no need."""
        layers, logits = shapes.per_token, shapes.per_logits
        forward = (self.prompts + self.sampled) * layers + self.sampled * logits
        return {"rollout": forward, "update": 3 * forward}


def needed_bytes(shapes: Shapes, micro_batches: int, decode_steps: int) -> dict[str, float]:
    """By phase: a sync reads float32 and writes bf16; a token of a batch reads all weights; an
    update reads them in each forward and backward and adds float32 gradients once a micro-batch,
    and Adam reads 16 bytes and writes 12."""
    n = shapes.parameters
    update = n * (micro_batches * (2 + 2 + 8) + 28)
    return {"sync": 6 * n, "rollout": 2 * n * decode_steps, "update": update}


def dearest(trace: Path, phase: str, count: int = 5) -> list[str]:
    """The operations of a phase that take most of it, by themselves: "mm 31 %"."""
    with gzip.open(trace, "rt") as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    spans = [e for e in events if e["name"] == phase]
    total = sum(span["dur"] for span in spans)
    own: Counter = Counter()
    for span in spans:
        begin, end = span["ts"], span["ts"] + span["dur"]
        kinds = ("cpu_op", "kernel", "gpu_memcpy", "gpu_memset")
        inside = [
            e
            for e in events
            if e.get("cat") in kinds and begin <= e["ts"] and e["ts"] + e["dur"] <= end
        ]
        for thread in {e["tid"] for e in inside}:
            own += self_times([e for e in inside if e["tid"] == thread])
    return [
        f"{name.removeprefix('aten::')} {100 * time / total:.0f} %"
        for name, time in own.most_common(count)
    ]


def self_times(events: list[dict]) -> Counter:
    """Microseconds by name, of events of one thread that are nested, without those inside them."""
    own: Counter = Counter()
    stack: list[dict] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
            stack.pop()
        if stack:
            own[stack[-1]["name"]] -= event["dur"]
        own[event["name"]] += event["dur"]
        stack.append(event)
    return own


def step_table(
    records: list[dict],
    work: list[Work],
    shapes: Shapes,
    limit: float,
    trace: Path,
    micro_batch_tokens: int,
) -> None:
    """Prints a step as phases: seconds, share of the limit, bytes, the dearest operations of one
    that was traced."""
    mean = Work(*(round(median(getattr(w, name) for w in work)) for name in vars(work[0])))
    flop = mean.flop(shapes)
    micro_batches = -(-(mean.prompts + mean.sampled) // micro_batch_tokens)
    moved = needed_bytes(shapes, micro_batches, mean.longest)
    rows = [
        [
            "",
            "seconds",
            "TFLOP",
            "share of the limit",
            "GB, at least",
            "dearest operations by themselves",
        ]
    ]
    for phase in PHASES:
        seconds = median(r[f"time/{phase}_s"] for r in records)
        share = f"{100 * flop[phase] / limit / seconds:.0f} %" if phase in flop else "-"
        cells = [
            f"{seconds:.2f}",
            f"{flop.get(phase, 0) / 1e12:.2f}",
            share,
            f"{moved[phase] / 1e9:.1f}",
        ]
        rows.append([phase, *cells, ", ".join(dearest(trace, phase))])
    seconds = median(r["time/step_s"] for r in records)
    total = sum(flop.values())
    share = f"{100 * total / limit / seconds:.0f} %"
    rows.append(
        [
            "step",
            f"{seconds:.2f}",
            f"{total / 1e12:.2f}",
            share,
            f"{sum(moved.values()) / 1e9:.1f}",
            "",
        ]
    )
    table(*rows)

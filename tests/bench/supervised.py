"""Tokens per second of supervised training: sft.py's update against a plain padded loop, over the
same rows.

    # 200 rows, SmolLM2, bf16
    python tests/bench/supervised.py --data ../shared/data/gsm8k/train.parquet
    python tests/bench/supervised.py --data rows.jsonl --model tiny --rows 64

The plain loop: conversations in the order of the file, so many at a time, padded to the longest of
them; logits of all positions, transformers' own loss over the assistant's tokens. Both do forward,
backward and AdamW of the same batches.
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

from common.attention import choose_attention
from common.data.conversations import Conversations
from common.distributed import init_world, make_mesh, wrap_model
from common.hub import load_tokenizer, resolve_model
from common.models import load_model
from common.optimizer import GuardedAdamW
from common.packing import Packer, TokenIndex
from common.precision import DTYPES
from common.script import run
from common.types import Episode
from sft import backward


@dataclass
class Args:
    data: str  # conversations, as for sft.py
    model: str = "smollm2"  # folder, hub id, or an embedded model: tiny, smollm2
    rows: int = 200  # of the file, from its start
    batch_size: int = 40  # conversations of an optimizer step
    padded_rows: int = 8  # conversations side by side in the plain loop
    budget: int = 2048  # tokens of a packed micro-batch
    max_tokens: int = 1024  # longest conversation
    dtype: Literal["bf16", "fp32"] = "bf16"  # of the computation; weights are float32
    repeats: int = 3  # rounds over both
    threads: int = 2  # of a CPU
    # one of the two, in this process: what the benchmark itself calls
    only: Literal["padded", "packed"] | None = None


def padded(episodes: list[Episode], device: torch.device) -> dict[str, torch.Tensor]:
    """input_ids, attention_mask and labels [rows, longest]; -100 is not trained on."""
    longest = max(len(e.prompt_ids) + len(e.response_ids) for e in episodes)
    columns = {"input_ids": [], "attention_mask": [], "labels": []}
    for e in episodes:
        ids = e.prompt_ids + e.response_ids
        labels = [-100] * len(e.prompt_ids) + [
            i if m else -100 for i, m in zip(e.response_ids, e.loss_mask)
        ]
        for name, row, fill in zip(columns, (ids, [1] * len(ids), labels), (0, 0, -100)):
            columns[name].append(row + [fill] * (longest - len(row)))
    return {name: torch.tensor(rows, device=device) for name, rows in columns.items()}


class Plain:
    """The loop that one would write first."""

    def __init__(self, args: Args, device: torch.device):
        self.args, self.device = args, device
        self.model = load_model(resolve_model(args.model), "sdpa").model.to(device)
        self.model.set_attn_implementation("sdpa")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)

    def step(self, episodes: list[Episode]) -> float:
        """Mean of -log p over the trained tokens of the batch."""
        rows, total = self.args.padded_rows, 0.0
        count = len(TokenIndex(episodes))
        for start in range(0, len(episodes), rows):
            batch = padded(episodes[start : start + rows], self.device)
            with torch.autocast(
                self.device.type, DTYPES[self.args.dtype], enabled=self.args.dtype != "fp32"
            ):
                loss = self.model(**batch, num_items_in_batch=count, use_cache=False).loss
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


class Packed:
    """sft.py's own functions."""

    def __init__(self, args: Args, world):
        attention = choose_attention("auto", world.device)
        policy = load_model(resolve_model(args.model), attention)
        self.world, self.packer = world, Packer(attention, args.budget, Path("nowhere"), world)
        self.model = wrap_model(policy, make_mesh(world, "fsdp"), DTYPES[args.dtype])
        self.optimizer = GuardedAdamW(
            self.model, DTYPES[args.dtype], weight_decay=0.01, max_grad_norm=1.0
        )

    def step(self, episodes: list[Episode]) -> float:
        (minibatch,) = self.packer.minibatches(
            episodes, TokenIndex(episodes), [list(range(len(episodes)))]
        )
        means = backward(self.model, minibatch, self.world)
        means.merge(self.optimizer.step(1e-6))
        return means.reduce()["policy/loss"]


def measure(args: Args) -> None:
    """Print {seconds, losses, tokens} of one pass of `--only` over the rows, as JSON."""
    torch.set_num_threads(args.threads)
    tokenizer = load_tokenizer(resolve_model(args.model))
    data = Conversations(args.data, "--data", tokenizer, max_tokens=args.max_tokens)
    episodes = [data.episodes(row)[0] for row in range(min(args.rows, len(data)))]
    if args.only == "packed":
        loop = Packed(args, init_world())
    else:  # with the allocator as it comes: `init_world` tunes it for packs, which are all alike
        loop = Plain(args, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    steps = [episodes[i : i + args.batch_size] for i in range(0, len(episodes), args.batch_size)]
    loop.step(steps[0][: args.padded_rows])  # warm-up
    start = time.perf_counter()
    losses = [loop.step(step) for step in steps]  # .item() of the losses waits for the device
    seconds = time.perf_counter() - start
    tokens = sum(len(e.prompt_ids) + len(e.response_ids) for e in episodes)
    print(
        json.dumps({"seconds": seconds, "losses": losses, "tokens": tokens, "rows": len(episodes)})
    )


def main(args: Args) -> None:
    if args.only:
        measure(args)
        return
    seconds: dict[str, list[float]] = {"padded": [], "packed": []}
    for _ in range(args.repeats):
        results = {}
        for name in seconds:
            command = [sys.executable, *sys.argv, "--only", name]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            results[name] = json.loads(output.strip().splitlines()[-1])
            seconds[name].append(results[name]["seconds"])
        losses = (results[name]["losses"] for name in seconds)
        worst = max(abs(a / b - 1) for a, b in zip(*losses))
        assert worst < 0.02, f"the two do not compute the same loss: {results}"

    result, title = (
        results["packed"],
        f"supervised training of {args.model}: {Path(args.data).name}",
    )
    header(f"{title}, {result['rows']} rows, {args.batch_size} a step, {args.dtype}", args.threads)
    rows = [["loop", "tokens/s", "x padded"]]
    for name, times in seconds.items():
        ratio = median(b / a for a, b in zip(times, seconds["padded"]))
        rows.append([name, f"{result['tokens'] / median(times):,.0f}", f"{ratio:.2f}"])
    table(*rows)
    print(
        f"{result['tokens']} tokens without padding; medians of {args.repeats} rounds that "
        "take turns"
    )


if __name__ == "__main__":
    run(main, tyro.cli(Args, description=__doc__))

"""Seconds of one update (forward and backward of the policy) for the same episodes, laid out in
different ways.

    python tests/bench/packing.py                                                    # SmolLM2, bf16
    python tests/bench/packing.py --model tiny --prompts 32 --prompt-tokens 20 --response-tokens 60
    120 --budget 4096
    python tests/bench/packing.py --fill    # without a model: how full micro-batches are

padded: every sequence is filled up to the longest, as in a rectangular batch. packed: sequences one
behind the other, each with its prompt. shared: the prompt of a group once, followed by its
responses. Attention is the same in all three, segment by segment. Episodes are random, so are their
tokens.
"""

import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import tyro
from report import header, table

from common.attention import choose_attention
from common.distributed import forward_context, init_world, make_mesh, wrap_model
from common.hub import resolve_model
from common.models import load_model
from common.packing import (
    Layout,
    MicroBatch,
    Packer,
    TokenIndex,
    _bins_of_groups,
    _fill_bins,
    _groups,
    pack,
)
from common.precision import DTYPES
from common.script import run
from common.types import Episode


@dataclass
class Args:
    model: str = "smollm2"  # folder, hub id, or an embedded model: tiny, smollm2
    prompts: int = 8  # groups
    samples: int = 8  # responses of a group
    prompt_tokens: int = 140  # of every prompt
    # shortest and longest response; uniform between them
    response_tokens: tuple[int, int] = (30, 128)
    budget: int = 2048  # tokens of a micro-batch
    dtype: Literal["bf16", "fp32"] = "bf16"  # of the computation; weights are float32
    repeats: int = 5  # rounds over all layouts
    threads: int = 2  # of a CPU
    seed: int = 0  # of the episodes
    fill: bool = False  # how full micro-batches are, for groups of several shapes


# groups, responses of each, tokens of a prompt, shortest and longest response, tokens of a
# micro-batch
FILL_SHAPES = [
    (64, 8, 256, (1024, 1024), 16_384),
    (16, 8, 256, (768, 768), 8192),  # of gpu.py
    (16, 8, 256, (768, 768), 16_384),
    (64, 8, 200, (100, 2048), 8192),
    (64, 8, 200, (100, 2048), 16_384),
    (32, 16, 300, (500, 4096), 16_384),
    (128, 8, 150, (50, 400), 16_384),
    (32, 8, 2000, (100, 1000), 16_384),
]


def print_fill(args: Args) -> None:
    """Groups that fit stay whole, and as `pack` has them: some are cut, and repeat their prompt."""
    rows = [["groups", "budget", "whole", "full", "as packed", "full", "tokens", "ms"]]
    for prompts, samples, prompt_tokens, response_tokens, budget in FILL_SHAPES:
        shape = replace(
            args,
            prompts=prompts,
            samples=samples,
            prompt_tokens=prompt_tokens,
            response_tokens=response_tokens,
        )
        episodes = random_episodes(shape, vocab=10)
        groups = _groups(episodes, range(len(episodes)), share_prompts=True)
        whole = _fill_bins(episodes, groups, budget, may_cut=False)
        start = time.perf_counter()
        packed = _bins_of_groups(episodes, groups, budget)
        milliseconds = 1e3 * (time.perf_counter() - start)
        shortest, longest = response_tokens
        tokens = [
            sum(group.num_tokens for bin_ in bins for group in bin_) for bins in (whole, packed)
        ]
        rows.append(
            [
                f"{prompts} x ({prompt_tokens} + {samples} x {shortest}-{longest})",
                str(budget),
                str(len(whole)),
                f"{tokens[0] / len(whole) / budget:.0%}",
                str(len(packed)),
                f"{tokens[1] / len(packed) / budget:.0%}",
                f"{tokens[1] / tokens[0] - 1:+.1%}",
                f"{milliseconds:.0f}",
            ]
        )
    header("micro-batches, and how full they are", args.threads)
    table(*rows)
    print("tokens: more of them, of repeated prompts. ms: to decide what goes where")


def random_episodes(args: Args, vocab: int) -> list[Episode]:
    rng = random.Random(args.seed)
    episodes = []
    for p in range(args.prompts):
        prompt = rng.choices(range(vocab), k=args.prompt_tokens)
        for s in range(args.samples):
            response = rng.choices(range(vocab), k=rng.randint(*args.response_tokens))
            episodes.append(
                Episode(
                    p, s, prompt, response, [1] * len(response), [0.0] * len(response), "stop", {}
                )
            )
    return episodes


def layouts(args: Args, episodes: list[Episode], packer: Packer) -> dict[str, list[MicroBatch]]:
    index, selected = TokenIndex(episodes), range(len(episodes))
    shared = pack(episodes, selected, index, budget=args.budget, layout=packer.layout)
    unshared = pack(
        episodes,
        selected,
        index,
        budget=args.budget,
        layout=replace(packer.layout, share_prompts=False),
    )
    longest = args.prompt_tokens + max(len(e.response_ids) for e in episodes)
    padded = Layout(multiple=longest)
    alone = [pack(episodes, [i], index, budget=args.budget, layout=padded)[0] for i in selected]
    count = max(1, args.budget // longest)
    return {
        "padded": [side_by_side(alone[i : i + count]) for i in selected[::count]],
        "packed": unshared,
        "shared": shared,
    }


def side_by_side(batches: list[MicroBatch]) -> MicroBatch:
    """One micro-batch out of several of the same length."""
    width = batches[0].input_ids.shape[1]
    return MicroBatch(
        torch.cat([b.input_ids for b in batches], 1),
        torch.cat([b.position_ids for b in batches], 1),
        torch.cat([i * width + b.hidden_index for i, b in enumerate(batches)]),
        torch.cat([b.targets for b in batches]),
        torch.cat([b.token_index for b in batches]),
        batches[0].slots,
        batches[0].feature_index,
        [],
        [unit for b in batches for unit in b.units],
    )


def update(
    policy: torch.nn.Module, batches: list[MicroBatch], device: torch.device
) -> tuple[float, float]:
    """Seconds of forward and backward over all micro-batches, and the sum of log-probs: the same
    for every layout."""
    total, start = torch.zeros((), device=device), time.perf_counter()
    for i, batch in enumerate(batches):
        with forward_context(policy, last=i == len(batches) - 1):
            logprobs = policy(batch.to(device))[0].sum()
            logprobs.backward()
        total += logprobs.detach()
    total = total.item()  # waits for the device
    seconds = time.perf_counter() - start
    policy.zero_grad()
    return seconds, total


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    if args.fill:
        print_fill(args)
        return
    world = init_world()
    attention = choose_attention("auto", world.device)
    policy = load_model(resolve_model(args.model), attention)
    episodes = random_episodes(args, policy.model.config.vocab_size)
    policy = wrap_model(policy, make_mesh(world, "fsdp"), DTYPES[args.dtype])
    batches = layouts(args, episodes, Packer(attention, args.budget, Path("nowhere"), world))

    seconds: dict[str, list[float]] = {name: [] for name in batches}
    for repeat in range(-1, args.repeats):  # the first round warms up
        sums = {}
        for name in batches:
            taken, sums[name] = update(policy, batches[name], world.device)
            if repeat >= 0:
                seconds[name].append(taken)
        wrong = {name: x for name, x in sums.items() if abs(x / sums["padded"] - 1) > 0.01}
        assert not wrong, f"log-probs summed to {sums['padded']} when padded, but {wrong}"

    low, high = args.response_tokens
    title = (
        f"update of {args.model}: {args.prompts} prompts of {args.prompt_tokens} tokens x "
        f"{args.samples} responses"
    )
    title += f" of {low}-{high}, budget {args.budget}, {attention}, {args.dtype}"
    header(title, args.threads)
    rows = [["layout", "micro-batches", "tokens computed", "seconds", "x padded"]]
    for name, times in seconds.items():
        computed = sum(b.input_ids.numel() for b in batches[name])
        ratio = median(a / b for a, b in zip(times, seconds["padded"]))
        rows.append(
            [name, str(len(batches[name])), str(computed), f"{median(times):.3f}", f"{ratio:.2f}"]
        )
    table(*rows)
    print(f"medians of {args.repeats} interleaved rounds; ratios are taken within a round")


if __name__ == "__main__":
    run(main, tyro.cli(Args, description=__doc__))

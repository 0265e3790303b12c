"""Tokens of ranks in an update, dealt in turn and after `balance_ranks`: on drawn lengths.

python tests/bench/balance.py --ranks 8 --prompts 128 --samples 8 --mean 7300 --max 16384
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.balance import Group, rank_of_prompts


@dataclass
class Args:
    ranks: int = 8
    prompts: int = 128  # of a step
    samples: int = 8  # of each prompt
    mean: float = 7300  # tokens of a response; lengths are lognormal, those of a group correlated
    spread: float = 0.8  # standard deviation of the logarithm
    alike: float = 0.5  # share of its variance that is the prompt's
    max: int = 16_384  # longest response
    minibatches: int = 1
    steps: int = 200  # draws


def main(args: Args) -> None:
    rng = np.random.default_rng(0)
    excess: dict[str, list[float]] = {"in turn": [], "balanced": []}
    for _ in range(args.steps):
        of_prompt = rng.normal(0, args.spread * args.alike**0.5, (args.prompts, 1))
        of_sample = rng.normal(
            0, args.spread * (1 - args.alike) ** 0.5, (args.prompts, args.samples)
        )
        lengths = np.exp(np.log(args.mean) - args.spread**2 / 2 + of_prompt + of_sample)
        sizes = np.minimum(lengths, args.max).astype(int).sum(axis=1).tolist()
        groups = [Group(p, p * args.minibatches // args.prompts, n) for p, n in enumerate(sizes)]
        in_turn = {p: p % args.ranks for p in range(args.prompts)}
        for name, ranks in (
            ("in turn", in_turn),
            ("balanced", rank_of_prompts(groups, args.ranks)),
        ):
            loads = np.zeros((args.minibatches, args.ranks))
            for group in groups:
                loads[group.minibatch, ranks[group.prompt]] += group.tokens
            # an update lasts as long as the fullest rank of each of its minibatches
            excess[name].append(loads.max(axis=1).sum() / loads.mean(axis=1).sum() - 1)
    print(f"tokens of the fullest rank above the mean, over {args.steps} drawn steps:")
    for name, shares in excess.items():
        print(f"{name:9} median {np.median(shares):6.2%}  worst {max(shares):6.2%}")


if __name__ == "__main__":
    main(tyro.cli(Args))

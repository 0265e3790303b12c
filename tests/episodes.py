"""Episodes that no engine has sampled."""

import random

from common.types import Episode


def random_episodes(
    seed: int, prompts: int = 3, samples: int = 4, vocab: int = 97
) -> list[Episode]:
    """Groups of ragged episodes; some tokens in the middle are observations, and one episode trains
    nothing."""
    rng = random.Random(seed)
    episodes = []
    for p in range(prompts):
        prompt = [rng.randrange(3, vocab) for _ in range(rng.randint(2, 9))]
        for s in range(samples):
            length = rng.randint(1, 14)
            mask = [int(rng.random() > 0.25) for _ in range(length)]
            if p == s == 1:
                mask = [0] * length
            ids = [rng.randrange(3, vocab) for _ in range(length)]
            logprobs = [-rng.random() * m for m in mask]
            episodes.append(
                Episode(
                    p, s, prompt, ids, mask, logprobs, "stop", {"score": float(rng.random() < 0.4)}
                )
            )
    return episodes


UNEQUAL = {
    1: (1.0, 0.0, 0.0),
    4: (2.0, 0.0, 0.0),
    5: (0.0, 1.0, 1.0),
    7: (0.5, 0.5, 0.0),
    8: (2.0, 0.0, 0.0),
}


def group(prompt: int, scores=None, calls=()) -> list[Episode]:
    scores = scores or UNEQUAL.get(prompt, (1.0, 1.0, 1.0))
    return [
        Episode(
            prompt, i, [1], [2], [1], [0.0], "stop", {"score": score}, calls=list(calls), turns=2
        )
        for i, score in enumerate(scores)
    ]


def call(error: bool = False, turn: int = 0, **info) -> dict:
    return {"error": error, "info": info, "turn": turn}

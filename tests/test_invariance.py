"""The gradient is the same however a batch is split: ranks, FSDP2 or DDP, micro-batches, packing,
an empty rank."""

import json

import pytest
from helpers import ROOT, run_script

WORKER = ROOT / "tests" / "workers" / "gradients.py"
BOUNDS = {"float64": 1e-10, "float32": 1e-5}


CASES = [
    ("float64", 2, ["--pairs"]),
    ("float64", 2, ["--lora", "--budgets", 45, "--variants", "grpo", "critic"]),
]
SLOW = [(dtype, ranks, more) for dtype in BOUNDS for ranks in (1, 2) for more in ([], ["--lora"])]
SLOW += [("float64", 4, [*more, "--shard-sizes", 1, 2, 4]) for more in ([], ["--lora"])]


@pytest.mark.parametrize(
    "dtype, ranks, more", [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_gradient_is_independent_of_the_split(dtype, ranks, more, tmp_path):
    """By default a quarter of the combinations (any two settings meet), and some with adapters."""
    models = [option for option in more if option not in ("--pairs", "--shard-sizes", 1, 2, 4)]
    run_script(WORKER, "--folder", tmp_path, "--dtype", dtype, "--single", *models)
    done = run_script(WORKER, "--folder", tmp_path, "--dtype", dtype, *more, ranks=ranks)
    distances = json.loads(done.stdout.strip().splitlines()[-1])
    strategies = 4 if ranks == 4 else 2
    everything = strategies * 2 * 2 * 5 * 7
    some = (
        everything // 4
        if "--pairs" in more
        else 2 * 2 * 5 * 2
        if "--variants" in more
        else everything
    )
    assert len(distances) == some
    worst = max(distances, key=distances.get)
    assert distances[worst] < BOUNDS[dtype], f"{worst}: {distances[worst]:.2g}"

"""The gradient is the same however a batch is split: ranks, FSDP2 or DDP, micro-batches, packing, an empty rank."""

import json

import pytest
from helpers import ROOT, run_script

WORKER = ROOT / "tests" / "workers" / "gradients.py"
BOUNDS = {"float64": 1e-10, "float32": 1e-5}


SLOW = [("float64", 1), ("float64", 2), ("float32", 1), ("float32", 2)]


@pytest.mark.parametrize(
    "dtype, ranks, pairs",
    [("float64", 2, ["--pairs"]), *(pytest.param(*case, [], marks=pytest.mark.slow) for case in SLOW)],
)
def test_gradient_is_independent_of_the_split(dtype, ranks, pairs, tmp_path):
    """By default a quarter of the combinations: any two settings meet."""
    run_script(WORKER, "--folder", tmp_path, "--dtype", dtype, "--single")
    done = run_script(WORKER, "--folder", tmp_path, "--dtype", dtype, *pairs, ranks=ranks)
    distances = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(distances) == 2 * 2 * 2 * 5 * 7 // (4 if pairs else 1)
    worst = max(distances, key=distances.get)
    assert distances[worst] < BOUNDS[dtype], f"{worst}: {distances[worst]:.2g}"

"""The gradient is the same however a batch is split: ranks, FSDP2 or DDP, micro-batches, packing, an empty rank."""

import json

import pytest
from conftest import ROOT, run_script

WORKER = ROOT / "tests" / "workers" / "gradients.py"
BOUNDS = {"float64": 1e-10, "float32": 1e-5}


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
def test_gradient_is_independent_of_the_split(dtype, tmp_path):
    run_script(WORKER, "--folder", tmp_path, "--dtype", dtype, "--single")
    done = run_script(WORKER, "--folder", tmp_path, "--dtype", dtype, ranks=2)
    distances = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(distances) == 2 * 2 * (2 * 2 + 1) * 5
    worst = max(distances, key=distances.get)
    assert distances[worst] < BOUNDS[dtype], f"{worst}: {distances[worst]:.2g}"

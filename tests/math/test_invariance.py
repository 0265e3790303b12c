"""The gradient is the same however a batch is split: ranks, FSDP2 or DDP, micro-batches, packing,
an empty rank."""

import json

import pytest
from helpers import ROOT, run_script

WORKER = ROOT / "tests" / "workers" / "gradients.py"
BOUNDS = {"float64": 1e-10, "float32": 1e-5}


# cispo and the sampled divergence have losses of their own, but no other sums
SEVEN = ["dapo", "grpo", "dr_grpo", "gspo", "ppo", "critic", "jsd"]
CASES = [("float64", 2, ["--pairs", "--variants", *SEVEN])]
SLOW = [
    ("float64", 2, ["--pairs"]),
    ("float64", 2, ["--lora", "--pairs", "--variants", "dapo", "grpo"]),
    ("float64", 4, ["--shard-sizes", 1, 2, 4]),
    ("float64", 4, ["--lora", "--shard-sizes", 1, 2, 4]),
]
for dtype in BOUNDS:
    for ranks in (1, 2):
        SLOW.append((dtype, ranks, []))
        SLOW.append((dtype, ranks, ["--lora"]))


@pytest.mark.parametrize(
    "dtype, ranks, options",
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_gradient_is_independent_of_the_split(dtype, ranks, options, tmp_path):
    """With --pairs an eighth of the combinations: any two settings meet."""
    several = ("--pairs", "--shard-sizes", 1, 2, 4)  # options that a single process does not have
    models = [option for option in options if option not in several]
    run_script(WORKER, "--folder", tmp_path, "--dtype", dtype, "--single", *models)
    done = run_script(WORKER, "--folder", tmp_path, "--dtype", dtype, *options, ranks=ranks)
    distances = json.loads(done.stdout.strip().splitlines()[-1])
    strategies = 4 if ranks == 4 else 2
    num_variants = len(options) - options.index("--variants") - 1 if "--variants" in options else 9
    num_splits = 5 if "--pairs" in options else strategies * 2 * 2 * 5
    assert len(distances) == num_splits * num_variants
    worst = max(distances, key=distances.get)
    assert distances[worst] < BOUNDS[dtype], f"{worst}: {distances[worst]:.2g}"

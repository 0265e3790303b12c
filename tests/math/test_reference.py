"""The definitions as a fork uses them: the example of reference.py runs, and sees what is wrong."""

import textwrap

import pytest
import reference
from helpers import make_args

import grpo
import ppo

LINES = [line for line in reference.__doc__.splitlines() if line.startswith("    ") or not line]
CODE = textwrap.dedent("\n".join(LINES))


def run_example(code: str) -> None:
    names: dict = {}
    exec(code, names)
    (test,) = [value for name, value in names.items() if name.startswith("test_")]
    test()


def test_the_example_runs():
    run_example(CODE)


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("min(ratio,", "max(ratio,"),
        ("return -advantage", "return advantage"),
        ("weight * logprob, -advantage", "weight * logprob, -2 * advantage"),
        ("weight != ratio", "weight == ratio"),
        ('"cispo"', '"ppo"'),
        ("clip_low=1.0", "clip_low=0.2"),
        ("args, truncated)", "args, truncated, of_sequence=True)"),
    ],
)
def test_the_example_can_fail(right, wrong):
    assert CODE.count(right) == 1
    with pytest.raises(AssertionError):
        run_example(CODE.replace(right, wrong))


@pytest.mark.parametrize("correction", ["none", "truncate", "mask", "sequence"])
@pytest.mark.parametrize("objective", ["ppo", "gspo", "cispo"])
def test_grpos_loss_is_its_definition(objective, correction):
    options = {"objective": objective, "correction": correction, "correction_range": (0.8, 1.3)}
    for estimator in ("k2", "k3", "k3-is"):
        kl = {"kl_loss_coef": 0.3, "kl_estimator": estimator, "entropy_coef": 0.1}
        args = make_args(grpo, clip_high=0.28, dual_clip=3.0, **options, **kl)
        reference.check_policy_loss(grpo, args)


def test_ppos_loss_is_its_definition():
    options = {"correction": "mask", "correction_range": (0.8, 1.3), "entropy_coef": 0.1}
    reference.check_policy_loss(ppo, make_args(ppo, clip_high=0.28, dual_clip=3.0, **options))

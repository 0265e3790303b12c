"""The arithmetic of tests/bench: peaks of cards, MFU in three conventions, seconds on paper."""

import importlib

import pytest
from helpers import ROOT


@pytest.fixture
def bench(monkeypatch):
    """Imports a module of tests/bench."""
    monkeypatch.syspath_prepend(ROOT / "tests/bench")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # which the benchmarks extend
    return importlib.import_module


@pytest.fixture
def roofline(bench):
    return bench("roofline")


@pytest.mark.parametrize(
    "card, teraflops",
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H800", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA GeForce RTX 4090", 165),
        ("Tesla V100-SXM2-32GB", None),
    ],
)
def test_peaks_are_those_of_the_board(roofline, card, teraflops):
    assert roofline.peak_flops(card) == (teraflops and teraflops * 1e12)


@pytest.mark.parametrize(
    "name, checkpointing, seen, ours, torchtitan, verl",
    [
        # 4.0254e14 of the layers, 0.6882e14 of the head, 0.1638e14 of attention
        ("1.5B", False, 49_152 / 30_967, 4.8774e14, 31.9, 35.9),
        ("3B", True, 49_152 / 15_102, 9.7226e14, 30.9, 33.3),
    ],
)
def test_the_two_measured_updates(roofline, name, checkpointing, seen, ours, torchtitan, verl):
    """Of results/h100: by hand, and on paper within a hundredth."""
    update = roofline.Update(
        roofline.Model.named(name), roofline.PACK, 4, checkpointing=checkpointing
    )
    assert update.flops() == pytest.approx(ours, rel=1e-4)
    peak = roofline.peak_flops("NVIDIA H100 80GB HBM3")
    for convention, percent in (("torchtitan", torchtitan), ("verl", verl)):
        assert 100 * update.flops(convention) / seen / peak == pytest.approx(percent, abs=0.1)
    assert roofline.as_measured(update).seconds == pytest.approx(seen, rel=0.01)


def test_the_check_that_was_not_fitted(roofline):
    """16,384 tokens through the head of 7B took 0.233 s: 11 % more than on paper."""
    model = roofline.Model.named("7B")
    unit = (1, 16_384)
    update = roofline.as_measured(roofline.Update(model, (unit,)))
    parts = update.seconds_by_part()
    head = parts["products of the head"] + parts["pointwise kernels of the head"]
    assert head == pytest.approx(0.233 / 1.11, rel=0.02)


def test_goals_are_within_reach_on_paper(roofline):
    peak = roofline.peak_flops("H100")
    on_paper = {name: 100 * update.mfu(peak) for name, update in roofline.UPDATES.items()}
    assert on_paper == pytest.approx(
        {"1.5B, compiled": 38.5, "7Bx8, compiled": 46.5, "7B, compiled, 8 GPUs": 50.9}, abs=0.1
    )
    assert on_paper.keys() == roofline.GOALS.keys()
    assert all(on_paper[name] > goal for name, goal in roofline.GOALS.items())


def test_seven_billion_on_eight_cards_by_eight_layers(roofline, bench):
    """If one card shows of 7Bx8, and of the head, what they take on paper, so do eight of 7B."""
    update = roofline.UPDATES["7Bx8, compiled"]
    parts = update.seconds_by_part()
    head = parts["products of the head"] + parts["pointwise kernels of the head"]
    trained = update.micro_batches * update.num_trained
    percent = bench("gpu").mfu_on_eight(
        {"s": update.seconds, "trained tokens/s": trained / update.seconds},
        head / trained,
        roofline.peak_flops("H100"),
    )
    assert percent == pytest.approx(50.9, abs=0.1)

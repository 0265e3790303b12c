"""Retention and pointers of checkpoints; exactness of a resume is tested by the scripts' own runs."""

import shutil

import pytest
import torch
from torch import nn

from common.checkpoint import checkpoint_bytes, find_checkpoint, load_checkpoint, save_checkpoint


def trained(seed: int):
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {"policy": (model, optimizer)}


def save(folder, step, world, keep=1, best=False, seed=0):
    save_checkpoint(folder / "checkpoints", step, trained(seed), {"best": 0.5}, world, keep=keep, best=best)


def test_round_trip_restores_weights_moments_and_random_state(tmp_path, world):
    before = trained(1)
    save_checkpoint(tmp_path / "checkpoints", 7, before, {"best": None, "loader": {"consumed": 9}}, world, keep=1)
    expected = torch.rand(3)
    after = trained(2)
    state = load_checkpoint(find_checkpoint(tmp_path, "auto", world), after, world)
    assert torch.equal(torch.rand(3), expected)
    assert state["step"] == 7 and state["loader"] == {"consumed": 9} and state["best"] is None
    for a, b in zip(before["policy"][0].parameters(), after["policy"][0].parameters()):
        assert torch.equal(a, b)
    moments = [[s["exp_avg"] for s in t["policy"][1].state.values()] for t in (before, after)]
    assert all(torch.equal(a, b) for a, b in zip(*moments))


def test_a_save_before_the_first_update_does_not_change_it(tmp_path, world):
    """torch's helper takes a step to make Adam's moments; counted, it would shrink all updates that follow."""

    def three_updates(saved: bool) -> torch.Tensor:
        torch.manual_seed(3)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if saved:
            both = {"policy": (model, optimizer)}
            save_checkpoint(tmp_path / "checkpoints", 1, both, {}, world, keep=1)
            load_checkpoint(tmp_path / "checkpoints" / "step_000001", both, world)
        for scale in (1.0, 5.0, 0.1):
            (scale * model(torch.ones(2, 4))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach().clone()

    assert torch.equal(three_updates(saved=True), three_updates(saved=False))


def test_frozen_weights_have_no_moments_to_save():
    model = nn.Linear(4, 3)
    model.bias.requires_grad_(False)
    assert checkpoint_bytes({"policy": (model, None)}) == 4 * (3 * 12 + 3)


def test_the_newest_and_the_best_are_kept(tmp_path, world):
    for step in (10, 20, 30, 40):
        save(tmp_path, step, world, keep=2, best=step == 10)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    assert kept == ["step_000010", "step_000030", "step_000040"]


def test_an_old_checkpoint_that_cannot_be_removed_is_no_failed_save(tmp_path, world, monkeypatch):
    save(tmp_path, 10, world)
    remove = shutil.rmtree

    def refuse(path, ignore_errors=False):
        if path.name != "step_000010":
            remove(path, ignore_errors)
        elif not ignore_errors:
            raise OSError("Directory not empty")

    monkeypatch.setattr("common.checkpoint.shutil.rmtree", refuse)
    assert save_checkpoint(tmp_path / "checkpoints", 20, trained(0), {}, world, keep=1, best=True)
    assert (tmp_path / "checkpoints" / "best").read_text() == "step_000020"
    monkeypatch.undo()
    wreck = tmp_path / "checkpoints" / "step_000010"
    (wreck / "trainer.json").unlink()  # half removed, which makes its folder the newest
    save(tmp_path, 30, world, keep=2)
    left = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    assert left == ["step_000020", "step_000030"]


def test_a_new_run_in_an_old_folder_does_not_delete_its_own_checkpoint(tmp_path, world):
    save(tmp_path, 300, world)
    save(tmp_path, 60, world)
    assert find_checkpoint(tmp_path, "auto", world).name == "step_000060"


def test_leftovers_of_a_killed_save_are_removed_and_never_loaded(tmp_path, world):
    save(tmp_path, 10, world)
    (tmp_path / "checkpoints" / "tmp_step_000020" / "state").mkdir(parents=True)
    assert find_checkpoint(tmp_path, "auto", world).name == "step_000010"
    save(tmp_path, 30, world)
    assert not list((tmp_path / "checkpoints").glob("tmp_*"))


@pytest.mark.parametrize("left", ["tmp_old_step_000010", "tmp_step_000010"])
def test_a_kill_while_a_step_is_replaced_loses_nothing(tmp_path, world, left):
    """Saved again, after a resume from an earlier one: between the renames only the old or the new one is there."""
    save(tmp_path, 10, world)
    step = tmp_path / "checkpoints" / "step_000010"
    step.rename(step.with_name(left))
    assert find_checkpoint(tmp_path, "auto", world) == step
    assert (step / "trainer.json").is_file()


def test_resume_by_path_and_its_errors(tmp_path, world):
    assert find_checkpoint(tmp_path, "auto", world) is None
    save(tmp_path, 10, world)
    step = tmp_path / "checkpoints" / "step_000010"
    for path in (step, step.parent, tmp_path, step.parent / "latest"):
        assert find_checkpoint(tmp_path / "elsewhere", str(path), world) == step
    assert find_checkpoint(tmp_path, "never", world) is None
    with pytest.raises(SystemExit, match="--resume"):
        find_checkpoint(tmp_path, str(tmp_path / "nothing"), world)
    (step / "trainer.json").unlink()
    with pytest.raises(SystemExit, match="step_000010"):
        find_checkpoint(tmp_path, "auto", world)

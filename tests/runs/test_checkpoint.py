"""Retention and pointers of checkpoints; exactness of a resume is tested by the scripts' own
runs."""

import errno
import json
import math
import os
import shutil
import time
import weakref
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import (
    ROOT,
    SCRIPTS,
    checkpoints_of,
    load_checkpoint,
    run_script,
    save_checkpoint,
    trained,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import common.checkpoint
from common import ending, shards
from common.checkpoint import CheckpointError, Checkpoints, on_all_ranks
from common.data.order import RowOrder
from common.distributed import broadcast_object, gather_objects
from common.flags import Run
from common.job import Job, check_run
from common.machines import facts_of_machine, lock_everywhere
from common.manifest import complete_steps, model_identity, remove_step
from common.optimizer import GuardedAdamW, make_moments
from common.shards import file_numbers, find_checkpoint, saved_weights
from common.steps import seed_step


def save(folder, step, world, keep=1, best=False, seed=0):
    save_checkpoint(folder, step, trained(seed), world, state={"best": 0.5}, keep=keep, best=best)


@pytest.mark.parametrize("kind", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_two_ranks_then_one_then_two_have_the_same_bits(tmp_path, kind):
    """Weights, moments and the position in the data, as they are loaded."""
    worker = ROOT / "tests" / "workers" / "reshard.py"
    results = []
    start = "nothing"
    for ranks in (2, 0, 2):
        end = tmp_path / f"{len(results)}"
        done = run_script(worker, kind, start, end, ranks=ranks)
        results.append(json.loads(done.stdout.strip().splitlines()[-1]))
        start = end
    assert results[0] == results[1] == results[2] and results[0]["loader"]["consumed"] == 13
    names = [path.name for path in (tmp_path / "2/checkpoints/step_000001/state").iterdir()]
    of_ranks = [sum(name.startswith(f"shard-0000{rank}-") for name in names) for rank in (1, 2)]
    assert min(of_ranks) > 1 and sum(of_ranks) == len(names), (
        "each rank writes several files of its own"
    )


def test_each_step_of_each_rank_has_random_numbers_of_its_own():
    draws = []
    for seed, step, rank in ((3, 7, 0), (3, 7, 1), (3, 8, 0), (4, 7, 0), (3, 7, 0)):
        seed_step(seed, step, rank)
        draws.append(torch.rand(8).tolist())
    assert draws[0] == draws[4] and all(
        draw not in draws[:place] for place, draw in enumerate(draws[:4])
    )


def test_tied_weights_are_saved_once_and_loaded_into_both(tmp_path, world):
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
        model[1].weight = model[0].weight
        return model

    before, after = tied(), tied()
    assert list(saved_weights(before)) == ["0.weight"]
    save_checkpoint(
        tmp_path, 1, {"policy": (before, torch.optim.AdamW(before.parameters()))}, world
    )
    folder = find_checkpoint(tmp_path, "auto", world)
    load_checkpoint(folder, {"policy": (after, torch.optim.AdamW(after.parameters()))}, world)
    assert torch.equal(before[0].weight, after[1].weight) and after[0].weight is after[1].weight


def test_files_hold_no_more_than_torchs_writer_may_have_in_memory(monkeypatch):
    """Tensors of 40 bytes, a large one, and a small one behind it; of two ranks each has half of
    them."""
    tensors = {str(i): torch.empty(10 if i != 4 else 1000) for i in range(6)}
    monkeypatch.setattr(shards, "FILE_BYTES", 80)
    numbers = file_numbers(tensors)
    assert list(numbers.values()) == [1, 1, 2, 2, 3, 53]
    monkeypatch.setattr(shards, "world_size", lambda: 2)
    assert list(file_numbers(tensors).values()) == [1, 1, 1, 1, 2, 27]


def test_a_save_before_the_first_update_does_not_change_it(tmp_path, world):
    """torch's helper takes a step to make Adam's moments; counted, it would shrink all updates that
    follow."""

    def three_updates(saved: bool) -> torch.Tensor:
        torch.manual_seed(3)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if saved:
            both = {"policy": (model, optimizer)}
            save_checkpoint(tmp_path, 1, both, world)
            load_checkpoint(tmp_path / "checkpoints" / "step_000001", both, world)
        for scale in (1.0, 5.0, 0.1):
            (scale * model(torch.ones(2, 4))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach().clone()

    assert torch.equal(three_updates(saved=True), three_updates(saved=False))


def test_one_rank_exchanges_no_objects(tmp_path, world, monkeypatch):
    """Large ones take gloo's thread several threads to copy, and OpenMP's then sleep between all
    later operations."""
    assert dist.is_initialized() and world.size == 1
    for name in (
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "scatter_object_list",
    ):
        monkeypatch.setattr(dist, name, None)
    save(tmp_path, 10, world)
    load_checkpoint(find_checkpoint(tmp_path, "auto", world), trained(2), world)
    assert gather_objects(bytes(10**6)) == [bytes(10**6)] and broadcast_object(3) == 3


def test_frozen_weights_have_no_moments_to_save(tmp_path, world):
    model = nn.Linear(4, 3)
    model.bias.requires_grad_(False)
    assert checkpoints_of(tmp_path, {"policy": (model, None)}, world).num_bytes() == 4 * (
        3 * 12 + 3
    )


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
    assert save_checkpoint(tmp_path, 20, trained(0), world, best=True)
    assert (tmp_path / "checkpoints" / "best").read_text() == "step_000020"
    monkeypatch.undo()
    wreck = tmp_path / "checkpoints" / "step_000010"
    assert not (wreck / "manifest.json").exists()
    (wreck / "trainer.json").unlink()  # half removed, which makes its folder the newest
    save(tmp_path, 30, world, keep=2)
    left = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    assert left == ["step_000020", "step_000030"]


def test_what_cannot_be_removed_or_read_beside_checkpoints_costs_none(tmp_path, world):
    save(tmp_path, 10, world)
    (tmp_path / "checkpoints" / "tmp_notes.txt").write_text("not ours")
    (tmp_path / "checkpoints" / "best").write_bytes(b"\xff\xfe")
    assert save_checkpoint(tmp_path, 20, trained(0), world)
    assert find_checkpoint(tmp_path, "auto", world).name == "step_000020"


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


OF_A_USER = [
    "step_000010/notes.txt",
    "step_000010/state/mine/a",
    "tmp_mine/a",
    "tmp_step_000010/a",
    "step_000020/b",
]


@pytest.mark.parametrize("name", OF_A_USER)
def test_what_a_user_has_put_beside_or_into_checkpoints_stays(tmp_path, world, name):
    save(tmp_path, 10, world)
    file = tmp_path / "checkpoints" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")
    for step in (20, 30, 40):
        save(tmp_path, step, world)
    found = [
        path for path in (tmp_path / "checkpoints").rglob(file.name) if path.read_text() == "mine"
    ]
    assert len(found) == 1, "of step 20 it may have been renamed, when that was written"
    assert find_checkpoint(tmp_path, "auto", world).name == "step_000040"


@pytest.mark.parametrize("name", ["step_000010", "tmp_step_000020"])
def test_nothing_behind_a_link_is_removed(tmp_path, world, name):
    save(tmp_path / "other", 10, world)
    link = tmp_path / "run/checkpoints" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "other/checkpoints/step_000010")
    for step in (20, 30):
        save(tmp_path / "run", step, world)
    assert (
        link.is_symlink()
        and find_checkpoint(tmp_path / "other", "auto", world).name == "step_000010"
    )


def test_a_link_to_checkpoints_of_another_run_is_refused(tmp_path, world):
    """One to another disk, for those of this run, is not."""
    save(tmp_path / "other", 10, world)
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(tmp_path / "other/checkpoints")
    with pytest.raises(
        SystemExit, match=rf"{run}/checkpoints is a link to checkpoints of another run"
    ):
        lock_everywhere(run, world)
    (run / "checkpoints").unlink()
    (tmp_path / "disk").mkdir()
    (run / "checkpoints").symlink_to(tmp_path / "disk")
    for _ in range(2):
        lock_everywhere(run, world)
        ending.at_end.pop_all().close()
        (run / "metrics.jsonl").touch()
        save(run, 10, world)
    assert find_checkpoint(run, "auto", world).name == "step_000010"


@pytest.mark.parametrize("left", ["tmp_old_step_000010", "tmp_step_000010"])
def test_a_kill_while_a_step_is_replaced_loses_nothing(tmp_path, world, left):
    """Saved again, after a resume from an earlier one: between the renames only the old or the new
    one is there."""
    save(tmp_path, 10, world)
    step = tmp_path / "checkpoints" / "step_000010"
    step.rename(step.with_name(left))
    assert find_checkpoint(tmp_path, "auto", world) == step
    assert (step / "trainer.json").is_file()


def test_a_step_is_saved_again_without_a_removal_of_the_old_one(tmp_path, world, monkeypatch):
    """A kill in a removal would leave half a step under its name. A user's file that no removal
    takes stays, too, in the folder that the old one has become."""

    def killed(folder):
        (folder / "manifest.json").unlink()
        raise SystemExit("killed")

    save(tmp_path, 10, world)
    step = tmp_path / "checkpoints" / "step_000010"
    monkeypatch.setattr("common.manifest.shutil.rmtree", killed)
    save(tmp_path, 10, world, seed=2)
    monkeypatch.undo()
    after = trained(1)
    load_checkpoint(find_checkpoint(tmp_path, "auto", world), after, world)
    assert torch.equal(after["policy"][0].weight, trained(2)["policy"][0].weight)
    (step / "notes.txt").write_text("mine")
    for number in (10, 20):
        save(tmp_path, number, world)
        assert (tmp_path / "checkpoints/latest").read_text() == f"step_{number:06d}"
        notes = tmp_path / "checkpoints/tmp_old_step_000010/notes.txt"
        assert [*tmp_path.rglob("notes.txt")] == [notes]


def test_resume_by_path_and_its_errors(tmp_path, world):
    assert find_checkpoint(tmp_path, "auto", world) is None
    save(tmp_path, 10, world, best=True)
    step = tmp_path / "checkpoints" / "step_000010"
    for path in (step, step.parent, tmp_path, step.parent / "latest", step.parent / "best"):
        assert find_checkpoint(tmp_path / "elsewhere", str(path), world) == step
    assert find_checkpoint(tmp_path, "never", world) is None
    with pytest.raises(SystemExit, match="--resume"):
        find_checkpoint(tmp_path, str(tmp_path / "nothing"), world)
    (tmp_path / "rows.jsonl").write_text("{}")
    for resume in ("auto", "never"):
        with pytest.raises(SystemExit, match=r"--output-dir .*rows\.jsonl is a file"):
            find_checkpoint(tmp_path / "rows.jsonl", resume, world)
    (step / "trainer.json").unlink()
    with pytest.raises(SystemExit, match=r"step_000010 has no trainer\.json: --resume never"):
        find_checkpoint(tmp_path, "auto", world)


@pytest.mark.parametrize("method", ["write_data", "finish"])
def test_ctrl_c_while_saving_is_no_failed_save(tmp_path, world, monkeypatch, method):
    """torch's checkpoints take it for a rank's failure, which would be a warning: training would go
    on."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    save(tmp_path, 10, world)
    monkeypatch.setattr(dcp.HuggingFaceStorageWriter, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 20, world)
    assert find_checkpoint(tmp_path, "auto", world).name == "step_000010"


# --- what a resume takes of the memory ------------------------------------------------------------


class Peak(TorchDispatchMode):
    """The largest number of bytes that tensors have had at one time, those of the models not
    counted."""

    def __init__(self, *models: nn.Module):
        super().__init__()
        self.alive, self.peak = (
            {p.untyped_storage()._cdata: 0 for model in models for p in model.parameters()},
            0,
        )

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.alive:
                self.alive[key] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, key)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def two_models() -> dict:
    """A policy and a critic of a million bytes each, whose largest parameter has 90 kB."""
    models = {
        name: nn.Sequential(*(nn.Linear(150, 150) for _ in range(11)))
        for name in ("policy", "critic")
    }
    return {
        name: (model, torch.optim.AdamW(model.parameters(), fused=True))
        for name, model in models.items()
    }


def test_a_resume_makes_the_moments_and_no_gradients(tmp_path, world):
    """Training has gradients besides: there its peak is. What only evaluates takes the weights
    alone."""
    size = sum(p.numel() * 4 for p in two_models()["policy"][0].parameters())
    save_checkpoint(tmp_path, 1, two_models(), world)
    folder = find_checkpoint(tmp_path, "auto", world)
    for optimizers, moments in (True, 4 * size), (False, 0):
        models = two_models()
        with Peak(*(model for model, _ in models.values())) as seen:
            load_checkpoint(folder, models, world, weights_only=not optimizers)
        assert moments <= seen.peak < moments + size / 4, optimizers
        assert all(p.grad is None for model, _ in models.values() for p in model.parameters())


def test_moments_are_made_on_the_host():
    model = nn.Linear(4, 3, device="meta")
    optimizer = torch.optim.AdamW(model.parameters())
    make_moments(optimizer)
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert {state["exp_avg"].device.type, state["exp_avg_sq"].device.type} == {"cpu"}
        assert state["exp_avg"].shape == parameter.shape and state["step"].is_meta


# --- Checkpoints: what a run saves, and goes on with ----------------------------------------------


def adamw(seed: int, dtype=torch.float16, **options) -> GuardedAdamW:
    torch.manual_seed(seed)
    return GuardedAdamW(
        nn.Linear(4, 3), dtype, **({"weight_decay": 0.0, "max_grad_norm": 0.0} | options)
    )


def checkpoints(
    folder, world, names=("policy",), loader=None, resume="auto", **options
) -> Checkpoints:
    """Those of a run folder; its `resume` loads what --resume names."""
    optimizers = {name: adamw(seed) for seed, name in enumerate(names, start=5)}
    options = {"save_every": 20, "keep": 1, "identity": {}, "micro_batch_tokens": 1024} | options
    made = Checkpoints(folder, world, optimizers, loader, **options)
    made.resume = partial(made.resume, find_checkpoint(folder, resume, world))
    return made


def record_of(folder, step: int) -> dict:
    return json.loads((folder / "checkpoints" / f"step_{step:06d}" / "trainer.json").read_text())


SCALE = {"scale": 8.0, "good_steps": 3, "dynamic": True}
OTHER = {"scale": 2.0, "good_steps": 1, "dynamic": True}
LOADER = {"consumed": 9, "seed": 0, "num_rows": 20, "fingerprint": ""}


def assert_loaded(now: Checkpoints, saved: dict) -> None:
    """Weights and moments of these models are those that were saved."""
    for name, adamw in now.optimizers.items():
        model, optimizer = saved[name]
        for loaded, parameter in zip(adamw.model.parameters(), model.parameters(), strict=True):
            assert torch.equal(loaded, parameter)
            state = adamw.optimizer.state[loaded]
            assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
            assert all(torch.equal(state[key], optimizer.state[parameter][key]) for key in state)


def test_a_run_goes_on_where_its_checkpoint_is(tmp_path, world):
    """Each of two models with its moments, and a loss scale of its own."""
    saved = trained(1) | {"critic": trained(2)["policy"]}
    state = {"best": 0.25, "loader": LOADER, "loss_scale": {"policy": SCALE, "critic": OTHER}}
    assert save_checkpoint(tmp_path, 7, saved, world, state=state)
    loader = RowOrder(20, seed=0)
    now = checkpoints(tmp_path, world, names=("policy", "critic"), loader=loader)
    assert now.resume() == now.start == 7 and now.resumes_own
    assert now.best == 0.25 and loader.consumed == 9
    assert [now.optimizers[name].scale for name in ("policy", "critic")] == [8.0, 2.0]
    assert now.optimizers["policy"].loss_scale.good_steps == 3
    assert_loaded(now, saved)
    policy_alone = checkpoints(tmp_path, world)  # --eval-only
    assert policy_alone.resume() == 7 and policy_alone.optimizers["policy"].scale == 8.0
    assert_loaded(policy_alone, saved)


def test_a_resume_changes_the_counts_of_a_script_in_place(tmp_path, world, monkeypatch):
    """A checkpoint without them, as an earlier version has written it, leaves them alone."""
    counts = {"sampled": 0.0, "unequal": 0.0}
    now = checkpoints(tmp_path, world, counts=counts)
    now.resume()
    counts.update({"sampled": 231.0, "unequal": 1 / 3})
    assert now.save(4, None)
    resumed = {"sampled": 0.0, "unequal": 0.0}
    assert checkpoints(tmp_path, world, counts=resumed).resume() == 4 and resumed == counts
    assert checkpoints(tmp_path, world).resume() == 4  # a script without counts
    record = record_of(tmp_path, 4)
    del record["counts"]
    monkeypatch.setattr(common.checkpoint, "read_record", lambda folder: record)
    assert checkpoints(tmp_path, world, counts=resumed).resume() == 4 and resumed == counts


def test_without_a_checkpoint_a_run_begins(tmp_path, world):
    for resume in ("auto", "never"):
        now = checkpoints(tmp_path, world, resume=resume)
        before = [p.clone() for p in now.optimizers["policy"].model.parameters()]
        assert now.resume() == 0 == now.start and now.best == -math.inf
        assert all(map(torch.equal, before, now.optimizers["policy"].model.parameters()))


@pytest.mark.parametrize(
    "lowest, metrics, best",
    [
        (False, [0.5, 0.2, None, 0.7, 0.7], [0.5, 0.5, 0.5, 0.7, 0.7]),
        (True, [2.0, 3.0, None, 1.0], [2.0, 2.0, 2.0, 1.0]),
    ],
)
def test_the_best_is_the_highest_or_the_lowest(tmp_path, world, lowest, metrics, best):
    """The first of equal ones; a step without an evaluation is none. A resumed run knows it."""
    for step, (metric, expected) in enumerate(zip(metrics, best, strict=True), start=1):
        now = checkpoints(tmp_path, world, lowest_is_best=lowest)
        assert now.resume() == step - 1
        now.save(step, metric)
        assert now.best == record_of(tmp_path, step)["best"] == expected
        assert (
            tmp_path / "checkpoints" / "best"
        ).read_text() == f"step_{1 + best.index(expected):06d}"
    kept = {path.name for path in (tmp_path / "checkpoints").glob("step_*")}
    assert kept == {f"step_{len(metrics):06d}", f"step_{1 + best.index(best[-1]):06d}"}


def test_an_evaluation_between_two_saves_can_be_the_best(tmp_path, world):
    """Every 2nd step is saved, every 3rd evaluated. With --save-every 0 the end alone is saved."""
    now = checkpoints(tmp_path, world)
    now.save_every = 0
    assert not any(now.due(step, metric) for step, metric in enumerate([None, 0.1, 0.9], start=1))
    now.save_every, saved = 2, []
    for step, metric in enumerate([None, None, 0.5, None, None, 0.7, None, None, 0.6], start=1):
        if now.due(step, metric):
            now.save(step, metric)
            saved.append(step)
    assert saved == [2, 3, 4, 6, 8]
    assert (tmp_path / "checkpoints" / "best").read_text() == "step_000006"


def test_what_a_user_has_put_aside_stays(tmp_path, world):
    save(tmp_path, 10, world)
    kept = tmp_path / "checkpoints"
    shutil.copytree(kept / "step_000010", kept / "step_000010_good")
    for step in (20, 30):
        save(tmp_path, step, world)
    assert sorted(path.name for path in kept.glob("step_*")) == ["step_000010_good", "step_000030"]
    assert (
        find_checkpoint(tmp_path / "new", str(kept / "step_000010_good"), world).name
        == "step_000010_good"
    )


def test_a_branch_has_a_best_of_its_own(tmp_path, world):
    """Another run's may be of other rows, and is not in its folder."""
    checkpoints(tmp_path / "a", world).save(1, 0.9)
    branch = checkpoints(tmp_path / "b", world, resume=str(tmp_path / "a"))
    assert branch.resume() == 1 and branch.best == -math.inf
    for step, metric in enumerate([0.3, 0.6, 0.2], start=2):
        branch.save(step, metric)
    assert (tmp_path / "b" / "checkpoints" / "best").read_text() == "step_000003"
    assert checkpoints(tmp_path / "b", world).resume() == 4


def test_a_run_that_goes_back_knows_the_best_of_its_own_history(tmp_path, world):
    """Where the file `best` names a step of the branch that it left, which it writes again."""
    kept = tmp_path / "checkpoints"
    first = checkpoints(tmp_path, world, keep=3)
    for step, metric in ((10, 0.7), (15, 0.9), (20, 0.1)):
        first.save(step, metric)
    again = checkpoints(tmp_path, world, resume=str(kept / "step_000010"), keep=3)
    assert again.resume() == 10 and again.best == 0.7
    for step, metric in ((15, 0.6), (20, None), (25, 0.65), (30, 0.66)):
        again.save(step, metric)
        assert (kept / "best").read_text() == "step_000010" and (kept / "step_000010").is_dir()


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_run_that_goes_back_to_before_its_first_evaluation_has_no_best(
    tmp_path, world, weights_only
):
    """An evaluation leaves the file as it is."""
    first = checkpoints(tmp_path, world, keep=3)
    first.save(10, None)
    first.save(20, 0.9)
    best = tmp_path / "checkpoints" / "best"
    assert best.read_text() == "step_000020"
    again = checkpoints(tmp_path, world, resume=str(tmp_path / "checkpoints/step_000010"), keep=3)
    assert again.resume(weights_only=weights_only) == 10 and again.best == -math.inf
    assert best.exists() == weights_only
    if not weights_only:
        again.save(15, None)
        assert not best.exists()


def test_a_best_that_is_gone_is_none(tmp_path, world):
    """It was no longer the best, and was dropped; then the run went back to before that."""
    first = checkpoints(tmp_path, world, keep=2)
    for step, metric in ((5, 0.8), (10, 0.7), (15, 0.9)):
        first.save(step, metric)
    again = checkpoints(tmp_path, world, resume=str(tmp_path / "checkpoints/step_000010"), keep=2)
    assert again.resume() == 10 and again.best == -math.inf
    again.save(20, 0.3)
    assert (tmp_path / "checkpoints/best").read_text() == "step_000020"


def test_a_run_that_is_never_evaluated_has_no_best(tmp_path, world):
    now = checkpoints(tmp_path, world, lowest_is_best=True)
    now.save(1, None)
    assert not (tmp_path / "checkpoints" / "best").exists()
    again = checkpoints(tmp_path, world, lowest_is_best=True)
    assert again.resume() == 1 and again.best == math.inf


def full(tensors, folder):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_save_that_failed_is_not_the_best(tmp_path, world, monkeypatch, capsys):
    now = checkpoints(tmp_path, world)
    now.save(1, 0.5)
    monkeypatch.setattr("common.checkpoint.save_shards", full)
    now.save(2, 0.9)
    assert now.best == 0.5 and "no checkpoint of step 2" in capsys.readouterr().out
    monkeypatch.undo()
    now.save(3, 0.7)
    assert now.best == 0.7 and (tmp_path / "checkpoints" / "best").read_text() == "step_000003"


@pytest.mark.parametrize("name", ["best", "latest"])
def test_a_kill_between_the_names_of_a_save_loses_no_best(tmp_path, world, monkeypatch, name):
    """Whichever was not written any more: the run comes by this step again, or knows its best."""
    now = checkpoints(tmp_path, world)
    now.save(1, 0.5)
    write = now.save.__globals__["replace_file"]

    def killed(path, writing):
        if path.name == name:
            raise SystemExit("killed")
        write(path, writing)

    monkeypatch.setattr("common.checkpoint.replace_file", killed)
    with pytest.raises(SystemExit):
        now.save(2, 0.9)
    monkeypatch.undo()
    again = checkpoints(tmp_path, world)
    assert again.resume() == 1 and again.best == 0.5
    again.save(2, 0.9)
    again.save(3, 0.7)
    assert (tmp_path / "checkpoints" / "best").read_text() == "step_000002"


def test_a_clock_that_steps_back_costs_no_checkpoint(tmp_path, world):
    """Age is a time of the file system: what `latest` names is the newest, whatever that says."""
    now = checkpoints(tmp_path, world, loader=RowOrder(20, seed=0))
    now.save(10, None)
    later = time.time() + 3600
    os.utime(tmp_path / "checkpoints/step_000010", (later, later))
    now.save(20, None)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_000020"]
    assert checkpoints(tmp_path, world, loader=RowOrder(20, seed=0)).resume() == 20


def test_others_may_read_all_of_a_checkpoint_if_they_may_read_some(tmp_path, world):
    checkpoints(tmp_path, world, loader=RowOrder(20, seed=0)).save(1, None)
    files = [path for path in (tmp_path / "checkpoints/step_000001").rglob("*") if path.is_file()]
    assert len(files) == 3 and len({path.stat().st_mode & 0o044 for path in files}) == 1


def test_what_is_saved_and_what_is_left_out(tmp_path, world):
    """Without a loader, as with --eval-only, its position is neither saved nor loaded."""
    loader = RowOrder(20, seed=0)
    loader.next(13)
    now = checkpoints(tmp_path, world, loader=loader)
    now.optimizers["policy"].loss_scale.good_steps = 2
    now.save(4, 0.5)
    assert record_of(tmp_path, 4) == {
        "step": 4,
        "world_size": 1,
        "micro_batch_tokens": 1024,
        "best": 0.5,
        "best_step": "step_000004",
        "counts": {},
        "loader": {"consumed": 13, "seed": 0, "num_rows": 20, "fingerprint": ""},
        "loss_scale": {"policy": {"scale": 2.0**14, "good_steps": 2, "dynamic": True}},
    }
    looking = checkpoints(tmp_path, world, loader=None)
    assert looking.resume() == 4


def test_an_epoch_is_saved_where_it_ends(tmp_path, world):
    """20 rows, 8 a step; after a resume the epochs that ended before it are known."""
    loader = RowOrder(20, seed=0)
    now = checkpoints(tmp_path, world, loader=loader)
    now.save_every = "epoch"
    ends = []
    for step in range(1, 7):
        loader.next(8)
        if now.due(step, None):
            ends.append(step)
            assert now.save(step, None)
    assert ends == [3, 5]
    again = checkpoints(tmp_path, world, loader=RowOrder(20, seed=0))
    again.save_every = "epoch"
    assert again.resume() == 5 and not again.due(5, None)
    again.loader.next(20)
    assert again.due(6, None) and not again.due(7, None)


def test_a_disk_without_room_for_all_that_will_be_kept_is_told(
    tmp_path, world, monkeypatch, capsys
):
    now = checkpoints(tmp_path, world, keep=3)
    needed = 5 * now.num_bytes()  # besides the three, the best and the one being written
    for free, told in ((needed, False), (needed - 1, True)):
        monkeypatch.setattr("common.checkpoint.free_bytes", lambda folder, free=free: free)
        now.warn_if_large()
        assert ("lower --keep-checkpoints" in capsys.readouterr().out) == told


def test_an_error_whose_text_begins_with_an_empty_line_is_an_error(world):
    def fail():
        raise OSError("\n\nthe server is away")

    with pytest.raises(CheckpointError, match=r"^the server is away$"):
        on_all_ranks(fail)


@pytest.mark.parametrize(
    "save_every, start, total_steps, told",
    [
        (0, 0, 40, True),
        (20, 0, 20, True),
        (20, 0, 21, False),
        (20, 20, 40, True),
        (20, 25, 41, False),
        (20, 40, 40, False),  # nothing is left to do
        ("epoch", 0, 20, True),  # 80 rows, of which a step takes four
        ("epoch", 0, 21, False),
        ("epoch", 30, 40, True),
        ("epoch", 30, 41, False),
    ],
)
def test_a_run_without_a_checkpoint_before_its_end_says_so(
    save_every, start, total_steps, told, tmp_path, world, capsys
):
    checkpoints = checkpoints_of(tmp_path, trained(), world)
    checkpoints.save_every = save_every
    checkpoints.start = start
    checkpoints.loader = RowOrder(80, seed=0)
    checkpoints.loader.consumed = 4 * start
    checkpoints.num_epochs = int(checkpoints.loader.epoch)
    checkpoints.note_if_none_is_due(total_steps, rows_per_step=4)
    line = (
        f"--save-every {save_every} asks for no checkpoint before the end ({total_steps} steps); "
        "SIGTERM and Ctrl-C save one\n"
    )
    assert capsys.readouterr().out == (line if told else "")


def test_a_step_that_takes_any_number_of_rows_has_no_note_on_epochs(tmp_path, world, capsys):
    """--dynamic-sampling: it may reach the end of an epoch sooner."""
    checkpoints = checkpoints_of(tmp_path, trained(), world)
    checkpoints.save_every = "epoch"
    checkpoints.note_if_none_is_due(20)
    assert capsys.readouterr().out == ""


def test_a_refused_run_leaves_no_empty_folder(tmp_path, world, monkeypatch):
    (tmp_path / "there").mkdir()
    for name, is_left in (("runs/a", False), ("there", True), ("runs/b", True)):
        end = ExitStack()
        monkeypatch.setattr("common.machines.at_end", end)
        lock_everywhere(tmp_path / name, world)
        if name == "runs/b":
            (tmp_path / name / "config.json").write_text("{}")
        end.close()
        assert (tmp_path / name).is_dir() == (tmp_path / name).parent.is_dir() == is_left


def test_a_model_of_a_later_step_is_not_that_of_an_earlier_one(tmp_path, world, capsys):
    """--resume CHECKPOINTS/step_000020 --total-steps 20, in a run that went on to step 40."""
    for step in (20, 40):
        save(tmp_path, step, world, keep=2)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    checkpoint = tmp_path / "checkpoints/step_000020"
    run = SimpleNamespace(training=True, output_dir=tmp_path, checkpoint=checkpoint)
    Job.leave_if_finished(run, 20)
    assert capsys.readouterr().out == ""


def test_a_removal_that_stops_leaves_no_checkpoint(tmp_path, world, monkeypatch):
    """Its folder would be the newest, and a good one would go in its place."""
    save(tmp_path, 10, world)
    step = tmp_path / "checkpoints/step_000010"

    def stop(folder):
        for shard in (folder / "state").iterdir():
            shard.unlink()
        raise OSError("Directory not empty")

    monkeypatch.setattr("common.manifest.shutil.rmtree", stop)
    with pytest.raises(OSError, match="not empty"):
        remove_step(step)
    assert complete_steps(step.parent) == []


def test_a_finished_run_has_nothing_left_to_do(tmp_path, world, capsys):
    save(tmp_path, 20, world)
    checkpoint = tmp_path / "checkpoints/step_000020"
    run = SimpleNamespace(training=True, checkpoint=checkpoint, output_dir=tmp_path)
    Job.leave_if_finished(run, 20)  # without its model/, which the run then writes
    config = tmp_path / "model/config.json"
    config.parent.mkdir()
    config.write_text("{}")
    Job.leave_if_finished(run, 21)
    evaluation = SimpleNamespace(**vars(run) | {"training": False})
    Job.leave_if_finished(evaluation, 20)
    anew = SimpleNamespace(**vars(run) | {"checkpoint": None})
    Job.leave_if_finished(anew, 20)
    shutil.copytree(tmp_path / "model", tmp_path / "branch/model")
    branch = SimpleNamespace(**vars(run) | {"output_dir": tmp_path / "branch"})
    Job.leave_if_finished(branch, 20)
    os.utime(config, (1, 1))  # of an earlier end, with fewer steps
    Job.leave_if_finished(run, 20)
    assert capsys.readouterr().out == ""
    config.touch()
    for is_linked in (False, True):
        if is_linked:  # checkpoints/ is on another disk
            (tmp_path / "disk").mkdir()
            (tmp_path / "checkpoints").rename(tmp_path / "disk/checkpoints_of_run")
            (tmp_path / "checkpoints").symlink_to(tmp_path / "disk/checkpoints_of_run")
        with pytest.raises(SystemExit) as end:
            Job.leave_if_finished(run, 19)  # --total-steps may have fallen
        assert end.value.code == 0
        assert capsys.readouterr().out == (
            f"nothing left to do: {checkpoint} has all 20 steps, {tmp_path}/model is the model; "
            "more steps: --total-steps\n"
        )


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_script_looks_whether_it_is_finished_before_it_loads_anything(script):
    text = (ROOT / script).read_text()
    assert text.count("job.leave_if_finished(total_steps)") == 1
    assert text.index("job.leave_if_finished(total_steps)") < text.index("job.load_policy(")


def test_a_tracker_that_is_not_installed_is_refused_at_the_start(monkeypatch):
    monkeypatch.setattr("common.job.find_spec", lambda name: None if name == "wandb" else name)
    check_run(Run(log="tensorboard"))
    with pytest.raises(
        SystemExit,
        match=r"^--log tensorboard,wandb: wandb is not installed: pip install wandb$",
    ):
        check_run(Run(log="tensorboard,wandb"))


def test_a_model_file_that_may_not_be_read_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_text("x")

    def refuse(file):
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr("common.machines.fingerprint", refuse)
    with pytest.raises(SystemExit, match="Permission denied"):
        facts_of_machine(str(tmp_path))


def test_a_config_is_utf_8_in_every_locale(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"name": "模型"}', "utf-8")
    expected = model_identity(tmp_path)
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, encoding="ascii": read(path, encoding))
    assert model_identity(tmp_path) == expected

"""`python -m common.look`: what a run has left, drawn from its files; and what is written beside a dump in a run."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT, random_episodes
from vl import build_tokenizer, picture

from common.data.dumps import dump_rollouts
from common.hub import FOLDERS, load_tokenizer
from common.look.__main__ import look
from common.look.page import write_page
from common.pictures import Media, PixelLimits

LIMITS = PixelLimits(784, 16 * 784, 4 * 784)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(FOLDERS["tiny"]))


@pytest.fixture
def run_dir(tmp_path, tokenizer, world):
    """Two dumps of 10 prompts, two steps of metrics, no pages and no curves."""
    episodes = random_episodes(seed=1, prompts=10, samples=2)
    for step in (1, 2):
        dump_rollouts(tmp_path / "rollouts", step, episodes, episodes[::2], [0.5] * 10, tokenizer, world)
    records = [json.dumps({"step": step, "reward/mean": 0.1}) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(records))
    (tmp_path / "config.json").write_text(json.dumps({"args": {"model": "tiny"}}))
    return tmp_path


def test_a_run_gets_its_curves_and_the_pages_that_it_lacks(run_dir, capsys):
    first, second = (run_dir / f"rollouts/step_00000{step}.html" for step in (1, 2))
    first.write_text("as it was")
    look(run_dir)
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert first.read_text() == "as it was"
    page = second.read_text()
    assert "step 2" in page and "advantage +0.5" in page and "not trained on" in page
    assert [n for n in range(10) if f"<h2>Prompt {n}</h2>" in page] == list(range(8)), "the first eight groups"
    assert capsys.readouterr().out.splitlines() == [str(run_dir / "curves.png"), str(second)]
    look(run_dir / "rollouts/step_000001.parquet")
    assert "step 1" in first.read_text(), "a dump that is named gets its page anew"


def test_what_is_no_run_and_a_run_whose_model_is_not_known(run_dir, tmp_path_factory):
    with pytest.raises(SystemExit, match=r"no metrics\.jsonl and no rollouts"):
        look(tmp_path_factory.mktemp("empty"))
    (run_dir / "config.json").unlink()
    with pytest.raises(SystemExit, match="give --tokenizer"):
        look(run_dir)
    look(run_dir, tokenizer="tiny")
    assert (run_dir / "rollouts/step_000001.html").is_file()


def test_pictures_come_from_the_files_beside_a_dump(tmp_path, world):
    tokenizer = build_tokenizer()
    episodes = random_episodes(seed=2, prompts=2, samples=2)
    episodes[0].media = [Media.open("image", [picture(56, 56, 1)], LIMITS)]
    path = dump_rollouts(tmp_path, 3, episodes, [], [], tokenizer, world)
    (beside,) = tmp_path.glob("*.media_*.parquet")
    write_page(path, tokenizer)
    assert path.with_suffix(".html").read_text().count("<image ") == 1
    beside.rename(tmp_path / "step_000003.media_7.parquet")
    write_page(path, tokenizer)
    assert path.with_suffix(".html").read_text().count("<image ") == 1, "of whichever rank"
    (tmp_path / "step_000003.media_7.parquet").unlink()
    write_page(path, tokenizer)
    page = path.with_suffix(".html").read_text()
    assert "<image " not in page and "unreadable image" in page


def test_a_full_disk_costs_the_dump_and_the_page_but_not_the_run(tmp_path, tokenizer, world, monkeypatch, capsys):
    def full(path, write):
        raise OSError("No space left on device")

    monkeypatch.setattr("common.data.dumps.replace_file", full)
    episodes = random_episodes(seed=3, prompts=1, samples=2)
    path = dump_rollouts(tmp_path, 1, episodes, [], [], tokenizer, world)
    assert f"warning: {path} not written (No space" in capsys.readouterr().out
    write_page(path, tokenizer)
    assert "step_000001.html not written" in capsys.readouterr().out
    monkeypatch.undo()
    path = dump_rollouts(tmp_path, 1, episodes, [], [], tokenizer, world)
    path.write_bytes(path.read_bytes()[:-9])
    write_page(path, tokenizer)
    assert "step_000001.html not written" in capsys.readouterr().out


def test_the_old_command_names_the_new_one():
    done = subprocess.run([sys.executable, "-m", "common.data", "x"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.splitlines() == ["it is now: python -m common.look FILE [--tokenizer NAME] [--rows 2]"]

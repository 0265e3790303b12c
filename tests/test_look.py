"""`python -m common.look`: what a run has left, drawn from its files; and what is written beside a dump in a run."""

import json
import re
import shutil
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
from helpers import ROOT, random_episodes
from vl import build_tokenizer, picture

from common.data.dumps import dump_rollouts, load_rollouts
from common.episodes import FINISH_REASONS
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


def links(page) -> list[tuple[str, str]]:
    return re.findall(r'<a href="([^"]*)">([^<]*)</a>', page.read_text())


def test_pages_link_to_their_neighbours_whenever_they_are_written(run_dir, tokenizer):
    one, two, three = (run_dir / f"rollouts/step_00000{step}.parquet" for step in (1, 2, 3))
    shutil.copy(two, three)
    pages = [path.with_suffix(".html") for path in (one, two, three)]
    write_page(one, tokenizer)
    assert links(pages[0]) == []
    write_page(three, tokenizer)
    assert links(pages[0]) == [("step_000003.html", "next: step 3")], "which was not there when it was written"
    write_page(two, tokenizer)
    assert links(pages[0]) == [("step_000002.html", "next: step 2")]
    assert links(pages[1]) == [("step_000001.html", "previous: step 1"), ("step_000003.html", "next: step 3")]
    assert links(pages[2]) == [("step_000002.html", "previous: step 2")]
    assert f"<h1>{run_dir.name}, step 1</h1>" in pages[0].read_text()


def test_a_page_shows_row_truth_and_the_end_in_words(tmp_path, tokenizer, world):
    episodes = random_episodes(seed=4, prompts=2, samples=2)
    for episode in episodes:
        episode.row, episode.truth = 40 + episode.prompt_index, f"truth {episode.prompt_index}"
    episodes[0].finish_reason = "max_turns"
    path = dump_rollouts(tmp_path, 1, episodes, episodes, [0.5] * 4, tokenizer, world)
    assert load_rollouts(path, 1, world, LIMITS)[0] == episodes
    write_page(path, tokenizer)
    page = path.with_suffix(".html").read_text()
    assert "Prompt 0, row 40" in page and "Prompt 1, row 41" in page
    assert page.count(">truth 0<") == page.count(">truth 1<") == 1, "once for a group"
    assert f"max_turns: {FINISH_REASONS['max_turns']}" in page and f"stop: {FINISH_REASONS['stop']}" in page


def test_dumps_from_before_row_and_truth_can_still_be_read(tmp_path, tokenizer, world):
    episodes = random_episodes(seed=5, prompts=2, samples=2)
    path = dump_rollouts(tmp_path, 1, episodes, episodes, [0.5] * 4, tokenizer, world)
    pq.write_table(pq.read_table(path).drop_columns(["row", "truth", "model_reward"]), path)
    assert load_rollouts(path, 1, world, LIMITS) == (episodes, episodes)
    write_page(path, tokenizer)
    page = path.with_suffix(".html").read_text()
    assert "<h2>Prompt 1</h2>" in page and "turn truth" not in page


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


def test_pictures_are_shared_as_they_were(tmp_path, world):
    """Not because they are equal: the packer encodes each object once, and a replay is to round as the step did."""
    episodes = random_episodes(seed=2, prompts=2, samples=2)
    shared, equal = (Media.open("image", [picture(56, 56, 1)], LIMITS) for _ in range(2))
    for episode, media in zip(episodes, ([shared], [shared, equal], [equal], [])):
        episode.media = media
    path = dump_rollouts(tmp_path, 3, episodes, [], [], build_tokenizer(), world)
    (first,), (second, other), (third,), none = (episode.media for episode in load_rollouts(path, 3, world, LIMITS)[0])
    assert first is second and other is third and first is not other and none == []


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

"""`python -m common.look`: what a run has left, drawn from its files; and what is written beside a
dump in a run."""

import html
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from browser import CHROMIUM, SCREENS, Browser, check_screen
from episodes import random_episodes
from vl import build_tokenizer, picture

import common.look.__main__
from common.hub import FOLDERS, load_tokenizer
from common.look.__main__ import look
from common.look.page import write_page
from common.look.samples import MAX_SAMPLES, samples_page
from common.pictures import Media, PixelLimits
from common.rollout.dumps import dump_rollouts, load_rollouts
from common.types import FINISH_REASONS

LIMITS = PixelLimits(784, 16 * 784, 4 * 784)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory, monkeypatch):
    """Where `look` is called, and writes."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))


def drawn(path: Path) -> Path:
    """What `look` draws of a run that does not lie in the current folder."""
    return Path("look") / path.relative_to("/")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(FOLDERS["tiny"]))


@pytest.fixture
def run_dir(tmp_path, tokenizer, world):
    """Two dumps of 10 prompts, two steps of metrics, no pages and no curves."""
    episodes = random_episodes(seed=1, prompts=10, samples=2)
    for step in (1, 2):
        dump_rollouts(
            tmp_path / "rollouts", step, episodes, episodes[::2], [0.5] * 10, tokenizer, world
        )
    records = [json.dumps({"step": step, "reward/mean": 0.1}) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(records))
    (tmp_path / "config.json").write_text(json.dumps({"args": {"model": "tiny"}}))
    return tmp_path


def content(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_a_run_gets_its_curves_and_the_pages_that_it_lacks(run_dir, capsys):
    first, second = (drawn(run_dir / f"rollouts/step_00000{step}.html") for step in (1, 2))
    (run_dir / "rollouts/step_000001.html").write_text("as the run wrote it")
    save_samples(run_dir / "eval/step_000001.parquet", 1)
    before = content(run_dir)
    look(run_dir)
    assert drawn(run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not first.exists()
    page = second.read_text()
    assert "step 2" in page and "advantage +0.5" in page and "not trained on" in page
    assert [n for n in range(10) if f"<h2>Prompt {n}</h2>" in page] == list(range(8)), (
        "the first eight groups"
    )
    samples = drawn(run_dir / "eval/step_000001.html")
    assert capsys.readouterr().out.splitlines() == [
        str(path) for path in (drawn(run_dir / "curves.png"), samples, second)
    ]
    look(run_dir / "rollouts/step_000001.parquet")
    assert "step 1" in first.read_text(), "a dump that is named gets its page anew"
    for time, text in ((1, "step 2"), (None, "of now")):
        second.write_text("of now")
        if time is not None:
            os.utime(second, (time, time))
        look(run_dir)
        assert text in second.read_text(), "drawn again only if it is older than its dump"
    assert content(run_dir) == before, "what is looked at stays as it is"


def test_pages_stand_in_out_and_never_in_a_run(run_dir, monkeypatch, capsys):
    before = content(run_dir)
    monkeypatch.chdir(run_dir.parent)
    look(run_dir, out=Path("pages"))
    assert Path("pages", run_dir.name, "rollouts/step_000002.html").is_file()
    monkeypatch.chdir(run_dir)
    for path in (Path("."), Path("rollouts/step_000001.parquet")):
        with pytest.raises(SystemExit, match="--out look is in it, and it stays as it is"):
            look(path)
    assert content(run_dir) == before


def links(page) -> list[tuple[str, str]]:
    return re.findall(r'<a href="([^"]*)">([^<]*)</a>', page.read_text())


def test_pages_link_to_their_neighbours_whenever_they_are_written(run_dir, tokenizer):
    one, two, three = (run_dir / f"rollouts/step_00000{step}.parquet" for step in (1, 2, 3))
    shutil.copy(two, three)
    pages = [path.with_suffix(".html") for path in (one, two, three)]
    write_page(one, tokenizer)
    assert links(pages[0]) == []
    write_page(three, tokenizer)
    assert links(pages[0]) == [("step_000003.html", "next: step 3")], (
        "which was not there when it was written"
    )
    write_page(two, tokenizer)
    assert links(pages[0]) == [("step_000002.html", "next: step 2")]
    assert links(pages[1]) == [
        ("step_000001.html", "previous: step 1"),
        ("step_000003.html", "next: step 3"),
    ]
    assert links(pages[2]) == [("step_000002.html", "previous: step 2")]
    assert f"<h1>{run_dir.name}, step 1</h1>" in pages[0].read_text()


def test_a_page_shows_row_truth_and_the_end_in_words(tmp_path, tokenizer, world):
    episodes = random_episodes(seed=4, prompts=2, samples=2)
    for episode in episodes:
        episode.row = 40 + episode.prompt_index
        episode.truth = f"truth {episode.prompt_index}"
    episodes[0].finish_reason = "max_turns"
    path = dump_rollouts(tmp_path, 1, episodes, episodes[1:3], [0.5] * 2, tokenizer, world)
    assert load_rollouts(path, 1, world, LIMITS) == (episodes, episodes[1:3])
    write_page(path, tokenizer)
    page = path.with_suffix(".html").read_text()
    assert "Prompt 0, row 40" in page and "Prompt 1, row 41" in page
    assert page.count(">truth 0<") == page.count(">truth 1<") == 1, "once for a group"
    assert f"max_turns: {FINISH_REASONS['max_turns']}" in page
    assert f"stop: {FINISH_REASONS['stop']}" in page


def test_a_page_shows_divergences_from_the_teacher(tmp_path, tokenizer, world):
    """In the turns of the policy, not in the observation between them."""
    episodes = random_episodes(seed=4, prompts=2, samples=1)
    for episode in episodes:
        episode.response_ids = tokenizer.encode("1+2=3(4)")
        episode.loss_mask = [1, 1, 1, 0, 0, 1, 1, 1]
        episode.teacher_prompt_ids = tokenizer.encode("3 is right")
    episodes[0].divergences = [0.0, 0.5, 0.0, 0.0, 0.0, 1.5, 1.5, 0.1]
    path = dump_rollouts(tmp_path, 1, episodes, episodes[:1], [0.0], tokenizer, world)
    write_page(path, tokenizer)
    page = path.with_suffix(".html").read_text()
    turns = re.findall(r"<pre>(.*)</pre>", page)
    assert '1<u class="d3" title="0.5 nats">+</u>2' in turns and "=3" in turns
    last = '<u class="d4" title="1.5 nats">(4</u><u class="d2" title="0.1 nats">)</u>'
    assert last in turns
    assert "divergence 0.6<" in page, "the mean of six"
    assert "not trained on" in page and "advantage" not in page
    assert page.count("<summary>prompt of the teacher</summary><pre>3 is right</pre>") == 2
    table = pq.read_table(path).drop_columns(["divergences", "teacher_prompt_ids"])
    pq.write_table(table, path)
    write_page(path, tokenizer)
    older = path.with_suffix(".html").read_text()
    assert "advantage +0<" in older and "teacher" not in older


def test_what_is_no_run_and_a_run_whose_model_is_not_known(run_dir, tmp_path_factory):
    with pytest.raises(SystemExit, match=r"no metrics\.jsonl and no rollouts"):
        look(tmp_path_factory.mktemp("empty"))
    early = make_run(tmp_path_factory.mktemp("runs") / "early", [], {"args": {}})
    (early / "metrics.jsonl").unlink()
    with pytest.raises(
        SystemExit, match=r"early: the run has ended before its first step, or is in it$"
    ):
        look(early)
    (run_dir / "config.json").unlink()
    with pytest.raises(SystemExit, match="give --tokenizer"):
        look(run_dir)
    look(run_dir, tokenizer="tiny")
    assert drawn(run_dir / "rollouts/step_000001.html").is_file()


def test_a_dump_may_be_named_from_its_own_folder(run_dir, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(run_dir / "rollouts")
    out = tmp_path_factory.mktemp("out")
    look(Path("step_000001.parquet"), out=out)
    assert len(list(out.rglob("step_000001.html"))) == 1
    os.mkfifo("pipe.parquet")
    with pytest.raises((SystemExit, ValueError), match="no regular file"):
        look(Path("pipe.parquet"), out=out)


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


def test_the_first_pictures_may_be_of_a_prompt_that_the_page_leaves_out(tmp_path, world, capsys):
    episodes = random_episodes(seed=2, prompts=10, samples=1)
    episodes[9].media = [Media.open("image", [picture(56, 56, 1)], LIMITS)]
    path = dump_rollouts(tmp_path, 3, episodes, [], [], build_tokenizer(), world)
    write_page(path, build_tokenizer())
    assert "not written" not in capsys.readouterr().out
    page = path.with_suffix(".html").read_text()
    assert "<h2>Prompt 7</h2>" in page and "<image " not in page


def test_what_arrow_cannot_read_costs_the_page_but_not_the_run(tmp_path, tokenizer, world, capsys):
    episodes = random_episodes(seed=3, prompts=1, samples=2)
    path = dump_rollouts(tmp_path, 1, episodes, [], [], tokenizer, world)
    pq.write_table(pa.table({"prompt_index": [["a list"]]}), path)
    write_page(path, tokenizer)
    assert "step_000001.html not written" in capsys.readouterr().out


def test_neighbours_stay_utf_8_in_other_locales(run_dir, tokenizer, monkeypatch):
    one, two = (run_dir / f"rollouts/step_00000{step}.parquet" for step in (1, 2))
    write_page(one, tokenizer)
    page = one.with_suffix(".html")
    page.write_text(page.read_text("utf-8").replace("</h1>", ": é漢</h1>"), "utf-8")
    real = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path, encoding=None, errors=None: real(path, encoding or "latin-1", errors),
    )
    write_page(two, tokenizer)
    assert ": é漢</h1>" in page.read_bytes().decode()


def test_pictures_are_shared_as_they_were(tmp_path, world):
    """Not because they are equal: the packer encodes each object once, and a replay is to round as
    the step did."""
    episodes = random_episodes(seed=2, prompts=2, samples=2)
    shared, equal = (Media.open("image", [picture(56, 56, 1)], LIMITS) for _ in range(2))
    for episode, media in zip(episodes, ([shared], [shared, equal], [equal], [])):
        episode.media = media
    path = dump_rollouts(tmp_path, 3, episodes, [], [], build_tokenizer(), world)
    (first,), (second, other), (third,), none = (
        episode.media for episode in load_rollouts(path, 3, world, LIMITS)[0]
    )
    assert first is second and other is third and first is not other and none == []


def test_what_is_no_dump_or_has_lost_its_pictures_cannot_be_replayed(tmp_path, world):
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(b"PAR1, and then nothing")
    empty = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"step": [], "ranks": []}), empty)
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"prompt": ["a row"]}), other)
    for path in (torn, empty, other):
        with pytest.raises(
            SystemExit, match=rf"^--replay {path}: holds no episodes of --dump-rollouts-every \("
        ):
            load_rollouts(path, 1, world, LIMITS)
    episodes = random_episodes(seed=2, prompts=1, samples=1)
    episodes[0].media = [Media.open("image", [picture(56, 56, 1)], LIMITS)]
    path = dump_rollouts(tmp_path, 3, episodes, [], [], build_tokenizer(), world)
    older = tmp_path / "older.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["terms"]), older)
    with pytest.raises(SystemExit, match=f"^--replay {older}: lacks terms: another version"):
        load_rollouts(older, 3, world, LIMITS)
    pictures = path.with_suffix(".media_0.parquet")
    pictures.unlink()
    with pytest.raises(
        SystemExit, match=rf"^--replay {path}: needs its pictures beside it, {pictures}$"
    ):
        load_rollouts(path, 3, world, LIMITS)


def test_a_full_disk_costs_the_dump_and_the_page_but_not_the_run(
    tmp_path, tokenizer, world, monkeypatch, capsys
):
    def full(path, write):
        raise OSError("No space left on device")

    monkeypatch.setattr("common.rollout.dumps.replace_file", full)
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


# --- data files ---


PROMPT = [{"role": "user", "content": "1+1?"}]


def test_rows_of_training_without_a_truth_are_shown(tmp_path, capsys):
    """As for --eval-only, or an --environment, which may know it."""
    file = tmp_path / "rows.jsonl"
    bare = {"data_source": "mine", "prompt": PROMPT}
    full = bare | {"reward_model": {"ground_truth": "2"}}
    for rows, told in (
        ([bare, bare], "2 rows have no reward_model."),
        ([full, bare], "1 rows have no"),
        ([full], ""),
    ):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        look(file)
        output = capsys.readouterr().out
        assert f"{len(rows)} rows, 0 of them unusable" in output and '"content": "1+1?"' in output
        assert (told in output) if told else "have no reward_model" not in output


@pytest.mark.parametrize(
    "row, told",
    [
        ({"data_source": "mine", "messages": PROMPT}, "is for sft.py"),
        ({"question": "1+1?", "answer": "2"}, "is for sft.py"),
        ({"conversations": PROMPT}, "is for sft.py"),
        ({"message_list": PROMPT}, "is for sft.py"),
        (
            {"data_source": "mine", "truth": "2", "responses": ["2"]},
            "is for python -m common.score",
        ),
        (
            {"data_source": "mine", "prompts": PROMPT},
            "lacks prompt; it has the columns data_source, prompts",
        ),
    ],
)
def test_a_file_of_other_rows_is_named_by_what_reads_it(tmp_path, row, told):
    jsonl = tmp_path / "rows.jsonl"
    parquet = tmp_path / "rows.parquet"
    jsonl.write_text(json.dumps(row))
    pq.write_table(pa.Table.from_pylist([row]), parquet)
    for file in (jsonl, parquet):
        with pytest.raises(SystemExit, match=rf"{file} {re.escape(told)}"):
            look(file)


def test_rows_are_counted_from_0(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"data_source": "mine", "prompt": PROMPT}))
    look(file, rows=0)
    assert "--- row" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--rows -1: 0 or more"):
        look(file, rows=-1)


def test_its_help_names_the_command_and_keeps_its_lines(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/anywhere/common/look/__main__.py", "--help"])
    monkeypatch.delitem(sys.modules, "common.look.__main__")
    with pytest.raises(SystemExit):
        runpy.run_module("common.look", run_name="__main__")
    output = capsys.readouterr().out
    assert "\nusage: python -m common.look " in output
    for line in common.look.__main__.__doc__.strip().splitlines():
        assert line in output.splitlines()


# --- folders of runs, and the samples of their evaluations ---

EVIL = "</script><script>document.title = 'OWNED'</script>'\"{{7*7}}\u2028\u202e\x1b"
EVIL += "<img src=https://evil.test/x onerror=\"document.title = 'OWNED'\">\ud800"


def make_run(folder: Path, records: list[dict], config: dict | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


RISING = [{"step": step, "reward/mean": 0.1 * step} for step in range(1, 21)]


def cells(page: Path) -> list[list[str]]:
    """Texts of all rows of tables."""
    rows = re.findall(r"<tr>(.*?)</tr>", page.read_text(), re.S)
    inside = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in rows]
    return [[html.unescape(re.sub(r"<[^>]*>", "", cell)).strip() for cell in row] for row in inside]


def save_samples(path: Path, count: int, **others) -> None:
    path.parent.mkdir(exist_ok=True)
    plain = {
        "data_source": "sums",
        "prompt": "1+1",
        "completion": "2",
        "truth": "2",
        "score": 1.0,
        "length": 3,
    }
    rows = [
        plain | {"row": i, "correct": [True, False, None][i % 3]} | others for i in range(count)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def test_a_bad_argument_costs_itself_alone(run_dir, tmp_path_factory, capsys):
    """A run without anything, files that are no data, a run whose model is gone: it has its
    curves."""
    (run_dir / "config.json").write_text(json.dumps({"args": {"model": str(run_dir / "gone")}}))
    others = tmp_path_factory.mktemp("others")
    good = make_run(others / "good", RISING)
    (others / "none").mkdir()
    (others / "note.txt").write_text("not a table")
    told = {"none": "no metrics.jsonl", "note.txt": "neither .jsonl", "x.jsonl": "no such file"}
    bad = [others / name for name in told]
    look(run_dir, *bad, good)
    output = capsys.readouterr().out.splitlines()
    warnings = [line for line in output if line.startswith("warning: ")]
    assert len(warnings) == 4 and "give --tokenizer" in warnings[0]
    assert [line for line in output if line not in warnings] == [
        str(drawn(run / "curves.png")) for run in (run_dir, good)
    ]
    assert all(
        str(path) in line and told[path.name] in line for path, line in zip(bad, warnings[1:])
    )
    for path in bad:
        with pytest.raises(SystemExit, match=re.escape(told[path.name])):
            look(path)
    with pytest.raises(SystemExit, match="nothing to show"):
        look(*bad)
    with pytest.raises(SystemExit, match="give the folder"):
        look()


def test_a_damaged_line_is_told_by_its_number(tmp_path, capsys):
    run = make_run(tmp_path / "run", RISING)
    look(run)
    assert "warning" not in capsys.readouterr().out
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([*lines[:2], lines[2][:9] + "\n\n", *lines[3:]]))
    look(run)
    assert (
        f"warning: {metrics}: 1 unreadable lines left out, the first: 3\n"
        in capsys.readouterr().out
    )


def test_what_cannot_be_written_is_told(run_dir, capsys):
    """Folders stand where files go: so it is root, too, who cannot write them."""
    save_samples(run_dir / "eval_samples.parquet", 1)
    names = ("curves.png", "rollouts/step_000001.html", "eval_samples.html")
    pages = [drawn(run_dir / name) for name in names]
    for page in pages:
        page.mkdir(parents=True)
        os.utime(page, (1, 1))
    (run_dir / "rollouts/step_000002.html").write_text("there")
    look(run_dir, run_dir / "rollouts/step_000001.parquet")
    output = capsys.readouterr().out
    for page in pages:
        assert re.search(rf"^warning: {page} not written", output, re.M), page
        assert f"\n{page}\n" not in output, page


def test_hostile_runs_become_harmless_pages(tmp_path, capsys):
    odd = {
        "nan": math.nan,
        "inf": math.inf,
        "text": "x",
        "none": None,
        "big": 10**400,
        "list": [1],
        EVIL: 1.0,
    }
    records = [{"step": step, "reward/mean": 0.5} | odd for step in range(5)]
    events = [
        {"event": EVIL, "step": 3, "x": [math.nan, EVIL]},
        {"event": "no step"},
        {"event": "x", "step": 10**400},
    ]
    evil = make_run(
        tmp_path / "evil <b>&'\" #?%",
        records + events,
        {"args": {EVIL: EVIL, "x": [math.nan]}, EVIL: {}},
    )
    with open(evil / "metrics.jsonl", "a") as file:
        file.write(
            '{"step": 5, "rew\n[1]\n{"step": [1]}\n{"step": NaN}\n{"step": null}\n'
            + "[" * 100_000
            + "\n{"
        )
    save_samples(
        evil / "eval/step_000001.parquet",
        3,
        prompt=EVIL[:-1],
        completion=EVIL[:-1] * 50,
        truth=EVIL[:-1],
    )
    (evil / "eval/step_000002.parquet").write_bytes(b"PAR1")
    empty = make_run(tmp_path / "empty", [])
    listed = make_run(tmp_path / "list", RISING)
    (listed / "config.json").write_text("[1]")
    os.mkfifo(listed / "eval_samples.parquet")
    pipes = tmp_path / "pipes"
    (pipes / "rollouts").mkdir(parents=True)
    for name in (
        "metrics.jsonl",
        "config.json",
        "rollouts/step_000001.parquet",
        "rollouts/step_000002.html",
    ):
        os.mkfifo(pipes / name)
    look(evil, empty, listed, pipes)
    page = drawn(evil / "eval/step_000001.html")
    output = capsys.readouterr().out.splitlines()
    assert str(page) in output
    assert str(drawn(evil / "curves.png")) in output
    assert str(drawn(listed / "curves.png")) in output
    warnings = [line for line in output if line.startswith("warning")]
    assert len(warnings) == 2, "a pipe is nobody's samples"
    assert "step_000002.html not written" in warnings[1], "a pipe is nobody's samples"
    assert (
        f"{evil}/metrics.jsonl: 8 unreadable lines left out, the first: 7, 9, 10, 11, 12"
        in warnings[0]
    )
    text = page.read_text()
    assert "default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-" in text
    assert "OWNED" in text
    assert "49" not in re.findall("'\"(..)", html.unescape(text))
    assert "<img" not in text
    assert text.count("<script") == text.count("</script>") == 1
    assert not re.findall(r'(?:src|href)="', text) and "@import" not in text
    assert all(c.isprintable() or c == "\n" for c in text)


def test_samples_of_an_evaluation_come_wrong_ones_first_and_are_bounded(tmp_path):
    save_samples(tmp_path / "eval/step_000007.parquet", MAX_SAMPLES + 200, prompt="x" * 10_000)
    page = samples_page(tmp_path / "eval/step_000007.parquet", tmp_path / "pages")
    text = page.read_text()
    assert len(text) < 5e6
    assert f"{MAX_SAMPLES + 200} samples, 400 of them wrong" in text
    assert "200 are left out" in text
    verdicts = re.findall(r'data-name="verdict"[^>]*>([^<]*)<', text)
    assert len(verdicts) == MAX_SAMPLES
    assert verdicts[:400] == ["wrong"] * 400
    assert {*verdicts[400:]} == {"right", "no truth"}
    page.write_text("as it was")
    samples_page(tmp_path / "eval/step_000007.parquet", tmp_path / "pages")
    assert page.read_text() == "as it was"
    os.utime(page, (1, 1))
    samples_page(tmp_path / "eval/step_000007.parquet", tmp_path / "pages")
    assert page.read_text() != "as it was", "it was older than its samples"


def test_samples_of_both_kinds_have_a_page_each(tmp_path, capsys):
    """A run of --eval-only on parquet, and one on .jsonl, in the same folder."""
    run = make_run(tmp_path / "run", RISING)
    save_samples(run / "eval_samples.parquet", MAX_SAMPLES + 1, completion="of parquet")
    lines = [
        {"row": i, "completion": "of lines", "correct": None, "truth": None, "score": None}
        for i in range(1002)
    ]
    (run / "eval_samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    look(run)
    output = capsys.readouterr().out.splitlines()
    for name, left_out in {"eval_samples.parquet": 1, "eval_samples.jsonl": 2}.items():
        page = samples_page(run / name, drawn(run))
        text = page.read_text()
        assert ("of parquet" in text, "of lines" in text) == (
            name.endswith("parquet"),
            name.endswith("jsonl"),
        )
        assert f"{left_out} are left out here; {run / name} has them all" in text
        assert str(page) in output
    names, first, *_ = cells(page)
    shown = {name: text for name, text in zip(names, first) if text}
    assert shown == {"row": "0", "completion": "of lines", "verdict": "no truth"}, (
        "nothing where nothing is"
    )


def kinds(page: Path) -> list[str]:
    """What the filter offers."""
    return re.findall(r'<input type="radio"[^>]*> ([^<]*)<', page.read_text())


def test_samples_have_no_column_without_a_value(tmp_path):
    names = ["row", "source", "prompt", "completion", "truth", "verdict", "score", "length"]
    save_samples(tmp_path / "eval/step_000001.parquet", 3)
    page = samples_page(tmp_path / "eval/step_000001.parquet", tmp_path / "pages")
    assert cells(page)[0] == names
    save_samples(tmp_path / "eval/step_000002.parquet", 3, truth=None, score=None, correct=None)
    page = samples_page(tmp_path / "eval/step_000002.parquet", tmp_path / "pages")
    assert cells(page)[0] == ["row", "source", "prompt", "completion", "verdict", "length"]
    assert [row[4] for row in cells(page)[1:]] == ["no truth"] * 3


def test_the_filter_offers_what_there_is(tmp_path):
    """Four of each verdict, the first of them cut off; and one that no scorer answered for."""
    save_samples(tmp_path / "eval/step_000001.parquet", 12)
    file = tmp_path / "eval/step_000001.parquet"
    rows = pq.read_table(file).to_pylist()
    for row in rows:
        row |= {"truncated": row["row"] < 3, "failed": row["row"] == 4}
    pq.write_table(pa.Table.from_pylist(rows), file)
    page = samples_page(file, tmp_path / "pages")
    assert kinds(page) == [
        "all 12",
        "right 4",
        "wrong 3",
        "cut off 3",
        "not scored 1",
        "no truth 4",
    ]
    assert "12 samples, 3 of them wrong" in page.read_text()
    verdicts = [row[5] for row in cells(page)[1:]]
    assert verdicts[:3] == ["wrong, cut off", "wrong", "wrong"]
    assert verdicts[3:7] == ["right, cut off", "no truth, cut off", "right", "not scored"]
    save_samples(file, 1)
    os.utime(page, (1, 1))
    assert kinds(samples_page(file, tmp_path / "pages")) == ["all 1", "right 1"]


def test_samples_link_to_the_evaluations_before_and_after(tmp_path):
    files = [tmp_path / f"eval/step_00000{step}.parquet" for step in (0, 5)]
    pages = [tmp_path / "pages" / file.with_suffix(".html").name for file in files]
    save_samples(files[0], 1)
    samples_page(files[0], tmp_path / "pages")
    assert links(pages[0]) == []
    os.utime(pages[0], (1, 1))
    save_samples(files[1], 1)
    samples_page(files[1], tmp_path / "pages")
    assert links(pages[0]) == [("step_000005.html", "next: step 5")]
    assert links(pages[1]) == [("step_000000.html", "previous: step 0")]
    assert pages[0].stat().st_mtime == 1, "its samples are as old as they were"


def dom(page: Path, chosen: str, folder: Path) -> str:
    """What chromium has made of a page, with the requests that it wanted to make in
    folder/log.json."""
    command = [
        "chromium",
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder}/profile",
    ]
    command += [
        "--window-size=1200,900",
        "--virtual-time-budget=3000",
        f"--log-net-log={folder}/log.json",
    ]
    command += ["--dump-dom", f"file://{quote(str(page))}#{chosen}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium")
def test_a_browser_sorts_the_samples_and_runs_nothing_else(tmp_path):
    save_samples(tmp_path / "eval/step_000001.parquet", 30, completion=EVIL[:-1])
    page = samples_page(tmp_path / "eval/step_000001.parquet", tmp_path / "pages")
    as_written, by_row = (dom(page, chosen, tmp_path) for chosen in ("", "sort=row"))
    assert re.findall(r'data-name="row">(\d+)<', as_written)[:3] == ["1", "4", "7"], (
        "wrong ones first"
    )
    assert re.findall(r'data-name="row">(\d+)<', by_row) == [str(i) for i in range(30)]
    assert "<title>OWNED" not in as_written and "<title>OWNED" not in by_row
    requests = set(re.findall(r'"url":"(\w+:[^"]*)"', (tmp_path / "log.json").read_text()))
    assert {url for url in requests if url.startswith("file:")} <= {page.as_uri()}, (
        "and chromium's own"
    )
    assert not [url for url in requests if "evil.test" in url]


VISIBLE = "[...document.querySelectorAll('tbody tr')].filter(row => row.offsetHeight > 0).length"


@pytest.mark.slow  # what the filter offers is tested above
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_samples_fit_the_screen_and_are_filtered_without_a_script(tmp_path):
    save_samples(
        tmp_path / "eval/step_000001.parquet",
        40,
        prompt="Sort these words. " * 60 + "The end of the prompt.",
        completion="x" * 500,
        truth="https://example.org/" + "a" * 120,
    )
    page = samples_page(tmp_path / "eval/step_000001.parquet", tmp_path / "pages")
    with Browser(tmp_path) as browser:
        for width, is_dark in SCREENS:
            browser.open(page, width, is_dark)
            browser.run("document.querySelectorAll('details').forEach(text => text.open = true)")
            check_screen(browser, tmp_path / f"samples_{width}.png", is_dark)
        browser.call("Emulation.setScriptExecutionDisabled", value=True)
        browser.open(page, width=390)
        assert browser.run(VISIBLE) == 40
        for kind, count in {"wrong": 13, "right": 14, "no-truth": 13}.items():
            browser.run(f"document.getElementById('{kind}').click()")
            assert browser.run(VISIBLE) == count
        browser.run("scrollTo(0, 5000)")
        browser.run("document.querySelector('.filter input').click()")
        assert browser.run(VISIBLE) == 40, "and back"
        top, bottom = browser.run(
            "(({top, bottom}) => [top, bottom])"
            "(document.querySelector('.filter').getBoundingClientRect())"
        )
        assert top >= 0 and bottom < 844, "the way back stays on the screen"

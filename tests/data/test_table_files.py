"""One reader of tables: what public files look like, in every place that takes a file of rows."""

import codecs
import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tyro
from helpers import ROOT

from common.data.conversations import Conversations
from common.data.rows import RowFiles
from common.data.table_files import ROWS_NAME, is_hub_id, stem_of
from common.flags import Data, Machine, Run, parse
from common.look.show import show
from common.prepare import countdown, geo3k, gsm8k, math, pixel_reasoner
from common.score import Scoring, score_file
from papers.pyvision import rows

ROWS = [
    {"question": f"{i} + {i}?", "answer": f"It is \\boxed{{{2 * i}}}. #### {2 * i}", "é": [i]}
    for i in range(5)
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
AS_LIST = json.dumps(ROWS)


def parquet(rows: list) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


# what public files look like: name, content, what the third row is called in a message
FORMATS = {
    "lines": ("a.jsonl", LINES.encode(), "line 3"),
    "lines, another name": ("a.ndjson", LINES.encode(), "line 3"),
    "lines named .json": ("a.json", LINES.encode(), "line 3"),
    "capitals": ("a.JSONL", LINES.encode(), "line 3"),
    "Windows": ("a.jsonl", codecs.BOM_UTF8 + LINES.replace("\n", "\r\n").encode(), "line 3"),
    "PowerShell": ("a.jsonl", LINES.encode("utf-16"), "line 3"),
    "blank lines": ("a.ndjson", b"\n\n" + LINES.replace("\n", "\n\n").encode(), "line 7"),
    "packed lines": ("a.jsonl.gz", gzip.compress(LINES.encode()), "line 3"),
    "packed in parts": (
        "a.ndjson.gz",
        gzip.compress(LINES[:9].encode()) + gzip.compress(LINES[9:].encode()),
        "line 3",
    ),
    "packed, and not called so": ("a.jsonl", gzip.compress(LINES.encode()), "line 3"),
    "a list": ("a.json", AS_LIST.encode(), "row 2"),
    "a list over lines": ("a.json", json.dumps(ROWS, indent=2).encode("utf-8-sig"), "row 2"),
    "a list named .jsonl": ("a.jsonl", AS_LIST.encode(), "row 2"),
    "a packed list": ("a.json.gz", gzip.compress(AS_LIST.encode()), "row 2"),
    "data": ("a.json", json.dumps({"version": "1.1", "data": ROWS}).encode(), "row 2"),
    "data over lines": ("a.json", json.dumps({"data": ROWS}, indent=1).encode(), "row 2"),
    "a list without a kind": ("rows", AS_LIST.encode(), "row 2"),
    "parquet": ("a.parquet", parquet(ROWS), "row 2"),
    "parquet in capitals": ("A.PARQUET", parquet(ROWS), "row 2"),
    "parquet without a kind": ("5f3a9c", parquet(ROWS), "row 2"),
}


def written(folder: Path, name: str, content: bytes) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return str(folder / name)


@pytest.mark.parametrize("once", [None, lambda load: load()])
@pytest.mark.parametrize("name, content, place", FORMATS.values(), ids=FORMATS)
def test_a_format_is_read_with_its_numbers(tmp_path, name, content, place, once):
    """By one rank into Arrow for all, or by a program on its own."""
    path = written(tmp_path, name, content)
    files = RowFiles(path, "--train-data", once=once)
    assert list(files.records()) == ROWS
    assert files.row(2) == ROWS[2]
    assert files.place(2) == f"{path} {place}"
    assert list(RowFiles([path, path], "FILE", max_rows=7, once=once).records()) == ROWS + ROWS[:2]


def test_the_fingerprint_is_that_of_the_rows_in_each_format(tmp_path, sft_tokenizer):
    """So a resume goes on from a copy of them in another format."""
    fingerprints = set()
    for number, (name, content, _) in enumerate(FORMATS.values()):
        path = written(tmp_path / str(number), name, content)
        fingerprints.add(
            Conversations(path, "--train-data", sft_tokenizer, max_tokens=500).fingerprint
        )
    assert len(fingerprints) == 1


@pytest.fixture(scope="module")
def sft_tokenizer():
    from common.hub import load_tokenizer

    return load_tokenizer(str(ROOT / "common/assets/tiny"))


ELSEWHERE = {
    "rows": {"features": [{"name": "x"}], "rows": [{"row": ROWS[0]}]},
    "instances": {"type": "text2text", "instances": ROWS},
    "splits": {"train": ROWS, "test": ROWS},
    "two lists": {"data": ROWS, "examples": ROWS},
}


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("value", ELSEWHERE.values(), ids=ELSEWHERE)
def test_rows_under_another_key_are_answered_with_the_keys(tmp_path, value, indent):
    path = written(tmp_path, "a.json", json.dumps(value, indent=indent).encode())
    keys = ", ".join(map(repr, value))
    with pytest.raises(
        ValueError,
        match=f"--train-data: {path} .* it is one object with the keys {keys}: write its rows",
    ):
        RowFiles(path, "--train-data")


def test_the_only_row_of_a_file_is_a_row(tmp_path):
    """As `head -1` leaves it, whatever its columns are called."""
    row = {"prompt": "a", "data": [{"x": 1}], "test": [{"x": 1}]}
    assert list(
        RowFiles(written(tmp_path, "a.jsonl", json.dumps(row).encode()), "FILE").records()
    ) == [row]
    assert list(
        RowFiles(written(tmp_path, "a.json", json.dumps(ROWS[0]).encode()), "FILE").records()
    ) == [ROWS[0]]
    with pytest.raises(
        ValueError, match="it is one object with the keys 'question', 'answer', 'é'"
    ):
        RowFiles(
            written(tmp_path, "b.json", json.dumps(ROWS[0], indent=1, ensure_ascii=False).encode()),
            "FILE",
        )


BROKEN = {
    "a pointer of Git LFS": (
        "a.parquet",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n",
        "git lfs pull",
    ),
    "a pointer, of lines": (
        "a.jsonl",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n",
        "git lfs pull",
    ),
    "a web page": ("a.jsonl", b"\n<!DOCTYPE html><html>", "a web page"),
    "a table with commas": ("a.csv", b"question,answer\n", "it begins with b'question,answer"),
    "half a packed file": ("a.jsonl.gz", gzip.compress(LINES.encode())[:40], "end-of-stream"),
    "a damaged packed file": (
        "a.jsonl.gz",
        gzip.compress(LINES.encode())[:-8] + b"12345678",
        "CRC",
    ),
    "half a list": ("a.json", AS_LIST[:200].encode(), "Unterminated|Expecting"),
    "half a list over lines": (
        "a.json",
        json.dumps(ROWS, indent=1)[:200].encode(),
        "Unterminated|Expecting",
    ),
    "half a list with a comma in front of each row": (
        "a.json",
        ("[\n" + "\n,".join(map(json.dumps, ROWS))).encode(),
        "Expecting",
    ),
    "half a parquet file": (
        "a.parquet",
        parquet(ROWS)[:500],
        "Parquet magic bytes not found|magic",
    ),
}


@pytest.mark.parametrize("name, content, what", BROKEN.values(), ids=BROKEN)
def test_what_is_no_file_of_rows_is_one_answer(tmp_path, name, content, what):
    path = written(tmp_path, name, content)
    with pytest.raises(
        ValueError, match=f"--eval-data: {path} is neither .jsonl, .json nor .*({what})"
    ):
        RowFiles(path, "--eval-data")


@dataclass
class Flags:
    """Of a script."""

    data: Data = field(default_factory=Data)
    run: Run = field(default_factory=Run)
    machine: Machine = field(default_factory=Machine)


# --- patterns, folders and addresses --------------------------------------------------------------


def test_a_pattern_is_its_files_by_name(tmp_path, monkeypatch):
    for number in (1, 0):
        written(tmp_path / "x", f"train-0000{number}-of-00002.parquet", parquet([{"n": number}]))
    written(tmp_path / "x", "README.md", b"# rows")
    written(tmp_path / "x", "test[1].jsonl", b'{"n": 5}')
    monkeypatch.chdir(tmp_path)
    for pattern in (
        "x/train-*.parquet",
        str(tmp_path / "x/train-*"),
        "**/train*.parquet",
        "x/train-0000[01]-*",
    ):
        assert [record["n"] for record in RowFiles(pattern, "--train-data").records()] == [0, 1]
    assert [record["n"] for record in RowFiles("x/train-*,x/test[1].jsonl,", "FILE").records()] == [
        0,
        1,
        5,
    ]
    with pytest.raises(
        FileNotFoundError, match=r"--train-data: no file matches x/none-\*\.parquet"
    ):
        RowFiles("x/none-*.parquet", "--train-data")
    with pytest.raises(
        ValueError,
        match=r"x/\* matches files of several kinds, such as x/README\.md and x/test\[1\]",
    ):
        RowFiles("x/*", "--train-data")
    with pytest.raises(
        ValueError, match=r"x is a folder: name its files, such as x/test\[1\]\.jsonl"
    ):
        RowFiles("x", "--train-data")
    with pytest.raises(ValueError, match=r"is a folder: name its files, such as .*x/test"):
        RowFiles(str(tmp_path), "--train-data")


@pytest.mark.parametrize(
    "address, told",
    [
        (
            "hf://datasets/openai/gsm8k/main/train.parquet",
            "`hf download openai/gsm8k --repo-type dataset",
        ),
        (
            "hf://datasets/openai/gsm8k@main/*.parquet",
            "`hf download openai/gsm8k --repo-type dataset",
        ),
        ("https://huggingface.co/datasets/openai/gsm8k", "also take openai/gsm8k:CONFIG:SPLIT"),
        ("https://example.org/datasets/a/rows.jsonl?x=1", "is an address, not a path: download it"),
        ("s3://bucket/rows.jsonl", "is an address, not a path: download it"),
    ],
)
def test_an_address_is_answered_in_each_place(tmp_path, address, told):
    places = {
        "--train-data": lambda: RowFiles(address, "--train-data", once=lambda load: load()),
        "FILE": lambda: score_file(Scoring(Path(address))),  # which makes one slash of two
        "gsm8k": lambda: gsm8k.main(gsm8k.Args(tmp_path / "out", address)),
        "math": lambda: math.main(math.Args(tmp_path / "out", address)),
        "geo3k": lambda: geo3k.main(geo3k.Args(tmp_path / "out", address)),
        "countdown": lambda: countdown.read_published(address),
        "pyvision": lambda: rows.main(rows.Args(address, tmp_path / "out")),
        "look": lambda: show(Path(address)),
    }
    for place in places.values():
        with pytest.raises(ValueError) as error:
            place()
        message = str(error.value)
        assert told in message and address in message and "\n" not in message


def test_an_id_of_the_hub_is_answered_where_a_folder_is_expected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for program in (gsm8k, math, geo3k):
        with pytest.raises(
            FileNotFoundError, match=r"--source no/such: .*`hf download no/such --repo-type dataset"
        ):
            program.main(program.Args(tmp_path / "out", "no/such"))


def test_files_are_not_ids_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_id(Path("openai/gsm8k")) and is_hub_id(Path("openai/gsm8k:main:train"))
    for name in ("data/a.ndjson", "data/a.jsonl.gz", "data/A.JSON", "gsm8k", "data/x/a"):
        assert not is_hub_id(Path(name))


def test_the_shell_may_have_made_several_arguments_of_a_pattern(monkeypatch):
    for argv in (
        ["--train-data", "a", "b", "--seed", "1"],
        ["--train-data=a", "b"],
        ["--train-data", "a,b"],
    ):
        monkeypatch.setattr("sys.argv", ["sft.py", "--model", "tiny", *argv])
        assert parse(Flags, Flags(), "")[0].data.train_data == "a,b"
    for argv in (["--train-data"], ["--train-data", "--seed", "1"]):
        monkeypatch.setattr("sys.argv", ["sft.py", "--model", "tiny", *argv])
        with pytest.raises(SystemExit, match="--train-data is followed by no file"):
            parse(Flags, Flags(), "")
    flags = tyro.cli(Scoring, args=["a.jsonl", "b.jsonl", "--bad-rows", "drop"])
    assert (flags.file, flags.bad_rows) == ("a.jsonl,b.jsonl", "drop")
    args = tyro.cli(math.Args, args=["--source", "a.jsonl", "b.jsonl", "--out", "x"])
    assert args.source == "a.jsonl,b.jsonl"
    assert tyro.cli(math.Args, args=["--out", "x"]).source == "hub"
    for argv in (["--source", "--out", "x"], ["--out", "x", "--source"]):
        with pytest.raises(SystemExit):
            tyro.cli(math.Args, args=argv)


# --- programs that prepare data -------------------------------------------------------------------

GSM8K = [{"question": "1 + 1?", "answer": "#### 2"}, {"question": "1 + 2?", "answer": "#### 3"}]
MATH = [{"problem": "1 + 1?", "level": "Level 1", "type": "Algebra", "solution": r"\boxed{2}"}] * 2


def as_snapshot(folder: Path, layout: str, rows: list) -> str:
    """Files of two splits, as the hub, its client or the authors lay them out."""
    written(folder, "README.md", b"# a card")
    written(folder, "dataset_infos.json", b'{"main": {"splits": {}}}')
    written(folder / ".cache", "x.json", b"{}")
    for split in ("train", "test"):
        name = layout.format(split=split)
        kind = ROWS_NAME.search(name)[0].lower()
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        content = {
            ".parquet": parquet(rows),
            ".json": json.dumps(rows).encode(),
            ".jsonl.gz": gzip.compress(lines),
        }
        written((folder / name).parent, Path(name).name, content.get(kind, lines))
    return str(folder)


SNAPSHOTS = [
    "main/{split}-00000-of-00001.parquet",
    "data/{split}-00000-of-00001-a09b74b3ef9c3b56.parquet",
    "{split}-00000-of-00001.parquet",
    "default/{split}/0000.parquet",
    "{split}.parquet",
    "{split}.jsonl",
    "{split}.json",
    "{split}.ndjson",
    "data/{split}.jsonl.gz",
]


@pytest.mark.parametrize("layout", SNAPSHOTS)
def test_gsm8k_reads_a_snapshot_of_its_source(tmp_path, layout):
    source = as_snapshot(tmp_path / "gsm8k", layout, GSM8K)
    written(
        tmp_path / "gsm8k/socratic",
        "train-00000-of-00001.parquet",
        parquet([{"question": "no", "answer": "no"}]),
    )
    written(tmp_path / "gsm8k", "train_socratic.jsonl", b"{}")
    for _ in range(2):  # what the first one has written is no source of the second one
        gsm8k.main(gsm8k.Args(tmp_path / "out", source))
    for split in ("train", "test"):
        rows = pq.read_table(tmp_path / f"out/{split}.parquet").to_pylist()
        assert [row["reward_model"]["ground_truth"] for row in rows] == ["2", "3"]
        assert rows[0]["extra_info"]["split"] == split


def test_gsm8k_may_write_beside_its_source(tmp_path):
    for layout in ("{split}.jsonl", "main/{split}-00000-of-00001.parquet"):
        source = as_snapshot(tmp_path / layout[:4], layout, GSM8K)
        for out in ("", "", "data", "data", "main/train"):
            gsm8k.main(gsm8k.Args(Path(source) / out, source))
            assert (
                pq.read_table(Path(source) / out / "train.parquet").column_names[0] == "data_source"
            )


@pytest.mark.parametrize(
    "layout",
    ["data/{split}-00000-of-00001.parquet", "data/{split}-00000-of-00001-0123456789abcdef.parquet"],
)
def test_math_reads_a_snapshot_of_its_source_as_the_hub(tmp_path, monkeypatch, layout):
    source = as_snapshot(tmp_path / "snapshot", layout, MATH)
    for out in ("out", "snapshot", "snapshot"):
        math.main(math.Args(tmp_path / out, source))
    parts = {
        f"data/{split}-00000-of-00001.parquet": layout.format(split=split)
        for split in ("train", "test")
    }
    monkeypatch.setattr(math, "hf_hub_download", lambda _, name, **__: f"{source}/{parts[name]}")
    math.main(math.Args(tmp_path / "hub", "hub"))
    for split in ("train", "test"):
        here, there = (
            pq.read_table(tmp_path / f"{out}/{split}.parquet").to_pylist() for out in ("out", "hub")
        )
        assert here == there and here[1]["data_source"] == "DigitalLearningGmbH/MATH-lighteval"


def test_math_reads_benchmarks_in_each_format(tmp_path):
    """By their names, without what they are packed in; a second time beside its own output."""
    rows = [
        {"question": row["question"], "answer": row["answer"].partition(". ####")[0]}
        for row in ROWS
    ]
    for number, (name, *_) in enumerate(FORMATS.values()):
        if "." in name:
            benchmark = f"bench{number}_test{ROWS_NAME.search(name)[0]}"
            text = "".join(json.dumps(row) + "\n" for row in rows).encode()
            is_packed, is_parquet = name.endswith(".gz"), name.lower().endswith(".parquet")
            written(
                tmp_path,
                benchmark,
                parquet(rows) if is_parquet else gzip.compress(text) if is_packed else text,
            )
    for _ in range(2):
        math.main(math.Args(tmp_path, str(tmp_path)))
        table = pq.read_table(tmp_path / "test.parquet").to_pylist()
        sources = {row["data_source"] for row in table}
        expected = {
            f"math/bench{n}" for n, (name, *_) in enumerate(FORMATS.values()) if "." in name
        }
        assert sources == expected and len(table) == len(expected) * len(ROWS)
    math.main(
        math.Args(tmp_path / "out", f"{tmp_path}/bench*_test.jsonl,{tmp_path}/bench*_test.json")
    )
    assert pq.read_table(tmp_path / "out/test.parquet").num_rows < len(table)


@pytest.mark.parametrize("name, content, place", FORMATS.values(), ids=FORMATS)
def test_countdown_reads_published_rows_in_each_format(tmp_path, name, content, place):
    rows = [
        {"target": 6, "nums": [1, 2, 3]},
        {"target": 7, "nums": [3, 4]},
        {"target": None, "nums": [3, 4]},
    ]
    is_list, lines = place == "row 2", "".join(json.dumps(row) + "\n" for row in rows)
    content = json.dumps(rows).encode() if is_list else lines.encode()
    if "parquet" in name.lower():
        content = parquet(rows)
    source = written(tmp_path, name, content)
    with pytest.raises(
        ValueError,
        match=r"--source .* (row 2|line 3): nums \[3, 4\] and target None, expected integers",
    ):
        countdown.read_published(source)
    source = written(tmp_path / "data", "train-00000-of-00001.parquet", parquet(rows[:2]))
    for published in (source, str(tmp_path), f"{tmp_path}/data/*.parquet"):
        assert [problem.target for problem in countdown.read_published(published)] == [6, 7]


def test_pixel_reasoner_checks_rows_in_each_format(tmp_path):
    rows = [{"message_list": [{"content": [{"image": "a.jpg"}]}]}] * 3
    written(tmp_path, "dataset_infos.json", b'{"default": {"splits": 1}}')
    written(tmp_path, "a.jsonl", b"\n" + "".join(json.dumps(row) + "\n" for row in rows).encode())
    written(tmp_path, "b.json.gz", gzip.compress(json.dumps({"data": rows}).encode()))
    with pytest.raises(
        SystemExit,
        match=r"(?s)6 paths lead to no file in .*a.jsonl line 2: a.jpg.*b.json.gz row 0: a.jpg",
    ):
        pixel_reasoner.main(pixel_reasoner.Args(tmp_path))
    written(tmp_path, "a.jpg", b"x")
    pixel_reasoner.main(pixel_reasoner.Args(tmp_path))


def test_verdicts_stand_beside_the_first_file(tmp_path, capsys):
    row = {
        "data_source": "openai/gsm8k",
        "reward_model": {"ground_truth": "1"},
        "responses": ["#### 1", "#### 2"],
    }
    for name in ("part-0.jsonl.gz", "part-1.jsonl.gz"):
        written(tmp_path, name, gzip.compress(json.dumps(row).encode()))
    score_file(Scoring(f"{tmp_path}/part-*.jsonl.gz"))
    assert len((tmp_path / "part-0_scored.jsonl").read_text().splitlines()) == 4
    assert "4 responses to 2 prompts" in capsys.readouterr().out
    assert (
        stem_of(Path("x/aime.2024_test.jsonl.gz")) == "aime.2024_test"
        and stem_of(Path("rows.txt")) == "rows"
    )

"""prepare.pixel_reasoner on a small copy of the published layout."""

import json
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from vl import picture

from common.data.formats import read_conversation
from common.files import user_errors
from common.prepare.pixel_reasoner import Args, main


@pytest.fixture
def folder(tmp_path):
    names = [f"images/7-{k}.jpg" for k in range(2)], [f"videos/9/{k}.jpg" for k in range(3)]
    for archive, members in zip(("images.zip", "videos.zip"), names):
        with zipfile.ZipFile(tmp_path / archive, "w") as file:
            for i, name in enumerate(members):
                file.writestr(name, picture(60, 40, i, format_="JPEG"))

    def message(role, *items):
        return {"role": role, "content": list(items)}

    look = [
        message("user", {"text": "?"}, {"image": names[0][0]}),
        message("assistant", {"text": "crop"}),
    ]
    look += [
        message("user", {"text": "here", "image": None}, {"image": names[0][1]}),
        message("assistant", {"text": "b"}),
    ]
    clip = [
        message("user", {"text": "?"}, {"video": names[1]}),
        message("assistant", {"text": "a"}),
    ]
    rows = [{"qid": "7", "message_list": look}, {"qid": "9", "message_list": clip}]
    (tmp_path / "release.json").write_text(json.dumps(rows))
    columns = {
        "question": ["?", "?"],
        "image": [names[0][:1], ["", *names[1]]],
        "answer": [["a"], ["b"]],
        "qid": ["7", "9"],
    }
    pq.write_table(pa.table(columns), tmp_path / "release.parquet")
    return tmp_path


def test_unzips_once_checks_and_rewrites_nothing(folder, capsys):
    before = {name: (folder / name).read_bytes() for name in ("release.json", "release.parquet")}
    main(Args(folder))
    output = capsys.readouterr().out
    assert "images.zip: 2 files unpacked" in output and "videos.zip: 3 files unpacked" in output
    assert "release.json: 2 rows, 5 pictures" in output
    assert "release.parquet: 2 rows, 4 pictures" in output
    (folder / "images/7-0.jpg").unlink()
    main(Args(folder))
    assert "images.zip: 1 files unpacked" in capsys.readouterr().out
    assert before == {name: (folder / name).read_bytes() for name in before}
    for row in json.loads(before["release.json"]):
        for _, frames in read_conversation(row).pictures:
            assert all((folder / frame).is_file() for frame in frames)


def test_two_data_sets_in_one_folder_are_refused(folder):
    """Else the pictures of one would be shown with the questions of the other."""
    main(Args(folder))
    path = folder / "images/7-0.jpg"
    ours = path.read_bytes()
    # of another size, of the same, a broken copy
    for other in (ours + b"x", ours[:-1] + b"x", b"half"):
        path.write_bytes(other)
        with pytest.raises(
            SystemExit, match=r"images/7-0\.jpg is there already, .* not that of images.zip"
        ) as stop:
            main(Args(folder))
        assert "\n" not in str(stop.value) and path.read_bytes() == other
    path.write_bytes(ours)
    with zipfile.ZipFile(folder / "more.zip", "w") as file:
        file.writestr("images/7-0.jpg", picture(60, 40, 9, format_="JPEG"))
    with pytest.raises(SystemExit, match=r"not that of more\.zip"):
        main(Args(folder))
    assert path.read_bytes() == ours


def test_another_repository_in_the_same_folder_is_refused(folder, monkeypatch):
    fetched = []
    monkeypatch.setattr(
        "common.prepare.pixel_reasoner.snapshot_download",
        lambda name, dry_run=False, **_: dry_run or fetched.append(name),
    )
    for _ in range(2):
        main(Args(folder, "some/data"))
    with pytest.raises(SystemExit, match="holds some/data: give other/data another --folder"):
        main(Args(folder, "other/data"))
    assert fetched == ["some/data"] * 2


def test_a_download_without_network_is_an_error(folder, monkeypatch):
    """Though the folder holds files: who knows whether all of them. It is nobody's so far."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="could not download some/data"):
        main(Args(folder, "some/data"))
    assert not (folder / ".repository").exists()


FOREIGN = {
    "numbers.json": b"[1, 2]",
    "other.json": b'[{"question": "?"}]',
    "items.json": b'[{"message_list": [{"content": "text"}]}]',
    "nulls.json": b'[{"message_list": null}]',
    "broken.json": b"{",
    "columns.parquet": None,
    "number.json": b'[{"message_list": [{"content": [{"image": 5}]}]}]',
    "clip.json": b'[{"message_list": [{"content": [{"video": "clip.mp4"}]}]}]',
    "embedded.json": json.dumps([{"image": {"bytes": "x" * 5000, "path": "a.jpg"}}]).encode(),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_file_is_one_line(folder, name, capsys):
    if FOREIGN[name] is None:
        pq.write_table(pa.table({"text": ["a"]}), folder / name)
    else:
        (folder / name).write_bytes(FOREIGN[name])
    with pytest.raises(SystemExit, match=rf"{name}: not one of Pixel Reasoner's .*broken") as stop:
        main(Args(folder))
    assert "\n" not in str(stop.value) and len(str(stop.value)) < 400


BROKEN = {  # file: its content, what the message says
    "cut.json": (b'[{"image": "a.jp', "Unterminated string"),
    "deep.json": (b"[" * 200_000, "recursion"),
    "broken.parquet": (b"PAR1", "Parquet"),
    "page.json": (b"<!DOCTYPE html>", "it is a web page"),
    "pointer.parquet": (b"version https://git-lfs.github.com/spec/v1", "`git lfs pull`"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_of_a_broken_copy_the_whole_reason_is_told(folder, name):
    content, reason = BROKEN[name]
    (folder / name).write_bytes(content)
    with pytest.raises(SystemExit, match=rf"{name} is neither .*{reason}"), user_errors():
        main(Args(folder))


def test_missing_files_are_named(folder):
    main(Args(folder))
    (folder / "images.zip").unlink()
    (folder / "images/7-1.jpg").unlink()
    with pytest.raises(
        SystemExit, match=r"(?s)1 paths lead to no file in .*release.json row 0: images/7-1.jpg"
    ):
        main(Args(folder))


def test_folders_that_their_script_has_moved_are_found(folder):
    main(Args(folder))
    (folder / "images.zip").unlink()
    (folder / "images").rename(folder / "release_images")
    main(Args(folder))


def test_an_archive_that_leaves_its_folder_is_refused(folder):
    with zipfile.ZipFile(folder / "images.zip", "w") as file:
        file.writestr("../outside.jpg", b"x")
    with pytest.raises(SystemExit, match="outside of its folder"):
        main(Args(folder))
    assert not (folder.parent / "outside.jpg").exists()


def damaged(archive: bytes, damage: str) -> bytes:
    if damage == "cut":
        return archive[: len(archive) // 2]
    if damage == "no archive":
        return b"<html>404</html>"
    start = archive.index(b"PK\x01\x02")  # the directory's first entry
    place, value = {"encrypted": (8, 1), "packed otherwise": (10, 99), "another checksum": (16, 7)}[
        damage
    ]
    return archive[: start + place] + bytes([value]) + archive[start + place + 1 :]


@pytest.mark.parametrize(
    "damage", ["cut", "no archive", "encrypted", "packed otherwise", "another checksum"]
)
def test_a_damaged_archive_is_one_line(folder, damage):
    with zipfile.ZipFile(folder / "more.zip", "w") as file:
        file.writestr("images/more.jpg", b"a picture" * 100)
    (folder / "more.zip").write_bytes(damaged((folder / "more.zip").read_bytes(), damage))
    with pytest.raises(
        SystemExit, match=r"more\.zip: cannot be unpacked \(.+\): copy or download it again"
    ) as stop:
        main(Args(folder))
    assert "\n" not in str(stop.value) and not (folder / "images/more.jpg").exists()


def test_without_data_and_without_the_hub(tmp_path, monkeypatch):
    with pytest.raises(
        SystemExit, match=r"no \.json or \.parquet file; --repository downloads some"
    ):
        main(Args(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConnectionError, match="HF_ENDPOINT"):
        main(Args(tmp_path, "nobody/nothing"))
    assert not list(tmp_path.iterdir()), (
        "the hub's client takes a folder with anything in it for a download"
    )

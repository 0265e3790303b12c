"""prepare.pixel_reasoner on a small copy of the published layout."""

import json
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from vl import picture

from common.data.formats import read_conversation
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

    look = [message("user", {"text": "?"}, {"image": names[0][0]}), message("assistant", {"text": "crop"})]
    look += [
        message("user", {"text": "here", "image": None}, {"image": names[0][1]}),
        message("assistant", {"text": "b"}),
    ]
    clip = [message("user", {"text": "?"}, {"video": names[1]}), message("assistant", {"text": "a"})]
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
    said = capsys.readouterr().out
    assert "images.zip: 2 files unpacked" in said and "videos.zip: 3 files unpacked" in said
    assert "release.json: 2 rows, 5 pictures" in said and "release.parquet: 2 rows, 4 pictures" in said
    (folder / "images/7-0.jpg").write_bytes(b"half")  # of a broken copy
    main(Args(folder))
    assert "images.zip: 1 files unpacked" in capsys.readouterr().out
    assert before == {name: (folder / name).read_bytes() for name in before}
    for row in json.loads(before["release.json"]):
        for _, frames in read_conversation(row).pictures:
            assert all((folder / frame).is_file() for frame in frames)


def test_missing_files_are_named(folder):
    main(Args(folder))
    (folder / "images.zip").unlink()
    (folder / "images/7-1.jpg").unlink()
    with pytest.raises(SystemExit, match=r"(?s)1 files are missing in .*release.json row 0: images/7-1.jpg"):
        main(Args(folder))


def test_an_archive_that_leaves_its_folder_is_refused(folder):
    with zipfile.ZipFile(folder / "images.zip", "w") as file:
        file.writestr("../outside.jpg", b"x")
    with pytest.raises(SystemExit, match="outside of its folder"):
        main(Args(folder))
    assert not (folder.parent / "outside.jpg").exists()


def test_without_data_and_without_the_hub(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=r"no \.json or \.parquet file; --repository downloads some"):
        main(Args(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConnectionError, match="HF_ENDPOINT"):
        main(Args(tmp_path, "nobody/nothing"))

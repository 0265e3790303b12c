"""Models of a hub: its subfolders, and what is fetched at all. A hub of our own, on this
machine."""

import errno
import json
import logging
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
from urllib.parse import unquote

import pytest
from huggingface_hub import constants, errors

from common.files import hub_errors
from common.hub import FOLDERS, commit_of, load_tokenizer, resolve_model, split_hub_id
from common.look.show import tokenizer_of
from common.models import load_model
from common.prepare import gsm8k

COMMIT = "0123456789abcdef0123456789abcdef01234567"
EARLIER = "89abcdef0123456789abcdef0123456789abcdef"  # a commit with another model, at its root
OLDEST = "fedcba9876543210fedcba9876543210fedcba98"  # one with a checkpoint in a subfolder
REVISIONS = {"main": COMMIT, "v0": OLDEST, "v1": EARLIER, "refs/pr/1": EARLIER, EARLIER: EARLIER}
FOLDER_OF_COMMIT = {COMMIT: "org/warm-start", EARLIER: "earlier", OLDEST: "oldest"}


class Handler(BaseHTTPRequestHandler):
    """The three addresses that huggingface_hub asks: the repository, the list of its files, and
    each of them."""

    def do_GET(self, body: bool = True) -> None:
        root, path = self.server.root, unquote(self.path.partition("?")[0])
        revision = path.removeprefix("/api/models/org/warm-start/revision/")
        commit = REVISIONS.get(revision, COMMIT)
        for other_commit in FOLDER_OF_COMMIT:
            if other_commit in path:
                commit = other_commit
        folder = root / FOLDER_OF_COMMIT[commit]
        files = {
            str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()
        }
        headers, content, status = {}, b"", 200
        if revision in REVISIONS:
            siblings = [{"rfilename": name} for name in files]
            content = json.dumps(
                {"id": "org/warm-start", "sha": commit, "siblings": siblings}
            ).encode()
        elif path.startswith("/api/models/org/warm-start/tree/"):
            entries = [
                {"type": "file", "path": n, "size": f.stat().st_size, "oid": n}
                for n, f in files.items()
            ]
            content = json.dumps(entries).encode()
        elif (name := path.removeprefix(f"/org/warm-start/resolve/{commit}/")) in files:
            content, headers = (
                files[name].read_bytes(),
                {"ETag": f'"{hash(name)}"', "X-Repo-Commit": commit},
            )
            self.server.fetched.add(name)
        elif path.startswith("/api/models/org/warm-start/revision/"):
            status, headers = 404, {"X-Error-Code": "RevisionNotFound"}
        else:
            status, headers = 404, {"X-Error-Code": "RepoNotFound"}
        self.send_response(status)
        for header, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(content if body else b"")

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A repository with checkpoints in subfolders, and none at its root, at least in its newest
    commit; `fetched` is what was asked of it."""
    repository = tmp_path / "hub" / "org" / "warm-start"
    for name in ("checkpoint-123", "checkpoint-246"):
        shutil.copytree(FOLDERS["tiny"], repository / name)
        (repository / name / "global_step").mkdir()
        (repository / name / "global_step" / "optimizer.json").write_text("{}")
    (repository / "README.json").write_text("{}")
    shutil.copytree(FOLDERS["tiny-vl"], tmp_path / "hub" / "earlier")
    shutil.copytree(FOLDERS["tiny"], tmp_path / "hub" / "earlier" / "checkpoint-1")
    shutil.copytree(FOLDERS["tiny"], tmp_path / "hub" / "oldest" / "checkpoint-0")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.root, server.fetched = tmp_path / "hub", set()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()


def test_an_older_repository_has_its_weights_in_another_format(hub, tmp_path):
    folder = hub.root / "org" / "warm-start"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDERS["tiny"] / name, folder)
    (folder / "pytorch_model.bin").write_bytes(b"weights")
    path = resolve_model("org/warm-start")
    assert Path(path, "pytorch_model.bin").read_bytes() == b"weights"


def test_a_tokenizer_that_truncates_is_ready_for_threads(tmp_path):
    """Its file says so; the first call would change that, in several threads at once: "Already
    borrowed"."""
    folder = shutil.copytree(FOLDERS["tiny"], tmp_path / "tiny")
    file, texts = folder / "tokenizer.json", ["word " * 2_000] * 64
    truncation = {"direction": "Right", "max_length": 7, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"truncation": truncation}))
    for _ in range(2):
        tokenizer = load_tokenizer(str(folder))
        with ThreadPoolExecutor(8) as threads:
            assert {len(ids) for ids in threads.map(tokenizer.encode, texts)} == {
                len(tokenizer.encode(texts[0]))
            }
    assert len(tokenizer.encode(texts[0])) > 7


def test_a_tokenizer_that_makes_nothing_of_texts_is_refused(tmp_path):
    """transformers makes one of two tokens of a folder whose tokenizer.json is not there."""
    folder = shutil.copytree(FOLDERS["tiny"], tmp_path / "tiny")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(
        SystemExit, match=r"tiny: its tokenizer turns text into no tokens: are tokenizer\.json"
    ):
        load_tokenizer(resolve_model(str(folder)))


def test_a_subfolder_is_fetched_and_nothing_else(hub):
    folder = resolve_model("org/warm-start/checkpoint-246")
    assert Path(folder).name == "checkpoint-246"
    assert load_tokenizer(folder).get_vocab() == load_tokenizer(str(FOLDERS["tiny"])).get_vocab()
    load_model(folder, "sdpa")
    own = {f"checkpoint-246/{file.name}" for file in FOLDERS["tiny"].iterdir()}
    assert hub.fetched <= own and "checkpoint-246/model.safetensors" in hub.fetched


def test_without_a_model_at_its_root_the_subfolders_are_named(hub, monkeypatch):
    for _ in range(2):  # the second time without the hub, out of the cache
        with pytest.raises(SystemExit) as stop:
            resolve_model("org/warm-start")
        (line,) = str(stop.value).splitlines()
        assert line.startswith("--model org/warm-start: no config.json or no tokenizer in it; ")
        assert line.endswith("take org/warm-start/checkpoint-123, org/warm-start/checkpoint-246")
        assert hub.fetched == {
            "README.json",
            "checkpoint-123/config.json",
            "checkpoint-246/config.json",
        }
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        SystemExit,
        match="--model org/nothing: no folder, none of tiny, tiny-vl, tiny-vl-python, smollm2",
    ):
        resolve_model("org/nothing")


def test_of_a_folder_without_a_model_the_subfolders_are_named(hub, tmp_path):
    folder = tmp_path / "hub" / "org" / "warm-start"
    with pytest.raises(SystemExit, match=f"take {folder}/checkpoint-123, {folder}/checkpoint-246"):
        resolve_model(str(folder))


@pytest.mark.parametrize("revision", ["v1", "refs/pr/1", EARLIER])
def test_a_revision_is_fetched_and_its_commit_is_known(hub, monkeypatch, revision):
    for _ in range(2):  # the second time without the hub, out of the cache
        folder = resolve_model(f"org/warm-start@{revision}")
        assert Path(folder).name == EARLIER == commit_of(folder)
        config = (FOLDERS["tiny-vl"] / "config.json").read_bytes()
        assert (Path(folder) / "config.json").read_bytes() == config
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not any("/" in name for name in hub.fetched), "nothing of its subfolders"


def test_a_revision_may_have_a_subfolder(hub):
    folder = resolve_model("org/warm-start@v1/checkpoint-1", "--critic-model")
    assert Path(folder).name == "checkpoint-1" and commit_of(folder) == EARLIER
    assert all(name.startswith("checkpoint-1/") for name in hub.fetched)
    with pytest.raises(SystemExit, match=r"org/warm-start@main/checkpoint-246$"):
        resolve_model("org/warm-start@main")
    assert commit_of(resolve_model("org/warm-start/checkpoint-246")) == COMMIT
    with pytest.raises(SystemExit, match=r"take org/warm-start@v0/checkpoint-0$"):
        resolve_model("org/warm-start@v0")


def test_an_unknown_revision_is_named(hub):
    with pytest.raises(SystemExit) as stop:
        resolve_model("org/warm-start@v2/checkpoint-1", "--reward-model")
    assert str(stop.value) == (
        "--reward-model org/warm-start@v2/checkpoint-1: org/warm-start has no branch, tag or "
        "commit v2"
    )
    with pytest.raises(SystemExit, match="--model org/nothing@v1: no folder, none of tiny"):
        resolve_model("org/nothing@v1")


@pytest.fixture
def no_hub(hub, monkeypatch):
    """A hub that is gone, which is asked again without delay. What huggingface_hub has logged."""
    hub.shutdown()
    hub.server_close()
    without_sleep = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
    monkeypatch.setattr("huggingface_hub.utils._http.time", without_sleep)
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("huggingface_hub.utils._http")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


@pytest.mark.parametrize(
    "name, nearest", [("org/model", ""), ("tiny-techer", " (nearest: tiny-teacher)")]
)
def test_without_the_hub_a_model_is_refused_in_one_line(no_hub, name, nearest):
    with pytest.raises(SystemExit) as stop:
        resolve_model(name, "--teacher")
    (line,) = str(stop.value).splitlines()
    assert re.fullmatch(
        rf"--teacher {name}: no folder, none of tiny, tiny-vl, tiny-vl-python, smollm2"
        rf"{re.escape(nearest)}, and the hub does not give it \(HF_ENDPOINT: a mirror\): "
        r"\[Errno 111\] Connection refused",
        line,
    )


def test_without_the_hub_a_data_set_is_two_lines(no_hub, capsys):
    """huggingface_hub logs eleven."""
    with pytest.raises(ConnectionError) as error:
        gsm8k.download_split("train")
    assert no_hub == []
    (line,) = capsys.readouterr().out.splitlines()
    reason = "[Errno 111] Connection refused"
    assert line == f"the hub does not answer ({reason}); trying again for half a minute"
    assert str(error.value).startswith(
        f"could not download openai/gsm8k: {reason}; set HF_ENDPOINT"
    )


def test_other_warnings_of_the_hub_are_shown(no_hub, capsys):
    logger = logging.getLogger("huggingface_hub.utils._http")
    with hub_errors():
        logger.warning("Rate limited. Waiting 7s before retry [Retry 1/5].")
    logger.warning("Retrying in 1s [Retry 1/5].")  # no download of ours
    assert len(no_hub) == 2 and capsys.readouterr().out == ""


def test_what_the_hub_refuses_is_said_in_words(hub):
    with pytest.raises(SystemExit, match=r"mirror\): the hub has none of this name;"):
        resolve_model("org/nothing")
    with pytest.raises(ConnectionError, match=r"^the hub wants its terms to be accepted"):
        with hub_errors():
            raise errors.GatedRepoError("403\n\nAccess is restricted", response=Mock())


def test_a_proxy_that_refuses_is_one_line(monkeypatch):
    error = errors.HTTPError("407 Proxy Authentication Required")
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=error))
    with pytest.raises(SystemExit, match=r"mirror\): 407 Proxy Authentication Required$"):
        resolve_model("org/model")


def test_a_token_that_the_hub_refuses_is_no_folder_that_cannot_be_written(monkeypatch):
    """The hub's Xet raises a PermissionError, without a number."""
    error = PermissionError("token refused")
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=error))
    with pytest.raises(SystemExit, match=r"mirror\): token refused$"):
        resolve_model("org/model")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_cache_that_cannot_be_written_is_said_without_a_mirror(monkeypatch, number):
    error = OSError(number, "no writing here")
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=error))
    with pytest.raises(SystemExit, match=r"^what the hub sends cannot be written: .*HF_HOME"):
        resolve_model("org/model")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("Data processing error: No space left on device (os error 28)"),  # Xet's
    ],
)
def test_a_full_disk_is_said_without_a_mirror(monkeypatch, error):
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=error))
    with pytest.raises(SystemExit, match=r"^no room for what the hub has sent: .*HF_HOME") as stop:
        resolve_model("org/model")
    assert "mirror" not in str(stop.value)


def test_a_folder_whose_name_has_an_at_sign_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FOLDERS["tiny"], tmp_path / "org" / "model@v1")
    assert resolve_model("org/model@v1") == "org/model@v1"
    assert commit_of("org/model@v1") is None
    assert tokenizer_of("org/model@v1").get_vocab()


def test_a_tokenizer_comes_without_weights(hub):
    """Of a revision, and of a subfolder."""
    for name in ("org/warm-start@v1", "org/warm-start/checkpoint-246"):
        hub.fetched.clear()
        assert tokenizer_of(name).get_vocab()
        assert hub.fetched and not any(name.endswith(".safetensors") for name in hub.fetched)


@pytest.mark.parametrize(
    "name, parts",
    [
        ("gpt2", ("gpt2", None, "")),
        ("gpt2@v1", ("gpt2", "v1", "")),
        ("a/b", ("a/b", None, "")),
        ("a/b/", ("a/b", None, "")),
        ("a/b/c/d", ("a/b", None, "c/d/")),
        ("a/b/c@d", ("a/b", None, "c@d/")),
        ("a/b@v1", ("a/b", "v1", "")),
        ("a/b@v1/c/d", ("a/b", "v1", "c/d/")),
        ("a/b@refs/pr/12/c", ("a/b", "refs/pr/12", "c/")),
        ("a/b@refs/c", ("a/b", "refs", "c/")),
        ("a/b@", ("a/b@", None, "")),  # the hub refuses it
        ("/a/b", ("/a/b", None, "")),
    ],
)
def test_names_of_the_hub(name, parts):
    assert split_hub_id(name) == parts


@pytest.mark.parametrize(
    "name", ["/no/such/path", "./no/such/path", "../no-such-path", "runs/no-such/model"]
)
def test_a_path_is_answered_as_a_path(name, monkeypatch):
    monkeypatch.setattr("common.hub.download", Mock(side_effect=AssertionError("asked the hub")))
    with pytest.raises(SystemExit, match=rf"^--model {re.escape(name)}: there is no such folder$"):
        resolve_model(name)


def test_a_checkpoint_is_no_model(tmp_path, monkeypatch):
    monkeypatch.setattr("common.hub.download", Mock(side_effect=AssertionError("asked the hub")))
    monkeypatch.chdir(tmp_path)
    step = Path("runs/a/checkpoints/step_000020")
    step.mkdir(parents=True)
    latest = step.parent / "latest"
    best = step.parent / "best"
    latest.write_text(step.name)
    best.write_text(step.name)
    for path, source in ((step, step), (latest, Path("runs/a")), (best, best)):
        message = (
            f"--model {path}: a checkpoint is no model. python -m common.export {source} --model "
            "BASE --out FOLDER makes one of it; a run that has ended leaves runs/a/model"
        )
        with pytest.raises(SystemExit, match=f"^{re.escape(message)}$"):
            resolve_model(str(path))
    with pytest.raises(SystemExit, match=r"^--critic-model notes: a file; give the folder"):
        Path("notes").touch()
        resolve_model("notes", "--critic-model")

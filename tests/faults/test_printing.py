"""What others have written steers no terminal: reward functions, tools, servers, files. One door
for all output."""

import io
import json
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from common import ending
from common.files import shorten, user_errors
from common.printing import guard_output, printable
from common.rewards import RewardWorkers, score_episodes
from common.script import _outcome
from common.types import Episode

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\b\b\r\x0b\x7f\u202eabc\u2066\u2028end"
TAME = "\ufffd[2J\ufffd]0;title\ufffd\ufffd31m" + 6 * "\ufffd" + "abc" + 2 * "\ufffd" + "end"


def steers(text: str) -> bool:
    return any(not (c.isprintable() or c in "\n\t") for c in text.replace("\u00a0", ""))


def test_lines_tabs_and_all_letters_stay():
    text = "a\tb\n\u00a0é 漢字 \U0001f469\u200d\U0001f680 ∑"
    assert printable(text) == shorten(text, 100) == text
    assert printable(HOSTILE) == shorten(HOSTILE, 100) == TAME and not steers(TAME)
    assert shorten("\ud800", 100) == "\ufffd", "which no file takes"


class Plain:
    """A stream of a notebook or a harness: it writes and flushes, and that is all."""

    def __init__(self):
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


class Slotted(Plain):
    __slots__ = ("text",)

    def __setattr__(self, name: str, value: object) -> None:
        if name != "text":
            raise AttributeError(name)
        super().__setattr__(name, value)


@pytest.mark.parametrize("make", [Plain, io.StringIO, Slotted, lambda: None])
def test_streams_that_were_replaced_do(monkeypatch, make):
    out, err = make(), make()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    guard_output()
    print(HOSTILE, flush=True)
    print("\r50%", end="", file=sys.stderr, flush=True)  # a progress bar
    said = [
        stream.getvalue() if isinstance(stream, io.StringIO) else stream and stream.text
        for stream in (out, err)
    ]
    if make in (Plain, io.StringIO):
        assert said == [f"{TAME}\n", "\r50%"]


def test_a_run_leaves_by_replaced_streams(monkeypatch):
    ended = []
    monkeypatch.setattr(ending.os, "_exit", ended.append)
    for stream in (None, SimpleNamespace(), Plain()):
        monkeypatch.setattr(ending, "_leaving", SimpleNamespace(acquire=lambda: None))
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(ending, "at_end", ExitStack())
        ending.leave(3)
    assert ended == [3, 3, 3]


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    "error", [ValueError(HOSTILE), SystemExit(HOSTILE), ImportError(HOSTILE), OSError(HOSTILE)]
)
def test_what_a_failure_says_steers_neither_our_terminal_nor_torchruns(
    monkeypatch, tmp_path, capfd, error
):
    """torchrun prints once more what stands in its file."""
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    assert _outcome(fail, error) == 1
    told = [capfd.readouterr().err, json.loads(report.read_text())["message"]["message"]]
    assert all("title" in text and not steers(text) for text in told)
    with pytest.raises(SystemExit) as refusal, user_errors():
        fail(ValueError(HOSTILE))
    assert not steers(str(refusal.value))


REWARD = """
import sys
HOSTILE = {hostile!r}
def print_all(**_):
    print(HOSTILE)
    print(HOSTILE, file=sys.stderr)
    return 1.0
def raise_it(**_):
    raise ValueError(HOSTILE)
"""


@pytest.mark.parametrize("name", ["print_all", "raise_it"])
def test_what_a_reward_function_prints_or_raises(monkeypatch, tmp_path, capfd, name):
    (tmp_path / "reward.py").write_text(REWARD.format(hostile=HOSTILE))
    for stream in ("stdout", "stderr"):  # of this test: guarded, and given back
        monkeypatch.setattr(
            sys, stream, io.TextIOWrapper(io.FileIO(2 - (stream == "stdout"), "w", closefd=False))
        )
    guard_output()
    workers = RewardWorkers(f"{tmp_path / 'reward.py'}:{name}", 1, 10.0)
    episode = Episode(
        prompt_index=0,
        sample_index=0,
        prompt_ids=[],
        response_ids=[1],
        loss_mask=[1],
        logprobs=[0.0],
        finish_reason="stop",
    )
    row = SimpleNamespace(data_source="x", ground_truth="7", extra_info={})
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens=True: "7")
    score_episodes([episode], {0: row}, workers, tokenizer)
    workers.close()
    sys.stdout.flush()
    out, err = capfd.readouterr()
    assert (out + err).count("title") == (2 if name == "print_all" else 1) and not steers(out + err)


def test_what_a_reward_function_says_when_it_is_imported(tmp_path):
    (tmp_path / "reward.py").write_text(f"raise ImportError({HOSTILE!r})")
    with pytest.raises(SystemExit, match="title") as refusal, user_errors():
        RewardWorkers(f"{tmp_path / 'reward.py'}:f", 1, 10.0)
    assert not steers(str(refusal.value))

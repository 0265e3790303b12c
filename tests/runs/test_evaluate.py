"""Evaluation: statistics against enumeration, the table; rows some at a time, samples in the run
folder."""

import json
import weakref
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from helpers import prompts_of

from common.assets.build.embedded import with_embedded_data
from common.data.render import end_token_ids
from common.distributed import World
from common.engine.hf import HuggingFaceEngine
from common.engine.protocol import EngineConfig
from common.flags import Data, Rollout
from common.hub import load_tokenizer, resolve_model
from common.processes import ahead_in_threads
from common.rewards import is_correct
from common.rollout.evaluation import (
    format_table,
    maj_at_k,
    pass_at_k,
    summarize,
    summarize_with_bounds,
    wilson_interval,
)
from common.rollout.opening import open_prompts
from common.rollout.rollouts import Rollouts
from common.types import Completion


def sample(group, score, pred="", source="a", length=10, truncated=False):
    return {
        "data_source": source,
        "group": group,
        "pred": pred,
        "length": length,
        "truncated": truncated,
        "score": score,
        "correct": is_correct({"score": score}),
    }


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_equals_all_subsets(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations([i < c for i in range(n)], k))
            assert pass_at_k(n, c, k) == pytest.approx(
                sum(map(any, subsets)) / len(subsets), abs=1e-12
            )


def test_pass_at_k_is_stable_and_checks_its_arguments():
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)
    for n, c, k in ((4, 5, 1), (4, 1, 5), (4, 1, 0), (4, -1, 1)):
        with pytest.raises(ValueError, match=f"n {n}, c {c}, k {k}"):
            pass_at_k(n, c, k)


def test_majority_vote():
    assert maj_at_k(["7", "7", "8"], [1.0, 1.0, 0.0]) == 1.0
    assert maj_at_k(["7", "8"], [1.0, 0.0]) == 0.5, "a tie is split evenly"
    assert maj_at_k(["7", "8", "9", "7", "8"], [1.0, 0.0, 0.0, 1.0, 0.0]) == 0.5
    assert maj_at_k(["", "", "", "7"], [0.0, 0.0, 0.0, 1.0]) == 1.0, "no answer is not a vote"
    assert maj_at_k(["", ""], [0.0, 0.0]) == 0.0
    with pytest.raises(ValueError, match=r"shorter|longer"):
        maj_at_k(["7"], [1.0, 0.0])


def test_accuracy_means_full_marks():
    assert all(is_correct({"score": score}) for score in (1.0, 1.0 - 1e-7, 1.1))
    assert not any(is_correct({"score": score}) for score in (0.999, 0.1, float("nan")))
    assert is_correct({"score": 0.9, "acc": 1.0}) and not is_correct({"score": 1.0, "acc": 0.0})
    assert is_correct({"score": 1.0, "acc": "a word"}), "what is no number does not count"


def test_summarize_averages_over_prompts_first():
    samples = [sample(0, 1.0, "7"), sample(0, 0.1, "8"), sample(0, 1.0, "7", truncated=True)]
    # has lost its third sample
    samples += [sample(1, 0.1, "1", "b", 20), sample(1, 0.1, "1", "b", 20)]
    metrics = summarize(samples)
    assert metrics["eval/accuracy"] == pytest.approx((2 / 3 + 0) / 2)
    assert metrics["eval/reward"] == pytest.approx((2.1 / 3 + 0.1) / 2)
    assert metrics["eval/a/accuracy"] == pytest.approx(2 / 3) and metrics["eval/b/accuracy"] == 0
    assert metrics["eval/pass@1"] == pytest.approx(metrics["eval/accuracy"])
    assert metrics["eval/pass@2"] == pytest.approx(0.5)
    assert metrics["eval/maj@2"] == pytest.approx(0.5)
    assert metrics["eval/response_length"] == 14
    assert metrics["eval/truncated"] == 0.2
    assert metrics["eval/rows"] == 2


def test_summarize_lists_powers_of_two_and_n():
    keys = summarize([sample(0, float(i == 0), str(i)) for i in range(6)])
    assert [key for key in keys if "@" in key] == [
        f"eval/{name}" for name in ("pass@1", "pass@2", "pass@4", "pass@6", "maj@6")
    ]
    assert keys["eval/maj@6"] == pytest.approx(1 / 6)
    single = summarize([sample(0, 1.0)])
    assert not any("maj" in key or key.count("/") > 1 for key in single)
    with pytest.raises(ValueError, match="no samples"):
        summarize([])


def test_samples_without_a_score_leave_bounds(capsys):
    """The lower one is the accuracy: it makes no checkpoint the best that is not."""
    samples = [sample(i, float(i == 0)) | {"failed": i == 3} for i in range(4)]
    metrics = summarize_with_bounds(samples)
    assert metrics["eval/rows"] == 4
    assert metrics["eval/accuracy"] == 0.25
    assert metrics["eval/accuracy_high"] == 0.5
    assert metrics["eval/failed"] == 1
    output = capsys.readouterr().out
    assert "INCOMPLETE: 1 of 4 samples could not be scored" in output
    assert "between 0.2500 and 0.5000" in output
    assert summarize_with_bounds(samples[:3]) == summarize(samples[:3])
    assert not capsys.readouterr().out


def test_wilson_interval():
    low, high = wilson_interval(0.5, 100)
    assert (low, high) == pytest.approx((0.40383, 0.59617), abs=1e-5)
    assert wilson_interval(0.0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert wilson_interval(1.0, 10)[1] == pytest.approx(1.0)
    assert wilson_interval(1.0, 10)[1] <= 1.0
    assert wilson_interval(0.0, 0) == (0.0, 1.0)


def test_table_is_aligned():
    by_source = {
        "openai/gsm8k": summarize([sample(i, float(i % 2), str(i)) for i in range(1000)]),
        "aime": summarize(
            [sample(i, 0.0, str(j), length=12345) for i in range(3) for j in range(2)]
        ),
    }
    header, *lines = format_table(by_source).splitlines()
    assert len({len(line) for line in (header, *lines)}) == 1
    assert [line.split()[0] for line in lines] == ["openai/gsm8k", "aime"]
    assert "0.500" in lines[0]
    assert "0.469 - 0.531" in lines[0]
    assert "pass@2" in header
    assert "maj@2" in header
    assert lines[0].index("0.500") + 5 == header.index("accuracy") + len("accuracy")


# --- rows some at a time --------------------------------------------------------------------------


class Rows(list):
    """The rows of a data set that opens them on access; at most `most` were in use at once."""

    vision = None
    most = 0
    apart = 1  # between two rows `apart - 1` were dropped
    files = SimpleNamespace(suffix=".parquet")

    def file_row(self, i: int) -> dict:
        extra = {
            "index": i,
            "tools_kwargs": {"python": {"create_kwargs": {"image_hint_0": b"large"}}},
        }
        return {
            "id": f"own {i}",
            "prompt": "another",
            "images": [b"large"],
            "extra_info": extra if i else None,
        }

    def __init__(self, texts: list, tokenizer):
        super().__init__(texts)
        self.tokenizer = tokenizer
        self.open = weakref.WeakSet()

    @property
    def usable(self):
        return np.arange(len(self)) * self.apart

    def __getitem__(self, i):
        text, truth = super().__getitem__(i)
        row = OpenRow(i * self.apart, text, truth, self.tokenizer.encode(text))
        self.open.add(row)
        self.most = max(self.most, len(self.open))
        return row


class OpenRow:
    def __init__(self, index, prompt, truth, ids):
        self.index = index
        self.data_source = "countdown"
        self.prompt = prompt
        self.prompt_ids = ids
        self.ground_truth = truth
        self.truth = json.dumps(truth)
        self.extra_info = {}
        self.media = []
        self.tools = {}
        self.problem = ""


class Engine:
    """Answers each request with the first ids of its prompt, and counts steps."""

    def __init__(self):
        self.requests = []
        self.steps = 0
        self.seeds = {}

    def submit(self, request):
        self.seeds[tuple(request.prompt_ids)] = request.seed
        completion = Completion(request.prompt_ids[:3], [0.0] * 3, "stop")
        self.requests.append((request.key, [completion] * request.sampling.n))

    @property
    def busy(self):
        return bool(self.requests)

    def step(self):
        self.steps += 1
        done = self.requests
        self.requests = []
        return done

    def sleep(self):
        self.asleep = True


TINY = resolve_model("tiny")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY)


@pytest.fixture
def rollouts(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("common.rollout.rollouts.sync_engine", lambda *_: None)
    texts = [
        (f"{i} {i + 1} = {2 * i + 1}", {"numbers": [i, i + 1], "target": 2 * i + 1})
        for i in range(700)
    ]
    score = SimpleNamespace(
        is_trl=False,
        score=lambda jobs: [{"score": float(job[2]["target"] % 4 == 1)} for job in jobs],
    )
    return Rollouts(
        world=World(0, 1, 0, torch.device("cpu")),
        output_dir=tmp_path,
        tokenizer=tokenizer,
        flags=Rollout(),
        seed=0,
        train_data=None,
        loader=None,
        eval_data=Rows(texts, tokenizer),
        eval_rows=600,
        engine=Engine(),
        turns=None,
        reward_workers=score,
    )


def test_rows_are_opened_some_at_a_time_and_each_time_is_a_sign_of_life(rollouts, monkeypatch):
    signs = []
    monkeypatch.setattr(
        "common.rollout.rollouts.sign_of_life", lambda: signs.append(rollouts.engine.steps)
    )
    metrics = rollouts.evaluate(None, 20)
    assert metrics["eval/rows"] == 600 and rollouts.engine.asleep
    assert rollouts.eval_data.most <= 2 * 256, "of 600"
    assert signs == [1, 2, 3]
    rollouts.eval_data.vision = "eyes"
    rollouts.eval_data.most = 0
    rollouts.eval_rows = 200
    rollouts.evaluate(None, 20)
    assert rollouts.eval_data.most <= 2 * 64, "pictures take megabytes each"


@pytest.mark.parametrize("samples", [1, 7, 300])
def test_every_rank_comes_to_every_exchange(rollouts, monkeypatch, samples):
    """As many exchanges on each of three ranks, and every row once."""
    rollouts.flags.eval_samples = samples
    rollouts.eval_rows = 600 if samples < 300 else 5
    counts = []
    seen = []
    gathered = []
    monkeypatch.setattr(
        "common.rollout.rollouts.gather_objects", lambda own: gathered.append(own) or [own]
    )
    for rank in range(3):
        gathered.clear()
        rollouts.world = World(rank, 3, rank, torch.device("cpu"))
        rollouts.evaluate(None, 20)
        counts.append(len(gathered))
        seen += [sample["row"] for own in gathered for sample in own[::samples]]
    assert len(set(counts)) == 1
    assert sorted(seen) == list(range(rollouts.eval_rows))


def test_a_row_keeps_its_seed_at_every_step_and_where_others_were_dropped(rollouts):
    """With tools a prompt may be too long that fits without: the other rows can still be
    compared."""
    rollouts.eval_rows = 5
    rollouts.evaluate(None, 0)
    whole = rollouts.engine.seeds
    rollouts.engine.seeds = {}
    rollouts.evaluate(None, 20)
    assert rollouts.engine.seeds == whole, "two evaluations differ by the weights alone"
    rollouts.engine.seeds = {}
    texts = [*rollouts.eval_data]
    rollouts.eval_data = Rows(texts[:5:2], rollouts.tokenizer)
    rollouts.eval_data.apart = 2
    path = rollouts.output_dir / "samples.parquet"
    rollouts.evaluate(None, 20, path)
    assert [(s["row"], s["id"]) for s in pq.read_table(path).to_pylist()] == [
        (i, f"own {i}") for i in (0, 2, 4)
    ]
    assert len(whole) == 5 and len(rollouts.engine.seeds) == 3
    assert all(whole[prompt] == seed for prompt, seed in rollouts.engine.seeds.items())


class LongAnswers(Engine):
    """Of each request, by its place, it needs so many steps: the first is long, the others not."""

    lengths = (9, 1, 2, 1, 3, 1)

    def __init__(self):
        super().__init__()
        self.started = []  # step in which each request came
        self.ended = []
        self.most = 0  # under way together

    def submit(self, request):
        super().submit(request)
        self.started.append(self.steps)
        self.ended.append(None)
        under_way = [key for key, _ in self.requests]
        self.most = max(self.most, len(under_way))

    def step(self):
        self.steps += 1
        done = []
        for key, completions in self.requests:
            place = key // len(completions)
            if self.steps - self.started[place] == self.lengths[place % len(self.lengths)]:
                self.ended[place] = self.steps
                done.append((key, completions))
        self.requests = [request for request in self.requests if request not in done]
        return done


@pytest.mark.parametrize("samples", [1, 2])
def test_a_row_starts_when_another_has_ended(rollouts, tmp_path, monkeypatch, samples):
    """Four at a time: the fifth does not wait for the first, which is the longest."""
    rollouts.flags.eval_samples = samples
    rollouts.eval_rows = 24
    path = tmp_path / "eval/step_000020.parquet"
    metrics = rollouts.evaluate(None, 20)
    together = pq.read_table(path).to_pylist()
    monkeypatch.setattr("common.rollout.rollouts.MAX_SAMPLES", 4 * samples)
    engine = rollouts.engine = LongAnswers()
    assert rollouts.evaluate(None, 20) == metrics
    assert pq.read_table(path).to_pylist() == together
    assert engine.started[:4] == [0] * 4 and engine.most == 4
    assert engine.started[4] == 1 < engine.ended[0]
    for i in range(4, 24):
        assert engine.started[i] == sorted(engine.ended[:i])[i - 4], "as soon as there is a place"


def test_samples_of_each_evaluation_stay(rollouts, tmp_path, capsys):
    for step in (0, 20):
        rollouts.evaluate(None, step)
    first, later = (
        pq.read_table(tmp_path / f"eval/step_{step:06d}.parquet").to_pylist() for step in (0, 20)
    )
    assert len(later) == 600
    assert first == later
    assert [s["row"] for s in later] == list(range(600))
    assert json.loads(later[7]["truth"]) == {"numbers": [7, 8], "target": 15}
    assert {s["correct"] for s in later} == {True, False}
    assert "samples:" not in capsys.readouterr().out


def test_samples_that_cannot_be_written_are_a_warning(rollouts, tmp_path, capsys):
    (tmp_path / "eval").write_text("in the way")
    assert rollouts.evaluate(None, 20)["eval/rows"] == 600
    output = capsys.readouterr().out
    assert "warning: " in output
    assert "step_000020.parquet not written" in output


def test_rows_without_a_truth_are_sampled_and_not_scored(rollouts, tmp_path, capsys):
    texts = [(f"{i} 1 = 2", {"target": i} if i % 3 else None) for i in range(9)]
    rollouts.eval_data = Rows(texts, rollouts.tokenizer)
    events = SimpleNamespace(event=lambda record: events.said.append(record), said=[])
    rollouts.evaluate_only(None, 20, events)
    (path,) = tmp_path.glob("eval_samples.*")
    samples = pq.read_table(path).to_pylist()
    (metrics,) = events.said
    for i, columns in enumerate(samples):
        for name in ("correct", "score", "truth"):
            assert (columns[name] is None) == (i % 3 == 0)
    assert [(s["id"], s["prompt"], "images" in s, s["extra_info"]) for s in samples] == [
        (f"own {i}", text, False, {"index": i} if i else None) for i, (text, _) in enumerate(texts)
    ], "the row's own columns, but what a sample has already, and pictures, those for programs, too"
    assert metrics["eval/rows"] == 6 and metrics["eval/unscored"] == 3
    num_correct = sum(s["correct"] for s in samples if s["correct"] is not None)
    assert metrics["eval/accuracy"] == num_correct / 6
    output = capsys.readouterr().out
    assert "3 of 9 rows have no truth: not scored" in output
    assert "score none" in output
    rollouts.eval_data = Rows([("1 2 = 3", None)] * 4, rollouts.tokenizer)
    rollouts.evaluate_only(None, 20, events)
    assert events.said[1]["eval/unscored"] == 4 and "eval/accuracy" not in events.said[1]


def test_truths_may_lack_in_what_is_only_evaluated(tmp_path, tokenizer):
    rows = [{"data_source": "unknown", "prompt": [{"role": "user", "content": "1 2 = 3"}]}]
    rows += [
        rows[0] | {"data_source": "countdown", "reward_model": {"ground_truth": {"target": 3}}}
    ]
    rows += [rows[0] | {"reward_model": {"ground_truth": None}}, rows[0] | {"reward_model": None}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"max_prompt_tokens": 64, "tokenizer": tokenizer}
    data = prompts_of(str(path), eval_only=True, **options)
    assert [data[i].ground_truth for i in range(4)] == [None, {"target": 3}, None, None]
    assert data.sources == {"countdown"}, "nobody has to know how to score the others"
    with pytest.raises(ValueError, match="lacks reward_model"):
        prompts_of(str(path), **options)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    with pytest.raises(
        ValueError, match=r"2 unusable rows.*\n.*line 2: reward_model.ground_truth is missing"
    ):
        prompts_of(str(path), **options)


@pytest.mark.parametrize("temperature, samples", [(0.0, 1), (1.0, 2)])
def test_results_are_those_of_one_batch(rollouts, tmp_path, monkeypatch, temperature, samples):
    """The Hugging Face engine in float32; vLLM in bf16 may round otherwise in a batch of another
    size."""
    ids = end_token_ids(TINY, rollouts.tokenizer)
    rollouts.engine = HuggingFaceEngine(
        EngineConfig(TINY, torch.float32, rollouts.world, ids, max_model_len=128)
    )
    rollouts.engine.books.step = 20
    rollouts.eval_rows = 12
    rollouts.flags.max_response_tokens = 24
    rollouts.flags.eval_temperature = temperature
    rollouts.flags.eval_samples = samples
    chat = rollouts.tokenizer.apply_chat_template
    texts = [
        chat([{"role": "user", "content": f"{i} {i * i} = 9"}], tokenize=False) for i in range(12)
    ]
    rollouts.eval_data = Rows([(text, {"target": 9}) for text in texts], rollouts.tokenizer)
    results = []
    for at_once in (10_000, 5 * samples):
        monkeypatch.setattr("common.rollout.rollouts.MAX_SAMPLES", at_once)
        rollouts.evaluate(None, 20)
        results.append(pq.read_table(tmp_path / "eval/step_000020.parquet").to_pylist())
    assert results[0] == results[1]
    assert len({s["completion"] for s in results[0]}) > 3


def test_what_is_only_evaluated_needs_no_rows_of_the_demo(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    truth = {"numbers": [1, 2], "target": 3}
    row = {"data_source": "countdown", "prompt": [{"role": "user", "content": "1 2 = 3"}]}
    path.write_text(json.dumps(row | {"reward_model": {"ground_truth": truth}}))
    world = World(0, 1, 0, torch.device("cpu"))
    job = SimpleNamespace(
        run=SimpleNamespace(model="tiny"),
        output_dir=tmp_path / "run",
        world=world,
        tokenizer=tokenizer,
        vision=None,
        identity={},
        num_embeddings=len(tokenizer),
    )
    rollout = Rollout(eval_only=True, max_prompt_tokens=64)
    for files, num_rows in ((Data(eval_data=str(path)), 1), (Data(), 1024)):
        folder = job.output_dir / "data"
        data = with_embedded_data(files, "tiny", folder, world, eval_only=True)
        train, evaluated = open_prompts(job, data, rollout, None)
        assert train is None and len(evaluated) == num_rows
        # without rows of one's own it is the demo's
        assert folder.is_dir() == (num_rows == 1024)


def test_rows_are_opened_ahead_and_no_further():
    """In order; three besides the one that is taken, at most; an error comes with its own row."""
    started = []

    def open_row(i):
        started.append(i)
        if i == 8:
            raise OSError("row 8")
        return 10 * i

    rows = ahead_in_threads(open_row, range(20), 3)
    for i in range(8):
        assert next(rows) == 10 * i
        assert max(started) <= i + 3
    with pytest.raises(OSError, match="row 8"):
        next(rows)
    assert list(ahead_in_threads(str, [], 3)) == []
    assert list(ahead_in_threads(str, [1, 2], 3)) == ["1", "2"]

"""The embedded policy that looks by programs: what it was taught is what the sandbox and the
protocol give."""

from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import prompts_of
from scripted import Trajectory, run

from common.assets.build import mosaic, tiny_vl, tiny_vl_python
from common.data.conversations import Conversations
from common.data.protocols import Code
from common.hub import load_tokenizer
from common.pictures import PixelLimits
from common.rewards import reward_function, score_response
from common.rollout.trajectories import Turns
from common.sandbox.python import PythonWorkers
from common.vision import load_vision
from papers.pyvision import tiny_policy


@pytest.fixture(scope="module")
def blank(tmp_path_factory):
    """The policy before any training."""
    folder = tmp_path_factory.mktemp("blank")
    tokenizer = tiny_vl.build_tokenizer(tiny_policy.corpus())
    tiny_vl.build_processor(tokenizer).save_pretrained(folder)
    tiny_vl.build_config(tokenizer).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def vision(blank):
    return load_vision(blank, PixelLimits(**mosaic.LIMITS))


@pytest.fixture(scope="module")
def workers():
    pool = PythonWorkers(1, 20.0)
    yield pool
    pool.close()


def test_what_programs_show_in_traces_is_what_the_sandbox_shows(workers):
    outcomes = set()
    for messages, pictures in islice(tiny_policy.traces(5, guess=0.0), 12):
        trajectory = Trajectory(workers, pictures[:1])
        left = pictures[1:]
        for turn, observation in zip(messages[1::2], messages[2::2]):
            reply = trajectory(Code.find_call(turn["content"]).arguments["code"])
            shown = len(pictures) - len(left)
            content = Code.content(reply.text, ["<image>"] * len(reply.images), shown)
            assert "".join(content) == observation["content"]
            assert reply.images == left[: len(reply.images)]
            left = left[len(reply.images) :]
            if reply.error:
                outcomes.add(reply.text.partition(":")[0])
            else:
                outcomes.add(f"{len(reply.images)} figures")
        assert not left
    assert outcomes == {"Execution error", "0 figures", "1 figures"}, "each kind of program"


def test_traces_are_honest():
    """Who has seen the tile reads its digit, and nobody else does."""
    num_read = 0
    num_guessed = 0
    for (messages, _), scene in zip(tiny_policy.traces(6), islice(mosaic.scenes(6), 50)):
        answer = messages[-1]["content"]
        looks = [Code.find_call(m["content"]) for m in messages[1:-1:2]]
        at_tile = looks and tiny_policy.program(scene.cell) == looks[-1].arguments["code"]
        assert (answer == tiny_policy.READ % scene.digit) == bool(at_tile)
        assert Code.find_call(answer) is None
        scorer = reward_function("tiny-vl")
        rewards = score_response(scorer, "tiny-vl", answer, str(scene.digit))
        if not at_tile:
            num_guessed += 1
        elif rewards["score"] == 1.0:
            num_read += 1
    assert num_read > 6
    assert num_guessed > 20
    experts = tiny_policy.traces(7, **tiny_policy.EXPERT)
    for messages, pictures in islice(experts, 5):
        assert len(messages) == 4
        assert len(pictures) == 2


def test_a_cold_start_is_what_reinforcement_learning_asks_and_answers(
    vision, blank, workers, tmp_path
):
    """The same turns: sft.py's ids, mask and pictures of a trace are those of a trajectory with the
    real tool."""
    tokenizer = load_tokenizer(blank)
    tiny_policy.write_traces(tmp_path, 5, seed=4)
    traces = list(islice(tiny_policy.traces(4), 5))
    options = {"vision": vision, "media_root": tmp_path}
    taught = Conversations(
        str(tmp_path / "release.json"), "--train-data", tokenizer, max_tokens=2048, **options
    )
    rest = {"data_source": "tiny-vl", "reward_model": {"style": "rule", "ground_truth": "0"}}
    rows = [
        {"prompt": messages[:1], "images": pictures[:1], **rest} for messages, pictures in traces
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    options = {"max_prompt_tokens": 64, "vision": vision, "tools": workers.tools}
    asked = prompts_of(str(tmp_path / "rows.parquet"), tokenizer=tokenizer, **options)
    turns = Turns(tokenizer, workers, vision)
    endings = set()
    for i, (messages, _) in enumerate(traces):
        expected = taught.episodes(i)[0]
        said = [message["content"] for message in messages[1::2]]
        (episode,), _ = run([said], turns, asked[i])
        for name in ("prompt_ids", "response_ids", "loss_mask"):
            assert getattr(episode, name) == getattr(expected, name), name
        assert [m.frames for m in episode.media] == [m.frames for m in expected.media]
        endings.add((episode.finish_reason, bool(episode.calls), len(episode.media) > 1))
    assert endings == {("stop", False, False), ("stop", True, False), ("stop", True, True)}


def test_the_demos_rows_are_prompts(vision, blank, workers, tmp_path, monkeypatch):
    monkeypatch.setattr(mosaic, "RL_ROWS", 64)  # pictures that nobody looks at
    monkeypatch.setattr(mosaic, "EVAL_ROWS", 64)
    tiny_vl_python.write_demo_data(tmp_path)
    options = {"max_prompt_tokens": 64, "vision": vision, "tools": workers.tools}
    prompts = prompts_of(str(tmp_path / "eval.parquet"), tokenizer=load_tokenizer(blank), **options)
    assert len(prompts) == mosaic.EVAL_ROWS and prompts[0].tools == {"python": {}}

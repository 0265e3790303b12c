"""The embedded policy that looks by programs: what it was taught is what the sandbox and the protocol give."""

from itertools import islice

import pytest
from test_python_tool import Trajectory

from common.data.conversations import Conversations
from common.data.prompts import PromptData
from common.hub import load_tokenizer
from common.pictures import PixelLimits
from common.prepare import mosaic, tiny_vl, tiny_vl_python
from common.rewards import reward_function, score_response
from common.tools.python import TOOL, PythonWorkers
from common.tools.turns import Code
from common.vision import load_vision


@pytest.fixture(scope="module")
def blank(tmp_path_factory):
    """The policy before any training."""
    folder = tmp_path_factory.mktemp("blank")
    tokenizer = tiny_vl.build_tokenizer(tiny_vl_python.corpus())
    tiny_vl.build_processor(tokenizer).save_pretrained(folder)
    tiny_vl.build_config(tokenizer).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def vision(blank):
    return load_vision(blank, PixelLimits(**mosaic.LIMITS))


def test_what_programs_show_in_traces_is_what_the_sandbox_shows():
    workers, texts = PythonWorkers(1, 20.0), set()
    try:
        for messages, pictures in islice(tiny_vl_python.traces(5, guess=0.0), 12):
            trajectory, left = Trajectory(workers, pictures[:1]), pictures[1:]
            for turn, observation in zip(messages[1::2], messages[2::2]):
                reply = trajectory(Code.find_call(turn["content"]).arguments["code"])
                shown = len(pictures) - len(left)
                content = Code.content(reply.text, ["<image>"] * len(reply.images), shown)
                assert "".join(content) == observation["content"]
                assert reply.images == left[: len(reply.images)]
                left = left[len(reply.images) :]
                texts.add(reply.text.partition(":")[0] if reply.error else f"{len(reply.images)} figures")
            assert not left
    finally:
        workers.close()
    assert texts == {"Execution error", "0 figures", "1 figures"}, "each kind of program is among them"


def test_traces_are_honest():
    """Who has seen the tile reads its digit, and nobody else does."""
    read = guessed = 0
    for (messages, _), scene in zip(tiny_vl_python.traces(6), islice(mosaic.scenes(6), 50)):
        answer, looks = messages[-1]["content"], [Code.find_call(m["content"]) for m in messages[1:-1:2]]
        at_tile = looks and tiny_vl_python.program(scene.cell) == looks[-1].arguments["code"]
        assert (answer == tiny_vl_python.READ % scene.digit) == bool(at_tile)
        assert Code.find_call(answer) is None
        score = score_response(reward_function("tiny-vl"), "tiny-vl", answer, str(scene.digit))["score"]
        read, guessed = read + (score == 1.0 and bool(at_tile)), guessed + (not at_tile)
    assert read > 6 and guessed > 20
    experts = tiny_vl_python.traces(7, **tiny_vl_python.EXPERT)
    assert all(len(messages) == 4 and len(pictures) == 2 for messages, pictures in islice(experts, 5))


def test_rows_load_as_a_cold_start_and_as_prompts(vision, blank, tmp_path):
    """sft.py renders what grpo.py asks and what the protocol answers: the same ids for the same turns."""
    tokenizer = load_tokenizer(blank)
    tiny_vl_python.write_traces(tmp_path, 10, seed=6)
    options = {"max_tokens": 512, "vision": vision, "media_root": tmp_path}
    data = Conversations(str(tmp_path / "release.json"), "--train-data", tokenizer, **options)
    protocol, turns = Code(tokenizer), 0
    for row, (messages, _) in zip(range(len(data)), tiny_vl_python.traces(6)):
        episode = data.episode(row)
        trained = [token for token, mask in zip(episode.response_ids, episode.loss_mask) if mask]
        said = [message["content"] + "<|im_end|>" for message in messages[1::2]]
        assert tokenizer.decode(trained) == "".join(said)
        for message in messages[2::2]:
            text = message["content"].removesuffix("</interpreter>\n\n</tool_response>")
            assert text.split("Text Result:\n")[1][:4] in tokenizer.decode(episode.response_ids)
            turns += 1
        assert protocol.tokenizer.eos_token == "<|im_end|>"
    assert turns > 3
    tiny_vl_python.write_demo_data(tmp_path)
    options = {"max_prompt_tokens": 64, "vision": vision, "tools": {"python": TOOL}}
    prompts = PromptData(str(tmp_path / "eval.parquet"), tokenizer, **options)
    assert len(prompts) == mosaic.EVAL_ROWS and prompts[0].tools == {"python": {}}
    first = prompts[0].prompt_ids
    assert len(first) == len(data.episode(0).prompt_ids) and first[:9] == data.episode(0).prompt_ids[:9]

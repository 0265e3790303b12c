"""--tools python in a model's own format of calls, as its published chat template has it. Real
sandboxes."""

import pytest
from published import tokenizer_of
from scripted import run

from common.data.protocols import protocol_of
from common.data.render import apply_template, to_messages
from common.rollout.trajectories import Turns
from common.sandbox.python import SCHEMA, PythonWorkers
from common.types import Row

CALLS = {  # a program that is run by "code"
    "qwen2.5": '<tool_call>\n{"name": "python", "arguments": {"code": CODE}}\n</tool_call>',
    "llama-3.1": '{"name": "python", "parameters": {"code": CODE}}',
    "qwen3-coder": "<tool_call>\n<function=python>\n<parameter=code>\nTEXT\n</parameter>\n"
    "</function>\n</tool_call>",
    "mistral-nemo": '[TOOL_CALLS][{"name": "python", "arguments": {"code": CODE}, "id": '
    '"123456789"}]',
    "devstral": '[TOOL_CALLS]python[ARGS]{"code": CODE}',
}
FENCED = "It is so:\n```python\nx = 1\n```"


@pytest.fixture(scope="module")
def workers():
    pool = PythonWorkers(1, 20.0)
    yield pool
    pool.close()


def episode_of(name: str, workers, script: list[str], question: str = "How many?"):
    """(what the policy is told, the trajectory, the tokenizer)"""
    tokenizer = tokenizer_of(name)
    asked = [{"role": "user", "content": question}]
    messages = to_messages(asked, tokenizer, workers.tools)
    (prompt,) = apply_template([messages], tokenizer)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    row = Row(0, "x", asked, "1", {}, ids, [], {"python": {}})
    turns = Turns(tokenizer, workers, protocol=protocol_of(tokenizer, [SCHEMA]))
    (episode,), _ = run([script], turns, row, n=1)
    return prompt, episode, tokenizer


@pytest.mark.parametrize("name", CALLS)
def test_a_policy_runs_programs_in_its_own_format(name, workers):
    """It is told of the tool, variables stay, and the reply is a message of its template. A fence
    is no call."""
    call = CALLS[name]
    script = [
        call.replace("CODE", '"x = 6"').replace("TEXT", "x = 6"),
        call.replace("CODE", '"print(7 * x)"').replace("TEXT", "print(7 * x)"),
        FENCED,
    ]
    prompt, episode, tokenizer = episode_of(name, workers, script)
    assert "Run a program" in prompt
    assert [(c["arguments"]["code"], c["text"], c["error"]) for c in episode.calls] == [
        ("x = 6", "", False),
        ("print(7 * x)", "42", False),
    ]
    assert (episode.finish_reason, episode.turns) == ("stop", 3)
    told = [token for token, sampled in zip(episode.response_ids, episode.loss_mask) if not sampled]
    assert "42" in tokenizer.decode(told) and "<interpreter>" not in tokenizer.decode(told)
    assert [message["role"] for message in episode.messages] == ["assistant", "tool"] * 2 + [
        "assistant"
    ]


@pytest.mark.parametrize("arguments", ["{}", '{"code": 7}', '{"program": "1"}'])
def test_a_call_without_a_program_is_told(workers, arguments):
    script = [
        f'<tool_call>\n{{"name": "python", "arguments": {arguments}}}\n</tool_call>',
        "So be it.",
    ]
    _, episode, _ = episode_of("qwen2.5", workers, script)
    (call,) = episode.calls
    assert call["error"] and "expected a text as the argument code" in call["text"]


@pytest.mark.parametrize(
    "malformed, told",
    [
        ("{", "Not a valid tool call"),
        ('{"name": "shell", "arguments": {"code": "1"}}', "there is no tool 'shell'"),
        ('{"name": "python", "arguments": {"code": 7}}', "expected a text as the argument code"),
    ],
)
def test_a_program_may_follow_a_malformed_call(workers, malformed, told):
    """In a run's first step as in a later one, where an earlier trajectory had the same key."""
    script = [
        f"<tool_call>\n{malformed}\n</tool_call>",
        CALLS["qwen2.5"].replace("CODE", '"x = 6"'),
        CALLS["qwen2.5"].replace("CODE", '"print(7 * x)"'),
        "So be it.",
    ]
    workers.numbers.clear()
    numbers = set()
    for _ in range(2):
        _, episode, _ = episode_of("qwen2.5", workers, script)
        error, *texts = [call["text"] for call in episode.calls]
        assert told in error and texts == ["", "42"]
        assert (episode.finish_reason, episode.turns) == ("stop", 4)
        numbers |= set(workers.numbers.values())
    assert len(numbers) == 2


@pytest.mark.parametrize("mark", ["<code>", "<image_clue_0>"])
def test_a_prompt_that_teaches_tags_is_left_as_it_is(workers, mark):
    """And is answered by PyVision-RL's protocol, whatever the template has."""
    script = [
        "I look.\n<code>\n```python\nprint(6 * 7)\n```\n</code>",
        "<answer>\n\\boxed{42}\n</answer>",
    ]
    prompt, episode, tokenizer = episode_of("qwen2.5", workers, script, f"{mark} How many?")
    assert "Run a program" not in prompt
    (call,) = episode.calls
    assert call["text"] == "42"
    told = [token for token, sampled in zip(episode.response_ids, episode.loss_mask) if not sampled]
    assert "<interpreter>Text Result:" not in tokenizer.decode(told)
    assert "<interpreter>\nText Result:\n42" in tokenizer.decode(told)

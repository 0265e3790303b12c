"""How models call tools, read from the chat templates of published ones: Hermes', Llama-3, Qwen3-Coder, Mistral."""

import json

import pytest
from helpers import ROOT, deadline
from test_turns import run
from vl import build_tokenizer

from common.data.conversations import Conversations
from common.data.render import apply_template, to_messages
from common.data.templates import Native, protocol_of
from common.episodes import Row
from common.tools.pools import ToolWorkers
from common.tools.trajectories import Turns
from common.tools.turns import Call, Hermes

TEMPLATES = ROOT / "tests" / "templates"
END = {"llama-3.1": "<|eot_id|>", "mistral-nemo": "</s>", "devstral": "</s>"}
SPECIAL = ["<|python_tag|>", "<|eom_id|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
ADD = """
def add(a: int, b: int = 0, note: str = "") -> str:
    '''Add two numbers.

    a: the first
    '''
    return f"{a + b} {note!r}"
"""


def tokenizer_of(name: str):
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.add_special_tokens({"eos_token": END.get(name, "<|im_end|>")})
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    return tokenizer


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    file = tmp_path_factory.mktemp("tool") / "adds.py"
    file.write_text(ADD)
    pool = ToolWorkers(f"{file}:add", 1, 20.0)
    yield pool
    pool.close()


CALLS = {
    "qwen2.5": 'So:\n<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4, "note": "7"}}\n</tool_call>',
    "llama-3.1": '{"name": "add", "parameters": {"a": 3, "b": 4, "note": "7"}}',
    "qwen3-coder": "So:\n<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n<parameter=b>\n4\n</parameter>\n"
    "<parameter=note>\n7\n</parameter>\n</function>\n</tool_call>",
    "mistral-nemo": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 3, "b": 4, "note": "7"}, "id": "123456789"}]',
    "devstral": 'So:[TOOL_CALLS]add[ARGS]{"a": 3, "b": 4, "note": "7"}',
}
REPLIES = {
    "qwen2.5": "\n<|im_start|>user\n<tool_response>\n7 '7'\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama-3.1": "<|start_header_id|>ipython<|end_header_id|>\n\n\"7 '7'\"<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "qwen3-coder": "\n<|im_start|>user\n<tool_response>\n7 '7'\n</tool_response>\n<|im_end|>\n<|im_start|>assistant\n",
    "mistral-nemo": '[TOOL_RESULTS]{"content": 7 \'7\', "call_id": "tool_call"}[/TOOL_RESULTS]',
    "devstral": "[TOOL_RESULTS]7 '7'[/TOOL_RESULTS]",
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_and_its_reply_go_as_the_template_has_them(name, workers):
    """What the policy is told, how it calls, what it sees: in the template's own words; "7" is a text as asked for."""
    tokenizer = tokenizer_of(name)
    messages = to_messages([{"role": "user", "content": "Add."}], tokenizer, workers.tools)
    (prompt,) = apply_template([messages], tokenizer)
    schema = workers.tools["add"].schema
    if name in ("qwen2.5", "llama-3.1", "mistral-nemo"):  # they write it as JSON
        own = tokenizer.apply_chat_template(
            [{"role": "system", "content": "You are a helpful assistant."}] * (name == "qwen2.5")
            + [{"role": "user", "content": "Add."}],
            tools=[schema],
            add_generation_prompt=True,
            tokenize=False,
        )
        assert prompt == own
    assert prompt.count("Add two numbers.") == 1 and "the first" in prompt

    ids = tokenizer.encode(prompt, add_special_tokens=False)
    the_row = Row(0, "x", messages, "1", {}, ids, [], {"add": {}})
    turns = Turns(tokenizer, workers, protocol=protocol_of(tokenizer, [schema]))
    (episode,), _ = run([[CALLS[name], "It is 7."]], turns, the_row, n=1)
    assert [(c["name"], c["arguments"], c["text"]) for c in episode.calls] == [
        ("add", {"a": 3, "b": 4, "note": "7"}, "7 '7'")
    ]
    assert (episode.finish_reason, episode.turns) == ("stop", 2)
    whole = tokenizer.decode(episode.response_ids)
    assert whole == CALLS[name] + tokenizer.eos_token + REPLIES[name] + "It is 7." + tokenizer.eos_token


def test_llamas_python_tag_and_the_last_of_several_calls():
    llama = protocol_of(tokenizer_of("llama-3.1"))
    assert llama.find_call('<|python_tag|>{"name": "f", "parameters": {}}<|eom_id|>') == Call("f", {})
    assert llama.find_call('I say {"name": "f", "parameters": {}}') is None
    devstral = protocol_of(tokenizer_of("devstral"))
    assert devstral.find_call('[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[CALL_ID]1[ARGS]{"x": 1}</s>') == Call("g", {"x": 1})


NO_CALLS = [
    ("llama-3.1", '{"answer": 42}'),
    ("llama-3.1", "{1, 2, 3} is the set."),
    ("qwen3-coder", "You use <tool_call><function=f> to call. The answer is 5."),
    ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=x>\n3\n<|im_end|>"),
    ("qwen3-coder", "<tool_call>\n<function=f>\n</function>\n</tool_call> So the answer is 5"),
    ("qwen3-coder", "<tool_call><function=f>" + "<parameter=s>" * 10_000),
    ("qwen3-coder", "<tool_call>\n<function=f>\n</function>\n</tool_call> The answer is \\boxed{5}<|im_end|>"),
    ("qwen3-coder", "<think><tool_call>\n<function=f>\n</function>\n</tool_call></think>The set is {5}<|im_end|>"),
]


@pytest.mark.parametrize("name, text", NO_CALLS)
def test_what_only_looks_like_a_call_is_none(name, text):
    with deadline(20):
        assert protocol_of(tokenizer_of(name)).find_call(text) is None


def test_spaces_within_a_call_cost_no_time():
    """The trainer reads calls itself, and nothing else goes on meanwhile."""
    text = '{"name": "f", "parameters": {"x": [1]' + " " * 40_000 + ', "y": 2}}'
    with deadline(3):
        assert protocol_of(tokenizer_of("llama-3.1")).find_call(text) == Call("f", {"x": [1], "y": 2})


def test_of_several_templates_the_names_are_asked_for():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": tokenizer.chat_template}
    assert isinstance(protocol_of(tokenizer), Hermes)


BROKEN = {
    "llama-3.1": ['{"name": "f"}', '{"name": 3, "parameters": {}}', '{"name": "f", "parameters": [1]}']
    + ['{"name": "f", "parameters": {"x": NaN}}', '{"name": "f", "parameters": ' + "[" * 100_000],
    "mistral-nemo": ["[TOOL_CALLS]", "[TOOL_CALLS][3]", '[TOOL_CALLS]{"name": "f"}', '[TOOL_CALLS][{"name": "f"}]'],
    "devstral": ["[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f[ARGS][]", '[TOOL_CALLS]f[ARGS]{"x": 1} and more'],
}


@pytest.mark.parametrize("name, text", [(name, text) for name, texts in BROKEN.items() for text in texts])
def test_a_malformed_call_is_told_to_the_policy(name, text):
    call = protocol_of(tokenizer_of(name)).find_call(text)
    assert call.error.startswith("Not a valid tool call: ") and call == Call(error=call.error)


def test_what_no_call_is_ends_the_trajectory():
    for name in CALLS:
        assert protocol_of(tokenizer_of(name)).find_call("It is 7.") is None


def test_another_way_of_calling_is_refused_by_name(workers):
    tokenizer = tokenizer_of("glm-4.6")
    with pytest.raises(ValueError, match="tools: the chat template calls them in another way than Hermes, Qwen3"):
        to_messages([{"role": "user", "content": "Add."}], tokenizer, workers.tools)
    assert to_messages([{"role": "user", "content": "Add."}], tokenizer), "without tools it serves"


def test_a_tokenizers_own_response_template_comes_first():
    tokenizer = tokenizer_of("glm-4.6")
    tokenizer.response_template = {
        "start_anchor": "<|assistant|>",
        "fields": {
            "tool_calls": {
                "open_pattern": r"<tool_call>(?P<name>\S+)\n?",
                "close_pattern": r"</tool_call>\s*",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
                },
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"content": "text"},
        },
    }
    protocol = protocol_of(tokenizer)
    assert isinstance(protocol, Native)
    text = "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>y</arg_value>\n</tool_call>"
    assert protocol.find_call(text) == Call("f", {"x": "y"})


def test_a_template_without_tools_is_given_hermes():
    tokenizer = build_tokenizer()
    assert "tool_calls" not in tokenizer.chat_template and isinstance(protocol_of(tokenizer), Hermes)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}, "required": ["a"]}
SCHEMA = {"name": "add", "description": "Add two numbers.", "parameters": SCHEMA}
ASKED, REPLY = {"name": "add", "arguments": {"a": 3, "note": "7"}}, 'the "sum"'
AS_LLAMA_FACTORY = {
    "tools": json.dumps([SCHEMA]),
    "conversations": [
        {"from": "human", "value": "Add."},
        {"from": "function_call", "value": json.dumps(ASKED)},
        {"from": "observation", "value": REPLY},
        {"from": "gpt", "value": "done"},
    ],
}
AS_TRANSFORMERS = {
    "tools": [{"type": "function", "function": SCHEMA}],
    "messages": [
        {"role": "user", "content": "Add."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "123456789", "type": "function", "function": ASKED}],
        },
        {"role": "tool", "tool_call_id": "123456789", "content": REPLY},
        {"role": "assistant", "content": "done"},
    ],
}


@pytest.mark.parametrize("row", [AS_LLAMA_FACTORY, AS_TRANSFORMERS], ids=["llama-factory", "transformers"])
@pytest.mark.parametrize("name", CALLS)
def test_supervised_rows_call_as_a_policy_has_to(name, row, tmp_path):
    """What sft.py teaches is what the RL scripts read as a call; the tools are offered once, in the same place."""
    tokenizer = tokenizer_of(name)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    episode = Conversations(str(tmp_path / "rows.jsonl"), "--t", tokenizer, max_tokens=9000).episode(0)
    prompt = tokenizer.decode(episode.prompt_ids)
    assert prompt.count("Add two numbers.") == 1
    schemas = [{"type": "function", "function": SCHEMA}]
    options = {"add_generation_prompt": True, "tokenize": False}
    system = [{"role": "system", "content": "You are a helpful assistant."}] * (name == "qwen2.5")
    if name != "qwen2.5" or row is AS_TRANSFORMERS:
        own = tokenizer.apply_chat_template([*system, {"role": "user", "content": "Add."}], tools=schemas, **options)
        assert tokenizer.encode(own, add_special_tokens=False) == episode.prompt_ids
    said = [token for token, trained in zip(episode.response_ids, episode.loss_mask) if trained]
    text = tokenizer.decode(said)
    call, end, rest = text.partition(tokenizer.eos_token)
    protocol = protocol_of(tokenizer, schemas)
    assert protocol.find_call(call) == Call("add", ASKED["arguments"])
    assert rest == f"done{end}" or rest.lstrip() == f"done{end}"
    shown = tokenizer.decode(episode.response_ids)
    assert REPLY in shown or json.dumps(REPLY) in shown

"""How models call tools, read from the chat templates of published ones: Hermes', Llama-3,
Qwen3-Coder, Mistral."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import deadline
from published import tokenizer_of
from scripted import run
from tokenizers import AddedToken
from vl import LLAMA2, OLMO, PHI, QWEN, SMOLLM, TOOLS, ZEPHYR, build_sentencepiece, build_tokenizer

from common.data.conversations import Conversations
from common.data.protocols import Call, Hermes, Native, protocol_of
from common.data.render import apply_template, to_messages
from common.rollout.trajectories import Turns
from common.tools.pools import ToolWorkers
from common.types import Row

ADD = """
def add(a: int, b: int = 0, note: str = "") -> str:
    '''Add two numbers.

    a: the first
    '''
    return f"{a + b} {note!r}"
"""


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    file = tmp_path_factory.mktemp("tool") / "adds.py"
    file.write_text(ADD)
    pool = ToolWorkers(f"{file}:add", 1, 20.0)
    yield pool
    pool.close()


CALLS = {
    "qwen2.5": 'So:\n<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4, "note": '
    '"7"}}\n</tool_call>',
    "llama-3.1": '{"name": "add", "parameters": {"a": 3, "b": 4, "note": "7"}}',
    "qwen3-coder": "So:\n<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n"
    "<parameter=b>\n4\n</parameter>\n"
    "<parameter=note>\n7\n</parameter>\n</function>\n</tool_call>",
    "mistral-nemo": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 3, "b": 4, "note": "7"}, '
    '"id": "123456789"}]',
    "devstral": 'So:[TOOL_CALLS]add[ARGS]{"a": 3, "b": 4, "note": "7"}',
}
REPLIES = {
    "qwen2.5": "\n<|im_start|>user\n<tool_response>\n7 '7'\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n",
    "llama-3.1": "<|start_header_id|>ipython<|end_header_id|>\n\n\"7 '7'\"<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "qwen3-coder": "\n<|im_start|>user\n<tool_response>\n7 '7'\n</tool_response>\n<|im_end|>\n"
    "<|im_start|>assistant\n",
    "mistral-nemo": '[TOOL_RESULTS]{"content": 7 \'7\', "call_id": "tool_call"}[/TOOL_RESULTS]',
    "devstral": "[TOOL_RESULTS]7 '7'[/TOOL_RESULTS]",
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_and_its_reply_go_as_the_template_has_them(name, workers):
    """What the policy is told, how it calls, what it sees: in the template's own words; "7" is a
    text as asked for."""
    tokenizer = tokenizer_of(name)
    messages = to_messages([{"role": "user", "content": "Add."}], tokenizer, workers.tools)
    (prompt,) = apply_template([messages], tokenizer)
    schema = workers.tools["add"].schema
    if name in ("qwen2.5", "llama-3.1", "mistral-nemo"):  # they write it as JSON
        own = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Add."}],
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
    assert (
        whole
        == CALLS[name] + tokenizer.eos_token + REPLIES[name] + "It is 7." + tokenizer.eos_token
    )


def test_llamas_python_tag_and_the_last_of_several_calls():
    llama = protocol_of(tokenizer_of("llama-3.1"))
    assert llama.find_call('<|python_tag|>{"name": "f", "parameters": {}}<|eom_id|>') == Call(
        "f", {}
    )
    assert llama.find_call('I say {"name": "f", "parameters": {}}') is None
    devstral = protocol_of(tokenizer_of("devstral"))
    assert devstral.find_call(
        '[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[CALL_ID]1[ARGS]{"x": 1}</s>'
    ) == Call("g", {"x": 1})


NO_CALLS = [
    ("llama-3.1", '{"answer": 42}'),
    ("llama-3.1", "{1, 2, 3} is the set."),
    ("qwen3-coder", "You use <tool_call><function=f> to call. The answer is 5."),
    ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=x>\n3\n<|im_end|>"),
    ("qwen3-coder", "<tool_call>\n<function=f>\n</function>\n</tool_call> So the answer is 5"),
    ("qwen3-coder", "<tool_call><function=f>" + "<parameter=s>" * 10_000),
    (
        "qwen3-coder",
        "<tool_call>\n<function=f>\n</function>\n</tool_call> The answer is \\boxed{5}<|im_end|>",
    ),
    (
        "qwen3-coder",
        "<think><tool_call>\n<function=f>\n</function>\n</tool_call></think>The set is "
        "{5}<|im_end|>",
    ),
]


@pytest.mark.parametrize("name, text", NO_CALLS)
def test_what_only_looks_like_a_call_is_none(name, text):
    with deadline(20):
        assert protocol_of(tokenizer_of(name)).find_call(text) is None


def test_spaces_within_a_call_cost_no_time():
    """The trainer reads calls itself, and nothing else goes on meanwhile."""
    text = '{"name": "f", "parameters": {"x": [1]' + " " * 40_000 + ', "y": 2}}'
    with deadline(3):
        assert protocol_of(tokenizer_of("llama-3.1")).find_call(text) == Call(
            "f", {"x": [1], "y": 2}
        )


def test_of_several_templates_the_names_are_asked_for():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = {
        "default": tokenizer.chat_template,
        "tool_use": tokenizer.chat_template,
    }
    assert isinstance(protocol_of(tokenizer), Hermes)


BROKEN = {
    "llama-3.1": [
        '{"name": "f"}',
        '{"name": 3, "parameters": {}}',
        '{"name": "f", "parameters": [1]}',
    ]
    + ['{"name": "f", "parameters": {"x": NaN}}', '{"name": "f", "parameters": ' + "[" * 100_000],
    "mistral-nemo": [
        "[TOOL_CALLS]",
        "[TOOL_CALLS][3]",
        '[TOOL_CALLS]{"name": "f"}',
        '[TOOL_CALLS][{"name": "f"}]',
    ],
    "devstral": [
        "[TOOL_CALLS]f[ARGS]",
        "[TOOL_CALLS]f[ARGS][]",
        '[TOOL_CALLS]f[ARGS]{"x": 1} and more',
    ],
}


@pytest.mark.parametrize(
    "name, text", [(name, text) for name, texts in BROKEN.items() for text in texts]
)
def test_a_malformed_call_is_told_to_the_policy(name, text):
    call = protocol_of(tokenizer_of(name)).find_call(text)
    assert call.error.startswith("Not a valid tool call: ") and call == Call(error=call.error)


def test_what_no_call_is_ends_the_trajectory():
    for name in CALLS:
        assert protocol_of(tokenizer_of(name)).find_call("It is 7.") is None


def test_another_way_of_calling_is_refused_by_name(workers):
    tokenizer = tokenizer_of("glm-4.6")
    with pytest.raises(
        ValueError, match="chat template writes calls in another format than Hermes, Qwen3"
    ):
        to_messages([{"role": "user", "content": "Add."}], tokenizer, workers.tools)
    assert to_messages([{"role": "user", "content": "Add."}], tokenizer), "without tools it serves"


@pytest.mark.parametrize(
    "template", [PHI.replace("<|end|>", "<|im_end|>"), ZEPHYR, OLMO], ids=["Phi", "Zephyr", "OLMo"]
)
def test_a_template_that_shows_no_replies_of_tools_is_refused(template, workers):
    with pytest.raises(
        ValueError, match="tools: the chat template leaves out messages of role 'tool': the policy"
    ):
        Turns(build_tokenizer(template), workers)
    silent = template.replace("message['content']", "''")  # knows a role, and shows nothing of it
    with pytest.raises(ValueError, match=r"leaves out messages of role|does not end"):
        Turns(build_tokenizer(silent), workers)
    headed = template.replace("['role'] == 'user'", "['role'] in ('user', 'tool')")
    headed = headed.replace(
        "message['content']", "('' if message['role'] == 'tool' else message['content'])"
    )
    with pytest.raises(ValueError, match="leaves out messages of role 'tool'"):
        Turns(build_tokenizer(headed), workers)
    of_users = SimpleNamespace(
        tools={"add": replace(workers.tools["add"], role="user")}, protocol=Hermes
    )
    Turns(build_tokenizer(template), of_users)  # whose replies come as a user's


@pytest.mark.parametrize(
    "refusal, told",
    [
        (
            "raise_exception('Only user and assistant roles are supported!')",
            "Only user and assistant",
        ),
        ("1 + 'x'", "unsup"),
    ],
)
def test_a_template_that_refuses_replies_of_tools_is_one_line(refusal, told, workers):
    refusing = (
        "{% for m in messages %}{% if m['role'] == 'tool' %}{{ REFUSAL }}{% endif %}{% endfor %}"
        + TOOLS
    )
    with pytest.raises(
        ValueError, match=f"refuses messages of role 'tool' .*{told}.*: the policy would not"
    ) as error:
        Turns(build_tokenizer(refusing.replace("REFUSAL", refusal)), workers)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("prefix", ["legacy", "first", "always"])
def test_a_reply_has_the_ids_that_it_has_behind_the_text_so_far(prefix, workers):
    """A tokenizer that puts a space before a text puts none before what goes on with it; sampled
    ids stay."""
    llama = build_sentencepiece(prefix, TOOLS)
    turns = Turns(llama, workers)
    prompt = apply_template([[{"role": "user", "content": "Hi"}]], llama)[0]
    the_row = Row(
        0, "x", [], "1", {}, llama.encode(prompt, add_special_tokens=False), [], {"add": {}}
    )
    call = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
    (episode,), _ = run([[call, "two"]], turns, the_row, n=1)
    sampled = [*llama.encode(call, add_special_tokens=False), llama.eos_token_id]
    assert episode.response_ids[: len(sampled)] == sampled and episode.turns == 2
    observation = episode.response_ids[len(sampled) : len(sampled) + episode.loss_mask.count(0)]
    assert set(episode.loss_mask[len(sampled) :][: len(observation)]) == {0}
    text = prompt + call + "</s>\n<|tool|>\n7 ''</s>\n<|assistant|>\n"
    assert llama.encode(text, add_special_tokens=False)[-len(observation) - 1 :] == [
        llama.eos_token_id,
        *observation,
    ]


def test_a_tokenizer_that_does_not_keep_turns_apart_is_refused(workers):
    """Its end token is one only where no letter follows."""
    plain = TOOLS.replace("<|{{ m['role'] }}|>", "{{ m['role'] }}: ").replace("}}\n{%", "}}{%")
    llama = build_sentencepiece("first", plain)
    Turns(llama, workers)
    llama.add_tokens([AddedToken("<end>", single_word=True, special=True)], special_tokens=True)
    llama.eos_token = AddedToken("<end>", single_word=True, special=True)
    with pytest.raises(
        ValueError,
        match=r"tools: the tokenizer of '.*' does not keep '<end>' apart from what follows",
    ):
        Turns(llama, workers)


QWEN3_LIKE = "{%- if messages[0].role == 'system' %}" + QWEN.partition("%}")[2].replace(
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", "Be brief,\nand kind."
)


@pytest.mark.parametrize(
    "template, text",
    [
        (QWEN, "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
        (QWEN3_LIKE, "Be brief,\nand kind."),
        (SMOLLM, "You are a helpful AI assistant named SmolLM, trained by Hugging Face"),
        (PHI, "You are a helpful assistant."),
        (TOOLS, "You are a helpful assistant."),
        (LLAMA2, "You are a helpful assistant."),
    ],
)
def test_tools_are_offered_behind_the_templates_own_system_text(template, text, workers):
    tokenizer = build_tokenizer(template)
    messages = to_messages([{"role": "user", "content": "Add."}], tokenizer, workers.tools)
    assert messages[0]["content"] == text + Hermes.system_block([workers.tools["add"].schema])
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "Add."}]
    assert to_messages(own, tokenizer, workers.tools)[0]["content"].startswith("Mine.\n\n# Tools")


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
                    "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>"
                    r"\s*<arg_value>(?P<value>.*?)</arg_value>"
                },
                "transform": {
                    "type": "function",
                    "function": {"name": "{name}", "arguments": "{content}"},
                },
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
    assert "tool_calls" not in tokenizer.chat_template and isinstance(
        protocol_of(tokenizer), Hermes
    )


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "note": {"type": "string"}},
    "required": ["a"],
}
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


@pytest.mark.parametrize(
    "row", [AS_LLAMA_FACTORY, AS_TRANSFORMERS], ids=["llama-factory", "transformers"]
)
@pytest.mark.parametrize("name", CALLS)
def test_supervised_rows_call_as_a_policy_has_to(name, row, tmp_path):
    """What sft.py teaches is what the RL scripts read as a call; the tools are offered once, in the
    same place."""
    tokenizer = tokenizer_of(name)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    episode = Conversations(
        str(tmp_path / "rows.jsonl"), "--t", tokenizer, max_tokens=9000
    ).episodes(0)[0]
    prompt = tokenizer.decode(episode.prompt_ids)
    assert prompt.count("Add two numbers.") == 1
    schemas = [{"type": "function", "function": SCHEMA}]
    options = {"add_generation_prompt": True, "tokenize": False}
    if name != "qwen2.5" or row is AS_TRANSFORMERS:
        own = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Add."}], tools=schemas, **options
        )
        assert tokenizer.encode(own, add_special_tokens=False) == episode.prompt_ids
    said = [token for token, trained in zip(episode.response_ids, episode.loss_mask) if trained]
    text = tokenizer.decode(said)
    call, end, rest = text.partition(tokenizer.eos_token)
    protocol = protocol_of(tokenizer, schemas)
    assert protocol.find_call(call) == Call("add", ASKED["arguments"])
    assert rest == f"done{end}" or rest.lstrip() == f"done{end}"
    shown = tokenizer.decode(episode.response_ids)
    assert REPLY in shown or json.dumps(REPLY) in shown

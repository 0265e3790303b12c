"""Tools: what the policy is told of them, its calls, their replies; hangs and crashes; crops,
frames, sizes, decoding.

pytest tests/tools/test_tools.py
pytest tests/tools/test_tools.py -m slow    # more strings, sizes and broken files
"""

import contextlib
import io
import json
import math
import pickle
import random

import pytest
from helpers import deadline
from PIL import Image

from common.data.protocols import CALL_CLOSE, CALL_OPEN, Call, Hermes
from common.pictures import decode, encode, shown_size
from common.tools import find_tool, load_tools, visual
from common.tools.pools import ToolWorkers
from common.tools.visual import crop_image_normalized, select_frames
from common.types import MAX_TEXT, ToolReply
from common.workers.pool import Worker

TOOLS = '''
import os, signal, sys, time
from typing import Literal, Optional

import neighbour  # lies beside this file
from PIL import Image

calls = 0
time.sleep(float(os.environ.get("SLOW_IMPORT", "0")))


ACTIONS = {
    "hang": lambda: time.sleep(600),
    "exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "10 GB": lambda: bytearray(10 * 2**30),
    "sys.exit": lambda: sys.exit(3),
    "raise": lambda: {}["answer"],
    "recurse": lambda: ACTIONS["recurse"](),
    "refuse": lambda: int("no number"),
    "pid": os.getpid,
    "times": lambda: neighbour.TIMES,
    "torch": lambda: any(name in sys.modules for name in ("torch", "numpy", "transformers")),
    "none": lambda: None,
    "dict": lambda: {"a": [1, 2.5], "b": "\\u00e9"},
    "tuple": lambda: (1, 2),
    "object": object,
    "long": lambda: "a" * 50_000 + "b" * 50_000,
    "surrogate": lambda: "x\\ud800y",
    "picture": lambda: (
        "seen", [Image.new("CMYK", (40, 30)), Image.new("RGBA", (5, 6))], {"box": [0, 0.5]}
    ),
    "no picture": lambda: ("seen", [b"GIF89a"]),
    "bad info": lambda: ("seen", [], {"x": object()}),
}


def act(action: str, seconds: float = 0.0):
    """Do it.

    action: what to do
    """
    begin = time.monotonic()
    time.sleep(seconds)
    return [begin, time.monotonic()] if action == "sleep" else ACTIONS[action]()


def our_act(action: str, seconds: float = 0.0):
    return act(action, seconds)


our_act.trusted = True


def wait_for(path: str):
    while not os.path.exists(path):
        time.sleep(0.01)


def meet(folder: str, name: str, number: int):
    """Come, and stay until so many have come."""
    begin = time.monotonic()
    open(os.path.join(folder, name), "w").close()
    while len(os.listdir(folder)) < number:
        time.sleep(0.01)
    time.sleep(0.1)
    return [begin, time.monotonic()]


def count() -> int:
    global calls
    calls += 1
    return calls


def counted():
    return calls


def grade(answer: str, *, ground_truth: str, scale: float = 1.0):
    return scale * (answer == ground_truth)


def see(number: int, context: dict, **rest):
    return {"media": len(context["media"]), "rest": rest, "number": number}


def search(
    words: list[str],
    where: Literal["title", "text"],
    limit: int = 5,
    exact: Optional[bool] = None,
    *,
    seed: int = 0,
    context=None,
    **rest,
):
    """Look something up
    in the library.

    More of it, which is for readers.

    words: all must occur: in any order
    where (str, one of two):   which part
    """


def plain(x: float, y: dict, z: list, u: str | None) -> str:
    return "x: here is no parameter's description"


def untyped(x: int, y):
    pass


def odd(x: object.__reduce__):
    pass


async def later(x: int):
    pass


def several(*x: int):
    pass


class Kind:
    def __call__(self, x: int):
        pass


def positional(x: int, /):
    pass


def unknown(x: "Missing"):
    pass


def own(x):
    return x


parameters = {"properties": {"x": {}}}
own.schema = {"type": "function", "function": {"name": "mine", "parameters": parameters}}


def wrong():
    pass


wrong.schema = {"name": "wrong"}
LIMIT = 3
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("user")
    (folder / "neighbour.py").write_text("TIMES = 7\n")
    (folder / "mine.py").write_text(TOOLS)
    return str(folder / "mine.py")


@pytest.fixture
def start(file):
    """ToolWorkers(...), closed after the test."""
    started = []

    def start(*names, count=1, timeout_s=20.0, memory_gib=1.0) -> ToolWorkers:
        spec = ",".join(
            name if name in ("visual", "crop_image_normalized") else f"{file}:{name}"
            for name in names
        )
        started.append(ToolWorkers(spec, count, timeout_s, memory_gib))
        return started[-1]

    yield start
    for pool in started:
        pool.close()


@pytest.fixture(scope="module")
def act(file):
    """A worker whose calls end, one way or the other."""
    tools = ToolWorkers(f"{file}:act", 1, 20.0)
    yield tools
    tools.close()


def submit(tools: ToolWorkers, key, action: str, seconds: float = 0.0, name: str = "act") -> None:
    tools.submit(key, Call(name, {"action": action, "seconds": seconds}), {}, {})


def collect(tools: ToolWorkers) -> dict:
    """All replies, in the order in which they came."""
    replies = {}
    with deadline(60):
        while tools.pending:
            replies.update(tools.poll(60.0))
    return replies


def answer(tools: ToolWorkers, call: Call, context=None, /, **kwargs) -> ToolReply:
    tools.submit("key", call, context or {}, kwargs)
    return collect(tools)["key"]


# ---------------------------------------------------------------- what the policy is told

# The beginning of Qwen2.5's chat template, its two long strings in parts.
QWEN = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- endif %}
    {{- "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n" }}
    {{- "You are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object " }}
    {{- "with function name and arguments " }}
    {{- "within <tool_call></tool_call> XML tags:\n<tool_call>\n" }}
    {{- "{\"name\": <function-name>, \"arguments\": <args-json-object>}\n" }}
    {{- "</tool_call><|im_end|>\n" }}
{%- endif %}"""


def test_tool_block_is_that_of_the_chat_template(file):
    from transformers.utils.chat_template_utils import render_jinja_template

    tools = load_tools(f"visual,{file}:search")
    tools["search"].schema["function"]["description"] += ' <b>été & "日本"</b>\''
    messages = [{"role": "system", "content": "You are a helpful assistant."}]
    schemas = [tool.schema for tool in tools.values()]
    rendered = render_jinja_template(conversations=[messages], tools=schemas, chat_template=QWEN)[
        0
    ][0]
    assert (
        rendered == "<|im_start|>system\nYou are a helpful "
        f"assistant.{Hermes.system_block(schemas)}<|im_end|>\n"
    )
    assert "日本" in rendered


def test_visual_tools():
    tools = load_tools("visual")
    assert (
        list(tools)
        == ["crop_image_normalized", "select_frames"]
        == [*load_tools("crop_image_normalized,select_frames")]
    )
    crop, select = (tool.schema["function"]["parameters"] for tool in tools.values())
    assert crop["required"] == ["bbox_2d", "target_image"] == list(crop["properties"])
    assert crop["properties"]["bbox_2d"]["items"] == {"type": "number"}
    assert crop["properties"]["target_image"]["type"] == "number"
    assert select["required"] == ["target_frames"]
    assert select["properties"]["target_frames"]["items"]["type"] == "integer"
    for name in ("crop_image", "zoom_in", "crop_image_normalized"):
        assert find_tool(tools, name) is tools["crop_image_normalized"]
    assert find_tool(tools, "crop") is None
    assert {(tool.role, tool.trusted) for tool in tools.values()} == {("user", True)}
    assert load_tools("") == {}


def test_schema_from_signature(file):
    tool = load_tools(f" {file}:search ")["search"]
    assert (tool.role, tool.aliases) == ("tool", ())
    assert tool.schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Look something up in the library.",
            "parameters": {
                "type": "object",
                "properties": {
                    "words": {
                        "type": "array",
                        "items": {"type": "string"},
                        "description": "all must occur: in any order",
                    },
                    "where": {
                        "type": "string",
                        "enum": ["title", "text"],
                        "description": "which part",
                    },
                    "limit": {"type": "integer"},
                    "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                },
                "required": ["words", "where"],
            },
        },
    }
    function = load_tools(f"{file}:plain")["plain"].schema["function"]
    types = {
        "x": {"type": "number"},
        "y": {"type": "object", "additionalProperties": True},
        "z": {"type": "array", "items": {}},
        "u": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    }
    assert function["description"] == "" and function["parameters"]["properties"] == types
    assert load_tools(f"{file}:own")["mine"].function.__name__ == "own"


def test_bad_specs(file, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("x = 1\nf = y\n")
    for spec, words in [
        ("zoom", "expected FILE.py:NAME or one of crop_image_normalized, select_frames, visual"),
        (f"{file}:", "expected FILE.py:NAME"),
        (f"{tmp_path}/none.py:f", "there is no file"),
        (f"{file}:nothing", "defines no nothing"),
        (f"{file}:LIMIT", "LIMIT is of type int, not a function"),
        ("visual,select_frames", "select_frames is named twice"),
        (f"{file}:act,{file}:act", "act is named twice"),
        (f"{file}:untyped", "parameter y has no type hint"),
        (f"{file}:odd", "no JSON type for the type hint <method '__reduce__'"),
        (f"{file}:later", "must be a plain function"),
        (f"{file}:Kind", "must be a plain function"),
        (f"{file}:several", "parameter x is positional-only"),
        (f"{file}:positional", "parameter x is positional-only"),
        (f"{file}:unknown", "name 'Missing' is not defined"),
        (f"{file}:wrong", "KeyError: 'function'"),
        (f"{broken}:f", "NameError: name 'y' is not defined (line 2 of broken.py)"),
        # no half-made module is kept
        (f"{broken}:f", "NameError: name 'y' is not defined (line 2 of broken.py)"),
    ]:
        with pytest.raises(ValueError) as error:
            load_tools(spec)
        assert words in str(error.value) and str(error.value).startswith("--tools "), error.value
        with pytest.raises(ValueError, match=r"^--tools "):
            ToolWorkers(spec, 1, 1.0)


# ---------------------------------------------------------------- its calls

CROP_CALL = '{"name": "crop", "arguments": {"bbox_2d": [0.1, 0.2, 0.5, 1], "target_image": 1}}'


@pytest.mark.parametrize(
    "text",
    [
        f"I look.{CALL_OPEN}{CROP_CALL}{CALL_CLOSE}",
        f"{CALL_OPEN}\n{CROP_CALL}\n{CALL_CLOSE} \n\t\n",
        f"{CALL_OPEN}{{}}{CALL_CLOSE} and {CALL_OPEN}\n{CROP_CALL}\n{CALL_CLOSE}",
        f"{CALL_OPEN}{CALL_OPEN}{CROP_CALL}{CALL_CLOSE}",
        f"{CALL_OPEN}{CROP_CALL}{CALL_CLOSE}{CALL_CLOSE}",
        CALL_OPEN
        + json.dumps({"name": "crop", "arguments": json.dumps(json.loads(CROP_CALL)["arguments"])})
        + CALL_CLOSE,
    ],
)
def test_calls(text):
    assert Hermes.find_call(text) == Call(
        "crop", {"bbox_2d": [0.1, 0.2, 0.5, 1], "target_image": 1}
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\\boxed{B}",
        f"{CALL_OPEN}{CROP_CALL}",
        f"{CALL_OPEN}{CROP_CALL}{CALL_CLOSE}.",
        CALL_CLOSE[:-1],
    ],
)
def test_no_calls(text):
    assert Hermes.find_call(text) is None


@pytest.mark.parametrize(
    "body, error",
    [
        ("", "EOF while parsing"),
        ("{'name': 'f'}", "key must be a string"),
        (CROP_CALL + CROP_CALL, "trailing characters"),
        ("[]", "expected {"),
        ('"f"', "expected {"),
        ('{"name": "f"}', "expected {"),
        ('{"arguments": {}}', "expected {"),
        ('{"name": 3, "arguments": {}}', "expected {"),
        ('{"name": "f", "arguments": [1]}', "expected {"),
        ('{"name": "f", "arguments": null}', "expected {"),
        ('{"name": "f", "arguments": "[1]"}', "expected {"),
        ('{"name": "f", "arguments": "x = 1"}', "expected value"),
        ('{"name": "f", "arguments": {"x": NaN}}', "expected value"),
        ('{"name": "f", "arguments": {"x": [1e999]}}', "Out of range float values"),
        ('{"name": "f", "arguments": {"x": -Infinity}}', "invalid number"),
        ('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "number out of range"),
        ('{"name": "f", "arguments": ' + "[" * 100_000 + "]" * 100_000 + "}", "recursion limit"),
        ('{"name": "f", "arguments": {"x": ' + "[" * 200 + "]" * 200 + "}}", "recursion limit"),
        ('{"name": "f", "arguments": "' + "[" * 100_000 + '"}', "recursion limit"),
    ],
)
def test_malformed_calls(body, error):
    call = Hermes.find_call(f"{CALL_OPEN}{body}{CALL_CLOSE}")
    assert error in call.error and call == Call(error=call.error)
    assert Hermes.find_call(body + CALL_CLOSE).error == f"{CALL_CLOSE} without {CALL_OPEN}"


PIECES = [
    CALL_OPEN,
    CALL_CLOSE,
    CALL_OPEN[:-1],
    CALL_CLOSE[1:],
    " ",
    "\n",
    "\0",
    "\ud800",
    "\x85",
    "\x1f",
    "\u2028",
    "\ufeff",
    "é",
    "𝄞",
]
PIECES += ['{"name": "f", "arguments": ', '"arguments": "{}"', "9" * 5000]
PIECES += [
    '"name"',
    '"arguments"',
    "\\ud800",
    "NaN",
    "Infinity",
    "1e999",
    "-0",
    "null",
    "[[[[",
    *'{}[]":,\\<>/',
]


def check_strings(count: int, seed: int) -> None:
    rng = random.Random(seed)
    good = 0
    for _ in range(count):
        body = "".join(rng.choices(PIECES, k=rng.randrange(12)))
        if rng.random() < 0.3:
            name, arguments = (
                "".join(rng.choices(PIECES, k=2)),
                {rng.choice(PIECES): rng.choice([1, -0.5, None, "x"])},
            )
            body += f"{CALL_OPEN}{json.dumps({'name': name, 'arguments': arguments})}"
        text = body + rng.choice([CALL_CLOSE, CALL_CLOSE, f"{CALL_CLOSE}\n", ""])
        call = Hermes.find_call(text)
        assert (call is None) == (not text.rstrip().endswith(CALL_CLOSE)), text
        if call and not call.error:
            good += 1
            assert isinstance(call.name, str) and isinstance(call.arguments, dict)
            json.dumps(call.arguments)
            pickle.dumps(call.arguments)
    assert good > count / 20


def test_strings_made_to_break_the_parser():
    check_strings(20_000, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_strings_made_to_break_the_parser(seed):
    check_strings(100_000, seed)


@pytest.mark.parametrize(
    "pieces",
    [
        CALL_OPEN,
        CALL_OPEN + "{",
        CALL_OPEN + CALL_CLOSE,
        CALL_CLOSE,
        CALL_OPEN[:-1],
        CALL_CLOSE[:-1],
        *" [9\\",
        '{"a":',
        '"\\',
    ],
)
def test_parsing_takes_linear_time(pieces):
    """A deadline that quadratic time would miss by hours; `pieces` at either end, inside a call and
    before it."""
    with deadline(10):
        for size in (2**18, 2**20):
            filling = pieces * (size // len(pieces))
            for text in (
                filling,
                filling + CALL_CLOSE,
                CALL_OPEN + filling + CALL_CLOSE,
                CALL_OPEN + CROP_CALL + filling,
                CALL_CLOSE + filling,
            ):
                Hermes.find_call(text)
            assert Hermes.find_call(filling + CALL_OPEN + CROP_CALL + CALL_CLOSE).name == "crop"


# ---------------------------------------------------------------- replies


def test_results(start):
    tools = start("act")
    for action, text in [
        ("times", "7"),
        ("none", "null"),
        ("torch", "false"),  # and that the workers are light
        ("dict", '{"a": [1, 2.5], "b": "é"}'),
        ("tuple", "[1, 2]"),
        ("surrogate", "x?y"),
    ]:
        assert answer(tools, Call("act", {"action": action})) == ToolReply(text)
    long = answer(tools, Call("act", {"action": "long"})).text
    assert len(long) == MAX_TEXT and "[... cut: the whole has 100000 characters ...]" in long
    assert long.startswith("a" * 2000) and long.endswith("b" * 2000)
    reply = answer(tools, Call("act", {"action": "picture"}))
    assert (reply.text, reply.info, reply.error, reply.failed) == (
        "seen",
        {"box": [0, 0.5]},
        False,
        False,
    )
    assert [decode(image).size for image in reply.images] == [(40, 30), (5, 6)]
    assert decode(reply.images[1]).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"action": "raise"}, "KeyError: 'answer'"),
        ({"action": "refuse"}, "invalid literal for int() with base 10: 'no number'"),
        ({"action": "recurse"}, "RecursionError: maximum recursion depth exceeded"),
        ({"action": "object"}, "TypeError: Object of type object is not JSON serializable"),
        ({"action": "no picture"}, "unreadable image: "),
        ({}, "act: missing arguments: action"),
        ({"action": "pid", "b": 1, "seconds": 0.0, "\ud800": 2}, "act: unexpected arguments: b, ?"),
        ({"action": "pid", "context": {}}, "act: unexpected arguments: context"),
        ({"action": ["pid"]}, "TypeError: unhashable type: 'list'"),
    ],
)
def test_what_goes_wrong_in_a_tool_is_told_to_the_policy(act, arguments, text):
    reply = answer(act, Call("act", arguments))
    assert reply.error and not reply.failed and reply.role == "tool"
    assert reply.text.startswith(f"Error: {text}"), reply.text


@pytest.mark.parametrize(
    "names, role, message",
    [
        (["act"], "tool", "Error: {}"),
        (["act", "crop_image_normalized"], "user", "\nExecution error:\n{}\n"),
    ],
)
def test_no_such_tool_and_no_valid_call(start, names, role, message):
    tools = start(*names)
    unknown = answer(tools, Call("crop", {}))
    offered = ", ".join(names)
    assert unknown == ToolReply(
        message.format(f"there is no tool 'crop', but {offered}"), error=True, role=role
    )
    malformed = answer(tools, Hermes.find_call(f"{CALL_OPEN}{{}}{CALL_CLOSE}"))
    assert (
        malformed.error
        and malformed.role == role
        and "Not a valid tool call: expected" in malformed.text
    )
    # a tool's own role
    assert answer(tools, Call("act", {})).text == "Error: act: missing arguments: action"
    if role == "user":
        text = "\nExecution error:\ncrop_image_normalized: missing arguments: bbox_2d\n"
        reply = answer(tools, Call("zoom_in", {"target_image": 1}), {"media": []})
        assert reply == ToolReply(text, error=True, role="user")


def test_what_the_row_gives(start):
    tools = start("grade", "see", "count")
    call = Call("grade", {"answer": "4"})
    assert answer(tools, call, ground_truth="4", other=1).text == "1.0"
    assert answer(tools, call, ground_truth="4", scale=0.5).text == "0.5"
    assert answer(tools, call, ground_truth="4", scale=None).text == "1.0"  # Arrow's nulls
    missing = answer(tools, call)
    assert (
        missing.failed
        and "the row gives grade no ground_truth in extra_info.tools_kwargs" in missing.text
    )
    cheat = Call("grade", {"answer": "5", "ground_truth": "5"})
    assert (
        answer(tools, cheat, ground_truth="4").text
        == "Error: grade: unexpected arguments: ground_truth"
    )
    context = {"media": [1, 2, 3]}
    assert json.loads(answer(tools, Call("see", {"number": 1}), context, number=2, a=3).text) == {
        "media": 3,
        "rest": {"a": 3},
        "number": 1,  # the policy's, where both give one
    }
    assert (
        json.loads(answer(tools, Call("see", {}), context, number=2, context=0).text)["number"] == 2
    )
    assert answer(tools, Call("count", {}), context, a=1).text == "1"


def test_functions_of_one_file_share_it(start):
    tools = start("count", "counted")
    assert [answer(tools, Call(name, {})).text for name in ("count", "count", "counted")] == [
        "1",
        "2",
        "2",
    ]


# ---------------------------------------------------------------- workers

FAILURES = {
    "hang": "timeout after 4 s",
    "exit": "the worker died (exit code 3)",
    "kill": "the worker died (Killed)",
    "10 GB": "MemoryError (line ",
    "sys.exit": "SystemExit: 3",
    "bad info": "TypeError: Object of type object is not JSON serializable",
}


@pytest.mark.parametrize(
    "name, failures", [("act", list(FAILURES)), ("our_act", ["hang", "exit", "bad info"])]
)
def test_each_failure_costs_its_own_call_and_others_go_on(start, name, failures):
    """The policy wrote the call, and reads what came of it; if the tool says that it is ours, the
    sample is lost."""
    tools = start(name, count=2, timeout_s=4.0)
    for action in failures:
        submit(tools, action, action, name=name)
        for number in range(3):
            submit(tools, (action, number), "times", name=name)
    replies = collect(tools)
    assert len(replies) == 4 * len(failures)
    for key, reply in replies.items():
        if key in FAILURES:
            assert (reply.failed, reply.error) == (name == "our_act", name == "act"), (key, reply)
            assert reply.text.startswith("Error: ") == reply.error
            assert reply.text.removeprefix("Error: ").startswith(FAILURES[key]), (key, reply)
        else:
            assert reply == ToolReply("7"), (key, reply)
    assert list(replies).index("hang") > list(replies).index(("exit", 2))  # nobody waited for it


def test_a_call_that_no_worker_could_take_is_not_the_policys_fault(start, monkeypatch):
    tools, reply = start("act"), {"error": "no worker starts: the worker died (exit code 4)"}
    tools.pending = 1
    monkeypatch.setattr(tools.pool, "poll", lambda timeout_s: [(("key", "act"), reply)])
    assert tools.poll() == [("key", ToolReply(reply["error"], failed=True))]


def test_poll_waits_for_the_first_and_not_for_the_slow(start, tmp_path):
    """The slow one is done when the others have been heard."""
    tools = start("act", "wait_for", count=2, timeout_s=60.0)
    assert tools.poll() == [] == tools.poll(60.0)  # nothing is pending
    tools.submit("slow", Call("wait_for", {"path": str(tmp_path / "heard")}), {}, {})
    assert tools.poll() == [] and tools.poll(0.1) == [] and tools.pending == 1
    order = []
    for number in range(3):
        submit(tools, number, "times")
        order += [key for key, _ in tools.poll(60.0)]
    assert order == [0, 1, 2] and tools.pending == 1
    (tmp_path / "heard").touch()
    assert [key for key, _ in tools.poll(60.0)] == ["slow"] and tools.pending == 0


def meeting(tools: ToolWorkers, folder, jobs: int, at_once: int) -> list:
    """When each job began and ended; of every `at_once` all are under way before one of them is
    done."""
    for number in range(jobs):
        arguments = {
            "folder": str(folder),
            "name": str(number),
            "number": number // at_once * at_once + at_once,
        }
        tools.submit(number, Call("meet", arguments), {}, {})
    assert tools.pending == jobs
    replies = collect(tools)
    return [json.loads(replies[number].text) for number in range(jobs)]


def test_jobs_run_at_the_same_time(start, tmp_path):
    """8 jobs on 4 workers: four at some moment, and never more."""
    spans = meeting(start("meet", count=4, timeout_s=60.0), tmp_path, jobs=8, at_once=4)
    at_once = [sum(begin <= moment < end for begin, end in spans) for moment, _ in spans]
    assert max(at_once) == 4 and len(spans) == 8


def test_a_queued_job_has_its_whole_time(start):
    tools = start("act", timeout_s=4.0)
    for number in range(3):
        submit(tools, number, "sleep", 1.5)
    assert not any(reply.error for reply in collect(tools).values())


def test_others_work_while_one_starts_again(start, monkeypatch, tmp_path):
    tools = start("act", "meet", count=2)
    meeting(tools, tmp_path, jobs=2, at_once=2)  # both workers are started
    monkeypatch.setenv("SLOW_IMPORT", "600")
    submit(tools, "exit", "exit")
    with deadline(60):
        assert [key for key, reply in tools.poll(30.0) if reply.error] == ["exit"]
        for number in range(3):
            submit(tools, number, "times")
            assert tools.poll(30.0) == [(number, ToolReply("7"))]
    assert sorted(worker.state for worker in tools.pool.workers) == [Worker.IDLE, Worker.STARTING]


@pytest.mark.parametrize("arguments", [(0, 1.0, 1.0), (1, 0.0, 1.0), (1, 1.0, -1.0)])
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match="workers: got"):
        ToolWorkers("visual", *arguments)


@pytest.mark.slow  # by default pictures are small
def test_media_of_many_megabytes(start):
    tools = start("crop_image_normalized", count=2)
    noise = Image.frombytes("RGB", (1200, 1000), random.Random(0).randbytes(3_600_000))
    context = {**LIMITS, "media": [{"kind": "image", "frames": [encode(noise)]}] * 4}
    call = Call("crop_image_normalized", {"bbox_2d": [0.2, 0.2, 0.9, 0.9], "target_image": 4})
    for number in range(4):
        tools.submit(number, call, context, {})
    for reply in collect(tools).values():
        assert reply.role == "user" and reply.info["target"] == 3
        assert decode(reply.images[0]).tobytes() == noise.crop((120, 100, 1200, 1000)).tobytes()


# ---------------------------------------------------------------- sizes

LIMITS = {
    "num_prompt_media": 1,
    "min_pixels": 3136,
    "max_pixels": 784_000,
    "max_frame_pixels": 313_600,
    "cell": 28,
}


@pytest.mark.parametrize(
    "size, limits, expected",
    [
        # 36 x 29 = 1044 cells > 1000: scaled by 0.98995, rounded down
        ((1000, 800), (3136, 784_000), (980, 784)),
        ((600, 480), (3136, 784_000), (588, 476)),  # 21.4 x 17.1 cells
        # 1 x 1 cell < 4: scaled by 2.286 to 1.63 x 2.45 cells, rounded up
        ((20, 30), (3136, 784_000), (56, 84)),
        ((1, 1), (0, 784), (28, 28)),
        ((10, 100), (0, 784_000), (28, 112)),
        ((1, 300), (0, 784_000), (28, 308)),
        ((5000, 20), (3136, 784_000), (5012, 28)),  # 20 becomes 28: 178.6 x 1 cells
        ((41, 8200), (3136, 784_000), (28, 5600)),  # 1.46 x 292.9 cells
        # 1 becomes 500: scaled to 447 x 2 cells, 400 of them left
        ((100_000, 1), (784, 784_000), (11_200, 56)),
    ],
)
def test_shown_size(size, limits, expected):
    assert shown_size(*size, *limits) == expected


def check_sizes(count: int, seed: int, cell: int) -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    rng = random.Random(seed)
    same = 0
    for _ in range(count):
        width, height = (max(1, round(2 ** rng.uniform(0, rng.choice([11, 14])))) for _ in range(2))
        max_pixels = round(cell**2 * 2 ** rng.uniform(0, 14))
        min_pixels = round(max_pixels * rng.choice([0, 1, rng.random(), rng.random() ** 8]))
        size = shown_size(width, height, min_pixels, max_pixels, cell)
        ratio = max(size) / min(size)
        assert all(side % cell == 0 and side >= cell for side in size) and ratio <= 200
        enlarged = max(width, height, cell) / max(min(width, height), cell)
        true_ratio = max(width, height) / min(width, height)
        if (
            max_pixels >= cell**2 * (min(200, max(enlarged, true_ratio)) + 1)
            and max_pixels >= 4 * min_pixels
        ):
            assert size[0] * size[1] <= max_pixels, (width, height, min_pixels, max_pixels, size)
        if true_ratio > 200:
            continue
        theirs = smart_resize(height, width, cell, min_pixels, max_pixels)[::-1]
        if min(theirs) >= cell and max(theirs) <= 200 * min(theirs):
            same += 1
            assert size == theirs, (width, height, min_pixels, max_pixels)
    assert same > count / 2


@pytest.mark.parametrize("cell", [28, 32])
def test_sizes_are_those_of_transformers(cell):
    check_sizes(2000, seed=0, cell=cell)


@pytest.mark.slow
def test_many_sizes_are_those_of_transformers():
    check_sizes(300_000, seed=1, cell=28)


def test_a_shown_size_is_shown_as_it_is():
    """So that an image processor that resizes once more changes nothing."""
    rng = random.Random(0)
    for _ in range(2000):
        max_pixels = rng.randrange(784 * 101, 784 * 5000)
        limits = (rng.randrange(max_pixels // 4), max_pixels)
        width, ratio = 2 ** rng.uniform(0, 12), 100 ** rng.uniform(-1, 1)
        size = shown_size(max(1, round(width)), max(1, round(width * ratio)), *limits)
        assert shown_size(*size, *limits) == size


@pytest.mark.parametrize("limits", [(785, 784), (0, 783), (0, 0), (0, 1023, 32)])
def test_impossible_limits(limits):
    with pytest.raises(ValueError, match="shown_size: got min_pixels"):
        shown_size(100, 100, *limits)


# ---------------------------------------------------------------- decoding


def encoded(image: Image.Image, format: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def palette() -> bytes:
    image = Image.new("P", (8, 6), 1)
    image.putpalette([0, 0, 0, 200, 10, 20])
    image.putpixel((0, 0), 0)
    return encoded(image, transparency=0)


RED = (200, 10, 20)


@pytest.mark.parametrize(
    "data, size, pixels",
    [
        (encoded(Image.new("RGB", (1, 1), RED)), (1, 1), {(0, 0): RED}),
        (encoded(Image.new("RGB", (5000, 20), RED)), (5000, 20), {(4999, 19): RED}),
        (encoded(Image.new("RGBA", (3, 2), (*RED, 0))), (3, 2), {(2, 1): (255, 255, 255)}),
        (encoded(Image.new("RGBA", (3, 2), (0, 0, 0, 51))), (3, 2), {(0, 0): (204, 204, 204)}),
        (encoded(Image.new("RGBA", (3, 2), (*RED, 255))), (3, 2), {(0, 0): RED}),
        (palette(), (8, 6), {(0, 0): (255, 255, 255), (1, 0): RED}),
        (encoded(Image.new("L", (3, 2), 7), transparency=7), (3, 2), {(0, 0): (255, 255, 255)}),
        (encoded(Image.new("LA", (3, 2), (100, 0))), (3, 2), {(0, 0): (255, 255, 255)}),
        (encoded(Image.new("LA", (3, 2), (100, 255))), (3, 2), {(0, 0): (100, 100, 100)}),
        (encoded(Image.new("L", (3, 2), 100)), (3, 2), {(0, 0): (100, 100, 100)}),
        (encoded(Image.new("1", (3, 2), 1)), (3, 2), {(0, 0): (255, 255, 255)}),
        (encoded(Image.new("I;16", (3, 2), 100 * 256)), (3, 2), {(0, 0): (100, 100, 100)}),
        (encoded(Image.new("I;16", (3, 2), 65535)), (3, 2), {(0, 0): (255, 255, 255)}),
        (encoded(Image.new("I;16B", (3, 2), 100 * 256), "TIFF"), (3, 2), {(0, 0): (100, 100, 100)}),
        (
            encoded(Image.new("CMYK", (16, 8), (0, 255, 255, 0)), "TIFF"),
            (16, 8),
            {(0, 0): (255, 0, 0)},
        ),
        (encoded(Image.new("RGB", (3, 2), RED), "GIF"), (3, 2), {(0, 0): RED}),
        (encoded(Image.new("RGB", (3, 2), RED), "BMP"), (3, 2), {(0, 0): RED}),
        (encoded(Image.new("RGB", (3, 2), RED), "WEBP", lossless=True), (3, 2), {(0, 0): RED}),
    ],
)
def test_decode(data, size, pixels):
    image = decode(data)
    assert (image.mode, image.size) == ("RGB", size)
    assert {place: image.getpixel(place) for place in pixels} == pixels
    assert decode(encode(image)).tobytes() == image.tobytes()
    assert encode(data) is data


def test_decode_jpegs():
    assert (
        decode(encoded(Image.new("CMYK", (16, 8), (0, 255, 255, 0)), "JPEG")).getpixel((3, 3))[0]
        > 250
    )
    image = Image.new("RGB", (32, 16), "black")
    image.paste("white", (0, 0, 8, 8))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees, clockwise
    upright = decode(encoded(image, "JPEG", exif=exif))
    assert upright.size == (16, 32)
    assert upright.getpixel((12, 3))[0] > 240 and upright.getpixel((3, 3))[0] < 15
    assert decode(encode(upright)).size == (16, 32)  # once


NOISE = Image.frombytes("RGB", (64, 48), random.Random(0).randbytes(9216))


def test_unreadable_images():
    jpeg, png, gif = encoded(NOISE, "JPEG"), encoded(NOISE), bytearray(encoded(NOISE, "GIF"))
    gif[6:10] = bytes(4)  # 0 x 0
    place = gif.index(b",\0\0\0\0")
    gif[place : place + 9] = b"," + bytes(8)
    # Pillow reads it; but it also reads PostScript, with an interpreter
    other = encoded(NOISE, "PCX")
    bomb = b"P6 100000 100000 255\n"
    for data in (
        b"",
        b"no image",
        bytes(1000),
        jpeg[:-100],
        png[:-100],
        jpeg[:30],
        png[:20],
        gif,
        other,
        bomb,
    ):
        with pytest.raises(ValueError, match=r"^unreadable image: ") as error:
            decode(bytes(data))
        assert len(str(error.value)) < 250 and " at 0x" not in str(error.value)
    with (
        pytest.raises(ValueError, match="10000x10000 pixels"),
        pytest.warns(Image.DecompressionBombWarning),
    ):
        decode(b"P6 10000 10000 255\n")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "TIFF", "BMP", "WEBP", "PPM"])
def test_broken_files_are_refused_or_read(format):
    rng, data = random.Random(0), encoded(NOISE, format)
    for _ in range(3000):
        broken = bytearray(data[: rng.randrange(1, len(data) + 1)])
        for _ in range(rng.randrange(8)):
            broken[rng.randrange(min(len(broken), rng.choice([40, 10**6])))] = rng.randrange(256)
        try:
            assert decode(bytes(broken)).mode == "RGB"
        except ValueError as error:
            assert str(error).startswith("unreadable image: ")


# ---------------------------------------------------------------- crops


def scene(width: int, height: int, kind: str = "image") -> dict:
    """Red grows to the right by one per percent, green downwards: a crop tells where it is from."""
    across, down = Image.new("L", (width, 1)), Image.new("L", (1, height))
    across.putdata([100 * x // width for x in range(width)])
    down.putdata([100 * y // height for y in range(height)])
    image = Image.merge(
        "RGB",
        [band.resize((width, height), Image.Resampling.NEAREST) for band in (across, down, down)],
    )
    return {"kind": kind, "frames": [encode(image)]}


def film(frames: int, width: int = 640, height: int = 360) -> dict:
    """Frame i, from 1, has red = 10 i."""
    images = [Image.new("RGB", (width, height), (10 * i, 0, 0)) for i in range(1, frames + 1)]
    return {"kind": "video", "frames": [encoded(image, compress_level=1) for image in images]}


def crop(box, media, target=1, **limits):
    context = {**LIMITS, "media": media, **limits}
    text, images, info = crop_image_normalized(box, target, context)
    assert len(images) == 1
    return text, images[0], info


def where(image: Image.Image) -> tuple:
    """Percent, of a `scene`: left, top, right, bottom."""
    return (
        *image.getpixel((0, 0))[:2],
        *(value + 1 for value in image.getpixel((image.width - 1, image.height - 1))[:2]),
    )


@pytest.mark.parametrize(
    "box, percent, size, shown",
    [
        # Pixel Reasoner took 1 for a pixel
        ([0.5, 0.5, 1, 1], (40, 40, 100, 100), (600, 480), "588x476"),
        ([0.5, 0.5, 1.0, 1.0], (40, 40, 100, 100), (600, 480), "588x476"),
        ([0, 0, 1, 1], (0, 0, 100, 100), (1000, 800), "980x784"),
        ([0.05, 0.1, 0.2, 0.3], (0, 0, 30, 40), (300, 320), "308x308"),
        ([0.4, 0.5, 0.6, 0.7], (30, 40, 70, 80), (400, 320), "392x308"),
        # pixels of the 980 x 784 that it saw
        ([490, 392, 980, 784], (40, 40, 100, 100), (600, 480), "588x476"),
        ([98, 392, 2000, 2000], (0, 40, 100, 100), (1000, 480), "1008x476"),
        # past the edge, and no pixel
        ([0.5, 0.5, 1.02, 1.0], (40, 40, 100, 100), (600, 480), "588x476"),
    ],
)
def test_crop(box, percent, size, shown):
    text, image, info = crop(box, [scene(1000, 800)])
    assert text == f"\nHere is the cropped image (Image Size: {shown}):"
    assert where(image) == percent and image.size == size
    assert (info["target"], info["frame"]) == (0, 1) and info["box"] == pytest.approx(
        [p / 100 for p in percent]
    )


def test_crops_have_the_resolution_of_the_original():
    _, image, _ = crop([0.5, 0.5, 1, 1], [scene(1500, 1200)], max_pixels=784 * 16)
    assert image.size == (900, 720)
    # it saw 112 x 84
    text, image, _ = crop([56, 56, 112, 84], [scene(1500, 1200)], max_pixels=784 * 16)
    assert where(image) == (40, 56, 100, 100) and text.endswith("(Image Size: 140x84):")


@pytest.mark.parametrize(
    "box, size, message",
    [
        ([0.5, 0.5, 0.55, 0.55], (100, 100), "Cropped image is too small: 25x25"),
        ([0.5, 0.5, 0.500001, 0.500001], (140, 140), "Cropped image is too small: 28x28"),
        ([0, 0, 1, 1], (1000, 28), "Cropped image is too small: 1000x28"),
    ],
)
def test_small_crops(box, size, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        crop(box, [scene(*size)])
    assert crop([0.5, 0.5, 0.500001, 0.500001], [scene(145, 145)])[1].size == (29, 29)


BAD_BOXES = """[] [0.1,0.2,0.3] [0.1,0.2,0.3,0.4,0.5] "[0.1,0.2,0.3,0.4]" null 0.5 {"x1":0.1}
[[0.1],0.2,0.3,0.4] [0.5,0.1,0.2,0.4] [0.1,0.4,0.3,0.2] [0.1,0.2,0.1,0.4] [0.1,0.2,0.3,0.2]
[-0.1,0.2,0.3,0.4] [0.1,-5,0.3,0.4] [0.1,0.2,"0.3",0.4] [0.1,0.2,null,0.4] [false,false,true,true]
[0.1,0.2,NaN,0.4] [0.1,0.2,0.3,Infinity] [0,0,1,1e999]"""


@pytest.mark.parametrize("box", [*map(json.loads, BAD_BOXES.split()), [0, 0, 1, 10**400]], ids=repr)
def test_bad_boxes(box):
    with pytest.raises(ValueError, match=r"^bbox_2d must be four numbers") as error:
        crop(box, [scene(100, 100)])
    assert len(str(error.value)) < 250


def test_pixels_of_a_later_frame_are_those_that_were_shown():
    """All frames of a video are shown at the size of the first."""
    frames = [scene(*size)["frames"][0] for size in ((1280, 720), (640, 480))]
    media = [{"kind": "video", "frame": None, "frames": frames}]
    shown = visual.displayed_size((1280, 720), "video", LIMITS)
    box = [0.5 * shown[0], 0.5 * shown[1], 0.9 * shown[0], 0.9 * shown[1]]
    _, (image,), info = crop_image_normalized(box, 2, {"media": media} | LIMITS)
    assert info["box"] == pytest.approx([0.4, 0.4, 1.0, 1.0], abs=0.02)
    assert image.size == (384, 288)


def test_a_box_outside():
    with pytest.raises(ValueError, match=r"lies outside the image, which is 980x784$"):
        crop([980, 10, 1100, 60], [scene(1000, 800)])


@pytest.mark.parametrize(
    "target, message",
    [
        (0, "must be within [1,2], got 0"),
        (-1, "must be within [1,2], got -1"),
        (3, "must be within [1,2], got 3"),
        (3.0, "must be within [1,2], got 3"),
        (10**400, "must be within [1,2], got 1000"),
        (1.5, "must be an integer, got 1.5"),
        (math.inf, "must be an integer, got inf"),
        (True, "must be an integer, got True"),
        ("1", "must be an integer, got '1'"),
        (None, "must be an integer, got None"),
        ([1], "must be an integer, got [1]"),
    ],
)
def test_bad_targets(target, message):
    with pytest.raises(ValueError) as error:
        crop([0, 0, 1, 1], [scene(100, 100), scene(100, 100)], target)
    assert str(error.value).startswith("target_image " + message) and len(str(error.value)) < 120


def test_crops_of_several_images_and_of_crops():
    media = [scene(200, 100), scene(300, 400)]
    for target, size in ((1, (200, 100)), (2, (300, 400)), (2.0, (300, 400))):
        assert crop([0, 0, 1, 1], media, target)[1].size == size
    _, image, _ = crop([0.6, 0.6, 1, 1], media, 2)
    media.append({"kind": "image", "frames": [encode(image)]})
    _, image, info = crop([0.5, 0.5, 1, 1], media, 3)
    # 40 % of the half to its lower right
    assert where(image) == (70, 70, 100, 100) and info["target"] == 2


def test_a_broken_image_is_told_to_the_policy():
    with pytest.raises(ValueError, match=r"^unreadable image: "):
        crop([0, 0, 1, 1], [{"kind": "image", "frames": [b"broken"]}])


# ---------------------------------------------------------------- frames


def test_frames_and_their_numbers():
    """The number that an observation prints is the target_image that the crop tool takes, and stays
    so."""
    media = [film(16)]
    context = {**LIMITS, "media": media}
    text, images, info = select_frames([3, 16, 3], context)
    # 22.9 x 12.9 cells
    assert text == "\nHere are the selected frames (Frame Size: 644x364, Numbered 17 to 19):"
    assert [decode(image).getpixel((0, 0))[0] for image in images] == [30, 160, 30]
    assert info == {"target": 0, "frames": [3, 16, 3]}
    assert images[0] is media[0]["frames"][2]
    for number in (1, 16):
        assert crop([0, 0, 1, 1], media, number)[1].getpixel((0, 0))[0] == 10 * number
    media += [{"kind": "image", "frames": [image]} for image in images]
    for number, red in ((1, 10), (16, 160), (17, 30), (18, 160), (19, 30)):
        _, image, info = crop([0, 0, 1, 1], media, number)
        assert image.getpixel((0, 0))[0] == red
        assert (info["target"], info["frame"]) == ((0, number) if number < 17 else (number - 16, 1))
    media.append({"kind": "image", "frames": [encode(image)]})
    assert "Numbered 21 to 21" in select_frames([1], context)[0]
    with pytest.raises(ValueError, match=r"within \[1,20\], got 21"):
        crop([0, 0, 1, 1], media, 21)


def test_frame_sizes():
    context = {**LIMITS, "media": [film(2, 1500, 1200)], "min_pixels": 401_408}
    # 1.8 million pixels into 313,600: 626 x 501, rounded down. A lower bound above that has no say.
    assert "Frame Size: 616x476" in select_frames([2], context)[0]
    _, image, _ = crop([308, 238, 616, 476], context["media"], 1, min_pixels=401_408)
    assert image.size == (900, 720)


@pytest.mark.parametrize(
    "frames, message",
    [
        ([], "target_frames must be a list of frame indices, got []"),
        (3, "target_frames must be a list of frame indices, got 3"),
        ("1,2", "target_frames must be a list of frame indices, got '1,2'"),
        (list(range(1, 10)), "You have selected 9 frames in total. Think again"),
        ([0], "a frame index must be within [1,16], got 0"),
        ([-1], "a frame index must be within [1,16], got -1"),
        ([1, 17], "a frame index must be within [1,16], got 17"),
        ([1.5], "a frame index must be an integer, got 1.5"),
        ([True], "a frame index must be an integer, got True"),
        (["1"], "a frame index must be an integer, got '1'"),
        ([[1]], "a frame index must be an integer, got [1]"),
    ],
)
def test_bad_frames(frames, message):
    with pytest.raises(ValueError) as error:
        select_frames(frames, {**LIMITS, "media": [film(16, 32, 32)]})
    assert str(error.value).startswith(message)


def test_frames_of_an_image():
    with pytest.raises(ValueError, match=r"There is no video .* crop_image_normalized"):
        select_frames([1], {**LIMITS, "media": [scene(100, 100)]})
    assert (
        len(select_frames([1] * 8, {**LIMITS, "media": [film(1, 32, 32)]})[1]) == visual.MAX_FRAMES
    )


def test_any_arguments():
    """Whatever a call's JSON holds: an observation or a ValueError."""
    rng = random.Random(0)
    values = [
        0,
        1,
        0.5,
        0.9,
        -1,
        2,
        3.0,
        1e300,
        10**400,
        math.inf,
        math.nan,
        True,
        None,
        "1",
        "",
        [],
        {},
        [[0.5]],
        {"a": 1},
    ]
    context = {**LIMITS, "media": [film(2, 64, 48), scene(80, 60)]}
    done = 0
    for _ in range(4000):
        box = rng.choice(
            [
                rng.choice(values),
                rng.choices(values, k=rng.randrange(7)),
                sorted(rng.random() for _ in "1234"),
            ]
        )
        target, frames = (
            rng.choice(values),
            rng.choice([rng.choice(values), rng.choices(values, k=rng.randrange(10))]),
        )
        for function, arguments in (
            (crop_image_normalized, (box, target)),
            (select_frames, (frames,)),
        ):
            with contextlib.suppress(ValueError):
                text, images, info = function(*arguments, context)
                assert (
                    text.startswith("\nHere ")
                    and 1 <= len(images) <= 8
                    and json.dumps(info, allow_nan=False)
                )
                done += 1
    assert done > 100


def test_a_broken_frame_is_told_to_the_policy(start):
    video = film(3, 64, 64)
    video["frames"][1] = b"broken"
    context, tools = {**LIMITS, "media": [video]}, start("visual")
    reply = answer(tools, Call("select_frames", {"target_frames": [1, 2]}), context)
    assert (
        reply.text.startswith("\nExecution error:\nunreadable image: ")
        and reply.error
        and reply.role == "user"
    )
    reply = answer(tools, Call("select_frames", {"target_frames": [1, 3]}), context)
    assert (
        reply.images == [video["frames"][0], video["frames"][2]] and "Numbered 4 to 5" in reply.text
    )

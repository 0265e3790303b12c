"""Rows whose chat template shows earlier turns differently later: each turn a sample of its own."""

import copy
import json

import pytest
import torch
from published import tokenizer_of
from vl import build_tokenizer as build_vl_tokenizer
from vl import picture, write_tiny_vl

from common.assets.build.tiny import build_tokenizer
from common.data.conversations import Conversations
from common.data.order import RowOrder
from common.data.render import end_turns_properly
from common.distributed import World
from common.pictures import PixelLimits
from common.vision import load_vision
from sft import episodes_of

NUMBER = {"type": "number", "description": "Any."}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER}}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 3}}}
XML_CALL = "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>"
THOUGHT = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"  # gpt-oss's
FINAL = "<|channel|>final<|message|>{}<|return|>"


def asked(text: str) -> dict:
    return {"role": "user", "content": text}


def said(thought: str, text: str, key: str = "reasoning_content") -> dict:
    """A turn with its thought, in a key of its own or in the `content`."""
    if key == "content":
        return {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{text}"}
    return {"role": "assistant", "content": text, key: thought}


def with_call(key: str) -> list[dict]:
    """Three turns: a call, what it is good for, and an answer to something else."""
    called = said("t1", "", key) | {"tool_calls": [CALL]}
    reply = {"role": "tool", "content": "7"}
    answers = [said("t2", "It is 7.", key), said("t3", "Yes.", key)]
    system = {"role": "system", "content": "Be brief."}
    return [system, asked("3+4?"), called, reply, answers[0], asked("sure?"), answers[1]]


def without_call(key: str) -> list[dict]:
    turns = [said(f"t{i}", f"a{i}", key) for i in (1, 2, 3)]
    return [asked("q1"), turns[0], asked("q2"), turns[1], asked("q3"), turns[2]]


def thinking(call: str, answer: str) -> list[str]:
    """The turns of `with_call`; call, answer: as the template writes them, with {} for its text."""
    return [call, answer.format("t2", "It is 7."), answer.format("t3", "Yes.")]


QWEN3 = "<think>\n{}\n</think>\n\n{}<|im_end|>"
QWEN3_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'
GPT_OSS_CALL = ' to=functions.add<|channel|>commentary json<|message|>{"a": 3}<|call|>'
GLM_CALL = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
GPT_OSS = THOUGHT + FINAL
OPENED = "{}\n</think>\n\n{}"  # behind a prompt that opens the thoughts
R1 = OPENED + "<｜end▁of▁sentence｜>"
# (template, key of the thoughts, messages, what the policy writes in each turn)
CASES = [
    ("qwen3", with_call, thinking(QWEN3.format("t1", QWEN3_CALL), QWEN3)),
    (
        "qwen3.5",
        with_call,
        thinking(f"t1\n</think>\n\n{XML_CALL}<|im_end|>", OPENED + "<|im_end|>"),
    ),
    (
        "nemotron-3-nano",
        with_call,
        thinking(f"t1\n</think>\n{XML_CALL}\n<|im_end|>", "{}\n</think>\n{}<|im_end|>"),
    ),
    ("gpt-oss", with_call, thinking(THOUGHT.format("t1") + GPT_OSS_CALL, GPT_OSS)),
    ("glm-4.6", with_call, thinking(f"\n<think>t1</think>\n{GLM_CALL}", "\n<think>{}</think>\n{}")),
    ("deepseek-r1", without_call, [R1.format(f"t{i}", f"a{i}") for i in (1, 2, 3)]),
]
# turns that the template's rendering of the chat does not show behind their prompt: R1's leaves out
# all thoughts, gpt-oss's those before a call once it is answered
BEHIND_ANOTHER_PROMPT = {"deepseek-r1": (0, 1, 2), "gpt-oss": (1,)}


def rows_of(tmp_path, tokenizer, *rows: dict, max_tokens: int = 9000, **options) -> Conversations:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Conversations(str(path), "--train-data", tokenizer, max_tokens=max_tokens, **options)


def row_of(messages: list[dict]) -> dict:
    row = {"messages": messages}
    if any("tool_calls" in message for message in messages):
        row["tools"] = TOOLS
    return row


def thinker(name: str):
    tokenizer = tokenizer_of(name)
    end_turns_properly(tokenizer, None)
    return tokenizer


def encoded(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name, chat, turns", CASES, ids=[name for name, *_ in CASES])
def test_a_turn_is_trained_behind_the_history_that_the_template_shows_then(
    tmp_path, capsys, name, chat, turns
):
    """Token by token, against apply_chat_template and texts written down by hand."""
    tokenizer = thinker(name)
    messages = chat("thinking" if name == "gpt-oss" else "reasoning_content")
    row = row_of(messages)
    data = rows_of(tmp_path, tokenizer, row)
    episodes = data.episodes(0)
    indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(episodes) == len(turns) == len(indices) == 3
    num_tokens = []
    for number, (episode, turn, i) in enumerate(zip(episodes, turns, indices)):
        options = {"tools": row.get("tools"), "tokenize": False}
        prompt = tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, **options)
        assert episode.prompt_ids == encoded(tokenizer, prompt)
        assert episode.response_ids == encoded(tokenizer, turn)
        assert episode.loss_mask == [1] * len(episode.response_ids)
        assert (episode.prompt_index, episode.sample_index) == (0, number)
        if number not in BEHIND_ANOTHER_PROMPT.get(name, ()):
            whole = tokenizer.apply_chat_template(messages[: i + 1], **options)
            assert whole.removesuffix("\n") == prompt + turn
        num_tokens.append(len(episode.prompt_ids) + len(episode.response_ids))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "turn by turn" in line]
    assert line == (
        "--train-data: 1 rows are trained turn by turn, as 3 samples: the chat template shows "
        f"their earlier turns differently later (docs/sft.md); {sum(num_tokens):,} tokens instead "
        f"of {num_tokens[-1]:,}"
    )
    assert tokenizer.decode(episodes[2].prompt_ids).count("t1") == 0, "thoughts are forgotten"


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "nemotron-3-nano", "deepseek-r1"])
def test_thoughts_may_stand_in_the_content(tmp_path, name):
    tokenizer = thinker(name)
    episodes = rows_of(tmp_path, tokenizer, row_of(without_call("content"))).episodes(0)
    texts = [tokenizer.decode(episode.response_ids) for episode in episodes]
    opening = "<think>\n" if name == "qwen3" else ""
    end = tokenizer.eos_token
    assert texts == [f"{opening}t{i}\n</think>\n\na{i}{end}" for i in (1, 2, 3)]


def test_a_template_that_opens_the_thoughts_itself(tmp_path):
    """Nemotron-Nano-v2's writes <think> before any content, and reads no reasoning_content."""
    tokenizer = thinker("nemotron-nano-v2")
    with pytest.raises(ValueError, match="begins a turn with <think> itself: leave it out of the"):
        rows_of(tmp_path, tokenizer, row_of(without_call("content")))
    messages = without_call("content")
    for message in messages[1::2]:
        message["content"] = message["content"].removeprefix("<think>\n")
    episodes = rows_of(tmp_path, tokenizer, row_of(messages)).episodes(0)
    expected = [f"t{i}\n</think>\n\na{i}\n<SPECIAL_12>" for i in (1, 2, 3)]
    assert [tokenizer.decode(episode.response_ids) for episode in episodes] == expected
    assert all(tokenizer.decode(e.prompt_ids).endswith("Assistant\n<think>\n") for e in episodes)


def test_turns_without_thoughts(tmp_path):
    """Each as its template shows it; R1's prompt has opened thoughts, so it needs some."""
    plain = [{key: m[key] for key in ("role", "content")} for m in without_call("name")]
    expected = {
        "qwen3": ("<|im_start|>assistant\n", "<think>\n\n</think>\n\na2<|im_end|>"),
        "nemotron-3-nano": ("<|im_start|>assistant\n<think>", "</think>a2<|im_end|>"),
        "gemma-4": ("<|turn>model\n<|channel>thought\n<channel|>", "a2<turn|>"),
    }
    for name, (header, turn) in expected.items():
        tokenizer = thinker(name)
        _, episode, _ = rows_of(tmp_path, tokenizer, row_of(plain)).episodes(0)
        assert tokenizer.decode(episode.prompt_ids).endswith(f"\n{header}"), name
        assert tokenizer.decode(episode.response_ids) == turn, name
    with pytest.raises(ValueError, match="line 1: a turn has no thoughts, and the chat template"):
        rows_of(tmp_path, thinker("deepseek-r1"), row_of(plain))
    thoughtful = [*plain[:5], said("t3", "a3")]
    for message in thoughtful[1:4:2]:
        message["train"] = False
    (episode,) = rows_of(tmp_path, thinker("deepseek-r1"), row_of(thoughtful)).episodes(0)
    assert sum(episode.loss_mask) == len(encoded(thinker("deepseek-r1"), R1.format("t3", "a3")))


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "gpt-oss", "glm-4.6"])
def test_a_turn_that_is_a_tools_call_is_shown_with_its_thoughts_until_the_answer(tmp_path, name):
    """So a call and what follows it stand in one sample, where the template shows them so."""
    tokenizer = thinker(name)
    messages = with_call("thinking" if name == "gpt-oss" else "reasoning_content")[:5]
    data = rows_of(tmp_path, tokenizer, row_of(messages))
    episodes = data.episodes(0)
    assert len(episodes) == (2 if name == "gpt-oss" else 1)
    ids = episodes[-1].prompt_ids + episodes[-1].response_ids
    assert "t1" in tokenizer.decode(ids) and "t2" in tokenizer.decode(ids)


def test_rows_that_are_not_rewritten_stay_one_sample(tmp_path, capsys):
    """Ids of the whole rendering, and a mask written down by hand."""
    plain = [{key: m[key] for key in ("role", "content")} for m in without_call("name")]
    tokenizer = thinker("gemma-3")
    (episode,) = rows_of(tmp_path, tokenizer, row_of(plain)).episodes(0)
    whole = tokenizer.apply_chat_template(plain, tokenize=False).removesuffix("\n")
    ids, mask = (
        encoded(tokenizer, "<start_of_turn>user\nq1<end_of_turn>\n<start_of_turn>model\n"),
        [],
    )
    first = len(ids)
    for i in (1, 2, 3):
        turn = encoded(tokenizer, f"a{i}<end_of_turn>")
        header = f"\n<start_of_turn>user\nq{i + 1}<end_of_turn>\n<start_of_turn>model\n"
        between = encoded(tokenizer, header) if i < 3 else []
        ids += turn + between
        mask += [1] * len(turn) + [0] * len(between)
    assert episode.prompt_ids + episode.response_ids == ids == encoded(tokenizer, whole)
    assert (len(episode.prompt_ids), episode.loss_mask) == (first, mask)
    assert (episode.prompt_index, episode.sample_index) == (0, 0)
    tokenizer = thinker("qwen3")
    for messages in (without_call("reasoning_content")[:2], with_call("reasoning_content")[:5]):
        assert len(rows_of(tmp_path, tokenizer, row_of(messages)).episodes(0)) == 1
    assert "turn by turn" not in capsys.readouterr().out


def test_only_turns_that_are_trained_on_are_samples(tmp_path):
    messages = without_call("reasoning_content")
    messages[1]["weight"] = 0
    messages[5]["train"] = False
    tokenizer = thinker("qwen3")
    (episode,) = rows_of(tmp_path, tokenizer, row_of(messages)).episodes(0)
    assert tokenizer.decode(episode.response_ids) == QWEN3.format("t2", "a2")
    assert episode.sample_index == 0 and "t1" not in tokenizer.decode(episode.prompt_ids)


def test_turns_beyond_the_cut_are_left_out(tmp_path, capsys):
    tokenizer = thinker("qwen3")
    row = row_of(without_call("reasoning_content"))
    whole = rows_of(tmp_path, tokenizer, row).episodes(0)
    lengths = [len(episode.prompt_ids) + len(episode.response_ids) for episode in whole]
    prompt_lengths = [len(episode.prompt_ids) for episode in whole]
    capsys.readouterr()
    # of the second sample one token fits, of the third none
    cut = prompt_lengths[1] + 1
    data = rows_of(tmp_path, tokenizer, row, max_tokens=cut)
    first, second = data.episodes(0)
    assert first == whole[0] and second.prompt_ids == whole[1].prompt_ids
    assert second.response_ids == whole[1].response_ids[:1]
    line = capsys.readouterr().out
    assert "as 2 samples: " in line and f"; {lengths[0] + cut} tokens instead of {cut}" in line
    (first,) = rows_of(tmp_path, tokenizer, row, max_tokens=prompt_lengths[1]).episodes(0)
    assert first == whole[0]
    too_short = prompt_lengths[0]
    with pytest.raises(ValueError, match=f"line 1: nothing to learn in its first {too_short} tok"):
        rows_of(tmp_path, tokenizer, row, max_tokens=too_short)


def test_bad_rows_are_dropped_whole(tmp_path, capsys):
    """A thought that no template shows in a single turn costs its row."""
    bad = without_call("reasoning_content")
    bad[3] = said("t2", "a2", key="thinking")
    rows = [row_of(bad), row_of(without_call("reasoning_content"))]
    tokenizer = thinker("qwen3")
    with pytest.raises(ValueError, match="line 1: the chat template leaves out thinking: write it"):
        rows_of(tmp_path, tokenizer, *rows)
    data = rows_of(tmp_path, tokenizer, *rows, bad_rows="drop")
    assert len(data) == 1 and len(data.episodes(0)) == 3
    assert "1 rows are trained turn by turn, as 3 samples" in capsys.readouterr().out


def test_half_a_character_in_a_thought_that_is_forgotten_is_told(tmp_path):
    messages = without_call("reasoning_content")
    messages[1]["reasoning_content"] = "t1 \ud83d"
    with pytest.raises(ValueError, match="line 1: cannot be rendered: 'utf-8' codec"):
        rows_of(tmp_path, thinker("qwen3"), row_of(messages))


def test_a_prompt_that_loses_a_question_is_told(tmp_path):
    tokenizer = thinker("qwen3")
    shown = '(message.role == "user")'
    assert shown in tokenizer.chat_template
    forgetful = tokenizer.chat_template.replace(shown, f"{shown[:-1]} and loop.index0 != 2)")
    tokenizer.chat_template = forgetful
    with pytest.raises(ValueError, match="leaves out a message of role 'user'"):
        rows_of(tmp_path, tokenizer, row_of(without_call("reasoning_content")))
    tokenizer = thinker("qwen3")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "messages[0].role == 'system'", "false"
    )
    system = {"role": "system", "content": "Be brief."}
    with pytest.raises(ValueError, match="leaves out a message of role 'system'"):
        rows_of(tmp_path, tokenizer, row_of([system, *without_call("reasoning_content")]))


def test_a_prompt_that_no_turn_continues_is_refused(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ add_generation_prompt }}" + tokenizer.chat_template
    plain = [asked("q"), {"role": "assistant", "content": "a"}]
    with pytest.raises(ValueError, match="line 1: the chat template shows a turn behind another p"):
        rows_of(tmp_path, tokenizer, row_of(plain))


def test_a_row_counts_once_however_many_samples_it_has(tmp_path):
    """For the loader, its position, the epoch and the split over ranks: 2 steps of 2 rows, the
    second one taken up again from the saved position."""
    tokenizer = thinker("qwen3")
    single = {"messages": without_call("reasoning_content")[:2]}
    rows = [row_of(without_call("reasoning_content")), single, single, row_of(with_call("content"))]
    data = rows_of(tmp_path, tokenizer, *rows)
    num_samples = [3, 1, 1, 3]
    assert data.costs[0] > 3 * data.costs[1], "ranks are balanced by all samples of a row"

    def step(loader: RowOrder) -> tuple[list[int], list]:
        taken = loader.next(2)
        episodes = []
        for rank in range(2):
            episodes += episodes_of(data, taken, World(rank, 2, rank, torch.device("cpu")))
        assert len(episodes) == sum(num_samples[row] for row in taken)
        assert sum(episode.sample_index == 0 for episode in episodes) == 2
        return taken, episodes

    loader = RowOrder(len(data), seed=0, fingerprint=data.fingerprint)
    step(loader)
    assert loader.epoch == 0.5
    state = copy.deepcopy(loader.state_dict())
    second = step(loader)
    resumed = RowOrder(len(data), seed=0, fingerprint=data.fingerprint)
    resumed.load_state_dict(state)
    assert step(resumed) == second and resumed.epoch == 1.0


def test_a_sample_has_the_pictures_of_its_history(tmp_path):
    limits = PixelLimits(784, 16 * 784, 4 * 784)
    vision = load_vision(str(write_tiny_vl(tmp_path / "model")), limits)
    tokenizer = build_vl_tokenizer()
    # it counts its messages, so that each turn shows another beginning
    tokenizer.chat_template = "{{ messages | length }}" + tokenizer.chat_template
    for name, width in (("1.png", 56), ("2.png", 84)):
        (tmp_path / name).write_bytes(picture(width, 56))
    messages = [asked("<image>one?"), {"role": "assistant", "content": "a"}]
    messages += [asked("<image>two?"), {"role": "assistant", "content": "b"}]
    row = {"messages": messages, "images": ["1.png", "2.png"]}
    data = rows_of(tmp_path, tokenizer, row, vision=vision, media_root=tmp_path)
    first, second = data.episodes(0)
    assert [len(episode.media) for episode in (first, second)] == [1, 2]
    for episode in (first, second):
        ids = vision.collapse(episode.prompt_ids + episode.response_ids, episode.media)
        num_before = 2 * len(episode.media) - 1
        text = tokenizer.decode(ids)
        assert text.startswith(f"{num_before}<|im_start|>") and text.count("<|image_pad|>") == len(
            episode.media
        )
        assert text.endswith("ab"[len(episode.media) - 1] + "<|im_end|>")

"""Supervised data: formats, masks token by token, pictures, bad rows, balance."""

import copy
import json
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import deadline, gathering
from published import tokenizer_of
from rows import write_pixel_reasoner
from tokenizers import Regex, pre_tokenizers
from vl import LLAMA2, TOOLS, ZEPHYR, build_sentencepiece, picture, write_tiny_vl
from vl import build_tokenizer as build_vl_tokenizer

from common.assets.build.tiny import build_tokenizer
from common.data.conversations import Conversations, conversation_episodes
from common.data.formats import is_silent, read_conversation, tool_call_message, unread_keys
from common.data.protocols import CALL_CLOSE, CALL_OPEN, Call, Hermes
from common.data.render import end_turns_properly
from common.data.rows import RowFiles
from common.distributed import World
from common.pictures import BadRow, PixelLimits
from common.types import Episode
from common.vision import load_vision
from sft import balanced

LIMITS = PixelLimits(784, 16 * 784, 4 * 784)


def episode_of(messages, tokenizer, max_tokens=10_000, index=0, **options):
    conversation = read_conversation({"messages": copy.deepcopy(messages)}, **options)
    (episode,) = conversation_episodes(conversation, [], tokenizer, None, index, max_tokens)
    return episode


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "3 4 = 7"},
    {"role": "assistant", "content": "<think>3+4=7</think><answer>3+4</answer>"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]


def pieces_of(messages):
    """(text, trained) written down by hand from the rule, not from the chat template."""
    pieces = []
    for message in messages:
        pieces.append((f"<|{message['role']}|>", 0))
        pieces.append((f"{message['content']}<|end|>", int(message["role"] == "assistant")))
    return pieces


def tokens_and_mask(pieces, tokenizer):
    ids, mask = [], []
    for text, trained in pieces:
        piece = tokenizer.encode(text, add_special_tokens=False)
        ids += piece
        mask += [trained] * len(piece)
    return ids, mask


@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("turns", [2, 3, 4])
def test_conversation_masks_token_by_token(tokenizer, system, turns):
    """With 3 turns the last is the user's: nobody answers it, so it is left out."""
    messages = [SYSTEM] * system + TURNS[:turns]
    episode = episode_of(messages, tokenizer, index=9)
    ids, mask = tokens_and_mask(
        pieces_of([SYSTEM] * system + TURNS[: turns - turns % 2]), tokenizer
    )
    first = mask.index(1)
    assert (episode.prompt_ids, episode.response_ids) == (ids[:first], ids[first:])
    assert episode.loss_mask == mask[first:]
    assert tokenizer.decode(episode.prompt_ids).endswith("<|assistant|>"), (
        "the header belongs to the prompt"
    )
    trained = [i for i, m in zip(episode.response_ids, episode.loss_mask) if m]
    assert tokenizer.decode(trained) == "".join(
        text for text, m in pieces_of(TURNS[: turns - turns % 2]) if m
    )
    assert trained.count(tokenizer.eos_token_id) == turns // 2, "one end token a turn, trained"
    assert len(episode.logprobs) == len(mask) - first and episode.prompt_index == 9


def test_conversation_is_cut_at_max_tokens(tokenizer):
    whole = episode_of(TURNS, tokenizer)
    prompt, length = len(whole.prompt_ids), len(whole.prompt_ids) + len(whole.response_ids)
    for max_tokens in (1, prompt - 1, prompt):
        with pytest.raises(BadRow, match=f"nothing to learn in its first {max_tokens} tokens"):
            episode_of(TURNS, tokenizer, max_tokens)
    for max_tokens in (prompt + 1, length - 1, length, length + 1):
        cut = episode_of(TURNS, tokenizer, max_tokens)
        assert (
            cut.prompt_ids + cut.response_ids
            == (whole.prompt_ids + whole.response_ids)[:max_tokens]
        )
        assert cut.loss_mask == whole.loss_mask[: len(cut.response_ids)]
        assert (
            len(cut.response_ids) == len(cut.logprobs) == max(0, min(max_tokens, length) - prompt)
        )


def test_what_a_template_adds_after_the_end_token_is_not_trained(tokenizer):
    chat_ml = copy.deepcopy(tokenizer)
    chat_ml.chat_template = tokenizer.chat_template.replace("<|end|>{%", "<|end|>\n{%")
    episode = episode_of(TURNS, chat_ml)
    pieces = [("<|user|>3 4 = 7<|end|>\n<|assistant|>", 0), (TURNS[1]["content"] + "<|end|>", 1)]
    pieces += [("\n<|user|>sure?<|end|>\n<|assistant|>", 0), ("yes<|end|>", 1)]
    ids, mask = tokens_and_mask(pieces, tokenizer)
    first = mask.index(1)
    assert (episode.prompt_ids, episode.response_ids, episode.loss_mask) == (
        ids[:first],
        ids[first:],
        mask[first:],
    )


def test_template_that_rewrites_earlier_turns_shows_each_behind_its_own_prompt(tokenizer):
    forgetful = copy.deepcopy(tokenizer)
    forgetful.chat_template = "{{ messages | length }}" + tokenizer.chat_template
    conversation = read_conversation({"messages": copy.deepcopy(TURNS)})
    episodes = conversation_episodes(conversation, [], forgetful, None, 9, 10_000)
    for episode, num_before in zip(episodes, (1, 3), strict=True):
        pieces = [(str(num_before), 0)]
        pieces += [(text, 0) for text, _ in pieces_of(TURNS[:num_before])]
        ids, _ = tokens_and_mask([*pieces, ("<|assistant|>", 0)], tokenizer)
        assert episode.prompt_ids == ids
        assert said(episode, tokenizer) == [TURNS[num_before]["content"] + "<|end|>"]
        assert 0 not in episode.loss_mask


def test_a_template_that_ends_a_whole_chat_with_one_more_end_token(tokenizer):
    """As Phi-3's and Phi-4-mini's: what ends a turn ends it once, and several turns are no other
    chat."""
    phi = copy.deepcopy(tokenizer)
    phi.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>\n' }}{% "
        "endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}"
    )
    # Phi-3's is another one, before it ends turns properly
    for end_token in (phi.pad_token, "<|end|>"):
        phi.eos_token = end_token
        end_turns_properly(phi, None)
        assert said(episode_of(TURNS[:2], phi), phi) == [TURNS[1]["content"] + "<|end|>"]
        assert said(episode_of(TURNS, phi), phi) == [TURNS[1]["content"] + "<|end|>", "yes<|end|>"]


def test_a_tokenizer_may_have_several_templates(tokenizer):
    several = copy.deepcopy(tokenizer)
    several.chat_template = {
        "default": tokenizer.chat_template,
        "tool_use": tokenizer.chat_template,
    }
    end_turns_properly(several, None)
    assert said(episode_of(TURNS, several), several) == [
        TURNS[1]["content"] + "<|end|>",
        "yes<|end|>",
    ]


def test_a_template_that_ends_no_turn_is_told(tokenizer, capsys):
    end_turns_properly(tokenizer_of("glm-4.6"), None)
    told = capsys.readouterr().out
    assert "the chat template puts no" in told and "none is trained" in told
    end_turns_properly(tokenizer, None)
    assert capsys.readouterr().out == ""


def rows_of(tmp_path, tokenizer, *rows: list[dict]) -> Conversations:
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"messages": messages}) + "\n" for messages in rows)
    )
    return Conversations(str(tmp_path / "rows.jsonl"), "--train-data", tokenizer, max_tokens=9000)


def test_rows_whose_template_rewrites_earlier_turns_are_told_at_the_start(tmp_path, capsys):
    """Mistral-Nemo's moves the system's message into the last turn of the user."""
    nemo = tokenizer_of("mistral-nemo")
    messages = [{"role": "system", "content": "s"}, *alternating("q", "a", "q2", "a2")]
    data = rows_of(tmp_path, nemo, messages)
    assert "1 rows are trained turn by turn, as 2 samples" in capsys.readouterr().out
    prompts = [nemo.decode(episode.prompt_ids) for episode in data.episodes(0)]
    assert prompts == ["[INST]s\n\nq[/INST]", "[INST]q[/INST]a</s>[INST]s\n\nq2[/INST]"]
    assert [said(episode, nemo) for episode in data.episodes(0)] == [["a</s>"], ["a2</s>"]]
    data = rows_of(tmp_path, nemo, messages[1:3], messages[1:])
    assert len(data) == 2 and all(data.episodes(i) for i in range(2))


def test_a_template_may_set_thoughts_apart(tmp_path):
    """GLM's and Qwen3's write white space between them and the answer: no message is left out."""
    data = rows_of(tmp_path, tokenizer_of("glm-4.6"), alternating("1+1?", "<think>a</think>2"))
    assert len(data) == 1 and data.episodes(0)


def test_empty_keys_of_a_message_are_none():
    """As a server's replies have them: templates ask whether they are defined."""
    reply = {"role": "assistant", "content": "b", "tool_calls": [], "reasoning_content": ""}
    row = {"messages": [{"role": "user", "content": "Hi"}, reply]}
    assert read_conversation(row).messages[1] == {"role": "assistant", "content": "b"}


def test_thoughts_in_a_key_of_their_own_are_trained_or_told(tmp_path, tokenizer):
    asked, thought = alternating("1+1?", "2")
    rows = [asked, thought | {"reasoning_content": "a sum"}]
    glm = tokenizer_of("glm-4.6")
    assert "a sum" in "".join(said(rows_of(tmp_path, glm, rows).episodes(0)[0], glm))
    with pytest.raises(ValueError, match="leaves out reasoning_content: write it as <think>"):
        rows_of(tmp_path, tokenizer, rows)


@pytest.mark.parametrize(
    "thought",
    [{"content": "2", "reasoning_content": "a sum"}, {"content": "<think>a sum</think>2"}],
)
def test_thoughts_before_a_last_message_of_the_user_are_trained(tmp_path, thought):
    """GLM's template drops those of turns before it, and it is not trained on."""
    asked, again = alternating("1+1?", "2", "sure?")[::2]
    glm = tokenizer_of("glm-4.6")
    data = rows_of(tmp_path, glm, [asked, {"role": "assistant", **thought}, again])
    assert "a sum" in "".join(said(data.episodes(0)[0], glm))


@pytest.mark.parametrize(
    "column, role, text", [("messages", "role", "content"), ("conversations", "from", "value")]
)
def test_a_turn_without_loss_is_not_trained_on(tmp_path, tokenizer, column, role, text):
    """AgentInstruct's, Agent-FLAN's and xtuner's way; through Arrow the others' is null."""
    turns = [
        ("user", "q", None),
        ("assistant", "a", False),
        ("user", "q", None),
        ("assistant", "b", True),
    ]
    turns += [("user", "q", None), ("assistant", "c", None)]
    messages = [{role: who, text: said, "loss": loss} for who, said, loss in turns]
    chat = read_conversation({column: messages})
    assert chat.train == [False, False, False, True, False, True]
    assert not any("loss" in message for message in chat.messages if message["role"] == "assistant")
    pq.write_table(pa.Table.from_pylist([{column: messages}]), tmp_path / "rows.parquet")
    data = Conversations(str(tmp_path / "rows.parquet"), "--train-data", tokenizer, max_tokens=99)
    assert said(data.episodes(0)[0], tokenizer) == ["b<|end|>", "c<|end|>"]


def test_unread_keys_are_those_of_the_messages_that_are_read():
    """A question without an answer is no conversation: the prompt is."""
    prompt = [{"role": "user", "content": "q", "mask": 1}]
    row = {"question": "q", "answer": None, "prompt": prompt, "extra_info": {"answer": "a"}}
    assert unread_keys(row) == ["mask"]
    assert unread_keys({"question": "q", "answer": "a", "prompt": prompt}) == []


def test_keys_of_messages_that_nobody_reads_are_named(tmp_path, tokenizer, capsys):
    rows = [
        [
            {"role": "user", "content": "q", "id": 7, "note": ""},
            {"role": "assistant", "content": "a"},
        ]
    ] * 2
    rows.append(
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "mask": False}]
    )
    rows.append(
        [{"role": "user", "content": "q"}]
        + [{"role": "assistant", "content": "a", f"k{i}": 1} for i in range(20)]
    )
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"messages": row}) + "\n" for row in rows)
    )
    Conversations(str(tmp_path / "rows.jsonl"), "--train-data", tokenizer, max_tokens=999)
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "--train-data: 2 rows have messages with the key 'id', which is not read"
    assert "--train-data: 1 rows have messages with the key 'mask', which is not read" in told
    keys = [line.split("'")[1] for line in told[1:-1]]
    assert keys == ["mask", *(f"k{i}" for i in range(len(keys) - 1))]
    assert len(told) == 11
    assert told[-1] == "--train-data: 1 rows have messages with further keys that are not read"


def test_a_turn_of_weight_0_is_not_trained_on(tokenizer):
    """As in OpenAI's files."""
    first, draft, again, right = alternating("1+1?", "3", "sure?", "2")
    chat = read_conversation(
        {"messages": [first, draft | {"weight": 0}, again, right | {"weight": 1}]}
    )
    assert chat.train == [False, False, False, True] and not any(
        "weight" in message for message in chat.messages
    )


def test_turns_without_a_text_are_told(tmp_path, tokenizer, capsys):
    """Unless they are not trained on, or are thoughts."""
    rows = [alternating("1+1?", " "), alternating("1+1?", "", "sure?", "2"), alternating("q", "a")]
    rows.append([*alternating("q"), {"role": "assistant", "content": "", "train": False}])
    rows[-1] += alternating("sure?", "2")
    rows.append(alternating("q", "a", "", "b"))
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"messages": row}) + "\n" for row in rows)
    )
    Conversations(str(tmp_path / "rows.jsonl"), "--train-data", tokenizer, max_tokens=99)
    told = "2 rows teach to say nothing: a turn that is trained on has no text"
    assert capsys.readouterr().out == f"--train-data: {told}\n"
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    assert is_silent({"role": "assistant", "content": ""})
    assert not is_silent({"role": "assistant", "content": "", "tool_calls": calls})
    assert not is_silent({"role": "assistant", "content": "", "reasoning_content": "2"})


def test_marks_without_pictures_are_told(tmp_path, tokenizer, capsys):
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"messages": alternating("<image>What?", "7"), "img": ["1.png"]})
    )
    Conversations(str(tmp_path / "rows.jsonl"), "--train-data", tokenizer, max_tokens=99)
    expected = "have <image> or <video>, and no column images, image or videos: read as text"
    assert capsys.readouterr().out == f"--train-data: 1 rows {expected}\n"


BOX = {"ref": ["dog"], "bbox": [[1, 2, 3, 4]]}
FOREIGN = [("<bbox>", "objects", BOX), ("<ref-object>", "objects", BOX)]
FOREIGN += [("<audio>", "audios", ["a.wav"]), ("<audio>", "audio", {"path": "a.wav"})]


@pytest.mark.parametrize("mark, column, held", FOREIGN)
def test_marks_that_another_systems_columns_explain_are_refused(
    tmp_path, tokenizer, mark, column, held
):
    """In a question or an answer; by itself such a mark is text."""
    path = tmp_path / "rows.jsonl"
    for messages in (alternating(f"What is {mark}?", "a dog"), alternating("Where?", f"at {mark}")):
        path.write_text(json.dumps({"messages": messages, column: held}))
        with pytest.raises(
            ValueError,
            match=f"line 1: {mark} stands for what the column {column} holds, which is not",
        ):
            Conversations(str(path), "--train-data", tokenizer, max_tokens=99)
        path.write_text(
            json.dumps(
                {"messages": messages, column: dict.fromkeys(held) if column == "objects" else None}
            )
        )
        assert len(Conversations(str(path), "--train-data", tokenizer, max_tokens=99)) == 1


def test_a_greeting_by_the_assistant_is_read_and_not_trained_on(tmp_path, tokenizer):
    messages = [{"role": "assistant", "content": "hello"}, *alternating("q", "a")]
    assert said(rows_of(tmp_path, tokenizer, messages).episodes(0)[0], tokenizer) == ["a<|end|>"]


def test_a_row_at_which_the_tokenizer_panics_costs_itself(tmp_path, tokenizer):
    """As published ones do at ten million blanks in a row; here at forty: its pattern has more ways
    to fail."""
    fragile = copy.deepcopy(tokenizer)
    fragile.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"( | )+!"), "isolated")
    (tmp_path / "rows.jsonl").write_text(
        "".join(
            json.dumps({"messages": alternating(text, "2")}) + "\n"
            for text in ("1+1?", " " * 40, "2")
        )
    )
    read = partial(
        Conversations, str(tmp_path / "rows.jsonl"), "--train-data", fragile, max_tokens=30
    )
    with pytest.raises(ValueError, match="line 2: the tokenizer breaks down at its text: Onig"):
        read()
    assert len(read(bad_rows="drop")) == 2
    wide = Conversations(str(tmp_path / "rows.jsonl"), "--train-data", fragile, max_tokens=900)
    assert len(wide) == 3 and wide.episodes(1) == [] and wide.episodes(2), (
        "found when it is used, it is left out"
    )


def test_a_chat_of_thousands_of_turns_is_read_up_to_the_cut_or_refused(tmp_path, tokenizer):
    """A template is asked anew for the text up to each turn, so that all of them would take their
    square."""
    chat = alternating(*["hi", "ho"] * 4000)
    with deadline(20):
        data = rows_of_length(tmp_path, tokenizer, chat, max_tokens=300)
        episode = data.episodes(0)[0]
        ids = episode.prompt_ids + episode.response_ids
        whole = tokenizer.apply_chat_template(chat[:200], return_dict=False)
        assert ids == whole[: len(ids)] and 290 < len(ids) <= 300 and sum(episode.loss_mask) > 50
        with pytest.raises(
            ValueError,
            match="line 1: more than 500 turns of the assistant: split it, or lower --max",
        ):
            rows_of_length(tmp_path, tokenizer, chat, max_tokens=100_000)


def rows_of_length(tmp_path, tokenizer, messages, max_tokens) -> Conversations:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages}))
    return Conversations(
        str(tmp_path / "rows.jsonl"), "--train-data", tokenizer, max_tokens=max_tokens
    )


@pytest.mark.parametrize("template", [LLAMA2, ZEPHYR, TOOLS], ids=["Llama-2", "Zephyr", "ChatML"])
@pytest.mark.parametrize("prefix", ["legacy", "first", "always"])
def test_ids_are_those_of_the_whole_text_where_a_tokenizer_puts_a_space_before_it(prefix, template):
    """By themselves pieces would begin with it: Llama-2, Mistral-7B, TinyLlama."""
    llama = build_sentencepiece(prefix, template)
    chat = alternating("Hi, is\n1 + 1 two?", "\u00e9 Hi is two", "is it?", "two")
    episode = episode_of(chat, llama)
    whole = llama.apply_chat_template(chat, tokenize=False)
    whole = whole[: whole.rindex("</s>") + 4]
    ids = llama.encode(whole, add_special_tokens=False)
    assert episode.prompt_ids + episode.response_ids == ids
    assert episode.prompt_ids == llama.apply_chat_template(
        chat[:1], add_generation_prompt=True, return_dict=False
    )
    end = " </s>" if template == LLAMA2 else "</s>"
    assert [text.strip() for text in said(episode, llama)] == [
        "\u00e9 Hi is two" + end,
        "two" + end,
    ]


def test_a_token_that_header_and_answer_share_is_trained(tokenizer):
    """Where a header ends in a space, the first word would else never be learned."""
    llama = build_sentencepiece("legacy", TOOLS.replace("|>\n", "|>: "))
    assert [text.strip() for text in said(episode_of(alternating("Hi", "two"), llama), llama)] == [
        "two</s>"
    ]


def test_a_tokenizer_without_offsets_masks_as_one_with_them(tokenizer, monkeypatch):
    fast = episode_of(TURNS, tokenizer)
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    assert episode_of(TURNS, tokenizer) == fast


# --- which turns are trained on -------------------------------------------------------------------


def said(episode, tokenizer) -> list[str]:
    """The pieces that are trained on."""
    ids = [i if m else -1 for i, m in zip(episode.response_ids, episode.loss_mask)]
    pieces, current = [], []
    for i in [*ids, -1]:
        if i >= 0:
            current.append(i)
        elif current:
            pieces.append(tokenizer.decode(current))
            current = []
    return pieces


def alternating(*contents: str) -> list[dict]:
    return [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)
    ]


def released(messages: list[dict]) -> dict:
    """A row of Pixel Reasoner's form."""
    items = [message | {"content": [{"text": message["content"]}]} for message in messages]
    return {"message_list": items}


CALLS = alternating("q", "call 1", "no", "call 2", "Here is", "answer")


@pytest.mark.parametrize(
    "said_of_1, of_messages, of_the_release",
    [
        ({}, [1, 3, 5], [3, 5]),
        ({"train": True}, [1, 3, 5], [1, 3, 5]),
        ({"loss": "true"}, [1, 3, 5], [1, 3, 5]),
        ({"train": None}, [1, 3, 5], [3, 5]),
        ({"train": True, "loss": False}, [3, 5], [3, 5]),
        ({"train": True, "weight": 0}, [3, 5], [3, 5]),
    ],
)
def test_a_message_overrules_what_its_format_trains_on(said_of_1, of_messages, of_the_release):
    """Of Pixel Reasoner's rows the last two turns; of all others, and of what asks for it, each."""
    messages = copy.deepcopy(CALLS)
    messages[1] |= said_of_1
    messages[2] |= {"train": True}  # a user's is never trained on
    for record, expected in (
        ({"messages": messages}, of_messages),
        (released(messages), of_the_release),
    ):
        conversation = read_conversation(copy.deepcopy(record))
        assert [i for i, trained in enumerate(conversation.train) if trained] == expected
        assert not any(
            {"train", "loss", "weight"} & message.keys() for message in conversation.messages
        )


@pytest.mark.parametrize("turns,expected", [(1, ["1"]), (2, ["1", "2"]), (4, ["3", "4"])])
def test_last_two_turns_of_one_two_and_four(tokenizer, turns, expected):
    messages = [{"role": "system", "content": "s"}]
    for turn in range(turns):
        messages += [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": str(turn + 1)},
        ]
    (episode,) = conversation_episodes(
        read_conversation(released(messages)), [], tokenizer, None, 0, 10_000
    )
    assert said(episode, tokenizer) == [text + "<|end|>" for text in expected]


def test_a_message_may_ask_not_to_be_trained_on(tokenizer):
    messages = alternating("q", "wrong", "no", "right")
    for no in (False, 0, "false"):
        messages[1]["train"] = no
        messages[3]["train"] = True
        assert said(episode_of(messages, tokenizer), tokenizer) == ["right<|end|>"]
    messages[3]["train"] = False
    with pytest.raises(BadRow, match="nothing to learn"):
        episode_of(messages, tokenizer)


@pytest.mark.parametrize("role", ["user", "tool", "observation"])
def test_control_tokens_spelled_by_a_user_or_a_tool_are_text(tmp_path, tokenizer, capsys, role):
    turns = [{"role": role, "content": "3 4 = 7<|end|><|assistant|>no"}, TURNS[1]]
    if role != "user":
        turns = [*TURNS[:2], *turns]
    taught = [TURNS[0], {"role": "assistant", "content": "a<|system|>b"}]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"messages": m}) + "\n" for m in (turns, taught))
    )
    data = Conversations(str(tmp_path / "a.jsonl"), "--train-data", tokenizer, max_tokens=200)
    told = "1 rows spell control tokens in a message: read as text (<|end|> as < |end|>)"
    assert capsys.readouterr().out == f"--train-data: {told}\n"
    episode = data.episodes(0)[0]
    text = tokenizer.decode(episode.prompt_ids + episode.response_ids)
    assert f"<|{role}|>3 4 = 7< |end|>< |assistant|>no<|end|><|assistant|>" in text
    assert said(data.episodes(1)[0], tokenizer) == ["a<|system|>b<|end|>"], (
        "what is taught may be a token"
    )


# --- formats --------------------------------------------------------------------------------------


ANSWER = alternating("q", "a")
TEXT_ROWS = {
    "messages": {"messages": ANSWER},
    "question and answer": {"question": "q", "answer": "a"},
    "prompt and a solution": {
        "prompt": ANSWER[:1],
        "reward_model": {"ground_truth": "1"},
        "extra_info": {"answer": "a", "index": 0},
    },
    "message_list": {
        "message_list": [{"role": m["role"], "content": [{"text": m["content"]}]} for m in ANSWER]
    },
    "message_list with nulls": {
        "message_list": [
            {"role": m["role"], "content": [{"text": m["content"], "image": None, "video": None}]}
            for m in ANSWER
        ]
    },
    "conversations": {"conversations": ANSWER},
    "conversations as from and value": {
        "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    },
}


@pytest.mark.parametrize("name", TEXT_ROWS)
def test_formats_are_recognised_by_their_columns(tokenizer, name):
    assert read_conversation(TEXT_ROWS[name]).messages == ANSWER


def test_a_solution_goes_on_with_what_the_prompt_has_begun():
    """As the policy does, when the same row is a prompt."""
    begun = alternating("q", "Well, ")
    messages = read_conversation({"prompt": begun, "extra_info": {"answer": "a"}}).messages
    assert messages == alternating("q", "Well, a")


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    return load_vision(str(write_tiny_vl(tmp_path_factory.mktemp("tiny-vl"))), LIMITS)


def test_pixel_reasoner_with_pictures_between_turns(tmp_path, vision, capsys):
    """Ids, mask and pictures of both rows, written down by hand."""
    tokenizer = build_vl_tokenizer()
    options = {"max_tokens": 1000, "vision": vision, "media_root": tmp_path}
    data = Conversations(write_pixel_reasoner(tmp_path), "--train-data", tokenizer, **options)
    (told,) = capsys.readouterr().out.splitlines()
    assert "2 rows are Pixel Reasoner's" in told
    mark = "<|vision_start|><|{}_pad|><|vision_end|>".format

    def turn(role, text):
        return f"<|im_start|>{role}\n{text}<|im_end|>\n"

    corrected = [
        (
            turn("system", "sys")
            + turn("user", "what?" + mark("image"))
            + "<|im_start|>assistant\n",
            0,
        ),
        ("wrong crop<|im_end|>", 0),
        ("\n" + turn("user", "\nHere is" + mark("image")) + "<|im_start|>assistant\n", 0),
        ("right crop<|im_end|>", 1),
        ("\n" + turn("user", "\nHere is" + mark("image")) + "<|im_start|>assistant\n", 0),
        ("\\boxed{3}<|im_end|>", 1),
    ]
    clip = [
        (
            turn("system", "sys")
            + turn("user", "when?" + mark("video"))
            + "<|im_start|>assistant\n",
            0,
        ),
        ("select<|im_end|>", 1),
        ("\n" + turn("user", "\nHere are" + mark("image")) + "<|im_start|>assistant\n", 0),
        ("then<|im_end|>", 1),
    ]
    for number, (pieces, kinds) in enumerate(
        ((corrected, ["image"] * 3), (clip, ["video", "image"]))
    ):
        episode = data.episodes(number)[0]
        assert [m.kind for m in episode.media] == kinds
        ids, mask, rest = [], [], iter(episode.media)
        for text, trained in pieces:
            piece = tokenizer.encode(text, add_special_tokens=False)
            count = text.count("_pad|>")
            piece = vision.expand(piece, [next(rest) for _ in range(count)])
            ids += piece
            mask += [trained] * len(piece)
        first = mask.index(1)
        assert (episode.prompt_ids, episode.response_ids) == (ids[:first], ids[first:])
        assert episode.loss_mask == mask[first:]
    assert (
        data.episodes(1)[0].media[0].pixels.shape[0] == 3
        and data.episodes(1)[0].media[0].num_tokens <= 2 * 4
    ), "frames are capped"


def test_a_row_is_cut_before_a_picture_that_does_not_fit(tmp_path, vision):
    tokenizer = build_vl_tokenizer()
    options = {
        "max_tokens": 1000,
        "vision": vision,
        "media_root": tmp_path,
    }
    file = write_pixel_reasoner(tmp_path)
    rows = json.loads(Path(file).read_text())
    for message in rows[0]["message_list"]:
        message["train"] = True  # of the assistant's, the first one, too
    Path(file).write_text(json.dumps(rows))
    whole = Conversations(file, "--train-data", tokenizer, **options).episodes(0)[0]
    ids = whole.prompt_ids + whole.response_ids
    spans = vision.spans(ids, whole.media)
    for length in range(spans[1].start - 3, len(ids) + 2):
        options["max_tokens"] = length
        cut = Conversations(file, "--train-data", tokenizer, **options).episodes(0)[0]
        kept = cut.prompt_ids + cut.response_ids
        assert kept == ids[: len(kept)] and len(kept) <= length
        inside = [span.start for span in spans if span.start < length < span.stop]
        assert len(kept) == (inside[0] if inside else min(length, len(ids)))
        assert vision.collapse(kept, cut.media).count(vision.placeholders["image"]) == len(
            cut.media
        )


def test_a_row_is_cut_before_the_timestamps_of_a_video_that_does_not_fit(tmp_path):
    vision = load_vision(str(write_tiny_vl(tmp_path / "model", kind="qwen3_vl")), LIMITS)
    frames = []
    for i in range(5):
        frames.append(f"{i}.png")
        (tmp_path / f"{i}.png").write_bytes(picture(60, 60, i))
    row = {"messages": alternating("q", "a", "see <video>?", "b"), "videos": [frames]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    tokenizer = vision.processor.tokenizer

    def episode(max_tokens: int) -> Episode:
        options = {"max_tokens": max_tokens, "vision": vision, "media_root": tmp_path}
        return Conversations(tmp_path / "rows.jsonl", "--data", tokenizer, **options).episodes(0)[0]

    whole = episode(1000)
    ids = whole.prompt_ids + whole.response_ids
    (span,) = vision.spans(ids, whole.media)
    assert ids[span.start : span.stop] == vision.expansion(whole.media[0])
    trained = [token for token, m in zip(whole.response_ids, whole.loss_mask) if m]
    assert tokenizer.decode(trained) == "a<|im_end|>b<|im_end|>", "and no timestamp"
    for length in (span.start + 1, span.stop - 1):
        cut = episode(length)
        assert (cut.prompt_ids + cut.response_ids, cut.media) == (ids[: span.start], [])
    assert len(episode(span.stop).media) == 1


def test_marks_and_images_of_pyvision_and_chat_rows(tmp_path, vision):
    tokenizer = build_vl_tokenizer()
    (tmp_path / "a.png").write_bytes(picture(60, 60))
    turns = alternating(
        "<image_clue_0><image></image_clue_0>?", "<code>", "<interpreter><image></interpreter>", "b"
    )
    rows = [
        {"conversations": turns, "images": ["a.png", "a.png"]},
        {"messages": turns, "images": ["a.png", "a.png"]},
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    data = Conversations(
        str(tmp_path / "rows.json"),
        "--t",
        tokenizer,
        max_tokens=900,
        vision=vision,
        media_root=tmp_path,
    )
    for n in (0, 1):
        episode = data.episodes(n)[0]
        assert len(episode.media) == 2 and said(episode, tokenizer) == [
            "<code><|im_end|>",
            "b<|im_end|>",
        ]


def test_a_picture_that_the_assistant_shows_is_not_trained(tmp_path, vision):
    tokenizer = build_vl_tokenizer()
    (tmp_path / "a.png").write_bytes(picture(60, 60))
    row = {"messages": alternating("draw", "here <image> it is"), "images": ["a.png"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    options = {"max_tokens": 900, "vision": vision, "media_root": tmp_path}
    episode = Conversations(str(tmp_path / "rows.jsonl"), "--t", tokenizer, **options).episodes(0)[
        0
    ]
    assert len(episode.media) == 1 and said(episode, tokenizer) == ["here ", " it is<|im_end|>"]


def test_pictures_for_a_model_that_reads_text_alone_are_a_bad_row(tmp_path):
    (tmp_path / "a.png").write_bytes(picture(60, 60))
    row = {"messages": alternating("<image>?", "a"), "images": ["a.png"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match="line 1: has pictures, and the model reads text alone"):
        Conversations(
            str(tmp_path / "rows.jsonl"),
            "--t",
            build_vl_tokenizer(),
            max_tokens=900,
            media_root=tmp_path,
        )


def test_tools_of_a_row_are_offered_in_its_system_message():
    schema = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    for tools in ([schema], json.dumps([schema])):
        messages = read_conversation({"messages": ANSWER, "tools": tools}).messages
        assert messages[0]["role"] == "system" and json.dumps(schema) in messages[0]["content"]


def test_sharegpt_with_system_and_observation(tokenizer):
    call = {"name": "add", "arguments": {"a": 1, "text": "é"}}
    row = {"system": "S", "conversations": [{"from": "human", "value": "q"}]}
    row["conversations"] += [{"from": "function_call", "value": json.dumps(call)}]
    row["conversations"] += [{"from": "observation", "value": "R"}, {"from": "gpt", "value": "a"}]
    conversation = read_conversation(row)
    assert [m["role"] for m in conversation.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    system, question, said, *others = (m["content"] for m in conversation.messages)
    assert (system, question, *others) == ("S", "q", "R", "a")
    assert said == f"{CALL_OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CALL_CLOSE}", (
        "what a policy has to say"
    )
    assert Hermes.find_call(said) == Call("add", call["arguments"])
    assert conversation.train == [False, False, True, False, True]
    row["conversations"][1]["value"] = json.dumps([call, call])
    assert read_conversation(row).messages[2]["content"] == f"{said}\n{said}"
    row["conversations"][1]["value"] = said
    assert read_conversation(row).messages[2]["content"] == said
    row["conversations"].insert(0, {"from": "system", "value": "its own"})
    assert [m["content"] for m in read_conversation(row).messages[:2]] == ["its own", "q"]


def test_tools_as_llama_factory_has_them(tmp_path, tokenizer):
    bare = {"name": "add", "description": "Adds.", "parameters": {}}
    for tools in (json.dumps([bare]), [bare]):
        system = read_conversation({"messages": ANSWER, "tools": tools}).messages[0]["content"]
        assert json.dumps({"type": "function", "function": bare}) in system
    assert read_conversation({"messages": ANSWER, "tools": ""}).messages == ANSWER
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": ANSWER, "tools": "no json"}))
    with pytest.raises(ValueError, match="line 1: tools: 'no json' is no JSON"):
        Conversations(str(tmp_path / "rows.jsonl"), "--train-data", tokenizer, max_tokens=100)


def test_nulls_that_arrow_adds_reach_neither_tools_nor_calls(tmp_path):
    def tool(name: str, parameter: str) -> dict:
        parameters = {"type": "object", "properties": {parameter: {"type": "string"}}}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    def call(name: str, **arguments) -> dict:
        return {"type": "function", "function": {"name": name, "arguments": arguments}}

    calls = [call("add", a="1"), call("say", text="x")]
    messages = [*ANSWER[:1], {"role": "assistant", "content": "", "tool_calls": calls}]
    row = {"messages": messages, "tools": [tool("add", "a"), tool("say", "text")]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    (record,) = RowFiles(str(tmp_path / "rows.parquet"), "--train-data").records()
    system, _, said = read_conversation(record).messages
    assert "null" not in system["content"] and json.dumps(tool("say", "text")) in system["content"]
    assert said["tool_calls"] == calls
    calls[0]["function"]["arguments"] = '{"a": "1"}'  # as OpenAI has them
    assert read_conversation(row).messages[2]["tool_calls"][0] == call("add", a="1")
    calls[0]["function"]["arguments"] = "a=1"
    with pytest.raises(BadRow, match="arguments of tool_calls: 'a=1' is no JSON"):
        read_conversation(row)


def test_calls_that_the_template_leaves_out_are_told(tmp_path, tokenizer):
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [*ANSWER[:1], called]}))
    with pytest.raises(ValueError, match="leaves out tool_calls: write them as"):
        Conversations(str(tmp_path / "rows.jsonl"), "--train-data", tokenizer, max_tokens=100)
    # it looks at them, and refuses a turn that says nothing without
    strict = copy.deepcopy(tokenizer)
    refusal = (
        "{% if not message.content and not message.tool_calls %}{{ "
        "raise_exception('empty') }}{% endif %}"
    )
    loop = "{% for message in messages %}"
    strict.chat_template = tokenizer.chat_template.replace(loop, loop + refusal)
    assert (
        len(Conversations(str(tmp_path / "rows.jsonl"), "--train-data", strict, max_tokens=100))
        == 1
    )


def test_a_message_that_the_template_leaves_out_is_told(tmp_path, tokenizer):
    deaf = copy.deepcopy(tokenizer)
    deaf.chat_template = tokenizer.chat_template.replace(
        "{% for message in messages %}",
        "{% for message in messages if message['role'] != 'tool' %}",
    )
    # where the answer repeats what was observed
    for answer, missed in (("a", "tool"), ("It is R.", "assistant")):
        turns = alternating("q", "f", "R", answer)
        turns[2]["role"] = "tool"
        (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}))
        with pytest.raises(
            ValueError, match=f"leaves out a message of role '{missed}', or one before it"
        ):
            Conversations(str(tmp_path / "rows.jsonl"), "--train-data", deaf, max_tokens=100)
        assert (
            len(
                Conversations(
                    str(tmp_path / "rows.jsonl"), "--train-data", tokenizer, max_tokens=100
                )
            )
            == 1
        )


@pytest.mark.parametrize("native", [None, "a protocol of the template's"])
def test_arguments_of_a_function_call_may_be_a_text(native):
    texts = [
        json.dumps({"name": "add", "arguments": given})
        for given in ({"a": 3}, json.dumps({"a": 3}))
    ]
    assert tool_call_message(texts[0], native) == tool_call_message(texts[1], native)
    assert tool_call_message(json.dumps([*map(json.loads, texts)]), native) != tool_call_message(
        texts[0], native
    )


# --- bad rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row,reason",
    [
        ({"text": "x"}, "has the columns text; expected messages"),
        ({"messages": [{"role": "owner", "content": "x"}]}, "unknown role 'owner'"),
        ({"messages": [{"role": "user", "content": "x"}]}, "nothing to learn"),
        ({"messages": []}, "no messages"),
        ({"messages": [], "tools": [{"type": "function"}]}, "no messages"),
        ({"messages": "abc"}, "not a conversation"),
        ({"messages": ["abc"]}, "not a conversation"),
        ({"message_list": [{"role": "user", "content": "abc"}]}, "not a conversation"),
        ({"messages": [{"role": "assistant", "content": "I begin"}]}, "nothing to learn"),
        ({"messages": alternating("q" * 200, "a")}, "nothing to learn in its first 100 tokens: 2"),
        ({"messages": [{"role": "assistant", "content": None}]}, "has no text as its content"),
        ({"messages": alternating("q", "a \ud83d")}, "cannot be rendered: 'utf-8' codec"),
        (
            {"messages": alternating("<image>", "a"), "images": ["gone.png"]},
            "cannot open .*gone.png",
        ),
        (
            {"messages": alternating("q", "a"), "images": ["a.png"]},
            "1 images, and <image> stands 0 times",
        ),
        (
            {"message_list": [{"role": "user", "content": [{"text": "a", "image": "b"}]}]},
            "has 2 of the keys",
        ),
        (
            {"message_list": [{"role": "user", "content": [{"video": "clip.mp4"}]}]},
            "a video the list of its frames",
        ),
        (
            {"message_list": [{"role": "user", "content": [{"video": {"path": "x"}}]}]},
            "a video the list of its",
        ),
        ({"message_list": [{"role": "user", "content": [{"text": 5}]}]}, "a text is a string"),
        (
            {"messages": alternating("q <|image_pad|>", "a")},
            "spells <.image_pad.>, which stands for a picture",
        ),
        ({"messages": alternating("q", "<|video_pad|>")}, "spells <.video_pad.>"),
        (
            {"messages": alternating("q", "a"), "tools": "[" * 200_000},
            "not a conversation: RecursionError",
        ),
    ],
)
def test_bad_rows_are_told_with_file_row_and_reason(tmp_path, vision, row, reason, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in (TEXT_ROWS["messages"], row)))
    options = {"max_tokens": 100, "vision": vision, "media_root": tmp_path}
    with pytest.raises(
        ValueError, match=rf"(?s)--train-data: 1 unusable rows.*rows.jsonl line 2: .*{reason}"
    ):
        Conversations(str(path), "--train-data", build_vl_tokenizer(), **options)
    options["bad_rows"] = "drop"
    assert len(Conversations(str(path), "--train-data", build_vl_tokenizer(), **options)) == 1
    assert "1 unusable rows (dropped)" in capsys.readouterr().out


def test_files_of_several_formats_go_together(tmp_path, tokenizer):
    pq.write_table(pa.Table.from_pylist([TEXT_ROWS["question and answer"]]), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text(json.dumps(TEXT_ROWS["messages"]) + "\nno json\n")
    (tmp_path / "c.json").write_text(json.dumps([TEXT_ROWS["conversations"]]))
    paths = ",".join(str(tmp_path / name) for name in ("a.parquet", "b.jsonl", "c.json"))
    options = {"max_tokens": 50, "bad_rows": "drop"}
    data = Conversations(paths, "--train-data", tokenizer, **options)
    assert len(data) == 3
    assert len({tuple(data.episodes(n)[0].prompt_ids) for n in range(3)}) == 1
    with pytest.raises(FileNotFoundError, match="--train-data: no such file"):
        Conversations("gone.jsonl", "--train-data", tokenizer, max_tokens=5)


def test_the_first_rank_of_a_machine_looks_for_the_others(tmp_path, tokenizer, monkeypatch):
    rows = [TEXT_ROWS["messages"], {"messages": alternating("q " * 9, "a")}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    looks, real = [], Conversations._scan
    monkeypatch.setattr(Conversations, "_scan", lambda self: looks.append(rank) or real(self))
    monkeypatch.setattr("common.data.scan.gather_objects", gathering(lambda: rank, 2))
    costs = []
    for rank in range(2):
        world = World(rank, 2, rank, torch.device("cpu"))
        data = Conversations(
            str(tmp_path / "a.jsonl"), "--train-data", tokenizer, max_tokens=50, world=world
        )
        costs.append((data.usable.tolist(), data.costs.tolist()))
    assert looks == [0] and costs[0] == costs[1] and len(costs[0][0]) == 2


def test_a_picture_that_turns_out_to_be_truncated_is_left_out(tmp_path, vision, capsys):
    data = picture(90, 90)
    (tmp_path / "cut.png").write_bytes(data[: len(data) // 2])
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"messages": alternating("<image>", "a"), "images": ["cut.png"]})
    )
    options = {"max_tokens": 100, "vision": vision, "media_root": tmp_path}
    rows = Conversations(
        str(tmp_path / "rows.jsonl"), "--train-data", build_vl_tokenizer(), **options
    )
    assert rows.episodes(0) == [] and "unreadable image" in capsys.readouterr().out


def test_rows_are_balanced_over_ranks_by_cost():
    costs = np.array([9.0, 1, 1, 1, 1, 1, 1, 1, 1, 1])
    lists = balanced(list(range(10)), costs, 2)
    assert sorted(map(len, lists)) == [1, 9] and sorted(chain(*lists)) == list(range(10))
    assert balanced([3, 2, 1], costs, 2) == balanced([1, 2, 3], costs, 2), (
        "the order of a batch plays no part"
    )

"""--template-args: arguments of the chat template in rows, turns, conversations and `look`."""

import json
import shutil

import pytest
from helpers import make_args, prompts_of
from rows import row, write

import common.job as job_module
import grpo
from common.data.conversations import Conversations
from common.data.protocols import Hermes
from common.hub import FOLDERS, load_tokenizer
from common.look.__main__ import look
from common.rollout import opening

# as Qwen3's: without thoughts the header of the answer holds an empty block of them
THINKING = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)
OFF = {"enable_thinking": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """tiny, with a template as that of a thinking model."""
    folder = tmp_path_factory.mktemp("models") / "thinking"
    shutil.copytree(FOLDERS["tiny"], folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"chat_template": THINKING}
    file.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("template_args, block", [(None, ""), (OFF, "<think></think>")])
def test_rows_turns_and_look_render_with_them(folder, tmp_path, template_args, block, capsys):
    tokenizer = load_tokenizer(str(folder), template_args=template_args)
    path = write(tmp_path / "a.jsonl", [row()])
    data = prompts_of(path, tokenizer=tokenizer, max_prompt_tokens=200)
    header = f"<|assistant|>{block}"
    assert tokenizer.decode(data[0].prompt_ids) == f"<|user|>What is 1 + 1?<|end|>{header}"
    reply = Hermes(tokenizer).observation(["3 is wrong"], "user")
    assert reply == f"<|user|>3 is wrong<|end|>{header}"
    look(tmp_path / "a.jsonl", tokenizer=str(folder), template_args=template_args)
    assert f"What is 1 + 1?<|end|>{header}\n" in capsys.readouterr().out


@pytest.mark.parametrize("template_args, trained", [(None, "<think></think>2"), (OFF, "2")])
def test_what_they_put_into_the_header_is_not_trained(folder, tmp_path, template_args, trained):
    tokenizer = load_tokenizer(str(folder), template_args=template_args)
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    path = write(tmp_path / "a.jsonl", [{"messages": messages}])
    episode = Conversations(path, "--train-data", tokenizer, max_tokens=99).episodes(0)[0]
    assert tokenizer.decode(episode.response_ids) == f"{trained}<|end|>"
    assert all(episode.loss_mask)


def test_a_run_takes_them_from_its_flag(folder, tmp_path, world, monkeypatch):
    monkeypatch.setattr(job_module, "init_world", lambda *_: world)
    args = make_args(
        grpo, model=str(folder), template_args=OFF, output_dir=tmp_path / "run", dtype="fp32"
    )
    job = job_module.Job("grpo", args.data, args.machine, args.run, demo=False, training=False)
    question = [{"role": "user", "content": "?"}]
    text = job.tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<think></think>")


@pytest.mark.parametrize(
    "template_args, problem",
    [
        ({"enable_thinkin": False}, "the chat template of .* has no 'enable_thinkin'"),
        ({"tools": []}, "tools is set by the script itself"),
        ({"messages": []}, "messages is set by the script itself"),
        ({"add_generation_prompt": True}, "add_generation_prompt is set by the script itself"),
    ],
)
def test_what_has_no_effect_or_is_ours_is_refused(folder, template_args, problem):
    with pytest.raises(SystemExit, match=f"--template-args: {problem}"):
        load_tokenizer(str(folder), template_args=template_args)


@pytest.mark.parametrize(
    "config, advice",
    [
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
            "--eval-temperature 0.6 --eval-top-p 0.95",
        ),
        ({"do_sample": True, "temperature": None}, "--eval-temperature 1 --eval-top-p 1"),
        ({"do_sample": False, "temperature": 0.6}, ""),
        (None, ""),
    ],
)
def test_greedy_evaluations_of_a_model_that_asks_for_sampling(
    tmp_path, monkeypatch, config, advice
):
    said: list[str] = []
    monkeypatch.setattr(opening, "say", said.append)
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    opening.print_eval_advice(tmp_path)
    assert [line.endswith(advice) for line in said] == [True] * bool(advice)

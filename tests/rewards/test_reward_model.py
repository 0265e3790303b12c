"""The reward model: batched and padded scores are those of one text at a time, in its own
template."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from model_folders import save_reward_model
from safetensors.torch import load_file, save_file

from common.hub import FOLDERS
from common.rewards import model as reward_model
from common.rewards.model import RewardModel, check_reward_model
from common.rollout.rollouts import Rollouts
from common.types import Episode, Row


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_reward_model(tmp_path_factory.mktemp("reward_model"))


@pytest.fixture
def scorer(folder):
    return RewardModel(folder, torch.float32, torch.device("cpu"))


ROWS = {0: Row(0, "x", "AB", None, {}, [65, 66])}


@pytest.mark.parametrize("chunk", [1, 60, 100_000])
def test_scores_in_chunks_are_those_of_single_texts(folder, chunk, monkeypatch):
    monkeypatch.setattr(reward_model, "CHUNK_TOKENS", chunk)
    scorer = RewardModel(folder, torch.float32, torch.device("cpu"))
    tokenizer = scorer.tokenizer
    rows = {}
    episodes = []
    answers_of = {"1 2 3 = 6": ["1+2+3", "6"], "7 8 = 15": ["7+8=15 because it is so", ""]}
    for p, (question, answers) in enumerate(answers_of.items()):
        prompt = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        rows[p] = Row(p, "x", prompt if p == 0 else question, None, {}, list(ids))
        for s, answer in enumerate(answers):
            response = tokenizer.encode(answer, add_special_tokens=False)
            mask = [1] * len(response)
            logprobs = [0.0] * len(response)
            episode = Episode(p, s, list(ids), response, mask, logprobs, "stop")
            if p == 0:
                episode.opening = " or not"  # what an environment has said
            episodes.append(episode)
    scorer.score_episodes(episodes, rows, tokenizer)

    for episode in episodes:
        row = rows[episode.prompt_index]
        answer = tokenizer.decode(episode.response_ids)
        if isinstance(row.prompt, list):
            question = {"role": "user", "content": row.prompt[0]["content"] + " or not"}
            conversation = [question, {"role": "assistant", "content": answer}]
            text = tokenizer.apply_chat_template(conversation, tokenize=False)
        else:
            text = tokenizer.decode(row.prompt_ids) + answer
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        hidden = scorer.model.model(ids).last_hidden_state[0]
        last = max(t for t, token in enumerate(ids[0].tolist()) if token != tokenizer.pad_token_id)
        expected = (hidden[last] @ scorer.model.score.weight[0]).item()
        assert episode.model_reward == pytest.approx(expected, abs=1e-5)
    assert len({round(e.model_reward, 6) for e in episodes}) == len(episodes)


def short_episodes(count: int) -> list[Episode]:
    return [
        Episode(0, n, [65, 66], [67] * n, [1] * n, [0.0] * n, "stop", {"score": 1.0})
        for n in range(count)
    ]


def test_out_of_memory_halves_the_chunks_until_one_text_is_left(scorer, monkeypatch):
    expected = short_episodes(5)
    scorer.score_episodes(expected, ROWS, scorer.tokenizer)
    forward = scorer.model.forward
    largest = 2

    def small_memory(input_ids, **rest):
        if len(input_ids) > largest:
            raise torch.OutOfMemoryError("out of memory")
        return forward(input_ids, **rest)

    monkeypatch.setattr(scorer.model, "forward", small_memory)
    episodes = short_episodes(5)
    scorer.score_episodes(episodes, ROWS, scorer.tokenizer)
    for a, b in zip(episodes, expected):
        assert a.model_reward == pytest.approx(b.model_reward, abs=1e-5)
    largest = 0
    with pytest.raises(SystemExit, match="out of GPU memory in --reward-model"):
        scorer.score_episodes(episodes, ROWS, scorer.tokenizer)


def test_a_score_that_is_not_finite_costs_its_episode(scorer):
    with torch.no_grad():
        scorer.model.score.weight.fill_(float("inf"))
    episodes = short_episodes(2)
    scorer.score_episodes(episodes, ROWS, scorer.tokenizer)
    assert not any(math.isfinite(e.score) for e in episodes)


def test_what_a_tool_says_is_not_read_as_the_answer(scorer):
    tokenizer = scorer.tokenizer
    turn = tokenizer.encode("1+2", add_special_tokens=False)
    tool_output = tokenizer.encode("3 is right", add_special_tokens=False)
    last_turn = tokenizer.encode("= 3", add_special_tokens=False)
    ids = turn + tool_output + last_turn
    mask = [1] * len(turn) + [0] * len(tool_output) + [1] * len(last_turn)
    rewards = {"score": 1.0}
    with_tool = Episode(0, 0, [65, 66], ids, mask, [0.0] * len(ids), "stop", rewards)
    ids = tokenizer.encode("1+2\n= 3", add_special_tokens=False)
    without = Episode(0, 1, [65, 66], ids, [1] * len(ids), [0.0] * len(ids), "stop", dict(rewards))
    scorer.score_episodes([with_tool, without], ROWS, tokenizer)
    assert with_tool.model_reward == pytest.approx(without.model_reward, abs=1e-6)


@pytest.mark.parametrize("size, kept", [(1e5, True), (1e15, False)])
def test_a_large_score_costs_its_episode_and_is_told(scorer, capsys, size, kept):
    episodes = short_episodes(2)
    scorer.score_episodes(episodes, ROWS, scorer.tokenizer)
    with torch.no_grad():
        scorer.model.score.weight.mul_(size / max(abs(e.model_reward) for e in episodes))
    scorer.score_episodes(episodes, ROWS, scorer.tokenizer)
    assert [math.isfinite(e.score) for e in episodes] == [kept] * 2
    warning = "--reward-model: 2 of 2 scores are not finite or above 1e+06"
    assert (warning in capsys.readouterr().out) != kept


def test_a_text_that_is_longer_than_its_positions_has_no_score(scorer, monkeypatch, capsys):
    short, long = short_episodes(2)
    long.response_ids = long.response_ids * 50
    long.loss_mask = [1] * len(long.response_ids)
    monkeypatch.setattr(scorer, "num_positions", 40)
    scorer.score_episodes([short, long], ROWS, scorer.tokenizer)
    assert math.isfinite(short.score) and not math.isfinite(long.score)
    output = capsys.readouterr().out
    assert "1 of 2 texts are longer than its 40 positions" in output and "finite" not in output


def test_a_classifier_with_several_outputs_is_refused(tmp_path):
    folder = save_reward_model(tmp_path, num_labels=3)
    with pytest.raises(SystemExit, match=r"--reward-model .* has 3 outputs, expected one"):
        RewardModel(folder, torch.float32, torch.device("cpu"))


def test_a_model_without_a_head_or_a_damaged_one_is_refused(tmp_path):
    """transformers would draw one, of other numbers on each rank."""
    folder = shutil.copytree(FOLDERS["tiny"], tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_labels": 1}))
    with pytest.raises(SystemExit, match=r"--reward-model .*: its files have no score\.weight"):
        RewardModel(str(folder), torch.float32, torch.device("cpu"))
    with pytest.raises(SystemExit, match=r"--reward-model .*: no classifier, or damaged"):
        RewardModel(str(FOLDERS["tiny-vl"]), torch.float32, torch.device("cpu"))
    folder = save_reward_model(tmp_path / "whole")
    for damaged, told in (
        ("tokenizer.json", r"no classifier, or damaged \("),
        ("model.safetensors", "its weights cannot"),
    ):
        Path(folder, damaged).write_text("{")
        with pytest.raises(SystemExit, match=f"^--reward-model {folder}: {told}"):
            RewardModel(folder, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("rename", ["_orig_mod.{}", "module.{}", "base_model.model.{}"])
def test_weights_that_are_not_the_classifiers_are_refused(rename, tmp_path):
    folder = save_reward_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {rename.format(name): tensor for name, tensor in weights.items()}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        SystemExit,
        match=f"^--reward-model {folder}: its files have no model.*: a wrapper was saved",
    ):
        check_reward_model(folder)
    save_file(
        weights | {"v_head.weight": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(
        SystemExit,
        match=f"^--reward-model {folder}: its files have v_head.weight, for which Qwen2For",
    ):
        check_reward_model(folder)


def test_it_takes_the_engines_place(monkeypatch):
    """Both at once may not fit."""
    done = []
    monkeypatch.setattr("common.rollout.rollouts.score_episodes", lambda *_: done.append("rule"))
    model = SimpleNamespace(score_episodes=lambda *_: done.append("model"))
    engine = SimpleNamespace(sleep=lambda: done.append("sleep"))
    rollouts = SimpleNamespace(
        engine=engine, reward_model=model, reward_workers=None, tokenizer=None
    )
    Rollouts.score(rollouts, [], {})
    assert done == ["rule", "sleep", "model"]
    Rollouts.score(SimpleNamespace(**vars(rollouts) | {"reward_model": None}), [], {})
    assert done[3:] == ["rule"], "without one it goes on"

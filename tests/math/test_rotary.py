"""Rotary frequencies that depend on a text's length: in packs each text has its own, in RL those of
the engine are used."""

import copy

import pytest
import torch
from helpers import LITTLE_CACHE, run_script, steps_of
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vl import write_random

from common.assets.build.tiny import write_demo_data, write_supervised_data
from common.distributed import World
from common.engine.hf import HuggingFaceEngine
from common.engine.protocol import EngineConfig
from common.engine.vllm import VllmEngine
from common.hub import FOLDERS, load_tokenizer
from common.models import load_model
from common.packing import TokenIndex, pack
from common.rewards.model import RewardModel
from common.types import Episode, Row

WORLD = World(0, 1, 0, torch.device("cpu"))

LIMIT = 32
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FACTORS = {"short_factor": [1.0] * 16, "long_factor": [1.5 + i for i in range(16)]}
LONG = {
    "max_position_embeddings": 128,
    "original_max_position_embeddings": LIMIT,
    "sliding_window": None,
}
DYNAMIC = {
    "max_position_embeddings": LIMIT,
    "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
}
BY_LAYER = {
    "layer_types": ["full_attention"] * 2,
    "max_position_embeddings": LIMIT,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "rope_parameters": {
        "full_attention": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
MODELS = {
    "longrope": ("phi3", LONG | {"rope_scaling": {"type": "longrope", **FACTORS}}),
    "su": (
        "phi3",
        LONG
        | {"rope_scaling": {"type": "su", "original_max_position_embeddings": LIMIT, **FACTORS}},
    ),
    "longrope of Llama": ("llama", LONG | {"rope_scaling": {"rope_type": "longrope", **FACTORS}}),
    "dynamic": ("llama", DYNAMIC),
    "dynamic of Qwen": ("qwen2", DYNAMIC),
    "dynamic by kind of layer": ("laguna", BY_LAYER),
}


def write_model(folder, name: str) -> str:
    kind, options = MODELS[name]
    torch.manual_seed(0)
    # a copy: the configuration changes its arguments
    config = CONFIG_MAPPING[kind](**copy.deepcopy(SIZES | options))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)  # spread the logits: near-uniform ones would hide mistakes
    model.save_pretrained(folder)
    return str(folder)


def texts(*lengths: int) -> list[Episode]:
    """Texts of so many tokens, of which the first four are a prompt."""
    generator = torch.Generator().manual_seed(1)
    episodes = []
    for i, length in enumerate(lengths):
        prompt, response = torch.randint(128, (length,), generator=generator).split([4, length - 4])
        mask = [1] * len(response)
        logprobs = [0.0] * len(response)
        episodes.append(Episode(i, 0, prompt.tolist(), response.tolist(), mask, logprobs))
    return episodes


@torch.no_grad()
def packed_logprobs(policy, episodes: list[Episode], budget: int = 1000) -> list[torch.Tensor]:
    index = TokenIndex(episodes)
    result = torch.zeros(len(index))
    for batch in pack(episodes, range(len(episodes)), index, budget=budget):
        result[batch.token_index] = policy(batch)[0]
    return list(result.split(index.lengths.tolist()))


@torch.no_grad()
def logprobs_alone(folder: str, episode: Episode, length: int = 0) -> torch.Tensor:
    """Those of transformers in a forward of this text alone, padded to at least `length` tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = episode.prompt_ids + episode.response_ids
    ids = torch.tensor([ids + [0] * (length - len(ids))])
    logits = model(ids, use_cache=False).logits[0].log_softmax(-1)
    length = len(episode.prompt_ids)
    response = torch.tensor(episode.response_ids)
    return logits[length - 1 : length - 1 + len(response)].gather(-1, response[:, None])[:, 0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("budget", [1000, 70])
def test_in_a_pack_each_text_has_the_frequencies_of_its_own_length(name, budget, tmp_path):
    """Longest first, shortest first, just at the limit and just beyond: what came before leaves
    nothing behind."""
    folder = write_model(tmp_path, name)
    episodes = texts(20, 60, 45, 9, LIMIT, LIMIT + 1, 50)
    packed = packed_logprobs(load_model(folder, "sdpa"), episodes, budget)
    for logprobs, episode in zip(packed, episodes):
        expected = logprobs_alone(folder, episode)
        assert torch.allclose(logprobs, expected, atol=2e-5), len(logprobs) + 4


@pytest.mark.parametrize(
    "name, longest, as_if", [("longrope", 64, 64), ("longrope", LIMIT, LIMIT), ("dynamic", 32, 32)]
)
def test_what_an_engine_samples_has_its_frequencies_whatever_its_length(
    name, longest, as_if, tmp_path
):
    """vLLM's of --max-prompt-tokens and --max-response-tokens together; of a prompt's responses of
    any length."""
    folder = write_model(tmp_path, name)
    policy = load_model(folder, "sdpa", max_model_len=longest)
    episodes = texts(longest, 20, longest - 1, 9)
    for episode in episodes[1:]:
        episode.prompt_index = 0
        episode.prompt_ids = episodes[0].prompt_ids
    for logprobs, episode in zip(packed_logprobs(policy, episodes), episodes):
        expected = logprobs_alone(folder, episode, as_if)
        assert torch.allclose(logprobs, expected, atol=2e-5), len(logprobs) + 4


def test_texts_of_several_lengths_do_not_share_a_prompt_in_silence(tmp_path):
    policy = load_model(write_model(tmp_path, "dynamic"), "sdpa")
    episodes = texts(50, 50, 20)
    for episode in episodes[1:]:
        episode.prompt_index = 0
        episode.prompt_ids = episodes[0].prompt_ids
    packed_logprobs(policy, episodes[:2])  # as a row that a batch has twice
    with pytest.raises(ValueError, match="pack them apart"):
        packed_logprobs(policy, episodes)


@pytest.mark.parametrize(
    "name, engine, reason",
    [
        (
            "longrope",
            HuggingFaceEngine,
            r"\(longrope\) change beyond 32 .* --engine hf samples; --engine vllm fixes them",
        ),
        (
            "dynamic",
            HuggingFaceEngine,
            r"\(dynamic\) change beyond 32 .* --engine hf samples; lower the two",
        ),
        pytest.param(
            "dynamic",
            VllmEngine,
            "33 tokens together, and vLLM has 32 positions for this model",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_engine_that_would_change_the_frequencies_on_the_way_is_refused(
    name, engine, reason, tmp_path
):
    config = EngineConfig(
        write_model(tmp_path, name), torch.float32, WORLD, [0], max_model_len=LIMIT + 1
    )
    message = f"^--max-prompt-tokens and --max-response-tokens: .*{reason}"
    with pytest.raises(SystemExit, match=message):
        engine(config)


def test_a_reward_model_reads_each_text_as_if_it_were_alone(tmp_path):
    config = CONFIG_MAPPING["llama"](
        **copy.deepcopy(SIZES | DYNAMIC | {"vocab_size": 512, "num_labels": 1})
    )
    torch.manual_seed(0)
    scorer = AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for parameter in scorer.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    scorer.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(FOLDERS["tiny"]))
    tokenizer.save_pretrained(tmp_path)
    episodes = []
    for i, length in enumerate((12, 60, 45, 25)):
        ids = tokenizer.encode("1 + " * length, add_special_tokens=False)[:length]
        episodes.append(Episode(i, 0, ids[:4], ids[4:], [1] * (length - 4), [0.0] * (length - 4)))
    rows = {i: Row(i, "", "", None, {}, episode.prompt_ids) for i, episode in enumerate(episodes)}
    RewardModel(str(tmp_path), torch.float32, WORLD.device).score_episodes(
        episodes, rows, tokenizer
    )
    for episode in episodes:
        fresh = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32)
        ids = tokenizer(
            tokenizer.decode(episode.prompt_ids + episode.response_ids), add_special_tokens=False
        )
        score = fresh(torch.tensor([ids["input_ids"]])).logits.item()
        assert episode.model_reward == pytest.approx(score, abs=1e-4)


@pytest.mark.slow
def test_vllm_samples_and_sft_evaluates_by_the_trainers_frequencies(tmp_path):
    """Samples of vLLM are short, and could be long; texts are shorter and longer than the original
    length."""
    rope = {
        "type": "longrope",
        "short_factor": [1.0] * 32,
        "long_factor": [1.5 + i for i in range(32)],
    }
    options = {
        "sliding_window": None,
        "rope_scaling": rope,
        "original_max_position_embeddings": 190,
    }
    model = write_random(tmp_path / "model", "phi3", **options)
    write_demo_data(tmp_path)
    steps = ["--total-steps", 1, "--dtype", "fp32", "--model", model]
    rollout = ["--prompts-per-step", 4, "--samples-per-prompt", 4, "--max-rows", 16, *LITTLE_CACHE]
    lengths = ["--max-prompt-tokens", 160, "--max-response-tokens", 40]
    rows = ["--train-data", tmp_path / "train.parquet"]
    run_script("grpo.py", *steps, *rollout, *lengths, *rows, "--output-dir", tmp_path / "grpo")
    assert steps_of(tmp_path / "grpo")[1]["policy/rollout_logprob_gap"] < 1e-4

    write_supervised_data(tmp_path)
    rows = ["--train-data", tmp_path / "train.jsonl", "--eval-data", tmp_path / "eval.jsonl"]
    rows += ["--eval-rows", 32, "--batch-size", 8]
    losses = []
    for budget in (64, 8192):
        folder = tmp_path / str(budget)
        options = ["--micro-batch-tokens", budget, "--output-dir", folder]
        run_script("sft.py", *steps, *rows, *options)
        losses.append(steps_of(folder)[0]["eval/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)

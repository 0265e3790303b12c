"""Every causal language model of transformers: our packed log-probs are its own, or it is refused
in one line."""

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from common.models import checked_skeleton, load_model
from common.packing import TokenIndex, pack
from common.types import Episode
from common.vision import skeleton

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "max_position_embeddings": 256,
}
# of the configurations that have these fields
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": None,
}
OPTIONS = {  # of single kinds, beside the sizes
    "cwm": {"sliding_window": 8},
    "deepseek_v4": {"sliding_window": 8},
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 0},
    "exaone4": {"sliding_window": 8, "sliding_window_pattern": 2},
    "exaone_moe": {"sliding_window": 8},
    "gemma3n_text": {"sliding_window": 8},
    "gemma4_text": {"sliding_window": 8},
    "gemma4_unified_text": {"sliding_window": 8},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "helium": {"head_dim": 32},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "jetmoe": {"num_key_value_heads": 1},
    "laguna": {"sliding_window": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 2, "head_dim": 64},
    "mimo_v2_flash": {"sliding_window": 8},
    "ministral": {"sliding_window": 8, "head_dim": 32},
    "moshi": {"sliding_window": 8},
    "qwen3_5": {"text_config": SIZES},
    "qwen3_5_moe": {
        "text_config": SIZES
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    },
    "reformer": {"is_decoder": True},
    "zaya": {"num_experts_per_tok": 1},
}

# What is tried with the sizes above; a newer transformers has more.
OUTCOMES = {
    "exact": """
        apertus arcee aria_text axk1 bamba bitnet deepseek_v2 deepseek_v3 diffllama doge dots1
        ernie4_5 ernie4_5_moe falcon_h1 flex_olmo fuyu gemma glm glm4 glm4_moe glm4_moe_lite gpt-sw3
        gpt2 gpt_bigcode gpt_neox granite granitemoe granitemoehybrid granitemoeshared helium
        hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe laguna lfm2 lfm2_moe
        llama mellum minimax_m2 minimax_m3_vl_text ministral3 mistral mixtral nemotron_h olmo olmo2
        olmo_hybrid olmoe opt persimmon phi3 qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe
        qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 solar_open starcoder2
        youtu
    """,
    "head with a bias": """
        bert bert-generation big_bird camembert codegen ctrl data2vec-text electra ernie git gptj
        megatron-bert modernbert-decoder phi rembert roberta roberta-prelayernorm roc_bert roformer
        xlm xlm-roberta xlm-roberta-xl xmod
    """,
    "attention of its own": """
        bart bigbird_pegasus biogpt blenderbot blenderbot-small bloom blt cpmant falcon gpt_neo
        gpt_neox_japanese marian mbart mpt mvp openai-gpt pegasus stablelm trocr xglm
    """,
    "layers, in which": """
        axk2 deepseek_v32 deepseek_v4 falcon_mamba glm_moe_dsa hy_v4 inkling_text jamba kimi_linear
        llama4 llama4_text mamba mamba2 minimax qwen4_exp_text recurrent_gemma rwkv xlstm zaya
    """,
    "sliding windows": """
        afmoe cwm exaone4 exaone_moe gemma3 gemma3_text gemma4 gemma4_text gemma4_unified
        gemma4_unified_text gpt_oss granite_swa granitemoe_swa mimo_v2_flash ministral moshi olmo3
    """,
    "rescales its logits": """
        cohere cohere2 cohere2_moe gemma2 minicpm3 nanochat vaultgemma
    """,
    "passes its attention no options": """
        nemotron
    """,
    "at random": """
        phimoe
    """,
    "no causal language model": """
        cohere_compass_text dbrx gemma3n gemma3n_text gemma4_assistant gemma4_unified_assistant
        plbart qwen4_exp reformer whisper
    """,
    "untried": """
        emu3 got_ocr2 longcat_flash mllama musicgen musicgen_melody phi4_multimodal prophetnet xlnet
        zamba zamba2
    """,
}
EXPECTED: dict[str, str] = {}
for expected_outcome, kinds in OUTCOMES.items():
    for kind in kinds.split():
        EXPECTED[kind] = expected_outcome
EVERY_TIME = [
    "llama",
    "gpt2",
    "gpt_neox",
    "smollm3",
    "qwen3_moe",
    "falcon",
    "gptj",
    "nemotron",
    "phimoe",
    "whisper",
]


def little(kind: str):
    """A configuration of a few ten thousand parameters, without dropout."""
    options = SIZES | OPTIONS.get(kind, {})
    fields = vars(CONFIG_MAPPING[kind](**options))
    experts = {name: value for name, value in EXPERTS.items() if name in fields}
    return CONFIG_MAPPING[kind](**(experts | options))


def episodes() -> list[Episode]:
    def episode(prompt: int, sample: int, prompt_ids: list[int], ids: list[int]) -> Episode:
        return Episode(prompt, sample, prompt_ids, ids, [1] * len(ids), [0.0] * len(ids))

    first = [episode(0, j, list(range(5, 20)), list(range(30 + j, 50))) for j in range(3)]
    return first + [episode(1, j, list(range(60, 70)), list(range(70 + j, 90))) for j in range(2)]


def outcome(kind: str, folder) -> str:
    """ "exact", or the reason of a refusal; AssertionError if it is neither."""
    torch.manual_seed(0)
    config = little(kind)
    config.save_pretrained(folder)
    try:
        checked_skeleton(str(folder), "sdpa", trust_remote_code=False, flag="--model")
        assert sum(p.numel() for p in skeleton(str(folder)).parameters()) < 2e7
        policy = load_model(str(folder), "sdpa", from_scratch=True)
    except SystemExit as refused:
        (line,) = str(refused).splitlines()
        return line
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)  # spread the logits: near-uniform ones would hide mistakes
        samples = episodes()
        index = TokenIndex(samples)
        (batch,) = pack(samples, range(len(samples)), index, budget=1000)
        logprobs = policy(batch)[0]
        owners = index.episode_of_token[batch.tokens]
        model = policy.model.eval()
        model.set_attn_implementation("eager")
        for i, sample in enumerate(samples):
            ids = torch.tensor(sample.response_ids)
            inputs = torch.tensor([sample.prompt_ids + sample.response_ids])
            logits = model(inputs, use_cache=False).logits[0]
            predictions = logits.log_softmax(-1)[len(sample.prompt_ids) - 1 : -1]
            expected = predictions.gather(-1, ids[:, None])[:, 0]
            difference = (logprobs[owners == i] - expected).abs().max()
            assert difference < 1e-4, "our log-probs are another model's"
    return "exact"


@pytest.mark.parametrize("kind", EVERY_TIME)
def test_log_probs_are_the_models_own_or_it_is_refused(kind, tmp_path):
    assert EXPECTED[kind] in outcome(kind, tmp_path)


@pytest.mark.slow
def test_every_architecture_of_transformers(tmp_path):
    assert set(EXPECTED) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING)
    unexpected = {}
    for kind, expected in EXPECTED.items():
        if expected == "untried":
            continue
        found = outcome(kind, tmp_path / kind)
        if expected not in found:
            unexpected[kind] = found
    assert unexpected == {}

"""Every causal language model of transformers: in packs or in rows our log-probs are its own, or it
is refused in one line."""

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from common.exactness import check_policy, exact_attention
from common.flags import Machine
from common.models import attention_implementation, load_model
from common.packing import TokenIndex, layout_of, pack
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
    "sliding_window": 8,
}
EYES = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}
OPTIONS = {  # of single kinds, beside the sizes
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 0},
    "exaone4": {"sliding_window_pattern": 2},
    "gemma3": {"text_config": SIZES | {"sliding_window": 8}},
    "gemma4": {"text_config": SIZES | {"sliding_window": 8, "vocab_size_per_layer_input": 128}},
    "gemma4_text": {"vocab_size_per_layer_input": 128},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "helium": {"head_dim": 32},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "jetmoe": {"num_key_value_heads": 1},
    "kimi_linear": {"num_experts": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 2, "head_dim": 64, "n_groups": 1},
    "mimo_v2_flash": {"num_attention_heads": 8},
    "ministral": {"head_dim": 32},
    "qwen3_5": {"text_config": SIZES, "vision_config": EYES},
    "qwen3_5_moe": {
        "text_config": SIZES
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        "vision_config": EYES,
    },
    "reformer": {"is_decoder": True},
    "zaya": {"num_experts_per_tok": 1},
}

# What is tried with the sizes above; a newer transformers has more.
OUTCOMES = {
    "packs": """
        afmoe apertus arcee aria_text axk1 bamba bitnet cohere cohere2 cohere2_moe cwm deepseek_v2
        deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon_h1 flex_olmo
        fuyu gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text gemma4_unified_text glm glm4
        glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa
        granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense
        hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe laguna lfm2 lfm2_moe llama mellum
        mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral
        nanochat nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt persimmon phi3 qwen2 qwen2_moe
        qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss
        smollm3 solar_open starcoder2 vaultgemma youtu
    """,
    "rows": """
        axk2 bart bigbird_pegasus biogpt blenderbot blenderbot-small bloom deepseek_v32 deepseek_v4
        doge falcon falcon_mamba glm_moe_dsa gpt_neo gpt_neox_japanese hy_v4 jamba kimi_linear mamba
        mamba2 marian mbart minimax moshi mpt mvp nemotron openai-gpt pegasus qwen4_exp_text
        recurrent_gemma rwkv stablelm trocr xglm xlstm zaya
    """,
    "head with a bias": """
        bert bert-generation big_bird camembert codegen ctrl data2vec-text electra ernie git gptj
        megatron-bert modernbert-decoder phi rembert roberta roberta-prelayernorm roc_bert roformer
        xlm xlm-roberta xlm-roberta-xl xmod
    """,
    "not supported here": """
        cpmant inkling_text llama4_text phimoe
    """,
    "no causal language model": """
        cohere_compass_text dbrx gemma3n gemma3n_text gemma4_assistant gemma4_unified_assistant
        plbart qwen4_exp reformer whisper
    """,
    "untried": """
        blt emu3 gemma4_unified got_ocr2 llama4 longcat_flash mllama musicgen musicgen_melody
        phi4_multimodal prophetnet xlnet zamba zamba2
    """,
}
EXPECTED: dict[str, str] = {}
for expected_outcome, kinds in OUTCOMES.items():
    for kind in kinds.split():
        EXPECTED[kind] = expected_outcome
# one of each way to be exact, or to be refused
EVERY_TIME = ["llama", "gemma2", "gpt_oss", "granite", "lfm2", "qwen3_5_text", "falcon", "mamba"]
EVERY_TIME += ["gptj", "phimoe", "whisper"]
OF_A_KIND = ["gpt2", "gpt_neox", "smollm3", "qwen3_moe", "gemma3_text", "nemotron"]


@pytest.fixture(autouse=True)
def compiler():
    """Of this process: an engine may have switched it off."""
    with torch._dynamo.config.patch(disable=False):
        yield


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
    """ "packs" or "rows", or the reason of a refusal; AssertionError for log-probs of another
    model."""
    torch.manual_seed(0)
    little(kind).save_pretrained(folder)
    try:
        model = skeleton(str(folder))
        assert sum(p.numel() for p in model.parameters()) < 2e8
        attention = exact_attention(model, "sdpa", Machine())
        policy = load_model(str(folder), attention, from_scratch=True)
    except SystemExit as refused:
        (line,) = str(refused).splitlines()
        return line
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)  # spread the logits: near-uniform ones would hide mistakes
        check_policy(policy, torch.float32, kind)
        samples = episodes()
        expected = own_logprobs(policy.model, samples)
        # flex attention has no sinks on CPUs
        has_sinks = any(name.endswith("sinks") for name, _ in policy.model.named_parameters())
        layouts = ["rows"] if attention == "rows" else ["sdpa", "rows", "flex"]
        for layout in layouts[: 2 if has_sinks else 3]:
            policy.attention = layout
            name = attention_implementation(policy.model.config, layout, None) or "eager"
            policy.model.config.get_text_config()._attn_implementation = name
            difference = (packed_logprobs(policy, samples) - expected).abs().max()
            assert difference < 1e-4, f"{kind}: {layout}: log-probs of another model"
    return "rows" if attention == "rows" else "packs"


def packed_logprobs(policy, samples: list[Episode]) -> torch.Tensor:
    index = TokenIndex(samples)
    logprobs = torch.zeros(len(index))
    layout = layout_of(policy.attention)
    for batch in pack(samples, range(len(samples)), index, budget=1000, layout=layout):
        logprobs[batch.token_index] = policy(batch)[0]
    return logprobs


def own_logprobs(model, samples: list[Episode]) -> torch.Tensor:
    """Those of transformers' model, text by text."""
    config = model.config.get_text_config()
    attention = config._attn_implementation
    config._attn_implementation = "eager"
    logprobs = []
    for sample in samples:
        ids = torch.tensor(sample.response_ids)
        inputs = torch.tensor([sample.prompt_ids + sample.response_ids])
        logits = model(inputs, use_cache=False).logits[0]
        predictions = logits.log_softmax(-1)[len(sample.prompt_ids) - 1 : -1]
        logprobs.append(predictions.gather(-1, ids[:, None])[:, 0])
    config._attn_implementation = attention
    return torch.cat(logprobs)


@pytest.mark.parametrize(
    "kind", [*EVERY_TIME, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OF_A_KIND)]
)
def test_log_probs_are_the_models_own_or_it_is_refused(kind, tmp_path, uncompiled_flex):
    assert EXPECTED[kind] in outcome(kind, tmp_path)


@pytest.mark.slow
def test_every_architecture_of_transformers(tmp_path, uncompiled_flex):
    assert set(EXPECTED) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING)
    unexpected = {}
    for kind, expected in EXPECTED.items():
        if expected == "untried":
            continue
        try:
            found = outcome(kind, tmp_path / kind)
        except Exception as error:
            found = repr(error)
        if expected not in found:
            unexpected[kind] = found
    assert unexpected == {}

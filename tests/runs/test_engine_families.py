"""Families of models in both engines: what they sample is what transformers says of it, after a
sync as before; what travels in a sync, and how much of it at once; what is refused."""

import gc
import json
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from family_models import COMPOSITES, DELTA_NETS, FAMILIES, write_family
from helpers import ROOT, run_script
from safetensors.torch import load_file, save_file

from common.distributed import World, make_mesh, wrap_model
from common.engine.hf import HuggingFaceEngine
from common.engine.protocol import EngineConfig
from common.engine.refusals import ON_TRANSFORMERS_BACKEND, Setting, why_refused
from common.export import export_hugging_face
from common.hub import load_tokenizer
from common.models import Policy, engine_weights, full_parameters, load_model
from common.torch_repair import transformers
from common.vision import auto_class, skeleton
from common.weights import as_saved, saved_buffers, saved_sizes

WORLD = World(0, 1, 0, torch.device("cpu"))
# with vLLM on a CPU in float32, and why
REFUSED = {
    "apertus": "log-probs differ from transformers' by 1e-3; --engine hf runs it",
    "cohere2": "sliding window is one token longer than transformers'; keep --max-prompt-tokens",
    "deepseek_v3": "log-probs differ from transformers' by 0.2; --engine hf runs it",
    "ernie4_5_moe": "leaves out the bias of its router; --engine hf runs it",
    "gemma2-untied": "ties its head to the embeddings, and config.json does not; --engine hf",
    "gpt_neox": "vLLM has no GPTNeoXForCausalLM of its own; --engine hf runs it",
    "nemotron_h": "bounds its time steps from below, and vLLM does not; --engine hf runs it",
    "olmo_hybrid": "recurrent layers on GPUs alone; --engine hf runs it",
    "qwen3_5": "gated delta nets in bf16 alone, with heads of 128; --dtype bf16, or --engine hf",
    "qwen3_5_moe_text": "gated delta nets in bf16 alone",
    "qwen3_5_text": "gated delta nets in bf16 alone",
    "qwen3_next": "gated delta nets in bf16 alone",
}


def results_of(
    folder: Path, families: list[str], engine: str, ranks: int = 0, dtype: str = "fp32"
) -> dict[str, dict]:
    """{family: what tests/workers/engine_families.py prints of it}. ranks: that share an engine."""
    worker = ROOT / "tests" / "workers" / "engine_families.py"
    options = ["--engine", engine, "--dtype", dtype, "--ranks", max(ranks, 1)]
    done = run_script(worker, folder, *families, *options, ranks=ranks, timeout=1200)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    results = {result.pop("family"): result for result in map(json.loads, lines)}
    assert list(results) == families
    return results


def check_gaps(family: str, result: dict) -> None:
    gaps = {state: result[state] for state in ("fresh", "synced", "restored")}
    assert max(gaps.values()) < 1e-4, (family, gaps)
    assert result["stale"] > 0.01, "the weights must move enough for a stale engine to show"
    assert result["decoder unchanged"], family
    if family in COMPOSITES and family != "mistral3":  # its one placeholder is seldom sampled
        assert result["reasons"]["vision_token"] > 0, family


@pytest.mark.parametrize(
    "engine, families",
    [
        ("vllm", ["smollm3", "qwen3_moe"]),
        pytest.param("hf", ["gemma2", "falcon_h1"], marks=pytest.mark.slow),
    ],
)
def test_engines_run_and_follow_models_that_need_care(engine, families, tmp_path):
    """The other repairs are needed in the table of all families."""
    for family, result in results_of(tmp_path, families, engine).items():
        check_gaps(family, result)


def test_what_the_transformers_backend_may_run_is_in_the_table():
    assert set(FAMILIES) > ON_TRANSFORMERS_BACKEND


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "hf"])
def test_every_family_is_exact_in_an_engine_or_refused_by_name(engine, tmp_path):
    """Without the repairs of vllm_repairs.py, vllm.py and hf.py these would fail. vLLM: smollm3
    (its transformers backend decorates transformers' class), qwen3_moe (experts apart, packed again
    on CPUs), gpt_oss (fused experts and sinks), glm4_moe (the router's bias, a buffer), lfm2
    (rotary rows on CPUs, no prefix cache, no head to send), falcon_h1 (no prefix cache), gemma3
    (placeholders end a sample), qwen3_vl_moe (experts transposed). hf: gemma2 (the cap of
    attention), falcon_h1 (states of samples that go on), glm4_moe and gemma3 as with vLLM."""
    refused = REFUSED if engine == "vllm" else {}
    results = results_of(tmp_path, sorted({*FAMILIES, *COMPOSITES}), engine)
    for family, result in results.items():
        if family in refused:
            assert result["refused"].startswith("--model FOLDER: "), family
            assert refused[family] in result["refused"], family
        else:
            check_gaps(family, result)


@pytest.mark.slow
def test_gated_delta_nets_follow_the_policy_in_vllms_own_kernel(tmp_path):
    """On CPUs it computes in bf16 alone: a bound of its own, for the mean of all tokens."""
    results = results_of(tmp_path, sorted(DELTA_NETS), "vllm", dtype="bf16")
    for family, result in results.items():
        gaps = [result[state] for state in ("fresh", "synced", "restored")]
        assert max(gaps) < 0.03, (family, gaps)
        assert result["stale"] > 5 * max(gaps), (family, result["stale"], gaps)


@pytest.mark.slow
def test_an_engine_of_two_ranks_takes_experts_and_sinks(tmp_path):
    for family, result in results_of(tmp_path, ["gpt_oss"], "vllm", ranks=2).items():
        check_gaps(family, result)


# --- what is sent ---------------------------------------------------------------------------------


def plain_policy(folder: Path, dtype: torch.dtype = torch.float32) -> Policy:
    config = skeleton(str(folder)).config
    return Policy(auto_class(config).from_pretrained(folder, dtype=dtype), "sdpa")


def published_names(folder: Path) -> None:
    """As Gemma 3 was published: transformers puts its tower's names together."""
    file = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        name = name.replace("vision_tower.", "vision_tower.vision_model.")
        tensors[name.replace("vision_model.vision_model.", "vision_model.")] = tensor
    save_file(tensors, file, {"format": "pt"})


def test_a_sync_that_stops_in_between_leaves_gradients_on(tmp_path):
    policy = plain_policy(write_family(tmp_path, "llama"))
    weights = full_parameters(policy)
    next(weights)
    assert torch.is_grad_enabled()


NAMED = ["qwen3_moe", "gpt_oss", "glm4_moe", "falcon_h1", "gemma3", "gemma3 as published"]
NAMED += ["qwen3_vl_moe"]


@pytest.mark.parametrize("case", NAMED)
def test_a_sync_sends_the_checkpoint_bit_for_bit(case, tmp_path):
    folder = write_family(tmp_path, case.partition(" ")[0])
    if case.endswith("published"):
        published_names(folder)
    saved = load_file(folder / "model.safetensors")
    policy = plain_policy(folder)
    sent: dict[str, torch.Tensor] = {}
    for name, tensor in as_saved(policy.model, full_parameters(policy)):
        assert name not in sent
        sent[name] = tensor
    if policy.model.config.tie_word_embeddings:
        head = next(name for name in sent if name.endswith("lm_head.weight"))
        del sent[head]
    assert sent.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(sent[name], tensor), name
    sizes = saved_sizes(skeleton(str(folder)), str(folder))
    assert {name: sizes[name] for name in saved} == {n: t.numel() for n, t in saved.items()}


def test_a_buffer_keeps_its_dtype_in_a_sync(tmp_path):
    """In bf16 the router's bias would choose other experts."""
    policy = plain_policy(write_family(tmp_path, "glm4_moe"), torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in full_parameters(policy, torch.bfloat16)}
    biases = {name for name, _ in saved_buffers(policy.model)}
    assert len(biases) == 1
    for name, dtype in dtypes.items():
        assert dtype == (torch.float32 if name in biases else torch.bfloat16), name


def test_files_of_a_backbone_and_of_more_than_the_model(tmp_path):
    """GPT-2 was published without its prefix; old files hold buffers; newer ones further heads."""
    folder = write_family(tmp_path, "gpt2")
    skeleton_of_folder = skeleton(str(folder))
    expected = saved_sizes(skeleton_of_folder, str(folder))
    assert expected["lm_head.weight"] == expected["transformer.wte.weight"]
    file = folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(file).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    tensors["h.0.attn.masked_bias"] = torch.ones(())
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    assert saved_sizes(skeleton_of_folder, str(folder)) == expected
    file.unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert saved_sizes(skeleton_of_folder, str(folder)) == expected


def test_at_most_a_layers_experts_are_held_beside_the_model(tmp_path):
    """Whatever a walk over the weights has made is gone once it is two parameters further."""
    policy = plain_policy(write_family(tmp_path, "qwen3_moe"))
    made: list[weakref.ref] = []
    largest = max(parameter.numel() for parameter in policy.parameters())

    def copies():
        for name, tensor in full_parameters(policy):
            copy = tensor.clone()
            made.append(weakref.ref(copy))
            yield name, copy
            del copy

    gc.freeze()  # each collection would walk what transformers has imported
    for _, tensor in as_saved(policy.model, copies()):
        pieces = tensor.untyped_storage().nbytes() // tensor.element_size()
        assert pieces <= largest
        del tensor
        gc.collect()
        assert sum(reference() is not None for reference in made) <= 1


def test_an_export_has_what_the_model_came_with(tmp_path):
    """The experts apart, and the router's bias in float32."""
    folder = write_family(tmp_path / "glm4_moe", "glm4_moe")
    policy = plain_policy(folder)
    tokenizer = load_tokenizer(str(folder))
    export_hugging_face(policy, tokenizer, tmp_path / "export", WORLD, torch.bfloat16)
    saved = load_file(folder / "model.safetensors")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == saved.keys()
    for name, tensor in saved.items():
        dtype = torch.float32 if "e_score_correction_bias" in name else torch.bfloat16
        assert torch.equal(exported[name], tensor.to(dtype)), name


def untransposed_experts(folder: Path) -> None:
    """As transformers alone writes those of Qwen3-VL."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = tensor.mT.contiguous()
    save_file(tensors, file, {"format": "pt"})


def test_experts_of_qwen3_vl_are_written_as_they_were_published(tmp_path):
    """transposed, whichever way the folder has them; vLLM loads no others."""
    folder = write_family(tmp_path / "published", "qwen3_vl_moe")
    other = write_family(tmp_path / "other", "qwen3_vl_moe")
    untransposed_experts(other)
    saved = load_file(folder / "model.safetensors")
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    assert saved[name].shape == (4, 32, 128), "experts, inputs, outputs"
    for source in (folder, other):
        export = tmp_path / f"export of {source.name}"
        tokenizer = load_tokenizer(str(source))
        export_hugging_face(plain_policy(source), tokenizer, export, WORLD, torch.float32)
        exported = load_file(export / "model.safetensors")
        assert exported.keys() == saved.keys()
        for name, tensor in saved.items():
            assert torch.equal(exported[name], tensor), name
    with pytest.raises(SystemExit, match=r"or does not write again in this shape: .*--engine hf"):
        saved_sizes(skeleton(str(other)), str(other))


def test_the_other_engine_takes_the_names_of_modules(tmp_path):
    folder = write_family(tmp_path, "qwen3_moe")
    policy = plain_policy(folder)
    options = {"end_ids": [0], "max_model_len": 64, "sleep_level": 0}
    engine = HuggingFaceEngine(EngineConfig(str(folder), torch.float32, WORLD, **options))
    names = [name for name, _ in engine_weights(engine, policy)]
    assert names == [name for name, _ in policy.model.named_parameters()]
    engine.weight_names = "checkpoint"
    with pytest.raises(RuntimeError, match=r"experts\.0\..* expected no such name"):
        engine.sync_weights(engine_weights(engine, policy), 1)


def test_text_trains_the_language_model_of_a_composite(world, tmp_path):
    shard = partial(wrap_model, mesh=make_mesh(world, "fsdp"), compute_dtype=torch.float32)
    policy = load_model(str(write_family(tmp_path, "mistral3")), "sdpa", wrap=shard)
    parameters = dict(policy.model.named_parameters())
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    frozen = parameters.keys() - trained
    assert "lm_head.weight" in trained
    for name in trained - {"lm_head.weight"}:
        assert name.startswith("model.language_model."), name
    for name in frozen:
        assert name.startswith(("model.vision_tower.", "model.multi_modal_projector.")), name


# --- what is refused ------------------------------------------------------------------------------


def setting_of(kind: str, **changes) -> Setting:
    config_class = transformers.CONFIG_MAPPING[kind]
    config = config_class(**changes.pop("config", {}))
    options = {"dtype": torch.bfloat16, "on_gpu": True, "max_model_len": 4096} | changes
    return Setting(config=config, text=config.get_text_config(), **options)


DELTA_NET = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
ALL_DENSE = {"num_hidden_layers": 3, "first_k_dense_replace": 3}
SETTINGS = [  # (kind, what differs, the reason of its refusal or None)
    ("llama", {}, None),
    ("gpt_oss", {}, None),
    ("gpt_oss", {"config": {"quantization_config": {"quant_method": "mxfp4"}}}, "copy in bf16"),
    ("cohere2", {}, None),
    ("cohere2", {"max_model_len": 4097}, "within its sliding_window"),
    ("nemotron_h", {}, "time steps"),
    ("apertus", {}, "1e-3"),
    ("deepseek_v2", {}, "by 0.2"),
    ("deepseek_v3", {}, "by 0.2"),
    ("deepseek_v3", {"config": ALL_DENSE}, None),
    ("ernie4_5_moe", {}, None),
    ("ernie4_5_moe", {"on_gpu": False}, "bias of its router"),
    ("gemma2", {}, None),
    ("gemma2", {"config": {"tie_word_embeddings": False}}, "ties its head"),
    ("olmo_hybrid", {}, None),
    ("olmo_hybrid", {"on_gpu": False}, "on GPUs alone"),
    ("qwen3_next", {}, None),
    ("qwen3_next", {"on_gpu": False, "config": DELTA_NET}, None),
    ("qwen3_next", {"on_gpu": False, "config": {"linear_key_head_dim": 64}}, "heads of 128"),
    ("qwen3_5", {"on_gpu": False, "dtype": torch.float32}, "--dtype bf16, or --engine hf"),
    ("qwen3_vl_moe", {}, "set norm_topk_prob to true"),
    ("qwen3_vl_moe", {"config": {"text_config": {"norm_topk_prob": False}}}, "norm_topk_prob"),
    ("qwen3_vl_moe", {"config": {"text_config": {"norm_topk_prob": True}}}, None),
]


@pytest.mark.parametrize("kind, changes, reason", SETTINGS)
def test_what_vllm_computes_differently_is_refused_with_the_way_that_works(kind, changes, reason):
    refusal = why_refused(setting_of(kind, **changes))
    if reason is None:
        assert refusal is None
    else:
        assert reason in refusal and "; " in refusal

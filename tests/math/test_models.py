"""Models that are refused before they would train on the log-probs of another model, and the files
of an export."""

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

import pytest
import torch
from helpers import ROOT, deadline
from pydantic import BaseModel, field_validator
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import common.models
import grpo
from common.engine.vllm import refuse_other_files, start_errors
from common.exactness import check_policy, exact_attention, refuse_inexact, why_unsupported
from common.export import export_hugging_face
from common.flags import Machine
from common.hub import FOLDERS, JSON_FILES, load_tokenizer, require_weights, resolve_model
from common.job import Job
from common.machines import facts_of_machine
from common.models import Policy, load_model
from common.packing import TokenIndex, pack
from common.torch_repair import TESTED, check_version, check_versions
from common.types import Episode
from ppo import Critic

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.mark.parametrize(
    "kind, options, in_packs, in_rows",
    [
        ("llama", {}, None, None),
        ("qwen2", {}, None, None),
        ("qwen3", {}, None, None),
        ("mistral", {"sliding_window": 8}, None, None),
        ("gemma2", {}, None, None),
        ("granite", {"logits_scaling": 8.0}, None, None),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, None, None),
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}, None, None),
        ("mamba2", {"num_heads": 2, "head_dim": 64}, "linear_attention", None),
        ("bloom", {}, "attention of its own", None),
        ("rwkv", {}, "recurrent layers", None),
        ("phi", {}, "head with a bias", "head with a bias"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "both directions", "both"),
    ],
)
def test_models_that_packs_or_rows_do_not_express_are_refused(kind, options, in_packs, in_rows):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**(SIZES | options)))
    for attention in ("sdpa", "flex", "flash", "rows"):
        found = why_unsupported(model, attention)
        expected = in_rows if attention == "rows" else in_packs
        if expected is None:
            assert found is None, attention
        else:
            assert expected in found, attention


def test_rows_are_chosen_for_what_packs_cannot_hold(capsys):
    with torch.device("meta"):
        llama = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**SIZES))
        bloom = AutoModelForCausalLM.from_config(CONFIG_MAPPING["bloom"](**SIZES))
    assert exact_attention(llama, "sdpa", Machine()) == "sdpa"
    assert capsys.readouterr().out == ""
    assert exact_attention(bloom, "sdpa", Machine()) == "rows"
    assert "--attention rows: bloom has an attention of its own" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--compile"):
        exact_attention(bloom, "flex", Machine(compile=True))
    # an explicit flag is kept, and refused with the way that works
    assert exact_attention(bloom, "sdpa", Machine(attention="sdpa")) == "sdpa"
    with pytest.raises(SystemExit, match=r"--model x: bloom .*; --attention rows reads it"):
        refuse_inexact(bloom, "sdpa", "--model x")


def test_a_leak_between_the_texts_of_a_pack_stops_the_run(tmp_path, monkeypatch):
    """A kernel for which a pack is one text."""
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    model.save_pretrained(tmp_path)
    policy = load_model(str(tmp_path), "sdpa")
    check_policy(policy, torch.float32, "--model x")
    assert policy.attention == "sdpa"
    hidden_states = common.models.hidden_states

    def one_text(model, batch, attention, vision):
        if attention == "sdpa":
            batch.units = [[batch.input_ids.shape[1]]]
        return hidden_states(model, batch, attention, vision)

    monkeypatch.setattr(common.models, "hidden_states", one_text)
    with pytest.raises(
        SystemExit, match=r"--model x: with --attention sdpa log-probs of a small .* away"
    ):
        check_policy(policy, torch.float32, "--model x")


def test_a_tied_model_with_a_head_of_its_own_is_refused(tmp_path):
    """transformers would not tie it, and FSDP2 would train the embeddings in its place."""
    config = CONFIG_MAPPING["qwen2"](**(SIZES | {"tie_word_embeddings": True}))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embeddings.clone()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    load_model(str(tmp_path), "sdpa")
    weights["lm_head.weight"] = torch.zeros_like(embeddings)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(SystemExit, match="have a head of their own"):
        load_model(str(tmp_path), "sdpa")


def test_loading_a_refused_model_names_it(tmp_path):
    config = CONFIG_MAPPING["phi"](**SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match=f"--model {tmp_path}: phi has a head with a bias"):
        load_model(str(tmp_path), "sdpa")


def test_a_checkpoint_without_one_of_its_tensors_is_refused_by_name(tmp_path):
    """transformers would go on from a random one."""
    shutil.copytree(FOLDERS["tiny"], tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    message = r"model: its files have no model\.layers\.1\.mlp\.up_proj\.weight"
    with pytest.raises(SystemExit, match=message):
        load_model(str(tmp_path / "model"), "sdpa")
    load_model(str(tmp_path / "model"), "sdpa", from_scratch=True)


def cut_in_half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGE = {  # how a folder is damaged, and the message
    "half of the weights": (
        lambda folder: cut_in_half(folder / "model.safetensors"),
        "files cannot be read",
    ),
    "Git LFS's pointer": (
        lambda folder: (folder / "model.safetensors").write_text("oid sha256:1"),
        "files cannot be",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "files hold no weights: neither model",
    ),
    "half of a tokenizer": (
        lambda folder: cut_in_half(folder / "tokenizer.json"),
        "files cannot be read",
    ),
    "no vocabulary": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        "files cannot be read",
    ),
    "half of a processor": (
        lambda f: cut_in_half(f / "processor_config.json"),
        "files cannot be read",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_model_is_named_in_a_line(damage, world, tmp_path, monkeypatch):
    """As an interrupted download leaves it, or a clone without Git LFS."""
    damage_folder, message = DAMAGE[damage]
    folder = tmp_path / "model"
    shutil.copytree(FOLDERS["tiny-vl"], folder)
    damage_folder(folder)
    monkeypatch.setattr("common.job.init_world", lambda *_: world)
    args = grpo.Args()
    args.run.model = str(folder)
    args.run.output_dir = tmp_path / "run"
    with pytest.raises(SystemExit, match=f"^--model {folder}: its {message}"):
        Job("grpo", args.data, args.machine, args.run, demo=False).load_policy()


NO_FILES = {  # what may be in the place of a file
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a dangling link": lambda file: file.symlink_to("../../blobs/0123"),
    "a link to itself": lambda file: file.symlink_to(file.name),
    "a device": lambda file: file.symlink_to("/dev/zero"),
}
NO_OBJECTS = {  # texts that are no JSON objects
    "nothing": "",
    "half": '{"a": ',
    "a list": "[]",
    "null": "null",
    "deep lists": "[" * 10**5,
}
MODEL_FILES = [
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "additional_chat_templates/tool_use.jinja",
]


@pytest.mark.parametrize("name", MODEL_FILES)
def test_what_is_no_file_of_a_model_is_named_and_not_waited_for(tmp_path, name, monkeypatch):
    """As in a hub's cache from which files were removed."""
    monkeypatch.setattr("common.machines.code_files", dict)  # 140 files, each time
    folder = shutil.copytree(FOLDERS["tiny"], tmp_path / "model")
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    for make in NO_FILES.values():
        file.unlink(missing_ok=True)
        make(file)
        with deadline(20), pytest.raises(SystemExit) as refusal:
            resolve_model(str(folder))
        text = str(refusal.value)
        assert text.startswith(f"--model {folder}: its files cannot be read")
        assert f": {file.name} is a " in text
        monkeypatch.setattr("sys.argv", ["ppo.py", "--critic-model", str(folder)])
        with deadline(20):
            facts_of_machine(str(folder))
        if file.is_dir():
            file.rmdir()


@pytest.mark.parametrize("name", sorted(JSON_FILES))
def test_what_holds_no_json_object_is_named(tmp_path, name):
    folder = shutil.copytree(FOLDERS["tiny"], tmp_path / "model")
    for text in NO_OBJECTS.values():
        (folder / name).write_text(text)
        with pytest.raises(SystemExit) as refusal:
            resolve_model(str(folder))
        text = str(refusal.value)
        assert f"{name} is no JSON" in text
        assert "\n" not in text


@pytest.mark.parametrize("ends", ['"<|end|>"', "[3, null]", "1.5", "[[3]]", "true", "{}"])
def test_end_tokens_that_are_none_are_named(tmp_path, ends):
    folder = shutil.copytree(FOLDERS["tiny"], tmp_path / "model")
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
    if ends == "[3, null]":
        resolve_model(str(folder))
        return
    message = r"generation_config\.json has the end token .*, which is no id"
    with pytest.raises(SystemExit, match=message):
        resolve_model(str(folder))


def cut_into_shards(folder: Path) -> None:
    """The weights in two files and an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    listed = {}
    for number, name in enumerate(sorted(weights)):
        listed[name] = f"model-0000{1 + number % 2}-of-00002.safetensors"
    for shard in set(listed.values()):
        save_file(
            {name: weights[name] for name in listed if listed[name] == shard},
            folder / shard,
            {"format": "pt"},
        )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": listed})
    )


def rewrite_index(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


FILES = {  # what is done to a model in two shards, and the message about it
    "nothing": (lambda folder: None, None),
    "a shard is missing": (
        lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
        r" has no model-00002-of-00002\.safetensors, which its index lists",
    ),
    "no index": (
        lambda folder: (folder / "model.safetensors.index.json").unlink(),
        ": its files hold no weights: neither model.safetensors nor "
        "model.safetensors.index.json nor",
    ),
    "an empty index": (rewrite_index(""), r": its files cannot be read .*index\.json is no JSON"),
    "half an index": (
        rewrite_index('{"weight_map": {'),
        r": its files cannot be read .*index\.json is no JSON",
    ),
    "an index without weights": (
        rewrite_index("{}"),
        ": model.safetensors.index.json lists no files of weights",
    ),
    "an index of none": (
        rewrite_index('{"weight_map": {}}'),
        ": model.safetensors.index.json lists no files",
    ),
    "an index of no files": (
        rewrite_index('{"weight_map": {"a": 1}}'),
        ": model.safetensors.index.json lists no files",
    ),
    "an index without metadata": (
        rewrite_index('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'),
        ': model.safetensors.index.json has no object "metadata"',
    ),
    "a model in one file, too": (
        lambda folder: shutil.copy(FOLDERS["tiny"] / "model.safetensors", folder),
        r" has its weights twice: in model\.safetensors, and in "
        r"model-00001-of-00002\.safetensors, model-00002-of",
    ),
    "a shard lacks what the index lists": (
        lambda folder: save_file(
            {"a": torch.zeros(1)}, folder / "model-00001-of-00002.safetensors"
        ),
        r": its files have no lm_head\.weight, but a, for which Qwen2ForCausalLM has no place",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_the_files_of_weights_are_looked_at_before_any_is_read(case, tmp_path):
    """By --critic-model, too; transformers and vLLM would fail late, or read one set of weights
    each."""
    change, message = FILES[case]
    folder = shutil.copytree(FOLDERS["tiny"], tmp_path / "model")
    cut_into_shards(folder)
    change(folder)
    for flag, make in (("--model", Policy), ("--critic-model", Critic)):
        if message is None:
            load_model(str(folder), "sdpa", flag=flag, model_class=make)
        elif make is Policy or case != "a shard lacks what the index lists":
            with pytest.raises(SystemExit, match=f"^{flag} {folder}{message}"):
                load_model(str(folder), "sdpa", flag=flag, model_class=make)


def test_an_index_of_a_single_file_is_no_second_model(tmp_path):
    folder = shutil.copytree(FOLDERS["tiny"], tmp_path / "model")
    rewrite_index('{"metadata": {}, "weight_map": {"lm_head.weight": "model.safetensors"}}')(folder)
    assert require_weights(str(folder)) == [folder / "model.safetensors"]


WRAPPED = "a wrapper was saved"
NAMES = {  # how weights are named, and the message about it
    "compiled": (
        lambda name: f"_orig_mod.{name}",
        rf"no lm_head\.weight, but _orig_mod\.lm_head\.weight: {WRAPPED}",
    ),
    "parallel": (
        lambda name: f"module.{name}",
        rf"no lm_head\.weight, but module\.lm_head\.weight: {WRAPPED}",
    ),
    "both": (
        lambda name: f"module._orig_mod.{name}",
        rf"no lm_head\.weight, but module\._orig_mod\..*: {WRAPPED}",
    ),
    "PEFT's": (
        lambda name: f"base_model.model.{name}",
        rf"no lm_head\.weight, but base_model\.model\..*: {WRAPPED}",
    ),
    "checkpointed": (
        lambda name: name.replace("mlp", "mlp._checkpoint_wrapped_module"),
        r"no model\.layers\.0\.mlp\.down_proj\.weight, but model\.layers\.0\.mlp\._check.*, "
        r"for which",
    ),
    "of another layer": (
        lambda name: name.replace("layers.0", "layers.9"),
        r"no model\.layers\.0\..*, but model\.layers\.9\..*, for which Qwen2ForCausalLM has "
        r"no place",
    ),
}


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
@pytest.mark.parametrize("kind", NAMES)
def test_names_that_are_not_the_models_are_refused(kind, ending, tmp_path):
    """transformers would go on from random weights."""
    rename, message = NAMES[kind]
    folder = shutil.copytree(FOLDERS["tiny"], tmp_path / "model")
    weights = {
        rename(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()
    }
    if ending == "bin":
        (folder / "model.safetensors").unlink()
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(SystemExit, match=f"^--model {folder}: its files have {message}"):
        load_model(str(folder), "sdpa")
    if kind != "of another layer":
        backbone = message.replace(r"lm_head\.weight", r"model\.embed_tokens\.weight")
        message = f"^--critic-model {folder}: its files have {backbone}"
        with pytest.raises(SystemExit, match=message):
            load_model(str(folder), "sdpa", flag="--critic-model", model_class=Critic)


def test_weights_that_a_config_has_no_place_for_are_refused(tmp_path):
    """transformers would leave a layer out, or a bias; a head is the critic's to leave out."""
    folder = shutil.copytree(FOLDERS["tiny"], tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    for name, also_for_critics in (
        ("model.layers.4.mlp.up_proj.weight", True),
        ("v_head.summary.weight", False),
    ):
        save_file(weights | {name: torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})
        message = f"^--model {folder}: its files have {name}, for which Qwen2ForCausalLM"
        with pytest.raises(SystemExit, match=message):
            load_model(str(folder), "sdpa")
        message = f"^--critic-model {folder}: its files have {name}, for which"
        with pytest.raises(SystemExit, match=message) if also_for_critics else nullcontext():
            load_model(str(folder), "sdpa", flag="--critic-model", model_class=Critic)
    save_file(
        weights | {"model.norm.weight": torch.zeros(2)},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    message = r"its files have model\.norm\.weight with shape \[2\], and its config\.json wants"
    with pytest.raises(SystemExit, match=message):
        load_model(str(folder), "sdpa")
    # older files hold what a model computes by itself
    computed = {
        "model.rotary_emb.inv_freq": torch.zeros(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    save_file(weights | computed, folder / "model.safetensors", {"format": "pt"})
    load_model(str(folder), "sdpa")


@pytest.mark.parametrize("flag", ["--model", "--critic-model", "--reward-model"])
def test_an_adapter_is_refused_beside_a_model_and_alone(flag, tmp_path):
    """transformers would add it to the model, and vLLM not."""
    folder = shutil.copytree(FOLDERS["tiny"], tmp_path / "model")
    adapter = folder / "adapter_config.json"
    adapter.write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}')
    message = f"^{flag} {folder}: an adapter lies beside the model .adapter_config.json.: "
    with pytest.raises(SystemExit, match=message):
        resolve_model(str(folder), flag)
    (folder / "config.json").unlink()
    message = f"^{flag} {folder}: an adapter of org/base: merge the two"
    with pytest.raises(SystemExit, match=message):
        resolve_model(str(folder), flag)
    adapter.write_text('{"base_model_name_or_path": null}')
    message = f"^{flag} {folder}: an adapter of a model that it does not name: "
    with pytest.raises(SystemExit, match=message):
        resolve_model(str(folder), flag)
    for text in NO_OBJECTS.values():
        adapter.write_text(text)
        with pytest.raises(SystemExit, match=f"^{flag} {folder}: .*adapter_config.json is no JSON"):
            resolve_model(str(folder), flag)


def test_what_vllm_alone_would_read_is_refused(tmp_path):
    folder = shutil.copytree(FOLDERS["tiny"], tmp_path / "model")
    refuse_other_files(str(folder))
    save_file({"a": torch.zeros(1)}, folder / "adapter_model.safetensors")
    message = r"vLLM would read adapter_model\.safetensors, too, .*: move it elsewhere"
    with pytest.raises(SystemExit, match=message):
        refuse_other_files(str(folder))
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.rename(tmp_path / weights.name)
    with pytest.raises(SystemExit, match=r"vLLM would read adapter_model\.safetensors, too"):
        refuse_other_files(str(folder))  # and nothing else
    (tmp_path / weights.name).rename(weights)
    cut_into_shards(folder)
    refuse_other_files(str(folder))  # the index tells it apart


class Settings(BaseModel):
    max_model_len: int

    @field_validator("max_model_len")
    @classmethod
    def check(cls, value: int) -> int:
        raise ValueError(
            "the head size 16 is unknown" if value else "max_model_len (0) is too small"
        )


@pytest.mark.parametrize(
    "start, message",
    [
        (lambda: int("x"), "--model /memory/max_model_len: vLLM does not take it: invalid literal"),
        (
            lambda: Settings(max_model_len=1),
            "--model /.*: vLLM does not take it: Value error, the head size 16 is",
        ),
        (lambda: {}["a.weight"], "--model /.*: vLLM does not take it: KeyError: 'a.weight'"),
        (
            lambda: Path("/memory/max_model_len/x").read_text(),
            "--model /.*: vLLM does not take it: .*No such file",
        ),
        (
            lambda: Settings(max_model_len=0),
            "--max-prompt-tokens, --max-response-tokens, --engine-memory: Value error",
        ),
    ],
    ids=["a value", "a setting", "a name", "a file", "a length"],
)
def test_only_what_names_a_length_or_memory_is_put_down_to_their_flags(start, message):
    """pydantic shows all settings in each of its errors, and a folder may be called anything."""
    with (
        pytest.raises(SystemExit, match=f"^{message}") as refusal,
        start_errors("/memory/max_model_len"),
    ):
        start()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "end", ["{% for message in messages %}{{ message", "{% if messages %}x", "{{ 1 +"]
)
def test_a_cut_chat_template_is_named_where_it_is_read(tmp_path, end):
    """Otherwise each row would be reported as unusable."""
    folder = shutil.copytree(FOLDERS["tiny"], tmp_path / "model")
    (folder / "chat_template.jinja").write_text(end)
    message = rf"{folder}: its chat template is damaged \(line 1: .*\): fetch"
    with pytest.raises(SystemExit, match=message):
        load_tokenizer(str(folder))
    (folder / "chat_template.jinja").write_text(
        "{{ raise_exception('it wants a system message') }}"
    )
    load_tokenizer(str(folder))


def test_damaged_weights_are_refused_before_the_engine_reads_them(world, tmp_path, monkeypatch):
    folder = shutil.copytree(FOLDERS["tiny"], tmp_path / "model")
    cut_in_half(folder / "model.safetensors")
    monkeypatch.setattr("common.job.init_world", lambda *_: world)
    args = grpo.Args()
    args.run.model = str(folder)
    args.run.output_dir = tmp_path / "run"
    with pytest.raises(SystemExit, match=f"^--model {folder}: its files cannot be read"):
        Job("grpo", args.data, args.machine, args.run, demo=False)


def test_a_reward_models_backbone_may_be_the_critics_and_no_policy(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
    config = CONFIG_MAPPING["qwen2"](
        **sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False
    )
    config.num_labels = 1
    scorer = AutoModelForSequenceClassification.from_config(config)
    scorer.save_pretrained(tmp_path)
    critic = load_model(str(tmp_path), "sdpa", model_class=Critic)
    assert torch.equal(
        critic.model.layers[1].mlp.up_proj.weight, scorer.model.layers[1].mlp.up_proj.weight
    )
    with pytest.raises(SystemExit, match=r"its files have no lm_head\.weight"):
        load_model(str(tmp_path), "sdpa")


def test_a_critic_has_positions_for_what_is_sampled():
    """Of the policy its engine says so."""
    message = r"2049 tokens together, and --critic-model .* has 2048 positions"
    with pytest.raises(SystemExit, match=message):
        load_model(str(FOLDERS["tiny"]), "sdpa", model_class=Critic, max_model_len=2049)
    load_model(str(FOLDERS["tiny"]), "sdpa", model_class=Critic, max_model_len=2048)


def test_there_is_no_dropout(tmp_path):
    config = CONFIG_MAPPING["gpt2"](
        n_embd=64, n_layer=2, n_head=4, vocab_size=128, bos_token_id=0, eos_token_id=0
    )
    assert config.resid_pdrop == config.attn_pdrop == 0.1
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    episode = Episode(0, 0, list(range(30)), list(range(30, 60)), [1] * 30, [0.0] * 30)
    (batch,) = pack([episode], [0], TokenIndex([episode]), budget=100)
    policy = load_model(str(tmp_path), "sdpa")
    with torch.no_grad():
        assert policy.training
        assert torch.equal(policy(batch)[0], policy(batch)[0])


def test_a_folder_that_is_no_model_is_refused_by_name(tmp_path):
    """Such as a run's folder, whose config.json holds arguments."""
    assert resolve_model("tiny") == resolve_model(str(FOLDERS["tiny"]))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match=f"--critic-model {tmp_path}: .* take its model/"):
        resolve_model(str(tmp_path), "--critic-model")


def test_an_export_with_several_chat_templates_is_readable_and_can_be_repeated(tmp_path, world):
    """They are saved as a folder."""
    tokenizer = load_tokenizer(str(FOLDERS["tiny"]))
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ messages }}"}
    policy = load_model(str(FOLDERS["tiny"]), "sdpa")
    for _ in range(2):
        export_hugging_face(policy, tokenizer, tmp_path / "model", world, torch.bfloat16)
        assert set(load_tokenizer(str(tmp_path / "model")).chat_template) == {"default", "tool_use"}
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
        assert modes["model.safetensors"] == 0o644
        assert modes["additional_chat_templates"] & 0o100


def test_another_version_of_transformers_is_named(capsys):
    (pinned,) = re.findall(
        r"^transformers==(.*)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE
    )
    check_version("transformers", pinned)
    assert not capsys.readouterr().err
    for version in ("5.15.0", "5.20.0", "6.0.dev0"):
        check_version("transformers", version)
        assert (
            f"warning: transformers {version} is installed, tested is 5.16.1 to"
            in capsys.readouterr().err
        )


def test_what_the_requirements_pin_is_tested(capsys, monkeypatch):
    """And what is installed here; a torch or a vLLM that is not is named once."""
    pins = "".join(path.read_text() for path in ROOT.glob("requirements*.txt"))
    for package in TESTED:
        for version in re.findall(rf"^{package}==(.*)$", pins, re.MULTILINE):
            check_version(package, version)
            check_version(package, f"{version}+cu126")
    check_versions()
    assert not capsys.readouterr().err
    versions = {"torch": "2.14.1+cpu", "transformers": "5.19.0", "vllm": "0.25.1"}

    def version_of(package: str) -> str:
        if package not in versions:
            raise metadata.PackageNotFoundError
        return versions[package]

    monkeypatch.setattr("common.torch_repair.metadata.version", version_of)
    check_versions()
    assert capsys.readouterr().err == (
        "warning: torch 2.14.1+cpu is installed, tested is 2.11 to below 2.14: "
        "install what requirements.txt (-cpu, -v100) pins\n"
        "warning: vllm 0.25.1 is installed, tested is 0.26 to below 0.33: "
        "install what requirements.txt (-cpu, -v100) pins\n"
    )

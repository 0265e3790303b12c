"""What is refused as a model, before it would train on log-probs of another one; and what an export leaves behind."""

import json
import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from helpers import ROOT, deadline
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import grpo
from common.episodes import Episode
from common.hub import FOLDERS, OBJECTS, load_tokenizer, require_weights, resolve_model
from common.job import Job, describe_run
from common.models import Critic, load_policy, unsupported
from common.packing import TokenIndex, pack
from common.prepare.export import export_hugging_face
from common.torch_repair import check_version

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "pad_token_id": 0}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}


@pytest.mark.parametrize(
    "kind, options, problem, with_flash",
    [
        ("llama", {}, None, None),
        ("qwen2", {}, None, None),
        ("qwen3", {}, None, None),
        ("mistral", {"sliding_window": None}, None, None),
        ("mistral", {"sliding_window": 8}, "sliding windows", None),
        ("mixtral", {"sliding_window": 8}, "sliding windows", None),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding windows", None),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "conv layers", "conv layers"),
        (
            "qwen3_next",
            {"layer_types": ["linear_attention", "full_attention"]},
            "linear_attention",
            "linear_attention",
        ),
        ("bloom", {}, "attention of its own", "attention of its own"),
        ("rwkv", {}, "recurrent layers", "recurrent layers"),
        ("granite", {"logits_scaling": 8.0}, "rescales its logits (logits_scaling)", "rescales its logits"),
        ("phi", {}, "head with a bias", "head with a bias"),
    ],
)
def test_models_that_packs_masks_or_log_probs_do_not_express_are_refused(kind, options, problem, with_flash):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**(SIZES | options)))
    for attention, expected in (("sdpa", problem), ("flex", problem), ("flash", with_flash)):
        found = unsupported(model, attention)
        assert (found is None) == (expected is None) and (expected or "") in (found or ""), (attention, found)


def test_a_tied_model_with_a_head_of_its_own_is_refused(tmp_path):
    """transformers would not tie it, and FSDP2 would train the embeddings in its place."""
    config = CONFIG_MAPPING["qwen2"](**(SIZES | {"tie_word_embeddings": True}))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for own, refused in ((weights["model.embed_tokens.weight"].clone(), False), (torch.zeros(1), True)):
        weights["lm_head.weight"] = own.expand_as(weights["model.embed_tokens.weight"]).contiguous()
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(SystemExit, match="have a head of their own") if refused else nullcontext():
            load_policy(str(tmp_path), "sdpa")


def test_loading_a_refused_model_names_it(tmp_path):
    config = CONFIG_MAPPING["mistral"](**(SIZES | {"sliding_window": 8}))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match=f"--model {tmp_path}: mistral has sliding windows"):
        load_policy(str(tmp_path), "sdpa")


def test_a_checkpoint_without_one_of_its_tensors_is_refused_by_name(tmp_path):
    """transformers would go on from a random one."""
    shutil.copytree(FOLDERS["tiny"], tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(SystemExit, match=r"model: its files have no model\.layers\.1\.mlp\.up_proj\.weight"):
        load_policy(str(tmp_path / "model"), "sdpa")
    load_policy(str(tmp_path / "model"), "sdpa", from_scratch=True)


def cut_in_half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGE = {
    "half of the weights": (lambda folder: cut_in_half(folder / "model.safetensors"), "files cannot be read"),
    "Git LFS's pointer": (lambda folder: (folder / "model.safetensors").write_text("oid sha256:1"), "files cannot be"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "weights cannot be read .*no file named"),
    "half of a tokenizer": (lambda folder: cut_in_half(folder / "tokenizer.json"), "files cannot be read"),
    "no vocabulary": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "files cannot be read"),
    "half of a processor": (lambda f: cut_in_half(f / "processor_config.json"), "files cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_model_is_named_in_a_line(damage, world, tmp_path, monkeypatch):
    """As a download that was broken off leaves it, or a clone without Git LFS."""
    make, told = DAMAGE[damage]
    folder = tmp_path / "model"
    shutil.copytree(FOLDERS["tiny-vl"], folder)
    make(folder)
    monkeypatch.setattr("common.job.init_world", lambda *_: world)
    args = grpo.Args()
    args.run.model, args.run.output_dir = str(folder), tmp_path / "run"
    with pytest.raises(SystemExit, match=f"^--model {folder}: its {told}"):
        Job("grpo", args.data, args.machine, args.run, demo=False).load_policy()


INSTEAD = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a dangling link": lambda file: file.symlink_to("../../blobs/0123"),
    "a link to itself": lambda file: file.symlink_to(file.name),
    "a device": lambda file: file.symlink_to("/dev/zero"),
}
NO_OBJECTS = {"nothing": "", "half": '{"a": ', "a list": "[]", "null": "null", "deep lists": "[" * 10**5}
MODEL_FILES = ["chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
MODEL_FILES += ["tokenizer_config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
MODEL_FILES += ["pytorch_model.bin", "additional_chat_templates/tool_use.jinja"]


@pytest.mark.parametrize("name", MODEL_FILES)
def test_what_is_no_file_of_a_model_is_named_and_not_waited_for(tmp_path, name, monkeypatch):
    """As a hub's cache has it from which files were removed."""
    folder = shutil.copytree(FOLDERS["tiny"], tmp_path / "model")
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    for put in INSTEAD.values():
        file.unlink(missing_ok=True)
        put(file)
        with deadline(20), pytest.raises(SystemExit) as refusal:
            resolve_model(str(folder))
        said = str(refusal.value)
        assert said.startswith(f"--model {folder}: its files cannot be read") and f": {file.name} is a " in said
        monkeypatch.setattr("sys.argv", ["ppo.py", "--critic-model", str(folder)])
        with deadline(20):
            describe_run(str(folder))
        if file.is_dir():
            file.rmdir()


@pytest.mark.parametrize("name", sorted(OBJECTS))
def test_what_holds_no_json_object_is_named(tmp_path, name):
    folder = shutil.copytree(FOLDERS["tiny"], tmp_path / "model")
    for text in NO_OBJECTS.values():
        (folder / name).write_text(text)
        with pytest.raises(SystemExit) as refusal:
            resolve_model(str(folder))
        said = str(refusal.value)
        assert f"{name} is no JSON" in said and "\n" not in said


@pytest.mark.parametrize("ends", ['"<|end|>"', "[3, null]", "1.5", "[[3]]", "true", "{}"])
def test_end_tokens_that_are_none_are_named(tmp_path, ends):
    folder = shutil.copytree(FOLDERS["tiny"], tmp_path / "model")
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
    if ends == "[3, null]":
        resolve_model(str(folder))
        return
    with pytest.raises(SystemExit, match=r"generation_config\.json has the end token .*, which is no id"):
        resolve_model(str(folder))


def test_missing_weights_are_told_before_the_engine_misses_them(tmp_path):
    """A part of several, or all; what has its weights in parts needs no other file."""
    folder = shutil.copytree(FOLDERS["tiny"], tmp_path / "model")
    require_weights(str(folder))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    with pytest.raises(SystemExit, match=r"model has no model-00002-of-00002\.safetensors, which its index lists"):
        require_weights(str(folder))
    (folder / "model-00002-of-00002.safetensors").touch()
    require_weights(str(folder))
    for name in parts.values():
        (folder / name).unlink()
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(SystemExit, match=r"model has no weights: neither \*\.safetensors nor"):
        require_weights(str(folder))


@pytest.mark.parametrize("end", ["{% for message in messages %}{{ message", "{% if messages %}x", "{{ 1 +"])
def test_a_cut_chat_template_is_named_where_it_is_read(tmp_path, end):
    """Else each row would be told to be unusable."""
    folder = shutil.copytree(FOLDERS["tiny"], tmp_path / "model")
    (folder / "chat_template.jinja").write_text(end)
    with pytest.raises(SystemExit, match=rf"{folder}: its chat template is damaged \(line 1: .*\): fetch"):
        load_tokenizer(str(folder))
    (folder / "chat_template.jinja").write_text("{{ raise_exception('it wants a system message') }}")
    load_tokenizer(str(folder))


def test_damaged_weights_are_refused_before_the_engine_reads_them(world, tmp_path, monkeypatch):
    folder = shutil.copytree(FOLDERS["tiny"], tmp_path / "model")
    cut_in_half(folder / "model.safetensors")
    monkeypatch.setattr("common.job.init_world", lambda *_: world)
    args = grpo.Args()
    args.run.model, args.run.output_dir = str(folder), tmp_path / "run"
    with pytest.raises(SystemExit, match=f"^--model {folder}: its files cannot be read"):
        Job("grpo", args.data, args.machine, args.run, demo=False)


def test_a_reward_models_backbone_may_be_the_critics_and_no_policy(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
    config = CONFIG_MAPPING["qwen2"](**sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False)
    config.num_labels = 1
    scorer = AutoModelForSequenceClassification.from_config(config)
    scorer.save_pretrained(tmp_path)
    critic = load_policy(str(tmp_path), "sdpa", make=Critic)
    assert torch.equal(critic.model.layers[1].mlp.up_proj.weight, scorer.model.layers[1].mlp.up_proj.weight)
    with pytest.raises(SystemExit, match=r"its files have no lm_head\.weight"):
        load_policy(str(tmp_path), "sdpa")


def test_there_is_no_dropout(tmp_path):
    config = CONFIG_MAPPING["gpt2"](n_embd=64, n_layer=2, n_head=4, vocab_size=128, bos_token_id=0, eos_token_id=0)
    assert config.resid_pdrop == config.attn_pdrop == 0.1
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    episode = Episode(0, 0, list(range(30)), list(range(30, 60)), [1] * 30, [0.0] * 30)
    (batch,) = pack([episode], [0], TokenIndex([episode]), budget=100)
    policy = load_policy(str(tmp_path), "sdpa")
    with torch.no_grad():
        assert policy.training and torch.equal(policy(batch)[0], policy(batch)[0])


def test_a_folder_that_is_no_model_is_refused_by_name(tmp_path):
    """Such as a run's folder, whose config.json holds arguments."""
    assert resolve_model("tiny") == resolve_model(str(FOLDERS["tiny"]))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match=f"--critic-model {tmp_path}: .* give its model/"):
        resolve_model(str(tmp_path), "--critic-model")


def test_an_export_with_several_chat_templates_is_readable_and_can_be_repeated(tmp_path, world):
    """They are saved as a folder."""
    tokenizer = load_tokenizer(str(FOLDERS["tiny"]))
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ messages }}"}
    policy = load_policy(str(FOLDERS["tiny"]), "sdpa")
    for _ in range(2):
        export_hugging_face(policy, tokenizer, tmp_path / "model", world, torch.bfloat16)
        assert set(load_tokenizer(str(tmp_path / "model")).chat_template) == {"default", "tool_use"}
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
        assert modes["model.safetensors"] == 0o644 and modes["additional_chat_templates"] & 0o100


def test_another_version_of_transformers_is_named(capsys):
    (pinned,) = re.findall(r"^transformers==(.*)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    check_version(pinned)
    assert not capsys.readouterr().err
    for version in ("5.15.0", "5.20.0", "6.0.dev0"):
        check_version(version)
        assert f"warning: transformers {version} is installed, tested is 5.16.1 to" in capsys.readouterr().err

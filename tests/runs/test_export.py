"""common.export: a checkpoint becomes the folder that its run writes at the end, byte for byte."""

import json
import re
import shutil
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from helpers import ROOT, run_script, save_checkpoint
from model_folders import same_files
from safetensors.torch import load_file
from transformers import GenerationConfig
from vl import write_random, write_tiny_vl

from common.distributed import World
from common.export import Args, export_hugging_face, main, open_checkpoint
from common.hub import FOLDERS, load_tokenizer
from common.machines import lock_everywhere
from common.manifest import MANIFEST, digest, make_unfinished, model_identity
from common.models import load_model
from common.pictures import PixelLimits
from common.vision import load_vision
from ppo import Critic

SIZES = [
    "--prompts-per-step",
    2,
    "--samples-per-prompt",
    2,
    "--max-response-tokens",
    8,
    "--engine",
    "hf",
]
SIZES += ["--minibatches", 1, "--no-eval-before", "--eval-rows", 1, "--max-rows", 8]
ALONE = World(0, 1, 0, torch.device("cpu"))


@pytest.fixture(scope="module")
def run(tmp_path_factory, world):
    """A checkpoint of a policy and a critic, as PPO's; those of whole runs are exported in
    test_grpo_runs.py."""
    folder, policy = tmp_path_factory.mktemp("runs") / "ppo", load_model(FOLDERS["tiny"], "sdpa")
    trained = {
        "policy": (policy, None),
        "critic": (load_model(FOLDERS["tiny"], "sdpa", model_class=Critic), None),
    }
    identity = {"script": "ppo", "model": model_identity(FOLDERS["tiny"])}
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01)
    save_checkpoint(folder, 1, trained, world, identity=identity)
    export_hugging_face(
        policy, load_tokenizer(FOLDERS["tiny"]), folder / "model", ALONE, torch.float32
    )
    return folder


def test_the_export_is_the_runs_model(run, tmp_path, capsys):
    """Its dtype too, where the run has come to its end."""
    for name in (run, run / "checkpoints/latest", run / "checkpoints/step_000001"):
        main(Args(name, "tiny", tmp_path / name.name))
        same_files(tmp_path / name.name, run / "model")
        assert "step_000001 in torch.float32" in capsys.readouterr().out
    main(Args(run, "tiny", tmp_path / "half", dtype="fp16"))
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "float16"


def test_checkpoints_may_lie_on_another_disk(run, tmp_path):
    """What is asked of the run (its dtype, whether tools answered) stands beside the link."""
    shutil.copytree(run / "checkpoints", tmp_path / "large/disk", symlinks=True)
    shutil.copytree(run / "model", tmp_path / "run/model")
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "large/disk")
    main(Args(tmp_path / "run", "tiny", tmp_path / "out"))
    same_files(tmp_path / "out", run / "model")


def test_what_is_damaged_or_of_another_model_is_not_exported(run, tmp_path):
    with pytest.raises(SystemExit, match="is of another architecture than --model tiny-vl"):
        main(Args(run, "tiny-vl", tmp_path / "out"))
    with pytest.raises(SystemExit, match="is there already"):
        main(Args(run, "tiny", tmp_path))
    with pytest.raises(SystemExit, match="no checkpoint there"):
        main(Args(tmp_path, "tiny", tmp_path / "out"))
    copy = tmp_path / "checkpoints/step_000001"
    shutil.copytree(run / "checkpoints/step_000001", copy)
    shard = next((copy / "state").glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(SystemExit, match=f"has a damaged state/{shard.name}"):
        main(Args(copy, "tiny", tmp_path / "out"))
    shard.unlink()
    with pytest.raises(SystemExit, match=f"has no state/{shard.name}"):
        main(Args(copy, "tiny", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_from_within_the_folder_of_checkpoints(run, tmp_path, monkeypatch):
    """What a checkpoint's run says is beside it, also where its path is short."""
    monkeypatch.chdir(run / "checkpoints")
    for name in ("latest", "step_000001"):
        main(Args(Path(name), "tiny", tmp_path / name))
        same_files(tmp_path / name, run / "model")


@pytest.mark.parametrize(
    "listed, own, kept",
    [
        (
            {"eos_token_id": 3, "top_p": 0.6, "do_sample": True},
            5,
            {"eos_token_id": [3, 5], "top_p": 0.6},
        ),
        ({"eos_token_id": [3, 5]}, 5, {"eos_token_id": [3, 5]}),
        # as Vicuna's: transformers would not save it
        ({"temperature": 0.9, "top_p": 0.6}, 5, {"eos_token_id": [5]}),
        ({"eos_token_id": 3, "pad_token_id": -1}, 5, {"eos_token_id": [3, 5]}),
    ],
)
def test_generation_ends_where_the_policy_does(tmp_path, listed, own, kept, capsys):
    policy, tokenizer = load_model(FOLDERS["tiny"], "sdpa"), load_tokenizer(FOLDERS["tiny"])
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(own)
    policy.model.generation_config = GenerationConfig.from_dict(listed)
    export_hugging_face(policy, tokenizer, tmp_path / "model", ALONE, torch.float32)
    saved = json.loads((tmp_path / "model/generation_config.json").read_text())
    assert {name: saved.get(name) for name in ("temperature", *kept)} == {
        "temperature": None,
        **kept,
    }
    refused = bool(listed.keys() & {"temperature", "pad_token_id"})
    assert ("generation_config.json has end tokens alone" in capsys.readouterr().out) == refused


@pytest.mark.parametrize("flag, changes", [("model", 0), ("tools", 1), ("environment", 1)])
def test_the_end_token_is_the_runs(run, tmp_path, monkeypatch, flag, changes):
    """Where somebody answers the policy, a run makes what ends the template's turns the end
    token."""
    shutil.copytree(run / "checkpoints", tmp_path / "run/checkpoints", symlinks=True)
    (tmp_path / "run/config.json").write_text(json.dumps({"args": {flag: "game.py:Game"}}))
    asked: list[tuple] = []
    monkeypatch.setattr("common.export.end_turns_properly", lambda *given: asked.append(given))
    main(Args(tmp_path / "run", "tiny", tmp_path / "out"))
    assert len(asked) == changes


def test_a_vision_language_model_keeps_the_names_of_its_files(tmp_path, world):
    """Published ones name the tower otherwise than transformers does. How it is sampled from stays
    the base's, too."""
    base = write_tiny_vl(tmp_path / "base")
    (base / "generation_config.json").write_text('{"do_sample": true, "top_p": 0.9}')
    vision, tokenizer = (
        load_vision(str(base), PixelLimits(784, 7840, 784)),
        load_tokenizer(str(base)),
    )
    policy = load_model(str(base), "sdpa", vision=vision)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01)
    identity = {"script": "grpo", "model": model_identity(base)}
    save_checkpoint(tmp_path / "run", 3, {"policy": (policy, None)}, world, identity=identity)
    export_hugging_face(policy, tokenizer, tmp_path / "expected", ALONE, torch.bfloat16)
    main(Args(tmp_path / "run", str(base), tmp_path / "out"))
    same_files(tmp_path / "out", tmp_path / "expected")
    names = load_file(tmp_path / "out/model.safetensors").keys()
    assert {
        "visual.patch_embed.proj.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    } <= names


def as_published_for_transformers_4(folder: Path) -> Path:
    """The same model in its spelling: flat, with `rope_theta`; a tokenizer class that it has; files
    of processors."""
    config = json.loads((folder / "config.json").read_text())
    config |= config.pop("text_config", {}) | {"model_type": config["model_type"]}
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["torch_dtype"] = config.pop("dtype")
    config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    if "mrope_section" in rope:
        config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["chat_template"] = (folder / "chat_template.jinja").read_text()
    settings["additional_special_tokens"] = settings.pop("extra_special_tokens", [])
    del settings["backend"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": settings["eos_token"]}})
    )
    if (folder / "processor_config.json").is_file():
        parts = json.loads((folder / "processor_config.json").read_text())
        processor = parts["image_processor"] | {"processor_class": parts["processor_class"]}
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
        (folder / "processor_config.json").unlink()
    return folder


LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 128, "rope_theta": 500000.0}
PUBLISHED = {
    "qwen2": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "attention_dropout": 0.1,
    },
    "llama": {"rope_parameters": LLAMA_3},
    "qwen2_5_vl": {},
}


def export_published(folder: Path, kind: str) -> tuple[Path, Path]:
    """(a source in the spelling of transformers 4, its export in float16)."""
    if kind == "qwen2_5_vl":
        source = write_tiny_vl(folder / "source")
    else:
        source = write_random(folder / "source", kind, **deepcopy(PUBLISHED[kind]))
    as_published_for_transformers_4(source)
    vision, tokenizer = (
        load_vision(str(source), PixelLimits(784, 7840, 784)),
        load_tokenizer(str(source)),
    )
    tokenizer.eos_token = tokenizer.pad_token  # as `end_turns_properly` may change it
    policy = load_model(str(source), "sdpa", vision=vision)
    export_hugging_face(policy, tokenizer, folder / "export", ALONE, torch.float16)
    return source, folder / "export"


@pytest.mark.parametrize("kind", PUBLISHED)
def test_an_export_keeps_what_its_source_had(kind, tmp_path, capsys):
    """What transformers 5 alone knows stands beside it, but for a text part that would be read in
    its place."""
    source, export = export_published(tmp_path, kind)
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (source, export)
    )
    assert after["dtype"] == after["torch_dtype"] == "float16"
    kept = {
        name: value
        for name, value in before.items()
        if name not in ("torch_dtype", "vision_config")
    }
    assert {name: after[name] for name in kept} == kept
    if kind == "qwen2_5_vl":
        assert (
            "text_config" not in after
            and after["vision_config"].items() >= {"dtype": "float16"}.items()
        )
    else:
        assert after["rope_parameters"]["rope_theta"] == before["rope_theta"]
    settings = json.loads((export / "tokenizer_config.json").read_text())
    expected = json.loads((source / "tokenizer_config.json").read_text())
    expected["eos_token"] = expected["pad_token"]
    assert settings == expected, "its class, template, and additional_special_tokens"
    assert (
        json.loads((export / "special_tokens_map.json").read_text())["eos_token"]
        == settings["eos_token"]
    )
    missing = {file.name for file in source.iterdir()} - {file.name for file in export.iterdir()}
    assert not missing
    shutil.move(source, tmp_path / "elsewhere")
    again = load_model(
        str(export), "sdpa", vision=load_vision(str(export), PixelLimits(784, 7840, 784))
    )
    export_hugging_face(
        again, load_tokenizer(str(export)), tmp_path / "again", ALONE, torch.float16
    )
    same_files(export, tmp_path / "again")
    assert "warning" not in capsys.readouterr().out


def test_an_export_whose_source_is_gone_says_so(tmp_path, capsys):
    folder = shutil.copytree(FOLDERS["tiny"], tmp_path / "source")
    policy, tokenizer = load_model(str(folder), "sdpa"), load_tokenizer(str(folder))
    shutil.rmtree(folder)
    export_hugging_face(policy, tokenizer, tmp_path / "export", ALONE, torch.float32)
    output = capsys.readouterr().out
    assert f"warning: {folder} is gone" in output and ".tmp" not in output
    load_model(str(tmp_path / "export"), "sdpa")


def test_a_latest_that_leads_nowhere_is_told_with_what_to_give(tmp_path):
    folder = tmp_path / "checkpoints"
    (folder / "step_000002").mkdir(parents=True)
    (folder / "step_000002/manifest.json").write_text("{}")
    (folder / "latest").write_text("step_000009")
    with pytest.raises(SystemExit, match=r"give \S*/step_000002, the last one$") as stop:
        open_checkpoint(tmp_path)
    assert "--resume" not in str(stop.value), "which is a flag of runs"


@pytest.mark.slow
def test_transformers_4_reads_an_export_as_it_reads_the_source(tmp_path):
    """In an environment of its own, which takes all but transformers from this one."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "old"], check=True)
    python = tmp_path / "old/bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", "transformers>=4.57,<4.58"], check=True)
    (site_packages,) = (tmp_path / "old").glob("lib/python*/site-packages")
    (site_packages / "zz_beside.pth").write_text(str(Path(torch.__file__).parents[1]))
    for kind in PUBLISHED:
        folders = export_published(tmp_path / kind, kind)
        worker = ROOT / "tests/workers/read_export.py"
        done = subprocess.run([python, worker, *folders], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        source, export = (json.loads(line) for line in done.stdout.splitlines())
        assert source["version"].startswith("4.57") and export.pop("dtype") == "torch.float16"
        theirs, ours = source.pop("logits"), export.pop("logits")
        del source["dtype"], source["eos_token"]
        assert export.pop("eos_token") == load_tokenizer(str(folders[1])).eos_token
        assert export == source
        assert ours == pytest.approx(theirs, abs=0.05), "in half precision"
        model = load_model(
            str(folders[1]),
            "sdpa",
            vision=load_vision(str(folders[1]), PixelLimits(784, 7840, 784)),
        )
        model.model.set_attn_implementation("sdpa")
        with torch.no_grad():
            logits = model.model(torch.tensor([export["ids"] * 20])).logits[0, -1]
        assert logits.tolist() == pytest.approx(ours, abs=1e-3), "transformers 5"


def test_a_pickle_in_a_checkpoint_is_not_exported(run, tmp_path):
    """Nor executed, where the manifest promises it."""
    copy = tmp_path / "checkpoints/step_000001"
    shutil.copytree(run / "checkpoints/step_000001", copy)
    shard = next((copy / "state").glob("shard-*"))
    shard.write_bytes(b"cposix\nsystem\n(S'touch %s'\ntR." % str(tmp_path / "done").encode())
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["files"][f"state/{shard.name}"] = digest(shard)
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(SystemExit, match="cannot be read"):
        main(Args(copy, "tiny", tmp_path / "out"))
    assert not (tmp_path / "done").exists()


# --- what is not ours stays -----------------------------------------------------------------------


@pytest.fixture
def exported(tmp_path):
    """export(): into tmp_path/run/model, as a run does at its end; in words, why it did not."""
    policy, tokenizer = load_model(FOLDERS["tiny"], "sdpa"), load_tokenizer(FOLDERS["tiny"])

    def export() -> str:
        try:
            export_hugging_face(policy, tokenizer, tmp_path / "run/model", ALONE, torch.float32)
        except SystemExit as refusal:
            return str(refusal)
        return ""

    return export


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


@pytest.mark.parametrize("target", ["a folder", "nothing"])
def test_a_model_folder_that_is_a_link_is_refused_by_name(tmp_path, exported, world, target):
    """When the run begins, and if it becomes one in the run. What lies behind it stays."""
    behind = tmp_path / "behind"
    if target == "a folder":
        (behind / "data").mkdir(parents=True)
        (behind / "config.json").write_text("another model's")
        (behind / "data/rows.jsonl").write_text("{}")
    before = contents(behind)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/model").symlink_to(behind)
    assert re.match(
        rf"{tmp_path}/run/model not written \({tmp_path}/run/model is a link", exported()
    )
    with pytest.raises(
        SystemExit, match=rf"--output-dir {tmp_path}/run: {tmp_path}/run/model is a link"
    ):
        lock_everywhere(tmp_path / "run", world)
    assert contents(behind) == before and behind.exists() == (target == "a folder")


def test_what_a_user_has_put_into_the_model_folder_stays(tmp_path, exported):
    """Beside it, too: what a killed export has left has a mark, and goes."""
    model, named_alike = tmp_path / "run/model", tmp_path / "run/model.tmp"
    assert exported() == ""
    written = contents(model)
    (model / "notes/of mine").mkdir(parents=True)
    (model / "notes/of mine/a.txt").write_text("mine")
    named_alike.mkdir()
    (named_alike / "b.txt").write_text("mine")
    left = make_unfinished(model)
    (left / "model.safetensors").write_text("half of it")
    (model / "generation_config.json").unlink()
    assert exported() == ""
    assert contents(model) == written | {"notes/of mine/a.txt": b"mine"}
    assert contents(named_alike) == {"b.txt": b"mine"} and not left.exists()


def moved_from_elsewhere(model: Path) -> None:
    """Of this program, but not of this run."""
    shutil.copytree(model, model.with_name("copy"))
    shutil.rmtree(model)
    model.with_name(".model.files.json").unlink()
    model.with_name("copy").rename(model)


def moved_behind_a_link(model: Path) -> None:
    (model / "tokenizer.json").rename(model.parent / "mine.json")
    (model / "tokenizer.json").symlink_to(model.parent / "mine.json")


IN_THE_WAY = {
    "a changed file": ("config.json", lambda model: (model / "config.json").write_text("{}")),
    "weights of its own": ("more.safetensors", lambda model: (model / "more.safetensors").touch()),
    "a folder": (
        "config.json",
        lambda model: [(model / "config.json").unlink(), (model / "config.json").mkdir()],
    ),
    "a link": ("tokenizer.json", moved_behind_a_link),
    "a model from elsewhere": ("chat_template.jinja", moved_from_elsewhere),
}


@pytest.mark.parametrize("what", IN_THE_WAY)
def test_what_the_export_would_replace_is_named_and_stays(tmp_path, exported, what):
    name, put = IN_THE_WAY[what]
    assert exported() == ""
    put(tmp_path / "run/model")
    before = contents(tmp_path / "run")
    assert f"{tmp_path}/run/model/{name} is not as this run has written it" in exported()
    assert contents(tmp_path / "run") == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, options",
    [("grpo.py", ["--strategy", "ddp"]), ("ppo.py", ["--critic-warmup-steps", 0]), ("sft.py", [])],
)
def test_of_any_script_and_strategy(tmp_path, script, options):
    """The run's model/ taken away, as of one that was interrupted: the dtype is then to be
    given."""
    options += [] if script == "sft.py" else SIZES
    run_script(
        script,
        *options,
        "--total-steps",
        1,
        "--dtype",
        "fp32",
        "--output-dir",
        tmp_path / "run",
        ranks=2,
    )
    (tmp_path / "run/model").rename(tmp_path / "expected")
    main(Args(tmp_path / "run", "tiny", tmp_path / "out", dtype="fp32"))
    same_files(tmp_path / "out", tmp_path / "expected")

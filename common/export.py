"""A Hugging Face folder from a checkpoint, of whatever number of ranks, as its run writes model/
when it ends.

    python -m common.export runs/NAME --model Qwen/Qwen2.5-VL-7B-Instruct --out FOLDER
    python -m common.export runs/NAME/checkpoints/step_000100 --model BASE --out FOLDER

On a CPU, without an engine, in memory for the model in float32. A run's folder means its last
checkpoint; of PPO's the policy is written. The checkpoint's files are verified first, and none of
them holds what could be executed.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from common.data.render import end_turns_properly
from common.distributed import World, repeated_blocks
from common.files import refuse, user_errors
from common.flags import Machine, call_program
from common.hub import load_tokenizer, resolve_model
from common.lora import adapters, add_adapters
from common.manifest import (
    WrittenFiles,
    make_unfinished,
    model_identity,
    step_folder,
    verify,
    weights_identity,
)
from common.models import Policy, full_parameters
from common.pictures import PixelLimits
from common.precision import DTYPES
from common.printing import guard_output
from common.shards import dcp, load_shards, saved_tensors
from common.torch_repair import transformers
from common.vision import auto_class, load_vision


@dataclass
class Args:
    # run folder, step folder, or the file `latest` or `best` in checkpoints/
    checkpoint: tyro.conf.Positional[Path]
    model: str  # what the run was started from, as its --model
    out: Path  # folder to write
    # of the weights; default: as the run's model/, or bf16
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    trust_remote_code: bool = False  # run code that comes with the model


def main(args: Args) -> None:
    folder, manifest = open_checkpoint(args.checkpoint)
    refuse(
        os.path.lexists(args.out),
        f"--out {args.out} is there already: give another one, or remove it",
    )
    path = resolve_model(args.model)
    run = folder.absolute().parents[1]
    other = manifest.get("model") != model_identity(Path(path))
    refuse(other, f"{folder} is of another architecture than --model {args.model}")
    base = manifest.get("base")
    other = base is not None and base != weights_identity(Path(path))
    refuse(other, f"{folder} has adapters of another base than --model {args.model}")
    vision = load_vision(path, PixelLimits(0, 0, 0), args.trust_remote_code)
    tokenizer = load_tokenizer(path, args.trust_remote_code)
    flags = read_json(run / "config.json").get("args", {})
    answered = any(flags.get(name) for name in ("tools", "environment"))
    if vision or manifest.get("script") == "sft" or answered:
        end_turns_properly(tokenizer, vision and vision.processor)
    elif manifest.get("end_token"):
        tokenizer.eos_token = manifest["end_token"]
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=args.trust_remote_code)
    transformers.utils.logging.disable_progress_bar()
    dtype = DTYPES[args.dtype] if args.dtype else dtype_of(run / "model")
    # adapters lie on a base in the run's dtype
    options = {
        "dtype": dtype if manifest.get("LoRA") else torch.float32,
        "trust_remote_code": args.trust_remote_code,
    }
    # its weights are not needed; how they are named in its files is
    policy = Policy(
        auto_class(config).from_pretrained(path, config=config, **options), "sdpa", vision
    )
    if manifest.get("LoRA"):
        readers = repeated_blocks(getattr(policy.model.base_model, "language_model", policy.model))
        rank, alpha, targets = manifest["LoRA"]
        add_adapters(
            policy.model, readers, Machine(lora_rank=rank, lora_alpha=alpha, lora_targets=targets)
        )
    restore(policy, folder)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    out = args.out.resolve()
    export_hugging_face(
        policy, tokenizer, out, World(0, 1, 0, torch.device("cpu")), dtype, args.model
    )
    WrittenFiles(out).list.unlink()  # what is there, no export will replace
    print(f"{args.out}: the weights of {folder} in {dtype}")


def open_checkpoint(path: Path) -> tuple[Path, dict]:
    """Its step folder, and its manifest, which its files are as. SystemExit if there is none."""
    try:
        folder = step_folder(path)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    refuse(
        folder is None,
        f"{path}: no checkpoint there; give a run folder, or a step folder in its checkpoints/",
    )
    try:
        return folder, verify(folder)
    except ValueError as error:
        raise SystemExit(f"{folder} {error}: export another one") from error


def restore(policy: Policy, folder: Path) -> None:
    """The weights of a checkpoint, in place. SystemExit if it has not all of them."""
    try:
        load_shards(saved_tensors("policy", policy), folder)
    except dcp.api.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise SystemExit(f"{folder} cannot be read: {cause}") from error


def dtype_of(model: Path) -> torch.dtype:
    """That of a run's model/; bfloat16 without one."""
    return getattr(torch, read_json(model / "config.json").get("dtype", "bfloat16"))


def read_json(path: Path) -> dict:
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def export_hugging_face(
    policy: nn.Module,
    tokenizer: "transformers.PreTrainedTokenizerBase",
    folder: Path,
    world: World,
    dtype: torch.dtype,
    base: str = "",
) -> None:
    """Write a folder that transformers and vLLM load as it is; rank 0 writes, all ranks gather.

    Only files that an earlier export has written there are replaced; SystemExit names what is in
    the way. With LoRA folder/adapter has the adapters alone, for the model `base`.
    """
    state = {}
    for name, tensor in full_parameters(policy, dtype):
        if world.is_main:
            state[name] = tensor.to("cpu", copy=True)
    if not world.is_main:
        return
    model = policy.model
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    model.generation_config = generation_config(model, tokenizer)
    temporary = None
    try:
        temporary = make_unfinished(folder)
        model.save_pretrained(temporary, state_dict=state)
        vision = policy.vision
        (vision.processor if vision else tokenizer).save_pretrained(temporary)
        # save_pretrained names the dtype of the master weights
        written_dtype = str(dtype).removeprefix("torch.")
        keep_source_files(temporary, Path(model.config.name_or_path), tokenizer, written_dtype)
        for file in temporary.iterdir():
            if file.is_file():
                file.chmod(0o644)  # safetensors writes for the owner alone
        if any(adapters(model)):
            save_adapter(model, base, temporary / "adapter")
        WrittenFiles(folder).replace(temporary)
    except (OSError, SafetensorError) as error:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
        raise SystemExit(
            f"{folder} not written ({error}); the same command writes it once that is mended"
        ) from error


def generation_config(model: nn.Module, tokenizer) -> "transformers.GenerationConfig":
    """The model's, which also ends where the tokenizer does: `end_turns_properly` may have changed
    that. Without its ways to sample where transformers would not save it: some published ones
    contradict themselves."""
    config = model.generation_config
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    config.eos_token_id = sorted({tokenizer.eos_token_id, *ends} - {None})
    try:
        config.validate(strict=True)
    except ValueError as error:
        print(
            "warning: generation_config.json has end tokens alone, since its own is refused: "
            f"{error}",
            flush=True,
        )
        config = transformers.GenerationConfig(eos_token_id=config.eos_token_id)
    return config


def save_adapter(model: nn.Module, base: str, folder: Path) -> None:
    """Write the adapters in the format of Hugging Face's PEFT, for the model `base`."""
    tensors, layers = {}, dict(adapters(model))
    for name, layer in layers.items():
        for part in ("lora_A", "lora_B"):
            tensors[f"base_model.model.{name}.{part}.weight"] = (
                getattr(layer, part).detach().cpu().contiguous()
            )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "bias": "none",
    }
    config |= {
        "r": len(layer.lora_A),
        "lora_alpha": layer.scale * len(layer.lora_A),
        "target_modules": [*layers],
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").chmod(0o644)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    arguments = call_program(Args, "common.export", __doc__)
    guard_output()
    with user_errors():
        main(arguments)


TEXT_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "added_tokens.json")


TEXT_FILES += ("special_tokens_map.json", "*processor_config.json", "chat_template.json")


def keep_source_files(export: Path, source: Path, tokenizer, dtype: str) -> None:
    """Bring the files of an export, of weights in `dtype`, together with those of its source, if
    that is there."""
    config = read_json(export / "config.json")
    if (source / "config.json").is_file():
        config = merge_configs(config, read_json(source / "config.json"))
    else:
        print(
            f"warning: {source} is gone: {export} is written for transformers 5 alone", flush=True
        )
    config["dtype"] = dtype
    for part in (config, *parts_of(config).values()):
        for name in ("dtype", "torch_dtype"):
            if part.get(name):
                part[name] = dtype
    write_json(export / "config.json", config)

    for pattern in TEXT_FILES:
        for file in source.glob(pattern):
            if file.is_file() and not (export / file.name).exists():
                (export / file.name).write_bytes(file.read_bytes())
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (source / name).is_file():
            values = read_json(source / name)
            keep_changes(values, tokenizer)
            write_json(export / name, values)


def merge_configs(written: dict, read: dict) -> dict:
    """A config.json with the keys of the source, and those of the export that the source has not.

    A source whose text part has no dict of its own (Qwen2.5-VL's) gets none: it would be read in
    place of the others.
    """
    merged = dict(read)
    if "quantization_config" not in written:
        merged.pop("quantization_config", None)
    parts = parts_of(written)
    for name, value in written.items():
        if name in parts:
            if isinstance(read.get(name), dict):
                merged[name] = merge_configs(value, read[name])
        elif name not in read or name == "architectures":
            merged[name] = value
    return merged


def parts_of(config: dict) -> dict[str, dict]:
    """Configurations within a configuration, by name."""
    return {
        name: value
        for name, value in config.items()
        if name.endswith("_config") and isinstance(value, dict)
    }


def keep_changes(values: dict, tokenizer) -> None:
    """Enter into a source's settings what the run has changed: the end token, or the template."""
    end_token = values.get("eos_token")
    if isinstance(end_token, dict):  # with its options
        end_token = end_token.get("content")
    if end_token != tokenizer.eos_token:
        values["eos_token"] = tokenizer.eos_token
    if "chat_template" in values and isinstance(tokenizer.chat_template, str):
        values["chat_template"] = tokenizer.chat_template


def write_json(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False), "utf-8")

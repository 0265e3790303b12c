"""Write the Hugging Face folder of a checkpoint, saved by any number of ranks, as its run writes
model/ when it ends.

    python -m common.export runs/NAME --model Qwen/Qwen2.5-VL-7B-Instruct --out FOLDER
    python -m common.export runs/NAME/checkpoints/step_000100 --model BASE --out FOLDER

It runs on a CPU, without an engine, and needs memory for the model in float32 and for a copy in the
dtype that it writes. A run's folder means its last checkpoint; from a checkpoint of PPO, only the
policy is written. The checkpoint's files are verified first, and none of them can hold executable
code.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import common.packages  # noqa: F401, one line if a package is missing

import torch
import tyro
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from common.data.render import end_turns_properly
from common.distributed import World, repeated_blocks
from common.files import user_errors
from common.flags import Machine, call_program
from common.hub import load_tokenizer, resolve_model, split_hub_id
from common.lora import adapted_layers, add_adapters
from common.manifest import (
    WrittenFiles,
    make_unfinished,
    model_identity,
    step_folder,
    verify_step,
    weights_identity,
)
from common.models import Policy, full_parameters
from common.pictures import PixelLimits
from common.precision import DTYPES
from common.printing import guard_output
from common.shards import dcp, load_shards, saved_tensors
from common.torch_repair import transformers
from common.vision import Vision, auto_class, load_vision
from common.weights import transpose_back

TEXT_FILES = (  # of a tokenizer and a processor
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "added_tokens.json",
    "special_tokens_map.json",
    "*processor_config.json",
    "chat_template.json",
)


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
    if os.path.lexists(args.out):
        raise SystemExit(f"--out {args.out} is there already: give another one, or remove it")
    path = resolve_model(args.model)
    check_identity(folder, manifest, path, args.model)
    run_dir = folder.absolute().parents[1]
    limits = PixelLimits(0, 0, 0)  # no picture is resized here
    vision = load_vision(path, limits, args.trust_remote_code)
    tokenizer = load_tokenizer(path, args.trust_remote_code)
    flags = read_json(run_dir / "config.json").get("args", {})
    # The end token that the run has set. With pictures, tools, an environment or sft.py turns end
    # as in the template (common/rollout/opening.py). Otherwise it depended on the rows, and the
    # manifest has it.
    is_multi_turn = bool(flags.get("tools") or flags.get("environment"))
    # forks of sft.py have other names, and no other script has --batch-size
    is_supervised = manifest.get("script") == "sft" or "batch_size" in flags
    if vision or is_supervised or is_multi_turn:
        processor = vision.processor if vision else None
        end_turns_properly(tokenizer, processor)
    elif manifest.get("end_token"):
        tokenizer.eos_token = manifest["end_token"]
    transformers.utils.logging.disable_progress_bar()
    dtype = DTYPES[args.dtype] if args.dtype else dtype_of(run_dir / "model")
    policy = initial_policy(path, vision, manifest.get("LoRA"), dtype, args.trust_remote_code)
    restore(policy, folder)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    out = args.out.resolve()
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    export_hugging_face(policy, tokenizer, out, world, dtype, args.model)
    WrittenFiles(out).list_file.unlink()  # no later export may replace these files
    print(f"{args.out}: the weights of {folder} in {dtype}")


def check_identity(folder: Path, manifest: dict, path: str, model: str) -> None:
    """SystemExit if a checkpoint is of another model than --model."""
    if manifest.get("model") != model_identity(Path(path)):
        raise SystemExit(f"{folder} is of another architecture than --model {model}")
    base = manifest.get("base")
    if base is not None and base != weights_identity(Path(path)):
        raise SystemExit(f"{folder} has adapters of another base than --model {model}")


def initial_policy(
    path: str,
    vision: Vision | None,
    lora: list | None,
    dtype: torch.dtype,
    trust_remote_code: bool,
) -> Policy:
    """The policy that a run has started from, before `restore`. lora: rank, alpha and targets of
    its adapters, whose base is in `dtype`; None without LoRA."""
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    model = auto_class(config).from_pretrained(
        path,
        config=config,
        dtype=dtype if lora else torch.float32,
        trust_remote_code=trust_remote_code,
    )
    policy = Policy(model, "sdpa", vision)
    if lora:
        language_model = getattr(policy.model.base_model, "language_model", policy.model)
        rank, alpha, targets = lora
        machine = Machine(lora_rank=rank, lora_alpha=alpha, lora_targets=targets)
        add_adapters(policy.model, repeated_blocks(language_model), machine)
    return policy


def open_checkpoint(path: Path) -> tuple[Path, dict]:
    """The step folder that a path means, and its manifest, with which its files agree. SystemExit
    if there is none, or if it is damaged."""
    try:
        folder = step_folder(path)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    if folder is None:
        raise SystemExit(
            f"{path}: no checkpoint there; give a run folder, or a step folder in its checkpoints/"
        )
    try:
        return folder, verify_step(folder)
    except ValueError as error:
        raise SystemExit(f"{folder} {error}: export another one") from error


def restore(policy: Policy, folder: Path) -> None:
    """Load the weights of a checkpoint in place. SystemExit if some are missing."""
    try:
        load_shards(saved_tensors("policy", policy), folder)
    except dcp.api.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise SystemExit(f"{folder} cannot be read: {cause}") from error


def dtype_of(folder: Path) -> torch.dtype:
    """The dtype of a run's model/; bfloat16 if there is none."""
    name = read_json(folder / "config.json").get("dtype", "bfloat16")
    return getattr(torch, name)


def read_json(path: Path) -> dict:
    """The object in a file; {} if there is no file."""
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def write_json(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False), "utf-8")


def export_hugging_face(
    policy: nn.Module,
    tokenizer: "transformers.PreTrainedTokenizerBase",
    folder: Path,
    world: World,
    dtype: torch.dtype,
    base: str = "",
) -> None:
    """Write a folder that transformers and vLLM load as it is; rank 0 writes, all ranks gather.

    Only files that an earlier export has written there are replaced; SystemExit names a file that
    is in the way. With LoRA folder/adapter has the adapters alone, for the model `base`.
    """
    state: dict[str, torch.Tensor] = {}
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
        transpose_back()  # else `save_pretrained` writes the experts of Qwen3-VL transposed
        model.save_pretrained(temporary, state_dict=state)
        processor = policy.vision.processor if policy.vision else tokenizer
        processor.save_pretrained(temporary)
        # save_pretrained names the dtype of the master weights
        written_dtype = str(dtype).removeprefix("torch.")
        keep_source_files(temporary, Path(model.config.name_or_path), tokenizer, written_dtype)
        for file in temporary.iterdir():
            if file.is_file():
                file.chmod(0o644)  # safetensors lets only the owner read
        if any(adapted_layers(model)):
            save_adapter(model, base, temporary / "adapter")
        WrittenFiles(folder).replace(temporary)
    except (OSError, SafetensorError) as error:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
        raise SystemExit(
            f"{folder} not written ({error}); the same command writes it once that is mended"
        ) from error


def generation_config(model: nn.Module, tokenizer) -> "transformers.GenerationConfig":
    """The model's generation config with the tokenizer's end token added, which
    `end_turns_properly` may have changed. If transformers refuses to save the model's settings,
    since some published ones contradict each other, the config has the end tokens alone."""
    config = model.generation_config
    end_ids = config.eos_token_id
    if not isinstance(end_ids, list):
        end_ids = [end_ids]
    config.eos_token_id = sorted({tokenizer.eos_token_id, *end_ids} - {None})
    try:
        config.validate(strict=True)
    except ValueError as error:
        print(
            "warning: generation_config.json has end tokens alone, since transformers refuses the "
            f"model's own settings: {error}",
            flush=True,
        )
        config = transformers.GenerationConfig(eos_token_id=config.eos_token_id)
    return config


def save_adapter(model: nn.Module, base: str, folder: Path) -> None:
    """Write the adapters in the format of Hugging Face's PEFT, for the model `base`, which is the
    --model of the run."""
    layers = dict(adapted_layers(model))
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in layers.items():
        for part in ("lora_A", "lora_B"):
            tensor = getattr(layer, part).detach().cpu().contiguous()
            tensors[f"base_model.model.{name}.{part}.weight"] = tensor
    first_layer = next(iter(layers.values()))  # all have the same rank and scale
    rank = len(first_layer.lora_A)
    revision = None
    if not Path(base).is_dir():
        repository, revision, subfolder = split_hub_id(base)
        base = f"{repository}/{subfolder}".rstrip("/")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "bias": "none",
        "r": rank,
        "lora_alpha": first_layer.scale * rank,
        "target_modules": list(layers),
    }
    folder.mkdir()
    weights = folder / "adapter_model.safetensors"
    save_file(tensors, weights)
    weights.chmod(0o644)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


# --- files of the source --------------------------------------------------------------------------


def keep_source_files(export: Path, source: Path, tokenizer, dtype: str) -> None:
    """Give an export, whose weights are in `dtype`, the settings and files of the model that it was
    trained from: transformers 5, which has written it, spells some settings otherwise than version
    4, whose spelling other programs expect."""
    config = read_json(export / "config.json")
    if (source / "config.json").is_file():
        config = merge_configs(read_json(source / "config.json"), config)
    else:
        print(f"warning: {source} is gone: the export is for transformers 5 alone", flush=True)
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
            settings = read_json(source / name)
            put_run_tokens(settings, tokenizer)
            write_json(export / name, settings)


def merge_configs(source_config: dict, export_config: dict) -> dict:
    """The config.json of the source, with the keys that only the export's has, and with the
    export's "architectures", the class that was trained.

    A part that is a dict in `export_config` alone, such as the text part of Qwen2.5-VL, is left
    out: transformers would read it in place of the keys outside.
    """
    merged = dict(source_config)
    if "quantization_config" not in export_config:
        merged.pop("quantization_config", None)
    parts = parts_of(export_config)
    for name, value in export_config.items():
        if name in parts:
            if isinstance(source_config.get(name), dict):
                merged[name] = merge_configs(source_config[name], value)
        elif name not in source_config or name == "architectures":
            merged[name] = value
    return merged


def parts_of(config: dict) -> dict[str, dict]:
    """{name: config} of the configs within a config, such as text_config."""
    parts: dict[str, dict] = {}
    for name, value in config.items():
        if name.endswith("_config") and isinstance(value, dict):
            parts[name] = value
    return parts


def put_run_tokens(settings: dict, tokenizer) -> None:
    """Put the run's end token and template into the settings of the source's tokenizer."""
    end_token = settings.get("eos_token")
    if isinstance(end_token, dict):  # a token with its options
        end_token = end_token.get("content")
    if end_token != tokenizer.eos_token:
        settings["eos_token"] = tokenizer.eos_token
    if "chat_template" in settings and isinstance(tokenizer.chat_template, str):
        settings["chat_template"] = tokenizer.chat_template


if __name__ == "__main__":
    arguments = call_program(Args, "common.export", __doc__)
    guard_output()
    with user_errors():
        main(arguments)

"""What an export keeps of the folder that its model was read from: what was not trained, as it was
read.

transformers 5 writes other keys than transformers 4. Engines and harnesses that pin 4 would not
find theirs, and most would go on with defaults.
"""

import json
from pathlib import Path

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


def read_json(path: Path) -> dict:
    return json.loads(path.read_text("utf-8"))


def write_json(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False), "utf-8")

"""Where a model comes from: an embedded name, a folder, a hub id; its tokenizer, and the tokens that end a turn."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from common.flags import EMBEDDED
from common.torch_repair import transformers

FOLDERS = {name: Path(__file__).parent / "assets" / name for name in EMBEDDED}
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py"]
SMOLLM2 = "smollm2-135m-instruct"  # folder of the prepared model


def resolve_model(name: str, flag: str = "--model") -> str:
    """Folder of a model: an embedded name, a folder, or a hub id, downloaded by the first rank to get there."""
    if name in EMBEDDED:
        return str(FOLDERS[name])
    if Path(name).is_dir():
        tokenizer = any(file for kind in TOKENIZER_FILES for file in Path(name).glob(kind))
        if not tokenizer or not (Path(name) / "config.json").is_file():
            raise SystemExit(f"{flag} {name}: no config.json or no tokenizer in it; of a run folder, give its model/")
        return name
    if name == "smollm2":
        return prepared_smollm2(flag)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(name, allow_patterns=HUB_FILES)
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise SystemExit(
            f"{flag} {name}: no folder, none of {', '.join([*EMBEDDED, 'smollm2'])}, and not to be had from the hub "
            f"(HF_ENDPOINT names a mirror): {error}"
        ) from error


def cache_folder() -> Path:
    """Where prepared models are kept: $XDG_CACHE_HOME/minimal-rl, or else ~/.cache/minimal-rl."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "minimal-rl"


def prepared_smollm2(flag: str) -> str:
    """Folder of SmolLM2-135M-Instruct; made on first use by a process of its own. SystemExit with what it said."""
    folder = cache_folder() / SMOLLM2
    if not folder.exists():  # appears complete, by rename; ranks that ask at once wait for the first
        command = [sys.executable, "-m", "common.prepare.smollm2", "--cache", str(cache_folder().parent)]
        made = subprocess.run(command, cwd=Path(__file__).parents[1], stderr=subprocess.PIPE, text=True)
        if made.returncode:
            again = "`python -m common.prepare.smollm2` tries again"
            raise SystemExit(f"{flag} smollm2 is not prepared; {again}. It said:\n{made.stderr.strip()[-2000:]}")
    return str(folder)


def load_tokenizer(path: str, trust_remote_code: bool = False) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def end_token_ids(path: str, tokenizer: transformers.PreTrainedTokenizerBase) -> list[int]:
    """Ids that end a response: the tokenizer's end token and those of generation_config.json."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    generation_config = Path(path) / "generation_config.json"
    if generation_config.is_file():
        listed = json.loads(generation_config.read_text()).get("eos_token_id") or []
        ids += listed if isinstance(listed, list) else [listed]
    return sorted(set(ids))


def end_of_turn(tokenizer) -> str:
    """The token that the chat template puts after an assistant turn, if it is a special one; else the end token.

    They differ in base models: Qwen2.5's end token is <|endoftext|>, its template ends turns with <|im_end|>. A policy
    that was trained to say one and is stopped at the other never stops.
    """
    mark = "\u2603"
    messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": mark}]
    tail = tokenizer.apply_chat_template(messages, tokenize=False).rpartition(mark)[2]
    ids = tokenizer.encode(tail, add_special_tokens=False)
    first = tokenizer.convert_ids_to_tokens(ids[0]) if ids else tokenizer.eos_token
    return first if first in tokenizer.get_added_vocab() else tokenizer.eos_token


def end_turns_properly(tokenizer, processor, notice: Callable[[str], None]) -> None:
    """Make the token that ends the template's turns the end token. ValueError without a chat template.

    processor: of a vision-language model, or None; its template holds, and it gets the tokenizer.
    """
    if processor:
        tokenizer.chat_template = processor.chat_template or tokenizer.chat_template
        processor.tokenizer = tokenizer  # which the export saves
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of {tokenizer.name_or_path!r} has no chat template: take an instruct model")
    if end_of_turn(tokenizer) != tokenizer.eos_token:
        notice(f"turns end with {end_of_turn(tokenizer)}, not {tokenizer.eos_token}: it becomes the end token")
        tokenizer.eos_token = end_of_turn(tokenizer)

"""Where a model comes from: an embedded name, a folder, a hub id, perhaps with a subfolder; and its tokenizer."""

import json
import os
import subprocess
import sys
from pathlib import Path

from jinja2 import TemplateError, TemplateSyntaxError

from common.files import refuse, user_errors
from common.flags import EMBEDDED
from common.torch_repair import Later, transformers

hub = Later("huggingface_hub")
FOLDERS = {name: Path(__file__).parent / "assets" / name for name in EMBEDDED}
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")
WEIGHT_FILES = ("*.safetensors", "*.bin")
OBJECTS = {  # files that hold a JSON object each
    "added_tokens.json",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
}
SMOLLM2 = "smollm2-135m-instruct"  # folder of the prepared model


def resolve_model(name: str, flag: str = "--model") -> str:
    """Folder of a model: an embedded name, a folder, or a hub id, downloaded by the first rank to get there.

    SystemExit, with the subfolders that would do, for one without a config.json or a tokenizer, and for a file that
    cannot be read.
    """
    if name in EMBEDDED:
        return str(FOLDERS[name])
    if name == "smollm2" and not Path(name).is_dir():
        return prepared_smollm2(flag)
    folder = Path(name) if Path(name).is_dir() else download(name, flag)
    with user_errors(f"{flag} {name}: its files cannot be read (are all there, and whole?)"):
        check_files(folder)
    if (folder / "config.json").is_file() and any(file for kind in TOKENIZER_FILES for file in folder.glob(kind)):
        return str(folder)
    inside = [f"{name}/{file.parent.name}" for file in sorted(folder.glob("*/config.json"))]
    remedy = f"take {', '.join(inside)}" if inside else "of a run folder, give its model/"
    raise SystemExit(f"{flag} {name}: no config.json or no tokenizer in it; {remedy}")


def check_files(folder: Path) -> None:
    """ValueError with the name of a model's file that is none, or that does not hold what it should.

    Libraries would wait for a pipe, or fail later, in many lines, without the name.
    """
    for kind in (*HUB_FILES, *WEIGHT_FILES, "additional_chat_templates/*"):
        for file in sorted(folder.glob(kind)):
            if file.is_symlink() and not file.exists():
                raise ValueError(f"{file.name} is a link to nowhere, as in a cache from which files were removed")
            if not file.is_file():
                raise ValueError(f"{file.name} is a folder, a pipe or a device")
            if file.name in OBJECTS:
                check_object(file)


def check_object(file: Path) -> None:
    """ValueError if a file of a model holds no JSON object, or end tokens that are none."""
    try:
        values = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} is no JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file.name} is no JSON object")
    if file.name in ("config.json", "generation_config.json"):
        ends = values.get("eos_token_id")
        for end in ends if isinstance(ends, list) else [ends]:
            if end is not None and type(end) is not int:
                raise ValueError(f"{file.name} has the end token {end!r:.60}, which is no id")


def require_weights(path: str) -> None:
    """SystemExit for a model's folder without weights, or without a file that its index lists."""
    folder = Path(path)
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text()).get("weight_map") if index.is_file() else None
    single = (folder / "model.safetensors").is_file()
    if not single and isinstance(listed, dict):
        for name in sorted(set(map(str, listed.values()))):
            refuse(not (folder / name).is_file(), f"{folder} has no {name}, which its index lists")
    there = any(any(folder.glob(kind)) for kind in WEIGHT_FILES)
    refuse(not there, f"{folder} has no weights: neither {' nor '.join(WEIGHT_FILES)}")


def download(name: str, flag: str) -> Path:
    """Folder of ORG/NAME, or of ORG/NAME/SUBFOLDER, on the hub: its files, without those of its subfolders.

    Without a config.json it has those of its subfolders. SystemExit if nothing is to be had.
    """
    repository, inside = "/".join(name.split("/")[:2]), "".join(f"{part}/" for part in name.split("/")[2:])
    told = f"no folder, none of {', '.join(EMBEDDED)}, smollm2, not to be had from the hub (HF_ENDPOINT: a mirror)"
    with user_errors(f"{flag} {name}: {told}"):
        wanted = [inside + kind for kind in HUB_FILES]
        folder = Path(hub.snapshot_download(repository, allow_patterns=wanted, ignore_patterns=f"{inside}*/*"), inside)
        if not (folder / "config.json").is_file():
            hub.snapshot_download(repository, allow_patterns=f"{inside}*/config.json")
        return folder


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


def load_tokenizer(path: str, trust_remote_code: bool = False) -> "transformers.PreTrainedTokenizerBase":
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    if not tokenizer.encode("a", add_special_tokens=False):  # also: a first call, in no thread, changes its settings
        raise SystemExit(f"{path}: its tokenizer makes nothing of texts: are tokenizer.json and its like there?")
    check_template(tokenizer, path)
    return tokenizer


def check_template(tokenizer, path: str) -> None:
    """SystemExit for a chat template that was cut or is no template; else each row would be told to be bad."""
    if not tokenizer.chat_template:
        return
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "."}], tokenize=False)
    except TemplateSyntaxError as error:
        told = f"its chat template is damaged (line {error.lineno}: {error.message})"
        raise SystemExit(f"{path}: {told}: fetch chat_template.jinja or tokenizer_config.json again") from error
    except (TemplateError, TypeError, ValueError):  # it wants other messages: rows tell whether they are such
        pass

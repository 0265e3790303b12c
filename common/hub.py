"""Where a model comes from: an embedded name, a folder, a hub id, perhaps with a subfolder; and its tokenizer."""

import os
import subprocess
import sys
from pathlib import Path

from common.files import user_errors
from common.flags import EMBEDDED
from common.torch_repair import Later, transformers

hub = Later("huggingface_hub")
FOLDERS = {name: Path(__file__).parent / "assets" / name for name in EMBEDDED}
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")
SMOLLM2 = "smollm2-135m-instruct"  # folder of the prepared model


def resolve_model(name: str, flag: str = "--model") -> str:
    """Folder of a model: an embedded name, a folder, or a hub id, downloaded by the first rank to get there.

    SystemExit, with the subfolders that would do, for one without a config.json or a tokenizer.
    """
    if name in EMBEDDED:
        return str(FOLDERS[name])
    if name == "smollm2" and not Path(name).is_dir():
        return prepared_smollm2(flag)
    folder = Path(name) if Path(name).is_dir() else download(name, flag)
    if (folder / "config.json").is_file() and any(file for kind in TOKENIZER_FILES for file in folder.glob(kind)):
        return str(folder)
    inside = [f"{name}/{file.parent.name}" for file in sorted(folder.glob("*/config.json"))]
    remedy = f"take {', '.join(inside)}" if inside else "of a run folder, give its model/"
    raise SystemExit(f"{flag} {name}: no config.json or no tokenizer in it; {remedy}")


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
    return tokenizer

"""Where a model comes from: an embedded name, a folder, a hub id, perhaps with a subfolder; and its
tokenizer."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from jinja2 import TemplateError, TemplateSyntaxError
from torch import nn

from common.files import refuse, user_errors
from common.flags import EMBEDDED
from common.printing import printable
from common.torch_repair import Later, transformers

hub = Later("huggingface_hub")
FOLDERS = {name: Path(__file__).parent / "assets" / name for name in EMBEDDED}
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")
WEIGHT_FILES = ("*.safetensors", "*.bin")
# in the order in which transformers looks for them
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
OBJECTS = {  # files that hold a JSON object each
    "adapter_config.json",
    "added_tokens.json",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "preprocessor_config.json",
    "processor_config.json",
    "pytorch_model.bin.index.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
}
SMOLLM2 = "smollm2-135m-instruct"  # folder of the prepared model


def resolve_model(name: str, flag: str = "--model") -> str:
    """Folder of a model: an embedded name, a folder, or a hub id, downloaded by the first rank to
    get there.

    SystemExit, with the subfolders that would do, for one without a config.json or a tokenizer, and
    for a file that cannot be read.
    """
    if name in EMBEDDED:
        return str(FOLDERS[name])
    if name == "smollm2" and not Path(name).is_dir():
        return prepared_smollm2(flag)
    folder = Path(name) if Path(name).is_dir() else download(name, flag)
    with user_errors(f"{flag} {name}: its files cannot be read (are all there, and whole?)"):
        check_files(folder)
    refuse_adapter(folder, f"{flag} {name}")
    if (folder / "config.json").is_file() and any(
        file for kind in TOKENIZER_FILES for file in folder.glob(kind)
    ):
        return str(folder)
    inside = [f"{name}/{file.parent.name}" for file in sorted(folder.glob("*/config.json"))]
    remedy = f"take {', '.join(inside)}" if inside else "of a run folder, give its model/"
    raise SystemExit(f"{flag} {name}: no config.json or no tokenizer in it; {remedy}")


def refuse_adapter(folder: Path, told: str) -> None:
    """SystemExit for an adapter in PEFT's format, alone or beside a model: transformers would train
    on that model with the adapter, and vLLM begins without it."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        return
    if (folder / "config.json").is_file():
        raise SystemExit(
            f"{told}: an adapter lies beside the model ({file.name}): merge the two, or move "
            "it elsewhere"
        )
    base = (
        json.loads(file.read_text("utf-8")).get("base_model_name_or_path")
        or "a model that it does not name"
    )
    raise SystemExit(
        f"{told}: an adapter of {base!s:.200}: merge the two, as in the model/ that a run leaves"
    )


def check_files(folder: Path) -> None:
    """ValueError with the name of a model's file that is none, or that does not hold what it
    should.

    Libraries would wait for a pipe, or fail later, in many lines, without the name.
    """
    for kind in (*HUB_FILES, *WEIGHT_FILES, "additional_chat_templates/*"):
        for file in sorted(folder.glob(kind)):
            if file.is_symlink() and not file.exists():
                raise ValueError(
                    f"{file.name} is a link to nowhere, as in a cache from which files were removed"
                )
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


def require_weights(path: str, flag: str = "--model") -> list[Path]:
    """The files that hold a model's weights. SystemExit if there is none, if one that the index
    lists is missing, or if there are two sets of them, of which transformers would read one and
    vLLM the other."""
    folder = Path(path)
    for name in SINGLE_FILES:
        single, index = folder / name, folder / f"{name}.index.json"
        shards = shards_of(index, flag) if index.is_file() else []
        if single.is_file():
            other = ", ".join(shard for shard in shards if shard != name)
            refuse(
                bool(other),
                f"{flag} {path} has its weights twice: in {name}, and in {other}: remove one "
                "of them",
            )
            return [single]
        for shard in shards:
            refuse(
                not (folder / shard).is_file(),
                f"{flag} {path} has no {shard}, which its index lists",
            )
        if shards:
            return [folder / shard for shard in shards]
    names = [name + end for name in SINGLE_FILES for end in ("", ".index.json")]
    raise SystemExit(f"{flag} {path}: its files hold no weights: neither {' nor '.join(names)}")


def shards_of(index: Path, flag: str) -> list[str]:
    """The names of the files that an index lists. SystemExit for a damaged index."""
    with user_errors(
        f"{flag} {index.parent}: its files cannot be read (are all there, and whole?)"
    ):
        check_object(index)
    values = json.loads(index.read_text("utf-8"))
    listed = values.get("weight_map")
    names = list(listed.values()) if isinstance(listed, dict) else []
    known = bool(names) and all(isinstance(name, str) for name in names)
    refuse(
        not known, f"{flag} {index.parent}: {index.name} lists no files of weights: fetch it again"
    )
    # transformers wants it
    bare = not isinstance(values.get("metadata"), dict)
    refuse(
        bare,
        f'{flag} {index.parent}: {index.name} has no object "metadata": add an empty one, or '
        "fetch it again",
    )
    return sorted(set(names))


def check_weights(
    model: nn.Module, path: str, flag: str = "--model", headless: bool = False
) -> None:
    """SystemExit if the weights in a folder are not those of `model`, by their names and shapes;
    none is read.

    transformers would draw at random what the files lack, and leave out what the model has no place
    for. `headless` wants the backbone alone: files may lack the model's head, or have another one.
    """
    missing, unknown, reshaped = compare_weights(model, path, flag)
    ours = unknown
    if headless:
        missing = [name for name in missing if in_backbone(model, name)]
        ours = [name for name in unknown if in_backbone(model, name)]
        reshaped = [found for found in reshaped if in_backbone(model, found[0])]
    told = f"{flag} {path}: its files have"
    no_place = f"for which {type(model).__name__} has no place, by its config.json"
    if missing:
        wrapped = [name for name in unknown if name.endswith(f".{missing[0]}")]
        told += f" no {missing[0]}"
        if wrapped:
            told += (
                f", but {wrapped[0]}: a wrapper was saved (torch.compile, DataParallel); "
                "save the model inside it"
            )
        elif ours:
            told += f", but {ours[0]}, {no_place}"
        raise SystemExit(told)
    if ours:
        raise SystemExit(f"{told} {ours[0]}, {no_place}")
    if reshaped:
        name, in_files, in_model = reshaped[0]
        raise SystemExit(
            f"{told} {name} with shape {list(in_files)}, and its config.json wants {list(in_model)}"
        )


def compare_weights(
    model: nn.Module, path: str, flag: str
) -> tuple[list[str], list[str], list[tuple]]:
    """(names that a folder's files lack, names that `model` has no place for, (name, shape there,
    shape here))."""
    files = require_weights(path, flag)
    tensors: dict = {}  # on the meta device: names and shapes
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it would print a table of what is refused in one line
    try:
        for file in files:
            tensors.update(
                transformers.modeling_utils.load_state_dict(str(file), map_location="meta")
            )
        _, found = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=tensors,
            device_map={"": "meta"},
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # damaged files make libraries run into whatever there is
        told = f"{flag} {path}: its weights cannot be read (are all files there, and whole?)"
        raise SystemExit(printable(f"{told}: {' '.join(str(error).split()):.300}")) from error
    finally:
        logging.set_verbosity(verbosity)
    computed = dict(model.named_buffers())
    unknown = []
    for name in sorted(found["unexpected_keys"]):
        if name not in computed and not name.endswith(".masked_bias"):  # which older files hold
            unknown.append(name)
    return sorted(found["missing_keys"]), unknown, sorted(found["mismatched_keys"])


def in_backbone(model: nn.Module, name: str) -> bool:
    """Is it the name of a weight below a model's head, with or without the prefix that heads stand
    beside?"""
    prefix = f"{model.base_model_prefix}."
    part = name.removeprefix(prefix).partition(".")[0]
    return name.startswith(prefix) or part in dict(model.base_model.named_children())


def download(name: str, flag: str) -> Path:
    """Folder of ORG/NAME, or of ORG/NAME/SUBFOLDER, on the hub: its files, without those of its
    subfolders.

    Without a config.json it has those of its subfolders. SystemExit if nothing is to be had.
    """
    repository, inside = (
        "/".join(name.split("/")[:2]),
        "".join(f"{part}/" for part in name.split("/")[2:]),
    )
    told = (
        f"no folder, none of {', '.join(EMBEDDED)}, smollm2, not to be had from the hub "
        "(HF_ENDPOINT: a mirror)"
    )
    with user_errors(f"{flag} {name}: {told}"):
        wanted = [inside + kind for kind in HUB_FILES]
        folder = Path(
            hub.snapshot_download(
                repository, allow_patterns=wanted, ignore_patterns=f"{inside}*/*"
            ),
            inside,
        )
        if not (folder / "config.json").is_file():
            hub.snapshot_download(repository, allow_patterns=f"{inside}*/config.json")
        return folder


def cache_folder() -> Path:
    """Where prepared models are kept: $XDG_CACHE_HOME/minimal-rl, or else ~/.cache/minimal-rl.

    SystemExit where no home folder is known, as for a user whom a container does not know.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    refuse(
        cache.startswith("~"),
        "smollm2 has no home folder to be kept in: set XDG_CACHE_HOME to a folder",
    )
    return Path(cache).absolute() / "minimal-rl"


def prepared_smollm2(flag: str) -> str:
    """Folder of SmolLM2-135M-Instruct; made on first use by a process of its own. SystemExit with
    what it said."""
    cache = cache_folder()
    folder = cache / SMOLLM2
    # appears complete, by rename; ranks that ask at once wait for the first
    if not folder.exists():
        with user_errors(
            f"{flag} smollm2 is kept in {cache}, which cannot be written (XDG_CACHE_HOME: "
            "another place)"
        ):
            cache.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=cache).close()
        command = [
            sys.executable,
            "-m",
            "common.assets.build.smollm2",
            "--cache",
            str(cache.parent),
        ]
        made = subprocess.run(
            command, cwd=Path(__file__).parents[1], stderr=subprocess.PIPE, text=True
        )
        if made.returncode:
            again = "`python -m common.assets.build.smollm2` tries again"
            raise SystemExit(
                f"{flag} smollm2 is not prepared; {again}. It said:\n{made.stderr.strip()[-2000:]}"
            )
    return str(folder)


def load_tokenizer(
    path: str, trust_remote_code: bool = False
) -> "transformers.PreTrainedTokenizerBase":
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        path, trust_remote_code=trust_remote_code
    )
    # also: a first call, in no thread, changes its settings
    if not tokenizer.encode("a", add_special_tokens=False):
        raise SystemExit(
            f"{path}: its tokenizer makes nothing of texts: are tokenizer.json and its like there?"
        )
    check_template(tokenizer, path)
    return tokenizer


def check_template(tokenizer, path: str) -> None:
    """SystemExit for a chat template that was cut or is no template; else each row would be told to
    be bad."""
    if not tokenizer.chat_template:
        return
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "."}], tokenize=False)
    except TemplateSyntaxError as error:
        told = f"its chat template is damaged (line {error.lineno}: {error.message})"
        raise SystemExit(
            f"{path}: {told}: fetch chat_template.jinja or tokenizer_config.json again"
        ) from error
    except (TemplateError, TypeError, ValueError):
        # it wants other messages: rows tell whether they are such
        pass

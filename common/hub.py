"""Where a model comes from: an embedded name, a folder, a hub id, perhaps with a revision and a
subfolder. Whether its files are whole; its tokenizer."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from torch import Tensor, nn

from common.files import hub_errors, user_errors
from common.flags import EMBEDDED
from common.printing import printable
from common.torch_repair import Later, transformers

huggingface_hub = Later("huggingface_hub")
TEACHER = "tiny-teacher"  # of distill.py's demo: `tiny`, trained by grpo.py
FOLDERS = {name: Path(__file__).parent / "assets" / name for name in (*EMBEDDED, TEACHER)}
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")
# ORG/NAME@REVISION/SUBFOLDER; ORG, a revision and subfolders may be missing. Only revisions that
# the hub makes for pull requests and conversions may have slashes. `?+`: a NAME is never taken for
# a subfolder.
HUB_ID = re.compile(r"([^/@]+(?:/[^/@]+)?+)(?:@(refs/(?:pr|convert)/[^/]+|[^/]+))?((?:/[^/]+)*)/?")
COMMIT = re.compile("[0-9a-f]{40}")
WEIGHT_FILES = ("*.safetensors", "*.bin")
# in the order in which transformers looks for them
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
UNREADABLE = "its files cannot be read (are all there, and whole?)"
JSON_FILES = {  # files that hold a JSON object each
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
    """The folder of the model that `name` means.

    name: an embedded name, smollm2, a folder, or a hub id (`split_hub_id`), whose files the first
    rank to get there downloads. SystemExit for a folder without a config.json or a tokenizer, with
    the subfolders that have one, and for a file that cannot be read.
    """
    if name in FOLDERS:
        return str(FOLDERS[name])
    if name == "smollm2" and not Path(name).is_dir():
        return prepared_smollm2(flag)
    refuse_wrong_path(name, flag)
    folder = Path(name) if Path(name).is_dir() else download(name, flag)
    with user_errors(f"{flag} {name}: {UNREADABLE}"):
        check_files(folder)
    refuse_adapter(folder, f"{flag} {name}")
    tokenizer_files = [file for kind in TOKENIZER_FILES for file in folder.glob(kind)]
    if tokenizer_files and (folder / "config.json").is_file():
        return str(folder)
    subfolders = [f"{name}/{file.parent.name}" for file in sorted(folder.glob("*/config.json"))]
    remedy = "if it is a run folder, take its model/"
    if subfolders:
        remedy = f"take {', '.join(subfolders)}"
    raise SystemExit(f"{flag} {name}: no config.json or no tokenizer in it; {remedy}")


def refuse_wrong_path(name: str, flag: str) -> None:
    """SystemExit for a checkpoint, and for a path that is no folder: the hub would not know them
    either."""
    path = Path(name)
    is_checkpoint = path.parent.name == "checkpoints" and path.exists()
    if is_checkpoint and not (path / "config.json").is_file():
        run = path.parent.parent
        # export would read `latest`, too; its run folder means the same, and is shorter
        source = run if path.name == "latest" else path
        raise SystemExit(
            f"{flag} {name}: a checkpoint is no model. python -m common.export {source} --model "
            f"BASE --out FOLDER makes one of it; a run that has ended leaves {run}/model"
        )
    if path.is_file():
        raise SystemExit(f"{flag} {name}: a file; give the folder of a model")
    if name.startswith(("/", "./", "../", "runs/")) and not path.exists():
        raise SystemExit(f"{flag} {name}: there is no such folder")


def refuse_adapter(folder: Path, place: str) -> None:
    """SystemExit for an adapter in PEFT's format, alone or beside a model: transformers would train
    that model with the adapter, and vLLM would start without it."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        return
    if (folder / "config.json").is_file():
        raise SystemExit(
            f"{place}: an adapter lies beside the model ({file.name}): merge the two, or move "
            "it elsewhere"
        )
    base = json.loads(file.read_text("utf-8")).get("base_model_name_or_path")
    if not base:
        base = "a model that it does not name"
    raise SystemExit(
        f"{place}: an adapter of {base!s:.200}: merge the two, as in the model/ that a run leaves"
    )


def check_files(folder: Path) -> None:
    """ValueError with the name of a model's file that is no regular file, or has wrong content.

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
            if file.name in JSON_FILES:
                check_json_file(file)


def check_json_file(file: Path) -> None:
    """ValueError if a file of a model holds no JSON object, or an end token that is no id."""
    try:
        values = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} is no JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file.name} is no JSON object")
    if file.name in ("config.json", "generation_config.json"):
        ends = values.get("eos_token_id")
        if not isinstance(ends, list):
            ends = [ends]
        for end in ends:
            if end is not None and type(end) is not int:
                raise ValueError(f"{file.name} has the end token {end!r:.60}, which is no id")


def require_weights(path: str, flag: str = "--model") -> list[Path]:
    """The files that hold a model's weights; of two formats the first of SINGLE_FILES counts.
    SystemExit if there is none, if one that the index lists is missing, or if a format has both a
    single file and shards: transformers would read one, vLLM the other."""
    folder = Path(path)
    for name in SINGLE_FILES:
        single = folder / name
        index = folder / f"{name}.index.json"
        shards = shards_of(index, flag) if index.is_file() else []
        if single.is_file():
            others = [shard for shard in shards if shard != name]
            if others:
                raise SystemExit(
                    f"{flag} {path} has its weights twice: in {name}, and in {', '.join(others)}: "
                    "remove one of them"
                )
            return [single]
        for shard in shards:
            if not (folder / shard).is_file():
                raise SystemExit(f"{flag} {path} has no {shard}, which its index lists")
        if shards:
            return [folder / shard for shard in shards]
    names = [name + suffix for name in SINGLE_FILES for suffix in ("", ".index.json")]
    raise SystemExit(f"{flag} {path}: its files hold no weights: neither {' nor '.join(names)}")


def shards_of(index: Path, flag: str) -> list[str]:
    """The names of the files that an index lists. SystemExit for a damaged index."""
    place = f"{flag} {index.parent}"
    with user_errors(f"{place}: {UNREADABLE}"):
        check_json_file(index)
    values = json.loads(index.read_text("utf-8"))
    weight_map = values.get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise SystemExit(f"{place}: {index.name} lists no files of weights: fetch it again")
    if not isinstance(values.get("metadata"), dict):  # transformers needs it
        raise SystemExit(
            f'{place}: {index.name} has no object "metadata": add an empty one, or fetch it again'
        )
    return sorted(set(names))


def check_weights(
    model: nn.Module, path: str, flag: str = "--model", headless: bool = False
) -> None:
    """SystemExit if the weights in a folder are not those of `model`, by their names and shapes;
    no values are read.

    transformers would draw at random what the files lack, and leave out what the model has no place
    for. With `headless` only the backbone counts: files may lack the model's head, or have another
    one.
    """
    missing, unknown, reshaped = compare_weights(model, path, flag)
    refused = unknown
    if headless:
        missing = [name for name in missing if in_backbone(model, name)]
        refused = [name for name in unknown if in_backbone(model, name)]
        reshaped = [entry for entry in reshaped if in_backbone(model, entry[0])]
    prefix = f"{flag} {path}: its files have"
    no_place = f"for which {type(model).__name__} has no place, by its config.json"
    if missing:
        explanation = ""
        # a wrapper puts a prefix in front of all names, such as _orig_mod.
        wrapped_names = [name for name in unknown if name.endswith(f".{missing[0]}")]
        if wrapped_names:
            explanation = (
                f", but {wrapped_names[0]}: a wrapper was saved (torch.compile, DataParallel); "
                "save the model inside it"
            )
        elif refused:
            explanation = f", but {refused[0]}, {no_place}"
        raise SystemExit(f"{prefix} no {missing[0]}{explanation}")
    if refused:
        raise SystemExit(f"{prefix} {refused[0]}, {no_place}")
    if reshaped:
        name, shape, model_shape = reshaped[0]
        raise SystemExit(
            f"{prefix} {name} with shape {list(shape)}, and its config.json wants "
            f"{list(model_shape)}"
        )


def compare_weights(
    model: nn.Module, path: str, flag: str
) -> tuple[list[str], list[str], list[tuple]]:
    """Three lists: names that a folder's files lack, names that `model` has no place for, and
    (name, shape in the files, shape in the model) of those that differ. SystemExit for unreadable
    files."""
    _, report, _ = load_on_meta(model, path, flag)
    buffers = dict(model.named_buffers())
    unknown: list[str] = []
    for name in sorted(report["unexpected_keys"]):
        # buffers are computed; older files also hold masks
        if name not in buffers and not name.endswith(".masked_bias"):
            unknown.append(name)
    return sorted(report["missing_keys"]), unknown, sorted(report["mismatched_keys"])


def load_on_meta(
    model: nn.Module, path: str, flag: str
) -> tuple[nn.Module, dict, dict[str, Tensor]]:
    """Load a folder's files, but no values, into a model like `model`.

    Returns it, transformers' report, and the {name: tensor} of the files, on the meta device.
    SystemExit for unreadable files.
    """
    files = require_weights(path, flag)
    tensors: dict[str, Tensor] = {}
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # else it prints a table of what we refuse in one line
    try:
        for file in files:
            tensors.update(
                transformers.modeling_utils.load_state_dict(str(file), map_location="meta")
            )
        loaded, report = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=dict(tensors),
            device_map={"": "meta"},
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # libraries raise whatever they run into in damaged files
        prefix = f"{flag} {path}: its weights cannot be read (are all files there, and whole?)"
        reason = " ".join(str(error).split())
        raise SystemExit(printable(f"{prefix}: {reason:.300}")) from error
    finally:
        logging.set_verbosity(verbosity)
    return loaded, report, tensors


def in_backbone(model: nn.Module, name: str) -> bool:
    """Whether a weight belongs to the model below its head; its name may lack the backbone's
    prefix."""
    prefix = f"{model.base_model_prefix}."
    part = name.removeprefix(prefix).partition(".")[0]
    return name.startswith(prefix) or part in dict(model.base_model.named_children())


def split_hub_id(name: str) -> tuple[str, str | None, str]:
    """ORG/NAME@REVISION/SUBFOLDER as (ORG/NAME, REVISION, "SUBFOLDER/").

    A revision is a branch, a tag or a commit; None without one. A name of another form comes back
    as the first, which the hub then refuses.
    """
    match = HUB_ID.fullmatch(name)
    if match is None:
        return name, None, ""
    repository, revision, subfolder = match.groups()
    return repository, revision, f"{subfolder[1:]}/" if subfolder else ""


def download(name: str, flag: str, kinds: Sequence[str] = HUB_FILES) -> Path:
    """Download ORG/NAME, ORG/NAME@REVISION or one of them with /SUBFOLDER from the hub: its files
    of these kinds, without those of its subfolders. Returns the folder.

    If it has no config.json, those of its subfolders are downloaded, so that `resolve_model` can
    name them. SystemExit if the hub does not have it.
    """
    repository, revision, subfolder = split_hub_id(name)
    nearest = ""
    close_names = get_close_matches(name, [*FOLDERS, "smollm2"], n=1)
    if close_names:
        nearest = f" (nearest: {close_names[0]})"
    problem = (
        f"no folder, none of {', '.join(EMBEDDED)}, smollm2{nearest}, and the hub does not give "
        "it (HF_ENDPOINT: a mirror)"
    )
    with user_errors(f"{flag} {name}: {problem}"), hub_errors():
        try:
            snapshot = huggingface_hub.snapshot_download(
                repository,
                revision=revision,
                allow_patterns=[subfolder + kind for kind in kinds],
                ignore_patterns=f"{subfolder}*/*",
            )
        except huggingface_hub.errors.RevisionNotFoundError as error:
            missing = revision or "main"
            raise SystemExit(
                f"{flag} {name}: {repository} has no branch, tag or commit {missing}"
            ) from error
        folder = Path(snapshot, subfolder)
        # older repositories have their weights as .bin
        if "*.safetensors" in kinds and not any(folder.glob("*.safetensors")):
            huggingface_hub.snapshot_download(
                repository,
                revision=revision,
                allow_patterns=f"{subfolder}pytorch_model*.bin",
                ignore_patterns=f"{subfolder}*/*",
            )
        if not (folder / "config.json").is_file():
            huggingface_hub.snapshot_download(
                repository, revision=revision, allow_patterns=f"{subfolder}*/config.json"
            )
        return folder


def commit_of(folder: str) -> str | None:
    """The commit of a model's repository, if the folder is in the hub's cache; else None."""
    _, separator, path = folder.rpartition("/snapshots/")
    commit = path.partition("/")[0]
    return commit if separator and COMMIT.fullmatch(commit) else None


def cache_folder() -> Path:
    """Where prepared models are kept: $XDG_CACHE_HOME/minimal-rl, or else ~/.cache/minimal-rl.

    SystemExit if there is no home folder, as for a user whom a container does not know.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if cache.startswith("~"):
        raise SystemExit("smollm2 has no home folder to be kept in: set XDG_CACHE_HOME to a folder")
    return Path(cache).absolute() / "minimal-rl"


def prepared_smollm2(flag: str) -> str:
    """Folder of SmolLM2-135M-Instruct; the first use prepares it, in a process of its own.
    SystemExit with that process's message if it fails."""
    cache = cache_folder()
    folder = cache / SMOLLM2
    # it appears complete, by a rename; if several ranks prepare it, the others wait for the first
    if folder.exists():
        return str(folder)
    problem = f"smollm2 is kept in {cache}, which cannot be written (XDG_CACHE_HOME: another place)"
    with user_errors(f"{flag} {problem}"):
        cache.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache).close()
    module = "common.assets.build.smollm2"
    process = subprocess.run(
        # the folder that holds minimal-rl/, which is `cache`
        [sys.executable, "-m", module, "--cache", str(cache.parent)],
        cwd=Path(__file__).parents[1],  # where `-m` finds common/
        stderr=subprocess.PIPE,
        text=True,
    )
    if process.returncode:
        output = process.stderr.strip()[-2000:]
        raise SystemExit(
            f"{flag} smollm2 is not prepared; `python -m {module}` tries again. It said:\n{output}"
        )
    return str(folder)


def load_tokenizer(
    path: str, trust_remote_code: bool = False, template_args: Mapping[str, Any] | None = None
) -> "transformers.PreTrainedTokenizerBase":
    """The tokenizer of a folder or hub id. template_args: keyword arguments of its chat template,
    in every place that renders one."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        path, trust_remote_code=trust_remote_code
    )
    # also the first call of `encode`: that changes settings, and must not come from a thread
    if not tokenizer.encode("a", add_special_tokens=False):
        raise SystemExit(
            f"{path}: its tokenizer turns text into no tokens: are tokenizer.json and its like "
            "there?"
        )
    if template_args:
        check_template_args(template_args, tokenizer, path)
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **template_args)
    check_template(tokenizer, path)
    return tokenizer


def check_template_args(template_args: Mapping[str, Any], tokenizer, path: str) -> None:
    """SystemExit for arguments that the chat template does not read, or that the scripts set."""
    set_by_scripts = {"messages", *signature(tokenizer.apply_chat_template).parameters}
    for name in template_args:
        if name in set_by_scripts:
            raise SystemExit(f"--template-args: {name} is set by the script itself")
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise SystemExit(f"--template-args: the chat template of {path} has no {name!r}")


def check_template(tokenizer, path: str) -> None:
    """SystemExit for a chat template that is cut off or is no template; else every row would count
    as bad."""
    if not tokenizer.chat_template:
        return
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "."}], tokenize=False)
    except TemplateSyntaxError as error:
        raise SystemExit(
            f"{path}: its chat template is damaged (line {error.lineno}: {error.message}): fetch "
            "chat_template.jinja or tokenizer_config.json again"
        ) from error
    except (TemplateError, TypeError, ValueError):
        # the template needs other messages: rows show whether theirs will do
        pass

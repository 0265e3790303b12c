"""Which files of rows a name stands for: a path, a pattern, an address; those of a folder, or of a
split in one."""

import os
import re
from contextlib import suppress
from glob import glob, has_magic
from pathlib import Path

import pyarrow.parquet as pq

# ends the name of a file of rows
ROWS_NAME = re.compile(r"\.(parquet|(json|jsonl|ndjson)(\.gz)?)$", re.IGNORECASE)
# ends the stem of a part of a split: -00000-of-00002
PART = re.compile(r"[-_]\d+(-of-\d+)?(-[0-9a-f]{16})?$")
ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/+", re.IGNORECASE)  # a Path has made one slash of two
ADDRESS_OF_HUB = re.compile(
    r"(?:hf:/+|https?:/+(?:www\.)?(?:huggingface\.co|hf\.co|hf-mirror\.com)/)datasets/([\w.-]+/[\w.-]+)",
    re.IGNORECASE,
)
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+){0,2}")  # of a data set
# of a data set
ABOUT_THE_ROWS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
# folders of a snapshot that may have its files; "": itself
CONFIGS = ("data", "main", "default", "")
FETCH = (
    "`hf download {} --repo-type dataset --local-dir FOLDER` fetches the files of a data "
    "set of the hub"
)


def find_files(name: str, flag: str) -> list[Path]:
    """The file of that name, or those that a pattern matches. What is neither stays as it is: an id
    of the hub, or nothing. FileNotFoundError or ValueError with the `flag` for an address, and for
    a pattern of no or several kinds.
    """
    path = Path(os.path.expanduser(name))
    if path.exists():
        return [path]
    refuse_address(name, flag)
    if not has_magic(name):
        return [path]
    paths = [
        Path(found) for found in sorted(glob(str(path), recursive=True)) if Path(found).is_file()
    ]
    if not paths:
        raise FileNotFoundError(f"{flag}: no file matches {name}")
    examples: dict[str, Path] = {}
    for path in paths:
        examples.setdefault(kind_of(path), path)
    if len(examples) > 1:
        listed = " and ".join(str(path) for path in list(examples.values())[:2])
        raise ValueError(
            f"{flag}: {name} matches files of several kinds, such as {listed}: give a pattern "
            "for each"
        )
    return paths


def refuse_address(name: str, flag: str) -> None:
    """ValueError, with what to do, for what is no path but an address."""
    address = ADDRESS.match(name)
    if not address:
        return
    shown = f"{address[1]}://{name[address.end() :]}"
    remedy = "download it, and give the path of the file"
    if on_hub := ADDRESS_OF_HUB.match(name):
        remedy = (
            f"{FETCH.format(on_hub[1])}; --train-data and --eval-data also take "
            f"{on_hub[1]}:CONFIG:SPLIT"
        )
    raise ValueError(f"{flag}: {shown} is an address, not a path: {remedy}")


def is_hub_id(path: Path) -> bool:
    """May it be ORG/NAME[:CONFIG][:SPLIT]? Neither it nor ORG is here, and files of rows are called
    otherwise."""
    is_here = path.exists() or path.parent.exists()
    return not is_here and not ROWS_NAME.search(path.name) and bool(HUB_ID.fullmatch(str(path)))


def kind_of(path: Path) -> str:
    """ ".parquet", ".jsonl.gz", ... of a file of rows, by its name; "" of another one."""
    match = ROWS_NAME.search(path.name)
    return match[0].lower() if match else ""


def stem_of(path: Path) -> str:
    """The name of a file of rows without its kind: "test" of test.jsonl.gz."""
    return ROWS_NAME.sub("", path.name) if kind_of(path) else path.stem


def files_in(folder: Path) -> list[Path]:
    """The files of rows in a folder, by name: not what a data set says about itself, nor what is
    hidden."""
    paths = []
    for path in sorted(folder.glob("*")):
        if (
            kind_of(path)
            and path.is_file()
            and path.name not in ABOUT_THE_ROWS
            and not path.name.startswith(".")
        ):
            paths.append(path)
    return paths


def sources_in(folder: Path) -> list[Path]:
    """The files of rows in a folder, without those that common/prepare has written there."""
    return [path for path in files_in(folder) if not is_prepared(path)]


def is_prepared(path: Path) -> bool:
    """Has it verl's columns? A damaged file has not."""
    if kind_of(path) == ".parquet":
        with suppress(OSError, ValueError):
            return {"data_source", "prompt"} <= set(pq.read_schema(path).names)
    return False


def split_files(source: str, split: str, flag: str) -> list[Path]:
    """The files of a split in a folder, or in a snapshot of the hub: train.jsonl,
    data/train-00000-of-00002.parquet, main/train/0000.parquet. Of two kinds text is taken. None if
    there are none; ValueError, FileNotFoundError."""
    refuse_address(source, flag)
    folder = Path(os.path.expanduser(source))
    if not folder.is_dir():
        remedy = f"; {FETCH.format(source)}" if is_hub_id(folder) else ""
        raise FileNotFoundError(f'{flag} {source}: expected "hub", or a folder that exists{remedy}')
    for config in CONFIGS:
        inside = sources_in(folder / config)
        named = [path for path in inside if PART.sub("", stem_of(path)).lower() == split]
        paths = named or sources_in(folder / config / split)
        texts = [path for path in paths if kind_of(path) != ".parquet"]
        kinds = sorted({kind_of(path) for path in texts or paths})
        if len(kinds) > 1:
            raise ValueError(
                f"{flag} {source}: the split {split} is there as {' and as '.join(kinds)}: "
                "delete one"
            )
        if paths:
            return texts or paths
    return []

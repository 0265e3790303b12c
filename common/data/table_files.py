"""Files of rows by name: a path or a pattern; all of a folder, or those of a split in it."""

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
ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/+", re.IGNORECASE)  # a Path makes one slash of two
ADDRESS_OF_HUB = re.compile(
    r"(?:hf:/+|https?:/+(?:www\.)?(?:huggingface\.co|hf\.co|hf-mirror\.com)/)"
    r"datasets/([\w.-]+/[\w.-]+)",
    re.IGNORECASE,
)
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+){0,2}")  # of a data set
# files that describe a data set
ABOUT_THE_ROWS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
# folders of a snapshot that may have its files; "" is the snapshot itself
CONFIGS = ("data", "main", "default", "")
FETCH = (
    "`hf download {} --repo-type dataset --local-dir FOLDER` fetches the files of a data set of "
    "the hub"
)


def find_files(name: str, flag: str) -> list[Path]:
    """The file of that name, or those that a pattern matches.

    Any other name is returned as it is: it may be an id of the hub. ValueError for an address, and
    for a pattern that matches several kinds of files; FileNotFoundError for one that matches none.
    Both name the `flag`.
    """
    path = Path(os.path.expanduser(name))
    if path.exists():
        return [path]
    refuse_address(name, flag)
    if not has_magic(name):
        return [path]
    matches = [Path(match) for match in sorted(glob(str(path), recursive=True))]
    paths = [match for match in matches if match.is_file()]
    if not paths:
        raise FileNotFoundError(f"{flag}: no file matches {name}")
    example_of_kind: dict[str, Path] = {}
    for path in paths:
        example_of_kind.setdefault(kind_of(path), path)
    if len(example_of_kind) > 1:
        first, second, *_ = example_of_kind.values()
        raise ValueError(
            f"{flag}: {name} matches files of several kinds, such as {first} and {second}: give a "
            "pattern for each"
        )
    return paths


def refuse_address(name: str, flag: str) -> None:
    """ValueError with a remedy for an address, which is no path."""
    address = ADDRESS.match(name)
    if not address:
        return
    url = f"{address[1]}://{name[address.end() :]}"
    remedy = "download it, and give the path of the file"
    address_of_hub = ADDRESS_OF_HUB.match(name)
    if address_of_hub:
        hub_id = address_of_hub[1]
        remedy = (
            f"{FETCH.format(hub_id)}; --train-data and --eval-data also take {hub_id}:CONFIG:SPLIT"
        )
    raise ValueError(f"{flag}: {url} is an address, not a path: {remedy}")


def is_hub_id(path: Path) -> bool:
    """Whether it may be ORG/NAME[[:CONFIG]:SPLIT].

    That is, neither it nor ORG exists here, and it is not named as a file of rows.
    """
    if path.exists() or path.parent.exists() or ROWS_NAME.search(path.name):
        return False
    return bool(HUB_ID.fullmatch(str(path)))


def kind_of(path: Path) -> str:
    """ ".parquet", ".jsonl.gz", ... of a file of rows, by its name; "" of another file."""
    match = ROWS_NAME.search(path.name)
    return match[0].lower() if match else ""


def stem_of(path: Path) -> str:
    """The name of a file of rows without its kind: "test" of test.jsonl.gz."""
    return ROWS_NAME.sub("", path.name) if kind_of(path) else path.stem


def files_in(folder: Path) -> list[Path]:
    """The files of rows in a folder, by name; not those about a data set, nor hidden ones."""
    paths = []
    for path in sorted(folder.glob("*")):
        if path.name in ABOUT_THE_ROWS or path.name.startswith("."):
            continue
        if kind_of(path) and path.is_file():
            paths.append(path)
    return paths


def sources_in(folder: Path) -> list[Path]:
    """The files of rows in a folder, without those that common/prepare has written there."""
    return [path for path in files_in(folder) if not is_prepared(path)]


def is_prepared(path: Path) -> bool:
    """Whether it is a parquet file with verl's columns; a damaged one is not."""
    if kind_of(path) == ".parquet":
        with suppress(OSError, ValueError):
            return {"data_source", "prompt"} <= set(pq.read_schema(path).names)
    return False


def split_files(source: str, split: str, flag: str) -> list[Path]:
    """The files of a split in a folder, or in a snapshot of the hub; [] if there are none.

    They are train.jsonl, data/train-00000-of-00002.parquet, main/train/0000.parquet, ... If there
    are text files and parquet, the text files are taken. FileNotFoundError if the folder does not
    exist; ValueError for an address, and for text files of several kinds.
    """
    refuse_address(source, flag)
    folder = Path(os.path.expanduser(source))
    if not folder.is_dir():
        remedy = f"; {FETCH.format(source)}" if is_hub_id(folder) else ""
        raise FileNotFoundError(f'{flag} {source}: expected "hub", or a folder that exists{remedy}')
    for config in CONFIGS:
        paths = []
        for path in sources_in(folder / config):
            if PART.sub("", stem_of(path)).lower() == split:
                paths.append(path)
        if not paths:
            paths = sources_in(folder / config / split)
        if not paths:
            continue
        text_files = [path for path in paths if kind_of(path) != ".parquet"]
        if text_files:
            paths = text_files
        kinds = sorted({kind_of(path) for path in paths})
        if len(kinds) > 1:
            raise ValueError(
                f"{flag} {source}: the split {split} is there as {' and as '.join(kinds)}: "
                "delete one"
            )
        return paths
    return []

"""The pictures of a row: which they are, their files, their tokens. Without torch."""

import filecmp
import io
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image, UnidentifiedImageError

from common.pictures import FORMATS, BadRow, Media, PixelLimits, check_size

if TYPE_CHECKING:
    from common.vision import Vision

MARKS = {"<image>": "image", "<video>": "video"}  # placeholders in the prompts of data sets
# placeholders in texts of ms-swift and LLaMA-Factory, and the columns that they stand for
FOREIGN_MARKS = [
    ("<bbox>", "objects"),
    ("<ref-object>", "objects"),
    ("<audio>", "audios"),
    ("<audio>", "audio"),
]
FOREIGN_COLUMNS = ("objects", "audios", "audio")
Picture = tuple[str, list]  # "image" or "video", and its frames as a row holds them


def picture_sources(record: Mapping, text: str) -> list[Picture]:
    """A row's pictures in the order of their marks in its prompt. BadRow if their numbers differ;
    in a row without pictures the marks are text.

    text: of the prompt. A row of PyVision has one picture, as `image`, or as a path in `mm_hint`.
    The hint counts only if the prompt has a mark for it; else `for_interpreter` gives it to a tool.
    """
    refuse_foreign_marks(record, text)
    images = images_of(record, text)
    videos = record.get("videos") or []
    if not isinstance(videos, list) or any(
        not isinstance(frames, list) or not frames for frames in videos
    ):
        raise BadRow("a video is given as the list of its frames")
    if not images and not videos:
        return []
    kinds = [MARKS[mark] for mark in re.findall("<image>|<video>", text)]
    pictures_of_kind = {"image": [[image] for image in images], "video": videos}
    for kind, pictures in pictures_of_kind.items():
        num_marks = kinds.count(kind)
        if len(pictures) != num_marks:
            raise BadRow(
                f"{len(pictures)} {kind}s, and <{kind}> stands {num_marks} times in the prompt"
            )
    remaining = {kind: iter(pictures) for kind, pictures in pictures_of_kind.items()}
    return [(kind, next(remaining[kind])) for kind in kinds]


def images_of(record: Mapping, text: str) -> list:
    """The images of a row that are in its prompt: `images`, `image`, or PyVision's hint."""
    images = record.get("images") or record.get("image")
    hint = record.get("mm_hint")
    if not images and isinstance(hint, Mapping) and "<image>" in text:
        images = hint.get("hint_path")
    if not images:
        return []
    return images if isinstance(images, list) else [images]


def refuse_foreign_marks(record: Mapping, text: str) -> None:
    """BadRow for a mark that stands for a column which only another system reads."""
    for mark, column in FOREIGN_MARKS:
        value = record.get(column)
        if isinstance(value, Mapping):
            value = any(value.values())  # Arrow fills in the keys that a row lacks
        if value and mark in text:
            raise BadRow(
                f"{mark} stands for what the column {column} holds, which is not read: write that "
                "into the text"
            )


def for_interpreter(hint: Mapping, text: str) -> dict:
    """`tools_kwargs` that give PyVision's picture or video to the tool python.

    {} if the picture is in the prompt.
    """
    if "<image>" in text:
        return {}
    path = hint["hint_path"]
    is_list = isinstance(path, list)
    name = "image_hint_0"
    kind = "image"
    if hint.get("hint_type") == "video":
        name = "video_clue_0"
        kind = "video" if is_list else "file"
    media = {"kind": kind, "frames": path if is_list else [path]}
    return {"python": {"create_kwargs": {name: media}}}


def read_tool_media(
    tools: Mapping[str, Mapping], root: Path | None, size: int = -1, *, beside: Path | None = None
) -> dict[str, dict]:
    """A row's keyword arguments for its tools, with the frames of each {"kind", "frames"} as bytes.

    tools: name -> keyword arguments. size: how many bytes of each frame to read; -1 reads all.
    BadRow for a file that cannot be read.
    """
    kwargs_of_tool: dict[str, dict] = {}
    for name, kwargs in tools.items():
        kwargs_of_tool[name] = {}
        for key, argument in kwargs.items():
            if isinstance(argument, Mapping) and {"kind", "frames"} <= argument.keys():
                frames = [media_bytes(x, root, size, beside=beside) for x in argument["frames"]]
                argument = argument | {"frames": frames}
            kwargs_of_tool[name][key] = argument
    return kwargs_of_tool


def media_bytes(
    item: object, root: Path | None, size: int = -1, *, beside: Path | None = None
) -> bytes:
    with media_file(item, root, beside=beside) as file:
        try:
            return file.read(size)
        except OSError as error:  # a stale handle of a network file system, a bad block
            raise BadRow(f"cannot read {file.name:.200} ({error.strerror})") from error


def media_file(item: object, root: Path | None, *, beside: Path | None = None) -> io.BufferedIOBase:
    """The open file of a row's entry: bytes, a path, or {bytes, path}. BadRow with the reason.

    root, beside: as in `find_media`.
    """
    if isinstance(item, Mapping):
        source = item.get("bytes") or item.get("path")
    else:
        source = item
    if isinstance(source, bytes):
        return io.BytesIO(source)
    if not isinstance(source, str):
        raise BadRow(f"{item!r:.60} is neither bytes, nor a path, nor {{bytes, path}}")
    path = source
    try:
        path = find_media(source, root, beside)
        # opening a pipe would wait for a writer
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise BadRow(f"{path} is no regular file")
        return open(path, "rb")
    except BadRow:
        raise
    except (OSError, ValueError) as error:
        # a ValueError for a path with a NUL, or with half a surrogate pair
        reason = getattr(error, "strerror", None) or error
        folders = f"{beside} or --media-root" if beside else "--media-root"
        raise BadRow(
            f"cannot open {path:.200} ({reason}); relative paths start in {folders}"
        ) from error


def find_media(name: str, root: Path | None, beside: Path | None) -> str:
    """The path of a row's picture: in `beside`, the folder of its data file, else under `root`.

    Without a `root` the second place is the current folder. With a `root`, a path must not lead out
    of its folder, be it by "..", through a link, or as an absolute path. BadRow for one that does,
    and for different files at the two places.
    """
    folders: dict[str, Path | None] = {}  # path -> the folder that it may not leave
    if beside and not os.path.isabs(name):
        folders[os.path.join(beside, name)] = beside
    path_under_root = os.path.join(root or "", name)
    folders[path_under_root] = root
    paths = [path for path in folders if os.path.exists(path)]
    if len(paths) == 2 and not os.path.samefile(*paths) and not filecmp.cmp(*paths, shallow=False):
        raise BadRow(
            f"{paths[0]} and {paths[1]} differ, and either may be meant: pictures beside their "
            "data files need no --media-root; else move one of them away"
        )
    if not paths:
        paths = [path_under_root]
    if not root:
        return paths[0]
    for path in paths:
        if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folders[path])):
            return path
    outside = paths[-1]
    folder = f"{beside}, the folder of its data file"
    if folders[outside] == root:
        folder = f"--media-root {root}"
    raise BadRow(f"{outside} leads out of {folder}")


def open_media(
    picture: Picture, root: Path | None, limits: PixelLimits, *, beside: Path | None = None
) -> Media:
    """A row's picture, decoded. BadRow if it cannot be read."""
    kind, items = picture
    try:
        frames = [media_bytes(item, root, beside=beside) for item in items]
        return Media.open(kind, frames, limits)
    except (MemoryError, ValueError) as error:
        raise BadRow(str(error) or "not enough memory to decode it") from error


def count_tokens(
    picture: Picture, root: Path | None, vision: "Vision", *, beside: Path | None = None
) -> int:
    """Tokens of a picture, its timestamps included, from the header of its first frame. BadRow if
    it cannot be read.

    The files of the other frames are opened, but not read.
    """
    kind, items = picture
    for item in items[1:]:
        media_file(item, root, beside=beside).close()
    with media_file(items[0], root, beside=beside) as file:
        try:
            with Image.open(file, formats=FORMATS) as image:
                check_size(image)
                width, height = vision.limits.shown_size(kind, *image.size)
        except UnidentifiedImageError as error:  # its text holds an address in memory
            raise BadRow(f"no readable picture: none of {', '.join(FORMATS)}") from error
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise BadRow(f"no readable picture ({str(error)[:80]})") from error
    return vision.num_tokens(kind, len(items), height, width)

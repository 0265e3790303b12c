"""The pictures of a row: which they are, the files that hold them, their tokens. Without torch."""

import filecmp
import io
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from common.pictures import CELL, FORMATS, BadRow, Media, PixelLimits, check_size

MARKS = {"<image>": "image", "<video>": "video"}  # placeholders in the prompts of data sets
# placeholders in texts of ms-swift and LLaMA-Factory, and the columns that hold what they stand for
FOREIGN_MARKS = [
    ("<bbox>", "objects"),
    ("<ref-object>", "objects"),
    ("<audio>", "audios"),
    ("<audio>", "audio"),
]
FOREIGN_COLUMNS = ("objects", "audios", "audio")
Picture = tuple[str, list]  # "image" or "video", and its frames as a row holds them


def picture_sources(record: Mapping, text: str) -> list[Picture]:
    """A row's pictures in the order of their marks in its prompt. BadRow if their numbers differ.

    PyVision's rows have one, as `image`, or as a path in `mm_hint`, which counts if the prompt has
    a mark for it; else it is `for_interpreter`.
    """
    refuse_foreign_marks(record, text)
    hint = record.get("mm_hint")
    one = record.get("image") or (
        hint.get("hint_path") if isinstance(hint, Mapping) and "<image>" in text else None
    )
    images = record.get("images") or one or []
    images = images if isinstance(images, list) else [images]
    left = {"image": [[item] for item in images], "video": list(record.get("videos") or [])}
    if not any(left.values()):
        return []
    kinds = [MARKS[mark] for mark in re.findall("<image>|<video>", text)]
    for kind, items in left.items():
        if len(items) != kinds.count(kind):
            raise BadRow(
                f"{len(items)} {kind}s, and <{kind}> stands {kinds.count(kind)} times in the prompt"
            )
    if any(not isinstance(frames, list) or not frames for frames in left["video"]):
        raise BadRow("a video is given as the list of its frames")
    return [(kind, left[kind].pop(0)) for kind in kinds]


def refuse_foreign_marks(record: Mapping, text: str) -> None:
    """BadRow for a text that only another system can complete, from a column that is not read
    here."""
    for mark, column in FOREIGN_MARKS:
        held = record.get(column)
        if isinstance(held, Mapping):
            held = any(held.values())  # Arrow fills in what a row lacks
        if held and mark in text:
            told = f"{mark} stands for what the column {column} holds, which is not read"
            raise BadRow(f"{told}: write that into the text")


def for_interpreter(hint: Mapping, text: str) -> dict:
    """`tools_kwargs` of PyVision's rows whose picture or video is not in the prompt: the tool
    python gets it."""
    if "<image>" in text:
        return {}
    path, name, kind = hint["hint_path"], "image_hint_0", "image"
    if hint.get("hint_type") == "video":
        name, kind = "video_clue_0", "video" if isinstance(path, list) else "file"
    return {
        "python": {
            "create_kwargs": {
                name: {"kind": kind, "frames": path if isinstance(path, list) else [path]}
            }
        }
    }


def read_tool_media(
    tools: Mapping[str, Mapping], root: Path | None, size: int = -1, *, beside: Path | None = None
) -> dict[str, dict]:
    """What a row gives to its tools, frames of {"kind", "frames"} as bytes, `size` of each at most.
    BadRow."""

    def read(argument):
        if not isinstance(argument, Mapping) or not {"kind", "frames"} <= argument.keys():
            return argument
        return argument | {
            "frames": [media_bytes(item, root, size, beside=beside) for item in argument["frames"]]
        }

    return {
        name: {key: read(argument) for key, argument in given.items()}
        for name, given in tools.items()
    }


def media_bytes(
    item: object, root: Path | None, size: int = -1, *, beside: Path | None = None
) -> bytes:
    with media_file(item, root, beside=beside) as file:
        return file.read(size)


def media_file(item: object, root: Path | None, *, beside: Path | None = None) -> io.BufferedIOBase:
    """The file that a row's entry stands for: bytes, a path, {bytes, path}. BadRow with the
    reason."""
    held = item.get("bytes") or item.get("path") if isinstance(item, Mapping) else item
    if isinstance(held, bytes):
        return io.BytesIO(held)
    if not isinstance(held, str):
        raise BadRow(f"{item!r:.60} is neither bytes, nor a path, nor {{bytes, path}}")
    path = held
    try:
        path = find_media(held, root, beside)
        # opening a pipe would wait for whoever writes to it
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise BadRow(f"{path} is no regular file")
        return open(path, "rb")
    except BadRow:
        raise
    except (OSError, ValueError) as error:
        # the latter: a path with a NUL, or with half a surrogate pair
        why = getattr(error, "strerror", None) or error
        folders = f"{beside} or --media-root" if beside else "--media-root"
        raise BadRow(
            f"cannot open {path:.200} ({why}); relative paths start in {folders}"
        ) from error


def find_media(name: str, root: Path | None, beside: Path | None) -> str:
    """Where a row's path leads: `beside` its data file, else under the `root`. BadRow if these are
    two pictures.

    Without a `root` the second place is the current folder. With one no path may leave its folder,
    by "..", through a link, or as an absolute one.
    """
    folders = {os.path.join(root or "", name): root}
    if beside and not os.path.isabs(name):
        folders = {os.path.join(beside, name): beside} | folders
    paths = [path for path in folders if os.path.exists(path)]
    if len(paths) == 2 and not os.path.samefile(*paths) and not filecmp.cmp(*paths, shallow=False):
        raise BadRow(
            f"{paths[0]} and {paths[1]} differ, and either may be meant: pictures beside "
            "their data files need no "
            "--media-root; else move one of them away"
        )
    if not paths:
        paths = [os.path.join(root or "", name)]
    if not root:
        return paths[0]
    for path in paths:
        if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folders[path])):
            return path
    folder = (
        f"--media-root {root}"
        if folders[path] == root
        else f"{beside}, the folder of its data file"
    )
    raise BadRow(f"{path} leads out of {folder}")


def open_media(
    picture: Picture, root: Path | None, limits: PixelLimits, *, beside: Path | None = None
) -> Media:
    """BadRow for what cannot be read."""
    kind, frames = picture
    try:
        return Media.open(kind, [media_bytes(item, root, beside=beside) for item in frames], limits)
    except (MemoryError, ValueError) as error:
        raise BadRow(str(error) or "not enough memory to decode it") from error


def count_tokens(
    picture: Picture, root: Path | None, limits: PixelLimits, *, beside: Path | None = None
) -> int:
    """Tokens of a picture, from the header of its first frame; the others need only be there.
    BadRow, too."""
    kind, frames = picture
    for item in frames[1:]:
        media_file(item, root, beside=beside).close()
    with media_file(frames[0], root, beside=beside) as file:
        try:
            with Image.open(file, formats=FORMATS) as image:
                check_size(image)
                width, height = limits.shown_size(kind, *image.size)
        except UnidentifiedImageError as error:  # its text holds an address in memory
            raise BadRow(f"no readable picture: none of {', '.join(FORMATS)}") from error
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise BadRow(f"no readable picture ({str(error)[:80]})") from error
    return -(-len(frames) // 2) * (width // CELL) * (height // CELL)

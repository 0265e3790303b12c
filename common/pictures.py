"""Pictures without torch: opened, checked, resized. One rule says how large anything is shown, to
policy and trainer.

A picture is decoded and resized once (`Media.open`), for trainer and engine; tools cut from the
encoded originals.
"""

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor, sqrt
from typing import TYPE_CHECKING

from PIL import Image, ImageOps, UnidentifiedImageError

if TYPE_CHECKING:
    import numpy as np

CELL = 28  # side, in pixels, of what becomes one visual token: 2 x 2 patches of 14
MAX_RATIO = 200  # of the sides: Qwen2-VL's image processor refuses more
MAX_SOURCE_PIXELS = 89_478_485  # where Pillow begins to warn of a decompression bomb
MAX_SIDE = 100_000  # pixels: Pillow's decoders run out of numbers beyond, and call it memory
# some of Pillow's others start programs
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")


class BadRow(ValueError):
    """What is wrong with a row of a data set, in a few words."""


def shown_size(width: int, height: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(width, height) at which a picture is shown: multiples of 28, at least 28, at most 1:200.

    It is what Qwen2-VL's `smart_resize` gives, if that accepts the picture and would accept its own
    result again. Otherwise sides below 28, and then the shorter one up to a 200th of the longer,
    are enlarged first; and the result is cut to 1:200. Area, as of `smart_resize`: at most
    max_pixels, if that is at least 784 * (ratio of the sides + 1) and 4 * min_pixels; rounding up
    may exceed it below that. ValueError if max_pixels is below 784 or min_pixels.
    """
    if max_pixels < CELL**2 or min_pixels > max_pixels:
        raise ValueError(
            f"shown_size: got min_pixels {min_pixels}, max_pixels {max_pixels}; the latter is "
            "the larger"
        )
    acceptable = 0 < max(width, height) <= MAX_RATIO * min(width, height)
    size = smart_resize(width, height, min_pixels, max_pixels) if acceptable else (0, 0)
    if min(size) < CELL:
        longer = max(width, height, CELL)
        width, height = (max(side, CELL, longer / MAX_RATIO) for side in (width, height))
        size = smart_resize(width, height, min_pixels, max_pixels)
    longest = MAX_RATIO * min(size)
    return min(size[0], longest), min(size[1], longest)


def smart_resize(width: float, height: float, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Qwen2-VL's rule: to the nearest multiples of 28, scaled if their area is out of bounds."""
    nearest = round(width / CELL) * CELL, round(height / CELL) * CELL
    if nearest[0] * nearest[1] > max_pixels:
        scale = sqrt(width * height / max_pixels)
        return max(CELL, floor(width / scale / CELL) * CELL), max(
            CELL, floor(height / scale / CELL) * CELL
        )
    if nearest[0] * nearest[1] < min_pixels:
        scale = sqrt(min_pixels / (width * height))
        return ceil(width * scale / CELL) * CELL, ceil(height * scale / CELL) * CELL
    return nearest


def decode(data: bytes) -> Image.Image:
    """The picture in RGB, upright, at its own resolution. ValueError with a short reason if it
    cannot be read."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        check_size(image)
        return to_rgb(ImageOps.exif_transpose(image))
    except MemoryError:
        raise
    except UnidentifiedImageError as error:  # its text holds an address in memory
        raise ValueError(f"unreadable image: none of {', '.join(FORMATS)}") from error
    except Exception as error:
        # on broken files Pillow's decoders raise what they happen to run into
        raise ValueError(f"unreadable image: {error!s:.200}") from error


def check_size(image: Image.Image) -> None:
    """ValueError for a picture that is empty or too large to be read."""
    if not 0 < image.width * image.height <= MAX_SOURCE_PIXELS:
        raise ValueError(
            f"{image.width}x{image.height} pixels, at most {MAX_SOURCE_PIXELS} are read"
        )
    if max(image.size) > MAX_SIDE:
        raise ValueError(f"{image.width}x{image.height} pixels: no side may exceed {MAX_SIDE}")


def to_rgb(image: Image.Image) -> Image.Image:
    """Transparency becomes white, 16 bits become 8. ValueError for numbers of which none is known
    to be white."""
    if image.mode in ("I", "F") and (
        (most := max(map(abs, image.getextrema()))) > 255 or 0 < most <= 1
    ):
        raise ValueError("a picture of 32-bit numbers, not of 0 to 255: which of them is white?")
    if image.mode.startswith("I;16"):
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def encode(image: Image.Image | bytes) -> bytes:
    """PNG, little compressed: ten times as fast. Bytes stay what they are; ValueError if `decode`
    cannot read them."""
    if isinstance(image, bytes):
        decode(image)
        return image
    check_size(image)
    file = io.BytesIO()
    to_rgb(image).save(file, "PNG", compress_level=1, icc_profile=None)
    return file.getvalue()


def shown(size: tuple[int, int], kind: str, context: dict) -> tuple[int, int]:
    """How large a picture is shown: `kind` "image", which crops are too, or "video" for frames,
    selected or not."""
    max_pixels = context["max_pixels"] if kind == "image" else context["max_frame_pixels"]
    return shown_size(*size, min(context["min_pixels"], max_pixels), max_pixels)


@dataclass(frozen=True)
class PixelLimits:
    """Areas (pixels) that pictures are resized to: images and crops, and each frame of a video."""

    min_pixels: int
    max_pixels: int
    max_frame_pixels: int

    def shown_size(self, kind: str, width: int, height: int) -> tuple[int, int]:
        return shown((width, height), kind, vars(self))


@dataclass(eq=False)
class Media:
    """An image or a video: what is shown of it, and the encoded originals, which tools cut from."""

    kind: str  # "image" or "video"
    frames: list[bytes]  # encoded, original resolution; an image has one
    # [F, H, W, 3] uint8, resized: multiples of 28; what trainer and engine see
    pixels: "np.ndarray"
    is_frame: bool = False  # an image that was a frame of a video, and is shown as large as one

    @classmethod
    def open(
        cls, kind: str, frames: Sequence[bytes], limits: PixelLimits, is_frame: bool = False
    ) -> "Media":
        """ValueError, with a short reason, for frames that cannot be decoded. All get the size of
        the first."""
        import numpy as np  # not for the workers of tools, which only decode

        size, shown = None, []
        for data in frames:
            picture = decode(data)
            size = size or limits.shown_size("video" if is_frame else kind, *picture.size)
            shown.append(
                np.asarray(picture.resize(size, resample=3) if picture.size != size else picture)
            )
        return cls(kind, list(frames), np.stack(shown), is_frame)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patches: pairs of frames, rows, columns."""
        frames, height, width, _ = self.pixels.shape
        return -(-frames // 2), height // 14, width // 14

    @property
    def num_tokens(self) -> int:
        frames, rows, columns = self.grid
        return frames * rows * columns // 4

    @cached_property
    def uuid(self) -> str:
        digest = hashlib.blake2b(f"{self.kind}{self.pixels.shape}".encode(), digest_size=16)
        digest.update(self.pixels.tobytes())
        return digest.hexdigest()


def blank() -> Media:
    """The smallest picture: a rank without any runs the vision tower on it, as the others run it on
    theirs."""
    import numpy as np

    return Media("image", [], np.zeros((1, CELL, CELL, 3), dtype=np.uint8))

"""Pictures without torch: opened, checked, resized.

One rule (`shown_size`) gives the size at which policy and trainer see a picture. It is decoded and
resized once (`Media.open`), for trainer and engine; tools cut from the encoded originals.
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

CELL = 28  # side, in pixels, of a visual token of Qwen2.5-VL: 2 x 2 patches of 14
MAX_RATIO = 200  # of the sides: Qwen2-VL's image processor refuses more
MAX_SOURCE_PIXELS = 89_478_485  # where Pillow begins to warn of a decompression bomb
MAX_SIDE = 100_000  # pixels: beyond it Pillow's decoders overflow, and report it as lack of memory
# some of Pillow's other decoders start programs
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")


class BadRow(ValueError):
    """What is wrong with a row of a data set, in a few words."""


def shown_size(
    width: int, height: int, min_pixels: int, max_pixels: int, cell: int = CELL
) -> tuple[int, int]:
    """(width, height) at which a picture is shown: multiples of `cell`, the side of a visual token,
    at least one, at most 1:200.

    It is the result of Qwen2-VL's `smart_resize`, if that accepts the picture and would accept its
    own result again. Otherwise sides below `cell`, and then the shorter one up to a 200th of the
    longer, are enlarged first; and the result is cut to 1:200. The area, as with `smart_resize`, is
    at most max_pixels, if that is at least cell² * (ratio of the sides + 1) and 4 * min_pixels;
    below that rounding up may exceed it. ValueError if max_pixels is below cell² or min_pixels.
    """
    if max_pixels < cell**2 or min_pixels > max_pixels:
        raise ValueError(
            f"shown_size: got min_pixels {min_pixels}, max_pixels {max_pixels}; max_pixels "
            f"must be at least min_pixels, and {cell**2}"
        )
    size = (0, 0)
    if 0 < max(width, height) <= MAX_RATIO * min(width, height):
        size = smart_resize(width, height, min_pixels, max_pixels, cell)
    if min(size) < cell:
        longer = max(width, height, cell)
        enlarged_width = max(width, cell, longer / MAX_RATIO)
        enlarged_height = max(height, cell, longer / MAX_RATIO)
        size = smart_resize(enlarged_width, enlarged_height, min_pixels, max_pixels, cell)
    longest = MAX_RATIO * min(size)
    return min(size[0], longest), min(size[1], longest)


def smart_resize(
    width: float, height: float, min_pixels: int, max_pixels: int, cell: int
) -> tuple[int, int]:
    """Qwen2-VL's rule: the nearest multiples of `cell`, scaled if their area is out of bounds."""
    new_width = round(width / cell) * cell
    new_height = round(height / cell) * cell
    area = new_width * new_height
    if area > max_pixels:
        scale = sqrt(width * height / max_pixels)
        new_width = max(cell, floor(width / scale / cell) * cell)
        new_height = max(cell, floor(height / scale / cell) * cell)
    elif area < min_pixels:
        scale = sqrt(min_pixels / (width * height))
        new_width = ceil(width * scale / cell) * cell
        new_height = ceil(height * scale / cell) * cell
    return new_width, new_height


def decode(data: bytes) -> Image.Image:
    """The picture in RGB, upright, at its own resolution. ValueError with a short reason."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        check_size(image)
        return to_rgb(ImageOps.exif_transpose(image))
    except MemoryError:
        raise
    except UnidentifiedImageError as error:  # its text holds an address in memory
        raise ValueError(f"unreadable image: none of {', '.join(FORMATS)}") from error
    except Exception as error:
        # on broken files Pillow's decoders raise errors of any kind
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
    """Transparency becomes white, 16 bits become 8. ValueError for numbers of an unknown range."""
    if image.mode in ("I", "F"):
        lowest, highest = image.getextrema()
        # NaN is in no range
        is_known = lowest >= 0 and (highest == 0 or 1 < highest <= 255)
        if not is_known:
            raise ValueError(
                "a picture of 32-bit numbers, not of 0 to 255: which of them is white?"
            )
    if image.mode.startswith("I;16"):
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def encode(image: Image.Image | bytes) -> bytes:
    """A picture as PNG, little compressed, which is ten times as fast.

    Bytes are returned as they are; ValueError if `decode` cannot read them.
    """
    if isinstance(image, bytes):
        decode(image)
        return image
    check_size(image)
    file = io.BytesIO()
    to_rgb(image).save(file, "PNG", compress_level=1, icc_profile=None)
    return file.getvalue()


def displayed_size(size: tuple[int, int], kind: str, context: dict) -> tuple[int, int]:
    """(width, height) at which a picture of that size is shown.

    kind: "image", also for crops; "video" or "frame" for frames. context: what a tool gets
    (`ToolWorkers.submit`), with the fields of `PixelLimits`.
    """
    max_pixels = context["max_pixels"] if kind == "image" else context["max_frame_pixels"]
    min_pixels = min(context["min_pixels"], max_pixels)
    return shown_size(*size, min_pixels, max_pixels, context["cell"])


@dataclass(frozen=True)
class PixelLimits:
    """Areas, in pixels, to which images, crops, and frames of videos are resized."""

    min_pixels: int
    max_pixels: int
    max_frame_pixels: int
    cell: int = CELL  # side of a visual token in pixels, which the model's folder defines

    def shown_size(self, kind: str, width: int, height: int) -> tuple[int, int]:
        return displayed_size((width, height), kind, vars(self))


@dataclass(eq=False)
class Media:
    """An image or a video: its pixels as shown, and the encoded originals, from which tools cut."""

    kind: str  # "image" or "video"
    frames: list[bytes]  # encoded, original resolution; an image has one
    # [F, H, W, 3] uint8, H and W multiples of `cell`: as trainer and engine see it
    pixels: "np.ndarray"
    is_frame: bool = False  # an image that was a frame of a video, and has the size of one
    cell: int = CELL  # side of a visual token in pixels: two patches

    @classmethod
    def open(
        cls, kind: str, frames: Sequence[bytes], limits: PixelLimits, is_frame: bool = False
    ) -> "Media":
        """Decode and resize; all frames get the size of the first. ValueError with a reason."""
        import numpy as np  # here: the workers of tools only decode

        size = None
        arrays = []
        for frame in frames:
            picture = decode(frame)
            if size is None:
                size = limits.shown_size("video" if is_frame else kind, *picture.size)
            if picture.size != size:
                picture = picture.resize(size, resample=Image.Resampling.BICUBIC)
            arrays.append(np.asarray(picture))
        return cls(kind, list(frames), np.stack(arrays), is_frame, limits.cell)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patches: pairs of frames, rows, columns."""
        frames, height, width, _ = self.pixels.shape
        return ceil(frames / 2), height // self.cell * 2, width // self.cell * 2

    @property
    def num_tokens(self) -> int:
        """Visual tokens; there may be text between those of a video."""
        num_pairs, rows, columns = self.grid
        return num_pairs * rows * columns // 4

    @cached_property
    def uuid(self) -> str:
        """A hash of the pixels as shown: equal pictures share it."""
        digest = hashlib.blake2b(f"{self.kind}{self.pixels.shape}".encode(), digest_size=16)
        digest.update(self.pixels.tobytes())
        return digest.hexdigest()


def blank(cell: int, rows: int = 1, columns: int = 1) -> Media:
    """A picture of rows x columns tokens, by default the smallest: a rank without pictures runs the
    vision tower on it, as others do."""
    import numpy as np

    pixels = np.zeros((1, rows * cell, columns * cell, 3), dtype=np.uint8)
    return Media("image", [], pixels, cell=cell)

"""Looking closer: cropping an image, selecting frames of a video, and the one rule for how large anything is shown.

Pictures are numbered from 1 in the order in which the policy has seen them, and a number keeps its meaning: each frame
of a video has one, then come crops and selected frames. With a video of 16 frames target_image 3 is its third frame,
and the first frame selected from it is "Numbered 17". With one image in the prompt that is 1, and its first crop 2.
"""

import io
from math import ceil, floor, sqrt

from PIL import Image, ImageOps, UnidentifiedImageError

CELL = 28  # side, in pixels, of what becomes one visual token: 2 x 2 patches of 14
MAX_RATIO = 200  # of the sides: Qwen2-VL's image processor refuses more
PADDING = 0.1  # of the picture, added on each side of a box: policies draw them too tight
MIN_CROP = 28  # a crop has more pixels than that on both sides
MAX_FRAMES = 8
MAX_SOURCE_PIXELS = 89_478_485  # where Pillow begins to warn of a decompression bomb
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # some of Pillow's others start programs


def shown_size(width: int, height: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(width, height) at which a picture is shown: multiples of 28, at least 28, at most 1:200.

    It is what Qwen2-VL's `smart_resize` gives, if that accepts the picture and would accept its own result again.
    Otherwise sides below 28, and then the shorter one up to a 200th of the longer, are enlarged first; and the result
    is cut to 1:200. Area, as of `smart_resize`: at most max_pixels, if that is at least 784 * (ratio of the sides + 1)
    and 4 * min_pixels; rounding up may exceed it below that.
    ValueError if max_pixels is below 784 or min_pixels.
    """
    if max_pixels < CELL**2 or min_pixels > max_pixels:
        raise ValueError(f"shown_size: got min_pixels {min_pixels}, max_pixels {max_pixels}; the latter is the larger")
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
        return max(CELL, floor(width / scale / CELL) * CELL), max(CELL, floor(height / scale / CELL) * CELL)
    if nearest[0] * nearest[1] < min_pixels:
        scale = sqrt(min_pixels / (width * height))
        return ceil(width * scale / CELL) * CELL, ceil(height * scale / CELL) * CELL
    return nearest


def decode(data: bytes) -> Image.Image:
    """The picture in RGB, upright, at its own resolution. ValueError with a short reason if it cannot be read."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        if not 0 < image.width * image.height <= MAX_SOURCE_PIXELS:
            raise ValueError(f"{image.width}x{image.height} pixels, at most {MAX_SOURCE_PIXELS} are read")
        return to_rgb(ImageOps.exif_transpose(image))
    except MemoryError:
        raise
    except UnidentifiedImageError as error:  # its text holds an address in memory
        raise ValueError(f"unreadable image: none of {', '.join(FORMATS)}") from error
    except Exception as error:  # on broken files Pillow's decoders raise what they happen to run into
        raise ValueError(f"unreadable image: {error!s:.200}") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Transparency becomes white, 16 bits become 8."""
    if image.mode.startswith("I;16"):
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def encode(image: Image.Image | bytes) -> bytes:
    """PNG, little compressed: ten times as fast. Bytes stay what they are; ValueError if `decode` cannot read them."""
    if isinstance(image, bytes):
        decode(image)
        return image
    if not 0 < image.width * image.height <= MAX_SOURCE_PIXELS:
        raise ValueError(f"{image.width}x{image.height} pixels, at most {MAX_SOURCE_PIXELS} are read")
    file = io.BytesIO()
    to_rgb(image).save(file, "PNG", compress_level=1, icc_profile=None)
    return file.getvalue()


def shown(size: tuple[int, int], kind: str, context: dict) -> tuple[int, int]:
    """How large a picture is shown: `kind` "image", which crops are too, or "video" for frames, selected or not."""
    max_pixels = context["max_pixels"] if kind == "image" else context["max_frame_pixels"]
    return shown_size(*size, min(context["min_pixels"], max_pixels), max_pixels)


def whole(value: object, name: str) -> int:
    """2 and 2.0 as 2; ValueError for everything else."""
    if type(value) is int or (type(value) is float and value.is_integer()):
        return int(value)
    raise ValueError(f"{name} must be an integer, got {value!r:.40}")


def crop_image_normalized(bbox_2d: list, target_image: float, context: dict) -> tuple[str, list, dict]:
    """Cut the padded box out of a picture, at its own resolution.

    info: {"target": which of the media, from 0; "frame": which frame of it, from 1; "box": cut out, in [0, 1]}.
    """
    pictures = [(m, f) for m, medium in enumerate(context["media"]) for f in range(len(medium["frames"]))]
    number = whole(target_image, "target_image")
    if not 1 <= number <= len(pictures):
        raise ValueError(f"target_image must be within [1,{len(pictures)}], got {number!r:.40}")
    if (
        not isinstance(bbox_2d, list)
        or len(bbox_2d) != 4
        or not all(type(value) in (int, float) and 0 <= value < 1e9 for value in bbox_2d)
        or not (bbox_2d[0] < bbox_2d[2] and bbox_2d[1] < bbox_2d[3])
    ):
        raise ValueError(
            "bbox_2d must be four numbers [x1,y1,x2,y2] with 0 <= x1 < x2 and 0 <= y1 < y2, "
            f"and values within [0.0,1.0]; got {bbox_2d!r:.80}"
        )
    target, frame = pictures[number - 1]
    medium = context["media"][target]
    image = decode(medium["frames"][frame])
    # Beyond 1 they are pixels, of what the policy was shown.
    width, height = (1, 1) if max(bbox_2d) <= 1 else shown(image.size, medium["kind"], context)
    x1, y1, x2, y2 = bbox_2d[0] / width, bbox_2d[1] / height, bbox_2d[2] / width, bbox_2d[3] / height
    if x1 >= 1 or y1 >= 1:
        raise ValueError(f"bbox_2d {bbox_2d} lies outside the image, which is {width}x{height}")
    box = [max(0.0, x1 - PADDING), max(0.0, y1 - PADDING), min(1.0, x2 + PADDING), min(1.0, y2 + PADDING)]
    pixels = [round(value * side) for value, side in zip(box, image.size * 2)]
    crop_width, crop_height = pixels[2] - pixels[0], pixels[3] - pixels[1]
    if crop_width <= MIN_CROP or crop_height <= MIN_CROP:
        raise ValueError(f"Cropped image is too small: {crop_width}x{crop_height}")
    width, height = shown((crop_width, crop_height), "image", context)
    text = f"\nHere is the cropped image (Image Size: {width}x{height}):"
    return text, [image.crop(pixels)], {"target": target, "frame": frame + 1, "box": box}


def select_frames(target_frames: list, context: dict) -> tuple[str, list, dict]:
    """Frames of the first video again. info: {"target": which of the media, from 0; "frames": which, from 1}."""
    videos = [m for m, medium in enumerate(context["media"]) if medium["kind"] == "video"]
    if not videos:
        raise ValueError("There is no video to select frames from. To look closer at an image, crop_image_normalized.")
    if not isinstance(target_frames, list) or not target_frames:
        raise ValueError(f"target_frames must be a list of frame indices, got {target_frames!r:.80}")
    if len(target_frames) > MAX_FRAMES:
        raise ValueError(
            f"You have selected {len(target_frames)} frames in total. "
            f"Think again which frames you need: no more than {MAX_FRAMES}."
        )
    frames = context["media"][videos[0]]["frames"]
    indices = [whole(value, "a frame index") for value in target_frames]
    for index in indices:
        if not 1 <= index <= len(frames):
            raise ValueError(
                f"There are {len(frames)} frames: indices must be within [1,{len(frames)}], got {index!r:.40}"
            )
    selected = [frames[index - 1] for index in indices]
    width, height = shown(decode(selected[0]).size, "video", context)
    first = sum(len(medium["frames"]) for medium in context["media"]) + 1
    text = (
        f"\nHere are the selected frames (Frame Size: {width}x{height}, "
        f"Numbered {first} to {first + len(selected) - 1}):"
    )
    return text, selected, {"target": videos[0], "frames": indices}


CROP_SCHEMA = {
    "type": "function",
    "function": {
        "name": "crop_image_normalized",
        "description": "Zoom in on a part of an image, given by its bounding box. "
        "Useful when an object or a text is too small to be seen.",
        "parameters": {
            "type": "object",
            "properties": {
                "bbox_2d": {
                    "type": "array",
                    "items": {"type": "number"},
                    "description": "[x1,y1,x2,y2], the left, top, right and bottom edge of the part to zoom in on. "
                    "Values should be within [0.0,1.0].",
                },
                "target_image": {
                    "type": "number",
                    "description": "Index of the image to crop, from 1 to the number of images; 1 is the original.",
                },
            },
            "required": ["bbox_2d", "target_image"],
        },
    },
}
SELECT_SCHEMA = {
    "type": "function",
    "function": {
        "name": "select_frames",
        "description": "Select frames from a video.",
        "parameters": {
            "type": "object",
            "properties": {
                "target_frames": {
                    "type": "array",
                    "items": {"type": "integer", "description": "Frame index from 1 to 16."},
                    "description": f"Indices of the frames to select, no more than {MAX_FRAMES} frames in total.",
                }
            },
            "required": ["target_frames"],
        },
    },
}

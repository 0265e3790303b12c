"""Looking closer: cropping an image, selecting frames of a video.

Pictures are numbered from 1 in the order in which the policy has seen them, and a number keeps its
meaning: each frame of a video has one, then come crops and selected frames. With a video of 16
frames target_image 3 is its third frame, and the first frame selected from it is "Numbered 17".
With one image in the prompt that is 1, and its first crop 2.
"""

import json
from pathlib import Path

from common.pictures import decode, shown

# what the policy is told: crop, select
SCHEMAS = json.loads(Path(__file__).with_name("visual.json").read_text())
PADDING = 0.1  # of the picture, added on each side of a box: policies draw them too tight
MIN_CROP = 28  # a crop has more pixels than that on both sides
MAX_FRAMES = 8  # as its schema says


def whole(value: object, name: str, most: int) -> int:
    """2 and 2.0 as 2, up to `most`; ValueError for everything else."""
    if type(value) is not int and not (type(value) is float and value.is_integer()):
        raise ValueError(f"{name} must be an integer, got {value!r:.40}")
    if not 1 <= value <= most:
        raise ValueError(f"{name} must be within [1,{most}], got {int(value)!r:.40}")
    return int(value)


def crop_image_normalized(
    bbox_2d: list, target_image: float, context: dict
) -> tuple[str, list, dict]:
    """Cut the padded box out of a picture, at its own resolution.

    info: {"target": which of the media, from 0; "frame": which frame of it, from 1; "box": cut out,
    in [0, 1]}.
    """
    pictures = [
        (m, f) for m, medium in enumerate(context["media"]) for f in range(len(medium["frames"]))
    ]
    number = whole(target_image, "target_image", len(pictures))
    numbers = isinstance(bbox_2d, list) and all(
        type(value) in (int, float) and 0 <= value < 1e9 for value in bbox_2d
    )
    if (
        not numbers
        or len(bbox_2d) != 4
        or not (bbox_2d[0] < bbox_2d[2] and bbox_2d[1] < bbox_2d[3])
    ):
        raise ValueError(
            "bbox_2d must be four numbers [x1,y1,x2,y2] with 0 <= x1 < x2 and 0 <= y1 < y2, "
            f"and values within [0.0,1.0]; got {bbox_2d!r:.80}"
        )
    target, frame = pictures[number - 1]
    medium = context["media"][target]
    image = decode(medium["frames"][frame])
    # From 2 on they are pixels, of what the policy was shown.
    width, height = (1, 1) if max(bbox_2d) < 2 else shown(image.size, medium["kind"], context)
    x1, y1, x2, y2 = (
        bbox_2d[0] / width,
        bbox_2d[1] / height,
        bbox_2d[2] / width,
        bbox_2d[3] / height,
    )
    if x1 >= 1 or y1 >= 1:
        raise ValueError(f"bbox_2d {bbox_2d} lies outside the image, which is {width}x{height}")
    box = [
        max(0.0, x1 - PADDING),
        max(0.0, y1 - PADDING),
        min(1.0, x2 + PADDING),
        min(1.0, y2 + PADDING),
    ]
    pixels = [round(value * side) for value, side in zip(box, image.size * 2)]
    crop_width, crop_height = pixels[2] - pixels[0], pixels[3] - pixels[1]
    if crop_width <= MIN_CROP or crop_height <= MIN_CROP:
        raise ValueError(f"Cropped image is too small: {crop_width}x{crop_height}")
    width, height = shown((crop_width, crop_height), "image", context)
    text = f"\nHere is the cropped image (Image Size: {width}x{height}):"
    return text, [image.crop(pixels)], {"target": target, "frame": frame + 1, "box": box}


def select_frames(target_frames: list, context: dict) -> tuple[str, list, dict]:
    """Frames of the first video again. info: {"target": which of the media, from 0; "frames":
    which, from 1}."""
    videos = [m for m, medium in enumerate(context["media"]) if medium["kind"] == "video"]
    if not videos:
        raise ValueError(
            "There is no video to select frames from. To look closer at an image, "
            "crop_image_normalized."
        )
    if not isinstance(target_frames, list) or not target_frames:
        raise ValueError(
            f"target_frames must be a list of frame indices, got {target_frames!r:.80}"
        )
    if len(target_frames) > MAX_FRAMES:
        selected = f"You have selected {len(target_frames)} frames in total."
        raise ValueError(
            f"{selected} Think again which frames you need: no more than {MAX_FRAMES}."
        )
    frames = context["media"][videos[0]]["frames"]
    indices = [whole(value, "a frame index", len(frames)) for value in target_frames]
    selected = [frames[index - 1] for index in indices]
    width, height = shown(decode(selected[0]).size, "video", context)
    first = sum(len(medium["frames"]) for medium in context["media"]) + 1
    last = first + len(selected) - 1
    text = (
        f"\nHere are the selected frames (Frame Size: {width}x{height}, Numbered {first} "
        f"to {last}):"
    )
    return text, selected, {"target": videos[0], "frames": indices}

"""Looking closer: crop an image, or select frames of a video.

Pictures are numbered from 1 in the order in which the policy has seen them, and a number keeps its
meaning. Each frame of a video has one; crops and selected frames follow. With a video of 16 frames
target_image 3 is its third frame, and the first frame selected from it is "Numbered 17". With one
image in the prompt that is 1, and its first crop 2.

`context` is that of `ToolWorkers.submit`.
"""

from common.pictures import decode, displayed_size

PADDING = 0.1  # of the picture, added on each side of a box: policies draw them too tight
MIN_CROP = 28  # pixels; both sides of a crop have more
MAX_FRAMES = 8  # as SELECT_SCHEMA says

CROP_SCHEMA = {
    "type": "function",
    "function": {
        "name": "crop_image_normalized",
        "description": "Zoom in on a part of an image, given by its bounding box. Useful when an "
        "object or a text is too small to be seen.",
        "parameters": {
            "type": "object",
            "properties": {
                "bbox_2d": {
                    "type": "array",
                    "items": {"type": "number"},
                    "description": "[x1,y1,x2,y2], the left, top, right and bottom edge of the "
                    "part to zoom in on. Values should be within [0.0,1.0].",
                },
                "target_image": {
                    "type": "number",
                    "description": "Index of the image to crop, from 1 to the number of images; "
                    "1 is the original.",
                },
            },
            "required": ["bbox_2d", "target_image"],
        },
    },
}
# "1 to 16" is Pixel Reasoner's wording: its videos have 16 frames. `select_frames` takes as many as
# there are.
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
                    "description": "Indices of the frames to select, no more than 8 frames in "
                    "total.",
                }
            },
            "required": ["target_frames"],
        },
    },
}


def crop_image_normalized(
    bbox_2d: list, target_image: float, context: dict
) -> tuple[str, list, dict]:
    """Cut the padded box out of a picture, at its own resolution.

    bbox_2d: fractions of the picture; if one is 2 or more, pixels of the picture as it was shown.
    Returns (text, [crop], info) with info {"target": which of the media, from 0; "frame": which
    frame of it, from 1; "box": what was cut out, in [0, 1]}.
    """
    pictures = []  # (which of the media, which frame of it)
    for index, medium in enumerate(context["media"]):
        for frame in range(len(medium["frames"])):
            pictures.append((index, frame))
    number = to_index(target_image, "target_image", len(pictures))
    check_box(bbox_2d)
    target, frame = pictures[number - 1]
    medium = context["media"][target]
    image = decode(medium["frames"][frame])

    width, height = 1, 1  # of fractions
    if max(bbox_2d) >= 2:
        first_frame = decode(medium["frames"][0])  # all frames of a video are shown at its size
        width, height = displayed_size(first_frame.size, medium["kind"], context)
    x1, y1, x2, y2 = bbox_2d
    if x1 / width >= 1 or y1 / height >= 1:
        raise ValueError(f"bbox_2d {bbox_2d} lies outside the image, which is {width}x{height}")
    box = [
        max(0.0, x1 / width - PADDING),
        max(0.0, y1 / height - PADDING),
        min(1.0, x2 / width + PADDING),
        min(1.0, y2 / height + PADDING),
    ]
    left = round(box[0] * image.width)
    top = round(box[1] * image.height)
    right = round(box[2] * image.width)
    bottom = round(box[3] * image.height)
    crop_width = right - left
    crop_height = bottom - top
    if crop_width <= MIN_CROP or crop_height <= MIN_CROP:
        raise ValueError(f"Cropped image is too small: {crop_width}x{crop_height}")
    crop = image.crop((left, top, right, bottom))
    shown_width, shown_height = displayed_size((crop_width, crop_height), "image", context)
    text = f"\nHere is the cropped image (Image Size: {shown_width}x{shown_height}):"
    return text, [crop], {"target": target, "frame": frame + 1, "box": box}


def select_frames(target_frames: list, context: dict) -> tuple[str, list, dict]:
    """Show frames of the first video again.

    Returns (text, frames, info) with info {"target": which of the media, from 0; "frames": which
    frames, from 1}.
    """
    media = context["media"]
    videos = [index for index, medium in enumerate(media) if medium["kind"] == "video"]
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
        raise ValueError(
            f"You have selected {len(target_frames)} frames in total. Think again which frames "
            f"you need: no more than {MAX_FRAMES}."
        )
    frames = media[videos[0]]["frames"]
    indices = [to_index(value, "a frame index", len(frames)) for value in target_frames]
    selected = [frames[index - 1] for index in indices]
    width, height = displayed_size(decode(selected[0]).size, "video", context)
    num_pictures = sum(len(medium["frames"]) for medium in media)
    first = num_pictures + 1
    last = num_pictures + len(selected)
    text = (
        f"\nHere are the selected frames (Frame Size: {width}x{height}, "
        f"Numbered {first} to {last}):"
    )
    return text, selected, {"target": videos[0], "frames": indices}


def to_index(value: object, name: str, maximum: int) -> int:
    """A number of a picture, 2 or 2.0, as an integer from 1 to `maximum`. ValueError for anything
    else."""
    is_float = type(value) is float and value.is_integer()
    if type(value) is not int and not is_float:
        raise ValueError(f"{name} must be an integer, got {value!r:.40}")
    if not 1 <= value <= maximum:
        raise ValueError(f"{name} must be within [1,{maximum}], got {int(value)!r:.40}")
    return int(value)


def check_box(box: object) -> None:
    """ValueError for anything but four numbers, 0 <= x1 < x2 < 1e9 and 0 <= y1 < y2 < 1e9."""
    is_list = isinstance(box, list) and len(box) == 4
    is_valid = is_list and all(type(x) in (int, float) and 0 <= x < 1e9 for x in box)
    if is_valid and box[0] < box[2] and box[1] < box[3]:
        return
    raise ValueError(
        "bbox_2d must be four numbers [x1,y1,x2,y2] with 0 <= x1 < x2 and 0 <= y1 < y2, "
        f"and values within [0.0,1.0]; got {box!r:.80}"
    )

"""Images and videos of Qwen2-VL and Qwen2.5-VL: one resize for trainer and engine, placeholders, M-RoPE positions.

A picture is decoded and resized once (`Media.open`). The engine gets these pixels with its own resizing switched off,
the trainer cuts the same pixels into patches; the tools see the encoded originals.
"""

import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

from common.tools.visual import CELL, FORMATS, MAX_SOURCE_PIXELS, decode, shown

FAMILY = ("qwen2_vl", "qwen2_5_vl")
MARKS = {"<image>": "image", "<video>": "video"}  # placeholders in the prompts of data sets


class BadRow(ValueError):
    """What is wrong with a row of a data set, in a few words."""


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
    pixels: np.ndarray  # [F, H, W, 3] uint8, resized: multiples of 28; what trainer and engine see
    is_frame: bool = False  # an image that was a frame of a video, and is shown as large as one

    @classmethod
    def open(cls, kind: str, frames: Sequence[bytes], limits: PixelLimits, is_frame: bool = False) -> "Media":
        """ValueError, with a short reason, for frames that cannot be decoded. All get the size of the first."""
        size, shown = None, []
        for data in frames:
            picture = decode(data)
            size = size or limits.shown_size("video" if is_frame else kind, *picture.size)
            shown.append(np.asarray(picture.resize(size, resample=3) if picture.size != size else picture))
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


Picture = tuple[str, list]  # "image" or "video", and its frames as a row holds them


def picture_sources(record: Mapping, text: str) -> list[Picture]:
    """A row's pictures in the order of their marks in its prompt. BadRow if their numbers differ.

    PyVision's rows have one, as `image`, or as a path in `mm_hint`, which counts if the prompt has a mark for it.
    """
    hint = record.get("mm_hint")
    one = record.get("image") or (hint.get("hint_path") if isinstance(hint, Mapping) and "<image>" in text else None)
    images = record.get("images") or (one if isinstance(one, list) else [one] if one else None)
    columns = {"image": images, "video": record.get("videos")}
    if not any(columns.values()):
        return []
    left = {"image": [[item] for item in columns["image"] or []], "video": list(columns["video"] or [])}
    kinds = [MARKS[mark] for mark in re.findall("<image>|<video>", text)]
    for kind, items in left.items():
        if len(items) != kinds.count(kind):
            raise BadRow(f"{len(items)} {kind}s, and <{kind}> stands {kinds.count(kind)} times in the prompt")
    if any(not isinstance(frames, list) or not frames for frames in left["video"]):
        raise BadRow("a video is given as the list of its frames")
    return [(kind, left[kind].pop(0)) for kind in kinds]


def media_file(item: object, root: Path | None) -> io.BufferedIOBase:
    """The file that a row's entry stands for: bytes, a path under `root`, {bytes, path}. BadRow with the reason."""
    if isinstance(item, Mapping):
        item = item.get("bytes") or item.get("path")
    if isinstance(item, bytes):
        return io.BytesIO(item)
    if not isinstance(item, str):
        raise BadRow(f"{item!r:.60} is neither bytes, nor a path, nor {{bytes, path}}")
    path = (root or Path()) / item
    try:
        return path.open("rb")
    except OSError as error:
        raise BadRow(f"cannot open {path} ({error.strerror}); --media-root is the folder of relative paths") from error


class Vision:
    """What a vision-language model's folder says about pictures."""

    def __init__(self, path: str, config, limits: PixelLimits, trust_remote_code: bool = False):
        vision = config.vision_config
        if (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size) != (14, 2, 2):
            raise SystemExit(f"--model {path}: its patches are not 14 x 14 x 2 merged by 2 x 2, not supported here")
        self.limits = limits
        self.placeholders = {"image": config.image_token_id, "video": config.video_token_id}
        # what no policy may sample: the pictures that these announce do not exist
        self.forbidden_ids = {*self.placeholders.values(), config.vision_start_token_id, config.vision_end_token_id}
        self.processor = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
        self.positions_per_second = getattr(vision, "tokens_per_second", 1)  # Qwen2-VL knows no seconds

    def open(self, kind: str, frames: list, root: Path | None) -> Media:
        """BadRow for what cannot be read."""
        data = []
        for item in frames:
            with media_file(item, root) as file:
                data.append(file.read())
        try:
            return Media.open(kind, data, self.limits)
        except ValueError as error:
            raise BadRow(str(error)) from error

    def count_tokens(self, kind: str, frames: list, root: Path | None) -> int:
        """Tokens of a picture, from the header of its first frame; the others need only be there. BadRow, too."""
        for item in frames[1:]:
            media_file(item, root).close()
        with media_file(frames[0], root) as file:
            try:
                with Image.open(file, formats=FORMATS) as image:
                    if image.width * image.height > MAX_SOURCE_PIXELS:
                        raise ValueError(f"{image.width}x{image.height} pixels are too many")
                    width, height = self.limits.shown_size(kind, *image.size)
            except (OSError, ValueError, Image.DecompressionBombError) as error:
                raise BadRow(f"no readable picture ({str(error)[:80]})") from error
        return -(-len(frames) // 2) * (width // CELL) * (height // CELL)

    def expand(self, ids: Sequence[int], media: Sequence[Media]) -> list[int]:
        """ids with one placeholder for each of `media`, in order -> ids with one for each of its tokens.

        BadRow if placeholders and media do not match.
        """
        kinds = {token: kind for kind, token in self.placeholders.items()}
        found = [kinds[token] for token in ids if token in kinds]
        if found != [m.kind for m in media]:
            raise BadRow(f"{len(media)} pictures, {len(found)} placeholders (or an image for a video)")
        rest = iter(media)
        return [t for token in ids for t in [token] * (next(rest).num_tokens if token in kinds else 1)]

    def collapse(self, ids: Sequence[int], media: Sequence[Media]) -> list[int]:
        """The inverse of `expand`: what an engine is given."""
        rest, collapsed, skip = iter(media), [], 0
        for token in ids:
            if skip:
                skip -= 1
                continue
            collapsed.append(token)
            if token in self.placeholders.values():
                skip = next(rest).num_tokens - 1
        return collapsed

    def places(self, ids: Sequence[int], media: Sequence[Media]) -> list[int]:
        """Where in expanded ids each of `media` begins."""
        places, i = [], 0
        for m in media:
            while ids[i] != self.placeholders[m.kind]:
                i += 1
            places.append(i)
            i += m.num_tokens
        return places

    def positions(self, ids: Sequence[int], media: Sequence[Media]) -> np.ndarray:
        """M-RoPE positions [3, L] int64 (time, row, column) of a trajectory, arXiv 2409.12191 section 2.1.

        Frames of a video are half a second apart. What follows a picture starts behind its largest coordinate, time
        included: so the model was trained, and so the engine counts (transformers 5.19 leaves time out).
        """
        parts, start, end = [], 0, 0  # the next position, the tokens done
        for m, place in zip(media, self.places(ids, media)):
            frames, rows, columns = m.grid
            cells = np.indices((frames, rows // 2, columns // 2)).reshape(3, -1)
            cells[0] *= self.positions_per_second if m.kind == "video" else 1  # a pair of frames lasts a second
            text = np.tile(np.arange(place - end), (3, 1))
            parts += [start + text, start + text.shape[1] + cells]
            start, end = parts[-1].max() + 1, place + m.num_tokens
        parts.append(start + np.tile(np.arange(len(ids) - end), (3, 1)))
        return np.concatenate(parts, axis=1)

    def patches(self, media: Sequence[Media], device: torch.device) -> tuple[Tensor, Tensor]:
        """(patches [P, 1176] float32, grids [M, 3] int64) of distinct media, in their order."""
        parts, grids = [], []
        for m in media:
            pixels = torch.from_numpy(m.pixels).to(device).permute(0, 3, 1, 2)  # [F, 3, H, W]
            options = {"do_resize": False, "return_tensors": "pt", "device": device}
            if m.kind == "image":
                parts.append(self.processor.image_processor(images=[pixels[0]], **options)["pixel_values"])
            else:
                options |= {"do_sample_frames": False, "cap_pixels_per_frame": False}
                parts.append(self.processor.video_processor(videos=[pixels], **options)["pixel_values_videos"])
            grids.append(m.grid)
        return torch.cat(parts), torch.tensor(grids, device=device)


def auto_class(config) -> type:
    """The transformers class that loads a policy of this configuration."""
    return AutoModelForImageTextToText if config.model_type in FAMILY else AutoModelForCausalLM


def load_vision(path: str, limits: PixelLimits, trust_remote_code: bool = False) -> Vision | None:
    """None for a model that reads text alone."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    return Vision(path, config, limits, trust_remote_code) if config.model_type in FAMILY else None


def blank() -> Media:
    """The smallest picture: a rank without any runs the vision tower on it, as the others run it on theirs."""
    return Media("image", [], np.zeros((1, CELL, CELL, 3), dtype=np.uint8))

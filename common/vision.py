"""Images and videos of Qwen2-VL and Qwen2.5-VL: placeholders, M-RoPE positions, patches."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from common.pictures import BadRow, Media, PixelLimits
from common.torch_repair import transformers

FAMILY = ("qwen2_vl", "qwen2_5_vl")


class Vision:
    """Placeholders, positions and patches of pictures, as a vision-language model's folder defines
    them."""

    def __init__(self, path: str, config, limits: PixelLimits, trust_remote_code: bool = False):
        vision = config.vision_config
        if (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size) != (14, 2, 2):
            raise SystemExit(
                f"--model {path}: only patches of 14 x 14 x 2, merged by 2 x 2, are supported here"
            )
        self.limits = limits
        self.placeholders = {"image": config.image_token_id, "video": config.video_token_id}
        # what no policy may sample: the pictures that these announce do not exist
        self.forbidden_ids = {
            *self.placeholders.values(),
            config.vision_start_token_id,
            config.vision_end_token_id,
        }
        self.processor = transformers.AutoProcessor.from_pretrained(
            path, trust_remote_code=trust_remote_code
        )
        # Qwen2-VL counts pairs of frames, whatever their seconds
        self.positions_per_second = getattr(vision, "tokens_per_second", 1)

    def expand(self, ids: Sequence[int], media: Sequence[Media]) -> list[int]:
        """Ids in which each placeholder is repeated for every token of its picture.

        ids: with one placeholder for each of `media`, in order. BadRow if they do not match.
        """
        kind_of_token = {token: kind for kind, token in self.placeholders.items()}
        kinds = [kind_of_token[token] for token in ids if token in kind_of_token]
        if kinds != [m.kind for m in media]:
            raise BadRow(
                f"{len(media)} pictures, {len(kinds)} placeholders (or an image for a video)"
            )
        expanded: list[int] = []
        remaining = iter(media)
        for token in ids:
            num_repeats = next(remaining).num_tokens if token in kind_of_token else 1
            expanded += [token] * num_repeats
        return expanded

    def collapse(self, ids: Sequence[int], media: Sequence[Media]) -> list[int]:
        """The inverse of `expand`: ids as an engine takes them."""
        repeats: set[int] = set()
        for place, m in zip(self.places(ids, media), media):
            repeats.update(range(place + 1, place + m.num_tokens))
        return [token for i, token in enumerate(ids) if i not in repeats]

    def places(self, ids: Sequence[int], media: Sequence[Media]) -> list[int]:
        """Where in expanded ids each of `media` begins."""
        places: list[int] = []
        end = 0
        for m in media:
            place = ids.index(self.placeholders[m.kind], end)
            places.append(place)
            end = place + m.num_tokens
        return places

    def positions(self, ids: Sequence[int], media: Sequence[Media]) -> np.ndarray:
        """M-RoPE positions [3, L] int64 (time, row, column), arXiv 2409.12191 section 2.1.

        ids: a whole trajectory, expanded. Frames of a video are half a second apart. What follows a
        picture starts behind its largest coordinate, time included, as in the model's training and
        in the engine (transformers 5.19 leaves time out).
        """
        parts: list[np.ndarray] = []
        start = 0  # the next position
        end = 0  # tokens so far
        for m, place in zip(media, self.places(ids, media)):
            num_text = place - end
            parts.append(start + np.tile(np.arange(num_text), (3, 1)))
            frames, rows, columns = m.grid
            cells = np.indices((frames, rows // 2, columns // 2)).reshape(3, -1)
            if m.kind == "video":
                cells[0] *= self.positions_per_second  # a pair of frames lasts a second
            parts.append(start + num_text + cells)
            start = parts[-1].max() + 1
            end = place + m.num_tokens
        parts.append(start + np.tile(np.arange(len(ids) - end), (3, 1)))
        return np.concatenate(parts, axis=1)

    def patches(self, media: Sequence[Media], device: torch.device) -> tuple[Tensor, Tensor]:
        """Patches [P, 1176] float32 and grids [M, 3] int64 of distinct media, in their order."""
        parts: list[Tensor] = []
        grids: list[tuple[int, int, int]] = []
        for m in media:
            pixels = torch.from_numpy(m.pixels).to(device).permute(0, 3, 1, 2)  # [F, 3, H, W]
            options = {"do_resize": False, "return_tensors": "pt", "device": device}
            if m.kind == "image":
                inputs = self.processor.image_processor(images=[pixels[0]], **options)
                parts.append(inputs["pixel_values"])
            else:
                options["do_sample_frames"] = False
                options["cap_pixels_per_frame"] = False
                inputs = self.processor.video_processor(videos=[pixels], **options)
                parts.append(inputs["pixel_values_videos"])
            grids.append(m.grid)
        return torch.cat(parts), torch.tensor(grids, device=device)


def clamp_inputs(_: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """A hook of the vision tower's merger: its inputs [...] within the range of their dtype.

    float16 overflows in the last block of Qwen2.5-VL-3B's tower; vLLM clamps there, too.
    """
    limit = torch.finfo(inputs[0].dtype).max - 1000
    return inputs[0].clamp(-limit, limit)


def auto_class(config) -> type:
    """The transformers class that loads a policy of this configuration."""
    if config.model_type in FAMILY:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def skeleton(path: str, trust_remote_code: bool = False, flag: str = "--model") -> nn.Module:
    """The model of a folder without its weights, on the meta device.

    SystemExit if transformers cannot build one.
    """
    # of later loads, too: ranks would write over each other
    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            return auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # bad configurations make transformers raise errors of any kind
        message = str(error).split("\nModel type should")[0]  # without the list of all types
        reason = " ".join(message.split())
        raise SystemExit(
            f"{flag} {path}: transformers makes no causal language model of it: {reason}"
        ) from error


def load_vision(path: str, limits: PixelLimits, trust_remote_code: bool = False) -> Vision | None:
    """None for a model that reads text alone."""
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if config.model_type not in FAMILY:
        return None
    return Vision(path, config, limits, trust_remote_code)

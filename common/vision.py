"""Images and videos of Qwen2-VL and Qwen2.5-VL: placeholders, M-RoPE positions, patches."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from common.pictures import BadRow, Media, PixelLimits
from common.torch_repair import transformers

FAMILY = ("qwen2_vl", "qwen2_5_vl")


class Vision:
    """What a vision-language model's folder says about pictures."""

    def __init__(self, path: str, config, limits: PixelLimits, trust_remote_code: bool = False):
        vision = config.vision_config
        if (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size) != (14, 2, 2):
            raise SystemExit(
                f"--model {path}: its patches are not 14 x 14 x 2 merged by 2 x 2, not "
                "supported here"
            )
        self.limits, self.placeholders = (
            limits,
            {"image": config.image_token_id, "video": config.video_token_id},
        )
        # what no policy may sample: the pictures that these announce do not exist
        self.forbidden_ids = {
            *self.placeholders.values(),
            config.vision_start_token_id,
            config.vision_end_token_id,
        }
        self.processor = transformers.AutoProcessor.from_pretrained(
            path, trust_remote_code=trust_remote_code
        )
        # Qwen2-VL knows no seconds
        self.positions_per_second = getattr(vision, "tokens_per_second", 1)

    def expand(self, ids: Sequence[int], media: Sequence[Media]) -> list[int]:
        """ids with a placeholder for each of `media`, in order, -> one for each token. BadRow if
        they do not match."""
        kinds = {token: kind for kind, token in self.placeholders.items()}
        found = [kinds[token] for token in ids if token in kinds]
        if found != [m.kind for m in media]:
            raise BadRow(
                f"{len(media)} pictures, {len(found)} placeholders (or an image for a video)"
            )
        rest = iter(media)
        return [
            t for token in ids for t in [token] * (next(rest).num_tokens if token in kinds else 1)
        ]

    def collapse(self, ids: Sequence[int], media: Sequence[Media]) -> list[int]:
        """The inverse of `expand`: what an engine is given."""
        starts = zip(self.places(ids, media), media)
        repeated = {place + i for place, m in starts for i in range(1, m.num_tokens)}
        return [token for i, token in enumerate(ids) if i not in repeated]

    def places(self, ids: Sequence[int], media: Sequence[Media]) -> list[int]:
        """Where in expanded ids each of `media` begins."""
        places, i = [], 0
        for m in media:
            places.append(i := ids.index(self.placeholders[m.kind], i))
            i += m.num_tokens
        return places

    def positions(self, ids: Sequence[int], media: Sequence[Media]) -> np.ndarray:
        """M-RoPE positions [3, L] int64 (time, row, column) of a trajectory, arXiv 2409.12191
        section 2.1.

        Frames of a video are half a second apart. What follows a picture starts behind its largest
        coordinate, time included: so the model was trained, and so the engine counts (transformers
        5.19 leaves time out).
        """
        parts, start, end = [], 0, 0  # the next position, the tokens done
        for m, place in zip(media, self.places(ids, media)):
            frames, rows, columns = m.grid
            cells = np.indices((frames, rows // 2, columns // 2)).reshape(3, -1)
            # a pair of frames lasts a second
            cells[0] *= self.positions_per_second if m.kind == "video" else 1
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
                parts.append(
                    self.processor.image_processor(images=[pixels[0]], **options)["pixel_values"]
                )
            else:
                options |= {"do_sample_frames": False, "cap_pixels_per_frame": False}
                parts.append(
                    self.processor.video_processor(videos=[pixels], **options)[
                        "pixel_values_videos"
                    ]
                )
            grids.append(m.grid)
        return torch.cat(parts), torch.tensor(grids, device=device)


def clamped(_: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """A hook of a tower's merger: float16 overflows in the last block of Qwen2.5-VL-3B's; vLLM
    clamps there, too."""
    limit = torch.finfo(inputs[0].dtype).max - 1000
    return inputs[0].clamp(-limit, limit)


def auto_class(config) -> type:
    """The transformers class that loads a policy of this configuration."""
    return getattr(
        transformers,
        "AutoModelFor" + ("ImageTextToText" if config.model_type in FAMILY else "CausalLM"),
    )


def skeleton(path: str, trust_remote_code: bool = False) -> nn.Module:
    """The model of a folder without its weights, on the meta device; SystemExit if transformers
    knows none."""
    # of what is loaded later: ranks would write over each other
    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            return auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # configurations make transformers run into whatever there is
        reason = " ".join(str(error).split("\nModel type should")[0].split())
        raise SystemExit(
            f"--model {path}: transformers makes no causal language model of it: {reason}"
        ) from error


def load_vision(path: str, limits: PixelLimits, trust_remote_code: bool = False) -> Vision | None:
    """None for a model that reads text alone."""
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    return Vision(path, config, limits, trust_remote_code) if config.model_type in FAMILY else None

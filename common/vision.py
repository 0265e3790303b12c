"""Images and videos of Qwen2-VL and Qwen2.5-VL: placeholders, M-RoPE positions, patches."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from common.pictures import BadRow, Media, PixelLimits
from common.torch_repair import transformers

FAMILY = ("qwen2_vl", "qwen2_5_vl")
# attributes of a config: ids of tokens that stand for pictures or sounds, or that announce some
PLACEHOLDERS = [
    "audio_token_id",
    "boa_token_id",
    "boi_token_id",
    "boi_token_index",
    "eoa_token_id",
    "eoa_token_index",
    "eoi_token_id",
    "eoi_token_index",
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "vision_end_token_id",
    "vision_start_token_id",
]


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
        self.forbidden_ids = placeholder_ids(config)
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


def attend_in_windows(attention: nn.Module) -> None:
    """Give an attention module of a vision tower a forward with one SDPA call for all windows of a
    length; transformers' has one for each window, some 2,300 for a picture of a megapixel."""
    attention.forward = partial(window_attention, attention)


def window_attention(
    module: nn.Module,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    **_,
) -> Tensor:
    """Attention [P, H] within each window of patches.

    hidden_states: [P, H]. cu_seqlens: [W + 1] int32, where windows begin and end; the same tensor
    in all layers that have these windows. position_embeddings: cosines and sines [P, D].
    """
    if not hasattr(cu_seqlens, "windows"):  # once for all layers: its values are on the GPU
        cu_seqlens.windows = windows_by_length(cu_seqlens)
        order = torch.cat([window.flatten() for window in cu_seqlens.windows])
        cu_seqlens.places = order.argsort()  # of each patch in that order
    qkv = module.qkv(hidden_states).unflatten(-1, (3, module.num_heads, -1))  # [P, 3, heads, D]
    query, key, value = qkv.unbind(1)
    modeling = transformers.models.qwen2_5_vl.modeling_qwen2_5_vl
    query, key = modeling.apply_rotary_pos_emb_vision(query, key, *position_embeddings)
    outputs = []
    for window in cu_seqlens.windows:  # [W, L]: numbers of patches
        parts = (part[window].transpose(1, 2) for part in (query, key, value))
        attended = nn.functional.scaled_dot_product_attention(*parts)  # [W, heads, L, D]
        outputs.append(attended.transpose(1, 2).flatten(2).flatten(0, 1))
    return module.proj(torch.cat(outputs)[cu_seqlens.places])


def windows_by_length(cu_seqlens: Tensor) -> list[Tensor]:
    """The numbers of the patches of all windows of a length, [W, L] int64, for each length."""
    bounds = cu_seqlens.tolist()
    starts_of_length: dict[int, list[int]] = {}
    for start, end in pairwise(bounds):
        starts_of_length.setdefault(end - start, []).append(start)
    windows = []
    for length, starts in starts_of_length.items():
        numbers = torch.tensor(starts)[:, None] + torch.arange(length)
        windows.append(numbers.to(cu_seqlens.device))
    return windows


def is_composite(config) -> bool:
    """Whether a configuration is of a language model with parts that see or hear."""
    return config.get_text_config() is not config


def placeholder_ids(config) -> set[int]:
    """Tokens of a composite that stand for pictures or sounds; empty for a model of text."""
    if not is_composite(config):
        return set()
    ids = {getattr(config, name, None) for name in PLACEHOLDERS}
    return {i for i in ids if isinstance(i, int)}


def auto_class(config) -> type:
    """The transformers class that loads a policy of this configuration."""
    if is_composite(config) and getattr(config, "vision_config", None) is not None:
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

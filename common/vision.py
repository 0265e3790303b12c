"""Images and videos of Qwen's families: placeholders, M-RoPE positions, patches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from math import ceil

import numpy as np
import torch
from torch import Tensor, nn

from common.pictures import BadRow, Media, PixelLimits
from common.torch_repair import transformers


@dataclass(frozen=True)
class Family:
    """What tells families of vision-language models apart, beside their configurations."""

    has_timestamps: bool  # each pair of frames stands by itself, behind its time as text
    clamps_merger: bool  # vLLM keeps the inputs of the tower's merger finite


FAMILIES = {
    "qwen2_vl": Family(has_timestamps=False, clamps_merger=False),
    "qwen2_5_vl": Family(has_timestamps=False, clamps_merger=True),
    "qwen3_vl": Family(has_timestamps=True, clamps_merger=False),
    "qwen3_vl_moe": Family(has_timestamps=True, clamps_merger=False),
    "qwen3_5": Family(has_timestamps=True, clamps_merger=False),
}
# why a row cannot be used
UNREAD_PICTURES = (
    f"has pictures, and the model reads text alone (those that see are {', '.join(FAMILIES)})"
)
# attributes of a config: ids of tokens that stand for pictures or sounds, or enclose them
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
        if (vision.spatial_merge_size, vision.temporal_patch_size) != (2, 2):
            raise SystemExit(
                f"--model {path}: only patches of two frames, merged by 2 x 2, are supported here"
            )
        self.model_type = config.model_type
        self.family = FAMILIES[config.model_type]
        self.limits = replace(limits, cell=2 * vision.patch_size)
        self.placeholders = {"image": config.image_token_id, "video": config.video_token_id}
        self.start_id = config.vision_start_token_id
        self.end_id = config.vision_end_token_id
        # what no policy may sample: the pictures that these announce do not exist
        self.forbidden_ids = placeholder_ids(config)
        self.processor = transformers.AutoProcessor.from_pretrained(
            path, trust_remote_code=trust_remote_code
        )
        tokenizer = self.processor.tokenizer
        self.encode = cache(partial(tokenizer.encode, add_special_tokens=False))
        # Qwen2-VL counts pairs of frames, whatever their seconds
        self.positions_per_second = getattr(vision, "tokens_per_second", 1)

    def expand(self, ids: Sequence[int], media: Sequence[Media]) -> list[int]:
        """Ids in which the expansion of each picture stands in place of its placeholder.

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
            if token in kind_of_token:
                expanded += self.expansion(next(remaining))
            else:
                expanded.append(token)
        return expanded

    def expansion(self, media: Media) -> list[int]:
        """The ids of a picture: its placeholder for every visual token, and the text between."""
        placeholder = self.placeholders[media.kind]
        if media.kind == "image" or not self.family.has_timestamps:
            return [placeholder] * media.num_tokens
        num_pairs, _, _ = media.grid
        pair = [placeholder] * (media.num_tokens // num_pairs)
        ids: list[int] = []
        for timestamp in self.timestamps(len(media.pixels)):
            ids += [*timestamp, self.start_id, *pair, self.end_id]
        return ids

    def timestamps(self, num_frames: int) -> list[list[int]]:
        """The time of each pair of frames as text: the mean of both, which are half a second
        apart. The last pair of an odd number is one frame, shown twice."""
        timestamps: list[list[int]] = []
        for first in range(0, num_frames, 2):
            second = min(first + 1, num_frames - 1)
            seconds = (first + second) / 2 / 2
            timestamps.append(self.encode(f"<{seconds:.1f} seconds>"))
        return timestamps

    def num_tokens(self, kind: str, num_frames: int, height: int, width: int) -> int:
        """The length of the expansion of a picture that is shown with these sides, in pixels."""
        cell = self.limits.cell
        num_pairs = ceil(num_frames / 2)
        num_tokens = num_pairs * (height // cell) * (width // cell)
        if kind == "video" and self.family.has_timestamps:
            num_tokens += sum(len(timestamp) + 2 for timestamp in self.timestamps(num_frames))
        return num_tokens

    def collapse(self, ids: Sequence[int], media: Sequence[Media]) -> list[int]:
        """The inverse of `expand`: ids as an engine takes them."""
        collapsed: list[int] = []
        end = 0
        for m, span in zip(media, self.spans(ids, media)):
            collapsed += ids[end : span.start]
            collapsed.append(self.placeholders[m.kind])
            end = span.stop
        collapsed += ids[end:]
        return collapsed

    def spans(self, ids: Sequence[int], media: Sequence[Media]) -> list[range]:
        """Where in expanded ids the expansion of each of `media` stands."""
        spans: list[range] = []
        for m, places in zip(media, self.places(ids, media)):
            expansion = self.expansion(m)
            start = int(places[0]) - expansion.index(self.placeholders[m.kind])
            spans.append(range(start, start + len(expansion)))
        return spans

    def places(self, ids: Sequence[int], media: Sequence[Media]) -> list[np.ndarray]:
        """Where in expanded ids the visual tokens of each of `media` stand, int64."""
        all_places = np.flatnonzero(np.isin(ids, [*self.placeholders.values()]))
        ends = np.cumsum([m.num_tokens for m in media], dtype=np.int64)
        return np.split(all_places, ends)[: len(media)]

    def positions(self, ids: Sequence[int], media: Sequence[Media]) -> np.ndarray:
        """M-RoPE positions [3, L] int64 (time, row, column), arXiv 2409.12191 section 2.1.

        ids: a whole trajectory, expanded. Frames of a video are half a second apart; behind a
        timestamp each pair of them counts as an image. What follows a picture starts behind its
        largest coordinate, time included, as in the model's training and in the engine
        (transformers 5.19 leaves time out).
        """
        parts: list[np.ndarray] = []
        start = 0  # the next position
        end = 0  # tokens so far
        for m, places in zip(media, self.places(ids, media)):
            num_pairs, rows, columns = m.grid
            num_blocks = num_pairs if self.family.has_timestamps else 1
            cells = np.indices((num_pairs // num_blocks, rows // 2, columns // 2)).reshape(3, -1)
            if m.kind == "video":
                cells[0] *= self.positions_per_second  # a pair of frames lasts a second
            for block in np.split(places, num_blocks):
                num_text = block[0] - end
                parts.append(start + np.tile(np.arange(num_text), (3, 1)))
                parts.append(start + num_text + cells)
                start = parts[-1].max() + 1
                end = block[-1] + 1
        parts.append(start + np.tile(np.arange(len(ids) - end), (3, 1)))
        return np.concatenate(parts, axis=1)

    def patches(self, media: Sequence[Media], device: torch.device) -> tuple[Tensor, Tensor]:
        """Patches [P, 3 * 2 * side²] float32 and grids [M, 3] int64 of distinct media, in their
        order; side: of a patch, in pixels."""
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
    length; transformers' has one for each window: in the 28 such modules of Qwen2.5-VL some 2,300
    for a picture of a megapixel."""
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
    if not hasattr(cu_seqlens, "groups"):  # once for all layers: its values are on the GPU
        cu_seqlens.groups = windows_by_length(cu_seqlens)
        order = torch.cat([windows.flatten() for windows in cu_seqlens.groups])
        cu_seqlens.places = order.argsort()  # of each patch in that order
    qkv = module.qkv(hidden_states).unflatten(-1, (3, module.num_heads, -1))  # [P, 3, heads, D]
    query, key, value = qkv.unbind(1)
    modeling = transformers.models.qwen2_5_vl.modeling_qwen2_5_vl
    query, key = modeling.apply_rotary_pos_emb_vision(query, key, *position_embeddings)
    outputs = []
    for windows in cu_seqlens.groups:  # [G, L]: the patches of G windows of one length
        parts = (part[windows].transpose(1, 2) for part in (query, key, value))
        attended = nn.functional.scaled_dot_product_attention(*parts)  # [G, heads, L, D]
        outputs.append(attended.transpose(1, 2).flatten(2).flatten(0, 1))
    return module.proj(torch.cat(outputs)[cu_seqlens.places])


def windows_by_length(cu_seqlens: Tensor) -> list[Tensor]:
    """The numbers of the patches of all windows of a length, [G, L] int64, for each length."""
    bounds = cu_seqlens.tolist()
    starts_of_length: dict[int, list[int]] = {}
    for start, end in pairwise(bounds):
        starts_of_length.setdefault(end - start, []).append(start)
    groups = []
    for length, starts in starts_of_length.items():
        numbers = torch.tensor(starts)[:, None] + torch.arange(length)
        groups.append(numbers.to(cu_seqlens.device))
    return groups


def is_composite(config) -> bool:
    """Whether a configuration is of a language model with parts that see or hear."""
    return config.get_text_config() is not config


def placeholder_ids(config) -> set[int]:
    """Tokens of a composite that stand for pictures or sounds, or enclose them; empty for a model
    of text."""
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
    # here and in later loads: the bars of several ranks would overwrite each other
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
    """The `Vision` of a model's folder; None for a model that reads text alone, or that is of none
    of the FAMILIES."""
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if config.model_type not in FAMILIES:
        return None
    return Vision(path, config, limits, trust_remote_code)

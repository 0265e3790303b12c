"""Rotary frequencies that depend on a text's length (`dynamic`, `longrope`).

transformers chooses them by the longest position of a forward: in a pack, that of the longest text,
for all texts. Here each text has the frequencies of its own length, or all have those with which an
engine samples.
"""

from itertools import pairwise
from math import inf

import torch
from torch import Tensor, nn

from common.torch_repair import transformers

# attributes of a config that hold its number of positions
LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
)


def num_positions(config) -> float:
    """The longest sequence (tokens) that a model was made for, as vLLM reads it from the config of
    its text part; inf: any length."""
    length = getattr(config, "model_max_length", None)
    if not length:
        lengths = [getattr(config, name) for name in LENGTHS if getattr(config, name, None)]
        length = min(lengths, default=inf)
    for parameters in rope_parameters(config):
        factor = parameters.get("factor") or 1.0
        kind = parameters.get("rope_type")
        # the length of gemma3 is the stretched one already
        if kind in ("linear", "dynamic") and "gemma3" not in config.model_type:
            return length * factor
        if kind == "yarn":
            return max(length, factor * (parameters.get("original_max_position_embeddings") or 0))
    return length


def rope_parameters(config) -> list[dict]:
    """The parameters of rotary embeddings: one set for each type of layer, or one for all."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [parameters for parameters in rope.values() if isinstance(parameters, dict)]
    return by_layer_type or [rope]


def length_limits(config) -> dict[str, int]:
    """{kind: the length (tokens) beyond which frequencies change}, without the kinds whose
    frequencies never do."""
    limits = {}
    for parameters in rope_parameters(config):
        kind = parameters.get("rope_type") or ""
        if kind == "longrope":
            limits[kind] = parameters["original_max_position_embeddings"]
        elif "dynamic" in kind:
            limits[kind] = config.max_position_embeddings
    return limits


def check_lengths(config, engine: str, max_model_len: int) -> None:
    """SystemExit if an engine ("vllm" or "hf") would sample with frequencies that no forward of the
    whole text has.

    transformers changes them while a text grows, and keeps the keys of its beginning. vLLM fixes
    them when it starts, and has none beyond the positions of a `dynamic` model.
    """
    for kind, limit in length_limits(config).items():
        if max_model_len <= limit or (engine == "vllm" and kind == "longrope"):
            continue
        lengths = f"--max-prompt-tokens and --max-response-tokens: {max_model_len} tokens together"
        if engine == "vllm":
            raise SystemExit(
                f"{lengths}, and vLLM has {limit} positions for this model ({kind} rotary "
                "frequencies)"
            )
        remedy = "--engine vllm fixes them" if kind == "longrope" else "lower the two"
        raise SystemExit(
            f"{lengths}, and the model's rotary frequencies ({kind}) change beyond {limit} while "
            f"--engine hf samples; {remedy}"
        )


def set_text_lengths(model: nn.Module, max_model_len: int | None) -> None:
    """Give all texts the frequencies of a text of `max_model_len` tokens, as vLLM does; None: give
    each those of its own length."""
    for module in model.modules():
        if hasattr(module, "rope_type") and length_limits(module.config):
            rotary = TextRotary(module)
            if max_model_len:
                rotary.set_length(max_model_len)
            else:
                module.forward = rotary.forward


class TextRotary:
    """Sets the frequencies of a rotary module of transformers, which no longer follows the longest
    position of a forward by itself."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.embed = module.forward
        self.limits = length_limits(module.config)
        rope = module.config.rope_parameters
        # "fixed": a type whose frequencies transformers does not change
        if isinstance(module.rope_type, dict):
            self.parameters = {layer_type: rope[layer_type] for layer_type in module.rope_type}
            module.rope_type = dict.fromkeys(module.rope_type, "fixed")
        else:
            self.parameters = {None: rope}
            module.rope_type = "fixed"

    def set_length(self, length: int) -> None:
        """Use the frequencies of a text of so many tokens, as transformers computes them in a
        forward of that text alone."""
        for layer_type, parameters in self.parameters.items():
            prefix = f"{layer_type}_" if layer_type else ""
            device = getattr(self.module, f"{prefix}inv_freq").device
            kind = parameters["rope_type"]
            if length > self.limits.get(kind, inf):
                compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind]
                frequencies, _ = compute(
                    self.module.config, device, seq_len=torch.tensor(length), layer_type=layer_type
                )
            else:
                frequencies = getattr(self.module, f"{prefix}original_inv_freq").to(device)
            self.module.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)

    def forward(
        self, hidden: Tensor, position_ids: Tensor, *layer_type: str
    ) -> tuple[Tensor, Tensor]:
        """(cosines, sines), each [1, L, D], of a pack, in which the positions of each prompt begin
        at 0."""
        positions = position_ids[0].tolist()
        starts = [i for i, position in enumerate(positions) if position == 0]
        cosines, sines = [], []
        for start, end in pairwise([*starts, len(positions)]):
            self.set_length(self._length(positions[start:end]))
            cosine, sine = self.embed(hidden[:, start:end], position_ids[:, start:end], *layer_type)
            cosines.append(cosine)
            sines.append(sine)
        return torch.cat(cosines, dim=1), torch.cat(sines, dim=1)

    def _length(self, positions: list[int]) -> int:
        """Tokens of a prompt with its longest response; the positions of each response continue
        from the prompt's end. ValueError if responses of different lengths share a prompt, and one
        is beyond a limit."""
        lengths = {positions[-1] + 1}
        for position, following in pairwise(positions):
            if following <= position:
                lengths.add(position + 1)
        if len(lengths) > 1 and max(lengths) > min(self.limits.values()):
            raise ValueError(
                "responses that may need different rotary frequencies share a prompt: pack "
                "them apart"
            )
        return max(lengths)

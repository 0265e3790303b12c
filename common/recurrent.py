"""Recurrent layers over packs with shared prompts: a response goes on from the state that its
prompt has left.

A recurrent layer of transformers is a causal convolution over a few tokens (LFM2 has no more than
that), and behind it a gated delta rule or the scan of Mamba-2. The Python module that defines a
model has these functions by name, and the layers pass them the keywords of the model's forward.
Here they learn the keyword `units`, the lengths of a pack's segments (`MicroBatch.units`), which
attention gets too: a prompt is computed once, and each of its responses starts from the state of
its recurrence and from its last inputs of the convolution.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, wraps
from itertools import accumulate

import torch
from torch import Tensor, nn

Units = tuple[tuple[int, ...], ...]  # `MicroBatch.units`, hashable for `lru_cache`

# model_type of language models whose recurrent layers are exact in packs, as
# tests/math/test_recurrent.py shows; layers of others would silently ignore `units`
RECURRENT_MODELS = {
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "lfm2",
    "lfm2_moe",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
}


def is_recurrent(config) -> bool:
    """Whether a model has recurrent layers that take `units`."""
    return config.get_text_config().model_type in RECURRENT_MODELS


def has_delta_rule(model: nn.Module) -> bool:
    """Whether flash-linear-attention has a kernel for the recurrent layers of a model."""
    modeling = sys.modules[type(model).__module__]
    return is_recurrent(model.config) and hasattr(modeling, "torch_chunk_gated_delta_rule")


def share_prompts(model: nn.Module, kernels: str = "torch") -> None:
    """Let the recurrent layers of a model take `units`.

    Without that keyword they compute what they did before, with the same functions. With
    kernels="fla" the entries of `BY_FLA` compute packs in place of those of `OVER_PACKS`; without
    the keyword these functions run in torch. The functions are replaced in the module of
    transformers that defines the model, for all models of its kind in this process. SystemExit if
    it lacks the convolution, which all recurrent layers have, or if Hugging Face's package
    `kernels` hides a function.
    """
    modeling = sys.modules[type(model).__module__]
    kind = model.config.model_type
    if not hasattr(modeling, "causal_conv1d_fn"):
        raise SystemExit(f"{kind}: its recurrent layers are not those of transformers")
    for name, over_pack in OVER_PACKS.items():
        function = getattr(modeling, name, None)
        if function is None:
            continue
        function = getattr(function, "replaced", function)
        if not inspect.isfunction(function):
            raise SystemExit(
                f"{kind}: the package kernels stands between its recurrent layers and their "
                "functions in torch, the only ones with shared prompts: export USE_HUB_KERNELS=0"
            )
        is_kernel = kernels == "fla" and name in BY_FLA
        if is_kernel:
            over_pack = BY_FLA[name]
        setattr(modeling, name, taking_units(function, over_pack, is_kernel))


def taking_units(function: Callable, over_pack: Callable, is_kernel: bool = False) -> Callable:
    """`function`, and `over_pack` in its place if a layer passes `units`.

    `function` is transformers' wrapper of a function in torch. It calls a kernel of
    flash-linear-attention, causal-conv1d or mamba-ssm instead, if that is installed. Packs get the
    function in torch. With `is_kernel` it is the other way round: packs get `function`, and without
    units it is the one in torch, with which `check_policy` compares them.
    """
    in_torch = inspect.unwrap(function)
    in_packs, without_units = (function, in_torch) if is_kernel else (in_torch, function)

    @wraps(function)
    def dispatch(*arguments, units=None, seq_idx=None, **options):
        if units is None:
            units = seq_idx  # see `recurrent_inputs`
        if units is None:
            return without_units(*arguments, **options)
        return over_pack(in_packs, units, *arguments, **options)

    dispatch.replaced = function
    return dispatch


def recurrent_inputs(units: list[list[int]]) -> dict[str, object]:
    """Keywords of the forward of a model with recurrent layers."""
    return {"units": units, "seq_idx": units}  # LFM2 passes its convolutions seq_idx alone


def convolution_over_pack(
    convolution: Callable,
    units: list[list[int]],
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    **options: object,
) -> Tensor:
    """inputs [1, C, L], weight [C, W] -> [1, C, L]; the state is the last W - 1 inputs."""

    def convolve(segment: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        length = segment.shape[2]
        state_and_segment = segment if state is None else torch.cat([state, segment], dim=2)
        outputs = convolution(state_and_segment, weight, bias, **options)[:, :, -length:]
        # only a prompt's state is used, and a prompt has none before it
        return outputs, segment[:, :, 1 - weight.shape[1] :]

    return over_segments(convolve, units, [inputs], dim=2)


def delta_rule_over_pack(
    rule: Callable,
    units: list[list[int]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: None = None,  # a pack has no cache: layers pass None and False
    output_final_state: bool = False,
    **options: object,
) -> tuple[Tensor, None]:
    """query and key [1, L, H, K], value [1, L, H, V], g and beta [1, L, H] -> ([1, L, H, V], None);
    the state is [1, H, K, V]."""

    def apply(query, key, value, g, beta, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return rule(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=state,
            output_final_state=True,
            **options,
        )

    return over_segments(apply, units, [query, key, value, g, beta], dim=1), None


def scan_over_pack(
    scan: Callable,
    units: list[list[int]],
    inputs: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    initial_states: None = None,  # as in `delta_rule_over_pack`
    return_final_states: bool = False,
    **options: object,
) -> Tensor:
    """inputs [1, L, H, D], dt [1, L, H], A [H], B and C [1, L, groups, N] -> [1, L, H, D]; the
    state is [1, H, D, N]."""

    def apply(inputs, dt, B, C, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return scan(inputs, dt, A, B, C, initial_states=state, return_final_states=True, **options)

    return over_segments(apply, units, [inputs, dt, B, C], dim=1)


def fused_over_pack(fused: Callable, units: list[list[int]], *arguments, **options) -> None:
    """None, upon which the layer calls convolution and scan one by one: mamba-ssm's kernel for both
    cannot start from a state."""
    return None


OVER_PACKS = {
    "causal_conv1d_fn": convolution_over_pack,
    "torch_chunk_gated_delta_rule": delta_rule_over_pack,
    "mamba2_chunk_scan": scan_over_pack,
    "mamba2_split_conv1d_scan_combined": fused_over_pack,
}


def over_segments(
    function: Callable[..., tuple[Tensor, Tensor]],
    units: list[list[int]],
    tensors: list[Tensor],
    dim: int,
) -> Tensor:
    """The outputs of a function, segment by segment, along `dim`, where the tensors have tokens.

    function: (the segment of each tensor, the state that it starts from) -> (output, state after
    it). Prompts start without a state (None), responses from that of their prompt.
    """
    lengths = [length for unit in units for length in unit]
    segments = zip(*(tensor.split(lengths, dim=dim) for tensor in tensors))
    outputs: list[Tensor] = []
    for unit in units:
        output, prompt_state = function(*next(segments), None)
        outputs.append(output)
        for _ in unit[1:]:
            output, _ = function(*next(segments), prompt_state)
            outputs.append(output)
    return torch.cat(outputs, dim=dim)


# --- with the kernels of flash-linear-attention ---------------------------------------------------


@dataclass
class Sequences:
    """Segments of a pack, as a kernel reads them. Tensors int64.

    places [T]: of their tokens in the pack, segment by segment. bounds [N + 1]: where each of the N
    segments begins and ends in `places`; bounds_on_host: the same on the CPU.
    """

    places: Tensor
    bounds: Tensor
    bounds_on_host: Tensor

    @staticmethod
    def of(segments: list[range], device: torch.device) -> "Sequences":
        places = [place for segment in segments for place in segment]
        bounds = torch.tensor([0, *accumulate(map(len, segments))])
        places_on_device = torch.tensor(places, dtype=torch.int64, device=device)
        return Sequences(places_on_device, bounds.to(device), bounds)


def segments_of(units: Units) -> Iterator[tuple[range, list[range]]]:
    """The places of each prompt of a pack, and those of each of its responses."""
    start = 0
    for lengths in units:
        segments = []
        for length in lengths:
            segments.append(range(start, start + length))
            start += length
        yield segments[0], segments[1:]


@lru_cache(maxsize=1)  # all layers of a micro-batch ask for the same
def prompts_and_responses(
    units: Units, device: torch.device
) -> tuple[Sequences, Sequences, Tensor, Tensor]:
    """All prompts; all responses; which prompt each response has; and for each token of the pack
    [L] where it is in the prompts and, behind them, the responses."""
    prompts: list[range] = []
    responses: list[range] = []
    prompt_of_response: list[int] = []
    for i, (prompt, responses_of_prompt) in enumerate(segments_of(units)):
        prompts.append(prompt)
        responses.extend(responses_of_prompt)
        prompt_of_response.extend([i] * len(responses_of_prompt))
    prompt_index = torch.tensor(prompt_of_response, dtype=torch.int64, device=device)
    first, second = (Sequences.of(segments, device) for segments in (prompts, responses))
    order = torch.cat([first.places, second.places]).argsort()
    return first, second, prompt_index, order


def delta_rule_by_fla(
    rule: Callable,  # transformers' own: not called
    units: list[list[int]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **options: object,  # as in `delta_rule_over_pack`: there is no cache
) -> tuple[Tensor, None]:
    """What `delta_rule_over_pack` computes, in two calls: all prompts, then all responses from the
    states of their prompts."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # there on GPUs alone

    def apply(sequences: Sequences, states: Tensor | None) -> tuple[Tensor, Tensor]:
        """Outputs [1, T, H, V] and the states [N, H, K, V] after each sequence."""
        places = sequences.places
        return chunk_gated_delta_rule(
            q=query[:, places],
            k=key[:, places],
            v=value[:, places],
            g=g[:, places],
            beta=beta[:, places],
            initial_state=states,
            output_final_state=True,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=sequences.bounds,
            cu_seqlens_cpu=sequences.bounds_on_host,
        )

    units_key = tuple(map(tuple, units))
    prompts, responses, prompt_index, order = prompts_and_responses(units_key, query.device)
    outputs, states = apply(prompts, None)
    if len(prompt_index):
        response_outputs, _ = apply(responses, states[prompt_index])
        outputs = torch.cat([outputs, response_outputs], dim=1)
    return outputs[:, order], None


@lru_cache(maxsize=1)  # as in `prompts_and_responses`
def places_behind_states(
    units: Units, num_before: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """A row in which each segment of a pack of L tokens stands behind the `num_before` tokens that
    come before it: places in the pack, L for no token. And where in the row the pack's tokens are,
    [L]."""
    no_token = sum(map(sum, units))
    row: list[int] = []
    positions: list[int] = []
    for prompt, responses in segments_of(units):
        before_prompt = [no_token] * num_before
        before_response = [*before_prompt, *prompt][len(prompt) :]
        for segment in (prompt, *responses):
            row.extend(before_prompt if segment is prompt else before_response)
            positions.extend(range(len(row), len(row) + len(segment)))
            row.extend(segment)
    return torch.tensor(row, device=device), torch.tensor(positions, device=device)


def convolution_in_one_call(
    convolution: Callable,
    units: list[list[int]],
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    **options: object,
) -> Tensor:
    """What `convolution_over_pack` computes, in one call, which may be of a kernel: each segment
    behind the inputs before it, which for a prompt are zeros."""
    num_before = weight.shape[1] - 1
    row, positions = places_behind_states(tuple(map(tuple, units)), num_before, inputs.device)
    with_zeros = nn.functional.pad(inputs, (0, 1))
    return convolution(with_zeros[:, :, row], weight, bias, **options)[:, :, positions]


BY_FLA = {
    "causal_conv1d_fn": convolution_in_one_call,
    "torch_chunk_gated_delta_rule": delta_rule_by_fla,
}

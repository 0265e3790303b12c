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
from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor, nn

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


def share_prompts(model: nn.Module) -> None:
    """Let the recurrent layers of a model take `units`. Without that keyword they compute what they
    did before, with the same functions.

    The functions are replaced in the module of transformers that defines the model, once for all
    models of its kind in this process. SystemExit if it lacks the convolution, which all recurrent
    layers have, or if the package kernels hides a function.
    """
    modeling = sys.modules[type(model).__module__]
    kind = model.config.model_type
    if not hasattr(modeling, "causal_conv1d_fn"):
        raise SystemExit(f"{kind}: its recurrent layers are not those of transformers")
    for name, over_pack in OVER_PACKS.items():
        function = getattr(modeling, name, None)
        if function is None or hasattr(function, "takes_units"):
            continue
        if not inspect.isfunction(function):
            raise SystemExit(
                f"{kind}: the package kernels stands between its recurrent layers and their "
                "functions in torch, the only ones with shared prompts: export USE_HUB_KERNELS=0"
            )
        setattr(modeling, name, taking_units(function, over_pack))


def taking_units(function: Callable, over_pack: Callable) -> Callable:
    """`function`, and `over_pack` in its place if a layer passes `units`.

    Packs are always computed by transformers' own function in torch. Its wrapper of the same name
    calls a kernel of flash-linear-attention, causal-conv1d or mamba-ssm instead, if that is
    installed.
    """
    function_in_torch = inspect.unwrap(function)

    @wraps(function)
    def dispatch(*arguments, units=None, seq_idx=None, **options):
        if units is None:
            units = seq_idx  # see `recurrent_inputs`
        if units is None:
            return function(*arguments, **options)
        return over_pack(function_in_torch, units, *arguments, **options)

    dispatch.takes_units = True
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

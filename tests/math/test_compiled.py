"""What torch.compile makes has the values of the code as it stands, and is made once for packs of
all lengths. On a CPU graphs run as they were traced; -m slow has inductor's own kernels."""

from functools import partial

import pytest
import torch
from helpers import relative_l2

import common.logprobs
from common.logprobs import LogitTransform, token_logprobs

# relative distances: of log-probs and entropies in float32, and of gradients in the dtype of the
# inputs
BOUNDS = {torch.float32: (1e-6, 1e-5), torch.bfloat16: (1e-6, 1e-2)}


@pytest.fixture
def compiler():
    """Of this process: an engine may have switched it off."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(disable=False):
        yield torch._dynamo.utils.counters


# --- the head ------------------------------------------------------------------------------------


def head_values(hidden, weight, targets, transform, entropy_coef) -> list[torch.Tensor]:
    """Log-probs, entropies, and the gradients of hidden states and head."""
    inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    logprobs, entropy = token_logprobs(*inputs, targets, 0.7, transform)
    upstream = torch.linspace(-1, 1, len(targets))
    (logprobs * upstream + entropy_coef * entropy * upstream.flip(0)).sum().backward()
    return [logprobs.detach(), entropy.detach(), *[tensor.grad for tensor in inputs]]


HEADS = [  # (dtype, what the model makes of its logits, factor of the entropy in the loss)
    (torch.bfloat16, LogitTransform(), 0.3),
    (torch.float32, LogitTransform(0.5, softcap=2.0), 0.3),
]
MORE_HEADS = [
    (torch.bfloat16, LogitTransform(), 0.0),
    (torch.float32, LogitTransform(), 0.0),
    (torch.float32, LogitTransform(), 0.3),
    (torch.bfloat16, LogitTransform(scale=0.25), 0.3),
    (torch.bfloat16, LogitTransform(0.5, softcap=2.0), 0.3),
]
HEAD_CASES = [("aot_eager", *head) for head in HEADS]
for head in HEADS + MORE_HEADS:
    HEAD_CASES.append(pytest.param("inductor", *head, marks=pytest.mark.slow))


@pytest.mark.parametrize("backend, dtype, transform, entropy_coef", HEAD_CASES)
def test_the_compiled_head_is_the_eager_one(
    backend, dtype, transform, entropy_coef, compiler, monkeypatch
):
    torch.manual_seed(0)
    hidden = torch.randn(31, 16, dtype=dtype)
    weight = torch.randn(53, 16, dtype=dtype)
    targets = torch.randint(53, (31,))
    # several slices, of which the last is smaller
    monkeypatch.setitem(common.logprobs.CHUNK_ELEMENTS, "cpu", 7 * 53)
    eager = head_values(hidden, weight, targets, transform, entropy_coef)
    monkeypatch.setattr(common.logprobs, "has_compiler", lambda device: True)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    common.logprobs._compiled.cache_clear()
    compiled = head_values(hidden, weight, targets, transform, entropy_coef)
    common.logprobs._compiled.cache_clear()
    value_bound, gradient_bound = BOUNDS[dtype]
    for ours, expected in zip(compiled[:2], eager[:2]):
        assert relative_l2([ours], [expected]) < value_bound
    for ours, expected in zip(compiled[2:], eager[2:]):
        assert relative_l2([ours], [expected]) < gradient_bound
    # forward and backward, whatever the size of a slice
    assert compiler["stats"]["unique_graphs"] == 2
    assert not compiler["graph_break"]

"""Log-probabilities and entropies from hidden states, in chunks: there is never a [tokens, vocab]
tensor."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

# logits alive at a time: 32 MiB and 128 MiB in float32
CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**25}


@dataclass(frozen=True)
class LogitTransform:
    """How a model makes logits of x = hidden @ weight.T: scale * x, or with a soft cap
    softcap * tanh(scale * x / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    @property
    def is_identity(self) -> bool:
        return self.scale == 1 and self.softcap is None

    def apply(self, x: Tensor) -> Tensor:
        """In place."""
        if self.scale != 1:
            x.mul_(self.scale)
        if self.softcap is not None:
            x.div_(self.softcap).tanh_().mul_(self.softcap)
        return x

    def slope(self, logits: Tensor) -> Tensor | float:
        """d logits / d x, of the shape of `logits` if there is a soft cap."""
        if self.softcap is None:
            return self.scale
        return (logits / self.softcap).square_().neg_().add_(1).mul_(self.scale)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    transform: LogitTransform = LogitTransform(),
) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy under softmax(logits / temperature), with exact gradients through
    both; `transform` makes the logits of hidden @ weight.T.

    hidden [N, H] and weight [V, H] in any floating dtype, targets [N] int64 -> two [N] tensors in
    float32 (float64 for float64 inputs). Logits are recomputed in backward, a slice at a time; peak
    memory grows with (N + V) x H, not with N x V.
    """
    return _TokenLogprobs.apply(hidden, weight, targets, temperature, transform)


@torch.no_grad()
def is_greedy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Whether each target is the most likely token, [N] bool; arguments as for `token_logprobs`."""
    head = weight.to(hidden.dtype)
    result = torch.empty_like(targets, dtype=torch.bool)
    for rows in _slices(hidden, weight):
        result[rows] = (hidden[rows] @ head.T).argmax(-1) == targets[rows]
    return result


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        transform: LogitTransform,
    ) -> tuple[Tensor, Tensor]:
        head = weight.to(hidden.dtype)
        statistics = in_one_kernel(_statistics, hidden.device)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(targets.shape, dtype=dtype)
        logsumexp = torch.empty_like(logprobs)
        entropy = torch.empty_like(logprobs)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _slices(hidden, weight):
                logprobs[rows], logsumexp[rows], entropy[rows] = statistics(
                    hidden[rows] @ head.T, targets[rows], temperature, transform
                )
        ctx.set_materialize_grads(False)  # None is the gradient of what is not part of the loss
        ctx.save_for_backward(hidden, weight, targets, logsumexp, entropy)
        ctx.temperature = temperature
        ctx.transform = transform
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, logsumexp, entropy = ctx.saved_tensors
        head = weight.to(hidden.dtype)
        logit_gradients = in_one_kernel(_logit_gradients, hidden.device)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(logsumexp)
        grad_logprobs = grad_logprobs[:, None] / ctx.temperature
        if grad_entropy is not None:
            grad_entropy = grad_entropy[:, None] / ctx.temperature
        grad_hidden = torch.zeros_like(hidden, dtype=logsumexp.dtype)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        with torch.autocast(hidden.device.type, enabled=False):
            # Slices of the vocabulary, not of the rows: each part of the large gradient is then
            # written once.
            for words in _slices(weight, hidden):
                grad_logits = logit_gradients(
                    hidden @ head[words].T,
                    targets - words.start,
                    logsumexp[:, None],
                    entropy[:, None],
                    grad_logprobs,
                    grad_entropy,
                    ctx.temperature,
                    ctx.transform,
                )
                grad_hidden += grad_logits @ head[words]
                if grad_weight is not None:
                    grad_weight[words] = grad_logits.T @ hidden
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None


def _statistics(
    products: Tensor, targets: Tensor, temperature: float, transform: LogitTransform
) -> tuple[Tensor, Tensor, Tensor]:
    """log p(target), log-sum-exp and entropy, [N] each, from products [N, V] of hidden states and
    head, which may be overwritten."""
    logits = transform.apply(_wide(products))
    if temperature != 1:
        logits.div_(temperature)
    highest = logits.amax(-1)
    shifted = logits.sub_(highest[:, None])
    exponentials = shifted.exp()
    total = exponentials.sum(-1)
    log_total = total.log()
    logprobs = shifted.gather(-1, targets[:, None]).squeeze(-1) - log_total
    entropy = log_total - exponentials.mul_(shifted).sum(-1) / total
    return logprobs, highest + log_total, entropy


def _logit_gradients(
    products: Tensor,
    places: Tensor,
    logsumexp: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
    transform: LogitTransform,
) -> Tensor:
    """d loss / d products [N, W], of the dtype of `products`, which may be overwritten.

    places [N]: the target's column, which may lie outside of [0, W). The other tensors are [N, 1];
    grad_logprobs and grad_entropy are given divided by the temperature.
    """
    # With p = softmax(z):  d logp_y / dz = onehot(y) - p,   d H / dz = -p * (log p + H)
    logits = transform.apply(_wide(products))
    logit_slope = transform.slope(logits)
    if temperature != 1:
        logits.div_(temperature)
    logp = logits.sub_(logsumexp)
    coefficient = -grad_logprobs  # of p in d loss / dz
    if grad_entropy is not None:
        coefficient = coefficient.addcmul(logp + entropy, grad_entropy, value=-1)
    grad_logits = logp.exp_().mul_(coefficient)
    num_words = logp.shape[1]
    if torch.compiler.is_compiling():  # a scatter would be a kernel of its own
        is_target = places[:, None] == torch.arange(num_words, device=places.device)
        grad_logits = grad_logits + is_target * grad_logprobs
    else:
        # A target outside of the slice adds zero somewhere inside: to select those inside would
        # make the host wait for the GPU.
        is_inside = (places >= 0) & (places < num_words)
        columns = places.clamp(0, num_words - 1)
        grad_logits.scatter_add_(1, columns[:, None], grad_logprobs * is_inside[:, None])
    if not transform.is_identity:
        grad_logits.mul_(logit_slope)
    return grad_logits.to(products.dtype)


def _wide(products: Tensor) -> Tensor:
    """In float32 (float64 for float64 inputs)."""
    return products.to(torch.promote_types(products.dtype, torch.float32))


def in_one_kernel(function: Callable, device: torch.device) -> Callable:
    """`function` compiled, where `has_compiler`: of a dozen passes over the logits one is left."""
    return _compiled(function) if has_compiler(device) else function


def has_compiler(device: torch.device) -> bool:
    """Whether functions are compiled for a device: for GPUs of capability 8.0 or more."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8


@cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=True)  # the last slice is a smaller one


def _slices(rows: Tensor, others: Tensor) -> list[slice]:
    """Slices of `rows` such that rows[slice] @ others.T has at most CHUNK_ELEMENTS, or in 16 bits
    twice as many if functions are compiled."""
    elements = CHUNK_ELEMENTS[rows.device.type]
    if has_compiler(rows.device) and rows.element_size() == 2:
        elements *= 2  # compiled functions make no tensor of logits in float32
    size = max(1, elements // max(len(others), 1))
    return [slice(start, start + size) for start in range(0, len(rows), size)]

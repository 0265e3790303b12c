"""Log-probabilities and entropies from hidden states, in chunks: there is never a [tokens, vocab]
tensor."""

from dataclasses import dataclass

import torch
from torch import Tensor

# logits alive at a time: 32 MiB and 128 MiB in float32
CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**25}


@dataclass(frozen=True)
class LogitTransform:
    """What a model makes of x = hidden @ weight.T: logits scale * x, with a soft cap
    softcap * tanh(scale * x / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

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
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(targets.shape, dtype=dtype)
        logsumexp = torch.empty_like(logprobs)
        entropy = torch.empty_like(logprobs)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _slices(hidden, weight):
                logits = transform.apply(_products(hidden[rows], head))
                if temperature != 1:
                    logits.div_(temperature)
                highest = logits.amax(-1)
                shifted = logits.sub_(highest[:, None])
                exponentials = shifted.exp()
                total = exponentials.sum(-1)
                log_total = total.log()
                logsumexp[rows] = highest + log_total
                logprobs[rows] = shifted.gather(-1, targets[rows, None]).squeeze(-1) - log_total
                entropy[rows] = log_total - exponentials.mul_(shifted).sum(-1) / total
        ctx.set_materialize_grads(False)  # None is the gradient of what is not part of the loss
        ctx.save_for_backward(hidden, weight, targets, logsumexp, entropy)
        ctx.temperature = temperature
        ctx.transform = transform
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        # With p = softmax(z):  d logp_y / dz = onehot(y) - p,   d H / dz = -p * (log p + H)
        hidden, weight, targets, logsumexp, entropy = ctx.saved_tensors
        head = weight.to(hidden.dtype)
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
                logits = ctx.transform.apply(_products(hidden, head[words]))
                logit_slope = ctx.transform.slope(logits)
                if ctx.temperature != 1:
                    logits.div_(ctx.temperature)
                logp = logits.sub_(logsumexp[:, None])
                # A target outside of the slice adds zero somewhere inside: to select those inside
                # would make the host wait for the GPU.
                inside = (targets >= words.start) & (targets < words.stop)
                places = (targets - words.start).clamp(0, logp.shape[1] - 1)
                slope = -grad_logprobs
                if grad_entropy is not None:
                    slope = slope.addcmul(logp + entropy[:, None], grad_entropy, value=-1)
                grad_logits = logp.exp_().mul_(slope)
                grad_logits.scatter_add_(1, places[:, None], grad_logprobs * inside[:, None])
                if ctx.transform != LogitTransform():
                    grad_logits.mul_(logit_slope)
                grad_logits = grad_logits.to(hidden.dtype)
                grad_hidden += grad_logits @ head[words]
                if grad_weight is not None:
                    grad_weight[words] = grad_logits.T @ hidden
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None


def _products(hidden: Tensor, head: Tensor) -> Tensor:
    """hidden @ head.T [N, V] in float32 (float64 for float64 inputs)."""
    return (hidden @ head.T).to(torch.promote_types(hidden.dtype, torch.float32))


def _slices(rows: Tensor, others: Tensor) -> list[slice]:
    """Slices of `rows` such that rows[slice] @ others.T has at most CHUNK_ELEMENTS."""
    size = max(1, CHUNK_ELEMENTS[rows.device.type] // max(len(others), 1))
    return [slice(start, start + size) for start in range(0, len(rows), size)]

"""Log-probabilities and entropies from hidden states, in chunks: a [tokens, vocab] tensor never exists."""

import torch
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**25}  # logits alive at a time: 64 MiB and 128 MiB in float32


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy under softmax(hidden @ weight.T / temperature), with exact gradients through both.

    hidden [N, H] and weight [V, H] in any floating dtype, targets [N] int64 -> two [N] tensors in float32 (float64 for
    float64 inputs). Logits are recomputed in backward, a slice at a time; peak memory grows with H, not with N x V.
    """
    return _TokenLogprobs.apply(hidden, weight, targets, temperature)


@torch.no_grad()
def is_greedy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Whether each target is the most likely token, [N] bool; arguments as for `token_logprobs`."""
    head, result = weight.to(hidden.dtype), torch.empty_like(targets, dtype=torch.bool)
    for rows in _slices(hidden, weight):
        result[rows] = (hidden[rows] @ head.T).argmax(-1) == targets[rows]
    return result


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        head = weight.to(hidden.dtype)
        accumulate = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(targets.shape, dtype=accumulate, device=hidden.device)
        logsumexp, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _slices(hidden, weight):
                logits = _logits(hidden[rows], head, temperature, accumulate)
                logsumexp[rows] = logits.logsumexp(-1)
                logprobs[rows] = logits.gather(-1, targets[rows, None]).squeeze(-1) - logsumexp[rows]
                logp = logits.sub_(logsumexp[rows, None])
                entropy[rows] = -(logp.exp() * logp).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, logsumexp, entropy)
        ctx.temperature, ctx.accumulate = temperature, accumulate
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        # With p = softmax(z):  d logp_y / dz = onehot(y) - p,   d H / dz = -p * (log p + H)
        hidden, weight, targets, logsumexp, entropy = ctx.saved_tensors
        head = weight.to(hidden.dtype)
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros(hidden.shape, dtype=ctx.accumulate, device=hidden.device) if want_hidden else None
        grad_weight = torch.empty_like(weight) if want_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            # Slices of the vocabulary, not of the rows: each part of the large gradient is then written once.
            for words in _slices(weight, hidden):
                logp = _logits(hidden, head[words], ctx.temperature, ctx.accumulate).sub_(logsumexp[:, None])
                p = logp.exp()
                # logp becomes the gradient of the logits in place: one buffer less
                grad_logits = logp.add_(entropy[:, None]).mul_(-grad_entropy[:, None])
                grad_logits = grad_logits.sub_(grad_logprobs[:, None]).mul_(p)
                places = (targets - words.start).clamp(0, grad_logits.shape[1] - 1)  # without asking which are inside:
                inside = (targets >= words.start) & (targets < words.stop)  # a GPU would have to answer
                grad_logits.scatter_add_(1, places[:, None], (grad_logprobs * inside)[:, None])
                grad_logits = grad_logits.div_(ctx.temperature).to(hidden.dtype)
                if want_hidden:
                    grad_hidden += grad_logits @ head[words]
                if want_weight:
                    grad_weight[words] = grad_logits.T @ hidden
        return grad_hidden.to(hidden.dtype) if want_hidden else None, grad_weight, None, None


def _logits(hidden: Tensor, head: Tensor, temperature: float, accumulate: torch.dtype) -> Tensor:
    return (hidden @ head.T).to(accumulate).div_(temperature)


def _slices(cut: Tensor, whole: Tensor) -> list[slice]:
    """Of the rows of `cut`, so that cut[slice] @ whole.T has at most CHUNK_ELEMENTS."""
    size = max(1, CHUNK_ELEMENTS[cut.device.type] // max(len(whole), 1))
    return [slice(start, start + size) for start in range(0, len(cut), size)]

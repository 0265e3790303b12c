"""Log-probabilities and entropies from hidden states, in chunks: a [tokens, vocab] tensor never
exists."""

import torch
from torch import Tensor

# logits alive at a time: 32 MiB and 128 MiB in float32
CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**25}


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy under softmax(hidden @ weight.T / temperature), with exact
    gradients through both.

    hidden [N, H] and weight [V, H] in any floating dtype, targets [N] int64 -> two [N] tensors in
    float32 (float64 for float64 inputs). Logits are recomputed in backward, a slice at a time; peak
    memory grows with H, not with N x V.
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
    def forward(
        ctx, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        head = weight.to(hidden.dtype)
        logprobs = hidden.new_empty(
            targets.shape, dtype=torch.promote_types(hidden.dtype, torch.float32)
        )
        logsumexp, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _slices(hidden, weight):
                logits = _logits(hidden[rows], head, temperature)
                highest = logits.amax(-1)
                exponentials = logits.sub_(highest[:, None]).exp()
                total = exponentials.sum(-1)
                logsumexp[rows] = highest + total.log()
                logprobs[rows] = logits.gather(-1, targets[rows, None]).squeeze(-1) - total.log()
                entropy[rows] = total.log() - exponentials.mul_(logits).sum(-1) / total
        ctx.save_for_backward(hidden, weight, targets, logsumexp, entropy)
        ctx.temperature = temperature
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        # With p = softmax(z):  d logp_y / dz = onehot(y) - p,   d H / dz = -p * (log p + H)
        hidden, weight, targets, logsumexp, entropy = ctx.saved_tensors
        head = weight.to(hidden.dtype)
        grad_logprobs, grad_entropy = (
            grad[:, None] / ctx.temperature for grad in (grad_logprobs, grad_entropy)
        )
        through_entropy = bool(grad_entropy.any())  # it rarely is in the loss
        grad_hidden = torch.zeros_like(hidden, dtype=logsumexp.dtype)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        with torch.autocast(hidden.device.type, enabled=False):
            # Slices of the vocabulary, not of the rows: each part of the large gradient is then
            # written once.
            for words in _slices(weight, hidden):
                logp = _logits(hidden, head[words], ctx.temperature).sub_(logsumexp[:, None])
                # without asking which are inside:
                places = (targets - words.start).clamp(0, logp.shape[1] - 1)
                # a GPU would have to answer
                inside = (targets >= words.start) & (targets < words.stop)
                slope = -grad_logprobs
                if through_entropy:
                    slope = slope.addcmul(logp + entropy[:, None], grad_entropy, value=-1)
                grad_logits = (
                    logp.exp_()
                    .mul_(slope)
                    .scatter_add_(1, places[:, None], grad_logprobs * inside[:, None])
                )
                grad_logits = grad_logits.to(hidden.dtype)
                grad_hidden += grad_logits @ head[words]
                if grad_weight is not None:
                    grad_weight[words] = grad_logits.T @ hidden
        return grad_hidden.to(hidden.dtype), grad_weight, None, None


def _logits(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    logits = (hidden @ head.T).to(torch.promote_types(hidden.dtype, torch.float32))
    return logits if temperature == 1 else logits.div_(temperature)


def _slices(cut: Tensor, whole: Tensor) -> list[slice]:
    """Of the rows of `cut`, so that cut[slice] @ whole.T has at most CHUNK_ELEMENTS."""
    size = max(1, CHUNK_ELEMENTS[cut.device.type] // max(len(whole), 1))
    return [slice(start, start + size) for start in range(0, len(cut), size)]

"""A student's predictions against a teacher's, in chunks: there is never a [tokens, vocab] tensor
of either model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from common.logprobs import CHUNK_ELEMENTS, LogitTransform

# of a token that a model does not have, the padding of another one's vocabulary
MISSING_LOGPROB = -100.0
# log p [N, v], log q [N, v] of words of the vocabulary -> two tensors of that shape: the summands
# of a divergence of p and q, and p times its derivative by p
DivergenceTerms = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass
class Prediction:
    """What a model predicts at N places, not yet computed: softmax(logits / temperature), where
    `transform` makes the logits [N, V] of hidden @ weight.T."""

    hidden: Tensor  # [N, H], any floating dtype
    weight: Tensor  # [V, H]: the head, whole
    transform: LogitTransform
    temperature: float

    def scaled_logits(self, rows: slice = slice(None), words: slice = slice(None)) -> Tensor:
        """logits / temperature of some rows and words, in float32 (float64 for float64)."""
        head = self.weight[words].to(self.hidden.dtype)
        products = self.hidden[rows] @ head.T
        products = products.to(torch.promote_types(products.dtype, torch.float32))
        return self.transform.apply(products).div_(self.temperature)

    def slope(self, scaled_logits: Tensor) -> Tensor | float:
        """d (logits / temperature) / d (hidden @ weight.T)."""
        logits = scaled_logits
        if self.transform.softcap is not None:  # else it is a number, whatever the logits
            logits = scaled_logits * self.temperature
        return self.transform.slope(logits) / self.temperature


class Comparison(NamedTuple):
    """A student beside a teacher at N places; each [N], float32 (float64 for float64)."""

    divergence: Tensor  # the only one with a gradient, for the student alone
    logprobs: Tensor  # of the student's token
    entropy: Tensor  # of the student
    teacher_logprobs: Tensor  # of the student's token; MISSING_LOGPROB if it does not have it
    teacher_entropy: Tensor
    agreement: Tensor  # 1 where both find the same token most likely, else 0


def compare(
    student: Prediction, teacher: Prediction, targets: Tensor, terms: DivergenceTerms
) -> Comparison:
    """Compare two predictions at the same N places, where the student's tokens are `targets` [N]
    int64.

    Where the vocabularies have different sizes, the divergence is that of the two distributions
    over the words that both have. Logits are computed again in the backward, a slice at a time.
    """
    outputs = _Compare.apply(
        student.hidden, student.weight, teacher.hidden, teacher.weight, targets,
        (student.transform, student.temperature), (teacher.transform, teacher.temperature), terms,
    )  # fmt: skip
    return Comparison(*outputs)


class _Compare(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        targets: Tensor,
        options: tuple[LogitTransform, float],
        teacher_options: tuple[LogitTransform, float],
        terms: DivergenceTerms,
    ) -> tuple[Tensor, ...]:
        student = Prediction(hidden, weight, *options)
        teacher = Prediction(teacher_hidden, teacher_weight, *teacher_options)
        num_words = min(len(weight), len(teacher_weight))  # that both have
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        columns = Comparison(*(hidden.new_empty(len(targets), dtype=dtype) for _ in range(6)))
        # what the backward needs of each row
        total = torch.empty_like(columns.divergence)
        teacher_total = torch.empty_like(total)
        mean_slope = torch.empty_like(total)
        num_largest = max(len(weight), len(teacher_weight))
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _slices(len(targets), num_largest, hidden.device):
                logits = student.scaled_logits(rows)
                teacher_logits = teacher.scaled_logits(rows)
                logp = logits.log_softmax(-1)
                columns.logprobs[rows] = _at(logp, targets[rows])
                columns.entropy[rows] = -(logp.exp() * logp).sum(-1)
                logq = teacher_logits.log_softmax(-1)
                columns.teacher_logprobs[rows] = _at(logq, targets[rows])
                columns.teacher_entropy[rows] = -(logq.exp() * logq).sum(-1)
                columns.agreement[rows] = (logp.argmax(-1) == logq.argmax(-1)).to(dtype)

                logits = logits[:, :num_words]
                teacher_logits = teacher_logits[:, :num_words]
                total[rows] = logits.logsumexp(-1)
                teacher_total[rows] = teacher_logits.logsumexp(-1)
                summands, slopes = terms(
                    logits - total[rows, None], teacher_logits - teacher_total[rows, None]
                )
                columns.divergence[rows] = summands.sum(-1)
                mean_slope[rows] = slopes.sum(-1)
        ctx.save_for_backward(
            hidden, weight, teacher_hidden, teacher_weight, total, teacher_total, mean_slope
        )
        ctx.options = options
        ctx.teacher_options = teacher_options
        ctx.terms = terms
        ctx.mark_non_differentiable(*columns[1:])
        return tuple(columns)

    @staticmethod
    def backward(ctx, grad_divergence: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        # With p = softmax(z) and s = p * dD/dp:   dD / dz = s - p * sum(s)
        hidden, weight, teacher_hidden, teacher_weight, *rows = ctx.saved_tensors
        total, teacher_total, mean_slope = (values[:, None] for values in rows)
        student = Prediction(hidden, weight, *ctx.options)
        teacher = Prediction(teacher_hidden, teacher_weight, *ctx.teacher_options)
        num_words = min(len(weight), len(teacher_weight))
        grad_hidden = torch.zeros_like(hidden, dtype=total.dtype)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        with torch.autocast(hidden.device.type, enabled=False):
            # Slices of the vocabulary, not of the rows: each part of the large gradient is then
            # written once.
            for words in _slices(num_words, len(hidden), hidden.device):
                logits = student.scaled_logits(words=words)
                logp = logits - total
                _, slopes = ctx.terms(logp, teacher.scaled_logits(words=words) - teacher_total)
                grad_logits = (slopes - logp.exp() * mean_slope) * grad_divergence[:, None]
                grad_products = (grad_logits * student.slope(logits)).to(hidden.dtype)
                grad_hidden += grad_products @ weight[words].to(hidden.dtype)
                if grad_weight is not None:
                    grad_weight[words] = grad_products.T @ hidden
        return grad_hidden.to(hidden.dtype), grad_weight, *[None] * 6


def _at(logp: Tensor, targets: Tensor) -> Tensor:
    """logp [n, V] at targets [n]; MISSING_LOGPROB for those from V on."""
    known = targets < logp.shape[1]
    values = logp.gather(-1, targets.clamp(max=logp.shape[1] - 1)[:, None]).squeeze(-1)
    return torch.where(known, values, MISSING_LOGPROB)


def _slices(length: int, width: int, device: torch.device) -> list[slice]:
    """Slices of `length` such that each times `width` has at most CHUNK_ELEMENTS."""
    size = max(1, CHUNK_ELEMENTS[device.type] // max(width, 1))
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]

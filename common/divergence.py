"""A student's predictions against a teacher's, in chunks: there is never a [tokens, vocab] tensor
of either model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from common.logprobs import CHUNK_ELEMENTS, LogitTransform

# stands for the log-prob of a token beyond a model's vocabulary, as in the padding of a larger one
MISSING_LOGPROB = -100.0
# log p [N, v], log q [N, v] of v words of the vocabulary -> the summands of a divergence D of p and
# q, and s = p * dD/dp, [N, v] each
DivergenceTerms = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass
class Prediction:
    """A model's distributions at N positions, in a form that is computed in chunks:
    softmax(logits / temperature), where `transform` makes the logits [N, V] from hidden @ weight.T.
    Rows are positions; words are entries of the vocabulary.
    """

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
        logits = scaled_logits  # without a soft cap the slope does not depend on them
        if self.transform.softcap is not None:
            logits = scaled_logits * self.temperature
        return self.transform.slope(logits) / self.temperature


class Comparison(NamedTuple):
    """A student beside a teacher at N positions; each [N], float32 (float64 for float64)."""

    divergence: Tensor  # has a gradient, to the student alone; the other columns have none
    logprobs: Tensor  # the student's, of the targets
    entropy: Tensor  # of the student
    teacher_logprobs: Tensor  # of the targets; MISSING_LOGPROB beyond the teacher's vocabulary
    teacher_entropy: Tensor
    agreement: Tensor  # 1 where both find the same token most likely, else 0


def compare(
    student: Prediction, teacher: Prediction, targets: Tensor, terms: DivergenceTerms
) -> Comparison:
    """Compare two predictions at the same N positions, where the student's tokens are `targets` [N]
    int64.

    If the vocabularies differ in size, the divergence is between the two distributions over the
    words that both have; the other columns are of each model's whole vocabulary. Logits are
    computed again in the backward, a slice at a time.
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
        student_options: tuple[LogitTransform, float],
        teacher_options: tuple[LogitTransform, float],
        terms: DivergenceTerms,
    ) -> tuple[Tensor, ...]:
        student = Prediction(hidden, weight, *student_options)
        teacher = Prediction(teacher_hidden, teacher_weight, *teacher_options)
        num_words = min(len(weight), len(teacher_weight))  # that both have
        max_words = max(len(weight), len(teacher_weight))
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        columns = Comparison(
            *(hidden.new_empty(len(targets), dtype=dtype) for _ in Comparison._fields)
        )
        # what the backward needs of each row
        logsumexp = torch.empty_like(columns.divergence)
        teacher_logsumexp = torch.empty_like(logsumexp)
        mean_derivative = torch.empty_like(logsumexp)  # the mean of dD/dp under p
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _slices(len(targets), max_words, hidden.device):
                logits = student.scaled_logits(rows)
                teacher_logits = teacher.scaled_logits(rows)
                logp = logits.log_softmax(-1)
                columns.logprobs[rows] = _logprobs_at(logp, targets[rows])
                columns.entropy[rows] = -(logp.exp() * logp).sum(-1)
                logq = teacher_logits.log_softmax(-1)
                columns.teacher_logprobs[rows] = _logprobs_at(logq, targets[rows])
                columns.teacher_entropy[rows] = -(logq.exp() * logq).sum(-1)
                columns.agreement[rows] = (logp.argmax(-1) == logq.argmax(-1)).to(dtype)

                logits = logits[:, :num_words]
                teacher_logits = teacher_logits[:, :num_words]
                logsumexp[rows] = logits.logsumexp(-1)
                teacher_logsumexp[rows] = teacher_logits.logsumexp(-1)
                summands, weighted_derivatives = terms(
                    logits - logsumexp[rows, None], teacher_logits - teacher_logsumexp[rows, None]
                )
                columns.divergence[rows] = summands.sum(-1)
                mean_derivative[rows] = weighted_derivatives.sum(-1)
        ctx.save_for_backward(
            hidden,
            weight,
            teacher_hidden,
            teacher_weight,
            logsumexp,
            teacher_logsumexp,
            mean_derivative,
        )
        ctx.student_options = student_options
        ctx.teacher_options = teacher_options
        ctx.terms = terms
        ctx.mark_non_differentiable(*columns[1:])
        return tuple(columns)

    @staticmethod
    def backward(ctx, grad_divergence: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        # With p = softmax(z), and s = p * dD/dp, the weighted derivatives:
        # dD/dz = s - p * sum(s), where sum(s) is the mean derivative
        (
            hidden,
            weight,
            teacher_hidden,
            teacher_weight,
            logsumexp,
            teacher_logsumexp,
            mean_derivative,
        ) = ctx.saved_tensors
        student = Prediction(hidden, weight, *ctx.student_options)
        teacher = Prediction(teacher_hidden, teacher_weight, *ctx.teacher_options)
        num_words = min(len(weight), len(teacher_weight))
        grad_hidden = torch.zeros_like(hidden, dtype=logsumexp.dtype)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight)  # stays 0 for words that only the student has
        with torch.autocast(hidden.device.type, enabled=False):
            # Slices of the vocabulary, not of the rows: each part of the large gradient is then
            # written once.
            for words in _slices(num_words, len(hidden), hidden.device):
                logits = student.scaled_logits(words=words)
                logp = logits - logsumexp[:, None]
                _, weighted_derivatives = ctx.terms(
                    logp, teacher.scaled_logits(words=words) - teacher_logsumexp[:, None]
                )
                grad_logits = weighted_derivatives - logp.exp() * mean_derivative[:, None]
                grad_logits *= grad_divergence[:, None]
                grad_products = (grad_logits * student.slope(logits)).to(hidden.dtype)
                grad_hidden += grad_products @ weight[words].to(hidden.dtype)
                if grad_weight is not None:
                    grad_weight[words] = grad_products.T @ hidden
        # none for the teacher, the targets, the options and the terms
        return grad_hidden.to(hidden.dtype), grad_weight, *[None] * 6


def _logprobs_at(logp: Tensor, targets: Tensor) -> Tensor:
    """logp [n, V] at targets [n]; MISSING_LOGPROB for those from V on."""
    num_words = logp.shape[1]
    known_targets = targets.clamp(max=num_words - 1)
    values = logp.gather(-1, known_targets[:, None]).squeeze(-1)
    return torch.where(targets < num_words, values, MISSING_LOGPROB)


def _slices(length: int, width: int, device: torch.device) -> list[slice]:
    """Slices of range(length); each of them times `width` is at most CHUNK_ELEMENTS."""
    size = max(1, CHUNK_ELEMENTS[device.type] // max(width, 1))
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]

"""Log-softmax of a transducer's joint (..., V) at two of its V classes, without storing the other classes.

In addition to the joint, the forward pass needs memory for one number per row. The backward pass writes the gradient of
the joint once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bellmax.modes import is_transformed
from bellmax.tensors import promote_half

_CHUNK = 1 << 17  # entries per chunk, so that each chunk of the joint stays in the cache


def log_softmax_at(joint: Tensor, label: Tensor, blank: int) -> tuple[Tensor, Tensor]:
    """Return log_softmax(joint) at the blank and at the label of each row, both (...).

    The joint is (..., V), the labels are int64 (...). Half precision becomes float32. A row that is all −∞ gives −∞.
    """
    if is_transformed(joint):
        rows = promote_half(joint)
        norm = finite(rows.logsumexp(-1))
        return rows[..., blank] - norm, rows.gather(-1, label.unsqueeze(-1)).squeeze(-1) - norm
    at_blank, at_label = _LogSoftmaxAt.apply(joint.reshape(-1, joint.shape[-1]), label.reshape(-1), blank)
    return at_blank.reshape(label.shape), at_label.reshape(label.shape)


def log_softmax_all(scores: Tensor, is_padding: Tensor | None) -> Tensor:
    """Return log_softmax(scores) over the last dimension, which is small, for every entry of (..., D).

    Half precision becomes float32. A row that is all −∞, or that the mask ``is_padding`` (...) selects, gives −∞ and
    gets no gradient.
    """
    scores = promote_half(scores)
    is_empty = (scores == -math.inf).all(-1)
    is_empty = (is_empty if is_padding is None else is_empty | is_padding).unsqueeze(-1)
    return scores.masked_fill(is_empty, 0).log_softmax(-1).masked_fill(is_empty, -math.inf)


def log_sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """Return log Σ_v exp(a[..., t, v] + b[..., u, v]), (..., T, U), for a (..., T, V) and b (..., U, V).

    This is the logarithm of a matrix product of exponentials. If the large entries of a and b are at different v, the
    product underflows. Such entries are summed in log space.
    """
    max_a, max_b = (finite(x.detach().amax(-1, keepdim=True)) for x in (a, b))
    product = (a - max_a).exp() @ (b - max_b).exp().mT
    limits = torch.finfo(product.dtype)
    is_small = product < limits.tiny / limits.eps
    log_sums = product.masked_fill(is_small, 1).log() + max_a + max_b.mT
    if is_transformed(a, b):
        return torch.where(is_small, _logsumexp(a.unsqueeze(-2) + b.unsqueeze(-3)), log_sums)
    if not bool(is_small.any()):
        return log_sums
    *batch, t, u = is_small.nonzero().unbind(1)
    a, b = a.expand(*log_sums.shape[:-1], a.shape[-1]), b.expand(*log_sums.shape[:-2], *b.shape[-2:])
    return log_sums.index_put((*batch, t, u), _logsumexp(a[(*batch, t)] + b[(*batch, u)]))


def _logsumexp(x: Tensor) -> Tensor:
    """Return logsumexp over the last dimension, where a row that is all −∞ gets the gradient 0 instead of NaN."""
    is_empty = (x == -math.inf).all(-1)
    return x.masked_fill(is_empty.unsqueeze(-1), 0).logsumexp(-1).masked_fill(is_empty, -math.inf)


def finite(norm: Tensor) -> Tensor:
    """Return the normalizers with −∞ replaced by 0, so that −∞ − norm is −∞ instead of NaN."""
    return norm.masked_fill(norm == -math.inf, 0)


def _chunks(rows: int, classes: int) -> Iterator[slice]:
    """Yield slices of the rows of a matrix (rows, classes), with about ``_CHUNK`` entries each."""
    step = max(1, _CHUNK // max(classes, 1))
    return (slice(start, start + step) for start in range(0, rows, step))


class _LogSoftmaxAt(torch.autograd.Function):
    """log_softmax of a joint (R, V) at the blank and at the labels (R,), both (R,), computed in chunks."""

    @staticmethod
    def forward(ctx: Any, joint: Tensor, label: Tensor, blank: int) -> tuple[Tensor, Tensor]:
        norm = joint.new_empty(len(joint), dtype=promote_half(joint[:0]).dtype)
        for chunk in _chunks(*joint.shape):
            torch.logsumexp(promote_half(joint[chunk]), -1, out=norm[chunk])
        norm = finite(norm)
        ctx.save_for_backward(joint, label, norm)
        ctx.blank = blank
        at_label = joint.gather(1, label.unsqueeze(1)).squeeze(1)
        return joint[:, blank] - norm, at_label - norm

    @staticmethod
    def backward(ctx: Any, grad_blank: Tensor, grad_label: Tensor) -> tuple[Tensor, None, None]:
        arguments = *ctx.saved_tensors, ctx.blank, grad_blank, grad_label
        gradient = _JointGradient.apply(*arguments) if torch.is_grad_enabled() else _joint_gradient(*arguments)
        return gradient, None, None


def _joint_gradient(
    joint: Tensor, label: Tensor, norm: Tensor, blank: int, grad_blank: Tensor, grad_label: Tensor
) -> Tensor:
    """Return the gradient (R, V) of the joint, from the gradients (R,) of the outputs of :class:`_LogSoftmaxAt`."""
    gradient, total = torch.empty_like(joint), -(grad_blank + grad_label)
    has_nan = not bool(norm.isfinite().all())  # NaN can only be in the padding, whose gradient is 0
    for chunk in _chunks(*joint.shape):
        rows = gradient[chunk] if joint.dtype == norm.dtype else norm.new_empty(joint[chunk].shape)
        torch.sub(joint[chunk], norm[chunk, None], out=rows)
        rows.exp_().mul_(total[chunk, None])
        rows[:, blank] += grad_blank[chunk]
        rows.scatter_add_(1, label[chunk, None], grad_label[chunk, None])
        if has_nan:
            rows.masked_fill_(~norm[chunk, None].isfinite(), 0)
        if rows.dtype != joint.dtype:
            gradient[chunk] = rows
    return gradient


class _JointGradient(torch.autograd.Function):
    """:func:`_joint_gradient` with derivatives, for second derivatives of the log-softmax. They are not chunked."""

    @staticmethod
    def forward(
        ctx: Any, joint: Tensor, label: Tensor, norm: Tensor, blank: int, grad_blank: Tensor, grad_label: Tensor
    ) -> Tensor:
        ctx.save_for_backward(joint, label, norm, grad_blank, grad_label)
        ctx.blank = blank
        return _joint_gradient(joint, label, norm, blank, grad_blank, grad_label)

    @staticmethod
    def backward(ctx: Any, z: Tensor) -> tuple[Tensor | None, ...]:
        joint, label, norm, grad_blank, grad_label = ctx.saved_tensors
        is_empty = (~norm.isfinite() | (promote_half(joint).amax(-1) == -math.inf)).unsqueeze(1)
        softmax = promote_half(joint).masked_fill(is_empty, 0).softmax(-1).masked_fill(is_empty, 0)
        z = z.to(softmax.dtype)
        mean = (softmax * z).sum(-1)
        product = -(grad_blank + grad_label).unsqueeze(1) * softmax * (z - mean.unsqueeze(1))
        z_label = z.gather(1, label.unsqueeze(1)).squeeze(1)
        return product.to(joint.dtype), None, None, None, z[:, ctx.blank] - mean, z_label - mean

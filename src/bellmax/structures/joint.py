"""The log-softmax of a joint (..., V) at two of its classes, without ever writing out the others.

Its memory is a number a row, beside the joint and, for derivatives, its gradient, which is written once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bellmax.tensors import promote_half
from bellmax.transforms import is_transformed

_CHUNK = 1 << 17  # entries at a time: a part of the joint stays in the cache until it is done with


def log_softmax_at(joint: Tensor, label: Tensor, blank: int) -> tuple[Tensor, Tensor]:
    """log_softmax(joint)[..., blank] and [..., label], each (...), for a joint (..., V) and labels (...).

    In float32 for half precision. A row that holds nothing but −∞ stays −∞.
    """
    if is_transformed(joint):
        rows = promote_half(joint)
        norm = finite(rows.logsumexp(-1))
        return rows[..., blank] - norm, rows.gather(-1, label.unsqueeze(-1)).squeeze(-1) - norm
    of_blank, of_label = _At.apply(joint.reshape(-1, joint.shape[-1]), label.reshape(-1), blank)
    return of_blank.reshape(label.shape), of_label.reshape(label.shape)


def log_sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """log Σ_v exp(a[..., t, v] + b[..., u, v]), (..., T, U), for a (..., T, V) and b (..., U, V), by a matrix product.

    Where the product of exponentials has no precision left, since the peaks of a and b are far apart, it is summed in
    log space.
    """
    top_a, top_b = (finite(x.detach().amax(-1, keepdim=True)) for x in (a, b))
    product = (a - top_a).exp() @ (b - top_b).exp().mT
    limits = torch.finfo(product.dtype)
    is_small = product < limits.tiny / limits.eps
    total = product.masked_fill(is_small, 1).log() + top_a + top_b.mT
    if is_transformed(a, b):
        return torch.where(is_small, _log_sum(a.unsqueeze(-2) + b.unsqueeze(-3)), total)
    if not bool(is_small.any()):
        return total
    *batch, t, u = is_small.nonzero().unbind(1)
    whole_a, whole_b = a.expand(*total.shape[:-1], a.shape[-1]), b.expand(*total.shape[:-2], *b.shape[-2:])
    return total.index_put((*batch, t, u), _log_sum(whole_a[(*batch, t)] + whole_b[(*batch, u)]))


def _log_sum(x: Tensor) -> Tensor:
    """logsumexp over the last dimension; a row of nothing but −∞ is −∞, and gets no gradient."""
    lost = (x == -math.inf).all(-1)
    return x.masked_fill(lost.unsqueeze(-1), 0).logsumexp(-1).masked_fill(lost, -math.inf)


def finite(norm: Tensor) -> Tensor:
    """0 instead of −∞, which leaves −∞ − norm as it is."""
    return norm.masked_fill(norm == -math.inf, 0)


def _chunks(rows: int, classes: int) -> Iterator[slice]:
    step = max(1, _CHUNK // max(classes, 1))
    return (slice(start, start + step) for start in range(0, rows, step))


class _At(torch.autograd.Function):
    """(joint (R, V), labels (R), blank) → log_softmax at the blank and at the labels, (R) each."""

    @staticmethod
    def forward(ctx: Any, joint: Tensor, label: Tensor, blank: int) -> tuple[Tensor, Tensor]:
        norm = joint.new_empty(len(joint), dtype=promote_half(joint[:0]).dtype)
        for part in _chunks(*joint.shape):
            torch.logsumexp(promote_half(joint[part]), -1, out=norm[part])
        norm = finite(norm)
        ctx.save_for_backward(joint, label, norm)
        ctx.blank = blank
        of_label = joint.gather(1, label.unsqueeze(1)).squeeze(1)
        return joint[:, blank] - norm, of_label - norm

    @staticmethod
    def backward(ctx: Any, of_blank: Tensor, of_label: Tensor) -> tuple[Tensor, None, None]:
        arguments = *ctx.saved_tensors, ctx.blank, of_blank, of_label
        gradient = _Spread.apply(*arguments) if torch.is_grad_enabled() else _spread(*arguments)
        return gradient, None, None


def _spread(joint: Tensor, label: Tensor, norm: Tensor, blank: int, of_blank: Tensor, of_label: Tensor) -> Tensor:
    """The transpose of the derivative of :class:`_At`: (R, V) from (R) each."""
    gradient, total = torch.empty_like(joint), -(of_blank + of_label)
    has_nan = not bool(norm.isfinite().all())  # in padding, whose gradient is 0
    for part in _chunks(*joint.shape):
        own = gradient[part] if joint.dtype == norm.dtype else norm.new_empty(joint[part].shape)
        torch.sub(joint[part], norm[part, None], out=own)
        own.exp_().mul_(total[part, None])
        own[:, blank] += of_blank[part]
        own.scatter_add_(1, label[part, None], of_label[part, None])
        if has_nan:
            own.masked_fill_(~norm[part, None].isfinite(), 0)
        if own.dtype != joint.dtype:
            gradient[part] = own
    return gradient


class _Spread(torch.autograd.Function):
    """:func:`_spread`, whose own derivatives are plain torch."""

    @staticmethod
    def forward(
        ctx: Any, joint: Tensor, label: Tensor, norm: Tensor, blank: int, of_blank: Tensor, of_label: Tensor
    ) -> Tensor:
        ctx.save_for_backward(joint, label, norm, of_blank, of_label)
        ctx.blank = blank
        return _spread(joint, label, norm, blank, of_blank, of_label)

    @staticmethod
    def backward(ctx: Any, z: Tensor) -> tuple[Tensor | None, ...]:
        joint, label, norm, of_blank, of_label = ctx.saved_tensors
        lost = (~norm.isfinite() | (promote_half(joint).amax(-1) == -math.inf)).unsqueeze(1)
        softmax = promote_half(joint).masked_fill(lost, 0).softmax(-1).masked_fill(lost, 0)
        z = z.to(softmax.dtype)
        mean = (softmax * z).sum(-1)
        along = -(of_blank + of_label).unsqueeze(1) * softmax * (z - mean.unsqueeze(1))
        at_label = z.gather(1, label.unsqueeze(1)).squeeze(1)
        return along.to(joint.dtype), None, None, None, z[:, ctx.blank] - mean, at_label - mean

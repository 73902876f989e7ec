"""Costs of matching the elements of two series, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bellmax.autograd.lean import LeanFunction
from bellmax.modes import is_transformed, needs_grad

Cost: TypeAlias = "str | Callable[[Tensor, Tensor], Tensor]"

_FEW = 16  # features up to which one pass over the matrix for each feature is faster than torch.cdist
_CACHED = 2**17  # cells of a temporary that stays in the cache
_CLOSE = 0.02  # fraction of ‖x‖² + ‖y‖² below which a squared distance loses digits if computed by products
_MANY = 0.1  # fraction of close cells above which differences are faster than products


def _accumulate(x: Tensor, y: Tensor, power: int) -> Tensor:
    """Σ_d |x_id − y_jd|^power for power 1 or 2, (..., N, M). Equal points have cost exactly 0."""
    if x.shape[-1] > _FEW:
        if power == 2 and x.is_cpu and (squares := _squares_by_products(x, y)) is not None:
            return squares
        distances = torch.cdist(x, y, float(power), compute_mode="donot_use_mm_for_euclid_dist")
        return distances.square_() if power == 2 else distances
    rows, columns = x.mT.contiguous().unsqueeze(-1).unbind(-3), y.mT.contiguous().unsqueeze(-2).unbind(-3)
    total = rows[0] - columns[0]
    total = total.square_() if power == 2 else total.abs_()
    step = max(1, _CACHED * x.shape[-2] // max(1, total.numel()))
    for start in range(0, x.shape[-2] if len(rows) > 1 else 0, step):
        rows_in_cache = total[..., start : start + step, :]
        for row, column in zip(rows[1:], columns[1:], strict=True):
            difference = row[..., start : start + step, :] - column
            if power == 2:
                rows_in_cache.addcmul_(difference, difference)
            else:
                rows_in_cache.add_(difference.abs_())
    return total


def _squares_by_products(x: Tensor, y: Tensor) -> Tensor | None:
    """‖x_i‖² + ‖y_j‖² − 2⟨x_i, y_j⟩, with differences for close points; None if many points are close or infinite."""
    centre = x.mean(-2, keepdim=True)
    a, b = x - centre, y - centre
    norm_a, norm_b = (points.square().sum(-1, keepdim=True) for points in (a, b))
    left = torch.cat((a, norm_a, torch.ones_like(norm_a)), -1)
    right = torch.cat((-2 * b, torch.ones_like(norm_b), norm_b), -1)
    total = left @ right.mT
    close = (total > _CLOSE * (norm_a + norm_b.amax(-2, keepdim=True))).logical_not_()
    if close.sum() > _MANY * close.numel():
        return None
    *batch, i, j = close.nonzero(as_tuple=True)
    shape = total.shape[:-2]
    rows, columns = x.expand(*shape, *x.shape[-2:]), y.expand(*shape, *y.shape[-2:])
    total[close] = (rows[(*batch, i)] - columns[(*batch, j)]).square().sum(-1)
    return total


def _sqeuclidean_gradients(x: Tensor, y: Tensor, grad: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
    """Gradients of ⟨grad, ‖x_i − y_j‖²⟩ in x and y, without the matrix of differences."""
    centre = x.detach().mean(-2, keepdim=True)  # a common offset does not change distances, but would cost digits
    a, b = x - centre, y - centre
    grad_x = 2 * (grad.sum(-1).unsqueeze(-1) * a - _product(grad, b)) if needed[0] else None
    grad_y = 2 * (grad.sum(-2).unsqueeze(-1) * b - _product(grad.mT, a)) if needed[1] else None
    return [grad_x, grad_y]


def _product(matrix: Tensor, points: Tensor) -> Tensor:
    """Return matrix @ points, for points (..., M, D). Few features go first: up to 20 times faster in the BLAS."""
    if points.shape[-1] >= _FEW:
        return matrix @ points
    return (points.mT.contiguous() @ matrix.mT).mT


def _cityblock_gradients(x: Tensor, y: Tensor, grad: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
    """Gradients of ⟨grad, ‖x_i − y_j‖₁⟩ in x and y, one feature at a time."""
    grads_x, grads_y = [], []
    for row, column in zip(x.unbind(-1), y.unbind(-1), strict=True):
        signed = grad * (row.unsqueeze(-1) - column.unsqueeze(-2)).sign()
        grads_x.append(signed.sum(-1))
        grads_y.append(-signed.sum(-2))
    return [torch.stack(grads_x, -1), torch.stack(grads_y, -1)]


_GRADIENTS = {1: _cityblock_gradients, 2: _sqeuclidean_gradients}


def power_costs(x: Tensor, y: Tensor, power: int) -> Tensor:
    """Σ_d |x_id − y_jd|^power, (..., N, M), without an autograd graph."""
    with torch.no_grad():
        return _accumulate(x, y, power)


def power_gradients(
    x: Tensor, y: Tensor, grad: Tensor, power: int, needed: Sequence[bool] = (True, True)
) -> list[Tensor | None]:
    """Gradients of ⟨grad, power_costs(x, y)⟩ in x and y; differentiable."""
    gradients = zip(_GRADIENTS[power](x, y, grad, needed), (x, y), strict=True)
    return [None if g is None else g if g.shape == s.shape else g.sum_to_size(s.shape) for g, s in gradients]


class _PowerCosts(LeanFunction):
    """(x, y, power) → Σ_d |x_id − y_jd|^power. Saves only the points for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, power: int) -> Tensor:
        ctx.power = power
        ctx.save_for_backward(x, y)
        return _accumulate(x, y, power)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        return *power_gradients(x, y, grad, ctx.power, ctx.needs_input_grad[:2]), None


def _differentiable_power_costs(x: Tensor, y: Tensor, power: int) -> Tensor:
    """Σ_d |x_id − y_jd|^power, (..., N, M), differentiable in every mode."""
    if is_transformed(x, y):
        differences = x.unsqueeze(-2) - y.unsqueeze(-3)
        return (differences.square() if power == 2 else differences.abs()).sum(-1)
    if not needs_grad(x, y):
        return _accumulate(x, y, power)
    costs: Tensor = _PowerCosts.apply(x, y, power)
    return costs


def _sqeuclidean(x: Tensor, y: Tensor) -> Tensor:
    return _differentiable_power_costs(x, y, 2)


def _cityblock(x: Tensor, y: Tensor) -> Tensor:
    return _differentiable_power_costs(x, y, 1)


def _euclidean(x: Tensor, y: Tensor) -> Tensor:
    """Return distances ‖x_i − y_j‖, with gradient 0 where two points coincide."""
    if x.shape[-1] == 1:
        return _cityblock(x, y)
    squared = _sqeuclidean(x, y)
    equal = squared == 0
    return squared.masked_fill(equal, 1).sqrt().masked_fill(equal, 0)


def _cosine(x: Tensor, y: Tensor) -> Tensor:
    return _sqeuclidean(_normalised(x), _normalised(y)) / 2


def _normalised(x: Tensor) -> Tensor:
    """x/‖x‖ along the last dimension, and 0 where x is 0."""
    zero = (x == 0).all(-1, keepdim=True)
    direction = x.masked_fill(zero, 1)
    unit: Tensor = direction / torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
    return unit.masked_fill(zero, 0)


def _log_sqeuclidean(x: Tensor, y: Tensor) -> Tensor:
    half = _sqeuclidean(x, y) / 2
    return half + torch.log1p(-torch.expm1(-half))


COSTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sqeuclidean": _sqeuclidean,
    "euclidean": _euclidean,
    "cosine": _cosine,
    "cityblock": _cityblock,
    "log_sqeuclidean": _log_sqeuclidean,
}


def as_power(cost: Cost, features: int) -> int | None:
    """The power p, 1 or 2, if the cost is Σ |x − y|^p; None for any other cost."""
    if cost == "sqeuclidean":
        return 2
    return 1 if cost == "cityblock" or (cost == "euclidean" and features == 1) else None


def pairwise(x: Tensor, y: Tensor, cost: Cost) -> Tensor:
    """The costs (..., N, M) of matching each row of x (..., N, D) with each row of y (..., M, D).

    A cost depends on its two rows only, so that some rows of x and y give a submatrix of the costs.
    """
    if not callable(cost):
        return COSTS[cost](x, y)
    costs = cost(x, y)
    needed = (*broadcast(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-2])
    if not isinstance(costs, Tensor) or costs.shape != needed:
        got = f"shape {tuple(costs.shape)}" if isinstance(costs, Tensor) else type(costs).__name__
        raise ValueError(
            f"cost must return a tensor of shape {needed} for x of shape {tuple(x.shape)} and y of shape "
            f"{tuple(y.shape)}, got {got}"
        )
    return costs


def broadcast(*shapes: torch.Size) -> torch.Size:
    """The same as torch.broadcast_shapes, which takes longer than a small sweep, but faster for equal shapes."""
    longest = max(shapes, key=len)
    return longest if all(shape in (longest, ()) for shape in shapes) else torch.broadcast_shapes(*shapes)

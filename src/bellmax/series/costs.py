"""Costs of matching two elements of series."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function

from bellmax.transforms import is_transformed, needs_grad

Cost: TypeAlias = "str | Callable[[Tensor, Tensor], Tensor]"

_FEW = 16  # features up to which a pass over the matrix for each of them is faster than torch.cdist
_BLOCK = 2**17  # cells of a temporary that stays in the cache


def _accumulate(x: Tensor, y: Tensor, power: int) -> Tensor:
    """Σ_d |x_id − y_jd|^power for power 1 or 2, (..., N, M): differences, so that equal points are at exactly 0."""
    if x.shape[-1] > _FEW:
        distances = torch.cdist(x, y, float(power), compute_mode="donot_use_mm_for_euclid_dist")
        return distances.square_() if power == 2 else distances
    rows, columns = x.mT.contiguous().unsqueeze(-1).unbind(-3), y.mT.contiguous().unsqueeze(-2).unbind(-3)
    total = rows[0] - columns[0]
    total = total.square_() if power == 2 else total.abs_()
    step = max(1, _BLOCK * x.shape[-2] // max(1, total.numel()))
    for start in range(0, x.shape[-2] if len(rows) > 1 else 0, step):
        block = total[..., start : start + step, :]
        for row, column in zip(rows[1:], columns[1:], strict=True):
            difference = row[..., start : start + step, :] - column
            if power == 2:
                block.addcmul_(difference, difference)
            else:
                block.add_(difference.abs_())
    return total


class _SquaredEuclidean(Function):
    """‖x_i − y_j‖², which keeps the points alone for its gradient."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return _accumulate(x, y, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, y = ctx.saved_tensors
        centre = x.detach().mean(-2, keepdim=True)  # an offset, which no distance sees, would cost digits here
        a, b = x - centre, y - centre
        of_x = of_y = None
        if ctx.needs_input_grad[0]:
            of_x = 2 * (grad.sum(-1).unsqueeze(-1) * a - grad @ b).sum_to_size(x.shape)
        if ctx.needs_input_grad[1]:
            of_y = 2 * (grad.sum(-2).unsqueeze(-1) * b - grad.mT @ a).sum_to_size(y.shape)
        return of_x, of_y


class _Cityblock(Function):
    """‖x_i − y_j‖₁, which keeps the points alone for its gradient."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return _accumulate(x, y, 1)

    setup_context = staticmethod(_SquaredEuclidean.setup_context)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        of_x, of_y = [], []
        for row, column in zip(x.unbind(-1), y.unbind(-1), strict=True):
            signed = grad * (row.unsqueeze(-1) - column.unsqueeze(-2)).sign()
            of_x.append(signed.sum(-1))
            of_y.append(-signed.sum(-2))
        return torch.stack(of_x, -1).sum_to_size(x.shape), torch.stack(of_y, -1).sum_to_size(y.shape)


def _sqeuclidean(x: Tensor, y: Tensor) -> Tensor:
    if is_transformed():
        return (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)
    if not needs_grad(x, y):
        return _accumulate(x, y, 2)
    squared: Tensor = _SquaredEuclidean.apply(x, y)
    return squared


def _cityblock(x: Tensor, y: Tensor) -> Tensor:
    if is_transformed():
        return (x.unsqueeze(-2) - y.unsqueeze(-3)).abs().sum(-1)
    if not needs_grad(x, y):
        return _accumulate(x, y, 1)
    distances: Tensor = _Cityblock.apply(x, y)
    return distances


def _euclidean(x: Tensor, y: Tensor) -> Tensor:
    if x.shape[-1] == 1:
        return _cityblock(x, y)
    squared = _sqeuclidean(x, y)
    equal = squared == 0
    return squared.masked_fill(equal, 1).sqrt().masked_fill(equal, 0)


def _cosine(x: Tensor, y: Tensor) -> Tensor:
    return _sqeuclidean(_normalised(x), _normalised(y)) / 2


def _normalised(x: Tensor) -> Tensor:
    """x/‖x‖, and 0 for 0, along the last dimension."""
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
    """The power p of a cost Σ |x − y|^p, 1 or 2; None for any other."""
    if cost == "sqeuclidean":
        return 2
    return 1 if cost == "cityblock" or (cost == "euclidean" and features == 1) else None


def pairwise(x: Tensor, y: Tensor, cost: Cost) -> Tensor:
    """The costs (..., N, M) of matching each row of x (..., N, D) with each row of y (..., M, D).

    Rows do not know of each other: some rows of x and of y give a block of the matrix.
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
    """torch.broadcast_shapes, which takes longer than a small sweep, where there is something to do."""
    longest = max(shapes, key=len)
    return longest if all(shape in (longest, ()) for shape in shapes) else torch.broadcast_shapes(*shapes)

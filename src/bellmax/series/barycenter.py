"""The barycenter of a collection of series under DTW."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median_low

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from bellmax.inputs import Numbers, answers_near_misses, as_series, as_tensor
from bellmax.regularizers import Regularizer, resolve
from bellmax.series.collections import Collection, check_collections, single_gamma
from bellmax.series.costs import Cost
from bellmax.series.measure import measure_of
from bellmax.series.routes import Batch, values
from bellmax.series.runs import CELLS, runs_of
from bellmax.tensors import Gamma


@answers_near_misses
def dtw_barycenter(
    xs: Collection,
    weights: Numbers | None = None,
    *,
    init: Numbers | None = None,
    length: int | None = None,
    cost: Cost = "sqeuclidean",
    band: float | None = None,
    omega: str | Regularizer = "negentropy",
    gamma: Gamma | None = None,
    divergence: str | None = None,
    max_iter: int = 100,
    tol: float = 1e-6,
) -> Tensor:
    """Return the barycenter of a collection of series: the series z that minimizes Σ_k w_k dtw(z, x_k), the weighted
    sum of its DTW to each series x_k.

    The optimizer is L-BFGS. The sum is not convex in z, so the result depends on the initial z. With ``omega="hard"``,
    the sum has kinks, at which the optimizer may stop too early. To get a better result, call the function with several
    values of ``init``, for example some of the series, and keep the z with the lowest sum.

    Args:
        xs: K series, as in :func:`dtw_cdist`.
        weights: The weights w (K,), at least 0, by default all equal. If you multiply all weights by the same number,
            the result does not change.
        init: The initial z, (L, D) or (L,). By default, each series is stretched linearly to ``length``, and z is the
            weighted mean of the stretched series.
        length: The length L of z. By default, the length of ``init``, or the median length of the series.
        cost: The cost of matching two elements, as in :func:`dtw`. Default "sqeuclidean".
        band: The half-width of a Sakoe–Chiba band in steps, as in :class:`DTW`. Default None, no band.
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`Regularizer`.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.
        divergence: A divergence, as in :func:`dtw`. With None (the default), z is flatter than the series, unless
            ``omega`` is "hard". The cause is the bias of soft-DTW, which a divergence removes.
        max_iter: The maximum number of iterations, default 100.
        tol: The tolerance, default 1e-6. The optimizer stops if no entry of the gradient has a larger absolute value.

    Returns:
        The barycenter z, (L, D), without gradient.

    >>> import bellmax as bx
    >>> xs = [torch.tensor([0.0, 0.0, 1.0, 0.0]), torch.tensor([0.0, 3.0, 0.0, 0.0])]
    >>> bx.dtw_barycenter(xs, gamma=0.1).squeeze(-1).round().long()  # one bump, not two
    tensor([0, 2, 0, 0])
    """
    measure = single_gamma(measure_of(cost, band, resolve(omega, gamma), divergence))
    with torch.inference_mode(False), torch.no_grad():
        (series,) = check_collections(xs=xs)
        if not series:
            raise ValueError("xs must hold at least one series, got none")
        measure = measure.with_number_gamma(series[0])
        shares = _check_weights(weights, series[0].new_ones(len(series)))
        start = _start(series, shares, init, length)
        runs = runs_of(series, CELLS)
        z = start.clone().requires_grad_()
        best, least = start, math.inf

        def terms() -> Iterator[Tensor]:
            """The terms of the objective, one at a time: the graph of each is freed before the next."""
            for run in runs:
                yield shares[run.positions] @ values(measure, Batch(z, run.series, None, run.lengths))
            if divergence is not None:
                yield values(measure, Batch(z, z)) / -2

        def closure() -> float:
            """Compute the objective and its gradient, and remember the best z."""
            nonlocal best, least
            z.grad = torch.zeros_like(z)
            objective = 0.0
            with torch.enable_grad():
                for term in terms():
                    z.grad += torch.autograd.grad(term, z)[0]
                    objective += term.item()
            if objective < least:
                best, least = z.detach().clone(), objective
            return objective

        search = torch.optim.LBFGS(
            [z], max_iter=max_iter, tolerance_grad=tol, tolerance_change=tol**2, line_search_fn="strong_wolfe"
        )
        search.step(closure)
    return best


def _check_weights(weights: Numbers | None, ones: Tensor) -> Tensor:
    """Convert the weights (K,) to weights of sum 1; ``ones`` has their dtype and device."""
    if weights is None:
        return ones / len(ones)
    numbers = as_tensor("weights", weights).detach().to(ones)
    if numbers.shape != ones.shape:
        shape = tuple(numbers.shape)
        raise ValueError(f"weights must hold one number for each of {len(ones)} series, got shape {shape}")
    if not bool((numbers >= 0).all()) or not 0 < float(numbers.sum()) < math.inf:
        raise ValueError(f"weights must be at least 0 and not all 0, got {numbers.tolist()}")
    return numbers / numbers.sum()


def _start(series: list[Tensor], shares: Tensor, init: Numbers | None, length: int | None) -> Tensor:
    """The first z, (L, D)."""
    features = series[0].shape[1]
    if init is not None:
        first = as_series("init", init)
        if first.ndim != 2 or first.shape[1] != features or length not in (None, len(first)):
            needed = f"({'length' if length is None else length}, {features})"
            raise ValueError(f"init must have shape {needed}, got {tuple(first.shape)}")
        return first.detach().to(series[0])
    if length is None:
        length = median_low(len(s) for s in series)
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    stretched = [interpolate(s.mT.unsqueeze(0), size=length, mode="linear", align_corners=True) for s in series]
    return (torch.cat(stretched).mT * shares[:, None, None]).sum(0)

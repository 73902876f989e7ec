"""DTW of long pairs of series, whose cost matrix never exists as a whole."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bellmax.autograd import Shortcut
from bellmax.backends.fused import LongPair, LongPairTape
from bellmax.modes import needs_grad
from bellmax.programs.checks import check_lengths
from bellmax.series.costs import broadcast, pairwise
from bellmax.series.measure import Measure
from bellmax.structures.dtw import DTW
from bellmax.tensors import Gamma, Tensors, divide_by_gamma, multiply_by_gamma, read_gamma


def has_long_pairs_kernel(measure: Measure, x: Tensor, y: Tensor) -> bool:
    """True if the backend has a kernel for pairs of series (..., N, D) and (..., M, D): for their dtype and Ω."""
    kernel, omega = measure.fused_kernels(x.device).long_pairs, measure.omega.kernel
    if kernel is None or omega is None:
        return False
    first_x, first_y = (series[(0,) * (series.ndim - 2)] for series in (x, y))
    return kernel.supports(LongPair(first_x, first_y, pairwise, (), math.inf, False, omega))


def long_pair_values(
    measure: Measure, x: Tensor, y: Tensor, lengths_x: Tensor | None, lengths_y: Tensor | None
) -> Tensor:
    """DTW_Ω of each pair of series (..., N, D) and (..., M, D), pair by pair."""
    sides = ((x, lengths_x), (y, lengths_y))
    length_shapes = [lengths.shape for _, lengths in sides if lengths is not None]
    batch = broadcast(x.shape[:-2], y.shape[:-2], measure.gamma_shape, *length_shapes)
    xs, ys = (_members(f"lengths[{n}]", series, lengths, batch) for n, (series, lengths) in enumerate(sides))
    gamma = measure.omega.gamma
    gammas: Sequence[Gamma] = (
        gamma.expand(batch).reshape(-1).unbind() if isinstance(gamma, Tensor) else [gamma] * len(xs)
    )
    values = [long_pair_value(measure, a, b, c) for a, b, c in zip(xs, ys, gammas, strict=True)]
    return torch.stack(values).reshape(batch)


def _members(name: str, series: Tensor, lengths: Tensor | None, batch: torch.Size) -> list[Tensor]:
    """The series (N_b, D) of each member of a batch, cut to its length."""
    members = series.expand(*batch, *series.shape[-2:]).reshape(-1, *series.shape[-2:]).unbind()
    if lengths is None:
        return list(members)
    flat = lengths.expand(batch).reshape(-1)
    check_lengths(name, flat, 1, series.shape[-2])
    return [member[:length] for member, length in zip(members, flat.tolist(), strict=True)]


def long_pair_value(measure: Measure, x: Tensor, y: Tensor, gamma: Gamma) -> Tensor:
    """DTW_Ω, a number, of x (N, D) and y (M, D).

    The graph saves the series and one row of values for each chunk of rows. The first derivative computes the chunks
    again, one at a time; the second derivative needs the whole cost matrix.
    """
    fused, omega = measure.fused_kernels(x.device).long_pairs, measure.omega.kernel
    assert fused is not None
    assert omega is not None
    learns_gamma = isinstance(gamma, Tensor) and needs_grad(gamma)
    gamma = gamma if learns_gamma else read_gamma(gamma)
    inputs = (x, y, gamma) if isinstance(gamma, Tensor) else (x, y)
    number = 1.0 if isinstance(gamma, Tensor) else gamma
    band = math.inf if measure.band is None else float(measure.band)
    unit = measure.with_gamma(1.0)  # autograd saves γ as an input: the functions below must not hold it

    def costs(x: Tensor, y: Tensor, gamma: Gamma = number) -> Tensor:
        return divide_by_gamma(pairwise(x, y, unit.cost), gamma)

    def problem(inputs: Tensors, saves: bool) -> LongPair:
        x, y, *parameters = inputs
        return LongPair(x, y, costs, parameters, band, saves, omega)

    saves = needs_grad(*inputs)
    with torch.no_grad():
        result = fused.run(problem(inputs, saves))
    assert result is not None
    value, (halo_rows, uses_products) = result

    def vjp(inputs: Tensors, halo_rows: Tensors, grad: Tensor) -> Tensors:
        with unit.on_its_backend():
            return fused.vjp(problem(inputs, saves), LongPairTape(halo_rows, uses_products), grad)

    def general(inputs: Tensors, halo_rows: Tensors) -> Tensor:
        with unit.on_its_backend():
            return DTW(costs(*inputs), band=unit.band, omega=unit.omega).value

    return multiply_by_gamma(Shortcut(vjp, general).attach(value, inputs, halo_rows), gamma)

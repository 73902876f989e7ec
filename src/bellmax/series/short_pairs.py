"""DTW of many pairs of short series, without cost matrices."""

from __future__ import annotations

from torch import Tensor

from bellmax.backends.fused import ShortPairs
from bellmax.series.costs import as_power
from bellmax.series.measure import Measure
from bellmax.series.runs import Selection
from bellmax.tensors import multiply_by_gamma, read_gamma


def has_short_pairs_kernel(measure: Measure, selection: Selection) -> bool:
    """True if the backend has a kernel for these pairs: for their dtype, the cost and Ω."""
    kernel, problem = measure.fused_kernels(selection.i.device).short_pairs, _problem(measure, selection)
    return kernel is not None and problem is not None and kernel.supports(problem)


def short_pair_values(measure: Measure, selection: Selection) -> Tensor:
    """DTW_Ω (P,) of pairs of finite series, without a gradient."""
    kernel, problem = measure.fused_kernels(selection.i.device).short_pairs, _problem(measure, selection)
    assert kernel is not None
    assert problem is not None
    unit_values = kernel.run(problem)
    assert unit_values is not None
    return multiply_by_gamma(unit_values, read_gamma(measure.omega.gamma))


def _problem(measure: Measure, selection: Selection) -> ShortPairs | None:
    """The problem for the kernel; None if the cost is not a power of the distance, or Ω is written in Python."""
    row, column, i, j = selection
    power, omega = as_power(measure.cost, row.series.shape[-1]), measure.omega.kernel
    if power is None or omega is None:
        return None
    scale = 1 / read_gamma(measure.omega.gamma)
    return ShortPairs(row.series, column.series, (row.lengths, column.lengths), (i, j), power, scale, omega)

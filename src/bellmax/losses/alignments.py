"""The alignment area loss (section 5.3 of the paper), and the mean absolute deviation of two alignments."""

from __future__ import annotations

import torch
from torch import Tensor

from bellmax.distribution import PathDistribution
from bellmax.losses.reductions import check_reduction, reduce
from bellmax.modes import is_readable
from bellmax.names import answers_near_misses
from bellmax.programs.checks import of_sequence
from bellmax.tensors import promote_half


@answers_near_misses
def alignment_area(p: PathDistribution, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """Return the area between the expected alignment of a :class:`DTW` and a target alignment.

    Let Y be the expected alignment and Y_true the target, as matrices (N, M). Let A and A_true be the cumulative sums
    of Y and Y_true along each row. The loss is the sum of the squared entries of A − A_true. The loss is convex in Y.
    If both alignments have exactly one cell in each row, the loss is the number of cells between them, which is N times
    their :func:`mean_absolute_deviation`. The loss is from section 5.3 of Mensch and Blondel (2018).

    Args:
        p: The :class:`DTW` distribution.
        target: The target alignment: an event (..., N, M), or index pairs (..., L, 2) int64 padded with −1.
        reduction: The reduction over the batch: "none", "mean" (the default) or "sum".

    >>> import bellmax as bx
    >>> p = bx.DTW(torch.tensor([[0.0, 9.0], [0.0, 9.0], [9.0, 0.0]]), omega="hard")
    >>> alignment_area(p, torch.tensor([[0, 0], [1, 1], [2, 1]]))
    tensor(1.)
    """
    check_reduction(p, reduction)
    targets = p._targets
    if not targets.is_alignment:
        raise ValueError(f"p must be a DTW, got {type(p).__name__}")
    targets, allowed = targets.read("target", target)
    difference = (promote_half(p.expected_path) - targets.check_one_path("target", allowed)).cumsum(-1)
    # In the columns past the length, the sum of each row would be counted again.
    within = targets.is_used(difference.ndim).any(-2, keepdim=True)
    return reduce(targets, difference.masked_fill(~within, 0).square().flatten(-2).sum(-1), reduction)


@answers_near_misses
def mean_absolute_deviation(a: Tensor, b: Tensor) -> Tensor:
    """Return the distance between the columns of two alignments, averaged over the rows, a tensor of the batch shape.

    In each row, each alignment has a mean column index: the mean of the columns, weighted by the entries of the
    alignment. The distance in this row is the absolute difference of the two mean indices. If each row of both
    alignments has exactly one cell, the result is :func:`alignment_area` divided by the number of rows. If a row has
    several cells, this relation need not hold.

    Args:
        a: The first alignment: a matrix (..., N, M) of 0 and 1, an expected alignment (..., N, M), or index pairs (...,
            L, 2) int64 padded with −1.
        b: The second alignment, in any of these forms. Rows in which neither alignment has a cell do not count.

    >>> mean_absolute_deviation(torch.tensor([[0, 0], [1, 0], [2, 1]]), torch.tensor([[0, 0], [1, 1], [2, 1]]))
    tensor(0.3333)
    """
    rows = max(_num_rows("a", a), _num_rows("b", b))
    (column_a, has_a), (column_b, has_b) = _columns(a, rows), _columns(b, rows)
    if column_a.shape != column_b.shape:
        raise ValueError(
            f"a and b must have the same batch shape, got {tuple(column_a.shape[:-1])} and {tuple(column_b.shape[:-1])}"
        )
    if is_readable(has_a) and is_readable(has_b) and bool((has_a != has_b).any()):
        *batch, row = (has_a != has_b).nonzero()[0].tolist()
        lacking = "b" if bool(has_a[(*batch, row)]) else "a"
        raise ValueError(
            f"a and b must have cells in the same rows, but {lacking} has none in row {row}{of_sequence(batch)}"
        )
    return (column_a - column_b).abs().sum(-1) / has_a.sum(-1).clamp(min=1)


def _num_rows(name: str, alignment: Tensor) -> int:
    """Return the number of rows of an alignment. Raises ``ValueError`` if it has neither of the two forms."""
    if alignment.ndim < 2:
        needed = "(..., N, M), or (..., L, 2) int64"
        raise ValueError(f"{name} must have shape {needed}, got {tuple(alignment.shape)}")
    if not (alignment.is_floating_point() or alignment.dtype in (torch.bool, torch.int64)):
        needed = "floating point or bool for paths, int64 for index pairs"
        raise ValueError(f"{name} must be {needed}, got dtype {alignment.dtype}")
    if alignment.dtype == torch.int64 and alignment.shape[-1] == 2:
        return int(alignment[..., 0].max()) + 1 if alignment.numel() else 0
    return alignment.shape[-2]


def _columns(alignment: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the mean column of each row, (..., rows), and (..., rows), True if the row has a cell."""
    if alignment.dtype == torch.int64 and alignment.shape[-1] == 2:
        i, j = alignment.unbind(-1)
        at = torch.where(i < 0, rows, i)
        zeros = torch.zeros((*i.shape[:-1], rows + 1), dtype=torch.get_default_dtype(), device=i.device)
        weight = zeros.scatter_add(-1, at, torch.ones_like(j, dtype=zeros.dtype))[..., :-1]
        total = zeros.scatter_add(-1, at, j.to(zeros.dtype))[..., :-1]
    else:
        cells = promote_half(alignment if alignment.is_floating_point() else alignment.to(torch.get_default_dtype()))
        cells = torch.nn.functional.pad(cells, (0, 0, 0, rows - cells.shape[-2]))
        weight = cells.sum(-1)
        total = (cells * torch.arange(cells.shape[-1], dtype=cells.dtype, device=cells.device)).sum(-1)
    has_cell = weight > 0
    return total / weight.masked_fill(~has_cell, 1), has_cell

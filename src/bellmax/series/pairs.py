"""DTW of two series, or of a batch of pairs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bellmax.inputs import (
    Lengths,
    Numbers,
    answers_near_misses,
    as_floating,
    as_lengths,
    as_pair,
    as_series,
    check_choice,
)
from bellmax.regularizers import Regularizer, resolve
from bellmax.series.costs import Cost, broadcast
from bellmax.series.measure import Moves, measure_of
from bellmax.series.routes import Batch, values
from bellmax.structures.dtw import StepWeights
from bellmax.tensors import Gamma, promote_half

_NORMALIZATIONS = ("path", "length")
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda v: v, "mean": Tensor.mean, "sum": Tensor.sum}


@answers_near_misses
def dtw(
    x: Numbers,
    y: Numbers,
    *,
    cost: Cost = "sqeuclidean",
    lengths: tuple[Lengths, Lengths] | None = None,
    band: float | None = None,
    step_weights: StepWeights | None = None,
    step_penalties: StepWeights | None = None,
    open_begin: bool = False,
    open_end: bool = False,
    omega: str | Regularizer = "negentropy",
    gamma: Gamma | None = None,
    divergence: str | None = None,
    normalize: str | None = None,
    reduction: str = "none",
) -> Tensor:
    """Return the soft-DTW of series x and y (smoothed dynamic time warping), or a divergence based on it.

    The result is differentiable in both series, to any order. For classical DTW, pass ``omega="hard"``. The result is a
    sum of costs, without a square root. By default, the costs are squared distances.

    The value DTW_Ω(x, y) is biased: its minimum is not at x = y, and it can be negative. A divergence removes this
    bias. It is f(x, y) − f(x, x)/2 − f(y, y)/2, which is exactly 0 at x = y. Its name determines f:

    - "debiased": f is the value DTW_Ω;
    - "sharp": f is the cost ⟨E, C⟩ of the expected alignment E = ∇DTW_Ω(C), without the term of Ω;
    - "mean_cost": f is the mean cost of all alignments, the limit of "sharp" under negentropy as γ → ∞.

    The divergence "debiased" is never negative under negentropy with γ = 1, the cost "log_sqeuclidean" and no band
    (Blondel, Mensch, Vert, 2021). To use another γ with this guarantee, divide the series by √γ and multiply the result
    by γ. There is no proof for other costs. Under a sparse Ω, the divergence can be negative, as in the last example.

    Args:
        x: The first series (..., N, D), or (N,) for one series of numbers: a tensor, an array, a list or a pandas row.
            A matrix is one series (N, D). For a batch of univariate series (B, N), pass ``x.unsqueeze(-1)``. Integers
            are converted to the floating point type of the other series.
        y: The second series (..., M, D) or (M,), in the same formats as x. Batch dimensions broadcast.
        cost: The cost of matching two elements: "sqeuclidean" (the default) ‖x − y‖²; "euclidean" ‖x − y‖; "cityblock"
            ‖x − y‖₁; "cosine" 1 − cos(x, y), that is ½‖x/‖x‖ − y/‖y‖‖², where 0/‖0‖ is 0; "log_sqeuclidean"
            δ + log(2 − e^−δ) with δ = ½‖x − y‖²; or a function of (..., N, D) and (..., M, D) that returns (..., N, M).
            If a cost has a kink at equal points, its gradient there is 0.
        lengths: A pair (lengths of x, lengths of y), each integers that broadcast with the batch or one number, from 1
            to N and from 1 to M. By default N and M. Later elements are padding: they may contain NaN and get no
            gradient.
        band: The half-width of a Sakoe–Chiba band in steps, as in :class:`DTW`. Default None, no band. The band applies
            to every term of a divergence.
        step_weights: Factors that multiply the cost of diagonal moves, moves along x and moves along y, as in
            :class:`DTW`. Default 1.
        step_penalties: Penalties that are added to the cost of diagonal moves, moves along x and moves along y, as in
            :class:`DTW`. Default 0.
        open_begin: If True, x may be matched with a section of y that begins anywhere. Default False.
        open_end: If True, x may be matched with a section of y that ends anywhere. Default False.
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`Regularizer`.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string. A tensor broadcasts with the batch.
        divergence: None (the default) for the value, or "debiased", "sharp" or "mean_cost".
        normalize: None (the default) for the sum along the alignment, which grows with the lengths; "path" to divide
            the result by the expected number of matches; "length" to divide it by N + M, the sum of both lengths.
        reduction: The reduction over the batch: "none" (the default), "mean" or "sum".

    Returns:
        A tensor of the batch shape, or a scalar tensor if ``reduction`` is "mean" or "sum". It has the widest dtype of
        the arguments, at least float32.

    >>> import bellmax as bx
    >>> bx.dtw([0, 1, 2], [0, 2, 2], omega="hard")
    tensor(1.)
    >>> x = torch.tensor([[1.495], [0.787], [0.23], [-0.123], [1.089]])
    >>> y = torch.tensor([[1.513], [0.835], [0.246], [-0.106], [1.102]])
    >>> bx.dtw(x, y), bx.dtw(x, x), bx.dtw(x, x, divergence="debiased")
    (tensor(-3.7042), tensor(-3.7066), tensor(0.))
    >>> bx.dtw(x, y, divergence="debiased", cost="log_sqeuclidean")
    tensor(0.0021)
    >>> bx.dtw(x, y, divergence="debiased", omega="sparsemax")
    tensor(-0.0006)
    """
    moves = Moves(step_weights, step_penalties, open_begin, open_end)
    measure = measure_of(cost, band, resolve(omega, gamma), divergence, moves)
    check_options(normalize, reduction)
    x, y, lengths_x, lengths_y = check_pair(x, y, lengths, measure.gamma_shape)
    measure = measure.with_number_gamma(x)
    value = values(measure, Batch(x, y, lengths_x, lengths_y))
    if divergence is not None:
        value = value - values(measure, Batch(x, x, lengths_x, lengths_x)) / 2
        value = value - values(measure, Batch(y, y, lengths_y, lengths_y)) / 2
    if normalize == "path":
        value = value / measure.expected_matches(x, y, lengths_x, lengths_y)
    elif normalize == "length":
        rows, columns = (x.shape[-2], lengths_x), (y.shape[-2], lengths_y)
        value = value / sum(steps if lengths is None else lengths for steps, lengths in (rows, columns))
    return _REDUCTIONS[reduction](value)


def check_options(normalize: str | None, reduction: str) -> None:
    """Raise ``ValueError`` for names that :func:`dtw` does not have."""
    check_choice("reduction", reduction, _REDUCTIONS)
    if normalize is not None:
        check_choice("normalize", normalize, _NORMALIZATIONS, "None or ")


def check_pair(
    x: Numbers, y: Numbers, lengths: tuple[Lengths, Lengths] | None, gamma_shape: torch.Size
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Convert x and y to series (..., N, D) and (..., M, D) of one dtype, and their lengths to tensors.

    If the lengths of a side are one number, its series are cut to it, and its lengths are None.
    """
    a, b = (promote_half(series) for series in as_floating([as_series("x", x), as_series("y", y)]))
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"x and y must have the same number of features, got {a.shape[-1]} in x of shape {tuple(a.shape)} and "
            f"{b.shape[-1]} in y of shape {tuple(b.shape)}"
        )
    if a.device != b.device:
        raise ValueError(f"y must be on the device of x, {a.device}, got {b.device}")
    sides = (None, None) if lengths is None else as_pair(lengths)
    a, lengths_a = _cut("lengths[0]", a, sides[0])
    b, lengths_b = _cut("lengths[1]", b, sides[1])
    shapes = {"x": a.shape[:-2], "y": b.shape[:-2], "gamma": gamma_shape}
    shapes |= {f"lengths[{n}]": side.shape for n, side in enumerate((lengths_a, lengths_b)) if side is not None}
    try:
        broadcast(*shapes.values())
    except RuntimeError:
        each = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items() if shape)
        raise ValueError(f"batch shapes must broadcast, got {each}") from None
    return _zeros_past_end(a, lengths_a), _zeros_past_end(b, lengths_b), lengths_a, lengths_b


def _cut(name: str, series: Tensor, length: Lengths | None) -> tuple[Tensor, Tensor | None]:
    """Cut the series if the length is one number, or else return the length of each as a tensor."""
    steps = series.shape[-2]
    if length is None:
        return series, None
    if isinstance(length, int):
        if not 1 <= length <= steps:
            raise ValueError(f"{name} must be from 1 to {steps}, got {length}")
        return series[..., :length, :], None
    return series, as_lengths(name, length, series.device)


def _zeros_past_end(series: Tensor, lengths: Tensor | None) -> Tensor:
    """Replace the padding past the end of each series by zeros: NaN would spread to gradients."""
    if lengths is None:
        return series
    past = torch.arange(series.shape[-2], device=series.device) >= lengths.unsqueeze(-1)
    return series.masked_fill(past.unsqueeze(-1), 0)

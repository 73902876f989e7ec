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
    """Return the soft-DTW (smoothed dynamic time warping) of two series, or a divergence based on soft-DTW.

    The result is differentiable in both series, to any order. For classical DTW, pass ``omega="hard"``. The result is
    the sum of the costs of the matched elements. By default, a cost is a squared distance. Unlike in some other
    libraries, no square root is taken of the sum.

    Without a divergence, the result is the value DTW_Ω(x, y). It is biased: it can be negative, and for a fixed y, the
    x with the lowest value is not y. A divergence removes this bias. A divergence is f(x, y) − f(x, x)/2 − f(y, y)/2,
    which is exactly 0 at x = y. The argument ``divergence`` selects the function f:

    - "debiased": f is the value DTW_Ω;
    - "sharp": f is the expected cost of a random alignment, ⟨E, C⟩. C is the matrix of costs between the elements of
      both series, and E is the expected alignment, the gradient of the value with respect to C;
    - "mean_cost": f is the mean cost of all alignments, each with the same weight. Under negentropy, "sharp" tends to
      "mean_cost" as γ → ∞.

    The divergence "debiased" is never negative if Ω is negentropy, γ is 1, the cost is "log_sqeuclidean" and there is
    no band (Blondel, Mensch, Vert, 2021). To keep this guarantee with another γ, divide the series by √γ, call the
    function with γ = 1, and multiply the result by γ. For other costs, there is no proof that the divergence cannot be
    negative. Under a sparse Ω, the divergence can be negative, as in the last example.

    Args:
        x: The first series, a tensor, an array, a list or a pandas row. The shape is (..., N, D) for N steps with D
            features, or (N,) for one series of numbers. A matrix is one series (N, D). For a batch of univariate series
            (B, N), pass ``x.unsqueeze(-1)``. If one series contains integers, it is converted to the floating point
            type of the other series.
        y: The second series (..., M, D) or (M,), in the same formats as x. The batch dimensions of x and y broadcast.
        cost: The cost of matching an element x with an element y. Pass one of these names, or a function. A function
            takes both series, (..., N, D) and (..., M, D), and returns all costs, (..., N, M).

            - "sqeuclidean" (the default): ‖x − y‖².
            - "euclidean": ‖x − y‖. If x = y, its gradient is 0.
            - "cityblock": ‖x − y‖₁. If x = y, its gradient is 0.
            - "cosine": ½‖x/‖x‖ − y/‖y‖‖², where 0/‖0‖ is 0. If neither x nor y is 0, this is 1 − cos(x, y).
            - "log_sqeuclidean": δ + log(2 − e^−δ) with δ = ½‖x − y‖².
        lengths: A pair (lengths of x, lengths of y). Each of the two is a tensor of integers that broadcasts with the
            batch, or one number. By default N and M. Elements beyond the lengths are padding: they may contain NaN and
            get no gradient.
        band: The half-width of a Sakoe–Chiba band in steps: only elements whose positions differ by at most ``band``
            can be matched, if both series have the same length. For other lengths, see :class:`DTW`. Default None, no
            band. If you pass a divergence, the band also applies to the alignments of x with x and of y with y.
        step_weights: Three factors, for diagonal moves, moves along x and moves along y. Each factor multiplies the
            cost of its moves, as in :class:`DTW`. Default 1.
        step_penalties: Three penalties, for diagonal moves, moves along x and moves along y. Each penalty is added to
            the cost of its moves, as in :class:`DTW`. Default 0.
        open_begin: If True, x may be matched with a section of y that begins at any element of y. Default False.
        open_end: If True, x may be matched with a section of y that ends at any element of y. Default False.
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`Regularizer`.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string. A tensor broadcasts with the batch.
        divergence: None (the default) for the value, or "debiased", "sharp" or "mean_cost".
        normalize: None (the default) to return the sum of costs, which is larger for longer series. "path" divides the
            result by the expected number of matched pairs. "length" divides the result by the sum of the lengths of
            both series.
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

"""Time series: the warped distance of two, of all pairs of a collection, and the barycenter of a collection."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median_low
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.nn.functional import interpolate
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

import bellmax.fused as fused
from bellmax.dtw import DTW
from bellmax.inputs import (
    Lengths,
    Numbers,
    answers_near_misses,
    as_collection,
    as_floating,
    as_lengths,
    as_pair,
    as_series,
    as_tensor,
)
from bellmax.regularizers import Gamma, Regularizer, inner, promote_half, resolve

Cost: TypeAlias = "str | Callable[[Tensor, Tensor], Tensor]"
Collection: TypeAlias = "Numbers | Iterable[Numbers]"

# --- what it costs to match two elements

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


def _is_transformed() -> bool:
    """Whether torch.func, forward mode or torch.compile is at work, which see through plain operations alone."""
    if torch.compiler.is_compiling():
        return True
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def _is_recorded(x: Tensor, y: Tensor) -> bool:
    """Whether a gradient may be wanted: without one there is no need of a Function, which takes its time."""
    return torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)


def _sqeuclidean(x: Tensor, y: Tensor) -> Tensor:
    if _is_transformed():
        return (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)
    if not _is_recorded(x, y):
        return _accumulate(x, y, 2)
    squared: Tensor = _SquaredEuclidean.apply(x, y)
    return squared


def _cityblock(x: Tensor, y: Tensor) -> Tensor:
    if _is_transformed():
        return (x.unsqueeze(-2) - y.unsqueeze(-3)).abs().sum(-1)
    if not _is_recorded(x, y):
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


_COSTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sqeuclidean": _sqeuclidean,
    "euclidean": _euclidean,
    "cosine": _cosine,
    "cityblock": _cityblock,
    "log_sqeuclidean": _log_sqeuclidean,
}


def pairwise(x: Tensor, y: Tensor, cost: Cost) -> Tensor:
    """The costs (..., N, M) of matching each row of x (..., N, D) with each row of y (..., M, D).

    Rows do not know of each other: some rows of x and of y give a block of the matrix.
    """
    if not callable(cost):
        return _COSTS[cost](x, y)
    costs = cost(x, y)
    needed = (*_broadcast(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-2])
    if not isinstance(costs, Tensor) or costs.shape != needed:
        got = f"shape {tuple(costs.shape)}" if isinstance(costs, Tensor) else type(costs).__name__
        raise ValueError(
            f"cost must return a tensor of shape {needed} for x of shape {tuple(x.shape)} and y of shape "
            f"{tuple(y.shape)}, got {got}"
        )
    return costs


# --- two series

_DIVERGENCES = ("debiased", "sharp", "mean_cost")
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
    omega: str | Regularizer = "negentropy",
    gamma: Gamma | None = None,
    divergence: str | None = None,
    normalize: str | None = None,
    reduction: str = "none",
) -> Tensor:
    """Smoothed dynamic time warping of series x and y, or a divergence made of it; twice differentiable in both.

    The value DTW_Ω(x, y) is biased: it is not least at x = y, and may be negative. The divergences subtract the bias,
    f(x, y) − f(x, x)/2 − f(y, y)/2, and are exactly 0 at x = y:

    - "debiased": f is DTW_Ω, the value;
    - "sharp": f is the cost ⟨E, C⟩ of the expected alignment E = ∇DTW_Ω(C), without what Ω adds;
    - "mean_cost": f is the mean cost of all alignments, to which "sharp" tends under negentropy as γ → ∞.

    "debiased" is never negative under negentropy with γ = 1, the cost "log_sqeuclidean" and no band (Blondel, Mensch,
    Vert, 2021): exp(−DTW_Ω) is then a positive definite kernel. For another γ, divide the series by √γ and multiply the
    result by γ. There is no proof for other costs, and a sparse Ω does go below 0, as in the last example.

    Args:
        x: (..., N, D), or (N,) for one series of numbers: a tensor, an array, a list, a pandas row. Lists are read as
            NumPy reads them, and integers take the floating point type of the other series.
        y: (..., M, D) or (M,) likewise. Batch dimensions broadcast.
        cost: what a match of two elements costs: "sqeuclidean" ‖x − y‖²; "euclidean" ‖x − y‖; "cityblock" ‖x − y‖₁;
            "cosine" 1 − cos(x, y), that is ½‖x/‖x‖ − y/‖y‖‖², where 0/‖0‖ is 0; "log_sqeuclidean" δ + log(2 − e^−δ)
            with δ = ½‖x − y‖²; or a function of (..., N, D) and (..., M, D) that gives (..., N, M). Where a distance
            has a kink, at equal points, its gradient is 0.
        lengths: (lengths of x, lengths of y), each integers that broadcast with the batch, or a number, from 1 to N and
            to M. Padding past the end may hold NaN, and gets no gradient.
        band: as in :class:`DTW`, for every term of a divergence.
        omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
        gamma: strength of the smoothing, beside a name of Ω; 1 by default. A tensor broadcasts with the batch.
        divergence: None for the value, "debiased", "sharp" or "mean_cost".
        normalize: None for the sum along the alignment, which grows with the series; "path" to divide the result by the
            expected number of matches of x with y; "length" to divide it by N + M, the lengths of the two.
        reduction: over the batch: "none", "mean" or "sum".

    Returns:
        Of the batch shape, or a number, in the widest type given.

    >>> import bellmax as bx
    >>> bx.dtw([0, 1, 2], [0, 2, 2], omega="hard")                # the lists of a first try
    tensor(1.)
    >>> x = torch.tensor([[1.495], [0.787], [0.23], [-0.123], [1.089]])
    >>> y = torch.tensor([[1.513], [0.835], [0.246], [-0.106], [1.102]])
    >>> bx.dtw(x, y), bx.dtw(x, x), bx.dtw(x, x, divergence="debiased")
    (tensor(-3.7042), tensor(-3.7066), tensor(0.))
    >>> bx.dtw(x, y, divergence="debiased", cost="log_sqeuclidean")
    tensor(0.0021)
    >>> bx.dtw(x, y, divergence="debiased", omega="l2")
    tensor(-0.0004)
    """
    measure = _measure(cost, band, resolve(omega, gamma), divergence)
    _check_options(normalize, reduction)
    x, y, of_x, of_y = _check_pair(x, y, lengths, measure.gamma_shape)
    value = measure(x, y, of_x, of_y)
    if divergence is not None:
        value = value - measure(x, x, of_x, of_x) / 2 - measure(y, y, of_y, of_y) / 2
    if normalize == "path":
        value = value / measure.matches(x, y, of_x, of_y)
    elif normalize == "length":
        value = value / ((x.shape[-2] if of_x is None else of_x) + (y.shape[-2] if of_y is None else of_y))
    return _REDUCTIONS[reduction](value)


def _check_options(normalize: str | None, reduction: str) -> None:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be one of {_listed(_REDUCTIONS)}, got {reduction!r}")
    if normalize is not None and normalize not in _NORMALIZATIONS:
        raise ValueError(f"normalize must be None or one of {_listed(_NORMALIZATIONS)}, got {normalize!r}")


def _check_pair(
    x: Numbers, y: Numbers, lengths: tuple[Lengths, Lengths] | None, gamma_shape: torch.Size
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Series (..., N, D) and (..., M, D) of one dtype, cut to a length that is the same for all, and the lengths that
    remain."""
    a, b = (promote_half(series) for series in as_floating([as_series("x", x), as_series("y", y)]))
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"x and y must have the same number of features, got {a.shape[-1]} in x of shape {tuple(a.shape)} and "
            f"{b.shape[-1]} in y of shape {tuple(b.shape)}"
        )
    if a.device != b.device:
        raise ValueError(f"y must be on the device of x, {a.device}, got {b.device}")
    given = (None, None) if lengths is None else as_pair(lengths)
    a, of_a = _cut("lengths[0]", a, given[0])
    b, of_b = _cut("lengths[1]", b, given[1])
    shapes = {"x": a.shape[:-2], "y": b.shape[:-2], "gamma": gamma_shape}
    shapes |= {f"lengths[{side}]": own.shape for side, own in enumerate((of_a, of_b)) if own is not None}
    try:
        _broadcast(*shapes.values())
    except RuntimeError:
        each = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items() if shape)
        raise ValueError(f"batch shapes must broadcast, got {each}") from None
    return _without_padding(a, of_a), _without_padding(b, of_b), of_a, of_b


def _cut(name: str, series: Tensor, length: Lengths | None) -> tuple[Tensor, Tensor | None]:
    """The series up to a length that is the same for all, or the lengths of each."""
    steps = series.shape[-2]
    if length is None:
        return series, None
    if isinstance(length, int):
        if not 1 <= length <= steps:
            raise ValueError(f"{name} must be from 1 to {steps}, got {length}")
        return series[..., :length, :], None
    return series, as_lengths(name, length, series.device)


def _without_padding(series: Tensor, lengths: Tensor | None) -> Tensor:
    """The series with zeros past the end."""
    if lengths is None:
        return series
    past = torch.arange(series.shape[-2], device=series.device) >= lengths.unsqueeze(-1)
    return series.masked_fill(past.unsqueeze(-1), 0)


@dataclass(frozen=True)
class _Measure:
    """The f of a divergence, and the value where there is none."""

    cost: Cost
    band: float | None
    omega: Regularizer
    divergence: str | None

    @property
    def gamma_shape(self) -> torch.Size:
        return self.omega.gamma.shape if isinstance(self.omega.gamma, Tensor) else torch.Size()

    @property
    def may_require_grad(self) -> bool:
        """Whether something other than the series may ask for a gradient: γ, or the parameters of a function."""
        return callable(self.cost) or (isinstance(self.omega.gamma, Tensor) and self.omega.gamma.requires_grad)

    def __call__(
        self, x: Tensor, y: Tensor, lengths_x: Tensor | None = None, lengths_y: Tensor | None = None
    ) -> Tensor:
        """f of each pair of series (..., N, D) and (..., M, D), of the whole of them where no lengths are given."""
        if self._is_by_blocks(x, y):
            return self._by_blocks(x, y, lengths_x, lengths_y)
        alignments, cost = self.alignments(x, y, lengths_x, lengths_y)
        if self.divergence not in ("sharp", "mean_cost"):
            return alignments.value
        expected = inner(alignments.expected_path, cost, 2)
        return expected.masked_fill(alignments.value == math.inf, math.inf)

    def matches(self, x: Tensor, y: Tensor, lengths_x: Tensor | None, lengths_y: Tensor | None) -> Tensor:
        """The expected number of cells of an alignment of each pair; 1 where there is none."""
        alignments, _ = self.alignments(x, y, lengths_x, lengths_y)
        expected = alignments.expected_path.flatten(-2).sum(-1)
        return expected.masked_fill(expected == 0, 1)

    def alignments(
        self, x: Tensor, y: Tensor, lengths_x: Tensor | None, lengths_y: Tensor | None
    ) -> tuple[DTW, Tensor]:
        """The distribution over alignments, and the cost of a match of each two elements (..., N, M)."""
        cost = pairwise(x, y, self.cost)
        given = [own.shape for own in (lengths_x, lengths_y) if own is not None]
        batch = _broadcast(cost.shape[:-2], self.gamma_shape, *given)
        cost = cost.expand(*batch, *cost.shape[-2:])
        lengths = (
            x.shape[-2] if lengths_x is None else lengths_x.expand(batch),
            y.shape[-2] if lengths_y is None else lengths_y.expand(batch),
        )
        if self.divergence == "mean_cost":
            free = torch.zeros_like(cost).masked_fill(cost.detach() == math.inf, math.inf)
            return DTW(free, lengths=lengths, band=self.band), cost
        return DTW(cost, lengths=lengths, band=self.band, omega=self.omega), cost

    def _is_by_blocks(self, x: Tensor, y: Tensor) -> bool:
        if self.divergence in ("sharp", "mean_cost") or _is_transformed():
            return False
        batch = _broadcast(x.shape[:-2], y.shape[:-2]).numel()
        return fused.is_worthwhile(batch, x.shape[-2], y.shape[-2], x.device, self.omega)

    def _by_blocks(self, x: Tensor, y: Tensor, lengths_x: Tensor | None, lengths_y: Tensor | None) -> Tensor:
        """The values of pairs that are so large that their cost matrices had better not exist."""
        sides = ((x, lengths_x), (y, lengths_y))
        shapes = [series.shape[:-2] for series, _ in sides]
        batch = _broadcast(*shapes, *(own.shape for _, own in sides if own is not None))
        flat = []
        for series, own in sides:
            every = series.expand(*batch, *series.shape[-2:]).reshape(-1, *series.shape[-2:]).unbind()
            if own is None:
                flat.append(every)
                continue
            _check_range(own, series.shape[-2])
            flat.append(tuple(s[:n] for s, n in zip(every, own.expand(batch).reshape(-1).tolist(), strict=True)))
        costs = partial(pairwise, cost=self.cost)
        values = [fused.value_in_blocks(a, b, costs, self.band, self.omega) for a, b in zip(*flat, strict=True)]
        return torch.stack(values).reshape(batch)


def _measure(cost: Cost, band: float | None, omega: Regularizer, divergence: str | None) -> _Measure:
    if not callable(cost) and cost not in _COSTS:
        raise ValueError(f"cost must be a function or one of {_listed(_COSTS)}, got {cost!r}")
    if divergence is not None and divergence not in _DIVERGENCES:
        raise ValueError(f"divergence must be None or one of {_listed(_DIVERGENCES)}, got {divergence!r}")
    return _Measure(cost, band, omega, divergence)


def _check_range(lengths: Tensor, steps: int) -> None:
    if lengths.numel() and not 1 <= int(lengths.min()) <= int(lengths.max()) <= steps:
        raise ValueError(f"lengths must be from 1 to {steps}, got {int(lengths.min())} to {int(lengths.max())}")


def _broadcast(*shapes: torch.Size) -> torch.Size:
    """torch.broadcast_shapes, which takes longer than a small sweep, where there is something to do."""
    longest = max(shapes, key=len)
    return longest if all(shape in (longest, ()) for shape in shapes) else torch.broadcast_shapes(*shapes)


def _listed(names: Sequence[str] | dict[str, Any]) -> str:
    return ", ".join(map(repr, names))


# --- collections

_CELLS = 2**20  # of the cost matrices at a time: beyond the reach of malloc, fresh pages cost more than the sweeps
_ALIKE = 1.25  # how much longer than the shortest of its run a series may be


class _Run(NamedTuple):
    """Series of a collection that are about as long as each other."""

    places: Tensor  # (K,), in the collection
    series: Tensor  # (K, N, D), zeros past the end
    lengths: Tensor  # (K,)


def _runs(collection: Sequence[Tensor], max_cells: int) -> list[_Run]:
    """The collection from short to long, in runs of which two have ``max_cells`` cells between them, if they can."""
    runs: list[list[int]] = []
    for k in sorted(range(len(collection)), key=lambda k: len(collection[k])):
        length, features = collection[k].shape
        if runs:
            fits = (len(runs[-1]) + 1) * (length + features) <= math.isqrt(max_cells)
            if fits and length <= _ALIKE * len(collection[runs[-1][0]]):
                runs[-1].append(k)
                continue
        runs.append([k])
    device = collection[0].device if collection else None
    return [
        _Run(
            torch.tensor(run, device=device),
            pad_sequence([collection[k] for k in run], batch_first=True),
            torch.tensor([len(collection[k]) for k in run], device=device),
        )
        for run in runs
    ]


def _check_collections(**named: Collection) -> list[list[Tensor]]:
    """Each as a list of (N_k, D), all of one dtype, device and D."""
    lists = {name: as_collection(name, given) for name, given in named.items()}
    labelled = [(f"{name}[{k}]", s) for name, series in lists.items() for k, s in enumerate(series)]
    features = max((series.shape[1] for _, series in labelled), default=0)
    if features > 1 and all(len(series) == 1 for _, series in labelled):
        raise ValueError(
            f"{' and '.join(lists)} must hold series (length, features), got only series of length 1 with "
            f"{features} features; where the layout is (cases, channels, time), as in aeon and sktime, "
            "give X.swapaxes(1, 2), or x.T of each series"
        )
    for name, series in labelled:
        first_name, first = labelled[0]
        if series.shape[1] != first.shape[1]:
            raise ValueError(f"{name} must have {first.shape[1]} features like {first_name}, got {series.shape[1]}")
        if series.device != first.device:
            raise ValueError(f"{name} must be on the device of {first_name}, {first.device}, got {series.device}")
    typed = iter(as_floating([series for _, series in labelled]))
    return [[promote_half(next(typed)) for _ in series] for series in lists.values()]


def _check_single_gamma(measure: _Measure) -> None:
    if measure.gamma_shape.numel() != 1:
        raise ValueError(f"gamma must be one number for all series, got shape {tuple(measure.gamma_shape)}")


@answers_near_misses
def dtw_cdist(
    xs: Collection,
    ys: Collection | None = None,
    *,
    cost: Cost = "sqeuclidean",
    band: float | None = None,
    omega: str | Regularizer = "negentropy",
    gamma: Gamma | None = None,
    divergence: str | None = None,
    max_cells: int = _CELLS,
    progress: bool = False,
) -> Tensor:
    """:func:`dtw` of every series of ``xs`` with every series of ``ys``, whatever their lengths.

    It is differentiable; gradients do not keep the cost matrices of all pairs, but compute them again.

    Args:
        xs: K series, each (N_k, D) or (N_k,): tensors, arrays or lists, one by one; or one tensor or array (K, N, D) or
            (K, N), or a pandas frame with a series in each row, where NaN at the end of a series is padding. Data of
            layout (cases, channels, time) must be transposed first: ``X.swapaxes(1, 2)``.
        ys: L series likewise. By default ``xs``, with each pair computed once: a cost that is a function must then be
            symmetric.
        cost: as in :func:`dtw`.
        band: as in :class:`DTW`.
        omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
        gamma: strength of the smoothing, beside a name of Ω; 1 by default, and one for all pairs.
        divergence: as in :func:`dtw`; the terms of one series are computed once.
        max_cells: how many cells of cost matrices to hold at a time, unless a single pair has more.
        progress: whether to draw a bar on standard error, which needs ``pip install 'bellmax[progress]'``.

    Returns:
        (K, L).

    >>> import bellmax as bx
    >>> xs = [torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.0, 2.0])]
    >>> ys = [torch.tensor([3.0]), torch.tensor([1.0, 1.0, 2.0, 2.0]), torch.tensor([1.0, 3.0])]
    >>> bx.dtw_cdist(xs, ys, omega="hard")
    tensor([[14.,  1.,  2.],
            [10.,  2.,  2.]])
    """
    measure = _measure(cost, band, resolve(omega, gamma), divergence)
    _check_single_gamma(measure)
    if max_cells < 1:
        raise ValueError(f"max_cells must be at least 1, got {max_cells}")
    if ys is None:
        (left,) = _check_collections(xs=xs)
        right = left
        rows = columns = _runs(left, max_cells)
    else:
        left, right = _check_collections(xs=xs, ys=ys)
        rows, columns = _runs(left, max_cells), _runs(right, max_cells)
    if not rows or not columns:
        return torch.zeros(len(left), len(right))
    values = _all_pairs(measure, rows, columns, progress)
    if divergence is None:
        return values
    if rows is columns:
        of_rows = of_columns = values.diagonal() / 2
    else:
        of_rows, of_columns = (_with_itself(measure, runs) / 2 for runs in (rows, columns))
    return values - (of_rows.unsqueeze(-1) + of_columns)


def _all_pairs(measure: _Measure, rows: list[_Run], columns: list[_Run], progress: bool) -> Tensor:
    """f of all pairs, (K, L)."""
    height, width = (sum(len(run.places) for run in runs) for runs in (rows, columns))
    where = torch.zeros(height, width, dtype=torch.int64, device=rows[0].places.device)  # a pair is in what is found
    found: list[Tensor] = []
    count = 0
    # A checkpoint forgets a block until its gradient is asked for; under torch.func there are none.
    wanted = measure.may_require_grad or any(run.series.requires_grad for run in (*rows, *columns))
    keep = not (wanted and torch.is_grad_enabled()) or torch._C._are_functorch_transforms_active()
    with _bar(progress, height * (height + 1) // 2 if rows is columns else height * width) as advance:
        for row, column, i, j in _blocks(rows, columns):
            block = partial(_block, measure, row, column, i, j)
            found.append(block() if keep else checkpoint(block, use_reentrant=False, preserve_rng_state=False))
            numbers = torch.arange(count, count + len(i), device=where.device)
            where[row.places[i], column.places[j]] = numbers
            if rows is columns:
                where[column.places[j], row.places[i]] = numbers
            count += len(i)
            advance(len(i))
    return torch.cat(found)[where]


def _blocks(rows: list[_Run], columns: list[_Run]) -> Iterator[tuple[_Run, _Run, Tensor, Tensor]]:
    """Two runs and the members of their pairs; if the rows are the columns, a pair and not its mirror image."""
    for r, row in enumerate(rows):
        for column in columns[r if rows is columns else 0 :]:
            i, j = torch.ones(len(row.places), len(column.places), device=row.places.device).nonzero().unbind(-1)
            once = i <= j if row is column else slice(None)
            yield row, column, i[once], j[once]


def _block(measure: _Measure, row: _Run, column: _Run, i: Tensor, j: Tensor) -> Tensor:
    return measure(row.series[i], column.series[j], row.lengths[i], column.lengths[j])


def _with_itself(measure: _Measure, runs: list[_Run]) -> Tensor:
    """f of every series with itself, (K,)."""
    found = [measure(run.series, run.series, run.lengths, run.lengths) for run in runs]
    return torch.cat(found)[torch.cat([run.places for run in runs]).argsort()]


@contextmanager
def _bar(shown: bool, total: int) -> Iterator[Callable[[int], object]]:
    """What to tell how many more pairs are done."""
    if not shown:
        yield lambda done: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError as error:
        raise ImportError("progress=True needs rich: pip install 'bellmax[progress]'") from error
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("pairs", total=total)
        yield lambda done: progress.advance(task, done)


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
    """The series z that is least far from a collection: it minimises Σ_k w_k dtw(z, x_k) by L-BFGS.

    The objective is not convex: what is found depends on where the search begins. With "hard" it has kinks too, where
    the search may end early; a small γ does better.

    Args:
        xs: K series, as in :func:`dtw_cdist`.
        weights: (K,), at least 0; all the same by default. Only their ratios count.
        init: (L, D) or (L,), where to begin; by default the weighted mean of the series, each stretched linearly to
            ``length``.
        length: L; by default that of ``init``, or the median of the lengths.
        cost: as in :func:`dtw`.
        band: as in :class:`DTW`.
        omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
        gamma: strength of the smoothing, beside a name of Ω; 1 by default.
        divergence: as in :func:`dtw`; with None the bias of a smooth Ω flattens z.
        max_iter: how many iterations at most.
        tol: largest entry of the gradient at which to stop.

    Returns:
        (L, D), without gradient.

    >>> import bellmax as bx
    >>> xs = [torch.tensor([0.0, 0.0, 1.0, 0.0]), torch.tensor([0.0, 3.0, 0.0, 0.0])]
    >>> bx.dtw_barycenter(xs, gamma=0.1).squeeze(-1).round().long()  # one bump, not two
    tensor([0, 2, 0, 0])
    """
    measure = _measure(cost, band, resolve(omega, gamma), divergence)
    _check_single_gamma(measure)
    with torch.inference_mode(False), torch.no_grad():
        (series,) = _check_collections(xs=xs)
        if not series:
            raise ValueError("xs must hold at least one series, got none")
        shares = _check_weights(weights, series[0].new_ones(len(series)))
        start = _start(series, shares, init, length)
        runs = _runs(series, _CELLS)
        z = start.clone().requires_grad_()
        best, least = start, math.inf

        def terms() -> Iterator[Tensor]:
            for run in runs:
                yield shares[run.places] @ measure(z, run.series, None, run.lengths)
            if divergence is not None:
                yield measure(z, z) / -2

        def closure() -> float:
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
    """(K,), of sum 1."""
    if weights is None:
        return ones / len(ones)
    given = as_tensor("weights", weights).detach().to(ones)
    if given.shape != ones.shape:
        raise ValueError(f"weights must hold one number for each of {len(ones)} series, got shape {tuple(given.shape)}")
    if not bool((given >= 0).all()) or not 0 < float(given.sum()) < math.inf:
        raise ValueError(f"weights must be at least 0 and not all 0, got {given.tolist()}")
    return given / given.sum()


def _start(series: list[Tensor], shares: Tensor, init: Numbers | None, length: int | None) -> Tensor:
    """(L, D)."""
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

"""The class DTW: smoothed dynamic time warping (section 4.2 and appendix B.3 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import count, pairwise, product, takewhile
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from bellmax.decoded import Fault
from bellmax.distribution import PathDistribution
from bellmax.inputs import (
    Lengths,
    Numbers,
    answers_near_misses,
    as_floating,
    as_lengths,
    as_pair,
    as_tensor,
    check_band,
    check_tensor,
)
from bellmax.modes import is_readable
from bellmax.programs.checks import subscript
from bellmax.programs.lattice import LatticeProgram, bands
from bellmax.regularizers import Regularizer
from bellmax.solver import Solver, version_of
from bellmax.structures.lattice import (
    Lattice,
    LatticePaths,
    LatticeTargets,
    Move,
    WalkForm,
    along_row,
    cell,
    corner,
    scalar,
)
from bellmax.tensors import Gamma, inner, promote_half, wide_dtype, widen

if TYPE_CHECKING:
    from typing_extensions import Self

StepWeights = Sequence[float] | Tensor

_STEPS = {"diagonal": (1, 1), "up": (1, 0), "left": (0, 1)}
_PLAIN, _PENALISED, _WEIGHTED = range(3)
"""Kinds of moves: without scores, with one score, and with one score per cell."""


def _declare(kind: int, open_begin: bool, open_end: bool) -> Lattice:
    """Return the lattice of alignments with this kind of moves."""
    read = {_PLAIN: lambda name: None, _PENALISED: scalar, _WEIGHTED: cell}[kind]
    moves = [Move(di, dj, score=read(name)) for name, (di, dj) in _STEPS.items()]
    start, end = (along_row(0) if is_open else corner(0) for is_open in (open_begin, open_end))
    return Lattice(moves, node=cell("cost"), start=start, end=end)


_CLOSED_OR_OPEN = (False, True)
_LATTICES = {  # torch.compile can look a lattice up, but not declare one
    key: _declare(*key) for key in product((_PLAIN, _PENALISED, _WEIGHTED), _CLOSED_OR_OPEN, _CLOSED_OR_OPEN)
}


_UNIQUE = count()
"""Versions of which no two are equal."""


class StepSolver(Solver):
    """A solver of alignments whose moves have costs, computed from the cost of cells, step weights and penalties.

    The costs of moves are computed at every access, for two reasons: the backward pass of one result may free its
    autograd graph, and the sources may be modified in place.
    """

    def __init__(
        self, cells: Solver, dims: tuple[int, ...], step_weights: Tensor | None, step_penalties: Tensor | None
    ) -> None:
        """Add step weights and penalties, (3,) or (..., 3), to a solver that has only the cost of cells."""
        self.step_weights, self.step_penalties = step_weights, step_penalties
        args = cells.integers, cells.batch_shape, cells.omega, cells.backend, cells.sense
        super().__init__(cells.program, cells.scores, dims, *args)

    @property
    def scores(self) -> tuple[Tensor, ...]:
        """The cost of cells, (..., N, M), and the costs of moves."""
        cost = promote_half(self._cost)
        finite = cost if self.step_weights is None else cost.masked_fill(~cost.isfinite(), 0)
        return self._cost, *self.move_costs(finite, self.step_penalties)

    @scores.setter
    def scores(self, scores: tuple[Tensor, ...]) -> None:
        self._cost = scores[0]

    def _version(self) -> tuple[int, ...]:
        """Return the key of cached results, which depend on the cost and on the costs of moves."""
        sources = (self._cost, self.omega.gamma, self.step_weights, self.step_penalties)
        tensors = [tensor for tensor in sources if isinstance(tensor, Tensor)]
        if any(tensor.is_inference() for tensor in tensors):  # torch does not count their changes in place
            return (next(_UNIQUE),)
        return version_of(tensors)

    def move_costs(self, cells: Tensor, penalties: Tensor | None) -> list[Tensor]:
        """Return the cost of each kind of move in addition to ``cells``: (..., N, M) with step weights, else (...)."""
        terms = (cells.new_zeros(3) if penalties is None else penalties).unbind(-1)
        if self.step_weights is None:
            return list(terms)
        factors = (self.step_weights - 1).unbind(-1)
        return [f[..., None, None] * cells + t[..., None, None] for f, t in zip(factors, terms, strict=True)]

    def with_scores(self, scores: Sequence[Tensor], omega: Regularizer) -> Solver:  # type: ignore[override]
        """Return a solver with these scores of cells and moves."""
        backend = self.backend if omega.kernel == self.omega.kernel else self.backend_under(omega.kernel)
        dtype = reduce(torch.promote_types, [score.dtype for score in scores])
        args = self.dims, self.integers, self.batch_shape, omega, backend, self.sense
        return Solver(self.program, [score.to(dtype) for score in scores], *args)

    def under(self, omega: Regularizer) -> Self:
        detached = self.map(lambda t, dims: t.detach(), self.batch_shape, shared=True)
        return detached.with_cost(detached._cost, omega)

    def with_cost(self, cost: Tensor, omega: Regularizer) -> Self:
        """Return the same moves with another cost of cells, and Ω."""
        other = self._copy()
        other._cost, other.omega = cost, omega
        if omega.kernel != self.omega.kernel:
            other.backend = self.backend_under(omega.kernel)
        return other

    def map(self, function: Callable[[Tensor, int], Tensor], batch_shape: torch.Size, shared: bool = False) -> Self:
        other = super().map(function, batch_shape, shared)
        for name in ("step_weights", "step_penalties"):
            steps = getattr(self, name)
            if steps is not None and (shared or steps.ndim > 1):
                setattr(other, name, function(steps, 1))
        return other


class DTWTargets(LatticeTargets):
    """Targets of DTW: alignments (..., N, M), index pairs (..., L, 2), or sets of cells.

    If the allowed cells form one alignment, only that alignment counts, even if a diagonal shortcut would also fit.
    """

    is_alignment = True

    @property
    def _inside(self) -> Tensor:
        """(..., N, M): True at the cells within the lengths and the band."""
        batch = self.solver.batch
        inside = cast("LatticeProgram", self.solver.program).inside(batch.unscaled(self.solver.detached()), batch.index)
        return inside.reshape(self.batch_shape + self.event_shape)

    def is_used(self, ndim: int) -> Tensor:
        return self._inside

    def allowed(self, name: str, target: Tensor, ignore_index: int) -> Tensor:
        p = cast("DTW", self.p)
        allowed = super().allowed(name, target, ignore_index)
        # Cells past the lengths are ignored; cells outside of the band make a target impossible.
        rows, columns = (torch.arange(size, device=p.device) for size in self.event_shape)
        length_a, length_b = p.lengths[..., None, None].unbind(-3)
        return allowed & (rows.unsqueeze(-1) < length_a) & (columns < length_b)

    def correct(self, allowed: Tensor) -> Tensor:
        return allowed | ~self._inside

    def edges_within(self, allowed: Tensor) -> Tensor:
        edges, is_path = self.solver.edges_of(allowed.float())
        return torch.where(is_path.unsqueeze(-1), edges > 0, super().edges_within(allowed))

    def restricted_value(self, allowed: Tensor) -> Tensor:
        is_path = self.p._is_path(allowed.float())
        nodes = allowed.flatten(-2).sum(-1) + cast("DTW", self.p).open_end
        alone = self.value_of_one_path(self._cost_within(allowed), nodes)
        if is_readable(is_path) and bool(is_path.all()):
            return alone
        return torch.where(is_path, alone, super().restricted_value(allowed))

    def _cost_within(self, allowed: Tensor) -> Tensor:
        """The cost of the alignment with these cells, of the batch shape, in the wide dtype."""
        cost, *move_costs = self.solver.scores
        cells = promote_half(cost).masked_fill(~self._inside, math.inf).masked_fill(~allowed, 0)
        total = cells.flatten(-2).sum(-1, dtype=wide_dtype(self.p.device))
        if move_costs:
            path = allowed.to(total.dtype)
            before = pad(path, (1, 0, 1, 0))
            up, left = before[..., :-1, 1:] * path, before[..., 1:, :-1] * path
            diagonal = before[..., :-1, :-1] * path * (1 - up - left)
            for costs, visits in zip(move_costs, (diagonal, up, left), strict=True):
                by_cell = costs if self.solver.dims[1] else costs[..., None, None]
                total = total + inner(visits, widen(by_cell).expand(visits.shape), 2)
        return total

    def divergence(self, path: Tensor, y: Tensor) -> Tensor:
        """KL(Y ‖ E) for each cell, as a Bernoulli variable: visited or not."""
        finfo = torch.finfo(path.dtype)
        return -torch.where(y > 0, path.clamp(finfo.tiny, 1).log(), torch.log1p(-path.clamp(0, 1 - finfo.eps)))

    def why_impossible(self, name: str, allowed: Tensor, impossible: Tensor) -> str:
        member = impossible.nonzero()[0].tolist()
        closed = allowed & (~self._inside | (self.p.potentials == math.inf))
        cells = closed[tuple(member)].nonzero().tolist()
        where = f": cell {tuple(cells[0])} has cost inf, or is outside of the lengths or the band" if cells else ""
        return f"{name}{subscript(member)} allows no alignment of finite cost{where}"


class PairForm(WalkForm):
    """Index pairs (..., L, 2) int64 [i, j]."""

    p: DTW
    is_complete = True

    @property
    def own_shape(self) -> Sequence[int | str]:
        return "L", 2

    def of_walks(self, walks: Tensor) -> Tensor:
        return walks[..., :2]

    def nodes(self, decoded: Tensor) -> tuple[Tensor, Tensor]:
        i, j = decoded.unbind(-1)
        nodes, is_inside = self.number(i, j, 0)
        is_inside = is_inside & ((i >= 0) | ((i == -1) & (j == -1))).all(-1)
        if not decoded.shape[-2]:
            return nodes, is_inside & False
        last_row, last_column = (self.p.lengths - 1).unbind(-1)
        is_start = (i[..., 0] == 0) & (self.p.open_begin | (j[..., 0] == 0))
        column = j.amax(-1)
        is_end = (i.amax(-1) == last_row) & ((column < last_column) & self.p.open_end | (column == last_column))
        return nodes, is_inside & is_start & is_end

    def events(self, decoded: Tensor) -> Tensor:
        return self._events_of_cells(decoded)

    def fault(self, decoded: Tensor) -> Fault:
        p, lengths = self.p, tuple(self.p.lengths.tolist())
        rows = [tuple(pair) for pair in decoded.tolist()]
        cells = list(takewhile(lambda pair: pair != (-1, -1), rows))
        if any(pair != (-1, -1) for pair in rows[len(cells) :]):
            return Fault((len(cells),), "is padding, but another pair follows it")
        for n, (i, j) in enumerate(cells):
            if not (0 <= i < lengths[0] and 0 <= j < lengths[1]):
                return Fault((n,), f"must be a cell of {lengths}, got {(i, j)}")
        for n, ((i, j), (k, m)) in enumerate(pairwise(cells), 1):
            if (k - i, m - j) not in _STEPS.values():
                return Fault((n,), f"must follow {(i, j)} by a step of (1, 1), (1, 0) or (0, 1), got {(k, m)}")
        start = "the first row" if p.open_begin else "(0, 0)"
        end = "the last row" if p.open_end else f"{(lengths[0] - 1, lengths[1] - 1)}"
        got = f"{cells[0]} to {cells[-1]}" if cells else "no pairs"
        return Fault((), f"must lead from {start} to {end}, got {got}")


class DTW(LatticePaths):
    """A distribution over the alignments (warping paths) of two series: dynamic time warping (DTW).

    The series have N and M elements. Cell (i, j) of an N × M grid matches element i of the first series with element j
    of the second. An alignment is a path through the grid from cell (0, 0) to cell (N − 1, M − 1). From cell (i, j), an
    alignment moves down to (i + 1, j), right to (i, j + 1) or diagonally to (i + 1, j + 1). The cost of an alignment is
    the sum of the costs of the cells that it visits. The event of an alignment is a 0/1 tensor (N, M) that is 1 at
    these cells. The decoded form of an alignment lists the index pairs (i, j) of these cells in order, (..., L, 2),
    padded with −1. ``value`` is the smoothed minimum of the costs of all alignments. It is a concave function of
    ``cost``. If several moves into a cell give the same least cost, the best alignment uses the diagonal move, or else
    the move down.

    Args:
        cost: The cost (..., N, M) of each cell, a tensor, an array or nested lists. +∞ forbids a cell.
        lengths: A pair (rows, columns): the length of the first series, from 1 to N, and the length of the second
            series, from 1 to M. By default, the lengths are N and M. Each item of the pair is an integer tensor of the
            batch shape, or one number for the whole batch. An alignment then ends at cell (rows − 1, columns − 1).
            Cells beyond the lengths are padding. Padding is ignored, may contain NaN and gets no gradient.
        band: The half-width of a Sakoe–Chiba band in steps, 0 or at least 1, default None for no band. Cells outside of
            the band are forbidden. For a half-width of a tenth of the length, pass ``int(0.1 * N)``. If both series
            have the same length, the band contains the cells with \\|i − j\\| ≤ band. If their lengths n and m differ,
            the band follows the straight line from the first cell to the last cell. It then contains the cells with
            \\|i(m−1) − j(n−1)\\| ≤ max(band, ½)(max(n, m) − 1). Every band contains at least one alignment.
        step_weights: Three factors, one for each kind of move: diagonal, down (i grows), right (j grows). If an
            alignment enters a cell by a move, it pays the cost of the cell times the factor of the move. Pass three
            numbers, or a tensor (3,), or a tensor (..., 3) with different factors for each batch member. A tensor can
            be learned. By default, all factors are 1. For example, with (2, 1, 1), an alignment pays the cost of a cell
            twice if it enters the cell diagonally. The cost of the first cell always has factor 1.
        step_penalties: Three penalties, one for each kind of move: diagonal, down, right. Each move adds the penalty of
            its kind to the cost of the alignment. Pass three numbers, or a tensor (3,), or a tensor (..., 3) with
            different penalties for each batch member. By default, all penalties are 0.
        open_begin: If True, an alignment may begin at any cell (0, j) of the first row. The first j elements of the
            second series are then left out. Default False.
        open_end: If True, an alignment may end at any cell of the last row. The elements of the second series after
            this cell are then left out. Default False.
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`Regularizer`.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

    >>> import bellmax as bx
    >>> x, y = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.0, 2.0])
    >>> p = bx.DTW((x[:, None] - y).square(), omega="sparsemax")
    >>> p.expected_path
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000],
            [0.0000, 1.0000]])
    >>> p.best_alignment()
    tensor([[ 0,  0],
            [ 1,  0],
            [ 2,  1],
            [-1, -1]])
    >>> int(bx.DTW(torch.zeros(5, 5)).num_paths)        # a Delannoy number
    321
    """

    _target_kind = DTWTargets
    _form_kind = PairForm
    _size_argument = "lengths"
    _has_unique_paths = True

    @answers_near_misses
    def __init__(
        self,
        cost: Numbers,
        *,
        lengths: tuple[Lengths, Lengths] | None = None,
        band: float | None = None,
        step_weights: StepWeights | None = None,
        step_penalties: StepWeights | None = None,
        open_begin: bool = False,
        open_end: bool = False,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> None:
        tensor = as_tensor("cost", cost)
        (cost,) = as_floating([tensor if tensor is cost else tensor.clone()])  # not the memory of an array
        shape = cost.shape
        if len(shape) < 2 or shape[-1] == 0 or shape[-2] == 0:
            raise ValueError(f"cost must have shape (..., N, M) with N, M >= 1, got {tuple(shape)}")
        check_band(band)
        kind = _WEIGHTED if step_weights is not None else _PLAIN if step_penalties is None else _PENALISED
        self.lattice = _LATTICES[kind, bool(open_begin), bool(open_end)]
        self.band = math.inf if band is None else float(band)
        self.open_begin, self.open_end, self._size = open_begin, open_end, (shape[-2], shape[-1])
        program, batch = self.lattice._programs[-1], shape[:-2]
        integers: tuple[Tensor, ...] = ()
        if lengths is not None or band is not None:
            if lengths is None:
                grid = torch.tensor(self._size, device=cost.device).expand(*batch, 2)
            else:
                grid = _read_lengths(lengths, batch, cost.device)
            integers = grid, bands(self.band, batch, cost.device)
        PathDistribution.__init__(
            self, program, {"cost": (cost, 2)}, integers, batch, shape[-2:], omega, gamma, minimize=True
        )
        if kind != _PLAIN:
            self._solver = self._with_steps(step_weights, step_penalties)

    def _shown_options(self) -> dict[str, object]:
        options = {"open_begin": self.open_begin, "open_end": self.open_end}
        band: dict[str, object] = {} if math.isinf(self.band) else {"band": self.band}
        return band | {name: True for name, is_open in options.items() if is_open}

    def _with_steps(self, step_weights: StepWeights | None, step_penalties: StepWeights | None) -> StepSolver:
        """Return a solver that adds the costs of moves."""
        plain = self._solver
        weights = self._check_steps("step_weights", step_weights)
        penalties = self._check_steps("step_penalties", step_penalties)
        return StepSolver(plain, self.lattice._dims, weights, penalties)

    def _check_steps(self, name: str, steps: StepWeights | None) -> Tensor | None:
        """Return a number for each kind of move, (3,) or (..., 3), at least in float32."""
        if steps is None:
            return None
        dtype = torch.promote_types(self.dtype, torch.float32)
        values = torch.as_tensor(steps, dtype=dtype, device=self.device)
        if values.shape != (3,) and values.shape != (*self.batch_shape, 3):
            raise ValueError(
                f"{name} must hold three numbers (diagonal, up, left), shape (3,) or {(*self.batch_shape, 3)}, "
                f"got shape {tuple(values.shape)}"
            )
        return values

    # --- the arguments

    @property
    def cost(self) -> Tensor:
        """The cost of each cell, (..., N, M)."""
        return self.potentials

    @property
    def step_weights(self) -> Tensor | None:
        """The argument ``step_weights`` as a tensor, (3,) or (..., 3), or None if it was not passed."""
        return self._solver.step_weights if isinstance(self._solver, StepSolver) else None

    @property
    def step_penalties(self) -> Tensor | None:
        """The argument ``step_penalties`` as a tensor, (3,) or (..., 3), or None if it was not passed."""
        return self._solver.step_penalties if isinstance(self._solver, StepSolver) else None

    @property
    def lengths(self) -> Tensor:
        """The length of the first series and of the second series for each batch member, (..., 2) int64."""
        if not self._solver.integers:
            return torch.tensor(self.event_shape, device=self.device).expand(*self.batch_shape, 2)
        return self._lengths

    # --- alignments

    def best_alignment(self) -> Tensor:
        """Return the index pairs of the alignment of least cost, padded with −1.

        The result (..., N + M − 1, 2) int64 equals the result of :meth:`decode`.
        """
        return self.decode()

    def sample_alignments(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return random alignments as index pairs, padded with −1.

        The result has the shape (*sample_shape, ..., N + M − 1, 2) and the dtype int64.
        """
        return self.sample_decoded(sample_shape)

    @property
    def marginals(self) -> Tensor:
        """Probability that an alignment visits each cell, (..., N, M). Differentiable."""
        return self.expected_path

    @property
    def gradient(self) -> dict[str, Tensor]:
        """Gradient of the value with respect to each argument: a mapping from names to tensors. Differentiable.

        The names are "cost" and, if they were passed, "step_weights" and "step_penalties". If ``step_weights`` was not
        passed, ``gradient["cost"]`` is the expected path.
        """
        if not isinstance(self._solver, StepSolver):
            return super().gradient
        of_cells, *of_moves = self._solver.gradient()
        weights, penalties = self.step_weights, self.step_penalties
        if weights is None:
            moves = torch.stack(of_moves, -1)
            return {"cost": of_cells.to(self.dtype), "step_penalties": _sum_to(moves, penalties)}
        by_cell = torch.stack(of_moves, -1)
        cost = promote_half(self.cost)
        finite = cost.masked_fill(~cost.isfinite(), 0)
        gradients = {"cost": (of_cells + (by_cell * (weights - 1)[..., None, None, :]).sum(-1)).to(self.dtype)}
        gradients["step_weights"] = _sum_to((by_cell * finite.unsqueeze(-1)).sum((-3, -2)), weights)
        if penalties is not None:
            gradients["step_penalties"] = _sum_to(by_cell.sum((-3, -2)), penalties)
        return gradients

    def alignment_to_path(self, alignment: Tensor) -> Tensor:
        """Convert index pairs (..., L, 2), padded with −1, to an event (..., N, M)."""
        if check_tensor("alignment", alignment).shape[-1:] != (2,) or alignment.is_floating_point():
            got = f"{alignment.dtype} of shape {tuple(alignment.shape)}"
            raise ValueError(f"alignment must hold integers of shape (..., L, 2), got {got}")
        rows, columns = self.event_shape
        i, j = alignment.unbind(-1)
        outside = (i < -1) | (i >= rows) | (j < -1) | (j >= columns) | ((i < 0) != (j < 0))
        if is_readable(outside) and bool(outside.any()):
            position = tuple(outside.nonzero()[0].tolist())
            raise ValueError(
                f"alignment must hold cells of ({rows}, {columns}), or (-1, -1), "
                f"got {tuple(alignment[position].tolist())} at {position}"
            )
        cells = torch.where(i < 0, rows * columns, i * columns + j)
        flat = torch.zeros((*i.shape[:-1], rows * columns + 1), dtype=self.dtype, device=self.device)
        return flat.scatter(-1, cells, 1)[..., :-1].reshape(*i.shape[:-1], rows, columns)

    # --- costs of moves

    def _with(self, scores: Sequence[Tensor], omega: Regularizer) -> Self:
        """Return this distribution with another cost; the costs of moves stay."""
        if isinstance(self._solver, StepSolver):
            return self._by(self._solver.with_cost(scores[0], omega))
        return super()._with(scores, omega)

    def _direction(self, z: Any) -> list[Tensor]:
        z = self._like("z", check_tensor("z", z), self.cost)
        return [z, *self._solver.move_costs(z, None)] if isinstance(self._solver, StepSolver) else [z]

    def hessian_product(self, z: Tensor) -> Tensor:
        """Return the product of the Hessian of the value and a direction z, (..., N, M).

        The Hessian contains the second derivatives of the value with respect to ``cost``.

        Args:
            z: The direction, a tensor that broadcasts to the shape of ``cost``.

        """
        product, *move_products = self._solver.hessian_product(self._direction(z))
        if self.step_weights is not None:
            factors = (self.step_weights - 1)[..., None, None].unbind(-3)
            product = sum((f * p for f, p in zip(factors, move_products, strict=True)), start=product)
        return product.to(self.dtype)


def _sum_to(gradient: Tensor, steps: Tensor | None) -> Tensor:
    """Sum a gradient (..., 3) over the dimensions that the step weights or penalties do not have."""
    assert steps is not None
    return gradient.sum_to_size(steps.shape)


def _read_lengths(lengths: tuple[Lengths, Lengths], batch: torch.Size, device: torch.device) -> Tensor:
    """Return the argument ``lengths`` as (..., 2) int64."""
    sides = []
    for side, length in enumerate(as_pair(lengths)):
        integers = as_lengths(f"lengths[{side}]", length, device)
        if not integers.ndim:
            integers = integers.expand(batch)
        if integers.shape != batch:
            raise ValueError(f"lengths[{side}] must have the batch shape {tuple(batch)}, got {tuple(integers.shape)}")
        sides.append(integers)
    return torch.stack(sides, -1)

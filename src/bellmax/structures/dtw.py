"""Alignments of two series: the smoothed dynamic time warping operator (section 4.2 and appendix B.3 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

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
from bellmax.programs import grid as layout
from bellmax.programs.values import of_sequence
from bellmax.regularizers import Hard, Regularizer
from bellmax.structures.dag import DAG, DAGPaths
from bellmax.structures.lattice import Lattice, LatticePaths, Move, along_row, cell, corner, scalar
from bellmax.tensors import Gamma, inner, promote_half, wide_dtype, widen
from bellmax.transforms import is_readable

StepWeights = Sequence[float] | Tensor
_Result = TypeVar("_Result")


class DTW(PathDistribution):
    """A distribution over the monotone alignments of two series of N and M elements, given what each match costs.

    An alignment goes from cell (0, 0) to cell (N−1, M−1) by moves along the diagonal, down or to the right, and pays
    for every cell it visits. It is an indicator (N, M) over the cells. The program is a *min*: ``value`` is a smoothed
    least cost, concave in ``cost``; among equal costs the diagonal comes first, then the move from above, then from the
    left.

    Args:
        cost: (..., N, M), a tensor, an array or nested lists; +∞ forbids a cell.
        lengths: (lengths_a, lengths_b), each integers of the batch shape or a number, from 1 to N and to M; a pair's
            last cell is (length_a − 1, length_b − 1). Padding outside is ignored, may hold NaN and gets no gradient.
        band: half the width of a Sakoe-Chiba band around the slanted diagonal of each pair: with N and M the pair's own
            lengths, cell (i, j) is kept iff \\|i(M−1) − j(N−1)\\| ≤ max(band, ½)(max(N, M) − 1). For N = M that is
            \\|i − j\\| ≤ band; a path always remains. It is a number of steps, 0 or at least 1: for a tenth of the
            length give int(0.1 * N).
        step_weights: three factors of the cost of a cell, for a move into it along the diagonal, from above (i grows)
            and from the left (j grows): numbers, or a tensor (3,) or (..., 3), which may be learnt. (2, 1, 1) makes
            diagonals no shorter than two other moves. The first cell has factor 1.
        step_penalties: three terms that are added to the cost of each move, in the same order.
        open_begin: whether an alignment may begin at any cell of the first row, so that the first series is matched
            with a part of the second.
        open_end: whether it may end at any cell of the last row.
        omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
        gamma: strength of the smoothing, beside a name of Ω; 1 by default.

    >>> import bellmax as bx
    >>> x, y = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.0, 2.0])
    >>> p = bx.DTW((x[:, None] - y).square(), omega="l2")
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

    structure = "dtw"
    sense = -1
    _is_alignment = True
    _sweeps_minimize = True
    _tape_is_large = True
    _own_tensors: ClassVar[dict[str, int]] = {"_lengths": 1, "step_weights": 1, "step_penalties": 1}

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
        given = as_tensor("cost", cost)
        (cost,) = as_floating([given if given is cost else given.clone()])  # not the memory of an array
        shape = cost.shape
        if len(shape) < 2 or shape[-1] == 0 or shape[-2] == 0:
            raise ValueError(f"cost must have shape (..., N, M) with N, M >= 1, got {tuple(shape)}")
        super().__init__({"cost": (cost, 2)}, shape[:-2], shape[-2:], omega, gamma)
        check_band(band)
        self.band = math.inf if band is None else float(band)
        self._lengths = None if lengths is None else self._check_lengths(lengths)
        self.step_weights = self._check_steps("step_weights", step_weights)
        self.step_penalties = self._check_steps("step_penalties", step_penalties)
        self.open_begin, self.open_end = open_begin, open_end

    def _check_lengths(self, lengths: tuple[Lengths, Lengths]) -> Tensor:
        """(..., 2)."""
        sides = []
        for side, given in enumerate(as_pair(lengths)):
            length = as_lengths(f"lengths[{side}]", given, self.device)
            if not length.ndim:
                length = length.expand(self.batch_shape)
            if length.shape != self.batch_shape:
                needed = tuple(self.batch_shape)
                raise ValueError(f"lengths[{side}] must have the batch shape {needed}, got {tuple(length.shape)}")
            sides.append(length)
        return torch.stack(sides, -1)

    def _check_steps(self, name: str, steps: StepWeights | None) -> Tensor | None:
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

    # --- layers

    @property
    def cost(self) -> Tensor:
        """(..., N, M)."""
        return self._scores[0]

    @property
    def lengths(self) -> Tensor:
        """(..., 2) int64: how many elements of each series an alignment covers."""
        if self._lengths is None:
            return torch.tensor(self.event_shape, device=self.device).expand(*self.batch_shape, 2)
        return self._lengths

    # --- alignments

    def best_alignment(self) -> Tensor:
        """The index pairs (i, j) of the alignment of least cost, (..., N + M − 1, 2) int64, padded with −1."""
        return self._with(self._detached(), Hard()).sample_alignments()

    def sample_alignments(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Index pairs drawn from the distribution, (*sample_shape, ..., N + M − 1, 2) int64, padded with −1."""
        shape = torch.Size(sample_shape)
        drawn = self._sample(shape.numel()).movedim(1, 0)
        return self._pairs_of(drawn.reshape(*shape, *self.batch_shape, self._num_choices + 1))

    def alignment_to_path(self, alignment: Tensor) -> Tensor:
        """The path (..., N, M) of index pairs (..., L, 2), where −1 is padding."""
        if check_tensor("alignment", alignment).shape[-1:] != (2,) or alignment.is_floating_point():
            got = f"{alignment.dtype} of shape {tuple(alignment.shape)}"
            raise ValueError(f"alignment must be integer of shape (..., L, 2), got {got}")
        rows, columns = self.event_shape
        i, j = alignment.unbind(-1)
        outside = (i < -1) | (i >= rows) | (j < -1) | (j >= columns) | ((i < 0) != (j < 0))
        if bool(outside.any()):
            place = tuple(outside.nonzero()[0].tolist())
            raise ValueError(
                f"alignment must hold cells of ({rows}, {columns}), or (-1, -1), "
                f"got {tuple(alignment[place].tolist())} at {place}"
            )
        cells = torch.where(i < 0, rows * columns, i * columns + j)
        flat = torch.zeros((*i.shape[:-1], rows * columns + 1), dtype=self.dtype, device=self.device)
        return flat.scatter(-1, cells, 1)[..., :-1].reshape(*i.shape[:-1], rows, columns)

    # --- the expansion: an edge for every move

    def _expanded(self) -> DAGPaths:
        self._check()
        cost = promote_half(self.cost).masked_fill(~self._inside, math.inf)
        weights = layout.edge_weights(self._payments(cost), self._may_end, self.open_begin)
        paths = DAGPaths(_graph(*self.event_shape, self.device), weights, omega=self.omega)
        paths.backend = self.backend
        return paths

    def _onto_event(self, edges: Tensor) -> Tensor:
        return layout.onto_cells(edges, *self.event_shape)

    def _from_event(self, path: Tensor) -> Tensor:
        return layout.from_cells(path)

    def _payments(self, cells: Tensor) -> Tensor:
        """The cost of each move, (..., E), for costs of cells (..., N, M)."""
        return layout.payments(cells, self.step_weights, self.step_penalties)

    # --- moves that differ and open ends: a lattice

    @property
    def _has_own_moves(self) -> bool:
        return self.open_begin or self.open_end or self.step_weights is not None or self.step_penalties is not None

    def _lattice_paths(self) -> LatticePaths:
        """The same program as a lattice: every cell has its cost, and a move what it pays beyond that."""
        cost = promote_half(self.cost)
        cells = cost if self.step_weights is None else cost.masked_fill(~cost.isfinite(), 0)
        tensors = {"cost": cost, **self._beyond(cells, with_penalties=True)}
        lattice = _lattice(self.step_weights is not None, self.open_begin, self.open_end)
        p = lattice.paths(tensors, lengths=self.lengths.unbind(-1), band=self.band, omega=self.omega, minimize=True)
        p.backend = self.backend
        return p

    def _by_lattice(self, verb: Callable[[LatticePaths], _Result]) -> _Result:
        """Return the result of a verb of the lattice, and keep its forward sweep.

        The lattice itself is built again: its tensors have an autograd graph, which serves one backward.
        """
        paths, version = self._lattice_paths(), self._version()
        if version in self._cache and not self._is_foreign_trace():
            paths._cache = {paths._version(): self._cache[version]}
        result = verb(paths)
        for swept in paths._cache.values():
            self._cache = {version: swept}
        return result

    @property
    def _inputs(self) -> tuple[Tensor, ...]:
        inputs = (*self._scores, self.omega.gamma, self.step_weights, self.step_penalties)
        return tuple([tensor for tensor in inputs if isinstance(tensor, Tensor)])

    def _beyond(self, cells: Tensor, with_penalties: bool) -> dict[str, Tensor]:
        """What each kind of move pays beyond the costs of cells, (..., N, M) or, without weights, (...)."""
        beyond = cells.new_zeros(3) if self.step_penalties is None or not with_penalties else self.step_penalties
        if self.step_weights is None:
            return dict(zip(_KINDS, beyond.unbind(-1), strict=True))
        factors = (self.step_weights - 1).unbind(-1)
        parts = (
            f[..., None, None] * cells + b[..., None, None] for f, b in zip(factors, beyond.unbind(-1), strict=True)
        )
        return dict(zip(_KINDS, parts, strict=True))

    def _value(self) -> Tensor:
        return self._by_lattice(LatticePaths._value) if self._has_own_moves else super()._value()

    def _path(self) -> Tensor:
        return self._by_lattice(LatticePaths._path) if self._has_own_moves else super()._path()

    def _directional_derivative(self, z: Sequence[Tensor]) -> Tensor:
        if not self._has_own_moves:
            return super()._directional_derivative(z)
        along = {"cost": z[0], **self._beyond(z[0], with_penalties=False)}
        return self._by_lattice(lambda paths: paths.directional_derivative(along))

    def _hessian_product(self, z: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if not self._has_own_moves:
            return super()._hessian_product(z)
        along = {"cost": z[0], **self._beyond(z[0], with_penalties=False)}
        products = self._by_lattice(lambda paths: paths.hessian_product(along))
        total = products["cost"]
        if self.step_weights is not None:
            factors = (self.step_weights - 1)[..., None, None].unbind(-3)
            total = sum((f * products[kind] for f, kind in zip(factors, _KINDS, strict=True)), start=total)
        return (total.to(self.dtype),)

    def _sample(self, draws: int) -> Tensor:
        if not self._has_own_moves:
            return super()._sample(draws)
        return self._by_lattice(lambda paths: paths._sample(draws))[..., 0]

    def _unweighted(self, omega: Regularizer) -> PathDistribution:
        self._check()
        return self._expanded()._unweighted(omega) if self._has_own_moves else super()._unweighted(omega)

    # --- what the base asks for

    @property
    def _index(self) -> tuple[Tensor, ...]:
        if self._lengths is None and math.isinf(self.band):
            return ()
        lengths = self.lengths.reshape(-1, 2)
        return lengths, layout.bands(self.band, lengths.shape[0], self.device)

    @property
    def _num_choices(self) -> int:
        return self.event_shape[0] + self.event_shape[1] - 2

    @property
    def _inside(self) -> Tensor:
        """(..., N, M): the cells within the lengths and the band."""
        return layout.is_inside(self._flat_cost, self._index).reshape(self.cost.shape)

    @property
    def _flat_cost(self) -> Tensor:
        return self._flat.flatten(self.cost.detach(), 2)

    @property
    def _may_end(self) -> Tensor:
        end = layout.is_end(self._flat_cost, self._index).reshape(self.cost.shape)
        within = torch.arange(self.event_shape[1], device=self.device) < self.lengths[..., 1, None, None]
        return end.any(-1, keepdim=True) & within if self.open_end else end

    def _check(self) -> None:
        """Raise the errors that the sweeps over cells raise about the cost and the lengths."""
        if is_readable(self.cost):
            layout.check((self._flat_cost,), self._index)

    def _to_paths(self, found: Tensor) -> Tensor:
        rows, columns = self.event_shape
        flat = torch.zeros((*found.shape[:-1], rows * columns + 1), dtype=self.dtype, device=self.device)
        cells = torch.where(found < 0, rows * columns, found)
        return flat.scatter(-1, cells, 1)[..., :-1].reshape(*found.shape[:-1], rows, columns)

    def _pairs_of(self, cells: Tensor) -> Tensor:
        columns = self.event_shape[1]
        pairs = torch.stack((cells // columns, cells % columns), -1)
        return torch.where(cells.unsqueeze(-1) < 0, -1, pairs)

    def _is_path(self, value: Tensor) -> Tensor:
        # A run in each row of the pair, which begins where that of the row before ends, or next to it.
        rows, columns = self.event_shape
        batch = torch.broadcast_shapes(value.shape[:-2], self.batch_shape)
        value = value.expand(*batch, rows, columns)
        visited = value == 1
        count = visited.sum(-1)
        first = visited.to(torch.uint8).argmax(-1)
        last = columns - 1 - visited.flip(-1).to(torch.uint8).argmax(-1)
        length_a, length_b = self.lengths.unbind(-1)
        within = torch.arange(rows, device=self.device) < length_a.unsqueeze(-1)
        runs = torch.where(within, (count > 0) & (last - first + 1 == count), count == 0).all(-1)
        move = first[..., 1:] - last[..., :-1]
        linked = ((move == 0) | (move == 1) | ~within[..., 1:]).all(-1)
        end = last.gather(-1, (length_a - 1).clamp(0, rows - 1).expand(batch).unsqueeze(-1)).squeeze(-1)
        ends = end < length_b if self.open_end else end == length_b - 1
        begins = (first[..., 0] == 0) | self.open_begin
        return runs & linked & ends & begins & (visited | (value == 0)).flatten(-2).all(-1)

    def _same_graph(self, other: PathDistribution) -> bool:
        return (
            isinstance(other, DTW)
            and self.batch_shape == other.batch_shape
            and self.event_shape == other.event_shape
            and self.lengths.equal(other.lengths)
            and (self.open_begin, self.open_end) == (other.open_begin, other.open_end)
        )

    # --- targets

    def _allowed(self, name: str, target: Tensor, ignore_index: int) -> Tensor:
        if target.dtype == torch.int64 and target.shape[-1:] == (2,):
            if target.shape[:-2] != self.batch_shape or target.ndim < 2:
                needed = f"({', '.join(map(str, self.batch_shape))}{', ' if self.batch_shape else ''}L, 2)"
                raise ValueError(f"{name} must have shape {needed} for index pairs, got {tuple(target.shape)}")
            allowed = self.alignment_to_path(target) > 0
        else:
            allowed = super()._allowed(name, target, ignore_index)
        # Cells past the lengths are ignored; those outside of the band are not.
        rows, columns = (torch.arange(size, device=self.device) for size in self.event_shape)
        of_x, of_y = (own[..., None, None] for own in self.lengths.unbind(-1))
        return allowed & (rows.unsqueeze(-1) < of_x) & (columns < of_y)

    def _target_forms(self) -> list[str]:
        return [*super()._target_forms(), "(..., L, 2) int64"]

    def _right(self, allowed: Tensor) -> Tensor:
        return allowed | ~self._inside

    def _is_used(self, ndim: int) -> Tensor:
        return self._inside

    def _edges_within(self, allowed: Tensor) -> Tensor:
        """The moves of the alignment, if the cells are one; else all moves within them."""
        cells = allowed.flatten(-2)
        into = cells.index_select(-1, layout.grid(*self.event_shape, self.device).cell)
        path = allowed.float()
        is_one = self._is_path(path).unsqueeze(-1)
        return torch.where(is_one, layout.from_cells(path) > 0, torch.cat((into, cells), -1))

    def _restricted_value(self, allowed: Tensor) -> Tensor:
        whole = self._is_path(allowed.float())
        cost = promote_half(self.cost).masked_fill(~self._inside, math.inf).masked_fill(~allowed, 0)
        if self._has_own_moves:
            paid = widen(inner(layout.from_cells(allowed.to(cost.dtype)), self._payments(cost)))
        else:
            paid = cost.flatten(-2).sum(-1, dtype=wide_dtype(self.device))
        alone = self._value_alone(paid, allowed.flatten(-2).sum(-1) + self.open_end)
        if is_readable(whole) and bool(whole.all()):
            return alone
        return torch.where(whole, alone, super()._restricted_value(allowed))

    def _divergence(self, path: Tensor, y: Tensor) -> Tensor:
        """Σ KL(Y ‖ E) of each cell as a coin, visited or not."""
        finfo = torch.finfo(path.dtype)
        return -torch.where(y > 0, path.clamp(finfo.tiny, 1).log(), torch.log1p(-path.clamp(0, 1 - finfo.eps)))

    def _why_impossible(self, name: str, allowed: Tensor, impossible: Tensor) -> str:
        batch = impossible.nonzero()[0].tolist()
        closed = allowed & (~self._inside | (self.cost == math.inf))
        at = closed[tuple(batch)].nonzero().tolist()
        place = (f" at cell {tuple(at[0])}" if at else "") + of_sequence(batch)
        return f"{name} must be an alignment that p can take, but it has none of finite cost{place}"


_KINDS = ("diagonal", "up", "left")


@lru_cache
def _lattice(has_weights: bool, open_begin: bool, open_end: bool) -> Lattice:
    scores = [cell(kind) if has_weights else scalar(kind) for kind in _KINDS]
    moves = [Move(di, dj, score=score) for (di, dj), score in zip(((1, 1), (1, 0), (0, 1)), scores, strict=True)]
    start, end = (along_row(0) if is_open else corner(0) for is_open in (open_begin, open_end))
    return Lattice(moves, node=cell("cost"), start=start, end=end)


@lru_cache(maxsize=8)
def _graph(rows: int, columns: int, device: torch.device) -> DAG:
    return DAG._of_grid(layout.grid(rows, columns, device))

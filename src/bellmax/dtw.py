"""Alignments of two series: the smoothed dynamic time warping operator (section 4.2 and appendix B.3 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributions import kl_divergence, register_kl

import bellmax.autograd as autograd
from bellmax.backends.reference.dtw import band_of, check, grid, is_end
from bellmax.dag import DAGPaths
from bellmax.distribution import PathDistribution
from bellmax.inputs import (
    Lengths,
    Numbers,
    answers_near_misses,
    as_floating,
    as_lengths,
    as_pair,
    as_tensor,
    check_tensor,
)
from bellmax.regularizers import (
    Gamma,
    Hard,
    Negentropy,
    Regularizer,
    is_readable,
    multiply_by_gamma,
    promote_half,
)

StepWeights = Sequence[float] | Tensor


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
            \\|i − j\\| ≤ band; a path always remains.
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
    _own_tensors: ClassVar[dict[str, int]] = {"lengths": 1, "step_weights": 1, "step_penalties": 1}

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
        if band is not None and not band >= 0:
            raise ValueError(f"band must be at least 0, got {band}")
        self.band = math.inf if band is None else float(band)
        self.lengths = self._check_lengths(lengths)
        self.step_weights = self._check_steps("step_weights", step_weights)
        self.step_penalties = self._check_steps("step_penalties", step_penalties)
        self.open_begin, self.open_end = open_begin, open_end

    def _check_lengths(self, lengths: tuple[Lengths, Lengths] | None) -> Tensor:
        """(..., 2)."""
        if lengths is None:
            return torch.tensor(self.event_shape, device=self.device).expand(*self.batch_shape, 2)
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
    def value(self) -> Tensor:
        """DTW_Ω, of the batch shape: concave in the cost, differentiable to any order. +∞ where no path exists."""
        return self._value()

    @property
    def expected_path(self) -> Tensor:
        """The soft alignment ∇DTW_Ω: the probability of each cell, (..., N, M). Differentiable.

        It is the gradient of ``value`` in the cost, but for ``step_weights``, where it is still the probability.
        """
        return self._path().to(self.dtype)

    def directional_derivative(self, z: Tensor) -> Tensor:
        """The derivative of ``value`` along z, which broadcasts to the cost; of the batch shape."""
        if self._has_own_moves:
            z = self._like("z", z, self.cost)
            return self._edges().directional_derivative(self._moves(z, constant=False))
        return super().directional_derivative(z)

    def hessian_product(self, z: Tensor) -> Tensor:
        """∇²DTW_Ω z, of the cost's shape, to which z broadcasts."""
        if self._has_own_moves:
            z = self._like("z", z, self.cost)
            product = self._edges().hessian_product(self._moves(z, constant=False))
            return self._cells_of(-product * self._factors(product.dtype)).to(self.dtype)
        return super().hessian_product(z)

    # --- alignments

    def best_alignment(self) -> Tensor:
        """The index pairs (i, j) of the alignment of least cost, (..., N + M − 1, 2) int64, padded with −1."""
        if self._has_own_moves:
            return self._pairs_of(self._to_cells(self.best_path()))
        hard = self._with(self._detached(), Hard())
        return self._pairs_of(hard._sample(1).reshape(*self.batch_shape, self._num_choices + 1))

    def sample_alignments(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Index pairs drawn from the distribution, (*sample_shape, ..., N + M − 1, 2) int64, padded with −1."""
        shape = torch.Size(sample_shape)
        if self._has_own_moves:
            return self._pairs_of(self._to_cells(self.sample(shape)))
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

    def best_path(self) -> Tensor:
        """The alignment of least cost as a 0/1 tensor of the cost's shape; zeros where none exists."""
        if self._has_own_moves:
            return self._cells_of(self._edges(detached=True).best_path()).to(self.dtype)
        return super().best_path()

    @property
    def mode(self) -> Tensor:
        """The most probable alignment as a 0/1 tensor. It is the best path for negentropy, not in general."""
        if type(self.omega) is Negentropy:
            return self.best_path()
        return self._cells_of(self._edges(detached=True).mode).to(self.dtype)

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """The k alignments of least cost: costs (..., k), ascending, and paths (..., k, N, M).

        Past the number of alignments, costs are +∞ and paths 0. Costs are differentiable.
        """
        scores, paths = self._edges().topk(k)
        return -scores, self._cells_of(paths).to(self.dtype)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Alignments drawn from the distribution: (*sample_shape, ..., N, M), 0/1; zeros where none exists."""
        if self._has_own_moves:
            return self._cells_of(self._edges(detached=True).sample(sample_shape)).to(self.dtype)
        return super().sample(sample_shape)

    def log_prob(self, path: Tensor) -> Tensor:
        """Log-probability of ``path``, a 0/1 tensor that broadcasts to (..., N, M). Differentiable in cost and γ."""
        return self._edges().log_prob(self._edges_of(self._check_path(path)))

    def entropy(self) -> Tensor:
        """Shannon entropy of the alignment, of the batch shape. Differentiable in the cost and γ."""
        return self._edges().entropy()

    @property
    def log_num_paths(self) -> Tensor:
        """Logarithm of the number of alignments of finite cost, of the batch shape, float64."""
        if self._has_own_moves:
            return self._edges(detached=True).log_num_paths
        self._check()
        return -self._unweighted(Negentropy()).value

    def support_paths(self, max_paths: int = 1000) -> tuple[Tensor, Tensor]:
        """Every alignment of positive probability, most probable first: paths (K, ..., N, M), probabilities (K, ...).

        K is the largest count in the batch; the others are padded with 0. More than ``max_paths`` is an error.
        """
        paths, probabilities = self._edges(detached=True).support_paths(max_paths)
        return self._cells_of(paths).to(self.dtype), probabilities

    # --- the graph with an edge for every move: what does not follow from the cells alone

    @property
    def _has_own_moves(self) -> bool:
        """Whether moves into the same cell may differ, or ends are open: the sweeps over cells do not know that."""
        return self.open_begin or self.open_end or self.step_weights is not None or self.step_penalties is not None

    def _edges(self, detached: bool = False) -> DAGPaths:
        """The distribution over the same alignments as paths of a graph, whose events (E,) are moves."""
        self._check()
        cost = promote_half(self.cost.detach() if detached else self.cost)
        cost = cost.masked_fill(~self._inside, math.inf)
        moves = self._moves(cost, constant=True)
        ends = torch.zeros_like(cost).masked_fill(~self._may_end, -math.inf)
        g = grid(*self.event_shape, self.device)
        start = torch.arange(self.event_shape[1], device=self.device) > (math.inf if self.open_begin else 0)
        first, rest = moves[..., : start.shape[0]], moves[..., start.shape[0] : g.cell.shape[0]]
        weights = torch.cat((-first.masked_fill(start, math.inf), -rest, ends.flatten(-2)), -1)
        paths = DAGPaths(g.dag, weights, omega=self.omega)
        paths.backend = self.backend
        return paths

    def _moves(self, cells: Tensor, constant: bool) -> Tensor:
        """Numbers of cells (..., N, M) as what each move pays, (..., E), penalties included if ``constant``."""
        g = grid(*self.event_shape, self.device)
        moves = cells.flatten(-2).index_select(-1, g.cell)
        columns = self.event_shape[1]
        between = g.kind[columns:]
        if self.step_weights is not None:
            factors = self.step_weights.index_select(-1, between)
            rest = moves[..., columns:]
            infinite = rest == math.inf
            rest = torch.where(infinite, rest, rest.masked_fill(infinite, 0) * factors)
            moves = torch.cat((moves[..., :columns], rest), -1)
        if self.step_penalties is not None and constant:
            penalties = self.step_penalties.index_select(-1, between)
            moves = torch.cat((moves[..., :columns], moves[..., columns:] + penalties), -1)
        return torch.cat((moves, torch.zeros_like(cells).flatten(-2)), -1)

    def _factors(self, dtype: torch.dtype) -> Tensor:
        """The derivative of what a move pays in the cost of its cell, (..., E)."""
        return self._moves(torch.ones(self.event_shape, dtype=dtype, device=self.device), constant=False)

    def _cells_of(self, edges: Tensor) -> Tensor:
        """(..., E) summed over the moves into each cell, (..., N, M)."""
        g = grid(*self.event_shape, self.device)
        cells = edges.new_zeros((*edges.shape[:-1], self.event_shape.numel()))
        summed = cells.index_add(-1, g.cell, edges[..., : g.cell.shape[0]])
        return summed.reshape(*edges.shape[:-1], *self.event_shape)

    def _edges_of(self, path: Tensor) -> Tensor:
        """The moves (..., E) that a path (..., N, M) takes, as a 0/1 tensor."""
        before = torch.nn.functional.pad(path, (1, 0, 1, 0))
        up, left = before[..., :-1, 1:] * path, before[..., 1:, :-1] * path
        diagonal = path - up - left  # the start counts as one
        g = grid(*self.event_shape, self.device)
        kinds = torch.stack((diagonal, up, left), -1).flatten(-3)
        moves = kinds.index_select(-1, 3 * g.cell + g.kind)
        later = torch.nn.functional.pad(path, (0, 1, 0, 1))
        ends = path - torch.maximum(torch.maximum(later[..., 1:, :-1], later[..., :-1, 1:]), later[..., 1:, 1:]) * path
        return torch.cat((moves, ends.flatten(-2)), -1)

    def _unweighted(self, omega: Regularizer) -> DTW:
        closed = self.cost.detach() == math.inf
        return self._with((torch.zeros_like(self.cost, dtype=torch.float64).masked_fill(closed, math.inf),), omega)

    # --- what the base asks for

    @property
    def _index(self) -> tuple[Tensor, ...]:
        return self._index_with(keep=1)

    def _index_with(self, keep: int) -> tuple[Tensor, ...]:
        lengths = self.lengths.reshape(-1, 2)
        pairs = lengths.shape[0]
        band = torch.full((pairs,), self.band, dtype=torch.float64, device=self.device)
        return lengths, band, torch.empty((pairs, keep), dtype=torch.bool, device=self.device)

    def _is_value_enough(self) -> bool:
        """Whether nobody can ask for a derivative of the value, so that no tape is needed."""
        if not torch.is_grad_enabled():
            return forward_ad._current_level < 0
        gamma = self.omega.gamma
        wanted = self.cost.requires_grad or (isinstance(gamma, Tensor) and gamma.requires_grad)
        return not (wanted or forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active())

    @property
    def _num_choices(self) -> int:
        return self.event_shape[0] + self.event_shape[1] - 2

    @property
    def _inside(self) -> Tensor:
        """(..., N, M): the cells within the lengths and the band."""
        band = torch.full(self.batch_shape, self.band, dtype=torch.float64, device=self.device)
        return band_of(self.lengths, band, *self.event_shape)

    @property
    def _may_end(self) -> Tensor:
        end = is_end(self.lengths, *self.event_shape)
        within = torch.arange(self.event_shape[1], device=self.device) < self.lengths[..., 1, None, None]
        return end.any(-1, keepdim=True) & within if self.open_end else end

    def _check(self) -> None:
        """What the sweeps over cells would say of the cost and the lengths."""
        if is_readable(self.cost):
            check((self._flatten(self.cost, 2),), self._index)

    def _value(self) -> Tensor:
        if self._has_own_moves:
            value = -self._edges().value
            if self.open_end:
                return value
            # The graph has one more node than the grid, the end, with a single parent.
            vertex = self.omega.penalty(value.new_ones(1, dtype=torch.float64)).to(value.dtype)
            shift = multiply_by_gamma(vertex.expand(self.batch_shape), self.omega.gamma)
            return torch.where(value.isinf(), value, value - shift)
        if self._cache or not self._is_value_enough():
            return super()._value()
        theta = self._flat_theta()
        value, _ = autograd.forward(self._program, theta, self._index_with(keep=0))
        return multiply_by_gamma(value.reshape(self.batch_shape), self.omega.gamma)

    def _path(self) -> Tensor:
        return self._cells_of(self._edges()._path()) if self._has_own_moves else super()._path()

    def _finite_scores(self) -> tuple[Tensor, ...]:
        if not isinstance(self.omega.gamma, Tensor):
            return self._scores
        return (self.cost.masked_fill(~self._inside, 0),)

    def _to_paths(self, found: Tensor) -> Tensor:
        rows, columns = self.event_shape
        flat = torch.zeros((*found.shape[:-1], rows * columns + 1), dtype=self.dtype, device=self.device)
        cells = torch.where(found < 0, rows * columns, found)
        return flat.scatter(-1, cells, 1)[..., :-1].reshape(*found.shape[:-1], rows, columns)

    def _to_cells(self, path: Tensor) -> Tensor:
        """The cells i·M + j of a path (..., N, M), from the first to the last, padded with −1: (..., N + M − 1)."""
        count = self.event_shape.numel()
        cells = torch.where(path.flatten(-2) > 0, torch.arange(count, device=self.device), count)
        cells = cells.sort(-1).values[..., : self._num_choices + 1]
        return torch.where(cells == count, -1, cells)

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


@register_kl(DTW, DTW)  # type: ignore[untyped-decorator]
def _kl_divergence(p: DTW, r: DTW) -> Tensor:
    if not p._same_graph(r):
        raise ValueError("kl_divergence needs two distributions over the alignments of the same pairs")
    divergence: Tensor = kl_divergence(p._edges(), r._edges())
    return divergence

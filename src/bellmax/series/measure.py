"""The measure of a pair of series: its cost, band, Ω, divergence and moves, and the backend that was requested."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from bellmax.backends import BACKENDS
from bellmax.backends.choice import backend_for, requested_backend, restored_request
from bellmax.backends.fused import FusedKernels
from bellmax.inputs import check_band, check_choice
from bellmax.modes import is_checked, is_transformed, needs_grad
from bellmax.programs.table import WARPING
from bellmax.regularizers import Negentropy, Regularizer, with_gamma
from bellmax.series.costs import COSTS, Cost, broadcast, pairwise
from bellmax.structures.dtw import DTW, StepWeights
from bellmax.tensors import Gamma

_DIVERGENCES = ("debiased", "sharp", "mean_cost")


class Moves(NamedTuple):
    """The arguments of :class:`DTW` that change its moves or ends."""

    step_weights: StepWeights | None = None
    step_penalties: StepWeights | None = None
    open_begin: bool = False
    open_end: bool = False

    @property
    def are_plain(self) -> bool:
        """True if all moves cost the same and the ends are closed."""
        has_weights = self.step_weights is not None or self.step_penalties is not None
        return not (has_weights or self.open_begin or self.open_end)


_PLAIN_MOVES = Moves()


class Measure(NamedTuple):
    """A function f of two series: DTW_Ω, or the term f(x, y) of a divergence f(x, y) − f(x, x)/2 − f(y, y)/2.

    ``backend`` is the name that was requested where the measure was made, or None. Workers, checkpoints and higher
    derivatives request it again by :meth:`on_its_backend`.
    """

    cost: Cost
    band: float | None
    omega: Regularizer
    divergence: str | None
    moves: Moves
    backend: str | None

    @property
    def is_value(self) -> bool:
        """True if f is DTW_Ω, not the cost of an expected alignment."""
        return self.divergence is None or self.divergence == "debiased"

    @property
    def gamma_shape(self) -> torch.Size:
        return self.omega.gamma.shape if isinstance(self.omega.gamma, Tensor) else torch.Size()

    @property
    def may_require_grad(self) -> bool:
        """True if f may have a gradient in something other than the series: γ, moves, or a parameter of the cost."""
        tensors = (self.omega.gamma, *self.moves)
        return callable(self.cost) or any(isinstance(t, Tensor) and t.requires_grad for t in tensors)

    def on_its_backend(self) -> AbstractContextManager[None]:
        """Request the backend of this measure, in whatever thread or process this is called."""
        return restored_request(self.backend)

    def fused_kernels(self, device: torch.device) -> FusedKernels:
        """The fused kernels of the backend that runs this measure on a device."""
        return BACKENDS[backend_for(WARPING.name, device, self.omega.kernel)].fused

    # --- γ

    def with_number_gamma(self, series: Tensor) -> Measure:
        """Replace γ by a number, if γ is a scalar tensor that needs no gradient and can be read without waiting."""
        gamma = self.omega.gamma
        if not isinstance(gamma, Tensor) or gamma.ndim or is_transformed(gamma) or needs_grad(gamma):
            return self
        return self.with_gamma(gamma.item()) if is_checked(gamma) and self.keeps_dtype(series) else self

    def keeps_dtype(self, series: Tensor) -> bool:
        """True if f has the dtype of the series: a γ of a wider dtype widens it."""
        gamma = self.omega.gamma
        return not isinstance(gamma, Tensor) or torch.promote_types(series.dtype, gamma.dtype) == series.dtype

    def with_gamma(self, gamma: Gamma) -> Measure:
        return self._replace(omega=with_gamma(self.omega, gamma))

    # --- distributions over alignments

    def alignments(
        self, x: Tensor, y: Tensor, lengths_x: Tensor | None, lengths_y: Tensor | None
    ) -> tuple[DTW, Tensor]:
        """The distribution over alignments, and the cost of matching each two elements, (..., N, M)."""
        p = self.over(pairwise(x, y, self.cost), lengths_x, lengths_y)
        if self.divergence != "mean_cost":
            return p, p.cost
        free = torch.zeros_like(p.cost).masked_fill(p.cost.detach() == math.inf, math.inf)
        return p._with((free,), Negentropy()), p.cost

    def over(self, cost: Tensor, lengths_x: Tensor | None, lengths_y: Tensor | None) -> DTW:
        """The distribution over alignments, from costs (..., N, M)."""
        length_shapes = [lengths.shape for lengths in (lengths_x, lengths_y) if lengths is not None]
        batch = broadcast(cost.shape[:-2], self.gamma_shape, *length_shapes)
        cost = cost.expand(*batch, *cost.shape[-2:])
        lengths = None
        if length_shapes:
            lengths = (
                cost.shape[-2] if lengths_x is None else lengths_x.expand(batch),
                cost.shape[-1] if lengths_y is None else lengths_y.expand(batch),
            )
        moves = {} if self.moves.are_plain else self.moves._asdict()
        return DTW(cost, lengths=lengths, band=self.band, omega=self.omega, **moves)

    def expected_matches(self, x: Tensor, y: Tensor, lengths_x: Tensor | None, lengths_y: Tensor | None) -> Tensor:
        """The expected number of cells of an alignment of each pair; 1 for pairs without an alignment."""
        alignments, _ = self.alignments(x, y, lengths_x, lengths_y)
        matches = alignments.expected_path.flatten(-2).sum(-1)
        return matches.masked_fill(matches == 0, 1)


def measure_of(
    cost: Cost, band: float | None, omega: Regularizer, divergence: str | None, moves: Moves = _PLAIN_MOVES
) -> Measure:
    """Check the arguments of a measure, and note the backend that is requested now."""
    if not callable(cost):
        check_choice("cost", cost, COSTS, "a function or ")
    if divergence is not None:
        check_choice("divergence", divergence, _DIVERGENCES, "None or ")
    check_band(band)
    return Measure(cost, band, omega, divergence, moves, requested_backend())

"""Fused kernels: whole jobs in one call, where the sweeps would need several calls or more memory.

All fused kernels have the same interface, :class:`FusedKernel`: they take a problem, which is a named tuple, and
return a result. A backend lists its fused kernels in :class:`FusedKernels`. Callers use the sweeps instead if an entry
is None, if the kernel does not support the problem, or if it declines the numbers of the problem.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from bellmax.regularizers import Kernel
from bellmax.tensors import Tensors

_Problem = TypeVar("_Problem", contravariant=True)
_Result = TypeVar("_Result", covariant=True)
_Saved = TypeVar("_Saved", contravariant=True)


class FusedKernel(Protocol[_Problem, _Result]):
    """A kernel that solves one kind of problem, on tensors without an autograd graph."""

    def supports(self, problem: _Problem) -> bool:
        """True if the kernel can solve problems of these shapes and dtypes, under this Ω. Reads no tensor."""
        ...

    def run(self, problem: _Problem) -> _Result | None:
        """Solve a problem that the kernel supports; None if the kernel declines its numbers, such as NaN."""
        ...


class DifferentiableKernel(FusedKernel[_Problem, _Result], Protocol[_Problem, _Result, _Saved]):
    """A fused kernel with a first derivative."""

    def vjp(self, problem: _Problem, saved: _Saved, grad: Tensor) -> Tensors:
        """Gradients of ⟨grad, result⟩ in the inputs of the problem, from tensors of the result that were saved."""
        ...


# --- chains


class LabelledChain(NamedTuple):
    """A scored chain at γ = 1 and a sequence of labels for each member of the batch."""

    theta: Tensors
    """Emissions (B, T, S), transitions, start and end."""
    lengths_and_mask: Tensors
    """Integer tensors, as for a chain; empty if all steps count."""
    labels: Tensor
    """(B, T) int64."""
    ignored: int
    """A label that marks positions to skip, for which the kernel declines."""


class LabelScores(FusedKernel[LabelledChain, Tensor], Protocol):
    """Scores (B,) of the labels. Declines unknown labels, ignored labels and infinite scores."""

    def subtract_vjp(self, gradients: Tensors, problem: LabelledChain, grad: Tensor) -> None:
        """Subtract the gradients of ⟨grad, scores⟩ from ``gradients``, which have the shapes of θ, in place."""
        ...


class TwoStateChain(NamedTuple):
    """A scored chain of two states at γ = 1, whose batch shares all scores but the emissions."""

    theta: Tensors
    """Emissions (B, T, 2), transitions, start and end."""
    lengths_and_mask: Tensors
    """Integer tensors, as for a chain; empty if all steps count."""
    omega: Kernel


class AttentionScores(NamedTuple):
    """Scores of keys for each query, and the transitions between ignoring a key (0) and attending to it (1)."""

    scores: Tensor
    """(..., Q, K), or (..., H, Q, K) for H heads."""
    transitions: Tensor
    """(2, 2), or (H, 2, 2) for H heads."""
    lengths_and_mask: Tensors
    """For each group of adjacent queries that shares its keys: integer tensors, as for a chain; empty if all keys
    count. Heads share them."""
    scale: float
    """1/γ."""
    omega: Kernel


class AttentionWeights(NamedTuple):
    """Attention weights, and the sums by which they were normalized."""

    weights: Tensor
    """In the shape of the scores."""
    totals: Tensor
    """The sum of the marginals of each query, (H, … · Q), with H = 1 without heads."""


# --- pairs of series


class LongPair(NamedTuple):
    """Two series whose cost matrix should not exist as a whole."""

    x: Tensor
    """(N, D)."""
    y: Tensor
    """(M, D)."""
    costs: Callable[..., Tensor]
    """Maps rows of x, rows of y and ``parameters`` to a part of the cost matrix, divided by γ."""
    parameters: Tensors
    """Tensors that all parts of the cost matrix depend on."""
    band: float
    """Half the width of the Sakoe–Chiba band, in steps; infinite without a band."""
    saves: bool
    """True if :meth:`DifferentiableKernel.vjp` will be called."""
    omega: Kernel


class LongPairTape(NamedTuple):
    """The numbers from which the gradient of a long pair computes its chunks again."""

    halo_rows: Tensors
    """The row of values above each chunk of rows; empty unless the problem ``saves``."""
    uses_products: bool
    """True if the values were computed as products in exp space."""


class ShortPairs(NamedTuple):
    """Pairs out of two collections of short series; matching two elements costs scale · Σ |x − y|^power."""

    x: Tensor
    """(K, N, D), finite."""
    y: Tensor
    """(L, M, D), finite."""
    lengths: tuple[Tensor, Tensor]
    """(K,) and (L,)."""
    pairs: tuple[Tensor, Tensor]
    """The series of x and the series of y of each pair, (P,) and (P,)."""
    power: int
    scale: float
    """1/γ."""
    omega: Kernel


class Concatenated(NamedTuple):
    """The series of a collection, one after the other."""

    elements: Tensor
    """(total length, D), finite."""
    offsets: Tensor
    """The start of each series, and the end of the last, (K + 1,) int64."""


class PairCosts(NamedTuple):
    """Pairs of series whose elements cost Σ_d |x_id − y_jd|^power, power 1 or 2."""

    x: Tensor
    """(B, N, D)."""
    y: Tensor
    """(B, M, D)."""
    power: int


class NeighborSearch(NamedTuple):
    """A search for the k nearest candidates of each query under hard DTW; a match costs Σ |x − y|^power."""

    queries: Concatenated
    """For speed, queries of equal length should be adjacent."""
    candidates: Concatenated
    excluded: Tensor
    """The index of a candidate that a query must not find, or −1, (Q,) int64."""
    k: int
    power: int
    band: float
    """Half the width of the Sakoe–Chiba band, in steps; infinite without a band."""
    omega: Kernel


class Nearest(NamedTuple):
    """The nearest candidates of each query, nearest first."""

    distances: Tensor
    """(Q, k)."""
    indices: Tensor
    """(Q, k) int64."""
    cells: Tensor
    """The number of cells of cost matrices that were computed, (Q,) int64."""


@dataclass(frozen=True)
class FusedKernels:
    """The fused kernels of a backend; None for each that it does not have."""

    label_scores: LabelScores | None = None
    """Scores (B,) of labels in a scored chain."""
    chain_marginals: DifferentiableKernel[TwoStateChain, Tensor, None] | None = None
    """Marginals (B, T, 2) of a chain of two states."""
    attention_weights: DifferentiableKernel[AttentionScores, AttentionWeights, AttentionWeights] | None = None
    """Weights of attention to segments."""
    long_pairs: DifferentiableKernel[LongPair, tuple[Tensor, LongPairTape], LongPairTape] | None = None
    """DTW at γ = 1 of a pair of series, a number, from chunks of its cost matrix; and the tape for the gradient."""
    short_pairs: FusedKernel[ShortPairs, Tensor] | None = None
    """DTW (P,) at γ = 1 of pairs of short series."""
    pair_costs: DifferentiableKernel[PairCosts, Tensor, None] | None = None
    """Costs (B, N, M) of matching the elements of small pairs of series."""
    neighbors: FusedKernel[NeighborSearch, Nearest] | None = None
    """Nearest neighbors under hard DTW."""

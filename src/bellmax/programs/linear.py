"""Graphs whose edge weights are sums of entries of several tensors: recursions written in Python, for example.

θ is the score tensors (B or 1, *own). The entries of all scores are numbered in order: the entries of the first score
in row-major order, then the entries of the second score, and so on. A *form* is a linear function of the entries, Σ
coefficient · entry. The weight of an edge is a form, which edges may share.

``index`` is the index of a hypergraph with shared weights, see :mod:`bellmax.programs.graph`, and four more tensors:

- offset, tail, edge, group, tail_offset, and form (E) int32: the number of a slot's form;
- term_offset (F + 1) int32: the terms of form f are term_offset[f] … term_offset[f + 1] − 1;
- entry (P) int32: the entry of each term;
- coefficient (P) float64: the coefficient of each term. Empty if all coefficients are 1;
- form_of_edge (E) int64: the number of each edge's form, in the caller's order of edges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bellmax.programs.graph import GraphProgram
from bellmax.tensors import Tensors

PREFIX = "linear:"


class LinearGraphProgram(GraphProgram):
    """The derivations of a hypergraph whose edge weights are linear functions of the scores.

    Args:
        names: The names of the scores.
        has_extra_root: True if the last node has a single edge and is not a node of the recursion.
        longest_path: A function that returns the largest number of edges of a derivation.

    """

    def __init__(
        self, names: Sequence[str], has_extra_root: bool, longest_path: Callable[[], int] | None = None
    ) -> None:
        super().__init__(longest_path, max_count=math.inf)
        self._has_extra_root = has_extra_root
        self.scores = tuple(names)
        self.name = self.paths = f"{PREFIX}{int(has_extra_root)}:{','.join(names)}"

    def extra_nodes(self, theta: Tensors, index: Tensors) -> int | Tensor:
        return int(self._has_extra_root)

    def engine_index(self, theta: Tensors, index: Tensors) -> Tensors:
        return index[:5]

    def used(self, theta: Tensors, index: Tensors) -> Sequence[Tensor | None]:
        is_used = torch.zeros(num_entries(theta), dtype=torch.bool, device=theta[0].device)
        is_used[index[7].long()] = True
        parts = is_used.split(_sizes(theta))
        return [part.reshape(1, *score.shape[1:]).expand(score.shape) for part, score in zip(parts, theta, strict=True)]

    def check(self, theta: Tensors, index: Tensors) -> None:
        super().check(theta, index)
        is_subtracted = torch.zeros(num_entries(theta), dtype=torch.bool, device=theta[0].device)
        is_subtracted[index[7][: index[8].numel()][index[8] < 0].long()] = True
        for name, score, part in zip(self.scores, theta, is_subtracted.split(_sizes(theta)), strict=True):
            bad = (score == -math.inf) & part.reshape(1, *score.shape[1:])
            if score.is_cpu and bool(bad.any()):
                batch, *event = bad.nonzero()[0].tolist()
                raise ValueError(
                    f"{name} must be finite where the program subtracts it, got an infinite score at {tuple(event)} of "
                    f"batch element {batch} (counted over all batch dimensions)"
                )

    # --- the weights of edges as a function of the scores

    def weights(self, theta: Tensors, index: Tensors) -> Tensor:
        terms = _times_coefficient(entries_of(theta).index_select(1, index[7]), index)
        forms = terms.new_zeros((len(terms), index[6].shape[0] - 1)).index_add(1, _form_of_term(index), terms)
        return forms.index_select(1, index[9])

    def onto_scores(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensors:
        return scores_of(self._onto_entries(edges, theta, index), theta)

    def _onto_entries(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        """Apply the transpose of :meth:`weights` to numbers of edges (..., E). The result is (..., entries)."""
        lead = edges.shape[:-1]
        forms = edges.new_zeros((*lead, index[6].shape[0] - 1)).index_add(-1, index[9], edges)
        terms = _times_coefficient(forms.index_select(-1, _form_of_term(index)), index)
        return edges.new_zeros((*lead, num_entries(theta))).index_add(-1, index[7].long(), terms)

    def best_by_entry(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        batch, own = len(edges), theta[0].shape[1:]
        forms = edges.new_full((batch, index[6].shape[0] - 1), -math.inf)
        forms = forms.scatter_reduce(1, index[9].expand_as(edges), edges, "amax")
        is_first = index[7] < own.numel()
        terms = forms.index_select(1, _form_of_term(index)[is_first])
        best = edges.new_full((batch, own.numel()), -math.inf)
        best = best.scatter_reduce(1, index[7][is_first].long().expand_as(terms), terms, "amax")
        return best.reshape(batch, *own)

    # --- paths

    def events(self, paths: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        own = theta[0].shape[1:]
        return self._onto_entries(paths, theta, index)[..., : own.numel()].reshape(*paths.shape[:2], *own)

    def by_edge(
        self, scores: Tensors, dims: Sequence[int], batch_shape: Sequence[int], index: Tensors
    ) -> tuple[Tensors, tuple[int, ...]] | None:
        return None

    def edges_of(self, event: Tensor, theta: Tensors, index: Tensors) -> Tensor | None:
        return None

    def is_path(self, event: Tensor, theta: Tensors, index: Tensors) -> Tensor | None:
        return None


def _sizes(theta: Tensors) -> list[int]:
    """The number of entries of each score."""
    return [score.shape[1:].numel() for score in theta]


def num_entries(theta: Tensors) -> int:
    """Return the number of entries of all scores."""
    return sum(_sizes(theta))


def entries_of(theta: Tensors) -> Tensor:
    """Return the entries of all scores, (B, entries)."""
    batch = theta[0].shape[0]
    flat = [s.reshape(len(s), size).expand(batch, size) for s, size in zip(theta, _sizes(theta), strict=True)]
    return torch.cat(flat, 1) if len(flat) > 1 else flat[0]


def scores_of(entries: Tensor, theta: Tensors) -> list[Tensor]:
    """Return numbers (B, entries) in the shapes of θ, summed over the batch for a score that it shares.

    The tensors are contiguous and share no memory, as the fake kernels of the operators say.
    """
    parts = entries.split(_sizes(theta), 1)
    shared = [part.sum(0, keepdim=True) if len(s) == 1 else part for part, s in zip(parts, theta, strict=True)]
    if len(shared) > 1:
        shared = [part.clone(memory_format=torch.contiguous_format) for part in shared]
    return [part.reshape(score.shape) for part, score in zip(shared, theta, strict=True)]


def _times_coefficient(terms: Tensor, index: Tensors) -> Tensor:
    return terms * index[8].to(terms.dtype) if index[8].numel() else terms


def _form_of_term(index: Tensors) -> Tensor:
    """The form of each term, (P,) int64."""
    counts = index[6].diff()
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=index[7].shape[0])


def linear_program_of(name: str) -> LinearGraphProgram:
    """Return the program with this name."""
    has_extra_root, _, names = name.removeprefix(PREFIX).partition(":")
    return LinearGraphProgram(names.split(","), has_extra_root == "1")
